// How large the inputs of a model's matrices are on a text: llama.cpp's importance matrix.
//
//   auto calibration = calibrate(*model, *tokens, {.context = 512});
//   write_imatrix(*calibration, "imatrix.gguf", {.dataset = "text.txt"});
//
// For each matrix, under its name in GGUF (whatever the model's own format) and in GGUF's order of
// columns, the sum of the squares of each column of its inputs, over all tokens; of experts, over
// the tokens that each was given. Sums are f64, tokens ascending, so they have the same bits on
// every SIMD target and thread count. The head is among them unless it is the embedding.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "bittern/model.h"
#include "bittern/status.h"

namespace bittern {

struct CalibrateProgress {
  std::int64_t done = 0, total = 0;  // tokens
};

struct CalibrateOptions {
  std::int64_t context = 512;  // the text is cut into pieces of so many tokens; a rest is left out
  std::int64_t pieces = 0;     // at most so many; 0: all
  std::int32_t first = -1;  // takes the place of each piece's first token (bos); -1: nothing does
  // Returns whether to go on; false ends the call with Code::cancelled.
  std::function<bool(const CalibrateProgress&)> progress{};
};

struct MatrixInputs {
  std::string name;
  std::int64_t columns = 0;
  std::vector<double> squares;      // [matrices, columns]; one matrix, or one for each expert
  std::vector<std::uint64_t> rows;  // [matrices]: inputs that were summed
};

struct Calibration {
  std::int64_t context = 0, pieces = 0, tokens = 0;
  std::vector<MatrixInputs> matrices{};
};

Result<Calibration> calibrate(const Model& model, std::span<const std::int32_t> tokens,
                              const CalibrateOptions& options = {}) noexcept;

struct ImatrixOptions {
  std::string dataset{};  // the text's name, for whoever reads the file later
  bool force = false;     // an importance matrix (GGUF) of this name is replaced
};

// llama.cpp's GGUF form, which `bittern quantize --imatrix` and llama-quantize read. The file
// appears under its name when it is whole.
Status write_imatrix(const Calibration& calibration, const std::string& path,
                     const ImatrixOptions& options = {}) noexcept;

}  // namespace bittern
