#include "bittern/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/expect.h"
#include "core/float_mode.h"
#include "core/guarded.h"
#include "core/math.h"
#include "core/split_mix.h"

namespace bittern {
namespace {

constexpr std::string_view kName = "sample";

Status check(std::span<const float> logits, const SampleOptions& o) {
  if (logits.empty()) return fail(kName, "logits", "empty, expected at least one");
  if (logits.size() > std::numeric_limits<std::int32_t>::max())
    return fail(kName, "logits", "more than 2^31 - 1");
  if (!(o.temperature == 0 || (o.temperature >= 1e-30 && o.temperature <= 1e30))) {
    return fail(kName, "temperature", number_text(o.temperature) + ", expected 0 or 1e-30..1e30");
  }
  BITTERN_TRY(expect_at_least(kName, "top_k", o.top_k, 0));
  if (!(o.top_p > 0 && o.top_p <= 1))
    return fail(kName, "top_p", number_text(o.top_p) + ", expected above 0 and at most 1");
  if (!(o.min_p >= 0 && o.min_p <= 1))
    return fail(kName, "min_p", number_text(o.min_p) + ", expected 0..1");
  if (!(o.repetition_penalty >= 1e-30 && o.repetition_penalty <= 1e30)) {
    return fail(kName, "repetition_penalty",
                number_text(o.repetition_penalty) + ", expected 1e-30..1e30");
  }
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] < std::numeric_limits<float>::infinity()) continue;  // not so for NaN
    return fail(kName, "logits",
                "[" + std::to_string(i) + "] is " + (std::isnan(logits[i]) ? "NaN" : "infinite") +
                    ", expected a number or -infinity");
  }
  return {};
}

// Divides or multiplies the logits of the history, each once.
Status penalise(std::span<const std::int32_t> history, float penalty, std::vector<float>& logits) {
  std::vector<std::int32_t> seen(history.begin(), history.end());
  std::sort(seen.begin(), seen.end());
  seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
  const auto last = static_cast<std::int64_t>(logits.size()) - 1;
  for (const std::int32_t id : seen) {
    BITTERN_TRY(expect_between(kName, "history", id, 0, last));
    float& logit = logits[static_cast<std::size_t>(id)];
    logit = logit > 0 ? logit / penalty : logit * penalty;
    // A penalty below 1 must not make an infinity.
    logit = std::min(logit, std::numeric_limits<float>::max());
  }
  return {};
}

double uniform(std::uint64_t seed, std::uint64_t step) {
  return static_cast<double>(split_mix(split_mix(seed + kGolden) + kGolden * (step + 1)) >> 11) *
         0x1p-53;
}

// Larger logits first, and lower ids among equal ones.
struct Before {
  const std::vector<float>& logits;
  bool operator()(std::int32_t a, std::int32_t b) const {
    const float x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
    return x > y || (x == y && a < b);
  }
};

// The tokens that are left, and their w.
class Candidates {
 public:
  Candidates(const std::vector<float>& logits, float largest)
      : logits_(logits), largest_(largest), ids_(logits.size()) {
    for (std::size_t i = 0; i < ids_.size(); ++i) ids_[i] = static_cast<std::int32_t>(i);
  }
  void keep_top_k(std::int64_t k) {
    if (k == 0 || k >= static_cast<std::int64_t>(ids_.size())) return;
    std::nth_element(ids_.begin(), ids_.begin() + k, ids_.end(), Before{logits_});
    ids_.resize(static_cast<std::size_t>(k));
    std::sort(ids_.begin(), ids_.end());
  }
  void keep_top_p(double p) {
    if (p >= 1) return;
    double total = 0;
    for (const std::int32_t id : ids_) total += weight(id, 1);
    // A heap: mostly few of the tokens are needed in order.
    const auto after = [this](std::int32_t a, std::int32_t b) { return Before{logits_}(b, a); };
    std::make_heap(ids_.begin(), ids_.end(), after);
    double sum = 0;
    auto end = ids_.end();
    do {
      std::pop_heap(ids_.begin(), end, after);
      sum += weight(*--end, 1);
    } while (sum < p * total && end != ids_.begin());
    ids_.erase(ids_.begin(), end);
    std::sort(ids_.begin(), ids_.end());
  }
  void keep_min_p(double p) {
    if (p > 0) std::erase_if(ids_, [&](std::int32_t id) { return weight(id, 1) < p; });
  }
  std::int32_t draw(float temperature, double u) const {
    std::vector<double> weights(ids_.size());
    double total = 0;
    for (std::size_t i = 0; i < ids_.size(); ++i)
      total += weights[i] = weight(ids_[i], temperature);
    const double target = u * total;
    double sum = 0;
    std::size_t last = 0;
    for (std::size_t i = 0; i < ids_.size(); ++i) {
      sum += weights[i];
      if (weights[i] > 0) last = i;
      if (sum > target) break;  // at the latest the last weight, up to rounding
    }
    return ids_[last];
  }

 private:
  double weight(std::int32_t id, float temperature) const {
    const float below = logits_[static_cast<std::size_t>(id)] - largest_;
    return static_cast<double>(math::exp(below / temperature));
  }

  const std::vector<float>& logits_;
  float largest_;
  std::vector<std::int32_t> ids_;  // ascending
};

}  // namespace

Result<std::int32_t> sample(std::span<const float> given, std::span<const std::int32_t> history,
                            const SampleOptions& options, std::uint64_t step) noexcept try {
  const FloatMode mode;
  if (Status s = check(given, options); !s.ok()) return s;
  std::vector<float> logits(given.begin(), given.end());
  if (Status s = penalise(history, static_cast<float>(options.repetition_penalty), logits); !s.ok())
    return s;
  const auto best = std::max_element(logits.begin(), logits.end());  // the first of equal ones
  if (std::isinf(*best))
    return fail(kName, "logits", "all are -infinity, expected at least one number");
  if (options.temperature == 0) return static_cast<std::int32_t>(best - logits.begin());
  Candidates candidates(logits, *best);
  candidates.keep_top_k(options.top_k);
  candidates.keep_top_p(options.top_p);
  candidates.keep_min_p(options.min_p);
  return candidates.draw(static_cast<float>(options.temperature), uniform(options.seed, step));
} catch (...) {
  return caught(kName);
}

}  // namespace bittern
