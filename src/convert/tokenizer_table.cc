#include "convert/tokenizer_table.h"

#include <algorithm>
#include <bit>
#include <functional>

namespace bittern {
namespace {

#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define SPACES "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define SIGNS " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
#define ASCII_SIGN "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~]"
#define CONTRACTED CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"

constexpr const char* kByThree = "\\p{N}{1,3}";
constexpr const char* kLlama3 = CONTRACTED "\\p{N}{1,3}|" SIGNS "|" SPACES;
constexpr const char* kQwen2 = CONTRACTED "\\p{N}|" SIGNS "|" SPACES;
constexpr const char* kQwen35 = CONTRACTIONS
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|" SPACES;
constexpr const char* kSuffixed = "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+" CONTRACTIONS
                                  "?|"
                                  "[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER "*" CONTRACTIONS
                                  "?|"
                                  "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" SPACES;
constexpr const char* kTekken = "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER
                                "+|"
                                "[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER
                                "*|"
                                "\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" SPACES;
constexpr const char* kDeepseek3 = ASCII_SIGN
    "[A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|" SPACES;
constexpr const char* kHanKana = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+";
constexpr const char* kAsian = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+";
constexpr const char* kBloom = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+";
constexpr const char* kCasedLetters =
    "\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-"
    "\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-"
    "\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18"
    "-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2"
    "-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-"
    "\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-"
    "\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-"
    "\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-"
    "\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+";

}  // namespace

const char* const kByteLevelCut =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

namespace {

// In the order in which a name to write is looked for.
const std::vector<PreTokenizer>& table() {
  static const std::vector<PreTokenizer> rows = {
      {"gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum exaone4 jais "
       "trillion granite-docling modern-bert",
       {kByteLevelCut}},
      {"olmo mpt", {kByteLevelCut}, true},
      {"smollm starcoder refact codeshell exaone minerva-7b mellum2", {kDigitCut, kByteLevelCut}},
      {"command-r", {kDigitCut, kByteLevelCut}, true},
      {"llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
       {kLlama3},
       false,
       true,
       true},
      {"glm4 glm5", {kLlama3}, false, true},
      {"dbrx smaug-bpe chatglm-bpe", {kLlama3}},
      {"qwen2 deepseek-r1-qwen", {kQwen2}, true},
      {"stablelm2 kormo f2llmv2 megrez hunyuan solar-open grok-2", {kQwen2}},
      {"qwen35", {kQwen35}, true},
      {"deepseek-llm",
       {"[\\r\\n]", kCasedLetters,
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", "\\s+$", kAsian,
        kDigitCut}},
      {"deepseek-coder", {"[\\r\\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", kAsian, kDigitCut}},
      {"deepseek-v3 hunyuan-dense joyai-llm hy_v4", {kByThree, kHanKana, kDeepseek3}},
      {"tekken", {kTekken}, false, true, true},
      {"gpt-4o llama4 kanana2 talkie", {kSuffixed}},
      {"minimax-m2", {kSuffixed}, true},
      {"granite-embed-multi-97m", {kSuffixed}, false, true},
      {"falcon", {kPunctuationCut, kByteLevelCut, "[0-9][0-9][0-9]"}},
      {"bloom poro-chat gpt3-finnish", {kBloom}},
      {"viking", {kBloom, kDigitCut}},
      {"minicpm5", {kByThree, CONTRACTED "\\p{N}+|" SIGNS "|" SPACES}, false, true},
      {"seed-coder", {CONTRACTED "\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\\r\\n]+|" SPACES}},
      {"bailingmoe bailingmoe2 llada-moe",
       {"'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}| "
        "?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|"
        "\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"}},
      {"exaone-moe",
       {CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?(?:\\p{L}\\p{M}*(?: \\p{L}\\p{M}*)*)+|\\p{N}| "
                     "?[^\\s\\p{L}\\p{N}]+[\\r\\n/]?|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"}},
      {"laguna", {"[^\\n]+|[\\n]+", kQwen2}},
      {"ufakzeka", {"[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|" SIGNS "|" SPACES}},
      {"spark2_5",
       {kByThree, kHanKana,
        ASCII_SIGN "[A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| "
                   "?[\\p{P}\\p{S}]+|[\\r\\n]|\\s+(?!\\S)|\\s+",
        kDigitCut}},
      {"jais-2",
       {CONTRACTED
        "\\p{N}{1,3}|" SIGNS
        "|\\s*[\\r\\n]+|\\s{512}(?!\\S)|\\s{256}(?!\\S)|\\s{128}(?!\\S)|\\s{64}(?!\\S)|"
        "\\s{32}(?!\\S)|\\s{16}(?!\\S)|\\s{8}(?!\\S)|\\s{4}(?!\\S)|\\s{1,2}(?!\\S)|\\s{1}"}},
      {"chameleon",
       {"<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", "([\\t\\n]|    |  )", kDigitCut,
        "[\\p{P}!-/:-@\\[-`{-~]", kByteLevelCut},
       false,
       false,
       true},
      {"superbpe", {"\\p{N}+", "(?=(\\d{3})+(?!\\d))"}},
      {"default", {"[\\p{P}\\$\\+<=>\\^~\\|]+", kByteLevelCut, kDigitsCut, "[0-9][0-9][0-9]"}},
  };
  return rows;
}

}  // namespace

const PreTokenizer* find_pre_tokenizer(std::string_view name) {
  const std::string wanted = " " + std::string(name) + " ";
  if (name.empty() || name.find(' ') != name.npos) return nullptr;
  for (const PreTokenizer& row : table()) {
    if ((" " + std::string(row.names) + " ").find(wanted) != std::string::npos) return &row;
  }
  return nullptr;
}

const PreTokenizer* find_pre_tokenizer(std::span<const std::string> cuts, bool ignore_merges,
                                       bool nfc) {
  const PreTokenizer* best = nullptr;
  for (const PreTokenizer& row : table()) {
    if (row.ignore_merges != ignore_merges || !std::ranges::equal(row.cuts, cuts)) continue;
    if (row.nfc == nfc) return &row;
    if (best == nullptr) best = &row;
  }
  return best;
}

std::string pre_tokenizer_names() {
  std::string names;
  for (const PreTokenizer& row : table()) {
    for (const char c : std::string_view(row.names))
      names.append(c == ' ' ? ", " : std::string(1, c));
    names += ", ";
  }
  names.resize(names.size() - 2);
  return names;
}

TokenIndex::TokenIndex(std::size_t tokens) : slots_(std::bit_ceil(2 * tokens + 2)) {}

std::size_t TokenIndex::slot(std::span<const std::string_view> texts, std::string_view text) const {
  const std::size_t mask = slots_.size() - 1;
  std::size_t i = std::hash<std::string_view>()(text) & mask;
  while (slots_[i] != 0 && texts[slots_[i] - 1] != text) i = (i + 1) & mask;
  return i;
}

std::int64_t TokenIndex::put(std::span<const std::string_view> texts, std::uint32_t id) {
  std::uint32_t& entry = slots_[slot(texts, texts[id])];
  if (entry != 0) return entry - std::int64_t{1};
  entry = id + 1;
  return -1;
}

std::int64_t TokenIndex::find(std::span<const std::string_view> texts,
                              std::string_view text) const {
  return slots_[slot(texts, text)] - std::int64_t{1};
}

std::vector<PieceSplit> piece_splits(std::span<const std::string_view> texts,
                                     const TokenIndex& index, std::string_view piece) {
  const auto starts_letter = [&](std::size_t i) { return (piece[i] & 0xc0) != 0x80; };
  std::size_t letters = 0, second = piece.size(), last = 0;  // where the second and last begin
  for (std::size_t i = 0; i < piece.size(); ++i) {
    if (!starts_letter(i)) continue;
    if (++letters == 2) second = i;
    last = i;
  }
  std::vector<PieceSplit> splits;
  for (std::size_t i = piece.size(); i-- > 1;) {
    if (!starts_letter(i)) continue;
    const bool left = index.find(texts, piece.substr(0, i)) >= 0;
    const bool right = index.find(texts, piece.substr(i)) >= 0;
    if ((left || i == second) && (right || i == last)) splits.push_back({i, left && right});
  }
  return splits;
}

std::string_view repeated_letter(std::string_view token) {
  std::size_t letter = 1;
  while (letter < token.size() && (token[letter] & 0xc0) == 0x80) ++letter;
  if (letter >= token.size() || token.size() % letter != 0) return {};
  for (std::size_t i = letter; i < token.size(); ++i) {
    if (token[i] != token[i - letter]) return {};
  }
  return token.substr(0, letter);
}

int byte_token(std::string_view text) {
  if (text.size() != 6 || text.substr(0, 3) != "<0x" || text[5] != '>') return -1;
  int value = 0;
  for (const char c : text.substr(3, 2)) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit && !(c >= 'A' && c <= 'F')) return -1;
    value = 16 * value + (digit ? c - '0' : c - 'A' + 10);
  }
  return value;
}

