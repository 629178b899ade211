// The chain of states on tensor cores, by products of a warpgroup (sm_90a): f16 and bf16, keys of
// 64 or 128, chunks of 64.
//
// A warpgroup has 64 values of a head, and their state in registers, transposed: [values, keys].
// Products are then transposed too, with a column for each token, so that each one's result is,
// rounded, the next one's left side, and none of it passes through shared memory:
//
//   y = u - S w^T;   v_new = X(y);   S = e^g[last] S + X(y e^(g[last] - g)) k
//
// The right sides are where another warpgroup has put them: it copies the next chunks meanwhile.
// v_new goes where u was, and X(S) into a buffer of its own. That warpgroup writes both out. The
// copy engine does nearly all of this: loads and stores by threads would keep the chain's own
// accesses to shared memory waiting.
#pragma once
#include "cuda/tensor_map.cuh"
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

// Before kStages of these, kBuffers for X(S): chunk n has buffer n % kBuffers. 128 keys leave room
// for no more.
template <int kGroups, int kKeyDim>
struct Stage {
  static constexpr int kStages = kGroups == 1 ? 4 : 3, kBuffers = kStages - 1;
  // Whether results are copied out before the chunk is done, and gates are handed over before this
  // side waits for the chain. With two groups the memory is the limit, and no barriers are left.
  static constexpr bool kEarly = kGroups == 1;
  static constexpr int kBuffer = kKeyDim / 64 * kPart;
  static constexpr int kFirst = kBuffers * kGroups * kBuffer;
  static constexpr int kKeys = 0, kW = kBuffer, kValues = 2 * kBuffer;
  static constexpr int kGates = kValues + kGroups * kPart;
  static constexpr int kBytes = kGates + (static_cast<int>(sizeof(Gates)) + 1023) / 1024 * 1024;
  static constexpr int kArrivals = kFirst + kStages * kBytes;  // a barrier for each stage
  static constexpr int kAll = kArrivals + kStages * 8;
  static __device__ int at(int stage) { return kFirst + stage * kBytes; }
  static __device__ int buffer_at(int buffer, int group) {
    return (buffer * kGroups + group) * kBuffer;
  }
};
// The barrier of a group that computes and the warp that copies its results out.
template <int kGroups>
__device__ int results_barrier(int stage) {
  return 1 + 2 * Stage<kGroups, kWide>::kStages * kGroups + stage;
}
constexpr int kResultsThreads = kGroupThreads + 32;

struct ChainProblem {
  cuda::TensorMap k, w, u, v_new, h;  // the last two may be missing, as in `p`
  Problem p;
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
  __device__ bool whole(int n) const { return n < chunks && rows(n) == kMostRows; }
};

// A warpgroup that copies: chunks into shared memory, and results out of it. Its first warp has the
// copy engine do so for whole chunks; all threads do for a last one with fewer rows. The other
// warps copy the gates. A chunk begins when both have handed it over. kKeyFirst: the state's
// layout.
template <class X, int kGroups, bool kKeyFirst, int kKeyDim>
class Mover {
 public:
  using Place = Stage<kGroups, kKeyDim>;

  __device__ explicit Mover(const ChainProblem& all)
      : all_(all),
        c_(all.p),
        thread_(static_cast<int>(threadIdx.x) % kGroupThreads),
        first_value_(c_.item.part * kGroups * kGroupValues) {
    const std::int64_t states = c_.p.slots.count - c_.item.first_state;
    states_ = c_.p.h == nullptr ? 0 : static_cast<int>(states < c_.chunks ? states : c_.chunks);
  }

