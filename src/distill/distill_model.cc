// distill_model: calibrate, search a rate, learn, write, measure what was written; and what a run
// leaves for the next one.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "bittern/device.h"
#include "bittern/distill.h"
#include "bittern/eval.h"
#include "bittern/generate.h"
#include "bittern/tokenizer.h"
#include "convert/apart.h"
#include "convert/call.h"
#include "convert/encode.h"
#include "convert/matrix_coder.h"
#include "convert/mix.h"
#include "convert/option_names.h"
#include "convert/output.h"
#include "convert/parse_options.h"
#include "convert/replace.h"
#include "core/guarded.h"
#include "core/ranks.h"
#include "cpu/bf16.h"
#include "distill/asked.h"
#include "distill/gptq_coder.h"
#include "distill/learned_coder.h"
#include "distill/learner.h"
#include "distill/self_text.h"
#include "eval/targets_file.h"
#include "formats/fingerprint.h"
#include "formats/grid.h"
#include "formats/mapped_file.h"

namespace bittern {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr std::int64_t kMostTrial = 16;  // steps of a run that tries a rate
// Embedding and head, by their names in GGUF and in folders.
constexpr const char* kEnds = "(^token_embd|^output|embed_tokens|lm_head)\\.weight$";

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::uint64_t peak_memory() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  return static_cast<std::uint64_t>(used.ru_maxrss) * 1024;
}

Status in_range(const char* field, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return {};
  return invalid(std::string("@{") + field + "}: " + std::to_string(value) +
                 ", expected an integer " + std::to_string(least) + ".." + std::to_string(most));
}

Status check(const DistillOptions& options) {
  constexpr std::int64_t kMost = std::int64_t{1} << 24;
  if (options.data.empty() && !options.self_text)
    return invalid(
        "@{data}: no text given, expected the path of one to learn from, or @{self_text}");
  if (!options.data.empty() && options.self_text)
    return invalid("@{data} and @{self_text} exclude each other");
  BITTERN_TRY(in_range("context", options.context, 2, std::int64_t{1} << 20));
  if (const int bits = options.embedding_bits.value_or(0);
      bits < 0 || bits == 1 || bits == 7 || bits > 8)
    return invalid("@{embedding_bits}: " + std::to_string(bits) +
                   ", expected 0, 2, 3, 4, 5, 6 or 8");
  BITTERN_TRY(in_range("calibration", options.calibration, 1, kMost));
  BITTERN_TRY(in_range("validation", options.validation, 1, kMost));
  BITTERN_TRY(in_range("steps", options.steps, 0, kMost));
  BITTERN_TRY(in_range("batch", options.batch, 1, kMost));
  if (options.rate && !(*options.rate > 0 && *options.rate <= 1))
    return invalid("@{rate}: " + std::to_string(*options.rate) +
                   ", expected a number above 0 and up to 1");
  BITTERN_TRY(in_range("teacher_top", options.teacher_top, 5, kMost));
  if (!(options.checkpoint_minutes >= 0))
    return invalid("@{checkpoint_minutes}: expected a number of 0 or more");
  return check_threads(options.threads);
}

// What is written, and the grids that matrices of the layers learn on.
struct Target {
  const Mix* mix = nullptr;  // of a GGUF file; null: a folder
  int bits = 4, group = 64;
  std::optional<std::string> scale_dtype{};
  bool compressed = false;  // a folder of compressed-tensors, not of MLX
  bool integer_zeros = false;
};

// Those of a GGUF file have the groups and scales of Q4_1 and Q5_1.
Result<Target> target_of(const DistillOptions& options, const std::string& out) {
  const auto parsed = parse_options(
      {.format = options.format, .zero_points = options.zero_points, .type = options.type}, out,
      /*coder=*/nullptr);
  if (!parsed) return parsed.status();
  if (parsed->format == ModelFormat::safetensors)
    return invalid(
        "@{format}: safetensors, which has no codes, expected mlx, gguf or compressed-tensors");
  if (parsed->format != ModelFormat::gguf) {
    if (options.type)
      return invalid("@{type} " + *options.type + ": the format is " + name(parsed->format) +
                     ", expected @{format} gguf");
    const bool compressed = parsed->format == ModelFormat::compressed_tensors;
    return Target{.bits = options.bits.value_or(4),
                  .group = options.group_size.value_or(64),
                  .scale_dtype = options.scale_dtype,
                  .compressed = compressed,
                  .integer_zeros = compressed || parsed->integer_zeros.value_or(false)};
  }
  if (options.zero_points)
    return invalid(
        "@{zero_points}: the format is gguf, expected @{format} mlx or compressed-tensors");
  if (options.type && options.bits) return invalid("@{type} and @{bits} both given, expected one");
  const int bits = options.bits.value_or(4);
  if (bits != 4 && bits != 5)
    return invalid("@{bits}: " + std::to_string(bits) +
                   " in a GGUF file, expected 4 (Q4_1), 5 (Q5_1), a @{type} or @{format} mlx");
  if (options.group_size.value_or(32) != 32)
    return invalid("@{group_size}: " + std::to_string(*options.group_size) +
                   ": groups of GGUF have 32 weights, expected 32");
  if (options.scale_dtype.value_or("f16") != "f16")
    return invalid("@{scale_dtype}: " + *options.scale_dtype +
                   ": scales of GGUF are f16, expected f16");
  const Mix* const mix = options.type ? parsed->mix : find_mix(bits == 4 ? "Q4_1" : "Q5_1");
  const Storage storage = storage_of(mix->type);
  if (!is_fitted(storage))
    return invalid("@{type}: " + std::string(mix->name) +
                   " has no scales and biases that could learn, expected Q4_1, Q5_1, Q4_K_S, "
                   "Q4_K_M, Q5_K_S or Q5_K_M");
  return Target{.mix = mix, .bits = grid_of(storage)->bits, .group = 32, .scale_dtype = "f16"};
}

