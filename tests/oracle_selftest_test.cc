// The oracle is itself tested: kernels that are wrong in the ways kernels usually are must be
// caught, and the same scaffolding with the right formula must pass.
#include <gtest/gtest.h>

#include "oracle/oracle_impl.h"

namespace bittern {
namespace {

using oracle::Report;
using oracle::Settings;

template <class Op>
Report judge(Status (*run)(const typename Op::Desc&, const typename Op::Args&, Stream, Workspace)) {
  const Kernel<Op> kernel{.name = "candidate", .backend = "cpu", .run = run};
  Report report;
  Settings settings;
  for (const auto& desc : oracle::Cases<Op>::check()) {
    report.add(oracle::parity<Op>(desc, settings, &kernel));
    ++settings.seed;
    if (!report.failures.empty()) break;
  }
  return report;
}

#define EXPECT_CAUGHT(OP, RUN) EXPECT_FALSE(judge<OP>(RUN).failures.empty()) << "not caught: " #RUN
#define EXPECT_ACCEPTED(OP, RUN)                                \
  if (const Report accepted = judge<OP>(RUN); true) {           \
    for (const auto& f : accepted.failures) ADD_FAILURE() << f; \
    EXPECT_GT(accepted.compared, 100);                          \
  }

// ---- quantize_per_group: one element at a time, with the rule as a parameter ----

struct Rule {
  template <class F>
  static std::int32_t code(F x, F s, std::int32_t zp, std::int32_t lo, std::int32_t hi) {
    return quantize_code(quotient(x, s), zp, lo, hi);
  }
};
struct FloorPlusHalf {
  template <class F>
  static std::int32_t code(F x, F s, std::int32_t zp, std::int32_t lo, std::int32_t hi) {
    return quantize_code(std::floor(quotient(x, s) + F(0.5)), zp, lo, hi);
  }
};
struct HalfAway {
  template <class F>
  static std::int32_t code(F x, F s, std::int32_t zp, std::int32_t lo, std::int32_t hi) {
    return quantize_code(std::round(quotient(x, s)), zp, lo, hi);
  }
};
struct ReciprocalMultiply {
  template <class F>
  static std::int32_t code(F x, F s, std::int32_t zp, std::int32_t lo, std::int32_t hi) {
    const F z = s == 0 ? F(0) : x * (F(1) / s);
    return quantize_code(std::isnan(z) ? F(0) : z, zp, lo, hi);
  }
};
struct ZeroPointBeforeRounding {
  template <class F>
  static std::int32_t code(F x, F s, std::int32_t zp, std::int32_t lo, std::int32_t hi) {
    return quantize_code(quotient(x, s) + static_cast<F>(zp), 0, lo, hi);
  }
};
struct ZeroPointInF32 {
  template <class F>
  static std::int32_t code(F x, F s, std::int32_t zp, std::int32_t lo, std::int32_t hi) {
    const float sum = static_cast<float>(std::nearbyint(quotient(x, s))) + static_cast<float>(zp);
    return quantize_code(sum, 0, lo, hi);
  }
};
struct SaturateBeforeZeroPoint {
  template <class F>
  static std::int32_t code(F x, F s, std::int32_t zp, std::int32_t lo, std::int32_t hi) {
    const F r = std::nearbyint(quotient(x, s));
    const auto capped = static_cast<std::int64_t>(std::min(std::max(r, F(-1e9)), F(1e9)));
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(capped + zp, lo, hi));
  }
};
struct NanIsSmallest {
  template <class F>
  static std::int32_t code(F x, F s, std::int32_t zp, std::int32_t lo, std::int32_t hi) {
    return s != 0 && std::isnan(x / s) ? lo : quantize_code(quotient(x, s), zp, lo, hi);
  }
};
struct ZeroScaleDivides {
  template <class F>
  static std::int32_t code(F x, F s, std::int32_t zp, std::int32_t lo, std::int32_t hi) {
    const F z = x / s;
    return quantize_code(std::isnan(z) ? F(0) : z, zp, lo, hi);
  }
};
struct MathInF32 {  // wrong for f64 alone
  template <class F>
  static std::int32_t code(F x, F s, std::int32_t zp, std::int32_t lo, std::int32_t hi) {
    return quantize_code(quotient(static_cast<float>(x), static_cast<float>(s)), zp, lo, hi);
  }
};
struct LowerClampOnly {
  template <class F>
  static std::int32_t code(F x, F s, std::int32_t zp, std::int32_t lo, std::int32_t hi) {
    return quantize_code(quotient(x, s), zp, lo, std::min(hi + 1, 255));
  }
};

enum class Fault { none, dense_rows, skips_last, overruns, ignores_groups, writes_input };

template <class Element, Fault kFault = Fault::none>
Status quantize(const QuantizeDesc& d, const QuantizePerGroup::Args& a, Stream, Workspace) {
  const GroupGeometry g = d.geometry();
  return visit_float(d.element, [&]<class X>(Type<X>) {
    return visit<std::int8_t, std::uint8_t>(d.code, [&]<class Q>(Type<Q>) {
      for (std::int64_t i = 0; i < g.rows; ++i) {
        const X* x = a.x.as<X>() + i * a.x.row_stride();
        Q* q = a.q.as<Q>() + i * (kFault == Fault::dense_rows ? g.row_length : a.q.row_stride());
        const std::int64_t end =
            g.row_length - (kFault == Fault::skips_last && i + 1 == g.rows ? 1 : 0);
        for (std::int64_t j = 0; j < end; ++j) {
          const std::int64_t p = kFault == Fault::ignores_groups ? i * g.param_step : g.param(i, j);
          const auto s = static_cast<Math<X>>(oracle::get(a.scale, p));
          const std::int32_t zp = a.zero_point ? a.zero_point.as<std::int32_t>()[p] : 0;
          q[j] = static_cast<Q>(Element::code(to_math(x[j]), s, zp, d.q_min, d.q_max));
        }
        if (kFault == Fault::overruns && i + 1 == g.rows) q[g.row_length] = 0;
        if (kFault == Fault::writes_input && g.row_length > 0) const_cast<X*>(x)[0] = X{};
      }
      return Status();
    });
  });
}

TEST(OracleSelfTest, AcceptsTheRightQuantize) {
  EXPECT_ACCEPTED(QuantizePerGroup, (quantize<Rule>));
}

TEST(OracleSelfTest, CatchesWrongQuantize) {
  EXPECT_CAUGHT(QuantizePerGroup, (quantize<FloorPlusHalf>));
  EXPECT_CAUGHT(QuantizePerGroup, (quantize<HalfAway>));
  EXPECT_CAUGHT(QuantizePerGroup, (quantize<ReciprocalMultiply>));
  EXPECT_CAUGHT(QuantizePerGroup, (quantize<ZeroPointBeforeRounding>));
  EXPECT_CAUGHT(QuantizePerGroup, (quantize<ZeroPointInF32>));
  EXPECT_CAUGHT(QuantizePerGroup, (quantize<SaturateBeforeZeroPoint>));
  EXPECT_CAUGHT(QuantizePerGroup, (quantize<NanIsSmallest>));
  EXPECT_CAUGHT(QuantizePerGroup, (quantize<ZeroScaleDivides>));
  EXPECT_CAUGHT(QuantizePerGroup, (quantize<MathInF32>));
  EXPECT_CAUGHT(QuantizePerGroup, (quantize<LowerClampOnly>));
}

TEST(OracleSelfTest, CatchesWrongMemory) {
  EXPECT_CAUGHT(QuantizePerGroup, (quantize<Rule, Fault::dense_rows>));
  EXPECT_CAUGHT(QuantizePerGroup, (quantize<Rule, Fault::skips_last>));
  EXPECT_CAUGHT(QuantizePerGroup, (quantize<Rule, Fault::overruns>));
  EXPECT_CAUGHT(QuantizePerGroup, (quantize<Rule, Fault::ignores_groups>));
  EXPECT_CAUGHT(QuantizePerGroup, (quantize<Rule, Fault::writes_input>));
}

// ---- quantize_per_group_backward: the mask and the division ----

struct InclusiveMask {
  template <class F>
  static F d_x(F d_y, F x, F s, std::int32_t zp, std::int32_t lo, std::int32_t hi) {
    return s != 0 && in_range(unclamped_code(quotient(x, s), zp), lo, hi) ? d_y / s : F(0);
  }
};
struct StrictMask {
  template <class F>
  static F d_x(F d_y, F x, F s, std::int32_t zp, std::int32_t lo, std::int32_t hi) {
    const double code = unclamped_code(quotient(x, s), zp);
    return s != 0 && code > lo && code < hi ? d_y / s : F(0);
  }
};
struct MaskByUnroundedQuotient {
  template <class F>
  static F d_x(F d_y, F x, F s, std::int32_t zp, std::int32_t lo, std::int32_t hi) {
    return s != 0 && in_range(static_cast<double>(quotient(x, s)) + zp, lo, hi) ? d_y / s : F(0);
  }
};
struct GradientByReciprocal {
  template <class F>
  static F d_x(F d_y, F x, F s, std::int32_t zp, std::int32_t lo, std::int32_t hi) {
    return s != 0 && in_range(unclamped_code(quotient(x, s), zp), lo, hi) ? d_y * (F(1) / s) : F(0);
  }
};
struct GradientTimesMask {  // NaN and infinite d_y survive a multiplication by 0
  template <class F>
  static F d_x(F d_y, F x, F s, std::int32_t zp, std::int32_t lo, std::int32_t hi) {
    return s == 0 ? F(0) : d_y / s * F(in_range(unclamped_code(quotient(x, s), zp), lo, hi));
  }
};

template <class Element>
Status backward(const QuantizeDesc& d, const QuantizePerGroupBackward::Args& a, Stream, Workspace) {
  const GroupGeometry g = d.geometry();
  return visit_float(d.element, [&]<class X>(Type<X>) {
    for (std::int64_t i = 0; i < g.rows; ++i) {
      const X* d_y = a.d_y.as<X>() + i * a.d_y.row_stride();
      const X* x = a.x.as<X>() + i * a.x.row_stride();
      X* d_x = a.d_x.as<X>() + i * a.d_x.row_stride();
      for (std::int64_t j = 0; j < g.row_length; ++j) {
        const std::int64_t p = g.param(i, j);
        const std::int32_t zp = a.zero_point ? a.zero_point.as<std::int32_t>()[p] : 0;
        d_x[j] = from_math<X>(Element::d_x(to_math(d_y[j]), to_math(x[j]),
                                           static_cast<Math<X>>(oracle::get(a.scale, p)), zp,
                                           d.q_min, d.q_max));
      }
    }
    return Status();
  });
}

TEST(OracleSelfTest, JudgesTheStraightThroughMask) {
  EXPECT_ACCEPTED(QuantizePerGroupBackward, backward<InclusiveMask>);
  EXPECT_CAUGHT(QuantizePerGroupBackward, backward<StrictMask>);
  EXPECT_CAUGHT(QuantizePerGroupBackward, backward<MaskByUnroundedQuotient>);
  EXPECT_CAUGHT(QuantizePerGroupBackward, backward<GradientByReciprocal>);
  EXPECT_CAUGHT(QuantizePerGroupBackward, backward<GradientTimesMask>);
}

// ---- qdq_affine_backward: the order of a sum ----

template <class F>
F sequential(std::vector<F>& terms) {
  F sum = 0;
  for (const F t : terms) sum += t;
  return sum;
}
template <class F>
F unpadded_halving(std::vector<F>& terms) {  // right for powers of two alone
  for (std::size_t stride = terms.size() / 2; stride > 0; stride /= 2)
    for (std::size_t i = 0; i < stride; ++i) terms[i] += terms[i + stride];
  return terms[0];
}
template <class F>
F pairwise(std::vector<F>& terms) {
  while (terms.size() > 1) {
    std::vector<F> half;
    for (std::size_t i = 0; i < terms.size(); i += 2)
      half.push_back(i + 1 < terms.size() ? terms[i] + terms[i + 1] : terms[i]);
    terms = half;
  }
  return terms[0];
}
template <class F>
F in_double(std::vector<F>& terms) {
  double sum = 0;
  for (const F t : terms) sum += static_cast<double>(t);
  return static_cast<F>(sum);
}

struct Halving {
  template <class F>
  static F sum(std::vector<F>& t) {
    return halving_sum(t);
  }
};
struct Sequential {
  template <class F>
  static F sum(std::vector<F>& t) {
    return sequential(t);
  }
};
struct Unpadded {
  template <class F>
  static F sum(std::vector<F>& t) {
    return unpadded_halving(t);
  }
};
struct Pairwise {
  template <class F>
  static F sum(std::vector<F>& t) {
    return pairwise(t);
  }
};
struct InDouble {
  template <class F>
  static F sum(std::vector<F>& t) {
    return in_double(t);
  }
};

template <class Sum>
Status affine_backward(const AffineDesc& d, const QdqAffineBackward::Args& a, Stream, Workspace) {
  const auto code = [&](std::int64_t row, std::int64_t j) -> int {
    if (d.storage == CodeStorage::u8) return a.q.as<std::uint8_t>()[row * a.q.row_stride() + j];
    const std::uint32_t* words = a.q.as<std::uint32_t>() + row * a.q.row_stride();
    int value = 0;
    for (std::int64_t b = 0; b < d.code_bits(); ++b) {
      const std::int64_t bit = j * d.code_bits() + b;
      value |= static_cast<int>(words[bit / 32] >> (bit % 32) & 1) << b;
    }
    return value;
  };
  return visit_float(d.element, [&]<class X>(Type<X>) {
    std::vector<Math<X>> scale_terms, bias_terms;
    for (std::int64_t i = 0; i < d.outer_size; ++i) {
      for (std::int64_t group = 0; group < d.num_groups(); ++group) {
        scale_terms.clear();
        bias_terms.clear();
        for (std::int64_t j = group * d.group_size; j < (group + 1) * d.group_size; ++j) {
          const Math<X> d_y = to_math(a.d_y.as<X>()[i * a.d_y.row_stride() + j]);
          scale_terms.push_back(static_cast<Math<X>>(code(i, j)) * d_y);
          bias_terms.push_back(d_y);
        }
        const std::int64_t at = i * d.num_groups() + group;
        if (a.d_scales)
          oracle::put(as_const(a.d_scales), at, static_cast<double>(Sum::sum(scale_terms)));
        if (a.d_biases)
          oracle::put(as_const(a.d_biases), at, static_cast<double>(Sum::sum(bias_terms)));
      }
    }
    return Status();
  });
}

TEST(OracleSelfTest, JudgesTheOrderOfSums) {
  EXPECT_ACCEPTED(QdqAffineBackward, affine_backward<Halving>);
  EXPECT_CAUGHT(QdqAffineBackward, affine_backward<Sequential>);
  EXPECT_CAUGHT(QdqAffineBackward, affine_backward<Unpadded>);
  EXPECT_CAUGHT(QdqAffineBackward, affine_backward<Pairwise>);
  EXPECT_CAUGHT(QdqAffineBackward, affine_backward<InDouble>);
}

// ---- pack_codes: masking and spilling ----

enum class PackFault { none, no_mask, no_spill, big_endian, dirty_tail };

template <PackFault kFault>
Status pack(const PackDesc& d, const PackCodes::Args& a, Stream, Workspace) {
  const std::int64_t words = packed_words(d.axis_size, d.bits);
  for (std::int64_t i = 0; i < d.outer_size; ++i) {
    std::uint32_t* out = a.packed.as<std::uint32_t>() + i * a.packed.row_stride();
    for (std::int64_t w = 0; w < words; ++w) {
      if (kFault != PackFault::dirty_tail) out[w] = 0;
    }
    for (std::int64_t j = 0; j < d.axis_size; ++j) {
      std::uint64_t code = a.codes.as<std::uint8_t>()[i * a.codes.row_stride() + j];
      if (kFault != PackFault::no_mask) code &= (1u << d.bits) - 1;
      const std::int64_t bit = j * d.bits, shift = kFault == PackFault::big_endian
                                                       ? 32 - d.bits - bit % 32
                                                       : bit % 32;
      if (shift < 0) continue;
      out[bit / 32] |= static_cast<std::uint32_t>(code << shift);
      if (kFault != PackFault::no_spill && bit % 32 + d.bits > 32 && bit / 32 + 1 < words) {
        out[bit / 32 + 1] |= static_cast<std::uint32_t>(code << shift >> 32);
      }
    }
  }
  return {};
}

TEST(OracleSelfTest, JudgesPacking) {
  EXPECT_ACCEPTED(PackCodes, pack<PackFault::none>);
  EXPECT_CAUGHT(PackCodes, pack<PackFault::no_mask>);
  EXPECT_CAUGHT(PackCodes, pack<PackFault::no_spill>);
  EXPECT_CAUGHT(PackCodes, pack<PackFault::big_endian>);
  EXPECT_CAUGHT(PackCodes, pack<PackFault::dirty_tail>);
}

// ---- kernels with a declared bound: within it accepted, beyond it caught ----

// `ref`, and then what a fault makes of its outputs.
template <class Op>
using Spoil = void (*)(const typename Op::Desc&, const typename Op::Args&);

template <class Op, Spoil<Op> kSpoil>
Status spoiled(const typename Op::Desc& d, const typename Op::Args& a, Stream, Workspace) {
  const auto ref = Plan<Op>::select(d, {}, Preference::exact, "ref");
  if (!ref) return ref.status();
  BITTERN_TRY(ref->run(a));
  kSpoil(d, a);
  return {};
}

template <class Op>
Report judge_bounded(Status (*run)(const typename Op::Desc&, const typename Op::Args&, Stream,
                                   Workspace),
                     PrecisionGuarantee (*weaker)(const typename Op::Desc&)) {
  const Kernel<Op> kernel{.name = "candidate", .backend = "cpu", .weaker = weaker, .run = run};
  Report report;
  Settings settings;
  auto cases = oracle::Cases<Op>::check();
  for (const auto& desc : oracle::Cases<Op>::bounded(false)) cases.push_back(desc);
  for (std::size_t i = 0; i < cases.size() && report.failures.empty(); i += 2) {
    report.add(oracle::parity<Op>(cases[i], settings, &kernel));
    ++settings.seed;
  }
  return report;
}

PrecisionGuarantee within(double bound) {
  return {.same_bits_on_all_backends = false, .error_norm = ErrorNorm::terms, .error_bound = bound};
}
PrecisionGuarantee of_chunks(const GdnDesc& d) { return within(2 * d.chunk * 0x1p-24); }
PrecisionGuarantee of_rows(const AuraDesc& d) {
  return within(2 * static_cast<double>(d.dim + 8) * 0x1p-24);
}
PrecisionGuarantee of_attention(const AuraAttentionDesc&) { return within(1.0 / 32512); }

#define EXPECT_BEYOND(OP, SPOIL, BOUND)                                         \
  EXPECT_FALSE((judge_bounded<OP>(spoiled<OP, SPOIL>, BOUND).failures.empty())) \
      << "not caught: " #SPOIL
#define EXPECT_WITHIN(OP, SPOIL, BOUND)                                             \
  if (const Report accepted = judge_bounded<OP>(spoiled<OP, SPOIL>, BOUND); true) { \
    for (const auto& f : accepted.failures) ADD_FAILURE() << #SPOIL << ": " << f;   \
    EXPECT_GT(accepted.compared, 30);                                               \
  }

// Every element of the view, which may be left out.
template <class F>
void each(const MutView& v, F&& f) {
  for (std::int64_t i = 0; v && i < v.shape.numel(); ++i)
    oracle::put(as_const(v), i, f(oracle::get(as_const(v), i), i));
}
// A half type's ulps, or f32's in 2^-24.
template <int kUlps>
void off_by_ulps(const GdnDesc& d, const GdnRecomputeWU::Args& a) {
  for (const MutView& v : {a.u, a.w})
    each(v, [&](double x, std::int64_t) { return oracle::step(d.element, x, kUlps); });
}
void nothing(const GdnDesc&, const GdnRecomputeWU::Args&) {}
void last_row_of_zeros(const GdnDesc&, const GdnRecomputeWU::Args& a) {
  each(a.u, [&](double x, std::int64_t i) { return i + 1 < a.u.shape.numel() ? x : 0.0; });
}
void nan_becomes_zero(const GdnDesc&, const GdnRecomputeWU::Args& a) {
  each(a.w, [&](double x, std::int64_t) { return std::isnan(x) ? 0.0 : x; });
}
void first_becomes_nan(const GdnDesc&, const GdnRecomputeWU::Args& a) {
  each(a.w, [&](double x, std::int64_t i) { return i == 0 ? std::nan("") : x; });
}
void never_the_same(const GdnDesc& d, const GdnRecomputeWU::Args& a) {
  static int turn = 0;
  ++turn;
  each(a.u, [&](double x, std::int64_t i) {
    return i == 0 && d.element != DType::f32 ? oracle::step(d.element, x, turn % 2) : x;
  });
}
void writes_past_the_end(const GdnDesc&, const GdnRecomputeWU::Args& a) {
  const auto bytes = a.u.shape.numel() * static_cast<std::int64_t>(size_of(a.u.dtype));
  if (a.u) static_cast<std::byte*>(a.u.data)[bytes] = {};
}
void writes_to_an_input(const GdnDesc& d, const GdnRecomputeWU::Args& a) {
  if (d.gate_shape().numel() > 0) oracle::data<float>(a.beta)[0] += 1;
}

TEST(OracleSelfTest, JudgesABoundOfTerms) {
  EXPECT_WITHIN(GdnRecomputeWU, nothing, of_chunks);
  EXPECT_WITHIN(GdnRecomputeWU, off_by_ulps<1>, of_chunks);
  EXPECT_BEYOND(GdnRecomputeWU, off_by_ulps<3>, of_chunks);
  EXPECT_BEYOND(GdnRecomputeWU, last_row_of_zeros, of_chunks);
  EXPECT_BEYOND(GdnRecomputeWU, nan_becomes_zero, of_chunks);
  EXPECT_BEYOND(GdnRecomputeWU, first_becomes_nan, of_chunks);
}

TEST(OracleSelfTest, JudgesWhatABoundedKernelSaysBesides) {
  EXPECT_BEYOND(GdnRecomputeWU, never_the_same, of_chunks);
  EXPECT_BEYOND(GdnRecomputeWU, writes_past_the_end, of_chunks);
  EXPECT_BEYOND(GdnRecomputeWU, writes_to_an_input, of_chunks);
  // Not written, where the poison is within the bound of any result.
  const auto huge = [](const GdnDesc&) { return within(1e300); };
  const auto skips = [](const GdnDesc&, const GdnRecomputeWU::Args&, Stream, Workspace) {
    return Status();
  };
  EXPECT_FALSE(judge_bounded<GdnRecomputeWU>(skips, huge).failures.empty());
  // What does not repeat itself may, if it says so.
  const auto varies = [](const GdnDesc& d) {
    PrecisionGuarantee g = of_chunks(d);
    g.deterministic = g.bit_stable_on_same_hardware = false;
    return g;
  };
  EXPECT_WITHIN(GdnRecomputeWU, never_the_same, varies);
}

// x changed by a few roundings, or by far more; and so the scale.
template <int kExponent>
Status encode_nearby(const AuraDesc& d, const AuraEncode::Args& a, Stream, Workspace) {
  const auto ref = Plan<AuraEncode>::select(d, {}, Preference::exact, "ref");
  if (!ref) return ref.status();
  AuraDesc wide = d;
  wide.element = DType::f32;
  const auto plan = Plan<AuraEncode>::select(wide, {}, Preference::exact, "ref");
  std::vector<float> x(static_cast<std::size_t>(d.tensor_shape().numel()));
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] =
        static_cast<float>(oracle::get(a.x, static_cast<std::int64_t>(i)) *
                           (1 + (static_cast<double>(i % 3) - 1.0) * std::ldexp(1.0, kExponent)));
  AuraEncode::Args nearby = a;
  nearby.x = view(std::as_const(x).data(), d.tensor_shape());
  return plan->run(nearby);
}
void another_code(const AuraDesc& d, const AuraEncode::Args& a) {
  if (d.rows > 0 && d.bits > 1) a.packed.as<std::uint32_t>()[0] ^= 2;
}
void spare_bits(const AuraDesc& d, const AuraEncode::Args& a) {
  const std::int64_t words = packed_words(d.dim, d.bits);
  if (d.rows > 0 && d.dim * d.bits % 32 != 0) a.packed.as<std::uint32_t>()[words - 1] |= 1u << 31;
}
template <int kExponent>
void scale_is_off(const AuraDesc&, const AuraEncode::Args& a) {
  each(a.scales, [](double x, std::int64_t) { return x * (1 - std::ldexp(1.0, kExponent)); });
}

