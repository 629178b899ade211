#include "bittern/ops/fake_quantize_per_group.h"
#include "ops/quantize/quantize.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = FakeQuantizePerGroup;

template <class X>
struct Body {
  using Element = X;
  template <class S>
  using Param = cuda::Quick<cuda::kHalves<X, S>>;
  static constexpr int kWide = cuda::kPack<X>;

  cuda::Params params;
  cuda::Rows<const X> x;
  cuda::Rows<X> y;

  template <class F>
  void each_operand(F&& f) const {
    f(x);
    f(y);
  }
  template <int N>
  __device__ auto load(std::int64_t row, std::int64_t column) const {
    return cuda::Pack<X, N>::load(x.at(row, column));
  }
  template <class P, int N>
  __device__ cuda::Pack<X, N> quick(const P& p, const cuda::Pack<X, N>& from, bool& sure) const {
    float to[N];
    cuda::Watch watch;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float v = from.math(i);
      watch.take(v);
      to[i] = (p(i).clamped(v) - cuda::kToInteger) * p(i).scale;
    }
    sure &= watch.ordinary();
    return cuda::rounded<X>(to);
  }
  template <int N>
  __device__ void store(const cuda::Pack<X, N>& to, std::int64_t row, std::int64_t column) const {
    to.store(y.at(row, column));
  }
  __device__ void exact(std::int64_t row, std::int64_t column, std::int64_t p) const {
    const Math<X> s = params.scale_for<X>(p);
    const std::int32_t zero = params.zero(p);
    const std::int32_t code = quantize_code(quotient(cuda::load_math(*x.at(row, column)), s), zero,
                                            params.q_min, params.q_max);
    *y.at(row, column) = cuda::store_math<X>(scaled(std::int64_t{code} - zero, s));
  }
};

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    const Body<X> body{cuda::Params(d, a.scale, a.zero_point), cuda::Rows<const X>(a.x),
                       cuda::Rows<X>(a.y)};
    return cuda::run_elements(Op::kName, d, body, a.y.device.index, stream);
  });
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<Op>> fake_quantize_per_group_cuda() { return kKernels; }

}  // namespace bittern
