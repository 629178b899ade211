// The rule on tensor cores, by products of a warpgroup (sm_90a): keys of 64 or 128, chunks of 64.
// chunk_prepare.cuh has made all that does not know the state; what is left is a chain from
// chunk to chunk, of three products, and o beside it.
//
// A warpgroup has 64 values of a head, and their state in registers, transposed: [values, keys].
// Products are then transposed too, with a column for each token, so that each one's result is,
// rounded, the next one's left side, and none of it passes through shared memory:
//
//   W = beta v - seen (S k^T);   y = W T^T;   S = decay S + (kept y) k;   o = asked (S q^T) + y P^T
//
// The right sides are where another warpgroup has put them, two chunks ahead. o goes where v was,
// and that warpgroup writes it out.
//
// An element of W that is not finite would be multiplied by the zeros of T and P above their
// diagonals. So it and those of later tokens are 0 there, and what they would give is NaN.
//
// With few heads, it runs in segments (chunk_segments.cuh). The first time it leaves out q and o;
// the first segment has its own first state, and needs no M. M is [keys, keys]; it takes the place
// of a state [values, keys].
#pragma once
#include "ops/gdn/chunk_segments.cuh"
#include "ops/gdn/chunk_tokens.cuh"

namespace bittern::chunk_forward {

template <int kGroups, int kKeyDim>
struct Stage {
  static constexpr int kKeys = 0, kQueries = kKeyDim / 64 * kPart, kRecord = 2 * kQueries;
  static constexpr int kValues = kRecord + (Record::kBytes + 1023) / 1024 * 1024;
  static constexpr int kBytes = kValues + kGroups * kPart;
};

struct ChainProblem {
  Problem p;
  const char* records;
  std::int64_t row_chunks;  // of a batch row
  Segments cut;
};

// What both sides know of a block's segment, sequence and head. kOutput: the chain with o; its
// blocks have a segment after the other. Without o, those of the first segment are followed by two
// times as many of each other one but the last, for N and for M.
struct ChainItem {
  const ChainProblem& all;
  const Problem& p;
  Problem::Item item;  // with the segment's tokens
  int segment, chunks, last_rows;
  bool transfer;  // M
  bool last;      // of its sequence
  bool beyond;    // without values: there are blocks for those of S and of M, which may differ

  // `values`: of a block.
  __device__ ChainItem(const ChainProblem& problem, bool output, int values)
      : all(problem), p(all.p) {
    const auto turn = static_cast<int>(blockIdx.x / p.items);
    segment = output ? turn : (turn + 1) / 2;
    transfer = !output && turn > 0 && turn % 2 == 0;
    item = p.item(blockIdx.x - turn * p.items);
    beyond = item.part * values >= (transfer ? p.d.key_dim : p.d.value_dim);
    const int whole = chunks_of(item), each = all.cut.chunks_of_each(whole);
    const std::int64_t begin = item.begin + std::int64_t{segment} * each * kMostRows;
    const std::int64_t end = begin + std::int64_t{each} * kMostRows;
    last = segment == 0 ? whole <= each : begin < item.end && end >= item.end;
    item.begin = begin;
    if (end < item.end) item.end = end;
    chunks = chunks_of(item);
    last_rows = static_cast<int>(item.end - item.begin - std::int64_t{kMostRows} * (chunks - 1));
  }
  // Is there nothing to do? Then there may be no first state either.
  __device__ bool idle(bool output) const {
    return output ? chunks == 0 && !last : chunks == 0 || last || beyond;
  }
  // Does chunk n have all its rows, with no masks to look at?
  __device__ bool whole(int n) const {
    return p.mask == nullptr && (n + 1 < chunks || last_rows == kMostRows);
  }
  __device__ bool inside(int n, int row) const { return n + 1 < chunks || row < last_rows; }
  __device__ bool has(int n, int row) const {
    return inside(n, row) && !p.masked(item, item.begin + std::int64_t{n} * kMostRows + row);
  }
};

// A warpgroup that copies: chunks into shared memory, two ahead of their use, and o out of it.
template <class X, int kGroups, bool kOutput, int kKeyDim>
class Mover {
 public:
  using Place = Stage<kGroups, kKeyDim>;

