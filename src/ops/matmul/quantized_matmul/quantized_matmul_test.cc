#include <cmath>
#include <limits>

#include "cpu/bf16.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;

TEST(QuantizedMatmul, MatchesRefEverywhere) { oracle::expect_parity("quantized_matmul"); }

// W with one row: codes k mod 16, scale 0.5, bias -2, groups of 32.
struct OneRow {
  explicit OneRow(std::int64_t inputs)
      : packed(static_cast<std::size_t>(inputs / 8)),
        scales(static_cast<std::size_t>(inputs / 32), 0.5f),
        biases(static_cast<std::size_t>(inputs / 32), -2.0f) {
    for (std::size_t i = 0; i < packed.size(); ++i)
      packed[i] = i % 2 == 0 ? 0x76543210u : 0xfedcba98u;
  }
  std::vector<float> times(const std::vector<float>& x, Activations activations,
                           std::string_view kernel) const {
    const auto inputs = static_cast<std::int64_t>(8 * packed.size());
    const QuantizedMatmulDesc d{
        static_cast<std::int64_t>(x.size()) / inputs,
        {.outputs = 1, .inputs = inputs, .group_size = 32, .scale_element = DType::f32},
        activations};
    std::vector<float> y(static_cast<std::size_t>(d.rows), -99);
    QuantizedMatmul::Args a;
    a.x = view(x.data(), d.x_shape());
    a.packed = view(packed.data(), d.weights.packed_shape());
    a.scales = view(scales.data(), d.weights.grid_shape());
    a.biases = view(biases.data(), d.weights.grid_shape());
    a.y = view(y.data(), d.y_shape());
    expect_ok(run_op<QuantizedMatmul>(d, a, kernel, Preference::fastest));
    return y;
  }
  std::vector<std::uint32_t> packed;
  std::vector<float> scales, biases;
};

TEST(QuantizedMatmul, OneGroupByHand) {
  const OneRow w(32);
  for (const auto kernel : kBothKernels) {
    std::vector<float> x(32);
    x[3] = 127;  // d = 1: codes are x rounded, ties to even
    x[5] = 2.5f;
    x[9] = 3.5f;
    x[20] = -0.5f;
    // codes 127, 2, 4, 0 times 3, 5, 9, 4
    EXPECT_EQ(w.times(x, Activations::int8, kernel)[0],
              std::fma(127.0f * 3 + 2 * 5 + 4 * 9, 0.5f, -2.0f * 133));
    x[3] = 32512;
    EXPECT_EQ(w.times(x, Activations::int16, kernel)[0],
              std::fma(32512.0f * 3 + 2 * 5 + 4 * 9, 0.5f, -2.0f * (32512 + 6)));
    // w is k/2 - 2
    EXPECT_EQ(w.times(x, Activations::exact, kernel)[0], -0.5f * 32512 + 2.5f * 0.5f + 3.5f * 2.5f);
  }
}

// x, W and y of products with bf16 weights.
struct Bf16Rows {
  Bf16Rows(std::int64_t rows, std::int64_t outputs, std::int64_t inputs)
      : d{rows,
          {.outputs = outputs, .inputs = inputs, .type = WeightType::bf16},
          Activations::exact},
        x(static_cast<std::size_t>(rows * inputs)),
        y(static_cast<std::size_t>(rows * outputs), -99),
        w(static_cast<std::size_t>(outputs * inputs)) {}
  Status run(std::string_view kernel) {
    QuantizedMatmul::Args a;
    a.x = view(std::as_const(x).data(), d.x_shape());
    a.w = view(std::as_const(w).data(), d.weights.plain_shape());
    a.y = view(y.data(), d.y_shape());
    return run_op<QuantizedMatmul>(d, a, kernel, Preference::fastest);
  }
  QuantizedMatmulDesc d;
  std::vector<float> x, y;
  std::vector<bf16> w;
};

TEST(QuantizedMatmul, Bf16ProductsByHand) {
  if (!cpu::has_bf16()) GTEST_SKIP() << cpu::bf16_supported().message();
  for (const std::int64_t inputs : {1, 2, 3, 33}) {
    Bf16Rows p(2, 1, inputs);
    for (bf16& w : p.w) w = to_bf16(3);
    for (std::size_t k = 0; k < static_cast<std::size_t>(inputs); ++k) {
      p.x[k] = 1 + 0x1p-8f;                                                  // a tie, to even: 1
      p.x[static_cast<std::size_t>(inputs) + k] = 1 + 0x1.8p-7f - 0x1p-20f;  // below one: 1 + 2^-7
    }
    expect_ok(p.run("cpu_bf16"));
    EXPECT_EQ(p.y[0], 3 * static_cast<float>(inputs));
    EXPECT_EQ(p.y[1], 3 * static_cast<float>(inputs) * (1 + 0x1p-7f));
    p.x[0] = 0x1p-130f;  // counts as 0
    expect_ok(p.run("cpu_bf16"));
    EXPECT_EQ(p.y[0], 3 * static_cast<float>(inputs - 1));
    p.x[0] = std::nanf("");
    expect_ok(p.run("cpu_bf16"));
    EXPECT_TRUE(std::isnan(p.y[0]));
    EXPECT_EQ(p.y[1], 3 * static_cast<float>(inputs) * (1 + 0x1p-7f));
  }
}

