#include "ops/gdn/gdn.h"
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

// What the kernels on tensor cores treat differently: both dtypes of A, whole and ragged chunks,
// heads of 128 and others.
std::vector<GdnDesc> gdn_recompute_w_u_bounded_cases(bool) {
  std::vector<GdnDesc> cases;
  const auto add = [&](GdnDesc d) {
    for (const DType element : {DType::bf16, DType::f16}) {
      for (const DType matrix : {DType::f32, DType::bf16}) {
        d.element = element;
        d.a_element = matrix;
        d.lower_triangular = cases.size() % 2 != 0;
        cases.push_back(d);
      }
    }
  };
  add({.tokens = 64});
  add({.batch = 0, .tokens = 64});
  add({.tokens = 100, .key_heads = 2, .value_heads = 4});
  add({.tokens = 37, .key_heads = 2, .value_heads = 6, .key_dim = 16, .value_dim = 48});
  add({.batch = 2, .tokens = 65, .value_heads = 2, .key_dim = 256, .value_dim = 32, .chunk = 32});
  add({.tokens = 50, .key_dim = 48, .value_dim = 144, .chunk = 16});
  GdnDesc packed{.tokens = 150, .key_heads = 2, .value_heads = 2, .sequences = 5};
  packed.head_map = HeadMap::tiled;
  add(packed);
  packed.key_dim = 80;
  packed.value_dim = 64;
  add(packed);
  return cases;
}

// The unit of an element is sum |A[i][j]| |b[j]|, as the header of the op has it.
void gdn_recompute_w_u_judge(const GdnDesc& d, const GdnRecomputeWU::Args& got,
                             const GdnRecomputeWU::Args& want, Judge& judge) {
  const std::int64_t heads = d.value_heads;
  constexpr double kLeast = 0x1p-114;  // below, parts of A in bf16 are subnormal
  const auto rounded = [&](float x) {
    return std::fabs(static_cast<double>(d.element == DType::f16    ? to_f32(to_f16(x))
                                         : d.element == DType::bf16 ? to_f32(to_bf16(x))
                                                                    : x));
  };
  for (const GdnChunk& chunk : gdn_chunks(d, want.cu_seqlens)) {
    for (std::int64_t h = 0; h < heads; ++h) {
      std::vector<double> a, b;
      for (std::int64_t i = 0; i < chunk.rows; ++i)
        for (std::int64_t j = 0; j < chunk.rows; ++j)
          a.push_back(std::fabs(get(want.a, ((chunk.begin + i) * heads + h) * d.chunk + j)));
      const auto output = [&](const char* name, const MutView& out, const MutView& ref,
                              std::int64_t width, auto&& factor) {
        if (!out) return;
        b.clear();
        for (std::int64_t j = 0; j < chunk.rows; ++j)
          for (std::int64_t c = 0; c < width; ++c) b.push_back(rounded(factor(chunk.begin + j, c)));
        for (std::int64_t i = 0; i < chunk.rows; ++i) {
          for (std::int64_t c = 0; c < width; ++c) {
            double unit = 0;
            bool finite = true;
            for (std::int64_t j = 0; j < (d.lower_triangular ? i + 1 : chunk.rows); ++j) {
              const double x = a[static_cast<std::size_t>(i * chunk.rows + j)];
              const double y = b[static_cast<std::size_t>(j * width + c)];
              finite = finite && std::isfinite(x) && std::isfinite(y);
              if (std::isfinite(x) && std::isfinite(y) && x > 0) unit += std::max(x, kLeast) * y;
            }
            if (unit >= 0x1p127) {  // sums may overflow in one order and not in another
              unit = std::numeric_limits<double>::infinity();
            } else if (!finite) {
              unit = std::nan("");
            }
            judge.value(name, as_const(out), as_const(ref),
                        ((chunk.begin + i) * heads + h) * width + c, unit);
          }
        }
      };
      const auto gate = [&](const ConstView& v, std::int64_t t) {
        return v.as<float>()[t * heads + h];
      };
      const auto element = [&](const ConstView& v, std::int64_t at) {
        return static_cast<float>(get(v, at));
      };
      output("u", got.u, want.u, d.value_dim, [&](std::int64_t t, std::int64_t c) {
        return element(want.v, (t * heads + h) * d.value_dim + c) * gate(want.beta, t);
      });
      output("w", got.w, want.w, d.key_dim, [&](std::int64_t t, std::int64_t c) {
        const float k = element(want.k, (t * d.key_heads + d.key_head(h)) * d.key_dim + c);
        return k * gate(want.beta, t) * math::exp(gate(want.g, t));
      });
    }
  }
}

// A is unlike a real one: full, so that each term shows; what must not be read is NaN.
void gdn_recompute_w_u_aim(const GdnDesc& d, const GdnRecomputeWU::Args& a, Rng& rng) {
  aim_sequences(d.rows(), a.cu_seqlens, rng);
  aim_values(a.k, 1, rng);
  aim_values(a.v, 1, rng);
  aim_values(a.a, 0.5, rng);
  aim_beta(a.beta, rng);
  aim_log_decay(a.g, rng);
  for (std::int64_t i = 0; i < d.sequence_count(); ++i) {
    std::int64_t begin = i * d.tokens, end = begin + d.tokens;
    if (d.sequences > 0) {
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
