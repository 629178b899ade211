// All of a chunk that does not know the state: P, T = (I + L)^-1 and the factors of its rows.
//
// A block has a chunk of one key head and up to two of its value heads. Six warps share k k^T and
// q k^T (WarpPairs). Then each head has two warps, and each of these 32 rows of L: it inverts two
// blocks of 16 in f32, by substitution, a column to a lane, and puts larger ones together on tensor
// cores: of the inverse [a 0; c b]^-1 = [A 0; C B] it finds C^T = -(A^T c^T) B^T, in which every
// factor is read from shared memory as it lies there. Factors are the sum of two numbers of the
// half type, and the product of the lesser ones is left out.
//
// e^(G[i] - G[j]) is 2^ of a difference of sums as in gdn_sum, but of log2(e) g, within 2^-16.
#pragma once
#include "ops/gdn/chunk_record.cuh"

namespace bittern::chunk_forward {

constexpr int kPrepareThreads = 192;
constexpr int kCopyThreads = 128;  // of them, those that copy rows
constexpr int kHeadsAtOnce = 2;
constexpr int kBlock16 = 16, kBlock32 = 32;
constexpr int kDiagonalPitch = kBlock16 + 4;  // floats

struct HeadGates {
  float2 sum[kMostRows];  // log2(e) G[i], as a high and a low part
  float beta[kMostRows];
};

// L of a head, and what T lacks of f32.
struct HeadParts {
  static constexpr int kSquare = kBlock32 * kBlock32 * 2;  // of half types
  // The squares of 32 on the diagonal, of which the blocks below the diagonal count, and the one
  // below them, in two parts each.
  static constexpr int kHigh = 0, kLow = 3 * kSquare;
  static constexpr int kDiagonal = 6 * kSquare;  // the blocks of 16 on the diagonal, in f32
  static constexpr int kBytes = kDiagonal + 4 * kBlock16 * kDiagonalPitch * 4;
};

struct PrepareShared {
  static constexpr int kKeys = 0, kQueries = 2 * kPart;
  static constexpr int kParts = 0;  // in their place
  // Of each record what follows P: T and the factors.
  static constexpr int kRests = kHeadsAtOnce * HeadParts::kBytes;
  static constexpr int kRestBytes = Record::kBytes - Record::kInverse;
  static constexpr int kGates = kRests + kHeadsAtOnce * kRestBytes;
  static constexpr int kNorms = kGates + kHeadsAtOnce * static_cast<int>(sizeof(HeadGates));
  static constexpr int kBytes = kNorms + 2 * kMostRows * 4;
  static_assert(kRests >= 4 * kPart && kRests % 128 == 0 && kRestBytes % 128 == 0);
};

struct PrepareProblem {
  Problem p;
  cuda::ChunkSlots slots;
  char* records;
  ChunkGates* gates = nullptr;             // of each chunk and head, if they are wanted
  int sharing;                             // value heads of a key head
  cuda::Divisor32 pairs, key_heads, rows;  // pairs of these; of the batch
  std::int64_t items;

  PrepareProblem(const Op::Desc& d, const Op::Args& a, void* workspace)
      : p(d, a, 1),
        slots(d, a.cu_seqlens),
        records(static_cast<char*>(workspace)),
        sharing(static_cast<int>(d.value_heads / d.key_heads)),
        pairs(divisor((sharing + kHeadsAtOnce - 1) / kHeadsAtOnce)),
        key_heads(divisor(d.key_heads)),
        rows(divisor(d.batch)),
        items(slots.count * d.key_heads * pairs.value()) {}

 private:
  // Nothing is divided where there are no items.
  static cuda::Divisor32 divisor(std::int64_t d) { return cuda::Divisor32(d > 0 ? d : 1); }
};

template <class X>
__device__ void multiply_tiles(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                               std::uint32_t b1) {
  const std::uint32_t b[2] = {b0, b1};
  if constexpr (std::is_same_v<X, bf16>) {
    cuda::multiply_bf16(d, a, b);
  } else {
    cuda::multiply_f16(d, a, b);
  }
}

// Two elements of a register, the first in the lower half.
template <class X>
__device__ float2 unpack_pair(std::uint32_t bits) {
  if constexpr (std::is_same_v<X, bf16>) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
  } else {
    return make_float2(cuda::load_math(X{static_cast<std::uint16_t>(bits)}),
                       cuda::load_math(X{static_cast<std::uint16_t>(bits >> 16)}));
  }
}

