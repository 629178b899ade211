// Blocks of 32 are quantised one at a time, in vectors along the row.
#include <algorithm>

#include "bittern/ops/gguf_quantize.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/gguf/gguf_quantize/block_rules.h"
#include "ops/gguf/gguf_quantize/super_block.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gguf/gguf_quantize/gguf_quantize_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/gguf/gguf_quantize/weights-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = GgufQuantize;

HWY_INLINE void PutHalf(std::uint8_t* at, float x) {
  const hn::CappedTag<float, 4> d;
  const hn::Rebind<hwy::float16_t, decltype(d)> dh;
  alignas(8) hwy::float16_t half[4];
  hn::Store(hn::DemoteTo(dh, hn::Set(d, x)), dh, half);
  std::memcpy(at, half, sizeof half[0]);
}
HWY_INLINE float Inverse(float d) {
  const float r = d == 0 ? 0 : 1 / d;
  return std::isinf(r) ? 0 : r;
}

// 32 weights.
constexpr int kParts = 32 / kWidth;
using Group = Floats[kParts];

// Codes of weights 16 i .. 16 i + 15: z truncated.
template <int kLanes = kWidth>
HWY_INLINE hn::Vec<decltype(kHalfBytes)> CodesOf(const Group& z, int i) {
  const auto bytes = [&](int part) HWY_ATTR {
    const hn::Rebind<std::int8_t, decltype(kF)> d8;
    const hn::Rebind<std::uint8_t, decltype(kF)> du8;
    return hn::BitCast(du8, hn::DemoteTo(d8, hn::ConvertTo(kI, z[part])));
  };
  if constexpr (kLanes == 16) {
    return bytes(i);
  } else {
    return hn::Combine(kHalfBytes, bytes(2 * i + 1), bytes(2 * i));
  }
}

// The low halves of two weights in a byte; before them, where there are, the fifth bits.
template <bool kFive>
HWY_INLINE void PackCodes(const Group& z, std::uint8_t* to) {
  const auto low = CodesOf(z, 0), high = CodesOf(z, 1);
  if constexpr (kFive) {
    const auto sixteen = hn::Set(kBytes, std::uint8_t{16});
    const auto bit = hn::And(hn::Combine(kBytes, high, low), sixteen);
    std::uint8_t bits[8];
    hn::StoreMaskBits(kBytes, hn::Eq(bit, sixteen), bits);
    std::memcpy(to, bits, 4);
    to += 4;
  }
  const auto fifteen = hn::Set(kHalfBytes, std::uint8_t{15});
  hn::StoreU(hn::Or(hn::And(low, fifteen), hn::ShiftLeft<4>(high)), kHalfBytes, to);
}

