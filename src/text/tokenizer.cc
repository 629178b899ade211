// The tokeniser that callers see, and tokens to text.
#include "bittern/tokenizer.h"

#include <algorithm>
#include <filesystem>

#include "core/guarded.h"
#include "text/tables.h"
#include "text/utf8.h"

namespace bittern {

namespace text {

const std::array<std::string, 256>& byte_letters() {
  static const auto letters = [] {
    std::array<std::string, 256> out;
    unsigned next = 256;  // bytes that cannot be printed get the letters from U+0100 on
    for (unsigned byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) ||
                             (byte >= 0xae && byte <= 0xff);
      const unsigned point = printable ? byte : next++;
      if (point < 0x80) {
        out[byte] = {static_cast<char>(point)};
      } else {
        out[byte] = {static_cast<char>(0xc0 | point >> 6), static_cast<char>(0x80 | (point & 63))};
      }
    }
    return out;
  }();
  return letters;
}

std::optional<std::string> bytes_of_letters(std::string_view text) {
  static const auto bytes = [] {  // by code point
    std::array<int, 512> out;
    out.fill(-1);
    for (int byte = 0; byte < 256; ++byte) {
      const std::string& letter = byte_letters()[static_cast<std::size_t>(byte)];
      const auto first = static_cast<unsigned char>(letter[0]);
      const std::size_t point =
          letter.size() == 1 ? first
                             : (first & 31u) << 6 | (static_cast<unsigned char>(letter[1]) & 63u);
      out[point] = byte;
    }
    return out;
  }();
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i]);
    const bool two = first >= 0xc2 && first < 0xe0 && i + 1 < text.size();
    const std::size_t point =
        two ? (first & 31u) << 6 | (static_cast<unsigned char>(text[i + 1]) & 63u) : first;
    if ((first >= 0x80 && !two) || point >= bytes.size() || bytes[point] < 0) return {};
    out += static_cast<char>(bytes[point]);
    i += two ? 2 : 1;
  }
  return out;
}

Status TokenizerTables::finish() {
  views.assign(texts.begin(), texts.end());
  index = TokenIndex(texts.size());
  for (std::uint32_t id = 0; id < views.size(); ++id) {
    if (const std::int64_t other = index.put(views, id); other >= 0)
      return invalid(path + ": tokens " + std::to_string(other) + " and " + std::to_string(id) +
                     " are the same, expected each once");
  }
  special.assign(texts.size(), false);
  pieces.resize(texts.size());
  std::vector<bool> is_added(texts.size(), false);
  for (std::uint32_t i = 0; i < added.size(); ++i) {
    AddedText& token = added[i];
    const auto id = static_cast<std::size_t>(token.id);
    if (token.content.empty())
      return invalid(path + ": token " + std::to_string(id) + " is empty, expected text");
    is_added[id] = true;
    special[id] = token.special;
    token.control = token.special || divides_turns(token.content);
    (token.normalized ? normalized_trie_ : added_trie_).put(token.content, i);
    (token.normalized && !token.control ? normalized_plain_trie_ : chat_trie_)
        .put(token.content, i);
  }
  byte_ids.fill(-1);
  for (std::uint32_t id = 0; id < texts.size(); ++id) {
    std::string& piece = pieces[id] = texts[id];
    const int byte = kind == Kind::byte_level ? -1 : byte_token(texts[id]);
    if (kind == Kind::byte_level) {
      if (is_added[id] && like_llama_cpp) continue;
      if (auto bytes = bytes_of_letters(texts[id])) piece = std::move(*bytes);
      if (!is_added[id] && piece.size() == 1)
        byte_ids[static_cast<unsigned char>(piece[0])] = static_cast<std::int32_t>(id);
    } else if (byte >= 0 && !is_added[id]) {
      piece.assign(1, static_cast<char>(byte));
      byte_ids[static_cast<std::size_t>(byte)] = static_cast<std::int32_t>(id);
    } else if (!is_added[id]) {
      std::string spaced;
      for (std::size_t i = 0; i < piece.size();) {
        const bool mark = piece.compare(i, 3, kSpaceMark) == 0;
        spaced += mark ? ' ' : piece[i];
        i += mark ? 3 : 1;
      }
      piece = std::move(spaced);
    }
  }
  return {};
}

}  // namespace text

namespace {

Status check_id(const char* what, const text::TokenizerTables& t, std::int32_t id) {
  if (id >= 0 && static_cast<std::size_t>(id) < t.texts.size()) return {};
  return invalid(std::string(what) + ": token " + std::to_string(id) + ", expected 0.." +
                 std::to_string(t.texts.size() - 1));
}

// The same status, with the file in front.
Status invalid_in(const std::string& path, const Status& status) {
  return {status.code(), path + ": " + std::string(status.message())};
}

}  // namespace

