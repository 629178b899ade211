// Bits by measured error: what --target-bpw chooses from, and what it takes.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <numeric>

#include "convert/for_runs.h"
#include "convert/planner.h"
#include "convert/progress.h"
#include "convert/target.h"
#include "core/ranks.h"
#include "formats/decode.h"

namespace bittern {
namespace {

// Rounded up, so that a target of what is printed can be met.
std::string bits_text(std::uint64_t bytes, std::uint64_t weights) {
  const double bits = 8 * static_cast<double>(bytes) / static_cast<double>(weights);
  char text[32];
  std::snprintf(text, sizeof text, "%.4f", std::ceil(bits * 1e4) / 1e4);
  return text;
}

// sum weight * (w - y)^2 over rows; a weight a column, or none: all 1.
double squared_error(std::span<const float> w, std::span<const float> y,
                     std::span<const float> weights) {
  constexpr std::size_t kSums = 8;  // so that additions need not wait for each other
  double sums[kSums] = {};
  const std::size_t columns = weights.size();
  if (columns == 0) {
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double d = double{w[i]} - double{y[i]};
      sums[i % kSums] += d * d;
    }
  } else {
    for (std::size_t row = 0; row < w.size(); row += columns) {
      for (std::size_t c = 0; c < columns; ++c) {
        const double d = double{w[row + c]} - double{y[row + c]};
        sums[c % kSums] += d * d * double{weights[c]};
      }
    }
  }
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

// The squared error of each storage; infinite if it cannot hold the numbers. Runs of rows depend on
// the number of neither threads nor processes, and their sums are added in order, so the result
// does not either.
Result<std::vector<double>> measure(const RowReader& reader,
                                    const std::vector<RowEncoder>& encoders,
                                    std::span<const float> importance, std::int64_t matrices,
                                    Ranks* ranks, TeamProgress& progress) {
  struct Worker {
    RowNumbers numbers;
    EncodedRows encoded;
    std::vector<float> w, y;
  };
  const std::int64_t columns = reader.columns(), matrix_rows = reader.rows() / matrices;
  const std::int64_t length = rows_at_once(columns);
  const std::int64_t matrix_runs = (matrix_rows + length - 1) / length;
  const std::int64_t runs = matrices * matrix_runs;
  const RunItems items = items_of_runs(ranks, runs, 64);
  std::vector<double> sums;  // of an item's runs
  std::int64_t first = 0;    // of them
  const auto run = [&](std::int64_t in_item, Worker& worker) -> Status {
    const std::int64_t i = first + in_item;
    const std::int64_t matrix = i / matrix_runs, in_matrix = i % matrix_runs * length;
    const std::int64_t row = matrix * matrix_rows + in_matrix;
    const std::int64_t count = std::min(length, matrix_rows - in_matrix);
    BITTERN_TRY(progress.go_on());
    BITTERN_TRY(reader.numbers(row, count, worker.numbers));
    BITTERN_TRY(expect_finite(worker.numbers, count * columns, columns));
    worker.w.resize(static_cast<std::size_t>(count * columns));
    worker.y.resize(worker.w.size());
    BITTERN_TRY(as_f32(worker.numbers, worker.w));
    const std::span<const float> weights =
        importance.empty() ? importance
                           : importance.subspan(static_cast<std::size_t>(matrix * columns),
                                                static_cast<std::size_t>(columns));
    std::size_t refused = 0;
    double* sum = sums.data() + static_cast<std::size_t>(in_item) * encoders.size();
    for (const RowEncoder& encoder : encoders) {
      std::uint64_t saturated = 0;
      worker.encoded.scales.clear();  // plain numbers have none
      worker.encoded.biases.clear();
      const Status encoded =
          encoder.encode(worker.numbers, count, columns, weights, worker.encoded, saturated);
      if (encoded.code() == Code::unsupported) {
        if (++refused == encoders.size()) return encoded;
        *sum++ = std::numeric_limits<double>::infinity();
        continue;
      }
      BITTERN_TRY(encoded);
      BITTERN_TRY(
          decode_rows(tensor_of(worker.encoded, encoder.to, count, columns), 0, count, worker.y));
      *sum++ = squared_error(worker.w, worker.y, weights);
    }
    return progress.add(static_cast<std::uint64_t>(count * columns));
  };
  std::vector<Worker> workers;
  const auto make = [&](std::int64_t item, Packer& out) -> Status {
    first = item * items.length;
    const std::int64_t count = std::min(items.length, runs - first);
    sums.assign(encoders.size() * static_cast<std::size_t>(count), 0.0);
    BITTERN_TRY(for_runs(count, workers, run));
    out.add(sums);
    return {};
  };
  std::vector<double> total(encoders.size());
  const auto add = [&](std::int64_t, Unpacker in) -> Status {
    const auto made = in.next<std::vector<double>>();
    for (std::size_t i = 0; i < made.size(); ++i) total[i % encoders.size()] += made[i];
    return {};
  };
  BITTERN_TRY(deal(ranks, items.items, DealTo::all, make, add));
  return total;
}

}  // namespace

// The types of all tensors by each `--bits` and `--type` of a GGUF file: one for all, and the
// mixes.
Result<std::vector<std::vector<GgmlType>>> ConversionPlanner::uniform_types() const {
  std::vector<std::vector<GgmlType>> all;
  if (options_.format != ModelFormat::gguf) return all;
  for (const WrittenType& type : kWritten) all.emplace_back(conversion_.tensors_.size(), type.type);
  if (options_.pure) return all;
  const auto model = mix_model();
  if (!model) return model.status();
  for (const Mix& mix : mixes()) all.push_back(types_of(mix, *model));
  return all;
}

// What each `--bits` or `--type` makes of the tensor, with its fallbacks. `types`: in a GGUF file.
Result<std::vector<Storage>> ConversionPlanner::uniform_choices(
    const OutputTensor& tensor, const RowReader& reader, std::span<const GgmlType> types) const {
  std::vector<Storage> storages;
  if (options_.format == ModelFormat::gguf) {
    std::map<GgmlType, GgmlType> fitting;
    for (const GgmlType type : types) {
      auto known = fitting.find(type);
      if (known == fitting.end()) {
        const auto fits = type_that_fits(reader, type);
        if (!fits) return fits.status();
        known = fitting.emplace(type, *fits).first;
      }
      storages.push_back(storage_of(known->second));
    }
  } else {
    const bool any = any_group(rule_for(tensor.recipe));
    for (const int wanted : kGroups) {
      const int group = any ? wanted : tensor.to.group;
      const bool fits = columns_of(tensor.recipe.shape) % group == 0;
      for (const int bits : kBits)
        storages.push_back(fits ? affine(bits, group, tensor.to.dtype) : kept(tensor));
    }
  }
  return storages;
}

// Whether the tensor's group is for --target-bpw to choose, if its bits are.
bool ConversionPlanner::any_group(const TensorRule* rule) const {
  return free_groups_ && (rule == nullptr || (rule->bits == 0 && rule->group == 0));
}

const std::vector<float>* ConversionPlanner::importance_of(const OutputTensor& tensor) const {
  const auto i = static_cast<std::size_t>(&tensor - conversion_.tensors_.data());
  const bool known = i < conversion_.importance_.size() && !conversion_.importance_[i].empty();
  return known ? &conversion_.importance_[i] : nullptr;
}

// As the run encodes it.
RowEncoder ConversionPlanner::encoder_of(const Storage& storage) const {
  RowEncoder encoder{.to = storage, .method = options_.method, .through = {}};
  encoder.saturate = options_.lossy;
  if (options_.format == ModelFormat::safetensors && storage.quantized()) {
    encoder.through = storage;
    encoder.to = Storage::plain(storage.dtype);
  }
  return encoder;
}

Status ConversionPlanner::meet_target() {
  std::uint64_t kept = 0;
  for (const OutputTensor& tensor : conversion_.tensors_) {
    if (std::binary_search(adjustable_.begin(), adjustable_.end(), &tensor)) continue;
    const auto bytes = tensor.to.bytes(tensor.recipe.shape);
    if (!bytes) return bytes.status();
    kept += *bytes;
  }
  // Errors of tensors that the importance matrix does not know count in the same unit: the mean.
  double importance_sum = 0;
  std::size_t importances = 0;
  for (const std::vector<float>& weights : conversion_.importance_) {
    importance_sum += std::accumulate(weights.begin(), weights.end(), 0.0);
    importances += weights.size();
  }
  const double mean = importances > 0 ? importance_sum / static_cast<double>(importances) : 1;

  ModelProgress state{.doing = "measuring"};
  for (const OutputTensor* tensor : adjustable_)
    state.total += static_cast<std::uint64_t>(tensor->recipe.shape.numel());
  TeamProgress progress(progress_, state);
  std::vector<std::vector<Storage>> storages(adjustable_.size());
  std::vector<std::vector<SizedLoss>> choices(adjustable_.size());
  std::vector<std::vector<std::size_t>> uniform;
  const auto all_types = uniform_types();
  if (!all_types) return all_types.status();
  for (std::size_t t = 0; t < adjustable_.size(); ++t) {
    const OutputTensor& tensor = *adjustable_[t];
    const auto reader = RowReader::open(source_, tensor.recipe);
    if (!reader) return reader.status();
    std::vector<GgmlType> types;
    for (const std::vector<GgmlType>& one : *all_types)
      types.push_back(one[static_cast<std::size_t>(&tensor - conversion_.tensors_.data())]);
    const auto wanted = uniform_choices(tensor, *reader, types);
    if (!wanted) return wanted.status();
    uniform.resize(wanted->size());
    for (std::size_t u = 0; u < wanted->size(); ++u) {
      const auto found = std::find(storages[t].begin(), storages[t].end(), (*wanted)[u]);
      uniform[u].push_back(static_cast<std::size_t>(found - storages[t].begin()));
      if (found == storages[t].end()) storages[t].push_back((*wanted)[u]);
    }
    std::vector<RowEncoder> encoders;
    for (const Storage& storage : storages[t]) encoders.push_back(encoder_of(storage));
    const std::vector<float>* weights = importance_of(tensor);
    const std::int64_t matrices =
        tensor.recipe.shape.rank >= 3 ? std::max<std::int64_t>(tensor.recipe.shape[0], 1) : 1;
    progress.begin(tensor.recipe.name);
    const auto lost =
        measure(*reader, encoders, weights == nullptr ? std::span<const float>{} : *weights,
                matrices, options_.ranks, progress);
    if (!lost) return with_tensor(source_, source_of(tensor.recipe), lost.status());
    for (std::size_t c = 0; c < storages[t].size(); ++c) {
      const auto bytes = storages[t][c].bytes(tensor.recipe.shape);
      if (!bytes) return bytes.status();
      const bool copied = storages[t][c] == tensor.from && reader->movable();
      choices[t].push_back({*bytes, copied ? 0 : (*lost)[c] * (weights == nullptr ? mean : 1)});
    }
    BITTERN_TRY(progress.end());
  }

  std::uint64_t least = kept;
  for (std::size_t t = 0; t < choices.size(); ++t) {
    std::uint64_t smallest = std::numeric_limits<std::uint64_t>::max();
    for (const SizedLoss& choice : choices[t])
      if (std::isfinite(choice.loss)) smallest = std::min(smallest, choice.bytes);
    if (smallest == std::numeric_limits<std::uint64_t>::max())
      return unsupported(source_.path() + ": tensor " + source_of(adjustable_[t]->recipe) +
                         ": its numbers are too large for every choice of @{target_bpw}, expected "
                         "a rule for it");
    least += smallest;
  }
  const std::uint64_t weights = conversion_.weights();
  // The most bytes whose bits per weight, rounded as they are reported, do not exceed the target.
  const auto fits = [&](std::uint64_t bytes) {
    return 8 * static_cast<double>(bytes) / static_cast<double>(weights) <= options_.target_bpw;
  };
  auto room = static_cast<std::uint64_t>(options_.target_bpw / 8 * static_cast<double>(weights));
  room -= room > 0 && !fits(room);
  room += fits(room + 1);
  char target[32];
  std::snprintf(target, sizeof target, "@{target_bpw} %.6g", options_.target_bpw);
  if (least > room)
    return invalid(
        std::string(target) + ": the smallest possible is " + bits_text(least, weights) +
        " bits per weight, with the tensors that are kept" +
        (free_groups_ || options_.format == ModelFormat::gguf ? "" : " and the groups asked for"));
  const std::vector<std::size_t> chosen = choose_within(choices, uniform, room - kept);
  std::uint64_t reached = kept;
  bool best = true;
  for (std::size_t t = 0; t < adjustable_.size(); ++t) {
    const SizedLoss& taken = choices[t][chosen[t]];
    adjustable_[t]->to = storages[t][chosen[t]];
    adjustable_[t]->note.clear();
    reached += taken.bytes;
    best &= std::none_of(choices[t].begin(), choices[t].end(),
                         [&](const SizedLoss& choice) { return choice.loss < taken.loss; });
  }
  if (best)
    note(std::string(target) + ": every tensor has its best choice at " +
         bits_text(reached, weights) + " bits per weight");
  if (options_.format == ModelFormat::safetensors)
    note(std::string(target) + ": the codes would have " + bits_text(reached, weights) +
         " bits per weight; the folder holds the plain numbers they mean");
  return {};
}

}  // namespace bittern
