// bittern distill TEACHER -o OUT: a quantised model that has learned from its teacher.
#include <fmt/format.h>

#include <cmath>
#include <csignal>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bittern/convert.h"
#include "bittern/distill.h"
#include "cli/cli.h"
#include "cli/eval_output.h"
#include "cli/interrupt.h"
#include "cli/processes.h"
#include "report/distill_report.h"

namespace bittern::cli {
namespace {

struct DistillFlags {
  CommonFlags common;
  std::string teacher, out, report, learn = "grids";
  std::vector<std::string> overrides;
  bool no_report = false, fastest = false;
  DistillOptions options;
};

ReportFile page_of(const DistillFlags& flags) {
  return {.flag = "--report",
          .path = flags.report,
          .force = flags.common.force || flags.options.resume,
          .ours = report::is_distill_page};
}

std::string flag_name(std::string_view field) {
  if (field == "teacher") return "TEACHER";
  if (field == "context") return "--ctx";
  if (field == "learn_codes") return "--learn codes";
  if (field == "rules") return "--override";
  return flag_of(field);
}

std::string text_of(const DistillProgress& state) {
  if (state.doing != "learning")
    return fmt::format("{} {:3.0f} %: {}", state.doing, 100 * state.share, printable(state.text));
  return fmt::format("step {} of {}, {:.0f} tokens/s, KL {:.4f}, validation {:.4f}, {:.0f} s left",
                     state.step, state.steps, state.tokens_per_second, state.train_kl,
                     state.validation_kl, state.seconds_left);
}

Json number(double x) { return std::isfinite(x) ? Json(x) : Json(); }

Json report_json(const DistillFlags& flags, const DistillReport& report) {
  Json trials = Json::array(), points = Json::array();
  for (const DistillTrial& trial : report.trials)
    trials.push_back({{"rate", trial.rate}, {"validation_kl", number(trial.validation_kl)}});
  for (const DistillPoint& point : report.points)
    points.push_back({{"step", point.step},
                      {"train_kl", number(point.train_kl)},
                      {"validation_kl", number(point.validation_kl)}});
  return {{"schema", 1},
          {"teacher", flags.teacher},
          {"output", report.output.output},
          {"format", report.output.format},
          {"type", report.type.empty() ? Json() : Json(report.type)},
          {"bits", report.bits},
          {"group_size", report.group_size},
          {"bytes", report.output.bytes},
          {"bits_per_weight", report.output.bits_per_weight},
          {"learned", report.learned},
          {"codes", report.codes},
          {"codes_moved", report.codes_moved},
          {"train_pieces", report.train_pieces},
          {"validation_pieces", report.validation_pieces},
          {"context", flags.options.context},
          {"batch", flags.options.batch},
          {"steps", report.steps},
          {"best_step", report.best_step},
          {"finished_early", report.finished_early},
          {"rate", report.rate},
          {"preference", flags.options.preference == Preference::fastest ? "fastest" : "exact"},
          {"start_kl", number(report.start_kl)},
          {"kl", number(report.kl)},
          {"written_kl", number(report.written_kl)},
          {"written_start_kl", number(report.written_start_kl)},
          {"start_written", report.start_written},
          {"notes", notes_of(report.output)},
          {"seconds", report.seconds},
          {"seconds_learning", report.seconds_learning},
          {"peak_bytes", report.peak_bytes},
          {"tokens_per_second", report.tokens_per_second},
          {"trials", trials},
          {"points", points}};
}

void print_result(const DistillReport& report) {
  print_notes(report.output);
  for (const DistillTrial& trial : report.trials)
    fmt::print("rate {:.5f}: validation KL {:.4f}{}\n", trial.rate, trial.validation_kl,
               trial.rate == report.rate ? ", taken" : "");
  for (const DistillPoint& point : report.points)
    if (point.step > 0)
      fmt::print("step {:>5}: KL {:.4f}, validation {:.4f}\n", point.step, point.train_kl,
                 point.validation_kl);
  if (report.finished_early) fmt::print("note: ended by Ctrl-C; this is the best so far\n");
  fmt::print("validation KL: {:.4f} calibrated, {:.4f} after {} steps{}\n", report.start_kl,
             report.kl, report.best_step,
             report.tokens_per_second > 0
                 ? fmt::format(" ({:.0f} tokens/s)", report.tokens_per_second)
                 : "");
  if (report.codes > 0)
    fmt::print("{:.2f} % of the codes moved\n",
               100 * static_cast<double>(report.codes_moved) / static_cast<double>(report.codes));
  if (!report.type.empty())
    fmt::print("validation KL of the file as {}: {:.4f}; of the start in the same types: {:.4f}\n",
               report.type, report.written_kl, report.written_start_kl);
  else if (report.written_kl != report.kl)
    fmt::print("validation KL of the folder as written: {:.4f}\n", report.written_kl);
  if (report.start_written)
    fmt::print("note: in these types what was learned is worse; the start was written\n");
  fmt::print("{}: {}, {:.3f} bits per weight, {:.1f} s, {} of memory at most\n",
             printable(report.output.output), size_text(report.output.bytes),
             report.output.bits_per_weight, report.seconds, size_text(report.peak_bytes));
}

std::string kl_text(const DistillReport& found) {
  const std::string text =
      fmt::format("{:.4f} calibrated, {:.4f} learned", found.start_kl, found.kl);
  if (found.type.empty())
    return found.written_kl == found.kl ? text
                                        : text + fmt::format(", {:.4f} written", found.written_kl);
  return text + fmt::format(", {:.4f} written", found.written_kl) +
         (found.start_written
              ? ": the start, which is better in these types"
              : fmt::format(" (the start in the same types: {:.4f})", found.written_start_kl));
}

Status write_page(const DistillFlags& flags, const DistillReport& found) {
  const EvalResult& judged = *found.judged;
  report::Evaluation e{.context = flags.options.context, .judged = true};
  auto teacher = judged_model(flags.teacher, "teacher", true, judged.teacher, judged.tokens);
  if (!teacher) return teacher.status();
  auto result =
      judged_model(found.output.output, "distilled", true, judged.models[1], judged.tokens);
  if (!result) return result.status();
  auto start = judged_model("", "calibrated", false, judged.models[0], judged.tokens);
  if (!start) return start.status();
  start->bytes = result->bytes;
  start->bits = result->bits;
  e.models = {std::move(*start), std::move(*result)};
  e.teacher = std::move(*teacher);
  const DistillOptions& o = flags.options;
  e.facts = {
      {"teacher", flags.teacher},
      {"type", !found.type.empty()            ? found.type
               : found.output.format == "mlx" ? "MLX"
                                              : found.output.format},
      {"bits, group", fmt::format("{}, {}", found.bits, found.group_size)},
      {"learned",
       fmt::format("{} scales{}", found.learned,
                   found.output.format == "compressed-tensors" || o.zero_points == "integer"
                       ? ""
                       : " and biases") +
           (found.codes > 0 ? fmt::format(", {} of {} codes moved", found.codes_moved, found.codes)
                            : "")},
      {"steps", fmt::format("{} of {} pieces of {} tokens", found.steps, o.batch, o.context)},
      {"rate", fmt::format("{:.5f}", found.rate)},
      {"KL, held out", kl_text(found)},
      {"text",
       fmt::format("{}: {} pieces to learn from, {} held out",
                   o.self_text ? "the teacher's own" : fmt::format("{}", fmt::join(o.data, ", ")),
                   found.train_pieces, found.validation_pieces)},
      {"time", fmt::format("{:.0f} s; learning {:.0f} tokens/s{}", found.seconds,
                           found.tokens_per_second, flags.fastest ? ", with --fastest" : "")}};
  return write_report_file(page_of(flags), report::distill_page(found, e));
}

// All outputs, each with its own flag: the library knows those beside OUT by one name.
Status check_outputs(const DistillFlags& flags, const std::string& out) {
  std::vector<OutputName> outputs{{"-o", out}, {"-o", out + ".distill"}};
  if (!flags.options.teacher_cache.empty())
    outputs.push_back({"--teacher-cache", flags.options.teacher_cache});
  if (!flags.report.empty()) outputs.push_back({"--report", flags.report});
  for (const OutputName& json : json_output(flags.common)) outputs.push_back(json);
  const auto teacher = inspect_model(flags.teacher);
  if (!teacher) return teacher.status();
  std::vector<std::string> inputs = teacher->files;
  inputs.insert(inputs.end(), flags.options.data.begin(), flags.options.data.end());
  return check_apart(outputs, inputs);
}

Status run(DistillFlags& flags) {
  BITTERN_TRY(use_threads(flags.common));
  const StopOnSignal stop;
  BITTERN_TRY(check_json_flag(flags.common));
  if (flags.no_report && !flags.report.empty())
    return invalid("--report and --no-report both given, expected one");
  std::string out = flags.out;
  while (out.size() > 1 && out.back() == '/') out.pop_back();
  if (flags.report.empty() && !flags.no_report) flags.report = out + ".html";
  if (!flags.report.empty()) {
    BITTERN_TRY(check_report_file(page_of(flags)));
    flags.options.judge = true;
  }
  BITTERN_TRY(check_outputs(flags, out));
  DistillOptions& options = flags.options;
  options.force = flags.common.force;
  if (flags.learn != "grids" && flags.learn != "codes")
    return invalid("--learn: " + printable(flags.learn) + ", expected grids or codes");
  options.learn_codes = flags.learn == "codes";
  for (const std::string& text : flags.overrides) {
    auto rule = parse_rule("--override", text);
    if (!rule) return rule.status();
    options.rules.push_back(std::move(*rule));
  }
  if (flags.fastest) options.preference = Preference::fastest;
  options.option_name = flag_name;
  options.ranks = processes();
  PacedProgress line(flags.common.quiet);
  options.progress = [&](const DistillProgress& state) {
    if (line.due()) line.show(text_of(state));
    const int signal = StopOnSignal::noted();
    return signal == 0        ? DistillNext::go_on
           : signal == SIGINT ? DistillNext::finish
                              : DistillNext::stop;
  };
  const auto report = distill_model(flags.teacher, flags.out, options);
  line.clear();
  if (!report) return report.status();
  if (!flags.report.empty() && speaks()) BITTERN_TRY(write_page(flags, *report));
  if (!flags.common.quiet) print_result(*report);
  if (!flags.common.quiet && !flags.report.empty())
    fmt::print("{}: the report\n", printable(flags.report));
  return write_json(flags.common, report_json(flags, *report));
}

}  // namespace

Verb distill_verb(CLI::App& main) {
  auto flags = std::make_shared<DistillFlags>();
  DistillOptions& options = flags->options;
  CLI::App* verb = main.add_subcommand(
      "distill",
      "quantise a model, then train it to recover what was lost, with the original as teacher");
  const auto option = [verb](const char* names, auto& value, const char* text, const char* help) {
    return verb->add_option(names, value, help)->option_text(text);
  };
  option("TEACHER,-m,--model", flags->teacher, "MODEL",
         "the original: a .gguf file, or a Hugging Face or MLX folder")
      ->required();
  option("-o,--output", flags->out, "OUT",
         "what to write: a folder for MLX or vLLM, or a .gguf file for llama.cpp; bittern runs all")
      ->required();
  option(
      "--data,-f,--file", options.data, "FILE",
      "a text to learn from, like the text of later use, or conversations (.jsonl); may be given "
      "several times");
  verb->add_flag("--self-text,--self", options.self_text,
                 "learn from a text that the teacher writes, if you have none");

  const char* what = "What to write";
  option("--format", options.format, "FORMAT",
         "mlx, gguf, or compressed-tensors for vLLM and transformers (default: gguf if OUT ends in "
         ".gguf or --type is given; else mlx)")
      ->group(what);
  option(
      "--zero-points", options.zero_points, "KIND",
      "real: scales and biases learn; integer: only scales learn, and zero points are integers, as "
      "compressed-tensors needs (default: real; in compressed-tensors integer)")
      ->group(what);
  option("--type", options.type, "TYPE",
         "GGUF type: Q4_1, Q5_1, Q4_K_S, Q4_K_M, Q5_K_S or Q5_K_M (default: Q4_1; Q5_1 with "
         "--bits 5)")
      ->group(what);
  option("--bits", options.bits, "N",
         "bits per weight: 2, 3, 4, 5, 6 or 8; in GGUF 4 or 5 (default: 4)")
      ->check(integer_in(1, 64))
      ->group(what);
  option("--group-size", options.group_size, "N",
         "weights per group, which share a scale: 32, 64 or 128 (default: 64; in GGUF 32)")
      ->check(integer_in(1, 1 << 20))
      ->group(what);
  option(
      "--embedding-bits", options.embedding_bits, "N",
      "bits per weight of embedding and head (in GGUF 6 is Q6_K, 8 is Q8_0); 0 does not quantise "
      "them (default: 6, or --bits where that is more; in compressed-tensors 0)")
      ->check(integer_in(0, 8))
      ->group(what);
  option("--override", flags->overrides, "RULE",
         "other bits for tensors whose name matches REGEX: REGEX=BITS[:GROUP], REGEX=TYPE or "
         "REGEX=keep; the first rule that matches decides; may be given several times")
      ->allow_extra_args(false)
      ->group(what);
  option("--scale-dtype", options.scale_dtype, "DTYPE",
         "of scales and biases: f32, f16 or bf16; in GGUF f16")
      ->group(what);

  const char* how = "How to learn";
  option("--steps", options.steps, "N",
         "steps of learning; with 0 it only calibrates (default: 60)")
      ->check(integer_in(0, 1 << 24))
      ->group(how);
  option("--batch", options.batch, "N", "pieces of text per step (default: 2)")
      ->check(integer_in(1, 1 << 20))
      ->group(how);
  option("-c,--ctx,--ctx-size", options.context, "N", "tokens per piece of text (default: 512)")
      ->check(integer_in(2, 1 << 20))
      ->group(how);
  option("--calibration", options.calibration, "N",
         "use at most N pieces to choose codes (default: 128)")
      ->check(integer_in(1, 1 << 24))
      ->group(how);
  verb->add_flag("--fisher", options.fisher,
                 "weigh each token by how much errors at it change the predictions when codes are "
                 "chosen; slower")
      ->group(how);
  option("--validation", options.validation, "N",
         "hold N pieces out of learning, to measure the result (default: 16)")
      ->check(integer_in(1, 1 << 24))
      ->group(how);
  option(
      "--learn", flags->learn, "WHAT",
      "what learns. grids: scales and biases; codes: codes as well, for 2 and 3 bits and long runs "
      "(default: grids)")
      ->group(how);
  option(
      "--teacher-cache", options.teacher_cache, "FILE",
      "keep the teacher's predictions for the text in FILE, which later runs then need not compute")
      ->group(how);
  option("--teacher-top", options.teacher_top, "K",
         "with --teacher-cache: keep the K likeliest tokens of each prediction, and the sum of all "
         "others (default: 64)")
      ->check(integer_in(5, 1 << 24))
      ->group(how);
  option("--rate", options.rate, "X",
         "learning rate: how far a step moves a scale, relative to the mean scale of its matrix "
         "(default: found by short runs)")
      ->check(number_in(1e-9, 1))
      ->group(how);
  option("--seed", options.seed, "N", "seed of the order in which pieces are learned (default: 0)")
      ->check(seed_check())
      ->group(how);
  verb->add_flag("--fastest", flags->fastest,
                 "also use kernels that are faster but less exact, each with a stated bound: "
                 "products of bf16, on CPUs with AVX512_BF16")
      ->group(how);

  const char* files = "Files and threads";
  option("--checkpoint-minutes", options.checkpoint_minutes, "X",
         "save what --resume needs every X minutes (default: 5)")
      ->check(number_in(0, 1e6))
      ->group(files);
  option("--report", flags->report, "FILE",
         "write a page with plots and samples to FILE, as HTML (default: OUT.html)")
      ->group(files);
  verb->add_flag("--no-report", flags->no_report, "write no page")->group(files);
  verb->add_flag("--resume", options.resume, "continue a run that was stopped")->group(files);
  verb->add_flag("--force", flags->common.force, "replace an output that bittern wrote")
      ->group(files);
  option("--threads", flags->common.threads, "N",
         "use N CPU threads (default: BITTERN_THREADS, or one per core)")
      ->check(integer_in(1, max_threads()))
      ->group(files);
  option("--json", flags->common.json, "FILE",
         "also write a report to FILE, as JSON; - means standard output, and all other text then "
         "goes to standard error")
      ->group(files);
  verb->add_flag("--quiet", flags->common.quiet, "print only errors")->group(files);
  verb->footer(
      "Ctrl-C ends learning and writes the best result so far. --resume continues a run that was "
      "killed.\n"
      "Examples:\n"
      "  bittern distill model-folder -o model-3bit --bits 3 --data text.txt\n"
      "  bittern distill model-folder -o model.gguf --type Q4_K_M --data text.txt\n"
      "mpirun -n N bittern distill ... shares the work among N processes.");
  return {.app = verb,
          .run = [flags] { return run(*flags); },
          .one_model = "one TEACHER",
          .shared = true};
}

}  // namespace bittern::cli
