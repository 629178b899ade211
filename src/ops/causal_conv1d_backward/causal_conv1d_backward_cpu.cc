#include "bittern/ops/causal_conv1d_backward.h"
#include "core/conv.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "plan/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/causal_conv1d_backward/causal_conv1d_backward_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/conv-inl.h"
#include "cpu/tree_rows-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = CausalConv1dBackward;

// Gradients of one block and a tile of channels; its sums go to partial[block.number], a row for
// each tap and one for the bias.
template <class X>
void Differentiate(const Op::Desc& d, const Op::Args& a, const ConvBlock& block,
                   std::int64_t channel, float* partial) {
  const conv::D tag;
  const ConvInput<X> in{d, a.x, a.weight, a.bias, a.initial_state, a.mask};
  const ConvSequence& s = block.sequence;
  const std::int64_t reach = d.width - 1;
  conv::Tile<X> tile(in, block, channel);
  tile.LoadInputs(reach);

  // Row r: position first + r - reach, so that rows before a sequence's start exist too.
  alignas(64) conv::Row du[conv::kReach + conv::kTokens + conv::kReach];
  for (std::int64_t r = 0; r < block.rows + 2 * reach; ++r) {
    const std::int64_t t = block.first + r - reach;
    if (r < reach || t >= s.length || tile.masked(t)) {
      std::fill_n(du[r], conv::kChannels, 0.0f);
      continue;
    }
    tile.Widen(tile.at(a.dy, t), du[r]);
    for (std::int64_t c = 0; d.silu && c < tile.count; c += conv::kLanes) {
      const auto u = tile.Sum(r - reach, c);
      const auto dy = hn::Load(tag, du[r] + c);
      hn::Store(hn::Mul(dy, SiluSlope(tag, u, Sigmoid(tag, u))), tag, du[r] + c);
    }
  }

  // dx at row r of the block; r < 0 before it.
  alignas(64) conv::Row dx;
  const auto gradient = [&](std::int64_t r) HWY_ATTR {
    for (std::int64_t c = 0; c < tile.count; c += conv::kLanes) {
      auto sum = hn::Zero(tag);
      for (std::int64_t j = 0; j < d.width; ++j) {
        sum = hn::MulAdd(hn::Load(tag, tile.weight[j] + c),
                         hn::Load(tag, du[r + 2 * reach - j] + c), sum);
      }
      hn::Store(sum, tag, dx + c);
    }
    const std::int64_t i = block.first + r - (s.length - reach);
    if (i < 0 || !a.d_final_state) return;
    for (std::int64_t c = 0; c < tile.count; ++c)
      dx[c] += to_math(a.d_final_state.as<X>()[in.state_at(s, channel + c, i)]);
  };
  for (std::int64_t r = 0; a.dx && r < block.rows; ++r) {
    if (tile.masked(block.first + r)) {
      std::fill_n(dx, conv::kChannels, 0.0f);
    } else {
      gradient(r);
    }
    tile.Narrow(dx, tile.at(a.dx, block.first + r));
  }
  if (block.first == 0 && a.d_initial_state) {
    for (std::int64_t i = 0; i < reach; ++i) {
      gradient(i - reach);
      for (std::int64_t c = 0; c < tile.count; ++c)
        a.d_initial_state.as<X>()[in.state_at(s, channel + c, i)] = from_math<X>(dx[c]);
    }
  }
  if (block.rows == 0) return;
  float* sums = partial + block.number * (d.width + 1) * d.channels + channel;
  for (std::int64_t c = 0; c < tile.count; c += conv::kLanes) {
    conv::V sum[5];
    for (auto& v : sum) v = hn::Zero(tag);
    for (std::int64_t r = 0; r < block.rows; ++r) {
      const auto g = hn::Load(tag, du[r + reach] + c);
      for (std::int64_t j = 0; j < d.width; ++j)
        sum[j] = hn::MulAdd(g, hn::Load(tag, tile.x[r + j] + c), sum[j]);
      sum[4] = hn::Add(sum[4], g);
    }
    for (std::int64_t j = 0; j <= d.width; ++j) {
      alignas(64) float lane[conv::kLanes];
      hn::Store(sum[j == d.width ? 4 : j], tag, lane);
      std::copy_n(lane, std::min(conv::kLanes, tile.count - c), sums + j * d.channels + c);
    }
  }
}

// Items [begin, end): blocks, and in each the channels a tile at a time.
void RunCausalConv1dBackward(const Op::Desc& d, const Op::Args& a,
                             const std::vector<ConvBlock>& blocks, float* partial,
                             std::int64_t begin, std::int64_t end) {
  const std::int64_t tiles = conv_tiles(d);
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    for (std::int64_t i = begin; i < end; ++i)
      Differentiate<X>(d, a, blocks[static_cast<std::size_t>(i / tiles)], i % tiles * kConvTile,
                       partial);
    return Status();
  });
}

// d_weight and d_bias of channels [begin, end).
void SumCausalConv1dBackward(const Op::Desc& d, const Op::Args& a, std::int64_t blocks,
                             float* partial, std::int64_t begin, std::int64_t end) {
  const std::int64_t width = d.width;
  for (std::int64_t j = 0; j <= width; ++j)
    TreeRows(partial + j * d.channels, blocks, (width + 1) * d.channels, begin, end);
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    const auto sum = [&](std::int64_t j, std::int64_t c) {
      return from_math<X>(blocks > 0 ? partial[j * d.channels + c] : 0.0f);
    };
    for (std::int64_t c = begin; c < end; ++c) {
      for (std::int64_t j = 0; a.d_weight && j < width; ++j)
        a.d_weight.as<X>()[c * width + j] = sum(j, c);
      if (a.d_bias) a.d_bias.as<X>()[c] = sum(width, c);
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

using Op = CausalConv1dBackward;
BITTERN_EXPORT(RunCausalConv1dBackward);
BITTERN_EXPORT(SumCausalConv1dBackward);

Status supports(const Op::Desc&) { return cpu::supported(); }

std::size_t workspace(const Op::Desc& d) {
  return static_cast<std::size_t>(d.blocks() * (d.width + 1) * d.channels) * sizeof(float);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace space) {
  auto* partial = static_cast<float*>(space.data);
  const std::vector<ConvBlock> blocks = conv_blocks(d, a.cu_seqlens);
  cpu::parallel(static_cast<std::int64_t>(blocks.size()) * conv_tiles(d), 4,
                [&](std::int64_t begin, std::int64_t end) {
                  BITTERN_CALL(RunCausalConv1dBackward)(d, a, blocks, partial, begin, end);
                });
  if (!a.d_weight && !a.d_bias) return {};
  std::int64_t count = 0;
  for (const ConvBlock& block : blocks) count += block.rows > 0;
  cpu::parallel(d.channels, cpu::kGrain / std::max<std::int64_t>(count, 1),
                [&](std::int64_t begin, std::int64_t end) {
                  BITTERN_CALL(SumCausalConv1dBackward)(d, a, count, partial, begin, end);
                });
  return {};
}

constexpr Kernel<Op> kKernels[] = {{.name = "cpu",
                                    .backend = "cpu",
                                    .supports = supports,
                                    .workspace = workspace,
                                    .architecture = cpu::architecture,
                                    .run = run}};

}  // namespace

std::span<const Kernel<CausalConv1dBackward>> causal_conv1d_backward_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
