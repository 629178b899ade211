#include "binding.h"

#include <nanobind/stl/string.h>

#include <string>
#include <string_view>

namespace bittern {

namespace {

[[noreturn]] void raise(PyObject* type, const Status& status) {
  const std::string_view text = status.message();  // may hold any bytes that a caller gave
  const auto message = nb::steal(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
  if (message.is_valid()) PyErr_SetObject(type, message.ptr());
  throw nb::python_error();
}

}  // namespace

void check(const Status& status) {
  if (status.ok()) return;
  PyObject* type = PyExc_RuntimeError;
  if (status.code() == Code::invalid_argument) type = PyExc_ValueError;
  if (status.code() == Code::unsupported) type = PyExc_NotImplementedError;
  if (status.code() == Code::out_of_memory) type = PyExc_MemoryError;
  raise(type, status);
}

void check_file(const Status& status) {
  if (status.code() == Code::unavailable || status.code() == Code::io_error)
    raise(PyExc_OSError, status);
  check(status);
}

nb::tuple to_tuple(const std::vector<std::int64_t>& values) {
  nb::list list;
  for (const std::int64_t v : values) list.append(v);
  return nb::tuple(list);
}

nb::tuple to_tuple(const Shape& shape) {
  return to_tuple(std::vector<std::int64_t>(shape.dim.begin(), shape.dim.begin() + shape.rank));
}

nb::str repr_of(const char* type, nb::handle self, std::initializer_list<const char*> names) {
  std::string text = std::string(type) + "(";
  for (const char* n : names) {
    text.append(text.back() == '(' ? "" : ", ").append(n).append("=");
    text += nb::repr(self.attr(n)).c_str();
  }
  return nb::str((text + ")").c_str());
}

}  // namespace bittern
