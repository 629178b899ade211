// distill_model: calibrate, search a rate, learn, write; and what a run leaves for the next one.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
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
#include "convert/matrix_coder.h"
#include "convert/option_names.h"
#include "convert/output.h"
#include "convert/parse_options.h"
#include "convert/replace.h"
#include "core/guarded.h"
#include "distill/gptq_coder.h"
#include "distill/learner.h"
#include "formats/fingerprint.h"

namespace bittern {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The middle of the rates that are tried: the coarser the grid, the worse the start, the further
// scales have to go.
double first_rate(int bits) {
  return bits <= 2 ? 0.0025 : bits == 3 ? 0.0009 : bits == 4 ? 0.0003 : 0.0001;
}

Status in_range(const char* field, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return {};
  return invalid(std::string("@{") + field + "}: " + std::to_string(value) +
                 ", expected an integer " + std::to_string(least) + ".." + std::to_string(most));
}

Status check(const DistillOptions& options) {
  constexpr std::int64_t kMost = std::int64_t{1} << 24;
  if (options.data.empty())
    return invalid("@{data}: no text given, expected the path of one to learn from");
  BITTERN_TRY(in_range("context", options.context, 2, std::int64_t{1} << 20));
  BITTERN_TRY(in_range("calibration", options.calibration, 1, kMost));
  BITTERN_TRY(in_range("validation", options.validation, 1, kMost));
  BITTERN_TRY(in_range("steps", options.steps, 0, kMost));
  BITTERN_TRY(in_range("batch", options.batch, 1, kMost));
  if (options.rate && !(*options.rate > 0 && *options.rate <= 1))
    return invalid("@{rate}: " + std::to_string(*options.rate) +
                   ", expected a number above 0 and up to 1");
  if (!(options.checkpoint_minutes >= 0))
    return invalid("@{checkpoint_minutes}: expected a number of 0 or more");
  return check_threads(options.threads);
}

// OUT.distill: what a run that was stopped goes on from.
class WorkFolder {
 public:
  explicit WorkFolder(const std::string& out) : path_(out + ".distill") {}

  std::string start() const { return path_ + "/start"; }
  std::string state() const { return path_ + "/state"; }

  Status open(bool resume, bool force) const {
    const auto thing = thing_at(path_);
    if (!thing) return thing.status();
    if (*thing == Thing::nothing) {
      std::error_code error;
      std::filesystem::create_directory(path_, error);
      if (error) return {Code::io_error, path_ + ": " + error.message()};
      return {};
    }
    if (*thing != Thing::folder)
      return invalid(path_ + ": " + name(*thing) + ", expected a folder or nothing");
    BITTERN_TRY(check_ours());
    if (resume) return {};
    if (!force)
      return {Code::unavailable, path_ +
                                     ": of a run that was stopped, expected @{resume} to go on "
                                     "with it or @{force} to begin anew"};
    return remove() ? open(false, false) : Status(Code::io_error, path_ + ": cannot be removed");
  }
  bool has_start() const { return std::filesystem::exists(start()); }
  bool has_state() const { return std::filesystem::exists(state()); }
  bool remove() const {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
    return !error;
  }

 private:
  // Nothing is removed that a run did not write.
  Status check_ours() const {
    static const std::set<std::string> kNames = {"start", "start.partial", "start.partial.journal",
                                                 "state", "state.partial"};
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(path_, error))
      if (!kNames.contains(entry.path().filename().string()))
        return invalid(path_ + ": holds " + entry.path().filename().string() +
                       ", which no run wrote, expected another place for the output");
    if (error) return {Code::io_error, path_ + ": " + error.message()};
    return {};
  }
  std::string path_;
};

class Distillation {
 public:
  Distillation(const std::string& teacher, const std::string& out, const DistillOptions& options)
      : teacher_(teacher), out_(out), options_(options), work_(out) {}

  Result<DistillReport> run() {
    const auto begun = Clock::now();
    BITTERN_TRY(
        check_output(out_, {.folder = true, .force = options_.force, .resume = options_.resume}));
    BITTERN_TRY(check_files_apart());
    const CallSettings settings(options_.threads);
    auto text = read_training_text(teacher_, options_.data, options_.context, options_.validation);
    if (!text) return text.status();
    text_ = std::move(*text);
    report_.train_pieces = text_.train.pieces();
    report_.validation_pieces = text_.validation.pieces();
    // Everything that quantize would refuse, before anything is written.
    GptqCoder coder(teacher_, some_of(text_.train, options_.calibration), options_.fisher);
    QuantizeOptions how = start_options();
    how.dry_run = true;
    if (const auto dry = quantize_model(teacher_, "", how, QuantizeHooks{.coder = &coder}); !dry)
      return dry.status();
    BITTERN_TRY(work_.open(options_.resume, options_.force));
    BITTERN_TRY(calibrate(coder));
    BITTERN_TRY(learn());
    if (options_.judge) BITTERN_TRY(judge());
    BITTERN_TRY(write());
    report_.seconds = seconds_since(begun);
    work_.remove();
    return std::move(report_);
  }

