// Plan<Op> itself, on an op of its own: choosing, preferences, workspace, refusals, overlap.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "bittern/bittern.h"
#include "core/sanitized.h"
#include "cpu/dispatch.h"
#include "plan/fields.h"
#include "plan/plan_impl.h"

namespace bittern {

// y = 2 * x, with an exact kernel that needs scratch and a faster one with a weaker bound.
struct Double {
  static constexpr std::string_view kName = "double";
  static constexpr std::string_view kCategory = "test";
  struct Desc {
    std::int64_t rows = 0, columns = 0;
    double factor = 2;  // not used by the kernels
  };
  struct Args {
    ConstView x, offset;
    MutView y, count;
  };
  static Status check(const Desc& d) {
    return d.rows < 0 ? invalid("double: rows: negative") : Status();
  }
  static PrecisionGuarantee contract(const Desc&) { return exact_guarantee(DType::f32); }
  static DType element(const Desc&) { return DType::f32; }
  static DType aux_element(const Desc&) { return DType::f32; }
  template <class D, class F>
  static void fields(D& d, F&& f) {
    f("rows", d.rows, "");
    f("columns", d.columns, "");
    f("factor", d.factor, "");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("x", a.x, Operand{DType::f32, {{"rows", d.rows}, {"columns", d.columns}}, kRows});
    f("offset", a.offset, Operand{DType::f32, {{"rows", d.rows}, {"columns", d.columns}}});
    f("y", a.y,
      Operand{DType::f32, {{"rows", d.rows}, {"columns", d.columns}}, kRows | Operand::kOptional});
    f("count", a.count, Operand{DType::s32, {{"rows", d.rows}}, Operand::kOptional});
  }
  static Status check_contents(const Desc& d, const Args& a) {
    for (std::int64_t i = 0; i < d.rows * d.columns; ++i)
      if (a.offset.as<float>()[i] < 0) return invalid("double: offset: negative");
    return {};
  }
};

namespace {

constexpr std::size_t kScratch = 128;

Status run_double(const Double::Desc& d, const Double::Args& a, Stream, Workspace) {
  for (std::int64_t i = 0; i < d.rows; ++i)
    for (std::int64_t j = 0; j < d.columns; ++j)
      if (a.y) {
        a.y.as<float>()[i * a.y.row_stride() + j] = 2 * a.x.as<float>()[i * a.x.row_stride() + j];
      }
  return {};
}

constexpr Kernel<Double> kFast[] = {
    {.name = "approximate",
     .backend = "cpu",
     .weaker =
         [](const Double::Desc&) {
           return PrecisionGuarantee{.deterministic = false,
                                     .same_bits_on_all_backends = false,
                                     .error_norm = ErrorNorm::terms,
                                     .error_bound = 0.5};
         },
     .accepts =
         [](const Double::Desc&, const Double::Args& a) {
           return reinterpret_cast<std::uintptr_t>(a.x.data) % 16 == 0
                      ? Status()
                      : unsupported("x: address is odd, expected a multiple of 16");
         },
     .run = run_double},
    {.name = "narrow",
     .backend = "cpu",
     .supports =
         [](const Double::Desc& d, Device) {
           return d.columns > 4 ? unsupported("more than 4 columns") : Status();
         },
     .architecture = [](Device) { return std::string_view("toy"); },
     .run = run_double}};
constexpr Kernel<Double> kRef[] = {
    {.name = "ref",
     .backend = "ref",
     .workspace = [](const Double::Desc&, Device) { return kScratch; },
     .run = run_double}};

}  // namespace

template <>
Result<std::vector<std::span<const Kernel<Double>>>> kernels_for<Double>(Device device) {
  if (device.type == Device::Type::cuda) return unavailable("cuda: no device");
  return std::vector<std::span<const Kernel<Double>>>{kFast, kRef};
}
template class Plan<Double>;

namespace {

struct Tensors {
  std::vector<float> x = std::vector<float>(64, 1.5f), offset = std::vector<float>(64),
                     y = std::vector<float>(64, -7);
  std::vector<std::int32_t> count = std::vector<std::int32_t>(8);
  Double::Args args(std::int64_t rows, std::int64_t columns) {
    return {.x = as_const(view(x.data(), {rows, columns})),
            .offset = as_const(view(offset.data(), {rows, columns})),
            .y = view(y.data(), {rows, columns}),
            .count = view(count.data(), {rows})};
  }
};

TEST(Plan, ExactSkipsAWeakerKernelAndFastestTakesIt) {
  const auto exact = Plan<Double>::select({2, 3});
  ASSERT_TRUE(exact);
  EXPECT_EQ(exact->sku().kernel, "narrow");
  EXPECT_EQ(exact->sku().architecture, "toy");
  EXPECT_EQ(exact->precision_guarantee(), exact_guarantee(DType::f32));
  const auto fastest = Plan<Double>::select({2, 3}, {}, Preference::fastest);
  ASSERT_TRUE(fastest);
  EXPECT_EQ(fastest->sku().kernel, "approximate");
  EXPECT_EQ(fastest->sku().architecture, "any");
  EXPECT_FALSE(fastest->precision_guarantee().deterministic);
  EXPECT_FALSE(fastest->precision_guarantee().same_bits_on_all_backends);
  EXPECT_EQ(fastest->precision_guarantee().error_norm, ErrorNorm::terms);
  EXPECT_EQ(fastest->precision_guarantee().error_bound, 0.5);
  EXPECT_EQ(exact->precision_guarantee().error_norm, ErrorNorm::exact);
  EXPECT_EQ(exact->precision_guarantee().error_bound, 0);
}

// What is chosen is what runs: a kernel that wants an alignment refuses another, and run() does
// too.
TEST(Plan, AKernelMayRefuseOperandsByTheirAddresses) {
  const auto fastest = Plan<Double>::select({2, 3}, {}, Preference::fastest);
  const auto exact = Plan<Double>::select({2, 3});
  ASSERT_TRUE(fastest && exact);
  Tensors t;
  auto args = t.args(2, 3);
  EXPECT_TRUE(fastest->can_implement(args).ok());
  args.x.data = t.x.data() + 1;
  EXPECT_TRUE(exact->can_implement(args).ok());
  for (const Status& s : {fastest->can_implement(args), fastest->run(args)}) {
    EXPECT_EQ(s.code(), Code::unsupported);
    EXPECT_EQ(s.message(),
              "double: x: address is odd, expected a multiple of 16 for kernel approximate");
  }
}

TEST(Plan, FallsThroughToRefAndSaysWhyNotWhenAKernelIsNamed) {
  const auto plan = Plan<Double>::select({2, 9});
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->sku().backend, "ref");
  const auto named = Plan<Double>::select({2, 9}, {}, Preference::exact, "narrow");
  ASSERT_FALSE(named);
  EXPECT_EQ(named.status().code(), Code::unsupported);
  EXPECT_EQ(named.status().message(),
            "double: no kernel on cpu named narrow: narrow: more than 4 columns;");
  const auto unknown = Plan<Double>::select({2, 9}, {}, Preference::exact, "gpu");
  EXPECT_EQ(unknown.status().message(),
            "double: no kernel on cpu named gpu, expected approximate, narrow or ref");
  const auto weak = Plan<Double>::select({2, 9}, {}, Preference::exact, "approximate");
  EXPECT_EQ(
      weak.status().message(),
      "double: no kernel on cpu named approximate: approximate: weaker than the op's contract;");
}

TEST(Plan, TheEnvironmentNamesAKernel) {
  ASSERT_EQ(setenv("BITTERN_KERNEL", "ref", 1), 0);
  const auto forced = Plan<Double>::select({2, 3});
  const auto named = Plan<Double>::select({2, 3}, {}, Preference::exact, "narrow");
  ASSERT_EQ(unsetenv("BITTERN_KERNEL"), 0);
  ASSERT_TRUE(forced);
  EXPECT_EQ(forced->sku().kernel, "ref");
  ASSERT_TRUE(named);
  EXPECT_EQ(named->sku().kernel, "narrow");
}

TEST(Plan, TheEnvironmentsKernelIsOneOfTheOpsInLettersOfEitherCase) {
  ASSERT_EQ(setenv("BITTERN_KERNEL", "REF", 1), 0);
  const auto upper = Plan<Double>::select({2, 3});
  ASSERT_EQ(setenv("BITTERN_KERNEL", "fast", 1), 0);
  const auto unknown = Plan<Double>::select({2, 3});
  ASSERT_EQ(setenv("BITTERN_KERNEL", "", 1), 0);
  const auto empty = Plan<Double>::select({2, 3});
  ASSERT_EQ(setenv("BITTERN_KERNEL", "approximate", 1), 0);
  const auto weaker = Plan<Double>::select({2, 3});
  ASSERT_EQ(unsetenv("BITTERN_KERNEL"), 0);
  ASSERT_TRUE(upper) << upper.status().message();
  EXPECT_EQ(upper->sku().kernel, "ref");
  EXPECT_EQ(unknown.status().code(), Code::invalid_argument);
  EXPECT_EQ(unknown.status().message(),
            "double: BITTERN_KERNEL: fast, expected approximate, narrow or ref");
  EXPECT_EQ(empty.status().message(),
            "double: BITTERN_KERNEL: empty, expected approximate, narrow or ref");
  EXPECT_EQ(weaker.status().code(), Code::unsupported);
}

// Each in a process of its own: they are read once.
TEST(Environment, BadValuesAreErrorsOfTheFirstPlan) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto select = [](const char* variable, const char* value) {
    setenv(variable, value, 1);
    const auto plan = Plan<Double>::select({2, 3});
    std::fprintf(stderr, "%s", plan ? "ok" : std::string(plan.status().message()).c_str());
    std::exit(static_cast<int>(plan.status().code()));
  };
  const auto refused = ::testing::ExitedWithCode(static_cast<int>(Code::invalid_argument));
  for (const char* value : {"99999999999", "3x", "0", "-1", "1000000", " 4", "1e2", "0x4"}) {
    EXPECT_EXIT(select("BITTERN_THREADS", value), refused,
                std::string("BITTERN_THREADS: ") + value + ", expected an integer 1..[0-9]+");
  }
  EXPECT_EXIT(select("BITTERN_THREADS", ""), refused,
              "BITTERN_THREADS: empty, expected an integer");
  EXPECT_EXIT(select("BITTERN_THREADS", "7"), ::testing::ExitedWithCode(0), "ok");
  for (const char* value : {"AVX512", "ref", "none", "avx", "sse4", "AVX2 "}) {
    EXPECT_EXIT(select("BITTERN_ISA", value), refused,
                std::string("BITTERN_ISA: ") + value + ", expected AVX2, AVX3");
  }
  EXPECT_EXIT(select("BITTERN_ISA", ""), refused, "BITTERN_ISA: empty, expected AVX2");
}

