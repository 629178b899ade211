// Running one op in a test.
#pragma once
#include <gtest/gtest.h>

#include <cstddef>
#include <string_view>
#include <vector>

#include "bittern/bittern.h"
#include "core/scratch.h"
#include "oracle/status_test.h"

namespace bittern::oracle {

// With a workspace of its own.
template <class Op>
Status run_plan(const Plan<Op>& plan, const typename Op::Args& args) {
  AlignedScratch scratch(plan.workspace_bytes());
  return plan.run(args, {}, scratch.workspace());
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
