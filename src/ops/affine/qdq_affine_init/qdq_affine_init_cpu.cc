// Groups are taken W at a time, W the lanes of a vector: each group's minimum and maximum is folded
// to one vector, W of those are folded across lanes at once, and the W scales and biases come from
// one vector computation. Then each group is quantised with its own pair.
#include "bittern/ops/qdq_affine_init.h"

#include <atomic>

#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/affine/qdq_affine_init/affine_rules.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/affine/qdq_affine_init/qdq_affine_init_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/pack-inl.h"
#include "cpu/reduce-inl.h"
#include "cpu/stream-inl.h"

#ifndef BITTERN_QDQ_AFFINE_INIT_BLOCKS_
#define BITTERN_QDQ_AFFINE_INIT_BLOCKS_
namespace bittern {
namespace {

constexpr std::int64_t kMaxGroup = 1024, kBlockGroups = 1024, kBlockCodes = 1 << 16;

// What threads share out: runs of groups whose codes pass through a buffer. A full block is whole
// words at every width; where a group is not, blocks start anew with each row, as words do.
struct Blocks {
  std::int64_t rows, row_groups, length;
  bool by_row;

  explicit Blocks(const AffineDesc& d) : rows(d.outer_size), row_groups(d.num_groups()) {
    // lsq idles while the last groups of a block converge, so its blocks are long.
    const std::int64_t codes = d.method == AffineMethod::lsq ? kBlockCodes : kBlockCodes / 8;
    length = std::clamp<std::int64_t>(codes / d.group_size / 32 * 32, 32, kBlockGroups);
    by_row = d.storage == CodeStorage::packed && d.group_size * d.code_bits() % 32 != 0;
  }
  std::int64_t per_row() const { return (row_groups + length - 1) / length; }
  std::int64_t size() const {
    return by_row ? rows * per_row() : (rows * row_groups + length - 1) / length;
  }
  struct Block {
    std::int64_t first, count;  // groups, counted through all rows
  };
  Block operator[](std::int64_t i) const {
    if (!by_row) return {i * length, std::min(length, rows * row_groups - i * length)};
    const std::int64_t k = i % per_row() * length;
    return {i / per_row() * row_groups + k, std::min(length, row_groups - k)};
  }
};

}  // namespace
}  // namespace bittern
#endif

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

// x rounded to a stored dtype and back.
HWY_INLINE Vector<float> RoundTo(DType dtype, Vector<float> x) {
  const Tag<float> d;
  if (dtype == DType::f16) {
    const hn::Rebind<hwy::float16_t, Tag<float>> dh;
    return hn::PromoteTo(d, hn::DemoteTo(dh, x));
  }
  if (dtype == DType::bf16) {
    const hn::RebindToUnsigned<Tag<float>> du;
    const auto u = hn::BitCast(du, x);
    const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 1u));
    const auto sum = hn::Add(hn::Add(u, hn::Set(du, 0x7fffu)), odd);
    const auto rounded = hn::BitCast(d, hn::And(sum, hn::Set(du, 0xffff0000u)));
    return hn::IfThenElse(hn::IsNaN(x), x, rounded);
  }
  return x;
}
HWY_INLINE Vector<double> RoundTo(DType, Vector<double> x) { return x; }

// ---- codes ----

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

// ---- W groups at a time ----

// Weights are of type X in memory: F, or a half type where a group is whole rows.
template <class X>
struct Chunk {
  using F = Math<X>;
  static constexpr bool kCopies = std::is_same_v<X, F>;
  static constexpr std::int64_t kGroups = kWidth<F>;
  const X* w[kGroups];                 // padded to whole rows
  HWY_ALIGN F s[kGroups], b[kGroups];  // as the codes use them
  HWY_ALIGN F inverse[kGroups];        // InverseOf, or 0 where some weight is not ordinary
  HWY_ALIGN F offset[kGroups];         // of Apart, or NaN where it does not accept the group
  HWY_ALIGN F stored_s[kGroups], stored_b[kGroups];
  Vector<F> low[kGroups], high[kGroups];  // whose lanes' least and greatest are min and max
  bool halved[kGroups];                   // the range overflows: codes by affine::minmax_code
  bool any_halved;
  bool finite;  // no range has infinite or NaN ends
  HWY_ALIGN F copies[kCopies ? kGroups * kMaxGroup : 1];
};

template <class X>
class Weights {
 public:
  using F = Math<X>;
  Weights(const Op::Desc& d, const ConstView& w)
      : data_(static_cast<const std::byte*>(w.data)),
        element_(d.element),
        row_bytes_(w.row_stride() * static_cast<std::int64_t>(size_of(d.element))),
        row_groups_(d.num_groups()),
        size_(d.group_size),
        copy_(d.element != dtype_of<X>() || d.group_size % kRow != 0) {}

  // Groups first ... first + W - 1; beyond `count` of them the last one stands in.
  HWY_INLINE void Load(std::int64_t first, std::int64_t count, Chunk<X>& c) const {
    const std::int64_t group_bytes = size_ * static_cast<std::int64_t>(size_of(element_));
    std::int64_t k = first % row_groups_;
    const std::byte* row = data_ + first / row_groups_ * row_bytes_;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::byte* at = row + k * group_bytes;
      if (++k == row_groups_) {
        k = 0;
        row += row_bytes_;
      }
      if constexpr (Chunk<X>::kCopies) {
        if (copy_) {
          F* to = c.copies + i * Padded(size_);
          PrefetchBesideWork(at, group_bytes);
          Copy(at, to);
          c.w[i] = to;
          continue;
        }
      }
      c.w[i] = reinterpret_cast<const X*>(at);
    }
    for (std::int64_t i = count; i < Chunk<X>::kGroups; ++i) c.w[i] = c.w[count - 1];
  }

  HWY_INLINE void Prefetch(const X* w) const {
    if (!copy_) PrefetchBesideWork(w, size_);
  }

 private:
  template <class From>
  HWY_INLINE void CopyFrom(const From* from, F* to) const {
    const Tag<F> d;
    std::int64_t i = 0;
    for (; i + kWidth<F> <= size_; i += kWidth<F>) hn::StoreU(LoadMath(d, from + i), d, to + i);
    for (; i < size_; ++i) to[i] = to_math(from[i]);
    for (; i < Padded(size_); ++i) to[i] = to[0];
  }
  HWY_NOINLINE void Copy(const std::byte* from, F* to) const {
    if constexpr (sizeof(F) == 8) {
      CopyFrom(reinterpret_cast<const double*>(from), to);
    } else if (element_ == DType::f32) {
      CopyFrom(reinterpret_cast<const float*>(from), to);
    } else if (element_ == DType::f16) {
      CopyFrom(reinterpret_cast<const f16*>(from), to);
    } else {
      CopyFrom(reinterpret_cast<const bf16*>(from), to);
    }
  }

  const std::byte* data_;
  DType element_;
  std::int64_t row_bytes_, row_groups_, size_;
  bool copy_;
};

