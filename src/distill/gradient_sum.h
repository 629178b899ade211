// Sums of gradients in a fixed order: ((a + b) + (c + d)) + ..., so that whoever adds up a part of
// them adds up the same numbers.
#pragma once
#include <cstddef>
#include <utility>
#include <vector>

#include "bittern/status.h"
#include "core/ranks.h"

namespace bittern {

class GradientSum {
 public:
  // Of the pieces from number `first` on.
  explicit GradientSum(std::int64_t first = 0) : next_(first) {}

  // The next 2^level pieces', added up already.
  void add(std::vector<float> numbers, int level = 0) {
    sums_.push_back({next_, level, std::move(numbers)});
    next_ += std::int64_t{1} << level;
    while (sums_.size() > 1) {
      Sum &left = sums_[sums_.size() - 2], &right = sums_.back();
      if (left.level != right.level || (left.first >> left.level) % 2 != 0) break;
      left.numbers = sum(std::move(left.numbers), right.numbers);
      ++left.level;
      sums_.pop_back();
    }
  }
  // Of everything since the last call.
  std::vector<float> take() {
    std::vector<float> all;
    for (; !sums_.empty(); sums_.pop_back())
      all =
          all.empty() ? std::move(sums_.back().numbers) : sum(std::move(sums_.back().numbers), all);
    return all;
  }
  // The same of all processes, each of which has added the pieces behind those of the one before.
  // `status`: whether this one could.
  Result<std::vector<float>> take(Ranks* ranks, const Status& status) {
    BITTERN_TRY(agree(ranks, status));
    if (ranks == nullptr) return take();
    Packer own;
    for (const Sum& one : sums_) {
      own.add(one.level);
      own.add(one.numbers);
    }
    sums_.clear();
    std::vector<std::vector<std::byte>> all;
    BITTERN_TRY(ranks->gather(own.bytes(), all));
    GradientSum whole;
    for (const auto& bytes : all)
      for (Unpacker in(bytes); !in.empty();) {
        const int level = in.next<int>();
        whole.add(in.next<std::vector<float>>(), level);
      }
    return whole.take();
  }

 private:
  // Of 2^level pieces from `first` on, a multiple of their number.
  struct Sum {
    std::int64_t first;
    int level;
    std::vector<float> numbers;
  };
  static std::vector<float> sum(std::vector<float> a, const std::vector<float>& b) {
    for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
    return a;
  }
  std::int64_t next_;
  std::vector<Sum> sums_;  // one behind the other
};

}  // namespace bittern
