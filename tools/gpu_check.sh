#!/usr/bin/env bash
# tools/gpu_check.sh BUILD: on a machine with a GPU, the CUDA tests (none may be skipped), the memory
# checker over a part of them where it is installed, and the speed of quantize_per_group beside a
# copy. BUILD is a build folder made with -DBITTERN_STATIC_TESTS=ON; of it only bittern_test,
# cuda_bench, libbittern_cuda.so and fixtures/ are needed.
set -euo pipefail
build=$(cd "${1:?usage: tools/gpu_check.sh BUILD}" && pwd)
export BITTERN_REQUIRE_CUDA=1
unset BITTERN_CUDA_PLUGIN BITTERN_KERNEL BITTERN_ISA

nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv,noheader
echo "== tests"
"$build/bittern_test" --gtest_brief=1 --gtest_filter='Cuda*:*MatchesRefEverywhere*:CApi*'
echo "== memory checker"
if checker=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1) && [[ $checker ]]; then
  "$checker" --tool memcheck --error-exitcode 1 "$build/bittern_test" --gtest_brief=1 --gtest_filter='Cuda.*'
else
  echo "compute-sanitizer is not installed: skipped"
fi
echo "== speed"
"$build/cuda_bench" 28
