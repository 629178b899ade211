// For tests and fuzzers: a temporary folder, and files of tensors to put into it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bittern/status.h"
#include "formats/mapped_file.h"
#include "formats/safetensors_layout.h"

namespace bittern {

// A folder that goes away with the object.
class TempFolder {
 public:
  TempFolder() {
    path_ = (std::filesystem::temp_directory_path() / "bittern_test_XXXXXX").string();
    if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error(path_ + ": cannot be made");
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }

  const std::string& path() const { return path_; }
  std::string path(const std::string& name) const { return path_ + "/" + name; }
  // Makes the folders on the way, too.
  void put(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(path(name)).parent_path());
    std::ofstream(path(name), std::ios::binary) << text;
  }
  std::string text_of(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // What is in the folder or a folder of it, sorted.
  std::vector<std::string> names(const std::string& inner = "") const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(path(inner)))
      found.push_back(entry.path().filename().string());
    std::sort(found.begin(), found.end());
    return found;
  }

  // All files of a folder, as one text.
  std::string contents(const std::string& inner) const {
    std::string all;
    for (const std::string& name : names(inner))
      all += name + ":" + text_of(inner + "/" + name) + "\n";
    return all;
  }

 private:
  std::string path_;
};

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

inline std::string from_hex(std::string_view hex) {
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  std::string out;
  for (std::size_t i = 0; i < hex.size(); i += 2)
    out += static_cast<char>(digit(hex[i]) * 16 + digit(hex[i + 1]));
  return out;
}

// A file of a layout. `tensors` are the bytes of all its tensors, in the order they were given.
inline std::string file_text(const OutputLayout& layout, std::span<const std::string> tensors,
                             std::uint32_t file = 0) {
  std::string text = layout.files[file].head;
  text.resize(layout.files[file].bytes, '\0');
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const OutputLayout::Extent& to = layout.tensors[i];
    if (to.file != file) continue;
    if (to.bytes != tensors[i].size()) throw std::runtime_error("a tensor of another size");
    text.replace(to.begin, to.bytes, tensors[i]);
  }
  return text;
}

struct StoredTensor {
  SafetensorsSpec spec;
  std::string bytes;
};

// One safetensors file.
inline Result<std::string> safetensors_text(const std::vector<StoredTensor>& tensors,
                                            SafetensorsMetadata metadata = {}) {
  std::vector<SafetensorsSpec> specs;
  std::vector<std::string> bytes;
  for (const StoredTensor& tensor : tensors) {
    specs.push_back(tensor.spec);
    bytes.push_back(tensor.bytes);
  }
  const auto layout = lay_out_safetensors("", specs, std::numeric_limits<std::uint64_t>::max(),
                                          std::move(metadata));
  if (!layout) return layout.status();
  return file_text(*layout, bytes);
}

}  // namespace bittern
