// The codes of a group, given its scale and bias: quotients by the cheapest division that serves,
// rounded, clamped and stored as bytes, or two to a byte.
#if defined(BITTERN_OPS_QDQ_AFFINE_INIT_CODE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_QDQ_AFFINE_INIT_CODE_ROWS_INL_H_
#undef BITTERN_OPS_QDQ_AFFINE_INIT_CODE_ROWS_INL_H_
#else
#define BITTERN_OPS_QDQ_AFFINE_INIT_CODE_ROWS_INL_H_
#endif

#include <cstdint>
#include <type_traits>

#include "bittern/ops/qdq_affine_init.h"
#include "cpu/reduce-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = QdqAffineInit;

template <class F>
using Tag = hn::ScalableTag<F>;
template <class F>
using Vector = hn::Vec<Tag<F>>;
template <class F>
constexpr std::int64_t kWidth = hn::MaxLanes(Tag<F>());

// Codes come kRow at a time; groups that are not whole rows are copied and padded to be.
constexpr std::int64_t kRow = kWidth<float>;
inline std::int64_t Padded(std::int64_t size) { return (size + kRow - 1) / kRow * kRow; }

// 2 * kRow neighbouring weights: of every 8, the first and the last 4.
struct Pair {
  Vector<float> lower, upper;
};
HWY_INLINE Pair LoadPair(const bf16* w) {
  const Tag<float> d;
  const hn::ScalableTag<std::uint16_t> d16;
  const auto x = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(w));
  return {hn::BitCast(d, hn::InterleaveLower(d16, hn::Zero(d16), x)),
          hn::BitCast(d, hn::InterleaveUpper(d16, hn::Zero(d16), x))};
}

// Weights and biases below this are far from overflow.
constexpr float kOrdinary = 0x1p30f;

// Integers to be clamped to [0, 255], from z <= n: anything negative for NaN.
template <bool kHalfEven>
HWY_INLINE hn::Vec<hn::ScalableTag<std::int32_t>> RoundedCodes(Vector<float> z) {
  // For 0 <= z < 2^22 the sum reaches the next integer just when the fraction is at least 1/2.
  const auto up = hn::Set(Tag<float>(), 0x1.fffffep-2f);
  // The plain conversions: Highway's make +NaN the largest integer.
  using Ints = hn::Vec<hn::ScalableTag<std::int32_t>>;
#if HWY_TARGET <= HWY_AVX3
  return Ints{kHalfEven ? _mm512_cvtps_epi32(z.raw) : _mm512_cvttps_epi32(hn::Add(z, up).raw)};
#else
  return Ints{kHalfEven ? _mm256_cvtps_epi32(z.raw) : _mm256_cvttps_epi32(hn::Add(z, up).raw)};
#endif
}

// 1 / s where DivideBy serves finite weights of ordinary size, otherwise 0.
template <class F>
HWY_INLINE Vector<F> InverseOf(Vector<F> s, Vector<F> b) {
  const Tag<F> d;
  if constexpr (sizeof(F) == 8) {
    return hn::Zero(d);
  } else {
    const auto size = hn::Abs(s);
    const auto ordinary =
        hn::And(hn::Lt(hn::Abs(b), hn::Set(d, kOrdinary)),
                hn::And(hn::Gt(size, hn::Set(d, 0x1p-90f)), hn::Lt(size, hn::Set(d, 0x1p90f))));
    return hn::IfThenElseZero(ordinary, hn::Div(hn::Set(d, 1.0f), s));
  }
}

// How (w - b) / s is divided. `near` is what Div gives, for weights and scales of ordinary size.
// `once` gives the same codes with one correction (affine_rules.h: divide_once) for such an s that
// is a half as stored, or a half over an integer up to 255. `apart` gives minmax's codes with none,
// for groups that Apart accepts.
enum class Division { ieee, near, once, apart };

// minmax's code says on which side of every h s, h = k + 1/2, w - b lies. With e = bins 2^-22,
// i = 1 / s rounded and z = fma(w, i, fma(-b, i, e)), the error of z is at most
// (2 n + 1 + |b| / s) 2^-24, which is below e where |b| <= bins s. So z rounded to nearest is the
// code unless 0 < h - (w - b) / s <= 2e. For bf16 weights and an s of 11 bits or fewer,
// w - b - h s is a multiple of the least of ulp(w), ulp(b) and ulp(s) / 2. With t = 2^9 e,
//   - ulp(s) / 2 > s 2^-12 >= 2e s;
//   - ulp(b) > |b| 2^-8 >= 2e s where |b| >= t s, and b = 0 is a multiple of anything;
//   - ulp(w) > 2e s where |w| >= t s. Smaller weights are so close to 0 that (w - b) / s is within
//     t of -b / s: it is enough that -b / s is not within 2t of any h.
// Where range / s < n + 1/4 no code needs to be clamped.
struct Apart {
  hn::Mask<Tag<float>> accepted;
  Vector<float> offset;  // fma(-b, i, e)
};
HWY_INLINE Apart FindApart(std::int32_t bins, Vector<float> range, Vector<float> s, Vector<float> b,
                           Vector<float> inverse) {
  const Tag<float> d;
  const float e = static_cast<float>(bins) * 0x1p-22f, t = 0x1p9f * e;
  const auto zero = hn::Mul(b, inverse);
  const auto size = hn::Abs(zero);
  const auto from_integer = hn::Abs(hn::Sub(zero, hn::Round(zero)));
  const auto b_fits = hn::Or(hn::Eq(b, hn::Zero(d)),
                             hn::And(hn::Ge(size, hn::Set(d, 1.001f * t)),
                                     hn::Le(size, hn::Set(d, static_cast<float>(bins - 1)))));
  const auto no_clamp =
      hn::Lt(hn::Mul(range, inverse), hn::Set(d, static_cast<float>(bins) - 0.75f));
  const auto no_tie = hn::Lt(from_integer, hn::Set(d, 0.5f - 2 * t));
  return {hn::And(no_clamp, hn::And(b_fits, no_tie)), hn::NegMulAdd(b, inverse, hn::Set(d, e))};
}

