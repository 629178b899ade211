// What makes the shared descriptors well formed.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "bittern/aura_desc.h"
#include "bittern/bittern.h"
#include "core/float_mode.h"

namespace bittern {
namespace {

Status fail(std::string_view op, std::string_view field, const std::string& what) {
  return invalid(std::string(op).append(": ").append(field).append(": ").append(what));
}

Status expect_at_least(std::string_view op, std::string_view field, std::int64_t value,
                       std::int64_t least) {
  if (value >= least) return {};
  return fail(op, field, std::to_string(value) + ", expected at least " + std::to_string(least));
}

Status expect_between(std::string_view op, std::string_view field, std::int64_t value,
                      std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return {};
  return fail(
      op, field,
      std::to_string(value) + ", expected " + std::to_string(least) + ".." + std::to_string(most));
}

// Views count bytes in int64, so no tensor may reach 2^63 / 8 elements.
// Strides of a tensor without elements are products of its other sizes, so a 0 excuses none.
Status expect_countable(std::string_view op, std::initializer_list<std::int64_t> sizes) {
  std::int64_t n = 1;
  for (const std::int64_t size : sizes) {
    if (size == 0) continue;
    if (n > (std::int64_t{1} << 59) / size) return fail(op, "sizes", "more than 2^59 elements");
    n *= size;
  }
  return {};
}

Status expect_float(std::string_view op, DType element, bool f32_scale) {
  const auto text = [&] { return std::string(op).append(": element: ").append(name(element)); };
  if (!is_float(element)) return unsupported(text() + ", expected f32, f64, f16 or bf16");
  if (f32_scale && element == DType::f64) return unsupported(text() + " with f32_scale");
  return {};
}

Status expect_no_f64(std::string_view op, DType element) {
  if (is_float(element) && element != DType::f64) return {};
  return unsupported(std::string(op).append(": element: ").append(name(element)) +
                     ", expected f32, f16 or bf16");
}

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

Status expect_finite_f32(std::string_view op, std::string_view field, double value) {
  const FloatMode mode;
  if (std::isfinite(static_cast<float>(value))) return {};
  return fail(op, field, number_text(value) + ", expected a number that is finite in f32");
}

Status expect_groups(std::string_view op, std::int64_t axis_size, std::int64_t group_size) {
  if (axis_size % group_size == 0) return {};
  return fail(op, "axis_size",
              std::to_string(axis_size) + ", expected a multiple of group_size " +
                  std::to_string(group_size));
}

}  // namespace

Shape QuantizeDesc::tensor_shape() const {
  if (inner_size == 1) return {outer_size, axis_size};
  return {outer_size, axis_size, inner_size};
}

Shape QuantizeDesc::param_shape() const {
  switch (granularity) {
    case Granularity::group: return {outer_size, num_groups()};
    case Granularity::token: return {outer_size};
    case Granularity::channel: return {axis_size};
    case Granularity::tensor: return {1};
  }
  return {};
}

GroupGeometry QuantizeDesc::geometry() const {
  GroupGeometry g{.rows = outer_size, .row_length = axis_size * inner_size};
  switch (granularity) {
    case Granularity::group:
      g.run = group_size;
      g.param_step = num_groups();
      break;
    case Granularity::token:
      g.run = g.row_length;
      g.param_step = 1;
      break;
    case Granularity::channel: g.run = inner_size; break;
    case Granularity::tensor: g.run = g.row_length; break;
  }
  if (g.run < 1) g.run = 1;                                // rows are empty
  if (g.row_length == 0 && g.param_step == 0) g.rows = 0;  // nor does their number matter
  g.params = param_shape().numel();
  return g;
}

Status check_quantize_desc(std::string_view op, const QuantizeDesc& d, QuantizeFields fields) {
  const auto granularity = static_cast<std::int32_t>(d.granularity);
  BITTERN_TRY(expect_between(op, "granularity", granularity, 0, 3));
  BITTERN_TRY(expect_at_least(op, "outer_size", d.outer_size, 0));
  BITTERN_TRY(expect_at_least(op, "axis_size", d.axis_size, 0));
  if (d.granularity == Granularity::channel) {
    BITTERN_TRY(expect_at_least(op, "inner_size", d.inner_size, 0));
  } else if (d.inner_size != 1) {
    return fail(op, "inner_size",
                std::to_string(d.inner_size) + " with granularity " +
                    std::string(kGranularityNames[static_cast<std::size_t>(granularity)]) +
                    ", which takes the last axis only: expected 1 (or granularity channel, which "
                    "takes any axis)");
  }
  if (d.granularity == Granularity::group) {
    BITTERN_TRY(expect_at_least(op, "group_size", d.group_size, 1));
    BITTERN_TRY(expect_groups(op, d.axis_size, d.group_size));
  }
  BITTERN_TRY(expect_countable(op, {d.outer_size, d.axis_size, d.inner_size}));
  BITTERN_TRY(expect_float(op, d.element, d.f32_scale));
  if (fields.code && d.code != DType::s8 && d.code != DType::u8) {
    return unsupported(std::string(op).append(": code: ").append(name(d.code)) +
                       ", expected s8 or u8");
  }
  if (fields.range) {
    BITTERN_TRY(expect_at_least(op, "q_max", d.q_max, d.q_min));
    if (fields.code) {
      const std::int32_t least = d.code == DType::s8 ? -128 : 0;
      BITTERN_TRY(expect_between(op, "q_min", d.q_min, least, least + 255));
      BITTERN_TRY(expect_between(op, "q_max", d.q_max, least, least + 255));
    }
  }
  return {};
}

Status DynamicQuantize::check(const Desc& d) {
  BITTERN_TRY(check_quantize_desc(kName, d, kFields));
  if (d.symmetric) return expect_at_least(kName, "q_max", d.q_max, 1);
  return expect_at_least(kName, "q_max", d.q_max, std::int64_t{d.q_min} + 1);
}

Status check_affine_desc(std::string_view op, const AffineDesc& d) {
  BITTERN_TRY(expect_at_least(op, "outer_size", d.outer_size, 0));
  BITTERN_TRY(expect_at_least(op, "axis_size", d.axis_size, 0));
  BITTERN_TRY(expect_between(op, "group_size", d.group_size, 2, 1024));
  BITTERN_TRY(expect_groups(op, d.axis_size, d.group_size));
  BITTERN_TRY(expect_countable(op, {d.outer_size, d.axis_size}));
  if (d.bits != 0) BITTERN_TRY(expect_between(op, "bits", d.bits, 1, 8));
  if (d.n_bins != 0) {
    const std::int32_t most = d.bits != 0 ? 1 << d.bits : 256;
    BITTERN_TRY(expect_between(op, "n_bins", d.n_bins, 2, most));
  }
  BITTERN_TRY(expect_between(op, "storage", static_cast<std::int32_t>(d.storage), 0, 1));
  BITTERN_TRY(expect_between(op, "method", static_cast<std::int32_t>(d.method), 0, 2));
  BITTERN_TRY(expect_between(op, "rounding", static_cast<std::int32_t>(d.rounding), 0, 1));
  return expect_float(op, d.element, d.f32_scale);
}

Status check_pack_desc(std::string_view op, const PackDesc& d) {
  BITTERN_TRY(expect_at_least(op, "outer_size", d.outer_size, 0));
  BITTERN_TRY(expect_at_least(op, "axis_size", d.axis_size, 0));
  BITTERN_TRY(expect_between(op, "bits", d.bits, 1, 8));
  return expect_countable(op, {d.outer_size, d.axis_size});
}

Status check_gguf_desc(std::string_view op, const GgufDesc& d) {
  const auto types = static_cast<std::int64_t>(std::size(kBlockTypeNames));
  BITTERN_TRY(expect_between(op, "type", static_cast<std::int64_t>(d.type), 0, types - 1));
  BITTERN_TRY(expect_at_least(op, "outer_size", d.outer_size, 0));
  BITTERN_TRY(expect_at_least(op, "axis_size", d.axis_size, 0));
  const std::int32_t block = block_size(d.type).weights;
  if (d.axis_size % block != 0) {
    return fail(op, "axis_size",
                std::to_string(d.axis_size) + ", expected a multiple of " + std::to_string(block) +
                    ", the block of " +
                    std::string(kBlockTypeNames[static_cast<std::size_t>(d.type)]));
  }
  BITTERN_TRY(expect_countable(op, {d.outer_size, d.axis_size}));
  return expect_no_f64(op, d.element);
}

Status GgufQuantize::check(const Desc& d) {
  BITTERN_TRY(check_gguf_desc(kName, d));
  const auto type = std::string(kBlockTypeNames[static_cast<std::size_t>(d.type)]);
  if (d.type >= BlockType::iq4_nl) {
    return unsupported(std::string(kName).append(": type: ") + type +
                       ", expected Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K or Q6_K");
  }
  if (d.given_grid && d.type != BlockType::q4_k && d.type != BlockType::q5_k) {
    return fail(kName, "given_grid",
                "true with type " + type + ", expected type Q4_K or Q5_K (or given_grid false)");
  }
  return {};
}

Status check_gdn_desc(std::string_view op, const GdnDesc& d) {
  BITTERN_TRY(expect_at_least(op, "batch", d.batch, 0));
  BITTERN_TRY(expect_at_least(op, "tokens", d.tokens, 0));
  BITTERN_TRY(expect_at_least(op, "key_heads", d.key_heads, 1));
  BITTERN_TRY(expect_at_least(op, "value_heads", d.value_heads, 1));
  if (d.value_heads % d.key_heads != 0) {
    return fail(op, "value_heads",
                std::to_string(d.value_heads) + ", expected a multiple of key_heads " +
                    std::to_string(d.key_heads));
  }
  BITTERN_TRY(expect_between(op, "key_dim", d.key_dim, 1, 256));
  BITTERN_TRY(expect_between(op, "value_dim", d.value_dim, 1, 256));
  if (d.chunk != 16 && d.chunk != 32 && d.chunk != 64) {
    return fail(op, "chunk", std::to_string(d.chunk) + ", expected 16, 32 or 64");
  }
  BITTERN_TRY(expect_between(op, "n_sequences", d.n_sequences, 0, std::int64_t{1} << 31));
  if (d.n_sequences > 0 && d.batch != 1) {
    return fail(op, "batch", std::to_string(d.batch) + ", expected 1 with n_sequences");
  }
  if (d.n_sequences > 0) BITTERN_TRY(expect_between(op, "tokens", d.tokens, 0, INT32_MAX));
  BITTERN_TRY(expect_countable(op, {d.batch, d.tokens, d.value_heads, 256}));
  BITTERN_TRY(expect_countable(op, {d.sequences(), d.value_heads, d.key_dim, d.value_dim}));
  BITTERN_TRY(
      expect_countable(op, {d.batch, d.state_chunks(), d.value_heads, d.key_dim, d.value_dim}));
  BITTERN_TRY(expect_no_f64(op, d.element));
  if (d.a_element != DType::f32 && d.a_element != DType::bf16) {
    return unsupported(std::string(op).append(": a_element: ").append(name(d.a_element)) +
                       ", expected f32 or bf16");
  }
  BITTERN_TRY(expect_between(op, "head_map", static_cast<std::int32_t>(d.head_map), 0, 1));
  BITTERN_TRY(expect_between(op, "state_layout", static_cast<std::int32_t>(d.state_layout), 0, 1));
  if (d.allow_neg_eigval && !d.beta_sigmoid) {
    return fail(op, "allow_neg_eigval", "true, expected false without beta_sigmoid");
  }
  return expect_finite_f32(op, "scale", d.scale);
}

Status check_causal_conv_desc(std::string_view op, const CausalConvDesc& d) {
  BITTERN_TRY(check_gdn_desc(op, d.rows()));
  BITTERN_TRY(expect_at_least(op, "channels", d.channels, 0));
  BITTERN_TRY(expect_between(op, "width", d.width, 2, 4));
  BITTERN_TRY(expect_no_f64(op, d.element));
  BITTERN_TRY(expect_countable(op, {d.batch, d.tokens, d.channels, 8}));
  // What the backward keeps of every block.
  return expect_countable(op, {std::max(d.sequences(), d.blocks()), d.channels, 8});
}

Status check_gated_norm_desc(std::string_view op, const GatedNormDesc& d) {
  const FloatMode mode;
  BITTERN_TRY(expect_at_least(op, "rows", d.rows, 0));
  BITTERN_TRY(expect_between(op, "dim", d.dim, 1, 1 << 20));
  BITTERN_TRY(expect_no_f64(op, d.element));
  BITTERN_TRY(expect_between(op, "rounding", static_cast<std::int32_t>(d.rounding), 0, 1));
  if (!(d.eps >= 0) || !std::isfinite(static_cast<float>(d.eps))) {
    return fail(op, "eps",
                number_text(d.eps) +
                    ", expected a number that is finite in f32 and at "
                    "least 0");
  }
  return expect_countable(op, {d.rows, d.dim});
}

Status GdnRecurrentStep::check(const Desc& d) {
  BITTERN_TRY(check_gdn_desc(kName, d.heads()));
  BITTERN_TRY(expect_between(kName, "pool", d.pool, 0, INT32_MAX));
  BITTERN_TRY(expect_countable(kName, {d.states(), d.value_heads, d.key_dim, d.value_dim}));
  return expect_countable(kName, {d.batch, d.tokens, d.value_heads, d.key_dim, d.value_dim});
}

Status GdnRecurrentStep::check_contents(const Desc& d, const Args& a) {
  if (d.pool == 0) return {};
  const std::int32_t* index = a.state_index.as<std::int32_t>();
  const auto wrong = [&](std::int64_t s, const std::string& expected) {
    return fail(
        kName, "state_index",
        "[" + std::to_string(s) + "] is " + std::to_string(index[s]) + ", expected " + expected);
  };
  // Sorted by state, not a table of the pool: that may be far larger than the batch.
  std::vector<std::pair<std::int32_t, std::int64_t>> users;
  users.reserve(static_cast<std::size_t>(d.batch));
  for (std::int64_t s = 0; s < d.batch; ++s) {
    if (index[s] == -1) continue;
    if (index[s] < 0 || index[s] >= d.pool) {
      return wrong(s, "0.." + std::to_string(d.pool - 1) + ", or -1 to skip the sequence");
    }
    users.emplace_back(index[s], s);
  }
  std::sort(users.begin(), users.end());
  const auto twice = std::adjacent_find(
      users.begin(), users.end(), [](const auto& x, const auto& y) { return x.first == y.first; });
  if (twice == users.end()) return {};
  return wrong(std::next(twice)->second,
               "a state other than that of [" + std::to_string(twice->second) + "]");
}

Status check_gdn_sequences(std::string_view op, const GdnDesc& d, const ConstView& cu_seqlens) {
  if (d.n_sequences == 0) return {};
  const std::int32_t* at = cu_seqlens.as<std::int32_t>();
  const auto wrong = [&](std::int64_t i, const std::string& expected) {
    return fail(
        op, "cu_seqlens",
        "[" + std::to_string(i) + "] is " + std::to_string(at[i]) + ", expected " + expected);
  };
  if (at[0] != 0) return wrong(0, "0");
  for (std::int64_t i = 1; i <= d.n_sequences; ++i) {
    if (at[i] < at[i - 1]) {
      return wrong(i, "at least [" + std::to_string(i - 1) + "], " + std::to_string(at[i - 1]));
    }
  }
  if (at[d.n_sequences] != d.tokens) {
    return wrong(d.n_sequences, "tokens, " + std::to_string(d.tokens));
  }
  return {};
}

Status check_aura_row(std::string_view op, std::string_view axis, std::int64_t dim,
                      std::int32_t bits, Rotation rotation) {
  BITTERN_TRY(expect_between(op, axis, dim, kAuraMinDim, kAuraMaxDim));
  BITTERN_TRY(expect_between(op, "bits", bits, 1, 8));
  BITTERN_TRY(expect_between(op, "rotation", static_cast<std::int32_t>(rotation), 0, 2));
  if (rotation == Rotation::hadamard && hadamard_factor(dim) == 0) {
    std::string factors;
    for (const std::int64_t m : kHadamardFactors) factors.append(" ").append(std::to_string(m));
    return fail(op, axis,
                std::to_string(dim) +
                    " with rotation hadamard, expected a power of two times one of" + factors);
  }
  return {};
}

Status check_aura_desc(std::string_view op, const AuraDesc& d) {
  BITTERN_TRY(expect_at_least(op, "outer_size", d.outer_size, 0));
  BITTERN_TRY(check_aura_row(op, "axis_size", d.axis_size, d.bits, d.rotation));
  BITTERN_TRY(expect_countable(op, {d.outer_size, d.axis_size}));
  BITTERN_TRY(expect_between(op, "scale_rule", static_cast<std::int32_t>(d.scale_rule), 0, 3));
  if (d.element == DType::f32 || is_half(d.element)) return {};
  return unsupported(std::string(op).append(": element: ").append(name(d.element)) +
                     ", expected f32, f16 or bf16");
}

namespace {

Status bad_value(std::string_view op, std::string_view operand, std::int64_t i, float value,
                 const std::string& expected) {
  return fail(op, operand,
              "[" + std::to_string(i) + "] is " + number_text(static_cast<double>(value)) +
                  ", expected " + expected);
}

}  // namespace

Status check_boundaries(std::string_view op, std::string_view operand, const float* values,
                        std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) return bad_value(op, operand, i, values[i], "a finite value");
    if (i > 0 && values[i] < values[i - 1]) {
      return bad_value(op, operand, i, values[i], "no less than the value before it");
    }
  }
  return {};
}

