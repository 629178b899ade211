// Gram sums, and rounding under them: against plain loops, bit for bit where the list of operations
// is promised; never worse from stage to stage; the same on every SIMD target.
#include "distill/rounding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "convert/encode.h"
#include "convert/zero_points.h"
#include "core/thread_count.h"
#include "cpu/dispatch.h"

namespace bittern {
namespace {

using lanes::kRows;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// Rows of inputs with a few large columns and a common direction, as activations have.
std::vector<float> activations(std::int64_t rows, std::int64_t columns, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(at(rows * columns)), common(at(columns));
  for (float& value : common) value = normal(random);
  for (std::int64_t r = 0; r < rows; ++r) {
    const float along = normal(random);
    for (std::int64_t j = 0; j < columns; ++j)
      x[at(r * columns + j)] =
          (normal(random) + 2 * along * common[at(j)]) * (j % 37 == 5 ? 20.0f : 1.0f);
  }
  return x;
}
std::vector<float> weights(std::int64_t rows, std::int64_t columns, unsigned seed = 2) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 0.05f);
  std::vector<float> w(at(rows * columns));
  for (float& value : w) value = normal(random);
  return w;
}
Gram gram_of(const std::vector<float>& x, std::int64_t columns) {
  Gram gram(columns);
  gram.add(view(x.data(), {static_cast<std::int64_t>(x.size()) / columns, columns}));
  return gram;
}
InputErrors errors_of(const Gram& gram, std::vector<int> groups,
                      std::span<const std::int64_t> columns = {}) {
  auto errors = InputErrors::make(gram, columns, groups);
  EXPECT_TRUE(errors.ok()) << errors.status().message();
  return std::move(*errors);
}

class Targets : public testing::Test {
 protected:
  void TearDown() override { cpu::force_isa(cpu::Isa::none); }
};
using GramSums = Targets;
using Rounding = Targets;

TEST_F(GramSums, AreThoseOfAPlainLoop) {
  for (const std::int64_t n : {1, 20, 64, 130}) {
    const std::int64_t rows = 300, stride = n + 3;
    const std::vector<float> x = activations(rows, stride);
    std::vector<float> weight(at(rows));
    for (std::int64_t t = 0; t < rows; ++t) weight[at(t)] = 0.25f + static_cast<float>(t % 5);
    ConstView rows_of_x = view(x.data(), {rows, n});
    rows_of_x.stride[0] = stride;
    for (const bool weighted : {false, true}) {
      // f32 sums of up to 256 rows, rows ascending, then f64.
      std::vector<double> plain(at(n * n));
      for (std::int64_t i = 0; i < n; ++i)
        for (std::int64_t j = i; j < n; ++j)
          for (std::int64_t first = 0; first < rows; first += 256) {
            float sum = 0;
            for (std::int64_t t = first; t < std::min(rows, first + 256); ++t) {
              const float left = x[at(t * stride + i)];
              sum = std::fma(weighted ? weight[at(t)] * left : left, x[at(t * stride + j)], sum);
            }
            plain[at(i * n + j)] += double{sum};
          }
      for (const cpu::Isa isa : cpu::available_isas())
        for (const int threads : {1, 3}) {
          cpu::force_isa(isa);
          const ThreadCount count(threads);
          Gram gram(n);
          gram.add(rows_of_x, weighted ? std::span<const float>(weight) : std::span<const float>());
          EXPECT_EQ(gram.rows(), 300u);
          for (std::int64_t i = 0; i < n; ++i)
            for (std::int64_t j = i; j < n; ++j)
              ASSERT_EQ(gram.sums().row(i)[j], plain[at(i * n + j)]) << n << ": " << i << " " << j;
        }
    }
  }
}

