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
#pragma once
#include "ops/gdn/gdn_chunk_backward/backward_device.cuh"

namespace bittern::chunk_backward {

constexpr int kChainStages = 3;
constexpr int kChainThreads = 2 * kGroupThreads;
constexpr int kParts = kWide / kGroupValues;  // blocks of a head and direction

template <bool kBackward>
struct ChainStage {
  static constexpr int kKeys = 0, kQueries = 2 * kPart, kPairs = 4 * kPart;  // backwards
  static constexpr int kInverse = kBackward ? 5 * kPart : 2 * kPart;
  static constexpr int kValues = kInverse + kPart;  // v or d_o
  static constexpr int kFactors = kValues + kPart;
  static constexpr int kBytes = kFactors + (static_cast<int>(sizeof(Factors)) + 1023) / 1024 * 1024;
  // What goes out, of every other chunk: S or H, y or r.
  static constexpr int kOut = kChainStages * kBytes, kOutState = 0, kOutRows = 2 * kPart;
  static constexpr int kOutBytes = 3 * kPart;
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

  ChainsProblem(const Op::Desc& d, const Op::Args& a, void* workspace)
      : p(d, forward_args(a), kParts),
        d_o(a.d_o.data),
        d_o_stride(a.d_o),
        d_final_state(a.d_final_state.as<float>()),
        d_initial_state(a.d_initial_state.as<float>()),
        d_final_stride(d, a.d_final_state),
        d_initial_stride(d, a.d_initial_state),
        places(places_in(d, workspace)),
        row_chunks(d.state_chunks()) {}
};

// A block's sequence, head and values; it takes chunk(n) as its n-th.
template <bool kBackward>
struct ChunkOrder {
  const ChainsProblem& all;
  const Problem& p;
  const Problem::Item item;
  std::int64_t first_slot;
  int chunks, last_rows;
  __device__ explicit ChunkOrder(const ChainsProblem& problem)
      : all(problem), p(all.p), item(p.item(blockIdx.x / 2)) {
    const std::int64_t tokens = item.end > item.begin ? item.end - item.begin : 0;
    chunks = static_cast<int>((tokens + kMostRows - 1) / kMostRows);
    last_rows = static_cast<int>(tokens - std::int64_t{kMostRows} * (chunks - 1));
    first_slot = p.cu_seqlens != nullptr ? p.first_slot(item) : item.sequence * all.row_chunks;
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

// Barriers of the two warpgroups: a chunk has come; it may be overwritten, and what it made be
// copied out.
__device__ inline int come_barrier(int stage) { return 1 + stage; }
__device__ inline int over_barrier(int stage) { return 1 + kChainStages + stage; }

template <class X, bool kBackward>
class ChainMover {
 public:
  using Place = ChainStage<kBackward>;

  __device__ explicit ChainMover(const ChainsProblem& all)
      : c_(all), thread_(static_cast<int>(threadIdx.x) % kGroupThreads) {}

  __device__ void run() {
    clear_above_diagonal();
    int stage = 0;
#pragma unroll 1
    for (int n = 0; n < c_.chunks + kChainStages; ++n) {
      if (n >= kChainStages) {
        cuda::barrier_wait(over_barrier(stage), kPairThreads);
        if (thread_ == 0) copy_out(n - kChainStages);
      }
      if (n < c_.chunks) load(n, stage * Place::kBytes);
      cuda::copy_async_commit();
      const int last = stage == 0 ? kChainStages - 1 : stage - 1;
      if (n > 0 && n <= c_.chunks) {
        cuda::copy_async_wait<1>();
        cuda::fence_shared();
        // Chunk n - 1 writes where chunk n - 3 did.
        if (thread_ == 0) cuda::bulk_copy_out_wait();
        cuda::barrier_arrive(come_barrier(last), kPairThreads);
      }
      stage = stage == kChainStages - 1 ? 0 : stage + 1;
    }
    if (thread_ == 0) cuda::bulk_copy_out_wait();
  }

 private:
  static constexpr int kKeyAcross = kWide / 8, kValueAcross = kGroupValues / 8;

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
    } else {
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
  __device__ void copy_out(int n) const {
    const int from = Place::kOut + n % 2 * Place::kOutBytes;
    char* const sheet = c_.all.places.sheets + c_.slot(n) * Sheet::kBytes;
    constexpr int kStates = kBackward ? Sheet::kGradient : Sheet::kState;
    constexpr int kRows = kBackward ? Sheet::kR : Sheet::kY;
    cuda::bulk_copy_out(sheet + kStates + c_.item.part * 2 * kPart,
                        &shared_at<char>(from + Place::kOutState), 2 * kPart);
    cuda::bulk_copy_out(sheet + kRows + c_.item.part * kPart,
                        &shared_at<char>(from + Place::kOutRows), kPart);
  }

  const ChunkOrder<kBackward> c_;
  const int thread_;
};

template <class X>
__device__ void multiply_token_rows(TokenSums& d, const std::uint32_t (&a)[4],
                                    cuda::WarpgroupMatrix b, bool add) {
  if constexpr (std::is_same_v<X, bf16>) {
    cuda::warpgroup_multiply_rows_bf16(d, a, b, add);
  } else {
    cuda::warpgroup_multiply_rows_f16(d, a, b, add);
  }
}

// A warpgroup that computes.
template <class X, bool kBackward>
class Chain {
 public:
  using Place = ChainStage<kBackward>;

  __device__ explicit Chain(const ChainsProblem& all)
      : c_(all),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32) {
    // Row lane % 8 of tile lane / 8, of four of 8 x 8. Tokens down, the warp's 16 values across;
    // and these down, 16 keys across.
    rows_place_ = tile_place(8 * (lane_ / 16) + lane_ % 8, 2 * warp_ + lane_ / 8 % 2);
    state_place_ = tile_place(16 * warp_ + 8 * (lane_ / 8 % 2) + lane_ % 8, lane_ / 16);
  }

  __device__ void run() {
    if constexpr (kBackward) {
      load_state(c_.all.d_final_state, c_.all.d_final_stride);
    } else {
      load_state(c_.p.initial_state, c_.p.initial_stride);
    }
    int stage = 0;
#pragma unroll 1
    for (int n = 0; n < c_.chunks; ++n) {
      step(n, stage);
      stage = stage == kChainStages - 1 ? 0 : stage + 1;
    }
    if constexpr (kBackward) {
      if (c_.all.d_initial_state != nullptr)
        for_state(c_.all.d_initial_stride,
                  [&](float& x, std::int64_t at) { c_.all.d_initial_state[at] = x; });
    }
  }

 private:
  __device__ void step(int n, int stage) {
    const int now = stage * Place::kBytes;
    const int out = Place::kOut + n % 2 * Place::kOutBytes;
    const auto matrix = [&](int place) {
      return cuda::warpgroup_matrix(&shared_at<char>(now + place));
    };
    const auto keys = matrix(Place::kKeys), inverse = matrix(Place::kInverse);
    const auto& factors = shared_at<Factors>(now + Place::kFactors);
    TokenSums y;  // or r
    cuda::barrier_wait(come_barrier(stage), kPairThreads);
    TokenPairs values;  // v or d_o
#pragma unroll
    for (int t = 0; t < kTokenTiles; t += 2)
      cuda::load_tiles_transposed(
          values[t / 2], &shared_at<char>(now + Place::kValues + rows_place_ + 8 * t * kRowBytes));
    TokenSums given;  // beta v, or d_o^T P
    TokenPairs asked;
    if constexpr (kBackward) {
      const auto pairs = matrix(Place::kPairs);
      cuda::warpgroup_begin();
#pragma unroll
      for (int s = 0; s < kTokenTiles / 2; ++s)
        multiply_token_rows<X>(given, values[s], pairs.at(s * 2048), s > 0);
      cuda::warpgroup_commit();
    }
    cuda::warpgroup_begin();
#pragma unroll
    for (int s = 0; s < kWide / 16; ++s)
      multiply_tokens<X>(y, rounded_[s], keys.at(s / 4 * kPart + s % 4 * 32), s > 0);
    cuda::warpgroup_commit();
#pragma unroll
    for (int s = 0; s < kWide / 16; ++s)
      cuda::store_tiles(
          &shared_at<char>(out + Place::kOutState + s / 4 * kPart + (state_place_ ^ (s % 4 * 32))),
          rounded_[s]);
    if constexpr (kBackward) {
      round_scaled(asked, values, factors.asked);
    } else {
      scale_pairs<X>(given, values, factors.beta);
    }
    cuda::warpgroup_wait<0>();
    cuda::warpgroup_hold(y);
    if constexpr (kBackward) cuda::warpgroup_hold(given);
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
    const float decay = factors.decay[0];
#pragma unroll
    for (int i = 0; i < kWide / 2; ++i) state_[i] *= decay;
    if constexpr (kBackward) {
      const auto queries = matrix(Place::kQueries);
      cuda::warpgroup_begin();
#pragma unroll
      for (int s = 0; s < kTokenTiles / 2; ++s)
        multiply_keys<X>(state_, asked[s], queries.at(s * 2048));
      cuda::warpgroup_commit();
      cuda::warpgroup_wait<1>();
    } else {
      cuda::warpgroup_wait<0>();
    }
    cuda::warpgroup_hold(y);
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
    TokenPairs rows;
#pragma unroll
    for (int i = 0; i < 2 * kTokenTiles; ++i)
      rows[i / 4][i % 4] = cuda::store_pair<X>(y[2 * i], y[2 * i + 1]);
#pragma unroll
    for (int t = 0; t < kTokenTiles; t += 2)
      cuda::store_tiles_transposed(
          &shared_at<char>(out + Place::kOutRows + rows_place_ + 8 * t * kRowBytes), rows[t / 2]);
    cuda::fence_shared();
    cuda::warpgroup_wait<0>();
    cuda::warpgroup_hold(state_);
    cuda::barrier_arrive(over_barrier(stage), kPairThreads);
    round_state();
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
    for (int i = 0; i < kWide / 4; ++i)
      rounded_[i / 4][i % 4] = cuda::store_pair<X>(state_[2 * i], state_[2 * i + 1]);
  }
  // Element i of a lane's state: its value and key.
  template <class F>
  __device__ void for_state(const StateStrides& stride, F&& f) {
    const std::int64_t first = stride.at(c_.item.sequence, c_.item.head);
#pragma unroll
    for (int i = 0; i < kWide / 2; ++i) {
      const int value = c_.item.part * kGroupValues + 16 * warp_ + lane_ / 4 + 8 * (i / 2 % 2);
      const int key = 8 * (i / 4) + 2 * (lane_ % 4) + i % 2;
      f(state_[i], first + value * stride.value + key * stride.key);
    }
  }
  __device__ void load_state(const float* from, const StateStrides& stride) {
    if (from != nullptr) {
      for_state(stride, [&](float& x, std::int64_t at) { x = from[at]; });
    } else {
#pragma unroll
      for (int i = 0; i < kWide / 2; ++i) state_[i] = 0;
    }
    round_state();
  }

  const ChunkOrder<kBackward> c_;
  const int lane_, warp_;
  int rows_place_, state_place_;
  float state_[kWide / 2];
  std::uint32_t rounded_[kWide / 16][4];
};

template <class X, bool kBackward>
__device__ void run_chain(const ChainsProblem& all) {
  if (threadIdx.x >= kGroupThreads) {
    ChainMover<X, kBackward>(all).run();
  } else {
    Chain<X, kBackward>(all).run();
  }
}
template <class X>
__global__ void __launch_bounds__(kChainThreads, 1)
    backward_chains(const __grid_constant__ ChainsProblem all) {
  if (blockIdx.x % 2 == 0) {
    run_chain<X, true>(all);
  } else {
    run_chain<X, false>(all);
  }
}

}  // namespace bittern::chunk_backward
