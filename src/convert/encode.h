// Encodes rows into their new storage, and decides what happens to numbers that it cannot hold.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "bittern/affine_desc.h"
#include "bittern/status.h"
#include "convert/row_reader.h"
#include "formats/checkpoint.h"
#include "formats/grid.h"

namespace bittern {

// The first number that f32 cannot hold, as it was, and its place.
std::string beyond_f32(const RowNumbers& numbers, std::int64_t columns);

// Encodes finite numbers into a storage; others are refused. `importance`, one per column, weights
// errors if the method can use it. Code::unsupported: a number is so large that the storage would
// make it infinite.
struct RowEncoder {
  Storage to;
  std::optional<AffineMethod> method;
  // If quantised: `to` is plain, and receives the numbers that this storage decodes to.
  Storage through;
  // Numbers that are too large become the largest finite one in place of an error.
  bool saturate = false;

  // Adds the numbers it had to make smaller to `saturated`.
  Status encode(const RowNumbers& numbers, std::int64_t count, std::int64_t columns,
                std::span<const float> importance, EncodedRows& out,
                std::uint64_t& saturated) const;

 private:
  // The same when all numbers are within f32's range.
  Status encode_within(const RowNumbers& numbers, std::int64_t count, std::int64_t columns,
                       std::span<const float> importance, EncodedRows& out,
                       std::uint64_t& saturated) const;
};

// Rows of codes in another storage (encode_grid), scales and biases rounded to its dtype, as
// round_params tells in `change`. What becomes too large is an error or, with `saturate`, a reason
// to quantise its row again.
Status encode_rounded(GridRows& grid, std::int64_t columns, const Storage& to, bool saturate,
                      EncodedRows& out, double& change, std::uint64_t& saturated);

// Rows of codes in the super-blocks of Q4_K or Q5_K, which hold a grid of their bits and groups
// only nearly: what gguf_quantize makes of its numbers with its scales and biases given.
Status fit_grid(const GridRows& grid, std::int64_t columns, const Storage& to, EncodedRows& out);

// Refuses rows that hold, or decode to, infinities or NaN, with the place of the first; `first` is
// the number of the first row. Integers, and blocks that cannot be decoded, pass.
Status expect_finite_rows(const EncodedRows& rows, const Storage& storage, std::int64_t first,
                          std::int64_t count, std::int64_t columns);
// Whether a method fits scales and biases of this storage, or its own rule makes them.
bool is_fitted(const Storage& to);
// Whether importance weights the errors of this quantisation.
bool uses_importance(const Storage& to, std::optional<AffineMethod> method);

// Encoded rows as a tensor that decode_rows reads; it views them.
CheckpointTensor tensor_of(const EncodedRows& rows, const Storage& storage, std::int64_t count,
                           std::int64_t columns);

// The numbers as f32.
Status as_f32(const RowNumbers& numbers, std::span<float> out);

// The largest magnitude; infinite or NaN where a number is.
float largest_magnitude(const RowNumbers& numbers, std::int64_t count);

// Refuses infinities and NaN, with the place of the first.
Status expect_finite(const RowNumbers& numbers, std::int64_t count, std::int64_t columns);

// Whether a number of this magnitude becomes infinite in that dtype.
bool overflows(float magnitude, DType dtype);

}  // namespace bittern
