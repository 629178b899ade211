#include "convert/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "bittern/device.h"
#include "formats/gguf_contents.h"
#include "formats/safetensors.h"
#include "formats/test_folder.h"

namespace bittern {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class Compare : public TestFolder {
 protected:
  using Numbers = F32;
  ~Compare() override { set_num_threads(0); }

  std::string write(const std::string& name, const std::vector<Numbers>& tensors) const {
    put_floats(name, tensors);
    return path(name);
  }

  static ModelComparison compared(const std::string& a, const std::string& b,
                                  std::size_t worst = 5) {
    const auto model_a = Checkpoint::open(a), model_b = Checkpoint::open(b);
    EXPECT_TRUE(model_a.ok() && model_b.ok());
    std::uint64_t done = 0, all = 0;
    auto result = compare(*model_a, *model_b, worst, [&](const ModelProgress& state) {
      EXPECT_GT(state.done, done);
      done = state.done;
      all = state.total;
      return true;
    });
    EXPECT_TRUE(result.ok()) << result.status().message();
    EXPECT_TRUE(done == all || !result->not_compared.empty());
    return *result;
  }
};

TEST_F(Compare, ByHand) {
  // Three columns: one group, shorter than 32.
  const auto result =
      compared(write("a", {{"x", {2, 3}, {3, 0, 0, 4, 0, 0}}, {"y", {2}, {1, 2}}}),
               write("b", {{"x", {2, 3}, {3, 0, 1, 4, 0, -2}}, {"y", {2}, {1, 2}}}));
  ASSERT_EQ(result.tensors.size(), 2u);
  const TensorDifference& x = result.tensors[0];
  EXPECT_EQ(x.name, "x");
  EXPECT_EQ(x.shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(x.squared_error, 5.0);
  EXPECT_EQ(x.squared_norm, 25.0);
  EXPECT_EQ(x.relative_error(), std::sqrt(0.2));
  EXPECT_EQ(x.max_abs_error, 2.0);
  EXPECT_EQ(x.different, 2u);
  EXPECT_EQ(x.not_finite, 0u);
  EXPECT_EQ(result.tensors[1].different, 0u);
  EXPECT_EQ(result.tensors[1].relative_error(), 0.0);
  EXPECT_EQ(result.relative_error(), std::sqrt(5.0 / 30.0));
  EXPECT_EQ(result.max_abs_error(), 2.0);
  ASSERT_EQ(result.worst_groups.size(), 2u);  // and not those that are equal
  EXPECT_EQ(result.worst_groups[0].row, 1);
  EXPECT_EQ(result.worst_groups[0].error, std::sqrt((4.0 / 3) / (25.0 / 6)));
  EXPECT_EQ(result.worst_groups[1].row, 0);
  EXPECT_EQ(result.worst_groups[1].error, std::sqrt((1.0 / 3) / (25.0 / 6)));
}

TEST_F(Compare, WorstGroupsOverAllTensors) {
  // 80 columns: groups at 0, 32 and, shorter, 64.
  std::vector<float> ones(2 * 80, 1.0f), tens(2 * 80, 10.0f), zeros(2 * 80, 0.0f);
  const auto a = write("a", {{"large", {2, 80}, tens}, {"small", {2, 80}, ones}});
  ones[80 + 70] += 2;  // 2 over sqrt(16)
  ones[0] += 1;        // 1 over sqrt(32)
  tens[80 + 40] += 8;  // 8 over sqrt(32), of tens
  const auto b = write("b", {{"large", {2, 80}, tens}, {"small", {2, 80}, ones}});
  const auto result = compared(a, b, 2);
  ASSERT_EQ(result.worst_groups.size(), 2u);
  const GroupDifference &first = result.worst_groups[0], &second = result.worst_groups[1];
  EXPECT_EQ(result.tensors[first.tensor].name, "small");
  EXPECT_EQ(first.row, 1);
  EXPECT_EQ(first.column, 64);
  EXPECT_DOUBLE_EQ(first.error, 0.5);
  EXPECT_EQ(result.tensors[second.tensor].name, "small");
  EXPECT_EQ(second.row, 0);
  EXPECT_EQ(second.column, 0);
  EXPECT_DOUBLE_EQ(second.error, 1 / std::sqrt(32));
  const auto three = compared(a, b, 3).worst_groups;
  ASSERT_EQ(three.size(), 3u);
  EXPECT_EQ(three[2].column, 32);
  EXPECT_DOUBLE_EQ(three[2].error, 0.8 / std::sqrt(32));
  EXPECT_TRUE(compared(a, b, 0).worst_groups.empty());
}

TEST_F(Compare, AmongEqualsTheFirst) {
  std::vector<float> x(8 * 64, 1.0f), y(8 * 64, 1.5f);
  const auto result = compared(write("a", {{"x", {8, 64}, x}}), write("b", {{"x", {8, 64}, y}}), 3);
  ASSERT_EQ(result.worst_groups.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(result.worst_groups[i].row, static_cast<std::int64_t>(i / 2));
    EXPECT_EQ(result.worst_groups[i].column, static_cast<std::int64_t>(i % 2 * 32));
  }
}

TEST_F(Compare, SameBitsForAnyNumberOfThreads) {
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  std::vector<float> x(700 * 3000), y(x.size());  // more than one chunk
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = normal(random);
    y[i] = x[i] + 0.01f * normal(random);
  }
  const auto a = write("a", {{"x", {700, 3000}, x}}), b = write("b", {{"x", {700, 3000}, y}});
  set_num_threads(1);
  const ModelComparison one = compared(a, b);
  // Against a sum in another order.
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    error += (double{x[i]} - double{y[i]}) * (double{x[i]} - double{y[i]});
    norm += double{x[i]} * double{x[i]};
  }
  EXPECT_NEAR(one.tensors[0].relative_error(), std::sqrt(error / norm), 1e-12);
  for (const int threads : {2, 3, 7}) {
    set_num_threads(threads);
    const ModelComparison many = compared(a, b);
    EXPECT_EQ(many.tensors[0].squared_error, one.tensors[0].squared_error);
    EXPECT_EQ(many.tensors[0].squared_norm, one.tensors[0].squared_norm);
    EXPECT_EQ(many.tensors[0].max_abs_error, one.tensors[0].max_abs_error);
    for (std::size_t i = 0; i < one.worst_groups.size(); ++i) {
      EXPECT_EQ(many.worst_groups[i].row, one.worst_groups[i].row);
      EXPECT_EQ(many.worst_groups[i].error, one.worst_groups[i].error);
    }
  }
}

