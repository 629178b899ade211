// What the parts of the Python module share: errors as exceptions, tuples, reprs.
#pragma once
#include <nanobind/nanobind.h>

#include <initializer_list>
#include <string_view>
#include <utility>
#include <vector>

#include "bittern/device.h"
#include "bittern/status.h"
#include "bittern/tensor.h"

namespace bittern {

namespace nb = nanobind;

// Raises what a status that is not ok says.
void check(const Status& status);
// The same for a call that reads files: one that is missing or cannot be read is an OSError.
void check_file(const Status& status);

template <class T>
T checked(Result<T> result) {
  check(result.status());
  return std::move(*result);
}

nb::tuple to_tuple(const std::vector<std::int64_t>& values);
nb::tuple to_tuple(const Shape& shape);

// "cpu", "cuda" or "cuda:N"; raises an error of `op` for others.
Device parse_device(std::string_view op, std::string_view text);

// "Sku(category='quantization', ...)" from an object's properties.
nb::str repr_of(const char* type, nb::handle self, std::initializer_list<const char*> names);

// Each adds its part to the module.
void bind_tensor(nb::module_& m);     // arrays of any framework
void bind_plan(nb::module_& m);       // ops, descriptors, plans
void bind_codec(nb::module_& m);      // codebooks and rotations
void bind_kv_cache(nb::module_& m);   // the KV cache
void bind_convert(nb::module_& m);    // model files
void bind_decoding(nb::module_& m);   // frequencies of rope, sampling
void bind_tokenizer(nb::module_& m);  // text
void bind_model(nb::module_& m);      // models that run

}  // namespace bittern
