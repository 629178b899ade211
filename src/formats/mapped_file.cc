#include "formats/mapped_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <limits>
#include <mutex>
#include <new>
#include <system_error>
#include <utility>

#include "bittern/convert.h"

namespace bittern {
namespace {

// Linux writes at most this much in one call anyway.
constexpr std::size_t kMostAtOnce = std::size_t{1} << 30;
constexpr std::uint64_t kSendBytes = std::uint64_t{8} << 20;

Status failed(const std::string& path, const std::string& what, int error) {
  if (error == ENOENT) return unavailable(path + ": no such file or folder");
  if (error == ENOSPC || error == EDQUOT)
    return {Code::io_error, path + ": no space left on the disk"};
  const Code code = error == ENOMEM ? Code::out_of_memory : Code::io_error;
  return {code, path + ": " + what + ": " + std::generic_category().message(error)};
}

// What is to be read and cannot be.
Status unreadable(const std::string& path, const std::string& what, int error) {
  const Status status = failed(path, what, error);
  if (status.code() != Code::io_error) return status;
  return unavailable(std::string(status.message()));
}

}  // namespace

// ---- FileStamp ----

namespace {

FileStamp stamp_of(const struct stat& info) {
  return {.device = info.st_dev,
          .inode = info.st_ino,
          .size = static_cast<std::uint64_t>(info.st_size),
          .seconds = info.st_mtim.tv_sec,
          .nanoseconds = info.st_mtim.tv_nsec,
          .touched_seconds = info.st_ctim.tv_sec,
          .touched_nanoseconds = info.st_ctim.tv_nsec};
}

Status changed(const std::string& path, const std::string& how) {
  return unavailable(path + ": " + how +
                     " while bittern was reading it; it must not change during a run");
}

}  // namespace

Result<FileStamp> FileStamp::of(const std::string& path) {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) return unreadable(path, "cannot read its time", errno);
  return stamp_of(info);
}

Status FileStamp::check(const std::string& path) const {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) return changed(path, "was removed");
  const FileStamp now = stamp_of(info);
  if (now == *this) return {};
  if (now.inode != inode || now.device != device) return changed(path, "was replaced");
  if (now.size == size) {
    const bool written = now.seconds != seconds || now.nanoseconds != nanoseconds;
    return changed(path, written ? "was written to" : "was written to, linked or given a new mode");
  }
  return changed(path, (now.size < size ? "shrank from " : "grew from ") + std::to_string(size) +
                           " to " + std::to_string(now.size) + " bytes");
}

// ---- MappedFile ----

// Regions are in a list that only grows, so that a signal handler may read it at any time. Regions
// of closed files are used again.
struct MappedFile::Region {
  std::atomic<std::uintptr_t> begin = 0, end = 0;  // whole pages; empty: of no file
  std::atomic<bool> lost = false;                  // zeros were read in place of the file
  Region* next = nullptr;
  Region* next_free = nullptr;
};

struct MappedRegions {
  using Region = MappedFile::Region;
  static inline std::atomic<Region*> all = nullptr;
  static inline Region* unused = nullptr;
  static inline std::mutex mutex;  // of everything but walking the list
  static inline struct sigaction before;
  static inline const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));

  static Region* add(std::span<const std::byte> bytes) {
    const std::lock_guard lock(mutex);
    Region* region = unused;
    if (region != nullptr) {
      unused = region->next_free;
    } else {
      region = new (std::nothrow) Region;
      if (region == nullptr) return nullptr;  // not guarded
      region->next = all;
      all = region;
    }
    const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data());
    region->lost = false;
    region->end = (begin + bytes.size() + page - 1) / page * page;
    region->begin = begin;
    return region;
  }
  static void remove(Region* region) {
    if (region == nullptr) return;
    const std::lock_guard lock(mutex);
    region->begin = region->end = 0;
    region->next_free = unused;
    unused = region;
  }

  // Zeros for the rest of the mapping: everything past the end of a file that shrank is gone.
  static bool replace(std::uintptr_t address) {
    for (Region* region = all; region != nullptr; region = region->next) {
      const std::uintptr_t end = region->end;
      if (address < region->begin || address >= end) continue;
      const std::uintptr_t from = address / page * page;
      region->lost = true;
      return ::mmap(reinterpret_cast<void*>(from), end - from, PROT_READ,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED;
    }
    return false;
  }
  static void on_signal(int signal, siginfo_t* info, void* context) {
    const int kept = errno;
    if (info->si_code > 0 && replace(reinterpret_cast<std::uintptr_t>(info->si_addr))) {
      errno = kept;
      return;
    }
    if ((before.sa_flags & SA_SIGINFO) != 0) return before.sa_sigaction(signal, info, context);
    if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
      return before.sa_handler(signal);
    // What the kernel does by default; a fault comes again when the handler returns.
    struct sigaction plain = {};
    plain.sa_handler = SIG_DFL;
    ::sigaction(signal, &plain, nullptr);
    if (info->si_code <= 0) (void)::raise(signal);
  }
};

