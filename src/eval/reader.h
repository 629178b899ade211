// A model that reads pieces and predicts what comes after each position.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bittern/eval.h"
#include "eval/statistics.h"

namespace bittern {

// Logits are computed for so many positions at a time.
inline constexpr std::int64_t kEvalRows = 32;

class Reader {
 public:
  // `name` begins error messages.
  static Result<Reader> make(std::string name, const EvalModel& model, const EvalOptions& options);

  Status read(std::span<const std::int32_t> tokens, Watcher* watcher = nullptr);
  // Log probabilities of all tokens after `rows` positions from `first` on. `targets` are the right
  // ones: notes how unlikely they were.
  Status predict(std::int64_t first, std::span<const std::int32_t> targets);

  const ModelInfo& info() const { return model_->info(); }
  const std::string& name() const { return name_; }
  float* log_p(std::int64_t row) { return log_p_.data() + row * info().vocab; }
  const float* log_p(std::int64_t row) const { return log_p_.data() + row * info().vocab; }
  PieceScores scores;  // of the piece at hand

 private:
  Reader(std::string name, const Model& model, Session session)
      : name_(std::move(name)), model_(&model), session_(std::move(session)) {}
  std::string name_;
  const Model* model_;
  Session session_;
  std::vector<float> hidden_, log_p_;
};

}  // namespace bittern