Status check_codebook(std::string_view op, std::string_view operand, const float* values,
                      std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i)
    if (!std::isfinite(values[i])) return bad_value(op, operand, i, values[i], "a finite value");
  return {};
}

Status check_signs(std::string_view op, std::string_view operand, const float* values,
                   std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i)
    if (values[i] != 1 && values[i] != -1) return bad_value(op, operand, i, values[i], "1 or -1");
  return {};
}

std::string width_hint(std::string_view operand, std::int64_t dim, std::int32_t bits,
                       const Shape& found) {
  const bool packed = operand == "packed" || operand.ends_with("_codes");
  const bool boundaries = operand == "boundaries";
  if ((!packed && !boundaries && !operand.ends_with("codebook")) || found.rank == 0) return {};
  const auto length = [&](std::int32_t width) {
    return packed ? packed_words(dim, width) : (std::int64_t{1} << width) - (boundaries ? 1 : 0);
  };
  const std::int64_t got = found[found.rank - 1];
  if (got == length(bits)) return {};
  const std::string_view unit = packed ? " words a row" : boundaries ? " boundaries" : " levels";
  std::string text = std::to_string(bits) + "-bit codes have " + std::to_string(length(bits));
  text.append(unit);
  for (std::int32_t width = 1; width <= 8; ++width) {
    if (length(width) != got) continue;
    return text + ", and " + std::to_string(got) + " are of " + std::to_string(width) + " bits";
  }
  return text;
}

