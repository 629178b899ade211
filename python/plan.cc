// Every op's descriptors and plans, through plan/any_op.h.
#include <nanobind/nanobind.h>
#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "binding.h"
#include "plan/any_op.h"
#include "tensor.h"

namespace bittern {

Device parse_device(std::string_view op, std::string_view text) {
  if (text == "cpu") return {};
  if (text == "cuda") return {Device::Type::cuda, 0};
  if (text.starts_with("cuda:") && text.size() > 5 && text.size() < 10 &&
      text.find_first_not_of("0123456789", 5) == std::string_view::npos) {
    return {Device::Type::cuda, std::atoi(std::string(text.substr(5)).c_str())};
  }
  check(invalid(std::string(op).append(": device: ").append(text) +
                ", expected cpu, cuda or cuda:N"));
  return {};
}

namespace {

Preference parse_preference(std::string_view op, std::string_view text) {
  if (text == "exact") return Preference::exact;
  if (text == "fastest") return Preference::fastest;
  check(invalid(std::string(op).append(": preference: ").append(text) +
                ", expected exact or fastest"));
  return {};
}

struct FreeAligned {
  void operator()(void* p) const { std::free(p); }
};

class PyPlan {
 public:
  PyPlan(std::unique_ptr<AnyPlan> plan, Device device, std::int64_t num_groups)
      : plan_(std::move(plan)),
        operands_(plan_->operands()),
        op_(plan_->sku().op),
        device_(device),
        num_groups_(num_groups) {}

  const AnyPlan& plan() const { return *plan_; }
  const std::vector<OperandInfo>& operands() const { return operands_; }
  Device device() const { return device_; }
  std::int64_t num_groups() const { return num_groups_; }

  void can_implement(const nb::kwargs& given) const {
    std::vector<Tensor> tensors;
    check_strides(plan_->can_implement(bind(given, stream_for(nb::none(), given), tensors)));
  }

  void run(nb::object stream, nb::object workspace, const nb::kwargs& given) const {
    const bool on_cpu = device_.type == Device::Type::cpu;
    const std::size_t needed = plan_->workspace_bytes();
    const std::uintptr_t handle = stream_for(stream, given);
    std::vector<Tensor> tensors;
    const std::vector<MutView> views = bind(given, handle, tensors);
    if (!on_cpu && needed != 0 && workspace.is_none())
      workspace = cuda_helper("new_workspace")(given.values(), needed, handle);
    std::unique_ptr<void, FreeAligned> own;
    Tensor given_workspace;
    Workspace space;
    if (!workspace.is_none()) {
      const std::string where = op_ + ": workspace";
      given_workspace = import_tensor(where, workspace, true, handle);
      const auto& shape = given_workspace.shape;
      if (shape.size() != 1 || (shape[0] > 1 && given_workspace.stride[0] != 1)) {
        check(invalid(where + ": expected one axis of stride 1"));
      }
      if (given_workspace.device != device_) {
        check(invalid(where + ": on " + name(given_workspace.device) + ", expected " +
                      name(device_)));
      }
      space = {given_workspace.data, given_workspace.array.nbytes()};
    } else if (on_cpu && needed != 0) {
      space.bytes = (needed + 63) / 64 * 64;
      own.reset(std::aligned_alloc(64, space.bytes));
      if (own == nullptr) throw std::bad_alloc();
      space.data = own.get();
    }
    Status status;
    {
      const nb::gil_scoped_release unlocked;
      status = plan_->run(views, {reinterpret_cast<void*>(handle)}, space);
    }
    check_strides(status);
    for (const Tensor& tensor : tensors) count_write(tensor);
  }

 private:
  // The CUDA stream to run on; 0 for the CPU, which has none.
  std::uintptr_t stream_for(const nb::object& stream, const nb::kwargs& given) const {
    if (device_.type == Device::Type::cpu) return 0;
    return nb::cast<std::uintptr_t>(cuda_helper("stream_handle")(stream, given.values()));
  }

