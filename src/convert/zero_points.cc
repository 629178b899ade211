#include "convert/zero_points.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "bittern/ops/qdq_affine_init.h"
#include "core/scratch.h"

namespace bittern {
namespace {

constexpr int kRounds = 10, kShrunkBits = 5;
constexpr double kShrunk[] = {0.85, 0.7, 0.55};
constexpr std::size_t kSums = 4;  // so that additions need not wait for each other; divides groups

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// One group, and the best grid that was tried for it.
class GroupFit {
 public:
  GroupFit(const ZeroPointFit& how)
      : how_(how), top_(static_cast<float>((1 << how.bits) - 1)), steps_(at(how.group)) {}

  float scale = 1, zero = 0;

  void begin(const float* w, const float* importance) {
    w_ = w;
    importance_ = importance;
    if (how_.zero) return begin_at(static_cast<float>(*how_.zero));
    const auto [low, high] = std::minmax_element(w, w + how_.group);
    const double least = std::min(*low, 0.0f), most = std::max(*high, 0.0f);
    scale = stored((most - least) / double{top_});
    if (!is_scale(scale)) scale = 1;
    zero =
        static_cast<float>(std::clamp(std::nearbyint(-least / double{scale}), 0.0, double{top_}));
    least_ = error_of(scale, zero);
  }

  void improve(float from, float at_zero) {
    if (!is_scale(from)) return;
    float next = from;
    for (int i = 0; i < kRounds; ++i) {
      round(next, at_zero);
      const float fitted = fit();
      if (!is_scale(fitted)) return;
      if (fitted == next) break;
      next = fitted;
    }
    const double error = error_of(next, at_zero);
    if (!(error < least_)) return;
    least_ = error;
    scale = next;
    zero = at_zero;
  }

  // With the zero point given.
  void improve_scale() {
    const float first = scale, other = -scale * zero / (top_ - zero);
    for (const float from : {first, other}) {
      improve(stored(double{from}), zero);
      if (how_.bits > kShrunkBits) continue;
      for (const double part : kShrunk) improve(stored(double{from} * part), zero);
    }
  }

  void improve_by_lsq(float real_scale, float real_bias) {
    improve(scale, zero);
    const float first_scale = scale, first_zero = zero;
    if (how_.bits <= kShrunkBits)
      for (const double part : kShrunk) improve(stored(double{first_scale} * part), first_zero);
    const double real = -double{real_bias} / double{real_scale}, base = std::floor(real);
    if (!std::isfinite(real)) return;
    if (base + 2 < 0 || base - 1 > double{top_})
      return improve(stored(double{real_scale}), real < 0 ? 0 : top_);
    for (const double near : {base, base + 1, base - 1, base + 2})
      if (near >= 0 && near <= double{top_})
        improve(stored(double{real_scale}), static_cast<float>(near));
  }

  void codes(std::uint8_t* out) {
    round(scale, zero);
    for (std::size_t i = 0; i < steps_.size(); ++i)
      out[i] = static_cast<std::uint8_t>(steps_[i] + zero);
  }

 private:
  bool is_scale(float x) const { return (x > 0 || (how_.zero && x < 0)) && std::isfinite(x); }

  void begin_at(float at_zero) {
    const float* const end = std::max_element(
        w_, w_ + how_.group, [](float a, float b) { return std::abs(a) < std::abs(b); });
    const bool low = at_zero >= top_ - at_zero;
    scale = stored(double{*end} / (low ? -double{at_zero} : double{top_ - at_zero}));
    if (!is_scale(scale)) scale = 1;
    zero = at_zero;
    least_ = error_of(scale, zero);
  }

  float stored(double x) const {
    return zero_point_scale(static_cast<float>(x), how_.params, how_.bits);
  }

  // steps_ = code - zero
  void round(float by, float at_zero) {
    constexpr float kWhole = 0x1.8p23f;  // what is added to it, and taken off again, is rounded
    const float low = -at_zero, high = top_ - at_zero;
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      float step = w_[i] / by;
      step = step < low ? low : step;
      step = step > high ? high : step;
      steps_[i] = (step + kWhole) - kWhole;
    }
  }

