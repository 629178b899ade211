// silu rounded to bf16 in a third of the time that Silu takes, with the same bits.
#if defined(BITTERN_CPU_SILU_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_SILU_INL_H_
#undef BITTERN_CPU_SILU_INL_H_
#else
#define BITTERN_CPU_SILU_INL_H_
#endif

#include "cpu/math-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

// y = silu(x) within kSiluUlps ulps of Silu for |x| <= kSiluMost, in a third of its time. Several
// vectors at once, because each waits for its own chain of operations.
inline constexpr float kSiluMost = 40.0f;
inline constexpr std::uint32_t kSiluUlps = 16;
template <std::size_t kCount, class D>
HWY_INLINE void SiluNearly(D d, const hn::Vec<D> (&x)[kCount], hn::Vec<D> (&y)[kCount]) {
  const hn::RebindToUnsigned<D> du;
  const auto set = [d](float c) HWY_ATTR { return hn::Set(d, c); };
  const auto one = set(1.0f), rounder = set(math::kRounder), log2e = set(-math::kLog2E);
  hn::Vec<D> shifted[kCount], f[kCount], p[kCount];
  const auto each = [](auto&& step) HWY_ATTR {
    for (std::size_t i = 0; i < kCount; ++i) step(i);
  };
  // e^-x = 2^n 2^f; the low bits of `shifted` hold n.
  each([&](auto i) HWY_ATTR { shifted[i] = hn::MulAdd(x[i], log2e, rounder); });
  each([&](auto i) HWY_ATTR { f[i] = hn::Sub(shifted[i], rounder); });
  each([&](auto i) HWY_ATTR { f[i] = hn::MulSub(x[i], log2e, f[i]); });
  // 2^f within 2^-23: minimax with the constant 1.
  const auto first = set(0x1.5bba14p-10f), second = set(0x1.3cea88p-7f);
  each([&](auto i) HWY_ATTR { p[i] = hn::MulAdd(first, f[i], second); });
  for (const float term : {0x1.c6b752p-5f, 0x1.ebf9bcp-3f, 0x1.62e42ap-1f, 1.0f})
    each([&](auto i) HWY_ATTR { p[i] = hn::MulAdd(p[i], f[i], set(term)); });
  each([&](auto i) HWY_ATTR {
    const auto n = hn::ShiftLeft<23>(hn::BitCast(du, shifted[i]));
    p[i] = hn::Add(one, hn::BitCast(d, hn::Add(hn::BitCast(du, p[i]), n)));
  });
  // x / p by Newton's step; the estimate has 11 bits at least. (x comes last, for the sign of 0.)
  each([&](auto i) HWY_ATTR { f[i] = hn::ApproximateReciprocal(p[i]); });
  each([&](auto i) HWY_ATTR { p[i] = hn::NegMulAdd(p[i], f[i], one); });
  each([&](auto i) HWY_ATTR { f[i] = hn::MulAdd(p[i], f[i], f[i]); });
  each([&](auto i) HWY_ATTR { y[i] = hn::Mul(x[i], f[i]); });
}

// silu(x), or its product with n, rounded to bf16 in the upper half of each lane: the bits of
// Bf16InUpperHalf and Silu. Few numbers are so near a tie that SiluNearly could round to the other
// side, and only those need Silu. No NaN may have low bits, as none has that came from bf16.
template <std::size_t kCount, class D>
HWY_INLINE void SiluToBf16(D d, const hn::Vec<D> (&x)[kCount], const hn::Vec<D>* n,
                           hn::Vec<hn::RebindToUnsigned<D>> (&bits)[kCount]) {
  const hn::RebindToUnsigned<D> du;
  using VU = hn::Vec<decltype(du)>;
  // A relative error is up to twice as many ulps of the product.
  const std::uint32_t near = n == nullptr ? kSiluUlps : 2 * kSiluUlps;
  const VU round = hn::Set(du, 0x8000u + near), low = hn::Set(du, 0x10000u - 2 * near);
  // After this addition a number whose low bits are below 2 near is near a tie.
  const auto tie = [&](std::size_t i) HWY_ATTR {
#if HWY_TARGET <= HWY_AVX3
    return hn::Mask<decltype(du)>{_mm512_testn_epi32_mask(bits[i].raw, low.raw)};
#else
    return hn::Eq(hn::And(bits[i], low), hn::Zero(du));
#endif
  };
  // Magnitudes are ordered as their bits are; less 1, 0 is the largest. Where silu is subnormal its
  // ulps bound no relative error.
  const auto size = [&](std::size_t i) HWY_ATTR { return hn::BitCast(du, hn::Abs(x[i])); };
  const VU one = hn::Set(du, 1u), most = hn::BitCast(du, hn::Set(d, kSiluMost));
  const VU least = hn::BitCast(du, hn::Set(d, 0x1p-124f));
  const auto outside = [&](VU largest, VU smallest_less_1) HWY_ATTR {
    const auto large = hn::Gt(largest, most);
    return n == nullptr ? large : hn::Or(large, hn::Lt(smallest_less_1, least));
  };
  hn::Vec<D> y[kCount];
  SiluNearly(d, x, y);
  VU largest = size(0), smallest = hn::Sub(size(0), one);
  for (std::size_t i = 1; i < kCount; ++i) {
    largest = hn::Max(largest, size(i));
    smallest = hn::Min(smallest, hn::Sub(size(i), one));
  }
  auto unsure = outside(largest, smallest);
  for (std::size_t i = 0; i < kCount; ++i) {
    if (n != nullptr) y[i] = hn::Mul(n[i], y[i]);
    bits[i] = hn::Add(hn::BitCast(du, y[i]), round);
    unsure = hn::Or(unsure, tie(i));
  }
  if (HWY_LIKELY(hn::AllFalse(du, unsure))) return;
  for (std::size_t i = 0; i < kCount; ++i) {
    if (hn::AllFalse(du, hn::Or(outside(size(i), hn::Sub(size(i), one)), tie(i)))) continue;
    const auto silu = Silu(d, x[i]);
    bits[i] = Bf16InUpperHalf(d, n == nullptr ? silu : hn::Mul(n[i], silu));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
