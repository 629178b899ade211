#include <cmath>
#include <functional>
#include <limits>
#include <optional>

#include "core/numerics.h"
#include "ops/aura/aura.h"
#include "ops/aura/aura_attention/walk.h"
#include "oracle/op_test.h"
#include "oracle/oracle_impl.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::run_op;
using Op = AuraAttention;
using Desc = AuraAttentionDesc;

TEST(AuraAttention, MatchesRefEverywhere) { oracle::expect_parity("aura_attention"); }

// A problem of the oracle's, with ordinary values, that can be changed and run.
struct Case {
  Desc d;
  oracle::Problem<Op> p;

  explicit Case(const Desc& desc, std::uint64_t seed = 3, int left_out = 0)
      : d(desc), p(oracle::make_problem<Op>(desc, seed, {.left_out = left_out})) {
    oracle::Rng rng(seed + 100);
    Op::operands(d, p.args, [&](const char*, const auto& v, const Operand& expected) {
      if (!is_float(expected.dtype) || v.data == nullptr) return;
      for (std::int64_t i = 0; i < expected.shape.numel(); ++i) {
        const double x = oracle::get(v, i);
        if (!(std::fabs(x) < 10)) oracle::put(v, i, rng.normal());
      }
    });
  }
  Op::Args& args() { return p.args; }
  std::vector<float> output(std::string_view kernel = {},
                            Preference preference = Preference::exact) {
    expect_ok(run_op<Op>(d, p.args, kernel, preference));
    std::vector<float> out;
    for (std::int64_t i = 0; i < d.query_shape().numel(); ++i)
      out.push_back(static_cast<float>(oracle::get(as_const(p.args.out), i)));
    return out;
  }
};

// ---- f64 attention over the decoded cache ----

class Decoded {
 public:
  Decoded(const Desc& d, const Op::Args& a) : d_(d), a_(a) {
    k_matrix_ = matrix(d.k_rotation, a.k_table);
    v_matrix_ = matrix(d.v_rotation, a.v_table);
  }
  using Row = std::vector<double>;

  // The row of a token as the cache stands for it.
  Row row(std::int64_t s, std::int64_t head, aura::Region region, std::int64_t t, bool of_v) const {
    const aura::Sequence sequence(d_, a_, s);
    const std::int64_t slot = sequence.slot(region, t), dim = d_.dim;
    Row x(static_cast<std::size_t>(dim));
    if (region != aura::kCoded) {
      const ConstView& v = region == aura::kFirst ? (of_v ? a_.v_first : a_.k_first)
                                                  : (of_v ? a_.v_recent : a_.k_recent);
      for (std::int64_t j = 0; j < dim; ++j)
        x[at(j)] = oracle::get(v, ((s * d_.kv_heads + head) * v.shape[1] + slot) * dim + j);
      return x;
    }
    const ConstView &codes = of_v ? a_.v_packed : a_.k_packed,
                    &scales = of_v ? a_.v_scales : a_.k_scales;
    const std::int64_t bits = of_v ? d_.v_bits : d_.k_bits;
    const auto* words =
        codes.as<std::uint32_t>() +
        aura::row_offset(d_, codes, a_.block_table, s, head, slot, packed_words(dim, bits));
    const std::int64_t i = aura::row_offset(d_, scales, a_.block_table, s, head, slot, 1);
    const double scale = d_.f16_scale ? static_cast<double>(to_f32(scales.as<f16>()[i]))
                                      : static_cast<double>(scales.as<float>()[i]);
    const auto& p = of_v ? v_matrix_ : k_matrix_;
    const ConstView &codebook = of_v ? a_.v_codebook : a_.k_codebook,
                    &mean = of_v ? a_.v_mean : a_.k_mean;
    for (std::int64_t j = 0; j < dim; ++j) {
      const double c = scale * oracle::get(codebook, packed_code(words, j, bits));
      for (std::int64_t n = 0; n < dim; ++n) x[at(n)] += p[at(j * dim + n)] * c;
    }
    for (std::int64_t j = 0; mean && j < dim; ++j) x[at(j)] += oracle::get(mean, head * dim + j);
    return x;
  }

