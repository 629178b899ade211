#include "distill/kl_pass.h"

#include <algorithm>
#include <string>
#include <utility>

#include "bittern/ops/kl_loss.h"
#include "bittern/plan.h"
#include "core/thread_count.h"

namespace bittern {
namespace {

constexpr std::int64_t kRows = 64;  // positions whose logits are in memory at once

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

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

Result<double> KlPass::loss(std::span<const std::int32_t> tokens, const float* taught,
                            GradientSink* sink) {
  const ModelData& teacher = ModelAccess::data(teacher_);
  const ModelData& student = student_.model();
  const Decoder& d = student.decoder;
  const auto rows = static_cast<std::int64_t>(tokens.size());
  const ThreadCount threads(student.options.threads);
  BITTERN_TRY(student_.forward(tokens, sink != nullptr));
  const std::vector<float>& hidden = student_.hidden();

  d_stream_.resize(sink != nullptr ? hidden.size() : 0);
  taught_logits_.resize(at(kRows * d.vocab));
  logits_.resize(at(kRows * d.vocab));
  losses_.resize(at(kRows));
  const std::vector<float> weights(at(kRows), 1.0f / static_cast<float>(rows));
  double sum = 0;
  for (std::int64_t first = 0; first < rows; first += kRows) {
    const std::int64_t count = std::min(kRows, rows - first);
    scratch_.release({});
    const MutView logits = view(logits_.data(), {count, d.vocab}),
                  taught_logits = view(taught_logits_.data(), {count, d.vocab});
    BITTERN_TRY(head_pass(teacher, taught + first * teacher.decoder.hidden, count, taught_logits,
                          scratch_));
    BITTERN_TRY(
        uncapped_head_pass(student, hidden.data() + first * d.hidden, count, logits, scratch_));
    KlLossDesc desc{};
    desc.rows = count;
    desc.dim = d.vocab;
    desc.softcap = d.logit_softcap;
    KlLoss::Args args{};
    args.x = logits;
    args.teacher = taught_logits;
    args.weights = view(weights.data(), {count});
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
                              d_stream_.data() + first * d.hidden, *sink, scratch_));
  }
  if (sink != nullptr) BITTERN_TRY(student_.backward(d_stream_.data(), *sink));
  return sum;
}

}  // namespace bittern
