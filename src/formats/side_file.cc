#include "formats/side_file.h"

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

namespace bittern {
namespace fs = std::filesystem;
namespace {

bool is_inside(const fs::path& path, const fs::path& folder) {
  return std::mismatch(folder.begin(), folder.end(), path.begin(), path.end()).first ==
         folder.end();
}

}  // namespace

bool is_there(const std::string& path) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

std::string with_slash(const std::string& folder) {
  return folder.empty() || folder.back() == '/' ? folder : folder + "/";
}

std::error_code list_folder(const std::string& folder, std::vector<std::string>& names) {
  struct Closing {
    DIR* dir;
    ~Closing() {
      if (dir != nullptr) ::closedir(dir);
    }
  };
  const Closing opened{::opendir(folder.c_str())};
  if (opened.dir == nullptr) return {errno, std::generic_category()};
  for (;;) {
    errno = 0;
    const dirent* entry = ::readdir(opened.dir);
    if (entry == nullptr) break;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  const int error = errno;
  std::sort(names.begin(), names.end());
  return {error, std::generic_category()};
}

Status check_side_file(const std::string& path) {
  std::error_code error;
  if (!fs::is_symlink(path, error)) return {};
  const fs::path parent = fs::path(path).parent_path();
  const fs::path folder = fs::canonical(parent.empty() ? "." : parent, error);
  const fs::path target = error ? fs::path() : fs::canonical(path, error);
  if (error) return unavailable(path + ": a symbolic link that leads nowhere: " + error.message());
  if (is_inside(target, folder)) return {};
  for (fs::path at = folder; at.has_relative_path(); at = at.parent_path())
    if (at.filename() == "snapshots" && is_inside(target, at.parent_path() / "blobs")) return {};
  return invalid(path + ": a symbolic link to " + target.string() +
                 ", outside the model's folder; expected a file in it, or in blobs/ of the same "
                 "Hugging Face cache");
}

}  // namespace bittern
