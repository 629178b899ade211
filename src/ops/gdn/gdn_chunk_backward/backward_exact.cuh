// The header's sums as they stand, fma by fma: the bits of `ref`, for every field of the op.
//
// Kernels in the order of their launches; each finds what it needs of the others in the workspace,
// in f32:
//
//   prepare     of each chunk and head: gates, k k^T, L and P
//   chains      from chunk to chunk: forwards S and y, and, in other blocks, backwards H and r
//   gradients   of each chunk and head: d_v, d_beta, dg in the place of d_g, and its dq and dk
//   sum_heads   of each chunk and key head: d_q and d_k
//   pass_gate   of each sequence and head: dg becomes d_g; its parts of d_a_log and d_dt_bias
//   sum_gates   of each head: d_a_log and d_dt_bias
//
// Thread t has rows 4 (t / 16).. and columns t % 16, + 16, + 32, + 48 of every product. So half a
// warp has whole rows, and its lanes have the 16 sums of core/dot.h of them. Keys and values come
// in slabs: every length fits into 99 KiB of shared memory, which all devices from sm_80 on have.
#pragma once
#include "ops/gdn/gdn_chunk_backward/backward_device.cuh"

namespace bittern::chunk_backward::exact {

constexpr int kThreads = 256;
constexpr int kTile = 4;   // rows of a thread, and columns
constexpr int kSide = 16;  // threads along each side of a product
constexpr int kSlab = kTile * kSide;
constexpr int kPitch = kSlab + 1;       // rows start in different banks
constexpr std::size_t kMostKeys = 256;  // or values
constexpr std::size_t kMostShared = 99 << 10;
static_assert(kSlab == kMostRows && kSide == kDotLanes);

using Square = float[kSlab][kPitch];
using Tile = float[kTile][kTile];

__device__ inline int thread() { return static_cast<int>(threadIdx.x); }
__device__ inline int tile_row(int r) { return thread() / kSide * kTile + r; }
__device__ inline int tile_column(int e) { return thread() % kSide + e * kSide; }

// The rows of a chunk. Masked ones, and those past the chunk, are 0 in all operands.
struct Gates {
  GdnSum sum[kMostRows];
  float beta[kMostRows], decay[kMostRows], rest[kMostRows];  // beta, e, l of the header
  float k_inverse[kMostRows], q_inverse[kMostRows];          // 1 without qk_l2norm
  std::int32_t masked[kMostRows];                            // or past the chunk
  // b of the header.
  __device__ float seen(int i) const { return -(beta[i] * decay[i]); }
};
constexpr int kGateFloats = sizeof(Gates) / sizeof(float);

// What the workspace has for a chunk and head.
struct Unit {
  Gates* gates;
  float *kk, *l, *p;        // [chunk, chunk], up to the diagonal
  float *state, *gradient;  // S before and H after it, [keys, values]
  float *y, *r;             // [chunk, values]
  float *d_q, *d_k;         // [chunk, keys]
};
struct Layout {
  std::int64_t pairs, states, values, keys;
  explicit Layout(const Op::Desc& d)
      : pairs(d.chunk * d.chunk),
        states(d.key_dim * d.value_dim),
        values(d.chunk * d.value_dim),
        keys(d.chunk * d.key_dim) {}
  __host__ __device__ std::int64_t floats() const {
    return kGateFloats + 3 * pairs + 2 * (states + values + keys);
  }
  __device__ Unit at(float* first) const {
    float* const kk = first + kGateFloats;
    float* const state = kk + 3 * pairs;
    float* const y = state + 2 * states;
    float* const d_q = y + 2 * values;
    return {reinterpret_cast<Gates*>(first),
            kk,
            kk + pairs,
            kk + 2 * pairs,
            state,
            state + states,
            y,
            y + values,
            d_q,
            d_q + keys};
  }
};
// Then, for each sequence and head:
struct GateSums {
  float a_log, dt_bias;
};

inline std::size_t workspace_bytes(const Op::Desc& d) {
  const auto heads = static_cast<std::size_t>(d.value_heads);
  const auto chunks = static_cast<std::size_t>(d.batch * d.state_chunks());
  return chunks * heads * static_cast<std::size_t>(Layout(d).floats()) * sizeof(float) +
         static_cast<std::size_t>(d.sequence_count()) * heads * sizeof(GateSums);
}

struct Chunk {
  Problem::Item item;  // of which it is all tokens
  int rows;            // 0: there is no such chunk
  Unit unit;
};

struct ExactProblem {
  Problem p;
  cuda::ChunkSlots slots;
  const void* d_o;
  const float* d_final_state;  // null: zeros
  void *d_q, *d_k, *d_v;
  float *d_g, *d_beta;
  float *d_a_log, *d_dt_bias, *d_initial_state;  // null: left out
  TokenStrides d_o_stride, d_q_stride, d_k_stride, d_v_stride, d_g_stride, d_beta_stride;
  StateStrides d_final_stride, d_initial_stride;
  Layout layout;
  float* units;
  GateSums* sums;
  Divisor key_heads;
  std::int64_t sequences, items;  // items: chunks and heads

