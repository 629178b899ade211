#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "formats/gguf_contents.h"
#include "formats/test_folder.h"
#include "oracle/status_test.h"

namespace bittern {
namespace {

namespace fs = std::filesystem;
using oracle::expect_ok;
using Bytes = std::string;

// Written by the gguf package 0.19.0:
//   w = gguf.GGUFWriter("py.gguf", "llama")
//   w.add_uint8("t.u8", 200); w.add_int8("t.s8", -100); w.add_uint16("t.u16", 60000)
//   w.add_int16("t.s16", -30000); w.add_uint32("t.u32", 4000000000)
//   w.add_int32("t.s32", -2000000000); w.add_uint64("t.u64", 2**63 + 5)
//   w.add_int64("t.s64", -2**62); w.add_float32("t.f32", 0.15625); w.add_float64("t.f64", 0.1)
//   w.add_bool("t.bool", True); w.add_string("t.string", "Gr\u00fc\u00dfe")
//   w.add_array("t.ints", [1, -2, 3]); w.add_array("t.strings", ["a", "", "ccc"])
//   w.add_array("t.floats", [0.5, -1.5]); w.add_array("t.bools", [True, False])
//   w.add_array("t.nested", [[1, 2], [3]])
//   w.add_tensor("a.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
//   q8 = gguf.GGMLQuantizationType.Q8_0
//   x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
//   w.add_tensor("b.weight", gguf.quants.quantize(x, q8), raw_dtype=q8)
constexpr std::string_view kPythonHex =
    "474755460300000002000000000000001200000000000000140000000000000067656e6572616c2e617263686974"
    "6563747572650800000005000000000000006c6c616d610400000000000000742e753800000000c8040000000000"
    "0000742e7338010000009c0500000000000000742e7531360200000060ea0500000000000000742e733136030000"
    "00d08a0500000000000000742e7533320400000000286bee0500000000000000742e73333205000000006cca8805"
    "00000000000000742e7536340a00000005000000000000800500000000000000742e7336340b0000000000000000"
    "0000c00500000000000000742e663332060000000000203e0500000000000000742e6636340c0000009a99999999"
    "99b93f0600000000000000742e626f6f6c07000000010800000000000000742e737472696e670800000007000000"
    "000000004772c3bcc39f650600000000000000742e696e74730900000005000000030000000000000001000000fe"
    "ffffff030000000900000000000000742e737472696e677309000000080000000300000000000000010000000000"
    "000061000000000000000003000000000000006363630800000000000000742e666c6f6174730900000006000000"
    "02000000000000000000003f0000c0bf0700000000000000742e626f6f6c73090000000700000002000000000000"
    "0001000800000000000000742e6e6573746564090000000900000002000000000000000500000002000000000000"
    "000100000002000000050000000100000000000000030000000800000000000000612e7765696768740200000003"
    "0000000000000002000000000000000000000000000000000000000800000000000000622e776569676874020000"
    "00200000000000000002000000000000000800000020000000000000000000000000000000000000000000000000"
    "0000000000000000000000000000000000000000803f0000004000004040000080400000a0400000000000000000"
    "08208185898d9195999da1a5a9adb1b5b9bdc2c6caced2d6dadee2e6eaeef2f6fafe082002060a0e12161a1e2226"
    "2a2e32363a3e43474b4f53575b5f63676b6f73777b7f000000000000000000000000000000000000000000000000"
    "00000000";

Bytes from_hex(std::string_view hex) {
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  Bytes out;
  for (std::size_t i = 0; i < hex.size(); i += 2)
    out += static_cast<char>(digit(hex[i]) * 16 + digit(hex[i + 1]));
  return out;
}
Bytes python_file() { return from_hex(kPythonHex); }

class Gguf : public TestFolder {
 protected:
  // In place of the folder's own.
  std::string path(const std::string& name = "m.gguf") const { return TestFolder::path(name); }
  void put(const Bytes& bytes, const std::string& name = "m.gguf") const {
    TestFolder::put(name, bytes);
  }
  Bytes get(const std::string& name = "m.gguf") const { return text_of(name); }
  GgufFile opened(const std::string& name = "m.gguf") const {
    auto file = GgufFile::open(path(name));
    EXPECT_TRUE(file.ok()) << file.status().message();
    return file.ok() ? std::move(*file) : GgufFile();
  }
  GgufFile parsed(const Bytes& bytes) const {
    put(bytes);
    return opened();
  }
  // The message after "FOLDER/m.gguf: ".
  void refused(const Bytes& bytes, const std::string& message,
               Code code = Code::invalid_argument) const {
    put(bytes);
    expect_error(GgufFile::open(path()).status(), message, code);
  }
  void expect_error(const Status& status, const std::string& message,
                    Code code = Code::invalid_argument, const std::string& name = "m.gguf") const {
    oracle::expect_error(status, code, path(name) + ": " + message);
  }

