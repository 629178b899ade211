// The gradients of a decoder's layers, in ops. Each layer is computed anew (LayerTape), so that of
// a pass only the stream before every layer is kept.
#pragma once
#include <cstdint>
#include <span>

#include "bittern/status.h"
#include "bittern/tensor.h"
#include "model/forward.h"

namespace bittern {

// What is told of a pass's products, from the last to the first.
class GradientSink {
 public:
  virtual ~GradientSink() = default;
  // Where the gradients of a matrix' scales and biases go, f32 [outputs, inputs / group_size] each,
  // and those of its weights, f32 [outputs, inputs]. Nothing: they are not wanted.
  struct Grids {
    MutView scales{}, biases{}, weights{};
  };
  virtual Grids grids(const Matrix::Piece& piece) {
    (void)piece;
    return {};
  }
  // f32 [rows, outputs]: what arrives at the outputs of the product that reads `input`.
  virtual void product(const ProductInput& input, const ConstView& d_y) { (void)input, (void)d_y; }
};

// The segment begins its session and is the only one. `stream` f32 [tokens, hidden] is what the
// layer was given. d_stream: before, the gradient of what it gave; afterwards, of `stream`.
Status layer_backward(const ModelData& model, const Segment& segment, std::int64_t layer,
                      const float* stream, float* d_stream, LayerTape& tape, GradientSink& sink);
// The same of the norm before the head; d_stream: before, the gradient of the normed stream.
Status norm_backward(const ModelData& model, const Segment& segment, const float* stream,
                     float* d_stream);
// And of the head, whose logits are not capped: d_hidden f32 [rows, hidden].
Status head_backward(const ModelData& model, const float* hidden, std::int64_t rows,
                     const ConstView& d_logits, float* d_hidden, GradientSink& sink,
                     Scratch& scratch);
// Adds what reading rows of the embedding gives its scales and biases, if the sink wants them.
Status embedding_backward(const ModelData& model, std::span<const std::int32_t> tokens,
                          const float* d_stream, GradientSink& sink, Scratch& scratch);

}  // namespace bittern
