// llama-quantize's file types: which type each tensor of a GGUF file gets. Most matrices have the
// mix's own type. Those where coarse weights do most damage (attn_v, ffn_down of some layers, the
// output) get more bits.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/ggml_type.h"

namespace bittern {

struct Mix {
  const char* name;         // "Q4_K_M"
  GgmlType type;            // what most matrices get
  std::uint32_t file_type;  // general.file_type
};

std::span<const Mix> mixes();
// By any of llama-quantize's names in any case; "Q4_K" is its alias for Q4_K_M. Null: not known.
const Mix* find_mix(std::string_view name);

// What the choice depends on beside the names.
struct MixModel {
  std::int64_t layers = 0, experts = 0;
  std::int64_t queries_per_key = 1;  // heads that share a key and value head
  bool large = false;                // llama.cpp's "70B": 80 layers of llama or qwen2 with GQA
  bool imatrix = false;              // an importance matrix is given
};

struct MixTensor {
  std::string_view name;     // GGUF's
  std::int64_t columns = 0;  // of a row
  bool named = false;        // a rule decides: it gets no type and moves no counter
};

// The type of each tensor, before a type whose block does not divide the row falls back.
std::vector<GgmlType> mix_types(const Mix& mix, const MixModel& model,
                                std::span<const MixTensor> tensors);

}  // namespace bittern
