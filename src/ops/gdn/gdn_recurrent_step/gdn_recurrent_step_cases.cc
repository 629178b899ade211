#include "ops/gdn/gdn_aims.h"

namespace bittern::oracle {

std::vector<GdnStepDesc> gdn_recurrent_step_check_cases() {
  std::vector<GdnStepDesc> cases;
  std::size_t turn = 0;
  const auto bit = [&](std::size_t i) { return (turn >> i & 1) != 0; };
  // Dims with every kind of tail, in both layouts; dtypes and options take turns.
  static constexpr DType kElements[] = {DType::f32, DType::bf16, DType::f16};
  for (const StateLayout layout : {StateLayout::key_value, StateLayout::value_key}) {
    for (const auto& [keys, values] : {std::pair<std::int64_t, std::int64_t>{128, 128},
                                       {1, 1},
                                       {7, 5},
                                       {16, 33},
                                       {33, 16},
                                       {20, 144},
                                       {24, 31},
                                       {100, 17},
                                       {256, 3},
                                       {3, 256}}) {
      ++turn;
      const bool large = keys * values > 5000;
      cases.push_back({.batch = large ? 1 : 3,
                       .tokens = static_cast<std::int64_t>(1 + turn % 3),
                       .key_heads = large ? 1 : 2,
                       .value_heads = large    ? 1
                                      : bit(0) ? 6
                                               : 2,
                       .key_dim = keys,
                       .value_dim = values,
                       .pool = bit(1) ? (bit(2) ? 2 : 4) : 0,
                       .element = kElements[turn % 3],
                       .head_map = bit(2) ? HeadMap::tiled : HeadMap::grouped,
                       .state_layout = layout,
                       .qk_l2norm = bit(0),
                       .gate = bit(1),
                       .beta_sigmoid = bit(2),
                       .allow_neg_eigval = bit(2) && bit(0),
                       .scale = bit(3) ? 0.25 : 0});
    }
  }
  cases.push_back({.batch = 0, .tokens = 1});
  cases.push_back({.batch = 2, .tokens = 0, .key_dim = 8, .value_dim = 8});
  return cases;
}

namespace {

void fill_bench(const GdnStepDesc& d, std::string_view operand, const ConstView& view, Rng& rng) {
  if (operand == "state_index") aim_state_index(d, view, rng);
  if (operand != "g" && operand != "beta") return;
  for (std::int64_t i = 0; i < view.shape.numel(); ++i)
    put(view, i, operand == "g" ? -rng.uniform() : rng.uniform());
}

}  // namespace

std::vector<BenchCase<GdnStepDesc>> gdn_recurrent_step_bench_cases() {
  // States in DRAM: 64 sequences of 32 heads, 64 KiB each.
  const GdnStepDesc base{
      .batch = 64, .tokens = 1, .key_heads = 16, .value_heads = 32, .element = DType::bf16};
  GdnStepDesc value_key = base, four = base, pool = base;
  value_key.state_layout = StateLayout::value_key;
  four.tokens = 4;
  four.batch = 32;
  pool.pool = 64;
  GdnStepDesc gpu = base, gpu_value_key = value_key;
  gpu.batch = gpu_value_key.batch = 128;
  pool.qk_l2norm = pool.gate = pool.beta_sigmoid = true;
  const char* plain = "a_log dt_bias state_index snapshots";
  return {{"64 x 32 heads, state k v", base, fill_bench, plain},
          {"64 x 32 heads, state v k", value_key, fill_bench, plain},
          {"pool, norm, gate, sigmoid", pool, fill_bench, "snapshots"},
          {"4 tokens, snapshots", four, fill_bench, "a_log dt_bias state_index"},
          {"128 x 32 heads, state k v", gpu, fill_bench, plain, Preference::exact, true},
          {"128 x 32 heads, state v k", gpu_value_key, fill_bench, plain, Preference::exact, true}};
}

// Random values make every order of additions visible; here gates and strengths are what models
// have, with extreme decays, and an odd head keeps the awkward values of the random fill.
void gdn_recurrent_step_aim(const GdnStepDesc& d, const GdnRecurrentStep::Args& a, Rng& rng) {
  if (d.pool > 0) {
    aim_state_index(d, a.state_index, rng);
    if (d.batch > 0 && rng.chance(2)) put(a.state_index, rng.below(d.batch), -1);
  }
  const std::int64_t gates = d.heads().gate_shape().numel();
  for (std::int64_t i = 0; i < gates; ++i) {
    if (rng.chance(12)) continue;
    static constexpr double kGates[] = {0, -0.0, -1e-6, -90, -104, -1e4, 30, -3e38, -HUGE_VAL};
    put(a.g, i, rng.chance(6) ? kGates[rng.below(std::size(kGates))] : -2 * rng.uniform());
    put(a.beta, i, rng.chance(6) ? 2.0 : rng.normal());
  }
  const auto calm = [&](const ConstView& x) {
    for (std::int64_t i = 0; i < x.shape.numel(); ++i)
      if (!(std::fabs(get(x, i)) < 1e6)) put(x, i, rng.chance(3) ? -0.0 : rng.normal());
  };
  if (rng.chance(5)) return;
  calm(a.q);
  calm(a.k);
  calm(a.v);
  calm(a.state);
}

}  // namespace bittern::oracle
