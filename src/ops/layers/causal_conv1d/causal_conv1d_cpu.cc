#include "bittern/ops/causal_conv1d.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/layers/conv.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/layers/causal_conv1d/causal_conv1d_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/silu-inl.h"
#include "hwy/cache_control.h"
#include "ops/layers/lines-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = CausalConv1d;

using lines::Part;
using V = lines::V;
inline constexpr std::int64_t kLanes = kDotVector;

// Tokens taken at a time: each tap is loaded once for all of them.
inline constexpr std::int64_t kGroup = 4;

// Channels of a block of tokens. Rows are read and written from end to end.
template <class X>
struct Segment {
  const ConvInput<X>& in;
  const Op::Args& a;
  const ConvBlock& block;
  const std::int64_t channel, count, reach;
  const float* tap[4];
  const float* bias;
  X state[3][kConvSegment];  // of the positions before the first, where the block needs them
  X zeros[kConvSegment];     // of masked tokens, and of those before the first without a state
  X unused[kConvSegment];    // takes what is computed of a masked token

  Segment(const ConvInput<X>& input, const Op::Args& args, const float* taps, const ConvBlock& of,
          std::int64_t first_channel)
      : in(input),
        a(args),
        block(of),
        channel(first_channel),
        count(std::min(kConvSegment, input.d.channels - first_channel)),
        reach(input.d.width - 1) {
    const std::int64_t row = conv_tiles(in.d) * kConvTile;
    for (std::int64_t j = 0; j < 4; ++j) tap[j] = taps + j * row + channel;
    bias = taps + 4 * row + channel;
    const bool starts = block.first < reach;
    if (in.mask || (starts && !in.initial_state)) std::fill_n(zeros, count, from_math<X>(0));
    if (!starts || !in.initial_state) return;
    const X* from = State(in.initial_state);
    const std::int64_t step = in.initial_state.stride[1], older = in.initial_state.stride[2];
    EachOfState([&](std::int64_t c, std::int64_t i) { state[i][c] = from[c * step + i * older]; });
  }
  template <class F>
  void EachOfState(const F& f) const {
    for (std::int64_t c = 0; c < count; ++c) {
      f(c, 0);
      if (reach > 1) f(c, 1);
      if (reach > 2) f(c, 2);
    }
  }

  bool masked(std::int64_t position) const {
    return conv_masked(in.mask, block.sequence.begin + position);
  }
  template <class View>
  auto* At(const View& tensor, std::int64_t position) const {
    return tensor.template as<X>() + conv_at(in.d, tensor, block.sequence, position) + channel;
  }
  template <class View>
  auto* State(const View& tensor) const {
    return tensor.template as<X>() + tensor.at(block.sequence.index, channel);
  }
  // The inputs of a position; before the first those of the state.
  const X* Row(std::int64_t position) const {
    if (position < 0) return in.initial_state ? state[position + reach] : zeros;
    return masked(position) ? zeros : At(in.x, position);
  }

  // kRows tokens from `first` on.
  template <std::int64_t kRows>
  void Convolve(std::int64_t first) {
    const X *from[kRows + 3], *next[kRows];
    X* to[kRows];
    const std::int64_t last = block.first + block.rows - 1;
    for (std::int64_t k = 0; k < kRows + reach; ++k) from[k] = Row(first - reach + k);
    for (std::int64_t r = 0; r < kRows; ++r) {
      next[r] = At(in.x, std::min(first + kRows + r, last));
      to[r] = masked(first + r) ? unused : At(a.y, first + r);
    }
    std::int64_t c = 0;
    for (; c + kLanes <= count; c += kLanes) {
      for (std::int64_t r = 0; r < kRows; ++r) hwy::Prefetch(next[r] + c);
      Columns<kRows>(from, Part<true>{c, kLanes}, to);
    }
    if (c < count) Columns<kRows>(from, Part<false>{c, count - c}, to);
    for (std::int64_t r = 0; r < kRows; ++r)
      if (masked(first + r)) std::fill_n(At(a.y, first + r), count, from_math<X>(0));
  }

  template <std::int64_t kRows, class P>
  HWY_INLINE void Columns(const X* const* from, P part, X* const* to) const {
    const DotTag d;
    V x[kRows + 3], u[kRows];
    for (std::int64_t k = 0; k < kRows + 1; ++k) x[k] = part.Load(from[k]);
    const V start = hn::LoadU(d, bias + part.at);
    const V w0 = hn::LoadU(d, tap[0] + part.at), w1 = hn::LoadU(d, tap[1] + part.at);
    for (std::int64_t r = 0; r < kRows; ++r)
      u[r] = hn::MulAdd(w1, x[r + 1], hn::MulAdd(w0, x[r], start));
    if (reach > 1) {
      const V w2 = hn::LoadU(d, tap[2] + part.at);
      x[kRows + 1] = part.Load(from[kRows + 1]);
      for (std::int64_t r = 0; r < kRows; ++r) u[r] = hn::MulAdd(w2, x[r + 2], u[r]);
    }
    if (reach > 2) {
      const V w3 = hn::LoadU(d, tap[3] + part.at);
      x[kRows + 2] = part.Load(from[kRows + 2]);
      for (std::int64_t r = 0; r < kRows; ++r) u[r] = hn::MulAdd(w3, x[r + 3], u[r]);
    }
    if (!in.d.silu) {
      for (std::int64_t r = 0; r < kRows; ++r) part.Store(u[r], to[r]);
    } else if constexpr (std::is_same_v<X, bf16>) {
      hn::Vec<hn::RebindToUnsigned<DotTag>> bits[kRows];
      SiluToBf16(d, u, nullptr, bits);
      for (std::int64_t r = 0; r < kRows; ++r) part.StoreUpper(bits[r], to[r]);
    } else {
      for (std::int64_t r = 0; r < kRows; ++r) part.Store(Silu(d, u[r]), to[r]);
    }
  }

  void Convolve() {
    std::int64_t t = block.first;
    const std::int64_t end = block.first + block.rows;
    for (; t + kGroup <= end; t += kGroup) Convolve<kGroup>(t);
    for (; t < end; ++t) Convolve<1>(t);
  }

  // The last inputs of a sequence, after all of its blocks or none.
  void StoreFinalState() const {
    X* to = State(a.final_state);
    const std::int64_t step = a.final_state.stride[1], older = a.final_state.stride[2];
    const X* from[3];
    for (std::int64_t i = 0; i < reach; ++i) from[i] = Row(block.sequence.length - reach + i);
    EachOfState([&](std::int64_t c, std::int64_t i) { to[c * step + i * older] = from[i][c]; });
  }
};

// Items [begin, end): blocks, and in each the channels a segment at a time, so that neighbours in
// memory follow each other.
void RunCausalConv1d(const Op::Desc& d, const Op::Args& a, const std::vector<ConvBlock>& blocks,
                     const float* taps, std::int64_t begin, std::int64_t end) {
  const std::int64_t segments = conv_segments(d);
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    const ConvInput<X> in{d, a.x, a.weight, a.bias, a.initial_state, a.mask};
    for (std::int64_t i = begin; i < end; ++i) {
      const ConvBlock& block = blocks[static_cast<std::size_t>(i / segments)];
      Segment<X> segment(in, a, taps, block, i % segments * kConvSegment);
      if (a.y) segment.Convolve();
      if (a.final_state && block.last) segment.StoreFinalState();
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
  cpu::parallel(count * conv_segments(d), 1, [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(RunCausalConv1d)(d, a, blocks, taps.data(), begin, end);
  });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<CausalConv1d>> causal_conv1d_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