std::string AuraAttention::shape_hint(const Desc& d, std::string_view operand, const Shape& found) {
  const bool rows = operand.ends_with("_codes") || operand.ends_with("_scales");
  const bool coded = rows && operand.substr(1, 1) == "_";
  const int paged = operand.ends_with("_codes") ? 4 : 3;
  if (operand == "block_table" || (coded && found.rank == paged)) {
    if (d.page_size == 0) return "pages need page_size (16..128), pages and capacity";
    if (operand == "block_table" && d.capacity == 0) {
      return "capacity is 0; it is page_size " + std::to_string(d.page_size) +
             " times the columns of block_table";
    }
  }
  if (coded && found.rank == paged - 1 && d.page_size != 0)
    return "page_size is " + std::to_string(d.page_size) + "; without pages it is 0";
  if (coded && d.page_size == 0 && d.capacity == 0 && found.rank == paged - 1)
    return "capacity is 0; it is the coded tokens of a sequence";
  return width_hint(operand, d.dim, operand.starts_with("k_") ? d.k_bits : d.v_bits, found);
}

float AuraAttentionDesc::softmax_scale() const {
  return static_cast<float>(scale == 0 ? 1 / std::sqrt(static_cast<double>(dim)) : scale);
}

Status AuraAttention::check(const Desc& d) {
  BITTERN_TRY(expect_at_least(kName, "sequences", d.sequences, 0));
  BITTERN_TRY(expect_at_least(kName, "queries", d.queries, 0));
  BITTERN_TRY(expect_between(kName, "heads", d.heads, 1, 1 << 16));
  BITTERN_TRY(expect_between(kName, "kv_heads", d.kv_heads, 1, 1 << 16));
  if (d.heads % d.kv_heads != 0) {
    return fail(kName, "heads",
                std::to_string(d.heads) + ", expected a multiple of kv_heads " +
                    std::to_string(d.kv_heads));
  }
  BITTERN_TRY(expect_between(kName, "k_bits", d.k_bits, 1, 8));
  BITTERN_TRY(expect_between(kName, "v_bits", d.v_bits, 1, 8));
  BITTERN_TRY(check_aura_row(kName, "dim", d.dim, d.k_bits, d.k_rotation));
  BITTERN_TRY(check_aura_row(kName, "dim", d.dim, d.v_bits, d.v_rotation));
  // Lengths are 32-bit, and so is their sum.
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 29;
  BITTERN_TRY(expect_between(kName, "capacity", d.capacity, 0, kMostTokens));
  BITTERN_TRY(expect_between(kName, "first", d.first, 0, kMostTokens));
  BITTERN_TRY(expect_between(kName, "recent", d.recent, 0, kMostTokens));
  BITTERN_TRY(expect_between(kName, "window", d.window, 0, std::int64_t{1} << 31));
  BITTERN_TRY(expect_between(kName, "queries", d.queries, 0, std::int64_t{1} << 31));
  if (d.page_size == 0) {
    if (d.pages != 0) {
      return fail(kName, "pages",
                  std::to_string(d.pages) +
                      " with page_size 0, expected a page_size of 16..128, or "
                      "0 pages for codes that are contiguous");
    }
  } else {
    BITTERN_TRY(expect_between(kName, "page_size", d.page_size, 16, 128));
    BITTERN_TRY(expect_between(kName, "pages", d.pages, 0, INT32_MAX));
    if (d.capacity % d.page_size != 0) {
      return fail(kName, "capacity",
                  std::to_string(d.capacity) + ", expected a multiple of page_size " +
                      std::to_string(d.page_size));
    }
  }
  constexpr std::int64_t kRecord = 16384;  // no row's share of the workspace is larger
  BITTERN_TRY(expect_countable(kName, {d.sequences, d.queries, d.heads, kRecord}));
  for (const std::int64_t tokens : {d.capacity, d.first, d.recent})
    BITTERN_TRY(expect_countable(kName, {8, d.sequences, d.kv_heads, tokens, kAuraMaxDim}));
  BITTERN_TRY(expect_countable(kName, {d.pages, d.kv_heads, d.page_size, kAuraMaxDim}));
  BITTERN_TRY(expect_finite_f32(kName, "scale", d.scale));
  for (const auto& [field, dtype] : {std::pair{"element", d.element}, {"exact", d.exact}}) {
    if (dtype == DType::f32 || is_half(dtype)) continue;
    return unsupported(std::string(kName).append(": ").append(field).append(": ") + name(dtype) +
                       ", expected f32, f16 or bf16");
  }
  return {};
}

