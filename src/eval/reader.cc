#include "eval/reader.h"

#include <chrono>
#include <cmath>

#include "bittern/ops/log_softmax.h"
#include "core/scratch.h"

namespace bittern {
namespace {

class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds) {}
  ~Stopwatch() {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace

Result<Reader> Reader::make(std::string name, const EvalModel& model, const EvalOptions& options) {
  if (model.model == nullptr) return invalid(name + ": null, expected a model");
  SessionOptions own = model.session;
  own.context = options.context;
  auto session = Session::make(*model.model, own);
  if (!session) {
    if (session.status().code() == Code::out_of_memory) return session.status();
    return Status(session.status().code(), name + ": " + std::string(session.status().message()));
  }
  const std::int64_t vocab = model.model->info().vocab;
  if (options.first < -1 || options.first >= vocab)
    return invalid("first: " + std::to_string(options.first) + ", expected -1 to " +
                   std::to_string(vocab - 1));
  return Reader(std::move(name), *model.model, std::move(*session));
}

Status Reader::read(std::span<const std::int32_t> tokens, Watcher* watcher) {
  const Stopwatch watch(scores.seconds);
  BITTERN_TRY(session_.truncate(0));
  const auto count = static_cast<std::int64_t>(tokens.size());
  hidden_.resize(tokens.size() * static_cast<std::size_t>(info().hidden));
  const SessionTokens step{&session_, tokens};
  return model_->hidden(std::span(&step, 1), view(hidden_.data(), {count, info().hidden}), watcher);
}

Status Reader::predict(std::int64_t first, std::span<const std::int32_t> targets) {
  const Stopwatch watch(scores.seconds);
  const auto rows = static_cast<std::int64_t>(targets.size());
  log_p_.resize(static_cast<std::size_t>(kEvalRows * info().vocab));
  const MutView out = view(log_p_.data(), {rows, info().vocab});
  const float* const from = hidden_.data() + first * info().hidden;
  BITTERN_TRY(model_->logits(view(from, {rows, info().hidden}), out));
  const auto plan = Plan<LogSoftmax>::select({.rows = rows, .dim = info().vocab});
  if (!plan) return plan.status();
  AlignedScratch scratch(plan->workspace_bytes());
  BITTERN_TRY(plan->run({.x = out, .y = out}, {}, scratch.workspace()));
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int32_t target = targets[static_cast<std::size_t>(r)];
    const float log_p = this->log_p(r)[target];
    if (!std::isfinite(log_p))
      return invalid(name_ + ": the log probability of token " + std::to_string(target) +
                     " is not finite; do its weights hold a NaN or an infinity?");
    scores.nll.push_back(-double{log_p});
  }
  return {};
}

}  // namespace bittern
