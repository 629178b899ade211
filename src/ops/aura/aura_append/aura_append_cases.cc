#include <algorithm>
#include <numeric>

#include "ops/aura/aura_aims.h"
#include "ops/aura/aura_append/sides.h"
#include "oracle/oracle.h"

namespace bittern::oracle {

using Desc = AuraAppendDesc;

std::vector<Desc> aura_append_check_cases() {
  std::vector<Desc> cases;
  constexpr DType kElements[] = {DType::f32, DType::bf16, DType::f16};
  const auto add = [&](Desc d) {
    const auto n = static_cast<std::int32_t>(cases.size());
    d.element = kElements[n % 3];
    d.exact = kElements[(n / 3 + 1) % 3];
    d.f16_scale = n % 4 == 1;
    d.k_bits = 1 + n % 8;
    d.v_bits = 1 + (n + n / 8 + 3) % 8;
    d.k_scale_rule = static_cast<ScaleRule>(n % 4);
    d.v_scale_rule = static_cast<ScaleRule>(n / 2 % 4);
    cases.push_back(d);
  };
  // Lengths with every kind of tail, each with a rotation that fits it; RoPE of all, of some and of
  // no elements; rows kept or not.
  for (const std::int64_t dim : {2, 7, 8, 16, 33, 64, 72, 80, 96, 128, 129, 192, 256, 515, 1024}) {
    for (const std::int64_t kept : {0, 4}) {
      const bool odd = dim % 2 != 0;
      const auto even = hadamard_factor(dim) != 0 ? Rotation::hadamard : Rotation::identity;
      add({.tokens = 5,
           .kv_heads = dim > 200 ? 1 : 3,
           .dim = dim,
           .page_size = 4,
           .pages = 3,
           .kept = kept,
           .rotary_dim = kept == 0 ? dim - (odd ? 1 : 0) : dim / 4 * 2,
           .factor = kept == 0 ? 1 : 1.25,
           .interleaved = dim % 3 == 0,
           .k_rotation = dim == 80 || dim == 33 ? Rotation::dense : even,
           .v_rotation = dim == 16 || dim == 129 ? Rotation::dense : Rotation::identity});
    }
  }
  // The lengths that have kernels of their own at every width.
  for (const std::int64_t dim : {64, 128, 256}) {
    for (std::int32_t bits = 1; bits <= 8; ++bits) {
      add({.tokens = 3,
           .kv_heads = 2,
           .dim = dim,
           .page_size = 4,
           .pages = 2,
           .kept = bits % 3,
           .rotary_dim = bits % 4 * (dim / 4),
           .interleaved = bits % 2 == 0,
           .k_rotation = Rotation::hadamard,
           .v_rotation = bits % 4 == 3 ? Rotation::identity : Rotation::hadamard});
      cases.back().k_bits = bits;
      cases.back().v_bits = 9 - bits;
    }
  }
  // The decoding of a layer; a prompt, of more rows than are staged at once; several sequences.
  add({.tokens = 1, .kv_heads = 8, .pages = 2, .kept = 16, .rotary_dim = 128});
  add({.tokens = 1, .kv_heads = 2, .pages = 1});
  add({.tokens = 90, .kv_heads = 2, .dim = 64, .page_size = 16, .pages = 7, .kept = 20});
  add({.tokens = 70, .kv_heads = 4, .dim = 128, .page_size = 100, .pages = 1, .rotary_dim = 64});
  add({.tokens = 6, .kv_heads = 2, .page_size = 9, .pages = 4, .sequences = 3, .kept = 5});
  // Nothing to do, or no place for one of the two.
  add({.tokens = 0, .pages = 2, .kept = 2});
  add({.tokens = 3, .dim = 32, .kept = 3});
  add({.tokens = 3, .dim = 32, .pages = 1, .sequences = 0, .kept = 3});
  return cases;
}

namespace {

// The tables of both sides, and slots in order.
void fill_bench(const Desc& d, std::string_view operand, const ConstView& v, Rng& rng) {
  const bool of_k = operand.starts_with("k_");
  const AuraDesc coding = append::coding(d, of_k ? d.k_bits : d.v_bits,
                                         of_k ? d.k_rotation : d.v_rotation, ScaleRule::matched);
  if (operand.starts_with("k_") || operand.starts_with("v_"))
    if (operand.ends_with("table") || operand.ends_with("codebook") ||
        operand.ends_with("boundaries"))
      fill_aura(coding, operand.substr(2), v, rng);
  const auto integers = [&](auto&& value) {
    for (std::int64_t i = 0; i < d.tokens; ++i) put(v, i, static_cast<double>(value(i)));
  };
  if (operand == "slots") integers([](std::int64_t i) { return i; });
  if (operand == "positions") integers([](std::int64_t i) { return 100000 + i; });
  if (operand == "kept_slots")
    integers([&](std::int64_t i) { return i < d.sequences * d.kept ? i : -1; });
}

}  // namespace

std::vector<BenchCase<Desc>> aura_append_bench_cases() {
  std::vector<BenchCase<Desc>> cases;
  const auto add = [&](std::string label, const Desc& d, bool gpu_only = false) {
    cases.push_back(
        {std::move(label), d, fill_bench, "k_mean v_mean", Preference::exact, gpu_only});
  };
  Desc token{.tokens = 1,
             .kv_heads = 8,
             .dim = 128,
             .page_size = 64,
             .pages = 1,
             .rotary_dim = 128,
             .element = DType::bf16};
  add("a token, 8 heads of 128, 4/4 bit, rope", token);
  token.kept = 64;
  add("the same, 64 tokens kept", token);
  Desc prompt = token;
  prompt.kept = 0;
  prompt.tokens = 4096;
  prompt.pages = 64;
  add("a prompt of 4096", prompt);
  prompt.rotary_dim = 0;
  add("the same without rope", prompt);
  Desc many = token;
  many.kept = 0;
  many.tokens = 256;
  many.pages = 4;
  add("a token of 256 sequences", many, true);
  return cases;
}

void aura_append_aim(const Desc& d, const AuraAppend::Args& a, Rng& rng) {
  // Distinct slots below `room`, some of them none.
  const auto aim_slots = [&](const ConstView& v, std::int64_t room) {
    if (!v) return;
    std::vector<std::int64_t> all(static_cast<std::size_t>(room));
    std::iota(all.begin(), all.end(), 0);
    for (std::size_t i = all.size(); i > 1; --i)
      std::swap(all[i - 1], all[static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(i)))]);
    for (std::int64_t t = 0; t < d.tokens; ++t) {
      const bool none = all.empty() || rng.chance(4);
      put(v, t, none ? -1.0 - static_cast<double>(rng.below(3)) : static_cast<double>(all.back()));
      if (!none) all.pop_back();
    }
  };
  aim_slots(a.slots, d.slots());
  aim_slots(a.kept_slots, d.sequences * d.kept);
  for (const append::Side& side : {append::k_side(d, a), append::v_side(d, a)}) {
    const ConstView &table = side.is_k ? a.k_table : a.v_table,
                    &boundaries = side.is_k ? a.k_boundaries : a.v_boundaries,
                    &codebook = side.is_k ? a.k_codebook : a.v_codebook,
                    &mean = side.is_k ? a.k_mean : a.v_mean;
    if (side.coding.rotation != Rotation::identity) fill_aura(side.coding, "table", table, rng);
    fill_aura(side.coding, "boundaries", boundaries, rng);
    fill_aura(side.coding, "codebook", codebook, rng);
    for (const ConstView& rows : {side.x, as_const(side.kept)}) {
      if (!rows || rows.shape.numel() == 0) continue;
      aim_rows(rows, rng);
      for (std::int64_t i = 0; i < rows.shape.numel() / d.dim; ++i)
        if (rng.chance(3))
          aim_at_boundaries(side.coding, side.table, side.boundaries, rows, i, rng);
    }
    // Means that matter, that do not, and that overflow with rows of their size.
    const double size = rng.chance(3) ? 3.4e38 : rng.chance(2) ? 1 : 0;
    for (std::int64_t i = 0; mean && i < mean.shape.numel(); ++i)
      put(mean, i, size > 1 ? (rng.chance(2) ? size : -size) : size * rng.normal());
  }
  for (std::int64_t t = 0; a.positions && t < d.tokens; ++t)
    put(a.positions, t, static_cast<double>(rng.below(1 << 20)) - 1000);
  for (std::int64_t i = 0; a.inverse_frequencies && i < d.rotary_dim / 2; ++i) {
    const auto down = static_cast<int>(rng.below(15));
    put(a.inverse_frequencies, i, std::ldexp(1 + rng.uniform(), -down));
  }
}

}  // namespace bittern::oracle
