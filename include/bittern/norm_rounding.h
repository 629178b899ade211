#pragma once
#include <cstdint>
#include <string_view>

namespace bittern {

// How often a gated norm rounds: at the end alone (FLA), or after the norm and after the weight too
// (the transformers library).
enum class NormRounding : std::int32_t { once, each };
inline constexpr std::string_view kNormRoundingNames[] = {"once", "each"};
constexpr auto& enum_names(NormRounding) { return kNormRoundingNames; }

}  // namespace bittern
