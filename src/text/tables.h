// What a tokeniser is once its files are read: everything that encode and decode need.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/status.h"
#include "bittern/tokenizer.h"
#include "convert/tokenizer_table.h"
#include "text/bpe.h"
#include "text/chat.h"
#include "text/cutter.h"

namespace bittern::text {

// Texts by their beginnings: which of them are at a place of another text.
class TextTrie {
 public:
  void put(std::string_view text, std::uint32_t value);
  // f(value, bytes) for each text that is at the beginning of `text`, the shortest first.
  template <class F>
  void each(std::string_view text, F&& f) const {
    if (nodes_.empty()) return;
    std::int32_t node = first_[static_cast<unsigned char>(text[0])];
    for (std::size_t i = 0; node >= 0;) {
      const Node& n = nodes_[static_cast<std::size_t>(node)];
      if (n.byte != text[i]) {
        node = n.sibling;
        continue;
      }
      ++i;
      if (n.value >= 0) f(static_cast<std::uint32_t>(n.value), i);
      if (i == text.size()) return;
      node = n.child;
    }
  }
  bool empty() const { return nodes_.empty(); }

 private:
  struct Node {
    char byte = 0;
    std::int32_t value = -1, child = -1, sibling = -1;
  };
  std::vector<Node> nodes_;
  std::array<std::int32_t, 256> first_ = [] {
    std::array<std::int32_t, 256> none{};
    none.fill(-1);
    return none;
  }();
};

// A token that is looked for in the text before anything else happens to it.
struct AddedText {
  std::int32_t id = 0;
  std::string content;
  bool special = false;      // a control token
  bool lstrip = false;       // takes the spaces before it
  bool rstrip = false;       // takes the spaces after it
  bool single_word = false;  // only where no letter or digit touches it
  bool normalized = false;   // looked for after normalisation
  bool control = false;      // special, or what divides the turns of a conversation
};

struct Normalizer {
  enum class Kind { nfc, nfd, nfkc, nfkd, prepend, replace };
  Kind kind = Kind::nfc;
  std::string from{}, to{};  // prepend: `to`
};

// Where a space is put before text that has none.
enum class SpacePrefix { never, first, always };

class TokenizerTables {
 public:
  enum class Kind {
    byte_level,  // words of bytes, joined by merges
    merges,      // sentencepiece's letters, joined by merges: tokenizer.json
    scores,      // sentencepiece's letters, joined by scores: GGUF, tokenizer.model
  };

  std::string path;  // of the file the tokens are in
  Kind kind = Kind::byte_level;
  // Corner cases of llama.cpp (true) or of Hugging Face's tokenizers.
  bool like_llama_cpp = false;

  // ---- tokens, by id ----
  std::vector<std::string> texts;  // as the file spells them
  std::vector<std::string_view> views;
  TokenIndex index{0};
  std::vector<std::string> pieces;  // the bytes that a token stands for
  std::vector<bool> special;
  std::vector<float> scores;                 // kind scores
  MergeTable merges;                         // the other kinds
  bool ignore_merges = false;                // a word that is a token is that token
  std::array<std::int32_t, 256> byte_ids{};  // the token of each byte, -1: none
  std::int32_t unknown = -1;
  bool fuse_unknown = false;

  // ---- what happens to text ----
  std::vector<AddedText> added;
  std::vector<Normalizer> normalizers;
  Cutter cutter;
  bool marks_spaces = false;  // as U+2581, after normalisation
  SpacePrefix space_prefix = SpacePrefix::never;
  bool prefix_unless_space = false;         // Metaspace: not where there is one
  bool strip_first_space = false;           // decode takes the prefix off again
  std::vector<std::int32_t> before, after;  // put around the text

  std::optional<std::int32_t> bos, eos;
  std::vector<std::int32_t> ends;
  std::string chat_template;

  // Fills what follows from the rest: views, index, pieces. Refuses tokens that are there twice.
  Status finish();
  std::int64_t find(std::string_view text) const { return index.find(views, text); }
  std::string where(std::string_view what) const { return path + ": " + std::string(what) + ": "; }

  Status encode(std::string_view text, const EncodeOptions& options,
                std::vector<std::int32_t>& ids) const;
  Status encode_chat(std::span<const ChatPart> parts, std::vector<std::int32_t>& ids) const;

 private:
  struct Range {
    std::size_t begin, end;
  };
  // Where control tokens are looked for: in all of the text or none of it, or in ranges.
  struct Controls {
    bool everywhere = true;
    std::span<const Range> ranges{};
    bool allow(std::size_t begin, std::size_t end) const;
  };
  struct Fragment {
    std::string_view text;
    std::int32_t id = -1;  // of an added token, else -1: text
  };
  struct WordCache;
  std::vector<Fragment> find_added(std::string_view text, const TextTrie& trie,
                                   const Controls& controls) const;
  std::vector<Fragment> partition(std::string_view text, const Controls& controls) const;
  // The text as UTF-8, which regular expressions need. Scores need no letters: there bytes stay,
  // and become byte tokens.
  std::string_view as_utf8(std::string_view text, std::string& made) const;
  Status encode_text(std::string_view text, const Controls& controls,
                     std::vector<std::int32_t>& ids) const;
  Status encode_fragment(std::string_view text, bool first, WordCache& words,
                         std::vector<std::int32_t>& ids) const;
  Status encode_bytes(std::string_view text, WordCache& words,
                      std::vector<std::int32_t>& ids) const;
  void encode_letters(std::string_view text, std::vector<std::int32_t>& ids) const;
  void put_unknown(std::string_view letter, std::vector<std::uint32_t>& ids) const;

  TextTrie added_trie_, normalized_trie_;
  // In a conversation all control tokens are looked for before normalisation, which moves text.
  TextTrie chat_trie_, normalized_plain_trie_;
};

Result<TokenizerTables> read_gguf_tokenizer(const std::string& path);
Result<TokenizerTables> read_folder_tokenizer(const std::string& folder);

// GPT-2's letters for bytes: printable ones stand for themselves.
const std::array<std::string, 256>& byte_letters();
// The bytes of a token spelled so; nothing where a letter stands for no byte.
std::optional<std::string> bytes_of_letters(std::string_view text);

}  // namespace bittern::text
