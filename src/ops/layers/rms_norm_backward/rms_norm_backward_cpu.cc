#include "bittern/ops/rms_norm_backward.h"
#include "core/row_runs.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/layers/rms_norm_backward/rms_norm_backward_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/layers/norm-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = RmsNormBackward;

// The rows of an operand that may be left out.
template <class X, class View>
struct Rows {
  X* data;
  RowRuns runs;
  explicit Rows(const View& v)
      : data(v ? v.template as<std::remove_const_t<X>>() : nullptr), runs(v.shape, v.stride, 1) {}
  X* operator[](std::int64_t i) const { return data == nullptr ? nullptr : data + runs.offset(i); }
};

// Blocks of rows [begin, end); the d_weight of each goes to its row of `partial`.
template <class X>
void Differentiate(const Op::Desc& d, const Op::Args& a, float* partial, std::int64_t begin,
                   std::int64_t end) {
  using norm::V;
  const DotTag tag;
  const norm::Lines line{d.dim};
  const V offset = hn::Set(tag, static_cast<float>(d.offset));
  const X* weight = a.weight.as<X>();
  const Rows<const X, ConstView> xs(a.x), d_ys(a.d_y), d_sums(a.d_sum);
  const Rows<X, MutView> d_xs(a.d_x);
  for (std::int64_t i = begin * Op::Desc::kBlock; i < std::min(d.rows, end * Op::Desc::kBlock);
       ++i) {
    float* sums = partial + i / Op::Desc::kBlock * d.dim;
    if (i % Op::Desc::kBlock == 0) std::fill_n(sums, d.dim, 0.0f);
    const X *x = xs[i], *d_y = d_ys[i], *d_sum = d_sums[i];
    const V rstd = hn::Set(tag, norm::Rstd(d, x));
    if (a.d_weight) {
      line.Each([&](auto part) HWY_ATTR {
        const V sum = part.Load(static_cast<const float*>(sums));
        part.Store(hn::MulAdd(part.Load(d_y), hn::Mul(part.Load(x), rstd), sum), sums);
      });
    }
    X* d_x = d_xs[i];
    if (d_x == nullptr) continue;
    const auto both = [&](auto part, V& e, V& n) HWY_ATTR {
      e = hn::Mul(part.Load(d_y), hn::Add(part.Load(weight), offset));
      n = hn::Mul(part.Load(x), rstd);
    };
    const V along = hn::Set(tag, line.Sum(both) / static_cast<float>(d.dim));
    line.Each([&](auto part) HWY_ATTR {
      V e, n;
      both(part, e, n);
      V v = hn::Mul(rstd, hn::NegMulAdd(n, along, e));
      if (d_sum != nullptr) v = hn::Add(v, part.Load(d_sum));
      part.Store(v, d_x);
    });
  }
}

void RunRmsNormBackward(const Op::Desc& d, const Op::Args& a, float* partial, std::int64_t begin,
                        std::int64_t end) {
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    Differentiate<X>(d, a, partial, begin, end);
    return Status();
  });
}

// d_weight of columns [begin, end).
void SumRmsNormBackward(const Op::Desc& d, const Op::Args& a, float* partial, std::int64_t begin,
                        std::int64_t end) {
  norm::SumBlocks(d, a.d_weight, partial, begin, end);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = RmsNormBackward;
BITTERN_EXPORT(RunRmsNormBackward);
BITTERN_EXPORT(SumRmsNormBackward);

std::size_t workspace(const Op::Desc& d, Device) {
  return static_cast<std::size_t>(d.blocks() * d.dim) * sizeof(float);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace space) {
  auto* partial = static_cast<float*>(space.data);
  cpu::parallel(d.blocks(), cpu::kGrain / (d.dim * Op::Desc::kBlock),
                [&](std::int64_t begin, std::int64_t end) {
                  BITTERN_CALL(RunRmsNormBackward)(d, a, partial, begin, end);
                });
  if (!a.d_weight) return {};
  cpu::parallel(d.dim, cpu::kGrain / std::max<std::int64_t>(d.blocks(), 1),
                [&](std::int64_t begin, std::int64_t end) {
                  BITTERN_CALL(SumRmsNormBackward)(d, a, partial, begin, end);
                });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run, workspace)};

}  // namespace

std::span<const Kernel<RmsNormBackward>> rms_norm_backward_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
