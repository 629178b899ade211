// The blocks of 256 weights, in files of their own.
#pragma once
#include "bittern/ops/gguf_quantize.h"
#include "ops/gguf/gguf_quantize/block_rules.h"

namespace bittern {

// ref: one block of a K type from its weights, their importance, and its groups' grids, where these
// are given and not null.
void quantize_super_block(BlockType type, const float x[256], const float c[256],
                          const blocks::Grid* given, std::uint8_t* block);

// cpu: all blocks of the problem.
void run_super_blocks(const GgufQuantize::Desc& d, const GgufQuantize::Args& a);

}  // namespace bittern
