#include "distill/token_weights.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "bittern/ops/log_softmax.h"
#include "bittern/plan.h"
#include "core/dot.h"
#include "core/math.h"
#include "core/ranks.h"
#include "core/split_mix.h"
#include "model/streams.h"

namespace bittern {
namespace {

constexpr std::int64_t kRows = 64;  // positions whose logits are in memory at once
constexpr float kMost = 50;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// |d_y|^2 of every product of a piece, row after row.
class Squares : public GradientSink {
 public:
  void product(const ProductInput& input, const ConstView& d_y) override {
    std::vector<float>& to = of_[place_of(input)];
    for (std::int64_t i = 0; i < d_y.shape[0]; ++i) {
      const float* const row = d_y.as<float>() + i * d_y.stride[0];
      to.push_back(dot(row, row, d_y.shape[1]));
    }
  }
  std::map<InputPlace, std::vector<float>> take() { return std::exchange(of_, {}); }

 private:
  std::map<InputPlace, std::vector<float>> of_;
};

// x: logits [rows, vocab], which become d L / d logits = softmax(x) - 1 at a label drawn from it.
Status draw_labels(float* x, std::int64_t rows, std::int64_t vocab, double softcap,
                   std::uint64_t counter, Scratch& scratch) {
  LogSoftmaxDesc desc{.rows = rows, .dim = vocab, .softcap = softcap};
  const auto plan = Plan<LogSoftmax>::select(desc);
  if (!plan) return plan.status();
  const MutView logits = view(x, {rows, vocab});
  const std::size_t bytes = plan->workspace_bytes();
  std::vector<float> slope;
  for (std::int64_t r = 0; softcap != 0 && r < rows * vocab; ++r) {
    const float t = math::tanh(x[r] / static_cast<float>(softcap));
    slope.push_back(1 - t * t);
  }
  BITTERN_TRY(plan->run({.x = logits, .y = logits}, {}, {scratch.take(bytes), bytes}));
  for (std::int64_t r = 0; r < rows; ++r) {
    float* const row = x + r * vocab;
    const double u =
        static_cast<double>(split_mix(kGolden * (counter + at(r) + 1)) >> 11) * 0x1p-53;
    double sum = 0;
    std::int64_t label = -1;
    for (std::int64_t j = 0; j < vocab; ++j) {
      row[j] = math::exp(row[j]);
      sum += double{row[j]};
      if (label < 0 && sum > u) label = j;
    }
    if (label >= 0) row[label] -= 1;
    for (std::int64_t j = 0; softcap != 0 && j < vocab; ++j) row[j] *= slope[at(r * vocab + j)];
  }
  return {};
}

}  // namespace

Result<TokenWeights> TokenWeights::make(const Model& model, const CalibrationText& text,
                                        Ranks* ranks, const std::function<Status()>& done) {
  auto streams = LayerStreams::make(model, text.context);
  if (!streams) return streams.status();
  const ModelData& data = streams->model();
  const Decoder& d = data.decoder;
  TokenWeights weights;
  Squares squares;
  Scratch scratch;
  PieceStreams passed;
  std::vector<float> logits(at(kRows * d.vocab));
  const auto make = [&](std::int64_t piece, Packer& out) -> Status {
    BITTERN_TRY(streams->forward({text.piece(piece), at(text.context)}, true, passed));
    passed.d_stream.resize(passed.hidden.size());
    for (std::int64_t first = 0; first < text.context; first += kRows) {
      const std::int64_t count = std::min(kRows, text.context - first);
      const float* const hidden = passed.hidden.data() + first * d.hidden;
      scratch.release({});
      const MutView x = view(logits.data(), {count, d.vocab});
      BITTERN_TRY(uncapped_head_pass(data, hidden, count, x, scratch));
      BITTERN_TRY(draw_labels(logits.data(), count, d.vocab, d.logit_softcap,
                              static_cast<std::uint64_t>(piece * text.context + first), scratch));
      squares.product({.layer = static_cast<std::int64_t>(d.layers.size())}, x);
      BITTERN_TRY(head_backward(data, hidden, count, x, passed.d_stream.data() + first * d.hidden,
                                squares, scratch));
    }
    BITTERN_TRY(streams->norm_backward(passed));
    for (std::int64_t i = streams->layers(); i-- > 0;)
      BITTERN_TRY(streams->layer_backward(i, passed, squares));
    for (const auto& [place, numbers] : squares.take()) {
      out.add(place);
      out.add(numbers);
    }
    return {};
  };
  const auto take = [&](std::int64_t piece, Unpacker in) -> Status {
    while (!in.empty()) {
      const auto place = in.next<InputPlace>();
      auto& all = weights.weights_[place];
      all.resize(at(text.pieces()));
      all[at(piece)] = in.next<std::vector<float>>();
    }
    return done();
  };
  BITTERN_TRY(deal(ranks, text.pieces(), DealTo::all, make, take));
  for (auto& [place, pieces] : weights.weights_) {
    double sum = 0, rows = 0;
    for (const std::vector<float>& numbers : pieces) {
      for (const float x : numbers) sum += double{x};
      rows += static_cast<double>(numbers.size());
    }
    const double mean = sum / rows;
    for (std::vector<float>& numbers : pieces)
      for (float& x : numbers)
        x = mean > 0 ? std::min(static_cast<float>(double{x} / mean), kMost) : 1.0f;
  }
  return weights;
}

std::span<const float> TokenWeights::of(const InputPlace& place, std::int64_t piece,
                                        std::int64_t first, std::int64_t count) const {
  const auto found = weights_.find(place);
  if (found == weights_.end()) return {};
  const std::span<const float> rows = found->second[at(piece)];
  const std::size_t from = std::min(at(first), rows.size());
  return rows.subspan(from, std::min(at(count), rows.size() - from));
}

}  // namespace bittern