TEST(OracleSelfTest, JudgesCodesByTheirDistanceFromABoundary) {
  for (const auto& f : judge_bounded<AuraEncode>(encode_nearby<-22>, of_rows).failures)
    ADD_FAILURE() << f;
  EXPECT_FALSE(judge_bounded<AuraEncode>(encode_nearby<-12>, of_rows).failures.empty());
  EXPECT_BEYOND(AuraEncode, another_code, of_rows);
  EXPECT_BEYOND(AuraEncode, spare_bits, of_rows);
  EXPECT_WITHIN(AuraEncode, scale_is_off<-22>, of_rows);
  EXPECT_BEYOND(AuraEncode, scale_is_off<-8>, of_rows);
}

// Attention with the query in as many bits as kBits.
template <int kBits>
Status attend_coarsely(const AuraAttentionDesc& d, const AuraAttention::Args& a, Stream,
                       Workspace) {
  std::vector<float> q(static_cast<std::size_t>(d.query_shape().numel()));
  const auto dim = static_cast<std::size_t>(d.dim);
  for (std::size_t row = 0; row < q.size(); row += dim) {
    double most = 0;
    for (std::size_t j = 0; j < dim; ++j) {
      q[row + j] = static_cast<float>(oracle::get(a.q, static_cast<std::int64_t>(row + j)));
      most = std::max(most, std::fabs(static_cast<double>(q[row + j])));
    }
    const double unit = most / std::ldexp(1.0, kBits - 1);
    for (std::size_t j = 0; j < dim; ++j)
      if (unit > 0 && std::isfinite(unit))
        q[row + j] =
            static_cast<float>(std::nearbyint(static_cast<double>(q[row + j]) / unit) * unit);
  }
  AuraAttentionDesc wide = d;
  wide.element = DType::f32;
  std::vector<float> out(q.size());
  const auto plan = Plan<AuraAttention>::select(wide, {}, Preference::exact, "ref");
  if (!plan) return plan.status();
  AuraAttention::Args coarse = a;
  coarse.q = view(std::as_const(q).data(), d.query_shape());
  coarse.out = view(out.data(), d.query_shape());
  BITTERN_TRY(plan->run(coarse));
  each(a.out, [&](double, std::int64_t i) {
    return static_cast<double>(out[static_cast<std::size_t>(i)]);
  });
  return {};
}

