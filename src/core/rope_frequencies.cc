#include "bittern/rope_frequencies.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/exp_log.h"
#include "core/expect.h"
#include "core/float_mode.h"
#include "core/guarded.h"

namespace bittern {
namespace {

constexpr std::string_view kName = "rope_frequencies";

// Of sizes that neither overflow nor become subnormal on the way.
Status expect_positive(std::string_view field, double value) {
  if (value >= 1e-30 && value <= 1e30) return {};
  return fail(kName, field, number_text(value) + ", expected 1e-30..1e30");
}

Status check(std::int64_t rotary_dim, double base, const RopeScaling& s) {
  BITTERN_TRY(expect_between(kName, "rotary_dim", rotary_dim, 0, 1 << 20));
  if (rotary_dim % 2 != 0)
    return fail(kName, "rotary_dim", std::to_string(rotary_dim) + ", expected an even number");
  if (!(base > 1 && base <= 1e30))
    return fail(kName, "base", number_text(base) + ", expected more than 1 and at most 1e30");
  BITTERN_TRY(expect_between(kName, "kind", static_cast<std::int32_t>(s.kind), 0, 3));
  if (s.kind == RopeScalingKind::none) return {};
  BITTERN_TRY(expect_positive("factor", s.factor));
  if (s.kind == RopeScalingKind::linear) return {};
  BITTERN_TRY(expect_positive("original_context", s.original_context));
  if (s.kind == RopeScalingKind::llama3) {
    BITTERN_TRY(expect_positive("low_freq_factor", s.low_freq_factor));
    BITTERN_TRY(expect_positive("high_freq_factor", s.high_freq_factor));
    if (s.low_freq_factor < s.high_freq_factor) return {};
    return fail(kName, "high_freq_factor",
                number_text(s.high_freq_factor) + ", expected more than low_freq_factor " +
                    number_text(s.low_freq_factor));
  }
  BITTERN_TRY(expect_positive("beta_fast", s.beta_fast));
  BITTERN_TRY(expect_positive("beta_slow", s.beta_slow));
  for (const auto& [field, value] : {std::pair{"attention_factor", s.attention_factor},
                                     {"mscale", s.mscale},
                                     {"mscale_all_dim", s.mscale_all_dim}}) {
    if (!(value >= 0 && value <= 1e30))
      return fail(kName, field, number_text(value) + ", expected 0..1e30");
  }
  return {};
}

double llama3(const RopeScaling& s, double inverse) {
  const double turns = s.original_context * inverse / (2 * std::numbers::pi);
  if (turns > s.high_freq_factor) return inverse;
  if (turns < s.low_freq_factor) return inverse / s.factor;
  const double smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
  return (1 - smooth) * inverse / s.factor + smooth * inverse;
}

class Yarn {
 public:
  Yarn(const RopeScaling& s, std::int64_t rotary_dim, double base) : factor_(s.factor) {
    const auto dim = static_cast<double>(rotary_dim);
    // The i that turns n times within the original context.
    const auto turning = [&](double n) {
      return dim * exp_log::log(s.original_context / (n * 2 * std::numbers::pi)) /
             (2 * exp_log::log(base));
    };
    double low = turning(s.beta_fast), high = turning(s.beta_slow);
    if (s.truncate) {
      low = std::floor(low);
      high = std::ceil(high);
    }
    low_ = std::max(low, 0.0);
    high = std::min(high, dim - 1);
    if (low_ == high) high += 0.001;
    span_ = high - low_;
  }
  double operator()(double i, double inverse) const {
    const double ramp = std::clamp((i - low_) / span_, 0.0, 1.0);
    return inverse / factor_ * ramp + inverse * (1 - ramp);
  }

 private:
  double factor_, low_, span_;
};

double attention_factor(const RopeScaling& s) {
  if (s.attention_factor != 0) return s.attention_factor;
  const auto of = [&](double m) {
    return s.factor <= 1 ? 1.0 : 0.1 * m * exp_log::log(s.factor) + 1;
  };
  return s.mscale != 0 && s.mscale_all_dim != 0 ? of(s.mscale) / of(s.mscale_all_dim) : of(1);
}

}  // namespace

Result<RopeFrequencies> rope_frequencies(std::int64_t rotary_dim, double base,
                                         const RopeScaling& s) noexcept try {
  const FloatMode mode;
  if (Status status = check(rotary_dim, base, s); !status.ok()) return status;
  RopeFrequencies made;
  made.inverse.resize(static_cast<std::size_t>(rotary_dim / 2));
  const double log_base = exp_log::log(base);
  const bool is_yarn = s.kind == RopeScalingKind::yarn;
  const Yarn yarn(is_yarn ? s : RopeScaling{}, rotary_dim, base);
  for (std::size_t i = 0; i < made.inverse.size(); ++i) {
    const auto at = static_cast<double>(i);
    double inverse = exp_log::exp(-2 * at / static_cast<double>(rotary_dim) * log_base);
    switch (s.kind) {
      case RopeScalingKind::none: break;
      case RopeScalingKind::linear: inverse /= s.factor; break;
      case RopeScalingKind::llama3: inverse = llama3(s, inverse); break;
      case RopeScalingKind::yarn: inverse = yarn(at, inverse); break;
    }
    made.inverse[i] = static_cast<float>(inverse);
  }
  if (is_yarn) made.factor = attention_factor(s);
  return made;
} catch (...) {
  return caught(kName);
}

}  // namespace bittern
