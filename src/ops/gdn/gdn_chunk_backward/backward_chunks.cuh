// The gradients of a chunk, of what the chains have left of it (S, H, y, r): products on tensor
// cores, by warpgroups, whose both sides lie in shared memory.
//
// A block takes chunks of a key head, one after the other, and the value heads of each in turn, so
// that d_q and d_k are summed in registers. Of its two warpgroups each has 64 of the keys, in M, N,
// Z, d_q and d_k, and 32 of the columns of what is made for pairs of tokens. What the next head
// needs is copied meanwhile: d_o, y and r to a second place, S and H where these were.
//
// A head with more than 128 values takes several turns, of a sheet each; pairs of tokens wait for
// the last one. Keys and values that a sheet has not are 0 (kWhole: it has 128 of both).
//
// k and q enter products as they are, and n_k and n_q of their rows go to the other side.
#pragma once
#include "ops/gdn/gdn_chunk_backward/backward_device.cuh"

namespace bittern::chunk_backward {

constexpr int kChunkThreads = 2 * kGroupThreads;
constexpr int kKeys64 = 64;     // of a warpgroup
constexpr int kColumns32 = 32;  // the same of the pairs' columns
constexpr int kKeyTiles = kKeys64 / 8, kColumnTiles = kColumns32 / 8;

struct ChunksProblem {
  Problem p;
  cuda::ChunkSlots slots;
  const void* d_o;
  void *d_q, *d_k, *d_v;
  TokenStrides d_o_stride, d_q_stride, d_k_stride, d_v_stride;
  Places places;
  Divisor key_heads;
  int sharing;  // value heads of a key head
  std::int64_t items;

  ChunksProblem(const Op::Desc& d, const Op::Args& a, const Places& in)
      : p(d, forward_args(a), 1),
        slots(d, a.cu_seqlens),
        d_o(a.d_o.data),
        d_q(a.d_q.data),
        d_k(a.d_k.data),
        d_v(a.d_v.data),
        d_o_stride(a.d_o),
        d_q_stride(a.d_q),
        d_k_stride(a.d_k),
        d_v_stride(a.d_v),
        places(in),
        key_heads(d.key_heads),
        sharing(static_cast<int>(d.value_heads / d.key_heads)),
        items(slots.count * d.key_heads) {}
};

// A chunk and head: the block's first, and from there on.
struct ChunkCursor {
  std::int64_t index, slot, key_head, head;
  std::int64_t row, begin;  // its batch row, and its first token there
  int rows, turn, sheet;

  __device__ void start(const ChunksProblem& all) {
    index = blockIdx.x;
    find(all);
  }
  __device__ bool past(const ChunksProblem& all) const { return index >= all.items; }
  // Of the chunk and key head, and of the head.
  __device__ bool first() const { return turn == 0 && sheet == 0; }
  __device__ bool last(const ChunksProblem& all) const {
    return turn + 1 == all.sharing && last_sheet(all);
  }
  __device__ bool last_sheet(const ChunksProblem& all) const {
    return sheet + 1 == all.places.sheets_each;
  }
  __device__ void advance(const ChunksProblem& all) {
    if (!last_sheet(all)) {
      ++sheet;
    } else if (!last(all)) {
      ++turn;
      sheet = 0;
      name_head(all);
    } else {
      index += gridDim.x;
      find(all);
    }
  }

