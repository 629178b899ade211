#include <cmath>
#include <limits>

#include "cpu/bf16.h"
#include "ops/matmul/matmul_aims.h"
#include "oracle/op_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using oracle::kBothKernels;
using oracle::run_op;
using Op = QuantizedMatmulBackward;

TEST(QuantizedMatmulBackward, MatchesRefEverywhere) {
  oracle::expect_parity("quantized_matmul_backward");
}

// Those of this machine; numbers of few bits are exact in all.
std::vector<std::string_view> kernels() {
  std::vector<std::string_view> names(std::begin(kBothKernels), std::end(kBothKernels));
  if (cpu::has_bf16()) names.push_back("cpu_bf16");
  return names;
}

// Affine weights as stored, with their gradients.
struct Affine {
  Affine(std::int64_t rows, const WeightDesc& w)
      : d{rows, w},
        d_y(size(d.y_shape())),
        x(size(d.x_shape())),
        scales(size(w.grid_shape())),
        biases(scales),
        d_x(x.size(), -99),
        d_scales(scales.size(), -99),
        d_biases(scales.size(), -99),
        packed(size(w.packed_shape())) {}
  static std::size_t size(const Axes& shape) { return static_cast<std::size_t>(shape.numel()); }

  Op::Args args() {
    Op::Args a;
    a.d_y = view(std::as_const(d_y).data(), d.y_shape());
    a.x = view(std::as_const(x).data(), d.x_shape());
    a.packed = view(std::as_const(packed).data(), d.weights.packed_shape());
    a.scales = view(std::as_const(scales).data(), d.weights.grid_shape());
    a.biases = view(std::as_const(biases).data(), d.weights.grid_shape());
    a.d_x = view(d_x.data(), d.x_shape());
    a.d_scales = view(d_scales.data(), d.weights.grid_shape());
    a.d_biases = view(d_biases.data(), d.weights.grid_shape());
    return a;
  }
  std::uint32_t code(std::int64_t n, std::int64_t k) const {
    return packed_code(packed.data() + n * d.weights.words(), k, d.weights.bits);
  }

  QuantizedMatmulBackwardDesc d;
  std::vector<float> d_y, x, scales, biases, d_x, d_scales, d_biases;
  std::vector<std::uint32_t> packed;
};

constexpr WeightDesc kTwoRows{
    .outputs = 2, .inputs = 32, .group_size = 32, .scale_element = DType::f32};

TEST(QuantizedMatmulBackward, OneGroupByHand) {
  Affine p(2, kTwoRows);
  for (std::size_t i = 0; i < p.packed.size(); ++i)  // codes k mod 16
    p.packed[i] = i % 2 == 0 ? 0x76543210u : 0xfedcba98u;
  p.scales = {0.5f, 2};
  p.biases = {-2, 1};
  p.d_y = {1, 2, 3, -1};
  for (std::size_t k = 0; k < 32; ++k) {
    p.x[k] = 1;
    p.x[32 + k] = static_cast<float>(k);
  }
  for (const auto kernel : kernels()) {
    expect_ok(run_op<Op>(p.d, p.args(), kernel, Preference::fastest));
    for (std::size_t k = 0; k < 32; ++k) {
      const float code = static_cast<float>(k % 16), w0 = 0.5f * code - 2, w1 = 2 * code + 1;
      EXPECT_EQ(p.d_x[k], w0 + 2 * w1);
      EXPECT_EQ(p.d_x[32 + k], 3 * w0 - w1);
    }
    // dw is 1 + 3 k and 2 - k; the sum of codes is 240, of k 496, of code k 1240 + 3160.
    EXPECT_EQ(p.d_scales, (std::vector<float>{240 + 3 * 4400, 2 * 240 - 4400}));
    EXPECT_EQ(p.d_biases, (std::vector<float>{32 + 3 * 496, 2 * 32 - 496}));
  }
}

