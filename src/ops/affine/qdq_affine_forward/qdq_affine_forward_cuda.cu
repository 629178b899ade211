// Rows are cut into chunks of V elements that share a group, a thread each: one 16-byte store, so
// that a warp writes whole lines. The parameters come through L1. More chunks a thread were slower:
// writes are 4/5 of the traffic, and what counts beside them is the number of instructions, so the
// common layout has a kernel of its own.
#include <bit>
#include <cmath>

#include "bittern/ops/qdq_affine_forward.h"
#include "cuda/device.cuh"
#include "cuda/runtime.cuh"
#include "ops/affine/codes.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = QdqAffineForward;
using cuda::CodeRow;
using cuda::Divisor;
using cuda::Pack;

struct Problem {
  const void *q, *scales, *biases;
  void* y;
  std::int64_t q_stride, y_stride, row_groups;
  std::int64_t chunks;
  Divisor row_chunks, group_chunks;
  bool one_row;  // or rows that follow each other as one
  int bits;
  bool once;
};

// q * s + b as an X: see the header.
template <class X>
__device__ X affine_value(Math<X> code, Math<X> s, Math<X> b, bool once) {
  if (once) return cuda::store_math<X>(std::fma(code, s, b));
  return cuda::store_math<X>(cuda::load_math(cuda::store_math<X>(code * s)) + b);
}

// Code i of a field. Of 4 bits, the even ones and the odd ones are bytes of a word each.
template <class F, int kBits, class Codes>
__device__ F code_at(Codes field, int i) {
  const int byte = i * kBits / 8;
  const auto word = static_cast<std::uint32_t>(field >> 32 * (byte / 4));
  if constexpr (kBits == 8) {
    return cuda::small_byte<F>(word, byte % 4);
  } else {
    return cuda::small_byte<F>((i % 2 == 0 ? word : word >> 4) & 0x0f0f0f0fu, byte % 4);
  }
}

constexpr int kDenseBlock = 128;
constexpr unsigned kAhead = 4096;  // blocks, twice what an H200 holds

// Brings into the L2 what blocks that come later will read: 32 lines of codes, by the first warp of
// one block in a few, and the parameters of their chunks, by its second.
template <class Codes, class S>
__device__ void ask_ahead(const Codes* codes, const S* scales, const S* biases, unsigned chunks,
                          unsigned group_shift) {
  constexpr unsigned kLine = 128, kChunks = 32 * kLine / sizeof(Codes);
  const unsigned first = (blockIdx.x + kAhead) * kDenseBlock, end = first + kChunks;
  const unsigned lane = threadIdx.x % 32;
  if (blockIdx.x % (kChunks / kDenseBlock) != 0 || threadIdx.x >= 64 || end > chunks) return;
  if (threadIdx.x < 32) {
    cuda::prefetch_l2(codes + first + lane * (kLine / sizeof(Codes)));
  } else {
    const unsigned group = (first >> group_shift) + lane % 16 * (kLine / sizeof(S));
    if (group < end >> group_shift) cuda::prefetch_l2((lane < 16 ? scales : biases) + group);
  }
}

// Rows without gaps, groups of a power of two, codes in bytes (kBits = 8) or packed to 4 bits: no
// index is divided. A thread has little else to do than to wait for what it reads; with the L2
// asked ahead, f32 of bytes reach 0.98 of a copy's rate on an H200, not 0.94.
template <class X, class S, int kBits, bool kOnce>
__global__ void __launch_bounds__(kDenseBlock)
    dequantize_dense(const void* q, const S* scales, const S* biases, X* y, unsigned chunks,
                     unsigned group_shift) {
  using F = Math<X>;
  constexpr int V = 16 / sizeof(X);
  using Codes = cuda::Bits<V * kBits>;
  const auto* codes = static_cast<const Codes*>(q);
  const unsigned chunk = blockIdx.x * kDenseBlock + threadIdx.x;
  if (chunk >= chunks) return;
  const Codes field = __ldcs(codes + chunk);
  const F s = cuda::load_math(scales[chunk >> group_shift]);
  const F b = cuda::load_math(biases[chunk >> group_shift]);
  ask_ahead(codes, scales, biases, chunks, group_shift);
  Pack<X, V> to;
#pragma unroll
  for (int i = 0; i < V; ++i) to.at[i] = affine_value<X>(code_at<F, kBits>(field, i), s, b, kOnce);
  to.store(y + std::size_t{chunk} * V);
}

