#!/usr/bin/env bash
# tools/gpu_check.sh BUILD [tests] [sanitizers] [bench]: on a machine with a GPU, without network and
# without our packages,
#   tests       every CUDA kernel against ref, bit for bit or within its bound, and the CUDA tests, none of them skipped
#   sanitizers  compute-sanitizer's memcheck and racecheck, one case in 8 of every op
#   bench       every op beside the device's copy
# all three by default. BUILD is a build folder made with -DBITTERN_STATIC_TESTS=ON; of it only
# bittern, bittern_test, libbittern_cuda.so and fixtures/ are needed. Logs go to LOGS (default: BUILD).
set -euo pipefail
build=$(cd "${1:?usage: tools/gpu_check.sh BUILD [tests] [sanitizers] [bench]}" && pwd)
shift
(($#)) || set -- tests sanitizers bench
logs=${LOGS:-$build}
export BITTERN_REQUIRE_CUDA=1
unset BITTERN_CUDA_PLUGIN BITTERN_KERNEL BITTERN_ISA
failed=0

# cuBLAS, for the GEMM rate: where no toolkit is installed, Python's packages may have it.
if ! ldconfig -p 2>/dev/null | grep -q libcublas.so; then
  packages=$(python3 -c 'import nvidia; print(*nvidia.__path__)' 2>/dev/null || true)
  cublas=$(find $packages /usr/local/cuda*/ -name 'libcublas.so.1[0-9]' -print -quit 2>/dev/null || true)
  if [[ $cublas ]]; then
    LD_LIBRARY_PATH=$(dirname "$cublas")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export LD_LIBRARY_PATH
  fi
fi

tests() {
  "$build/bittern" check --device cuda | tee "$logs/parity.log" || failed=1
  # To a file: a line per test is long, and what matters is the end.
  "$build/bittern_test" --gtest_filter='Cuda*:*.Cuda*' > "$logs/cuda_tests.log" 2>&1 || failed=1
  grep -E '^\[  (PASSED|FAILED|SKIPPED)' "$logs/cuda_tests.log" || true
  if grep -q '^\[  SKIPPED' "$logs/cuda_tests.log"; then failed=1; fi
}

# Eight ops at a time: the checkers keep the host busy, not the GPU.
sanitizers() {
  local checker
  checker=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1) || true
  if [[ -z $checker ]]; then
    echo "compute-sanitizer is not installed: skipped"
    return
  fi
  # shellcheck disable=SC2016
  "$build/bittern" ops | awk '/ cuda sm_/ {print $1 " memcheck"; print $1 " racecheck"}' |
    xargs -P 8 -L 1 bash -c '
      log="$2/sanitizer_$4_$3.log" code=0
      timeout "${SANITIZER_SECONDS:-120}" "$0" --tool "$4" --error-exitcode 9 "$1/bittern" check "$3" --quick \
        --device cuda --threads 1 > "$log" 2>&1 || code=$?
      case $code in
        0) verdict=ok ;;
        124) verdict="not finished in time, no finding so far" ;;
        *) verdict="FAILED (exit $code), see $log" ;;
      esac
      printf "%-34s %-10s %s\n" "$3" "$4" "$verdict"
      [[ $verdict != FAILED* ]]' "$checker" "$build" "$logs" | sort || failed=1
}

bench() { "$build/bittern" bench --device cuda --json "$logs/bench_cuda.json" --force | tee "$logs/bench_cuda.log" || failed=1; }

nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv,noheader 2>/dev/null || echo "no nvidia-smi here"
for stage in "$@"; do
  echo "== $stage"
  "$stage"
done
exit $failed
