// Tokenisers of a folder: tokenizer.json and tokenizer.model.
#include <bit>
#include <cmath>
#include <iterator>

#include "convert/tokenizer_test.h"

namespace bittern {
namespace {

using namespace tokenizer_test;

// ---- tokenizer.json ----

Json small_json() {
  return Json::parse(R"({
    "version": "1.0",
    "added_tokens": [{"id": 5, "content": "<s>", "special": true, "normalized": false}],
    "normalizer": null,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
    "post_processor": null,
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "unk_token": null,
              "vocab": {"a": 0, "b": 1, "ab": 3}, "merges": ["a b"]}})");
}
Metadata convert(const Json& json, std::int64_t vocab_size = 6, const char* config = "{}") {
  const TempFolder folder;
  folder.put("tokenizer.json", json.dump());
  folder.put("tokenizer_config.json", config);
  return to_gguf(folder, vocab_size);
}

TEST(Tokenizer, MissingIdsAreFilled) {
  const Metadata out = convert(small_json(), 7, R"({"bos_token": {"content": "<s>"}})");
  ASSERT_EQ(out.error, "");
  EXPECT_TRUE(out.has("tokenizer.ggml.tokens",
                      strings({"a", "b", "[PAD2]", "ab", "[PAD4]", "<s>", "[PAD6]"})));
  EXPECT_TRUE(out.has("tokenizer.ggml.token_type", integers({1, 1, 5, 1, 5, 3, 5})));
  EXPECT_TRUE(out.has("tokenizer.ggml.merges", strings({"a b"})));
  EXPECT_TRUE(out.has("tokenizer.ggml.bos_token_id", id(5)));
  EXPECT_TRUE(out.has("tokenizer.ggml.add_bos_token", GgufData(false)));
  EXPECT_TRUE(out.has("tokenizer.ggml.pre", GgufData("gpt-2")));
}

TEST(Tokenizer, SpellingsOfOnePreTokenizer) {
  const auto pre = [](const char* text, const char* normalizer = "null") {
    Json json = small_json();
    json["pre_tokenizer"] = Json::parse(text);
    json["normalizer"] = Json::parse(normalizer);
    return convert(json);
  };
  const char* digits =
      R"({"type":"Sequence","pretokenizers":[{"type":"Digits","individual_digits":true},
          {"type":"ByteLevel","add_prefix_space":false}]})";
  EXPECT_TRUE(pre(digits).has("tokenizer.ggml.pre", GgufData("smollm")));
  EXPECT_TRUE(pre(digits, R"({"type":"NFC"})").has("tokenizer.ggml.pre", GgufData("command-r")));
  // Removed what does not match, a line break spelt as itself.
  EXPECT_TRUE(pre(R"({"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":
      "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\n]+|\\s+(?!\\S)|\\s+"},
      "behavior":"Removed","invert":true},{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]})",
                  R"({"type":"Sequence","normalizers":[{"type":"NFC"}]})")
                  .has("tokenizer.ggml.pre", GgufData("qwen2")));
}

