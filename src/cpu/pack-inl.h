// Codes of 1..8 bits to and from a little-endian bit stream. A stream starts on a byte: 8 codes are
// exactly `bits` bytes, 32 codes `bits` words.
//
//   const CodePacker packer(bits);
//   packer.Pack(codes, count, stream);    codes mod 2^bits; spare bits of the last byte are zero
//   packer.Unpack(stream, count, codes);  the inverse
//
// Any count and any alignment. Neither touches anything but codes[0, count) and
// stream[0, packer.Bytes(count)).
#if defined(BITTERN_CPU_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_PACK_INL_H_
#undef BITTERN_CPU_PACK_INL_H_
#else
#define BITTERN_CPU_PACK_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/simd-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

class CodePacker {
 public:
  explicit CodePacker(int bits)
      : bits_(static_cast<std::size_t>(bits)),
        mask_(hn::Set(D8(), static_cast<std::uint8_t>((1 << bits) - 1))),
        pair_factors_(hn::BitCast(
            D8(), hn::Set(D16(), static_cast<std::uint16_t>(1 | (1 << bits) % 256 << 8)))),
        four_factors_(hn::BitCast(D8(), hn::Set(D32(), 1u | (1u << 2 * bits) % 65536 << 16))),
        low_(hn::Set(D64(), (std::uint64_t{1} << 4 * bits) - 1)),
        gap_(hn::Set(D64(), static_cast<std::uint64_t>(32 - 4 * bits))) {
    HWY_ALIGN std::uint8_t to[kBlock], from[2][kBlock];
    for (std::size_t i = 0; i < kBlock; ++i) {
      // PackVector leaves the `bits` bytes of 8 codes at the bottom of each 64-bit lane.
      const std::size_t byte = i % kPermuted, at = byte / bits_ * 8 + byte % bits_;
      to[i] = static_cast<std::uint8_t>(at < kPermuted ? at : 0x80);
#if HWY_TARGET == HWY_AVX3_DL
      // Back to the bottom of each lane, where code i % 8 starts at this bit.
      from[0][i] = static_cast<std::uint8_t>((i / 8 * bits_ + i % 8) % 64);
      from[1][i] = static_cast<std::uint8_t>(i % 8 * bits_);
#else
      // Each 16-bit lane has an even and an odd code, each in two neighbouring bytes (the even one
      // in the upper, when it starts on a byte: then its factor is 2^8, not 2^16).
      const std::size_t even = byte / 2 * 2 * bits_, odd = even + bits_;
      from[0][i] = static_cast<std::uint8_t>((even + 7) / 8 - 1 + i % 2);
      from[1][i] = static_cast<std::uint8_t>(odd / 8 + i % 2);
      factors_[0][i / 2] = static_cast<std::uint16_t>(1 << (8 + (8 - even % 8) % 8));
      factors_[1][i / 2] = static_cast<std::uint16_t>(1 << (8 - odd % 8));
#endif
    }
    to_stream_ = hn::Load(D8(), to);
    from_stream_[0] = hn::Load(D8(), from[0]);
    from_stream_[1] = hn::Load(D8(), from[1]);
  }

  std::size_t Bytes(std::size_t count) const { return (count * bits_ + 7) / 8; }

