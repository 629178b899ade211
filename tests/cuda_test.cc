// On a GPU: what the parity tests of the ops do not reach. Quick, and also run on the emulated
// device and under a memory checker; cuda_large_test.cc has the rest.
#include "core/scratch.h"
#include "gpu_test.h"

#include <memory>
#include <vector>

namespace bittern {
namespace {

using namespace gpu_test;

// A problem of the oracle's on the device: operands that hold zeros until restore(), put on a
// stream, copies the problem into them.
template <class Op>
class OnDevice {
 public:
  Status make(oracle::Problem<Op>& problem, std::size_t workspace_bytes) {
    args_ = problem.args;
    for (oracle::Store& store : problem.stores) {
      Part& part = parts_.emplace_back(Part{&store, nullptr, nullptr});
      for (auto* memory : {&part.start, &part.operand}) {
        auto made = Memory::make(store.bytes.size());
        if (!made) return made.status();
        *memory = std::move(*made);
      }
      BITTERN_TRY(gpu().copy(part.start->data(), store.bytes.data(), store.bytes.size()));
      Op::operands(problem.desc, args_, [&](const char*, auto& v, const Operand&) {
        v.device = kDevice;
        if (v.data == store.bytes.data() + store.offset)
          v.data = part.operand->data() + store.offset;
      });
    }
    auto scratch = Memory::make(workspace_bytes);
    if (!scratch) return scratch.status();
    scratch_ = std::move(*scratch);
    workspace_ = {scratch_->data(), workspace_bytes};
    return {};
  }
  Status restore(Stream stream) const {
    for (const Part& part : parts_) {
      BITTERN_TRY(gpu().stream_copy(0, stream, part.operand->data(), part.start->data(),
                                    part.store->bytes.size()));
    }
    return {};
  }
  Status download() const {
    BITTERN_TRY(gpu().synchronize(0));
    for (const Part& part : parts_) {
      BITTERN_TRY(
          gpu().copy(part.store->bytes.data(), part.operand->data(), part.store->bytes.size()));
    }
    return {};
  }
  const typename Op::Args& args() const { return args_; }
  Workspace workspace() const { return workspace_; }

