// Files in and out: mapped for reading, streamed for writing and visible only when whole.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bittern/status.h"

namespace bittern {

// A regular, non-empty file, mapped read-only. The pages are the kernel's: nothing is held in
// anonymous memory, whatever the file's size. Who shrinks the file meanwhile gets SIGBUS.
class MappedFile {
 public:
  static Result<MappedFile> open(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return bytes_; }
  const std::string& path() const { return path_; }

 private:
  MappedFile(std::string path, std::span<const std::byte> bytes);

  std::string path_;
  std::span<const std::byte> bytes_;
};

// A file that is written as PATH.partial and becomes PATH in commit(); without commit() nothing
// stays. A lock on PATH.partial tells a stale one, which is overwritten, from one in work.
class PartialFile {
 public:
  // Refuses a PATH that exists, unless `force`: then commit() replaces it.
  static Result<PartialFile> create(const std::string& path, bool force = false);
  PartialFile(PartialFile&& other) noexcept;
  PartialFile& operator=(PartialFile&& other) noexcept;
  ~PartialFile();

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }  // the end of what was written

  // An error when the disk has no room for `bytes` now; it reserves nothing.
  Status check_room(std::uint64_t bytes) const;
  // At the end of the file, and anywhere.
  Status write(std::span<const std::byte> bytes);
  Status pwrite(std::uint64_t offset, std::span<const std::byte> bytes);
  // Everything is on the disk under its final name when this is ok.
  Status commit();

 private:
  PartialFile(std::string path, bool force, int fd);
  void discard();
  std::string partial() const { return path_ + ".partial"; }

  std::string path_;
  bool force_ = false;
  int fd_ = -1;
  std::uint64_t size_ = 0;
};

// Files before they are written: how each begins, and where the bytes of each tensor go.
struct OutputLayout {
  struct File {
    std::string name{}, head{};
    std::uint64_t bytes = 0;  // of the whole file
  };
  struct Extent {
    std::uint32_t file = 0;
    std::uint64_t begin = 0, bytes = 0;
  };
  std::vector<File> files;
  std::vector<Extent> tensors;  // in the order they were given
};

}  // namespace bittern