  ExactProblem(const Op::Desc& d, const Op::Args& a, void* workspace)
      : p(d, forward_args(a), (d.value_dim + kSlab - 1) / kSlab),
        slots(d, a.cu_seqlens),
        d_o(a.d_o.data),
        d_final_state(a.d_final_state.as<float>()),
        d_q(a.d_q.data),
        d_k(a.d_k.data),
        d_v(a.d_v.data),
        d_g(a.d_g.as<float>()),
        d_beta(a.d_beta.as<float>()),
        d_a_log(a.d_a_log.as<float>()),
        d_dt_bias(a.d_dt_bias.as<float>()),
        d_initial_state(a.d_initial_state.as<float>()),
        d_o_stride(a.d_o),
        d_q_stride(a.d_q),
        d_k_stride(a.d_k),
        d_v_stride(a.d_v),
        d_g_stride(a.d_g),
        d_beta_stride(a.d_beta),
        d_final_stride(d, a.d_final_state),
        d_initial_stride(d, a.d_initial_state),
        layout(d),
        units(static_cast<float*>(workspace)),
        sums(nullptr),
        key_heads(d.key_heads),
        sequences(d.sequence_count()),
        items(slots.count * d.value_heads) {
    sums = reinterpret_cast<GateSums*>(units + items * layout.floats());
  }

  __device__ Unit unit(std::int64_t slot, std::int64_t head) const {
    return layout.at(units + (slot * p.d.value_heads + head) * layout.floats());
  }
  __device__ Chunk chunk(std::int64_t slot, std::int64_t head) const {
    const cuda::ChunkTokens tokens = slots.at(slot);
    const std::int64_t row = slots.per_row.divide(slot);
    const std::int64_t begin = tokens.begin - row * p.d.tokens;
    const Problem::Item item{.sequence = 0,
                             .head = head,
                             .key_head = p.key_head(head),
                             .part = 0,
                             .row = row,
                             .begin = begin,
                             .end = begin + tokens.rows};
    return {item, tokens.rows, unit(slot, head)};
  }
  __device__ Chunk chunk(std::int64_t index) const {
    const std::int64_t slot = p.heads.divide(index);
    return chunk(slot, index - slot * p.heads.value());
  }
};

// The operands of a chunk, as the rule sees them.
template <class X>
class Operands {
 public:
  __device__ Operands(const ExactProblem& all, const Chunk& c, const Gates& gates)
      : all_(all),
        gates_(gates),
        k_(first(all.p.k, all.p.k_stride, c.item, c.item.key_head)),
        q_(first(all.p.q, all.p.q_stride, c.item, c.item.key_head)),
        v_(first(all.p.v, all.p.v_stride, c.item, c.item.head)),
        d_o_(first(all.d_o, all.d_o_stride, c.item, c.item.head)) {}

  __device__ float raw_key(int row, int i) const { return at(k_, all_.p.k_stride, row, i); }
  __device__ float raw_query(int row, int i) const { return at(q_, all_.p.q_stride, row, i); }
  __device__ float key(int row, int i) const { return raw_key(row, i) * gates_.k_inverse[row]; }
  __device__ float query(int row, int i) const {
    return raw_query(row, i) * gates_.q_inverse[row] * all_.p.scale;
  }
  __device__ float value(int row, int i) const { return at(v_, all_.p.v_stride, row, i); }
  __device__ float d_o(int row, int i) const { return at(d_o_, all_.d_o_stride, row, i); }

