// Rows of a tensor to be written, gathered from rows of the source as a recipe says.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "bittern/dtype.h"
#include "bittern/status.h"
#include "convert/recipe.h"
#include "formats/checkpoint.h"
#include "formats/grid.h"

namespace bittern {

// The length of a row; a single number is one of its own.
inline std::int64_t columns_of(const Shape& shape) {
  return shape.rank == 0 ? 1 : shape[shape.rank - 1];
}

// Bytes of one row of codes (or plain numbers, or blocks) and scales, and of `together` rows of
// biases: 32 where zero points are packed down the rows.
struct RowBytes {
  std::uint64_t data = 0, scales = 0, biases = 0;
  std::int64_t together = 1;
  // `rows` rows and as many more as share bytes with them.
  std::int64_t whole(std::int64_t rows) const {
    return (rows + together - 1) / together * together;
  }
};
Result<RowBytes> row_bytes(const Storage& storage, std::int64_t columns);

// Numbers in f32, f16 or bf16: views of the mapped source if it has them in the wanted form.
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
  // The storage in which products read its rows (docs/run.md). Where there are zero points, biases
  // take their place; these are exact in f32, and in the scales' dtype if all zero points are the
  // same power of two.
  Storage multiplied() const;

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

// Rows of a chunk: a few MiB, so that the next pass finds in a cache what one pass has read.
std::int64_t rows_at_once(std::int64_t columns);

// An error of a tensor's rows with the file and the tensor, where it does not say "tensor ..." yet.
Status with_tensor(const Checkpoint& source, const std::string& name, const Status& status);

}  // namespace bittern
