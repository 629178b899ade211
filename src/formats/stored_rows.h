// Rows as they are stored, for decoding to numbers (decode.h) or to a grid (grid.h).
#pragma once
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "formats/checkpoint.h"

namespace bittern {

// "tensor NAME: ", on one line.
std::string of_tensor(const CheckpointTensor& tensor);

// ok if the rows exist, and the tensor has as many bytes as its storage and shape require.
Status check_rows(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count);

// `out.size()` numbers of F32, F16, BF16 or F64, at any address.
Status widen(SafeDType dtype, std::span<const std::byte> bytes, std::span<float> out);

// Rows of T as an op takes them: in place, or a copy if they are not aligned.
template <class T>
class AlignedRows {
 public:
  explicit AlignedRows(std::span<const std::byte> bytes) {
    if (reinterpret_cast<std::uintptr_t>(bytes.data()) % alignof(T) == 0) {
      data_ = reinterpret_cast<const T*>(bytes.data());
      return;
    }
    copy_.resize(bytes.size() / sizeof(T));
    std::memcpy(copy_.data(), bytes.data(), copy_.size() * sizeof(T));
    data_ = copy_.data();
  }
  AlignedRows(const AlignedRows&) = delete;
  AlignedRows& operator=(const AlignedRows&) = delete;
  const T* data() const { return data_; }

 private:
  std::vector<T> copy_;
  const T* data_ = nullptr;
};

// Rows [first, first + count) of a matrix whose rows have `row_bytes` bytes.
inline std::span<const std::byte> rows_of(std::span<const std::byte> bytes, std::size_t row_bytes,
                                          std::int64_t first, std::int64_t count) {
  return bytes.subspan(static_cast<std::size_t>(first) * row_bytes,
                       static_cast<std::size_t>(count) * row_bytes);
}

// ---- AWQ, GPTQ and compressed-tensors: w = (code - zero) * scale ----

struct ZeroPointRows {
  std::vector<std::uint8_t> codes;     // [count, columns]
  std::vector<float> scales;           // [count, columns / group]
  std::vector<std::uint8_t> zeros;     // the same
  std::vector<std::int32_t> group_of;  // [columns]
  bool in_order = true;                // whether group_of[c] is c / group
};
// Whether the tensor is one of these.
bool has_zero_points(const CheckpointTensor& tensor);
Status unpack_zero_points(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count,
                          ZeroPointRows& out);

// Zero points [count, groups] as words [ceil(count * bits / 32), groups]: a bit stream down each
// column.
std::vector<std::byte> pack_zero_points(std::span<const std::uint8_t> zeros, std::size_t groups,
                                        int bits);

}  // namespace bittern
