// When the descriptors of the KV codec are well formed, and what its tables must hold.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "bittern/aura_desc.h"
#include "bittern/ops/aura_append.h"
#include "bittern/ops/aura_attention.h"
#include "core/expect.h"
#include "core/guarded.h"

namespace bittern {

namespace {

Status bad_value(std::string_view op, std::string_view operand, std::int64_t i, float value,
                 const std::string& expected) {
  return fail(op, operand,
              "[" + std::to_string(i) + "] is " + number_text(static_cast<double>(value)) +
                  ", expected " + expected);
}

}  // namespace

Status check_aura_row(std::string_view op, std::string_view axis, std::int64_t dim,
                      std::int32_t bits, Rotation rotation) noexcept try {
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
} catch (...) {
  return caught(op);
}

Status check_aura_desc(std::string_view op, const AuraDesc& d) noexcept try {
  BITTERN_TRY(expect_at_least(op, "rows", d.rows, 0));
  BITTERN_TRY(check_aura_row(op, "dim", d.dim, d.bits, d.rotation));
  BITTERN_TRY(expect_countable(op, {d.rows, d.dim}));
  BITTERN_TRY(expect_between(op, "scale_rule", static_cast<std::int32_t>(d.scale_rule), 0, 3));
  if (d.element == DType::f32 || is_half(d.element)) return {};
  return unsupported(std::string(op).append(": element: ").append(name(d.element)) +
                     ", expected f32, f16 or bf16");
} catch (...) {
  return caught(op);
}

Status check_boundaries(std::string_view op, std::string_view operand, const float* values,
                        std::int64_t count) noexcept try {
  for (std::int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) return bad_value(op, operand, i, values[i], "a finite value");
    if (i > 0 && values[i] < values[i - 1]) {
      return bad_value(op, operand, i, values[i], "no less than the value before it");
    }
  }
  return {};
} catch (...) {
  return caught(op);
}

Status check_codebook(std::string_view op, std::string_view operand, const float* values,
                      std::int64_t count) noexcept try {
  for (std::int64_t i = 0; i < count; ++i)
    if (!std::isfinite(values[i])) return bad_value(op, operand, i, values[i], "a finite value");
  return {};
} catch (...) {
  return caught(op);
}

Status check_signs(std::string_view op, std::string_view operand, const float* values,
                   std::int64_t count) noexcept try {
  for (std::int64_t i = 0; i < count; ++i)
    if (values[i] != 1 && values[i] != -1) return bad_value(op, operand, i, values[i], "1 or -1");
  return {};
} catch (...) {
  return caught(op);
}

std::string width_hint(std::string_view operand, std::int64_t dim, std::int32_t bits,
                       const Shape& found) noexcept try {
  const bool packed = operand == "packed" || operand.ends_with("_packed");
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
} catch (...) {
  return {};  // a hint is not worth a failure
}

std::string rotation_hint(std::string_view operand, Rotation rotation, const Shape& found) noexcept
    try {
  if (operand != "table" && operand != "k_table" && operand != "v_table") return {};
  if (rotation == Rotation::hadamard && found.rank == 2)
    return "rotation hadamard takes signs; a matrix goes with rotation dense";
  if (rotation == Rotation::dense && found.rank == 1)
    return "rotation dense takes a matrix; signs go with rotation hadamard";
  return {};
} catch (...) {
  return {};  // a hint is not worth a failure
}

std::string AuraAttention::shape_hint(const Desc& d, std::string_view operand,
                                      const Shape& found) noexcept try {
  const bool rows = operand.ends_with("_packed") || operand.ends_with("_scales");
  const bool coded = rows && operand.substr(1, 1) == "_";
  const int paged = operand.ends_with("_packed") ? 4 : 3;
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
  const bool of_k = operand.starts_with("k_");
  if (operand.ends_with("_table"))
    return rotation_hint(operand, of_k ? d.k_rotation : d.v_rotation, found);
  return width_hint(operand, d.dim, of_k ? d.k_bits : d.v_bits, found);
} catch (...) {
  return {};  // a hint is not worth a failure
}

float AuraAttentionDesc::softmax_scale() const noexcept {
  return static_cast<float>(scale == 0 ? 1 / std::sqrt(static_cast<double>(dim)) : scale);
}

namespace {

// Of q, k and v, and of rows that are not coded.
Status expect_exact_dtypes(std::string_view op, DType element, DType exact) {
  for (const auto& [field, dtype] : {std::pair{"element", element}, {"exact", exact}}) {
    if (dtype == DType::f32 || is_half(dtype)) continue;
    return unsupported(std::string(op).append(": ").append(field).append(": ") + name(dtype) +
                       ", expected f32, f16 or bf16");
  }
  return {};
}

}  // namespace

Status AuraAttention::check(const Desc& d) noexcept try {
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
  BITTERN_TRY(expect_finite_f32(kName, "softcap", d.softcap));
  if (d.softcap != 0 && !(d.softcap >= 0x1p-126)) {
    return fail(kName, "softcap",
                number_text(d.softcap) + ", expected 0 or a positive normal number of f32");
  }
  return expect_exact_dtypes(kName, d.element, d.exact);
} catch (...) {
  return caught(kName);
}

