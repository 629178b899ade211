// Folders of compressed-tensors, written and read again: the same numbers, what config.json says,
// what is left plain, and from and to other formats.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "convert/test_conversion.h"
#include "convert/zero_points.h"
#include "formats/decode.h"
#include "formats/grid.h"

namespace bittern {
namespace {

using Json = nlohmann::ordered_json;
using Zeros = Storage::Zeros;
constexpr ModelFormat kCompressed = ModelFormat::compressed_tensors;

class CompressedFolders : public ConversionFolder {
 protected:
  static std::vector<float> noise(std::size_t count, std::uint32_t seed) {
    return ConversionFolder::noise(count, seed, 0.02f, 0.1f);
  }
  // 70 rows: zero points of the last 6 share words with no others, and end within one.
  void SetUp() override {
    TestFolder::SetUp();
    put_model("hf", {{"model.embed_tokens.weight", {24, 128}, noise(24 * 128, 1)},
                     {"model.layers.0.q_proj.weight", {70, 128}, noise(70 * 128, 2)},
                     {"model.layers.0.down_proj.weight", {40, 192}, noise(40 * 192, 3)},
                     {"model.layers.0.norm.weight", {128}, noise(128, 4)},
                     {"model.layers.0.mlp.gate.weight", {4, 128}, noise(512, 5)},
                     {"model.layers.0.mlp.experts.1.up_proj.weight", {4, 128}, noise(512, 6)},
                     {"model.layers.0.odd.weight", {4, 40}, noise(160, 7)},
                     {"lm_head.weight", {24, 128}, noise(24 * 128, 8)}});
    put("hf/tokenizer.json", "{}");
  }
  std::string convert(const std::string& from, const std::string& to,
                      const ConversionOptions& options, Conversion::RunOptions how = {}) {
    return ConversionFolder::convert(from, to, options, how, [&](const Conversion& plan) {
      planned_.clear();
      notes_ = plan.notes();
      for (const OutputTensor& tensor : plan.tensors())
        planned_[tensor.recipe.name] =
            tensor.to.str() + (tensor.note.empty() ? "" : ": ") + tensor.note;
    });
  }
  static std::vector<float> numbers(const Checkpoint& model, const std::string& name) {
    const CheckpointTensor* tensor = model.find(name);
    if (tensor == nullptr) throw std::runtime_error("no " + name);
    std::vector<float> values(static_cast<std::size_t>(tensor->shape.numel()));
    EXPECT_TRUE(decode_rows(*tensor, 0, tensor->rows(), values).ok());
    return values;
  }
  static GridRows grid(const Checkpoint& model, const std::string& name) {
    GridRows rows;
    const CheckpointTensor* tensor = model.find(name);
    const Status status = decode_grid(*tensor, 0, tensor->rows(), rows);
    EXPECT_TRUE(status.ok()) << status.message();
    return rows;
  }
  Json config(const std::string& name) const {
    return Json::parse(text_of(name + "/config.json")).at("quantization_config");
  }

