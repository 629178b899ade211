#include "bittern/ops/gdn_state.h"
#include "ops/gdn/gdn.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = GdnState;

template <class X>
void run_as(const Op::Desc& d, const Op::Args& a) {
  const std::int64_t heads = d.value_heads, size = d.key_dim * d.value_dim;
  const bool key_first = d.state_layout == StateLayout::key_value;
  // Where element (i, j) of a state lies.
  const auto at = [&](std::int64_t i, std::int64_t j) {
    return static_cast<std::size_t>(key_first ? i * d.value_dim + j : j * d.key_dim + i);
  };
  const auto round = [](float x) { return to_math(from_math<X>(x)); };
  const std::vector<Sequence> sequences = sequences_of(d.rows(), a.cu_seqlens);
  for (std::int64_t n = 0; n < d.sequence_count(); ++n) {
    const Sequence& sequence = sequences[static_cast<std::size_t>(n)];
    for (std::int64_t h = 0; h < heads; ++h) {
      std::vector<float> state(static_cast<std::size_t>(size));
      if (a.initial_state)
        std::copy_n(a.initial_state.as<float>() + (n * heads + h) * size, size, state.begin());
      for (std::int64_t c = 0; c < d.chunks(sequence.end - sequence.begin); ++c) {
        const GdnChunk chunk = gdn_chunk(d, sequence, c);
        const auto token = [&](std::int64_t i) { return (chunk.begin + i) * heads + h; };
        const float* g = a.g.as<float>();
        const float last = g[token(chunk.rows - 1)];
        if (a.h) {
          X* to = a.h.as<X>() + (chunk.state * heads + h) * size;
          for (const float x : state) *to++ = from_math<X>(x);
        }
        for (std::int64_t j = 0; j < d.value_dim; ++j) {
          std::vector<float> z;
          for (std::int64_t i = 0; i < chunk.rows; ++i) {
            float acc = 0;
            for (std::int64_t m = 0; m < d.key_dim; ++m) {
              const float w = to_math(a.w.as<X>()[token(i) * d.key_dim + m]);
              acc = std::fma(w, round(state[at(m, j)]), acc);
            }
            const float y = to_math(a.u.as<X>()[token(i) * d.value_dim + j]) - acc;
            if (a.v_new) a.v_new.as<X>()[token(i) * d.value_dim + j] = from_math<X>(y);
            z.push_back(round(y * gdn_decay(last, g[token(i)])));
          }
          for (std::int64_t m = 0; m < d.key_dim; ++m) {
            float acc = math::exp(last) * state[at(m, j)];
            for (std::int64_t i = 0; i < chunk.rows; ++i) {
              const std::int64_t key = (chunk.begin + i) * d.key_heads + d.key_head(h);
              acc = std::fma(to_math(a.k.as<X>()[key * d.key_dim + m]),
                             z[static_cast<std::size_t>(i)], acc);
            }
            state[at(m, j)] = acc;
          }
        }
      }
      if (a.final_state)
        std::copy(state.begin(), state.end(), a.final_state.as<float>() + (n * heads + h) * size);
    }
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    run_as<X>(d, a);
    return Status();
  });
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<GdnState>> gdn_state_ref() { return kKernels; }

}  // namespace bittern
