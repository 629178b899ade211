#include "bittern/ops/dynamic_quantize.h"
#include "ops/quantize/dynamic.h"
#include "ops/quantize/group_sum.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = DynamicQuantize;
using cuda::kBlock;

// ---- parameters from a range ----

struct ParamStore {
  void* scale;
  std::int32_t* zero_point;  // null: symmetric
  std::int32_t q_min, q_max;

  // As stored_scale() on the host.
  template <class S>
  __device__ S scale_of(const FiniteRange<Math<S>>& range) const {
    const Math<S> s =
        zero_point == nullptr ? symmetric_step(range, q_max) : asymmetric_step(range, q_min, q_max);
    const S stored = cuda::store_math<S>(std::min(s, max_finite<S>()));
    return cuda::load_math(stored) > 0 ? stored : cuda::store_math<S>(1);
  }
  template <class M>
  __device__ std::int32_t zero_of(const FiniteRange<M>& range, M s) const {
    return zero_point == nullptr ? 0 : zero_point_for(range.lo, s, q_min, q_max);
  }
  template <class S>
  __device__ void store(std::int64_t p, S s, std::int32_t zero) const {
    static_cast<S*>(scale)[p] = s;
    if (zero_point != nullptr) zero_point[p] = zero;
  }
  template <class S>
  __device__ void store_for(std::int64_t p, const FiniteRange<Math<S>>& range) const {
    const S s = scale_of<S>(range);
    store(p, s, zero_of(range, cuda::load_math(s)));
  }
};

// ---- parameters of any extent: their ranges first, then a second pass ----

template <class X>
struct RangeBody {
  using Element = X;
  using F = Math<X>;

  cuda::Rows<const X> x;
  ParamStore to;
  bool f32_scale;

  __device__ cuda::Terms<F> exact(std::int64_t row, std::int64_t column, std::int64_t) const {
    FiniteRange<F> range;
    range.take(cuda::load_math(*x.at(row, column)));
    return {range.lo, range.hi};
  }
  __device__ static cuda::Terms<F> join(const cuda::Terms<F>& a, const cuda::Terms<F>& b) {
    return cuda::Terms<F>::widest(a, b);
  }
  __device__ void finish(std::int64_t p, const cuda::Terms<F>& widest) const {
    const FiniteRange<F> range{widest.first, widest.second};
    if constexpr (sizeof(X) == 2) {
      if (f32_scale) return to.store_for<float>(p, range);
    }
    to.store_for<X>(p, range);
  }
};

// ---- runs that a team of threads can hold: one pass ----

constexpr int kUnit = 16;  // consecutive elements, so that codes are stored 16 bytes at a time

// Thread l of kTeam has units l, l + kTeam, ... of its run. A team is part of a warp, or a block.
struct Team {
  std::int64_t runs;
  std::uint32_t units;  // of a run
  cuda::Divisor per_row;
};

template <int kTeam>
__device__ FiniteRange<float> joined(FiniteRange<float> range) {
  constexpr int kInWarp = kTeam < 32 ? kTeam : 32;
#pragma unroll
  for (int bit = kInWarp / 2; bit > 0; bit /= 2) {
    range.lo = fminf(range.lo, __shfl_xor_sync(~0u, range.lo, bit));
    range.hi = fmaxf(range.hi, __shfl_xor_sync(~0u, range.hi, bit));
  }
  if constexpr (kTeam > 32) {
    static_assert(kTeam == kBlock);
    __shared__ float lo[kBlock / 32], hi[kBlock / 32];
    __syncthreads();  // of an earlier call
    if (threadIdx.x % 32 == 0) {
      lo[threadIdx.x / 32] = range.lo;
      hi[threadIdx.x / 32] = range.hi;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBlock / 32; ++i) {
      range.lo = fminf(range.lo, lo[i]);
      range.hi = fmaxf(range.hi, hi[i]);
    }
  }
  return range;
}

