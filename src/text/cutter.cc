#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/cutter.h"

#include <pcre2.h>

#include <utility>

namespace bittern::text {
namespace {

// What a pattern of a stranger may cost. Those of real models need a few steps for a character.
constexpr std::uint32_t kMostMatchSteps = 10'000'000;
constexpr std::uint32_t kMostDepth = 100'000;
constexpr std::uint32_t kMostHeapKib = 20'000;
constexpr std::size_t kMostPatternBytes = 1 << 16;
constexpr std::size_t kJitStackBytes = 8 << 20;  // reserved; what is used counts

struct FreeCode {
  void operator()(pcre2_code* p) const { pcre2_code_free(p); }
};
struct FreeData {
  void operator()(pcre2_match_data* p) const { pcre2_match_data_free(p); }
};
struct FreeContext {
  void operator()(pcre2_match_context* p) const { pcre2_match_context_free(p); }
  void operator()(pcre2_compile_context* p) const { pcre2_compile_context_free(p); }
};
struct FreeStack {
  void operator()(pcre2_jit_stack* p) const { pcre2_jit_stack_free(p); }
};

std::string message_of(int error) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(error, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

struct Part {
  std::string_view text;
  bool match = false;
};

// What a thread needs to match: made once in each.
struct Matching {
  std::unique_ptr<pcre2_match_data, FreeData> data{pcre2_match_data_create(1, nullptr)};
  std::unique_ptr<pcre2_match_context, FreeContext> context{pcre2_match_context_create(nullptr)};
  std::unique_ptr<pcre2_jit_stack, FreeStack> stack{
      pcre2_jit_stack_create(32 << 10, kJitStackBytes, nullptr)};
  Matching() {
    if (context == nullptr) return;
    pcre2_set_match_limit(context.get(), kMostMatchSteps);
    pcre2_set_depth_limit(context.get(), kMostDepth);
    pcre2_set_heap_limit(context.get(), kMostHeapKib);
    pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
  }
};

void apply(Behaviour behaviour, std::span<const Part> parts,
           std::vector<std::string_view>& pieces) {
  const auto joined = [](std::string_view a, std::string_view b) {
    return std::string_view(a.data(), a.size() + b.size());  // neighbours in one text
  };
  bool open = false;  // the last piece takes what follows
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    if (part.text.empty()) continue;
    switch (behaviour) {
      case Behaviour::removed:
        if (!part.match) pieces.push_back(part.text);
        break;
      case Behaviour::isolated: pieces.push_back(part.text); break;
      case Behaviour::merged_with_previous:
        // A match ends the piece before it, unless that is a match too.
        if (part.match && open) {
          pieces.back() = joined(pieces.back(), part.text);
          open = false;
        } else {
          pieces.push_back(part.text);
          open = !part.match;
        }
        break;
      case Behaviour::merged_with_next:
        if (!part.match && open) {
          pieces.back() = joined(pieces.back(), part.text);
          open = false;
        } else {
          pieces.push_back(part.text);
          open = part.match;
        }
        break;
      case Behaviour::contiguous:
        if (i > 0 && open && parts[i - 1].match == part.match) {
          pieces.back() = joined(pieces.back(), part.text);
        } else {
          pieces.push_back(part.text);
        }
        open = true;
        break;
    }
  }
}

}  // namespace

struct Cutter::Step {
  std::string where;
  Cut cut;
  std::unique_ptr<pcre2_code, FreeCode> code;

  // f(text, whether it matched), in order, all of the text.
  template <class F>
  Status each(std::string_view text, F&& f) const {
    return cut.regex ? each_match(text, f) : each_literal(text, f);
  }

