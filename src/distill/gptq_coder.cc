#include "distill/gptq_coder.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "bittern/device.h"
#include "bittern/generate.h"
#include "convert/encode.h"
#include "convert/naming.h"
#include "convert/progress.h"
#include "convert/row_reader.h"
#include "core/numerics.h"
#include "core/ranks.h"
#include "cpu/parallel.h"
#include "distill/rounding.h"
#include "distill/token_weights.h"
#include "eval/product_inputs.h"
#include "formats/fingerprint.h"
#include "model/source.h"

namespace bittern {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// Sums of a layer's inputs that are in memory at once: 45 of 4096 inputs, or one of 28672.
constexpr std::int64_t kSumsBytes = std::int64_t{6} << 30;
// Of equations for the scales and biases of rows, in all threads.
constexpr std::uint64_t kSystemsBytes = std::uint64_t{4} << 30;

// "layers.12.q" is quantity q.
std::optional<Q> quantity_of(std::string_view name) {
  const auto found = std::find(std::begin(kQuantityNames), std::end(kQuantityNames),
                               name.substr(name.rfind('.') + 1));
  if (found == std::end(kQuantityNames)) return {};
  return static_cast<Q>(found - std::begin(kQuantityNames));
}

// For each column of `to`, its place in `part`: both are made of the same tensor, whose blocks of
// columns either may have in another order.
std::vector<std::int64_t> columns_between(const Recipe& part, const Recipe& to) {
  if (part.columns.empty() && to.columns.empty()) return {};
  const std::int64_t width = columns_of(to.shape);
  std::vector<std::int64_t> in_part(at(width)), columns(at(width));
  const auto source = [](const Recipe& recipe, std::int64_t j) {
    if (recipe.columns.empty()) return j;
    const std::int64_t block = recipe.column_block;
    return recipe.columns[at(j / block)] * block + j % block;
  };
  for (std::int64_t j = 0; j < width; ++j) in_part[at(source(part, j))] = j;
  for (std::int64_t j = 0; j < width; ++j) columns[at(j)] = in_part[at(source(to, j))];
  return columns;
}

// Rows of a tensor to be written, of one source and one expert.
struct ExpertRows {
  std::int64_t expert, first, count;
};

// f(first row of the recipe, run) for each run of its rows.
template <class F>
void each_run(const Recipe& recipe, const F& f) {
  const std::int64_t rows = recipe.shape.numel() / columns_of(recipe.shape);
  if (recipe.rows.empty()) return f(std::int64_t{0}, RowRun{.count = rows});
  std::int64_t at_row = 0;
  for (const RowRun& run : recipe.rows) {
    f(at_row, run);
    at_row += run.count;
  }
}

// The experts of the rows of `to`, as far as they are made of a source of `part`, which has the
// matrices of so many experts, one behind the other.
void add_experts(const Recipe& part, std::int64_t experts, const Recipe& to,
                 std::string_view source, std::vector<ExpertRows>& all) {
  const std::int64_t each = part.shape.numel() / columns_of(part.shape) / experts;
  each_run(to, [&](std::int64_t to_row, const RowRun& out) {
    if (to.sources[out.source] != source) return;
    each_run(part, [&](std::int64_t part_row, const RowRun& in) {
      if (part.sources[in.source] != source) return;
      std::int64_t row = std::max(out.first, in.first);
      const std::int64_t end = std::min(out.first + out.count, in.first + in.count);
      while (row < end) {
        const std::int64_t stacked = part_row + row - in.first;
        const std::int64_t count = std::min(end - row, each - stacked % each);
        all.push_back({stacked / each, to_row + row - out.first, count});
        row += count;
      }
    });
  });
}

// A matrix that is being coded.
struct Matrix {
  MatrixCoder::Task task;
  RowReader reader;
  RoundingGrid grid;
};

// Some of its rows.
struct Run {
  const Matrix* matrix;
  std::int64_t first, count;
};

double largest(DType dtype) {
  return dtype == DType::f16    ? max_finite<f16>()
         : dtype == DType::bf16 ? max_finite<bf16>()
                                : max_finite<float>();
}

// What is coded by the inputs at one place.
struct PlaceTasks {
  struct Rows {
    MatrixCoder::Task task;
    std::int64_t first, count;
  };
  std::int64_t width = 0;  // the number of inputs
  std::uint64_t weights = 0;
  std::map<std::vector<std::int64_t>, std::vector<Rows>> by_columns;
};

// A layer's places, those together whose sums are in memory at once. A layer has one round at
// least: the next one reads what it gives.
std::vector<std::set<InputPlace>> rounds_of(const std::map<InputPlace, PlaceTasks>& places,
                                            std::int64_t layer) {
  std::vector<std::set<InputPlace>> rounds(1);
  std::int64_t bytes = 0;
  for (const auto& [place, of] : places) {
    if (place.layer != layer) continue;
    const std::int64_t more = of.width * of.width * std::int64_t{sizeof(double)};
    if (!rounds.back().empty() && bytes + more > kSumsBytes) {
      rounds.emplace_back();
      bytes = 0;
    }
    rounds.back().insert(place);
    bytes += more;
  }
  return rounds;
}

// The grid that rows for this storage are rounded to; nothing: it has none.
std::optional<RoundingGrid> rounding_grid(const Storage& to) {
  if (const auto grid = coded_grid(to))
    return RoundingGrid{grid->bits,          grid->group,  grid->params,
                        grid->integer_zeros, grid->biases, grid->zero};
  const auto blocks = grid_of(to);
  if (!blocks || !is_fitted(to)) return std::nullopt;
  return RoundingGrid{.bits = blocks->bits, .group = blocks->group, .blocks = to};
}

// The matrix with its reader; nothing: its numbers come near to the end of the scales' range.
Result<std::optional<Matrix>> open_matrix(const Checkpoint& source, const MatrixCoder::Task& task) {
  const Recipe& recipe = task.tensor->recipe;
  auto reader = RowReader::open(source, recipe);
  if (!reader) return reader.status();
  const RoundingGrid grid = *rounding_grid(task.tensor->to);
  const DType stored = grid.blocks ? DType::f16 : grid.params;
  const std::int64_t columns = reader->columns(), length = rows_at_once(columns);
  RowNumbers numbers;
  for (std::int64_t row = 0; row < reader->rows(); row += length) {
    const std::int64_t count = std::min(length, reader->rows() - row);
    BITTERN_TRY(reader->numbers(row, count, numbers));
    if (const Status finite = expect_finite(numbers, count * columns, columns); !finite.ok())
      return with_tensor(source, recipe.name, finite);
    if (numbers.beyond.count > 0 ||
        double{largest_magnitude(numbers, count * columns)} > largest(stored) / 8)
      return std::optional<Matrix>();
  }
  return std::optional(Matrix{task, std::move(*reader), grid});
}

// All rows with one input, on all threads of all processes.
Status code_rows(const Checkpoint& source, const Gram& gram, std::span<const std::int64_t> columns,
                 const std::vector<Run>& all, Ranks* ranks, const MatrixCoder::Sink& take,
                 TeamProgress& progress) {
  std::vector<int> groups;
  std::vector<Run> runs;  // what a thread takes at once
  for (const Run& part : all) {
    if (part.matrix->reader.columns() != gram.inputs())
      return internal(part.matrix->task.tensor->recipe.name + ": inputs of another width");
    groups.push_back(part.matrix->grid.group);
    for (std::int64_t row = 0; row < part.count; row += lanes::kRows)
      runs.push_back({part.matrix, part.first + row, std::min(lanes::kRows, part.count - row)});
  }
  const std::string& name = all.front().matrix->task.tensor->recipe.name;
  const auto errors = InputErrors::make(gram, columns, groups);
  if (!errors) return with_tensor(source, name, errors.status());
  struct Worker {
    RowRounder rounder;
    RowNumbers numbers;
    std::vector<float> w;
    GridRows rows;
  };
  // Each thread has a system of equations for its rows' scales and biases.
  const std::int64_t unknowns =
      2 * (gram.inputs() / *std::min_element(groups.begin(), groups.end()));
  const auto system_bytes = static_cast<std::uint64_t>(unknowns * (unknowns + 1) / 2) *
                            static_cast<std::uint64_t>(lanes::kRows) * sizeof(float);
  const std::int64_t slots = std::clamp<std::int64_t>(
      static_cast<std::int64_t>(kSystemsBytes / std::max<std::uint64_t>(system_bytes, 1)), 1,
      std::min<std::int64_t>(num_threads(), std::ssize(runs)));
  std::vector<Worker> workers(at(slots));
  // Rounds runs from `first` on; use(i, rows) as each is made, by one thread at a time.
  const auto round = [&](std::int64_t first, std::int64_t count, const auto& use) {
    std::mutex using_rows;
    return cpu::parallel_queue(
        count, std::min(slots, count), [&](std::int64_t i, std::int64_t slot) -> Status {
          BITTERN_TRY(progress.go_on());
          const Run& run = runs[at(first + i)];
          const Matrix& matrix = *run.matrix;
          Worker& worker = workers[at(slot)];
          BITTERN_TRY(matrix.reader.numbers(run.first, run.count, worker.numbers));
          worker.w.resize(at(run.count * gram.inputs()));
          BITTERN_TRY(as_f32(worker.numbers, worker.w));
          BITTERN_TRY(
              worker.rounder.round(*errors, matrix.grid, worker.w.data(), run.count, worker.rows));
          worker.rows.first = run.first;
          {
            const std::lock_guard lock(using_rows);
            BITTERN_TRY(use(i, worker.rows));
          }
          return progress.add(static_cast<std::uint64_t>(run.count * gram.inputs()));
        });
  };
  if (ranks == nullptr)
    return round(0, std::ssize(runs), [&](std::int64_t i, const GridRows& rows) {
      return take(runs[at(i)].matrix->task.index, rows.first, rows);
    });

  const RunItems items = items_of_runs(ranks, std::ssize(runs), 64);
  const auto make = [&](std::int64_t item, Packer& out) -> Status {
    const std::int64_t first = item * items.length;
    std::vector<GridRows> made(at(std::min(items.length, std::ssize(runs) - first)));
    BITTERN_TRY(round(first, std::ssize(made), [&](std::int64_t i, const GridRows& rows) {
      made[at(i)] = rows;
      return Status();
    }));
    for (const GridRows& rows : made) {
      out.add(rows.codes);
      out.add(rows.scales);
      out.add(rows.biases);
    }
    return {};
  };
  const auto receive = [&](std::int64_t item, Unpacker in) -> Status {
    for (std::int64_t i = item * items.length; !in.empty(); ++i) {
      const Run& run = runs[at(i)];
      GridRows rows{.bits = run.matrix->grid.bits,
                    .group = run.matrix->grid.group,
                    .first = run.first,
                    .codes = {},
                    .scales = {},
                    .biases = {}};
      in.take(rows.codes);
      in.take(rows.scales);
      in.take(rows.biases);
      BITTERN_TRY(take(run.matrix->task.index, run.first, rows));
      if (item % ranks->count() != ranks->rank())
        BITTERN_TRY(progress.add(static_cast<std::uint64_t>(run.count * gram.inputs())));
    }
    return {};
  };
  return deal(ranks, items.items, DealTo::first, make, receive);
}

}  // namespace

