#include "formats/safetensors_layout.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "formats/safetensors_test.h"

namespace bittern {
namespace {

using namespace safetensors_bytes;

// The golden's tensors, in its order of specs.
std::vector<std::string> golden_data() {
  return {"\1\2\3", std::string("\0\0\xc0?\0\0\0\xc0", 8),
          u64(7),   std::string("\0<\0@", 4),
          "",       std::string("\5\0\0\0", 4)};
}

// All in one file.
Result<OutputLayout> one_file(const std::vector<SafetensorsSpec>& specs,
                              SafetensorsMetadata metadata = {}) {
  return lay_out_safetensors("f", specs, ~std::uint64_t{0}, std::move(metadata));
}

TEST(SafetensorsLayout, LaysOutAsPythonDoes) {
  const auto layout = one_file(golden_specs(), {{"format", "np"}});
  ASSERT_TRUE(layout) << layout.status().message();
  EXPECT_EQ(file_text(*layout, golden_data()), golden());
}

TEST(SafetensorsLayout, NothingAtAll) {
  const TempFolder folder;
  const auto layout = one_file({});
  ASSERT_TRUE(layout);
  folder.put("a", file_text(*layout, {}));
  EXPECT_EQ(folder.text_of("a"), file_of("{}      "));
  EXPECT_TRUE(SafetensorsFile::open(folder.path("a")));
}

TEST(SafetensorsLayout, EveryDTypeRoundTrips) {
  const TempFolder folder;
  std::vector<SafetensorsSpec> specs;
  for (int i = 0; i < kSafeDTypeCount; ++i)
    specs.push_back({"t" + std::to_string(i), static_cast<SafeDType>(i), {3, 4}});
  std::vector<std::string> data;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    data.emplace_back(static_cast<std::size_t>(bits_of(specs[i].dtype)) * 12 / 8,
                      static_cast<char>(i + 1));
  }
  const auto layout = one_file(specs);
  ASSERT_TRUE(layout);
  folder.put("a", file_text(*layout, data));
  const auto file = SafetensorsFile::open(folder.path("a"));
  ASSERT_TRUE(file) << file.status().message();
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const SafetensorsTensor* tensor = file->find(specs[i].name);
    ASSERT_NE(tensor, nullptr);
    EXPECT_EQ(tensor->dtype, specs[i].dtype);
    EXPECT_EQ(tensor->shape, specs[i].shape);
    EXPECT_EQ(text(file->bytes(*tensor)), data[i]);
    EXPECT_EQ(tensor->begin % static_cast<std::uint64_t>(std::max(bits_of(tensor->dtype) / 8, 1)),
              0u);
  }
}

TEST(SafetensorsLayout, ShardsAndIndex) {
  const TempFolder folder;
  const std::vector<SafetensorsSpec> specs = {{"d", SafeDType::u8, {4}},
                                              {"c", SafeDType::f32, {1}},
                                              {"big", SafeDType::u8, {20}},
                                              {"none", SafeDType::u8, {0}},
                                              {"a", SafeDType::u8, {5}}};
  std::vector<std::string> data;
  for (std::size_t i = 0; i < specs.size(); ++i)
    data.emplace_back(specs[i].shape[0] * (i == 1 ? 4 : 1), static_cast<char>('0' + i));
  const auto layout = lay_out_safetensors(folder.path(), specs, 8, {{"format", "pt"}});
  ASSERT_TRUE(layout) << layout.status().message();
  for (std::uint32_t i = 0; i < layout->files.size(); ++i)
    folder.put(layout->files[i].name, file_text(*layout, data, i));
  const std::string metadata[] = {"\"total_size\": 33"};
  const auto index = safetensors_index(folder.path(), specs, *layout, metadata);
  ASSERT_TRUE(index) << index.status().message();
  folder.put("model.safetensors.index.json", *index);
  EXPECT_EQ(folder.names(), (std::vector<std::string>{
                                "model-00001-of-00003.safetensors",
                                "model-00002-of-00003.safetensors",
                                "model-00003-of-00003.safetensors",
                                "model.safetensors.index.json",
                            }));
  EXPECT_EQ(folder.text_of("model.safetensors.index.json"), R"({
  "metadata": {
    "total_size": 33
  },
  "weight_map": {
    "a": "model-00003-of-00003.safetensors",
    "big": "model-00002-of-00003.safetensors",
    "c": "model-00001-of-00003.safetensors",
    "d": "model-00001-of-00003.safetensors",
    "none": "model-00003-of-00003.safetensors"
  }
}
)");
  const auto model = SafetensorsFolder::open(folder.path());
  ASSERT_TRUE(model) << model.status().message();
  EXPECT_EQ(model->size(), 5u);
  EXPECT_EQ(text(model->bytes(*model->find("c"))), "1111");
  EXPECT_EQ(text(model->bytes(*model->find("a"))), "44444");
  for (const SafetensorsFile& file : model->files())
    EXPECT_EQ(file.metadata(), (SafetensorsMetadata{{"format", "pt"}}));
}

