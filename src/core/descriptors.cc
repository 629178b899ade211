// What makes the shared descriptors well formed.
#include <limits>
#include <string>

#include "bittern/bittern.h"

namespace bittern {
namespace {

Status fail(std::string_view op, std::string_view field, const std::string& what) {
  return invalid(std::string(op).append(": ").append(field).append(": ").append(what));
}

Status expect_at_least(std::string_view op, std::string_view field, std::int64_t value,
                       std::int64_t least) {
  if (value >= least) return {};
  return fail(op, field, std::to_string(value) + ", expected at least " + std::to_string(least));
}

Status expect_between(std::string_view op, std::string_view field, std::int64_t value,
                      std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return {};
  return fail(
      op, field,
      std::to_string(value) + ", expected " + std::to_string(least) + ".." + std::to_string(most));
}

// Views count bytes in int64, so no tensor may reach 2^63 / 8 elements.
Status expect_countable(std::string_view op, std::initializer_list<std::int64_t> sizes) {
  std::int64_t n = 1;
  for (const std::int64_t size : sizes) {
    if (size == 0) return {};
    if (n > (std::int64_t{1} << 59) / size) return fail(op, "sizes", "more than 2^59 elements");
    n *= size;
  }
  return {};
}

Status expect_float(std::string_view op, DType element, bool f32_scale) {
  const auto text = [&] { return std::string(op).append(": element: ").append(name(element)); };
  if (!is_float(element)) return unsupported(text() + ", expected f32, f64, f16 or bf16");
  if (f32_scale && element == DType::f64) return unsupported(text() + " with f32_scale");
  return {};
}

Status expect_groups(std::string_view op, std::int64_t axis_size, std::int64_t group_size) {
  if (axis_size % group_size == 0) return {};
  return fail(op, "axis_size",
              std::to_string(axis_size) + ", expected a multiple of group_size " +
                  std::to_string(group_size));
}

}  // namespace

Shape QuantizeDesc::tensor_shape() const {
  if (inner_size == 1) return {outer_size, axis_size};
  return {outer_size, axis_size, inner_size};
}

Shape QuantizeDesc::param_shape() const {
  switch (granularity) {
    case Granularity::group: return {outer_size, num_groups()};
    case Granularity::token: return {outer_size};
    case Granularity::channel: return {axis_size};
    case Granularity::tensor: return {1};
  }
  return {};
}

GroupGeometry QuantizeDesc::geometry() const {
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
  if (g.run < 1) g.run = 1;  // rows are empty
  g.params = param_shape().numel();
  return g;
}

Status check_quantize_desc(std::string_view op, const QuantizeDesc& d, QuantizeFields fields) {
  const auto granularity = static_cast<std::int32_t>(d.granularity);
  BITTERN_TRY(expect_between(op, "granularity", granularity, 0, 3));
  BITTERN_TRY(expect_at_least(op, "outer_size", d.outer_size, 0));
  BITTERN_TRY(expect_at_least(op, "axis_size", d.axis_size, 0));
  if (d.granularity == Granularity::channel) {
    BITTERN_TRY(expect_at_least(op, "inner_size", d.inner_size, 0));
  } else if (d.inner_size != 1) {
    return fail(op, "inner_size",
                std::to_string(d.inner_size) + ", expected 1 unless granularity is channel");
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
}

Status DynamicQuantize::check(const Desc& d) {
  BITTERN_TRY(check_quantize_desc(kName, d, kFields));
  if (d.symmetric) return expect_at_least(kName, "q_max", d.q_max, 1);
  return expect_at_least(kName, "q_max", d.q_max, std::int64_t{d.q_min} + 1);
}

Status check_affine_desc(std::string_view op, const AffineDesc& d) {
  BITTERN_TRY(expect_at_least(op, "outer_size", d.outer_size, 0));
  BITTERN_TRY(expect_at_least(op, "axis_size", d.axis_size, 0));
  BITTERN_TRY(expect_between(op, "group_size", d.group_size, 2, 1024));
  BITTERN_TRY(expect_groups(op, d.axis_size, d.group_size));
  BITTERN_TRY(expect_countable(op, {d.outer_size, d.axis_size}));
  if (d.bits != 0) BITTERN_TRY(expect_between(op, "bits", d.bits, 1, 8));
  if (d.n_bins != 0) {
    const std::int32_t most = d.bits != 0 ? 1 << d.bits : 256;
    BITTERN_TRY(expect_between(op, "n_bins", d.n_bins, 2, most));
  }
  BITTERN_TRY(expect_between(op, "storage", static_cast<std::int32_t>(d.storage), 0, 1));
  BITTERN_TRY(expect_between(op, "method", static_cast<std::int32_t>(d.method), 0, 2));
  BITTERN_TRY(expect_between(op, "rounding", static_cast<std::int32_t>(d.rounding), 0, 1));
  return expect_float(op, d.element, d.f32_scale);
}

Status check_pack_desc(std::string_view op, const PackDesc& d) {
  BITTERN_TRY(expect_at_least(op, "outer_size", d.outer_size, 0));
  BITTERN_TRY(expect_at_least(op, "axis_size", d.axis_size, 0));
  BITTERN_TRY(expect_between(op, "bits", d.bits, 1, 8));
  return expect_countable(op, {d.outer_size, d.axis_size});
}

}  // namespace bittern