  void expect_one_line(const Status& status) const {
    const std::string_view message = status.message();
    EXPECT_TRUE(message.starts_with(path() + ": ")) << message;
    EXPECT_NE(message.find(", expected "), message.npos) << message;
    EXPECT_EQ(message.find('\n'), message.npos) << message;
  }
};

// ---- files by hand ----

template <class T>
Bytes le(T x) {
  return {reinterpret_cast<const char*>(&x), sizeof x};
}
Bytes u32(std::uint32_t x) { return le(x); }
Bytes u64(std::uint64_t x) { return le(x); }
Bytes str(std::string_view s) { return u64(s.size()) + Bytes(s); }
Bytes header(std::uint64_t tensors, std::uint64_t keys, std::uint32_t version = 3) {
  return "GGUF" + u32(version) + u64(tensors) + u64(keys);
}
Bytes key(std::string_view name, GgufType type, const Bytes& value) {
  return str(name) + u32(static_cast<std::uint32_t>(type)) + value;
}
// dims innermost first, as in the file
Bytes tensor(std::string_view name, const std::vector<std::uint64_t>& dims, std::uint32_t type,
             std::uint64_t offset) {
  Bytes out = str(name) + u32(static_cast<std::uint32_t>(dims.size()));
  for (const std::uint64_t d : dims) out += u64(d);
  return out + u32(type) + u64(offset);
}
Bytes with_data(Bytes bytes, std::size_t data, std::size_t alignment = 32) {
  bytes.resize((bytes.size() + alignment - 1) / alignment * alignment);
  return bytes + Bytes(data, 'd');
}

// Asks a file everything; what it holds must be consistent, whatever the bytes were.
std::uint64_t use(const GgufValue& value) {
  std::uint64_t sum = value.size();
  if (const auto x = value.as_uint()) sum += *x;
  if (const auto x = value.as_integer()) sum += static_cast<std::uint64_t>(*x);
  if (const auto x = value.as_number()) sum += *x != 0;
  if (const auto x = value.as_bool()) sum += *x;
  if (const auto x = value.as_string()) {
    for (const char c : *x) sum += static_cast<unsigned char>(c);
  }
  if (value.type() == GgufType::array) value.each([&](const GgufValue& x) { sum += use(x); });
  EXPECT_EQ(GgufData(value).encoded().size(), value.encoded().size());
  return sum;
}
std::uint64_t use(const GgufFile& file) {
  std::uint64_t sum = 0;
  for (const auto& [name, value] : file.keys()) {
    sum += use(value);
    EXPECT_NE(file.find(name), nullptr);
    sum += file.uint(name).ok() + file.integer(name).ok() + file.number(name).ok() +
           file.boolean(name).ok() + file.string(name).ok() + file.array(name).ok() +
           file.strings(name).ok() + file.integers(name).ok() + file.numbers(name).ok();
  }
  for (const GgufTensor& t : file.tensors()) {
    EXPECT_EQ(file.tensor(t.name), &t);
    EXPECT_EQ(*ggml_bytes(t.type, t.shape), t.bytes.size());
    for (const std::byte b : t.bytes) sum += std::to_integer<unsigned>(b);
    sum += file.readable(t).ok();
  }
  return sum;
}

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
  EXPECT_EQ(std::size(kPackage), ggml_types().size());
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
  const GgufData rows[] = {GgufData::array<std::int16_t>(shorts), GgufData::strings(words),
                           GgufData::array<bool>({})};
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
      {"array of array", GgufData::arrays(rows)},
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
  says(file.uint("no"), "key no: not there, expected an unsigned integer");
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
  expect_error(file.readable(file.tensors()[0]), "unsupported type IQ2_XS in tensor blk.0.x",
               Code::unsupported);
}

// ---- errors ----

TEST_F(Gguf, HeaderErrors) {
  expect_error(GgufFile::open(path("no.gguf")).status(), "no such file or folder",
               Code::unavailable, "no.gguf");
  refused("", "empty, expected at least one byte");
  refused("GG", "starts with 'GG', expected 'GGUF'");
  refused(
      "\x7f"
      "ELF....",
      "starts with '\\x7fELF', expected 'GGUF'");
  refused("GGUF\3", "header: 4 bytes at byte 4, expected at most the 1 left in the file");
  refused(header(0, 0, 1), "version 1, expected 2 or 3", Code::unsupported);
  refused(header(0, 0, 4), "version 4, expected 2 or 3", Code::unsupported);
  refused(header(0, 0, 0x03000000), "big endian, expected little endian", Code::unsupported);
  refused(header(1ull << 60, 0),
          "1152921504606846976 tensors, expected at most 0 in a file of 24 bytes");
  refused(header(0, 1ull << 60) + Bytes(28, 'x'),
          "1152921504606846976 keys, expected at most 2 in a file of 52 bytes");
  refused(header(0, 65537) + Bytes(1 << 20, 'x'),
          "65537 keys, expected at most 65536 in a file of 1048600 bytes");
  refused(header(262145, 0) + Bytes(7 << 20, 'x'),
          "262145 tensors, expected at most 262144 in a file of 7340056 bytes");
}

TEST_F(Gguf, KeyErrors) {
  const auto one = [](const Bytes& bytes) { return header(0, 1) + bytes; };
  const Bytes rest(16, 'x');
  refused(one(u64(1ull << 60) + rest),
          "key 1: 1152921504606846976 bytes at byte 32, expected at most the 16 left in the file");
  refused(one(str("") + rest), "key 1: a name of 0 bytes, expected 1..65535");
  refused(one(str(Bytes(65536, 'k')) + rest), "key 1: a name of 65536 bytes, expected 1..65535");
  refused(one(str("a") + u32(13) + rest), "key a: type 13, expected 0..12");
  refused(one(str("a\n\\") + u32(13) + rest), "key a\\x0a\\x5c: type 13, expected 0..12");
  refused(one(str(Bytes(100, 'k')) + u32(13)),
          "key " + Bytes(80, 'k') + "...: type 13, expected 0..12");
  refused(one(key("long", GgufType::u64, "1234567")),
          "key long: 8 bytes at byte 40, expected at most the 7 left in the file");
  refused(one(key("a", GgufType::boolean, "\2")), "key a: bool of value 2, expected 0 or 1");
  refused(one(key("a", GgufType::array, u32(7) + u64(2) + Bytes("\1\xff", 2))),
          "key a: bool of value 255, expected 0 or 1");
  refused(one(key("a", GgufType::string, u64(~0ull))),
          "key a: 18446744073709551615 bytes at byte 45, expected at most the 0 left in the file");
  refused(one(key("a", GgufType::array, u32(99) + u64(0))), "key a: type 99, expected 0..12");
  refused(one(key("a", GgufType::array, u32(4) + u64((1ull << 62) + 1) + rest)),
          "key a: array of 4611686018427387905 u32, expected at most 4 in the rest of the file");
  refused(one(key("a", GgufType::array, u32(8) + u64(3) + rest)),
          "key a: array of 3 string, expected at most 2 in the rest of the file");
  refused(one(key("a", GgufType::array, u32(9) + u64(2) + rest)),
          "key a: array of 2 array, expected at most 1 in the rest of the file");
  Bytes deep;
  for (int i = 0; i < 3; ++i) deep += u32(9) + u64(1);
  EXPECT_EQ(parsed(one(key("a", GgufType::array, deep + u32(0) + u64(1) + "x"))).keys().size(), 1u);
  refused(one(key("a", GgufType::array, deep + u32(9) + u64(1) + u32(0) + u64(0))),
          "key a: arrays nested more than 4 deep, expected at most that");
  const Bytes byte = key("a", GgufType::u8, "x");
  refused(header(0, 3) + byte + key("b", GgufType::u8, "x") + byte,
          "key a: given twice, expected once");
}

TEST_F(Gguf, AlignmentErrors) {
  const auto with = [](GgufType type, const Bytes& value) {
    return header(0, 1) + key("general.alignment", type, value);
  };
  const std::string expected = ", expected a u32 that is a power of two";
  refused(with(GgufType::u32, u32(0)), "key general.alignment: u32 0" + expected);
  refused(with(GgufType::u32, u32(48)), "key general.alignment: u32 48" + expected);
  refused(with(GgufType::u64, u64(32)), "key general.alignment: u64 32" + expected);
  refused(with(GgufType::string, str("x")), "key general.alignment: string" + expected);
  EXPECT_EQ(parsed(with(GgufType::u32, u32(1u << 31))).alignment(), 1u << 31);
}

TEST_F(Gguf, TensorErrors) {
  const auto one = [](const Bytes& info) { return with_data(header(1, 0) + info, 128); };
  refused(one(str("") + Bytes(32, 'x')), "tensor 1: a name of 0 bytes, expected 1..64");
  refused(one(tensor(Bytes(65, 't'), {1}, 0, 0)), "tensor 1: a name of 65 bytes, expected 1..64");
  EXPECT_EQ(parsed(one(tensor(Bytes(64, 't'), {1}, 0, 0))).tensors().size(), 1u);
  refused(one(tensor("t", {1, 1, 1, 1, 1}, 0, 0)), "tensor t: rank 5, expected at most 4");
  refused(one(tensor("t", {1ull << 63}, 0, 0)),
          "tensor t: dimension 9223372036854775808, expected at most 9223372036854775807");
  refused(one(tensor("t", {1ull << 32, 1ull << 32}, 0, 0)),
          "tensor t: shape [4294967296,4294967296], expected fewer than 2^63 bytes");
  refused(one(tensor("t", {32}, 4, 0)), "tensor t: type 4, expected one that ggml has",
          Code::unsupported);
  refused(one(tensor("t", {33, 2}, 2, 0)),
          "tensor t: row of 33 elements of Q4_0, expected a multiple of 32");
  refused(one(tensor("t", {1}, 0, 16)), "tensor t: offset 16, expected a multiple of 32");
  refused(one(tensor("t", {1}, 0, 128)),
          "tensor t: 4 bytes at offset 128, expected within the 128 bytes of data");
  refused(one(tensor("t", {33}, 0, 0)),
          "tensor t: 132 bytes at offset 0, expected within the 128 bytes of data");
  refused(
      one(tensor("t", {1}, 0, ~31ull)),
      "tensor t: 4 bytes at offset 18446744073709551584, expected within the 128 bytes of data");
  refused(header(1, 0) + tensor("t", {1}, 0, 0),
          "tensor t: 4 bytes at offset 0, expected within the 0 bytes of data");
  refused(header(1, 0) + str("tens") + u32(2) + Bytes(12, '\1'),
          "tensor tens: 8 bytes at byte 48, expected at most the 4 left in the file");
  refused(with_data(header(2, 0) + tensor("a", {12}, 0, 0) + tensor("b", {1}, 0, 32), 64),
          "tensor b: offset 32 lies within tensor a, expected no overlap");
  refused(with_data(header(2, 0) + tensor("a", {1}, 0, 32) + tensor("b", {12}, 0, 0), 64),
          "tensor a: offset 32 lies within tensor b, expected no overlap");
  refused(with_data(header(2, 0) + tensor("a", {1}, 0, 0) + tensor("b", {1}, 0, 0), 64),
          "tensor b: offset 0 lies within tensor a, expected no overlap");
  refused(with_data(header(2, 0) + tensor("a", {1}, 0, 0) + tensor("a", {1}, 0, 32), 64),
          "tensor a: given twice, expected once");
}

// The count of tensors is held against what the keys have left, too.
TEST_F(Gguf, TensorCountAfterKeys) {
  refused(header(2, 1) + key("a", GgufType::string, str(Bytes(60, 'x'))),
          "2 tensors, expected at most 0 in a file of 105 bytes");
}

// ---- hostile files ----

TEST_F(Gguf, TruncatedAnywhere) {
  std::size_t last = 0;
  {
    const GgufFile file = parsed(python_file());
    const std::span<const std::byte> b = file.tensor("b.weight")->bytes;
    last = static_cast<std::size_t>(b.data() + b.size() - file.parts()[0].bytes().data());
  }
  for (std::size_t n = python_file().size(); n-- > 0;) {
    fs::resize_file(path(), n);
    const auto cut = GgufFile::open(path());
    EXPECT_EQ(cut.ok(), n >= last) << n;
    if (cut.ok()) {
      use(*cut);
    } else {
      expect_one_line(cut.status());
    }
  }
}

TEST_F(Gguf, EveryByteChanged) {
  const Bytes whole = python_file();
  put(whole);
  std::fstream file(path(), std::ios::binary | std::ios::in | std::ios::out);
  const auto set = [&](std::size_t i, int value) {
    file.seekp(static_cast<std::streamoff>(i));
    file.put(static_cast<char>(value)).flush();
  };
  int ok = 0;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    for (const int flip : {1, 2, 4, 8, 16, 32, 64, 128, 255}) {
      set(i, whole[i] ^ flip);
      const auto changed = GgufFile::open(path());
      if (changed.ok()) {
        ++ok;
        use(*changed);
      } else {
        expect_one_line(changed.status());
      }
    }
    set(i, whole[i]);
  }
  EXPECT_GT(ok, 0);
  EXPECT_EQ(get(), whole);
}

