// Takes the bytes as the config.json of folders with MLX, AWQ, GPTQ and compressed tensors, and as
// the index of another folder. What must hold: nothing crashes, an error is one line that begins
// with the folder's name, and the tensors of a model that opens can be decoded.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "formats/checkpoint.h"
#include "formats/decode.h"
#include "formats/grid.h"
#include "formats/test_files.h"

namespace {

using namespace bittern;
namespace fs = std::filesystem;

void must(bool holds) {
  if (!holds) std::abort();
}

class Folders {
 public:
  Folders() {
    const std::string text = "/proc/self/fd/" + std::to_string(fd_);
    const auto folder = [&](const std::string& name, const std::string& linked) {
      paths_.push_back(root_.path(name));
      fs::create_directory(paths_.back());
      fs::create_symlink(text, paths_.back() + "/" + linked);
      return paths_.back() + "/";
    };
    write(folder("mlx", "config.json") + "model.safetensors",
          {{"a.weight", SafeDType::u32, {2, 8}},
           {"a.scales", SafeDType::bf16, {2, 2}},
           {"a.biases", SafeDType::bf16, {2, 2}},
           {"b.weight", SafeDType::f16, {2, 2}}});
    write(folder("awq", "config.json") + "model.safetensors",
          {{"a.qweight", SafeDType::i32, {32, 4}},
           {"a.qzeros", SafeDType::i32, {1, 4}},
           {"a.scales", SafeDType::f16, {1, 32}}});
    write(folder("gptq", "config.json") + "model.safetensors",
          {{"a.qweight", SafeDType::i32, {4, 8}},
           {"a.qzeros", SafeDType::i32, {1, 1}},
           {"a.scales", SafeDType::f16, {1, 8}},
           {"a.g_idx", SafeDType::i32, {32}}});
    write(folder("compressed", "config.json") + "model.safetensors",
          {{"a.weight_packed", SafeDType::i32, {2, 8}},
           {"a.weight_scale", SafeDType::bf16, {2, 2}},
           {"a.weight_zero_point", SafeDType::i32, {1, 2}},
           {"a.weight_shape", SafeDType::i64, {2}}});
    const std::string sharded = folder("sharded", "model.safetensors.index.json");
    write(sharded + "a", {{"a", SafeDType::f32, {2}}});
    write(sharded + "b", {{"b", SafeDType::f32, {2}}, {"c", SafeDType::bf16, {2}}});
  }

  const std::vector<std::string>& paths() const { return paths_; }
  void put(const std::uint8_t* data, std::size_t size) const {
    must(::ftruncate(fd_, static_cast<off_t>(size)) == 0);
    must(::pwrite(fd_, data, size, 0) == static_cast<ssize_t>(size));
  }

 private:
  static void write(const std::string& path, const std::vector<SafetensorsSpec>& specs) {
    std::vector<StoredTensor> tensors;
    for (const SafetensorsSpec& spec : specs) {
      std::size_t size = static_cast<std::size_t>(bits_of(spec.dtype)) / 8;
      for (const std::uint64_t n : spec.shape) size *= n;
      tensors.push_back({spec, std::string(size, '\0')});
      constexpr std::int64_t kShape[] = {2, 64};  // of compressed-tensors' a.weight
      if (spec.dtype == SafeDType::i64) std::memcpy(tensors.back().bytes.data(), kShape, size);
    }
    const auto text = safetensors_text(tensors);
    must(text.ok());
    std::ofstream(path, std::ios::binary) << *text;
  }

  TempFolder root_;
  std::vector<std::string> paths_;
  int fd_ = ::memfd_create("bittern_config", 0);
};

void open(const std::string& folder) {
  const auto model = Checkpoint::open(folder);
  if (!model) {
    must(model.status().message().starts_with(folder) &&
         model.status().message().find('\n') == std::string_view::npos);
    return;
  }
  for (const CheckpointTensor& tensor : model->tensors()) {
    std::vector<float> out(static_cast<std::size_t>(tensor.rows() * tensor.columns()));
    const Status status = decode_rows(tensor, 0, tensor.rows(), out);
    must(status.ok() || status.message().starts_with("unsupported type "));
    GridRows grid;
    must(decode_grid(tensor, 0, tensor.rows(), grid).ok() == tensor.storage.quantized());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Folders folders;
  if (size == 0) return -1;
  folders.put(data, size);
  for (const std::string& folder : folders.paths()) open(folder);
  return 0;
}