 private:
  template <class F>
  Status each_literal(std::string_view text, F& f) const {
    std::size_t from = 0;
    for (std::size_t at; (at = text.find(cut.pattern, from)) != text.npos;) {
      if (at > from) f(text.substr(from, at - from), false);
      f(text.substr(at, cut.pattern.size()), true);
      from = at + cut.pattern.size();
    }
    if (from < text.size()) f(text.substr(from), false);
    return {};
  }
  template <class F>
  Status each_match(std::string_view text, F& f) const {
    thread_local const Matching matching;
    if (matching.data == nullptr || matching.context == nullptr)
      return Status(Code::out_of_memory, where);
    const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
    std::size_t from = 0, search = 0;
    while (search <= text.size()) {
      const auto match = [&](std::uint32_t options) {
        return pcre2_match(code.get(), subject, text.size(), search, options | PCRE2_NO_UTF_CHECK,
                           matching.data.get(), matching.context.get());
      };
      int found = match(0);
      // The interpreter has the heap for what is too long for that stack.
      if (found == PCRE2_ERROR_JIT_STACKLIMIT) found = match(PCRE2_NO_JIT);
      if (found == PCRE2_ERROR_NOMATCH) break;
      if (found < 0)
        return invalid(where + ": matching a text of " + std::to_string(text.size()) +
                       " bytes: " + message_of(found));
      const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(matching.data.get());
      const std::size_t begin = ends[0], end = ends[1];
      if (begin > from) f(text.substr(from, begin - from), false);
      if (end > begin) f(text.substr(begin, end - begin), true);
      from = std::max(end, from);
      search = end;
      if (end == begin) {  // nothing: on to the next character
        do ++search;
        while (search < text.size() && (text[search] & 0xc0) == 0x80);
      }
    }
    if (from < text.size()) f(text.substr(from), false);
    return {};
  }
};

Cutter::Cutter() = default;
Cutter::Cutter(Cutter&&) noexcept = default;
Cutter& Cutter::operator=(Cutter&&) noexcept = default;
Cutter::~Cutter() = default;

Status Cutter::add(const std::string& where, const Cut& cut) {
  auto step = std::make_unique<Step>();
  step->where = where;
  step->cut = cut;
  if (cut.pattern.empty() || cut.pattern.size() > kMostPatternBytes)
    return invalid(where + ": a pattern of " + std::to_string(cut.pattern.size()) +
                   " bytes, expected 1 to " + std::to_string(kMostPatternBytes));
  if (cut.regex) {
    int error = 0;
    PCRE2_SIZE offset = 0;
    const std::unique_ptr<pcre2_compile_context, FreeContext> context(
        pcre2_compile_context_create(nullptr));
    if (context == nullptr) return Status(Code::out_of_memory, where);
    pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
    // Lines end at \n for $, as in Hugging Face's expressions.
    step->code.reset(
        pcre2_compile(reinterpret_cast<PCRE2_SPTR>(cut.pattern.data()), cut.pattern.size(),
                      PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error,
                      &offset, context.get()));
    if (step->code == nullptr)
      return invalid(where + ": " + message_of(error) + " at byte " + std::to_string(offset) +
                     " of the pattern");
    // Where the system allows no code at run time, the interpreter does it.
    pcre2_jit_compile(step->code.get(), PCRE2_JIT_COMPLETE);
  }
  steps_.push_back(std::move(step));
  return {};
}

Status Cutter::cut(std::string_view text, std::vector<std::string_view>& pieces) const {
  pieces.clear();
  if (text.empty()) return {};
  pieces.push_back(text);
  std::vector<std::string_view> before;
  std::vector<Part> parts;
  for (const auto& step : steps_) {
    before.swap(pieces);
    pieces.clear();
    const bool plain = step->cut.behaviour == Behaviour::isolated;
    for (const std::string_view piece : before) {
      if (plain) {
        BITTERN_TRY(
            step->each(piece, [&](std::string_view part, bool) { pieces.push_back(part); }));
        continue;
      }
      parts.clear();
      BITTERN_TRY(step->each(piece, [&](std::string_view part, bool match) {
        parts.push_back({part, match != step->cut.invert});
      }));
      apply(step->cut.behaviour, parts, pieces);
    }
  }
  return {};
}

}  // namespace bittern::text
