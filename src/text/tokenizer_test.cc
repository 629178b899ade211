// Tokenisers read from files made here: ids worked out by hand, every error, hostile files.
// tests/python/test_text.py compares with the package tokenizers and with llama.cpp.
#include "bittern/tokenizer.h"

#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "convert/tokenizer_test.h"
#include "text/tables.h"
#include "text/utf8.h"

namespace bittern {
namespace {

using namespace tokenizer_test;
using Ids = std::vector<std::int32_t>;

Result<Tokenizer> load_gguf(const Keys& keys) {
  const TempFolder folder;
  GgufContents contents(folder.path("m.gguf"));
  for (const auto& [key, value] : keys) EXPECT_TRUE(contents.add(key, value).ok());
  folder.put("m.gguf", file_text(contents.lay_out(), {}));
  return Tokenizer::load(folder.path("m.gguf"));
}
Result<Tokenizer> load_folder(const std::map<std::string, std::string>& files) {
  const TempFolder folder;
  for (const auto& [name, text] : files) folder.put(name, text);
  return Tokenizer::load(folder.path());
}

Ids encode(const Tokenizer& t, std::string_view text, const EncodeOptions& options = {}) {
  const auto ids = t.encode(text, options);
  EXPECT_TRUE(ids.ok()) << ids.status().message();
  return ids.ok() ? *ids : Ids{};
}
std::string decode(const Tokenizer& t, const Ids& ids, bool skip_special = false) {
  const auto text = t.decode(ids, skip_special);
  EXPECT_TRUE(text.ok()) << text.status().message();
  return text.ok() ? *text : "";
}
std::string streamed(const Tokenizer& t, const Ids& ids) {
  TokenStream stream(t, false);
  std::string all;
  for (const std::int32_t id : ids) {
    const auto text = stream.push(id);
    EXPECT_TRUE(text.ok() && is_utf8(*text));
    all += *text;
  }
  return all + stream.finish();
}

// A token for each byte, then others.
Strings byte_tokens(const Strings& others) {
  Strings tokens(text::byte_letters().begin(), text::byte_letters().end());
  tokens.insert(tokens.end(), others.begin(), others.end());
  return tokens;
}
Keys byte_level() {
  const Strings tokens = byte_tokens({"ab", "\u0120ab", "abc", "<|end|>", "<tool>", "<tool>s"});
  std::vector<std::int32_t> types(tokens.size(), 1);
  types[259] = 3;
  types[260] = types[261] = 4;
  Keys keys;
  const auto put = [&](const char* key, GgufData value) { keys.emplace(key, std::move(value)); };
  put("tokenizer.ggml.model", GgufData("gpt2"));
  put("tokenizer.ggml.pre", GgufData("smollm"));
  put("tokenizer.ggml.tokens", strings(tokens));
  put("tokenizer.ggml.token_type", integers(types));
  put("tokenizer.ggml.merges", strings({"a b", "\u0120 ab", "ab c"}));
  put("tokenizer.ggml.bos_token_id", id(259));
  put("tokenizer.ggml.eos_token_id", id(259));
  return keys;
}

TEST(TextGguf, ByteLevel) {
  const auto t = load_gguf(byte_level());
  ASSERT_TRUE(t.ok()) << t.status().message();
  EXPECT_EQ(t->size(), 262);
  EXPECT_EQ(encode(*t, ""), Ids{});
  EXPECT_EQ(encode(*t, "abc ab ba"), (Ids{258, 257, ' ', 'b', 'a'}));
  EXPECT_EQ(encode(*t, "a<|end|>b"), (Ids{'a', 259, 'b'}));
  EXPECT_EQ(encode(*t, "<|end|>", {.parse_special = false}),
            (Ids{'<', '|', 'e', 'n', 'd', '|', '>'}));
  // The longest of user-defined tokens, whether or not control tokens count.
  EXPECT_EQ(encode(*t, "<tool><tool>s", {.parse_special = false}), (Ids{260, 261}));
  EXPECT_EQ(*t->token(257), "\u0120ab");
  EXPECT_EQ(t->id("\u0120ab"), 257);
  EXPECT_EQ(t->id(" ab"), std::nullopt);
  EXPECT_TRUE(t->is_special(259));
  EXPECT_FALSE(t->is_special(260) || t->is_special(-1) || t->is_special(1 << 30));
  EXPECT_EQ(t->bos(), 259);
  EXPECT_EQ(t->ends().size(), 1u);
  EXPECT_EQ(decode(*t, {257, 259, 258}), " ab<|end|>abc");
  EXPECT_EQ(decode(*t, {257, 259, 258}, true), " ababc");
}

TEST(TextGguf, BosAndEosWhereTheFileSaysSo) {
  for (const bool bos : {false, true})
    for (const bool eos : {false, true}) {
      const auto t =
          load_gguf(with(with(byte_level(), "tokenizer.ggml.add_bos_token", GgufData(bos)),
                         "tokenizer.ggml.add_eos_token", GgufData(eos)));
      ASSERT_TRUE(t.ok());
      Ids want(bos, 259);
      want.push_back('x');
      want.insert(want.end(), eos, 259);
      EXPECT_EQ(encode(*t, "x"), want);
      EXPECT_EQ(encode(*t, "x", {.add_special = false}), Ids{'x'});
    }
}

TEST(TextGguf, Sentencepiece) {
  const auto t = load_gguf(sentencepiece(some_pieces()));
  ASSERT_TRUE(t.ok()) << t.status().message();
  const auto piece = [&](const char* text) { return *t->id(text); };
  // _a comes before ab, and then _ab can be made of it.
  EXPECT_EQ(encode(*t, "ab"), (Ids{1, piece("\u2581ab")}));
  EXPECT_EQ(encode(*t, "aab", {.add_special = false}), (Ids{piece("\u2581a"), piece("ab")}));
  EXPECT_EQ(encode(*t, "bab", {.add_special = false}),
            (Ids{piece("\u2581"), piece("b"), piece("ab")}));
  // Letters without a token are bytes, and so are bytes that are no letter.
  EXPECT_EQ(encode(*t, "\u00e9\xff", {.add_special = false}),
            (Ids{piece("\u2581"), 3 + 0xc3, 3 + 0xa9, 3 + 0xff}));
  EXPECT_EQ(decode(*t, encode(*t, "a  b <tool>", {.add_special = false})), "a  b <tool>");
  EXPECT_EQ(decode(*t, encode(*t, " a\xff\xc3", {.add_special = false})), " a\xff\xc3");
  EXPECT_EQ(streamed(*t, encode(*t, " \u00e9a", {.add_special = false})), " \u00e9a");
}

// ---- tokenizer.json ----

std::string json_file(const std::string& pre_tokenizer, const std::string& rest = "") {
  Json vocab = Json::object();
  const Strings tokens = byte_tokens({"ab", "\u0120ab", "abc"});
  for (std::size_t i = 0; i < tokens.size(); ++i) vocab[tokens[i]] = i;
  Json json = {{"added_tokens", Json::parse(R"([{"id":259,"content":"<|end|>","special":true}])")},
               {"model",
                {{"type", "BPE"},
                 {"vocab", vocab},
                 {"merges", Json::parse(R"(["a b","\u0120 ab","ab c"])")}}}};
  json["pre_tokenizer"] = Json::parse(pre_tokenizer);
  json["decoder"] = Json::parse(R"({"type":"ByteLevel"})");
  if (!rest.empty()) json.update(Json::parse(rest));
  return json.dump();
}
constexpr const char* kByteLevelStep =
    R"({"type":"ByteLevel","add_prefix_space":false,"use_regex":true})";

TEST(TextFolder, ByteLevel) {
  const auto t = load_folder({{"tokenizer.json", json_file(kByteLevelStep)},
                              {"tokenizer_config.json", R"({"eos_token":"<|end|>"})"},
                              {"generation_config.json", R"({"eos_token_id":[259,258]})"}});
  ASSERT_TRUE(t.ok()) << t.status().message();
  EXPECT_EQ(encode(*t, "abc ab<|end|>"), (Ids{258, 257, 259}));
  EXPECT_EQ(t->eos(), 259);
  EXPECT_EQ(t->bos(), std::nullopt);
  EXPECT_EQ(Ids(t->ends().begin(), t->ends().end()), (Ids{259, 258}));
}

TEST(TextFolder, InvalidUtf8IsReplaced) {
  const auto folder = load_folder({{"tokenizer.json", json_file(kByteLevelStep)}});
  const auto gguf = load_gguf(byte_level());
  ASSERT_TRUE(folder.ok() && gguf.ok());
  const Ids one{0xef, 0xbf, 0xbd};
  Ids two = one;
  two.insert(two.end(), one.begin(), one.end());
  EXPECT_EQ(encode(*folder, "\xff"), one);
  // A character that breaks off is one U+FFFD to Python, and one for each byte to llama.cpp.
  EXPECT_EQ(encode(*folder, "\xe4\xbd"), one);
  EXPECT_EQ(encode(*gguf, "\xe4\xbd"), two);
  EXPECT_EQ(encode(*folder, "\xed\xa0\x80").size(), 9u);
}

TEST(TextFolder, SplitsAsTheFileSays) {
  const auto cut = [](const std::string& pattern, const char* behaviour, bool invert) {
    const std::string json =
        R"({"type":"Sequence","pretokenizers":[{"type":"Split","pattern":)" + pattern +
        R"(,"behavior":")" + behaviour + R"(","invert":)" + (invert ? "true" : "false") +
        R"(},{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]})";
    const auto t = load_folder({{"tokenizer.json", json_file(json)}});
    EXPECT_TRUE(t.ok()) << t.status().message();
    return encode(*t, "xababcx");  // x ab abc x where nothing is cut
  };
  EXPECT_EQ(cut(R"({"String":"?"})", "Isolated", false), (Ids{'x', 256, 258, 'x'}));
  EXPECT_EQ(cut(R"({"Regex":"b"})", "Isolated", false), (Ids{'x', 'a', 'b', 'a', 'b', 'c', 'x'}));
  EXPECT_EQ(cut(R"({"Regex":"b"})", "Removed", false), (Ids{'x', 'a', 'a', 'c', 'x'}));
  EXPECT_EQ(cut(R"({"String":"b"})", "MergedWithPrevious", false), (Ids{'x', 256, 256, 'c', 'x'}));
  EXPECT_EQ(cut(R"({"String":"b"})", "MergedWithNext", false),
            (Ids{'x', 'a', 'b', 'a', 'b', 'c', 'x'}));
  EXPECT_EQ(cut(R"({"Regex":"[ab]"})", "Contiguous", false), (Ids{'x', 256, 256, 'c', 'x'}));
  EXPECT_EQ(cut(R"({"Regex":"[^b]"})", "Removed", true), (Ids{'x', 'a', 'a', 'c', 'x'}));
}

TEST(TextFolder, RefusesWhatItDoesNotKnow) {
  const auto error = [](const std::string& json) {
    const TempFolder folder;
    folder.put("tokenizer.json", json);
    const auto t = Tokenizer::load(folder.path());
    EXPECT_FALSE(t.ok());
    std::string message(t.status().message());
    EXPECT_EQ(message.rfind(folder.path() + "/tokenizer.json: ", 0), 0u) << message;
    return message.substr(std::min(message.size(), folder.path().size() + 17));
  };
  EXPECT_EQ(error(json_file(R"({"type":"WhitespaceSplit"})")),
            "pre_tokenizer: \"WhitespaceSplit\", expected Split, Digits, Punctuation, ByteLevel or "
            "Metaspace");
  EXPECT_EQ(error(json_file(kByteLevelStep, R"({"normalizer":{"type":"Lowercase"}})")),
            "normalizer: Lowercase, expected NFC, NFD, NFKC, NFKD, Prepend or Replace of a String");
  EXPECT_EQ(error(json_file(kByteLevelStep, R"({"decoder":{"type":"WordPiece"}})")),
            "decoder: \"WordPiece\", expected ByteLevel");
  EXPECT_EQ(error(json_file(kByteLevelStep, R"({"post_processor":{"type":"BertProcessing"}})")),
            "post_processor: \"BertProcessing\", expected ByteLevel or TemplateProcessing");
  EXPECT_EQ(error(R"({"model":{"type":"Unigram","vocab":{"a":0},"merges":[]}})"),
            "model.type: \"Unigram\", expected BPE");
  EXPECT_EQ(error(R"({"model":{"type":"BPE","vocab":{"a":0,"b":1},"merges":["a b"]}})"),
            "model.merges: merge 0, \"a\" \"b\": \"ab\" is no token, expected one");
  EXPECT_EQ(error(R"({"model":{"type":"BPE","vocab":{"a":0,"b":0},"merges":[]}})"),
            "tokens \"a\" and \"b\" have the id 0, expected one");
  EXPECT_NE(error(R"({"model":{"type":"BPE","vocab":{"a":2147483647},"merges":[]}})"), "");
  EXPECT_NE(error(R"({"model":{"type":"BPE","vocab":{"a":4294967295},"merges":[]}})"), "");
  EXPECT_NE(error(R"({"added_tokens":[{"id":4294967295,"content":"x"}],"model":{"type":"BPE",)"
                  R"("vocab":{"a":0},"merges":[]}})"),
            "");
  EXPECT_NE(error("{\"x\":" + std::string(100000, '[') + std::string(100000, ']') + "}"), "");
  EXPECT_NE(error("[]"), "");
  EXPECT_NE(error(""), "");
  EXPECT_NE(error(json_file(R"({"type":"Split","pattern":{"Regex":"("},"behavior":"Isolated"})"))
                .find("missing closing parenthesis"),
            std::string::npos);
  EXPECT_NE(error(json_file(R"({"type":"Split","pattern":{"Regex":"\\C"},"behavior":"Isolated"})")),
            "");
  EXPECT_EQ(Tokenizer::load("/nonexistent").status().code(), Code::unavailable);
  const TempFolder empty;
  EXPECT_EQ(Tokenizer::load(empty.path()).status().message(),
            empty.path() + ": no tokeniser, expected tokenizer.json or tokenizer.model");
}

// A pattern that would take for ever ends with an error, and so does one that would fill the stack.
TEST(TextFolder, HostilePatternsEnd) {
  for (const char* pattern : {"(a+)+$", "(a|aa)+$", "((a*)*)*$", "(?:a?){64}a{64}$",
                              "(.|\\\\n)*?b$", "(a(?1)?b|a)+$", "^(((a*)*)*)*\\\\1b"}) {
    const std::string json =
        std::string(R"({"type":"Sequence","pretokenizers":[{"type":"Split",)") +
        R"("pattern":{"Regex":")" + pattern + R"("},"behavior":"Isolated"},{"type":"ByteLevel",)" +
        R"("add_prefix_space":false,"use_regex":false}]})";
    const auto t = load_folder({{"tokenizer.json", json_file(json)}});
    ASSERT_TRUE(t.ok()) << pattern << ": " << t.status().message();
    const std::string text = std::string(40, 'a') + "!" + std::string(5000, 'a') + "!";
    const auto ids = t->encode(text);
    if (!ids.ok()) {
      EXPECT_EQ(ids.status().code(), Code::invalid_argument) << pattern;
      EXPECT_NE(ids.status().message().find("matching a text of"), std::string_view::npos);
    }
  }
}

// ---- text that is not nice ----

TEST(Text, LongWordsMergeAsShortOnesDo) {
  const auto t = load_gguf(byte_level());
  ASSERT_TRUE(t.ok());
  for (const std::size_t n : {1u, 20u, 21u, 22u, 64u, 1000u, 100000u}) {
    std::string text;
    Ids want;
    for (std::size_t i = 0; i < n; ++i) {
      text += "abc";
      want.push_back(258);
    }
    EXPECT_EQ(encode(*t, text), want) << n;
  }
}

// A run of one letter, however long, needs no stack for each.
TEST(Text, EveryPatternTakesLongRuns) {
  std::string names = pre_tokenizer_names();
  std::set<const PreTokenizer*> seen;
  for (std::size_t at; !names.empty();) {
    at = std::min(names.find(", "), names.size());
    const std::string name = names.substr(0, at);
    names.erase(0, at + 2);
    if (!seen.insert(find_pre_tokenizer(name)).second) continue;
    const auto t = load_gguf(with(byte_level(), "tokenizer.ggml.pre", GgufData(name)));
    ASSERT_TRUE(t.ok()) << t.status().message();
    for (const char* letter : {"a", "A", "x", " ", "\n", "\t", ".", "'", "1", "\u4f60", "\u00e9",
                               "\u0301", "\U0001f600", "\u3000", "aB", "a ", " \n", "'s"}) {
      // superbpe looks ahead from every digit to the last.
      if (name == "superbpe" && *letter == '1') continue;
      std::string text;
      for (int i = 0; i < 20000; ++i) text += letter;
      const auto ids = t->encode(text, {.add_special = false});
      ASSERT_TRUE(ids.ok()) << name << " " << letter << ": " << ids.status().message();
      ASSERT_EQ(decode(*t, *ids), text) << name << " " << letter;
    }
  }
}

TEST(Text, StreamsGiveWholeCharacters) {
  const auto t = load_gguf(byte_level());
  ASSERT_TRUE(t.ok());
  const std::string text = "a\u00e9\u4f60\U0001f600 \u0301ab";
  EXPECT_EQ(streamed(*t, encode(*t, text)), text);
  TokenStream stream(*t);
  EXPECT_EQ(*stream.push(0xf0), "");
  EXPECT_EQ(*stream.push(0x9f), "");
  EXPECT_EQ(*stream.push(259), "");  // a control token is left out
  EXPECT_EQ(*stream.push('x'), "\ufffdx");
  EXPECT_EQ(*stream.push(0xe4), "");
  EXPECT_FALSE(stream.push(262).ok());  // changes nothing
  EXPECT_EQ(stream.finish(), "\ufffd");
  EXPECT_EQ(stream.finish(), "");
  EXPECT_EQ(*stream.push(0xff), "\ufffd");
}

TEST(Text, IdsOutOfRangeAreRefused) {
  const auto t = load_gguf(byte_level());
  ASSERT_TRUE(t.ok());
  for (const std::int32_t id : {-1, 262, 1 << 30, INT32_MIN, INT32_MAX}) {
    const std::string found = "token " + std::to_string(id) + ", expected 0..261";
    EXPECT_EQ(t->decode(Ids{'a', id}).status().message(), "decode: " + found);
    EXPECT_EQ(t->token(id).status().message(), "token: " + found);
    EXPECT_EQ(TokenStream(*t).push(id).status().message(), "push: " + found);
  }
}

TEST(Text, ThreadsShareATokeniser) {
  const auto t = load_folder({{"tokenizer.json", json_file(kByteLevelStep)}});
  ASSERT_TRUE(t.ok());
  std::string text;
  for (int i = 0; i < 2000; ++i) text += "abc ab \u4f60 12 ";
  const Ids want = encode(*t, text);
  std::vector<std::thread> threads;
  std::vector<int> equal(4, 0);
  for (std::size_t i = 0; i < equal.size(); ++i)
    threads.emplace_back([&, i] {
      const auto ids = t->encode(text);
      equal[i] = ids.ok() && *ids == want;
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(equal, (std::vector<int>{1, 1, 1, 1}));
}

TEST(Text, GgufErrorsNameTheKey) {
  const auto error = [](const Keys& keys) {
    const auto t = load_gguf(keys);
    EXPECT_FALSE(t.ok());
    const std::string message(t.status().message());
    return message.substr(message.find(".gguf: ") + 7);
  };
  const Keys good = byte_level();
  EXPECT_EQ(error(with(good, "tokenizer.ggml.merges", strings({"a b", "b c"}))),
            "tokenizer.ggml.merges: merge 1, \"b c\": expected two tokens that make a third");
  EXPECT_EQ(error(with(good, "tokenizer.ggml.merges", strings({"ab"}))),
            "tokenizer.ggml.merges: merge 0, \"ab\": expected two tokens that make a third");
  EXPECT_NE(error(with(good, "tokenizer.ggml.merges", integers({1}))), "");
  EXPECT_NE(error(with(good, "tokenizer.ggml.model", GgufData("bert"))).find("bert"),
            std::string::npos);
  EXPECT_NE(error(with(good, "tokenizer.ggml.pre", GgufData("kimi-k2"))).find("kimi-k2"),
            std::string::npos);
  EXPECT_NE(error(with(good, "tokenizer.ggml.bos_token_id", id(262))), "");
  EXPECT_NE(error(without(good, "tokenizer.ggml.tokens")), "");
  EXPECT_NE(error(with(good, "tokenizer.chat_template", id(3))), "");
}

}  // namespace
}  // namespace bittern
