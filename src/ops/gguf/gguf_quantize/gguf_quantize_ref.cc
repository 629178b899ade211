#include <array>

#include "bittern/ops/gguf_quantize.h"
#include "ops/gguf/gguf_quantize/super_block.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GgufQuantize;
using Small = std::array<float, 32>;

float inverse(float d) {
  const float r = d == 0 ? 0 : 1 / d;
  return std::isinf(r) ? 0 : r;
}

// Codes 0..15 or 0..31: the low halves of two weights in a byte, then what is above them.
void put_codes(const std::array<int, 32>& q, std::uint8_t* qh, std::uint8_t* qs) {
  for (std::size_t j = 0; j < 16; ++j)
    qs[j] = static_cast<std::uint8_t>((q[j] & 15) | (q[j + 16] & 15) << 4);
  if (qh == nullptr) return;
  std::memset(qh, 0, 4);
  for (std::size_t j = 0; j < 32; ++j)
    qh[j / 8] = static_cast<std::uint8_t>(qh[j / 8] | (q[j] >> 4) << j % 8);
}

// Q4_0 and Q5_0, n = 8 and 16.
void quantize_signed(const Small& x, int n, std::uint8_t* block) {
  const float e = *std::max_element(x.begin(), x.end(),
                                    [](float a, float b) { return std::abs(a) < std::abs(b); });
  const float d = e / static_cast<float>(-n), r = inverse(d);
  std::array<int, 32> q;
  for (std::size_t j = 0; j < 32; ++j)
    q[j] = std::min(static_cast<int>(x[j] * r + (static_cast<float>(n) + 0.5f)), 2 * n - 1);
  blocks::put_f16(block, d);
  if (n == 8) {
    put_codes(q, nullptr, block + 2);
  } else {
    put_codes(q, block + 2, block + 6);
  }
}

// Q4_1 and Q5_1, n = 15 and 31.
void quantize_with_min(const Small& x, int n, std::uint8_t* block) {
  const float m = *std::min_element(x.begin(), x.end()) + 0.0f;
  const float range = *std::max_element(x.begin(), x.end()) - m + 0.0f;
  const float d = range / static_cast<float>(n);
  const float r = inverse(d);
  std::array<int, 32> q;
  for (std::size_t j = 0; j < 32; ++j) q[j] = std::min(static_cast<int>((x[j] - m) * r + 0.5f), n);
  blocks::put_f16(block, d);
  blocks::put_f16(block + 2, m);
  if (n == 15) {
    put_codes(q, nullptr, block + 4);
  } else {
    put_codes(q, block + 4, block + 8);
  }
}

void quantize_bytes(const Small& x, std::uint8_t* block) {
  float most = 0;
  for (const float v : x) most = std::max(most, std::abs(v));
  const float d = most / 127, r = inverse(d);
  blocks::put_f16(block, d);
  for (std::size_t j = 0; j < 32; ++j)
    block[2 + j] = static_cast<std::uint8_t>(static_cast<int>(std::round(x[j] * r)));
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const BlockSize size = block_size(d.type);
  const float most = largest_weight(d.type);
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    for (std::int64_t i = 0; i < d.outer_size; ++i) {
      const X* w = a.w.as<X>() + i * a.w.row_stride();
      std::uint8_t* block = a.blocks.as<std::uint8_t>() + i * a.blocks.row_stride();
      const auto weights = [&](std::int64_t j, auto& x) {
        for (std::size_t k = 0; k < x.size(); ++k) {
          const float v = to_math(w[j + static_cast<std::int64_t>(k)]);
          x[k] = std::isnan(v) ? 0 : std::clamp(v, -most, most);
        }
      };
      for (std::int64_t j = 0; j < d.axis_size; j += size.weights, block += size.bytes) {
        if (size.weights == 256) {
          std::array<float, 256> x, c;
          weights(j, x);
          for (std::int64_t k = 0; k < 256; ++k)
            c[static_cast<std::size_t>(k)] =
                a.importance ? blocks::weight_of(a.importance.as<float>()[j + k]) : 1.0f;
          std::array<blocks::Grid, blocks::kMostGroups> given;
          for (std::int64_t g = 0; d.given_grid && g < 256 / size.group; ++g)
            given[static_cast<std::size_t>(g)] = blocks::given_grid(
                a.scales.as<float>()[i * a.scales.row_stride() + j / size.group + g],
                a.biases.as<float>()[i * a.biases.row_stride() + j / size.group + g],
                blocks::super_rule(d.type).high);
          quantize_super_block(d.type, x.data(), c.data(), d.given_grid ? given.data() : nullptr,
                               block);
          continue;
        }
        Small x;
        weights(j, x);
        switch (d.type) {
          case BlockType::q4_0: quantize_signed(x, 8, block); break;
          case BlockType::q5_0: quantize_signed(x, 16, block); break;
          case BlockType::q4_1: quantize_with_min(x, 15, block); break;
          case BlockType::q5_1: quantize_with_min(x, 31, block); break;
          default: quantize_bytes(x, block);
        }
      }
    }
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<GgufQuantize>> gguf_quantize_ref() { return kKernels; }

}  // namespace bittern
