// The two chains of gdn_chunk_backward, from chunk to chunk: forwards with the state S, backwards
// with its gradient H. Neither needs the other, so blocks of one and of the other take turns.
//
// As in chunk_warpgroup.cuh, a warpgroup has 64 values of a head and their S or H in registers,
// transposed; products have a column for each token, left sides come from registers, right sides
// from where another warpgroup has put them:
//
//   W = beta v - seen (S k^T);               y = W T^T;    S = decay S + (kept y) k
//   U = kept (H k^T) + d_o^T P;              r = U T;      H = decay H - (seen r) k + (asked d_o) q
//
// S before each chunk, H after it, y and r are rounded and written out for backward_chunks.cuh.
//
// With few heads, both chains run in segments (chunk_segments.cuh), and M serves both. M is
// [keys, keys]; it takes the place of a state [values, keys].
#pragma once
#include "ops/gdn/gdn_chunk_backward/backward_device.cuh"

namespace bittern::chunk_backward {

constexpr int kChainStages = 3;
constexpr int kChainThreads = 2 * kGroupThreads;

template <bool kBackward, int kKeyDim>
struct ChainStage {
  static constexpr int kKeyRows = kKeyDim / 64 * kPart;                        // bytes
  static constexpr int kKeys = 0, kQueries = kKeyRows, kPairs = 2 * kKeyRows;  // backwards
  static constexpr int kInverse = kBackward ? kPairs + kPart : kKeyRows;
  static constexpr int kValues = kInverse + kPart;  // v or d_o
  static constexpr int kFactors = kValues + kPart;
  static constexpr int kBytes = kFactors + (static_cast<int>(sizeof(Factors)) + 1023) / 1024 * 1024;
  // What goes out, of every other chunk: S or H, y or r.
  static constexpr int kOut = kChainStages * kBytes, kOutState = 0, kOutRows = kKeyRows;
  static constexpr int kOutBytes = kOutRows + kPart;
  static constexpr int kShared = kOut + 2 * kOutBytes;
};

struct ChainsProblem {
  Problem p;
  const void* d_o;
  TokenStrides d_o_stride;
  const float* d_final_state;  // null: zeros
  float* d_initial_state;      // null: left out
  StateStrides d_final_stride, d_initial_stride;
  Places places;
  std::int64_t row_chunks;  // of a batch row
  Segments cut;

  // `parts`: blocks of a head and direction.
  ChainsProblem(const Op::Desc& d, const Op::Args& a, const Places& in, int segments,
                std::int64_t parts)
      : p(d, forward_args(a), parts),
        d_o(a.d_o.data),
        d_o_stride(a.d_o),
        d_final_state(a.d_final_state.as<float>()),
        d_initial_state(a.d_initial_state.as<float>()),
        d_final_stride(d, a.d_final_state),
        d_initial_stride(d, a.d_initial_state),
        places(in),
        row_chunks(d.state_chunks()),
        cut{segments, in.states, in.transfers} {}

