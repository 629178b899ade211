#include "bittern/ops/gdn_chunk_forward.h"
#include "cpu/bf16.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/gdn/gdn.h"
#include "ops/gdn/gdn_scratch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gdn/gdn_chunk_forward/gdn_chunk_forward_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/gdn/gdn-inl.h"
#include "ops/gdn/gdn_chunk_forward/pairs-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = GdnChunkForward;
using cpu::gdn::ForwardScratch;
using gdn::kRows;

// What the value heads of one key head share: keys and queries, k k^T and q k^T.
void LoadKeys(const Op::Desc& d, const Op::Args& a, const GdnChunk& chunk, std::int64_t key_head,
              const ForwardScratch& s) {
  const std::int64_t rows = chunk.rows, stride = gdn::Padded(d.key_dim);
  float* q = s.keys_queries + rows * stride;
  gdn::LoadKeys(d, a.k, a.mask, chunk, key_head, s.keys_queries);
  gdn::LoadKeys(d, a.q, a.mask, chunk, key_head, q);
  tile::Scale(d.query_scale(), q, rows * stride);
  gdn::Transpose(s.keys_queries, stride, rows, d.key_dim, s.k_transposed, kRows);
  matmul::MultiplyToLower(rows, d.key_dim, {s.keys_queries, stride}, s.k_transposed, kRows, s.kk,
                          kRows);
  matmul::MultiplyToLower(rows, d.key_dim, {q, stride}, s.k_transposed, kRows, s.qk, kRows);
}

void RunChunk(const Op::Desc& d, const Op::Args& a, const GdnChunk& chunk, std::int64_t h,
              float* state, const ForwardScratch& s) {
  const std::int64_t rows = chunk.rows, width = d.value_dim;
  const std::int64_t k_stride = gdn::Padded(d.key_dim), stride = gdn::Padded(width);
  gdn::Prefetch(a.o, chunk, h);
  gdn::LoadGates(d, a, chunk, h, s.sum, s.beta);
  gdn::ExpRow(s.sum, s.decay);
  gdn::Weights(rows, s.beta, s.sum, s.kk, s.l, s.qk, s.p);

  // k S and q S at once; the former turns into y, the latter into o.
  float *y = s.products, *o = s.products + rows * stride;
  matmul::Multiply(2 * rows, width, d.key_dim, {s.keys_queries, k_stride}, state, stride,
                   s.products, stride);
  gdn::LoadRows(a.v, a.mask, chunk, h, s.v);
  const gdn::D tag;
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto decay = hn::Set(tag, s.decay[i]), beta = hn::Set(tag, s.beta[i]);
    for (std::int64_t j = i * stride; j < (i + 1) * stride; j += gdn::kLanes) {
      const auto seen = hn::LoadU(tag, y + j), v = hn::LoadU(tag, s.v + j);
      hn::StoreU(hn::Mul(beta, hn::NegMulAdd(decay, seen, v)), tag, y + j);
      hn::StoreU(hn::Mul(decay, hn::LoadU(tag, o + j)), tag, o + j);
    }
  }
  matmul::SolveLower(rows, width, {s.l, kRows}, y, stride);
  matmul::MultiplyLower(rows, width, {s.p, kRows}, y, stride, o, stride, true);
  gdn::ClearMasked(a.mask, chunk, stride, o);
  gdn::StoreRows(o, chunk, h, a.o);

  tile::Scale(s.decay[rows - 1], state, d.key_dim * stride);
  gdn::ExpRowFromLast(s.sum, rows, s.decay);
  tile::ScaleRows(s.decay, y, stride, rows, width);
  matmul::Multiply(d.key_dim, width, rows, {s.keys_queries, 1, k_stride}, y, stride, state, stride,
                   true);
}

