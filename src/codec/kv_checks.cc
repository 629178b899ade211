#include "codec/kv_checks.h"

#include "plan/overlap.h"

namespace bittern::kv {

Status refuse(std::string_view where, const std::string& what) {
  return invalid("kv_cache: " + std::string(where) + ": " + what);
}

Status between(std::string_view field, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return {};
  return refuse(field, std::to_string(value) + ", expected " + std::to_string(least) + ".." +
                           std::to_string(most));
}

Status has_size(const std::string& field, std::size_t size, std::int64_t expected) {
  if (static_cast<std::int64_t>(size) == expected) return {};
  return refuse(field, std::to_string(size) + " values, expected " + std::to_string(expected));
}

Status expect_memory(std::string_view operand, const ConstView& view, Device device) {
  if (view.device != device)
    return refuse(operand, "on " + name(view.device) + ", expected " + name(device));
  if (view.stride.rank != view.shape.rank)
    return refuse(operand, "strides " + view.stride.str() + ", expected one per axis");
  if (is_empty(view.shape)) return {};
  if (view.data == nullptr) return refuse(operand, "null, expected " + view.shape.str());
  for (int i = 0; i < view.shape.rank; ++i) {
    const std::int64_t most = (std::int64_t{1} << 57) / view.shape[i];
    if (view.shape[i] > 1 && (view.stride[i] > most || view.stride[i] < -most)) {
      return refuse(operand, "stride " + std::to_string(view.stride[i]) + " of axis " +
                                 std::to_string(i) + " spans more than 2^57 elements");
    }
  }
  const std::size_t size = size_of(view.dtype);
  if (reinterpret_cast<std::uintptr_t>(view.data) % size == 0) return {};
  return refuse(operand, "address is not a multiple of " + std::to_string(size));
}

Status expect_strides(std::string_view operand, const ConstView& view, bool output) {
  if (is_empty(view.shape)) return {};
  const auto refuse_axis = [&](int axis, const std::string& expected) {
    return unsupported("kv_cache: " + std::string(operand) + ": stride " +
                       std::to_string(view.stride[axis]) + " of axis " + std::to_string(axis) +
                       ", expected " + expected);
  };
  plan_detail::AxesByStride axes;  // those longer than 1
  for (int i = 0; i < view.shape.rank; ++i) {
    if (view.shape[i] == 1) continue;
    if (i + 1 == view.shape.rank && view.stride[i] != 1) return refuse_axis(i, "1");
    if (view.stride[i] < 0) return refuse_axis(i, "at least 0");
    axes.add(i, view.stride);
  }
  if (!output) return {};
  std::int64_t span = 1;
  for (const int i : axes) {
    if (view.stride[i] < span) return refuse_axis(i, "at least " + std::to_string(span));
    span += (view.shape[i] - 1) * view.stride[i];
  }
  return {};
}

}  // namespace bittern::kv