 private:
  __device__ void find(const ChunksProblem& all) {
    turn = sheet = 0;
    for (; index < all.items; index += gridDim.x) {
      slot = all.key_heads.divide(index);
      const cuda::ChunkTokens chunk = all.slots.at(slot);
      if (chunk.rows == 0) continue;
      key_head = index - slot * all.key_heads.value();
      row = all.slots.sequences > 0 ? 0 : all.slots.per_row.divide(slot);
      begin = chunk.begin - row * all.p.d.tokens;
      rows = chunk.rows;
      name_head(all);
      return;
    }
  }
  __device__ void name_head(const ChunksProblem& all) {
    head = all.p.tiled ? key_head + turn * all.key_heads.value() : key_head * all.sharing + turn;
  }
};

// What the threads of a block tell each other.
struct ChunkNotes {
  float columns[4][kMostRows];   // of W, over the rows of a warp
  float along[2][2][kMostRows];  // D . n of d_q and of d_k, by halves
  ChunkCursor cursors[4];
  alignas(16) char unused[128];  // tiles that are not wanted
};

struct ChunkShared {
  static constexpr int kKeys = 0, kQueries = 2 * kPart;
  static constexpr int kState = 4 * kPart, kGradient = 8 * kPart;
  // Two sets of d_o, y and r.
  static constexpr int kSets = 12 * kPart, kSetBytes = 6 * kPart;
  static constexpr int kOut = 0, kY = 2 * kPart, kR = 4 * kPart;
  // For every pair of tokens, what k and q are multiplied by for d_q and d_k.
  static constexpr int kOverKeys = 24 * kPart;     // DP[i][j] n_k[j]
  static constexpr int kOverQueries = 25 * kPart;  // DP[j][i] n_q[j]
  static constexpr int kOverBoth = 26 * kPart;     // (X[i][j] + X[j][i]) n_k[j]
  static constexpr int kGates = 27 * kPart;        // two
  static constexpr int kNotes = kGates + 2 * static_cast<int>(sizeof(ChunkGates));
  static constexpr int kBytes = kNotes + static_cast<int>(sizeof(ChunkNotes));
  static_assert(sizeof(ChunkGates) % kPiece == 0 && kBytes <= 227 * 1024);
};

// d = a b + (add ? d : 0), a [64, 16 kSteps] in tiles; b by columns, 32 of them.
template <class X, int kSteps>
__device__ void multiply_pairs32(float (&d)[4 * kColumnTiles], cuda::WarpgroupMatrix a,
                                 cuda::WarpgroupMatrix b, bool add = false) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int at = s / 4 * kPart + s % 4 * 32;
    if constexpr (std::is_same_v<X, bf16>) {
      cuda::warpgroup_multiply_bf16(d, a.at(at), b.at(at), add || s > 0);
    } else {
      cuda::warpgroup_multiply_f16(d, a.at(at), b.at(at), add || s > 0);
    }
  }
}
// b by rows, 64 columns; kStride bytes from 64 rows of it to the next.
template <class X, int kSteps, int kStride>
__device__ void multiply_keys64(float (&d)[4 * kKeyTiles], cuda::WarpgroupMatrix a,
                                cuda::WarpgroupMatrix b, bool add) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const auto left = a.at(s / 4 * kPart + s % 4 * 32);
    const auto right = b.at(s / 4 * kStride + s % 4 * 2048);
    if constexpr (std::is_same_v<X, bf16>) {
      cuda::warpgroup_multiply_rows_bf16(d, left, right, add || s > 0);
    } else {
      cuda::warpgroup_multiply_rows_f16(d, left, right, add || s > 0);
    }
  }
}

// The sum of the four lanes that share a row.
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

template <class X, bool kWhole>
class ChunkGradients {
 public:
  using Shared = ChunkShared;
  using KeySums = float[4 * kKeyTiles];
  using PairSums = float[4 * kColumnTiles];

  __device__ explicit ChunkGradients(const ChunksProblem& all) : all_(all), p_(all.p) {
    find_thread();
  }

  __device__ void run() {
    // Where the block is and goes next: found ahead by one thread, each in the place of the one
    // four before it.
    if (thread_ == 0) {
      cursor(0).start(all_);
      cursor(1) = cursor(0);
      if (!cursor(0).past(all_)) cursor(1).advance(all_);
    }
    __syncthreads();
    if (cursor(0).past(all_)) return;
    load_set(cursor(0), 0);
    cuda::copy_async_commit();
    load_states(cursor(0));
    cuda::copy_async_commit();
    load_keys(cursor(0));
    cuda::copy_async_commit();
#pragma unroll 1
    for (int turn = 0; !cursor(turn).past(all_); ++turn) step(turn);
  }

