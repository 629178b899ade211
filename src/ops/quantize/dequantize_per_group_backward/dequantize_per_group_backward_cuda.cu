#include "bittern/ops/dequantize_per_group_backward.h"
#include "ops/quantize/group_sum.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = DequantizePerGroupBackward;

template <class X>
struct Body {
  using Element = X;
  using F = Math<X>;
  template <class S>
  using Param = cuda::CodeParam;
  template <int N>
  struct Loaded {
    cuda::Pack<X, N> d_y;
    cuda::Pack<std::uint32_t, N / 4> q;
  };

  cuda::Params params;
  cuda::Codes codes;
  cuda::Rows<const X> d_y;
  cuda::Rows<const std::uint8_t> q;
  cuda::Rows<X> d_q;
  void* d_scale;

  template <class Visitor>
  void each_operand(Visitor&& f) const {
    f(d_y);
    f(q);
    f(d_q);
  }
  template <int N>
  __device__ Loaded<N> load(std::int64_t row, std::int64_t column) const {
    return {cuda::Pack<X, N>::load(d_y.at(row, column)), codes.load<N>(q.at(row, column))};
  }
  template <int N>
  __device__ cuda::Pack<X, N> quick(const cuda::CodeParam& p, const Loaded<N>& from,
                                    float (&to_scale)[N], float (&)[N], bool&) const {
    float to[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float g = from.d_y.math(i);
      to_scale[i] = codes.difference(from.q, i, p) * g;
      to[i] = g * p.scale;
    }
    return cuda::rounded<X>(to);
  }
  template <int N>
  __device__ void store(const cuda::Pack<X, N>& to, std::int64_t row, std::int64_t column) const {
    if (d_q.data != nullptr) to.store(d_q.at(row, column));
  }
  __device__ cuda::Terms<F> exact(std::int64_t row, std::int64_t column, std::int64_t p) const {
    const F g = cuda::load_math(*d_y.at(row, column));
    if (d_q.data != nullptr) *d_q.at(row, column) = cuda::store_math<X>(g * params.scale_for<X>(p));
    return {scaled(codes.value(*q.at(row, column)) - params.zero(p), g), F(0)};
  }
  __device__ static cuda::Terms<F> join(const cuda::Terms<F>& a, const cuda::Terms<F>& b) {
    return cuda::Terms<F>::sum(a, b);
  }
  __device__ void finish(std::int64_t p, const cuda::Terms<F>& sums) const {
    params.store_for<X>(d_scale, p, sums.first);
  }
};

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    const Body<X> body{
        cuda::Params(d, a.scale, a.zero_point), cuda::Codes(d.code),  cuda::Rows<const X>(a.d_y),
        cuda::Rows<const std::uint8_t>(a.q),    cuda::Rows<X>(a.d_q), a.d_scale.data};
    return cuda::run_sums(Op::kName, d, body, a.d_y.device.index, stream, workspace);
  });
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run, cuda::reduction_workspace)};

}  // namespace

std::span<const Kernel<Op>> dequantize_per_group_backward_cuda() { return kKernels; }

}  // namespace bittern
