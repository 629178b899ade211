#include "oracle/oracle.h"

namespace bittern::oracle {

std::vector<AuraAttentionDesc> aura_attention_check_cases() {
  std::vector<AuraAttentionDesc> cases;
  constexpr DType kElements[] = {DType::f32, DType::bf16, DType::f16};
  const auto add = [&](AuraAttentionDesc d) {
    d.element = kElements[cases.size() % 3];
    d.exact = kElements[(cases.size() + 1) % 3];
    d.f16_scale = cases.size() % 4 == 1;
    cases.push_back(d);
  };
  // Every width, each head length once with every kind of rotation that fits it.
  for (std::int32_t bits = 1; bits <= 8; ++bits) {
    add({.heads = 2,
         .kv_heads = 2,
         .dim = 128,
         .capacity = 18,
         .k_bits = bits,
         .v_bits = 9 - bits});
    add({.queries = 2,
         .heads = 3,
         .dim = 72,
         .capacity = 11,
         .first = 2,
         .recent = 3,
         .k_bits = 9 - bits,
         .v_bits = bits,
         .k_rotation = Rotation::dense,
         .v_rotation = Rotation::identity});
  }
  for (const std::int64_t dim : {2, 64, 80, 96, 192, 256, 512})
    add({.dim = dim, .capacity = 18, .first = 1, .recent = 17, .k_bits = 4, .v_bits = 3});
  add({.dim = 1024, .capacity = 5, .recent = 2, .k_bits = 8, .v_bits = 4});
  for (const std::int64_t dim : {7, 33, 129})
    add({.dim = dim,
         .capacity = 9,
         .recent = 70,
         .k_rotation = Rotation::identity,
         .v_rotation = Rotation::dense});
  // Splits: their edges, many of them, and regions that are empty.
  for (const std::int64_t tokens : {0, 1, 16, 17, 256, 257, 600}) {
    add({.dim = 16, .capacity = tokens, .k_bits = 4, .v_bits = 4});
    add({.dim = 16, .capacity = 3, .first = tokens / 2, .recent = tokens});
  }
  // Query heads per KV head, and queries: blocks of rows of every size.
  for (const std::int64_t group : {1, 2, 3, 4, 5, 8, 17, 33})
    add({.queries = 1 + group % 3, .heads = 2 * group, .kv_heads = 2, .dim = 16, .capacity = 18});
  for (const std::int64_t queries : {0, 2, 21, 40}) {
    add({.queries = queries, .heads = 2, .dim = 16, .capacity = 14, .first = 4, .recent = 17});
    add({.queries = queries, .dim = 16, .capacity = 30, .recent = 5, .causal = false});
  }
  add({.sequences = 0, .dim = 32, .capacity = 5});
  add({.sequences = 9, .queries = 2, .heads = 4, .kv_heads = 2, .dim = 16, .capacity = 20});
  // Windows, also narrower than the queries.
  for (const std::int64_t window : {1, 7, 100, 300}) {
    for (const bool keeps : {false, true}) {
      add({.queries = 3,
           .dim = 16,
           .capacity = 270,
           .first = 5,
           .recent = 8,
           .window = window,
           .window_keeps_first = keeps,
           .causal = window != 7});
    }
  }
  // Pages.
  for (const std::int64_t page : {16, 17, 128}) {
    add({.sequences = 2,
         .heads = 2,
         .kv_heads = 2,
         .dim = page == 17 ? 128 : 16,
         .capacity = 3 * page,
         .page_size = page,
         .pages = 7,
         .first = 2,
         .recent = 3,
         .scale = 0.25});
    add({.dim = 40, .capacity = page, .page_size = page, .pages = 2, .k_bits = 3, .v_bits = 6});
  }
  return cases;
}

namespace {

void put_signs(const ConstView& v, Rng& rng) {
  for (std::int64_t i = 0; i < v.shape.numel(); ++i) put(v, i, rng.chance(2) ? 1 : -1);
}

void fill_bench(const AuraAttentionDesc& d, std::string_view operand, const ConstView& v,
                Rng& rng) {
  if (operand.ends_with("_table") && v.dtype == DType::f32) put_signs(v, rng);
  if (operand == "block_table") {
    // Every page once, but not in order.
    const std::int64_t n = v.shape.numel();
    for (std::int64_t i = 0; i < n; ++i) put(v, i, static_cast<double>(i * 1009 % d.pages));
  }
}

}  // namespace

std::vector<BenchCase<AuraAttentionDesc>> aura_attention_bench_cases() {
  // Beyond every cache: 71 MB coded, 268 MB as f16.
  const AuraAttentionDesc coded{.heads = 8, .kv_heads = 8, .dim = 128, .capacity = 65536};
  std::vector<BenchCase<AuraAttentionDesc>> cases;
  const auto add = [&](std::string label, const AuraAttentionDesc& d,
                       Preference preference = Preference::exact) {
    cases.push_back(
        {std::move(label), d, fill_bench, "lengths starts k_mean v_mean sinks", preference});
  };
  AuraAttentionDesc d = coded;
  d.capacity = 0;
  d.recent = coded.capacity;
  d.exact = DType::f16;
  add("f16 cache 8 heads", d);
  add("4/4 bit 8 heads", coded);
  add("4/4 bit 8 heads int8", coded, Preference::fastest);
  d = coded;
  d.heads = 32;
  add("4/4 bit 32/8 heads", d);
  add("4/4 bit 32/8 heads int8", d, Preference::fastest);
  d = coded;
  d.k_bits = 8;
  add("8/4 bit 8 heads", d);
  d = coded;
  d.k_bits = 3;
  d.v_bits = 2;
  add("3/2 bit 8 heads", d);
  d = coded;
  d.page_size = 16;
  d.pages = d.capacity / d.page_size;
  add("4/4 bit 8 heads pages of 16", d);
  d = coded;
  d.queries = 256;
  d.capacity = 4096;
  add("4/4 bit prefill 256 queries", d);
  return cases;
}

void aura_attention_aim(const AuraAttentionDesc& d, const AuraAttention::Args& a, Rng& rng) {
  const auto each = [&](const ConstView& v, auto&& value) {
    if (!v) return;
    for (std::int64_t i = 0; i < v.shape.numel(); ++i) put(v, i, value(get(v, i)));
  };
  // Mostly finite: one NaN would hide every other fault of a row.
  const bool awkward = rng.chance(6);
  const double size = rng.chance(4) ? 30 : 1;
  const auto ordinary = [&](double x) {
    return !awkward && !(std::fabs(x) < 1e4) ? rng.normal() : x;
  };
  each(a.q, [&](double x) { return size * ordinary(x); });
  for (const ConstView& v : {a.k_first, a.v_first, a.k_recent, a.v_recent, a.k_mean, a.v_mean})
    each(v, ordinary);
  for (const ConstView& v : {a.k_scales, a.v_scales})
    each(v, [&](double x) { return awkward && rng.chance(30) ? x : 4 * rng.uniform(); });
  for (const ConstView& v : {a.k_codebook, a.v_codebook})
    each(v, [&](double) { return rng.normal() / std::sqrt(static_cast<double>(d.dim)); });
  each(a.sinks, [&](double) { return 3 * rng.normal(); });
  const auto rotation = [&](Rotation kind, const ConstView& v) {
    if (kind == Rotation::hadamard) put_signs(v, rng);
    if (kind == Rotation::dense)
      each(v, [&](double) { return rng.normal() / std::sqrt(static_cast<double>(d.dim)); });
  };
  rotation(d.k_rotation, a.k_table);
  rotation(d.v_rotation, a.v_table);
  const auto integers = [&](const ConstView& v, auto&& value) {
    if (!v) return;
    for (std::int64_t i = 0; i < v.shape.numel(); ++i) put(v, i, static_cast<double>(value(i)));
  };
  integers(a.block_table, [&](std::int64_t) { return d.pages > 0 ? rng.below(d.pages) : 0; });
  const std::int64_t rooms[] = {d.first, d.capacity, d.recent};
  integers(a.lengths, [&](std::int64_t i) {
    return rng.chance(8) ? 0 : rng.chance(3) ? rooms[i % 3] : rng.below(rooms[i % 3] + 1);
  });
  integers(a.starts, [&](std::int64_t i) {
    return rng.chance(3) ? 0 : rng.below(std::max<std::int64_t>(rooms[1 + i % 2], 1));
  });
}

}  // namespace bittern::oracle