 private:
  __device__ static const X* first(const void* x, const TokenStrides& stride,
                                   const Problem::Item& item, std::int64_t head) {
    return static_cast<const X*>(x) + stride.at(item.row, item.begin, head);
  }
  __device__ float at(const X* x, const TokenStrides& stride, int row, int i) const {
    return gates_.masked[row] != 0 ? 0.0f : cuda::load_math(x[row * stride.token + i]);
  }

  const ExactProblem& all_;
  const Gates& gates_;
  const X *k_, *q_, *v_, *d_o_;
};

// ---- products ----

// One side of a product, in shared memory: its row (or column) i, and there term m.
struct Side {
  const float* first;
  int line, step;
  __device__ float at(int i, int m) const { return first[i * line + m * step]; }
};
__device__ inline Side rows_of(const Square& s) { return {s[0], kPitch, 1}; }
__device__ inline Side columns_of(const Square& s) { return {s[0], 1, kPitch}; }

// Which terms a row adds: all, those up to its own number, or those from there on.
enum class Terms { all, to_row, from_row };

template <Terms kTerms = Terms::all>
__device__ void add_product(Tile& acc, Side left, Side right, int terms) {
  const int begin = kTerms == Terms::from_row ? tile_row(0) : 0;
  const int end = kTerms == Terms::to_row ? min(terms, tile_row(kTile)) : terms;
  for (int m = begin; m < end; ++m) {
    float of_right[kTile];
#pragma unroll
    for (int e = 0; e < kTile; ++e) of_right[e] = right.at(tile_column(e), m);
#pragma unroll
    for (int r = 0; r < kTile; ++r) {
      if (kTerms == Terms::to_row && m > tile_row(r)) continue;
      if (kTerms == Terms::from_row && m < tile_row(r)) continue;
      const float of_left = left.at(tile_row(r), m);
#pragma unroll
      for (int e = 0; e < kTile; ++e) acc[r][e] = std::fma(of_left, of_right[e], acc[r][e]);
    }
  }
}

// f(r, e, row, column) of each element of a thread's tile.
template <class F>
__device__ void for_tile(F&& f) {
#pragma unroll
  for (int r = 0; r < kTile; ++r) {
#pragma unroll
    for (int e = 0; e < kTile; ++e) f(r, e, tile_row(r), tile_column(e));
  }
}

template <class F>
__device__ void fill(Square& to, F&& at) {
  for (int i = thread(); i < kSlab * kSlab; i += kThreads)
    to[i / kSlab][i % kSlab] = at(i / kSlab, i % kSlab);
}
// Columns slab.. of something that has `width`.
template <class F>
__device__ void fill_slab(Square& to, int slab, int width, F&& at) {
  fill(to, [&](int row, int m) { return slab + m < width ? at(row, slab + m) : 0.0f; });
}

// acc += a b^T, where a(i, m) and b(j, m) have `width` terms.
template <class A, class B>
__device__ void multiply(Tile& acc, int width, Square& left, Square& right, A&& a, B&& b) {
  for (int slab = 0; slab < width; slab += kSlab) {
    __syncthreads();
    fill_slab(left, slab, width, a);
    fill_slab(right, slab, width, b);
    __syncthreads();
    add_product(acc, rows_of(left), rows_of(right), min(kSlab, width - slab));
  }
}

// The halving tree of core/dot.h over half a warp.
__device__ inline float sum_lanes(float sum) {
  for (int stride = kSide / 2; stride > 0; stride /= 2) sum += __shfl_xor_sync(~0u, sum, stride);
  return sum;
}

__device__ inline void load_gates(Gates& to, const Gates* from) {
  for (int i = thread(); i < kGateFloats; i += kThreads)
    reinterpret_cast<float*>(&to)[i] = reinterpret_cast<const float*>(from)[i];
}

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
      for (int i = thread(); i < kMostRows * kSlab; i += kThreads)
        s_.rows[i / kSlab][i % kSlab] = d_o(i / kSlab, i % kSlab);
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
      for (int i = thread(); i < kMostRows * kSlab; i += kThreads)
        s_.rows[i / kSlab][i % kSlab] = gates.decay[i / kSlab] * d_o(i / kSlab, i % kSlab);
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

// ---- gradients ----

struct GradientsShared {
  Square dp, x;        // DP and X of the header
  Square left, right;  // sides of products; W and C; sums of <S, H>
  Gates gates;
  float k_m[kMostRows], q_n[kMostRows], k_z[kMostRows];  // k . M, q . N, k . Z
  float below[kMostRows];                                // the sum over j < i of C[i][j]
  float before[kMostRows];                               // z
};
static_assert(sizeof(GradientsShared) <= kMostShared);

// One dot product for each of a thread's rows; this lane's part of it.
using RowSums = float[kTile];

template <class X>
class ChunkGradients {
 public:
  __device__ ChunkGradients(const ExactProblem& all, const Chunk& c)
      : all_(all),
        d_(all.p.d),
        c_(c),
        s_(*cuda::dynamic_shared<GradientsShared>()),
        of_(all, c, s_.gates),
        keys_(static_cast<int>(d_.key_dim)),
        values_(static_cast<int>(d_.value_dim)) {}

