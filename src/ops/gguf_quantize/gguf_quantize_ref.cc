#include <array>
#include <limits>
#include <tuple>
#include <utility>

#include "bittern/ops/gguf_quantize.h"
#include "ops/gguf_quantize/block_rules.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GgufQuantize;
using Small = std::array<float, 32>;

float inverse(float d) {
  const float r = d == 0 ? 0 : 1 / d;
  return std::isinf(r) ? 0 : r;
}

// Codes 0..15 or 0..31: the low halves of two weights in a byte, then what is above them.
void put_codes(const std::array<int, 32>& q, std::uint8_t* qh, std::uint8_t* qs) {
  for (std::size_t j = 0; j < 16; ++j)
    qs[j] = static_cast<std::uint8_t>((q[j] & 15) | (q[j + 16] & 15) << 4);
  if (qh == nullptr) return;
  std::memset(qh, 0, 4);
  for (std::size_t j = 0; j < 32; ++j)
    qh[j / 8] = static_cast<std::uint8_t>(qh[j / 8] | (q[j] >> 4) << j % 8);
}

// Q4_0 and Q5_0, n = 8 and 16.
void quantize_signed(const Small& x, int n, std::uint8_t* block) {
  const float e = *std::max_element(x.begin(), x.end(),
                                    [](float a, float b) { return std::abs(a) < std::abs(b); });
  const float d = e / static_cast<float>(-n), r = inverse(d);
  std::array<int, 32> q;
  for (std::size_t j = 0; j < 32; ++j)
    q[j] = std::min(static_cast<int>(x[j] * r + (static_cast<float>(n) + 0.5f)), 2 * n - 1);
  blocks::put_f16(block, d);
  if (n == 8) {
    put_codes(q, nullptr, block + 2);
  } else {
    put_codes(q, block + 2, block + 6);
  }
}

// Q4_1 and Q5_1, n = 15 and 31.
void quantize_with_min(const Small& x, int n, std::uint8_t* block) {
  const float m = *std::min_element(x.begin(), x.end()) + 0.0f;
  const float range = *std::max_element(x.begin(), x.end()) - m + 0.0f;
  const float d = range / static_cast<float>(n);
  const float r = inverse(d);
  std::array<int, 32> q;
  for (std::size_t j = 0; j < 32; ++j) q[j] = std::min(static_cast<int>((x[j] - m) * r + 0.5f), n);
  blocks::put_f16(block, d);
  blocks::put_f16(block + 2, m);
  if (n == 15) {
    put_codes(q, nullptr, block + 4);
  } else {
    put_codes(q, block + 4, block + 8);
  }
}

void quantize_bytes(const Small& x, std::uint8_t* block) {
  float most = 0;
  for (const float v : x) most = std::max(most, std::abs(v));
  const float d = most / 127, r = inverse(d);
  blocks::put_f16(block, d);
  for (std::size_t j = 0; j < 32; ++j)
    block[2 + j] = static_cast<std::uint8_t>(static_cast<int>(std::round(x[j] * r)));
}

// ---- Q4_K, Q5_K and Q6_K ----

using blocks::Grid;
using blocks::StepRule;
using blocks::Sums;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float inverse_or_zero(float x) { return x == 0 ? 0 : 1 / x; }

// A super-block: its weights, and what the importance of each is.
struct Super {
  std::array<float, 256> x, c;
};

// The codes of a group of 32 on a grid, by f(c, x, q) in order.
template <class F>
void each_code(const float* x, const float* c, Grid grid, int last, F&& f) {
  const float r = inverse_or_zero(grid.s);
  for (int j = 0; j < 32; ++j) {
    const float z = std::nearbyint((x[j] + grid.m) * r);
    f(c[j], x[j], std::clamp(z, 0.0f, static_cast<float>(last)));
  }
}

Sums sums_of(const float* x, const float* c, Grid grid, int last) {
  Sums sums{};
  each_code(x, c, grid, last, [&](float weight, float value, float q) {
    const float t = weight * q;
    sums.one += weight;
    sums.x += weight * value;
    sums.q += t;
    sums.qq += t * q;
    sums.qx += t * value;
  });
  return sums;
}

float squared_error(const float* x, const float* c, Grid grid, int last) {
  float error = 0;
  each_code(x, c, grid, last, [&](float weight, float value, float q) {
    const float e = value - (grid.s * q - grid.m);
    error += weight * (e * e);
  });
  return error;
}

// What a group would have if its scale and minimum were not rounded, and the sums of its codes
// (q and qq are all that is read).
struct Ideal {
  Grid grid;
  float one, q, qq;
};

