// The causal convolution of include/bittern/conv_desc.h in plain form: which blocks of tokens there
// are, and what an input is.
#pragma once
#include <vector>

#include "bittern/conv_desc.h"
#include "core/math.h"
#include "core/sequences.h"

namespace bittern {

struct ConvSequence {
  std::int64_t index = 0, begin = 0, length = 0;  // begin: its first token of the whole tensor
};

// At most 64 tokens of one sequence. One of no tokens stands for an empty sequence.
struct ConvBlock {
  ConvSequence sequence;
  std::int64_t first = 0, rows = 0;  // positions in the sequence
  std::int64_t number = 0;           // among the blocks that have tokens
  bool last = false;                 // of its sequence
};

inline std::vector<ConvBlock> conv_blocks(const CausalConvDesc& d, const ConstView& cu_seqlens) {
  const Sequences rows = d.rows();
  std::vector<ConvBlock> blocks;
  std::int64_t index = 0, number = 0;
  for (const Sequence& s : sequences_of(rows, cu_seqlens)) {
    const ConvSequence sequence{index++, s.begin, s.end - s.begin};
    const std::int64_t count = rows.chunks(sequence.length);
    if (count == 0) blocks.push_back({sequence, 0, 0, 0, true});
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t first = i * rows.chunk;
      blocks.push_back({sequence, first,
                        std::min<std::int64_t>(rows.chunk, sequence.length - first), number++,
                        i + 1 == count});
    }
  }
  return blocks;
}

// Channels a kernel takes at a time, and how many times that is.
inline constexpr std::int64_t kConvTile = 256;
inline std::int64_t conv_tiles(const CausalConvDesc& d) {
  return (d.channels + kConvTile - 1) / kConvTile;
}

// What the forward takes at a time: taps of this many channels stay in L1.
inline constexpr std::int64_t kConvSegment = 4 * kConvTile;
inline std::int64_t conv_segments(const CausalConvDesc& d) {
  return (d.channels + kConvSegment - 1) / kConvSegment;
}

inline bool conv_masked(const ConstView& mask, std::int64_t token) {
  return mask && mask.as<std::uint8_t>()[token] == 0;
}

// Where a position of a sequence lies in x, y or their like.
template <class View>
std::int64_t conv_at(const CausalConvDesc& d, const View& v, const ConvSequence& s,
                     std::int64_t position) {
  const std::int64_t packed = 0;  // one row has all sequences
  return d.sequences > 0 ? v.at(packed, s.begin + position) : v.at(s.index, position);
}

template <class X>
struct ConvInput {
  const CausalConvDesc& d;
  ConstView x, weight, bias, initial_state, mask;

  // x at a position of a sequence, also before its start.
  float input(const ConvSequence& s, std::int64_t position, std::int64_t channel) const {
    if (position < 0) {
      if (!initial_state) return 0;
      return to_math(
          initial_state.as<X>()[initial_state.at(s.index, channel, position + d.width - 1)]);
    }
    if (conv_masked(mask, s.begin + position)) return 0;
    return to_math(x.as<X>()[conv_at(d, x, s, position) + channel]);
  }
  float tap(std::int64_t channel, std::int64_t j) const {
    return to_math(weight.as<X>()[channel * d.width + j]);
  }
  // Four rows of taps and one of the bias, f32, each conv_tiles(d) * kConvTile long.
  std::vector<float> taps() const {
    const std::int64_t row = conv_tiles(d) * kConvTile;
    std::vector<float> out(static_cast<std::size_t>(5 * row));
    for (std::int64_t c = 0; c < d.channels; ++c) {
      for (std::int64_t j = 0; j < d.width; ++j)
        out[static_cast<std::size_t>(j * row + c)] = tap(c, j);
      if (bias) out[static_cast<std::size_t>(4 * row + c)] = to_math(bias.as<X>()[c]);
    }
    return out;
  }
  // The sum, before silu.
  float u(const ConvSequence& s, std::int64_t position, std::int64_t channel) const {
    float sum = bias ? to_math(bias.as<X>()[channel]) : 0.0f;
    for (std::int64_t j = 0; j < d.width; ++j)
      sum = std::fma(tap(channel, j), input(s, position - d.width + 1 + j, channel), sum);
    return sum;
  }
};

template <class Args>
std::vector<float> conv_taps(const CausalConvDesc& d, const Args& a) {
  std::vector<float> out;
  (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    out = ConvInput<X>{d, a.x, a.weight, a.bias, a.initial_state, a.mask}.taps();
    return Status();
  });
  return out;
}

}  // namespace bittern
