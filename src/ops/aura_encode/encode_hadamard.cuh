// Hadamard rows of 16-bit elements, rotated by the tensor cores, which have neither the order of
// the definition's sums nor its roundings. Codes are the definition's all the same: r is known
// within kDoubt, so a code is certain unless r is as near to a boundary, and rows with a doubtful
// code, one in 60 at 128 elements and 4 bits, are done again by the definition.
//
//   y = H (signs x)     exact elements, entries +-1;  r = y inv scale
//   step                16 elements of x, times B_step: the part of H that mixes within 16, with
//                       these elements' signs. The rest of H is over the steps, in registers.
//   warp                has 16 rows. Of results i = 16 block + 4 q + 2 t + e, lane l has those of
//                       q = l % 4, of rows l / 4 and l / 4 + 8 (`half`): four neighbouring codes of
//                       each block.
//
// kDoubt: a product of 16 terms is within 13 * 2^-24 of the sum S of their sizes (two of 8 terms on
// sm_80: 6.5 each; 10.5 on sm_90: see gdn_recompute_w_u), and the S inv scale of a row's steps add
// up to 1 at most, for |u|_1 <= sqrt(dim). Each butterfly is within 2^-24, `by` and the fma at the
// end too; the definition rounds once in each of its butterflies, and twice before them.
#pragma once
#include "cuda/tree.cuh"
#include "ops/aura_encode/encode_device.cuh"

namespace bittern::encode {

// ---- tuning ----

constexpr int kHadamardWarps = 16;            // of a block: what registers allow
constexpr int kHadamardCellBytes = 32 << 10;  // of the table of cells, all its copies

template <class X, int kDim>
struct HadamardTile {
  static_assert(hadamard_factor(kDim) == 1);
  static constexpr int kRows = 16;
  static constexpr int kSteps = kDim / 16;       // and blocks of results
  static constexpr int kStride = 2 * kDim + 16;  // bytes from row to row of x: the rows of a tile
                                                 // begin in different banks
  static constexpr int kStages = std::bit_width(unsigned{kDim}) - 1;
  static constexpr float kDoubt = static_cast<float>(13 + kStages - 4 + 2 + kStages + 2) * 0x1p-24f;

  // B as multiply() wants it: tile t of a lane is its column of the results 4 q + 2 t + e.
  __device__ static void fill_matrix(uint4* matrix, const float* signs) {
    for (int at = static_cast<int>(threadIdx.x); at < kSteps * 32;
         at += static_cast<int>(blockDim.x)) {
      const int lane = at % 32, step = at / 32;
      const auto pair = [&](int t, int k) {
        const int column = lane / 4, i = column / 2 * 4 + 2 * t + column % 2;
        std::uint32_t bits = 0;
        for (int e = 0; e < 2; ++e) {
          const int j = k + 2 * (lane % 4) + e;
          const bool negative = (__popc(i & j) % 2 != 0) != (signs[16 * step + j] < 0);
          constexpr std::uint32_t kOne = std::is_same_v<X, bf16> ? 0x3f80 : 0x3c00;
          bits |= (kOne | (negative ? 0x8000u : 0u)) << 16 * e;
        }
        return bits;
      };
      matrix[at] = make_uint4(pair(0, 0), pair(0, 8), pair(1, 0), pair(1, 8));
    }
  }

  // One half of a row of x.
  __device__ static void clear(char* row, int half) {
    for (int at = 0; at < kDim; at += 16)
      *reinterpret_cast<uint4*>(row + half * kDim + at) = make_uint4(0, 0, 0, 0);
  }

  using Sums = float[kSteps][2][4];   // [block][t][2 half + e]
  using Elements = std::uint32_t[4];  // of a lane, in a step

