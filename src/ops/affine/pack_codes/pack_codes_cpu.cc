#include "bittern/ops/pack_codes.h"
#include "cpu/code_chunks.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/affine/pack_codes/pack_codes_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/pack-inl.h"
#include "cpu/stream-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

void PackChunks(const PackDesc& d, const PackCodes::Args& a, std::int64_t begin, std::int64_t end) {
  const CodePacker packer(d.bits);
  const cpu::ShortChunks chunks{d.outer_size, d.axis_size};
  const bool stream = d.packed_shape().numel() * 4 >= kStreamBytes;
  HWY_ALIGN std::uint8_t buffer[cpu::kShortChunk];
  const std::int64_t per_stream = (end - begin + cpu::kReadStreams - 1) / cpu::kReadStreams;
  for (std::int64_t i = 0; i < cpu::kReadStreams * per_stream; ++i) {
    const std::int64_t chunk = begin + i % cpu::kReadStreams * per_stream + i / cpu::kReadStreams;
    if (chunk >= end) continue;
    const auto [row, first, length] = chunks[chunk];
    const auto count = static_cast<std::size_t>(length);
    const auto* codes = a.codes.as<std::uint8_t>() + row * a.codes.row_stride() + first;
    auto* words = a.packed.as<std::uint32_t>() + row * a.packed.row_stride() + first * d.bits / 32;
    auto* bytes = reinterpret_cast<std::uint8_t*>(words);
    // Codes need not fill lines evenly: lines are assembled in L1, then streamed.
    std::uint8_t* to = stream ? buffer : bytes;
    const std::size_t used = packer.Bytes(count), whole = (used + 3) / 4 * 4;
    packer.Pack(codes, count, to);
    std::memset(to + used, 0, whole - used);
    if (stream) EmitLines(buffer, whole, bytes, true);
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

using Op = PackCodes;
BITTERN_EXPORT(PackChunks);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const cpu::ShortChunks chunks{d.outer_size, d.axis_size};
  cpu::parallel(chunks.size(), chunks.grain(), [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(PackChunks)(d, a, begin, end);
  });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<PackCodes>> pack_codes_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
