// Rows of a tensor to be written, made from rows of the source: gathered as a recipe says, and
// turned into the storage they are to have.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bittern/affine_desc.h"
#include "bittern/device.h"
#include "bittern/status.h"
#include "convert/recipe.h"
#include "formats/checkpoint.h"

namespace bittern {

// The length of a row; a single number is one of its own.
inline std::int64_t columns_of(const Shape& shape) {
  return shape.rank == 0 ? 1 : shape[shape.rank - 1];
}

// Bytes of one row of codes (or plain numbers, or blocks), scales and biases.
struct RowBytes {
  std::uint64_t data = 0, scales = 0, biases = 0;
};
Result<RowBytes> row_bytes(const Storage& storage, std::int64_t columns);

// Numbers of f32, f16 or bf16: in the mapped source where they lie there as they are wanted.
struct RowNumbers {
  DType dtype = DType::f32;
  const void* data = nullptr;
  std::vector<float> own;  // f32 that had to be made
  std::int64_t first = 0;  // the number of the first row, for messages
  // Finite numbers, of F64 or made by a ValueMap, that f32 cannot hold: they are its largest here.
  struct {
    std::uint64_t count = 0;
    std::int64_t at = 0;  // the first of them
    double value = 0;
  } beyond{};
};

class RowReader {
 public:
  // Refuses a recipe whose sources are not there or not of its shape. It outlives the reader.
  static Result<RowReader> open(const Checkpoint& source, const Recipe& recipe);

  std::int64_t rows() const { return rows_; }
  std::int64_t columns() const { return columns_; }
  // The sources' storage. Where they differ (llama-quantize mixes types), that of the first that is
  // quantised, or else F32; such rows are neither moved nor put on a grid, only decoded.
  const Storage& storage() const { return storage_; }
  bool mixed() const { return mixed_; }
  // Whether rows move, blocks of columns included, without being decoded.
  bool movable() const;

  Status numbers(std::int64_t first, std::int64_t count, RowNumbers& out) const;
  Status grid(std::int64_t first, std::int64_t count, GridRows& out) const;
  Status stored(std::int64_t first, std::int64_t count, EncodedRows& out) const;

 private:
  struct Run : RowRun {
    std::int64_t at = 0;  // its first row in the output
  };
  struct Pick {
    std::uint32_t source;
    std::int64_t row;
  };
  RowReader() = default;
  std::vector<Pick> picks(std::int64_t first, std::int64_t count) const;
  template <class F>
  Status each_range(const std::vector<Pick>& picks, F&& f) const;

  std::string name_;
  std::vector<CheckpointTensor> sources_;  // views, of the recipe's columns
  Storage storage_;
  bool mixed_ = false;
  std::vector<Run> runs_;
  std::int64_t rows_ = 0, columns_ = 0, column_block_ = 0;
  std::vector<std::int64_t> order_;  // of column blocks; empty: as they are
  ValueMap map_ = ValueMap::same;
};

// The first number that f32 cannot hold, as it was, and its place.
std::string beyond_f32(const RowNumbers& numbers, std::int64_t columns);

// Finite numbers into a storage; others are refused. `importance`, one a column, weighs errors
// where the method can. Code::unsupported: a number is so large that the storage would make it
// infinite.
struct RowEncoder {
  Storage to;
  std::optional<AffineMethod> method;
  // When it is quantised: `to` is plain, and gets the numbers this storage makes of them.
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

// Refuses rows that hold, or decode to, infinities or NaN, with the place of the first; `first` is
// the number of the first row. Integers, and blocks that cannot be decoded, pass.
Status expect_finite_rows(const EncodedRows& rows, const Storage& storage, std::int64_t first,
                          std::int64_t count, std::int64_t columns);
// Whether a method fits scales and biases of this storage, or its own rule makes them.
bool is_fitted(const Storage& to);
// Whether importance weighs the errors of numbers that are quantised so.
bool uses_importance(const Storage& to, std::optional<AffineMethod> method);

// Encoded rows as a tensor that decode_rows reads; it views them.
CheckpointTensor tensor_of(const EncodedRows& rows, const Storage& storage, std::int64_t count,
                           std::int64_t columns);

// The numbers as f32.
Status as_f32(const RowNumbers& numbers, std::span<float> out);

// Rows of a chunk: a few MiB, so that what one pass has read the next finds in a cache.
std::int64_t rows_at_once(std::int64_t columns);

// The largest magnitude; infinite or NaN where a number is.
float largest_magnitude(const RowNumbers& numbers, std::int64_t count);

// Refuses infinities and NaN, with the place of the first.
Status expect_finite(const RowNumbers& numbers, std::int64_t count, std::int64_t columns);

// Whether a number of this magnitude becomes infinite in that dtype.
bool overflows(float magnitude, DType dtype);

// An error of a tensor's rows with the file and the tensor, where it does not say "tensor ..." yet.
Status with_tensor(const Checkpoint& source, const std::string& name, const Status& status);

// f(i, state) for i in [0, runs) on all threads, each of which has a state of its own. The first i
// that fails is the answer; what has not begun by then is left out.
template <class State, class F>
Status for_runs(std::int64_t runs, std::vector<State>& states, const F& f) {
  const int threads = static_cast<int>(std::clamp<std::int64_t>(runs, 1, num_threads()));
  states.resize(static_cast<std::size_t>(threads));
  std::atomic<std::size_t> begun = 0;
  std::atomic<std::int64_t> failed = runs;
  Status failure;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    State& state = states[begun++];
#pragma omp for schedule(dynamic)
    for (std::int64_t i = 0; i < runs; ++i) {
      if (failed < i) continue;
      Status status;
      try {
        status = f(i, state);
      } catch (const std::bad_alloc&) {
        status = unavailable("not enough memory for a run of rows");
      }
      if (status.ok()) continue;
#pragma omp critical(bittern_failure)
      if (i < failed) {
        failed = i;
        failure = status;
      }
    }
  }
  return failure;
}

}  // namespace bittern
