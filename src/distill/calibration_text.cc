#include "distill/calibration_text.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "eval/text_file.h"
#include "formats/json_tree.h"

namespace bittern {
namespace {

using Tokens = std::vector<std::int32_t>;

Result<ChatMessage> message_of(const std::string& where, const OrderedJson& json) {
  ChatMessage message;
  for (auto [key, to] : {std::pair{"role", &message.role}, {"content", &message.content}}) {
    const auto found = json.is_object() ? json.find(key) : json.end();
    if (!json.is_object() || found == json.end() || !found->is_string())
      return invalid(where + ": the message " + shown(json) +
                     ", expected an object with the strings role and content");
    *to = found->get<std::string>();
  }
  return message;
}

// A conversation by the model's own template, or a text.
Result<Tokens> tokens_of_line(const Tokenizer& tokenizer, const std::string& where,
                              std::string_view line) {
  const auto json = parse_json_tree(where, std::as_bytes(std::span(line)));
  if (!json) return json.status();
  const auto member = [&](const char* key) {
    return json->is_object() && json->contains(key) ? &json->at(key) : nullptr;
  };
  const OrderedJson *const messages = member("messages"), *const text = member("text");
  if (messages != nullptr && messages->is_array() && !messages->empty()) {
    std::vector<ChatMessage> chat;
    for (const OrderedJson& each : *messages) {
      auto message = message_of(where, each);
      if (!message) return message.status();
      chat.push_back(std::move(*message));
    }
    auto tokens = tokenizer.apply_chat(chat, {.add_generation_prompt = false});
    if (!tokens)
      return Status(tokens.status().code(), where + ": " + std::string(tokens.status().message()));
    return tokens;
  }
  if (messages == nullptr && text != nullptr && text->is_string())
    return tokenizer.encode(text->get<std::string>() + "\n\n",
                            {.add_special = false, .parse_special = false});
  return invalid(
      where + ": " + shown(*json) +
      R"(, expected {"messages": [{"role": ..., "content": ...}, ...]} or {"text": ...})");
}

Result<Tokens> tokens_of_file(const Tokenizer& tokenizer, const std::string& path) {
  const auto text = read_text(path, false, "");
  if (!text) return text.status();
  if (!path.ends_with(".jsonl"))
    return tokenizer.encode(*text, {.add_special = false, .parse_special = false});
  Tokens all;
  std::int64_t number = 0;
  for (std::string_view rest = *text; !rest.empty();) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const auto tokens = tokens_of_line(tokenizer, path + ":" + std::to_string(number), line);
    if (!tokens) return tokens.status();
    all.insert(all.end(), tokens->begin(), tokens->end());
  }
  return all;
}

}  // namespace

Result<CalibrationText> read_pieces(const Tokenizer& tokenizer, const std::string& path,
                                    std::int64_t context) {
  auto tokens = tokens_of_file(tokenizer, path);
  if (!tokens) return tokens.status();
  const auto first = first_of_pieces(tokenizer);
  if (!first) return first.status();
  CalibrationText read{.context = context, .tokens = std::move(*tokens)};
  for (std::int64_t i = 0; *first >= 0 && i < read.pieces(); ++i)
    read.tokens[static_cast<std::size_t>(i * context)] = *first;
  return read;
}

CalibrationText some_of(const CalibrationText& text, std::int64_t pieces) {
  CalibrationText some{.context = text.context, .tokens = {}};
  const std::int64_t all = text.pieces(), used = std::min(pieces, all);
  for (std::int64_t i = 0; i < used; ++i)
    some.add(text.piece(all / used * i + all % used * i / used));
  return some;
}

Result<CalibrationText> read_calibration_text(const std::string& model, const std::string& path,
                                              std::int64_t pieces, std::int64_t context) {
  const auto tokenizer = Tokenizer::load(model);
  if (!tokenizer) return tokenizer.status();
  const auto text = read_pieces(*tokenizer, path, context);
  if (!text) return text.status();
  if (text->pieces() < 1)
    return invalid(path + ": " + std::to_string(text->tokens.size()) +
                   " tokens, expected at least " + std::to_string(context) +
                   ", a piece of them (@{context} makes it shorter)");
  return some_of(*text, pieces);
}

}  // namespace bittern
