// A thread packs a unit of 32 codes, which is `bits` whole words. Widths that fill a 4-, 8- or
// 16-byte store write it at once; for the others a warp lays its words out in shared memory, thread
// t's at t * bits, and writes them as whole lines.
#include "bittern/ops/pack_codes.h"
#include "cuda/device.cuh"
#include "cuda/runtime.cuh"
#include "cuda/tree.cuh"
#include "ops/affine/codes.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = PackCodes;
using cuda::Pack;

constexpr int kUnit = 32;  // codes

using Problem = cuda::PackedUnits<const std::uint8_t, std::uint32_t, kUnit>;

// Widths whose units are one aligned vector of words, or two.
constexpr bool is_vector(int bits) { return bits == 1 || bits == 2 || bits == 4 || bits == 8; }

template <int kBits>
__device__ void pack_unit(const std::uint32_t (&bytes)[kUnit / 4], std::uint32_t (&words)[kBits]) {
  if constexpr (kBits == 4) {
    // The odd codes move to the upper halves of the even bytes, and these close up.
    const auto pairs = [&](int i) {
      return (bytes[i] & 0x0f0f0f0fu) | (bytes[i] >> 4 & 0xf0f0f0f0u);
    };
#pragma unroll
    for (int i = 0; i < kBits; ++i) words[i] = __byte_perm(pairs(2 * i), pairs(2 * i + 1), 0x6420);
  } else {
#pragma unroll
    for (int i = 0; i < kBits; ++i) words[i] = 0;
#pragma unroll
    for (int f = 0; f < kUnit / 4; ++f) {
      constexpr int kField = 4 * kBits;
      const std::uint32_t field = cuda::close_up<kBits>(bytes[f]);
      const int word = f * kField / 32, shift = f * kField % 32;
      words[word] |= field << shift;
      if (shift + kField > 32) words[word + 1] |= field >> (32 - shift) % 32;
    }
  }
}

template <int kBits>
__global__ void __launch_bounds__(cuda::kBlock) pack(const Problem p) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t unit = std::int64_t{blockIdx.x} * cuda::kBlock + threadIdx.x;
  const std::int64_t row = p.one_row ? 0 : p.row_units.divide(unit);
  const std::int64_t at = unit - row * p.row_units.value();
  const std::int64_t left = unit < p.units ? p.row_length - at * kUnit : 0;
  const int count = left < kUnit ? static_cast<int>(left) : kUnit;
  const std::uint8_t* from = p.codes + row * p.codes_stride + at * kUnit;
  std::uint32_t bytes[kUnit / 4], words[kBits];
  if (p.aligned && count == kUnit) {
#pragma unroll
    for (int i = 0; i < kUnit / 16; ++i) {
      const auto v =
          Pack<std::uint32_t, 4>::load(reinterpret_cast<const std::uint32_t*>(from) + 4 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) bytes[4 * i + j] = v.at[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kUnit / 4; ++i) {
      bytes[i] = 0;
      for (int j = 0; j < 4; ++j)
        if (4 * i + j < count) bytes[i] |= std::uint32_t{from[4 * i + j]} << 8 * j;
    }
  }
  pack_unit<kBits>(bytes, words);
  std::uint32_t* to = p.words + row * p.words_stride + at * kBits;
  if constexpr (is_vector(kBits)) {
    if (p.aligned && count == kUnit) {
      constexpr int kWide = kBits < 4 ? kBits : 4;
#pragma unroll
      for (int i = 0; i < kBits; i += kWide) {
        Pack<std::uint32_t, kWide> v;
#pragma unroll
        for (int j = 0; j < kWide; ++j) v.at[j] = words[i + j];
        v.store(to + i);
      }
      return;
    }
  } else {
    __shared__ std::uint32_t staged[cuda::kBlock * kBits];
    std::uint32_t* warp = staged + (static_cast<int>(threadIdx.x) - lane) * kBits;
    // Do the warp's units follow each other? Then its words lie from its first lane's on.
    auto* start = reinterpret_cast<std::uint32_t*>(
        __shfl_sync(cuda::kWarp, reinterpret_cast<unsigned long long>(to), 0));
    if (__all_sync(cuda::kWarp, count == kUnit && to == start + lane * kBits)) {
#pragma unroll
      for (int i = 0; i < kBits; ++i) warp[lane * kBits + i] = words[i];
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kBits; ++i) __stcs(start + i * 32 + lane, warp[i * 32 + lane]);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kBits; ++i)
    if (i * 32 < count * kBits) to[i] = words[i];
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  const Problem p(d, a.codes, a.packed, !is_vector(d.bits) ? 4 : d.bits < 4 ? 4u * d.bits : 16);
  return cuda::visit_bits(d.bits, [&](auto width) {
    return cuda::launch(Op::kName, pack<width()>, cuda::grid_for(p.units), a.packed.device.index,
                        stream, p);
  });
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<PackCodes>> pack_codes_cuda() { return kKernels; }

}  // namespace bittern
