// Groups are taken W at a time, W the lanes of a vector: group_params-inl.h finds their scales and
// biases, code_rows-inl.h the codes of each, lsq-inl.h both together; results-inl.h writes them.
#include "bittern/ops/qdq_affine_init.h"

#include <atomic>

#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/affine/qdq_affine_init/blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/affine/qdq_affine_init/qdq_affine_init_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/affine/qdq_affine_init/group_params-inl.h"
#include "ops/affine/qdq_affine_init/lsq-inl.h"
#include "ops/affine/qdq_affine_init/results-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using affine::Blocks;

// ---- minmax and mlx ----

template <bool kHalfEven, bool kOnce, class X>
HWY_INLINE void QuantizeGroup(const Chunk<X>& c, std::int64_t i, std::int64_t size,
                              std::int32_t bins, CodeRow to) {
  if constexpr (std::is_same_v<X, bf16> && kOnce && !kHalfEven) {
    const float offset = c.offset[i];
    if (HWY_LIKELY(offset == offset)) {
      const Tag<float> t;
      const Step<float, Division::apart> step{hn::Set(t, c.inverse[i]), hn::Set(t, offset)};
      return StorePairCodes<false>(
          size, bins, [&](std::int64_t j) HWY_ATTR { return PairCodes<true>(c.w[i] + j, step); },
          to);
    }
  }
  Quantize<kHalfEven, kOnce>(c.w[i], size, c.s[i], c.b[i], c.inverse[i], bins, to);
}

template <bool kHalfEven, bool kOnce, int kSize, class X, class F = Math<X>>
HWY_INLINE void DirectBlock(const Op::Desc& d, const Weights<X>& weights, std::int64_t first,
                            std::int64_t count, bool nibbles, Chunk<X>* chunks, Results<F>& out) {
  constexpr std::int64_t kGroups = Chunk<X>::kGroups;
  const Tag<F> t;
  const std::int64_t size = kSize != 0 ? kSize : d.group_size;
  const std::int32_t bins = d.bins();
  const auto row = [&](std::int64_t group) {
    return CodeRow{out.codes + (nibbles ? group * size / 2 : group * size), nibbles};
  };
  Chunk<X>* now = chunks;
  Chunk<X>* after = chunks + 1;
  Vector<F> nought = hn::Load(t, out.nought);
  weights.Load(first, std::min(kGroups, count), *after);
  for (std::int64_t i = 0; i < kGroups; ++i) FindRange<kSize>(size, i, *after, nought);
  for (std::int64_t g = 0; g < count; g += kGroups) {
    std::swap(now, after);
    ComputeParams(d, *now);
    if (HWY_UNLIKELY(!now->finite)) nought = hn::NaN(t);
    hn::StoreU(hn::Load(t, now->stored_s), t, out.s + g);
    hn::StoreU(hn::Load(t, now->stored_b), t, out.b + g);
    const std::int64_t rest = count - g - kGroups;
    if (rest > 0) weights.Load(first + g + kGroups, std::min(kGroups, rest), *after);
    // In order: the padding behind a group's codes is overwritten by the next group's. The next
    // chunk's ranges fill the time the divisions take.
    for (std::int64_t i = 0; i < std::min(kGroups, count - g); ++i) {
      QuantizeGroup<kHalfEven, kOnce>(*now, i, size, bins, row(g + i));
      if (rest > 0) {
        FindRange<kSize>(size, i, *after, nought);
        weights.Prefetch(after->w[i]);
      }
    }
    if (HWY_UNLIKELY(now->any_halved)) {
      for (std::int64_t i = 0; i < std::min(kGroups, count - g); ++i)
        if (now->halved[i]) QuantizeHalved(d, now->w[i], {now->s[i], now->b[i]}, row(g + i));
    }
  }
  hn::Store(nought, t, out.nought);
}

// ---- blocks ----

