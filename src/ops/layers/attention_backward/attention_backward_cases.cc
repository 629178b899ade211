#include "ops/layers/layers_aims.h"

namespace bittern::oracle {

std::vector<AttentionBackwardDesc> attention_backward_check_cases() {
  std::vector<AttentionBackwardDesc> cases{
      // Rows with every kind of tail, and groups of one, three and nine heads.
      {.tokens = 70, .sequences = 3, .heads = 2, .kv_heads = 2, .dim = 16},
      {.tokens = 75, .sequences = 2, .heads = 3, .kv_heads = 1, .dim = 17},
      {.tokens = 150, .sequences = 3, .heads = 9, .kv_heads = 3, .dim = 24},
      {.tokens = 65, .heads = 4, .kv_heads = 2, .dim = 64},
      {.tokens = 131, .heads = 1, .kv_heads = 1, .dim = 1},
      {.tokens = 20, .sequences = 2, .heads = 9, .kv_heads = 1, .dim = 7},
      {.tokens = 67, .heads = 2, .kv_heads = 1, .dim = 128},
      {.tokens = 9, .sequences = 2, .heads = 1, .kv_heads = 1, .dim = 256},
      // More sequences than tokens, many of one token.
      {.tokens = 12, .sequences = 30, .heads = 2, .kv_heads = 1, .dim = 20},
      {.tokens = 1, .heads = 3, .kv_heads = 3, .dim = 33},
      {.tokens = 0, .sequences = 2, .heads = 2, .kv_heads = 1, .dim = 16},
      {.tokens = 0, .heads = 2, .kv_heads = 1, .dim = 16},
      // Scales of both signs.
      {.tokens = 40, .heads = 2, .kv_heads = 1, .dim = 8, .scale = 3},
      {.tokens = 40, .heads = 2, .kv_heads = 1, .dim = 8, .scale = -0.3}};
  // Windows shorter than a tile's rows, than a block of queries, and longer; with a softcap or not.
  for (const std::int64_t window : {1, 2, 5, 7, 63, 64, 65, 100, 129, 200}) {
    const bool capped = cases.size() % 2 == 0;
    cases.push_back({.tokens = 199,
                     .sequences = capped ? 2 : 0,
                     .heads = 2,
                     .kv_heads = 1,
                     .dim = 9,
                     .softcap = capped ? 5.0 : 0.0,
                     .window = window});
  }
  cases.push_back({.tokens = 100, .sequences = 2, .heads = 3, .kv_heads = 1, .dim = 32});
  cases.back().softcap = 30;
  cases.push_back({.tokens = 66, .heads = 1, .kv_heads = 1, .dim = 16, .softcap = 1e-3});
  return cases;
}

namespace {

void fill_equal(const AttentionBackwardDesc& d, std::string_view operand, const ConstView& view,
                Rng&) {
  if (operand != "cu_seqlens") return;
  for (std::int64_t i = 0; i <= d.sequences; ++i)
    put(view, i, static_cast<double>(i * d.tokens / d.sequences));
}

}  // namespace

std::vector<BenchCase<AttentionBackwardDesc>> attention_backward_bench_cases() {
  const AttentionBackwardDesc small{
      .tokens = 4096, .sequences = 8, .heads = 9, .kv_heads = 3, .dim = 64};
  AttentionBackwardDesc wide = small, window = small, one = small;
  wide.sequences = 4;
  wide.heads = wide.kv_heads = 2;
  wide.dim = 256;
  wide.softcap = 50;
  window.sequences = 1;
  window.window = 512;
  one.sequences = 0;
  one.tokens = 2048;
  one.kv_heads = 1;
  return {{"8 x 512, 9/3 heads of 64", small, fill_equal},
          {"2048, 9/1 heads of 64", one, fill_equal},
          {"4096, window 512, 9/3 heads of 64", window, fill_equal},
          {"4 x 1024, softcap, 2/2 heads of 256", wide, fill_equal}};
}

// Mostly finite and of many sizes, so that softmax is flat, sharp, or has overflowing logits; and
// now and then one number that must not reach the queries that do not see it.
void attention_backward_aim(const AttentionBackwardDesc& d, const AttentionBackward::Args& a,
                            Rng& rng) {
  aim_sequences(d.rows(), a.cu_seqlens, rng);
  static constexpr double kSizes[] = {0, 0.1, 1, 3, 30, 1e4};
  aim_values(a.q, kSizes[rng.below(std::size(kSizes))], rng);
  aim_values(a.k, 1, rng);
  aim_values(a.v, 1, rng);
  aim_gradient(a.d_out, rng);
  if (d.tokens == 0) return;
  if (rng.chance(4)) {
    // The first query's one logit is -inf, the others are huge.
    for (std::int64_t h = 0; h < d.heads; ++h) put(a.q, h * d.dim, -1e30);
    for (std::int64_t h = 0; h < d.kv_heads; ++h) put(a.k, h * d.dim, 1e30);
  }
  if (rng.chance(3)) {
    static constexpr double kBad[] = {NAN, HUGE_VAL, -HUGE_VAL, 3e38};
    const ConstView operands[] = {a.q, a.k, a.v, a.d_out};
    const ConstView& x = operands[rng.below(4)];
    const std::int64_t at = rng.below(x.shape.numel());
    put(x, at, kBad[rng.below(4)]);
  }
}

}  // namespace bittern::oracle
