// The scales and biases of a model's affine matrices, as numbers that learn:
//
//   w = s (q - m) + c      q the code, m the mean code of the group at the start
//
// s and c are f32. The model computes with s and b = c - s m, rounded to the dtype of its scales.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bittern/status.h"
#include "formats/checkpoint.h"
#include "model/backward.h"
#include "model/forward.h"

namespace bittern {

class LearnedGrids {
 public:
  // Groups of a tensor's rows, one after another in all spans below.
  struct Tensor {
    WeightPart part;
    std::int64_t first = 0, count = 0;  // groups
    double unit = 0;                    // mean |s| at the start
  };

  // Those of `model`, which was loaded from `source`, but its embedding and head.
  static Result<LearnedGrids> make(std::shared_ptr<ModelData> model, const Checkpoint& source);

  const std::vector<Tensor>& tensors() const { return tensors_; }
  std::int64_t count() const { return static_cast<std::int64_t>(scales_.size()); }
  std::span<float> scales() { return scales_; }
  std::span<float> centres() { return centres_; }
  std::span<const float> scales() const { return scales_; }
  std::span<const float> centres() const { return centres_; }
  std::span<const float> mean_codes() const { return means_; }
  std::int64_t first_of(const Matrix::Piece& piece) const;  // -1: the piece does not learn

  // The model computes with these from now on. An error where one is not finite.
  Status store();

  // Puts them in the place of those that `source` holds: the model's, opened anew. They live as
  // long as this.
  Status put_into(Checkpoint& source);

 private:
  std::shared_ptr<ModelData> model_;
  std::vector<Tensor> tensors_;
  std::map<std::size_t, std::int64_t> by_offset_;
  std::vector<float> scales_, centres_, means_;
  std::map<std::string, std::pair<std::vector<std::byte>, std::vector<std::byte>>> written_;
};

// Gradients of all groups' scales and biases, as quantized_matmul_backward gives them.
class GridGradients : public GradientSink {
 public:
  explicit GridGradients(const LearnedGrids& grids)
      : scales(static_cast<std::size_t>(grids.count())), biases(scales.size()), grids_(grids) {}
  Grids grids(const Matrix::Piece& piece) override;

  std::vector<float> scales, biases;

 private:
  const LearnedGrids& grids_;
};

}  // namespace bittern