Status AuraAttention::check_contents(const Desc& d, const Args& a) noexcept try {
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
} catch (...) {
  return caught(kName);
}

std::string AuraAppend::shape_hint(const Desc& d, std::string_view operand,
                                   const Shape& found) noexcept {
  const bool of_k = operand.starts_with("k_");
  if (operand.ends_with("_table"))
    return rotation_hint(operand, of_k ? d.k_rotation : d.v_rotation, found);
  return width_hint(operand, d.dim, of_k ? d.k_bits : d.v_bits, found);
}

Status AuraAppend::check(const Desc& d) noexcept try {
  constexpr std::int64_t kMostSlots = INT32_MAX;
  BITTERN_TRY(expect_between(kName, "tokens", d.tokens, 0, kMostSlots));
  BITTERN_TRY(expect_between(kName, "kv_heads", d.kv_heads, 1, 1 << 16));
  BITTERN_TRY(expect_between(kName, "k_bits", d.k_bits, 1, 8));
  BITTERN_TRY(expect_between(kName, "v_bits", d.v_bits, 1, 8));
  BITTERN_TRY(check_aura_row(kName, "dim", d.dim, d.k_bits, d.k_rotation));
  BITTERN_TRY(check_aura_row(kName, "dim", d.dim, d.v_bits, d.v_rotation));
  BITTERN_TRY(
      expect_between(kName, "k_scale_rule", static_cast<std::int32_t>(d.k_scale_rule), 0, 3));
  BITTERN_TRY(
      expect_between(kName, "v_scale_rule", static_cast<std::int32_t>(d.v_scale_rule), 0, 3));
  // Slots are 32-bit.
  BITTERN_TRY(expect_between(kName, "page_size", d.page_size, 1, kMostSlots));
  BITTERN_TRY(expect_between(kName, "pages", d.pages, 0, kMostSlots / d.page_size));
  BITTERN_TRY(expect_between(kName, "kept", d.kept, 0, kMostSlots));
  BITTERN_TRY(expect_between(kName, "sequences", d.sequences, 0,
                             kMostSlots / std::max<std::int64_t>(d.kept, 1)));
  BITTERN_TRY(expect_countable(kName, {d.tokens, d.kv_heads, kAuraMaxDim}));
  BITTERN_TRY(expect_countable(kName, {d.pages, d.kv_heads, d.page_size, kAuraMaxDim}));
  BITTERN_TRY(expect_countable(kName, {d.sequences, d.kv_heads, d.kept, kAuraMaxDim}));
  BITTERN_TRY(expect_between(kName, "rotary_dim", d.rotary_dim, 0, d.dim));
  if (d.rotary_dim % 2 != 0)
    return fail(kName, "rotary_dim", std::to_string(d.rotary_dim) + ", expected an even number");
  BITTERN_TRY(expect_finite_f32(kName, "factor", d.factor));
  return expect_exact_dtypes(kName, d.element, d.exact);
} catch (...) {
  return caught(kName);
}

Status AuraAppend::check_contents(const Desc& d, const Args& a) noexcept try {
  for (const bool of_k : {true, false}) {
    const std::int64_t levels = std::int64_t{1} << (of_k ? d.k_bits : d.v_bits);
    const std::string side = of_k ? "k_" : "v_";
    const ConstView &boundaries = of_k ? a.k_boundaries : a.v_boundaries,
                    &codebook = of_k ? a.k_codebook : a.v_codebook,
                    &table = of_k ? a.k_table : a.v_table, &mean = of_k ? a.k_mean : a.v_mean;
    BITTERN_TRY(check_boundaries(kName, side + "boundaries", boundaries.as<float>(), levels - 1));
    BITTERN_TRY(check_codebook(kName, side + "codebook", codebook.as<float>(), levels));
    if ((of_k ? d.k_rotation : d.v_rotation) == Rotation::hadamard)
      BITTERN_TRY(check_signs(kName, side + "table", table.as<float>(), d.dim));
    if (mean)
      BITTERN_TRY(check_codebook(kName, side + "mean", mean.as<float>(), d.kv_heads * d.dim));
  }
  const auto expect_slots = [&](const char* operand, const ConstView& slots, std::int64_t room) {
    std::vector<std::int32_t> taken;
    for (std::int64_t t = 0; slots && t < d.tokens; ++t) {
      const std::int32_t slot = slots.as<std::int32_t>()[t];
      if (slot >= room) {
        return fail(kName, operand,
                    "[" + std::to_string(t) + "] is " + std::to_string(slot) +
                        ", expected at most " + std::to_string(room - 1) +
                        ", or a negative number for none");
      }
      if (slot >= 0) taken.push_back(slot);
    }
    std::sort(taken.begin(), taken.end());
    const auto twice = std::adjacent_find(taken.begin(), taken.end());
    if (twice == taken.end()) return Status();
    return fail(kName, operand,
                std::to_string(*twice) + " of two tokens, expected a slot for each");
  };
  BITTERN_TRY(expect_slots("slots", a.slots, d.slots()));
  return expect_slots("kept_slots", a.kept_slots, d.sequences * d.kept);
} catch (...) {
  return caught(kName);
}

}  // namespace bittern
