// Safetensors files to be written: how each begins, where the bytes of each tensor go, and the
// index of several.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bittern/status.h"
#include "formats/mapped_file.h"
#include "formats/safetensors.h"

namespace bittern {

// A folder's model.safetensors, or, where the tensors have more than `shard_bytes` bytes,
// model-00001-of-00005.safetensors and so on: tensors fill the shards in the order given, and a
// larger one has a shard of its own. `folder` opens the error messages.
Result<OutputLayout> lay_out_safetensors(const std::string& folder,
                                         std::span<const SafetensorsSpec> tensors,
                                         std::uint64_t shard_bytes,
                                         SafetensorsMetadata metadata = {});
// model.safetensors.index.json of such a folder; `metadata` is JSON, a member each: "\"a\": 1".
Result<std::string> safetensors_index(const std::string& folder,
                                      std::span<const SafetensorsSpec> tensors,
                                      const OutputLayout& layout,
                                      std::span<const std::string> metadata);

// Names, dtypes and shapes are given first, so that the header is written before the data; the
// bytes then come in any order, tensor by tensor or in turns. Bytes are laid out as the reference
// implementation does, by falling alignment and then by name, which keeps every tensor aligned.
class SafetensorsWriter {
 public:
  static Result<SafetensorsWriter> create(const std::string& path,
                                          std::vector<SafetensorsSpec> tensors,
                                          SafetensorsMetadata metadata = {}, bool force = false);
  // The files of lay_out_safetensors in a folder that exists, and the index where there are
  // several. `force` replaces the model there.
  static Result<SafetensorsWriter> create_folder(const std::string& folder,
                                                 std::vector<SafetensorsSpec> tensors,
                                                 std::uint64_t shard_bytes,
                                                 SafetensorsMetadata metadata = {},
                                                 bool force = false);

  // The next bytes of tensor `i` of those given. One thread at a time.
  Status append(std::size_t i, std::span<const std::byte> bytes);
  // Refuses tensors that lack bytes. The index is the last file to appear.
  Status commit();

 private:
  SafetensorsWriter() = default;
  static Result<SafetensorsWriter> make(const std::string& folder,
                                        std::vector<SafetensorsSpec> tensors, OutputLayout layout,
                                        bool force);
  Status commit_all();
  Status write_index();

  std::string folder_;  // with its slash; empty for a single file
  std::vector<PartialFile> files_;
  std::vector<SafetensorsSpec> tensors_;
  OutputLayout layout_;
  std::vector<std::uint64_t> written_;  // bytes of each tensor
  bool force_ = false;
};

}  // namespace bittern