TEST(Environment, NamesOfTargetsMayBeInEitherCase) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto architecture = [](const char* value) {
    setenv("BITTERN_ISA", value, 1);
    const auto plan = Plan<QuantizePerGroup>::select({.outer_size = 1, .axis_size = 128});
    const std::string text(plan ? plan->sku().architecture : plan.status().message());
    std::fprintf(stderr, "<%s>", text.c_str());
    std::exit(plan ? 0 : 1);
  };
  const auto isas = cpu::available_isas();
  for (const auto& [value, isa] : {std::pair{"avx2", cpu::Isa::avx2},
                                   {"Avx3", cpu::Isa::avx3},
                                   {"avx3_DL", cpu::Isa::avx3_dl}}) {
    const bool here = std::find(isas.begin(), isas.end(), isa) != isas.end();
    const std::string said =
        here ? "<" + std::string(cpu::name(isa)) + ">" : "which this CPU or this build lacks";
    EXPECT_EXIT(architecture(value), ::testing::ExitedWithCode(here ? 0 : 1), said);
  }
}

TEST(Environment, MoreThreadsThanTheSystemStartsAreRefused) {
  const std::string most = std::to_string(max_threads());
  const int before = num_threads();
  const Status far = check_num_threads(max_threads() + 1);
  EXPECT_EQ(far.code(), Code::invalid_argument);
  EXPECT_EQ(far.message(), "num_threads: " + std::to_string(max_threads() + 1) +
                               ", expected an integer 1.." + most);
  set_num_threads(std::numeric_limits<int>::max());
  EXPECT_EQ(num_threads(), before);
  const auto plan = Plan<Double>::select({2, 3});
  EXPECT_EQ(plan.status().code(), Code::invalid_argument);
  EXPECT_EQ(plan.status().message(), "num_threads: 2147483647, expected an integer 1.." + most);
  set_num_threads(0);
  EXPECT_TRUE(Plan<Double>::select({2, 3}));
#ifndef BITTERN_SANITIZED
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto limited = [] {  // room for the stacks of a few threads
    rlimit limit{};
    getrlimit(RLIMIT_AS, &limit);
    limit.rlim_cur = std::size_t{1} << 29;
    setrlimit(RLIMIT_AS, &limit);
    const Status status = check_num_threads(250);
    std::fprintf(stderr, "%s", std::string(status.message()).c_str());
    set_num_threads(2);
    std::exit(num_threads() == 2 ? static_cast<int>(status.code()) : 77);
  };
  EXPECT_EXIT(limited(), ::testing::ExitedWithCode(static_cast<int>(Code::invalid_argument)),
              "num_threads: 250 threads; the system lets this process start [0-9]+");
#endif
}

