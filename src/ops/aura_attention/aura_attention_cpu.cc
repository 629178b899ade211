#include <bit>
#include <cstring>
#include <limits>

#include "bittern/ops/aura_attention.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "ops/aura_attention/walk.h"
#include "plan/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/aura_attention/aura_attention_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/math-inl.h"
#include "cpu/reduce-inl.h"
#include "cpu/rotate-inl.h"

#ifndef BITTERN_AURA_ATTENTION_WORK
#define BITTERN_AURA_ATTENTION_WORK
namespace bittern {
namespace {

// Rows are handled in units of 16 elements, one per accumulator. A row kept exactly has element j
// in unit j / 16; a coded row has it in unit j / 128 * 8 + j % 8, lane j / 8 % 16, since 8 codes of
// a bit stream are whole bytes, which one lane takes apart.
constexpr std::int64_t kUnit = 16, kBlock = 8;  // elements of a unit, units of a block
constexpr std::int64_t kSplit = AuraAttentionDesc::kSplit;
constexpr std::int64_t kRowsAtOnce = 16;  // query rows that pass over a split together

constexpr std::int64_t round_up(std::int64_t n, std::int64_t m) { return (n + m - 1) / m * m; }

// What the work is made of: a task is a KV head with a block of queries; each query row of a task
// (a query and one of the heads) has a record in the workspace.
struct Work {
  const AuraAttentionDesc& d;
  const AuraAttention::Args& a;
  bool int8;
  float* records;
  float* partials;  // of each record and split, where tasks are too few for the threads

  std::int64_t exact_length() const { return round_up(d.dim, kUnit); }
  std::int64_t coded_length() const { return round_up(d.dim, kUnit * kBlock); }
  std::int64_t queries_at_once() const {
    return std::max<std::int64_t>(std::min(kRowsAtOnce / d.group(), d.queries), 1);
  }
  std::int64_t query_blocks() const {
    const std::int64_t n = queries_at_once();
    return (d.queries + n - 1) / n;
  }
  std::int64_t tasks() const { return d.sequences * d.kv_heads * query_blocks(); }
  std::int64_t rows() const { return d.sequences * d.queries * d.heads; }
  std::int64_t splits(aura::Region region) const {
    const std::int64_t slots[] = {d.first, d.capacity, d.recent};
    return (slots[region] + kSplit - 1) / kSplit;
  }
  std::int64_t all_splits() const {
    return splits(aura::kFirst) + splits(aura::kCoded) + splits(aura::kRecent);
  }
  bool by_split() const {
    return tasks() < 16 && rows() <= 1024 && all_splits() > 1 && all_splits() < (1 << 20);
  }
  std::int64_t record_length() const {
    return 2 * exact_length() + 2 * coded_length() + kUnit + (int8 ? coded_length() / 2 : 0);
  }
  std::int64_t partial_length() const { return kUnit + coded_length(); }
  std::int64_t partials_length() const {
    return by_split() ? rows() * all_splits() * partial_length() : 0;
  }
  float* record(std::int64_t row) const { return records + row * record_length(); }
  float* partial(std::int64_t row, std::int64_t split) const {
    return partials + (row * all_splits() + split) * partial_length();
  }
};

// A record: the query in both bases, the state it is merged into, and the query as bytes.
struct Record {
  float *a, *r, *o_exact, *o_coded;
  float &m, &l, &l_coded, &b;
  float &byte_unit, &byte_offset;  // of r: the value of 1, and what c's offset of 128 adds up to
  std::int8_t* bytes;

  Record(const Work& w, std::int64_t row) : Record(w, w.record(row)) {}

 private:
  Record(const Work& w, float* at)
      : a(at),
        r(a + w.exact_length()),
        o_exact(r + w.coded_length()),
        o_coded(o_exact + w.exact_length()),
        m(o_coded[w.coded_length()]),
        l((&m)[1]),
        l_coded((&m)[2]),
        b((&m)[3]),
        byte_unit((&m)[4]),
        byte_offset((&m)[5]),
        bytes(reinterpret_cast<std::int8_t*>(&m + kUnit)) {}
};

// A split's sums for one row: m, l, whether a token was seen, then o.
struct Partial {
  float &m, &l, &seen;
  float* o;
  explicit Partial(float* at) : m(at[0]), l(at[1]), seen(at[2]), o(at + kUnit) {}
};

}  // namespace
}  // namespace bittern
#endif

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using DF = DF32;
using VF = VF32;
using DU = hn::RebindToUnsigned<DF>;
using VU = hn::Vec<DU>;
using DB = hn::Repartition<std::uint8_t, DF>;
using VB = hn::Vec<DB>;
constexpr std::int64_t kWidth = hn::MaxLanes(DF());
constexpr std::int64_t kHalves = kUnit / kWidth;  // vectors of a unit

// Unaligned words a row of codes is spread to, when it is not used where it lies.
constexpr std::int64_t kSpreadBytes = 1 << 16;

// ---- rows of the cache, as units ----
// Units<n>(row, unit, half, to): vectors `half` of n units from `unit` on. n divides 8 and `unit`.

