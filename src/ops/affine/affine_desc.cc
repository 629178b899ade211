// When the descriptors of the affine family are well formed.

#include "bittern/affine_desc.h"
#include "bittern/ops/pack_codes.h"
#include "core/expect.h"
#include "core/guarded.h"

namespace bittern {

Status check_affine_desc(std::string_view op, const AffineDesc& d) noexcept try {
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
} catch (...) {
  return caught(op);
}

Status check_pack_desc(std::string_view op, const PackDesc& d) noexcept try {
  BITTERN_TRY(expect_at_least(op, "outer_size", d.outer_size, 0));
  BITTERN_TRY(expect_at_least(op, "axis_size", d.axis_size, 0));
  BITTERN_TRY(expect_between(op, "bits", d.bits, 1, 8));
  return expect_countable(op, {d.outer_size, d.axis_size});
} catch (...) {
  return caught(op);
}

}  // namespace bittern