// Items [begin, end): sequences x key heads x their value heads.
template <class Scratch>
void RunItems(const Op::Desc& d, const Op::Args& a, const Sequence* sequences, std::int64_t begin,
              std::int64_t end, const Scratch& s) {
  const std::int64_t group = d.value_heads / d.key_heads;
  for (std::int64_t item = begin; item < end;) {
    // Value heads of one key head go through the chunks together.
    const std::int64_t n = item / d.value_heads, key_head = item % d.value_heads / group;
    const std::int64_t member = item % group;
    const std::int64_t count = std::min({group - member, end - item, cpu::gdn::kShared});
    const auto head = [&](std::int64_t i) { return d.value_head(key_head, member + i); };
    for (std::int64_t i = 0; i < count; ++i) {
      if (a.initial_state) {
        gdn::LoadState(d, a.initial_state, n, head(i), s.state[i]);
      } else {
        std::fill_n(s.state[i], d.key_dim * gdn::Padded(d.value_dim), 0.0f);
      }
    }
    const std::int64_t chunks = d.chunks(sequences[n].end - sequences[n].begin);
    for (std::int64_t c = 0; c < chunks; ++c) {
      const GdnChunk chunk = gdn_chunk(d, sequences[n], c);
      LoadKeys(d, a, chunk, key_head, s);
      if (c + 1 < chunks) {
        const GdnChunk next = gdn_chunk(d, sequences[n], c + 1);
        gdn::Prefetch(a.k, next, key_head);
        gdn::Prefetch(a.q, next, key_head);
        for (std::int64_t i = 0; i < count; ++i) gdn::Prefetch(a.v, next, head(i));
      }
      for (std::int64_t i = 0; i < count; ++i) RunChunk(d, a, chunk, head(i), s.state[i], s);
    }
    for (std::int64_t i = 0; i < count && a.final_state; ++i)
      gdn::StoreState(d, s.state[i], a.final_state, n, head(i));
    item += count;
  }
}

void RunGdnChunkForward(const Op::Desc& d, const Op::Args& a, const Sequence* sequences,
                        std::int64_t begin, std::int64_t end, const ForwardScratch& s) {
  RunItems(d, a, sequences, begin, end, s);
}

#if HWY_TARGET == HWY_AVX3_DL
void RunInPairs(const Op::Desc& d, const Op::Args& a, const Sequence* sequences, std::int64_t begin,
                std::int64_t end, const PairScratch& s) {
  RunItems(d, a, sequences, begin, end, s);
}
#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = GdnChunkForward;
using Scratch = cpu::gdn::ForwardScratch;
BITTERN_EXPORT(RunGdnChunkForward);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace workspace) {
  return cpu::gdn::run_sequences<Scratch>(d, a, d.value_heads, workspace,
                                          BITTERN_CALL(RunGdnChunkForward));
}

using cpu::gdn::PairScratch;
constexpr auto* kRunInPairs = HWY_CHOOSE_AVX3_DL(RunInPairs);  // the only target that has it

Status run_bf16(const Op::Desc& d, const Op::Args& a, Stream, Workspace workspace) {
  return cpu::gdn::run_sequences<PairScratch>(d, a, d.value_heads, workspace, *kRunInPairs);
}

Status supports_bf16(const Op::Desc& d, Device) {
  if (d.element != DType::bf16)
    return unsupported(std::string("element: ").append(name(d.element)) + ", expected bf16");
  return cpu::bf16_supported();
}

// Rounding one factor of a product to bf16 changes it by 2^-8, both by 2^-7 and 2^-16. The rest,
// 2^-12, is for the f32 arithmetic of this kernel and of the contract: sums of at most 256 + 64
// terms, each within 320 2^-24 and some.
PrecisionGuarantee bf16_guarantee(const Op::Desc&) {
  return {.math_precision = DType::bf16,
          .accumulator = DType::f32,
          .same_bits_on_all_backends = false,
          .error_norm = ErrorNorm::terms,
          .error_bound = kGdnPairsBound};
}

constexpr Kernel<Op> kKernels[] = {{.name = "cpu_bf16",
                                    .backend = "cpu",
                                    .weaker = bf16_guarantee,
                                    .supports = supports_bf16,
                                    .workspace = cpu::gdn::scratch_bytes<PairScratch>,
                                    .architecture = cpu::architecture,
                                    .run = run_bf16},
                                   cpu::exact_kernel<Op>(run, cpu::gdn::scratch_bytes<Scratch>)};

}  // namespace

std::span<const Kernel<GdnChunkForward>> gdn_chunk_forward_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
