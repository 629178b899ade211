// Hadamard rows of 16-bit elements, rotated by the tensor cores, which have neither the order of
// the definition's sums nor its roundings. Codes are the definition's all the same: r is known
// within `doubt`, so a code is certain unless r is as near to a boundary, and rows with a doubtful
// code, one in 70 at 128 elements and 4 bits, are done again by the definition.
//
//   y = H (signs x)                exact elements, entries +-1;  r = y inv scale
//   16 x 16 step of x              x[rows, 16 k + ..] times B_k, the part of H (or of H_m x H_n)
//                                  that mixes within 16 elements, with their signs
//   powers of two                  the rest of H is over k = high passes + low: `low` is summed up
//                                  by the tensor cores, once for each of its results (a pass),
//                                  `high` in registers. Other lengths: all of H is in B.
//   warp                           has 16 rows. Of results i = 16 block + 4 q + 2 t + e, lane l
//                                  has those of q = l % 4, of rows l / 4 and l / 4 + 8 (`half`):
//                                  four neighbouring codes of each block.
//
// doubt: a product of 16 terms is within 13 * 2^-24 of the sum S of its terms' and its
// accumulator's sizes (two of 8 terms on sm_80: 6.5 each; 10.5 on sm_90: see gdn_recompute_w_u),
// and S inv scale <= 1 in sum over a row's steps, for |u|_1 <= sqrt(dim). Butterflies are within
// 2^-24 a stage, `by` and the fma at the end too; the definition's own roundings are as many as its
// additions in sequence and two.
#pragma once
#include "ops/aura_encode/encode_device.cuh"

namespace bittern::encode {

// ---- tuning ----

#ifndef V_HB
#define V_HB 8
#endif
#ifndef V_HW
#define V_HW 16
#endif
constexpr int kMostBlocks = V_HB;
constexpr int kHadamardWarps = V_HW;            // of a block: what registers allow
constexpr int kHadamardCellBytes = 64 << 10;  // of the table of cells, all its copies

template <class X, int kDim_>
struct HadamardTile {
  static constexpr int kDim = kDim_, kRows = 16;
  static constexpr int kFactor = static_cast<int>(hadamard_factor(kDim));
  static constexpr bool kPower = kFactor == 1;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kBlocks =  // of 16 results, in registers
      kPower && kSteps > (kDim == 256 ? 8 : kMostBlocks) ? (kDim == 256 ? 8 : kMostBlocks) : kSteps;
  static constexpr int kPasses = kSteps / kBlocks;
  static_assert(kPasses <= 2);
  static constexpr int kColumns = kPower ? 1 : kSteps;  // blocks of results that B has
  static constexpr int kStride = 2 * kDim + 16;         // bytes from row to row of x: each row of a
                                                        // tile begins in another bank
  static constexpr int kMatrixBytes = kSteps * kColumns * 32 * static_cast<int>(sizeof(uint4));
  static constexpr int kStages = std::bit_width(unsigned{kDim / kFactor}) - 1;
  static constexpr float kDoubt =
      (13 * (kPower ? kPasses : kSteps) + 4 + 2 + kStages + (kPower ? 0 : kFactor) + 2) * 0x1p-24f;
  // B as multiply() wants it: tile t of a lane is its column of the results 4 q + 2 t + e.
  __device__ static void fill_matrix(uint4* matrix, const RowRotation& rotation) {
    constexpr int n = kDim / kFactor;
    for (int at = static_cast<int>(threadIdx.x); at < kSteps * kColumns * 32;
         at += static_cast<int>(blockDim.x)) {
      const int lane = at % 32, block = at / 32 % kColumns, step = at / 32 / kColumns;
      const auto pair = [&](int t, int k) {
        const int column = lane / 4, i = 16 * block + column / 2 * 4 + 2 * t + column % 2;
        std::uint32_t bits = 0;
        for (int e = 0; e < 2; ++e) {
          const int j = 16 * step + k + 2 * (lane % 4) + e;
          const unsigned turns = static_cast<unsigned>(rotation.negative[i / n] >> j / n & 1) +
                                 static_cast<unsigned>(__popc(i % n & j % n)) +
                                 (rotation.table[j] < 0 ? 1u : 0u);
          constexpr std::uint32_t kOne = std::is_same_v<X, bf16> ? 0x3f80 : 0x3c00;
          bits |= (kOne | (turns & 1) << 15) << 16 * e;
        }
        return bits;
      };
      matrix[at] = make_uint4(pair(0, 0), pair(0, 8), pair(1, 0), pair(1, 8));
    }
  }

