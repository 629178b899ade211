// The KV codec's rotations in plain scalar form, operation by operation as bittern/aura_desc.h
// states them.
#pragma once
#include <bit>

#include "bittern/aura_desc.h"
#include "core/host_device.h"

namespace bittern {

// A length of codes, or a projection on them, at or below this divides nothing.
inline constexpr float kAuraTiny = 1e-8f;

// aura_encode's step 1: a sum of squares from this to the largest finite f32 is ordinary. (Squares
// that underflow are worth 2^-39 of such a sum at most.)
inline constexpr float kAuraLeastSquares = 0x1p-100f;
// Of any other row: powers of two whose product is 1. A finite row times `down` has its largest
// element in [2^-23, 4), and ordinary squares; zeros stay zeros.
struct AuraRange {
  float down, up;
};
inline constexpr std::uint32_t kAuraNotFinite = 0x7f800000u;  // infinity; a NaN is above it
// `most` is the largest of the elements' bits without their signs.
BITTERN_HOST_DEVICE inline AuraRange aura_range(std::uint32_t most) {
  const std::uint32_t field = most >> 23, exponent = field < 1 ? 1 : field > 253 ? 253 : field;
  return {std::bit_cast<float>((254 - exponent) << 23), std::bit_cast<float>(exponent << 23)};
}

// H_m, row-major [m, m], each entry +1 or -1; m one of kHadamardFactors. Made once.
const float* hadamard_matrix(std::int64_t m);

// The f32 nearest to dim^-1/2.
float hadamard_scale(std::int64_t dim);

// row := P (factor row), or P^T (factor row) if `inverse`; a hadamard rotation has one scale for
// both. `table` is what `rotation` needs: null, signs or a matrix.
void rotate_row(Rotation rotation, std::int64_t dim, const float* table, bool inverse, float* row,
                float factor = 1);

}  // namespace bittern
