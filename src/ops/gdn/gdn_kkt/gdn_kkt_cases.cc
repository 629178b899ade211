#include "ops/gdn/gdn.h"
#include "ops/gdn/gdn_aims.h"

namespace bittern::oracle {

std::vector<GdnDesc> gdn_kkt_check_cases() { return gdn_cases(GdnKkt::kFields); }

std::vector<BenchCase<GdnDesc>> gdn_kkt_bench_cases() { return gdn_chain_bench_cases(); }

std::vector<GdnDesc> gdn_kkt_bounded_cases(bool on_cuda) {
  return on_cuda ? gdn_tensor_core_cases() : std::vector<GdnDesc>();
}

// The unit of an element is |beta| (|k| . |k|) e^(g - g), as the header of the op has it.
void gdn_kkt_judge(const GdnDesc& d, const GdnKkt::Args& got, const GdnKkt::Args& want,
                   Judge& judge) {
  static constexpr double kLeast = 0x1p-80, kMost = 0x1p126;
  const auto size = [](double x) { return x == 0 ? 0 : std::max(std::fabs(x), kLeast); };
  for (const GdnChunk& chunk : gdn_chunks(d, want.cu_seqlens)) {
    for (std::int64_t h = 0; h < d.value_heads; ++h) {
      const auto key = [&](std::int64_t i, std::int64_t m) {
        return get(want.k, ((chunk.begin + i) * d.key_heads + d.key_head(h)) * d.key_dim + m);
      };
      const auto gate = [&](const ConstView& x, std::int64_t i) {
        return x.as<float>()[(chunk.begin + i) * d.value_heads + h];
      };
      for (std::int64_t i = 0; i < chunk.rows; ++i) {
        const double beta = size(static_cast<double>(gate(want.beta, i)));
        for (std::int64_t j = 0; j < d.chunk; ++j) {
          double unit = 0;
          if (j < i) {
            double dot = 0;
            for (std::int64_t m = 0; m < d.key_dim; ++m)
              dot += std::fabs(key(i, m)) * std::fabs(key(j, m));
            const auto decay = static_cast<double>(gdn_decay(gate(want.g, i), gate(want.g, j)));
            unit = beta * size(dot) * size(decay);
            if (!std::isfinite(dot) || !std::isfinite(beta) || std::isnan(decay)) {
              // A subnormal decay may count as 0.
              unit = decay > 0 && decay < 0x1p-126 ? std::numeric_limits<double>::infinity()
                                                   : std::nan("");
            } else if (!(beta * dot < kMost && decay < kMost && unit < kMost)) {
              unit = std::numeric_limits<double>::infinity();
            }
          }
          judge.value("l", as_const(got.l), as_const(want.l),
                      ((chunk.begin + i) * d.value_heads + h) * d.chunk + j, unit);
        }
      }
    }
  }
}

void gdn_kkt_aim(const GdnDesc& d, const GdnKkt::Args& a, Rng& rng) {
  aim_sequences(d.rows(), a.cu_seqlens, rng);
  aim_values(a.k, 0.3, rng);
  aim_beta(a.beta, rng);
  aim_log_decay(a.g, rng);
}

}  // namespace bittern::oracle
