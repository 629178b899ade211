// lsq of groups of 32, 64 and 128. A team of kLanes lanes has a group in registers, kEach weights a
// lane: value j of row i of lane t is element (i kLanes + t) V + j, V the weights of 16 bytes, so
// that the halving tree adds rows, then lanes, then the values of a lane. Few lanes with many
// weights each: what a group takes once, the fit and the steps across lanes, is then a small part.
//
// Groups need 1 to 20 fits, 3.4 on average. A warp therefore takes a run of groups, and its teams
// go on to new ones: not each at once, for loading and storing cost the whole warp, but when half
// of them are done.
#pragma once
#include <bit>

#include "ops/qdq_affine_init/affine_device.cuh"

namespace bittern::affine {

// leaf(0) + ... + leaf(kCount - 1) by the halving tree, few leaves at a time.
template <int kCount, int kStep = 1, class Leaf>
__device__ __forceinline__ auto row_sums(const Leaf& leaf, int first = 0) {
  if constexpr (kCount == 1) {
    return leaf(first);
  } else {
    const auto even = row_sums<kCount / 2, 2 * kStep>(leaf, first);
    return even + row_sums<kCount / 2, 2 * kStep>(leaf, first + kStep);
  }
}

// The same, one leaf at a time: for what hardly ever happens, to keep kernels short. Bit-reversed
// order makes neighbours of those to be added first; a binary counter holds the rest.
template <int kCount, class Sum, class Leaf>
__device__ Sum rare_row_sums(const Leaf& leaf) {
  constexpr int kLog2 = std::bit_width(unsigned{kCount}) - 1;
  Sum sum, partial[kLog2 + 1];
#pragma unroll 1
  for (unsigned i = 0; i < kCount; ++i) {
    sum = leaf(static_cast<int>(kLog2 == 0 ? 0 : __brev(i) >> (32 - kLog2) % 32));
#pragma unroll
    for (int level = 0; level <= kLog2; ++level) {
      if ((i >> level & 1) == 0) {
        partial[level] = sum;
        break;
      }
      sum = partial[level] + sum;
    }
  }
  return sum;
}

template <class X, int kLanes, int kEach, bool kWeighted>
class LsqTeam {
 public:
  static constexpr int V = 16 / sizeof(X), kRows = kEach / V, kSize = kLanes * kEach;

  __device__ explicit LsqTeam(const Problem& p)
      : p_(p),
        t_(static_cast<int>(threadIdx.x % kLanes)),
        mask_(((1u << kLanes) - 1) << threadIdx.x % 32 / kLanes * kLanes) {
    each([&](int i, int j) { u_[i][j] = 0; });
  }

  __device__ bool active() const { return active_; }
  __device__ bool done() const { return done_; }
  __device__ int lanes_before() const { return __popc(mask_ - 1 & ~mask_); }

  // ---- the steps, which whole warps take together ----

