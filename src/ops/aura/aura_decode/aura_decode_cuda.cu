#include "bittern/ops/aura_decode.h"
#include "ops/aura/aura_rows.cuh"
#include "ops/aura/aura_tile.cuh"
#include "ops/aura/aura_tiles.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = AuraDecode;
using cuda::lane_index;
using cuda::RowRotation;
using cuda::RowTile;
using cuda::warp_index;

// ---- tuning ----

// Of a block of decode_by_lanes. 20 leave 96 registers: too few for 4 bits (0.84 of copy speed,
// with 16 warps 0.89), enough for 8 (0.86, with 16 warps 0.84).
template <class Tile, int kBits>
constexpr int kMostWarps = Tile::kEach > 64 ? 12
                           : kBits == 8     ? 20
                                            : 16;
constexpr int kLevelCopies = 32;

struct Problem {
  const std::uint32_t* packed;
  const void* scales;
  const float* codebook;
  void* y;
  std::int64_t packed_stride, scale_stride, y_stride;  // in elements
  std::int64_t rows;
  RowRotation rotation;  // identity if y stays in rotated space
  DType element, scale_element;
  int bits, words;  // of a code; of a packed row

  // scale_of(scale_bits(row)) is a row's scale; nothing waits for the first step.
  __device__ std::uint32_t scale_bits(std::int64_t row) const {
    return scale_element == DType::f32
               ? static_cast<const std::uint32_t*>(scales)[row * scale_stride]
               : static_cast<const std::uint16_t*>(scales)[row * scale_stride];
  }
  __device__ float scale_of(std::uint32_t bits) const {
    return scale_element == DType::f32 ? __uint_as_float(bits)
                                       : cuda::load_math(f16{static_cast<std::uint16_t>(bits)});
  }
  // scale * codebook[code]
  __device__ void load(std::int64_t row, float* t) const {
    const std::uint32_t* from = packed + row * packed_stride;
    const float s = scale_of(scale_bits(row));
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

// Shared memory of decode_by_lanes: levels; rows of y of each warp; packed rows of each warp;
// TilesShared. Sizes in bytes.
struct Layout {
  std::int64_t y_stride;
  std::uint32_t tiles;
  int in_stride, in;  // of a packed row; of a tile of them
};

// The levels of a lane's codes: `Codes` is what it reads of the lane's packed row.
// 4 or 8 bits: a byte's codes at once. Its entry of the table is a copy of their levels for each
// bank or pair of banks.
template <class Tile, int kBits>
class Levels {
  static_assert(kBits == 4 || kBits == 8);
  static constexpr int kAtOnce = 8 / kBits, kCopies = 32 / kAtOnce;
  static constexpr int kShift = 7;          // an entry has 2^7 bytes
  static constexpr int kWords = kBits / 4;  // of a chunk

 public:
  static constexpr int kBytes = 256 << kShift;
  __device__ Levels(char* table, const Problem& p)
      : table_(table), mine_(static_cast<std::uint32_t>(lane_index() % kCopies * kAtOnce * 4)) {
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x); i < 256 * kCopies;
         i += static_cast<int>(blockDim.x)) {
      const int byte = i / kCopies;
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        reinterpret_cast<float*>(table)[i * kAtOnce + e] =
            __ldg(p.codebook + (byte >> e * kBits & ((1 << kBits) - 1)));
      }
    }
  }
  struct Codes {
    std::uint32_t words[Tile::kChunks * kWords];
  };
  __device__ Codes read(const char* in, int stride) const {
    Codes codes;
    const typename Tile::template Chunks<kBits> chunks(in, stride);
#pragma unroll
    for (int k = 0; k < Tile::kChunks; ++k) {
      if constexpr (kWords == 1) {
        codes.words[k] = *reinterpret_cast<const std::uint32_t*>(chunks.at(k));
      } else {
        const uint2 two = *reinterpret_cast<const uint2*>(chunks.at(k));
        codes.words[2 * k] = two.x, codes.words[2 * k + 1] = two.y;
      }
    }
    return codes;
  }
  __device__ void look_up(const Codes& codes, float (&y)[Tile::kEach]) const {
#pragma unroll
    for (int i = 0; i < Tile::kEach; i += kAtOnce) {
      const int byte = i / kAtOnce;
      const std::uint32_t word = codes.words[byte / 4];
      const int at = 8 * (byte % 4);
      const std::uint32_t entry =
          (at < kShift ? word << (kShift - at) : word >> (at - kShift)) & (0xffu << kShift);
      const char* const from = table_ + (entry | mine_);
      if constexpr (kAtOnce == 2) {
        const float2 pair = *reinterpret_cast<const float2*>(from);
        y[i] = pair.x;
        y[i + 1] = pair.y;
      } else {
        y[i] = *reinterpret_cast<const float*>(from);
      }
    }
  }

 private:
  const char* table_;
  std::uint32_t mine_;
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
  __device__ Codes read(const char* in, int stride) const {
    Codes codes;
    const int lane = cuda::lane_again();
    const auto* words = reinterpret_cast<const std::uint32_t*>(in + Tile::row(lane) * stride);
#pragma unroll
    for (int k = 0; k < Tile::kChunks; ++k) {
      // The chunk is `bits` bytes, in one to three words. A word past the row is not used.
      const int byte = Tile::first_of_chunk(k, lane) / 8 * bits_;
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

// Is a packed row whole pieces of 16 bytes? Then no piece's place is divided.
template <class Tile, int kBits>
constexpr int kPackedBytes = Tile::template kRowBytes<std::uint8_t> * kBits / 8;
template <class Tile, int kBits>
constexpr bool kWholePieces = kBits != 0 && kPackedBytes<Tile, kBits> % 16 == 0;

template <class Tile, int kBits, class X>
__global__ void __launch_bounds__(32 * kMostWarps<Tile, kBits>, 1)
    decode_by_lanes(const __grid_constant__ Problem p, const Layout layout) {
  constexpr int kStage = Tile::kRows * Tile::template kRowBytes<X>;
  char* const shared = cuda::dynamic_shared<char>();
  const bool rotates = p.rotation.kind == Rotation::hadamard;
  const std::uint32_t warps = blockDim.x / 32;
  char* const stages = shared + Levels<Tile, kBits>::kBytes;
  char* const stage = stages + warp_index() * kStage;
  char* const in = stages + static_cast<int>(warps) * kStage + warp_index() * layout.in;

  auto& more = *reinterpret_cast<cuda::TilesShared*>(stages + static_cast<int>(warps) *
                                                                  (kStage + layout.in));
  cuda::BulkCopiesIn copies(&more.arrived[warp_index()]);
  const cuda::Tiles tiles(more);

  const auto rows_at = [&](std::int64_t row) {
    return static_cast<int>(p.rows - row < Tile::kRows ? p.rows - row : Tile::kRows);
  };
  std::uint32_t scale = 0;  // of the rows fetched
  const auto fetch = [&](std::uint32_t tile) {
    if (tile >= layout.tiles) return;
    const std::int64_t row = std::int64_t{tile} * Tile::kRows;
    const int rows = rows_at(row);
    const std::uint32_t* const from = p.packed + row * p.packed_stride;
    if constexpr (kWholePieces<Tile, kBits>) {
      Tile::template begin_fetch<kPackedBytes<Tile, kBits>>(
          copies, in, reinterpret_cast<const char*>(from), 4 * p.packed_stride, rows);
    } else {
      cuda::copy_rows_in(in, layout.in_stride, from, p.packed_stride, p.words, rows);
      cuda::copy_async_commit();
    }
    if (Tile::row() < rows) scale = p.scale_bits(row + Tile::row());
  };
  std::uint32_t tile = tiles.first(), next;
  fetch(tile);
  const Levels<Tile, kBits> levels(shared, p);
  const auto signs = Tile::Signs::of(rotates ? p.rotation.table : nullptr);
  __syncthreads();

  for (; tile < layout.tiles; tile = next) {
    if constexpr (kWholePieces<Tile, kBits>) {
      Tile::arrived(copies);
    } else {
      cuda::copy_async_wait<0>();
      __syncwarp();
    }
    const auto codes = levels.read(in, layout.in_stride);
    const float s = p.scale_of(scale);
    __syncwarp();
    next = tiles.next();
    fetch(next);
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
    Tile::sent();
    Tile::template store<X>(y, signs.again(), stage);
    const std::int64_t first = std::int64_t{tile} * Tile::kRows;
    Tile::template send<X>(stage, static_cast<char*>(p.y) + first * layout.y_stride,
                           layout.y_stride, rows_at(first));
  }
  Tile::sent();
}

template <class Tile, int kBits, class X>
Status run_by_lanes(const Problem& p, int device, Stream stream) {
  Layout l{.y_stride = p.y_stride * static_cast<std::int64_t>(sizeof(X))};
  l.tiles = static_cast<std::uint32_t>((p.rows + Tile::kRows - 1) / Tile::kRows);
  l.in_stride =
      kWholePieces<Tile, kBits> ? kPackedBytes<Tile, kBits> : (4 * p.words + 15) / 16 * 16 | 16;
  l.in = Tile::kRows * l.in_stride;
  const int warp = l.in + Tile::kRows * Tile::template kRowBytes<X>;
  const auto grid = cuda::tiles_grid(
      p.rows, Tile::kRows, kMostWarps<Tile, kBits>,
      Levels<Tile, kBits>::kBytes + static_cast<int>(sizeof(cuda::TilesShared)), warp, device);
  return cuda::launch(Op::kName, decode_by_lanes<Tile, kBits, X>, grid, device, stream, p, l);
}

template <int kBits, class Otherwise>
Status visit_tiles(const Problem& p, int device, Stream stream, Otherwise&& otherwise) {
  return cuda::visit_tuned_dim<64>(
      p.rotation.dim,
      [&]<class Tile>(Tile) {
        return visit<float, f16, bf16>(p.element, [&]<class X>(Type<X>) {
          return run_by_lanes<typename Tile::Permuted, kBits, X>(p, device, stream);
        });
      },
      otherwise);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  const Rotation rotation = d.rotated ? Rotation::identity : d.rotation;
  const Problem p{.packed = a.packed.as<std::uint32_t>(),
                  .scales = a.scales.data,
                  .codebook = a.codebook.as<float>(),
                  .y = a.y.data,
                  .packed_stride = a.packed.row_stride(),
                  .scale_stride = a.scales.row_stride(),
                  .y_stride = a.y.row_stride(),
                  .rows = d.rows,
                  .rotation = cuda::row_rotation(rotation, d.dim, a.table.as<float>(), true),
                  .element = d.element,
                  .scale_element = d.scale_element(),
                  .bits = d.bits,
                  .words = static_cast<int>(packed_words(d.dim, d.bits))};
  const int device = a.y.device.index;
  const auto by_warps = [&] { return cuda::run_by_warps(Op::kName, p, device, stream); };
  if (p.rows < cuda::kFewRows * cuda::limits(device).multiprocessors) return by_warps();
  if (rotation == Rotation::dense) return cuda::run_dense(Op::kName, p, device, stream);
  if (!cuda::pieces_aligned(a.y, p.rows)) return by_warps();
  // Whole pieces must lie as such.
  if (p.words % 4 != 0 || cuda::pieces_aligned(a.packed, p.rows)) {
    if (d.bits == 4) return visit_tiles<4>(p, device, stream, by_warps);
    if (d.bits == 8) return visit_tiles<8>(p, device, stream, by_warps);
  }
  return visit_tiles<0>(p, device, stream, by_warps);
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<AuraDecode>> aura_decode_cuda() { return kKernels; }

}  // namespace bittern
