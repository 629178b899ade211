#pragma once
#include "oracle/aim.h"

namespace bittern::oracle {

// Weights of every type, with sizes that leave every kind of tail.
std::vector<WeightDesc> weight_cases();

struct WeightViews {
  ConstView w, packed, scales, biases, blocks, panels;
};
template <class Args>
WeightViews weight_views(const Args& a) {
  WeightViews v{a.w, a.packed, a.scales, a.biases, a.blocks, {}};
  if constexpr (std::is_same_v<decltype(a.panels), ConstView>) v.panels = a.panels;
  return v;
}

// Mostly weights as models have them, since one NaN scale spoils all results of its row; awkward
// scales in some rows.
void aim_weights(const WeightDesc& d, const WeightViews& v, Rng& rng);

// For benchmarks: scales such as a model has, in panels of random bytes.
void fill_panels(const WeightDesc& d, const ConstView& panels, Rng& rng);
template <class Desc>
void fill_panels(const Desc& d, std::string_view operand, const ConstView& v, Rng& rng) {
  if (operand == "panels") fill_panels(d.weights, v, rng);
}

}  // namespace bittern::oracle