  // Blocks of chains that write out what they find, and of those that only find N and M.
  std::int64_t blocks() const { return 2 * cut.count * p.items; }
  std::int64_t finding_blocks() const { return (3 * cut.count - 4) * p.items; }
};

// What a block does. With kOutput, two turns have a segment, for H and for S. Without, N' of every
// segment but the first, N of every one but the last, and M of those between have a turn each.
struct ChainTurn {
  std::int64_t item;
  int segment;
  bool backward, transfer;
  __device__ ChainTurn(const ChainsProblem& all, bool output) : transfer(false) {
    const int rest = all.cut.count - 1;
    if (output) {
      const std::int64_t half = blockIdx.x / 2;
      backward = blockIdx.x % 2 == 0;
      segment = static_cast<int>(half / all.p.items);
      item = half - segment * all.p.items;
    } else {
      const int turn = static_cast<int>(blockIdx.x / all.p.items);
      item = blockIdx.x - turn * all.p.items;
      backward = turn < rest;
      transfer = turn >= 2 * rest;
      segment = backward ? turn + 1 : turn - (transfer ? 2 * rest - 1 : rest);
    }
  }
};

// A block's segment of a sequence, head and values; it takes chunk(n) as its n-th.
template <bool kBackward, bool kOutput>
struct ChunkOrder {
  const ChainsProblem& all;
  const Problem& p;
  Problem::Item item;  // with the segment's tokens
  std::int64_t first_slot;
  int segment, segments, chunks, last_rows;
  bool transfer;  // M
  __device__ ChunkOrder(const ChainsProblem& problem, const ChainTurn& turn)
      : all(problem),
        p(all.p),
        item(p.item(turn.item)),
        segment(turn.segment),
        transfer(!kBackward && !kOutput && turn.transfer) {
    const int whole = chunks_of(item), each = all.cut.chunks_of_each(whole);
    segments = whole > each ? (whole + each - 1) / each : 1;
    item.begin += std::int64_t{segment} * each * kMostRows;
    const std::int64_t end = item.begin + std::int64_t{each} * kMostRows;
    if (end < item.end) item.end = end;
    chunks = chunks_of(item);
    last_rows = static_cast<int>(item.end - item.begin - std::int64_t{kMostRows} * (chunks - 1));
    first_slot = p.cu_seqlens != nullptr ? p.first_slot(item)
                                         : item.sequence * all.row_chunks + item.begin / kMostRows;
  }
  // Is there nothing to do? There are blocks for the values of S and of M, which may differ.
  __device__ bool idle() const {
    if (segment >= segments) return true;
    if (kOutput) return false;
    return (!kBackward && segment == segments - 1) ||
           item.part * kGroupValues >= (transfer ? p.d.key_dim : p.d.value_dim);
  }
  __device__ int chunk(int n) const { return kBackward ? chunks - 1 - n : n; }
  __device__ std::int64_t slot(int n) const {
    return (first_slot + chunk(n)) * p.d.value_heads + item.head;
  }
  __device__ std::int64_t token(int n) const {
    return item.begin + std::int64_t{chunk(n)} * kMostRows;
  }
  __device__ bool has(int n, int row) const {
    return (chunk(n) + 1 < chunks || row < last_rows) && !p.masked(item, token(n) + row);
  }
  // Does it have all its rows, with no masks to look at?
  __device__ bool whole(int n) const {
    return p.mask == nullptr && (chunk(n) + 1 < chunks || last_rows == kMostRows);
  }
};

// Barriers of the two warpgroups: a chunk has come; it may be overwritten. And of the one that
// computes.
__device__ inline int come_barrier(int stage) { return 1 + stage; }
__device__ inline int over_barrier(int stage) { return 1 + kChainStages + stage; }
constexpr int kOwnBarrier = 1 + 2 * kChainStages;

template <class X, bool kBackward, bool kOutput, int kKeyDim>
class ChainMover {
 public:
  using Place = ChainStage<kBackward, kKeyDim>;

  __device__ ChainMover(const ChainsProblem& all, const ChainTurn& turn)
      : c_(all, turn), thread_(static_cast<int>(threadIdx.x) % kGroupThreads) {}

  __device__ void run() {
    if (c_.idle()) return;
    clear_above_diagonal();
    if (c_.transfer) clear_values();
    int stage = 0;
#pragma unroll 1
    for (int n = 0; n < c_.chunks + kChainStages; ++n) {
      if (n >= kChainStages) cuda::barrier_wait(over_barrier(stage), kPairThreads);
      if (n < c_.chunks) load(n, stage * Place::kBytes);
      cuda::copy_async_commit();
      const int last = stage == 0 ? kChainStages - 1 : stage - 1;
      if (n > 0 && n <= c_.chunks) {
        cuda::copy_async_wait<1>();
        cuda::barrier_arrive(come_barrier(last), kPairThreads);
      }
      stage = stage == kChainStages - 1 ? 0 : stage + 1;
    }
  }

 private:
  static constexpr int kKeyAcross = kKeyDim / 8, kValueAcross = kGroupValues / 8;

