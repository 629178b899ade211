// Bits by measured error: --target-bpw.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "convert/planner.h"

namespace bittern {

namespace {

std::string short_number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", x);
  return text;
}

// The layer a name tells, or -1.
int layer_of(const std::string& name) {
  for (const std::string_view before : {"layers.", "blk."}) {
    const std::size_t at = name.find(before);
    if (at == name.npos) continue;
    int layer = -1;
    const char* digits = name.data() + at + before.size();
    std::from_chars(digits, name.data() + name.size(), layer);
    return layer;
  }
  return -1;
}

// sum (w - y)^2 and sum w^2
struct Squares {
  double error = 0, size = 0;
  void operator+=(const Squares& other) { error += other.error, size += other.size; }
};
Squares squares(std::span<const float> w, std::span<const float> y) {
  constexpr std::size_t kSums = 8;  // so that additions need not wait for each other
  Squares sums[kSums];
  for (std::size_t i = 0; i < w.size(); ++i) {
    const double x = w[i], d = x - double{y[i]};
    sums[i % kSums] += {d * d, x * x};
  }
  for (std::size_t i = 1; i < kSums; ++i) sums[0] += sums[i];
  return sums[0];
}

// What each storage makes of the tensor. Runs of rows are the same for any number of threads and
// their sums are added in order, so that the sums are the same, too.
Result<std::vector<Squares>> measure(const RowReader& reader, const std::vector<Storage>& storages,
                                     std::optional<AffineMethod> method,
                                     const std::function<void(std::int64_t rows)>& progress) {
  struct Worker {
    RowNumbers numbers;
    EncodedRows encoded;
    std::vector<float> w, y;
  };
  const std::int64_t columns = reader.columns(), length = rows_at_once(columns);
  const std::int64_t runs = (reader.rows() + length - 1) / length;
  std::vector<Squares> sums(storages.size() * static_cast<std::size_t>(runs));
  const auto run = [&](std::int64_t i, Worker& worker) -> Status {
    const std::int64_t row = i * length, count = std::min(length, reader.rows() - row);
    BITTERN_TRY(reader.numbers(row, count, worker.numbers));
    worker.w.resize(static_cast<std::size_t>(count * columns));
    worker.y.resize(worker.w.size());
    BITTERN_TRY(as_f32(worker.numbers, worker.w));
    Squares* sum = sums.data() + static_cast<std::size_t>(i) * storages.size();
    for (const Storage& to : storages) {
      BITTERN_TRY((RowEncoder{.to = to, .method = method, .through = {}}.encode(
          worker.numbers, count, columns, {}, worker.encoded)));
      BITTERN_TRY(decode_rows(tensor_of(worker.encoded, to, count, columns), 0, count, worker.y));
      *sum++ = squares(worker.w, worker.y);
    }
#pragma omp critical(bittern_progress)
    progress(count);
    return {};
  };
  std::vector<Worker> workers;
  BITTERN_TRY(for_runs(runs, workers, run));
  std::vector<Squares> total(storages.size());
  for (std::size_t i = 0; i < sums.size(); ++i) total[i % storages.size()] += sums[i];
  return total;
}

}  // namespace

