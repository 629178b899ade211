#include "ops/matmul/bf16_unit.h"
#include "ops/matmul/matmul_aims.h"
#include "ops/matmul/weights.h"

namespace bittern::oracle {

std::vector<QuantizedMatmulBackwardDesc> quantized_matmul_backward_check_cases() {
  std::vector<QuantizedMatmulBackwardDesc> cases;
  constexpr std::int64_t kOutputs[] = {5, 17, 21};
  for (const WeightDesc& w : weight_cases()) {
    if (w.outputs == 5 || w.outputs == 16) continue;  // one size of each type, and the empty ones
    const auto i = static_cast<std::int64_t>(cases.size());
    // Rows and outputs that leave every tail of a tile.
    QuantizedMatmulBackwardDesc d{1 + i % 17, w};
    if (w.outputs == 37) d.weights.outputs = kOutputs[i % 3];
    d.weights.layout = static_cast<WeightLayout>(i % 2);
    cases.push_back(d);
  }
  // No rows; more rows, outputs, inputs and panels than one block takes.
  cases.push_back({0, {.outputs = 20, .inputs = 64}});
  cases.push_back({0, {.outputs = 20, .inputs = 64, .type = WeightType::q8_0}});
  cases.push_back({530, {.outputs = 3, .inputs = 32, .group_size = 32}});
  cases.push_back({7, {.outputs = 275, .inputs = 32, .bits = 3, .group_size = 32}});
  cases.push_back({3, {.outputs = 17, .inputs = 1152, .bits = 2, .group_size = 128}});
  cases.push_back({13, {.outputs = 5, .inputs = 536, .type = WeightType::f32}});
  cases.push_back({4, {.outputs = 35, .inputs = 541, .type = WeightType::bf16}});
  cases.push_back({5, {.outputs = 18, .inputs = 1280, .type = WeightType::q6_k}});
  // Of one problem, both layouts.
  for (const WeightLayout layout : {WeightLayout::stored, WeightLayout::panels}) {
    QuantizedMatmulBackwardDesc d{8, {.outputs = 67, .inputs = 192}};
    d.weights.layout = layout;
    cases.push_back(d);
  }
  return cases;
}

// More pairs of rows, and of outputs, than one block takes; both odd.
std::vector<QuantizedMatmulBackwardDesc> quantized_matmul_backward_bounded_cases(bool) {
  std::vector<QuantizedMatmulBackwardDesc> cases;
  for (const WeightLayout layout : {WeightLayout::stored, WeightLayout::panels}) {
    cases.push_back({827, {.outputs = 33, .inputs = 64, .group_size = 32, .layout = layout}});
    cases.push_back({61, {.outputs = 805, .inputs = 96, .bits = 3, .layout = layout}});
    cases.back().weights.group_size = 32;
    cases.push_back(
        {50, {.outputs = 419, .inputs = 131, .type = WeightType::f16, .layout = layout}});
  }
  return cases;
}

std::vector<BenchCase<QuantizedMatmulBackwardDesc>> quantized_matmul_backward_bench_cases() {
  std::vector<BenchCase<QuantizedMatmulBackwardDesc>> cases;
  const auto add = [&](std::int64_t rows, const WeightDesc& w) {
    std::string label = std::to_string(rows) + " rows, " + std::to_string(w.outputs) + " x " +
                        std::to_string(w.inputs) + " ";
    label += w.affine() ? "affine" + std::to_string(w.bits) + "g" + std::to_string(w.group_size)
                        : kWeightTypeNames[static_cast<std::size_t>(w.type)];
    if (w.stored()) label += " stored";
    cases.push_back({.label = label,
                     .desc = {rows, w},
                     .fill = fill_panels<QuantizedMatmulBackwardDesc>,
                     .left_out = w.affine() ? "d_w" : "x"});
  };
  const WeightDesc large{.outputs = 4096, .inputs = 4096, .layout = WeightLayout::panels};
  add(512, large);
  add(512, {.outputs = 4096, .inputs = 4096});
  for (const WeightType type : {WeightType::bf16, WeightType::q4_k}) {
    WeightDesc w = large;
    w.type = type;
    add(512, w);
  }
  // Of SmolLM2-135M.
  for (const std::int64_t rows : {512, 4096}) {
    add(rows, {.outputs = 192, .inputs = 576, .layout = WeightLayout::panels});
    add(rows, {.outputs = 1536, .inputs = 576, .layout = WeightLayout::panels});
    add(rows, {.outputs = 576, .inputs = 1536, .layout = WeightLayout::panels});
  }
  const auto add_fastest = [&](const WeightDesc& w) {
    add(512, w);
    cases.back().label += " fastest";
    cases.back().preference = Preference::fastest;
    cases.back().limit = BenchLimit::bf16;
  };
  add_fastest(large);
  add_fastest({.outputs = 1536, .inputs = 576, .bits = 3, .layout = WeightLayout::panels});
  add_fastest({.outputs = 576, .inputs = 1536, .bits = 3, .layout = WeightLayout::panels});
  return cases;
}

namespace {

// Mostly ordinary numbers, with zeros of both signs; some rows, and some columns, have tiny or huge
// ones; now and then one number is not finite, which spoils its row or its column and no other.
void aim_factor(const ConstView& v, Rng& rng) {
  if (!v || v.shape.numel() == 0) return;
  const std::int64_t rows = v.shape[0], columns = v.shape[1];
  const auto scale = [&] {
    if (!rng.chance(8)) return 0;
    return rng.chance(2) ? -130 - static_cast<int>(rng.below(18)) : 60;
  };
  std::vector<int> powers;
  for (std::int64_t k = 0; k < columns; ++k) powers.push_back(scale());
  for (std::int64_t m = 0; m < rows; ++m) {
    const int power = scale();
    const bool zeros = rng.chance(8);
    for (std::int64_t k = 0; k < columns; ++k) {
      double x = std::ldexp(rng.normal(), power + powers[static_cast<std::size_t>(k)]);
      if (zeros || rng.chance(12)) x = rng.chance(2) ? 0.0 : -0.0;
      put(v, m * columns + k, x);
    }
  }
  if (rng.chance(3)) {
    constexpr double kInf = std::numeric_limits<double>::infinity();
    const double odd[] = {std::nan(""), kInf, -kInf, 3e38};
    const double x = odd[rng.below(4)];
    put(v, rng.below(v.shape.numel()), x);
  }
}

}  // namespace

void quantized_matmul_backward_aim(const QuantizedMatmulBackwardDesc& d,
                                   const QuantizedMatmulBackward::Args& a, Rng& rng) {
  aim_weights(d.weights, weight_views(a), rng);
  aim_factor(a.d_y, rng);
  aim_factor(a.x, rng);
}

// Units as the header of the op has them.
void quantized_matmul_backward_judge(const QuantizedMatmulBackwardDesc& d,
                                     const QuantizedMatmulBackward::Args& got,
                                     const QuantizedMatmulBackward::Args& want, Judge& judge) {
  const std::int64_t outputs = d.weights.outputs, inputs = d.weights.inputs;
  const auto magnitude = [](const ConstView& v, std::int64_t i) { return std::fabs(get(v, i)); };
  const auto check = [&](std::string_view operand, const MutView& g, const MutView& w,
                         std::int64_t i, const Bf16Unit& unit) {
    if (g) judge.value(operand, as_const(g), as_const(w), i, unit.value());
  };
  std::vector<Bf16Unit> d_x(static_cast<std::size_t>(got.d_x ? d.rows * inputs : 0));
  const bool grids = got.d_scales || got.d_biases || got.d_w;
  const std::int64_t group = d.weights.affine() ? d.weights.group_size : 1;
  std::vector<double> d_y(static_cast<std::size_t>(d.rows));
  for (std::int64_t n = 0; n < outputs; ++n) {
    const matmul::StoredRow row = matmul::read_row(d.weights, want, n);
    for (std::size_t m = 0; m < d_y.size(); ++m)
      d_y[m] = magnitude(want.d_y, static_cast<std::int64_t>(m) * outputs + n);
    Bf16Unit scale, bias;
    for (std::int64_t k = 0; k < inputs; ++k) {
      const auto weight = matmul::weight_of(d.weights, row, k);
      const double w = std::fabs(static_cast<double>(weight.value));
      const auto at = [&](std::size_t m) { return static_cast<std::int64_t>(m) * inputs + k; };
      for (std::size_t m = 0; got.d_x && m < d_y.size(); ++m)
        d_x[static_cast<std::size_t>(at(m))].add(d_y[m], w);
      if (!grids) continue;
      Bf16Unit dw;
      for (std::size_t m = 0; m < d_y.size(); ++m) dw.add(d_y[m], magnitude(want.x, at(m)));
      check("d_w", got.d_w, want.d_w, n * inputs + k, dw);
      if (k % group == 0) scale = bias = {};
      scale.add(weight.code, dw);
      bias.add(1, dw);
      if ((k + 1) % group != 0) continue;
      const std::int64_t g = (n * inputs + k) / group;
      check("d_scales", got.d_scales, want.d_scales, g, scale);
      check("d_biases", got.d_biases, want.d_biases, g, bias);
    }
  }
  for (std::size_t i = 0; i < d_x.size(); ++i)
    check("d_x", got.d_x, want.d_x, static_cast<std::int64_t>(i), d_x[i]);
}

}  // namespace bittern::oracle
