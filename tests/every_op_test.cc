// What holds for every op alike, whatever it computes: tensors without elements, from C++ and C.
#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "bittern/c/bittern.h"
#include "oracle/op_test.h"
#include "oracle/oracle_impl.h"
#include "plan/any_op.h"

namespace bittern {
namespace {

// The operands of a problem, with null data where there are no elements.
template <class Op>
oracle::Problem<Op> null_problem(const typename Op::Desc& desc) {
  auto problem = oracle::make_problem<Op>(desc, 1, {});
  Op::operands(desc, problem.args, [&](const char*, auto& v, const Operand& expected) {
    if (expected.shape.numel() == 0) v.data = nullptr;
  });
  return problem;
}

template <class F>
void for_each_op(F&& f) {
#define BITTERN_OP(T, folder, CPU, CUDA) f(Type<T>{});
#include "ops/ops.inc"
}

// Well-formed problems with one number of the descriptor 0, most of them a size.
template <class Op>
std::vector<typename Op::Desc> empty_problems() {
  const auto all = oracle::Cases<Op>::check();
  std::vector<typename Op::Desc> empty;
  const std::size_t stride = std::max<std::size_t>(1, all.size() / 3);
  for (std::size_t i = stride / 2; i < all.size(); i += stride) {
    typename Op::Desc desc = all[i];
    Op::fields(desc, [&](const char*, auto& member, const char*) {
      using T = std::remove_cvref_t<decltype(member)>;
      if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
        const T before = member;
        member = 0;
        bool has_empty = false;
        if (Op::check(desc).ok()) {
          const typename Op::Args none;
          Op::operands(desc, none, [&](const char*, const auto&, const Operand& expected) {
            has_empty = has_empty || expected.shape.numel() == 0;
          });
        }
        if (has_empty) empty.push_back(desc);
        member = before;
      }
    });
  }
  return empty;
}

template <class Op>
Status run_if_supported(const typename Op::Desc& desc, const typename Op::Args& args,
                        std::string_view kernel) {
  const auto plan = Plan<Op>::select(desc, {}, Preference::exact, kernel);
  if (!plan) return plan.status().code() == Code::unsupported ? Status() : plan.status();
  return oracle::run_plan(*plan, args);
}

// What an axis' name says its length is; nothing for a name of its own.
template <class Op>
std::optional<std::int64_t> length_of(const typename Op::Desc& desc, std::string_view name) {
  const auto term = [&](std::string_view text) {
    std::optional<std::int64_t> value;
    if (text.find_first_not_of("0123456789") == std::string_view::npos)
      value = std::stoll(std::string(text));
    Op::fields(desc, [&](const char* field, const auto& member, const char*) {
      using T = std::remove_cvref_t<decltype(member)>;
      if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>)
        if (text == field) value = member;
    });
    return value;
  };
  for (const char* operators : {"+-", "*/"}) {
    const std::size_t at = name.find_last_of(operators);
    if (at == std::string_view::npos) continue;
    const auto left = length_of<Op>(desc, name.substr(0, at));
    const auto right = length_of<Op>(desc, name.substr(at + 1));
    if (!left || !right) return {};
    switch (name[at]) {
      case '+': return *left + *right;
      case '-': return *left - *right;
      case '*': return *left * *right;
      default: return *right == 0 ? 0 : *left / *right;
    }
  }
  return term(name);
}

TEST(EveryOp, NamesAnAxisByTheFieldsItFollowsFrom) {
  const std::set<std::string_view> own = {"words",  "bytes",  "groups",  "panels",
                                          "chunks", "2^bits", "2^bits-1"};
  for_each_op([&]<class Op>(Type<Op>) {
    for (const auto& desc : oracle::Cases<Op>::check()) {
      const typename Op::Args none;
      Op::operands(desc, none, [&](const char* operand, const auto&, const Operand& expected) {
        const Axes& axes = expected.shape;
        for (int i = 0; i < axes.rank; ++i) {
          const std::string_view name = axes.name(i);
          const auto length = length_of<Op>(desc, name);
          EXPECT_NE(length.has_value(), own.contains(name))
              << Op::kName << " " << operand << " " << name;
          if (!length || (expected.flags & Operand::kUnread) != 0) continue;
          EXPECT_EQ(*length, axes[i]) << Op::kName << " " << operand << " " << name;
        }
      });
    }
  });
}