// ---- split files ----

class GgufSplit : public Gguf {
 protected:
  static std::string name(int part, int count = 3) {
    char out[64];
    std::snprintf(out, sizeof out, "m-%05d-of-%05d.gguf", part + 1, count);
    return out;
  }
  struct Part {
    int no, count, total;
    std::string tensor;
  };
  void write(const Part& part, const std::string& name) const {
    GgufContents contents(path(name));
    if (part.no == 0) expect_ok(contents.add("general.architecture", GgufData("llama")));
    if (part.no >= 0)
      expect_ok(contents.add("split.no", GgufData(static_cast<std::uint16_t>(part.no))));
    expect_ok(contents.add("split.count", GgufData(static_cast<std::uint16_t>(part.count))));
    if (part.total >= 0)
      expect_ok(contents.add("split.tensors.count", GgufData(std::int32_t{part.total})));
    expect_ok(contents.add_tensor(part.tensor, GgmlType::i8, {3}));
    put(file_text(contents.lay_out(), std::vector<Bytes>{part.tensor.substr(0, 3)}), name);
  }
  void write_all() const {
    for (int i = 0; i < 3; ++i) write({i, 3, 3, "abc" + std::to_string(i)}, name(i));
  }
  Status open(int part = 0) const { return GgufFile::open(path(name(part))).status(); }
};

