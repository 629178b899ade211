// JSON read as events, for files that are not trusted: no tree is built, so memory does not grow
// with the text; duplicate keys are found; depth and token lengths are bounded; only std::bad_alloc
// is thrown. A reader overrides four calls and refuses by returning an error.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "bittern/status.h"

namespace bittern {

inline constexpr std::size_t kJsonMaxToken = std::size_t{8} << 20;
inline constexpr int kJsonMaxDepth = 64;

// A string of a file as a message shows it: in quotes, on one line, cut where it is long.
std::string in_quotes(std::string_view text);
// "FILE: tensor "NAME": ", the beginning of a message about a tensor.
std::string tensor_in(const std::string& where, std::string_view name);

struct JsonScalar {
  enum Kind { null, boolean, natural, negative, fraction, text };
  Kind kind = null;
  bool truth = false;
  std::uint64_t number = 0;             // of a natural
  std::int64_t integer = 0;             // of a negative whole number
  double real = 0;                      // of any number
  const std::string* string = nullptr;  // of a text, during the call

  const char* what() const;  // "a string"
};

class JsonEvents {
 public:
  // Messages begin with `where`; the one about text that is not JSON begins with `broken`.
  JsonEvents(std::string where, std::string broken)
      : where_(std::move(where)), broken_(std::move(broken)) {}
  virtual ~JsonEvents() = default;

  Status parse(std::span<const std::byte> text);

 protected:
  // The number of objects and lists around the value, key or end.
  int depth() const { return depth_; }
  // From key(): its value is checked as JSON and makes no events.
  void skip_value() { skip_next_ = true; }

  virtual Status begin(bool object) = 0;
  virtual Status key(const std::string& text) = 0;
  virtual Status scalar(const JsonScalar& value) = 0;
  virtual Status end() = 0;

 private:
  struct Sax;

  std::string where_, broken_;
  int depth_ = 0;
  bool skip_next_ = false;
};

}  // namespace bittern
