#include <gtest/gtest.h>

#include "core/math.h"
#include "ops/gdn/gdn_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using Op = GdnRecomputeWU;
using oracle::get;
using oracle::make_problem;
using oracle::put;
using oracle::run_problem;

TEST(GdnRecomputeWU, MatchesRefEverywhere) { oracle::expect_parity("gdn_recompute_w_u"); }

TEST(GdnRecomputeWU, MatchesAnExampleWorkedByHand) {
  GdnDesc d{.tokens = 2, .key_dim = 1, .value_dim = 2, .chunk = 16};
  for (const std::string_view kernel : oracle::kBothKernels) {
    auto p = make_problem<Op>(d, 1, {});
    oracle::set_values(p.args.k, {3, 5});
    oracle::set_values(p.args.v, {1, 2, 4, 8});
    oracle::set_values(p.args.beta, {0.5, 2});
    oracle::set_values(p.args.g, {0, -200});  // e^g = 1, 0
    for (std::int64_t i = 0; i < 4; ++i) put(p.args.a, i / 2 * 16 + i % 2, i == 1 ? 10.0 : 1.0);
    oracle::expect_ok(run_problem(p, kernel));
    // vb = {.5, 1}, {8, 16}; kb = {1.5}, {0}; A = {1, 10}, {1, 1}, read in full
    EXPECT_EQ(oracle::values(p.args.u), (std::vector<double>{80.5, 161, 8.5, 17}));
    EXPECT_EQ(oracle::values(p.args.w), (std::vector<double>{1.5, 1.5}));
    p.desc.lower_triangular = true;
    oracle::expect_ok(run_problem(p, kernel));
    EXPECT_EQ(oracle::values(p.args.u), (std::vector<double>{0.5, 1, 8.5, 17}));
  }
}

// Scaled operands are rounded before the product, k * beta before e^g.
TEST(GdnRecomputeWU, RoundsWhereTheSeedDoes) {
  GdnDesc d{.tokens = 1, .key_dim = 1, .value_dim = 1, .chunk = 16};
  d.element = DType::bf16;
  auto p = make_problem<Op>(d, 1, {});
  put(p.args.k, 0, 1);
  put(p.args.v, 0, 1);
  put(p.args.g, 0, 0);
  put(p.args.beta, 0, 1 + 0x1p-8);  // a tie of bf16: to even, 1
  put(p.args.a, 0, 1 + 0x1p-9 + 0x1p-20);
  oracle::expect_ok(run_problem(p));
  // 1 * A rounds to 1; had the product kept beta, (1 + 2^-8)(1 + 2^-9) would round to 1 + 2^-7.
  EXPECT_EQ(get(p.args.u, 0), 1);
  EXPECT_EQ(get(p.args.w, 0), 1);
}

// Against f64 products of the rounded operands, with H / Hg = 3 and both head maps written out
// here.
TEST(GdnRecomputeWU, StaysWithinItsBound) {
  for (const DType element : {DType::f32, DType::f16, DType::bf16}) {
    for (const HeadMap map : {HeadMap::grouped, HeadMap::tiled}) {
      GdnDesc d{.tokens = 100, .key_heads = 2, .value_heads = 6, .key_dim = 24, .value_dim = 20};
      d.element = element;
      d.head_map = map;
      auto p = make_problem<Op>(d, 3, {});
      oracle::Rng rng(5);
      for (const ConstView& x : {p.args.k, p.args.v, p.args.a})
        for (std::int64_t i = 0; i < x.shape.numel(); ++i) put(x, i, rng.normal());
      for (std::int64_t i = 0; i < p.args.g.shape.numel(); ++i) put(p.args.g, i, -rng.uniform());
      oracle::expect_ok(run_problem(p));
      const auto round = [&](double x) {
        const auto f = static_cast<float>(x);
        return static_cast<double>(element == DType::f32   ? f
                                   : element == DType::f16 ? to_f32(to_f16(f))
                                                           : to_f32(to_bf16(f)));
      };
      for (std::int64_t t = 0; t < d.tokens; ++t) {
        for (std::int64_t h = 0; h < 6; ++h) {
          const std::int64_t key_head = map == HeadMap::grouped ? h / 3 : h % 2;
          const std::int64_t first = t / 64 * 64, last = std::min<std::int64_t>(first + 64, 100);
          const auto check = [&](double got, auto&& scaled) {
            double want = 0, size = 0;
            for (std::int64_t j = first; j < last; ++j) {
              const double term = get(p.args.a, (t * 6 + h) * 64 + j - first) * scaled(j);
              want += term;
              size += std::fabs(term);
            }
            const double ulp = std::fabs(oracle::step(element, round(want), 1) - round(want));
            EXPECT_NEAR(got, want, 64 * 0x1p-24 * size + ulp);
          };
          for (std::int64_t c = 0; c < d.value_dim; ++c) {
            check(get(p.args.u, (t * 6 + h) * d.value_dim + c), [&](std::int64_t j) {
              return round(get(p.args.v, (j * 6 + h) * d.value_dim + c) *
                           get(p.args.beta, j * 6 + h));
            });
          }
          for (std::int64_t c = 0; c < d.key_dim; ++c) {
            check(get(p.args.w, (t * 6 + h) * d.key_dim + c), [&](std::int64_t j) {
              const auto kb = static_cast<float>(get(p.args.k, (j * 2 + key_head) * d.key_dim + c) *
                                                 get(p.args.beta, j * 6 + h));
              return round(kb * math::exp(static_cast<float>(get(p.args.g, j * 6 + h))));
            });
          }
        }
      }
    }
  }
}

