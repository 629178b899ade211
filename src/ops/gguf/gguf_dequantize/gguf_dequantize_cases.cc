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

void gguf_dequantize_aim(const GgufDesc& d, const GgufDequantize::Args& a, Rng& rng) {
  aim_blocks(d.type, a.blocks, rng);
}

}  // namespace bittern::oracle