Status GptqCoder::prepare(const Checkpoint& source) {
  const auto of_method = [](const Status& status) {
    return Status(status.code(), "@{method} gptq: " + std::string(status.message()));
  };
  if (const Status cpu = lanes::supported(); !cpu.ok()) return of_method(cpu);
  const auto info = Model::look(model_, {.context = context_});
  if (!info) return of_method(info.status());
  layers_ = info->layers;
  auto read = read_source(source);
  if (!read) return of_method(read.status());
  parts_ = std::move(read->parts);
  experts_ = read->config.experts;
  for (std::size_t i = 0; i < parts_.size(); ++i)
    for (const std::string& from : parts_[i].sources) made_of_[from].push_back(i);
  if (!text_.tokens.empty()) return {};
  auto text = read_calibration_text(model_, data_, pieces_, context_);
  if (!text) return text.status();
  text_ = std::move(*text);
  return {};
}

Result<std::vector<GptqCoder::Input>> GptqCoder::inputs_of(const OutputTensor& tensor) const {
  const Recipe& recipe = tensor.recipe;
  std::optional<Input> input;
  std::vector<ExpertRows> experts;
  for (const std::string& from : recipe.sources) {
    const auto made = made_of_.find(from);
    if (made == made_of_.end()) return invalid("it is no part of the decoder");
    for (const std::size_t i : made->second) {
      const Recipe& part = parts_[i];
      const auto quantity = quantity_of(part.name);
      if (!quantity) return invalid("it is no part of the decoder");
      Input of;
      if (*quantity == Q::head) {
        of.place = {.layer = layers_};
      } else {
        const auto product = input_of(*quantity);
        if (!product) return invalid("it is looked up, not multiplied");
        of.place = {layer_of_part(part.name), product->place, product->shared};
        if (product->experts) add_experts(part, experts_, recipe, from, experts);
      }
      of.columns = columns_between(part, recipe);
      if (input && (input->place != of.place || input->columns != of.columns))
        return invalid("its rows have different inputs");
      input = std::move(of);
    }
  }
  if (!input || recipe.shape.rank < 2) return invalid("it is no matrix of a product");
  input->rows = recipe.shape.numel() / columns_of(recipe.shape);
  if (experts.empty()) return std::vector{std::move(*input)};
  std::vector<Input> inputs;
  std::int64_t rows = 0;
  for (const ExpertRows& some : experts) {
    input->place.expert = some.expert;
    input->first = some.first;
    rows += input->rows = some.count;
    inputs.push_back(*input);
  }
  if (rows != recipe.shape.numel() / columns_of(recipe.shape))
    return invalid("its rows have different inputs");
  return inputs;
}

