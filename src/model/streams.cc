#include "model/streams.h"

#include <algorithm>
#include <utility>

namespace bittern {

Result<LayerStreams> LayerStreams::make(const Model& model, std::int64_t context) {
  auto session = Session::make(model, {.context = context, .kv = "f32"});
  if (!session) return session.status();
  BITTERN_TRY(ModelAccess::data(*session).reserve(context));
  return LayerStreams(model, std::move(*session));
}

Status LayerStreams::forward(std::span<const std::int32_t> tokens, bool keep) {
  const Decoder& d = model().decoder;
  const auto layers = static_cast<std::int64_t>(d.layers.size());
  const std::int64_t size = static_cast<std::int64_t>(tokens.size()) * d.hidden;
  SessionData& session = ModelAccess::data(session_);
  forget_all(session);
  tokens_ = tokens;
  const Segment segment{.session = &session, .tokens = tokens};
  streams_.resize(static_cast<std::size_t>(size * (keep ? layers + 1 : 1)));
  float* stream = streams_.data();
  BITTERN_TRY(embed_pass(model(), segment, stream));
  for (std::int64_t i = 0; i < layers; ++i) {
    if (keep) stream = std::copy_n(stream, size, stream + size) - size;
    BITTERN_TRY(layer_pass(model(), segment, i, stream, static_cast<Watcher*>(nullptr)));
  }
  hidden_.assign(stream, stream + size);
  return norm_pass(model(), segment, hidden_.data());
}

Status LayerStreams::backward(float* d_hidden, GradientSink& sink) {
  const auto layers = static_cast<std::int64_t>(model().decoder.layers.size());
  const Segment segment{.session = &ModelAccess::data(session_), .tokens = tokens_};
  const auto size = static_cast<std::int64_t>(hidden_.size());
  const float* stream = streams_.data() + layers * size;
  BITTERN_TRY(norm_backward(model(), segment, stream, d_hidden));
  for (std::int64_t i = layers; i-- > 0;) {
    stream -= size;
    BITTERN_TRY(layer_backward(model(), segment, i, stream, d_hidden, tape_, sink));
  }
  return {};
}

}  // namespace bittern
