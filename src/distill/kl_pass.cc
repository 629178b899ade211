#include "distill/kl_pass.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "bittern/ops/kl_loss.h"
#include "bittern/plan.h"
#include "core/math.h"
#include "core/thread_count.h"
#include "cpu/parallel.h"

namespace bittern {
namespace {

constexpr std::int64_t kRows = 64;  // positions whose logits are in memory at once

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// The logits of a teacher of whom only the likeliest tokens are known, and the probability of all
// others together: those have, among themselves, the student's own probabilities. So their part of
// KL is tail log(tail / the student's), and its gradient that of the student's sum of them.
// x: the student's logits, to: the teacher's. Both [vocab].
void logits_of_targets(const float* x, double softcap, std::span<const std::int32_t> ids,
                       std::span<const float> log_p, float tail, std::span<float> to) {
  const float cap = static_cast<float>(softcap);
  for (std::size_t j = 0; j < to.size(); ++j)
    to[j] = cap == 0 ? x[j] : cap * math::tanh(x[j] / cap);
  for (const std::int32_t id : ids) to[at(id)] = -std::numeric_limits<float>::infinity();
  const float most = *std::max_element(to.begin(), to.end());
  double sum = 0;
  for (const float logit : to) sum += double{math::exp(logit - most)};
  const float shift =
      static_cast<float>(std::log(std::max(double{tail}, 1e-30)) - (double{most} + std::log(sum)));
  for (float& logit : to) logit += shift;
  for (std::size_t i = 0; i < ids.size(); ++i) to[at(ids[i])] = log_p[i];
}

// A matrix' gradients come several times: each time's are added to what there is.
class AddingSink : public GradientSink {
 public:
  explicit AddingSink(GradientSink& to) : to_(to) {}

  Grids grids(const Matrix::Piece& piece) override {
    const Grids to = to_.grids(piece);
    if (!to.scales) return {};
    if (used_ == parts_.size()) parts_.emplace_back();
    Part& part = parts_[used_++];
    part.to = to;
    const std::int64_t rows = to.scales.shape[0], groups = to.scales.shape[1];
    part.scales.resize(at(rows * groups));
    part.biases.resize(part.scales.size());
    return {view(part.scales.data(), {rows, groups}), view(part.biases.data(), {rows, groups})};
  }
  // What was written since the last call.
  void add() {
    for (const Part& part : std::span(parts_).first(std::exchange(used_, 0))) {
      float *const scales = part.to.scales.as<float>(), *const biases = part.to.biases.as<float>();
      for (std::size_t i = 0; i < part.scales.size(); ++i) {
        scales[i] += part.scales[i];
        biases[i] += part.biases[i];
      }
    }
  }

