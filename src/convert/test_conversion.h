// A folder in which tests convert models.
#pragma once
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "convert/conversion.h"
#include "formats/checkpoint.h"
#include "formats/test_folder.h"

namespace bittern {

class ConversionFolder : public TestFolder {
 protected:
  static std::vector<float> noise(std::size_t count, std::uint32_t seed, float mean = 0,
                                  float deviation = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(mean, deviation);
    std::vector<float> values(count);
    for (float& x : values) x = normal(random);
    return values;
  }
  Checkpoint open(const std::string& name) const {
    auto model = Checkpoint::open(path(name));
    EXPECT_TRUE(model) << model.status().message();
    return std::move(*model);
  }
  // Plans, shows the plan and runs it; what went wrong, or nothing.
  template <class Show>
  std::string convert(const std::string& from, const std::string& to,
                      const ConversionOptions& options, const Conversion::RunOptions& how,
                      const Show& show) const {
    auto model = Checkpoint::open(path(from));
    if (!model) return std::string(model.status().message());
    const auto quiet = [](const ModelProgress&) { return true; };
    const auto plan = Conversion::plan(*model, options, path(to), quiet);
    if (!plan) return std::string(plan.status().message());
    show(*plan);
    const auto ran = plan->run(path(to), how, quiet);
    return ran ? std::string() : std::string(ran.status().message());
  }
};

}  // namespace bittern