TEST(Tokenizer, PostProcessorDecidesWhatIsAdded) {
  Json json = small_json();
  const char* config = R"({"bos_token": "<s>", "add_bos_token": true})";
  EXPECT_TRUE(convert(json, 6, config).has("tokenizer.ggml.add_bos_token", GgufData(true)));
  json["post_processor"] = Json::parse(R"({"type":"ByteLevel"})");
  EXPECT_TRUE(convert(json, 6, config).has("tokenizer.ggml.add_bos_token", GgufData(false)));
  json["post_processor"] = Json::parse(R"({"type":"Sequence","processors":[{"type":"ByteLevel"},
      {"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},
       {"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{}}]})");
  EXPECT_TRUE(convert(json, 6, config).has("tokenizer.ggml.add_bos_token", GgufData(true)));
  json["post_processor"]["processors"][1]["single"][0]["SpecialToken"]["id"] = "b";
  EXPECT_EQ(
      convert(json, 6, config).error,
      "tokenizer.json: post_processor: puts \"b\" before the text, expected one bos_token at most, "
      "which is all GGUF can say");
}

TEST(Tokenizer, ChatTemplateFileComesFirst) {
  const TempFolder folder;
  folder.put("tokenizer.json", small_json().dump());
  folder.put("tokenizer_config.json", R"({"chat_template": "old"})");
  EXPECT_TRUE(to_gguf(folder, 6).has("tokenizer.chat_template", GgufData("old")));
  folder.put("chat_template.jinja", "new");
  EXPECT_TRUE(to_gguf(folder, 6).has("tokenizer.chat_template", GgufData("new")));
  folder.put("chat_template.jinja", "\xff");
  EXPECT_EQ(to_gguf(folder, 6).error,
            "chat_template.jinja: expected UTF-8 text of at most 67108864 bytes");
}

TEST(Tokenizer, BadTokenizerJsonIsNamed) {
  const auto error = [](const char* pointer, const char* value) {
    Json json = small_json();
    json[Json::json_pointer(pointer)] = Json::parse(value);
    return convert(json).error;
  };
  EXPECT_EQ(error("/model/vocab/a", "\"x\""),
            "tokenizer.json: model.vocab: \"a\": a string, expected an id below 1048576");
  EXPECT_EQ(error("/model/vocab/a", "1048576"),
            "tokenizer.json: model.vocab: \"a\": 1048576, expected an id below 1048576");
  EXPECT_EQ(error("/model/vocab/a", "-1"),
            "tokenizer.json: model.vocab: \"a\": a number, expected an id below 1048576");
  EXPECT_EQ(
      error("/model/vocab/a", "6"),
      "tokenizer.json: model.vocab: token 6, \"a\": expected an id below the model's 6 tokens");
  EXPECT_EQ(error("/model/vocab/a", "1"),
            "tokenizer.json: model.vocab: token 1, \"b\": the id of \"a\" too, expected one token");
  EXPECT_EQ(error("/model/vocab", "[]"),
            "tokenizer.json: model.vocab: expected an object of ids, as model.type BPE has it");
  EXPECT_EQ(error("/model/vocab", "7"),
            "tokenizer.json: model.vocab: a number, expected an object");
  EXPECT_EQ(error("/model/merges", "[\"a b\", \"a b\"]"),
            "tokenizer.json: model.merges: \"a\" \"b\" twice, expected once");
  EXPECT_EQ(
      error("/model/merges", "[[\"a\", \"x\"]]"),
      "tokenizer.json: model.merges: merge 0, \"a\" \"x\": \"x\" is not a token of the vocabulary");
  EXPECT_EQ(error("/model/merges", "[[\"a\"]]"),
            "tokenizer.json: model.merges: merge 0: a list of 1, expected two tokens");
  EXPECT_EQ(error("/model/merges", "[\"ab\"]"),
            "tokenizer.json: model.merges: merge 0, \"ab\": expected two tokens and a space "
            "between them");
  EXPECT_EQ(error("/model/merges", "[7]"),
            "tokenizer.json: model.merges: a number, expected a list of pairs of tokens");
  EXPECT_EQ(error("/model/merges", "{}"), "tokenizer.json: model.merges: expected a list of pairs");
  EXPECT_EQ(error("/model/type", "\"WordPiece\""),
            "tokenizer.json: model.type: \"WordPiece\", expected BPE");
  EXPECT_EQ(error("/model/end_of_word_suffix", "\"</w>\""),
            "tokenizer.json: model.end_of_word_suffix: \"</w>\", which GGUF cannot say");
  EXPECT_EQ(error("/model", "null"), "tokenizer.json: model: missing, expected an object");
  EXPECT_EQ(error("/added_tokens", "{}"),
            "tokenizer.json: added_tokens: expected a list of objects");
  EXPECT_EQ(error("/added_tokens", "[{\"id\": 5}]"),
            "tokenizer.json: added_tokens: token 0 lacks its id or content, expected both");
  EXPECT_EQ(
      error("/added_tokens/0/id", "1"),
      "tokenizer.json: added_tokens: token 1, \"<s>\": the id of \"b\" too, expected one token");
  EXPECT_EQ(error("/added_tokens/0/id", "\"1\""),
            "tokenizer.json: added_tokens.id: a string, expected an id below 1048576");
  EXPECT_EQ(error("/added_tokens/0/content", "\"a\""),
            "tokenizer.json: tokens 0 and 5 are both \"a\", expected each once");
  EXPECT_EQ(error("/added_tokens/0/rstrip", "true"),
            "tokenizer.json: added_tokens: \"<s>\" has lstrip, rstrip or single_word, which "
            "GGUF cannot express");
  EXPECT_EQ(error("/added_tokens/0/special", "1"),
            "tokenizer.json: added_tokens.special: a number, expected a boolean");
  EXPECT_EQ(
      error("/normalizer", R"({"type":"NFKC"})"),
      "tokenizer.json: normalizer: NFKC, which GGUF cannot say: expected none, NFC, or spaces "
      "marked by U+2581");
  EXPECT_EQ(
      error("/pre_tokenizer", R"({"type":"Whitespace"})"),
      "tokenizer.json: pre_tokenizer: Whitespace: expected Split, Digits, Punctuation, ByteLevel "
      "or Metaspace");
  EXPECT_EQ(
      error("/pre_tokenizer/add_prefix_space", "true"),
      "tokenizer.json: pre_tokenizer: ByteLevel: add_prefix_space true, which GGUF cannot say");
  EXPECT_EQ(
      error("/pre_tokenizer/use_regex", "false"),
      "tokenizer.json: pre_tokenizer: cuts by nothing, expected what llama.cpp knows as one of " +
          pre_tokenizer_names());
  EXPECT_EQ(error("/pre_tokenizer", R"({"type":"Sequence"})"),
            "tokenizer.json: pre_tokenizer: a Sequence without pretokenizers");
  EXPECT_EQ(error("/pre_tokenizer", "null"),
            "tokenizer.json: expected byte-level BPE, or BPE with byte_fallback and spaces marked "
            "by U+2581");
  EXPECT_EQ(error("/post_processor", R"({"type":"RobertaProcessing"})"),
            "tokenizer.json: post_processor: RobertaProcessing, expected ByteLevel or "
            "TemplateProcessing");
  EXPECT_EQ(convert(small_json(), 0).error,
            "tokenizer.json: a model of 0 tokens, expected 1 to 1048576");
  EXPECT_EQ(convert(small_json(), 6, R"({"bos_token": "x"})").error,
            "tokenizer_config.json: bos_token: \"x\" is not a token of the vocabulary");
  EXPECT_EQ(convert(small_json(), 6, R"({"chat_template": 7})").error,
            "tokenizer_config.json: chat_template: expected a string or a list of named templates");
  EXPECT_EQ(
      convert(small_json(), 6, R"({"chat_template": [{"name": "a/b", "template": ""}]})").error,
      "tokenizer_config.json: chat_template: a template called \"a/b\", expected letters, digits "
      "and _");
  EXPECT_EQ(convert(small_json(), 6, R"({"a": 1, "a": 2})").error,
            "tokenizer_config.json: \"a\": given twice, expected once");
  EXPECT_EQ(convert(small_json(), 6, "[]").error, "tokenizer_config.json: expected an object");

  const auto raw = [](const std::string& text) {
    const TempFolder folder;
    folder.put("tokenizer.json", text);
    return to_gguf(folder, 6).error;
  };
  EXPECT_EQ(raw("[]"), "tokenizer.json: a list, expected an object");
  EXPECT_EQ(raw(R"({"model": {"vocab": {}, "vocab": {}}})"),
            "tokenizer.json: key \"vocab\" twice, expected once");
  EXPECT_EQ(raw("{").rfind("tokenizer.json: not valid JSON", 0), 0u);
  EXPECT_NE(raw("{\"x\": [" + std::string(1200000, '0') + "]}"), "");
  std::string many = "{\"x\": [0";
  for (int i = 0; i < 600000; ++i) many += ",0";
  EXPECT_EQ(raw(many + "]}"), "tokenizer.json: more than 524288 values, expected fewer");
  EXPECT_NE(to_gguf(TempFolder(), 6).error, "");  // nothing there
}

TEST(Tokenizer, MergesThatScoresCannotSayAreRefused) {
  const Json good = from_gguf(sentencepiece(some_pieces())).json("tokenizer.json");
  constexpr const char* kConfig = R"({"unk_token": "<unk>", "bos_token": "<s>"})";
  const auto error = [](const Json& json) { return convert(json, 269, kConfig).error; };
  EXPECT_EQ(error(good), "");
  Json json = good;
  json["model"]["merges"].erase(3);
  EXPECT_EQ(error(json),
            "tokenizer.json: model.merges: 1 of the 2 pairs of tokens that make \"\u2581ab\", "
            "expected all: "
            "llama.cpp joins any");
  json = good;
  std::swap(json["model"]["merges"][1], json["model"]["merges"][2]);
  EXPECT_NE(error(json).find("is between those of another token"), std::string::npos);
  json = good;
  std::swap(json["model"]["merges"][4], json["model"]["merges"][6]);  // shorter runs first
  EXPECT_NE(error(json).find("is between those of another token"), std::string::npos);
  json = good;
  json["added_tokens"].push_back({{"id", 264}, {"content", "b"}, {"special", false}});
  EXPECT_EQ(error(json),
            "tokenizer.json: model.merges: \"ab\" is joined from \"b\", expected no added token: "
            "llama.cpp "
            "finds it in the text beforehand");
  // Merges of an added token itself say nothing; its spaces are looked for as they are.
  json = good;
  json["added_tokens"].push_back({{"id", 261}, {"content", "\u2581ab"}, {"special", false}});
  EXPECT_EQ(error(json), "");
  json = good;
  json["model"]["vocab"].erase("<0x0A>");
  EXPECT_EQ(error(json),
            "tokenizer.json: model.vocab: lacks \"<0x0A>\", expected a token for every byte");
  json = good;
  json["pre_tokenizer"] = Json::parse(R"({"type":"Digits"})");
  EXPECT_EQ(error(json),
            "tokenizer.json: pre_tokenizer: cuts by \"\\\\p{N}+\", expected none where spaces are "
            "marked by "
            "U+2581");
  json = good;
  json["normalizer"] = nullptr;
  json["pre_tokenizer"] = Json::parse(
      "{\"type\":\"Metaspace\",\"replacement\":\"\u2581\",\"prepend_scheme\":\"never\",\"split\":"
      "false}");
  EXPECT_TRUE(convert(json, 269, kConfig).has("tokenizer.ggml.add_space_prefix", GgufData(false)));
  json["pre_tokenizer"]["split"] = true;
  EXPECT_EQ(error(json), "tokenizer.json: pre_tokenizer: Metaspace: split true, expected false");
}

// ---- tokenizer.model ----

std::string varint(std::uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  return out + static_cast<char>(value);
}
std::string number(std::uint64_t field, std::uint64_t value) {
  return varint(field << 3) + varint(value);
}
std::string message(std::uint64_t field, const std::string& bytes) {
  return varint(field << 3 | 2) + varint(bytes.size()) + bytes;
}
std::string piece(const std::string& text, float score, std::uint64_t type) {
  const auto bits = std::bit_cast<std::uint32_t>(score);
  std::string out = message(1, text) + varint(2 << 3 | 5);
  for (int shift = 0; shift < 32; shift += 8) out += static_cast<char>(bits >> shift);
  return message(1, out + number(3, type));
}
std::string model(const std::string& pieces, std::uint64_t model_type = 2, bool charsmap = false,
                  bool remove = false) {
  return pieces + message(2, number(3, model_type) + number(43, ~std::uint64_t{0})) +
         message(3, message(1, "identity") + message(2, charsmap ? "x" : "") + number(3, 0) +
                        number(4, remove));
}
const std::string kPieces = piece("<unk>", 0, 2) + piece("<s>", 0, 3) + piece("</s>", 0, 3) +
                            piece("<0x00>", 0, 6) + piece("\u2581a", -1.5f, 1) +
                            piece("\u2581\u2581", 0, 4);

TEST(Tokenizer, SentencepieceModelIsRead) {
  const TempFolder folder;
  folder.put("tokenizer.model", model(kPieces));
  folder.put("added_tokens.json", R"({"<tool>": 6})");
  folder.put(
      "tokenizer_config.json",
      R"({"added_tokens_decoder": {"7": {"content": "<end>", "special": true}}, "eos_token": "<end>"})");
  const Metadata out = to_gguf(folder, 9);
  ASSERT_EQ(out.error, "");
  EXPECT_TRUE(out.has("tokenizer.ggml.model", GgufData("llama")));
  // Tokens of the user's are looked for in plain text.
  EXPECT_TRUE(out.has("tokenizer.ggml.tokens", strings({"<unk>", "<s>", "</s>", "<0x00>", "\u2581a",
                                                        "  ", "<tool>", "<end>", "[PAD8]"})));
  EXPECT_TRUE(out.has("tokenizer.ggml.token_type", integers({2, 3, 3, 6, 1, 4, 4, 3, 5})));
  EXPECT_TRUE(out.has("tokenizer.ggml.scores", floats({0, 0, 0, 0, -1.5f, 0, 0, 0, 0})));
  EXPECT_TRUE(out.has("tokenizer.ggml.bos_token_id", id(1)));
  EXPECT_TRUE(out.has("tokenizer.ggml.eos_token_id", id(7)));
  EXPECT_TRUE(out.has("tokenizer.ggml.unknown_token_id", id(0)));
  EXPECT_FALSE(out.encoded.contains("tokenizer.ggml.padding_token_id"));
  EXPECT_TRUE(out.has("tokenizer.ggml.add_bos_token", GgufData(true)));
  EXPECT_TRUE(out.has("tokenizer.ggml.add_space_prefix", GgufData(false)));
}

TEST(Tokenizer, BadSentencepieceModelIsNamed) {
  const auto error = [](const std::string& bytes, const char* added = "{}",
                        const char* config = "{}") {
    const TempFolder folder;
    folder.put("tokenizer.model", bytes);
    folder.put("added_tokens.json", added);
    folder.put("tokenizer_config.json", config);
    return to_gguf(folder, 7).error;
  };
  const std::string good = model(kPieces);
  EXPECT_EQ(error(good), "");
  EXPECT_EQ(error("x"), "tokenizer.model: not a sentencepiece model");
  for (std::size_t size = 1; size < good.size(); ++size) {
    EXPECT_NE(error(good.substr(0, size)), "") << size;  // also without its specs
  }
  EXPECT_EQ(error(model(kPieces, 1)),
            "tokenizer.model: trainer_spec.model_type 1, expected 2, BPE");
  EXPECT_EQ(
      error(model(kPieces, 2, true)),
      "tokenizer.model: normalizer_spec changes letters, which GGUF cannot say: expected identity");
  EXPECT_EQ(error(model(kPieces, 2, false, true)),
            "tokenizer.model: normalizer_spec removes or keeps spaces, expected all of them marked "
            "by U+2581");
  EXPECT_EQ(error(model(kPieces + piece("\xff", 0, 1))),
            "tokenizer.model: piece 6: \"\xff\", expected UTF-8 text");
  EXPECT_EQ(error(model(kPieces + piece("x", std::nanf(""), 1))),
            "tokenizer.model: piece 6: its score is not finite, expected a number");
  EXPECT_EQ(error(model(kPieces + piece("x", 0, 9))),
            "tokenizer.model: piece 6: type 9, expected 1 to 6");
  EXPECT_EQ(error(model(kPieces + piece("<s>", 0, 1))),
            "tokenizer.model: tokens 1 and 6 are both \"<s>\", expected each once");
  EXPECT_EQ(error(model(kPieces + piece("x", 0, 1) + piece("y", 0, 1))),
            "tokenizer.model: pieces: token 7, \"y\": expected an id below the model's 7 tokens");
  EXPECT_EQ(error(good, R"({"x": 7})"),
            "added_tokens.json: token 7, \"x\": expected an id below the model's 7 tokens");
  EXPECT_EQ(error(good, R"({"x": "y"})"), "added_tokens.json: \"x\": \"y\", expected an id");
  EXPECT_EQ(
      error(good, "{}", R"({"added_tokens_decoder": {"x": {"content": "y"}}})"),
      "tokenizer_config.json: added_tokens_decoder: \"x\", expected an id and its token's content");
}

}  // namespace
}  // namespace bittern
