#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "bittern/bittern.h"
#include "c/c_api.h"
#include "plan/any_op.h"

using namespace bittern;
using c_api::check_device;
using c_api::check_preference;
using c_api::fail;
using c_api::null;
using c_api::run;

struct bittern_desc {
  std::unique_ptr<AnyDesc> any;
};
struct bittern_plan {
  std::unique_ptr<AnyPlan> any;
  std::string_view op;
  std::vector<OperandInfo> operands;
};

namespace {

static_assert(BITTERN_CANCELLED == static_cast<int>(Code::cancelled));
static_assert(BITTERN_U32 == static_cast<int>(DType::u32));
static_assert(BITTERN_CUDA == static_cast<int>(Device::Type::cuda));
static_assert(BITTERN_FASTEST == static_cast<int>(Preference::fastest));
static_assert(BITTERN_MAX_RANK == kMaxRank);

// Of fixed size, so that "out of memory" needs none.
thread_local char last_error[2048] = "";

}  // namespace

namespace bittern::c_api {

bittern_code fail(Code code, std::string_view message) noexcept {
  const std::size_t length = std::min(message.size(), sizeof last_error - 1);
  std::memcpy(last_error, message.data(), length);
  last_error[length] = '\0';
  return static_cast<bittern_code>(code);
}

Status null(const char* function, const char* argument) {
  return invalid(std::string(function).append(": ").append(argument).append(": null"));
}

Status check_device(bittern_device device) {
  if (device.type == BITTERN_CPU || device.type == BITTERN_CUDA) return {};
  return invalid("device type " + std::to_string(device.type) +
                 ", expected BITTERN_CPU or BITTERN_CUDA");
}

Status check_preference(bittern_preference preference) {
  if (preference == BITTERN_EXACT || preference == BITTERN_FASTEST) return {};
  return invalid("preference " + std::to_string(preference) +
                 ", expected BITTERN_EXACT or BITTERN_FASTEST");
}

Status to_view(const std::string& where, const bittern_tensor& tensor, MutView& view) {
  const auto refuse = [&](const std::string& what) { return invalid(where + ": " + what); };
  if (tensor.dtype < 0 || tensor.dtype >= kDTypeCount) {
    return refuse("dtype " + std::to_string(tensor.dtype) + ", expected a bittern_dtype");
  }
  if (tensor.rank < 0 || tensor.rank > kMaxRank) {
    return refuse("rank " + std::to_string(tensor.rank) + ", expected 0.." +
                  std::to_string(kMaxRank));
  }
  if (tensor.shape == nullptr && tensor.rank > 0) return refuse("shape is null");
  if (Status s = check_device(tensor.device); !s.ok()) return refuse(std::string(s.message()));
  view.data = tensor.data;
  view.dtype = static_cast<DType>(tensor.dtype);
  view.device = {static_cast<Device::Type>(tensor.device.type), tensor.device.index};
  view.shape.rank = view.stride.rank = tensor.rank;
  std::int64_t dense = 1;
  for (int i = tensor.rank; i-- > 0;) {
    view.shape[i] = tensor.shape[i];
    view.stride[i] = tensor.strides != nullptr ? tensor.strides[i] : dense;
    // A shape so large is never the one expected; its strides are not looked at.
    if (__builtin_mul_overflow(dense, tensor.shape[i], &dense)) dense = 0;
  }
  return {};
}

}  // namespace bittern::c_api

namespace {

// Names come from literals and from strings that are never freed: all end in '\0'.
const char* c_string(std::string_view name) { return name.data(); }

Status to_view(std::string_view op, const OperandInfo& operand, const bittern_tensor& tensor,
               MutView& view) {
  // Null data leaves the operand out, unless its shape says that it has no elements.
  if (tensor.data == nullptr &&
      (tensor.shape == nullptr || tensor.rank < 1 || tensor.rank > kMaxRank ||
       std::find(tensor.shape, tensor.shape + tensor.rank, 0) == tensor.shape + tensor.rank)) {
    return {};
  }
  return c_api::to_view(std::string(op).append(": ").append(operand.name), tensor, view);
}

// The tensors in the order of the plan's operands.
Status to_views(const bittern_plan& plan, const bittern_tensor* tensors, std::size_t count,
                std::vector<MutView>& views) {
  const auto refuse = [&](const std::string& what) {
    return invalid(std::string(plan.op).append(": ") + what);
  };
  if (tensors == nullptr && count > 0) return refuse("tensors: null");
  views.resize(plan.operands.size());
  if (count > views.size()) {  // before any of them is looked at
    return refuse(std::to_string(count) + " operands, expected at most " +
                  std::to_string(views.size()));
  }
  std::vector<bool> taken(views.size());
  for (std::size_t i = 0; i < count; ++i) {
    std::size_t at = i;
    if (const char* name = tensors[i].name) {
      for (at = 0; at < views.size() && plan.operands[at].name != name;) ++at;
      if (at == views.size()) return plan.any->no_operand(name);
    }
    if (taken[at]) return refuse(std::string(plan.operands[at].name) + ": given twice");
    taken[at] = true;
    BITTERN_TRY(to_view(plan.op, plan.operands[at], tensors[i], views[at]));
  }
  return {};
}

}  // namespace

