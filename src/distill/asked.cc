#include "distill/asked.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "convert/replace.h"
#include "core/guarded.h"
#include "formats/mapped_file.h"

namespace bittern {
namespace {

constexpr char kFingerprint = '#';

// The next line of a text, without its end, which is taken off the text.
std::string_view take_line(std::string_view& text) {
  const std::string_view line = text.substr(0, text.find('\n'));
  text.remove_prefix(std::min(text.size(), line.size() + 1));
  return line;
}

std::string_view name_of(std::string_view line) { return line.substr(0, line.find(' ')); }
std::string_view value_of(std::string_view line) {
  return line.substr(std::min(line.size(), name_of(line).size() + 1));
}

}  // namespace

void Asked::add(std::string_view name, std::string_view value) {
  text_.append(name).append(" ").append(value).append("\n");
}

void Asked::add_fingerprint(std::string_view name, std::uint64_t fingerprint) {
  add(name, kFingerprint + std::to_string(fingerprint));
}

bool Asked::is_ours(const std::string& path) {
  const auto there = thing_at(path);
  if (!there || *there != Thing::file) return false;
  const auto file = MappedFile::open(path);
  throw_if_out_of_memory(file.status());
  const std::string begin = std::string("teacher ") + kFingerprint;
  return file && file->bytes().size() > begin.size() &&
         std::memcmp(file->bytes().data(), begin.data(), begin.size()) == 0;
}

Status Asked::write(const std::string& path) const {
  return write_whole(path, std::as_bytes(std::span(text_)));
}

Status Asked::check(const std::string& path, const std::string& run) const {
  const auto there = thing_at(path);
  if (!there) return there.status();
  if (*there == Thing::nothing) return {};
  const auto file = MappedFile::open(path);
  if (!file) return file.status();
  const auto bytes = file->bytes();
  std::string_view was(reinterpret_cast<const char*>(bytes.data()), bytes.size()), now = text_;
  while (!now.empty()) {
    const std::string_view before = take_line(was), here = take_line(now);
    if (before == here) continue;
    std::string text = run + ": left by a run with ";
    if (name_of(before) != name_of(here)) {
      text += "other options";
    } else if (value_of(here).starts_with(kFingerprint)) {
      text.append("another @{").append(name_of(here)).append("}");
    } else {
      text.append("@{").append(name_of(here)).append("} ").append(value_of(before));
      text.append(", and it is ").append(value_of(here)).append(" now");
    }
    return invalid(text + "; give the same, or @{force} without @{resume} to start again");
  }
  return {};
}

}  // namespace bittern
