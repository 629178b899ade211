#include "convert/option_names.h"

namespace bittern {

std::string with_option_names(std::string_view text, const OptionName& name) {
  constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyz_";
  std::string out;
  while (true) {
    const std::size_t mark = text.find("@{");
    out += text.substr(0, mark);
    if (mark == text.npos) return out;
    text.remove_prefix(mark);
    const std::size_t end = text.find_first_not_of(kLetters, 2);
    if (end == text.npos || end == 2 || text[end] != '}') {  // of a name that somebody gave
      out += text.substr(0, 2);
      text.remove_prefix(2);
      continue;
    }
    const std::string_view field = text.substr(2, end - 2);
    if (name) {
      out += name(field);
    } else {
      out += field == "rule" ? "rules" : field;  // one of them
    }
    text.remove_prefix(end + 1);
  }
}

Status with_option_names(const Status& status, const OptionName& name) {
  if (status.ok()) return {};
  return {status.code(), with_option_names(status.message(), name)};
}

}  // namespace bittern
