// Where panels have what a stored row has (bittern/matmul_desc.h), for all types but the plain
// ones.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>

#include "bittern/matmul_desc.h"
#include "core/blocks.h"

namespace bittern::matmul {

inline constexpr int kLanes = static_cast<int>(WeightDesc::kPanelRows);
inline constexpr int kChunk = 32;  // codes whose planes lie together

// A field of a unit's header: `size` bytes at byte `at` of a stored block. (Of affine weights, 0 is
// the scale and 1 the bias.)
struct HeaderField {
  int at, size;
};

struct PanelFormat {
  int unit = 0;  // weights of a row that share a header
  int bits = 0;
  int header = 0;    // bytes of a row's header
  int together = 1;  // units whose headers lie together
  int num_fields = 0;
  HeaderField fields[6] = {};

  std::int64_t header_bytes() const { return std::int64_t{kLanes} * header; }  // of a unit
  std::int64_t code_bytes() const { return std::int64_t{kLanes} * unit * bits / 8; }

  // Byte offsets in a panel of `units` units.
  std::int64_t run_at(std::int64_t u) const {
    return u / together * together * (header_bytes() + code_bytes());
  }
  std::int64_t header_at(std::int64_t u) const { return run_at(u) + u % together * header_bytes(); }
  std::int64_t codes_at(std::int64_t u, std::int64_t units) const {
    const std::int64_t first = u / together * together;
    return run_at(u) + std::min<std::int64_t>(together, units - first) * header_bytes() +
           (u - first) * code_bytes();
  }
};

// Whether a quantised type has biases.
inline bool has_bias(const WeightDesc& d) {
  if (d.affine()) return true;
  switch (d.block_type()) {
    case BlockType::q4_1:
    case BlockType::q5_1:
    case BlockType::q2_k:
    case BlockType::q4_k:
    case BlockType::q5_k: return true;
    default: return false;
  }
}

inline PanelFormat panel_format(const WeightDesc& d) {
  PanelFormat f;
  const auto fields = [&](std::initializer_list<HeaderField> list) {
    for (const HeaderField& field : list) {
      f.fields[f.num_fields++] = field;
      f.header += field.size;
    }
  };
  if (d.affine()) {
    const auto size = static_cast<int>(size_of(d.scale_element));
    f.unit = static_cast<int>(d.group_size);
    f.bits = d.bits;
    fields({{0, size}, {1, size}});
  } else {
    f.unit = block_size(d.block_type()).weights;
    f.bits = block_code_bits(d.block_type());
    switch (d.block_type()) {
      case BlockType::q4_0:
      case BlockType::q5_0:
      case BlockType::q8_0:
      case BlockType::iq4_nl: fields({{0, 2}}); break;
      case BlockType::q4_1:
      case BlockType::q5_1: fields({{0, 2}, {2, 2}}); break;
      case BlockType::q2_k: fields({{80, 2}, {82, 2}, {0, 4}, {4, 4}, {8, 4}, {12, 4}}); break;
      case BlockType::q3_k: fields({{108, 2}, {96, 4}, {100, 4}, {104, 4}}); break;
      case BlockType::q4_k:
      case BlockType::q5_k: fields({{0, 2}, {2, 2}, {4, 4}, {8, 4}, {12, 4}}); break;
      case BlockType::q6_k: fields({{208, 2}, {192, 4}, {196, 4}, {200, 4}, {204, 4}}); break;
      case BlockType::iq4_xs: fields({{0, 2}, {2, 2}, {4, 4}}); break;
      case BlockType::mxfp4: fields({{0, 1}}); break;
    }
  }
  while (f.together * f.header_bytes() % 64 != 0) f.together *= 2;
  return f;
}

// The planes of a code, low bits first.
struct Plane {
  int bits;
  int shift;  // of the code's bits
  int words;  // of a chunk's planes before this one
};
constexpr int num_planes(int bits) { return bits == 3 || bits == 5 || bits == 6 ? 2 : 1; }
constexpr Plane plane_of(int bits, int i) {
  const int first = bits == 8 ? 8 : bits >= 4 ? 4 : 2;
  return i == 0 ? Plane{first, 0, 0} : Plane{bits - first, first, first};
}

// Word `v` of a plane: quads[i] is codes 4i .. 4i + 3 of the chunk, a byte each.
inline std::uint32_t plane_word(const std::uint32_t* quads, const Plane& plane, int v) {
  const int per_word = 8 / plane.bits;
  const std::uint32_t mask = ((1u << plane.bits) - 1) * 0x01010101u;
  std::uint32_t word = 0;
  for (int i = 0; i < per_word; ++i)
    word |= (quads[v * per_word + i] >> plane.shift & mask) << plane.bits * i;
  return word;
}
// The inverse: adds what the word says of its quads.
inline void add_plane_word(std::uint32_t word, const Plane& plane, int v, std::uint32_t* quads) {
  const int per_word = 8 / plane.bits;
  const std::uint32_t mask = ((1u << plane.bits) - 1) * 0x01010101u;
  for (int i = 0; i < per_word; ++i)
    quads[v * per_word + i] |= (word >> plane.bits * i & mask) << plane.shift;
}

// Where a panel has bit `bit` of code j of a unit's row `r`: a byte of the unit's codes and a bit
// of it. The formula of the header, for `ref`.
struct BitAt {
  std::int64_t byte;
  int bit;
};
inline BitAt code_bit_at(int bits, int j, int bit, int r) {
  const Plane first = plane_of(bits, 0);
  const Plane plane = bit < first.bits ? first : plane_of(bits, 1);
  const int quad = j % kChunk / 4, t = j % 4;
  const int vector = quad * plane.bits / 8;
  const int at = 8 * t + plane.bits * (quad % (8 / plane.bits)) + bit - plane.shift;
  return {std::int64_t{j} / kChunk * bits * 64 + (plane.words + vector) * 64 + 4 * r + at / 8,
          at % 8};
}

}  // namespace bittern::matmul
