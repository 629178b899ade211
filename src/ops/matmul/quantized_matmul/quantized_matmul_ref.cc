#include "bittern/ops/quantized_matmul.h"
#include "ops/matmul/activations.h"
#include "ops/matmul/weights.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = QuantizedMatmul;
using matmul::Weight;

struct Codes {  // of a row of x
  std::vector<int> c;
  std::vector<float> d;  // of each element's group
};

Codes quantise(const Op::Desc& d, const std::vector<float>& x) {
  const float full_scale =
      d.activations == Activations::int16 ? matmul::kInt16Scale : matmul::kInt8Scale;
  const auto group = static_cast<std::size_t>(d.x_group());
  Codes out{std::vector<int>(x.size()), std::vector<float>(x.size())};
  for (std::size_t first = 0; first < x.size(); first += group) {
    const std::size_t end = std::min(first + group, x.size());
    const float scale = matmul::activation_scale(
        x.data() + first, static_cast<std::int64_t>(end - first), full_scale);
    for (std::size_t k = first; k < end; ++k) {
      out.d[k] = scale;
      out.c[k] = matmul::activation_code(x[k], scale);
    }
  }
  return out;
}

float product(const std::vector<float>& x, const std::vector<Weight>& w) {
  float acc = 0;
  for (std::size_t k = 0; k < x.size(); ++k) acc = std::fma(x[k], w[k].value, acc);
  return acc;
}

float product(const Codes& x, const std::vector<Weight>& w, std::size_t run, bool has_bias) {
  float acc = 0;
  for (std::size_t first = 0; first < w.size(); first += run) {
    std::int64_t sum = 0, dot = 0;
    for (std::size_t k = first; k < first + run; ++k) {
      sum += x.c[k];
      dot += w[k].code * x.c[k];
    }
    const float d = x.d[first], s = w[first].s, b = w[first].b;
    if (has_bias) acc = std::fma(b, d * static_cast<float>(sum), acc);
    const float scaled = static_cast<float>(dot) * d;
    acc = std::fma(scaled, s, acc);
  }
  return acc;
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const auto inputs = static_cast<std::size_t>(d.weights.inputs);
  const bool exact = d.activations == Activations::exact;
  return visit<float, bf16>(d.element, [&]<class X>(Type<X>) {
    std::vector<std::vector<float>> x(static_cast<std::size_t>(d.rows));
    std::vector<Codes> codes;
    for (std::int64_t m = 0; m < d.rows; ++m) {
      std::vector<float>& row = x[static_cast<std::size_t>(m)];
      for (std::size_t k = 0; k < inputs; ++k)
        row.push_back(to_math(a.x.as<X>()[m * a.x.row_stride() + static_cast<std::int64_t>(k)]));
      if (!exact) codes.push_back(quantise(d, row));
    }
    for (std::int64_t n = 0; n < d.weights.outputs; ++n) {
      const matmul::StoredRow row = matmul::read_row(d.weights, a, n);
      std::vector<Weight> w;
      for (std::size_t k = 0; k < inputs; ++k)
        w.push_back(matmul::weight_of(d.weights, row, static_cast<std::int64_t>(k)));
      for (std::int64_t m = 0; m < d.rows; ++m) {
        const auto i = static_cast<std::size_t>(m);
        const float y = exact ? product(x[i], w)
                              : product(codes[i], w, static_cast<std::size_t>(d.run()),
                                        matmul::has_bias(d.weights));
        const std::int64_t at = m * a.y.row_stride() + n;
        if (d.y_element() == DType::f32) {
          a.y.as<float>()[at] = y;
        } else {
          a.y.as<bf16>()[at] = to_bf16(y);
        }
      }
    }
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<QuantizedMatmul>> quantized_matmul_ref() { return kKernels; }

}  // namespace bittern
