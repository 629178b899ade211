// bittern quantize MODEL -o OUT: a smaller model, or the same one in another form.
#include <fmt/format.h>

#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bittern/convert.h"
#include "cli/cli.h"
#include "formats/gguf.h"

namespace bittern::cli {
namespace {

struct QuantizeFlags {
  std::string model, hf_path, out, format, method, type, policy, imatrix, dequantize, scale_dtype;
  std::string dtype, output_type, embedding_type, split_size;
  int bits = 0, group = 0;
  std::uint64_t split_tensors = 0;
  double target_bpw = 0;
  std::vector<std::string> overrides, tensor_types;
  bool pure = false, allow_requantize = false, transcode = false, lossy = false;
  bool quantize = false, leave_output = false;
  bool dry_run = false, force = false, resume = false;
  CommonFlags common;
};

// REGEX=4:64, REGEX=4, REGEX=Q8_0 or REGEX=keep; the last '=' counts.
Result<QuantizeRule> parse_rule(const std::string& flag, const std::string& text) {
  const std::size_t equals = text.rfind('=');
  const auto refuse = [&] {
    return invalid(fmt::format(
        "{}: {}, expected REGEX=BITS, REGEX=BITS:GROUP, REGEX=TYPE or REGEX=keep", flag, text));
  };
  if (equals == std::string::npos || equals == 0) return refuse();
  QuantizeRule rule{.match = text.substr(0, equals)};
  const std::string value = text.substr(equals + 1);
  if (value == "keep") {
    rule.keep = true;
    return rule;
  }
  if (!value.empty() && std::isdigit(static_cast<unsigned char>(value[0]))) {
    int read = 0, bits = 0, group = 0;
    const int fields = std::sscanf(value.c_str(), "%3d%n:%4d%n", &bits, &read, &group, &read);
    if (fields < 1 || static_cast<std::size_t>(read) != value.size()) return refuse();
    rule.bits = bits;
    if (fields == 2) rule.group_size = group;
    return rule;
  }
  if (ggml_type(std::string_view(value)) == nullptr) return refuse();
  rule.type = value;
  return rule;
}

std::optional<std::string> given(const std::string& text) {
  return text.empty() ? std::nullopt : std::optional(text);
}

template <class T>
std::optional<T> given(T number) {
  return number == 0 ? std::nullopt : std::optional(number);
}

Result<QuantizeOptions> options_of(const QuantizeFlags& flags) {
  QuantizeOptions options{.bits = given(flags.bits),
                          .group_size = given(flags.group),
                          .method = given(flags.method),
                          .format = given(flags.format),
                          .type = given(flags.type),
                          .output_tensor_type = given(flags.output_type),
                          .token_embedding_type = given(flags.embedding_type),
                          .leave_output_tensor = flags.leave_output,
                          .target_bpw = given(flags.target_bpw),
                          .policy = given(flags.policy),
                          .imatrix = given(flags.imatrix),
                          .transcode = flags.transcode,
                          .lossy = flags.lossy,
                          .dequantize = given(flags.dequantize),
                          .dtype = given(flags.dtype),
                          .scale_dtype = given(flags.scale_dtype),
                          .pure = flags.pure,
                          .allow_requantize = flags.allow_requantize,
                          .quantize = flags.quantize,
                          .split_max_size = given(flags.split_size),
                          .split_max_tensors = given(flags.split_tensors),
                          .force = flags.force,
                          .resume = flags.resume,
                          .dry_run = flags.dry_run,
                          .threads = given(flags.common.threads),
                          .option_name = flag_of};
  for (const auto& [flag, texts] : {std::pair("--override", &flags.overrides),
                                    std::pair("--tensor-type", &flags.tensor_types)}) {
    for (const std::string& text : *texts) {
      auto rule = parse_rule(flag, text);
      if (!rule) return rule.status();
      options.rules.push_back(std::move(*rule));
    }
  }
  for (const OutputName& json : json_output(flags.common))
    options.also_written.push_back(json.path);
  return options;
}

// A line on the terminal; elsewhere a plain line every few seconds.
class Reporter {
 public:
  explicit Reporter(bool quiet) : line_(quiet), plain_(!quiet && isatty(STDERR_FILENO) != 1) {}
  void operator()(const ModelProgress& state) {
    const auto now = std::chrono::steady_clock::now();
    if (state.doing != doing_) {
      doing_ = state.doing;
      begin_ = now;
      first_ = state.done;
      shown_ = now;
    }
    const std::chrono::duration<double> took = now - begin_, since = now - shown_;
    const double rate = static_cast<double>(state.done - first_) / std::max(took.count(), 1e-3);
    if (since.count() < (plain_ ? 5 : 0.1)) return;
    shown_ = now;
    const auto text =
        fmt::format("{} {:3.0f} %, {}/s, {:.0f} s left: {}", state.doing,
                    100.0 * static_cast<double>(state.done) /
                        static_cast<double>(std::max<std::uint64_t>(state.total, 1)),
                    size_text(static_cast<std::uint64_t>(rate * state.source_bpw / 8)),
                    static_cast<double>(state.total - state.done) / std::max(rate, 1.0),
                    printable(state.tensor));
    if (plain_) {
      tell(text + "\n");
    } else {
      line_.show(text);
    }
  }
  void clear() { line_.clear(); }

