// When the descriptors of GGUF's blocks are well formed.
#include <iterator>
#include <string>

#include "bittern/gguf_desc.h"
#include "bittern/ops/gguf_quantize.h"
#include "core/expect.h"
#include "core/guarded.h"

namespace bittern {

Status check_gguf_desc(std::string_view op, const GgufDesc& d) noexcept try {
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
} catch (...) {
  return caught(op);
}

Status GgufQuantize::check(const Desc& d) noexcept try {
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
} catch (...) {
  return caught(kName);
}

}  // namespace bittern
