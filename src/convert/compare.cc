#include "convert/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "bittern/device.h"
#include "bittern/environment.h"
#include "convert/apart.h"
#include "convert/architecture.h"
#include "convert/call.h"
#include "convert/describe.h"
#include "convert/encode.h"
#include "convert/option_names.h"
#include "convert/parse_options.h"
#include "convert/progress.h"
#include "convert/row_reader.h"
#include "core/guarded.h"
#include "cpu/parallel.h"

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
  std::uint32_t different = 0, not_finite = 0, not_finite_a = 0, not_finite_b = 0;
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
  std::uint32_t not_finite = 0, not_finite_a = 0, not_finite_b = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    not_finite_a += !std::isfinite(a[i]);
    not_finite_b += !std::isfinite(b[i]);
    if (std::isfinite(a[i]) && std::isfinite(b[i])) {
      finite_a[finite] = a[i];
      finite_b[finite++] = b[i];
    } else {
      not_finite += a[i] != b[i] && !(std::isnan(a[i]) && std::isnan(b[i]));
    }
  }
  GroupSums sums = sums_of_finite(finite_a, finite_b, finite);
  sums.not_finite = not_finite;
  sums.not_finite_a = not_finite_a;
  sums.not_finite_b = not_finite_b;
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

// A tensor's numbers in their order, as f32.
class Numbers {
 public:
  explicit Numbers(RowReader reader) : reader_(std::move(reader)) {}
  const Storage& storage() const { return reader_.storage(); }
  std::int64_t width() const { return reader_.columns(); }

  // Numbers [first, first + count), whole rows; valid until the next call.
  Result<const float*> read(std::int64_t first, std::int64_t count) {
    if (Status status = reader_.numbers(first / width(), count / width(), rows_); !status.ok())
      return status;
    if (rows_.beyond.count > 0)
      return unsupported(beyond_f32(rows_, width()) + ", in which numbers are compared");
    if (rows_.dtype == DType::f32) return static_cast<const float*>(rows_.data);
    f32_.resize(static_cast<std::size_t>(count));
    if (Status status = as_f32(rows_, f32_); !status.ok()) return status;
    return f32_.data();
  }

 private:
  RowReader reader_;
  RowNumbers rows_;
  std::vector<float> f32_;
};

// Both have the numbers of `shape`, which is not empty.
Status compare_tensor(Numbers& a, Numbers& b, const Shape& shape, std::size_t worst,
                      TeamProgress& progress, TensorDifference& out,
                      std::vector<Candidate>& candidates) {
  const std::int64_t all = shape.numel();
  const std::int64_t columns = columns_of(shape);
  const std::int64_t groups = (columns + kComparedGroup - 1) / kComparedGroup;  // of a row
  // Whole rows of both, whose widths differ where elements of a vector move.
  const std::int64_t unit = std::lcm(columns, std::lcm(a.width(), b.width()));
  const std::int64_t at_once = unit * std::max<std::int64_t>(1, kChunkNumbers / unit);
  std::vector<GroupSums> sums;
  for (std::int64_t first = 0; first < all; first += at_once) {
    const std::int64_t count = std::min(at_once, all - first);
    const auto numbers_a = a.read(first, count);
    if (!numbers_a) return numbers_a.status();
    const auto numbers_b = b.read(first, count);
    if (!numbers_b) return numbers_b.status();
    const std::int64_t chunk_groups = count / columns * groups;
    sums.resize(static_cast<std::size_t>(chunk_groups));
    cpu::parallel(
        chunk_groups, cpu::kGrain / kComparedGroup, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t column = i % groups * kComparedGroup;
            const std::int64_t at = i / groups * columns + column;
            sums[static_cast<std::size_t>(i)] = sums_of(*numbers_a + at, *numbers_b + at,
                                                        std::min(kComparedGroup, columns - column));
          }
        });
    for (std::int64_t i = 0; i < chunk_groups; ++i) {
      const GroupSums& group = sums[static_cast<std::size_t>(i)];
      const std::int64_t column = i % groups * kComparedGroup;
      out.squared_error += group.error;
      out.squared_norm += group.norm;
      out.max_abs_error = std::max(out.max_abs_error, group.max_abs);
      out.different += group.different;
      out.not_finite += group.not_finite;
      out.not_finite_in_model += group.not_finite_a;
      out.not_finite_in_other += group.not_finite_b;
      const auto n = static_cast<double>(std::min(kComparedGroup, columns - column));
      keep_largest(candidates, {group.error / n, first / columns + i / groups, column}, worst,
                   [](const Candidate& c) { return c.mean_square; });
    }
    BITTERN_TRY(progress.add(static_cast<std::uint64_t>(count)));
  }
  return {};
}

