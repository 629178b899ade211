// The fixed-operation functions: how near they are to the truth, and that SIMD gives scalar's bits.
// Every bit pattern whose low bits are a few odd ones: all exponents, both signs, NaN, infinities.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "core/activations.h"
#include "core/numerics.h"
#include "cpu/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/math_test.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/activations-inl.h"
#include "cpu/silu-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

// n a multiple of 16.
void Evaluate(int function, const float* x, std::int64_t n, float* y) {
  const hn::ScalableTag<float> d;
  for (std::int64_t i = 0; i < n; i += static_cast<std::int64_t>(hn::Lanes(d))) {
    const auto v = hn::LoadU(d, x + i);
    switch (function) {
      case 0: hn::StoreU(Exp(d, v), d, y + i); break;
      case 1: hn::StoreU(Sigmoid(d, v), d, y + i); break;
      case 2: hn::StoreU(Silu(d, v), d, y + i); break;
      case 3: hn::StoreU(SiluSlope(d, v, Sigmoid(d, v)), d, y + i); break;
      case 4: hn::StoreU(Softplus(d, v), d, y + i); break;
      case 5: hn::StoreU(Exp(d, v, hn::Set(d, 0.11f)), d, y + i); break;
      case 6: hn::StoreU(Exp(d, v, hn::Set(d, -0.0625f)), d, y + i); break;
      case 7: hn::StoreU(Tanh(d, v), d, y + i); break;
      case 8: hn::StoreU(GeluTanh(d, v), d, y + i); break;
      case 9: hn::StoreU(Gelu(d, v), d, y + i); break;
      case 10: hn::StoreU(GeluTanhSlope(d, v, GeluTanhGate(d, v)), d, y + i); break;
      default: {
        GeluParts<hn::Vec<decltype(d)>> parts;
        SplitGelu(d, v, parts);
        hn::StoreU(GeluSlope(d, v, parts), d, y + i);
        break;
      }
    }
  }
}

// silu(x), or its product with n, as bf16. n is null or as long as x.
void EvaluateBf16(const float* x, const float* n, std::int64_t count, std::uint16_t* y) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const hn::Rebind<std::uint16_t, decltype(d)> dh;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = 0; i < count; i += 2 * lanes) {
    const hn::Vec<decltype(d)> two[] = {hn::LoadU(d, x + i), hn::LoadU(d, x + i + lanes)};
    const float* const from = n == nullptr ? x : n;
    const hn::Vec<decltype(d)> factors[] = {hn::LoadU(d, from + i), hn::LoadU(d, from + i + lanes)};
    hn::Vec<decltype(du)> bits[2];
    SiluToBf16(d, two, n == nullptr ? nullptr : factors, bits);
    for (int k = 0; k < 2; ++k)
      hn::StoreU(hn::TruncateTo(dh, hn::ShiftRight<16>(bits[k])), dh, y + i + k * lanes);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

BITTERN_EXPORT(Evaluate);
BITTERN_EXPORT(EvaluateBf16);

struct Function {
  const char* name;
  float (*scalar)(float);
  double (*exact)(double);
  // The bounds the headers state: relative, and absolute (below `from`, or without ulps).
  double ulps;
  double absolute = 0;
  float from = -87;
};
const Function kFunctions[] = {
    {"exp", [](float x) { return math::exp(x); }, [](double x) { return std::exp(x); }, 1.0},
    {"sigmoid", math::sigmoid,
     [](double x) { return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x)); },
     1.0},
    {"silu", math::silu,
     [](double x) {
       return x < 0 ? x * (std::exp(x) / (1 + std::exp(x))) : x / (1 + std::exp(-x));
     },
     2.2, 0x1p-142},
    {"silu_slope", [](float x) { return math::silu_slope(x); },
     [](double x) {
       const double s = x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x));
       return s * (1 + x * (1 - s));
     },
     0, 0x1p-20},
    {"softplus", math::softplus, [](double x) { return x > 20 ? x : std::log1p(std::exp(x)); },
     1.0},
    {"exp_of_two_parts", [](float x) { return math::exp(x, 0.11f); },
     [](double x) { return std::exp(x + static_cast<double>(0.11f)); }, 1.0},
    {"exp_less_a_part", [](float x) { return math::exp(x, -0.0625f); },
     [](double x) { return std::exp(x - 0.0625); }, 1.0},
    {"tanh", math::tanh, [](double x) { return std::tanh(x); }, 1.4},
    {"gelu_tanh", math::gelu_tanh,
     [](double x) {
       return x / (1 + std::exp(-2 * 0.79788456080286535588 * (x + 0.044715 * x * x * x)));
     },
     4.0, 0x1p-24, -1},
    {"gelu", math::gelu, [](double x) { return x * std::erfc(-x * 0.70710678118654752440) / 2; },
     10.0, 0x1p-126, -13},
    {"gelu_tanh_slope", [](float x) { return math::gelu_tanh_slope(x, math::gelu_tanh_gate(x)); },
     [](double x) {
       x = std::clamp(x, -100.0, 100.0);  // 0 and 1 beyond
       constexpr double kLinear = 2 * 0.79788456080286535588;
       const double s = 1 / (1 + std::exp(-kLinear * (x + 0.044715 * x * x * x)));
       return s + x * s * (1 - s) * kLinear * (1 + 3 * 0.044715 * x * x);
     },
     0, 0x1p-19},
    {"gelu_slope", [](float x) { return math::gelu_slope(x, math::gelu_parts(x)); },
     [](double x) {
       x = std::clamp(x, -100.0, 100.0);
       return std::erfc(-x * 0.70710678118654752440) / 2 +
              x * std::exp(-x * x / 2) * 0.39894228040143267794;
     },
     0, 0x1p-21},
};

