#include "distill/layer_inputs.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/ranks.h"
#include "distill/token_weights.h"
#include "model/forward.h"

namespace bittern {
namespace {

// Takes what a layer's products are given, where it is wanted: adds it to the sums, or keeps it
// for those of all processes.
class Collector : public Watcher {
 public:
  Collector(const std::set<InputPlace>& wanted, const TokenWeights* weights, Ranks* ranks)
      : wanted_(wanted), weights_(weights), ranks_(ranks) {}
  void begin(std::int64_t piece) {
    piece_ = piece;
    taken_.clear();
  }

  void product(const ProductInput& input) override {
    // The router has shown these rows.
    if (input.shared && input.place == ProductPlace::mlp_in) return;
    take(place_of(input), input.x);
  }
  void take(const InputPlace& place, const ConstView& x) {
    if (!wanted_.contains(place)) return;
    std::int64_t& taken = taken_[place];
    const std::int64_t first = std::exchange(taken, taken + x.shape[0]);
    if (ranks_ == nullptr) return add(place, piece_, first, x);
    std::vector<float> rows;
    for (std::int64_t i = 0; i < x.shape[0]; ++i) {
      const float* const row = x.as<float>() + i * x.stride[0];
      rows.insert(rows.end(), row, row + x.shape[1]);
    }
    Packer& kept = kept_[place];
    kept.add(piece_);
    kept.add(first);
    kept.add(x.shape[1]);
    kept.add(rows);
  }
  // What was kept by all processes, in the order of their ranks.
  Status exchange() {
    std::vector<std::vector<std::byte>> all;
    for (const InputPlace& place : wanted_) {
      BITTERN_TRY(ranks_->agree({}));
      BITTERN_TRY(ranks_->gather(kept_[place].bytes(), all));
      for (const auto& bytes : all) {
        for (Unpacker in(bytes); !in.empty();) {
          const auto piece = in.next<std::int64_t>(), first = in.next<std::int64_t>(),
                     width = in.next<std::int64_t>();
          const auto rows = in.next<std::vector<float>>();
          add(place, piece, first, view(rows.data(), {std::ssize(rows) / width, width}));
        }
      }
    }
    kept_.clear();
    return {};
  }
  Result<std::map<InputPlace, Gram>> sums() {
    BITTERN_TRY(agree(ranks_, status_));
    for (auto& [place, gram] : grams_)
      if (ranks_ != nullptr) BITTERN_TRY(gram.complete(*ranks_));
    return std::move(grams_);
  }

 private:
  // x: a piece's rows at this place, from `first` on.
  void add(const InputPlace& place, std::int64_t piece, std::int64_t first, const ConstView& x) {
    const auto weights = weights_ != nullptr ? weights_->of(place, piece, first, x.shape[0])
                                             : std::span<const float>();
    if (!weights.empty() && std::ssize(weights) != x.shape[0])
      status_ = internal("a token has other experts than it had before");
    else
      grams_.try_emplace(place, x.shape[1], ranks_).first->second.add(x, weights);
  }

  const std::set<InputPlace>& wanted_;
  const TokenWeights* weights_;
  Ranks* ranks_;
  std::int64_t piece_ = 0;
  std::map<InputPlace, std::int64_t> taken_;  // rows of the piece
  Status status_;
  std::map<InputPlace, Packer> kept_;
  std::map<InputPlace, Gram> grams_;
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
    const std::int64_t row = piece / count_of(ranks_) * context + first;
    BITTERN_TRY(f(segment, stream_.data() + row * data.decoder.hidden));
  }
  return {};
}

Result<LayerInputs> LayerInputs::make(const Model& model, const CalibrationText& text,
                                      const TokenWeights* weights, Ranks* ranks) {
  const ModelData& data = ModelAccess::data(model);
  for (const std::int32_t token : text.tokens)
    if (token < 0 || token >= data.decoder.vocab)
      return invalid("the text has token " + std::to_string(token) + ", but the model has only " +
                     std::to_string(data.decoder.vocab));
  auto session = Session::make(model, {.context = text.context, .kv = "f32"});
  if (!session) return session.status();
  LayerInputs inputs(model, text, std::move(*session));
  inputs.weights_ = weights;
  inputs.ranks_ = ranks;
  BITTERN_TRY(ModelAccess::data(inputs.session_).reserve(text.context));
  const std::int64_t rank = rank_of(ranks), count = count_of(ranks);
  const std::int64_t own = (text.pieces() - rank + count - 1) / count;
  inputs.stream_.resize(static_cast<std::size_t>(own * text.context * data.decoder.hidden));
  for (std::int64_t piece = rank; piece < text.pieces(); piece += count)
    BITTERN_TRY(inputs.each_pass(piece, [&](const Segment& segment, float* stream) {
      return embed_pass(data, segment, stream);
    }));
  return inputs;
}

Result<std::map<InputPlace, Gram>> LayerInputs::next(const std::set<InputPlace>& wanted, bool again,
                                                     const std::function<Status()>& done) {
  const ModelData& data = ModelAccess::data(model_);
  const bool behind = layer_ == model_.info().layers;
  Collector collector(wanted, weights_, ranks_);
  std::vector<float> copy;
  const auto run_piece = [&](std::int64_t piece) -> Status {
    collector.begin(piece);
    return each_pass(piece, [&](const Segment& segment, float* stream) {
      if (again) {
        copy.assign(stream, stream + segment.count() * data.decoder.hidden);
        stream = copy.data();
      }
      if (!behind) return layer_pass(data, segment, layer_, stream, &collector);
      const Status status = norm_pass(data, segment, stream);
      const ConstView x = view(stream, {segment.count(), data.decoder.hidden});
      if (status.ok()) collector.take({.layer = layer_}, x);
      return status;
    });
  };
  const std::int64_t rank = rank_of(ranks_), count = count_of(ranks_);
  for (std::int64_t first = 0; first < text_->pieces(); first += count) {
    Status status;
    if (first + rank < text_->pieces()) status = run_piece(first + rank);
    BITTERN_TRY(agree(ranks_, status));
    if (ranks_ != nullptr) BITTERN_TRY(collector.exchange());
    for (std::int64_t i = first; i < std::min(first + count, text_->pieces()); ++i)
      BITTERN_TRY(done());
  }
  if (!again) ++layer_;
  BITTERN_TRY(agree(ranks_, {}));
  return collector.sums();
}

}  // namespace bittern
