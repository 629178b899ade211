#include "formats/gguf_test.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>

namespace bittern {
namespace {

using namespace gguf_bytes;
using oracle::expect_ok;

// ---- types ----

TEST(GgmlTypes, SizesAreThoseOfGgml) {
  // The table of the gguf package 0.19.0; its Q8_1 (40 bytes) is older than ggml's two halves.
  constexpr struct {
    const char* name;
    std::uint32_t id, block, bytes;
  } kPackage[] = {
      {"F32", 0, 1, 4},         {"F16", 1, 1, 2},         {"Q4_0", 2, 32, 18},
      {"Q4_1", 3, 32, 20},      {"Q5_0", 6, 32, 22},      {"Q5_1", 7, 32, 24},
      {"Q8_0", 8, 32, 34},      {"Q8_1", 9, 32, 40},      {"Q2_K", 10, 256, 84},
      {"Q3_K", 11, 256, 110},   {"Q4_K", 12, 256, 144},   {"Q5_K", 13, 256, 176},
      {"Q6_K", 14, 256, 210},   {"Q8_K", 15, 256, 292},   {"IQ2_XXS", 16, 256, 66},
      {"IQ2_XS", 17, 256, 74},  {"IQ3_XXS", 18, 256, 98}, {"IQ1_S", 19, 256, 50},
      {"IQ4_NL", 20, 32, 18},   {"IQ3_S", 21, 256, 110},  {"IQ2_S", 22, 256, 82},
      {"IQ4_XS", 23, 256, 136}, {"I8", 24, 1, 1},         {"I16", 25, 1, 2},
      {"I32", 26, 1, 4},        {"I64", 27, 1, 8},        {"F64", 28, 1, 8},
      {"IQ1_M", 29, 256, 56},   {"BF16", 30, 1, 2},       {"TQ1_0", 34, 256, 54},
      {"TQ2_0", 35, 256, 66},   {"MXFP4", 39, 32, 17},    {"NVFP4", 40, 64, 36},
      {"Q1_0", 41, 128, 18},
  };
  std::size_t known = 0;
  for (std::uint32_t id = 0; id < 256; ++id) known += ggml_type(id) != nullptr;
  EXPECT_EQ(std::size(kPackage), known);
  for (const auto& [name, id, block, bytes] : kPackage) {
    const GgmlTypeInfo* t = ggml_type(id);
    ASSERT_NE(t, nullptr) << name;
    EXPECT_STREQ(t->name, name);
    EXPECT_EQ(t->block, block) << name;
    EXPECT_EQ(t->block_bytes, id == 9 ? 36 : bytes) << name;
    EXPECT_EQ(ggml_type(std::string_view(name)), t);
  }
  for (const std::uint32_t id : {4u, 5u, 31u, 36u, 42u, ~0u}) EXPECT_EQ(ggml_type(id), nullptr);
  EXPECT_EQ(ggml_type("q4_k")->type, GgmlType::q4_k);
  EXPECT_EQ(ggml_type("q4_"), nullptr);
  EXPECT_EQ(ggml_type(""), nullptr);
}

TEST(GgmlTypes, Bytes) {
  EXPECT_EQ(*ggml_bytes(GgmlType::q4_k, {3, 512}), 3 * 2 * 144u);
  EXPECT_EQ(*ggml_bytes(GgmlType::f32, {}), 4u);
  EXPECT_EQ(*ggml_bytes(GgmlType::q8_0, {0, 32}), 0u);
  EXPECT_EQ(*ggml_bytes(GgmlType::q8_0, {4, 0}), 0u);
  const auto message = [](GgmlType t, const Shape& s) {
    return std::string(ggml_bytes(t, s).status().message());
  };
  EXPECT_EQ(message(GgmlType::f32, {1, 1, 1, 1, 1}), "rank 5, expected at most 4");
  EXPECT_EQ(message(GgmlType::q4_k, {2, 128}),
            "row of 128 elements of Q4_K, expected a multiple of 256");
  EXPECT_EQ(message(GgmlType{4}, {32}), "type 4, expected one that ggml has");
  EXPECT_EQ(message(GgmlType::f32, {-1, 2}), "dimension -1, expected at least 0");
  constexpr std::int64_t kBig = std::int64_t{1} << 40;
  EXPECT_EQ(message(GgmlType::f32, {kBig, kBig}),
            "shape [1099511627776,1099511627776], expected fewer than 2^63 bytes");
  EXPECT_EQ(message(GgmlType::f32, {0, kBig, kBig}),
            "shape [0,1099511627776,1099511627776], expected fewer than 2^63 bytes");
  EXPECT_EQ(message(GgmlType::f64, {std::int64_t{1} << 61}),
            "shape [2305843009213693952], expected fewer than 2^63 bytes");
}

// ---- the peer's file ----

TEST_F(Gguf, ReadsWhatThePackageWrites) {
  const GgufFile file = parsed(python_file());
  EXPECT_EQ(file.version(), 3u);
  EXPECT_EQ(file.alignment(), 32u);
  EXPECT_EQ(file.keys().size(), 18u);
  EXPECT_EQ(file.keys()[0].key, "general.architecture");
  EXPECT_EQ(*file.string("general.architecture"), "llama");
  EXPECT_EQ(*file.uint("t.u8"), 200u);
  EXPECT_EQ(*file.integer("t.s8"), -100);
  EXPECT_EQ(*file.uint("t.u16"), 60000u);
  EXPECT_EQ(*file.integer("t.s16"), -30000);
  EXPECT_EQ(*file.uint("t.u32"), 4000000000u);
  EXPECT_EQ(*file.integer("t.s32"), -2000000000);
  EXPECT_EQ(*file.uint("t.u64"), (std::uint64_t{1} << 63) + 5);
  EXPECT_EQ(*file.integer("t.s64"), -(std::int64_t{1} << 62));
  EXPECT_EQ(*file.number("t.f32"), 0.15625);
  EXPECT_EQ(*file.number("t.f64"), 0.1);
  EXPECT_EQ(*file.boolean("t.bool"), true);
  EXPECT_EQ(*file.string("t.string"),
            "Gr\xc3\xbc\xc3\x9f"
            "e");
  EXPECT_EQ(*file.integers("t.ints"), (std::vector<std::int64_t>{1, -2, 3}));
  EXPECT_EQ(*file.strings("t.strings"), (std::vector<std::string_view>{"a", "", "ccc"}));
  EXPECT_EQ(*file.numbers("t.floats"), (std::vector<double>{0.5, -1.5}));
  EXPECT_EQ(file.array("t.bools")->element(), GgufType::boolean);
  EXPECT_EQ(*file.array("t.bools")->at(1).as_bool(), false);
  std::vector<std::vector<std::int64_t>> nested;
  file.array("t.nested")->each([&](const GgufValue& row) {
    nested.emplace_back();
    row.each([&](const GgufValue& x) { nested.back().push_back(*x.as_integer()); });
  });
  EXPECT_EQ(nested, (std::vector<std::vector<std::int64_t>>{{1, 2}, {3}}));

  ASSERT_EQ(file.tensors().size(), 2u);
  const GgufTensor& a = file.tensors()[0];
  EXPECT_EQ(a.name, "a.weight");
  EXPECT_EQ(a.type, GgmlType::f32);
  EXPECT_EQ(a.shape, (Shape{2, 3}));
  float values[6];
  ASSERT_EQ(a.bytes.size(), sizeof values);
  std::memcpy(values, a.bytes.data(), sizeof values);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(values[i], static_cast<float>(i));
  const GgufTensor* b = file.tensor("b.weight");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->type, GgmlType::q8_0);
  EXPECT_EQ(b->shape, (Shape{2, 32}));
  EXPECT_EQ(b->bytes.size(), 68u);
  EXPECT_EQ(std::to_integer<int>(b->bytes[2]), 0x81);  // -127: the least of the first row
  EXPECT_EQ(file.tensor("c.weight"), nullptr);
}

// Keys copied, tensors copied: the file again, bit for bit.
TEST_F(Gguf, WritesWhatThePackageWrites) {
  const GgufFile file = parsed(python_file());
  GgufContents copy(path("copy.gguf"));
  for (const auto& [name, value] : file.keys()) expect_ok(copy.add(name, GgufData(value)));
  std::vector<Bytes> data;
  for (const GgufTensor& t : file.tensors()) {
    expect_ok(copy.add_tensor(t.name, t.type, t.shape));
    data.emplace_back(reinterpret_cast<const char*>(t.bytes.data()), t.bytes.size());
  }
  EXPECT_EQ(copy.file_bytes(), python_file().size());
  EXPECT_EQ(file_text(copy.lay_out(), data), python_file());
}

// ---- round trips ----

TEST_F(Gguf, RoundTripOfEveryType) {
  const std::string_view words[] = {"one", "", "three\n"};
  const std::int16_t shorts[] = {-3, 300};
  const bool flags[] = {true, false, true};
  const std::pair<const char*, GgufData> values[] = {
      {"u8", GgufData(std::uint8_t{255})},
      {"s8", GgufData(std::int8_t{-128})},
      {"u16", GgufData(std::uint16_t{65535})},
      {"s16", GgufData(std::int16_t{-32768})},
      {"u32", GgufData(~std::uint32_t{0})},
      {"s32", GgufData(std::int32_t{-7})},
      {"f32", GgufData(0.1f)},
      {"bool", GgufData(false)},
      {"string", GgufData("text")},
      {"u64", GgufData(~std::uint64_t{0})},
      {"s64", GgufData(std::int64_t{-9})},
      {"f64", GgufData(0.1)},
      {"array", GgufData::array<std::int16_t>(shorts)},
      {"array of bool", GgufData::array<bool>(flags)},
      {"array of string", GgufData::strings(words)},
      {"empty", GgufData::array<double>({})},
  };
  GgufContents contents(path());
  expect_ok(contents.add("general.alignment", GgufData(std::uint32_t{64})));
  std::set<GgufType> types;
  for (const auto& [name, value] : values) {
    expect_ok(contents.add(name, value));
    types.insert(value.type());
  }
  EXPECT_EQ(types.size(), kGgufTypeCount);
  expect_ok(contents.add_tensor("first", GgmlType::f16, {3, 5}));
  expect_ok(contents.add_tensor("none", GgmlType::f32, {0, 4}));
  expect_ok(contents.add_tensor("scalar", GgmlType::f64, {}));
  expect_ok(contents.add_tensor("last", GgmlType::q4_k, {2, 1, 1, 256}));
  const std::vector<Bytes> data = {Bytes(30, 'x'), "", Bytes(8, 'x'), Bytes(288, 'x')};
  put(file_text(contents.lay_out(), data));
  EXPECT_EQ(get().size(), contents.file_bytes());

  const GgufFile file = opened();
  EXPECT_EQ(file.alignment(), 64u);
  ASSERT_EQ(file.keys().size(), std::size(values) + 1);
  for (const auto& [name, value] : values) {
    const GgufValue* read = file.find(name);
    ASSERT_NE(read, nullptr) << name;
    EXPECT_EQ(read->type(), value.type()) << name;
    EXPECT_TRUE(std::ranges::equal(read->encoded(), value.encoded())) << name;
  }
  EXPECT_EQ(file.find("f32")->as_number(), double{0.1f});
  EXPECT_EQ(*file.strings("array of string"), (std::vector<std::string_view>(words, words + 3)));
  EXPECT_EQ(*file.numbers("array"), (std::vector<double>{-3, 300}));
  EXPECT_EQ(file.numbers("empty")->size(), 0u);
  ASSERT_EQ(file.tensors().size(), 4u);
  for (const GgufTensor& t : file.tensors()) {
    EXPECT_TRUE(std::ranges::all_of(t.bytes, [](std::byte b) { return b == std::byte{'x'}; }));
    EXPECT_EQ((t.bytes.data() - file.parts()[0].bytes().data()) % 64, 0) << t.name;
  }
  EXPECT_EQ(file.tensor("scalar")->shape, Shape());
  EXPECT_EQ(file.tensor("last")->shape, (Shape{2, 1, 1, 256}));
  EXPECT_NE(use(file), 0u);
}

TEST_F(Gguf, NoKeysNoTensors) {
  put(file_text(GgufContents(path()).lay_out(), {}));
  EXPECT_EQ(get().size(), 32u);
  EXPECT_EQ(opened().keys().size(), 0u);
  EXPECT_EQ(parsed(header(0, 0)).tensors().size(), 0u);
}

TEST_F(Gguf, VersionTwo) {
  const GgufFile file = parsed(
      with_data(header(1, 1, 2) + key("a", GgufType::u8, "\7") + tensor("t", {4, 3, 2}, 0, 0), 96));
  EXPECT_EQ(file.version(), 2u);
  EXPECT_EQ(*file.uint("a"), 7u);
  EXPECT_EQ(file.tensors()[0].shape, (Shape{2, 3, 4}));
}

// Gaps, any order of offsets, and no padding after the last are all within the format.
TEST_F(Gguf, OffsetsInAnyOrder) {
  const Bytes bytes = with_data(
      header(3, 0) + tensor("b", {1}, 0, 96) + tensor("a", {4}, 0, 0) + tensor("n", {0}, 0, 0),
      100);
  const GgufFile file = parsed(bytes);
  EXPECT_EQ(file.tensors()[0].bytes.data() - file.tensors()[1].bytes.data(), 96);
  EXPECT_EQ(file.tensors()[2].bytes.size(), 0u);
}

// ---- getters ----

TEST_F(Gguf, GettersNameFileAndKey) {
  const GgufFile file = parsed(python_file());
  const auto says = [&](const auto& result, const std::string& message) {
    expect_error(result.status(), message);
  };
  says(file.uint("no"), "key no: missing, expected an unsigned integer");
  says(file.uint("t.s8"), "key t.s8: s8 -100, expected an unsigned integer");
  says(file.uint("t.string"), "key t.string: string, expected an unsigned integer");
  says(file.uint("t.bool"), "key t.bool: bool true, expected an unsigned integer");
  says(file.uint("t.f32"), "key t.f32: f32, expected an unsigned integer");
  says(file.integer("t.u64"), "key t.u64: u64 9223372036854775813, expected an integer within s64");
  says(file.number("t.string"), "key t.string: string, expected a number");
  says(file.boolean("t.u8"), "key t.u8: u8 200, expected a bool");
  says(file.string("t.u8"), "key t.u8: u8 200, expected a string");
  says(file.array("t.u8"), "key t.u8: u8 200, expected an array");
  says(file.strings("t.ints"), "key t.ints: array of s32, expected an array of string");
  says(file.integers("t.floats"), "key t.floats: array of f32, expected an array of integers");
  says(file.numbers("t.nested"), "key t.nested: array of array, expected an array of numbers");
  EXPECT_EQ(*file.numbers("t.ints"), (std::vector<double>{1, -2, 3}));
}

TEST_F(Gguf, IntegersOutOfRangeAndTooMany) {
  const Bytes big = key("big", GgufType::array, u32(10) + u64(1) + u64(~0ull));
  const Bytes many = key("many", GgufType::array, u32(0) + u64(4194305) + Bytes(4194305, '\1'));
  const GgufFile file = parsed(header(0, 2) + big + many);
  expect_error(file.integers("big").status(),
               "key big: u64 18446744073709551615, expected integers within s64");
  expect_error(file.numbers("many").status(),
               "key many: 4194305 elements, expected at most 4194304");
  EXPECT_EQ(*file.array("many")->at(4194304).as_uint(), 1u);
}

TEST_F(Gguf, TypesThatAreListedButNotRead) {
  const GgufFile file = parsed(with_data(header(1, 0) + tensor("blk.0.x", {256}, 17, 0), 74));
  EXPECT_EQ(file.tensors()[0].bytes.size(), 74u);
  EXPECT_FALSE(info(file.tensors()[0].type).readable);
}

// ---- what cannot be written ----

TEST_F(Gguf, WriterRefuses) {
  GgufContents w(path());
  expect_ok(w.add("a", GgufData(1)));
  expect_error(w.add("a", GgufData(2)), "key a: given twice, expected once");
  expect_error(w.add("", GgufData(2)), "key : a name of 0 bytes, expected 1..65535");
  expect_error(w.add("general.alignment", GgufData(std::uint32_t{24})),
               "key general.alignment: u32 24, expected a u32 that is a power of two");
  expect_error(w.add("general.alignment", GgufData(32)),
               "key general.alignment: s32, expected a u32 that is a power of two");
  expect_error(w.add_tensor(Bytes(64, 't'), GgmlType::f32, {1}),
               "tensor " + Bytes(64, 't') + ": a name of 64 bytes, expected 1..63");
  expect_error(w.add_tensor("t", GgmlType::q6_k, {2, 32}),
               "tensor t: row of 32 elements of Q6_K, expected a multiple of 256");
  expect_ok(w.add_tensor("t", GgmlType::f32, {2}));
  expect_ok(w.add_tensor("u", GgmlType::f32, {1}));
  expect_error(w.add_tensor("t", GgmlType::f32, {1}), "tensor t: given twice, expected once");

  expect_error(w.add_tensor("v", GgmlType::i8, {(std::int64_t{1} << 62) - 12}),
               "tensor v: 4611686018427387892 bytes, expected fewer than 2^62 in all");
}

}  // namespace
}  // namespace bittern