// 1..4 bits: word l of a block holds its 8 codes of lane l.
class NarrowRows {
 public:
  NarrowRows(const float* codebook, std::int64_t bits) {
    const DF d;
    HWY_ALIGN float table[16];
    // The index is 4 bits; of narrower codes the upper ones are the neighbour's.
    for (std::int64_t i = 0; i < 16; ++i) table[i] = codebook[i & ((1 << bits) - 1)];
    for (std::int64_t h = 0; h < kHalves; ++h) table_[h] = hn::Load(d, table + h * kWidth);
    for (std::int64_t i = 0; i < kBlock; ++i)
      shift_[i] = hn::Set(DU(), static_cast<std::uint32_t>(i * bits));
  }
  template <int n>
  HWY_INLINE void Units(const std::byte* row, std::int64_t unit, std::int64_t half,
                        VF* HWY_RESTRICT to) const {
    const auto* words = reinterpret_cast<const std::uint32_t*>(row) + unit / kBlock * kUnit;
    const VU word = hn::LoadU(DU(), words + half * kWidth);
    const VU* shift = shift_ + unit % kBlock;
    for (int i = 0; i < n; ++i) to[i] = Lookup(hn::Shr(word, shift[i]));
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
  VU shift_[kBlock];
};

// 5..8 bits: word l of a block holds the first 4 codes of lane l, word 16 + l the others.
class WideRows {
 public:
  WideRows(const float* codebook, std::int64_t bits)
      : codebook_(codebook), mask_(hn::Set(DU(), (1u << bits) - 1)) {
    for (std::int64_t i = 0; i < kBlock / 2; ++i)
      shift_[i] = hn::Set(DU(), static_cast<std::uint32_t>(i * bits));
  }
  template <int n>
  HWY_INLINE void Units(const std::byte* row, std::int64_t unit, std::int64_t half,
                        VF* HWY_RESTRICT to) const {
    const auto* words = reinterpret_cast<const std::uint32_t*>(row) + unit / kBlock * 2 * kUnit +
                        unit % kBlock / 4 * kUnit + half * kWidth;
    for (int at = 0; at < n; at += 4, words += kUnit) {
      const VU word = hn::LoadU(DU(), words);
      const VU* shift = shift_ + (unit + at) % 4;
      for (int i = 0; i < (n < 4 ? n : 4); ++i) {
        const VU code = hn::And(hn::Shr(word, shift[i]), mask_);
        to[at + i] = hn::GatherIndex(DF(), codebook_, hn::BitCast(hn::RebindToSigned<DU>(), code));
      }
    }
  }

 private:
  const float* codebook_;
  VU mask_, shift_[kBlock / 2];
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
void SpreadCodes(const std::uint32_t* row, std::int64_t bits, std::int64_t dim, std::int64_t length,
                 std::uint32_t* words) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(row);
  const std::int64_t row_bytes = packed_words(dim, bits) * 4;
  std::memset(words, 0, static_cast<std::size_t>(length) * (bits > 4 ? 2 : 1) / 2);
  for (std::int64_t lane = 0; lane * 8 < dim; ++lane) {
    const std::int64_t at = lane * bits;
    std::uint64_t codes = 0;
    std::memcpy(&codes, bytes + at,
                static_cast<std::size_t>(at + 8 <= row_bytes ? 8 : row_bytes - at));
    if (bits <= 4) {
      words[lane] = static_cast<std::uint32_t>(codes);
    } else {
      std::uint32_t* to = words + lane / kUnit * 2 * kUnit + lane % kUnit;
      to[0] = static_cast<std::uint32_t>(codes);
      to[kUnit] = static_cast<std::uint32_t>(codes >> 4 * bits);
    }
  }
}

// ---- passing over rows ----

// Consecutive rows in memory.
struct Rows {
  const std::byte* at;
  std::int64_t stride;  // bytes
  std::int64_t count;
};

// The halving tree inside each of `count` <= 16 sets of accumulators; to[n] gets the n-th.
HWY_INLINE void FoldAccumulators(const float (*HWY_RESTRICT acc)[kUnit], float* HWY_RESTRICT to) {
  const DF d;
  for (std::int64_t n = 0; n < kUnit; n += kWidth) {
    VF v[kWidth];
    for (std::int64_t i = 0; i < kWidth; ++i) {
      v[i] = hn::Load(d, acc[n + i]);
      if constexpr (kHalves == 2) v[i] = hn::Add(v[i], hn::Load(d, acc[n + i] + kWidth));
    }
    hn::StoreU(LaneTrees(d, v), d, to + n);
  }
}

template <int n, class Source>
HWY_INLINE void DotUnits(const Source& source, const std::byte* row, std::int64_t unit,
                         const float* const* HWY_RESTRICT q, std::int64_t rows,
                         float (*HWY_RESTRICT acc)[kUnit][kUnit]) {
  const DF d;
  for (std::int64_t half = 0; half < kHalves; ++half) {
    VF k[n];
    source.template Units<n>(row, unit, half, k);
    for (std::int64_t r = 0; r < rows; ++r) {
      float* to = acc[r][0] + half * kWidth;
      const float* from = q[r] + unit * kUnit + half * kWidth;
      VF sum = unit == 0 ? hn::Zero(d) : hn::Load(d, to);
      for (int i = 0; i < n; ++i) sum = hn::MulAdd(hn::LoadU(d, from + i * kUnit), k[i], sum);
      hn::Store(sum, d, to);
    }
  }
}

// dots[r][n] = q[r] . row n
template <class Source>
void Dots(const Source& source, const Rows& k, std::int64_t units, const float* const* q,
          std::int64_t rows, float (*dots)[kSplit], std::int64_t at) {
  HWY_ALIGN float acc[kRowsAtOnce][kUnit][kUnit];
  for (std::int64_t n0 = 0; n0 < k.count; n0 += kUnit) {
    const std::int64_t count = std::min(kUnit, k.count - n0);
    for (std::int64_t n = 0; n < count; ++n) {
      const std::byte* row = k.at + (n0 + n) * k.stride;
      auto* to = reinterpret_cast<float(*)[kUnit][kUnit]>(&acc[0][n]);
      std::int64_t unit = 0;
      for (; unit + 8 <= units; unit += 8) DotUnits<8>(source, row, unit, q, rows, to);
      for (; unit + 4 <= units; unit += 4) DotUnits<4>(source, row, unit, q, rows, to);
      for (; unit < units; ++unit) DotUnits<1>(source, row, unit, q, rows, to);
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t n = count; n < kUnit; ++n) std::fill_n(acc[r][n], kUnit, 0.0f);
      HWY_ALIGN float sums[kUnit];
      FoldAccumulators(acc[r], sums);
      std::copy_n(sums, count, dots[r] + at + n0);
    }
  }
}

