#include "ops/gdn/gdn_aims.h"

namespace bittern::oracle {

std::vector<GdnDecodeDesc> gdn_decode_step_check_cases() {
  std::vector<GdnDecodeDesc> cases;
  std::size_t turn = 0;
  const auto bit = [&](std::size_t i) { return (turn >> i & 1) != 0; };
  // Dims with every kind of tail, in both layouts; dtypes, widths and options take turns.
  static constexpr DType kElements[] = {DType::f32, DType::bf16, DType::f16};
  for (const StateLayout layout : {StateLayout::key_value, StateLayout::value_key}) {
    for (const auto& [keys, values] : {std::pair<std::int64_t, std::int64_t>{128, 128},
                                       {1, 1},
                                       {7, 5},
                                       {16, 33},
                                       {20, 144},
                                       {24, 96},
                                       {200, 66},
                                       {3, 256}}) {
      ++turn;
      const bool large = keys * values > 1000;
      cases.push_back({.batch = large ? 1 : 2,
                       .tokens = static_cast<std::int64_t>(large ? 1 + turn % 2 : 1 + turn % 3),
                       .key_heads = large ? 1 : 2,
                       .value_heads = large    ? 2
                                      : bit(0) ? 6
                                               : 2,
                       .key_dim = keys,
                       .value_dim = values,
                       .width = static_cast<std::int32_t>(2 + turn % 3),
                       .pool = bit(1) ? (bit(2) ? 1 : 3) : 0,
                       .element = kElements[turn / 2 % 3],
                       .head_map = bit(2) ? HeadMap::tiled : HeadMap::grouped,
                       .state_layout = layout,
                       .allow_neg_eigval = bit(2),
                       .eps = bit(3) ? 0.25 : 1e-6,
                       .rounding = bit(1) ? NormRounding::each : NormRounding::once});
    }
  }
  // As many tokens as there can be, and so many value heads that a block of CUDA's takes rounds.
  cases.push_back({.batch = 1,
                   .tokens = 8,
                   .value_heads = 5,
                   .key_dim = 16,
                   .value_dim = 96,
                   .element = DType::bf16});
  cases.push_back({.batch = 0, .tokens = 1});
  cases.push_back({.batch = 2, .tokens = 0, .key_dim = 8, .value_dim = 8});
  return cases;
}

namespace {

void fill_bench(const GdnDecodeDesc& d, std::string_view operand, const ConstView& view, Rng& rng) {
  if (operand == "state_index") aim_state_index(d.step(), view, rng);
}

}  // namespace

std::vector<BenchCase<GdnDecodeDesc>> gdn_decode_step_bench_cases() {
  // The layer of Qwen3-Next; the states of 64 sequences lie in DRAM.
  const GdnDecodeDesc base{
      .batch = 64, .tokens = 1, .key_heads = 16, .value_heads = 32, .element = DType::bf16};
  GdnDecodeDesc value_key = base, four = base, one = base;
  value_key.state_layout = StateLayout::value_key;
  four.tokens = 4;
  four.batch = 32;
  one.batch = 1;
  GdnDecodeDesc gpu = base, gpu_value_key = value_key;
  gpu.batch = gpu_value_key.batch = 128;
  const char* plain = "conv_bias state_index snapshots conv_snapshots";
  return {{"64 x 32 heads, state k v", base, fill_bench, plain},
          {"64 x 32 heads, state v k", value_key, fill_bench, plain},
          {"1 x 32 heads, state k v", one, fill_bench, plain},
          {"4 tokens, snapshots", four, fill_bench, "conv_bias state_index"},
          {"128 x 32 heads, state k v", gpu, fill_bench, plain, Preference::exact, true},
          {"128 x 32 heads, state v k", gpu_value_key, fill_bench, plain, Preference::exact, true}};
}

// Random values make every order of additions visible; here the inputs are what models have, with
// extreme gates now and then, and some problems keep the awkward values of the random fill.
void gdn_decode_step_aim(const GdnDecodeDesc& d, const GdnDecodeStep::Args& a, Rng& rng) {
  if (d.pool > 0) {
    aim_state_index(d.step(), a.state_index, rng);
    if (d.batch > 0 && rng.chance(2)) put(a.state_index, rng.below(d.batch), -1);
  }
  if (rng.chance(5)) return;
  aim_values(a.x, 2, rng);
  aim_values(a.z, 4, rng);
  aim_values(a.g, 8, rng);
  aim_values(a.beta, 3, rng);
  aim_values(a.conv_weight, 1, rng);
  aim_values(a.conv_bias, 1, rng);
  aim_values(a.conv_state, 2, rng);
  aim_values(a.norm_weight, 1, rng);
  aim_values(a.a_log, 1, rng);
  aim_values(a.dt_bias, 1, rng);
  aim_values(a.state, 1, rng);
  static constexpr double kGates[] = {HUGE_VAL, 1e4, 104, 90, -90, -1e4};
  for (std::int64_t i = 0; i < a.g.shape.numel(); ++i)
    if (rng.chance(8)) put(a.g, i, kGates[rng.below(std::size(kGates))]);
}

}  // namespace bittern::oracle