  __device__ explicit Mover(const ChainProblem& all)
      : c_(all, kOutput, kGroups * kGroupValues),
        thread_(static_cast<int>(threadIdx.x) % kGroupThreads) {
    const Problem& p = c_.p;
    const Problem::Item& item = c_.item;
    const std::int64_t slot = p.cu_seqlens != nullptr
                                  ? p.first_slot(item)
                                  : item.sequence * all.row_chunks + item.begin / kMostRows;
    record_ = all.records + record_at(p, slot, item.head) + thread_ * kPiece;
    const auto start = [&](const TokenStrides& stride, std::int64_t head, int across) {
      return stride.at(item.row, item.begin + thread_ / across, head) + thread_ % across * 8;
    };
    const int value = item.part * kGroups * kGroupValues;
    k_ = static_cast<const X*>(p.k) + start(p.k_stride, item.key_head, kKeyAcross);
    q_ = static_cast<const X*>(p.q) + start(p.q_stride, item.key_head, kKeyAcross);
    v_ = static_cast<const X*>(p.v) + start(p.v_stride, item.head, kValueAcross) + value;
    o_ = static_cast<X*>(p.o) + start(p.o_stride, item.head, kValueAcross) + value;
  }

  __device__ void run() {
    clear_above_diagonal();
    if (c_.transfer) clear_values();
    cuda::wait_for_last_kernel();
    if (c_.idle(kOutput)) return;
    int stage = 0;
#pragma unroll 1
    for (int n = 0; n < c_.chunks + kStages; ++n) {
      const int place = stage * Place::kBytes;
      if (n >= kStages) {
        for (int group = 0; group < kGroups; ++group)
          cuda::barrier_wait(done_barrier<kGroups>(stage, group), kPairThreads);
      }
      if (n < c_.chunks) load_tiles(n, place);
      if (kOutput && n >= kStages) store_output(n - kStages, place);
      if (n < c_.chunks && !c_.transfer)
        copy_rows<kValueAcross>(n, place + Place::kValues, v_, c_.p.v_stride.token);
      cuda::copy_async_commit();
      const int last = stage == 0 ? kStages - 1 : stage - 1;
      if (n > 0 && n <= c_.chunks) {
        cuda::copy_async_wait<1>();
        for (int group = 0; group < kGroups; ++group)
          cuda::barrier_arrive(full_barrier<kGroups>(last, group), kPairThreads);
      }
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
  }

 private:
  static constexpr int kKeyAcross = kKeyDim / 8;
  static constexpr int kValueAcross = kGroups * kGroupValues / 8;
  static constexpr int kValueDown = kGroupThreads / kValueAcross;

  // Rows of a tile, a piece to a thread. `from` moves on to the next chunk.
  template <int kAcross>
  __device__ void copy_rows(int n, int tile, const X*& from, std::int64_t stride) const {
    constexpr int kDown = kGroupThreads / kAcross;
    int row = thread_ / kAcross;
    char* const to = &shared_at<char>(tile + tile_place(row, thread_ % kAcross));
    // Eight rows, or a multiple, permute their pieces alike.
    static_assert(kDown % 8 == 0);
    if (c_.whole(n)) {
#pragma unroll
      for (int i = 0; i < kMostRows / kDown; ++i, from += kDown * stride)
        cuda::copy_async_16(to + i * kDown * kRowBytes, from);
    } else {
#pragma unroll
      for (int i = 0; i < kMostRows / kDown; ++i, row += kDown, from += kDown * stride) {
        const bool there = c_.has(n, row);  // zeros for masked tokens and past the end
        cuda::copy_async_16(to + i * kDown * kRowBytes, there ? from : c_.p.k, there ? kPiece : 0);
      }
    }
  }
  // All but v, in whose place o may be.
  __device__ void load_tiles(int n, int place) {
    const Problem& p = c_.p;
    copy_rows<kKeyAcross>(n, place + Place::kKeys, k_, p.k_stride.token);
    if constexpr (kOutput) copy_rows<kKeyAcross>(n, place + Place::kQueries, q_, p.q_stride.token);
    char* const record = &shared_at<char>(place + Place::kRecord + thread_ * kPiece);
#pragma unroll
    for (int i = kOutput ? 0 : kMatrixSlabs / 2; i < kMatrixSlabs; ++i)
      if (below_diagonal(i)) cuda::copy_async_16(record + i * kSlabBytes, record_ + i * kSlabBytes);
    if (thread_ * kPiece < static_cast<int>(sizeof(Factors)))
      cuda::copy_async_16(record + Record::kFactors, record_ + Record::kFactors);
    record_ += p.d.value_heads * Record::kBytes;
  }
  // P and T come in slabs of 16 rows, a piece to a thread. The blocks of 16 above the diagonal are
  // 0, and are not copied.
  static constexpr int kSlabBytes = kGroupThreads * kPiece, kMatrixSlabs = 2 * kPart / kSlabBytes;
  static_assert(kSlabBytes == 16 * kRowBytes && sizeof(Factors) <= kSlabBytes);
  __device__ bool below_diagonal(int slab) const {
    const int row = thread_ / kPieces, piece = (thread_ % kPieces) ^ (row % 8);
    return piece < 2 * (slab % (kMatrixSlabs / 2) + 1);
  }
  __device__ void clear_above_diagonal() const {
    for (int stage = 0; stage < kStages; ++stage)
      for (int i = 0; i < kMatrixSlabs; ++i)
        if (!below_diagonal(i))
          shared_at<uint4>(stage * Place::kBytes + Place::kRecord + i * kSlabBytes +
                           thread_ * kPiece) = uint4{};
  }
  __device__ void clear_values() const {
    for (int stage = 0; stage < kStages; ++stage)
      for (int at = thread_ * kPiece; at < kGroups * kPart; at += kGroupThreads * kPiece)
        shared_at<uint4>(stage * Place::kBytes + Place::kValues + at) = uint4{};
  }
  __device__ void store_output(int n, int place) {
    int row = thread_ / kValueAcross;
    const int from = place + Place::kValues + tile_place(row, thread_ % kValueAcross);
    const std::int64_t step = kValueDown * c_.p.o_stride.token;
    const auto piece = [&](int i) { return shared_at<uint4>(from + i * kValueDown * kRowBytes); };
    if (c_.whole(n)) {
#pragma unroll
      for (int i = 0; i < kMostRows / kValueDown; ++i, o_ += step)
        *reinterpret_cast<uint4*>(o_) = piece(i);
    } else {
#pragma unroll
      for (int i = 0; i < kMostRows / kValueDown; ++i, row += kValueDown, o_ += step)
        if (c_.inside(n, row)) *reinterpret_cast<uint4*>(o_) = c_.has(n, row) ? piece(i) : uint4{};
    }
  }

  const ChainItem c_;
  const int thread_;
  // What this thread copies next.
  const char* record_;
  const X *k_, *q_, *v_;
  X* o_;
};

// A warpgroup that computes.
template <class X, int kGroups, bool kOutput, int kKeyDim>
class Chain {
 public:
  using Place = Stage<kGroups, kKeyDim>;

