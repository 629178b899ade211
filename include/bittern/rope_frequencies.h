// The inverse frequencies that rope takes, as configs of models describe them. They are made in f64
// with + - * / alone, in a fixed order, so every platform makes the same bytes; Hugging Face makes
// them in f32, a few ulp away.
//
//   none     inv_i = base^(-2 i / rotary_dim)                          factor 1
//   linear   inv_i / factor                                            factor 1
//   llama3   with t = original_context inv_i / (2 pi), the turns within the original context:
//            inv_i where t > high_freq_factor, inv_i / factor where t < low_freq_factor, between
//            them (1 - s) inv_i / factor + s inv_i, s = (t - low) / (high - low)
//   yarn     inv_i (1 - r_i) + inv_i / factor r_i, r_i = clamp((i - low) / (high - low), 0, 1):
//            low and high are the i that turn beta_fast and beta_slow times within the original
//            context (rounded outwards if `truncate`), limited to 0..rotary_dim - 1; high is raised
//            by 0.001 where they are equal. The factor of cos and sin is attention_factor; if that
//            is 0, g(mscale) / g(mscale_all_dim) where both are given, otherwise g(1), with
//            g(m) = 0.1 m log(factor) + 1 (1 where factor <= 1).
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

#include "bittern/status.h"

namespace bittern {

enum class RopeScalingKind : std::int32_t { none, linear, llama3, yarn };
inline constexpr std::string_view kRopeScalingNames[] = {"none", "linear", "llama3", "yarn"};
constexpr auto& enum_names(RopeScalingKind) { return kRopeScalingNames; }

// The names are those of config.json; original_context is original_max_position_embeddings.
struct RopeScaling {
  RopeScalingKind kind = RopeScalingKind::none;
  double factor = 1;                                 // all but none
  double original_context = 8192;                    // llama3, yarn
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  double beta_fast = 32, beta_slow = 1;              // yarn, and all that follow
  double attention_factor = 0;
  double mscale = 0, mscale_all_dim = 0;
  bool truncate = true;
};

struct RopeFrequencies {
  std::vector<float> inverse;  // rotary_dim / 2: rope's inverse_frequencies
  double factor = 1;           // rope's factor
};

Result<RopeFrequencies> rope_frequencies(std::int64_t rotary_dim, double base,
                                         const RopeScaling& scaling = {}) noexcept;

}  // namespace bittern
