#include "bittern/ops/gdn_recurrent_step.h"
#include "ops/gdn/gdn_step.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnRecurrentStep;

template <class X>
void step(const Op::Desc& d, const Op::Args& a, std::int64_t sequence, std::int64_t head,
          std::int64_t token, const GdnState& state) {
  const std::int64_t key_head = d.heads().key_head(head);
  GdnToken t{.q = gdn_load(a.q.as<X>() + a.q.at(sequence, token, key_head), d.key_dim),
             .k = gdn_load(a.k.as<X>() + a.k.at(sequence, token, key_head), d.key_dim),
             .v = gdn_load(a.v.as<X>() + a.v.at(sequence, token, head), d.value_dim),
             .g = a.g.as<float>()[a.g.at(sequence, token, head)],
             .beta = a.beta.as<float>()[a.beta.at(sequence, token, head)]};
  if (d.gate) {
    t.a_log = a.a_log.as<float>()[head];
    t.dt_bias = a.dt_bias.as<float>()[head];
  }
  X* o = a.o.as<X>() + a.o.at(sequence, token, head);
  for (const float e : gdn_step(d, std::move(t), state)) *o++ = from_math<X>(e);
}

// What a sequence without a state gives.
void skip(const Op::Desc& d, const Op::Args& a, std::int64_t sequence) {
  const std::int64_t size = d.value_heads * d.key_dim * d.value_dim;
  for (std::int64_t token = 0; token < d.tokens; ++token) {
    for (std::int64_t head = 0; head < d.value_heads; ++head) {
      (void)visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
        std::fill_n(a.o.as<X>() + a.o.at(sequence, token, head), d.value_dim, from_math<X>(0.0f));
        return Status();
      });
    }
    if (a.snapshots)
      std::fill_n(a.snapshots.as<float>() + (sequence * d.tokens + token) * size, size, 0.0f);
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  for (std::int64_t sequence = 0; sequence < d.batch; ++sequence) {
    const std::int64_t slot = gdn_slot(d, a.state_index, sequence);
    if (slot < 0) {
      skip(d, a, sequence);
      continue;
    }
    for (std::int64_t head = 0; head < d.value_heads; ++head) {
      const GdnState state(d, a.state, slot, head);
      for (std::int64_t token = 0; token < d.tokens; ++token) {
        BITTERN_TRY((visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
          step<X>(d, a, sequence, head, token, state);
          return Status();
        })));
        state.copy(a.snapshots, sequence, token, head);
      }
    }
  }
  return {};
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<GdnRecurrentStep>> gdn_recurrent_step_ref() { return kKernels; }

}  // namespace bittern
