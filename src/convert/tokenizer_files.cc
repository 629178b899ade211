#include "convert/tokenizer_files.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <optional>

#include "formats/json_events.h"
#include "formats/json_tree.h"
#include "formats/mapped_file.h"
#include "formats/side_file.h"

namespace bittern {
namespace {

using Json = nlohmann::ordered_json;

Result<MappedFile> open_small(const std::string& path) {
  BITTERN_TRY(check_side_file(path));
  auto file = MappedFile::open(path);
  if (file && file->bytes().size() > kMostTokenizerBytes)
    return invalid(path + ": " + std::to_string(file->bytes().size()) +
                   " bytes, expected at most " + std::to_string(kMostTokenizerBytes));
  return file;
}

// ---- tokenizer.json ----

// One pass makes lists of tokens and merges, and a JSON text of the rest, which is small.
class TokenizerReader : public JsonEvents {
 public:
  TokenizerReader(const std::string& path, TokenizerJson& out)
      : JsonEvents(path, path + ": not valid JSON"), path_(path), out_(out) {}
  const std::string& rest() const { return rest_; }

 protected:
  Status begin(bool object) override {
    if (depth() == 0 && !object) return invalid(path_ + ": a list, expected an object");
    switch (list()) {
      case List::none:
        separate();
        rest_ += object ? '{' : '[';
        closing_ += object ? '}' : ']';
        return {};
      case List::added:
        if (depth() == 1 && !object) return {};
        if (depth() == 2 && object) {
          out_.added.emplace_back();
          if (out_.added.size() > kMostAddedTokens)
            return too_many("added_tokens", kMostAddedTokens);
          return {};
        }
        return invalid(path_ + ": added_tokens: expected a list of objects");
      case List::vocabulary:
        if (depth() == 2 && object) return {};
        return invalid(path_ +
                       ": model.vocab: expected an object of ids, as model.type BPE has it");
      case List::merges:
        if (!object && depth() == 2) return {};
        if (!object && depth() == 3) {
          parts_ = 0;
          return {};
        }
        return invalid(path_ + ": model.merges: expected a list of pairs");
    }
    return {};
  }

  Status key(const std::string& text) override {
    if (depth() == 1) section_ = text;
    if (depth() == 2) model_key_ = text;
    if ((depth() == 1 && section_ == "added_tokens") ||
        (depth() == 2 && section_ == "model" && (text == "vocab" || text == "merges"))) {
      bool& seen = text == "vocab" ? seen_vocab_ : text == "merges" ? seen_merges_ : seen_added_;
      if (std::exchange(seen, true))
        return invalid(path_ + ": key " + in_quotes(text) + " twice, expected once");
      return {};
    }
    if (list() == List::none) {
      separate();
      rest_ += Json(text).dump() + ':';
    }
    key_ = text;
    return {};
  }

  Status scalar(const JsonScalar& value) override {
    switch (list()) {
      case List::none:
        separate();
        rest_ += text_of(value);
        return {};
      case List::added: return depth() == 3 ? added(value) : wrong("added_tokens", value, "a list");
      case List::vocabulary:
        if (depth() != 3) return wrong("model.vocab", value, "an object");
        if (value.kind != JsonScalar::natural || value.number >= kMostTokens)
          return invalid(
              path_ + ": model.vocab: " + in_quotes(key_) + ": " +
              (value.kind == JsonScalar::natural ? std::to_string(value.number) : value.what()) +
              ", expected an id below " + std::to_string(kMostTokens));
        if (out_.vocabulary.size() == kMostTokens) return too_many("model.vocab", kMostTokens);
        out_.vocabulary.push_back({out_.texts.add(key_), static_cast<std::uint32_t>(value.number)});
        return {};
      case List::merges:
        if (value.kind != JsonScalar::text || depth() < 3)
          return wrong("model.merges", value, "a list of pairs of tokens");
        if (out_.merges.size() == kMostMerges) return too_many("model.merges", kMostMerges);
        return depth() == 3 ? merge(*value.string) : part(*value.string);
    }
    return {};
  }

  Status end() override {
    if (list() == List::none) {
      rest_ += closing_.back();
      closing_.pop_back();
      return {};
    }
    if (list() == List::merges && depth() == 3 && parts_ != 2)
      return invalid(merge_name() + "a list of " + std::to_string(parts_) +
                     ", expected two tokens");
    if (list() == List::added && depth() == 2) {
      const AddedToken& token = out_.added.back();
      if (!token.has_id || token.content.empty())
        return invalid(path_ + ": added_tokens: token " + std::to_string(out_.added.size() - 1) +
                       " lacks its id or content, expected both");
    }
    return {};
  }

 private:
  enum class List { none, added, vocabulary, merges };
  List list() const {
    if (depth() >= 1 && section_ == "added_tokens") return List::added;
    if (depth() >= 2 && section_ == "model") {
      if (model_key_ == "vocab") return List::vocabulary;
      if (model_key_ == "merges") return List::merges;
    }
    return List::none;
  }