// Columns past a ragged chunk, and above the diagonal when that is declared, are never read.
TEST(GdnRecomputeWU, ReadsNoMoreOfAThanItMust) {
  for (const bool lower : {false, true}) {
    for (const std::string_view kernel : oracle::kBothKernels) {
      GdnDesc d{.tokens = 70, .key_dim = 5, .value_dim = 3};
      d.lower_triangular = lower;
      auto p = make_problem<Op>(d, 2, {});
      oracle::set_all(p.args.k, 1);
      oracle::set_all(p.args.v, 1);
      oracle::set_all(p.args.g, 0);
      oracle::set_all(p.args.beta, 1);
      oracle::set_all(p.args.a, NAN);
      for (std::int64_t t = 0; t < 70; ++t)
        for (std::int64_t j = 0; j < (lower ? t % 64 + 1 : t < 64 ? 64 : 6); ++j)
          put(p.args.a, t * 64 + j, 1);
      oracle::expect_ok(run_problem(p, kernel));
      for (std::int64_t t = 0; t < 70; ++t)
        EXPECT_EQ(get(p.args.u, t * 3), lower ? t % 64 + 1 : t < 64 ? 64 : 6) << kernel;
    }
  }
}

// A chunk of NaN in one sequence leaves every bit of the others as it was.
TEST(GdnRecomputeWU, SequencesDoNotMeet) {
  GdnDesc d{.tokens = 90, .key_heads = 1, .value_heads = 2, .key_dim = 9, .value_dim = 7};
  d.chunk = 16;
  d.sequences = 4;
  auto clean = make_problem<Op>(d, 7, {});
  const std::int32_t starts[] = {0, 21, 21, 60, 90};
  std::copy(std::begin(starts), std::end(starts),
            oracle::data<std::int32_t>(clean.args.cu_seqlens));
  oracle::expect_ok(run_problem(clean));
  auto poisoned = make_problem<Op>(d, 7, {});
  std::copy(std::begin(starts), std::end(starts),
            oracle::data<std::int32_t>(poisoned.args.cu_seqlens));
  for (std::int64_t t = 21; t < 60; ++t)
    for (std::int64_t c = 0; c < 14; ++c) put(poisoned.args.v, t * 14 + c, NAN);
  oracle::expect_ok(run_problem(poisoned));
  for (std::int64_t i = 0; i < 90 * 14; ++i) {
    const double got = get(poisoned.args.u, i);
    if (i / 14 >= 21 && i / 14 < 60) {
      EXPECT_TRUE(std::isnan(got));
    } else {
      const double want = get(clean.args.u, i);
      EXPECT_TRUE(got == want || (std::isnan(got) && std::isnan(want)));
    }
  }
}

// ---- on the tensor cores ----

using oracle::kGpu;

Status run_mma(oracle::Problem<Op>& p, std::string_view kernel) {
  return oracle::run_problem(p, kernel, Preference::fastest, kGpu);
}

// Each problem with each kernel that takes it here.
struct MmaProblem {
  GdnDesc d;
  std::string_view kernel;
};
std::vector<MmaProblem> mma_problems() {
  std::vector<MmaProblem> all;
  for (const GdnDesc& d : oracle::Cases<Op>::bounded(true))
    for (const std::string_view kernel : {"cuda_mma", "cuda_wgmma"})
      if (d.batch > 0 && Plan<Op>::select(d, kGpu, Preference::fastest, kernel))
        all.push_back({d, kernel});
  EXPECT_GT(all.size(), 20u);
  return all;
}

