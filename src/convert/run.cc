// The streaming loop. Each thread needs memory for a run of rows and its codes, whatever the
// model's size.
#include <algorithm>
#include <chrono>
#include <iterator>
#include <mutex>
#include <optional>
#include <utility>

#include "convert/apart.h"
#include "convert/conversion.h"
#include "convert/encode.h"
#include "convert/for_runs.h"
#include "convert/matrix_coder.h"
#include "convert/output.h"
#include "convert/progress.h"
#include "convert/row_reader.h"
#include "convert/run.h"
#include "core/guarded.h"
#include "core/ranks.h"
#include "formats/fingerprint.h"

namespace bittern {
namespace {

// Adds the time since it was made, or since it last did, to one sum or another.
class Stopwatch {
 public:
  void lap(double& seconds) {
    const auto now = std::chrono::steady_clock::now();
    seconds += std::chrono::duration<double>(now - since_).count();
    since_ = now;
  }

 private:
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
};

// How a tensor's rows are made.
struct RowMaker {
  const OutputTensor& tensor;
  const RowReader& reader;
  RowEncoder encoder;
  std::span<const float> importance;  // of all matrices; may be empty
  std::int64_t matrices;              // that have importances of their own
  std::int64_t matrix_rows;           // of each
};

RowMaker maker_of(const OutputTensor& tensor, const RowReader& reader,
                  std::optional<AffineMethod> method, bool saturate,
                  std::span<const float> importance) {
  const bool stack = !importance.empty() && tensor.recipe.shape.rank >= 3;
  const std::int64_t matrices = stack ? tensor.recipe.shape[0] : 1;
  return {.tensor = tensor,
          .reader = reader,
          .encoder = {.to = tensor.to,
                      .method = method,
                      .through = tensor.through,
                      .saturate = saturate},
          .importance = importance,
          .matrices = matrices,
          .matrix_rows = reader.rows() / std::max<std::int64_t>(matrices, 1)};
}

// What a thread keeps from one run of rows to the next.
struct Worker {
  RowNumbers numbers;
  GridRows grid;
  EncodedRows encoded;
  std::uint64_t sums[3];  // of the encoded rows
  Conversion::RunReport report;
  Stopwatch watch;
};

Status make_rows(const RowMaker& maker, std::int64_t row, std::int64_t count, Worker& worker) {
  const OutputTensor& tensor = maker.tensor;
  const std::int64_t columns = maker.reader.columns();
  switch (tensor.way) {
    case OutputTensor::Way::copy:
      BITTERN_TRY(maker.reader.stored(row, count, worker.encoded));
      return expect_finite_rows(worker.encoded, tensor.to, row, count, columns);
    case OutputTensor::Way::transcode:
      BITTERN_TRY(maker.reader.grid(row, count, worker.grid));
      return encode_rounded(worker.grid, columns, tensor.to, maker.encoder.saturate, worker.encoded,
                            worker.report.scale_change, worker.report.saturated);
    case OutputTensor::Way::quantize:
    case OutputTensor::Way::cast: {
      BITTERN_TRY(maker.reader.numbers(row, count, worker.numbers));
      std::span<const float> importance = maker.importance;
      if (!importance.empty())
        importance = importance.subspan(static_cast<std::size_t>(row / maker.matrix_rows * columns),
                                        static_cast<std::size_t>(columns));
      return maker.encoder.encode(worker.numbers, count, columns, importance, worker.encoded,
                                  worker.report.saturated);
    }
  }
  return {};
}

// For the journal; here the rows are in a cache still, and threads need not wait for each other.
void sum_rows(Worker& worker) {
  worker.sums[0] = Checksum::of(worker.encoded.data);
  worker.sums[1] = Checksum::of(worker.encoded.scales);
  worker.sums[2] = Checksum::of(worker.encoded.biases);
}

Status write_rows(const OutputTensor& tensor, const RowBytes& bytes, ModelOutput& output,
                  std::int64_t row, const Worker& worker) {
  const auto at = static_cast<std::uint64_t>(row);
  const std::size_t part = tensor.part;
  const EncodedRows& rows = worker.encoded;
  const auto& sums = worker.sums;
  BITTERN_TRY(output.write(part, at * bytes.data, rows.data, sums[0]));
  if (tensor.parts() == 1) return {};
  BITTERN_TRY(output.write(part + 1, at * bytes.scales, rows.scales, sums[1]));
  const auto together = static_cast<std::uint64_t>(bytes.together);
  if (at % together != 0)  // words of the rows before are written already
    return {Code::internal, tensor.recipe.name + ": rows from " + std::to_string(row) +
                                ", expected a multiple of " + std::to_string(together)};
  BITTERN_TRY(output.write(part + 2, at / together * bytes.biases, rows.biases, sums[2]));
  if (tensor.parts() == 3 || row > 0) return {};
  const std::int64_t shape[] = {tensor.recipe.shape[0], tensor.recipe.shape[1]};
  const auto shape_bytes = std::as_bytes(std::span(shape));
  return output.write(part + 3, 0, shape_bytes, Checksum::of(shape_bytes));
}

// Fewer rows are not worth a thread's turn.
std::int64_t least_rows(std::int64_t columns) {
  constexpr std::int64_t kLeastWeights = 1 << 14;
  return std::max<std::int64_t>(kLeastWeights / std::max<std::int64_t>(columns, 1), 1);
}

// How many of `rows` rows a thread takes at once: enough that a write is worth its call, but few
// enough that there is work for all threads.
std::int64_t run_length(std::int64_t rows, std::int64_t columns) {
  const std::int64_t most = rows_at_once(columns), team = num_threads();
  const std::int64_t least = least_rows(columns);
  const std::int64_t rounds = (rows + most * team - 1) / (most * team);
  if (rounds == 0) return 1;
  return std::max(least, (rows + rounds * team - 1) / (rounds * team));
}

// A tensor's rows in runs. A run stays within one matrix of a stack, since each has importances of
// its own, and begins where words of zero points do.
struct RowRuns {
  RowRuns(const RowMaker& maker, const RowBytes& bytes, std::int64_t rows)
      : matrix_rows(maker.matrix_rows),
        length(bytes.whole(rows)),
        matrix_runs((matrix_rows + length - 1) / length),
        count(maker.matrices * matrix_runs) {}
  std::int64_t first(std::int64_t i) const {
    return i / matrix_runs * matrix_rows + i % matrix_runs * length;
  }
  std::int64_t rows(std::int64_t i) const {
    return std::min(length, matrix_rows - i % matrix_runs * length);
  }
  std::int64_t matrix_rows, length, matrix_runs, count;
};

// Each thread makes and writes runs of rows of its own, so that one makes while another writes.
Status stream_rows(const RowMaker& maker, const RowBytes& bytes, ModelOutput& output,
                   std::vector<Worker>& workers, TeamProgress& progress) {
  const RowRuns runs(maker, bytes, run_length(maker.matrix_rows, maker.reader.columns()));
  std::mutex writing;
  const auto run = [&](std::int64_t i, Worker& worker) -> Status {
    BITTERN_TRY(progress.go_on());
    BITTERN_TRY(make_rows(maker, runs.first(i), runs.rows(i), worker));
    sum_rows(worker);
    worker.watch.lap(worker.report.making);
    Status written;
    {
      const std::lock_guard lock(writing);
      written = write_rows(maker.tensor, bytes, output, runs.first(i), worker);
    }
    worker.watch.lap(worker.report.writing);
    BITTERN_TRY(written);
    return progress.add(static_cast<std::uint64_t>(runs.rows(i) * maker.reader.columns()));
  };
  return for_runs(runs.count, workers, run);
}

// The same by several processes: each makes runs on its threads, and process 0 writes them.
Status share_rows(Ranks* ranks, const RowMaker& maker, const RowBytes& bytes, ModelOutput* output,
                  std::vector<Worker>& workers, TeamProgress& progress) {
  // As many rows at once for any number of threads, which the processes need not have in common.
  const RowRuns runs(maker, bytes, least_rows(maker.reader.columns()));
  const RunItems items = items_of_runs(ranks, runs.count, 256);
  struct Made {
    EncodedRows encoded;
    std::uint64_t sums[3];
  };
  const auto make = [&](std::int64_t item, Packer& out) -> Status {
    const std::int64_t first = item * items.length;
    std::vector<Made> made(static_cast<std::size_t>(std::min(items.length, runs.count - first)));
    for (Worker& worker : workers) worker = {};
    const auto run = [&](std::int64_t i, Worker& worker) -> Status {
      BITTERN_TRY(progress.go_on());
      BITTERN_TRY(make_rows(maker, runs.first(first + i), runs.rows(first + i), worker));
      sum_rows(worker);
      Made& own = made[static_cast<std::size_t>(i)];
      own.encoded = worker.encoded;
      std::copy(std::begin(worker.sums), std::end(worker.sums), own.sums);
      return progress.add(
          static_cast<std::uint64_t>(runs.rows(first + i) * maker.reader.columns()));
    };
    BITTERN_TRY(for_runs(std::ssize(made), workers, run));
    for (const Made& one : made) {
      for (const auto* part : {&one.encoded.data, &one.encoded.scales, &one.encoded.biases})
        out.add(*part);
      out.add(one.sums);
    }
    Conversion::RunReport report;
    for (const Worker& worker : workers) {
      report.scale_change = std::max(report.scale_change, worker.report.scale_change);
      report.saturated += worker.report.saturated;
    }
    out.add(report.scale_change);
    out.add(report.saturated);
    return {};
  };
  Worker writer;  // of process 0
  const auto write = [&](std::int64_t item, Unpacker in) -> Status {
    const std::int64_t end = std::min((item + 1) * items.length, runs.count);
    for (std::int64_t i = item * items.length; i < end; ++i) {
      for (auto* part : {&writer.encoded.data, &writer.encoded.scales, &writer.encoded.biases})
        in.take(*part);
      in.take(writer.sums);
      BITTERN_TRY(write_rows(maker.tensor, bytes, *output, runs.first(i), writer));
      if (item % ranks->count() != ranks->rank())
        BITTERN_TRY(
            progress.add(static_cast<std::uint64_t>(runs.rows(i) * maker.reader.columns())));
    }
    writer.report.scale_change = std::max(writer.report.scale_change, in.next<double>());
    writer.report.saturated += in.next<std::uint64_t>();
    return {};
  };
  const Status status = deal(ranks, items.items, DealTo::first, make, write);
  writer.watch.lap(writer.report.making);
  workers.clear();
  workers.push_back(std::move(writer));
  return status;
}

// `output`: null in all processes but the first.
Status stream_tensor(const Checkpoint& source, const OutputTensor& tensor,
                     const ConversionOptions& options, std::span<const float> importance,
                     ModelOutput* output, Conversion::RunReport& report, TeamProgress& progress) {
  const auto reader = RowReader::open(source, tensor.recipe);
  if (!reader) return reader.status();
  const auto bytes = row_bytes(tensor.to, reader->columns());
  if (!bytes) return bytes.status();
  const RowMaker maker = maker_of(tensor, *reader, options.method, options.lossy, importance);
  std::vector<Worker> workers;
  const Status status = options.ranks == nullptr
                            ? stream_rows(maker, *bytes, *output, workers, progress)
                            : share_rows(options.ranks, maker, *bytes, output, workers, progress);
  if (status.code() == Code::io_error || status.code() == Code::cancelled) return status;
  if (!status.ok()) return with_tensor(source, tensor.recipe.name, status);
  for (const Worker& worker : workers) {
    report.scale_change = std::max(report.scale_change, worker.report.scale_change);
    report.saturated += worker.report.saturated;
    report.making += worker.report.making / static_cast<double>(workers.size());
    report.writing += worker.report.writing / static_cast<double>(workers.size());
  }
  return {};
}

// All that the coder codes; `done` tells which tensors those are. `finished`: by an earlier run.
Status write_coded(const Checkpoint& source, const std::vector<OutputTensor>& tensors,
                   MatrixCoder& coder, ModelOutput* output, std::span<const std::byte> finished,
                   const ModelProgressFunction& progress, std::vector<bool>& done) {
  std::vector<MatrixCoder::Task> tasks;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].coded || finished[i] != std::byte{0}) continue;
    tasks.push_back({i, &tensors[i]});
    done[i] = true;
  }
  if (tasks.empty()) return {};
  const auto write = [&](std::size_t i, std::int64_t first, const GridRows& rows) -> Status {
    if (output == nullptr) return {};  // a coder that shares no work makes all rows everywhere
    const OutputTensor& tensor = tensors[i];
    const std::int64_t columns = columns_of(tensor.recipe.shape);
    const auto bytes = row_bytes(tensor.to, columns);
    if (!bytes) return bytes.status();
    Worker worker;
    Status made = encode_grid(rows, columns, tensor.to, worker.encoded);
    if (made.code() == Code::unsupported && !coded_grid(tensor.to))
      made = fit_grid(rows, columns, tensor.to, worker.encoded);
    BITTERN_TRY(made);
    sum_rows(worker);
    return write_rows(tensor, *bytes, *output, first, worker);
  };
  const auto left_out = coder.code(source, tasks, write, progress);
  if (!left_out) return left_out.status();
  for (const std::size_t i : *left_out) done[i] = false;
  return {};
}

}  // namespace

