// lsq of groups of 32, 64 and 128. A team of kLanes lanes has a group in registers, kEach weights a
// lane: value j of row i of lane t is element (i kLanes + t) V + j, V the weights of 16 bytes, so
// that the halving tree adds rows, then lanes, then the values of a lane.
//
// Groups need 1 to 20 fits, 3.4 on average. A warp therefore takes a run of groups, and its teams
// go on to new ones: not each at once, for loading and storing cost the whole warp two rounds'
// time, but when half of them are done.
#pragma once
#include "ops/qdq_affine_init/affine_device.cuh"

namespace bittern::affine {

template <class X, int kLanes, int kEach, bool kWeighted>
class LsqTeam {
 public:
  static constexpr int V = 16 / sizeof(X), kRows = kEach / V, kSize = kLanes * kEach;
  using Values = float[kRows][V];

  __device__ explicit LsqTeam(const Problem& p)
      : p_(p), t_(static_cast<int>(threadIdx.x % kLanes)), n_(p.n), stored_{p.scale_element} {
    each([&](int i, int j) { w_[i][j] = u_[i][j] = q_[i][j] = 0; });
  }

  __device__ bool active() const { return active_; }
  __device__ bool done() const { return done_; }

  // ---- the steps, which whole warps take together ----

  // The teams that have none get the next group, if there is one.
  __device__ void load(std::int64_t group, bool exists, bool mine) {
    if (mine) {
      active_ = exists;
      done_ = !exists;
      fits_ = 0;
      group_ = group;
    }
    if (mine && exists) read();
    Range<float> range{w_[0][0], w_[0][0]};
    each([&](int i, int j) {
      range.min = fminf(range.min, w_[i][j]);
      range.max = fmaxf(range.max, w_[i][j]);
    });
    range = team_range<kLanes>(range);
    // A range that is not finite may be one of infinite weights, of none, or overflow.
    const bool finite = std::isfinite(range.max - range.min);
    if (__any_sync(cuda::kWarp, !finite)) {
      Range<float> numbers;
      each([&](int i, int j) { extend(numbers, w_[i][j]); });
      range = team_range<kLanes>(numbers);
    }
    halved_ = range.overflows();
    bool no_nan = true;
    each([&](int i, int j) { no_nan &= w_[i][j] == w_[i][j]; });
    const unsigned team = ((1ull << kLanes) - 1) << threadIdx.x % 32 / kLanes * kLanes;
    refines_ = (__ballot_sync(cuda::kWarp, finite && no_nan) & team) == team;
    start_ = minmax_params(range, p_.bins, largest_stored<float>(p_.scale_element), stored_);
    // Teams at work find again what they had.
    each([&](int i, int j) { u_[i][j] = w_[i][j] - start_.b; });
    if constexpr (kWeighted) {
      Values c, cu;
      each([&](int i, int j) {
        c[i][j] = c_[i][j];
        cu[i][j] = c_[i][j] * u_[i][j];
      });
      sum_c_ = tree(c);
      sum_cu_ = tree(cu);
    } else {
      Values u;
      each([&](int i, int j) { u[i][j] = u_[i][j]; });
      sum_c_ = kSize;
      sum_cu_ = tree(u);
    }
    if (mine) {
      now_ = start_;
      done_ |= !refines_;
      quantize(start_);
    }
    const float error = quick_error(start_);
    if (mine) start_error_ = error;
  }