  __device__ explicit Chain(const ChainProblem& all)
      : c_(all, kOutput, kGroups * kGroupValues),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32),
        group_(warp_ / 4),
        value_(c_.item.part * kGroups * kGroupValues + 16 * warp_) {
    // Row lane % 8 of tile lane / 8, of four of 8 x 8: tokens down, the warp's 16 values across.
    tiles_place_ =
        Place::kValues + tile_place(8 * (lane_ / 16) + lane_ % 8, 2 * warp_ + lane_ / 8 % 2);
  }

  __device__ void run() {
    cuda::wait_for_last_kernel();
    if (c_.idle(kOutput)) return;
    load_state();
    int stage = 0, last = 0;
#pragma unroll 1
    for (int n = 0; n < c_.chunks; ++n) {
      step(n, stage, last);
      last = stage;
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    if (c_.chunks > 0) hand_over(last);
    store_state();
  }

 private:
  static constexpr int kBeside = kOutput ? 1 : 0;  // products of o under way beside the chain's

  // Chunk n, in `stage`; the one before it was in `last`.
  __device__ void step(int n, int stage, int last) {
    const int now = stage * Place::kBytes;
    const auto matrix = [&](int place) {
      return cuda::warpgroup_matrix(&shared_at<char>(now + place));
    };
    const auto keys = matrix(Place::kKeys), queries = matrix(Place::kQueries);
    TokenSums y, o;
    cuda::barrier_wait(full_barrier<kGroups>(stage, group_), kPairThreads);
    cuda::fence_shared();
    cuda::warpgroup_begin();
#pragma unroll
    for (int s = 0; s < kKeyDim / 16; ++s)
      multiply_tokens<X>(y, rounded_[s], keys.at(s / 4 * kPart + s % 4 * 32), s > 0);
    cuda::warpgroup_commit();
    if constexpr (kOutput) {
#pragma unroll
      for (int s = 0; s < kKeyDim / 16; ++s)
        multiply_tokens<X>(o, rounded_[s], queries.at(s / 4 * kPart + s % 4 * 32), s > 0);
      cuda::warpgroup_commit();
    }
    if (n > 0) hand_over(last);

    const auto& factors = shared_at<Factors>(now + Place::kRecord + Record::kFactors);
    TokenPairs left;
#pragma unroll
    for (int t = 0; t < kTokenTiles; t += 2)
      cuda::load_tiles_transposed(left[t / 2],
                                  &shared_at<char>(now + tiles_place_ + 8 * t * kRowBytes));
    TokenSums seen;  // -seen, and beta v
    scale_pairs<X>(seen, left, factors.beta);
    cuda::warpgroup_wait<kBeside>();
    cuda::warpgroup_hold(y);
    std::uint32_t zeros[2] = {};  // as long as all of W is finite, in either row
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      const float2 factor = two_of(factors.seen, t);
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        const int i = 4 * t + 2 * down;
        std::uint32_t& pair = left[t / 2][t % 2 * 2 + down];
        pair = cuda::store_pair<X>(std::fma(-factor.x, y[i], seen[i]),
                                   std::fma(-factor.y, y[i + 1], seen[i + 1]));
        zeros[down] = add_zero_times<X>(zeros[down], pair);
      }
    }
    bad_[0] = bad_[1] = kMostRows;
    if (__any_sync(~0u, (zeros[0] | zeros[1]) != 0)) {
      find_bad(left);
      clear_from_bad(left);
    }
    const auto inverse = matrix(Place::kRecord + Record::kInverse);
    cuda::warpgroup_begin();
#pragma unroll
    for (int s = 0; s < kTokenTiles / 2; ++s)
      multiply_tokens<X>(y, left[s], inverse.at(s * 32), s > 0);
    cuda::warpgroup_commit();
    if constexpr (kOutput) {
      cuda::warpgroup_wait<1>();
      cuda::warpgroup_hold(o);
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        const float2 asked = two_of(factors.asked, t);
#pragma unroll
        for (int e = 0; e < 4; ++e) o[4 * t + e] *= e % 2 == 0 ? asked.x : asked.y;
      }
    }
    const float decay = factors.decay[0];
#pragma unroll
    for (int i = 0; i < kKeyDim / 2; ++i) state_[i] *= decay;
    cuda::warpgroup_wait<0>();
    cuda::warpgroup_hold(y);
    TokenPairs kept;
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      const float2 factor = two_of(factors.kept, t);
#pragma unroll
      for (int down = 0; down < 2; ++down)
        kept[t / 2][t % 2 * 2 + down] =
            cuda::store_pair<X>(y[4 * t + 2 * down] * factor.x, y[4 * t + 2 * down + 1] * factor.y);
    }
    const bool bad = min(bad_[0], bad_[1]) < kMostRows;
    if (bad) spoil_state();
    cuda::warpgroup_begin();
