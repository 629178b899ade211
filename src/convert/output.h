// A model being written. It grows as OUT.partial, a file or a folder, beside OUT.partial.journal,
// which tells what it is made from and which tensors are whole; OUT appears by rename, when all
// are. A run that was killed leaves both, and one that resumes makes the tensors that are missing.
//
//   journal:  "bittern journal 1 FINGERPRINT BOOT\n", then "INDEX\n" for each whole tensor
//
// Written bytes outlive a killed process but not a machine that lost its power, so a journal of
// an earlier boot is not believed.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/status.h"
#include "formats/mapped_file.h"

namespace bittern {

// Refuses OUT that exists (unless force) and OUT.partial (unless resume or force).
Status check_output(const std::string& path, bool force, bool resume);

struct OutputOptions {
  bool folder = false;  // OUT is a folder of the layout's files; otherwise it is its one file
  bool force = false;   // OUT may be there, and is replaced when the new one is whole
  bool resume = false;  // OUT.partial may be there
  std::uint64_t fingerprint = 0;  // of everything the output depends on
};

class ModelOutput {
 public:
  // Refuses, before anything is made, what check_output does, a partial of another fingerprint
  // (unless force) and a disk without room.
  static Result<ModelOutput> create(const std::string& path, OutputLayout layout,
                                    const OutputOptions& options);
  ModelOutput(ModelOutput&&) noexcept = default;
  ModelOutput& operator=(ModelOutput&&) noexcept = delete;
  ~ModelOutput();  // removes what is partial, unless kept or committed

  std::size_t finished() const;  // tensors
  bool finished(std::size_t tensor) const { return finished_[tensor]; }
  // Bytes `offset`.. of the tensor.
  Status write(std::size_t tensor, std::uint64_t offset, std::span<const std::byte> bytes);
  Status finish(std::size_t tensor);
  // A file of the folder beside those of the layout.
  Status add_file(const std::string& name, std::string_view text);
  Status commit();
  void keep() { keep_ = true; }  // the partial, for --resume

 private:
  ModelOutput(std::string path, OutputLayout layout, const OutputOptions& options,
              WritableFile journal)
      : path_(std::move(path)),
        layout_(std::move(layout)),
        options_(options),
        journal_(std::move(journal)),
        finished_(layout_.tensors.size()) {}
  std::string partial() const { return path_ + ".partial"; }
  Result<bool> read_journal(const std::string& opening);

  std::string path_;
  OutputLayout layout_;
  OutputOptions options_;
  WritableFile journal_;           // its lock is the output's
  std::uint64_t journal_end_ = 0;  // of its last whole line
  std::vector<WritableFile> files_;
  std::vector<bool> finished_;
  bool keep_ = false;
};

}  // namespace bittern