  // Starts copying rows to shared memory, `stride` bytes apart; those past the end become zeros.
  // Piece `at` of the rows, 16 bytes, goes to 16 (at + its row).
  __device__ static void fetch(char* stage, const char* from, std::int64_t stride, int rows) {
    constexpr int kPieces = kDim / 8, kEach = kRows * kPieces / 32;
    const int lane = lane_index();
    if (rows == kRows && stride == 2 * kDim) {  // addresses are constants away
      constexpr bool kWhole = 32 % kPieces == 0 || kPieces % 32 == 0;
      char* const to = cuda::opaque(stage + 16 * (kWhole ? lane + lane / kPieces : lane));
      const char* const mine = cuda::opaque(from + 16 * lane);
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const int row = kWhole ? 32 * k / kPieces : (lane + 32 * k) / kPieces;
        cuda::copy_async_16(to + 16 * (32 * k + row), mine + 16 * 32 * k);
      }
    } else {
#pragma unroll 1
      for (int k = 0; k < kEach; ++k) {
        const int at = lane + 32 * k, row = at / kPieces, piece = at % kPieces;
        const bool there = row < rows;
        cuda::copy_async_16(stage + 16 * (at + row),
                            there ? from + row * stride + 16 * piece : from, there ? 16 : 0);
      }
    }
    cuda::copy_async_commit();
  }

  using Sums = float[kBlocks][2][4];  // [block][t][2 half + e]
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
  __device__ static void multiply(float (&d)[4], const Elements& a, std::uint32_t b0,
                                  std::uint32_t b1, bool first) {
    const std::uint32_t b[2] = {b0, b1};
    if constexpr (std::is_same_v<X, bf16>) {
      first ? cuda::product_bf16(d, a, b) : cuda::multiply_bf16(d, a, b);
    } else {
      first ? cuda::product_f16(d, a, b) : cuda::multiply_f16(d, a, b);
    }
  }
  // Adds what a step contributes to the results of a pass.
  __device__ static void add(Sums& y, const Elements& a, const uint4* matrix, int step, int pass) {
    const int low = step % kPasses;  // 0 or 1
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      uint4 b = matrix[(step * kColumns + c) * 32 + lane_index()];
      if (low != 0) {
        const std::uint32_t signs = pass == 0 ? 0 : 0x80008000u;
        b = make_uint4(b.x ^ signs, b.y ^ signs, b.z ^ signs, b.w ^ signs);
      }
      const int block = kPower ? step / kPasses : c;
      const bool begins = kPower ? low == 0 : step == 0;
      multiply(y[block][0], a, b.x, b.y, begins);
      multiply(y[block][1], a, b.z, b.w, begins);
    }
  }
  __device__ static void butterflies(Sums& y) {
    if constexpr (kPower) {
#pragma unroll
      for (int h = 1; h < kBlocks; h *= 2) {
#pragma unroll
        for (int i = 0; i < kBlocks * 8; ++i) {
          if ((i / 8 & h) != 0) continue;
          float &a = y[i / 8][i / 4 % 2][i % 4], &b = y[i / 8 + h][i / 4 % 2][i % 4];
          const float sum = a + b;
          b = a - b;
          a = sum;
        }
      }
    }
  }

  // Four codes of each block of a pass to a packed row. Of 1 or 3 bits, a pair of lanes has whole
  // bytes: the even one takes those of even blocks, the odd one those of odd blocks.
  __device__ static void store_fours(const std::uint32_t (&four)[kBlocks], int pass, int bits,
                                     char* row) {
    const int quarter = lane_index() % 4;
    const auto first_of = [&](int block) { return 16 * (block * kPasses + pass) + 4 * quarter; };
    if (bits == 4) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
        *reinterpret_cast<std::uint16_t*>(row + first_of(i) / 2) =
            static_cast<std::uint16_t>(four[i]);
    } else if (bits == 2) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) row[first_of(i) / 4] = static_cast<char>(four[i]);
    } else {
      const bool odd = quarter % 2 != 0;
#pragma unroll
      for (int i = 0; i < kBlocks; i += 2) {
        const std::uint32_t low = four[i], high = i + 1 < kBlocks ? four[i + 1] : 0;
        const std::uint32_t other = __shfl_xor_sync(kAllLanes, odd ? low : high, 1);
        const std::uint32_t eight = odd ? other | high << 4 * bits : low | other << 4 * bits;
        char* const to = row + first_of(odd ? i + 1 : i) / 8 * bits;
        if (odd && i + 1 == kBlocks) continue;
        to[0] = static_cast<char>(eight);
        if (bits == 3) {
          to[1] = static_cast<char>(eight >> 8);
          to[2] = static_cast<char>(eight >> 16);
        }
      }
    }
  }
};

