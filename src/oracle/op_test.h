// Running one op in a test.
#pragma once
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "bittern/bittern.h"
#include "oracle/status_test.h"

namespace bittern::oracle {

// With a workspace of its own.
template <class Op>
Status run_plan(const Plan<Op>& plan, const typename Op::Args& args) {
  std::vector<std::byte> scratch(plan.workspace_bytes() + 64);
  void* aligned = scratch.data();
  std::size_t space = scratch.size();
  std::align(64, plan.workspace_bytes(), aligned, space);
  return plan.run(args, {}, {aligned, plan.workspace_bytes()});
}

template <class Op>
Status run_op(const typename Op::Desc& desc, const typename Op::Args& args,
              std::string_view kernel = {}, Preference preference = Preference::exact) {
  const auto plan = Plan<Op>::select(desc, {}, preference, kernel);
  return plan ? run_plan(*plan, args) : plan.status();
}

// The kernels a hand-computed example is checked on.
inline constexpr std::string_view kBothKernels[] = {"ref", "cpu"};

}  // namespace bittern::oracle