  __device__ void run() {
    if (thread_ == 0)
      for (int stage = 0; stage < Place::kStages; ++stage) cuda::arrival_init(arrival(stage));
    sync_movers();
    const bool first_warp = cuda::uniform(thread_ / 32) == 0;
    int stage = 0, buffer = 0;
#pragma unroll 1
    for (int n = 0; n < c_.chunks + Place::kStages; ++n, stage = stage_after<1>(stage)) {
      const int place = Place::at(stage), before = n - Place::kStages;
      if (kEarly && !first_warp) hand_gates_over(n - 2, stage_after<-2>(stage));
      if (before >= 0) {
        if (first_warp && kEarly) {
          cuda::barrier_wait(results_barrier<kGroups>(stage), kResultsThreads);
          if (cuda::elected()) put_out(before, place, buffer);
        }
        for (int group = 0; group < kGroups; ++group)
          cuda::barrier_wait(done_barrier<kGroups, Place::kStages>(stage, group), kPairThreads);
      }
      if (first_warp && cuda::elected()) {
        if (before >= 0 && !kEarly) put_out(before, place, buffer);
        const bool whole = c_.whole(n);
        if (whole) copy_keys(n, stage);
        cuda::bulk_copy_out_wait();  // what it reads may be overwritten now
        if (whole) copy_values(n, stage);
      }
      if (before >= 0) {
        if (!c_.whole(before)) put_rows_out(before, place);
        buffer = buffer == Place::kBuffers - 1 ? 0 : buffer + 1;
      }
      if (n < c_.chunks) {
        if (!c_.whole(n)) copy_rows_in(n, place);
        if (!first_warp) copy_gates(n, shared_at<Gates>(place + Place::kGates));
      }
      cuda::copy_async_commit();
      if (first_warp) {
        hand_copies_over(n - 1, stage_after<-1>(stage));
      } else if (!kEarly) {
        hand_gates_over(n - 1, stage_after<-1>(stage));
      }
    }
  }

 private:
  static constexpr bool kEarly = Place::kEarly;
  static constexpr int kKeyAcross = kKeyDim / 8, kValueAcross = kGroups * kGroupValues / 8;
  static constexpr int kChunkBytes = Place::kGates;

  template <int kChunks>
  __device__ static int stage_after(int stage) {
    return (stage + kChunks + Place::kStages) % Place::kStages;
  }
  __device__ std::uint64_t* arrival(int stage) const {
    return &shared_at<std::uint64_t>(Place::kArrivals + 8 * stage);
  }
  __device__ static void sync_movers() { cuda::barrier_wait(15, kGroupThreads); }
  __device__ int token(int n) const {
    return static_cast<int>(c_.item.tokens.begin) + n * kMostRows;
  }

  // ---- by one thread ----

