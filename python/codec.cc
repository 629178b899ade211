// Tables of the KV codec as numpy arrays.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include <string>
#include <string_view>
#include <vector>

#include "binding.h"
#include "bittern/codec.h"
#include "tensor.h"

namespace bittern {
namespace {

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
    return to_numpy(std::move(table), kind == Rotation::dense ? std::vector<std::size_t>{n, n}
                                                              : std::vector<std::size_t>{n});
  }
  check(invalid("make_rotation: rotation: '" + std::string(rotation) +
                "', expected identity, hadamard or dense"));
  return nb::none();
}

}  // namespace

void bind_codec(nb::module_& m) {
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
}

}  // namespace bittern