const char* bittern_version(void) { return version(); }
const char* bittern_last_error(void) { return last_error; }
const char* bittern_code_name(int code) {
  return code >= BITTERN_OK && code <= BITTERN_CANCELLED ? name(static_cast<Code>(code))
                                                         : "unknown";
}
size_t bittern_op_count(void) { return op_names().size(); }
const char* bittern_op_name(size_t index) {
  return index < op_names().size() ? c_string(op_names()[index]) : nullptr;
}
int bittern_num_threads(void) { return num_threads(); }
bittern_code bittern_set_num_threads(int threads) {
  return run([&]() -> Status {
    BITTERN_TRY(check_num_threads(threads));
    set_num_threads(threads);
    return {};
  });
}

bittern_code bittern_desc_create(const char* op, bittern_desc** desc) {
  return run([&]() -> Status {
    if (desc == nullptr) return null("bittern_desc_create", "desc");
    *desc = nullptr;
    if (op == nullptr) return null("bittern_desc_create", "op");
    const auto found = find_op(op);
    if (!found) return found.status();
    *desc = new bittern_desc{(*found)->make_desc()};
    return {};
  });
}

void bittern_desc_destroy(bittern_desc* desc) { delete desc; }

bittern_code bittern_desc_set(bittern_desc* desc, const char* field, int64_t value) {
  return run([&]() -> Status {
    if (desc == nullptr) return null("bittern_desc_set", "desc");
    if (field == nullptr) return null("bittern_desc_set", "field");
    return desc->any->set(field, value);
  });
}

bittern_code bittern_desc_set_real(bittern_desc* desc, const char* field, double value) {
  return run([&]() -> Status {
    if (desc == nullptr) return null("bittern_desc_set_real", "desc");
    if (field == nullptr) return null("bittern_desc_set_real", "field");
    const Status s = desc->any->set(field, value);
    if (s.ok() || !desc->any->get(field)) return s;
    return {s.code(), std::string(s.message()) + ", by bittern_desc_set or bittern_desc_set_text"};
  });
}

bittern_code bittern_desc_set_text(bittern_desc* desc, const char* field, const char* text) {
  return run([&]() -> Status {
    if (desc == nullptr) return null("bittern_desc_set_text", "desc");
    if (field == nullptr) return null("bittern_desc_set_text", "field");
    if (text == nullptr) return null("bittern_desc_set_text", "text");
    return desc->any->set(field, std::string_view(text));
  });
}

bittern_code bittern_desc_get(const bittern_desc* desc, const char* field, int64_t* value) {
  return run([&]() -> Status {
    if (desc == nullptr) return null("bittern_desc_get", "desc");
    if (field == nullptr) return null("bittern_desc_get", "field");
    if (value == nullptr) return null("bittern_desc_get", "value");
    const auto got = desc->any->get(field);
    throw_if_out_of_memory(got.status());
    if (!got && desc->any->get_real(field)) {
      return invalid(std::string(got.status().message()) + "; bittern_desc_get_real reads it");
    }
    if (!got) return got.status();
    *value = *got;
    return {};
  });
}

bittern_code bittern_desc_get_real(const bittern_desc* desc, const char* field, double* value) {
  return run([&]() -> Status {
    if (desc == nullptr) return null("bittern_desc_get_real", "desc");
    if (field == nullptr) return null("bittern_desc_get_real", "field");
    if (value == nullptr) return null("bittern_desc_get_real", "value");
    const auto got = desc->any->get_real(field);
    if (!got) return got.status();
    *value = *got;
    return {};
  });
}

bittern_code bittern_desc_check(const bittern_desc* desc) {
  return run([&]() -> Status {
    if (desc == nullptr) return null("bittern_desc_check", "desc");
    return desc->any->check();
  });
}

bittern_code bittern_desc_num_groups(const bittern_desc* desc, int64_t* groups) {
  return run([&]() -> Status {
    if (desc == nullptr) return null("bittern_desc_num_groups", "desc");
    if (groups == nullptr) return null("bittern_desc_num_groups", "groups");
    *groups = desc->any->num_groups();
    return {};
  });
}

bittern_code bittern_desc_operand_count(const bittern_desc* desc, size_t* count) {
  return run([&]() -> Status {
    if (desc == nullptr) return null("bittern_desc_operand_count", "desc");
    if (count == nullptr) return null("bittern_desc_operand_count", "count");
    BITTERN_TRY(desc->any->check());
    *count = desc->any->operands().size();
    return {};
  });
}

