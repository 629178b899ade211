// Checkpoints whose tensors AWQ or GPTQ packed, by columns.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "formats/checkpoint_test.h"

namespace bittern {
namespace {

StoredTensor raw(const std::string& name, SafeDType dtype, std::vector<std::uint64_t> shape,
                 std::string bytes) {
  return {{name, dtype, std::move(shape)}, std::move(bytes)};
}

// mlx_lm 0.32.2, _transform_awq_weights, then mx.dequantize with f32 scales, times 64:
//   rng = np.random.default_rng(9); qweight = rng.integers(0, 2**32, (32, 1), np.uint32), then
//   qzeros of (1, 1); scales = (np.arange(1, 9) / 64).astype(np.float16)
constexpr std::string_view kAwqCodes =
    "2187ea6bdea6c8de200407f644da6c49bea3461dcbea679af89ae2aa41790cc7852a83a4bbaa50b76c1b4fea"
    "005a56ea08ca34ed18c242dc176294b80a9f11ebac0958032a74ce069c6132cc247cef6fdaef88bfb84f257c"
    "f084d8e60af2ad103b1d73ac77b570010030e825439ba3d42e08e34a25b2b9fb34ba3959f930dcc8";
constexpr int kAwqValues[8][32] = {
    {-5, 8, -6, -2, 8, 5, 2,  -5, -1, 5, 6,  -6, 2, 2,  1,  4,
     6,  4, 6,  -2, 4, 2, -6, 4,  5,  1, -6, -3, 8, -1, -2, 3},
    {-4, -8, -10, 0, -12, -10, -20, 0, -18, -24, 6,  -12, -16, -20, -16, -22,
     -8, 4,  -20, 6, -8,  -14, -8,  2, -18, -24, -8, -18, -18, -6,  -6,  0},
    {-9, 24, -9, -3, 18, 21, 30, -3,  9,  18, 3,   -15, -15, -12, -12, -15,
     15, -9, 12, -9, 24, 18, 30, -15, -6, 6,  -15, -3,  -9,  -9,  -6,  30},
    {8,   0, -48, -24, -32, -24, 8, -48, -16, -28, -32, -28, -36, -32, -12, -44,
     -28, 0, -36, 8,   -16, -40, 4, -8,  -20, -20, 8,   -8,  8,   -4,  -36, 4},
    {30, 25, 15, 45, 10, 45, 45, 40, 45, 45, 50, 45, 45, 5, 5,  70,
     40, 15, 0,  55, 70, 70, 15, 5,  60, 20, -5, 50, 35, 5, 45, -5},
    {36,  54, 6,  24, 48, 30, 30, 12,  -6, 12,  30, 30, 48, 42, 18, 36,
     -12, 6,  42, 60, 60, 42, 6,  -30, 42, -24, 0,  -6, 30, 36, 24, 18},
    {35,  49, -21, 70, 49, 77, 42, 28, -7,  49, -14, 14, 63,  63, 21, 42,
     -21, 28, 21,  28, 77, 7,  35, 84, -14, 56, 0,   42, -21, 56, 56, 0},
    {-72,  -16,  0,   -88, -112, -48, -40, -24,  -40, -32,  -8,   -8,  -8,  -16, -32, -8,
     -120, -120, -24, -72, -32,  -64, -8,  -112, -40, -120, -104, -16, -88, 0,   -80, -24},
};

std::vector<StoredTensor> awq_module() {
  return {raw("m.qweight", SafeDType::i32, {32, 1}, from_hex(kAwqCodes)),
          raw("m.qzeros", SafeDType::i32, {1, 1}, from_hex("5631ccf5")),
          raw("m.scales", SafeDType::f16, {1, 8}, from_hex("00240028002a002c002d002e002f0030"))};
}
constexpr const char* kAwqConfig =
    R"({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32,
        "zero_point": true, "version": "GEMM"}})";

