// What was learned, on its way to the output: convert's MatrixCoder that takes codes from the
// student's start, and scales and biases from what they have become.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "convert/matrix_coder.h"
#include "convert/recipe.h"
#include "distill/learned_grids.h"
#include "formats/checkpoint.h"

namespace bittern {

class LearnedCoder : public MatrixCoder {
 public:
  // `start`: the student's folder, from which `grids`, which outlive this, began. The output's
  // tensors are GGUF's or the start's own.
  static Result<LearnedCoder> make(const std::string& start, LearnedGrids& grids, bool gguf);

  std::string_view method() const override { return "learned"; }
  Status prepare(const Checkpoint&) override { return {}; }
  std::optional<std::string> declines(const OutputTensor& tensor) const override;
  std::uint64_t fingerprint() const override;
  Result<std::vector<std::size_t>> code(const Checkpoint& source, const std::vector<Task>& tasks,
                                        const Sink& take,
                                        const ModelProgressFunction& progress) override;

 private:
  LearnedCoder(Checkpoint start, const LearnedGrids& grids)
      : start_(std::move(start)), grids_(grids) {}

  Checkpoint start_;
  const LearnedGrids& grids_;
  std::map<std::string, Recipe, std::less<>> recipes_;  // from the start, by names of the output
};

}  // namespace bittern