TEST_F(Compare, WhatIsNotFiniteIsCountedAndLeftOut) {
  const auto result = compared(write("a", {{"x", {6}, {kInf, kNan, 1, kInf, kNan, 2}}}),
                               write("b", {{"x", {6}, {kInf, kNan, kNan, -kInf, 0, 3}}}));
  const TensorDifference& x = result.tensors[0];
  EXPECT_EQ(x.different, 4u);
  EXPECT_EQ(x.not_finite, 3u);
  EXPECT_EQ(x.squared_error, 1.0);
  EXPECT_EQ(x.squared_norm, 4.0);
  EXPECT_EQ(x.max_abs_error, 1.0);
}

TEST_F(Compare, AgainstZeroTheErrorIsInfinite) {
  const auto result = compared(write("a", {{"x", {2}, {0, 0}}}), write("b", {{"x", {2}, {0, 1}}}));
  EXPECT_EQ(result.tensors[0].relative_error(), std::numeric_limits<double>::infinity());
  EXPECT_EQ(result.worst_groups[0].error, std::numeric_limits<double>::infinity());
}

TEST_F(Compare, NamesAndShapes) {
  const auto result = compared(
      write("a", {{"both", {2}, {1, 2}}, {"ours", {1}, {1}}, {"turned", {2, 1}, {1, 2}}}),
      write("b", {{"both", {2}, {1, 2}}, {"theirs", {1}, {1}}, {"turned", {1, 2}, {1, 2}}}));
  ASSERT_EQ(result.tensors.size(), 1u);
  EXPECT_EQ(result.tensors[0].name, "both");
  EXPECT_EQ(result.only_in_model, std::vector<std::string>{"ours"});
  EXPECT_EQ(result.only_in_other, std::vector<std::string>{"theirs"});
  ASSERT_EQ(result.shapes_differ.size(), 1u);
  EXPECT_EQ(result.shapes_differ[0].name, "turned");
  EXPECT_EQ(result.shapes_differ[0].shape, (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(result.shapes_differ[0].other_shape, (std::vector<std::int64_t>{1, 2}));
}

TEST_F(Compare, EmptyTensorsAreEqual) {
  const auto a = write("a", {{"x", {0, 64}, {}}, {"y", {1}, {1}}});
  const auto result = compared(a, a);
  EXPECT_EQ(result.tensors.size(), 2u);
  EXPECT_EQ(result.relative_error(), 0.0);
}

TEST_F(Compare, WhatCannotBeDecodedIsNamed) {
  const std::string file = path("m.gguf");
  GgufContents contents(file);
  ASSERT_TRUE(contents.add_tensor("x", GgmlType::iq2_xs, Shape{1, 256}).ok());
  put("m.gguf", file_text(contents.lay_out(), {}));
  const auto result = compared(file, file);
  EXPECT_TRUE(result.tensors.empty());
  ASSERT_EQ(result.not_compared.size(), 1u);
  EXPECT_EQ(result.not_compared[0].name, "x");
  EXPECT_EQ(result.not_compared[0].reason, "unsupported type IQ2_XS in tensor x");
}

}  // namespace
}  // namespace bittern
