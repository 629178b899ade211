#include <gtest/gtest.h>

#include "ops/gdn/gdn_test.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using Op = GdnKkt;
using oracle::get;
using oracle::make_problem;
using oracle::put;
using oracle::run_problem;

TEST(GdnKkt, MatchesRefEverywhere) { oracle::expect_parity("gdn_kkt"); }

TEST(GdnKkt, MatchesAnExampleWorkedByHand) {
  const GdnDesc d{.tokens = 3, .key_dim = 2, .chunk = 16};
  for (const std::string_view kernel : oracle::kBothKernels) {
    auto p = make_problem<Op>(d, 1, {});
    oracle::set_values(p.args.k, {1, 2, 3, -1, 0.5, 4});
    oracle::set_values(p.args.beta, {7, 0.5, 2});
    oracle::set_values(p.args.g, {0, 0, -1e4});  // the last token forgets everything
    oracle::expect_ok(run_problem(p, kernel));
    std::vector<double> want(48, 0.0);
    want[16] = 0.5 * (3 - 2);
    EXPECT_EQ(oracle::values(p.args.l), want) << kernel;
    oracle::set_values(p.args.g, {0, 0, 0});
    oracle::expect_ok(run_problem(p, kernel));
    want[32] = 2 * 8.5;
    want[33] = 2 * (1.5 - 4);
    EXPECT_EQ(oracle::values(p.args.l), want) << kernel;
  }
}

// The difference above the diagonal would overflow: it is never formed.
TEST(GdnKkt, StrongDecayGivesNoNan) {
  GdnDesc d{.tokens = 130, .key_heads = 1, .value_heads = 3, .key_dim = 20};
  auto p = make_problem<Op>(d, 1, {});
  oracle::Rng rng(3);
  oracle::fill_keys(d, p.args.k, 0.9, rng);
  oracle::set_all(p.args.beta, 2);
  for (std::int64_t t = 0; t < d.tokens; ++t)
    for (std::int64_t h = 0; h < 3; ++h)
      put(p.args.g, t * 3 + h, -1e4 * static_cast<double>(t % 64 + 1));
  oracle::expect_ok(run_problem(p));
  for (const double l : oracle::values(p.args.l)) EXPECT_EQ(l, 0);
}

// Against f64, three value heads a key head, both maps.
TEST(GdnKkt, IsTheFormula) {
  for (const HeadMap map : {HeadMap::grouped, HeadMap::tiled}) {
    GdnDesc d{.tokens = 70, .key_heads = 2, .value_heads = 6, .key_dim = 33, .chunk = 32};
    d.head_map = map;
    auto p = make_problem<Op>(d, 1, {});
    oracle::Rng rng(4);
    oracle::fill_keys(d, p.args.k, 0.5, rng);
    oracle::fill_uniform(p.args.beta, 0, 2, rng);
    for (std::int64_t i = 0; i < 70 * 6; ++i)
      put(p.args.g, i, -0.1 * static_cast<double>(i / 6 % 32) - 0.01 * rng.uniform());
    oracle::expect_ok(run_problem(p));
    for (std::int64_t t = 0; t < 70; ++t) {
      for (std::int64_t h = 0; h < 6; ++h) {
        const std::int64_t key_head = map == HeadMap::grouped ? h / 3 : h % 2, i = t % 32;
        for (std::int64_t j = 0; j < 32; ++j) {
          double want = 0;
          const std::int64_t other = t - i + j;
          if (j < i) {
            for (std::int64_t c = 0; c < 33; ++c)
              want += get(p.args.k, (t * 2 + key_head) * 33 + c) *
                      get(p.args.k, (other * 2 + key_head) * 33 + c);
            want *= get(p.args.beta, t * 6 + h) *
                    std::exp(get(p.args.g, t * 6 + h) - get(p.args.g, other * 6 + h));
          }
          EXPECT_NEAR(get(p.args.l, (t * 6 + h) * 32 + j), want, 2e-6);
        }
      }
    }
  }
}