 private:
  struct Part {
    Grids to;
    std::vector<float> scales, biases;
  };
  GradientSink& to_;
  std::vector<Part> parts_;
  std::size_t used_ = 0;
};

}  // namespace

Result<KlPass> KlPass::make(const Model& teacher, std::shared_ptr<const ModelData> student,
                            std::int64_t context) {
  const Decoder& d = student->decoder;
  if (ModelAccess::data(teacher).decoder.vocab != d.vocab)
    return invalid("the student has logits of " + std::to_string(d.vocab) +
                   " tokens, but the teacher of " +
                   std::to_string(ModelAccess::data(teacher).decoder.vocab));
  auto teaching = Session::make(teacher, {.context = context, .kv = "f32"});
  if (!teaching) return teaching.status();
  auto streams = LayerStreams::make(ModelAccess::model(std::move(student)), context);
  if (!streams) return streams.status();
  return KlPass(teacher, context, std::move(*teaching), std::move(*streams));
}

Status KlPass::teach(std::span<const std::int32_t> tokens, float* hidden) {
  SessionData& session = ModelAccess::data(teaching_);
  forget_all(session);
  const Segment segment{.session = &session, .tokens = tokens};
  return run_sessions(ModelAccess::data(teacher_), std::span(&segment, 1), 0, hidden);
}

Result<double> KlPass::loss(std::span<const std::int32_t> tokens, const Taught& taught,
                            PieceStreams& piece, GradientSink* sink) {
  const ModelData& teacher = ModelAccess::data(teacher_);
  const ModelData& student = student_.model();
  const Decoder& d = student.decoder;
  const auto rows = static_cast<std::int64_t>(tokens.size());
  const ThreadCount threads(student.options.threads);
  BITTERN_TRY(student_.forward(tokens, sink != nullptr, piece));
  const std::vector<float>& hidden = piece.hidden;
  std::optional<AddingSink> head;
  if (sink != nullptr) {
    head.emplace(*sink);
    piece.d_stream.resize(hidden.size());
  }
  taught_logits_.resize(at(kRows * d.vocab));
  logits_.resize(at(kRows * d.vocab));
  losses_.resize(at(kRows));
  const std::int64_t known = taught.targets != nullptr ? rows - 1 : rows;
  std::vector<float> weights(at(rows), 1.0f / static_cast<float>(known));
  std::fill(weights.begin() + known, weights.end(), 0.0f);
  double sum = 0;
  for (std::int64_t first = 0; first < rows; first += kRows) {
    const std::int64_t count = std::min(kRows, rows - first);
    scratch_.release({});
    const MutView logits = view(logits_.data(), {count, d.vocab}),
                  taught_logits = view(taught_logits_.data(), {count, d.vocab});
    BITTERN_TRY(
        uncapped_head_pass(student, hidden.data() + first * d.hidden, count, logits, scratch_));
    if (const TargetsFile* const targets = taught.targets; targets != nullptr) {
      cpu::parallel(count, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          // The last token's row counts nothing: any will do.
          const std::int64_t row = taught.first + std::min(first + i, known - 1);
          logits_of_targets(logits_.data() + i * d.vocab, d.logit_softcap, targets->ids(row),
                            targets->log_p(row), targets->tail(row),
                            std::span(taught_logits_).subspan(at(i * d.vocab), at(d.vocab)));
        }
      });
    } else {
      BITTERN_TRY(head_pass(teacher, taught.hidden + first * teacher.decoder.hidden, count,
                            taught_logits, scratch_));
    }
    KlLossDesc desc{};
    desc.rows = count;
    desc.dim = d.vocab;
    desc.softcap = d.logit_softcap;
    KlLoss::Args args{};
    args.x = logits;
    args.teacher = taught_logits;
    args.weights = view(std::as_const(weights).data() + first, {count});
    args.loss = view(losses_.data(), {count});
    if (sink != nullptr) args.d_x = logits;
    const auto plan = Plan<KlLoss>::select(desc);
    if (!plan) return plan.status();
    const std::size_t bytes = plan->workspace_bytes();
    BITTERN_TRY(plan->run(args, {}, {scratch_.take(bytes), bytes}));
    for (std::int64_t i = 0; i < count; ++i) sum += double{losses_[at(i)]};
    if (sink == nullptr) continue;
    scratch_.release({});
    BITTERN_TRY(head_backward(student, hidden.data() + first * d.hidden, count, logits,
                              piece.d_stream.data() + first * d.hidden, *head, scratch_));
    head->add();
  }
  if (sink != nullptr) BITTERN_TRY(student_.norm_backward(piece));
  return sum;
}

Status KlPass::layer_backward(std::int64_t layer, PieceStreams& piece, GradientSink& sink) {
  const ThreadCount threads(student_.model().options.threads);
  return student_.layer_backward(layer, piece, sink);
}

Status KlPass::embedding_backward(const PieceStreams& piece, GradientSink& sink) {
  return bittern::embedding_backward(student_.model(), piece.tokens, piece.d_stream.data(), sink,
                                     scratch_);
}

}  // namespace bittern