void guard_mapped_files() noexcept {
  static const bool installed = [] {
    struct sigaction ours = {};
    ours.sa_sigaction = MappedRegions::on_signal;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigemptyset(&ours.sa_mask);
    return ::sigaction(SIGBUS, &ours, &MappedRegions::before) == 0;
  }();
  (void)installed;
}

MappedFile::MappedFile(std::string path, std::span<const std::byte> bytes, const FileStamp& stamp)
    : path_(std::move(path)), bytes_(bytes), stamp_(stamp), region_(MappedRegions::add(bytes)) {}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      bytes_(std::exchange(other.bytes_, {})),
      stamp_(other.stamp_),
      region_(std::exchange(other.region_, nullptr)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(bytes_, other.bytes_);
  std::swap(stamp_, other.stamp_);
  std::swap(region_, other.region_);
  return *this;
}

MappedFile::~MappedFile() {
  if (bytes_.empty()) return;
  MappedRegions::remove(region_);
  ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

Status MappedFile::unchanged() const {
  BITTERN_TRY(stamp_.check(path_));
  if (region_ != nullptr && region_->lost) return changed(path_, "shrank or could not be read");
  return {};
}

namespace {
struct Closing {
  int fd;
  ~Closing() { ::close(fd); }
};
}  // namespace

Result<MappedFile> MappedFile::open(const std::string& path) {
  std::string own = path;  // nothing fails once it is mapped
  // Without O_NONBLOCK a pipe would be waited for.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return unreadable(path, "cannot open", errno);
  const Closing closing{fd};
  struct stat info;
  if (::fstat(fd, &info) != 0) return unreadable(path, "cannot read its size", errno);
  if (S_ISDIR(info.st_mode)) return invalid(path + ": a folder, expected a file");
  if (!S_ISREG(info.st_mode)) return invalid(path + ": a device, pipe or socket, expected a file");
  if (info.st_size <= 0) return invalid(path + ": empty, expected at least one byte");
  const auto size = static_cast<std::size_t>(info.st_size);
  const void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  if (data == MAP_FAILED) return unreadable(path, "cannot map", errno);
  return MappedFile(std::move(own), {static_cast<const std::byte*>(data), size}, stamp_of(info));
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
  // The file is emptied only under the lock, and only if the name still belongs to it: its writer
  // may have renamed it since it was opened.
  struct stat info;
  if (::lstat(path.c_str(), &info) == 0) {
    // The mere opening of a device or a pipe may have effects.
    if (S_ISLNK(info.st_mode)) return invalid(path + ": a symbolic link, expected a file");
    if (!S_ISREG(info.st_mode))
      return invalid(path + (S_ISDIR(info.st_mode) ? ": a folder" : ": a device, pipe or socket") +
                     ", expected a file");
  }
  std::string own = path;
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
  if (fd < 0) return failed(path, "cannot create", errno);
  WritableFile file(std::move(own), fd, 0);
  // A file system without locks is trusted.
  const bool locked = ::flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  if (locked || !file.has_name() || ::fstat(fd, &info) != 0)
    return unavailable(path + ": being written by another process, expected none");
  if (!S_ISREG(info.st_mode)) return invalid(path + ": expected a file");
  if (info.st_nlink > 1)
    return invalid(path + ": a file with " + std::to_string(info.st_nlink) +
                   " names (hard links), expected one");
  file.size_ = static_cast<std::uint64_t>(info.st_size);
  if (empty) BITTERN_TRY(file.truncate());
  return file;
}

bool WritableFile::has_name() const {
  struct stat info, named;
  return ::fstat(fd_, &info) == 0 && ::lstat(path_.c_str(), &named) == 0 &&
         info.st_dev == named.st_dev && info.st_ino == named.st_ino;
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

bool WritableFile::pread(std::uint64_t offset, std::span<std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t n =
        ::pread(fd_, bytes.data(), std::min(bytes.size(), kMostAtOnce), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += static_cast<std::uint64_t>(n);
  }
  return true;
}

Status WritableFile::truncate(std::uint64_t size) {
  if (::ftruncate(fd_, static_cast<off_t>(size)) != 0) return failed(path_, "cannot cut", errno);
  size_ = size;
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

}  // namespace bittern