  // Teams without a group get the given one, if it exists.
  __device__ void load(std::int64_t group, bool exists) {
    const bool mine = !active_;
    if (mine) {
      active_ = exists;
      done_ = !exists;
      fits_ = 0;
      sure_ = false;
      group_ = exists ? group : 0;
    }
    if (mine && exists) {
      const X* from = weights();
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const auto v = cuda::Pack<X, V>::load(from + i * kLanes * V);
#pragma unroll
        for (int j = 0; j < V; ++j) u_[i][j] = cuda::load_math(v.at[j]);
      }
    }
    Range<float> range{u_[0][0], u_[0][0]};
    each([&](int i, int j) {
      range.min = fminf(range.min, u_[i][j]);
      range.max = fmaxf(range.max, u_[i][j]);
    });
    range = team_range<kLanes>(range);
    Params<float> start;
    bool usual = usual_minmax(range, p_, start), halved = false;
    if (__any_sync(cuda::kWarp, mine && !usual)) {
      Range<float> numbers;
      each([&](int i, int j) { extend(numbers, u_[i][j]); });
      const bool finite = std::isfinite(range.max - range.min);
      range = team_range<kLanes>(numbers);
      halved = range.overflows();
      start = minmax_params(range, p_.bins, largest_stored<float>(p_.scale_element),
                            Stored{p_.scale_element});
      usual = finite && !halved;
    }
    if (mine) {
      start_ = now_ = start;
      halved_ = halved;
      done_ |= !usual;  // with a weight that is not finite, or a range that is not: minmax
      each([&](int i, int j) { u_[i][j] -= start.b; });
    }
    const auto fixed = team_sums(row_sums<kRows>([&](int i) {
      Fixed terms;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        terms.at[j] = kWeighted ? importance(i, j) * u_[i][j] : u_[i][j];
        if constexpr (kWeighted) terms.at[V + j] = importance(i, j);
      }
      return terms;
    }));
    sum_cu_ = fixed.at[0];
    sum_c_ = kWeighted ? fixed.at[kWeighted] : kSize;
    Terms terms;
    if (mine) terms = quantize(start_, codes_);
    const Totals totals = total(terms);
    if (mine) totals_ = totals;
  }

  // Fits s and b to the codes, and codes to those. Where no code changes, neither would the next s
  // and b.
  __device__ void round() {
    const Params<float> next = fit(sum_c_, totals_.cq, totals_.cqq, sum_cu_, totals_.cqu, start_.b,
                                   Stored{p_.scale_element});
    const bool moves = next.s > 0 && (next.s != now_.s || next.b != now_.b);
    if (fits_ == kMostFits || !moves) done_ = true;
    if (!done_) {
      if (fits_ == 0) sure_ = surely_gains(next);
      ++fits_;
      now_ = next;
    }
    std::uint32_t codes[kEach / 4];
    totals_ = total(quantize(now_, codes));
    bool changes = false;
#pragma unroll
    for (int i = 0; i < kEach / 4; ++i) {
      changes |= codes[i] != codes_[i];
      codes_[i] = codes[i];
    }
    if ((__ballot_sync(cuda::kWarp, changes) & mask_) == 0) done_ = true;
  }

  // Writes the groups that are done. `staged` has room for the codes of a warp.
  __device__ void finish(std::uint32_t* staged) {
    const bool ready = active_ && done_;
    bool kept = sure_;
    if (__any_sync(cuda::kWarp, ready && fits_ > 0 && !sure_)) {
      std::uint32_t first[kEach / 4];
      quantize(start_, first);
      // f32 sums of squares are within 2^-17 of the exact ones where nothing underflows.
      const float before = error<float>(start_, first), after = error<float>(now_, codes_);
      const bool in_range = before > 0x1p-60f && before < 0x1p100f;
      const bool better = after < before * (1 - 0x1p-14f);
      const bool clear = in_range && (better || after > before * (1 + 0x1p-14f));
      bool gain = better;
      if (__any_sync(cuda::kWarp, ready && fits_ > 0 && !sure_ && !clear)) {
        const bool exact = gains(error<double>(start_, first), error<double>(now_, codes_));
        if (!clear) gain = exact;
      }
      kept = sure_ || (gain && fits_ > 0);
      if (ready && !kept) {
#pragma unroll
        for (int i = 0; i < kEach / 4; ++i) codes_[i] = first[i];
      }
    }
    const Params<float> found = kept ? now_ : start_;  // without a fit they are the same

    const std::int64_t row = p_.one_row ? 0 : p_.row_groups.divide(group_);
    const std::int64_t in_row = group_ - row * p_.row_groups.value();
    if (ready && t_ < 2)
      store_param(t_ == 0 ? p_.scales : p_.biases, p_.scale_element, group_,
                  t_ == 0 ? found.s : found.b);
    // Through shared memory to 16 neighbouring codes a lane.
    std::uint32_t* team = staged + threadIdx.x % 32 / kLanes * (kSize / 4);
#pragma unroll
    for (int i = 0; i < kEach / 4; ++i)
      team[(i / (V / 4) * kLanes + t_) * (V / 4) + i % (V / 4)] = codes_[i];
    __syncwarp();
    auto* codes = static_cast<std::uint8_t*>(p_.q) + row * p_.q_stride * (p_.packed ? 4 : 1);
#pragma unroll
    for (int i = 0; i < kEach / 16; ++i) {
      const int chunk = i * kLanes + t_;
      std::uint32_t bytes[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) bytes[k] = team[4 * chunk + k];
      write_codes(p_, codes, in_row * (kSize / 16) + chunk, bytes, ready);
    }
    __syncwarp();
    if (ready) active_ = false;
  }

 private:
  using Fixed = cuda::Sums<float, kWeighted ? 2 * V : V>;
  // A lane's share of the sums over c q, c q q and c q u. Without importance the first two are
  // integers, exact in any order.
  struct Terms {
    cuda::Sums<float, kWeighted ? 3 * V : V> tree;
    std::uint32_t q = 0, qq = 0;
  };
  struct Totals {
    float cq, cqq, cqu;
  };

  template <class F>
  __device__ static void each(const F& f) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < V; ++j) f(i, j);
    }
  }

  // The weights of the group from this lane's first on, and their importance.
  __device__ const X* weights() const {
    const std::int64_t row = p_.one_row ? 0 : p_.row_groups.divide(group_);
    const std::int64_t in_row = group_ - row * p_.row_groups.value();
    return static_cast<const X*>(p_.w) + row * p_.w_stride + in_row * kSize + t_ * V;
  }
  __device__ float importance(int i, int j) const {
    const std::int64_t in_row = group_ - p_.row_groups.divide(group_) * p_.row_groups.value();
    const float c = p_.importance[in_row * kSize + (i * kLanes + t_) * V + j];
    return c > 0 && std::isfinite(c) ? c : 0.0f;
  }

  // Each V values of a lane summed over the lanes of the team, then among themselves.
  template <class F, int N>
  __device__ cuda::Sums<F, N / V> team_sums(const cuda::Sums<F, N>& lane) const {
    cuda::Sums<F, N / V> sums;
#pragma unroll
    for (int k = 0; k < N / V; ++k) {
      F v[V];
#pragma unroll
      for (int j = 0; j < V; ++j) v[j] = lane.at[k * V + j];
      sums.at[k] = cuda::team_tree<kLanes / 2>(v, t_);
    }
    return sums;
  }

  __device__ Totals total(const Terms& terms) const {
    const auto sums = team_sums(terms.tree);
    if constexpr (kWeighted) {
      return {sums.at[0], sums.at[1], sums.at[2]};
    } else {
      static_assert(kSize * 255 * 255 < 1 << 24);
      // One half of the team adds up q, the other q q.
      const bool upper = (t_ & kLanes / 2) != 0;
      std::uint32_t mine = upper ? terms.qq : terms.q;
      mine += __shfl_xor_sync(cuda::kWarp, upper ? terms.q : terms.qq, kLanes / 2);
#pragma unroll
      for (int distance = kLanes / 4; distance > 0; distance /= 2)
        mine += __shfl_xor_sync(cuda::kWarp, mine, distance);
      const std::uint32_t other = __shfl_xor_sync(cuda::kWarp, mine, kLanes / 2);
      const float own = cuda::small_integer<float>(mine), its = cuda::small_integer<float>(other);
      return {upper ? its : own, upper ? own : its, sums.at[0]};
    }
  }

  // The terms of u and codes q of row i.
  __device__ void add_terms(int i, const float (&u)[V], const float (&q)[V],
                            decltype(Terms::tree)& terms) const {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if constexpr (kWeighted) {
        terms.at[j] = importance(i, j) * q[j];
        terms.at[V + j] = terms.at[j] * q[j];
        terms.at[2 * V + j] = terms.at[j] * u[j];
      } else {
        terms.at[j] = q[j] * u[j];
      }
    }
  }
  __device__ static void add_integers(std::uint32_t codes, Terms& terms) {
    terms.q = __dp4a(codes, 0x01010101u, terms.q);
    terms.qq = __dp4a(codes, codes, terms.qq);
  }

  // Codes of s and b, as minmax_code gives them, and their terms.
  __device__ Terms quantize(Params<float> by, std::uint32_t (&codes)[kEach / 4]) const {
    NearCodes near(by, p_.n, start_.b - by.b);
    Terms terms;
    terms.tree = row_sums<kRows>([&](int i) {
      decltype(terms.tree) row;
      float q[V];
      std::uint32_t bits[V];
#pragma unroll
      for (int j = 0; j < V; ++j) {
        bits[j] = near.code(u_[i][j]);
        q[j] = __uint_as_float(bits[j]) - 0x1p23f;
      }
#pragma unroll
      for (int j = 0; j < V; j += 4) {
        codes[(i * V + j) / 4] = four_bytes(bits[j], bits[j + 1], bits[j + 2], bits[j + 3]);
        add_integers(codes[(i * V + j) / 4], terms);
      }
      add_terms(i, u_[i], q, row);
      return row;
    });
    if (near.certain() && !halved_) return terms;
    return by_definition(by, codes);
  }

  // The same where a code is near a tie, or the group is an odd one.
  __device__ Terms by_definition(Params<float> by, std::uint32_t (&codes)[kEach / 4]) const {
    const X* w = weights();
    std::uint32_t spare[kEach / 4];
#pragma unroll 1
    for (int i = 0; i < kEach; i += 4) {
      std::uint32_t word = 0;
#pragma unroll 1
      for (int j = 0; j < 4; ++j) {
        const float x = cuda::load_math(w[i / V * kLanes * V + i % V + j]);
        word |= std::uint32_t{minmax_code(x, by, p_.bins, halved_)} << 8 * j;
      }
      spare[i / 4] = word;
    }
    float u[kRows][V];
    each([&](int i, int j) { u[i][j] = u_[i][j]; });
    Terms terms;
    terms.tree = rare_row_sums<kRows, decltype(terms.tree)>([&](int i) {
      decltype(terms.tree) row;
      float q[V];
#pragma unroll
      for (int j = 0; j < V; ++j) q[j] = code_at(spare, i, j);
      add_terms(i, u[i], q, row);
      return row;
    });
#pragma unroll
    for (int i = 0; i < kEach / 4; ++i) {
      codes[i] = spare[i];
      add_integers(codes[i], terms);
    }
    return terms;
  }

  __device__ static float code_at(const std::uint32_t (&codes)[kEach / 4], int i, int j) {
    return cuda::small_integer<float>(codes[(i * V + j) / 4] >> j % 4 * 8 & 0xffu);
  }

  // Is the first fit's gain alone enough? Codes fixed, the error falls by (ds, db) M (ds, db) with
  // M = (QQ Q; Q C), and it was at most size s^2 / 4. Later steps only lower it, but for roundings:
  // of s and b, which count twice over at the minimum, and of codes within n 2^-21 of a tie. Both
  // are far below the threshold as long as b is not large beside s, and s and b are stored as f32.
  __device__ bool surely_gains(Params<float> next) const {
    if (kWeighted || p_.scale_element != DType::f32) return false;
    const float ds = start_.s - next.s, db = start_.b - next.b, unit = start_.s;
    const float squares = totals_.cqq * ds * ds + kSize * db * db;
    const float gain = squares + 2 * totals_.cq * ds * db;
    return unit > 0x1p-50f && unit < 0x1p50f && fabsf(start_.b) < 0x1p12f * unit &&
           gain > 0x1p-10f * squares && gain > kSize * unit * unit * (0x1p-14f + p_.n * 0x1p-20f);
  }

  // sum c (w - fma(q, s, b))^2
  template <class F>
  __device__ F error(Params<float> by, const std::uint32_t (&codes)[kEach / 4]) const {
    const X* w = weights();
    std::uint32_t spare[kEach / 4];
#pragma unroll
    for (int i = 0; i < kEach / 4; ++i) spare[i] = codes[i];
    return team_sums(rare_row_sums<kRows, cuda::Sums<F, V>>([&](int i) {
             cuda::Sums<F, V> row;
#pragma unroll
             for (int j = 0; j < V; ++j) {
               const float x = cuda::load_math(w[i * kLanes * V + j]);
               const F d = x - fmaf(code_at(spare, i, j), by.s, by.b);
               if constexpr (!kWeighted) {
                 row.at[j] = d * d;
               } else if constexpr (sizeof(F) == 8) {
                 row.at[j] = static_cast<F>(importance(i, j)) * (d * d);
               } else {
                 row.at[j] = importance(i, j) * d * d;  // so ordered, it underflows only with d
               }
             }
             return row;
           }))
        .at[0];
  }

  const Problem& p_;
  int t_;
  unsigned mask_;      // the team's lanes
  float u_[kRows][V];  // w - start.b
  std::uint32_t codes_[kEach / 4] = {};
  Params<float> start_, now_;
  Totals totals_{};
  float sum_c_ = 0, sum_cu_ = 0;
  int fits_ = 0;
  bool active_ = false, done_ = true, sure_ = false, halved_ = false;
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
  LsqTeam<X, kLanes, kEach, kWeighted> team(p);
  const unsigned below = (1u << team.lanes_before()) - 1;
  for (;;) {
    const unsigned live = __ballot_sync(cuda::kWarp, team.active());
    const unsigned ready = __ballot_sync(cuda::kWarp, team.active() && team.done());
    if (2 * __popc(ready) >= __popc(live)) {
      if (ready != 0) team.finish(codes);
      const unsigned idle = __ballot_sync(cuda::kWarp, !team.active());
      const std::int64_t group = next + __popc(idle & below) / kLanes;
      next += __popc(idle) / kLanes;
      team.load(group, group < end);
      if (__ballot_sync(cuda::kWarp, team.active()) == 0) return;
    }
    team.round();
  }
}

}  // namespace bittern::affine