  // Fits s and b to the codes, and codes to those.
  __device__ void round() {
    double cq, cqq, cqu;
    if constexpr (kWeighted) {
      Values a, b, c;
      each([&](int i, int j) {
        a[i][j] = c_[i][j] * q_[i][j];
        b[i][j] = a[i][j] * q_[i][j];
        c[i][j] = a[i][j] * u_[i][j];
      });
      cq = tree(a);
      cqq = tree(b);
      cqu = tree(c);
    } else {
      // Sums of integers below 2^24 are exact in any order; one half of the team adds up q, the
      // other q q.
      static_assert(kSize * 255 * 255 < 1 << 24);
      Values qu;
      float q = 0, qq = 0;
      each([&](int i, int j) {
        q += q_[i][j];
        qq = fmaf(q_[i][j], q_[i][j], qq);
        qu[i][j] = q_[i][j] * u_[i][j];
      });
      const bool upper = (t_ & kLanes / 2) != 0;
      float mine = upper ? qq : q;
      mine += __shfl_xor_sync(cuda::kWarp, upper ? q : qq, kLanes / 2);
#pragma unroll
      for (int distance = kLanes / 4; distance > 0; distance /= 2)
        mine += __shfl_xor_sync(cuda::kWarp, mine, distance);
      const float other = __shfl_xor_sync(cuda::kWarp, mine, kLanes / 2);
      cq = upper ? other : mine;
      cqq = upper ? mine : other;
      cqu = tree(qu);
    }
    const Params<float> next = fit(sum_c_, cq, cqq, sum_cu_, cqu, start_.b, stored_);
    const bool moves = next.s > 0 && (next.s != now_.s || next.b != now_.b);
    if (done_ || fits_ == kMostFits || !moves) {
      done_ = true;
    } else {
      ++fits_;
      now_ = next;
    }
    quantize(now_);
  }

  // Writes the groups that are done. `staged` has room for the codes of a warp.
  __device__ void finish(std::uint32_t* staged) {
    const bool ready = active_ && done_;
    const float error = quick_error(now_);
    // The sums of squares are within 2^-17 of the exact ones where nothing underflows.
    const bool in_range = start_error_ > 0x1p-60f && start_error_ < 0x1p100f;
    const bool better = error < start_error_ * (1 - 0x1p-14f);
    const bool clear = in_range && (better || error > start_error_ * (1 + 0x1p-14f));
    bool kept = better;
    if (__any_sync(cuda::kWarp, ready && fits_ > 0 && !clear)) {
      const double after = exact_error(now_);
      quantize(start_);
      const double before = exact_error(start_);
      quantize(now_);
      if (!clear) kept = gains(before, after);
    }
    kept = kept && fits_ > 0;
    const Params<float> found = kept ? now_ : start_;
    if (ready && !kept) quantize(start_);  // the others are still at work

    const std::int64_t row = p_.one_row ? 0 : p_.row_groups.divide(group_);
    const std::int64_t in_row = group_ - row * p_.row_groups.value();
    if (ready && t_ == 0) store_param(p_.scales, p_.scale_element, group_, found.s);
    if (ready && t_ == 1) store_param(p_.biases, p_.scale_element, group_, found.b);
    // Through shared memory to 16 neighbouring codes a lane.
    static_assert(kEach == 16);
    std::uint32_t* team = staged + threadIdx.x % 32 / kLanes * (kSize / 4);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < V; j += 4) {
        const auto byte = [&](int k) { return __float_as_uint(q_[i][j + k] + 0x1p23f); };
        team[((i * kLanes + t_) * V + j) / 4] = four_bytes(byte(0), byte(1), byte(2), byte(3));
      }
    }
    __syncwarp();
    auto* codes = static_cast<std::uint8_t*>(p_.q) + row * p_.q_stride * (p_.packed ? 4 : 1);
    const std::uint32_t bytes[4] = {team[4 * t_], team[4 * t_ + 1], team[4 * t_ + 2],
                                    team[4 * t_ + 3]};
    write_codes(p_, codes, in_row * kLanes + t_, bytes, ready);
    __syncwarp();
    if (ready) active_ = false;
  }

 private:
  template <class F>
  __device__ static void each(const F& f) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < V; ++j) f(i, j);
    }
  }

  template <class F>
  __device__ F tree(F (&v)[kRows][V]) const {
    cuda::row_tree(v);
    return cuda::team_tree<kLanes / 2>(v[0], t_);
  }

  __device__ void read() {
    const std::int64_t row = p_.one_row ? 0 : p_.row_groups.divide(group_);
    const std::int64_t in_row = group_ - row * p_.row_groups.value();
    const X* from = static_cast<const X*>(p_.w) + row * p_.w_stride + in_row * kSize + t_ * V;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const auto v = cuda::Pack<X, V>::load(from + i * kLanes * V);
#pragma unroll
      for (int j = 0; j < V; ++j) w_[i][j] = cuda::load_math(v.at[j]);
    }
    if constexpr (kWeighted) {
      const std::int64_t column = p_.row_groups.divide(group_) * p_.row_groups.value();
      const float* c = p_.importance + (group_ - column) * kSize + t_ * V;
      each([&](int i, int j) {
        const float x = c[i * kLanes * V + j];
        c_[i][j] = x > 0 && std::isfinite(x) ? x : 0.0f;
      });
    }
  }

  // The codes of s and b, as minmax_code gives them.
  __device__ void quantize(Params<float> by) {
    NearCodes near(by, n_, start_.b - by.b);
    each([&](int i, int j) { q_[i][j] = near.value(u_[i][j]); });
    if (refines_ && near.certain()) return;
    float codes[kEach];
    each([&](int i, int j) { codes[i * V + j] = w_[i][j]; });
    rarely(codes, [&](float w) -> float { return minmax_code(w, by, p_.bins, halved_); });
    each([&](int i, int j) { q_[i][j] = codes[i * V + j]; });
  }

  // sum c (w - fma(q, s, b))^2, nearly.
  __device__ float quick_error(Params<float> by) const {
    float sum = 0;
    each([&](int i, int j) {
      const float d = w_[i][j] - fmaf(q_[i][j], by.s, by.b);
      if constexpr (kWeighted) {
        sum = fmaf(c_[i][j] * d, d, sum);
      } else {
        sum = fmaf(d, d, sum);
      }
    });
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2)
      sum += __shfl_xor_sync(cuda::kWarp, sum, distance);
    return sum;
  }
  __device__ double exact_error(Params<float> by) const {
    double terms[kRows][V];
    each([&](int i, int j) {
      const double d = w_[i][j] - fmaf(q_[i][j], by.s, by.b);
      terms[i][j] = d * d;
      if constexpr (kWeighted) terms[i][j] = static_cast<double>(c_[i][j]) * terms[i][j];
    });
    return tree(terms);
  }

  const Problem& p_;
  int t_;
  float n_;
  Stored stored_;
  Values w_, u_, q_;
  float c_[kWeighted ? kRows : 1][V];
  Params<float> start_, now_;
  double sum_c_ = 0, sum_cu_ = 0;
  float start_error_ = 0;
  int fits_ = 0;
  bool active_ = false, done_ = true, refines_ = false, halved_ = false;
  std::int64_t group_ = 0;
};

