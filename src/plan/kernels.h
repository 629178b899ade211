// Every op's kernels. An op's own files do not see this, so that a new op recompiles none of them.
#pragma once
#include <vector>

#include "bittern/bittern.h"
#include "plan/kernel.h"

namespace bittern {

// The kernels of `device` in order of preference; specialised per op.
template <class Op>
Result<std::vector<std::span<const Kernel<Op>>>> kernels_for(Device device);

#define BITTERN_IF_0(...)
#define BITTERN_IF_1(...) __VA_ARGS__
#define BITTERN_OP(T, f, CPU, CUDA)                                         \
  std::span<const Kernel<T>> f##_ref();                                     \
  BITTERN_IF_##CPU(std::span<const Kernel<T>> f##_cpu();)                   \
      BITTERN_IF_##CUDA(std::span<const Kernel<T>> f##_cuda();) template <> \
      Result<std::vector<std::span<const Kernel<T>>>> kernels_for<T>(Device);
#include "ops/ops.inc"

}  // namespace bittern