std::optional<std::string> GptqCoder::declines(const OutputTensor& tensor) const {
  if (tensor.way == OutputTensor::Way::copy) return "";
  const auto note = [](const std::string& why) { return "not by @{method} gptq: " + why; };
  if (!rounding_grid(tensor.to)) return note("no grid of " + tensor.to.str());
  const auto inputs = inputs_of(tensor);
  if (inputs) return {};
  return note(std::string(inputs.status().message()));
}

std::uint64_t GptqCoder::fingerprint() const {
  Fingerprint hash;
  hash.add(static_cast<std::uint64_t>(text_.context));
  hash.add(std::uint64_t{fisher_});
  hash.add(static_cast<std::uint64_t>(preference_));
  hash.add(std::as_bytes(std::span(text_.tokens)));
  return hash.value();
}

Result<std::vector<std::size_t>> GptqCoder::code(const Checkpoint& source,
                                                 const std::vector<Task>& tasks, const Sink& take,
                                                 const ModelProgressFunction& tell) {
  // Exact activations: what the model itself computes, without an error of ours.
  const auto model = Model::load(
      model_, {.activations = Activations::exact, .preference = preference_, .context = context_});
  if (!model) return model.status();
  std::vector<std::size_t> left_out;
  std::map<InputPlace, PlaceTasks> places;
  std::int64_t last = -1;
  std::uint64_t weights = 0;
  for (const Task& task : tasks) {
    const auto found = inputs_of(*task.tensor);
    if (!found) return found.status();
    const std::int64_t width = columns_of(task.tensor->recipe.shape);
    for (const Input& input : *found) {
      PlaceTasks& place = places[input.place];
      place.width = width;
      place.weights += static_cast<std::uint64_t>(input.rows * width);
      place.by_columns[input.columns].push_back({task, input.first, input.rows});
      weights += static_cast<std::uint64_t>(input.rows * width);
      last = std::max(last, input.place.layer);
    }
  }
  // A layer's pieces together count as much as its weights; the tokens' weights, as much as all.
  TeamProgress progress(tell, {.doing = "calibrating", .total = (fisher_ ? 4 : 2) * weights});
  std::optional<TokenWeights> token_weights;
  if (fisher_) {
    progress.begin("how much each token counts");
    std::int64_t pieces = 0;
    std::uint64_t told = 0;
    auto made = TokenWeights::make(*model, text_, ranks_, [&]() -> Status {
      const std::uint64_t now = 2 * weights * static_cast<std::uint64_t>(++pieces) /
                                static_cast<std::uint64_t>(text_.pieces());
      return progress.add(now - std::exchange(told, now));
    });
    if (!made) return made.status();
    token_weights = std::move(*made);
    BITTERN_TRY(progress.end());
  }
  auto inputs = LayerInputs::make(*model, text_, token_weights ? &*token_weights : nullptr, ranks_);
  if (!inputs) return inputs.status();

  std::map<std::size_t, std::optional<Matrix>> matrices;  // of a layer
  const auto opened = [&](const Task& task) -> Result<const Matrix*> {
    const auto [found, is_new] = matrices.try_emplace(task.index);
    if (is_new) {
      auto matrix = open_matrix(source, task);
      if (!matrix) return matrix.status();
      found->second = std::move(*matrix);
      if (!found->second) left_out.push_back(task.index);
    }
    return found->second ? &*found->second : nullptr;
  };
  const auto code_place = [&](const PlaceTasks& place, const Gram& gram) -> Status {
    for (const auto& [columns, some] : place.by_columns) {
      std::vector<Run> runs;
      for (const PlaceTasks::Rows& rows : some) {
        const auto matrix = opened(rows.task);
        if (!matrix) return matrix.status();
        if (*matrix != nullptr)
          runs.push_back({*matrix, rows.first, rows.count});
        else
          BITTERN_TRY(progress.add(static_cast<std::uint64_t>(rows.count * place.width)));
      }
      if (!runs.empty())
        BITTERN_TRY(code_rows(source, gram, columns, runs, ranks_, take, progress));
    }
    return {};
  };
  std::uint64_t begun = 0;  // weights of all layers up to this one
  std::uint64_t shown = 0;  // of the pieces
  for (std::int64_t layer = 0; layer <= last; ++layer) {
    const std::string text = layer == layers_ ? "the head" : "layer " + std::to_string(layer);
    progress.begin(text);
    matrices.clear();
    std::uint64_t here = 0;
    for (const auto& [place, of] : places)
      if (place.layer == layer) here += of.weights;
    const auto rounds = rounds_of(places, layer);
    const auto passes = static_cast<std::uint64_t>(text_.pieces()) * rounds.size();
    std::uint64_t passed = 0;
    for (const std::set<InputPlace>& round : rounds) {
      auto grams = inputs->next(round, &round != &rounds.back(), [&]() -> Status {
        const std::uint64_t now = begun + here * ++passed / passes;
        return progress.add(now - std::exchange(shown, now));
      });
      if (!grams) return grams.status();
      for (const InputPlace& place : round) {
        const auto gram = grams->extract(place);  // its memory goes when it has been used
        const PlaceTasks& of = places[place];
        if (!gram && place.expert < 0) return internal("no inputs of a product in " + text);
        const Gram unused(gram ? 0 : of.width);  // an expert that no token reached
        BITTERN_TRY(code_place(of, gram ? gram.mapped() : unused));
      }
    }
    begun += here;
    BITTERN_TRY(progress.end());
  }
  return left_out;
}

}  // namespace bittern
