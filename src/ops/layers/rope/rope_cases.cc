#include "core/angle.h"
#include "core/exp_log.h"
#include "ops/layers/layers_aims.h"

namespace bittern::oracle {

std::vector<RopeDesc> rope_check_cases() {
  std::vector<RopeDesc> cases;
  static constexpr std::int64_t kDims[][2] = {{2, 2},   {7, 4},   {16, 16},   {33, 32}, {64, 64},
                                              {80, 32}, {96, 62}, {128, 128}, {5, 0},   {300, 290}};
  for (const auto& [dim, rotary_dim] : kDims) {
    for (const RopeLayout layout : {RopeLayout::half, RopeLayout::interleaved}) {
      for (const DType element : {DType::f32, DType::bf16, DType::f16}) {
        const std::size_t turn = cases.size();
        cases.push_back({.tokens = dim < 50 ? 19 : 6,
                         .heads = turn % 2 == 0 ? 3 : 1,
                         .dim = dim,
                         .rotary_dim = rotary_dim,
                         .factor = turn % 4 == 1 ? 1.2079441541679836 : 1.0,
                         .element = element,
                         .layout = layout});
      }
    }
  }
  cases.push_back({.tokens = 0, .dim = 64, .rotary_dim = 64});
  cases.push_back({.tokens = 3, .heads = 0, .dim = 64, .rotary_dim = 64});
  return cases;
}

namespace {

// The frequencies of a base of 10000.
double usual_frequency(const RopeDesc& d, std::int64_t i) {
  return exp_log::exp(-2 * static_cast<double>(i) / static_cast<double>(d.rotary_dim) *
                      exp_log::log(10000.0));
}

// The positions of a prompt.
void fill_prompt(const RopeDesc& d, std::string_view operand, const ConstView& v, Rng&) {
  if (operand == "positions")
    for (std::int64_t t = 0; t < d.tokens; ++t) put(v, t, static_cast<double>(t));
  if (operand == "inverse_frequencies")
    for (std::int64_t i = 0; i < d.rotary_dim / 2; ++i) put(v, i, usual_frequency(d, i));
}

}  // namespace

std::vector<BenchCase<RopeDesc>> rope_bench_cases() {
  const RopeDesc bf16{.tokens = 4096, .heads = 32, .element = DType::bf16};
  RopeDesc f32 = bf16, pairs = bf16, few = bf16;
  f32.element = DType::f32;
  pairs.layout = RopeLayout::interleaved;
  few.heads = 2;
  few.tokens = 65536;
  return {{"bf16 4096 x 32 x 128", bf16, fill_prompt},
          {"f32 4096 x 32 x 128", f32, fill_prompt},
          {"bf16 interleaved", pairs, fill_prompt},
          {"bf16 65536 x 2 x 128", few, fill_prompt}};
}

// Positions near and far, angles on either side of a change of quarter, and of the largest angle.
void rope_aim(const RopeDesc& d, const Rope::Args& a, Rng& rng) {
  static constexpr double kPositions[] = {0, 1, -1, 1048576, 2147483647, -2147483648.0, 536870913};
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    put(a.positions, t,
        rng.chance(4) ? kPositions[rng.below(std::size(kPositions))]
                      : static_cast<double>(rng.below(1 << 20)));
  }
  for (std::int64_t i = 0; i < d.rotary_dim / 2; ++i) {
    if (rng.chance(16)) continue;
    double f = usual_frequency(d, i);
    if (d.tokens > 0 && rng.chance(3)) {
      const double position = get(a.positions, rng.below(d.tokens));
      const double quarters = rng.chance(4) ? angle::kMost / angle::kHalfPiHigh
                                            : static_cast<double>(rng.below(64)) + 0.5;
      f = position == 0 ? 1 : angle::kHalfPiHigh * quarters / position;
      f = step(DType::f32, f, static_cast<int>(rng.below(5)) - 2);
    }
    put(a.inverse_frequencies, i, f);
  }
}

}  // namespace bittern::oracle