 private:
  Progress line_;
  bool plain_;
  std::string doing_;
  std::uint64_t first_ = 0;
  std::chrono::steady_clock::time_point begin_, shown_;
};

Json report_json(const QuantizeReport& report) {
  Json tensors = Json::array();
  for (const QuantizedTensor& tensor : report.tensors) {
    tensors.push_back({{"name", tensor.name},
                       {"shape", tensor.shape},
                       {"sources", tensor.sources},
                       {"from", tensor.from},
                       {"to", tensor.to},
                       {"way", tensor.way},
                       {"bytes", tensor.bytes},
                       {"note", tensor.note}});
  }
  return {{"schema", 1},
          {"model", report.model},
          {"output", report.output},
          {"weights", report.weights},
          {"bytes", report.bytes},
          {"bits_per_weight", report.bits_per_weight},
          {"seconds", report.seconds},
          {"seconds_making", report.seconds_making},
          {"seconds_writing", report.seconds_writing},
          {"seconds_syncing", report.seconds_syncing},
          {"resumed", report.resumed},
          {"scale_change", report.scale_change.value_or(0)},
          {"saturated", report.saturated},
          {"notes", report.notes},
          {"tensors", tensors}};
}

void print_fates(const QuantizeReport& report) {
  std::size_t width = 20;
  for (const QuantizedTensor& tensor : report.tensors) width = std::max(width, tensor.name.size());
  fmt::print("{:<{}} {:>20} {:>24} {:>28} {:>10}\n", "tensor", width, "shape", "from", "to",
             "bytes");
  for (const QuantizedTensor& tensor : report.tensors) {
    fmt::print("{:<{}} {:>20} {:>24} {:>28} {:>10}{}{}\n", printable(tensor.name), width,
               fmt::format("[{}]", fmt::join(tensor.shape, ",")), tensor.from, tensor.to,
               size_text(tensor.bytes), tensor.note.empty() ? "" : "  ", tensor.note);
  }
}

// What is not as it was asked for, told once a reason.
void print_notes(const QuantizeReport& report) {
  std::vector<std::pair<std::string, std::vector<std::string>>> reasons;
  for (const QuantizedTensor& tensor : report.tensors) {
    if (tensor.note.empty()) continue;
    auto found = std::find_if(reasons.begin(), reasons.end(),
                              [&](const auto& r) { return r.first == tensor.note; });
    if (found == reasons.end()) found = reasons.insert(reasons.end(), {tensor.note, {}});
    found->second.push_back(tensor.name);
  }
  for (const auto& [reason, names] : reasons) {
    fmt::print("note: {}: {}{}\n", printable(reason), printable(names[0]),
               names.size() == 1 ? "" : fmt::format(" and {} more", names.size() - 1));
  }
  for (const std::string& note : report.notes) fmt::print("note: {}\n", printable(note));
}

void print_result(const QuantizeReport& report, const std::string& scale_dtype) {
  if (report.resumed > 0) fmt::print("note: {} tensors were whole already\n", report.resumed);
  if (report.saturated > 0)
    fmt::print("note: {} numbers were too large and are now the largest there is (--lossy)\n",
               report.saturated);
  if (report.scale_change) {
    fmt::print("note: {}: scales and biases {}; MLX computes in it\n", scale_dtype,
               *report.scale_change == 0
                   ? "are exact"
                   : fmt::format("change by up to {:.2g} of their value", *report.scale_change));
  }
  fmt::print("{}: {:.1f} M weights, {}, {:.3f} bits per weight{}\n",
             report.dry_run ? "would be" : report.output, static_cast<double>(report.weights) / 1e6,
             size_text(report.bytes), report.bits_per_weight,
             report.dry_run ? "" : fmt::format(", {:.2f} s", report.seconds));
}

Status run(QuantizeFlags flags) {
  BITTERN_TRY(check_json_flag(flags.common));
  if (flags.model.empty() == flags.hf_path.empty())
    return invalid(flags.model.empty() ? "MODEL: not given, expected a model to read"
                                       : "MODEL and --hf-path both given, expected one");
  if (flags.model.empty()) flags.model = flags.hf_path;
  auto options = options_of(flags);
  if (!options) return options.status();
  const bool print = !flags.common.quiet;
  Reporter reporter(flags.common.quiet);
  options->progress = [&](const ModelProgress& state) {
    reporter(state);
    return true;
  };
  options->planned = [&](const QuantizeReport& report) {
    reporter.clear();
    if (print && report.dry_run) print_fates(report);
    if (print) print_notes(report);
    return true;
  };
  const auto report = quantize_model(flags.model, flags.out, *options);
  reporter.clear();
  if (!report) return report.status();
  if (print) print_result(*report, flags.scale_dtype);
  return write_json(flags.common, report_json(*report));
}

}  // namespace

std::string flag_of(std::string_view field) {
  constexpr std::pair<std::string_view, const char*> kOthers[] = {
      {"source", "MODEL"},
      {"model", "MODEL"},
      {"other", "--compare"},
      {"out", "-o"},
      {"quantize", "-q"},
      {"rule", "--override"},
      {"rules", "--override, --tensor-type or a rule of --policy"},
      {"also_written", "--json"}};
  for (const auto& [name, flag] : kOthers)
    if (name == field) return flag;
  std::string flag = "--" + std::string(field);
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

Verb quantize_verb(CLI::App& main) {
  auto flags = std::make_shared<QuantizeFlags>();
  CLI::App* verb =
      main.add_subcommand("quantize", "quantise a model, or convert it to another file format");
  verb->add_option("MODEL", flags->model,
                   "a .gguf file, a Hugging Face or MLX folder, a .safetensors file");
  verb->add_option("--hf-path,--model", flags->hf_path, "the same as MODEL, as in mlx_lm.convert");
  verb->add_flag("-q,--quantize", flags->quantize,
                 "quantise, as mlx_lm.convert does: to 4 bits unless another flag says how");
  verb->add_option("-o,--output,--mlx-path", flags->out, "the folder or .gguf file to write");
  verb->add_option(
      "--format", flags->format,
      "mlx, gguf or safetensors (default: gguf if OUT ends in .gguf or a flag is for GGUF only; "
      "safetensors with --dequantize; else mlx)");
  verb->add_option("--bits,--q-bits", flags->bits, "bits per weight: 2, 3, 4, 5, 6 or 8")
      ->check(integer_in(1, 64));
  verb->add_option("--group-size,--q-group-size", flags->group,
                   "weights that share a scale: 32, 64 or 128 (default 64; --target-bpw chooses; "
                   "32 in GGUF)")
      ->check(integer_in(1, 1 << 20));
  verb->add_option("--type", flags->type,
                   "type of a GGUF file; tensors get llama-quantize's mix of types: Q2_K Q2_K_S "
                   "Q3_K_S Q3_K_M Q3_K_L Q4_0 Q4_1 Q4_K_S Q4_K_M Q5_0 Q5_1 Q5_K_S Q5_K_M Q6_K Q8_0 "
                   "F16 BF16 F32 (Q3_K, Q4_K and Q5_K mean the _M mixes)");
  verb->add_option("--output-tensor-type", flags->output_type,
                   "GGUF type of output.weight (default: the mix's)");
  verb->add_option("--token-embedding-type", flags->embedding_type,
                   "GGUF type of token_embd.weight (default: the mix's)");
  verb->add_flag("--leave-output-tensor", flags->leave_output,
                 "leave output.weight (lm_head) as it is");
  verb->add_option(
      "--method", flags->method,
      "rule for scales and biases: minmax, mlx or lsq (default lsq; in GGUF the type's own)");
  verb->add_option("--target-bpw", flags->target_bpw,
                   "most bits per weight of the whole model; the bits of each tensor are chosen by "
                   "measured error")
      ->check(number_in(1, 32));
  verb->add_option(
          "--override", flags->overrides,
          "rule for tensors whose name matches: REGEX=BITS[:GROUP], REGEX=TYPE or REGEX=keep; the "
          "first match decides")
      ->allow_extra_args(false);
  verb->add_option("--tensor-type", flags->tensor_types,
                   "the same with GGUF types: REGEX=TYPE, as in llama-quantize")
      ->allow_extra_args(false);
  verb->add_option("--policy", flags->policy, "a JSON file of such rules (docs/quantize.md)");
  verb->add_option("--imatrix", flags->imatrix,
                   "importance matrix of llama.cpp, as GGUF or .dat: weighs the errors of lsq and "
                   "of the K types");
  verb->add_flag("--transcode", flags->transcode, "convert the file and keep every number exactly");
  verb->add_flag(
      "--lossy", flags->lossy,
      "clamp numbers that the output's dtype cannot hold, instead of refusing them; with "
      "--transcode, also quantise again what cannot be exact");
  verb->add_option(
      "--scale-dtype", flags->scale_dtype,
      "dtype of MLX's scales and biases: f32, f16 or bf16 (default: that of the weights; f32 with "
      "--transcode)");
  verb->add_option("--dequantize", flags->dequantize, "write plain numbers: f32, f16 or bf16");
  verb->add_option(
      "--dtype", flags->dtype,
      "dtype of tensors that are not quantised: f32, f16 or bf16 (default: as they are)");
  verb->add_option("--split-max-size", flags->split_size,
                   "cut a GGUF file into parts of at most this size, such as 500M or 2G");
  verb->add_option("--split-max-tensors", flags->split_tensors,
                   "cut a GGUF file into parts of at most this many tensors")
      ->check(integer_in(1, 1 << 20));
  verb->add_flag("--pure", flags->pure,
                 "one type for every matrix: no mix, and also for those that are kept by default "
                 "(routers, gates, ...)");
  verb->add_flag("--allow-requantize", flags->allow_requantize,
                 "accept a model that is already quantised");
  verb->add_flag("--dry-run", flags->dry_run,
                 "print what every tensor would become; write nothing");
  verb->add_flag("--resume", flags->resume, "continue a run that was stopped");
  verb->add_option("--threads", flags->common.threads, "CPU threads (default: one per core)")
      ->check(integer_in(1, max_threads()));
  verb->add_option(
      "--json", flags->common.json,
      "also write the report to this file; - is standard output, and text goes to standard error");
  verb->add_flag("--force", flags->force,
                 "replace OUT if bittern wrote it (and an earlier report of --json)");
  verb->add_flag("--quiet", flags->common.quiet, "print errors only");
  verb->footer(
      "Examples:\n"
      "  bittern quantize model-folder -o model-4bit --bits 4\n"
      "  bittern quantize model.gguf -o model-mlx --transcode\n"
      "  bittern quantize model-folder -o model.gguf --type Q4_K_M --imatrix imatrix.gguf\n"
      "  bittern quantize --hf-path model-folder --mlx-path model-4bit -q");
  return {verb,
          [flags] {
            flags->common.force = flags->force;
            return run(*flags);
          },
          false, "one MODEL (the output is -o OUT, a type of GGUF --type TYPE)"};
}

}  // namespace bittern::cli
