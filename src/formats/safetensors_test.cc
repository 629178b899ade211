#include "formats/safetensors_test.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "formats/json_events.h"

namespace bittern {
namespace {

using namespace safetensors_bytes;

using Bytes = std::vector<std::byte>;

// ---- dtypes ----

TEST(Safetensors, DTypes) {
  for (int i = 0; i < kSafeDTypeCount; ++i) {
    const auto dtype = static_cast<SafeDType>(i);
    EXPECT_EQ(find_safe_dtype(name(dtype)), dtype);
    if (const auto ours = to_dtype(dtype)) {
      EXPECT_EQ(to_safe_dtype(*ours), dtype);
      EXPECT_EQ(size_of(*ours) * 8, static_cast<std::size_t>(bits_of(dtype)));
    }
  }
  EXPECT_EQ(to_dtype(SafeDType::i8), DType::s8);
  EXPECT_EQ(to_dtype(SafeDType::f8_e4m3), std::nullopt);
  EXPECT_EQ(find_safe_dtype("f32"), std::nullopt);
}

TEST(Safetensors, ReadsEveryDType) {
  const std::vector<std::pair<std::string, int>> sizes = {
      // bytes of four elements
      {"BOOL", 4}, {"F4", 2},      {"F6_E2M3", 3}, {"F6_E3M2", 3}, {"U8", 4},
      {"I8", 4},   {"F8_E5M2", 4}, {"F8_E4M3", 4}, {"F8_E8M0", 4}, {"F8_E4M3FNUZ", 4},
      {"I16", 8},  {"U16", 8},     {"F16", 8},     {"BF16", 8},    {"F8_E5M2FNUZ", 4},
      {"I32", 16}, {"U32", 16},    {"F32", 16},    {"C64", 32},    {"F64", 32},
      {"I64", 32}, {"U64", 32}};
  ASSERT_EQ(sizes.size(), static_cast<std::size_t>(kSafeDTypeCount));
  for (const auto& [dtype, size] : sizes) {
    const std::string file =
        file_of("{\"a\":{\"dtype\":\"" + dtype + "\",\"shape\":[2,2],\"data_offsets\":[0," +
                    std::to_string(size) + "]}}",
                static_cast<std::size_t>(size));
    const auto header = parse_safetensors("f", view(file));
    ASSERT_TRUE(header) << header.status().message();
    EXPECT_EQ(name(header->tensors[0].dtype), dtype);
  }
}

// ---- reading ----

TEST(Safetensors, ReadsWhatPythonWrote) {
  const TempFolder folder;
  folder.put("a.safetensors", golden());
  const auto file = SafetensorsFile::open(folder.path("a.safetensors"));
  ASSERT_TRUE(file) << file.status().message();
  EXPECT_EQ(file->metadata(), (SafetensorsMetadata{{"format", "np"}}));
  const std::vector<std::string> order = {"c", kAccented, "none", "scalar", "h", "b"};
  ASSERT_EQ(file->tensors().size(), order.size());
  for (std::size_t i = 0; i < order.size(); ++i) EXPECT_EQ(file->tensors()[i].name, order[i]);
  for (const SafetensorsSpec& spec : golden_specs()) {
    const SafetensorsTensor* tensor = file->find(spec.name);
    ASSERT_NE(tensor, nullptr) << spec.name;
    EXPECT_EQ(tensor->dtype, spec.dtype);
    EXPECT_EQ(tensor->shape, spec.shape);
  }
  EXPECT_EQ(text(file->bytes(*file->find("b"))), "\1\2\3");
  EXPECT_EQ(text(file->bytes(*file->find("c"))), u64(7));
  EXPECT_EQ(text(file->bytes(*file->find(kAccented))), std::string("\0\0\xc0?\0\0\0\xc0", 8));
  EXPECT_TRUE(file->bytes(*file->find("none")).empty());
  EXPECT_EQ(file->find("d"), nullptr);
  EXPECT_EQ(file->find(""), nullptr);
}

TEST(Safetensors, AcceptsWhatTheFormatAllows) {
  const auto ok = [](const std::string& header, std::size_t data = 0) {
    const std::string file = file_of(header, data);
    const auto result = parse_safetensors("f", view(file));
    EXPECT_TRUE(result) << result.status().message();
    return result;
  };
  EXPECT_TRUE(ok("{}")->tensors.empty());
  EXPECT_TRUE(ok("{}      ")->tensors.empty());
  EXPECT_TRUE(ok(R"({"__metadata__":null})")->metadata.empty());
  EXPECT_EQ(ok(R"({"__metadata__":{"b":"2","a":"1"}})")->metadata,
            (SafetensorsMetadata{{"a", "1"}, {"b", "2"}}));
  // Any order of tensors and fields; other fields are left alone.
  const auto header = ok(R"({"b":{"x":{"y":[1,{"z":[]}],"dtype":3},"data_offsets":[1,3],)"
                         R"("shape":[1],"dtype":"F16"},)"
                         R"("a":{"dtype":"U8","shape":[],"data_offsets":[0,1],"x":-1.5e3}})",
                         3);
  EXPECT_EQ(header->tensors[0].name, "a");
  EXPECT_EQ(header->tensors[1].begin + 2, header->tensors[1].end);
}

TEST(Safetensors, RefusesBadHeaders) {
  struct Case {
    std::string file, message;
  };
  const auto a = [](const std::string& fields, std::size_t data = 0) {
    return file_of("{\"a\":{" + fields + "}}", data);
  };
  const std::string nine = "1,1,1,1,1,1,1,1,1";
  const std::string deep(70, '[');
  const std::vector<Case> cases = {
      {"", "f: 0 bytes, expected at least 8"},
      {"1234567", "f: 7 bytes, expected at least 8"},
      {u64(3) + "{}", "f: header of 3 bytes, expected at most 2"},
      {u64(~std::uint64_t{0}) + "{}",
       "f: header of 18446744073709551615 bytes, expected at most 2"},
      {u64(0), "f: header: does not begin with '{', expected a JSON object"},
      {file_of(" {}"), "f: header: does not begin with '{', expected a JSON object"},
      {file_of("[]"), "f: header: does not begin with '{', expected a JSON object"},
      {file_of("{"), "f: header: not valid JSON at byte 2"},
      {file_of("{} x"), "f: header: not valid JSON at byte 4"},
      {file_of("{}{}"), "f: header: not valid JSON at byte 3"},
      {file_of(std::string("{}\0\0", 4)), "f: header: not valid JSON at byte 2: NUL"},
      {file_of("{\"\xff\":1}"), "f: header: not valid JSON at byte 3"},
      {file_of("{\"a\":{\"x\":1e999}}"), "f: header: not valid JSON at byte 15"},
      {file_of("{\"a\":{\"x\":" + deep), "f: header: nested more than 64 deep, expected less"},
      {file_of("{\"a\":1}"), "f: tensor \"a\": a number, expected an object"},
      {file_of("{\"a\":[]}"), "f: tensor \"a\": a list, expected an object"},
      {file_of("{\"a\":null}"), "f: tensor \"a\": null, expected an object"},
      {file_of("{\"__metadata__\":true}"), "f: __metadata__: a boolean, expected an object"},
      {file_of("{\"__metadata__\":[]}"), "f: __metadata__: a list, expected an object"},
      {file_of("{\"__metadata__\":{\"k\":1}}"), "f: __metadata__: \"k\": not a string"},
      {file_of("{\"__metadata__\":{\"k\":{}}}"), "f: __metadata__: \"k\": not a string"},
      {file_of("{\"__metadata__\":{},\"__metadata__\":{}}"),
       "f: __metadata__: given twice, expected once"},
      {file_of("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}"),
       "f: __metadata__: \"k\": given twice, expected once"},
      {a(R"("dtype":"U8","shape":[0])"), "f: tensor \"a\": no data_offsets, expected one"},
      {a(R"("dtype":"U8","data_offsets":[0,0])"), "f: tensor \"a\": no shape, expected one"},
      {a(R"("shape":[0],"data_offsets":[0,0])"), "f: tensor \"a\": no dtype, expected one"},
      {a(R"("dtype":"U8","dtype":"U8")"), "f: tensor \"a\": dtype: given twice, expected once"},
      {a(R"("dtype":1)"), "f: tensor \"a\": dtype: not a string"},
      {a(R"("dtype":[])"), "f: tensor \"a\": dtype: not a string"},
      {a(R"("dtype":"F128")"),
       "f: tensor \"a\": dtype \"F128\", expected one of BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 "
       "F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64"},
      {a(R"("shape":1)"), "f: tensor \"a\": shape: not a list of whole numbers >= 0"},
      {a(R"("shape":{})"), "f: tensor \"a\": shape: not a list of whole numbers >= 0"},
      {a(R"("shape":[[1]])"), "f: tensor \"a\": shape: not a list of whole numbers >= 0"},
      {a(R"("shape":[-1])"), "f: tensor \"a\": shape: not a list of whole numbers >= 0"},
      {a(R"("shape":[1.0])"), "f: tensor \"a\": shape: not a list of whole numbers >= 0"},
      {a(R"("shape":["1"])"), "f: tensor \"a\": shape: not a list of whole numbers >= 0"},
      {a(R"("shape":[18446744073709551616])"),
       "f: tensor \"a\": shape: not a list of whole numbers >= 0"},
      {a("\"shape\":[" + nine + "]"),
       "f: tensor \"a\": shape: more than 8 numbers, expected fewer"},
      {a("\"data_offsets\":[" + nine + "]"),
       "f: tensor \"a\": data_offsets: more than 8 numbers, expected fewer"},
      {a(R"("data_offsets":"0")"),
       "f: tensor \"a\": data_offsets: not a list of whole numbers >= 0"},
      {a(R"("dtype":"U8","shape":[0],"data_offsets":[0])"),
       "f: tensor \"a\": data_offsets [0], expected two numbers"},
      {a(R"("dtype":"U8","shape":[0],"data_offsets":[0,0,0])"),
       "f: tensor \"a\": data_offsets [0,0,0], expected two numbers"},
      {a(R"("dtype":"U8","shape":[1],"data_offsets":[1,0])", 1),
       "f: tensor \"a\": data_offsets [1,0], expected begin <= end"},
      {a(R"("dtype":"U8","shape":[2],"data_offsets":[0,2])", 1),
       "f: tensor \"a\": data_offsets [0,2], expected within the 1 bytes of data"},
      {a(R"("dtype":"U8","shape":[0],"data_offsets":[18446744073709551615,18446744073709551615])"),
       "f: tensor \"a\": data_offsets [18446744073709551615,18446744073709551615], expected within "
       "the 0 bytes of data"},
      {a(R"("dtype":"F32","shape":[1,2],"data_offsets":[0,4])", 4),
       "f: tensor \"a\": data_offsets [0,4], expected 8 bytes for shape [1,2] of F32"},
      {a(R"("dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,0])"),
       "f: tensor \"a\": shape [4294967296,4294967296,4] of F32, expected less than 2^61 bytes"},
      {a(R"("dtype":"U8","shape":[0,9223372036854775807,9],"data_offsets":[0,0])"),
       "f: tensor \"a\": shape [0,9223372036854775807,9] of U8, expected less than 2^61 bytes"},
      {a(R"("dtype":"F4","shape":[3],"data_offsets":[0,2])", 2),
       "f: tensor \"a\": shape [3] of F4, expected whole bytes"},
      {a(R"("dtype":"U8","shape":[1],"data_offsets":[0,1])", 3),
       "f: 2 bytes at the end belong to no tensor, expected none"},
      {file_of("{}", 1), "f: 1 bytes at the end belong to no tensor, expected none"},
      {a(R"("dtype":"U8","shape":[1],"data_offsets":[2,3])", 3),
       "f: tensor \"a\": data_offsets [2,3] leave a hole of 2 bytes before it, expected none"},
      {file_of(R"({"b":{"dtype":"U8","shape":[3],"data_offsets":[1,4]},)"
               R"("a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
               4),
       "f: tensor \"b\": data_offsets [1,4] overlap tensor \"a\"; tensors must not overlap"},
      {file_of(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
               R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
               2),
       "f: tensor \"a\": given twice, expected once"},
      {file_of("{\"a\\u0000\\n\\\"\\\\" + std::string(200, 'x') + "\":1}"),
       "f: tensor \"a\\x00\\x0a\\\"\\\\" + std::string(115, 'x') +
           "...\": a number, expected an object"},
  };
  for (const Case& c : cases) {
    const auto result = parse_safetensors("f", view(c.file));
    EXPECT_FALSE(result) << c.message;
    EXPECT_EQ(result.status().message(), c.message);
    const bool dtype = c.message.find("F128") != std::string::npos;
    EXPECT_EQ(result.status().code(), dtype ? Code::unsupported : Code::invalid_argument);
  }
}

TEST(Safetensors, RefusesHugeHeaders) {
  const auto message = [](const std::string& file) {
    return std::string(parse_safetensors("f", view(file)).status().message());
  };
  EXPECT_EQ(message(u64(100'000'001) + std::string(100'000'001, ' ')),
            "f: header of 100000001 bytes, expected at most 100000000");
  EXPECT_EQ(message(file_of("{\"" + std::string(9 << 20, 'a') + "\":1}")),
            "f: header: no new string within 8388608 bytes of byte 1, expected one");
  EXPECT_EQ(message(file_of("{" + std::string(9 << 20, ' ') + "}")),
            "f: header: no new string within 8388608 bytes of byte 0, expected one");
  std::string many = "{\"__metadata__\":{";
  for (std::size_t i = 0; i <= kSafetensorsMaxMetadata; ++i) many += "\"a\":\"\",";
  EXPECT_EQ(message(file_of(many)), "f: __metadata__: more than 65536 entries, expected fewer");
  many = "{";
  const std::string longest(kSafetensorsMaxName, 'n');
  const auto named = [](const std::string& name) {
    return file_of("{\"" + name + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})");
  };
  EXPECT_EQ(message(named(longest)), "");
  EXPECT_EQ(message(named(longest + "n")),
            "f: tensor \"" + longest.substr(0, 120) +
                "...\": a name of 1025 bytes, expected at most 1024");
  for (std::size_t i = 0; i <= kSafetensorsMaxTensors; ++i)
    many += R"("":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)";
  EXPECT_EQ(message(file_of(many)), "f: header: more than 524288 tensors, expected fewer");
}

