// The problem every quantise / dequantise / fake-quantise op shares: a tensor, and which of its
// elements share one scale and zero point.
//
//   x [outer_size, axis_size] (inner_size 1) or [outer_size, axis_size, inner_size]
//
//   granularity   scale and zero_point          one parameter covers
//   group         [outer_size, num_groups()]    group_size consecutive elements of a row
//   token         [outer_size]                  a row
//   channel       [axis_size]                   index c of the middle axis, for all outer and inner
//   tensor        [1]                           everything
//
// With rows of axis_size * inner_size elements, all four are one rule: element j of row i uses
// parameter i * param_step + j / run (see GroupGeometry).
#pragma once
#include <cstdint>
#include <string_view>

#include "bittern/plan.h"

namespace bittern {

enum class Granularity : std::int32_t { group, token, channel, tensor };
inline constexpr std::string_view kGranularityNames[] = {"group", "token", "channel", "tensor"};
constexpr auto& enum_names(Granularity) { return kGranularityNames; }

struct GroupGeometry {
  std::int64_t rows = 0;
  std::int64_t row_length = 0;
  std::int64_t run = 1;         // consecutive elements of a row that share a parameter, >= 1
  std::int64_t param_step = 0;  // parameters from one row to the next; 0: rows share them
  std::int64_t params = 0;      // how many parameters there are

  std::int64_t param(std::int64_t row, std::int64_t j) const { return row * param_step + j / run; }
  // Elements per parameter. They are ordered by row, then by position in the row; sums over them
  // use the halving tree in that order.
  std::int64_t count() const { return params == 0 ? 0 : param_step == 0 ? rows * run : run; }
};

struct QuantizeDesc {
  std::int64_t outer_size = 0;
  std::int64_t axis_size = 0;
  std::int64_t inner_size = 1;    // 1 unless granularity is channel
  std::int64_t group_size = 128;  // read by granularity group alone
  Granularity granularity = Granularity::group;
  std::int32_t q_min = -128;
  std::int32_t q_max = 127;
  DType element = DType::f32;  // of x, y, d_y, d_x: f32 f64 f16 bf16
  DType code = DType::s8;      // of q: s8 u8
  bool f32_scale = false;      // half x with f32 scales (and gradients); otherwise scale is as x
  bool symmetric = true;       // read by dynamic_quantize alone
  bool operator==(const QuantizeDesc&) const = default;

  // Groups along the axis; 0 when group_size <= 0.
  std::int64_t num_groups() const { return group_size > 0 ? axis_size / group_size : 0; }
  DType scale_element() const { return f32_scale ? DType::f32 : element; }
  Axes tensor_shape() const noexcept;
  Axes param_shape() const noexcept;
  GroupGeometry geometry() const noexcept;
};

// Which fields an op reads beyond sizes, granularity and element.
struct QuantizeFields {
  bool range = true;
  bool code = true;
  bool symmetric = false;
};

// Sizes, granularity, dtypes and, where read, the code range. `op` opens every message.
Status check_quantize_desc(std::string_view op, const QuantizeDesc& d,
                           QuantizeFields fields) noexcept;

template <QuantizeFields kFields, class D, class F>
void visit_quantize_fields(D& d, F&& f) {
  f("outer_size", d.outer_size, "product of the axes before the quantised one");
  f("axis_size", d.axis_size, "length of the quantised axis");
  f("inner_size", d.inner_size, "product of the axes after it (granularity channel)");
  f("group_size", d.group_size, "elements per scale (granularity group)");
  f("granularity", d.granularity, "what one scale covers");
  if constexpr (kFields.range) {
    f("q_min", d.q_min, "smallest code");
    f("q_max", d.q_max, "largest code");
  }
  f("element", d.element, "dtype of the floating-point tensors: f32 f64 f16 bf16");
  if constexpr (kFields.code) f("code", d.code, "dtype of the codes: s8 u8");
  f("f32_scale", d.f32_scale, "keep scales in f32 where x is f16 or bf16");
  if constexpr (kFields.symmetric)
    f("symmetric", d.symmetric, "use zero point 0 and a scale from max |x|");
}

inline constexpr unsigned kRows = Operand::kRowStride | Operand::kInPlace;

}  // namespace bittern
