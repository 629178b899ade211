// Takes the bytes as a GGUF file. What must hold: nothing crashes, an error is one line that begins
// with the file's name, every value and tensor can be read, and a grid that is moved to another
// storage has the same numbers.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>

#include "formats/checkpoint.h"
#include "formats/decode.h"
#include "formats/grid.h"

namespace {

using namespace bittern;

constexpr std::int64_t kMostDecoded = 1 << 14;

void must(bool holds) {
  if (!holds) std::abort();
}

std::size_t walk(const GgufValue& value) {
  std::size_t seen = value.as_uint().has_value() + value.as_integer().has_value() +
                     value.as_number().has_value() + value.as_bool().has_value();
  if (const auto text = value.as_string())
    for (const char c : *text) seen += c == '\n';
  if (value.type() == GgufType::array) value.each([&](const GgufValue& v) { seen += walk(v); });
  return seen;
}

std::vector<float> numbers(const CheckpointTensor& tensor) {
  std::vector<float> out(static_cast<std::size_t>(tensor.rows() * tensor.columns()));
  must(decode_rows(tensor, 0, tensor.rows(), out).ok());
  return out;
}

// The tensor's grid as MLX's groups, and back.
void transcode(const CheckpointTensor& tensor) {
  GridRows grid;
  if (!decode_grid(tensor, 0, tensor.rows(), grid).ok()) return;  // scales that are not finite
  const Shape shape{tensor.rows(), tensor.columns()};
  const std::vector<float> expected = numbers(tensor);
  for (const Storage& storage :
       {Storage::affine(grid.bits, grid.group, SafeDType::f32), tensor.storage}) {
    EncodedRows rows;
    const Status encoded = encode_grid(grid, tensor.columns(), storage, rows);
    if (encoded.code() == Code::unsupported) continue;  // a type that is only read
    must(encoded.ok());
    CheckpointTensor other;
    other.shape = shape;
    other.storage = storage;
    other.data = rows.data;
    other.scales = rows.scales;
    other.biases = rows.biases;
    must(numbers(other) == expected);
  }
}

void read_all(const Checkpoint& model) {
  const GgufFile& file = *model.gguf();
  for (const GgufKey& key : file.keys()) {
    must(file.find(key.key) == &key.value);
    walk(key.value);
    (void)file.numbers(key.key).ok();
    (void)file.strings(key.key).ok();
  }
  for (const CheckpointTensor& tensor : model.tensors()) {
    must(model.find(tensor.name) == &tensor);
    must(*tensor.storage.bytes(tensor.shape) == tensor.data.size());
    const std::int64_t elements = tensor.rows() * tensor.columns();
    if (elements > kMostDecoded) continue;
    std::vector<float> out(static_cast<std::size_t>(elements));
    const Status status = decode_rows(tensor, 0, tensor.rows(), out);
    must(status.ok() || status.message().starts_with("unsupported type "));
    if (elements > 0 && grid_of(tensor.storage)) transcode(tensor);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const int fd = ::memfd_create("bittern_gguf", 0);
  static const std::string path = "/proc/self/fd/" + std::to_string(fd);
  if (size < 4 || std::string_view(reinterpret_cast<const char*>(data), 4) != "GGUF") return -1;
  must(::ftruncate(fd, static_cast<off_t>(size)) == 0);
  must(::pwrite(fd, data, size, 0) == static_cast<ssize_t>(size));
  const auto model = Checkpoint::open(path);
  if (model) {
    read_all(*model);
  } else {
    must(model.status().message().starts_with(path) &&
         model.status().message().find('\n') == std::string_view::npos);
  }
  return 0;
}
