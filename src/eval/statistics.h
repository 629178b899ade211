// From numbers, one for each position scored, to what is reported of them.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "bittern/eval.h"
#include "eval/pieces.h"

namespace bittern {

// What one model made of one piece: numbers of the positions scored, in order.
struct PieceScores {
  std::vector<double> nll;
  std::vector<double> kl, dp;  // with a teacher
  std::int64_t same1 = 0, same5 = 0;
  std::vector<double> layers;  // with EvalOptions::layers: [layers, positions]
  double seconds = 0;
};

// The same of all pieces.
struct Gathered {
  // `seconds` are not added: pieces may be read at the same time.
  void add(const PieceScores& piece);

  std::vector<double> nll;
  std::vector<double> kl, dp;
  std::int64_t same1 = 0, same5 = 0;
  bool lower_bound = false;
  std::vector<double> layers;  // sums over positions
  double seconds = 0;
};

Spread spread_of(std::vector<double> values);
ModelScore summary(const Gathered& gathered, const EvalOptions& options,
                   std::span<const Piece> pieces);

// The numbers of the k largest of a row, the largest first; of equal ones the lower number first.
void find_largest(const float* row, std::int64_t count, std::span<std::int32_t> largest);
// Whether the likeliest token is the same, and whether the five likeliest are.
struct Agreement {
  bool top1 = false, top5 = false;
};
Agreement agreement(std::array<std::int32_t, 5> a, std::array<std::int32_t, 5> b);

}  // namespace bittern
