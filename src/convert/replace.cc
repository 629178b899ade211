#include "convert/replace.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "core/guarded.h"
#include "formats/json_tree.h"
#include "formats/mapped_file.h"
#include "formats/side_file.h"

namespace bittern {
namespace {

constexpr std::size_t kMostIndexBytes = std::size_t{100} << 20;
constexpr const char* kIndex = "/model.safetensors.index.json";

Status unreadable(const std::string& path, const std::error_code& error) {
  return {Code::unavailable, path + ": cannot be read: " + error.message()};
}

Result<std::vector<std::string>> names_in(const std::string& folder) {
  std::vector<std::string> names;
  if (const std::error_code error = list_folder(folder, names); error)
    return unreadable(folder, error);
  return names;
}

}  // namespace

const char* name(Thing thing) {
  constexpr const char* kNames[] = {"nothing", "a file", "a folder", "a symbolic link",
                                    "a device, pipe or socket"};
  return kNames[static_cast<int>(thing)];
}

Result<Thing> thing_at(const std::string& path) {
  struct stat info;
  if (::lstat(path.c_str(), &info) == 0) {
    return S_ISREG(info.st_mode)   ? Thing::file
           : S_ISDIR(info.st_mode) ? Thing::folder
           : S_ISLNK(info.st_mode) ? Thing::link
                                   : Thing::special;
  }
  if (errno == ENOENT || errno == ENOTDIR) return Thing::nothing;
  return unreadable(path, {errno, std::generic_category()});
}

Status rename_new(const std::string& from, const std::string& to) {
  int error =
      ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0 ? 0 : errno;
  if (error == EINVAL || error == ENOSYS) {  // of the file system
    const auto there = thing_at(to);
    if (!there) return there.status();
    error = *there != Thing::nothing                     ? EEXIST
            : std::rename(from.c_str(), to.c_str()) == 0 ? 0
                                                         : errno;
  }
  if (error == 0) return {};
  if (error == EEXIST) return invalid(to + ": was created in the meantime, expected a new name");
  return {Code::io_error, to + ": cannot rename to it: " + std::generic_category().message(error)};
}

std::vector<std::string> listed_files(const std::string& folder) {
  const std::string path = folder + kIndex;
  const auto thing = thing_at(path);
  if (!thing || *thing != Thing::file) return {};
  const auto text = MappedFile::open(path);
  throw_if_out_of_memory(text.status());  // which says nothing about the folder
  if (!text) return {};
  const auto index = parse_json_tree(path, text->bytes(), kMostIndexBytes, kMostIndexBytes);
  throw_if_out_of_memory(index.status());
  if (!index || !index->is_object() || !index->contains("metadata")) return {};
  const OrderedJson& metadata = (*index)["metadata"];
  if (!metadata.is_object() || !metadata.contains("written_by") || !metadata.contains("files") ||
      metadata["written_by"] != kWrittenBy || !metadata["files"].is_array())
    return {};
  std::vector<std::string> files;
  for (const OrderedJson& file : metadata["files"])
    if (file.is_string()) files.push_back(file.get<std::string>());
  return files;
}

Status check_only(const std::string& folder, const std::vector<std::string>& names) {
  const auto found = names_in(folder);
  if (!found) return found.status();
  for (const std::string& file : *found) {
    const std::string path = folder + "/" + file;
    const auto thing = thing_at(path);
    if (!thing) return thing.status();
    if (std::find(names.begin(), names.end(), file) == names.end() || *thing != Thing::file) {
      return invalid(path + ": " + name(*thing) +
                     " that bittern did not write, expected none; move it elsewhere");
    }
  }
  return {};
}

Status write_whole(const std::string& path, std::span<const std::byte> bytes) {
  return write_whole(path, [&](WritableFile& file) { return file.pwrite(0, bytes); });
}

Status write_whole(const std::string& path, const std::function<Status(WritableFile&)>& write) {
  const std::string partial = path + ".partial";
  auto file = WritableFile::open(partial, true);
  if (!file) return file.status();
  BITTERN_TRY(write(*file));
  BITTERN_TRY(file->sync());
  file->close();
  std::error_code error;
  std::filesystem::rename(partial, path, error);
  if (error) return {Code::io_error, path + ": " + error.message()};
  return sync_name(path);
}

Status check_replaceable(const std::string& path, bool folder) {
  const auto thing = thing_at(path);
  if (!thing) return thing.status();
  if (*thing == Thing::nothing) return {};
  if (*thing != (folder ? Thing::folder : Thing::file)) {
    return invalid(path + ": " + name(*thing) + ", and the output is " +
                   (folder ? "a folder" : "a file") + "; expected another name");
  }
  if (folder) {
    const auto found = names_in(path);
    if (!found) return found.status();
    if (found->empty()) return {};
    const auto files = listed_files(path);
    if (files.empty()) {
      return invalid(path + ": a folder that bittern did not write (" + (kIndex + 1) +
                     " would list its files); @{force} replaces only what bittern wrote");
    }
    return check_only(path, files);
  }
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return unreadable(path, {errno, std::generic_category()});
  char magic[4];
  const ssize_t n = ::read(fd, magic, sizeof magic);
  ::close(fd);
  if (n == 0 || (n == 4 && std::string_view(magic, 4) == "GGUF")) return {};
  return invalid(path + ": not a GGUF file; @{force} replaces only a model of the same format");
}

void remove_known(const std::string& path, const std::vector<std::string>& names) {
  const auto thing = thing_at(path);
  if (!thing) return;
  if (*thing == Thing::file) ::unlink(path.c_str());
  if (*thing != Thing::folder) return;
  for (const std::string& file : names)
    if (file.find('/') == file.npos) ::unlink((path + "/" + file).c_str());
  ::rmdir(path.c_str());
}

}  // namespace bittern
