// What the cpu kernels of causal_conv1d and its backward share: a block of tokens and a few
// channels as f32 tiles in cache, vectors along the channels.
#if defined(BITTERN_CPU_CONV_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_CONV_INL_H_
#undef BITTERN_CPU_CONV_INL_H_
#else
#define BITTERN_CPU_CONV_INL_H_
#endif

#include "core/conv.h"
#include "cpu/math-inl.h"

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

// Channels [channel, channel + count) of a block. Lanes past them are computed and not stored.
template <class X>
struct Tile {
  const ConvInput<X>& in;
  const ConvBlock& block;
  std::int64_t channel, count;

  alignas(64) Row weight[4];
  alignas(64) Row bias;
  alignas(64) Row x[kReach + kTokens + kReach];  // row 0 is position first - (width - 1)

  Tile(const ConvInput<X>& input, const ConvBlock& of, std::int64_t first_channel)
      : in(input),
        block(of),
        channel(first_channel),
        count(std::min(kChannels, input.d.channels - first_channel)) {
    for (std::int64_t c = 0; c < kChannels; ++c) {
      const bool inside = c < count;
      for (std::int64_t j = 0; j < in.d.width; ++j)
        weight[j][c] = inside ? in.tap(channel + c, j) : 0.0f;
      bias[c] = inside && in.bias ? to_math(in.bias.template as<X>()[channel + c]) : 0.0f;
    }
  }

  std::int64_t before() const { return in.d.width - 1; }
  bool masked(std::int64_t position) const {
    return conv_masked(in.mask, block.sequence.begin + position);
  }
  const X* at(const ConstView& tensor, std::int64_t position) const {
    return tensor.as<X>() + (block.sequence.begin + position) * in.d.channels + channel;
  }
  X* at(const MutView& tensor, std::int64_t position) const {
    return tensor.as<X>() + (block.sequence.begin + position) * in.d.channels + channel;
  }

  void Widen(const X* from, Row& to) const {
    std::int64_t c = 0;
    for (; c + kLanes <= count; c += kLanes) hn::Store(LoadMath(D(), from + c), D(), to + c);
    for (; c < kChannels; ++c) to[c] = c < count ? to_math(from[c]) : 0.0f;
  }
  void Narrow(const Row& from, X* to) const {
    std::int64_t c = 0;
    for (; c + kLanes <= count; c += kLanes) StoreMath(D(), hn::Load(D(), from + c), to + c);
    for (; c < count; ++c) to[c] = from_math<X>(from[c]);
  }

  // Inputs from width - 1 before the block to `after` past it; past the sequence's end nothing.
  void LoadInputs(std::int64_t after) {
    const std::int64_t first = block.first - before();
    const std::int64_t end = std::min(block.first + block.rows + after, block.sequence.length);
    for (std::int64_t p = first; p < end; ++p) {
      Row& row = x[p - first];
      if (p >= 0 && !masked(p)) {
        Widen(at(in.x, p), row);
      } else {
        for (std::int64_t c = 0; c < kChannels; ++c)
          row[c] = c < count ? in.input(block.sequence, p, channel + c) : 0.0f;
      }
    }
  }

  // The sum before silu at row r of the block, for the vector at c.
  HWY_INLINE V Sum(std::int64_t r, std::int64_t c) const {
    const D d;
    V sum = hn::Load(d, bias + c);
    for (std::int64_t j = 0; j < in.d.width; ++j)
      sum = hn::MulAdd(hn::Load(d, weight[j] + c), hn::Load(d, x[r + j] + c), sum);
    return sum;
  }
};

}  // namespace conv
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