TEST_F(Rounding, TheFactorIsThatOfTheInverse) {
  const std::int64_t n = 96;
  const InputErrors errors = errors_of(gram_of(activations(500, n), n), {32});
  const lanes::Square h = errors.h(), u = errors.factor();
  const auto& order = errors.order();
  for (std::int64_t i = 0; i + 1 < n; ++i)
    EXPECT_GE(errors.diagonal()[at(order[at(i)])], errors.diagonal()[at(order[at(i + 1)])]);
  EXPECT_NEAR(std::accumulate(errors.diagonal().begin(), errors.diagonal().end(), 0.0) / n, 1.01,
              1e-5);
  // U^T U H = 1, in the given order.
  for (std::int64_t i = 0; i < n; ++i)
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (std::int64_t k = 0; k < n; ++k) {
        double inverse = 0;
        for (std::int64_t m = 0; m <= std::min(i, k); ++m)
          inverse += double{u.data[i * u.stride + m]} * double{u.data[k * u.stride + m]};
        sum += inverse * double{h.data[order[at(k)] * h.stride + order[at(j)]]};
      }
      EXPECT_NEAR(sum, i == j, 2e-3) << i << " " << j;
    }
}

TEST_F(Rounding, ColumnsMayHaveAnotherOrder) {
  const std::int64_t n = 64;
  const Gram gram = gram_of(activations(200, n), n);
  std::vector<std::int64_t> turned(at(n));
  for (std::int64_t j = 0; j < n; ++j) turned[at(j)] = n - 1 - j;
  const InputErrors a = errors_of(gram, {32}), b = errors_of(gram, {32}, turned);
  for (std::int64_t i = 0; i < n; ++i)
    for (std::int64_t j = 0; j < n; ++j)
      EXPECT_EQ(a.h().data[i * a.h().stride + j],
                b.h().data[(n - 1 - i) * b.h().stride + n - 1 - j]);
}

// The lanes of one row.
std::vector<float> lane(const std::vector<float>& x, std::int64_t row) {
  std::vector<float> out;
  for (std::size_t i = at(row); i < x.size(); i += at(kRows)) out.push_back(x[i]);
  return out;
}

TEST_F(Rounding, CompensationAndDescentAreThePlainLoops) {
  const std::int64_t n = 160, group = 32;
  const InputErrors errors = errors_of(gram_of(activations(400, n), n), {32});
  const std::vector<float> w = weights(n, kRows), e = weights(n, kRows, 3);
  std::vector<float> scales(at(n / group * kRows)), biases(scales.size());
  for (std::size_t i = 0; i < scales.size(); ++i) {
    scales[i] = i % 7 == 3 ? 0.0f : (i % 5 == 1 ? -1.0f : 1.0f) * (0.02f + 0.001f * float(i % 11));
    biases[i] = -0.1f + 0.01f * float(i % 3);
  }
  const lanes::Grids grids{scales.data(), biases.data(), group, 15};
  const lanes::Square h = errors.h(), u = errors.factor();
  const auto& order = errors.order();
  std::vector<float> products(w.size());
  for (const cpu::Isa isa : cpu::available_isas()) {
    cpu::force_isa(isa);
    std::vector<float> ordered(w.size()), codes(w.size()), g(w.size()), moved(w.size(), 7.0f);
    for (std::int64_t j = 0; j < n; ++j)
      std::copy_n(w.data() + order[at(j)] * kRows, kRows, ordered.data() + j * kRows);
    lanes::compensated_codes(grids, u, order.data(), ordered.data(), codes.data());
    lanes::products(h, e.data(), g.data());
    const std::vector<float> before = g;
    lanes::descend(grids, h, g.data(), moved.data());
    for (const std::int64_t r : {0, 5, 63}) {
      const std::vector<float> s = lane(scales, r), b = lane(biases, r), y = lane(codes, r);
      std::vector<float> x = lane(w, r);
      for (std::int64_t j = 0; j < n; ++j) {
        const std::size_t c = at(order[at(j)]), k = c / at(group);
        const float code =
            s[k] == 0 ? 0.0f : std::clamp(std::nearbyint((x[c] - b[k]) / s[k]), 0.0f, 15.0f);
        ASSERT_EQ(y[c], code) << r << " " << j;
        const float step = (std::fma(code, s[k], b[k]) - x[c]) / u.data[j * u.stride + j];
        for (std::int64_t later = j + 1; later < n; ++later) {
          float& to = x[at(order[at(later)])];
          to = std::fma(u.data[later * u.stride + j], step, to);
        }
      }
      std::vector<float> gradient = lane(before, r);
      const std::vector<float> error = lane(e, r), z = lane(moved, r);
      for (std::int64_t i = 0; i < n; ++i) {
        float sum = 0;
        for (std::int64_t j = 0; j < n; ++j)
          sum = std::fma(h.data[i * h.stride + j], error[at(j)], sum);
        ASSERT_EQ(gradient[at(i)], sum) << r << " " << i;
      }
      for (std::int64_t j = 0; j < n; ++j) {
        const float scale = s[at(j / group)];
        const float code =
            scale == 0
                ? 7.0f
                : std::clamp(
                      std::nearbyint(7 + gradient[at(j)] / (h.data[j * h.stride + j] * scale)),
                      0.0f, 15.0f);
        ASSERT_EQ(z[at(j)], code) << r << " " << j;
        for (std::int64_t k = j + 1; k < n; ++k)
          gradient[at(k)] = std::fma(h.data[k * h.stride + j], (7 - code) * scale, gradient[at(k)]);
      }
    }
  }
}

