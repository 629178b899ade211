#include "formats/checkpoint_test.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/sanitized.h"
#include "formats/gguf_contents.h"
#include "oracle/status_test.h"

namespace bittern {
namespace {

namespace fs = std::filesystem;
using oracle::expect_ok;

// ---- Storage ----

TEST(Storage, HasAName) {
  EXPECT_EQ(Storage::plain(SafeDType::bf16).str(), "BF16");
  EXPECT_EQ(Storage::blocks(GgmlType::q4_k).str(), "Q4_K");
  EXPECT_EQ(Storage::affine(4, 64, SafeDType::bf16).str(), "4 bit, group 64, BF16");
  EXPECT_FALSE(Storage::plain(SafeDType::f32).quantized());
  EXPECT_TRUE(Storage::blocks(GgmlType::q8_0).quantized());
  EXPECT_TRUE(Storage::affine(8, 32, SafeDType::f32).quantized());
}

TEST(Storage, CountsBytes) {
  const auto bytes = [](const Storage& storage, const Shape& shape) -> std::uint64_t {
    const auto size = storage.bytes(shape);
    EXPECT_TRUE(size) << size.status().message();
    return size ? *size : 0;
  };
  EXPECT_EQ(bytes(Storage::plain(SafeDType::f16), {3, 5}), 30u);
  EXPECT_EQ(bytes(Storage::plain(SafeDType::f4), {3, 6}), 9u);
  EXPECT_EQ(bytes(Storage::plain(SafeDType::f64), {}), 8u);
  EXPECT_EQ(bytes(Storage::plain(SafeDType::f64), {0, std::int64_t{1} << 62}), 0u);
  EXPECT_EQ(bytes(Storage::blocks(GgmlType::q4_k), {2, 512}), 4u * 144);
  // 2 x 3 rows: 12 words of 3 bits, and 2 x 2 half scales and biases.
  EXPECT_EQ(bytes(Storage::affine(3, 64, SafeDType::f16), {2, 3, 128}), 6u * (12 * 4 + 2 * 2 * 2));
  EXPECT_EQ(bytes(Storage::affine(4, 32, SafeDType::f32), {0, 64}), 0u);

  const auto why = [](const Storage& storage, const Shape& shape) {
    return std::string(storage.bytes(shape).status().message());
  };
  EXPECT_EQ(why(Storage::plain(SafeDType::f4), {3}), "shape [3] of F4, expected whole bytes");
  EXPECT_EQ(why(Storage::plain(SafeDType::f32), {-1}), "dimension -1, expected at least 0");
  EXPECT_EQ(why(Storage::plain(SafeDType::f32), {std::int64_t{1} << 60, 16}),
            "shape [1152921504606846976,16] of F32, expected fewer than 2^57 elements");
  EXPECT_EQ(why(Storage::affine(4, 64, SafeDType::f32), {2, 96}),
            "row of 96 in groups of 64, expected a multiple");
  EXPECT_EQ(why(Storage::affine(9, 64, SafeDType::f32), {2, 64}),
            "9 bit, group 64, F32, expected 1..8 bits, a group of at least 1 and F32, F16 or BF16");
  EXPECT_EQ(why(Storage::blocks(GgmlType::q4_k), {2, 128}),
            "row of 128 elements of Q4_K, expected a multiple of 256");
}

// ---- folders of plain numbers ----

TEST_F(Checkpoints, AFolderOfPlainNumbers) {
  put_model({stored<float>("b.weight", SafeDType::f32, {2, 3}, {1, 2, 3, 4, 5, 6}),
             stored<double>("a.bias", SafeDType::f64, {2}, {0.5, 1e300}),
             blank("mask", SafeDType::boolean, {4}), blank("e.weight", SafeDType::f8_e4m3, {2, 2}),
             blank("none", SafeDType::f32, {0, 4}),
             stored<std::uint16_t>("h", SafeDType::f16, {2}, {0x3c00, 0xfbff}),
             stored<std::uint16_t>("bf", SafeDType::bf16, {}, {0x4049})},
            R"({"model_type": "llama", "eos_token_id": -1})");
  const Checkpoint model = opened();
  EXPECT_EQ(model.kind(), Checkpoint::Kind::hf);
  EXPECT_EQ(model.path(), path());
  EXPECT_EQ(model.gguf(), nullptr);
  EXPECT_EQ(model.config().dump(), R"({"model_type":"llama","eos_token_id":-1})");
  ASSERT_EQ(model.tensors().size(), 7u);
  EXPECT_EQ(model.tensors()[0].name, "a.bias");  // by falling alignment, as they lie
  EXPECT_EQ(model.find("c"), nullptr);

  const CheckpointTensor& b = *model.find("b.weight");
  EXPECT_EQ(b.storage, Storage::plain(SafeDType::f32));
  EXPECT_EQ(b.shape, (Shape{2, 3}));
  EXPECT_EQ(numbers(b, 1, 1), (std::vector<float>{4, 5, 6}));
  EXPECT_EQ(numbers(*model.find("a.bias")), (std::vector<float>{0.5f, INFINITY}));
  EXPECT_EQ(numbers(*model.find("h")), (std::vector<float>{1, -65504}));
  EXPECT_EQ(numbers(*model.find("bf")), (std::vector<float>{3.140625f}));
  EXPECT_EQ(numbers(*model.find("none")), std::vector<float>());
  EXPECT_EQ(why_not(*model.find("mask")),
            "unsupported type BOOL in tensor mask, expected F64, F32, F16 or BF16");
  EXPECT_EQ(why_not(*model.find("e.weight")),
            "unsupported type F8_E4M3 in tensor e.weight, expected F64, F32, F16 or BF16");

  std::vector<float> room(3);
  EXPECT_EQ(decode_rows(b, 1, 2, room).message(),
            "tensor \"b.weight\": 2 rows from row 1, expected some of its 2");
  EXPECT_EQ(decode_rows(b, -1, 1, room).message(),
            "tensor \"b.weight\": 1 rows from row -1, expected some of its 2");
  EXPECT_EQ(decode_rows(b, 0, 2, room).message(),
            "tensor \"b.weight\": room for 3 numbers, expected for 6");
  CheckpointTensor cut = b;
  cut.data = cut.data.first(20);
  EXPECT_EQ(decode_rows(cut, 0, 1, room).message(),
            "tensor \"b.weight\": 20 bytes, expected 24 for [2,3] of F32");
}

TEST_F(Checkpoints, EveryHalfIsWidenedAsOneIs) {
  std::vector<std::uint16_t> all(1 << 16);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  // An odd address: a byte lies before it.
  CheckpointTensor tensor;
  tensor.shape = {1 << 16};
  const std::string bytes = "x" + bytes_of(all);
  tensor.data = std::as_bytes(std::span(bytes.data(), bytes.size())).subspan(1);
  for (const SafeDType dtype : {SafeDType::f16, SafeDType::bf16}) {
    tensor.storage = Storage::plain(dtype);
    const std::vector<float> wide = numbers(tensor);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const float one = dtype == SafeDType::f16 ? to_f32(f16{all[i]}) : to_f32(bf16{all[i]});
      ASSERT_EQ(std::bit_cast<std::uint32_t>(wide[i]), std::bit_cast<std::uint32_t>(one)) << i;
    }
  }
}

TEST_F(Checkpoints, OtherFilesGoThrough) {
  put_model({blank("a", SafeDType::f32, {1})}, "{}");
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "generation_config.json", "chat_template.jinja", "vocab.txt", "merges.txt",
        "tokenizer.model", "preprocessor_config.json", "README.md", "LICENSE", "modeling_x.py",
        // not these
        "pytorch_model.bin", "x.gguf", "quantize_config.json", ".gitattributes", "a.png",
        "pytorch_model.bin.index.json", "sub/tokenizer.json"})
    put(name, "x");
  fs::create_directory(path("folder.json"));
  fs::create_symlink(path("merges.txt"), path("vocab.json"));
  fs::create_symlink(path("nowhere"), path("broken.json"));
  EXPECT_EQ(opened().other_files(),
            (std::vector<std::string>{
                "LICENSE", "README.md", "added_tokens.json", "chat_template.jinja",
                "generation_config.json", "merges.txt", "modeling_x.py", "preprocessor_config.json",
                "special_tokens_map.json", "tokenizer.json", "tokenizer.model",
                "tokenizer_config.json", "vocab.json", "vocab.txt"}));
}