TEST_F(Checkpoints, AwqValuesAreThoseOfMlx) {
  auto tensors = awq_module();
  tensors.push_back(blank("m.bias", SafeDType::f16, {8}));
  put_model(tensors, kAwqConfig);
  const Checkpoint model = opened();
  EXPECT_EQ(model.kind(), Checkpoint::Kind::hf);
  ASSERT_EQ(model.tensors().size(), 2u);
  const CheckpointTensor& m = *model.find("m.weight");
  EXPECT_EQ(m.shape, (Shape{8, 32}));
  EXPECT_EQ(m.storage, Storage::affine(4, 32, SafeDType::f16));
  EXPECT_EQ(m.layout, CheckpointTensor::Layout::awq);
  const std::vector<float> values = numbers(m), last = numbers(m, 5, 3);
  for (std::size_t r = 0; r < 8; ++r)
    for (std::size_t c = 0; c < 32; ++c)
      EXPECT_EQ(values[r * 32 + c] * 64, static_cast<float>(kAwqValues[r][c])) << r << " " << c;
  EXPECT_TRUE(std::equal(last.begin(), last.end(), values.begin() + 5 * 32));
}

// AutoGPTQ's packing loops for 3 bits over intweight[c, r] = (7 r + 5 c + r c + c // 7) % 8 and
// zeros[0, r] = 1 + 5 r % 7, both of 32.
constexpr std::string_view kGptqCodes =
    "a8ce98f1eff24e302ea700776ddbd6b6ac8f88f5ebb35e342ae61073699ac6b2a8ce98f1eff24e302ea70077"
    "6ddbd6b6ac8f88f5ebb35e342ae61073699ac6b2a8ce98f1eff24e302ea700776ddbd6b6ac8f88f5ebb35e34"
    "2ae61073699ac6b2a8ce98f1eff24e302ea700776ddbd6b6ac8f88f5ebb35e342ae61073699ac6b250a13a63"
    "057779173929b84b6dffff7f11b13e2244677d567839bc0a2ceffb3e50a13a63057779173929b84b6dffff7f"
    "11b13e2244677d567839bc0a2ceffb3e50a13a63057779173929b84b6dffff7f11b13e2244677d567839bc0a"
    "2ceffb3e50a13a63057779173929b84b6dffff7f11b13e2244677d567839bc0a2ceffb3ec64385ea9882b9bc"
    "4ec1ed7200009024d647c4fa8886f8ac5ec5ac621004d134c64385ea9882b9bc4ec1ed7200009024d647c4fa"
    "8886f8ac5ec5ac621004d134c64385ea9882b9bc4ec1ed7200009024d647c4fa8886f8ac5ec5ac621004d134"
    "c64385ea9882b9bc4ec1ed7200009024d647c4fa8886f8ac5ec5ac621004d134";
constexpr std::string_view kGptqZeros = "e8620a5d4ca18b297431852e";

std::string gptq_config(int bits, int group, const std::string& more = "") {
  return "{\"quantization_config\": {\"quant_method\": \"gptq\", \"bits\": " +
         std::to_string(bits) + ", \"group_size\": " + std::to_string(group) + more + "}}";
}
std::vector<std::uint16_t> gptq_scales(std::size_t groups, std::size_t rows) {
  std::vector<std::uint16_t> scales;
  for (std::size_t i = 0; i < groups * rows; ++i)
    scales.push_back(to_f16(static_cast<float>(i % 37 + 1) / 128).bits);
  return scales;
}

TEST_F(Checkpoints, GptqOfThreeBits) {
  put_model({raw("m.qweight", SafeDType::i32, {3, 32}, from_hex(kGptqCodes)),
             raw("m.qzeros", SafeDType::i32, {1, 3}, from_hex(kGptqZeros)),
             stored("m.scales", SafeDType::f16, {1, 32}, gptq_scales(1, 32))},
            gptq_config(3, -1));
  const Checkpoint model = opened();
  const CheckpointTensor& m = *model.find("m.weight");
  EXPECT_EQ(m.storage, Storage::affine(3, 32, SafeDType::f16));
  const std::vector<float> values = numbers(m);
  for (int r = 0; r < 32; ++r) {
    for (int c = 0; c < 32; ++c) {
      const int code = (7 * r + 5 * c + r * c + c / 7) % 8, zero = 1 + 5 * r % 7;
      EXPECT_EQ(values[static_cast<std::size_t>(r * 32 + c)] * 128,
                static_cast<float>((code - zero) * (r + 1)));
    }
  }
}