TEST(SafetensorsLayout, Refuses) {
  // Sizes are checked before it is known which file a tensor goes to.
  const std::string folder = "f", path = "f/model.safetensors";
  const auto message = [&](const std::vector<SafetensorsSpec>& specs,
                           SafetensorsMetadata metadata = {}) {
    return std::string(one_file(specs, std::move(metadata)).status().message());
  };
  const std::uint64_t big = std::uint64_t{1} << 60;
  EXPECT_EQ(message({{"x", SafeDType::u8, {1}}, {"x", SafeDType::u8, {2}}}),
            path + ": tensor \"x\": given twice, expected once");
  EXPECT_EQ(message({{"__metadata__", SafeDType::u8, {1}}}),
            path + ": tensor \"__metadata__\": reserved, expected another name");
  EXPECT_EQ(message({{"\xff", SafeDType::u8, {1}}}),
            path + ": tensor \"\xff\": not UTF-8, expected another name");
  EXPECT_EQ(message({{"x", SafeDType::f4, {1}}}),
            folder + ": tensor \"x\": shape [1] of F4, expected whole bytes");
  const std::string longest(kSafetensorsMaxName, 'n');
  EXPECT_EQ(message({{longest + "n", SafeDType::u8, {1}}}),
            path + ": tensor \"" + longest.substr(0, 120) +
                "...\": a name of 1025 bytes, expected at most 1024");
  EXPECT_EQ(message({{"x", SafeDType::u8, std::vector<std::uint64_t>(9, 1)}}),
            folder + ": tensor \"x\": rank 9, expected at most 8");
  EXPECT_EQ(message({{"x", SafeDType::f64, {big}}}),
            folder +
                ": tensor \"x\": shape [1152921504606846976] of F64, expected less than 2^61 "
                "bytes");
  EXPECT_EQ(message({{"x", SafeDType::u8, {big}}, {"y", SafeDType::u8, {big}}}),
            folder + ": 2^61 bytes or more, expected less");
  EXPECT_EQ(message({}, {{"k", "\xff"}}),
            path + ": __metadata__: \"k\": not UTF-8, expected UTF-8");
  EXPECT_EQ(message({}, {{"k", "1"}, {"k", "2"}}),
            path + ": __metadata__: \"k\": given twice, expected once");
  EXPECT_EQ(lay_out_safetensors(folder, {}, 0).status().message(),
            folder + ": shards of 0 bytes, expected at least 1");
  std::vector<SafetensorsSpec> many;
  for (int i = 0; i < 16385; ++i) many.push_back({std::to_string(i), SafeDType::u8, {1}});
  EXPECT_EQ(lay_out_safetensors(folder, many, 1).status().message(),
            folder + ": 16385 shards, expected at most 16384");
}

}  // namespace
}  // namespace bittern
