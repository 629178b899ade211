#include "bittern/ops/pack_codes.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = PackCodes;

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const std::int64_t words_per_row = packed_words(d.axis_size, d.bits);
  for (std::int64_t i = 0; i < d.outer_size; ++i) {
    const std::uint8_t* codes = a.codes.as<std::uint8_t>() + i * a.codes.row_stride();
    std::uint32_t* words = a.packed.as<std::uint32_t>() + i * a.packed.row_stride();
    for (std::int64_t w = 0; w < words_per_row; ++w) words[w] = 0;
    for (std::int64_t j = 0; j < d.axis_size; ++j) {
      for (std::int64_t k = 0; k < d.bits; ++k) {
        const std::int64_t bit = j * d.bits + k;
        words[bit / 32] |= (std::uint32_t{codes[j]} >> k & 1u) << bit % 32;
      }
    }
  }
  return {};
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<PackCodes>> pack_codes_ref() { return kKernels; }

}  // namespace bittern
