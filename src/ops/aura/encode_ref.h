// A row by the definition of bittern/ops/aura_encode.h, for the ops that encode.
#pragma once
#include <cstdint>

#include "bittern/aura_desc.h"
#include "core/numerics.h"

namespace bittern {

// Steps 1 to 5: the codes of a row, which is overwritten, and s before it is limited to a dtype.
// `d` has the row's length, bits, rotation and rule.
float encode_row(const AuraDesc& d, const float* table, const float* boundaries,
                 const float* codebook, float* row, std::uint32_t* codes);

// Step 4: words of a row.
void pack_row(const AuraDesc& d, const std::uint32_t* codes, std::uint32_t* packed);

// s as the scales' dtype holds it.
template <class T>
T stored_scale(float s) {
  if (s > max_finite<T>()) s = max_finite<T>();
  if (s < -max_finite<T>()) s = -max_finite<T>();
  return from_math<T>(s);
}

}  // namespace bittern
