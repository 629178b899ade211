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
  // The piece that is the n-th to be learned from: all in an order that the seed decides, then all
  // in another, and so on.
  std::int64_t nth(std::int64_t n, std::uint64_t seed) const;
};

// Of the texts at `paths`, one behind the other, by the tokeniser of the model at `model`.
Result<TrainingText> read_training_text(const std::string& model,
                                        const std::vector<std::string>& paths, std::int64_t context,
                                        std::int64_t validation);

}  // namespace bittern