TEST_F(Checkpoints, TheCacheOfHuggingFace) {
  const std::string commit = "0123456789abcdef0123456789abcdef01234567";
  fs::create_directories(path("blobs"));
  fs::create_directories(path("snapshots/" + commit));
  put_tensors("blobs/1", {stored<float>("a", SafeDType::f32, {1}, {7})});
  put("blobs/2", R"({"model_type": "llama"})");
  fs::create_symlink("../../blobs/1", path("snapshots/" + commit + "/model.safetensors"));
  fs::create_symlink("../../blobs/2", path("snapshots/" + commit + "/config.json"));
  refused("/refs/main: no such file or folder, expected the name of a folder in snapshots",
          Code::unavailable);
  put("refs/main", commit + "\n");
  const Checkpoint model = opened();
  EXPECT_EQ(model.path(), path("snapshots/" + commit));
  EXPECT_EQ(numbers(*model.find("a")), std::vector<float>{7});
  EXPECT_EQ(model.config()["model_type"], "llama");
  for (const std::string ref : {"../../x", "..", "\n", "a/b"}) {
    put("refs/main", ref);
    const auto bad = Checkpoint::open(path());
    EXPECT_FALSE(bad);
    EXPECT_TRUE(bad.status().message().ends_with(", expected the name of a folder in snapshots"))
        << bad.status().message();
  }
}

