#include "distill/work_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <set>
#include <utility>
#include <vector>

#include "convert/output.h"
#include "convert/replace.h"
#include "distill/asked.h"

namespace bittern {

WorkFolder::~WorkFolder() {
  if (lock_ >= 0) ::close(lock_);
}

bool WorkFolder::has_start() const {
  return std::filesystem::exists(start()) && std::filesystem::exists(start_sum());
}
bool WorkFolder::has_state() const { return std::filesystem::exists(state()); }

Status WorkFolder::open(bool resume, bool force) {
  const auto thing = thing_at(path_);
  if (!thing) return thing.status();
  std::error_code error;
  if (*thing == Thing::nothing) {
    std::filesystem::create_directory(path_, error);
    if (error) return {Code::io_error, path_ + ": " + error.message()};
    ours_ = true;
    return lock();
  }
  if (*thing != Thing::folder)
    return invalid(path_ + ": " + name(*thing) + ", expected a folder or nothing");
  BITTERN_TRY(lock());
  BITTERN_TRY(check_ours());
  ours_ = true;
  if (resume) {
    // Nobody can tell whether it is whole.
    const bool unknown = !has_start() && std::filesystem::exists(start());
    if (unknown) error = remove_each({start()});
    if (error) return {Code::io_error, start() + ": cannot be removed: " + error.message()};
    return {};
  }
  if (!force)
    return {Code::unavailable, path_ +
                                   ": left by a run that was stopped; @{resume} continues it, "
                                   "@{force} starts again"};
  error = clear();
  if (error) return {Code::io_error, path_ + ": cannot be emptied: " + error.message()};
  return {};
}

void WorkFolder::remove_if_empty() const {
  std::error_code error;
  if (lock_ < 0 || !ours_) return;
  for (const auto& entry : std::filesystem::directory_iterator(path_, error))
    if (entry.path() != asked() && entry.path() != asked() + ".partial") return;
  if (error) return;
  std::filesystem::remove(asked() + ".partial", error);
  std::filesystem::remove(asked(), error);
  std::filesystem::remove(path_, error);
}

std::error_code WorkFolder::remove() const {
  std::error_code error = clear();
  if (!error) std::filesystem::remove(path_, error);
  return error;
}

std::error_code WorkFolder::clear() const {
  std::error_code error;
  std::vector<std::filesystem::path> paths{state()};
  for (const auto& entry : std::filesystem::directory_iterator(path_, error))
    if (entry.path() != asked() && entry.path() != state()) paths.push_back(entry.path());
  paths.push_back(asked());
  return error ? error : remove_each(paths);
}

// In this order, and folders by way of `removed`: what has its name still is whole.
std::error_code WorkFolder::remove_each(const std::vector<std::filesystem::path>& paths) const {
  std::error_code error;
  std::filesystem::remove_all(removed(), error);
  for (const std::filesystem::path& path : paths) {
    if (error) break;
    const auto status = std::filesystem::symlink_status(path, error);
    if (path == removed() || status.type() == std::filesystem::file_type::not_found) {
      error.clear();
      continue;
    }
    if (status.type() != std::filesystem::file_type::directory) {
      std::filesystem::remove(path, error);
      continue;
    }
    std::filesystem::rename(path, removed(), error);
    if (!error) std::filesystem::remove_all(removed(), error);
  }
  return error;
}

Status WorkFolder::remove_results() const {
  const std::error_code error = remove_each({result() + ".replaced", result(), written_start()});
  if (!error) return {};
  return {Code::io_error, result() + ": cannot be removed: " + error.message()};
}

// One run at a time, while this lives. A file system without locks is trusted.
Status WorkFolder::lock() {
  lock_ = ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock_ < 0) return {Code::io_error, path_ + ": " + std::generic_category().message(errno)};
  if (::flock(lock_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return {};
  ::close(std::exchange(lock_, -1));
  return {Code::unavailable,
          path_ + ": another run is using this folder; wait for it or choose another output"};
}

// Nothing is removed that a run did not write.
Status WorkFolder::check_ours() const {
  static const std::set<std::string> kNames = {"asked",
                                               "asked.partial",
                                               "start",
                                               "start.partial",
                                               "start.sum",
                                               "start.sum.partial",
                                               "start.partial.journal",
                                               "state",
                                               "state.partial",
                                               "result",
                                               "result.partial",
                                               "result.partial.journal",
                                               "result.replaced",
                                               "removed",
                                               "written_start",
                                               "written_start.partial",
                                               "written_start.partial.journal"};
  std::error_code error;
  const bool known = Asked::is_ours(asked());
  for (const auto& entry : std::filesystem::directory_iterator(path_, error)) {
    // It is made first, and removed last.
    if (!known && entry.path() != asked() + ".partial")
      return invalid(path_ + ": holds " + entry.path().filename().string() +
                     ", but no `asked`, as a run of bittern has; remove the folder, or choose "
                     "another output");
    if (!kNames.contains(entry.path().filename().string()))
      return invalid(path_ + ": holds " + entry.path().filename().string() +
                     ", which bittern did not write; choose another output");
  }
  if (error) return {Code::io_error, path_ + ": " + error.message()};
  for (const std::string& model : {start(), result(), written_start()})
    if (std::filesystem::exists(model)) {
      const bool folder = std::filesystem::is_directory(model, error);
      BITTERN_TRY(check_replaceable(model, folder));
    }
  return {};
}

}  // namespace bittern