Result<Tokenizer> Tokenizer::load(const std::string& path) noexcept {
  return guarded(path, [&]() -> Result<Tokenizer> {
    std::error_code error;
    const bool folder = std::filesystem::is_directory(path, error);
    if (!folder && path.ends_with(".safetensors"))
      return invalid(path + ": has no tokeniser, expected the folder that has it, or a .gguf file");
    auto tables = folder ? text::read_folder_tokenizer(path) : text::read_gguf_tokenizer(path);
    if (!tables) return tables.status();
    return Tokenizer(std::make_shared<text::TokenizerTables>(std::move(*tables)));
  });
}

Result<std::vector<std::int32_t>> Tokenizer::encode(std::string_view text,
                                                    const EncodeOptions& options) const noexcept {
  return guarded("encode", [&]() -> Result<std::vector<std::int32_t>> {
    std::vector<std::int32_t> ids;
    BITTERN_TRY(tables_->encode(text, options, ids));
    return ids;
  });
}

Result<std::string> Tokenizer::decode(std::span<const std::int32_t> ids,
                                      bool skip_special) const noexcept {
  return guarded("decode", [&]() -> Result<std::string> {
    std::string text;
    for (const std::int32_t id : ids) {
      BITTERN_TRY(check_id("decode", *tables_, id));
      if (!skip_special || !is_special(id)) text += tables_->pieces[static_cast<std::size_t>(id)];
    }
    if (tables_->strip_first_space && text.starts_with(' ')) text.erase(0, 1);
    return text;
  });
}

std::int64_t Tokenizer::size() const noexcept {
  return static_cast<std::int64_t>(tables_->texts.size());
}

Result<std::string_view> Tokenizer::token(std::int32_t id) const noexcept {
  return guarded("token", [&]() -> Result<std::string_view> {
    BITTERN_TRY(check_id("token", *tables_, id));
    return std::string_view(tables_->texts[static_cast<std::size_t>(id)]);
  });
}

std::optional<std::int32_t> Tokenizer::id(std::string_view token) const noexcept {
  const std::int64_t found = tables_->find(token);
  if (found < 0) return {};
  return static_cast<std::int32_t>(found);
}

bool Tokenizer::is_special(std::int32_t id) const noexcept {
  return id >= 0 && static_cast<std::size_t>(id) < tables_->special.size() &&
         tables_->special[static_cast<std::size_t>(id)];
}

std::optional<std::int32_t> Tokenizer::bos() const noexcept { return tables_->bos; }
std::optional<std::int32_t> Tokenizer::eos() const noexcept { return tables_->eos; }
std::span<const std::int32_t> Tokenizer::ends() const noexcept { return tables_->ends; }
std::string_view Tokenizer::chat_template() const noexcept { return tables_->chat_template; }

namespace {

Result<std::vector<text::ChatPart>> parts_of(const text::TokenizerTables& t,
                                             std::span<const ChatMessage> messages,
                                             const ChatOptions& options) {
  auto format = text::chat_format(t.chat_template, options.format);
  if (!format) return invalid_in(t.path, format.status());
  const std::string_view bos =
      t.bos ? t.texts[static_cast<std::size_t>(*t.bos)] : std::string_view();
  return text::chat_parts(*format, bos, messages, options);
}

}  // namespace

Result<std::vector<std::int32_t>> Tokenizer::apply_chat(std::span<const ChatMessage> messages,
                                                        const ChatOptions& options) const noexcept {
  return guarded("apply_chat", [&]() -> Result<std::vector<std::int32_t>> {
    const auto parts = parts_of(*tables_, messages, options);
    if (!parts) return parts.status();
    std::vector<std::int32_t> ids;
    BITTERN_TRY(tables_->encode_chat(*parts, ids));
    return ids;
  });
}

Result<std::string> Tokenizer::chat_text(std::span<const ChatMessage> messages,
                                         const ChatOptions& options) const noexcept {
  return guarded("chat_text", [&]() -> Result<std::string> {
    const auto parts = parts_of(*tables_, messages, options);
    if (!parts) return parts.status();
    std::string text;
    for (const text::ChatPart& part : *parts) text += part.text;
    return text;
  });
}

Result<std::string> TokenStream::push(std::int32_t id) noexcept {
  return guarded("push", [&]() -> Result<std::string> {
    const text::TokenizerTables& t = *tokenizer_.tables_;
    BITTERN_TRY(check_id("push", t, id));
    if (skip_special_ && tokenizer_.is_special(id)) return std::string();
    std::string_view piece = t.pieces[static_cast<std::size_t>(id)];
    if (!begun_ && t.strip_first_space && piece.starts_with(' ')) piece.remove_prefix(1);
    std::string pending = pending_;
    pending += piece;
    std::string out = text::take_complete(pending);
    pending_ = std::move(pending);
    begun_ = true;
    return out;
  });
}

std::string TokenStream::finish() noexcept {
  std::string out = pending_.empty() ? std::string() : std::string(text::kReplacement);
  pending_.clear();
  begun_ = false;
  return out;
}

}  // namespace bittern
