// The rotary embedding of Llama 3: numbers of a config, and a tensor of factors in GGUF.
//
// A frequency of wavelength w turns t = L / w times within the original context L. It is divided by
//   1                           where t > high
//   factor                      where t < low
//   1 / ((1 - s) / factor + s)  between, s = (t - low) / (high - low).
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numbers>

#include "convert/model_config.h"

namespace bittern {
namespace {

double rounded(double x, int digits) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.*g", digits, x);
  return std::strtod(text.data(), nullptr);
}

// In f32 and in the order of llama.cpp's converter, each operation rounded: its files and ours are
// equal except for the last bit of a power.
class FactorRule {
 public:
  FactorRule(const RopeConfig& rope, std::int64_t dim)
      : theta_(double(single(rope.theta))),
        dim_(single(double(dim))),
        context_(single(double(rope.context))),
        fast_(single(double(rope.context) / rope.high)),
        slow_(single(double(rope.context) / rope.low)),
        factor_(single(rope.factor)),
        low_(single(rope.low)),
        span_(single(rope.high - rope.low)) {}

  float operator()(std::size_t i) const {
    const float part = single(2.0 * double(i)) / dim_;
    const float frequency = 1 / single(std::pow(theta_, double(part)));
    const float wavelength = 1 / frequency * single(2 * std::numbers::pi);
    if (wavelength < fast_) return 1;
    if (wavelength > slow_) return factor_;
    const float s = (1 / wavelength * context_ - low_) / span_;
    return 1 / ((1 - s) / factor_ + s);
  }

 private:
  static float single(double x) { return static_cast<float>(x); }

  double theta_;
  float dim_, context_, fast_, slow_, factor_, low_, span_;
};

// Finds numbers that give the factors. The factors show only the ratios of L, low and high, and
// often less: in a small head few frequencies are between low and high. The L of the file and the
// usual numbers are tried first.
class Solver {
 public:
  Solver(std::span<const float> factors, RopeConfig& rope, std::int64_t dim)
      : factors_(factors), rope_(rope), dim_(dim) {
    for (std::size_t i = 0; i < factors.size(); ++i)
      inverse_.push_back(std::pow(rope.theta, -2.0 * double(i) / double(dim)) /
                         (2 * std::numbers::pi));
    largest_ = *std::max_element(factors.begin(), factors.end());
    for (std::size_t i = 0; i < factors.size(); ++i)
      if (factors[i] != 1 && factors[i] < largest_ * (1 - 1e-6)) between_.push_back(i);
  }

  bool solve(std::int64_t context, std::int64_t longest) {
    std::vector<std::int64_t> contexts;
    if (context != 0) contexts.push_back(context);
    if (largest_ > 1) contexts.push_back(std::llround(double(longest) / largest_));
    for (const std::int64_t usual : {8192, 4096, 2048, 16384, 32768}) contexts.push_back(usual);
    for (std::int64_t power = 16; power <= 1 << 20; power *= 2) contexts.push_back(power);
    for (const bool exact : {true, false}) {
      exact_ = exact;
      for (const std::int64_t length : contexts)
        if (fits(length, 1, 4)) return true;
      if (solve_line(context)) return true;
      for (const std::int64_t length : contexts)
        if (solve_within(length, longest)) return true;
    }
    return false;
  }

 private:
  // s of a frequency, with the largest factor for the factor.
  double smooth(std::size_t i) const {
    return (1 / double(factors_[i]) - 1 / largest_) / (1 - 1 / largest_);
  }

  // L / low and high / low of what lies between: s is a line in 1 / w.
  bool solve_line(std::int64_t context) {
    if (largest_ <= 1 || between_.empty()) return false;
    const std::size_t fast = between_.front(), slow = between_.back();
    double length, high;
    if (fast != slow) {
      const double slope =
          (smooth(fast) - smooth(slow)) / (inverse_[fast] - inverse_[slow]);  // L / (high - low)
      const double below = slope * inverse_[slow] - smooth(slow);             // low / (high - low)
      length = slope / below;
      high = 1 + 1 / below;
    } else if (context != 0) {  // of one point: low is 1
      length = double(context);
      high = 1 + (length * inverse_[fast] - 1) / smooth(fast);
    } else {  // and high 4
      high = 4;
      length = (smooth(fast) * 3 + 1) / inverse_[fast];
    }
    if (!(length > 0 && length < 1e9 && high > 1 && high < 1e9)) return false;
    const auto whole = std::max<std::int64_t>(std::llround(length), 1);
    if (context != 0) {
      const double low = double(context) / length;
      for (const int digits : {2, 3, 4, 6})
        if (fits(context, rounded(low, digits), rounded(low * high, digits))) return true;
    }
    for (const int digits : {2, 3, 4, 6})
      if (fits(whole, 1, rounded(high, digits))) return true;
    const double low = double(whole) / length;
    return fits(whole, low, low * high);
  }

