// Hadamard rows of a tuned length, by the definition: a lane, or a few, to a row.
#pragma once
#include "ops/aura_encode/encode_device.cuh"

namespace bittern::encode {

// ---- tuning ----

constexpr int kLaneCellBytes = 32 << 10;  // of the table of cells, all its copies
// Of a block of encode_by_lanes: what its registers allow.
template <class Tile>
constexpr int kMostWarps = Tile::kEach <= 64 ? 16 : 12;

// Shared memory of encode_by_lanes: cells, lookup, the operands' tables; then for each
// warp its rows of x and its packed rows.
struct LaneLayout {
  unsigned radix;             // 2^bits, but the compiler must not know
  int lookup, tables, warps;  // offsets in bytes
  int stage, warp;            // bytes of a warp's rows; of a warp
  PackedRows packed;
};

// A lane's codes to its packed row in shared memory, eight to a chunk of `bits` bytes. The row's
// spare bytes become zeros.
template <class Tile>
__device__ void store_codes(const std::uint64_t (&chunk)[Tile::kChunks], const Problem& p,
                            char* row) {
  const int bits = p.bits;
  constexpr int kChunks = Tile::kChunks;
  constexpr bool kWhole = Tile::kRows == 32 && kChunks % 4 == 0;  // the lane has the whole row,
                                                                  // of 16-byte pieces at 4 bits
  const auto word = [&](int k) { return static_cast<std::uint32_t>(chunk[k]); };
  const auto store = [&]<class T>(T) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k)
      reinterpret_cast<T*>(row)[Tile::first_of_chunk(k) / 8] = static_cast<T>(chunk[k]);
  };
  if (kWhole && bits == 4) {
#pragma unroll
    for (int k = 0; k < kChunks / 4 * 4; k += 4)
      reinterpret_cast<uint4*>(row)[k / 4] =
          make_uint4(word(k), word(k + 1), word(k + 2), word(k + 3));
  } else if (kWhole && bits == 3) {
#pragma unroll
    for (int k = 0; k < kChunks / 4 * 4; k += 4) {
      auto* const words = reinterpret_cast<std::uint32_t*>(row) + k / 4 * 3;
      words[0] = word(k) | word(k + 1) << 24;
      words[1] = word(k + 1) >> 8 | word(k + 2) << 16;
      words[2] = word(k + 2) >> 16 | word(k + 3) << 8;
    }
  } else if (bits == 4) {
    store(std::uint32_t{});
  } else if (bits == 8) {
    store(std::uint64_t{});
  } else if (bits == 2) {
    store(std::uint16_t{});
  } else {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      char* const to = row + Tile::first_of_chunk(k) / 8 * bits;
#pragma unroll 1
      for (int i = 0; i < bits; ++i) to[i] = static_cast<char>(chunk[k] >> 8 * i);
    }
  }
  if (Tile::part() == 0) {
#pragma unroll 1
    for (int i = p.rotation.dim / 8 * bits; i < 4 * p.words; ++i) row[i] = 0;
  }
}

// A lane's share of a row's 32 chains: chunk after chunk, register i in turn.
template <class Tile>
struct Chains {
  static constexpr int kLanes = 32 / Tile::kRows, kCount = 32 / kLanes;
  static_assert(kCount % 8 == 0);
  float at[kCount] = {};

  __device__ void feed(int i, float a, float b) { at[i % kCount] = fmaf(a, b, at[i % kCount]); }
  // dot(), for every lane of the row.
  __device__ float sum() {
    const auto halve = [&](int step) {
#pragma unroll
      for (int i = 0; i < step; ++i) at[i] += at[i + step];
    };
    if constexpr (kCount > 16) halve(16);
    if constexpr (kCount > 8) halve(8);
#pragma unroll
    for (int i = 0; i < 8; ++i) at[i] = cuda::sum_across(at[i], kLanes / 2);
    halve(4);
    halve(2);
    halve(1);
    return at[0];
  }
};