// W is rounded as x is.
TEST(QuantizedMatmul, Bf16CodesByHand) {
  if (!cpu::has_bf16()) GTEST_SKIP() << cpu::bf16_supported().message();
  OneRow w(32);  // w is k (1 + 2^-8)
  w.scales[0] = 1 + 0x1p-8f;
  w.biases[0] = 0;
  std::vector<float> x(3 * 32);
  x[1] = x[32 + 2] = x[64 + 3] = 1;
  const auto y = w.times(x, Activations::exact, "cpu_bf16");
  EXPECT_EQ(y[0], 1);  // a tie, to even
  EXPECT_EQ(y[1], 2);
  EXPECT_EQ(y[2], 3 + 0x1p-6f);  // above 3 + 2^-7
}

// A row's bits do not depend on the others, in whatever tile it is.
TEST(QuantizedMatmul, Bf16RowsStandAlone) {
  if (!cpu::has_bf16()) GTEST_SKIP() << cpu::bf16_supported().message();
  constexpr std::int64_t kOutputs = 37, kInputs = 65;
  Bf16Rows all(31, kOutputs, kInputs);
  oracle::Rng rng(1);
  for (float& x : all.x) x = static_cast<float>(rng.normal());
  for (bf16& w : all.w) w = to_bf16(static_cast<float>(rng.normal()));
  expect_ok(all.run("cpu_bf16"));
  for (std::int64_t m = 0; m < 31; ++m) {
    Bf16Rows one(1, kOutputs, kInputs);
    one.w = all.w;
    std::copy_n(all.x.begin() + m * kInputs, kInputs, one.x.begin());
    expect_ok(one.run("cpu_bf16"));
    for (std::int64_t n = 0; n < kOutputs; ++n)
      EXPECT_EQ(one.y[static_cast<std::size_t>(n)],
                all.y[static_cast<std::size_t>(m * kOutputs + n)]);
  }
}

TEST(QuantizedMatmul, Bf16ProductsAreForTheFastestPreference) {
  Bf16Rows p(4, 16, 56);
  const auto exact = Plan<QuantizedMatmul>::select(p.d);
  ASSERT_TRUE(exact.ok());
  EXPECT_NE(exact->sku().kernel, "cpu_bf16");
  EXPECT_EQ(exact->precision_guarantee().error_norm, ErrorNorm::exact);
  const auto select = [&] {
    return Plan<QuantizedMatmul>::select(p.d, {}, Preference::fastest, "cpu_bf16");
  };
  if (cpu::has_bf16()) {
    const auto fastest = Plan<QuantizedMatmul>::select(p.d, {}, Preference::fastest);
    ASSERT_TRUE(fastest.ok());
    EXPECT_EQ(fastest->sku().kernel, "cpu_bf16");
    EXPECT_EQ(fastest->precision_guarantee().error_norm, ErrorNorm::terms);
    EXPECT_EQ(fastest->precision_guarantee().error_bound, 0x1p-8 + (1 + 0x1p-8) * 0x1p-17);
    p.d.element = DType::bf16;
    EXPECT_EQ(select()->precision_guarantee().error_bound, 0x1p-17);
    cpu::force_isa(cpu::Isa::avx2);
    const Status refused = select().status();
    cpu::force_isa(cpu::Isa::none);
    expect_error(refused, Code::unsupported,
                 "quantized_matmul: no kernel on cpu named cpu_bf16: cpu_bf16: needs AVX512_BF16 "
                 "and the target AVX3_DL, got AVX2;");
  }
  p.d.weights.type = WeightType::q4_k;
  p.d.weights.inputs = 256;
  if (cpu::has_bf16()) {  // W is rounded too
    EXPECT_EQ(select()->precision_guarantee().error_bound, 0x1p-8 + (1 + 0x1p-8) * 264 * 0x1p-23);
    p.d.element = DType::f32;
    constexpr double kBoth = 0x1p-7 + 0x1p-16;
    EXPECT_EQ(select()->precision_guarantee().error_bound, kBoth + (1 + kBoth) * 264 * 0x1p-23);
  }
  p.d.activations = Activations::int16;
  expect_error(select().status(), Code::unsupported,
               "quantized_matmul: no kernel on cpu named cpu_bf16: cpu_bf16: activations: int16, "
               "expected float;");
}

