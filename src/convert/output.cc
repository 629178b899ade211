#include "convert/output.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <new>
#include <system_error>
#include <utility>

namespace bittern {
namespace {

namespace fs = std::filesystem;

bool is_there(const std::string& path) {
  std::error_code error;
  return fs::symlink_status(path, error).type() != fs::file_type::not_found;
}

void remove_all(const std::string& path) {
  std::error_code ignored;
  fs::remove_all(path, ignored);
}

std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string hex(std::uint64_t x) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(x));
  return text;
}

std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

// What --force may replace as a whole: an empty folder or a model's.
Status check_replaceable(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return {};
  bool empty = true;
  for (fs::directory_iterator entry(path, error), end; !error && entry != end;
       entry.increment(error)) {
    empty = false;
    const fs::path name = entry->path().filename();
    if (name == "config.json" || name.extension() == ".safetensors") return {};
  }
  if (empty && !error) return {};
  return invalid(path + ": a folder that holds no model, expected one that may be replaced");
}

Status rename_over(const std::string& from, const std::string& to) {
  std::error_code error;
  // A folder does not replace another: the old one steps aside first.
  const std::string aside = to + ".replaced";
  if (fs::is_directory(to, error)) {
    remove_all(aside);
    fs::rename(to, aside, error);
    if (error) return {Code::io_error, to + ": cannot move it aside: " + error.message()};
  }
  fs::rename(from, to, error);
  if (error) return {Code::io_error, to + ": cannot rename to it: " + error.message()};
  remove_all(aside);
  return sync_name(to);
}

}  // namespace

Status check_output(const std::string& path, bool force, bool resume) {
  if (is_there(path)) {
    if (!force) return invalid(path + ": exists, expected a new name (--force replaces it)");
    BITTERN_TRY(check_replaceable(path));
  }
  if (is_there(path + ".partial") && !resume && !force) {
    return invalid(path +
                   ".partial: left by a run that was stopped, expected none (--resume goes on with "
                   "it, --force starts anew)");
  }
  return {};
}

// True when the partial output may be gone on with.
Result<bool> ModelOutput::read_journal(const std::string& opening) {
  std::ifstream file(journal_.path());
  std::string line;
  if (!std::getline(file, line) || file.eof()) return false;
  const std::size_t boot = opening.rfind(' ');
  if (line.substr(0, boot) != opening.substr(0, boot)) {
    return invalid(partial() +
                   ": begun from another model or with other options, expected the same "
                   "(--force starts anew)");
  }
  if (line != opening) return false;
  journal_end_ = line.size() + 1;
  while (std::getline(file, line) && !file.eof()) {
    std::size_t tensor = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), tensor);
    if (error != std::errc() || end != line.data() + line.size() || tensor >= finished_.size())
      return invalid(journal_.path() + ": not a journal, expected one (--force starts anew)");
    finished_[tensor] = true;
    journal_end_ += line.size() + 1;
  }
  return true;
}

Result<ModelOutput> ModelOutput::create(const std::string& path, OutputLayout layout,
                                        const OutputOptions& options) {
  BITTERN_TRY(check_output(path, options.force, options.resume));
  const std::string partial = path + ".partial";
  const bool left = is_there(partial);
  auto journal = WritableFile::open(partial + ".journal", false);
  if (!journal) return journal.status();
  ModelOutput output(path, std::move(layout), options, std::move(*journal));
  output.keep_ = true;  // what is not ours yet

  const std::string opening = "bittern journal 1 " + hex(options.fingerprint) + " " +
                              read_line("/proc/sys/kernel/random/boot_id");
  bool goes_on = false;
  if (left && options.resume) {
    auto readable = output.read_journal(opening);
    if (!readable) return readable.status();
    goes_on = *readable;
  }
  output.keep_ = false;
  std::error_code error;
  if (!goes_on) {
    std::fill(output.finished_.begin(), output.finished_.end(), false);
    remove_all(partial);
    BITTERN_TRY(output.journal_.truncate());
    BITTERN_TRY(output.journal_.pwrite(0, as_bytes(opening + "\n")));
    output.journal_end_ = opening.size() + 1;
    if (options.folder && !fs::create_directory(partial, error) && error)
      return Status{Code::io_error, partial + ": cannot create: " + error.message()};
  }

  std::uint64_t missing = 0;
  for (const OutputLayout::File& file : output.layout_.files) {
    auto opened =
        WritableFile::open(options.folder ? partial + "/" + file.name : partial, !goes_on);
    if (!opened) return opened.status();
    missing += file.bytes - std::min(file.bytes, opened->size());
    BITTERN_TRY(opened->pwrite(0, as_bytes(file.head)));
    output.files_.push_back(std::move(*opened));
  }
  if (!output.files_.empty()) BITTERN_TRY(output.files_[0].check_room(missing));
  return output;
}

ModelOutput::~ModelOutput() {
  if (keep_ || !journal_.is_open()) return;
  files_.clear();
  remove_all(partial());
  remove_all(journal_.path());
}

std::size_t ModelOutput::finished() const {
  return static_cast<std::size_t>(std::count(finished_.begin(), finished_.end(), true));
}

Status ModelOutput::write(std::size_t tensor, std::uint64_t offset,
                          std::span<const std::byte> bytes) {
  const OutputLayout::Extent& extent = layout_.tensors[tensor];
  if (offset > extent.bytes || bytes.size() > extent.bytes - offset) {
    return {Code::internal, path_ + ": tensor " + std::to_string(tensor) + ": byte " +
                                std::to_string(offset + bytes.size()) + ", expected at most " +
                                std::to_string(extent.bytes)};
  }
  return files_[extent.file].pwrite(extent.begin + offset, bytes);
}

Status ModelOutput::finish(std::size_t tensor) {
  const std::string line = std::to_string(tensor) + "\n";
  BITTERN_TRY(journal_.pwrite(journal_end_, as_bytes(line)));
  journal_end_ += line.size();
  finished_[tensor] = true;
  return {};
}

Status ModelOutput::add_file(const std::string& name, std::string_view text) {
  auto file = WritableFile::open(partial() + "/" + name, true);
  if (!file) return file.status();
  BITTERN_TRY(file->pwrite(0, as_bytes(text)));
  return file->sync();
}

Status ModelOutput::commit() {
  static constexpr std::byte kZero{};
  for (std::size_t i = 0; i < files_.size(); ++i) {
    // Padding at the end of a file is written by nobody else.
    if (files_[i].size() < layout_.files[i].bytes)
      BITTERN_TRY(files_[i].pwrite(layout_.files[i].bytes - 1, std::span(&kZero, 1)));
    BITTERN_TRY(files_[i].sync());
  }
  if (options_.folder) BITTERN_TRY(sync_name(partial() + "/"));
  if (!options_.force && is_there(path_))
    return invalid(path_ + ": exists by now, expected a new name (--force replaces it)");
  BITTERN_TRY(rename_over(partial(), path_));
  remove_all(journal_.path());
  journal_.close();
  return {};
}

}  // namespace bittern
