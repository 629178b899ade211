#include "distill/learner.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "bittern/ops/adam.h"
#include "bittern/plan.h"
#include "core/angle.h"
#include "core/ranks.h"
#include "cpu/parallel.h"
#include "distill/gradient_sum.h"

namespace bittern {
namespace {

constexpr double kCentreRate = 5.0 / 3, kCodeRate = 1.4;

std::span<const std::int32_t> tokens_of(const CalibrationText& text, std::int64_t piece) {
  return {text.piece(piece), static_cast<std::size_t>(text.context)};
}

// The numbers of all processes, in the order of their ranks. `status`: whether this one has its.
Status share(Ranks* ranks, const Status& status, std::vector<double>& numbers) {
  BITTERN_TRY(agree(ranks, status));
  if (ranks == nullptr) return {};
  std::vector<std::vector<std::byte>> all;
  BITTERN_TRY(ranks->gather(std::as_bytes(std::span(numbers)), all));
  numbers.clear();
  for (const auto& bytes : all)
    for (Unpacker in(bytes); !in.empty();) numbers.push_back(in.next<double>());
  return {};
}

}  // namespace

double first_rate(int bits) {
  return bits <= 2 ? 0.0025 : bits == 3 ? 0.0009 : bits == 4 ? 0.0003 : 0.0001;
}

LearnState Learner::begin(std::vector<float> latents) {
  LearnState state;
  const auto copy = [](std::span<const float> numbers) {
    return std::vector<float>(numbers.begin(), numbers.end());
  };
  state.parameters[0] = copy(grids_.scales());
  state.parameters[1] = copy(grids_.centres());
  state.parameters[2] = std::move(latents);
  keep_best(state);
  return state;
}

LearnState Learner::anew(const LearnState& begun) {
  LearnState state;
  for (int i = 0; i < 3; ++i) state.parameters[i] = begun.parameters[i];
  return state;
}

void Learner::keep_best(LearnState& state) const {
  for (int i = 0; i < 2; ++i) state.best[i] = state.parameters[i];
  state.best_codes.assign(grids_.codes().begin(), grids_.codes().end());
}

Status Learner::use(LearnState& state) {
  std::copy(state.parameters[0].begin(), state.parameters[0].end(), grids_.scales().begin());
  std::copy(state.parameters[1].begin(), state.parameters[1].end(), grids_.centres().begin());
  for (const LearnedGrids::Slice& slice : grids_.slices())
    grids_.round_codes(slice, state.parameters[2]);
  return grids_.store();
}

Status Learner::use_best(const LearnState& state) {
  std::copy(state.best[0].begin(), state.best[0].end(), grids_.scales().begin());
  std::copy(state.best[1].begin(), state.best[1].end(), grids_.centres().begin());
  std::copy(state.best_codes.begin(), state.best_codes.end(), grids_.codes().begin());
  return grids_.store();
}

// The n-th to be learned from: all in an order, then all in another, and so on.
std::int64_t Learner::nth_piece(std::int64_t n) {
  const std::int64_t count = text_.train.pieces(), round = n / count;
  if (round != round_) order_ = text_.order(round, options_.seed);
  round_ = round;
  return order_[static_cast<std::size_t>(n % count)];
}

Result<double> Learner::step(LearnState& state, std::int64_t steps) {
  for (int i = 0; i < 3; ++i) {
    state.means[i].resize(state.parameters[i].size());
    state.variances[i].resize(state.parameters[i].size());
  }
  // The pieces of the step that this process has.
  Ranks* const ranks = options_.ranks;
  const std::int64_t first = options_.batch * rank_of(ranks) / count_of(ranks);
  const auto count =
      static_cast<std::size_t>(options_.batch * (rank_of(ranks) + 1) / count_of(ranks) - first);
  pieces_.resize(count);
  taught_.resize(static_cast<std::size_t>(text_.train.context * pass_.teacher_width()));
  std::vector<SliceGradients> ends;
  ends.reserve(count);
  std::vector<double> losses;
  const auto forwards = [&]() -> Status {
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t piece =
          nth_piece(state.step * options_.batch + first + static_cast<std::int64_t>(i));
      const auto tokens = tokens_of(text_.train, piece);
      Taught taught{.hidden = taught_.data()};
      if (targets_) {
        taught = {.targets = &*targets_, .first = places_.at(piece)};
      } else {
        BITTERN_TRY(pass_.teach(tokens, taught_.data()));
      }
      const auto loss =
          pass_.loss(tokens, taught, pieces_[i], ends.emplace_back(grids_, grids_.ends()));
      if (!loss) return loss.status();
      losses.push_back(*loss);
    }
    return targets_ ? targets_->unchanged() : Status();
  };
  double kl = 0;
  BITTERN_TRY(share(ranks, forwards(), losses));
  for (const double loss : losses) kl += loss;
  if (!std::isfinite(kl)) return kl;  // nothing is learned from it

