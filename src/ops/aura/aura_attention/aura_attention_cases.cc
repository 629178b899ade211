#include <algorithm>

#include "core/numerics.h"
#include "ops/aura/aura.h"
#include "ops/aura/aura_attention/walk.h"
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
  // Soft caps that bend logits a little, a lot, and not at all.
  for (const double softcap : {0.25, 2.0, 50.0, 1e30}) {
    add({.queries = 2,
         .heads = 2,
         .dim = 16,
         .capacity = 20,
         .first = 3,
         .recent = 5,
         .softcap = softcap});
  }
  // Prompts: many rows together. Blocks that are not full, several splits, every kind of edge.
  for (const std::int64_t group : {1, 3, 5, 16, 17}) {
    add({.queries = 90 / group, .heads = group, .dim = 16, .first = 270});
    add({.queries = 99 / group,
         .heads = group,
         .dim = 40,
         .capacity = 30,
         .first = 40,
         .recent = 20});
  }
  for (const std::int64_t dim : {2, 7, 64, 72, 128, 200}) {
    add({.queries = 20,
         .heads = 2,
         .dim = dim,
         .capacity = dim % 3 == 2 ? 30 : 0,
         .first = 30,
         .recent = dim % 3 == 1 ? 20 : 0,
         .k_bits = dim == 128 ? 8 : 3,
         .v_bits = dim == 200 ? 6 : 4,
         .k_rotation = Rotation::identity,
         .v_rotation = Rotation::identity,
         .softcap = dim == 64 ? 5.0 : 0.0});
  }
  for (const std::int64_t window : {1, 7, 20, 290}) {
    for (const bool keeps : {false, true}) {
      add({.sequences = 2,
           .queries = 40,
           .heads = 2,
           .dim = 16,
           .capacity = 60,
           .first = 280,
           .recent = 30,
           .window = window,
           .window_keeps_first = keeps,
           .causal = window != 20});
    }
  }
  add({.queries = 270, .dim = 16, .first = 260});
  add({.queries = 40, .heads = 3, .kv_heads = 3, .dim = 16, .first = 260, .causal = false});
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
  // Plain caches of 9/3 heads of 64: a prompt, and a token after it.
  const AuraAttentionDesc plain{.queries = 4096,
                                .heads = 9,
                                .kv_heads = 3,
                                .dim = 64,
                                .first = 4096,
                                .k_rotation = Rotation::identity,
                                .v_rotation = Rotation::identity,
                                .exact = DType::f16};
  add("f16 cache prompt 4096, 9/3 heads of 64", plain);
  d = plain;
  d.softcap = 50;
  add("f16 cache prompt 4096, 9/3 heads of 64, softcap", d);
  d = plain;
  d.queries = 1;
  add("f16 cache token, 9/3 heads of 64", d);
  d.first = 1 << 18;  // beyond every cache
  add("f16 cache token of 262144, 9/3 heads of 64", d);
  // Of a GPU's size.
  const auto add_large = [&](std::string label, const AuraAttentionDesc& large) {
    add(std::move(label), large, Preference::fastest);
    cases.back().gpu_only = true;
  };
  d = {.heads = 32, .kv_heads = 4, .dim = 128, .capacity = 1 << 18};
  add_large("4/4 bit 262144 tokens, 32/4 heads", d);
  cases.push_back(cases.back());
  cases.back().label += ", exact";
  cases.back().preference = Preference::exact;
  d.k_bits = 8;
  add_large("8/4 bit 262144 tokens, 32/4 heads", d);
  d.k_bits = 3;
  d.v_bits = 2;
  add_large("3/2 bit 262144 tokens, 32/4 heads", d);
  d = {.heads = 15, .kv_heads = 5, .dim = 64, .capacity = 1 << 18};
  add_large("4/4 bit 262144 tokens, 15/5 heads of 64", d);
  d = {.heads = 16, .kv_heads = 2, .dim = 256, .capacity = 1 << 18};
  add_large("4/4 bit 262144 tokens, 16/2 heads of 256", d);
  d = {.heads = 8, .kv_heads = 1, .dim = 512, .capacity = 1 << 18};
  add_large("4/4 bit 262144 tokens, 8/1 heads of 512", d);
  d = {.queries = 4096, .heads = 32, .kv_heads = 8, .dim = 128, .capacity = 4096};
  d.element = DType::bf16;
  add_large("4/4 bit prompt of 4096 tokens, 32/8 heads", d);
  AuraAttentionDesc kept = d;
  kept.capacity = 3840;
  kept.recent = 256;
  add_large("the same, 256 of them in bf16", kept);
  for (const std::int64_t dim : {64, 80, 96, 192, 256}) {
    d.dim = dim;
    add_large("4/4 bit prompt of 4096 tokens, 32/8 heads of " + std::to_string(dim), d);
  }
  d = {.sequences = 64, .heads = 64, .kv_heads = 8, .dim = 128, .capacity = 4096};
  add_large("4/4 bit 64 sequences of 4096 tokens, 64/8 heads", d);
  d.page_size = 64;
  d.pages = d.sequences * d.capacity / d.page_size;
  add_large("the same in pages of 64", d);
  d.page_size = d.pages = 0;
  d.k_bits = 8;
  add_large("8/4 bit 64 sequences of 4096 tokens, 64/8 heads", d);
  d.k_bits = 3;
  d.v_bits = 2;
  add_large("3/2 bit 64 sequences of 4096 tokens, 64/8 heads", d);
  return cases;
}

