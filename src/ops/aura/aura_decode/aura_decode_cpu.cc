#include "bittern/ops/aura_decode.h"
#include "cpu/kernel.h"
#include "ops/aura/parallel_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/aura/aura_decode/aura_decode_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/pack-inl.h"
#include "cpu/stream-inl.h"
#include "ops/aura/levels-inl.h"
#include "ops/aura/rotate-inl.h"

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
        stride_(RoundUpToLanes(d.dim)),
        rotation_(d.rotated ? Rotation::identity : d.rotation, d.dim, a.table.as<float>()),
        packer_(d.bits),
        stream_(d.element == DType::f32 && 4 * d.tensor_shape().numel() >= kStreamBytes) {
    std::memset(codes_, 0, sizeof codes_);  // past the end of a row too
  }

  template <class X>
  void Decode(std::int64_t begin, std::int64_t end) {
    switch (d_.bits) {
      case 1: return DecodeAt<X, 1>(begin, end);
      case 2: return DecodeAt<X, 2>(begin, end);
      case 3: return DecodeAt<X, 3>(begin, end);
      case 4: return DecodeAt<X, 4>(begin, end);
      case 5: return DecodeAt<X, 5>(begin, end);
      case 6: return DecodeAt<X, 6>(begin, end);
      case 7: return DecodeAt<X, 7>(begin, end);
      default: return DecodeAt<X, 8>(begin, end);
    }
  }

 private:
  template <class X, int kBits>
  void DecodeAt(std::int64_t begin, std::int64_t end) {
    const LevelTable<kBits> codebook(a_.codebook.as<float>());
    for (std::int64_t first = begin; first < end; first += kF32Lanes) {
      const std::int64_t count = std::min(end - first, kF32Lanes);
      for (std::int64_t i = 0; i < count; ++i) LookUpRow(codebook, first + i, tile_ + i * stride_);
      rotation_.Apply(tile_, stride_, count, true);
      for (std::int64_t i = 0; i < count; ++i)
        Emit(tile_ + i * stride_, a_.y.as<X>() + (first + i) * a_.y.row_stride());
    }
    if (stream_) hwy::FlushStream();
  }

  template <class Codebook>
  HWY_INLINE void LookUpRow(const Codebook& codebook, std::int64_t i, float* HWY_RESTRICT row) {
    const DF32 d;
    const hn::Rebind<std::uint8_t, DF32> d8;
    const auto* packed = reinterpret_cast<const std::uint8_t*>(a_.packed.as<std::uint32_t>() +
                                                               i * a_.packed.row_stride());
    packer_.Unpack(packed, static_cast<std::size_t>(d_.dim), codes_);
    const std::int64_t at = i * a_.scales.row_stride();
    const VF32 scale =
        hn::Set(d, d_.f16_scale ? to_f32(a_.scales.as<f16>()[at]) : a_.scales.as<float>()[at]);
    for (std::int64_t j = 0; j < stride_; j += kF32Lanes) {
      const VU32 code = hn::PromoteTo(DU32(), hn::LoadU(d8, codes_ + j));
      hn::Store(hn::Mul(scale, codebook(code)), d, row + j);
    }
  }

  // Rows of f32 are lines as they stand: large outputs of them go past the caches.
  template <class X>
  HWY_INLINE void Emit(const float* HWY_RESTRICT row, X* HWY_RESTRICT y) const {
    if constexpr (std::is_same_v<X, float>) {
      EmitLines(row, static_cast<std::size_t>(d_.dim) * sizeof(X), y, stream_);
    } else {
      StoreRow(row, d_.dim, y);
    }
  }

  const AuraDesc& d_;
  const AuraDecode::Args& a_;
  std::int64_t stride_;
  RowRotation rotation_;
  CodePacker packer_;
  bool stream_;
  HWY_ALIGN std::uint8_t codes_[kAuraMaxDim];
  HWY_ALIGN float tile_[kF32Lanes * kAuraMaxDim];
};

void DecodeRows(const AuraDesc& d, const AuraDecode::Args& a, std::int64_t begin,
                std::int64_t end) {
  RowDecoder decoder(d, a);
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    decoder.Decode<X>(begin, end);
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

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  cpu::parallel_rows(
      d, [&](std::int64_t begin, std::int64_t end) { BITTERN_CALL(DecodeRows)(d, a, begin, end); });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<AuraDecode>> aura_decode_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
