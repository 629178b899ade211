#include "eval/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace bittern {

void Gathered::add(const PieceScores& piece) {
  nll.insert(nll.end(), piece.nll.begin(), piece.nll.end());
  kl.insert(kl.end(), piece.kl.begin(), piece.kl.end());
  dp.insert(dp.end(), piece.dp.begin(), piece.dp.end());
  same1 += piece.same1;
  same5 += piece.same5;
  const std::size_t positions = piece.nll.size();
  for (std::size_t i = 0; i < piece.layers.size(); ++i) layers[i / positions] += piece.layers[i];
}

Spread spread_of(std::vector<double> values) {
  Spread s;
  if (values.empty()) return s;
  const double n = static_cast<double>(values.size());
  double sum = 0, squares = 0;
  for (const double v : values) sum += v;
  s.mean = sum / n;
  for (const double v : values) squares += (v - s.mean) * (v - s.mean);
  if (values.size() > 1) s.error = std::sqrt(squares / (n - 1) / n);
  std::sort(values.begin(), values.end());
  const auto quantile = [&](double q) {
    const double place = q * (n - 1);
    const auto low = static_cast<std::size_t>(place);
    const std::size_t high = std::min(low + 1, values.size() - 1);
    return values[low] + (place - static_cast<double>(low)) * (values[high] - values[low]);
  };
  s.median = quantile(0.5);
  s.p90 = quantile(0.9);
  s.p99 = quantile(0.99);
  s.p999 = quantile(0.999);
  s.max = values.back();
  return s;
}

namespace {

// Of the segments dialect: each piece counts the same.
double mean_of_means(const std::vector<double>& values, std::span<const Piece> pieces) {
  double sum = 0;
  std::size_t at = 0;
  for (const Piece& piece : pieces) {
    double own = 0;
    for (std::int64_t i = 0; i < piece.scored(); ++i) own += values[at++];
    sum += own / static_cast<double>(piece.scored());
  }
  return sum / static_cast<double>(pieces.size());
}

std::vector<double> by_position(const std::vector<double>& kl, std::int64_t context,
                                std::span<const Piece> pieces) {
  std::array<double, kEvalParts> sum{}, count{};
  std::size_t at = 0;
  for (const Piece& piece : pieces) {
    for (std::int64_t position = piece.from; position + 1 < piece.length; ++position) {
      const auto part =
          static_cast<std::size_t>(position) * kEvalParts / static_cast<std::size_t>(context);
      sum[part] += kl[at++];
      count[part] += 1;
    }
  }
  std::vector<double> means;
  for (std::size_t i = 0; i < kEvalParts; ++i)
    means.push_back(count[i] > 0 ? sum[i] / count[i] : std::numeric_limits<double>::quiet_NaN());
  return means;
}

std::vector<std::uint64_t> histogram(const std::vector<double>& kl) {
  std::vector<std::uint64_t> bins(kEvalBins);
  const double last = static_cast<double>(kEvalBins) - 2;
  for (const double x : kl) {
    const double place = x > 0 ? std::floor((std::log10(x) + 8) * 2) : -1;
    bins[static_cast<std::size_t>(std::clamp(place, -1.0, last) + 1)] += 1;
  }
  return bins;
}

}  // namespace

ModelScore summary(const Gathered& g, const EvalOptions& o, std::span<const Piece> pieces) {
  ModelScore s;
  s.seconds = g.seconds;
  const Spread nll = spread_of(g.nll);
  s.nll = o.dialect == PerplexityDialect::segments ? mean_of_means(g.nll, pieces) : nll.mean;
  s.perplexity = std::exp(s.nll);
  s.error = s.perplexity * nll.error;
  const auto n = static_cast<double>(g.nll.size());
  for (const double sum : g.layers) s.layers.push_back(sum / n);
  if (g.kl.empty()) return s;

  Divergence& d = s.divergence;
  d.kl = spread_of(g.kl);
  d.lower_bound = g.lower_bound;
  double squares = 0;
  for (const double x : g.dp) squares += x * x;
  d.rms_dp = std::sqrt(squares / n);
  d.top1 = static_cast<double>(g.same1) / n;
  d.top5 = static_cast<double>(g.same5) / n;
  d.by_position = by_position(g.kl, o.context, pieces);
  d.histogram = histogram(g.kl);
  return s;
}

void find_largest(const float* row, std::int64_t count, std::span<std::int32_t> largest) {
  const auto before = [row](std::int32_t a, std::int32_t b) {
    return row[a] > row[b] || (row[a] == row[b] && a < b);
  };
  const auto k = static_cast<std::int64_t>(largest.size());
  for (std::int64_t i = 0; i < k; ++i)
    largest[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i);
  std::make_heap(largest.begin(), largest.end(), before);  // the least of them is in front
  for (std::int64_t i = k; i < count; ++i) {
    if (!(row[i] > row[largest[0]])) continue;  // numbers ascend: an equal one comes too late
    std::pop_heap(largest.begin(), largest.end(), before);
    largest.back() = static_cast<std::int32_t>(i);
    std::push_heap(largest.begin(), largest.end(), before);
  }
  std::sort_heap(largest.begin(), largest.end(), before);
}

Agreement agreement(std::array<std::int32_t, 5> a, std::array<std::int32_t, 5> b) {
  Agreement same{.top1 = a[0] == b[0]};
  std::sort(a.begin(), a.end());
  std::sort(b.begin(), b.end());
  same.top5 = a == b;
  return same;
}

}  // namespace bittern