  // The views in table order; `tensors` keeps their memory alive.
  std::vector<MutView> bind(const nb::kwargs& given, std::uintptr_t stream,
                            std::vector<Tensor>& tensors) const {
    std::vector<MutView> views;
    std::size_t used = 0;
    for (const OperandInfo& operand : operands_) {
      const std::string where = op_ + ": " + std::string(operand.name);
      const nb::str key(operand.name.data(), operand.name.size());
      const bool present = given.contains(key);
      used += present;
      if (!present || given[key].is_none()) {
        if ((operand.expected.flags & Operand::kOptional) == 0) {
          const std::string with = operand.expected.read_with;
          check(invalid(where + ": missing, expected " + name(operand.expected.dtype) + " " +
                        operand.expected.shape.str() + " = " + operand.expected.shape.names_str() +
                        (with.empty() ? "" : ", which is read with " + with)));
        }
        views.emplace_back();
        continue;
      }
      tensors.push_back(import_tensor(where, given[key], operand.output, stream));
      views.push_back(to_view(where, tensors.back(), operand.expected));
    }
    if (used != given.size()) {
      for (const auto [key, value] : given) {
        bool found = false;
        for (const OperandInfo& operand : operands_) {
          found = found || nb::cast<std::string_view>(key) == operand.name;
        }
        if (found) continue;
        check(plan_->no_operand(nb::cast<std::string_view>(key)));
      }
    }
    return views;
  }

  std::unique_ptr<AnyPlan> plan_;
  std::vector<OperandInfo> operands_;
  std::string op_;
  Device device_;
  std::int64_t num_groups_;
};

struct PyDesc {
  std::unique_ptr<AnyDesc> desc;

  void set(std::string_view field, nb::handle value) {
    if (nb::isinstance<nb::str>(value)) {
      check(desc->set(field, nb::cast<std::string_view>(value)));
      return;
    }
    const auto fail = [&](const char* expected) {
      check(invalid(std::string(desc->op().name()).append(": ").append(field) + ": " +
                    nb::repr(value).c_str() + ", expected " + expected));
    };
    if (PyFloat_Check(value.ptr()) != 0) {
      check(desc->set(field, PyFloat_AS_DOUBLE(value.ptr())));
      return;
    }
    const auto number = nb::steal(PyNumber_Index(value.ptr()));
    if (!number.is_valid()) {
      PyErr_Clear();
      fail("a number or a name");
    }
    std::int64_t integer = 0;
    if (!nb::try_cast(number, integer, false)) fail("a 64-bit integer");
    check(desc->set(field, integer));
  }

  std::vector<OperandInfo> operands() const {
    check(desc->check());
    return desc->operands();
  }