// o[r] += w[r][n] * row n, n ascending, for kUnits units and kRows of the rows.
template <int kUnits, int kRows, class Source>
HWY_INLINE void AddUnits(const Source& source, const Rows& v, std::int64_t unit,
                         const float (*HWY_RESTRICT w)[kSplit], std::int64_t at,
                         float* const* HWY_RESTRICT o) {
  const DF d;
  for (std::int64_t half = 0; half < kHalves; ++half) {
    const std::int64_t from = unit * kUnit + half * kWidth;
    VF sum[kRows][kUnits];
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < kUnits; ++i) sum[r][i] = hn::LoadU(d, o[r] + from + i * kUnit);
    for (std::int64_t n = 0; n < v.count; ++n) {
      VF y[kUnits];
      source.template Units<kUnits>(v.at + n * v.stride, unit, half, y);
      for (int r = 0; r < kRows; ++r) {
        const VF weight = hn::Set(d, w[r][at + n]);
        for (int i = 0; i < kUnits; ++i) sum[r][i] = hn::MulAdd(weight, y[i], sum[r][i]);
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < kUnits; ++i) hn::StoreU(sum[r][i], d, o[r] + from + i * kUnit);
  }
}

template <int kRows, class Source>
HWY_NOINLINE void AddRows(const Source& source, const Rows& v, std::int64_t units,
                          const float (*w)[kSplit], std::int64_t at, float* const* o) {
  // As many sums as hide the latency of fma and fit the registers.
  constexpr int kMost = kRows == 1 ? 8 : kRows == 2 || HWY_TARGET <= HWY_AVX3 ? 4 : 2;
  std::int64_t unit = 0;
  for (; unit + kMost <= units; unit += kMost) AddUnits<kMost, kRows>(source, v, unit, w, at, o);
  for (; unit < units; ++unit) AddUnits<1, kRows>(source, v, unit, w, at, o);
}

template <class Source>
void Add(const Source& source, const Rows& v, std::int64_t units, const float (*w)[kSplit],
         std::int64_t at, float* const* o, std::int64_t rows) {
  std::int64_t r = 0;
  for (; r + 4 <= rows; r += 4) AddRows<4>(source, v, units, w + r, at, o + r);
  for (; r + 2 <= rows; r += 2) AddRows<2>(source, v, units, w + r, at, o + r);
  for (; r < rows; ++r) AddRows<1>(source, v, units, w + r, at, o + r);
}

// ---- the int8 kernel: 4-bit codes of K times a query of two bytes ----

// sum of u8 * s8 products, four to a lane.
HWY_INLINE VU DotBytes(VU sum, VB a, VB b) {
#if HWY_TARGET == HWY_AVX3_DL
  // Not the intrinsic: Highway's options for this target leave out avx512vnni, which dispatch asks
  // the CPU for.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
  return sum;
#else
  // 16-bit products of pairs would overflow, so even and odd bytes apart.
  const hn::Repartition<std::int16_t, DF> d16;
  const hn::Repartition<std::uint16_t, DF> du16;
  const auto a16 = hn::BitCast(du16, a);
  const auto b16 = hn::BitCast(d16, b);
  const auto a_even = hn::And(a16, hn::Set(du16, 255)), a_odd = hn::ShiftRight<8>(a16);
  const auto b_even = hn::ShiftRight<8>(hn::ShiftLeft<8>(b16)), b_odd = hn::ShiftRight<8>(b16);
#if HWY_TARGET == HWY_AVX3
  const VU even{_mm512_madd_epi16(a_even.raw, b_even.raw)};
  const VU odd{_mm512_madd_epi16(a_odd.raw, b_odd.raw)};
#else
  const VU even{_mm256_madd_epi16(a_even.raw, b_even.raw)};
  const VU odd{_mm256_madd_epi16(a_odd.raw, b_odd.raw)};
#endif
  return hn::Add(sum, hn::Add(even, odd));
#endif
}

constexpr float kByteScale = 32512;  // 127 * 256