  // low and high for the given length. Between them 1 / factor is a line, a + b t, which is 1 at
  // high and 1 / (the largest factor) at low. Two points on it give both numbers; one point gives
  // high for each low; without points, both are between the slowest frequency with factor 1 and the
  // fastest without. Short numbers are tried first.
  bool solve_within(std::int64_t length, std::int64_t longest) {
    if (length < 1) return false;
    const auto turns = [&](std::size_t i) { return double(length) * inverse_[i]; };
    std::size_t ones = 0;
    while (ones < factors_.size() && factors_[ones] == 1) ++ones;
    const std::size_t end = ones + between_.size();  // of what lies between
    const double above = ones > 0 ? turns(ones - 1) : turns(0) * 16;
    const double below = end < factors_.size() ? turns(end) : 0;
    if (between_.size() > 1) {
      const double fast = 1 / double(factors_[ones]), slow = 1 / double(factors_[end - 1]);
      const double b = (fast - slow) / (turns(ones) - turns(end - 1));
      const double a = fast - b * turns(ones), high = (1 - a) / b;
      const bool shows = end < factors_.size();  // the largest factor
      for (const double factor : {shows ? largest_ : double(longest) / double(length), 8.0, 32.0})
        for (const int digits : {1, 2, 3, 4, 6, 17})
          if (fits(length, rounded((1 / factor - a) / b, digits), rounded(high, digits)))
            return true;
      return false;
    }
    const double most = between_.empty() ? above : turns(ones);
    for (const double step : {1.0, 0.1, 0.01}) {
      const double trials = between_.empty() ? 20 : 500;
      const double first = std::max(std::floor(below / step) + 1, 1.0);
      for (double n = first; n * step < most && n < first + trials; ++n)
        if (fits_above(length, rounded(n * step, 6), above)) return true;
    }
    return fits_above(length, (below + most) / 2, above);
  }

  // Whether a high above this low fits.
  bool fits_above(std::int64_t length, double low, double above) {
    if (between_.empty()) {
      for (const double high : {4.0, std::floor(low) + 1, rounded(low + 0.1, 6), (low + above) / 2})
        if (high < above && fits(length, low, high)) return true;
      return false;
    }
    const std::size_t i = between_.front();
    const double high = low + (double(length) * inverse_[i] - low) / smooth(i);
    for (const int digits : {1, 2, 3, 4, 6, 17})
      if (fits(length, low, rounded(high, digits))) return true;
    return false;
  }

  bool fits(std::int64_t length, double low, double high) {
    if (length < 1 || !(low > 0 && high > low)) return false;
    RopeConfig trial = rope_;
    trial.type = "llama3";
    trial.context = length;
    trial.low = low;
    trial.high = high;
    const double turns = double(length) * inverse_.back();
    trial.factor = rounded(largest_, 8);
    if (turns >= low && turns <= high && largest_ > 1) {
      // The slowest lies between, and what the factor is shows in it alone.
      const double s = (turns - low) / (high - low), inverse = 1 / double(factors_.back());
      if (inverse <= s) return false;
      trial.factor = rounded((1 - s) / (inverse - s), 4);
    } else if (turns > high) {
      if (largest_ > 1) return false;
      trial.factor = 8;  // no frequency is so slow that it shows
    }
    if (!(trial.factor >= 1)) return false;
    for (int digits = 1; digits < 8 && trial.factor == rounded(largest_, 8); ++digits)
      if (static_cast<float>(rounded(largest_, digits)) == static_cast<float>(largest_))
        trial.factor = rounded(largest_, digits);
    const FactorRule rule(trial, dim_);
    const auto same = [&](std::size_t i) {
      const float made = rule(i), wanted = factors_[i];
      return exact_ ? made == wanted : std::abs(made - wanted) <= 1e-5f * std::abs(wanted);
    };
    if (!between_.empty() && !same(between_.front())) return false;  // as most trials end
    for (std::size_t i = 0; i < factors_.size(); ++i)
      if (!same(i)) return false;
    rope_ = trial;
    return true;
  }

  std::span<const float> factors_;
  RopeConfig& rope_;
  std::int64_t dim_;
  std::vector<double> inverse_;  // 1 / w
  double largest_ = 1;
  std::vector<std::size_t> between_;
  bool exact_ = true;
};

}  // namespace

std::vector<float> llama3_factors(const RopeConfig& rope, std::int64_t rotary_dim) {
  const FactorRule rule(rope, rotary_dim);
  std::vector<float> factors;
  for (std::int64_t i = 0; i < rotary_dim; i += 2) factors.push_back(rule(std::size_t(i / 2)));
  return factors;
}

bool solve_llama3(std::span<const float> factors, std::int64_t context, std::int64_t longest,
                  RopeConfig& rope) {
  return Solver(factors, rope, 2 * std::int64_t(factors.size())).solve(context, longest);
}

}  // namespace bittern