constexpr int kLsqBlock = 128;

// Each warp fits `run` groups.
template <class X, int kLanes, int kEach, bool kWeighted>
__global__ void __launch_bounds__(kLsqBlock) lsq_teams(const Problem p, int run) {
  __shared__ std::uint32_t staged[kLsqBlock * kEach / 4];
  std::uint32_t* codes = staged + threadIdx.x / 32 * (32 * kEach / 4);
  const std::int64_t warp = (std::int64_t{blockIdx.x} * kLsqBlock + threadIdx.x) / 32;
  const std::int64_t end = (warp + 1) * run < p.groups ? (warp + 1) * run : p.groups;
  std::int64_t next = warp * run;
  if (next >= end) return;
  const unsigned below = (1u << threadIdx.x % 32 / kLanes * kLanes) - 1;  // lanes of earlier teams
  LsqTeam<X, kLanes, kEach, kWeighted> team(p);
  for (;;) {
    const unsigned live = __ballot_sync(cuda::kWarp, team.active());
    const unsigned ready = __ballot_sync(cuda::kWarp, team.active() && team.done());
    if (2 * __popc(ready) >= __popc(live)) {
      if (ready != 0) team.finish(codes);
      const unsigned idle = __ballot_sync(cuda::kWarp, !team.active());
      const std::int64_t group = next + __popc(idle & below) / kLanes;
      next += __popc(idle) / kLanes;
      team.load(group, group < end, !team.active());
      if (__ballot_sync(cuda::kWarp, team.active()) == 0) return;
    }
    team.round();
  }
}

}  // namespace bittern::affine
