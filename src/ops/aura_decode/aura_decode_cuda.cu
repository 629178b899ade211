#include "bittern/ops/aura_decode.h"
#include "cuda/aura_rows.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = AuraDecode;
using cuda::lane_index;
using cuda::RowRotation;
using cuda::RowTile;
using cuda::warp_index;

// ---- tuning ----

// Of a block of decode_by_lanes: what its registers allow.
template <class Tile>
constexpr int kMostWarps = Tile::kEach <= 64 ? 20 : 12;
constexpr int kPairCopies = 16;  // of the table of pairs of levels: 8 bytes meet each bank once
constexpr int kLevelCopies = 32;

struct Problem {
  const std::uint32_t* packed;
  const void* norms;
  const float* codebook;
  void* y;
  std::int64_t packed_stride, norm_stride, y_stride;  // in elements
  std::int64_t rows;
  RowRotation rotation;  // identity if y stays in rotated space
  DType element, norm_element;
  int bits, words;  // of a code; of a packed row

  __device__ float norm(std::int64_t row) const {
    return cuda::load_element(norms, norm_element, row * norm_stride);
  }
  // norm * codebook[code]
  __device__ void load(std::int64_t row, float* t) const {
    const std::uint32_t* from = packed + row * packed_stride;
    const float s = norm(row);
    for (int j = lane_index(); j < rotation.dim; j += 32) {
      const int word = j * bits / 32, at = j * bits % 32;
      std::uint32_t code = from[word] >> at;
      if (at + bits > 32) code |= from[word + 1] << (32 - at);
      t[j] = s * __ldg(codebook + (code & ((1u << bits) - 1)));
    }
  }
  __device__ void store(std::int64_t row, const float* t) const {
    for (int j = lane_index(); j < rotation.dim; j += 32)
      cuda::store_element(y, element, row * y_stride + j, t[j]);
  }
};

// ---- a lane to a row ----

// Shared memory of decode_by_lanes: levels; then for each warp its packed rows and its rows
// of y.
struct Layout {
  std::int64_t y_stride;         // in bytes
  std::uint32_t tiles, whole;    // all; those of rows without gaps, packed and of y: the first ones
  int warps;                     // offset in bytes
  int in_stride, y_stage, warp;  // bytes of a packed row; offset of y; bytes of a warp
};

// The levels of a lane's codes: `Codes` is what it reads of the lane's packed row.
template <class Tile, int kBits>
class Levels;

// Two codes, a byte, at once.
template <class Tile>
class Levels<Tile, 4> {
 public:
  static constexpr int kBytes = 256 * kPairCopies * sizeof(float2);
  __device__ Levels(char* table, const Problem& p)
      : mine_(table + lane_index() % kPairCopies * static_cast<int>(sizeof(float2))) {
    for (int i = static_cast<int>(threadIdx.x); i < 256 * kPairCopies;
         i += static_cast<int>(blockDim.x)) {
      const int byte = i / kPairCopies;
      reinterpret_cast<float2*>(table)[i] = {__ldg(p.codebook + byte % 16),
                                             __ldg(p.codebook + byte / 16)};
    }
  }
  struct Codes {
    std::uint32_t words[Tile::kChunks];
  };
  __device__ Codes read(const char* row) const {
    Codes codes;
    auto& words = codes.words;
    if constexpr (Tile::kRows == 32 && Tile::kChunks % 4 == 0) {
#pragma unroll
      for (int k = 0; k < Tile::kChunks; k += 4) {
        const uint4 four = reinterpret_cast<const uint4*>(row)[k / 4];
        words[k] = four.x, words[k + 1] = four.y, words[k + 2] = four.z, words[k + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int k = 0; k < Tile::kChunks; ++k)
        words[k] = reinterpret_cast<const std::uint32_t*>(row)[Tile::first_of_chunk(k) / 8];
    }
    return codes;
  }
  __device__ void look_up(const Codes& codes, float (&y)[Tile::kEach]) const {
#pragma unroll
    for (int i = 0; i < Tile::kEach; i += 2) {
      // Byte i / 2 % 4 of the word, times the 2^7 bytes of its entry.
      constexpr int kShift = 7;
      static_assert(kPairCopies * sizeof(float2) == 1 << kShift);
      const int at = 8 * (i / 2 % 4);
      const std::uint32_t word = codes.words[i / 8];
      const std::uint32_t entry =
          (at < kShift ? word << (kShift - at) : word >> (at - kShift)) & (0xffu << kShift);
      const float2 pair = *reinterpret_cast<const float2*>(mine_ + entry);
      y[i] = pair.x;
      y[i + 1] = pair.y;
    }
  }

 private:
  const char* mine_;
};

// Any number of bits.
template <class Tile>
class Levels<Tile, 0> {
 public:
  static constexpr int kBytes = 256 * kLevelCopies * sizeof(float);
  __device__ Levels(char* table, const Problem& p)
      : mine_(reinterpret_cast<const float*>(table) + lane_index()), bits_(p.bits) {
    for (int i = static_cast<int>(threadIdx.x); i < kLevelCopies << p.bits;
         i += static_cast<int>(blockDim.x))
      reinterpret_cast<float*>(table)[i] = __ldg(p.codebook + i / kLevelCopies);
  }
  struct Codes {
    std::uint32_t four[2 * Tile::kChunks];  // the low bits are four codes
  };
  __device__ Codes read(const char* row) const {
    Codes codes;
    const auto* words = reinterpret_cast<const std::uint32_t*>(row);
#pragma unroll
    for (int k = 0; k < Tile::kChunks; ++k) {
      // The chunk is `bits` bytes, in one to three words. A word past the row is not used.
      const int byte = Tile::first_of_chunk(k) / 8 * bits_;
      const std::uint32_t* at = words + byte / 4;
      const unsigned shift = 8 * static_cast<unsigned>(byte % 4);
      const unsigned low = __funnelshift_r(at[0], at[1], shift);
      const unsigned high = __funnelshift_r(at[1], at[2], shift);
      codes.four[2 * k] = low;
      codes.four[2 * k + 1] = __funnelshift_rc(low, high, static_cast<unsigned>(4 * bits_));
    }
    return codes;
  }
  __device__ void look_up(const Codes& codes, float (&y)[Tile::kEach]) const {
    const unsigned mask = (1u << bits_) - 1;
#pragma unroll
    for (int i = 0; i < Tile::kEach; ++i)
      y[i] = mine_[(codes.four[i / 4] >> i % 4 * bits_ & mask) * kLevelCopies];
  }