// A pattern that matches the name alone.
std::string exactly(const std::string& name) {
  std::string pattern = "^";
  for (const char c : name) {
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '_') pattern += '\\';
    pattern += c;
  }
  return pattern + "$";
}

// OUT.distill: what a run that was stopped goes on from.
class WorkFolder {
 public:
  explicit WorkFolder(const std::string& out) : path_(out + ".distill") {}

  const std::string& path() const { return path_; }
  std::string asked() const { return path_ + "/asked"; }
  std::string start() const { return path_ + "/start"; }
  std::string state() const { return path_ + "/state"; }
  std::string result() const { return path_ + "/result"; }
  std::string written_start() const { return path_ + "/written_start"; }

  WorkFolder(const WorkFolder&) = delete;
  ~WorkFolder() {
    if (lock_ >= 0) ::close(lock_);
  }

  Status open(bool resume, bool force) {
    const auto thing = thing_at(path_);
    if (!thing) return thing.status();
    std::error_code error;
    if (*thing == Thing::nothing) {
      std::filesystem::create_directory(path_, error);
      if (error) return {Code::io_error, path_ + ": " + error.message()};
      return lock();
    }
    if (*thing != Thing::folder)
      return invalid(path_ + ": " + name(*thing) + ", expected a folder or nothing");
    BITTERN_TRY(lock());
    BITTERN_TRY(check_ours());
    if (resume) return check_known();
    if (!force)
      return {Code::unavailable, path_ +
                                     ": of a run that was stopped, expected @{resume} to go on "
                                     "with it or @{force} to begin anew"};
    error = clear();
    if (error) return {Code::io_error, path_ + ": cannot be emptied: " + error.message()};
    return {};
  }
  // After a failure: nothing is left to go on with.
  void remove_if_empty() const {
    std::error_code error;
    if (lock_ < 0) return;
    for (const auto& entry : std::filesystem::directory_iterator(path_, error))
      if (entry.path() != asked()) return;
    if (error) return;
    std::filesystem::remove(asked(), error);
    std::filesystem::remove(path_, error);
  }
  bool has_start() const { return std::filesystem::exists(start()); }
  bool has_state() const { return std::filesystem::exists(state()); }
  std::error_code remove() const {
    std::error_code error = clear();
    if (!error) std::filesystem::remove(path_, error);
    return error;
  }

 private:
  std::string removed() const { return path_ + "/removed"; }

  // Whoever kills this leaves a folder that the next run understands: no model of which files are
  // missing, no state without its start, nothing without `asked`.
  std::error_code clear() const {
    std::error_code error;
    std::vector<std::filesystem::path> paths{state()};
    for (const auto& entry : std::filesystem::directory_iterator(path_, error))
      if (entry.path() != asked() && entry.path() != state()) paths.push_back(entry.path());
    paths.push_back(asked());
    if (!error) std::filesystem::remove_all(removed(), error);
    for (const std::filesystem::path& path : paths) {
      if (error) break;
      if (path == removed()) continue;
      if (!std::filesystem::is_directory(std::filesystem::symlink_status(path))) {
        std::filesystem::remove(path, error);
        continue;
      }
      std::filesystem::rename(path, removed(), error);
      if (!error) std::filesystem::remove_all(removed(), error);
    }
    return error;
  }
  // What there is says of what run it is.
  Status check_known() const {
    const bool left = has_start() || has_state() || std::filesystem::exists(start() + ".partial");
    if (!left || std::filesystem::exists(asked())) return {};
    return invalid(path_ +
                   ": does not say of what run it is (`asked` is missing), expected @{force} to "
                   "begin anew");
  }
  // One run at a time, while this lives. A file system without locks is trusted.
  Status lock() {
    lock_ = ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lock_ < 0) return {Code::io_error, path_ + ": " + std::generic_category().message(errno)};
    if (::flock(lock_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return {};
    ::close(std::exchange(lock_, -1));
    return {Code::unavailable, path_ + ": another run is working there, expected none"};
  }
  // Nothing is removed that a run did not write.
  Status check_ours() const {
    static const std::set<std::string> kNames = {"asked",
                                                 "asked.partial",
                                                 "start",
                                                 "start.partial",
                                                 "start.partial.journal",
                                                 "state",
                                                 "state.partial",
                                                 "result",
                                                 "result.partial",
                                                 "result.partial.journal",
                                                 "result.replaced",
                                                 "removed",
                                                 "written_start",
                                                 "written_start.partial",
                                                 "written_start.partial.journal"};
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(path_, error))
      if (!kNames.contains(entry.path().filename().string()))
        return invalid(path_ + ": holds " + entry.path().filename().string() +
                       ", which no run wrote, expected another place for the output");
    if (error) return {Code::io_error, path_ + ": " + error.message()};
    for (const std::string& model : {start(), result(), written_start()})
      if (std::filesystem::exists(model)) {
        const bool folder = std::filesystem::is_directory(model, error);
        BITTERN_TRY(check_replaceable(model, folder));
      }
    return {};
  }
  std::string path_;
  int lock_ = -1;
};

class Distillation {
 public:
  Distillation(const std::string& teacher, const std::string& out, const DistillOptions& options,
               const Target& target)
      : teacher_(teacher), out_(out), options_(options), target_(target), work_(out) {}

  Result<DistillReport> run() {
    auto report = distill();
    if (!report) work_.remove_if_empty();
    // What the caller stopped, in whichever part of the work.
    if (report.status().code() == Code::cancelled && !stopped_.ok()) return stopped_;
    return report;
  }