// ---- names ----

// A model's tensors under the names and in the row orders of a world.
class Named {
 public:
  explicit Named(const Checkpoint& model) : model_(model) {
    for (const CheckpointTensor& tensor : model.tensors())
      shapes_.push_back({tensor.name, tensor.shape});
    own_ = model.gguf() != nullptr ? World::gguf : world_of_folder(shapes_);
    for (const NamedShape& tensor : shapes_)
      tensors_.push_back({.name = tensor.name, .shape = tensor.shape, .sources = {tensor.name}});
    sort();
  }
  World world() const { return own_; }
  const std::vector<Recipe>& tensors() const { return tensors_; }
  const std::vector<std::string>& left_out() const { return left_out_; }
  const Recipe* find(std::string_view name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : found->second;
  }
  bool shares_a_name(const Named& other) const {
    return std::any_of(tensors_.begin(), tensors_.end(),
                       [&](const Recipe& recipe) { return other.find(recipe.name) != nullptr; });
  }
  bool known() const { return own_ != World::gguf && known_architecture(model_.config()).ok(); }

  Status move_to(World world) {
    OrderedJson config = model_.config();
    if (own_ == World::gguf) {
      auto made = config_from_gguf(*model_.gguf(), "float32");
      if (!made) return made.status();
      config = std::move(*made);
    } else if (config.is_null()) {
      return invalid(model_.path() +
                     ": no config.json, expected one that tells what its tensors are");
    }
    auto renaming = rename_tensors(config, shapes_, own_, world);
    if (!renaming) {
      return {renaming.status().code(),
              model_.path() + ": " + std::string(renaming.status().message())};
    }
    tensors_ = std::move(renaming->tensors);
    left_out_ = std::move(renaming->left_out);
    sort();
    return {};
  }

 private:
  void sort() {
    by_name_.clear();
    for (const Recipe& recipe : tensors_) by_name_.emplace(recipe.name, &recipe);
  }

  const Checkpoint& model_;
  std::vector<NamedShape> shapes_;
  World own_;
  std::vector<Recipe> tensors_;
  std::vector<std::string> left_out_;
  std::map<std::string_view, const Recipe*> by_name_;  // into tensors_
};

// b translated to a's world. If two folders still have no common name, one may be a vision model
// (language_model.model.layers...). Then both are translated to llama.cpp's names.
Status bring_together(Named& a, Named& b) {
  const bool folders = a.world() != World::gguf && b.world() != World::gguf;
  // Folders may have names nobody knows: they are compared as they are.
  if (a.world() != b.world() && (!folders || b.known())) BITTERN_TRY(b.move_to(a.world()));
  if (!folders || !a.known() || !b.known() || a.shares_a_name(b)) return {};
  BITTERN_TRY(a.move_to(World::gguf));
  return b.move_to(World::gguf);
}

std::vector<std::int64_t> dims(const Shape& shape) {
  return {shape.dim.begin(), shape.dim.begin() + shape.rank};
}

bool is_empty(const Shape& shape) {
  return std::any_of(shape.dim.begin(), shape.dim.begin() + shape.rank,
                     [](std::int64_t n) { return n == 0; });
}

}  // namespace

double TensorDifference::relative_error() const noexcept {
  return ratio(squared_error, squared_norm);
}

double ModelComparison::relative_error() const noexcept {
  double error = 0, norm = 0;
  for (const TensorDifference& tensor : tensors) {
    error += tensor.squared_error;
    norm += tensor.squared_norm;
  }
  return ratio(error, norm);
}

double ModelComparison::max_abs_error() const noexcept {
  double most = 0;
  for (const TensorDifference& tensor : tensors) most = std::max(most, tensor.max_abs_error);
  return most;
}

std::size_t ModelComparison::equal() const noexcept {
  return static_cast<std::size_t>(
      std::count_if(tensors.begin(), tensors.end(),
                    [](const TensorDifference& tensor) { return tensor.different == 0; }));
}