// The codebook in two bytes: c = unit * (256 (high - 128) + low).
class ByteCodes {
 public:
  explicit ByteCodes(const float* codebook) {
    float most = 0;
    for (int i = 0; i < 16; ++i) most = std::max(most, std::fabs(codebook[i]));
    unit_ = most > 0 ? most / kByteScale : 1;
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
    const DF d;
    const DU du;
    const DB db;
    const hn::RebindToSigned<DF> di;
    const VB nibble = hn::Set(db, 15);
    HWY_ALIGN float acc[kRowsAtOnce][kUnit][kUnit];
    for (std::int64_t n0 = 0; n0 < k.count; n0 += kUnit) {
      const std::int64_t count = std::min(kUnit, k.count - n0);
      for (std::int64_t n = 0; n < count; ++n) {
        const auto* row = reinterpret_cast<const std::uint8_t*>(k.at + (n0 + n) * k.stride);
        for (std::int64_t r = 0; r < rows; ++r) {
          for (std::int64_t half = 0; half < kHalves; ++half) {
            VU high = hn::Zero(du), low = hn::Zero(du);
            const std::int8_t* bytes = q[r]->bytes + half * kWidth * 4;
            for (std::int64_t block = 0; block < blocks; ++block, bytes += 256) {
              const VB codes = hn::LoadU(db, row + block * 64 + half * kWidth * 4);
              const auto load = [&](int which) HWY_ATTR {
                return hn::LoadU(db, reinterpret_cast<const std::uint8_t*>(bytes) + which * 64);
              };
              const VB even = hn::And(codes, nibble);
              const VB odd =
                  hn::And(hn::BitCast(db, hn::ShiftRight<4>(hn::BitCast(du, codes))), nibble);
              const VB even_high = hn::TableLookupBytes(high_, even);
              const VB odd_high = hn::TableLookupBytes(high_, odd);
              const VB x_even = load(0), x_odd = load(1);
              high = DotBytes(DotBytes(high, even_high, x_even), odd_high, x_odd);
              low = DotBytes(DotBytes(low, even_high, load(2)), odd_high, load(3));
              low = DotBytes(DotBytes(low, hn::TableLookupBytes(low_, even), x_even),
                             hn::TableLookupBytes(low_, odd), x_odd);
            }
            const auto both = hn::Add(hn::ShiftLeft<8>(high), low);
            hn::Store(hn::ConvertTo(d, hn::BitCast(di, both)), d, acc[r][n] + half * kWidth);
          }
        }
      }
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t n = count; n < kUnit; ++n) std::fill_n(acc[r][n], kUnit, 0.0f);
        HWY_ALIGN float sums[kUnit];
        FoldAccumulators(acc[r], sums);
        const float factor = 256 * unit_ * q[r]->byte_unit;
        for (std::int64_t n = 0; n < count; ++n)
          dots[r][at + n0 + n] = (sums[n] - q[r]->byte_offset) * factor;
      }
    }
  }

 private:
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
  row.byte_unit = !finite    ? std::numeric_limits<float>::quiet_NaN()
                  : most > 0 ? most / kByteScale
                             : 1.0f;
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

// ---- a split ----

// Turns dots into weights: w[n] = p_n, and m, l.
void Softmax(float* HWY_RESTRICT x, std::int64_t count, Partial& to) {
  const DF d;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const std::int64_t padded = round_up(count, kUnit);
  std::fill(x + count, x + padded, kNone);
  VF most = hn::Set(d, kNone);
  for (std::int64_t n = 0; n < padded; n += kWidth) {
    const VF v = hn::Load(d, x + n);
    most = hn::IfThenElse(hn::Gt(v, most), v, most);
  }
  HWY_ALIGN float lane[kUnit];
  hn::Store(most, d, lane);
  float m = kNone;
  for (std::int64_t i = 0; i < kWidth; ++i) m = lane[i] > m ? lane[i] : m;
  const VF base = hn::Set(d, m == kNone ? 0.0f : m);
  VF sum[kHalves];
  for (std::int64_t half = 0; half < kHalves; ++half) sum[half] = hn::Zero(d);
  for (std::int64_t n = 0; n < padded; n += kUnit) {
    for (std::int64_t half = 0; half < kHalves; ++half) {
      float* at = x + n + half * kWidth;
      const VF p = Exp(d, hn::Sub(hn::Load(d, at), base));
      sum[half] = hn::Add(sum[half], p);
      hn::Store(p, d, at);
    }
  }
  if constexpr (kHalves == 2) sum[0] = hn::Add(sum[0], sum[1]);
  to.m = m;
  to.l = LaneTree(d, sum[0], kWidth);
}

float MergeExp(float x, float most) {
  return math::exp(most == -std::numeric_limits<float>::infinity() ? x : x - most);
}

// Merges a split into the state of its row.
void Merge(const Work& w, aura::Region region, const Partial& split, Record& state) {
  const DF d;
  const float most = split.m > state.m ? split.m : state.m;
  const float f = MergeExp(state.m, most), g = MergeExp(split.m, most);
  const bool coded = region == aura::kCoded;
  state.m = most;
  state.l = std::fma(split.l, g, state.l * f);
  state.l_coded = coded ? std::fma(split.l, g, state.l_coded * f) : state.l_coded * f;
  const VF vf = hn::Set(d, f), vg = hn::Set(d, g);
  const auto scale = [&](float* o, std::int64_t length) HWY_ATTR {
    for (std::int64_t j = 0; j < length; j += kWidth)
      hn::Store(hn::Mul(hn::Load(d, o + j), vf), d, o + j);
  };
  const auto add = [&](float* o, std::int64_t length) HWY_ATTR {
    for (std::int64_t j = 0; j < length; j += kWidth) {
      const VF scaled = hn::Mul(hn::Load(d, o + j), vf);
      hn::Store(hn::MulAdd(hn::LoadU(d, split.o + j), vg, scaled), d, o + j);
    }
  };
  if (coded) {
    add(state.o_coded, w.coded_length());
    scale(state.o_exact, w.exact_length());
  } else {
    scale(state.o_coded, w.coded_length());
    add(state.o_exact, w.exact_length());
  }
}

