// What src/cuda/tensor_map.cuh does with the copy engine, done in plain C++.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "cuda/runtime.cuh"

namespace bittern::cuda {

struct TensorBoxes {
  std::array<std::int64_t, 3> shape;
  int rows = 1, layers = 1;
};
struct TensorMap {
  void* data;
  TensorBoxes boxes;
};
inline Status make_tensor_map(std::string_view, const void* data, const TensorBoxes& boxes,
                              TensorMap* out) {
  *out = {const_cast<void*>(data), boxes};
  return {};
}
struct BoxPlace {
  int x, y, z;
};

namespace emulated {
// f(a piece in shared memory, the same in the tensor or null outside it)
template <class F>
void for_pieces(const TensorMap& tensor, BoxPlace at, std::byte* shared, F&& f) {
  const auto& shape = tensor.boxes.shape;
  const int rows = tensor.boxes.rows, count = rows * tensor.boxes.layers;
  for (int row = 0; row < count; ++row) {
    for (int piece = 0; piece < 8; ++piece) {
      const std::int64_t x = at.x + 8 * piece, y = at.y + row % rows, z = at.z + row / rows;
      const bool inside = x < shape[0] && y < shape[1] && z < shape[2];
      auto* const element = static_cast<std::uint16_t*>(tensor.data) +
                            (inside ? (z * shape[1] + y) * shape[0] + x : 0);
      f(shared + row * 128 + (piece ^ row % 8) * 16,
        inside ? reinterpret_cast<std::byte*>(element) : nullptr);
    }
  }
}
}  // namespace emulated

inline void copy_box_in(void* shared, const TensorMap& tensor, BoxPlace at, std::uint64_t*) {
  emulated::for_pieces(tensor, at, static_cast<std::byte*>(shared),
                       [](std::byte* to, const std::byte* from) {
                         from != nullptr ? std::memcpy(to, from, 16) : std::memset(to, 0, 16);
                       });
}
inline void copy_box_out(const TensorMap& tensor, BoxPlace at, const void* shared) {
  emulated::for_pieces(tensor, at, static_cast<std::byte*>(const_cast<void*>(shared)),
                       [](const std::byte* from, std::byte* to) {
                         if (to != nullptr) std::memcpy(to, from, 16);
                       });
}

}  // namespace bittern::cuda
