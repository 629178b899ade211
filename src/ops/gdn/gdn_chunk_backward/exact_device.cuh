// What the kernels of backward_exact.cuh share: the problem, the workspace, and products.
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
        rows_(c.rows),
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
    const bool there = row < rows_ && gates_.masked[row] == 0;
    return there ? cuda::load_math(x[row * stride.token + i]) : 0.0f;
  }

  const ExactProblem& all_;
  const Gates& gates_;
  const int rows_;  // if cu_seqlens is wrong, gates may be those of another chunk
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

// Several at a time, so that loads from memory do not wait for one another.
template <int kWidth, class F>
__device__ void fill(float (&to)[kSlab][kWidth], F&& at) {
  constexpr int kRows = kThreads / kSlab, kBatch = 8;
  const int column = thread() % kSlab;
  for (int row = thread() / kSlab; row < kSlab; row += kBatch * kRows) {
    float x[kBatch];
#pragma unroll
    for (int n = 0; n < kBatch; ++n) x[n] = at(row + n * kRows, column);
#pragma unroll
    for (int n = 0; n < kBatch; ++n) to[row + n * kRows][column] = x[n];
  }
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

}  // namespace bittern::chunk_backward::exact
