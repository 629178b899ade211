// The chain of states on tensor cores, by products of a warpgroup (sm_90a): f16 and bf16, keys of
// 64 or 128, chunks of 64.
//
// A warpgroup has 64 values of a head, and their state in registers, transposed: [values, keys].
// Products are then transposed too, with a column for each token, so that each one's result is,
// rounded, the next one's left side, and none of it passes through shared memory:
//
//   y = u - S w^T;   v_new = X(y);   S = e^g[last] S + X(y e^(g[last] - g)) k
//
// The right sides are where another warpgroup has put them: it copies the next chunks meanwhile
// (Mover::kUnderWay of them). v_new goes where u was, and X(S) into a buffer of its own. That
// warpgroup writes both out.
#pragma once
#include "ops/gdn/chunk_tokens.cuh"
#include "ops/gdn/gdn_state/state_device.cuh"

namespace bittern::state {

using chunk_forward::done_barrier;
using chunk_forward::full_barrier;
using chunk_forward::kGroupThreads;
using chunk_forward::kGroupValues;
using chunk_forward::kPairThreads;
using chunk_forward::kPart;
using chunk_forward::kPiece;
using chunk_forward::kRowBytes;
using chunk_forward::kTokenTiles;
using chunk_forward::kWide;
using chunk_forward::shared_at;
using chunk_forward::TokenPairs;
using chunk_forward::TokenSums;

struct Gates {
  float g[kMostRows], last[kMostRows];  // of each thread that copies, so that it need not wait
  float kept[kMostRows];                // e^(g[last] - g[i])
  float decay;                          // e^g[last]
};

// Before kStages of these, two buffers for X(S): chunk n has buffer n % 2, which has been read
// before chunk n + 2 is handed over.
template <int kGroups, int kKeyDim>
struct Stage {
  static constexpr int kStages = kGroups == 1 ? 4 : 3;  // what 128 keys leave room for
  static constexpr int kBuffer = kKeyDim / 64 * kPart;
  static constexpr int kFirst = 2 * kGroups * kBuffer;
  static constexpr int kKeys = 0, kW = kBuffer, kValues = 2 * kBuffer;
  static constexpr int kGates = kValues + kGroups * kPart;
  static constexpr int kBytes = kGates + (static_cast<int>(sizeof(Gates)) + 1023) / 1024 * 1024;
  static constexpr int kAll = kFirst + kStages * kBytes;
  static __device__ int at(int stage) { return kFirst + stage * kBytes; }
  static __device__ int next(int stage) { return stage == kStages - 1 ? 0 : stage + 1; }
  static __device__ int buffer(int chunk, int group) {
    return (chunk % 2 * kGroups + group) * kBuffer;
  }
};

// What both sides know of a block's sequence and head.
struct ChainItem {
  const Problem& p;
  Problem::Item item;
  int chunks, last_rows;

  __device__ explicit ChainItem(const Problem& problem)
      : p(problem), item(p.item(blockIdx.x)), chunks(item.chunks(kMostRows)) {
    last_rows = static_cast<int>(item.tokens.end - item.tokens.begin -
                                 std::int64_t{kMostRows} * (chunks - 1));
  }
  __device__ int rows(int n) const { return n + 1 < chunks ? kMostRows : last_rows; }
};

// What copies: chunks into shared memory, kUnderWay of them at a time, and results out of it.
// kKeyFirst: the state's layout. kValueDim: 0 if it is not known here.
template <class X, int kGroups, bool kKeyFirst, int kKeyDim, int kValueDim>
class Mover {
 public:
  using Place = Stage<kGroups, kKeyDim>;

