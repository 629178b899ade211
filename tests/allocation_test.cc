// Every public function with each of its allocations failing in turn. A call must then end with
// out_of_memory, or as it would have; it frees what it took, and what it worked on stays usable.
//
// A program of its own, since it replaces operator new. tests/python/test_public_functions.py
// compares the names in quotes here with what the headers declare.
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "bittern/bittern.h"
#include "bittern/c/bittern.h"
#include "bittern/c/decoding.h"
#include "bittern/c/kv_cache.h"
#include "bittern/c/model.h"
#include "bittern/c/tokenizer.h"
#include "bittern/calibrate.h"
#include "bittern/codec.h"
#include "bittern/distill.h"
#include "bittern/eval.h"
#include "bittern/generate.h"
#include "bittern/kv_cache.h"
#include "bittern/metrics.h"
#include "bittern/ranks.h"
#include "bittern/rope_frequencies.h"
#include "bittern/sample.h"
#include "bittern/tokenizer.h"
#include "convert/compare.h"
#include "convert/conversion.h"
#include "convert/importance.h"
#include "core/sanitized.h"
#include "cpu/parallel.h"
#include "formats/test_folder.h"
#include "model/test_model.h"
#include "oracle/oracle_impl.h"
#include "plan/any_op.h"

// ---- an allocator that fails ----

