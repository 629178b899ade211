#include <bit>
#include <cstring>
#include <limits>

#include "bittern/ops/aura_attention.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "ops/aura/aura_attention/walk.h"
#include "plan/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/aura/aura_attention/aura_attention_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/math-inl.h"
#include "cpu/reduce-inl.h"
#include "ops/aura/rotate-inl.h"

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

// ---- rows of the cache, as units ----
// Units<n>(row, unit, half, to): vectors `half` of n units from `unit` on. n divides 8, and `unit`.
// Copied where they are used, so that what they hold stays in registers.

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

// 5..8 bits: word l of a block holds the first 4 codes of lane l, word 16 + l the others.
class WideRows {
 public:
  WideRows(const float* codebook, int bits) : codebook_(codebook), bits_(bits) {}
  template <int n>
  HWY_INLINE void Units(const std::byte* row, std::int64_t unit, std::int64_t half,
                        VF* HWY_RESTRICT to) const {
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
  std::int64_t bits() const { return bits_; }
  std::int64_t bytes() const { return round_up(dim_, kUnit * kBlock) / 2 * (bits_ > 4 ? 2 : 1); }

  void operator()(const std::byte* row, std::byte* to) const {
#if HWY_TARGET == HWY_AVX3_DL
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

// ---- passing over rows ----

// Consecutive rows in memory.
struct Rows {
  const std::byte* at;
  std::int64_t stride;  // bytes
  std::int64_t count;
};

// The halving tree inside each of 16 sets of accumulators; to[n] gets the n-th.
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

// acc[r][n] += the products of some units of row n and of q[r]; from 0 for the first unit.
template <int kUnits, int kRows, class Source>
HWY_INLINE void DotUnits(const Source& source_, const Rows& k, std::int64_t unit,
                         const float* const* q, float (*HWY_RESTRICT acc)[kUnit][kUnit]) {
  const DF d;
  const Source source = source_;
  for (std::int64_t half = 0; half < kHalves; ++half) {
    const std::int64_t from = unit * kUnit + half * kWidth;
    // A single row's query stays in registers.
    VF held[kUnits];
    for (int i = 0; i < kUnits; ++i) held[i] = hn::LoadU(d, q[0] + from + i * kUnit);
    for (std::int64_t n = 0; n < k.count; ++n) {
      VF y[kUnits];
      source.template Units<kUnits>(k.at + n * k.stride, unit, half, y);
      for (int r = 0; r < kRows; ++r) {
        float* to = acc[r][n] + half * kWidth;
        VF sum = unit == 0 ? hn::Zero(d) : hn::Load(d, to);
        for (int i = 0; i < kUnits; ++i) {
          const VF a = r == 0 ? held[i] : hn::LoadU(d, q[r] + from + i * kUnit);
          sum = hn::MulAdd(a, y[i], sum);
        }
        hn::Store(sum, d, to);
      }
    }
  }
}

template <int kRows, class Source>
HWY_NOINLINE void DotRows(const Source& source, const Rows& k, std::int64_t units,
                          const float* const* q, float (*acc)[kUnit][kUnit]) {
  std::int64_t unit = 0;
  for (; unit + 8 <= units; unit += 8) DotUnits<8, kRows>(source, k, unit, q, acc);
  for (; unit + 4 <= units; unit += 4) DotUnits<4, kRows>(source, k, unit, q, acc);
  for (; unit < units; ++unit) DotUnits<1, kRows>(source, k, unit, q, acc);
}

// dots[r][at + n] = q[r] . row n
template <class Source>
void Dots(const Source& source, const Rows& k, std::int64_t units, const float* const* q,
          std::int64_t rows, float (*dots)[kSplit], std::int64_t at) {
  HWY_ALIGN float acc[4][kUnit][kUnit];
  for (std::int64_t n = 0; n < k.count; n += kUnit) {
    const Rows some{k.at + n * k.stride, k.stride, std::min(kUnit, k.count - n)};
    for (std::int64_t r = 0, done; r < rows; r += done) {
      done = rows - r >= 4 ? 4 : rows - r >= 2 ? 2 : 1;
      if (done == 4) {
        DotRows<4>(source, some, units, q + r, acc);
      } else if (done == 2) {
        DotRows<2>(source, some, units, q + r, acc);
      } else {
        DotRows<1>(source, some, units, q + r, acc);
      }
      for (std::int64_t i = 0; i < done; ++i) {
        for (std::int64_t t = some.count; t < kUnit; ++t) std::fill_n(acc[i][t], kUnit, 0.0f);
        HWY_ALIGN float sums[kUnit];
        FoldAccumulators(acc[i], sums);
        std::copy_n(sums, some.count, dots[r + i] + at + n);
      }
    }
  }
}

// o[r] += w[r][at + n] * row n, n ascending, for kUnits units and kRows of the rows.
template <int kUnits, int kRows, class Source>
HWY_INLINE void AddUnits(const Source& source_, const Rows& v, std::int64_t unit,
                         const float (*HWY_RESTRICT w)[kSplit], std::int64_t at,
                         float* const* HWY_RESTRICT o) {
  const DF d;
  const Source source = source_;
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
    HWY_ALIGN float acc[kUnit][kUnit];
    for (std::int64_t n = 0; n < k.count; n += kUnit) {
      const Rows some{k.at + n * k.stride, k.stride, std::min(kUnit, k.count - n)};
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t block = 0; block < blocks; ++block)
          DotBlock(some, block, q[r]->bytes + block * 256, acc);
        for (std::int64_t t = some.count; t < kUnit; ++t) std::fill_n(acc[t], kUnit, 0.0f);
        HWY_ALIGN float sums[kUnit];
        FoldAccumulators(acc, sums);
        const float factor = 256 * unit_ * q[r]->byte_unit;
        for (std::int64_t t = 0; t < some.count; ++t)
          dots[r][at + n + t] = (sums[t] - q[r]->byte_offset) * factor;
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
    unit_ = most > 0 ? most / 2047 : 1;
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
        spread_k_(d_.k_bits, d_.dim),
        spread_v_(d_.v_bits, d_.dim),
        k_bytes_(w.int8 ? w.a.k_codebook.as<float>() : kNoTable)
#if HWY_TARGET <= HWY_AVX3
        ,
        v_shorts_(w.int8 && d_.v_bits == 4 ? w.a.v_codebook.as<float>() : kNoTable)
#endif
  {
  }

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
    ForPlaces(s, head, sequence, region, seen, [&](const Place& place, std::int64_t n) {
      if (coded) {
        Prefetch(place.v, place.v_stride, place.count);
        LoadScales(w_.a.k_scales, place.scale_k, place.count, k_scales + n);
        LoadScales(w_.a.v_scales, place.scale_v, place.count, v_scales + n);
      }
      const Rows k = WholeUnits(region, {place.k, place.k_stride, place.count}, spread_k_);
      if (coded && w_.int8) {
        k_bytes_.Dots(k, units / kBlock, records, count, x_, n);
      } else {
        WithSource(region, d_.k_bits, w_.a.k_codebook,
                   [&](const auto& source) { Dots(source, k, units, q, count, x_, n); });
      }
    });
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
#if HWY_TARGET <= HWY_AVX3
    const bool shorts = coded && w_.int8 && d_.v_bits == 4;
    float unit[kRowsAtOnce];
    for (std::int64_t r = 0; shorts && r < count; ++r)
      unit[r] = v_shorts_.MakeShorts(x_[r], tokens, w_shorts_[r]);
#endif
    // While these are added, the next split's rows of K come in. (Longer rows the CPU fetches ahead
    // by itself, and better.)
    const aura::Span next{seen.begin + kSplit,
                          coded ? std::min(seen.end + kSplit, sequence.tokens[region]) : 0};
    ForPlaces(s, head, sequence, region, seen, [&](const Place& place, std::int64_t n) {
      for (aura::Span some{next.begin + n, std::min(next.begin + n + place.count, next.end)};
           !some.empty();) {
        const Place ahead = Locate(s, head, sequence, region, some.begin, some.end - some.begin);
        Prefetch(ahead.k, ahead.k_stride, ahead.count);
        some.begin += ahead.count;
      }
      const Rows v = WholeUnits(region, {place.v, place.v_stride, place.count}, spread_v_);
#if HWY_TARGET <= HWY_AVX3
      if (shorts) return v_shorts_.Add(v, units / kBlock, w_shorts_, n, o, count);
#endif
      WithSource(region, d_.v_bits, w_.a.v_codebook,
                 [&](const auto& source) { Add(source, v, units, x_, n, o, count); });
    });
#if HWY_TARGET <= HWY_AVX3
    for (std::int64_t r = 0; shorts && r < count; ++r) {
      const VF factor = hn::Set(d, unit[r]);
      for (std::int64_t j = 0; j < units * kUnit; j += kWidth) {
        const auto sum =
            hn::LoadU(hn::RebindToSigned<DF>(), reinterpret_cast<const std::int32_t*>(o[r] + j));
        hn::StoreU(hn::Mul(hn::ConvertTo(d, sum), factor), d, o[r] + j);
      }
    }
#endif
  }

 private:
  static constexpr float kNoTable[16] = {};

  // Consecutive slots: the rows of k and v, and of scales the index.
  struct Place {
    const std::byte *k, *v;
    std::int64_t k_stride, v_stride;  // bytes
    std::int64_t scale_k, scale_v, count;
  };
  // Few enough that what is fetched ahead of them is still there when its turn comes.
  static constexpr std::int64_t kRowsInTurn = 32;
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
      const std::int64_t k_words = packed_words(d_.dim, d_.k_bits);
      const std::int64_t v_words = packed_words(d_.dim, d_.v_bits);
      const auto* k = a.k_codes.as<std::uint32_t>() + offset(a.k_codes, k_words);
      const auto* v = a.v_codes.as<std::uint32_t>() + offset(a.v_codes, v_words);
      return {reinterpret_cast<const std::byte*>(k),
              reinterpret_cast<const std::byte*>(v),
              4 * k_words,
              4 * v_words,
              offset(a.k_scales, 1),
              offset(a.v_scales, 1),
              count};
    }
    const auto size = static_cast<std::int64_t>(size_of(d_.exact));
    const auto row = [&](const ConstView& view) {
      return static_cast<const std::byte*>(view.data) +
             aura::exact_offset(d_, view, s, head, slot) * size;
    };
    const ConstView& k = region == aura::kFirst ? a.k_first : a.k_recent;
    const ConstView& v = region == aura::kFirst ? a.v_first : a.v_recent;
    return {row(k), row(v), aura::exact_stride(k) * size, aura::exact_stride(v) * size, 0,
            0,      count};
  }
  // Calls f(place, index of its first token in the span) for consecutive slots that hold the span.
  template <class F>
  void ForPlaces(std::int64_t s, std::int64_t head, const aura::Sequence& sequence,
                 aura::Region region, aura::Span span, const F& f) const {
    for (std::int64_t token = span.begin; token < span.end;) {
      const std::int64_t limit = std::min(span.end - token, kRowsInTurn);
      const Place place = Locate(s, head, sequence, region, token, limit);
      f(place, token - span.begin);
      token += place.count;
    }
  }
  static void Prefetch(const std::byte* at, std::int64_t stride, std::int64_t count) {
    for (std::int64_t line = 0; line < stride * count; line += 64)
      __builtin_prefetch(at + line, 0, 2);
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

  // The rows in whole units: where they lie, or copied.
  Rows WholeUnits(aura::Region region, const Rows& rows, const CodeSpreader& spreader) {
    const bool coded = region == aura::kCoded;
    const std::int64_t bytes =
        coded ? spreader.bytes() : w_.exact_length() * static_cast<std::int64_t>(size_of(d_.exact));
    const std::int64_t row =
        coded ? rows.stride : d_.dim * static_cast<std::int64_t>(size_of(d_.exact));
    if (bytes == row && !(coded && spreader.bits() != 4)) return rows;
    for (std::int64_t n = 0; n < rows.count; ++n) {
      const std::byte* from = rows.at + n * rows.stride;
      std::byte* to = copies_ + n * bytes;
      if (coded) {
        spreader(from, to);
      } else {
        std::memcpy(to, from, static_cast<std::size_t>(row));
        std::memset(to + row, 0, static_cast<std::size_t>(bytes - row));
      }
    }
    return {copies_, bytes, rows.count};
  }

  template <class F>
  void WithSource(aura::Region region, std::int32_t bits, const ConstView& codebook,
                  const F& f) const {
    if (region != aura::kCoded) {
      (void)visit<float, f16, bf16>(d_.exact, [&]<class E>(Type<E>) {
        f(ExactRows<E>());
        return Status();
      });
    } else if (bits == 4) {
      f(NarrowRows<true>(codebook.as<float>(), bits));
    } else if (bits < 4) {
      f(NarrowRows<false>(codebook.as<float>(), bits));
    } else {
      f(WideRows(codebook.as<float>(), bits));
    }
  }

  const Work& w_;
  const AuraAttentionDesc& d_;
  CodeSpreader spread_k_, spread_v_;
  ByteCodes k_bytes_;
#if HWY_TARGET <= HWY_AVX3
  ShortCodes v_shorts_;
  HWY_ALIGN std::int16_t w_shorts_[kRowsAtOnce][kSplit];
#endif
  HWY_ALIGN float x_[kRowsAtOnce][kSplit];  // logits, then weights
  HWY_ALIGN std::byte copies_[kRowsInTurn * kAuraMaxDim * 4];
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
    return view.at(s, query_of(w, row), h);
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

// AVX2 takes V's codes as the exact kernel does, so the bits depend on the target.
PrecisionGuarantee int8_guarantee(const Op::Desc&) {
  return {.math_precision = DType::s8,
          .accumulator = DType::s32,
          .bit_stable_on_same_hardware = false,
          .same_bits_on_all_backends = false};
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
