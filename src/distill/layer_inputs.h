// What the products of a decoder's layers are given on a text, one layer at a time: memory holds
// the stream of all tokens and one layer's sums, whatever the number of layers.
#pragma once
#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "bittern/model.h"
#include "bittern/ranks.h"
#include "bittern/status.h"
#include "distill/calibration_text.h"
#include "distill/gram.h"

namespace bittern {

// Which rows enter a product. The head's place is mixer_in of the layer behind the last.
struct InputPlace {
  std::int64_t layer = 0;
  ProductPlace place = ProductPlace::mixer_in;
  bool shared = false;       // of the shared expert
  std::int64_t expert = -1;  // of an expert's own rows; -1: of no expert
  auto operator<=>(const InputPlace&) const = default;
};

// That of a product. The shared expert's gate and up read what the router reads.
inline InputPlace place_of(const ProductInput& input) {
  const bool shared = input.shared && input.place != ProductPlace::mlp_in;
  return {input.layer, input.place, shared, input.expert};
}

class TokenWeights;

class LayerInputs {
 public:
  // The embeddings of the text. It outlives this, and so do the tokens' weights, if there are any.
  // Processes share the pieces, and the sums have the bits of one process.
  static Result<LayerInputs> make(const Model& model, const CalibrationText& text,
                                  const TokenWeights* weights = nullptr, Ranks* ranks = nullptr);

  // Runs the next layer (behind the last one, the final norm). The sums of its wanted places; an
  // expert that no token reached has none. `done` is called after each piece.
  // again: the same layer comes next once more, for sums that are too large to be made together.
  Result<std::map<InputPlace, Gram>> next(const std::set<InputPlace>& wanted, bool again,
                                          const std::function<Status()>& done);

 private:
  LayerInputs(const Model& model, const CalibrationText& text, Session session)
      : model_(model), text_(&text), session_(std::move(session)) {}
  // f(segment, its rows of the stream) for all tokens of a piece.
  template <class F>
  Status each_pass(std::int64_t piece, const F& f);

  Model model_;
  const CalibrationText* text_;
  const TokenWeights* weights_ = nullptr;
  Ranks* ranks_ = nullptr;
  Session session_;
  std::vector<float> stream_;  // [tokens, hidden]; of the pieces that this process has
  std::int64_t layer_ = 0;
};

}  // namespace bittern