std::string byte_token(int byte) {
  constexpr const char* kHex = "0123456789ABCDEF";
  return std::string("<0x") + kHex[byte >> 4] + kHex[byte & 15] + '>';
}

namespace {

std::size_t find_phi3(std::string_view name, std::size_t& size) {
  std::string lower(name);
  for (char& c : lower) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  const std::size_t with = lower.find("phi-3"), without = lower.find("phi3");
  size = with < without ? 5 : 4;
  return std::min(with, without);
}

}  // namespace

bool named_phi3(std::string_view name) {
  std::size_t size = 0;
  return find_phi3(name, size) != name.npos;
}

bool phi3_strips(std::string_view token) {
  return token != "<unk>" && token != "<s>" && token != "<|endoftext|>";
}

std::string named_for(std::string name, bool strips) {
  if (strips) return named_phi3(name) ? name : "Phi-3 " + name;
  std::size_t size = 0;
  for (std::size_t at; (at = find_phi3(name, size)) != name.npos;)
    name.replace(at + 3, size - 4, " ");
  return name;
}

bool is_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i]);
    const std::size_t length = first < 0x80   ? 1
                               : first < 0xc2 ? 0
                               : first < 0xe0 ? 2
                               : first < 0xf0 ? 3
                                              : 4;
    if (length == 0 || first > 0xf4 || text.size() - i < length) return false;
    std::uint32_t point = length == 1 ? first : first & (0x7fu >> length);
    for (std::size_t k = 1; k < length; ++k) {
      const auto next = static_cast<unsigned char>(text[i + k]);
      if ((next & 0xc0) != 0x80) return false;
      point = point << 6 | (next & 0x3f);
    }
    // Overlong forms, surrogates and what is beyond Unicode.
    if ((length == 3 && point < 0x800) || (length == 4 && point < 0x10000)) return false;
    if ((point >= 0xd800 && point < 0xe000) || point > 0x10ffff) return false;
    i += length;
  }
  return true;
}

std::string padding_token(std::size_t id) { return "[PAD" + std::to_string(id) + "]"; }

}  // namespace bittern