// 4-bit keys of every length, codes of V of 4 bits and others, several splits.
std::vector<AuraAttentionDesc> aura_attention_bounded_cases(bool on_cuda) {
  std::vector<AuraAttentionDesc> cases;
  constexpr DType kElements[] = {DType::f32, DType::bf16, DType::f16};
  for (const std::int64_t dim : {2, 7, 33, 64, 128, 130, 256, 1024}) {
    for (const std::int64_t tokens : {1, 40, 300}) {
      AuraAttentionDesc d{.queries = 1 + tokens % 3, .heads = 2, .dim = dim, .capacity = tokens};
      d.recent = tokens == 40 ? 5 : 0;
      d.v_bits = cases.size() % 4 == 3 ? 3 : 4;
      d.softcap = cases.size() % 5 == 4 ? 1.5 : 0;
      if (hadamard_factor(dim) == 0) d.k_rotation = Rotation::identity;
      d.v_rotation = dim > 300 || cases.size() % 3 == 0 ? Rotation::identity : Rotation::dense;
      d.element = kElements[cases.size() % 3];
      d.exact = kElements[(cases.size() + 1) % 3];
      cases.push_back(d);
    }
  }
  // Decoding on tensor cores: every pair of widths, pages and none, heads that do not fill a tile,
  // edges of tiles, of splits and of windows.
  if (!on_cuda) return cases;
  constexpr std::pair<int, int> kWidths[] = {{2, 2}, {3, 2}, {3, 3}, {4, 2},
                                             {4, 3}, {4, 4}, {8, 4}, {8, 8}};
  std::int64_t n = 0;
  for (const auto& [k_bits, v_bits] : kWidths) {
    for (const std::int64_t page : {0, 16, 48, 128}) {
      AuraAttentionDesc d{.sequences = 1 + n % 3, .kv_heads = 1 + n % 2, .dim = 128};
      d.heads = d.kv_heads * (1 + n % 8);
      d.capacity = page == 0 ? 16 * (1 + n * n % 7) : page * (page < 100 ? 1 + n % 3 : 1);
      d.page_size = page;
      d.pages = page == 0 ? 0 : 7;
      d.first = n % 3 == 0 ? 3 : 0;
      d.recent = n % 8 == 1 ? 260 : n % 4 == 2 ? 5 : 0;
      d.k_bits = k_bits;
      d.v_bits = v_bits;
      d.k_rotation = static_cast<Rotation>((n + 1) % 3);
      d.v_rotation = n % 9 == 0 ? Rotation::dense : static_cast<Rotation>(n / 3 % 2);
      d.softcap = n % 7 == 6 ? 1.5 : 0;
      d.window = n % 5 == 4 ? 37 : 0;
      d.window_keeps_first = n % 2 == 0;
      d.element = kElements[n % 3];
      d.exact = kElements[(n + 1) % 3];
      d.f16_scale = n % 2 == 1;
      cases.push_back(d);
      ++n;
    }
  }
  cases.push_back({.heads = 2, .dim = 128, .capacity = 1552});  // several splits
  // The other head lengths.
  for (const std::int64_t dim : {64, 80, 96, 192, 256, 512}) {
    for (const auto& [k_bits, v_bits] : kWidths) {
      AuraAttentionDesc d{.heads = 1 + n % 8, .dim = dim, .capacity = 16 * (1 + n % 4)};
      d.page_size = n % 2 == 0 ? 0 : 16;
      d.pages = n % 2 == 0 ? 0 : 5;
      d.recent = n % 5 == 0 ? 3 : 0;
      d.k_bits = k_bits;
      d.v_bits = v_bits;
      d.v_rotation = n % 3 == 0 ? Rotation::identity : Rotation::hadamard;
      d.element = kElements[n % 3];
      d.f16_scale = n % 4 == 1;
      cases.push_back(d);
      ++n;
    }
  }
  // Prompts: all widths, rows and tokens on both sides of a block's and a tile's edges, more tiles
  // than are under way at once, rings, windows, and tokens that are not coded. Then all widths with
  // each of the other lengths of a row.
  for (n = 0; n < 60; ++n) {
    constexpr std::int64_t kDims[] = {64, 80, 96, 192, 256};
    constexpr std::int64_t kGroups[] = {1, 8, 3, 16, 5}, kRows[] = {6, 64, 130, 200};
    constexpr std::int64_t kPages[] = {0, 16, 0, 48, 128, 17};
    AuraAttentionDesc d{.sequences = 1 + n % 2, .kv_heads = 1 + n / 2 % 2};
    d.dim = n < 20 ? 128 : kDims[(n - 20) / 8];
    const std::int64_t group = kGroups[n % 5];
    d.queries = std::max<std::int64_t>(kRows[n % 4] / group, 2);
    d.heads = d.kv_heads * group;
    d.page_size = kPages[n % 6];
    d.capacity = d.page_size == 0 ? 1 + n * 37 % 400 : d.page_size * (1 + n % 5);
    d.pages = d.page_size == 0 ? 0 : 9;
    if (n % 11 == 10) d.capacity = d.page_size = d.pages = 0;
    d.first = n % 3 == 0 || d.capacity == 0 ? 1 + n * 5 % 80 : 0;
    d.recent = n % 4 == 1 ? 5 : n % 4 == 2 ? 70 : 0;
    d.k_bits = static_cast<std::int32_t>(1 + n % 8);
    d.v_bits = static_cast<std::int32_t>(1 + (n + n / 8) % 8);
    d.k_rotation = static_cast<Rotation>(n % 2);
    d.v_rotation = static_cast<Rotation>(n / 2 % 2);
    d.softcap = n % 7 == 6 ? 1.5 : 0;
    d.window = n % 5 == 4 ? 37 : n % 9 == 8 ? 100 : 0;
    d.window_keeps_first = n % 2 == 0;
    d.causal = n % 6 != 5;
    d.element = kElements[n % 3];
    d.exact = kElements[(n + 1) % 3];
    d.f16_scale = n % 2 == 1;
    cases.push_back(d);
  }
  return cases;
}

