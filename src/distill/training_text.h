// The text that a student learns from, as pieces of tokens: some are held out, none of which is
// among the others.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "bittern/status.h"
#include "distill/calibration_text.h"

namespace bittern {

struct TrainingText {
  CalibrationText train, validation;

  std::uint64_t fingerprint() const;
  // All pieces in the order in which they are learned from for the n-th time, which the seed
  // decides.
  std::vector<std::int64_t> order(std::int64_t n, std::uint64_t seed) const;
};

// The pieces of the texts at `paths`, by the tokeniser of the model at `model`.
Result<CalibrationText> read_texts(const std::string& model, const std::vector<std::string>& paths,
                                   std::int64_t context);
// Some pieces, evenly spread, are held out.
Result<TrainingText> hold_out(const CalibrationText& all, std::int64_t validation);

}  // namespace bittern
