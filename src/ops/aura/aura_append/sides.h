// The operands of aura_append by side, so that K and V are one piece of code.
#pragma once
#include "bittern/ops/aura_append.h"

namespace bittern::append {

struct Side {
  bool is_k;
  AuraDesc coding;  // how a row is coded
  ConstView x;
  const float *table, *boundaries, *codebook;
  const float* mean;  // null: none
  MutView packed, scales, kept;
};

inline AuraDesc coding(const AuraAppendDesc& d, std::int32_t bits, Rotation rotation,
                       ScaleRule rule) {
  return {.rows = 1, .dim = d.dim, .bits = bits, .rotation = rotation, .scale_rule = rule};
}
inline Side k_side(const AuraAppendDesc& d, const AuraAppend::Args& a) {
  return {.is_k = true,
          .coding = coding(d, d.k_bits, d.k_rotation, d.k_scale_rule),
          .x = a.k,
          .table = a.k_table.as<float>(),
          .boundaries = a.k_boundaries.as<float>(),
          .codebook = a.k_codebook.as<float>(),
          .mean = a.k_mean.as<float>(),
          .packed = a.k_packed,
          .scales = a.k_scales,
          .kept = a.k_kept};
}
inline Side v_side(const AuraAppendDesc& d, const AuraAppend::Args& a) {
  return {.is_k = false,
          .coding = coding(d, d.v_bits, d.v_rotation, d.v_scale_rule),
          .x = a.v,
          .table = a.v_table.as<float>(),
          .boundaries = a.v_boundaries.as<float>(),
          .codebook = a.v_codebook.as<float>(),
          .mean = a.v_mean.as<float>(),
          .packed = a.v_packed,
          .scales = a.v_scales,
          .kept = a.v_kept};
}

}  // namespace bittern::append
