#include "oracle/aim.h"

#include <algorithm>

namespace bittern::oracle {

void aim_scale(const ConstView& scale, Rng& rng) {
  static constexpr double kBad[] = {0.0,
                                    -0.0,
                                    std::numeric_limits<double>::quiet_NaN(),
                                    std::numeric_limits<double>::infinity(),
                                    0x1p-140,
                                    0x1p-20,
                                    -1e-3};
  const std::int64_t n = scale.shape.numel();
  for (std::int64_t i = 0; i < n; ++i) {
    double s = 0.05 + rng.uniform();
    if (rng.chance(4)) s = std::ldexp(1.0, static_cast<int>(rng.below(9)) - 6);
    if (rng.chance(8)) s = -s;
    if (rng.chance(16)) s = kBad[rng.below(std::size(kBad))];
    put(scale, i, s);
  }
}

void aim_gradient(const ConstView& d_y, Rng& rng) {
  const std::int64_t kind = rng.below(8), n = d_y.shape.numel();
  if (kind == 0) return;
  for (std::int64_t i = 0; i < n; ++i) {
    if (kind == 1) {
      put(d_y, i, rng.chance(2) ? 0.0 : -0.0);
    } else if (kind == 2) {
      put(d_y, i, -0.0);
    } else if (!(std::fabs(get(d_y, i)) < 1e6)) {
      put(d_y, i, rng.normal());
    }
  }
}

void aim_sequences(const Sequences& s, const ConstView& cu_seqlens, Rng& rng) {
  if (!cu_seqlens || s.sequences == 0) return;
  auto* at = data<std::int32_t>(cu_seqlens);
  at[0] = 0;
  for (std::int64_t i = 1; i < s.sequences; ++i)
    at[i] = rng.chance(3) ? 0 : static_cast<std::int32_t>(rng.below(s.tokens + 1));
  at[s.sequences] = static_cast<std::int32_t>(s.tokens);
  std::sort(at, at + s.sequences + 1);
}

void aim_values(const ConstView& x, double size, Rng& rng) {
  if (!x) return;
  const bool awkward = rng.chance(8);
  for (std::int64_t i = 0; i < x.shape.numel(); ++i) {
    const double value = get(x, i);
    if (!awkward && !(std::fabs(value) < 1e6)) put(x, i, size * rng.normal());
    if (std::fabs(value) < 1e6) put(x, i, size * value);
  }
}

void aim_mask(const ConstView& mask, Rng& rng) {
  if (!mask) return;
  for (std::int64_t i = 0; i < mask.shape.numel(); ++i) put(mask, i, rng.chance(5) ? 0 : 1);
}

void aim_blocks(BlockType type, const ConstView& blocks, Rng& rng) {
  const BlockSize size = block_size(type);
  const auto aim = [&](std::uint8_t* at) {
    if (rng.chance(2)) return;
    const f16 x = to_f16(static_cast<float>(rng.normal() * 0.01));
    std::memcpy(at, &x, sizeof x);
  };
  if (blocks.shape[1] == 0) return;
  for (std::int64_t i = 0; i < blocks.shape[0]; ++i) {
    for (std::int64_t k = 0; k < blocks.shape[1] / size.bytes; ++k) {
      auto* block = data<std::uint8_t>(blocks) + i * blocks.row_stride() + k * size.bytes;
      switch (type) {
        case BlockType::q4_1:
        case BlockType::q5_1:
        case BlockType::q4_k:
        case BlockType::q5_k: aim(block + 2); [[fallthrough]];
        case BlockType::q4_0:
        case BlockType::q5_0:
        case BlockType::q8_0:
        case BlockType::iq4_nl:
        case BlockType::iq4_xs: aim(block); break;
        case BlockType::q2_k: aim(block + 80); [[fallthrough]];
        case BlockType::q3_k:
        case BlockType::q6_k: aim(block + size.bytes - 2); break;
        case BlockType::mxfp4: {
          // Scales whose weights are ordinary, or the first and the last there are.
          constexpr std::uint8_t kEnds[] = {0, 1, 2, 3, 252, 253, 254, 255};
          if (rng.chance(2)) {
            *block = static_cast<std::uint8_t>(100 + rng.below(60));
          } else if (rng.chance(2)) {
            *block = kEnds[rng.below(8)];
          }
          break;
        }
      }
    }
  }
}

}  // namespace bittern::oracle