  const double turn =
      std::numbers::pi * static_cast<double>(state.step) / static_cast<double>(steps);
  const double rate = state.rate * 0.5 * (1 + angle::cos_sin(turn).cos);
  ++state.step;
  for (std::int64_t layer = pass_.layers(); layer-- > 0;) {
    const LearnedGrids::Slice& slice = grids_.slices()[static_cast<std::size_t>(layer)];
    GradientSum sum(first);
    const auto backwards = [&]() -> Status {
      for (PieceStreams& piece : pieces_) {
        SliceGradients gradients(grids_, slice);
        BITTERN_TRY(pass_.layer_backward(layer, piece, gradients));
        sum.add(std::move(gradients.numbers));
      }
      return {};
    };
    auto whole = sum.take(ranks, backwards());
    if (!whole) return whole.status();
    BITTERN_TRY(update(slice, std::move(*whole), rate, state));
  }
  GradientSum sum(first);
  const auto backwards = [&]() -> Status {
    for (std::size_t i = 0; i < count; ++i) {
      BITTERN_TRY(pass_.embedding_backward(pieces_[i], ends[i]));
      sum.add(std::move(ends[i].numbers));
    }
    return {};
  };
  auto whole = sum.take(ranks, backwards());
  if (!whole) return whole.status();
  BITTERN_TRY(update(grids_.ends(), std::move(*whole), rate, state));
  return kl / static_cast<double>(options_.batch);
}

// sum: as SliceGradients has them, of all pieces.
Status Learner::update(const LearnedGrids::Slice& slice, std::vector<float> sum, double rate,
                       LearnState& state) {
  const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  float* const gradients[3] = {sum.data(), sum.data() + slice.count, sum.data() + 2 * slice.count};
  const float share = 1.0f / static_cast<float>(options_.batch);
  const float* const means = grids_.mean_codes().data() + slice.first;
  // w = s (q - m) + c: the gradient of s is that of the scale less m times that of the bias.
  for (std::int64_t i = 0; i < slice.count; ++i) {
    gradients[0][i] = share * std::fma(-means[i], gradients[1][i], gradients[0][i]);
    gradients[1][i] *= share;
  }
  const auto tensors = std::span(grids_.tensors()).subspan(slice.first_tensor, slice.tensors);
  for (const LearnedGrids::Tensor& tensor : tensors) {
    const WeightDesc& w = tensor.part.weights;
    // And that of q, which passes its rounding straight through, is s times that of w.
    cpu::parallel(tensor.weights / w.group_size, 1024, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t g = begin; g < end; ++g) {
        const float scale = share * state.parameters[0][at(tensor.first + g)];
        float* const d_w =
            gradients[2] + tensor.first_weight - slice.first_weight + g * w.group_size;
        for (std::int64_t j = 0; j < w.group_size; ++j) d_w[j] *= scale;
      }
    });
    // The more bits, the better the start.
    const double slower = first_rate(std::max(w.bits, bits_)) / first_rate(bits_);
    const double rates[3] = {rate * slower * tensor.unit, kCentreRate * rate * slower * tensor.unit,
                             kCodeRate * rate * slower};
    for (int i = 0; i < 3; ++i) {
      if (i == 1 && grids_.integer_zeros()) continue;
      AdamDesc desc{};
      desc.count = i < 2 ? tensor.count : tensor.weights;
      desc.rate = rates[i];
      desc.beta1 = 0.9;
      desc.beta2 = 0.999;
      desc.epsilon = 1e-12;
      desc.step = state.step;
      const auto plan = Plan<Adam>::select(desc);
      if (!plan) return plan.status();
      const std::int64_t first = i < 2 ? tensor.first : tensor.first_weight;
      const auto part = [&](std::vector<float>& numbers) {
        return view(numbers.data() + first, {desc.count});
      };
      Adam::Args args{};
      args.gradient =
          view(gradients[i] + first - (i < 2 ? slice.first : slice.first_weight), {desc.count});
      args.parameter = part(state.parameters[i]);
      args.mean = part(state.means[i]);
      args.variance = part(state.variances[i]);
      BITTERN_TRY(plan->run(args));
    }
  }
  const auto copy = [&](const std::vector<float>& from, std::span<float> to) {
    std::copy_n(from.begin() + slice.first, slice.count, to.begin() + slice.first);
  };
  copy(state.parameters[0], grids_.scales());
  copy(state.parameters[1], grids_.centres());
  grids_.round_codes(slice, state.parameters[2]);
  return grids_.store(slice);
}

Result<double> Learner::validate(KlPass& pass) {
  const CalibrationText& text = text_.validation;
  const std::int64_t size = text.context * pass.teacher_width();
  const std::int64_t rank = rank_of(options_.ranks), count = count_of(options_.ranks);
  if (validation_.empty()) {
    validation_.resize(static_cast<std::size_t>((text.pieces() + count - 1) / count * size));
    for (std::int64_t i = rank; i < text.pieces(); i += count)
      BITTERN_TRY(pass.teach(tokens_of(text, i), validation_.data() + i / count * size));
  }
  double sum = 0;
  const auto make = [&](std::int64_t i, Packer& out) -> Status {
    const auto loss =
        pass.loss(tokens_of(text, i), {.hidden = validation_.data() + i / count * size});
    if (loss) out.add(*loss);
    return loss.status();
  };
  const auto add = [&](std::int64_t, Unpacker in) {
    sum += in.next<double>();
    return Status();
  };
  BITTERN_TRY(deal(options_.ranks, text.pieces(), DealTo::all, make, add));
  return sum / static_cast<double>(text.pieces());
}

}  // namespace bittern