  __device__ void run() const {
    __syncthreads();
    load_gates(s_.gates, c_.unit.gates);
    RowSums pairs;  // DL[i] . (k k^T)[i]
    make_pairs(pairs);
    make_keys();
    make_values(pairs);
    make_log_decays(inner_product());
  }

 private:
  __device__ float y(int row, int i) const { return of_chunk(c_.unit.y, row, i); }
  __device__ float r(int row, int i) const { return of_chunk(c_.unit.r, row, i); }
  __device__ float of_chunk(const float* x, int row, int i) const {
    return row < c_.rows ? x[row * values_ + i] : 0.0f;
  }

  // dp and dl, and all that is made of them for pairs of rows.
  __device__ void make_pairs(RowSums& pairs) const {
    const auto of_y = [&](int row, int i) { return y(row, i); };
    Tile dp = {}, dl = {};
    multiply(dp, values_, s_.left, s_.right, [&](int i, int m) { return of_.d_o(i, m); }, of_y);
    multiply(dl, values_, s_.left, s_.right, [&](int i, int m) { return r(i, m); }, of_y);
    __syncthreads();
    Square& w = s_.left;
    for (float& sum : pairs) sum = 0;
    for_tile([&](int r, int e, int i, int j) {
      if (i >= c_.rows || j > i) return;
      const int at = i * d_.chunk + j;
      const float decay = gdn_decay(s_.gates.sum[i], s_.gates.sum[j]);
      s_.dp[i][j] = dp[r][e] * decay;
      if (j == i) {
        s_.x[i][j] = 0;
        return;
      }
      const float slope = -dl[r][e], decayed = slope * decay;
      s_.x[i][j] = s_.gates.beta[i] * decayed;
      w[i][j] = std::fma(slope, c_.unit.l[at], dp[r][e] * c_.unit.p[at]);
      pairs[r] = std::fma(decayed, c_.unit.kk[at], pairs[r]);
    });
    __syncthreads();
    if (thread() < c_.rows) {  // C, a column to a thread
      float sum = 0;
      for (int i = c_.rows - 1; i > thread(); --i) w[i][thread()] = sum += w[i][thread()];
    }
    __syncthreads();
    RowSums below = {};
    for_tile([&](int r, int, int i, int j) {
      if (i < c_.rows && j < i) below[r] += w[i][j];
    });
    put(s_.below, below);
  }

