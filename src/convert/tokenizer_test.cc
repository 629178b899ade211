// Tokenisers of GGUF files: what becomes of them, and whether they come back the same.
#include "convert/tokenizer_test.h"

#include <bit>
#include <cmath>
#include <iterator>

namespace bittern {
namespace {

using namespace tokenizer_test;

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
            "name, and there is none");
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
            "tokenizer.ggml.merges: merge 0, \"a x\": \"x\" is not a token of the vocabulary");
  EXPECT_EQ(error("tokenizer.ggml.merges", strings({"b a"})),
            "tokenizer.ggml.merges: merge 0, \"b a\": \"ba\" is not a token of the vocabulary");
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

}  // namespace
}  // namespace bittern
