#include "bittern/ops/quantize_per_group.h"
#include "cuda/quantize.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = QuantizePerGroup;

template <class X>
struct Body {
  using Element = X;
  template <class S>
  using Param = cuda::Quick<sizeof(X) == 2 && sizeof(S) == 2>;
  static constexpr int kWide = 16;  // a store of 16 bytes

  cuda::Params params;
  cuda::Rows<const X> x;
  cuda::Rows<std::uint8_t> q;

  template <class F>
  void each_operand(F&& f) const {
    f(x);
    f(q);
  }
  template <int N>
  __device__ auto load(std::int64_t row, std::int64_t column) const {
    return cuda::Pack<X, N>::load(x.at(row, column));
  }
  template <class P, int N>
  __device__ auto quick(const P& p, const cuda::Pack<X, N>& from, bool& sure) const {
    cuda::Pack<std::uint32_t, N / 4> to;
    float sum = 0;  // NaN if an x is
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const auto code = [&](int k) {
        const float v = cuda::load_math(from.at[4 * i + k]);
        sum += v;
        return p.code(v);
      };
      const std::uint32_t first = code(0), second = code(1), third = code(2);
      to.at[i] = cuda::low_bytes(first, second, third, code(3));
    }
    sure &= !isnan(sum);
    return to;
  }
  template <int N>
  __device__ void store(const cuda::Pack<std::uint32_t, N>& to, std::int64_t row,
                        std::int64_t column) const {
    to.store(reinterpret_cast<std::uint32_t*>(q.at(row, column)));
  }
  __device__ void exact(std::int64_t row, std::int64_t column, std::int64_t p) const {
    *q.at(row, column) = cuda::exact_code(cuda::load_math(*x.at(row, column)),
                                          params.scale_for<X>(p), params.zero(p), params);
  }
};

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    const Body<X> body{cuda::Params(d, a.scale, a.zero_point), cuda::Rows<const X>(a.x),
                       cuda::Rows<std::uint8_t>(a.q)};
    return cuda::run_elements(Op::kName, d, body, a.q.device.index, stream);
  });
}

constexpr Kernel<Op> kKernels[] = {
    {.name = "cuda", .backend = "cuda", .architecture = cuda::architecture, .run = run}};

}  // namespace

std::span<const Kernel<QuantizePerGroup>> quantize_per_group_cuda() { return kKernels; }

}  // namespace bittern