// Sums by the halving tree over what differs in a lane's index within 4 lanes. (The lower bit of
// that index stands for the lower bit of the term's.)
template <int N>
struct LaneSums {
  float at[N];
  __device__ friend LaneSums operator+(LaneSums a, const LaneSums& b) {
#pragma unroll
    for (int i = 0; i < N; ++i) a.at[i] += b.at[i];
    return a;
  }
  __device__ LaneSums over_quad() const {
    LaneSums sums = *this;
#pragma unroll
    for (int step = 2; step > 0; step /= 2) {
#pragma unroll
      for (float& sum : sums.at) sum += cuda::across(sum, step);
    }
    return sums;
  }
};

// Shared memory: cells, lookup, B, boundaries; for each warp rows of x and packed rows.
struct HadamardLayout {
  unsigned radix;  // 2^bits, but the compiler must not know
  int lookup, matrix, boundaries, warps;
  int out, warp;
  PackedRows packed;
};

// A row of a power of two by the definition, its norm known: element e of lane l is kEach l + e.
// `scratch` holds the codes of a row.
template <class X, int kDim>
__device__ void encode_again(const Problem& p, const Cells& cells, const Tables& tables,
                             std::int64_t row, float norm, std::uint32_t* scratch) {
  constexpr int kEach = kDim / 32;
  const int first = kEach * lane_index();
  const auto x =
      cuda::Pack<X, kEach>::load(static_cast<const X*>(p.x) + row * p.x_stride + first);
  const float inv = 1 / norm;
  float t[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e)
    t[e] = x.math(e) * inv * (__ldg(p.rotation.table + first + e) * p.rotation.scale);
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
#pragma unroll 1
  for (int h = 1; h < 32; h *= 2) {  // fma by +-1 is an exact sum
    const float sign = (lane_index() & h) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (float& v : t) v = fmaf(v, sign, cuda::across(v, h));
  }
  const float cc = cuda::halving_sum<0, 1, kEach>([&](int e) {
    const Cell& cell = tables.cell(cells.cell(t[e]));
    const unsigned code = cell.before + (__float_as_uint(cell.boundary - t[e]) >> 31);
    scratch[first + e] = code;
    const float c = __ldg(p.codebook + code);
    float sum = c * c;
#pragma unroll 1
    for (int step = 16; step > 0; step /= 2) sum += cuda::across(sum, step);
    return sum;
  });
  __syncwarp();
  pack_row(p, row, scratch);
  if (lane_index() == 0) store_norm(p, row, stored_scale(p.rule, norm, cc, 0));
  __syncwarp();
}

