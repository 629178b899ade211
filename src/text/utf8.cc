#include "text/utf8.h"

#include <cstdint>

namespace bittern::text {
namespace {

unsigned char byte_at(std::string_view text, std::size_t at) {
  return static_cast<unsigned char>(text[at]);
}

// The least and the largest second byte after a first byte (Unicode, table 3-7).
struct Second {
  unsigned char least = 0x80, most = 0xbf;
};
Second second_after(unsigned char first) {
  if (first == 0xe0) return {0xa0, 0xbf};
  if (first == 0xed) return {0x80, 0x9f};
  if (first == 0xf0) return {0x90, 0xbf};
  if (first == 0xf4) return {0x80, 0x8f};
  return {};
}

// How many bytes from `at` on begin a character, and how many the character has.
struct Begun {
  std::size_t found = 0, wanted = 0;
};
Begun begun(std::string_view text, std::size_t at) {
  const unsigned char first = byte_at(text, at);
  if (first < 0x80) return {1, 1};
  if (first < 0xc2 || first > 0xf4) return {1, 0};
  const std::size_t wanted = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  const Second second = second_after(first);
  std::size_t found = 1;
  for (; found < wanted && at + found < text.size(); ++found) {
    const unsigned char next = byte_at(text, at + found);
    const bool fits =
        found == 1 ? next >= second.least && next <= second.most : (next & 0xc0) == 0x80;
    if (!fits) return {found, 0};
  }
  return {found, wanted};
}

void append(std::string& out, std::uint32_t point) {
  if (point < 0x80) {
    out += static_cast<char>(point);
  } else if (point < 0x800) {
    out += static_cast<char>(0xc0 | point >> 6);
    out += static_cast<char>(0x80 | (point & 0x3f));
  } else if (point < 0x10000) {
    out += static_cast<char>(0xe0 | point >> 12);
    out += static_cast<char>(0x80 | (point >> 6 & 0x3f));
    out += static_cast<char>(0x80 | (point & 0x3f));
  } else {
    out += static_cast<char>(0xf0 | point >> 18);
    out += static_cast<char>(0x80 | (point >> 12 & 0x3f));
    out += static_cast<char>(0x80 | (point >> 6 & 0x3f));
    out += static_cast<char>(0x80 | (point & 0x3f));
  }
}

}  // namespace

std::size_t character(std::string_view text, std::size_t at) {
  const Begun b = begun(text, at);
  return b.wanted == b.found ? b.wanted : 0;
}

std::string repaired(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) {
    const unsigned char first = byte_at(text, i);
    const std::size_t length = first < 0x80   ? 1
                               : first < 0xc0 ? 0
                               : first < 0xe0 ? 2
                               : first < 0xf0 ? 3
                               : first < 0xf8 ? 4
                                              : 0;
    bool whole = length != 0 && i + length <= text.size();
    std::uint32_t point = length < 2 ? first : first & (0x7fu >> length);
    for (std::size_t k = 1; whole && k < length; ++k) {
      const unsigned char next = byte_at(text, i + k);
      whole = (next & 0xc0) == 0x80;
      point = point << 6 | (next & 0x3f);
    }
    if (whole && point <= 0x10ffff) {  // surrogates, too
      append(out, point);
      i += length;
    } else {
      out += kReplacement;
      ++i;
    }
  }
  return out;
}

std::string take_complete(std::string& pending) {
  std::string out;
  std::size_t i = 0;
  while (i < pending.size()) {
    const Begun b = begun(pending, i);
    if (b.wanted > b.found) break;  // more may come
    if (b.wanted == 0) {
      out += kReplacement;
    } else {
      out.append(pending, i, b.found);
    }
    i += b.found;
  }
  pending.erase(0, i);
  return out;
}

}  // namespace bittern::text
