// How much the error of each token's products counts: |dL/dy|^2 of a product's outputs y, with L
// the negative log probability of a label that is drawn from the model's own predictions (the
// diagonal of Fisher's information, token by token). For each product divided by the mean over the
// text, and at most 50.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "bittern/model.h"
#include "bittern/status.h"
#include "distill/calibration_text.h"
#include "distill/layer_inputs.h"

namespace bittern {

class TokenWeights {
 public:
  // `done` is called after each piece. The model has exact activations. Processes share the pieces.
  static Result<TokenWeights> make(const Model& model, const CalibrationText& text, Ranks* ranks,
                                   const std::function<Status()>& done);

  // Of a piece's rows at this place, which are its tokens, or those that an expert is used for;
  // nothing where the place has none.
  std::span<const float> of(const InputPlace& place, std::int64_t piece, std::int64_t first,
                            std::int64_t count) const;

 private:
  std::map<InputPlace, std::vector<std::vector<float>>> weights_;  // of each piece
};

}  // namespace bittern
