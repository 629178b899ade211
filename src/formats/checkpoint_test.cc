#include "formats/checkpoint.h"

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
#include <random>

#include "core/sanitized.h"
#include "formats/decode.h"
#include "formats/gguf_contents.h"
#include "formats/test_folder.h"
#include "oracle/status_test.h"

namespace bittern {
namespace {

using oracle::expect_ok;

namespace fs = std::filesystem;

template <class T>
StoredTensor stored(const std::string& name, SafeDType dtype, std::vector<std::uint64_t> shape,
                    const std::vector<T>& values) {
  return {{name, dtype, std::move(shape)}, bytes_of(values)};
}
// Zeros of that shape.
StoredTensor blank(const std::string& name, SafeDType dtype, std::vector<std::uint64_t> shape) {
  std::uint64_t bits = static_cast<std::uint64_t>(bits_of(dtype));
  for (const std::uint64_t n : shape) bits *= n;
  return {{name, dtype, std::move(shape)}, std::string(bits / 8, '\0')};
}

class Checkpoints : public TestFolder {
 protected:
  void put_model(const std::vector<StoredTensor>& tensors, const std::string& config = "") const {
    put_tensors("model.safetensors", tensors);
    if (!config.empty()) put("config.json", config);
  }
  Checkpoint opened(const std::string& at) const {
    auto model = Checkpoint::open(at);
    if (!model) ADD_FAILURE() << model.status().message();
    return std::move(*model);
  }
  Checkpoint opened() const { return opened(path()); }
  // The message after "FOLDER".
  void refused(const std::string& message, Code code = Code::invalid_argument) const {
    const auto model = Checkpoint::open(path());
    EXPECT_EQ(model.status().message(), path() + message);
    EXPECT_EQ(model.status().code(), code) << message;
  }
};

std::vector<float> numbers(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count) {
  std::vector<float> out(static_cast<std::size_t>(count * tensor.columns()));
  const Status status = decode_rows(tensor, first, count, out);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}
std::vector<float> numbers(const CheckpointTensor& tensor) {
  return numbers(tensor, 0, tensor.rows());
}
std::string why_not(const CheckpointTensor& tensor) {
  std::vector<float> out(static_cast<std::size_t>(tensor.rows() * tensor.columns()));
  return std::string(decode_rows(tensor, 0, tensor.rows(), out).message());
}

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

// ---- MLX ----

std::string from_hex(std::string_view hex) {
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  std::string out;
  for (std::size_t i = 0; i < hex.size(); i += 2)
    out += static_cast<char>(digit(hex[i]) * 16 + digit(hex[i + 1]));
  return out;
}

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

// ---- AWQ and GPTQ ----

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
