#include "bittern/ops/dequantize_per_group.h"
#include "ops/quantize/quantize.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = DequantizePerGroup;

template <class X>
struct Body {
  using Element = X;
  template <class S>
  using Param = cuda::CodeParam;
  static constexpr int kWide = cuda::kPack<X>;

  cuda::Params params;
  cuda::Codes codes;
  cuda::Rows<const std::uint8_t> q;
  cuda::Rows<X> y;

  template <class F>
  void each_operand(F&& f) const {
    f(q);
    f(y);
  }
  template <int N>
  __device__ auto load(std::int64_t row, std::int64_t column) const {
    return codes.load<N>(q.at(row, column));
  }
  template <class P, int N>
  __device__ auto quick(const P& p, const cuda::Pack<std::uint32_t, N>& from, bool&) const {
    float to[4 * N];
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) to[i] = codes.difference(from, i, p(i)) * p(i).scale;
    return cuda::rounded<X>(to);
  }
  template <int N>
  __device__ void store(const cuda::Pack<X, N>& to, std::int64_t row, std::int64_t column) const {
    to.store(y.at(row, column));
  }
  __device__ void exact(std::int64_t row, std::int64_t column, std::int64_t p) const {
    const std::int64_t difference = codes.value(*q.at(row, column)) - params.zero(p);
    *y.at(row, column) = cuda::store_math<X>(scaled(difference, params.scale_for<X>(p)));
  }
};

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    const Body<X> body{cuda::Params(d, a.scale, a.zero_point), cuda::Codes(d.code),
                       cuda::Rows<const std::uint8_t>(a.q), cuda::Rows<X>(a.y)};
    return cuda::run_elements(Op::kName, d, body, a.y.device.index, stream);
  });
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<Op>> dequantize_per_group_cuda() { return kKernels; }

}  // namespace bittern
