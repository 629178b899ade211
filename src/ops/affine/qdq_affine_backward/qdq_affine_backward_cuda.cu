// Groups of 32, 64 and 128: a team of lanes per group, kGroups groups in a row. A lane reads 16
// bytes of d_y, V elements, in each of kLoads rows: element (i kLanes + t) V + j is value j of row
// i of lane t, so that the halving tree adds rows, then lanes, then the values of a lane. All
// others: a warp per group.
#include "bittern/ops/qdq_affine_backward.h"
#include "cuda/device.cuh"
#include "cuda/runtime.cuh"
#include "cuda/tree.cuh"
#include "ops/affine/codes.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = QdqAffineBackward;
using cuda::CodeRow;
using cuda::Divisor;
using cuda::Pack;
using cuda::Sums;

struct Problem {
  const void *q, *d_y;
  void *d_scales, *d_biases;  // either may be null
  DType scale_element;
  std::int64_t q_stride, d_y_stride;
  std::int64_t groups;
  Divisor row_groups;
  bool one_row;  // or rows that follow each other as one
  int group_size, bits;
};

template <class F>
__device__ void store_sum(void* sums, DType dtype, std::int64_t at, F sum) {
  if (sums == nullptr) return;
  if constexpr (sizeof(F) == 8) {
    static_cast<double*>(sums)[at] = sum;
  } else if (dtype == DType::f32) {
    static_cast<float*>(sums)[at] = sum;
  } else if (dtype == DType::f16) {
    static_cast<f16*>(sums)[at] = cuda::store_math<f16>(sum);
  } else {
    static_cast<bf16*>(sums)[at] = cuda::store_math<bf16>(sum);
  }
}

template <class X, int kLanes, int kLoads, int kGroups, bool kPacked>
__global__ void __launch_bounds__(cuda::kBlock) sum_teams(const Problem p) {
  constexpr int V = 16 / sizeof(X), kSize = kLanes * kLoads * V, kFields = V / 4;
  static_assert(kGroups <= kLanes / 2);
  const std::int64_t thread = std::int64_t{blockIdx.x} * cuda::kBlock + threadIdx.x;
  const int t = static_cast<int>(threadIdx.x % kLanes);
  const std::int64_t first = thread / kLanes * kGroups;
  Pack<X, V> d_y[kGroups][kLoads];
  std::uint32_t fields[kGroups][kLoads][kFields];
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    // Teams beyond the last group read it again, so that whole warps meet in the shuffles.
    const std::int64_t group = first + k < p.groups ? first + k : p.groups - 1;
    const std::int64_t row = p.one_row ? 0 : p.row_groups.divide(group);
    const std::int64_t j = (group - row * p.row_groups.value()) * kSize + t * V;
    const CodeRow<kPacked> q(p.q, row * p.q_stride, p.bits);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const std::int64_t at = j + i * kLanes * V;
      d_y[k][i] =
          Pack<X, V>::template load<true>(static_cast<const X*>(p.d_y) + row * p.d_y_stride + at);
#pragma unroll
      for (int f = 0; f < kFields; ++f) fields[k][i][f] = q.template field<4>(at + 4 * f);
    }
  }
  const CodeRow<kPacked> q(p.q, 0, p.bits);
  float sum = 0;  // lane t < kLanes / 2: d_scales of group t; the other half: d_biases
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    float scale[kLoads][V], bias[kLoads][V];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        bias[i][j] = cuda::load_math(d_y[k][i].at[j]);
        scale[i][j] = q.template value<float>(fields[k][i][j / 4], j % 4) * bias[i][j];
      }
    }
    cuda::row_tree(scale);
    cuda::row_tree(bias);
    const float tree = cuda::team_tree_of_two<kLanes>(scale[0], bias[0], t);
    if (t % (kLanes / 2) == k) sum = tree;
  }
  const std::int64_t group = first + t % (kLanes / 2);
  if (t % (kLanes / 2) < kGroups && group < p.groups)
    store_sum(t < kLanes / 2 ? p.d_scales : p.d_biases, p.scale_element, group, sum);
}

