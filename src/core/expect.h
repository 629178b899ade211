// Shared checks of descriptors. Messages read `op: field: what was found, expected what`.
#pragma once
#include <initializer_list>
#include <string>
#include <string_view>

#include "bittern/dtype.h"
#include "bittern/status.h"

namespace bittern {

Status fail(std::string_view op, std::string_view field, const std::string& what);

Status expect_at_least(std::string_view op, std::string_view field, std::int64_t value,
                       std::int64_t least);

Status expect_between(std::string_view op, std::string_view field, std::int64_t value,
                      std::int64_t least, std::int64_t most);

// Views count bytes in int64, so no tensor may reach 2^63 / 8 elements.
// The strides of an empty tensor are products of its other sizes, so these are checked as well.
Status expect_countable(std::string_view op, std::initializer_list<std::int64_t> sizes);

Status expect_float(std::string_view op, DType element, bool f32_scale);

Status expect_no_f64(std::string_view op, DType element);

std::string number_text(double value);

Status expect_groups(std::string_view op, std::int64_t axis_size, std::int64_t group_size);

Status expect_finite_f32(std::string_view op, std::string_view field, double value);

// Of a norm.
Status expect_eps(std::string_view op, double eps);

}  // namespace bittern
