#include "bittern/ops/unpack_codes.h"
#include "cpu/code_chunks.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/affine/unpack_codes/unpack_codes_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/pack-inl.h"
#include "cpu/stream-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

void UnpackChunks(const PackDesc& d, const UnpackCodes::Args& a, std::int64_t begin,
                  std::int64_t end) {
  const CodePacker packer(d.bits);
  const cpu::CodeChunks chunks{d.outer_size, d.axis_size};
  const bool stream = d.outer_size * d.axis_size >= kStreamBytes;
  for (std::int64_t i = begin; i < end; ++i) {
    const auto [row, first, length] = chunks[i];
    const auto count = static_cast<std::size_t>(length);
    const auto* words =
        a.packed.as<std::uint32_t>() + row * a.packed.row_stride() + first * d.bits / 32;
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(words);
    auto* codes = a.codes.as<std::uint8_t>() + row * a.codes.row_stride() + first;
    // Codes up to the next line; whole bytes of the stream, or the rest would not start on one.
    const std::size_t head = std::min(count, ToNextLine(codes));
    if (stream && head % 8 == 0) {
      packer.Unpack(bytes, head, codes);
      packer.UnpackStreamed(bytes + packer.Bytes(head), count - head, codes + head);
    } else {
      packer.Unpack(bytes, count, codes);
    }
  }
  if (stream) hwy::FlushStream();
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = UnpackCodes;
BITTERN_EXPORT(UnpackChunks);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const cpu::CodeChunks chunks{d.outer_size, d.axis_size};
  cpu::parallel(chunks.size(), chunks.grain(), [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(UnpackChunks)(d, a, begin, end);
  });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<UnpackCodes>> unpack_codes_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
