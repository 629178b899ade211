#include "distill/learner.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "bittern/ops/adam.h"
#include "bittern/plan.h"
#include "core/angle.h"
#include "distill/gradient_sum.h"

namespace bittern {
namespace {

constexpr double kCentreRate = 5.0 / 3;

std::span<const std::int32_t> tokens_of(const CalibrationText& text, std::int64_t piece) {
  return {text.piece(piece), static_cast<std::size_t>(text.context)};
}

}  // namespace

LearnState Learner::begin() {
  LearnState state;
  const auto copy = [](std::span<const float> numbers) {
    return std::vector<float>(numbers.begin(), numbers.end());
  };
  state.parameters[0] = copy(grids_.scales());
  state.parameters[1] = copy(grids_.centres());
  for (int i = 0; i < 2; ++i) {
    state.best[i] = state.parameters[i];
    state.means[i].assign(state.parameters[i].size(), 0.0f);
    state.variances[i] = state.means[i];
  }
  return state;
}

Status Learner::use(const std::vector<float> (&parameters)[2]) {
  std::copy(parameters[0].begin(), parameters[0].end(), grids_.scales().begin());
  std::copy(parameters[1].begin(), parameters[1].end(), grids_.centres().begin());
  return grids_.store();
}

Result<double> Learner::step(LearnState& state, std::int64_t steps) {
  taught_.resize(static_cast<std::size_t>(text_.train.context * pass_.teacher_width()));
  GradientSum sums[2];
  double kl = 0;
  for (std::int64_t i = 0; i < options_.batch; ++i) {
    const std::int64_t piece = text_.nth(state.step * options_.batch + i, options_.seed);
    const auto tokens = tokens_of(text_.train, piece);
    BITTERN_TRY(pass_.teach(tokens, taught_.data()));
    GridGradients gradients(grids_);
    const auto loss = pass_.loss(tokens, taught_.data(), &gradients);
    if (!loss) return loss.status();
    kl += *loss;
    sums[0].add(std::move(gradients.scales));
    sums[1].add(std::move(gradients.biases));
  }
  // w = s (q - m) + c: the gradient of s is that of the scale less m times that of the bias.
  std::vector<float> gradient[2] = {sums[0].take(), sums[1].take()};
  const float share = 1.0f / static_cast<float>(options_.batch);
  const std::span<const float> means = grids_.mean_codes();
  for (std::size_t i = 0; i < means.size(); ++i) {
    gradient[0][i] = share * std::fma(-means[i], gradient[1][i], gradient[0][i]);
    gradient[1][i] *= share;
  }
  const double turn =
      std::numbers::pi * static_cast<double>(state.step) / static_cast<double>(steps);
  const double rate = state.rate * 0.5 * (1 + angle::cos_sin(turn).cos);
  ++state.step;
  for (const LearnedGrids::Tensor& tensor : grids_.tensors()) {
    for (int i = 0; i < 2; ++i) {
      AdamDesc desc{};
      desc.count = tensor.count;
      desc.rate = rate * tensor.unit * (i == 0 ? 1 : kCentreRate);
      desc.beta1 = 0.9;
      desc.beta2 = 0.999;
      desc.epsilon = 1e-12;
      desc.step = state.step;
      const auto plan = Plan<Adam>::select(desc);
      if (!plan) return plan.status();
      const auto part = [&](std::vector<float>& numbers) {
        return view(numbers.data() + tensor.first, {tensor.count});
      };
      Adam::Args args{};
      args.gradient = part(gradient[i]);
      args.parameter = part(state.parameters[i]);
      args.mean = part(state.means[i]);
      args.variance = part(state.variances[i]);
      BITTERN_TRY(plan->run(args));
    }
  }
  BITTERN_TRY(use(state.parameters));
  return kl / static_cast<double>(options_.batch);
}

Result<double> Learner::validate(KlPass& pass) {
  const CalibrationText& text = text_.validation;
  const std::int64_t size = text.context * pass.teacher_width();
  if (validation_.empty()) {
    validation_.resize(static_cast<std::size_t>(text.pieces() * size));
    for (std::int64_t i = 0; i < text.pieces(); ++i)
      BITTERN_TRY(pass.teach(tokens_of(text, i), validation_.data() + i * size));
  }
  double sum = 0;
  for (std::int64_t i = 0; i < text.pieces(); ++i) {
    const auto loss = pass.loss(tokens_of(text, i), validation_.data() + i * size);
    if (!loss) return loss.status();
    sum += *loss;
  }
  return sum / static_cast<double>(text.pieces());
}

}  // namespace bittern
