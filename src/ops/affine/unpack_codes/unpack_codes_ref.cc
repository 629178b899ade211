#include "bittern/ops/unpack_codes.h"
#include "core/numerics.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = UnpackCodes;

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  for (std::int64_t i = 0; i < d.outer_size; ++i) {
    const std::uint32_t* words = a.packed.as<std::uint32_t>() + i * a.packed.row_stride();
    std::uint8_t* codes = a.codes.as<std::uint8_t>() + i * a.codes.row_stride();
    for (std::int64_t j = 0; j < d.axis_size; ++j)
      codes[j] = static_cast<std::uint8_t>(packed_code(words, j, d.bits));
  }
  return {};
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<UnpackCodes>> unpack_codes_ref() { return kKernels; }

}  // namespace bittern