  static constexpr const char* kQ = "model.layers.0.q_proj.weight";
  static constexpr const char* kDown = "model.layers.0.down_proj.weight";
  std::map<std::string, std::string> planned_;
  std::vector<std::string> notes_;
};

TEST_F(CompressedFolders, HoldWhatWasFitted) {
  for (const int bits : {2, 3, 4, 5, 6, 8})
    for (const SafeDType dtype : {SafeDType::f32, SafeDType::f16, SafeDType::bf16})
      for (const AffineMethod method : {AffineMethod::minmax, AffineMethod::lsq}) {
        ASSERT_EQ(convert("hf", "out",
                          {.format = kCompressed,
                           .bits = bits,
                           .group = 32,
                           .method = method,
                           .scale_dtype = dtype},
                          {.force = true}),
                  "");
        const Checkpoint source = open("hf"), made = open("out");
        for (const char* name : {kQ, kDown}) {
          const CheckpointTensor& tensor = *made.find(name);
          EXPECT_EQ(tensor.storage, Storage::affine(bits, 32, dtype, Zeros::packed));
          EXPECT_EQ(*tensor.storage.bytes(tensor.shape), tensor.bytes());
          GridRows expected;
          const std::vector<float> w = numbers(source, name);
          ASSERT_TRUE(fit_zero_points(
                          {.bits = bits, .group = 32, .params = *to_dtype(dtype), .method = method},
                          w.data(), tensor.rows(), tensor.columns(), {}, expected)
                          .ok());
          const GridRows written = grid(made, name);
          EXPECT_EQ(written.codes, expected.codes);
          EXPECT_EQ(written.scales, expected.scales);
          EXPECT_EQ(written.biases, expected.biases);
          // What a loader computes: (code - zero) * scale in the scales' dtype.
          const std::vector<float> values = numbers(made, name);
          for (std::size_t i = 0; i < values.size(); ++i) {
            const float exact = std::fma(static_cast<float>(written.codes[i]),
                                         written.scales[i / 32], written.biases[i / 32]);
            ASSERT_EQ(values[i], dtype == SafeDType::f16    ? to_f32(to_f16(exact))
                                 : dtype == SafeDType::bf16 ? to_f32(to_bf16(exact))
                                                            : exact);
          }
        }
      }
}

TEST_F(CompressedFolders, SayWhatIsPlain) {
  ASSERT_EQ(convert("hf", "out", {.format = kCompressed, .bits = 4}), "");
  EXPECT_EQ(names("out"),
            (std::vector<std::string>{"config.json", "model.safetensors",
                                      "model.safetensors.index.json", "tokenizer.json"}));
  EXPECT_EQ(
      planned_,
      (std::map<std::string, std::string>{
          {"lm_head.weight", "F32: the head: left as it is"},
          {"model.embed_tokens.weight", "F32: an embedding: left as it is"},
          {kQ, "4 bit, group 64, F32"},
          {kDown, "4 bit, group 64, F32"},
          {"model.layers.0.norm.weight", "F32"},
          {"model.layers.0.mlp.gate.weight", "F32: router: left as it is"},
          {"model.layers.0.mlp.experts.1.up_proj.weight", "F32: of experts: left as it is"},
          {"model.layers.0.odd.weight", "F32: rows of 40 are no multiple of 64: left as it is"}}));
  const Json expected = Json::parse(R"({
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"],
      "weights": {"num_bits": 4, "type": "int", "symmetric": false, "strategy": "group",
                  "group_size": 64, "dynamic": false},
      "input_activations": null, "output_activations": null, "format": "pack-quantized"}},
    "ignore": ["lm_head", "model.layers.0.mlp.experts.1.up_proj", "model.layers.0.mlp.gate",
               "model.layers.0.odd"],
    "kv_cache_scheme": null, "global_compression_ratio": null})");
  EXPECT_EQ(config("out"), expected) << config("out").dump(1);
  const Checkpoint source = open("hf"), made = open("out");
  EXPECT_EQ(made.kind(), Checkpoint::Kind::hf);
  EXPECT_EQ(made.tensors().size(), source.tensors().size());
  for (const auto& [name, to] : planned_)
    if (to.starts_with("F32")) {
      EXPECT_EQ(numbers(made, name), numbers(source, name)) << name;
    }
}

TEST_F(CompressedFolders, RulesGiveGroupsOfTheirOwn) {
  ConversionOptions options{.format = kCompressed, .bits = 4};
  options.rules = {{.pattern = "down_proj", .bits = 8, .group = 32},
                   {.pattern = "lm_head", .bits = 8},
                   {.pattern = "embed", .bits = 8},
                   {.pattern = "gate", .bits = 8, .group = 32}};
  ASSERT_EQ(convert("hf", "out", options), "");
  const Json groups = config("out").at("config_groups");
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(groups["group_0"]["targets"], Json::array({"Linear"}));
  EXPECT_EQ(groups["group_0"]["weights"]["num_bits"], 4);
  EXPECT_EQ(groups["group_1"]["targets"],
            Json::array({"model.layers.0.down_proj", "model.layers.0.mlp.gate"}));
  EXPECT_EQ(groups["group_1"]["weights"]["group_size"], 32);
  EXPECT_EQ(groups["group_2"]["targets"], Json::array({"lm_head"}));
  EXPECT_EQ(config("out").at("ignore"),
            Json::array({"model.layers.0.mlp.experts.1.up_proj", "model.layers.0.odd"}));
  EXPECT_NE(std::find(notes_.begin(), notes_.end(),
                      "the rule embed has no effect: it matches model.embed_tokens.weight, which "
                      "compressed-tensors' loaders read plain"),
            notes_.end());
  const Checkpoint made = open("out");
  EXPECT_EQ(made.find(kDown)->storage, Storage::affine(8, 32, SafeDType::f32, Zeros::packed));
  EXPECT_EQ(made.find("lm_head.weight")->storage,
            Storage::affine(8, 64, SafeDType::f32, Zeros::packed));
}

