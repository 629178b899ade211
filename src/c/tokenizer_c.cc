#include "c/tokenizer_c.h"

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "c/c_api.h"

using namespace bittern;
using c_api::null;
using c_api::run;

struct bittern_token_stream {
  TokenStream stream;
  std::string text;
};

namespace {

// Writes what fits, and says how much there is.
template <class T>
Status give(const char* function, std::span<const T> made, T* to, std::size_t room,
            std::size_t* count) {
  if (to == nullptr && room > 0) return null(function, "the output");
  *count = made.size();
  std::copy_n(made.begin(), std::min(room, made.size()), to);
  return {};
}

Status to_messages(const char* function, const bittern_chat_message* messages, std::size_t size,
                   std::vector<ChatMessage>& out) {
  if (messages == nullptr && size > 0) return null(function, "messages");
  for (std::size_t i = 0; i < size; ++i) {
    const bittern_chat_message& m = messages[i];
    if (m.role == nullptr) return null(function, "messages: role");
    if (m.content == nullptr && m.bytes > 0) return null(function, "messages: content");
    out.push_back({m.role, std::string(m.content != nullptr ? m.content : "", m.bytes)});
  }
  return {};
}

ChatOptions to_options(const bittern_chat_options* options) {
  ChatOptions out;
  if (options == nullptr) return out;
  out.add_generation_prompt = !options->no_generation_prompt;
  out.thinking = !options->no_thinking;
  if (options->date != nullptr) out.date = options->date;
  if (options->format != nullptr) out.format = options->format;
  return out;
}

}  // namespace

bittern_code bittern_tokenizer_load(const char* path, bittern_tokenizer** tokenizer) {
  return run([&]() -> Status {
    if (tokenizer == nullptr) return null("bittern_tokenizer_load", "tokenizer");
    *tokenizer = nullptr;
    if (path == nullptr) return null("bittern_tokenizer_load", "path");
    auto made = Tokenizer::load(path);
    if (!made) return made.status();
    std::string chat_template(made->chat_template());
    *tokenizer = new bittern_tokenizer{std::move(*made), std::move(chat_template)};
    return {};
  });
}

void bittern_tokenizer_destroy(bittern_tokenizer* tokenizer) { delete tokenizer; }

bittern_code bittern_tokenizer_encode(const bittern_tokenizer* tokenizer, const char* text,
                                      size_t bytes, const bittern_encode_options* options,
                                      int32_t* ids, size_t room, size_t* count) {
  constexpr const char* kName = "bittern_tokenizer_encode";
  return run([&]() -> Status {
    if (count == nullptr) return null(kName, "count");
    *count = 0;
    if (tokenizer == nullptr) return null(kName, "tokenizer");
    if (text == nullptr && bytes > 0) return null(kName, "text");
    EncodeOptions how;
    if (options != nullptr) how = {!options->leave_out_special, !options->plain};
    const auto made = tokenizer->tokenizer.encode({text, bytes}, how);
    if (!made) return made.status();
    return give<int32_t>(kName, *made, ids, room, count);
  });
}

bittern_code bittern_tokenizer_decode(const bittern_tokenizer* tokenizer, const int32_t* ids,
                                      size_t size, bool skip_special, char* text, size_t room,
                                      size_t* count) {
  constexpr const char* kName = "bittern_tokenizer_decode";
  return run([&]() -> Status {
    if (count == nullptr) return null(kName, "count");
    *count = 0;
    if (tokenizer == nullptr) return null(kName, "tokenizer");
    if (ids == nullptr && size > 0) return null(kName, "ids");
    const auto made = tokenizer->tokenizer.decode({ids, size}, skip_special);
    if (!made) return made.status();
    return give<char>(kName, *made, text, room, count);
  });
}

bittern_code bittern_tokenizer_describe(const bittern_tokenizer* tokenizer,
                                        bittern_tokenizer_info* info) {
  return run([&]() -> Status {
    if (tokenizer == nullptr) return null("bittern_tokenizer_describe", "tokenizer");
    if (info == nullptr) return null("bittern_tokenizer_describe", "info");
    const Tokenizer& t = tokenizer->tokenizer;
    *info = {.size = t.size(),
             .bos = t.bos().value_or(-1),
             .eos = t.eos().value_or(-1),
             .ends = t.ends().data(),
             .end_count = t.ends().size(),
             .chat_template = tokenizer->chat_template.c_str()};
    return {};
  });
}

