// A chunk of a row at a time: its blocks' codes and grids are unpacked into L1, one function per
// type; what turns these into weights then knows groups alone.
#include <bit>

#include "bittern/ops/gguf_dequantize.h"
#include "cpu/code_chunks.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gguf/gguf_dequantize/gguf_dequantize_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/stream-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = GgufDequantize;

constexpr hn::FixedTag<std::uint8_t, 32> kBytes;
constexpr hn::FixedTag<std::uint8_t, 16> kHalfBytes;
using Bytes = hn::Vec<decltype(kBytes)>;

// Codes of a chunk and the grids of its groups, w = s * code - m.
struct Unpacked {
  alignas(64) std::int8_t codes[cpu::kCodeChunk];
  alignas(64) float s[cpu::kCodeChunk / 16], m[cpu::kCodeChunk / 16];
};

HWY_INLINE float HalfAt(const std::uint8_t* p) {
  const hn::CappedTag<float, 1> d;
  const hn::Rebind<hwy::float16_t, decltype(d)> dh;
  return hn::GetLane(hn::PromoteTo(d, hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(p))));
}

HWY_INLINE std::uint32_t WordAt(const std::uint8_t* p) {
  std::uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

// Bits [kFirst, kFirst + kCount) of every byte.
template <int kFirst, int kCount>
HWY_INLINE Bytes BitsOf(Bytes v) {
  const hn::RepartitionToWide<decltype(kBytes)> d16;
  const auto low = hn::BitCast(kBytes, hn::ShiftRight<kFirst>(hn::BitCast(d16, v)));
  return hn::And(low, hn::Set(kBytes, static_cast<std::uint8_t>((1 << kCount) - 1)));
}

// Bits [kFirst, kFirst + kCount) moved to bit kTo.
template <int kFirst, int kCount, int kTo>
HWY_INLINE Bytes BitsTo(Bytes v) {
  const hn::RepartitionToWide<decltype(kBytes)> d16;
  const auto wide = hn::BitCast(d16, v);
  const auto moved = [&]() HWY_ATTR {
    if constexpr (kTo >= kFirst) {
      return hn::ShiftLeft<kTo - kFirst>(wide);
    } else {
      return hn::ShiftRight<kFirst - kTo>(wide);
    }
  }();
  const auto mask = static_cast<std::uint8_t>(((1 << kCount) - 1) << kTo);
  return hn::And(hn::BitCast(kBytes, moved), hn::Set(kBytes, mask));
}

// Codes less their offset.
template <int kOffset = 0>
HWY_INLINE void StoreCodes(Bytes q, std::int8_t* codes) {
  auto* to = reinterpret_cast<std::uint8_t*>(codes);
  if constexpr (kOffset != 0) q = hn::Sub(q, hn::Set(kBytes, std::uint8_t{kOffset}));
  hn::StoreU(q, kBytes, to);
}

// Low halves of 16 bytes, then their high halves.
HWY_INLINE Bytes Nibbles(const std::uint8_t* qs) {
  const auto v = hn::LoadU(kHalfBytes, qs);
  const auto high =
      hn::ShiftRight<4>(hn::BitCast(hn::RepartitionToWide<decltype(kHalfBytes)>(), v));
  return hn::And(hn::Combine(kBytes, hn::BitCast(kHalfBytes, high), v),
                 hn::Set(kBytes, std::uint8_t{15}));
}

// The table's values of codes 0..15.
HWY_INLINE Bytes ValuesOf(const std::int8_t (&table)[16], Bytes q) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(table);
  return hn::TableLookupBytes(hn::LoadDup128(kBytes, bytes), q);
}

// 2^(e - 128): a number with an exponent of its own, or one of the two below these.
HWY_INLINE float PowerOf(std::uint8_t e) {
  return std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1u) << 23);
}

// 16 where a bit of the 32 is set.
HWY_INLINE Bytes FifthBits(const std::uint8_t* qh) {
  return hn::IfThenElseZero(hn::LoadMaskBits(kBytes, qh), hn::Set(kBytes, std::uint8_t{16}));
}