std::vector<float> inputs() {
  std::vector<float> x;
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 1021)
    x.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
  // Densely where results are neither 0, 1 nor infinite, and around every threshold.
  for (int i = -110 * 4096; i < 110 * 4096; ++i)
    x.push_back(static_cast<float>(i) * 0x1.00002p-12f);
  for (const float at :
       {0.0f, 20.0f, -104.0f, 89.0f, 88.72284f, -87.33654f, -103.97208f, math::kTanhSmall,
        -math::kTanhSmall, math::kGeluMost, -math::kGeluMost,
        std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    float up = at, down = at;
    for (int i = 0; i < 32; ++i) {
      x.push_back(up);
      x.push_back(down);
      up = std::nextafterf(up, 1000.0f);
      down = std::nextafterf(down, -1000.0f);
    }
  }
  x.resize((x.size() + 15) / 16 * 16, std::numeric_limits<float>::quiet_NaN());
  return x;
}

// The distance of neighbouring floats at `y`, subnormals as they are.
double ulp(double y) {
  const double a = std::max(std::abs(y), 0x1p-126);
  return std::ldexp(1.0, std::ilogb(a) - 23);
}

TEST(Math, IsWithinItsBounds) {
  const auto xs = inputs();
  for (const Function& f : kFunctions) {
    double worst = 0;
    float worst_at = 0;
    std::int64_t wrong = 0;
    for (const float x : xs) {
      const float y = f.scalar(x);
      if (std::isnan(x)) {
        EXPECT_TRUE(std::isnan(y)) << f.name;
        continue;
      }
      const double exact = f.exact(static_cast<double>(x));
      if (std::isnan(exact)) {
        EXPECT_TRUE(std::isnan(y)) << f.name << " of " << x;
        continue;
      }
      if (f.absolute > 0 && (f.ulps == 0 || x < f.from)) {
        const double error = std::abs(static_cast<double>(y) - exact);
        if (std::isfinite(x)) wrong += !(error <= f.absolute);
        continue;
      }
      if (std::abs(exact) > 0x1.ffffffp127) {
        EXPECT_EQ(y, static_cast<float>(exact)) << f.name << " of " << x;
        continue;
      }
      const double error = std::abs(static_cast<double>(y) - exact) / ulp(exact);
      if (!(error <= worst)) {
        worst = error;
        worst_at = x;
      }
    }
    EXPECT_LE(worst, f.ulps) << f.name << " of " << worst_at;
    EXPECT_EQ(wrong, 0) << f.name;
    RecordProperty(f.name, std::to_string(worst));
  }
}