// What one thread keeps while it works.
class Worker {
 public:
  explicit Worker(const Work& w)
      : w_(w),
        d_(w.d),
        k_narrow_(Narrow(d_.k_bits) ? w.a.k_codebook.as<float>() : kNoTable, d_.k_bits),
        v_narrow_(Narrow(d_.v_bits) ? w.a.v_codebook.as<float>() : kNoTable, d_.v_bits),
        k_wide_(w.a.k_codebook.as<float>(), d_.k_bits),
        v_wide_(w.a.v_codebook.as<float>(), d_.v_bits),
        k_bytes_(w.int8 ? w.a.k_codebook.as<float>() : kNoTable) {}

  // The tokens `seen` of one split by `count` <= kRowsAtOnce rows from `first` on.
  void Split(std::int64_t s, std::int64_t head, const aura::Sequence& sequence, aura::Region region,
             aura::Span seen, std::int64_t first, std::int64_t count, float* const* partials) {
    const bool coded = region == aura::kCoded;
    const std::int64_t tokens = seen.end - seen.begin;
    const float* q[kRowsAtOnce];
    float* o[kRowsAtOnce];
    alignas(Record) std::byte storage[kRowsAtOnce][sizeof(Record)];
    const Record* records[kRowsAtOnce];
    for (std::int64_t r = 0; r < count; ++r) {
      records[r] = new (storage[r]) Record(w_, first + r);
      q[r] = coded ? records[r]->r : records[r]->a;
      o[r] = Partial(partials[r]).o;
      std::fill_n(o[r], coded ? w_.coded_length() : w_.exact_length(), 0.0f);
    }
    const std::int64_t units = (coded ? w_.coded_length() : w_.exact_length()) / kUnit;

    HWY_ALIGN float k_scales[kSplit], v_scales[kSplit];
    for (std::int64_t n = 0; n < tokens;) {
      const Place place = Locate(s, head, sequence, region, seen.begin + n, tokens - n);
      if (coded) {
        LoadScales(w_.a.k_scales, place.scale_k, place.count, k_scales + n);
        LoadScales(w_.a.v_scales, place.scale_v, place.count, v_scales + n);
      }
      ForRows(region, place.k, place.count, d_.k_bits, [&](const Rows& k, std::int64_t from) {
        if (coded && w_.int8) {
          k_bytes_.Dots(k, units / kBlock, records, count, x_, n + from);
        } else {
          WithSource(region, d_.k_bits, k_narrow_, k_wide_,
                     [&](const auto& source) { Dots(source, k, units, q, count, x_, n + from); });
        }
      });
      n += place.count;
    }
    const DF d;
    for (std::int64_t r = 0; r < count; ++r) {
      if (coded) {
        const VF b = hn::Set(d, records[r]->b);
        for (std::int64_t n = 0; n < tokens; n += kWidth) {
          const VF x = hn::MulAdd(hn::Load(d, x_[r] + n), hn::Load(d, k_scales + n), b);
          hn::Store(x, d, x_[r] + n);
        }
      }
      Partial to(partials[r]);
      to.seen = 1;
      Softmax(x_[r], tokens, to);
      if (coded) {
        for (std::int64_t n = 0; n < tokens; n += kWidth) {
          const VF weight = hn::Mul(hn::Load(d, x_[r] + n), hn::Load(d, v_scales + n));
          hn::Store(weight, d, x_[r] + n);
        }
      }
    }
    for (std::int64_t n = 0; n < tokens;) {
      const Place place = Locate(s, head, sequence, region, seen.begin + n, tokens - n);
      ForRows(region, place.v, place.count, d_.v_bits, [&](const Rows& v, std::int64_t from) {
        WithSource(region, d_.v_bits, v_narrow_, v_wide_,
                   [&](const auto& source) { Add(source, v, units, x_, n + from, o, count); });
      });
      n += place.count;
    }
  }

 private:
  static constexpr float kNoTable[16] = {};
  static bool Narrow(std::int32_t bits) { return bits <= 4; }