TEST_F(Rounding, SolvesNormalEquations) {
  const std::int64_t n = 128, group = 32, groups = n / group, unknowns = 2 * groups;
  const InputErrors errors = errors_of(gram_of(activations(400, n), n), {32});
  std::vector<float> codes(at(n * kRows));
  for (std::size_t i = 0; i < codes.size(); ++i)
    codes[i] = static_cast<float>(i * 2654435761u >> 7 & 7) - 3.5f;
  std::vector<float> room(codes.size()), system(at(unknowns * (unknowns + 1) / 2 * kRows));
  const auto& sums = errors.sums(32);
  lanes::normal_equations(errors.h(), group, sums.rows.data(), sums.totals.data(), codes.data(),
                          room.data(), system.data());
  const std::int64_t r = 9;
  const auto basis = [&](std::int64_t unknown, std::int64_t j) {
    if (j / group != unknown / 2) return 0.0;
    return unknown % 2 == 1 ? 1.0 : double{codes[at(j * kRows + r)]};
  };
  std::vector<double> a(at(unknowns * unknowns));
  for (std::int64_t p = 0; p < unknowns; ++p)
    for (std::int64_t q = 0; q <= p; ++q) {
      double sum = 0, size = 0;
      for (std::int64_t i = 0; i < n; ++i)
        for (std::int64_t j = 0; j < n; ++j) {
          const double term =
              basis(p, i) * double{errors.h().data[i * errors.h().stride + j]} * basis(q, j);
          sum += term;
          size += std::abs(term);
        }
      a[at(p * unknowns + q)] = a[at(q * unknowns + p)] = sum;
      EXPECT_NEAR(system[at((p * (p + 1) / 2 + q) * kRows + r)], sum, 1e-6 * size + 1e-7)
          << p << " " << q;
    }
  std::vector<float> x(at(unknowns * kRows));
  for (std::int64_t p = 0; p < unknowns; ++p) x[at(p * kRows + r)] = static_cast<float>(p + 1);
  const float ridge = 1e-4f;
  lanes::solve(unknowns, ridge, system.data(), x.data());
  for (std::int64_t p = 0; p < unknowns; ++p) {
    double sum = 0, size = 0;
    for (std::int64_t q = 0; q < unknowns; ++q) {
      const double term =
          a[at(p * unknowns + q)] * (p == q ? 1 + double{ridge} : 1) * double{x[at(q * kRows + r)]};
      sum += term;
      size += std::abs(term);
    }
    EXPECT_NEAR(sum, static_cast<double>(p + 1), 1e-5 * size) << p;
  }
}

// e H e^T of what was written, in f64.
double error_of(const InputErrors& errors, const float* w, const GridRows& rows, std::int64_t row) {
  const std::int64_t n = errors.inputs(), groups = n / rows.group;
  std::vector<double> e(at(n));
  for (std::int64_t j = 0; j < n; ++j) {
    const std::size_t g = at(row * groups + j / rows.group);
    e[at(j)] =
        double{w[row * n + j]} -
        (double(rows.codes[at(row * n + j)]) * double{rows.scales[g]} + double{rows.biases[g]});
  }
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i)
    for (std::int64_t j = 0; j < n; ++j)
      sum += e[at(i)] * e[at(j)] * double{errors.h().data[i * errors.h().stride + j]};
  return sum;
}

