// bittern quantize MODEL -o OUT: a smaller model, or the same one in another form.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bittern/convert.h"
#include "bittern/distill.h"
#include "cli/cli.h"
#include "cli/processes.h"
#include "formats/gguf.h"

namespace bittern::cli {
namespace {

struct QuantizeFlags {
  std::string model, hf_path, out, format, method, type, policy, imatrix, dequantize, scale_dtype;
  std::string dtype, output_type, embedding_type, split_size, data, zero_points;
  int bits = 0, group = 0;
  std::int64_t pieces = 0, context = 0;
  std::uint64_t split_tensors = 0;
  double target_bpw = 0;
  std::vector<std::string> overrides, tensor_types;
  bool pure = false, allow_requantize = false, transcode = false, lossy = false;
  bool quantize = false, leave_output = false, fisher = false;
  bool dry_run = false, force = false, resume = false;
  CommonFlags common;
};

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
                          .data = given(flags.data),
                          .pieces = given(flags.pieces),
                          .context = given(flags.context),
                          .fisher = flags.fisher,
                          .format = given(flags.format),
                          .zero_points = given(flags.zero_points),
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

class Reporter {
 public:
  explicit Reporter(bool quiet) : line_(quiet) {}
  void operator()(const ModelProgress& state) {
    const auto now = std::chrono::steady_clock::now();
    if (state.doing != doing_) {
      doing_ = state.doing;
      begin_ = now;
      first_ = state.done;
      line_.wait();
    }
    if (!line_.due()) return;
    const std::chrono::duration<double> took = now - begin_;
    const double rate = static_cast<double>(state.done - first_) / std::max(took.count(), 1e-3);
    line_.show(fmt::format("{} {:3.0f} %, {}/s, {:.0f} s left: {}", state.doing,
                           100.0 * static_cast<double>(state.done) /
                               static_cast<double>(std::max<std::uint64_t>(state.total, 1)),
                           size_text(static_cast<std::uint64_t>(rate * state.source_bpw / 8)),
                           static_cast<double>(state.total - state.done) / std::max(rate, 1.0),
                           printable(state.tensor)));
  }
  void clear() { line_.clear(); }

 private:
  PacedProgress line_;
  std::string doing_;
  std::uint64_t first_ = 0;
  std::chrono::steady_clock::time_point begin_;
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
  options->ranks = processes();
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
  const auto report = quantize_calibrated(flags.model, flags.out, *options);
  reporter.clear();
  if (!report) return report.status();
  if (print) print_result(*report, flags.scale_dtype);
  return write_json(flags.common, report_json(*report));
}

}  // namespace

std::vector<std::string> notes_of(const QuantizeReport& report) {
  std::vector<std::pair<std::string, std::vector<std::string>>> reasons;
  for (const QuantizedTensor& tensor : report.tensors) {
    if (tensor.note.empty()) continue;
    auto found = std::find_if(reasons.begin(), reasons.end(),
                              [&](const auto& r) { return r.first == tensor.note; });
    if (found == reasons.end()) found = reasons.insert(reasons.end(), {tensor.note, {}});
    found->second.push_back(tensor.name);
  }
  std::vector<std::string> notes;
  for (const auto& [reason, names] : reasons)
    notes.push_back(
        fmt::format("{}: {}{}", reason, names[0],
                    names.size() == 1 ? "" : fmt::format(" and {} more", names.size() - 1)));
  notes.insert(notes.end(), report.notes.begin(), report.notes.end());
  return notes;
}

void print_notes(const QuantizeReport& report) {
  for (const std::string& note : notes_of(report)) fmt::print("note: {}\n", printable(note));
}

// The last '=' counts.
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
  const auto option = [verb](const char* names, auto& value, const char* text, const char* help) {
    return verb->add_option(names, value, help)->option_text(text);
  };
  verb->add_option("MODEL", flags->model,
                   "a .gguf file, a Hugging Face or MLX folder, or a .safetensors file");
  option("--hf-path,--model", flags->hf_path, "MODEL", "the same as MODEL, as in mlx_lm.convert");
  option("--threads", flags->common.threads, "N",
         "use N CPU threads (default: BITTERN_THREADS, or one per core)")
      ->check(integer_in(1, max_threads()));
  option("--json", flags->common.json, "FILE",
         "also write a report to FILE, as JSON; - means standard output, and all other text then "
         "goes to standard error");
  verb->add_flag("--quiet", flags->common.quiet, "print only errors");

