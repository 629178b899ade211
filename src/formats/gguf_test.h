// What the tests of GGUF share: a folder with a file, and files made by hand.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "formats/gguf_contents.h"
#include "formats/test_folder.h"
#include "oracle/status_test.h"

namespace bittern {

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
inline constexpr std::string_view kPythonHex =
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

inline Bytes python_file() { return from_hex(kPythonHex); }

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

namespace gguf_bytes {

template <class T>
Bytes le(T x) {
  return {reinterpret_cast<const char*>(&x), sizeof x};
}
inline Bytes u32(std::uint32_t x) { return le(x); }
inline Bytes u64(std::uint64_t x) { return le(x); }
inline Bytes str(std::string_view s) { return u64(s.size()) + Bytes(s); }
inline Bytes header(std::uint64_t tensors, std::uint64_t keys, std::uint32_t version = 3) {
  return "GGUF" + u32(version) + u64(tensors) + u64(keys);
}
inline Bytes key(std::string_view name, GgufType type, const Bytes& value) {
  return str(name) + u32(static_cast<std::uint32_t>(type)) + value;
}
// dims innermost first, as in the file
inline Bytes tensor(std::string_view name, const std::vector<std::uint64_t>& dims,
                    std::uint32_t type, std::uint64_t offset) {
  Bytes out = str(name) + u32(static_cast<std::uint32_t>(dims.size()));
  for (const std::uint64_t d : dims) out += u64(d);
  return out + u32(type) + u64(offset);
}
inline Bytes with_data(Bytes bytes, std::size_t data, std::size_t alignment = 32) {
  bytes.resize((bytes.size() + alignment - 1) / alignment * alignment);
  return bytes + Bytes(data, 'd');
}

}  // namespace gguf_bytes

// Asks a file everything; what it holds must be consistent, whatever the bytes were.
inline std::uint64_t use(const GgufValue& value) {
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
inline std::uint64_t use(const GgufFile& file) {
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
    sum += info(t.type).readable;
  }
  return sum;
}

}  // namespace bittern
