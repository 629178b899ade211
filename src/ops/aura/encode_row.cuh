// A row of the KV codec encoded by the definition (bittern/ops/aura_encode.h), a warp to it.
#pragma once
#include <limits>

#include "bittern/aura_desc.h"
#include "core/numerics.h"
#include "ops/aura/aura_lanes.cuh"
#include "ops/aura/aura_rotation.cuh"

namespace bittern::encode {

using cuda::kAllLanes;
using cuda::lane_index;
using cuda::RowRotation;
using cuda::warp_index;

// How rows are coded, as a kernel's parameter.
struct RowCoder {
  const float *boundaries, *codebook;
  RowRotation rotation;
  ScaleRule rule;
  int bits, words;  // of a code; of a packed row

  __host__ __device__ bool needs_products() const {
    return rule == ScaleRule::least_squares || rule == ScaleRule::unbiased;
  }
};

// `d` has the row's length, bits, rotation and rule.
inline RowCoder row_coder(const AuraDesc& d, const float* table, const float* boundaries,
                          const float* codebook) {
  return {.boundaries = boundaries,
          .codebook = codebook,
          .rotation = cuda::row_rotation(d.rotation, d.dim, table, false),
          .rule = d.scale_rule,
          .bits = d.bits,
          .words = static_cast<int>(packed_words(d.dim, d.bits))};
}

__device__ inline float stored_scale(ScaleRule rule, float norm, float cc, float rc) {
  switch (rule) {
    case ScaleRule::matched: return sqrtf(cc) > kAuraTiny ? norm / sqrtf(cc) : norm;
    case ScaleRule::least_squares: return sqrtf(cc) > kAuraTiny ? norm * (rc / cc) : norm;
    case ScaleRule::unbiased: return rc > kAuraTiny ? norm / rc : norm;
    default: return norm;
  }
}

__device__ inline float limited(float s, float most) {
  if (s > most) s = most;
  if (s < -most) s = -most;
  return s;
}
__device__ inline void store_scale(void* scales, bool f16_scale, std::int64_t at, float s) {
  s = limited(s, f16_scale ? max_finite<f16>() : max_finite<float>());
  cuda::store_element(scales, f16_scale ? DType::f16 : DType::f32, at, s);
}

// The number of sorted boundaries below r, 0 for a NaN: one bit of it
// after the other.
__device__ inline unsigned count_below(const float* boundaries, int bits, float r) {
  unsigned count = 0;
  for (unsigned step = 1u << (bits - 1); step > 0; step /= 2)
    if (r > __ldg(boundaries + count + step - 1)) count += step;
  return count;
}

// dot() of a(j) and b(j): lane l has chain l.
template <class A, class B>
__device__ float dot_by_warp(int n, const A& a, const B& b) {
  float chain = 0;
  for (int j = lane_index(); j < n; j += 32) chain = fmaf(a(j), b(j), chain);
  return cuda::sum_across(chain, 16);
}
// sum() of term(j): lane l keeps the eights i of i / 4 % 8 = l % 8, i % 4 = l / 8.
template <class Term>
__device__ float sum_by_warp(int n, const Term& term) {
  const int lane = lane_index();
  const float eights = cuda::halving_sum<0, 1, kAuraMaxDim / 256>([&](int block) {
    float mine = 0;
    for (int first = 256 * block; first < 256 * (block + 1) && first < n; first += 32) {
      float sum = first + lane < n ? term(first + lane) : 0.0f;
      for (int step = 1; step < 8; step *= 2) sum += cuda::across(sum, step);
      if (first / 32 % 8 == lane % 8) mine = sum;
    }
    return mine;
  });
  return cuda::sum_across(cuda::sum_across(eights, 4), 16, 8);
}

struct Length {
  float norm, inv;
  bool finite;
};

__device__ inline bool ordinary(float squares) {
  return squares >= kAuraLeastSquares && squares <= max_finite<float>();
}

// Step 1 of a row t, where lane l has written the elements of j % 32 = l; t is multiplied by a
// power of two where its squares are not ordinary.
__device__ inline Length measure_row(int n, float* t) {
  const int lane = lane_index();
  const auto element = [&](int j) { return t[j]; };
  float squares = dot_by_warp(n, element, element);
  AuraRange range{1, 1};
  bool finite = true;
  if (!ordinary(squares)) {
    std::uint32_t most = 0;
    for (int j = lane; j < n; j += 32) most = max(most, __float_as_uint(fabsf(t[j])));
    most = __reduce_max_sync(kAllLanes, most);
    finite = most < kAuraNotFinite;
    range = aura_range(most);
    for (int j = lane; j < n; j += 32) t[j] *= range.down;
    squares = dot_by_warp(n, element, element);
  }
  const float norm = sqrtf(squares);
  return {fminf(norm * range.up, max_finite<float>()), norm > 0 ? 1 / norm : 0.0f, finite};
}
// Step 4 of a row whose codes every lane can read.
__device__ inline void pack_row(const RowCoder& p, const std::uint32_t* codes,
                                std::uint32_t* packed) {
  for (int w = lane_index(); w < p.words; w += 32) {
    std::uint32_t word = 0;
    int j = 32 * w / p.bits, at = j * p.bits - 32 * w;  // the first code that reaches this word
    for (; at < 32 && j < p.rotation.dim; ++j, at += p.bits)
      word |= at < 0 ? codes[j] >> -at : codes[j] << at;
    packed[w] = word;
  }
}

// Steps 3 to 5, with room for the codes of a row; gives s, before it is limited.
__device__ inline float quantise_row(const RowCoder& p, Length length, const float* r,
                                     std::uint32_t* codes, std::uint32_t* packed) {
  const int n = p.rotation.dim;
  for (int j = lane_index(); j < n; j += 32)
    codes[j] = length.finite ? count_below(p.boundaries, p.bits, r[j]) : 0;
  const auto coordinate = [&](int j) { return r[j]; };
  const auto level = [&](int j) { return __ldg(p.codebook + codes[j]); };
  float cc = 0, rc = 0;
  if (p.rule != ScaleRule::none) cc = sum_by_warp(n, [&](int j) { return level(j) * level(j); });
  if (p.needs_products()) rc = dot_by_warp(n, coordinate, level) + 0.0f;
  __syncwarp();
  pack_row(p, codes, packed);
  const float s = stored_scale(p.rule, length.norm, cc, rc);
  return length.finite ? s : std::numeric_limits<float>::quiet_NaN();
}

// Steps 2 to 5 of the row that measure_row left in the first half of `scratch`, which holds two.
__device__ inline float encode_row(const RowCoder& p, Length length, float* scratch,
                                   std::uint32_t* packed) {
  float* const spare = scratch + p.rotation.dim;
  const float* r = cuda::rotate_by_warp(p.rotation, scratch, spare, length.inv);
  return quantise_row(p, length, r,
                      reinterpret_cast<std::uint32_t*>(r == scratch ? spare : scratch), packed);
}

}  // namespace bittern::encode