// Scales in f32 make both exact; in bf16 MLX's biases are rounded, and its numbers differ a little.
TEST_F(CompressedFolders, AreMlxFoldersWithIntegerZeroPoints) {
  for (const SafeDType dtype : {SafeDType::f32, SafeDType::bf16}) {
    ConversionOptions options{.format = kCompressed, .bits = 3, .group = 64, .scale_dtype = dtype};
    ASSERT_EQ(convert("hf", "ct", options, {.force = true}), "");
    options.format = ModelFormat::mlx;
    options.integer_zeros = true;
    ASSERT_EQ(convert("hf", "mlx", options, {.force = true}), "");
    options.format = ModelFormat::safetensors;
    ASSERT_EQ(convert("hf", "plain", options, {.force = true}), "");
    const Checkpoint packed = open("ct"), mlx = open("mlx"), plain = open("plain");
    for (const char* name : {kQ, kDown}) {
      const GridRows a = grid(packed, name), b = grid(mlx, name);
      EXPECT_EQ(a.codes, b.codes);
      EXPECT_EQ(a.scales, b.scales);
      for (std::size_t i = 0; i < a.biases.size(); ++i)
        EXPECT_EQ(b.biases[i],
                  dtype == SafeDType::bf16 ? to_f32(to_bf16(a.biases[i])) : a.biases[i]);
      EXPECT_EQ(numbers(plain, name), numbers(mlx, name));
      if (dtype == SafeDType::f32) {
        EXPECT_EQ(numbers(packed, name), numbers(mlx, name));
      }
    }
  }
}

TEST_F(CompressedFolders, GoToOtherFormatsAndBack) {
  ASSERT_EQ(convert("hf", "ct", {.format = kCompressed, .bits = 4, .group = 32}), "");
  // The same numbers as f32, by any way.
  ASSERT_EQ(
      convert("ct", "plain", {.format = ModelFormat::safetensors, .dequantize = SafeDType::f32}),
      "");
  ASSERT_EQ(convert("ct", "mlx", {.format = ModelFormat::mlx, .transcode = true}), "");
  const Checkpoint packed = open("ct"), plain = open("plain"), mlx = open("mlx");
  for (const CheckpointTensor& tensor : packed.tensors()) {
    EXPECT_EQ(numbers(plain, tensor.name), numbers(packed, tensor.name));
    EXPECT_EQ(numbers(mlx, tensor.name), numbers(packed, tensor.name));
  }
  EXPECT_EQ(mlx.find(kQ)->storage, Storage::affine(4, 32, SafeDType::f32));
  // And back, or from itself: the same files.
  for (const char* from : {"mlx", "ct"}) {
    ASSERT_EQ(convert(from, "back", {.format = kCompressed, .transcode = true}, {.force = true}),
              "");
    EXPECT_EQ(text_of("back/model.safetensors"), text_of("ct/model.safetensors")) << from;
    EXPECT_EQ(config("back"), config("ct"));
  }
  // The same settings need no quantising; others are refused.
  ASSERT_EQ(convert("ct", "same", {.format = kCompressed, .bits = 4, .group = 32}), "");
  EXPECT_EQ(text_of("same/model.safetensors"), text_of("ct/model.safetensors"));
  EXPECT_EQ(convert("ct", "other", {.format = kCompressed, .bits = 4, .group = 64}),
            path("ct") + ": tensor " + kDown +
                " is quantised already (4 bit, group 32, F32), expected plain numbers; "
                "@{transcode} keeps every number, @{dequantize} writes them plain, "
                "@{allow_requantize} quantises once more");
  // Rounded scales keep their zero points.
  ASSERT_EQ(convert("ct", "half",
                    {.format = kCompressed, .transcode = true, .scale_dtype = SafeDType::bf16}),
            "");
  const GridRows a = grid(packed, kQ), b = grid(open("half"), kQ);
  EXPECT_EQ(a.codes, b.codes);
  for (std::size_t i = 0; i < a.scales.size(); ++i) {
    EXPECT_EQ(b.scales[i], to_f32(to_bf16(a.scales[i])));
    EXPECT_EQ(zero_point_of(a.scales[i], a.biases[i], 4),
              zero_point_of(b.scales[i], b.biases[i], 4));
  }

  // Biases of any value have no zero points: numbers are kept.
  ASSERT_EQ(convert("hf", "real", {.format = ModelFormat::mlx, .bits = 4, .group = 32}), "");
  ASSERT_EQ(convert("real", "kept", {.format = kCompressed, .transcode = true}), "");
  EXPECT_EQ(numbers(open("kept"), kQ), numbers(open("real"), kQ));
  EXPECT_NE(planned_[kQ].find("expected a bias of -scale times a zero point 0..15): kept as plain "
                              "F32"),
            std::string::npos)
      << planned_[kQ];
  ASSERT_EQ(convert("real", "lossy", {.format = kCompressed, .transcode = true, .lossy = true}),
            "");
  EXPECT_EQ(planned_[kQ],
            "4 bit, group 32, F32: not exact: 4 bit, group 32, F32 quantised again to 4 bits");
}