  void separate() {
    const char last = rest_.empty() ? '[' : rest_.back();
    if (last != '{' && last != '[' && last != ':') rest_ += ',';
  }
  static std::string text_of(const JsonScalar& value) {
    switch (value.kind) {
      case JsonScalar::null: return "null";
      case JsonScalar::boolean: return value.truth ? "true" : "false";
      case JsonScalar::natural: return std::to_string(value.number);
      case JsonScalar::negative: return std::to_string(value.integer);
      case JsonScalar::fraction: return Json(value.real).dump();
      case JsonScalar::text: return Json(*value.string).dump();
    }
    return {};
  }

  Status wrong(const char* what, const JsonScalar& value, const char* expected) const {
    return invalid(path_ + ": " + what + ": " + value.what() + ", expected " + expected);
  }
  Status too_many(const char* what, std::size_t most) const {
    return invalid(path_ + ": " + what + ": more than " + std::to_string(most) + ", expected less");
  }
  std::string merge_name() const {
    return path_ + ": model.merges: merge " + std::to_string(out_.merges.size() - (parts_ == 2)) +
           ": ";
  }

  Status added(const JsonScalar& value) {
    AddedToken& token = out_.added.back();
    const std::string name = "added_tokens." + key_;
    if (key_ == "id") {
      if (value.kind != JsonScalar::natural || value.number >= kMostTokens)
        return wrong(name.c_str(), value, ("an id below " + std::to_string(kMostTokens)).c_str());
      token.id = static_cast<std::uint32_t>(value.number);
      token.has_id = true;
    } else if (key_ == "content") {
      if (value.kind != JsonScalar::text) return wrong(name.c_str(), value, "a string");
      token.content = *value.string;
    } else if (key_ == "special" || key_ == "lstrip" || key_ == "rstrip" || key_ == "single_word" ||
               key_ == "normalized") {
      if (value.kind != JsonScalar::boolean) return wrong(name.c_str(), value, "a boolean");
      if (key_ == "special") token.special = value.truth;
      if (key_ == "lstrip") token.lstrip = value.truth;
      if (key_ == "rstrip") token.rstrip = value.truth;
      if (key_ == "single_word") token.single_word = value.truth;
      if (key_ == "normalized") token.normalized = value.truth;
    }
    return {};
  }

  // "left right", as files were before tokens could have spaces.
  Status merge(const std::string& text) {
    const std::size_t space = text.find(' ');
    if (space == text.npos || text.find(' ', space + 1) != text.npos)
      return invalid(path_ + ": model.merges: merge " + std::to_string(out_.merges.size()) + ", " +
                     in_quotes(text) + ": expected two tokens and a space between them");
    const std::string_view view = text;
    out_.merges.push_back(
        {out_.texts.add(view.substr(0, space)), out_.texts.add(view.substr(space + 1))});
    return {};
  }
  Status part(const std::string& text) {
    const TextPool::Span span = out_.texts.add(text);
    if (parts_ == 0) {
      left_ = span;
    } else if (parts_ == 1) {
      out_.merges.push_back({left_, span});
    }
    ++parts_;
    return {};
  }

  const std::string path_;
  TokenizerJson& out_;
  std::string rest_, closing_;
  std::string section_, model_key_, key_;
  bool seen_added_ = false, seen_vocab_ = false, seen_merges_ = false;
  TextPool::Span left_;
  int parts_ = 0;
};

}  // namespace

Result<Json> read_json_file(const std::string& path) {
  if (!is_there(path)) return Json();
  const auto file = open_small(path);
  if (!file) return file.status();
  auto tree = parse_json_tree(path, file->bytes(), kMostTokenizerBytes, kMostJsonValues);
  if (tree && !tree->is_object()) return invalid(path + ": expected an object");
  return tree;
}

Result<TokenizerJson> read_tokenizer_json(const std::string& path) {
  const auto file = open_small(path);
  if (!file) return file.status();
  TokenizerJson out;
  TokenizerReader reader(path, out);
  BITTERN_TRY(reader.parse(file->bytes()));
  const std::string& rest = reader.rest();
  auto tree =
      parse_json_tree(path, std::as_bytes(std::span(rest)), kMostTokenizerBytes, kMostJsonValues);
  if (!tree) return tree.status();
  out.rest = std::move(*tree);
  return out;
}

// ---- tokenizer.model ----

namespace {

// Protocol buffers: fields of a number and a wire type, all of it checked against the bytes there.
struct Field {
  std::uint32_t number = 0;
  std::uint64_t integer = 0;  // of wire types 0 and 5
  std::string_view bytes;     // of wire type 2
};

std::optional<std::uint64_t> read_varint(std::string_view& from) {
  std::uint64_t value = 0;
  for (int shift = 0; shift < 64 && !from.empty(); shift += 7) {
    const auto byte = static_cast<unsigned char>(from[0]);
    from.remove_prefix(1);
    value |= std::uint64_t{byte & 0x7fU} << shift;
    if (byte < 0x80) return value;
  }
  return std::nullopt;
}

std::optional<Field> read_field(std::string_view& from) {
  const auto tag = read_varint(from);
  if (!tag || *tag >> 3 == 0 || *tag >> 32 != 0) return std::nullopt;
  Field field;
  field.number = static_cast<std::uint32_t>(*tag >> 3);
  std::uint64_t size = 0;
  switch (*tag & 7) {
    case 0: {
      const auto value = read_varint(from);
      if (!value) return std::nullopt;
      field.integer = *value;
      return field;
    }
    case 1: size = 8; break;
    case 2: {
      const auto length = read_varint(from);
      if (!length) return std::nullopt;
      size = *length;
      break;
    }
    case 5: size = 4; break;
    default: return std::nullopt;
  }
  if (size > from.size()) return std::nullopt;
  field.bytes = from.substr(0, size);
  from.remove_prefix(size);
  if ((*tag & 7) == 5) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, field.bytes.data(), 4);
    field.integer = bits;
  }
  return field;
}

