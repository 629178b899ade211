#include "convert/conversion.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "convert/mix.h"
#include "convert/row_reader.h"
#include "convert/test_conversion.h"
#include "formats/decode.h"

namespace bittern {
namespace {

class Conversions : public ConversionFolder {
 protected:
  void SetUp() override {
    TestFolder::SetUp();
    put_model("hf", {{"layers.0.a.weight", {8, 128}, noise(8 * 128, 1)},
                     {"layers.1.a.weight", {8, 128}, noise(8 * 128, 2)},
                     {"layers.1.norm.weight", {128}, noise(128, 3)},
                     {"odd.weight", {4, 40}, noise(160, 4)}});
    put("hf/tokenizer.json", "{}");
  }
  std::string convert(const std::string& from, const std::string& to,
                      const ConversionOptions& options, Conversion::RunOptions how = {}) const {
    return ConversionFolder::convert(from, to, options, how, [](const Conversion&) {});
  }
  std::vector<float> numbers(const Checkpoint& model, const std::string& name) const {
    const CheckpointTensor* tensor = model.find(name);
    EXPECT_NE(tensor, nullptr) << name;
    std::vector<float> values(static_cast<std::size_t>(tensor->shape.numel()));
    EXPECT_TRUE(decode_rows(*tensor, 0, tensor->rows(), values).ok());
    return values;
  }
  static double error(const std::vector<float>& a, const std::vector<float>& b) {
    double sum = 0, size = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      sum += (a[i] - b[i]) * (a[i] - b[i]);
      size += a[i] * a[i];
    }
    return sum / size;
  }
};

TEST_F(Conversions, QuantiseWhatFitsAndKeepTheRest) {
  ASSERT_EQ(convert("hf", "mlx", {.format = ModelFormat::mlx, .bits = 4}), "");
  EXPECT_EQ(names("mlx"),
            (std::vector<std::string>{"config.json", "model.safetensors",
                                      "model.safetensors.index.json", "tokenizer.json"}));
  const Checkpoint source = open("hf"), made = open("mlx");
  EXPECT_EQ(made.kind(), Checkpoint::Kind::mlx);
  EXPECT_EQ(made.find("layers.0.a.weight")->storage, Storage::affine(4, 64, SafeDType::f32));
  EXPECT_EQ(made.find("odd.weight")->storage, Storage::plain(SafeDType::f32));
  for (const char* name : {"odd.weight", "layers.1.norm.weight"})
    EXPECT_EQ(numbers(made, name), numbers(source, name));
  const double lost =
      error(numbers(source, "layers.1.a.weight"), numbers(made, "layers.1.a.weight"));
  EXPECT_GT(lost, 0.003);
  EXPECT_LT(lost, 0.009);
}

TEST_F(Conversions, GoThroughEveryStorageOfAFolder) {
  ASSERT_EQ(convert("hf", "mlx", {.format = ModelFormat::mlx, .bits = 8, .group = 32}), "");
  // The dequantised folder holds what the codes mean, whichever way it is made.
  ASSERT_EQ(
      convert("mlx", "plain", {.format = ModelFormat::safetensors, .dequantize = SafeDType::f32}),
      "");
  ASSERT_EQ(convert("hf", "through", {.format = ModelFormat::safetensors, .bits = 8, .group = 32}),
            "");
  const Checkpoint mlx = open("mlx"), plain = open("plain"), through = open("through");
  for (const CheckpointTensor& tensor : mlx.tensors()) {
    EXPECT_EQ(numbers(plain, tensor.name), numbers(mlx, tensor.name));
    EXPECT_EQ(numbers(through, tensor.name), numbers(mlx, tensor.name));
  }
  EXPECT_FALSE(plain.find("layers.0.a.weight")->storage.quantized());
  // Codes that stay codes are copied.
  ASSERT_EQ(convert("mlx", "again", {.format = ModelFormat::mlx, .transcode = true}), "");
  EXPECT_EQ(text_of("again/model.safetensors"), text_of("mlx/model.safetensors"));
}

TEST_F(Conversions, RulesDecideInOrder) {
  const Checkpoint model = open("hf");
  ConversionOptions options{.format = ModelFormat::mlx, .bits = 4};
  options.rules = {{.pattern = "layers\\.0", .keep = true},
                   {.pattern = "layers", .bits = 2, .group = 32},
                   {.pattern = "odd", .bits = 8}};
  const auto plan =
      Conversion::plan(model, options, "out", [](const ModelProgress&) { return true; });
  ASSERT_TRUE(plan) << plan.status().message();
  std::vector<std::string> to;
  for (const OutputTensor& tensor : plan->tensors())
    to.push_back(tensor.recipe.name + " " + tensor.to.str());
  std::sort(to.begin(), to.end());
  EXPECT_EQ(to, (std::vector<std::string>{"layers.0.a.weight F32",
                                          "layers.1.a.weight 2 bit, group 32, F32",
                                          "layers.1.norm.weight F32", "odd.weight F32"}));
}

TEST_F(Conversions, MeetATarget) {
  std::vector<F32> layers;
  for (std::uint32_t i = 0; i < 6; ++i)
    layers.push_back({"layers." + std::to_string(i) + ".a.weight", {8, 128}, noise(8 * 128, i)});
  put_model("six", layers);
  const Checkpoint model = open("six");
  const auto bits = [&](double target) {
    const auto plan = Conversion::plan(model, {.format = ModelFormat::mlx, .target_bpw = target},
                                       "out", [](const ModelProgress&) { return true; });
    EXPECT_TRUE(plan) << plan.status().message();
    return plan ? plan->bits_per_weight() : 0;
  };
  EXPECT_LE(bits(6.5), 6.5);
  EXPECT_GT(bits(6.5), bits(5.5));
  EXPECT_LE(bits(5.5), 5.5);
}

TEST_F(Conversions, MoreBitsNeverMeanMoreError) {
  std::vector<F32> layers;
  for (std::uint32_t i = 0; i < 5; ++i) {
    const std::uint64_t rows = 4 + 9 * i * i;
    std::vector<float> values = noise(rows * 128, i);
    for (float& x : values) x *= std::exp2f(static_cast<float>(i % 3));
    layers.push_back({"layers." + std::to_string(i) + ".a.weight", {rows, 128}, values});
  }
  put_model("five", layers);
  const Checkpoint source = open("five");
  int made = 0;
  const auto lost = [&](const ConversionOptions& options) {
    const std::string out = "out" + std::to_string(made++);
    EXPECT_EQ(convert("five", out, options), "");
    const Checkpoint model = open(out);
    double sum = 0;
    for (const CheckpointTensor& tensor : source.tensors()) {
      const std::vector<float> a = numbers(source, tensor.name), b = numbers(model, tensor.name);
      for (std::size_t i = 0; i < a.size(); ++i) sum += std::pow(double{a[i]} - double{b[i]}, 2);
    }
    return sum;
  };
  for (const int group : {32, 128}) {
    double before = std::numeric_limits<double>::infinity();
    std::vector<std::pair<double, double>> found;  // target, error
    const double least = 2 + 64.0 / group;         // f32 scales and biases
    for (double target = least; target < least + 7; target += 0.35) {
      const double error = lost({.format = ModelFormat::mlx, .group = group, .target_bpw = target});
      EXPECT_LE(error, before * (1 + 1e-12)) << target;
      before = error;
      found.push_back({target, error});
    }
    for (const int bits : {2, 3, 4, 5, 6, 8}) {
      const double uniform = lost({.format = ModelFormat::mlx, .bits = bits, .group = group});
      const double size = bits + 64.0 / group;
      for (const auto& [target, error] : found) {
        if (target >= size) {
          EXPECT_LE(error, uniform * (1 + 1e-12)) << bits << " bits, target " << target;
        }
      }
      EXPECT_LE(lost({.format = ModelFormat::mlx, .group = group, .target_bpw = size}),
                uniform * (1 + 1e-12));
    }
  }
}

TEST_F(Conversions, PatternsTakeTimeLinearInTheName) {
  const std::string longest(kSafetensorsMaxName - 8, 'a');
  put_model("hf", {{longest + "!.weight", {2, 128}, noise(256, 5)}});
  const auto rule = [&](const std::string& pattern) {
    return convert(
        "hf", "out" + std::to_string(names().size()),
        {.format = ModelFormat::mlx, .bits = 4, .rules = {{.pattern = pattern, .bits = 8}}});
  };
  EXPECT_EQ(rule("(a+)+$|weight"), "");
  EXPECT_EQ(rule("(a|aa|a?)*!\\.w"), "");
  const std::string open(50000, '('), closed(50000, ')');
  EXPECT_EQ(rule(open + "a" + closed), "");
  EXPECT_NE(rule(open), "");
  const std::string lookahead = rule("a(?!b)"), reference = rule("(a)\\1");
  EXPECT_NE(lookahead.find("\"a(?!b)\": invalid perl operator"), std::string::npos) << lookahead;
  EXPECT_NE(reference.find("\\1"), std::string::npos) << reference;
}

TEST_F(Conversions, RefuseClearly) {
  const auto expect = [&](const ConversionOptions& options, const std::string& what) {
    const std::string message = convert("hf", "out", options);
    EXPECT_NE(message.find(what), std::string::npos) << message;
    EXPECT_EQ(names(), std::vector<std::string>{"hf"});
  };
  expect({}, "nothing asked for");
  expect({.bits = 7}, "7, expected 2, 3, 4, 5, 6 or 8");
  expect({.bits = 4, .group = 16}, "16, expected 32, 64 or 128");
  expect({.bits = 4, .dequantize = SafeDType::f32}, "exclude each other");
  expect({.type = GgmlType::q4_k}, "expected @{format} gguf");
  expect({.format = ModelFormat::gguf, .type = GgmlType::iq4_nl},
         "IQ4_NL: not written, expected one of Q2_K Q3_K Q4_0");
  expect({.format = ModelFormat::gguf, .bits = 4}, "nobodys");
  expect({.bits = 4, .rules = {{.pattern = "("}}},
         "\"(\": missing ): (: RE2 does not accept this pattern");
  expect({.target_bpw = 1}, "the smallest possible is");
  expect({.bits = 4, .imatrix = path("none")}, "no such file");
  std::vector<float> sick = noise(256, 5);
  sick[200] = std::numeric_limits<float>::quiet_NaN();
  put_model("hf", {{"sick.weight", {2, 128}, sick}});
  const std::string sick_place =
      "sick.weight: holds infinities or NaN, expected finite numbers (nan at row 1, column 72)";
  expect({.bits = 4}, sick_place);
  expect({.target_bpw = 5}, sick_place);
  expect({.transcode = true}, sick_place);
  expect({.dequantize = SafeDType::f32}, sick_place);
  expect({.format = ModelFormat::safetensors, .dequantize = SafeDType::f16}, sick_place);
  expect({.format = ModelFormat::gguf, .type = GgmlType::q8_0}, "nobodys");
  std::vector<float> wide = noise(256, 5);
  wide[7] = 65520;  // rounds to infinity in f16, as the largest f32 does in bf16
  put_model("hf", {{"wide.weight", {2, 128}, wide}});
  expect({.bits = 4, .scale_dtype = SafeDType::f16},
         "wide.weight: 65520 at row 0, column 7 is beyond the range of f16");
  expect({.format = ModelFormat::safetensors, .dequantize = SafeDType::f16},
         "wide.weight: 65520 at row 0, column 7 is beyond the range of f16");
  wide[7] = std::numeric_limits<float>::max();
  put_model("hf", {{"wide.weight", {2, 128}, wide}});
  expect({.bits = 4, .scale_dtype = SafeDType::bf16},
         "wide.weight: 3.40282e+38 at row 0, column 7 is beyond the range of bf16");
}

TEST_F(Conversions, ReadPolicies) {
  const auto read = [&](const std::string& text) {
    put("policy.json", text);
    ConversionOptions options;
    const Status status = read_policy(path("policy.json"), options);
    return status.ok() ? std::to_string(options.bits) + ":" + std::to_string(options.rules.size())
                       : std::string(status.message());
  };
  EXPECT_EQ(
      read(
          R"({"bits": 3, "rules": [{"match": "a", "keep": true}, {"match": "b", "type": "q8_0"}]})"),
      "3:2");
  const auto refused = [&](const std::string& text, const std::string& what) {
    EXPECT_NE(read(text).find(what), std::string::npos) << read(text);
  };
  refused("[1]", "not a JSON object");
  refused("{", "JSON");
  refused(R"({"bitss": 3})", "\"bitss\": unknown");
  refused(R"({"bits": 3, "bits": 4})", "given twice");
  for (const char* around :
       {R"({"bits": @})", R"({"type": @})", R"({"rules": [@]})",
        R"({"rules": [{"match": "a", "bits": @}]})", R"({"rules": [{"match": "a", "else": @}]})"}) {
    std::string text = around;
    const std::size_t at = text.find('@');
    text.replace(at, 1, std::string(500'000, '[') + std::string(500'000, ']'));
    refused(text, "policy.json: ");
    text.replace(at, 1'000'000, "\"" + std::string(1'000'000, 'x') + "\"");
    EXPECT_LT(read(text).size(), 1000U) << around;
  }
  EXPECT_LT(read("{\"" + std::string(1'000'000, 'x') + "\": 1}").size(), 1000U);
  refused(R"({"bits": "3"})", "expected an integer");
  refused(R"({"rules": {}})", "expected a list");
  refused(R"({"rules": [{"bits": 3}]})", "\"match\"");
  refused(R"({"rules": [{"match": "a", "keep": 3}]})", "keep");
  refused(R"({"type": "Q9"})", "expected one of");
  put("policy.json", R"({"type": "q5_k_m"})");
  ConversionOptions options;
  ASSERT_TRUE(read_policy(path("policy.json"), options).ok());
  EXPECT_STREQ(options.mix->name, "Q5_K_M");
}

// ---- rows ----

TEST_F(Conversions, GatherRowsAsARecipeSays) {
  const Checkpoint model = open("hf");
  const std::vector<float> a = numbers(model, "layers.0.a.weight"),
                           b = numbers(model, "layers.1.a.weight");
  const Recipe recipe{.name = "made",
                      .shape = {2, 4, 128},
                      .sources = {"layers.0.a.weight", "layers.1.a.weight"},
                      .rows = {{.source = 1, .first = 7, .count = 4, .step = -2},
                               {.source = 0, .first = 0, .count = 3, .step = 3},
                               {.source = 1, .first = 5, .count = 1}}};
  const auto reader = RowReader::open(model, recipe);
  ASSERT_TRUE(reader) << reader.status().message();
  const std::pair<const std::vector<float>*, std::size_t> expected[] = {
      {&b, 7}, {&b, 5}, {&b, 3}, {&b, 1}, {&a, 0}, {&a, 3}, {&a, 6}, {&b, 5}};
  for (std::int64_t first = 0; first < 8; ++first) {
    for (std::int64_t count = 0; first + count <= 8; ++count) {
      RowNumbers rows;
      ASSERT_TRUE(reader->numbers(first, count, rows).ok());
      const float* got = static_cast<const float*>(rows.data);
      for (std::int64_t r = 0; r < count; ++r) {
        const auto& [from, row] = expected[first + r];
        EXPECT_TRUE(std::equal(got + r * 128, got + (r + 1) * 128, from->data() + row * 128));
      }
    }
  }
  Recipe columns{.name = "c", .shape = {8, 128}, .sources = {"layers.0.a.weight"}};
  columns.column_block = 32;
  columns.columns = {3, 1, 0, 2};
  const auto moved = RowReader::open(model, columns);
  ASSERT_TRUE(moved);
  RowNumbers rows;
  ASSERT_TRUE(moved->numbers(2, 3, rows).ok());
  for (std::size_t i = 0; i < 3 * 128; ++i) {
    const std::size_t row = i / 128, c = i % 128;
    const auto block = static_cast<std::size_t>(columns.columns[c / 32]);
    EXPECT_EQ(static_cast<const float*>(rows.data)[i], a[(row + 2) * 128 + block * 32 + c % 32]);
  }
}

TEST_F(Conversions, RefuseRecipesThatDoNotFit) {
  const Checkpoint model = open("hf");
  const auto refused = [&](Recipe recipe, const std::string& what) {
    const auto reader = RowReader::open(model, recipe);
    ASSERT_FALSE(reader) << what;
    EXPECT_NE(reader.status().message().find(what), std::string_view::npos)
        << reader.status().message();
  };
  const Shape shape{8, 128};
  refused({.name = "x", .shape = shape, .sources = {"gone"}}, "tensor gone: missing");
  refused({.name = "x", .shape = shape}, "made from nothing");
  refused({.name = "x", .shape = {9, 128}, .sources = {"layers.0.a.weight"}}, "8 rows, expected 9");
  refused({.name = "x",
           .shape = shape,
           .sources = {"layers.0.a.weight"},
           .rows = {{.source = 0, .first = 1, .count = 8}}},
          "8 rows, expected at least 9");
  refused({.name = "x", .shape = {8, 96}, .sources = {"layers.0.a.weight"}}, "expected 96");
}

TEST_F(Conversions, MapSmallVectorsAndConstants) {
  const Checkpoint model = open("hf");
  const std::vector<float> x = numbers(model, "layers.1.norm.weight");
  RowNumbers rows;
  const auto mapped = [&](ValueMap map) {
    const Recipe recipe{
        .name = "n", .shape = {128}, .sources = {"layers.1.norm.weight"}, .map = map};
    const auto reader = RowReader::open(model, recipe);
    EXPECT_TRUE(reader && reader->numbers(0, 1, rows).ok());
    return static_cast<const float*>(rows.data)[5];
  };
  EXPECT_EQ(mapped(ValueMap::plus_one), x[5] + 1);
  EXPECT_EQ(mapped(ValueMap::minus_one), x[5] - 1);
  EXPECT_EQ(mapped(ValueMap::negative_exp), static_cast<float>(-std::exp(double{x[5]})));
  const Recipe constant{.name = "c", .shape = {3}, .values = {1, 2, 3}};
  const auto reader = RowReader::open(model, constant);
  ASSERT_TRUE(reader && reader->numbers(0, 1, rows).ok());
  EXPECT_EQ(static_cast<const float*>(rows.data)[2], 3);
}

}  // namespace
}  // namespace bittern
