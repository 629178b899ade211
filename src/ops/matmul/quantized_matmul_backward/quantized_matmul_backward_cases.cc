#include "ops/matmul/matmul_aims.h"

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

}  // namespace bittern::oracle