Ideal search(const float* x, const float* c, int last) {
  const float low = std::min(*std::min_element(x, x + 32), 0.0f);
  const float range = *std::max_element(x, x + 32) - low;
  float one = 0, u1 = 0, u2 = 0, x2 = 0;
  for (int j = 0; j < 32; ++j) {
    const float u = x[j] - low, cu = c[j] * u;
    one += c[j];
    u1 += cu;
    u2 += cu * u;
    x2 += c[j] * x[j] * x[j];
  }
  const auto n = static_cast<float>(last);
  Ideal best{{range / n, -low}, one, 0, 0};
  float least = kInfinity;
  for (int k = 0; k < blocks::kStarts; ++k) {
    const float r = range < blocks::kTiny ? 0 : blocks::steps_of_start(last, k) / range;
    float q1 = 0, q2 = 0, qu = 0;
    for (int j = 0; j < 32; ++j) {
      const float u = x[j] - low, q = std::min(std::nearbyint(u * r), n), t = c[j] * q;
      q1 += t;
      q2 += t * q;
      qu += t * u;
    }
    const float square = one * q2, det = square - q1 * q1;
    if (!(det > blocks::kDegenerate * square)) continue;
    float s = (one * qu - q1 * u1) / det;
    const float b = (q2 * u1 - q1 * qu) / det;
    float m = -(low + b), error = u2 - (s * qu + b * u1);
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
  }
  const float most = blocks::limit(BlockType::q4_k);
  best.grid = {std::min(best.grid.s, most), std::min(best.grid.m, most)};
  return best;
}

float multiple(float value, float step, const StepRule& rule) {
  return std::clamp(std::nearbyint(value * inverse_or_zero(step)), rule.low, rule.high);
}

// The step whose multiples are nearest to the values, by weight.
float best_step(const float* values, const float* weights, float largest, const StepRule& rule) {
  float best = 0, least = kInfinity;
  for (int k = 0; k < blocks::kStepTries; ++k) {
    const float step =
        blocks::rounded_to_half(largest / (rule.top + rule.toward * static_cast<float>(k)));
    float error = 0;
    for (int g = 0; g < rule.groups; ++g) {
      const float e = step * multiple(values[g], step, rule) - values[g];
      error += weights[g] * (e * e);
    }
    if (error < least) {
      least = error;
      best = step;
    }
  }
  return best;
}

struct Scales {
  float d, dmin;
  std::array<float, 8> sc, mn;
};

Scales fit(const std::array<Ideal, 8>& ideal) {
  std::array<float, 8> s, m, mean, weight;
  for (std::size_t g = 0; g < 8; ++g) {
    s[g] = ideal[g].grid.s;
    mean[g] = ideal[g].one > 0 ? ideal[g].q / ideal[g].one : 0;
    weight[g] = ideal[g].qq - ideal[g].q * mean[g];
  }
  const StepRule& rule = blocks::kUnsignedSteps;
  Scales f;
  f.d = best_step(s.data(), weight.data(), *std::max_element(s.begin(), s.end()), rule);
  for (std::size_t g = 0; g < 8; ++g) {
    // The minimum follows where rounding moved the scale.
    f.sc[g] = multiple(s[g], f.d, rule);
    m[g] = std::clamp(mean[g] * (f.d * f.sc[g] - s[g]) + ideal[g].grid.m, 0.0f,
                      blocks::limit(BlockType::q4_k));
    weight[g] = ideal[g].one;
  }
  f.dmin = best_step(m.data(), weight.data(), *std::max_element(m.begin(), m.end()), rule);
  for (std::size_t g = 0; g < 8; ++g) f.mn[g] = multiple(m[g], f.dmin, rule);
  return f;
}

// Moves sc by at most one, and mn to where it then serves best. Returns the squared error.
float refine(const Super& b, int last, Scales& f) {
  const Scales from = f;
  const StepRule& rule = blocks::kUnsignedSteps;
  float total = 0;
  for (std::size_t g = 0; g < 8; ++g) {
    const float *x = b.x.data() + 32 * g, *c = b.c.data() + 32 * g;
    float least = kInfinity;
    const auto consider = [&](float sc, float mn) {
      const float error = squared_error(x, c, {f.d * sc, f.dmin * mn}, last);
      if (!(error < least)) return;
      least = error;
      f.sc[g] = sc;
      f.mn[g] = mn;
    };
    for (const float move : blocks::kMoves) {
      const float sc = std::clamp(from.sc[g] + move, rule.low, rule.high), s = f.d * sc;
      consider(sc, from.mn[g]);
      const Sums sums = sums_of(x, c, {s, f.dmin * from.mn[g]}, last);
      if (sums.one > 0) consider(sc, multiple((s * sums.q - sums.x) / sums.one, f.dmin, rule));
    }
    total += least;
  }
  return total;
}

