// Rows of the cache as f32, unit by unit (work.h): coded rows of 1..8 bits, looked up in their
// codebook, and rows kept exactly.
//
//   rows.Units<n>(row, unit, half, to)    vectors `half` of n units from `unit` on
//
// n divides 8, and `unit`. The classes are copied where they are used, so that what they hold stays
// in registers.
#if defined(BITTERN_OPS_AURA_ATTENTION_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_AURA_ATTENTION_ROWS_INL_H_
#undef BITTERN_OPS_AURA_ATTENTION_ROWS_INL_H_
#else
#define BITTERN_OPS_AURA_ATTENTION_ROWS_INL_H_
#endif

#include <bit>
#include <cstring>

#include "ops/aura/aura_attention/work.h"
#include "ops/aura/rotate-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using aura::kBlock;
using aura::kManyRows;
using aura::kRowsAtOnce;
using aura::kSplit;
using aura::kUnit;
using aura::Partial;
using aura::Record;
using aura::round_up;
using aura::SplitOfTask;
using aura::Work;

using DF = DF32;
using VF = VF32;
using DU = hn::RebindToUnsigned<DF>;
using VU = hn::Vec<DU>;
using DB = hn::Repartition<std::uint8_t, DF>;
using VB = hn::Vec<DB>;
constexpr std::int64_t kWidth = hn::MaxLanes(DF());
constexpr std::int64_t kHalves = kUnit / kWidth;  // vectors of a unit

// 1..4 bits: word l of a block holds its 8 codes of lane l.
template <bool kFour>
class NarrowRows {
 public:
  NarrowRows(const float* codebook, int bits) : bits_(bits) {
    HWY_ALIGN float table[16];
    if constexpr (!kFour) {
      // The index is 4 bits; of narrower codes the upper ones are the neighbour's.
      for (int i = 0; i < 16; ++i) table[i] = codebook[i & ((1 << bits) - 1)];
      codebook = table;
    }
    for (std::int64_t h = 0; h < kHalves; ++h) table_[h] = hn::LoadU(DF(), codebook + h * kWidth);
  }
  template <int n>
  HWY_INLINE void Units(const std::byte* row, std::int64_t unit, std::int64_t half,
                        VF* HWY_RESTRICT to) const {
    const auto* words = reinterpret_cast<const std::uint32_t*>(row) + unit / kBlock * kUnit;
    VU word = hn::LoadU(DU(), words + half * kWidth);
    if constexpr (n < kBlock) {
      word = hn::ShiftRightSame(word, static_cast<int>(unit % kBlock) * (kFour ? 4 : bits_));
    }
    for (int i = 0; i < n; ++i) {
      to[i] = Lookup(word);
      if (i + 1 < n) word = kFour ? hn::ShiftRight<4>(word) : hn::ShiftRightSame(word, bits_);
    }
  }

 private:
  HWY_INLINE VF Lookup(VU index) const {
#if HWY_TARGET <= HWY_AVX3
    return VF{_mm512_permutexvar_ps(index.raw, table_[0].raw)};
#else
    const __m256 low = _mm256_permutevar8x32_ps(table_[0].raw, index.raw);
    const __m256 high = _mm256_permutevar8x32_ps(table_[1].raw, index.raw);
    return VF{_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index.raw, 28)))};
#endif
  }
  VF table_[kHalves];
  int bits_;
};

