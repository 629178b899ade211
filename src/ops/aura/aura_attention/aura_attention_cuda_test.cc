// aura_attention on a GPU: which kernel is taken, that runs repeat each other, and contents that
// nobody has checked.
#include "oracle/op_test.h"
#include "oracle/oracle_impl.h"
#include "oracle/oracle_test.h"

namespace bittern {
namespace {

using oracle::expect_error;
using oracle::expect_ok;
using Op = AuraAttention;
using Desc = AuraAttentionDesc;

constexpr Device kDevice{Device::Type::cuda, 0};

bool is_emulated() {
  CudaDeviceInfo info;
  return (*cuda_plugin(0))->info(0, &info).ok() && info.name == "emulated";
}

const Desc kDecoding{.sequences = 2, .heads = 8, .kv_heads = 2, .dim = 128, .capacity = 64};

const Desc kPrompt{
    .sequences = 2, .queries = 5, .heads = 8, .kv_heads = 2, .dim = 128, .capacity = 64};

Result<Plan<Op>> fastest(const Desc& d, std::string_view kernel = {}) {
  return Plan<Op>::select(d, kDevice, Preference::fastest, kernel);
}
bool has_tensor_kernel() { return fastest(kDecoding, "cuda_tensor").ok(); }
#define BITTERN_NEEDS_TENSOR_KERNEL() \
  BITTERN_NEEDS_CUDA();               \
  if (!has_tensor_kernel()) GTEST_SKIP() << "no cuda_tensor on this device"

Status run(const Plan<Op>& plan, oracle::Problem<Op>& p) {
  return oracle::run_on(kDevice, p, plan.workspace_bytes(),
                        [&](const auto& args, Workspace w) { return plan.run(args, {}, w); });
}

TEST(AuraAttention, CudaRunsRepeatEachOther) {
  BITTERN_NEEDS_CUDA();
  const bool large = !is_emulated();
  Desc splits = kDecoding;
  splits.capacity = large ? 16384 : 1536;
  splits.recent = 40;
  Desc prompt = kDecoding;
  prompt.queries = large ? 300 : 20;
  prompt.capacity = large ? 2048 : 272;
  for (const Desc& d : {splits, prompt, kDecoding}) {
    for (const char* kernel : {"cuda", "cuda_tensor", "cuda_wgmma"}) {
      const auto plan = fastest(d, kernel);
      if (!plan.ok()) continue;
      auto first = oracle::make_problem<Op>(d, 3, {.left_out = ~0});
      expect_ok(run(*plan, first));
      for (int i = large ? 100 : 2; i > 0; --i) {
        auto again = oracle::make_problem<Op>(d, 3, {.left_out = ~0});
        expect_ok(run(*plan, again));
        ASSERT_EQ(oracle::compare(again, first), "") << kernel << " " << i;
      }
    }
  }
}

// Later devices have the instructions of sm_90, but some have less shared memory.
TEST(AuraAttention, CudaRunsWhatItSelects) {
  BITTERN_NEEDS_CUDA();
  for (const Desc& d : {kDecoding, kPrompt}) {
    const auto plan = fastest(d);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    auto p = oracle::make_problem<Op>(d, 3, {.left_out = ~0});
    expect_ok(run(*plan, p));
    if (is_emulated() && plan->sku().architecture == "sm_120") {
      EXPECT_EQ(plan->sku().kernel, "cuda");
    }
  }
}

TEST(AuraAttention, TensorCoresTakeOneQueryAndNothingUnasked) {
  BITTERN_NEEDS_TENSOR_KERNEL();
  const auto exact = Plan<Op>::select(kDecoding, kDevice);
  ASSERT_TRUE(exact.ok());
  EXPECT_EQ(exact->sku().kernel, "cuda");
  EXPECT_EQ(exact->precision_guarantee().error_norm, ErrorNorm::exact);
  const auto fast = fastest(kDecoding);
  ASSERT_TRUE(fast.ok());
  EXPECT_EQ(fast->sku().kernel, "cuda_tensor");
  EXPECT_EQ(fast->precision_guarantee().error_bound, 1.0 / 1000);
  for (const std::int64_t dim : {64, 80, 96, 192, 256, 512}) {
    Desc d = kDecoding;
    d.dim = dim;
    EXPECT_EQ(fastest(d)->sku().kernel, "cuda_tensor") << dim;
  }
  const auto refused = [&](auto change, const char* why) {
    Desc d = kDecoding;
    change(d);
    const auto other = fastest(d);
    ASSERT_TRUE(other.ok()) << why;
    EXPECT_EQ(other->sku().kernel, "cuda") << why;
    EXPECT_NE(fastest(d, "cuda_tensor").status().message().find(why), std::string::npos)
        << fastest(d, "cuda_tensor").status().message();
  };
  using D = Desc&;
  EXPECT_NE(fastest(kPrompt, "cuda_tensor").status().message().find("queries: 5, expected 1"),
            std::string::npos);
  refused([](D d) { d.dim = 1024; }, "dim: 1024, expected 64, 80, 96, 128, 192, 256 or 512");
  refused([](D d) { d.heads = 18; }, "heads / kv_heads: 9, expected 1..8");
  refused([](D d) { d.capacity = 63; }, "capacity: 63, expected a multiple of 16 above 0");
  refused([](D d) { d.page_size = d.capacity = 17, d.pages = 1; }, "expected a multiple of 16");
  refused([](D d) { d.recent = 1025; }, "first + recent: 1025, expected at most 1024");
  refused([](D d) { d.k_bits = 5; }, "k_bits, v_bits: 5, 4, expected ");
}

TEST(AuraAttention, WarpgroupsTakePrompts) {
  BITTERN_NEEDS_CUDA();
  if (!fastest(kPrompt, "cuda_wgmma").ok()) GTEST_SKIP() << "no cuda_wgmma on this device";
  EXPECT_EQ(fastest(kPrompt)->sku().kernel, "cuda_wgmma");
  EXPECT_EQ(Plan<Op>::select(kPrompt, kDevice)->sku().kernel, "cuda");
  for (const std::int64_t dim : {64, 80, 96, 192, 256}) {
    Desc d = kPrompt;
    d.dim = dim;
    EXPECT_EQ(fastest(d)->sku().kernel, "cuda_wgmma") << dim;
  }
  const auto refused = [&](auto change, const char* why) {
    Desc d = kPrompt;
    change(d);
    EXPECT_NE(fastest(d, "cuda_wgmma").status().message().find(why), std::string::npos)
        << fastest(d, "cuda_wgmma").status().message();
  };
  using D = Desc&;
  refused([](D d) { d.dim = 512; }, "dim: 512, expected 64, 80, 96, 128, 192 or 256");
  refused([](D d) { d.v_rotation = Rotation::dense; },
          "v_rotation: dense, expected hadamard or identity");
  EXPECT_NE(fastest(kDecoding, "cuda_wgmma").status().message().find("queries: 1, expected 2"),
            std::string::npos);
  // Rows of first and recent tokens are read 16 bytes at a time too.
  Desc recent = kPrompt;
  recent.recent = 7;
  const auto plan = fastest(recent, "cuda_wgmma");
  ASSERT_TRUE(plan.ok());
  auto p = oracle::make_problem<Op>(recent, 3, {.left_out = ~0});
  p.args.k_recent.data = static_cast<const bf16*>(p.args.k_recent.data) + 1;
  expect_error(run(*plan, p), Code::unsupported,
               "aura_attention: k_recent: address is 2 bytes past a multiple of 16, expected a "
               "multiple of 16 for kernel cuda_wgmma");
}

TEST(AuraAttention, TensorCoresRefuseOperandsThatAreNotAligned) {
  BITTERN_NEEDS_TENSOR_KERNEL();
  const auto plan = fastest(kDecoding);
  ASSERT_TRUE(plan.ok());
  auto p = oracle::make_problem<Op>(kDecoding, 3, {.unaligned = true, .left_out = ~0});
  expect_error(run(*plan, p), Code::unsupported,
               "aura_attention: k_packed: address is 4 bytes past a multiple of 16, expected a "
               "multiple of 16 for kernel cuda_tensor");
}

// Both kernels for tensor cores, where they are, on operands that fill(args) has changed.
template <class Fill>
void expect_within_bound(std::int64_t capacity, Fill&& fill) {
  for (Desc d : {kDecoding, kPrompt}) {
    d.capacity = capacity;
    d.k_rotation = d.v_rotation = Rotation::identity;
    d.scale = 1;
    const auto plan = fastest(d, d.queries == 1 ? "cuda_tensor" : "cuda_wgmma");
    if (!plan.ok()) continue;  // no products of a warpgroup
    auto got = oracle::make_problem<Op>(d, 5, {.left_out = ~0});
    auto want = oracle::make_problem<Op>(d, 5, {.left_out = ~0});
    fill(got.args);
    fill(want.args);
    expect_ok(oracle::run_op<Op>(d, want.args, "ref"));
    expect_ok(run(*plan, got));
    oracle::Judge judge(plan->precision_guarantee().error_bound);
    oracle::Cases<Op>::judge(d, got.args, want.args, judge);
    EXPECT_EQ(judge.failure(), "");
    EXPECT_LT(judge.worst(), 1);
  }
}

// Numbers at both ends of f32: with opposite factors elsewhere the logits are ordinary.
TEST(AuraAttention, TensorCoresTakeTinyAndHugeNumbers) {
  BITTERN_NEEDS_TENSOR_KERNEL();
  constexpr double kSizes[][3] = {{0x1p-124, 0x1p60, 0x1p64},  // of q, levels and scales of K
                                  {0x1p60, 0x1p-124, 0x1p64},
                                  {0x1.8p126, 0x1p-60, 0x1p-67}};
  for (const auto& sizes : kSizes) {
    SCOPED_TRACE(sizes[0]);
    expect_within_bound(64, [&](const Op::Args& a) {
      oracle::Rng rng(7);
      const auto fill = [&](const ConstView& v, double size) {
        for (std::int64_t i = 0; i < v.shape.numel(); ++i)
          oracle::put(v, i, size * (2 * rng.uniform() - 1));
      };
      fill(a.q, sizes[0]);
      fill(a.k_codebook, sizes[1]);
      fill(a.k_scales, sizes[2]);
      fill(a.v_scales, 1);
      fill(a.v_codebook, 1);
    });
  }
}

// A weight is largest where its logit is just short of raising its row's reference, and its scale
// just short of a power of two: f16 must hold that too.
TEST(AuraAttention, TensorCoresTakeTheLargestWeights) {
  BITTERN_NEEDS_TENSOR_KERNEL();
  for (const double more : {0.9, 0.998, 0.999, 0.9999, 0.99999, 1.0, 1.0001}) {
    SCOPED_TRACE(more);
    expect_within_bound(128, [&](const Op::Args& a) {
      const auto fill = [&](const ConstView& v, auto&& value) {
        for (std::int64_t i = 0; i < v.shape.numel(); ++i) oracle::put(v, i, value(i));
      };
      // Logits are k_scales: 0 in the first tiles, more * ln 2 of a token of a later one.
      fill(a.q, [](std::int64_t i) { return i % 128 == 0 ? 1 : 0; });
      fill(a.k_codebook, [](std::int64_t) { return 1; });
      fill(a.k_scales, [&](std::int64_t i) { return i % 128 == 100 ? more * std::log(2.0) : 0; });
      fill(a.v_scales, [](std::int64_t) { return 0x1.fffffep0; });
      fill(a.v_codebook, [](std::int64_t i) { return 1 - i / 16.0; });
    });
  }
}

// Lengths, starts and pages from anywhere: nothing else is touched and nothing faults.
TEST(AuraAttention, CudaLimitsWhatIsOutOfRange) {
  BITTERN_NEEDS_CUDA();
  Desc paged = kDecoding;
  paged.page_size = 16;
  paged.pages = 5;
  paged.first = 3;
  paged.recent = 20;
  Desc many = paged;
  many.queries = 5;
  static constexpr std::int32_t kFar[] = {INT32_MIN, INT32_MAX, -1, 1 << 20, 0, 21};
  oracle::Rng rng(5);
  for (const Desc& d : {kDecoding, paged, many}) {
    for (const char* kernel : {"cuda", "cuda_tensor", "cuda_wgmma"}) {
      const auto plan = fastest(d, kernel);
      if (!plan.ok()) continue;
      for (int turn = 0; turn < 10; ++turn) {
        auto got = oracle::make_problem<Op>(d, 3, {}), want = oracle::make_problem<Op>(d, 3, {});
        for (const auto operand : {&Op::Args::lengths, &Op::Args::starts, &Op::Args::block_table}) {
          const ConstView &from = got.args.*operand, &to = want.args.*operand;
          for (std::int64_t i = 0; from && i < from.shape.numel(); ++i) {
            const auto value =
                rng.chance(3) ? oracle::get(from, i) : static_cast<double>(kFar[rng.below(6)]);
            oracle::put(from, i, value);
            oracle::put(to, i, value);
          }
        }
        expect_ok(run(*plan, got));
        ASSERT_EQ(oracle::compare(got, want, true), "") << kernel << " " << turn;
      }
    }
  }
}

}  // namespace
}  // namespace bittern