  __device__ static void load(Elements& a, const char* stage, int step) {
    cuda::load_tiles(a, stage + lane_index() % 16 * kStride + lane_index() / 16 * 16 + 32 * step);
  }
  // Element e of a word, as it is.
  __device__ static float element(std::uint32_t word, int e) {
    if constexpr (std::is_same_v<X, bf16>) {
      return __uint_as_float(e == 0 ? word << 16 : word & 0xffff0000u);
    } else {
      return cuda::load_math(X{static_cast<std::uint16_t>(word >> 16 * e)});
    }
  }
  __device__ static void multiply(Sums& y, const Elements& a, const uint4* matrix, int step) {
    const uint4 both = matrix[step * 32 + lane_index()];
    const std::uint32_t b[2][2] = {{both.x, both.y}, {both.z, both.w}};
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      if constexpr (std::is_same_v<X, bf16>) {
        cuda::product_bf16(y[step][t], a, b[t]);
      } else {
        cuda::product_f16(y[step][t], a, b[t]);
      }
    }
  }
  __device__ static void butterflies(Sums& y) {
#pragma unroll
    for (int h = 1; h < kSteps; h *= 2) {
#pragma unroll
      for (int i = 0; i < kSteps * 8; ++i) {
        if ((i / 8 & h) != 0) continue;
        float &a = y[i / 8][i / 4 % 2][i % 4], &b = y[i / 8 + h][i / 4 % 2][i % 4];
        const float sum = a + b;
        b = a - b;
        a = sum;
      }
    }
  }
};

// Sums by the halving tree over what differs in a lane's index within 4 lanes. (The lower bit of
// that index stands for the lower bit of the term's.)
template <int N>
__device__ cuda::Sums<float, N> over_quad(cuda::Sums<float, N> sums) {
#pragma unroll
  for (int step = 2; step > 0; step /= 2) {
#pragma unroll
    for (float& sum : sums.at) sum += cuda::across(sum, step);
  }
  return sums;
}

// Shared memory: cells, pairs, B, boundaries; for each warp two tiles of x and packed rows.
struct HadamardLayout {
  unsigned radix;  // 2^bits, but the compiler must not know
  int pairs, matrix, boundaries, warps;
  int out, warp;
  PackedRows packed;
};

// A row by the definition, x in shared memory and its norm known: lane l has elements 4 l .. 4 l
// + 3.
template <class X, int kDim, int kBits>
__device__ __noinline__ void encode_again(const Problem& p, const Cells& cells,
                                          const Tables& tables, std::int64_t row, const char* x,
                                          float norm) {
  constexpr int kEach = 4;
  static_assert(kDim == 32 * kEach);
  const int first = kEach * lane_index();
  const auto* const mine = reinterpret_cast<const X*>(x) + first;
  const float inv = 1 / norm;
  float t[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e)
    t[e] =
        cuda::load_math(mine[e]) * inv * (__ldg(p.rotation.table + first + e) * p.rotation.scale);
#pragma unroll
  for (int h = 1; h < kEach; h *= 2) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if ((e & h) != 0) continue;
      const float a = t[e], b = t[e + h];
      t[e] = a + b;
      t[e + h] = a - b;
    }
  }
#pragma unroll
  for (int h = 1; h < 32; h *= 2) {  // fma by +-1 is an exact sum
    const float sign = (lane_index() & h) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (float& v : t) v = fmaf(v, sign, cuda::across(v, h));
  }
  cuda::Sums<float, kEach> cc;
  std::uint32_t four = 0;
#pragma unroll
  for (int e = kEach - 1; e >= 0; --e) {
    const Cell& cell = tables.cell(cells.cell(t[e]));
    const unsigned code = cell.before + (__float_as_uint(cell.boundary - t[e]) >> 31);
    four = four << kBits | code;
    const float c = __ldg(p.codebook + code);
    cc.at[e] = c * c;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
#pragma unroll
    for (float& sum : cc.at) sum += cuda::across(sum, step);
  }
  const float sum = cc.at[0] + cc.at[2] + (cc.at[1] + cc.at[3]);
  store_four<kBits>(four, first, reinterpret_cast<char*>(p.packed + row * p.packed_stride));
  if (lane_index() == 0) store_norm(p, row, stored_scale(p.rule, norm, sum, 0));
}