 private:
  const float* mine_;
  int bits_;
};

// Is a packed row, of 4 bits, whole pieces of 16 bytes? Then no piece's place is divided.
template <class Tile>
constexpr int kPackedBytes = Tile::template kRowBytes<std::uint8_t> / 2;
template <class Tile, int kBits>
constexpr bool kWholePieces = kBits == 4 && kPackedBytes<Tile> % 16 == 0;

template <class Tile, int kBits>
__global__ void __launch_bounds__(32 * kMostWarps<Tile>, 1)
    decode_by_lanes(const __grid_constant__ Problem p, const Layout layout) {
  char* const shared = cuda::dynamic_shared<char>();
  const Levels<Tile, kBits> levels(shared, p);
  const bool rotates = p.rotation.kind == Rotation::hadamard;
  const auto signs = Tile::Signs::of(rotates ? p.rotation.table : nullptr);
  char* const in = shared + layout.warps + warp_index() * layout.warp;
  char* const stage = in + layout.y_stage;

  const std::uint32_t warps = blockDim.x / 32, step = gridDim.x * warps;
  std::uint32_t tile = blockIdx.x * warps + static_cast<std::uint32_t>(warp_index());
  const auto rows_at = [&](std::int64_t row) {
    return static_cast<int>(p.rows - row < Tile::kRows ? p.rows - row : Tile::kRows);
  };
  // For one pass of the loop: see opaque().
  const auto lane_again = [] { return cuda::opaque(threadIdx.x % 32); };
  float norm = 0;  // of the rows fetched
  const auto fetch = [&](std::uint32_t tile) {
    if (tile >= layout.tiles) return;
    const std::int64_t row = std::int64_t{tile} * Tile::kRows;
    const int rows = rows_at(row);
    if constexpr (kWholePieces<Tile, kBits>) {
      constexpr int kBytes = kPackedBytes<Tile>;
      const auto* const packed = reinterpret_cast<const char*>(p.packed);
      if (tile < layout.whole) {
        Tile::template fetch_bytes<kBytes, kBytes | 16>(in, packed + row * kBytes, kBytes,
                                                        Tile::kRows, lane_again());
      } else {
        Tile::template fetch_bytes<kBytes, kBytes | 16>(in, packed + row * 4 * p.packed_stride,
                                                        4 * p.packed_stride, rows, lane_again());
      }
    } else {
      cuda::copy_rows_in(in, layout.in_stride, p.packed + row * p.packed_stride, p.packed_stride,
                         p.words, rows);
      cuda::copy_async_commit();
    }
    norm = Tile::row() < rows ? p.norm(row + Tile::row()) : 0.0f;
  };
  fetch(tile);
  __syncthreads();

  for (; tile < layout.tiles; tile += step) {
    cuda::copy_async_wait<0>();
    __syncwarp();
    const auto codes = levels.read(in + Tile::row() * layout.in_stride);
    const float s = norm;
    __syncwarp();
    fetch(tile + step);
    float y[Tile::kEach];
    levels.look_up(codes, y);
#pragma unroll
    for (float& v : y) v *= s;
    if (rotates) {
#pragma unroll
      for (float& v : y) v *= p.rotation.scale;
      Tile::template mix<true>(y);
      Tile::butterflies(y);
    }
    switch (p.element) {
      case DType::f16: Tile::template store<f16>(y, signs.again(), stage); break;
      case DType::bf16: Tile::template store<bf16>(y, signs.again(), stage); break;
      default: Tile::template store<float>(y, signs.again(), stage);
    }
    __syncwarp();
    const std::int64_t first = std::int64_t{tile} * Tile::kRows;
    const auto put_out = [&]<class X>(Type<X>) {
      constexpr int kBytes = Tile::template kRowBytes<X>;
      char* const to = static_cast<char*>(p.y);
      if (tile < layout.whole) {
        Tile::template put_out<X>(stage, to + first * kBytes, kBytes, Tile::kRows, lane_again());
      } else {
        Tile::template put_out<X>(stage, to + first * layout.y_stride, layout.y_stride,
                                  rows_at(first), lane_again());
      }
    };
    if (p.element == DType::f32) {
      put_out(Type<float>());
    } else {
      put_out(Type<bf16>());
    }
    __syncwarp();
  }
}

template <class Tile, int kBits>
Status run_by_lanes(const Problem& p, int device, Stream stream) {
  const auto align = [](int bytes) { return (bytes + 15) / 16 * 16; };
  Layout l{.y_stride = p.y_stride * static_cast<std::int64_t>(size_of(p.element))};
  const bool gaps = p.packed_stride != p.words || p.y_stride != p.rotation.dim;
  l.tiles = static_cast<std::uint32_t>((p.rows + Tile::kRows - 1) / Tile::kRows);
  l.whole = gaps ? 0 : static_cast<std::uint32_t>(p.rows / Tile::kRows);
  l.warps = Levels<Tile, kBits>::kBytes;
  l.in_stride = align(4 * p.words) | 16;
  l.y_stage = Tile::kRows * l.in_stride;
  l.warp = l.y_stage + Tile::kRows * (p.element == DType::f32 ? Tile::template kStageStride<float>
                                                              : Tile::template kStageStride<bf16>);
  const auto grid =
      cuda::tiles_grid(p.rows, Tile::kRows, kMostWarps<Tile>, l.warps, l.warp, device);
  return cuda::launch(Op::kName, decode_by_lanes<Tile, kBits>, grid, device, stream, p, l);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  const Rotation rotation = d.rotated ? Rotation::identity : d.rotation;
  const Problem p{.packed = a.packed.as<std::uint32_t>(),
                  .norms = a.norms.data,
                  .codebook = a.codebook.as<float>(),
                  .y = a.y.data,
                  .packed_stride = a.packed.row_stride(),
                  .norm_stride = a.norms.row_stride(),
                  .y_stride = a.y.row_stride(),
                  .rows = d.outer_size,
                  .rotation = cuda::row_rotation(rotation, d.axis_size, a.table.as<float>(), true),
                  .element = d.element,
                  .norm_element = d.norm_element(),
                  .bits = d.bits,
                  .words = static_cast<int>(packed_words(d.axis_size, d.bits))};
  const int device = a.y.device.index;
  const auto by_warps = [&] { return cuda::run_by_warps(Op::kName, p, device, stream); };
  if (p.rows < cuda::kFewRows * cuda::limits(device).multiprocessors) return by_warps();
  if (rotation == Rotation::dense) return cuda::run_dense(Op::kName, p, device, stream);
  if (!cuda::pieces_aligned(a.y, p.rows)) return by_warps();
  // Whole pieces must lie as such.
  if (d.bits == 4 && (p.words % 4 != 0 || cuda::pieces_aligned(a.packed, p.rows))) {
    return cuda::visit_tuned_dim<64>(
        d.axis_size, [&]<class Tile>(Tile) { return run_by_lanes<Tile, 4>(p, device, stream); },
        by_warps);
  }
  return cuda::visit_tuned_dim<128>(
      d.axis_size, [&]<class Tile>(Tile) { return run_by_lanes<Tile, 0>(p, device, stream); },
      by_warps);
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<AuraDecode>> aura_decode_cuda() { return kKernels; }

}  // namespace bittern