TEST(Plan, TheCpuHasOneIndex) {
  const auto plan = Plan<Double>::select({2, 3}, {Device::Type::cpu, 3});
  EXPECT_EQ(plan.status().message(), "double: device: cpu:3, expected cpu, whose index is 0");
}

TEST(Plan, ADeviceThatIsNotThereIsUnavailable) {
  const auto plan = Plan<Double>::select({2, 3}, {Device::Type::cuda, 0});
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.status().code(), Code::unavailable);
}

TEST(Plan, AsksForWorkspaceAndRefusesTooLittle) {
  const auto plan = Plan<Double>::select({2, 9});
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->workspace_bytes(), kScratch);
  Tensors t;
  alignas(64) std::byte scratch[kScratch + 1];
  Status s = plan->run(t.args(2, 9));
  EXPECT_EQ(s.code(), Code::invalid_argument);
  EXPECT_EQ(s.message(), "double: workspace: 0 bytes, expected at least 128");
  s = plan->run(t.args(2, 9), {}, {scratch, kScratch - 1});
  EXPECT_EQ(s.message(), "double: workspace: 127 bytes, expected at least 128");
  s = plan->run(t.args(2, 9), {}, {scratch + 1, kScratch});
  EXPECT_EQ(s.message(), "double: workspace: not aligned to 64 bytes");
  EXPECT_EQ(t.y[0], -7) << "an output was touched";
  EXPECT_TRUE(plan->run(t.args(2, 9), {}, {scratch, kScratch}).ok());
  EXPECT_EQ(t.y[0], 3);
}