template <class X>
__device__ std::uint32_t add_zero_times(std::uint32_t x, std::uint32_t y) {
  if constexpr (std::is_same_v<X, bf16>) {
    return cuda::add_zero_times_bf16(x, y);
  } else {
    return cuda::add_zero_times_f16(x, y);
  }
}

// x = high + low, each of the half type.
struct SplitPair {
  std::uint32_t high, low;
};
template <class X>
__device__ SplitPair split_pair(float first, float second) {
  const std::uint32_t high = cuda::store_pair<X>(first, second);
  const float2 part = unpack_pair<X>(high);
  return {high, cuda::store_pair<X>(first - part.x, second - part.y)};
}

// Two tiles of sums, one beside the other, as the left factor of a product.
template <class X>
__device__ void split_tiles(const float (&left)[4], const float (&right)[4], float sign,
                            std::uint32_t (&high)[4], std::uint32_t (&low)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* pair = (i < 2 ? left : right) + i % 2 * 2;
    const SplitPair split = split_pair<X>(sign * pair[0], sign * pair[1]);
    high[i] = split.high;
    low[i] = split.low;
  }
}

// Rows of q or k into a tile, by kCopyThreads: zeros for masked tokens and past the chunk.
template <int kColumns, class X>
__device__ void copy_rows(int tile, const X* from, std::int64_t stride, int rows,
                          const std::uint8_t* mask) {
  constexpr int kAcross = kColumns / 8, kDown = kCopyThreads / kAcross;
  const int piece = static_cast<int>(threadIdx.x) % kAcross;
  int row = static_cast<int>(threadIdx.x) / kAcross;
  char* to = &shared_at<char>(tile + tile_place(row, piece));
  const X* at = from + row * stride + piece * 8;
  if (rows == kMostRows && mask == nullptr) {
#pragma unroll
    for (int i = 0; i < kMostRows / kDown; ++i, at += kDown * stride)
      cuda::copy_async_16(to + i * kDown * kRowBytes, at);
    return;
  }
#pragma unroll 1
  for (; row < kMostRows; row += kDown, to += kDown * kRowBytes, at += kDown * stride) {
    const bool there = row < rows && (mask == nullptr || mask[row] != 0);
    cuda::copy_async_16(to, there ? at : from, there ? kPiece : 0);
  }
}

// Where a lane's row of four 8 x 8 tiles lies in a tile of 64-element rows: two tiles down and two
// across, the second of each pair being the one across if kAcross, else down. Columns 16 further
// are at ^ 32, and rows at + kRowBytes each.
template <bool kAcross>
__device__ int lane_place() {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int far = lane / 16, near = lane / 8 % 2;
  const int row = (kAcross ? far : near) * 8 + lane % 8, piece = kAcross ? near : far;
  return row * kRowBytes + (piece ^ (lane % 8)) * kPiece;
}

// The products of a warp's 16 rows, a lane's of which is at `left`, with 16 `blocks` rows from row
// 16 `first`. Without kQueries those of keys alone.
template <class X, int kKeyDim, bool kQueries = true, int kBlocks>
__device__ void multiply_pairs(int left, int first, int blocks, float (&kk)[kBlocks][2][4],
                               float (&qk)[kBlocks][2][4]) {
  const int right = lane_place<true>() + 16 * first * kRowBytes;
#pragma unroll
  for (int step = 0; step < kKeyDim / 16; ++step) {
    const int part = step / 4 * kPart, columns = step % 4 * 32;
    const auto load = [&](std::uint32_t(&to)[4], int tile, int place) {
      cuda::load_tiles(to, &shared_at<char>(tile + part + (place ^ columns)));
    };
    std::uint32_t k[4], q[4];
    load(k, PrepareShared::kKeys, left);
    if constexpr (kQueries) load(q, PrepareShared::kQueries, left);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (block >= blocks) break;
      std::uint32_t b[4];
      load(b, PrepareShared::kKeys + 16 * block * kRowBytes, right);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        multiply_tiles<X>(kk[block][half], k, b[2 * half], b[2 * half + 1]);
        if constexpr (kQueries) multiply_tiles<X>(qk[block][half], q, b[2 * half], b[2 * half + 1]);
      }
    }
  }
}