 private:
  Result<DistillReport> distill() {
    const auto begun = Clock::now();
    const OutputOptions output{
        .folder = !gguf(), .force = options_.force, .resume = options_.resume};
    if (writes()) BITTERN_TRY(check_out(output));
    BITTERN_TRY(check_files_apart());
    const CallSettings settings(options_.threads);
    if (!options_.self_text)
      BITTERN_TRY(take(read_texts(teacher_, options_.data, options_.context)));
    // Everything that quantize would refuse, before anything is written.
    CalibrationText any{.context = options_.context, .tokens = {}};
    any.tokens.resize(static_cast<std::size_t>(options_.context));
    GptqCoder planner(teacher_, std::move(any), options_.fisher);
    if (gguf()) BITTERN_TRY(plan(written_options(), nullptr));
    BITTERN_TRY(plan(start_options(), &planner));
    if (writes()) {
      BITTERN_TRY(work_.open(options_.resume, options_.force));
      BITTERN_TRY(asked(work_.has_state()).check(work_.asked(), work_.path()));
    }
    if (options_.self_text) BITTERN_TRY(take(own_text()));
    if (writes()) BITTERN_TRY(asked(true).write(work_.asked()));
    GptqCoder coder(teacher_, some_of(text_.train, options_.calibration), options_.fisher,
                    options_.ranks, options_.preference);
    BITTERN_TRY(calibrate(coder));
    BITTERN_TRY(learn());
    BITTERN_TRY(write());
    if (options_.judge) BITTERN_TRY(judge());
    BITTERN_TRY(agree(options_.ranks, {}));
    if (writes()) {
      BITTERN_TRY(move_output(work_.result(), out_, output));
      BITTERN_TRY(sync_name(out_));
    }
    report_.seconds = seconds_since(begun);
    report_.peak_bytes = peak_memory();
    if (writes())
      if (const std::error_code error = work_.remove(); error)
        report_.output.notes.push_back(work_.path() + " could not be removed: " + error.message());
    return std::move(report_);
  }

  Status check_out(const OutputOptions& output) const {
    const Status checked = check_output(out_, output);
    const bool done = !checked.ok() && options_.resume && !options_.force &&
                      std::filesystem::exists(out_) && std::filesystem::exists(work_.path());
    if (!done) return checked;
    return {checked.code(), std::string(checked.message()) + "; if it is what the run in " +
                                work_.path() + " made, that folder is no longer needed"};
  }

  // Of several processes the first one writes, and looks at what is there.
  bool writes() const { return rank_of(options_.ranks) == 0; }
  // What it answers, everywhere.
  Result<bool> everywhere(bool answer) const {
    std::byte said{answer};
    if (options_.ranks != nullptr) {
      BITTERN_TRY(options_.ranks->agree({}));
      BITTERN_TRY(options_.ranks->broadcast({&said, 1}));
    }
    return said != std::byte{0};
  }

  bool gguf() const { return target_.mix != nullptr; }
  // What is written is what the student computed with.
  bool is_as_learned() const { return !gguf() && !target_.integer_zeros; }
  const char* folder_format() const { return target_.compressed ? "compressed-tensors" : "mlx"; }
  // In compressed-tensors the embedding is plain in any case.
  int embedding_bits() const {
    return options_.embedding_bits.value_or(target_.compressed ? 0 : std::max(target_.bits, 6));
  }
  bool fastest() const { return options_.preference == Preference::fastest; }
  bool cached() const { return !options_.teacher_cache.empty() && options_.steps > 0; }

  // What the start depends on; with `learning`, what the state depends on, too.
  Asked asked(bool learning) const {
    const DistillOptions& o = options_;
    Asked asked;
    asked.add_fingerprint("teacher", teacher_fingerprint_);
    asked.add_flag("self_text", o.self_text);
    asked.add("context", o.context);  // before the text, whose pieces these two make
    asked.add("validation", o.validation);
    asked.add_fingerprint("data", o.self_text ? 0 : text_.fingerprint());
    asked.add("format", gguf() ? "gguf" : folder_format());
    asked.add("type", gguf() ? target_.mix->name : "none");
    asked.add("bits", target_.bits);
    asked.add("group_size", target_.group);
    asked.add("zero_points", target_.integer_zeros ? "integer" : "real");
    asked.add("scale_dtype", target_.scale_dtype.value_or("that of the teacher"));
    asked.add("embedding_bits", embedding_bits());
    asked.add("rules", rules_text());
    asked.add("calibration", o.calibration);
    asked.add_flag("fisher", o.fisher);
    asked.add("fastest", !fastest() ? "off" : cpu::has_bf16() ? "on (bf16)" : "on (no bf16)");
    if (!learning && !o.self_text) return asked;
    asked.add("seed", std::to_string(o.seed));
    asked.add("steps", o.steps);
    asked.add("batch", o.batch);
    asked.add("rate", o.rate ? std::to_string(*o.rate) : "searched");
    asked.add_flag("learn_codes", o.learn_codes);
    asked.add("teacher_top", cached() ? o.teacher_top : 0);
    return asked;
  }

  Status take(const Result<CalibrationText>& text) {
    if (!text) return text.status();
    auto parts = hold_out(*text, options_.validation);
    if (!parts) return parts.status();
    text_ = std::move(*parts);
    report_.train_pieces = text_.train.pieces();
    report_.validation_pieces = text_.validation.pieces();
    return find_targets();
  }

  EvalOptions targets_options() const {
    return {.dialect = PerplexityDialect::segments, .context = options_.context};
  }
  static Status of_targets(const Status& status) {
    return {status.code(), "@{teacher_cache}: " + std::string(status.message())};
  }

