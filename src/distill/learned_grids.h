// What learns of a model's affine matrices:
//
//   w = s (q - m) + c      q the code, m the mean code of the group at the start
//
// s and c are f32. The model computes with s and b = c - s m, rounded to the dtype of its scales.
// Where zero points are integers, m is the zero point and c is 0: s alone learns, and is rounded as
// its folder stores it (convert/zero_points.h). Codes may move too. Each weight of a layer then has
// a latent code z in f32, and q is z rounded, half to even, and clamped.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bittern/status.h"
#include "formats/checkpoint.h"
#include "model/backward.h"
#include "model/forward.h"

namespace bittern {

// Of store(): a number has left its dtype's range, as it does at too high a rate.
inline constexpr Code kDiverged = Code::unsupported;

class LearnedGrids {
 public:
  // Groups of a tensor's rows, and its weights, one after another in all spans below.
  struct Tensor {
    WeightPart part;
    std::int64_t first = 0, count = 0;           // groups
    std::int64_t first_weight = 0, weights = 0;  // those whose codes move: none, or all
    double unit = 0;                             // mean |s| at the start
    DType stored = DType::f32;                   // of the folder's scales
  };
  // What is updated at once: the tensors of a layer, or those of embedding and head.
  struct Slice {
    std::size_t first_tensor = 0, tensors = 0;
    std::int64_t first = 0, count = 0;           // groups
    std::int64_t first_weight = 0, weights = 0;  // whose codes move
  };

  // Those of `model`, which was loaded from `source`.
  static Result<LearnedGrids> make(std::shared_ptr<ModelData> model, const Checkpoint& source,
                                   bool codes_move, bool integer_zeros);

  // The same grids before anything was learned, to be written: they share the model with these.
  Result<LearnedGrids> at_start(const Checkpoint& source) const {
    return make(model_, source, !codes_.empty(), integer_zeros_);
  }

  const std::vector<Tensor>& tensors() const { return tensors_; }
  // Of layer i; the last one is of embedding and head, and empty where these do not learn.
  const std::vector<Slice>& slices() const { return slices_; }
  const Slice& ends() const { return slices_.back(); }
  std::int64_t count() const { return static_cast<std::int64_t>(scales_.size()); }
  bool integer_zeros() const { return integer_zeros_; }
  std::span<float> scales() { return scales_; }
  std::span<float> centres() { return centres_; }
  std::span<std::uint8_t> codes() { return codes_; }  // those that move
  std::span<const float> scales() const { return scales_; }
  std::span<const float> centres() const { return centres_; }
  std::span<const std::uint8_t> codes() const { return codes_; }
  std::span<const float> mean_codes() const { return means_; }

  // How many codes are others than those of `source`, the model's, opened anew.
  Result<std::int64_t> codes_moved(const Checkpoint& source) const;
  // Where latent codes begin: where the teacher's weight is on the grid, if that is nearest to the
  // code. Otherwise, the code makes up for errors of others, and the latent code begins there.
  Result<std::vector<float>> latents(const Checkpoint& teacher) const;
  // The codes of a slice become those of its latents, which are all weights'.
  void round_codes(const Slice& slice, std::span<float> latents);

  // The model computes with the numbers of a slice, or of all, from now on. An error where one is
  // not finite.
  Status store(const Slice& slice);
  Status store();

  // Puts them in the place of those that `source` holds: the model's, opened anew. They live as
  // long as this.
  Status put_into(Checkpoint& source);

 private:
  friend class SliceGradients;
  struct Stored {
    std::vector<std::byte> codes, scales, biases;
  };
  // Of a tensor, as MLX stores it, with scales and biases of this dtype.
  Result<Stored> stored(const Tensor& tensor, DType dtype) const;

  bool integer_zeros_ = false;
  std::shared_ptr<ModelData> model_;
  std::vector<Tensor> tensors_;
  std::vector<Slice> slices_;
  std::map<std::size_t, std::size_t> by_offset_;  // tensors
  std::vector<float> scales_, centres_, means_;
  std::vector<std::uint8_t> codes_;
  std::map<std::string, Stored> written_;
};

// The gradients of one slice, of one piece of text: [groups] of scales, [groups] of biases, and
// [weights] of W where codes move. They begin as zeros.
class SliceGradients : public GradientSink {
 public:
  SliceGradients(const LearnedGrids& grids, const LearnedGrids::Slice& slice)
      : numbers(static_cast<std::size_t>(2 * slice.count + slice.weights)),
        grids_(grids),
        slice_(slice) {}
  Grids grids(const Matrix::Piece& piece) override;

  std::vector<float> numbers;

 private:
  const LearnedGrids& grids_;
  const LearnedGrids::Slice& slice_;
};

}  // namespace bittern