// 1 / sqrt(x.x + 1e-6) of every row of a tile, times `scale`; two threads a row, kCopyThreads.
template <class X, int kKeyDim>
__device__ void measure_rows(int tile, float scale, float* to) {
  constexpr int kHalf = kKeyDim / 16;  // pieces
  const int row = static_cast<int>(threadIdx.x) / 2, half = static_cast<int>(threadIdx.x) % 2;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const int piece = half * kHalf + (i + row) % kHalf;
    const auto raw = shared_at<cuda::Pack<X, 8>>(tile + tile_place(row, piece));
#pragma unroll
    for (int e = 0; e < 8; ++e) sum = std::fma(raw.math(e), raw.math(e), sum);
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  if (half == 0) to[row] = scale / std::sqrt(sum + 1e-6f);
}

// What a lane reads of its two rows: 0 for masked tokens and past the chunk.
struct RowGates {
  float beta[2], g[2];
  bool there[2];
  __device__ RowGates(const Problem& p, const Problem::Item& item, const std::uint8_t* mask,
                      int rows) {
    const int first = 2 * (static_cast<int>(threadIdx.x) % 32);
    const float* of_beta = p.beta + p.beta_stride.at(item.row, item.begin + first, item.head);
    const float* of_g = p.g + p.g_stride.at(item.row, item.begin + first, item.head);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      there[e] = first + e < rows && (mask == nullptr || mask[first + e] != 0);
      beta[e] = there[e] ? of_beta[e * p.beta_stride.token] : 0.0f;
      g[e] = there[e] ? of_g[e * p.g_stride.token] : 0.0f;
    }
  }
};

// The gates of a head by one warp, two rows a lane; k and q count as 1.
__device__ inline void prepare_gates(const Problem& p, std::int64_t head, RowGates rows,
                                     HeadGates& gates, Factors& to) {
  constexpr double kLog2E = 0x1.71547652b82fep0;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (!rows.there[e]) continue;
    rows.beta[e] = gdn_strength(p.d, rows.beta[e]);
    if (p.d.gate) rows.g[e] = gdn_log_decay(rows.g[e], p.a_log[head], p.dt_bias[head]);
  }
  const double first = gdn_next_sum(0, rows.g[0]), both = gdn_next_sum(first, rows.g[1]);
  double through = both;  // the sum up to this lane's last row
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    const double other = __shfl_up_sync(~0u, through, static_cast<unsigned>(apart));
    if (lane >= apart) through += other;
  }
  double before = __shfl_up_sync(~0u, through, 1u);
  if (lane == 0) before = 0;
  const GdnSum last = gdn_sum(__shfl_sync(~0u, through, 31) * kLog2E);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int i = 2 * lane + e;
    const GdnSum at = gdn_sum((before + (e == 0 ? first : both)) * kLog2E);
    const float decay = cuda::approximate_exp2(at.high + at.low);
    gates.sum[i] = make_float2(at.high, at.low);
    gates.beta[i] = to.beta[i] = rows.beta[e];
    to.seen[i] = rows.beta[e] * decay;
    to.asked[i] = decay;
    to.kept[i] = cuda::approximate_exp2((last.high - at.high) + (last.low - at.low));
    to.decay[i] = cuda::approximate_exp2(last.high + last.low);
  }
}

