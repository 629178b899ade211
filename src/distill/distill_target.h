// What options of distill_model ask for: which of them are refused, and what is written.
#pragma once
#include <optional>
#include <string>

#include "bittern/distill.h"
#include "bittern/status.h"
#include "convert/mix.h"

namespace bittern {

// What each number must be; what the files say is checked later.
Status check_numbers(const DistillOptions& options);

// What is written, and the grids that matrices of the layers learn on.
struct DistillTarget {
  const Mix* mix = nullptr;  // of a GGUF file; null: a folder
  int bits = 4, group = 64;
  std::optional<std::string> scale_dtype{};
  bool compressed = false;  // a folder of compressed-tensors, not of MLX
  bool integer_zeros = false;

  bool gguf() const { return mix != nullptr; }
  // A folder's format, by its name.
  const char* folder_format() const { return compressed ? "compressed-tensors" : "mlx"; }
};

// Those of a GGUF file have the groups and scales of Q4_1 and Q5_1.
Result<DistillTarget> target_of(const DistillOptions& options, const std::string& out);

}  // namespace bittern
