// How far apart two models are. Of tensors a and b, as f32:
//   relative error = ||a - b|| / ||a||
// and of each group of 32 columns of a row
//   error = rms(a - b in the group) / rms(a in the whole tensor)
// Sums are f64 in the order of the numbers: the same bits for any number of threads.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/status.h"
#include "bittern/tensor.h"
#include "formats/checkpoint.h"

namespace bittern {

inline constexpr std::int64_t kComparedGroup = 32;

struct TensorDifference {
  std::string name;  // in a
  Shape shape;
  Storage a, b;                  // of b: of what it is made from
  std::uint64_t different = 0;   // numbers that are not equal; two NaN are
  std::uint64_t not_finite = 0;  // those of them where one is infinite or NaN, left out of the sums
  std::uint64_t not_finite_a = 0, not_finite_b = 0;  // infinite or NaN in each, equal or not
  double squared_error = 0, squared_norm = 0;        // ||a - b||^2, ||a||^2
  double max_abs_error = 0;

  // Infinite when a is zero and b is not.
  double relative_error() const;
};

struct GroupDifference {
  std::size_t tensor = 0;  // of Comparison::tensors
  std::int64_t row = 0, column = 0;
  double error = 0;
};

struct Comparison {
  struct Shapes {
    std::string name;
    Shape a, b;
  };
  struct Skipped {
    std::string name, reason;
  };
  std::vector<TensorDifference> tensors;      // in a's order
  std::vector<GroupDifference> worst_groups;  // the worst first; none without an error
  std::vector<std::string> only_in_a, only_in_b;
  std::vector<Shapes> shapes_differ;
  std::vector<Skipped> not_compared;  // what cannot be decoded or put together

  // Of all tensors compared as one vector, less what is infinite or NaN: not_finite() tells where.
  double relative_error() const;
  double max_abs_error() const;
  // The tensors that hold an infinity or NaN in either model.
  std::vector<const TensorDifference*> not_finite() const;
};

struct ComparisonProgress {
  std::string_view tensor;
  std::uint64_t done = 0, all = 0;  // numbers
};

// Streams rows: memory does not grow with the models. Where one is a GGUF file and the other a
// folder, or the folders name tensors differently, b's tensors are those it would have in a's world
// (convert/architecture.h), and what a has no place for is only in b. Folders without a common name
// are compared under llama.cpp's.
Result<Comparison> compare(const Checkpoint& a, const Checkpoint& b, std::size_t worst_groups,
                           const std::function<void(const ComparisonProgress&)>& progress) noexcept;

}  // namespace bittern