  __device__ explicit Mover(const Problem& p)
      : c_(p), thread_(static_cast<int>(threadIdx.x) % kGroupThreads) {
    const std::int64_t token = c_.item.tokens.begin;
    const int key_row = thread_ / kKeyAcross, key = thread_ % kKeyAcross * 8;
    const int value_row = thread_ / kValueAcross;
    const int first_value = c_.item.part * kGroups * kGroupValues;
    k_ = static_cast<const X*>(p.k) + (token + key_row) * key_stride() +
         c_.item.key_head * kKeyDim + key;
    w_ = static_cast<const X*>(p.w) + (token + key_row) * w_stride() + c_.item.head * kKeyDim + key;
    const std::int64_t value_at = (token + value_row) * value_stride() +
                                  c_.item.head * value_dim() + first_value +
                                  thread_ % kValueAcross * 8;
    u_ = static_cast<const X*>(p.u) + value_at;
    v_new_ = p.v_new == nullptr ? nullptr : static_cast<X*>(p.v_new) + value_at;
    g_ = p.g + token * p.d.value_heads + c_.item.head;
    const std::int64_t states = p.slots.count - c_.item.first_state;
    states_ = p.h == nullptr ? 0 : static_cast<int>(states < c_.chunks ? states : c_.chunks);
    h_at_ = c_.p.h_at(c_.item, 0) + thread_ / kStateAcross * (kKeyFirst ? value_dim() : kKeyDim) +
            thread_ % kStateAcross * 8 + first_value * (kKeyFirst ? 1 : kKeyDim);
  }

  __device__ void run() {
    int stage = 0;
#pragma unroll 1
    for (int n = 0; n < c_.chunks + Place::kStages; ++n, stage = Place::next(stage)) {
      const int place = Place::at(stage), before = n - Place::kStages;
      uint4 values[kValuePieces], states[kGroups][kStatePieces];
      if (before >= 0) {
        for (int group = 0; group < kGroups; ++group)
          cuda::barrier_wait(done_barrier<kGroups, Place::kStages>(stage, group), kPairThreads);
      }
      if (n < c_.chunks) {
        copy_rows<kKeyAcross>(n, place + Place::kW, w_, w_stride());
        copy_rows<kKeyAcross>(n, place + Place::kKeys, k_, key_stride());
      }
      if (before >= 0) {
        load_values(place + Place::kValues, values);
        for (int group = 0; group < kGroups; ++group) {
          load_state(Place::buffer(before, group), states[group]);
          if constexpr (!kStoreLate) store_state(before, group, states[group]);
        }
        if constexpr (!kStoreLate) store_values(before, values);
      }
      if (n < c_.chunks) {
        copy_rows<kValueAcross>(n, place + Place::kValues, u_, value_stride());
        copy_gates(n, shared_at<Gates>(place + Place::kGates));
      }
      cuda::copy_async_commit();
      hand_over(n - kUnderWay, stage);
      if constexpr (kStoreLate) {
        if (before >= 0) {
          store_values(before, values);
          store_state(before, 0, states[0]);
        }
      }
      if (before >= 0) h_at_ += c_.p.d.value_heads * kKeyDim * value_dim();
    }
  }

 private:
  static constexpr int kUnderWay = Place::kStages - 2;  // chunks, while another one is handed over
  static constexpr int kKeyAcross = kKeyDim / 8, kValueAcross = kGroups * kGroupValues / 8;
  static constexpr int kValueDown = kGroupThreads / kValueAcross;
  static constexpr int kValuePieces = kMostRows / kValueDown;
  // X(S) of a group: [keys, 64 values] in one part, or [64 values, keys] in parts of 64.
  static constexpr int kStateAcross = (kKeyFirst ? kGroupValues : kKeyDim) / 8;
  static constexpr int kStateDown = kGroupThreads / kStateAcross;
  static constexpr int kStatePieces = Place::kBuffer / kPiece / kGroupThreads;
  // Results are stored after a chunk is handed over, where there are registers to keep them in.
  static constexpr bool kStoreLate = kGroups == 1;

  __device__ std::int64_t value_dim() const { return kValueDim > 0 ? kValueDim : c_.p.d.value_dim; }
  __device__ std::int64_t key_stride() const { return c_.p.d.key_heads * kKeyDim; }
  __device__ std::int64_t w_stride() const { return c_.p.d.value_heads * kKeyDim; }
  __device__ std::int64_t value_stride() const { return c_.p.d.value_heads * value_dim(); }

  // Chunk n, if there is one; `stage` is that of chunk n + kUnderWay.
  __device__ void hand_over(int n, int stage) const {
    if (n < 0 || n >= c_.chunks) return;
    const int at = stage + 2 < Place::kStages ? stage + 2 : stage + 2 - Place::kStages;
    cuda::copy_async_wait<kUnderWay>();
    put_decays(shared_at<Gates>(Place::at(at) + Place::kGates));
    for (int group = 0; group < kGroups; ++group)
      cuda::barrier_arrive(full_barrier<kGroups>(at, group), kPairThreads);
  }