TEST_F(Checkpoints, OneShard) {
  put_tensors("model-00001-of-00002.safetensors",
              {stored<float>("a", SafeDType::f32, {1}, {7}), blank("b", SafeDType::u8, {3})});
  const Checkpoint model = opened(path("model-00001-of-00002.safetensors"));
  EXPECT_EQ(model.kind(), Checkpoint::Kind::safetensors);
  EXPECT_TRUE(model.config().is_null());
  EXPECT_EQ(model.tensors().size(), 2u);
  refused(": neither model.safetensors.index.json nor model.safetensors, expected one",
          Code::unavailable);
}

TEST_F(Checkpoints, WhatIsNoModel) {
  refused(": neither model.safetensors.index.json nor model.safetensors, expected one",
          Code::unavailable);
  put("b.gguf", "GGUF");
  put("a.gguf", "GGUF");
  refused(
      ": neither model.safetensors.index.json nor model.safetensors, expected one (or a file of "
      "it: a.gguf)",
      Code::unavailable);
  put("pytorch_model.bin", "PK\x03\x04 and more than nine bytes");
  auto model = Checkpoint::open(path("pytorch_model.bin"));
  EXPECT_EQ(model.status().message(),
            path("pytorch_model.bin") +
                ": starts with \"PK\\x03\\x04\", expected a GGUF or safetensors file or a folder");
  model = Checkpoint::open(path("missing"));
  EXPECT_EQ(model.status().message(), path("missing") + ": no such file or folder");
  EXPECT_EQ(model.status().code(), Code::unavailable);
  put_tensors("deep.safetensors", {blank("a", SafeDType::u8, {1, 1, 1, 1, 1, 1, 1})});
  EXPECT_EQ(Checkpoint::open(path("deep.safetensors")).status().message(),
            path("deep.safetensors") + ": tensor \"a\": rank 7, expected at most 6");
}

TEST_F(Checkpoints, TheFingerprintFollowsTheFiles) {
  put_model({stored<float>("a", SafeDType::f32, {1}, {7})}, "{}");
  put("tokenizer.json", "{}");
  const std::uint64_t before = opened().fingerprint();
  EXPECT_EQ(opened().fingerprint(), before);
  const auto touch = [&](const std::string& name, long nanoseconds) {
    const struct timespec times[2] = {{1, nanoseconds}, {1, nanoseconds}};
    ASSERT_EQ(::utimensat(AT_FDCWD, path(name).c_str(), times, 0), 0);
  };
  std::vector<std::uint64_t> seen{before};
  for (const char* name : {"model.safetensors", "config.json", "tokenizer.json"}) {
    for (const long time : {1, 2}) {
      touch(name, time);
      seen.push_back(opened().fingerprint());
    }
  }
  // Another header under the same size and time.
  put_tensors("model.safetensors", {stored<float>("b", SafeDType::f32, {1}, {7})});
  touch("model.safetensors", 2);
  seen.push_back(opened().fingerprint());
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(std::adjacent_find(seen.begin(), seen.end()), seen.end());
}

