#include "ops/gdn/gdn.h"
#include "ops/gdn/gdn_aims.h"

namespace bittern::oracle {

std::vector<GdnDesc> gdn_output_check_cases() { return gdn_cases(GdnOutput::kFields); }

std::vector<BenchCase<GdnDesc>> gdn_output_bench_cases() { return gdn_chain_bench_cases(); }

std::vector<GdnDesc> gdn_output_bounded_cases(bool on_cuda) {
  return on_cuda ? gdn_tensor_core_cases() : std::vector<GdnDesc>();
}

// The units are the sums of magnitudes of the op's header.
void gdn_output_judge(const GdnDesc& d, const GdnOutput::Args& got, const GdnOutput::Args& want,
                      Judge& judge) {
  const double least = d.element == DType::f16 ? 0x1p-13 : 0x1p-80;
  const double most = d.element == DType::f16 ? 0x1p14 : 0x1p126;
  const bool key_first = d.state_layout == StateLayout::key_value;
  const auto size = [&](double x) { return x == 0 ? 0 : std::max(std::fabs(x), least); };
  for (const GdnChunk& chunk : gdn_chunks(d, want.cu_seqlens)) {
    for (std::int64_t h = 0; h < d.value_heads; ++h) {
      const auto key = [&](const ConstView& x, std::int64_t i, std::int64_t m) {
        const std::int64_t row = (chunk.begin + i) * d.key_heads + d.key_head(h);
        return std::fabs(get(x, row * d.key_dim + m));
      };
      const auto token = [&](std::int64_t i) { return (chunk.begin + i) * d.value_heads + h; };
      const auto gate = [&](std::int64_t i) { return want.g.as<float>()[token(i)]; };
      const std::int64_t state = (chunk.state * d.value_heads + h) * d.key_dim * d.value_dim;
      for (std::int64_t i = 0; i < chunk.rows; ++i) {
        bool limited = true, row_nan = false;
        const auto see = [&](double x) {
          row_nan = row_nan || std::isnan(x);
          limited = limited && x < most;
          return size(x);
        };
        std::vector<double> q, pairs;
        for (std::int64_t m = 0; m < d.key_dim; ++m) q.push_back(key(want.q, i, m));
        for (std::int64_t j = 0; j <= i; ++j) {
          double dot = 0;
          for (std::int64_t m = 0; m < d.key_dim; ++m)
            dot += q[static_cast<std::size_t>(m)] * key(want.k, j, m);
          const double decay = see(static_cast<double>(gdn_decay(gate(i), gate(j))));
          // An infinite key or query gives an infinity or NaN, as its sign and the decay have it.
          if (!std::isfinite(dot)) row_nan = true;
          pairs.push_back(see(size(dot) * decay));
        }
        const double decay = see(static_cast<double>(math::exp(gate(i))));
        for (std::int64_t c = 0; c < d.value_dim; ++c) {
          double of_state = 0, of_values = 0;
          for (std::int64_t m = 0; m < d.key_dim; ++m) {
            const std::int64_t at = key_first ? m * d.value_dim + c : c * d.key_dim + m;
            of_state += q[static_cast<std::size_t>(m)] * std::fabs(get(want.h, state + at));
          }
          for (std::int64_t j = 0; j <= i; ++j)
            of_values += pairs[static_cast<std::size_t>(j)] *
                         size(get(want.v_new, token(j) * d.value_dim + c));
          const double sum = decay * size(of_state) + of_values;
          double unit = std::fabs(static_cast<double>(d.query_scale())) * (sum + least);
          if (row_nan || !std::isfinite(of_state) || std::isnan(of_values)) {
            unit = std::nan("");
          } else if (!limited || !(sum < most) || !(of_state < most) || !(unit < most)) {
            unit = std::numeric_limits<double>::infinity();
          }
          judge.value("o", as_const(got.o), as_const(want.o), token(i) * d.value_dim + c, unit);
        }
      }
    }
  }
}

void gdn_output_aim(const GdnDesc& d, const GdnOutput::Args& a, Rng& rng) {
  aim_sequences(d.rows(), a.cu_seqlens, rng);
  for (const ConstView& x : {a.q, a.k, a.v_new, a.h}) aim_values(x, 0.3, rng);
  if (for_tensor_cores(d) && !rng.chance(8)) {
    aim_summed_log_decay(d, a.g, a.cu_seqlens, rng);
  } else {
    aim_log_decay(a.g, rng);
  }
}

}  // namespace bittern::oracle