TEST(OracleSelfTest, JudgesLogitsByWhatTheyDoToTheOutput) {
  // 29 bits: of tokens that are not coded the bound allows little more than f32's own rounding.
  for (const auto& f : judge_bounded<AuraAttention>(attend_coarsely<29>, of_attention).failures)
    ADD_FAILURE() << f;
  EXPECT_FALSE(judge_bounded<AuraAttention>(attend_coarsely<8>, of_attention).failures.empty());
}

// Products with bf16 weights, x rounded to kBits bits; `dropped` leaves out the last input.
template <int kBits, bool kDropped>
Status multiply_coarsely(const QuantizedMatmulDesc& d, const QuantizedMatmul::Args& a, Stream,
                         Workspace) {
  const auto ref = Plan<QuantizedMatmul>::select(d, {}, Preference::exact, "ref");
  if (!ref) return ref.status();
  if (d.weights.type != WeightType::bf16 || d.element != DType::f32) return ref->run(a);
  std::vector<float> x(static_cast<std::size_t>(d.x_shape().numel()));
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double value = oracle::get(a.x, static_cast<std::int64_t>(i));
    int exponent = 0;
    const double part = std::frexp(value, &exponent);
    x[i] = static_cast<float>(
        std::isfinite(value) ? std::ldexp(std::nearbyint(std::ldexp(part, kBits)), exponent - kBits)
                             : value);
    const auto last = static_cast<std::size_t>(d.weights.inputs - 1);
    if (kDropped && i % (last + 1) == last) x[i] = 0;
  }
  QuantizedMatmul::Args coarse = a;
  coarse.x = view(std::as_const(x).data(), d.x_shape());
  return ref->run(coarse);
}
PrecisionGuarantee of_inputs(const QuantizedMatmulDesc& d) {
  const double r = d.element == DType::f32 ? 0x1p-8 : 0;
  return within(r + (1 + r) * static_cast<double>(d.weights.inputs + 8) * 0x1p-23);
}

