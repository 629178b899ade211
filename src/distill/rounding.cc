#include "distill/rounding.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "bittern/ops/qdq_affine_init.h"
#include "convert/encode.h"
#include "convert/zero_points.h"
#include "core/scratch.h"
#include "cpu/parallel.h"

namespace bittern {
namespace {

using lanes::kRows;

constexpr double kDamping = 0.01;  // of the mean diagonal
constexpr float kRidge = 1e-4f;    // of a refit's diagonal

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

bool in_f16(float x) { return std::isfinite(to_f32(to_f16(x))); }

// Whole vectors; and rows that are a power of two apart would share a few lines of the cache.
std::int64_t padded(std::int64_t n) {
  const std::int64_t whole = (n + 15) / 16 * 16;
  return whole % 256 == 0 ? whole + 16 : whole;
}

}  // namespace

Result<InputErrors> InputErrors::make(const Gram& gram, std::span<const std::int64_t> columns,
                                      std::span<const int> groups) {
  const std::int64_t n = gram.inputs();
  const SquareMatrix& sums = gram.sums();
  const auto column = [&](std::int64_t j) { return columns.empty() ? j : columns[at(j)]; };
  const auto sum = [&](std::int64_t i, std::int64_t j) {
    const std::int64_t a = column(i), b = column(j);
    return sums.row(std::min(a, b))[std::max(a, b)];
  };
  double trace = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = i; j < n; ++j)
      if (!std::isfinite(sums.row(i)[j]))
        return invalid("its inputs hold infinities or NaN, expected finite numbers");
    trace += sums.row(i)[i];
  }
  const double mean = trace > 0 ? trace / static_cast<double>(n) : 1;
  const auto damped = [&](std::int64_t i, std::int64_t j) {
    return sum(i, j) / mean + (i == j ? kDamping : 0);
  };

  InputErrors errors;
  errors.stride_ = padded(n);
  errors.h_.resize(at(n * errors.stride_));
  errors.factor_.resize(errors.h_.size());
  for (std::int64_t i = 0; i < n; ++i) errors.diagonal_.push_back(static_cast<float>(damped(i, i)));
  errors.order_.resize(at(n));
  std::iota(errors.order_.begin(), errors.order_.end(), std::int64_t{0});
  std::stable_sort(errors.order_.begin(), errors.order_.end(), [&](std::int64_t a, std::int64_t b) {
    return errors.diagonal_[at(a)] > errors.diagonal_[at(b)];
  });

  // With the columns in the opposite order, K = V^T V and X = V^-1: the upper factor U of H^-1 is X
  // with both axes turned round, and transposed.
  SquareMatrix k(n);
  const auto turned = [&](std::int64_t i) { return errors.order_[at(n - 1 - i)]; };
  cpu::parallel(n, 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      for (std::int64_t j = 0; j < n; ++j)
        errors.h_[at(i * errors.stride_ + j)] = static_cast<float>(damped(i, j));
      for (std::int64_t j = i; j < n; ++j) k.row(i)[j] = damped(turned(i), turned(j));
    }
  });
  BITTERN_TRY(bittern::factor(k));
  invert_upper(k);
  for (std::int64_t i = 0; i < n; ++i)
    for (std::int64_t j = 0; j <= i; ++j)
      errors.factor_[at(i * errors.stride_ + j)] = static_cast<float>(k.row(n - 1 - i)[n - 1 - j]);

  for (const int group : groups) {
    if (errors.sums_.contains(group)) continue;
    const std::int64_t count = n / group;
    Sums of{.rows = std::vector<float>(at(n * count)),
            .totals = std::vector<float>(at(count * count))};
    std::vector<double> row(at(count)), totals(at(count * count));
    for (std::int64_t i = 0; i < n; ++i) {
      std::fill(row.begin(), row.end(), 0.0);
      for (std::int64_t j = 0; j < count * group; ++j)
        row[at(j / group)] += double{errors.h_[at(i * errors.stride_ + j)]};
      for (std::int64_t g = 0; g < count; ++g) {
        of.rows[at(i * count + g)] = static_cast<float>(row[at(g)]);
        if (i / group < count) totals[at(i / group * count + g)] += row[at(g)];
      }
    }
    for (std::size_t i = 0; i < totals.size(); ++i) of.totals[i] = static_cast<float>(totals[i]);
    errors.sums_.emplace(group, std::move(of));
  }
  return errors;
}