TEST(Plan, NamesTheOperandThatIsWrong) {
  const auto plan = Plan<Double>::select({2, 3});
  ASSERT_TRUE(plan);
  Tensors t;
  struct Case {
    void (*spoil)(Double::Args&);
    Code code;
    std::string_view message;
  };
  static const Case kCases[] = {
      {[](Double::Args& a) { a.x.dtype = DType::f16; }, Code::invalid_argument,
       "double: x: dtype f16, expected f32"},
      {[](Double::Args& a) { a.x.shape = {3, 2}; }, Code::invalid_argument,
       "double: x: shape [3,2], expected [2,3] = [rows,columns]"},
      {[](Double::Args& a) { a.x.shape = {6}; }, Code::invalid_argument,
       "double: x: shape [6], expected [2,3] = [rows,columns]"},
      {[](Double::Args& a) { a.x.device.index = 3; }, Code::invalid_argument,
       "double: x: on cpu:3, expected cpu"},
      {[](Double::Args& a) { a.x.data = nullptr; }, Code::invalid_argument,
       "double: x: null, expected f32 [2,3]"},
      {[](Double::Args& a) { a.x.device = {Device::Type::cuda, 1}; }, Code::invalid_argument,
       "double: x: on cuda:1, expected cpu"},
      {[](Double::Args& a) { a.x.stride = {1}; }, Code::invalid_argument,
       "double: x: strides [1], expected one per axis"},
      {[](Double::Args& a) { a.x.stride = {1, 2}; }, Code::unsupported,
       "double: x: stride 2 of axis 1, expected 1"},
      {[](Double::Args& a) { a.x.stride = {2, 1}; }, Code::unsupported,
       "double: x: stride 2 of axis 0, expected at least 3"},
      {[](Double::Args& a) { a.x.stride = {-3, 1}; }, Code::unsupported,
       "double: x: stride -3 of axis 0, expected at least 3"},
      {[](Double::Args& a) { a.x.stride = {std::int64_t{1} << 60, 1}; }, Code::invalid_argument,
       "double: x: stride 1152921504606846976 spans more than 2^59 elements"},
      {[](Double::Args& a) { a.offset.stride = {4, 1}; }, Code::unsupported,
       "double: offset: stride 4 of axis 0, expected 3"},
      {[](Double::Args& a) { a.x.data = static_cast<const std::byte*>(a.x.data) + 1; },
       Code::invalid_argument, "double: x: address is not a multiple of 4"},
      {[](Double::Args& a) { a.y.data = const_cast<float*>(a.x.as<float>()) + 1; },
       Code::invalid_argument, "double: y: overlaps x, expected memory of its own"},
      {[](Double::Args& a) { a.y.data = const_cast<void*>(a.offset.data); }, Code::invalid_argument,
       "double: y: overlaps offset, expected memory of its own"},
      {[](Double::Args& a) { a.count.data = a.y.data; }, Code::invalid_argument,
       "double: count: overlaps y, expected memory of its own"},
      {[](Double::Args& a) { a.y.data = a.count.data = nullptr; }, Code::invalid_argument,
       "double: every output is left out, expected at least one"},
  };
  for (const Case& c : kCases) {
    Double::Args args = t.args(2, 3);
    c.spoil(args);
    const Status s = plan->run(args);
    EXPECT_EQ(s.code(), c.code) << c.message;
    EXPECT_EQ(s.message(), c.message);
    EXPECT_EQ(t.y, std::vector<float>(64, -7)) << "an output was touched: " << c.message;
  }
}

