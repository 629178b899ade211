#include "convert/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "bittern/device.h"

namespace bittern {
namespace {

constexpr std::int64_t kChunkNumbers = 1 << 20;

double ratio(double error, double norm) {
  if (error == 0) return 0;
  return norm == 0 ? std::numeric_limits<double>::infinity() : std::sqrt(error / norm);
}

// What a group adds to its tensor.
struct GroupSums {
  double error = 0, norm = 0, max_abs = 0;
  std::uint32_t different = 0, not_finite = 0;
};

GroupSums sums_of_finite(const float* a, const float* b, std::int64_t n) {
  // Four sums side by side, so that they may be one vector.
  double error[4] = {}, norm[4] = {}, max_abs[4] = {};
  std::uint32_t different = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const double x = a[i], d = x - double{b[i]}, abs = std::abs(d);
    error[i % 4] += d * d;
    norm[i % 4] += x * x;
    max_abs[i % 4] = max_abs[i % 4] < abs ? abs : max_abs[i % 4];
    different += d != 0;
  }
  return {.error = (error[0] + error[1]) + (error[2] + error[3]),
          .norm = (norm[0] + norm[1]) + (norm[2] + norm[3]),
          .max_abs = std::max(std::max(max_abs[0], max_abs[1]), std::max(max_abs[2], max_abs[3])),
          .different = different};
}

GroupSums sums_of(const float* a, const float* b, std::int64_t n) {
  // Squares of finite f32 do not overflow f64, so that a sum tells.
  if (GroupSums sums = sums_of_finite(a, b, n); std::isfinite(sums.error + sums.norm)) return sums;
  float finite_a[kComparedGroup], finite_b[kComparedGroup];
  std::int64_t finite = 0;
  std::uint32_t not_finite = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    if (std::isfinite(a[i]) && std::isfinite(b[i])) {
      finite_a[finite] = a[i];
      finite_b[finite++] = b[i];
    } else {
      not_finite += a[i] != b[i] && !(std::isnan(a[i]) && std::isnan(b[i]));
    }
  }
  GroupSums sums = sums_of_finite(finite_a, finite_b, finite);
  sums.not_finite = not_finite;
  sums.different += not_finite;
  return sums;
}

// A group and its mean square error, while the tensor's norm is not yet known.
struct Candidate {
  double mean_square;
  std::int64_t row, column;
};

// The `most` largest, the earlier first among equals.
template <class T, class Key>
void keep_largest(std::vector<T>& all, T one, std::size_t most, Key key) {
  if (!(key(one) > 0) || most == 0) return;
  if (all.size() == most) {
    if (!(key(one) > key(all.back()))) return;
    all.pop_back();
  }
  const auto at =
      std::find_if(all.begin(), all.end(), [&](const T& x) { return key(x) < key(one); });
  all.insert(at, std::move(one));
}

// The two tensors are of one shape, which is not empty.
Status compare_tensor(const CheckpointTensor& a, const CheckpointTensor& b, std::size_t worst,
                      const std::function<void(std::int64_t numbers)>& progress,
                      TensorDifference& out, std::vector<Candidate>& candidates) {
  const std::int64_t rows = a.rows(), columns = a.columns();
  const std::int64_t groups = (columns + kComparedGroup - 1) / kComparedGroup;
  const std::int64_t at_once = std::clamp<std::int64_t>(kChunkNumbers / columns, 1, rows);
  std::vector<float> numbers_a, numbers_b;
  std::vector<GroupSums> sums;
  for (std::int64_t first = 0; first < rows; first += at_once) {
    const std::int64_t count = std::min(at_once, rows - first);
    numbers_a.resize(static_cast<std::size_t>(count * columns));
    numbers_b.resize(static_cast<std::size_t>(count * columns));
    sums.resize(static_cast<std::size_t>(count * groups));
    BITTERN_TRY(decode_rows(a, first, count, numbers_a));
    BITTERN_TRY(decode_rows(b, first, count, numbers_b));
#pragma omp parallel for num_threads(num_threads()) schedule(static) if (count * columns > 65536)
    for (std::int64_t i = 0; i < count * groups; ++i) {
      const std::int64_t column = i % groups * kComparedGroup;
      const std::int64_t at = i / groups * columns + column;
      sums[static_cast<std::size_t>(i)] = sums_of(numbers_a.data() + at, numbers_b.data() + at,
                                                  std::min(kComparedGroup, columns - column));
    }
    for (std::int64_t i = 0; i < count * groups; ++i) {
      const GroupSums& group = sums[static_cast<std::size_t>(i)];
      const std::int64_t column = i % groups * kComparedGroup;
      out.squared_error += group.error;
      out.squared_norm += group.norm;
      out.max_abs_error = std::max(out.max_abs_error, group.max_abs);
      out.different += group.different;
      out.not_finite += group.not_finite;
      const auto n = static_cast<double>(std::min(kComparedGroup, columns - column));
      keep_largest(candidates, {group.error / n, first + i / groups, column}, worst,
                   [](const Candidate& c) { return c.mean_square; });
    }
    progress(count * columns);
  }
  return {};
}

}  // namespace

