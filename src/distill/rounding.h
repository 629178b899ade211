// Codes, scales and biases of a matrix that keep its products with its inputs: the error of a row
//
//   e H e^T,  e = w - (scale * code + bias),  H = the sum of x x^T over the inputs (distill/gram.h)
//
// is lowered in stages, each of which a row keeps only where it gains by it:
//   start        scales and biases by lsq, columns weighted by H's diagonal; the nearest codes
//   compensated  codes in order of H's falling diagonal, each error made up for by the columns
//                that still come (GPTQ), on the same scales
//   twice:
//     refit      all scales and biases of the row together, by least squares under H
//     descent    each code in turn to the best one while all others stay
//
// Where zero points are integers (convert/zero_points.h), the start finds them unless they are
// given, a refit finds scales alone, and biases follow. Super-blocks (Q4_K, Q5_K) start from the
// blocks that lsq makes; a refit is followed by the nearest blocks, and their codes.
//
// H is divided by the mean of its diagonal, and 0.01 is added to the diagonal. Rows are
// independent, and each has a fixed list of operations: the same bits on every SIMD target and
// thread count.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "bittern/dtype.h"
#include "bittern/status.h"
#include "distill/gram.h"
#include "distill/rounding_lanes.h"
#include "formats/grid.h"
#include "formats/storage.h"

namespace bittern {

// What the inputs of a product say about errors of its weights.
class InputErrors {
 public:
  // Column j of the matrices is input columns[j]; without columns, j. `groups`: the sizes of the
  // groups that they are quantised in.
  static Result<InputErrors> make(const Gram& gram, std::span<const std::int64_t> columns,
                                  std::span<const int> groups);

  std::int64_t inputs() const { return static_cast<std::int64_t>(order_.size()); }
  lanes::Square h() const { return {h_.data(), inputs(), stride_}; }
  lanes::Square factor() const { return {factor_.data(), inputs(), stride_}; }
  const std::vector<std::int64_t>& order() const { return order_; }
  const std::vector<float>& diagonal() const { return diagonal_; }
  // Sums of H's rows over each group of columns [inputs, groups], and over groups of both.
  struct Sums {
    std::vector<float> rows, totals;
  };
  const Sums& sums(int group) const { return sums_.at(group); }

 private:
  InputErrors() = default;
  std::int64_t stride_ = 0;
  std::vector<float> h_, factor_;  // factor_: the transposed upper factor of H^-1, in order_
  std::vector<std::int64_t> order_;
  std::vector<float> diagonal_;
  std::map<int, Sums> sums_;
};

struct RoundingGrid {
  int bits = 4, group = 64;
  DType params = DType::f32;  // of scales: f32, f16 or bf16
  bool integer_zeros = false;
  DType biases = DType::f32;  // where zero points are integers: f32, exact, or as the scales
  std::optional<int> zero{};  // of all groups, in place of those that the start finds
  // Super-blocks that are to hold scales and biases, whose dtype then is f32.
  std::optional<Storage> blocks{};
};

enum class RoundingStage { start, compensated, refit, descent, second_refit, second_descent };
inline constexpr std::size_t kRoundingStages = 6;

// Rounds up to lanes::kRows rows at once. One thread uses it at a time.
class RowRounder {
 public:
  // w [rows, inputs]: finite, and far enough from the end of the range of grid.params that no sum
  // of three of them leaves it.
  Status round(const InputErrors& errors, const RoundingGrid& grid, const float* w,
               std::int64_t rows, GridRows& out);

  // The error of each of the last rows after each stage.
  std::span<const double> errors(RoundingStage stage) const {
    return std::span(errors_[static_cast<std::size_t>(stage)])
        .first(static_cast<std::size_t>(rows_));
  }

 private:
  using Numbers = std::vector<float>;
  struct Rows {
    Numbers codes, scales, biases;
    Numbers e, g;  // w - (scale * code + bias), and H times that
    std::array<double, lanes::kRows> error{};
  };
  Status fit(const InputErrors& errors, const RoundingGrid& grid, const float* w);
  Status fit_integers(const InputErrors& errors, const RoundingGrid& grid, const float* w);
  Status fit_blocks(const InputErrors& errors, const RoundingGrid& grid, const float* w);
  Status hold(const RoundingGrid& grid, Rows& rows);
  void set(const GridRows& from, Rows& rows) const;
  void get(const RoundingGrid& grid, const Rows& rows, GridRows& to) const;
  lanes::Grids grids(const Rows& rows) const;
  void measure(const InputErrors& errors, Rows& rows) const;
  Status refit(const InputErrors& errors, const RoundingGrid& grid);
  void refit_scales(const RoundingGrid& grid);
  void keep_better(RoundingStage stage);

  std::int64_t rows_ = 0, inputs_ = 0, group_ = 0;
  float top_ = 0;
  Numbers w_, room_, system_, step_;
  Numbers zeros_;  // [groups, lanes::kRows], where they are integers
  Rows best_, trial_;
  std::array<std::array<double, lanes::kRows>, kRoundingStages> errors_{};
};

}  // namespace bittern