TEST(Plan, RefusesContentsTheOpCannotTake) {
  Tensors t;
  const auto plan = Plan<Double>::select({2, 3});
  ASSERT_TRUE(plan);
  EXPECT_TRUE(plan->can_implement(t.args(2, 3)).ok());
  t.offset[3] = -1;
  EXPECT_EQ(plan->can_implement(t.args(2, 3)).message(), "double: offset: negative");
}

TEST(Fields, RealNumbersGoThroughTextUnchanged) {
  Double::Desc d;
  for (const double value : {0.1, -1e300, 0x1p-1074, 12345678.9}) {
    const std::string text = field_text(value);
    ASSERT_TRUE(set_field<Double>(d, "factor", std::string_view(text)).ok()) << text;
    EXPECT_EQ(d.factor, value) << text;
  }
  ASSERT_TRUE(set_field<Double>(d, "factor", std::int64_t{3}).ok());
  EXPECT_EQ(d.factor, 3.0);
  ASSERT_TRUE(set_field<Double>(d, "factor", 0.5).ok());
  EXPECT_EQ(set_field<Double>(d, "factor", std::string_view("half")).message(),
            "double: factor: half, expected a number");
  EXPECT_EQ(set_field<Double>(d, "factor", HUGE_VAL).message(),
            "double: factor: inf, expected a finite number");
  EXPECT_EQ(set_field<Double>(d, "rows", 0.5).message(), "double: rows: 0.5, expected an integer");
  EXPECT_EQ(d.factor, 0.5);
}

