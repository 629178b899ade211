// Adam on what learns of a student (distill/learned_grids.h):
//
//   each step   g = the mean over the step's pieces of the gradients of their mean KL
//               Adam, at a rate that falls to 0 along half a cosine; a step of size 1 moves a scale
//               by rate, and a centre by kCentreRate * rate, times the tensor's mean |s|, and a
//               latent code by kCodeRate * rate
//
// Where zero points are integers, no centre moves. A grid of more bits than the others starts
// nearer to the teacher, and learns at a lower rate. All pieces of a step go forwards, then they go
// backwards layer by layer, and a layer is updated as soon as all have passed it: gradients of more
// than a layer are never in memory.
//
// Processes share the pieces. Each updates everything, by the same sums.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
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
  // Scales and centres, [groups] each, and the latent codes, if codes move.
  std::vector<float> parameters[3], means[3], variances[3];
  std::vector<float> best[2];  // scales and centres
  std::vector<std::uint8_t> best_codes{};

  Status write(const std::string& path, std::uint64_t fingerprint) const;
  static Result<LearnState> read(const std::string& path, std::uint64_t fingerprint);
};

// The middle of the rates that are tried: the coarser the grid, the worse the start, the further
// scales have to go.
double first_rate(int bits);

class Learner {
 public:
  // bits: of most grids.
  Learner(KlPass pass, LearnedGrids grids, const TrainingText& text, const DistillOptions& options,
          int bits)
      : pass_(std::move(pass)),
        grids_(std::move(grids)),
        text_(text),
        options_(options),
        bits_(bits) {}

  LearnedGrids& grids() { return grids_; }
  // Steps read the teacher from this file: `places` has the first row of each piece that is read.
  void use_targets(TargetsFile targets, std::map<std::int64_t, std::int64_t> places) {
    targets_.emplace(std::move(targets));
    places_ = std::move(places);
  }

  // A state before its first step, with the grids' numbers and these latent codes.
  LearnState begin(std::vector<float> latents);
  // The same again, to try something.
  static LearnState anew(const LearnState& begun);
  // Another step of `steps`; the mean KL of its pieces.
  Result<double> step(LearnState& state, std::int64_t steps);
  // The mean KL of the pieces that are held out: this student's, and that of another pass.
  Result<double> validate() { return validate(pass_); }
  Result<double> validate(KlPass& pass);
  // The model computes with the state's numbers: the last ones, or the best.
  Status use(LearnState& state);
  Status use_best(const LearnState& state);
  // The best so far is what the state has now.
  void keep_best(LearnState& state) const;

 private:
  std::int64_t nth_piece(std::int64_t n);
  Status update(const LearnedGrids::Slice& slice, std::vector<float> sum, double rate,
                LearnState& state);

  KlPass pass_;
  LearnedGrids grids_;
  const TrainingText& text_;
  const DistillOptions& options_;
  int bits_;
  std::optional<TargetsFile> targets_;
  std::map<std::int64_t, std::int64_t> places_;
  std::int64_t round_ = -1;  // through the text
  std::vector<std::int64_t> order_;
  std::vector<PieceStreams> pieces_;  // of a step, those of this process
  std::vector<float> taught_;         // of a piece
  // What the teacher's head reads of the pieces held out that this process has.
  std::vector<float> validation_;
};

}  // namespace bittern
