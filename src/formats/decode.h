// The numbers of a model's tensors, however they are stored.
#pragma once
#include <cstdint>
#include <optional>
#include <span>

#include "bittern/gguf_desc.h"
#include "bittern/status.h"
#include "formats/checkpoint.h"

namespace bittern {

// The block format of gguf_dequantize and gguf_quantize, where they have it.
std::optional<BlockType> block_type(GgmlType type);

// Rows [first, first + count) as f32 [count, columns]. GGUF blocks are decoded as the `gguf`
// package does, MLX's groups as mx.dequantize does on the CPU (rounded to the dtype of the scales),
// AWQ and GPTQ as (code - zero) * scale in f32; compressed-tensors' groups as that package does,
// the same product rounded to the dtype of the scales. For an unsupported type the error names the
// tensor.
Status decode_rows(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count,
                   std::span<float> out);

}  // namespace bittern