// A team has kRuns runs, so that the elements of one are under way while another's are rounded.
template <class X, class S, int kTeam, int kUnits, int kRuns>
__global__ void __launch_bounds__(kBlock)
    quantize_runs(const cuda::QuantizeBody<X> body, const ParamStore to, const Team team) {
  using Unit = cuda::Pack<X, kUnit>;
  constexpr int kTeams = kBlock / kTeam;
  const std::uint32_t lane = threadIdx.x % kTeam;
  const auto unit = [&](int k) { return lane + kTeam * static_cast<unsigned>(k); };
  const auto slot = [&](int r) {
    return (std::int64_t{blockIdx.x} * kRuns + r) * kTeams + threadIdx.x / kTeam;
  };

  // Units and runs beyond the end repeat the first: every lane takes part in the shuffles.
  Unit x[kRuns][kUnits];
  std::int64_t row[kRuns], first[kRuns];
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    const std::int64_t run = slot(r) < team.runs ? slot(r) : 0;
    row[r] = team.per_row.divide(run);
    first[r] = (run - row[r] * team.per_row.value()) * team.units * kUnit;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const std::int64_t from = (unit(k) < team.units ? unit(k) : 0) * kUnit;
      x[r][k] = body.template load<kUnit>(row[r], first[r] + from);
    }
  }
  const bool symmetric = to.zero_point == nullptr;
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    // fminf and fmaxf pass over NaN. Infinities are rare: where one is seen, once more without
    // them.
    FiniteRange<float> range;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (symmetric) {  // max|x| is enough
#pragma unroll
        for (int i = 0; i < kUnit; ++i) range.hi = fmaxf(range.hi, fabsf(x[r][k].math(i)));
      } else {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
          range.lo = fminf(range.lo, x[r][k].math(i));
          range.hi = fmaxf(range.hi, x[r][k].math(i));
        }
      }
    }
    range = joined<kTeam>(range);
    if (__any_sync(~0u, isinf(range.lo) || isinf(range.hi))) {  // all of a team or none
      range = {};
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) range.take(x[r][k].math(i));
      }
      range = joined<kTeam>(range);
    }
    if (slot(r) >= team.runs) continue;  // of a whole team
    const S stored = to.scale_of<S>(range);
    const float s = cuda::load_math(stored);
    const std::int32_t zero = to.zero_of(range, s);
    if (lane == 0) to.store(slot(r), stored, zero);

    const cuda::OneParam<typename cuda::QuantizeBody<X>::template Param<S>> param{
        {s, zero, body.params}};
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (unit(k) >= team.units) break;
      const std::int64_t column = first[r] + unit(k) * kUnit;
      bool sure = param(0).usable;
      const auto codes = body.quick(param, x[r][k], sure);
      if (sure) [[likely]] {
        body.store(codes, row[r], column);
      } else {
#pragma unroll 1
        for (int i = 0; i < kUnit; ++i)
          *body.q.at(row[r], column + i) = cuda::exact_code(
              cuda::load_math(*body.x.at(row[r], column + i)), s, zero, body.params);
      }
    }
  }
}

template <class X, class S>
Status launch_runs(const cuda::QuantizeBody<X>& body, const ParamStore& to, const GroupGeometry& g,
                   int device, Stream stream) {
  const Team team{.runs = g.params,
                  .units = static_cast<std::uint32_t>(g.run / kUnit),
                  .per_row = cuda::Divisor(g.row_length / g.run)};
  const auto launch = [&](auto* kernel, int threads, int runs = 1) {
    return cuda::launch(Op::kName, kernel, cuda::grid_for((g.params + runs - 1) / runs * threads),
                        device, stream, body, to, team);
  };
  if (team.units <= 8) return launch(quantize_runs<X, S, 8, 1, 2>, 8, 2);
  if (team.units <= 32) return launch(quantize_runs<X, S, 32, 1, 1>, 32);
  if (team.units <= kBlock) return launch(quantize_runs<X, S, kBlock, 1, 1>, kBlock);
  if (team.units <= 2 * kBlock) return launch(quantize_runs<X, S, kBlock, 2, 1>, kBlock);
  return launch(quantize_runs<X, S, kBlock, 4, 1>, kBlock);
}

template <class X>
Status run_typed(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace workspace) {
  const int device = a.q.device.index;
  auto* const zero_point = d.symmetric ? nullptr : a.zero_point.as<std::int32_t>();
  const ParamStore to{a.scale.data, zero_point, d.q_min, d.q_max};
  const cuda::QuantizeBody<X> body{
      cuda::Params(d, a.scale, d.symmetric ? ConstView() : ConstView(a.zero_point)),
      cuda::Rows<const X>(a.x), cuda::Rows<std::uint8_t>(a.q)};
  const GroupGeometry g = d.geometry();
  if constexpr (sizeof(X) < 8) {
    if (g.param_step != 0 && g.row_length != 0 && g.run % kUnit == 0 &&
        g.run <= 4 * kBlock * kUnit && cuda::aligned_rows<kUnit>(body, g)) {
      return d.f32_scale ? launch_runs<X, float>(body, to, g, device, stream)
                         : launch_runs<X, X>(body, to, g, device, stream);
    }
  }
  BITTERN_TRY(cuda::run_reduction(Op::kName, g,
                                  RangeBody<X>{cuda::Rows<const X>(a.x), to, d.f32_scale}, device,
                                  stream, workspace));
  return cuda::run_elements(Op::kName, d, body, device, stream);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace workspace) {
  return visit_float(d.element,
                     [&]<class X>(Type<X>) { return run_typed<X>(d, a, stream, workspace); });
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run, cuda::reduction_workspace)};

}  // namespace

std::span<const Kernel<Op>> dynamic_quantize_cuda() { return kKernels; }

}  // namespace bittern
