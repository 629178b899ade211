#include "bittern/ops/gdn_state.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/gdn/gdn.h"
#include "ops/gdn/gdn_scratch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gdn/gdn_state/gdn_state_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/gdn/gdn-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = GdnState;
using gdn::kRows;

// Items [begin, end): sequences x heads.
void RunGdnState(const Op::Desc& d, const Op::Args& a, const Sequence* sequences,
                 std::int64_t begin, std::int64_t end, const cpu::gdn::StateScratch& s) {
  const std::int64_t heads = d.value_heads, state_size = d.key_dim * d.value_dim;
  const std::int64_t k_stride = gdn::Padded(d.key_dim), v_stride = gdn::Padded(d.value_dim);
  for (std::int64_t item = begin; item < end; ++item) {
    const Sequence sequence = sequences[item / heads];
    const std::int64_t h = item % heads;
    if (a.initial_state) {
      gdn::LoadState(d, a.initial_state.as<float>() + item * state_size, s.state);
    } else {
      std::fill_n(s.state, d.key_dim * v_stride, 0.0f);
    }
    for (std::int64_t n = 0; n < d.chunks(sequence.end - sequence.begin); ++n) {
      const GdnChunk chunk = gdn_chunk(d, sequence, n);
      const std::int64_t rows = chunk.rows, first = chunk.begin * heads + h;
      tile::WithElement(d.element, [&]<class X>(Type<X>) HWY_ATTR {
        if (a.h) gdn::StoreState(d, s.state, a.h.as<X>() + (chunk.state * heads + h) * state_size);
      });
      const float* rounded = s.state;
      if (d.element != DType::f32) {
        std::copy_n(s.state, d.key_dim * v_stride, s.rounded);
        tile::Round(d.element, s.rounded, v_stride, d.key_dim, d.value_dim);
        rounded = s.rounded;
      }
      gdn::LoadRow(a.g, chunk, h, s.g);
      const float last = s.g[rows - 1];
      gdn::ExpRowFrom(last, s.g, rows, s.decay);
      tile::Load(a.w, first * d.key_dim, heads * d.key_dim, rows, d.key_dim, s.k, k_stride);
      tile::Load(a.u, first * d.value_dim, heads * d.value_dim, rows, d.value_dim, s.v, v_stride);
      matmul::Multiply(rows, d.value_dim, d.key_dim, {s.k, k_stride}, rounded, v_stride, s.product,
                       v_stride);
      tile::Subtract(s.v, s.product, v_stride, rows, d.value_dim);
      if (a.v_new)
        tile::Store(s.v, v_stride, rows, d.value_dim, a.v_new, first * d.value_dim,
                    heads * d.value_dim);
      tile::ScaleRows(s.decay, s.v, v_stride, rows, d.value_dim);
      tile::Round(d.element, s.v, v_stride, rows, d.value_dim);
      tile::Load(a.k, (chunk.begin * d.key_heads + d.key_head(h)) * d.key_dim,
                 d.key_heads * d.key_dim, rows, d.key_dim, s.k, k_stride);
      tile::Scale(math::exp(last), s.state, d.key_dim * v_stride);
      matmul::Multiply(d.key_dim, d.value_dim, rows, {s.k, 1, k_stride}, s.v, v_stride, s.state,
                       v_stride, true);
    }
    if (a.final_state) gdn::StoreState(d, s.state, a.final_state.as<float>() + item * state_size);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = GdnState;
using Scratch = cpu::gdn::StateScratch;
BITTERN_EXPORT(RunGdnState);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace workspace) {
  return cpu::gdn::run_sequences<Scratch>(d, a, d.value_heads, workspace,
                                          BITTERN_CALL(RunGdnState));
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run, cpu::gdn::scratch_bytes<Scratch>)};

}  // namespace

std::span<const Kernel<GdnState>> gdn_state_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
