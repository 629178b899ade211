#include "bittern/ops/aura_encode.h"
#include "cpu/kernel.h"
#include "ops/aura/parallel_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/aura/aura_encode/aura_encode_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/aura/encode-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

void EncodeRows(const AuraDesc& d, const AuraEncode::Args& a, std::int64_t begin,
                std::int64_t end) {
  RowEncoder(d, {.x = a.x,
                 .table = a.table.as<float>(),
                 .boundaries = a.boundaries.as<float>(),
                 .codebook = a.codebook.as<float>(),
                 .packed = a.packed,
                 .scales = a.scales})
      .Encode(begin, end);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = AuraEncode;
BITTERN_EXPORT(EncodeRows);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  cpu::parallel_rows(
      d, [&](std::int64_t begin, std::int64_t end) { BITTERN_CALL(EncodeRows)(d, a, begin, end); });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<AuraEncode>> aura_encode_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
