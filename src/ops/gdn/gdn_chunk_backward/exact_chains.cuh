// Gates and pairs of every chunk, and the two chains from chunk to chunk: forwards with the state
// S, backwards with its gradient H. Neither needs the other, so blocks of one and of the other take
// turns. A block has kSlab values of a head, and their S or H in shared memory.
#pragma once
#include "ops/gdn/gdn_chunk_backward/exact_device.cuh"

namespace bittern::chunk_backward::exact {

// ---- prepare ----

struct PrepareShared {
  Square k, q;
  Gates gates;
  float g[kMostRows];
};

template <class X>
__device__ void make_gates(const ExactProblem& all, const Chunk& c, PrepareShared& s) {
  const Problem& p = all.p;
  Gates& gates = s.gates;
  if (thread() < kMostRows) {
    const std::int64_t token = c.item.begin + thread();
    const bool there = thread() < c.rows && !p.masked(c.item, token);
    gates.masked[thread()] = there ? 0 : 1;
    gates.k_inverse[thread()] = gates.q_inverse[thread()] = 1;
    s.g[thread()] = there ? p.log_decay(c.item, token) : 0.0f;
    gates.beta[thread()] = there ? p.strength(c.item, token) : 0.0f;
  }
  __syncthreads();
  if (thread() == 0) {
    double total = 0;
    for (int i = 0; i < kMostRows; ++i) {
      total = gdn_next_sum(total, s.g[i]);
      gates.sum[i] = gdn_sum(total);
    }
  }
  if (p.d.qk_l2norm) {
    const Operands<X> of(all, c, gates);
    const int keys = static_cast<int>(p.d.key_dim);
    for (int row = thread() / kSide; row < kMostRows; row += kThreads / kSide) {
      const auto inverse = [&](auto&& at) {
        return 1.0f / std::sqrt(cuda::strided_dot(keys, at, at) + 1e-6f);
      };
      const float of_k = inverse([&](int i) { return of.raw_key(row, i); });
      const float of_q = inverse([&](int i) { return of.raw_query(row, i); });
      if (thread() % kSide == 0) gates.k_inverse[row] = of_k, gates.q_inverse[row] = of_q;
    }
  }
  __syncthreads();
  if (thread() < kMostRows) {
    gates.decay[thread()] = gdn_decay(gates.sum[thread()]);
    gates.rest[thread()] = gdn_decay(gates.sum[c.rows - 1], gates.sum[thread()]);
  }
  __syncthreads();
}

template <class X>
__global__ void __launch_bounds__(kThreads) prepare(const __grid_constant__ ExactProblem all) {
  auto& s = *cuda::dynamic_shared<PrepareShared>();
  const int keys = static_cast<int>(all.p.d.key_dim);
  for (std::int64_t index = blockIdx.x; index < all.items; index += gridDim.x) {
    const Chunk c = all.chunk(index);
    if (c.rows == 0) continue;
    __syncthreads();
    make_gates<X>(all, c, s);
    const Operands<X> of(all, c, s.gates);
    Tile kk = {}, qk = {};
    for (int slab = 0; slab < keys; slab += kSlab) {
      __syncthreads();
      fill_slab(s.k, slab, keys, [&](int row, int i) { return of.key(row, i); });
      fill_slab(s.q, slab, keys, [&](int row, int i) { return of.query(row, i); });
      __syncthreads();
      add_product(kk, rows_of(s.k), rows_of(s.k), min(kSlab, keys - slab));
      add_product(qk, rows_of(s.q), rows_of(s.k), min(kSlab, keys - slab));
    }
    for_tile([&](int r, int e, int i, int j) {
      if (i >= c.rows || j > i) return;
      const int at = i * all.p.d.chunk + j;
      const float decay = gdn_decay(s.gates.sum[i], s.gates.sum[j]);
      c.unit.kk[at] = kk[r][e];
      c.unit.l[at] = s.gates.beta[i] * kk[r][e] * decay;
      c.unit.p[at] = qk[r][e] * decay;
    });
    load_gates(*c.unit.gates, &s.gates);
  }
}

// ---- chains ----

struct ChainShared {
  Square square;                 // L or P; tokens, and some keys
  float rows[kMostRows][kSlab];  // tokens, and the block's values: y, r or d_o
  Gates gates;
  // Then S or H, [keys][kSlab].
  __device__ float* state() { return reinterpret_cast<float*>(this + 1); }
  static std::size_t bytes(std::int64_t keys) {
    return sizeof(ChainShared) + static_cast<std::size_t>(keys) * kSlab * sizeof(float);
  }
};
static_assert(sizeof(ChainShared) + kMostKeys * kSlab * sizeof(float) <= kMostShared);

template <class X, bool kBackward>
class Chain {
 public:
  __device__ Chain(const ExactProblem& all, const Problem::Item& item)
      : all_(all),
        p_(all.p),
        item_(item),
        s_(*cuda::dynamic_shared<ChainShared>()),
        state_(s_.state()),
        keys_(static_cast<int>(p_.d.key_dim)),
        first_value_(item.part * kSlab),
        values_(min(static_cast<int>(p_.d.value_dim) - first_value_, kSlab)) {}

