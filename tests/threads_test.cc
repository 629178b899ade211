// Plans on many threads at once. The tsan preset builds and runs only this file.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "oracle/oracle_impl.h"

namespace bittern {
namespace {

constexpr int kCallers = 4;

template <class F>
void on_threads(int count, F&& f) {
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t) threads.emplace_back([&f, t] { f(t); });
  for (std::thread& thread : threads) thread.join();
}

// A few of an op's check cases, spread over its list.
template <class Op>
std::vector<typename Op::Desc> some_cases() {
  const auto all = oracle::Cases<Op>::check();
  std::vector<typename Op::Desc> some;
  const std::size_t stride = std::max<std::size_t>(1, all.size() / 5);
  for (std::size_t i = stride / 2; i < all.size(); i += stride) some.push_back(all[i]);
  return some;
}

// The operands after `plan` has run on them; the same seed gives the same inputs.
template <class Op>
oracle::Problem<Op> outcome(const Plan<Op>& plan) {
  auto problem = oracle::make_problem<Op>(plan.desc(), 1, {});
  const Status s =
      oracle::run_on(Device{}, problem, plan.workspace_bytes(),
                     [&](const auto& args, Workspace w) { return plan.run(args, {}, w); });
  EXPECT_TRUE(s.ok()) << s.message();
  return problem;
}

// "" or the first difference from what ref writes.
template <class Op>
std::string differs_from_ref(const Plan<Op>& plan) {
  const auto ref = Plan<Op>::select(plan.desc(), {}, Preference::exact, "ref");
  auto want = outcome(*ref), got = outcome(plan);
  return oracle::compare(got, want);
}

template <class F>
void for_each_op(F&& f) {
#define BITTERN_OP(T, folder, CPU, CUDA) f(Type<T>{});
#include "ops/ops.inc"
}

// Splits even small problems over the team; restores the defaults at the end.
class Threads : public ::testing::Test {
 protected:
  void SetUp() override { cpu::ignore_grain(true); }
  void TearDown() override {
    cpu::ignore_grain(false);
    cpu::force_isa(cpu::Isa::none);
    set_num_threads(0);
  }
};

TEST_F(Threads, ResultsDoNotDependOnTheTeam) {
  for_each_op([]<class Op>(Type<Op>) {
    for (const auto& desc : some_cases<Op>()) {
      const auto plan = Plan<Op>::select(desc);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      for (const int threads : {1, 2, 7}) {
        set_num_threads(threads);
        EXPECT_EQ(differs_from_ref(*plan), "") << Op::kName << ", " << threads << " threads";
      }
    }
  });
}

// Flush to zero, denormals are zero, other roundings, traps: as the program or a library of its may
// have set them, in the calling thread, and from there in the threads of its team.
TEST_F(Threads, TheCallersFloatModesDoNotMatterAndAreKept) {
  constexpr unsigned kDefault = 0x1f80, kModes = 0xffc0;
  for (const unsigned mode : {kDefault | 0x8040, kDefault | 0x4000, kDefault | 0x6000, 0u}) {
    for_each_op([&]<class Op>(Type<Op>) {
      for (const auto& desc : some_cases<Op>()) {
        const auto ref = Plan<Op>::select(desc, {}, Preference::exact, "ref");
        const auto plan = Plan<Op>::select(desc);
        ASSERT_TRUE(plan.ok()) << plan.status().message();
        auto want = outcome(*ref);
        for (const auto* each : {&*ref, &*plan}) {
          for (const int threads : {1, 3}) {
            set_num_threads(threads);
            auto got = oracle::make_problem<Op>(desc, 1, {});
            std::vector<std::byte> scratch(each->workspace_bytes() + 64);
            const auto at = reinterpret_cast<std::uintptr_t>(scratch.data());
            const Workspace workspace{scratch.data() + (64 - at % 64) % 64,
                                      each->workspace_bytes()};
            Status status;
            bool kept = true;
            // A new thread, and a team of its own that was in use before, in the same mode.
            std::thread([&] {
#pragma omp parallel num_threads(threads)
              __builtin_ia32_ldmxcsr(mode);
              // LLVM's runtime gives the caller its own mode back after a region.
              __builtin_ia32_ldmxcsr(mode);
              const auto chosen = Plan<Op>::select(desc, {}, Preference::exact, each->sku().kernel);
              status = chosen.ok() ? chosen->run(got.args, {}, workspace) : chosen.status();
#pragma omp parallel num_threads(threads)
              {
                const unsigned now = __builtin_ia32_stmxcsr();
#pragma omp critical
                kept = kept && (now & kModes) == mode;
              }
            }).join();
            EXPECT_TRUE(status.ok()) << status.message();
            EXPECT_TRUE(kept);
            EXPECT_EQ(oracle::compare(got, want), "")
                << Op::kName << ", mode " << mode << ", " << threads << " threads";
          }
        }
      }
    });
  }
}

TEST_F(Threads, ManyCallersSelectAndRunAtOnce) {
  set_num_threads(2);
  for_each_op([]<class Op>(Type<Op>) {
    for (const auto& desc : some_cases<Op>()) {
      const auto shared = Plan<Op>::select(desc);
      ASSERT_TRUE(shared.ok()) << shared.status().message();
      on_threads(kCallers, [&](int) {
        EXPECT_EQ(differs_from_ref(*shared), "") << Op::kName;
        const auto own = Plan<Op>::select(desc);
        ASSERT_TRUE(own.ok()) << own.status().message();
        EXPECT_EQ(differs_from_ref(*own), "") << Op::kName;
      });
    }
  });
}

TEST_F(Threads, SettingsMayChangeWhilePlansRun) {
  std::atomic<bool> done{false};
  std::thread meddler([&] {
    for (int i = 0; !done.load(); ++i) {
      set_num_threads(1 + i % 7);
      const auto isas = cpu::available_isas();
      if (!isas.empty()) cpu::force_isa(isas[static_cast<std::size_t>(i) % isas.size()]);
      std::this_thread::yield();
    }
  });
  for_each_op([]<class Op>(Type<Op>) {
    const auto cases = some_cases<Op>();
    on_threads(2, [&](int) {
      for (const auto& desc : cases) {
        const auto plan = Plan<Op>::select(desc);
        ASSERT_TRUE(plan.ok()) << plan.status().message();
        EXPECT_EQ(differs_from_ref(*plan), "") << Op::kName;
      }
    });
  });
  done = true;
  meddler.join();
}

TEST_F(Threads, EachCallerGetsItsOwnError) {
  const QuantizeDesc quantize{.outer_size = 1, .axis_size = 8, .group_size = 8};
  const auto plan = Plan<QuantizePerGroup>::select(quantize);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const float x[8] = {}, scale[1] = {1};
  on_threads(kCallers, [&](int t) {
    for (int i = 0; i < 500; ++i) {
      std::int8_t q[8];
      QuantizePerGroup::Args args{view(x, {1, 8}), view(scale, {1, 1}), {}, view(q, {1, 8})};
      QuantizeDesc bad = quantize;
      bad.group_size = -1 - t;
      args.x.shape[1] = 100 + t;
      EXPECT_EQ(plan->run(args).message(),
                "quantize_per_group: x: shape [1," + std::to_string(100 + t) + "], expected [1,8]");
      const auto refused = Plan<QuantizePerGroup>::select(bad);
      EXPECT_EQ(refused.status().message(), "quantize_per_group: group_size: " +
                                                std::to_string(-1 - t) + ", expected at least 1");
    }
  });
}

}  // namespace
}  // namespace bittern