  __device__ void copy_keys(int n, int stage) const {
    const int place = Place::at(stage);
    cuda::arrival_expect(arrival(stage), kChunkBytes);
#pragma unroll
    for (int part = 0; part < kKeyDim / 64; ++part) {
      const auto copy = [&](int to, const cuda::TensorMap& from, std::int64_t head) {
        cuda::copy_box_in(&shared_at<char>(place + to + part * kPart), from,
                          {64 * part, static_cast<int>(head), token(n)}, arrival(stage));
      };
      copy(Place::kW, all_.w, c_.item.head);
      copy(Place::kKeys, all_.k, c_.item.key_head);
    }
  }
  __device__ void copy_values(int n, int stage) const {
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
      cuda::copy_box_in(&shared_at<char>(Place::at(stage) + Place::kValues + group * kPart), all_.u,
                        {first_value_ + 64 * group, static_cast<int>(c_.item.head), token(n)},
                        arrival(stage));
  }
  __device__ void put_out(int n, int place, int buffer) const {
    if (n < states_) put_states_out(n, buffer);
    if (c_.whole(n) && c_.p.v_new != nullptr) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group)
        cuda::copy_box_out(all_.v_new,
                           {first_value_ + 64 * group, static_cast<int>(c_.item.head), token(n)},
                           &shared_at<char>(place + Place::kValues + group * kPart));
    }
    cuda::bulk_copies_commit();
  }
  // X(S) of a group lies as [keys, 64 values] in one part, or as [64 values, keys] in parts of 64.
  __device__ void put_states_out(int n, int buffer) const {
    const auto state =
        static_cast<int>((c_.item.first_state + n) * c_.p.d.value_heads + c_.item.head);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int value = first_value_ + 64 * group, from = Place::buffer_at(buffer, group);
      if constexpr (kKeyFirst) {
        cuda::copy_box_out(all_.h, {value, 0, state}, &shared_at<char>(from));
      } else {
#pragma unroll
        for (int part = 0; part < kKeyDim / 64; ++part)
          cuda::copy_box_out(all_.h, {64 * part, value, state},
                             &shared_at<char>(from + part * kPart));
      }
    }
  }

  // ---- by all, the last chunk ----

  // f(place, the element there) for the pieces of rows in `tile`, of which this thread has some.
  template <int kAcross, class F>
  __device__ void for_pieces(int n, int tile, std::int64_t heads, std::int64_t width,
                             std::int64_t head, std::int64_t first, F&& f) const {
    constexpr int kDown = kGroupThreads / kAcross;
    const int piece = thread_ % kAcross;
    for (int row = thread_ / kAcross; row < kMostRows; row += kDown)
      f(tile + cuda::tile_place(row, piece), row < c_.rows(n),
        ((token(n) + row) * heads + head) * width + first + 8 * piece);
  }
  __device__ void copy_rows_in(int n, int place) const {
    sync_movers();  // nothing reads these places any more
    const auto from = [&](const void* data) {
      return [data](int to, bool there, std::int64_t at) {
        const X* const x = static_cast<const X*>(data);
        cuda::copy_async_16(&shared_at<char>(to), there ? x + at : x, there ? kPiece : 0);
      };
    };
    const auto& d = c_.p.d;
    for_pieces<kKeyAcross>(n, place + Place::kW, d.value_heads, kKeyDim, c_.item.head, 0,
                           from(c_.p.w));
    for_pieces<kKeyAcross>(n, place + Place::kKeys, d.key_heads, kKeyDim, c_.item.key_head, 0,
                           from(c_.p.k));
    for_pieces<kValueAcross>(n, place + Place::kValues, d.value_heads, d.value_dim, c_.item.head,
                             first_value_, from(c_.p.u));
  }
  __device__ void put_rows_out(int n, int place) const {
    if (c_.p.v_new == nullptr) return;
    const auto& d = c_.p.d;
    for_pieces<kValueAcross>(n, place + Place::kValues, d.value_heads, d.value_dim, c_.item.head,
                             first_value_, [&](int from, bool there, std::int64_t at) {
                               X* const to = static_cast<X*>(c_.p.v_new) + at;
                               if (there) *reinterpret_cast<uint4*>(to) = shared_at<uint4>(from);
                             });
  }

  // ---- handing over ----

  // The first warp says that the chunk's buffer for X(S) has been read. (That is so one turn after
  // the chunk's copies began: it then had the results of chunk n - kBuffers copied, and waited.)
  __device__ void hand_copies_over(int n, int stage) const {
    if (n < 0 || n >= c_.chunks) return;
    if (!c_.whole(n)) {
      cuda::copy_async_wait<0>();
      cuda::fence_shared();  // for the tensor cores
    }
    hand_over(stage);
  }
  // The others say that all of it has come.
  __device__ void hand_gates_over(int n, int stage) const {
    if (n < 0 || n >= c_.chunks) return;
    cuda::copy_async_wait<1>();
    put_decays(shared_at<Gates>(Place::at(stage) + Place::kGates));
    if (c_.whole(n)) {
      cuda::arrival_wait(arrival(stage), static_cast<unsigned>(n / Place::kStages));
      __syncwarp();  // lanes leave that loop each on its own, and a barrier takes whole warps
    } else {
      cuda::fence_shared();
    }
    hand_over(stage);
  }
  __device__ static void hand_over(int stage) {
    for (int group = 0; group < kGroups; ++group)
      cuda::barrier_arrive(full_barrier<kGroups>(stage, group), kPairThreads);
  }

  // ---- gates, by the last 64 threads ----

  // Past the end g is that of the last row.
  __device__ void copy_gates(int n, Gates& to) const {
    const int row = thread_ - (kGroupThreads - kMostRows);
    if (row < 0) return;
    const int last = c_.rows(n) - 1;
    const float* const from = c_.p.g + std::int64_t{token(n)} * c_.p.d.value_heads + c_.item.head;
    cuda::copy_async_4(to.g + row, from + min(row, last) * c_.p.d.value_heads);
    cuda::copy_async_4(to.last + row, from + last * c_.p.d.value_heads);
  }
  __device__ void put_decays(Gates& of) const {
    constexpr float kLog2E = 0x1.715476p0f;
    const int row = thread_ - (kGroupThreads - kMostRows);
    if (row < 0) return;
    const float last = of.last[row];
    of.kept[row] = cuda::approximate_exp2((last - of.g[row]) * kLog2E);
    if (row == 0) of.decay = cuda::approximate_exp2(last * kLog2E);
  }

  const ChainProblem& all_;
  const ChainItem c_;
  const int thread_, first_value_;
  int states_;  // those of h
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
    int stage = 0, buffer = 0;
