#pragma once
#include "oracle/aim.h"

namespace bittern::oracle {

// Widths, sequences and channels with every kind of tail.
std::vector<CausalConvDesc> causal_conv_cases();

// Rows and lengths with every kind of tail, and rows of zeros, tiny or huge values among them.
std::vector<GatedNormDesc> gated_norm_cases();

// x [rows, dim]
void aim_norm_rows(const ConstView& x, std::int64_t dim, Rng& rng);

// Every kind, element and tail.
std::vector<GatedActivationDesc> gated_activation_cases();

// Gates around 0 and around every threshold of the functions, and large ones.
void aim_gates(const ConstView& gate, Rng& rng);

}  // namespace bittern::oracle