// A module of [rows, 128] in groups of 32, with zeros that are stored less one where `v1`.
struct GptqModule {
  std::vector<StoredTensor> tensors;
  std::vector<float> values;  // in the order of its groups
};
GptqModule gptq_module(std::uint32_t bits, bool v1) {
  constexpr std::uint32_t kRows = 16, kColumns = 128, kGroups = 4;
  const std::uint32_t per_word = 32 / bits, mask = (1u << bits) - 1;
  std::mt19937 random(bits);
  std::vector<std::uint32_t> qweight(kColumns / per_word * kRows),
      qzeros(kGroups * kRows / per_word);
  std::vector<std::uint32_t> codes(kRows * kColumns), zeros(kGroups * kRows);
  for (auto& code : codes) code = static_cast<std::uint32_t>(random()) & mask;
  for (auto& zero : zeros) zero = static_cast<std::uint32_t>(random()) & mask;
  const auto scales = gptq_scales(kGroups, kRows);
  GptqModule module;
  for (std::uint32_t r = 0; r < kRows; ++r) {
    for (std::uint32_t c = 0; c < kColumns; ++c) {
      const std::uint32_t code = codes[r * kColumns + c], g = c / 32;
      qweight[c / per_word * kRows + r] |= code << c % per_word * bits;
      const float scale = to_f32(f16{scales[g * kRows + r]});
      module.values.push_back(
          (static_cast<float>(code) - static_cast<float>(zeros[g * kRows + r])) * scale);
    }
    for (std::uint32_t g = 0; g < kGroups; ++g) {
      const std::uint32_t zero = (zeros[g * kRows + r] - (v1 ? 1 : 0)) & mask;
      qzeros[g * (kRows / per_word) + r / per_word] |= zero << r % per_word * bits;
    }
  }
  module.tensors = {stored("m.qweight", SafeDType::i32, {kColumns / per_word, kRows}, qweight),
                    stored("m.qzeros", SafeDType::i32, {kGroups, kRows / per_word}, qzeros),
                    stored("m.scales", SafeDType::f16, {kGroups, kRows}, scales)};
  return module;
}
std::vector<std::int32_t> group_index(bool in_order) {
  std::vector<std::int32_t> index(128);
  for (std::int32_t i = 0; i < 128; ++i)
    index[static_cast<std::size_t>(i)] = in_order ? i / 32 : i % 4;
  return index;
}

TEST_F(Checkpoints, Gptq) {
  for (const std::uint32_t bits : {2u, 4u, 8u}) {
    for (const bool v1 : {true, false}) {
      GptqModule module = gptq_module(bits, v1);
      const auto config =
          gptq_config(static_cast<int>(bits), 32, v1 ? "" : R"(, "checkpoint_format": "gptq_v2")");
      put_model(module.tensors, config);
      EXPECT_EQ(numbers(*opened().find("m.weight")), module.values) << bits;
      module.tensors.push_back(stored("m.g_idx", SafeDType::i32, {128}, group_index(true)));
      put_model(module.tensors, config);
      EXPECT_EQ(numbers(*opened().find("m.weight")), module.values) << bits;
    }
  }
}

