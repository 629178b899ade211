// Running one op in a test, and what its errors look like.
#pragma once
#include <gtest/gtest.h>

#include "bittern/bittern.h"

namespace bittern::oracle {

template <class Op>
Status run_op(const typename Op::Desc& desc, const typename Op::Args& args,
              std::string_view kernel = {}) {
  auto plan = Plan<Op>::select(desc, {}, Preference::exact, kernel);
  return plan ? plan->run(args) : plan.status();
}

// The kernels a hand-computed example is checked on.
inline constexpr std::string_view kBothKernels[] = {"ref", "cpu"};

inline void expect_ok(const Status& status) { EXPECT_TRUE(status.ok()) << status.message(); }

inline void expect_error(const Status& status, Code code, std::string_view message) {
  EXPECT_EQ(status.code(), code) << message;
  EXPECT_EQ(status.message(), message);
}

}  // namespace bittern::oracle
