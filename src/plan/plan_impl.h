// Plan<Op>'s members. plan.cc instantiates them for every op; a test may instantiate its own op.
#pragma once
#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/float_mode.h"
#include "core/guarded.h"
#include "core/row_runs.h"
#include "core/thread_count.h"
#include "plan/kernels.h"
#include "plan/names.h"

namespace bittern {

namespace plan_detail {

// An operand as can_implement compares it with the others.
struct Extent {
  const char* name;
  const std::byte* begin;
  const std::byte* end;
  DType dtype;
  const Shape* shape;
  const Shape* stride;
  unsigned flags;
  bool output;
};
inline constexpr int kMaxOperands = 32;

// Null data means that the operand is left out, unless its shape has no elements: then null is
// complete.
inline bool left_out(const ConstView& view) {
  const auto& dim = view.shape.dim;
  return view.data == nullptr &&
         std::find(dim.begin(), dim.begin() + view.shape.rank, 0) == dim.begin() + view.shape.rank;
}
// The kernel in `known` that BITTERN_KERNEL names, in upper or lower case; "" if it is not set.
Result<std::string_view> kernel_variable(std::string_view op,
                                         std::span<const std::string_view> known);
Status check_device(std::string_view op, Device device);
// Whether `shape` is the expected one with several axes in place of the first.
bool splits_rows(const Shape& shape, const Operand& expected);
// Compares `view` with what the descriptor implies; fills `extent` if it is ok and not left out.
Status check_operand(std::string_view op, const char* name, const ConstView& view, bool output,
                     const Operand& expected, Device device, Extent& extent);
// No output may overlap another operand, except for exact in-place use.
Status check_overlap(std::string_view op, std::span<const Extent> extents);
// Whether `p` is memory that kernels on a CUDA device can use, whatever its view declares.
Status check_memory(std::string_view op, const char* name, const void* p, Device device);

// Why an operand's shape is what the descriptor implies, where its axes' names do not tell.
template <class Op>
std::string shape_hint(const typename Op::Desc& desc, std::string_view operand,
                       const Shape& found) {
  if constexpr (requires { Op::shape_hint(desc, operand, found); }) {
    return Op::shape_hint(desc, operand, found);
  } else {
    return {};
  }
}

// f(desc, args) for each piece of a problem. A kernel knows rows at one distance. Views that have
// them otherwise are given to it in as few pieces as they allow.
template <class Op, class F>
Status for_rows(const typename Op::Desc& desc, const typename Op::Args& args, F&& f) {
  typename Op::Desc piece = desc;
  std::int64_t& rows = Op::rows(piece);
  const std::int64_t all = rows;
  std::array<RowRuns, kMaxOperands> runs;
  bool plain = true;
  const auto for_views = [&](auto& views, auto&& use) {
    std::size_t i = 0;
    Op::operands(desc, views, [&](const char*, auto& v, const Operand& expected) {
      if ((expected.flags & Operand::kRowAxes) != 0 && v.data != nullptr) use(v, expected, runs[i]);
      ++i;
    });
  };
  typename Op::Args some = args;
  for_views(some, [&](const auto& v, const Operand& expected, RowRuns& run) {
    plain = plain && v.shape.rank == expected.shape.rank;
    run = RowRuns(v.shape, v.stride, expected.shape.rank - 1);
    if (!run.whole()) rows = std::gcd(rows, run.length());
  });
  if (plain) return f(desc, args);
  for (std::int64_t first = 0; first < all; first += rows) {
    some = args;
    for_views(some, [&](auto& v, const Operand& expected, const RowRuns& run) {
      const int extra = v.shape.rank - expected.shape.rank;
      Shape shape = expected.shape, stride = expected.shape;
      shape[0] = rows;
      stride[0] = run.stride();
      for (int i = 1; i < shape.rank; ++i) stride[i] = v.stride[i + extra];
      using Byte = std::conditional_t<std::is_same_v<std::remove_cvref_t<decltype(v)>, MutView>,
                                      std::byte, const std::byte>;
      v.data = static_cast<Byte*>(v.data) +
               run.offset(first) * static_cast<std::int64_t>(size_of(v.dtype));
      v.shape = shape;
      v.stride = stride;
    });
    BITTERN_TRY(f(piece, some));
  }
  return {};
}
template <class Op, class F>
Status for_pieces(const typename Op::Desc& desc, const typename Op::Args& args, F&& f) {
  if constexpr (requires { Op::rows(std::declval<typename Op::Desc&>()); }) {
    return for_rows<Op>(desc, args, f);
  } else {
    return f(desc, args);
  }
}

}  // namespace plan_detail

template <class Op>
Result<Plan<Op>> Plan<Op>::select(const Desc& desc, Device device, Preference preference,
                                  std::string_view kernel, int threads) noexcept try {
  const FloatMode mode;  // a field may be rounded to f32
  if (Status s = Op::check(desc); !s.ok()) return s;
  if (Status s = check_environment(); !s.ok()) return s;
  if (Status s = plan_detail::check_device(Op::kName, device); !s.ok()) return s;
  if (Status s = check_plan_threads(Op::kName, threads); !s.ok()) return s;
  const ThreadCount count(threads);  // scratch depends on it
  auto lists = kernels_for<Op>(device);
  if (!lists) return lists.status();
  std::vector<std::string_view> known;
  for (const auto& list : *lists)
    for (const Kernel<Op>& k : list) known.push_back(k.name);
  if (kernel.empty() && !known.empty()) {
    const auto forced = plan_detail::kernel_variable(Op::kName, known);
    if (!forced) return forced.status();
    kernel = *forced;
  }
  std::string why;
  const auto refuse = [&](const Kernel<Op>& k, std::string_view reason) {
    why.append(" ").append(k.name).append(": ").append(reason).append(";");
  };
  for (const auto& list : *lists) {
    for (const Kernel<Op>& k : list) {
      if (!kernel.empty() && kernel != k.name) continue;
      if (k.weaker != nullptr && preference == Preference::exact) {
        refuse(k, "weaker than the op's contract");
        continue;
      }
      const Status s = k.supports != nullptr ? k.supports(desc, device) : Status();
      if (s.ok()) {
        return Plan(desc, device, &k, threads,
                    k.workspace != nullptr ? k.workspace(desc, device) : 0);
      }
      throw_if_out_of_memory(s);  // another kernel would be no answer
      refuse(k, s.message());
    }
  }
  std::string message =
      std::string(Op::kName).append(": no kernel on ").append(bittern::name(device));
  if (!kernel.empty()) message.append(" named ").append(kernel);
  if (!why.empty()) {
    message.append(":").append(why);
  } else if (!known.empty()) {
    message.append(", expected ").append(either(known));
  }
  return unsupported(std::move(message));
} catch (...) {
  return caught(Op::kName);
}

template <class Op>
Status Plan<Op>::can_implement(const Args& args) const noexcept try {
  const FloatMode mode;  // contents are compared
  Status status;
  std::array<plan_detail::Extent, plan_detail::kMaxOperands> extents;
  std::size_t count = 0;
  int outputs = 0, written = 0;
  Op::operands(desc_, args, [&](const char* operand, const auto& v, const Operand& expected) {
    if (!status.ok()) return;
    constexpr bool kOutput = std::is_same_v<std::remove_cvref_t<decltype(v)>, MutView>;
    plan_detail::Extent& extent = extents[count];
    extent.begin = nullptr;
    if constexpr (kOutput) {
      status = plan_detail::check_operand(Op::kName, operand, as_const(v), true, expected, device_,
                                          extent);
      ++outputs;
      written += !plan_detail::left_out(as_const(v)) || (expected.flags & Operand::kOptional) == 0;
    } else {
      status = plan_detail::check_operand(Op::kName, operand, v, false, expected, device_, extent);
    }
    if (!status.ok() && v.dtype == expected.dtype && v.shape != expected.shape &&
        (expected.flags & Operand::kUnread) == 0 && !plan_detail::left_out(v) &&
        !plan_detail::splits_rows(v.shape, expected)) {
      const std::string hint = plan_detail::shape_hint<Op>(desc_, operand, v.shape);
      if (!hint.empty()) {
        status = {status.code(), std::string(status.message()).append(": ").append(hint)};
      }
    }
    if (extent.begin != nullptr) {
      extent.shape = &v.shape;
      extent.stride = &v.stride;
      ++count;
    }
  });
  if (!status.ok()) return status;
  if (outputs > 0 && written == 0) {
    return invalid(
        std::string(Op::kName).append(": every output is left out, expected at least one"));
  }
  BITTERN_TRY(plan_detail::check_overlap(Op::kName, std::span(extents.data(), count)));
  if (kernel_->accepts != nullptr) {
    const Status s = plan_detail::for_pieces<Op>(
        desc_, args, [&](const Desc& d, const Args& a) { return kernel_->accepts(d, a); });
    if (!s.ok()) {
      return {s.code(), std::string(Op::kName)
                            .append(": ")
                            .append(s.message())
                            .append(" for kernel ")
                            .append(kernel_->name)};
    }
  }
  if (device_.type == Device::Type::cuda) {
    for (const plan_detail::Extent& extent : std::span(extents.data(), count))
      BITTERN_TRY(plan_detail::check_memory(Op::kName, extent.name, extent.begin, device_));
    return {};  // nor can the host look at their contents
  }
  if constexpr (requires { Op::check_contents(desc_, args); }) {
    return Op::check_contents(desc_, args);
  }
  return {};
} catch (...) {
  return caught(Op::kName);
}

template <class Op>
Sku Plan<Op>::sku() const noexcept {
  return {.category = Op::kCategory,
          .op = Op::kName,
          .element = Op::element(desc_),
          .aux_element = Op::aux_element(desc_),
          .architecture = kernel_->architecture != nullptr ? kernel_->architecture(device_) : "any",
          .backend = kernel_->backend,
          .kernel = kernel_->name};
}

template <class Op>
PrecisionGuarantee Plan<Op>::precision_guarantee() const noexcept {
  return kernel_->weaker != nullptr ? kernel_->weaker(desc_) : Op::contract(desc_);
}

template <class Op>
Status Plan<Op>::run(const Args& args, Stream stream, Workspace workspace) const noexcept try {
  const FloatMode mode;
  const ThreadCount count(threads_);
  BITTERN_TRY(can_implement(args));
  const std::size_t needed = workspace_bytes();
  if (workspace.bytes < needed || (needed != 0 && workspace.data == nullptr)) {
    return invalid(std::string(Op::kName).append(": workspace: ") +
                   std::to_string(workspace.data != nullptr ? workspace.bytes : 0) +
                   " bytes, expected at least " + std::to_string(needed));
  }
  if (reinterpret_cast<std::uintptr_t>(workspace.data) % 64 != 0 && needed != 0) {
    return invalid(std::string(Op::kName).append(": workspace: not aligned to 64 bytes"));
  }
  if (device_.type == Device::Type::cuda && needed != 0)
    BITTERN_TRY(plan_detail::check_memory(Op::kName, "workspace", workspace.data, device_));
  bool work = false;  // no output element: nothing to do, nothing to launch
  Op::operands(desc_, args, [&](const char*, const auto& v, const Operand& expected) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(v)>, MutView>) {
      work = work || (v.data != nullptr && expected.shape.numel() != 0);
    }
  });
  if (!work) return {};
  return plan_detail::for_pieces<Op>(desc_, args, [&](const Desc& d, const Args& a) {
    return kernel_->run(d, a, stream, workspace);
  });
} catch (...) {
  return caught(Op::kName);
}

}  // namespace bittern
