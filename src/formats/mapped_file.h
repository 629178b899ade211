// Files: mapped for reading, streamed for writing and visible only when complete.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bittern/status.h"

namespace bittern {

// Identifies the state of a file: it differs for another file, another size, or after a write.
struct FileStamp {
  std::uint64_t device = 0, inode = 0, size = 0;
  std::int64_t seconds = 0, nanoseconds = 0;  // when it was last written to
  // When its contents, name or mode last changed: the only time that no program can set.
  std::int64_t touched_seconds = 0, touched_nanoseconds = 0;
  bool operator==(const FileStamp&) const = default;

  static Result<FileStamp> of(const std::string& path);
  Status check(const std::string& path) const;  // ok when the file there has this stamp
};

// A regular, non-empty file, mapped read-only. The pages are the kernel's: nothing is held in
// anonymous memory, whatever the file's size.
//
// When another process shrinks the file, or the disk fails, reading a page that is gone raises
// SIGBUS. A program that has called guard_mapped_files() (bittern/convert.h) reads zeros instead,
// and unchanged() is an error from then on; so whoever has read bytes asks it before believing what
// came of them (docs/adr/0011).
class MappedFile {
 public:
  static Result<MappedFile> open(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return bytes_; }
  const std::string& path() const { return path_; }
  const FileStamp& stamp() const { return stamp_; }  // when it was opened
  Status unchanged() const;

 private:
  struct Region;  // what the handler of SIGBUS knows of a mapping
  friend struct MappedRegions;
  MappedFile(std::string path, std::span<const std::byte> bytes, const FileStamp& stamp);

  std::string path_;
  std::span<const std::byte> bytes_;
  FileStamp stamp_;
  Region* region_ = nullptr;
};

// An open file that is written anywhere in it, locked against other processes that do the same.
class WritableFile {
 public:
  // Opens the file at `path`, or creates it; its contents are kept unless `empty`. Refuses anything
  // but a regular file, and a file with other names (hard links), which would change too.
  static Result<WritableFile> open(const std::string& path, bool empty);
  WritableFile(WritableFile&& other) noexcept;
  WritableFile& operator=(WritableFile&& other) noexcept;
  ~WritableFile() { close(); }

  const std::string& path() const { return path_; }
  bool is_open() const { return fd_ >= 0; }
  std::uint64_t size() const { return size_; }  // where its contents end
  bool has_name() const;                        // whether `path` is still this file

  // An error if the disk has no room for `bytes` more now. Nothing is reserved.
  Status check_room(std::uint64_t bytes) const;
  Status pwrite(std::uint64_t offset, std::span<const std::byte> bytes);
  // False when the bytes are not there or cannot be read.
  bool pread(std::uint64_t offset, std::span<std::byte> bytes) const;
  Status truncate(std::uint64_t size = 0);
  Status sync();
  void close();

 private:
  WritableFile(std::string path, int fd, std::uint64_t size)
      : path_(std::move(path)), fd_(fd), size_(size) {}

  std::string path_;
  int fd_ = -1;
  std::uint64_t size_ = 0;
  std::uint64_t unsent_ = 0;  // bytes written since the disk was last asked to take them
};

// If this is ok, the name `path` is on the disk (but not necessarily the file's bytes).
Status sync_name(const std::string& path);

// The layout of files to be written: how each begins, and where the bytes of each tensor go.
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