TEST(EveryOp, KnowsWhichFieldsDecideDtypesAndSizes) {
  std::set<std::string_view> dtypes, sizes;
  for (const AnyOp* op : all_ops()) {
    for (const FieldInfo& f : op->fields()) {
      if (f.decides_dtype) dtypes.insert(f.name);
      if (f.is_size) sizes.insert(f.name);
      EXPECT_EQ(f.choices.empty(), f.accepted.empty()) << op->name() << " " << f.name;
      EXPECT_LE(f.is_dtype, f.decides_dtype) << op->name() << " " << f.name;
    }
  }
  EXPECT_EQ(dtypes, (std::set<std::string_view>{"element", "code", "a_element", "exact", "storage",
                                                "f32_scale", "f16_scale", "scale_element", "type",
                                                "f32_y"}));
  EXPECT_EQ(sizes, (std::set<std::string_view>{
                       "outer_size",  "axis_size", "inner_size", "rows",  "dim",      "batch",
                       "tokens",      "sequences", "queries",    "heads", "kv_heads", "key_heads",
                       "value_heads", "key_dim",   "value_dim",  "chunk", "pool",     "channels",
                       "width",       "capacity",  "page_size",  "pages", "first",    "recent",
                       "rotary_dim",  "outputs",   "inputs",     "count", "top",      "kept"}));
}

TEST(EveryOp, TakesNullDataWhereThereAreNoElements) {
  for_each_op([]<class Op>(Type<Op>) {
    const auto problems = empty_problems<Op>();
    EXPECT_FALSE(problems.empty()) << Op::kName;
    for (const auto& desc : problems) {
      // What has elements is written as it is where every operand has an address.
      auto want = oracle::make_problem<Op>(desc, 1, {});
      Status status = run_if_supported<Op>(desc, want.args, "ref");
      EXPECT_TRUE(status.ok()) << status.message() << " " << flags_text<Op>(desc);
      for (const std::string_view kernel : {"ref", "cpu"}) {
        auto got = null_problem<Op>(desc);
        status = run_if_supported<Op>(desc, got.args, kernel);
        EXPECT_TRUE(status.ok()) << status.message() << " " << flags_text<Op>(desc);
        EXPECT_EQ(oracle::compare(got, want), "") << kernel << " " << flags_text<Op>(desc);
      }
    }
  });
}

TEST(EveryOp, TakesNullDataWhereThereAreNoElementsFromC) {
  for_each_op([]<class Op>(Type<Op>) {
    for (const auto& d : empty_problems<Op>()) {
      auto problem = null_problem<Op>(d);
      bittern_desc* desc = nullptr;
      ASSERT_EQ(bittern_desc_create(Op::kName.data(), &desc), BITTERN_OK);
      Op::fields(d, [&](const char* field, const auto& member, const char*) {
        if constexpr (kIsReal<std::remove_cvref_t<decltype(member)>>) {
          ASSERT_EQ(bittern_desc_set_real(desc, field, member), BITTERN_OK);
        } else {
          ASSERT_EQ(bittern_desc_set(desc, field, static_cast<std::int64_t>(member)), BITTERN_OK);
        }
      });
      std::vector<bittern_tensor> tensors;
      Op::operands(d, problem.args, [&](const char* name, const auto& v, const Operand&) {
        tensors.push_back({name,
                           const_cast<void*>(static_cast<const void*>(v.data)),
                           static_cast<bittern_dtype>(v.dtype),
                           {BITTERN_CPU, 0},
                           v.shape.rank,
                           v.shape.dim.data(),
                           nullptr});
      });
      bittern_plan* plan = nullptr;
      ASSERT_EQ(bittern_select(desc, {BITTERN_CPU, 0}, BITTERN_EXACT, nullptr, 0, &plan),
                BITTERN_OK)
          << bittern_last_error();
      EXPECT_EQ(bittern_plan_can_implement(plan, tensors.data(), tensors.size()), BITTERN_OK)
          << bittern_last_error() << " " << flags_text<Op>(d);
      bittern_plan_destroy(plan);
      bittern_desc_destroy(desc);
    }
  });
}

}  // namespace
}  // namespace bittern