// Scales, whether zero points are integers, and biases.
struct GridParams {
  DType params;
  bool integers;
  DType biases;
};
constexpr GridParams kGrids[] = {
    {DType::f32, false, DType::f32},  {DType::f16, false, DType::f32},
    {DType::bf16, false, DType::f32}, {DType::f32, true, DType::f32},
    {DType::f16, true, DType::f32},   {DType::f16, true, DType::f16},
    {DType::bf16, true, DType::f32},  {DType::bf16, true, DType::bf16}};

float in(DType dtype, float x) {
  return dtype == DType::f16 ? to_f32(to_f16(x)) : dtype == DType::bf16 ? to_f32(to_bf16(x)) : x;
}

constexpr RoundingStage kStages[] = {RoundingStage::start,        RoundingStage::compensated,
                                     RoundingStage::refit,        RoundingStage::descent,
                                     RoundingStage::second_refit, RoundingStage::second_descent};

TEST_F(Rounding, NoStageIsWorseThanItsStart) {
  const std::int64_t n = 128, rows = 17;
  const InputErrors errors = errors_of(gram_of(activations(600, n), n), {32, 64, 128});
  const std::vector<float> w = weights(rows, n);
  for (const int bits : {2, 3, 4, 5, 6, 8})
    for (const int group : {32, 64, 128})
      for (const auto& [params, integers, biases] : kGrids) {
        RowRounder rounder;
        GridRows out;
        const RoundingGrid grid{bits, group, params, integers, biases};
        ASSERT_TRUE(rounder.round(errors, grid, w.data(), rows, out).ok());
        double first = 0, last = 0;
        for (std::int64_t r = 0; r < rows; ++r) {
          for (std::size_t s = 1; s < kRoundingStages; ++s)
            ASSERT_LE(rounder.errors(kStages[s])[at(r)], rounder.errors(kStages[s - 1])[at(r)]);
          const double end = rounder.errors(RoundingStage::second_descent)[at(r)];
          EXPECT_NEAR(error_of(errors, w.data(), out, r), end, 1e-4 * end);
          first += rounder.errors(RoundingStage::start)[at(r)];
          last += end;
        }
        // It does gain, and much of it.
        EXPECT_LT(last, 0.6 * first) << bits << " " << group;
        EXPECT_TRUE(std::all_of(out.codes.begin(), out.codes.end(),
                                [&](std::uint8_t code) { return code < 1 << bits; }));
        for (std::size_t i = 0; i < out.scales.size(); ++i) {
          EXPECT_EQ(out.scales[i], in(params, out.scales[i]));
          EXPECT_EQ(out.biases[i], in(integers ? biases : params, out.biases[i]));
          if (!integers) continue;
          EXPECT_GT(out.scales[i], 0);
          const float zero = std::nearbyint(-out.biases[i] / out.scales[i]);
          EXPECT_TRUE(zero >= 0 && zero < float(1 << bits)) << zero;
          EXPECT_EQ(out.biases[i], in(biases, 0 - out.scales[i] * zero));
        }
      }
}

TEST_F(Rounding, IntegerZeroPointsAreBetterThanMinmax) {
  const std::int64_t n = 128, rows = 17;
  const InputErrors errors = errors_of(gram_of(activations(600, n), n), {32});
  const std::vector<float> w = weights(rows, n);
  for (const int bits : {2, 3, 4, 8}) {
    RowRounder rounder;
    GridRows ours, minmax, real;
    ASSERT_TRUE(
        rounder.round(errors, {bits, 32, DType::bf16, true, DType::f32}, w.data(), rows, ours)
            .ok());
    ASSERT_TRUE(rounder.round(errors, {bits, 32, DType::bf16}, w.data(), rows, real).ok());
    ASSERT_TRUE(
        fit_zero_points(
            {.bits = bits, .group = 32, .params = DType::bf16, .method = AffineMethod::minmax},
            w.data(), rows, n, {}, minmax)
            .ok());
    double sum = 0, of_minmax = 0, of_real = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
      const double error = error_of(errors, w.data(), ours, r);
      EXPECT_LT(error, error_of(errors, w.data(), minmax, r)) << bits << " " << r;
      sum += error;
      of_minmax += error_of(errors, w.data(), minmax, r);
      of_real += error_of(errors, w.data(), real, r);
    }
    EXPECT_LT(sum, 0.5 * of_minmax) << bits;
    EXPECT_LT(sum, 2.5 * of_real) << bits;  // which have twice as many numbers to fit
  }
}