template <class F>
F MaxFinite(DType dtype) {
  if constexpr (sizeof(F) == 4) {
    if (dtype == DType::f16) return max_finite<f16>();
    if (dtype == DType::bf16) return max_finite<bf16>();
  }
  return max_finite<F>();
}

// The groups whose range is not finite, one by one.
template <class X, class F = Math<X>>
HWY_NOINLINE void FixParams(const Op::Desc& d, Chunk<X>& c) {
  for (std::int64_t i = 0; i < Chunk<X>::kGroups; ++i) {
    F w[kMaxGroup];
    for (std::int64_t j = 0; j < d.group_size; ++j) w[j] = to_math(c.w[i][j]);
    const affine::Range<F> range =
        affine::finite_range(std::span<const F>(w, static_cast<std::size_t>(d.group_size)));
    c.halved[i] = range.overflows();
    c.any_halved |= c.halved[i];
    (void)visit_float(d.scale_element(), [&]<class S>(Type<S>) {
      if constexpr (std::is_same_v<Math<S>, F>) {
        const bool mlx = d.method == AffineMethod::mlx && !c.halved[i];
        const affine::Params<F> p =
            mlx ? affine::mlx_params(range, d.bins()) : affine::minmax_params<S>(range, d.bins());
        c.s[i] = p.s;
        c.b[i] = p.b;
        c.stored_s[i] = affine::stored<S>(p.s);
        c.stored_b[i] = affine::stored<S>(p.b);
      }
      return Status();
    });
  }
}

// kSize is the group size where it is known at compile time, otherwise 0. nought stays 0 as long as
// all weights are finite: 0 * x is NaN when x is not. bf16 has Chunk::finite instead.
template <int kSize, class F>
HWY_INLINE void FindRange(std::int64_t size, std::int64_t i, Chunk<F>& c, Vector<F>& nought) {
  const Tag<F> t;
  const F* w = c.w[i];
  // Min and Max give their second argument when one is NaN, so NaN weights drop out.
  Vector<F> low = hn::Set(t, std::numeric_limits<F>::infinity()), high = hn::Neg(low);
  const std::int64_t end = kSize != 0 ? kSize : Padded(size);
  HWY_UNROLL(4)
  for (std::int64_t j = 0; j < end; j += kWidth<F>) {
    const auto x = hn::LoadU(t, w + j);
    low = hn::Min(x, low);
    high = hn::Max(x, high);
    nought = hn::MulAdd(x, hn::Zero(t), nought);
  }
  c.low[i] = low;
  c.high[i] = high;
}

// Among the bits of bf16 as unsigned integers, the greatest is the least number where any is
// negative; as signed integers, the greatest number where any is not. NaN lies beyond infinity. So
// two maxima make the range of most groups, 2 * kRow weights in a vector: in low[i], the lower half
// for the least, the upper one, with signs changed, for the greatest.
template <int kSize>
HWY_INLINE void FindRange(std::int64_t size, std::int64_t i, Chunk<bf16>& c, Vector<float>&) {
  const hn::ScalableTag<std::uint16_t> d;
  const hn::ScalableTag<std::int16_t> ds;
  const auto* w = reinterpret_cast<const std::uint16_t*>(c.w[i]);
  auto least = hn::LoadU(d, w);
  auto greatest = hn::BitCast(ds, least);
  const std::int64_t end = kSize != 0 ? kSize : size;
  HWY_UNROLL(2)
  for (std::int64_t j = 2 * kRow; j < end; j += 2 * kRow) {
    const auto x = hn::LoadU(d, w + j);
    least = hn::Max(least, x);
    greatest = hn::Max(greatest, hn::BitCast(ds, x));
  }
  const auto other = hn::Xor(hn::BitCast(d, greatest), hn::Set(d, std::uint16_t{0x8000}));
  c.low[i] = hn::BitCast(Tag<float>(), hn::Max(hn::ConcatLowerLower(d, other, least),
                                               hn::ConcatUpperUpper(d, other, least)));
}

// The ranges of all groups.
template <class F>
struct Ranges {
  Vector<F> min, max;
};
template <class F>
HWY_INLINE Ranges<F> FoldRanges(const Op::Desc&, Chunk<F>& c) {
  const Tag<F> t;
  return {LaneFold(t, c.low, [](auto x, auto y) HWY_ATTR { return hn::Min(x, y); }),
          LaneFold(t, c.high, [](auto x, auto y) HWY_ATTR { return hn::Max(x, y); })};
}