// Each is read or refused in one line; under the sanitizers nothing else may happen.
TEST(Safetensors, SurvivesEveryCutAndEveryFlippedBit) {
  const std::string whole = golden();
  const auto survives = [](const std::string& file) {
    // A copy of its own, so that a byte read past the end is seen.
    const Bytes copy(view(file).begin(), view(file).end());
    const auto result = parse_safetensors("f", copy);
    if (result) {
      for (const SafetensorsTensor& t : result->tensors) EXPECT_LE(t.end, copy.size());
    } else {
      const std::string_view message = result.status().message();
      EXPECT_EQ(message.substr(0, 3), "f: ");
      EXPECT_EQ(message.find('\n'), std::string_view::npos);
    }
    return result.ok();
  };
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_FALSE(survives(whole.substr(0, size))) << size;
  int fine = 0;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string file = whole;
      file[i] = static_cast<char>(file[i] ^ (1 << bit));
      fine += survives(file);
    }
    for (const char c : {'\0', '"', '{', '}', '[', ']', ',', '9', '\xff'}) {
      std::string file = whole;
      file[i] = c;
      survives(file);
    }
  }
  EXPECT_GE(fine, 27 * 8);  // the data's own bits at least
}

// ---- folders ----

constexpr const char* kA = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
constexpr const char* kBC = R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},)"
                            R"("c":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";