// The types of GGUF that groups and super-blocks of codes have.
RoundingGrid grid_for(GgmlType type) {
  const Storage to = Storage::blocks(type);
  const Grid grid = *grid_of(to);
  if (type == GgmlType::q4_k || type == GgmlType::q5_k)
    return {.bits = grid.bits, .group = grid.group, .blocks = to};
  RoundingGrid out{.bits = grid.bits, .group = grid.group, .params = DType::f16};
  if (is_fitted(to)) return out;  // Q4_1, Q5_1
  out.integer_zeros = true;
  out.zero = 1 << (grid.bits - 1);
  return out;
}

// What the type makes of the numbers alone.
GridRows encoded(const Storage& to, std::optional<AffineMethod> method, const std::vector<float>& w,
                 std::int64_t rows) {
  const std::int64_t n = std::ssize(w) / rows;
  const RowEncoder encoder{.to = to, .method = method, .through = {}};
  EncodedRows blocks;
  GridRows out;
  std::uint64_t saturated = 0;
  EXPECT_TRUE(encoder.encode({.data = w.data(), .own = {}}, rows, n, {}, blocks, saturated).ok());
  EXPECT_TRUE(decode_grid(tensor_of(blocks, to, rows, n), 0, rows, out).ok());
  return out;
}

TEST_F(Rounding, EveryTypeOfGgufHoldsItsRows) {
  const std::int64_t n = 512, rows = 17;
  const std::vector<float> x = activations(900, n), w = weights(rows, n);
  const InputErrors errors = errors_of(gram_of(x, n), {32});
  for (const GgmlType type : {GgmlType::q4_0, GgmlType::q4_1, GgmlType::q5_0, GgmlType::q5_1,
                              GgmlType::q8_0, GgmlType::q4_k, GgmlType::q5_k}) {
    const Storage to = Storage::blocks(type);
    SCOPED_TRACE(to.str());
    const RoundingGrid grid = grid_for(type);
    GridRows first;
    for (const cpu::Isa isa : cpu::available_isas()) {
      cpu::force_isa(isa);
      RowRounder rounder;
      GridRows out, read, alone;
      ASSERT_TRUE(rounder.round(errors, grid, w.data(), rows, out).ok());
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::size_t s = 1; s < kRoundingStages; ++s)
          ASSERT_LE(rounder.errors(kStages[s])[at(r)], rounder.errors(kStages[s - 1])[at(r)]);
        const double end = rounder.errors(RoundingStage::second_descent)[at(r)];
        EXPECT_NEAR(error_of(errors, w.data(), out, r), end, 1e-4 * end);
      }
      EncodedRows blocks;
      const Status held = encode_grid(out, n, to, blocks);
      ASSERT_TRUE(held.ok()) << held.message();
      ASSERT_TRUE(decode_grid(tensor_of(blocks, to, rows, n), 0, rows, read).ok());
      EXPECT_EQ(read.codes, out.codes);
      EXPECT_EQ(read.scales, out.scales);
      EXPECT_EQ(read.biases, out.biases);
      ASSERT_TRUE(rounder.round(errors, grid, w.data() + 16 * n, 1, alone).ok());
      EXPECT_TRUE(std::equal(alone.codes.begin(), alone.codes.end(), out.codes.begin() + 16 * n));
      EXPECT_TRUE(
          std::equal(alone.scales.begin(), alone.scales.end(), out.scales.begin() + 16 * n / 32));
      if (first.codes.empty()) first = out;
      EXPECT_EQ(out.codes, first.codes);
      EXPECT_EQ(out.scales, first.scales);
      EXPECT_EQ(out.biases, first.biases);
    }
    const GridRows plain =
        encoded(to, is_fitted(to) ? std::optional(AffineMethod::lsq) : std::nullopt, w, rows);
    double ours = 0, its = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
      ours += error_of(errors, w.data(), first, r);
      its += error_of(errors, w.data(), plain, r);
    }
    EXPECT_LT(ours, 0.5 * its);
  }
}

