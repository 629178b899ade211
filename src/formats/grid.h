// Exact transcoding: the same codes in another storage. docs/formats.md says what is exact, and
// why.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "bittern/status.h"
#include "formats/checkpoint.h"

namespace bittern {

// Rows as codes on a grid, w = code * scale + bias.
struct GridRows {
  int bits = 0, group = 0;
  std::int64_t first = 0;             // the number of the first row, for messages
  std::vector<std::uint8_t> codes;    // [count, columns], one a byte
  std::vector<float> scales, biases;  // [count, columns / group]
};

// The grid of a storage, with codes of `bits` bits in groups of `group`. Nothing for plain numbers
// and for blocks with groups of 16 (Q2_K, Q3_K, Q6_K), which no affine storage has. The values of a
// table (IQ4_NL, IQ4_XS, MXFP4) are integers: they become codes of 8 or 5 bits.
struct Grid {
  int bits, group;
};
std::optional<Grid> grid_of(const Storage& storage);

// Refuses scales and biases that are not finite or, made from zero points, not exact in f32, and
// groups whose columns are not neighbours (GPTQ's act-order).
Status decode_grid(const CheckpointTensor& tensor, std::int64_t first, std::int64_t count,
                   GridRows& out);

// The zero point of a group, 0 .. 2^bits - 1, if its bias is exactly -scale times that.
std::optional<int> zero_point_of(float scale, float bias, int bits);

// The same grid in another storage, exactly, or why not: a scale that f16 does not hold, a bias
// that is no multiple, scales that no super-block yields, codes too wide, groups that do not fit.
// out.data, scales and biases have the bytes of those rows; blocks are all data.
struct EncodedRows {
  std::vector<std::byte> data, scales, biases;
};
Status encode_grid(const GridRows& grid, std::int64_t columns, const Storage& storage,
                   EncodedRows& out);

// x as f16 or bf16 holds it; f32 as it is.
float round_param(float x, DType dtype);

// Rounds scales and biases to the F16 or BF16 of `to`: the largest change relative to what it
// changes, which is infinite when something overflows. (F32 changes nothing.) Where `to` has zero
// points, biases follow their scales.
double round_params(GridRows& grid, const Storage& to);

}  // namespace bittern