  // dq and dk of this head.
  __device__ void make_keys() const {
    const Gates& gates = s_.gates;
    const auto of_r = [&](int i, int m) { return r(i, m); };
    const auto of_y = [&](int i, int m) { return y(i, m); };
    const auto of_d_o = [&](int i, int m) { return of_.d_o(i, m); };
    RowSums k_m = {}, q_n = {}, k_z = {};
    for (int slab = 0; slab < keys_; slab += kSlab) {
      const auto of_state = [&](const float* state) {
        return [=, this](int key, int m) {
          return slab + key < keys_ ? state[(slab + key) * values_ + m] : 0.0f;
        };
      };
      Tile of_m = {}, of_n = {}, of_z = {};  // M, N, Z of the header
      multiply(of_m, values_, s_.left, s_.right, of_r, of_state(c_.unit.state));
      multiply(of_n, values_, s_.left, s_.right, of_d_o, of_state(c_.unit.state));
      multiply(of_z, values_, s_.left, s_.right, of_y, of_state(c_.unit.gradient));
      __syncthreads();
      Square &k = s_.left, &q = s_.right;
      fill_slab(k, slab, keys_, [&](int row, int i) { return of_.key(row, i); });
      fill_slab(q, slab, keys_, [&](int row, int i) { return of_.query(row, i); });
      __syncthreads();
      Tile dq, dk;
      for_tile([&](int r, int e, int i, int s) {
        dq[r][e] = gates.decay[i] * of_n[r][e];
        dk[r][e] = std::fma(gates.seen(i), of_m[r][e], gates.rest[i] * of_z[r][e]);
        if (slab + s >= keys_) return;
        k_m[r] = std::fma(k[i][s], of_m[r][e], k_m[r]);
        q_n[r] = std::fma(q[i][s], of_n[r][e], q_n[r]);
        k_z[r] = std::fma(k[i][s], of_z[r][e], k_z[r]);
      });
      add_product<Terms::to_row>(dq, rows_of(s_.dp), columns_of(k), c_.rows);
      add_product<Terms::from_row>(dk, columns_of(s_.dp), columns_of(q), c_.rows);
      add_product<Terms::to_row>(dk, rows_of(s_.x), columns_of(k), c_.rows);
      add_product<Terms::from_row>(dk, columns_of(s_.x), columns_of(k), c_.rows);
      for_tile([&](int r, int e, int i, int s) {
        if (i >= c_.rows || slab + s >= keys_) return;
        c_.unit.d_q[i * keys_ + slab + s] = dq[r][e];
        c_.unit.d_k[i * keys_ + slab + s] = dk[r][e];
      });
    }
    put(s_.k_m, k_m);
    put(s_.q_n, q_n);
    put(s_.k_z, k_z);
  }

  // d_v and d_beta.
  __device__ void make_values(const RowSums& pairs) const {
    const Problem& p = all_.p;
    const Gates& gates = s_.gates;
    __syncthreads();
    X* const d_v =
        static_cast<X*>(all_.d_v) + all_.d_v_stride.at(c_.item.row, c_.item.begin, c_.item.head);
    for (int i = thread(); i < c_.rows * values_; i += kThreads) {
      const int row = i / values_, x = i % values_;
      d_v[row * all_.d_v_stride.token + x] =
          cuda::store_math<X>(gates.masked[row] != 0 ? 0.0f : gates.beta[row] * r(row, x));
    }
#pragma unroll
    for (int n = 0; n < kTile; ++n) {
      const int i = tile_row(n);
      const float of_v = cuda::strided_dot(
          values_, [&](int x) { return r(i, x); }, [&](int x) { return of_.value(i, x); });
      const float of_pairs = sum_lanes(pairs[n]);
      if (i >= c_.rows || thread() % kSide != 0) continue;
      float d_beta = std::fma(-gates.decay[i], s_.k_m[i], of_v) + of_pairs;
      const std::int64_t token = c_.item.begin + i;
      if (d_.beta_sigmoid && gates.masked[i] == 0) {
        const float x = p.beta[p.beta_stride.at(c_.item.row, token, c_.item.head)];
        const float slope = math::sigmoid(x) * math::sigmoid(-x);
        d_beta *= d_.allow_neg_eigval ? 2 * slope : slope;
      }
      all_.d_beta[all_.d_beta_stride.at(c_.item.row, token, c_.item.head)] =
          gates.masked[i] != 0 ? 0.0f : d_beta;
    }
  }