namespace {

// One query row in f64, and the terms of the bound that the header of the op states.
class AttentionBound {
 public:
  AttentionBound(const AuraAttentionDesc& d, const AuraAttention::Args& a, std::int64_t s,
                 std::int64_t query, std::int64_t h, const std::vector<double>& columns,
                 double bound)
      : d_(d), a_(a), s_(s), head_(h / d.group()), sequence_(d, a, s) {
    const auto dim = static_cast<std::size_t>(d.dim);
    std::vector<float> exact(dim);
    for (std::size_t j = 0; j < dim; ++j)
      exact[j] = static_cast<float>(see(get(a.q, ((s * d.queries + query) * d.heads + h) * d.dim +
                                                     static_cast<std::int64_t>(j)))) *
                 d.softmax_scale();
    for (const auto& [rotation, table] :
         {std::pair{d.k_rotation, &a.k_table}, {d.v_rotation, &a.v_table}})
      for (std::int64_t i = 0; rotation == Rotation::dense && i < d.dim * d.dim; ++i)
        see(get(*table, i));
    std::vector<float> rotated = exact;
    rotate_row(d.k_rotation, d.dim, a.k_table.as<float>(), false, rotated.data());
    double sum_r = 0, sum_a = 0, most_a = kLeast;
    for (const float a_j : exact) {
      sum_a += std::fabs(static_cast<double>(a_j));
      most_a = std::max(most_a, std::fabs(static_cast<double>(a_j)));
    }
    r_ = kLeast;
    for (const float r : rotated) {
      sum_r += std::fabs(static_cast<double>(r));
      r_ = std::max(r_, std::fabs(static_cast<double>(r)));
    }
    double b = 0;
    for (std::size_t j = 0; a.k_mean && j < dim; ++j)
      b +=
          static_cast<double>(exact[j]) *
          see(static_cast<double>(a.k_mean.as<float>()[static_cast<std::size_t>(head_) * dim + j]));
    const double k = std::max(largest(a.k_codebook), kLeast);
    const double y = std::max(largest(a.v_codebook), kLeast);
    const auto n = static_cast<double>(d.dim);
    limit(sum_r);
    limit(r_ * k * n);

    struct Token {
      double x, more, scale;  // logit; X beyond what all have; |v_scale|, 0 of an exact one
      std::vector<double> v, size;
      std::int64_t split;
    };
    std::vector<Token> tokens;
    std::int64_t splits = 0;
    for (const aura::Region region : {aura::kFirst, aura::kCoded, aura::kRecent}) {
      const aura::Span seen = sequence_.seen(d, query, region);
      std::int64_t last = -1;
      for (std::int64_t t = seen.begin; t < seen.end; ++t) {
        if (t / AuraAttentionDesc::kSplit != last) ++splits;
        last = t / AuraAttentionDesc::kSplit;
        const bool coded = region == aura::kCoded;
        const std::vector<float> key = row(region, t, false);
        double x = 0, sum_c = 0, most_c = kLeast;
        for (std::size_t j = 0; j < dim; ++j) {
          most_c = std::max(most_c, std::fabs(static_cast<double>(key[j])));
          x += static_cast<double>(coded ? rotated[j] : exact[j]) * static_cast<double>(key[j]);
          sum_c += std::fabs(static_cast<double>(key[j]));
        }
        const double k_scale = coded ? see(scale(t, false)) : 1;
        const double v_scale = coded ? see(scale(t, true)) : 1;
        double logit = coded ? x * k_scale + b : x;
        limit(std::fabs(logit));
        if (d.softcap != 0) logit = d.softcap * std::tanh(logit / d.softcap);
        const auto rounded = [&](double sum_q, double most_q, double most_k) {
          return most_k * sum_q / 2 + most_q * sum_c / 2 + (1.1 + n / 4096) * n * most_q * most_k;
        };
        const bool in_f16 = bound > kOfIntegers;
        if (!coded && in_f16) limit(most_a * most_c * n);
        Token token{.x = logit,
                    .more = coded    ? std::fabs(k_scale) * rounded(sum_r, r_, k)
                            : in_f16 ? rounded(sum_a, most_a, most_c)
                                     : 0,
                    .scale = coded ? std::fabs(v_scale) : 0,
                    .v = {},
                    .size = {},
                    .split = splits};
        std::vector<float> value = row(region, t, true);
        if (coded) rotate_row(d.v_rotation, d.dim, a.v_table.as<float>(), true, value.data());
        double lost = 0;
        for (std::size_t j = 0; !coded && in_f16 && j < dim; ++j)
          lost = std::max(lost, std::fabs(static_cast<double>(value[j])) / 4096);
        for (std::size_t j = 0; j < dim; ++j) {
          const double part = static_cast<double>(value[j]) * v_scale;
          const double mean =
              coded && a.v_mean
                  ? see(static_cast<double>(
                        a.v_mean.as<float>()[static_cast<std::size_t>(head_) * dim + j]))
                  : 0;
          token.v.push_back(part + mean);
          token.size.push_back(std::fabs(part) + std::fabs(mean) + lost);
          limit(std::fabs(static_cast<double>(value[j])));
        }
        limit(std::fabs(token.x));
        if (bound > kOfIntegers) limit(std::fabs(v_scale) * 0x1p27);
        tokens.push_back(std::move(token));
      }
    }
    if (a.sinks) {
      const double sink = see(static_cast<double>(a.sinks.as<float>()[h]));
      tokens.push_back({sink, 0, 0, std::vector<double>(dim), std::vector<double>(dim), 0});
    }
    units_.assign(dim, 0);
    if (tokens.empty()) return;
    double m = -std::numeric_limits<double>::infinity(), most = 0, l = 0, most_x = 0;
    for (const Token& t : tokens) {
      m = std::max(m, t.x);
      most = std::max(most, std::fabs(t.x));
    }
    limit(most);
    const double common = (1 + static_cast<double>(splits)) * (1 + most) / 32;
    std::vector<double> out(dim);
    for (const Token& t : tokens) {
      l += std::exp(t.x - m);
      most_x = std::max(most_x, common + t.more);
    }
    limit(most_x);
    for (const Token& t : tokens)
      for (std::size_t j = 0; j < dim; ++j) out[j] += std::exp(t.x - m) / l * t.v[j];
    const double grown = std::exp(2 * bound * most_x);
    limit(grown);
    const double few = static_cast<double>(splits) / 16;
    for (const Token& t : tokens) {
      const double weight = std::exp(t.x - m) / l;
      for (std::size_t j = 0; j < dim; ++j) {
        units_[j] += grown * weight * (common + t.more) * std::fabs(t.v[j] - out[j]) +
                     (1 + few) * weight * t.size[j];
        limit(t.size[j]);
      }
    }
    double from_values = 0x1p-100;
    for (std::int64_t split = 1; split <= splits; ++split) {
      double total = 0, z = 0, count = 0;
      for (const Token& t : tokens) {
        if (t.split != split || t.scale == 0) continue;
        const double mine = std::exp(t.x - m) / l * t.scale;
        total += mine;
        z = std::max(z, mine);
        ++count;
        limit(t.scale * std::max(y, 1.0) * count);
      }
      from_values += y * (few + (d.v_bits == 4 ? 16 : 2 + n / 256)) * total;
      if (d.v_bits == 4) from_values += y * count * (std::max(z / 2, total / 32) + 0x1p-85);
    }
    for (std::size_t j = 0; j < dim; ++j) {
      units_[j] += columns[j] * from_values;
      limit(units_[j]);
    }
  }

