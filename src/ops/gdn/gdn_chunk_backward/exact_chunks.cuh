// The gradients of every chunk and head, of what the chains left: d_v, d_beta, dg, dq and dk.
#pragma once
#include "ops/gdn/gdn_chunk_backward/exact_device.cuh"

namespace bittern::chunk_backward::exact {

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
using LaneSums = float[kTile];

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
    LaneSums pairs;  // DL[i] . (k k^T)[i]
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
  __device__ void make_pairs(LaneSums& pairs) const {
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
      for (int i = c_.rows - 1; i > thread(); --i) {
        sum += w[i][thread()];
        w[i][thread()] = sum;
      }
    }
    __syncthreads();
    LaneSums below = {};
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
    LaneSums k_m = {}, q_n = {}, k_z = {};
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
  __device__ void make_values(const LaneSums& pairs) const {
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

  __device__ void put(float (&to)[kMostRows], const LaneSums& sums) const {
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

}  // namespace bittern::chunk_backward::exact