  std::vector<double> attend() const {
    std::vector<double> out;
    for (std::int64_t s = 0; s < d_.sequences; ++s)
      for (std::int64_t i = 0; i < d_.queries; ++i)
        for (std::int64_t h = 0; h < d_.heads; ++h) attend(s, i, h, out);
    return out;
  }

  std::vector<double> logits(std::int64_t s, std::int64_t i, std::int64_t h,
                             std::vector<Row>* values = nullptr) const {
    const aura::Sequence sequence(d_, a_, s);
    const std::int64_t head = h / d_.group();
    std::vector<double> x;
    for (const auto region : {aura::kFirst, aura::kCoded, aura::kRecent}) {
      const aura::Span seen = sequence.seen(d_, i, region);
      for (std::int64_t t = seen.begin; t < seen.end; ++t) {
        const Row k = row(s, head, region, t, false);
        double sum = 0;
        for (std::int64_t j = 0; j < d_.dim; ++j)
          sum += k[at(j)] * oracle::get(a_.q, ((s * d_.queries + i) * d_.heads + h) * d_.dim + j);
        sum *= d_.scale == 0 ? 1 / std::sqrt(static_cast<double>(d_.dim)) : d_.scale;
        x.push_back(d_.softcap == 0 ? sum : d_.softcap * std::tanh(sum / d_.softcap));
        if (values != nullptr) values->push_back(row(s, head, region, t, true));
      }
    }
    return x;
  }

 private:
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
  // P, by columns as rotate_row makes them.
  std::vector<double> matrix(Rotation kind, const ConstView& table) const {
    std::vector<double> p(at(d_.dim * d_.dim));
    for (std::int64_t j = 0; j < d_.dim; ++j) {
      std::vector<float> e(at(d_.dim));
      e[at(j)] = 1;
      rotate_row(kind, d_.dim, table.as<float>(), false, e.data());
      for (std::int64_t i = 0; i < d_.dim; ++i)
        p[at(i * d_.dim + j)] = static_cast<double>(e[at(i)]);
    }
    return p;
  }
  void attend(std::int64_t s, std::int64_t i, std::int64_t h, std::vector<double>& out) const {
    std::vector<Row> values;
    const std::vector<double> x = logits(s, i, h, &values);
    double most = a_.sinks ? oracle::get(a_.sinks, h) : -1e300;
    for (const double v : x) most = std::max(most, v);
    double l = a_.sinks ? std::exp(oracle::get(a_.sinks, h) - most) : 0;
    Row o(at(d_.dim));
    for (std::size_t t = 0; t < x.size(); ++t) {
      const double p = std::exp(x[t] - most);
      l += p;
      for (std::size_t j = 0; j < o.size(); ++j) o[j] += p * values[t][j];
    }
    for (const double v : o) out.push_back(l == 0 ? 0 : v / l);
  }

  const Desc& d_;
  const Op::Args& a_;
  std::vector<double> k_matrix_, v_matrix_;
};

// The largest error of a row beside its largest value.
double worst_row_error(const std::vector<float>& got, const std::vector<double>& want,
                       std::int64_t dim) {
  double worst = 0;
  for (std::size_t row = 0; row < want.size(); row += static_cast<std::size_t>(dim)) {
    double error = 0, most = 1e-30;
    for (std::size_t j = row; j < row + static_cast<std::size_t>(dim); ++j) {
      error = std::max(error, std::fabs(static_cast<double>(got[j]) - want[j]));
      most = std::max(most, std::fabs(want[j]));
    }
    worst = std::max(worst, error / most);
  }
  return worst;
}