  // Consecutive slots: the rows of k and v, and of scales the index.
  struct Place {
    const std::byte *k, *v;
    std::int64_t scale_k, scale_v, count;
  };
  Place Locate(std::int64_t s, std::int64_t head, const aura::Sequence& sequence,
               aura::Region region, std::int64_t token, std::int64_t limit) const {
    const std::int64_t slot = sequence.slot(region, token);
    std::int64_t count = std::min(limit, sequence.slots[region] - slot);
    const auto& a = w_.a;
    if (region == aura::kCoded) {
      if (d_.page_size != 0) count = std::min(count, d_.page_size - slot % d_.page_size);
      const auto offset = [&](const ConstView& view, std::int64_t row) {
        return aura::row_offset(d_, view, a.block_table, s, head, slot, row);
      };
      return {
          reinterpret_cast<const std::byte*>(a.k_codes.as<std::uint32_t>() +
                                             offset(a.k_codes, packed_words(d_.dim, d_.k_bits))),
          reinterpret_cast<const std::byte*>(a.v_codes.as<std::uint32_t>() +
                                             offset(a.v_codes, packed_words(d_.dim, d_.v_bits))),
          offset(a.k_scales, 1), offset(a.v_scales, 1), count};
    }
    const auto row = [&](const ConstView& view) {
      const std::int64_t at = (s * d_.kv_heads + head) * view.row_stride() + slot * d_.dim;
      return static_cast<const std::byte*>(view.data) +
             at * static_cast<std::int64_t>(size_of(d_.exact));
    };
    return region == aura::kFirst ? Place{row(a.k_first), row(a.v_first), 0, 0, count}
                                  : Place{row(a.k_recent), row(a.v_recent), 0, 0, count};
  }

  void LoadScales(const ConstView& scales, std::int64_t at, std::int64_t count, float* to) const {
    const DF d;
    const auto load = [&](const auto* from) HWY_ATTR {
      std::int64_t n = 0;
      for (; n + kWidth <= count; n += kWidth) hn::StoreU(LoadMath(d, from + n), d, to + n);
      for (; n < count; ++n) to[n] = to_math(from[n]);
    };
    if (d_.f16_scale) {
      load(scales.as<f16>() + at);
    } else {
      load(scales.as<float>() + at);
    }
  }

  // Calls f(rows, index of the first) with rows that are whole units: where they lie, or copied.
  template <class F>
  void ForRows(aura::Region region, const std::byte* at, std::int64_t count, std::int64_t bits,
               const F& f) {
    if (region == aura::kCoded) {
      const std::int64_t length = w_.coded_length(), stride = packed_words(d_.dim, bits) * 4;
      if (bits == 4 && d_.dim == length) return f(Rows{at, stride, count}, 0);
      const std::int64_t bytes = length / 2 * (bits > 4 ? 2 : 1), most = kSpreadBytes / bytes;
      for (std::int64_t from = 0; from < count; from += most) {
        const std::int64_t n = std::min(most, count - from);
        for (std::int64_t i = 0; i < n; ++i) {
          SpreadCodes(reinterpret_cast<const std::uint32_t*>(at + (from + i) * stride), bits,
                      d_.dim, length, reinterpret_cast<std::uint32_t*>(spread_ + i * bytes));
        }
        f(Rows{spread_, bytes, n}, from);
      }
      return;
    }
    const auto size = static_cast<std::int64_t>(size_of(d_.exact));
    const std::int64_t stride = d_.dim * size, bytes = w_.exact_length() * size;
    if (stride == bytes) return f(Rows{at, stride, count}, 0);
    const std::int64_t most = kSpreadBytes / bytes;
    for (std::int64_t from = 0; from < count; from += most) {
      const std::int64_t n = std::min(most, count - from);
      for (std::int64_t i = 0; i < n; ++i) {
        std::memcpy(spread_ + i * bytes, at + (from + i) * stride,
                    static_cast<std::size_t>(stride));
        std::memset(spread_ + i * bytes + stride, 0, static_cast<std::size_t>(bytes - stride));
      }
      f(Rows{spread_, bytes, n}, from);
    }
  }

  template <class F>
  void WithSource(aura::Region region, std::int32_t bits, const NarrowRows& narrow,
                  const WideRows& wide, const F& f) const {
    if (region != aura::kCoded) {
      (void)visit<float, f16, bf16>(d_.exact, [&]<class E>(Type<E>) {
        f(ExactRows<E>());
        return Status();
      });
    } else if (Narrow(bits)) {
      f(narrow);
    } else {
      f(wide);
    }
  }

  const Work& w_;
  const AuraAttentionDesc& d_;
  NarrowRows k_narrow_, v_narrow_;
  WideRows k_wide_, v_wide_;
  ByteCodes k_bytes_;
  HWY_ALIGN float x_[kRowsAtOnce][kSplit];  // logits, then weights
  HWY_ALIGN std::byte spread_[kSpreadBytes];
};

// ---- tasks ----

// KV head and queries of a task. The rows of a task are consecutive records.
struct Task {
  std::int64_t s, head, query, queries;
  std::int64_t first_row, rows;

  Task(const Work& w, std::int64_t index) {
    const std::int64_t block = index % w.query_blocks(), at = index / w.query_blocks();
    s = at / w.d.kv_heads;
    head = at % w.d.kv_heads;
    query = block * w.queries_at_once();
    queries = std::min(w.queries_at_once(), w.d.queries - query);
    first_row = (at * w.d.queries + query) * w.d.group();
    rows = queries * w.d.group();
  }
  std::int64_t query_of(const Work& w, std::int64_t row) const { return query + row / w.d.group(); }
  // The row of q and out, in elements.
  std::int64_t offset(const Work& w, const ConstView& view, std::int64_t row) const {
    const std::int64_t h = head * w.d.group() + row % w.d.group();
    return s * view.row_stride() + (query_of(w, row) * w.d.heads + h) * w.d.dim;
  }
};

float Dot(const float* a, const float* b, std::int64_t dim) {
  HWY_ALIGN float acc[kUnit] = {};
  for (std::int64_t j = 0; j < dim; ++j) acc[j % kUnit] = std::fma(a[j], b[j], acc[j % kUnit]);
  for (std::int64_t stride = kUnit / 2; stride > 0; stride /= 2)
    for (std::int64_t i = 0; i < stride; ++i) acc[i] += acc[i + stride];
  return acc[0];
}