  std::unique_ptr<PyPlan> select(std::string_view device, std::string_view preference,
                                 std::optional<std::string> kernel, int threads) const {
    const std::string_view op = desc->op().name();
    const Device where = parse_device(op, device);
    auto plan = checked(
        desc->select(where, parse_preference(op, preference), kernel.value_or(""), threads));
    return std::make_unique<PyPlan>(std::move(plan), where, desc->num_groups());
  }
};

nb::object default_value(const FieldInfo& field) {
  if (field.real) return nb::float_(field.default_real);
  if (field.choices.empty()) return nb::int_(field.default_value);
  const std::string_view choice = field.choices[static_cast<std::size_t>(field.default_value)];
  if (choice == "false" || choice == "true") return nb::bool_(choice == "true");
  return nb::str(choice.data(), choice.size());
}

}  // namespace

void bind_plan(nb::module_& m) {
  nb::class_<FieldInfo>(m, "Field", "A field of an op's descriptor: a number, or one of `choices`.")
      .def_prop_ro("name", [](const FieldInfo& f) { return f.name; })
      .def_prop_ro("help", [](const FieldInfo& f) { return f.help; })
      .def_prop_ro("choices",
                   [](const FieldInfo& f) {
                     return nb::tuple(nb::cast(f.accepted.empty() ? f.choices : f.accepted));
                   })
      .def_prop_ro("default", default_value)
      .def_ro("is_dtype", &FieldInfo::is_dtype)
      .def_ro("decides_dtype", &FieldInfo::decides_dtype)
      .def_ro("is_size", &FieldInfo::is_size)
      .def("__repr__", [](nb::handle self) {
        return repr_of("Field", self, {"name", "default", "choices", "help"});
      });

  nb::class_<OperandInfo>(m, "Operand", "A tensor of an op.")
      .def_prop_ro("name", [](const OperandInfo& o) { return o.name; })
      .def_prop_ro("dtype", [](const OperandInfo& o) { return name(o.expected.dtype); })
      .def_prop_ro("shape", [](const OperandInfo& o) { return to_tuple(o.expected.shape); })
      .def_prop_ro("axes",
                   [](const OperandInfo& o) {
                     nb::list names;
                     for (int i = 0; i < o.expected.shape.rank; ++i)
                       names.append(o.expected.shape.name(i));
                     return nb::tuple(names);
                   })
      .def_prop_ro("output", [](const OperandInfo& o) { return o.output; })
      .def_prop_ro(
          "optional",
          [](const OperandInfo& o) { return (o.expected.flags & Operand::kOptional) != 0; })
      .def_prop_ro("in_out",
                   [](const OperandInfo& o) { return (o.expected.flags & Operand::kInOut) != 0; })
      .def_prop_ro("unread_without",
                   [](const OperandInfo& o) -> std::optional<std::string> {
                     if ((o.expected.flags & Operand::kUnread) == 0) return {};
                     return o.expected.read_with;
                   })
      .def_prop_ro("read_with",
                   [](const OperandInfo& o) -> std::optional<std::string> {
                     if (*o.expected.read_with == 0) return {};
                     return o.expected.read_with;
                   })
      .def_prop_ro("extra",
                   [](const OperandInfo& o) { return (o.expected.flags & Operand::kExtra) != 0; })
      .def("__repr__", [](nb::handle self) {
        return repr_of("Operand", self,
                       {"name", "dtype", "shape", "axes", "output", "optional", "in_out", "extra"});
      });

  nb::class_<AnyOp>(m, "Op", "An operation: its name, fields and operands.")
      .def_prop_ro("name", &AnyOp::name)
      .def_prop_ro("category", &AnyOp::category)
      .def_prop_ro("backends",
                   [](const AnyOp& op) {
                     nb::list backends;
                     if (op.has_cpu()) backends.append("cpu");
                     if (op.has_cuda()) backends.append("cuda");
                     backends.append("ref");
                     return nb::tuple(backends);
                   })
      .def_prop_ro("fields", [](const AnyOp& op) { return nb::tuple(nb::cast(op.fields())); })
      .def_prop_ro("operands", [](const AnyOp& op) { return nb::tuple(nb::cast(op.operands())); })
      .def("__repr__",
           [](nb::handle self) { return repr_of("Op", self, {"name", "category", "backends"}); });
  m.def(
      "ops",
      [] {
        nb::list ops;
        for (const AnyOp* op : all_ops()) ops.append(nb::cast(op, nb::rv_policy::reference));
        return ops;
      },
      "All ops. There is a function of each one's name, and plan() takes it.");

  nb::class_<Sku>(m, "Sku", "What exactly a plan chose.")
      .def_ro("category", &Sku::category)
      .def_ro("op", &Sku::op)
      .def_prop_ro("element", [](const Sku& s) { return name(s.element); })
      .def_prop_ro("aux_element", [](const Sku& s) { return name(s.aux_element); })
      .def_ro("architecture", &Sku::architecture)
      .def_ro("backend", &Sku::backend)
      .def_ro("kernel", &Sku::kernel)
      .def("__repr__", [](nb::handle self) {
        return repr_of(
            "Sku", self,
            {"category", "op", "element", "aux_element", "architecture", "backend", "kernel"});
      });

  nb::class_<PrecisionGuarantee>(m, "PrecisionGuarantee",
                                 "How exact and repeatable the results of a plan are.")
      .def_prop_ro("math_precision",
                   [](const PrecisionGuarantee& g) { return name(g.math_precision); })
      .def_prop_ro("accumulator", [](const PrecisionGuarantee& g) { return name(g.accumulator); })
      .def_ro("deterministic", &PrecisionGuarantee::deterministic)
      .def_ro("bit_stable_on_same_hardware", &PrecisionGuarantee::bit_stable_on_same_hardware)
      .def_ro("same_bits_on_all_backends", &PrecisionGuarantee::same_bits_on_all_backends)
      .def_prop_ro("error_norm", [](const PrecisionGuarantee& g) { return name(g.error_norm); })
      .def_ro("error_bound", &PrecisionGuarantee::error_bound)
      .def("__repr__", [](nb::handle self) {
        return repr_of(
            "PrecisionGuarantee", self,
            {"math_precision", "accumulator", "deterministic", "bit_stable_on_same_hardware",
             "same_bits_on_all_backends", "error_norm", "error_bound"});
      });

  nb::class_<PyPlan>(m, "Plan", "A kernel for one problem. Threads may share it.")
      .def("run", &PyPlan::run, nb::kw_only(), nb::arg("stream").none() = nb::none(),
           nb::arg("workspace").none() = nb::none(), nb::arg("operands"),
           "Runs on the operands, each by its name, outputs included.")
      .def("can_implement", &PyPlan::can_implement, nb::arg("operands"),
           "Raises what run() would raise about the operands.")
      .def_prop_ro("sku", [](const PyPlan& p) { return p.plan().sku(); })
      .def_prop_ro("precision_guarantee",
                   [](const PyPlan& p) { return p.plan().precision_guarantee(); })
      .def_prop_ro("workspace_bytes", [](const PyPlan& p) { return p.plan().workspace_bytes(); })
      .def_prop_ro("num_groups", &PyPlan::num_groups)
      .def_prop_ro("device", [](const PyPlan& p) { return name(p.device()); })
      .def_prop_ro("operands", [](const PyPlan& p) { return nb::tuple(nb::cast(p.operands())); })
      .def("__repr__", [](const PyPlan& p) {
        const Sku sku = p.plan().sku();
        return std::string("<bittern.Plan ")
                   .append(sku.op)
                   .append(" on ")
                   .append(name(p.device())) +
               std::string(", kernel ").append(sku.kernel).append(" (").append(sku.architecture) +
               ")>";
      });

  nb::class_<PyDesc>(m, "Desc")
      .def("__init__",
           [](PyDesc* self, std::string_view op) {
             new (self) PyDesc{checked(find_op(op))->make_desc()};
           })
      .def("copy", [](const PyDesc& d) { return PyDesc{d.desc->clone()}; })
      .def("set", &PyDesc::set)
      .def("get",
           [](const PyDesc& d, std::string_view field) -> nb::object {
             for (const FieldInfo& f : d.desc->op().fields())
               if (f.name == field && f.real) return nb::float_(checked(d.desc->get_real(field)));
             return nb::int_(checked(d.desc->get(field)));
           })
      .def("operands", [](const PyDesc& d) { return nb::tuple(nb::cast(d.operands())); })
      .def("unchecked_operands",
           [](const PyDesc& d) { return nb::tuple(nb::cast(d.desc->operands())); })
      .def("select", &PyDesc::select, nb::arg("device"), nb::arg("preference"),
           nb::arg("kernel").none(), nb::arg("threads"));
}

}  // namespace bittern
