// The next token from logits. The same logits, history, options and step give the same token on
// every machine.
//
//   1. Every token of the history, once: logit / repetition_penalty where it is positive, else
//      logit * repetition_penalty.
//   2. temperature 0: the largest logit. That is the answer.
//   3. top_k: the first top_k, larger logits first.
//   4. w_i = exp(logit_i - largest). top_p: in the same order, the fewest tokens whose w make at
//      least top_p of the sum over the tokens of step 3.
//   5. min_p: of these, those with w_i >= min_p.
//   6. One of these, with a probability in proportion to exp((logit_i - largest) / temperature):
//      the first in the order of ids at which the sum so far exceeds u times the whole sum.
//
// Among equal logits the lower id is first. Steps 3 to 5 do not see the temperature, as in
// llama.cpp. Numbers are in f32, with exp of core/math.h; sums are in f64, in the order of ids, but
// step 4's sum so far in its own. u = (mix(mix(seed + G) + G (step + 1)) >> 11) 2^-53, G =
// 0x9E3779B97F4A7C15, mix SplitMix64's finaliser: it depends on nothing that was drawn before.
//
// -infinity is a token that is never taken. NaN and +infinity are errors.
#pragma once
#include <cstdint>
#include <span>

#include "bittern/status.h"

namespace bittern {

struct SampleOptions {
  double temperature = 1;         // 0: greedy
  std::int64_t top_k = 0;         // 0: all
  double top_p = 1;               // 0 < top_p <= 1
  double min_p = 0;               // 0 <= min_p <= 1
  double repetition_penalty = 1;  // above 0
  std::uint64_t seed = 0;
};

// `step` counts the tokens drawn with one seed.
Result<std::int32_t> sample(std::span<const float> logits, std::span<const std::int32_t> history,
                            const SampleOptions& options, std::uint64_t step) noexcept;

}  // namespace bittern
