#include "bittern/c/decoding.h"

#include <algorithm>

#include "bittern/rope_frequencies.h"
#include "c/c_api.h"
#include "c/sample_options.h"

using namespace bittern;
using c_api::null;
using c_api::run;

extern "C" {

bittern_code bittern_rope_frequencies(int64_t rotary_dim, double base,
                                      const bittern_rope_scaling* scaling, float* inverse,
                                      size_t count, double* factor) {
  return run([&]() -> Status {
    constexpr const char* kFunction = "bittern_rope_frequencies";
    if (inverse == nullptr && count != 0) return null(kFunction, "inverse");
    if (factor == nullptr) return null(kFunction, "factor");
    RopeScaling s;
    if (scaling != nullptr) {
      const auto set = [](double& member, double value) {
        if (value != 0) member = value;
      };
      s.kind = static_cast<RopeScalingKind>(scaling->kind);
      set(s.factor, scaling->factor);
      set(s.original_context, scaling->original_context);
      set(s.low_freq_factor, scaling->low_freq_factor);
      set(s.high_freq_factor, scaling->high_freq_factor);
      set(s.beta_fast, scaling->beta_fast);
      set(s.beta_slow, scaling->beta_slow);
      s.attention_factor = scaling->attention_factor;
      s.mscale = scaling->mscale;
      s.mscale_all_dim = scaling->mscale_all_dim;
      s.truncate = !scaling->not_truncated;
    }
    const auto made = rope_frequencies(rotary_dim, base, s);
    if (!made) return made.status();
    if (made->inverse.size() != count) {
      return invalid("rope_frequencies: count: " + std::to_string(count) +
                     ", expected rotary_dim / 2, " + std::to_string(made->inverse.size()));
    }
    std::copy(made->inverse.begin(), made->inverse.end(), inverse);
    *factor = made->factor;
    return {};
  });
}

bittern_code bittern_sample(const float* logits, size_t count, const int32_t* history,
                            size_t history_count, const bittern_sample_options* options,
                            uint64_t step, int32_t* token) {
  return run([&]() -> Status {
    constexpr const char* kFunction = "bittern_sample";
    if (logits == nullptr) return null(kFunction, "logits");
    if (history == nullptr && history_count != 0) return null(kFunction, "history");
    if (token == nullptr) return null(kFunction, "token");
    const auto drawn =
        sample({logits, count}, {history, history_count}, c_api::to_sample_options(options), step);
    if (!drawn) return drawn.status();
    *token = *drawn;
    return {};
  });
}

}  // extern "C"