// Keys that have much in common, as a model's do; A neither small nor triangular, NaN where it must
// not be read.
oracle::Problem<Op> mma_problem(const GdnDesc& d, const oracle::Layout& layout = {}) {
  auto p = make_problem<Op>(d, 11, layout);
  oracle::Rng rng(12);
  oracle::fill_keys(d, p.args.k, 0.9, rng);
  oracle::fill_normal(p.args.v, rng);
  const auto starts = oracle::gdn_starts(d, p.args.cu_seqlens);
  for (std::size_t s = 0; s + 1 < starts.size(); ++s) {
    for (std::int64_t t = starts[s]; t < starts[s + 1]; ++t) {
      const std::int64_t row = (t - starts[s]) % d.chunk;
      const std::int64_t read =
          d.lower_triangular ? row + 1 : std::min<std::int64_t>(d.chunk, starts[s + 1] - t + row);
      for (std::int64_t i = 0; i < d.value_heads * d.chunk; ++i)
        put(p.args.a, t * d.value_heads * d.chunk + i, i % d.chunk < read ? rng.normal() : NAN);
    }
  }
  oracle::fill_uniform(p.args.beta, 0, 1, rng);
  oracle::fill_uniform(p.args.g, -2, 0, rng);
  return p;
}

void expect_untouched_around(const oracle::Problem<Op>& p) {
  for (const oracle::Store& s : p.stores) {
    const auto poisoned = [](std::byte b) { return b == oracle::kPoison; };
    EXPECT_TRUE(std::all_of(s.bytes.begin(), s.bytes.begin() + std::ptrdiff_t(s.offset), poisoned))
        << s.name;
    EXPECT_TRUE(std::all_of(s.bytes.end() - oracle::kCanary, s.bytes.end(), poisoned)) << s.name;
  }
}

TEST(GdnRecomputeWU, TensorCoresStayWithinTheBound) {
  BITTERN_NEEDS_CUDA();
  for (const MmaProblem& m : mma_problems()) {
    const GdnDesc& d = m.d;
    const std::string_view kernel = m.kernel;
    auto p = mma_problem(d);
    oracle::expect_ok(run_mma(p, kernel));
    expect_untouched_around(p);
    const auto round = [&](double x) {
      const auto f = static_cast<float>(x);
      return static_cast<double>(d.element == DType::f16 ? to_f32(to_f16(f)) : to_f32(to_bf16(f)));
    };
    const auto starts = oracle::gdn_starts(d, p.args.cu_seqlens);
    double worst = 0;  // error beyond the rounding of the result, in 2^-24 of the terms' magnitudes
    for (std::size_t s = 0; s + 1 < starts.size(); ++s) {
      for (std::int64_t t = starts[s]; t < starts[s + 1]; ++t) {
        const std::int64_t first = starts[s] + (t - starts[s]) / d.chunk * d.chunk;
        const std::int64_t last =
            d.lower_triangular ? t + 1 : std::min<std::int64_t>(first + d.chunk, starts[s + 1]);
        for (std::int64_t h = 0; h < d.value_heads; ++h) {
          const auto check = [&](const MutView& out, std::int64_t width, auto&& b) {
            for (std::int64_t c = 0; c < width; ++c) {
              double want = 0, size = 0;
              for (std::int64_t j = first; j < last; ++j) {
                const double term =
                    get(p.args.a, (t * d.value_heads + h) * d.chunk + j - first) * b(j, c);
                want += term;
                size += std::fabs(term);
              }
              const double near = std::fabs(round(want));
              const double half_ulp = (oracle::step(d.element, near, 1) - near) / 2;
              const double error = std::fabs(get(out, (t * d.value_heads + h) * width + c) - want);
              EXPECT_LE(error, 64 * 0x1p-24 * size + half_ulp);
              worst = std::max(worst, (error - half_ulp) / size * 0x1p24);
            }
          };
          check(p.args.u, d.value_dim, [&](std::int64_t j, std::int64_t c) {
            return round(get(p.args.v, (j * d.value_heads + h) * d.value_dim + c) *
                         get(p.args.beta, j * d.value_heads + h));
          });
          check(p.args.w, d.key_dim, [&](std::int64_t j, std::int64_t c) {
            const auto kb = static_cast<float>(
                get(p.args.k, (j * d.key_heads + d.key_head(h)) * d.key_dim + c) *
                get(p.args.beta, j * d.value_heads + h));
            return round(kb * math::exp(static_cast<float>(get(p.args.g, j * d.value_heads + h))));
          });
        }
      }
    }
    ::testing::Test::RecordProperty("worst", std::to_string(worst));
  }
}