// to[i] = scale * sc[i]
template <class T>
HWY_INLINE void Scale(float scale, const T* sc, float* to) {
  const hn::FixedTag<float, 8> d;
  const hn::Rebind<std::int32_t, decltype(d)> di;
  const auto integers = hn::PromoteTo(di, hn::LoadU(hn::Rebind<T, decltype(d)>(), sc));
  hn::StoreU(hn::Mul(hn::Set(d, scale), hn::ConvertTo(d, integers)), d, to);
}

// The eight 6-bit scales and minima of Q4_K and Q5_K.
HWY_INLINE void ScalesAndMins(const std::uint8_t* block, float* s, float* m) {
  const std::uint32_t a = WordAt(block + 4), b = WordAt(block + 8), c = WordAt(block + 12);
  const std::uint32_t sc[2] = {a & 0x3f3f3f3fu, (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u)};
  const std::uint32_t mn[2] = {b & 0x3f3f3f3fu, (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u)};
  Scale(HalfAt(block), reinterpret_cast<const std::uint8_t*>(sc), s);
  Scale(HalfAt(block + 2), reinterpret_cast<const std::uint8_t*>(mn), m);
}

// A lambda's argument that is a constant expression, for k = 0 .. n - 1.
template <int... k, class F>
HWY_INLINE void Unroll(std::integer_sequence<int, k...>, F&& f) {
  (f(std::integral_constant<int, k>()), ...);
}
template <int n>
constexpr std::make_integer_sequence<int, n> kTimes{};

