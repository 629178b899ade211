// Cases and contents that the ops of the KV codec share.
#pragma once
#include "bittern/aura_desc.h"
#include "oracle/oracle.h"

namespace bittern::oracle {

// Row lengths with every kind of tail x rotations, with bits, dtypes and rules taken in turn.
std::vector<AuraDesc> aura_cases();

// What the operand must hold: signs or an orthogonal matrix for `rotation`, the sphere's tables for
// `boundaries` and `codebook`, positive scales near 1. Other operands are left alone.
void fill_aura(const AuraDesc& d, std::string_view operand, const ConstView& view, Rng& rng);

// Rows as the codec meets them: ordinary ones of any size, with outliers, constant, one-hot, zero,
// of tiny norm, of a norm that overflows, with NaN or an infinity. The last axis is the row.
void aim_rows(const ConstView& x, Rng& rng);

// Row `row` of x: its rotated coordinates lie on boundaries, or a few ulps beside them. They are
// those of a unit vector, as far as boundaries allow, turned back and scaled by a power of two.
void aim_at_boundaries(const AuraDesc& d, const float* table, const float* boundaries,
                       const ConstView& x, std::int64_t row, Rng& rng);

}  // namespace bittern::oracle