// ---- on the tensor cores ----

using oracle::kGpu;

Status run_mma(oracle::Problem<Op>& p) {
  return run_problem(p, "cuda_mma", Preference::fastest, kGpu);
}

// Against f64. A strong decay gives 0 and not NaN, and a NaN of a key stays in its row and column.
TEST(GdnKkt, TensorCoresComputeTheFormula) {
  BITTERN_NEEDS_CUDA();
  for (const DType element : {DType::bf16, DType::f16}) {
    GdnDesc d = oracle::wgmma_desc(100, 1, 3);
    d.element = element;
    auto p = make_problem<Op>(d, 1, {});
    oracle::Rng rng(4);
    oracle::fill_keys(d, p.args.k, 0.5, rng);
    oracle::fill_uniform(p.args.beta, 0, 2, rng);
    for (std::int64_t i = 0; i < 300; ++i)
      put(p.args.g, i, i / 3 % 64 < 50 ? -0.1 * static_cast<double>(i / 3 % 64) : -1e4);
    put(p.args.k, 80 * 128 + 2, NAN);
    oracle::expect_ok(run_mma(p));
    for (std::int64_t t = 0; t < 100; ++t) {
      for (std::int64_t h = 0; h < 3; ++h) {
        for (std::int64_t j = 0; j < 64; ++j) {
          const std::int64_t other = t / 64 * 64 + j;
          const double got = get(p.args.l, (t * 3 + h) * 64 + j);
          double want = 0;
          if (other < t) {
            for (std::int64_t c = 0; c < 128; ++c)
              want += get(p.args.k, t * 128 + c) * get(p.args.k, other * 128 + c);
            want *= get(p.args.beta, t * 3 + h) *
                    std::exp(get(p.args.g, t * 3 + h) - get(p.args.g, other * 3 + h));
          }
          if (std::isnan(want)) {
            EXPECT_TRUE(std::isnan(got)) << t << " " << j;
          } else {
            EXPECT_NEAR(got, want, 2e-5) << t << " " << j;
          }
        }
      }
    }
  }
}

TEST(GdnKkt, TensorCoresRefuseWhatTheyCannotDo) {
  BITTERN_NEEDS_CUDA();
  GdnDesc d = oracle::wgmma_desc(64, 1, 1);
  const auto plan = Plan<Op>::select(d, kGpu, Preference::fastest, "cuda_mma");
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(plan->precision_guarantee().error_norm, ErrorNorm::terms);
  EXPECT_EQ(plan->precision_guarantee().error_bound, 0x1p-15);
  auto unaligned = make_problem<Op>(d, 1, {.unaligned = true});
  oracle::expect_error(run_mma(unaligned), Code::unsupported,
                       "gdn_kkt: k: address is 2 bytes past a multiple of 16, expected a multiple "
                       "of 16 for kernel cuda_mma");
  EXPECT_EQ(Plan<Op>::select(d, kGpu, Preference::fastest)->sku().kernel, "cuda_mma");
  EXPECT_EQ(Plan<Op>::select(d, kGpu)->sku().kernel, "cuda");
  d.key_dim = 96;
  oracle::expect_error(Plan<Op>::select(d, kGpu, Preference::fastest, "cuda_mma").status(),
                       Code::unsupported,
                       "gdn_kkt: no kernel on cuda:0 named cuda_mma: cuda_mma: key_dim: 96, "
                       "expected 64 or 128;");
}

TEST(GdnKkt, RefusesWhatItCannotDo) {
  oracle::expect_error(Plan<Op>::select({.key_heads = 2, .value_heads = 5}).status(),
                       Code::invalid_argument,
                       "gdn_kkt: value_heads: 5, expected a multiple of key_heads 2");
  oracle::expect_error(Plan<Op>::select({.key_dim = 300}).status(), Code::invalid_argument,
                       "gdn_kkt: key_dim: 300, expected 1..256");
}

}  // namespace
}  // namespace bittern