std::vector<Desc> varied() {
  return {
      {.heads = 4, .kv_heads = 2, .dim = 128, .capacity = 700},
      {.queries = 3,
       .heads = 6,
       .kv_heads = 2,
       .dim = 64,
       .capacity = 100,
       .first = 4,
       .recent = 33,
       .k_bits = 8,
       .v_bits = 4,
       .exact = DType::f16},
      {.sequences = 2,
       .queries = 2,
       .heads = 2,
       .dim = 80,
       .capacity = 96,
       .page_size = 32,
       .pages = 5,
       .first = 2,
       .recent = 9,
       .k_bits = 3,
       .v_bits = 2,
       .window = 40,
       .f16_scale = true},
      {.queries = 4,
       .heads = 2,
       .dim = 96,
       .capacity = 60,
       .recent = 20,
       .k_bits = 6,
       .v_bits = 5,
       .k_rotation = Rotation::dense,
       .v_rotation = Rotation::identity,
       .scale = 0.3,
       .causal = false},
      {.queries = 40,
       .heads = 3,
       .dim = 64,
       .capacity = 60,
       .first = 270,
       .recent = 20,
       .v_bits = 8,
       .softcap = 2,
       .exact = DType::f32},
      {.queries = 40, .heads = 4, .kv_heads = 2, .dim = 64, .first = 300, .exact = DType::f16},
  };
}

TEST(AuraAttention, IsSoftmaxAttentionOnTheDecodedCache) {
  for (const Desc& d : varied()) {
    for (const int left_out : {0, 1, 31}) {  // without lengths; without any
      Case c(d, 5, left_out);
      const auto want = Decoded(d, c.args()).attend();
      EXPECT_LT(worst_row_error(c.output(), want, d.dim), 1e-5) << flags_text<Op>(d);
      EXPECT_LT(worst_row_error(c.output({}, Preference::fastest), want, d.dim), 3e-3)
          << flags_text<Op>(d);
    }
  }
}

// One token a sequence, value 1, and a sink of logit 0: the output is 1 / (1 + e^-x).
TEST(AuraAttention, LogitsOfTheInt8KernelAreWithinAThousandthOfTheLargest) {
  for (const std::int64_t dim : {64, 128, 256}) {
    Desc d{.sequences = 500, .dim = dim, .capacity = 1, .v_rotation = Rotation::identity};
    Case c(d, 11, 0b01111);  // sinks alone
    oracle::Rng rng(7);
    for (std::int64_t i = 0; i < 16; ++i) {  // 4-bit levels, roughly
      oracle::put(c.args().k_codebook, i,
                  (static_cast<double>(i) - 7.5) * 0.34 / std::sqrt(static_cast<double>(dim)));
      oracle::put(c.args().v_codebook, i, 1);
    }
    oracle::put(c.args().sinks, 0, 0);
    for (std::int64_t s = 0; s < d.sequences; ++s) {
      oracle::put(c.args().k_scales, s, 12);
      oracle::put(c.args().v_scales, s, 1);
      for (std::int64_t j = 0; j < dim; ++j) {
        const double x = s == 0 ? rng.normal() : oracle::get(c.args().q, j);  // one query
        oracle::put(c.args().q, s * dim + j, x);
      }
    }
    const auto plan = Plan<Op>::select(d, {}, Preference::fastest);
    ASSERT_TRUE(plan.ok());
    if (plan->sku().kernel != "cpu_int8") GTEST_SKIP() << "no SIMD here";
    EXPECT_FALSE(plan->precision_guarantee().same_bits_on_all_backends);
    const Decoded decoded(d, c.args());
    for (const cpu::Isa isa : cpu::available_isas()) {
      cpu::force_isa(isa);
      const auto out = c.output({}, Preference::fastest);
      double error = 0, most = 0;
      for (std::int64_t s = 0; s < d.sequences; ++s) {
        const auto p = static_cast<double>(out[static_cast<std::size_t>(s * dim)]);
        const double x = decoded.logits(s, 0, 0)[0];
        error = std::max(error, std::fabs(std::log(p / (1 - p)) - x));
        most = std::max(most, std::fabs(x));
      }
      EXPECT_LT(error, 1e-3 * most) << dim << " " << cpu::name(isa);
    }
    cpu::force_isa(cpu::Isa::none);
  }
}