double TensorDifference::relative_error() const { return ratio(squared_error, squared_norm); }

double Comparison::relative_error() const {
  double error = 0, norm = 0;
  for (const TensorDifference& tensor : tensors) {
    error += tensor.squared_error;
    norm += tensor.squared_norm;
  }
  return ratio(error, norm);
}

double Comparison::max_abs_error() const {
  double most = 0;
  for (const TensorDifference& tensor : tensors) most = std::max(most, tensor.max_abs_error);
  return most;
}

Result<Comparison> compare(const Checkpoint& a, const Checkpoint& b, std::size_t worst_groups,
                           const std::function<void(const ComparisonProgress&)>& progress) {
  Comparison result;
  struct Pair {
    const CheckpointTensor *a, *b;
  };
  std::vector<Pair> pairs;
  ComparisonProgress state;
  const auto empty = [](const Shape& shape) {
    return std::any_of(shape.dim.begin(), shape.dim.begin() + shape.rank,
                       [](std::int64_t n) { return n == 0; });
  };
  for (const CheckpointTensor& tensor : a.tensors()) {
    const CheckpointTensor* other = b.find(tensor.name);
    if (other == nullptr) {
      result.only_in_a.push_back(tensor.name);
    } else if (other->shape != tensor.shape) {
      result.shapes_differ.push_back({tensor.name, tensor.shape, other->shape});
    } else {
      pairs.push_back({&tensor, other});
      if (!empty(tensor.shape)) state.all += static_cast<std::uint64_t>(tensor.shape.numel());
    }
  }
  for (const CheckpointTensor& tensor : b.tensors())
    if (a.find(tensor.name) == nullptr) result.only_in_b.push_back(tensor.name);

  for (const Pair& pair : pairs) {
    TensorDifference tensor{
        .name = pair.a->name, .shape = pair.a->shape, .a = pair.a->storage, .b = pair.b->storage};
    std::vector<Candidate> candidates;
    state.tensor = tensor.name;
    if (!empty(tensor.shape)) {
      const Status status = compare_tensor(
          *pair.a, *pair.b, worst_groups,
          [&](std::int64_t numbers) {
            state.done += static_cast<std::uint64_t>(numbers);
            progress(state);
          },
          tensor, candidates);
      if (status.code() == Code::unsupported) {
        result.not_compared.push_back({tensor.name, std::string(status.message())});
        continue;
      }
      BITTERN_TRY(status);
      const double mean_square = tensor.squared_norm / static_cast<double>(tensor.shape.numel());
      for (const Candidate& c : candidates) {
        keep_largest(result.worst_groups,
                     {.tensor = result.tensors.size(),
                      .row = c.row,
                      .column = c.column,
                      .error = ratio(c.mean_square, mean_square)},
                     worst_groups, [](const GroupDifference& group) { return group.error; });
      }
    }
    result.tensors.push_back(std::move(tensor));
  }
  return result;
}

}  // namespace bittern
