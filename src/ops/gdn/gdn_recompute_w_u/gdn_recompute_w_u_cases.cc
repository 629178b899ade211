#include "ops/gdn/gdn_aims.h"

namespace bittern::oracle {

std::vector<GdnDesc> gdn_recompute_w_u_check_cases() { return gdn_cases(GdnRecomputeWU::kFields); }

std::vector<BenchCase<GdnDesc>> gdn_recompute_w_u_bench_cases() {
  GdnDesc f32{.tokens = 4096, .key_heads = 16, .value_heads = 32};
  f32.lower_triangular = true;
  GdnDesc bf16 = f32, full = f32;
  bf16.element = full.element = DType::bf16;
  full.lower_triangular = false;
  GdnDesc long_f32 = full, small_f32 = full;
  long_f32.tokens = 32768;
  small_f32.batch = 16;
  small_f32.tokens = 2048;
  small_f32.key_heads = small_f32.value_heads = 4;
  GdnDesc long_bf16 = long_f32, small_bf16 = small_f32;
  long_bf16.a_element = small_bf16.a_element = DType::bf16;
  const auto fill = [](const GdnDesc&, std::string_view operand, const ConstView& view, Rng& rng) {
    if (operand == "g") aim_log_decay(view, rng);
  };
  return {{"f32 16/32 heads 128 lower", f32, fill},
          {"bf16 16/32 heads 128 lower", bf16, fill},
          {"bf16 16/32 heads 128", full, fill},
          {"T 32768 16/32 heads, A bf16", long_bf16, fill, "", Preference::fastest, true},
          {"T 32768 16/32 heads, A f32", long_f32, fill, "", Preference::fastest, true},
          {"16 x 2048 4/4 heads, A bf16", small_bf16, fill, "", Preference::fastest, true},
          {"16 x 2048 4/4 heads, A f32", small_f32, fill, "", Preference::fastest, true},
          {"T 32768 16/32 heads, A f32, exact", long_f32, fill, "", Preference::exact, true}};
}

// A is unlike a real one: full, so that each term shows; what must not be read is NaN.
void gdn_recompute_w_u_aim(const GdnDesc& d, const GdnRecomputeWU::Args& a, Rng& rng) {
  aim_sequences(d.rows(), a.cu_seqlens, rng);
  aim_values(a.k, 1, rng);
  aim_values(a.v, 1, rng);
  aim_values(a.a, 0.5, rng);
  aim_beta(a.beta, rng);
  aim_log_decay(a.g, rng);
  for (std::int64_t i = 0; i < d.sequences(); ++i) {
    std::int64_t begin = i * d.tokens, end = begin + d.tokens;
    if (d.n_sequences > 0) {
      begin = a.cu_seqlens.as<std::int32_t>()[i];
      end = a.cu_seqlens.as<std::int32_t>()[i + 1];
    }
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t first = begin + (t - begin) / d.chunk * d.chunk;
      const std::int64_t read =
          d.lower_triangular ? t - first + 1 : std::min<std::int64_t>(d.chunk, end - first);
      for (std::int64_t h = 0; h < d.value_heads; ++h)
        for (std::int64_t j = read; j < d.chunk; ++j)
          put(a.a, (t * d.value_heads + h) * d.chunk + j, NAN);
    }
  }
}

}  // namespace bittern::oracle
