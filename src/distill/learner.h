// Adam on the scales and centres of a student's grids (distill/learned_grids.h):
//
//   each step   g = the mean over the step's pieces of the gradients of their mean KL
//               Adam, at a rate that falls to 0 along half a cosine; a step of size 1 moves a scale
//               by rate, and a centre by kCentreRate * rate, times the tensor's mean |s|
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bittern/distill.h"
#include "bittern/status.h"
#include "distill/kl_pass.h"
#include "distill/learned_grids.h"
#include "distill/training_text.h"

namespace bittern {

// Everything that a run needs to go on: written to disk as it is.
struct LearnState {
  std::int64_t step = 0;  // made
  double rate = 0;
  double start_kl = 0, best_kl = 0;
  std::int64_t best_step = 0;
  std::vector<DistillTrial> trials{};
  std::vector<DistillPoint> points{};
  double train_sum = 0;  // of the steps since the last point
  std::int64_t train_count = 0;
  // [groups] each: scales, then centres.
  std::vector<float> parameters[2], means[2], variances[2], best[2];

  Status write(const std::string& path, std::uint64_t fingerprint) const;
  static Result<LearnState> read(const std::string& path, std::uint64_t fingerprint);
};

class Learner {
 public:
  Learner(KlPass pass, LearnedGrids grids, const TrainingText& text, const DistillOptions& options)
      : pass_(std::move(pass)), grids_(std::move(grids)), text_(text), options_(options) {}

  LearnedGrids& grids() { return grids_; }

  // A state before its first step, with the grids' numbers.
  LearnState begin();
  // Another step of `steps`; the mean KL of its pieces.
  Result<double> step(LearnState& state, std::int64_t steps);
  // The mean KL of the pieces that are held out: this student's, and that of another pass.
  Result<double> validate() { return validate(pass_); }
  Result<double> validate(KlPass& pass);
  // The model computes with these.
  Status use(const std::vector<float> (&parameters)[2]);

 private:
  KlPass pass_;
  LearnedGrids grids_;
  const TrainingText& text_;
  const DistillOptions& options_;
  std::vector<float> taught_;      // of a piece
  std::vector<float> validation_;  // what the teacher's head reads of all pieces held out
};

}  // namespace bittern