  // <S, H>, for thread 0.
  __device__ float inner_product() const {
    // The sums of core/dot.h of each column: sum t / 16 of columns t % 16, + 16, ..
    float* const sums = s_.left[0];  // [kDotLanes, values]
    static_assert(sizeof(Square) >= kDotLanes * kMostKeys * sizeof(float));
    __syncthreads();
    for (int value = thread() % kSide; value < values_; value += kSide) {
      float sum = 0;
      for (int key = thread() / kSide; key < keys_; key += kDotLanes) {
        const int at = key * values_ + value;
        sum = std::fma(c_.unit.state[at], c_.unit.gradient[at], sum);
      }
      sums[thread() / kSide * values_ + value] = sum;
    }
    for (int stride = kDotLanes / 2; stride > 0; stride /= 2) {
      __syncthreads();
      for (int i = thread(); i < stride * values_; i += kThreads)
        sums[i] += sums[i + stride * values_];
    }
    __syncthreads();
    float inner = 0;
    if (thread() == 0) {
      for (int value = 0; value < values_; ++value) inner += sums[value];
    }
    return inner;
  }

  // dg, which pass_gate makes d_g of.
  __device__ void make_log_decays(float inner) const {
    if (thread() != 0) return;
    const Gates& gates = s_.gates;
    float before = 0;
    for (int i = 0; i < c_.rows; ++i) {
      s_.before[i] = before;
      before += gates.rest[i] * s_.k_z[i];
    }
    float own = 0;
    for (int i = c_.rows - 1; i >= 0; --i) {
      own += std::fma(gates.seen(i), s_.k_m[i], gates.decay[i] * s_.q_n[i]);
      const float dg = std::fma(gates.decay[c_.rows - 1], inner, own + s_.below[i] + s_.before[i]);
      all_.d_g[all_.d_g_stride.at(c_.item.row, c_.item.begin + i, c_.item.head)] =
          gates.masked[i] != 0 ? 0.0f : dg;
    }
  }

  __device__ void put(float (&to)[kMostRows], const RowSums& sums) const {
#pragma unroll
    for (int r = 0; r < kTile; ++r) {
      const float sum = sum_lanes(sums[r]);
      if (thread() % kSide == 0) to[tile_row(r)] = sum;
    }
  }

