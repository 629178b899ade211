// A decoder's pass over pieces of text, with what every layer reads kept: forwards, then backwards,
// a layer at a time.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "bittern/model.h"
#include "bittern/status.h"
#include "model/backward.h"
#include "model/forward.h"

namespace bittern {

// Of one piece.
struct PieceStreams {
  std::span<const std::int32_t> tokens{};  // the caller's
  std::vector<float> streams{};   // [layers + 1, tokens, hidden]; not kept: [tokens, hidden]
  std::vector<float> hidden{};    // [tokens, hidden]: the head's input
  std::vector<float> d_stream{};  // the gradient of `hidden`, then of what a layer reads
};

class LayerStreams {
 public:
  // For pieces of up to `context` tokens.
  static Result<LayerStreams> make(const Model& model, std::int64_t context);

  const ModelData& model() const { return ModelAccess::data(model_); }
  std::int64_t layers() const { return static_cast<std::int64_t>(model().decoder.layers.size()); }
  // Without `keep` there is no way back, and one layer's stream in memory.
  Status forward(std::span<const std::int32_t> tokens, bool keep, PieceStreams& piece);
  // The way back: through the norm before the head, then through each layer from the last.
  Status norm_backward(PieceStreams& piece);
  Status layer_backward(std::int64_t layer, PieceStreams& piece, GradientSink& sink);

 private:
  LayerStreams(const Model& model, Session session) : model_(model), session_(std::move(session)) {}

  Model model_;
  Session session_;
  LayerTape tape_;
};

}  // namespace bittern
