// A weight of a GGUF block, field by field: the layouts of bittern/gguf_desc.h in plain scalar
// form.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "bittern/gguf_desc.h"

namespace bittern {

inline float read_f16(const std::uint8_t* at) {
  f16 x;
  std::memcpy(&x, at, sizeof x);
  return to_f32(x);
}

inline constexpr float kLargestHalf = 65504;

// The largest magnitude of a weight that gguf_quantize does not clamp: up to here no scale or
// minimum of a block, all of them f16, overflows.
constexpr float largest_weight(BlockType type) {
  switch (type) {
    case BlockType::q4_0: return 8 * kLargestHalf;
    case BlockType::q5_0: return 16 * kLargestHalf;
    case BlockType::q8_0: return 127 * kLargestHalf;
    case BlockType::q2_k: return 15 * kLargestHalf;
    case BlockType::q3_k: return 64 * kLargestHalf;
    case BlockType::q4_k:
    case BlockType::q5_k: return 63 * kLargestHalf;
    case BlockType::q6_k: return 2048 * kLargestHalf;
    default: return kLargestHalf;
  }
}

// Bits [first, first + count) of a byte.
inline int bits_of(std::uint8_t byte, int first, int count) {
  return byte >> first & ((1 << count) - 1);
}

// Where a code's bits are: its low bits, and those above them.
struct CodeBits {
  struct Part {
    int byte, first, count;
  };
  Part low, high = {0, 0, 0};
};
constexpr CodeBits code_bits_at(BlockType type, int j) {
  const int l = j % 32, h = j / 128, k = j / 32 % 4;
  const CodeBits::Part half = {j % 16, j / 16 * 4, 4};  // Q4_0's, from byte 0 on
  const auto from = [](int byte, CodeBits::Part part) {
    return CodeBits::Part{byte + part.byte, part.first, part.count};
  };
  const CodeBits::Part pair = {32 * h + l, 2 * k, 2};
  const CodeBits::Part half_k = {32 * (j / 64) + l, j / 32 % 2 * 4, 4};
  switch (type) {
    case BlockType::q4_0:
    case BlockType::iq4_nl: return {from(2, half)};
    case BlockType::q4_1: return {from(4, half)};
    case BlockType::q5_0: return {from(6, half), {2 + j / 8, j % 8, 1}};
    case BlockType::q5_1: return {from(8, half), {4 + j / 8, j % 8, 1}};
    case BlockType::q8_0: return {{2 + j, 0, 8}};
    case BlockType::q2_k: return {from(16, pair)};
    case BlockType::q3_k: return {from(32, pair), {l, j / 32, 1}};
    case BlockType::q4_k: return {from(16, half_k)};
    case BlockType::q5_k: return {from(48, half_k), {16 + l, j / 32, 1}};
    case BlockType::q6_k: return {{64 * h + j % 64, j / 64 % 2 * 4, 4}, from(128, pair)};
    case BlockType::iq4_xs: return {{8 + j / 32 * 16 + j % 16, l / 16 * 4, 4}};
    case BlockType::mxfp4: return {from(1, half)};
  }
  return {};
}

constexpr int block_code_bits(BlockType type) {
  const CodeBits at = code_bits_at(type, 0);
  return at.low.count + at.high.count;
}

// What the signed types subtract from a code. A byte of Q8_0 is a code less 128 already.
constexpr int code_offset(BlockType type) {
  switch (type) {
    case BlockType::q4_0: return 8;
    case BlockType::q5_0: return 16;
    case BlockType::q8_0: return 128;
    case BlockType::q3_k: return 4;
    case BlockType::q6_k: return 32;
    default: return 0;
  }
}

// The values of a type with a table; null: it has none.
constexpr const std::int8_t* code_values(BlockType type) {
  switch (type) {
    case BlockType::iq4_nl:
    case BlockType::iq4_xs: return kIq4Values;
    case BlockType::mxfp4: return kMxfp4Values;
    default: return nullptr;
  }
}

// The code of weight j, 0 .. 2^bits - 1.
inline int unsigned_code(BlockType type, const std::uint8_t* block, int j) {
  const CodeBits at = code_bits_at(type, j);
  const int low = bits_of(block[at.low.byte], at.low.first, at.low.count);
  const int high = bits_of(block[at.high.byte], at.high.first, at.high.count);
  return (low | high << at.low.count) ^ (type == BlockType::q8_0 ? 128 : 0);
}

// The inverse, into zeros.
inline void put_unsigned_code(BlockType type, std::uint8_t* block, int j, int code) {
  const auto put = [&](const CodeBits::Part& part, int bits) {
    const int kept = bits & ((1 << part.count) - 1);
    block[part.byte] = static_cast<std::uint8_t>(block[part.byte] | kept << part.first);
  };
  const CodeBits at = code_bits_at(type, j);
  if (type == BlockType::q8_0) code ^= 128;
  put(at.low, code);
  put(at.high, code >> at.low.count);
}

// The factor of s: the code, minus its offset in the signed types, or its value in the table.
inline int block_code(BlockType type, const std::uint8_t* block, int j) {
  const int code = unsigned_code(type, block, j);
  const std::int8_t* values = code_values(type);
  return values != nullptr ? values[code] : code - code_offset(type);
}

// The 6-bit scale and minimum of group i of 8, as Q4_K and Q5_K pack them.
struct ScaleMin {
  int scale, min;
};
inline ScaleMin packed_scale_min(const std::uint8_t scales[12], int i) {
  if (i < 4) return {bits_of(scales[i], 0, 6), bits_of(scales[i + 4], 0, 6)};
  return {bits_of(scales[i + 4], 0, 4) | bits_of(scales[i - 4], 6, 2) << 4,
          bits_of(scales[i + 4], 4, 4) | bits_of(scales[i], 6, 2) << 4};
}

// s and m of weight j's group; w = s * code - m in every type, as x + m is x - (-m).
struct GroupGrid {
  float s, m;
};
inline GroupGrid block_grid(BlockType type, const std::uint8_t* block, int j) {
  const auto scale_min = [&](int sc, int mn, float d, float dmin) {
    return GroupGrid{d * static_cast<float>(sc), dmin * static_cast<float>(mn)};
  };
  const int i = j / block_size(type).group;
  switch (type) {
    case BlockType::q4_0:
    case BlockType::q5_0:
    case BlockType::q8_0: return {read_f16(block), 0.0f};
    case BlockType::q4_1:
    case BlockType::q5_1: return {read_f16(block), -read_f16(block + 2)};
    case BlockType::q2_k:
      return scale_min(bits_of(block[i], 0, 4), bits_of(block[i], 4, 4), read_f16(block + 80),
                       read_f16(block + 82));
    case BlockType::q3_k: {
      const std::uint8_t* scales = block + 96;
      const int sc = bits_of(scales[i % 8], i / 8 * 4, 4) | bits_of(scales[8 + i % 4], i / 4 * 2, 2)
                                                                << 4;
      return {read_f16(block + 108) * static_cast<float>(sc - 32), 0.0f};
    }
    case BlockType::q4_k:
    case BlockType::q5_k: {
      const ScaleMin p = packed_scale_min(block + 4, i);
      return scale_min(p.scale, p.min, read_f16(block), read_f16(block + 2));
    }
    case BlockType::q6_k:
      return {read_f16(block + 208) * static_cast<float>(static_cast<std::int8_t>(block[192 + i])),
              0.0f};
    case BlockType::iq4_nl: return {read_f16(block), 0.0f};
    case BlockType::iq4_xs: {
      const int sc =
          bits_of(block[4 + i / 2], i % 2 * 4, 4) | bits_of(block[2 + i / 4], i % 4 * 2, 2) << 4;
      return {read_f16(block) * static_cast<float>(sc - 32), 0.0f};
    }
    case BlockType::mxfp4: return {std::ldexp(1.0f, block[0] - 128), 0.0f};
  }
  return {};
}

}  // namespace bittern
