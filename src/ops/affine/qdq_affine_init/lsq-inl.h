// The method lsq: least squares for scale and bias, then the codes anew, until nothing changes.
//
// A slot holds a group while it converges, W slots are a bank. A round quantises every slot's group
// and leaves its sums as vectors; these are folded across lanes and the bank's W fits solved at
// once. A group that is done begins anew from the next of its starting ranges; after the last one
// its best is written out and its slot given to the next group, so no lane waits for the slowest
// group. One bank's solution overlaps the other's rounds.
#if defined(BITTERN_OPS_QDQ_AFFINE_INIT_LSQ_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_QDQ_AFFINE_INIT_LSQ_INL_H_
#undef BITTERN_OPS_QDQ_AFFINE_INIT_LSQ_INL_H_
#else
#define BITTERN_OPS_QDQ_AFFINE_INIT_LSQ_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <limits>

#include "cpu/reduce-inl.h"
#include "ops/affine/qdq_affine_init/affine_rules.h"
#include "ops/affine/qdq_affine_init/group_params-inl.h"
#include "ops/affine/qdq_affine_init/results-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

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
        n_(static_cast<F>(d.bins() - 1)),
        starts_(affine::lsq_starts(d.bins())) {}

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
        if ((bank.active & bit) != 0) {
          if (NextStart(bank, slot)) continue;
          Finish(bank, slot, out);
        }
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

  // s, b and 1 / s of the ranges after the first; s is NaN where there is none.
  static constexpr int kMoreStarts = affine::lsq_starts(2) - 1;
  struct Starts {
    HWY_ALIGN F s[kMoreStarts][kSlots] = {}, b[kMoreStarts][kSlots] = {};
    HWY_ALIGN F inverse[kMoreStarts][kSlots] = {};
  };
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
    int start[kSlots];                                                 // the range it began from
    F best_s[kSlots], best_b[kSlots], best_inverse[kSlots];
    double least[kSlots];  // their squared error
    Starts starts;
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
                              Chunk<X>& chunk, F* HWY_RESTRICT noughts) {
    V nought = hn::Load(D(), noughts);
    weights.Load(first, count, chunk);
    for (std::int64_t i = 0; i < kSlots; ++i) {
      FindRange<kSize>(size(), i, chunk, nought);
      weights.Prefetch(chunk.w[i]);
    }
    ComputeParams(d_, chunk);
    if (starts_ > 1) ComputeStarts(chunk);
    hn::Store(chunk.finite ? nought : hn::NaN(D()), D(), noughts);
  }

  // affine::lsq_start of all groups of the chunk.
  HWY_INLINE void ComputeStarts(const Chunk<X>& chunk) {
    const D d;
    const V s0 = hn::Load(d, chunk.s), b0 = hn::Load(d, chunk.b), zero = hn::Zero(d);
    const V range = hn::Mul(hn::Set(d, n_), s0);
    const auto ordinary = hn::Ne(hn::Load(d, chunk.inverse), zero);
    constexpr F kShares[] = {F(0.85), F(0.7), F(0.55)}, kShifts[] = {F(0.075), F(0.15), F(0.225)};
    static_assert(std::size(kShares) == kMoreStarts);
    for (int k = 0; k < kMoreStarts; ++k) {
      const V s = RoundTo(d_.scale_element(), hn::Mul(s0, hn::Set(d, kShares[k])));
      const V b = hn::Add(
          RoundTo(d_.scale_element(), hn::Add(b0, hn::Mul(range, hn::Set(d, kShifts[k])))), zero);
      const auto usable = hn::And(hn::Gt(s, zero), hn::IsFinite(b));
      hn::Store(hn::IfThenElse(usable, s, hn::NaN(d)), d, chunk_starts_.s[k]);
      hn::Store(b, d, chunk_starts_.b[k]);
      hn::Store(hn::IfThenElseZero(ordinary, InverseOf<F>(s, b)), d, chunk_starts_.inverse[k]);
    }
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
    for (int k = 0; k < kMoreStarts; ++k) {
      bank.starts.s[k][slot] = chunk_starts_.s[k][i];
      bank.starts.b[k][slot] = chunk_starts_.b[k][i];
      bank.starts.inverse[k][slot] = chunk_starts_.inverse[k][i];
    }
    bank.start[slot] = 0;
    Begin(bank, slot);
    SetBest(bank, slot, Error(bank, slot));
  }

  HWY_INLINE void Begin(Bank& bank, int slot) const {
    bank.last_s[slot] = std::numeric_limits<F>::quiet_NaN();
    bank.rounds[slot] = 0;
    Round(bank, slot);
  }
  HWY_INLINE void SetBest(Bank& bank, int slot, double error) const {
    bank.best_s[slot] = bank.s[slot];
    bank.best_b[slot] = bank.b[slot];
    bank.best_inverse[slot] = bank.inverse[slot];
    bank.least[slot] = error;
  }

  // What the slot's group came to is compared with its best. False: it has no range left.
  HWY_INLINE bool NextStart(Bank& bank, int slot) const {
    if (!IsBest(bank, slot)) {
      const double error = Error(bank, slot);
      if (affine::gains(bank.least[slot], error)) SetBest(bank, slot, error);
    }
    // Nothing gains on an error that is 0 or not finite.
    if (HWY_UNLIKELY(!(bank.least[slot] > 0 && bank.least[slot] <= max_finite<double>())))
      return false;
    while (++bank.start[slot] < starts_) {
      const int k = bank.start[slot] - 1;
      if (HWY_UNLIKELY(!(bank.starts.s[k][slot] > 0))) continue;
      bank.s[slot] = bank.starts.s[k][slot];
      bank.b[slot] = bank.starts.b[k][slot];
      bank.inverse[slot] = bank.starts.inverse[k][slot];
      Begin(bank, slot);
      return true;
    }
    return false;
  }
  static HWY_INLINE bool IsBest(const Bank& bank, int slot) {
    return bank.s[slot] == bank.best_s[slot] && bank.b[slot] == bank.best_b[slot];
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
    const std::int64_t g = bank.group[slot];
    const Slot& from = bank.slots[slot];
    HWY_ALIGN std::uint8_t padding[kSize != 0 ? 1 : kMaxGroup];
    // Slots finish in any order, so codes beyond a group's own must not be written.
    std::uint8_t* codes = out.codes + g * size();
    std::uint8_t* to = padded() == size() ? codes : padding;
    out.s[g] = bank.best_s[slot];
    out.b[g] = bank.best_b[slot];
    if (IsBest(bank, slot)) {
      StoreCodes(size(), bins_, [&](std::int64_t i) HWY_ATTR { return IntegersOf(from.q + i); },
                 {to, false});
    } else {
      Quantize<false, kOnce>(from.w, size(), bank.best_s[slot], bank.best_b[slot],
                             bank.best_inverse[slot], bins_, {to, false});
    }
    if (to != codes) std::memcpy(codes, to, static_cast<std::size_t>(size()));
  }

  const Op::Desc& d_;
  const float* importance_;
  std::int64_t size_;
  std::int32_t bins_;
  F n_;
  int starts_;
  Starts chunk_starts_;
  Bank banks_[kBanks];
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
