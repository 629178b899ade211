// Arrays of any framework, through DLPack or the buffer protocol, without copies.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "binding.h"
#include "bittern/plan.h"

namespace bittern {

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

// `where` is "op: operand". The producer of a CUDA array orders its work before `stream`'s.
Tensor import_tensor(const std::string& where, nb::handle object, bool output,
                     std::uintptr_t stream);

// `expected` is named in errors; the plan compares shapes.
MutView to_view(const std::string& where, const Tensor& tensor, const Operand& expected);

// A refusal of strides says what to do: in Python that is one call.
void check_strides(const Status& status);

// Autograd tells from a tensor's version that what it saved was overwritten.
void count_write(const Tensor& tensor);

// An array of numpy's that owns the values.
nb::object to_numpy(std::vector<float> values, const std::vector<std::size_t>& shape);

// A function of bittern/_cuda.py.
nb::object cuda_helper(const char* function);

}  // namespace bittern