TEST(Plan, InPlaceNeedsTheSameRows) {
  const auto plan = Plan<Double>::select({2, 3});
  Tensors t;
  Double::Args args = t.args(2, 3);
  args.y = view(t.x.data(), {2, 3});
  EXPECT_TRUE(plan->run(args).ok());
  EXPECT_EQ(t.x[5], 3.0f);
  args.y.stride[0] = 4;
  EXPECT_EQ(plan->run(args).message(), "double: y: overlaps x, expected memory of its own");
}

TEST(Plan, SlicesOfOneBufferDoNotOverlap) {
  const auto plan = Plan<Double>::select({4, 3});
  Tensors t;
  Double::Args args = t.args(4, 3);
  args.x = view(std::as_const(t.x).data(), {4, 3}, 8);
  args.y = view(t.x.data() + 3, {4, 3}, 8);  // columns
  EXPECT_TRUE(plan->run(args).ok()) << plan->run(args).message();
  EXPECT_EQ(t.x[3], 3.0f);
  args.y = view(t.x.data() + 2, {4, 3}, 8);
  EXPECT_EQ(plan->run(args).message(), "double: y: overlaps x, expected memory of its own");
  args.x = view(std::as_const(t.x).data(), {4, 3}, 6);
  args.y = view(t.x.data() + 3, {4, 3}, 6);  // alternate rows
  EXPECT_TRUE(plan->run(args).ok()) << plan->run(args).message();
}

TEST(Plan, AnEmptyTensorDoesNotLeaveOut) {
  const auto plan = Plan<Double>::select({2, 3});
  Tensors t;
  Double::Args args = t.args(2, 3);
  args.count = view(static_cast<std::int32_t*>(nullptr), {0});
  EXPECT_EQ(plan->run(args).message(), "double: count: shape [0], expected [2] = [rows]");
  args.count = view(static_cast<std::int32_t*>(nullptr), {2});
  EXPECT_TRUE(plan->run(args).ok());
}

TEST(Plan, NothingToDoIsOk) {
  const auto plan = Plan<Double>::select({0, 9});
  ASSERT_TRUE(plan);
  Double::Args args;
  EXPECT_EQ(plan->can_implement(args).message(),
            "double: every output is left out, expected at least one");
  // Null data is all there is of a tensor without elements; its shape says that it was given.
  args.y = view(static_cast<float*>(nullptr), {0, 9});
  EXPECT_TRUE(plan->can_implement(args).ok());
  args.y.shape = {0, 8};
  EXPECT_EQ(plan->can_implement(args).message(),
            "double: y: shape [0,8], expected [0,9] = [rows,columns]");
  float y = -7;
  args.y = view(&y, {0, 9});
  alignas(64) std::byte scratch[kScratch];
  EXPECT_TRUE(plan->run(args, {}, {scratch, kScratch}).ok());
  EXPECT_EQ(y, -7);
}

TEST(Plan, TellsTheTruthAboutF64) {
  const auto plan = Plan<QuantizePerGroup>::select({.outer_size = 2,
                                                    .axis_size = 128,
                                                    .q_min = 0,
                                                    .q_max = 255,
                                                    .element = DType::f64,
                                                    .code = DType::u8});
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->precision_guarantee().math_precision, DType::f64);
  EXPECT_EQ(plan->precision_guarantee().accumulator, DType::f64);
  EXPECT_EQ(plan->sku().element, DType::f64);
  EXPECT_EQ(plan->sku().aux_element, DType::u8);
  EXPECT_EQ(plan->sku().category, "quantization");
  const auto half =
      Plan<QuantizePerGroup>::select({.outer_size = 2, .axis_size = 128, .element = DType::bf16});
  EXPECT_EQ(half->precision_guarantee().math_precision, DType::f32);
}

TEST(Plan, CountsGroups) {
  EXPECT_EQ((QuantizeDesc{.axis_size = 96, .group_size = 32}.num_groups()), 3);
  EXPECT_EQ((QuantizeDesc{.axis_size = 96, .group_size = 0}.num_groups()), 0);
  EXPECT_EQ((QuantizeDesc{.axis_size = 96, .group_size = -1}.num_groups()), 0);
}

}  // namespace
}  // namespace bittern
