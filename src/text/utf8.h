// UTF-8 as text is read and printed.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

namespace bittern::text {

inline constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD

// Bytes of the character at `at` if it is whole and valid, else 0.
std::size_t character(std::string_view text, std::size_t at);

// Bytes that a character takes by its first byte alone, 1 for one that cannot be a first byte.
inline std::size_t claimed_length(char first) {
  constexpr unsigned char kLength[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 4};
  return kLength[static_cast<unsigned char>(first) >> 4];
}

// Every byte that is not part of a character becomes U+FFFD, and characters in more bytes than they
// need their short form, as llama.cpp reads them.
std::string repaired(std::string_view text);

// Moves the characters that are complete from `pending` to the result. What cannot become a
// character is U+FFFD, once for each longest part that might have become one (as Unicode
// recommends, and Python and Rust do).
std::string take_complete(std::string& pending);

}  // namespace bittern::text
