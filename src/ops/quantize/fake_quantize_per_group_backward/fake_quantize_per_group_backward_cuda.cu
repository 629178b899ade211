#include "bittern/ops/fake_quantize_per_group_backward.h"
#include "ops/quantize/group_sum.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = FakeQuantizePerGroupBackward;

template <class X>
struct Body {
  using Element = X;
  using F = Math<X>;
  template <class S>
  using Param = cuda::Quick<cuda::kHalves<X, S>>;
  template <int N>
  struct Loaded {
    cuda::Pack<X, N> d_y, x;
  };

  cuda::Params params;
  cuda::Rows<const X> d_y, x;
  cuda::Rows<X> d_x;
  void *d_scale, *d_zero_point;

  template <class Visitor>
  void each_operand(Visitor&& f) const {
    f(d_y);
    f(x);
    f(d_x);
  }
  template <int N>
  __device__ Loaded<N> load(std::int64_t row, std::int64_t column) const {
    return {cuda::Pack<X, N>::load(d_y.at(row, column)), cuda::Pack<X, N>::load(x.at(row, column))};
  }
  template <class P, int N>
  __device__ cuda::Pack<X, N> quick(const P& p, const Loaded<N>& from, float (&to_scale)[N],
                                    float (&to_zero_point)[N], bool& sure) const {
    float to[N];
    cuda::Watch watch;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float v = from.x.math(i), g = from.d_y.math(i);
      watch.template take_exactly<X>(v);
      const float z = p.quotient(v), r = (z + cuda::kToInteger) - cuda::kToInteger;
      const float clamped = fminf(fmaxf(r, p.lo), p.hi);
      const bool inside = clamped == r;
      to_scale[i] = g * (inside ? r - z : clamped);
      to_zero_point[i] = inside ? 0.0f : -(p.scale * g);
      to[i] = inside ? g : 0.0f;
    }
    sure &= watch.ordinary();
    return cuda::rounded<X>(to);
  }
  template <int N>
  __device__ void store(const cuda::Pack<X, N>& to, std::int64_t row, std::int64_t column) const {
    if (d_x.data != nullptr) to.store(d_x.at(row, column));
  }
  __device__ cuda::Terms<F> exact(std::int64_t row, std::int64_t column, std::int64_t p) const {
    const F s = params.scale_for<X>(p), z = quotient(cuda::load_math(*x.at(row, column)), s);
    const std::int32_t zero = params.zero(p);
    const X g = *d_y.at(row, column);
    const F v = cuda::load_math(g);
    const bool inside = in_range(unclamped_code(z, zero), params.q_min, params.q_max);
    const std::int64_t q = quantize_code(z, zero, params.q_min, params.q_max);
    if (d_x.data != nullptr) *d_x.at(row, column) = inside ? g : cuda::store_math<X>(F(0));
    return {inside ? v * (std::nearbyint(z) - z) : scaled(q - zero, v), inside ? F(0) : -(s * v)};
  }
  __device__ static cuda::Terms<F> join(const cuda::Terms<F>& a, const cuda::Terms<F>& b) {
    return cuda::Terms<F>::sum(a, b);
  }
  __device__ void finish(std::int64_t p, const cuda::Terms<F>& sums) const {
    params.store_for<X>(d_scale, p, sums.first);
    params.store_for<X>(d_zero_point, p, sums.second);
  }
};

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    const Body<X> body{cuda::Params(d, a.scale, a.zero_point),
                       cuda::Rows<const X>(a.d_y),
                       cuda::Rows<const X>(a.x),
                       cuda::Rows<X>(a.d_x),
                       a.d_scale.data,
                       a.d_zero_point.data};
    return cuda::run_sums(Op::kName, d, body, a.d_y.device.index, stream, workspace);
  });
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run, cuda::reduction_workspace)};

}  // namespace

std::span<const Kernel<Op>> fake_quantize_per_group_backward_cuda() { return kKernels; }

}  // namespace bittern
