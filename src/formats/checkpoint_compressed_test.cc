// Folders of compressed-tensors' format pack-quantized.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "formats/checkpoint_test.h"
#include "formats/grid.h"
#include "formats/stored_rows.h"

namespace bittern {
namespace {

// compressed-tensors 0.20.0: pack_to_int32 of codes[r, c] = (7 r + 5 c + r c + c // 7) % 8, less 4,
// [12, 64], and with packed_dim=0 of zeros[r, g] = (3 r + 5 g) % 8, less 4, [12, 2].
constexpr std::string_view kCodes =
    "a8ce98f150a13a63c64385ea8c190f15aa33663c54a8ce98eff24e30057779179882b9bccb4dc154dee5a5600aeff2"
    "4e2ea700773929b84b4ec1ed720a70979382bbe414dc2ea7006ddbd6b66dffff7f00009024492449d2b66d2349926d"
    "dbd6ac8f88f511b13e22d647c4fa88581f11eb23627d44ac8f88ebb35e3444677d568886f8accf0cd1509ff5a1211a"
    "ebb35e2ae610737839bc0a5ec5ac620e318797c3abe055cc2ae610699ac6b22ceffb3e1004d1344d6559d6f77d2708"
    "82699ac6a8ce98f150a13a63c64385ea8c190f15aa33663c54a8ce98eff24e30057779179882b9bccb4dc154dee5a5"
    "600aeff24e2ea700773929b84b4ec1ed720a70979382bbe414dc2ea7006ddbd6b66dffff7f00009024492449d2b66d"
    "2349926ddbd6";
constexpr std::string_view kZeros = "98c3ab98c51c5ec5030000000c000000";
constexpr std::uint64_t kRows = 12, kColumns = 64, kGroups = 2;

int code_at(std::uint64_t r, std::uint64_t c) {
  return static_cast<int>((7 * r + 5 * c + r * c + c / 7) % 8);
}
int zero_at(std::uint64_t r, std::uint64_t g) { return static_cast<int>((3 * r + 5 * g) % 8); }
std::uint16_t scale_at(std::uint64_t r, std::uint64_t g) {
  return to_bf16(static_cast<float>(1 + (r + 2 * g) % 9) * (1 + 0x1p-7f) / 64).bits;
}

std::vector<StoredTensor> module() {
  std::vector<std::uint16_t> scales;
  for (std::uint64_t i = 0; i < kRows * kGroups; ++i)
    scales.push_back(scale_at(i / kGroups, i % kGroups));
  return {{{"m.weight_packed", SafeDType::i32, {kRows, 6}}, from_hex(kCodes)},
          stored("m.weight_scale", SafeDType::bf16, {kRows, kGroups}, scales),
          {{"m.weight_zero_point", SafeDType::i32, {2, kGroups}}, from_hex(kZeros)},
          stored("m.weight_shape", SafeDType::i64, {2}, std::vector<std::int64_t>{12, 64})};
}
std::string weights(int bits, const std::string& more = R"("strategy": "group", "group_size": 32)",
                    bool symmetric = false) {
  return "{\"num_bits\": " + std::to_string(bits) +
         ", \"type\": \"int\", \"symmetric\": " + (symmetric ? "true" : "false") + ", " + more +
         "}";
}
std::string config(const std::vector<std::string>& groups,
                   const std::string& format = "pack-quantized") {
  std::string text;
  for (std::size_t i = 0; i < groups.size(); ++i)
    text += (i == 0 ? "" : ", ") + ("\"group_" + std::to_string(i)) +
            "\": {\"targets\": [\"Linear\"], \"weights\": " + groups[i] + "}";
  return R"({"quantization_config": {"quant_method": "compressed-tensors", "format": ")" + format +
         "\", \"config_groups\": {" + text + "}, \"ignore\": [\"lm_head\"]}}";
}

class Compressed : public Checkpoints {
 protected:
  void refused_parts(const std::vector<StoredTensor>& tensors, const std::string& message,
                     Code code = Code::invalid_argument) {
    put_tensors("model.safetensors", tensors);
    refused(": tensor \"m.weight_packed\": " + message, code);
  }
};

TEST_F(Compressed, ValuesAreThoseOfThePackage) {
  auto tensors = module();
  tensors.push_back(blank("lm_head.weight", SafeDType::bf16, {4, 64}));
  put_model(tensors, config({weights(4), weights(3)}));  // shapes say which of the two it is
  const Checkpoint model = opened();
  EXPECT_EQ(model.kind(), Checkpoint::Kind::hf);
  ASSERT_EQ(model.tensors().size(), 2u);
  const CheckpointTensor& m = *model.find("m.weight");
  EXPECT_EQ(m.shape, (Shape{12, 64}));
  EXPECT_EQ(m.storage, Storage::affine(3, 32, SafeDType::bf16, Storage::Zeros::packed));
  EXPECT_EQ(*m.storage.bytes(m.shape), m.bytes());
  const std::vector<float> values = numbers(m), last = numbers(m, 5, 7);
  GridRows grid;
  ASSERT_TRUE(decode_grid(m, 0, 12, grid).ok());
  for (std::uint64_t r = 0; r < kRows; ++r)
    for (std::uint64_t c = 0; c < kColumns; ++c) {
      const float scale = to_f32(bf16{scale_at(r, c / 32)});
      const float exact = static_cast<float>(code_at(r, c) - zero_at(r, c / 32)) * scale;
      EXPECT_EQ(values[r * kColumns + c], to_f32(to_bf16(exact))) << r << " " << c;
      const std::size_t g = r * kGroups + c / 32;
      EXPECT_EQ(static_cast<float>(grid.codes[r * kColumns + c]) * grid.scales[g] + grid.biases[g],
                exact);
    }
  // What decompress of the package says of three of them.
  EXPECT_EQ(values[5 * 64 + 37], -0.251953125f);
  EXPECT_EQ(values[11 * 64 + 63], 0.0f);
  EXPECT_EQ(values[3 * 64 + 3], 0.251953125f);
  EXPECT_TRUE(std::equal(last.begin(), last.end(), values.begin() + 5 * 64));
  // One file of the folder says the same.
  EXPECT_EQ(numbers(*opened(path("model.safetensors")).find("m.weight")), values);
}

TEST_F(Compressed, WithoutZeroPoints) {
  auto tensors = module();
  tensors.erase(tensors.begin() + 2);
  put_model(tensors, config({weights(3, R"("strategy": "group", "group_size": 32)", true)}));
  const Checkpoint model = opened();
  const CheckpointTensor& m = *model.find("m.weight");
  const std::vector<float> values = numbers(m);
  for (std::uint64_t r = 0; r < kRows; ++r)
    for (std::uint64_t c = 0; c < kColumns; ++c)
      EXPECT_EQ(values[r * kColumns + c], to_f32(to_bf16(static_cast<float>(code_at(r, c) - 4) *
                                                         to_f32(bf16{scale_at(r, c / 32)}))));

  // A scale for the whole row.
  tensors[1] = stored("m.weight_scale", SafeDType::f16, {12, 1},
                      std::vector<std::uint16_t>(12, to_f16(0.5f).bits));
  put_model(tensors, config({weights(3, R"("strategy": "channel")", true)}));
  EXPECT_EQ(opened().find("m.weight")->storage.group, 64);
  EXPECT_EQ(numbers(*opened().find("m.weight"))[1], 0.5f * static_cast<float>(code_at(0, 1) - 4));
}

TEST_F(Compressed, PartsThatDisagree) {
  put("config.json", config({weights(3)}));
  const auto parts = module();
  const auto without = [&](std::size_t i) {
    auto some = parts;
    some.erase(some.begin() + static_cast<std::ptrdiff_t>(i));
    return some;
  };
  const auto with = [&](std::size_t i, StoredTensor tensor) {
    auto some = parts;
    some[i] = std::move(tensor);
    return some;
  };
  refused_parts(without(1), "no \"m.weight_scale\", expected one");
  refused_parts(without(2), "no \"m.weight_zero_point\", expected one");
  refused_parts(without(3), "no \"m.weight_shape\", expected one");
  refused_parts(with(0, blank("m.weight_packed", SafeDType::u8, {12, 24})),
                "\"m.weight_packed\" U8 [12,24], expected a matrix of I32");
  refused_parts(with(1, blank("m.weight_scale", SafeDType::i32, {12, 2})),
                "\"m.weight_scale\" I32 [12,2], expected a matrix of F32, F16 or BF16");
  // Older versions of the package leave gaps: 10 codes of 3 bits in a word.
  const std::string settings = "expected 3 bits in groups of 32, as config.json says";
  refused_parts(with(0, blank("m.weight_packed", SafeDType::i32, {12, 7})),
                "\"m.weight_packed\" I32 [12,7] with \"m.weight_scale\" BF16 [12,2] and "
                "\"m.weight_zero_point\" I32 [2,2] for a weight [12,64], " +
                    settings);
  refused_parts(with(1, blank("m.weight_scale", SafeDType::bf16, {12, 3})),
                "\"m.weight_packed\" I32 [12,6] with \"m.weight_scale\" BF16 [12,3] and "
                "\"m.weight_zero_point\" I32 [2,2] for a weight [12,64], " +
                    settings);
  // Zero points that are not packed, and may be negative.
  refused_parts(with(2, blank("m.weight_zero_point", SafeDType::i8, {12, 2})),
                "\"m.weight_zero_point\" I8 [12,2], expected I32 [2,2]: zero points of 3 bits, "
                "packed down the rows");
  refused_parts(with(2, blank("m.weight_zero_point", SafeDType::i32, {12, 2})),
                "\"m.weight_zero_point\" I32 [12,2], expected I32 [2,2]: zero points of 3 bits, "
                "packed down the rows");
  refused_parts(with(3, blank("m.weight_shape", SafeDType::i32, {2})),
                "\"m.weight_shape\" I32 [2], expected I64 [2]");
  const auto shape = [&](std::int64_t rows, std::int64_t columns) {
    return with(
        3, stored("m.weight_shape", SafeDType::i64, {2}, std::vector<std::int64_t>{rows, columns}));
  };
  for (const std::int64_t bad :
       {std::int64_t{-64}, std::int64_t{0}, std::int64_t{1} << 31,
        std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()})
    refused_parts(shape(12, bad), "\"m.weight_shape\" holds [12," + std::to_string(bad) +
                                      "], expected rows and columns of 1 to 2^31 - 1");
  refused_parts(shape(13, 64),
                "\"m.weight_packed\" I32 [12,6] with \"m.weight_scale\" BF16 [12,2] and "
                "\"m.weight_zero_point\" I32 [2,2] for a weight [13,64], " +
                    settings);
  refused_parts(shape(12, 60),
                "\"m.weight_packed\" I32 [12,6] with \"m.weight_scale\" BF16 [12,2] and "
                "\"m.weight_zero_point\" I32 [2,2] for a weight [12,60], " +
                    settings);
  auto indexed = parts;
  indexed.push_back(blank("m.weight_g_idx", SafeDType::i32, {64}));
  refused_parts(indexed,
                "with \"m.weight_g_idx\": the columns of a group lie apart, expected side by side",
                Code::unsupported);
  auto both = parts;
  both.push_back(blank("m.weight", SafeDType::bf16, {12, 64}));
  put_tensors("model.safetensors", both);
  refused(": tensor \"m.weight\": plain and packed, expected one");
  put("config.json", config({weights(3, R"("strategy": "group", "group_size": 32)", true)}));
  refused_parts(parts,
                "\"m.weight_packed\" I32 [12,6] with \"m.weight_scale\" BF16 [12,2] and "
                "\"m.weight_zero_point\" I32 [2,2] for a weight [12,64], expected 3 bits in groups "
                "of 32, symmetric, as config.json says");
}

TEST_F(Compressed, SettingsThatAreRefused) {
  put_tensors("model.safetensors", module());
  const auto refused_config = [&](const std::string& text, const std::string& message,
                                  Code code = Code::unsupported) {
    put("config.json", text);
    refused("/config.json: quantization_config: " + message, code);
  };
  const std::string group = "config_groups: \"group_0\": weights: ";
  refused_config(config({weights(9)}), group + "num_bits 9, expected one of 1 2 3 4 5 6 7 8");
  refused_config(config({weights(3, R"("strategy": "tensor")")}),
                 group + "strategy \"tensor\", expected \"group\"");
  refused_config(config({weights(3, R"("strategy": "group", "group_size": 48)")}),
                 group + "group_size 48, expected one of 16 32 64 128 256 512 1024");
  refused_config(config({R"({"num_bits": 8, "type": "float"})"}),
                 group + "type \"float\", expected \"int\"");
  refused_config(config({"null"}),
                 "config_groups: \"group_0\": no weights, expected an object that says num_bits");
  refused_config(config({R"({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
                             "symmetric": 1})"}),
                 group + "symmetric 1, expected true or false", Code::invalid_argument);
  refused_config(config({}), "empty config_groups, expected at least one", Code::invalid_argument);
  // Other formats are shown as they are stored.
  put("config.json", config({weights(3)}, "nvfp4-pack-quantized"));
  EXPECT_EQ(opened().tensors().size(), 4u);
}

// ---- rows of it, packed and unpacked ----

TEST(ZeroPointRows, ArePackedDownTheRows) {
  for (const int bits : {1, 2, 3, 4, 5, 6, 7, 8})
    for (const std::size_t rows : {1u, 3u, 32u, 37u}) {
      constexpr std::size_t kWide = 3;
      GridRows grid{.bits = bits, .group = 32, .codes = {}, .scales = {}, .biases = {}};
      const auto most = (1u << bits) - 1;
      for (std::size_t i = 0; i < rows * kWide; ++i) {
        const auto zero = static_cast<std::uint32_t>(i * 2654435761u >> 9) & most;
        const float scale = static_cast<float>(1 + i % 5) / 8;
        grid.scales.push_back(scale);
        grid.biases.push_back(0 - scale * static_cast<float>(zero));
        for (std::size_t c = 0; c < 32; ++c)
          grid.codes.push_back(static_cast<std::uint8_t>((i * 7 + c * 5) & most));
      }
      const Storage storage = Storage::affine(bits, 32, SafeDType::f16, Storage::Zeros::packed);
      EncodedRows out;
      ASSERT_TRUE(encode_grid(grid, 32 * kWide, storage, out).ok());
      EXPECT_EQ(out.biases.size(), (rows * static_cast<std::size_t>(bits) + 31) / 32 * kWide * 4);
      const auto n = static_cast<std::int64_t>(rows);
      const CheckpointTensor tensor{.name = "t",
                                    .shape = {n, 32 * kWide},
                                    .storage = storage,
                                    .data = out.data,
                                    .scales = out.scales,
                                    .biases = out.biases,
                                    .group_index = {}};
      GridRows back;
      ASSERT_TRUE(decode_grid(tensor, 0, n, back).ok());
      EXPECT_EQ(back.codes, grid.codes) << bits;
      EXPECT_EQ(back.scales, grid.scales) << bits;
      EXPECT_EQ(back.biases, grid.biases) << bits;
    }
}

TEST(ZeroPointRows, RefusesOtherBiases) {
  const Storage storage = Storage::affine(4, 32, SafeDType::f32, Storage::Zeros::packed);
  for (const auto& [scale, bias] :
       {std::pair(0.5f, 0.25f), std::pair(0.5f, -8.0f), std::pair(0.5f, 0.5f),
        std::pair(0.1f, -0.7f), std::pair(0.0f, 1.0f)}) {
    const GridRows grid{.bits = 4,
                        .group = 32,
                        .first = 9,
                        .codes = std::vector<std::uint8_t>(32),
                        .scales = {scale},
                        .biases = {bias}};
    EncodedRows out;
    const Status status = encode_grid(grid, 32, storage, out);
    EXPECT_EQ(status.code(), Code::unsupported);
    EXPECT_TRUE(std::string(status.message()).starts_with("row 9, columns 0..31: scale ") &&
                std::string(status.message())
                    .ends_with(", expected a bias of -scale times a zero point 0..15"))
        << status.message();
  }
  EXPECT_EQ(zero_point_of(0.5f, -7.5f, 4), 15);
  EXPECT_EQ(zero_point_of(-0.5f, 1.0f, 4), 2);
  EXPECT_EQ(zero_point_of(0.0f, 0.0f, 4), 0);
  EXPECT_EQ(zero_point_of(0.5f, -8.0f, 4), std::nullopt);
  EXPECT_EQ(zero_point_of(1.0f, std::numeric_limits<float>::quiet_NaN(), 4), std::nullopt);
  EXPECT_EQ(zero_point_of(1.0f, -std::numeric_limits<float>::infinity(), 4), std::nullopt);
}

TEST(ZeroPointRows, KeepTheirIntegersWhenScalesAreRounded) {
  GridRows grid{.bits = 4,
                .group = 32,
                .codes = std::vector<std::uint8_t>(64),
                .scales = {1 + 0x1p-12f, 3},
                .biases = {-5 * (1 + 0x1p-12f), -33}};
  EXPECT_GT(round_params(grid, Storage::affine(4, 32, SafeDType::bf16, Storage::Zeros::packed)), 0);
  EXPECT_EQ(grid.scales, (std::vector<float>{1, 3}));
  EXPECT_EQ(grid.biases, (std::vector<float>{-5, -33}));
}

}  // namespace
}  // namespace bittern