// ---- GGUF ----

std::string gguf_text(const std::vector<std::pair<std::string, GgmlType>>& of,
                      const std::vector<std::pair<std::string, GgufData>>& keys = {}) {
  GgufContents contents("m.gguf");
  for (const auto& [key, value] : keys) expect_ok(contents.add(key, value));
  std::vector<std::string> tensors;
  for (const auto& [name, type] : of) {
    expect_ok(contents.add_tensor(name, type, {2, 256}));
    std::string& bytes = tensors.emplace_back(*ggml_bytes(type, {2, 256}), '\0');
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i % 61);
  }
  return file_text(contents.lay_out(), tensors);
}

TEST_F(Checkpoints, Gguf) {
  put("m.gguf", gguf_text({{"f", GgmlType::f32},
                           {"q", GgmlType::q8_0},
                           {"i", GgmlType::iq2_xs},
                           {"n", GgmlType::i64},
                           {"b", GgmlType::bf16}},
                          {{"general.architecture", GgufData("llama")}}));
  const Checkpoint model = opened(path("m.gguf"));
  EXPECT_EQ(model.kind(), Checkpoint::Kind::gguf);
  ASSERT_NE(model.gguf(), nullptr);
  EXPECT_EQ(*model.gguf()->string("general.architecture"), "llama");
  EXPECT_TRUE(model.config().is_null());
  ASSERT_EQ(model.tensors().size(), 5u);
  EXPECT_EQ(model.tensors()[1].name, "q");
  EXPECT_EQ(model.find("f")->storage, Storage::plain(SafeDType::f32));
  EXPECT_EQ(model.find("b")->storage, Storage::plain(SafeDType::bf16));
  EXPECT_EQ(model.find("n")->storage, Storage::plain(SafeDType::i64));
  EXPECT_EQ(model.find("q")->storage, Storage::blocks(GgmlType::q8_0));
  EXPECT_EQ(why_not(*model.find("i")), "unsupported type IQ2_XS in tensor i");

  // Block 9 of Q8_0, row 1's second: its first weight is d times byte 308 mod 61.
  const CheckpointTensor& q = *model.find("q");
  const auto row = numbers(q, 1, 1);
  const int block = 9 * 34;
  const f16 d{static_cast<std::uint16_t>(block % 61 | (block + 1) % 61 << 8)};
  EXPECT_EQ(row[32], to_f32(d) * static_cast<float>((block + 2) % 61));
}

TEST_F(Checkpoints, GgufInParts) {
  const auto part = [](int i) {
    return std::vector<std::pair<std::string, GgufData>>{
        {"split.no", GgufData(static_cast<std::uint16_t>(i))},
        {"split.count", GgufData(std::uint16_t{2})},
        {"split.tensors.count", GgufData(std::int32_t{2})}};
  };
  put("m-00001-of-00002.gguf", gguf_text({{"a", GgmlType::f32}}, part(0)));
  put("m-00002-of-00002.gguf", gguf_text({{"b", GgmlType::q4_0}}, part(1)));
  const Checkpoint model = opened(path("m-00002-of-00002.gguf"));
  EXPECT_EQ(model.tensors().size(), 2u);
  EXPECT_EQ(numbers(*model.find("b")).size(), 512u);
  const std::uint64_t before = model.fingerprint();
  put("m-00001-of-00002.gguf", gguf_text({{"c", GgmlType::f32}}, part(0)));
  EXPECT_NE(opened(path("m-00002-of-00002.gguf")).fingerprint(), before);
}

// ---- memory ----