  // The pieces that steps read, and whether a file of the teacher's targets is of these.
  Status find_targets() {
    if (!cached()) return {};
    std::set<std::int64_t> pieces;
    const std::int64_t reads = std::max(options_.steps, kMostTrial) * options_.batch;
    for (std::int64_t n = 0;
         n < reads && static_cast<std::int64_t>(pieces.size()) < text_.train.pieces(); ++n)
      pieces.insert(text_.nth(n, options_.seed));
    taught_text_ = {.context = options_.context, .tokens = {}};
    for (const std::int64_t piece : pieces) {
      places_[piece] = taught_text_.pieces() * (options_.context - 1);
      taught_text_.add(text_.train.piece(piece));
    }
    if (!writes()) return {};
    const auto there = thing_at(options_.teacher_cache);
    if (!there) return of_targets(there.status());
    targets_new_ = *there == Thing::nothing;
    if (targets_new_) return {};
    const auto targets = TargetsFile::open(options_.teacher_cache);
    const Status found = targets ? check_targets(*targets) : of_targets(targets.status());
    if (found.ok() || !options_.force) return found;
    targets_new_ = true;
    const Status ours = TargetsFile::check_ours(options_.teacher_cache);
    return ours.ok() ? ours : of_targets(ours);
  }

  // Who says what a file of targets holds.
  std::string teacher_key(bool fastest) const {
    return std::to_string(teacher_fingerprint_) + (fastest ? " fastest" : "");
  }
  Status check_targets(const TargetsFile& targets) const {
    const TargetsKey& key = targets.key();
    const auto other = [&](const std::string& text) {
      return invalid("@{teacher_cache}: " + targets.path() + ": made " + text +
                     "; expected another name for the new one, or @{force}");
    };
    if (key.teacher == teacher_key(!fastest()))
      return other(fastest() ? "without @{fastest}" : "with @{fastest}");
    if (key.teacher != teacher_key(fastest())) return other("by another teacher");
    if (key.top != std::min(options_.teacher_top, key.vocab))
      return other("with @{teacher_top} " + std::to_string(key.top));
    TargetsKey wanted =
        TargetsKey::of(taught_text_.tokens, targets_options(), taught_text_.pieces());
    wanted.positions = taught_text_.pieces() * (options_.context - 1);
    if (targets.check(wanted).ok()) return {};
    return other(
        "of other pieces of text (they depend on the text, and on @{context}, @{validation}, "
        "@{seed}, @{steps} and @{batch})");
  }

  // As many pieces as codes are chosen by, and for longer learning more.
  Result<CalibrationText> own_text() {
    BITTERN_TRY(load_teacher());
    const auto tokenizer = Tokenizer::load(teacher_);
    if (!tokenizer) return tokenizer.status();
    const std::int64_t pieces =
        options_.validation +
        std::clamp(options_.steps * options_.batch, options_.calibration, 4 * options_.calibration);
    const auto tell_share = [&](double share) {
      return tell({.doing = "sampling",
                   .text = "a text of the teacher's own",
                   .share = share,
                   .train_kl = kNaN,
                   .validation_kl = kNaN});
    };
    return write_text(*teaching_, *tokenizer, pieces, options_.context, options_.seed, tell_share,
                      options_.ranks);
  }

  // Gradients are those of exact activations.
  LoadOptions student_options() const {
    return {.activations = Activations::exact,
            .preference = options_.preference,
            .context = options_.context};
  }
  Status load_teacher() {
    if (teaching_) return {};
    // The error of int16 activations, 2e-5, is far below what a student can learn.
    auto teacher =
        Model::load(teacher_, {.preference = options_.preference, .context = options_.context});
    if (!teacher) return teacher.status();
    teaching_.emplace(std::move(*teacher));
    return {};
  }

  Status check_files_apart() {
    const auto teacher = Checkpoint::open(teacher_);
    if (!teacher) return teacher.status();
    teacher_fingerprint_ = teacher->fingerprint();
    fingerprint_.add(teacher_fingerprint_);
    for (const CheckpointTensor& tensor : teacher->tensors())
      quantized_ = quantized_ || tensor.storage.quantized();
    std::vector<std::string> inputs = teacher->files();
    inputs.insert(inputs.end(), options_.data.begin(), options_.data.end());
    std::vector<OutputName> outputs;
    for (const char* suffix : {"", ".distill"}) outputs.push_back({"@{out}", out_ + suffix});
    if (cached()) outputs.push_back({"@{teacher_cache}", options_.teacher_cache});
    for (const std::string& path : options_.also_written)
      outputs.push_back({"@{also_written}", path});
    return check_apart(outputs, inputs);
  }

