// Quantisation by what a model's layers see: the model is run on a text, and codes are chosen so
// that products with those inputs change least (docs/quantize.md). Link bittern::model.
//
//   auto report = quantize_calibrated("model", "model-4bit",
//                                     {.bits = 4, .method = "gptq", .data = "text.txt"});
//
// Results are the same bytes for any number of threads and on every SIMD target.
#pragma once
#include <string>

#include "bittern/convert.h"
#include "bittern/status.h"

namespace bittern {

// quantize_model with one method more, "gptq", which options.data, pieces and context are for.
Result<QuantizeReport> quantize_calibrated(const std::string& source, const std::string& out,
                                           const QuantizeOptions& options = {}) noexcept;

}  // namespace bittern