Status try_first_row(const Checkpoint& source, const OutputTensor& tensor,
                     std::optional<AffineMethod> method, bool saturate,
                     std::span<const float> importance) {
  const auto reader = RowReader::open(source, tensor.recipe);
  if (!reader) return reader.status();
  if (reader->rows() == 0) return {};
  Worker worker;
  const Status status =
      make_rows(maker_of(tensor, *reader, method, saturate, importance), 0, 1, worker);
  return status.ok() ? status : with_tensor(source, tensor.recipe.name, status);
}

std::vector<std::string> Conversion::outputs(const std::string& out) const {
  if (!options_.splits()) return {out};
  std::vector<std::string> parts;
  for (const OutputLayout::File& file : layout_.files) parts.push_back(part_path(out, file.name));
  return parts;
}

Result<Conversion::RunReport> Conversion::run(const std::string& out, const RunOptions& how,
                                              const ModelProgressFunction& tell) const noexcept
    try {
  OutputOptions to{.folder = options_.format != ModelFormat::gguf,
                   .parts = options_.splits(),
                   .force = how.force,
                   .resume = how.resume,
                   .fingerprint = fingerprint_,
                   .stamp = source_->stamp(),
                   .progress = tell};
  std::vector<OutputName> names;
  for (std::string& path : outputs(out)) names.push_back({"@{out}", std::move(path)});
  BITTERN_TRY(check_apart(names, source_->files()));
  for (const OutputText& text : texts_) to.texts.push_back(text.name);
  Ranks* const ranks = options_.ranks;
  std::optional<ModelOutput> output;  // of process 0
  std::vector<std::byte> finished(tensors_.size());
  if (rank_of(ranks) == 0) {
    auto created = ModelOutput::create(out, layout_, to);
    if (!created) return created.status();
    output.emplace(std::move(*created));
    for (std::size_t i = 0; i < tensors_.size(); ++i)
      finished[i] = std::byte{
          output->finished(tensors_[i].part, static_cast<std::size_t>(tensors_[i].parts()))};
  }
  if (ranks != nullptr) {
    BITTERN_TRY(ranks->agree({}));
    BITTERN_TRY(ranks->broadcast(finished));
  }
  RunReport report;
  TeamProgress progress(tell, {.doing = "writing", .total = weights()});
  std::vector<bool> written(tensors_.size());
  using Clock = std::chrono::steady_clock;
  auto asked = Clock::now();
  const auto work = [&]() -> Status {
    if (options_.coder != nullptr) {
      Stopwatch watch;
      BITTERN_TRY(write_coded(*source_, tensors_, *options_.coder, output ? &*output : nullptr,
                              finished, tell, written));
      watch.lap(report.making);
    }
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const OutputTensor& tensor = tensors_[i];
      progress.begin(tensor.recipe.name);
      if (written[i]) {
        BITTERN_TRY(progress.add(static_cast<std::uint64_t>(tensor.recipe.shape.numel())));
        continue;
      }
      if (finished[i] != std::byte{0}) {
        ++report.resumed;
        BITTERN_TRY(progress.add(static_cast<std::uint64_t>(tensor.recipe.shape.numel())));
        continue;
      }
      const std::span<const float> importance =
          importance_.empty() ? std::span<const float>{} : std::span(importance_[i]);
      BITTERN_TRY(stream_tensor(*source_, tensor, options_, importance, output ? &*output : nullptr,
                                report, progress));
      BITTERN_TRY(progress.end());
      // In the end it is asked in any case; now and then it saves the rest of the work.
      if (const auto now = Clock::now(); now - asked > std::chrono::milliseconds(200)) {
        BITTERN_TRY(source_->unchanged());
        asked = now;
      }
    }
    BITTERN_TRY(source_->unchanged());
    BITTERN_TRY(agree(ranks, {}));
    if (!output) return {};
    Stopwatch watch;
    for (const OutputText& text : texts_) BITTERN_TRY(output->add_file(text.name, text.text));
    BITTERN_TRY(output->commit());
    watch.lap(report.syncing);
    return {};
  };
  Status status = guarded(out, work);
  // Whatever bytes of a file that changed have led to is of no interest.
  if (!status.ok())
    if (Status source = source_->unchanged(); !source.ok()) status = std::move(source);
  // A full disk may be mended, and a caller may change its mind; what was written until then is
  // worth keeping.
  if (output && (status.code() == Code::io_error || status.code() == Code::cancelled))
    output->keep();
  if (!status.ok()) return status;
  return report;
} catch (...) {
  return caught(out);
}

}  // namespace bittern