  // The user's rules, then that of embedding and head.
  std::vector<QuantizeRule> rules() const {
    std::vector<QuantizeRule> rules = options_.rules;
    // 4 and 5 bits of a Q4_1 or Q5_1 file are Q4_1 and Q5_1, as for the file: these learn.
    const bool exact = gguf() && coded_grid(storage_of(target_.mix->type));
    for (QuantizeRule& rule : rules) {
      if (exact && (rule.bits == 4 || rule.bits == 5) && rule.group_size.value_or(32) == 32) {
        rule.type = rule.bits == 4 ? "Q4_1" : "Q5_1";
        rule.bits.reset();
        rule.group_size.reset();
      }
    }
    QuantizeRule ends{.match = kEnds};
    const int bits = embedding_bits();
    ends.keep = bits == 0;
    if (bits != 0) ends.bits = bits;
    if (bits != 0 && !gguf()) ends.group_size = target_.group;
    rules.push_back(std::move(ends));
    return rules;
  }
  std::string rules_text() const {
    std::string text;
    for (const QuantizeRule& rule : options_.rules) {
      text += (text.empty() ? "" : ", ") + rule.match + "=" + (rule.keep ? "keep" : "");
      if (rule.bits) text += std::to_string(*rule.bits);
      if (rule.group_size) text += ":" + std::to_string(*rule.group_size);
      text += rule.type.value_or("");
    }
    std::replace(text.begin(), text.end(), '\n', ' ');
    return text.empty() ? "none" : text;
  }
  // Notes of the last rule are about an option.
  void tell_of_options(QuantizeReport& report) const {
    const auto of_ends = [](const std::string& note) {
      return note.find(kEnds) != std::string::npos;
    };
    const auto removed = std::erase_if(report.notes, of_ends);
    if (removed > 0 && target_.compressed && options_.embedding_bits.value_or(0) > 0)
      report.notes.push_back(with_option_names(
          "@{embedding_bits} has no effect: the embedding is plain in compressed-tensors",
          options_.option_name));
    for (QuantizedTensor& tensor : report.tensors)
      if (of_ends(tensor.note)) tensor.note.clear();
  }

  // The student as it starts: MLX's, whose grids take any scales and biases, or with the zero
  // points that it keeps.
  QuantizeOptions start_options() const {
    QuantizeOptions how{.bits = target_.bits,
                        .group_size = target_.group,
                        .method = "gptq",
                        .fisher = options_.fisher,
                        .format = folder_format(),
                        .zero_points = options_.zero_points,
                        .rules = gguf() ? start_rules_ : rules(),
                        .scale_dtype = target_.scale_dtype,
                        .allow_requantize = quantized_};
    how.option_name = options_.option_name;
    return how;
  }

  QuantizeOptions written_options() const {
    if (!gguf()) return start_options();
    QuantizeOptions how{.format = "gguf",
                        .type = target_.mix->name,
                        .rules = rules(),
                        .allow_requantize = quantized_};
    how.option_name = options_.option_name;
    return how;
  }

  // What becomes of every tensor, and everything that quantize would refuse. What a GGUF file is to
  // hold decides what learns.
  Status plan(QuantizeOptions how, MatrixCoder* coder) {
    how.dry_run = true;
    if (coder != nullptr) BITTERN_TRY(expect_matrices(how));
    const auto planned = quantize_model(teacher_, "", how, coder);
    if (!planned) return planned.status();
    for (const QuantizedTensor& tensor : planned->tensors) {
      fingerprint_.add(tensor.name);
      fingerprint_.add(tensor.to);
    }
    if (how.format == "gguf") return choose_grids(*planned);
    start_tensors_ = planned->tensors;
    return {};
  }

  Status expect_matrices(QuantizeOptions how) const {
    how.method = "minmax";
    how.fisher = false;
    const auto planned = quantize_model(teacher_, "", how);
    if (!planned) return planned.status();
    const bool any = std::any_of(
        planned->tensors.begin(), planned->tensors.end(), [](const QuantizedTensor& tensor) {
          return tensor.way == "quantised" && tensor.name.find("layers.") != std::string::npos;
        });
    return any ? Status() : nothing_learns();
  }

  Status nothing_learns() const {
    return invalid(
        std::string(options_.rules.empty() ? "@{group_size}" : "@{rules}") +
        ": no matrix of a layer is left that could learn, expected one " +
        (gguf() ? "of Q4_1, Q5_1, Q4_K or Q5_K" : "of 2 to 8 bits, with rows that groups divide"));
  }

  // A matrix learns on a grid of the bits of its type, if that has scales and biases. All others
  // are as the teacher has them while these learn.
  Status choose_grids(const QuantizeReport& planned) {
    bool any = false;
    for (const QuantizedTensor& tensor : planned.tensors) {
      if (tensor.shape.size() < 2 || tensor.sources.empty()) continue;
      const GgmlTypeInfo* const type = ggml_type(std::string_view(tensor.to));
      const bool end = tensor.name == "token_embd.weight" || tensor.name == "output.weight";
      QuantizeRule rule{.match = exactly(tensor.sources.front())};
      if (end || type == nullptr || !is_fitted(storage_of(type->type))) {
        rule.keep = true;
      } else {
        rule.bits = grid_of(storage_of(type->type))->bits;
        any = true;
      }
      if (rule.bits != target_.bits) start_rules_.push_back(std::move(rule));
    }
    if (any) return {};
    if (!options_.rules.empty()) return nothing_learns();
    return invalid("@{type} " + std::string(target_.mix->name) +
                   ": no matrix of a layer becomes Q4_1, Q5_1, Q4_K or Q5_K (rows of super-blocks "
                   "are multiples of 256), expected Q4_1 or Q5_1");
  }

  const Status& stopped(const std::string& why) {
    return stopped_ = {Code::cancelled, "distill: " + why + "; @{resume} goes on from here"};
  }
  Status tell(DistillProgress progress, bool* finish = nullptr) {
    if (!options_.progress) return {};
    const DistillNext next = options_.progress(progress);
    const bool too_early = next == DistillNext::finish && finish == nullptr && !learned_;
    const std::string why =
        too_early ? "stopped while " + std::string(progress.doing) + ", before anything was learned"
                  : "cancelled";
    if (next == DistillNext::stop || too_early) return stopped(why);
    if (next == DistillNext::finish && finish != nullptr) *finish = true;
    return {};
  }

  // Before a state is written, it tells whether a run had the same options.
  Status check_start() const {
    const auto start = Checkpoint::open(work_.start());
    if (!start) return start.status();
    for (const QuantizedTensor& tensor : start_tensors_) {
      const CheckpointTensor* const found = start->find(tensor.name);
      const bool packed = found != nullptr && found->storage.zeros == Storage::Zeros::packed;
      if (found == nullptr || found->storage.str() != tensor.to ||
          (found->storage.kind == Storage::Kind::affine && packed != target_.compressed))
        return invalid(work_.start() +
                       ": of a run with other options, expected the same ones (@{force} begins "
                       "anew)");
    }
    return {};
  }

  Status calibrate(GptqCoder& coder) {
    const auto there = everywhere(writes() && work_.has_start());
    if (!there) return there.status();
    if (*there) return check_start();
    QuantizeOptions how = start_options();
    how.ranks = options_.ranks;
    if (writes()) {
      const auto begun = thing_at(work_.start() + ".partial");
      if (!begun) return begun.status();
      how.resume = *begun != Thing::nothing;
    }
    if (options_.progress)
      how.progress = [&](const ModelProgress& state) {
        const double share =
            state.total > 0 ? static_cast<double>(state.done) / static_cast<double>(state.total)
                            : 0;
        return tell({.doing = "calibrating",
                     .text = std::string(state.doing) + " " + std::string(state.tensor),
                     .share = share,
                     .train_kl = kNaN,
                     .validation_kl = kNaN})
            .ok();
      };
    return quantize_model(teacher_, work_.start(), how, &coder).status();
  }

  Status learn() {
    BITTERN_TRY(load_teacher());
    auto student = load_model_data(work_.start(), student_options());
    if (!student) return student.status();
    const auto start = Checkpoint::open(work_.start());
    if (!start) return start.status();
    for (const CheckpointTensor& tensor : start->tensors())
      for (const auto& bytes : {tensor.data, tensor.scales, tensor.biases}) fingerprint_.add(bytes);
    auto grids = LearnedGrids::make(*student, *start, options_.learn_codes, target_.integer_zeros);
    if (!grids) return grids.status();
    report_.learned = (target_.integer_zeros ? 1 : 2) * grids->count();
    report_.codes = static_cast<std::int64_t>(grids->codes().size());
    auto pass = KlPass::make(*teaching_, *student, options_.context);
    if (!pass) return pass.status();
    learner_.emplace(std::move(*pass), std::move(*grids), text_, options_, target_.bits);
    student_ = std::move(*student);

    fingerprint_.add(text_.fingerprint());
    fingerprint_.add(options_.seed);
    for (const std::int64_t n :
         {options_.steps, options_.batch, options_.context, std::int64_t{options_.fisher},
          std::int64_t{options_.learn_codes}, options_.calibration,
          cached() ? options_.teacher_top : 0, static_cast<std::int64_t>(options_.preference)})
      fingerprint_.add(static_cast<std::uint64_t>(n));
    fingerprint_.add(options_.rate ? std::to_string(*options_.rate) : "");

    BITTERN_TRY(take_targets());

    LearnState state;
    const auto goes_on = everywhere(writes() && options_.resume && work_.has_state());
    if (!goes_on) return goes_on.status();
    if (*goes_on) {
      auto read = LearnState::read(work_.state(), fingerprint_.value());
      if (!read) return read.status();
      state = std::move(*read);
      BITTERN_TRY(learner_->use(state));
    } else {
      const auto teacher = Checkpoint::open(teacher_);
      if (!teacher) return teacher.status();
      auto latents = learner_->grids().latents(*teacher);
      if (!latents) return latents.status();
      state = learner_->begin(std::move(*latents));
      const auto kl = validation("of the start");
      if (!kl) return kl.status();
      state.start_kl = state.best_kl = *kl;
      state.points.push_back({0, kNaN, *kl});
      BITTERN_TRY(search(state));
      BITTERN_TRY(save(state));
    }
    BITTERN_TRY(steps(state));
    BITTERN_TRY(save(state));
    learned_ = true;
    report_.type = gguf() ? target_.mix->name : "";
    report_.bits = target_.bits;
    report_.group_size = target_.group;
    report_.steps = state.step;
    report_.best_step = state.best_step;
    report_.rate = state.rate;
    report_.start_kl = state.start_kl;
    report_.kl = state.best_kl;
    report_.trials = state.trials;
    report_.points = state.points;
    BITTERN_TRY(learner_->use_best(state));
    const auto moved = learner_->grids().codes_moved(*start);
    if (!moved) return moved.status();
    report_.codes_moved = *moved;
    return {};
  }

  // What the teacher says of the pieces that steps read, from a file that is made if it is not
  // there.
  Status take_targets() {
    if (!cached()) return {};
    const auto make = everywhere(targets_new_);
    if (!make) return make.status();
    if (*make) {
      EvalOptions how = targets_options();
      how.ranks = options_.ranks;
      how.progress = [&](const EvalProgress& state) {
        return tell({.doing = "reading",
                     .text = "what the teacher says of the text",
                     .share = static_cast<double>(state.done) / static_cast<double>(state.total),
                     .train_kl = kNaN,
                     .validation_kl = kNaN})
            .ok();
      };
      const Status written = write_targets(
          options_.teacher_cache, {&*teaching_, {.kv = "f32"}}, taught_text_.tokens, how,
          {.top = options_.teacher_top, .teacher = teacher_key(fastest()), .replace = true});
      if (!written.ok()) return of_targets(written);
    }
    auto targets = TargetsFile::open(options_.teacher_cache);
    if (!targets) return of_targets(targets.status());
    BITTERN_TRY(check_targets(*targets));
    learner_->use_targets(std::move(*targets), places_);
    return {};
  }

  Result<double> validation(const std::string& text) {
    BITTERN_TRY(
        tell({.doing = "searching", .text = text, .train_kl = kNaN, .validation_kl = kNaN}));
    return learner_->validate();
  }

