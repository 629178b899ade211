#include "bittern/ops/gated_rms_norm.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/layers/gated_rms_norm/gated_rms_norm_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/dot-inl.h"
#include "cpu/silu-inl.h"
#include "ops/layers/norm-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = GatedRmsNorm;

template <class X>
void Normalise(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  const DotTag tag;
  const norm::Lines line{d.dim};
  const bool each = d.rounding == NormRounding::each;
  norm::ForRstd(
      d, begin, end, [&](std::int64_t i) HWY_ATTR { return a.x.as<X>() + i * a.x.row_stride(); },
      [&](std::int64_t i, const X* x, float rstd_of_row) HWY_ATTR {
        const X* z = a.z.as<X>() + i * a.z.row_stride();
        X* y = a.y.as<X>() + i * a.y.row_stride();
        const auto rstd = hn::Set(tag, rstd_of_row);
        const auto weighted = [&](auto part) HWY_ATTR {
          auto n = hn::Mul(part.Load(x), rstd);
          if (each) n = RoundMath<X>(tag, n);
          n = hn::Mul(n, part.Load(a.weight.as<X>()));
          return each ? RoundMath<X>(tag, n) : n;
        };
        if constexpr (std::is_same_v<X, bf16>) {
          line.EachFour([&](auto... part) HWY_ATTR {
            constexpr std::size_t kCount = sizeof...(part);
            const norm::V n[kCount] = {weighted(part)...}, gate[kCount] = {part.Load(z)...};
            hn::Vec<hn::RebindToUnsigned<DotTag>> bits[kCount];
            SiluToBf16(tag, gate, n, bits);
            std::size_t i = 0;
            (part.StoreUpper(bits[i++], y), ...);
          });
        } else {
          line.Each([&](auto part) HWY_ATTR {
            part.Store(hn::Mul(weighted(part), Silu(tag, part.Load(z))), y);
          });
        }
      });
}

void RunGatedRmsNorm(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
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

using Op = GatedRmsNorm;
BITTERN_EXPORT(RunGatedRmsNorm);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  cpu::parallel(d.rows, cpu::kGrain / d.dim, [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(RunGatedRmsNorm)(d, a, begin, end);
  });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GatedRmsNorm>> gated_rms_norm_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