lanes::Grids RowRounder::grids(const Rows& rows) const {
  return {rows.scales.data(), rows.biases.data(), group_, top_};
}

// Scales and biases by lsq in f32, then rounded.
Status RowRounder::fit(const InputErrors& errors, const RoundingGrid& grid, const float* w) {
  if (grid.integer_zeros) return fit_integers(errors, grid, w);
  if (grid.blocks) return fit_blocks(errors, grid, w);
  const std::int64_t groups = inputs_ / group_;
  std::vector<float> scales, biases;
  BITTERN_TRY(
      fit_real(grid.bits, grid.group, w, rows_, inputs_, errors.diagonal(), scales, biases));
  // The rows that are not there are 0, on a grid that has it.
  best_.scales.assign(at(groups * kRows), 1.0f);
  best_.biases.assign(at(groups * kRows), 0.0f);
  for (std::int64_t r = 0; r < rows_; ++r)
    for (std::int64_t g = 0; g < groups; ++g) {
      best_.scales[at(g * kRows + r)] = round_param(scales[at(r * groups + g)], grid.params);
      best_.biases[at(g * kRows + r)] = round_param(biases[at(r * groups + g)], grid.params);
    }
  return {};
}

Status RowRounder::fit_integers(const InputErrors& errors, const RoundingGrid& grid,
                                const float* w) {
  const std::int64_t groups = inputs_ / group_;
  GridRows rows;
  BITTERN_TRY(fit_zero_points(
      {.bits = grid.bits, .group = grid.group, .params = grid.params, .zero = grid.zero}, w, rows_,
      inputs_, errors.diagonal(), rows));
  best_.scales.assign(at(groups * kRows), 1.0f);
  best_.biases.assign(at(groups * kRows), 0.0f);
  zeros_.assign(at(groups * kRows), 0.0f);
  for (std::int64_t r = 0; r < rows_; ++r)
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::size_t i = at(g * kRows + r);
      const float scale = rows.scales[at(r * groups + g)];
      best_.scales[i] = scale;
      zeros_[i] = 0 - rows.biases[at(r * groups + g)] / scale;
      best_.biases[i] = zero_point_bias(scale, zeros_[i], grid.biases);
    }
  return {};
}

Status RowRounder::fit_blocks(const InputErrors& errors, const RoundingGrid& grid, const float* w) {
  const RowEncoder encoder{.to = *grid.blocks, .method = AffineMethod::lsq, .through = {}};
  EncodedRows blocks;
  GridRows rows;
  std::uint64_t saturated = 0;
  BITTERN_TRY(
      encoder.encode({.data = w, .own = {}}, rows_, inputs_, errors.diagonal(), blocks, saturated));
  BITTERN_TRY(decode_grid(tensor_of(blocks, *grid.blocks, rows_, inputs_), 0, rows_, rows));
  set(rows, best_);
  return {};
}

// The blocks nearest to these rows.
Status RowRounder::hold(const RoundingGrid& grid, Rows& rows) {
  EncodedRows blocks;
  GridRows given, held;
  get(grid, rows, given);
  BITTERN_TRY(fit_grid(given, inputs_, *grid.blocks, blocks));
  BITTERN_TRY(decode_grid(tensor_of(blocks, *grid.blocks, rows_, inputs_), 0, rows_, held));
  set(held, rows);
  return {};
}

// Rows that are not there are 0, on a grid that has it.
void RowRounder::set(const GridRows& from, Rows& rows) const {
  const std::int64_t groups = inputs_ / group_;
  rows.codes.assign(at(inputs_ * kRows), 0.0f);
  rows.scales.assign(at(groups * kRows), 1.0f);
  rows.biases.assign(at(groups * kRows), 0.0f);
  for (std::int64_t r = 0; r < rows_; ++r) {
    for (std::int64_t j = 0; j < inputs_; ++j)
      rows.codes[at(j * kRows + r)] = static_cast<float>(from.codes[at(r * inputs_ + j)]);
    for (std::int64_t g = 0; g < groups; ++g) {
      rows.scales[at(g * kRows + r)] = from.scales[at(r * groups + g)];
      rows.biases[at(g * kRows + r)] = from.biases[at(r * groups + g)];
    }
  }
}

