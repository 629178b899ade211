#include "ops/aura/encode_ref.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "core/dot.h"
#include "ops/aura/aura.h"

namespace bittern {
namespace {

// Of c_j c_j: of eight neighbours those 1 apart are added, then 2, then 4; then the halving tree of
// the eights.
float sum_of_eights(const std::vector<float>& c) {
  std::vector<float> eights;
  for (std::size_t first = 0; first < c.size(); first += 8) {
    float square[8] = {};
    for (std::size_t i = 0; i < 8 && first + i < c.size(); ++i)
      square[i] = c[first + i] * c[first + i];
    eights.push_back(((square[0] + square[1]) + (square[2] + square[3])) +
                     ((square[4] + square[5]) + (square[6] + square[7])));
  }
  return halving_sum(eights);
}

float scale_by(ScaleRule rule, float norm, float cc, float rc) {
  switch (rule) {
    case ScaleRule::matched: return std::sqrt(cc) > kAuraTiny ? norm / std::sqrt(cc) : norm;
    case ScaleRule::none: return norm;
    case ScaleRule::least_squares: return std::sqrt(cc) > kAuraTiny ? norm * (rc / cc) : norm;
    case ScaleRule::unbiased: return rc > kAuraTiny ? norm / rc : norm;
  }
  return norm;
}

}  // namespace

float encode_row(const AuraDesc& d, const float* table, const float* boundaries,
                 const float* codebook, float* x, std::uint32_t* codes) {
  std::uint32_t most = 0;
  for (std::int64_t j = 0; j < d.dim; ++j)
    most = std::max(most, std::bit_cast<std::uint32_t>(std::fabs(x[j])));
  if (most >= kAuraNotFinite) {
    std::fill_n(codes, d.dim, 0u);
    return std::numeric_limits<float>::quiet_NaN();
  }
  const auto squares = [&] { return dot<32>(x, x, d.dim); };
  const bool ordinary = squares() >= kAuraLeastSquares && std::isfinite(squares());
  const AuraRange range = ordinary ? AuraRange{1, 1} : aura_range(most);
  for (std::int64_t j = 0; j < d.dim; ++j) x[j] *= range.down;
  float norm = std::sqrt(squares());
  const float inv = norm > 0 ? 1 / norm : 0;
  norm = std::min(norm * range.up, max_finite<float>());
  rotate_row(d.rotation, d.dim, table, false, x, inv);

  std::vector<float> c(static_cast<std::size_t>(d.dim));
  for (std::int64_t j = 0; j < d.dim; ++j) {
    codes[j] = 0;
    for (std::int64_t k = 0; k + 1 < d.levels(); ++k) codes[j] += x[j] > boundaries[k] ? 1 : 0;
    c[static_cast<std::size_t>(j)] = codebook[codes[j]];
  }
  const float cc = sum_of_eights(c), rc = dot<32>(x, c.data(), d.dim) + 0.0f;
  return scale_by(d.scale_rule, norm, cc, rc);
}

void pack_row(const AuraDesc& d, const std::uint32_t* codes, std::uint32_t* packed) {
  std::fill_n(packed, packed_words(d.dim, d.bits), 0u);
  for (std::int64_t j = 0; j < d.dim; ++j) put_packed_code(packed, j, d.bits, codes[j]);
}

}  // namespace bittern
