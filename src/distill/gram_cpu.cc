#include "distill/gram.h"

#include <algorithm>
#include <cstring>

#include "core/ranks.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "distill/gram_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/matmul-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

// Columns that lie together, token by token: whole vectors of every target.
constexpr std::int64_t kPanel = 64;

// h[i][j] += sum over tokens of left[token][i] right[token][j], for two panels.
void AddPanels(const float* left, const float* right, std::int64_t tokens, double* h,
               std::int64_t stride, std::int64_t rows, std::int64_t columns) {
  HWY_ALIGN float sums[kPanel * kPanel];
  matmul::Multiply(rows, kPanel, tokens, {left, 1, kPanel}, right, kPanel, sums, kPanel);
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < columns; ++j) h[i * stride + j] += double{sums[i * kPanel + j]};
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

BITTERN_EXPORT(AddPanels);

constexpr std::int64_t kPanel = 64;
constexpr std::int64_t kTokens = 256;  // that are summed in f32
constexpr std::int64_t kGrain = 4;     // a thread's least panels, and pairs of them

}  // namespace

Gram::Gram(std::int64_t inputs, const Ranks* ranks) : sums_(inputs) {
  const std::int64_t panels = (inputs + kPanel - 1) / kPanel;
  for (std::int64_t i = 0; i < panels; ++i)
    for (std::int64_t j = i; j < panels; ++j) pairs_.push_back({i, j});
  own_ = part_of(rank_of(ranks), count_of(ranks));
}

Gram::Part Gram::part_of(int rank, int count) const {
  const auto at = [&](int i) {
    return pairs_.size() * static_cast<std::size_t>(i) / static_cast<std::size_t>(count);
  };
  return {at(rank), at(rank + 1)};
}

Status Gram::complete(Ranks& ranks) {
  const auto each_row = [&](const Part& part, const auto& f) {
    for (std::size_t k = part.first; k < part.end; ++k) {
      const std::int64_t top = pairs_[k].i * kPanel, left = pairs_[k].j * kPanel;
      for (std::int64_t i = top; i < std::min(top + kPanel, inputs()); ++i)
        f(std::span(sums_.row(i) + left,
                    static_cast<std::size_t>(std::min(kPanel, inputs() - left))));
    }
  };
  std::vector<double> own;
  each_row(own_, [&](std::span<double> row) { own.insert(own.end(), row.begin(), row.end()); });
  std::vector<std::vector<std::byte>> all;
  BITTERN_TRY(ranks.agree({}));
  BITTERN_TRY(ranks.gather(std::as_bytes(std::span(own)), all));
  for (int rank = 0; rank < ranks.count(); ++rank) {
    const std::byte* from = all[static_cast<std::size_t>(rank)].data();
    each_row(part_of(rank, ranks.count()), [&](std::span<double> row) {
      std::memcpy(row.data(), from, row.size_bytes());
      from += row.size_bytes();
    });
  }
  return {};
}

void Gram::add(const ConstView& x, std::span<const float> weights) {
  const std::int64_t n = inputs(), panels = (n + kPanel - 1) / kPanel, stride = x.stride[0];
  const float* const from = x.as<float>();
  for (std::int64_t first = 0; first < x.shape[0]; first += kTokens) {
    const std::int64_t tokens = std::min(kTokens, x.shape[0] - first);
    const std::size_t room = static_cast<std::size_t>(panels * kPanel * tokens);
    right_.assign(room, 0.0f);
    if (!weights.empty()) left_.assign(room, 0.0f);
    cpu::parallel(panels, kGrain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t p = begin; p < end; ++p) {
        const std::int64_t columns = std::min(kPanel, n - p * kPanel);
        for (std::int64_t t = 0; t < tokens; ++t) {
          const float* const row = from + (first + t) * stride + p * kPanel;
          const std::int64_t to = (p * tokens + t) * kPanel;
          std::copy_n(row, columns, right_.data() + to);
          if (weights.empty()) continue;
          const float weight = weights[static_cast<std::size_t>(first + t)];
          for (std::int64_t j = 0; j < columns; ++j)
            left_[static_cast<std::size_t>(to + j)] = weight * row[j];
        }
      }
    });
    const float* const right = right_.data();
    const float* const left = weights.empty() ? right : left_.data();
    const auto count = static_cast<std::int64_t>(own_.end - own_.first);
    cpu::parallel(count, kGrain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t k = begin; k < end; ++k) {
        const auto [i, j] = pairs_[own_.first + static_cast<std::size_t>(k)];
        BITTERN_CALL(AddPanels)
        (left + i * tokens * kPanel, right + j * tokens * kPanel, tokens,
         sums_.row(i * kPanel) + j * kPanel, sums_.stride(), std::min(kPanel, n - i * kPanel),
         std::min(kPanel, n - j * kPanel));
      }
    });
    rows_ += static_cast<std::uint64_t>(tokens);
  }
}

}  // namespace bittern
#endif  // HWY_ONCE