 private:
  Status check_files_apart() {
    const auto teacher = Checkpoint::open(teacher_);
    if (!teacher) return teacher.status();
    fingerprint_.add(teacher->fingerprint());
    std::vector<std::string> inputs = teacher->files();
    inputs.insert(inputs.end(), options_.data.begin(), options_.data.end());
    std::vector<OutputName> outputs;
    for (const char* suffix : {"", ".partial", ".partial.journal", ".distill"})
      outputs.push_back({"@{out}", out_ + suffix});
    for (const std::string& path : options_.also_written)
      outputs.push_back({"@{also_written}", path});
    return check_apart(outputs, inputs);
  }

  // The student as it starts: MLX's, whose grids take any scales and biases.
  QuantizeOptions start_options() const {
    QuantizeOptions how{.bits = options_.bits,
                        .group_size = options_.group_size,
                        .method = "gptq",
                        .data = options_.data.front(),
                        .fisher = options_.fisher,
                        .format = "mlx",
                        .rules = options_.rules,
                        .scale_dtype = options_.scale_dtype,
                        .allow_requantize = true};
    constexpr const char* kEnds = "(embed_tokens|lm_head)\\.weight$";
    const int bits = options_.embedding_bits.value_or(std::max(options_.bits, 6));
    if (bits == 0) {
      how.rules.push_back({.match = kEnds, .keep = true});
    } else {
      how.rules.push_back({.match = kEnds, .bits = bits, .group_size = options_.group_size});
    }
    how.option_name = options_.option_name;
    return how;
  }

  Status tell(DistillProgress progress, bool* finish = nullptr) const {
    if (!options_.progress) return {};
    const DistillNext next = options_.progress(progress);
    if (next == DistillNext::stop || (next == DistillNext::finish && finish == nullptr))
      return {Code::cancelled, "distill: cancelled; @{resume} goes on from here"};
    if (next == DistillNext::finish) *finish = true;
    return {};
  }

  Status calibrate(GptqCoder& coder) {
    if (work_.has_start()) return {};
    QuantizeOptions how = start_options();
    const auto begun = thing_at(work_.start() + ".partial");
    if (!begun) return begun.status();
    how.resume = *begun != Thing::nothing;
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
    const auto report =
        quantize_model(teacher_, work_.start(), how, QuantizeHooks{.coder = &coder});
    return report.status();
  }

  Status learn() {
    // The error of int16 activations, 2e-5, is far below what a student can learn; but gradients
    // are those of exact ones.
    auto teacher = Model::load(teacher_, {.context = options_.context});
    if (!teacher) return teacher.status();
    auto student = load_model_data(
        work_.start(), {.activations = Activations::exact, .context = options_.context});
    if (!student) return student.status();
    const auto start = Checkpoint::open(work_.start());
    if (!start) return start.status();
    auto grids = LearnedGrids::make(*student, *start);
    if (!grids) return grids.status();
    report_.learned = 2 * grids->count();
    auto pass = KlPass::make(*teacher, *student, options_.context);
    if (!pass) return pass.status();
    learner_.emplace(std::move(*pass), std::move(*grids), text_, options_);
    teaching_.emplace(std::move(*teacher));
    student_ = std::move(*student);

    fingerprint_.add(text_.fingerprint());
    fingerprint_.add(options_.seed);
    for (const std::int64_t n :
         {options_.steps, options_.batch, options_.context, std::int64_t{options_.bits},
          std::int64_t{options_.group_size}, std::int64_t{options_.embedding_bits.value_or(-1)},
          std::int64_t{options_.fisher}, options_.calibration})
      fingerprint_.add(static_cast<std::uint64_t>(n));
    fingerprint_.add(options_.scale_dtype.value_or(""));
    fingerprint_.add(options_.rate ? std::to_string(*options_.rate) : "");

    LearnState state;
    if (options_.resume && work_.has_state()) {
      auto read = LearnState::read(work_.state(), fingerprint_.value());
      if (!read) return read.status();
      state = std::move(*read);
      BITTERN_TRY(learner_->use(state.parameters));
    } else {
      state = learner_->begin();
      const auto kl = validation("of the start");
      if (!kl) return kl.status();
      state.start_kl = state.best_kl = *kl;
      state.points.push_back({0, kNaN, *kl});
      BITTERN_TRY(search(state));
      BITTERN_TRY(state.write(work_.state(), fingerprint_.value()));
    }
    BITTERN_TRY(steps(state));
    report_.steps = state.step;
    report_.best_step = state.best_step;
    report_.rate = state.rate;
    report_.start_kl = state.start_kl;
    report_.kl = state.best_kl;
    report_.trials = state.trials;
    report_.points = state.points;
    return learner_->use(state.best);
  }