 private:
  // Again for every head, and within: else all that follows from it is found ahead, and kept in
  // registers that there are not.
  __device__ void find_thread() {
    thread_ = static_cast<int>(cuda::opaque(threadIdx.x));
    lane_ = thread_ % 32;
    warp_ = thread_ / 32 % 4;
    group_ = thread_ / kGroupThreads;
    row_ = 16 * warp_ + lane_ / 4;
  }
  static __device__ ChunkNotes& notes() { return shared_at<ChunkNotes>(Shared::kNotes); }
  static __device__ ChunkCursor& cursor(int turn) { return notes().cursors[turn % 4]; }
  static __device__ ChunkGates& gates(int set) {
    return shared_at<ChunkGates>(Shared::kGates + set * static_cast<int>(sizeof(ChunkGates)));
  }
  static __device__ int set_place(int set) { return Shared::kSets + set * Shared::kSetBytes; }
  static __device__ cuda::WarpgroupMatrix matrix(int place) {
    return cuda::warpgroup_matrix(&shared_at<char>(place));
  }

  // ---- copies ----

  __device__ bool there(const ChunkCursor& c, int row) const {
    return row < c.rows &&
           (p_.mask == nullptr || p_.mask[c.row * p_.d.tokens + c.begin + row] != 0);
  }
  // How many keys there are, and values in a sheet.
  __device__ int key_dim() const { return kWhole ? kWide : static_cast<int>(p_.d.key_dim); }
  __device__ int sheet_values(const ChunkCursor& c) const {
    const int all = static_cast<int>(p_.d.value_dim) - c.sheet * kSheetValues;
    return kWhole || all > kSheetValues ? kSheetValues : all;
  }
  __device__ int first_value(const ChunkCursor& c) const {
    return kWhole ? 0 : c.sheet * kSheetValues;
  }
  // Rows of q, k or d_o, from column `first` on: zeros for masked tokens and past the chunk.
  __device__ void copy_rows(const ChunkCursor& c, int tile, const void* from,
                            const TokenStrides& stride, std::int64_t head, int first,
                            int columns) const {
    constexpr int kAcross = kWide / 8, kDown = kChunkThreads / kAcross;
    int row = thread_ / kAcross;
    char* const to = &shared_at<char>(tile + tile_place(row, thread_ % kAcross));
    const X* at = static_cast<const X*>(from) + stride.at(c.row, c.begin + row, head) + first +
                  thread_ % kAcross * 8;
    const bool counts = thread_ % kAcross * 8 < columns;
    const bool whole = c.rows == kMostRows && p_.mask == nullptr;
#pragma unroll
    for (int i = 0; i < kMostRows / kDown; ++i, row += kDown, at += kDown * stride.token) {
      const bool has = counts && (whole || there(c, row));
      cuda::copy_async_16(to + i * kDown * kRowBytes, has ? at : from, has ? kPiece : 0);
    }
  }
  // has(i): is there a square i?
  template <int kBytes, class F>
  __device__ void copy_tiles(int to, const char* from, F&& has) const {
    static_assert(kBytes % (kChunkThreads * kPiece) == 0);
#pragma unroll
    for (int i = 0; i < kBytes / (kChunkThreads * kPiece); ++i) {
      const int at = (i * kChunkThreads + thread_) * kPiece;
      const bool there = has(i * kChunkThreads * kPiece / kPart);
      cuda::copy_async_16(&shared_at<char>(to + at), from + at, there ? kPiece : 0);
    }
  }
  __device__ std::int64_t place_of(const ChunkCursor& c) const {
    return c.slot * p_.d.value_heads + c.head;
  }
  __device__ std::int64_t sheet_of(const ChunkCursor& c) const {
    return kWhole ? place_of(c) : place_of(c) * all_.places.sheets_each + c.sheet;
  }
  __device__ void load_set(const ChunkCursor& c, int set) const {
    const char* const sheet = all_.places.sheets + sheet_of(c) * Sheet::kBytes;
    const int place = set_place(set);
    copy_rows(c, place + Shared::kOut, all_.d_o, all_.d_o_stride, c.head, first_value(c),
              sheet_values(c));
    static_assert(Sheet::kR == Sheet::kY + 2 * kPart && Shared::kR == Shared::kY + 2 * kPart);
    copy_tiles<4 * kPart>(place + Shared::kY, sheet + Sheet::kY,
                          [&](int i) { return i % 2 * kGroupValues < sheet_values(c); });
    const auto* const from = reinterpret_cast<const char*>(all_.places.gates + place_of(c));
    if (thread_ * kPiece < static_cast<int>(sizeof(ChunkGates)))
      cuda::copy_async_16(reinterpret_cast<char*>(&gates(set)) + thread_ * kPiece,
                          from + thread_ * kPiece);
  }
  __device__ void load_states(const ChunkCursor& c) const {
    const char* const sheet = all_.places.sheets + sheet_of(c) * Sheet::kBytes;
    copy_tiles<8 * kPart>(Shared::kState, sheet + Sheet::kState, [&](int i) {
      return i % 2 * kKeys64 < key_dim() && i / 2 % 2 * kGroupValues < sheet_values(c);
    });
  }
  __device__ void load_keys(const ChunkCursor& c) const {
    copy_rows(c, Shared::kKeys, p_.k, p_.k_stride, c.key_head, 0, key_dim());
    copy_rows(c, Shared::kQueries, p_.q, p_.q_stride, c.key_head, 0, key_dim());
  }