TEST(Math, SpecialValues) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(math::exp(0.0f), 1.0f);
  EXPECT_EQ(math::exp(inf), inf);
  EXPECT_EQ(math::exp(-inf), 0.0f);
  EXPECT_EQ(math::exp(-103.2789f), 0x1p-149f);
  EXPECT_EQ(math::sigmoid(0.0f), 0.5f);
  EXPECT_EQ(math::sigmoid(inf), 1.0f);
  EXPECT_EQ(math::sigmoid(-inf), 0.0f);
  EXPECT_EQ(math::silu(inf), inf);
  EXPECT_TRUE(std::isnan(math::silu(-inf)));
  EXPECT_TRUE(std::signbit(math::silu(-0.0f)));
  EXPECT_EQ(math::silu_slope(0.0f), 0.5f);
  EXPECT_EQ(math::softplus(0.0f), 0x1.62e43p-1f);
  EXPECT_EQ(math::softplus(-inf), 0.0f);
  EXPECT_EQ(math::softplus(inf), inf);
  EXPECT_EQ(math::softplus(20.0f), 20.0f);
  EXPECT_EQ(math::softplus(0x1.400002p4f), 0x1.400002p4f);
  EXPECT_EQ(math::tanh(inf), 1.0f);
  EXPECT_EQ(math::tanh(-inf), -1.0f);
  EXPECT_EQ(math::tanh(-0x1p-149f), -0x1p-149f);
  EXPECT_TRUE(std::signbit(math::tanh(-0.0f)));
  EXPECT_EQ(math::gelu(inf), inf);
  EXPECT_EQ(math::gelu_tanh(inf), inf);
  EXPECT_TRUE(std::isnan(math::gelu(-inf)));
  EXPECT_TRUE(std::isnan(math::gelu_tanh(-inf)));
  for (const float x : {inf, 3e38f, 14.6f}) {
    EXPECT_EQ(math::gelu_slope(x, math::gelu_parts(x)), 1.0f);
    EXPECT_EQ(math::gelu_slope(-x, math::gelu_parts(-x)), 0.0f);
    EXPECT_EQ(math::gelu_tanh_slope(x, math::gelu_tanh_gate(x)), 1.0f);
    EXPECT_EQ(math::gelu_tanh_slope(-x, math::gelu_tanh_gate(-x)), 0.0f);
  }
  EXPECT_EQ(math::gelu_slope(0.0f, math::gelu_parts(0.0f)), 0.5f);
  EXPECT_EQ(math::gelu_tanh_slope(0.0f, math::gelu_tanh_gate(0.0f)), 0.5f);
  EXPECT_EQ(math::exp64(0.0), 1.0);
  EXPECT_EQ(math::exp64(-708.0000001), 0.0);
  EXPECT_EQ(math::exp64(-static_cast<double>(inf)), 0.0);
  EXPECT_EQ(math::exp64(static_cast<double>(inf)), math::exp64(709.0));
  EXPECT_TRUE(std::isnan(math::exp64(std::numeric_limits<double>::quiet_NaN())));
}