// Numbers so small that the unit of their integers is subnormal, and comes out a third too small:
// with huge factors elsewhere the logits are ordinary.
TEST(AuraAttention, TheInt8KernelTakesTinyNumbers) {
  const Desc d{.dim = 16,
               .capacity = 8,
               .v_bits = 3,
               .k_rotation = Rotation::identity,
               .v_rotation = Rotation::identity,
               .scale = 1};
  if (!Plan<Op>::select(d, {}, Preference::fastest, "cpu_int8")) GTEST_SKIP() << "no SIMD here";
  constexpr double kTiny = 32512 * 1.4 * 0x1p-149;
  for (const bool tiny_query : {false, true}) {
    Case want(d, 5, ~0), got(d, 5, ~0);
    for (Case* c : {&want, &got}) {
      for (std::int64_t i = 0; i < 16; ++i) {
        const double share = (static_cast<double>(i) - 7) / 8;  // 1 is among them
        oracle::put(c->args().q, i, (tiny_query ? kTiny : 0x1p50) * share);
        oracle::put(c->args().k_codebook, i, (tiny_query ? 0x1p50 : kTiny) * share);
      }
      for (std::int64_t i = 0; i < 8; ++i) oracle::put(c->args().k_scales, i, 0x1p80);
    }
    expect_ok(run_op<Op>(d, want.args(), "ref"));
    for (const cpu::Isa isa : cpu::available_isas()) {
      cpu::force_isa(isa);
      expect_ok(run_op<Op>(d, got.args(), "cpu_int8", Preference::fastest));
      oracle::Judge judge(1.0 / 32512);
      oracle::Cases<Op>::judge(d, got.args(), want.args(), judge);
      EXPECT_EQ(judge.failure(), "") << cpu::name(isa);
      EXPECT_LT(judge.worst(), 1);
    }
    cpu::force_isa(cpu::Isa::none);
  }
}

// Where the terms of the bound overflow, nothing is promised, and the judge says so.
TEST(AuraAttention, TheInt8KernelTakesExtremeNumbers) {
  const Desc d{.heads = 2, .kv_heads = 2, .dim = 16, .capacity = 8, .scale = 1};
  if (!Plan<Op>::select(d, {}, Preference::fastest, "cpu_int8")) GTEST_SKIP() << "no SIMD here";
  const auto fill = [](const ConstView& v, double x) {
    for (std::int64_t i = 0; i < v.shape.numel(); ++i) oracle::put(v, i, i % 3 == 0 ? -x : x);
  };
  const std::pair<const char*, std::function<void(const Op::Args&)>> kinds[] = {
      {"weights of V whose sum overflows",
       [&](const Op::Args& a) {
         fill(a.q, 0);
         fill(a.v_scales, 0x1.8p126);
         fill(a.v_codebook, 0x1p-100);
       }},
      {"logits far apart that integers cannot tell from each other",
       [&](const Op::Args& a) {
         for (std::int64_t i = 0; i < 16; ++i)
           oracle::put(a.k_codebook, i, 1 + static_cast<double>(i) * 0x1p-20);
         fill(a.q, 0x1p60);
         fill(a.k_scales, 1);
         fill(a.v_scales, 0x1p60);
       }},
  };
  for (const DType element : {DType::f32, DType::f16}) {
    Desc typed = d;
    typed.element = element;
    for (const auto& [name, spoil] : kinds) {
      Case want(typed, 5, ~0), got(typed, 5, ~0);
      for (Case* c : {&want, &got}) spoil(c->args());
      expect_ok(run_op<Op>(typed, want.args(), "ref"));
      for (const cpu::Isa isa : cpu::available_isas()) {
        cpu::force_isa(isa);
        expect_ok(run_op<Op>(typed, got.args(), "cpu_int8", Preference::fastest));
        oracle::Judge judge(1.0 / 32512);
        oracle::Cases<Op>::judge(typed, got.args(), want.args(), judge);
        EXPECT_EQ(judge.failure(), "") << name << " " << cpu::name(isa);
      }
      cpu::force_isa(cpu::Isa::none);
    }
  }
}

