// Hadamard rows of a tuned length, by the definition: a lane, or a few, to a row.
#pragma once
#include "ops/aura/aura_encode/encode_device.cuh"

namespace bittern::encode {

// ---- tuning ----

constexpr int kLaneCellBytes = 32 << 10;  // of the table of cells, all its copies
// Of a block of encode_by_lanes: what its registers allow.
template <class Tile>
constexpr int kMostWarps = Tile::kEach <= 64 ? 16 : 12;

// Shared memory of encode_by_lanes: cells, lookup, the operands' tables; then for each
// warp its rows of x and its packed rows.
struct LaneLayout {
  unsigned radix;                    // 2^bits, but the compiler must not know
  int lookup, tables, signs, warps;  // offsets in bytes
  int stage, warp;                   // bytes of a warp's rows; of a warp
  PackedRows packed;
};

// The codes of eight neighbours, a chunk of `bits` bytes: all of them in `low`, or four in each.
struct Eight {
  std::uint32_t low, high;
  __device__ std::uint64_t joined(int bits) const {
    return static_cast<std::uint64_t>(high) << 4 * bits | low;
  }
};

// A lane's codes to its packed row in shared memory. The row's spare bytes become zeros.
template <class Tile>
__device__ void store_codes(const Eight (&codes)[Tile::kChunks], const Problem& p, char* row) {
  const int bits = p.bits;
  constexpr int kChunks = Tile::kChunks;
  constexpr bool kWhole = Tile::kRows == 32 && kChunks % 4 == 0;  // the lane has the whole row,
                                                                  // of 16-byte pieces at 4 bits
  const auto index = [&](int k) { return Tile::first_of_chunk(k) / 8; };
  const auto word = [&](int k) { return static_cast<std::uint32_t>(codes[k].joined(bits)); };
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
#pragma unroll
    for (int k = 0; k < kChunks; ++k) reinterpret_cast<std::uint32_t*>(row)[index(k)] = word(k);
  } else if (bits == 3) {  // an odd chunk has its two bytes of one word last
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int odd = index(k) % 2;
      char* const to = row + 3 * index(k);
      *reinterpret_cast<std::uint16_t*>(to + odd) = static_cast<std::uint16_t>(word(k) >> 8 * odd);
      to[2 - 2 * odd] = static_cast<char>(word(k) >> (16 - 16 * odd));
    }
  } else if (bits == 2) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k)
      reinterpret_cast<std::uint16_t*>(row)[index(k)] = static_cast<std::uint16_t>(word(k));
  } else if (bits == 8) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k)
      reinterpret_cast<uint2*>(row)[index(k)] = make_uint2(codes[k].low, codes[k].high);
  } else {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      char* const to = row + index(k) * bits;
#pragma unroll 1
      for (int i = 0; i < bits; ++i) to[i] = static_cast<char>(codes[k].joined(bits) >> 8 * i);
    }
  }
  if constexpr (kChunks % 4 != 0) {  // otherwise there are none
#pragma unroll 1
    for (int i = index(kChunks) * bits; i < 4 * p.words; ++i) row[i] = 0;
  }
}

// dot() of a row, for each of its lanes: chain(c) gives the lane's c-th of kChains<Tile> chains, to
// which register i belongs for c = i % kChains<Tile>.
template <class Tile>
constexpr int kChains = Tile::kRows;
template <class Tile, class Chain>
__device__ float sum_of_chains(const Chain& chain) {
  static_assert(kChains<Tile> % 8 == 0);
  float sum[8];
#pragma unroll
  for (int e = 0; e < 8; ++e)
    sum[e] = cuda::sum_across(cuda::halving_sum<0, 1, kChains<Tile> / 8>(
                                  [&](int quarter) { return chain(8 * quarter + e); }),
                              16 / Tile::kRows);
  return cuda::halving_sum<0, 1, 8>([&](int e) { return sum[e]; });
}

// What the lookup holds for the scale rule's sums: the levels, for C and D; their squares, for C;
// or C's first sums, of two neighbours, by both codes (at most 4 bits, and all copies of cells).
enum class Sums { levels, squares, pairs };
template <Sums kSums>
using LaneTables = Tables<kSums == Sums::pairs ? Cells::kMostCopies : 0>;

// Of rows x with the signs of the rotation applied; the lanes of a row agree.
template <class Tile>
__device__ float squares_of(const float (&x)[Tile::kEach]) {
  return sum_of_chains<Tile>([&](int c) {
    float sum = 0;
#pragma unroll
    for (int i = c; i < Tile::kEach; i += kChains<Tile>) sum = fmaf(x[i], x[i], sum);
    return sum;
  });
}

