#include "formats/safetensors_layout.h"

#include <algorithm>
#include <filesystem>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "formats/json_events.h"
#include "formats/safetensors_detail.h"
#include "formats/side_file.h"

namespace bittern {

using namespace safetensors_detail;

namespace {

using Json = nlohmann::json;

// A JSON string, or nothing where `text` is not UTF-8.
std::optional<std::string> json_string(const std::string& text) {
  try {
    return Json(text).dump();
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

std::span<const std::byte> as_bytes(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// A file that a loader of the folder takes for a part of the model.
bool is_part_of_model(const std::string& file) {
  if (file == kSingle || file == kIndex) return true;
  constexpr std::string_view kPattern = "model-#####-of-#####.safetensors";
  return file.size() == kPattern.size() &&
         std::equal(file.begin(), file.end(), kPattern.begin(), [](char c, char pattern) {
           return pattern == '#' ? c >= '0' && c <= '9' : c == pattern;
         });
}

std::vector<std::string> parts_of_model(const std::string& folder) {
  std::vector<std::string> parts;
  std::error_code error;
  for (std::filesystem::directory_iterator file(folder, error), end; !error && file != end;
       file.increment(error)) {
    std::string name = file->path().filename().string();
    if (is_part_of_model(name)) parts.push_back(std::move(name));
  }
  std::sort(parts.begin(), parts.end());
  return parts;
}

// Fills in the heads of files whose names are known and whose tensors know their file.
Status lay_out_files(const std::string& where, const std::string& folder,
                     std::span<const SafetensorsSpec> tensors, SafetensorsMetadata metadata,
                     OutputLayout& layout) {
  std::string opening = "{";
  BITTERN_TRY(sort_metadata(where, metadata));
  for (const auto& [key, value] : metadata) {
    const auto k = json_string(key), v = json_string(value);
    if (!k || !v)
      return invalid(where + ": __metadata__: " + in_quotes(key) + ": not UTF-8, expected UTF-8");
    opening += opening.size() == 1 ? std::string("\"__metadata__\":{") : std::string(",");
    opening += *k + ":" + *v;
  }
  if (!metadata.empty()) opening += "}";

  std::vector<std::uint32_t> order;
  BITTERN_TRY(sort_names(where, tensors, order));
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) {
    return std::tuple(layout.tensors[a].file, tensors[b].dtype) <
           std::tuple(layout.tensors[b].file, tensors[a].dtype);
  });
  std::size_t next = 0;
  for (std::uint32_t i = 0; i < layout.files.size(); ++i) {
    OutputLayout::File& file = layout.files[i];
    std::string header = opening;
    std::uint64_t offset = 0;
    const std::size_t first = next;
    for (; next < order.size() && layout.tensors[order[next]].file == i; ++next) {
      const SafetensorsSpec& tensor = tensors[order[next]];
      OutputLayout::Extent& extent = layout.tensors[order[next]];
      BITTERN_TRY(check_name(where, tensor.name));
      const auto escaped = json_string(tensor.name);
      if (!escaped || tensor.name == kMetadata) {
        return invalid(tensor_in(where, tensor.name) + (escaped ? "reserved" : "not UTF-8") +
                       ", expected another name");
      }
      header.append(header.size() == 1 ? "" : ",").append(*escaped).append(":{\"dtype\":\"");
      header.append(name(tensor.dtype)).append("\",\"shape\":").append(list(tensor.shape));
      extent.begin = offset;  // of the data, until the header's size is known
      offset += extent.bytes;
      header.append(",\"data_offsets\":").append(list(std::vector{extent.begin, offset}));
      header.append("}");
    }
    header += "}";
    header.append((8 - header.size() % 8) % 8, ' ');
    if (header.size() > kSafetensorsMaxHeader) {
      return invalid(folder + file.name + ": header of " + std::to_string(header.size()) +
                     " bytes, expected at most " + std::to_string(kSafetensorsMaxHeader));
    }
    for (std::size_t byte = 0; byte < 8; ++byte)
      file.head.push_back(static_cast<char>(header.size() >> (8 * byte) & 255));
    file.head += header;
    file.bytes = file.head.size() + offset;
    for (std::size_t t = first; t < next; ++t) layout.tensors[order[t]].begin += file.head.size();
  }
  return {};
}

Status size_tensors(const std::string& where, std::span<const SafetensorsSpec> tensors,
                    OutputLayout& layout) {
  std::uint64_t total = 0;
  for (const SafetensorsSpec& tensor : tensors) {
    const auto size = byte_size(tensor_in(where, tensor.name), tensor);
    if (!size) return size.status();
    layout.tensors.push_back({.bytes = *size});
    total += *size;
    if (total >> 61 != 0) return invalid(where + ": 2^61 bytes or more, expected less");
  }
  return {};
}

}  // namespace

Result<OutputLayout> lay_out_safetensors(const std::string& folder,
                                         std::span<const SafetensorsSpec> tensors,
                                         std::uint64_t shard_bytes, SafetensorsMetadata metadata) {
  return guarded<OutputLayout>(folder, [&]() -> Result<OutputLayout> {
    if (shard_bytes == 0) return invalid(folder + ": shards of 0 bytes, expected at least 1");
    OutputLayout layout;
    BITTERN_TRY(size_tensors(folder, tensors, layout));
    std::uint32_t shard = 0;
    std::uint64_t filled = 0;
    for (OutputLayout::Extent& tensor : layout.tensors) {
      if (filled != 0 && (filled > shard_bytes || tensor.bytes > shard_bytes - filled)) {
        ++shard;
        filled = 0;
      }
      tensor.file = shard;
      filled += tensor.bytes;
    }
    const std::uint32_t count = shard + 1;
    if (count > kSafetensorsMaxShards) {
      return invalid(folder + ": " + std::to_string(count) + " shards, expected at most " +
                     std::to_string(kSafetensorsMaxShards));
    }
    for (std::uint32_t i = 1; count > 1 && i <= count; ++i) {
      const auto five = [](std::uint32_t n) { return std::to_string(100000 + n).substr(1); };
      layout.files.push_back({.name = "model-" + five(i) + "-of-" + five(count) + ".safetensors"});
    }
    if (count == 1) layout.files.push_back({.name = kSingle});
    const std::string slashed = with_slash(folder);
    BITTERN_TRY(lay_out_files(slashed + (count == 1 ? kSingle : kIndex), slashed, tensors,
                              std::move(metadata), layout));
    return layout;
  });
}

Result<std::string> safetensors_index(const std::string& folder,
                                      std::span<const SafetensorsSpec> tensors,
                                      const OutputLayout& layout,
                                      std::span<const std::string> metadata) {
  std::vector<std::uint32_t> order;
  BITTERN_TRY(sort_names(with_slash(folder) + kIndex, tensors, order));
  std::string text = "{\n  \"metadata\": {";
  for (std::size_t i = 0; i < metadata.size(); ++i)
    text += (i == 0 ? "\n    " : ",\n    ") + metadata[i];
  text += "\n  },\n  \"weight_map\": {";
  for (std::size_t i = 0; i < order.size(); ++i) {
    text += (i == 0 ? "\n    " : ",\n    ") + *json_string(tensors[order[i]].name) + ": \"" +
            layout.files[layout.tensors[order[i]].file].name + "\"";
  }
  text += "\n  }\n}\n";
  return text;
}

Result<SafetensorsWriter> SafetensorsWriter::make(const std::string& folder,
                                                  std::vector<SafetensorsSpec> tensors,
                                                  OutputLayout layout, bool force) {
  SafetensorsWriter writer;
  writer.folder_ = folder;
  writer.force_ = force;
  std::uint64_t total = 0;
  for (const OutputLayout::File& file : layout.files) total += file.bytes;
  for (OutputLayout::File& laid_out : layout.files) {
    auto file = PartialFile::create(folder + laid_out.name, force);
    if (!file) return file.status();
    if (writer.files_.empty()) BITTERN_TRY(file->check_room(total));
    BITTERN_TRY(file->write(as_bytes(laid_out.head)));
    laid_out.head = {};
    writer.files_.push_back(std::move(*file));
  }
  writer.tensors_ = std::move(tensors);
  writer.layout_ = std::move(layout);
  writer.written_.resize(writer.tensors_.size());
  return writer;
}

Result<SafetensorsWriter> SafetensorsWriter::create(const std::string& path,
                                                    std::vector<SafetensorsSpec> tensors,
                                                    SafetensorsMetadata metadata, bool force) {
  return guarded<SafetensorsWriter>(path, [&]() -> Result<SafetensorsWriter> {
    OutputLayout layout;
    BITTERN_TRY(size_tensors(path, tensors, layout));
    layout.files.push_back({.name = path});
    BITTERN_TRY(lay_out_files(path, "", tensors, std::move(metadata), layout));
    return make("", std::move(tensors), std::move(layout), force);
  });
}

Result<SafetensorsWriter> SafetensorsWriter::create_folder(const std::string& folder,
                                                           std::vector<SafetensorsSpec> tensors,
                                                           std::uint64_t shard_bytes,
                                                           SafetensorsMetadata metadata,
                                                           bool force) {
  return guarded<SafetensorsWriter>(folder, [&]() -> Result<SafetensorsWriter> {
    if (const auto parts = parts_of_model(folder); !parts.empty() && !force) {
      return invalid(with_slash(folder) + parts[0] +
                     ": exists, expected a folder without a model (or force)");
    }
    auto layout = lay_out_safetensors(folder, tensors, shard_bytes, std::move(metadata));
    if (!layout) return layout.status();
    return make(with_slash(folder), std::move(tensors), std::move(*layout), force);
  });
}

Status SafetensorsWriter::append(std::size_t i, std::span<const std::byte> bytes) {
  if (i >= tensors_.size()) {
    return invalid(files_[0].path() + ": tensor " + std::to_string(i) + ", expected one of " +
                   std::to_string(tensors_.size()));
  }
  const OutputLayout::Extent& extent = layout_.tensors[i];
  PartialFile& file = files_[extent.file];
  if (bytes.size() > extent.bytes - written_[i]) {
    return invalid(tensor_in(file.path(), tensors_[i].name) +
                   std::to_string(written_[i] + bytes.size()) + " bytes, expected " +
                   std::to_string(extent.bytes));
  }
  BITTERN_TRY(file.pwrite(extent.begin + written_[i], bytes));
  written_[i] += bytes.size();
  return {};
}

Status SafetensorsWriter::write_index() {
  std::uint64_t total = 0;
  for (const OutputLayout::Extent& extent : layout_.tensors) total += extent.bytes;
  const std::string metadata[] = {"\"total_size\": " + std::to_string(total)};
  auto text = safetensors_index(folder_, tensors_, layout_, metadata);
  if (!text) return text.status();
  auto file = PartialFile::create(folder_ + kIndex, force_);
  if (!file) return file.status();
  BITTERN_TRY(file->write(as_bytes(*text)));
  return file->commit();
}

Status SafetensorsWriter::commit() {
  try {
    return commit_all();
  } catch (const std::bad_alloc&) {
    return {Code::out_of_memory, files_[0].path() + ": out of memory"};
  }
}

Status SafetensorsWriter::commit_all() {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const OutputLayout::Extent& extent = layout_.tensors[i];
    if (written_[i] == extent.bytes) continue;
    return invalid(tensor_in(files_[extent.file].path(), tensors_[i].name) +
                   std::to_string(written_[i]) + " bytes, expected " +
                   std::to_string(extent.bytes));
  }
  // An old index goes first: it must not describe the new shards.
  std::error_code error;
  const bool folder = !folder_.empty();
  if (folder && force_) std::filesystem::remove(folder_ + kIndex, error);
  if (error) return {Code::io_error, folder_ + kIndex + ": cannot remove: " + error.message()};
  for (PartialFile& file : files_) BITTERN_TRY(file.commit());
  if (!folder) return {};
  if (force_) {
    const auto is_ours = [&](const std::string& part) {
      return std::any_of(layout_.files.begin(), layout_.files.end(),
                         [&](const OutputLayout::File& file) { return file.name == part; });
    };
    for (const std::string& part : parts_of_model(folder_)) {
      if (is_ours(part)) continue;
      if (!std::filesystem::remove(folder_ + part, error) && error)
        return {Code::io_error, folder_ + part + ": cannot remove: " + error.message()};
    }
  }
  if (files_.size() == 1) return {};
  return write_index();
}

}  // namespace bittern
