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

Status LayerStreams::forward(std::span<const std::int32_t> tokens, bool keep, PieceStreams& piece) {
  const std::int64_t size = static_cast<std::int64_t>(tokens.size()) * model().decoder.hidden;
  SessionData& session = ModelAccess::data(session_);
  forget_all(session);
  piece.tokens = tokens;
  const Segment segment{.session = &session, .tokens = tokens};
  piece.streams.resize(static_cast<std::size_t>(size * (keep ? layers() + 1 : 1)));
  float* stream = piece.streams.data();
  BITTERN_TRY(embed_pass(model(), segment, stream));
  for (std::int64_t i = 0; i < layers(); ++i) {
    if (keep) stream = std::copy_n(stream, size, stream + size) - size;
    BITTERN_TRY(layer_pass(model(), segment, i, stream, static_cast<Watcher*>(nullptr)));
  }
  piece.hidden.assign(stream, stream + size);
  return norm_pass(model(), segment, piece.hidden.data());
}

Status LayerStreams::norm_backward(PieceStreams& piece) {
  const Segment segment{.session = &ModelAccess::data(session_), .tokens = piece.tokens};
  const float* const stream =
      piece.streams.data() + layers() * static_cast<std::int64_t>(piece.hidden.size());
  return bittern::norm_backward(model(), segment, stream, piece.d_stream.data());
}

Status LayerStreams::layer_backward(std::int64_t layer, PieceStreams& piece, GradientSink& sink) {
  const Segment segment{.session = &ModelAccess::data(session_), .tokens = piece.tokens};
  const float* const stream =
      piece.streams.data() + layer * static_cast<std::int64_t>(piece.hidden.size());
  return bittern::layer_backward(model(), segment, layer, stream, piece.d_stream.data(), tape_,
                                 sink);
}

}  // namespace bittern