template <BlockType kType, class X>
HWY_INLINE void QuantizeSmall(const X* w, std::uint8_t* block) {
  constexpr bool kFive = kType == BlockType::q5_0 || kType == BlockType::q5_1;
  const auto most = hn::Set(kF, largest_weight(kType));
  Group x, z;
  for (int i = 0; i < kParts; ++i) x[i] = LoadWeights(w + i * kWidth, most);
  auto low = x[0], high = x[0];
  for (int i = 1; i < kParts; ++i) {
    low = hn::Min(low, x[i]);
    high = hn::Max(high, x[i]);
  }
  const float min = hn::GetLane(hn::MinOfLanes(kF, low));
  const float max = hn::GetLane(hn::MaxOfLanes(kF, high));
  if constexpr (kType == BlockType::q8_0) {
    const float d = (std::max(max, -min) + 0.0f) / 127;
    const auto r = hn::Set(kF, Inverse(d));
    PutHalf(block, d);
    // Truncated, this is half away from 0: the sum reaches the next integer just when the fraction
    // is at least 1/2.
    const auto up = hn::Set(kF, 0x1.fffffep-2f);
    for (int i = 0; i < kParts; ++i) {
      z[i] = hn::Mul(x[i], r);
      z[i] = hn::Add(z[i], hn::CopySign(up, z[i]));
    }
    hn::StoreU(CodesOf(z, 0), kHalfBytes, block + 2);
    hn::StoreU(CodesOf(z, 1), kHalfBytes, block + 18);
  } else if constexpr (kType == BlockType::q4_1 || kType == BlockType::q5_1) {
    constexpr int n = kFive ? 31 : 15;
    const float m = min + 0.0f, d = (max - m + 0.0f) / n;
    const auto r = hn::Set(kF, Inverse(d));
    PutHalf(block, d);
    PutHalf(block + 2, m);
    for (int i = 0; i < kParts; ++i) {
      z[i] = hn::Mul(hn::Sub(x[i], hn::Set(kF, m)), r);
      z[i] = hn::Min(hn::Add(z[i], hn::Set(kF, 0.5f)), hn::Set(kF, n));
    }
    PackCodes<kFive>(z, block + 4);
  } else {
    constexpr int n = kFive ? 16 : 8;
    float e = max > -min ? max : min;
    if (max == -min) {
      // Both signs of it: the first one counts.
      alignas(64) float weights[32];
      for (int i = 0; i < kParts; ++i) hn::Store(x[i], kF, weights + i * kWidth);
      e = *std::find_if(weights, weights + 32, [&](float v) { return std::abs(v) == max; });
    }
    const float d = e / -n;
    const auto r = hn::Set(kF, Inverse(d));
    PutHalf(block, d);
    for (int i = 0; i < kParts; ++i) {
      z[i] = hn::Add(hn::Mul(x[i], r), hn::Set(kF, n + 0.5f));
      z[i] = hn::Min(z[i], hn::Set(kF, 2 * n - 1));
    }
    PackCodes<kFive>(z, block + 2);
  }
}

// Blocks [begin, end), counted through all rows.
template <BlockType kType, class X>
void QuantizeSmallBlocks(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                         std::int64_t end) {
  const std::int64_t per_row = d.row_blocks();
  for (std::int64_t i = begin; i < end;) {
    const std::int64_t row = i / per_row, first = i % per_row;
    const std::int64_t count = std::min(per_row - first, end - i);
    const X* w = a.w.as<X>() + row * a.w.row_stride() + first * 32;
    std::uint8_t* block =
        a.blocks.as<std::uint8_t>() + row * a.blocks.row_stride() + first * block_size(kType).bytes;
    for (std::int64_t k = 0; k < count; ++k, w += 32, block += block_size(kType).bytes) {
      PrefetchNext(w, 32);
      QuantizeSmall<kType>(w, block);
    }
    i += count;
  }
}

void RunGgufQuantize(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    switch (d.type) {
      case BlockType::q4_0: QuantizeSmallBlocks<BlockType::q4_0, X>(d, a, begin, end); break;
      case BlockType::q4_1: QuantizeSmallBlocks<BlockType::q4_1, X>(d, a, begin, end); break;
      case BlockType::q5_0: QuantizeSmallBlocks<BlockType::q5_0, X>(d, a, begin, end); break;
      case BlockType::q5_1: QuantizeSmallBlocks<BlockType::q5_1, X>(d, a, begin, end); break;
      default: QuantizeSmallBlocks<BlockType::q8_0, X>(d, a, begin, end);
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

using Op = GgufQuantize;
BITTERN_EXPORT(RunGgufQuantize);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const std::int32_t weights = block_size(d.type).weights;
  if (weights == 256) {
    run_super_blocks(d, a);
    return {};
  }
  cpu::parallel(d.outer_size * d.row_blocks(), cpu::kGrain / weights,
                [&](std::int64_t begin, std::int64_t end) {
                  BITTERN_CALL(RunGgufQuantize)(d, a, begin, end);
                });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GgufQuantize>> gguf_quantize_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE