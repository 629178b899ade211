// The streaming loop: memory is one chunk of rows and its codes, whatever the model's size.
#include <algorithm>
#include <chrono>
#include <utility>

#include "convert/conversion.h"
#include "convert/output.h"
#include "convert/rows.h"

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

Status stream_tensor(const Checkpoint& source, const OutputTensor& tensor,
                     std::optional<AffineMethod> method, std::span<const float> importance,
                     ModelOutput& output, Conversion::RunReport& report,
                     const std::function<void(std::int64_t rows)>& progress) {
  const auto reader = RowReader::open(source, tensor.recipe);
  if (!reader) return reader.status();
  const auto bytes = row_bytes(tensor.to, reader->columns());
  if (!bytes) return bytes.status();
  const RowEncoder encoder{.to = tensor.to, .method = method, .through = tensor.through};
  const std::int64_t matrix_rows =
      tensor.recipe.shape.rank >= 3 ? reader->rows() / tensor.recipe.shape[0] : reader->rows();
  RowNumbers numbers;
  GridRows grid;
  EncodedRows encoded;
  Stopwatch watch;
  for (std::int64_t row = 0; row < reader->rows();) {
    std::int64_t count = std::min(reader->rows() - row, rows_at_once(reader->columns()));
    std::span<const float> weights;
    if (!importance.empty()) {
      // A chunk stays within one matrix of a stack: each has importances of its own.
      const std::int64_t matrix = row / matrix_rows;
      count = std::min(count, (matrix + 1) * matrix_rows - row);
      weights = importance.subspan(static_cast<std::size_t>(matrix * reader->columns()),
                                   static_cast<std::size_t>(reader->columns()));
    }
    switch (tensor.way) {
      case OutputTensor::Way::copy: BITTERN_TRY(reader->stored(row, count, encoded)); break;
      case OutputTensor::Way::transcode:
        BITTERN_TRY(reader->grid(row, count, grid));
        if (tensor.to.kind == Storage::Kind::affine && tensor.to.dtype != SafeDType::f32)
          report.scale_change = std::max(report.scale_change, round_params(grid, tensor.to.dtype));
        BITTERN_TRY(encode_grid(grid, reader->columns(), tensor.to, encoded));
        break;
      case OutputTensor::Way::quantize:
      case OutputTensor::Way::cast:
        BITTERN_TRY(reader->numbers(row, count, numbers));
        if (tensor.way == OutputTensor::Way::quantize &&
            !all_finite(numbers, count * reader->columns())) {
          return invalid(source.path() + ": tensor " + tensor.recipe.name +
                         ": holds infinities or NaN, expected finite numbers");
        }
        BITTERN_TRY(encoder.encode(numbers, count, reader->columns(), weights, encoded));
        break;
    }
    watch.lap(report.making);
    const auto at = static_cast<std::uint64_t>(row);
    BITTERN_TRY(output.write(tensor.part, at * bytes->data, encoded.data));
    if (tensor.parts() == 3) {
      BITTERN_TRY(output.write(tensor.part + 1, at * bytes->scales, encoded.scales));
      BITTERN_TRY(output.write(tensor.part + 2, at * bytes->biases, encoded.biases));
    }
    watch.lap(report.writing);
    row += count;
    progress(count);
  }
  return output.finish(tensor.part);
}

}  // namespace

Result<Conversion::RunReport> Conversion::run(const std::string& out, const RunOptions& how,
                                              const ProgressFunction& progress) const {
  auto output = ModelOutput::create(out, layout_,
                                    {.folder = options_.format != ModelFormat::gguf,
                                     .force = how.force,
                                     .resume = how.resume,
                                     .fingerprint = fingerprint_});
  if (!output) return output.status();
  RunReport report;
  ConversionProgress state{.doing = "writing", .tensor = {}, .done = 0, .all = weights()};
  const auto work = [&]() -> Status {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const OutputTensor& tensor = tensors_[i];
      const std::int64_t columns =
          tensor.recipe.shape.rank == 0 ? 1 : tensor.recipe.shape[tensor.recipe.shape.rank - 1];
      state.tensor = tensor.recipe.name;
      if (output->finished(tensor.part)) {
        state.done += static_cast<std::uint64_t>(tensor.recipe.shape.numel());
        ++report.resumed;
        continue;
      }
      const std::span<const float> importance =
          importance_.empty() ? std::span<const float>{} : std::span(importance_[i]);
      BITTERN_TRY(stream_tensor(*source_, tensor, options_.method, importance, *output, report,
                                [&](std::int64_t rows) {
                                  state.done += static_cast<std::uint64_t>(rows * columns);
                                  progress(state);
                                }));
    }
    Stopwatch watch;
    for (const OutputText& text : texts_) BITTERN_TRY(output->add_file(text.name, text.text));
    BITTERN_TRY(output->commit());
    watch.lap(report.syncing);
    return {};
  };
  const Status status = work();
  // A full disk may be mended; what was written until then is worth keeping.
  if (status.code() == Code::io_error) output->keep();
  if (!status.ok()) return status;
  return report;
}

}  // namespace bittern