void RowRounder::get(const RoundingGrid& grid, const Rows& rows, GridRows& to) const {
  const std::int64_t groups = inputs_ / group_;
  to.bits = grid.bits;
  to.group = grid.group;
  to.codes.resize(at(rows_ * inputs_));
  to.scales.resize(at(rows_ * groups));
  to.biases.resize(at(rows_ * groups));
  for (std::int64_t r = 0; r < rows_; ++r) {
    for (std::int64_t j = 0; j < inputs_; ++j)
      to.codes[at(r * inputs_ + j)] = static_cast<std::uint8_t>(rows.codes[at(j * kRows + r)]);
    for (std::int64_t g = 0; g < groups; ++g) {
      to.scales[at(r * groups + g)] = rows.scales[at(g * kRows + r)];
      to.biases[at(r * groups + g)] = rows.biases[at(g * kRows + r)];
    }
  }
}

void RowRounder::measure(const InputErrors& errors, Rows& rows) const {
  rows.e.resize(w_.size());
  rows.g.resize(w_.size());
  for (std::int64_t j = 0; j < inputs_; ++j) {
    const float* const scales = rows.scales.data() + j / group_ * kRows;
    const float* const biases = rows.biases.data() + j / group_ * kRows;
    for (std::int64_t r = 0; r < kRows; ++r) {
      const std::size_t i = at(j * kRows + r);
      // In f64 the product is exact: what a reader computes by fma, to within its last rounding.
      rows.e[i] = static_cast<float>(
          double{w_[i]} - (double{rows.codes[i]} * double{scales[r]} + double{biases[r]}));
    }
  }
  lanes::products(errors.h(), rows.e.data(), rows.g.data());
  rows.error.fill(0);
  for (std::int64_t j = 0; j < inputs_; ++j)
    for (std::int64_t r = 0; r < kRows; ++r)
      rows.error[at(r)] += double{rows.e[at(j * kRows + r)]} * double{rows.g[at(j * kRows + r)]};
}

// trial_ = best_ with scales and biases a step further: that which the normal equations ask for.
// Codes count from their middle, which makes scale and bias nearly independent of each other; or
// from the zero point, where that is an integer and the scale alone makes a step.
Status RowRounder::refit(const InputErrors& errors, const RoundingGrid& grid) {
  const std::int64_t groups = inputs_ / group_, unknowns = 2 * groups;
  const float middle = top_ / 2;
  trial_ = best_;
  for (std::size_t i = 0; i < trial_.codes.size(); ++i) {
    const std::size_t lane = i % at(kRows), g = i / at(kRows) / at(group_);
    trial_.codes[i] -= grid.integer_zeros ? zeros_[g * at(kRows) + lane] : middle;
  }
  step_.assign(at(unknowns * kRows), 0.0f);
  for (std::int64_t j = 0; j < inputs_; ++j) {
    float* const step = step_.data() + 2 * (j / group_) * kRows;
    for (std::int64_t r = 0; r < kRows; ++r) {
      const float g = best_.g[at(j * kRows + r)];
      step[r] += trial_.codes[at(j * kRows + r)] * g;
      step[kRows + r] += g;
    }
  }
  room_.resize(w_.size());
  system_.resize(at(unknowns * (unknowns + 1) / 2 * kRows));
  const InputErrors::Sums& sums = errors.sums(static_cast<int>(group_));
  lanes::normal_equations(errors.h(), group_, sums.rows.data(), sums.totals.data(),
                          trial_.codes.data(), room_.data(), system_.data());
  if (grid.integer_zeros) {
    refit_scales(grid);
    return {};
  }
  lanes::solve(unknowns, kRidge, system_.data(), step_.data());
  trial_.codes = best_.codes;
  const DType params = grid.params;
  for (std::int64_t g = 0; g < groups; ++g)
    for (std::int64_t r = 0; r < kRows; ++r) {
      const std::size_t i = at(g * kRows + r);
      const float scale = step_[at(2 * g * kRows + r)], centre = step_[at((2 * g + 1) * kRows + r)];
      trial_.scales[i] = round_param(best_.scales[i] + scale, params);
      trial_.biases[i] = round_param(best_.biases[i] + (centre - scale * middle), params);
      // No super-block has such a group; without it the row may still be better.
      if (grid.blocks && !(in_f16(trial_.scales[i]) && in_f16(trial_.biases[i]))) {
        trial_.scales[i] = best_.scales[i];
        trial_.biases[i] = best_.biases[i];
      }
    }
  return grid.blocks ? hold(grid, trial_) : Status();
}

