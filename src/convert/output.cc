#include "convert/output.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <system_error>

#include "bittern/device.h"
#include "convert/for_runs.h"
#include "convert/progress.h"
#include "convert/replace.h"
#include "core/guarded.h"
#include "formats/fingerprint.h"

namespace bittern {
namespace {

// More is no journal.
constexpr std::uint64_t kMostJournalBytes = std::uint64_t{1} << 30;
// Where a journal of ours has a line that is whole, or has none.
constexpr std::size_t kJournalStart = std::size_t{64} << 10;
// A multiple of Checksum::kBlock.
constexpr std::size_t kReadAtOnce = std::size_t{1} << 20;

std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

std::string journal_of(const std::string& path) { return path + ".partial.journal"; }
std::string aside_of(const std::string& path) { return path + ".replaced"; }

Status os_error(const std::string& what, int error) {
  return {Code::io_error, what + ": " + std::generic_category().message(error)};
}

Status in_work(const std::string& path) {
  return unavailable(path + ": another run is writing it (" + path + ".partial.journal is locked)");
}

// Whether the process that made the journal holds it still.
bool is_locked(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return false;
  const bool locked = ::flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  ::close(fd);
  return locked;
}

Result<Journal> load_journal(const WritableFile& file) {
  if (file.size() > kMostJournalBytes) return Journal{};
  try {
    std::string text(file.size(), '\0');
    if (!file.pread(0, std::as_writable_bytes(std::span(text))))
      return Status{Code::io_error, file.path() + ": cannot read"};
    return read_journal(text);
  } catch (...) {
    return caught(file.path());
  }
}

Status check_parent(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  const std::string folder = slash == path.npos ? "." : path.substr(0, slash + 1);
  struct stat info;
  if (::stat(folder.c_str(), &info) != 0) {
    return unavailable(path + ": the folder " + folder +
                       " cannot be used: " + std::generic_category().message(errno));
  }
  if (!S_ISDIR(info.st_mode)) return invalid(path + ": " + folder + " is not a folder");
  if (::access(folder.c_str(), W_OK | X_OK) == 0) return {};
  return unavailable(path + ": cannot write into " + folder + ": " +
                     std::generic_category().message(errno));
}

Status not_ours(const std::string& path) {
  return invalid(path + ": not written by bittern, which needs this name; move it elsewhere");
}

// What cannot be read is found out when it is to be written.
bool is_journal(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(kJournalStart, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  return file.bad() || read_journal(text).ours;
}

Status rename_over(const std::string& from, const std::string& to, bool folder) {
  const auto there = thing_at(to);
  if (!there) return there.status();
  if (*there == Thing::nothing) return rename_new(from, to);
  BITTERN_TRY(check_replaceable(to, folder));
  if (!folder) {
    if (std::rename(from.c_str(), to.c_str()) == 0) return {};
    return os_error(to + ": cannot rename to it", errno);
  }
  // A folder does not replace another: the old one steps aside first.
  const std::string aside = aside_of(to);
  BITTERN_TRY(rename_new(to, aside));
  if (Status status = rename_new(from, to); !status.ok()) {
    (void)rename_new(aside, to);
    return status;
  }
  remove_known(aside, listed_files(aside));
  return {};
}

}  // namespace

Result<std::string> output_path(const std::string& path, bool folder) {
  std::string name = path;
  while (name.size() > 1 && name.back() == '/') name.pop_back();
  if (name != path && !folder)
    return invalid(path + ": ends in '/' like a folder, and the output is a file; expected a name");
  const std::string last = name.substr(name.rfind('/') + 1);
  if (last.empty() || last == "." || last == "..")
    return invalid((path.empty() ? "the output" : path) + ": expected the name of a " +
                   (folder ? "folder" : "file"));
  return name;
}

Status check_output(const std::string& given, const OutputOptions& options) {
  const auto checked = output_path(given, options.folder);
  if (!checked) return checked.status();
  const std::string &path = *checked, partial = path + ".partial";
  BITTERN_TRY(check_parent(path));
  const auto there = thing_at(path), left = thing_at(partial), journal = thing_at(journal_of(path)),
             aside = thing_at(aside_of(path));
  for (const auto* thing : {&there, &left, &journal, &aside})
    if (!*thing) return thing->status();
  if (*there != Thing::nothing && !options.parts) {
    if (*there == (options.folder ? Thing::folder : Thing::file) && !options.force)
      return invalid(path + ": exists, expected a new name (@{force} replaces it)");
    BITTERN_TRY(check_replaceable(path, options.folder));
    if (*there == Thing::folder && *aside != Thing::nothing) {
      return invalid(aside_of(path) + ": exists, and " + path +
                     " would be set aside under this name; move it elsewhere");
    }
  }
  if (*journal != Thing::nothing) {
    if (*journal != Thing::file) return not_ours(journal_of(path));
    if (is_locked(journal_of(path))) return in_work(path);
    if (!is_journal(journal_of(path))) return not_ours(journal_of(path));
  }
  if (*left == Thing::link || *left == Thing::special) return not_ours(partial);
  if (*left != Thing::nothing && !options.resume && !options.force) {
    return invalid(partial +
                   ": left by a run that was stopped, expected none (@{resume} goes on with "
                   "it, @{force} starts anew)");
  }
  return {};
}

Status move_output(const std::string& from, const std::string& path, const OutputOptions& options) {
  const auto there = thing_at(path);
  if (!there) return there.status();
  if (!options.force && *there != Thing::nothing)
    return invalid(path +
                   ": was created in the meantime, expected a new name (@{force} replaces it)");
  return rename_over(from, path, options.folder);
}

std::string part_path(const std::string& out, const std::string& part) {
  return out.substr(0, out.rfind('/') + 1) + part;
}

Status check_part(const std::string& path, bool force) {
  const auto there = thing_at(path);
  if (!there) return there.status();
  if (*there == Thing::file && !force)
    return invalid(path + ": exists, expected a new name (@{force} replaces it)");
  return check_replaceable(path, false);
}

std::vector<std::string> ModelOutput::names() const {
  std::vector<std::string> names;
  if (!options_.many()) return names;
  for (const OutputLayout::File& file : layout_.files) names.push_back(file.name);
  names.insert(names.end(), options_.texts.begin(), options_.texts.end());
  return names;
}

// Whether a file is empty or begins as this output's does, as far as it goes.
Result<bool> ModelOutput::begins_alike(const std::string& path, const std::string& head) const {
  const auto thing = thing_at(path);
  if (!thing) return thing.status();
  if (*thing != Thing::file) return *thing == Thing::nothing;
  const auto file = WritableFile::open(path, false);
  if (!file) return file.status();
  std::string text(std::min<std::uint64_t>(file->size(), head.size()), '\0');
  return file->pread(0, std::as_writable_bytes(std::span(text))) && head.starts_with(text);
}

// ok if bittern wrote what is there: the journal beside it says so or, without a journal, it begins
// byte for byte like this output.
Status ModelOutput::check_partial(const Journal& journal) const {
  const auto thing = thing_at(partial());
  if (!thing) return thing.status();
  if (*thing == Thing::nothing) return {};
  std::vector<std::string> known = names();
  known.insert(known.end(), journal.files.begin(), journal.files.end());
  if (*thing == Thing::folder) BITTERN_TRY(check_only(partial(), known));
  if (journal_end_ > 0) return {};
  bool alike = options_.many() == (*thing == Thing::folder);
  for (const OutputLayout::File& file : layout_.files) {
    if (!alike) break;
    const auto begins =
        begins_alike(options_.many() ? partial() + "/" + file.name : partial(), file.head);
    if (!begins) return begins.status();
    alike = *begins;
  }
  // Texts are written last; none is there without the layout's files.
  if (alike && options_.many()) {
    const auto found = thing_at(partial() + "/" + layout_.files[0].name);
    alike = (found && *found == Thing::file) || check_only(partial(), {}).ok();
  }
  if (alike) return {};
  return invalid(partial() +
                 ": no journal of bittern beside it, so it may be anything; move it "
                 "elsewhere");
}

Status ModelOutput::open_files(bool anew) {
  std::uint64_t missing = 0;
  for (const OutputLayout::File& file : layout_.files) {
    auto opened =
        WritableFile::open(options_.many() ? partial() + "/" + file.name : partial(), anew);
    if (!opened) return opened.status();
    if (opened->size() > file.bytes) BITTERN_TRY(opened->truncate(file.bytes));
    missing += file.bytes - opened->size();
    BITTERN_TRY(opened->pwrite(0, as_bytes(file.head)));
    files_.push_back(std::move(*opened));
  }
  return files_.empty() ? Status() : files_[0].check_room(missing);
}

// The journal's pieces whose bytes have their sums; marks the tensors they cover.
Result<std::vector<Journal::Piece>> ModelOutput::verified(const Journal& journal) {
  std::vector<Journal::Piece> pieces;
  for (const Journal::Piece& piece : journal.pieces) {
    if (piece.tensor >= layout_.tensors.size()) continue;
    const std::uint64_t all = layout_.tensors[piece.tensor].bytes;
    if (piece.offset <= all && piece.bytes <= all - piece.offset) pieces.push_back(piece);
  }
  ModelProgress state{.doing = "checking"};
  for (const Journal::Piece& piece : pieces) state.total += piece.bytes;
  TeamProgress progress(options_.progress, state);
  std::vector<std::uint8_t> good(pieces.size());
  std::vector<std::vector<std::byte>> buffers;
  const auto verify = [&](std::int64_t i, std::vector<std::byte>& buffer) -> Status {
    BITTERN_TRY(progress.go_on());
    const Journal::Piece& piece = pieces[static_cast<std::size_t>(i)];
    const OutputLayout::Extent& extent = layout_.tensors[piece.tensor];
    buffer.resize(kReadAtOnce);
    Checksum sum;
    bool there = true;
    for (std::uint64_t at = 0; there && at < piece.bytes; at += kReadAtOnce) {
      const auto part = std::span(buffer).first(
          static_cast<std::size_t>(std::min<std::uint64_t>(kReadAtOnce, piece.bytes - at)));
      there = files_[extent.file].pread(extent.begin + piece.offset + at, part);
      if (there) sum.add(part);
    }
    good[static_cast<std::size_t>(i)] = there && sum.value() == piece.sum;
    return progress.add(piece.bytes);
  };
  const Status read = for_runs(static_cast<std::int64_t>(pieces.size()), buffers, verify);
  if (!read.ok()) return read;
  if (!pieces.empty()) BITTERN_TRY(progress.end());
  std::vector<std::vector<Journal::Piece>> of_tensor(layout_.tensors.size());
  for (std::size_t i = 0; i < pieces.size(); ++i)
    if (good[i] != 0) of_tensor[pieces[i].tensor].push_back(pieces[i]);
  pieces.clear();
  for (std::size_t t = 0; t < of_tensor.size(); ++t) {
    auto& own = of_tensor[t];
    std::sort(own.begin(), own.end(), [](const auto& a, const auto& b) {
      return std::pair(a.offset, b.bytes) < std::pair(b.offset, a.bytes);
    });
    std::uint64_t covered = 0;
    for (const Journal::Piece& piece : own)
      if (piece.offset <= covered) covered = std::max(covered, piece.offset + piece.bytes);
    finished_[t] = !own.empty() && covered == layout_.tensors[t].bytes;
    if (finished_[t]) pieces.insert(pieces.end(), own.begin(), own.end());
  }
  return pieces;
}

// Zeros where no tensor is: bytes that no piece vouches for.
Status ModelOutput::fill_gaps() {
  std::vector<OutputLayout::Extent> order = layout_.tensors;
  std::sort(order.begin(), order.end(),
            [](const auto& a, const auto& b) { return a.begin < b.begin; });
  static constexpr std::byte kZeros[4096] = {};
  for (std::size_t f = 0; f < files_.size(); ++f) {
    std::uint64_t at = layout_.files[f].head.size();
    const auto fill = [&](std::uint64_t end) -> Status {
      while (at < end) {
        const std::uint64_t n = std::min<std::uint64_t>(end - at, sizeof kZeros);
        BITTERN_TRY(files_[f].pwrite(at, std::span(kZeros).first(static_cast<std::size_t>(n))));
        at += n;
      }
      return {};
    };
    for (const OutputLayout::Extent& extent : order) {
      if (extent.file != f) continue;
      BITTERN_TRY(fill(extent.begin));
      at = std::max(at, extent.begin + extent.bytes);
    }
    BITTERN_TRY(fill(layout_.files[f].bytes));
  }
  return {};
}

Result<ModelOutput> ModelOutput::create(const std::string& given, OutputLayout layout,
                                        const OutputOptions& options) {
  const auto path = output_path(given, options.folder);
  if (!path) return path.status();
  BITTERN_TRY(check_output(*path, options));
  const auto before = thing_at(journal_of(*path));
  if (!before) return before.status();
  auto file = WritableFile::open(journal_of(*path), false);
  if (!file && file.status().code() == Code::unavailable && is_locked(journal_of(*path)))
    return in_work(*path);
  if (!file) return file.status();
  ModelOutput output(*path, std::move(layout), options, std::move(*file));
  output.keep_ = true;  // what is not known to be ours
  const std::string partial = output.partial();

  const auto check = [&]() -> Result<Journal> {
    auto journal = load_journal(output.journal_);
    if (!journal) return journal.status();
    if (!journal->ours) return not_ours(output.journal_.path());
    output.journal_end_ = output.journal_.size();
    BITTERN_TRY(output.check_partial(*journal));
    const auto left = thing_at(partial);
    if (!left) return left.status();
    if (*left == Thing::nothing || !options.resume) journal->fingerprint.reset();
    if (journal->fingerprint && *journal->fingerprint != options.fingerprint) {
      if (!options.force) {
        return invalid(partial +
                       ": begun from another model or with other options, expected the same "
                       "(@{force} starts anew)");
      }
      journal->fingerprint.reset();
    }
    if (journal->stamp != options.stamp) journal->pieces.clear();
    if (options.parts) BITTERN_TRY(output.check_parts(journal->fingerprint.has_value()));
    return journal;
  };
  const auto journal = check();
  if (!journal) {
    if (*before == Thing::nothing) ::unlink(output.journal_.path().c_str());
    return journal.status();
  }
  const bool goes_on = journal->fingerprint.has_value();
  if (goes_on && *thing_at(partial) != (options.many() ? Thing::folder : Thing::file))
    return invalid(partial + ": expected " + (options.many() ? "a folder" : "a file") +
                   ", as the run that was stopped made it");
  output.keep_ = false;
  std::vector<std::string> names = output.names();
  std::string lines = journal_opening(options.fingerprint, options.stamp, names);
  if (!goes_on) {
    names.insert(names.end(), journal->files.begin(), journal->files.end());
    remove_known(partial, names);
    // The journal is first, so that no partial is ever without.
    BITTERN_TRY(output.journal_.truncate());
    BITTERN_TRY(output.journal_.pwrite(0, as_bytes(lines)));
    if (options.many() && ::mkdir(partial.c_str(), 0777) != 0)
      return os_error(partial + ": cannot create", errno);
    BITTERN_TRY(output.open_files(true));
  } else {
    output.keep_ = true;  // what was made is kept, whatever happens now
    if (options.parts) BITTERN_TRY(output.take_parts_back());
    BITTERN_TRY(output.open_files(false));
    const auto pieces = output.verified(*journal);
    if (!pieces) return pieces.status();
    for (const Journal::Piece& piece : *pieces) lines += journal_line(piece);
    BITTERN_TRY(output.fill_gaps());
    BITTERN_TRY(output.journal_.truncate());
    BITTERN_TRY(output.journal_.pwrite(0, as_bytes(lines)));
    output.keep_ = false;
  }
  output.journal_end_ = lines.size();
  return output;
}

// Refuses parts that exist, unless force. Exceptions are parts that a run had moved before it was
// stopped: they are missing in OUT.partial and begin like this output.
Status ModelOutput::check_parts(bool goes_on) const {
  for (const OutputLayout::File& file : layout_.files) {
    const std::string path = part_path(path_, file.name);
    const auto there = thing_at(path), left = thing_at(partial() + "/" + file.name);
    if (!there) return there.status();
    if (!left) return left.status();
    if (goes_on && *left == Thing::nothing && *there == Thing::file) {
      const auto alike = begins_alike(path, file.head);
      if (!alike) return alike.status();
      if (*alike) continue;
    }
    BITTERN_TRY(check_part(path, options_.force));
  }
  return {};
}

Status ModelOutput::take_parts_back() const {
  for (const OutputLayout::File& file : layout_.files) {
    const std::string path = part_path(path_, file.name), partly = partial() + "/" + file.name;
    const auto there = thing_at(path), left = thing_at(partly);
    if (!there) return there.status();
    if (!left) return left.status();
    if (*there != Thing::file || *left != Thing::nothing) continue;
    const auto alike = begins_alike(path, file.head);
    if (!alike) return alike.status();
    if (*alike) BITTERN_TRY(rename_new(path, partly));
  }
  return {};
}

// The first part is moved last, so a reader that opens it finds all others. An old first part is
// removed before that, so it never exists together with parts of another set.
Status ModelOutput::move_parts() const {
  const std::string first = part_path(path_, layout_.files[0].name);
  BITTERN_TRY(check_part(first, options_.force));
  if (::unlink(first.c_str()) != 0 && errno != ENOENT)
    return os_error(first + ": cannot replace", errno);
  for (std::size_t i = layout_.files.size(); i-- > 0;) {
    const std::string path = part_path(path_, layout_.files[i].name);
    const std::string from = partial() + "/" + layout_.files[i].name;
    BITTERN_TRY(options_.force ? rename_over(from, path, false) : rename_new(from, path));
    BITTERN_TRY(sync_name(path));
  }
  remove_known(partial(), names());
  return {};
}

ModelOutput::~ModelOutput() {
  if (keep_ || !journal_.is_open()) return;
  try {
    if (check_names().ok()) remove_known(partial(), names());
  } catch (...) {
    return;  // without memory to name them, the files stay for another run
  }
  remove_journal();
}

// Somebody may have removed the partial output, and another run may have made its own since.
Status ModelOutput::check_names() const {
  for (const WritableFile& file : files_)
    if (!file.has_name())
      return unavailable(file.path() + ": removed or replaced while bittern was writing it");
  return {};
}

void ModelOutput::remove_journal() {
  if (journal_.has_name()) ::unlink(journal_.path().c_str());
  journal_.close();
}

bool ModelOutput::finished(std::size_t first, std::size_t count) const {
  return std::all_of(finished_.begin() + static_cast<std::ptrdiff_t>(first),
                     finished_.begin() + static_cast<std::ptrdiff_t>(first + count),
                     [](bool finished) { return finished; });
}

Status ModelOutput::write(std::size_t tensor, std::uint64_t offset,
                          std::span<const std::byte> bytes, std::uint64_t sum) {
  const OutputLayout::Extent& extent = layout_.tensors[tensor];
  if (offset > extent.bytes || bytes.size() > extent.bytes - offset) {
    return {Code::internal, path_ + ": tensor " + std::to_string(tensor) + ": byte " +
                                std::to_string(offset + bytes.size()) + ", expected at most " +
                                std::to_string(extent.bytes)};
  }
  BITTERN_TRY(files_[extent.file].pwrite(extent.begin + offset, bytes));
  const std::string line =
      journal_line({.tensor = tensor, .offset = offset, .bytes = bytes.size(), .sum = sum});
  BITTERN_TRY(journal_.pwrite(journal_end_, as_bytes(line)));
  journal_end_ += line.size();
  return {};
}

Status ModelOutput::add_file(const std::string& name, std::string_view text) {
  BITTERN_TRY(check_names());
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
  keep_ = true;
  BITTERN_TRY(check_names());
  if (options_.many()) BITTERN_TRY(sync_name(partial() + "/"));
  if (options_.parts) {
    BITTERN_TRY(move_parts());
    remove_journal();
    return {};
  }
  BITTERN_TRY(move_output(partial(), path_, options_));
  remove_journal();
  return sync_name(path_);
}

}  // namespace bittern
