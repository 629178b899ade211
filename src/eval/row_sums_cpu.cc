#include "eval/row_sums.h"

#include <algorithm>
#include <array>

#include "core/math.h"
#include "cpu/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eval/row_sums_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/math-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using D = hn::ScalableTag<float>;
using D64 = hn::ScalableTag<double>;
using V = hn::Vec<D>;
constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));
constexpr std::int64_t kChains = 16;

// term(low or high half of the lanes, at which element) -> f64 vector.
template <class Low, class High>
HWY_INLINE void AddHalves(hn::Vec<D64> (&sum)[kChains / (kLanes / 2)], std::int64_t at, Low low,
                          High high) {
  const auto k = static_cast<std::size_t>(at % kChains / (kLanes / 2));
  sum[k] = hn::Add(sum[k], low);
  sum[k + 1] = hn::Add(sum[k + 1], high);
}

HWY_INLINE hn::Vec<D64> LowHalf(V v) {
  return hn::PromoteTo(D64(), hn::LowerHalf(hn::Half<D>(), v));
}
HWY_INLINE hn::Vec<D64> HighHalf(V v) {
  return hn::PromoteTo(D64(), hn::UpperHalf(hn::Half<D>(), v));
}

double Join(const hn::Vec<D64> (&sum)[kChains / (kLanes / 2)]) {
  alignas(64) double all[kChains];
  for (std::int64_t k = 0; k < kChains / (kLanes / 2); ++k)
    hn::Store(sum[k], D64(), all + k * (kLanes / 2));
  for (std::int64_t stride = kChains / 2; stride > 0; stride /= 2)
    for (std::int64_t i = 0; i < stride; ++i) all[i] += all[i + stride];
  return all[0];
}

// Beyond a row's end: exp gives 0, and the difference of two of them is 0.
constexpr float kNone = -200.0f;

// f(p, q, at) for each vector of both rows.
template <class F>
HWY_INLINE void Each(const float* p, const float* q, std::int64_t count, const F& f) {
  const D d;
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) f(hn::LoadU(d, p + i), hn::LoadU(d, q + i), i);
  if (i == count) return;
  alignas(64) float rest_p[kLanes], rest_q[kLanes];
  std::fill(rest_p, rest_p + kLanes, kNone);
  std::fill(rest_q, rest_q + kLanes, kNone);
  std::copy(p + i, p + count, rest_p);
  std::copy(q + i, q + count, rest_q);
  f(hn::Load(d, rest_p), hn::Load(d, rest_q), i);
}

double KlOfRow(const float* p, const float* q, std::int64_t count) {
  hn::Vec<D64> sum[kChains / (kLanes / 2)];
  for (auto& s : sum) s = hn::Zero(D64());
  Each(p, q, count, [&](V a, V b, std::int64_t at) HWY_ATTR {
    const V w = Exp(D(), a);
    AddHalves(sum, at, hn::Mul(LowHalf(w), hn::Sub(LowHalf(a), LowHalf(b))),
              hn::Mul(HighHalf(w), hn::Sub(HighHalf(a), HighHalf(b))));
  });
  return Join(sum);
}

double MassOfRow(const float* p, std::int64_t count) {
  hn::Vec<D64> sum[kChains / (kLanes / 2)];
  for (auto& s : sum) s = hn::Zero(D64());
  Each(p, p, count, [&](V a, V, std::int64_t at) HWY_ATTR {
    const V w = Exp(D(), a);
    AddHalves(sum, at, LowHalf(w), HighHalf(w));
  });
  return Join(sum);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

BITTERN_EXPORT(KlOfRow);
BITTERN_EXPORT(MassOfRow);

template <class Term>
double in_chains(std::int64_t count, const Term& term) {
  std::array<double, 16> all{};
  for (std::int64_t i = 0; i < count; ++i) all[static_cast<std::size_t>(i % 16)] += term(i);
  for (std::size_t stride = 8; stride > 0; stride /= 2)
    for (std::size_t i = 0; i < stride; ++i) all[i] += all[i + stride];
  return all[0];
}

}  // namespace

double kl_of_row_ref(const float* p, const float* q, std::int64_t count) {
  return in_chains(count, [&](std::int64_t i) {
    return double{math::exp(p[i])} * (double{p[i]} - double{q[i]});
  });
}
double mass_of_row_ref(const float* p, std::int64_t count) {
  return in_chains(count, [&](std::int64_t i) { return double{math::exp(p[i])}; });
}

double kl_of_row(const float* p, const float* q, std::int64_t count) {
  if (cpu::isa() == cpu::Isa::none) return kl_of_row_ref(p, q, count);
  return BITTERN_CALL(KlOfRow)(p, q, count);
}
double mass_of_row(const float* p, std::int64_t count) {
  if (cpu::isa() == cpu::Isa::none) return mass_of_row_ref(p, count);
  return BITTERN_CALL(MassOfRow)(p, count);
}

}  // namespace bittern
#endif  // HWY_ONCE
