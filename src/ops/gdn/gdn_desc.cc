// When the descriptors of the gated delta rule are well formed.
#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "bittern/gdn_desc.h"
#include "bittern/ops/gdn_decode_step.h"
#include "core/expect.h"
#include "core/guarded.h"

namespace bittern {

Status check_gdn_desc(std::string_view op, const GdnDesc& d) noexcept try {
  BITTERN_TRY(check_sequences(op, d.rows()));
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
  BITTERN_TRY(expect_countable(op, {d.batch, d.tokens, d.value_heads, 256}));
  BITTERN_TRY(expect_countable(op, {d.sequence_count(), d.value_heads, d.key_dim, d.value_dim}));
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
} catch (...) {
  return caught(op);
}

Status check_gdn_step_desc(std::string_view op, const GdnStepDesc& d) noexcept try {
  BITTERN_TRY(check_gdn_desc(op, d.heads()));
  BITTERN_TRY(expect_between(op, "pool", d.pool, 0, INT32_MAX));
  BITTERN_TRY(expect_countable(op, {d.states(), d.value_heads, d.key_dim, d.value_dim}));
  return expect_countable(op, {d.batch, d.tokens, d.value_heads, d.key_dim, d.value_dim});
} catch (...) {
  return caught(op);
}

Status check_state_index(std::string_view op, const GdnStepDesc& d, const ConstView& view) noexcept
    try {
  if (d.pool == 0) return {};
  const std::int32_t* index = view.as<std::int32_t>();
  const auto wrong = [&](std::int64_t s, const std::string& expected) {
    return fail(
        op, "state_index",
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
} catch (...) {
  return caught(op);
}

Status GdnDecodeStep::check(const Desc& d) noexcept try {
  BITTERN_TRY(check_gdn_step_desc(kName, d.step()));
  BITTERN_TRY(expect_between(kName, "tokens", d.tokens, 0, kMostTokens));
  BITTERN_TRY(expect_between(kName, "width", d.width, 2, 4));
  // There are at most 3 * 256 channels for each value head.
  BITTERN_TRY(expect_countable(kName, {d.step().states(), d.value_heads, 3 * 256, 3}));
  BITTERN_TRY(expect_countable(kName, {d.batch, d.tokens, d.value_heads, 3 * 256, 3}));
  BITTERN_TRY(expect_between(kName, "rounding", static_cast<std::int32_t>(d.rounding), 0, 1));
  return expect_eps(kName, d.eps);
} catch (...) {
  return caught(kName);
}

}  // namespace bittern