// 5..8 bits: word l of a block holds the first 4 codes of lane l, word 16 + l the others. On
// AVX3_DL 8-bit codes stay in their order. To make one takes a while.
class WideRows {
 public:
  WideRows(const float* codebook, int bits) : codebook_(codebook), bits_(bits) {
#if HWY_TARGET == HWY_AVX3_DL
    if (bits <= 4) return;  // not used
    HWY_ALIGN std::uint8_t plane[4][256], shifts[64], order[64], halves[2][64];
    for (int i = 0; i < 256; ++i) {
      const auto value = std::bit_cast<std::uint32_t>(codebook[i & ((1 << bits) - 1)]);
      for (int p = 0; p < 4; ++p) plane[p][i] = static_cast<std::uint8_t>(value >> 8 * p);
    }
    for (int p = 0; p < 4; ++p)
      for (int i = 0; i < 4; ++i) plane_[p][i] = _mm512_load_si512(plane[p] + 64 * i);
    // By four lanes: unit 0 of each, then unit 1, ...
    for (int i = 0; i < 64; ++i) {
      const int unit = i / 4 % 4, lane = i / 16 * 4 + i % 4;
      shifts[i] = static_cast<std::uint8_t>(i % 8 / 4 * 32 + i % 4 * bits);
      order[i] = static_cast<std::uint8_t>(lane % 4 * 4 + unit);
      for (int half = 0; half < 2; ++half)
        halves[half][i] = static_cast<std::uint8_t>(lane * 8 + half * 4 + unit);
    }
    shifts_ = _mm512_load_si512(shifts);
    order_ = _mm512_load_si512(order);
    for (int half = 0; half < 2; ++half) halves_[half] = _mm512_load_si512(halves[half]);
#endif
  }
  template <int n>
  HWY_INLINE void Units(const std::byte* row, std::int64_t unit, std::int64_t half,
                        VF* HWY_RESTRICT to) const {
#if HWY_TARGET == HWY_AVX3_DL
    const std::byte* block = row + unit / kBlock * 128;
    VF four[4];
    for (int at = 0; at < n; at += 4) {
      FourUnits(block, static_cast<int>(unit % kBlock + at) / 4, n < 4 ? four : to + at);
    }
    for (int i = 0; n < 4 && i < n; ++i) to[i] = four[unit % 4 + i];
    (void)half;
#else
    const auto* words = reinterpret_cast<const std::uint32_t*>(row) + unit / kBlock * 2 * kUnit +
                        unit % kBlock / 4 * kUnit + half * kWidth;
    for (int at = 0; at < n; at += 4, words += kUnit) {
      VU word = hn::LoadU(DU(), words);
      word = hn::ShiftRightSame(word, static_cast<int>(unit % 4) * bits_);
      for (int i = 0; i < (n < 4 ? n : 4); ++i) {
        to[at + i] = Lookup(word);
        word = hn::ShiftRightSame(word, bits_);
      }
    }
#endif
  }

 private:
  HWY_INLINE VF Lookup(VU index) const {
    const VU code = hn::And(index, hn::Set(DU(), (1u << bits_) - 1));
#if HWY_TARGET <= HWY_AVX3
    // 32 entries at a time, and the upper bits of the code choose among them.
    VF value = Pair(index, 0);
    if (bits_ == 5) return value;
    for (int pair = 1; pair < 1 << (bits_ - 5); ++pair) {
      const auto here = hn::Gt(code, hn::Set(DU(), static_cast<std::uint32_t>(32 * pair - 1)));
      value = hn::IfThenElse(hn::RebindMask(DF(), here), Pair(index, pair), value);
    }
    return value;
  }
  HWY_INLINE VF Pair(VU index, int pair) const {
    const float* at = codebook_ + 32 * pair;
    return VF{_mm512_permutex2var_ps(_mm512_loadu_ps(at), index.raw, _mm512_loadu_ps(at + 16))};
#else
    return hn::GatherIndex(DF(), codebook_, hn::BitCast(hn::RebindToSigned<DU>(), code));
#endif
  }
#if HWY_TARGET == HWY_AVX3_DL
  // 64 codes at once: the codebook's first bytes, its second ones and so on are tables of bytes,
  // which vpermi2b looks up 128 at a time. Then the bytes of each value are put together.
  HWY_INLINE void FourUnits(const std::byte* block, int half, VF* HWY_RESTRICT to) const {
    __m512i codes;
    if (bits_ == 8) {
      codes = _mm512_permutex2var_epi8(_mm512_loadu_si512(block), halves_[half],
                                       _mm512_loadu_si512(block + 64));
    } else {
      // Codes 0..3 of a lane as bytes: the table repeats, so bits of the next code do no harm.
      codes = _mm512_multishift_epi64_epi8(shifts_, _mm512_loadu_si512(block + 64 * half));
      codes = _mm512_shuffle_epi8(codes, order_);
    }
    const __mmask64 upper = _mm512_movepi8_mask(codes);
    __m512i bytes[4];
    for (int p = 0; p < 4; ++p) {
      const __m512i low = _mm512_permutex2var_epi8(plane_[p][0], codes, plane_[p][1]);
      const __m512i high = _mm512_permutex2var_epi8(plane_[p][2], codes, plane_[p][3]);
      bytes[p] = _mm512_mask_blend_epi8(upper, low, high);
    }
    const __m512i low01 = _mm512_unpacklo_epi8(bytes[0], bytes[1]);
    const __m512i low23 = _mm512_unpacklo_epi8(bytes[2], bytes[3]);
    const __m512i high01 = _mm512_unpackhi_epi8(bytes[0], bytes[1]);
    const __m512i high23 = _mm512_unpackhi_epi8(bytes[2], bytes[3]);
    to[0] = VF{_mm512_castsi512_ps(_mm512_unpacklo_epi16(low01, low23))};
    to[1] = VF{_mm512_castsi512_ps(_mm512_unpackhi_epi16(low01, low23))};
    to[2] = VF{_mm512_castsi512_ps(_mm512_unpacklo_epi16(high01, high23))};
    to[3] = VF{_mm512_castsi512_ps(_mm512_unpackhi_epi16(high01, high23))};
  }
  __m512i plane_[4][4], shifts_, order_, halves_[2];
#endif
  const float* codebook_;
  int bits_;
};

