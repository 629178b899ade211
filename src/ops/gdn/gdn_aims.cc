#include "ops/gdn/gdn_aims.h"

#include <algorithm>

#include "ops/gdn/gdn.h"

namespace bittern::oracle {

std::vector<GdnDesc> gdn_cases(const GdnFields& fields) {
  struct Sizes {
    std::int64_t batch, tokens, key_heads, value_heads, key_dim, value_dim;
    std::int32_t chunk;
    std::int64_t sequences;
  };
  static constexpr Sizes kSizes[] = {
      {1, 1, 1, 1, 1, 1, 16, 0},      {2, 33, 2, 2, 17, 5, 16, 0},   {1, 70, 1, 3, 16, 24, 64, 0},
      {1, 100, 2, 6, 24, 17, 32, 4},  {1, 5, 1, 2, 128, 100, 64, 3}, {1, 129, 1, 1, 64, 32, 64, 0},
      {1, 0, 1, 1, 8, 8, 64, 2},      {0, 7, 1, 1, 8, 8, 64, 0},     {2, 0, 1, 2, 8, 8, 16, 0},
      {1, 18, 1, 1, 256, 250, 16, 0}, {1, 131, 1, 1, 50, 48, 64, 2}, {2, 64, 3, 3, 31, 20, 32, 0},
  };
  std::vector<GdnDesc> cases;
  std::size_t turn = 0;
  for (const Sizes& s : kSizes) {
    for (const DType element : {DType::f32, DType::f16, DType::bf16}) {
      if (!fields.keys && !fields.values && element != DType::f32) continue;
      // Ops with states have many operands to leave out: f16 and bf16 take turns.
      const DType skipped = (&s - kSizes) % 2 == 0 ? DType::f16 : DType::bf16;
      if (fields.state && element == skipped) continue;
      // Seven and three turns share no factor, so every pair of settings meets.
      const std::size_t bits = turn++ % 7;
      GdnDesc d{.batch = s.batch, .tokens = s.tokens, .value_heads = s.value_heads};
      d.chunk = s.chunk;
      d.sequences = s.sequences;
      if (fields.keys || fields.values) d.element = element;
      if (fields.keys) {
        d.key_heads = s.key_heads;
        d.key_dim = s.key_dim;
        d.head_map = (bits & 1) != 0 ? HeadMap::tiled : HeadMap::grouped;
      }
      if (fields.values) d.value_dim = s.value_dim;
      if (fields.matrix) d.a_element = (bits & 2) != 0 ? DType::bf16 : DType::f32;
      if (fields.triangle) d.lower_triangular = bits % 3 == 1;
      if (fields.state)
        d.state_layout = (bits & 2) != 0 ? StateLayout::value_key : StateLayout::key_value;
      if (fields.scale) d.scale = bits == 4 ? -0.3 : 0;
      if (fields.gate) d.gate = bits % 3 == 1;
      if (fields.fused) {
        d.qk_l2norm = (bits & 4) != 0;
        d.beta_sigmoid = bits % 3 == 2;
        d.allow_neg_eigval = bits == 5;
      }
      cases.push_back(d);
    }
  }
  return cases;
}

std::vector<BenchCase<GdnDesc>> gdn_gpu_bench_cases(decltype(BenchCase<GdnDesc>::fill) fill,
                                                    const char* left_out) {
  std::vector<BenchCase<GdnDesc>> cases;
  const auto add = [&](const char* label, GdnDesc d) {
    d.element = DType::bf16;
    cases.push_back({.label = label,
                     .desc = d,
                     .fill = fill,
                     .left_out = left_out,
                     .preference = Preference::fastest,
                     .gpu_only = true});
  };
  add("T 32768 16/32 heads", {.tokens = 32768, .key_heads = 16, .value_heads = 32});
  add("4 x 8192 16/32 heads", {.batch = 4, .tokens = 8192, .key_heads = 16, .value_heads = 32});
  add("T 8192 16/32 heads", {.tokens = 8192, .key_heads = 16, .value_heads = 32});
  add("T 32768 2/8 heads", {.tokens = 32768, .key_heads = 2, .value_heads = 8});
  GdnDesc other{.tokens = 8192, .key_heads = 16, .value_heads = 32, .key_dim = 64, .value_dim = 64};
  add("T 8192 16/32 heads 64/64", other);
  other.value_dim = 128;
  add("T 8192 16/32 heads 64/128", other);
  other.key_dim = 128;
  other.value_dim = 256;
  add("T 8192 16/32 heads 128/256", other);
  return cases;
}

std::vector<BenchCase<GdnDesc>> gdn_bench_cases() {
  const GdnDesc f32{.tokens = 4096, .key_heads = 16, .value_heads = 32};
  GdnDesc bf16 = f32;
  bf16.element = DType::bf16;
  const auto fill = [](const GdnDesc&, std::string_view operand, const ConstView& view, Rng& rng) {
    if (operand == "g") aim_log_decay(view, rng);
  };
  return {{"f32 16/32 heads 128", f32, fill}, {"bf16 16/32 heads 128", bf16, fill}};
}

std::vector<BenchCase<GdnDesc>> gdn_chain_bench_cases(const char* left_out) {
  std::vector<BenchCase<GdnDesc>> cases = gdn_bench_cases();
  const auto fill = [](const GdnDesc& d, std::string_view operand, const ConstView& view,
                       Rng& rng) {
    if (operand == "g") aim_summed_log_decay(d, view, {}, rng);
  };
  for (auto& large : gdn_gpu_bench_cases(fill, left_out)) cases.push_back(std::move(large));
  return cases;
}

std::vector<GdnSizes> gdn_tensor_core_sizes() {
  std::vector<GdnSizes> sizes;
  for (const std::int64_t keys : {64, 128})
    for (const std::int64_t values : {64, 128, 192, 256}) sizes.push_back({keys, values});
  return sizes;
}

std::vector<GdnDesc> gdn_tensor_core_cases() {
  GdnDesc one{.tokens = 70}, packed{.tokens = 200, .key_heads = 1, .value_heads = 3}, many = one;
  packed.sequences = 4;
  many.tokens = 270;
  GdnDesc turned{.tokens = 130, .key_heads = 2, .value_heads = 4};
  turned.state_layout = StateLayout::value_key;
  turned.head_map = HeadMap::tiled;
  std::vector<GdnDesc> cases{one, packed, many, turned};
  for (const auto& [keys, values] : gdn_tensor_core_sizes()) {
    if (keys == turned.key_dim && values == turned.value_dim) continue;
    GdnDesc d = values % 128 == 0 ? turned : packed;
    d.key_dim = keys;
    d.value_dim = values;
    cases.push_back(d);
  }
  for (GdnDesc& d : cases) d.element = DType::bf16;
  for (const GdnDesc& d : {packed, turned}) {
    cases.push_back(d);
    cases.back().element = DType::f16;
  }
  cases.push_back(cases.front());
  cases.back().batch = 0;
  return cases;
}

void aim_summed_log_decay(const GdnDesc& d, const ConstView& g, const ConstView& cu_seqlens,
                          Rng& rng) {
  if (!g) return;
  aim_log_decay(g, rng);
  for (const GdnChunk& chunk : gdn_chunks(d, cu_seqlens)) {
    for (std::int64_t h = 0; h < d.value_heads; ++h) {
      double sum = 0;
      for (std::int64_t i = 0; i < chunk.rows; ++i) {
        const std::int64_t at = (chunk.begin + i) * d.value_heads + h;
        put(g, at, sum += get(g, at));
      }
    }
  }
}

void aim_log_decay(const ConstView& g, Rng& rng) {
  if (!g) return;
  static constexpr double kOthers[] = {0, -0.0, 0, -20, -100, -1e4, -1e-6};
  for (std::int64_t i = 0; i < g.shape.numel(); ++i)
    put(g, i, rng.chance(4) ? kOthers[rng.below(std::size(kOthers))] : -2 * rng.uniform());
}

void aim_beta(const ConstView& beta, Rng& rng) {
  if (!beta) return;
  for (std::int64_t i = 0; i < beta.shape.numel(); ++i)
    put(beta, i, rng.chance(8) ? (rng.chance(2) ? 0.0 : 2.0) : rng.uniform());
}

void aim_state_index(const GdnStepDesc& d, const ConstView& index, Rng& rng) {
  for (std::int64_t s = 0; s < index.shape.numel(); ++s)  // -1, skipped, for those beyond the pool
    put(index, s, static_cast<double>(std::max<std::int64_t>(d.pool - 1 - s, -1)));
  for (std::int64_t s = 0; s + 1 < index.shape.numel(); ++s) {  // mixed
    const std::int64_t other = s + rng.below(index.shape.numel() - s);
    const double mine = get(index, s);
    put(index, s, get(index, other));
    put(index, other, mine);
  }
}

}  // namespace bittern::oracle