  // Rows of a tile, a piece to a thread.
  template <int kAcross>
  __device__ void copy_rows(int n, int tile, const void* from, const TokenStrides& stride,
                            std::int64_t head, int column) const {
    constexpr int kDown = kGroupThreads / kAcross;
    static_assert(kDown % 8 == 0);  // eight rows, or a multiple, permute their pieces alike
    int row = thread_ / kAcross;
    char* const to = &shared_at<char>(tile + tile_place(row, thread_ % kAcross));
    const X* at = static_cast<const X*>(from) + stride.at(c_.item.row, c_.token(n) + row, head) +
                  column + thread_ % kAcross * 8;
    const std::int64_t step = kDown * stride.token;
    if (c_.whole(n)) {
#pragma unroll
      for (int i = 0; i < kMostRows / kDown; ++i, at += step)
        cuda::copy_async_16(to + i * kDown * kRowBytes, at);
    } else {
#pragma unroll
      for (int i = 0; i < kMostRows / kDown; ++i, row += kDown, at += step) {
        const bool there = c_.has(n, row);  // zeros for masked tokens and past the end
        cuda::copy_async_16(to + i * kDown * kRowBytes, there ? at : from, there ? kPiece : 0);
      }
    }
  }
  __device__ void load(int n, int place) const {
    const Problem& p = c_.p;
    const int value = c_.item.part * kGroupValues;
    copy_rows<kKeyAcross>(n, place + Place::kKeys, p.k, p.k_stride, c_.item.key_head, 0);
    const char* const record = c_.all.places.records + c_.slot(n) * Record::kBytes;
    if constexpr (kBackward) {
      copy_rows<kKeyAcross>(n, place + Place::kQueries, p.q, p.q_stride, c_.item.key_head, 0);
      copy_rows<kValueAcross>(n, place + Place::kValues, c_.all.d_o, c_.all.d_o_stride,
                              c_.item.head, value);
      copy_matrix(place + Place::kPairs, record + Record::kPairs);
    } else if (!c_.transfer) {
      copy_rows<kValueAcross>(n, place + Place::kValues, p.v, p.v_stride, c_.item.head, value);
    }
    copy_matrix(place + Place::kInverse, record + Record::kInverse);
    if (thread_ * kPiece < static_cast<int>(sizeof(Factors)))
      cuda::copy_async_16(&shared_at<char>(place + Place::kFactors + thread_ * kPiece),
                          record + Record::kFactors + thread_ * kPiece);
  }
  // P and T come in slabs of 16 rows, a piece to a thread. The blocks of 16 above the diagonal are
  // 0, and are not copied.
  static constexpr int kSlabBytes = kGroupThreads * kPiece, kSlabs = kPart / kSlabBytes;
  static_assert(kSlabBytes == 16 * kRowBytes && sizeof(Factors) <= kSlabBytes);
  __device__ bool below_diagonal(int slab) const {
    const int row = thread_ / kPieces, piece = (thread_ % kPieces) ^ (row % 8);
    return piece < 2 * (slab + 1);
  }
  __device__ void copy_matrix(int to, const char* from) const {
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      const int at = i * kSlabBytes + thread_ * kPiece;
      if (below_diagonal(i)) cuda::copy_async_16(&shared_at<char>(to + at), from + at);
    }
  }
  __device__ void clear_above_diagonal() const {
    for (int stage = 0; stage < kChainStages; ++stage) {
      for (int i = 0; i < kSlabs; ++i) {
        if (below_diagonal(i)) continue;
        const int at = stage * Place::kBytes + i * kSlabBytes + thread_ * kPiece;
        shared_at<uint4>(Place::kInverse + at) = uint4{};
        if constexpr (kBackward) shared_at<uint4>(Place::kPairs + at) = uint4{};
      }
    }
  }
  __device__ void clear_values() const {
    for (int stage = 0; stage < kChainStages; ++stage)
      for (int at = thread_ * kPiece; at < kPart; at += kGroupThreads * kPiece)
        shared_at<uint4>(stage * Place::kBytes + Place::kValues + at) = uint4{};
  }

  const ChunkOrder<kBackward, kOutput> c_;
  const int thread_;
};

// A warpgroup that computes.
template <class X, bool kBackward, bool kOutput, int kKeyDim>
class Chain {
 public:
  using Place = ChainStage<kBackward, kKeyDim>;

