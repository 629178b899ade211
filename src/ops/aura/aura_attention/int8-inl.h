// The same passes in integers, for the kernel cpu_int8: 4-bit codes of K times a query of two
// bytes, and on AVX-512 4-bit codes of V times weights of 16 bits.
#if defined(BITTERN_OPS_AURA_ATTENTION_INT8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_AURA_ATTENTION_INT8_INL_H_
#undef BITTERN_OPS_AURA_ATTENTION_INT8_INL_H_
#else
#define BITTERN_OPS_AURA_ATTENTION_INT8_INL_H_
#endif

#include <cmath>
#include <limits>

#include "cpu/bytes-inl.h"
#include "ops/aura/aura_attention/passes-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

constexpr float kByteScale = 32512;  // 127 * 256
// The unit of integers that stand for f32. One that is subnormal must keep 8 bits: if it is rounded
// down by more, the largest number is beyond the full scale.
constexpr float kLeastUnit = 0x1p-141f;

// The codebook in two bytes: c = unit * (256 (high - 128) + low).
class ByteCodes {
 public:
  explicit ByteCodes(const float* codebook) {
    float most = 0;
    for (int i = 0; i < 16; ++i) most = std::max(most, std::fabs(codebook[i]));
    unit_ = std::max(most / kByteScale, kLeastUnit);
    HWY_ALIGN std::uint8_t high[16], low[16];
    for (int i = 0; i < 16; ++i) {
      const auto c = static_cast<int>(std::nearbyint(codebook[i] / unit_));
      high[i] = static_cast<std::uint8_t>((c >> 8) + 128);
      low[i] = static_cast<std::uint8_t>(c & 255);
    }
    high_ = hn::LoadDup128(DB(), high);
    low_ = hn::LoadDup128(DB(), low);
  }
  float unit() const { return unit_; }

  void Dots(const Rows& k, std::int64_t blocks, const Record* const* q, std::int64_t rows,
            float (*dots)[kSplit], std::int64_t at) const {
    HWY_ALIGN float acc[kUnit][kUnit];
    for (std::int64_t n = 0; n < k.count; n += kUnit) {
      const Rows some{k.at + n * k.stride, k.stride, std::min(kUnit, k.count - n)};
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t block = 0; block < blocks; ++block)
          DotBlock(some, block, q[r]->bytes + block * 256, acc);
        for (std::int64_t t = some.count; t < kUnit; ++t) std::fill_n(acc[t], kUnit, 0.0f);
        HWY_ALIGN float sums[kUnit];
        FoldAccumulators(acc, sums);
        // The smaller first: neither product then underflows or overflows unless the dot does.
        const float one = 256 * unit_, other = q[r]->byte_unit;
        const float less = one < other ? one : other, more = one < other ? other : one;
        for (std::int64_t t = 0; t < some.count; ++t)
          dots[r][at + n + t] = (sums[t] - q[r]->byte_offset) * less * more;
      }
    }
  }

 private:
  // acc[n] += 256 high + low of a block of row n.
  HWY_INLINE void DotBlock(const Rows& k, std::int64_t block, const std::int8_t* bytes,
                           float (*HWY_RESTRICT acc)[kUnit]) const {
    const DF d;
    const DU du;
    const DB db;
    const VB nibble = hn::Set(db, 15), high_bytes = high_, low_bytes = low_;
    for (std::int64_t half = 0; half < kHalves; ++half) {
      VB q[4];  // x even, x odd, y even, y odd
      for (int i = 0; i < 4; ++i)
        q[i] = hn::LoadU(db,
                         reinterpret_cast<const std::uint8_t*>(bytes) + i * 64 + half * kWidth * 4);
      const std::byte* row = k.at + block * 64 + half * kWidth * 4;
      for (std::int64_t n = 0; n < k.count; ++n, row += k.stride) {
        const VB codes = hn::LoadU(db, reinterpret_cast<const std::uint8_t*>(row));
        const VB even = hn::And(codes, nibble);
        const VB odd = hn::And(hn::BitCast(db, hn::ShiftRight<4>(hn::BitCast(du, codes))), nibble);
        const VB even_high = hn::TableLookupBytes(high_bytes, even);
        const VB odd_high = hn::TableLookupBytes(high_bytes, odd);
        const VU high = DotBytes(DotBytes(hn::Zero(du), even_high, q[0]), odd_high, q[1]);
        const VU crossed = DotBytes(DotBytes(hn::Zero(du), even_high, q[2]), odd_high, q[3]);
        const VU low = DotBytes(DotBytes(crossed, hn::TableLookupBytes(low_bytes, even), q[0]),
                                hn::TableLookupBytes(low_bytes, odd), q[1]);
        const auto both =
            hn::BitCast(hn::RebindToSigned<DF>(), hn::Add(hn::ShiftLeft<8>(high), low));
        float* to = acc[n] + half * kWidth;
        const VF sum = hn::ConvertTo(d, both);
        hn::Store(block == 0 ? sum : hn::Add(sum, hn::Load(d, to)), d, to);
      }
    }
  }

  VB high_, low_;
  float unit_;
};

