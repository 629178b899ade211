// A decoder's pass over a piece of text, with what every layer reads kept: forwards, then
// backwards.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "bittern/model.h"
#include "bittern/status.h"
#include "model/backward.h"
#include "model/forward.h"

namespace bittern {

class LayerStreams {
 public:
  // For pieces of up to `context` tokens.
  static Result<LayerStreams> make(const Model& model, std::int64_t context);

  const ModelData& model() const { return ModelAccess::data(model_); }
  // Without `keep` there is no way back, and one layer's stream in memory. The tokens outlive it.
  Status forward(std::span<const std::int32_t> tokens, bool keep);
  const std::vector<float>& hidden() const {
    return hidden_;
  }  // [tokens, hidden]: the head's input
  // d_hidden: before, the gradient of hidden(); afterwards, of the embeddings.
  Status backward(float* d_hidden, GradientSink& sink);

 private:
  LayerStreams(const Model& model, Session session) : model_(model), session_(std::move(session)) {}

  Model model_;
  Session session_;
  std::span<const std::int32_t> tokens_;
  LayerTape tape_;
  std::vector<float> streams_;  // [layers + 1, tokens, hidden], or [tokens, hidden]
  std::vector<float> hidden_;
};

}  // namespace bittern