// Codes of at most 4 bits. Powers of two look up the first sums of C, of two squares, by both codes
// at once.
template <class X, int kDim>
__global__ void __launch_bounds__(32 * kHadamardWarps, 1)
    encode_hadamard(const __grid_constant__ Problem p, const Cells cells,
                    const HadamardLayout layout) {
  using Tile = HadamardTile<X, kDim>;
  constexpr int kRows = Tile::kRows, kBlocks = Tile::kBlocks;
  constexpr bool kPairs = Tile::kPower;
  constexpr bool kSpare = kDim % 32 != 0;  // packed rows may have bits to spare
  char* const shared = cuda::dynamic_shared<char>();
  auto* const cell_table = reinterpret_cast<Cell*>(shared);
  auto* const lookup = reinterpret_cast<float*>(shared + layout.lookup);
  auto* const matrix = reinterpret_cast<uint4*>(shared + layout.matrix);
  auto* const boundaries = reinterpret_cast<float*>(shared + layout.boundaries);
  char* const stage = shared + layout.warps + warp_index() * layout.warp;
  char* const out = stage + layout.out;

  const int warps = static_cast<int>(blockDim.x / 32), lane = lane_index(), quarter = lane % 4;
  const std::int64_t step = std::int64_t{gridDim.x} * warps * kRows;
  std::int64_t first = (std::int64_t{blockIdx.x} * warps + warp_index()) * kRows;
  const auto fetch = [&](std::int64_t row) {
    if (row < p.rows)
      Tile::fetch(stage, static_cast<const char*>(p.x) + row * p.x_stride * 2, p.x_stride * 2,
                  p.rows_at(row, kRows));
  };
  fetch(first);
  const int levels = 1 << p.bits;
  for (int i = static_cast<int>(threadIdx.x); i + 1 < levels; i += static_cast<int>(blockDim.x))
    boundaries[i] = p.boundaries[i];
  const auto square = [&](int i) {
    const float c = __ldg(p.codebook + i);
    return c * c;
  };
  fill_table(lookup, kPairs ? levels * levels : levels, kLookupCopies, [&](int i) {
    return kPairs ? square(i & (levels - 1)) + square(i >> p.bits) : square(i);
  });
  Tile::fill_matrix(matrix, p.rotation);
  __syncthreads();
  if (!fill_cells(cell_table, cells, boundaries, p.bits)) {
    cuda::copy_async_wait<0>();
    for (; first < p.rows; first += step)
      for (int i = 0; i < p.rows_at(first, kRows); ++i)
        encode_row(p, first + i, reinterpret_cast<float*>(out));
    return;
  }
  const Tables tables(cells, cell_table, lookup);
  const unsigned radix = layout.radix;

  for (; first < p.rows; first += step) {
    const int rows = p.rows_at(first, kRows);
    cuda::copy_async_wait<0>();
    __syncwarp();
    // The squares of x, of elements 16 step + 8 b + 2 q + e: [b][half][e].
    const auto of_lane = cuda::halving_sum<0, 1, Tile::kSteps>([&](int k) {
      typename Tile::Elements a;
      Tile::load(a, stage, k);
      LaneSums<8> terms;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float v = Tile::element(a[i / 2], i % 2);
        terms.at[i] = v * v;
      }
      return terms;
    });
    LaneSums<4> of_rows;
#pragma unroll
    for (int i = 0; i < 4; ++i) of_rows.at[i] = of_lane.at[i] + of_lane.at[i + 4];
    of_rows = of_rows.over_quad();
    // What a row takes once is done by even lanes for their first row, by odd ones for their second.
    const int half = lane % 2, my_row = lane / 4 + 8 * half;
    const float squares = half == 0 ? of_rows.at[0] + of_rows.at[1] : of_rows.at[2] + of_rows.at[3];
    const bool extreme = !(squares <= max_finite<float>());
    const float norm = sqrtf(squares);
    const bool zero = !(norm > kAuraTiny);  // then all r are 0
    const float my_by = zero || extreme ? 0.0f : 1 / norm * p.rotation.scale;
    const float by[2] = {__shfl_sync(kAllLanes, my_by, lane & ~1),
                         __shfl_sync(kAllLanes, my_by, lane | 1)};

    const bool any_extreme = __any_sync(kAllLanes, extreme);
    float nearest[2] = {INFINITY, INFINITY};  // boundary, of each half
    LaneSums<8> cc;                           // [half][2 t + e]
#pragma unroll 1
    for (int pass = 0; pass < Tile::kPasses; ++pass) {
      typename Tile::Sums y;
#pragma unroll
      for (int k = 0; k < Tile::kSteps; ++k) {
        typename Tile::Elements a;
        Tile::load(a, stage, k);
        Tile::add(y, a, matrix, k, pass);
      }
      if (pass == Tile::kPasses - 1) {
        __syncwarp();
        fetch(first + step);
      }
      Tile::butterflies(y);
      if (any_extreme) {  // 0 times those would not be 0
#pragma unroll
        for (int i = 0; i < kBlocks * 8; ++i)
          if (by[i % 4 / 2] == 0) y[i / 8][i / 4 % 2][i % 4] = 0;
      }
      LaneSums<8> sums;
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
          if constexpr (kPairs) {
            sums.at[4 * h + i] = cuda::halving_sum<0, 1, kBlocks / 2>([&](int block) {
              const unsigned low = gather(block), high = gather(block + kBlocks / 2);
              return tables.look_up(high * radix + low);
            });
          } else {
            sums.at[4 * h + i] = cuda::halving_sum<0, 1, kBlocks>(
                [&](int block) { return tables.look_up(gather(block)); });
          }
        }
        char* const row = out + (lane / 4 + 8 * h) * layout.packed.stride;
        Tile::store_fours(four, pass, p.bits, row);
        if (kSpare && quarter == 0) {
          for (int i = kDim / 8 * p.bits; i < 4 * p.words; ++i) row[i] = 0;
        }
      }
      cc = pass == 0 ? sums : cc + sums;
    }
    cc = cc.over_quad();
    const auto sum_of = [&](int h) {
      return cc.at[4 * h] + cc.at[4 * h + 2] + (cc.at[4 * h + 1] + cc.at[4 * h + 3]);
    };
    const float my_cc = half == 0 ? sum_of(0) : sum_of(1);
    if (quarter < 2 && my_row < rows)
      store_norm(p, first + my_row, stored_scale(p.rule, norm, my_cc, 0));
    __syncwarp();
    layout.packed.copy_out<kRows>(out, p, first, rows);
    __syncwarp();

    // Lanes 4 r + h and 4 r + h + 2 tell of row r + 8 h.
    const float other = __shfl_xor_sync(kAllLanes, half == 0 ? nearest[1] : nearest[0], 1);
    const bool near = fminf(half == 0 ? nearest[0] : nearest[1], other) <= Tile::kDoubt;
    const bool doubt = (extreme || (near && !zero)) && my_row < rows;
    unsigned marks = __ballot_sync(kAllLanes, doubt);
    for (marks = (marks | marks >> 2) & 0x33333333u; marks != 0; marks &= marks - 1) {
      const int told = __ffs(static_cast<int>(marks)) - 1;  // by this lane
      const std::int64_t row = first + told / 4 + 8 * (told % 2);
      if (!Tile::kPower || __shfl_sync(kAllLanes, extreme, told)) {
        encode_row(p, row, reinterpret_cast<float*>(out));
      } else if constexpr (Tile::kPower) {
        encode_again<X, kDim>(p, cells, tables, row, __shfl_sync(kAllLanes, norm, told),
                              reinterpret_cast<std::uint32_t*>(out));
      }
    }
  }
}

template <class X, int kDim>
Status run_hadamard(const Problem& p, int device, Stream stream) {
  using Tile = HadamardTile<X, kDim>;
  const Cells cells = cells_for(kDim, p.bits, kHadamardCellBytes, 2 * Tile::kDoubt);
  const auto align = [](int bytes) { return (bytes + 15) / 16 * 16; };
  const int levels = 1 << p.bits;
  HadamardLayout l{.radix = static_cast<unsigned>(levels), .packed = PackedRows(p)};
  l.lookup = cells.bytes();
  l.matrix = l.lookup + (Tile::kPower ? levels * levels : levels) * kLookupCopies * 4;
  l.boundaries = l.matrix + Tile::kMatrixBytes;
  l.warps = l.boundaries + align(4 * levels);
  l.out = Tile::kRows * Tile::kStride;
  l.warp = l.out + std::max(align(Tile::kRows * l.packed.stride), 2 * 4 * kDim);
  const auto grid =
      cuda::tiles_grid(p.rows, Tile::kRows, kHadamardWarps, l.warps, l.warp, device);
  return cuda::launch(AuraEncode::kName, encode_hadamard<X, kDim>, grid, device, stream, p, cells,
                      l);
}

}  // namespace bittern::encode