TEST_F(GgufSplit, OpensAllFromAny) {
  write_all();
  for (int from = 0; from < 3; ++from) {
    const GgufFile file = opened(name(from));
    EXPECT_EQ(file.path(), path(name(from)));
    ASSERT_EQ(file.parts().size(), 3u);
    EXPECT_EQ(*file.string("general.architecture"), "llama");
    ASSERT_EQ(file.tensors().size(), 3u);
    for (std::uint32_t i = 0; i < 3; ++i) {
      const GgufTensor& t = file.tensors()[i];
      EXPECT_EQ(t.name, "abc" + std::to_string(i));
      EXPECT_EQ(t.part, i);
      EXPECT_EQ(t.bytes[2], std::byte{'c'});
      EXPECT_EQ(file.tensor(t.name), &t);
    }
    expect_error(file.uint("no").status(), "key no: not there, expected an unsigned integer",
                 Code::invalid_argument, name(0));
    expect_error(file.readable(file.tensors()[1]), "unsupported type I8 in tensor abc1",
                 Code::unsupported, name(1));
  }
  auto alone = GgufFile::open(path(name(1)), true);
  ASSERT_TRUE(alone.ok());
  EXPECT_EQ(alone->tensors().size(), 1u);
}

TEST_F(GgufSplit, MissingPartIsNamed) {
  write_all();
  fs::remove(path(name(1)));
  for (const int from : {0, 2}) {
    expect_error(open(from), "no such file or folder, expected part 2 of 3 of " + path("m"),
                 Code::unavailable, name(1));
  }
  EXPECT_TRUE(GgufFile::open(path(name(2)), true).ok());
}