// The equations of the scales alone: every second row and column.
void RowRounder::refit_scales(const RoundingGrid& grid) {
  const std::int64_t groups = inputs_ / group_;
  const auto row = [](std::int64_t i) { return i * (i + 1) / 2; };
  for (std::int64_t b = 0; b < groups; ++b) {
    for (std::int64_t a = 0; a <= b; ++a)
      std::copy_n(system_.data() + (row(2 * b) + 2 * a) * kRows, kRows,
                  system_.data() + (row(b) + a) * kRows);
    std::copy_n(step_.data() + 2 * b * kRows, kRows, step_.data() + b * kRows);
  }
  lanes::solve(groups, kRidge, system_.data(), step_.data());
  trial_.codes = best_.codes;
  for (std::size_t i = 0; i < best_.scales.size(); ++i) {
    const float scale = zero_point_scale(best_.scales[i] + step_[i], grid.params, grid.bits);
    if (!(scale > 0 || (grid.zero && scale < 0)) || !std::isfinite(scale))
      continue;  // no grid; the row is measured without this step
    trial_.scales[i] = scale;
    trial_.biases[i] = zero_point_bias(scale, zeros_[i], grid.biases);
  }
}

// Each row of trial_ that is better becomes best_'s.
void RowRounder::keep_better(RoundingStage stage) {
  for (std::int64_t r = 0; r < kRows; ++r) {
    if (!(trial_.error[at(r)] < best_.error[at(r)])) continue;
    const auto copy = [&](const Numbers& from, Numbers& to) {
      for (std::size_t i = at(r); i < to.size(); i += at(kRows)) to[i] = from[i];
    };
    copy(trial_.codes, best_.codes);
    copy(trial_.scales, best_.scales);
    copy(trial_.biases, best_.biases);
    copy(trial_.e, best_.e);
    copy(trial_.g, best_.g);
    best_.error[at(r)] = trial_.error[at(r)];
  }
  errors_[static_cast<std::size_t>(stage)] = best_.error;
}

Status RowRounder::round(const InputErrors& errors, const RoundingGrid& grid, const float* w,
                         std::int64_t rows, GridRows& out) {
  rows_ = rows;
  inputs_ = errors.inputs();
  group_ = grid.group;
  top_ = static_cast<float>((1 << grid.bits) - 1);
  w_.assign(at(inputs_ * kRows), 0.0f);
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t j = 0; j < inputs_; ++j) w_[at(j * kRows + r)] = w[r * inputs_ + j];
  BITTERN_TRY(fit(errors, grid, w));
  best_.codes.resize(w_.size());
  lanes::nearest_codes(grids(best_), inputs_, w_.data(), best_.codes.data());
  measure(errors, best_);
  errors_[0] = best_.error;

  trial_.scales = best_.scales;
  trial_.biases = best_.biases;
  trial_.codes.resize(w_.size());
  room_.resize(w_.size());
  for (std::int64_t j = 0; j < inputs_; ++j)
    std::copy_n(w_.data() + errors.order()[at(j)] * kRows, kRows, room_.data() + j * kRows);
  lanes::compensated_codes(grids(trial_), errors.factor(), errors.order().data(), room_.data(),
                           trial_.codes.data());
  measure(errors, trial_);
  keep_better(RoundingStage::compensated);

  for (const auto& [refitted, descended] :
       {std::pair(RoundingStage::refit, RoundingStage::descent),
        std::pair(RoundingStage::second_refit, RoundingStage::second_descent)}) {
    BITTERN_TRY(refit(errors, grid));
    measure(errors, trial_);
    keep_better(refitted);
    trial_ = best_;
    lanes::descend(grids(trial_), errors.h(), trial_.g.data(), trial_.codes.data());
    measure(errors, trial_);
    keep_better(descended);
  }

  get(grid, best_, out);
  return {};
}

}  // namespace bittern