// What the lookup holds for the scale rule's sums: the levels, for C and D; their squares, for C;
// or C's first sums, of two neighbours, by both codes (at most 4 bits).
enum class Sums { levels, squares, pairs };

// Steps 1 to 5 of the rows x, with the signs of the rotation applied; the lanes of a row agree.
// Rows whose squares overflow or that are not finite are `extreme`, and nothing else of them
// counts.
template <class Tile, Sums kSums>
struct LaneRows {
  std::uint64_t chunk[Tile::kChunks];  // the codes of eight neighbours
  float scale;
  bool extreme;

  __device__ LaneRows(float (&x)[Tile::kEach], const Problem& p, const Cells& cells,
                      const Tables& tables, unsigned radix) {
    constexpr int kEach = Tile::kEach;
    Chains<Tile> chains;
#pragma unroll
    for (int i = 0; i < kEach; ++i) chains.feed(i, x[i], x[i]);
    const float squares = chains.sum();
    extreme = !(squares <= max_finite<float>());
    const float norm = sqrtf(squares);
    const float inv = norm > kAuraTiny ? 1 / norm : 0;
    if (extreme) {
#pragma unroll
      for (float& v : x) v = 0;
    }
#pragma unroll
    for (float& v : x) v = v * inv * p.rotation.scale;
    Tile::butterflies(x);
    Tile::template mix<false>(x);
    const auto code = [&](int i) {
      const Cell cell = tables.cell(cells.cell(x[i]));
      return cell.before + (__float_as_uint(cell.boundary - x[i]) >> 31);
    };
    Chains<Tile> products;
    const auto square = [&](int i, unsigned code) {
      const float c = tables.look_up(code);
      if (kSums == Sums::squares) return c;
      products.feed(i, x[i], c);
      return c * c;
    };
    float eights[Tile::kChunks];
#pragma unroll
    for (int k = 0; k < Tile::kChunks; ++k) {
      unsigned two[4];  // codes; and their squares' sums
      float sum[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int i = 8 * k + 2 * q;
        const unsigned low = code(i), high = code(i + 1);
        two[q] = high * radix + low;
        sum[q] =
            kSums == Sums::pairs ? tables.look_up(two[q]) : square(i, low) + square(i + 1, high);
      }
      eights[k] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
      const unsigned radix2 = radix * radix;
      const unsigned low = two[1] * radix2 + two[0], high = two[3] * radix2 + two[2];
      if constexpr (kSums == Sums::pairs) {  // 32 bits hold them
        chunk[k] = high * (radix2 * radix2) + low;
      } else {
        chunk[k] = static_cast<std::uint64_t>(high) << 4 * p.bits | low;
      }
    }
    const float cc = cuda::sum_across(
        cuda::halving_sum<0, 1, Tile::kChunks>([&](int k) { return eights[k]; }), 16 / Tile::kRows);
    const float rc = kSums == Sums::levels ? products.sum() + 0.0f : 0.0f;
    scale = stored_scale(p.rule, norm, cc, rc);
  }
};

