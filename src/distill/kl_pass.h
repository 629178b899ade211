// KL(teacher || student) of a piece of text, and its gradients: the student's layers forwards, the
// loss a few positions at a time, and the layers backwards.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "bittern/model.h"
#include "bittern/status.h"
#include "model/backward.h"
#include "model/forward.h"
#include "model/streams.h"

namespace bittern {

class KlPass {
 public:
  // Pieces have `context` tokens.
  static Result<KlPass> make(const Model& teacher, std::shared_ptr<const ModelData> student,
                             std::int64_t context);

  std::int64_t context() const { return context_; }
  std::int64_t teacher_width() const { return ModelAccess::data(teacher_).decoder.hidden; }

  // f32 [context, teacher_width]: what the teacher's head reads.
  Status teach(std::span<const std::int32_t> tokens, float* hidden);
  // The mean over all positions of a piece; its gradients go to the sink, if there is one.
  Result<double> loss(std::span<const std::int32_t> tokens, const float* taught,
                      GradientSink* sink = nullptr);

 private:
  KlPass(const Model& teacher, std::int64_t context, Session teaching, LayerStreams student)
      : teacher_(teacher),
        context_(context),
        teaching_(std::move(teaching)),
        student_(std::move(student)) {}

  Model teacher_;
  std::int64_t context_;
  Session teaching_;
  LayerStreams student_;
  Scratch scratch_;
  std::vector<float> d_stream_;
  std::vector<float> taught_logits_, logits_, losses_;
};

}  // namespace bittern