// r = byte_unit * (256 x + y), x and y bytes: 64 x of a block's even elements, 64 x of the odd
// ones, and so y. A row's bytes hold two codes each, in the order of the elements; r is in units.
void MakeBytes(const Work& w, Record& row) {
  const std::int64_t length = w.coded_length();
  float most = 0;
  bool finite = true;
  for (std::int64_t i = 0; i < length; ++i) {
    most = std::max(most, std::fabs(row.r[i]));
    finite = finite && std::isfinite(row.r[i]);
  }
  // What is not finite shall be seen.
  row.byte_unit =
      finite ? std::max(most / kByteScale, kLeastUnit) : std::numeric_limits<float>::quiet_NaN();
  std::int64_t sum = 0;
  for (std::int64_t j = 0; j < length; ++j) {
    const std::int64_t block = j / 128, lane = j / 8 % kUnit, i = j % 8;
    const float value = row.r[(block * kBlock + i) * kUnit + lane];
    const int q = finite ? static_cast<int>(std::nearbyint(value / row.byte_unit)) : 0;
    const int x = (q + 128) >> 8, y = q - 256 * x;
    std::int8_t* to = row.bytes + block * 256 + j % 2 * 64 + j % 128 / 2;
    to[0] = static_cast<std::int8_t>(x);
    to[128] = static_cast<std::int8_t>(y);
    sum += 256 * x + y;
  }
  row.byte_offset = static_cast<float>(128 * sum);
}

#if HWY_TARGET <= HWY_AVX3
// Sums of s16 * s16 products, two to a lane.
HWY_INLINE __m512i DotShorts(__m512i sum, __m512i a, __m512i b) {
#if HWY_TARGET == HWY_AVX3_DL
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));  // as in DotBytes
  return sum;
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}

// 4-bit codes of V times weights, both as 16-bit integers, two tokens to a lane. The codebook has a
// full scale of 2047 and a split's weights add up to at most 2^19, so that 32 bits hold the sums.
class ShortCodes {
 public:
  explicit ShortCodes(const float* codebook) {
    float most = 0;
    for (int i = 0; i < 16; ++i) most = std::max(most, std::fabs(codebook[i]));
    unit_ = std::max(most / 2047, kLeastUnit);
    HWY_ALIGN std::int16_t table[32];
    for (int i = 0; i < 32; ++i)
      table[i] = static_cast<std::int16_t>(std::nearbyint(codebook[i % 16] / unit_));
    table_ = _mm512_load_si512(table);
  }