// Where a head's T and L lie, in blocks of 16 x 16. Rows of a square of 32 have 64 bytes.
constexpr int kSquareRow = 2 * kBlock32;
struct HeadPlaces {
  int parts, inverse;
  // A piece in rows r and r + 8 of any block: those of other blocks are 32 and 16 rows from it.
  static __device__ int in_square(int row, int piece) {
    return row * kSquareRow + (piece ^ (row / 2 % 4)) * kPiece;
  }
  // `place` is a lane's, of lane_place or in_square.
  __device__ int of_t(int row, int column, int place) const {
    return inverse + row * 16 * kRowBytes + (place ^ (column * 32));
  }
  // Part kHigh or kLow of L, in the square `square`.
  __device__ int of_l(int part, int square, int row, int column, int place) const {
    return parts + part + square * HeadParts::kSquare + row % 2 * 16 * kSquareRow +
           (place ^ (column % 2 * 32));
  }
  // The lesser part of T, in the squares on the diagonal: in the place of L's, a block of which
  // goes only when T's is known.
  __device__ int of_t_low(int row, int column, int place) const {
    return of_l(HeadParts::kLow, row / 2, row, column, place);
  }
};

// The inverses of blocks `first` and first + 1 on the diagonal, by a warp. The block above the
// diagonal becomes 0.
template <class X>
__device__ void invert_blocks(const HeadPlaces& at, int first) {
  const int lane = static_cast<int>(threadIdx.x) % 32, column = lane % kBlock16;
  const int own = first + lane / kBlock16;
  const int l = at.parts + HeadParts::kDiagonal + own * kBlock16 * kDiagonalPitch * 4;
  float t[kBlock16];
#pragma unroll
  for (int i = 0; i < kBlock16; ++i) {
    float sum[2] = {};
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const auto row = shared_at<float4>(l + (i * kDiagonalPitch + j) * 4);
      const float of[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (j + e < i) sum[e % 2] = std::fma(of[e], t[j + e], sum[e % 2]);
    }
    t[i] = (i == column ? 1.0f : 0.0f) - (sum[0] + sum[1]);
  }
  const int place = column / 8 * kPiece;
  const int high = at.of_t(own, own, place) + column % 8 * 2;
  const int low = at.of_t_low(own, own, place) + column % 8 * 2;
#pragma unroll
  for (int i = 0; i < kBlock16; i += 2) {
    const SplitPair split = split_pair<X>(t[i], t[i + 1]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const auto part = [&](std::uint32_t pair) {
        return X{static_cast<std::uint16_t>(pair >> (16 * e))};
      };
      shared_at<X>((high ^ ((i + e) % 8 * kPiece)) + (i + e) * kRowBytes) = part(split.high);
      shared_at<X>((low ^ (i / 2 % 4 * kPiece)) + (i + e) * kSquareRow) = part(split.low);
    }
  }
  const int row = lane / 2, piece = lane % 2;
  shared_at<uint4>(at.of_t(first, first + 1, (piece ^ (row % 8)) * kPiece) + row * kRowBytes) =
      uint4{};
  shared_at<uint4>(at.of_t_low(first, first + 1, HeadPlaces::in_square(row, piece))) = uint4{};
}

// The blocks of T below two inverses of kTiles blocks, the first of which is `first`: the column of
// blocks `column`, by a warp. L is in square `square`. kLow: with the lesser part.
template <class X, int kTiles, bool kLow>
__device__ void join_blocks(const HeadPlaces& at, int square, int first, int column) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int place = lane_place<true>();
  const int in_square = HeadPlaces::in_square(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  // d += a b^T for 16 rows of a and 16 of b.
  const auto multiply = [&](float(&d)[2 * kTiles][4], const std::uint32_t(&high)[4],
                            const std::uint32_t(&low)[4], int rows, int of_high, int of_low) {
    std::uint32_t b[4], b_low[4];
    cuda::load_tiles(b, &shared_at<char>(of_high));
    cuda::load_tiles(b_low, &shared_at<char>(of_low));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float(&sum)[4] = d[2 * rows + half];
      multiply_tiles<X>(sum, low, b[2 * half], b[2 * half + 1]);
      multiply_tiles<X>(sum, high, b_low[2 * half], b_low[2 * half + 1]);
      multiply_tiles<X>(sum, high, b[2 * half], b[2 * half + 1]);
    }
  };
  float z[2 * kTiles][4] = {};
