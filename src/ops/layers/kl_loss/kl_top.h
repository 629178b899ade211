// A row of kl_loss with top > 0: what every kernel does with the top, once the sums over the
// vocabulary are there, and where the cpu kernel keeps it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "bittern/layers_desc.h"
#include "core/math.h"
#include "ops/layers/log_sum.h"

namespace bittern {

struct KlTop {
  double kl;
  double inverse_l, inverse_s;  // slope_i = F_i * inverse_l - p_i * inverse_s
  double others;                // slope_j = G_j * others
};

// c, F, log_probs and p of the top; `most` is max c, `others_most` t, `others_sum` R.
inline KlTop kl_top(const KlLossDesc& d, const float* c, const double* f, const float* log_probs,
                    const double* p, float tail, float most, float others_most, double others_sum) {
  const double k = 1 / d.temperature, log_tail = static_cast<double>(tail);
  double f_sum = 0, p_sum = 0;
  for (std::int64_t i = 0; i < d.top; ++i) {
    f_sum += f[i];
    p_sum += p[i];
  }
  const double others_p = math::exp64(log_tail);
  const double s = p_sum + others_p;
  const double r = (static_cast<double>(others_most) - static_cast<double>(most)) * k;
  const double others_scale = math::exp64(r);
  const double l = others_scale * others_sum + f_sum;
  const double log_l = log64(l);
  double sum = 0;
  for (std::int64_t i = 0; i < d.top; ++i) {
    const double b = (static_cast<double>(c[i]) - static_cast<double>(most)) * k;
    sum += p[i] == 0 ? 0 : p[i] * (static_cast<double>(log_probs[i]) - (b - log_l));
  }
  sum += others_p == 0 ? 0 : others_p * (log_tail - ((r + log64(others_sum)) - log_l));
  const double inverse_l = 1 / l, inverse_s = 1 / s;
  const double others_slope = others_sum == 0 ? 0 : (others_p * inverse_s) * (1 / others_sum);
  return {.kl = sum * inverse_s - log64(s),
          .inverse_l = inverse_l,
          .inverse_s = inverse_s,
          .others = others_scale * inverse_l - others_slope};
}

// What a thread works in: the p and F of the top, its logits, and the row's.
struct KlScratch {
  double *p, *f;
  float *top, *row;

  static std::size_t bytes(const KlLossDesc& d) {
    const auto top = static_cast<std::size_t>(d.top), dim = static_cast<std::size_t>(d.dim);
    const std::size_t row = d.top > 0 || d.softcap > 0 ? dim : 0;  // else x itself is read
    return (top * (2 * sizeof(double) + sizeof(float)) + row * sizeof(float) + 64) / 64 * 64;
  }
  KlScratch(const KlLossDesc& d, std::byte* at)
      : p(reinterpret_cast<double*>(at)),
        f(p + d.top),
        top(reinterpret_cast<float*>(f + d.top)),
        row(top + d.top) {}
};

}  // namespace bittern