  // Weights as integers; returns the unit of the sums, NaN where a weight is not finite. Up to the
  // next whole vector w is set to zero.
  float MakeShorts(float* w, std::int64_t count, std::int16_t* to) const {
    const DF d;
    std::fill(w + count, w + round_up(count, kUnit), 0.0f);
    VF most = hn::Zero(d), sum = hn::Zero(d);
    for (std::int64_t n = 0; n < count; n += kWidth) {
      const VF size = hn::Abs(hn::Load(d, w + n));
      most = hn::Max(most, size);
      sum = hn::Add(sum, size);
    }
    const float total = hn::GetLane(hn::SumOfLanes(d, sum));
    if (!std::isfinite(total)) {
      std::fill_n(to, round_up(count, kUnit), std::int16_t{0});
      return std::numeric_limits<float>::quiet_NaN();
    }
    const float unit =
        std::max({hn::GetLane(hn::MaxOfLanes(d, most)) / 32767, total / (1 << 19), 0x1p-100f});
    const VF inverse = hn::Set(d, 1 / unit);
    const hn::Rebind<std::int16_t, DF> d16;
    for (std::int64_t n = 0; n < count; n += kWidth) {
      const auto whole = hn::NearestInt(hn::Mul(hn::Load(d, w + n), inverse));
      hn::StoreU(hn::DemoteTo(d16, whole), d16, to + n);
    }
    return unit * unit_;
  }

  // o[r] += w[r][at + n] * row n, in integers.
  void Add(const Rows& v, std::int64_t blocks, const std::int16_t (*w)[kSplit], std::int64_t at,
           float* const* o, std::int64_t rows) const {
    std::int64_t r = 0;
    for (; r + 2 <= rows; r += 2) AddRows<2>(v, blocks, w + r, at, o + r);
    for (; r < rows; ++r) AddRows<1>(v, blocks, w + r, at, o + r);
  }

 private:
  template <int kRows>
  HWY_INLINE void AddPair(const std::byte* first, const std::byte* second,
                          const std::int32_t* weights, __m512i (*sum)[kBlock]) const {
    constexpr __mmask32 kOdd = 0xaaaaaaaa;
    const __m512i one = _mm512_loadu_si512(first), two = _mm512_loadu_si512(second);
    // Codes 0..3 of both tokens, and 4..7.
    __m512i low = _mm512_mask_blend_epi16(kOdd, one, _mm512_slli_epi32(two, 16));
    __m512i high = _mm512_mask_blend_epi16(kOdd, _mm512_srli_epi32(one, 16), two);
    for (int i = 0; i < kBlock / 2; ++i) {
      const __m512i y = _mm512_permutexvar_epi16(low, table_);
      const __m512i z = _mm512_permutexvar_epi16(high, table_);
      for (int r = 0; r < kRows; ++r) {
        const __m512i weight = _mm512_set1_epi32(weights[r]);
        sum[r][i] = DotShorts(sum[r][i], y, weight);
        sum[r][i + 4] = DotShorts(sum[r][i + 4], z, weight);
      }
      low = _mm512_srli_epi16(low, 4);
      high = _mm512_srli_epi16(high, 4);
    }
  }

  template <int kRows>
  HWY_NOINLINE void AddRows(const Rows& v, std::int64_t blocks, const std::int16_t (*w)[kSplit],
                            std::int64_t at, float* const* o) const {
    for (std::int64_t block = 0; block < blocks; ++block) {
      __m512i sum[kRows][kBlock];
      for (int r = 0; r < kRows; ++r)
        for (int i = 0; i < kBlock; ++i)
          sum[r][i] = _mm512_loadu_si512(o[r] + (block * kBlock + i) * kUnit);
      const std::byte* row = v.at + block * 64;
      std::int64_t n = 0;
      for (; n + 2 <= v.count; n += 2, row += 2 * v.stride) {
        std::int32_t weights[kRows];
        for (int r = 0; r < kRows; ++r) std::memcpy(&weights[r], w[r] + at + n, 4);
        AddPair<kRows>(row, row + v.stride, weights, sum);
      }
      if (n < v.count) {  // the last one, and nothing of the next
        std::int32_t weights[kRows];
        for (int r = 0; r < kRows; ++r) weights[r] = static_cast<std::uint16_t>(w[r][at + n]);
        AddPair<kRows>(row, row, weights, sum);
      }
      for (int r = 0; r < kRows; ++r)
        for (int i = 0; i < kBlock; ++i)
          _mm512_storeu_si512(o[r] + (block * kBlock + i) * kUnit, sum[r][i]);
    }
  }

  __m512i table_;
  float unit_;
};
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
