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

#include "convert/model.h"

namespace bittern {
namespace {

double rounded(double x, int digits) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.*g", digits, x);
  return std::strtod(text.data(), nullptr);
}

// Finds numbers that give the factors. Only the ratios of L, low and high show, and often less: few
// frequencies of a small head lie between. What the file says of L, and the usual numbers, are
// tried first.
class Solver {
 public:
  Solver(std::span<const float> factors, Rope& rope, std::int64_t dim)
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

  bool fits(std::int64_t length, double low, double high) {
    if (length < 1 || !(low > 0 && high > low)) return false;
    Rope trial = rope_;
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
    const std::vector<float> made = llama3_factors(trial, dim_);
    const auto same = [&](float a, float b) {
      return exact_ ? a == b : std::abs(a - b) <= 1e-5f * std::abs(b);
    };
    if (!std::equal(factors_.begin(), factors_.end(), made.begin(), same)) return false;
    rope_ = trial;
    return true;
  }

  std::span<const float> factors_;
  Rope& rope_;
  std::int64_t dim_;
  std::vector<double> inverse_;  // 1 / w
  double largest_ = 1;
  std::vector<std::size_t> between_;
  bool exact_ = true;
};

}  // namespace

// In f32 and in the order of llama.cpp's converter, each operation rounded: its files and ours are
// the same but for the last bit of a power.
std::vector<float> llama3_factors(const Rope& rope, std::int64_t rotary_dim) {
  const auto single = [](double x) { return static_cast<float>(x); };
  const float fast = single(double(rope.context) / rope.high);
  const float slow = single(double(rope.context) / rope.low);
  const float factor = single(rope.factor), span = single(rope.high - rope.low);
  std::vector<float> factors;
  for (std::int64_t i = 0; i < rotary_dim; i += 2) {
    const float part = single(double(i)) / single(double(rotary_dim));
    const float frequency = 1 / single(std::pow(double(single(rope.theta)), double(part)));
    const float wavelength = 1 / frequency * single(2 * std::numbers::pi);
    if (wavelength < fast) {
      factors.push_back(1);
    } else if (wavelength > slow) {
      factors.push_back(factor);
    } else {
      const float s = (1 / wavelength * single(double(rope.context)) - single(rope.low)) / span;
      factors.push_back(1 / ((1 - s) / factor + s));
    }
  }
  return factors;
}

bool solve_llama3(std::span<const float> factors, std::int64_t context, std::int64_t longest,
                  Rope& rope) {
  return Solver(factors, rope, 2 * std::int64_t(factors.size())).solve(context, longest);
}

}  // namespace bittern
