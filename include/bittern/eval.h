// How well a model predicts a text, and how far its predictions are from a teacher's
// (docs/eval.md).
//
//   auto tokens = tokenizer->encode(text, {.add_special = false});
//   auto result = evaluate({{&student, {}}}, *tokens, {.context = 512}, {&teacher, {}});
//   result->models[0].perplexity;
//   result->models[0].divergence.kl.mean;
//
// Perplexity is exp of the mean negative log probability of the tokens scored. Three dialects say
// which tokens those are, and after which others:
//
//   llama      the text in pieces of `context` tokens; of each the tokens from context/2 + 1 on:
//              llama.cpp's llama-perplexity
//   segments   the same pieces; of each all tokens but the first; the mean of the pieces' means:
//              GPTQ's papers
//   windows    every token but the text's first, after at least context/2 tokens where the text has
//              them: windows of `context` tokens, context/2 apart
//
// With a teacher, KL(teacher || model) of every position scored, in nats. Link bittern::model.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/model.h"
#include "bittern/ranks.h"
#include "bittern/status.h"

namespace bittern {

enum class PerplexityDialect { llama, segments, windows };
inline constexpr std::string_view kPerplexityDialectNames[] = {"llama", "segments", "windows"};
constexpr auto& enum_names(PerplexityDialect) { return kPerplexityDialectNames; }

struct EvalProgress {
  std::int64_t done = 0, total = 0;  // tokens given to models, all of them together
  double perplexity = 0;             // of the first model, so far; 0: nothing is scored yet
};

struct EvalOptions {
  PerplexityDialect dialect = PerplexityDialect::llama;
  std::int64_t context = 512;
  std::int64_t pieces = 0;  // at most so many; 0: all
  std::int32_t first = -1;  // takes the place of each piece's first token (bos); -1: nothing does
  // With a teacher that runs: ModelScore::layers. Holds what the teacher's layers give for one
  // piece: layers * context * hidden numbers of 4 bytes.
  bool layers = false;
  // Called after each model has read a piece. Returns whether to go on; false ends the call with
  // Code::cancelled.
  std::function<bool(const EvalProgress&)> progress{};
  Ranks* ranks = nullptr;  // processes that share the pieces
};

struct EvalModel {
  const Model* model = nullptr;
  SessionOptions session{};  // its context is the options'
};

// Of numbers, one for each position. Quantiles are interpolated between the two nearest numbers.
struct Spread {
  double mean = 0, error = 0;  // error: standard, of the mean, as if positions were independent
  double median = 0, p90 = 0, p99 = 0, p999 = 0, max = 0;
};

// The parts of Divergence::by_position, and the bins of Divergence::histogram.
inline constexpr std::size_t kEvalParts = 16;
inline constexpr std::size_t kEvalBins = 22;

struct Divergence {
  Spread kl;
  // KL is of the teacher's likeliest tokens and of all others as one: never above the true one.
  bool lower_bound = false;
  double rms_dp = 0;          // root mean square of the change of the right token's probability
  double top1 = 0, top5 = 0;  // share of positions with the same likeliest token, the same five
  // Mean KL in kEvalParts equal parts of the context; NaN: nothing is scored there.
  std::vector<double> by_position{};
  // Positions by KL: below 1e-8; kEvalBins - 2 bins of half a decade each; 100 and above.
  std::vector<std::uint64_t> histogram{};
};

struct ModelScore {
  double perplexity = 0, error = 0;  // error: standard
  double nll = 0;                    // mean negative log probability
  Divergence divergence{};           // with a teacher
  // With EvalOptions::layers: after each layer, the mean over the positions scored of
  // ||x - t||^2 / ||t||^2, x and t the residual streams of model and teacher.
  std::vector<double> layers{};
  double seconds = 0;  // of its forward passes; where processes share them, of the slowest
};

struct EvalResult {
  std::int64_t tokens = 0;  // given to each model
  std::int64_t scored = 0;
  std::int64_t pieces = 0;
  std::vector<ModelScore> models{};  // in the order given
  ModelScore teacher{};              // where there is one
};

// Teacher and models see the same tokens, piece by piece; of logits only those of a few positions
// are held at a time. An error about one of several models begins with models[i] or teacher.
Result<EvalResult> evaluate(std::span<const EvalModel> models, std::span<const std::int32_t> tokens,
                            const EvalOptions& options = {},
                            const EvalModel& teacher = {}) noexcept;

// ---- a teacher's predictions in a file ----
// For each position scored: the log probabilities of the `top` likeliest tokens, the probability of
// all others together, and the log probability of the right token. So a teacher runs once for any
// number of students.

struct TargetOptions {
  std::int64_t top = 64;  // 5 or more; a smaller vocabulary is kept as a whole
  std::string teacher{};  // any text that tells one teacher from another
  bool replace = false;   // a file of targets that is there already
};

// The file appears when it is complete: until then it is PATH.partial.
Status write_targets(const std::string& path, const EvalModel& teacher,
                     std::span<const std::int32_t> tokens, const EvalOptions& options = {},
                     const TargetOptions& target_options = {}) noexcept;

class TargetsFile;

// Such a file, mapped. It need not be trusted.
class TeacherTargets {
 public:
  static Result<TeacherTargets> open(const std::string& path) noexcept;

  const std::string& teacher() const noexcept;  // as TargetOptions had it
  std::int64_t top() const noexcept;
  std::int64_t vocab() const noexcept;  // of the teacher
  // ok if they were made of these tokens with these options; else the error says what differs.
  Status check(std::span<const std::int32_t> tokens, const EvalOptions& options) const noexcept;

 private:
  friend Result<EvalResult> evaluate(std::span<const EvalModel>, std::span<const std::int32_t>,
                                     const EvalOptions&, const TeacherTargets&) noexcept;
  explicit TeacherTargets(std::shared_ptr<const TargetsFile> file) noexcept
      : file_(std::move(file)) {}
  std::shared_ptr<const TargetsFile> file_;
};

// The same with a teacher from a file. KL is then
//   sum over the top tokens of p log(p / q)  +  P log(P / Q),
// P and Q the probabilities of all other tokens together: a lower bound of the true KL.
Result<EvalResult> evaluate(std::span<const EvalModel> models, std::span<const std::int32_t> tokens,
                            const EvalOptions& options, const TeacherTargets& teacher) noexcept;

}  // namespace bittern
