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
#include "ops/aura_encode/encode_lanes.cuh"

namespace bittern::encode {

// ---- tuning ----

// Of a block: what registers and shared memory allow.
template <int kDim>
constexpr int kHadamardWarps = kDim == 512 ? 8 : 16;
constexpr int kHadamardCellBytes = 64 << 10;  // of the table of cells, all its copies

template <class X, int kDim_>
struct HadamardTile {
  static constexpr int kDim = kDim_, kRows = 16;
  static constexpr int kFactor = static_cast<int>(hadamard_factor(kDim));
  static constexpr bool kPower = kFactor == 1;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kMost = kDim == 512 ? 16 : 8;
  static constexpr int kBlocks = kPower && kSteps > kMost ? kMost : kSteps;  // of 16 results, in registers
  static constexpr int kPasses = kSteps / kBlocks;
  static constexpr int kColumns = kPower ? 1 : kSteps;  // blocks of results that B has
  static constexpr int kStride = 2 * kDim + 16;         // bytes from row to row of x: each row of a
                                                        // tile begins in another bank
  static constexpr int kMatrixBytes = kSteps * kColumns * 32 * static_cast<int>(sizeof(uint4));
  static constexpr int kStages = std::bit_width(unsigned{kDim / kFactor}) - 1;
  static constexpr float kDoubt =
      (13 * (kPower ? kPasses : kSteps) + 4 + 2 + kStages + (kPower ? 0 : kFactor) + 2) * 0x1p-24f;
  // By which rows are done again.
  using Exact = RowTile<kDim, kDim == 80 ? 1 : kDim <= 128 ? 2 : kDim / 64>;
  static constexpr int kBatch = Exact::kRows < kRows ? Exact::kRows : kRows;

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
  // Adds what a step contributes to the results of a pass. Steps whose `low` is 0 come first.
  __device__ static void add(Sums& y, const Elements& a, const uint4* matrix, int step, int pass) {
    const int low = step % kPasses;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      uint4 b = matrix[(step * kColumns + c) * 32 + lane_index()];
      if (std::popcount(static_cast<unsigned>(low & pass)) % 2 != 0) {
        constexpr std::uint32_t kSigns = 0x80008000;
        b = make_uint4(b.x ^ kSigns, b.y ^ kSigns, b.z ^ kSigns, b.w ^ kSigns);
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

  // Four codes of each block of a pass, of `width` bits each (2, 4 or 8), to a row.
  __device__ static void store_fours(const std::uint32_t (&four)[kBlocks], int pass, int width,
                                     char* row) {
    const auto each = [&](const auto& f) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        f(16 * (block * kPasses + pass) + 4 * (lane_index() % 4), four[block]);
    };
    if (width == 4) {
      each([&](int first, std::uint32_t codes) {
        *reinterpret_cast<std::uint16_t*>(row + first / 2) = static_cast<std::uint16_t>(codes);
      });
    } else if (width == 8) {
      each([&](int first, std::uint32_t codes) {
        *reinterpret_cast<std::uint32_t*>(row + first) = codes;
      });
    } else {
      each([&](int first, std::uint32_t codes) { row[first / 4] = static_cast<char>(codes); });
    }
  }

  // Codes of rows, a byte each, to `bits` bits each, where they lie: no code moves up.
  __device__ static void close_up(char* rows, int stride, const Problem& p) {
    constexpr int kChunks = kDim / 8;
    const int bits = p.bits;
#pragma unroll 1
    for (int at = lane_index(); at < kRows * kChunks; at += 32) {
      char* const row = rows + at / kChunks * stride;
      const uint2 codes = *reinterpret_cast<const uint2*>(row + 8 * (at % kChunks));
      const auto four = [&](unsigned w) {
        return (w & 0xff) | (w >> 8 & 0xff) << bits | (w >> 16 & 0xff) << 2 * bits |
               w >> 24 << 3 * bits;
      };
      const std::uint64_t all = four(codes.x) | std::uint64_t{four(codes.y)} << 4 * bits;
      __syncwarp();
      for (int i = 0; i < bits; ++i)
        row[at % kChunks * bits + i] = static_cast<char>(all >> 8 * i);
      if (at % kChunks == kChunks - 1) {
        for (int i = kDim / 8 * bits; i < 4 * p.words; ++i) row[i] = 0;
      }
      __syncwarp();
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

// Shared memory: cells, lookup, B, boundaries; for each warp rows of x, packed rows, doubtful rows.
struct HadamardLayout {
  unsigned radix;  // 2^bits, but the compiler must not know
  int width;       // bits of a code in shared memory: 2, 4 or 8
  unsigned width_radix;
  int lookup, matrix, boundaries, warps;
  int out, out_stride, list, warp;
};

// Rows list[0 .. count) by the definition.
template <class Tile, class X>
__device__ __forceinline__ void encode_exactly(const Problem& p, const Cells& cells,
                                            const Tables& tables, unsigned radix,
                                            const std::int64_t* list, int count, char* out,
                                            int out_stride) {
  using Exact = typename Tile::Exact;
  const bool there = Exact::row() < count;
  const std::int64_t row = list[there ? Exact::row() : 0];
  const X* const from = static_cast<const X*>(p.x) + row * p.x_stride;
  float x[Exact::kEach];
#pragma unroll
  for (int i = 0; i < Exact::kEach; i += 8) {
    const int first = Exact::first_of_chunk(i / 8);
    const auto pack = cuda::Pack<X, 8>::load(from + first);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[i + e] = pack.math(e) * p.rotation.table[first + e];
  }
  const LaneRows<Exact, false> found(x, p, cells, tables, radix);
  const bool tells = there && Exact::part() == 0;
  if (tells) store_norm(p, row, found.scale);
  if (there) store_codes<Exact>(found.four, p, out + Exact::row() * out_stride);
  __syncwarp();
  for (int i = 0; i < count; ++i) {
    for (int w = lane_index(); w < p.words; w += 32)
      p.packed[list[i] * p.packed_stride + w] =
          reinterpret_cast<const std::uint32_t*>(out + i * out_stride)[w];
  }
  __syncwarp();
  unsigned left = __ballot_sync(kAllLanes, found.extreme && tells);
  for (; left != 0; left &= left - 1)
    encode_row(p, list[(__ffs(static_cast<int>(left)) - 1) / (32 / Exact::kRows)],
               reinterpret_cast<float*>(out));
  __syncwarp();
}

// kPairs: the first sums of C, of two squares, are looked up by both codes at once (at most 4 bits,
// powers of two). Otherwise the squares are.
template <class X, int kDim, bool kPairs>
__global__ void __launch_bounds__(32 * kHadamardWarps<kDim>, 1)
    encode_hadamard(const __grid_constant__ Problem p, const Cells cells,
                    const HadamardLayout layout) {
  using Tile = HadamardTile<X, kDim>;
  constexpr int kRows = Tile::kRows, kBlocks = Tile::kBlocks;
  char* const shared = cuda::dynamic_shared<char>();
  auto* const cell_table = reinterpret_cast<Cell*>(shared);
  auto* const lookup = reinterpret_cast<float*>(shared + layout.lookup);
  auto* const matrix = reinterpret_cast<uint4*>(shared + layout.matrix);
  auto* const boundaries = reinterpret_cast<float*>(shared + layout.boundaries);
  char* const stage = shared + layout.warps + warp_index() * layout.warp;
  char* const out = stage + layout.out;
  auto* const list = reinterpret_cast<std::int64_t*>(stage + layout.list);

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
  // Single squares behind the pairs, for rows that are done again.
  float* const singles = lookup + (kPairs ? levels * levels * kLookupCopies : 0);
  fill_table(singles, levels, kLookupCopies, square);
  if constexpr (kPairs) {
    fill_table(lookup, levels * levels, kLookupCopies,
               [&](int pair) { return square(pair & (levels - 1)) + square(pair >> p.bits); });
  }
  Tile::fill_matrix(matrix, p.rotation);
  __syncthreads();
  if (!fill_cells(cell_table, cells, boundaries, p.bits)) {
    cuda::copy_async_wait<0>();
    for (; first < p.rows; first += step)
      for (int i = 0; i < p.rows_at(first, kRows); ++i)
        encode_row(p, first + i, reinterpret_cast<float*>(out));
    return;
  }
  const Tables tables(cells, cell_table, lookup), exact_tables(cells, cell_table, singles);
  const unsigned radix = layout.radix;
  int doubtful = 0;  // rows in the list
  // Packed rows without gaps, of 16-byte pieces, a power of two of them.
  const int pieces = p.words / 4;
  const bool plain = p.words % 4 == 0 && (pieces & (pieces - 1)) == 0 && pieces <= 32 &&
                     p.packed_stride == p.words &&
                     reinterpret_cast<std::uintptr_t>(p.packed) % 16 == 0;

  const auto encode_tile = [&] {
    const int rows = p.rows_at(first, kRows);
    cuda::copy_async_wait<0>();
    __syncwarp();
    // The first pass, and the squares of x, of elements 16 step + 8 b + 2 q + e: [b][half][e].
    typename Tile::Sums y;
    const auto of_lane = cuda::halving_sum<0, 1, Tile::kSteps>([&](int k) {
      typename Tile::Elements a;
      Tile::load(a, stage, k);
      Tile::add(y, a, matrix, k, 0);
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
    const auto cc_of_lane = cuda::halving_sum<0, 1, Tile::kPasses>([&](int pass) {
      if (pass > 0) {
#pragma unroll
        for (int k = 0; k < Tile::kSteps; ++k) {
          typename Tile::Elements a;
          Tile::load(a, stage, k);
          Tile::add(y, a, matrix, k, pass);
        }
      }
      if (pass == Tile::kPasses - 1) {  // the last one to come
        __syncwarp();
        fetch(first + step);
      }
      Tile::butterflies(y);
      if (any_extreme) {  // 0 times those would not be 0
#pragma unroll
        for (int i = 0; i < kBlocks * 8; ++i)
          if (by[i % 4 / 2] == 0) y[i / 8][i / 4 % 2][i % 4] = 0;
      }
      LaneSums<8> sums;  // [half][2 t + e]
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
            four[block] = four[block] * layout.width_radix + code;
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
        Tile::store_fours(four, pass, layout.width, out + (lane / 4 + 8 * h) * layout.out_stride);
      }
      return sums;
    });
    const LaneSums<8> cc = cc_of_lane.over_quad();
    const auto sum_of = [&](int h) {
      return cc.at[4 * h] + cc.at[4 * h + 2] + (cc.at[4 * h + 1] + cc.at[4 * h + 3]);
    };
    const float my_cc = half == 0 ? sum_of(0) : sum_of(1);
    if (quarter < 2 && my_row < rows)
      store_norm(p, first + my_row, stored_scale(p.rule, norm, my_cc, 0));
    __syncwarp();
    if (layout.width != p.bits) Tile::close_up(out, layout.out_stride, p);
    if (plain && rows == kRows) {
      const char* from = out + lane / pieces * layout.out_stride + lane % pieces * 16;
      auto* const to = reinterpret_cast<uint4*>(p.packed + first * p.packed_stride);
      for (int at = lane; at < kRows * pieces; at += 32, from += 32 / pieces * layout.out_stride)
        __stcs(to + at, *reinterpret_cast<const uint4*>(from));
    } else {
      cuda::copy_rows_out(out, layout.out_stride, p.packed + first * p.packed_stride,
                          p.packed_stride, p.words, rows);
    }
    __syncwarp();

    // Lanes 4 r + h and 4 r + h + 2 tell of row r + 8 h.
    const float other = __shfl_xor_sync(kAllLanes, half == 0 ? nearest[1] : nearest[0], 1);
    const bool near = fminf(half == 0 ? nearest[0] : nearest[1], other) <= Tile::kDoubt;
    const bool doubt = (extreme || (near && !zero)) && my_row < rows;
    unsigned marks = __ballot_sync(kAllLanes, doubt);
    marks = (marks | marks >> 2) & 0x33333333u;
    if ((marks >> lane & 1) != 0)
      list[doubtful + __popc(marks & ((1u << lane) - 1))] = first + my_row;
    doubtful += __popc(marks);
  };

  for (;; first += step) {
    const bool more = first < p.rows;
    if (more) encode_tile();
    // Whole batches; what is left of them at the end.
    while (doubtful >= (more ? Tile::kBatch : 1)) {
      const int count = doubtful < Tile::kBatch ? doubtful : Tile::kBatch;
      doubtful -= count;
      __syncwarp();
      encode_exactly<Tile, X>(p, cells, exact_tables, radix, list + doubtful, count, out,
                              layout.out_stride);
    }
    if (!more) return;
  }
}

template <class X, int kDim>
Status run_hadamard(const Problem& p, int device, Stream stream) {
  using Tile = HadamardTile<X, kDim>;
  const Cells cells = cells_for(kDim, p.bits, kHadamardCellBytes, 2 * Tile::kDoubt);
  const bool pairs = Tile::kPower && p.bits <= 4;
  const auto align = [](int bytes) { return (bytes + 15) / 16 * 16; };
  const int levels = 1 << p.bits;
  HadamardLayout l{.radix = static_cast<unsigned>(levels)};
  l.width = p.bits == 2 || p.bits == 4 ? p.bits : 8;
  l.width_radix = 1u << l.width;
  l.lookup = cells.bytes();
  l.matrix = l.lookup + (levels + (pairs ? levels * levels : 0)) * kLookupCopies * 4;
  l.boundaries = l.matrix + Tile::kMatrixBytes;
  l.warps = l.boundaries + align(4 * levels);
  l.out = Tile::kRows * Tile::kStride;
  l.out_stride = align(std::max(4 * p.words, kDim * l.width / 8)) | 16;
  l.list = l.out + std::max(Tile::kRows * l.out_stride, 2 * 4 * kDim);
  l.warp = l.list + 2 * Tile::kRows * static_cast<int>(sizeof(std::int64_t));
  const auto grid =
      cuda::tiles_grid(p.rows, Tile::kRows, kHadamardWarps<kDim>, l.warps, l.warp, device);
  const auto launch = [&](auto kernel) {
    return cuda::launch(AuraEncode::kName, kernel, grid, device, stream, p, cells, l);
  };
  if constexpr (Tile::kPower) {
    if (pairs) return launch(encode_hadamard<X, kDim, true>);
  }
  return launch(encode_hadamard<X, kDim, false>);
}

}  // namespace bittern::encode