#pragma unroll
  for (int step = 0; step < kTiles; ++step) {
    std::uint32_t high[4], low[4];  // the first inverse, transposed
    const int m = first + step;
    cuda::load_tiles_transposed(high, &shared_at<char>(at.of_t(m, column, place)));
    cuda::load_tiles_transposed(low, &shared_at<char>(at.of_t_low(m, column, in_square)));
#pragma unroll
    for (int rows = 0; rows < kTiles; ++rows) {
      const int i = first + kTiles + rows;
      multiply(z, high, low, rows, at.of_l(HeadParts::kHigh, square, i, m, in_square),
               at.of_l(HeadParts::kLow, square, i, m, in_square));
    }
  }
  float c[2 * kTiles][4] = {};
#pragma unroll
  for (int step = 0; step < kTiles; ++step) {
    std::uint32_t high[4], low[4];
    split_tiles<X>(z[2 * step], z[2 * step + 1], -1.0f, high, low);
#pragma unroll
    for (int rows = 0; rows < kTiles; ++rows) {
      const int i = first + kTiles + rows, m = first + kTiles + step;
      multiply(c, high, low, rows, at.of_t(i, m, place), at.of_t_low(i, m, in_square));
    }
  }
  __syncwarp();
#pragma unroll
  for (int rows = 0; rows < kTiles; ++rows) {
    std::uint32_t high[4], low[4];
    split_tiles<X>(c[2 * rows], c[2 * rows + 1], 1.0f, high, low);
    const int i = first + kTiles + rows;
    cuda::store_tiles_transposed(&shared_at<char>(at.of_t(i, column, place)), high);
    if constexpr (kLow)
      cuda::store_tiles_transposed(&shared_at<char>(at.of_t_low(i, column, in_square)), low);
  }
}

// What a warp has of k k^T and q k^T: two bands of 8 rows, and two blocks of 16 columns. Warps 0 to
// 3 have columns 0 to 31, each in one band from the top and one from the bottom. Warps 4 and 5 have
// the other columns, in bands 4 to 7; above the diagonal nothing counts.
struct WarpPairs {
  int warp;
  __device__ int band(int down) const {
    return warp >= 4 ? 2 * warp - 4 + down : down == 0 ? warp : 7 - warp;
  }
  __device__ int first_block() const { return warp / 4 * 2; }
  // Which of the two blocks is on the diagonal; the lower bands of warps 0 to 3 are all below it.
  __device__ int diagonal() const { return warp >= 4 ? warp - 4 : warp / 2; }
};
using PairSums = float[2][2][4];

// L and P of a head in a warp's part.
template <class X>
class PairWriter {
 public:
  // P goes to `pairs`, L to `parts`.
  __device__ PairWriter(const HeadGates& gates, int parts, char* pairs, WarpPairs of)
      : gates_(gates), of_(of), pairs_(pairs), parts_(parts) {
    const int lane = static_cast<int>(cuda::opaque(threadIdx.x) % 32);
    row_ = lane / 4;
    column_ = lane % 4 * 2;
    odd_ = lane % 2 != 0;
    // Held in registers, or they would be computed again for every tile.
    const auto hold = [](int x) {
      return static_cast<int>(cuda::opaque(static_cast<unsigned>(x)));
    };
    p_place_ = hold(row_ * kRowBytes + (row_ ^ lane % 2) * kPiece + lane % 4 / 2 * 8);
    l_place_ = hold(HeadPlaces::in_square(row_, 0) + column_ * 2);
  }