// Groups of one sign: bf16 as signed integers of the same order.
HWY_NOINLINE void FixRanges(std::int64_t size, const Chunk<bf16>& c, float* min, float* max) {
  const auto ordered = [](std::int16_t x) {
    return static_cast<std::int16_t>(x ^ ((x >> 15) & 0x7fff));
  };
  const auto number = [&](std::int16_t key) { return to_math(std::bit_cast<bf16>(ordered(key))); };
  for (std::int64_t i = 0; i < Chunk<bf16>::kGroups; ++i) {
    const auto* w = reinterpret_cast<const std::int16_t*>(c.w[i]);
    std::int16_t low = 0x7fff, high = -0x8000;
    for (std::int64_t j = 0; j < size; ++j) {
      low = std::min(low, ordered(w[j]));
      high = std::max(high, ordered(w[j]));
    }
    min[i] = number(low);
    max[i] = number(high);
  }
}
HWY_INLINE Ranges<float> FoldRanges(const Op::Desc& d, Chunk<bf16>& c) {
  const hn::ScalableTag<std::uint16_t> d16;
  const hn::ScalableTag<std::uint32_t> d32;
  const hn::ScalableTag<std::uint64_t> d64;
  const hn::Half<decltype(d16)> half;
  using Keys = hn::Vec<decltype(d16)>;
  Keys v[8];
  for (std::int64_t i = 0; i < 8; ++i) {
    v[i] = hn::BitCast(d16, c.low[i]);
#if HWY_TARGET <= HWY_AVX3  // 16 groups: 128-bit blocks i, i, i + 8, i + 8
    const auto other = hn::BitCast(d16, c.low[i + 8]);
    v[i] = hn::Max(Keys{_mm512_shuffle_i64x2(v[i].raw, other.raw, 0x88)},
                   Keys{_mm512_shuffle_i64x2(v[i].raw, other.raw, 0xdd)});
#endif
  }
  // Of each block, the 8 integers: their order becomes that of v.
  const auto fold = [](auto wide, auto a, auto b) HWY_ATTR {
    const auto x = hn::BitCast(wide, a), y = hn::BitCast(wide, b);
    const hn::ScalableTag<std::uint16_t> narrow;
    return hn::Max(hn::BitCast(narrow, hn::InterleaveLower(wide, x, y)),
                   hn::BitCast(narrow, hn::InterleaveUpper(wide, x, y)));
  };
  const auto four = [&](const Keys* k) HWY_ATTR {
    return fold(d32, fold(d16, k[0], k[1]), fold(d16, k[2], k[3]));
  };
  auto keys = fold(d64, four(v), four(v + 4));
#if HWY_TARGET <= HWY_AVX3
  keys = Keys{_mm512_shuffle_i64x2(keys.raw, keys.raw, 0xd8)};
#endif
  const auto least = hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LowerHalf(half, keys)));
  const auto greatest = hn::Xor(hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::UpperHalf(half, keys))),
                                hn::Set(d32, 0x80000000u));
  const Tag<float> t;
  auto min = hn::BitCast(t, least), max = hn::BitCast(t, greatest);
  const auto both_signs = hn::BitCast(d32, hn::AndNot(greatest, least));
  if (HWY_UNLIKELY(!hn::AllTrue(d32, hn::Ne(hn::ShiftRight<31>(both_signs), hn::Zero(d32))))) {
    HWY_ALIGN float low[Chunk<bf16>::kGroups], high[Chunk<bf16>::kGroups];
    FixRanges(d.group_size, c, low, high);
    min = hn::Load(t, low);
    max = hn::Load(t, high);
  }
  return {min, max};
}

template <class X, class F = Math<X>>
HWY_NOINLINE void ComputeParams(const Op::Desc& d, Chunk<X>& c) {
  const Tag<F> t;
  const auto zero = hn::Zero(t);
  const auto n = hn::Set(t, static_cast<F>(d.bins() - 1));
  const auto [min, max] = FoldRanges(d, c);
  const auto range = hn::Sub(max, min);
  Vector<F> s = hn::Div(range, n), b = hn::Add(min, zero);
  auto divides_once = hn::Eq(zero, zero);
  const DType dtype = d.scale_element();
  if (d.method == AffineMethod::mlx) {
    s = hn::Max(s, hn::Set(t, F(1e-7)));
    if (d.bins() != 2) {
      const auto negative = hn::Gt(hn::Abs(min), hn::Abs(max));
      s = hn::IfThenElse(negative, s, hn::Neg(s));
      const auto edge = hn::IfThenElse(negative, min, max);
      const auto k = hn::Round(hn::Div(edge, s));
      const auto none = hn::Eq(k, zero);
      s = hn::IfThenElse(none, s, hn::Div(edge, k));
      b = hn::IfThenZeroElse(none, edge);
      divides_once = hn::Le(hn::Abs(k), hn::Set(t, F(255)));
    } else {
      divides_once = hn::Ne(zero, zero);
    }
    hn::Store(RoundTo(dtype, s), t, c.stored_s);
  } else {
    s = RoundTo(dtype, hn::Min(s, hn::Set(t, MaxFinite<F>(dtype))));
    s = hn::IfThenElse(hn::Gt(s, zero), s, hn::Set(t, F(1)));
    hn::Store(s, t, c.stored_s);
  }
  hn::Store(s, t, c.s);
  hn::Store(b, t, c.b);
  hn::Store(b, t, c.stored_b);  // a weight, so exact
  c.any_halved = false;
  const auto size = hn::Max(hn::Abs(min), hn::Abs(max));
  auto ordinary = hn::Lt(size, hn::Set(t, static_cast<F>(kOrdinary)));
  if constexpr (std::is_same_v<X, bf16>) ordinary = hn::And(ordinary, divides_once);
  const auto inverse = hn::IfThenElseZero(ordinary, InverseOf<F>(s, b));
  hn::Store(inverse, t, c.inverse);
  if constexpr (std::is_same_v<X, bf16>) {
    if (d.method == AffineMethod::minmax) {
      const Apart apart = FindApart(d.bins(), range, s, b, inverse);
      const auto accepted = hn::And(hn::Ne(inverse, zero), apart.accepted);
      hn::Store(hn::IfThenElse(accepted, apart.offset, hn::NaN(t)), t, c.offset);
    }
  }
  c.finite = true;
  if (HWY_UNLIKELY(!hn::AllTrue(t, hn::IsFinite(range)))) {
    c.finite = hn::AllTrue(t, hn::And(hn::IsFinite(min), hn::IsFinite(max)));
    hn::Store(zero, t, c.inverse);  // it was not of the s that FixParams finds
    hn::Store(hn::NaN(t), t, c.offset);
    FixParams(d, c);
  } else {
    std::fill_n(c.halved, Chunk<X>::kGroups, false);
  }
}

template <class X>
HWY_NOINLINE void QuantizeHalved(const Op::Desc& d, const X* w, const affine::Params<Math<X>>& p,
                                 CodeRow to) {
  for (std::int64_t j = 0; j < d.group_size; ++j) {
    const std::uint8_t code = affine::minmax_code(to_math(w[j]), p, d.bins(), true);
    if (!to.nibbles) {
      to.codes[j] = code;
    } else if (j % 2 == 0) {
      to.codes[j / 2] = code;
    } else {
      to.codes[j / 2] = static_cast<std::uint8_t>(to.codes[j / 2] | code << 4);
    }
  }
}