  Result<double> validation(const std::string& text) {
    BITTERN_TRY(
        tell({.doing = "searching", .text = text, .train_kl = kNaN, .validation_kl = kNaN}));
    return learner_->validate();
  }

  // The better the start, the smaller the rate that helps: short runs tell.
  Status search(LearnState& state) {
    if (options_.rate || options_.steps == 0) {
      state.rate = options_.rate.value_or(first_rate(options_.bits));
      return {};
    }
    const std::int64_t length = std::clamp<std::int64_t>(options_.steps / 8, 4, 16);
    const double middle = first_rate(options_.bits);
    double best = std::numeric_limits<double>::infinity();
    for (const double factor : {1.0, 2.0, 0.5}) {
      BITTERN_TRY(learner_->use(state.parameters));
      LearnState trial = learner_->begin();
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
    return learner_->use(state.parameters);
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
      const Status told =
          tell({.doing = "learning",
                .share = static_cast<double>(state.step) / static_cast<double>(options_.steps),
                .step = state.step,
                .steps = options_.steps,
                .train_kl = *kl,
                .validation_kl = state.points.back().validation_kl,
                .tokens_per_second = report_.tokens_per_second,
                .seconds_left = each * static_cast<double>(options_.steps - state.step)},
               &finish);
      if (!told.ok() || seconds_since(saved) >= 60 * options_.checkpoint_minutes) {
        BITTERN_TRY(state.write(work_.state(), fingerprint_.value()));
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
      for (int i = 0; i < 2; ++i) state.best[i] = state.parameters[i];
    }
    return {};
  }

  Status stopped_at(const LearnState& state, const Status& status) const {
    return {status.code(), "distill: step " + std::to_string(state.step) + ": " +
                               std::string(status.message()) + " (" + work_.state() +
                               " holds the last state before)"};
  }

  Status write() {
    const auto begun = thing_at(out_ + ".partial");
    if (!begun) return begun.status();
    QuantizeOptions how{.format = "mlx",
                        .transcode = true,
                        .force = options_.force,
                        .resume = options_.resume && *begun != Thing::nothing};
    how.option_name = options_.option_name;
    if (options_.progress)
      how.progress = [&](const ModelProgress& state) {
        return tell({.doing = "writing", .text = std::string(state.tensor)}).ok();
      };
    auto written =
        quantize_model(work_.start(), out_, how, QuantizeHooks{.change = [&](Checkpoint& source) {
                         return learner_->grids().put_into(source);
                       }});
    if (!written) return written.status();
    report_.output = std::move(*written);
    report_.output.model = teacher_;
    return {};
  }

  // Start and result beside the teacher.
  Status judge() {
    const auto start = Model::load(
        work_.start(), {.activations = Activations::exact, .context = options_.context});
    if (!start) return start.status();
    const Model result = ModelAccess::model(student_);
    const EvalModel models[] = {{&*start, {}}, {&result, {}}};
    EvalOptions how{
        .dialect = PerplexityDialect::segments, .context = options_.context, .layers = true};
    how.progress = [&](const EvalProgress& state) {
      return tell({.doing = "judging",
                   .share = static_cast<double>(state.done) / static_cast<double>(state.total)})
          .ok();
    };
    auto judged = evaluate(models, text_.validation.tokens, how, {&*teaching_, {}});
    if (!judged) return judged.status();
    report_.judged = std::move(*judged);

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
          {&*teaching_, &sample.teacher}, {&*start, &sample.start}, {&result, &sample.result}};
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
  WorkFolder work_;
  TrainingText text_;
  Fingerprint fingerprint_;
  std::optional<Model> teaching_;
  std::shared_ptr<const ModelData> student_;
  std::optional<Learner> learner_;
  DistillReport report_;
};

}  // namespace

Result<DistillReport> distill_model(const std::string& teacher, const std::string& out,
                                    const DistillOptions& options) noexcept {
  return guarded("distill_model", [&]() -> Result<DistillReport> {
    const auto run = [&]() -> Result<DistillReport> {
      BITTERN_TRY(check(options));
      if (teacher.empty()) return invalid("@{teacher}: empty, expected a model to read");
      if (out.empty()) return invalid("@{out}: not given, expected the name of the output");
      const auto path = output_path(out, true);
      if (!path) return path.status();
      return Distillation(teacher, *path, options).run();
    };
    auto report = run();
    if (!report) return with_option_names(report.status(), options.option_name);
    return report;
  });
}

}  // namespace bittern