// The loss is the sum of d_y y in f64: its differences by each x, scale and bias.
TEST(QuantizedMatmulBackward, AffineGradientsAreDifferencesOfThePlainProduct) {
  oracle::Rng rng(5);
  for (const std::int32_t bits : {2, 3, 4, 5, 6, 8}) {
    for (const std::int64_t group : {32, 64, 128}) {
      Affine p(5, {.outputs = 3,
                   .inputs = 256,
                   .bits = bits,
                   .group_size = group,
                   .scale_element = DType::f32});
      for (auto* v : {&p.d_y, &p.x, &p.scales, &p.biases})
        for (float& f : *v) f = static_cast<float>(rng.normal());
      for (std::uint32_t& word : p.packed) word = static_cast<std::uint32_t>(rng.next());
      expect_ok(run_op<Op>(p.d, p.args()));
      const std::int64_t groups = 256 / group;
      // The part of the loss that row m of x, or row n of W, has a share in.
      const auto term = [&](std::int64_t m, std::int64_t n, const auto& x, const auto& s,
                            const auto& b) {
        double y = 0;
        for (std::int64_t k = 0; k < 256; ++k) {
          const auto g = static_cast<std::size_t>(n * groups + k / group);
          y += static_cast<double>(x[static_cast<std::size_t>(m * 256 + k)]) *
               (p.code(n, k) * static_cast<double>(s[g]) + static_cast<double>(b[g]));
        }
        return y * static_cast<double>(p.d_y[static_cast<std::size_t>(m * 3 + n)]);
      };
      const auto loss = [&](std::int64_t row, std::int64_t output, const auto& x, const auto& s,
                            const auto& b) {
        double sum = 0;
        for (std::int64_t m = 0; m < 5; ++m)
          for (std::int64_t n = 0; n < 3; ++n)
            if (m == row || n == output) sum += term(m, n, x, s, b);
        return sum;
      };
      const auto difference = [&](std::vector<double>& v, std::size_t i, const auto& f) {
        const double at = v[i];
        v[i] = at + 0.5;
        const double up = f();
        v[i] = at - 0.5;
        const double down = f();
        v[i] = at;
        return up - down;
      };
      std::vector<double> x(p.x.begin(), p.x.end()), s(p.scales.begin(), p.scales.end()),
          b(p.biases.begin(), p.biases.end());
      const double most = 1e-5 * 256 * (1 << bits);
      for (std::size_t i = 0; i < p.x.size(); i += 37) {
        const auto m = static_cast<std::int64_t>(i / 256);
        EXPECT_NEAR(p.d_x[i], difference(x, i, [&] { return loss(m, -1, x, s, b); }), most);
      }
      for (std::size_t i = 0; i < s.size(); ++i) {
        const auto n = static_cast<std::int64_t>(i) / groups;
        const auto f = [&] { return loss(-1, n, x, s, b); };
        EXPECT_NEAR(p.d_scales[i], difference(s, i, f), most) << bits << " " << group;
        EXPECT_NEAR(p.d_biases[i], difference(b, i, f), most) << bits << " " << group;
      }
    }
  }
}

// d_x of GGUF's types, against the numbers that gguf_dequantize gives.
TEST(QuantizedMatmulBackward, BlockGradientsAreThePlainProduct) {
  oracle::Rng rng(6);
  for (std::size_t i = 0; i < std::size(kBlockTypeNames); ++i) {
    const auto type = static_cast<BlockType>(i);
    const QuantizedMatmulBackwardDesc d{3,
                                        {.outputs = 19, .inputs = 512, .type = weight_type(type)}};
    std::vector<std::uint8_t> blocks(static_cast<std::size_t>(d.weights.block_shape().numel()));
    oracle::WeightViews views;
    views.blocks = view(std::as_const(blocks).data(), d.weights.block_shape());
    oracle::aim_weights(d.weights, views, rng);
    std::vector<float> w(19 * 512), d_y(3 * 19), d_x(3 * 512);
    for (float& f : d_y) f = static_cast<float>(rng.normal());
    const GgufDesc dequantize{.outer_size = 19, .axis_size = 512, .type = type};
    GgufDequantize::Args numbers;
    numbers.blocks = views.blocks;
    numbers.y = view(w.data(), {19, 512});
    expect_ok(run_op<GgufDequantize>(dequantize, numbers));
    Op::Args a;
    a.d_y = view(std::as_const(d_y).data(), d.y_shape());
    a.blocks = views.blocks;
    a.d_x = view(d_x.data(), d.x_shape());
    expect_ok(run_op<Op>(d, a));
    int finite = 0;
    for (std::size_t m = 0; m < 3; ++m) {
      for (std::size_t k = 0; k < 512; ++k) {
        double sum = 0, size = 0;
        for (std::size_t n = 0; n < 19; ++n) {
          const double term = static_cast<double>(d_y[m * 19 + n]) * w[n * 512 + k];
          sum += term;
          size += std::fabs(term);
        }
        if (!(size < 1e30)) continue;
        ++finite;
        EXPECT_NEAR(d_x[m * 512 + k], sum, 1e-6 * size + 1e-40) << kBlockTypeNames[i];
      }
    }
    EXPECT_GT(finite, 100) << kBlockTypeNames[i];
  }
}

