#include "convert/target.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace bittern {
namespace {

struct Step {
  std::size_t tensor, from, to;
  std::uint64_t bytes;
  double gain;  // per byte
};

struct Answer {
  std::vector<std::size_t> chosen;  // of each tensor
  std::uint64_t bytes = 0;

  bool takes(const Step& step) const { return chosen[step.tensor] == step.from; }
  void take(const Step& step) {
    chosen[step.tensor] = step.to;
    bytes += step.bytes;
  }
};

using Choices = std::vector<std::vector<SizedLoss>>;

double gain(const SizedLoss& from, const SizedLoss& to) {
  return (from.loss - to.loss) / static_cast<double>(to.bytes - from.bytes);
}

// The corners of the lower convex hull, the smallest choice first.
std::vector<std::size_t> hull(const std::vector<SizedLoss>& choices) {
  std::vector<std::size_t> order(choices.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::pair(choices[a].bytes, choices[a].loss) <
           std::pair(choices[b].bytes, choices[b].loss);
  });
  std::vector<std::size_t> corners;
  for (const std::size_t next : order) {
    if (!std::isfinite(choices[next].loss)) continue;
    if (corners.empty()) {
      corners.push_back(next);
      continue;
    }
    if (!(choices[next].loss < choices[corners.back()].loss)) continue;
    while (corners.size() > 1 &&
           gain(choices[corners[corners.size() - 2]], choices[corners.back()]) <=
               gain(choices[corners.back()], choices[next]))
      corners.pop_back();
    corners.push_back(next);
  }
  return corners;
}

Answer answer_of(const Choices& choices, std::vector<std::size_t> chosen) {
  Answer answer{.chosen = std::move(chosen)};
  for (std::size_t t = 0; t < choices.size(); ++t)
    answer.bytes += choices[t][answer.chosen[t]].bytes;
  return answer;
}

double loss_of(const Choices& choices, const Answer& answer) {
  double loss = 0;
  for (std::size_t t = 0; t < choices.size(); ++t) loss += choices[t][answer.chosen[t]].loss;
  return loss;
}

}  // namespace

std::vector<std::size_t> choose_within(const Choices& choices,
                                       const std::vector<std::vector<std::size_t>>& uniform,
                                       std::uint64_t room) {
  std::vector<Step> steps;
  std::vector<std::size_t> smallest;
  for (std::size_t t = 0; t < choices.size(); ++t) {
    const std::vector<std::size_t> corners = hull(choices[t]);
    smallest.push_back(corners[0]);
    for (std::size_t i = 1; i < corners.size(); ++i) {
      const SizedLoss &from = choices[t][corners[i - 1]], &to = choices[t][corners[i]];
      steps.push_back({t, corners[i - 1], corners[i], to.bytes - from.bytes, gain(from, to)});
    }
  }
  std::stable_sort(steps.begin(), steps.end(),
                   [](const Step& a, const Step& b) { return a.gain > b.gain; });

  Answer below = answer_of(choices, smallest);
  auto next = steps.begin();
  for (; next != steps.end() && below.bytes + next->bytes <= room; ++next) below.take(*next);
  if (next == steps.end()) return below.chosen;

  const std::uint64_t end = below.bytes + next->bytes;
  std::vector<Answer> bases{below};
  for (const std::vector<std::size_t>& chosen : uniform) {
    Answer answer = answer_of(choices, chosen);
    if (answer.bytes >= below.bytes && answer.bytes <= room) bases.push_back(std::move(answer));
  }
  Answer best = below;
  double least = loss_of(choices, best);
  for (const Answer& base : bases) {
    for (std::uint64_t gap = end - base.bytes; gap > 0; gap /= 2) {
      Answer filled = base;
      for (const Step& step : steps) {
        if (!filled.takes(step) || filled.bytes + step.bytes > base.bytes + gap) continue;
        if (filled.bytes + step.bytes > room) break;
        filled.take(step);
      }
      if (const double loss = loss_of(choices, filled); loss < least) {
        least = loss;
        best = std::move(filled);
      }
    }
  }
  return best.chosen;
}

}  // namespace bittern