TEST_F(GgufSplit, PartsThatDoNotBelong) {
  write_all();
  fs::rename(path(name(0)), path("first.gguf"));
  expect_error(GgufFile::open(path("first.gguf")).status(),
               "part 1 of 3, expected a name that ends in -00001-of-00003.gguf",
               Code::invalid_argument, "first.gguf");
  fs::copy(path(name(1)), path(name(0)));
  expect_error(open(0), "part 2 of 3, expected a name that ends in -00002-of-00003.gguf",
               Code::invalid_argument, name(0));
  expect_error(open(2), "part 2 of 3, expected part 1 of 3", Code::invalid_argument, name(0));

  write_all();
  write({1, 4, 3, "abc1"}, name(1));
  expect_error(open(), "part 2 of 4, expected part 2 of 3", Code::invalid_argument, name(1));
  write({-1, 3, 3, "abc1"}, name(1));
  expect_error(open(), "key split.no: not there, expected an unsigned integer",
               Code::invalid_argument, name(1));
  write({3, 3, 3, "abc1"}, name(1));
  expect_error(open(1), "part 4 of 3, expected a part of 1..3", Code::invalid_argument, name(1));
  write({1, 3, 3, "abc0"}, name(1));
  expect_error(open(), "tensor abc0: given twice, expected once", Code::invalid_argument, name(1));
  put("GGUG", name(1));
  expect_error(open(), "starts with 'GGUG', expected 'GGUF'", Code::invalid_argument, name(1));
}

