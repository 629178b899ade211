// When the descriptors of the matmul family are well formed, and their ids in range.
#include "bittern/matmul_desc.h"

#include <iterator>
#include <string>

#include "bittern/ops/embedding.h"
#include "bittern/ops/quantized_matmul.h"
#include "bittern/ops/quantized_matmul_backward.h"
#include "core/expect.h"
#include "core/guarded.h"

namespace bittern {
namespace {

std::string type_name(const WeightDesc& d) {
  return std::string(kWeightTypeNames[static_cast<std::size_t>(d.type)]);
}

Status expect_one_of(std::string_view op, std::string_view field, std::int64_t value,
                     std::initializer_list<std::int64_t> choices) {
  std::string text;
  for (const std::int64_t choice : choices) {
    if (value == choice) return {};
    text.append(text.empty() ? "" : " ").append(std::to_string(choice));
  }
  return fail(op, field, std::to_string(value) + ", expected one of " + text);
}

}  // namespace

Status check_weight_desc(std::string_view op, const WeightDesc& d) noexcept try {
  const auto types = static_cast<std::int64_t>(std::size(kWeightTypeNames));
  BITTERN_TRY(expect_between(op, "type", static_cast<std::int64_t>(d.type), 0, types - 1));
  BITTERN_TRY(expect_between(op, "layout", static_cast<std::int64_t>(d.layout), 0, 1));
  BITTERN_TRY(expect_at_least(op, "outputs", d.outputs, 0));
  BITTERN_TRY(expect_at_least(op, "inputs", d.inputs, 0));
  if (d.affine()) {
    BITTERN_TRY(expect_one_of(op, "bits", d.bits, {2, 3, 4, 5, 6, 8}));
    BITTERN_TRY(expect_one_of(op, "group_size", d.group_size, {32, 64, 128}));
    if (!is_float(d.scale_element) || d.scale_element == DType::f64) {
      return unsupported(std::string(op).append(": scale_element: ").append(name(d.scale_element)) +
                         ", expected f32, f16 or bf16");
    }
  }
  const std::int64_t unit = d.plain()    ? 1
                            : d.affine() ? d.group_size
                                         : block_size(d.block_type()).weights;
  if (d.inputs % unit != 0) {
    return fail(op, "inputs",
                std::to_string(d.inputs) + ", expected a multiple of " + std::to_string(unit) +
                    (d.affine() ? ", the group_size" : ", the block of " + type_name(d)));
  }
  // The last panel is whole, and a weight takes up to 4 bytes and its share of a scale and a bias.
  return expect_countable(op, {d.outputs, 16, d.inputs, 8});
} catch (...) {
  return caught(op);
}

Status QuantizedMatmul::check(const Desc& d) noexcept try {
  BITTERN_TRY(check_weight_desc(kName, d.weights));
  BITTERN_TRY(expect_between(kName, "activations", static_cast<std::int64_t>(d.activations), 0, 2));
  BITTERN_TRY(expect_at_least(kName, "rows", d.rows, 0));
  BITTERN_TRY(expect_countable(kName, {d.rows, d.weights.inputs, 8}));
  BITTERN_TRY(expect_countable(kName, {d.rows, d.weights.outputs}));
  if (d.weights.plain() && d.activations != Activations::exact) {
    return fail(kName, "activations",
                std::string(kActivationsNames[static_cast<std::size_t>(d.activations)])
                        .append(" with type ") +
                    type_name(d.weights) + ", expected float");
  }
  if (d.element == DType::f32 || d.element == DType::bf16) return {};
  return unsupported(std::string(kName).append(": element: ").append(name(d.element)) +
                     ", expected f32 or bf16");
} catch (...) {
  return caught(kName);
}

Status QuantizedMatmulBackward::check(const Desc& d) noexcept try {
  BITTERN_TRY(check_weight_desc(kName, d.weights));
  BITTERN_TRY(expect_at_least(kName, "rows", d.rows, 0));
  BITTERN_TRY(expect_countable(kName, {d.rows, d.weights.inputs}));
  return expect_countable(kName, {d.rows, d.weights.outputs});
} catch (...) {
  return caught(kName);
}

Status QuantizedMatmulBackward::check_contents(const Desc& d, const Args& a) noexcept try {
  const bool read = (a.d_scales || a.d_biases || a.d_w) && d.weights.grid_shape().numel() > 0;
  if (!read || a.x || d.x_shape().numel() == 0) return {};
  return fail(kName, "x",
              "left out, expected f32 " + d.x_shape().str() + " for " +
                  (a.d_scales   ? "d_scales"
                   : a.d_biases ? "d_biases"
                                : "d_w"));
} catch (...) {
  return caught(kName);
}

Status Embedding::check(const Desc& d) noexcept try {
  BITTERN_TRY(check_weight_desc(kName, d.weights));
  BITTERN_TRY(expect_at_least(kName, "rows", d.rows, 0));
  BITTERN_TRY(expect_countable(kName, {d.rows, d.weights.inputs}));
  if (d.rows > 0) BITTERN_TRY(expect_at_least(kName, "outputs", d.weights.outputs, 1));
  return expect_no_f64(kName, d.element);
} catch (...) {
  return caught(kName);
}

Status Embedding::check_contents(const Desc& d, const Args& a) noexcept try {
  const auto* ids = a.ids.as<std::int32_t>();
  for (std::int64_t i = 0; i < d.rows; ++i) {
    if (ids[i] >= 0 && ids[i] < d.weights.outputs) continue;
    return fail(
        kName, "ids",
        "[" + std::to_string(i) + "] is " + std::to_string(ids[i]) +
            (d.weights.outputs == 0 ? ", but W has no rows"
                                    : ", expected 0.." + std::to_string(d.weights.outputs - 1)));
  }
  return {};
} catch (...) {
  return caught(kName);
}

}  // namespace bittern
