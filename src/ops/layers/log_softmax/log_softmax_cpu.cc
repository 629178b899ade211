#include "bittern/ops/log_softmax.h"
#include "core/numerics.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/layers/log_softmax/log_softmax_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/activations-inl.h"
#include "ops/layers/log_sum-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = LogSoftmax;

using lines::Lines;
using lines::V;

template <class X>
void Normalise(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  const DotTag tag;
  const V cap = hn::Set(tag, static_cast<float>(d.softcap));
  const V temperature = hn::Set(tag, static_cast<float>(d.temperature));
  const V lowest = hn::Inf(tag);
  const bool capped = d.softcap > 0, divided = d.temperature != 1;
  const auto logit = [&](V v) HWY_ATTR {
    if (capped) v = hn::Mul(cap, Tanh(tag, hn::Div(v, cap)));
    return divided ? hn::Div(v, temperature) : v;
  };
  for (std::int64_t i = begin; i < end; ++i) {
    const X* x = a.x.as<X>() + i * a.x.row_stride();
    float* y = a.y.as<float>() + i * a.y.row_stride();
    // A NaN may or may not be the maximum: the sum is NaN with either.
    V peak = hn::Neg(lowest);
    Lines{d.dim}.Each([&](auto part)
                          HWY_ATTR { peak = part.Only(hn::Max(peak, logit(part.Load(x))), peak); });
    const V most = hn::Set(tag, hn::GetLane(hn::MaxOfLanes(tag, peak)));
    double sum = 0;
    for (std::int64_t first = 0; first < d.dim; first += kLogSumBlock) {
      lines::Chains chains;
      Lines{std::min(d.dim - first, kLogSumBlock)}.Each([&](auto part) HWY_ATTR {
        const V e = Exp(tag, hn::Sub(logit(part.Load(x + first)), most));
        lines::Wide terms;
        lines::Widen(part.Only(e, hn::Zero(tag)), terms);
        chains.Add(terms, part.at);
      });
      sum += chains.Join();
    }
    const V log_sum = hn::Set(tag, log_of_sum(sum));
    Lines{d.dim}.Each([&](auto part) HWY_ATTR {
      part.Store(hn::Sub(hn::Sub(logit(part.Load(x)), most), log_sum), y);
    });
  }
}

void RunLogSoftmax(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    Normalise<X>(d, a, begin, end);
    return Status();
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = LogSoftmax;
BITTERN_EXPORT(RunLogSoftmax);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  cpu::parallel(d.rows, cpu::kGrain / 8 / d.dim, [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(RunLogSoftmax)(d, a, begin, end);
  });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<LogSoftmax>> log_softmax_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