Result<ModelComparison> compare(const Checkpoint& a, const Checkpoint& b, std::size_t worst_groups,
                                const ModelProgressFunction& tell) noexcept try {
  Named names_a(a), names_b(b);
  BITTERN_TRY(bring_together(names_a, names_b));

  ModelComparison result;
  struct Pair {
    const Recipe *a, *b;
  };
  std::vector<Pair> pairs;
  ModelProgress state{.doing = "comparing"};
  for (const Recipe& recipe : names_a.tensors()) {
    const Recipe* other = names_b.find(recipe.name);
    if (other == nullptr) {
      result.only_in_model.push_back(recipe.name);
    } else if (other->shape != recipe.shape) {
      result.shapes_differ.push_back({recipe.name, dims(recipe.shape), dims(other->shape)});
    } else {
      pairs.push_back({&recipe, other});
      if (!is_empty(recipe.shape)) state.total += static_cast<std::uint64_t>(recipe.shape.numel());
    }
  }
  for (const Recipe& recipe : names_b.tensors())
    if (names_a.find(recipe.name) == nullptr) result.only_in_other.push_back(recipe.name);
  for (const std::string& name : names_a.left_out()) result.only_in_model.push_back(name);
  for (const std::string& name : names_b.left_out()) result.only_in_other.push_back(name);

  TeamProgress progress(tell, state);
  for (const Pair& pair : pairs) {
    const Shape& shape = pair.a->shape;
    TensorDifference tensor{
        .name = pair.a->name, .shape = dims(shape), .storage = {}, .other_storage = {}};
    if (is_empty(shape)) {
      result.tensors.push_back(std::move(tensor));
      continue;
    }
    std::vector<Candidate> candidates;
    progress.begin(pair.a->name);
    const auto work = [&]() -> Status {
      auto reader_a = RowReader::open(a, *pair.a);
      if (!reader_a) return reader_a.status();
      auto reader_b = RowReader::open(b, *pair.b);
      if (!reader_b) return reader_b.status();
      Numbers numbers_a(std::move(*reader_a)), numbers_b(std::move(*reader_b));
      tensor.storage = numbers_a.storage().str();
      tensor.other_storage = numbers_b.storage().str();
      return compare_tensor(numbers_a, numbers_b, shape, worst_groups, progress, tensor,
                            candidates);
    };
    if (const Status status = work(); !status.ok()) {
      if (status.code() == Code::out_of_memory || status.code() == Code::cancelled) return status;
      result.not_compared.push_back({tensor.name, std::string(status.message())});
      continue;
    }
    const double mean_square = tensor.squared_norm / static_cast<double>(shape.numel());
    for (const Candidate& c : candidates) {
      keep_largest(result.worst_groups,
                   {.tensor = result.tensors.size(),
                    .row = c.row,
                    .column = c.column,
                    .error = ratio(c.mean_square, mean_square)},
                   worst_groups, [](const GroupDifference& group) { return group.error; });
    }
    if (tensor.not_finite_in_model + tensor.not_finite_in_other > 0)
      result.not_finite.push_back(result.tensors.size());
    result.tensors.push_back(std::move(tensor));
  }
  return result;
} catch (...) {
  return caught(b.path());
}

namespace {

Result<ModelComparison> compare_files(const std::string& path_a, const std::string& path_b,
                                      const CompareOptions& options) {
  BITTERN_TRY(check_environment());
  BITTERN_TRY(check_threads(options.threads));
  const CallSettings settings(options.threads);
  for (const auto& [field, path] : {std::pair("model", &path_a), std::pair("other", &path_b)})
    if (path->empty())
      return invalid(std::string("@{") + field + "}: empty, expected a model to read");
  const auto a = Checkpoint::open(path_a);
  if (!a) return a.status();
  const auto b = Checkpoint::open(path_b);
  if (!b) return b.status();
  std::vector<std::string> inputs = a->files();
  for (std::string& file : b->files()) inputs.push_back(std::move(file));
  std::vector<OutputName> outputs;
  for (const std::string& path : options.also_written) outputs.push_back({"@{also_written}", path});
  BITTERN_TRY(check_apart(outputs, inputs));
  auto comparison = compare(*a, *b, options.worst_groups, options.progress);
  BITTERN_TRY(a->unchanged());
  BITTERN_TRY(b->unchanged());
  if (!comparison) return comparison.status();
  comparison->model = describe(*a);
  comparison->other = describe(*b);
  return comparison;
}

}  // namespace

Result<ModelComparison> compare_models(const std::string& model, const std::string& other,
                                       const CompareOptions& options) noexcept {
  return guarded("compare_models", [&]() -> Result<ModelComparison> {
    auto comparison = compare_files(model, other, options);
    if (!comparison) return with_option_names(comparison.status(), options.option_name);
    return comparison;
  });
}

}  // namespace bittern