// ---- a block's results ----

template <class F>
struct Results {
  HWY_ALIGN F s[kBlockGroups + kWidth<F>], b[kBlockGroups + kWidth<F>];
  HWY_ALIGN std::uint8_t codes[kBlockCodes + kRow];
  HWY_ALIGN F nought[kWidth<F>] = {};  // of all blocks so far, see FindRange
};

template <class F>
HWY_NOINLINE void StoreParams(const F* HWY_RESTRICT from, std::int64_t first, std::int64_t count,
                              const MutView& to) {
  (void)visit_float(to.dtype, [&]<class S>(Type<S>) {
    if constexpr (std::is_same_v<Math<S>, F>) {
      const Tag<F> t;
      S* p = to.as<S>() + first;
      std::int64_t i = 0;
      for (; i + kWidth<F> <= count; i += kWidth<F>) StoreMath(t, hn::LoadU(t, from + i), p + i);
      for (; i < count; ++i) p[i] = from_math<S>(from[i]);
    }
    return Status();
  });
}

// Codes from the buffer to where they belong, streamed when there are many. `nibbles`: they are
// packed already.
class CodeWriter {
 public:
  HWY_NOINLINE CodeWriter(const Op::Desc& d, const MutView& q, bool nibbles)
      : packer_(d.code_bits()),
        q_(static_cast<std::uint8_t*>(q.data)),
        packed_(d.storage == CodeStorage::packed),
        nibbles_(nibbles),
        bits_(d.code_bits()),
        row_groups_(d.num_groups()),
        size_(d.group_size),
        row_bytes_(q.row_stride() * static_cast<std::int64_t>(size_of(q.dtype))),
        stream_(d.code_shape().numel() * static_cast<std::int64_t>(size_of(q.dtype)) >=
                    kStreamBytes ||
                cpu::grain_ignored()) {}

  HWY_NOINLINE void Write(std::int64_t first, std::int64_t count, const std::uint8_t* codes) const {
    while (count > 0) {
      const std::int64_t row = first / row_groups_, k = first % row_groups_;
      const std::int64_t groups = std::min(count, row_groups_ - k);
      std::uint8_t* to = q_ + row * row_bytes_;
      if (nibbles_) {
        EmitLines(codes, static_cast<std::size_t>(groups * size_ / 2), to + k * size_ / 2, stream_);
        codes -= groups * size_ / 2;
      } else if (packed_) {
        Pack(codes, groups * size_, to + k * size_ * bits_ / 8);
      } else {
        EmitLines(codes, static_cast<std::size_t>(groups * size_), to + k * size_, stream_);
      }
      codes += groups * size_;
      first += groups;
      count -= groups;
    }
  }
  void Finish() const {
    if (stream_) hwy::FlushStream();
  }

 private:
  // Lines are assembled in L1: codes need not fill them evenly.
  void Pack(const std::uint8_t* codes, std::int64_t count, std::uint8_t* to) const {
    constexpr std::int64_t kPiece = 4096;
    HWY_ALIGN std::uint8_t buffer[kPiece];
    for (std::int64_t i = 0; i < count; i += kPiece) {
      const auto n = static_cast<std::size_t>(std::min(kPiece, count - i));
      const std::size_t used = packer_.Bytes(n), whole = (used + 3) / 4 * 4;
      packer_.Pack(codes + i, n, buffer);
      std::memset(buffer + used, 0, whole - used);
      EmitLines(buffer, whole, to + i * bits_ / 8, stream_);
    }
  }

  CodePacker packer_;
  std::uint8_t* q_;
  bool packed_, nibbles_;
  std::int64_t bits_, row_groups_, size_, row_bytes_;
  bool stream_;
};

// ---- minmax and mlx ----

template <bool kHalfEven, bool kOnce, class X>
HWY_INLINE void QuantizeGroup(const Chunk<X>& c, std::int64_t i, std::int64_t size,
                              std::int32_t bins, CodeRow to) {
  if constexpr (std::is_same_v<X, bf16> && kOnce && !kHalfEven) {
    const float offset = c.offset[i];
    if (HWY_LIKELY(offset == offset)) {
      const Tag<float> t;
      const Step<float, Division::apart> step{hn::Set(t, c.inverse[i]), hn::Set(t, offset)};
      return StorePairCodes<false>(
          size, bins, [&](std::int64_t j) HWY_ATTR { return PairCodes<true>(c.w[i] + j, step); },
          to);
    }
  }
  Quantize<kHalfEven, kOnce>(c.w[i], size, c.s[i], c.b[i], c.inverse[i], bins, to);
}

template <bool kHalfEven, bool kOnce, int kSize, class X, class F = Math<X>>
HWY_INLINE void DirectBlock(const Op::Desc& d, const Weights<X>& weights, std::int64_t first,
                            std::int64_t count, bool nibbles, Chunk<X>* chunks, Results<F>& out) {
  constexpr std::int64_t kGroups = Chunk<X>::kGroups;
  const Tag<F> t;
  const std::int64_t size = kSize != 0 ? kSize : d.group_size;
  const std::int32_t bins = d.bins();
  const auto row = [&](std::int64_t group) {
    return CodeRow{out.codes + (nibbles ? group * size / 2 : group * size), nibbles};
  };
  Chunk<X>* now = chunks;
  Chunk<X>* after = chunks + 1;
  Vector<F> nought = hn::Load(t, out.nought);
  weights.Load(first, std::min(kGroups, count), *after);
  for (std::int64_t i = 0; i < kGroups; ++i) FindRange<kSize>(size, i, *after, nought);
  for (std::int64_t g = 0; g < count; g += kGroups) {
    std::swap(now, after);
    ComputeParams(d, *now);
    if (HWY_UNLIKELY(!now->finite)) nought = hn::NaN(t);
    hn::StoreU(hn::Load(t, now->stored_s), t, out.s + g);
    hn::StoreU(hn::Load(t, now->stored_b), t, out.b + g);
    const std::int64_t rest = count - g - kGroups;
    if (rest > 0) weights.Load(first + g + kGroups, std::min(kGroups, rest), *after);
    // In order: the padding behind a group's codes is overwritten by the next group's. The next
    // chunk's ranges fill the time the divisions take.
    for (std::int64_t i = 0; i < std::min(kGroups, count - g); ++i) {
      QuantizeGroup<kHalfEven, kOnce>(*now, i, size, bins, row(g + i));
      if (rest > 0) {
        FindRange<kSize>(size, i, *after, nought);
        weights.Prefetch(after->w[i]);
      }
    }
    if (HWY_UNLIKELY(now->any_halved)) {
      for (std::int64_t i = 0; i < std::min(kGroups, count - g); ++i)
        if (now->halved[i]) QuantizeHalved(d, now->w[i], {now->s[i], now->b[i]}, row(g + i));
    }
  }
  hn::Store(nought, t, out.nought);
}

