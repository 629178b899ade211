// For tests: a temporary folder, and models written into it.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "formats/safetensors_layout.h"

namespace bittern {

class TestFolder : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "bittern_test_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  void put(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(path(name)).parent_path());
    std::ofstream(path(name), std::ios::binary) << text;
  }
  std::string text_of(const std::string& name) const {
    std::ostringstream text;
    text << std::ifstream(path(name), std::ios::binary).rdbuf();
    return text.str();
  }
  // What is in the folder or a folder of it, sorted.
  std::vector<std::string> names(const std::string& inner = "") const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(path(inner)))
      found.push_back(entry.path().filename().string());
    std::sort(found.begin(), found.end());
    return found;
  }

  struct F32 {
    std::string name;
    std::vector<std::uint64_t> shape;
    std::vector<float> values;
  };
  // A file of tensors.
  void put_tensors(const std::string& name, const std::vector<F32>& tensors) const {
    std::vector<SafetensorsSpec> specs;
    for (const F32& tensor : tensors) specs.push_back({tensor.name, SafeDType::f32, tensor.shape});
    auto writer = SafetensorsWriter::create(path(name), specs, {{"format", "pt"}}, true);
    ASSERT_TRUE(writer) << writer.status().message();
    for (std::size_t i = 0; i < tensors.size(); ++i)
      ASSERT_TRUE(writer->append(i, std::as_bytes(std::span(tensors[i].values))).ok());
    ASSERT_TRUE(writer->commit().ok());
  }
  // A folder of Hugging Face.
  void put_model(const std::string& name, const std::vector<F32>& tensors,
                 const std::string& config = R"({"model_type": "nobodys"})") const {
    put(name + "/config.json", config);
    put_tensors(name + "/model.safetensors", tensors);
  }

 private:
  std::string folder_;
};

}  // namespace bittern