  const char* what = "What to do (one of these, or --dtype alone)";
  option("--bits,--q-bits", flags->bits, "N",
         "quantise every matrix to N bits per weight: 2, 3, 4, 5, 6 or 8")
      ->check(integer_in(1, 64))
      ->group(what);
  verb->add_flag("-q,--quantize", flags->quantize,
                 "quantise as mlx_lm.convert -q does: to 4 bits unless another flag says how")
      ->group(what);
  option(
      "--type", flags->type, "TYPE",
      "write a GGUF file and give every tensor the type that llama-quantize gives it: Q2_K "
      "Q2_K_S Q3_K_S Q3_K_M Q3_K_L Q4_0 Q4_1 Q4_K_S Q4_K_M Q5_0 Q5_1 Q5_K_S Q5_K_M Q6_K Q8_0 F16 "
      "BF16 F32; Q3_K, Q4_K and Q5_K mean the _M mixes")
      ->group(what);
  option("--target-bpw", flags->target_bpw, "X",
         "quantise the whole model to at most X bits per weight; measured errors decide the bits "
         "of each tensor")
      ->check(number_in(1, 32))
      ->group(what);
  verb->add_flag("--transcode", flags->transcode,
                 "convert to another file format and keep every number exactly")
      ->group(what);
  option("--dequantize", flags->dequantize, "DTYPE", "write plain numbers: f32, f16 or bf16")
      ->group(what);

  const char* how = "How";
  option("--group-size,--q-group-size", flags->group, "N",
         "weights per group, which share a scale: 32, 64 or 128 (default: 64; with --target-bpw "
         "the best for each tensor); always 32 in GGUF")
      ->check(integer_in(1, 1 << 20))
      ->group(how);
  option("--method", flags->method, "RULE",
         "minmax, mlx, lsq or gptq: how codes, scales and biases are chosen (default: lsq; in GGUF "
         "the type's own rule); gptq is slower and loses least: it runs the model on the text of "
         "--data")
      ->group(how);
  option("--data", flags->data, "FILE",
         "with --method gptq: a text to run the model on, like the text of later use, or "
         "conversations (.jsonl)")
      ->group(how);
  verb->add_flag("--fisher", flags->fisher,
                 "with --method gptq: weigh each token by how much errors at it change the "
                 "predictions; slower")
      ->group(how);
  option("--pieces,--chunks,--num-samples", flags->pieces, "N",
         "with --method gptq: read N pieces of the text, evenly spread (default: 128)")
      ->check(integer_in(1, std::int64_t{1} << 24))
      ->group(how);
  option("--context,--ctx,--ctx-size,--max-seq-length", flags->context, "N",
         "with --method gptq: tokens per piece of text (default: 512)")
      ->check(integer_in(2, 1 << 20))
      ->group(how);
  option("--imatrix", flags->imatrix, "FILE",
         "weight the errors of lsq and of the K types by llama.cpp's importance matrix, GGUF or "
         ".dat")
      ->group(how);
  option("--scale-dtype", flags->scale_dtype, "DTYPE",
         "dtype of scales and biases in a folder: f32, f16 or bf16 (default: that of the weights; "
         "f32 with --transcode to MLX)")
      ->group(how);
  option("--zero-points", flags->zero_points, "KIND",
         "real: a group's bias is any number; integer: 0 is one of its values, as AWQ, GPTQ and "
         "compressed-tensors have it (default: real; in compressed-tensors integer)")
      ->group(how);
  option("--dtype", flags->dtype, "DTYPE",
         "dtype of the tensors that are not quantised: f32, f16 or bf16 (default: the source's)")
      ->group(how);
  verb->add_flag("--lossy", flags->lossy,
                 "clamp numbers that the output's dtype cannot hold, instead of refusing them; "
                 "with --transcode, also quantise again what cannot be exact")
      ->group(how);
  verb->add_flag("--allow-requantize", flags->allow_requantize,
                 "accept a model that is already quantised")
      ->group(how);