  const ExactProblem& all_;
  const Op::Desc& d_;
  const Chunk& c_;
  GradientsShared& s_;
  const Operands<X> of_;
  const int keys_, values_;
};

template <class X>
__global__ void __launch_bounds__(kThreads) gradients(const __grid_constant__ ExactProblem all) {
  for (std::int64_t index = blockIdx.x; index < all.items; index += gridDim.x) {
    const Chunk c = all.chunk(index);
    if (c.rows > 0) ChunkGradients<X>(all, c).run();
  }
}

// ---- sums over heads ----

template <class X>
__global__ void __launch_bounds__(kThreads) sum_heads(const __grid_constant__ ExactProblem all) {
  const Op::Desc& d = all.p.d;
  const int keys = static_cast<int>(d.key_dim);
  const std::int64_t sharing = d.value_heads / d.key_heads, step = all.p.tiled ? d.key_heads : 1;
  for (std::int64_t index = blockIdx.x; index < all.slots.count * d.key_heads; index += gridDim.x) {
    const std::int64_t slot = all.key_heads.divide(index);
    const std::int64_t key_head = index - slot * all.key_heads.value();
    const Chunk c = all.chunk(slot, all.p.tiled ? key_head : key_head * sharing);
    const Gates& gates = *c.unit.gates;
    const Operands<X> of(all, c, gates);
    for (int first = 0; first < c.rows; first += kThreads / kSide) {
      const int row = first + thread() / kSide;
      const bool there = row < c.rows;
      const auto store = [&](const float* x, float factor, float inverse, auto&& raw, void* to,
                             const TokenStrides& stride) {
        const auto sum = [&](int i) {
          float acc = 0;
          for (std::int64_t n = 0; n < sharing; ++n)
            acc += x[n * step * all.layout.floats() + row * keys + i];
          return factor * acc;
        };
        const auto unit = [&](int i) { return raw(row, i) * inverse; };
        float along = 0;
        if (d.qk_l2norm) along = cuda::strided_dot(there ? keys : 0, sum, unit);
        if (!there) return;
        X* const out = static_cast<X*>(to) + stride.at(c.item.row, c.item.begin + row, key_head);
        for (int i = thread() % kSide; i < keys; i += kSide) {
          float x_i = gates.masked[row] != 0 ? 0.0f : sum(i);
          if (d.qk_l2norm && gates.masked[row] == 0) x_i = inverse * std::fma(-along, unit(i), x_i);
          out[i] = cuda::store_math<X>(x_i);
        }
      };
      const auto raw_query = [&](int r, int i) { return of.raw_query(r, i); };
      const auto raw_key = [&](int r, int i) { return of.raw_key(r, i); };
      store(c.unit.d_q, all.p.scale, there ? gates.q_inverse[row] : 1, raw_query, all.d_q,
            all.d_q_stride);
      store(c.unit.d_k, 1, there ? gates.k_inverse[row] : 1, raw_key, all.d_k, all.d_k_stride);
    }
  }
}

// ---- the gate ----

// A block has a sequence and head; its items are not cut into parts.
template <class = void>
__global__ void __launch_bounds__(kThreads) pass_gate(const __grid_constant__ ExactProblem all) {
  struct Term {
    float dg, log_decay, d_g;
    bool counts;
  };
  __shared__ Term terms[kThreads];
  const Problem& p = all.p;
  for (std::int64_t index = blockIdx.x; index < all.sequences * p.d.value_heads;
       index += gridDim.x) {
    const Problem::Item item = p.item(index * p.parts.value());
    const float a_log = p.a_log[item.head], bias = p.dt_bias[item.head];
    const float rate = -math::exp(a_log);
    GateSums sums{};
    for (std::int64_t begin = item.begin; begin < item.end; begin += kThreads) {
      const std::int64_t token = begin + thread();
      Term& term = terms[thread()];
      __syncthreads();
      term.counts = token < item.end && !p.masked(item, token);
      if (term.counts) {
        float& d_g = all.d_g[all.d_g_stride.at(item.row, token, item.head)];
        const float input = p.g[p.g_stride.at(item.row, token, item.head)];
        term.log_decay = gdn_log_decay(input, a_log, bias);
        term.counts = !(term.log_decay <= kGdnReset);
        if (term.counts) {
          term.dg = d_g;
          d_g = term.d_g = d_g * rate * gdn_softplus_slope(input + bias);
        }
      }
      __syncthreads();
      if (thread() != 0) continue;
      for (const Term& x : terms) {
        if (!x.counts) continue;
        sums.a_log = std::fma(x.dg, x.log_decay, sums.a_log);
        sums.dt_bias += x.d_g;
      }
    }
    if (thread() == 0) all.sums[index] = sums;
  }
}

template <class = void>
__global__ void __launch_bounds__(kThreads) sum_gates(const __grid_constant__ ExactProblem all) {
  const Op::Desc& d = all.p.d;
  const std::int64_t all_threads = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t head = std::int64_t{blockIdx.x} * kThreads + thread(); head < d.value_heads;
       head += all_threads) {
    GateSums total{};
    for (std::int64_t n = 0; d.gate && n < all.sequences; ++n) {
      total.a_log += all.sums[n * d.value_heads + head].a_log;
      total.dt_bias += all.sums[n * d.value_heads + head].dt_bias;
    }
    if (all.d_a_log != nullptr) all.d_a_log[head] = total.a_log;
    if (all.d_dt_bias != nullptr) all.d_dt_bias[head] = total.dt_bias;
  }
}

// ---- all of it ----

template <class X>
Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace workspace) {
  const ExactProblem all(d, a, workspace.data);
  const auto launch = [&](auto* kernel, std::int64_t blocks, std::size_t shared = 0) {
    return cuda::launch(Op::kName, kernel,
                        {.blocks = blocks, .threads = kThreads, .shared = shared},
                        a.d_v.device.index, stream, all);
  };
  BITTERN_TRY(launch(prepare<X>, all.items, sizeof(PrepareShared)));
  BITTERN_TRY(launch(chains<X>, 2 * all.p.items, ChainShared::bytes(d.key_dim)));
  BITTERN_TRY(launch(gradients<X>, all.items, sizeof(GradientsShared)));
  BITTERN_TRY(launch(sum_heads<X>, all.slots.count * d.key_heads));
  if (d.gate) BITTERN_TRY(launch(pass_gate<>, all.sequences * d.value_heads));
  return launch(sum_gates<>, cuda::grid_for(d.value_heads, kThreads).blocks);
}

}  // namespace bittern::chunk_backward::exact