// Rows kept exactly.
template <class E>
class ExactRows {
 public:
  template <int n>
  HWY_INLINE void Units(const std::byte* row, std::int64_t unit, std::int64_t half,
                        VF* HWY_RESTRICT to) const {
    const E* at = reinterpret_cast<const E*>(row) + unit * kUnit + half * kWidth;
    for (int i = 0; i < n; ++i) to[i] = LoadMath(DF(), at + i * kUnit);
  }
};

// Codes as NarrowRows and WideRows want them. Reads no byte beyond the row.
class CodeSpreader {
 public:
  CodeSpreader(int bits, std::int64_t dim)
      : bits_(bits), dim_(dim), row_bytes_(packed_words(dim, bits) * 4) {
#if HWY_TARGET == HWY_AVX3_DL
    HWY_ALIGN std::uint8_t index[2][64];
    for (int i = 0; i < 64; ++i) {
      index[0][i] = static_cast<std::uint8_t>((i / 4 * bits + i % 4) % 128);
      index[1][i] = static_cast<std::uint8_t>((i / 4 * bits + bits / 2 + i % 4) % 128);
    }
    for (int i = 0; i < 2; ++i) index_[i] = hn::Load(DB(), index[i]);
#endif
  }
  // Whether rows of whole blocks need not be spread.
  bool in_place() const { return bits_ == 4 || (HWY_TARGET == HWY_AVX3_DL && bits_ == 8); }
  std::int64_t bytes() const { return round_up(dim_, kUnit * kBlock) / 2 * (bits_ > 4 ? 2 : 1); }

  void operator()(const std::byte* row, std::byte* to) const {
#if HWY_TARGET == HWY_AVX3_DL
    if (bits_ == 8) {
      std::memcpy(to, row, static_cast<std::size_t>(row_bytes_));
      std::memset(to + row_bytes_, 0, static_cast<std::size_t>(bytes() - row_bytes_));
      return;
    }
    const DB d;
    const auto* from = reinterpret_cast<const std::uint8_t*>(row);
    const std::int64_t block_bytes = kUnit * bits_;
    for (std::int64_t at = 0; at * 8 < dim_ * bits_; at += block_bytes) {
      const auto load = [&](std::int64_t begin) HWY_ATTR {
        const std::int64_t count = std::clamp<std::int64_t>(row_bytes_ - at - begin, 0, 64);
        return hn::MaskedLoad(hn::FirstN(d, static_cast<std::size_t>(count)), d, from + at + begin);
      };
      const VB low = load(0), high = block_bytes > 64 ? load(64) : hn::Zero(d);
      auto* words = reinterpret_cast<std::uint32_t*>(to);
      hn::StoreU(VU{_mm512_permutex2var_epi8(low.raw, index_[0].raw, high.raw)}, DU(), words);
      to += 64;
      if (bits_ <= 4) continue;
      const VU rest{_mm512_permutex2var_epi8(low.raw, index_[1].raw, high.raw)};
      hn::StoreU(hn::ShiftRightSame(rest, 4 * bits_ % 8), DU(), words + kUnit);
      to += 64;
    }
#else
    std::memset(to, 0, static_cast<std::size_t>(bytes()));
    for (std::int64_t lane = 0; lane * 8 < dim_; ++lane) {
      const std::int64_t at = lane * bits_;
      std::uint64_t codes = 0;
      if (at + 8 <= row_bytes_) {
        std::memcpy(&codes, row + at, 8);
      } else {
        std::memcpy(&codes, row + at, static_cast<std::size_t>(row_bytes_ - at));
      }
      auto* words = reinterpret_cast<std::uint32_t*>(to);
      if (bits_ <= 4) {
        words[lane] = static_cast<std::uint32_t>(codes);
      } else {
        words += lane / kUnit * 2 * kUnit + lane % kUnit;
        words[0] = static_cast<std::uint32_t>(codes);
        words[kUnit] = static_cast<std::uint32_t>(codes >> 4 * bits_);
      }
    }
#endif
  }

 private:
  std::int64_t bits_, dim_, row_bytes_;
#if HWY_TARGET == HWY_AVX3_DL
  VB index_[2];
#endif
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