// Any layout.
template <class X, class S, int V, bool kPacked>
__global__ void __launch_bounds__(cuda::kBlock) dequantize(const Problem p) {
  using F = Math<X>;
  constexpr int kField = V < 4 ? V : 4, kFields = V / kField;
  const std::int64_t chunk = std::int64_t{blockIdx.x} * cuda::kBlock + threadIdx.x;
  if (chunk >= p.chunks) return;
  const std::int64_t row = p.one_row ? 0 : p.row_chunks.divide(chunk);
  const std::int64_t in_row = chunk - row * p.row_chunks.value();
  const std::int64_t group = row * p.row_groups + p.group_chunks.divide(in_row);
  const CodeRow<kPacked> q(p.q, row * p.q_stride, p.bits);
  std::uint32_t fields[kFields];
#pragma unroll
  for (int i = 0; i < kFields; ++i) fields[i] = q.template field<kField>(in_row * V + i * kField);
  const F s = cuda::load_math(static_cast<const S*>(p.scales)[group]);
  const F b = cuda::load_math(static_cast<const S*>(p.biases)[group]);
  Pack<X, V> y;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const F code = q.template value<F>(fields[i / kField], i % kField);
    y.at[i] = affine_value<X>(code, s, b, p.once);
  }
  y.store(static_cast<X*>(p.y) + row * p.y_stride + in_row * V);
}

template <class X, class S, int V>
Status run_chunks(const Op::Desc& d, const Op::Args& a, Stream stream) {
  const bool one_row = cuda::codes_dense(d, a.q.row_stride()) &&
                       (d.outer_size <= 1 || a.y.row_stride() == d.axis_size);
  const Problem p{.q = a.q.data,
                  .scales = a.scales.data,
                  .biases = a.biases.data,
                  .y = a.y.data,
                  .q_stride = a.q.row_stride(),
                  .y_stride = a.y.row_stride(),
                  .row_groups = d.num_groups(),
                  .chunks = d.outer_size * (d.axis_size / V),
                  .row_chunks = Divisor(d.axis_size / V),
                  .group_chunks = Divisor(d.group_size / V),
                  .one_row = one_row,
                  .bits = d.code_bits(),
                  .once = d.rounding == AffineRounding::once};
  const int device = a.y.device.index, width = d.storage == CodeStorage::u8 ? 8 : p.bits;
  const auto group_chunks = static_cast<unsigned>(d.group_size / V);
  if constexpr (V >= 4) {
    if (one_row && std::has_single_bit(group_chunks) && (width == 4 || width == 8) &&
        p.chunks < std::int64_t{1} << 31 &&
        reinterpret_cast<std::uintptr_t>(p.q) % (V * width / 8) == 0) {
      const auto bytes =
          p.once ? dequantize_dense<X, S, 8, true> : dequantize_dense<X, S, 8, false>;
      const auto halves =
          p.once ? dequantize_dense<X, S, 4, true> : dequantize_dense<X, S, 4, false>;
      return cuda::launch(Op::kName, width == 8 ? bytes : halves,
                          cuda::grid_for(p.chunks, kDenseBlock), device, stream, p.q,
                          static_cast<const S*>(p.scales), static_cast<const S*>(p.biases),
                          static_cast<X*>(p.y), static_cast<unsigned>(p.chunks),
                          static_cast<unsigned>(std::countr_zero(group_chunks)));
    }
  }
  const auto kernel =
      d.storage == CodeStorage::packed ? dequantize<X, S, V, true> : dequantize<X, S, V, false>;
  return cuda::launch(Op::kName, kernel, cuda::grid_for(p.chunks), device, stream, p);
}

template <class X, class S>
Status run_typed(const Op::Desc& d, const Op::Args& a, Stream stream) {
  constexpr int kWide = 16 / sizeof(X), kField = kWide < 4 ? kWide : 4;
  const bool wide = d.group_size % kWide == 0 &&
                    cuda::codes_aligned<kField>(d, a.q.data, a.q.row_stride()) &&
                    cuda::packs_aligned<X, kWide>(a.y.data, d.outer_size, a.y.row_stride());
  return wide ? run_chunks<X, S, kWide>(d, a, stream) : run_chunks<X, S, 1>(d, a, stream);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    if constexpr (sizeof(X) == 2) {
      if (d.f32_scale) return run_typed<X, float>(d, a, stream);
    }
    return run_typed<X, X>(d, a, stream);
  });
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<QdqAffineForward>> qdq_affine_forward_cuda() { return kKernels; }

}  // namespace bittern