// Element j of a coded row in units.
std::int64_t CodedPosition(std::int64_t j) { return j / 128 * 128 + j % 8 * kUnit + j / 8 % kUnit; }

// The queries of a task in both bases, and empty states.
void Prepare(const Work& w, const Task& task) {
  const auto& d = w.d;
  const float scale = d.softmax_scale();
  const RowRotation rotation(d.k_rotation, d.dim, w.a.k_table.as<float>());
  const auto dim = d.dim;
  for (std::int64_t n = 0; n < task.rows; n += kRowsAtOnce) {
    const std::int64_t count = std::min(kRowsAtOnce, task.rows - n);
    HWY_ALIGN float rotated[kRowsAtOnce][kAuraMaxDim];
    for (std::int64_t i = 0; i < count; ++i) {
      const Record row(w, task.first_row + n + i);
      std::fill_n(row.a, w.record_length(), 0.0f);
      (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
        const X* q = w.a.q.as<X>() + task.offset(w, w.a.q, n + i);
        for (std::int64_t j = 0; j < dim; ++j) row.a[j] = to_math(q[j]) * scale;
        return Status();
      });
      std::copy_n(row.a, dim, rotated[i]);
    }
    rotation.Apply(rotated[0], kAuraMaxDim, count, false);
    for (std::int64_t i = 0; i < count; ++i) {
      Record row(w, task.first_row + n + i);
      for (std::int64_t j = 0; j < dim; ++j) row.r[CodedPosition(j)] = rotated[i][j];
      const bool sink = w.a.sinks.data != nullptr;
      row.m = sink ? w.a.sinks.as<float>()[task.head * d.group() + (n + i) % d.group()]
                   : -std::numeric_limits<float>::infinity();
      row.l = sink ? 1.0f : 0.0f;
      if (w.a.k_mean) row.b = Dot(row.a, w.a.k_mean.as<float>() + task.head * dim, dim);
      if (w.int8) MakeBytes(w, row);
    }
  }
}

// The outputs of a task from its states.
void Finish(const Work& w, const Task& task) {
  const auto& d = w.d;
  const RowRotation rotation(d.v_rotation, d.dim, w.a.v_table.as<float>());
  for (std::int64_t n = 0; n < task.rows; n += kRowsAtOnce) {
    const std::int64_t count = std::min(kRowsAtOnce, task.rows - n);
    HWY_ALIGN float u[kRowsAtOnce][kAuraMaxDim];
    for (std::int64_t i = 0; i < count; ++i) {
      const Record row(w, task.first_row + n + i);
      for (std::int64_t j = 0; j < d.dim; ++j) u[i][j] = row.o_coded[CodedPosition(j)];
    }
    rotation.Apply(u[0], kAuraMaxDim, count, true);
    for (std::int64_t i = 0; i < count; ++i) {
      const Record row(w, task.first_row + n + i);
      if (w.a.v_mean) {
        const float* mean = w.a.v_mean.as<float>() + task.head * d.dim;
        for (std::int64_t j = 0; j < d.dim; ++j) u[i][j] = std::fma(row.l_coded, mean[j], u[i][j]);
      }
      (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
        X* out = w.a.out.as<X>() + task.offset(w, w.a.out, n + i);
        for (std::int64_t j = 0; j < d.dim; ++j)
          out[j] = from_math<X>(row.l == 0 ? 0.0f : (u[i][j] + row.o_exact[j]) / row.l);
        return Status();
      });
    }
  }
}

// Split `split` of a region by all rows of the task; merged(row, partial) follows for each row that
// saw a token of it. to(row) is where its sums go.
template <class To, class Merged>
void RunSplit(const Work& w, Worker& worker, const Task& task, const aura::Sequence& sequence,
              aura::Region region, std::int64_t split, const To& to, const Merged& merged) {
  const auto seen_by = [&](std::int64_t row) {
    const aura::Span all = sequence.seen(w.d, task.query_of(w, row), region);
    return aura::Span{std::max(all.begin, split * kSplit), std::min(all.end, (split + 1) * kSplit)};
  };
  for (std::int64_t row = 0, next; row < task.rows; row = next) {
    const aura::Span seen = seen_by(row);
    for (next = row + 1; next < task.rows && next < row + kRowsAtOnce && seen_by(next) == seen;)
      ++next;
    if (seen.empty()) continue;
    float* partials[kRowsAtOnce];
    for (std::int64_t r = row; r < next; ++r) partials[r - row] = to(r);
    worker.Split(task.s, task.head, sequence, region, seen, task.first_row + row, next - row,
                 partials);
    for (std::int64_t r = row; r < next; ++r) merged(r, Partial(partials[r - row]));
  }
}

constexpr aura::Region kInOrder[] = {aura::kFirst, aura::kCoded, aura::kRecent};

