#include "bittern/ops/gdn_recurrent_step.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gdn/gdn_recurrent_step/gdn_recurrent_step_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/gdn/gdn_step-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = GdnRecurrentStep;
using gdn_step::Token;

template <class X>
void LoadToken(const Op::Desc& d, const Op::Args& a, std::int64_t sequence, std::int64_t head,
               std::int64_t token, Token& t) {
  const GdnDesc heads = d.heads();
  const std::int64_t key_head = heads.key_head(head);
  gdn_step::Widen(a.q.as<X>() + a.q.at(sequence, token, key_head), d.key_dim, t.q);
  gdn_step::Widen(a.k.as<X>() + a.k.at(sequence, token, key_head), d.key_dim, t.k);
  gdn_step::Widen(a.v.as<X>() + a.v.at(sequence, token, head), d.value_dim, t.v);
  gdn_step::PrepareKeys(d, t);
  float g = a.g.as<float>()[a.g.at(sequence, token, head)];
  if (d.gate) g = gdn_log_decay(g, a.a_log.as<float>()[head], a.dt_bias.as<float>()[head]);
  t.decay = math::exp(g);
  t.beta = gdn_strength(heads, a.beta.as<float>()[a.beta.at(sequence, token, head)]);
}

// What a head of a sequence without a state gives.
void Skip(const Op::Desc& d, const Op::Args& a, std::int64_t sequence, std::int64_t head) {
  const std::int64_t size = d.key_dim * d.value_dim;
  for (std::int64_t token = 0; token < d.tokens; ++token) {
    (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
      std::fill_n(a.o.as<X>() + a.o.at(sequence, token, head), d.value_dim, from_math<X>(0.0f));
      return Status();
    });
    const std::int64_t at = (sequence * d.tokens + token) * d.value_heads + head;
    if (a.snapshots) std::fill_n(a.snapshots.as<float>() + at * size, size, 0.0f);
  }
}

// Heads [begin, end) of all sequences' heads.
void RunGdnRecurrentStep(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                         std::int64_t end) {
  const std::int64_t stride = a.state.stride[2];
  const auto state_of = [&](std::int64_t i) {
    const std::int64_t sequence = i / d.value_heads;
    const std::int64_t slot = d.pool > 0 ? a.state_index.as<std::int32_t>()[sequence] : sequence;
    if (slot < 0) return static_cast<float*>(nullptr);
    return a.state.as<float>() + a.state.at(slot, i % d.value_heads);
  };
  const bool stream = a.snapshots && a.snapshots.shape.numel() * 4 >= kStreamBytes;
  Token t{};
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t sequence = i / d.value_heads, head = i % d.value_heads;
    float* state = state_of(i);
    if (state == nullptr) {
      Skip(d, a, sequence, head);
      continue;
    }
    const float* next = state_of(std::min(i + 1, end - 1));
    if (next == nullptr) next = state;  // only to be fetched ahead
    for (std::int64_t token = 0; token < d.tokens; ++token) {
      (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
        LoadToken<X>(d, a, sequence, head, token, t);
        return Status();
      });
      gdn_step::Step(d, stride, state, token + 1 < d.tokens ? state : next, t);
      (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
        gdn_step::Narrow(t.o, d.value_dim, a.o.as<X>() + a.o.at(sequence, token, head));
        return Status();
      });
      if (a.snapshots) {
        float* to = a.snapshots.as<float>() + a.snapshots.at(sequence, token, head);
        gdn_step::StoreSnapshot(d, stride, state, to, stream);
      }
    }
  }
  if (stream) hwy::FlushStream();
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = GdnRecurrentStep;
BITTERN_EXPORT(RunGdnRecurrentStep);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const std::int64_t work = d.key_dim * d.value_dim * std::max<std::int64_t>(d.tokens, 1);
  cpu::parallel(d.batch * d.value_heads, cpu::kGrain / work,
                [&](std::int64_t begin, std::int64_t end) {
                  BITTERN_CALL(RunGdnRecurrentStep)(d, a, begin, end);
                });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GdnRecurrentStep>> gdn_recurrent_step_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
