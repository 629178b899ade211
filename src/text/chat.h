// Conversations as text, for the chat templates that are known.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/status.h"
#include "bittern/tokenizer.h"

namespace bittern::text {

// A chat template without what does not change its result: the space around tags, the kind of
// quotes, m['x'] for m.x, and how text is divided into literals. Statements are between %, output
// between braces.
std::string canonical_template(std::string_view jinja);

// What a recognised template does with messages that are text.
struct ChatFormat {
  enum class System {
    turn,    // a turn like any other
    first,   // only before all others
    header,  // Llama 3.1: always there, with dates
    prefix,  // Gemma 3: at the beginning of the first turn of the user
    refused,
  };
  enum class Thoughts {
    kept,    // as the message spells them
    qwen3,   // left out before the last question, put in order behind it
    qwen35,  // the same, and an answer behind the last question always has some
  };
  std::string_view name;
  std::string_view open, after_role, close, assistant = "assistant";
  System system = System::turn;
  Thoughts thoughts = Thoughts::kept;
  bool bos = false;                // the text begins with bos
  bool trim = false;               // space around messages is left out
  bool alternates = false;         // user and assistant take turns
  std::string_view prompt_end{};   // behind the assistant's header in the generation prompt
  bool always_prompts = false;     // whether or not it was asked for
  bool may_skip_thoughts = false;  // ChatOptions::thinking counts
  std::string default_system{};    // where the first message is none
  bool has_default = false;
};

// Whether a text is what divides the turns of a conversation in one of the formats.
bool divides_turns(std::string_view token);

// The format of a template, or of a name where one is given.
Result<ChatFormat> chat_format(std::string_view jinja, std::string_view name);

// A run of text: of the template, in which control tokens count, or of a message.
struct ChatPart {
  std::string text;
  bool of_template;
};
Result<std::vector<ChatPart>> chat_parts(const ChatFormat& format, std::string_view bos,
                                         std::span<const ChatMessage> messages,
                                         const ChatOptions& options);

}  // namespace bittern::text
