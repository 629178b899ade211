// GGUF files that are wrong, hostile or in parts.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "formats/gguf_test.h"

namespace bittern {
namespace {

namespace fs = std::filesystem;
using namespace gguf_bytes;
using oracle::expect_ok;

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
          "tensor b: offset 32 is within tensor a, expected no overlap");
  refused(with_data(header(2, 0) + tensor("a", {1}, 0, 32) + tensor("b", {12}, 0, 0), 64),
          "tensor a: offset 32 is within tensor b, expected no overlap");
  refused(with_data(header(2, 0) + tensor("a", {1}, 0, 0) + tensor("b", {1}, 0, 0), 64),
          "tensor b: offset 0 is within tensor a, expected no overlap");
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
    expect_error(file.uint("no").status(), "key no: missing, expected an unsigned integer",
                 Code::invalid_argument, name(0));
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
  expect_error(open(), "key split.no: missing, expected an unsigned integer",
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
  expect_error(open(), "key split.tensors.count: missing, expected an unsigned integer",
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

}  // namespace
}  // namespace bittern
