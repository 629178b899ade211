// The blocks of 256 weights: super_min-inl.h and super_signed-inl.h, 16 groups at a time.
#include <algorithm>

#include "bittern/ops/gguf_quantize.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "ops/gguf/gguf_quantize/block_rules.h"
#include "ops/gguf/gguf_quantize/super_block.h"
#include "plan/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gguf/gguf_quantize/super_block_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/gguf/gguf_quantize/super_min-inl.h"
#include "ops/gguf/gguf_quantize/super_signed-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = GgufQuantize;

// Super-block i of all rows: its weights into groups [first, ...) of the batch.
template <int kSize>
void Gather(const Op::Desc& d, const Op::Args& a, std::int64_t i, int first, Batch<kSize>& b) {
  const std::int64_t row = i / d.row_blocks(), column = i % d.row_blocks() * 256;
  const auto most = hn::Set(kF, largest_weight(d.type));
  alignas(64) float x[256];
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    const X* w = a.w.as<X>() + row * a.w.row_stride() + column;
    PrefetchNext(w, 256);
    for (int j = 0; j < 256; j += kWidth) hn::Store(LoadWeights(w + j, most), kF, x + j);
    return Status();
  });
  for (int g = 0; g < 256 / kSize; ++g)
    for (int j = 0; j < kSize; ++j) b.x[j][first + g] = x[g * kSize + j];
  if (!a.importance) return;
  const float* importance = a.importance.as<float>() + column;
  for (int g = 0; g < 256 / kSize; ++g)
    for (int j = 0; j < kSize; ++j)
      b.c[j][first + g] = blocks::weight_of(importance[g * kSize + j]);
}

std::uint8_t* BlockAt(const Op::Desc& d, const Op::Args& a, std::int64_t i) {
  return a.blocks.as<std::uint8_t>() + i / d.row_blocks() * a.blocks.row_stride() +
         i % d.row_blocks() * block_size(d.type).bytes;
}

// Super-blocks [begin, end), counted through all rows.
template <bool kWeighted>
void QuantizeAllSigned(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  Batch<16> b;
  for (std::int64_t i = begin; i < end; ++i) {
    Gather(d, a, i, 0, b);
    QuantizeSigned<kWeighted>(d.type, b, BlockAt(d, a, i));
  }
}

template <bool kWeighted, int kSize>
void QuantizeAll(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  constexpr int kInBlock = 256 / kSize, kAtOnce = kGroups / kInBlock;
  const SuperRule rule = blocks::super_rule(d.type);
  Batch<kSize> b = {};
  Ideals ideal = {};
  for (std::int64_t i = begin; i < end; i += kAtOnce) {
    const int count = static_cast<int>(std::min<std::int64_t>(end - i, kAtOnce));
    std::uint8_t* to[kAtOnce] = {};
    for (int k = 0; k < count; ++k) {
      Gather(d, a, i + k, kInBlock * k, b);
      to[k] = BlockAt(d, a, i + k);
      if (!d.given_grid) continue;
      const std::int64_t row = (i + k) / d.row_blocks(),
                         first = (i + k) % d.row_blocks() * kInBlock;
      const float* scales = a.scales.as<float>() + row * a.scales.row_stride() + first;
      const float* biases = a.biases.as<float>() + row * a.biases.row_stride() + first;
      for (int g = 0; g < kInBlock; ++g) {
        const blocks::Grid grid = blocks::given_grid(scales[g], biases[g], rule.high);
        ideal.s[kInBlock * k + g] = grid.s;
        ideal.m[kInBlock * k + g] = grid.m;
      }
    }
    QuantizeSupers<kWeighted>(d.type, b, ideal, d.given_grid, to, count);
  }
}

template <bool kWeighted>
void QuantizeSuperBlocks(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                         std::int64_t end) {
  const SuperRule rule = blocks::super_rule(d.type);
  if (rule.low < 0) return QuantizeAllSigned<kWeighted>(d, a, begin, end);
  if (rule.group == 16) return QuantizeAll<kWeighted, 16>(d, a, begin, end);
  QuantizeAll<kWeighted, 32>(d, a, begin, end);
}

void RunSuperBlocks(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  if (a.importance) {
    QuantizeSuperBlocks<true>(d, a, begin, end);
  } else {
    QuantizeSuperBlocks<false>(d, a, begin, end);
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
BITTERN_EXPORT(RunSuperBlocks);
}

void run_super_blocks(const GgufQuantize::Desc& d, const GgufQuantize::Args& a) {
  // A super-block is a search, worth a thread long before its bytes are.
  cpu::parallel(d.outer_size * d.row_blocks(), 4, [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(RunSuperBlocks)(d, a, begin, end);
  });
}

}  // namespace bittern
#endif  // HWY_ONCE