TEST_F(GgufSplit, CountsOfParts) {
  write_all();
  write({0, 3, 4, "abc0"}, name(0));
  expect_error(open(), "3 tensors in all parts, expected 4", Code::invalid_argument, name(0));
  write({0, 3, 2, "abc0"}, name(0));
  expect_error(open(), "3 tensors so far, expected 2 in all parts", Code::invalid_argument,
               name(2));
  write({0, 3, -1, "abc0"}, name(0));
  expect_error(open(), "key split.tensors.count: not there, expected an unsigned integer",
               Code::invalid_argument, name(0));
  write({0, 3, 262145, "abc0"}, name(0));
  expect_error(open(), "262145 tensors, expected at most 262144", Code::invalid_argument, name(0));
  // One part needs no name and no sisters.
  write({0, 1, 1, "abc0"}, "m.gguf");
  EXPECT_EQ(opened().parts().size(), 1u);
  refused(header(0, 2) + key("split.no", GgufType::u64, u64(~0ull)) +
              key("split.count", GgufType::u64, u64(1ull << 60)),
          "1152921504606846976 parts, expected at most 65535");
  refused(header(0, 1) + key("split.count", GgufType::string, str("3")),
          "key split.count: string, expected an unsigned integer");
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
  GgufData deep = GgufData::array<bool>({});
  for (int i = 0; i < 4; ++i) deep = GgufData::arrays(std::span(&deep, 1));
  expect_error(w.add("deep", deep), "key deep: arrays nested 5 deep, expected at most 4");
  const GgufData scalar(1);
  expect_error(w.add("odd", GgufData::arrays(std::span(&scalar, 1))),
               "key odd: arrays of what is none, expected arrays");
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