TEST(SafetensorsFolder, OneFile) {
  const TempFolder folder;
  folder.put("model.safetensors", golden());
  const auto model = SafetensorsFolder::open(folder.path());
  ASSERT_TRUE(model) << model.status().message();
  EXPECT_EQ(model->size(), 6u);
  const auto b = model->find("b");
  ASSERT_TRUE(b);
  EXPECT_EQ(text(model->bytes(*b)), "\1\2\3");
  EXPECT_FALSE(model->find("bb"));
}

TEST(SafetensorsFolder, Shards) {
  const TempFolder folder;
  folder.put("y.safetensors", file_of(kA, 1));
  folder.put("x.safetensors", file_of(kBC, 2));
  folder.put(
      "model.safetensors.index.json",
      R"({"metadata":{"total_size":2},"weight_map":{"c":"x.safetensors","a":"y.safetensors"}})");
  const auto model = SafetensorsFolder::open(folder.path() + "/");
  ASSERT_TRUE(model) << model.status().message();
  ASSERT_EQ(model->files().size(), 2u);
  ASSERT_EQ(model->size(), 2u);
  EXPECT_EQ(model->tensor(0).name, "c");
  EXPECT_EQ(model->tensor(1).name, "a");
  EXPECT_EQ(model->file(1).path(), folder.path("y.safetensors"));
  EXPECT_EQ(model->find("a"), 1u);
  EXPECT_EQ(model->find("c"), 0u);
  EXPECT_FALSE(model->find("b"));
}