#pragma unroll
    for (int s = 0; s < kTokenTiles / 2; ++s) multiply_keys<X>(state_, kept[s], keys.at(s * 2048));
    cuda::warpgroup_commit();
    if constexpr (kOutput) {
#pragma unroll
      for (int i = 0; i < 2 * kTokenTiles; ++i)
        left[i / 4][i % 4] = cuda::store_pair<X>(y[2 * i], y[2 * i + 1]);
      if (bad) clear_from_bad(left);
      const auto pairs = matrix(Place::kRecord + Record::kPairs);
      cuda::warpgroup_begin();
#pragma unroll
      for (int s = 0; s < kTokenTiles / 2; ++s)
        multiply_tokens<X>(o, left[s], pairs.at(s * 32), true);
      cuda::warpgroup_commit();
    }
    cuda::warpgroup_wait<kBeside>();
    cuda::warpgroup_hold(state_);
    round_state();
    if constexpr (kOutput) {
      cuda::warpgroup_wait<0>();
      cuda::warpgroup_hold(o);
      round_output(o);
    }
  }

  __device__ int token(int t, int e) const { return 8 * t + 2 * (lane_ % 4) + e; }
  __device__ void find_bad(const TokenPairs& left) {
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      int bad = kMostRows;
#pragma unroll
      for (int t = kTokenTiles - 1; t >= 0; --t) {
        const float2 x = unpack_pair<X>(left[t / 2][t % 2 * 2 + down]);
        if (!(fabsf(x.y) < INFINITY)) bad = token(t, 1);
        if (!(fabsf(x.x) < INFINITY)) bad = token(t, 0);
      }
      bad = min(bad, __shfl_xor_sync(~0u, bad, 1));
      bad_[down] = min(bad, __shfl_xor_sync(~0u, bad, 2));
    }
  }
  __device__ void clear_from_bad(TokenPairs& left) const {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        std::uint32_t& pair = left[t / 2][t % 2 * 2 + down];
        if (token(t, 0) >= bad_[down]) pair &= 0xffff0000u;
        if (token(t, 1) >= bad_[down]) pair &= 0xffffu;
      }
    }
  }
  __device__ void spoil_state() {
#pragma unroll
    for (int i = 0; i < kKeyDim / 2; ++i)
      if (bad_[i / 2 % 2] < kMostRows) state_[i] = NAN;
  }

  __device__ void round_state() {
#pragma unroll
    for (int i = 0; i < kKeyDim / 4; ++i)
      rounded_[i / 4][i % 4] = cuda::store_pair<X>(state_[2 * i], state_[2 * i + 1]);
  }
  __device__ void round_output(TokenSums& o) {
    if (min(bad_[0], bad_[1]) < kMostRows) {
#pragma unroll
      for (int i = 0; i < 4 * kTokenTiles; ++i)
        if (token(i / 4, i % 2) >= bad_[i / 2 % 2]) o[i] = NAN;
    }
#pragma unroll
    for (int i = 0; i < 2 * kTokenTiles; ++i)
      output_[i / 4][i % 4] = cuda::store_pair<X>(o[2 * i], o[2 * i + 1]);
  }

  // o of the chunk in `stage` goes where v was; that is the last of the chunk.
  __device__ void hand_over(int stage) {
    if constexpr (kOutput) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; t += 2)
        cuda::store_tiles_transposed(
            &shared_at<char>(stage * Place::kBytes + tiles_place_ + 8 * t * kRowBytes),
            output_[t / 2]);
    }
    cuda::barrier_arrive(done_barrier<kGroups>(stage, group_), kPairThreads);
  }

  // f(x, value, key) for each element of a lane's state.
  template <class F>
  __device__ void for_state(F&& f) {
#pragma unroll
    for (int i = 0; i < kKeyDim / 2; ++i)
      f(state_[i], value_ + lane_ / 4 + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * (lane_ % 4) + i % 2);
  }
  // The same with its place in the caller's tensor, and in `states` and `transfers`.
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
    if (c_.transfer) {
      for_state([](float& x, int value, int key) { x = value == key ? 1.0f : 0.0f; });
    } else if (c_.segment == 0 && c_.p.initial_state != nullptr) {
      for_state(c_.p.initial_stride,
                [&](float& x, std::int64_t at) { x = c_.p.initial_state[at]; });
    } else if (c_.segment == 0 || !kOutput) {
      for_state([](float& x, int, int) { x = 0; });
    } else {
      for_state(c_.segment, [&](float& x, std::int64_t at) { x = c_.all.cut.states[at]; });
    }
    round_state();
  }
  __device__ void store_state() {
    if constexpr (kOutput) {
      if (!c_.last || c_.p.final_state == nullptr) return;
      for_state(c_.p.final_stride, [&](float& x, std::int64_t at) { c_.p.final_state[at] = x; });
    } else if (c_.transfer) {
      for_state(c_.segment, [&](float& x, std::int64_t at) { c_.all.cut.transfers[at] = x; });
    } else {
      for_state(c_.segment + 1, [&](float& x, std::int64_t at) { c_.all.cut.states[at] = x; });
    }
  }

  const ChainItem c_;
  const int lane_, warp_, group_, value_;
  int tiles_place_;
  float state_[kKeyDim / 2];
  std::uint32_t rounded_[kKeyDim / 16][4];
  TokenPairs output_;  // o of the chunk before
  int bad_[2];         // the first token of a chunk whose W is not finite, of either row
};

