// How a teacher, its student before learning, and the student after it go on after the same words.
#pragma once
#include <vector>

#include "bittern/distill.h"
#include "bittern/model.h"
#include "bittern/status.h"
#include "bittern/tokenizer.h"
#include "distill/calibration_text.h"

namespace bittern {

// After the first words of a few pieces of `text`, each model's likeliest tokens.
Result<std::vector<DistillSample>> write_samples(const Tokenizer& tokenizer,
                                                 const CalibrationText& text, const Model& teacher,
                                                 const Model& start, const Model& result);

}  // namespace bittern