TEST(OracleSelfTest, JudgesProductsByTheirTerms) {
  const auto accepted = judge_bounded<QuantizedMatmul>(multiply_coarsely<8, false>, of_inputs);
  for (const auto& f : accepted.failures) ADD_FAILURE() << f;
  EXPECT_FALSE(
      judge_bounded<QuantizedMatmul>(multiply_coarsely<6, false>, of_inputs).failures.empty());
  EXPECT_FALSE(
      judge_bounded<QuantizedMatmul>(multiply_coarsely<24, true>, of_inputs).failures.empty());
}

// o is off by parts of 2^kExponent. (The state of an empty sequence may not be off at all.)
template <int kExponent>
void rule_is_off(const GdnDesc&, const GdnChunkForward::Args& a) {
  each(a.o, [](double x, std::int64_t) { return x * (1 + std::ldexp(1.0, kExponent)); });
}
// The state rounded to kBits bits.
template <int kBits>
void state_is_rounded(const GdnDesc&, const GdnChunkForward::Args& a) {
  each(a.final_state, [](double x, std::int64_t) {
    int exponent = 0;
    const double part = std::frexp(x, &exponent);
    return std::isfinite(x) ? std::ldexp(std::nearbyint(std::ldexp(part, kBits)), exponent - kBits)
                            : x;
  });
}
void last_token_of_zeros(const GdnDesc& d, const GdnChunkForward::Args& a) {
  each(a.o, [&](double x, std::int64_t i) {
    return i + d.value_heads * d.value_dim < a.o.shape.numel() ? x : 0.0;
  });
}
void untouched(const GdnDesc&, const GdnChunkForward::Args&) {}
PrecisionGuarantee of_rule(const GdnDesc&) { return within(0x1p-7 + 0x1p-12); }

