// The text that a model is calibrated on, as tokens.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "bittern/status.h"
#include "bittern/tokenizer.h"

namespace bittern {

struct CalibrationText {
  std::int64_t context = 0;          // tokens of a piece
  std::vector<std::int32_t> tokens;  // of all pieces, one behind the other

  std::int64_t pieces() const { return static_cast<std::int64_t>(tokens.size()) / context; }
  const std::int32_t* piece(std::int64_t i) const { return tokens.data() + i * context; }
  void add(const std::int32_t* piece) { tokens.insert(tokens.end(), piece, piece + context); }
};

// All of the text at `path`, by this tokeniser, with what is left after its last piece. A file that
// is called .jsonl has an object a line: {"messages": [{"role": ..., "content": ...}, ...]}, a
// conversation by the model's own template, or {"text": ...}.
Result<CalibrationText> read_pieces(const Tokenizer& tokenizer, const std::string& path,
                                    std::int64_t context);
// At most `pieces` of a text, evenly spread.
CalibrationText some_of(const CalibrationText& text, std::int64_t pieces);

// At most `pieces` of the text at `path`, evenly spread, by the tokeniser of the model at `model`.
Result<CalibrationText> read_calibration_text(const std::string& model, const std::string& path,
                                              std::int64_t pieces, std::int64_t context);

}  // namespace bittern