void put_super_codes(BlockType type, const std::array<int, 256>& q, std::uint8_t* block) {
  std::uint8_t* qs = block + (type == BlockType::q4_k ? 16 : 48);
  for (std::size_t j = 0; j < 128; ++j) {
    const std::size_t at = j / 32 * 64 + j % 32;
    qs[j] = static_cast<std::uint8_t>((q[at] & 15) | (q[at + 32] & 15) << 4);
  }
  if (type == BlockType::q4_k) return;
  for (std::size_t l = 0; l < 32; ++l) {
    int bits = 0;
    for (std::size_t g = 0; g < 8; ++g) bits |= (q[32 * g + l] >> 4) << g;
    block[16 + l] = static_cast<std::uint8_t>(bits);
  }
}

void quantize_super(BlockType type, const Super& b, const std::array<Ideal, 8>& ideal,
                    std::uint8_t* block) {
  const int last = type == BlockType::q4_k ? 15 : 31;
  Scales best = fit(ideal);
  const float error = refine(b, last, best);
  Scales again = best;
  std::array<Sums, 8> sums;
  for (std::size_t g = 0; g < 8; ++g)
    sums[g] = sums_of(b.x.data() + 32 * g, b.c.data() + 32 * g,
                      {best.d * best.sc[g], best.dmin * best.mn[g]}, last);
  blocks::refit(sums.data(), best.sc.data(), best.mn.data(), again.d, again.dmin);
  if (refine(b, last, again) < error) best = again;

  blocks::put_f16(block, best.d);
  blocks::put_f16(block + 2, best.dmin);
  blocks::put_scales(best.sc.data(), best.mn.data(), block + 4);
  std::array<int, 256> q;
  for (std::size_t g = 0; g < 8; ++g) {
    int* to = q.data() + 32 * g;
    each_code(b.x.data() + 32 * g, b.c.data() + 32 * g,
              {best.d * best.sc[g], best.dmin * best.mn[g]}, last,
              [&](float, float, float code) { *to++ = static_cast<int>(code); });
  }
  put_super_codes(type, q, block);
}

// Of the super-block at column j of row i.
std::array<Ideal, 8> ideals(const Op::Desc& d, const Op::Args& a, std::int64_t i, std::int64_t j,
                            const Super& b) {
  const int last = d.type == BlockType::q4_k ? 15 : 31;
  std::array<Ideal, 8> ideal;
  for (std::size_t g = 0; g < 8; ++g) {
    const float *x = b.x.data() + 32 * g, *c = b.c.data() + 32 * g;
    if (!d.given_grid) {
      ideal[g] = search(x, c, last);
      continue;
    }
    const std::int64_t at = j / 32 + static_cast<std::int64_t>(g);
    const Grid grid =
        blocks::given_grid(a.scales.as<float>()[i * a.scales.row_stride() + at],
                           a.biases.as<float>()[i * a.biases.row_stride() + at], last);
    const Sums sums = sums_of(x, c, grid, last);
    ideal[g] = {grid, sums.one, sums.q, sums.qq};
  }
  return ideal;
}

// Q6_K: groups of 16, codes -32..31, scales of either sign and no minimum.
float signed_code(float x, float r) { return std::clamp(std::nearbyint(x * r), -32.0f, 31.0f); }

Sums signed_sums(const float* x, const float* c, float r) {
  Sums sums{};
  for (int j = 0; j < 16; ++j) {
    const float q = signed_code(x[j], r), t = c[j] * q;
    sums.qq += t * q;
    sums.qx += t * x[j];
  }
  return sums;
}

// The scale, and the sum of c q q.
std::pair<float, float> search_signed(const float* x, const float* c) {
  const float low = *std::min_element(x, x + 16), high = *std::max_element(x, x + 16);
  const float largest = high > -low ? high : low;
  float scale = 0, weight = 0, most = 0;
  for (int k = 0; k < blocks::kStarts; ++k) {
    const float r =
        std::abs(largest) < blocks::kTiny ? 0 : -blocks::signed_steps_of_start(k) / largest;
    const Sums sums = signed_sums(x, c, r);
    if (!(sums.qq > 0)) continue;
    const float s = sums.qx / sums.qq, gain = sums.qx * s;
    if (gain > most) {
      most = gain;
      scale = s;
      weight = sums.qq;
    }
  }
  return {scale, weight};
}