// ---- lsq ----

// A slot holds a group while it converges, W slots are a bank. A round quantises every slot's group
// and leaves its sums as vectors; these are folded across lanes and the bank's W fits solved at
// once. A group that is done is written out and its slot given to the next one, so no lane waits
// for the slowest group. One bank's solution overlaps the other's rounds.

// f64 terms of a vector of f32: the upper half are the odd rows of half the width.
struct WideTerms {
  Vector<double> lower, upper;
};
HWY_INLINE WideTerms Widen(Vector<float> x) {
  const Tag<double> d;
  const hn::Half<Tag<float>> dh;
  return {hn::PromoteTo(d, hn::LowerHalf(dh, x)), hn::PromoteTo(d, hn::UpperHalf(dh, x))};
}
HWY_INLINE Vector<double> Widen(Vector<double> x) { return x; }
HWY_INLINE WideTerms Plus(WideTerms a, WideTerms b) {
  return {hn::Add(a.lower, b.lower), hn::Add(a.upper, b.upper)};
}
HWY_INLINE WideTerms ZeroTerms(Tag<float> d, Type<WideTerms>) { return Widen(hn::Zero(d)); }
HWY_INLINE WideTerms Times(WideTerms a, WideTerms b) {
  return {hn::Mul(a.lower, b.lower), hn::Mul(a.upper, b.upper)};
}
HWY_INLINE Vector<double> Times(Vector<double> a, Vector<double> b) { return hn::Mul(a, b); }
HWY_INLINE Vector<double> Folded(WideTerms v) { return hn::Add(v.lower, v.upper); }
HWY_INLINE Vector<double> Folded(Vector<double> v) { return v; }

template <class F>
struct FitTerms {  // of sum c q, sum c q q and sum c q u
  Vector<F> q, qq, qu;
};
template <class F>
HWY_INLINE FitTerms<F> Plus(FitTerms<F> a, FitTerms<F> b) {
  return {hn::Add(a.q, b.q), hn::Add(a.qq, b.qq), hn::Add(a.qu, b.qu)};
}
template <class F>
HWY_INLINE FitTerms<F> ZeroTerms(Tag<F> d, Type<FitTerms<F>>) {
  return {hn::Zero(d), hn::Zero(d), hn::Zero(d)};
}

// The tree over all lanes.
template <class D>
HWY_INLINE hn::TFromD<D> FoldLanes(D, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(D()) == 1) {
    return hn::GetLane(v);
  } else {
    const hn::Half<D> dh;
    return FoldLanes(dh, hn::Add(hn::LowerHalf(dh, v), hn::UpperHalf(dh, v)));
  }
}

template <class X, bool kOnce, bool kWeighted, int kSize>
class Lsq {
  using F = Math<X>;

 public:
  Lsq(const Op::Desc& d, const Op::Args& a)
      : d_(d),
        importance_(a.importance.as<float>()),
        size_(d.group_size),
        bins_(d.bins()),
        n_(static_cast<F>(d.bins() - 1)) {}

  void Block(const Weights<X>& weights, std::int64_t first, std::int64_t count, Chunk<X>& chunk,
             Results<F>& out) {
    std::int64_t next = 0;
    for (int turn = 0;; ++turn) {
      Bank& bank = banks_[turn % kBanks];
      const std::uint32_t done = Solve(bank) | ~bank.active;
      // The other bank's rounds keep the core busy until it is known which slots are done.
      if (kBanks > 1) Rounds(banks_[(turn + 1) % kBanks]);
      for (std::uint32_t m = done & kAllSlots; m != 0; m &= m - 1) {
        const int slot = std::countr_zero(m);
        const std::uint32_t bit = 1u << slot;
        if ((bank.active & bit) != 0) Finish(bank, slot, out);
        bank.active &= ~bit;
        for (; next < count && (bank.active & bit) == 0; ++next) {
          const std::int64_t i = next % kSlots;
          if (i == 0)
            LoadChunk(weights, first + next, std::min(kSlots, count - next), chunk, out.nought);
          if (HWY_UNLIKELY(chunk.any_halved && chunk.halved[i])) {
            out.s[next] = chunk.s[i];
            out.b[next] = chunk.b[i];
            QuantizeHalved(d_, chunk.w[i], {chunk.s[i], chunk.b[i]},
                           {out.codes + next * size(), false});
            continue;
          }
          bank.group[slot] = next;
          bank.active |= bit;
          Start(bank, slot, chunk, i, first + next);
        }
      }
      bank.pending = bank.active & ~done;
      if (kBanks == 1) Rounds(bank);
      if ((banks_[0].active | banks_[kBanks - 1].active) == 0) return;
    }
  }

 private:
  static constexpr std::int64_t kSlots = kWidth<F>;
  static constexpr std::uint32_t kAllSlots = (1u << kSlots) - 1;
  static constexpr int kBanks = kSize != 0 ? 2 : 1;
  static constexpr std::int64_t kCapacity = kSize != 0 ? kSize : kMaxGroup;
  static constexpr F kUp = sizeof(F) == 4 ? F(0x1.fffffep-2f) : F(0x1.fffffffffffffp-2);
  using D = Tag<F>;
  using V = Vector<F>;

