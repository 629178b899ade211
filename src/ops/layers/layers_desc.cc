// When the descriptors of the convolution and the norm are well formed.
#include <algorithm>
#include <cmath>

#include "bittern/conv_desc.h"
#include "bittern/norm_desc.h"
#include "core/expect.h"
#include "core/float_mode.h"
#include "core/guarded.h"

namespace bittern {

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
} catch (...) {
  return caught(op);
}

}  // namespace bittern