TEST(OracleSelfTest, JudgesTheDeltaRuleByHowItsErrorsGoOn) {
  EXPECT_WITHIN(GdnChunkForward, untouched, of_rule);
  EXPECT_WITHIN(GdnChunkForward, rule_is_off<-20>, of_rule);
  EXPECT_BEYOND(GdnChunkForward, rule_is_off<-4>, of_rule);
  EXPECT_BEYOND(GdnChunkForward, state_is_rounded<4>, of_rule);
  EXPECT_BEYOND(GdnChunkForward, last_token_of_zeros, of_rule);
}

// Gradients are off by parts of 2^kExponent, one of them alone; and one that is not there.
template <int kExponent, MutView GdnChunkBackward::Args::* kWhich>
void gradient_is_off(const GdnDesc&, const GdnChunkBackward::Args& a) {
  each(a.*kWhich, [](double x, std::int64_t) { return x * (1 + std::ldexp(1.0, kExponent)); });
}
template <MutView GdnChunkBackward::Args::* kWhich>
void first_gradient_of_zero(const GdnDesc&, const GdnChunkBackward::Args& a) {
  each(a.*kWhich, [](double x, std::int64_t i) { return i == 0 ? 0.0 : x; });
}
void gradient_untouched(const GdnDesc&, const GdnChunkBackward::Args&) {}

