// distill_model: calibrate, search a rate, learn, write, measure what was written; and what a run
// leaves for the next one.
#include <sys/resource.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "bittern/device.h"
#include "bittern/distill.h"
#include "bittern/eval.h"
#include "bittern/tokenizer.h"
#include "convert/apart.h"
#include "convert/call.h"
#include "convert/encode.h"
#include "convert/matrix_coder.h"
#include "convert/option_names.h"
#include "convert/output.h"
#include "convert/replace.h"
#include "core/guarded.h"
#include "core/ranks.h"
#include "cpu/bf16.h"
#include "distill/asked.h"
#include "distill/distill_target.h"
#include "distill/gptq_coder.h"
#include "distill/learned_coder.h"
#include "distill/learner.h"
#include "distill/samples.h"
#include "distill/self_text.h"
#include "distill/teacher_cache.h"
#include "distill/work_folder.h"
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

// All its digits, and no more.
std::string text_of(double x) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, x).ptr};
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

class Distillation {
 public:
  Distillation(const std::string& teacher, const std::string& out, const DistillOptions& options,
               const DistillTarget& target)
      : teacher_(teacher), out_(out), options_(options), target_(target), work_(out) {}

  Result<DistillReport> run() {
    auto report = distill();
    if (!report) work_.remove_if_empty();
    // quantize writes numbers that are too large as others, if it is asked to; distill does not.
    const std::string lossy =
        with_option_names(std::string_view("@{lossy}, which"), options_.option_name);
    const std::string_view why = report.status().message();
    if (const std::size_t advice = why.find(lossy); advice != why.npos)
      return Status(
          report.status().code(),
          std::string(why.substr(0, why.rfind(": expected", advice))) +
              ": expected numbers within its range, or a rule of @{rules} that keeps this tensor" +
              (gguf() ? "" : ", or @{scale_dtype} f32"));
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
    BITTERN_TRY(teacher_unchanged());
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

  bool gguf() const { return target_.gguf(); }
  // What is written is what the student computed with.
  bool is_as_learned() const { return !gguf() && !target_.integer_zeros; }
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
    asked.add("format", gguf() ? "gguf" : target_.folder_format());
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
    asked.add("rate", o.rate ? text_of(*o.rate) : "searched");
    asked.add_flag("learn_codes", o.learn_codes);
    asked.add_flag("teacher_cache", cached());
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
    if (!cached()) return {};
    cache_.emplace(options_, teacher_fingerprint_, text_, std::max(options_.steps, kMostTrial));
    return writes() ? cache_->check() : Status();
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
    auto text = write_text(*teaching_, *tokenizer, pieces, options_.context, options_.seed,
                           tell_share, options_.ranks);
    teaching_.reset();  // calibration has its own
    return text;
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

  // What is learned, and what is written beside it, are of the same files.
  Status teacher_unchanged() const { return agree(options_.ranks, source_->unchanged()); }

  Status check_files_apart() {
    auto teacher = Checkpoint::open(teacher_);
    if (!teacher) return teacher.status();
    const Checkpoint& source = source_.emplace(std::move(*teacher));
    teacher_fingerprint_ = source.fingerprint();
    fingerprint_.add(teacher_fingerprint_);
    for (const CheckpointTensor& tensor : source.tensors())
      quantized_ = quantized_ || tensor.storage.quantized();
    std::vector<std::string> inputs = source.files();
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
                        .format = target_.folder_format(),
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
                       ": written by a run with other options; give the same options, or @{force} "
                       "without @{resume} to start again");
    }
    return {};
  }

  // The sum of the start's numbers; `made` by this call, or found again as it was then.
  Status sum_start(bool made) {
    const auto start = Checkpoint::open(work_.start());
    if (!start) return start.status();
    Fingerprint sum;
    for (const CheckpointTensor& tensor : start->tensors())
      for (const auto& bytes : {tensor.data, tensor.scales, tensor.biases}) sum.add(bytes);
    start_sum_ = sum.value();
    Asked now;
    now.add_fingerprint("start", start_sum_);
    if (!writes()) return {};
    if (made) return now.write(work_.start_sum());
    if (now.check(work_.start_sum(), "").ok()) return {};
    return invalid(work_.start() +
                   ": damaged, expected what a run wrote; @{force} without @{resume} starts again");
  }

  Status calibrate(GptqCoder& coder) {
    const auto there = everywhere(writes() && work_.has_start());
    if (!there) return there.status();
    if (*there) {
      BITTERN_TRY(check_start());
      return agree(options_.ranks, sum_start(false));
    }
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
    BITTERN_TRY(quantize_model(teacher_, work_.start(), how, &coder).status());
    return agree(options_.ranks, sum_start(true));
  }

  Status learn() {
    BITTERN_TRY(load_teacher());
    auto student = load_model_data(work_.start(), student_options());
    if (!student) return student.status();
    const auto start = Checkpoint::open(work_.start());
    if (!start) return start.status();
    fingerprint_.add(start_sum_);
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
    fingerprint_.add(options_.rate ? text_of(*options_.rate) : "");

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
      auto latents = learner_->grids().latents(*source_);
      if (!latents) return latents.status();
      state = learner_->begin(std::move(*latents));
      const auto kl = validation("of the start");
      if (!kl) return kl.status();
      if (!std::isfinite(*kl))
        return invalid(
            "the calibrated start, or the teacher, has no finite loss on the held-out text; "
            "expected a teacher whose predictions are finite");
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
    if (!cache_) return {};
    const auto make = everywhere(cache_->is_new());
    if (!make) return make.status();
    if (*make) {
      EvalOptions how;
      how.ranks = options_.ranks;
      how.progress = [&](const EvalProgress& state) {
        return tell({.doing = "reading",
                     .text = "what the teacher says of the text",
                     .share = static_cast<double>(state.done) / static_cast<double>(state.total),
                     .train_kl = kNaN,
                     .validation_kl = kNaN})
            .ok();
      };
      BITTERN_TRY(cache_->make(*teaching_, std::move(how)));
    }
    auto targets = cache_->open();
    if (!targets) return targets.status();
    learner_->use_targets(std::move(*targets), cache_->places());
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
      bool diverged = false;
      for (std::int64_t i = 0; i < length; ++i) {
        const auto kl = learner_->step(trial, length);
        if (!kl && kl.status().code() != kDiverged) return kl.status();
        if (diverged = !kl || !std::isfinite(*kl); diverged) break;
        BITTERN_TRY(tell({.doing = "searching",
                          .text = "a rate: " + std::to_string(trial.rate),
                          .share = static_cast<double>(i + 1) / static_cast<double>(length),
                          .train_kl = *kl,
                          .validation_kl = kNaN}));
      }
      const auto kl =
          diverged ? Result<double>(std::numeric_limits<double>::infinity()) : learner_->validate();
      if (!kl) return kl.status();
      state.trials.push_back({trial.rate, *kl});
      if (*kl < best) {
        best = *kl;
        state.rate = trial.rate;
      }
    }
    if (!std::isfinite(best))
      return invalid(
          "at every rate that was tried the loss is infinite or NaN; give a lower @{rate} than " +
          text_of(middle / 2));
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
        return stopped_at(
            state,
            invalid("the loss is infinite or NaN; start again with @{force} and a lower @{rate}"));
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
    BITTERN_TRY(teacher_unchanged());
    BITTERN_TRY(agree(options_.ranks, writes() ? work_.remove_results() : Status()));
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
    if (!is_as_learned()) {  // two models are read
      learner_.reset();
      student_.reset();
    }
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
    if (!judged && judged.status().code() == Code::invalid_argument)
      return invalid("the page's figures (models[0] is the calibrated start, models[1] " +
                     work_.result() + "): " + std::string(judged.status().message()));
    if (!judged) return judged.status();
    report_.judged = std::move(*judged);
    if (!writes()) return {};

    const auto tokenizer = Tokenizer::load(teacher_);
    if (!tokenizer) return tokenizer.status();
    auto samples = write_samples(*tokenizer, text_.validation, *teaching_, *start, *result);
    if (!samples) return samples.status();
    report_.samples = std::move(*samples);
    return {};
  }

  const std::string& teacher_;
  const std::string& out_;
  const DistillOptions& options_;
  const DistillTarget target_;
  WorkFolder work_;
  bool quantized_ = false;                 // the teacher is, in part
  std::vector<QuantizeRule> start_rules_;  // of a GGUF file
  std::vector<QuantizedTensor> start_tensors_;
  TrainingText text_;
  std::uint64_t teacher_fingerprint_ = 0;
  std::optional<Checkpoint> source_;  // the teacher's
  Fingerprint fingerprint_;
  std::optional<Model> teaching_;
  std::shared_ptr<const ModelData> student_;
  std::optional<Learner> learner_;
  std::optional<TeacherCache> cache_;
  std::uint64_t start_sum_ = 0;
  bool learned_ = false;  // learning is over
  Status stopped_;        // what tell() last said, where that ends the call
  DistillReport report_;
};

}  // namespace

Result<DistillReport> distill_model(const std::string& teacher, const std::string& out,
                                    const DistillOptions& options) noexcept {
  auto report = guarded("distill_model", [&]() -> Result<DistillReport> {
    const auto run = [&]() -> Result<DistillReport> {
      BITTERN_TRY(check_numbers(options));
      if (teacher.empty()) return invalid("@{teacher}: empty, expected a model to read");
      if (out.empty()) return invalid("@{out}: not given, expected the name of the output");
      const auto target = target_of(options, out);
      if (!target) return target.status();
      const auto path = output_path(out, !target->gguf());
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