// A warp takes RowTile::kRows rows at a time.
template <class Tile, class X, Sums kSums>
__global__ void __launch_bounds__(32 * kMostWarps<Tile>, 1)
    encode_by_lanes(const __grid_constant__ Problem p, const Cells cells, const LaneLayout layout) {
  char* const shared = cuda::dynamic_shared<char>();
  auto* const cell_table = reinterpret_cast<Cell*>(shared);
  auto* const lookup = reinterpret_cast<float*>(shared + layout.lookup);
  char* const stage = shared + layout.warps + warp_index() * layout.warp;
  char* const out = stage + layout.stage;
  auto* const scratch = reinterpret_cast<float*>(out);  // of encode_row

  const int warps = static_cast<int>(blockDim.x / 32);
  const std::int64_t step = std::int64_t{gridDim.x} * warps * Tile::kRows;
  std::int64_t first = (std::int64_t{blockIdx.x} * warps + warp_index()) * Tile::kRows;
  const auto fetch = [&](std::int64_t row) {
    if (row >= p.rows) return;
    const std::int64_t stride = p.x_stride * static_cast<std::int64_t>(sizeof(X));
    Tile::template fetch<X>(stage, static_cast<const char*>(p.x) + row * stride, stride,
                            p.rows_at(row, Tile::kRows));
  };
  fetch(first);
  const auto signs = Tile::Signs::of(p.rotation.table);

  const int levels = 1 << p.bits;
  auto* const boundaries = reinterpret_cast<float*>(shared + layout.tables);
  for (int i = static_cast<int>(threadIdx.x); i + 1 < levels; i += static_cast<int>(blockDim.x))
    boundaries[i] = p.boundaries[i];
  const auto level = [&](int i) { return __ldg(p.codebook + (i & (levels - 1))); };
  fill_table(lookup, kSums == Sums::pairs ? levels * levels : levels, kLookupCopies, [&](int i) {
    const float c = level(i), high = level(i >> p.bits);
    if (kSums == Sums::levels) return c;
    return kSums == Sums::squares ? c * c : c * c + high * high;
  });
  __syncthreads();
  if (!fill_cells(cell_table, cells, boundaries, p.bits)) {
    cuda::copy_async_wait<0>();
    for (; first < p.rows; first += step)
      for (int i = 0; i < p.rows_at(first, Tile::kRows); ++i) encode_row(p, first + i, scratch);
    return;
  }
  const Tables tables(cells, cell_table, lookup);

  for (; first < p.rows; first += step) {
    const int rows = p.rows_at(first, Tile::kRows);
    float x[Tile::kEach];
    cuda::copy_async_wait<0>();
    __syncwarp();
    Tile::template load<X>(stage, signs.again(), x);
    __syncwarp();
    fetch(first + step);
    const LaneRows<Tile, kSums> found(x, p, cells, tables, layout.radix);
    const bool tells = Tile::row() < rows && Tile::part() == 0;
    if (tells) store_norm(p, first + Tile::row(), found.scale);
    // Through shared memory, so that the warp writes whole lines.
    store_codes<Tile>(found.chunk, p, out + Tile::row() * layout.packed.stride);
    __syncwarp();
    layout.packed.copy_out<Tile::kRows>(out, p, first, rows);
    __syncwarp();
    unsigned left = __ballot_sync(kAllLanes, found.extreme && tells);
    for (; left != 0; left &= left - 1)
      encode_row(p, first + (__ffs(static_cast<int>(left)) - 1) / (32 / Tile::kRows), scratch);
  }
}

template <class Tile, class X>
Status run_by_lanes(const Problem& p, int device, Stream stream) {
  constexpr int kDim = Tile::kEach * (32 / Tile::kRows);
  const Cells cells = cells_for(kDim, p.bits, kLaneCellBytes);
  const auto align = [](int bytes) { return (bytes + 15) / 16 * 16; };
  LaneLayout l{.radix = 1u << p.bits, .packed = PackedRows(p)};
  l.lookup = cells.bytes();
  const bool pairs = p.bits <= 4 && !p.needs_products();
  l.tables = l.lookup + (kLookupCopies * 4 << (pairs ? 2 * p.bits : p.bits));
  l.warps = l.tables + align(4 << p.bits);
  l.stage = Tile::kRows * Tile::template kStageStride<X>;
  l.warp = l.stage + std::max(align(Tile::kRows * l.packed.stride), 2 * 4 * kDim);
  const auto grid =
      cuda::tiles_grid(p.rows, Tile::kRows, kMostWarps<Tile>, l.warps, l.warp, device);
  const auto launch = [&](auto kernel) {
    return cuda::launch(AuraEncode::kName, kernel, grid, device, stream, p, cells, l);
  };
  if (p.needs_products()) return launch(encode_by_lanes<Tile, X, Sums::levels>);
  if (pairs) return launch(encode_by_lanes<Tile, X, Sums::pairs>);
  return launch(encode_by_lanes<Tile, X, Sums::squares>);
}

}  // namespace bittern::encode