  __device__ void run() const {
    __syncthreads();
    for (int i = thread(); i < keys_ * kSlab; i += kThreads) state_[i] = 0;
    __syncthreads();
    const float* const from = kBackward ? all_.d_final_state : p_.initial_state;
    if (from != nullptr)
      for_state(kBackward ? all_.d_final_stride : p_.initial_stride,
                [&](float& x, std::int64_t at) { x = from[at]; });
    const std::int64_t tokens = item_.end > item_.begin ? item_.end - item_.begin : 0;
    const std::int64_t chunks = (tokens + p_.d.chunk - 1) / p_.d.chunk;
    const std::int64_t first_slot = p_.cu_seqlens != nullptr
                                        ? p_.first_slot(item_)
                                        : item_.sequence * all_.slots.per_row.value();
    for (std::int64_t n = 0; n < chunks; ++n) {
      const std::int64_t number = kBackward ? chunks - 1 - n : n;
      Problem::Item item = item_;
      item.begin += number * p_.d.chunk;
      const std::int64_t left = item_.end - item.begin;
      step({item, left < p_.d.chunk ? static_cast<int>(left) : p_.d.chunk,
            all_.unit(first_slot + number, item_.head)});
    }
    __syncthreads();
    if (kBackward && all_.d_initial_state != nullptr)
      for_state(all_.d_initial_stride,
                [&](const float& x, std::int64_t at) { all_.d_initial_state[at] = x; });
  }

 private:
  // Every element of the state, neighbours in memory by neighbouring threads.
  template <class F>
  __device__ void for_state(const StateStrides& stride, F&& f) const {
    const bool along_keys = stride.key == 1;
    for (int i = thread(); i < keys_ * values_; i += kThreads) {
      const int key = along_keys ? i % keys_ : i / values_;
      const int value = along_keys ? i / keys_ : i % values_;
      f(state_[key * kSlab + value], stride.at(item_.sequence, item_.head) + key * stride.key +
                                         (first_value_ + value) * stride.value);
    }
  }

