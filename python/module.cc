// The Python module, for every op at once: descriptors and plans through plan/any_op.h, arrays
// through DLPack or the buffer protocol, without copies. bittern/__init__.py adds the functions
// that infer a descriptor from arrays.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
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

#include "bittern/codec.h"
#include "bittern/environment.h"
#include "bittern/version.h"
#include "plan/any_op.h"

namespace nb = nanobind;

namespace bittern {
namespace {

void check(const Status& status) {
  if (status.ok()) return;
  PyObject* type = PyExc_RuntimeError;
  if (status.code() == Code::invalid_argument) type = PyExc_ValueError;
  if (status.code() == Code::unsupported) type = PyExc_NotImplementedError;
  if (status.code() == Code::out_of_memory) type = PyExc_MemoryError;
  const std::string_view text = status.message();  // may hold any bytes that a caller gave
  const auto message = nb::steal(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
  if (message.is_valid()) PyErr_SetObject(type, message.ptr());
  throw nb::python_error();
}

template <class T>
T checked(Result<T> result) {
  check(result.status());
  return std::move(*result);
}

nb::tuple to_tuple(const std::vector<std::int64_t>& values) {
  nb::list list;
  for (const std::int64_t v : values) list.append(v);
  return nb::tuple(list);
}

nb::tuple to_tuple(const Shape& shape) {
  return to_tuple(std::vector<std::int64_t>(shape.dim.begin(), shape.dim.begin() + shape.rank));
}

// ---- arrays ----

// An array of any framework, its memory kept alive. Its axes may be merged, never copied.
struct Tensor {
  nb::ndarray<nb::ro> array;
  void* data = nullptr;
  std::optional<DType> dtype;  // none: one that no op takes
  std::string dtype_name;
  Device device;
  std::vector<std::int64_t> shape, stride;
  bool writable = false;
  nb::object torch;  // the tensor of torch's that an output is
};

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const std::int64_t v : shape) text.append(text.size() > 1 ? "," : "") += std::to_string(v);
  return text + "]";
}

void name_dtype(const nb::dlpack::dtype& dtype, Tensor& tensor) {
  using Kind = nb::dlpack::dtype_code;
  static constexpr struct {
    Kind kind;
    int bits;
    DType dtype;
  } kKnown[] = {{Kind::Float, 32, DType::f32}, {Kind::Float, 64, DType::f64},
                {Kind::Float, 16, DType::f16}, {Kind::Bfloat, 16, DType::bf16},
                {Kind::UInt, 8, DType::u8},    {Kind::Int, 8, DType::s8},
                {Kind::Int, 32, DType::s32},   {Kind::UInt, 32, DType::u32}};
  for (const auto& known : kKnown) {
    if (dtype.code != static_cast<std::uint8_t>(known.kind) || dtype.bits != known.bits) continue;
    if (dtype.lanes != 1) continue;
    tensor.dtype = known.dtype;
    tensor.dtype_name = name(known.dtype);
    return;
  }
  static constexpr const char* kKinds[] = {"int",    "uint",    "float", "opaque",
                                           "bfloat", "complex", "bool"};
  // DLPack's codes from 7 on: floats of 8, 6 and 4 bits.
  static constexpr const char* kSmall[] = {
      "float8_e3m4",     "float8_e4m3",   "float8_e4m3b11fnuz", "float8_e4m3fn",
      "float8_e4m3fnuz", "float8_e5m2",   "float8_e5m2fnuz",    "float8_e8m0fnu",
      "float6_e2m3fn",   "float6_e3m2fn", "float4_e2m1fn"};
  const std::size_t code = dtype.code;
  if (code < std::size(kKinds)) {
    tensor.dtype_name = kKinds[code] + (code == 6 ? std::string() : std::to_string(dtype.bits));
  } else if (code - std::size(kKinds) < std::size(kSmall)) {
    tensor.dtype_name = kSmall[code - std::size(kKinds)];
  } else {
    tensor.dtype_name = "of DLPack's code " + std::to_string(code);
  }
  if (dtype.lanes != 1) tensor.dtype_name += "x" + std::to_string(dtype.lanes);
}

// numpy's bfloat16 is ml_dtypes', which neither DLPack nor the buffer protocol can carry from
// numpy.
bool is_numpy_bfloat16(nb::handle object) {
  const nb::object dtype = nb::getattr(object, "dtype", nb::none());
  const nb::object dtype_name = nb::getattr(dtype, "name", nb::none());
  return nb::isinstance<nb::str>(dtype_name) &&
         nb::cast<std::string_view>(dtype_name) == "bfloat16" && nb::hasattr(object, "view");
}

bool import_array(const nb::object& object, bool output, nb::ndarray<nb::ro>& array) {
  if (!output) return nb::try_cast(object, array, false);
  nb::ndarray<> writable;
  if (!nb::try_cast(object, writable, false)) return false;
  array = nb::ndarray<nb::ro>(writable);
  return true;
}

// What the producer says when it refuses to export (a tensor that requires a gradient, say).
std::string refusal(nb::handle object) {
  if (!nb::hasattr(object, "__dlpack__")) {
    return std::string(Py_TYPE(object.ptr())->tp_name) +
           ", expected an array that speaks DLPack or the buffer protocol";
  }
  std::string what;
  if (const nb::object dtype = nb::getattr(object, "dtype", nb::none()); !dtype.is_none())
    what = std::string("dtype ") + nb::str(dtype).c_str() + ": ";
  try {
    object.attr("__dlpack__")();
  } catch (const nb::python_error& error) {
    // An interrupt, or no memory, is no refusal.
    if (!error.matches(PyExc_Exception) || error.matches(PyExc_MemoryError)) throw;
    return what + nb::str(error.value()).c_str();
  }
  return what + "not an array that can be read";
}

nb::object cuda_helper(const char* function) {
  return nb::module_::import_("bittern._cuda").attr(function);
}

// The CUDA device an array says it is on.
std::optional<int> cuda_index(nb::handle object) {
  if (!nb::hasattr(object, "__dlpack_device__")) return {};
  try {
    const nb::object device = object.attr("__dlpack_device__")();
    const int type = nb::cast<int>(device[0]);
    if (type == nb::device::cuda::value || type == nb::device::cuda_managed::value)
      return nb::cast<int>(device[1]);
  } catch (const nb::python_error&) {  // it will say so again when it is to export
  }
  return {};
}

// A tensor of torch's as it can be exported: free of autograd, and not a view that negates.
nb::object without_autograd(const std::string& where, nb::handle object, bool& is_torchs) {
  const nb::object tensor = nb::borrow(object);
  const nb::object requires_grad = nb::getattr(object, "requires_grad", nb::none());
  if (requires_grad.is_none() || !nb::hasattr(object, "detach")) return tensor;  // not torch's
  const nb::object torch = nb::steal(PyImport_GetModule(nb::str("torch").ptr()));
  if (!torch.is_valid() || !nb::isinstance(object, torch.attr("Tensor"))) return tensor;
  is_torchs = true;
  if (nb::cast<bool>(nb::bool_(object.attr("is_nested")))) {
    check(invalid(where + ": a nested tensor, expected one shape for all: call "
                          "to_padded_tensor() or pass its values()"));
  }
  for (const char* bit : {"is_neg", "is_conj"}) {
    const nb::object is_set = nb::getattr(object, bit, nb::none());
    if (!is_set.is_none() && nb::cast<bool>(nb::bool_(is_set()))) {
      check(invalid(where + ": a lazy view (" + bit +
                    "() is true), expected values in memory: call resolve_neg() and "
                    "resolve_conj() first"));
    }
  }
  const nb::module_ forward_ad = nb::module_::import_("torch.autograd.forward_ad");
  if (nb::cast<int>(forward_ad.attr("_current_level")) >= 0 &&
      !forward_ad.attr("unpack_dual")(object).attr("tangent").is_none()) {
    check(invalid(where + ": has a tangent, which this function does not compute: pass the primal "
                          "of torch.autograd.forward_ad.unpack_dual()"));
  }
  if (!nb::cast<bool>(nb::bool_(requires_grad))) return tensor;
  const nb::object enabled = torch.attr("is_grad_enabled")();
  if (nb::cast<bool>(enabled)) {
    check(invalid(where + ": requires a gradient, which this function does not compute: pass "
                          "x.detach(), call it under torch.no_grad(), or use bittern.torch"));
  }
  return object.attr("detach")();
}

// `where` is "op: operand". The producer of a CUDA array orders its work before `stream`'s.
Tensor import_tensor(const std::string& where, nb::handle object, bool output,
                     std::uintptr_t stream) {
  if (nb::isinstance<Tensor>(object)) {
    auto tensor = nb::cast<Tensor>(object);
    if (output && !tensor.writable)
      check(invalid(where + ": read-only, expected a writable array"));
    return tensor;
  }
  if (nb::hasattr(object, "filled") && nb::hasattr(object, "mask")) {
    check(invalid(where + ": a masked array, whose mask no op reads: pass its filled(value) or its "
                          "data"));
  }
  bool is_torchs = false;
  nb::object source = without_autograd(where, object, is_torchs);
  if (const auto index = cuda_index(object)) {
    try {
      source = cuda_helper("export")(source, *index, stream);
    } catch (const nb::python_error& error) {
      check(invalid(where + ": " + nb::str(error.value()).c_str()));
    }
  }
  Tensor tensor;
  tensor.writable = output;
  if (output && is_torchs) tensor.torch = nb::borrow(object);
  bool imported = import_array(source, output, tensor.array);
  const bool bfloat = !imported && is_numpy_bfloat16(object);
  if (bfloat) {
    source = source.attr("view")("uint16");
    imported = import_array(source, output, tensor.array);
  }
  if (!imported) {
    if (output && import_array(source, false, tensor.array)) {
      check(invalid(where + ": read-only, expected a writable array"));
    }
    check(invalid(where + ": " + refusal(object)));
  }
  const nb::ndarray<nb::ro>& array = tensor.array;
  tensor.data = const_cast<void*>(array.data());
  name_dtype(array.dtype(), tensor);
  if (bfloat) {
    tensor.dtype = DType::bf16;
    tensor.dtype_name = name(DType::bf16);
  }
  switch (array.device_type()) {
    case nb::device::cpu::value:
    case nb::device::cuda_host::value: break;
    case nb::device::cuda::value:
    case nb::device::cuda_managed::value:
      tensor.device = {Device::Type::cuda, array.device_id()};
      break;
    default:
      check(unsupported(where + ": on DLPack device type " + std::to_string(array.device_type()) +
                        ", expected cpu or cuda"));
  }
  if (tensor.data == nullptr && array.size() != 0) {
    check(invalid(where +
                  ": no memory behind it (a tensor that is fake, or wraps others), expected "
                  "values in memory"));
  }
  tensor.shape.assign(array.shape_ptr(), array.shape_ptr() + array.ndim());
  tensor.stride.assign(array.stride_ptr(), array.stride_ptr() + array.ndim());
  return tensor;
}

// Rows as the axes they have, where these do not merge: [batch, heads, tokens, dim] for [rows,
// dim].
std::optional<Tensor> split_rows(const Tensor& tensor, const Operand& operand) {
  const auto rank = static_cast<std::size_t>(operand.shape.rank);
  if ((operand.flags & Operand::kRowAxes) == 0) return {};
  Tensor split = tensor;
  // A column of numbers may lack its last axis.
  if (rank == 2 && operand.shape[1] == 1 && (split.shape.empty() || split.shape.back() != 1)) {
    split.shape.push_back(1);
    split.stride.push_back(1);
  }
  for (std::size_t i = 0; i + rank <= split.shape.size() && split.shape.size() > kMaxRank;) {
    if (split.shape[i] != 1) {
      ++i;
      continue;
    }
    split.shape.erase(split.shape.begin() + static_cast<std::ptrdiff_t>(i));
    split.stride.erase(split.stride.begin() + static_cast<std::ptrdiff_t>(i));
  }
  if (split.shape.size() <= rank || split.shape.size() > kMaxRank) return {};
  const std::size_t extra = split.shape.size() - rank;
  std::int64_t rows = 1;
  for (std::size_t i = 0; i <= extra; ++i) rows *= split.shape[i];
  if (rows != operand.shape[0]) return {};
  for (std::size_t i = 1; i < rank; ++i)
    if (split.shape[extra + i] != operand.shape[static_cast<int>(i)]) return {};
  return split;
}

// The tensor with neighbouring axes merged until it has the operand's shape; itself when the shapes
// do not agree, so that the plan says what is wrong. Axes of length 1 come and go freely.
Tensor merge_axes(const std::string& where, const Tensor& tensor, const Operand& operand) {
  const std::vector<std::int64_t> to(operand.shape.dim.begin(),
                                     operand.shape.dim.begin() + operand.shape.rank);
  if (tensor.shape == to) return tensor;
  Tensor merged = tensor;
  merged.shape = to;
  merged.stride.assign(to.size(), 1);
  std::vector<std::size_t> axes;  // longer than 1
  bool empty = false;
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    if (tensor.shape[i] != 1) axes.push_back(i);
    empty = empty || tensor.shape[i] == 0;
  }
  std::size_t next = 0;
  bool to_empty = false;
  for (std::size_t i = 0; i < to.size(); ++i) {
    to_empty = to_empty || to[i] == 0;
    if (to[i] == 0 && !empty) return tensor;
    if (to[i] <= 1 || empty) continue;
    std::int64_t length = 1;
    for (; length < to[i] && next < axes.size(); ++next) {
      const std::size_t a = axes[next];
      if (length > 1 && merged.stride[i] != tensor.stride[a] * tensor.shape[a]) {
        if (auto split = split_rows(tensor, operand)) return *split;
        check(unsupported(where + ": strides " + shape_text(tensor.stride) + " of shape " +
                          shape_text(tensor.shape) + ", expected axes that merge to " +
                          shape_text(to) + " without a copy"));
      }
      length *= tensor.shape[a];
      merged.stride[i] = tensor.stride[a];
    }
    if (length != to[i]) return tensor;
  }
  return next == axes.size() || (empty && to_empty) ? merged : tensor;
}