template <class F, Division kDivision>
struct Step {
  Vector<F> s, b, n, inverse;
  HWY_INLINE Step(F scale, F bias, F inverse_scale, F last)
      : s(hn::Set(Tag<F>(), scale)),
        b(hn::Set(Tag<F>(), bias)),
        n(hn::Set(Tag<F>(), last)),
        inverse(hn::Set(Tag<F>(), inverse_scale)) {}
  HWY_INLINE Vector<F> Unbounded(Vector<F> w) const {
    const auto x = hn::Sub(w, b);
    if constexpr (kDivision == Division::ieee) return hn::Div(x, s);
    if constexpr (kDivision == Division::once) {
      const auto z = hn::Mul(x, inverse);
      return hn::MulAdd(hn::NegMulAdd(z, s, x), inverse, z);
    }
    return DivideBy(s, inverse, x);
  }
  // Min gives its second argument when one is NaN.
  HWY_INLINE Vector<F> Quotient(Vector<F> w) const { return hn::Min(n, Unbounded(w)); }
};

template <>
struct Step<float, Division::apart> {
  Vector<float> inverse, offset;
  HWY_INLINE Vector<float> Unbounded(Vector<float> w) const {
    return hn::MulAdd(w, inverse, offset);
  }
};

// The codes of 2 * kRow weights, 16 bits each.
template <bool kHalfEven, Division kDivision>
HWY_INLINE auto PairCodes(const bf16* w, const Step<float, kDivision>& step) {
  const auto [lower, upper] = LoadPair(w);
  return hn::ReorderDemote2To(hn::ScalableTag<std::int16_t>(),
                              RoundedCodes<kHalfEven>(step.Unbounded(lower)),
                              RoundedCodes<kHalfEven>(step.Unbounded(upper)));
}

template <bool kHalfEven, Division kDivision, class X>
HWY_INLINE auto RowCodes(const X* w, const Step<float, kDivision>& step) {
  const auto x = LoadMath(Tag<float>(), w);
  // Where a division is near, no quotient comes close to the end of the integers.
  return RoundedCodes<kHalfEven>(kDivision == Division::ieee ? step.Quotient(x)
                                                             : step.Unbounded(x));
}
template <bool kHalfEven, Division kDivision>
HWY_INLINE auto RowCodes(const double* w, const Step<double, kDivision>& step) {
  const Tag<double> d;
  const hn::Half<Tag<float>> dh;
  const auto half = [&](const double* p) HWY_ATTR {
    const auto z = step.Quotient(hn::LoadU(d, p));
    const auto up = hn::Set(d, 0x1.fffffffffffffp-2);
    return hn::DemoteTo(dh, kHalfEven ? hn::Round(z) : hn::Trunc(hn::Add(z, up)));
  };
  return RoundedCodes<true>(hn::Combine(Tag<float>(), half(w + kWidth<double>), half(w)));
}

// 16-bit integers clamped to bytes: 8 of each in turn.
using Words = hn::Vec<hn::ScalableTag<std::int16_t>>;
HWY_INLINE auto PackBytes(Words a, Words b) {
  using Bytes = hn::Vec<hn::ScalableTag<std::uint8_t>>;
#if HWY_TARGET <= HWY_AVX3
  return Bytes{_mm512_packus_epi16(a.raw, b.raw)};
#else
  return Bytes{_mm256_packus_epi16(a.raw, b.raw)};
#endif
}

// Where a group's codes go: a byte each, or two to a byte, the first in the lower half. Two to a
// byte is for codes of 4 bits and groups of whole vectors of bytes.
struct CodeRow {
  std::uint8_t* HWY_RESTRICT codes;
  bool nibbles;

  HWY_INLINE void Store(std::int64_t i, hn::Vec<hn::ScalableTag<std::uint8_t>> v) const {
    const hn::ScalableTag<std::uint8_t> d;
    if (!nibbles) return hn::StoreU(v, d, codes + i);
    const hn::RepartitionToWide<decltype(d)> pairs;
    const hn::Half<decltype(d)> half;
    const auto pair = hn::BitCast(pairs, v);
    hn::StoreU(hn::TruncateTo(half, hn::Or(pair, hn::ShiftRight<4>(pair))), half, codes + i / 2);
  }
};

