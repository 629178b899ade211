// bittern inspect MODEL [--compare OTHER]: what a model file holds, and how far another is from it.
#include "cli/inspect.h"

#include <fmt/format.h>

#include <algorithm>

namespace bittern::cli {
namespace {

struct InspectFlags {
  CommonFlags common;
  std::string model, other;
  bool tensors = false;
};

Status run_compare(const InspectFlags& flags) {
  Progress progress(flags.common.quiet);
  CompareOptions options{.progress =
                             [&](const ModelProgress& state) {
                               progress.show(fmt::format(
                                   "comparing {:3.0f} %: {}",
                                   100 * static_cast<double>(state.done) /
                                       static_cast<double>(std::max<std::uint64_t>(state.total, 1)),
                                   printable(state.tensor)));
                               return true;
                             },
                         .option_name = flag_of};
  for (const OutputName& json : json_output(flags.common))
    options.also_written.push_back(json.path);
  const auto comparison = compare_models(flags.model, flags.other, options);
  progress.clear();
  if (!comparison) return comparison.status();
  if (!flags.common.quiet) {
    print_summary(comparison->model);
    if (flags.tensors) print_tensors(comparison->model);
    fmt::print("\n");
    print_summary(comparison->other);
    if (flags.tensors) print_tensors(comparison->other);
    print_comparison(*comparison);
  }
  if (flags.common.json.empty()) return {};
  return write_json(flags.common, {{"schema", 1},
                                   {"model", summary_json(comparison->model)},
                                   {"other", summary_json(comparison->other)},
                                   {"comparison", comparison_json(*comparison)}});
}

Status run(const InspectFlags& flags) {
  BITTERN_TRY(use_threads(flags.common));
  BITTERN_TRY(check_json_flag(flags.common));
  if (!flags.other.empty()) return run_compare(flags);
  const auto model = inspect_model(flags.model);
  if (!model) return model.status();
  BITTERN_TRY(check_apart(json_output(flags.common), model->files));
  if (!flags.common.quiet) {
    print_summary(*model);
    if (flags.tensors) print_tensors(*model);
  }
  if (flags.common.json.empty()) return {};
  return write_json(flags.common, {{"schema", 1}, {"model", summary_json(*model)}});
}

}  // namespace

Verb inspect_verb(CLI::App& main) {
  auto flags = std::make_shared<InspectFlags>();
  CLI::App* verb = main.add_subcommand("inspect", "show what a model file holds, or compare two");
  verb->add_option("MODEL", flags->model,
                   "a .gguf or .safetensors file, or a Hugging Face or MLX folder")
      ->required();
  verb->add_flag("--tensors", flags->tensors, "print a line for each tensor");
  verb->add_option("--compare", flags->other,
                   "show how far each tensor of the model OTHER is from MODEL's")
      ->option_text("OTHER");
  add_output_flags(*verb, flags->common);
  verb->footer(
      "Example: bittern inspect model.gguf --tensors\n"
      "         bittern inspect model-bf16 --compare model-4bit --json report.json");
  return {verb, [flags] { return run(*flags); }};
}

}  // namespace bittern::cli