  // Rows of a tile, a piece to a thread, zeros past the end. `from` moves on to the next chunk.
  template <int kAcross>
  __device__ void copy_rows(int n, int tile, const X*& from, std::int64_t stride) const {
    constexpr int kDown = kGroupThreads / kAcross;
    static_assert(kDown % 8 == 0);  // such rows permute their pieces alike
    const int row = thread_ / kAcross, rows = c_.rows(n);
    char* const to = &shared_at<char>(tile + cuda::tile_place(row, thread_ % kAcross));
    if (rows == kMostRows) {
#pragma unroll
      for (int i = 0; i < kMostRows / kDown; ++i, from += kDown * stride)
        cuda::copy_async_16(to + i * kDown * kRowBytes, from);
    } else {
#pragma unroll
      for (int i = 0; i < kMostRows / kDown; ++i, from += kDown * stride) {
        const bool there = row + i * kDown < rows;
        cuda::copy_async_16(to + i * kDown * kRowBytes, there ? from : c_.p.k, there ? kPiece : 0);
      }
    }
  }

  // Past the end g is that of the last row.
  __device__ void copy_gates(int n, Gates& to) const {
    if (thread_ >= kMostRows) return;
    const int last = c_.rows(n) - 1;
    const float* const from = g_ + std::int64_t{n} * kMostRows * c_.p.d.value_heads;
    cuda::copy_async_4(to.g + thread_, from + min(thread_, last) * c_.p.d.value_heads);
    cuda::copy_async_4(to.last + thread_, from + last * c_.p.d.value_heads);
  }
  __device__ void put_decays(Gates& of) const {
    constexpr float kLog2E = 0x1.715476p0f;
    if (thread_ >= kMostRows) return;
    const float last = of.last[thread_];
    of.kept[thread_] = cuda::approximate_exp2((last - of.g[thread_]) * kLog2E);
    if (thread_ == 0) of.decay = cuda::approximate_exp2(last * kLog2E);
  }

  // v_new and X(S) of a chunk.
  __device__ void load_values(int tile, uint4 (&pieces)[kValuePieces]) const {
    const int from = tile + cuda::tile_place(thread_ / kValueAcross, thread_ % kValueAcross);
#pragma unroll
    for (int i = 0; i < kValuePieces; ++i)
      pieces[i] = shared_at<uint4>(from + i * kValueDown * kRowBytes);
  }
  __device__ void store_values(int n, const uint4 (&pieces)[kValuePieces]) {
    if (v_new_ == nullptr) return;
    const int row = thread_ / kValueAcross, rows = c_.rows(n);
    const std::int64_t step = kValueDown * value_stride();
#pragma unroll
    for (int i = 0; i < kValuePieces; ++i, v_new_ += step)
      if (rows == kMostRows || row + i * kValueDown < rows)
        __stcs(reinterpret_cast<uint4*>(v_new_), pieces[i]);
  }
  __device__ void load_state(int buffer, uint4 (&pieces)[kStatePieces]) const {
    const int from = buffer + cuda::tile_place(thread_ / kStateAcross, thread_ % kStateAcross);
#pragma unroll
    for (int i = 0; i < kStatePieces; ++i)
      pieces[i] = shared_at<uint4>(from + i * kStateDown * kRowBytes);
  }
  __device__ void store_state(int n, int group, const uint4 (&pieces)[kStatePieces]) const {
    if (n >= states_) return;
    const std::int64_t stride = kKeyFirst ? value_dim() : kKeyDim;
    X* const to =
        static_cast<X*>(c_.p.h) + h_at_ + group * kGroupValues * (kKeyFirst ? 1 : kKeyDim);
#pragma unroll
    for (int i = 0; i < kStatePieces; ++i)
      __stcs(reinterpret_cast<uint4*>(to + i * kStateDown * stride), pieces[i]);
  }

  const ChainItem c_;
  const int thread_;
  // What this thread copies next.
  const X *k_, *w_, *u_;
  X* v_new_;
  std::int64_t h_at_;
  const float* g_;  // of the first row
  int states_;      // those of h
};

// A warpgroup that computes.
template <class X, int kGroups, bool kKeyFirst, int kKeyDim, int kValueDim>
class Chain {
 public:
  using Place = Stage<kGroups, kKeyDim>;

