// When the descriptors of the quantise family are well formed, and their geometry.
#include <string>

#include "bittern/ops/dynamic_quantize.h"
#include "bittern/quantize_desc.h"
#include "core/expect.h"
#include "core/guarded.h"

namespace bittern {

Axes QuantizeDesc::tensor_shape() const noexcept {
  const Axis outer{"outer_size", outer_size}, axis{"axis_size", axis_size};
  if (inner_size == 1) return {outer, axis};
  return {outer, axis, {"inner_size", inner_size}};
}

Axes QuantizeDesc::param_shape() const noexcept {
  const Axis outer{"outer_size", outer_size};
  switch (granularity) {
    case Granularity::group: return {outer, {"axis_size/group_size", num_groups()}};
    case Granularity::token: return {outer};
    case Granularity::channel: return {{"axis_size", axis_size}};
    case Granularity::tensor: return {{"1", 1}};
  }
  return {};
}

GroupGeometry QuantizeDesc::geometry() const noexcept {
  GroupGeometry g{.rows = outer_size, .row_length = axis_size * inner_size};
  switch (granularity) {
    case Granularity::group:
      g.run = group_size;
      g.param_step = num_groups();
      break;
    case Granularity::token:
      g.run = g.row_length;
      g.param_step = 1;
      break;
    case Granularity::channel: g.run = inner_size; break;
    case Granularity::tensor: g.run = g.row_length; break;
  }
  if (g.run < 1) g.run = 1;                                // rows are empty
  if (g.row_length == 0 && g.param_step == 0) g.rows = 0;  // nor does their number matter
  g.params = param_shape().numel();
  return g;
}

Status check_quantize_desc(std::string_view op, const QuantizeDesc& d,
                           QuantizeFields fields) noexcept try {
  const auto granularity = static_cast<std::int32_t>(d.granularity);
  BITTERN_TRY(expect_between(op, "granularity", granularity, 0, 3));
  BITTERN_TRY(expect_at_least(op, "outer_size", d.outer_size, 0));
  BITTERN_TRY(expect_at_least(op, "axis_size", d.axis_size, 0));
  if (d.granularity == Granularity::channel) {
    BITTERN_TRY(expect_at_least(op, "inner_size", d.inner_size, 0));
  } else if (d.inner_size != 1) {
    return fail(op, "inner_size",
                std::to_string(d.inner_size) + " with granularity " +
                    std::string(kGranularityNames[static_cast<std::size_t>(granularity)]) +
                    ", which takes the last axis only: expected 1 (or granularity channel, which "
                    "takes any axis)");
  }
  if (d.granularity == Granularity::group) {
    BITTERN_TRY(expect_at_least(op, "group_size", d.group_size, 1));
    BITTERN_TRY(expect_groups(op, d.axis_size, d.group_size));
  }
  BITTERN_TRY(expect_countable(op, {d.outer_size, d.axis_size, d.inner_size}));
  BITTERN_TRY(expect_float(op, d.element, d.f32_scale));
  if (fields.code && d.code != DType::s8 && d.code != DType::u8) {
    return unsupported(std::string(op).append(": code: ").append(name(d.code)) +
                       ", expected s8 or u8");
  }
  if (fields.range) {
    BITTERN_TRY(expect_at_least(op, "q_max", d.q_max, d.q_min));
    if (fields.code) {
      const std::int32_t least = d.code == DType::s8 ? -128 : 0;
      BITTERN_TRY(expect_between(op, "q_min", d.q_min, least, least + 255));
      BITTERN_TRY(expect_between(op, "q_max", d.q_max, least, least + 255));
    }
  }
  return {};
} catch (...) {
  return caught(op);
}

Status DynamicQuantize::check(const Desc& d) noexcept try {
  BITTERN_TRY(check_quantize_desc(kName, d, kFields));
  if (d.symmetric) return expect_at_least(kName, "q_max", d.q_max, 1);
  return expect_at_least(kName, "q_max", d.q_max, std::int64_t{d.q_min} + 1);
} catch (...) {
  return caught(kName);
}

}  // namespace bittern
