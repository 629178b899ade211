// Running the gated delta rule's ops in a test, on operands made by the oracle and then changed.
#pragma once
#include <gtest/gtest.h>

#include "oracle/op_test.h"
#include "oracle/oracle_impl.h"

namespace bittern::oracle {

template <class Op>
Status run_problem(Problem<Op>& p, std::string_view kernel = {}) {
  const auto plan = Plan<Op>::select(p.desc, {}, Preference::exact, kernel);
  if (!plan) return plan.status();
  return run_on(Device{}, p, plan->workspace_bytes(),
                [&](const auto& args, Workspace w) { return plan->run(args, {}, w); });
}

template <class V>
std::vector<double> values(const V& view) {
  std::vector<double> all;
  for (std::int64_t i = 0; i < view.shape.numel(); ++i) all.push_back(get(view, i));
  return all;
}

template <class V>
void set_all(const V& view, double value) {
  for (std::int64_t i = 0; i < view.shape.numel(); ++i) put(view, i, value);
}

template <class V>
void set_values(const V& view, const std::vector<double>& to) {
  ASSERT_EQ(view.shape.numel(), static_cast<std::int64_t>(to.size()));
  for (std::size_t i = 0; i < to.size(); ++i) put(view, static_cast<std::int64_t>(i), to[i]);
}

}  // namespace bittern::oracle
