// What the plan and the run share: making rows of a tensor.
#pragma once
#include <optional>
#include <span>

#include "bittern/affine_desc.h"
#include "bittern/status.h"
#include "convert/conversion.h"
#include "formats/checkpoint.h"

namespace bittern {

// Makes the tensor's first row as Conversion::run does, and drops it.
Status try_first_row(const Checkpoint& source, const OutputTensor& tensor,
                     std::optional<AffineMethod> method, bool saturate,
                     std::span<const float> importance);

}  // namespace bittern
