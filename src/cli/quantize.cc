// bittern quantize MODEL -o OUT: a smaller model, or the same one in another form.
#include <fmt/format.h>

#include <unistd.h>
#include <algorithm>
#include <charconv>
#include <chrono>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cli/cli.h"
#include "convert/conversion.h"
#include "convert/mix.h"
#include "convert/output.h"
#include "convert/replace.h"
#include "formats/checkpoint.h"

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

std::string upper(std::string text) {
  for (char& c : text) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

Result<GgmlType> parse_type(const std::string& flag, const std::string& text) {
  const GgmlTypeInfo* type = ggml_type(std::string_view(text));
  if (type != nullptr) return type->type;
  return invalid(
      fmt::format("{}: {}: no type of GGUF, expected one like Q4_K or Q8_0", flag, text));
}

Result<const Mix*> parse_mix(const std::string& text) {
  if (const Mix* mix = find_mix(text)) return mix;
  std::string names;
  for (const Mix& mix : mixes()) names += fmt::format(" {}", mix.name);
  if (ggml_type(std::string_view(text)) != nullptr)
    return unsupported(fmt::format("--type {}: not written, expected one of{}", text, names));
  return invalid(
      fmt::format("--type: {}: no type of GGUF, expected one of Q4_K Q5_K Q3_K{}", text, names));
}

// As llama-gguf-split reads it: 500M is 500 * 10^6 bytes, 2G is 2 * 10^9.
Result<std::uint64_t> parse_size(const std::string& flag, const std::string& text) {
  std::uint64_t n = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  const std::string unit = upper(std::string(end, text.data() + text.size()));
  const std::uint64_t scale = unit == "M" ? 1000'000 : unit == "G" ? 1000'000'000 : 0;
  if (error == std::errc() && scale > 0 && n > 0 && n <= 1'000'000) return n * scale;
  return invalid(
      fmt::format("{}: {}, expected 1 to 1000000 with M or G, such as 500M or 2G", flag, text));
}

Result<SafeDType> parse_float(const std::string& flag, const std::string& text) {
  std::string name = upper(text);
  if (const std::size_t word = name.find("FLOAT"); word != std::string::npos)
    name.replace(word, 5, "F");  // float16, as mlx_lm.convert spells it
  const auto dtype = find_safe_dtype(name);
  if (dtype && (*dtype == SafeDType::f32 || *dtype == SafeDType::f16 || *dtype == SafeDType::bf16))
    return *dtype;
  return invalid(fmt::format("{}: {}, expected f32, f16 or bf16", flag, text));
}

// REGEX=4:64, REGEX=4, REGEX=Q8_0 or REGEX=keep; the last '=' counts.
Result<TensorRule> parse_rule(const std::string& flag, const std::string& text) {
  const std::size_t equals = text.rfind('=');
  const auto refuse = [&] {
    return invalid(fmt::format(
        "{}: {}, expected REGEX=BITS, REGEX=BITS:GROUP, REGEX=TYPE or REGEX=keep", flag, text));
  };
  if (equals == std::string::npos || equals == 0) return refuse();
  TensorRule rule{.pattern = text.substr(0, equals)};
  const std::string value = text.substr(equals + 1);
  if (value == "keep") {
    rule.keep = true;
    return rule;
  }
  if (!value.empty() && std::isdigit(static_cast<unsigned char>(value[0]))) {
    int read = 0;
    const int fields =
        std::sscanf(value.c_str(), "%3d%n:%4d%n", &rule.bits, &read, &rule.group, &read);
    if (fields < 1 || static_cast<std::size_t>(read) != value.size()) return refuse();
    return rule;
  }
  if (ggml_type(std::string_view(value)) == nullptr) return refuse();
  rule.type = ggml_type(std::string_view(value))->type;
  return rule;
}

Result<ConversionOptions> options_of(const QuantizeFlags& flags) {
  ConversionOptions options;
  const std::string out = flags.out.substr(0, flags.out.find_last_not_of('/') + 1);
  const bool gguf_name = out.ends_with(".gguf");
  if (flags.format.empty()) {
    const bool gguf_flags = !flags.type.empty() || !flags.output_type.empty() ||
                            !flags.embedding_type.empty() || !flags.split_size.empty() ||
                            flags.split_tensors > 0;
    options.format = gguf_name || gguf_flags    ? ModelFormat::gguf
                     : flags.dequantize.empty() ? ModelFormat::mlx
                                                : ModelFormat::safetensors;
  } else if (flags.format == "mlx") {
    options.format = ModelFormat::mlx;
  } else if (flags.format == "gguf") {
    options.format = ModelFormat::gguf;
  } else if (flags.format == "safetensors") {
    options.format = ModelFormat::safetensors;
  } else {
    return invalid(fmt::format("--format: {}, expected mlx, gguf or safetensors", flags.format));
  }
  options.bits = flags.bits;
  options.group = flags.group;
  if (!flags.type.empty()) {
    const auto mix = parse_mix(flags.type);
    if (!mix) return mix.status();
    options.mix = *mix;
  }
  for (const auto& [flag, text, to] :
       {std::tuple("--output-tensor-type", &flags.output_type, &options.output_type),
        std::tuple("--token-embedding-type", &flags.embedding_type, &options.embedding_type)}) {
    if (text->empty()) continue;
    const auto type = parse_type(flag, *text);
    if (!type) return type.status();
    *to = *type;
  }
  options.leave_output = flags.leave_output;
  options.split_tensors = flags.split_tensors;
  if (!flags.split_size.empty()) {
    const auto size = parse_size("--split-max-size", flags.split_size);
    if (!size) return size.status();
    options.split_bytes = *size;
  }
  if (!flags.method.empty()) {
    for (std::size_t i = 0; i < std::size(kAffineMethodNames); ++i)
      if (flags.method == kAffineMethodNames[i]) options.method = static_cast<AffineMethod>(i);
    if (!options.method)
      return invalid(fmt::format("--method: {}, expected minmax, mlx or lsq", flags.method));
  }
  for (const auto& [flag, texts] : {std::pair("--override", &flags.overrides),
                                    std::pair("--tensor-type", &flags.tensor_types)}) {
    for (const std::string& text : *texts) {
      auto rule = parse_rule(flag, text);
      if (!rule) return rule.status();
      options.rules.push_back(std::move(*rule));
    }
  }
  for (const auto& [flag, text, to] :
       {std::tuple("--dequantize", &flags.dequantize, &options.dequantize),
        std::tuple("--scale-dtype", &flags.scale_dtype, &options.scale_dtype),
        std::tuple("--dtype", &flags.dtype, &options.dtype)}) {
    if (text->empty()) continue;
    const auto dtype = parse_float(flag, *text);
    if (!dtype) return dtype.status();
    *to = *dtype;
  }
  options.target_bpw = flags.target_bpw;
  options.pure = flags.pure;
  options.allow_requantize = flags.allow_requantize;
  options.transcode = flags.transcode;
  options.lossy = flags.lossy;
  options.imatrix = flags.imatrix;
  for (const auto& [flag, given] :
       {std::pair("--policy", !flags.policy.empty()), std::pair("-q", flags.quantize)}) {
    if (given && (flags.transcode || options.dequantize))
      return invalid(fmt::format("{}: has no effect with {}; leave one of them out", flag,
                                 flags.transcode ? "--transcode" : "--dequantize"));
  }
  if (!flags.policy.empty()) BITTERN_TRY(read_policy(flags.policy, options));
  // As mlx_lm.convert -q.
  if (flags.quantize && options.bits == 0 && options.mix == nullptr && options.target_bpw == 0)
    options.bits = 4;
  return options;
}

const char* way_text(OutputTensor::Way way) {
  constexpr const char* kNames[] = {"copied", "cast", "quantised", "transcoded"};
  return kNames[static_cast<int>(way)];
}

// A line on the terminal; elsewhere a plain line every few seconds.
class Reporter {
 public:
  Reporter(bool quiet, const Checkpoint& source)
      : line_(quiet), plain_(!quiet && isatty(STDERR_FILENO) != 1) {
    std::uint64_t bytes = 0, weights = 0;
    for (const CheckpointTensor& tensor : source.tensors()) {
      bytes += tensor.bytes();
      weights += static_cast<std::uint64_t>(tensor.rows() * tensor.columns());
    }
    if (weights > 0) bytes_per_weight_ = static_cast<double>(bytes) / static_cast<double>(weights);
  }
  void operator()(const ConversionProgress& state) {
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
    const auto text = fmt::format("{} {:3.0f} %, {}/s, {:.0f} s left: {}", state.doing,
                                  100.0 * static_cast<double>(state.done) /
                                      static_cast<double>(std::max<std::uint64_t>(state.all, 1)),
                                  size_text(static_cast<std::uint64_t>(rate * bytes_per_weight_)),
                                  static_cast<double>(state.all - state.done) / std::max(rate, 1.0),
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
  double bytes_per_weight_ = 0;  // of the source
  std::string doing_;
  std::uint64_t first_ = 0;
  std::chrono::steady_clock::time_point begin_, shown_;
};

Json report_json(const Conversion& conversion, const QuantizeFlags& flags, double seconds,
                 const Conversion::RunReport& ran) {
  Json tensors = Json::array();
  for (const OutputTensor& tensor : conversion.tensors()) {
    Json shape = Json::array();
    for (int d = 0; d < tensor.recipe.shape.rank; ++d) shape.push_back(tensor.recipe.shape[d]);
    tensors.push_back({{"name", tensor.recipe.name},
                       {"shape", shape},
                       {"sources", tensor.recipe.sources},
                       {"from", tensor.from.str()},
                       {"to", tensor.to.str()},
                       {"way", way_text(tensor.way)},
                       {"bytes", tensor.bytes},
                       {"note", tensor.note}});
  }
  return {{"schema", 1},
          {"model", flags.model},
          {"output", flags.out},
          {"weights", conversion.weights()},
          {"bytes", conversion.bytes()},
          {"bits_per_weight", conversion.bits_per_weight()},
          {"seconds", seconds},
          {"seconds_making", ran.making},
          {"seconds_writing", ran.writing},
          {"seconds_syncing", ran.syncing},
          {"resumed", ran.resumed},
          {"scale_change", ran.scale_change},
          {"saturated", ran.saturated},
          {"notes", conversion.notes()},
          {"tensors", tensors}};
}

void print_fates(const Conversion& conversion) {
  std::size_t width = 20;
  for (const OutputTensor& tensor : conversion.tensors())
    width = std::max(width, tensor.recipe.name.size());
  fmt::print("{:<{}} {:>20} {:>24} {:>28} {:>10}\n", "tensor", width, "shape", "from", "to",
             "bytes");
  for (const OutputTensor& tensor : conversion.tensors()) {
    fmt::print("{:<{}} {:>20} {:>24} {:>28} {:>10}{}{}\n", printable(tensor.recipe.name), width,
               tensor.recipe.shape.str(), tensor.from.str(), tensor.to.str(),
               size_text(tensor.bytes), tensor.note.empty() ? "" : "  ", tensor.note);
  }
}

// What is not as it was asked for, told once a reason.
void print_notes(const Conversion& conversion) {
  std::vector<std::pair<std::string, std::vector<std::string>>> reasons;
  for (const OutputTensor& tensor : conversion.tensors()) {
    if (tensor.note.empty()) continue;
    auto found = std::find_if(reasons.begin(), reasons.end(),
                              [&](const auto& r) { return r.first == tensor.note; });
    if (found == reasons.end()) found = reasons.insert(reasons.end(), {tensor.note, {}});
    found->second.push_back(tensor.recipe.name);
  }
  for (const auto& [reason, names] : reasons) {
    fmt::print("note: {}: {}{}\n", printable(reason), printable(names[0]),
               names.size() == 1 ? "" : fmt::format(" and {} more", names.size() - 1));
  }
  for (const std::string& note : conversion.notes()) fmt::print("note: {}\n", printable(note));
}

// `parts`: of OUT, which are known when all is planned.
Status check_files_apart(const QuantizeFlags& flags, const Checkpoint& source,
                         const std::vector<std::string>& parts) {
  std::vector<std::string> inputs = source.files();
  for (const std::string& input : {flags.policy, flags.imatrix})
    if (!input.empty()) inputs.push_back(input);
  std::vector<OutputName> outputs;
  if (!flags.out.empty())
    for (const char* suffix : {"", ".partial", ".partial.journal"})
      outputs.push_back({"-o", flags.out + suffix});
  for (const std::string& part : parts) outputs.push_back({"-o", part});
  for (OutputName& json : json_output(flags.common)) outputs.push_back(std::move(json));
  return check_apart(outputs, inputs);
}

// A part that is there is refused now, unless it may be of a run that was stopped as it moved them.
Status check_parts(const QuantizeFlags& flags, const Checkpoint& source,
                   const std::vector<std::string>& parts) {
  BITTERN_TRY(check_files_apart(flags, source, parts));
  const auto left = thing_at(flags.out + ".partial");
  if (!left) return left.status();
  for (const std::string& part : parts)
    if (*left == Thing::nothing) BITTERN_TRY(check_part(part, flags.force));
  return {};
}

Status run(QuantizeFlags flags) {
  BITTERN_TRY(check_json_flag(flags.common));
  if (flags.model.empty() == flags.hf_path.empty())
    return invalid(flags.model.empty() ? "MODEL: not given, expected a model to read"
                                       : "MODEL and --hf-path both given, expected one");
  if (flags.model.empty()) flags.model = flags.hf_path;
  if (flags.dry_run && flags.resume)
    return invalid("--resume: has no effect with --dry-run; leave one of them out");
  if (flags.out.empty() && !flags.dry_run)
    return invalid("-o: not given, expected the name of the output (or --dry-run)");
  auto options = options_of(flags);
  if (!options) return options.status();
  const bool folder = options->format != ModelFormat::gguf;
  const bool splits = options->splits();
  if (!flags.out.empty()) {
    const auto out = output_path(flags.out, folder);
    if (!out) return out.status();
    flags.out = *out;
  }
  if (!flags.out.empty()) {
    BITTERN_TRY(check_output(
        flags.out,
        {.folder = folder, .parts = splits, .force = flags.force, .resume = flags.resume}));
  }
  BITTERN_TRY(use_threads(flags.common));
  const auto source = Checkpoint::open(flags.model);
  if (!source) return source.status();
  BITTERN_TRY(check_files_apart(flags, *source, {}));
  const bool print = !flags.common.quiet;
  Reporter reporter(flags.common.quiet, *source);
  const auto progress = [&](const ConversionProgress& state) { reporter(state); };
  const auto start = std::chrono::steady_clock::now();
  auto conversion =
      Conversion::plan(*source, *options, flags.out.empty() ? "OUT" : flags.out, progress);
  reporter.clear();
  if (!conversion) return conversion.status();
  if (splits && !flags.out.empty())
    BITTERN_TRY(check_parts(flags, *source, conversion->outputs(flags.out)));
  if (print && flags.dry_run) print_fates(*conversion);
  if (print) print_notes(*conversion);
  Conversion::RunReport report;
  if (!flags.dry_run) {
    const auto ran =
        conversion->run(flags.out, {.force = flags.force, .resume = flags.resume}, progress);
    reporter.clear();
    if (!ran) return ran.status();
    report = *ran;
    if (print && report.resumed > 0)
      fmt::print("note: {} tensors were whole already\n", report.resumed);
    if (print && report.saturated > 0)
      fmt::print("note: {} numbers were too large and are now the largest there is (--lossy)\n",
                 report.saturated);
    const auto& tensors = conversion->tensors();
    const bool scales = std::any_of(tensors.begin(), tensors.end(), [](const OutputTensor& tensor) {
      return tensor.to.kind == Storage::Kind::affine;
    });
    if (print && options->transcode && options->scale_dtype && scales) {
      fmt::print("note: {}: scales and biases {}; MLX computes in it\n", flags.scale_dtype,
                 report.scale_change == 0
                     ? "are exact"
                     : fmt::format("change by up to {:.2g} of their value", report.scale_change));
    }
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  if (print) {
    fmt::print("{}: {:.1f} M weights, {}, {:.3f} bits per weight{}\n",
               flags.dry_run ? "would be" : flags.out,
               static_cast<double>(conversion->weights()) / 1e6, size_text(conversion->bytes()),
               conversion->bits_per_weight(),
               flags.dry_run ? "" : fmt::format(", {:.2f} s", took.count()));
  }
  return write_json(flags.common, report_json(*conversion, flags, took.count(), report));
}

}  // namespace

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