TEST(QuantizedMatmulBackward, WhatIsNotFiniteStaysInItsRowAndColumn) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const auto kernel : kernels()) {
    Affine p(7, {.outputs = 20, .inputs = 128, .scale_element = DType::f32});
    for (auto* v : {&p.d_y, &p.x, &p.scales, &p.biases}) std::fill(v->begin(), v->end(), 1.0f);
    for (std::uint32_t& word : p.packed) word = 0x11111111u;
    p.d_y[2 * 20 + 17] = std::nanf("");
    p.x[4 * 128 + 70] = -inf;
    expect_ok(run_op<Op>(p.d, p.args(), kernel, Preference::fastest));
    for (std::size_t m = 0; m < 7; ++m) {
      for (std::size_t k = 0; k < 128; ++k)
        EXPECT_EQ(std::isnan(p.d_x[m * 128 + k]), m == 2) << m << " " << k;
    }
    for (std::size_t n = 0; n < 20; ++n) {
      for (std::size_t g = 0; g < 2; ++g) {
        const float scale = p.d_scales[n * 2 + g], bias = p.d_biases[n * 2 + g];
        if (n == 17) {
          EXPECT_TRUE(std::isnan(scale) && std::isnan(bias));
        } else {
          EXPECT_EQ(scale, g == 1 ? -inf : 7 * 64) << n;
          EXPECT_EQ(bias, scale);
        }
      }
    }
  }
}

TEST(QuantizedMatmulBackward, Bf16ProductsByHand) {
  if (!cpu::has_bf16()) GTEST_SKIP() << cpu::bf16_supported().message();
  for (const std::int64_t rows : {1, 2, 3, 33}) {
    Affine p(rows, kTwoRows);
    p.d.weights.outputs = 1;
    std::fill(p.packed.begin(), p.packed.end(), 0x33333333u);
    p.scales = {1 + 0x1p-9f, 0};  // w is 3 + 2^-8 (1 + 1/2), which rounds to 3
    std::fill(p.d_y.begin(), p.d_y.end(), 1 + 0x1p-8f);           // a tie, to even: 1
    std::fill(p.x.begin(), p.x.end(), 1 + 0x1.8p-7f - 0x1p-20f);  // below one: 1 + 2^-7
    const auto run = [&] { expect_ok(run_op<Op>(p.d, p.args(), "cpu_bf16", Preference::fastest)); };
    const auto expect = [&](float d_x, float dw) {
      EXPECT_EQ(p.d_x[0], d_x);
      EXPECT_EQ(p.d_scales[0], 3 * 32 * dw);
      EXPECT_EQ(p.d_biases[0], 32 * dw);
    };
    const auto all = static_cast<float>(rows);
    run();
    expect(3, all * (1 + 0x1p-7f));
    p.d_y[0] = 0x1p-130f;  // counts as 0
    run();
    expect(0, (all - 1) * (1 + 0x1p-7f));
    p.d_y[0] = std::nanf("");
    run();
    EXPECT_TRUE(std::isnan(p.d_x[0]) && std::isnan(p.d_scales[0]) && std::isnan(p.d_biases[0]));
    if (rows > 1) {
      EXPECT_EQ(p.d_x[32], 3);
    }
  }
}

TEST(QuantizedMatmulBackward, Bf16ProductsAreForTheFastestPreference) {
  QuantizedMatmulBackwardDesc d{512, {.outputs = 512, .inputs = 64}};
  const auto exact = Plan<Op>::select(d);
  ASSERT_TRUE(exact.ok());
  EXPECT_NE(exact->sku().kernel, "cpu_bf16");
  EXPECT_EQ(exact->precision_guarantee().error_norm, ErrorNorm::exact);
  if (!cpu::has_bf16()) GTEST_SKIP() << cpu::bf16_supported().message();
  const auto select = [&] { return Plan<Op>::select(d, {}, Preference::fastest); };
  ASSERT_TRUE(select().ok());
  EXPECT_EQ(select()->sku().kernel, "cpu_bf16");
  const double rounding = 0x1p-7 + 0x1p-16;
  const auto bound = [&](int terms) { return rounding + (1 + rounding) * (terms + 8) * 0x1p-23; };
  EXPECT_EQ(select()->precision_guarantee().error_norm, ErrorNorm::terms);
  EXPECT_EQ(select()->precision_guarantee().error_bound, bound(576));
  d.weights.outputs = 600;
  EXPECT_EQ(select()->precision_guarantee().error_bound, bound(600));
  cpu::force_isa(cpu::Isa::avx2);
  const auto refused = Plan<Op>::select(d, {}, Preference::fastest, "cpu_bf16");
  cpu::force_isa(cpu::Isa::none);
  expect_error(refused.status(), Code::unsupported,
               "quantized_matmul_backward: no kernel on cpu named cpu_bf16: cpu_bf16: needs "
               "AVX512_BF16 and the target AVX3_DL, got AVX2;");
}