  // ---- a head ----

  __device__ int row(int down) const { return row_ + 8 * down; }
  // The place of a lane's two elements of tile t of its warpgroup's keys, in row row(down).
  __device__ int pair_place(int tile, int t, int down) const {
    return tile + group_ * kPart + row(down) * kRowBytes + (t ^ (lane_ / 4)) * kPiece +
           lane_ % 4 * 4;
  }
  __device__ float2 pair_at(int tile, int t, int down) const {
    return unpack_pair<X>(shared_at<std::uint32_t>(pair_place(tile, t, down)));
  }

  // to += factor m, and the dot products of m with the rows of `tile`.
  __device__ void add_keys(KeySums& to, const KeySums& m, const float (&factor)[2], int tile,
                           float (&dots)[2]) const {
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      float dot = 0;
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
        const int i = 4 * t + 2 * down;
        const float2 x = pair_at(tile, t, down);
        dot = std::fma(x.x, m[i], dot);
        dot = std::fma(x.y, m[i + 1], dot);
        to[i] = std::fma(factor[down], m[i], to[i]);
        to[i + 1] = std::fma(factor[down], m[i + 1], to[i + 1]);
      }
      dots[down] = quad_sum(dot);
    }
  }
  __device__ void put_rows(float (&to)[2][kMostRows], const float (&x)[2]) const {
    if (lane_ % 4 == 0) {
      to[group_][row(0)] = x[0];
      to[group_][row(1)] = x[1];
    }
  }

  __device__ void step(int turn) {
    const ChunkCursor &c = cursor(turn), &next = cursor(turn + 1);
    const bool more = !next.past(all_);
    const int set = turn % 2;
    find_thread();
    cuda::copy_async_wait<1>();  // not for q and k
    cuda::fence_shared();
    __syncthreads();
    if (thread_ == kChunkThreads - 1 && more) {
      cursor(turn + 2) = next;
      cursor(turn + 2).advance(all_);
    }
    if (more) load_set(next, set ^ 1);
    cuda::copy_async_commit();

    const int place = set_place(set);
    const auto out = matrix(place + Shared::kOut), y = matrix(place + Shared::kY),
               r = matrix(place + Shared::kR);
    const auto state = matrix(Shared::kState + group_ * kPart);
    KeySums n, m;  // n is Z later
    cuda::warpgroup_begin();
    multiply_keys64<X, 8, 2 * kPart>(n, out, state, false);
    cuda::warpgroup_commit();
    multiply_keys64<X, 8, 2 * kPart>(m, r, state, false);
    cuda::warpgroup_commit();
    RowSums& sums = all_.places.sums[sheet_of(c)];
    multiply_states(sums);
    const ChunkGates& g = gates(set);
    if (c.first()) {
      cuda::copy_async_wait<1>();
      cuda::fence_shared();
      __syncthreads();
      const auto keys = matrix(Shared::kKeys), queries = matrix(Shared::kQueries);
      const auto columns = keys.at(group_ * kColumns32 * kRowBytes);
      cuda::warpgroup_begin();
      multiply_pairs32<X, 8>(kk_, keys, columns);
      multiply_pairs32<X, 8>(qk_, queries, columns);
      cuda::warpgroup_commit();
      cuda::warpgroup_wait<0>();
      cuda::warpgroup_hold(kk_);
      cuda::warpgroup_hold(qk_);
      start_keys(g);
    }
    float e[2], l[2], b[2];
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const int i = row(down);
      e[down] = cuda::approximate_exp2(g.high[i] + g.low[i]);
      l[down] = rest(g, i);
      b[down] = -(g.beta[i] * e[down]);
    }
    float dots[2] = {};
    const auto put_dots = [&](float(&to)[2][kMostRows], const float(&norm)[kMostRows]) {
      const float x[2] = {dots[0] * norm[row(0)], dots[1] * norm[row(1)]};
      put_rows(to, x);
    };
    cuda::warpgroup_wait<1>();
    cuda::warpgroup_hold(n);
    add_keys(d_q_, n, e, Shared::kQueries, dots);
    put_dots(sums.q_n, g.q_norm);
    cuda::warpgroup_begin();
    multiply_keys64<X, 8, 2 * kPart>(n, y, matrix(Shared::kGradient + group_ * kPart), false);
    cuda::warpgroup_commit();
    PairSums of_sheet[2];
    PairSums& dp = kWhole ? of_sheet[0] : of_head_[0];
    PairSums& dl = kWhole ? of_sheet[1] : of_head_[1];
    const bool more_sheets = !kWhole && !c.last_sheet(all_), add = !kWhole && c.sheet > 0;
    const auto columns = y.at(group_ * kColumns32 * kRowBytes);
    multiply_pairs32<X, 8>(dp, out, columns, add);
    multiply_pairs32<X, 8>(dl, r, columns, add);
    cuda::warpgroup_commit();
    cuda::warpgroup_wait<2>();
    cuda::warpgroup_hold(m);
    add_keys(d_k_, m, b, Shared::kKeys, dots);
    put_dots(sums.k_m, g.k_norm);
    cuda::warpgroup_wait<1>();
    cuda::warpgroup_hold(n);
    __syncthreads();  // S and H have been read
    if (more) load_states(next);
    cuda::copy_async_commit();
    add_keys(d_k_, n, l, Shared::kKeys, dots);
    put_dots(sums.k_z, g.k_norm);

    cuda::warpgroup_wait<0>();
    cuda::warpgroup_hold(dp);
    cuda::warpgroup_hold(dl);
    find_thread();
    if (!more_sheets) {
      put_pairs(g, dp, dl, sums);  // dp becomes C, so far as it is the warp's
      cuda::fence_shared();
      __syncthreads();
      const auto keys = matrix(Shared::kKeys + group_ * kPart);
      const auto queries = matrix(Shared::kQueries + group_ * kPart);
      cuda::warpgroup_begin();
      multiply_keys64<X, 4, 0>(d_q_, matrix(Shared::kOverKeys), keys, true);
      multiply_keys64<X, 4, 0>(d_k_, matrix(Shared::kOverQueries), queries, true);
      multiply_keys64<X, 4, 0>(d_k_, matrix(Shared::kOverBoth), keys, true);
      cuda::warpgroup_commit();
    }
    uint4 v[4];
    load_values(c, v);
    if (!more_sheets) add_below(dp, sums);
    put_values(c, v, place + Shared::kR, g, sums);
    cuda::warpgroup_wait<0>();
    cuda::warpgroup_hold(d_q_);
    cuda::warpgroup_hold(d_k_);
    if (c.last(all_)) {
      finish_keys(c, g);
      if (more) {
        __syncthreads();
        load_keys(next);
      }
    }
    cuda::copy_async_commit();
  }

  // <S, H>: their tiles lie alike.
  __device__ void multiply_states(RowSums& sums) const {
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < 4 * kPart / (kChunkThreads * kPiece); ++i) {
      const int at = (i * kChunkThreads + thread_) * kPiece;
      const auto s = shared_at<cuda::Pack<X, 8>>(Shared::kState + at);
      const auto h = shared_at<cuda::Pack<X, 8>>(Shared::kGradient + at);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j % 2] = std::fma(s.math(j), h.math(j), sum[j % 2]);
    }
    float all = sum[0] + sum[1];
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) all += __shfl_xor_sync(~0u, all, apart);
    if (lane_ == 0) sums.inner[thread_ / 32] = all;
  }

  __device__ void start_keys(const ChunkGates& g) {
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
      const float2 other = columns_of(g.k_norm, t);
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        const float k = g.k_norm[row(down)], q = g.q_norm[row(down)];
        const int i = 4 * t + 2 * down;
        kk_[i] *= k * other.x;
        kk_[i + 1] *= k * other.y;
        qk_[i] *= q * other.x;
        qk_[i + 1] *= q * other.y;
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * kKeyTiles; ++i) d_q_[i] = d_k_[i] = 0;
  }

  // Of the pairs: a lane's columns of tile t.
  __device__ int column(int t) const { return group_ * kColumns32 + 8 * t + 2 * (lane_ % 4); }
  __device__ float2 columns_of(const float (&x)[kMostRows], int t) const {
    return *reinterpret_cast<const float2*>(x + column(t));
  }

  // DP and X with the norms, DL . (k k^T), and of W the sums over the rows of this warp from i on,
  // in dp.
  __device__ void put_pairs(const ChunkGates& g, PairSums& dp, const PairSums& dl,
                            RowSums& sums) const {
    float slope[2] = {};
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      std::uint32_t over_keys[4], over_queries[4], below[4], above[4];
      const int i = row(down);
      const float high = g.high[i], low = g.low[i], beta = g.beta[i];
      const float k_norm = g.k_norm[i], q_norm = g.q_norm[i];
#pragma unroll
      for (int t = 0; t < kColumnTiles; ++t) {
        const float2 other_high = columns_of(g.high, t), other_low = columns_of(g.low, t);
        const float2 norms = columns_of(g.k_norm, t);
        float p[2], x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = 4 * t + 2 * down + e, j = column(t) + e;
          const float decay =
              cuda::approximate_exp2((high - (e == 0 ? other_high.x : other_high.y)) +
                                     (low - (e == 0 ? other_low.x : other_low.y)));
          const float of_p = dp[at] * decay, of_l = -dl[at] * decay;
          const bool before = j < i;
          p[e] = j <= i ? of_p : 0.0f;
          x[e] = before ? of_l : 0.0f;
          slope[down] = std::fma(x[e], kk_[at], slope[down]);
          x[e] *= beta;
          dp[at] = before ? std::fma(x[e], kk_[at], of_p * qk_[at]) : 0.0f;
        }
        over_keys[t] = cuda::store_pair<X>(p[0] * norms.x, p[1] * norms.y);
        over_queries[t] = cuda::store_pair<X>(p[0] * q_norm, p[1] * q_norm);
        below[t] = cuda::store_pair<X>(x[0] * norms.x, x[1] * norms.y);
        above[t] = cuda::store_pair<X>(x[0] * k_norm, x[1] * k_norm);
      }
      store_pairs(down, over_keys, over_queries, below, above);
    }
    const float x[2] = {quad_sum(slope[0]), quad_sum(slope[1])};
    put_rows(sums.pairs, x);
    sum_columns(dp);
  }
  // Tiles of 8 x 8: of four, lane l has the address of row l % 8 of tile l / 8.
  __device__ void store_pairs(int down, const std::uint32_t (&over_keys)[4],
                              const std::uint32_t (&over_queries)[4], std::uint32_t (&below)[4],
                              const std::uint32_t (&above)[4]) const {
    const int tile_row = 2 * warp_ + down, first = 4 * group_, mine = first + lane_ / 8;
    const int straight = (8 * tile_row + lane_ % 8) * kRowBytes + (mine ^ (lane_ % 8)) * kPiece;
    const int turned = (8 * mine + lane_ % 8) * kRowBytes + (tile_row ^ (lane_ % 8)) * kPiece;
    cuda::store_tiles(&shared_at<char>(Shared::kOverKeys + straight), over_keys);
    cuda::store_tiles_transposed(&shared_at<char>(Shared::kOverQueries + turned), over_queries);
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t)  // below and above the diagonal
      if (first + t == tile_row) below[t] |= cuda::transpose_tile(above[t]);
    char* const unused = notes().unused + lane_ % 8 * kPiece;
    cuda::store_tiles(mine <= tile_row ? &shared_at<char>(Shared::kOverBoth + straight) : unused,
                      below);
    cuda::store_tiles_transposed(
        mine < tile_row ? &shared_at<char>(Shared::kOverBoth + turned) : unused, above);
  }
  // w[i] of rows i of this warp becomes the sum over its rows from i on; all of them go to
  // notes().columns.
  __device__ void sum_columns(PairSums& w) const {
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float upper = w[4 * t + e], lower = w[4 * t + 2 + e];
#pragma unroll
        for (int apart = 4; apart < 32; apart *= 2) {
          const float a = __shfl_down_sync(~0u, upper, static_cast<unsigned>(apart));
          const float c = __shfl_down_sync(~0u, lower, static_cast<unsigned>(apart));
          if (lane_ + apart < 32) upper += a, lower += c;
        }
        upper += __shfl_sync(~0u, lower, lane_ % 4);
        w[4 * t + e] = upper;
        w[4 * t + 2 + e] = lower;
        if (lane_ < 4) notes().columns[warp_][column(t) + e] = upper;
      }
    }
  }
  __device__ void add_below(const PairSums& w, RowSums& sums) const {
    float below[2] = {};
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
      float2 later{0, 0};
      for (int other = warp_ + 1; other < 4; ++other) {
        const float2 x = columns_of(notes().columns[other], t);
        later.x += x.x;
        later.y += x.y;
      }
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        const int i = 4 * t + 2 * down;
        if (column(t) < row(down)) below[down] += w[i] + later.x;
        if (column(t) + 1 < row(down)) below[down] += w[i + 1] + later.y;
      }
    }
    const float x[2] = {quad_sum(below[0]), quad_sum(below[1])};
    put_rows(sums.below, x);
  }

  // Four threads have a row of v, and every fourth of its pieces.
  __device__ void load_values(const ChunkCursor& c, uint4 (&v)[4]) const {
    const int i = thread_ / 4;
    const X* const from = static_cast<const X*>(p_.v) + p_.v_stride.at(c.row, c.begin + i, c.head) +
                          first_value(c) + thread_ % 4 * 8;
    const bool has = there(c, i);
#pragma unroll
    for (int m = 0; m < 4; ++m)
      v[m] = has && 32 * m < sheet_values(c) ? *reinterpret_cast<const uint4*>(from + 32 * m)
                                             : uint4{};
  }
  // d_v = beta r, and r . v.
  __device__ void put_values(const ChunkCursor& c, const uint4 (&v)[4], int tile,
                             const ChunkGates& g, RowSums& sums) const {
    const int i = thread_ / 4;
    const float beta = g.beta[i];
    const bool has = there(c, i);
    X* const to = static_cast<X*>(all_.d_v) + all_.d_v_stride.at(c.row, c.begin + i, c.head) +
                  first_value(c) + thread_ % 4 * 8;
    float dot = 0;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const auto r = shared_at<uint4>(tile + tile_place(i, thread_ % 4 + 4 * m));
      const std::uint32_t left[4] = {r.x, r.y, r.z, r.w};
      const std::uint32_t right[4] = {v[m].x, v[m].y, v[m].z, v[m].w};
      std::uint32_t d_v[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 a = unpack_pair<X>(left[e]), b = unpack_pair<X>(right[e]);
        dot = std::fma(a.x, b.x, std::fma(a.y, b.y, dot));
        d_v[e] = has ? cuda::store_pair<X>(beta * a.x, beta * a.y) : 0;
      }
      if (i < c.rows && 32 * m < sheet_values(c))
        *reinterpret_cast<uint4*>(to + 32 * m) = {d_v[0], d_v[1], d_v[2], d_v[3]};
    }
    dot = quad_sum(dot);
    if (thread_ % 4 == 0) sums.r_v[i] = dot;
  }

  // ---- a key head ----

  __device__ void finish_keys(const ChunkCursor& c, const ChunkGates& g) {
#pragma unroll
    for (int i = 0; i < 4 * kKeyTiles; ++i) d_q_[i] *= p_.scale;
    if (p_.d.qk_l2norm) {
      // The norm of q alone, without the scale.
      const float inverse = 1 / p_.scale;
#pragma unroll
      for (int of_k = 0; of_k < 2; ++of_k) {
        float dots[2];
#pragma unroll
        for (int down = 0; down < 2; ++down) {
          dots[down] = 0;
#pragma unroll
          for (int t = 0; t < kKeyTiles; ++t) {
            const float2 x = pair_at(of_k != 0 ? Shared::kKeys : Shared::kQueries, t, down);
            const KeySums& d = of_k != 0 ? d_k_ : d_q_;
            dots[down] = std::fma(x.x, d[4 * t + 2 * down], dots[down]);
            dots[down] = std::fma(x.y, d[4 * t + 2 * down + 1], dots[down]);
          }
          dots[down] = quad_sum(dots[down]);
        }
        put_rows(notes().along[of_k], dots);
      }
      __syncthreads();
#pragma unroll
      for (int of_k = 0; of_k < 2; ++of_k) {
        KeySums& d = of_k != 0 ? d_k_ : d_q_;
#pragma unroll
        for (int down = 0; down < 2; ++down) {
          const int i = row(down);
          const float norm = of_k != 0 ? g.k_norm[i] : g.q_norm[i] * inverse;
          const float along = (notes().along[of_k][0][i] + notes().along[of_k][1][i]) * norm * norm;
#pragma unroll
          for (int t = 0; t < kKeyTiles; ++t) {
            const float2 x = pair_at(of_k != 0 ? Shared::kKeys : Shared::kQueries, t, down);
            float* const to = d + 4 * t + 2 * down;
            to[0] = norm * std::fma(-along, x.x, to[0]);
            to[1] = norm * std::fma(-along, x.y, to[1]);
          }
        }
      }
    }
    store_keys(c, all_.d_q, all_.d_q_stride, d_q_);
    store_keys(c, all_.d_k, all_.d_k_stride, d_k_);
  }
  __device__ void store_keys(const ChunkCursor& c, void* to, const TokenStrides& stride,
                             const KeySums& d) const {
    if (group_ * kKeys64 >= key_dim()) return;
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const int i = row(down);
      if (i >= c.rows) continue;
      const bool has = there(c, i);
      X* const at = static_cast<X*>(to) + stride.at(c.row, c.begin + i, c.key_head) +
                    group_ * kKeys64 + 2 * (lane_ % 4);
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t)
        *reinterpret_cast<std::uint32_t*>(at + 8 * t) =
            has ? cuda::store_pair<X>(d[4 * t + 2 * down], d[4 * t + 2 * down + 1]) : 0;
    }
  }

  const ChunksProblem& all_;
  const Problem& p_;
  int thread_, lane_, warp_, group_, row_;
  KeySums d_q_, d_k_;
  PairSums kk_, qk_;     // k k^T and q k^T, normalised
  PairSums of_head_[2];  // dp and dl, of several sheets
};

template <class X, bool kWhole>
__global__ void __launch_bounds__(kChunkThreads, 1)
    backward_chunks(const __grid_constant__ ChunksProblem all) {
  ChunkGradients<X, kWhole>(all).run();
}

}  // namespace bittern::chunk_backward
