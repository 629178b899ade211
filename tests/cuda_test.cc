// On a GPU: what the parity tests of the ops do not reach.
#include <gtest/gtest.h>

#include <vector>

#include "oracle/oracle_test.h"

namespace bittern {
namespace {

constexpr Device kDevice{Device::Type::cuda, 0};

TEST(Cuda, SkuNamesTheDevice) {
  BITTERN_NEEDS_CUDA();
  const auto plan = Plan<QuantizePerGroup>::select({.outer_size = 1, .axis_size = 128}, kDevice);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(plan->sku().backend, "cuda");
  EXPECT_EQ(plan->sku().kernel, "cuda");
  EXPECT_EQ(plan->sku().architecture.substr(0, 3), "sm_");
  EXPECT_GE(plan->sku().architecture.size(), 5u);
  ::testing::Test::RecordProperty("architecture", std::string(plan->sku().architecture));
}

TEST(Cuda, HostMemoryIsRefused) {
  BITTERN_NEEDS_CUDA();
  const auto plan = Plan<QuantizePerGroup>::select({.outer_size = 1, .axis_size = 128}, kDevice);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  std::vector<float> x(128), scale(1);
  std::vector<std::int8_t> q(128);
  const Status status = plan->run({.x = view(x.data(), {1, 128}),
                                   .scale = view(scale.data(), {1, 1}),
                                   .zero_point = {},
                                   .q = view(q.data(), {1, 128})});
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_EQ(status.message(), "quantize_per_group: x: on cpu, expected cuda:0");
}

// Few enough to run under a memory checker: each granularity, with tails, padding and a channel
// axis whose parameters repeat.
TEST(Cuda, SmallProblems) {
  BITTERN_NEEDS_CUDA();
  const QuantizeDesc problems[] = {
      {.outer_size = 3, .axis_size = 96, .group_size = 48},
      {.outer_size = 2, .axis_size = 10, .group_size = 5, .element = DType::bf16},
      {.outer_size = 5, .axis_size = 37, .granularity = Granularity::token, .element = DType::f16},
      {.outer_size = 4, .axis_size = 7, .inner_size = 3, .granularity = Granularity::channel},
      {.outer_size = 3, .axis_size = 5, .granularity = Granularity::channel, .element = DType::f64},
      {.outer_size = 2, .axis_size = 1030, .granularity = Granularity::tensor}};
  for (const QuantizeDesc& d : problems) {
    const auto report = oracle::parity<QuantizePerGroup>(d, {.cpu = false});
    for (const std::string& failure : report.failures) ADD_FAILURE() << failure;
    EXPECT_GT(report.compared_cuda, 0);
  }
}

// Offsets beyond 2^32 bytes and elements.
TEST(Cuda, RowsFarApart) {
  BITTERN_NEEDS_CUDA();
  const CudaPlugin& gpu = **cuda_plugin(0);
  constexpr std::int64_t kRow = 64, kStride = (std::int64_t{1} << 32) + 64;
  const QuantizeDesc d{.outer_size = 2, .axis_size = kRow, .granularity = Granularity::tensor};
  void *x = nullptr, *q = nullptr, *scale = nullptr;
  const auto bytes = static_cast<std::size_t>(kStride + kRow);
  Status status = gpu.alloc(0, bytes * sizeof(float), &x);
  if (status.ok()) status = gpu.alloc(0, bytes, &q);
  if (status.ok()) status = gpu.alloc(0, sizeof(float), &scale);
  if (status.code() == Code::out_of_memory) GTEST_SKIP() << status.message();
  ASSERT_TRUE(status.ok()) << status.message();
  std::vector<float> row(kRow);
  for (std::size_t i = 0; i < row.size(); ++i) row[i] = static_cast<float>(i) - 20;
  const float one = 1;
  auto* const far_x = static_cast<float*>(x) + kStride;
  auto* const far_q = static_cast<std::int8_t*>(q) + kStride;
  ASSERT_TRUE(gpu.copy(x, row.data(), row.size() * sizeof(float)).ok());
  ASSERT_TRUE(gpu.copy(far_x, row.data(), row.size() * sizeof(float)).ok());
  ASSERT_TRUE(gpu.copy(scale, &one, sizeof one).ok());

  auto x_view = view(static_cast<float*>(x), d.tensor_shape(), kDevice);
  auto q_view = view(static_cast<std::int8_t*>(q), d.tensor_shape(), kDevice);
  x_view.stride[0] = q_view.stride[0] = kStride;
  const auto plan = Plan<QuantizePerGroup>::select(d, kDevice);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  status = plan->run({.x = x_view,
                      .scale = view(static_cast<float*>(scale), d.param_shape(), kDevice),
                      .zero_point = {},
                      .q = q_view});
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_TRUE(gpu.synchronize(0).ok());
  for (const void* from : {static_cast<const void*>(q), static_cast<const void*>(far_q)}) {
    std::vector<std::int8_t> codes(kRow);
    ASSERT_TRUE(gpu.copy(codes.data(), from, codes.size()).ok());
    for (std::size_t i = 0; i < codes.size(); ++i) EXPECT_EQ(codes[i], static_cast<int>(i) - 20);
  }
  for (void* p : {x, q, scale}) gpu.release(0, p);
}

}  // namespace
}  // namespace bittern