  struct Slot {
    HWY_ALIGN F w[kCapacity], u[kCapacity], q[kCapacity], c[kWeighted ? kCapacity : 1];
  };
  struct Bank {
    std::uint32_t active = 0, pending = 0;  // slots in use; of those, to be quantised anew
    std::int64_t group[kSlots];
    HWY_ALIGN F s[kSlots] = {}, b[kSlots] = {}, s0[kSlots] = {}, b0[kSlots] = {};
    HWY_ALIGN F last_s[kSlots] = {}, last_b[kSlots] = {};  // before s and b, or NaN
    // Of s; of s0, 0 where a weight is not ordinary.
    HWY_ALIGN F inverse[kSlots] = {}, inverse0[kSlots] = {};
    HWY_ALIGN F c[kSlots] = {}, cu[kSlots] = {}, rounds[kSlots] = {};  // c, cu: sums of c, of c u
    double error0[kSlots];
    HWY_ALIGN F q[kSlots * kSlots] = {}, qq[kSlots * kSlots] = {}, qu[kSlots * kSlots] = {};
    Slot slots[kSlots];
  };

  std::int64_t size() const { return kSize != 0 ? kSize : size_; }
  std::int64_t padded() const { return kSize != 0 ? kSize : Padded(size_); }

  template <class Leaf>
  HWY_INLINE auto Tree(const Leaf& leaf) const {
    if constexpr (kSize != 0) {
      return FewRows<kSize / kSlots>(D(), leaf, 0, 1);
    } else {
      return AnyTree(leaf);
    }
  }
  template <class Leaf>
  HWY_NOINLINE auto AnyTree(const Leaf& leaf) const {
    return RowTree(D(), size_, leaf);
  }

  template <Division kDivision>
  struct RoundLeaf {
    Slot& slot;
    Step<F, kDivision> step;
    HWY_INLINE FitTerms<F> operator()(std::int64_t i) const {
      const D d;
      const V z = step.Quotient(hn::Load(d, slot.w + i));
      const V q = hn::Trunc(hn::Add(hn::Max(z, hn::Zero(d)), hn::Set(d, kUp)));
      hn::Store(q, d, slot.q + i);
      const V cq = kWeighted ? hn::Mul(hn::Load(d, slot.c + i), q) : q;
      return {cq, hn::Mul(cq, q), hn::Mul(cq, hn::Load(d, slot.u + i))};
    }
    HWY_INLINE FitTerms<F> operator()(std::int64_t i, std::int64_t count) const {
      const auto first = hn::FirstN(D(), static_cast<std::size_t>(count));
      const auto t = (*this)(i);
      return {hn::IfThenElseZero(first, t.q), hn::IfThenElseZero(first, t.qq),
              hn::IfThenElseZero(first, t.qu)};
    }
  };

  struct ErrorLeaf {
    const Slot& slot;
    V s, b;
    HWY_INLINE auto operator()(std::int64_t i) const { return Terms(i, Difference(i)); }
    HWY_INLINE auto operator()(std::int64_t i, std::int64_t count) const {
      const auto first = hn::FirstN(D(), static_cast<std::size_t>(count));
      return Terms(i, hn::IfThenElseZero(first, Difference(i)));
    }
    HWY_INLINE V Difference(std::int64_t i) const {
      const D d;
      return hn::Sub(hn::Load(d, slot.w + i), hn::MulAdd(hn::Load(d, slot.q + i), s, b));
    }
    HWY_INLINE auto Terms(std::int64_t i, V difference) const {
      const auto wide = Widen(difference);
      const auto square = Times(wide, wide);
      if constexpr (!kWeighted) {
        return square;
      } else {
        return Times(Widen(hn::Load(D(), slot.c + i)), square);
      }
    }
  };

  // Terms as they are in memory, and +0 beyond them.
  struct LoadLeaf {
    const F* from;
    HWY_INLINE V operator()(std::int64_t i) const { return hn::Load(D(), from + i); }
    HWY_INLINE V operator()(std::int64_t i, std::int64_t count) const {
      return hn::IfThenElseZero(hn::FirstN(D(), static_cast<std::size_t>(count)), (*this)(i));
    }
  };
  struct WeightedLeaf {
    const F* c;
    const F* u;
    HWY_INLINE V operator()(std::int64_t i) const {
      return hn::Mul(hn::Load(D(), c + i), hn::Load(D(), u + i));
    }
    HWY_INLINE V operator()(std::int64_t i, std::int64_t count) const {
      return hn::IfThenElseZero(hn::FirstN(D(), static_cast<std::size_t>(count)), (*this)(i));
    }
  };

  HWY_NOINLINE void LoadChunk(const Weights<X>& weights, std::int64_t first, std::int64_t count,
                              Chunk<X>& chunk, F* HWY_RESTRICT noughts) const {
    V nought = hn::Load(D(), noughts);
    weights.Load(first, count, chunk);
    for (std::int64_t i = 0; i < kSlots; ++i) {
      FindRange<kSize>(size(), i, chunk, nought);
      weights.Prefetch(chunk.w[i]);
    }
    ComputeParams(d_, chunk);
    hn::Store(chunk.finite ? nought : hn::NaN(D()), D(), noughts);
  }

  HWY_INLINE void Start(Bank& bank, int slot, const Chunk<X>& chunk, std::int64_t i,
                        std::int64_t group) const {
    const D d;
    Slot& to = bank.slots[slot];
    const V b0 = hn::Set(d, chunk.b[i]);
    for (std::int64_t j = 0; j < padded(); j += kSlots) {
      const V w = LoadMath(d, chunk.w[i] + j);
      hn::Store(w, d, to.w + j);
      hn::Store(hn::Sub(w, b0), d, to.u + j);
    }
    if constexpr (kWeighted) {
      const float* importance = importance_ + group % d_.num_groups() * size();
      for (std::int64_t j = 0; j < padded(); ++j) {
        const float c = importance[std::min(j, size() - 1)];
        to.c[j] = c > 0 && c <= max_finite<float>() ? static_cast<F>(c) : F(0);
      }
      bank.c[slot] = FoldLanes(d, Tree(LoadLeaf{to.c}));
      bank.cu[slot] = FoldLanes(d, Tree(WeightedLeaf{to.c, to.u}));
    } else {
      bank.c[slot] = static_cast<F>(size());
      bank.cu[slot] = FoldLanes(d, Tree(LoadLeaf{to.u}));
    }
    bank.s[slot] = bank.s0[slot] = chunk.s[i];
    bank.b[slot] = bank.b0[slot] = chunk.b[i];
    bank.inverse[slot] = bank.inverse0[slot] = chunk.inverse[i];
    bank.last_s[slot] = std::numeric_limits<F>::quiet_NaN();
    bank.rounds[slot] = 0;
    Round(bank, slot);
    bank.error0[slot] = Error(bank, slot);
  }