TEST(AuraAttention, Int8IsNotTakenUnasked) {
  const Desc d{.capacity = 16};
  const auto exact = Plan<Op>::select(d);
  ASSERT_TRUE(exact.ok());
  EXPECT_NE(exact->sku().kernel, "cpu_int8");
  EXPECT_TRUE(exact->precision_guarantee().same_bits_on_all_backends);
  EXPECT_EQ(exact->precision_guarantee().error_norm, ErrorNorm::exact);
  if (const auto fast = Plan<Op>::select(d, {}, Preference::fastest, "cpu_int8")) {
    EXPECT_EQ(fast->precision_guarantee().error_norm, ErrorNorm::terms);
    EXPECT_EQ(fast->precision_guarantee().error_bound, 1.0 / 32512);
  }
  const auto wide = Plan<Op>::select({.capacity = 16, .k_bits = 8}, {}, Preference::fastest);
  ASSERT_TRUE(wide.ok());
  EXPECT_NE(wide->sku().kernel, "cpu_int8");
}

// ---- by hand ----

// Codes of one bit, -1 and 1, no rotation, logits q . k: the softmax of ln(3)/2 and -ln(3)/2 is
// 3/4 and 1/4.
template <class T, std::size_t n>
auto array_view(T (&array)[n], const Shape& shape) {
  return view(&array[0], shape);
}

struct ByHand {
  Desc d{.dim = 2,
         .capacity = 2,
         .k_bits = 1,
         .v_bits = 1,
         .k_rotation = Rotation::identity,
         .v_rotation = Rotation::identity,
         .scale = 1};
  float q[2] = {std::log(3.0f) / 2, 0};
  std::uint32_t k[2] = {0b01, 0b00};  // (1, -1), (-1, -1)
  std::uint32_t v[2] = {0b11, 0b10};  // (1, 1), (-1, 1)
  float scales[2] = {1, 1};
  float levels[2] = {-1, 1};
  float out[2] = {7, 7};
  Op::Args args{.q = array_view(std::as_const(q), {1, 1, 1, 2}),
                .k_packed = array_view(std::as_const(k), {1, 2, 1}),
                .k_scales = array_view(std::as_const(scales), {1, 2}),
                .v_packed = array_view(std::as_const(v), {1, 2, 1}),
                .v_scales = array_view(std::as_const(scales), {1, 2}),
                .k_codebook = array_view(std::as_const(levels), {2}),
                .v_codebook = array_view(std::as_const(levels), {2}),
                .out = array_view(out, {1, 1, 1, 2})};

  void expect(float a, float b, std::string_view kernel) {
    expect_ok(run_op<Op>(d, args, kernel));
    EXPECT_NEAR(out[0], a, 1e-6) << kernel;
    EXPECT_NEAR(out[1], b, 1e-6) << kernel;
  }
};

// Logits of +-ln(3)/2 and a cap of the same: +-tanh(1) ln(3)/2.
TEST(AuraAttention, SoftCapByHand) {
  for (const auto kernel : oracle::kBothKernels) {
    ByHand h;
    h.d.softcap = std::log(3.0) / 2;
    const double p = 1 / (1 + std::exp(-2 * std::tanh(1.0) * h.d.softcap));
    h.expect(static_cast<float>(2 * p - 1), 1, kernel);
    h.d.softcap = 1e30;
    h.expect(0.5f, 1, kernel);
    h.d.softcap = 1e-30;  // all logits are 0
    h.expect(0, 1, kernel);
  }
}

TEST(AuraAttention, TwoTokensByHand) {
  for (const auto kernel : oracle::kBothKernels) {
    ByHand h;
    h.expect(0.5f, 1, kernel);
    // A sink as large as the first logit takes 3/7.
    const float sink[] = {std::log(3.0f) / 2};
    h.args.sinks = array_view(sink, {1});
    h.expect(2.0f / 7, 4.0f / 7, kernel);
    h.args.sinks = {};
    // v_mean is added once, since all tokens are coded; k_mean changes nothing.
    const float mean[] = {10, 20};
    h.args.v_mean = h.args.k_mean = array_view(mean, {1, 2});
    h.expect(10.5f, 21, kernel);
    h.args.v_mean = h.args.k_mean = {};
    // A window of 1 leaves the last token.
    h.d.window = 1;
    h.expect(-1, 1, kernel);
    h.d.window = 0;
    const std::int32_t lengths[] = {0, 1, 0}, none[] = {0, 0, 0};
    h.args.lengths = array_view(lengths, {1, 3});
    h.expect(1, 1, kernel);
    const std::int32_t starts[] = {1, 0};
    h.args.starts = array_view(starts, {1, 2});
    h.expect(-1, 1, kernel);
    h.args.lengths = array_view(none, {1, 3});
    h.expect(0, 0, kernel);
  }
}

