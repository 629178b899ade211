// bittern calibrate MODEL --data TEXT -o imatrix.gguf: how large the inputs of each matrix are.
#include "bittern/calibrate.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/cli.h"
#include "cli/interrupt.h"
#include "cli/model_flags.h"
#include "convert/importance.h"
#include "convert/option_names.h"

namespace bittern::cli {
namespace {

struct CalibrateFlags {
  CommonFlags common;
  ModelFlags model;
  std::string text, out;
  std::int64_t pieces = 0;
  bool any_bytes = false;
};

// What would be refused after the work is refused before it.
Status check_out(const CalibrateFlags& flags) {
  std::vector<OutputName> outputs = json_output(flags.common);
  for (const char* suffix : {"", ".partial", ".partial.journal"})
    outputs.push_back({"-o", flags.out + suffix});
  const std::vector<std::string> inputs = {flags.model.path, flags.text};
  BITTERN_TRY(check_apart(outputs, inputs));
  return with_option_names(
      check_importance_output(flags.out, flags.common.force), [](std::string_view field) {
        return (field == "resume" ? "bittern quantize --" : "--") + std::string(field);
      });
}

// Experts that a text left without any input.
std::uint64_t unseen(const Calibration& calibration) {
  std::uint64_t count = 0;
  for (const MatrixInputs& inputs : calibration.matrices)
    count += static_cast<std::uint64_t>(std::count(inputs.rows.begin(), inputs.rows.end(), 0u));
  return count;
}

Json report_json(const CalibrateFlags& flags, const Calibration& calibration) {
  Json json{{"schema", 1},
            {"model", flags.model.path},
            {"data", flags.text},
            {"output", flags.out},
            {"activations", flags.model.activations},
            {"context", calibration.context},
            {"pieces", calibration.pieces},
            {"tokens", calibration.tokens},
            {"matrices", Json::array()}};
  for (const MatrixInputs& inputs : calibration.matrices)
    json["matrices"].push_back(
        {{"name", inputs.name}, {"columns", inputs.columns}, {"rows", inputs.rows}});
  return json;
}

Status run(const CalibrateFlags& flags) {
  BITTERN_TRY(use_threads(flags.common));
  const StopOnSignal stop;
  BITTERN_TRY(check_json_flag(flags.common));
  BITTERN_TRY(check_out(flags));
  const auto text = read_text(flags.text, flags.any_bytes, kAnyBytes);
  if (!text) return text.status();
  const auto tokenizer = Tokenizer::load(flags.model.path);
  if (!tokenizer) return tokenizer.status();
  const auto tokens = tokenizer->encode(*text, {.add_special = false, .parse_special = false});
  if (!tokens) return tokens.status();
  const auto first = first_of_pieces(*tokenizer);
  if (!first) return first.status();
  const std::int64_t context = flags.model.context;
  if (std::cmp_less(tokens->size(), context))
    return invalid(
        fmt::format("{}: {} tokens, expected at least {}, a piece of them (--ctx makes it shorter)",
                    flags.text, tokens->size(), context));
  const auto model = load_model(flags.model);
  if (!model) return model.status();
  BITTERN_TRY(check_vocabulary(*model, *tokenizer, flags.model.path));

  Progress progress(flags.common.quiet);
  CalibrateOptions options{.context = context, .pieces = flags.pieces, .first = *first};
  options.progress = [&progress](const CalibrateProgress& state) {
    progress.show(
        fmt::format("{:3.0f} %, {} of {} tokens",
                    100 * static_cast<double>(state.done) / static_cast<double>(state.total),
                    state.done, state.total));
    return StopOnSignal::check().ok();
  };
  BITTERN_TRY(StopOnSignal::check());
  const auto calibration = calibrate(*model, *tokens, options);
  progress.clear();
  BITTERN_TRY(StopOnSignal::check());
  if (!calibration) return calibration.status();
  BITTERN_TRY(write_imatrix(*calibration, flags.out,
                            {.dataset = printable(flags.text), .force = flags.common.force}));
  if (!flags.common.quiet) {
    fmt::print("{}: inputs of {} matrices, over {} tokens in {} pieces of {}\n",
               printable(flags.out), calibration->matrices.size(), calibration->tokens,
               calibration->pieces, calibration->context);
    if (const std::uint64_t count = unseen(*calibration); count > 0)
      fmt::print(
          "note: {} matrices of experts saw no token; all their columns count alike (more text may "
          "reach them)\n",
          count);
  }
  return write_json(flags.common, report_json(flags, *calibration));
}

}  // namespace

Verb calibrate_verb(CLI::App& main) {
  auto flags = std::make_shared<CalibrateFlags>();
  flags->model.activations = "float";
  flags->model.context = 512;
  CLI::App* verb = main.add_subcommand(
      "calibrate", "measure the inputs of a model's matrices on a text, for quantize --imatrix");
  verb->add_option("MODEL,-m,--model", flags->model.path,
                   "a .gguf file, or a Hugging Face or MLX folder")
      ->required();
  verb->add_option("--data,-f,--file", flags->text, "the text to read, much like that of later use")
      ->option_text("FILE")
      ->required();
  verb->add_option("-o,--output,--output-file", flags->out,
                   "write llama.cpp's importance matrix to this .gguf file")
      ->option_text("OUT")
      ->required();
  verb->add_option("-c,--ctx,--ctx-size", flags->model.context, "tokens of a piece (default: 512)")
      ->option_text("N")
      ->check(integer_in(1, 1 << 20));
  verb->add_option("--chunks,--pieces", flags->pieces, "use at most N pieces (default: all)")
      ->option_text("N")
      ->check(integer_in(1, std::int64_t{1} << 31));
  verb->add_option("--activations", flags->model.activations,
                   "how activations meet quantised weights: float, int16 or int8 (default: float: "
                   "what the model itself computes, without an error of ours)")
      ->option_text("KIND")
      ->check(activations_check());
  verb->add_flag("--any-bytes", flags->any_bytes, "accept a text that is not UTF-8");
  verb->add_option("--threads", flags->common.threads,
                   "use N CPU threads (default: BITTERN_THREADS, or one per core)")
      ->option_text("N")
      ->check(integer_in(1, max_threads()));
  verb->add_option("--json", flags->common.json,
                   "also write a report to FILE, as JSON; - means standard output, and all other "
                   "text then goes to standard error")
      ->option_text("FILE");
  verb->add_flag(
      "--force", flags->common.force,
      "replace OUT if it is an importance matrix in GGUF, and FILE of --json if it is an "
      "earlier report");
  verb->add_flag("--quiet", flags->common.quiet, "print only errors");
  verb->footer(
      "Example: bittern calibrate model-folder --data text.txt -o imatrix.gguf\n"
      "         bittern quantize model-folder -o model-4bit --bits 4 --imatrix imatrix.gguf");
  return {verb, [flags] { return run(*flags); }, false,
          "one MODEL (the text is --data FILE, the output -o OUT)"};
}

}  // namespace bittern::cli
