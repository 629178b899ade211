// The block formats of GGUF files: what gguf_dequantize and gguf_quantize share.
//
// A row is cut into blocks, each a run of bytes that holds its weights' codes and scales. With the
// codes of a block q, and s and m those of the group of 16 or 32 weights that j belongs to,
//
//   w[j] = s q[j] - m        (+ m in Q4_1 and Q5_1)
//   w[j] = s v[q[j]]         in IQ4_NL, IQ4_XS and MXFP4, v a table of 16 integers
//
// Fields in their order; f16 is little endian; [j] is the weight's index in the block, l = j mod
// 32, h = j / 128, k = j / 32 mod 4. Bits not named are those above.
//
//   Q4_0   32 weights in  18 bytes   f16 d; u8 qs[16]: q[j] low bits of qs[j], q[j+16] high bits
//                                    s = d, m = 0, code q - 8
//   Q4_1   32 in  20                 f16 d, m; qs[16] as Q4_0
//   Q5_0   32 in  22                 f16 d; u32 qh: bit j is bit 4 of q[j]; qs[16] as Q4_0
//                                    s = d, m = 0, code q - 16
//   Q5_1   32 in  24                 f16 d, m; qh, qs as Q5_0
//   Q8_0   32 in  34                 f16 d; s8 q[32]
//   Q2_K  256 in  84, groups of 16   u8 scales[16]: sc low 4 bits, mn high 4 bits;
//                                    u8 qs[64]: q[j] = bits 2k, 2k+1 of qs[32h + l]; f16 d, dmin
//                                    s = d sc, m = dmin mn
//   Q3_K  256 in 110, groups of 16   u8 hmask[32]: bit j/32 of hmask[l] is bit 2 of q[j]; qs[64] as
//                                    Q2_K; u8 scales[12]: sc[i] has its low 4 bits in byte i mod 8,
//                                    low half first, and its high 2 bits at 2 (i / 4) of byte
//                                    8 + i mod 4; f16 d         s = d (sc - 32), m = 0, code q - 4
//   Q4_K  256 in 144, groups of 32   f16 d, dmin; u8 scales[12]: for i < 4, sc[i] and mn[i] are the
//                                    low 6 bits of bytes i and i + 4; sc[i+4] and mn[i+4] are the
//                                    low and high half of byte i + 8 below the top 2 bits of bytes
//                                    i and i + 4; u8 qs[128]: q[j] = half j / 32 mod 2, low first,
//                                    of qs[32 (j / 64) + l]     s = d sc, m = dmin mn
//   Q5_K  256 in 176, groups of 32   as Q4_K, with u8 qh[32] before qs: bit j/32 of qh[l] is bit 4
//                                    of q[j]
//   Q6_K  256 in 210, groups of 16   u8 ql[128]: half j / 64 mod 2 of ql[64h + j mod 64] is q[j]'s
//                                    low 4 bits; u8 qh[64]: bits 2k, 2k+1 of qh[32h + l] its high
//                                    2; s8 sc[16]; f16 d        s = d sc, m = 0, code q - 32
//   IQ4_NL 32 in  18                 f16 d; qs[16] as Q4_0      s = d
//   IQ4_XS 256 in 136, groups of 32  f16 d; u16 sh; u8 sl[4]: sc[i] has its low 4 bits in byte
//                                    i / 2 of sl, low half first, and its high 2 at bit 2i of sh;
//                                    u8 qs[128]: group i has its codes in qs[16i .. 16i + 15], as
//                                    Q4_0 has them
//                                    s = d (sc - 32)
//   MXFP4  32 in  17                 u8 e; qs[16] as Q4_0       s = 2^(e - 128), e = 255 included,
//                                    which is NaN to OCP's MX and a number to ggml
//
// v of IQ4_NL and IQ4_XS is kIq4Values; v of MXFP4 is kMxfp4Values, twice the values of e2m1, so
// that s is half of OCP's scale.
#pragma once
#include <cstdint>
#include <string_view>

#include "bittern/plan.h"

namespace bittern {

enum class BlockType : std::int32_t {
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q8_0,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  iq4_nl,
  iq4_xs,
  mxfp4
};
inline constexpr std::string_view kBlockTypeNames[] = {"Q4_0",   "Q4_1",   "Q5_0", "Q5_1", "Q8_0",
                                                       "Q2_K",   "Q3_K",   "Q4_K", "Q5_K", "Q6_K",
                                                       "IQ4_NL", "IQ4_XS", "MXFP4"};
constexpr auto& enum_names(BlockType) { return kBlockTypeNames; }

struct BlockSize {
  std::int32_t weights, bytes;
  std::int32_t group;  // weights that share a scale
};
constexpr BlockSize block_size(BlockType type) {
  switch (type) {
    case BlockType::q4_0: return {32, 18, 32};
    case BlockType::q4_1: return {32, 20, 32};
    case BlockType::q5_0: return {32, 22, 32};
    case BlockType::q5_1: return {32, 24, 32};
    case BlockType::q8_0: return {32, 34, 32};
    case BlockType::q2_k: return {256, 84, 16};
    case BlockType::q3_k: return {256, 110, 16};
    case BlockType::q4_k: return {256, 144, 32};
    case BlockType::q5_k: return {256, 176, 32};
    case BlockType::q6_k: return {256, 210, 16};
    case BlockType::iq4_nl: return {32, 18, 32};
    case BlockType::iq4_xs: return {256, 136, 32};
    case BlockType::mxfp4: return {32, 17, 32};
  }
  return {1, 1, 1};
}

inline constexpr std::int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                               1,    13,   25,  38,  53,  69,  89,  113};
inline constexpr std::int8_t kMxfp4Values[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                                 0, -1, -2, -3, -4, -6, -8, -12};

struct GgufDesc {
  std::int64_t outer_size = 0;
  std::int64_t axis_size = 0;  // a multiple of the type's block
  BlockType type = BlockType::q4_0;
  DType element = DType::f32;  // of the weights: f32 f16 bf16
  bool given_grid = false;     // read by gguf_quantize: scales and biases are given
  bool operator==(const GgufDesc&) const = default;

  std::int64_t row_blocks() const { return axis_size / block_size(type).weights; }
  std::int64_t row_bytes() const { return row_blocks() * block_size(type).bytes; }
  Axes tensor_shape() const { return {{"outer_size", outer_size}, {"axis_size", axis_size}}; }
  // Of scales and biases.
  Axes grid_shape() const {
    return {{"outer_size", outer_size},
            {"groups", given_grid ? axis_size / block_size(type).group : 0}};
  }
  Axes block_shape() const { return {{"outer_size", outer_size}, {"bytes", row_bytes()}}; }
};

Status check_gguf_desc(std::string_view op, const GgufDesc& d) noexcept;

template <class D, class F>
void visit_gguf_fields(D& d, F&& f) {
  f("outer_size", d.outer_size, "number of rows");
  f("axis_size", d.axis_size, "weights per row, a multiple of the type's block (32 or 256)");
  f("type", d.type, "GGUF block type, such as Q4_0 or Q4_K");
  f("element", d.element, "dtype of the weights: f32 f16 bf16");
}

}  // namespace bittern
