#include "bittern/ops/quantized_matmul_backward.h"
#include "ops/matmul/weights.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = QuantizedMatmulBackward;

void d_x(const Op::Desc& d, const Op::Args& a) {
  const auto at = [&](std::int64_t m, std::int64_t k) -> float& {
    return a.d_x.as<float>()[m * a.d_x.row_stride() + k];
  };
  const std::int64_t inputs = d.weights.inputs;
  for (std::int64_t m = 0; m < d.rows; ++m)
    for (std::int64_t k = 0; k < inputs; ++k) at(m, k) = 0;
  for (std::int64_t n = 0; n < d.weights.outputs; ++n) {
    const matmul::StoredRow row = matmul::read_row(d.weights, a, n);
    for (std::int64_t k = 0; k < inputs; ++k) {
      const float w = matmul::weight_of(d.weights, row, k).value;
      for (std::int64_t m = 0; m < d.rows; ++m)
        at(m, k) = std::fma(a.d_y.as<float>()[m * a.d_y.row_stride() + n], w, at(m, k));
    }
  }
}

void d_grid(const Op::Desc& d, const Op::Args& a) {
  const std::int64_t group = d.weights.group_size;
  for (std::int64_t n = 0; n < d.weights.outputs; ++n) {
    const matmul::StoredRow row = matmul::read_row(d.weights, a, n);
    for (std::int64_t g = 0; g < d.weights.groups(); ++g) {
      float d_scale = 0, d_bias = 0;
      for (std::int64_t k = g * group; k < (g + 1) * group; ++k) {
        float dw = 0;
        for (std::int64_t m = 0; m < d.rows; ++m)
          dw = std::fma(a.d_y.as<float>()[m * a.d_y.row_stride() + n],
                        a.x.as<float>()[m * a.x.row_stride() + k], dw);
        if (a.d_w) a.d_w.as<float>()[n * a.d_w.row_stride() + k] = dw;
        const int code = matmul::weight_of(d.weights, row, k).code;
        d_scale = std::fma(static_cast<float>(code), dw, d_scale);
        d_bias += dw;
      }
      if (a.d_scales) a.d_scales.as<float>()[n * a.d_scales.row_stride() + g] = d_scale;
      if (a.d_biases) a.d_biases.as<float>()[n * a.d_biases.row_stride() + g] = d_bias;
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  if (a.d_x) d_x(d, a);
  if (a.d_scales || a.d_biases || a.d_w) d_grid(d, a);
  return {};
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<QuantizedMatmulBackward>> quantized_matmul_backward_ref() {
  return kKernels;
}

}  // namespace bittern