TEST(GdnRecomputeWU, TensorCoresRepeatThemselves) {
  BITTERN_NEEDS_CUDA();
  for (const std::int64_t dim : {64, 128}) {
    GdnDesc d{.tokens = 100, .key_heads = 2, .value_heads = 4, .key_dim = 128, .value_dim = dim};
    d.element = DType::bf16;
    auto first = mma_problem(d);
    const auto fresh = first.stores;
    const auto kernel = Plan<Op>::select(d, kGpu, Preference::fastest)->sku().kernel;
    oracle::expect_ok(run_mma(first, kernel));
    auto again = mma_problem(d);
    for (int i = 1; i < 100; ++i) {
      for (std::size_t s = 0; s < fresh.size(); ++s)
        std::copy(fresh[s].bytes.begin(), fresh[s].bytes.end(), again.stores[s].bytes.begin());
      oracle::expect_ok(run_mma(again, kernel));
      ASSERT_EQ(oracle::compare(again, first), "") << i;
    }
  }
}

// Infinities and NaN are where the definition has them, and nowhere else.
TEST(GdnRecomputeWU, TensorCoresPutNonFiniteValuesWhereTheyBelong) {
  BITTERN_NEEDS_CUDA();
  for (const MmaProblem& m : mma_problems()) {
    const GdnDesc& d = m.d;
    const std::string_view kernel = m.kernel;
    auto want = mma_problem(d), got = mma_problem(d);
    for (auto* p : {&want, &got}) {
      const std::int64_t row = d.key_heads * d.key_dim;
      put(p->args.k, 5 * row + 3, INFINITY);
      put(p->args.v, 9 * d.value_heads * d.value_dim + 1, NAN);
      put(p->args.v, 20 * d.value_heads * d.value_dim + 15, -INFINITY);
      put(p->args.a, 30 * d.value_heads * d.chunk, INFINITY);
      put(p->args.a, 31 * d.value_heads * d.chunk, NAN);
      put(p->args.v, 30 / d.chunk * d.chunk * d.value_heads * d.value_dim + 2, 0);
    }
    oracle::expect_ok(run_problem(want, "ref"));
    oracle::expect_ok(run_mma(got, kernel));
    for (const auto& [w, g] :
         {std::pair{want.args.u, got.args.u}, std::pair{want.args.w, got.args.w}}) {
      for (std::int64_t i = 0; i < w.shape.numel(); ++i) {
        const double expected = get(w, i), result = get(g, i);
        if (!std::isfinite(expected)) {
          EXPECT_TRUE(std::isnan(expected) ? std::isnan(result) : result == expected)
              << i << ": " << result << ", expected " << expected;
        } else {
          EXPECT_NEAR(result, expected, 0.01 * (1 + std::fabs(expected))) << i;
        }
      }
    }
  }
}

// Addresses that no 16-byte access can use.
TEST(GdnRecomputeWU, TensorCoresRefuseUnalignedOperands) {
  BITTERN_NEEDS_CUDA();
  GdnDesc d{.tokens = 64};
  d.element = DType::bf16;
  auto unaligned = mma_problem(d, {.unaligned = true});
  for (const std::string kernel : {"cuda_mma", "cuda_wgmma"}) {
    if (!Plan<Op>::select(d, kGpu, Preference::fastest, kernel)) continue;
    oracle::expect_error(run_mma(unaligned, kernel), Code::unsupported,
                         "gdn_recompute_w_u: k: address is 2 bytes past a multiple of 16, expected "
                         "a multiple of 16 for kernel " +
                             kernel);
  }
  auto want = mma_problem(d, {.unaligned = true});
  oracle::expect_ok(run_problem(want, "ref"));
  oracle::expect_ok(run_mma(unaligned, "cuda"));
  EXPECT_EQ(oracle::compare(unaligned, want), "");
}

