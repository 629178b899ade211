// Whole models against transformers (tests/golden/tiny_models.safetensors), and against themselves:
// however tokens are grouped, whatever the threads and the SIMD target, from every kind of file.
#include "bittern/model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <stdexcept>

#include "bittern/convert.h"
#include "bittern/plan.h"
#include "formats/test_folder.h"
#include "model/test_model.h"

namespace bittern {
namespace {

const std::vector<std::string> kModels = {
    "llama",   "llama3",     "mistral",      "mixtral",         "qwen2", "qwen2_moe",
    "qwen3",   "qwen3_moe",  "gemma2",       "gemma3",          "phi3",  "olmo2",
    "smollm3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"};

bool has_delta(const std::string& model) {
  return model.starts_with("qwen3_next") || model.starts_with("qwen3_5");
}

class TinyModels : public TestFolder {
 protected:
  std::string folder(const std::string& model) { return put_tiny_model(*this, model); }
  static const SafetensorsFile& goldens() { return tiny_models(); }
  template <class T>
  static std::vector<T> golden(const std::string& name) {
    const auto* tensor = goldens().find(name);
    EXPECT_NE(tensor, nullptr) << name;
    const auto bytes = goldens().bytes(*tensor);
    std::vector<T> values(bytes.size() / sizeof(T));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }

  static Model load(const std::string& path, const LoadOptions& options = {}) {
    auto model = Model::load(path, options);
    if (!model) throw std::runtime_error(std::string(model.status().message()));
    return *model;
  }
  static Session session(const Model& model, const SessionOptions& options = {.kv = "f32"}) {
    auto made = Session::make(model, options);
    EXPECT_TRUE(made) << made.status().message();
    return std::move(*made);
  }
  static void expect_ok(const Status& status) { EXPECT_TRUE(status.ok()) << status.message(); }

  // Logits of every token, given in appends of `step`.
  static std::vector<float> logits(const Model& model, std::span<const std::int32_t> tokens,
                                   std::size_t step,
                                   const SessionOptions& options = {.kv = "f32"}) {
    Session s = session(model, options);
    const auto vocab = static_cast<std::size_t>(model.info().vocab);
    std::vector<float> all(tokens.size() * vocab);
    for (std::size_t first = 0; first < tokens.size(); first += step) {
      const std::size_t count = std::min(step, tokens.size() - first);
      expect_ok(s.append(tokens.subspan(first, count),
                         view(all.data() + first * vocab,
                              {static_cast<std::int64_t>(count), model.info().vocab})));
    }
    return all;
  }
  static double largest(const std::vector<float>& a, const std::vector<float>& b) {
    EXPECT_EQ(a.size(), b.size());
    double most = 0;
    for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
      const double difference = std::abs(double{a[i]} - b[i]);
      most = std::isnan(difference) ? 1e30 : std::max(most, difference);
    }
    return most;
  }
};
class Models : public TinyModels, public testing::WithParamInterface<std::string> {};

TEST_P(Models, LogitsAreTransformers) {
  {
    const std::string name = GetParam();
    const Model model = load(folder(name), {.activations = Activations::exact});
    const auto tokens = golden<std::int32_t>(name + ".tokens");
    const auto expected = golden<float>(name + ".logits");
    EXPECT_LE(largest(logits(model, tokens, tokens.size()), expected), 1e-4);
  }
}

TEST_P(Models, GroupsOfTokensChangeNoBit) {
  {
    const std::string name = GetParam();
    const Model model = load(folder(name));
    const auto tokens = golden<std::int32_t>(name + ".tokens");
    for (const char* kv : {"f32", "f16", "bf16", "aura8v4"}) {
      SCOPED_TRACE(kv);
      const auto whole = logits(model, tokens, tokens.size(), {.kv = kv});
      for (const std::size_t step : {1, 7}) {
        const auto parts = logits(model, tokens, step, {.kv = kv});
        if (has_delta(name)) {
          // A rounding of the cache may fall the other way.
          EXPECT_LE(largest(whole, parts), std::string(kv) == "f32" ? 2e-4 : 2e-2);
        } else {
          EXPECT_EQ(whole, parts);
        }
      }
    }
  }
}

TEST_P(Models, EveryKindOfFileRuns) {
  {
    const std::string name = GetParam();
    const std::string source = folder(name);
    const auto tokens = golden<std::int32_t>(name + ".tokens");
    const Model plain = load(source);
    const auto expected = logits(plain, tokens, tokens.size());
    for (const char* format : {"gguf", "mlx"}) {
      SCOPED_TRACE(format);
      const std::string out =
          path(name + "-" + format + (std::string(format) == "gguf" ? ".gguf" : ""));
      QuantizeOptions options;
      options.format = format;
      options.dtype = "f32";
      const auto report = quantize_model(source, out, options);
      if (!report) {
        EXPECT_EQ(report.status().code(), Code::unsupported) << report.status().message();
        continue;
      }
      EXPECT_LE(largest(expected, logits(load(out), tokens, tokens.size())), 1e-5);
    }
  }
}

// The fastest kernels change the logits, by little, and a token's do not depend on how many there
// are.
TEST_F(TinyModels, TheFastestKernelsAreAskedFor) {
  const auto tokens = golden<std::int32_t>("llama.tokens");
  const QuantizedMatmulDesc product{1, {.inputs = 64}, Activations::exact};
  const auto plan = Plan<QuantizedMatmul>::select(product, {}, Preference::fastest);
  ASSERT_TRUE(plan);
  const bool differ = plan->sku().kernel == "cpu_bf16";
  QuantizeOptions options;
  options.format = "gguf";
  for (const std::string type : {"f32", "bf16", "Q8_0"}) {
    const std::string file = path(type + ".gguf");
    (type == "Q8_0" ? options.type : options.dtype) = type;
    const auto report = quantize_model(folder("llama"), file, options);
    ASSERT_TRUE(report) << report.status().message();
    const LoadOptions floats{.activations = Activations::exact};
    LoadOptions quick = floats;
    quick.preference = Preference::fastest;
    const auto exact = logits(load(file, floats), tokens, tokens.size());
    const Model model = load(file, quick);
    const auto fastest = logits(model, tokens, tokens.size());
    EXPECT_LE(largest(exact, fastest), 0.1) << type;
    EXPECT_EQ(exact != fastest, differ) << type;
    EXPECT_EQ(fastest, logits(model, tokens, 7)) << type;
  }
  // With quantised activations there is no such kernel.
  const std::string file = path("Q8_0.gguf");
  EXPECT_EQ(logits(load(file), tokens, tokens.size()),
            logits(load(file, {.preference = Preference::fastest}), tokens, tokens.size()));
}

INSTANTIATE_TEST_SUITE_P(Tiny, Models, testing::ValuesIn(kModels),
                         [](const auto& i) { return i.param; });

}  // namespace
}  // namespace bittern
