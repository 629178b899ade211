#include "bittern/ops/quantize_per_group_backward.h"
#include "ops/quantize/quantize.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = QuantizePerGroupBackward;

template <bool kHalf>
struct Divided : cuda::Quick<kHalf> {
  float size, sign;  // s = sign * size

  __device__ Divided(float s, std::int32_t zp, const cuda::Params& t)
      : cuda::Quick<kHalf>(s, zp, t), size(fabsf(s)), sign(copysignf(1.0f, s)) {}

  // d_y / s, zeros with their signs.
  __device__ float gradient(float d_y) const {
    return sign * cuda::divide<kHalf>(d_y, size, fabsf(this->inverse));
  }
};

template <class X>
struct Body {
  using Element = X;
  template <class S>
  using Param = Divided<cuda::kHalves<X, S>>;
  template <int N>
  struct Loaded {
    cuda::Pack<X, N> d_y, x;
  };
  static constexpr int kWide = cuda::kPack<X>;

  cuda::Params params;
  cuda::Rows<const X> d_y, x;
  cuda::Rows<X> d_x;

  template <class F>
  void each_operand(F&& f) const {
    f(d_y);
    f(x);
    f(d_x);
  }
  template <int N>
  __device__ Loaded<N> load(std::int64_t row, std::int64_t column) const {
    return {cuda::Pack<X, N>::load(d_y.at(row, column)), cuda::Pack<X, N>::load(x.at(row, column))};
  }
  template <class P, int N>
  __device__ cuda::Pack<X, N> quick(const P& p, const Loaded<N>& from, bool& sure) const {
    float to[N];
    cuda::Watch watch_x, watch_dy;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float v = from.x.math(i), g = from.d_y.math(i);
      watch_x.take(v);
      watch_dy.template take_exactly<X>(g);
      to[i] = p(i).inside(p(i).nearest(v)) ? p(i).gradient(g) : 0.0f;
    }
    sure &= watch_x.ordinary() & watch_dy.ordinary();
    return cuda::rounded<X>(to);
  }
  template <int N>
  __device__ void store(const cuda::Pack<X, N>& to, std::int64_t row, std::int64_t column) const {
    to.store(d_x.at(row, column));
  }
  __device__ void exact(std::int64_t row, std::int64_t column, std::int64_t p) const {
    using F = Math<X>;
    const F s = params.scale_for<X>(p), v = cuda::load_math(*x.at(row, column));
    const double code = unclamped_code(quotient(v, s), params.zero(p));
    const bool passes = s != 0 && in_range(code, params.q_min, params.q_max);
    *d_x.at(row, column) =
        cuda::store_math<X>(passes ? cuda::load_math(*d_y.at(row, column)) / s : F(0));
  }
};

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    const Body<X> body{cuda::Params(d, a.scale, a.zero_point), cuda::Rows<const X>(a.d_y),
                       cuda::Rows<const X>(a.x), cuda::Rows<X>(a.d_x)};
    return cuda::run_elements(Op::kName, d, body, a.d_x.device.index, stream);
  });
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<Op>> quantize_per_group_backward_cuda() { return kKernels; }

}  // namespace bittern
