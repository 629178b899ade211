#include "core/expect.h"

#include <cmath>
#include <cstdint>
#include <cstdio>

#include "core/float_mode.h"

namespace bittern {

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

Status expect_countable(std::string_view op, std::initializer_list<std::int64_t> sizes) {
  std::int64_t n = 1;
  for (const std::int64_t size : sizes) {
    if (size == 0) continue;
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

Status expect_no_f64(std::string_view op, DType element) {
  if (is_float(element) && element != DType::f64) return {};
  return unsupported(std::string(op).append(": element: ").append(name(element)) +
                     ", expected f32, f16 or bf16");
}

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

Status expect_groups(std::string_view op, std::int64_t axis_size, std::int64_t group_size) {
  if (axis_size % group_size == 0) return {};
  return fail(op, "axis_size",
              std::to_string(axis_size) + ", expected a multiple of group_size " +
                  std::to_string(group_size));
}

Status expect_finite_f32(std::string_view op, std::string_view field, double value) {
  const FloatMode mode;
  if (std::isfinite(static_cast<float>(value))) return {};
  return fail(op, field, number_text(value) + ", expected a number that is finite in f32");
}

Status expect_eps(std::string_view op, double eps) {
  const FloatMode mode;
  if (!(eps >= 0) || !std::isfinite(static_cast<float>(eps))) {
    return fail(op, "eps",
                number_text(eps) +
                    ", expected a number that is finite in f32 and at "
                    "least 0");
  }
  return {};
}

}  // namespace bittern