bittern_code bittern_desc_operand(const bittern_desc* desc, size_t index,
                                  bittern_operand* operand) {
  return run([&]() -> Status {
    if (desc == nullptr) return null("bittern_desc_operand", "desc");
    if (operand == nullptr) return null("bittern_desc_operand", "operand");
    BITTERN_TRY(desc->any->check());
    const auto all = desc->any->operands();
    if (index >= all.size()) {
      return invalid(std::string(desc->any->op().name()).append(": operand ") +
                     std::to_string(index) + ", expected below " + std::to_string(all.size()));
    }
    const OperandInfo& info = all[index];
    *operand = {};
    operand->name = c_string(info.name);
    operand->dtype = static_cast<bittern_dtype>(info.expected.dtype);
    operand->rank = info.expected.shape.rank;
    for (int i = 0; i < info.expected.shape.rank; ++i) {
      operand->shape[i] = info.expected.shape[i];
    }
    operand->optional = (info.expected.flags & Operand::kOptional) != 0;
    operand->output = info.output;
    operand->row_stride = (info.expected.flags & (Operand::kRowStride | Operand::kStrided)) != 0;
    operand->in_place = (info.expected.flags & Operand::kInPlace) != 0;
    operand->in_out = (info.expected.flags & Operand::kInOut) != 0;
    return {};
  });
}

bittern_code bittern_select(const bittern_desc* desc, bittern_device device,
                            bittern_preference preference, const char* kernel, int threads,
                            bittern_plan** plan) {
  return run([&]() -> Status {
    if (plan == nullptr) return null("bittern_select", "plan");
    *plan = nullptr;
    if (desc == nullptr) return null("bittern_select", "desc");
    const auto refuse = [&](std::string_view what) {
      return invalid(std::string(desc->any->op().name()).append(": ").append(what));
    };
    if (Status s = check_device(device); !s.ok()) return refuse(s.message());
    if (Status s = check_preference(preference); !s.ok()) return refuse(s.message());
    auto selected = desc->any->select({static_cast<Device::Type>(device.type), device.index},
                                      static_cast<Preference>(preference),
                                      kernel != nullptr ? kernel : std::string_view(), threads);
    if (!selected) return selected.status();
    auto operands = (*selected)->operands();
    *plan = new bittern_plan{std::move(*selected), desc->any->op().name(), std::move(operands)};
    return {};
  });
}

void bittern_plan_destroy(bittern_plan* plan) { delete plan; }

bittern_code bittern_plan_sku(const bittern_plan* plan, bittern_sku* sku) {
  return run([&]() -> Status {
    if (plan == nullptr) return null("bittern_plan_sku", "plan");
    if (sku == nullptr) return null("bittern_plan_sku", "sku");
    const Sku s = plan->any->sku();
    *sku = {.category = c_string(s.category),
            .op = c_string(s.op),
            .element = static_cast<bittern_dtype>(s.element),
            .aux_element = static_cast<bittern_dtype>(s.aux_element),
            .architecture = c_string(s.architecture),
            .backend = c_string(s.backend),
            .kernel = c_string(s.kernel)};
    return {};
  });
}

bittern_code bittern_plan_precision(const bittern_plan* plan, bittern_precision* precision) {
  return run([&]() -> Status {
    if (plan == nullptr) return null("bittern_plan_precision", "plan");
    if (precision == nullptr) return null("bittern_plan_precision", "precision");
    const PrecisionGuarantee g = plan->any->precision_guarantee();
    *precision = {.math_precision = static_cast<bittern_dtype>(g.math_precision),
                  .accumulator = static_cast<bittern_dtype>(g.accumulator),
                  .deterministic = g.deterministic,
                  .bit_stable_on_same_hardware = g.bit_stable_on_same_hardware,
                  .same_bits_on_all_backends = g.same_bits_on_all_backends,
                  .error_norm = static_cast<bittern_error_norm>(g.error_norm),
                  .error_bound = g.error_bound};
    return {};
  });
}

bittern_code bittern_plan_workspace_bytes(const bittern_plan* plan, size_t* bytes) {
  return run([&]() -> Status {
    if (plan == nullptr) return null("bittern_plan_workspace_bytes", "plan");
    if (bytes == nullptr) return null("bittern_plan_workspace_bytes", "bytes");
    *bytes = plan->any->workspace_bytes();
    return {};
  });
}

bittern_code bittern_plan_can_implement(const bittern_plan* plan, const bittern_tensor* tensors,
                                        size_t count) {
  return run([&]() -> Status {
    if (plan == nullptr) return null("bittern_plan_can_implement", "plan");
    std::vector<MutView> views;
    BITTERN_TRY(to_views(*plan, tensors, count, views));
    return plan->any->can_implement(views);
  });
}

bittern_code bittern_plan_run(const bittern_plan* plan, const bittern_tensor* tensors, size_t count,
                              void* stream, void* workspace, size_t workspace_bytes) {
  return run([&]() -> Status {
    if (plan == nullptr) return null("bittern_plan_run", "plan");
    std::vector<MutView> views;
    BITTERN_TRY(to_views(*plan, tensors, count, views));
    return plan->any->run(views, {stream}, {workspace, workspace_bytes});
  });
}
