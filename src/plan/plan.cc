#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "cuda/plugin.h"
#include "plan/overlap.h"
#include "plan/plan_impl.h"

namespace bittern {
namespace plan_detail {
namespace {

Status fail(std::string_view op, const char* operand, const std::string& what) {
  return invalid(std::string(op).append(": ").append(operand).append(": ").append(what));
}

// Whether two views of one shape reach the same elements by the same steps.
bool same_strides(const Extent& a, const Extent& b) {
  for (int i = 0; i < a.shape->rank; ++i)
    if ((*a.shape)[i] > 1 && (*a.stride)[i] != (*b.stride)[i]) return false;
  return true;
}

// The strides of an operand that may have any; `span` is the number of elements from its first to
// its last, 0 when it has none.
Status check_strides(std::string_view op, const char* operand, const ConstView& view, bool output,
                     unsigned flags, std::int64_t& span) {
  span = 0;
  if (view.shape.numel() == 0) return {};
  const auto refuse = [&](int axis, const std::string& what) {
    return unsupported(std::string(op).append(": ").append(operand) + ": stride " +
                       std::to_string(view.stride[axis]) + " of axis " + std::to_string(axis) +
                       ", expected " + what);
  };
  AxesByStride axes;  // those longer than 1
  for (int i = 0; i < view.shape.rank; ++i) {
    if (view.shape[i] <= 1) continue;
    const bool last = i + 1 == view.shape.rank &&
                      (flags & Operand::kScattered) != static_cast<unsigned>(Operand::kScattered);
    if (last && view.stride[i] != 1) return refuse(i, "1");
    if (view.stride[i] < 0) return refuse(i, "at least 0");
    if (view.stride[i] > (std::int64_t{1} << 59) / view.shape[i]) {
      return fail(op, operand,
                  "stride " + std::to_string(view.stride[i]) + " spans more than 2^59 elements");
    }
    axes.add(i, view.stride);
  }
  span = 1;
  for (const int i : axes) {
    if (output && view.stride[i] < span) return refuse(i, "at least " + std::to_string(span));
    span += (view.shape[i] - 1) * view.stride[i];
  }
  if (span > std::int64_t{1} << 59) return fail(op, operand, "spans more than 2^59 elements");
  return {};
}

}  // namespace

Result<std::string_view> kernel_variable(std::string_view op,
                                         std::span<const std::string_view> known) {
  const char* given = std::getenv("BITTERN_KERNEL");
  if (given == nullptr) return std::string_view();
  const std::string_view text = given;
  for (const std::string_view kernel : known) {
    if (std::equal(text.begin(), text.end(), kernel.begin(), kernel.end(),
                   [](unsigned char a, char b) { return std::tolower(a) == b; })) {
      return kernel;
    }
  }
  return fail(op, "BITTERN_KERNEL",
              std::string(text.empty() ? "empty" : text).append(", expected ") + either(known));
}

Status check_device(std::string_view op, Device device) {
  if (device.type != Device::Type::cpu || device.index == 0) return {};
  return fail(op, "device", name(device) + ", expected cpu, whose index is 0");
}

bool splits_rows(const Shape& shape, const Operand& expected) {
  const int extra = shape.rank - expected.shape.rank;
  if ((expected.flags & Operand::kRowAxes) == 0 || extra <= 0 || shape.rank > kMaxRank)
    return false;
  std::int64_t rows = 1;
  for (int i = 0; i <= extra; ++i) {
    if (shape[i] < 0 || (rows != 0 && shape[i] > (std::int64_t{1} << 59) / rows)) return false;
    rows *= shape[i];
  }
  for (int i = 1; i < expected.shape.rank; ++i)
    if (shape[extra + i] != expected.shape[i]) return false;
  return rows == expected.shape[0];
}

Status check_operand(std::string_view op, const char* operand, const ConstView& view, bool output,
                     const Operand& expected, Device device, Extent& extent) {
  if (left_out(view)) {
    if ((expected.flags & Operand::kOptional) != 0 || expected.shape.numel() == 0) return {};
    return fail(op, operand,
                "null, expected " + std::string(name(expected.dtype)) + " " + expected.shape.str());
  }
  if ((expected.flags & Operand::kUnread) != 0) {
    const auto* const end = view.shape.dim.data() + view.shape.rank;
    if (std::find(view.shape.dim.data(), end, 0) != end) return {};
    return fail(
        op, operand,
        std::string("given, but read only with ").append(expected.read_with) + "; leave it out");
  }
  if (view.dtype != expected.dtype) {
    return fail(
        op, operand,
        std::string("dtype ").append(name(view.dtype)) + ", expected " + name(expected.dtype));
  }
  if (view.shape != expected.shape && !splits_rows(view.shape, expected)) {
    return fail(op, operand,
                "shape " + view.shape.str() + ", expected " + expected.shape.str() + " = " +
                    expected.shape.names_str());
  }
  if (view.device != device) {
    return fail(op, operand, "on " + name(view.device) + ", expected " + name(device));
  }
  if (view.stride.rank != view.shape.rank) {
    return fail(op, operand, "strides " + view.stride.str() + ", expected one per axis");
  }
  const std::size_t size = size_of(expected.dtype);
  if ((expected.flags & Operand::kStrided) != 0) {
    std::int64_t span = 0;
    BITTERN_TRY(check_strides(op, operand, view, output, expected.flags, span));
    if (reinterpret_cast<std::uintptr_t>(view.data) % size != 0) {
      return fail(op, operand, "address is not a multiple of " + std::to_string(size));
    }
    if (span == 0) return {};
    const auto* begin = static_cast<const std::byte*>(view.data);
    extent = {operand,        begin,   begin + static_cast<std::size_t>(span) * size,
              expected.dtype, nullptr, nullptr,
              expected.flags, output};
    return {};
  }
  const int rank = expected.shape.rank;
  std::int64_t row = 1;  // elements spanned by the axes after `i`
  for (int i = rank; i-- > 0; row *= expected.shape[i]) {
    if (expected.shape[i] <= 1 || expected.shape.numel() == 0) continue;
    const std::int64_t stride = view.stride[i];
    const bool may_pad = i == 0 && rank > 1 && (expected.flags & Operand::kRowStride) != 0;
    if (may_pad ? stride >= row : stride == row) continue;
    return unsupported(std::string(op).append(": ").append(operand) + ": stride " +
                       std::to_string(stride) + " of axis " + std::to_string(i) + ", expected " +
                       (may_pad ? "at least " : "") + std::to_string(row));
  }
  if (reinterpret_cast<std::uintptr_t>(view.data) % size != 0) {
    return fail(op, operand, "address is not a multiple of " + std::to_string(size));
  }
  const std::int64_t numel = expected.shape.numel();
  if (numel == 0) return {};
  std::int64_t span = numel;
  if (rank > 1) {
    // A padded first axis: rows may lie far apart, and their distance must not overflow.
    const std::int64_t rows = expected.shape[0], length = numel / rows;
    const std::int64_t stride = rows > 1 ? view.stride[0] : length;
    if (rows > 1 && stride > ((std::int64_t{1} << 59) - length) / (rows - 1)) {
      return fail(op, operand,
                  "stride " + std::to_string(stride) + " spans more than 2^59 elements");
    }
    span = (rows - 1) * stride + length;
  }
  const auto* begin = static_cast<const std::byte*>(view.data);
  extent = {operand,        begin,   begin + static_cast<std::size_t>(span) * size,
            expected.dtype, nullptr, nullptr,
            expected.flags, output};
  return {};
}

Status check_overlap(std::string_view op, std::span<const Extent> extents) {
  for (std::size_t i = 0; i < extents.size(); ++i) {
    for (std::size_t j = i + 1; j < extents.size(); ++j) {
      const Extent &a = extents[i], &b = extents[j];
      if (!a.output && !b.output) continue;
      if (a.begin >= b.end || b.begin >= a.end) continue;
      const bool in_place = a.output != b.output && (a.flags & b.flags & Operand::kInPlace) != 0 &&
                            a.begin == b.begin && a.dtype == b.dtype && *a.shape == *b.shape &&
                            same_strides(a, b);
      if (in_place) continue;
      if (!overlap({a.begin, size_of(a.dtype), a.shape, a.stride},
                   {b.begin, size_of(b.dtype), b.shape, b.stride})) {
        continue;
      }
      const Extent &out = b.output ? b : a, &other = b.output ? a : b;
      return fail(op, out.name,
                  std::string("overlaps ").append(other.name) + ", expected memory of its own");
    }
  }
  return {};
}

Status check_memory(std::string_view op, const char* operand, const void* p, Device device) {
  const auto plugin = cuda_plugin(device.index);
  if (!plugin) return plugin.status();
  const Status found = (*plugin)->check_pointer(device.index, p);
  if (found.ok()) return {};
  return {found.code(),
          std::string(op).append(": ").append(operand).append(": ").append(found.message())};
}

}  // namespace plan_detail

#define BITTERN_OP(T, f, CPU, CUDA)                                               \
  template <>                                                                     \
  Result<std::vector<std::span<const Kernel<T>>>> kernels_for<T>(Device device) { \
    std::vector<std::span<const Kernel<T>>> lists;                                \
    if (device.type == Device::Type::cuda) {                                      \
      auto plugin = cuda_plugin(device.index);                                    \
      if (!plugin) return plugin.status();                                        \
      BITTERN_IF_##CUDA(lists.push_back((*plugin)->f);)                           \
    } else {                                                                      \
      BITTERN_IF_##CPU(lists.push_back(f##_cpu());) lists.push_back(f##_ref());   \
    }                                                                             \
    return lists;                                                                 \
  }                                                                               \
  template class Plan<T>;
#include "ops/ops.inc"

}  // namespace bittern