  float fit() const {
    double both[kSums] = {}, squares[kSums] = {};
    for (std::size_t i = 0; i < steps_.size(); i += kSums)
      for (std::size_t j = 0; j < kSums; ++j) {
        const double step = steps_[i + j], counts = importance_[i + j];
        both[j] += counts * (double{w_[i + j]} * step);
        squares[j] += counts * (step * step);
      }
    return stored(((both[0] + both[1]) + (both[2] + both[3])) /
                  ((squares[0] + squares[1]) + (squares[2] + squares[3])));
  }

  double error_of(float by, float at_zero) {
    round(by, at_zero);
    double sums[kSums] = {};
    for (std::size_t i = 0; i < steps_.size(); i += kSums)
      for (std::size_t j = 0; j < kSums; ++j) {
        const double e = double{w_[i + j]} - double{by} * double{steps_[i + j]};
        sums[j] += double{importance_[i + j]} * (e * e);
      }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  const ZeroPointFit how_;
  const float top_;
  std::vector<float> steps_;
  const float* w_ = nullptr;
  const float* importance_ = nullptr;
  double least_ = 0;
};

}  // namespace

Status fit_real(int bits, int group, const float* w, std::int64_t rows, std::int64_t columns,
                std::span<const float> importance, std::vector<float>& scales,
                std::vector<float>& biases) {
  const AffineDesc desc{.outer_size = rows,
                        .axis_size = columns,
                        .group_size = group,
                        .bits = bits,
                        .method = AffineMethod::lsq,
                        .expect_finite = true};
  scales.resize(at(desc.param_shape().numel()));
  biases.resize(scales.size());
  std::vector<std::uint8_t> codes(at(rows * columns));
  QdqAffineInit::Args args{};
  args.w = view(w, desc.tensor_shape());
  if (!importance.empty()) args.importance = view(importance.data(), {columns});
  args.scales = view(scales.data(), desc.param_shape());
  args.biases = view(biases.data(), desc.param_shape());
  args.q = view(codes.data(), desc.code_shape());
  const auto plan = Plan<QdqAffineInit>::select(desc);
  if (!plan) return plan.status();
  AlignedScratch scratch(plan->workspace_bytes());
  return plan->run(args, {}, scratch.workspace());
}

float zero_point_scale(float scale, DType params, int bits) {
  const float nearest = round_param(scale, params);
  if (params != DType::f32 || !std::isfinite(nearest)) return nearest;
  // To the nearest multiple of 2^bits units of the last place, ties to even; never to infinity.
  const auto word = std::bit_cast<std::uint32_t>(nearest);
  const std::uint32_t below = (1u << bits) - 1;
  const float up = std::bit_cast<float>((word + (below >> 1) + (word >> bits & 1)) & ~below);
  return std::isfinite(up) ? up : std::bit_cast<float>(word & ~below);
}

float zero_point_bias(float scale, float zero, DType dtype) {
  return round_param(0 - scale * zero, dtype);
}

Status fit_zero_points(const ZeroPointFit& how, const float* w, std::int64_t rows,
                       std::int64_t columns, std::span<const float> importance, GridRows& out) {
  const std::int64_t groups = columns / how.group;
  std::vector<float> scales, biases, counts(at(columns), 1.0f);
  if (how.method == AffineMethod::lsq && !how.zero)
    BITTERN_TRY(fit_real(how.bits, how.group, w, rows, columns, importance, scales, biases));
  if (!importance.empty())
    std::transform(importance.begin(), importance.end(), counts.begin(),
                   [](float x) { return x > 0 && std::isfinite(x) ? x : 0.0f; });
  out.bits = how.bits;
  out.group = how.group;
  out.codes.resize(at(rows * columns));
  out.scales.resize(at(rows * groups));
  out.biases.resize(at(rows * groups));
  GroupFit group(how);
  for (std::int64_t i = 0; i < rows * groups; ++i) {
    group.begin(w + i * how.group, counts.data() + i % groups * how.group);
    if (how.method == AffineMethod::lsq && how.zero) group.improve_scale();
    if (how.method == AffineMethod::lsq && !how.zero)
      group.improve_by_lsq(scales[at(i)], biases[at(i)]);
    group.codes(out.codes.data() + i * how.group);
    out.scales[at(i)] = group.scale;
    out.biases[at(i)] = zero_point_bias(group.scale, group.zero, DType::f32);
  }
  return {};
}

}  // namespace bittern
