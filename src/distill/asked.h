// What a run of distill_model was asked for: a text in its folder, a line for each option. A run
// that goes on with it can then say what is different now.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "bittern/status.h"

namespace bittern {

class Asked {
 public:
  // An option's name, as DistillOptions has it, and its value in a few words.
  void add(std::string_view name, std::string_view value);
  void add(std::string_view name, std::int64_t value) { add(name, std::to_string(value)); }
  void add_flag(std::string_view name, bool value) { add(name, value ? "on" : "off"); }
  // What is too long to be told, such as a text: messages say that it is another one.
  void add_fingerprint(std::string_view name, std::uint64_t fingerprint);

  // Whether a run wrote this file.
  static bool is_ours(const std::string& path);
  Status write(const std::string& path) const;
  // Whether the file at `path` begins with the same lines; ok where there is none. Messages are
  // about `run`, the folder of the run that wrote it.
  Status check(const std::string& path, const std::string& run) const;

 private:
  std::string text_;
};

}  // namespace bittern
