#include "distill/layer_inputs.h"

#include <algorithm>
#include <utility>

#include "distill/token_weights.h"
#include "model/forward.h"

namespace bittern {
namespace {

// Adds what a layer's products are given to the sums that are wanted.
class Collector : public Watcher {
 public:
  Collector(const std::set<InputPlace>& wanted, const TokenWeights* weights)
      : wanted_(wanted), weights_(weights) {}
  // The number of the token that the next rows begin with.
  void begin(std::int64_t first) { first_ = first; }

  void product(const ProductInput& input) override {
    if (input.expert >= 0) return;
    // The shared expert reads what the router reads.
    if (input.shared && input.place == ProductPlace::mlp_in) return;
    add({input.layer, input.place, input.shared}, input.x);
  }
  void add(const InputPlace& place, const ConstView& x) {
    if (!wanted_.contains(place)) return;
    const auto weights =
        weights_ != nullptr ? weights_->of(place, first_, x.shape[0]) : std::span<const float>();
    grams.try_emplace(place, x.shape[1]).first->second.add(x, weights);
  }

  std::map<InputPlace, Gram> grams;

 private:
  const std::set<InputPlace>& wanted_;
  const TokenWeights* weights_;
  std::int64_t first_ = 0;
};

}  // namespace

template <class F>
Status LayerInputs::each_pass(std::int64_t piece, const F& f) {
  const ModelData& data = ModelAccess::data(model_);
  SessionData& session = ModelAccess::data(session_);
  forget_all(session);
  const std::int64_t most = pass_tokens(data), context = text_->context;
  for (std::int64_t first = 0; first < context; first += most) {
    const std::int64_t count = std::min(most, context - first);
    const Segment segment{.session = &session,
                          .tokens = {text_->piece(piece) + first, static_cast<std::size_t>(count)},
                          .position = first};
    BITTERN_TRY(f(segment, stream_.data() + (piece * context + first) * data.decoder.hidden));
  }
  return {};
}

Result<LayerInputs> LayerInputs::make(const Model& model, const CalibrationText& text,
                                      const TokenWeights* weights) {
  const ModelData& data = ModelAccess::data(model);
  for (const std::int32_t token : text.tokens)
    if (token < 0 || token >= data.decoder.vocab)
      return invalid("the text has token " + std::to_string(token) + ", but the model has only " +
                     std::to_string(data.decoder.vocab));
  auto session = Session::make(model, {.context = text.context, .kv = "f32"});
  if (!session) return session.status();
  LayerInputs inputs(model, text, std::move(*session));
  inputs.weights_ = weights;
  BITTERN_TRY(ModelAccess::data(inputs.session_).reserve(text.context));
  inputs.stream_.resize(text.tokens.size() * static_cast<std::size_t>(data.decoder.hidden));
  for (std::int64_t piece = 0; piece < text.pieces(); ++piece)
    BITTERN_TRY(inputs.each_pass(piece, [&](const Segment& segment, float* stream) {
      return embed_pass(data, segment, stream);
    }));
  return inputs;
}

Result<std::map<InputPlace, Gram>> LayerInputs::next(const std::set<InputPlace>& wanted,
                                                     const std::function<Status()>& done) {
  const ModelData& data = ModelAccess::data(model_);
  const bool behind = layer_ == model_.info().layers;
  Collector collector(wanted, weights_);
  for (std::int64_t piece = 0; piece < text_->pieces(); ++piece) {
    const auto run = [&](const Segment& segment, float* stream) {
      collector.begin(piece * text_->context + segment.position);
      if (!behind) return layer_pass(data, segment, layer_, stream, &collector);
      const Status status = norm_pass(data, segment, stream);
      const ConstView x = view(stream, {segment.count(), data.decoder.hidden});
      if (status.ok()) collector.add({.layer = layer_}, x);
      return status;
    };
    BITTERN_TRY(each_pass(piece, run));
    BITTERN_TRY(done());
  }
  ++layer_;
  return std::move(collector.grams);
}

}  // namespace bittern
