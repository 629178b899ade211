// A file of a teacher's targets: safetensors with these tensors, a row for each position scored,
//
//   ids    I32 [positions, top]   the likeliest tokens, the likeliest first
//   log_p  F32 [positions, top]   their log probabilities
//   tail   F32 [positions]        the probability of all other tokens together
//   right  F32 [positions]        the log probability of the token that came
//
// and metadata that say what they were made of. `checksum` is that of all bytes after the header.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bittern/eval.h"
#include "formats/mapped_file.h"
#include "formats/safetensors.h"

namespace bittern {

// What the targets depend on.
struct TargetsKey {
  std::string dialect;
  std::int64_t context = 0, pieces = 0, first = -1;
  std::int64_t positions = 0, top = 0, vocab = 0;
  std::string tokens{};   // a fingerprint of them
  std::string teacher{};  // TargetOptions::teacher

  static TargetsKey of(std::span<const std::int32_t> tokens, const EvalOptions& options,
                       std::int64_t pieces);
};

class TargetsWriter {
 public:
  static Result<TargetsWriter> make(const std::string& path, const TargetsKey& key, bool replace);
  TargetsWriter(TargetsWriter&& other) noexcept = default;
  TargetsWriter& operator=(TargetsWriter&&) = delete;
  ~TargetsWriter();  // removes what is partial

  Status add(std::span<const std::int32_t> ids, std::span<const float> log_p,
             std::span<const float> tail, std::span<const float> right);
  // All positions are there: the file gets its name.
  Status finish();

 private:
  TargetsWriter(std::string path, TargetsKey key, bool replace, WritableFile file)
      : path_(std::move(path)), key_(std::move(key)), replace_(replace), file_(std::move(file)) {}
  Status write_head(std::uint64_t checksum);

  std::string path_;
  TargetsKey key_;
  bool replace_;
  WritableFile file_;
  OutputLayout layout_;
  std::int64_t done_ = 0;  // positions
};

class TargetsFile {
 public:
  static Result<TargetsFile> open(const std::string& path);
  // Whether a file may be replaced by new targets: it is one of ours, whole or not.
  static Status check_ours(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const TargetsKey& key() const { return key_; }
  Status unchanged() const { return file_.unchanged(); }
  // ok if the key is of these; vocab and teacher are not compared.
  Status check(const TargetsKey& wanted) const;

  std::span<const std::int32_t> ids(std::int64_t position) const { return row(ids_, position); }
  std::span<const float> log_p(std::int64_t position) const { return row(log_p_, position); }
  float tail(std::int64_t position) const { return tail_[static_cast<std::size_t>(position)]; }
  float right(std::int64_t position) const { return right_[static_cast<std::size_t>(position)]; }

 private:
  TargetsFile(SafetensorsFile file, TargetsKey key)
      : file_(std::move(file)), key_(std::move(key)) {}
  template <class T>
  std::span<const T> row(std::span<const T> all, std::int64_t position) const {
    const auto top = static_cast<std::size_t>(key_.top);
    return all.subspan(static_cast<std::size_t>(position) * top, top);
  }
  Status check_values() const;

  SafetensorsFile file_;
  TargetsKey key_;
  std::span<const std::int32_t> ids_;
  std::span<const float> log_p_, tail_, right_;
};

}  // namespace bittern