  __device__ void step(const Chunk& c) const {
    const Op::Desc& d = p_.d;
    const Gates& gates = s_.gates;
    const Operands<X> of(all_, c, gates);
    const auto key = [&](int row, int i) { return of.key(row, i); };
    const auto d_o = [&](int row, int i) {
      return i < values_ ? of.d_o(row, first_value_ + i) : 0.0f;
    };
    const auto load_pairs = [&](const float* from) {
      fill(s_.square,
           [&](int i, int j) { return j <= i && i < c.rows ? from[i * d.chunk + j] : 0.0f; });
    };
    const Side rows{s_.rows[0], 1, kSlab};

    __syncthreads();
    load_gates(s_.gates, c.unit.gates);
    float* const kept = (kBackward ? c.unit.gradient : c.unit.state) + first_value_;
    for (int i = thread(); i < keys_ * kSlab; i += kThreads)
      if (i % kSlab < values_) kept[i / kSlab * d.value_dim + i % kSlab] = state_[i];

    Tile acc = {};  // k S or k H, then what y or r is before the sum over other rows
    for (int slab = 0; slab < keys_; slab += kSlab) {
      __syncthreads();
      fill_slab(s_.square, slab, keys_, key);
      __syncthreads();
      add_product(acc, rows_of(s_.square), {state_ + slab * kSlab, 1, kSlab},
                  min(kSlab, keys_ - slab));
    }
    if constexpr (kBackward) {
      for_tile([&](int r, int e, int i, int) { acc[r][e] = gates.rest[i] * acc[r][e]; });
      __syncthreads();
      load_pairs(c.unit.p);
      fill(s_.rows, d_o);
      __syncthreads();
      add_product<Terms::from_row>(acc, columns_of(s_.square), rows, c.rows);
    } else {
      for_tile([&](int r, int e, int i, int x) {
        const float v = x < values_ ? of.value(i, first_value_ + x) : 0.0f;
        acc[r][e] = gates.beta[i] * std::fma(-gates.decay[i], acc[r][e], v);
      });
    }
    __syncthreads();
    load_pairs(c.unit.l);
    __syncthreads();
    solve(acc, c.rows);
    __syncthreads();

    float* const out = (kBackward ? c.unit.r : c.unit.y) + first_value_;
    for_tile([&](int, int, int i, int x) {
      if (i >= c.rows) return;
      float& y = s_.rows[i][x];
      if (x < values_) out[i * d.value_dim + x] = y;
      y = (kBackward ? gates.seen(i) : gates.rest[i]) * y;
    });
    add_to_state(gates.decay[c.rows - 1], key, c.rows);
    if constexpr (kBackward) {
      __syncthreads();
      fill(s_.rows, [&](int row, int i) { return gates.decay[row] * d_o(row, i); });
      add_to_state(1, [&](int row, int i) { return of.query(row, i); }, c.rows);
    }
  }

  // Row by row: y or r is told to all, who add its part of their rows.
  __device__ void solve(const Tile& right, int rows) const {
    Tile sum = {};
    for (int n = 0; n < rows; ++n) {
      const int j = kBackward ? rows - 1 - n : n;
      for_tile([&](int r, int e, int i, int x) {
        if (i == j) s_.rows[j][x] = right[r][e] - sum[r][e];
      });
      __syncthreads();
      for_tile([&](int r, int e, int i, int x) {
        if (kBackward ? i >= j : i <= j) return;
        const float l = kBackward ? s_.square[j][i] : s_.square[i][j];
        sum[r][e] = std::fma(l, s_.rows[j][x], sum[r][e]);
      });
    }
  }

  // factor * state + the sum over tokens of x^T rows.
  template <class Key>
  __device__ void add_to_state(float factor, Key&& x, int rows) const {
    for (int slab = 0; slab < keys_; slab += kSlab) {
      __syncthreads();
      fill_slab(s_.square, slab, keys_, x);
      __syncthreads();
      float* const state = state_ + slab * kSlab;
      Tile acc;
      for_tile([&](int r, int e, int key, int value) {
        acc[r][e] = slab + key < keys_ ? factor * state[key * kSlab + value] : 0.0f;
      });
      add_product(acc, columns_of(s_.square), {s_.rows[0], 1, kSlab}, rows);
      for_tile([&](int r, int e, int key, int value) {
        if (slab + key < keys_) state[key * kSlab + value] = acc[r][e];
      });
    }
  }

  const ExactProblem& all_;
  const Problem& p_;
  const Problem::Item item_;
  ChainShared& s_;
  float* const state_;
  const int keys_, first_value_, values_;
};

template <class X>
__global__ void __launch_bounds__(kThreads) chains(const __grid_constant__ ExactProblem all) {
  for (std::int64_t index = blockIdx.x; index < 2 * all.p.items; index += gridDim.x) {
    const Problem::Item item = all.p.item(index / 2);
    if (index % 2 == 0) {
      Chain<X, false>(all, item).run();
    } else {
      Chain<X, true>(all, item).run();
    }
  }
}

}  // namespace bittern::chunk_backward::exact