TEST(GdnRecomputeWU, TensorCoresAreForTheFastestPreference) {
  BITTERN_NEEDS_CUDA();
  GdnDesc d{.tokens = 64};
  d.element = DType::bf16;
  const auto fastest = Plan<Op>::select(d, kGpu, Preference::fastest);
  ASSERT_TRUE(fastest.ok()) << fastest.status().message();
  const bool wide = fastest->sku().architecture == "sm_90";
  EXPECT_EQ(fastest->sku().kernel, wide ? "cuda_wgmma" : "cuda_mma");
  EXPECT_FALSE(fastest->precision_guarantee().same_bits_on_all_backends);
  EXPECT_TRUE(fastest->precision_guarantee().deterministic);
  EXPECT_EQ(fastest->precision_guarantee().error_norm, ErrorNorm::terms);
  EXPECT_EQ(fastest->precision_guarantee().error_bound, 0x1p-17);
  const auto exact = Plan<Op>::select(d, kGpu);
  ASSERT_TRUE(exact.ok()) << exact.status().message();
  EXPECT_EQ(exact->sku().kernel, "cuda");
  d.key_dim = 64;
  const auto narrow = Plan<Op>::select(d, kGpu, Preference::fastest);
  ASSERT_TRUE(narrow.ok()) << narrow.status().message();
  EXPECT_EQ(narrow->sku().kernel, "cuda_mma");
  d.key_dim = 24;
  const auto other = Plan<Op>::select(d, kGpu, Preference::fastest);
  ASSERT_TRUE(other.ok()) << other.status().message();
  EXPECT_EQ(other->sku().kernel, "cuda");
  oracle::expect_error(
      Plan<Op>::select(d, kGpu, Preference::fastest, "cuda_mma").status(), Code::unsupported,
      "gdn_recompute_w_u: no kernel on cuda:0 named cuda_mma: cuda_mma: key_dim: 24, expected a "
      "multiple of 16;");
  oracle::expect_error(
      Plan<Op>::select(d, kGpu, Preference::fastest, "cuda_wgmma").status(), Code::unsupported,
      "gdn_recompute_w_u: no kernel on cuda:0 named cuda_wgmma: cuda_wgmma: key_dim: 24, expected "
      "128;");
}

TEST(GdnRecomputeWU, RefusesWhatItCannotDo) {
  const auto refuse = [](const GdnDesc& d, Code code, std::string_view message) {
    oracle::expect_error(Plan<Op>::select(d).status(), code, message);
  };
  using enum Code;
  refuse({.key_heads = 2, .value_heads = 3}, invalid_argument,
         "gdn_recompute_w_u: value_heads: 3, expected a multiple of key_heads 2");
  refuse({.key_dim = 257}, invalid_argument, "gdn_recompute_w_u: key_dim: 257, expected 1..256");
  refuse({.value_dim = 0}, invalid_argument, "gdn_recompute_w_u: value_dim: 0, expected 1..256");
  refuse({.chunk = 48}, invalid_argument, "gdn_recompute_w_u: chunk: 48, expected 16, 32 or 64");
  refuse({.batch = 2, .sequences = 1}, invalid_argument,
         "gdn_recompute_w_u: batch: 2, expected 1 with sequences");
  refuse({.tokens = -1}, invalid_argument, "gdn_recompute_w_u: tokens: -1, expected at least 0");
  refuse({.element = DType::f64}, unsupported,
         "gdn_recompute_w_u: element: f64, expected f32, f16 or bf16");
  refuse({.a_element = DType::f16}, unsupported,
         "gdn_recompute_w_u: a_element: f16, expected f32 or bf16");

  GdnDesc d{.tokens = 20, .key_dim = 4, .value_dim = 4};
  d.sequences = 3;
  auto p = make_problem<Op>(d, 1, {});
  auto* at = oracle::data<std::int32_t>(p.args.cu_seqlens);
  const auto sequences = [&](std::array<std::int32_t, 4> starts, std::string_view message) {
    std::copy(starts.begin(), starts.end(), at);
    oracle::expect_error(run_problem(p), invalid_argument, message);
  };
  sequences({1, 2, 3, 20}, "gdn_recompute_w_u: cu_seqlens: [0] is 1, expected 0");
  sequences({0, 9, 8, 20}, "gdn_recompute_w_u: cu_seqlens: [2] is 8, expected at least [1], 9");
  sequences({0, 9, 9, 21}, "gdn_recompute_w_u: cu_seqlens: [3] is 21, expected tokens, 20");

  // A's last axis is the chunk.
  auto wrong = make_problem<Op>(d, 1, {});
  wrong.args.a.shape[3] = 32;
  const Status status = run_problem(wrong);
  EXPECT_EQ(status.code(), invalid_argument);
  EXPECT_NE(status.message().find("a: "), std::string_view::npos) << status.message();
}

}  // namespace
}  // namespace bittern