TEST(OracleSelfTest, JudgesGradientsOfTheDeltaRule) {
  using Args = GdnChunkBackward::Args;
  EXPECT_WITHIN(GdnChunkBackward, gradient_untouched, of_rule);
  EXPECT_BEYOND(GdnChunkBackward, (gradient_is_off<-1, &Args::d_q>), of_rule);
  EXPECT_BEYOND(GdnChunkBackward, (gradient_is_off<-1, &Args::d_k>), of_rule);
  EXPECT_BEYOND(GdnChunkBackward, (gradient_is_off<-3, &Args::d_v>), of_rule);
  EXPECT_BEYOND(GdnChunkBackward, (gradient_is_off<-1, &Args::d_g>), of_rule);
  EXPECT_BEYOND(GdnChunkBackward, (gradient_is_off<-1, &Args::d_beta>), of_rule);
  EXPECT_BEYOND(GdnChunkBackward, (gradient_is_off<-1, &Args::d_a_log>), of_rule);
  EXPECT_BEYOND(GdnChunkBackward, (gradient_is_off<-1, &Args::d_dt_bias>), of_rule);
  EXPECT_BEYOND(GdnChunkBackward, (gradient_is_off<-3, &Args::d_initial_state>), of_rule);
  EXPECT_BEYOND(GdnChunkBackward, first_gradient_of_zero<&Args::d_v>, of_rule);
}

// A failure of a bounded kernel says the bound, what it is relative to and by how much it is off.
TEST(OracleSelfTest, SaysByHowMuchABoundWasExceeded) {
  const Report report =
      judge_bounded<GdnRecomputeWU>(spoiled<GdnRecomputeWU, off_by_ulps<3>>, of_chunks);
  ASSERT_FALSE(report.failures.empty());
  for (const char* part : {"candidate: u[", ", expected ", " within ", "(bound ", " x terms ",
                           "), off by ", " times as much   bittern check gdn_recompute_w_u "})
    EXPECT_NE(report.failures[0].find(part), std::string::npos) << report.failures[0];
}

// A failure's reproducer is the command that shows it.
TEST(OracleSelfTest, PrintsAReproducer) {
  const Report report = judge<QuantizePerGroup>(quantize<HalfAway>);
  ASSERT_FALSE(report.failures.empty());
  EXPECT_NE(report.failures[0].find("bittern check quantize_per_group --outer_size="),
            std::string::npos)
      << report.failures[0];
}

}  // namespace
}  // namespace bittern
