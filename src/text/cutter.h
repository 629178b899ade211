// Cuts text into pieces before BPE, step by step, by regular expressions (PCRE2) or fixed text.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/status.h"

namespace bittern::text {

// What becomes of the parts that a step matches: as tokenizer.json's Split says.
enum class Behaviour { removed, isolated, merged_with_previous, merged_with_next, contiguous };

struct Cut {
  std::string pattern;
  bool regex = true;  // else the text itself
  Behaviour behaviour = Behaviour::isolated;
  bool invert = false;  // what the pattern does not match counts as matched
};

class Cutter {
 public:
  Cutter();
  Cutter(Cutter&&) noexcept;
  Cutter& operator=(Cutter&&) noexcept;
  ~Cutter();

  // `where` opens the message when the pattern is not one.
  Status add(const std::string& where, const Cut& cut);

  // Cuts `text`, which is UTF-8. Pieces are views of it, none is empty.
  Status cut(std::string_view text, std::vector<std::string_view>& pieces) const;

 private:
  struct Step;
  std::vector<std::unique_ptr<const Step>> steps_;
};

}  // namespace bittern::text