  void Pack(const std::uint8_t* HWY_RESTRICT codes, std::size_t count,
            std::uint8_t* HWY_RESTRICT stream) const {
    const D8 d;
    const std::size_t block_bytes = kBlock / 8 * bits_;
#if HWY_TARGET == HWY_AVX3_DL
    if (bits_ == 4) {  // pairs are bytes already: the lower ones of two vectors are all there is
      HWY_ALIGN std::uint8_t lower[kBlock];
      for (std::size_t i = 0; i < kBlock; ++i) lower[i] = static_cast<std::uint8_t>(2 * i);
      const V8 order = hn::Load(d, lower);
      for (; count >= 2 * kBlock; count -= 2 * kBlock, codes += 2 * kBlock, stream += kBlock) {
        const __m512i a = PackPairs(hn::LoadU(d, codes)),
                      b = PackPairs(hn::LoadU(d, codes + kBlock));
        hn::StoreU(V8{_mm512_permutex2var_epi8(a, order.raw, b)}, d, stream);
      }
    }
    const auto whole = hn::FirstN(d, block_bytes);
    for (; count >= kBlock; count -= kBlock, codes += kBlock, stream += block_bytes)
      hn::BlendedStore(PackVector(hn::LoadU(d, codes)), whole, d, stream);
    if (count == 0) return;
    const V8 rest = PackVector(hn::MaskedLoad(hn::FirstN(d, count), d, codes));
    hn::BlendedStore(rest, hn::FirstN(d, Bytes(count)), d, stream);
#else
    for (const std::uint8_t* end = stream + Bytes(count); count >= kBlock && Fits(stream, end);
         count -= kBlock, codes += kBlock, stream += block_bytes)
      StoreBlocks(PackVector(hn::LoadU(d, codes)), stream);
    HWY_ALIGN std::uint8_t from[kBlock], to[kBlock];
    for (std::size_t n; count != 0; count -= n, codes += n, stream += Bytes(n)) {
      n = std::min(count, kBlock);
      std::memset(from, 0, kBlock);
      std::memcpy(from, codes, n);
      StoreBlocks(PackVector(hn::Load(d, from)), to);
      std::memcpy(stream, to, Bytes(n));
    }
#endif
  }

  void Unpack(const std::uint8_t* HWY_RESTRICT stream, std::size_t count,
              std::uint8_t* HWY_RESTRICT codes) const {
    UnpackTo<false>(stream, count, codes);
  }

  // The same with streaming stores: `codes` is 64-byte aligned, and a store fence must follow.
  void UnpackStreamed(const std::uint8_t* HWY_RESTRICT stream, std::size_t count,
                      std::uint8_t* HWY_RESTRICT codes) const {
    UnpackTo<true>(stream, count, codes);
  }