  // The better the start, the smaller the rate that helps: short runs tell.
  Status search(LearnState& state) {
    if (options_.rate || options_.steps == 0) {
      state.rate = options_.rate.value_or(first_rate(target_.bits));
      return {};
    }
    const std::int64_t length = std::clamp<std::int64_t>(options_.steps / 8, 4, kMostTrial);
    const double middle = first_rate(target_.bits);
    double best = std::numeric_limits<double>::infinity();
    for (const double factor : {1.0, 2.0, 0.5}) {
      LearnState trial = Learner::anew(state);
      BITTERN_TRY(learner_->use(trial));
      trial.rate = middle * factor;
      for (std::int64_t i = 0; i < length; ++i) {
        const auto kl = learner_->step(trial, length);
        if (!kl) return kl.status();
        BITTERN_TRY(tell({.doing = "searching",
                          .text = "a rate: " + std::to_string(trial.rate),
                          .share = static_cast<double>(i + 1) / static_cast<double>(length),
                          .train_kl = *kl,
                          .validation_kl = kNaN}));
      }
      const auto kl = learner_->validate();
      if (!kl) return kl.status();
      state.trials.push_back({trial.rate, *kl});
      if (*kl < best) {
        best = *kl;
        state.rate = trial.rate;
      }
    }
    return learner_->use(state);
  }

  Status save(const LearnState& state) const {
    return writes() ? state.write(work_.state(), fingerprint_.value()) : Status();
  }

  // What one process is told, all do: to finish, or to stop.
  Status share_answer(Status& told, bool& finish) {
    if (options_.ranks == nullptr) return {};
    const std::byte own[] = {std::byte{!told.ok()}, std::byte{finish}};
    std::vector<std::vector<std::byte>> all;
    BITTERN_TRY(options_.ranks->agree({}));
    BITTERN_TRY(options_.ranks->gather(own, all));
    for (const auto& said : all) {
      if (told.ok() && said[0] != std::byte{0}) told = stopped("cancelled");
      finish = finish || said[1] != std::byte{0};
    }
    return {};
  }

  Status steps(LearnState& state) {
    const auto begun = Clock::now();
    auto saved = begun;
    const std::int64_t first = state.step, every = std::max<std::int64_t>(options_.steps / 6, 1);
    bool finish = false;
    while (state.step < options_.steps && !finish) {
      const auto kl = learner_->step(state, options_.steps);
      if (!kl) return stopped_at(state, kl.status());
      if (!std::isfinite(*kl))
        return stopped_at(state, invalid("the loss is not finite, expected a lower @{rate}"));
      state.train_sum += *kl;
      ++state.train_count;
      if (state.step % every == 0 || state.step == options_.steps) BITTERN_TRY(measure(state));
      const double took = seconds_since(begun);
      const double each = took / static_cast<double>(state.step - first);
      report_.seconds_learning = took;
      report_.tokens_per_second = static_cast<double>(options_.batch * options_.context) / each;
      Status told =
          tell({.doing = "learning",
                .share = static_cast<double>(state.step) / static_cast<double>(options_.steps),
                .step = state.step,
                .steps = options_.steps,
                .train_kl = *kl,
                .validation_kl = state.points.back().validation_kl,
                .tokens_per_second = report_.tokens_per_second,
                .seconds_left = each * static_cast<double>(options_.steps - state.step)},
               &finish);
      BITTERN_TRY(share_answer(told, finish));
      if (!told.ok() || seconds_since(saved) >= 60 * options_.checkpoint_minutes) {
        BITTERN_TRY(save(state));
        saved = Clock::now();
      }
      BITTERN_TRY(told);
    }
    report_.finished_early = finish && state.step < options_.steps;
    if (report_.finished_early && state.points.back().step < state.step) return measure(state);
    return {};
  }

  // A point of the curve; the best so far is kept.
  Status measure(LearnState& state) {
    const auto kl = learner_->validate();
    if (!kl) return kl.status();
    state.points.push_back(
        {state.step, state.train_sum / static_cast<double>(state.train_count), *kl});
    state.train_sum = 0;
    state.train_count = 0;
    if (*kl < state.best_kl) {
      state.best_kl = *kl;
      state.best_step = state.step;
      learner_->keep_best(state);
    }
    return {};
  }

  Status stopped_at(const LearnState& state, const Status& status) const {
    return {status.code(), "distill: step " + std::to_string(state.step) + ": " +
                               std::string(status.message()) + " (" + work_.state() +
                               " holds the last state before)"};
  }

  // A model on disk, and its KL on the pieces that are held out.
  struct Written {
    QuantizeReport output;
    double kl = 0;
  };

  // The teacher, with these grids in place of its matrices.
  Result<QuantizeReport> write_as(const std::string& path, LearnedGrids& grids) {
    auto coder = LearnedCoder::make(work_.start(), grids, gguf());
    if (!coder) return coder.status();
    QuantizeOptions how = written_options();
    how.force = true;  // an earlier run may have come as far
    how.ranks = options_.ranks;
    if (options_.progress)
      how.progress = [&](const ModelProgress& state) {
        return tell({.doing = "writing", .text = std::string(state.tensor)}).ok();
      };
    auto report = quantize_model(teacher_, path, how, &*coder);
    if (report) tell_of_options(*report);
    return report;
  }
  Result<Written> write_and_judge(const std::string& path, LearnedGrids& grids) {
    auto output = write_as(path, grids);
    if (!output) return output.status();
    BITTERN_TRY(tell({.doing = "judging", .text = "what was written"}));
    auto model = load_model_data(path, student_options());
    if (!model) return model.status();
    auto pass = KlPass::make(*teaching_, std::move(*model), options_.context);
    if (!pass) return pass.status();
    const auto kl = learner_->validate(*pass);
    if (!kl) return kl.status();
    return Written{std::move(*output), *kl};
  }