bittern_code bittern_tokenizer_token(const bittern_tokenizer* tokenizer, int32_t id,
                                     const char** text, size_t* bytes) {
  return run([&]() -> Status {
    if (tokenizer == nullptr) return null("bittern_tokenizer_token", "tokenizer");
    if (text == nullptr) return null("bittern_tokenizer_token", "text");
    if (bytes == nullptr) return null("bittern_tokenizer_token", "bytes");
    const auto token = tokenizer->tokenizer.token(id);
    if (!token) return token.status();
    *text = token->data();
    *bytes = token->size();
    return {};
  });
}

bittern_code bittern_tokenizer_is_special(const bittern_tokenizer* tokenizer, int32_t id,
                                          bool* special) {
  return run([&]() -> Status {
    if (tokenizer == nullptr) return null("bittern_tokenizer_is_special", "tokenizer");
    if (special == nullptr) return null("bittern_tokenizer_is_special", "special");
    *special = tokenizer->tokenizer.is_special(id);
    return {};
  });
}

bittern_code bittern_tokenizer_find(const bittern_tokenizer* tokenizer, const char* text,
                                    size_t bytes, int32_t* id) {
  return run([&]() -> Status {
    if (tokenizer == nullptr) return null("bittern_tokenizer_find", "tokenizer");
    if (text == nullptr && bytes > 0) return null("bittern_tokenizer_find", "text");
    if (id == nullptr) return null("bittern_tokenizer_find", "id");
    *id = tokenizer->tokenizer.id({text, bytes}).value_or(-1);
    return {};
  });
}

bittern_code bittern_tokenizer_apply_chat(const bittern_tokenizer* tokenizer,
                                          const bittern_chat_message* messages, size_t size,
                                          const bittern_chat_options* options, int32_t* ids,
                                          size_t room, size_t* count) {
  constexpr const char* kName = "bittern_tokenizer_apply_chat";
  return run([&]() -> Status {
    if (count == nullptr) return null(kName, "count");
    *count = 0;
    if (tokenizer == nullptr) return null(kName, "tokenizer");
    std::vector<ChatMessage> all;
    BITTERN_TRY(to_messages(kName, messages, size, all));
    const auto made = tokenizer->tokenizer.apply_chat(all, to_options(options));
    if (!made) return made.status();
    return give<int32_t>(kName, *made, ids, room, count);
  });
}

bittern_code bittern_tokenizer_chat_text(const bittern_tokenizer* tokenizer,
                                         const bittern_chat_message* messages, size_t size,
                                         const bittern_chat_options* options, char* text,
                                         size_t room, size_t* count) {
  constexpr const char* kName = "bittern_tokenizer_chat_text";
  return run([&]() -> Status {
    if (count == nullptr) return null(kName, "count");
    *count = 0;
    if (tokenizer == nullptr) return null(kName, "tokenizer");
    std::vector<ChatMessage> all;
    BITTERN_TRY(to_messages(kName, messages, size, all));
    const auto made = tokenizer->tokenizer.chat_text(all, to_options(options));
    if (!made) return made.status();
    return give<char>(kName, *made, text, room, count);
  });
}

bittern_code bittern_token_stream_create(const bittern_tokenizer* tokenizer, bool keep_special,
                                         bittern_token_stream** stream) {
  return run([&]() -> Status {
    if (stream == nullptr) return null("bittern_token_stream_create", "stream");
    *stream = nullptr;
    if (tokenizer == nullptr) return null("bittern_token_stream_create", "tokenizer");
    *stream = new bittern_token_stream{TokenStream(tokenizer->tokenizer, !keep_special), ""};
    return {};
  });
}

void bittern_token_stream_destroy(bittern_token_stream* stream) { delete stream; }

bittern_code bittern_token_stream_push(bittern_token_stream* stream, int32_t id, const char** text,
                                       size_t* bytes) {
  return run([&]() -> Status {
    if (stream == nullptr) return null("bittern_token_stream_push", "stream");
    if (text == nullptr) return null("bittern_token_stream_push", "text");
    if (bytes == nullptr) return null("bittern_token_stream_push", "bytes");
    auto made = stream->stream.push(id);
    if (!made) return made.status();
    stream->text = std::move(*made);
    *text = stream->text.data();
    *bytes = stream->text.size();
    return {};
  });
}

bittern_code bittern_token_stream_finish(bittern_token_stream* stream, const char** text,
                                         size_t* bytes) {
  return run([&]() -> Status {
    if (stream == nullptr) return null("bittern_token_stream_finish", "stream");
    if (text == nullptr) return null("bittern_token_stream_finish", "text");
    if (bytes == nullptr) return null("bittern_token_stream_finish", "bytes");
    stream->text = stream->stream.finish();
    *text = stream->text.data();
    *bytes = stream->text.size();
    return {};
  });
}
