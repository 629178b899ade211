#include "bittern/ops/gdn_cumsum.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/gdn/gdn.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gdn/gdn_cumsum/gdn_cumsum_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/math-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = GdnCumsum;

// Chunks [begin, end), a vector of heads at a time.
void RunGdnCumsum(const Op::Desc& d, const Op::Args& a, const GdnChunk* chunks, std::int64_t begin,
                  std::int64_t end) {
  const hn::ScalableTag<float> tag;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(tag));
  const std::int64_t heads = d.value_heads;
  for (const GdnChunk* chunk = chunks + begin; chunk != chunks + end; ++chunk) {
    for (std::int64_t h = 0; h < heads; h += lanes) {
      const auto in = hn::FirstN(tag, static_cast<std::size_t>(std::min(lanes, heads - h)));
      auto rate = hn::Zero(tag), bias = hn::Zero(tag), sum = hn::Zero(tag);
      if (d.gate) {
        rate = hn::Neg(Exp(tag, hn::MaskedLoad(in, tag, a.a_log.as<float>() + h)));
        bias = hn::MaskedLoad(in, tag, a.dt_bias.as<float>() + h);
      }
      for (std::int64_t t = chunk->begin; t < chunk->begin + chunk->rows; ++t) {
        auto g = hn::MaskedLoad(in, tag, a.g.as<float>() + t * heads + h);
        if (d.gate) g = hn::Mul(rate, Softplus(tag, hn::Add(g, bias)));
        sum = hn::Add(sum, g);
        hn::BlendedStore(sum, in, tag, a.sum.as<float>() + t * heads + h);
      }
    }
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

using Op = GdnCumsum;
BITTERN_EXPORT(RunGdnCumsum);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const std::vector<GdnChunk> chunks = gdn_chunks(d, a.cu_seqlens);
  const std::int64_t work = d.chunk * d.value_heads * (d.gate ? 16 : 1);
  cpu::parallel(static_cast<std::int64_t>(chunks.size()), cpu::kGrain / work + 1,
                [&](std::int64_t begin, std::int64_t end) {
                  BITTERN_CALL(RunGdnCumsum)(d, a, chunks.data(), begin, end);
                });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<GdnCumsum>> gdn_cumsum_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
