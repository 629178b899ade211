// What the tests of checkpoints share: a folder with a model, and its numbers.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "formats/checkpoint.h"
#include "formats/decode.h"
#include "formats/test_folder.h"

namespace bittern {

template <class T>
StoredTensor stored(const std::string& name, SafeDType dtype, std::vector<std::uint64_t> shape,
                    const std::vector<T>& values) {
  return {{name, dtype, std::move(shape)}, bytes_of(values)};
}

// Zeros of that shape.
inline StoredTensor blank(const std::string& name, SafeDType dtype,
                          std::vector<std::uint64_t> shape) {
  std::uint64_t bits = static_cast<std::uint64_t>(bits_of(dtype));
  for (const std::uint64_t n : shape) bits *= n;
  return {{name, dtype, std::move(shape)}, std::string(bits / 8, '\0')};
}

class Checkpoints : public TestFolder {
 protected:
  void put_model(const std::vector<StoredTensor>& tensors, const std::string& config = "") const {
    put_tensors("model.safetensors", tensors);
    if (!config.empty()) put("config.json", config);
  }
  Checkpoint opened(const std::string& at) const {
    auto model = Checkpoint::open(at);
    if (!model) ADD_FAILURE() << model.status().message();
    return std::move(*model);
  }
  Checkpoint opened() const { return opened(path()); }
  // The message after "FOLDER".
  void refused(const std::string& message, Code code = Code::invalid_argument) const {
    const auto model = Checkpoint::open(path());
    EXPECT_EQ(model.status().message(), path() + message);
    EXPECT_EQ(model.status().code(), code) << message;
  }
};

inline std::vector<float> numbers(const CheckpointTensor& tensor, std::int64_t first,
                                  std::int64_t count) {
  std::vector<float> out(static_cast<std::size_t>(count * tensor.columns()));
  const Status status = decode_rows(tensor, first, count, out);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}
inline std::vector<float> numbers(const CheckpointTensor& tensor) {
  return numbers(tensor, 0, tensor.rows());
}
inline std::string why_not(const CheckpointTensor& tensor) {
  std::vector<float> out(static_cast<std::size_t>(tensor.rows() * tensor.columns()));
  return std::string(decode_rows(tensor, 0, tensor.rows(), out).message());
}

}  // namespace bittern