  // OUT.distill/result
  Status write() {
    report_.written_kl = report_.kl;
    report_.written_start_kl = report_.start_kl;
    if (is_as_learned()) {
      auto output = write_as(work_.result(), learner_->grids());
      if (!output) return output.status();
      report_.output = std::move(*output);
    } else {
      auto written = write_and_judge(work_.result(), learner_->grids());
      if (!written) return written.status();
      report_.written_kl = written->kl;
      if (gguf()) BITTERN_TRY(compare_with_start(*written));
      report_.output = std::move(written->output);
    }
    report_.output.output = out_;
    report_.output.outputs = {out_};
    return {};
  }

  // What learning gained may be lost where a file's types cannot hold it. The start, written in the
  // same types, tells; if it is better, it is the result.
  Status compare_with_start(Written& result) {
    report_.written_start_kl = result.kl;
    if (report_.best_step == 0) return {};  // it is the start
    const auto start = Checkpoint::open(work_.start());
    if (!start) return start.status();
    auto grids = learner_->grids().at_start(*start);
    if (!grids) return grids.status();
    auto other = write_and_judge(work_.written_start(), *grids);
    if (!other) return other.status();
    report_.written_start_kl = other->kl;
    if (!(other->kl < result.kl)) return {};
    report_.written_kl = other->kl;
    report_.start_written = true;
    report_.codes_moved = 0;
    result = std::move(*other);
    const OutputOptions output{.folder = false, .force = true};
    return agree(options_.ranks,
                 writes() ? move_output(work_.written_start(), work_.result(), output) : Status());
  }

  // Start and result beside the teacher.
  Status judge() {
    const auto start = Model::load(work_.start(), student_options());
    if (!start) return start.status();
    const auto result = is_as_learned() ? Result<Model>(ModelAccess::model(student_))
                                        : Model::load(work_.result(), student_options());
    if (!result) return result.status();
    const EvalModel models[] = {{&*start, {}}, {&*result, {}}};
    EvalOptions how{
        .dialect = PerplexityDialect::segments, .context = options_.context, .layers = true};
    how.ranks = options_.ranks;
    how.progress = [&](const EvalProgress& state) {
      return tell({.doing = "judging",
                   .share = static_cast<double>(state.done) / static_cast<double>(state.total)})
          .ok();
    };
    auto judged = evaluate(models, text_.validation.tokens, how, {&*teaching_, {}});
    if (!judged) return judged.status();
    report_.judged = std::move(*judged);
    if (!writes()) return {};

    const auto tokenizer = Tokenizer::load(teacher_);
    if (!tokenizer) return tokenizer.status();
    const std::int64_t length = std::min<std::int64_t>(24, options_.context / 2);
    for (std::int64_t i = 0; i < std::min<std::int64_t>(3, text_.validation.pieces()); ++i) {
      const std::span prompt(text_.validation.piece(i), static_cast<std::size_t>(length));
      DistillSample sample;
      const auto text = tokenizer->decode(prompt, true);
      if (!text) return text.status();
      sample.prompt = *text;
      const std::pair<const Model*, std::string*> writers[] = {
          {&*teaching_, &sample.teacher}, {&*start, &sample.start}, {&*result, &sample.result}};
      for (const auto& [model, to] : writers) {
        auto session = Session::make(*model, {.context = options_.context});
        if (!session) return session.status();
        auto generator =
            Generator::start(*session, &*tokenizer, prompt,
                             {.sample = {.temperature = 0},
                              .max_tokens = std::min<std::int64_t>(40, options_.context - length)});
        if (!generator) return generator.status();
        while (true) {
          const auto piece = generator->next();
          if (!piece) return piece.status();
          if (!*piece) break;
          *to += (*piece)->text;
        }
      }
      report_.samples.push_back(std::move(sample));
    }
    return {};
  }

  const std::string& teacher_;
  const std::string& out_;
  const DistillOptions& options_;
  const Target target_;
  WorkFolder work_;
  bool quantized_ = false;                 // the teacher is, in part
  std::vector<QuantizeRule> start_rules_;  // of a GGUF file
  std::vector<QuantizedTensor> start_tensors_;
  TrainingText text_;
  std::uint64_t teacher_fingerprint_ = 0;
  Fingerprint fingerprint_;
  std::optional<Model> teaching_;
  std::shared_ptr<const ModelData> student_;
  std::optional<Learner> learner_;
  // With a file of the teacher's targets: what it is of, the first row of each piece, and whether
  // it is still to be made.
  CalibrationText taught_text_;
  std::map<std::int64_t, std::int64_t> places_;
  bool targets_new_ = false;
  bool learned_ = false;  // learning is over
  Status stopped_;        // what tell() last said, where that ends the call
  DistillReport report_;
};

}  // namespace

Result<DistillReport> distill_model(const std::string& teacher, const std::string& out,
                                    const DistillOptions& options) noexcept {
  auto report = guarded("distill_model", [&]() -> Result<DistillReport> {
    const auto run = [&]() -> Result<DistillReport> {
      BITTERN_TRY(check(options));
      if (teacher.empty()) return invalid("@{teacher}: empty, expected a model to read");
      if (out.empty()) return invalid("@{out}: not given, expected the name of the output");
      const auto target = target_of(options, out);
      if (!target) return target.status();
      const auto path = output_path(out, target->mix == nullptr);
      if (!path) return path.status();
      return Distillation(teacher, *path, options, *target).run();
    };
    auto made = run();
    if (!made) return with_option_names(made.status(), options.option_name);
    return made;
  });
  return agreed(options.ranks, std::move(report));
}

}  // namespace bittern
