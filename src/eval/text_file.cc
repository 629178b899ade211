#include "eval/text_file.h"

#include <cstdio>
#include <filesystem>
#include <memory>

#include "text/utf8.h"

namespace bittern {
namespace {

// The number of bytes before the first that belongs to no character.
std::size_t valid_prefix(const std::string& text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t bytes = text::character(text, at);
    if (bytes == 0) break;
    at += bytes;
  }
  return at;
}

}  // namespace

Result<std::string> read_text(const std::string& path, bool any_bytes, const std::string& remedy) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error))
    return invalid(path + ": a folder, expected a file of text");
  // /dev/zero has no end. A pipe has one.
  if (std::filesystem::is_character_file(path, error) ||
      std::filesystem::is_block_file(path, error))
    return invalid(path + ": a device, expected a file of text");
  // A stream of C++ would call it a file that cannot be opened when memory runs out.
  const auto close = [](std::FILE* file) { std::fclose(file); };
  const std::unique_ptr<std::FILE, decltype(close)> file(std::fopen(path.c_str(), "rb"), close);
  if (file == nullptr) return unavailable(path + ": cannot be opened");
  std::string text;
  char piece[1 << 14];
  while (const std::size_t count = std::fread(piece, 1, sizeof piece, file.get()))
    text.append(piece, count);
  if (std::ferror(file.get()) != 0) return Status(Code::io_error, path + ": cannot be read");
  if (text.empty()) return invalid(path + ": empty, expected text");
  if (any_bytes) return text;
  if (const std::size_t at = valid_prefix(text); at != text.size())
    return invalid(path + ": byte " + std::to_string(at) + " is not UTF-8, expected text" +
                   (remedy.empty() ? "" : " (" + remedy + ")"));
  return text;
}

Result<std::int32_t> first_of_pieces(const Tokenizer& tokenizer) {
  const auto empty = tokenizer.encode("");
  if (!empty) return empty.status();
  const bool begins = !empty->empty() && tokenizer.bos() && empty->front() == *tokenizer.bos();
  return begins ? *tokenizer.bos() : -1;
}

}  // namespace bittern
