// Byte pair encoding: of the neighbours that can be joined, those of the best rank are, the
// leftmost first among equals, until none can.
#pragma once
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "convert/tokenizer_table.h"

namespace bittern::text {

// The merges of a model: which token two neighbours become, and before which others.
class MergeTable {
 public:
  struct Merge {
    std::uint32_t rank = kNone, joined = 0;
  };
  static constexpr std::uint32_t kNone = 0xffffffff;

  explicit MergeTable(std::size_t merges = 0);
  // Merges are put by falling rank of preference. Of a pair that is put twice the last counts, as
  // in Hugging Face's, or the first, as in llama.cpp.
  void put(std::uint32_t left, std::uint32_t right, std::uint32_t joined, bool last_counts);
  Merge find(std::uint32_t left, std::uint32_t right) const;

 private:
  struct Entry {
    std::uint64_t pair = kEmpty;
    Merge merge;
  };
  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};
  std::size_t slot(std::uint64_t pair) const;
  std::vector<Entry> entries_;
  std::uint32_t count_ = 0;
};

// Joins the tokens in `ids` until no two of them are in `merges`.
void merge_by_rank(const MergeTable& merges, std::vector<std::uint32_t>& ids);

// The same for a text and tokens with scores, as sentencepiece does it: letters are joined to
// the token of the highest score. f(text of a piece, its token or -1) for each piece in order;
// letters that are no token are pieces of their own.
struct ScoredTokens {
  std::span<const std::string_view> texts;
  std::span<const float> scores;
  const TokenIndex* index;
};
struct ScoredPiece {
  std::string_view text;
  std::int64_t id;
};
void merge_by_score(const ScoredTokens& tokens, std::string_view text,
                    std::vector<ScoredPiece>& pieces);

}  // namespace bittern::text