  // Of P also what is above the diagonal in its blocks of 16. Returns what is 0 as long as all that
  // is put below those blocks is finite, if it is not checked.
  template <bool kChecked>
  __device__ std::uint32_t put(const PairSums& kk, const PairSums& qk) const {
    const Row upper(*this, 0), lower(*this, 1);
    const int diagonal = of_.diagonal();
    const bool left = of_.warp < 4;
    std::uint32_t zeros = 0;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      float4 sums[2];  // of a lane's two columns of each tile
#pragma unroll
      for (int half = 0; half < 2; ++half)
        sums[half] = *reinterpret_cast<const float4*>(gates_.sum + column(block, half));
      const bool before = block == 0 && diagonal == 1;
      if (left || before) {
        put_below<kChecked>(lower, left ? 2 : 1, block, sums, kk[block], qk[block], 1, zeros);
      } else if (block == diagonal) {
        put_diagonal(lower, block, sums, kk[block], qk[block], 1);
      }
      if (before) {
        put_below<kChecked>(upper, of_.warp / 4, block, sums, kk[block], qk[block], 0, zeros);
      } else if (block == diagonal) {
        put_diagonal(upper, block, sums, kk[block], qk[block], 0);
      }
    }
    return zeros;
  }

 private:
  struct Row {
    int band, index;
    float2 sum;
    float beta;
    __device__ Row(const PairWriter& w, int down)
        : band(w.of_.band(down)),
          index(8 * band + w.row_),
          sum(w.gates_.sum[index]),
          beta(w.gates_.beta[index]) {}
    // e^(G[i] - G[j]) of a lane's two columns.
    __device__ float2 decays(const float4& sums) const {
      return make_float2(cuda::approximate_exp2((sum.x - sums.x) + (sum.y - sums.y)),
                         cuda::approximate_exp2((sum.x - sums.z) + (sum.y - sums.w)));
    }
  };
  // The lane's first column of a tile.
  __device__ int column(int block, int half) const {
    return 16 * (of_.first_block() + block) + 8 * half + column_;
  }
  // A NaN here is also in W, from the same token on, which is enough: in T it would be multiplied
  // by zeros.
  __device__ static float finite(float x) { return fabsf(x) < INFINITY ? x : 0.0f; }
  // Two tiles of P, one beside the other. Lanes exchange what they have of them, so that each
  // writes four neighbours.
  __device__ void put_p(const Row& of, int block, const std::uint32_t (&p)[2]) const {
    const std::uint32_t other = __shfl_xor_sync(~0u, odd_ ? p[0] : p[1], 1);
    const int place =
        (p_place_ ^ 2 * kPiece * (of_.first_block() + block)) + 8 * of.band * kRowBytes;
    *reinterpret_cast<uint2*>(pairs_ + static_cast<unsigned>(place)) =
        odd_ ? make_uint2(other, p[1]) : make_uint2(p[0], other);
  }
  // Two tiles below the blocks of 16 on the diagonal, in square `square` of L.
  template <bool kChecked>
  __device__ void put_below(const Row& of, int square, int block, const float4 (&sums)[2],
                            const float (&kk)[2][4], const float (&qk)[2][4], int down,
                            std::uint32_t& zeros) const {
    const int place =
        parts_ + (l_place_ + square * HeadParts::kSquare + of.band % 4 * 8 * kSquareRow);
    std::uint32_t p[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float *const k = kk[half] + 2 * down, *const q = qk[half] + 2 * down;
      const float2 decay = of.decays(sums[half]);
      p[half] = cuda::store_pair<X>(q[0] * decay.x, q[1] * decay.y);
      float l[2] = {k[0] * of.beta * decay.x, k[1] * of.beta * decay.y};
      if constexpr (kChecked) l[0] = finite(l[0]), l[1] = finite(l[1]);
      const SplitPair split = split_pair<X>(l[0], l[1]);
      if constexpr (!kChecked) zeros = add_zero_times<X>(zeros, split.high);
      const int to = place ^ (2 * block + half) * kPiece;
      shared_at<std::uint32_t>(to + HeadParts::kHigh) = split.high;
      shared_at<std::uint32_t>(to + HeadParts::kLow) = split.low;
    }
    put_p(of, block, p);
  }
  // Two tiles in one of these. Beyond the diagonal, decays may be infinite.
  __device__ void put_diagonal(const Row& of, int block, const float4 (&sums)[2],
                               const float (&kk)[2][4], const float (&qk)[2][4], int down) const {
    const int place = parts_ + HeadParts::kDiagonal + (of.index * kDiagonalPitch + column_) * 4;
    std::uint32_t p[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float *const k = kk[half] + 2 * down, *const q = qk[half] + 2 * down;
      const float2 decay = of.decays(sums[half]);
      const int after = column(block, half) - of.index;
      const bool first = after <= 0, second = after < 0;
      p[half] = cuda::store_pair<X>(first ? q[0] * decay.x : 0.0f, second ? q[1] * decay.y : 0.0f);
      shared_at<float2>(place + 8 * half * 4) =
          make_float2(first ? finite(k[0] * of.beta * decay.x) : 0.0f,
                      second ? finite(k[1] * of.beta * decay.y) : 0.0f);
    }
    put_p(of, block, p);
  }

  const HeadGates& gates_;
  const WarpPairs of_;
  char* const pairs_;
  const int parts_;
  int row_, column_, p_place_, l_place_;
  bool odd_;
};

