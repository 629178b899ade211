#include <array>
#include <limits>

#include "ops/gguf/gguf_quantize/super_block.h"

namespace bittern {
namespace {

using blocks::Grid;
using blocks::StepRule;
using blocks::Sums;
using blocks::SuperRule;
using Values = std::array<float, blocks::kMostGroups>;  // one for each group

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float inverse_or_zero(float x) { return x == 0 ? 0 : 1 / x; }

// A super-block: its type, its weights, and what the importance of each is.
struct Super {
  BlockType type;
  SuperRule rule;
  const float *x, *c;

  std::size_t groups() const { return static_cast<std::size_t>(rule.groups); }
};

// What the rules know of a super-block's scales; without minima dmin and mn stay 0.
struct Scales {
  float d, dmin;
  Values sc, mn;

  Grid grid(std::size_t g) const { return {d * sc[g], dmin * mn[g]}; }
};

// The code of a weight on a grid, r = 1 / s.
float code(const SuperRule& rule, float x, float m, float r) {
  return std::clamp(std::nearbyint((x + m) * r), rule.low, rule.high);
}

// The codes of group g for m and r, by f(c, x, q) in order.
template <class F>
void each_code(const Super& b, std::size_t g, float m, float r, F&& f) {
  const auto size = static_cast<std::size_t>(b.rule.group);
  for (std::size_t j = g * size; j < (g + 1) * size; ++j)
    f(b.c[j], b.x[j], code(b.rule, b.x[j], m, r));
}

Sums sums_of(const Super& b, std::size_t g, float m, float r) {
  Sums sums{};
  each_code(b, g, m, r, [&](float weight, float value, float q) {
    const float t = weight * q;
    sums.one += weight;
    sums.x += weight * value;
    sums.q += t;
    sums.qq += t * q;
    sums.qx += t * value;
  });
  return sums;
}
Sums sums_of(const Super& b, std::size_t g, Grid grid) {
  return sums_of(b, g, grid.m, inverse_or_zero(grid.s));
}

// The least and the greatest weight of group g that has an importance; of all, where none has.
struct Range {
  float low, high;
};
Range range_of(const Super& b, std::size_t g) {
  const auto size = static_cast<std::size_t>(b.rule.group);
  const float *x = b.x + g * size, *c = b.c + g * size;
  const bool none = std::all_of(c, c + size, [](float weight) { return weight == 0; });
  Range range{kInfinity, -kInfinity};
  for (std::size_t j = 0; j < size; ++j) {
    if (c[j] == 0 && !none) continue;
    range.low = std::min(range.low, x[j]);
    range.high = std::max(range.high, x[j]);
  }
  return range;
}

float squared_error(const Super& b, std::size_t g, Grid grid) {
  float error = 0;
  each_code(b, g, grid.m, inverse_or_zero(grid.s), [&](float weight, float value, float q) {
    const float e = value - (grid.s * q - grid.m);
    error += weight * (e * e);
  });
  return error;
}

float multiple(float value, float step, const StepRule& rule) {
  return std::clamp(std::nearbyint(value * inverse_or_zero(step)), rule.low, rule.high);
}

// The step whose multiples are nearest to the groups' values, by weight.
float best_step(const SuperRule& rule, const Values& values, const Values& weights, float largest) {
  float best = 0, least = kInfinity;
  largest += 0.0f;  // never -0: the greater of two zeros may be either
  for (int k = 0; k < blocks::kStepTries; ++k) {
    const float parts = rule.steps.top + rule.steps.toward * static_cast<float>(k);
    const float step = blocks::rounded_to_half(largest / parts);
    float error = 0;
    for (std::size_t g = 0; g < static_cast<std::size_t>(rule.groups); ++g) {
      const float e = step * multiple(values[g], step, rule.steps) - values[g];
      error += weights[g] * (e * e);
    }
    if (error < least) {
      least = error;
      best = step;
    }
  }
  return best;
}

// ---- with minima: Q2_K, Q4_K, Q5_K ----

// What a group would have if its scale and minimum were not rounded, and the sums of its codes.
struct Ideal {
  Grid grid;
  float one, q, qq;
};

Ideal search(const Super& b, std::size_t g) {
  const auto size = static_cast<std::size_t>(b.rule.group);
  const float *x = b.x + g * size, *c = b.c + g * size;
  const Range whole = range_of(b, g);
  const float low = std::min(whole.low, 0.0f), range = whole.high - low;
  float one = 0, u1 = 0, u2 = 0, x2 = 0;
  for (std::size_t j = 0; j < size; ++j) {
    const float u = x[j] - low, cu = c[j] * u;
    one += c[j];
    u1 += cu;
    u2 += cu * u;
    x2 += c[j] * x[j] * x[j];
  }
  Ideal best{{range / b.rule.high, -low}, one, 0, 0};
  float least = kInfinity;
  for (int k = 0; k < blocks::kStarts; ++k) {
    float m = -low, r = range < blocks::kTiny ? 0 : b.rule.steps_of_start(k) / range;
    for (int fit = 0; fit < b.rule.fits; ++fit) {
      float q1 = 0, q2 = 0, qu = 0;
      for (std::size_t j = 0; j < size; ++j) {
        const float q = code(b.rule, x[j], m, r), t = c[j] * q;
        q1 += t;
        q2 += t * q;
        qu += t * (x[j] - low);
      }
      const float square = one * q2, det = square - q1 * q1;
      if (!(det > blocks::kDegenerate * square)) break;
      float s = (one * qu - q1 * u1) / det;
      const float bias = (q2 * u1 - q1 * qu) / det;
      float error = u2 - (s * qu + bias * u1);
      m = -(low + bias);
      if (m < 0) {  // a line through 0 instead
        const float qx = qu + low * q1;
        s = qx / q2;
        m = 0;
        error = x2 - s * qx;
      }
      if (s > 0 && error < least) {
        least = error;
        best = {{s, m}, one, q1, q2};
      }
      if (!(s >= blocks::kTiny)) break;
      r = 1 / s;
    }
  }
  const float most = largest_weight(b.type);
  best.grid = {std::min(best.grid.s, most), std::min(best.grid.m, most)};
  return best;
}

Scales fit(const Super& b, const std::array<Ideal, blocks::kMostGroups>& ideal) {
  const StepRule& rule = b.rule.steps;
  Values s{}, m{}, mean{}, weight{};
  for (std::size_t g = 0; g < b.groups(); ++g) {
    s[g] = ideal[g].grid.s;
    mean[g] = ideal[g].one > 0 ? ideal[g].q / ideal[g].one : 0;
    weight[g] = ideal[g].qq - ideal[g].q * mean[g];
  }
  Scales f{};
  f.d = best_step(b.rule, s, weight, *std::max_element(s.begin(), s.end()));
  for (std::size_t g = 0; g < b.groups(); ++g) {
    // The minimum follows where rounding moved the scale.
    f.sc[g] = multiple(s[g], f.d, rule);
    m[g] = std::clamp(mean[g] * (f.d * f.sc[g] - s[g]) + ideal[g].grid.m, 0.0f,
                      largest_weight(b.type));
    weight[g] = ideal[g].one;
  }
  f.dmin = best_step(b.rule, m, weight, *std::max_element(m.begin(), m.end()));
  for (std::size_t g = 0; g < b.groups(); ++g) f.mn[g] = multiple(m[g], f.dmin, rule);
  return f;
}

// Moves sc by at most one, and mn to where it then serves best. Returns the squared error.
float refine(const Super& b, Scales& f) {
  const Scales from = f;
  const StepRule& rule = b.rule.steps;
  float total = 0;
  for (std::size_t g = 0; g < b.groups(); ++g) {
    float least = kInfinity;
    const auto consider = [&](float sc, float mn) {
      const float error = squared_error(b, g, {f.d * sc, f.dmin * mn});
      if (!(error < least)) return;
      least = error;
      f.sc[g] = sc;
      f.mn[g] = mn;
    };
    for (const float move : blocks::kMoves) {
      const float sc = std::clamp(from.sc[g] + move, rule.low, rule.high), s = f.d * sc;
      consider(sc, from.mn[g]);
      const Sums sums = sums_of(b, g, {s, f.dmin * from.mn[g]});
      if (sums.one > 0) consider(sc, multiple((s * sums.q - sums.x) / sums.one, f.dmin, rule));
    }
    total += least;
  }
  return total;
}

Scales scales_of(const Super& b, const Grid* given) {
  std::array<Ideal, blocks::kMostGroups> ideal;
  for (std::size_t g = 0; g < b.groups(); ++g) {
    if (given == nullptr) {
      ideal[g] = search(b, g);
      continue;
    }
    const Sums sums = sums_of(b, g, given[g]);
    ideal[g] = {given[g], sums.one, sums.q, sums.qq};
  }
  Scales best = fit(b, ideal);
  const float error = refine(b, best);
  Scales again = best;
  std::array<Sums, blocks::kMostGroups> sums;
  for (std::size_t g = 0; g < b.groups(); ++g) sums[g] = sums_of(b, g, best.grid(g));
  blocks::refit(sums.data(), best.sc.data(), best.mn.data(), b.rule.groups, again.d, again.dmin);
  return refine(b, again) < error ? again : best;
}

// ---- a scale of either sign and no minimum: Q3_K, Q6_K ----

// A group's scale, and the sum of c q q.
struct SignedIdeal {
  float scale, weight;
};

SignedIdeal search_signed(const Super& b, std::size_t g) {
  const auto [low, high] = range_of(b, g);
  const float largest = high > -low ? high : low;
  SignedIdeal best{0, 0};
  float most = 0;
  for (int end = 0; end < b.rule.ends; ++end) {
    for (int k = 0; k < blocks::kStarts; ++k) {
      const float steps = b.rule.steps_of_start(k);
      const float r = std::abs(largest) < blocks::kTiny ? 0 : (end == 0 ? -steps : steps) / largest;
      const Sums sums = sums_of(b, g, 0, r);
      if (!(sums.qq > 0)) continue;
      const float s = sums.qx / sums.qq, gain = sums.qx * s;
      if (gain > most) {
        most = gain;
        best = {s, sums.qq};
      }
    }
  }
  return best;
}

float refine_signed(const Super& b, Scales& f) {
  const Scales from = f;
  const StepRule& rule = b.rule.steps;
  float total = 0;
  for (std::size_t g = 0; g < b.groups(); ++g) {
    float least = kInfinity;
    for (const float move : blocks::kMoves) {
      const float sc = std::clamp(from.sc[g] + move, rule.low, rule.high);
      const float error = squared_error(b, g, {f.d * sc, 0});
      if (error < least) {
        least = error;
        f.sc[g] = sc;
      }
    }
    total += least;
  }
  return total;
}

Scales signed_scales_of(const Super& b) {
  Values s{}, weight{};
  float largest = 0;
  for (std::size_t g = 0; g < b.groups(); ++g) {
    const SignedIdeal ideal = search_signed(b, g);
    s[g] = ideal.scale;
    weight[g] = ideal.weight;
    if (std::abs(s[g]) > std::abs(largest)) largest = s[g];
  }
  Scales best{};
  best.d = best_step(b.rule, s, weight, largest);
  for (std::size_t g = 0; g < b.groups(); ++g) best.sc[g] = multiple(s[g], best.d, b.rule.steps);
  const float error = refine_signed(b, best);
  Scales again = best;
  std::array<Sums, blocks::kMostGroups> sums;
  for (std::size_t g = 0; g < b.groups(); ++g) sums[g] = sums_of(b, g, best.grid(g));
  blocks::refit_signed(sums.data(), best.sc.data(), b.rule.groups, again.d);
  return refine_signed(b, again) < error ? again : best;
}

// Code q of weight j, counted from 0, into zeros.
void put_code(BlockType type, int j, int q, std::uint8_t* block) {
  const int l = j % 32, h = j / 128, k = j / 32 % 4;
  const auto put = [&](int at, int bits) {
    block[at] = static_cast<std::uint8_t>(block[at] | bits);
  };
  switch (type) {
    case BlockType::q2_k: put(16 + 32 * h + l, q << 2 * k); break;
    case BlockType::q3_k:
      put(32 + 32 * h + l, (q & 3) << 2 * k);
      put(l, q >> 2 << j / 32);
      break;
    case BlockType::q5_k: put(16 + l, q >> 4 << j / 32); [[fallthrough]];
    case BlockType::q4_k:
      put((type == BlockType::q4_k ? 16 : 48) + 32 * (j / 64) + l, (q & 15) << j / 32 % 2 * 4);
      break;
    default:  // Q6_K
      put(64 * h + j % 64, (q & 15) << k / 2 * 4);
      put(128 + 32 * h + l, q >> 4 << 2 * k);
  }
}

}  // namespace

void quantize_super_block(BlockType type, const float x[256], const float c[256], const Grid* given,
                          std::uint8_t* block) {
  const Super b{type, blocks::super_rule(type), x, c};
  const Scales f = b.rule.low < 0 ? signed_scales_of(b) : scales_of(b, given);
  std::memset(block, 0, static_cast<std::size_t>(block_size(type).bytes));
  blocks::put_scales(type, f.sc.data(), f.mn.data(), f.d, f.dmin, block);
  for (int j = 0; j < 256; ++j) {
    const Grid grid = f.grid(static_cast<std::size_t>(j / b.rule.group));
    const float q = code(b.rule, x[j], grid.m, inverse_or_zero(grid.s));
    put_code(type, j, static_cast<int>(q - b.rule.low), block);
  }
}

}  // namespace bittern
