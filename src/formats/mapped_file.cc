#include "formats/mapped_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <limits>
#include <system_error>
#include <utility>

namespace bittern {
namespace {

// Linux writes at most this much in one call anyway.
constexpr std::size_t kMostAtOnce = std::size_t{1} << 30;
constexpr std::uint64_t kSendBytes = std::uint64_t{8} << 20;

Status failed(const std::string& path, const std::string& what, int error) {
  if (error == ENOENT) return unavailable(path + ": no such file or folder");
  if (error == ENOSPC || error == EDQUOT)
    return {Code::io_error, path + ": disk full, expected room for it"};
  const Code code = error == ENOMEM ? Code::out_of_memory : Code::io_error;
  return {code, path + ": " + what + ": " + std::generic_category().message(error)};
}

bool is_there(const std::string& path) {
  struct stat info;
  return ::lstat(path.c_str(), &info) == 0;
}

Status exists(const std::string& path) {
  return invalid(path + ": exists, expected a new file (or force)");
}

}  // namespace

// ---- MappedFile ----

MappedFile::MappedFile(std::string path, std::span<const std::byte> bytes)
    : path_(std::move(path)), bytes_(bytes) {}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

Result<MappedFile> MappedFile::open(const std::string& path) {
  // Without O_NONBLOCK a pipe would be waited for.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return failed(path, "cannot open", errno);
  struct stat info;
  Status status;
  void* data = MAP_FAILED;
  std::size_t size = 0;
  if (::fstat(fd, &info) != 0) {
    status = failed(path, "cannot read its size", errno);
  } else if (S_ISDIR(info.st_mode)) {
    status = invalid(path + ": a folder, expected a file");
  } else if (!S_ISREG(info.st_mode)) {
    status = invalid(path + ": a device, pipe or socket, expected a file");
  } else if (info.st_size <= 0) {
    status = invalid(path + ": empty, expected at least one byte");
  } else {
    size = static_cast<std::size_t>(info.st_size);
    data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) status = failed(path, "cannot map", errno);
  }
  ::close(fd);
  if (!status.ok()) return status;
  return MappedFile(path, {static_cast<const std::byte*>(data), size});
}

// ---- WritableFile ----

WritableFile::WritableFile(WritableFile&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), size_(other.size_) {}

WritableFile& WritableFile::operator=(WritableFile&& other) noexcept {
  if (this != &other) {
    close();
    path_ = std::move(other.path_);
    fd_ = std::exchange(other.fd_, -1);
    size_ = other.size_;
  }
  return *this;
}

void WritableFile::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Result<WritableFile> WritableFile::open(const std::string& path, bool empty) {
  // The file is emptied only under the lock, and only when the name is still its own: its writer
  // may have renamed it since the open.
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (fd < 0) return failed(path, "cannot create", errno);
  const auto refuse = [&](Status status) {
    ::close(fd);
    return status;
  };
  const auto in_work = [&] {
    return refuse(unavailable(path + ": being written by another process, expected none"));
  };
  // A file system without locks is trusted.
  if (::flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return in_work();
  struct stat info, named;
  if (::fstat(fd, &info) != 0 || ::lstat(path.c_str(), &named) != 0 ||
      info.st_dev != named.st_dev || info.st_ino != named.st_ino) {
    return in_work();
  }
  if (!S_ISREG(info.st_mode)) return refuse(invalid(path + ": expected a file"));
  WritableFile file(path, fd, static_cast<std::uint64_t>(info.st_size));
  if (empty) BITTERN_TRY(file.truncate());
  return file;
}

Status WritableFile::check_room(std::uint64_t bytes) const {
  struct statvfs disk;
  // A file system that does not count its blocks is asked no questions.
  if (::fstatvfs(fd_, &disk) != 0 || disk.f_blocks == 0) return {};
  const std::uint64_t block = disk.f_frsize;
  if (disk.f_bavail >= bytes / block + (bytes % block != 0)) return {};
  return {Code::io_error, path_ + ": disk has room for " + std::to_string(disk.f_bavail * block) +
                              " bytes, expected " + std::to_string(bytes)};
}

Status WritableFile::pwrite(std::uint64_t offset, std::span<const std::byte> bytes) {
  constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
  if (offset > kMost || bytes.size() > kMost - offset)
    return invalid(path_ + ": offset " + std::to_string(offset) + ", expected less than 2^63");
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(fd_, bytes.data(), std::min(bytes.size(), kMostAtOnce),
                                     static_cast<off_t>(offset));
    if (written < 0) {
      if (errno == EINTR) continue;
      if (errno == ENOSPC || errno == EDQUOT) {
        return {Code::io_error, path_ + ": disk full at byte " + std::to_string(offset) +
                                    ", expected room for " + std::to_string(bytes.size()) +
                                    " more"};
      }
      return failed(path_, "cannot write", errno);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
    size_ = std::max(size_, offset);
    unsent_ += static_cast<std::uint64_t>(written);
  }
  // The disk works while more is being made, so that sync finds little to wait for.
  if (unsent_ >= kSendBytes) {
    (void)::sync_file_range(fd_, 0, 0, SYNC_FILE_RANGE_WRITE);
    unsent_ = 0;
  }
  return {};
}

Status WritableFile::truncate() {
  if (::ftruncate(fd_, 0) != 0) return failed(path_, "cannot empty", errno);
  size_ = 0;
  return {};
}

Status WritableFile::sync() {
  if (::fsync(fd_) != 0) return failed(path_, "cannot sync", errno);
  return {};
}

Status sync_name(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return failed(folder, "cannot open", errno);
  // Some network file systems have no fsync for folders.
  const int error = ::fsync(fd) == 0 || errno == EINVAL ? 0 : errno;
  ::close(fd);
  if (error == 0) return {};
  return failed(folder, "cannot sync", error);
}

// ---- PartialFile ----

PartialFile& PartialFile::operator=(PartialFile&& other) noexcept {
  if (this != &other) {
    discard();
    path_ = std::move(other.path_);
    force_ = other.force_;
    file_ = std::move(other.file_);
  }
  return *this;
}

void PartialFile::discard() {
  if (!file_.is_open()) return;
  ::unlink(file_.path().c_str());
  file_.close();
}

Result<PartialFile> PartialFile::create(const std::string& path, bool force) {
  struct stat info;
  if (::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode))
    return invalid(path + ": a folder, expected a file");
  if (!force && is_there(path)) return exists(path);
  auto file = WritableFile::open(path + ".partial", true);
  if (!file) return file.status();
  return PartialFile(path, force, std::move(*file));
}

Status PartialFile::pwrite(std::uint64_t offset, std::span<const std::byte> bytes) {
  if (!file_.is_open()) return invalid(path_ + ": written after commit, expected before");
  return file_.pwrite(offset, bytes);
}

Status PartialFile::commit() {
  if (!file_.is_open()) return invalid(path_ + ": committed twice, expected once");
  // Delayed allocation may find the disk full only now.
  BITTERN_TRY(file_.sync());
  if (!force_ && is_there(path_)) return exists(path_);
  if (std::rename(file_.path().c_str(), path_.c_str()) != 0)
    return failed(path_, "cannot rename to it", errno);
  file_.close();
  return sync_name(path_);
}

}  // namespace bittern