// The registers of a multiprocessor, as two or three warpgroups share them.
template <class X, int kGroups, bool kOutput, int kKeyDim>
__global__ void __launch_bounds__((kGroups + 1) * kGroupThreads, 1)
    chunk_warpgroup(const __grid_constant__ ChainProblem all) {
  cuda::begin_next_kernel();
  using Registers = cuda::RegisterShares<kGroups, 56, 224>;
  if (threadIdx.x >= kGroups * kGroupThreads) {
    if constexpr (kGroups > 1) Registers::copy();
    Mover<X, kGroups, kOutput, kKeyDim>(all).run();
  } else {
    if constexpr (kGroups > 1) Registers::compute();
    Chain<X, kGroups, kOutput, kKeyDim>(all).run();
  }
}

template <int kKeyDim>
__global__ void __launch_bounds__(JoinShared<kKeyDim>::kThreads, 1)
    chunk_join(const __grid_constant__ ChainProblem all) {
  cuda::begin_next_kernel();
  join_segments<kKeyDim, false>(all.p, all.cut, all.p.item(blockIdx.x));
}

inline int chain_segments(const Op::Desc& d, int device) {
  return segment_count(d, device, segment_rows(d) / kGroupValues);
}

// The workspace: records, states, transfers.
struct ChainPlaces {
  std::size_t records, states;
  ChainPlaces(const Op::Desc& d, int segments)
      : records(static_cast<std::size_t>(d.batch * d.state_chunks() * d.value_heads) *
                Record::kBytes),
        states(segment_bytes(d, segments)) {}
  std::size_t bytes() const { return records + 2 * states; }
};