#pragma unroll 1
    for (int n = 0; n < c_.chunks; ++n) {
      step(n, stage, buffer);
      stage = stage == Place::kStages - 1 ? 0 : stage + 1;
      buffer = buffer == Place::kBuffers - 1 ? 0 : buffer + 1;
    }
    if (c_.p.final_state != nullptr)
      for_state([&](float& x, std::int64_t at) { c_.p.final_state[at] = x; });
  }

 private:
  __device__ void step(int n, int stage, int buffer) {
    const int now = Place::at(stage);
    const auto matrix = [&](int place) {
      return cuda::warpgroup_matrix(&shared_at<char>(now + place));
    };
    const auto keys = matrix(Place::kKeys), w = matrix(Place::kW);
    TokenSums y;
    cuda::barrier_wait(full_barrier<kGroups>(stage, group_), kPairThreads);
    // Nothing is under way; but the compiler does not know it of the loop's last turn, and would
    // wait where the state is next used.
    cuda::warpgroup_wait<0>();
    cuda::warpgroup_hold(state_);
    cuda::warpgroup_begin();
#pragma unroll
    for (int s = 0; s < kKeyDim / 16; ++s)
      chunk_forward::multiply_tokens<X>(y, rounded_[s], w.at(s / 4 * kPart + s % 4 * 32), s > 0);
    cuda::warpgroup_commit();
    put_state(Place::buffer_at(buffer, group_));
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
    cuda::fence_shared();  // for the copy engine
    if constexpr (Place::kEarly)
      cuda::barrier_arrive(results_barrier<kGroups>(stage), kResultsThreads);
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
    state_warpgroup(const __grid_constant__ ChainProblem all) {
  using Registers = cuda::RegisterShares<kGroups, 72, 216>;
  if (threadIdx.x >= kGroups * kGroupThreads) {
    if constexpr (kGroups > 1) Registers::copy();
    Mover<X, kGroups, kKeyFirst, kKeyDim>(all).run();
  } else {
    if constexpr (kGroups > 1) Registers::compute();
    Chain<X, kGroups, kKeyFirst, kKeyDim, kValueDim>(all.p).run();
  }
}

// The tensors in boxes of a chunk's rows of one head, and of a state's part.
inline Status make_tensor_maps(const Op::Desc& d, ChainProblem* all) {
  const Problem& p = all->p;
  const auto make = [](const void* data, const cuda::TensorBoxes& boxes, cuda::TensorMap* to) {
    return data == nullptr ? Status() : cuda::make_tensor_map(Op::kName, data, boxes, to);
  };
  const auto tokens = [&](std::int64_t heads, std::int64_t width) {
    return cuda::TensorBoxes{{width, heads, d.batch * d.tokens}, 1, kMostRows};
  };
  BITTERN_TRY(make(p.k, tokens(d.key_heads, d.key_dim), &all->k));
  BITTERN_TRY(make(p.w, tokens(d.value_heads, d.key_dim), &all->w));
  BITTERN_TRY(make(p.u, tokens(d.value_heads, d.value_dim), &all->u));
  BITTERN_TRY(make(p.v_new, tokens(d.value_heads, d.value_dim), &all->v_new));
  const std::int64_t states = p.slots.count * d.value_heads;
  return make(p.h,
              d.state_layout == StateLayout::key_value
                  ? cuda::TensorBoxes{{d.value_dim, d.key_dim, states}, static_cast<int>(d.key_dim)}
                  : cuda::TensorBoxes{{d.key_dim, d.value_dim, states}, kGroupValues},
              &all->h);
}

// One group of values a block; of 128 keys and values two, unless there are multiprocessors for
// all.
template <class X>
Status run_warpgroup(const Op::Desc& d, const Op::Args& a, Stream stream) {
  const int device = a.k.device.index;
  const auto run = [&]<int kGroups, int kKeyDim, int kValueDim>(
                       std::integral_constant<int, kGroups>, std::integral_constant<int, kKeyDim>,
                       std::integral_constant<int, kValueDim>) -> Status {
    ChainProblem all{.p = Problem(d, a, d.value_dim / (kGroups * kGroupValues))};
    if (d.batch * d.tokens > 0) BITTERN_TRY(make_tensor_maps(d, &all));
    return cuda::launch(Op::kName,
                        d.state_layout == StateLayout::key_value
                            ? state_warpgroup<X, kGroups, true, kKeyDim, kValueDim>
                            : state_warpgroup<X, kGroups, false, kKeyDim, kValueDim>,
                        {.blocks = all.p.items,
                         .threads = (kGroups + 1) * kGroupThreads,
                         .shared = Stage<kGroups, kKeyDim>::kAll},
                        device, stream, all);
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
