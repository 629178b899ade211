// When the descriptors of the family are well formed.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "bittern/conv_desc.h"
#include "bittern/layers_desc.h"
#include "bittern/norm_desc.h"
#include "bittern/ops/attention_backward.h"
#include "bittern/ops/kl_loss.h"
#include "core/expect.h"
#include "core/float_mode.h"
#include "core/guarded.h"

namespace bittern {
namespace {

Status expect_sizes(std::string_view op, std::int64_t rows, std::int64_t dim) {
  BITTERN_TRY(expect_at_least(op, "rows", rows, 0));
  BITTERN_TRY(expect_between(op, "dim", dim, 1, 1 << 20));
  return expect_countable(op, {rows, dim});
}

template <class Desc>
Status expect_rows(std::string_view op, const Desc& d) {
  BITTERN_TRY(expect_sizes(op, d.rows, d.dim));
  return expect_no_f64(op, d.element);
}

// Quotients by it stay within f32.
bool ordinary(double v) { return v >= 0x1p-60 && v <= 0x1p60; }

Status expect_logits(std::string_view op, double softcap, double temperature) {
  if (softcap != 0 && !ordinary(softcap))
    return fail(op, "softcap", number_text(softcap) + ", expected 0 or 2^-60..2^60");
  if (!ordinary(temperature))
    return fail(op, "temperature", number_text(temperature) + ", expected 2^-60..2^60");
  return {};
}

}  // namespace

Status check_causal_conv_desc(std::string_view op, const CausalConvDesc& d) noexcept try {
  BITTERN_TRY(check_sequences(op, d.rows()));
  BITTERN_TRY(expect_at_least(op, "channels", d.channels, 0));
  BITTERN_TRY(expect_between(op, "width", d.width, 2, 4));
  BITTERN_TRY(expect_no_f64(op, d.element));
  BITTERN_TRY(expect_countable(op, {d.batch, d.tokens, d.channels, 8}));
  // What the backward keeps of every block.
  return expect_countable(op, {std::max(d.sequence_count(), d.blocks()), d.channels, 8});
} catch (...) {
  return caught(op);
}

Status check_gated_norm_desc(std::string_view op, const GatedNormDesc& d) noexcept try {
  const FloatMode mode;
  BITTERN_TRY(expect_rows(op, d));
  BITTERN_TRY(expect_between(op, "rounding", static_cast<std::int32_t>(d.rounding), 0, 1));
  return expect_eps(op, d.eps);
} catch (...) {
  return caught(op);
}

Status check_rms_norm_desc(std::string_view op, const RmsNormDesc& d) noexcept try {
  const FloatMode mode;
  BITTERN_TRY(expect_rows(op, d));
  BITTERN_TRY(expect_between(op, "rounding", static_cast<std::int32_t>(d.rounding), 0, 1));
  BITTERN_TRY(expect_finite_f32(op, "offset", d.offset));
  return expect_eps(op, d.eps);
} catch (...) {
  return caught(op);
}

Status check_rope_desc(std::string_view op, const RopeDesc& d) noexcept try {
  BITTERN_TRY(expect_at_least(op, "tokens", d.tokens, 0));
  BITTERN_TRY(expect_at_least(op, "heads", d.heads, 0));
  BITTERN_TRY(expect_between(op, "dim", d.dim, 1, 1 << 20));
  BITTERN_TRY(expect_between(op, "rotary_dim", d.rotary_dim, 0, d.dim));
  if (d.rotary_dim % 2 != 0)
    return fail(op, "rotary_dim", std::to_string(d.rotary_dim) + ", expected an even number");
  BITTERN_TRY(expect_finite_f32(op, "factor", d.factor));
  BITTERN_TRY(expect_no_f64(op, d.element));
  BITTERN_TRY(expect_between(op, "layout", static_cast<std::int32_t>(d.layout), 0, 1));
  return expect_countable(op, {d.tokens, d.heads, d.dim});
} catch (...) {
  return caught(op);
}

Status check_gated_activation_desc(std::string_view op, const GatedActivationDesc& d) noexcept try {
  BITTERN_TRY(expect_rows(op, d));
  BITTERN_TRY(expect_between(op, "kind", static_cast<std::int32_t>(d.kind), 0, 2));
  return expect_between(op, "rounding", static_cast<std::int32_t>(d.rounding), 0, 1);
} catch (...) {
  return caught(op);
}

Status check_log_softmax_desc(std::string_view op, const LogSoftmaxDesc& d) noexcept try {
  const FloatMode mode;
  BITTERN_TRY(expect_rows(op, d));
  return expect_logits(op, d.softcap, d.temperature);
} catch (...) {
  return caught(op);
}

Status check_kl_loss_desc(std::string_view op, const KlLossDesc& d) noexcept try {
  const FloatMode mode;
  BITTERN_TRY(expect_sizes(op, d.rows, d.dim));
  BITTERN_TRY(expect_between(op, "top", d.top, 0, d.dim));
  return expect_logits(op, d.softcap, d.temperature);
} catch (...) {
  return caught(op);
}

Status KlLoss::check_contents(const Desc& d, const Args& a) noexcept try {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(d.top));
  for (std::int64_t i = 0; d.top > 0 && i < d.rows; ++i) {
    if (a.weights && a.weights.as<float>()[i] == 0) continue;
    const auto wrong = [&](std::int32_t id, const std::string& what) {
      return fail(kName, "ids", "row " + std::to_string(i) + " has " + std::to_string(id) + what);
    };
    std::copy_n(a.ids.as<std::int32_t>() + i * a.ids.row_stride(), d.top, ids.begin());
    for (const std::int32_t id : ids) {
      if (id < 0 || id >= d.dim) return wrong(id, ", expected 0.." + std::to_string(d.dim - 1));
    }
    std::sort(ids.begin(), ids.end());
    const auto twice = std::adjacent_find(ids.begin(), ids.end());
    if (twice != ids.end()) return wrong(*twice, " twice, expected different ids");
  }
  return {};
} catch (...) {
  return caught(kName);
}

