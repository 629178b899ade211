#include "bittern/ops/qdq_affine_backward.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/affine/qdq_affine_backward/qdq_affine_backward_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/reduce-inl.h"
#include "cpu/stream-inl.h"
#include "hwy/cache_control.h"
#include "ops/affine/codes-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = QdqAffineBackward;

// q * d_y and d_y of a group, for RowTree.
template <class D, class X>
struct GroupTerms {
  const std::uint8_t* HWY_RESTRICT q;
  const X* HWY_RESTRICT d_y;

  HWY_INLINE TwoTerms<hn::Vec<D>> Of(std::int64_t i, const X* at) const {
    const auto v = LoadMath(D(), at);
    return {hn::Mul(LoadCodes(D(), q + i), v), v};
  }
  HWY_INLINE TwoTerms<hn::Vec<D>> operator()(std::int64_t i) const { return Of(i, d_y + i); }
  HWY_INLINE TwoTerms<hn::Vec<D>> operator()(std::int64_t i, std::int64_t count) const {
    X padded[hn::MaxLanes(D())] = {};
    std::memcpy(padded, d_y + i, static_cast<std::size_t>(count) * sizeof(X));
    return Of(i, padded);
  }
};

// out[0, count): the trees inside the vectors v, over their first `width` lanes.
template <class D, class S>
HWY_INLINE void StoreSums(D d, hn::Vec<D>* v, std::int64_t width, std::int64_t count, S* out) {
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));
  alignas(64) hn::TFromD<D> sums[kLanes];
  if (width == kLanes) {
    const auto all = LaneTrees(d, v);
    if (count == kLanes) {
      StoreMath(d, all, out);
      return;
    }
    hn::Store(all, d, sums);
  } else {
    for (std::int64_t k = 0; k < count; ++k) sums[k] = LaneTree(d, v[k], width);
  }
  for (std::int64_t k = 0; k < count; ++k) out[k] = from_math<S>(sums[k]);
}

// As many groups at once as a vector has lanes: the trees inside vectors are then transposed. kRows
// is the number of vectors in a group, or 0: any group.
template <int kRows, class X, class S>
void SumGroups(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  using D = hn::ScalableTag<Math<X>>;
  const D df;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));
  const std::int64_t size = kRows != 0 ? kRows * kLanes : d.group_size;
  // Consecutive groups of a row whose codes are read together, from a multiple of 8.
  const std::int64_t window = std::max<std::int64_t>((cpu::kCodeChunk - 8) / size, 1);
  CodeReader reader(d, a.q);
  GroupTerms<D, X> terms{};
  hn::Vec<D> scale_terms[kLanes], bias_terms[kLanes];
  for (std::int64_t k = 0; k < kLanes; ++k) scale_terms[k] = bias_terms[k] = hn::Zero(df);
  std::int64_t ready = 0;
  for (std::int64_t first = begin; first < end; first += kLanes) {
    const std::int64_t count = std::min(kLanes, end - first);
    for (std::int64_t k = 0; k < count; ++k) {
      if (ready == 0) {
        const std::int64_t group = first + k, row = group / d.num_groups();
        ready = std::min(std::min((row + 1) * d.num_groups(), end) - group, window);
        const std::int64_t j = group % d.num_groups() * size;
        terms.q = reader.Read(row, j / 8 * 8, j % 8 + ready * size) + j % 8;
        terms.d_y = a.d_y.as<X>() + row * a.d_y.row_stride() + j;
      }
      PrefetchNext(terms.d_y, size);
      const auto tree = [&]() HWY_ATTR {
        if constexpr (kRows != 0) {
          return FewRows<kRows>(df, terms, 0, 1);
        } else {
          return RowTree(df, size, terms);
        }
      }();
      scale_terms[k] = tree.first;
      bias_terms[k] = tree.second;
      terms.q += size;
      terms.d_y += size;
      --ready;
    }
    const std::int64_t width = RowWidth(df, size);
    if (a.d_scales) StoreSums(df, scale_terms, width, count, a.d_scales.as<S>() + first);
    if (a.d_biases) StoreSums(df, bias_terms, width, count, a.d_biases.as<S>() + first);
  }
}

template <class X, class S>
void SumGroupsOf(const Op::Desc& d, const Op::Args& a, std::int64_t begin, std::int64_t end) {
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(hn::ScalableTag<Math<X>>()));
  if (d.group_size == 4 * kLanes) return SumGroups<4, X, S>(d, a, begin, end);
  if (d.group_size == 8 * kLanes) return SumGroups<8, X, S>(d, a, begin, end);
  SumGroups<0, X, S>(d, a, begin, end);
}

void RunQdqAffineBackward(const Op::Desc& d, const Op::Args& a, std::int64_t begin,
                          std::int64_t end) {
  (void)visit_float(d.element, [&]<class X>(Type<X>) {
    if constexpr (std::is_same_v<X, f16> || std::is_same_v<X, bf16>) {
      if (d.f32_scale) {
        SumGroupsOf<X, float>(d, a, begin, end);
        return Status();
      }
    }
    SumGroupsOf<X, X>(d, a, begin, end);
    return Status();
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = QdqAffineBackward;
BITTERN_EXPORT(RunQdqAffineBackward);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  cpu::parallel(
      d.outer_size * d.num_groups(), cpu::kGrain / d.group_size,
      [&](std::int64_t begin, std::int64_t end) {
        BITTERN_CALL(RunQdqAffineBackward)(d, a, begin, end);
      },
      16);
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<QdqAffineBackward>> qdq_affine_backward_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