namespace {

std::atomic<std::int64_t> live = 0;  // allocations that are not freed
std::atomic<std::int64_t> live_bytes = 0, peak_bytes = 0;
std::atomic<std::int64_t> asked = 0;  // allocations since it was armed
std::atomic<std::int64_t> failing = -1;
std::atomic<bool> for_good = false;  // all from then on, or that one alone
std::atomic<bool> paused = false;    // none fails, and none is counted
// Whether those that nlohmann-json's destructor may make are spared: it keeps values of 16 bytes on
// a stack, and ends the process without memory for that.
std::atomic<bool> spares_json = false;

void* allocate(std::size_t size, std::size_t alignment) noexcept {
  const bool spared = spares_json && size % 16 == 0 && size <= 4096;
  if (const std::int64_t k = failing.load(); k >= 0 && !spared && !paused) {
    const std::int64_t i = asked++;
    if (for_good ? i >= k : i == k) return nullptr;
  }
  void* p = nullptr;
  if (posix_memalign(&p, std::max(alignment, sizeof(void*)), std::max<std::size_t>(size, 1)) != 0)
    return nullptr;
  ++live;
  const auto bytes = static_cast<std::int64_t>(malloc_usable_size(p));
  const std::int64_t now = live_bytes += bytes;
  for (std::int64_t peak = peak_bytes;
       now > peak && !peak_bytes.compare_exchange_weak(peak, now);) {
  }
  return p;
}
void* allocate_or_throw(std::size_t size, std::size_t alignment) {
  void* const p = allocate(size, alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
void release(void* p) noexcept {
  if (p == nullptr) return;
  --live;
  live_bytes -= static_cast<std::int64_t>(malloc_usable_size(p));
  std::free(p);
}

constexpr std::size_t kPlain = alignof(std::max_align_t);
std::size_t of(std::align_val_t a) { return static_cast<std::size_t>(a); }

}  // namespace

void* operator new(std::size_t n) { return allocate_or_throw(n, kPlain); }
void* operator new[](std::size_t n) { return allocate_or_throw(n, kPlain); }
void* operator new(std::size_t n, const std::nothrow_t&) noexcept { return allocate(n, kPlain); }
void* operator new[](std::size_t n, const std::nothrow_t&) noexcept { return allocate(n, kPlain); }
void* operator new(std::size_t n, std::align_val_t a) { return allocate_or_throw(n, of(a)); }
void* operator new[](std::size_t n, std::align_val_t a) { return allocate_or_throw(n, of(a)); }
void* operator new(std::size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return allocate(n, of(a));
}
void* operator new[](std::size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return allocate(n, of(a));
}
void operator delete(void* p) noexcept { release(p); }
void operator delete[](void* p) noexcept { release(p); }
void operator delete(void* p, std::size_t) noexcept { release(p); }
void operator delete[](void* p, std::size_t) noexcept { release(p); }
void operator delete(void* p, const std::nothrow_t&) noexcept { release(p); }
void operator delete[](void* p, const std::nothrow_t&) noexcept { release(p); }
void operator delete(void* p, std::align_val_t) noexcept { release(p); }
void operator delete[](void* p, std::align_val_t) noexcept { release(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { release(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { release(p); }
void operator delete(void* p, std::align_val_t, const std::nothrow_t&) noexcept { release(p); }
void operator delete[](void* p, std::align_val_t, const std::nothrow_t&) noexcept { release(p); }

namespace bittern {
namespace {

// More failures than this are spread over a call's allocations, the first and the last among them.
constexpr std::int64_t kMostFailures = 150;

const auto kNothing = [] {};

std::size_t open_files() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++count;
  return count;
}

// call() -> Status, which without failures has the code `want`; after() looks at what is left.
// `frees`: the call itself frees all that it allocates, be it a success or not.
template <class Call, class After>
void exhaust(const std::string& name, Call&& call, After&& after, Code want = Code::ok,
             bool frees = true, std::int64_t most = kMostFailures) {
  SCOPED_TRACE(name);
  for (int i = 0; i < 2; ++i) {  // what is made once is made
    const Status status = call();
    ASSERT_EQ(status.code(), want) << status.message();
    after();
  }
  asked = 0;
  failing = INT64_MAX;
  {
    const Status status = call();
  }
  failing = -1;
  const std::int64_t all = asked;
  after();
  const std::int64_t stride = std::max<std::int64_t>((all + most - 1) / most, 1);
  for (const bool sticky : {false, true}) {
    for (std::int64_t k = 0; k < all; k = k + 1 < all ? std::min(k + stride, all - 1) : all) {
      const std::size_t files = open_files();
      const std::int64_t before = live;
      Code code;
      {
        asked = 0;
        for_good = sticky;
        failing = k;
        Status status = call();
        failing = -1;
        code = status.code();
        ASSERT_TRUE(code == Code::out_of_memory || code == want)
            << "allocation " << k << " of " << all << (sticky ? " and all later ones" : "")
            << " failed: " << bittern::name(code) << ": " << status.message();
        ASSERT_EQ(status.ok(), status.message().empty());
      }
      if (frees) {
        ASSERT_EQ(live, before) << "allocation " << k << " of " << all
                                << " failed: " << bittern::name(code);
      }
      ASSERT_EQ(open_files(), files) << "allocation " << k << " of " << all;
      after();
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}
template <class Call>
void exhaust(const std::string& name, Call&& call) {
  exhaust(name, call, kNothing);
}
template <class Call>
void expect_refusal(const std::string& name, Call&& call, Code want = Code::invalid_argument) {
  exhaust(name, call, kNothing, want);
}

// A call that cannot fail; its answer is the same, or `otherwise` where there was no memory.
template <class Call, class Answer>
void exhaust_text(const std::string& name, Call&& call, const Answer& otherwise) {
  const auto want = call();
  exhaust(name, [&] {
    const auto got = call();
    return got == want || got == otherwise ? Status() : internal("another text");
  });
}

class Allocation : public ::testing::Test {
 protected:
  void SetUp() override {
    set_num_threads(3);
    cpu::ignore_grain(true);
  }
  void TearDown() override {
    cpu::ignore_grain(false);
    set_num_threads(0);
  }
};

// ---- ops ----

template <class Op>
std::vector<typename Op::Desc> some_cases() {
  auto all = oracle::Cases<Op>::check();
  std::vector<typename Op::Desc> some;
  const std::size_t stride = std::max<std::size_t>(1, all.size() / 3);
  for (std::size_t i = stride / 2; i < all.size(); i += stride) some.push_back(all[i]);
  return some;
}

template <class Op>
struct Run {
  explicit Run(const typename Op::Desc& desc) : problem(oracle::make_problem<Op>(desc, 1, {})) {}
  oracle::Problem<Op> problem;
  std::vector<std::byte> scratch;
  Status operator()(const Plan<Op>& plan) {
    const auto at = reinterpret_cast<std::uintptr_t>(scratch.data());
    return plan.run(problem.args, {},
                    {scratch.data() + (64 - at % 64) % 64, plan.workspace_bytes()});
  }
};

template <class Op>
void exhaust_kernel(const typename Op::Desc& desc, std::string_view kernel) {
  const std::string op(Op::kName);
  const auto select = [&] {
    return Plan<Op>::select(desc, {}, Preference::fastest, kernel, 3).status();
  };
  exhaust(op + ": " + "Plan::select", select);
  const auto plan = Plan<Op>::select(desc, {}, Preference::fastest, kernel, 3);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  Run<Op> run(desc), want(desc);
  run.scratch.resize(plan->workspace_bytes() + 64);
  want.scratch.resize(plan->workspace_bytes() + 64);
  const Status wanted = want(*plan);
  exhaust(op + ": " + "Plan::can_implement", [&] { return plan->can_implement(run.problem.args); });
  const auto same = [&] {  // the next run is right
    Run<Op> again(desc);
    again.scratch.resize(plan->workspace_bytes() + 64);
    ASSERT_EQ(again(*plan).code(), wanted.code());
    EXPECT_EQ(oracle::compare(again.problem, want.problem), "");
  };
  int turn = 0;
  exhaust(
      op + ": " + "Plan::run", [&] { return run(*plan); },
      [&] {
        if (turn++ % 16 == 0) same();
      },
      wanted.code());
}

template <class Op>
void exhaust_op() {
  const std::string op(Op::kName);
  for (const auto& desc : some_cases<Op>()) {
    exhaust(op + "::check", [&] { return Op::check(desc); });
    exhaust_kernel<Op>(desc, {});
    exhaust_kernel<Op>(desc, "ref");
    if (::testing::Test::HasFatalFailure()) return;
    Run<Op> run(desc);
    if constexpr (requires { Op::check_contents(desc, run.problem.args); })
      exhaust(op + "::check_contents", [&] { return Op::check_contents(desc, run.problem.args); });
    // Refusals, which are where messages are made.
    const auto plan = Plan<Op>::select(desc);
    std::size_t operand = 0;
    typename Op::Args wrong = run.problem.args;
    for (std::size_t at = 0; at < run.problem.stores.size(); ++at) {
      wrong = run.problem.args;
      operand = 0;
      Op::operands(desc, wrong, [&](const char*, auto& v, const Operand&) {
        if (operand++ == at && v.data != nullptr && v.shape.rank > 0) {
          v.shape[v.shape.rank - 1] += 1000003;
          v.shape[0] += 1;
        }
      });
      const Code code = plan->can_implement(wrong).code();
      expect_refusal(op + ": refused operand", [&] { return plan->can_implement(wrong); }, code);
      expect_refusal(
          op + ": refused run", [&] { return plan->run(wrong); }, plan->run(wrong).code());
      if constexpr (requires { Op::shape_hint(desc, "", Shape()); }) {
        const oracle::Store& store = run.problem.stores[at];
        const Shape found{3, 1000003};
        exhaust_text(
            op + "::shape_hint", [&] { return Op::shape_hint(desc, store.name, found); },
            std::string());
      }
    }
    expect_refusal(
        op + ": no such kernel",
        [&] { return Plan<Op>::select(desc, {}, Preference::exact, "none").status(); },
        Code::unsupported);
  }
  // Every field out of its range.
  const typename Op::Desc defaults = oracle::Cases<Op>::check().front();
  std::size_t fields = 0;
  Op::fields(defaults, [&](const char*, const auto&, const char*) { ++fields; });
  for (std::size_t i = 0; i < fields; ++i) {
    typename Op::Desc desc = defaults;
    std::size_t field = 0;
    Op::fields(desc, [&](const char*, auto& member, const char*) {
      using T = std::remove_cvref_t<decltype(member)>;
      if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>)
        if (field == i) member = static_cast<T>(-1000000007);
      ++field;
    });
    const Code code = Op::check(desc).code();
    expect_refusal(op + "::check", [&] { return Op::check(desc); }, code);
    expect_refusal(
        op + ": refused descriptor", [&] { return Plan<Op>::select(desc).status(); }, code);
  }
}

template <class Op>
class OpAllocation : public Allocation {};
TYPED_TEST_SUITE_P(OpAllocation);
TYPED_TEST_P(OpAllocation, EveryFailure) { exhaust_op<TypeParam>(); }
REGISTER_TYPED_TEST_SUITE_P(OpAllocation, EveryFailure);
struct OpName {
  template <class Op>
  static std::string GetName(int) {
    return std::string(Op::kName);
  }
};
template <class... Ops>
struct Without {
  using Types = ::testing::Types<Ops...>;
};
template <class None, class... Ops>
struct Without<None, Ops...> {
  using Types = ::testing::Types<Ops...>;
};
#define BITTERN_OP(T, f, CPU, CUDA) , T
using EveryOp = Without<void
#include "ops/ops.inc"
                        >::Types;
INSTANTIATE_TYPED_TEST_SUITE_P(Ops, OpAllocation, EveryOp, OpName);

TEST_F(Allocation, Plans) {
  const QuantizeDesc desc{.outer_size = 2, .axis_size = 64, .group_size = 64};
  using Op = QuantizePerGroup;
  expect_refusal("Plan::select",
                 [&] { return Plan<Op>::select(desc, {}, Preference::exact, {}, -1).status(); });
  expect_refusal("Plan::select",
                 [&] { return Plan<Op>::select(desc, {Device::Type::cpu, 3}).status(); });
  const auto cuda = [&] { return Plan<Op>::select(desc, {Device::Type::cuda, 99}).status(); };
  expect_refusal("Plan::select", cuda, cuda().code());
  const auto plan = Plan<Op>::select(desc);
  exhaust("Plan::sku",
          [&] { return plan->sku().op == "quantize_per_group" ? Status() : invalid(""); });
  exhaust("Plan::precision_guarantee",
          [&] { return plan->precision_guarantee().deterministic ? Status() : invalid(""); });
  const float x[128] = {}, scale[2] = {1, 1};
  std::int8_t q[128];
  const Op::Args args{view(x, {2, 64}), view(scale, {2, 1}), {}, view(q, {2, 64})};
  exhaust("Plan::run", [&] { return plan->run(args); });
}

// ---- what ops share ----

TEST_F(Allocation, ChecksOfDescriptors) {
  const float numbers[] = {1, -1, 3};
  const std::int32_t starts[] = {0, 9, 3};
  const std::string op = "an op whose name is longer than any string keeps in itself";
  const auto bad = [&](const char* name, auto&& call) {
    expect_refusal(name, call, call().code());
  };
  bad("check_affine_desc", [&] { return check_affine_desc(op, {.outer_size = -1}); });
  bad("check_aura_row", [&] { return check_aura_row(op, "dim", 22, 4, Rotation::hadamard); });
  bad("check_aura_desc", [&] { return check_aura_desc(op, {.rows = -1}); });
  bad("check_boundaries", [&] { return check_boundaries(op, "boundaries", numbers, 3); });
  bad("check_codebook", [&] {
    const float infinite = std::numeric_limits<float>::infinity();
    return check_codebook(op, "codebook", &infinite, 1);
  });
  bad("check_signs", [&] { return check_signs(op, "table", numbers, 3); });
  bad("check_rotation", [&] {
    return check_rotation(op, {.dim = 3, .rotation = Rotation::hadamard}, view(numbers, {3}));
  });
  exhaust_text(
      "width_hint", [&] { return width_hint("packed", 128, 4, {3, 1000003}); }, std::string());
  for (const Rotation rotation : {Rotation::hadamard, Rotation::dense}) {
    const Shape found = rotation == Rotation::dense ? Shape{128} : Shape{128, 128};
    exhaust_text(
        "rotation_hint", [&] { return rotation_hint("table", rotation, found); }, std::string());
  }
  bad("check_causal_conv_desc", [&] { return check_causal_conv_desc(op, {.tokens = -1}); });
  bad("check_gated_norm_desc", [&] { return check_gated_norm_desc(op, {.rows = -1}); });
  bad("check_rms_norm_desc", [&] { return check_rms_norm_desc(op, {.rows = -1}); });
  bad("check_rope_desc", [&] { return check_rope_desc(op, {.rotary_dim = 3}); });
  bad("check_gated_activation_desc", [&] { return check_gated_activation_desc(op, {.dim = 0}); });
  bad("check_log_softmax_desc", [&] { return check_log_softmax_desc(op, {.temperature = 0}); });
  bad("AttentionBackward::check", [&] { return AttentionBackward::check({.dim = 0}); });
  bad("check_kl_loss_desc", [&] { return check_kl_loss_desc(op, {.top = -1}); });
  bad("KlLoss::check_contents", [&] {
    return KlLoss::check_contents({.rows = 1, .dim = 5, .top = 3},
                                  {.x = {}, .ids = view(starts, {1, 3})});
  });
  bad("check_adam_desc", [&] { return check_adam_desc(op, {.step = 0}); });
  bad("check_gdn_desc", [&] { return check_gdn_desc(op, {.tokens = -1}); });
  bad("check_gdn_step_desc", [&] { return check_gdn_step_desc(op, {.tokens = -1}); });
  bad("check_state_index",
      [&] { return check_state_index(op, {.batch = 3, .pool = 1}, view(starts, {3})); });
  bad("check_gguf_desc", [&] { return check_gguf_desc(op, {.outer_size = -1}); });
  bad("check_quantize_desc", [&] { return check_quantize_desc(op, {.outer_size = -1}, {}); });
  bad("check_pack_desc", [&] { return check_pack_desc(op, {.outer_size = -1}); });
  bad("check_weight_desc", [&] { return check_weight_desc(op, {.inputs = -1}); });
  bad("check_sequences", [&] { return check_sequences(op, {.batch = -1}); });
  bad("check_cu_seqlens",
      [&] { return check_cu_seqlens(op, {.tokens = 3, .sequences = 2}, view(starts, {3})); });
  bad("visit", [&] { return visit<float>(DType::bf16, [](auto) { return Status(); }); });
  bad("visit_float", [&] { return visit_float(DType::u8, [](auto) { return Status(); }); });
  bad("QdqAffineInit::not_finite", [&] { return QdqAffineInit::not_finite(); });
}

TEST_F(Allocation, StatusesAndTexts) {
  const std::string text(100, 'x');
  expect_refusal("invalid", [&] { return invalid(text); });
  expect_refusal("unsupported", [&] { return unsupported(text); }, Code::unsupported);
  expect_refusal("unavailable", [&] { return unavailable(text); }, Code::unavailable);
  expect_refusal("internal", [&] { return internal(text); }, Code::internal);
  expect_refusal("Result::Result", [&] { return Result<int>(Status()).status(); }, Code::internal);
  const Status one = invalid(text);
  expect_refusal("Status::Status", [&] {
    Status copy = one;
    Status other;
    other = copy;
    return other;
  });
  expect_refusal(
      "Status::out_of_memory", [&] { return Status::out_of_memory(); }, Code::out_of_memory);
  exhaust_text(
      "name", [&] { return name(Device{Device::Type::cuda, -2147483647}); }, std::string("cuda"));
  exhaust_text(
      "Axes::names_str", [&] { return Axes{{"a_long_name", 2}, {"another_name", 3}}.names_str(); },
      std::string("[...]"));
  exhaust_text(
      "Shape::str", [&] { return Shape{1, 2, 3, 4444444444, 5555555555}.str(); },
      std::string("[...]"));
  exhaust_text(
      "aura_name", [&] { return aura_name({-1000000000, -1000000000}); }, std::string("aura"));
}

TEST_F(Allocation, Threads) {
  exhaust("num_threads", [] { return num_threads() == 3 ? Status() : internal("not 3"); });
  exhaust("set_num_threads", [] {
    set_num_threads(2);
    set_num_threads(3);
    return Status();
  });
  expect_refusal("check_num_threads", [] { return check_num_threads(1 << 30); });
  exhaust("check_environment", [] { return check_environment(); });
  set_num_threads(1 << 30);
  expect_refusal("check_environment", [] { return check_environment(); });
}

// ---- processes ----

// "Ranks::broadcast", "Ranks::gather" and "Ranks::collect" are the implementation's, and may throw.
class OneProcess : public Ranks {
 public:
  int rank() const noexcept override { return 0; }
  int count() const noexcept override { return 1; }
  Status broadcast(std::span<std::byte>) override { return {}; }
  Status gather(std::span<const std::byte> own, std::vector<std::vector<std::byte>>& all) override {
    all.assign(1, std::vector<std::byte>(own.begin(), own.end()));
    return {};
  }
  Status collect(std::span<const std::byte> own,
                 std::vector<std::vector<std::byte>>& all) override {
    return gather(own, all);
  }
};

TEST_F(Allocation, Processes) {
  exhaust("Ranks::agree", [] { return OneProcess().agree({}); });
  expect_refusal("Ranks::agree", [] { return OneProcess().agree(invalid("bits: 9, expected 8")); });
}

// ---- the codec ----

TEST_F(Allocation, Tables) {
  exhaust("sphere_codebook", [] { return sphere_codebook(64, 3).status(); });
  expect_refusal("sphere_codebook", [] { return sphere_codebook(1, 3).status(); });
  exhaust("gaussian_codebook", [] { return gaussian_codebook(64, 3).status(); });
  const float levels[] = {-2, -1, 1, 2};
  exhaust("user_codebook", [&] { return user_codebook(levels).status(); });
  expect_refusal("user_codebook", [&] { return user_codebook(std::span(levels, 3)).status(); });
  exhaust("midpoints", [&] { return midpoints(levels).status(); });
  const float boundaries[] = {-1.5f, 0, 1.5f};
  exhaust("sphere_distortion", [&] { return sphere_distortion(64, levels, boundaries).status(); });
  for (const Rotation rotation : {Rotation::identity, Rotation::hadamard, Rotation::dense})
    exhaust("make_rotation", [&] { return make_rotation(rotation, 32, 1).status(); });
  expect_refusal("make_rotation", [] { return make_rotation(Rotation::dense, -1, 1).status(); });
  exhaust("parse_aura_name", [] { return parse_aura_name("aura4v2").status(); });
  expect_refusal("parse_aura_name", [] { return parse_aura_name("aurora").status(); });
  for (const bool legacy : {false, true})
    exhaust("aura_config", [&] { return aura_config({4, 2}, 1, 64, 3, legacy).status(); });
  for (const std::int32_t bits : {2, 8})
    exhaust("legacy_codebook", [&] { return legacy_codebook(128, bits).status(); });
  const float x[] = {1, 2, 3}, y[] = {1, 2, 4};
  exhaust("relative_mse", [&] { return relative_mse(x, y) > 0 ? Status() : invalid(""); });
  exhaust("cosine_similarity",
          [&] { return cosine_similarity(x, y) > 0 ? Status() : invalid(""); });
  exhaust("logit_error", [&] { return logit_error(x, y) > 0 ? Status() : invalid(""); });
  exhaust("attention_kl", [&] { return attention_kl(x, y) > 0 ? Status() : invalid(""); });
  exhaust("bits_per_value", [&] { return bits_per_value(64, 4) > 4 ? Status() : invalid(""); });
}

TEST_F(Allocation, Decoding) {
  const RopeScaling yarn{.kind = RopeScalingKind::yarn, .factor = 4};
  exhaust("rope_frequencies", [&] { return rope_frequencies(64, 1e4, yarn).status(); });
  expect_refusal("rope_frequencies", [] { return rope_frequencies(63, 1e4).status(); });
  const float logits[] = {1, 2, 3};
  const std::int32_t history[] = {2, 1}, wrong[] = {3};
  const SampleOptions options{.top_k = 2, .top_p = 0.9, .repetition_penalty = 1.1};
  exhaust("sample", [&] { return sample(logits, history, options, 5).status(); });
  expect_refusal("sample", [&] { return sample(logits, wrong, options, 5).status(); });
}

constexpr std::int64_t kHeads = 2, kDim = 32;

struct Tokens {
  explicit Tokens(std::int64_t n) : count(n), values(static_cast<std::size_t>(n * kHeads * kDim)) {
    oracle::Rng rng(7);
    for (float& v : values) v = static_cast<float>(rng.below(2001)) / 1000 - 1;
  }
  std::int64_t count;
  std::vector<float> values;
  ConstView view() const { return bittern::view(values.data(), {count, kHeads, kDim}); }
};

// Plain, with both bf16 regions, with a window, with a window and means.
std::vector<KvCacheConfig> cache_configs() {
  const KvCacheConfig plain{.kv_heads = kHeads, .dim = kDim, .page_size = 16};
  KvCacheConfig regions = plain, window = plain, means = plain;
  regions.first = 3;
  regions.recent = 5;
  window.window = 20;
  window.slack = 2;
  means.first = 2;
  means.recent = 4;
  means.window = 24;
  means.window_keeps_first = true;
  means.k.rotation = Rotation::dense;
  means.k.mean.assign(kHeads * kDim, 0.25f);
  return {plain, regions, window, means};
}

TEST_F(Allocation, CachesAreMade) {
  for (const KvCacheConfig& config : cache_configs())
    exhaust("KvCache::make", [&] { return KvCache::make(config).status(); });
  expect_refusal("KvCache::make", [] { return KvCache::make({.kv_heads = -1}).status(); });
}

// A failed append leaves the old tokens, and the next one works.
TEST_F(Allocation, AppendIsAllOrNothing) {
  const std::int64_t at_first = live;
  for (const KvCacheConfig& config : cache_configs()) {
    for (const std::int64_t held : {0, 4, 30}) {
      for (const std::int64_t more : {1, 9, 100}) {
        const Tokens old(held), added(more);
        auto cache = KvCache::make(config);
        ASSERT_TRUE(cache.ok());
        ASSERT_TRUE(cache->append(old.view(), old.view()).ok());
        auto whole = cache->fork();
        ASSERT_TRUE(whole.ok() && whole->append(added.view(), added.view()).ok());
        const auto before = *cache->serialize(), after = *whole->serialize();
        const KvCacheBytes bytes = cache->bytes();
        whole = invalid("gone");
        // On a fork, which shares its pages, and on a cache of its own.
        for (const bool shared : {true, false}) {
          Result<KvCache> tried = invalid("none yet");
          const auto renew = [&] { tried = shared ? cache->fork() : KvCache::parse(before); };
          Status last;
          const auto check = [&] {
            ASSERT_TRUE(tried.ok());
            EXPECT_EQ(*tried->serialize(), last.ok() ? after : before);
            if (!last.ok()) {
              EXPECT_EQ(tried->bytes().pages, bytes.pages);
              ASSERT_TRUE(tried->append(added.view(), added.view()).ok());
              EXPECT_EQ(*tried->serialize(), after);
            }
            renew();
          };
          renew();
          // The pool grows once and stays: the count of allocations does not.
          const auto append = [&] { return last = tried->append(added.view(), added.view()); };
          SCOPED_TRACE(std::to_string(held) + " + " + std::to_string(more));
          exhaust("KvCache::append", append, check, Code::ok, false);
          EXPECT_EQ(*cache->serialize(), before);
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
  EXPECT_LE(live, at_first + 8) << "caches leak";
}

TEST_F(Allocation, CachesAreRead) {
  for (const KvCacheConfig& config : cache_configs()) {
    const Tokens tokens(37), query(1);
    auto cache = KvCache::make(config);
    ASSERT_TRUE(cache.ok() && cache->append(tokens.view(), tokens.view()).ok());
    const auto bytes = *cache->serialize();
    const auto unchanged = [&] { EXPECT_EQ(*cache->serialize(), bytes); };
    exhaust("KvCache::fork", [&] { return cache->fork().status(); }, unchanged);
    exhaust("KvCache::to", [&] { return cache->to({}).status(); }, unchanged);
    expect_refusal("KvCache::to", [&] { return cache->to({Device::Type::cpu, 3}).status(); });
    exhaust("KvCache::serialize", [&] { return cache->serialize().status(); }, unchanged);
    std::vector<std::byte> copy(cache->serialized_bytes());
    exhaust("KvCache::serialize", [&] { return cache->serialize(copy); }, unchanged);
    exhaust("KvCache::parse", [&] { return KvCache::parse(bytes).status(); });
    expect_refusal("KvCache::parse",
                   [&] { return KvCache::parse(std::span(bytes).first(50)).status(); });
    std::vector<float> out(kHeads * kDim), k(kHeads * kDim), v(kHeads * kDim);
    exhaust(
        "KvCache::attend",
        [&] { return cache->attend(query.view(), view(out.data(), {1, kHeads, kDim})); },
        unchanged);
    expect_refusal("KvCache::attend", [&] { return cache->attend({}, {}); });
    expect_refusal("KvCache::check_query", [&] { return cache->check_query({}); });
    for (const std::int64_t token : {36, 30}) {
      exhaust("KvCache::read", [&] { return cache->read(token, k, v); }, unchanged);
      expect_refusal("KvCache::read", [&] { return cache->read(token, k, {}); });
    }
    exhaust("KvCache::bytes", [&] { return cache->bytes().tables > 0 ? Status() : invalid(""); });
    exhaust("KvCache::truncate", [&] { return cache->truncate(cache->size()); }, unchanged);
    expect_refusal("KvCache::truncate", [&] { return cache->truncate(-1); });
    expect_refusal("KvCache::append", [&] { return cache->append({}, {}); });
    auto other = cache->fork();
    exhaust(
        "KvCache::KvCache",
        [&] {
          KvCache moved = std::move(*other);
          *other = std::move(moved);
          return other->size() == 37 ? Status() : invalid("");
        },
        unchanged);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST_F(Allocation, CachesOfTheSeedsFamily) {
  const auto config = aura_config({4, 2}, kHeads, kDim, 3);
  ASSERT_TRUE(config.ok());
  const Tokens tokens(20);
  auto cache = KvCache::make(*config);
  ASSERT_TRUE(cache.ok() && cache->append(tokens.view(), tokens.view()).ok());
  std::vector<std::uint32_t> k_packed(kHeads * 20 * 4), v_packed(kHeads * 20 * 2);
  std::vector<float> k_scales(kHeads * 20), v_scales(kHeads * 20);
  const KvCache::AuraViews views{
      view(k_packed.data(), {kHeads, 20, 4}), view(k_scales.data(), {kHeads, 20}),
      view(v_packed.data(), {kHeads, 20, 2}), view(v_scales.data(), {kHeads, 20})};
  exhaust("KvCache::write_aura", [&] { return cache->write_aura(views); });
  expect_refusal("KvCache::write_aura", [&] { return cache->write_aura({}); });
  exhaust("KvCache::read_aura", [&] { return KvCache::read_aura(*config, views, 20).status(); });
  expect_refusal("KvCache::read_aura",
                 [&] { return KvCache::read_aura(*config, {}, 20).status(); });
}

// ---- C ----

Status from_c(bittern_code code) {
  if (code == BITTERN_OK) return {};
  const char* text = bittern_last_error();
  return *text == '\0' ? internal("no message") : Status(static_cast<Code>(code), text);
}

TEST_F(Allocation, C) {
  exhaust("bittern_version", [] { return *bittern_version() != 0 ? Status() : invalid(""); });
  exhaust("bittern_last_error", [] { return bittern_last_error() ? Status() : invalid(""); });
  exhaust("bittern_code_name", [] { return bittern_code_name(1) ? Status() : invalid(""); });
  exhaust("bittern_op_count", [] { return bittern_op_count() > 0 ? Status() : invalid(""); });
  exhaust("bittern_op_name", [] { return bittern_op_name(0) ? Status() : invalid(""); });
  exhaust("bittern_num_threads",
          [] { return bittern_num_threads() == 3 ? Status() : invalid(""); });
  exhaust("bittern_set_num_threads", [] { return from_c(bittern_set_num_threads(3)); });
  expect_refusal("bittern_set_num_threads",
                 [] { return from_c(bittern_set_num_threads(1 << 30)); });
  for (std::size_t i = 0; i < bittern_op_count(); ++i) {
    const char* op = bittern_op_name(i);
    SCOPED_TRACE(op);
    exhaust("bittern_desc_create", [&] {
      bittern_desc* desc = nullptr;
      const Status status = from_c(bittern_desc_create(op, &desc));
      if (status.ok() != (desc != nullptr)) return internal("a handle of a failure");
      bittern_desc_destroy(desc);  // "bittern_desc_destroy"
      return status;
    });
    bittern_desc* desc = nullptr;
    ASSERT_EQ(bittern_desc_create(op, &desc), BITTERN_OK);
    const auto bad = [&](const char* name, auto&& call) {
      expect_refusal(name, call, call().code());
    };
    std::int64_t number = 0;
    double real = 0;
    const char* field = all_ops()[i]->fields()[0].name.data();
    exhaust("bittern_desc_set", [&] { return from_c(bittern_desc_set(desc, field, 2)); });
    bad("bittern_desc_set", [&] { return from_c(bittern_desc_set(desc, "no such field", 2)); });
    bad("bittern_desc_set_real", [&] { return from_c(bittern_desc_set_real(desc, field, 0.5)); });
    bad("bittern_desc_set_text", [&] { return from_c(bittern_desc_set_text(desc, field, "?")); });
    exhaust("bittern_desc_get", [&] { return from_c(bittern_desc_get(desc, field, &number)); });
    bad("bittern_desc_get", [&] { return from_c(bittern_desc_get(desc, "none", &number)); });
    exhaust("bittern_desc_get_real",
            [&] { return from_c(bittern_desc_get_real(desc, field, &real)); });
    std::size_t count = 0;
    bad("bittern_desc_check", [&] { return from_c(bittern_desc_check(desc)); });
    bad("bittern_desc_num_groups", [&] { return from_c(bittern_desc_num_groups(desc, &number)); });
    bad("bittern_desc_operand_count",
        [&] { return from_c(bittern_desc_operand_count(desc, &count)); });
    bittern_operand operand;
    bad("bittern_desc_operand", [&] { return from_c(bittern_desc_operand(desc, 0, &operand)); });
    bad("bittern_desc_operand", [&] { return from_c(bittern_desc_operand(desc, 99, &operand)); });
    bad("bittern_select", [&] {
      bittern_plan* plan = nullptr;
      const Status status =
          from_c(bittern_select(desc, {BITTERN_CPU, 0}, BITTERN_EXACT, nullptr, 2, &plan));
      if (status.ok() != (plan != nullptr)) return internal("a handle of a failure");
      bittern_plan_destroy(plan);  // "bittern_plan_destroy"
      return status;
    });
    bittern_desc_destroy(desc);
    if (::testing::Test::HasFatalFailure()) return;
  }
  bittern_desc* desc = nullptr;
  ASSERT_EQ(bittern_desc_create("quantize_per_group", &desc), BITTERN_OK);
  for (const char* field : {"outer_size", "axis_size", "group_size"})
    ASSERT_EQ(bittern_desc_set(desc, field, 8), BITTERN_OK);
  bittern_plan* plan = nullptr;
  ASSERT_EQ(bittern_select(desc, {BITTERN_CPU, 0}, BITTERN_EXACT, nullptr, 0, &plan), BITTERN_OK);
  bittern_sku sku;
  exhaust("bittern_plan_sku", [&] { return from_c(bittern_plan_sku(plan, &sku)); });
  bittern_precision precision;
  exhaust("bittern_plan_precision",
          [&] { return from_c(bittern_plan_precision(plan, &precision)); });
  std::size_t bytes = 0;
  exhaust("bittern_plan_workspace_bytes",
          [&] { return from_c(bittern_plan_workspace_bytes(plan, &bytes)); });
  float x[64] = {}, scale[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  std::int8_t q[64];
  const std::int64_t matrix[] = {8, 8}, column[] = {8, 1};
  bittern_tensor tensors[] = {{"x", x, BITTERN_F32, {BITTERN_CPU, 0}, 2, matrix, nullptr},
                              {"scale", scale, BITTERN_F32, {BITTERN_CPU, 0}, 2, column, nullptr},
                              {"q", q, BITTERN_S8, {BITTERN_CPU, 0}, 2, matrix, nullptr}};
  for (const Code want : {Code::ok, Code::invalid_argument}) {
    exhaust(
        "bittern_plan_can_implement",
        [&] { return from_c(bittern_plan_can_implement(plan, tensors, 3)); }, kNothing, want);
    exhaust(
        "bittern_plan_run",
        [&] { return from_c(bittern_plan_run(plan, tensors, 3, nullptr, nullptr, 0)); }, kNothing,
        want);
    tensors[1].name = "an operand that this op does not have";
  }
  bittern_plan_destroy(plan);
  bittern_desc_destroy(desc);
}

TEST_F(Allocation, DecodingFromC) {
  float inverse[4];
  double factor = 0;
  std::int32_t token = 0;
  const float logits[] = {1, 2, 3};
  exhaust("bittern_rope_frequencies",
          [&] { return from_c(bittern_rope_frequencies(8, 1e4, nullptr, inverse, 4, &factor)); });
  expect_refusal("bittern_rope_frequencies", [&] {
    return from_c(bittern_rope_frequencies(8, 1e4, nullptr, inverse, 3, &factor));
  });
  exhaust("bittern_sample",
          [&] { return from_c(bittern_sample(logits, 3, nullptr, 0, nullptr, 0, &token)); });
  expect_refusal("bittern_sample",
                 [&] { return from_c(bittern_sample(logits, 0, nullptr, 0, nullptr, 0, &token)); });
}

TEST_F(Allocation, CachesFromC) {
  const auto bad = [&](const char* name, auto&& call) {
    expect_refusal(name, call, call().code());
  };
  bittern_kv_config* config = nullptr;
  ASSERT_EQ(bittern_kv_config_create(&config), BITTERN_OK);
  exhaust("bittern_kv_config_create", [] {
    bittern_kv_config* made = nullptr;
    const Status status = from_c(bittern_kv_config_create(&made));
    bittern_kv_config_destroy(made);  // "bittern_kv_config_destroy"
    return status;
  });
  for (const char* scheme : {"aura4v2", "aurora"}) {
    bad("bittern_kv_config_create_aura", [&] {
      bittern_kv_config* made = nullptr;
      const Status status =
          from_c(bittern_kv_config_create_aura(scheme, kHeads, kDim, 1, true, &made));
      bittern_kv_config_destroy(made);
      return status;
    });
  }
  std::int64_t number = 0;
  const float mean[kHeads * kDim] = {};
  const float* values = nullptr;
  std::size_t count = 0;
  for (const char* field : {"kv_heads", "no field of this name, nor one like it"}) {
    bad("bittern_kv_config_set", [&] { return from_c(bittern_kv_config_set(config, field, 2)); });
    bad("bittern_kv_config_set_text",
        [&] { return from_c(bittern_kv_config_set_text(config, field, "2")); });
    bad("bittern_kv_config_get",
        [&] { return from_c(bittern_kv_config_get(config, field, &number)); });
  }
  exhaust("bittern_kv_config_set_table", [&] {  // what it keeps is freed again
    const Status status =
        from_c(bittern_kv_config_set_table(config, "k.mean", mean, kHeads * kDim));
    bittern_kv_config_set_table(config, "k.mean", nullptr, 0);
    return status;
  });
  for (const char* table : {"k.mean", "no table of this name, nor one like it"}) {
    bad("bittern_kv_config_table",
        [&] { return from_c(bittern_kv_config_table(config, table, &values, &count)); });
  }
  for (const auto& [field, value] : {std::pair{"kv_heads", kHeads}, {"dim", kDim}, {"recent", 3}})
    ASSERT_EQ(bittern_kv_config_set(config, field, value), BITTERN_OK);
  bittern_kv_cache* cache = nullptr;
  ASSERT_EQ(bittern_kv_cache_create(config, &cache), BITTERN_OK);
  const auto exhaust_making = [&](const char* name, auto&& make) {
    exhaust(name, [&] {
      bittern_kv_cache* made = nullptr;
      const Status status = from_c(make(&made));
      if (status.ok() != (made != nullptr)) return internal("a handle of a failure");
      bittern_kv_cache_destroy(made);  // "bittern_kv_cache_destroy"
      return status;
    });
  };
  exhaust_making("bittern_kv_cache_create",
                 [&](auto** made) { return bittern_kv_cache_create(config, made); });
  const Tokens tokens(20);
  const std::int64_t shape[] = {20, kHeads, kDim}, one[] = {1, kHeads, kDim};
  std::vector<float> rows = tokens.values;
  const auto tensor = [&](float* data, const std::int64_t* axes) {
    return bittern_tensor{nullptr, data, BITTERN_F32, {BITTERN_CPU, 0}, 3, axes, nullptr};
  };
  const bittern_tensor k = tensor(rows.data(), shape), q = tensor(rows.data(), one);
  exhaust(
      "bittern_kv_cache_append",
      [&] {
        const Status status = from_c(bittern_kv_cache_append(cache, &k, &k));
        bittern_kv_counts counts;
        bittern_kv_cache_counts(cache, &counts);  // "bittern_kv_cache_counts"
        if (counts.size != (status.ok() ? 20 : 0)) return internal("neither all nor nothing");
        if (!status.ok()) return status;
        return from_c(bittern_kv_cache_truncate(cache, 0));  // "bittern_kv_cache_truncate"
      },
      kNothing, Code::ok, false);  // the pool grows
  ASSERT_EQ(bittern_kv_cache_append(cache, &k, &k), BITTERN_OK);
  bad("bittern_kv_cache_truncate", [&] { return from_c(bittern_kv_cache_truncate(cache, -1)); });
  exhaust_making("bittern_kv_cache_fork",
                 [&](auto** made) { return bittern_kv_cache_fork(cache, made); });
  exhaust_making("bittern_kv_cache_to",
                 [&](auto** made) { return bittern_kv_cache_to(cache, {BITTERN_CPU, 0}, made); });
  bittern_device device;
  exhaust("bittern_kv_cache_device",
          [&] { return from_c(bittern_kv_cache_device(cache, &device)); });
  exhaust("bittern_kv_cache_set_stream",
          [&] { return from_c(bittern_kv_cache_set_stream(cache, nullptr)); });
  exhaust("bittern_kv_cache_config", [&] {
    bittern_kv_config* made = nullptr;
    const Status status = from_c(bittern_kv_cache_config(cache, &made));
    bittern_kv_config_destroy(made);
    return status;
  });
  std::vector<float> to(kHeads * kDim), other(kHeads * kDim);
  const bittern_tensor out = tensor(to.data(), one);
  exhaust("bittern_kv_cache_attend",
          [&] { return from_c(bittern_kv_cache_attend(cache, &q, &out, nullptr)); });
  exhaust("bittern_kv_cache_read", [&] {
    return from_c(bittern_kv_cache_read(cache, 2, to.data(), other.data(), to.size()));
  });
  bittern_kv_bytes bytes;
  exhaust("bittern_kv_cache_bytes", [&] { return from_c(bittern_kv_cache_bytes(cache, &bytes)); });
  exhaust("bittern_kv_cache_serialized_bytes",
          [&] { return from_c(bittern_kv_cache_serialized_bytes(cache, &count)); });
  std::vector<std::byte> serialized(count);
  exhaust("bittern_kv_cache_serialize",
          [&] { return from_c(bittern_kv_cache_serialize(cache, serialized.data(), count)); });
  bad("bittern_kv_cache_serialize",
      [&] { return from_c(bittern_kv_cache_serialize(cache, serialized.data(), 3)); });
  exhaust_making("bittern_kv_cache_parse", [&](auto** made) {
    return bittern_kv_cache_parse(serialized.data(), count, made);
  });
  bittern_kv_cache_destroy(cache);

  ASSERT_EQ(bittern_kv_config_set(config, "recent", 0), BITTERN_OK);
  ASSERT_EQ(bittern_kv_cache_create(config, &cache), BITTERN_OK);
  ASSERT_EQ(bittern_kv_cache_append(cache, &k, &k), BITTERN_OK);
  std::vector<std::uint32_t> codes[2] = {std::vector<std::uint32_t>(kHeads * 20 * 4),
                                         std::vector<std::uint32_t>(kHeads * 20 * 4)};
  std::vector<float> scales[2] = {std::vector<float>(kHeads * 20), std::vector<float>(kHeads * 20)};
  const std::int64_t packed[] = {kHeads, 20, 4};
  const auto of = [&](int side) {
    return std::pair{
        bittern_tensor{
            nullptr, codes[side].data(), BITTERN_U32, {BITTERN_CPU, 0}, 3, packed, nullptr},
        bittern_tensor{
            nullptr, scales[side].data(), BITTERN_F32, {BITTERN_CPU, 0}, 2, packed, nullptr}};
  };
  const bittern_kv_aura aura{of(0).first, of(0).second, of(1).first, of(1).second};
  exhaust("bittern_kv_cache_write_aura",
          [&] { return from_c(bittern_kv_cache_write_aura(cache, &aura)); });
  exhaust_making("bittern_kv_cache_read_aura",
                 [&](auto** made) { return bittern_kv_cache_read_aura(config, &aura, 20, made); });
  bittern_kv_cache_destroy(cache);
  bittern_kv_config_destroy(config);
}

// ---- files ----

class FileAllocation : public TestFolder {
 protected:
  static std::vector<float> noise(std::size_t count) {
    oracle::Rng rng(count);
    std::vector<float> values(count);
    for (float& v : values) v = static_cast<float>(rng.below(2001)) / 1000 - 1;
    return values;
  }
  void SetUp() override {
    TestFolder::SetUp();
    put_model("hf", {{"layers.0.a.weight", {4, 128}, noise(512)},
                     {"layers.1.norm.weight", {128}, noise(128)}});
    put("hf/tokenizer.json", "{}");
    put("policy.json", R"({"bits": 4, "rules": [{"match": "norm", "bits": 8}]})");
    const auto model = Checkpoint::open(path("hf"));
    const auto quiet = [](const ModelProgress&) { return true; };
    const auto plan =
        Conversion::plan(*model, {.format = ModelFormat::mlx, .bits = 4}, path("mlx"), quiet);
    ASSERT_TRUE(plan.ok() && plan->run(path("mlx"), {}, quiet).ok());
    set_num_threads(2);
    spares_json = true;
  }
  void TearDown() override {
    spares_json = false;
    set_num_threads(0);
    TestFolder::TearDown();
  }
};

// Constructors of nlohmann-json and RE2 leak when one of their allocations fails. Files are closed
// all the same.
template <class Call, class After>
void exhaust_files(const std::string& name, Call&& call, After&& after, Code want = Code::ok) {
  exhaust(name, call, after, want, false);
}
template <class Call>
void exhaust_files(const std::string& name, Call&& call) {
  exhaust_files(name, call, kNothing);
}

TEST_F(FileAllocation, ModelsAreOpened) {
  put("broken/config.json", "{]");
  for (const char* name : {"hf", "mlx", "hf/model.safetensors", "none", "broken"}) {
    const std::string model = path(name);
    const auto open = [&] { return Checkpoint::open(model).status(); };
    EXPECT_EQ(open().ok(), model != path("none") && model != path("broken"));
    exhaust_files("Checkpoint::open", open, kNothing, open().code());
  }
  const std::string policy = path("policy.json");
  exhaust_files("read_policy", [&] {
    ConversionOptions options;
    return read_policy(policy, options);
  });
  const auto none = [&] { return ImportanceMatrix::open(policy).status(); };
  exhaust_files("ImportanceMatrix::open", none, kNothing, none().code());
}

TEST_F(FileAllocation, ModelsAreConvertedAndCompared) {
  const auto model = Checkpoint::open(path("hf")), made = Checkpoint::open(path("mlx"));
  ASSERT_TRUE(model.ok() && made.ok());
  const auto quiet = [](const ModelProgress&) { return true; };
  const std::string out = path("out");
  const auto gone = [&] {  // whatever a failure left
    std::filesystem::remove_all(out);
    for (const char* end : {".partial", ".partial.journal", ".replaced"})
      std::filesystem::remove_all(out + end);
  };
  const ConversionOptions options{.format = ModelFormat::mlx, .bits = 4};
  exhaust_files("Conversion::plan",
                [&] { return Conversion::plan(*model, options, out, quiet).status(); });
  const auto plan = Conversion::plan(*model, options, out, quiet);
  ASSERT_TRUE(plan.ok());
  exhaust_files("Conversion::run", [&] { return plan->run(out, {}, quiet).status(); }, gone);
  exhaust_files(
      "Conversion::run", [&] { return plan->run(out, {.resume = true}, quiet).status(); }, gone);
  exhaust_files("compare", [&] {
    return compare(*model, *made, 3, [](const ModelProgress&) { return true; }).status();
  });
}

TEST_F(FileAllocation, ByThePublicCalls) {
  const std::string out = path("out");
  const auto gone = [&] {
    std::filesystem::remove_all(out);
    for (const char* end : {".partial", ".partial.journal", ".replaced"})
      std::filesystem::remove_all(out + end);
  };
  const std::string hf = path("hf"), mlx = path("mlx"), file = path("hf/model.safetensors");
  const QuantizeOptions options{.policy = path("policy.json"),
                                .progress = [](const ModelProgress&) { return true; }};
  exhaust_files("quantize_model", [&] { return quantize_model(hf, out, options).status(); }, gone);
  const QuantizeOptions wrong{.bits = 7};
  exhaust_files(
      "quantize_model", [&] { return quantize_model(hf, out, wrong).status(); }, gone,
      Code::invalid_argument);
  for (const std::string* model : {&hf, &mlx, &file})
    exhaust_files("inspect_model", [&] { return inspect_model(*model).status(); });
  exhaust_files("compare_models", [&] { return compare_models(hf, mlx).status(); });
}

// ---- evaluation ----

class EvalAllocation : public FileAllocation {
 protected:
  // A llama of one layer, as small as may be.
  void SetUp() override {
    FileAllocation::SetUp();
    std::vector<F32> tensors;
    const auto add = [&](const std::string& name, std::vector<std::uint64_t> shape) {
      std::size_t count = 1;
      for (const std::uint64_t n : shape) count *= n;
      std::vector<float> values(count);
      for (std::size_t i = 0; i < count; ++i)
        values[i] = shape.size() == 1 ? 1.0f : static_cast<float>(i * 7 % 13) / 24 - 0.25f;
      tensors.push_back({name, std::move(shape), std::move(values)});
    };
    const std::string layer = "model.layers.0.";
    for (const char* name : {"q", "k", "v", "o"})
      add(layer + "self_attn." + name + "_proj.weight", {32, 32});
    for (const char* name : {"gate", "up", "down"})
      add(layer + "mlp." + name + "_proj.weight", {32, 32});
    add(layer + "input_layernorm.weight", {32});
    add(layer + "post_attention_layernorm.weight", {32});
    add("model.embed_tokens.weight", {16, 32});
    add("model.norm.weight", {32});
    put_model(
        "model", tensors,
        R"({"model_type": "llama", "vocab_size": 16, "hidden_size": 32, "intermediate_size": 32,
                  "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
                  "head_dim": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
                  "rope_theta": 10000.0, "tie_word_embeddings": true})");
  }
};

TEST_F(EvalAllocation, OfCpp) {
  const auto model = Model::load(path("model"));
  ASSERT_TRUE(model.ok()) << model.status().message();
  const std::vector<std::int32_t> tokens = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2};
  const EvalModel one{&*model, {}};
  const EvalOptions options{.context = 8, .layers = true};
  exhaust("evaluate", [&] { return evaluate({&one, 1}, tokens, options, one).status(); });
  expect_refusal("evaluate", [&] { return evaluate({&one, 1}, tokens).status(); });
  const std::string file = path("targets");
  const auto gone = [&] {
    EXPECT_FALSE(std::filesystem::exists(file + ".partial"));
    std::filesystem::remove(file);
  };
  const EvalOptions plain{.context = 8};
  exhaust_files("write_targets", [&] { return write_targets(file, one, tokens, plain); }, gone);
  ASSERT_TRUE(write_targets(file, one, tokens, plain).ok());
  exhaust_files("TeacherTargets::open", [&] { return TeacherTargets::open(file).status(); });
  const auto targets = TeacherTargets::open(file);
  ASSERT_TRUE(targets.ok()) << targets.status().message();
  exhaust("TeacherTargets::check", [&] { return targets->check(tokens, plain); });
  expect_refusal("TeacherTargets::check", [&] { return targets->check(tokens, {.context = 4}); });
  EXPECT_EQ(targets->teacher(), "");  // "TeacherTargets::teacher" makes nothing
  exhaust("evaluate", [&] { return evaluate({&one, 1}, tokens, plain, *targets).status(); });
}

// ---- text ----

class TextAllocation : public FileAllocation {
 protected:
  void SetUp() override {
    FileAllocation::SetUp();
    put("text/tokenizer.json",
        R"({"added_tokens":[{"id":3,"content":"<|im_start|>","special":true},)"
        R"({"id":4,"content":"<|im_end|>","special":true}],"normalizer":{"type":"NFC"},)"
        R"("pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},)"
        R"("decoder":{"type":"ByteLevel"},)"
        R"("model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}})");
    put("unknown/tokenizer.json", R"({"model":{"type":"WordPiece","vocab":{"a":0},"merges":[]}})");
  }
  const std::vector<ChatMessage> talk_ = {{"user", "a question that is longer than a short string"},
                                          {"assistant", "ab"}};
  const ChatOptions chatml_{.format = "chatml"};
};

TEST_F(TextAllocation, OfCpp) {
  const std::string good = path("text"), unknown = path("unknown");
  exhaust_files("Tokenizer::load", [&] { return Tokenizer::load(good).status(); });
  exhaust_files(
      "Tokenizer::load", [&] { return Tokenizer::load(unknown).status(); }, kNothing,
      Code::unsupported);
  const auto t = Tokenizer::load(good);
  ASSERT_TRUE(t.ok()) << t.status().message();
  for (const char* text : {"ab abb<|im_end|>ab e\u0301 abababababababababababababababababab",
                           "\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8"})
    exhaust("Tokenizer::encode", [&] { return t->encode(text).status(); });
  const std::vector<std::int32_t> ids(40, 2), wrong = {9};
  exhaust("Tokenizer::decode", [&] { return t->decode(ids).status(); });
  expect_refusal("Tokenizer::decode", [&] { return t->decode(wrong).status(); });
  exhaust("Tokenizer::token", [&] { return t->token(2).status(); });
  expect_refusal("Tokenizer::token", [&] { return t->token(-1).status(); });
  exhaust("Tokenizer::apply_chat", [&] { return t->apply_chat(talk_, chatml_).status(); });
  exhaust("Tokenizer::chat_text", [&] { return t->chat_text(talk_, chatml_).status(); });
  expect_refusal(
      "Tokenizer::chat_text", [&] { return t->chat_text(talk_).status(); }, Code::unsupported);
  exhaust("TokenStream::push", [&]() -> Status {
    TokenStream stream(*t);
    std::string all;
    for (int i = 0; i < 3; ++i) {
      const auto text = stream.push(2);
      if (!text.ok()) return text.status();
      all += *text;
    }
    all += stream.finish();  // "TokenStream::finish"
    return all == "ababab" ? Status() : internal("another text");
  });
}

TEST_F(TextAllocation, OfC) {
  const auto from_c = [](bittern_code code) {
    return code == BITTERN_OK ? Status() : Status(static_cast<Code>(code), bittern_last_error());
  };
  const std::string good = path("text");
  exhaust_files("bittern_tokenizer_load", [&] {
    bittern_tokenizer* made = nullptr;
    const Status status = from_c(bittern_tokenizer_load(good.c_str(), &made));
    if (status.ok() != (made != nullptr)) return internal("a handle of a failure");
    bittern_tokenizer_destroy(made);  // "bittern_tokenizer_destroy"
    return status;
  });
  bittern_tokenizer* t = nullptr;
  ASSERT_EQ(bittern_tokenizer_load(good.c_str(), &t), BITTERN_OK);
  std::int32_t ids[64] = {2, 2};
  char text[256];
  std::size_t count = 0;
  exhaust("bittern_tokenizer_encode",
          [&] { return from_c(bittern_tokenizer_encode(t, "abb", 3, nullptr, ids, 64, &count)); });
  exhaust("bittern_tokenizer_decode", [&] {
    return from_c(bittern_tokenizer_decode(t, ids, 2, false, text, sizeof text, &count));
  });
  bittern_tokenizer_info info;
  exhaust("bittern_tokenizer_describe",
          [&] { return from_c(bittern_tokenizer_describe(t, &info)); });
  const char* spelled = nullptr;
  exhaust("bittern_tokenizer_token",
          [&] { return from_c(bittern_tokenizer_token(t, 2, &spelled, &count)); });
  bool special = false;
  exhaust("bittern_tokenizer_is_special",
          [&] { return from_c(bittern_tokenizer_is_special(t, 3, &special)); });
  exhaust("bittern_tokenizer_find",
          [&] { return from_c(bittern_tokenizer_find(t, "ab", 2, ids)); });
  const bittern_chat_message talk{"user", "ab", 2};
  bittern_chat_options options{};
  options.format = "chatml";
  exhaust("bittern_tokenizer_apply_chat", [&] {
    return from_c(bittern_tokenizer_apply_chat(t, &talk, 1, &options, ids, 64, &count));
  });
  exhaust("bittern_tokenizer_chat_text", [&] {
    return from_c(bittern_tokenizer_chat_text(t, &talk, 1, &options, text, sizeof text, &count));
  });
  exhaust("bittern_token_stream_create", [&] {
    bittern_token_stream* stream = nullptr;
    Status status = from_c(bittern_token_stream_create(t, false, &stream));
    if (status.ok()) status = from_c(bittern_token_stream_push(stream, 2, &spelled, &count));
    if (status.ok()) status = from_c(bittern_token_stream_finish(stream, &spelled, &count));
    bittern_token_stream_destroy(stream);
    return status;  // "bittern_token_stream_push", "bittern_token_stream_finish"
  });               // "bittern_token_stream_destroy"
  bittern_tokenizer_destroy(t);
}

// ---- models that run ----

class ModelAllocation : public FileAllocation {
 protected:
  void SetUp() override {
    FileAllocation::SetUp();
    llama_ = put_tiny_model(*this, "llama");
    delta_ = put_tiny_model(*this, "qwen3_next");
  }
  std::string llama_, delta_;
  const std::vector<std::int32_t> tokens_ = {7, 20, 33, 46, 59};
};

TEST_F(ModelAllocation, Loading) {
  expect_refusal("parse_activations", [] {
    return parse_activations("a word that is longer than a short string").status();
  });
  for (const std::string& path : {llama_, delta_}) {
    exhaust_files("Model::load", [&] { return Model::load(path).status(); });
    exhaust_files("Model::look", [&] { return Model::look(path).status(); });
  }
  const std::string none = path("none");
  exhaust_files(
      "Model::load", [&] { return Model::load(none).status(); }, kNothing, Code::unavailable);
  const auto model = Model::load(llama_);
  const auto tokenizer = Tokenizer::load(llama_);
  ASSERT_TRUE(model.ok() && tokenizer.ok());
  exhaust("check_vocabulary", [&] { return check_vocabulary(model->info(), *tokenizer); });
  expect_refusal("check_vocabulary", [&] { return check_vocabulary({}, *tokenizer); });
}

TEST_F(ModelAllocation, Sessions) {
  for (const std::string& path : {llama_, delta_}) {
    const auto model = Model::load(path);
    ASSERT_TRUE(model.ok()) << model.status().message();
    const std::int64_t vocab = model->info().vocab, hidden = model->info().hidden;
    std::vector<float> logits(static_cast<std::size_t>(vocab));
    const MutView last = view(logits.data(), {1, vocab});
    for (const char* kv : {"f16", "aura8v4"}) {
      const SessionOptions options{.context = 32, .kv = kv};
      exhaust("Session::check", [&] { return Session::check(model->info(), options); });
      const SessionOptions wrong{.kv = "a cache that nobody has heard of"};
      expect_refusal("Session::check", [&] { return Session::check(model->info(), wrong); });
      exhaust("Session::make", [&] { return Session::make(*model, options).status(); });
      auto session = Session::make(*model, options);
      ASSERT_TRUE(session.ok());
      ASSERT_TRUE(session->append(tokens_).ok() && session->append(tokens_, last).ok());
      const auto want = logits;
      exhaust("Session::fork", [&] { return session->fork().status(); });
      exhaust("Session::append", [&] {
        auto fork = session->fork();
        return fork ? fork->append(tokens_, last) : fork.status();
      });
      exhaust("Session::truncate", [&] {
        auto fork = session->fork();
        return fork ? fork->truncate(3) : fork.status();
      });
      // What is left after a failure is whole: the same tokens give the same bits.
      const auto after = [&] {
        ASSERT_TRUE(session->size() == 0 || session->size() == 5 || session->size() == 10)
            << session->size();
        if (session->size() > 5) {
          ASSERT_TRUE(session->truncate(5).ok());
        }
        if (session->size() == 0) {
          ASSERT_TRUE(session->append(tokens_).ok());
        }
        ASSERT_TRUE(session->append(tokens_, last).ok());
        ASSERT_EQ(logits, want);
      };
      exhaust(
          "Session::append",
          [&] {
            Status status = session->truncate(5);
            if (status.ok()) status = session->append(tokens_, last);
            return status;
          },
          after, Code::ok, false);
    }
    std::vector<float> rows(static_cast<std::size_t>(10 * hidden));
    exhaust("Model::hidden", [&]() -> Status {
      auto a = Session::make(*model, {.context = 8}), b = Session::make(*model, {.context = 8});
      if (!a) return a.status();
      if (!b) return b.status();
      const SessionTokens steps[] = {{&*a, tokens_}, {&*b, tokens_}};
      return model->hidden(steps, view(rows.data(), {10, hidden}));
    });
    std::vector<float> all(static_cast<std::size_t>(10 * vocab));
    exhaust("Model::logits", [&] {
      return model->logits(as_const(view(rows.data(), {10, hidden})),
                           view(all.data(), {10, vocab}));
    });
  }
}

TEST_F(ModelAllocation, Calibration) {
  const std::string out = path("imatrix.gguf");
  const auto gone = [&] {
    for (const char* end : {"", ".partial", ".partial.journal"})
      std::filesystem::remove_all(out + end);
  };
  for (const std::string& path : {llama_, delta_}) {
    const auto model = Model::load(path);
    ASSERT_TRUE(model.ok()) << model.status().message();
    exhaust("calibrate", [&] { return calibrate(*model, tokens_, {.context = 2}).status(); });
    expect_refusal("calibrate", [&] { return calibrate(*model, tokens_).status(); });
    const auto calibration = calibrate(*model, tokens_, {.context = 2});
    ASSERT_TRUE(calibration.ok());
    const ImatrixOptions options{.dataset = "a text with a name of some length"};
    exhaust_files("write_imatrix", [&] { return write_imatrix(*calibration, out, options); }, gone);
  }
}

TEST_F(ModelAllocation, CalibratedQuantisation) {
  const std::string out = path("out");
  const auto gone = [&] {
    for (const char* end : {"", ".partial", ".partial.journal"})
      std::filesystem::remove_all(out + end);
  };
  put("text.txt", "a text of some letters");
  const QuantizeOptions options{
      .bits = 4,
      .group_size = 32,
      .method = "gptq",
      .data = path("text.txt"),
      .pieces = 1,
      .context = 4,
      .rules = {{.match = "layers\\.0.*[qo]_proj", .bits = 4}, {.match = ".", .keep = true}}};
  const auto quantize = [&] { return quantize_calibrated(llama_, out, options).status(); };
  exhaust_files("quantize_calibrated", quantize, gone);
  QuantizeOptions wrong = options;
  wrong.data.reset();
  expect_refusal("quantize_calibrated",
                 [&] { return quantize_calibrated(llama_, out, wrong).status(); });
}

// While scales and biases learn, memory does not grow by what the gradients of weights would take,
// 4 bytes each; while codes do, it grows by more: a latent code, its moments and that gradient.
TEST_F(ModelAllocation, GradientsOfWeightsAreNotStored) {
  put("text.txt", tiny_text(200));
  // The most while the second step is made, a weight more.
  const auto growth = [&](bool codes) {
    std::int64_t most[2] = {};
    constexpr std::uint64_t kInner[] = {768, 1280};
    for (int i = 0; i < 2; ++i) {
      const DistillOptions options{.bits = 3,
                                   .embedding_bits = 0,
                                   .data = {path("text.txt")},
                                   .context = 8,
                                   .calibration = 2,
                                   .validation = 1,
                                   .steps = 2,
                                   .batch = 1,
                                   .rate = 0.001,
                                   .learn_codes = codes,
                                   .force = true,
                                   .threads = 1,
                                   .progress = [&](const DistillProgress& state) {
                                     if (state.step == 1) peak_bytes = live_bytes.load();
                                     if (state.step == 2) most[i] = peak_bytes;
                                     return DistillNext::go_on;
                                   }};
      const auto report = distill_model(put_wide_model(*this, kInner[i]), path("out"), options);
      EXPECT_TRUE(report.ok()) << report.status().message();
    }
    return static_cast<double>(most[1] - most[0]) / (3 * 256 * double{kInner[1] - kInner[0]});
  };
  const double grids = growth(false), codes = growth(true);
  EXPECT_LT(grids, 2.5);
  EXPECT_GT(codes, grids + 4 * 4);
}

// Of distill_model the refusals, and all of learning: nlohmann-json does not survive every failure
// while a configuration is made, as it is before and after that.
TEST_F(ModelAllocation, Distillation) {
  const DistillOptions wrong{.data = {}};
  const std::string out = path("out");
  expect_refusal("distill_model", [&] { return distill_model(llama_, out, wrong).status(); });

  put("text.txt", tiny_text(60));
  DistillOptions options{
      .group_size = 32,
      .rules = {{.match = "layers\\.0.*[qv]_proj", .bits = 4}, {.match = ".", .keep = true}},
      .data = {path("text.txt")},
      .context = 4,
      .calibration = 1,
      .validation = 1,
      .steps = 3,
      .batch = 1,
      .rate = 0.001,
      .checkpoint_minutes = 0,
      .threads = 1};
  options.progress = [](const DistillProgress& state) {
    const bool learns = state.doing == "searching" || state.doing == "learning";
    paused = !learns || (state.steps > 0 && state.step == state.steps);
    return DistillNext::go_on;
  };
  const auto distill = [&] {
    paused = true;
    return distill_model(llama_, out, options).status();
  };
  // What a failure leaves goes on to the same bytes.
  std::string whole;
  int failures = 0;
  const auto goes_on = [&] {
    paused = true;
    if (!std::filesystem::exists(out) && ++failures % 8 == 0) {
      options.resume = true;
      const Status status = distill();
      options.resume = false;
      ASSERT_TRUE(status.ok()) << status.message();
    }
    if (std::filesystem::exists(out)) {
      if (whole.empty()) whole = contents("out");
      EXPECT_TRUE(contents("out") == whole);
    }
    std::filesystem::remove_all(out);
    std::filesystem::remove_all(out + ".distill");
  };
  exhaust("distill_model", distill, goes_on, Code::ok, true, 50);
  EXPECT_GT(failures, 50);
  paused = false;
}

TEST_F(ModelAllocation, Text) {
  const auto model = Model::load(llama_);
  const auto tokenizer = Tokenizer::load(llama_);
  ASSERT_TRUE(model.ok() && tokenizer.ok());
  const GenerateOptions options{.max_tokens = 6, .stops = {"a text that never comes"}};
  std::string want;
  const auto generate = [&]() -> Status {
    auto session = Session::make(*model, {.context = 32});
    if (!session) return session.status();
    auto generator = Generator::start(*session, &*tokenizer, tokens_, options);
    if (!generator) return generator.status();
    std::string text;
    while (true) {
      const auto piece = generator->next();  // "Generator::next"
      if (!piece) return piece.status();
      if (!*piece) break;
      text += (*piece)->text;
    }
    if (want.empty()) want = text;
    return text == want ? Status() : internal("another text");
  };
  exhaust("Generator::start", generate);
}

TEST_F(ModelAllocation, OfC) {
  exhaust_files("bittern_model_load", [&] {
    bittern_model* made = nullptr;
    const Status status = from_c(bittern_model_load(llama_.c_str(), nullptr, &made));
    if (status.ok() != (made != nullptr)) return internal("a handle of a failure");
    bittern_model_destroy(made);  // "bittern_model_destroy"
    return status;
  });
  bittern_model* model = nullptr;
  ASSERT_EQ(bittern_model_load(llama_.c_str(), nullptr, &model), BITTERN_OK);
  bittern_model_info info;
  exhaust("bittern_model_describe", [&] { return from_c(bittern_model_describe(model, &info)); });
  exhaust("bittern_session_create", [&] {
    bittern_session *session = nullptr, *fork = nullptr;
    bittern_session_info about;
    float logits[96];
    Status status = from_c(bittern_session_create(model, nullptr, &session));
    if (status.ok()) status = from_c(bittern_session_append(session, tokens_.data(), 5, logits, 1));
    if (status.ok()) status = from_c(bittern_session_truncate(session, 3));
    if (status.ok()) status = from_c(bittern_session_fork(session, &fork));
    if (status.ok()) status = from_c(bittern_session_describe(fork, &about));
    bittern_generate_options few{};
    few.max_tokens = 3;
    if (status.ok())
      status = from_c(
          bittern_generate(fork, nullptr, tokens_.data(), 5, &few, nullptr, nullptr, nullptr));
    bittern_session_destroy(fork);
    bittern_session_destroy(session);
    return status;  // "bittern_session_append", "bittern_session_truncate", "bittern_session_fork",
  });               // "bittern_session_describe", "bittern_generate", "bittern_session_destroy"
  bittern_model_destroy(model);
}

// ---- the first calls of a process, in which what is kept for ever is made ----

int first_calls(std::int64_t k, bool sticky) {
  const QuantizeDesc desc{.outer_size = 2, .axis_size = 64, .group_size = 64};
  const auto calls = [&]() -> Code {
    if (num_threads() < 1 || bittern_op_count() == 0) return Code::internal;
    bittern_desc* made = nullptr;
    const bittern_code code = bittern_desc_create("aura_encode", &made);
    bittern_desc_destroy(made);
    if (code != BITTERN_OK) return static_cast<Code>(code);
    for (const Device device : {Device{}, Device{Device::Type::cuda, 99}}) {
      const Status status = Plan<QuantizePerGroup>::select(desc, device).status();
      if (device == Device{} ? !status.ok() : status.code() != Code::unavailable)
        return status.code();
    }
    float x[96] = {}, y[96], signs[96];
    std::fill(std::begin(signs), std::end(signs), 1.0f);
    const auto rotate = Plan<AuraRotate>::select({.rows = 1, .dim = 96});
    if (!rotate.ok()) return rotate.status().code();
    const Status status = rotate->run({.x = view(std::as_const(x), {1, 96}),
                                       .table = view(std::as_const(signs), {96}),
                                       .y = view(y, {1, 96})});
    return status.code();
  };
  asked = 0;
  for_good = sticky;
  failing = k;
  const Code code = calls();
  failing = -1;
  if (code != Code::ok && code != Code::out_of_memory) return 2;
  if (calls() != Code::ok) return 3;  // nothing is kept of the failure
  if (num_threads() != 2) return 4;
  return asked <= k ? 1 : 0;
}

TEST(FirstCalls, FailAndAreMadeAgain) {
#ifdef BITTERN_SANITIZED
  constexpr std::int64_t kShare = 3;  // a sanitized program takes a second to start
#else
  constexpr std::int64_t kShare = 20;
#endif
  for (const bool sticky : {false, true}) {
    int result = 0;
    std::int64_t k = 0;
    for (; result == 0 && k < 10000000; k += 1 + k / kShare) {
      const std::string number = std::to_string(k);
      const pid_t child = ::fork();
      ASSERT_GE(child, 0);
      if (child == 0) {
        ::setenv("BITTERN_THREADS", "2", 1);
        ::setenv("OMP_TOOL", "disabled", 1);  // whose first allocation clang's libomp lets throw
        ::setenv(sticky ? "FIRST_CALLS_STICKY" : "FIRST_CALLS", number.c_str(), 1);
        ::execl("/proc/self/exe", "allocation_test", nullptr);
        ::_exit(9);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      ASSERT_TRUE(WIFEXITED(status)) << "allocation " << k << ": signal " << WTERMSIG(status);
      result = WEXITSTATUS(status);
      ASSERT_LE(result, 1) << "allocation " << k;
    }
    EXPECT_EQ(result, 1) << "more allocations than were tried";
    EXPECT_GT(k, 20);
  }
}

}  // namespace

int run_first_calls(std::int64_t k, bool sticky) { return first_calls(k, sticky); }

}  // namespace bittern

int main(int argc, char** argv) {
  for (const bool sticky : {false, true})
    if (const char* k = std::getenv(sticky ? "FIRST_CALLS_STICKY" : "FIRST_CALLS"))
      return bittern::run_first_calls(std::atoll(k), sticky);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