// C's first sums, of two squares, are looked up by both codes at once. (The loop is about as long
// as the instruction cache allows: what is rare is out of line.)
template <class X, int kDim, int kBits>
__global__ void __launch_bounds__(32 * kHadamardWarps, 1)
    encode_hadamard(const __grid_constant__ Problem p, const Cells cells,
                    const HadamardLayout layout) {
  using Tile = HadamardTile<X, kDim>;
  constexpr int kRows = Tile::kRows, kBlocks = Tile::kSteps;
  char* const shared = cuda::dynamic_shared<char>();
  auto* const cell_table = reinterpret_cast<Cell*>(shared);
  auto* const pairs = reinterpret_cast<float*>(shared + layout.pairs);
  auto* const matrix = reinterpret_cast<uint4*>(shared + layout.matrix);
  auto* const boundaries = reinterpret_cast<float*>(shared + layout.boundaries);
  char* stage = shared + layout.warps + warp_index() * layout.warp;
  char* next_stage = stage + kRows * Tile::kStride;
  char* const out = stage + layout.out;

  const int warps = static_cast<int>(blockDim.x / 32), lane = lane_index();
  const std::int64_t step = std::int64_t{gridDim.x} * warps * kRows;
  std::int64_t first = (std::int64_t{blockIdx.x} * warps + warp_index()) * kRows;
  const auto fetch = [&](char* to, std::int64_t row) {
    if (row < p.rows)
      fetch_rows<kRows, 2 * kDim>(to, static_cast<const char*>(p.x) + row * p.x_stride * 2,
                                  p.x_stride * 2, p.rows_at(row, kRows));
  };
  fetch(stage, first);
  constexpr int levels = 1 << kBits;
  for (int i = static_cast<int>(threadIdx.x); i + 1 < levels; i += static_cast<int>(blockDim.x))
    boundaries[i] = p.boundaries[i];
  fill_table(pairs, levels * levels, kLookupCopies, [&](int i) {
    const float low = __ldg(p.codebook + (i & (levels - 1))),
                high = __ldg(p.codebook + (i >> kBits));
    return low * low + high * high;
  });
  Tile::fill_matrix(matrix, p.rotation.table);
  __syncthreads();
  if (!fill_cells(cell_table, cells, boundaries, kBits)) {
    cuda::copy_async_wait<0>();
    for (; first < p.rows; first += step)
      for (int i = 0; i < p.rows_at(first, kRows); ++i)
        encode_row(p, first + i, reinterpret_cast<float*>(out));
    return;
  }
  const Tables tables(cells, cell_table, pairs);
  const unsigned radix = layout.radix;

  for (; first < p.rows; first += step) {
    const int rows = p.rows_at(first, kRows);
    cuda::copy_async_wait<0>();
    __syncwarp();
    fetch(next_stage, first + step);
    typename Tile::Sums y;
    const int half = lane % 2, my_row = lane / 4 + 8 * half;
    float squares;
    unsigned extremes = 0;  // rows whose squares overflow or that are not finite: made zeros
    for (;;) {
      // y, and the squares of x, of elements 16 step + 8 b + 2 q + e: [b][half][e].
      const auto of_lane = cuda::halving_sum<0, 1, Tile::kSteps>([&](int k) {
        typename Tile::Elements a;
        Tile::load(a, stage, k);
        Tile::multiply(y, a, matrix, k);
        cuda::Sums<float, 8> terms;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float v = Tile::element(a[i / 2], i % 2);
          terms.at[i] = v * v;
        }
        return terms;
      });
      cuda::Sums<float, 4> of_rows;
#pragma unroll
      for (int i = 0; i < 4; ++i) of_rows.at[i] = of_lane.at[i] + of_lane.at[i + 4];
      of_rows = over_quad(of_rows);
      // What a row takes once is done by even lanes for their first row, by odd ones for their
      // second.
      squares = half == 0 ? of_rows.at[0] + of_rows.at[1] : of_rows.at[2] + of_rows.at[3];
      const unsigned found = __ballot_sync(kAllLanes, !(squares <= max_finite<float>()));
      if (found == 0) break;
      extremes |= found;
      if ((found >> lane & 1) != 0) Tile::clear(stage + my_row * Tile::kStride, lane % 4 / 2);
      __syncwarp();
    }
    const float norm = sqrtf(squares);
    const bool zero = !(norm > kAuraTiny);  // then all r are 0
    const float my_by = zero ? 0.0f : 1 / norm * p.rotation.scale;
    const float by[2] = {__shfl_sync(kAllLanes, my_by, lane & ~1),
                         __shfl_sync(kAllLanes, my_by, lane | 1)};
    Tile::butterflies(y);

    float nearest[2] = {INFINITY, INFINITY};  // boundary, of each half
    cuda::Sums<float, 8> cc;                  // [half][2 t + e]
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float slope = by[h] * cells.slope;
      std::uint32_t four[kBlocks] = {};
#pragma unroll
      for (int i = 3; i >= 0; --i) {
        const auto gather = [&](int block) {
          const float v = y[block][i / 2][2 * h + i % 2];
          const Cell& cell = tables.cell(__float_as_uint(fmaf(v, slope, cells.middle)));
          const float above = fmaf(v, -by[h], cell.boundary);
          nearest[h] = fminf(nearest[h], fabsf(above));
          const unsigned code = cell.before + (__float_as_uint(above) >> 31);
          four[block] = four[block] * radix + code;
          return code;
        };
        cc.at[4 * h + i] = cuda::halving_sum<0, 1, kBlocks / 2>([&](int block) {
          const unsigned low = gather(block), high = gather(block + kBlocks / 2);
          return tables.look_up(high * radix + low);
        });
      }
      char* const row = out + (lane / 4 + 8 * h) * layout.packed.stride;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) store_four<kBits>(four[i], 16 * i + 4 * (lane % 4), row);
    }
    cc = over_quad(cc);
    const auto sum_of = [&](int h) {
      return cc.at[4 * h] + cc.at[4 * h + 2] + (cc.at[4 * h + 1] + cc.at[4 * h + 3]);
    };
    const float my_cc = half == 0 ? sum_of(0) : sum_of(1);
    if (lane % 4 < 2 && my_row < rows)
      store_norm(
          p, first + my_row,
          p.rule == ScaleRule::none ? norm : stored_scale(ScaleRule::matched, norm, my_cc, 0));
    __syncwarp();
    layout.packed.copy_out<kRows>(out, p, first, rows);
    __syncwarp();

    // Lanes 4 r + h and 4 r + h + 2 tell of row r + 8 h.
    const float other = __shfl_xor_sync(kAllLanes, half == 0 ? nearest[1] : nearest[0], 1);
    const bool near = fminf(half == 0 ? nearest[0] : nearest[1], other) <= Tile::kDoubt;
    const bool extreme = (extremes >> lane & 1) != 0;
    unsigned marks = __ballot_sync(kAllLanes, (extreme || (near && !zero)) && my_row < rows);
    for (marks = (marks | marks >> 2) & 0x33333333u; marks != 0; marks &= marks - 1) {
      const int teller = __ffs(static_cast<int>(marks)) - 1, row = teller / 4 + 8 * (teller % 2);
      if ((extremes >> teller & 1) != 0) {
        encode_row(p, first + row, reinterpret_cast<float*>(out));
      } else {
        encode_again<X, kDim, kBits>(p, cells, tables, first + row, stage + row * Tile::kStride,
                                     __shfl_sync(kAllLanes, norm, teller));
      }
    }
    char* const free_stage = stage;
    stage = next_stage;
    next_stage = free_stage;
  }
}

