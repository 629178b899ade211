#include "convert/tokenizer.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>

#include "convert/tokenizer_table.h"
#include "formats/test_files.h"

namespace bittern {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Strings = std::vector<std::string>;
using Keys = std::map<std::string, GgufData>;

GgufData strings(const Strings& values) {
  const std::vector<std::string_view> views(values.begin(), values.end());
  return GgufData::strings(views);
}
GgufData integers(const std::vector<std::int32_t>& values) {
  return GgufData::array(std::span<const std::int32_t>(values));
}
GgufData floats(const std::vector<float>& values) {
  return GgufData::array(std::span<const float>(values));
}
GgufData id(std::uint32_t value) { return GgufData(value); }

// The files made from a GGUF file with these keys, by name; or the error without the file's path.
struct Files {
  std::map<std::string, std::string> text;
  std::string error;
  Json json(const std::string& name) const { return Json::parse(text.at(name)); }
};
Files from_gguf(const Keys& keys) {
  const TempFolder folder;
  const std::string path = folder.path("m.gguf");
  GgufContents contents(path);
  for (const auto& [key, value] : keys) EXPECT_TRUE(contents.add(key, value).ok());
  folder.put("m.gguf", file_text(contents.lay_out(), {}));
  const auto file = GgufFile::open(path);
  EXPECT_TRUE(file.ok()) << file.status().message();
  const auto files = tokenizer_from_gguf(*file);
  Files out;
  if (!files) {
    out.error = files.status().message();
    if (out.error.rfind(path + ": ", 0) == 0) out.error.erase(0, path.size() + 2);
  } else {
    for (const TextFile& text : *files) out.text[text.name] = text.text;
  }
  return out;
}

struct Metadata {
  std::map<std::string, std::vector<std::byte>> encoded;
  std::string error;
  bool has(const std::string& key, const GgufData& value) const {
    const auto it = encoded.find(key);
    return it != encoded.end() && std::ranges::equal(it->second, value.encoded());
  }
};
Metadata to_gguf(const TempFolder& folder, std::int64_t vocab_size) {
  const auto keys = tokenizer_to_gguf(folder.path(), vocab_size);
  Metadata out;
  if (!keys) {
    out.error = keys.status().message();
    if (out.error.rfind(folder.path() + "/", 0) == 0) out.error.erase(0, folder.path().size() + 1);
  } else {
    for (const auto& [key, value] : *keys)
      out.encoded[key].assign(value.encoded().begin(), value.encoded().end());
  }
  return out;
}
Metadata back_to_gguf(const Files& files, std::int64_t vocab_size) {
  const TempFolder folder;
  for (const auto& [name, text] : files.text) folder.put(name, text);
  return to_gguf(folder, vocab_size);
}

// ---- byte-level BPE ----

const Strings kTokens = {"<|end|>", "a", "b", "\u0120", "ab", "\u0120ab", "<tool>", "[PAD7]"};

Keys byte_level() {
  Keys keys;
  const auto put = [&](const char* key, GgufData value) { keys.emplace(key, std::move(value)); };
  put("general.architecture", GgufData("llama"));
  put("llama.context_length", id(2048));
  put("tokenizer.ggml.model", GgufData("gpt2"));
  put("tokenizer.ggml.pre", GgufData("smollm"));
  put("tokenizer.ggml.tokens", strings(kTokens));
  put("tokenizer.ggml.token_type", integers({3, 1, 1, 1, 1, 1, 4, 5}));
  put("tokenizer.ggml.merges", strings({"a b", "\u0120 ab"}));
  put("tokenizer.ggml.bos_token_id", id(0));
  put("tokenizer.ggml.eos_token_id", id(0));
  put("tokenizer.ggml.padding_token_id", id(0));
  put("tokenizer.ggml.add_bos_token", GgufData(true));
  put("tokenizer.ggml.add_eos_token", GgufData(false));
  put("tokenizer.chat_template", GgufData("{{ \"x\" }}\n"));
  return keys;
}
Keys with(Keys keys, const char* key, GgufData value) {
  keys.insert_or_assign(key, std::move(value));
  return keys;
}
Keys without(Keys keys, const char* key) {
  keys.erase(key);
  return keys;
}

TEST(Tokenizer, ByteLevelBecomesTokenizerJson) {
  const Files files = from_gguf(with(byte_level(), "tokenizer.ggml.eot_token_id", id(6)));
  ASSERT_EQ(files.error, "");
  const Json json = files.json("tokenizer.json");
  EXPECT_EQ(json["model"]["type"], "BPE");
  EXPECT_EQ(json["model"]["ignore_merges"], false);
  EXPECT_EQ(json["model"]["byte_fallback"], false);
  // Ids without a token are not told of.
  EXPECT_EQ(json["model"]["vocab"],
            Json::parse("{\"<|end|>\":0,\"a\":1,\"b\":2,\"\u0120\":3,\"ab\":4,"
                        "\"\u0120ab\":5,\"<tool>\":6}"));
  EXPECT_EQ(json["model"]["merges"], Json::parse("[[\"a\",\"b\"],[\"\u0120\",\"ab\"]]"));
  ASSERT_EQ(json["added_tokens"].size(), 2u);
  EXPECT_EQ(json["added_tokens"][0],
            Json::parse(R"({"id":0,"content":"<|end|>","single_word":false,"lstrip":false,
                            "rstrip":false,"normalized":false,"special":true})"));
  EXPECT_EQ(json["added_tokens"][1]["content"], "<tool>");
  EXPECT_EQ(json["added_tokens"][1]["special"], false);
  EXPECT_TRUE(json["normalizer"].is_null());
  const Json& steps = json["pre_tokenizer"]["pretokenizers"];
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_EQ(steps[0], Json::parse(R"({"type":"Split","pattern":{"Regex":"\\p{N}"},
                                      "behavior":"Isolated","invert":false})"));
  EXPECT_EQ(steps[1]["pattern"]["Regex"], kByteLevelCut);
  EXPECT_EQ(steps[2]["type"], "ByteLevel");
  EXPECT_EQ(steps[2]["use_regex"], false);
  EXPECT_EQ(json["decoder"]["type"], "ByteLevel");
  EXPECT_EQ(json["post_processor"]["single"],
            Json::parse(R"([{"SpecialToken":{"id":"<|end|>","type_id":0}},
                            {"Sequence":{"id":"A","type_id":0}}])"));
  EXPECT_EQ(json["post_processor"]["special_tokens"]["<|end|>"]["ids"], Json::parse("[0]"));

  const Json config = files.json("tokenizer_config.json");
  EXPECT_EQ(config["tokenizer_class"], "PreTrainedTokenizerFast");
  EXPECT_EQ(config["bos_token"], "<|end|>");
  EXPECT_EQ(config["pad_token"], "<|end|>");
  EXPECT_FALSE(config.contains("unk_token"));
  EXPECT_EQ(config["add_bos_token"], true);
  EXPECT_EQ(config["model_max_length"], 2048);
  EXPECT_EQ(config["clean_up_tokenization_spaces"], false);
  EXPECT_EQ(config["chat_template"], "{{ \"x\" }}\n");
  EXPECT_EQ(files.json("special_tokens_map.json")["eos_token"], "<|end|>");
  EXPECT_EQ(files.json("generation_config.json"),
            Json::parse(R"({"bos_token_id":0,"eos_token_id":[0,6],"pad_token_id":0})"));
}

TEST(Tokenizer, ByteLevelComesBackTheSame) {
  const Keys keys = byte_level();
  const Metadata back = back_to_gguf(from_gguf(keys), 8);
  ASSERT_EQ(back.error, "");
  for (const auto& [key, value] : keys) {
    if (key.rfind("tokenizer.", 0) == 0) {
      EXPECT_TRUE(back.has(key, value)) << key;
    }
  }
  EXPECT_EQ(back.encoded.size(), keys.size() - 2);
}

TEST(Tokenizer, EveryPreTokenizerIsFoundBothWays) {
  std::string names = pre_tokenizer_names() + ", ";
  int count = 0;
  for (std::size_t at; (at = names.find(", ")) != names.npos; names.erase(0, at + 2), ++count) {
    const std::string name = names.substr(0, at);
    const PreTokenizer* row = find_pre_tokenizer(name);
    ASSERT_NE(row, nullptr) << name;
    const Files files = from_gguf(with(byte_level(), "tokenizer.ggml.pre", GgufData(name)));
    ASSERT_EQ(files.error, "") << name;
    EXPECT_EQ(files.json("tokenizer.json")["model"]["ignore_merges"], row->ignore_merges) << name;
    EXPECT_EQ(!files.json("tokenizer.json")["normalizer"].is_null(), row->nfc) << name;
    const Metadata back = back_to_gguf(files, 8);
    ASSERT_EQ(back.error, "") << name;
    const PreTokenizer* same = find_pre_tokenizer(row->cuts, row->ignore_merges, row->nfc);
    const std::string written =
        std::string(same->names).substr(0, std::string(same->names).find(' '));
    EXPECT_EQ(same->cuts, row->cuts);
    EXPECT_TRUE(back.has("tokenizer.ggml.pre", GgufData(written))) << name << " " << written;
  }
  EXPECT_GT(count, 50);
  EXPECT_EQ(find_pre_tokenizer(""), nullptr);
  EXPECT_EQ(find_pre_tokenizer("gpt-2 phi-2"), nullptr);
  EXPECT_EQ(find_pre_tokenizer("gpt"), nullptr);
}

TEST(Tokenizer, DefaultsAreLlamaCpps) {
  Keys keys = without(byte_level(), "tokenizer.ggml.add_bos_token");
  EXPECT_EQ(from_gguf(keys).json("tokenizer_config.json")["add_bos_token"], false);
  EXPECT_EQ(from_gguf(with(keys, "tokenizer.ggml.pre", GgufData("llama-bpe")))
                .json("tokenizer_config.json")["add_bos_token"],
            true);
  keys = without(keys, "tokenizer.ggml.pre");  // "default" then
  EXPECT_EQ(from_gguf(keys).json("tokenizer.json")["pre_tokenizer"]["pretokenizers"].size(), 5u);
}

TEST(Tokenizer, NamedChatTemplates) {
  Keys keys = with(byte_level(), "tokenizer.chat_templates", strings({"rag", "tool_use"}));
  keys = with(keys, "tokenizer.chat_template.rag", GgufData("R"));
  EXPECT_NE(from_gguf(keys).error, "");  // tool_use is missing
  keys = with(keys, "tokenizer.chat_template.tool_use", GgufData("T"));
  const Files files = from_gguf(keys);
  EXPECT_EQ(files.json("tokenizer_config.json")["chat_template"],
            Json::parse(R"([{"name":"default","template":"{{ \"x\" }}\n"},
                            {"name":"rag","template":"R"},{"name":"tool_use","template":"T"}])"));
  const Metadata back = back_to_gguf(files, 8);
  for (const auto& [key, value] : keys) {
    if (key.rfind("tokenizer.chat", 0) == 0) {
      EXPECT_TRUE(back.has(key, value)) << key;
    }
  }
}

TEST(Tokenizer, NamesSayWhetherTokensTakeSpaces) {
  EXPECT_EQ(named_for("My Phi-3 mini", true), "My Phi-3 mini");
  EXPECT_EQ(named_for("My Phi-3 mini", false), "My Phi 3 mini");
  EXPECT_EQ(named_for("phi3-PHI-3", false), "phi 3-PHI 3");
  EXPECT_EQ(named_for("tiny", true), "Phi-3 tiny");
  EXPECT_EQ(named_for("tiny", false), "tiny");
}

TEST(Tokenizer, BadMetadataIsNamed) {
  const Keys good = byte_level();
  const auto error = [&](const char* key, GgufData value) {
    return from_gguf(with(good, key, std::move(value))).error;
  };
  EXPECT_EQ(error("tokenizer.ggml.model", GgufData("bert")),
            "tokenizer.ggml.model: \"bert\", expected gpt2 or llama");
  EXPECT_EQ(error("tokenizer.ggml.pre", GgufData("nobody")),
            "tokenizer.ggml.pre: \"nobody\", expected one of " + pre_tokenizer_names());
  EXPECT_EQ(error("general.name", GgufData("My Phi-3")),
            "general.name: \"My Phi-3\": llama.cpp looks for the token \"</s>\" in models of this "
            "name, expected it");
  Strings tokens = kTokens;
  tokens[2] = "a";
  EXPECT_EQ(error("tokenizer.ggml.tokens", strings(tokens)),
            "tokenizer.ggml.tokens: tokens 1 and 2 are both \"a\", expected each once");
  tokens[2] = "";
  EXPECT_EQ(error("tokenizer.ggml.tokens", strings(tokens)),
            "tokenizer.ggml.tokens: token 2 is empty, expected UTF-8 text");
  tokens[2] = "\xc0\x80";
  EXPECT_EQ(error("tokenizer.ggml.tokens", strings(tokens)),
            "tokenizer.ggml.tokens: token 2 is not UTF-8, expected UTF-8 text");
  EXPECT_EQ(error("tokenizer.ggml.tokens", strings({})),
            "tokenizer.ggml.tokens: 0 tokens, expected 1 to 1048576");
  EXPECT_EQ(error("tokenizer.ggml.token_type", integers({1, 1})),
            "tokenizer.ggml.token_type: 2 types for 8 tokens, expected one each");
  EXPECT_EQ(error("tokenizer.ggml.token_type", integers({3, 1, 1, 7, 1, 1, 4, 5})),
            "tokenizer.ggml.token_type: type 7 of token 3, expected 1 to 6");
  EXPECT_EQ(error("tokenizer.ggml.merges", strings({"a b", "a"})),
            "tokenizer.ggml.merges: merge 1, \"a\": no space, expected two tokens");
  EXPECT_EQ(error("tokenizer.ggml.merges", strings({"a x"})),
            "tokenizer.ggml.merges: merge 0, \"a x\": \"x\" is no token, expected one");
  EXPECT_EQ(error("tokenizer.ggml.merges", strings({"b a"})),
            "tokenizer.ggml.merges: merge 0, \"b a\": \"ba\" is no token, expected one");
  EXPECT_EQ(error("tokenizer.ggml.merges", integers({1})),
            "tokenizer.ggml.merges: 1 of type s32, expected at most 4194304 strings");
  EXPECT_EQ(error("tokenizer.ggml.eos_token_id", id(8)),
            "tokenizer.ggml.eos_token_id: 8, expected less than the 8 tokens");
  EXPECT_EQ(from_gguf(without(good, "tokenizer.ggml.bos_token_id")).error,
            "tokenizer.ggml.add_bos_token: true, expected a bos_token_id then");
  EXPECT_EQ(error("tokenizer.chat_template", GgufData("\xff")),
            "tokenizer.chat_template: not UTF-8, expected UTF-8");
  for (const char* key : {"tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"})
    EXPECT_NE(from_gguf(without(good, key)).error.find(key), std::string::npos) << key;
  for (const char* key :
       {"tokenizer.ggml.add_bos_token", "tokenizer.ggml.tokens", "tokenizer.ggml.pre"})
    EXPECT_NE(error(key, GgufData(1.5f)).find(key), std::string::npos) << key;
}

// ---- sentencepiece's BPE ----

struct Pieces {
  Strings tokens = {"<unk>", "<s>", "</s>"};
  std::vector<std::int32_t> types = {2, 3, 3};
  std::vector<float> scores = {0, 0, 0};
  void add(const std::string& token, float score, TokenType type = TokenType::normal) {
    tokens.push_back(token);
    scores.push_back(score);
    types.push_back(static_cast<int>(type));
  }
};

Pieces some_pieces() {
  Pieces p;
  for (int byte = 0; byte < 256; ++byte) p.add(byte_token(byte), 0, TokenType::byte);
  p.add("\u2581a", -1);
  p.add("ab", -2);
  p.add("\u2581ab", -3);
  p.add("\u2581", -4);
  p.add("a", -5);
  p.add("b", -6);
  p.add("\u2581\u2581", -1e9f);
  p.add("\u2581\u2581\u2581", -1e9f);
  p.add("\u2581\u2581\u2581\u2581", -1e9f);
  p.add("<tool>", 0, TokenType::user_defined);
  return p;
}
Keys sentencepiece(const Pieces& p) {
  Keys keys;
  const auto put = [&](const char* key, GgufData value) { keys.emplace(key, std::move(value)); };
  put("general.architecture", GgufData("llama"));
  put("tokenizer.ggml.model", GgufData("llama"));
  put("tokenizer.ggml.pre", GgufData("default"));
  put("tokenizer.ggml.tokens", strings(p.tokens));
  put("tokenizer.ggml.scores", floats(p.scores));
  put("tokenizer.ggml.token_type", integers(p.types));
  put("tokenizer.ggml.bos_token_id", id(1));
  put("tokenizer.ggml.eos_token_id", id(2));
  put("tokenizer.ggml.unknown_token_id", id(0));
  put("tokenizer.ggml.add_bos_token", GgufData(true));
  put("tokenizer.ggml.add_eos_token", GgufData(false));
  put("tokenizer.ggml.add_space_prefix", GgufData(true));
  return keys;
}

TEST(Tokenizer, ScoresBecomeMerges) {
  const Files files = from_gguf(sentencepiece(some_pieces()));
  ASSERT_EQ(files.error, "");
  const Json json = files.json("tokenizer.json");
  // By falling score; of a token's, and of runs with one score, longer left parts first.
  EXPECT_EQ(json["model"]["merges"],
            Json::parse("[[\"\u2581\",\"a\"],[\"a\",\"b\"],[\"\u2581a\",\"b\"],[\"\u2581\",\"ab\"],"
                        "[\"\u2581\u2581\u2581\",\"\u2581\"],"
                        "[\"\u2581\u2581\",\"\u2581\u2581\"],[\"\u2581\u2581\",\"\u2581\"],"
                        "[\"\u2581\",\"\u2581\u2581\u2581\"],[\"\u2581\",\"\u2581\u2581\"],"
                        "[\"\u2581\",\"\u2581\"]]"));
  EXPECT_EQ(json["model"]["unk_token"], "<unk>");
  EXPECT_EQ(json["model"]["byte_fallback"], true);
  EXPECT_EQ(json["normalizer"]["normalizers"][0],
            Json::parse("{\"type\":\"Prepend\",\"prepend\":\"\u2581\"}"));
  EXPECT_TRUE(json["pre_tokenizer"].is_null());
  EXPECT_EQ(json["decoder"]["decoders"].size(), 4u);
  EXPECT_EQ(json["added_tokens"].size(), 4u);

  const Files plain = from_gguf(
      with(sentencepiece(some_pieces()), "tokenizer.ggml.add_space_prefix", GgufData(false)));
  EXPECT_EQ(plain.json("tokenizer.json")["normalizer"]["type"], "Replace");
  EXPECT_EQ(plain.json("tokenizer.json")["decoder"]["decoders"].size(), 3u);
}

TEST(Tokenizer, MergesBecomeScores) {
  const Pieces p = some_pieces();
  const Keys keys = sentencepiece(p);
  const Metadata back =
      back_to_gguf(from_gguf(keys), static_cast<std::int64_t>(p.tokens.size()) + 1);
  ASSERT_EQ(back.error, "");
  Pieces expected = p;
  expected.add("[PAD269]", 0, TokenType::unused);
  std::fill(expected.scores.begin(), expected.scores.end(), 0.0f);
  for (const auto& [token, score] :
       std::map<std::string, float>{{"\u2581a", -1.0f},
                                    {"ab", -2.0f},
                                    {"\u2581ab", -3.0f},
                                    {"\u2581\u2581", -4.0f},
                                    {"\u2581\u2581\u2581", -4.0f},
                                    {"\u2581\u2581\u2581\u2581", -4.0f}}) {
    const auto at = std::ranges::find(expected.tokens, token) - expected.tokens.begin();
    expected.scores[static_cast<std::size_t>(at)] = score;
  }
  const Keys wanted = sentencepiece(expected);
  for (const auto& [key, value] : wanted) {
    if (key.rfind("tokenizer.", 0) == 0) {
      EXPECT_TRUE(back.has(key, value)) << key;
    }
  }
}

TEST(Tokenizer, ScoresThatMergesCannotSayAreRefused) {
  const auto error = [](const Pieces& p) { return from_gguf(sentencepiece(p)).error; };
  Pieces p = some_pieces();
  p.scores[260] = -1;  // "ab", as much as a space and "a"
  EXPECT_EQ(
      error(p),
      "tokenizer.ggml.scores: \"\u2581a\" and \"ab\" have one score, expected different ones: "
      "tokenizer.json has no equal merges");
  p = some_pieces();
  p.add("\u2581\u2581\u2581\u2581\u2581", -7);  // a run that is not with its like
  EXPECT_NE(error(p).find("have one score"), std::string::npos);
  p = some_pieces();
  p.tokens[264] = "c";  // no "b" any more, which llama.cpp would join all the same
  EXPECT_EQ(
      error(p),
      "tokenizer.ggml.tokens: token 260, \"ab\", is made of \"a\" and \"b\", expected both to be "
      "tokens, without which tokenizer.json cannot join them");
  p = some_pieces();
  p.tokens[13] = "<0x0a>";
  EXPECT_EQ(error(p), "tokenizer.ggml.tokens: lacks \"<0x0A>\", expected a token for every byte");
  p = some_pieces();
  p.scores.pop_back();
  EXPECT_EQ(error(p), "tokenizer.ggml.scores: 268 scores for 269 tokens, expected one each");
  p = some_pieces();
  p.scores[5] = std::nanf("");
  EXPECT_EQ(error(p), "tokenizer.ggml.scores: that of token 5 is not finite, expected a number");
  p = some_pieces();
  p.add(std::string(600, 'a'), -8);
  EXPECT_EQ(error(p), "tokenizer.ggml.tokens: token 269 has 600 bytes, expected at most 512");
  EXPECT_NE(from_gguf(without(sentencepiece(some_pieces()), "tokenizer.ggml.scores")).error, "");
}

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
  EXPECT_EQ(error("/model/merges", "[[\"a\", \"x\"]]"),
            "tokenizer.json: model.merges: merge 0, \"a\" \"x\": \"x\" is no token, expected one");
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
  EXPECT_EQ(error("/model", "null"), "tokenizer.json: model: not there, expected an object");
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
            "tokenizer.json: added_tokens: \"<s>\" takes the spaces around it or stands alone "
            "only, which "
            "GGUF cannot say");
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
            "tokenizer_config.json: bos_token: \"x\" is no token, expected one");
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
  EXPECT_EQ(error("x"), "tokenizer.model: not a sentencepiece model, expected one");
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
