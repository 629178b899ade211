// The oracle inside GoogleTest.
#pragma once
#include <gtest/gtest.h>

#include <cstdlib>

#include "oracle/oracle.h"
#include "plan/any_op.h"

namespace bittern::oracle {

// BITTERN_REQUIRE_CUDA=1: this machine is meant to have a device, so its absence is a failure.
inline bool cuda_required() {
  const char* text = std::getenv("BITTERN_REQUIRE_CUDA");
  return text != nullptr && std::string_view(text) != "" && std::string_view(text) != "0";
}

inline void expect_parity(std::string_view op, const Settings& settings = {}) {
  const Report report = check_op(op, settings);
  for (const std::string& failure : report.failures) ADD_FAILURE() << failure;
  EXPECT_GT(report.compared, 0) << "no kernel was compared";
  // Every kernel, but those that this machine cannot run at all.
  for (const auto& [kernel, seen] : report.kernels) {
    const auto says = [&reason = seen.why_not](const char* why) {
      return reason.find(why) != std::string::npos;
    };
    EXPECT_TRUE(seen.compared > 0 || settings.every > 1 || says("needs a CPU") ||
                says("expected sm_") || says("no code for"))
        << kernel << " was not compared: " << seen.why_not;
    if (seen.bounded)
      ::testing::Test::RecordProperty(kernel + "_share_of_bound", std::to_string(seen.worst));
  }
  const auto info = find_op(op);
  if (cuda_required() && settings.cuda && info && (*info)->has_cuda()) {
    const auto plugin = cuda_plugin(0);
    EXPECT_GT(report.compared_cuda, 0) << "cuda was not compared: " << plugin.status().message();
  }
  ::testing::Test::RecordProperty("kernel_runs_compared", std::to_string(report.compared));
  ::testing::Test::RecordProperty("cuda_runs_compared", std::to_string(report.compared_cuda));
}

}  // namespace bittern::oracle

// At the top of a test that runs on a GPU.
#define BITTERN_NEEDS_CUDA()                                                        \
  if (const auto plugin_ = ::bittern::cuda_plugin(0); !plugin_) {                   \
    ASSERT_FALSE(::bittern::oracle::cuda_required()) << plugin_.status().message(); \
    GTEST_SKIP() << plugin_.status().message();                                     \
  }                                                                                 \
  static_assert(true)