Status check_adam_desc(std::string_view op, const AdamDesc& d) noexcept try {
  const FloatMode mode;
  BITTERN_TRY(expect_at_least(op, "count", d.count, 0));
  BITTERN_TRY(expect_countable(op, {d.count}));
  BITTERN_TRY(expect_finite_f32(op, "rate", d.rate));
  for (const auto& [name, beta] : {std::pair{"beta1", d.beta1}, std::pair{"beta2", d.beta2}}) {
    if (!(beta >= 0 && beta < 1))
      return fail(op, name, number_text(beta) + ", expected at least 0 and below 1");
  }
  if (!(d.epsilon >= 0))
    return fail(op, "epsilon", number_text(d.epsilon) + ", expected at least 0");
  BITTERN_TRY(expect_finite_f32(op, "epsilon", d.epsilon));
  return expect_at_least(op, "step", d.step, 1);
} catch (...) {
  return caught(op);
}

float AttentionBackwardDesc::softmax_scale() const noexcept {
  return static_cast<float>(scale == 0 ? 1 / std::sqrt(static_cast<double>(dim)) : scale);
}

Status AttentionBackward::check(const Desc& d) noexcept try {
  const FloatMode mode;
  BITTERN_TRY(check_sequences(kName, d.rows()));
  BITTERN_TRY(expect_between(kName, "heads", d.heads, 1, 1 << 16));
  BITTERN_TRY(expect_between(kName, "kv_heads", d.kv_heads, 1, 1 << 16));
  if (d.heads % d.kv_heads != 0) {
    return fail(kName, "heads",
                std::to_string(d.heads) + ", expected a multiple of kv_heads " +
                    std::to_string(d.kv_heads));
  }
  BITTERN_TRY(expect_between(kName, "dim", d.dim, 1, 1024));
  BITTERN_TRY(expect_finite_f32(kName, "scale", d.scale));
  BITTERN_TRY(expect_finite_f32(kName, "softcap", d.softcap));
  if (d.softcap != 0 && !(d.softcap >= 0x1p-126)) {
    return fail(kName, "softcap",
                number_text(d.softcap) + ", expected 0 or a positive normal number of f32");
  }
  BITTERN_TRY(expect_between(kName, "window", d.window, 0, std::int64_t{1} << 31));
  // The tensors; what a kernel keeps of each query, and what each thread keeps of a sequence.
  constexpr std::int64_t kMostDim = 1024, kThreads = 1 << 16, kFloats = 1 << 13;
  BITTERN_TRY(expect_countable(kName, {d.tokens, d.heads, kMostDim}));
  return expect_countable(kName, {d.tokens, kThreads, kFloats});
} catch (...) {
  return caught(kName);
}

}  // namespace bittern
