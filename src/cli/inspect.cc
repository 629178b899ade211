// bittern inspect MODEL [--compare OTHER]: what a model file holds, and how far another is from it.
#include "cli/inspect.h"

#include <fmt/format.h>

#include <algorithm>

namespace bittern::cli {
namespace {

constexpr std::size_t kWorstGroups = 10;

struct InspectFlags {
  CommonFlags common;
  std::string model, other;
  bool tensors = false;
};

Status run_compare(const InspectFlags& flags) {
  const auto model = Checkpoint::open(flags.model);
  if (!model) return model.status();
  const auto other = Checkpoint::open(flags.other);
  if (!other) return other.status();
  std::vector<std::string> inputs = model->files();
  for (std::string& file : other->files()) inputs.push_back(std::move(file));
  BITTERN_TRY(check_apart(json_output(flags.common), inputs));
  Progress progress(flags.common.quiet);
  const auto comparison =
      compare(*model, *other, kWorstGroups, [&](const ComparisonProgress& state) {
        progress.show(fmt::format("comparing {:3.0f} %: {}",
                                  100 * static_cast<double>(state.done) /
                                      static_cast<double>(std::max<std::uint64_t>(state.all, 1)),
                                  printable(state.tensor)));
      });
  progress.clear();
  BITTERN_TRY(model->unchanged());
  BITTERN_TRY(other->unchanged());
  if (!comparison) return comparison.status();
  const Summary summary = summarize(*model), other_summary = summarize(*other);
  if (!flags.common.quiet) {
    print_summary(summary);
    if (flags.tensors) print_tensors(summary);
    fmt::print("\n");
    print_summary(other_summary);
    if (flags.tensors) print_tensors(other_summary);
    print_comparison(*comparison);
  }
  if (flags.common.json.empty()) return {};
  return write_json(flags.common, {{"schema", 1},
                                   {"model", summary_json(summary)},
                                   {"other", summary_json(other_summary)},
                                   {"comparison", comparison_json(*comparison)}});
}

Status run(const InspectFlags& flags) {
  BITTERN_TRY(use_threads(flags.common));
  BITTERN_TRY(check_json_flag(flags.common));
  if (!flags.other.empty()) return run_compare(flags);
  const auto summary = summarize(flags.model);
  if (!summary) return summary.status();
  BITTERN_TRY(check_apart(json_output(flags.common), summary->files));
  if (!flags.common.quiet) {
    print_summary(*summary);
    if (flags.tensors) print_tensors(*summary);
  }
  if (flags.common.json.empty()) return {};
  return write_json(flags.common, {{"schema", 1}, {"model", summary_json(*summary)}});
}

}  // namespace

Verb inspect_verb(CLI::App& main) {
  auto flags = std::make_shared<InspectFlags>();
  CLI::App* verb = main.add_subcommand("inspect", "what a model file holds");
  verb->add_option("MODEL", flags->model,
                   "a .gguf or .safetensors file, or a folder of Hugging Face or MLX")
      ->required();
  verb->add_flag("--tensors", flags->tensors, "a line for each tensor");
  verb->add_option("--compare", flags->other,
                   "another model: how far each of its tensors is from MODEL's");
  add_output_flags(*verb, flags->common);
  verb->footer(
      "Example: bittern inspect model.gguf --tensors\n"
      "         bittern inspect model-bf16 --compare model-4bit --json report.json");
  return {verb, [flags] { return run(*flags); }};
}

}  // namespace bittern::cli