// An exact token as large as the first coded one, which was centred by (8, -8): equal logits only
// if q . mean is put back.
TEST(AuraAttention, CentredCodesCompareWithTheExactRegion) {
  for (const auto kernel : oracle::kBothKernels) {
    ByHand h;
    h.d.recent = 1;
    h.d.exact = DType::f32;
    const float mean[] = {8, -8};
    const float k[] = {1 + 8, 5}, v[] = {3, 3};
    h.args.k_recent = array_view(k, {1, 1, 2});
    h.args.v_recent = array_view(v, {1, 1, 2});
    h.args.k_mean = array_view(mean, {1, 2});
    // Weights 3 : 1 : 3.
    h.expect((3 - 1 + 9) / 7.0f, (3 + 1 + 9) / 7.0f, kernel);
  }
}

// ---- properties, all bit for bit ----

TEST(AuraAttention, EachQueryOfAPrefillIsADecodeStepOfItsOwn) {
  Desc d{.queries = 5, .heads = 4, .kv_heads = 2, .dim = 32, .capacity = 300, .window = 290};
  Case c(d, 4, 0b00001);
  const auto all = c.output();
  const auto row = static_cast<std::size_t>(d.heads * d.dim);
  Desc one = d;
  one.queries = 1;
  for (std::int64_t i = 0; i < d.queries; ++i) {
    Case step(d, 4, 0b00001);
    const std::int32_t lengths[] = {0, static_cast<std::int32_t>(d.capacity - d.queries + 1 + i),
                                    0};
    step.d = one;
    auto& a = step.args();
    a.lengths = view(lengths, {1, 3});
    a.q.data = a.q.as<float>() + i * d.heads * d.dim;
    a.q.shape = a.out.shape = one.query_shape();
    a.q.stride = a.out.stride = one.query_shape().dense_strides();
    const auto got = step.output();
    EXPECT_TRUE(std::equal(got.begin(), got.begin() + static_cast<std::ptrdiff_t>(row),
                           all.begin() + i * d.heads * d.dim))
        << i;
  }
}

// A prompt is attended by blocks of rows, a token by splits: both give the same bits.
TEST(AuraAttention, EachQueryOfAPromptIsADecodeStepOfItsOwn) {
  const Desc d{
      .queries = 300, .heads = 3, .dim = 40, .first = 300, .window = 280, .exact = DType::f16};
  Case c(d, 4, 0b00001);
  const auto all = c.output();
  Desc one = d;
  one.queries = 1;
  for (std::int64_t i = 0; i < d.queries; i += 13) {
    Case step(d, 4, 0b00001);
    const std::int32_t lengths[] = {static_cast<std::int32_t>(i + 1), 0, 0};
    step.d = one;
    auto& a = step.args();
    a.lengths = view(lengths, {1, 3});
    a.q.data = a.q.as<float>() + i * d.heads * d.dim;
    a.q.shape = a.out.shape = one.query_shape();
    a.q.stride = a.out.stride = one.query_shape().dense_strides();
    const auto got = step.output();
    EXPECT_TRUE(
        std::equal(got.begin(), got.begin() + d.heads * d.dim, all.begin() + i * d.heads * d.dim))
        << i;
  }
}