 private:
  struct Part {
    oracle::Store* store;
    std::unique_ptr<Memory> start, operand;
  };
  std::vector<Part> parts_;
  std::unique_ptr<Memory> scratch_;
  typename Op::Args args_{};
  Workspace workspace_{};
};

// A few of an op's check cases, small enough to be quick and with something to write, and one of
// those for weaker kernels.
template <class Op>
std::vector<typename Op::Desc> some_cases() {
  constexpr std::size_t kMost = 4, kBytes = 1 << 20;
  const auto fits = [](const typename Op::Desc& desc) {
    std::size_t bytes = 0;
    std::int64_t written = 0;
    const typename Op::Args args;
    Op::operands(desc, args, [&](const char*, const auto& v, const Operand& expected) {
      const std::int64_t numel = expected.shape.numel();
      bytes += static_cast<std::size_t>(numel) * size_of(expected.dtype);
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(v)>, MutView>) written += numel;
    });
    return written > 0 && bytes < kBytes;
  };
  std::vector<typename Op::Desc> fit, some;
  for (const auto& desc : oracle::Cases<Op>::check())
    if (fits(desc)) fit.push_back(desc);
  for (std::size_t i = 0; i < std::min(kMost, fit.size()); ++i)
    some.push_back(fit[(2 * i + 1) * fit.size() / (2 * std::min(kMost, fit.size()))]);
  for (const auto& desc : oracle::Cases<Op>::bounded(true)) {
    if (!fits(desc)) continue;
    some.push_back(desc);
    break;
  }
  return some;
}

// Runs `submit(stream, work)` for each op, each case and each kernel that `exact` or `fastest`
// chooses, where `work` puts the problem and the op on `stream`; then compares with ref, or for a
// weaker kernel with its own run on the default stream.
template <class Submit>
void expect_work_on_streams(Submit&& submit) {
  const OwnStream own;
  ASSERT_TRUE(own.status().ok()) << own.status().message();
  const Stream stream = own.get();
  for_each_cuda_op([&]<class Op>() {
    SCOPED_TRACE(Op::kName);
    int compared = 0;
    for (const auto& desc : some_cases<Op>()) {
      std::string_view exact_kernel;
      for (const Preference preference : {Preference::exact, Preference::fastest}) {
        const auto plan = Plan<Op>::select(desc, kDevice, preference);
        if (!plan) {
          EXPECT_EQ(plan.status().code(), Code::unsupported) << plan.status().message();
          continue;
        }
        if (plan->sku().kernel == exact_kernel) continue;
        exact_kernel = plan->sku().kernel;
        const auto judge = preference == Preference::exact
                               ? Plan<Op>::select(desc, {}, Preference::exact, "ref")
                               : Plan<Op>::select(desc, kDevice, preference);
        ASSERT_TRUE(judge.ok()) << judge.status().message();
        auto want = oracle::make_problem<Op>(desc, 11, {});
        auto got = oracle::make_problem<Op>(desc, 11, {});
        Status s =
            oracle::run_on(judge->device(), want, judge->workspace_bytes(),
                           [&](const auto& args, Workspace w) { return judge->run(args, {}, w); });
        ASSERT_TRUE(s.ok()) << s.message();
        OnDevice<Op> there;
        s = there.make(got, plan->workspace_bytes());
        if (s.ok()) {
          s = submit(stream, [&] {
            BITTERN_TRY(there.restore(stream));
            return plan->run(there.args(), stream, there.workspace());
          });
        }
        if (s.ok()) s = there.download();
        ASSERT_TRUE(s.ok()) << s.message();
        EXPECT_EQ(oracle::compare(got, want), "")
            << plan->sku().kernel << ": " << flags_text<Op>(desc);
        ++compared;
      }
    }
    EXPECT_GT(compared, 0);
  });
}

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

// What a kernel needs of a device is said by select, and under its own name nothing else runs.
TEST(Cuda, KernelsNameTheDeviceThatTheyNeed) {
  BITTERN_NEEDS_CUDA();
  GdnDesc chunks{.tokens = 64};
  chunks.element = DType::bf16;
  const AuraDesc rows{.rows = 4, .dim = 128, .rotation = Rotation::dense};
  const auto fastest = Plan<GdnRecomputeWU>::select(chunks, kDevice, Preference::fastest);
  const auto encode = Plan<AuraEncode>::select(rows, kDevice, Preference::fastest);
  ASSERT_TRUE(fastest.ok() && encode.ok());
  const std::string here(fastest->sku().architecture);
  if (here == "sm_90") {  // the plug-ins of the tests have sm_90a's code
    EXPECT_EQ(fastest->sku().kernel, "cuda_wgmma");
    EXPECT_EQ(encode->sku().kernel, "cuda_tensor");
    return;
  }
  EXPECT_EQ(fastest->sku().kernel, "cuda_mma");
  EXPECT_EQ(encode->sku().kernel, "cuda");
  const std::string why = "device: " + here + ", expected sm_90;";
  EXPECT_EQ(Plan<GdnRecomputeWU>::select(chunks, kDevice, Preference::fastest, "cuda_wgmma")
                .status()
                .message(),
            "gdn_recompute_w_u: no kernel on cuda:0 named cuda_wgmma: cuda_wgmma: " + why);
  EXPECT_EQ(Plan<AuraEncode>::select(rows, kDevice, Preference::fastest, "cuda_tensor")
                .status()
                .message(),
            "aura_encode: no kernel on cuda:0 named cuda_tensor: cuda_tensor: " + why);
}

// cu_seqlens is the device's, and nobody checks it: whatever it holds, nothing outside the operands
// is touched and nothing faults.
template <class Op>
void expect_harmless_bounds(const typename Op::Desc& desc, std::uint64_t seed) {
  const auto plan = Plan<Op>::select(desc, kDevice);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  oracle::Rng rng(seed);
  static constexpr std::int32_t kFar[] = {INT32_MIN, INT32_MAX, -1, 1 << 20, -(1 << 20), 0};
  for (int turn = 0; turn < 40; ++turn) {
    auto got = oracle::make_problem<Op>(desc, seed, {});
    auto want = oracle::make_problem<Op>(desc, seed, {});
    const std::int64_t n = desc.sequences + 1;
    auto* const bounds = oracle::data<std::int32_t>(got.args.cu_seqlens);
    for (std::int64_t i = 0; i < n; ++i) {
      const bool kept = turn > 0 && rng.chance(2);
      const auto near = static_cast<std::int32_t>(rng.below(3 * desc.tokens) - desc.tokens);
      if (!kept)
        bounds[i] = turn % 2 == 0 || rng.chance(2) ? kFar[rng.below(std::size(kFar))] : near;
    }
    std::copy_n(bounds, n, oracle::data<std::int32_t>(want.args.cu_seqlens));
    const Status s =
        oracle::run_on(kDevice, got, plan->workspace_bytes(),
                       [&](const auto& args, Workspace w) { return plan->run(args, {}, w); });
    ASSERT_TRUE(s.ok()) << s.message();
    ASSERT_EQ(oracle::compare(got, want, true), "") << Op::kName << " " << turn;
  }
}

TEST(Cuda, BoundsOfSequencesThatAreWrongTouchNothingElse) {
  BITTERN_NEEDS_CUDA();
  GdnDesc d{.tokens = 150, .value_heads = 2, .key_dim = 16, .value_dim = 32, .sequences = 5};
  for (const std::int32_t chunk : {16, 64}) {
    d.chunk = chunk;
    expect_harmless_bounds<GdnRecomputeWU>(d, 3);
    expect_harmless_bounds<GdnCumsum>(d, 4);
    expect_harmless_bounds<GdnChunkForward>(d, 7);
    expect_harmless_bounds<GdnKkt>(d, 8);
    expect_harmless_bounds<GdnSolve>(d, 9);
    expect_harmless_bounds<GdnState>(d, 10);
    expect_harmless_bounds<GdnOutput>(d, 11);
  }
  for (const std::int64_t channels : {3, 8}) {
    const CausalConvDesc conv{.tokens = 150, .channels = channels, .sequences = 5};
    expect_harmless_bounds<CausalConv1d>(conv, 5);
    expect_harmless_bounds<CausalConv1dBackward>(conv, 6);
  }
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

// Only the declaration lies: the plug-in asks the driver where the memory really is.
TEST(Cuda, HostMemoryDeclaredAsTheDevicesIsRefused) {
  BITTERN_NEEDS_CUDA();
  const QuantizeDesc d{.outer_size = 1, .axis_size = 128};
  const auto plan = Plan<QuantizePerGroup>::select(d, kDevice);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  std::vector<float> host(128);
  const auto there = Memory::make(1024);
  ASSERT_TRUE(there.ok()) << there.status().message();
  auto* const floats = reinterpret_cast<float*>((*there)->data());
  auto* const codes = reinterpret_cast<std::int8_t*>((*there)->data() + 640);
  QuantizePerGroup::Args args{.x = view(floats, d.tensor_shape(), kDevice),
                              .scale = view(floats + 128, d.param_shape(), kDevice),
                              .zero_point = {},
                              .q = view(codes, d.tensor_shape(), kDevice)};
  EXPECT_TRUE(plan->can_implement(args).ok());
  args.x.data = host.data();
  for (const Status& status : {plan->can_implement(args), plan->run(args)}) {
    EXPECT_EQ(status.code(), Code::invalid_argument);
    EXPECT_EQ(status.message(), "quantize_per_group: x: host memory, expected memory of cuda:0");
  }
  args.x.data = floats;
  args.q.data = host.data();
  EXPECT_EQ(plan->run(args).message(),
            "quantize_per_group: q: host memory, expected memory of cuda:0");
  EXPECT_EQ(gpu().check_pointer(0, floats).message(), "");  // and nothing was left broken
}

TEST(Cuda, HostMemoryForScratchIsRefused) {
  BITTERN_NEEDS_CUDA();
  int refused = 0;
  for_each_cuda_op([&]<class Op>() {
    for (const auto& desc : some_cases<Op>()) {
      const auto plan = Plan<Op>::select(desc, kDevice);
      if (!plan || plan->workspace_bytes() == 0) continue;
      auto problem = oracle::make_problem<Op>(desc, 1, {});
      OnDevice<Op> there;
      Status s = there.make(problem, plan->workspace_bytes());
      ASSERT_TRUE(s.ok()) << s.message();
      AlignedScratch host(plan->workspace_bytes());
      s = plan->run(there.args(), {}, host.workspace());
      EXPECT_EQ(s.message(),
                std::string(Op::kName) + ": workspace: host memory, expected memory of cuda:0");
      ++refused;
    }
  });
  if (refused == 0) GTEST_SKIP() << "no kernel asks for scratch";
}

TEST(Cuda, NoSuchDevice) {
  BITTERN_NEEDS_CUDA();
  const QuantizeDesc d{.outer_size = 1, .axis_size = 128};
  const auto none = Plan<QuantizePerGroup>::select(d, {Device::Type::cuda, 99});
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.status().code(), Code::unavailable);
  EXPECT_EQ(none.status().message().find("cuda:99: no such device, there are "), 0u)
      << none.status().message();
  const auto plan = Plan<QuantizePerGroup>::select(d, kDevice);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const auto there = Memory::make(1024);
  ASSERT_TRUE(there.ok());
  const Device other{Device::Type::cuda, 1};
  const auto* const floats = reinterpret_cast<const float*>((*there)->data());
  auto* const codes = reinterpret_cast<std::int8_t*>((*there)->data() + 640);
  const Status status = plan->run({.x = view(floats, d.tensor_shape(), other),
                                   .scale = view(floats + 128, d.param_shape(), kDevice),
                                   .zero_point = {},
                                   .q = view(codes, d.tensor_shape(), kDevice)});
  EXPECT_EQ(status.message(), "quantize_per_group: x: on cuda:1, expected cuda:0");
}

// The stream is busy when the problem and the op are put on it: an op that went to another stream
// would see operands that are still zero.
TEST(Cuda, WorkGoesToTheStreamGiven) {
  BITTERN_NEEDS_CUDA();
  constexpr std::size_t kBytes = 32 << 20;
  const auto from = Memory::make(kBytes), to = Memory::make(kBytes);
  ASSERT_TRUE(from.ok() && to.ok());
  const int rounds = is_emulated() ? 1 : 64;
  expect_work_on_streams([&](Stream stream, auto&& work) {
    for (int i = 0; i < rounds; ++i)
      BITTERN_TRY(gpu().stream_copy(0, stream, (*to)->data(), (*from)->data(), kBytes));
    return work();
  });
}

// Nothing runs while the graph is captured, and a replay does everything: an op that waited, or
// allocated, or went to another stream would fail or leave its operands as they were.
TEST(Cuda, EveryOpCanBeCapturedInAGraph) {
  BITTERN_NEEDS_CUDA();
  expect_work_on_streams([](Stream stream, auto&& work) {
    double seconds = 0;
    return gpu().replay(0, stream, work, 2, &seconds);
  });
}

TEST(Cuda, NothingToDo) {
  BITTERN_NEEDS_CUDA();
  const auto nothing = [](const auto& report) {
    for (const std::string& failure : report.failures) ADD_FAILURE() << failure;
    EXPECT_GT(report.compared_cuda, 0);
  };
  const oracle::Settings cuda_only{.cpu = false};
  for (const QuantizeDesc& d :
       {QuantizeDesc{.outer_size = 0, .axis_size = 128},
        QuantizeDesc{.outer_size = 3, .axis_size = 0},
        QuantizeDesc{.granularity = Granularity::tensor},
        // gradients that are sums over nothing, and are still written
        QuantizeDesc{.outer_size = 0, .axis_size = 5, .granularity = Granularity::channel},
        QuantizeDesc{.outer_size = 3, .axis_size = 0, .granularity = Granularity::token}}) {
    nothing(oracle::parity<QuantizePerGroup>(d, cuda_only));
    if (!gpu().fake_quantize_per_group_backward.empty())
      nothing(oracle::parity<FakeQuantizePerGroupBackward>(d, cuda_only));
  }
  // An operand without elements needs no memory.
  const auto plan = Plan<QuantizePerGroup>::select({.outer_size = 0, .axis_size = 128}, kDevice);
  ASSERT_TRUE(plan.ok());
  QuantizePerGroup::Args args{.x = view(static_cast<const float*>(nullptr), {0, 128}, kDevice),
                              .scale = view(static_cast<const float*>(nullptr), {0, 1}, kDevice),
                              .zero_point = {},
                              .q = view(static_cast<std::int8_t*>(nullptr), {0, 128}, kDevice)};
  EXPECT_TRUE(plan->run(args).ok());
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
  for (const QuantizeDesc& d : problems) EXPECT_GT(compare_with_ref<QuantizePerGroup>(d), 0);
}

// Enough groups that each warp of lsq has several batches of them to go through.
TEST(Cuda, LongRunsOfLsq) {
  BITTERN_NEEDS_CUDA();
  const std::int64_t rows = is_emulated() ? 50 : 1000;
  const QdqAffineInit::Desc problems[] = {
      {.outer_size = rows, .axis_size = 8192, .group_size = 64, .method = AffineMethod::lsq},
      {.outer_size = rows,
       .axis_size = 8192,
       .group_size = 64,
       .element = DType::bf16,
       .method = AffineMethod::lsq},
      {.outer_size = rows,
       .axis_size = 4096,
       .group_size = 32,
       .element = DType::bf16,
       .storage = CodeStorage::packed,
       .method = AffineMethod::lsq}};
  for (const auto& d : problems) EXPECT_GT(compare_with_ref<QdqAffineInit>(d), 0);
}

// Rows enough for the kernels that take them in tiles: few ones go a warp to a row, and the check's
// cases are few on a device of many multiprocessors.
TEST(Cuda, TilesOfTheCodec) {
  BITTERN_NEEDS_CUDA();
  const std::int64_t rows = is_emulated() ? 37 : 1501;
  constexpr DType kElements[] = {DType::bf16, DType::f16, DType::f32};
  std::size_t turn = 0;
  for (const std::int64_t dim : {64, 80, 128, 256, 512}) {
    for (const std::int32_t bits : {2, 3, 4, 8}) {
      for (const ScaleRule rule : {ScaleRule::matched, ScaleRule::least_squares}) {
        const AuraDesc d{.rows = rows,
                         .dim = dim,
                         .bits = bits,
                         .element = kElements[turn++ % 3],
                         .scale_rule = rule};
        EXPECT_GT(compare_with_ref<AuraEncode>(d), 0);
        if (rule != ScaleRule::matched) continue;
        EXPECT_GT(compare_with_ref<AuraDecode>(d), 0);
        EXPECT_GT(compare_with_ref<AuraRotate>(d), 0);
      }
    }
  }
}

}  // namespace
}  // namespace bittern
