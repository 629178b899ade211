// OUT.partial.journal: what a partial output is made from, which files it has, and which of its
// bytes are written. It consists of lines of text, each with its own check, so that a line that is
// cut off or damaged is ignored:
//
//   bittern journal 2 FINGERPRINT CHECK
//   source STAMP CHECK                       Checkpoint::stamp of the model that is read
//   file NAME CHECK                          a file of the folder OUT
//   piece TENSOR OFFSET BYTES SUM CHECK      bytes of a tensor, and their Checksum
//
// Numbers are hexadecimal. A piece counts only if its bytes, read again, have its sum. So nothing
// depends on how much a killed process, or a machine that lost power, managed to write.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bittern {

struct Journal {
  struct Piece {
    std::uint64_t tensor = 0, offset = 0, bytes = 0, sum = 0;
  };
  bool ours = false;  // empty, or bittern wrote it, whatever became of it since
  std::optional<std::uint64_t> fingerprint{}, stamp{};
  std::vector<std::string> files{};
  std::vector<Piece> pieces{};
};

Journal read_journal(std::string_view text);

// Lines, with their ends.
std::string journal_opening(std::uint64_t fingerprint, std::uint64_t stamp,
                            const std::vector<std::string>& files);
std::string journal_line(const Journal::Piece& piece);

}  // namespace bittern