template <class X, bool kPacked>
__global__ void __launch_bounds__(cuda::kBlock) sum_groups(const Problem p) {
  using F = Math<X>;
  const std::int64_t group = (std::int64_t{blockIdx.x} * cuda::kBlock + threadIdx.x) / 32;
  if (group >= p.groups) return;
  const std::int64_t row = p.row_groups.divide(group);
  const std::int64_t first = (group - row * p.row_groups.value()) * p.group_size;
  const CodeRow<kPacked> q(p.q, row * p.q_stride, p.bits);
  const X* d_y = static_cast<const X*>(p.d_y) + row * p.d_y_stride + first;
  const auto sums = cuda::warp_tree<F, 2>(p.group_size, [&](int j) -> Sums<F, 2> {
    if (j >= p.group_size) return {};
    const F x = cuda::load_math(d_y[j]);
    return {q.template value<F>(q.template field<1>(first + j), 0) * x, x};
  });
  if (threadIdx.x % 32 == 0) store_sum(p.d_scales, p.scale_element, group, sums.at[0]);
  if (threadIdx.x % 32 == 1) store_sum(p.d_biases, p.scale_element, group, sums.at[1]);
}

template <class X, int kLanes, int kLoads, int kGroups, bool kPacked>
Status launch_teams(const Problem& p, int device, Stream stream) {
  const std::int64_t teams = (p.groups + kGroups - 1) / kGroups;
  return cuda::launch(Op::kName, sum_teams<X, kLanes, kLoads, kGroups, kPacked>,
                      cuda::grid_for(teams * kLanes), device, stream, p);
}

template <class X, bool kPacked>
Status run_typed(const Op::Desc& d, const Op::Args& a, Stream stream) {
  const bool one_row = cuda::codes_dense(d, a.q.row_stride()) &&
                       (d.outer_size <= 1 || a.d_y.row_stride() == d.axis_size);
  const Problem p{.q = a.q.data,
                  .d_y = a.d_y.data,
                  .d_scales = a.d_scales.data,
                  .d_biases = a.d_biases.data,
                  .scale_element = d.scale_element(),
                  .q_stride = a.q.row_stride(),
                  .d_y_stride = a.d_y.row_stride(),
                  .groups = d.outer_size * d.num_groups(),
                  .row_groups = Divisor(d.num_groups()),
                  .one_row = one_row,
                  .group_size = static_cast<int>(d.group_size),
                  .bits = d.code_bits()};
  const int device = a.d_y.device.index;
  if constexpr (sizeof(X) <= 4) {
    constexpr int V = 16 / sizeof(X);
    if (cuda::codes_aligned<4>(d, a.q.data, a.q.row_stride()) &&
        cuda::packs_aligned<X, V>(a.d_y.data, d.outer_size, a.d_y.row_stride())) {
      switch (d.group_size) {  // lanes x loads x V elements; 4 loads a thread keep the H200 busy
        case 32: return launch_teams<X, 32 / V, 1, 2, kPacked>(p, device, stream);
        case 64: return launch_teams<X, 8, 8 / V, V / 2, kPacked>(p, device, stream);
        case 128: return launch_teams<X, 8, 16 / V, V / 4, kPacked>(p, device, stream);
        default: break;
      }
    }
  }
  return cuda::launch(Op::kName, sum_groups<X, kPacked>, cuda::grid_for(32 * p.groups), device,
                      stream, p);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    return d.storage == CodeStorage::packed ? run_typed<X, true>(d, a, stream)
                                            : run_typed<X, false>(d, a, stream);
  });
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<QdqAffineBackward>> qdq_affine_backward_cuda() { return kKernels; }

}  // namespace bittern
