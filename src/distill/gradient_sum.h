// Sums of gradients in a fixed order: ((a + b) + (c + d)) + ..., so that whoever adds up half of
// them adds up the same numbers.
#pragma once
#include <cstddef>
#include <utility>
#include <vector>

namespace bittern {

class GradientSum {
 public:
  void add(std::vector<float> numbers) {
    std::size_t level = 0;
    for (; level < levels_.size() && !levels_[level].empty(); ++level)
      numbers = sum(std::exchange(levels_[level], {}), numbers);
    if (level == levels_.size()) levels_.emplace_back();
    levels_[level] = std::move(numbers);
  }
  // Of everything since the last call.
  std::vector<float> take() {
    std::vector<float> all;
    for (std::vector<float>& level : levels_) {
      if (level.empty()) continue;
      all = all.empty() ? std::move(level) : sum(std::move(level), all);
      level.clear();
    }
    return all;
  }

 private:
  static std::vector<float> sum(std::vector<float> a, const std::vector<float>& b) {
    for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
    return a;
  }
  std::vector<std::vector<float>> levels_;  // level i: the sum of 2^i, or empty
};

}  // namespace bittern
