// The oracle inside GoogleTest.
#pragma once
#include <gtest/gtest.h>

#include "oracle/oracle.h"

namespace bittern::oracle {

inline void expect_parity(std::string_view op, const Settings& settings = {}) {
  const Report report = check_op(op, settings);
  for (const std::string& failure : report.failures) ADD_FAILURE() << failure;
  EXPECT_GT(report.compared, 0) << "no kernel was compared";
  ::testing::Test::RecordProperty("kernel_runs_compared", std::to_string(report.compared));
}

}  // namespace bittern::oracle
