#include "formats/json_events.h"

#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

namespace bittern {
namespace {

// The lexer keeps what it read since the last string began, and stops in silence at a NUL.
Status check_tokens(const std::string& where, const std::string& broken, std::string_view text) {
  bool inside = false;
  std::size_t start = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\0') return invalid(broken + " at byte " + std::to_string(i) + ": NUL");
    if (i - start > kJsonMaxToken) {
      return invalid(where + ": no new string within " + std::to_string(kJsonMaxToken) +
                     " bytes of byte " + std::to_string(start) + ", expected one");
    }
    if (c == '"') {
      if (!inside) start = i;
      inside = !inside;
    } else if (c == '\\' && inside && i + 1 < text.size() && text[i + 1] != '\0') {
      ++i;
    }
  }
  return {};
}

}  // namespace

std::string in_quotes(std::string_view text) {
  constexpr std::size_t kMost = 120;
  constexpr const char* kHex = "0123456789abcdef";
  std::string s = "\"";
  for (const char c : text.substr(0, kMost)) {
    const auto u = static_cast<unsigned char>(c);
    if (u < 32 || u == 127) {
      s.append("\\x").append(1, kHex[u >> 4]).append(1, kHex[u & 15]);
    } else {
      if (c == '"' || c == '\\') s += '\\';
      s += c;
    }
  }
  if (text.size() > kMost) s += "...";
  return s + '"';
}

std::string tensor_in(const std::string& where, std::string_view name) {
  return where + ": tensor " + in_quotes(name) + ": ";
}

const char* JsonScalar::what() const {
  constexpr const char* kNames[] = {"null",     "a boolean", "a number",
                                    "a number", "a number",  "a string"};
  return kNames[kind];
}

struct JsonEvents::Sax {
  using Json = nlohmann::json;
  JsonEvents& to;
  Status status;
  std::optional<int> skip_from;  // the depth of the value that is skipped

  bool refuse(Status why) {
    status = std::move(why);
    return status.ok();
  }
  bool value(const JsonScalar& v) {
    if (skip_from || std::exchange(to.skip_next_, false)) return true;
    return refuse(to.scalar(v));
  }
  bool begin(bool object) {
    if (to.depth_ == kJsonMaxDepth) {
      return refuse(invalid(to.where_ + ": nested more than " + std::to_string(kJsonMaxDepth) +
                            " deep, expected less"));
    }
    if (std::exchange(to.skip_next_, false)) skip_from = to.depth_;
    if (!skip_from && !refuse(to.begin(object))) return false;
    ++to.depth_;
    return true;
  }
  bool end() {
    --to.depth_;
    if (!skip_from) return refuse(to.end());
    if (*skip_from == to.depth_) skip_from.reset();
    return true;
  }

  bool null() { return value({}); }
  bool boolean(bool v) { return value({.kind = JsonScalar::boolean, .truth = v}); }
  bool number_integer(Json::number_integer_t v) {
    return value({.kind = JsonScalar::negative, .integer = v, .real = static_cast<double>(v)});
  }
  bool number_unsigned(Json::number_unsigned_t v) {
    return value({.kind = JsonScalar::natural, .number = v, .real = static_cast<double>(v)});
  }
  bool number_float(Json::number_float_t v, const Json::string_t&) {
    return value({.kind = JsonScalar::fraction, .real = v});
  }
  bool string(Json::string_t& v) { return value({.kind = JsonScalar::text, .string = &v}); }
  bool binary(Json::binary_t&) { return false; }
  bool start_object(std::size_t) { return begin(true); }
  bool key(Json::string_t& v) { return skip_from ? true : refuse(to.key(v)); }
  bool end_object() { return end(); }
  bool start_array(std::size_t) { return begin(false); }
  bool end_array() { return end(); }
  template <class Error>
  bool parse_error(std::size_t position, const std::string&, const Error&) {
    return refuse(invalid(to.broken_ + " at byte " + std::to_string(position)));
  }
};

Status JsonEvents::parse(std::span<const std::byte> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  BITTERN_TRY(check_tokens(where_, broken_, text));
  depth_ = 0;
  skip_next_ = false;
  Sax sax{*this, {}, {}};
  if (nlohmann::json::sax_parse(text.begin(), text.end(), &sax)) return {};
  if (sax.status.ok()) return invalid(broken_);
  return sax.status;
}

}  // namespace bittern
