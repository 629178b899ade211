// Checkpoints whose tensors MLX packed, and what their configs must say.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "formats/checkpoint_test.h"

namespace bittern {
namespace {

// mlx 0.32.4 on the CPU: w = rng.normal(size=(2, 64)) in float32, bfloat16, float16 for one
// rng = np.random.default_rng(5); q, s, b = mx.quantize(w, group, bits); mx.dequantize(q, s, b).
struct MlxGolden {
  SafeDType dtype;
  int bits, group;
  std::string_view codes, scales, biases, values;
};
constexpr MlxGolden kMlx[] = {
    {SafeDType::f32, 4, 32,
     "24a79d45fb29f4093865b558ca707382989bccc7647f8cf899c5c6b96360558a7f9a7ca85a3d337e344bc373"
     "79f9368079aaaba708f6714cb8cb4869d097cc68",
     "98b65d3e81a19bbe19fb503e1a5a73be", "98b6ddbf81a11b407c1aebbf1a5af33f",
     "98b65dbff248a6bf98b65dbe98b6dd3e20928a3f98b65d3ef24826bf98b65dbff048263fc4ffc13f98b65d3e"
     "f248a6bf98b65dbfc4ffc13f98b65d3e98b6ddbf000000001f928abff24826bf98b6ddbef24826bff048263f"
     "00000000f24826bf98b6dd3e98b65d3f98b6ddbf98b65dbe1f928abf98b65dbef248a6bf0000000000000000"
     "80a19bbe407269bf80a19bbe82a19bbf82a19bbf80a19b3e82a19bbf81a19b3f80a11b3f512d08c080a19b3e"
     "82a19bbf0000000000000000512d08c080a19bbe80a19bbe4272693f82a19bbf80a11b3f82a19bbf80a19bbe"
     "407269bfe189c23f80a11b3f81a11b4080a11b3f4272693f4272693f80a11bbf0000000052bc9c3f18fbd0be"
     "20fb503e0000000054bc1c3f18fbd0be18fb50be20fb503e20fb503e18fb50bf18fb503f52bc9cbf52bc9cbf"
     "52bc9cbff09c823f18fbd0bef09c82bf52bc9cbf18fbd03ef09c82bf52bc9cbf54bc1c3f52bc9cbf18fbd0be"
     "0000000018fbd0be0000000052bc9c3f52bc1cbf52bc9cbf7c1aebbf18fb50be205a73be185a733e185af3be"
     "185af3be948336bf185af3be185a733e185af3be000000001a5af33f185af33ed6eed4bfd7eed43f185a733e"
     "1c5a73bf1a5a733f00000000948336bf948336bf1c5a73bf000000001a5a733f205a73be185af33e1a5af33f"
     "501898bf185a733e205a73be1c5a73bf1c5a73bf00000000185af33e"},
    {SafeDType::bf16, 3, 64,
     "e5b82de3da4d7464f1ad4ab6d46ab6ce3abd1dc9a445cb691d435b7da96e65348a2c094ad4b95b74bbb1d446"
     "77acc992",
     "2cbf32bf", "2c403240",
     "2cbf00002c3f00002c3f2c3f2c3f01402c3f00002c3f2cbf2cbf2c3f2c3fac3f0000acbf0140ac3facbfac3f"
     "000000c02cbf2cbfac3f2cbf000000002cbf2cbf0000ac3f2c3f2cbfacbf00002cbf2cbfacbf01402c3f2cbf"
     "2c3fac3f00c02cbf2cbf2c3f000000000000014001402cbf2cbf2c402cbf2cbf00002c3fac3f2c3f30bf303f"
     "000006400000b4bfb4bfb23f30bf06c030bf0000b23f30bf303f303f30bf00000640b23f303f0000b23f0000"
     "000030bf0000000032400000b23fb23f0000b23f06c00000303f06c0b4bfb23f0000b4bf30bf30bf303f303f"
     "000030bf0000b23f303f303f0000b4bf30bf303f000030bfb4bf0000000030bf00000000"},
    {SafeDType::f16, 6, 32,
     "e82ce3f037b21f6b63894dbe90ff8a9f1982d33d9625c07e1f69b9da7595edf6c4d52c6a5afa82f00f5215a4"
     "65910a440094694416dea3ebba233ae1e5103a0f63e527caabb7ef8ddf2692643ac2320c82f1990ec0fbfe75"
     "ab527828b72e2e92",
     "312cc62c97ab1d2c", "b7c039c1084066c1",
     "3034dc3b583b3e3d4c3a40b520ac303840b53038b83c48ba12bfb83c0000c4393dbdce3ec43930b040b53030"
     "40b230b474bcfa3c20ac402c402cb7c0303840b5c8b4c02cc4bb903a60b92abb2abbc030f439c8b8f8bd2c3c"
     "2ebcc63ce0ac60b960b92837283b30b3c03b2d4030b37abc2ebcacbd60b9fab960bd2c3839c160bd0840443c"
     "443894371d3f4438802bfcbcc0abb4b9b4b9b4b9c0abb0b51c3b38bdb0b15a3f802bbe3c813c383db03974bd"
     "c0b4b0b52cbe98b7fcbca4be9033c0aba8b9b6bb1cb828b628b620ac30b730361c38303624b924b9303730b2"
     "20ac03c166c128352835683da83930320000a8bd343ba0b81c3830322034343b1cb828b6"},
};

StoredTensor raw(const std::string& name, SafeDType dtype, std::vector<std::uint64_t> shape,
                 std::string bytes) {
  return {{name, dtype, std::move(shape)}, std::move(bytes)};
}

TEST_F(Checkpoints, MlxValuesAreThoseOfMlx) {
  for (const MlxGolden& golden : kMlx) {
    const auto words = static_cast<std::uint64_t>(64 * golden.bits / 32);
    const auto groups = static_cast<std::uint64_t>(64 / golden.group);
    // The second stack is the first again, after an odd byte.
    const std::string codes = from_hex(golden.codes), scales = from_hex(golden.scales),
                      biases = from_hex(golden.biases);
    put_model({raw("x.weight", SafeDType::u32, {2, 2, words}, codes + codes),
               raw("x.scales", golden.dtype, {2, 2, groups}, scales + scales),
               raw("x.biases", golden.dtype, {2, 2, groups}, biases + biases),
               stored<float>("x.bias", SafeDType::f32, {2}, {1, 2}),
               blank("norm.weight", SafeDType::f32, {4}), blank("odd", SafeDType::u8, {1})},
              "{\"quantization\": {\"group_size\": " + std::to_string(golden.group) +
                  ", \"bits\": " + std::to_string(golden.bits) + "}}");
    const Checkpoint model = opened();
    EXPECT_EQ(model.kind(), Checkpoint::Kind::mlx);
    EXPECT_EQ(model.tensors().size(), 4u);
    EXPECT_EQ(numbers(*model.find("x.bias")), (std::vector<float>{1, 2}));
    CheckpointTensor x = *model.find("x.weight");
    EXPECT_EQ(x.storage, Storage::affine(golden.bits, golden.group, golden.dtype));
    EXPECT_EQ(x.shape, (Shape{2, 2, 64}));
    EXPECT_EQ(x.rows(), 4);
    EXPECT_EQ(x.bytes(), 2 * (codes.size() + scales.size() + biases.size()));

    const std::string values = from_hex(golden.values);
    CheckpointTensor plain;
    plain.shape = {2, 64};
    plain.storage = Storage::plain(golden.dtype);
    plain.data = std::as_bytes(std::span(values.data(), values.size()));
    const std::vector<float> expected = numbers(plain);
    std::vector<float> twice = expected;
    twice.insert(twice.end(), expected.begin(), expected.end());
    EXPECT_EQ(numbers(x), twice);
    EXPECT_EQ(numbers(x, 3, 1), std::vector<float>(expected.begin() + 64, expected.end()));

    // At odd addresses.
    const std::string odd_codes = "x" + codes + codes, odd_scales = "x" + scales + scales,
                      odd_biases = "x" + biases + biases;
    const auto after_one = [](const std::string& text) {
      return std::as_bytes(std::span(text.data(), text.size())).subspan(1);
    };
    x.data = after_one(odd_codes);
    x.scales = after_one(odd_scales);
    x.biases = after_one(odd_biases);
    EXPECT_EQ(numbers(x), twice);
  }
}

// A module of [4, 128], in codes of so many bits and groups.
std::vector<StoredTensor> mlx_module(const std::string& name, std::uint64_t bits,
                                     std::uint64_t group, SafeDType dtype = SafeDType::bf16) {
  return {blank(name + ".weight", SafeDType::u32, {4, 128 * bits / 32}),
          blank(name + ".scales", dtype, {4, 128 / group}),
          blank(name + ".biases", dtype, {4, 128 / group})};
}

TEST_F(Checkpoints, MlxModulesOnTheirOwn) {
  auto tensors = mlx_module("a", 4, 64);
  for (const auto& module : {mlx_module("b", 6, 32), mlx_module("c", 4, 64)})
    tensors.insert(tensors.end(), module.begin(), module.end());
  tensors.push_back(blank("d.weight", SafeDType::bf16, {4, 128}));
  // The one section is enough, be it under either name.
  for (const char* section : {"quantization", "quantization_config"}) {
    put_model(tensors, std::string("{\"") + section + R"(": {"bits": 4, "group_size": 64,
        "mode": "affine", "b": {"bits": 6, "group_size": 32}, "c": true, "d": false}})");
    const Checkpoint model = opened();
    EXPECT_EQ(model.kind(), Checkpoint::Kind::mlx);
    ASSERT_EQ(model.tensors().size(), 4u);
    EXPECT_EQ(model.find("a.weight")->storage, Storage::affine(4, 64, SafeDType::bf16));
    EXPECT_EQ(model.find("b.weight")->storage, Storage::affine(6, 32, SafeDType::bf16));
    EXPECT_EQ(model.find("c.weight")->storage, Storage::affine(4, 64, SafeDType::bf16));
    EXPECT_EQ(model.find("d.weight")->storage, Storage::plain(SafeDType::bf16));
  }
}

TEST_F(Checkpoints, AnMlxShardIsReadByTheConfigBesideIt) {
  auto tensors = mlx_module("a", 4, 64);
  tensors.push_back(blank("b.weight", SafeDType::u32, {4, 16}));
  tensors.push_back(blank("b.scales", SafeDType::bf16, {4, 2}));  // biases are in another shard
  put_tensors("model-00001-of-00002.safetensors", tensors);
  const std::string shard = path("model-00001-of-00002.safetensors");
  {
    const Checkpoint model = opened(shard);
    EXPECT_EQ(model.tensors().size(), 5u);
    EXPECT_EQ(why_not(*model.find("a.weight")),
              "unsupported type U32 in tensor a.weight, expected F64, F32, F16 or BF16 (or "
              "config.json to say how it is packed)");
  }
  put("config.json", R"({"quantization": {"bits": 4, "group_size": 64}})");
  const Checkpoint model = opened(shard);
  EXPECT_EQ(model.kind(), Checkpoint::Kind::safetensors);
  EXPECT_EQ(model.tensors().size(), 3u);
  EXPECT_EQ(model.find("a.weight")->storage, Storage::affine(4, 64, SafeDType::bf16));
  EXPECT_EQ(model.find("b.weight")->storage, Storage::plain(SafeDType::u32));
}

TEST_F(Checkpoints, AnMlxFolderOfPlainNumbers) {
  put_tensors("model.safetensors", {blank("a", SafeDType::bf16, {2})}, {{"format", "mlx"}});
  EXPECT_EQ(opened().kind(), Checkpoint::Kind::mlx);
}

TEST_F(Checkpoints, MlxPartsThatDisagree) {
  const std::string config = R"({"quantization": {"bits": 4, "group_size": 64}})";
  const auto refused_parts = [&](const std::vector<StoredTensor>& tensors,
                                 const std::string& message) {
    put_model(tensors, config);
    refused(message);
  };
  auto parts = mlx_module("a", 4, 64);
  refused_parts({parts[0], parts[1]}, ": tensor \"a.weight\": no \"a.biases\", expected one");
  refused_parts({parts[0], parts[2]}, ": tensor \"a.weight\": no \"a.scales\", expected one");
  refused_parts(mlx_module("a", 8, 64),
                ": tensor \"a.weight\": \"a.weight\" U32 [4,32] with \"a.scales\" BF16 [4,2], "
                "expected rows of 32 words to be 256 codes of 4 bits in groups of 64, as "
                "config.json says, with a scale each");
  refused_parts(mlx_module("a", 4, 64, SafeDType::u16),
                ": tensor \"a.weight\": \"a.weight\" U32 [4,16] with \"a.scales\" U16 [4,2], "
                "expected scales of F32, F16 or BF16");
  refused_parts({parts[0], blank("a.scales", SafeDType::bf16, {5, 2}), parts[2]},
                ": tensor \"a.weight\": \"a.weight\" U32 [4,16] with \"a.scales\" BF16 [5,2], "
                "expected one row of scales for each row of codes");
  refused_parts({parts[0], parts[1], blank("a.biases", SafeDType::f32, {4, 2})},
                ": tensor \"a.weight\": \"a.biases\" F32 [4,2] with \"a.scales\" BF16 [4,2], "
                "expected both alike");
  put("config.json", R"({"quantization": {"bits": 3, "group_size": 64}})");
  put_tensors("model.safetensors", parts);
  refused(
      ": tensor \"a.weight\": \"a.weight\" U32 [4,16] with \"a.scales\" BF16 [4,2], "
      "expected rows of whole codes of 3 bits");
  put("config.json", R"({"quantization": {"bits": 4, "group_size": 64, "a": false}})");
  refused(
      ": tensor \"a.weight\": packed with \"a.scales\", expected plain numbers, as "
      "config.json says false of \"a\"");
}

TEST_F(Checkpoints, QuantizationConfigsThatAreNotOurs) {
  put_tensors("model.safetensors", {blank("a", SafeDType::f32, {1})});
  const auto config = [&](const std::string& text, const std::string& message,
                          Code code = Code::unsupported) {
    put("config.json", text);
    refused("/config.json: " + message, code);
  };
  const Code malformed = Code::invalid_argument;
  config(R"({"quantization": 4})", "quantization: 4, expected an object", malformed);
  config(R"({"quantization": {"bits": 4}})",
         "quantization: no group_size, expected one of 32 64 128", malformed);
  config(R"({"quantization": {"bits": 7, "group_size": 64}})",
         "quantization: bits 7, expected one of 1 2 3 4 5 6 8");
  config(R"({"quantization": {"bits": "4", "group_size": 64}})",
         "quantization: bits \"4\", expected one of 1 2 3 4 5 6 8");
  config(R"({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}})",
         "quantization: mode \"mxfp4\", expected \"affine\"");
  config(R"({"quantization": {"bits": 4, "group_size": 32, "mode": 1}})",
         "quantization: mode: 1, expected a string", malformed);
  config(R"({"quantization": {"bits": 4, "group_size": 64, "m": {"bits": 8, "group_size": 16}}})",
         "quantization: \"m\": group_size 16, expected one of 32 64 128");
  config(R"({"quantization": {"bits": 4, "group_size": 64, "m": {"bits": 4, "group_size": 32,
             "mode": "nvfp4"}}})",
         "quantization: \"m\": mode \"nvfp4\", expected \"affine\"");
  config(R"({"quantization_config": {"quant_method": 1}})",
         "quantization_config: quant_method: 1, expected a string", malformed);
  config(R"({"quantization_config": {"quant_method": "awq", "bits": 8, "group_size": 64}})",
         "quantization_config: bits 8, expected one of 4");
  config(R"({"quantization_config": {"quant_method": "awq", "w_bit": 4, "q_group_size": 64,
             "version": "gemv"}})",
         "quantization_config: version \"gemv\", expected \"gemm\"");
  config(R"({"text_config": {"quantization_config": {"quant_method": "gptq", "bits": 5}}})",
         "quantization_config: bits 5, expected one of 2 3 4 8");
  config(R"({"quantization_config": {"quant_method": "gptq", "bits": 4,
             "group_size": 18446744073709551615}})",
         "quantization_config: group_size 18446744073709551615, expected one of -1 16 32 64 128 "
         "256 512 1024");
  config(R"({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1,
             "checkpoint_format": "marlin"}})",
         "quantization_config: checkpoint_format \"marlin\", expected \"gptq\" or \"gptq_v2\"");
  config(R"({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1,
             "dynamic": {"-:x": {}, "+:y": {"bits": 8}}}})",
         "quantization_config: dynamic \"+:y\", expected the same bits and group for all modules");
  // Tensors of other methods are shown as they are stored.
  put("config.json", R"({"quantization_config": {"quant_method": "fp8"}})");
  EXPECT_EQ(opened().kind(), Checkpoint::Kind::hf);
}

}  // namespace
}  // namespace bittern
