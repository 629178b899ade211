// What the tests of safetensors share: bytes and texts, and a file that Python wrote.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/safetensors.h"
#include "formats/test_files.h"

namespace bittern {

namespace safetensors_bytes {

inline std::span<const std::byte> view(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}
inline std::string text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

inline std::string u64(std::uint64_t n) {
  std::string s;
  for (int i = 0; i < 8; ++i) s += static_cast<char>(n >> (8 * i) & 255);
  return s;
}
// A file with this header and `data` zero bytes.
inline std::string file_of(const std::string& header, std::size_t data = 0) {
  return u64(header.size()) + header + std::string(data, '\0');
}

}  // namespace safetensors_bytes

// safetensors 0.8.0 (PyPI) with numpy:
//   save({"b": np.array([[1, 2, 3]], np.uint8), "a\n\"\u00e9": np.array([1.5, -2], np.float32),
//         "c": np.array([7], np.int64), "h": np.array([1, 2], np.float16),
//         "none": np.zeros((0, 4), np.float32), "scalar": np.array(5, np.int32)},
//        {"format": "np"}).hex()
inline constexpr std::string_view kGolden =
    "78010000000000007b225f5f6d657461646174615f5f223a7b22666f726d6174223a226e70227d2c2263223a"
    "7b226474797065223a22493634222c227368617065223a5b315d2c22646174615f6f666673657473223a5b30"
    "2c385d7d2c22615c6e5c22c3a9223a7b226474797065223a22463332222c227368617065223a5b325d2c2264"
    "6174615f6f666673657473223a5b382c31365d7d2c226e6f6e65223a7b226474797065223a22463332222c22"
    "7368617065223a5b302c345d2c22646174615f6f666673657473223a5b31362c31365d7d2c227363616c6172"
    "223a7b226474797065223a22493332222c227368617065223a5b5d2c22646174615f6f666673657473223a5b"
    "31362c32305d7d2c2268223a7b226474797065223a22463136222c227368617065223a5b325d2c2264617461"
    "5f6f666673657473223a5b32302c32345d7d2c2262223a7b226474797065223a225538222c22736861706522"
    "3a5b312c335d2c22646174615f6f666673657473223a5b32342c32375d7d7d2007000000000000000000c03f"
    "000000c005000000003c0040010203";
inline constexpr const char* kAccented = "a\n\"\xc3\xa9";

inline std::string golden() { return from_hex(kGolden); }
inline std::vector<SafetensorsSpec> golden_specs() {
  return {{"b", SafeDType::u8, {1, 3}},     {kAccented, SafeDType::f32, {2}},
          {"c", SafeDType::i64, {1}},       {"h", SafeDType::f16, {2}},
          {"none", SafeDType::f32, {0, 4}}, {"scalar", SafeDType::i32, {}}};
}

}  // namespace bittern
