#include "bittern/ops/aura_decode.h"
#include "cpu/dispatch.h"
#include "cpu/rotate.h"
#include "plan/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/aura_decode/aura_decode_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/levels-inl.h"
#include "cpu/pack-inl.h"
#include "cpu/rotate-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

class RowDecoder {
 public:
  RowDecoder(const AuraDesc& d, const AuraDecode::Args& a)
      : d_(d),
        a_(a),
        stride_(RoundUpToLanes(d.axis_size)),
        rotation_(d.rotated ? Rotation::identity : d.rotation, d.axis_size, a.table.as<float>()),
        packer_(d.bits) {
    std::memset(codes_, 0, sizeof codes_);  // past the end of a row too
  }

  template <class X>
  void Decode(std::int64_t first, std::int64_t count) {
    switch (d_.bits) {
      case 1: LookUpRows<1>(first, count); break;
      case 2: LookUpRows<2>(first, count); break;
      case 3: LookUpRows<3>(first, count); break;
      case 4: LookUpRows<4>(first, count); break;
      case 5: LookUpRows<5>(first, count); break;
      case 6: LookUpRows<6>(first, count); break;
      case 7: LookUpRows<7>(first, count); break;
      default: LookUpRows<8>(first, count);
    }
    rotation_.Apply(tile_, stride_, count, true);
    for (std::int64_t i = 0; i < count; ++i)
      StoreRow(tile_ + i * stride_, d_.axis_size, a_.y.as<X>() + (first + i) * a_.y.row_stride());
  }

 private:
  template <int kBits>
  HWY_INLINE void LookUpRows(std::int64_t first, std::int64_t count) {
    const DF32 d;
    const DU32 du;
    const hn::Rebind<std::uint8_t, DF32> d8;
    const LevelTable<kBits> codebook(a_.codebook.as<float>());
    for (std::int64_t i = 0; i < count; ++i) {
      const auto* packed = reinterpret_cast<const std::uint8_t*>(
          a_.packed.as<std::uint32_t>() + (first + i) * a_.packed.row_stride());
      packer_.Unpack(packed, static_cast<std::size_t>(d_.axis_size), codes_);
      const std::int64_t at = (first + i) * a_.norms.row_stride();
      const VF32 norm =
          hn::Set(d, d_.f16_norm ? to_f32(a_.norms.as<f16>()[at]) : a_.norms.as<float>()[at]);
      for (std::int64_t j = 0; j < stride_; j += kF32Lanes) {
        const VU32 code = hn::PromoteTo(du, hn::LoadU(d8, codes_ + j));
        hn::Store(hn::Mul(norm, codebook(code)), d, tile_ + i * stride_ + j);
      }
    }
  }

  const AuraDesc& d_;
  const AuraDecode::Args& a_;
  std::int64_t stride_;
  RowRotation rotation_;
  CodePacker packer_;
  HWY_ALIGN std::uint8_t codes_[kAuraMaxDim];
  HWY_ALIGN float tile_[kF32Lanes * kAuraMaxDim];
};

void DecodeRows(const AuraDesc& d, const AuraDecode::Args& a, std::int64_t begin,
                std::int64_t end) {
  RowDecoder decoder(d, a);
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    for (std::int64_t first = begin; first < end; first += kF32Lanes)
      decoder.Decode<X>(first, std::min(end - first, kF32Lanes));
    return Status();
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = AuraDecode;
BITTERN_EXPORT(DecodeRows);

Status supports(const Op::Desc&) { return cpu::supported(); }

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  cpu::parallel_rows(
      d, [&](std::int64_t begin, std::int64_t end) { BITTERN_CALL(DecodeRows)(d, a, begin, end); });
  return {};
}

constexpr Kernel<Op> kKernels[] = {{.name = "cpu",
                                    .backend = "cpu",
                                    .supports = supports,
                                    .architecture = cpu::architecture,
                                    .run = run}};

}  // namespace

std::span<const Kernel<AuraDecode>> aura_decode_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
