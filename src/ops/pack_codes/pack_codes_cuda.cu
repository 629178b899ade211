// A thread packs units of 32 codes, which are `bits` whole words. Widths that fill a 4-, 8- or
// 16-byte store write it at once; for the others a warp lays its words out in shared memory, thread
// t's at t * bits, and writes them as whole lines.
#include "bittern/ops/pack_codes.h"
#include "cuda/codes.cuh"
#include "cuda/device.cuh"
#include "cuda/runtime.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = PackCodes;
using cuda::Divisor;
using cuda::Pack;

constexpr int kUnit = 32;  // codes
constexpr int kUnits = 2;  // of a thread, all read before the first is packed

struct Problem {
  const std::uint8_t* codes;
  std::uint32_t* words;
  std::int64_t codes_stride, words_stride, row_length;
  std::int64_t units;
  Divisor row_units;  // the last unit of a row may be short
  bool aligned;       // 16 bytes of codes may be read, and the words of a unit written, at once
};

// Widths whose units are one aligned vector of words, or two.
constexpr bool is_vector(int bits) { return bits == 1 || bits == 2 || bits == 4 || bits == 8; }

template <int kBits>
__device__ void pack_unit(const std::uint32_t (&bytes)[kUnit / 4], std::uint32_t (&words)[kBits]) {
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

template <int kBits>
__global__ void __launch_bounds__(cuda::kBlock) pack(const Problem p) {
  constexpr int kTile = cuda::kBlock * kUnits;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t first = std::int64_t{blockIdx.x} * kTile + threadIdx.x;
  std::uint32_t bytes[kUnits][kUnit / 4];
  std::uint32_t* to[kUnits];
  int count[kUnits];  // codes
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const std::int64_t unit = first + k * cuda::kBlock;
    const std::int64_t row = p.row_units.divide(unit), at = unit - row * p.row_units.value();
    const std::int64_t left = unit < p.units ? p.row_length - at * kUnit : 0;
    const std::uint8_t* from = p.codes + row * p.codes_stride + at * kUnit;
    to[k] = p.words + row * p.words_stride + at * kBits;
    count[k] = left < kUnit ? static_cast<int>(left) : kUnit;
    if (p.aligned && count[k] == kUnit) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 x = __ldcs(reinterpret_cast<const uint4*>(from) + i);
        bytes[k][4 * i] = x.x;
        bytes[k][4 * i + 1] = x.y;
        bytes[k][4 * i + 2] = x.z;
        bytes[k][4 * i + 3] = x.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kUnit / 4; ++i) {
        bytes[k][i] = 0;
        for (int j = 0; j < 4; ++j)
          if (4 * i + j < count[k]) bytes[k][i] |= std::uint32_t{from[4 * i + j]} << 8 * j;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    std::uint32_t words[kBits];
    pack_unit<kBits>(bytes[k], words);
    if constexpr (is_vector(kBits)) {
      if (p.aligned && count[k] == kUnit) {
        constexpr int kWide = kBits < 4 ? kBits : 4;
#pragma unroll
        for (int i = 0; i < kBits; i += kWide) {
          Pack<std::uint32_t, kWide> v;
#pragma unroll
          for (int j = 0; j < kWide; ++j) v.at[j] = words[i + j];
          v.store(to[k] + i);
        }
        continue;
      }
    } else {
      // The warp's units follow each other when its last is where the first one's row puts it.
      __shared__ std::uint32_t staged[cuda::kBlock * kBits];
      std::uint32_t* warp = staged + (threadIdx.x - lane) * kBits;
      std::uint32_t* start = reinterpret_cast<std::uint32_t*>(
          __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(to[k]), 0));
      if (__all_sync(0xffffffffu, count[k] == kUnit && to[k] == start + lane * kBits)) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kBits; ++i) warp[lane * kBits + i] = words[i];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kBits; ++i) __stcs(start + i * 32 + lane, warp[i * 32 + lane]);
        continue;
      }
    }
#pragma unroll
    for (int i = 0; i < kBits; ++i)
      if (i * 32 < count[k] * kBits) to[k][i] = words[i];
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  const std::int64_t rows = d.outer_size, bits = d.bits;
  const bool one_row =
      rows <= 1 || (d.axis_size * bits % 32 == 0 && a.codes.row_stride() == d.axis_size &&
                    a.words.row_stride() == d.axis_size * bits / 32);
  const std::int64_t length = one_row ? rows * d.axis_size : d.axis_size;
  const std::int64_t row_units = (length + kUnit - 1) / kUnit;
  const auto lies_on = [&](const void* data, std::int64_t stride_bytes, std::uintptr_t align) {
    return reinterpret_cast<std::uintptr_t>(data) % align == 0 &&
           (one_row || stride_bytes % static_cast<std::int64_t>(align) == 0);
  };
  const std::uintptr_t word_align = !is_vector(d.bits) ? 4 : d.bits < 4 ? 4u * d.bits : 16;
  const Problem p{.codes = a.codes.as<std::uint8_t>(),
                  .words = a.words.as<std::uint32_t>(),
                  .codes_stride = a.codes.row_stride(),
                  .words_stride = a.words.row_stride(),
                  .row_length = length,
                  .units = (one_row ? 1 : rows) * row_units,
                  .row_units = Divisor(row_units),
                  .aligned = lies_on(a.codes.data, a.codes.row_stride(), 16) &&
                             lies_on(a.words.data, 4 * a.words.row_stride(), word_align)};
  return cuda::visit_bits(d.bits, [&](auto width) {
    return cuda::launch(Op::kName, pack<width()>, cuda::grid_for((p.units + kUnits - 1) / kUnits),
                        a.words.device.index, stream, p);
  });
}

constexpr Kernel<Op> kKernels[] = {
    {.name = "cuda", .backend = "cuda", .architecture = cuda::architecture, .run = run}};

}  // namespace

std::span<const Kernel<PackCodes>> pack_codes_cuda() { return kKernels; }

}  // namespace bittern
