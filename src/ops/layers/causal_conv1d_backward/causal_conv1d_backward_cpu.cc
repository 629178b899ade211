#include "bittern/ops/causal_conv1d_backward.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/layers/conv.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/layers/causal_conv1d_backward/causal_conv1d_backward_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/tree_rows-inl.h"
#include "ops/layers/conv-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = CausalConv1dBackward;

// The gradients of the block's sums, a row for each tap and one for the bias.
using Sums = conv::Row[5];

// Gradients of one window and a tile of channels; its terms are added to `sums`.
template <class X>
void Differentiate(const Op::Desc& d, const Op::Args& a, conv::Tile<X>& tile, Sums& sums) {
  const conv::D tag;
  const ConvSequence& s = tile.block->sequence;
  const std::int64_t reach = tile.reach(), first = tile.first;
  tile.LoadInputs(reach);

  // Row r: position first + r - reach, so that rows before a sequence's start exist too.
  alignas(64) conv::Row d_u[conv::kReach + conv::kTokens + conv::kReach];
  for (std::int64_t r = 0; r < tile.rows + 2 * reach; ++r) {
    const std::int64_t t = first + r - reach;
    if (r < reach || t >= s.length || tile.masked(t)) {
      std::fill_n(d_u[r], conv::kChannels, 0.0f);
      continue;
    }
    tile.Widen(tile.at(a.d_y, t), d_u[r]);
    for (std::int64_t c = 0; d.silu && c < tile.count; c += conv::kLanes) {
      const auto u = tile.Sum(r - reach, c);
      const auto d_y = hn::Load(tag, d_u[r] + c);
      hn::Store(hn::Mul(d_y, SiluSlope(tag, u, Sigmoid(tag, u))), tag, d_u[r] + c);
    }
  }

  // d_x at row r of the window, r < 0 before it; for the vector at c.
  alignas(64) conv::Row more;  // d_final_state
  const auto gradient = [&](std::int64_t r, std::int64_t c, bool add) HWY_ATTR {
    auto sum = hn::Zero(tag);
    for (std::int64_t j = 0; j < d.width; ++j) {
      sum = hn::MulAdd(hn::LoadU(tag, tile.weight[j] + c),
                       hn::Load(tag, d_u[r + 2 * reach - j] + c), sum);
    }
    return add ? hn::Add(sum, hn::Load(tag, more + c)) : sum;
  };
  // Whether final_state holds that position, and then its gradient.
  const auto load_more = [&](std::int64_t r) {
    const std::int64_t i = first + r - (s.length - reach);
    if (i < 0 || !a.d_final_state) return false;
    const X* from = tile.state(a.d_final_state, i);
    const std::int64_t step = a.d_final_state.stride[1];
    for (std::int64_t c = 0; c < tile.count; ++c) more[c] = to_math(from[c * step]);
    return true;
  };
  for (std::int64_t r = 0; a.d_x && r < tile.rows; ++r) {
    X* d_x = tile.at(a.d_x, first + r);
    if (tile.masked(first + r)) {
      std::fill_n(d_x, tile.count, from_math<X>(0));
      continue;
    }
    const bool add = load_more(r);
    for (std::int64_t c = 0; c < tile.count; c += conv::kLanes)
      tile.Emit(gradient(r, c, add), c, d_x);
  }
  for (std::int64_t i = 0; first == 0 && a.d_initial_state && i < reach; ++i) {
    const bool add = load_more(i - reach);
    X* to = tile.state(a.d_initial_state, i);
    const std::int64_t step = a.d_initial_state.stride[1];
    for (std::int64_t c = 0; c < tile.count; c += conv::kLanes) {
      alignas(64) float lane[conv::kLanes];
      hn::Store(gradient(i - reach, c, add), tag, lane);
      for (std::int64_t k = 0; k < std::min(conv::kLanes, tile.count - c); ++k)
        to[(c + k) * step] = from_math<X>(lane[k]);
    }
  }

  for (std::int64_t c = 0; c < tile.count; c += conv::kLanes) {
    conv::V sum[5];
    for (int j = 0; j < 5; ++j) sum[j] = hn::Load(tag, sums[j] + c);
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      const auto g = hn::Load(tag, d_u[r + reach] + c);
      for (std::int64_t j = 0; j < d.width; ++j)
        sum[j] = hn::MulAdd(g, hn::Load(tag, tile.x[r + j] + c), sum[j]);
      sum[4] = hn::Add(sum[4], g);
    }
    for (int j = 0; j < 5; ++j) hn::Store(sum[j], tag, sums[j] + c);
  }
}

// Items [begin, end): blocks, and in each the channels a tile at a time. A block's sums go to
// partial[block.number].
void RunCausalConv1dBackward(const Op::Desc& d, const Op::Args& a,
                             const std::vector<ConvBlock>& blocks, const float* taps,
                             float* partial, std::int64_t begin, std::int64_t end) {
  const std::int64_t tiles = conv_tiles(d);
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    const ConvInput<X> in{d, a.x, a.weight, a.bias, a.initial_state, a.mask};
    for (std::int64_t i = begin; i < end; ++i) {
      const ConvBlock& block = blocks[static_cast<std::size_t>(i / tiles)];
      conv::Tile<X> tile(in, taps, block, i % tiles * kConvTile);
      alignas(64) Sums sums = {};
      tile.Windows([&] { Differentiate(d, a, tile, sums); });
      if (block.rows == 0) continue;
      float* to = partial + block.number * (d.width + 1) * d.channels + tile.channel;
      for (std::int64_t j = 0; j <= d.width; ++j)
        std::copy_n(sums[j == d.width ? 4 : j], tile.count, to + j * d.channels);
    }
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

std::size_t workspace(const Op::Desc& d, Device) {
  return static_cast<std::size_t>(d.blocks() * (d.width + 1) * d.channels) * sizeof(float);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace space) {
  auto* partial = static_cast<float*>(space.data);
  const std::vector<ConvBlock> blocks = conv_blocks(d, a.cu_seqlens);
  const std::vector<float> taps = conv_taps(d, a);
  cpu::parallel(static_cast<std::int64_t>(blocks.size()) * conv_tiles(d), 4,
                [&](std::int64_t begin, std::int64_t end) {
                  BITTERN_CALL(RunCausalConv1dBackward)(d, a, blocks, taps.data(), partial, begin,
                                                        end);
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

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run, workspace)};

}  // namespace

std::span<const Kernel<CausalConv1dBackward>> causal_conv1d_backward_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