 private:
  // A vector of codes, and the bytes that one instruction permutes. (Where those are 16, wider
  // vectors than 32 bytes gain nothing.)
  static constexpr std::size_t kBlock = HWY_TARGET == HWY_AVX3_DL ? 64 : 32;
  static constexpr std::size_t kPermuted = HWY_TARGET == HWY_AVX3_DL ? 64 : 16;
  using D8 = hn::CappedTag<std::uint8_t, kBlock>;
  using D16 = hn::Repartition<std::uint16_t, D8>;
  using D32 = hn::Repartition<std::uint32_t, D8>;
  using D64 = hn::Repartition<std::uint64_t, D8>;
  using V8 = hn::Vec<D8>;
  using V64 = hn::Vec<D64>;

#if HWY_TARGET == HWY_AVX3_DL
  HWY_INLINE __m512i PackPairs(V8 codes) const {
    return _mm512_maddubs_epi16(pair_factors_.raw, hn::And(codes, mask_).raw);
  }
#endif
  // The stream's bytes: of all 64 codes, or of each 16 codes at the bottom of their 16 bytes. Codes
  // join their neighbours, a + 2^bits * b, in lanes of 16, 32 and 64 bits. (Signed products do for
  // fewer than 8 bits, and for 8 the lanes are full as they are.)
  HWY_INLINE V8 PackVector(V8 codes) const {
    if (bits_ == 8) return codes;
#if HWY_TARGET == HWY_AVX3_DL
    const V64 fours{_mm512_madd_epi16(PackPairs(codes), four_factors_.raw)};
#else
    const __m256i pairs = _mm256_maddubs_epi16(pair_factors_.raw, hn::And(codes, mask_).raw);
    const V64 fours{_mm256_madd_epi16(pairs, four_factors_.raw)};
#endif
    const auto upper = hn::AndNot(low_, hn::Shr(fours, gap_));
    const V8 v = hn::BitCast(D8(), hn::OrAnd(upper, fours, low_));
#if HWY_TARGET == HWY_AVX3_DL
    return V8{_mm512_permutexvar_epi8(to_stream_.raw, v.raw)};
  }
  HWY_INLINE V8 UnpackVector(V8 bytes) const {
    const __m512i lanes = _mm512_permutexvar_epi8(from_stream_[0].raw, bytes.raw);
    return hn::And(V8{_mm512_multishift_epi64_epi8(from_stream_[1].raw, lanes)}, mask_);
  }
#else
    return hn::TableLookupBytes(v, to_stream_);
  }
  // Whether two overlapping accesses of 16 bytes stay inside the stream.
  bool Fits(const std::uint8_t* stream, const std::uint8_t* end) const {
    return end - stream >= static_cast<std::ptrdiff_t>(2 * bits_ + 16);
  }
  HWY_INLINE void StoreBlocks(V8 v, std::uint8_t* stream) const {
    const hn::Half<D8> dh;
    hn::StoreU(hn::LowerHalf(dh, v), dh, stream);
    hn::StoreU(hn::UpperHalf(dh, v), dh, stream + 2 * bits_);
  }
  HWY_INLINE V8 UnpackBlocks(const std::uint8_t* stream) const {
    const hn::Half<D8> dh;
    const D16 d16;
    const V8 bytes = hn::Combine(D8(), hn::LoadU(dh, stream + 2 * bits_), hn::LoadU(dh, stream));
    // The upper half of a product by 2^(16 - k) is the lane shifted right by k; the lower half of
    // one by 2^k is the lane shifted left.
    const auto even = hn::BitCast(d16, hn::TableLookupBytes(bytes, from_stream_[0]));
    const auto odd = hn::BitCast(d16, hn::TableLookupBytes(bytes, from_stream_[1]));
    const auto low = hn::MulHigh(even, hn::Load(d16, factors_[0]));
    const auto high = hn::Mul(odd, hn::Load(d16, factors_[1]));
    return hn::And(hn::OddEven(hn::BitCast(D8(), high), hn::BitCast(D8(), low)), mask_);
  }
  HWY_ALIGN std::uint16_t factors_[2][kBlock / 2];
#endif

  template <bool kStreamed>
  HWY_INLINE void UnpackTo(const std::uint8_t* HWY_RESTRICT stream, std::size_t count,
                           std::uint8_t* HWY_RESTRICT codes) const {
    const D8 d;
    const auto store = [&](V8 v) HWY_ATTR {
      if constexpr (kStreamed) {
        hn::Stream(v, d, codes);
      } else {
        hn::StoreU(v, d, codes);
      }
    };
    const std::size_t block_bytes = kBlock / 8 * bits_;
#if HWY_TARGET == HWY_AVX3_DL
    const auto whole = hn::FirstN(d, block_bytes);
    for (; count >= kBlock; count -= kBlock, codes += kBlock, stream += block_bytes)
      store(UnpackVector(hn::MaskedLoad(whole, d, stream)));
    if (count == 0) return;
    const V8 rest = UnpackVector(hn::MaskedLoad(hn::FirstN(d, Bytes(count)), d, stream));
    hn::BlendedStore(rest, hn::FirstN(d, count), d, codes);
#else
    for (const std::uint8_t* end = stream + Bytes(count); count >= kBlock && Fits(stream, end);
         count -= kBlock, codes += kBlock, stream += block_bytes)
      store(UnpackBlocks(stream));
    HWY_ALIGN std::uint8_t from[kBlock] = {}, to[kBlock];
    for (std::size_t n; count != 0; count -= n, codes += n, stream += Bytes(n)) {
      n = std::min(count, kBlock);
      std::memcpy(from, stream, Bytes(n));
      hn::Store(UnpackBlocks(from), d, to);
      std::memcpy(codes, to, n);
    }
#endif
  }

  std::size_t bits_;
  V8 mask_, pair_factors_, four_factors_;
  V64 low_, gap_;
  V8 to_stream_, from_stream_[2];
};

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