TEST(Math, Exp64IsWithinItsBound) {
  long double worst = 0;
  for (int i = -708 * 256; i <= 709 * 256; ++i) {
    const double x = static_cast<double>(i) * 0x1.ffff123p-9;
    const long double exact = std::exp(static_cast<long double>(x));
    worst = std::max(worst, std::abs(static_cast<long double>(math::exp64(x)) - exact) / exact);
  }
  EXPECT_LE(worst, 0x1p-52L);
  EXPECT_GT(worst, 0x1p-54L);  // long double is wider than f64
  RecordProperty("exp64", std::to_string(static_cast<double>(worst * 0x1p53L)));
}

TEST(Math, SimdGivesTheScalarBits) {
  const auto xs = inputs();
  std::vector<float> got(xs.size());
  for (std::size_t f = 0; f < std::size(kFunctions); ++f) {
    std::vector<float> want;
    for (const float x : xs) want.push_back(kFunctions[f].scalar(x));
    for (const cpu::Isa isa : cpu::available_isas()) {
      cpu::force_isa(isa);
      BITTERN_CALL(Evaluate)(static_cast<int>(f), xs.data(), static_cast<std::int64_t>(xs.size()),
                             got.data());
      int shown = 0;
      for (std::size_t i = 0; i < xs.size(); ++i) {
        const bool same =
            std::bit_cast<std::uint32_t>(got[i]) == std::bit_cast<std::uint32_t>(want[i]) ||
            (std::isnan(got[i]) && std::isnan(want[i]));
        if (!same && shown++ < 5)
          ADD_FAILURE() << kFunctions[f].name << " of " << xs[i] << " on " << cpu::name(isa) << ": "
                        << got[i] << ", expected " << want[i];
      }
    }
    cpu::force_isa(cpu::Isa::none);
  }
}

// About one number in 2000 is near a tie of bf16, so both ways to it are taken.
TEST(Math, SiluAsBf16HasTheBitsOfSilu) {
  std::vector<float> xs = inputs(), ns;
  xs.resize((xs.size() + 31) / 32 * 32);
  for (std::size_t i = 0; i < xs.size(); ++i)
    ns.push_back(std::ldexp(1 + static_cast<float>(i * 2654435761u % 8388593u) * 0x1p-23f,
                            static_cast<int>(i % 40) - 20) *
                 (i % 3 == 0 ? -1.0f : 1.0f));
  // Not finite, and products that overflow or vanish; no NaN has low bits.
  const float rare[] = {std::numeric_limits<float>::quiet_NaN(),
                        std::numeric_limits<float>::infinity(), 0x1.fp127f, 0x1p-126f, -0.0f};
  for (std::size_t i = 0; i < ns.size(); i += 977) ns[i] = rare[i % std::size(rare)];
  std::vector<std::uint16_t> got(xs.size());
  for (const float* n : {static_cast<const float*>(nullptr), std::as_const(ns).data()}) {
    std::vector<std::uint16_t> want;
    for (std::size_t i = 0; i < xs.size(); ++i)
      want.push_back(std::bit_cast<std::uint16_t>(
          to_bf16(n == nullptr ? math::silu(xs[i]) : n[i] * math::silu(xs[i]))));
    for (const cpu::Isa isa : cpu::available_isas()) {
      cpu::force_isa(isa);
      BITTERN_CALL(EvaluateBf16)(xs.data(), n, static_cast<std::int64_t>(xs.size()), got.data());
      int shown = 0;
      for (std::size_t i = 0; i < xs.size(); ++i) {
        const auto is_nan = [](std::uint16_t bits) { return (bits & 0x7fff) > 0x7f80; };
        if (got[i] != want[i] && !(is_nan(got[i]) && is_nan(want[i])) && shown++ < 5)
          ADD_FAILURE() << xs[i] << (n == nullptr ? "" : " with a factor") << " on "
                        << cpu::name(isa) << ": " << got[i] << ", expected " << want[i];
      }
    }
    cpu::force_isa(cpu::Isa::none);
  }
}

}  // namespace
}  // namespace bittern
#endif  // HWY_ONCE