  const char* tensors = "Single tensors";
  option("--override", flags->overrides, "RULE",
         "for tensors whose name matches REGEX: REGEX=BITS[:GROUP], REGEX=TYPE or REGEX=keep; the "
         "first rule that matches decides; may be given several times")
      ->allow_extra_args(false)
      ->group(tensors);
  option("--tensor-type", flags->tensor_types, "RULE",
         "the same for GGUF types: REGEX=TYPE, as in llama-quantize")
      ->allow_extra_args(false)
      ->group(tensors);
  option("--policy", flags->policy, "FILE", "read such rules from a JSON file (docs/quantize.md)")
      ->group(tensors);
  option("--output-tensor-type", flags->output_type, "TYPE",
         "GGUF type of output.weight (default: as --type decides)")
      ->group(tensors);
  option("--token-embedding-type", flags->embedding_type, "TYPE",
         "GGUF type of token_embd.weight (default: as --type decides)")
      ->group(tensors);
  verb->add_flag("--leave-output-tensor", flags->leave_output,
                 "do not quantise output.weight (lm_head)")
      ->group(tensors);
  verb->add_flag("--pure", flags->pure,
                 "give every matrix the same type, also those that are not quantised by default "
                 "(routers, gates, ...)")
      ->group(tensors);

  const char* output = "Output";
  option("-o,--output,--mlx-path", flags->out, "OUT", "write this folder or .gguf file")
      ->group(output);
  option(
      "--format", flags->format, "FORMAT",
      "mlx, gguf, safetensors, or compressed-tensors for vLLM and transformers (default: gguf if "
      "OUT ends in .gguf or a flag is for GGUF only; safetensors with --dequantize; else mlx)")
      ->group(output);
  option("--split-max-size", flags->split_size, "SIZE",
         "split a GGUF file into parts of at most SIZE bytes, such as 500M or 2G")
      ->group(output);
  option("--split-max-tensors", flags->split_tensors, "N",
         "split a GGUF file into parts of at most N tensors")
      ->check(integer_in(1, 1 << 20))
      ->group(output);
  verb->add_flag("--dry-run", flags->dry_run, "print what every tensor would become; write nothing")
      ->group(output);
  verb->add_flag("--resume", flags->resume, "continue a run that was stopped")->group(output);
  verb->add_flag("--force", flags->force,
                 "replace OUT if bittern wrote it, and FILE of --json if it is an earlier report")
      ->group(output);
  verb->footer(
      "Examples:\n"
      "  bittern quantize model-folder -o model-4bit --bits 4\n"
      "  bittern quantize model-folder -o model-3bit --bits 3 --method gptq --data text.txt\n"
      "  bittern quantize model-folder -o model-w4a16 --bits 4 --format compressed-tensors\n"
      "  bittern quantize model.gguf -o model-mlx --transcode\n"
      "  bittern quantize model-folder -o model.gguf --type Q4_K_M --imatrix imatrix.gguf\n"
      "  bittern quantize --hf-path model-folder --mlx-path model-4bit -q\n"
      "mpirun -n N bittern quantize ... shares the work among N processes.");
  return {.app = verb,
          .run =
              [flags] {
                flags->common.force = flags->force;
                return run(*flags);
              },
          .one_model = "one MODEL (the output is -o OUT, a type of GGUF --type TYPE)",
          .shared = true};
}

}  // namespace bittern::cli
