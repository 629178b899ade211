// The text that a model is calibrated on, as tokens.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "bittern/status.h"

namespace bittern {

struct CalibrationText {
  std::int64_t context = 0;          // tokens of a piece
  std::vector<std::int32_t> tokens;  // of all pieces, one behind the other

  std::int64_t pieces() const { return static_cast<std::int64_t>(tokens.size()) / context; }
  const std::int32_t* piece(std::int64_t i) const { return tokens.data() + i * context; }
};

// At most `pieces` of the text at `path`, evenly spread, by the tokeniser of the model at `model`.
Result<CalibrationText> read_calibration_text(const std::string& model, const std::string& path,
                                              std::int64_t pieces, std::int64_t context);

}  // namespace bittern