// Calls compute(first, count, results) for each block, and writes the results. False when a weight
// is not finite.
template <class F, class Compute>
HWY_INLINE bool ForBlocks(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                          std::int64_t end, bool nibbles, const Compute& compute) {
  const Blocks blocks(d);
  const CodeWriter writer(d, a.q, nibbles);
  Results<F> results;
  for (std::int64_t i = begin; i < end; ++i) {
    const auto [first, count] = blocks[i];
    compute(first, count, results);
    StoreParams(results.s, first, count, a.scales);
    StoreParams(results.b, first, count, a.biases);
    writer.Write(first, count, results.codes);
  }
  writer.Finish();
  return hn::AllTrue(Tag<F>(), hn::Eq(hn::Load(Tag<F>(), results.nought), hn::Zero(Tag<F>())));
}

template <class X, bool kOnce, bool kWeighted, int kSize>
HWY_NOINLINE bool InitLsq(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                          std::int64_t end) {
  using F = Math<X>;
  const Weights<X> weights(d, a.w);
  Chunk<X> chunk;
  Lsq<X, kOnce, kWeighted, kSize> lsq(d, a);
  return ForBlocks<F>(d, a, begin, end, false,
                      [&](std::int64_t first, std::int64_t count, Results<F>& results)
                          HWY_ATTR { lsq.Block(weights, first, count, chunk, results); });
}

template <class X, bool kOnce, bool kHalfEven, int kSize>
HWY_NOINLINE bool InitDirect(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                             std::int64_t end) {
  using F = Math<X>;
  const Weights<X> weights(d, a.w);
  Chunk<X> chunks[2];
  const bool nibbles = kSize % (4 * kRow) == 0 && kSize != 0 && sizeof(F) == 4 &&
                       d.storage == CodeStorage::packed && d.code_bits() == 4;
  return ForBlocks<F>(d, a, begin, end, nibbles,
                      [&](std::int64_t first, std::int64_t count, Results<F>& results) HWY_ATTR {
                        DirectBlock<kHalfEven, kOnce, kSize>(d, weights, first, count, nibbles,
                                                             chunks, results);
                      });
}

template <class X, bool kShortScale, int kSize>
bool InitAs(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  switch (d.method) {
    case AffineMethod::minmax: return InitDirect<X, kShortScale, false, kSize>(d, a, begin, end);
    case AffineMethod::mlx:
      return InitDirect<X, std::is_same_v<X, bf16>, true, kSize>(d, a, begin, end);
    case AffineMethod::lsq: break;
  }
  if (a.importance) return InitLsq<X, kShortScale, true, 0>(d, a, begin, end);
  return InitLsq<X, kShortScale, false, kSize>(d, a, begin, end);
}

template <class X, bool kShortScale>
bool InitSized(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  if (d.group_size == 64) return InitAs<X, kShortScale, 64>(d, a, begin, end);
  return InitAs<X, kShortScale, 0>(d, a, begin, end);
}

// bf16, which most models have, is read as it is where groups are whole pairs of rows; other halves
// by way of f32 copies.
bool InitBlocks(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  if (d.element == DType::f64) return InitAs<double, false, 0>(d, a, begin, end);
  const bool short_scale = d.scale_element() != DType::f32;
  if (d.element == DType::bf16 && d.group_size % (2 * kRow) == 0) {
    return short_scale ? InitSized<bf16, true>(d, a, begin, end)
                       : InitSized<bf16, false>(d, a, begin, end);
  }
  return short_scale ? InitSized<float, true>(d, a, begin, end)
                     : InitSized<float, false>(d, a, begin, end);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using affine::Blocks;
using Op = QdqAffineInit;
BITTERN_EXPORT(InitBlocks);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  const Blocks blocks(d);
  const std::int64_t grain = (std::int64_t{1} << 16) / (blocks.length * d.group_size);
  std::atomic<bool> finite = true;
  cpu::parallel(blocks.size(), grain, [&](std::int64_t begin, std::int64_t end) {
    if (!BITTERN_CALL(InitBlocks)(d, a, begin, end)) finite = false;
  });
  return finite || !d.expect_finite ? Status() : Op::not_finite();
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<QdqAffineInit>> qdq_affine_init_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
