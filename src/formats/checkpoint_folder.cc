// A model that is a folder: where its files are, and which go through a conversion untouched.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "formats/checkpoint.h"
#include "formats/json_events.h"
#include "formats/side_file.h"

namespace bittern {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostOtherFiles = 4096;
constexpr std::size_t kMostRefBytes = 256;

// models--org--name/{refs/main, snapshots/<commit>/}: the folder of the commit.
Result<std::string> snapshot_of(const std::string& folder) {
  const std::string beside = with_slash(folder);
  if (!is_there(beside + "snapshots")) return folder;
  const auto ref = MappedFile::open(beside + "refs/main");
  if (!ref) {
    return Status(ref.status().code(), std::string(ref.status().message()) +
                                           ", expected the name of a folder in snapshots");
  }
  std::string_view commit(reinterpret_cast<const char*>(ref->bytes().data()), ref->bytes().size());
  while (!commit.empty() && (commit.back() == '\n' || commit.back() == '\r'))
    commit.remove_suffix(1);
  if (commit.empty() || commit.size() > kMostRefBytes || commit == "." || commit == ".." ||
      commit.find_first_of(std::string_view("/\\\0", 3)) != std::string_view::npos) {
    return invalid(ref->path() + ": " + in_quotes(commit) +
                   ", expected the name of a folder in snapshots");
  }
  return beside + "snapshots/" + std::string(commit);
}

// Without this, files that cannot be seen would be called missing.
Status check_readable(const std::string& folder) {
  if (::access(folder.c_str(), R_OK | X_OK) == 0 || errno == ENOENT || errno == ENOTDIR) return {};
  return unavailable(folder +
                     ": the folder cannot be read: " + std::generic_category().message(errno));
}

// What a conversion copies: texts about the model, no weights, nothing of how they are packed.
bool goes_through(std::string_view name) {
  for (const std::string_view about_weights :
       {"config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json",
        "quantization_config.json"})
    if (name == about_weights) return false;
  for (const std::string_view weights : {".index.json", ".safetensors", ".gguf"})
    if (name.ends_with(weights)) return false;
  for (const std::string_view suffix :
       {".json", ".jinja", ".model", ".txt", ".md", ".tiktoken", ".py"})
    if (name.ends_with(suffix)) return true;
  for (const std::string_view prefix : {"LICENSE", "NOTICE", "vocab"})
    if (name.starts_with(prefix)) return true;
  return false;
}

// A folder without safetensors is often one of GGUF files, of which one is to be chosen.
Status with_hint(const std::string& folder, const Status& status) {
  if (status.code() != Code::unavailable) return status;
  std::vector<std::string> names;
  list_folder(folder, names);
  for (const std::string& name : names) {
    if (name.ends_with(".gguf"))
      return unavailable(std::string(status.message()) + " (or a file of it: " + name + ")");
  }
  return status;
}

}  // namespace

Status Checkpoint::list_other_files() {
  std::vector<std::string> names, no_files;  // pipes, sockets, folders with the name of a file
  if (const std::error_code error = list_folder(path_, names); error)
    return unavailable(path_ + ": cannot list: " + error.message());
  for (std::string& name : names) {
    if (!goes_through(name)) continue;
    const std::string file = with_slash(path_) + name;
    std::error_code unknown;
    if (other_files_.size() + left_out_.size() + no_files.size() == kMostOtherFiles) {
      return invalid(path_ + ": more than " + std::to_string(kMostOtherFiles) +
                     " files beside the weights, expected fewer");
    }
    if (const Status status = check_side_file(file); !status.ok()) {
      left_out_.emplace_back(status.message());
    } else if (fs::is_regular_file(file, unknown)) {
      other_files_.push_back(std::move(name));
    } else {
      no_files.push_back(std::move(name));
    }
  }
  if (!no_files.empty()) {
    std::string& text = left_out_.emplace_back(path_ + ": ");
    for (std::size_t i = 0; i < no_files.size(); ++i)
      text.append(i == 0 ? "" : ", ").append(in_quotes(no_files[i]));
    text += ": not regular files";
  }
  std::sort(left_out_.begin(), left_out_.end());
  return {};
}

void Checkpoint::list_not_read() {
  const auto some = [](const std::string& first, std::size_t count) {
    return in_quotes(first) + (count == 1 ? "" : " and " + std::to_string(count - 1) + " more");
  };
  std::string least;
  std::size_t count = 0;
  for (const SafetensorsFile& file : folder_->files()) {
    for (const SafetensorsTensor& tensor : file.tensors()) {
      if (folder_->find(tensor.name)) continue;
      if (count++ == 0 || tensor.name < least) least = tensor.name;
    }
  }
  if (count > 0) not_read_.push_back("tensors that the index does not list: " + some(least, count));
  count = 0;
  std::vector<std::string> names;
  list_folder(path_, names);
  for (const std::string& name : names) {
    const auto is_it = [&](const SafetensorsFile& read) {
      return fs::path(read.path()).filename() == name;
    };
    if (!name.ends_with(".safetensors") ||
        std::any_of(folder_->files().begin(), folder_->files().end(), is_it))
      continue;
    if (count++ == 0 || name < least) least = name;
  }
  if (count > 0) not_read_.push_back("files that are not of the model: " + some(least, count));
}

Status Checkpoint::open_folder() {
  kind_ = Kind::hf;
  BITTERN_TRY(check_readable(path_));
  auto snapshot = snapshot_of(path_);
  if (!snapshot) return snapshot.status();
  path_ = std::move(*snapshot);
  BITTERN_TRY(check_readable(path_));
  auto folder = SafetensorsFolder::open(path_);
  if (!folder) return with_hint(path_, folder.status());
  folder_ = std::move(*folder);
  for (const SafetensorsFile& file : folder_->files())
    for (const auto& [key, value] : file.metadata())
      if (key == "format" && value == "mlx") kind_ = Kind::mlx;
  BITTERN_TRY(read_config(path_));
  BITTERN_TRY(take_tensors(*folder_));
  list_not_read();
  return list_other_files();
}

}  // namespace bittern