template <class X, int kDim, int kBits>
Status run_hadamard(const Problem& p, int device, Stream stream) {
  using Tile = HadamardTile<X, kDim>;
  const Cells cells = cells_for(kDim, kBits, kHadamardCellBytes, 2 * Tile::kDoubt);
  const auto align = [](int bytes) { return (bytes + 15) / 16 * 16; };
  constexpr int kLevels = 1 << kBits;
  HadamardLayout l{.radix = kLevels, .packed = PackedRows(p)};
  l.pairs = cells.bytes();
  l.matrix = l.pairs + kLevels * kLevels * kLookupCopies * 4;
  l.boundaries = l.matrix + Tile::kSteps * 32 * static_cast<int>(sizeof(uint4));
  l.warps = l.boundaries + align(4 * kLevels);
  l.out = 2 * Tile::kRows * Tile::kStride;
  l.warp = l.out + std::max(align(Tile::kRows * l.packed.stride), 2 * 4 * kDim);
  const auto grid = cuda::tiles_grid(p.rows, Tile::kRows, kHadamardWarps, l.warps, l.warp, device);
  return cuda::launch(AuraEncode::kName, encode_hadamard<X, kDim, kBits>, grid, device, stream, p,
                      cells, l);
}

}  // namespace bittern::encode