TEST(AuraAttention, PagesAndRingsHoldTheSameTokens) {
  const Desc d{.queries = 2, .heads = 2, .kv_heads = 2, .dim = 128, .capacity = 96, .recent = 5};
  Case flat(d, 9, 0b00011);
  const auto want = flat.output();
  Desc paged = d;
  paged.page_size = 32;
  paged.pages = 4;
  Case c(paged, 9, 0);
  auto &from = flat.args(), &to = c.args();
  const std::int64_t words = packed_words(d.dim, 4), shift = 37, recent_shift = 3;
  const std::int32_t pages[] = {3, 0, 1};
  const std::int32_t lengths[] = {0, 96, 5};
  const std::int32_t starts[] = {static_cast<std::int32_t>(shift),
                                 static_cast<std::int32_t>(recent_shift)};
  for (std::int64_t h = 0; h < 2; ++h) {
    for (std::int64_t t = 0; t < d.capacity; ++t) {
      const std::int64_t slot = (t + shift) % d.capacity;
      const std::int64_t row = (pages[slot / 32] * 2 + h) * 32 + slot % 32;
      for (std::int64_t w = 0; w < words; ++w) {
        oracle::put(to.k_packed, row * words + w,
                    oracle::get(from.k_packed, (h * d.capacity + t) * words + w));
        oracle::put(to.v_packed, row * words + w,
                    oracle::get(from.v_packed, (h * d.capacity + t) * words + w));
      }
      oracle::put(to.k_scales, row, oracle::get(from.k_scales, h * d.capacity + t));
      oracle::put(to.v_scales, row, oracle::get(from.v_scales, h * d.capacity + t));
    }
    for (std::int64_t t = 0; t < 5; ++t) {
      for (std::int64_t j = 0; j < d.dim; ++j) {
        const std::int64_t at = (h * 5 + (t + recent_shift) % 5) * d.dim + j;
        oracle::put(to.k_recent, at, oracle::get(from.k_recent, (h * 5 + t) * d.dim + j));
        oracle::put(to.v_recent, at, oracle::get(from.v_recent, (h * 5 + t) * d.dim + j));
      }
    }
  }
  for (auto operand :
       {&Op::Args::q, &Op::Args::k_codebook, &Op::Args::v_codebook, &Op::Args::k_table,
        &Op::Args::v_table, &Op::Args::k_mean, &Op::Args::v_mean, &Op::Args::sinks}) {
    to.*operand = from.*operand;
  }
  to.block_table = view(pages, {1, 3});
  to.lengths = view(lengths, {1, 3});
  to.starts = view(starts, {1, 2});
  EXPECT_EQ(c.output(), want);
}

TEST(AuraAttention, ANaNStaysWithTheQueriesThatSeeIt) {
  const Desc d{.queries = 2,
               .heads = 2,
               .kv_heads = 2,
               .dim = 32,
               .capacity = 20,
               .recent = 3,
               .exact = DType::f32};
  Case clean(d, 6, 0b00011), c(d, 6, 0b00011);
  const auto want = clean.output();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  // The last token is seen by the last query alone; head 1 has rows of its own.
  oracle::put(c.args().v_recent, 2 * d.dim, static_cast<double>(nan));
  const auto got = c.output();
  const auto dim = static_cast<std::size_t>(d.dim);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const bool hit = i == 2 * dim;
    EXPECT_EQ(std::isnan(got[i]), hit) << i;
    if (!hit) {
      EXPECT_EQ(got[i], want[i]) << i;
    }
  }
}