Status AuraAttention::check_contents(const Desc& d, const Args& a) {
  BITTERN_TRY(check_codebook(kName, "k_codebook", a.k_codebook.as<float>(), 1 << d.k_bits));
  BITTERN_TRY(check_codebook(kName, "v_codebook", a.v_codebook.as<float>(), 1 << d.v_bits));
  if (d.k_rotation == Rotation::hadamard)
    BITTERN_TRY(check_signs(kName, "k_table", a.k_table.as<float>(), d.dim));
  if (d.v_rotation == Rotation::hadamard)
    BITTERN_TRY(check_signs(kName, "v_table", a.v_table.as<float>(), d.dim));
  const std::int64_t rooms[] = {d.first, d.capacity, d.recent};
  constexpr std::string_view kRooms[] = {", which is first", ", which is capacity",
                                         ", which is recent"};
  const auto entry = [&](const char* operand, std::int64_t s, std::int64_t i, std::int64_t value,
                         std::int64_t most, std::string_view why = {}) {
    if (value >= 0 && value <= most) return Status();
    return fail(kName, operand,
                "[" + std::to_string(s) + "," + std::to_string(i) + "] is " +
                    std::to_string(value) + ", expected 0.." + std::to_string(most) +
                    std::string(why));
  };
  for (std::int64_t s = 0; s < d.sequences; ++s) {
    for (std::int64_t i = 0; a.lengths && i < 3; ++i)
      BITTERN_TRY(
          entry("lengths", s, i, a.lengths.as<std::int32_t>()[3 * s + i], rooms[i], kRooms[i]));
    for (std::int64_t i = 0; a.starts && i < 2; ++i) {
      BITTERN_TRY(entry("starts", s, i, a.starts.as<std::int32_t>()[2 * s + i],
                        std::max<std::int64_t>(rooms[1 + i], 1) - 1));
    }
    if (d.page_size == 0) continue;
    // Only pages that hold a token are looked up.
    const std::int64_t coded = a.lengths ? a.lengths.as<std::int32_t>()[3 * s + 1] : d.capacity;
    const std::int64_t start = a.starts ? a.starts.as<std::int32_t>()[2 * s] : 0;
    const std::int64_t pages = d.capacity / d.page_size;
    if (coded > 0 && d.pages == 0) {
      return fail(kName, "pages",
                  "0, expected at least 1: sequence " + std::to_string(s) + " has " +
                      std::to_string(coded) + " coded tokens");
    }
    const std::int64_t first = start / d.page_size;
    const std::int64_t count =
        std::min(pages, (start % d.page_size + coded + d.page_size - 1) / d.page_size);
    for (std::int64_t n = 0; n < (coded > 0 ? count : 0); ++n) {
      const std::int64_t i = (first + n) % pages;
      BITTERN_TRY(entry("block_table", s, i,
                        a.block_table.as<std::int32_t>()[s * a.block_table.row_stride() + i],
                        d.pages - 1));
    }
  }
  return {};
}

}  // namespace bittern
