#include "tensor.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>

#include "plan/any_op.h"

namespace bittern {
namespace {

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

// How to get the gradient that was asked for, of the ops that bittern.torch differentiates.
std::string other_ways(std::string_view where) {
  static constexpr std::pair<std::string_view, const char*> kDifferentiable[] = {
      {"fake_quantize_per_group", "fake_quantize_per_group"},
      {"qdq_affine_forward", "qdq_affine"},
      {"gdn_chunk_forward", "gated_delta_rule"},
      {"gdn_recurrent_step", "recurrent_gated_delta_rule"},
      {"causal_conv1d", "causal_conv1d"},
      {"gated_rms_norm", "gated_rms_norm"}};
  const std::string_view op = where.substr(0, where.find(':'));
  for (const auto& [name, function] : kDifferentiable)
    if (op == name) return std::string("; bittern.torch.") + function + " computes it";
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
    check(invalid(where +
                  ": requires a gradient, which this function does not compute: pass its "
                  "detach(), or call it under torch.no_grad()" +
                  other_ways(where)));
  }
  return object.attr("detach")();
}

}  // namespace

nb::object cuda_helper(const char* function) {
  return nb::module_::import_("bittern._cuda").attr(function);
}

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

namespace {

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

// Whether axes from `from` on, the neighbours among them merged, are those of `to`. A length of 0
// does not say how many axes were merged into it: all ways are tried.
bool merges(const std::vector<std::int64_t>& shape, std::size_t from,
            const std::vector<std::int64_t>& to, std::size_t next = 0) {
  if (next == to.size())
    return std::all_of(shape.begin() + static_cast<std::ptrdiff_t>(from), shape.end(),
                       [](std::int64_t length) { return length == 1; });
  std::int64_t length = 1;
  for (std::size_t end = from;; ++end) {
    if (length == to[next] && merges(shape, end, to, next + 1)) return true;
    if (end == shape.size() || __builtin_mul_overflow(length, shape[end], &length)) return false;
  }
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
  if (std::find(to.begin(), to.end(), 0) != to.end())  // no element, so no stride is read
    return merges(tensor.shape, 0, to) ? merged : tensor;
  std::vector<std::size_t> axes;  // longer than 1
  for (std::size_t i = 0; i < tensor.shape.size(); ++i)
    if (tensor.shape[i] != 1) axes.push_back(i);
  std::size_t next = 0;
  for (std::size_t i = 0; i < to.size(); ++i) {
    std::int64_t length = 1;
    for (; length != 0 && length < to[i] && next < axes.size(); ++next) {
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
  return next == axes.size() ? merged : tensor;
}

}  // namespace

MutView to_view(const std::string& where, const Tensor& tensor, const Operand& expected) {
  if (!tensor.dtype) {
    check(invalid(where + ": dtype " + tensor.dtype_name + ", expected " + name(expected.dtype)));
  }
  if (tensor.shape.size() > kMaxRank) {
    check(invalid(where + ": shape " + shape_text(tensor.shape) + ", expected " +
                  expected.shape.str() + " = " + expected.shape.names_str()));
  }
  MutView view{tensor.data, *tensor.dtype, tensor.device, {}, {}};
  view.shape.rank = view.stride.rank = static_cast<int>(tensor.shape.size());
  std::copy(tensor.shape.begin(), tensor.shape.end(), view.shape.dim.begin());
  std::copy(tensor.stride.begin(), tensor.stride.end(), view.stride.dim.begin());
  return view;
}

void check_strides(const Status& status) {
  const bool strides = status.code() == Code::unsupported &&
                       status.message().find(": stride ") != std::string_view::npos;
  check(strides ? unsupported(std::string(status.message()) + "; a contiguous array will do")
                : status);
}

void count_write(const Tensor& tensor) {
  if (!tensor.torch.is_valid() || nb::cast<bool>(tensor.torch.attr("is_inference")())) return;
  nb::module_::import_("torch.autograd.graph").attr("increment_version")(tensor.torch);
}

nb::object to_numpy(std::vector<float> values, const std::vector<std::size_t>& shape) {
  auto owned = std::make_unique<std::vector<float>>(std::move(values));
  float* data = owned->data();
  const nb::capsule owner(owned.release(),
                          [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, float>(data, shape.size(), shape.data(), owner));
}

void bind_tensor(nb::module_& m) {
  nb::class_<Tensor>(m, "Tensor")
      .def(
          "__init__",
          [](Tensor* self, const std::string& where, nb::object array, bool output,
             std::uintptr_t stream) {
            new (self) Tensor(import_tensor(where, array, output, stream));
          },
          nb::arg("where"), nb::arg("array").none(), nb::arg("output") = false,
          nb::arg("stream") = 0)
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
}

}  // namespace bittern