// Has the row an element that is not 0? The lanes of a row agree.
template <class Tile>
__device__ bool has_elements(const float (&x)[Tile::kEach]) {
  unsigned bits = 0;
#pragma unroll
  for (const float v : x) bits |= __float_as_uint(v) << 1;
#pragma unroll
  for (int step = 16 / Tile::kRows; step > 0; step /= 2)
    bits |= __shfl_xor_sync(kAllLanes, bits, step);
  return bits != 0;
}

// The rest of steps 1 to 5.
template <class Tile, Sums kSums>
struct LaneRows {
  Eight codes[Tile::kChunks];
  float scale;

  __device__ LaneRows(float (&x)[Tile::kEach], float squares, const Problem& p, const Cells& cells,
                      const LaneTables<kSums>& tables, unsigned radix) {
    const float norm = sqrtf(squares);
    const float inv = norm > 0 ? cuda::ordinary_reciprocal(norm) : 0;
    const float by = inv * p.rotation.scale;
#pragma unroll
    for (float& v : x) v *= by;
    Tile::butterflies(x);
    Tile::template mix<false>(x);
    const auto code = [&](int i) {
      const Cell cell = tables.cell(cells.cell(x[i]));
      return cell.before + (__float_as_uint(cell.boundary - x[i]) >> 31);
    };
    float products[kChains<Tile>] = {};
    const auto square = [&](int i, unsigned code) {
      const float c = tables.look_up(code);
      if (kSums == Sums::squares) return c;
      float& product = products[i % kChains<Tile>];
      product = fmaf(x[i], c, product);
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
      codes[k] = {two[1] * radix2 + two[0], two[3] * radix2 + two[2]};
      if (kSums == Sums::pairs) codes[k] = {codes[k].high * (radix2 * radix2) + codes[k].low, 0};
    }
    const float cc = cuda::sum_across(
        cuda::halving_sum<0, 1, Tile::kChunks>([&](int k) { return eights[k]; }), 16 / Tile::kRows);
    const float rc = kSums == Sums::levels
                         ? sum_of_chains<Tile>([&](int c) { return products[c]; }) + 0.0f
                         : 0.0f;
    scale = stored_scale(p.rule, norm, cc, rc);
  }
};

// The signs of the rotation, by the whole block: a row of x that has nothing else.
template <class X>
__device__ void fill_signs(X* signs, const RowRotation& rotation) {
  for (int i = static_cast<int>(threadIdx.x); i < rotation.dim; i += static_cast<int>(blockDim.x))
    signs[i] = cuda::store_math<X>(rotation.table[i] < 0 ? -0.0f : 0.0f);
}

// A lane's elements in shared memory, from register i on: a piece of 16 bytes.
template <class Tile, class X>
__device__ uint4* piece_of(X* row, int i) {
  return reinterpret_cast<uint4*>(row + Tile::first_of_chunk(i / 8) + i % 8);
}
template <class X>
constexpr int kPieceElements = 16 / static_cast<int>(sizeof(X));

// With their signs turned.
template <class Tile, class X>
__device__ void load(X* row, X* signs, float (&x)[Tile::kEach]) {
#pragma unroll
  for (int i = 0; i < Tile::kEach; i += kPieceElements<X>) {
    const uint4 piece = *piece_of<Tile>(row, i), turn = *piece_of<Tile>(signs, i);
    const unsigned word[] = {piece.x ^ turn.x, piece.y ^ turn.y, piece.z ^ turn.z,
                             piece.w ^ turn.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (sizeof(X) == 4) {
        x[i + e] = __uint_as_float(word[e]);
      } else {
        x[i + 2 * e] = cuda::load_math(X{static_cast<std::uint16_t>(word[e])});
        x[i + 2 * e + 1] = cuda::load_math(X{static_cast<std::uint16_t>(word[e] >> 16)});
      }
    }
  }
}
template <class Tile, class X>
__device__ void clear(X* row) {
#pragma unroll 1
  for (int i = 0; i < Tile::kEach; i += kPieceElements<X>)
    *piece_of<Tile>(row, i) = make_uint4(0, 0, 0, 0);
}