// Greedy: every tensor begins with the fewest bits it may have; then, again and again, the step
// that gains the most per byte is taken, while the target allows it. What a tensor loses is its
// relative squared error times its size, so that small and large weights count alike.
Status ConversionPlanner::meet_target() {
  struct Candidate {
    Storage storage;
    std::uint64_t bytes = 0;
    double loss = 0;
  };
  const auto least = static_cast<int>(std::ceil(options_.target_bpw));
  int last_layer = 0;
  for (const OutputTensor* tensor : adjustable_)
    last_layer = std::max(last_layer, layer_of(tensor->recipe.name));

  std::vector<std::vector<Candidate>> candidates(adjustable_.size());
  ConversionProgress state{.doing = "measuring", .tensor = {}, .done = 0, .all = 0};
  for (const OutputTensor* tensor : adjustable_)
    state.all += static_cast<std::uint64_t>(tensor->recipe.shape.numel());
  for (std::size_t t = 0; t < adjustable_.size(); ++t) {
    OutputTensor& tensor = *adjustable_[t];
    const int layer = layer_of(tensor.recipe.name);
    // The ends of the network are kept higher: at least the target.
    const bool end = is_embedding_or_head(tensor.recipe.name) || layer == 0 || layer == last_layer;
    const std::int64_t columns = columns_of(tensor.recipe.shape);
    for (const int bits : kBits) {
      if (end && bits < std::min(least, 8)) continue;
      Storage storage = tensor.to;
      if (options_.format == ModelFormat::gguf) {
        if (bits < 4) continue;
        storage = storage_of(fitting(type_of_bits(bits), columns));
      } else {
        storage.bits = bits;
      }
      const auto bytes = storage.bytes(tensor.recipe.shape);
      if (!bytes) return bytes.status();
      if (candidates[t].empty() || candidates[t].back().storage != storage)
        candidates[t].push_back({.storage = storage, .bytes = *bytes});
    }
    const auto reader = RowReader::open(source_, tensor.recipe);
    if (!reader) return reader.status();
    state.tensor = tensor.recipe.name;
    std::vector<Storage> storages;
    for (const Candidate& candidate : candidates[t]) storages.push_back(candidate.storage);
    const auto lost = measure(*reader, storages, options_.method, [&](std::int64_t rows) {
      state.done += static_cast<std::uint64_t>(rows * columns);
      progress_(state);
    });
    if (!lost) return with_tensor(source_, source_of(tensor.recipe), lost.status());
    for (std::size_t c = 0; c < candidates[t].size(); ++c) {
      const auto [error, size] = (*lost)[c];
      candidates[t][c].loss =
          size > 0 ? error / size * static_cast<double>(tensor.recipe.shape.numel()) : 0;
    }
  }

  const double room = options_.target_bpw / 8 * static_cast<double>(conversion_.weights());
  std::uint64_t bytes = 0;
  for (const OutputTensor& tensor : conversion_.tensors_) {
    const auto kept = tensor.to.bytes(tensor.recipe.shape);
    if (!kept) return kept.status();
    if (std::find(adjustable_.begin(), adjustable_.end(), &tensor) == adjustable_.end())
      bytes += *kept;
  }
  std::vector<std::size_t> chosen(adjustable_.size());
  for (const auto& options : candidates) bytes += options[0].bytes;
  if (static_cast<double>(bytes) > room) {
    return invalid(
        "--target-bpw " + short_number(options_.target_bpw) + ": the least is " +
        short_number(8 * static_cast<double>(bytes) / static_cast<double>(conversion_.weights())) +
        " with what is kept and the groups asked for, expected that or more");
  }
  for (;;) {
    double best = 0;
    std::size_t best_tensor = 0, best_choice = 0;
    for (std::size_t t = 0; t < candidates.size(); ++t) {
      const Candidate& now = candidates[t][chosen[t]];
      for (std::size_t c = chosen[t] + 1; c < candidates[t].size(); ++c) {
        const Candidate& next = candidates[t][c];
        const double more = static_cast<double>(next.bytes) - static_cast<double>(now.bytes);
        if (more <= 0 || static_cast<double>(bytes) + more > room) continue;
        if (const double gain = (now.loss - next.loss) / more; gain > best) {
          best = gain;
          best_tensor = t;
          best_choice = c;
        }
      }
    }
    if (best <= 0) break;
    bytes += candidates[best_tensor][best_choice].bytes -
             candidates[best_tensor][chosen[best_tensor]].bytes;
    chosen[best_tensor] = best_choice;
  }
  for (std::size_t t = 0; t < adjustable_.size(); ++t) {
    adjustable_[t]->to = candidates[t][chosen[t]].storage;
    adjustable_[t]->note.clear();
  }
  return {};
}

}  // namespace bittern