// Whole tasks: splits are merged as they come.
void RunTasks(const Work& w, std::int64_t begin, std::int64_t end) {
  Worker worker(w);
  HWY_ALIGN float sums[kRowsAtOnce][kUnit + kAuraMaxDim];
  for (std::int64_t index = begin; index < end; ++index) {
    const Task task(w, index);
    const aura::Sequence sequence(w.d, w.a, task.s);
    Prepare(w, task);
    for (const aura::Region region : kInOrder) {
      const std::int64_t splits = (sequence.tokens[region] + kSplit - 1) / kSplit;
      for (std::int64_t split = 0; split < splits; ++split) {
        RunSplit(
            w, worker, task, sequence, region, split,
            [&](std::int64_t row) { return sums[row % kRowsAtOnce]; },
            [&](std::int64_t row, const Partial& partial) {
              Record state(w, task.first_row + row);
              Merge(w, region, partial, state);
            });
      }
    }
    Finish(w, task);
  }
}

// Few tasks: every (task, split) leaves its sums in the workspace...
void PrepareTasks(const Work& w, std::int64_t begin, std::int64_t end) {
  for (std::int64_t index = begin; index < end; ++index) Prepare(w, Task(w, index));
}
void RunSplits(const Work& w, std::int64_t begin, std::int64_t end) {
  Worker worker(w);
  for (std::int64_t at = begin; at < end; ++at) {
    const Task task(w, at / w.all_splits());
    const aura::Sequence sequence(w.d, w.a, task.s);
    const std::int64_t split = at % w.all_splits();
    std::int64_t in_region = split;
    aura::Region region = aura::kFirst;
    for (const aura::Region r : kInOrder) {
      region = r;
      if (in_region < w.splits(r)) break;
      in_region -= w.splits(r);
    }
    for (std::int64_t row = 0; row < task.rows; ++row)
      Partial(w.partial(task.first_row + row, split)).seen = 0;
    RunSplit(
        w, worker, task, sequence, region, in_region,
        [&](std::int64_t row) { return w.partial(task.first_row + row, split); },
        [](std::int64_t, const Partial&) {});
  }
}
// ... which are merged afterwards, in the same order.
void FinishTasks(const Work& w, std::int64_t begin, std::int64_t end) {
  for (std::int64_t index = begin; index < end; ++index) {
    const Task task(w, index);
    for (std::int64_t row = task.first_row; row < task.first_row + task.rows; ++row) {
      Record state(w, row);
      std::int64_t split = 0;
      for (const aura::Region region : kInOrder) {
        for (std::int64_t n = 0; n < w.splits(region); ++n, ++split) {
          const Partial partial(w.partial(row, split));
          if (partial.seen != 0) Merge(w, region, partial, state);
        }
      }
    }
    Finish(w, task);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = AuraAttention;
BITTERN_EXPORT(RunTasks);
BITTERN_EXPORT(PrepareTasks);
BITTERN_EXPORT(RunSplits);
BITTERN_EXPORT(FinishTasks);

Status supports(const Op::Desc&) { return cpu::supported(); }
Status supports_int8(const Op::Desc& d) {
  if (d.k_bits != 4) return unsupported("k_bits: " + std::to_string(d.k_bits) + ", expected 4");
  return cpu::supported();
}

template <bool kInt8>
std::size_t workspace(const Op::Desc& d) {
  const Op::Args none;
  const Work w{d, none, kInt8, nullptr, nullptr};
  return static_cast<std::size_t>(w.rows() * w.record_length() + w.partials_length()) *
         sizeof(float);
}

template <bool kInt8>
Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace workspace) {
  Work w{d, a, kInt8, static_cast<float*>(workspace.data), nullptr};
  w.partials = w.records + w.rows() * w.record_length();
  const std::int64_t tokens = std::max<std::int64_t>(d.first + d.capacity + d.recent, 1);
  const auto share = [&](std::int64_t of) {  // tasks that are worth another thread
    return std::max<std::int64_t>(cpu::kGrain / std::max<std::int64_t>(of, 1), 1);
  };
  const std::int64_t row_work = d.group() * w.queries_at_once() * d.dim;
  if (!w.by_split()) {
    cpu::parallel(w.tasks(), share(row_work * tokens), [&](std::int64_t begin, std::int64_t end) {
      BITTERN_CALL(RunTasks)(w, begin, end);
    });
    return {};
  }
  cpu::parallel(w.tasks(), share(row_work), [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(PrepareTasks)(w, begin, end);
  });
  cpu::parallel(
      w.tasks() * w.all_splits(), share(row_work * kSplit),
      [&](std::int64_t begin, std::int64_t end) { BITTERN_CALL(RunSplits)(w, begin, end); });
  cpu::parallel(w.tasks(), share(row_work), [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(FinishTasks)(w, begin, end);
  });
  return {};
}

// Logits from integers: every sum is exact, so the bits are still the same on every target.
PrecisionGuarantee int8_guarantee(const Op::Desc&) {
  return {
      .math_precision = DType::s8, .accumulator = DType::s32, .same_bits_on_all_backends = false};
}

constexpr Kernel<Op> kKernels[] = {{.name = "cpu_int8",
                                    .backend = "cpu",
                                    .weaker = int8_guarantee,
                                    .supports = supports_int8,
                                    .workspace = workspace<true>,
                                    .architecture = cpu::architecture,
                                    .run = run<true>},
                                   {.name = "cpu",
                                    .backend = "cpu",
                                    .supports = supports,
                                    .workspace = workspace<false>,
                                    .architecture = cpu::architecture,
                                    .run = run<false>}};

}  // namespace

std::span<const Kernel<AuraAttention>> aura_attention_cpu() { return kKernels; }

}  // namespace bittern
#endif