// A warp starts copying the rows from `first` on, if there are any, to its place in shared memory.
// Others become zeros. (Addresses that are not constants away would take too many registers at
// once.)
template <class Tile, class X>
__device__ void fetch(char* stage, const Problem& p, std::int64_t first) {
  if (first >= p.rows) return;
  constexpr int kBytes = Tile::template kRowBytes<X>, kTo = Tile::template kStageStride<X>;
  using Pieces = typename Tile::template Pieces<kBytes>;
  const std::int64_t stride = p.x_stride * static_cast<std::int64_t>(sizeof(X));
  const char* const from = static_cast<const char*>(p.x) + first * stride;
  const int rows = p.rows_at(first, Tile::kRows), lane = lane_index();
  if (rows == Tile::kRows && stride == kBytes) {
    const Pieces at(static_cast<unsigned>(lane));
    char* const to = stage + at.row * kTo + 16 * at.piece;
    const char* const mine = cuda::opaque(from + at.row * kBytes + 16 * at.piece);
    Pieces::each([&](int i, int j) {
      cuda::copy_async_16(to + i * kTo + 16 * j, mine + i * kBytes + 16 * j);
    });
  } else {
#pragma unroll 1
    for (int at = lane; at < Tile::kRows * Pieces::kAll; at += 32) {
      const int row = at / Pieces::kAll, piece = at % Pieces::kAll;
      cuda::copy_async_16(stage + row * kTo + 16 * piece,
                          row < rows ? from + row * stride + 16 * piece : from,
                          row < rows ? 16 : 0);
    }
  }
  cuda::copy_async_commit();
}

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
  auto* const row =
      reinterpret_cast<X*>(stage + Tile::row() * Tile::template kStageStride<X>);  // this lane's

  const int warps = static_cast<int>(blockDim.x / 32);
  const std::int64_t step = std::int64_t{gridDim.x} * warps * Tile::kRows;
  // The tiles left over in the end go to as many multiprocessors.
  std::int64_t first = (std::int64_t{gridDim.x} * warp_index() + blockIdx.x) * Tile::kRows;
  fetch<Tile, X>(stage, p, first);
  auto* const signs = reinterpret_cast<X*>(shared + layout.signs);
  fill_signs(signs, p.rotation);

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
  const LaneTables<kSums> tables(cells, cell_table, lookup);

  unsigned extremes = 0;  // lanes whose rows are out of the ordinary: rows made zeros
  while (first < p.rows) {
    cuda::copy_async_wait<0>();
    __syncwarp();
    float x[Tile::kEach];
    load<Tile>(row, signs, x);
    const float squares = squares_of<Tile>(x);
    if (__any_sync(kAllLanes, !ordinary(squares))) {  // rows of zeros are none of the extremes
      const bool some = has_elements<Tile>(x), extreme = some && !ordinary(squares);
      if (const unsigned found = __ballot_sync(kAllLanes, extreme); found != 0) {
        extremes |= found;
        if (extreme) clear<Tile>(row);
        continue;
      }
    }
    __syncwarp();
    fetch<Tile, X>(stage, p, first + step);
    const LaneRows<Tile, kSums> found(x, squares, p, cells, tables, layout.radix);
    const int rows = p.rows_at(first, Tile::kRows);
    const bool tells = Tile::row() < rows && Tile::part() == 0;
    if (tells) store_scale(p, first + Tile::row(), found.scale);
    // Through shared memory, so that the warp writes whole lines.
    store_codes<Tile>(found.codes, p, out + Tile::row() * layout.packed.stride);
    __syncwarp();
    layout.packed.copy_out<Tile::kRows>(out, p, first, rows);
    __syncwarp();
    if (extremes != 0) {
      extremes &= __ballot_sync(kAllLanes, tells);
      for (; extremes != 0; extremes &= extremes - 1)
        encode_row(p, first + (__ffs(static_cast<int>(extremes)) - 1) / (32 / Tile::kRows),
                   scratch);
    }
    first += step;
  }
}

template <class Tile, class X>
Status run_by_lanes(const Problem& p, int device, Stream stream) {
  constexpr int kDim = Tile::kEach * (32 / Tile::kRows);
  const Cells cells = cells_for(kDim, p.bits, kLaneCellBytes);
  const auto align = [](int bytes) { return (bytes + 15) / 16 * 16; };
  LaneLayout l{.radix = 1u << p.bits, .packed = PackedRows(p)};
  l.lookup = cells.bytes();
  const bool pairs = p.bits <= 4 && cells.copies == Cells::kMostCopies && !p.needs_products();
  l.tables = l.lookup + (kLookupCopies * 4 << (pairs ? 2 * p.bits : p.bits));
  l.signs = l.tables + align(4 << p.bits);
  l.warps = l.signs + Tile::template kRowBytes<X>;
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
