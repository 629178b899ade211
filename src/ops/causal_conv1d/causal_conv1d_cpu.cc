#include "bittern/ops/causal_conv1d.h"
#include "core/conv.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "plan/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/causal_conv1d/causal_conv1d_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/conv-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = CausalConv1d;

template <class X>
void Convolve(const Op::Desc& d, const Op::Args& a, const ConvBlock& block, std::int64_t channel) {
  const ConvInput<X> in{d, a.x, a.weight, a.bias, a.initial_state, a.mask};
  conv::Tile<X> tile(in, block, channel);
  if (a.y) {
    tile.LoadInputs(0);
    for (std::int64_t r = 0; r < block.rows; ++r) {
      alignas(64) conv::Row y = {};
      if (!tile.masked(block.first + r)) {
        for (std::int64_t c = 0; c < tile.count; c += conv::kLanes) {
          const auto u = tile.Sum(r, c);
          hn::Store(d.silu ? Silu(conv::D(), u) : u, conv::D(), y + c);
        }
      }
      tile.Narrow(y, tile.at(a.y, block.first + r));
    }
  }
  if (!block.last || !a.final_state) return;
  const ConvSequence& s = block.sequence;
  for (std::int64_t c = channel; c < channel + tile.count; ++c) {
    for (std::int64_t i = 0; i < d.width - 1; ++i)
      a.final_state.as<X>()[in.state_at(s, c, i)] =
          from_math<X>(in.input(s, s.length - (d.width - 1) + i, c));
  }
}

// Items [begin, end): blocks, and in each the channels a tile at a time.
void RunCausalConv1d(const Op::Desc& d, const Op::Args& a, const std::vector<ConvBlock>& blocks,
                     std::int64_t begin, std::int64_t end) {
  const std::int64_t tiles = conv_tiles(d);
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    for (std::int64_t i = begin; i < end; ++i)
      Convolve<X>(d, a, blocks[static_cast<std::size_t>(i / tiles)], i % tiles * kConvTile);
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

Status supports(const Op::Desc&) { return cpu::supported(); }

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const std::vector<ConvBlock> blocks = conv_blocks(d, a.cu_seqlens);
  const auto count = static_cast<std::int64_t>(blocks.size());
  cpu::parallel(count * conv_tiles(d), 4, [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(RunCausalConv1d)(d, a, blocks, begin, end);
  });
  return {};
}

constexpr Kernel<Op> kKernels[] = {{.name = "cpu",
                                    .backend = "cpu",
                                    .supports = supports,
                                    .architecture = cpu::architecture,
                                    .run = run}};

}  // namespace

std::span<const Kernel<CausalConv1d>> causal_conv1d_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