TEST_F(Checkpoints, GptqInTheOrderOfActivations) {
  GptqModule module = gptq_module(4, true);
  module.tensors.push_back(stored("m.g_idx", SafeDType::i32, {128}, group_index(false)));
  put_model(module.tensors, gptq_config(4, 32, ", \"desc_act\": true"));
  const Checkpoint model = opened();
  const CheckpointTensor& m = *model.find("m.weight");
  const std::vector<float> values = numbers(m);
  // Column 1 is of group 1 now: undo group 0's zero and scale, and apply group 1's.
  const auto scales = gptq_scales(4, 16);
  const GptqModule in_order = gptq_module(4, true);
  for (std::size_t r = 0; r < 16; ++r) {
    const auto scale = [&](std::size_t g) { return to_f32(f16{scales[g * 16 + r]}); };
    const auto zero = [&](std::size_t g) {
      std::uint32_t word = 0;
      std::memcpy(&word, module.tensors[1].bytes.data() + (g * 2 + r / 8) * 4, 4);
      return static_cast<float>(((word >> r % 8 * 4 & 15) + 1) % 16);
    };
    const float code = in_order.values[r * 128 + 1] / scale(0) + zero(0);
    EXPECT_EQ(values[r * 128 + 1], (code - zero(1)) * scale(1));
  }

  auto wrong = group_index(false);
  wrong[7] = 4;
  module.tensors.back() = stored("m.g_idx", SafeDType::i32, {128}, wrong);
  put_model(module.tensors);
  EXPECT_EQ(why_not(*opened().find("m.weight")),
            "tensor \"m.weight\": g_idx has 4 for column 7, expected one of its 4 groups");
}

TEST_F(Checkpoints, ColumnPartsThatDisagree) {
  const auto refused_parts = [&](std::vector<StoredTensor> tensors, const std::string& message,
                                 Code code = Code::invalid_argument) {
    put_tensors("model.safetensors", tensors);
    refused(": tensor \"m.qweight\": " + message, code);
  };
  put("config.json", kAwqConfig);
  auto parts = awq_module();
  refused_parts({parts[0], parts[1]}, "no \"m.scales\", expected one");
  refused_parts({parts[0], parts[2]}, "no \"m.qzeros\", expected one");
  refused_parts({blank("m.qweight", SafeDType::f32, {32, 1}), parts[1], parts[2]},
                "\"m.qweight\" F32 [32,1], expected a matrix of I32");
  refused_parts({parts[0], parts[1], blank("m.scales", SafeDType::i32, {1, 8})},
                "\"m.scales\" I32 [1,8], expected a matrix of F32, F16 or BF16");
  refused_parts({parts[0], parts[1], blank("m.scales", SafeDType::f16, {1, 9})},
                "\"m.scales\" F16 [1,9], expected [1,8] for \"m.qweight\" I32 [32,1] in groups of "
                "32");
  refused_parts({parts[0], blank("m.qzeros", SafeDType::i32, {2, 1}), parts[2]},
                "\"m.qzeros\" I32 [2,1], expected 4 bit zero points in I32 for \"m.scales\" F16 "
                "[1,8]");
  refused_parts({blank("m.qweight", SafeDType::i32, {48, 1}), parts[1], parts[2]},
                "48 columns in groups of 32, expected a multiple", Code::unsupported);
  refused_parts({blank("m.qweight", SafeDType::i32, {0, 1}), parts[1], parts[2]},
                "\"m.qweight\" I32 [0,1], expected at least one and fewer than 2^31 columns");
  put("config.json", gptq_config(4, 32));
  auto gptq = gptq_module(4, true).tensors;
  gptq.push_back(blank("m.g_idx", SafeDType::i32, {64}));
  refused_parts(gptq, "\"m.g_idx\" I32 [64], expected I32 [128]");
  gptq[0] = blank("m.qweight", SafeDType::i32, {15, 16});
  put("config.json", gptq_config(3, 32));
  gptq[0] = blank("m.qweight", SafeDType::i32, {16, 16});
  refused_parts(gptq, "\"m.qweight\" I32 [16,16], expected whole codes of 3 bits");

  put("config.json", kAwqConfig);
  parts.push_back(blank("m.weight", SafeDType::f16, {8, 32}));
  put_tensors("model.safetensors", parts);
  refused(": tensor \"m.weight\": plain and packed, expected one");
}

}  // namespace
}  // namespace bittern
