// A conversation as its chat template writes it.
#include "text/chat.h"

#include <algorithm>

#include "formats/json_events.h"
#include "text/utf8.h"

namespace bittern::text {
namespace {

using System = ChatFormat::System;
using Thoughts = ChatFormat::Thoughts;

// Python's str.strip().
std::string_view trimmed(std::string_view text) {
  const auto space = [](std::string_view letter) {
    constexpr std::string_view kWide[] = {
        "\xc2\x85",     "\xc2\xa0",     "\xe1\x9a\x80", "\xe2\x80\x80", "\xe2\x80\x81",
        "\xe2\x80\x82", "\xe2\x80\x83", "\xe2\x80\x84", "\xe2\x80\x85", "\xe2\x80\x86",
        "\xe2\x80\x87", "\xe2\x80\x88", "\xe2\x80\x89", "\xe2\x80\x8a", "\xe2\x80\xa8",
        "\xe2\x80\xa9", "\xe2\x80\xaf", "\xe2\x81\x9f", "\xe3\x80\x80"};
    const char c = letter[0];
    if (letter.size() == 1) return c == ' ' || (c >= 9 && c <= 13) || (c >= 28 && c <= 31);
    return std::ranges::find(kWide, letter) != std::end(kWide);
  };
  while (!text.empty()) {
    const std::size_t size = character(text, 0);
    if (size == 0 || !space(text.substr(0, size))) break;
    text.remove_prefix(size);
  }
  while (!text.empty()) {
    std::size_t begin = text.size() - 1;
    while (begin > 0 && (text[begin] & 0xc0) == 0x80) --begin;
    if (!space(text.substr(begin))) break;
    text = text.substr(0, begin);
  }
  return text;
}

std::string_view without_first_lines(std::string_view text) {  // lstrip('\n')
  return text.substr(std::min(text.find_first_not_of('\n'), text.size()));
}
std::string_view without_last_lines(std::string_view text) {  // rstrip('\n')
  return text.substr(0, text.find_last_not_of('\n') + 1);
}

constexpr std::string_view kThink = "<think>", kEndThink = "</think>";

// Takes what an answer thought off its text.
std::string_view take_thoughts(std::string_view& content) {
  const std::size_t end = content.find(kEndThink);
  if (end == content.npos) return {};
  std::string_view thoughts = without_last_lines(content.substr(0, end));
  if (const std::size_t begin = thoughts.rfind(kThink); begin != thoughts.npos)
    thoughts = thoughts.substr(begin + kThink.size());
  content = without_first_lines(content.substr(content.rfind(kEndThink) + kEndThink.size()));
  return without_first_lines(thoughts);
}

class Writer {
 public:
  explicit Writer(const ChatFormat& format) : format_(format) {}

  void of_template(std::string_view text) { put(text, true); }
  void of_message(std::string_view text) { put(text, false); }
  void open(std::string_view role) {
    of_template(format_.open);
    of_template(role);
    of_template(format_.after_role);
  }
  void turn(std::string_view role, std::string_view content) {
    open(role);
    of_message(content);
    of_template(format_.close);
  }
  std::vector<ChatPart> take() { return std::move(parts_); }

 private:
  void put(std::string_view text, bool of_template) {
    if (text.empty()) return;
    if (parts_.empty() || parts_.back().of_template != of_template)
      parts_.push_back({"", of_template});
    parts_.back().text += text;
  }
  const ChatFormat& format_;
  std::vector<ChatPart> parts_;
};

Status check_roles(const ChatFormat& format, std::span<const ChatMessage> messages) {
  if (messages.empty()) return invalid("apply_chat: no messages, expected at least one");
  const std::size_t first = messages[0].role == "system" ? 1 : 0;
  if (first == 1 && format.system == System::refused)
    return invalid("apply_chat: message 0: a system message, which this chat template refuses");
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const std::string& role = messages[i].role;
    const std::string where = "apply_chat: message " + std::to_string(i) + ": ";
    if (role != "system" && role != "user" && role != "assistant")
      return invalid(where + "role " + in_quotes(role) + ", expected system, user or assistant");
    if (i < first) continue;
    if (role == "system" && (format.alternates || format.system == System::first))
      return invalid(where + "a system message, which this chat template takes only as the first");
    if (format.alternates && (role == "user") != ((i - first) % 2 == 0))
      return invalid(where + "role " + in_quotes(role) +
                     ", expected user and assistant in turns, the user first");
  }
  return {};
}

// The last question; behind it, an answer keeps its thoughts.
Result<std::size_t> last_question(const ChatFormat& format, std::span<const ChatMessage> messages) {
  for (std::size_t i = messages.size(); i-- > 0;) {
    if (messages[i].role != "user") continue;
    std::string_view content = messages[i].content;
    if (format.trim) content = trimmed(content);
    if (!content.starts_with("<tool_response>") || !content.ends_with("</tool_response>")) return i;
  }
  if (format.thoughts == Thoughts::qwen35)
    return invalid("apply_chat: no message of the user, expected one");
  return messages.size() - 1;
}

}  // namespace

Result<std::vector<ChatPart>> chat_parts(const ChatFormat& format, std::string_view bos,
                                         std::span<const ChatMessage> messages,
                                         const ChatOptions& options) {
  BITTERN_TRY(check_roles(format, messages));
  const auto question = last_question(format, messages);
  if (!question) return question.status();
  const auto text_of = [&](const ChatMessage& message) {
    return format.trim ? trimmed(message.content) : std::string_view(message.content);
  };
  Writer out(format);
  if (format.bos) out.of_template(bos);

  const bool given = messages[0].role == "system";
  std::size_t from = 0;
  if (format.system == System::header) {
    out.open("system");
    out.of_template("Cutting Knowledge Date: December 2023\nToday Date: ");
    out.of_message(options.date);
    out.of_template("\n\n");
    if (given) out.of_message(text_of(messages[0]));
    out.of_template(format.close);
    from = given;
  } else if (format.system == System::prefix) {
    from = given;
  } else if (format.has_default && !given) {
    out.open("system");
    out.of_template(format.default_system);
    out.of_template(format.close);
  }

  for (std::size_t i = from; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    std::string_view content = text_of(message);
    const bool answer = message.role == "assistant";
    if (!answer || format.thoughts == Thoughts::kept) {
      out.open(answer ? format.assistant : message.role);
      if (i == from && from == 1 && format.system == System::prefix) {
        out.of_message(messages[0].content);
        out.of_template("\n\n");
      }
      out.of_message(content);
      out.of_template(format.close);
      continue;
    }
    std::string_view thoughts = take_thoughts(content);
    const bool qwen35 = format.thoughts == Thoughts::qwen35;
    thoughts = qwen35 ? trimmed(thoughts) : without_last_lines(thoughts);
    const bool shown = qwen35 || i + 1 == messages.size() || !thoughts.empty();
    out.open(message.role);
    if (i > *question && shown) {
      out.of_template("<think>\n");
      out.of_message(thoughts);
      out.of_template("\n</think>\n\n");
      if (!qwen35) content = without_first_lines(content);
    }
    out.of_message(content);
    out.of_template(format.close);
  }
  if (options.add_generation_prompt || format.always_prompts) {
    out.open(format.assistant);
    const bool skips = format.may_skip_thoughts && !options.thinking;
    out.of_template(skips ? "<think>\n\n</think>\n\n" : format.prompt_end);
  }
  return out.take();
}

}  // namespace bittern::text
