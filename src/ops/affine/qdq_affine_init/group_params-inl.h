// The scales and biases of W groups at a time, W the lanes of a vector, by minmax or mlx: each
// group's minimum and maximum is folded to one vector, W of those are folded across lanes at once,
// and the W scales and biases come from one vector computation.
#if defined(BITTERN_OPS_QDQ_AFFINE_INIT_GROUP_PARAMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_QDQ_AFFINE_INIT_GROUP_PARAMS_INL_H_
#undef BITTERN_OPS_QDQ_AFFINE_INIT_GROUP_PARAMS_INL_H_
#else
#define BITTERN_OPS_QDQ_AFFINE_INIT_GROUP_PARAMS_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <limits>
#include <span>

#include "cpu/stream-inl.h"
#include "ops/affine/qdq_affine_init/affine_rules.h"
#include "ops/affine/qdq_affine_init/blocks.h"
#include "ops/affine/qdq_affine_init/code_rows-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using affine::kMaxGroup;

// x rounded to a stored dtype and back.
HWY_INLINE Vector<float> RoundTo(DType dtype, Vector<float> x) {
  const Tag<float> d;
  if (dtype == DType::f16) return RoundMath<f16>(d, x);
  if (dtype == DType::bf16) return RoundMath<bf16>(d, x);
  return x;
}
HWY_INLINE Vector<double> RoundTo(DType, Vector<double> x) { return x; }

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

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