struct SignedScales {
  float d;
  std::array<float, 16> sc;
};

float refine_signed(const Super& b, SignedScales& f) {
  const SignedScales from = f;
  float total = 0;
  for (std::size_t g = 0; g < 16; ++g) {
    float least = kInfinity;
    for (const float move : blocks::kMoves) {
      const StepRule& rule = blocks::kSignedSteps;
      const float sc = std::clamp(from.sc[g] + move, rule.low, rule.high), s = f.d * sc;
      const float r = inverse_or_zero(s);
      float error = 0;
      for (std::size_t j = 16 * g; j < 16 * g + 16; ++j) {
        const float e = b.x[j] - s * signed_code(b.x[j], r);
        error += b.c[j] * (e * e);
      }
      if (error < least) {
        least = error;
        f.sc[g] = sc;
      }
    }
    total += least;
  }
  return total;
}

void quantize_super_signed(const Super& b, std::uint8_t* block) {
  std::array<float, 16> s, weight;
  float largest = 0;
  for (std::size_t g = 0; g < 16; ++g) {
    std::tie(s[g], weight[g]) = search_signed(b.x.data() + 16 * g, b.c.data() + 16 * g);
    if (std::abs(s[g]) > std::abs(largest)) largest = s[g];
  }
  SignedScales best;
  best.d = best_step(s.data(), weight.data(), largest, blocks::kSignedSteps);
  for (std::size_t g = 0; g < 16; ++g) best.sc[g] = multiple(s[g], best.d, blocks::kSignedSteps);
  const float error = refine_signed(b, best);
  SignedScales again = best;
  std::array<Sums, 16> sums;
  for (std::size_t g = 0; g < 16; ++g)
    sums[g] =
        signed_sums(b.x.data() + 16 * g, b.c.data() + 16 * g, inverse_or_zero(best.d * best.sc[g]));
  blocks::refit_signed(sums.data(), best.sc.data(), again.d);
  if (refine_signed(b, again) < error) best = again;

  std::memset(block, 0, 192);
  for (std::size_t j = 0; j < 256; ++j) {
    const float r = inverse_or_zero(best.d * best.sc[j / 16]);
    const int q = static_cast<int>(signed_code(b.x[j], r)) + 32;
    const std::size_t h = j / 128, l = j % 32, k = j / 32 % 4;
    std::uint8_t &low = block[64 * h + j % 64], &high = block[128 + 32 * h + l];
    low = static_cast<std::uint8_t>(low | (q & 15) << (k / 2 * 4));
    high = static_cast<std::uint8_t>(high | (q >> 4) << (2 * k));
  }
  for (std::size_t g = 0; g < 16; ++g)
    block[192 + g] = static_cast<std::uint8_t>(static_cast<int>(best.sc[g]));
  blocks::put_f16(block + 208, best.d);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const BlockSize size = block_size(d.type);
  const float most = blocks::limit(d.type);
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    for (std::int64_t i = 0; i < d.outer_size; ++i) {
      const X* w = a.w.as<X>() + i * a.w.row_stride();
      std::uint8_t* block = a.blocks.as<std::uint8_t>() + i * a.blocks.row_stride();
      const auto weights = [&](std::int64_t j, auto& x) {
        for (std::size_t k = 0; k < x.size(); ++k) {
          const float v = to_math(w[j + static_cast<std::int64_t>(k)]);
          x[k] = std::isnan(v) ? 0 : std::clamp(v, -most, most);
        }
      };
      for (std::int64_t j = 0; j < d.axis_size; j += size.weights, block += size.bytes) {
        if (size.weights == 256) {
          Super b;
          weights(j, b.x);
          for (std::int64_t k = 0; k < 256; ++k)
            b.c[static_cast<std::size_t>(k)] =
                a.importance ? blocks::weight_of(a.importance.as<float>()[j + k]) : 1.0f;
          if (d.type == BlockType::q6_k) {
            quantize_super_signed(b, block);
          } else {
            quantize_super(d.type, b, ideals(d, a, i, j, b), block);
          }
          continue;
        }
        Small x;
        weights(j, x);
        switch (d.type) {
          case BlockType::q4_0: quantize_signed(x, 8, block); break;
          case BlockType::q5_0: quantize_signed(x, 16, block); break;
          case BlockType::q4_1: quantize_with_min(x, 15, block); break;
          case BlockType::q5_1: quantize_with_min(x, 31, block); break;
          default: quantize_bytes(x, block);
        }
      }
    }
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<GgufQuantize>> gguf_quantize_ref() { return kKernels; }

}  // namespace bittern
