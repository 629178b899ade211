// Codes that are chosen for a model's matrices by more than their own numbers: what a layer above
// this one adds to a conversion (src/distill).
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/convert.h"
#include "bittern/status.h"
#include "convert/conversion.h"
#include "formats/checkpoint.h"
#include "formats/grid.h"

namespace bittern {

class MatrixCoder {
 public:
  virtual ~MatrixCoder() = default;

  virtual std::string_view method() const = 0;  // as QuantizeOptions::method calls it
  // Everything that can be refused before the work begins. Called first, once.
  virtual Status prepare(const Checkpoint& source) = 0;
  // Why it leaves this matrix to the storage's own rule, as a note, which may be empty; nothing: it
  // codes it.
  virtual std::optional<std::string> declines(const OutputTensor& tensor) const = 0;
  // Of all that its codes depend on beside the source and the tensors' storages.
  virtual std::uint64_t fingerprint() const = 0;

  struct Task {
    std::size_t index;  // among the conversion's tensors
    const OutputTensor* tensor;
  };
  // Takes rows from `first` on, as many as `rows` has; from any thread, one at a time.
  using Sink = std::function<Status(std::size_t index, std::int64_t first, const GridRows& rows)>;
  // Calls `take` with all rows of the tasks' tensors, in any order. Tensors whose numbers come too
  // near to the end of their scales' range are left out whole, and their indices returned.
  virtual Result<std::vector<std::size_t>> code(const Checkpoint& source,
                                                const std::vector<Task>& tasks, const Sink& take,
                                                const ModelProgressFunction& progress) = 0;
};

// The grid on which a matrix of this storage is coded: bits, group and the scales' dtype; nothing:
// it has none that takes any codes, scales and biases. Rows for Q4_K and Q5_K are fitted, unless
// super-blocks hold them exactly.
struct CodedGrid {
  int bits, group;
  DType params;                // of scales
  DType biases;                // f32 where biases are exact products, or theirs
  bool integer_zeros = false;  // a bias is -scale times an integer 0 .. 2^bits - 1, rounded
  std::optional<int> zero{};   // that integer, if it is the same everywhere (Q4_0, Q5_0, Q8_0)
  bool operator==(const CodedGrid&) const = default;
};
std::optional<CodedGrid> coded_grid(const Storage& to);

// quantize_model with a coder, which may be null. What the options say about a text is the coder's.
Result<QuantizeReport> quantize_model(const std::string& source, const std::string& out,
                                      const QuantizeOptions& options, MatrixCoder* coder) noexcept;

}  // namespace bittern
