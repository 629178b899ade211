// The KV codec's rotations in plain scalar form, operation by operation as bittern/aura_desc.h
// states them.
#pragma once
#include "bittern/aura_desc.h"

namespace bittern {

// A norm at or below this has no direction.
inline constexpr float kAuraTiny = 1e-8f;
// What a row whose squares overflow is multiplied by.
inline constexpr float kAuraShrink = 0x1p-96f;

// H_m, row-major [m, m], each entry +1 or -1; m one of kHadamardFactors. Made once.
const float* hadamard_matrix(std::int64_t m);

// The f32 nearest to dim^-1/2.
float hadamard_scale(std::int64_t dim);

// row := P (factor row), or P^T (factor row) if `inverse`; a hadamard rotation has one scale for
// both. `table` is what `rotation` needs: null, signs or a matrix.
void rotate_row(Rotation rotation, std::int64_t dim, const float* table, bool inverse, float* row,
                float factor = 1);

}  // namespace bittern