template <class X, int kKeyDim>
Status run_warpgroups(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace workspace) {
  const int device = a.o.device.index, segments = chain_segments(d, device);
  const auto launch = [&](auto kernel, const cuda::Grid& grid, const auto& problem) {
    return cuda::launch(Op::kName, kernel, grid, device, stream, problem);
  };
  const PrepareProblem prepare(d, a, workspace.data);
  BITTERN_TRY(
      launch(chunk_prepare<X, kKeyDim>,
             {.blocks = prepare.items, .threads = kPrepareThreads, .shared = PrepareShared::kBytes},
             prepare));
  auto* const records = static_cast<char*>(workspace.data);
  const ChainPlaces places(d, segments);
  auto* const states = reinterpret_cast<float*>(records + places.records);
  const Segments cut{segments, states, states + places.states / sizeof(float)};
  const auto problem = [&](std::int64_t parts) {
    return ChainProblem{Problem(d, a, parts), records, d.state_chunks(), cut};
  };
  const auto chain = [&]<int kGroups, bool kOutput>(std::integral_constant<int, kGroups>,
                                                    std::bool_constant<kOutput>, std::int64_t rows,
                                                    std::int64_t turns) {
    const ChainProblem all = problem(rows / (kGroups * kGroupValues));
    return launch(chunk_warpgroup<X, kGroups, kOutput, kKeyDim>,
                  {.blocks = turns * all.p.items,
                   .threads = (kGroups + 1) * kGroupThreads,
                   .shared = kStages * Stage<kGroups, kKeyDim>::kBytes,
                   .waits = true,
                   .cluster = turns * all.p.items % 2 == 0 ? 2 : 1},
                  all);
  };
  // Two groups of values a block, or, while there are multiprocessors for them, one.
  const auto chains = [&]<bool kOutput>(std::bool_constant<kOutput> output, std::int64_t turns) {
    const std::int64_t rows = kOutput ? d.value_dim : segment_rows(d);
    if constexpr (kOutput || kKeyDim % (2 * kGroupValues) == 0) {
      const std::int64_t blocks = rows / kGroupValues * d.sequence_count() * d.value_heads * turns;
      if (d.value_dim % (2 * kGroupValues) == 0 && blocks > cuda::limits(device).multiprocessors)
        return chain(std::integral_constant<int, 2>(), output, rows, turns);
    }
    return chain(std::integral_constant<int, 1>(), output, rows, turns);
  };
  if (segments > 1) {
    BITTERN_TRY(chains(std::false_type(), 2 * segments - 3));
    const ChainProblem join = problem(d.value_dim / kJoinValues);
    BITTERN_TRY(launch(chunk_join<kKeyDim>,
                       {.blocks = join.p.items,
                        .threads = JoinShared<kKeyDim>::kThreads,
                        .shared = sizeof(JoinShared<kKeyDim>),
                        .waits = true},
                       join));
  }
  return chains(std::true_type(), segments);
}

}  // namespace bittern::chunk_forward
