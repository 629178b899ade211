// Reading the codes of an affine tensor, stored one per byte or packed.
#if defined(BITTERN_CPU_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_CODES_INL_H_
#undef BITTERN_CPU_CODES_INL_H_
#else
#define BITTERN_CPU_CODES_INL_H_
#endif

#include "bittern/affine_desc.h"
#include "cpu/code_chunks.h"
#include "cpu/pack-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

// Codes as f32 or f64 lanes.
template <class D>
HWY_INLINE hn::Vec<D> LoadCodes(D d, const std::uint8_t* q) {
  const hn::Rebind<std::int32_t, D> di;
  const auto code = hn::PromoteTo(di, hn::LoadU(hn::Rebind<std::uint8_t, D>(), q));
  if constexpr (sizeof(hn::TFromD<D>) == 8) {
    return hn::PromoteTo(d, code);
  } else {
    return hn::ConvertTo(d, code);
  }
}

// Groups that are not whole vectors are read up to this many codes beyond their end.
inline constexpr std::int64_t kCodesOverrun = 16;

class CodeReader {
 public:
  CodeReader(const AffineDesc& d, const ConstView& q)
      : q_(q),
        readable_(d.axis_size - (d.group_size % kCodesOverrun == 0 ? 0 : kCodesOverrun)),
        bits_(d.storage == CodeStorage::packed ? d.code_bits() : 0),
        packer_(d.code_bits()) {}

  // Codes [first, first + count) of a row, count <= kCodeChunk, and what whole vectors read after
  // them; `first` is a multiple of 8 when they are packed. Valid until the next call.
  HWY_INLINE const std::uint8_t* Read(std::int64_t row, std::int64_t first, std::int64_t count) {
    const auto n = static_cast<std::size_t>(count);
    if (bits_ != 0) {
      const auto* words = q_.as<std::uint32_t>() + row * q_.row_stride();
      packer_.Unpack(reinterpret_cast<const std::uint8_t*>(words) + first * bits_ / 8, n, buffer_);
      return buffer_;
    }
    const auto* codes = q_.as<std::uint8_t>() + row * q_.row_stride() + first;
    if (first + count <= readable_) return codes;
    std::memcpy(buffer_, codes, n);
    return buffer_;
  }

 private:
  ConstView q_;
  std::int64_t readable_;  // a row's codes that may be read in place
  std::int64_t bits_;      // 0: one per byte
  CodePacker packer_;
  alignas(64) std::uint8_t buffer_[cpu::kCodeChunk + kCodesOverrun];
};

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
