// The problem gated_rms_norm and its backward share: rows x and z [rows, dim], and one weight
// [dim].
#pragma once
#include "bittern/norm_rounding.h"
#include "bittern/plan.h"

namespace bittern {

struct GatedNormDesc {
  std::int64_t rows = 0;
  std::int64_t dim = 128;
  double eps = 1e-6;
  DType element = DType::f32;                  // f32 f16 bf16
  NormRounding rounding = NormRounding::once;  // read by the forward
  bool operator==(const GatedNormDesc&) const = default;

  static constexpr std::int64_t kBlock = 64;  // rows summed one after the other
  std::int64_t blocks() const { return (rows + kBlock - 1) / kBlock; }
  Axes shape() const { return {{"rows", rows}, {"dim", dim}}; }
  Axes weight_shape() const { return {{"dim", dim}}; }
};

Status check_gated_norm_desc(std::string_view op, const GatedNormDesc& d) noexcept;

}  // namespace bittern
