#include "ops/matmul/activations.h"
#include "ops/matmul/bf16_unit.h"
#include "ops/matmul/matmul_aims.h"
#include "ops/matmul/panels.h"
#include "ops/matmul/weights.h"

namespace bittern::oracle {

std::vector<QuantizedMatmulDesc> quantized_matmul_check_cases() {
  std::vector<QuantizedMatmulDesc> cases;
  constexpr std::int64_t kRows[] = {1, 2, 3, 4, 6, 13, 27};
  std::size_t i = 0;
  for (const WeightDesc& stored : weight_cases()) {
    for (int a = 0; a < 3; ++a) {
      const auto activations = static_cast<Activations>(a);
      if (stored.plain() && activations != Activations::exact) continue;
      for (const WeightLayout layout : {WeightLayout::stored, WeightLayout::panels}) {
        QuantizedMatmulDesc d{kRows[i % std::size(kRows)], stored, activations};
        d.weights.layout = layout;
        if (i % 3 == 1) d.element = DType::bf16;
        if (i % 6 == 4) d.f32_y = false;
        cases.push_back(d);
        ++i;
      }
    }
  }
  // No rows; more rows, inputs and panels than one pass takes.
  cases.push_back({0, {.outputs = 20, .inputs = 64}});
  for (int a = 0; a < 3; ++a) {
    const auto activations = static_cast<Activations>(a);
    cases.push_back({25, {.outputs = 3, .inputs = 24576}, activations});
    cases.push_back({150, {.outputs = 35, .inputs = 192}, activations});
    cases.push_back({5, {.outputs = 100, .inputs = 1152}, activations});
  }
  cases.push_back(
      {30, {.outputs = 100, .inputs = 1031, .type = WeightType::f32}, Activations::exact});
  return cases;
}

std::vector<BenchCase<QuantizedMatmulDesc>> quantized_matmul_bench_cases() {
  std::vector<BenchCase<QuantizedMatmulDesc>> cases;
  const auto add = [&](std::int64_t rows, const WeightDesc& w, Activations act,
                       bool fastest = false) {
    std::string label = rows == 1 ? "1 row, " : std::to_string(rows) + " rows, ";
    label += w.affine() ? "affine" + std::to_string(w.bits) + "g" + std::to_string(w.group_size)
                        : kWeightTypeNames[static_cast<std::size_t>(w.type)];
    label += ' ';
    label += kActivationsNames[static_cast<std::size_t>(act)];
    if (fastest) label += " fastest";
    const BenchLimit limit = rows < 8                    ? BenchLimit::read
                             : fastest                   ? BenchLimit::bf16
                             : act == Activations::exact ? BenchLimit::f32
                                                         : BenchLimit::int8;
    cases.push_back({.label = label,
                     .desc = {rows, w, act},
                     .fill = fill_panels<QuantizedMatmulDesc>,
                     .preference = fastest ? Preference::fastest : Preference::exact,
                     .limit = limit});
  };
  const WeightDesc affine{.outputs = 4096, .inputs = 4096, .layout = WeightLayout::panels};
  WeightDesc q4_1 = affine;
  q4_1.type = WeightType::q4_1;
  for (const std::int64_t rows : {1, 4, 128}) {
    for (const Activations act : {Activations::int8, Activations::int16, Activations::exact}) {
      add(rows, affine, act);
      if (act != Activations::exact) add(rows, q4_1, act);
    }
  }
  for (const WeightType type : {WeightType::q4_0, WeightType::q8_0, WeightType::q4_k,
                                WeightType::q5_k, WeightType::q6_k, WeightType::iq4_nl}) {
    WeightDesc w = affine;
    w.type = type;
    for (const std::int64_t rows : {1, 128}) add(rows, w, Activations::int8);
  }
  WeightDesc bf16 = affine;
  bf16.type = WeightType::bf16;
  for (const std::int64_t rows : {1, 128}) add(rows, bf16, Activations::exact);
  for (const std::int64_t rows : {1, 128}) add(rows, bf16, Activations::exact, true);
  // The forward pass of distillation.
  for (const bool fastest : {false, true}) add(512, affine, Activations::exact, fastest);
  WeightDesc affine3 = affine, q8_0 = affine;
  affine3.bits = 3;
  q8_0.type = WeightType::q8_0;
  for (const WeightDesc& w : {affine3, q8_0}) add(512, w, Activations::exact, true);
  const auto resized = [](WeightDesc w, std::int64_t outputs, std::int64_t inputs) {
    w.outputs = outputs;
    w.inputs = inputs;
    return w;
  };
  for (const auto& [rows, w] :
       {std::pair(512, resized(affine3, 1536, 576)), std::pair(512, resized(affine3, 576, 1536)),
        std::pair(64, resized(q8_0, 49152, 576))}) {
    add(rows, w, Activations::exact, true);
    cases.back().label += ", " + std::to_string(w.inputs) + " to " + std::to_string(w.outputs);
  }
  return cases;
}

// Of pairs: tiles of every height, odd inputs, one panel and more than meet a tile at once, one
// slab of inputs and several, both layouts; every type with each of its tails.
std::vector<QuantizedMatmulDesc> quantized_matmul_bounded_cases(bool) {
  std::vector<QuantizedMatmulDesc> cases;
  const auto add = [&](std::int64_t rows, WeightDesc w) {
    for (const WeightLayout layout : {WeightLayout::stored, WeightLayout::panels}) {
      w.layout = layout;
      cases.push_back({rows, w, Activations::exact});
      cases.back().element = cases.size() % 4 < 2 ? DType::f32 : DType::bf16;
      cases.back().f32_y = cases.size() % 5 != 4;
    }
  };
  constexpr std::int64_t kRows[] = {1, 2, 3, 4, 5, 12, 19, 31};
  constexpr std::int64_t kInputs[] = {1, 2, 31, 64, 257}, kOutputs[] = {3, 16, 37, 64};
  for (const std::int64_t rows : kRows) {
    const std::size_t i = cases.size();
    add(rows,
        {.outputs = kOutputs[i / 2 % 4], .inputs = kInputs[i / 2 % 5], .type = WeightType::bf16});
  }
  for (const WeightDesc& w : weight_cases()) add(kRows[cases.size() / 2 % std::size(kRows)], w);
  for (const WeightType type : {WeightType::f32, WeightType::bf16, WeightType::affine,
                                WeightType::q6_k, WeightType::mxfp4}) {
    WeightDesc w{.outputs = 150, .inputs = 2304, .type = type, .bits = 3};
    if (w.plain()) --w.inputs;
    add(cases.size() % 4 == 0 ? 3 : 31, w);
  }
  // More rows than a block has.
  cases.push_back({541, {.outputs = 5, .inputs = 3, .type = WeightType::bf16}, Activations::exact});
  return cases;
}

// Units as the header of the op has them.
void quantized_matmul_judge(const QuantizedMatmulDesc& d, const QuantizedMatmul::Args& got,
                            const QuantizedMatmul::Args& want, Judge& judge) {
  const auto inputs = static_cast<std::size_t>(d.weights.inputs);
  std::vector<std::vector<double>> x(static_cast<std::size_t>(d.rows));
  for (std::size_t m = 0; m < x.size(); ++m)
    for (std::size_t k = 0; k < inputs; ++k)
      x[m].push_back(std::fabs(get(want.x, static_cast<std::int64_t>(m * inputs + k))));
  for (std::int64_t n = 0; n < d.weights.outputs; ++n) {
    const matmul::StoredRow row = matmul::read_row(d.weights, want, n);
    std::vector<double> w;
    for (std::size_t k = 0; k < inputs; ++k)
      w.push_back(std::fabs(static_cast<double>(
          matmul::weight_of(d.weights, row, static_cast<std::int64_t>(k)).value)));
    for (std::size_t m = 0; m < x.size(); ++m) {
      Bf16Unit unit;
      for (std::size_t k = 0; k < inputs; ++k) unit.add(x[m][k], w[k]);
      judge.value("y", as_const(got.y), as_const(want.y),
                  static_cast<std::int64_t>(m) * d.weights.outputs + n, unit.value());
    }
  }
}

// Each row of x group by group: ordinary numbers; numbers halfway between two codes; zeros of both
// signs; denormal and huge ones; now and then a NaN or an infinity.
void quantized_matmul_aim(const QuantizedMatmulDesc& d, const QuantizedMatmul::Args& a, Rng& rng) {
  aim_weights(d.weights, weight_views(a), rng);
  const std::int64_t inputs = d.weights.inputs, group = d.weights.plain() ? 32 : d.x_group();
  const int full = d.activations == Activations::int8 ? 127 : 32512;
  if (inputs == 0) return;  // of empty rows there may be any number
  for (std::int64_t m = 0; m < d.rows; ++m) {
    const bool bad = rng.chance(12), extreme = rng.chance(6);
    for (std::int64_t first = 0; first < inputs; first += group) {
      const std::int64_t kind = rng.below(extreme ? 6 : 4);
      const auto power = static_cast<int>(rng.below(20)) - 16;
      const std::int64_t end = std::min(first + group, inputs);
      for (std::int64_t k = first; k < end; ++k) {
        double x = rng.normal();
        if (kind == 1) {  // ties, with a scale of 2^power exactly
          const auto code = static_cast<double>(rng.below(2 * full) - full);
          x = std::ldexp(k == first ? full : code + (rng.chance(3) ? 0.0 : 0.5), power);
        } else if (kind == 2 && rng.chance(3)) {
          x = rng.chance(2) ? 0.0 : -0.0;
        } else if (kind == 3) {
          x *= rng.chance(8) ? 30.0 : 1.0;
        } else if (kind == 4) {
          x = std::ldexp(x, -126 - static_cast<int>(rng.below(22)));
        } else if (kind == 5) {
          x = std::ldexp(rng.uniform() - 0.5, 128);
        }
        put(a.x, m * inputs + k, x);
      }
      if (kind == 0 && rng.chance(4))
        for (std::int64_t k = first; k < end; ++k)
          put(a.x, m * inputs + k, k % 2 == 0 ? 0.0 : -0.0);
    }
    if (bad) {
      const double x = rng.awkward();  // before the place: the order of arguments is the compiler's
      put(a.x, m * inputs + rng.below(inputs), x);
    }
  }
}

}  // namespace bittern::oracle
