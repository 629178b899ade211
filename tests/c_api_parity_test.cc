// The C interface gives the bits the C++ one gives, for every operand order it accepts.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "bittern/bittern.h"
#include "bittern/c/bittern.h"
#include "oracle/oracle.h"

namespace bittern {
namespace {

bittern_tensor tensor_of(const char* name, const void* data, DType dtype, const Shape& shape) {
  return {name,
          const_cast<void*>(data),
          static_cast<bittern_dtype>(dtype),
          {BITTERN_CPU, 0},
          shape.rank,
          shape.dim.data(),
          nullptr};
}

TEST(CApi, SameResultsAsCpp) {
  for (const QuantizeDesc& d : oracle::quantize_per_group_check_cases()) {
    const auto problem = oracle::make_problem<QuantizePerGroup>(d, 5, {});
    auto args = problem.args;
    if (args.q.shape.numel() == 0) continue;
    std::vector<std::byte> want(static_cast<std::size_t>(args.q.shape.numel()));
    std::vector<std::byte> got(want.size());
    args.q.data = want.data();
    const auto plan = Plan<QuantizePerGroup>::select(d);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    ASSERT_TRUE(plan->run(args).ok());

    bittern_desc* desc = nullptr;
    ASSERT_EQ(bittern_desc_create("quantize_per_group", &desc), BITTERN_OK);
    QuantizePerGroup::fields(d, [&](const char* field, const auto& member, const char*) {
      EXPECT_EQ(bittern_desc_set(desc, field, static_cast<std::int64_t>(member)), BITTERN_OK);
    });
    bittern_plan* c_plan = nullptr;
    ASSERT_EQ(bittern_select(desc, {BITTERN_CPU, 0}, BITTERN_EXACT, nullptr, 0, &c_plan),
              BITTERN_OK)
        << bittern_last_error();
    const bittern_tensor tensors[] = {
        tensor_of("q", got.data(), args.q.dtype, args.q.shape),
        tensor_of("zero_point", args.zero_point.data, DType::s32, args.zero_point.shape),
        tensor_of("x", args.x.data, args.x.dtype, args.x.shape),
        tensor_of("scale", args.scale.data, args.scale.dtype, args.scale.shape)};
    EXPECT_EQ(bittern_plan_run(c_plan, tensors, 4, nullptr, nullptr, 0), BITTERN_OK)
        << bittern_last_error();
    EXPECT_EQ(got, want);
    bittern_sku sku;
    ASSERT_EQ(bittern_plan_sku(c_plan, &sku), BITTERN_OK);
    EXPECT_EQ(plan->sku().kernel, sku.kernel);
    EXPECT_EQ(plan->sku().architecture, sku.architecture);
    std::int64_t groups = -1;
    EXPECT_EQ(bittern_desc_num_groups(desc, &groups), BITTERN_OK);
    EXPECT_EQ(groups, d.num_groups());
    bittern_plan_destroy(c_plan);
    bittern_desc_destroy(desc);
  }
}

// Numbers that a narrowing to f32 rounds, overflows or loses: none of it may reach the caller's
// trap.
TEST(CApi, DescribesProblemsUnderTheCallersTraps) {
  const unsigned before = __builtin_ia32_stmxcsr();
  for (std::size_t i = 0; i < bittern_op_count(); ++i) {
    for (const char* field : {"eps", "scale"}) {
      for (const double value : {0.1, 1e300, 1e-320, -1e-40}) {
        bittern_desc* desc = nullptr;
        bittern_plan* plan = nullptr;
        double got = value;
        __builtin_ia32_ldmxcsr(0);
        const bittern_code made = bittern_desc_create(bittern_op_name(i), &desc);
        const bool has_field = bittern_desc_set_real(desc, field, value) == BITTERN_OK;
        if (has_field) bittern_desc_get_real(desc, field, &got);
        const bittern_code checked = bittern_desc_check(desc);
        const bittern_code selected =
            bittern_select(desc, {BITTERN_CPU, 0}, BITTERN_EXACT, nullptr, 0, &plan);
        const unsigned after = __builtin_ia32_stmxcsr();
        bittern_plan_destroy(plan);
        bittern_desc_destroy(desc);
        __builtin_ia32_ldmxcsr(before);
        EXPECT_EQ(made, BITTERN_OK);
        EXPECT_EQ(got, value);
        EXPECT_EQ(checked, selected) << bittern_op_name(i) << " " << field << " " << value;
        EXPECT_EQ(after & 0xffc0u, 0u);
      }
    }
  }
}

TEST(CApi, CodesAreThoseOfCpp) {
  for (int code = BITTERN_OK; code <= BITTERN_INTERNAL; ++code) {
    EXPECT_STREQ(bittern_code_name(static_cast<bittern_code>(code)), name(static_cast<Code>(code)));
  }
}

}  // namespace
}  // namespace bittern
