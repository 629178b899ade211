// Takes the bytes as a safetensors file, or as the index of a folder. What must hold: nothing
// crashes, an error is one line that begins with the file's name, and the tensors of a file that is
// read cover its data without gaps.
#include <cstdlib>

#include "formats/safetensors.h"

namespace {

using namespace bittern;

void must(bool holds) {
  if (!holds) std::abort();
}

void must_be_one_line(const Status& status) {
  must(!status.ok() && status.message().substr(0, 3) == "f: " &&
       status.message().find('\n') == std::string_view::npos);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto bytes = std::as_bytes(std::span(data, size));
  const auto file = parse_safetensors("f", bytes);
  if (!file) {
    must_be_one_line(file.status());
  } else {
    std::uint64_t end = file->tensors.empty() ? size : file->tensors[0].begin;
    for (const SafetensorsTensor& tensor : file->tensors) {
      must(tensor.begin == end && tensor.end >= end && file->find(tensor.name) == &tensor);
      end = tensor.end;
    }
    must(end == size);
  }

  const auto index = parse_safetensors_index("f", bytes);
  if (!index) {
    must_be_one_line(index.status());
  } else {
    for (const auto& [tensor, shard] : index->weight_map) must(shard < index->shards.size());
    for (const std::string& shard : index->shards) must(shard.find('/') == std::string::npos);
  }
  return 0;
}