  __device__ Chain(const ChainsProblem& all, const ChainTurn& turn)
      : c_(all, turn),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32) {
    // Row lane % 8 of tile lane / 8, of four of 8 x 8. Tokens down, the warp's 16 values across;
    // and these down, 16 keys across.
    rows_place_ = tile_place(8 * (lane_ / 16) + lane_ % 8, 2 * warp_ + lane_ / 8 % 2);
    state_place_ = tile_place(16 * warp_ + 8 * (lane_ / 8 % 2) + lane_ % 8, lane_ / 16);
  }

  __device__ void run() {
    if (c_.idle()) return;
    load_state();
    int stage = 0;
#pragma unroll 1
    for (int n = 0; n < c_.chunks; ++n) {
      step(n, stage);
      stage = stage == kChainStages - 1 ? 0 : stage + 1;
    }
    if (kOutput && threadIdx.x == 0) cuda::bulk_copy_out_wait();
    store_state();
  }

 private:
  __device__ void step(int n, int stage) {
    const int now = __shfl_sync(~0u, stage * Place::kBytes, 0);  // known to be uniform
    const auto matrix = [&](int place) {
      return cuda::warpgroup_matrix(&shared_at<char>(now + place));
    };
    const auto keys = matrix(Place::kKeys), inverse = matrix(Place::kInverse);
    const auto& factors = shared_at<Factors>(now + Place::kFactors);
    TokenSums y;  // or r
    cuda::barrier_wait(come_barrier(stage), kPairThreads);
    cuda::fence_shared();
    cuda::warpgroup_begin();
#pragma unroll
    for (int s = 0; s < kKeyDim / 16; ++s)
      multiply_tokens<X>(y, rounded_[s], keys.at(s / 4 * kPart + s % 4 * 32), s > 0);
    cuda::warpgroup_commit();
    TokenPairs values;  // v or d_o
#pragma unroll
    for (int t = 0; t < kTokenTiles; t += 2)
      cuda::load_tiles_transposed(
          values[t / 2], &shared_at<char>(now + Place::kValues + rows_place_ + 8 * t * kRowBytes));
    const auto fade_state = [&] {
      const float decay = factors.decay[0];
#pragma unroll
      for (int i = 0; i < kKeyDim / 2; ++i) state_[i] *= decay;
    };
    TokenSums given;  // beta v, or d_o^T P
    if constexpr (kBackward) {
      const auto pairs = matrix(Place::kPairs), queries = matrix(Place::kQueries);
      cuda::warpgroup_begin();
#pragma unroll
      for (int s = 0; s < kTokenTiles / 2; ++s)
        multiply_token_rows<X>(given, values[s], pairs.at(s * 2048), s > 0);
      cuda::warpgroup_commit();
      TokenPairs asked;
      round_scaled(asked, values, factors.asked);
      fade_state();
      cuda::warpgroup_begin();
#pragma unroll
      for (int s = 0; s < kTokenTiles / 2; ++s)
        multiply_keys<X>(state_, asked[s], queries.at(s * 2048));
      cuda::warpgroup_commit();
      cuda::warpgroup_wait<1>();
      cuda::warpgroup_hold(given);
    } else {
      scale_pairs<X>(given, values, factors.beta);
      cuda::warpgroup_wait<0>();
    }
    cuda::warpgroup_hold(y);
    TokenPairs left;
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      const float2 f = two_of(kBackward ? factors.kept : factors.seen, t);
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        const int i = 4 * t + 2 * down;
        left[t / 2][t % 2 * 2 + down] =
            cuda::store_pair<X>(std::fma(kBackward ? f.x : -f.x, y[i], given[i]),
                                std::fma(kBackward ? f.y : -f.y, y[i + 1], given[i + 1]));
      }
    }
    cuda::warpgroup_begin();