template <class X, int kKeyDim>
__global__ void __launch_bounds__(kPrepareThreads, 4)
    chunk_prepare(const __grid_constant__ PrepareProblem all) {
  cuda::begin_next_kernel();
  using Shared = PrepareShared;
  const Problem& p = all.p;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int sharing = all.sharing;
  const auto of_key = static_cast<int>(all.pairs.divide(blockIdx.x));
  const int first =
      (static_cast<int>(blockIdx.x) - of_key * static_cast<int>(all.pairs.value())) * kHeadsAtOnce;
  const auto key_heads = static_cast<int>(all.key_heads.value());
  const auto turn = static_cast<int>(all.key_heads.divide(static_cast<unsigned>(of_key)));
  const int key_head = of_key - turn * key_heads;
  // The last chunks of all batch rows first: the chain begins with the first ones, and finds them
  // in the L2.
  const auto from_end = static_cast<int>(all.rows.divide(static_cast<unsigned>(turn)));
  const int row = turn - from_end * static_cast<int>(all.rows.value());
  const int of_row = static_cast<int>(all.slots.per_row.value()) - 1 - from_end;
  const std::int64_t slot = row * all.slots.per_row.value() + of_row;
  const cuda::ChunkTokens chunk = all.slots.of_row(row, of_row);
  if (chunk.rows == 0) return;
  Problem::Item item{};
  item.row = row;
  item.begin = chunk.begin - row * p.d.tokens;
  const std::uint8_t* mask = p.mask != nullptr ? p.mask + chunk.begin : nullptr;
  const auto head = [&](int i) {
    return p.d.head_map == HeadMap::tiled ? key_head + (first + i) * key_heads
                                          : key_head * sharing + first + i;
  };
  const int count = sharing - first < kHeadsAtOnce ? 1 : kHeadsAtOnce;
  const auto at = [&](const TokenStrides& stride) {
    return stride.at(item.row, item.begin, key_head);
  };
  char* const first_record = all.records + record_at(p, slot, head(0));
  const std::int64_t apart =
      (p.d.head_map == HeadMap::tiled ? p.d.key_heads : 1) * std::int64_t{Record::kBytes};
  const auto record = [&](int i) { return first_record + i * apart; };
  const auto inverse = [](int i) { return Shared::kRests + i * Shared::kRestBytes; };
  const auto factors = [&](int i) -> Factors& { return shared_at<Factors>(inverse(i) + kPart); };
  const auto gates = [](int i) -> HeadGates& {
    return shared_at<HeadGates>(Shared::kGates + i * static_cast<int>(sizeof(HeadGates)));
  };
  const bool copies = thread < kCopyThreads;
  if (copies) {
    copy_rows<kKeyDim>(Shared::kKeys, static_cast<const X*>(p.k) + at(p.k_stride), p.k_stride.token,
                       chunk.rows, mask);
    copy_rows<kKeyDim>(Shared::kQueries, static_cast<const X*>(p.q) + at(p.q_stride),
                       p.q_stride.token, chunk.rows, mask);
    cuda::copy_async_commit();
  } else if (const int of = warp - kCopyThreads / 32; of < count) {
    item.head = head(of);
    prepare_gates(p, item.head, RowGates(p, item, mask, chunk.rows), gates(of), factors(of));
  }
  auto* const k_norm = &shared_at<float>(Shared::kNorms);
  float* const q_norm = k_norm + kMostRows;
  if (!p.d.qk_l2norm && thread < kMostRows) k_norm[thread] = 1, q_norm[thread] = p.scale;
  cuda::copy_async_wait<0>();
  __syncthreads();
  if (p.d.qk_l2norm) {
    if (copies) {
      measure_rows<X, kKeyDim>(Shared::kKeys, 1.0f, k_norm);
      measure_rows<X, kKeyDim>(Shared::kQueries, p.scale, q_norm);
    }
    __syncthreads();
  }
  if (thread / kMostRows < count) {
    Factors& of = factors(thread / kMostRows);
    const int i = thread % kMostRows;
    of.seen[i] *= k_norm[i];
    of.asked[i] *= q_norm[i];
    of.kept[i] *= k_norm[i];
    if (all.gates != nullptr) {
      const HeadGates& from = gates(thread / kMostRows);
      ChunkGates& to = all.gates[slot * p.d.value_heads + head(thread / kMostRows)];
      to.high[i] = from.sum[i].x;
      to.low[i] = from.sum[i].y;
      to.beta[i] = from.beta[i];
      to.k_norm[i] = k_norm[i];
      to.q_norm[i] = q_norm[i];
    }
  }
  const WarpPairs mine{warp};
  PairSums kk = {}, qk = {};
  // Lanes 8 to 15 of each 16 give rows of the lower band.
  const int near = lane / 8 % 2, left = 8 * (mine.band(near) - near) * kRowBytes;
  multiply_pairs<X, kKeyDim>(lane_place<false>() + left, mine.first_block(), 2, kk, qk);
  if (p.d.qk_l2norm) {
    const int columns = 16 * mine.first_block() + 2 * (lane % 4);
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      const int i = 8 * mine.band(e / 2 % 2) + lane / 4, j = columns + 8 * (e / 4) + e % 2;
      kk[e / 8][e / 4 % 2][e % 4] *= k_norm[i] * k_norm[j];
      qk[e / 8][e / 4 % 2][e % 4] *= q_norm[i] * k_norm[j];
    }
  } else {
#pragma unroll
    for (int e = 0; e < 16; ++e) qk[e / 8][e / 4 % 2][e % 4] *= p.scale;
  }
  __syncthreads();  // what is made of k and q comes into their place
  const auto parts = [](int i) { return Shared::kParts + i * HeadParts::kBytes; };
  const auto put = [&]<bool kChecked>(std::bool_constant<kChecked>) {
    std::uint32_t zeros = 0;
    char* pairs = record(0) + Record::kPairs;
#pragma unroll 1
    for (int n = 0; n < count; ++n, pairs += apart)
      zeros |= PairWriter<X>(gates(n), parts(n), pairs, mine).template put<kChecked>(kk, qk);
    return zeros;
  };
  if (__any_sync(~0u, put(std::false_type()) != 0)) put(std::true_type());
  __syncthreads();
  // Two warps of warps 0 to 3 to a head; the others are done when they have written its factors.
  const auto put_out = [&](char* to, int from) {
    *reinterpret_cast<uint4*>(to) = shared_at<uint4>(from);
  };
  if (!copies) {
    const int n = warp - kCopyThreads / 32;
    if (n >= count) return;
    for (int at = lane * kPiece; at < static_cast<int>(sizeof(Factors)); at += 32 * kPiece)
      put_out(record(n) + Record::kFactors + at, inverse(n) + kPart + at);
    return;
  }
  const int of = warp / 2, of_two = warp % 2;
  if (of >= count) return;
  const HeadPlaces places{parts(of), inverse(of)};
  const auto sync_head = [&] { cuda::barrier_wait(1 + of, 64); };
  invert_blocks<X>(places, 2 * of_two);
  __syncwarp();
  join_blocks<X, 1, true>(places, of_two, 2 * of_two, 2 * of_two);
  sync_head();
  join_blocks<X, 2, false>(places, 2, 0, of_two);
  sync_head();
  char* const to = record(of) + Record::kInverse + thread % 64 * kPiece;
#pragma unroll
  for (int i = 0; i < kMostRows / 8; ++i) {
    const int place = i * 8 * kRowBytes;
    const int piece = thread % kPieces ^ thread % 64 / kPieces;
    if (piece < 2 * (i / 2 + 1)) put_out(to + place, places.inverse + place + thread % 64 * kPiece);
  }
}

}  // namespace bittern::chunk_forward