TEST_F(CompressedFolders, TakeATarget) {
  ConversionOptions options{.format = kCompressed, .target_bpw = 16};
  ASSERT_EQ(convert("hf", "out", options), "");
  const Checkpoint made = open("out");
  std::size_t packed = 0;
  for (const CheckpointTensor& tensor : made.tensors())
    packed += tensor.storage.zeros == Zeros::packed;
  EXPECT_EQ(packed, 2u);
}

// Numbers that the scales' dtype cannot hold are refused, or clamped.
TEST_F(CompressedFolders, NumbersThatAreTooLarge) {
  std::vector<float> big = noise(64 * 64, 9);
  big[70] = 1e6f;
  put_model("big", {{"a.weight", {64, 64}, big}});
  ConversionOptions options{.format = kCompressed, .bits = 4, .scale_dtype = SafeDType::f16};
  EXPECT_NE(convert("big", "out", options).find("1e+06 at row 1, column 6 is beyond the range of"),
            std::string::npos);
  options.lossy = true;
  ASSERT_EQ(convert("big", "out", options), "");
  for (const float x : numbers(open("out"), "a.weight")) EXPECT_TRUE(std::isfinite(x));
  big[70] = 3e38f;
  put_model("huge", {{"a.weight", {64, 64}, big}});
  ConversionOptions wide{.format = kCompressed, .bits = 2};
  EXPECT_NE(convert("huge", "wide", wide).find("its numbers decode to infinities"),
            std::string::npos);
  wide.lossy = true;
  ASSERT_EQ(convert("huge", "wide", wide), "");
  for (const float x : numbers(open("wide"), "a.weight")) EXPECT_TRUE(std::isfinite(x));
  // A row whose scales do not become f16 is quantised again; the others keep their codes.
  big = noise(64 * 64, 9);
  for (std::size_t i = 5 * 64; i < 6 * 64; ++i) big[i] *= 3e6f;
  put_model("row", {{"a.weight", {64, 64}, big}});
  ASSERT_EQ(convert("row", "wide-row", {.format = kCompressed, .bits = 4, .group = 32}), "");
  options = {.format = kCompressed, .transcode = true, .scale_dtype = SafeDType::f16};
  EXPECT_NE(convert("wide-row", "no", options), "");
  options.lossy = true;
  ASSERT_EQ(convert("wide-row", "row-f16", options), "");
  const std::vector<float> was = numbers(open("wide-row"), "a.weight"),
                           is = numbers(open("row-f16"), "a.weight");
  for (std::size_t i = 0; i < was.size(); ++i)
    EXPECT_NEAR(is[i], std::clamp(was[i], -65504.0f, 65504.0f),
                i / 64 == 5 ? 65504.0f : 1e-3f * std::abs(was[i]))
        << i;
  EXPECT_NEAR(*std::max_element(is.begin(), is.end()), 65504.0f, 7000.0f);
  big[70] = std::numeric_limits<float>::quiet_NaN();
  put_model("nan", {{"a.weight", {64, 64}, big}});
  EXPECT_NE(convert("nan", "no", options).find("holds infinities or NaN"), std::string::npos);
}

}  // namespace
}  // namespace bittern
