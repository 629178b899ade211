// On a real GPU:
//
//   CudaLarge   grids and offsets past 16 and 32 bits
//   CudaFault   a kernel that faults, in a process of its own
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "gpu_test.h"

namespace bittern {
namespace {

using namespace gpu_test;

// Offsets beyond 2^32 bytes and elements.
TEST(CudaLarge, RowsFarApart) {
  BITTERN_NEEDS_CUDA();
  constexpr std::int64_t kRow = 64, kStride = (std::int64_t{1} << 32) + 64;
  const QuantizeDesc d{.outer_size = 2, .axis_size = kRow, .granularity = Granularity::tensor};
  void *x = nullptr, *q = nullptr, *scale = nullptr;
  const auto bytes = static_cast<std::size_t>(kStride + kRow);
  Status status = gpu().alloc(0, bytes * sizeof(float), &x);
  if (status.ok()) status = gpu().alloc(0, bytes, &q);
  if (status.ok()) status = gpu().alloc(0, sizeof(float), &scale);
  if (status.code() == Code::out_of_memory) GTEST_SKIP() << status.message();
  ASSERT_TRUE(status.ok()) << status.message();
  std::vector<float> row(kRow);
  for (std::size_t i = 0; i < row.size(); ++i) row[i] = static_cast<float>(i) - 20;
  const float one = 1;
  auto* const far_x = static_cast<float*>(x) + kStride;
  auto* const far_q = static_cast<std::int8_t*>(q) + kStride;
  ASSERT_TRUE(gpu().copy(x, row.data(), row.size() * sizeof(float)).ok());
  ASSERT_TRUE(gpu().copy(far_x, row.data(), row.size() * sizeof(float)).ok());
  ASSERT_TRUE(gpu().copy(scale, &one, sizeof one).ok());

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
  ASSERT_TRUE(gpu().synchronize(0).ok());
  for (const void* from : {static_cast<const void*>(q), static_cast<const void*>(far_q)}) {
    std::vector<std::int8_t> codes(kRow);
    ASSERT_TRUE(gpu().copy(codes.data(), from, codes.size()).ok());
    for (std::size_t i = 0; i < codes.size(); ++i) EXPECT_EQ(codes[i], static_cast<int>(i) - 20);
  }
  for (void* p : {x, q, scale}) gpu().release(0, p);
}

// More than 2^32 elements, compared with ref in windows of rows: the first, those around elements
// 2^31 and 2^32, and the last. The other rows hold whatever the memory held.
template <class Op>
void expect_windows(QuantizeDesc d) {
  BITTERN_NEEDS_CUDA();
  constexpr std::int64_t kRow = 4096, k2To31 = (std::int64_t{1} << 31) / kRow,
                         kRows = 2 * k2To31 + 5;
  d.outer_size = kRows;
  d.axis_size = kRow;
  const auto plan = Plan<Op>::select(d, kDevice);
  ASSERT_TRUE(plan.ok()) << plan.status().message();

  typename Op::Args args;
  std::vector<std::unique_ptr<Memory>> memory;
  Status status;
  const auto allocate = [&](std::size_t bytes) -> void* {
    auto made = Memory::make(bytes, false);
    if (!made) status = made.status();
    return made ? memory.emplace_back(std::move(*made))->data() : nullptr;
  };
  Op::operands(d, args, [&](const char*, auto& v, const Operand& expected) {
    if (!status.ok()) return;
    v.dtype = expected.dtype;
    v.device = kDevice;
    v.shape = expected.shape;
    v.stride = expected.shape.dense_strides();
    v.data = allocate(static_cast<std::size_t>(expected.shape.numel()) * size_of(expected.dtype));
  });
  const Workspace workspace{allocate(plan->workspace_bytes()), plan->workspace_bytes()};
  if (status.code() == Code::out_of_memory) GTEST_SKIP() << status.message();
  ASSERT_TRUE(status.ok()) << status.message();

  struct Window {
    std::int64_t row, rows;
  };
  std::vector<oracle::Problem<Op>> wants, gots;
  const Window windows[] = {{0, 2}, {k2To31 - 2, 4}, {2 * k2To31 - 2, 4}, {kRows - 3, 3}};
  // The part of operand `index` in a window: where it is on the device, and its bytes.
  const auto part = [&](std::size_t index, const Window& w, const oracle::Store& store) {
    std::byte* at = nullptr;
    std::size_t i = 0;
    Op::operands(d, args, [&](const char*, auto& v, const Operand&) {
      if (i++ != index) return;
      const auto row = static_cast<std::size_t>(v.stride[0]) * size_of(v.dtype);
      at = const_cast<std::byte*>(static_cast<const std::byte*>(v.data)) +
           static_cast<std::size_t>(w.row) * row;
    });
    const auto bytes =
        static_cast<std::size_t>(store.expected.shape.numel()) * size_of(store.expected.dtype);
    return std::pair(at, bytes);
  };
  for (const Window& w : windows) {
    QuantizeDesc small = d;
    small.outer_size = w.rows;
    const auto seed = static_cast<std::uint64_t>(w.row);
    wants.push_back(oracle::make_problem<Op>(small, seed, {}));
    gots.push_back(oracle::make_problem<Op>(small, seed, {}));
    const auto ref = Plan<Op>::select(small, {}, Preference::exact, "ref");
    ASSERT_TRUE(ref.ok()) << ref.status().message();
    ASSERT_TRUE(oracle::run_on(Device{}, wants.back(), ref->workspace_bytes(),
                               [&](const auto& a, Workspace s) { return ref->run(a, {}, s); })
                    .ok());
    for (std::size_t i = 0; i < gots.back().stores.size(); ++i) {
      oracle::Store& store = gots.back().stores[i];
      const auto [at, bytes] = part(i, w, store);
      ASSERT_TRUE(gpu().copy(at, store.bytes.data() + store.offset, bytes).ok());
    }
  }
  status = plan->run(args, {}, workspace);
  if (status.ok()) status = gpu().synchronize(0);
  ASSERT_TRUE(status.ok()) << status.message();
  for (std::size_t n = 0; n < std::size(windows); ++n) {
    for (std::size_t i = 0; i < gots[n].stores.size(); ++i) {
      oracle::Store& store = gots[n].stores[i];
      const auto [at, bytes] = part(i, windows[n], store);
      ASSERT_TRUE(gpu().copy(store.bytes.data() + store.offset, at, bytes).ok());
    }
    EXPECT_EQ(oracle::compare(gots[n], wants[n]), "") << "rows from " << windows[n].row;
  }
}

TEST(CudaLarge, QuantizeMoreThan2To32Elements) {  // 13 GB
  expect_windows<QuantizePerGroup>(
      {.q_min = 0, .q_max = 255, .element = DType::bf16, .code = DType::u8});
}

TEST(CudaLarge, QuantizeBackwardMoreThan2To32Elements) {  // 26 GB
  expect_windows<QuantizePerGroupBackward>({.element = DType::bf16});
}

// A block or a thread for each row, token, channel, group: more than 65535 of each.
TEST(CudaLarge, Grids) {
  BITTERN_NEEDS_CUDA();
  constexpr std::int64_t kMany = 70001;
  const QuantizeDesc quantize[] = {
      {.outer_size = kMany, .axis_size = 4, .group_size = 4},
      {.outer_size = 3, .axis_size = 2 * kMany, .group_size = 2},
      {.outer_size = kMany, .axis_size = 3, .granularity = Granularity::token},
      {.outer_size = 2, .axis_size = kMany, .inner_size = 2, .granularity = Granularity::channel},
      {.outer_size = kMany, .axis_size = 3, .granularity = Granularity::channel},
      {.outer_size = kMany, .axis_size = 3, .granularity = Granularity::tensor}};
  for_each_cuda_op([&]<class Op>() {
    SCOPED_TRACE(Op::kName);
    if constexpr (std::is_same_v<typename Op::Desc, QuantizeDesc>) {
      for (const QuantizeDesc& d : quantize)
        if (Op::check(d).ok()) compare_with_ref<Op>(d);
    } else if constexpr (std::is_same_v<typename Op::Desc, AffineDesc>) {
      compare_with_ref<Op>({.outer_size = kMany, .axis_size = 8, .group_size = 4});
    } else if constexpr (std::is_same_v<typename Op::Desc, PackDesc>) {
      compare_with_ref<Op>({.outer_size = kMany, .axis_size = 9, .bits = 3});
    } else if constexpr (std::is_same_v<typename Op::Desc, AuraDesc>) {
      compare_with_ref<Op>({.rows = kMany, .dim = 8});
    } else if constexpr (std::is_same_v<typename Op::Desc, GatedNormDesc>) {
      compare_with_ref<Op>({.rows = kMany, .dim = 8});
    } else if constexpr (std::is_same_v<typename Op::Desc, CausalConvDesc>) {
      compare_with_ref<Op>({.batch = kMany, .tokens = 2, .channels = 3});
      compare_with_ref<Op>({.batch = 2, .tokens = 3, .channels = kMany});
    }
  });
}

// A kernel that faults ends the process's use of the device, and nothing else: the next call on
// the device says so, those after it too, and the process goes on. The caller's fault here is a row
// stride of a terabyte on a small allocation; in a process of its own, as no other test could use
// the device afterwards.
[[noreturn]] void fault_and_go_on() {
  const auto expect = [](const char* what, const Status& status) {
    std::fprintf(stderr, "%s: %s: %s\n", what, name(status.code()),
                 std::string(status.message()).c_str());
    if (status.code() != Code::device_error) std::_Exit(1);
  };
  const auto there = Memory::make(1 << 20);
  const QuantizeDesc d{.outer_size = 2, .axis_size = 128};
  const auto plan = Plan<QuantizePerGroup>::select(d, kDevice);
  if (!there.ok() || !plan.ok()) std::_Exit(2);
  // x comes last: what its stride spans must not cover the others.
  auto* const codes = reinterpret_cast<std::int8_t*>((*there)->data());
  auto* const floats = reinterpret_cast<float*>((*there)->data() + 4096);
  QuantizePerGroup::Args args{.x = view(floats + 256, d.tensor_shape(), kDevice),
                              .scale = view(floats, d.param_shape(), kDevice),
                              .zero_point = {},
                              .q = view(codes, d.tensor_shape(), kDevice)};
  args.x.stride[0] = std::int64_t{1} << 38;
  if (const Status s = plan->run(args); !s.ok()) expect("run", s);  // it may fault that early
  expect("synchronize", gpu().synchronize(0));
  args.x.stride[0] = 128;
  expect("run again", plan->run(args));
  expect("synchronize again", gpu().synchronize(0));
  std::fprintf(stderr, "still here\n");
  std::_Exit(0);
}

TEST(CudaFault, IsReportedAndSticks) {
  BITTERN_NEEDS_CUDA();
  if (is_emulated()) GTEST_SKIP() << "the emulated device shares this process's memory";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(fault_and_go_on(), ::testing::ExitedWithCode(0), "IllegalAddress");
}

}  // namespace
}  // namespace bittern