TEST(SafetensorsFolder, Refuses) {
  const TempFolder folder;
  const auto message = [&](const std::string& index) {
    folder.put("model.safetensors.index.json", index);
    return std::string(SafetensorsFolder::open(folder.path()).status().message());
  };
  const std::string index = folder.path("model.safetensors.index.json: ");
  EXPECT_EQ(
      SafetensorsFolder::open(folder.path()).status().message(),
      folder.path() + ": neither model.safetensors.index.json nor model.safetensors, expected one");
  folder.put("a.safetensors", file_of(kA, 1));
  folder.put("bad.safetensors", file_of(kA, 2));
  EXPECT_EQ(message(""), index + "empty, expected at least one byte");
  EXPECT_EQ(message("{"), index + "not valid JSON at byte 2");
  EXPECT_EQ(message("[]"), index + "a list, expected an object");
  EXPECT_EQ(message("1"), index + "a number, expected an object");
  EXPECT_EQ(message("{}"), index + "no weight_map with a tensor, expected one");
  EXPECT_EQ(message(R"({"weight_map":{}})"), index + "no weight_map with a tensor, expected one");
  EXPECT_EQ(message(R"({"weight_map":[]})"), index + "weight_map: a list, expected an object");
  EXPECT_EQ(message(R"({"weight_map":null})"), index + "weight_map: null, expected an object");
  EXPECT_EQ(message(R"({"weight_map":{"a":"a.safetensors"},"weight_map":{}})"),
            index + "weight_map: given twice, expected once");
  EXPECT_EQ(message(R"({"weight_map":{"a":1}})"),
            index + "tensor \"a\": shard: not a string, expected a file's name");
  EXPECT_EQ(message(R"({"weight_map":{"a":["a.safetensors"]}})"),
            index + "tensor \"a\": shard: not a string, expected a file's name");
  EXPECT_EQ(message(R"({"weight_map":{"a":"a.safetensors","a":"a.safetensors"}})"),
            index + "tensor \"a\": given twice, expected once");
  for (const std::string shard : {"", ".", "..", "../a.safetensors", "/etc/passwd", "x/y",
                                  "..\\\\a", "a.safetensors\\u0000"}) {
    const std::string text = message(R"({"weight_map":{"a":")" + shard + "\"}}");
    EXPECT_EQ(text.find(index + "tensor \"a\": shard \""), 0u) << text;
    EXPECT_NE(text.find("\", expected the name of a file beside the index"), std::string::npos);
  }
  EXPECT_EQ(message(R"({"weight_map":{"a":"b.safetensors"}})"),
            folder.path("b.safetensors: no such file or folder, expected a shard named by "
                        "model.safetensors.index.json"));
  EXPECT_EQ(message(R"({"weight_map":{"b":"a.safetensors"}})"),
            index + "tensor \"b\": not in \"a.safetensors\", where the index places it");
  EXPECT_EQ(message(R"({"weight_map":{"a":"bad.safetensors"}})"),
            folder.path("bad.safetensors: 1 bytes at the end belong to no tensor, expected none"));
  std::string many = "{\"weight_map\":{";
  const std::string name(kSafetensorsMaxName + 1, 'n');
  EXPECT_EQ(message(R"({"weight_map":{")" + name + R"(":"x.safetensors"}})"),
            index + "tensor \"" + name.substr(0, 120) +
                "...\": a name of 1025 bytes, expected at most 1024");
  for (std::size_t i = 0; i <= kSafetensorsMaxShards; ++i)
    many += "\"\":\"" + std::to_string(i) + "\",";
  EXPECT_EQ(message(many), index + "weight_map: more than 16384 shards, expected fewer");
}

TEST(SafetensorsFolder, IndexSurvivesEveryCutAndEveryFlippedBit) {
  const std::string whole =
      R"({"metadata":{"total_size":2},"weight_map":{"c":"x.safetensors","a":"y.safetensors"}})";
  for (std::size_t i = 0; i < whole.size(); ++i) {
    EXPECT_FALSE(parse_safetensors_index("f", view(whole.substr(0, i))));
    for (int bit = 0; bit < 8; ++bit) {
      std::string text = whole;
      text[i] = static_cast<char>(text[i] ^ (1 << bit));
      const auto result = parse_safetensors_index("f", view(text));
      if (!result) {
        EXPECT_EQ(result.status().message().find("f: "), 0u);
      }
    }
  }
}

}  // namespace
}  // namespace bittern
