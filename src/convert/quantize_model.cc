// quantize_model: from options to a model on disk, with everything that can be refused refused
// before the work begins.
#include <algorithm>
#include <chrono>
#include <utility>

#include "bittern/convert.h"
#include "bittern/environment.h"
#include "convert/apart.h"
#include "convert/call.h"
#include "convert/conversion.h"
#include "convert/matrix_coder.h"
#include "convert/option_names.h"
#include "convert/output.h"
#include "convert/parse_options.h"
#include "convert/progress.h"
#include "convert/replace.h"
#include "core/guarded.h"
#include "core/ranks.h"
#include "formats/checkpoint.h"

namespace bittern {
namespace {

const char* way_text(OutputTensor::Way way) {
  constexpr const char* kNames[] = {"copied", "cast", "quantised", "transcoded"};
  return kNames[static_cast<int>(way)];
}

double source_bits(const Checkpoint& source) {
  std::uint64_t bytes = 0, weights = 0;
  for (const CheckpointTensor& tensor : source.tensors()) {
    bytes += tensor.bytes();
    weights += static_cast<std::uint64_t>(tensor.rows() * tensor.columns());
  }
  return weights == 0 ? 0 : 8 * static_cast<double>(bytes) / static_cast<double>(weights);
}

// `parts`: of OUT, which are known when all is planned.
Status check_files_apart(const QuantizeOptions& options, const std::string& out,
                         const Checkpoint& source, const std::vector<std::string>& parts) {
  std::vector<std::string> inputs = source.files();
  for (const auto* input : {&options.policy, &options.imatrix, &options.data})
    if (*input) inputs.push_back(**input);
  std::vector<OutputName> outputs;
  if (!out.empty())
    for (const char* suffix : {"", ".partial", ".partial.journal"})
      outputs.push_back({"@{out}", out + suffix});
  for (const std::string& part : parts) outputs.push_back({"@{out}", part});
  for (const std::string& path : options.also_written) outputs.push_back({"@{also_written}", path});
  return check_apart(outputs, inputs);
}

// A part that is there is refused now, unless it may be of a run that was stopped as it moved them.
Status check_parts(const QuantizeOptions& options, const std::string& out, const Checkpoint& source,
                   const std::vector<std::string>& parts) {
  BITTERN_TRY(check_files_apart(options, out, source, parts));
  const auto left = thing_at(out + ".partial");
  if (!left) return left.status();
  for (const std::string& part : parts)
    if (*left == Thing::nothing) BITTERN_TRY(check_part(part, options.force));
  return {};
}

QuantizeReport report_of(const Conversion& conversion, const std::string& source,
                         const std::string& out, const ConversionOptions& how,
                         const QuantizeOptions& options) {
  const auto named = [&](const std::string& text) {
    return with_option_names(text, options.option_name);
  };
  QuantizeReport report{.model = source,
                        .output = out,
                        .format = name(how.format),
                        .outputs = {},
                        .dry_run = options.dry_run,
                        .weights = conversion.weights(),
                        .bytes = conversion.bytes(),
                        .bits_per_weight = conversion.bits_per_weight(),
                        .notes = {},
                        .tensors = {}};
  if (!out.empty()) report.outputs = conversion.outputs(out);
  for (const std::string& note : conversion.notes()) report.notes.push_back(named(note));
  for (const OutputTensor& tensor : conversion.tensors()) {
    const Shape& shape = tensor.recipe.shape;
    report.tensors.push_back({.name = tensor.recipe.name,
                              .shape = {shape.dim.begin(), shape.dim.begin() + shape.rank},
                              .sources = tensor.recipe.sources,
                              .from = tensor.from.str(),
                              .to = tensor.to.str(),
                              .way = way_text(tensor.way),
                              .bytes = tensor.bytes,
                              .note = named(tensor.note)});
  }
  return report;
}

Result<QuantizeReport> quantize(const std::string& model, const std::string& given_out,
                                const QuantizeOptions& options, MatrixCoder* coder) {
  BITTERN_TRY(check_environment());
  if (model.empty()) return invalid("@{source}: empty, expected a model to read");
  if (options.dry_run && options.resume)
    return invalid("@{resume}: has no effect with @{dry_run}; leave one of them out");
  if (given_out.empty() && !options.dry_run)
    return invalid("@{out}: not given, expected the name of the output (or @{dry_run})");
  BITTERN_TRY(check_threads(options.threads));
  const auto how = parse_options(options, given_out, coder);
  if (!how) return how.status();
  const bool folder = how->format != ModelFormat::gguf, splits = how->splits();
  const bool writes = rank_of(options.ranks) == 0;  // the others look at no output
  std::string out;
  if (!given_out.empty()) {
    auto path = output_path(given_out, folder);
    if (!path) return path.status();
    out = std::move(*path);
    if (writes)
      BITTERN_TRY(check_output(
          out,
          {.folder = folder, .parts = splits, .force = options.force, .resume = options.resume}));
  }
  const CallSettings settings(options.threads);
  auto source = Checkpoint::open(model);
  if (!source) return source.status();
  BITTERN_TRY(check_files_apart(options, out, *source, {}));
  ModelProgressFunction progress;
  if (options.progress) {
    progress = [&, bits = source_bits(*source)](const ModelProgress& state) {
      ModelProgress more = state;
      more.source_bpw = state.doing == "checking" ? 8 : bits;  // that counts bytes
      return options.progress(more);
    };
  }
  const auto start = std::chrono::steady_clock::now();
  const auto conversion = Conversion::plan(*source, *how, out.empty() ? "OUT" : out, progress);
  if (!conversion) return conversion.status();
  if (splits && writes && !out.empty())
    BITTERN_TRY(check_parts(options, out, *source, conversion->outputs(out)));
  QuantizeReport report = report_of(*conversion, model, out, *how, options);
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  report.seconds = seconds();
  if (options.planned) BITTERN_TRY(ask([&] { return options.planned(report); }));
  if (options.dry_run) return report;
  const auto ran =
      conversion->run(out, {.force = options.force, .resume = options.resume}, progress);
  if (!ran) return ran.status();
  report.seconds = seconds();
  report.seconds_making = ran->making;
  report.seconds_writing = ran->writing;
  report.seconds_syncing = ran->syncing;
  report.resumed = ran->resumed;
  report.saturated = ran->saturated;
  const auto& tensors = conversion->tensors();
  if (how->transcode && how->scale_dtype &&
      std::any_of(tensors.begin(), tensors.end(), [](const OutputTensor& tensor) {
        return tensor.to.kind == Storage::Kind::affine;
      }))
    report.scale_change = ran->scale_change;
  return report;
}

}  // namespace

Result<QuantizeReport> quantize_model(const std::string& source, const std::string& out,
                                      const QuantizeOptions& options) noexcept {
  return quantize_model(source, out, options, nullptr);
}

Result<QuantizeReport> quantize_model(const std::string& source, const std::string& out,
                                      const QuantizeOptions& options, MatrixCoder* coder) noexcept {
  auto report = guarded("quantize_model", [&]() -> Result<QuantizeReport> {
    auto made = quantize(source, out, options, coder);
    if (!made) return with_option_names(made.status(), options.option_name);
    return made;
  });
  return agreed(options.ranks, std::move(report));
}

}  // namespace bittern