#pragma unroll
    for (int s = 0; s < kTokenTiles / 2; ++s) {
      if constexpr (kBackward) {
        multiply_token_rows<X>(y, left[s], inverse.at(s * 2048), s > 0);
      } else {
        multiply_tokens<X>(y, left[s], inverse.at(s * 32), s > 0);
      }
    }
    cuda::warpgroup_commit();
    if constexpr (!kBackward) fade_state();
    cuda::warpgroup_wait<0>();
    cuda::warpgroup_hold(y);
    cuda::warpgroup_hold(state_);
    TokenPairs kept;
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      const float2 f = two_of(kBackward ? factors.seen : factors.kept, t);
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        const int i = 4 * t + 2 * down;
        kept[t / 2][t % 2 * 2 + down] = cuda::store_pair<X>((kBackward ? -f.x : f.x) * y[i],
                                                            (kBackward ? -f.y : f.y) * y[i + 1]);
      }
    }
    cuda::warpgroup_begin();
#pragma unroll
    for (int s = 0; s < kTokenTiles / 2; ++s) multiply_keys<X>(state_, kept[s], keys.at(s * 2048));
    cuda::warpgroup_commit();
    if constexpr (kOutput) {
      // Where the chunk two before this one wrote, whose two copies have been read.
      if (threadIdx.x == 0) cuda::bulk_copy_out_wait<2>();
      cuda::barrier_wait(kOwnBarrier, kGroupThreads);
      put_out(Place::kOut + n % 2 * Place::kOutBytes, y);
      cuda::barrier_wait(kOwnBarrier, kGroupThreads);
      if (threadIdx.x == 0) copy_out(n);
    }
    cuda::warpgroup_wait<0>();
    cuda::warpgroup_hold(state_);
    cuda::barrier_arrive(over_barrier(stage), kPairThreads);
    round_state();
  }

  // S or H as it was before the chunk, and y or r.
  __device__ void put_out(int out, const TokenSums& y) const {
#pragma unroll
    for (int s = 0; s < kKeyDim / 16; ++s)
      cuda::store_tiles(
          &shared_at<char>(out + Place::kOutState + s / 4 * kPart + (state_place_ ^ (s % 4 * 32))),
          rounded_[s]);
#pragma unroll
    for (int t = 0; t < kTokenTiles; t += 2) {
      std::uint32_t rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        rows[i] = cuda::store_pair<X>(y[4 * t + 2 * i], y[4 * t + 2 * i + 1]);
      cuda::store_tiles_transposed(
          &shared_at<char>(out + Place::kOutRows + rows_place_ + 8 * t * kRowBytes), rows);
    }
    cuda::fence_shared();
  }
  __device__ void copy_out(int n) const {
    const int from = Place::kOut + n % 2 * Place::kOutBytes;
    constexpr int kSheetParts = kSheetValues / kGroupValues;
    const int part = c_.item.part % kSheetParts;
    const std::int64_t index = c_.slot(n) * c_.all.places.sheets_each + c_.item.part / kSheetParts;
    char* const sheet = c_.all.places.sheets + index * Sheet::kBytes;
    constexpr int kStates = kBackward ? Sheet::kGradient : Sheet::kState;
    constexpr int kRows = kBackward ? Sheet::kR : Sheet::kY;
    cuda::bulk_copy_out(sheet + kStates + part * 2 * kPart,
                        &shared_at<char>(from + Place::kOutState), Place::kKeyRows);
    cuda::bulk_copy_out(sheet + kRows + part * kPart, &shared_at<char>(from + Place::kOutRows),
                        kPart);
  }

  __device__ void round_scaled(TokenPairs& to, const TokenPairs& from,
                               const float (&factor)[kMostRows]) const {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      const float2 f = two_of(factor, t);
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        const float2 x = unpack_pair<X>(from[t / 2][t % 2 * 2 + down]);
        to[t / 2][t % 2 * 2 + down] = cuda::store_pair<X>(f.x * x.x, f.y * x.y);
      }
    }
  }
  __device__ void round_state() {
#pragma unroll
    for (int i = 0; i < kKeyDim / 4; ++i)
      rounded_[i / 4][i % 4] = cuda::store_pair<X>(state_[2 * i], state_[2 * i + 1]);
  }
  // f(x, value, key) for each element of a lane's state.
  template <class F>
  __device__ void for_state(F&& f) {
    const int first = c_.item.part * kGroupValues + 16 * warp_ + lane_ / 4;
#pragma unroll
    for (int i = 0; i < kKeyDim / 2; ++i)
      f(state_[i], first + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * (lane_ % 4) + i % 2);
  }
  // The same with its place in the caller's tensor, and among those of segments.
  template <class F>
  __device__ void for_state(const StateStrides& stride, F&& f) {
    const std::int64_t first = stride.at(c_.item.sequence, c_.item.head);
    for_state([&](float& x, int value, int key) {
      f(x, first + value * stride.value + key * stride.key);
    });
  }
  template <class F>
  __device__ void for_state(int segment, F&& f) {
    const std::int64_t first = c_.all.cut.at(c_.p, c_.item, segment);
    for_state([&](float& x, int value, int key) { f(x, first + value * kKeyDim + key); });
  }
  __device__ void load_state() {
    const ChainsProblem& all = c_.all;
    const bool outer = c_.segment == (kBackward ? c_.segments - 1 : 0);
    const float* const given = kBackward ? all.d_final_state : c_.p.initial_state;
    if (c_.transfer) {
      for_state([](float& x, int value, int key) { x = value == key ? 1.0f : 0.0f; });
    } else if (outer && given != nullptr) {
      for_state(kBackward ? all.d_final_stride : c_.p.initial_stride,
                [&](float& x, std::int64_t at) { x = given[at]; });
    } else if (outer || !kOutput) {
      for_state([](float& x, int, int) { x = 0; });
    } else {
      const float* const from = kBackward ? all.places.gradients : all.places.states;
      for_state(c_.segment + (kBackward ? 1 : 0), [&](float& x, std::int64_t at) { x = from[at]; });
    }
    round_state();
  }
  __device__ void store_state() {
    const ChainsProblem& all = c_.all;
    if constexpr (!kOutput) {
      float* const to = kBackward     ? all.places.gradients
                        : c_.transfer ? all.places.transfers
                                      : all.places.states;
      for_state(c_.segment + (kBackward || c_.transfer ? 0 : 1),
                [&](float& x, std::int64_t at) { to[at] = x; });
    } else if (kBackward && c_.segment == 0 && all.d_initial_state != nullptr) {
      for_state(all.d_initial_stride,
                [&](float& x, std::int64_t at) { all.d_initial_state[at] = x; });
    }
  }

  const ChunkOrder<kBackward, kOutput> c_;
  const int lane_, warp_;
  int rows_place_, state_place_;
  float state_[kKeyDim / 2];
  std::uint32_t rounded_[kKeyDim / 16][4];
};