// f(field) for each; false when the bytes are no message or f says so.
template <class F>
bool each_field(std::string_view message, F&& f) {
  while (!message.empty()) {
    const auto field = read_field(message);
    if (!field || !f(*field)) return false;
  }
  return true;
}

}  // namespace

Result<SentencePieces> read_sentencepiece(const std::string& path) {
  const auto file = open_small(path);
  if (!file) return file.status();
  const std::string_view text(reinterpret_cast<const char*>(file->bytes().data()),
                              file->bytes().size());
  SentencePieces out;
  Status status;
  const auto refuse = [&](Status why) {
    status = std::move(why);
    return false;
  };
  std::uint64_t model_type = 1;  // unigram
  bool remove_extra_whitespaces = true, escape_whitespaces = true, charsmap = false;
  const auto piece = [&](std::string_view message) {
    if (out.pieces.size() == kMostTokens)
      return refuse(
          invalid(path + ": more than " + std::to_string(kMostTokens) + " pieces, expected less"));
    SentencePieces::Piece p;
    std::string_view piece_text;
    std::uint64_t type = 1;
    const bool whole = each_field(message, [&](const Field& f) {
      if (f.number == 1) piece_text = f.bytes;
      if (f.number == 2) p.score = std::bit_cast<float>(static_cast<std::uint32_t>(f.integer));
      if (f.number == 3) type = f.integer;
      return true;
    });
    const std::string where = path + ": piece " + std::to_string(out.pieces.size()) + ": ";
    if (!whole) return refuse(invalid(where + "broken off, expected a message"));
    if (piece_text.empty() || !is_utf8(piece_text))
      return refuse(invalid(where + in_quotes(piece_text) + ", expected UTF-8 text"));
    if (!std::isfinite(p.score))
      return refuse(invalid(where + "its score is not finite, expected a number"));
    if (type < 1 || type > 6)
      return refuse(invalid(where + "type " + std::to_string(type) + ", expected 1 to 6"));
    p.text = out.texts.add(piece_text);
    p.type = static_cast<TokenType>(type);  // sentencepiece's numbers are GGUF's
    out.pieces.push_back(p);
    return true;
  };
  const auto id = [](std::uint64_t value) {
    return static_cast<std::int64_t>(static_cast<std::int32_t>(value));
  };
  const bool whole = each_field(text, [&](const Field& f) {
    if (f.number == 1) return piece(f.bytes);
    if (f.number == 2) {
      return each_field(f.bytes, [&](const Field& g) {
        if (g.number == 3) model_type = g.integer;
        if (g.number == 40) out.unk = id(g.integer);
        if (g.number == 41) out.bos = id(g.integer);
        if (g.number == 42) out.eos = id(g.integer);
        if (g.number == 43) out.pad = id(g.integer);
        return true;
      });
    }
    if (f.number == 3) {
      return each_field(f.bytes, [&](const Field& g) {
        if (g.number == 2) charsmap = !g.bytes.empty();
        if (g.number == 3) out.add_dummy_prefix = g.integer != 0;
        if (g.number == 4) remove_extra_whitespaces = g.integer != 0;
        if (g.number == 5) escape_whitespaces = g.integer != 0;
        return true;
      });
    }
    return true;
  });
  if (!status.ok()) return status;
  if (!whole || out.pieces.empty()) return invalid(path + ": not a sentencepiece model");
  constexpr std::uint64_t kBpe = 2;
  if (model_type != kBpe)
    return unsupported(path + ": trainer_spec.model_type " + std::to_string(model_type) +
                       ", expected 2, BPE");
  if (charsmap)
    return unsupported(
        path + ": normalizer_spec changes letters, which GGUF cannot say: expected identity");
  if (remove_extra_whitespaces || !escape_whitespaces)
    return unsupported(
        path + ": normalizer_spec removes or keeps spaces, expected all of them marked by U+2581");
  return out;
}

}  // namespace bittern