TEST_F(Rounding, RowsDoNotDependOnTheirNeighboursOrTheTarget) {
  const std::int64_t n = 192, rows = 64;
  const std::vector<float> x = activations(300, n), w = weights(rows, n);
  for (const bool integers : {false, true}) {
    const RoundingGrid grid{3, 64, DType::f16, integers};
    std::vector<GridRows> all;
    for (const cpu::Isa isa : cpu::available_isas()) {
      cpu::force_isa(isa);
      const InputErrors errors = errors_of(gram_of(x, n), {64});
      RowRounder rounder;
      GridRows together, alone;
      ASSERT_TRUE(rounder.round(errors, grid, w.data(), rows, together).ok());
      ASSERT_TRUE(rounder.round(errors, grid, w.data() + 17 * n, 1, alone).ok());
      EXPECT_TRUE(
          std::equal(alone.codes.begin(), alone.codes.end(), together.codes.begin() + 17 * n));
      EXPECT_TRUE(std::equal(alone.scales.begin(), alone.scales.end(),
                             together.scales.begin() + 17 * (n / 64)));
      all.push_back(together);
    }
    for (const GridRows& other : all) {
      EXPECT_EQ(other.codes, all.front().codes);
      EXPECT_EQ(other.scales, all.front().scales);
      EXPECT_EQ(other.biases, all.front().biases);
    }
  }
}

TEST_F(Rounding, DegenerateRowsAndInputs) {
  const std::int64_t n = 64;
  std::vector<float> w(at(6 * n));
  for (std::int64_t j = 0; j < n; ++j) {
    w[at(n + j)] = 0.25f;                        // constant
    w[at(2 * n + j)] = j == 7 ? 100.0f : 0.0f;   // one number
    w[at(3 * n + j)] = 1e-30f * float(j);        // tiny: f16 scales vanish
    w[at(4 * n + j)] = float(j % 4) * 0.5f - 1;  // on a 2-bit grid already
    w[at(5 * n + j)] = -7000.0f + float(j);      // large
  }
  std::vector<std::vector<float>> inputs = {std::vector<float>(at(n)), activations(3, n),
                                            activations(200, n)};
  inputs.push_back(inputs.back());
  for (std::size_t i = 0; i < inputs.back().size(); ++i)
    if (i % at(n) % 3 == 0) inputs.back()[i] = 0;  // columns that are never used
  for (const std::vector<float>& x : inputs) {
    const InputErrors errors = errors_of(gram_of(x, n), {32});
    for (const int bits : {2, 8})
      for (const auto& [params, integers, biases] : kGrids) {
        if (params == DType::bf16) continue;
        RowRounder rounder;
        GridRows out;
        const RoundingGrid grid{bits, 32, params, integers, biases};
        ASSERT_TRUE(rounder.round(errors, grid, w.data(), 6, out).ok());
        for (std::int64_t r = 0; r < 6; ++r) {
          const double end = rounder.errors(RoundingStage::second_descent)[at(r)];
          EXPECT_TRUE(std::isfinite(end)) << r;
          EXPECT_LE(end, rounder.errors(RoundingStage::start)[at(r)]) << r;
        }
        EXPECT_TRUE(std::all_of(out.scales.begin(), out.scales.end(),
                                [](float s) { return std::isfinite(s); }));
        if (integers) continue;                   // f16 holds no 255th part of 0.25
        for (const std::int64_t r : {0, 1, 4}) {  // exact on their grids
          if (r == 4 && bits != 2) continue;
          EXPECT_EQ(error_of(errors, w.data(), out, r), 0) << r << ", " << bits << " bits";
        }
      }
  }
}