template <class X, bool kBackward, bool kOutput, int kKeyDim>
__device__ void run_chain(const ChainsProblem& all, const ChainTurn& turn) {
  if (threadIdx.x >= kGroupThreads) {
    ChainMover<X, kBackward, kOutput, kKeyDim>(all, turn).run();
  } else {
    Chain<X, kBackward, kOutput, kKeyDim>(all, turn).run();
  }
}
template <class X, bool kOutput, int kKeyDim>
__global__ void __launch_bounds__(kChainThreads, 1)
    backward_chains(const __grid_constant__ ChainsProblem all) {
  const ChainTurn turn(all, kOutput);
  if (turn.backward) {
    run_chain<X, true, kOutput, kKeyDim>(all, turn);
  } else {
    run_chain<X, false, kOutput, kKeyDim>(all, turn);
  }
}

// The states between segments, of kJoinValues values: S and H by turns.
struct BackwardJoinProblem {
  Problem p;
  Segments cut;
  float* gradients;
};
template <int kKeyDim>
__global__ void __launch_bounds__(JoinShared<kKeyDim>::kThreads, 1)
    backward_join(const __grid_constant__ BackwardJoinProblem all) {
  const Problem::Item item = all.p.item(blockIdx.x / 2);
  if (blockIdx.x % 2 == 0) {
    join_segments<kKeyDim, true>(all.p, {all.cut.count, all.gradients, all.cut.transfers}, item);
  } else {
    join_segments<kKeyDim, false>(all.p, all.cut, item);
  }
}

}  // namespace bittern::chunk_backward
