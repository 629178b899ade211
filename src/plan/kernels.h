// Every op's kernels. An op's own files do not see this, so that a new op recompiles none of them.
#pragma once
#include "bittern/bittern.h"
#include "plan/kernel.h"

namespace bittern {

#define BITTERN_IF_0(...)
#define BITTERN_IF_1(...) __VA_ARGS__
#define BITTERN_OP(T, f, CPU, CUDA)                       \
  std::span<const Kernel<T>> f##_ref();                   \
  BITTERN_IF_##CPU(std::span<const Kernel<T>> f##_cpu();) \
      BITTERN_IF_##CUDA(std::span<const Kernel<T>> f##_cuda();)
#include "ops/ops.inc"

}  // namespace bittern