// An odd number of outputs: the row that the last pair lacks is in the panel, with any bytes.
TEST(QuantizedMatmulBackward, RowsThatAPanelLacksAreNotRead) {
  constexpr std::int64_t kInputs = 33;
  QuantizedMatmulBackwardDesc d{2, {.outputs = 3, .inputs = kInputs, .type = WeightType::f32}};
  d.weights.layout = WeightLayout::panels;
  std::vector<float> panel(kInputs * 16, std::nanf("")), d_y(2 * 3, 1), d_x(2 * kInputs);
  for (std::size_t k = 0; k < kInputs; ++k) std::fill_n(panel.begin() + k * 16, 3, 1.0f);
  Op::Args a;
  a.d_y = view(std::as_const(d_y).data(), d.y_shape());
  a.panels = view(reinterpret_cast<const std::uint8_t*>(panel.data()), d.weights.panel_shape());
  a.d_x = view(d_x.data(), d.x_shape());
  for (const auto kernel : kernels()) {
    expect_ok(run_op<Op>(d, a, kernel, Preference::fastest));
    EXPECT_EQ(d_x, std::vector<float>(d_x.size(), 3)) << kernel;
  }
}

TEST(QuantizedMatmulBackward, EmptySumsAreZero) {
  for (const auto kernel : kernels()) {
    Affine none(0, kTwoRows);
    expect_ok(run_op<Op>(none.d, none.args(), kernel, Preference::fastest));
    EXPECT_EQ(none.d_scales, std::vector<float>(2));
    EXPECT_EQ(none.d_biases, std::vector<float>(2));
    WeightDesc w = kTwoRows;
    w.outputs = 0;
    Affine rows(3, w);
    expect_ok(run_op<Op>(rows.d, rows.args(), kernel, Preference::fastest));
    EXPECT_EQ(rows.d_x, std::vector<float>(96));
  }
}

TEST(QuantizedMatmulBackward, Errors) {
  Affine p(3, kTwoRows);
  const auto with = [&](auto change) {
    QuantizedMatmulBackwardDesc d = p.d;
    Op::Args a = p.args();
    change(d, a);
    return run_op<Op>(d, a);
  };
  using D = QuantizedMatmulBackwardDesc&;
  using A = Op::Args&;
  const Code bad = Code::invalid_argument;
  const std::string op = "quantized_matmul_backward: ";
  expect_error(with([](D d, A) { d.rows = -1; }), bad, op + "rows: -1, expected at least 0");
  expect_error(with([](D d, A) { d.weights.bits = 7; }), bad,
               op + "bits: 7, expected one of 2 3 4 5 6 8");
  expect_error(with([](D d, A) { d.rows = d.weights.outputs = std::int64_t{1} << 40; }), bad,
               op + "sizes: more than 2^59 elements");
  expect_error(with([](D, A a) { a.x = {}; }), bad,
               op + "x: left out, expected f32 [3,32] for d_scales");
  expect_error(with([](D, A a) { a.x = {}, a.d_scales = {}; }), bad,
               op + "x: left out, expected f32 [3,32] for d_biases");
  expect_error(with([](D, A a) { a.d_x = {}, a.d_scales = {}, a.d_biases = {}; }), bad,
               op + "every output is left out, expected at least one");
  expect_error(with([](D, A a) { a.d_y = {}; }), bad, op + "d_y: null, expected f32 [3,2]");
  expect_error(with([](D d, A a) {
                 d.weights.layout = WeightLayout::panels;
                 a.packed = a.scales = a.biases = {};
               }),
               bad, op + "panels: null, expected u8 [1,384]");
  // Of weights without scales and biases of their own.
  const std::vector<float> w(64, 1);
  const auto plain = [&](auto change) {
    return with([&](D d, A a) {
      d.weights = {.outputs = 2, .inputs = 32, .type = WeightType::f32};
      a.w = view(w.data(), d.weights.plain_shape());
      a.packed = a.scales = a.biases = {};
      change(a);
    });
  };
  expect_error(plain([](A) {}), bad,
               op + "d_scales: given, but read only with type affine; leave it out");
  expect_error(plain([](A a) { a.d_scales = {}; }), bad,
               op + "d_biases: given, but read only with type affine; leave it out");
  for (const auto* v : {&p.d_x, &p.d_scales, &p.d_biases})
    EXPECT_EQ(*v, std::vector<float>(v->size(), -99));
  expect_ok(plain([](A a) { a.x = {}, a.d_scales = a.d_biases = {}; }));
  expect_ok(plain([&](A a) {  // empty, as Python makes them
    a.x = {};
    a.d_scales = a.d_biases = view(p.d_scales.data(), {2, 0});
  }));
  EXPECT_EQ(p.d_scales, std::vector<float>(2, -99));
  expect_ok(with([](D, A a) { a.x = {}, a.d_scales = a.d_biases = {}; }));
  expect_ok(with([](D, A) {}));
}

}  // namespace
}  // namespace bittern
