#include "core/blocks.h"
#include "oracle/aim.h"

namespace bittern::oracle {

std::vector<GgufDesc> gguf_dequantize_check_cases() {
  std::vector<GgufDesc> cases;
  for (std::size_t i = 0; i < std::size(kBlockTypeNames); ++i) {
    const auto type = static_cast<BlockType>(i);
    const std::int64_t block = block_size(type).weights;
    constexpr DType kElements[] = {DType::f32, DType::f16, DType::bf16};
    for (const DType element : kElements)
      for (const std::int64_t blocks : {0, 1, 3, 8, 17})
        cases.push_back({3, blocks * block, type, element});
    cases.push_back({0, block, type, DType::f32});
  }
  // Large enough for streaming stores, in rows of several chunks and a tail; groups of 32 and
  // of 16.
  cases.push_back({66, 4128, BlockType::q4_0, DType::f32});
  cases.push_back({130, 4128, BlockType::q5_1, DType::f16});
  cases.push_back({130, 4352, BlockType::q4_k, DType::bf16});
  cases.push_back({66, 4352, BlockType::q6_k, DType::f32});
  cases.push_back({130, 4352, BlockType::q2_k, DType::f16});
  cases.push_back({130, 4352, BlockType::q3_k, DType::bf16});
  cases.push_back({130, 4352, BlockType::iq4_xs, DType::f16});
  cases.push_back({66, 4128, BlockType::mxfp4, DType::f32});
  return cases;
}

std::vector<BenchCase<GgufDesc>> gguf_dequantize_bench_cases() {
  std::vector<BenchCase<GgufDesc>> cases;
  for (std::size_t i = 0; i < std::size(kBlockTypeNames); ++i)
    cases.push_back({std::string(kBlockTypeNames[i]) + "->f32",
                     {8192, 4096, static_cast<BlockType>(i), DType::f32}});
  cases.push_back({"Q4_K->bf16", {8192, 4096, BlockType::q4_k, DType::bf16}});
  return cases;
}

// Random bytes hold every code; of the scales they would make mostly odd numbers, so half of them
// become ordinary ones: then roundings to half types and differences s q - m show.
void gguf_dequantize_aim(const GgufDesc& d, const GgufDequantize::Args& a, Rng& rng) {
  const BlockSize size = block_size(d.type);
  const auto aim = [&](std::uint8_t* at) {
    if (rng.chance(2)) return;
    const f16 x = to_f16(static_cast<float>(rng.normal() * 0.01));
    std::memcpy(at, &x, sizeof x);
  };
  if (d.row_blocks() == 0) return;
  for (std::int64_t i = 0; i < d.outer_size; ++i) {
    for (std::int64_t k = 0; k < d.row_blocks(); ++k) {
      auto* block = data<std::uint8_t>(a.blocks) + i * a.blocks.row_stride() + k * size.bytes;
      switch (d.type) {
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
