// A text that a model writes itself, to learn from where there is no other.
#pragma once
#include <cstdint>
#include <functional>

#include "bittern/model.h"
#include "bittern/ranks.h"
#include "bittern/status.h"
#include "bittern/tokenizer.h"
#include "distill/calibration_text.h"

namespace bittern {

// Each piece begins with bos (eos, where the model has none) and goes on with tokens drawn from the
// model's own predictions, one after another, also past the end of an answer. The same model and
// seed give the same tokens. `tell` is called with the share that is written; an error ends it.
// Processes share the pieces.
Result<CalibrationText> write_text(const Model& model, const Tokenizer& tokenizer,
                                   std::int64_t pieces, std::int64_t context, std::uint64_t seed,
                                   const std::function<Status(double share)>& tell,
                                   Ranks* ranks = nullptr);

}  // namespace bittern
