#include "bittern/ops/rope.h"
#include "core/numerics.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/layers/rope/rope_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/angle-inl.h"
#include "ops/layers/lines-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = Rope;

// Frequencies taken at a time. Their cos and sin are then used by every head.
inline constexpr std::int64_t kTurns = 128;

// What x and its partner are multiplied by. In layout half, element i has them at i; interleaved,
// the pair 2i, 2i + 1 has cos, cos and -sin, sin at these places.
struct Turns {
  alignas(64) float cos[2 * kTurns];
  alignas(64) float sin[2 * kTurns];

  void Make(const Op::Desc& d, std::int32_t position, const float* inverse, std::int64_t count) {
    const hn::ScalableTag<double> dd;
    const hn::Rebind<float, decltype(dd)> df;
    constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(dd));
    const auto factor = hn::Set(df, static_cast<float>(d.factor));
    const auto at = hn::Set(dd, static_cast<double>(position));
    for (std::int64_t i = 0; i < count; i += kLanes) {
      alignas(64) float padded[kLanes] = {};
      std::copy_n(inverse + i, std::min(kLanes, count - i), padded);
      hn::Vec<decltype(dd)> c, s;
      CosSin(dd, hn::Mul(at, hn::PromoteTo(dd, hn::Load(df, padded))), c, s);
      hn::Store(hn::Mul(hn::DemoteTo(df, c), factor), df, cos + i);
      hn::Store(hn::Mul(hn::DemoteTo(df, s), factor), df, sin + i);
    }
    if (d.layout == RopeLayout::half) return;
    for (std::int64_t i = count - 1; i >= 0; --i) {
      cos[2 * i] = cos[2 * i + 1] = cos[i];
      const float s = sin[i];
      sin[2 * i] = -s;
      sin[2 * i + 1] = s;
    }
  }
};

template <class X>
void Rotate(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  using lines::Lines;
  using lines::V;
  const DotTag tag;
  const std::int64_t half = d.rotary_dim / 2;
  const float* inverse = a.inverse_frequencies.as<float>();
  Turns turns;
  const float *cos = turns.cos, *sin = turns.sin;
  for (std::int64_t t = begin; t < end; ++t) {
    for (std::int64_t first = 0; first < half; first += kTurns) {
      const std::int64_t count = std::min(kTurns, half - first);
      turns.Make(d, a.positions.as<std::int32_t>()[t], inverse + first, count);
      for (std::int64_t h = 0; h < d.heads; ++h) {
        const X* x = a.x.as<X>() + a.x.at(t, h);
        X* y = a.y.as<X>() + a.y.at(t, h);
        if (d.layout == RopeLayout::half) {
          x += first;
          y += first;
          Lines{count}.Each([&](auto part) HWY_ATTR {
            const V x_a = part.Load(x), x_b = part.Load(x + half);
            const V c = part.Load(cos), s = part.Load(sin);
            part.Store(hn::Sub(hn::Mul(x_a, c), hn::Mul(x_b, s)), y);
            part.Store(hn::Add(hn::Mul(x_b, c), hn::Mul(x_a, s)), y + half);
          });
        } else {
          x += 2 * first;
          y += 2 * first;
          Lines{2 * count}.Each([&](auto part) HWY_ATTR {
            const V v = part.Load(x);
            const V other = hn::Reverse2(tag, v);
            part.Store(hn::Add(hn::Mul(v, part.Load(cos)), hn::Mul(other, part.Load(sin))), y);
          });
        }
      }
    }
    if (d.rotary_dim == d.dim) continue;
    for (std::int64_t h = 0; h < d.heads; ++h) {
      const X* x = a.x.as<X>() + a.x.at(t, h);
      X* y = a.y.as<X>() + a.y.at(t, h);
      if (x != y) std::copy(x + d.rotary_dim, x + d.dim, y + d.rotary_dim);
    }
  }
}

void RunRope(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    Rotate<X>(d, a, begin, end);
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

using Op = Rope;
BITTERN_EXPORT(RunRope);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  cpu::parallel(
      d.tokens, cpu::kGrain / std::max<std::int64_t>(1, d.heads * d.dim),
      [&](std::int64_t begin, std::int64_t end) { BITTERN_CALL(RunRope)(d, a, begin, end); });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<Rope>> rope_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