// One block.
template <BlockType kType>
HWY_INLINE void Unpack(const std::uint8_t* block, std::int8_t* codes, float* s, float* m) {
  if constexpr (kType == BlockType::q4_0) {
    s[0] = HalfAt(block), m[0] = 0;
    StoreCodes<8>(Nibbles(block + 2), codes);
  } else if constexpr (kType == BlockType::q4_1) {
    s[0] = HalfAt(block), m[0] = -HalfAt(block + 2);
    StoreCodes(Nibbles(block + 4), codes);
  } else if constexpr (kType == BlockType::q5_0) {
    s[0] = HalfAt(block), m[0] = 0;
    StoreCodes<16>(hn::Or(Nibbles(block + 6), FifthBits(block + 2)), codes);
  } else if constexpr (kType == BlockType::q5_1) {
    s[0] = HalfAt(block), m[0] = -HalfAt(block + 2);
    StoreCodes(hn::Or(Nibbles(block + 8), FifthBits(block + 4)), codes);
  } else if constexpr (kType == BlockType::q8_0) {
    s[0] = HalfAt(block), m[0] = 0;
    StoreCodes(hn::LoadU(kBytes, block + 2), codes);
  } else if constexpr (kType == BlockType::q2_k) {
    const float d = HalfAt(block + 80), dmin = HalfAt(block + 82);
    const auto scales = hn::LoadU(kHalfBytes, block);
    alignas(16) std::uint8_t sc[16], mn[16];
    hn::Store(hn::And(scales, hn::Set(kHalfBytes, std::uint8_t{15})), kHalfBytes, sc);
    hn::Store(hn::ShiftRight<4>(scales), kHalfBytes, mn);
    for (int i = 0; i < 16; i += 8) {
      Scale(d, sc + i, s + i);
      Scale(dmin, mn + i, m + i);
    }
    for (int h = 0; h < 2; ++h) {
      const auto qs = hn::LoadU(kBytes, block + 16 + 32 * h);
      Unroll(kTimes<4>,
             [&](auto k) HWY_ATTR { StoreCodes(BitsOf<2 * k, 2>(qs), codes + 128 * h + 32 * k); });
    }
  } else if constexpr (kType == BlockType::q3_k) {
    const std::uint32_t a = WordAt(block + 96), b = WordAt(block + 100), c = WordAt(block + 104);
    const std::uint32_t sc[4] = {(a & 0x0f0f0f0fu) | (c << 4 & 0x30303030u),
                                 (b & 0x0f0f0f0fu) | (c << 2 & 0x30303030u),
                                 (a >> 4 & 0x0f0f0f0fu) | (c & 0x30303030u),
                                 (b >> 4 & 0x0f0f0f0fu) | (c >> 2 & 0x30303030u)};
    const auto packed = hn::LoadU(kHalfBytes, reinterpret_cast<const std::uint8_t*>(sc));
    alignas(16) std::int8_t scales[16];
    hn::Store(hn::Sub(packed, hn::Set(kHalfBytes, std::uint8_t{32})), kHalfBytes,
              reinterpret_cast<std::uint8_t*>(scales));
    for (int i = 0; i < 16; i += 8) Scale(HalfAt(block + 108), scales + i, s + i);
    std::memset(m, 0, 16 * sizeof *m);
    const auto high = hn::LoadU(kBytes, block);
    Unroll(kTimes<8>, [&](auto g) HWY_ATTR {
      const auto qs = hn::LoadU(kBytes, block + 32 + 32 * (g / 4));
      StoreCodes<4>(hn::Or(BitsOf<2 * (g % 4), 2>(qs), BitsTo<g, 1, 2>(high)), codes + 32 * g);
    });
  } else if constexpr (kType == BlockType::q4_k) {
    ScalesAndMins(block, s, m);
    for (int h = 0; h < 4; ++h) {
      const auto qs = hn::LoadU(kBytes, block + 16 + 32 * h);
      StoreCodes(BitsOf<0, 4>(qs), codes + 64 * h);
      StoreCodes(BitsOf<4, 4>(qs), codes + 64 * h + 32);
    }
  } else if constexpr (kType == BlockType::q5_k) {
    ScalesAndMins(block, s, m);
    const auto high = hn::LoadU(kBytes, block + 16);
    Unroll(kTimes<8>, [&](auto g) HWY_ATTR {
      const auto qs = hn::LoadU(kBytes, block + 48 + 32 * (g / 2));
      StoreCodes(hn::Or(BitsOf<4 * (g % 2), 4>(qs), BitsTo<g, 1, 4>(high)), codes + 32 * g);
    });
  } else if constexpr (kType == BlockType::iq4_nl) {
    s[0] = HalfAt(block), m[0] = 0;
    StoreCodes(ValuesOf(kIq4Values, Nibbles(block + 2)), codes);
  } else if constexpr (kType == BlockType::iq4_xs) {
    std::int8_t sc[8];
    for (int i = 0; i < 8; ++i) {
      const int low = block[4 + i / 2] >> i % 2 * 4 & 15, high = block[2 + i / 4] >> i % 4 * 2 & 3;
      sc[i] = static_cast<std::int8_t>((low | high << 4) - 32);
      StoreCodes(ValuesOf(kIq4Values, Nibbles(block + 8 + 16 * i)), codes + 32 * i);
    }
    Scale(HalfAt(block), sc, s);
    std::memset(m, 0, 8 * sizeof *m);
  } else if constexpr (kType == BlockType::mxfp4) {
    s[0] = PowerOf(block[0]), m[0] = 0;
    StoreCodes(ValuesOf(kMxfp4Values, Nibbles(block + 1)), codes);
  } else {
    static_assert(kType == BlockType::q6_k);
    const auto* scales = reinterpret_cast<const std::int8_t*>(block + 192);
    for (int i = 0; i < 16; i += 8) Scale(HalfAt(block + 208), scales + i, s + i);
    std::memset(m, 0, 16 * sizeof *m);
    for (int h = 0; h < 2; ++h) {
      const auto high = hn::LoadU(kBytes, block + 128 + 32 * h);
      Unroll(kTimes<4>, [&](auto k) HWY_ATTR {
        const auto low = hn::LoadU(kBytes, block + 64 * h + 32 * (k % 2));
        StoreCodes<32>(hn::Or(BitsOf<4 * (k / 2), 4>(low), BitsTo<2 * k, 2, 4>(high)),
                       codes + 128 * h + 32 * k);
      });
    }
  }
}

