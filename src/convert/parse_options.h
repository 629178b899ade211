// From the words of QuantizeOptions to the types of ConversionOptions.
#pragma once
#include <string>

#include "bittern/convert.h"
#include "bittern/status.h"
#include "convert/conversion.h"

namespace bittern {

// Refuses every word and number that no model and no other option could make right, and reads the
// policy. `out`, which may be empty, decides the format where none is given.
// `coder`: that of asked.method, where it is no rule for rows.
Result<ConversionOptions> parse_options(const QuantizeOptions& asked, const std::string& out,
                                        MatrixCoder* coder);

// Whether `threads` may run at once; ok where none are asked for.
Status check_threads(const std::optional<int>& threads);

}  // namespace bittern