// codes[0, size) from pair(i), the integers of codes i .. i + 2 * kRow - 1, 16 bits each; size is a
// multiple of 2 * kRow.
template <bool kClamp, class Pairs>
HWY_INLINE void StorePairCodes(std::int64_t size, std::int32_t bins, const Pairs& pair,
                               CodeRow to) {
  const hn::ScalableTag<std::uint64_t> d64;
  const hn::ScalableTag<std::uint8_t> d8;
  const auto most = hn::Set(d8, static_cast<std::uint8_t>(kClamp ? bins - 1 : 255));
  HWY_ALIGN static constexpr std::uint64_t kOrder[] = {0, 2, 4, 6, 1, 3, 5, 7};
  HWY_ALIGN static constexpr std::uint64_t kOrder4[] = {0, 2, 1, 3};
  const auto order = hn::SetTableIndices(d64, kRow == 16 ? kOrder : kOrder4);
  std::int64_t i = 0;
  for (; i + 4 * kRow <= size; i += 4 * kRow) {
    const auto v = hn::BitCast(
        d8, hn::TableLookupLanes(hn::BitCast(d64, PackBytes(pair(i), pair(i + 2 * kRow))), order));
    to.Store(i, kClamp ? hn::Min(v, most) : v);
  }
  if (i < size) {
    const auto last = pair(i);
    const auto v = hn::TableLookupLanes(hn::BitCast(d64, PackBytes(last, last)), order);
    const hn::Half<decltype(d8)> dh;
    hn::StoreU(hn::LowerHalf(dh, hn::Min(hn::BitCast(d8, v), most)), dh, to.codes + i);
  }
}

// codes[0, Padded(size)) from row(i), the integers of codes i .. i + kRow - 1.
template <class Row>
HWY_INLINE void StoreCodes(std::int64_t size, std::int32_t bins, const Row& row, CodeRow to) {
  const hn::ScalableTag<std::int32_t> d32;
  const hn::ScalableTag<std::int16_t> d16;
  const hn::ScalableTag<std::uint8_t> d8;
  const auto most = hn::Set(d8, static_cast<std::uint8_t>(bins - 1));
  // Saturating demotions work in 128-bit blocks: [a0 b0 c0 d0 a1 ...], 4 codes each.
  HWY_ALIGN static constexpr std::int32_t kOrder[] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                      2, 6, 10, 14, 3, 7, 11, 15};
  HWY_ALIGN static constexpr std::int32_t kOrder8[] = {0, 4, 1, 5, 2, 6, 3, 7};
  const auto order = hn::SetTableIndices(d32, kRow == 16 ? kOrder : kOrder8);
  std::int64_t i = 0;
  for (; i + 4 * kRow <= size; i += 4 * kRow) {
    const auto ab = hn::ReorderDemote2To(d16, row(i), row(i + kRow));
    const auto cd = hn::ReorderDemote2To(d16, row(i + 2 * kRow), row(i + 3 * kRow));
    const auto v = hn::TableLookupLanes(hn::BitCast(d32, PackBytes(ab, cd)), order);
    to.Store(i, hn::Min(hn::BitCast(d8, v), most));
  }
  const hn::Rebind<std::uint8_t, decltype(d32)> d8q;
  const auto most_q = hn::Set(d8q, static_cast<std::uint8_t>(bins - 1));
  for (; i < size; i += kRow)
    hn::StoreU(hn::Min(hn::DemoteTo(d8q, row(i)), most_q), d8q, to.codes + i);
}

template <bool kHalfEven, Division kDivision, class X, class F>
HWY_INLINE void QuantizeBy(const X* w, std::int64_t size, F s, F b, F inverse, std::int32_t bins,
                           CodeRow to) {
  const Step<F, kDivision> step(s, b, inverse, static_cast<F>(bins - 1));
  if constexpr (std::is_same_v<X, bf16> && kDivision != Division::ieee) {
    StorePairCodes<true>(
        size, bins, [&](std::int64_t i) HWY_ATTR { return PairCodes<kHalfEven>(w + i, step); }, to);
  } else {
    StoreCodes(
        size, bins, [&](std::int64_t i) HWY_ATTR { return RowCodes<kHalfEven>(w + i, step); }, to);
  }
}
// `inverse` is 0 where only Div serves.
template <bool kHalfEven, bool kOnce, class X, class F>
HWY_INLINE void Quantize(const X* w, std::int64_t size, F s, F b, F inverse, std::int32_t bins,
                         CodeRow to) {
  if (HWY_LIKELY(sizeof(F) == 4 && inverse != 0)) {
    constexpr Division kDivision = kOnce ? Division::once : Division::near;
    QuantizeBy<kHalfEven, kDivision>(w, size, s, b, inverse, bins, to);
  } else {
    QuantizeBy<kHalfEven, Division::ieee>(w, size, s, b, inverse, bins, to);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
