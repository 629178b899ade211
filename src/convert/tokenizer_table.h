// What tokenisers of both worlds have in common: how text is cut into words before byte-level BPE
// merges them, under the name llama.cpp has for it (tokenizer.ggml.pre), and the kinds of tokens.
// One table, read both ways.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bittern {

// Each cut splits every piece the one before it left: matches and the text between them are pieces.
struct PreTokenizer {
  const char* names;  // between spaces; the first is the one written
  std::vector<std::string> cuts;
  bool nfc = false;            // text is put into NFC before, which llama.cpp leaves out
  bool ignore_merges = false;  // a word that is a token is that token, whatever the merges say
  bool add_bos = false;        // where the metadata do not say
};

const PreTokenizer* find_pre_tokenizer(std::string_view name);
// The one that cuts so, if possible with the same normalisation; null: llama.cpp has none.
const PreTokenizer* find_pre_tokenizer(std::span<const std::string> cuts, bool ignore_merges,
                                       bool nfc);
std::string pre_tokenizer_names();  // all, with commas

// What ByteLevel cuts by unless told not to, and what Digits and Punctuation are.
extern const char* const kByteLevelCut;
inline constexpr const char* kDigitCut = "\\p{N}";
inline constexpr const char* kDigitsCut = "\\p{N}+";
inline constexpr const char* kPunctuationCut = "[\\p{P}\\$\\+<=>\\^~\\|`]+";

// tokenizer.ggml.token_type
enum class TokenType : int {
  normal = 1,
  unknown = 2,
  control = 3,
  user_defined = 4,
  unused = 5,
  byte = 6,
};

// Tokens with a special role, by their names in GGUF and in Hugging Face.
struct NamedToken {
  const char* gguf;  // tokenizer.ggml.NAME_token_id
  const char* hf;    // NAME_token
};
inline constexpr NamedToken kNamedTokens[] = {
    {"bos", "bos"},     {"eos", "eos"},       {"unknown", "unk"},
    {"padding", "pad"}, {"seperator", "sep"},  // llama.cpp's spelling
    {"cls", "cls"},     {"mask", "mask"},
};
inline constexpr std::size_t kBos = 0, kEos = 1, kUnk = 2, kPad = 3;

// Limits for files that are not trusted.
inline constexpr std::size_t kMostTokens = std::size_t{1} << 20;
inline constexpr std::size_t kMostAddedTokens = std::size_t{1} << 17;
inline constexpr std::size_t kMostMerges = std::size_t{1} << 22;
inline constexpr std::size_t kMostTokenizerBytes = std::size_t{64} << 20;  // of a file read
inline constexpr std::size_t kMostWrittenBytes = std::size_t{48} << 20;    // of tokenizer.json
inline constexpr std::size_t kMostPieceBytes = 512;  // of a token whose merges are looked for

// Which token has a text: open addressing over ids, since a node for each costs more than the text.
class TokenIndex {
 public:
  explicit TokenIndex(std::size_t tokens);
  // The id that is there already, or -1 when `id` was put.
  std::int64_t put(std::span<const std::string_view> texts, std::uint32_t id);
  std::int64_t find(std::span<const std::string_view> texts, std::string_view text) const;  // or -1

 private:
  std::size_t slot(std::span<const std::string_view> texts, std::string_view text) const;
  std::vector<std::uint32_t> slots_;  // id + 1
};

// How sentencepiece's BPE comes to a token: from any two that make it, longer left parts first, as
// Hugging Face orders them. A letter that is no token is one of a pair to llama.cpp alone.
struct PieceSplit {
  std::size_t left = 0;  // bytes
  bool tokens = true;    // both are tokens; else one is a single letter that is none
};
std::vector<PieceSplit> piece_splits(std::span<const std::string_view> texts,
                                     const TokenIndex& index, std::string_view piece);
// The letter that a token repeats, or nothing where it has others or just one.
//
// Tokens of equal rank are told apart by place in llama.cpp, the leftmost first, and by an order of
// merges in tokenizer.json. When they are all runs of one letter there are, both agree if merges
// with the longer left part come first: left to right, a run grows until it can grow no more, so
// that the leftmost pair that fits is the one with the longest left part.
std::string_view repeated_letter(std::string_view token);
int byte_token(std::string_view text);  // 10 for "<0x0A>", -1 for any other text
std::string byte_token(int byte);

inline constexpr const char* kSpaceMark = "\xe2\x96\x81";  // U+2581, a space to sentencepiece

// llama.cpp lets the special tokens of a model take the spaces after them, all but a few, where
// "phi-3" or "phi3" is in general.name: no key says so.
bool named_phi3(std::string_view name);
bool phi3_strips(std::string_view special_token);
inline constexpr const char* kPhi3Tokens[] = {"</s>", "<unk>", "<s>", "<|endoftext|>"};  // must be
// A name as like the given one as can be that says whether tokens do that.
std::string named_for(std::string name, bool strips);

bool is_utf8(std::string_view text);
std::string padding_token(std::size_t id);  // "[PAD123]", llama.cpp's for an id without a token

}  // namespace bittern
