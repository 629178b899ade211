// What the cpu kernels of causal_conv1d and its backward share: a block of tokens and a few
// channels as f32 tiles in cache, vectors along the channels.
#if defined(BITTERN_CPU_CONV_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_CONV_INL_H_
#undef BITTERN_CPU_CONV_INL_H_
#else
#define BITTERN_CPU_CONV_INL_H_
#endif

#include "cpu/math-inl.h"
#include "ops/layers/conv.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace conv {

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
inline constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));

inline constexpr std::int64_t kChannels = kConvTile;
inline constexpr std::int64_t kTokens = 64;  // of a block
inline constexpr std::int64_t kReach = 3;    // neighbours on either side, at most
using Row = float[kChannels];

// Channels [channel, channel + count), of one window of tokens after another. Lanes past them are
// computed and not stored.
template <class X>
struct Tile {
  const ConvInput<X>& in;
  std::int64_t channel, count;
  const ConvBlock* block;
  std::int64_t first = 0, rows = 0;  // the window: positions in the block's sequence

  const float* weight[4];  // of these channels, one row a tap
  const float* bias;
  alignas(64) Row x[kReach + kTokens + kReach];  // row 0 is position first - (width - 1)

  // `taps` as conv_taps made them.
  Tile(const ConvInput<X>& input, const float* taps, const ConvBlock& of,
       std::int64_t first_channel)
      : in(input),
        channel(first_channel),
        count(std::min(kChannels, input.d.channels - first_channel)),
        block(&of) {
    const std::int64_t row = conv_tiles(in.d) * kConvTile;
    for (std::int64_t j = 0; j < 4; ++j) weight[j] = taps + j * row + channel;
    bias = taps + 4 * row + channel;
  }

  std::int64_t reach() const { return in.d.width - 1; }
  bool masked(std::int64_t position) const {
    return conv_masked(in.mask, block->sequence.begin + position);
  }
  // This tile's part of a token's row, and of a state its first channel's i-th element.
  template <class View>
  auto* at(const View& tensor, std::int64_t position) const {
    return tensor.template as<X>() + conv_at(in.d, tensor, block->sequence, position) + channel;
  }
  template <class View>
  auto* state(const View& tensor, std::int64_t i) const {
    return tensor.template as<X>() + tensor.at(block->sequence.index, channel, i);
  }

  void Widen(const X* from, Row& to) const {
    std::int64_t c = 0;
    for (; c + kLanes <= count; c += kLanes) hn::Store(LoadMath(D(), from + c), D(), to + c);
    for (; c < kChannels; ++c) to[c] = c < count ? to_math(from[c]) : 0.0f;
  }
  // The vector at c of a row.
  HWY_INLINE void Emit(V v, std::int64_t c, X* to) const {
    const D d;
    if (c + kLanes <= count) {
      StoreMath(d, v, to + c);
    } else {
      X part[kLanes];
      StoreMath(d, v, part);
      std::copy_n(part, count - c, to + c);
    }
  }

  // Calls f for each window of the block, at least once.
  template <class F>
  HWY_INLINE void Windows(const F& f) {
    first = block->first;
    do {
      rows = std::min(kTokens, block->first + block->rows - first);
      f();
      first += kTokens;
    } while (first < block->first + block->rows);
  }

  // Inputs from width - 1 before the window to `after` past it; past the sequence's end nothing.
  void LoadInputs(std::int64_t after) {
    const std::int64_t begin = first - reach();
    const std::int64_t end = std::min(first + rows + after, block->sequence.length);
    for (std::int64_t p = begin; p < end; ++p) {
      Row& row = x[p - begin];
      if (p >= 0 && !masked(p)) {
        Widen(at(in.x, p), row);
        continue;
      }
      std::fill_n(row, kChannels, 0.0f);
      if (p >= 0 || !in.initial_state) continue;
      const X* from = state(in.initial_state, p + reach());
      const std::int64_t step = in.initial_state.stride[1];
      for (std::int64_t c = 0; c < count; ++c) row[c] = to_math(from[c * step]);
    }
  }

  // The sum before silu at row r of the window, for the vector at c.
  HWY_INLINE V Sum(std::int64_t r, std::int64_t c) const {
    const D d;
    V sum = hn::LoadU(d, bias + c);
    sum = hn::MulAdd(hn::LoadU(d, weight[0] + c), hn::Load(d, x[r] + c), sum);
    sum = hn::MulAdd(hn::LoadU(d, weight[1] + c), hn::Load(d, x[r + 1] + c), sum);
    if (in.d.width > 2)
      sum = hn::MulAdd(hn::LoadU(d, weight[2] + c), hn::Load(d, x[r + 2] + c), sum);
    if (in.d.width > 3)
      sum = hn::MulAdd(hn::LoadU(d, weight[3] + c), hn::Load(d, x[r + 3] + c), sum);
    return sum;
  }
};

}  // namespace conv
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