#ifndef BITTERN_SANITIZED
// Whether a model opens with 64 MiB and twice its size of memory that is not a file's.
bool opens_within_bounds(const std::string& model, std::uint64_t bytes) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::uint64_t pages[6] = {};  // of /proc/self/statm: the last is data and stack
    std::ifstream statm("/proc/self/statm");
    for (std::uint64_t& n : pages) statm >> n;
    const std::uint64_t page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const rlim_t most = pages[5] * page + (std::uint64_t{64} << 20) + 2 * bytes;
    const struct rlimit limit = {most, most};
    if (::setrlimit(RLIMIT_DATA, &limit) != 0) ::_exit(2);
    const bool ok = Checkpoint::open(model).ok();
    ::_exit(ok ? 0 : 1);
  }
  int status = -1;
  return ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// A short name for each number below 2^18.
std::string short_name(std::uint32_t i) {
  std::string name;
  for (int digit = 0; digit < 3; ++digit, i /= 64) name += static_cast<char>(' ' + 10 + i % 64);
  std::replace(name.begin(), name.end(), '\\', '~');
  return name;
}

TEST_F(Checkpoints, MemoryStaysWithinBounds) {
  constexpr std::uint32_t kMany = kCheckpointMostTensors;
  std::string header = "{";
  for (std::uint32_t i = 0; i < kMany; ++i) {
    header += "\"" + short_name(i) + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)";
  }
  header.back() = '}';
  const auto with_size = [](const std::string& text) {
    const std::uint64_t size = text.size();
    return std::string(reinterpret_cast<const char*>(&size), 8) + text;
  };
  put("many.safetensors", with_size(header));
  EXPECT_TRUE(opens_within_bounds(path("many.safetensors"), header.size()));
  header.back() = ',';
  put("more.safetensors",
      with_size(header + R"("one more":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})"));
  EXPECT_EQ(Checkpoint::open(path("more.safetensors")).status().message(),
            path("more.safetensors") + ": more than 262144 tensors, expected fewer");

  const std::uint64_t counts[2] = {kMany, 0};
  std::string gguf = "GGUF" + std::string("\3\0\0\0", 4) +
                     std::string(reinterpret_cast<const char*>(counts), sizeof counts);
  for (std::uint32_t i = 0; i < kMany; ++i)  // rank 1, of 0 elements, F32, offset 0
    gguf += with_size(short_name(i)) + std::string("\1\0\0\0", 4) + std::string(20, '\0');
  put("many.gguf", gguf);
  EXPECT_TRUE(opens_within_bounds(path("many.gguf"), gguf.size()));

  put_tensors("model.safetensors", {blank("a", SafeDType::f32, {1})});
  std::string config = "{\"a\":[{\"\":\"\"}";
  for (std::size_t i = 0; i < kJsonMaxValues / 2 - 4; ++i) config += ",{\"\":\"\"}";
  put("config.json", config + "]}");
  EXPECT_TRUE(opens_within_bounds(path(), config.size()));
}
#endif

// ---- configs ----

TEST_F(Checkpoints, ConfigsOfStrangers) {
  put_tensors("model.safetensors", {blank("a", SafeDType::f32, {1})});
  const auto config = [&](const std::string& text) { put("config.json", text); };
  config("[1]");
  refused("/config.json: not an object, expected one");
  config("{\"a\": 1, \"b\": {\"c\": 1, \"c\": 2}}");
  refused("/config.json: \"c\": given twice, expected once");
  config("{\"a\": ");
  refused("/config.json: not valid JSON at byte 7");
  config(std::string(100, '['));
  refused("/config.json: nested more than 64 deep, expected less");
  std::string many = "{\"a\": [0";
  for (std::size_t i = 0; i < kJsonMaxValues; ++i) many += ",0";
  config(many + "]}");
  refused("/config.json: more than 262144 values, expected fewer");
  config("{}" + std::string(kJsonMaxBytes, ' '));
  refused("/config.json: 16777218 bytes, expected at most 16777216");
  config("");
  refused("/config.json: empty, expected at least one byte");

  // Kept as they are, in order.
  config(R"({"z":1,"a":[-1,1.5,true,null,"x"],"m":{"k":{}},"u":18446744073709551615})");
  EXPECT_EQ(opened().config().dump(),
            R"({"z":1,"a":[-1,1.5,true,null,"x"],"m":{"k":{}},"u":18446744073709551615})");
}

}  // namespace
}  // namespace bittern