  double unit(std::int64_t j) const {
    return inf_   ? std::numeric_limits<double>::infinity()
           : nan_ ? std::nan("")
                  : units_[static_cast<std::size_t>(j)];
  }

 private:
  static constexpr double kLeast = 0x1p-126, kOfIntegers = 1.0 / 32512;

  // An input.
  double see(double x) {
    nan_ = nan_ || std::isnan(x);
    inf_ = inf_ || std::isinf(x);
    return x;
  }
  // A magnitude. Where it is too large, nothing is promised; so where it is a NaN, though no input
  // was one.
  void limit(double x) { inf_ = inf_ || x >= 0x1p127 || (std::isnan(x) && !nan_); }
  static double largest(const ConstView& v) {
    double most = 0;
    for (std::int64_t i = 0; i < v.shape.numel(); ++i) most = std::max(most, std::fabs(get(v, i)));
    return most;
  }
  std::vector<float> row(aura::Region region, std::int64_t t, bool of_v) {
    std::vector<float> values(static_cast<std::size_t>(d_.dim));
    const std::int64_t slot = sequence_.slot(region, t);
    if (region == aura::kCoded) {
      const ConstView& codes = of_v ? a_.v_packed : a_.k_packed;
      const std::int64_t bits = of_v ? d_.v_bits : d_.k_bits;
      const auto* codebook = (of_v ? a_.v_codebook : a_.k_codebook).as<float>();
      const auto* words =
          codes.as<std::uint32_t>() +
          aura::row_offset(d_, codes, a_.block_table, s_, head_, slot, packed_words(d_.dim, bits));
      for (std::int64_t j = 0; j < d_.dim; ++j)
        values[static_cast<std::size_t>(j)] = codebook[packed_code(words, j, bits)];
      return values;
    }
    const ConstView& exact = region == aura::kFirst ? (of_v ? a_.v_first : a_.k_first)
                                                    : (of_v ? a_.v_recent : a_.k_recent);
    const std::int64_t at = aura::exact_offset(d_, exact, s_, head_, slot);
    (void)visit<float, f16, bf16>(d_.exact, [&]<class E>(Type<E>) {
      for (std::int64_t j = 0; j < d_.dim; ++j)
        values[static_cast<std::size_t>(j)] = to_math(exact.as<E>()[at + j]);
      return Status();
    });
    for (const float v : values) see(static_cast<double>(v));
    return values;
  }
  double scale(std::int64_t t, bool of_v) const {
    const ConstView& scales = of_v ? a_.v_scales : a_.k_scales;
    const std::int64_t at =
        aura::row_offset(d_, scales, a_.block_table, s_, head_, sequence_.slot(aura::kCoded, t), 1);
    return static_cast<double>(d_.f16_scale ? to_f32(scales.as<f16>()[at])
                                            : scales.as<float>()[at]);
  }

