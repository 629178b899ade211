#include "bittern/ops/causal_conv1d.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/layers/conv.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/layers/causal_conv1d/causal_conv1d_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/layers/conv-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = CausalConv1d;

template <class X>
void Convolve(const Op::Desc& d, const Op::Args& a, conv::Tile<X>& tile) {
  const conv::D tag;
  tile.LoadInputs(0);
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    X* y = tile.at(a.y, tile.first + r);
    if (tile.masked(tile.first + r)) {
      std::fill_n(y, tile.count, from_math<X>(0));
    } else if (d.silu) {
      for (std::int64_t c = 0; c < tile.count; c += conv::kLanes)
        tile.Emit(Silu(tag, tile.Sum(r, c)), c, y);
    } else {
      for (std::int64_t c = 0; c < tile.count; c += conv::kLanes) tile.Emit(tile.Sum(r, c), c, y);
    }
  }
}

// The last inputs of a sequence, after all of its blocks or none.
template <class X>
void StoreFinalState(const Op::Args& a, const conv::Tile<X>& tile) {
  const std::int64_t reach = tile.reach(), step = a.final_state.stride[1];
  for (std::int64_t i = 0; i < reach; ++i) {
    const std::int64_t p = tile.block->sequence.length - reach + i;
    X* to = tile.state(a.final_state, i);
    if (p >= 0 ? tile.masked(p) : !a.initial_state) {
      for (std::int64_t c = 0; c < tile.count; ++c) to[c * step] = from_math<X>(0);
      continue;
    }
    const X* from = p >= 0 ? tile.at(a.x, p) : tile.state(a.initial_state, p + reach);
    const std::int64_t from_step = p >= 0 ? 1 : a.initial_state.stride[1];
    for (std::int64_t c = 0; c < tile.count; ++c) to[c * step] = from[c * from_step];
  }
}

// Items [begin, end): blocks, and in each the channels a tile at a time, so that neighbours in
// memory follow each other.
void RunCausalConv1d(const Op::Desc& d, const Op::Args& a, const std::vector<ConvBlock>& blocks,
                     const float* taps, std::int64_t begin, std::int64_t end) {
  const std::int64_t tiles = conv_tiles(d);
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    const ConvInput<X> in{d, a.x, a.weight, a.bias, a.initial_state, a.mask};
    for (std::int64_t i = begin; i < end; ++i) {
      const ConvBlock& block = blocks[static_cast<std::size_t>(i / tiles)];
      conv::Tile<X> tile(in, taps, block, i % tiles * kConvTile);
      if (a.y) tile.Windows([&] { Convolve(d, a, tile); });
      if (a.final_state && block.last) StoreFinalState(a, tile);
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

using Op = CausalConv1d;
BITTERN_EXPORT(RunCausalConv1d);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const std::vector<ConvBlock> blocks = conv_blocks(d, a.cu_seqlens);
  const std::vector<float> taps = conv_taps(d, a);
  const auto count = static_cast<std::int64_t>(blocks.size());
  cpu::parallel(count * conv_tiles(d), 4, [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(RunCausalConv1d)(d, a, blocks, taps.data(), begin, end);
  });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<CausalConv1d>> causal_conv1d_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