TEST(QuantizedMatmul, ZerosAndWhatIsNotFinite) {
  const OneRow w(64);
  const float inf = std::numeric_limits<float>::infinity();
  for (const auto kernel : kBothKernels) {
    for (const Activations act : {Activations::int16, Activations::int8}) {
      std::vector<float> x(3 * 64);
      x[7] = -0.0f;
      x[64 + 40] = inf;  // row 1
      x[128] = 1.0f;     // row 2
      const auto y = w.times(x, act, kernel);
      EXPECT_EQ(y[0], 0.0f);
      EXPECT_TRUE(std::isnan(y[1]));
      EXPECT_NEAR(y[2], -2.0f, 1e-6f);
      x[64 + 40] = std::nanf("");
      EXPECT_TRUE(std::isnan(w.times(x, act, kernel)[1]));
    }
    std::vector<float> x(64);
    x[5] = inf;
    EXPECT_EQ(w.times(x, Activations::exact, kernel)[0], inf);
  }
}

// Numbers whose scale would be subnormal: no code leaves its range, and the largest number keeps
// eight bits.
TEST(QuantizedMatmul, TinyNumbers) {
  const OneRow w(32);
  for (const auto kernel : kBothKernels) {
    for (const Activations act : {Activations::int16, Activations::int8}) {
      for (int power = -149; power < -100; ++power) {
        std::vector<float> x(32);
        x[15] = std::ldexp(1.0f, power);  // w = 5.5
        const float want = std::ldexp(5.5f, power), y = w.times(x, act, kernel)[0];
        EXPECT_NEAR(y, want, std::max(want * 0.005f, 0x1p-139f)) << power;
      }
    }
  }
}

// A row's bits are the same alone and among others, on every kernel and with several slabs.
TEST(QuantizedMatmul, RowsDoNotDependOnEachOther) {
  const std::int64_t inputs = 1120, rows = 29;
  const OneRow w(inputs);
  oracle::Rng rng(3);
  std::vector<float> x(static_cast<std::size_t>(rows * inputs));
  for (float& v : x) v = static_cast<float>(rng.normal());
  const auto check = [&](std::string_view kernel, Activations act) {
    const auto all = w.times(x, act, kernel);
    for (std::int64_t m = 0; m < rows; ++m) {
      const auto first = x.begin() + m * inputs;
      const auto one = w.times({first, first + inputs}, act, kernel);
      EXPECT_EQ(one[0], all[static_cast<std::size_t>(m)]) << kernel << ' ' << m;
    }
  };
  for (const auto kernel : kBothKernels)
    for (const Activations act : {Activations::exact, Activations::int16, Activations::int8})
      check(kernel, act);
  if (cpu::has_bf16()) check("cpu_bf16", Activations::exact);
}

TEST(QuantizedMatmul, Errors) {
  std::vector<float> x(64), y(2, 7), grid(2);
  std::vector<std::uint32_t> packed(16);
  const QuantizedMatmulDesc good{
      1, {.outputs = 2, .inputs = 64, .scale_element = DType::f32}, Activations::int16};
  QuantizedMatmul::Args args;
  args.x = view(std::as_const(x).data(), good.x_shape());
  args.packed = view(std::as_const(packed).data(), good.weights.packed_shape());
  args.scales = view(std::as_const(grid).data(), good.weights.grid_shape());
  args.biases = args.scales;
  args.y = view(y.data(), good.y_shape());
  const auto with = [&](auto change) {
    QuantizedMatmulDesc d = good;
    change(d);
    return run_op<QuantizedMatmul>(d, args);
  };
  using D = QuantizedMatmulDesc&;
  const Code bad = Code::invalid_argument;
  expect_error(with([](D d) { d.rows = -1; }), bad,
               "quantized_matmul: rows: -1, expected at least 0");
  expect_error(with([](D d) { d.weights.type = WeightType::f32; }), bad,
               "quantized_matmul: activations: int16 with type f32, expected float");
  expect_error(with([](D d) { d.element = DType::f16; }), Code::unsupported,
               "quantized_matmul: element: f16, expected f32 or bf16");
  expect_error(with([](D d) { d.activations = static_cast<Activations>(3); }), bad,
               "quantized_matmul: activations: 3, expected 0..2");
  expect_error(with([](D d) { d.weights.layout = WeightLayout::panels; }), bad,
               "quantized_matmul: packed: given, but read only with layout stored; leave it out");
  expect_error(with([](D d) { d.weights.outputs = 3; }), bad,
               "quantized_matmul: packed: shape [2,8], expected [3,8] = [outputs,words]");
  EXPECT_EQ(y, std::vector<float>(2, 7));
  expect_ok(run_op<QuantizedMatmul>(good, args));
}

}  // namespace
}  // namespace bittern
