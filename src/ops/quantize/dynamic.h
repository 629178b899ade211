// dynamic_quantize's scale and zero point from the range of the data.
#pragma once
#include "core/numerics.h"

namespace bittern {

// The least and greatest finite value, widened to hold 0.
template <class M>
struct FiniteRange {
  M lo = 0, hi = 0;

  BITTERN_HOST_DEVICE void take(M x) {
    if (!std::isfinite(x)) return;
    lo = std::min(lo, x);
    hi = std::max(hi, x);
  }
};

// The scale before it is stored.
template <class M>
BITTERN_HOST_DEVICE M symmetric_step(FiniteRange<M> r, std::int32_t q_max) {
  return std::max(-r.lo, r.hi) / static_cast<M>(q_max);
}
template <class M>
BITTERN_HOST_DEVICE M asymmetric_step(FiniteRange<M> r, std::int32_t q_min, std::int32_t q_max) {
  const auto steps = static_cast<M>(q_max - q_min);
  const M width = r.hi - r.lo;
  return std::isfinite(width) ? width / steps : (r.hi / 2 - r.lo / 2) / steps * 2;
}

// Limited to the largest finite value before it is rounded, and 1 where nothing positive is left.
template <class S>
S stored_scale(Math<S> s) {
  const S stored = from_math<S>(std::min(s, max_finite<S>()));
  return to_math(stored) > 0 ? stored : from_math<S>(1);
}

template <class S>
S symmetric_scale(FiniteRange<Math<S>> r, std::int32_t q_max) {
  return stored_scale<S>(symmetric_step(r, q_max));
}

template <class S>
S asymmetric_scale(FiniteRange<Math<S>> r, std::int32_t q_min, std::int32_t q_max) {
  return stored_scale<S>(asymmetric_step(r, q_min, q_max));
}

// clamp(q_min - R(lo / s), q_min, q_max)
template <class M>
BITTERN_HOST_DEVICE std::int32_t zero_point_for(M lo, M s, std::int32_t q_min, std::int32_t q_max) {
  const double zp = q_min - static_cast<double>(std::nearbyint(lo / s));
  return static_cast<std::int32_t>(
      std::min(std::max(zp, static_cast<double>(q_min)), static_cast<double>(q_max)));
}

}  // namespace bittern