  // Codes for the slot's s and b, and their sums.
  HWY_INLINE void Round(Bank& bank, int i) const {
    if (HWY_LIKELY(sizeof(F) == 4 && bank.inverse[i] != 0)) {
      RoundBy<kOnce ? Division::once : Division::near>(bank, i);
    } else {
      RoundBy<Division::ieee>(bank, i);
    }
  }
  template <Division kDivision>
  HWY_INLINE void RoundBy(Bank& bank, int i) const {
    const D d;
    const FitTerms<F> t = Tree(RoundLeaf<kDivision>{
        bank.slots[i], Step<F, kDivision>(bank.s[i], bank.b[i], bank.inverse[i], n_)});
    hn::Store(t.q, d, bank.q + i * kSlots);
    hn::Store(t.qq, d, bank.qq + i * kSlots);
    hn::Store(t.qu, d, bank.qu + i * kSlots);
  }

  HWY_INLINE void Rounds(Bank& bank) const {
    for (; bank.pending != 0; bank.pending &= bank.pending - 1)
      Round(bank, std::countr_zero(bank.pending));
  }

  // The squared error of the slot's codes.
  HWY_INLINE double Error(const Bank& bank, int i) const {
    const D d;
    const auto t = Tree(ErrorLeaf{bank.slots[i], hn::Set(d, bank.s[i]), hn::Set(d, bank.b[i])});
    return FoldLanes(Tag<double>(), Folded(t));
  }

  // The tree over the lanes of each slot's vector.
  static HWY_INLINE V Fold(const F* terms) {
    V v[kSlots];
    for (std::int64_t i = 0; i < kSlots; ++i) v[i] = hn::Load(D(), terms + i * kSlots);
    return LaneTrees(D(), v);
  }

  struct Fit {
    Vector<double> s, b;
  };
  static HWY_INLINE Fit SolveWide(Vector<double> c, Vector<double> q, Vector<double> qq,
                                  Vector<double> u, Vector<double> qu, Vector<double> b0) {
    const auto one = hn::Set(Tag<double>(), 1.0);
    const auto r = hn::Div(one, hn::Sub(hn::Mul(c, qq), hn::Mul(q, q)));
    const auto s = hn::Mul(hn::Sub(hn::Mul(c, qu), hn::Mul(q, u)), r);
    const auto b = hn::Add(b0, hn::Mul(hn::Sub(hn::Mul(qq, u), hn::Mul(q, qu)), r));
    return {s, b};
  }

  // Fits all slots. Those that have not converged get the new s and b; the others are the answer.
  HWY_INLINE std::uint32_t Solve(Bank& bank) const {
    const D d;
    const auto c = Widen(hn::Load(d, bank.c)), q = Widen(Fold(bank.q)), qq = Widen(Fold(bank.qq)),
               u = Widen(hn::Load(d, bank.cu)), qu = Widen(Fold(bank.qu)),
               b0 = Widen(hn::Load(d, bank.b0));
    V s, b;
    if constexpr (sizeof(F) == 8) {
      const Fit fit = SolveWide(c, q, qq, u, qu, b0);
      s = fit.s;
      b = fit.b;
    } else {
      const hn::Half<D> dh;
      const Fit lower = SolveWide(c.lower, q.lower, qq.lower, u.lower, qu.lower, b0.lower);
      const Fit upper = SolveWide(c.upper, q.upper, qq.upper, u.upper, qu.upper, b0.upper);
      s = hn::Combine(d, hn::DemoteTo(dh, upper.s), hn::DemoteTo(dh, lower.s));
      b = hn::Combine(d, hn::DemoteTo(dh, upper.b), hn::DemoteTo(dh, lower.b));
    }
    const DType dtype = d_.scale_element();
    const auto zero = hn::Zero(d);
    s = RoundTo(dtype, s);
    b = hn::Add(RoundTo(dtype, b), zero);
    const V s_now = hn::Load(d, bank.s), b_now = hn::Load(d, bank.b);
    V rounds = hn::Load(d, bank.rounds);
    const auto usable = hn::And(hn::Gt(s, zero), hn::And(hn::IsFinite(s), hn::IsFinite(b)));
    const auto moved = hn::Or(hn::Ne(s, s_now), hn::Ne(b, b_now));
    auto goes_on = hn::And(hn::And(usable, moved), hn::Lt(rounds, hn::Set(d, F(20))));
    if constexpr (kOnce) {
      // Stored as halves, s and b may come and go between two values: round 20 then gives the one
      // of even rounds.
      const auto returns =
          hn::And(hn::Eq(s, hn::Load(d, bank.last_s)), hn::Eq(b, hn::Load(d, bank.last_b)));
      const V half = hn::Mul(rounds, hn::Set(d, F(0.5)));
      const auto even = hn::Eq(hn::Round(half), half);
      goes_on = hn::AndNot(hn::And(returns, even), goes_on);
      rounds = hn::IfThenElse(returns, hn::Set(d, F(19)), rounds);
      hn::Store(s_now, d, bank.last_s);
      hn::Store(b_now, d, bank.last_b);
    }
    const V s_next = hn::IfThenElse(goes_on, s, s_now), b_next = hn::IfThenElse(goes_on, b, b_now);
    hn::Store(s_next, d, bank.s);
    hn::Store(b_next, d, bank.b);
    const auto ordinary = hn::Ne(hn::Load(d, bank.inverse0), zero);
    hn::Store(hn::IfThenElseZero(ordinary, InverseOf<F>(s_next, b_next)), d, bank.inverse);
    hn::Store(hn::Add(rounds, hn::Set(d, F(1))), d, bank.rounds);
    std::uint8_t bits[8] = {};
    hn::StoreMaskBits(d, goes_on, bits);
    return ~(bits[0] | static_cast<std::uint32_t>(bits[1]) << 8);
  }
  static HWY_INLINE auto IntegersOf(const float* q) {
    return RoundedCodes<true>(hn::Load(Tag<float>(), q));
  }
  static HWY_INLINE auto IntegersOf(const double* q) {
    const Tag<double> t;
    const hn::Half<Tag<float>> dh;
    return RoundedCodes<true>(hn::Combine(Tag<float>(),
                                          hn::DemoteTo(dh, hn::Load(t, q + kWidth<double>)),
                                          hn::DemoteTo(dh, hn::Load(t, q))));
  }

