// A model being written. It is written as OUT.partial, a file or a folder, with OUT.partial.journal
// beside it (convert/journal.h), which is locked while a run is alive. When complete, it is renamed
// to OUT. A run that was killed leaves both behind. A run that resumes reads again the bytes that
// the journal lists, and makes every tensor again that is incomplete or changed.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bittern/convert.h"
#include "bittern/status.h"
#include "convert/journal.h"
#include "formats/mapped_file.h"

namespace bittern {

struct OutputOptions {
  bool folder = false;  // OUT is a folder of the layout's files; otherwise it is its one file
  // OUT is a set of files beside each other with the layout's names. They are made in the folder
  // OUT.partial and moved when all are whole, the first one last.
  bool parts = false;
  bool force = false;             // OUT may be there, and is replaced when the new one is whole
  bool resume = false;            // OUT.partial may be there
  std::uint64_t fingerprint = 0;  // of everything the output depends on
  // The stamp of the source's files. If it differs, their bytes may differ too, even with the same
  // fingerprint and times. Then every tensor is made again.
  std::uint64_t stamp = 0;
  std::vector<std::string> texts{};  // names of the files that add_file will be given
  ModelProgressFunction progress{};  // "checking", in bytes: what an earlier run wrote

  bool many() const { return folder || parts; }  // OUT.partial is a folder
};

// OUT without slashes at its end, which only a folder's name may have.
Result<std::string> output_path(const std::string& path, bool folder);

// Everything that can be refused before the work begins: OUT that exists (unless force) or is not
// what bittern would write there, a run that is writing it now, OUT.partial (unless resume or
// force), things of other origin at the names this one needs, a parent folder that is not there.
Status check_output(const std::string& path, const OutputOptions& options);

// Renames a whole model to `path`. One that is there is replaced with force, if bittern wrote it.
Status move_output(const std::string& from, const std::string& path, const OutputOptions& options);

// Where a part of OUT is when all is done: beside OUT.
std::string part_path(const std::string& out, const std::string& part);
// The same question for one part of OUT.
Status check_part(const std::string& path, bool force);

class ModelOutput {
 public:
  // Refuses, before anything is made, what check_output does, a partial of another fingerprint
  // (unless force) and a disk without room.
  static Result<ModelOutput> create(const std::string& path, OutputLayout layout,
                                    const OutputOptions& options);
  ModelOutput(ModelOutput&&) noexcept = default;
  ModelOutput& operator=(ModelOutput&&) noexcept = delete;
  ~ModelOutput();  // removes what is partial, unless kept or committed

  // Whether an earlier run made these tensors, and their bytes are still what it wrote.
  bool finished(std::size_t first, std::size_t count = 1) const;
  // Bytes `offset`.. of the tensor, and Checksum::of them.
  Status write(std::size_t tensor, std::uint64_t offset, std::span<const std::byte> bytes,
               std::uint64_t sum);
  // A file of the folder beside those of the layout.
  Status add_file(const std::string& name, std::string_view text);
  // When it fails, the partial is kept: all of it is there.
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
  std::vector<std::string> names() const;  // of all files of a folder
  Status check_partial(const Journal& journal) const;
  Result<bool> begins_alike(const std::string& path, const std::string& head) const;
  Status open_files(bool anew);
  Result<std::vector<Journal::Piece>> verified(const Journal& journal);
  Status fill_gaps();
  Status check_names() const;
  void remove_journal();
  Status check_parts(bool goes_on) const;
  Status take_parts_back() const;
  Status move_parts() const;

  std::string path_;
  OutputLayout layout_;
  OutputOptions options_;
  WritableFile journal_;  // its lock is the output's
  std::uint64_t journal_end_ = 0;
  std::vector<WritableFile> files_;
  std::vector<bool> finished_;
  bool keep_ = false;
};

}  // namespace bittern