  const AuraAttentionDesc& d_;
  const AuraAttention::Args& a_;
  std::int64_t s_, head_;
  aura::Sequence sequence_;
  double r_ = 0;
  bool nan_ = false, inf_ = false;
  std::vector<double> units_;
};

}  // namespace

void aura_attention_judge(const AuraAttentionDesc& d, const AuraAttention::Args& got,
                          const AuraAttention::Args& want, Judge& judge) {
  // sum_i |P_v|_ij
  std::vector<double> columns(static_cast<std::size_t>(d.dim), 1.0);
  for (std::int64_t j = 0; j < d.dim; ++j) {
    double& sum = columns[static_cast<std::size_t>(j)];
    if (d.v_rotation == Rotation::hadamard) sum = std::sqrt(static_cast<double>(d.dim));
    if (d.v_rotation != Rotation::dense) continue;
    sum = 0;
    for (std::int64_t i = 0; i < d.dim; ++i) sum += std::fabs(get(want.v_table, i * d.dim + j));
  }
  for (std::int64_t s = 0; s < d.sequences; ++s) {
    for (std::int64_t i = 0; i < d.queries; ++i) {
      for (std::int64_t h = 0; h < d.heads; ++h) {
        const AttentionBound row(d, want, s, i, h, columns, judge.bound());
        for (std::int64_t j = 0; j < d.dim; ++j)
          judge.value("out", as_const(got.out), as_const(want.out),
                      ((s * d.queries + i) * d.heads + h) * d.dim + j, row.unit(j));
      }
    }
  }
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