// Dead columns, and others of one number, have no say in the scale of their super-block.
TEST_F(Rounding, AGroupOfOneNumberSpoilsNoOther) {
  const std::int64_t n = 512, rows = 5;
  std::vector<float> w = weights(rows, n);
  for (std::int64_t j = 0; j < n; ++j) {
    if (j / 32 == 1) w[at(j)] = 0;
    if (j / 32 == 1) w[at(n + j)] = 0.01f;
    if (j / 32 == 10) w[at(2 * n + j)] = -0.01f;
    w[at(3 * n + j)] = 0.5f;
    w[at(4 * n + j)] = -0.7f;
  }
  const InputErrors plain = errors_of(Gram(n), {32});  // all columns alike
  for (const GgmlType type : {GgmlType::q4_k, GgmlType::q5_k}) {
    const Storage to = Storage::blocks(type);
    const GridRows own = encoded(to, std::nullopt, w, rows);
    RowRounder rounder;
    GridRows gptq, again;
    ASSERT_TRUE(rounder.round(plain, grid_for(type), w.data(), rows, gptq).ok());
    EncodedRows fitted;
    ASSERT_TRUE(fit_grid(gptq, n, to, fitted).ok());
    ASSERT_TRUE(decode_grid(tensor_of(fitted, to, rows, n), 0, rows, again).ok());
    for (const GridRows& made : {encoded(to, AffineMethod::lsq, w, rows),
                                 encoded(to, AffineMethod::minmax, w, rows), gptq, again})
      for (std::int64_t r = 0; r < rows; ++r) {
        const double size = r < 3 ? 0.05 * 0.05 * n : 0.5 * 0.5 * n;
        EXPECT_LE(error_of(plain, w.data(), made, r),
                  1.3 * error_of(plain, w.data(), own, r) + 1e-5 * size)
            << to.str() << ", row " << r;
      }
  }
}

TEST_F(Rounding, DegenerateRowsOfGgufTypes) {
  const std::int64_t n = 256;
  std::vector<float> w(at(5 * n));
  for (std::int64_t j = 0; j < n; ++j) {
    w[at(n + j)] = 0.25f;                          // constant
    w[at(2 * n + j)] = j == 7 ? 100.0f : 0.0f;     // one number
    w[at(3 * n + j)] = 1e-30f * float(j);          // tiny: f16 scales vanish
    w[at(4 * n + j)] = j % 2 == 0 ? 7e3f : -7e3f;  // large, and at both ends
  }
  for (const std::vector<float>& x : {std::vector<float>(at(n)), activations(300, n)}) {
    const InputErrors errors = errors_of(gram_of(x, n), {32});
    for (const GgmlType type :
         {GgmlType::q4_0, GgmlType::q5_0, GgmlType::q8_0, GgmlType::q4_k, GgmlType::q5_k}) {
      SCOPED_TRACE(Storage::blocks(type).str());
      RowRounder rounder;
      GridRows out;
      EncodedRows blocks;
      ASSERT_TRUE(rounder.round(errors, grid_for(type), w.data(), 5, out).ok());
      for (std::int64_t r = 0; r < 5; ++r) {
        const double end = rounder.errors(RoundingStage::second_descent)[at(r)];
        EXPECT_TRUE(std::isfinite(end)) << r;
        EXPECT_LE(end, rounder.errors(RoundingStage::start)[at(r)]) << r;
      }
      EXPECT_EQ(error_of(errors, w.data(), out, 0), 0);
      const Status held = encode_grid(out, n, Storage::blocks(type), blocks);
      EXPECT_TRUE(held.ok()) << held.message();
    }
  }
}

TEST_F(Rounding, RefusesInputsThatAreNotFinite) {
  for (const float bad :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(), 1e30f}) {
    std::vector<float> x = activations(10, 64);
    x[100] = bad;
    const int group = 32;
    const auto errors = InputErrors::make(gram_of(x, 64), {}, std::span(&group, 1));
    ASSERT_FALSE(errors.ok());
    EXPECT_EQ(errors.status().message(),
              "its inputs hold infinities or NaN, expected finite numbers");
  }
}

}  // namespace
}  // namespace bittern
