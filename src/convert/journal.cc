#include "convert/journal.h"

#include <charconv>
#include <cstdio>

#include "formats/fingerprint.h"

namespace bittern {
namespace {

constexpr std::string_view kOpening = "bittern journal ", kVersion = "2 ", kSource = "source ",
                           kFile = "file ", kPiece = "piece ";
constexpr std::size_t kCheckSize = 17;  // a space and 16 digits

std::string hex(std::uint64_t x) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(x));
  return text;
}

std::string checked(const std::string& text) {
  Fingerprint hash;
  hash.add(text);
  return text + " " + hex(hash.value()) + "\n";
}

// Numbers with a space between them, and nothing else.
template <std::size_t n>
bool parse(std::string_view text, std::uint64_t (&numbers)[n]) {
  const char *at = text.data(), *const end = at + text.size();
  for (std::size_t i = 0; i < n; ++i) {
    if (i > 0 && (at == end || *at++ != ' ')) return false;
    const auto [next, error] = std::from_chars(at, end, numbers[i], 16);
    if (error != std::errc()) return false;
    at = next;
  }
  return at == end;
}

}  // namespace

std::string journal_opening(std::uint64_t fingerprint, std::uint64_t stamp,
                            const std::vector<std::string>& files) {
  std::string text = checked(std::string(kOpening) + std::string(kVersion) + hex(fingerprint));
  text += checked(std::string(kSource) + hex(stamp));
  for (const std::string& file : files) text += checked(std::string(kFile) + file);
  return text;
}

std::string journal_line(const Journal::Piece& piece) {
  char text[96];
  std::snprintf(
      text, sizeof text, "piece %llx %llx %llx %llx", static_cast<unsigned long long>(piece.tensor),
      static_cast<unsigned long long>(piece.offset), static_cast<unsigned long long>(piece.bytes),
      static_cast<unsigned long long>(piece.sum));
  return checked(text);
}

Journal read_journal(std::string_view text) {
  Journal journal;
  // Zeros are what a lost page may become.
  const std::string_view start = text.substr(0, text.find_last_not_of('\0') + 1);
  journal.ours = start.starts_with(kOpening) || kOpening.starts_with(start);
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    if (end == text.npos) break;
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end + 1);
    if (line.size() < kCheckSize) continue;
    std::string_view content = line.substr(0, line.size() - kCheckSize);
    if (checked(std::string(content)) != std::string(line) + "\n") continue;
    journal.ours = true;
    if (content.starts_with(kOpening)) {
      content.remove_prefix(kOpening.size());
      std::uint64_t fingerprint[1];
      if (content.starts_with(kVersion) && parse(content.substr(kVersion.size()), fingerprint))
        journal.fingerprint = fingerprint[0];
    } else if (content.starts_with(kSource)) {
      std::uint64_t stamp[1];
      if (parse(content.substr(kSource.size()), stamp)) journal.stamp = stamp[0];
    } else if (content.starts_with(kFile)) {
      journal.files.emplace_back(content.substr(kFile.size()));
    } else if (content.starts_with(kPiece)) {
      std::uint64_t n[4];
      if (parse(content.substr(kPiece.size()), n))
        journal.pieces.push_back({.tensor = n[0], .offset = n[1], .bytes = n[2], .sum = n[3]});
    }
  }
  return journal;
}

}  // namespace bittern
