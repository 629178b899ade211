// Quantisation by what a model's layers see, and distillation: what quantisation lost is learned
// back from the model itself (docs/quantize.md, docs/distill.md). Link bittern::model.
//
//   auto report = quantize_calibrated("model", "model-4bit",
//                                     {.bits = 4, .method = "gptq", .data = "text.txt"});
//   auto learned = distill_model("model", "model-3bit", {.bits = 3, .data = {"text.txt"}});
//
// Results are the same bytes for any number of threads and processes and, unless a preference says
// otherwise, on every SIMD target.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bittern/convert.h"
#include "bittern/eval.h"
#include "bittern/ranks.h"
#include "bittern/status.h"

namespace bittern {

// quantize_model with one method more, "gptq", which options.data, pieces and context are for.
Result<QuantizeReport> quantize_calibrated(const std::string& source, const std::string& out,
                                           const QuantizeOptions& options = {}) noexcept;

// ---- distillation ----
// Three steps: the teacher's matrices are quantised as by method gptq; a rate is searched on text
// that is held out; then scales and biases, and codes if asked, learn, by Adam, to lower
// KL(teacher || student).

struct DistillProgress {
  // "sampling" (a text of its own), "calibrating", "reading" (the teacher's targets), "searching",
  // "learning", "writing" or "judging"
  std::string_view doing;
  std::string text{};  // what of it is at hand
  double share = 0;    // of `doing` that is done, 0 to 1
  std::int64_t step = 0, steps = 0;
  double train_kl = 0;           // of the last step; NaN: none yet
  double validation_kl = 0;      // as last measured; NaN: not yet
  double tokens_per_second = 0;  // of learning
  double seconds_left = 0;       // of learning
};

// What is to happen next. `finish` ends learning early and keeps the best so far; `stop` ends the
// call with Code::cancelled, and `resume` goes on from there.
enum class DistillNext { go_on, finish, stop };

struct DistillOptions {
  // "mlx", "gguf" or "compressed-tensors"; default: by `out`
  std::optional<std::string> format{};
  // As in QuantizeOptions. Where zero points are integers, scales alone learn.
  std::optional<std::string> zero_points{};
  // Of a GGUF file, in place of bits: "Q4_1", "Q5_1", "Q4_K_S", "Q4_K_M", "Q5_K_S" or "Q5_K_M".
  std::optional<std::string> type{};
  // Of the matrices of layers: 2, 3, 4 (default), 5, 6 or 8. In GGUF: 4 (Q4_1) or 5 (Q5_1).
  std::optional<int> bits{};
  std::optional<int> group_size{};           // weights that share a scale: 32, 64 (default) or 128;
                                             // in GGUF 32
  std::optional<int> embedding_bits{};       // of embedding and head; 0: as the teacher has them.
                                             // Default: 6, or `bits` where that is more; in
                                             // compressed-tensors 0
  std::optional<std::string> scale_dtype{};  // as in QuantizeOptions; in GGUF f16
  std::vector<QuantizeRule> rules{};         // before all others

  std::vector<std::string> data{};  // paths of texts
  bool self_text = false;           // in place of `data`: a text that the teacher writes itself
  std::int64_t context = 512;       // tokens of a piece of text
  std::int64_t calibration = 128;   // pieces that codes are chosen by
  bool fisher = false;              // their tokens count by what their errors cost
  std::int64_t validation = 16;     // pieces that are held out
  std::int64_t steps = 60;          // 0: nothing is learned
  std::int64_t batch = 2;           // pieces of a step
  std::optional<double> rate{};     // of scales, relative to their mean; default: searched
  bool learn_codes = false;         // codes of layers move too: 14 bytes a weight of memory more
  std::uint64_t seed = 0;           // of the order of the pieces
  // A file of what the teacher says of the pieces that steps read: its `teacher_top` likeliest
  // tokens and the probability of all others together. It is made if it is not there, and refused
  // if it is of another teacher or of other pieces. Empty: the teacher runs beside the student.
  std::string teacher_cache{};
  std::int64_t teacher_top = 64;

  // fastest: models are run and learn by kernels with a declared bound too, where the CPU has them
  // (docs/distill.md). The bytes then depend on the CPU and the SIMD target.
  Preference preference = Preference::exact;

  bool judge = false;  // DistillReport::judged and samples

  bool force = false;             // replace an output that bittern wrote
  bool resume = false;            // continue a run that was stopped
  double checkpoint_minutes = 5;  // between two states on disk, for `resume`
  std::optional<int> threads{};   // default: num_threads()
  Ranks* ranks = nullptr;         // processes that share the pieces of text
  std::function<DistillNext(const DistillProgress&)> progress{};
  std::vector<std::string> also_written{};  // as in QuantizeOptions
  std::function<std::string(std::string_view field)> option_name{};
};

struct DistillPoint {
  std::int64_t step = 0;
  double train_kl = 0;  // mean since the point before; NaN: none
  double validation_kl = 0;
};

struct DistillTrial {
  double rate = 0, validation_kl = 0;
};

// How three models go on after the same words, each with its likeliest token.
struct DistillSample {
  std::string prompt, teacher, start, result;
};

struct DistillReport {
  QuantizeReport output;
  std::string type{};            // of a GGUF file
  int bits = 0, group_size = 0;  // of most grids that learned
  std::int64_t learned = 0;      // scales and biases, or scales alone
  std::int64_t codes = 0;        // that could move
  std::int64_t codes_moved = 0;  // that are others than at the start
  std::int64_t train_pieces = 0, validation_pieces = 0;
  std::int64_t steps = 0;  // made
  std::int64_t best_step = 0;
  bool finished_early = false;
  double rate = 0;
  // Of the validation text: calibrated, what was learned, and what was written. A GGUF file, or a
  // folder with integer zero points, is read again for the last. In a folder the last two are the
  // same.
  double start_kl = 0, kl = 0, written_kl = 0;
  // Of a GGUF file, whose types cannot hold everything: the start, written in the same types. Where
  // that is better, it is written in place of what was learned. In a folder this is start_kl.
  double written_start_kl = 0;
  bool start_written = false;
  std::vector<DistillTrial> trials{};
  std::vector<DistillPoint> points{};
  // With `judge`, on the validation text: the calibrated start, and what was written.
  std::optional<EvalResult> judged{};
  std::vector<DistillSample> samples{};
  double seconds = 0;            // in all
  double seconds_learning = 0;   // of this call
  std::uint64_t peak_bytes = 0;  // the most memory that the process has had so far
  double tokens_per_second = 0;  // learned from, of this call
};

// Writes `out`, a folder for MLX or a GGUF file. Until it is whole, everything is in the folder
// OUT.distill, which is removed at the end. What was learned is never worse on the validation text
// than its start. Q4_1 and Q5_1 hold it exactly. Matrices of Q4_K and Q5_K are fitted to it, and
// those of other types (embedding and head among them) are quantised from the teacher's numbers.
Result<DistillReport> distill_model(const std::string& teacher, const std::string& out,
                                    const DistillOptions& options) noexcept;

}  // namespace bittern