  __device__ explicit Chain(const Problem& p)
      : c_(p),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32),
        group_(warp_ / 4),
        // Row lane % 8 of tile lane / 8, of four of 8 x 8: tokens down, the warp's 16 values
        // across.
        tiles_place_(cuda::tile_place(8 * (lane_ / 16) + lane_ % 8, 2 * warp_ + lane_ / 8 % 2)) {}

  __device__ void run() {
    for_state([&](float& x, std::int64_t at) {
      x = c_.p.initial_state != nullptr ? c_.p.initial_state[at] : 0.0f;
    });
    round_state();
    int stage = 0;
#pragma unroll 1
    for (int n = 0; n < c_.chunks; ++n, stage = Place::next(stage)) step(n, stage);
    if (c_.p.final_state != nullptr)
      for_state([&](float& x, std::int64_t at) { c_.p.final_state[at] = x; });
  }

 private:
  __device__ void step(int n, int stage) {
    const int now = Place::at(stage);
    const auto matrix = [&](int place) {
      return cuda::warpgroup_matrix(&shared_at<char>(now + place));
    };
    const auto keys = matrix(Place::kKeys), w = matrix(Place::kW);
    TokenSums y;
    cuda::barrier_wait(full_barrier<kGroups>(stage, group_), kPairThreads);
    cuda::fence_shared();
    // Nothing is under way; but the compiler does not know it of the loop's last turn, and would
    // wait where the state is next used.
    cuda::warpgroup_wait<0>();
    cuda::warpgroup_hold(state_);
    cuda::warpgroup_begin();
#pragma unroll
    for (int s = 0; s < kKeyDim / 16; ++s)
      chunk_forward::multiply_tokens<X>(y, rounded_[s], w.at(s / 4 * kPart + s % 4 * 32), s > 0);
    cuda::warpgroup_commit();
    put_state(Place::buffer(n, group_));
    const auto values = [&](int t) {
      return &shared_at<char>(now + Place::kValues + tiles_place_ + 8 * t * kRowBytes);
    };
    TokenPairs u, kept;
#pragma unroll
    for (int t = 0; t < kTokenTiles; t += 2) cuda::load_tiles_transposed(u[t / 2], values(t));
    const auto& gates = shared_at<Gates>(now + Place::kGates);
    const float decay = gates.decay;
#pragma unroll
    for (int i = 0; i < kKeyDim / 2; ++i) state_[i] *= decay;
    cuda::warpgroup_wait<0>();
    cuda::warpgroup_hold(y);
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      const float2 factor = chunk_forward::two_of(gates.kept, t);
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        std::uint32_t& pair = u[t / 2][t % 2 * 2 + down];
        const float2 of_u = chunk_forward::unpack_pair<X>(pair);
        const float first = of_u.x - y[4 * t + 2 * down];
        const float second = of_u.y - y[4 * t + 2 * down + 1];
        pair = cuda::store_pair<X>(first, second);
        kept[t / 2][t % 2 * 2 + down] = cuda::store_pair<X>(first * factor.x, second * factor.y);
      }
    }
    if (c_.rows(n) < kMostRows) clear_from(kept, c_.rows(n));
    cuda::warpgroup_begin();
#pragma unroll
    for (int s = 0; s < kTokenTiles / 2; ++s)
      chunk_forward::multiply_keys<X>(state_, kept[s], keys.at(s * 16 * kRowBytes));
    cuda::warpgroup_commit();
