// KL(teacher || student) of pieces of text, and its gradients: the student's layers forwards, the
// loss a few positions at a time, and the layers backwards, one at a time.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "bittern/model.h"
#include "bittern/status.h"
#include "eval/targets_file.h"
#include "model/backward.h"
#include "model/forward.h"
#include "model/streams.h"

namespace bittern {

// What the teacher says of a piece.
struct Taught {
  const float* hidden = nullptr;         // f32 [tokens, teacher_width]: what its head reads
  const TargetsFile* targets = nullptr;  // in its place: rows of a file, from `first` on, for all
  std::int64_t first = 0;                // tokens but the last
};

class KlPass {
 public:
  // Pieces have `context` tokens.
  static Result<KlPass> make(const Model& teacher, std::shared_ptr<const ModelData> student,
                             std::int64_t context);

  std::int64_t context() const { return context_; }
  std::int64_t teacher_width() const { return ModelAccess::data(teacher_).decoder.hidden; }

  // f32 [context, teacher_width]: what the teacher's head reads.
  Status teach(std::span<const std::int32_t> tokens, float* hidden);
  // The mean over all positions of a piece that the teacher says something of. With a file of
  // targets the tokens that are not among the teacher's likeliest count as one.
  Result<double> loss(std::span<const std::int32_t> tokens, const Taught& taught) {
    return loss(tokens, taught, passing_, nullptr);
  }
  // The same, and the way back as far as the last layer: the head's gradients are added to those of
  // the sink, and `piece` is ready for layer_backward. The tokens outlive it.
  Result<double> loss(std::span<const std::int32_t> tokens, const Taught& taught,
                      PieceStreams& piece, GradientSink& sink) {
    return loss(tokens, taught, piece, &sink);
  }
  // The gradients of a layer, from the last to the first, and then of the embedding. The latter are
  // added to those of the sink.
  Status layer_backward(std::int64_t layer, PieceStreams& piece, GradientSink& sink);
  Status embedding_backward(const PieceStreams& piece, GradientSink& sink);
  std::int64_t layers() const { return student_.layers(); }

 private:
  KlPass(const Model& teacher, std::int64_t context, Session teaching, LayerStreams student)
      : teacher_(teacher),
        context_(context),
        teaching_(std::move(teaching)),
        student_(std::move(student)) {}
  Result<double> loss(std::span<const std::int32_t> tokens, const Taught& taught,
                      PieceStreams& piece, GradientSink* sink);

  Model teacher_;
  std::int64_t context_;
  Session teaching_;
  LayerStreams student_;
  Scratch scratch_;
  PieceStreams passing_;  // of a piece without a way back
  std::vector<float> taught_logits_, logits_, losses_;
};

}  // namespace bittern
