// AURA's names, signs and tables.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "bittern/kv_cache.h"
#include "core/float_mode.h"
#include "core/guarded.h"

namespace bittern {
namespace {

Status refuse(std::string_view name) {
  return invalid("aura scheme: " + std::string(name) + ", expected aura{1..8}[v{1..8}]");
}

// Centroids for d = 128 that were shipped, the positive half.
constexpr float kTwo[] = {0.039994f, 0.133462f};
constexpr float kThree[] = {0.021460f, 0.065717f, 0.117832f, 0.190685f};
constexpr float kFour[] = {0.006938f, 0.020989f, 0.035597f, 0.051262f,
                           0.068756f, 0.089527f, 0.117195f, 0.173926f};

// The 8-bit table is the state of its generator when it stopped, after 100 sweeps of k-means over
// 32768 points of [-1, 1], weighted by the density for d = 128, starting from the quantiles
// (i + 1/2) / 256.
std::vector<float> eight_bits() {
  constexpr int kPoints = 32768, kLevels = 256, kSweeps = 100;
  std::vector<double> x(kPoints), sum(kPoints + 1), first(kPoints + 1);
  for (int i = 0; i < kPoints; ++i) {
    const auto n = static_cast<std::size_t>(i);
    x[n] = -1 + 2.0 * i / (kPoints - 1);
    const double weight = std::pow(std::max(1 - x[n] * x[n], 0.0), (128.0 - 3) / 2);
    sum[n + 1] = sum[n] + weight;
    first[n + 1] = first[n] + weight * x[n];
  }
  std::vector<double> c(kLevels);
  for (int i = 0; i < kLevels; ++i) {
    const double target = (i + 0.5) / kLevels * sum.back();
    const auto at = std::lower_bound(sum.begin() + 1, sum.end(), target) - (sum.begin() + 1);
    c[static_cast<std::size_t>(i)] = x[static_cast<std::size_t>(at)];
  }
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    std::size_t begin = 0;
    std::vector<double> next = c;
    for (std::size_t i = 0; i < c.size(); ++i) {
      std::size_t end = x.size();
      if (i + 1 < c.size()) {
        const double boundary = (c[i] + c[i + 1]) / 2;
        end = static_cast<std::size_t>(std::upper_bound(x.begin(), x.end(), boundary) - x.begin());
      }
      if (sum[end] > sum[begin]) next[i] = (first[end] - first[begin]) / (sum[end] - sum[begin]);
      begin = end;
    }
    c = next;
  }
  return {c.begin(), c.end()};
}

}  // namespace

Result<AuraScheme> parse_aura_name(std::string_view name) noexcept try {
  AuraScheme scheme;
  const char* end = name.data() + name.size();
  if (!name.starts_with("aura")) return refuse(name);
  auto read = std::from_chars(name.data() + 4, end, scheme.k_bits);
  if (read.ec != std::errc()) return refuse(name);
  scheme.v_bits = scheme.k_bits;
  if (read.ptr != end) {
    if (*read.ptr != 'v') return refuse(name);
    read = std::from_chars(read.ptr + 1, end, scheme.v_bits);
    if (read.ec != std::errc() || read.ptr != end) return refuse(name);
  }
  for (const std::int32_t bits : {scheme.k_bits, scheme.v_bits})
    if (bits < 1 || bits > 8) return refuse(name);
  return scheme;
} catch (...) {
  return caught("aura scheme");
}

std::string aura_name(const AuraScheme& scheme) noexcept try {
  return "aura" + std::to_string(scheme.k_bits) + "v" + std::to_string(scheme.v_bits);
} catch (...) {
  return "aura";
}

Result<Codebook> legacy_codebook(std::int64_t dim, std::int32_t bits) noexcept try {
  const FloatMode mode;
  if (dim < kAuraMinDim || dim > kAuraMaxDim) {
    return invalid("legacy_codebook: dim: " + std::to_string(dim) + ", expected 2..1024");
  }
  Codebook codebook;
  const auto mirror = [&](std::span<const float> half) {
    for (std::size_t i = half.size(); i-- > 0;) codebook.levels.push_back(-half[i]);
    codebook.levels.insert(codebook.levels.end(), half.begin(), half.end());
  };
  switch (bits) {
    case 2: mirror(kTwo); break;
    case 3: mirror(kThree); break;
    case 4: mirror(kFour); break;
    case 8: codebook.levels = eight_bits(); break;
    default:
      return invalid("legacy_codebook: bits: " + std::to_string(bits) + ", expected 2, 3, 4 or 8");
  }
  const auto scale = static_cast<float>(std::sqrt(128.0 / static_cast<double>(dim)));
  for (float& level : codebook.levels) level *= scale;
  const auto boundaries = midpoints(codebook.levels);
  if (!boundaries) return boundaries.status();
  const auto distortion = sphere_distortion(dim, codebook.levels, *boundaries);
  if (!distortion) return distortion.status();
  codebook.distortion = *distortion;
  return codebook;
} catch (...) {
  return caught("legacy_codebook");
}

Result<KvCacheConfig> aura_config(const AuraScheme& scheme, std::int64_t kv_heads, std::int64_t dim,
                                  std::uint64_t layer, bool legacy) noexcept try {
  KvCacheConfig config{.kv_heads = kv_heads, .dim = dim};
  for (const auto& [side, bits] :
       {std::pair{&config.k, scheme.k_bits}, {&config.v, scheme.v_bits}}) {
    side->bits = bits;
    side->seed = layer;
    if (!legacy) continue;
    auto codebook = legacy_codebook(dim, bits);
    if (!codebook) return codebook.status();
    side->codebook = std::move(*codebook);
  }
  return config;
} catch (...) {
  return caught("aura_config");
}

}  // namespace bittern
