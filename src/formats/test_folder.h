// For tests: a fixture that has a temporary folder, and models written into it.
#pragma once
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "formats/test_files.h"

namespace bittern {

class TestFolder : public testing::Test, protected TempFolder {
 protected:
  void put_tensors(const std::string& name, const std::vector<StoredTensor>& tensors,
                   SafetensorsMetadata metadata = {}) const {
    const auto text = safetensors_text(tensors, std::move(metadata));
    ASSERT_TRUE(text) << text.status().message();
    put(name, *text);
  }

  struct F32 {
    std::string name;
    std::vector<std::uint64_t> shape;
    std::vector<float> values;
  };
  void put_floats(const std::string& name, const std::vector<F32>& tensors) const {
    std::vector<StoredTensor> stored;
    for (const F32& tensor : tensors)
      stored.push_back({{tensor.name, SafeDType::f32, tensor.shape}, bytes_of(tensor.values)});
    put_tensors(name, stored, {{"format", "pt"}});
  }
  // A folder of Hugging Face.
  void put_model(const std::string& name, const std::vector<F32>& tensors,
                 const std::string& config = R"({"model_type": "nobodys"})") const {
    put(name + "/config.json", config);
    put_floats(name + "/model.safetensors", tensors);
  }
};

}  // namespace bittern