template <BlockType kType>
void UnpackBlocks(const std::uint8_t* blocks, std::int64_t count, Unpacked& to) {
  constexpr BlockSize size = block_size(kType);
  constexpr std::int64_t kGroups = size.weights / size.group;
  for (std::int64_t i = 0; i < count; ++i)
    Unpack<kType>(blocks + i * size.bytes, to.codes + i * size.weights, to.s + i * kGroups,
                  to.m + i * kGroups);
}

using Unpacker = void(const std::uint8_t* blocks, std::int64_t count, Unpacked& to);
template <std::size_t... i>
Unpacker* UnpackerOf(BlockType type, std::index_sequence<i...>) {
  static constexpr Unpacker* kUnpackers[] = {UnpackBlocks<static_cast<BlockType>(i)>...};
  return kUnpackers[static_cast<std::size_t>(type)];
}

template <std::int64_t kGroup, bool kStream, class X>
HWY_INLINE void Weights(const Unpacked& from, std::int64_t count, X* HWY_RESTRICT y) {
  constexpr hn::CappedTag<float, 16> d;
  const hn::Rebind<std::int8_t, decltype(d)> d8;
  const hn::Rebind<std::int32_t, decltype(d)> d32;
  for (std::int64_t i = 0; i < count; i += kGroup) {
    const auto s = hn::Set(d, from.s[i / kGroup]), m = hn::Set(d, from.m[i / kGroup]);
    for (std::int64_t j = i; j < i + kGroup; j += hn::MaxLanes(d)) {
      const auto code = hn::PromoteTo(d32, hn::Load(d8, from.codes + j));
      const auto w = hn::Sub(hn::Mul(s, hn::ConvertTo(d, code)), m);
      if constexpr (kStream) {
        StreamMath(d, w, y + j);
      } else {
        StoreMath(d, w, y + j);
      }
    }
  }
}

template <std::int64_t kGroup, class X>
void DequantizeChunks(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  const BlockSize size = block_size(d.type);
  Unpacker* const unpack =
      UnpackerOf(d.type, std::make_index_sequence<std::size(kBlockTypeNames)>());
  const cpu::CodeChunks chunks{d.outer_size, d.axis_size};
  const bool stream = d.outer_size * d.axis_size * std::int64_t{sizeof(X)} >= kStreamBytes;
  Unpacked unpacked;
  alignas(64) X buffer[cpu::kCodeChunk + 64 / sizeof(X)];
  for (std::int64_t i = begin; i < end; ++i) {
    const auto [row, first, count] = chunks[i];
    unpack(a.blocks.as<std::uint8_t>() + row * a.blocks.row_stride() +
               first / size.weights * size.bytes,
           count / size.weights, unpacked);
    X* y = a.y.as<X>() + row * a.y.row_stride() + first;
    if (!stream) {
      Weights<kGroup, false>(unpacked, count, y);
    } else if (ToNextLine(y) == 0) {
      Weights<kGroup, true>(unpacked, count, y);
    } else {
      // Staged in L1 at the same place of a line, so that whole lines are streamed.
      X* staged = buffer + (64 - ToNextLine(y)) / sizeof(X);
      Weights<kGroup, false>(unpacked, count, staged);
      EmitLines(staged, static_cast<std::size_t>(count) * sizeof(X), y, true);
    }
  }
  if (stream) hwy::FlushStream();
}

void RunGgufDequantize(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    if (block_size(d.type).group == 32) {
      DequantizeChunks<32, X>(d, a, begin, end);
    } else {
      DequantizeChunks<16, X>(d, a, begin, end);
    }
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

using Op = GgufDequantize;
BITTERN_EXPORT(RunGgufDequantize);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const cpu::CodeChunks chunks{d.outer_size, d.axis_size};
  cpu::parallel(chunks.size(), chunks.grain(), [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(RunGgufDequantize)(d, a, begin, end);
  });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GgufDequantize>> gguf_dequantize_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