TEST(AuraAttention, Errors) {
  const Desc good{.sequences = 2,
                  .heads = 4,
                  .kv_heads = 2,
                  .dim = 64,
                  .capacity = 32,
                  .page_size = 16,
                  .pages = 3,
                  .first = 1,
                  .recent = 2};
  Case c(good);
  const auto with = [&](auto change) {
    Desc d = good;
    change(d);
    return Op::check(d);
  };
  using D = Desc&;
  const Code bad = Code::invalid_argument;
  expect_error(with([](D d) { d.heads = 5; }), bad,
               "aura_attention: heads: 5, expected a multiple of kv_heads 2");
  expect_error(with([](D d) { d.k_bits = 0; }), bad, "aura_attention: k_bits: 0, expected 1..8");
  expect_error(with([](D d) { d.v_bits = 9; }), bad, "aura_attention: v_bits: 9, expected 1..8");
  expect_error(with([](D d) { d.dim = 1025; }), bad, "aura_attention: dim: 1025, expected 2..1024");
  expect_error(with([](D d) { d.page_size = 8; }), bad,
               "aura_attention: page_size: 8, expected 16..128");
  expect_error(with([](D d) { d.capacity = 33; }), bad,
               "aura_attention: capacity: 33, expected a multiple of page_size 16");
  expect_error(
      with([](D d) { d.page_size = 0; }), bad,
      "aura_attention: pages: 3 with page_size 0, expected a page_size of 16..128, or 0 pages "
      "for codes that are contiguous");
  expect_error(with([](D d) { d.window = -1; }), bad,
               "aura_attention: window: -1, expected 0..2147483648");
  expect_error(with([](D d) { d.scale = 1e300; }), bad,
               "aura_attention: scale: 1e+300, expected a number that is finite in f32");
  expect_error(with([](D d) { d.softcap = 1e300; }), bad,
               "aura_attention: softcap: 1e+300, expected a number that is finite in f32");
  expect_error(with([](D d) { d.softcap = -1; }), bad,
               "aura_attention: softcap: -1, expected 0 or a positive normal number of f32");
  expect_error(with([](D d) { d.softcap = 1e-300; }), bad,
               "aura_attention: softcap: 1e-300, expected 0 or a positive normal number of f32");
  expect_error(with([](D d) { d.element = DType::f64; }), Code::unsupported,
               "aura_attention: element: f64, expected f32, f16 or bf16");
  expect_error(with([](D d) { d.exact = DType::u8; }), Code::unsupported,
               "aura_attention: exact: u8, expected f32, f16 or bf16");
  const auto operand = [&](const ConstView& v, std::int64_t i, double value) {
    const double old = oracle::get(v, i);
    oracle::put(v, i, value);
    const Status status = run_op<Op>(good, c.args());
    oracle::put(v, i, old);
    return status;
  };
  const auto& a = c.args();
  expect_error(operand(a.lengths, 4, 33), bad,
               "aura_attention: lengths: [1,1] is 33, expected 0..32, which is capacity");
  expect_error(operand(a.lengths, 0, -1), bad,
               "aura_attention: lengths: [0,0] is -1, expected 0..1, which is first");
  expect_error(operand(a.starts, 3, 2), bad, "aura_attention: starts: [1,1] is 2, expected 0..1");
  oracle::put(a.lengths, 1, 32);
  expect_error(operand(a.block_table, 1, 3), bad,
               "aura_attention: block_table: [0,1] is 3, expected 0..2");
  expect_error(operand(a.k_codebook, 2, std::numeric_limits<double>::infinity()), bad,
               "aura_attention: k_codebook: [2] is inf, expected a finite value");
  expect_error(operand(a.v_table, 5, 0.5), bad,
               "aura_attention: v_table: [5] is 0.5, expected 1 or -1");
  Op::Args args = c.args();
  args.block_table = {};
  expect_error(run_op<Op>(good, args), bad,
               "aura_attention: block_table: null, expected s32 [2,2]");
  args = c.args();
  args.k_packed.shape[3] = 9;
  expect_error(run_op<Op>(good, args), bad,
               "aura_attention: k_packed: shape [3,2,16,9], expected [3,2,16,8] = "
               "[pages,kv_heads,page_size,words]: 4-bit codes have 8 "
               "words a row");
  // Pages without what says how they are laid out.
  Desc d = good;
  d.capacity = 0;
  expect_error(run_op<Op>(d, c.args()), bad,
               "aura_attention: block_table: shape [2,2], expected [2,0] = "
               "[sequences,capacity/page_size]: capacity is 0; it is "
               "page_size 16 times the columns of block_table");
  d.page_size = d.pages = 0;
  expect_error(run_op<Op>(d, c.args()), bad,
               "aura_attention: k_packed: shape [3,2,16,8], expected [4,0,8] = "
               "[sequences*kv_heads,capacity,words]: pages need page_size "
               "(16..128), pages and capacity");
  args = c.args();
  args.q.shape = {2, 4, 64};
  expect_error(run_op<Op>(good, args), bad,
               "aura_attention: q: shape [2,4,64], expected [2,1,4,64] = "
               "[sequences,queries,heads,dim]");
  expect_ok(run_op<Op>(good, c.args()));
}

}  // namespace
}  // namespace bittern