#pragma unroll
    for (int t = 0; t < kTokenTiles; t += 2) cuda::store_tiles_transposed(values(t), u[t / 2]);
    cuda::warpgroup_wait<0>();
    cuda::warpgroup_hold(state_);
    cuda::barrier_arrive(done_barrier<kGroups, Place::kStages>(stage, group_), kPairThreads);
    round_state();
  }

  // Tokens past the end have no part in S, also where S is not finite.
  __device__ void clear_from(TokenPairs& kept, int rows) const {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      const int token = 8 * t + 2 * (lane_ % 4);
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        std::uint32_t& pair = kept[t / 2][t % 2 * 2 + down];
        if (token >= rows) pair = 0;
        if (token + 1 >= rows) pair &= 0xffffu;
      }
    }
  }
  __device__ void round_state() {
#pragma unroll
    for (int i = 0; i < kKeyDim / 4; ++i)
      rounded_[i / 4][i % 4] = cuda::store_pair<X>(state_[2 * i], state_[2 * i + 1]);
  }
  __device__ void put_state(int buffer) const {
    const int warp = warp_ % 4;
#pragma unroll
    for (int s = 0; s < kKeyDim / 16; ++s) {
      if constexpr (kKeyFirst) {
        const int place = cuda::tile_place(8 * (lane_ / 16) + lane_ % 8, 2 * warp + lane_ / 8 % 2);
        cuda::store_tiles_transposed(&shared_at<char>(buffer + place + s * 16 * kRowBytes),
                                     rounded_[s]);
      } else {
        const int place = chunk_forward::lane_place<false>() + 16 * warp * kRowBytes;
        cuda::store_tiles(&shared_at<char>(buffer + s / 4 * kPart + (place ^ (s % 4 * 32))),
                          rounded_[s]);
      }
    }
  }
  // f(x, at) for each element of a lane's state and its place in a tensor of states.
  template <class F>
  __device__ void for_state(F&& f) {
    const std::int64_t first = c_.p.state_at(c_.item);
    const std::int64_t values = kValueDim > 0 ? kValueDim : c_.p.d.value_dim;
    const int of_warp = c_.item.part * kGroups * kGroupValues + 16 * warp_ + lane_ / 4;
#pragma unroll
    for (int i = 0; i < kKeyDim / 2; ++i) {
      const int value = of_warp + 8 * (i / 2 % 2), key = 8 * (i / 4) + 2 * (lane_ % 4) + i % 2;
      f(state_[i], first + (kKeyFirst ? key * values + value : value * kKeyDim + key));
    }
  }

  const ChainItem c_;
  const int lane_, warp_, group_, tiles_place_;
  float state_[kKeyDim / 2];
  std::uint32_t rounded_[kKeyDim / 16][4];
};

template <class X, int kGroups, bool kKeyFirst, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__((kGroups + 1) * kGroupThreads, 1)
    state_warpgroup(const __grid_constant__ Problem p) {
  using Registers = cuda::RegisterShares<kGroups, 72, 216>;
  if (threadIdx.x >= kGroups * kGroupThreads) {
    if constexpr (kGroups > 1) Registers::copy();
    Mover<X, kGroups, kKeyFirst, kKeyDim, kValueDim>(p).run();
  } else {
    if constexpr (kGroups > 1) Registers::compute();
    Chain<X, kGroups, kKeyFirst, kKeyDim, kValueDim>(p).run();
  }
}

// One group of values a block; of 128 keys and values two, unless there are multiprocessors for
// all.
template <class X>
Status run_warpgroup(const Op::Desc& d, const Op::Args& a, Stream stream) {
  const int device = a.k.device.index;
  const auto run = [&]<int kGroups, int kKeyDim, int kValueDim>(
                       std::integral_constant<int, kGroups>, std::integral_constant<int, kKeyDim>,
                       std::integral_constant<int, kValueDim>) {
    const Problem p(d, a, d.value_dim / (kGroups * kGroupValues));
    return cuda::launch(Op::kName,
                        d.state_layout == StateLayout::key_value
                            ? state_warpgroup<X, kGroups, true, kKeyDim, kValueDim>
                            : state_warpgroup<X, kGroups, false, kKeyDim, kValueDim>,
                        {.blocks = p.items,
                         .threads = (kGroups + 1) * kGroupThreads,
                         .shared = Stage<kGroups, kKeyDim>::kAll},
                        device, stream, p);
  };
  constexpr std::integral_constant<int, 1> kOne;
  constexpr std::integral_constant<int, kWide> kAll;
  if (d.key_dim != kWide || d.value_dim != kWide)
    return chunk_forward::with_key_dim(
        d, [&](auto key_dim) { return run(kOne, key_dim, std::integral_constant<int, 0>()); });
  return kWide / kGroupValues * d.sequence_count() * d.value_heads <=
                 cuda::limits(device).multiprocessors
             ? run(kOne, kAll, kAll)
             : run(std::integral_constant<int, 2>(), kAll, kAll);
}

}  // namespace bittern::state
