#include <bit>
#include <cmath>
#include <vector>

#include "bittern/ops/aura_encode.h"
#include "core/dot.h"
#include "core/numerics.h"
#include "ops/aura/aura.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = AuraEncode;
using Row = std::vector<float>;

// Of c_j c_j: of eight neighbours those 1 apart are added, then 2, then 4; then the halving tree of
// the eights.
float sum_of_eights(const Row& c) {
  Row eights;
  for (std::size_t first = 0; first < c.size(); first += 8) {
    float square[8] = {};
    for (std::size_t i = 0; i < 8 && first + i < c.size(); ++i)
      square[i] = c[first + i] * c[first + i];
    eights.push_back(((square[0] + square[1]) + (square[2] + square[3])) +
                     ((square[4] + square[5]) + (square[6] + square[7])));
  }
  return halving_sum(eights);
}

float stored_scale(ScaleRule rule, float norm, float cc, float rc) {
  switch (rule) {
    case ScaleRule::matched: return std::sqrt(cc) > kAuraTiny ? norm / std::sqrt(cc) : norm;
    case ScaleRule::none: return norm;
    case ScaleRule::least_squares: return std::sqrt(cc) > kAuraTiny ? norm * (rc / cc) : norm;
    case ScaleRule::unbiased: return rc > kAuraTiny ? norm / rc : norm;
  }
  return norm;
}

// A row's codes; gives its s.
float encode(const Op::Desc& d, const Op::Args& a, Row& x, std::vector<std::uint32_t>& codes) {
  const std::size_t n = x.size();
  std::uint32_t most = 0;
  for (const float v : x) most = std::max(most, std::bit_cast<std::uint32_t>(std::fabs(v)));
  if (most >= kAuraNotFinite) {
    codes.assign(n, 0);
    return std::numeric_limits<float>::quiet_NaN();
  }
  const auto squares = [&] { return dot<32>(x.data(), x.data(), d.dim); };
  const bool ordinary = squares() >= kAuraLeastSquares && std::isfinite(squares());
  const AuraRange range = ordinary ? AuraRange{1, 1} : aura_range(most);
  for (float& v : x) v *= range.down;
  float norm = std::sqrt(squares());
  const float inv = norm > 0 ? 1 / norm : 0;
  norm = std::min(norm * range.up, max_finite<float>());
  rotate_row(d.rotation, d.dim, a.table.as<float>(), false, x.data(), inv);

  const float* boundaries = a.boundaries.as<float>();
  for (std::size_t j = 0; j < n; ++j) {
    codes[j] = 0;
    for (std::int64_t k = 0; k + 1 < d.levels(); ++k) codes[j] += x[j] > boundaries[k] ? 1 : 0;
  }
  const float* codebook = a.codebook.as<float>();
  Row c(n);
  for (std::size_t j = 0; j < n; ++j) c[j] = codebook[codes[j]];
  const float cc = sum_of_eights(c), rc = dot<32>(x.data(), c.data(), d.dim) + 0.0f;
  return stored_scale(d.scale_rule, norm, cc, rc);
}

template <class T>
T saturated(float s) {
  if (s > max_finite<T>()) s = max_finite<T>();
  if (s < -max_finite<T>()) s = -max_finite<T>();
  return from_math<T>(s);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    return visit<float, f16>(d.scale_element(), [&]<class N>(Type<N>) {
      const auto n = static_cast<std::size_t>(d.dim);
      Row row(n);
      std::vector<std::uint32_t> codes(n);
      for (std::int64_t i = 0; i < d.rows; ++i) {
        const X* x = a.x.as<X>() + i * a.x.row_stride();
        for (std::size_t j = 0; j < n; ++j) row[j] = to_math(x[j]);
        a.scales.as<N>()[i * a.scales.row_stride()] = saturated<N>(encode(d, a, row, codes));
        std::uint32_t* packed = a.packed.as<std::uint32_t>() + i * a.packed.row_stride();
        std::fill_n(packed, packed_words(d.dim, d.bits), 0u);
        for (std::int64_t j = 0; j < d.dim; ++j)
          put_packed_code(packed, j, d.bits, codes[static_cast<std::size_t>(j)]);
      }
      return Status();
    });
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<AuraEncode>> aura_encode_ref() { return kKernels; }

}  // namespace bittern