MutView to_view(const std::string& where, const Tensor& tensor, const Operand& expected) {
  if (!tensor.dtype) {
    check(invalid(where + ": dtype " + tensor.dtype_name + ", expected " + name(expected.dtype)));
  }
  if (tensor.shape.size() > kMaxRank) {
    check(invalid(where + ": shape " + shape_text(tensor.shape) + ", expected " +
                  expected.shape.str()));
  }
  MutView view{tensor.data, *tensor.dtype, tensor.device, {}, {}};
  view.shape.rank = view.stride.rank = static_cast<int>(tensor.shape.size());
  std::copy(tensor.shape.begin(), tensor.shape.end(), view.shape.dim.begin());
  std::copy(tensor.stride.begin(), tensor.stride.end(), view.stride.dim.begin());
  return view;
}

// ---- plans ----

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
    count_writes(tensors);
  }

 private:
  // A refusal of strides says what to do: in Python that is one call.
  static void check_strides(const Status& status) {
    const bool strides = status.code() == Code::unsupported &&
                         status.message().find(": stride ") != std::string_view::npos;
    check(strides ? unsupported(std::string(status.message()) + "; a contiguous array will do")
                  : status);
  }

  // Autograd tells from a tensor's version that what it saved was overwritten.
  static void count_writes(const std::vector<Tensor>& tensors) {
    for (const Tensor& tensor : tensors) {
      if (!tensor.torch.is_valid() || nb::cast<bool>(tensor.torch.attr("is_inference")())) continue;
      nb::module_::import_("torch.autograd.graph").attr("increment_version")(tensor.torch);
    }
  }

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
          check(invalid(where + ": missing, expected " + name(operand.expected.dtype) + " " +
                        operand.expected.shape.str()));
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
                                 std::optional<std::string> kernel) const {
    const std::string_view op = desc->op().name();
    const Device where = parse_device(op, device);
    auto plan = checked(desc->select(where, parse_preference(op, preference), kernel.value_or("")));
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

using FloatArray = nb::ndarray<nb::numpy, float>;

FloatArray to_numpy(std::vector<float> values, const std::vector<std::size_t>& shape) {
  auto owned = std::make_unique<std::vector<float>>(std::move(values));
  float* data = owned->data();
  const nb::capsule owner(owned.release(),
                          [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  return FloatArray(data, shape.size(), shape.data(), owner);
}

nb::tuple to_tuple(Codebook book) {
  const std::size_t levels = book.levels.size();
  return nb::make_tuple(to_numpy(std::move(book.levels), {levels}),
                        to_numpy(std::move(book.boundaries), {levels - 1}));
}

nb::object rotation_table(std::string_view rotation, std::int64_t dim, std::uint64_t seed) {
  for (std::size_t i = 0; i < std::size(kRotationNames); ++i) {
    if (kRotationNames[i] != rotation) continue;
    const auto kind = static_cast<Rotation>(i);
    auto table = checked(make_rotation(kind, dim, seed));
    if (kind == Rotation::identity) return nb::none();
    const auto n = static_cast<std::size_t>(dim);
    return nb::cast(to_numpy(std::move(table), kind == Rotation::dense
                                                   ? std::vector<std::size_t>{n, n}
                                                   : std::vector<std::size_t>{n}));
  }
  check(invalid("make_rotation: rotation: '" + std::string(rotation) +
                "', expected identity, hadamard or dense"));
  return nb::none();
}

// "Sku(category='quantization', ...)" from an object's properties.
nb::str repr_of(const char* type, nb::handle self, std::initializer_list<const char*> names) {
  std::string text = std::string(type) + "(";
  for (const char* n : names) {
    text.append(text.back() == '(' ? "" : ", ").append(n).append("=");
    text += nb::repr(self.attr(n)).c_str();
  }
  return nb::str((text + ")").c_str());
}

}  // namespace
}  // namespace bittern

NB_MODULE(_bittern, m) {
  using namespace bittern;
  m.attr("__version__") = version();
  m.def("num_threads", [] { return num_threads(); }, "Threads a CPU kernel may use.");
  m.def(
      "set_num_threads",
      [](int threads) {
        check(check_num_threads(threads));
        set_num_threads(threads);
      },
      nb::arg("threads"));

  nb::class_<FieldInfo>(m, "Field", "A field of an op's descriptor: a number, or one of `choices`.")
      .def_prop_ro("name", [](const FieldInfo& f) { return f.name; })
      .def_prop_ro("help", [](const FieldInfo& f) { return f.help; })
      .def_prop_ro("choices", [](const FieldInfo& f) { return nb::tuple(nb::cast(f.choices)); })
      .def_prop_ro("default", default_value)
      .def("__repr__", [](nb::handle self) {
        return repr_of("Field", self, {"name", "default", "choices", "help"});
      });

  nb::class_<OperandInfo>(m, "Operand", "A tensor of an op.")
      .def_prop_ro("name", [](const OperandInfo& o) { return o.name; })
      .def_prop_ro("dtype", [](const OperandInfo& o) { return name(o.expected.dtype); })
      .def_prop_ro("shape", [](const OperandInfo& o) { return to_tuple(o.expected.shape); })
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
      .def_prop_ro("extra",
                   [](const OperandInfo& o) { return (o.expected.flags & Operand::kExtra) != 0; })
      .def("__repr__", [](nb::handle self) {
        return repr_of("Operand", self,
                       {"name", "dtype", "shape", "output", "optional", "in_out", "extra"});
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
      "sphere_codebook",
      [](std::int64_t dim, std::int32_t bits) {
        return to_tuple(checked(sphere_codebook(dim, bits)));
      },
      nb::arg("dim"), nb::arg("bits"));
  m.def(
      "gaussian_codebook",
      [](std::int64_t dim, std::int32_t bits) {
        return to_tuple(checked(gaussian_codebook(dim, bits)));
      },
      nb::arg("dim"), nb::arg("bits"));
  m.def("make_rotation", rotation_table, nb::arg("rotation"), nb::arg("dim"), nb::arg("seed") = 0);
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
      .def("__repr__", [](nb::handle self) {
        return repr_of("PrecisionGuarantee", self,
                       {"math_precision", "accumulator", "deterministic",
                        "bit_stable_on_same_hardware", "same_bits_on_all_backends"});
      });

  nb::class_<Tensor>(m, "Tensor")
      .def(
          "__init__",
          [](Tensor* self, const std::string& where, nb::object array, bool output,
             std::uintptr_t stream) {
            new (self) Tensor(import_tensor(where, array, output, stream));
          },
          nb::arg("where"), nb::arg("array"), nb::arg("output") = false, nb::arg("stream") = 0)
      .def_ro("dtype", &Tensor::dtype_name)
      .def_prop_ro("shape", [](const Tensor& t) { return to_tuple(t.shape); })
      .def_prop_ro("strides", [](const Tensor& t) { return to_tuple(t.stride); })
      .def_prop_ro("device", [](const Tensor& t) { return name(t.device); })
      .def_prop_ro("address",
                   [](const Tensor& t) { return reinterpret_cast<std::uintptr_t>(t.data); })
      .def("merge_axes",
           [](const Tensor& t, const std::string& where, const OperandInfo& operand) {
             return merge_axes(where, t, operand.expected);
           })
      .def("fits", [](const Tensor& t, const OperandInfo& operand) {
        const Shape& shape = operand.expected.shape;
        return std::equal(t.shape.begin(), t.shape.end(), shape.dim.begin(),
                          shape.dim.begin() + shape.rank) ||
               split_rows(t, operand.expected);
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
           nb::arg("kernel").none());
}