  HWY_INLINE void Finish(Bank& bank, int slot, Results<F>& out) const {
    const double error = Error(bank, slot), error0 = bank.error0[slot];
    const std::int64_t g = bank.group[slot];
    const Slot& from = bank.slots[slot];
    HWY_ALIGN std::uint8_t padding[kSize != 0 ? 1 : kMaxGroup];
    // Slots finish in any order, so codes beyond a group's own must not be written.
    std::uint8_t* codes = out.codes + g * size();
    std::uint8_t* to = padded() == size() ? codes : padding;
    if (HWY_LIKELY(error0 >= 0x1p-800 && error0 <= max_finite<double>() &&
                   error < error0 * (1 - 0x1p-20))) {
      out.s[g] = bank.s[slot];
      out.b[g] = bank.b[slot];
      StoreCodes(size(), bins_, [&](std::int64_t i) HWY_ATTR { return IntegersOf(from.q + i); },
                 {to, false});
    } else {
      out.s[g] = bank.s0[slot];
      out.b[g] = bank.b0[slot];
      Quantize<false, kOnce>(from.w, size(), bank.s0[slot], bank.b0[slot], bank.inverse0[slot],
                             bins_, {to, false});
    }
    if (to != codes) std::memcpy(codes, to, static_cast<std::size_t>(size()));
  }

  const Op::Desc& d_;
  const float* importance_;
  std::int64_t size_;
  std::int32_t bins_;
  F n_;
  Bank banks_[kBanks];
};

// Calls compute(first, count, results) for each block, and writes the results. False when a weight
// is not finite.
template <class F, class Compute>
HWY_INLINE bool ForBlocks(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                          std::int64_t end, bool nibbles, const Compute& compute) {
  const Blocks blocks(d);
  const CodeWriter writer(d, a.q, nibbles);
  Results<F> results;
  for (std::int64_t i = begin; i < end; ++i) {
    const auto [first, count] = blocks[i];
    compute(first, count, results);
    StoreParams(results.s, first, count, a.scales);
    StoreParams(results.b, first, count, a.biases);
    writer.Write(first, count, results.codes);
  }
  writer.Finish();
  return hn::AllTrue(Tag<F>(), hn::Eq(hn::Load(Tag<F>(), results.nought), hn::Zero(Tag<F>())));
}

template <class X, bool kOnce, bool kWeighted, int kSize>
HWY_NOINLINE bool InitLsq(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                          std::int64_t end) {
  using F = Math<X>;
  const Weights<X> weights(d, a.w);
  Chunk<X> chunk;
  Lsq<X, kOnce, kWeighted, kSize> lsq(d, a);
  return ForBlocks<F>(d, a, begin, end, false,
                      [&](std::int64_t first, std::int64_t count, Results<F>& results)
                          HWY_ATTR { lsq.Block(weights, first, count, chunk, results); });
}

template <class X, bool kOnce, bool kHalfEven, int kSize>
HWY_NOINLINE bool InitDirect(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                             std::int64_t end) {
  using F = Math<X>;
  const Weights<X> weights(d, a.w);
  Chunk<X> chunks[2];
  const bool nibbles = kSize % (4 * kRow) == 0 && kSize != 0 && sizeof(F) == 4 &&
                       d.storage == CodeStorage::packed && d.code_bits() == 4;
  return ForBlocks<F>(d, a, begin, end, nibbles,
                      [&](std::int64_t first, std::int64_t count, Results<F>& results) HWY_ATTR {
                        DirectBlock<kHalfEven, kOnce, kSize>(d, weights, first, count, nibbles,
                                                             chunks, results);
                      });
}

template <class X, bool kShortScale, int kSize>
bool InitAs(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  switch (d.method) {
    case AffineMethod::minmax: return InitDirect<X, kShortScale, false, kSize>(d, a, begin, end);
    case AffineMethod::mlx:
      return InitDirect<X, std::is_same_v<X, bf16>, true, kSize>(d, a, begin, end);
    case AffineMethod::lsq: break;
  }
  if (a.importance) return InitLsq<X, kShortScale, true, 0>(d, a, begin, end);
  return InitLsq<X, kShortScale, false, kSize>(d, a, begin, end);
}

template <class X, bool kShortScale>
bool InitSized(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  if (d.group_size == 64) return InitAs<X, kShortScale, 64>(d, a, begin, end);
  return InitAs<X, kShortScale, 0>(d, a, begin, end);
}

// bf16, which most models have, is read as it is where groups are whole pairs of rows; other halves
// by way of f32 copies.
bool InitBlocks(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  if (d.element == DType::f64) return InitAs<double, false, 0>(d, a, begin, end);
  const bool short_scale = d.scale_element() != DType::f32;
  if (d.element == DType::bf16 && d.group_size % (2 * kRow) == 0) {
    return short_scale ? InitSized<bf16, true>(d, a, begin, end)
                       : InitSized<bf16, false>(d, a, begin, end);
  }
  return short_scale ? InitSized<float, true>(d, a, begin, end)
                     : InitSized<float, false>(d, a, begin, end);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = QdqAffineInit;
BITTERN_EXPORT(InitBlocks);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const Blocks blocks(d);
  const std::int64_t grain = (std::int64_t{1} << 16) / (blocks.length * d.group_size);
  std::atomic<bool> finite = true;
  cpu::parallel(blocks.size(), grain, [&](std::int64_t begin, std::int64_t end) {
    if (!BITTERN_CALL(InitBlocks)(d, a, begin, end)) finite = false;
  });
  return finite || !d.expect_finite ? Status() : Op::not_finite();
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<QdqAffineInit>> qdq_affine_init_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
