// A thread unpacks units of 16 codes into one 16-byte store. Unit l of a row is the 16 * bits bits
// from half word l * bits on: (bits + 1) / 2 words, from the upper half of the first where l * bits
// is odd. Neighbours share words, and lines, through L1.
#include "bittern/ops/unpack_codes.h"
#include "cuda/codes.cuh"
#include "cuda/device.cuh"
#include "cuda/runtime.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = UnpackCodes;
using cuda::Divisor;
using cuda::Pack;

constexpr int kUnit = 16;  // codes
constexpr int kUnits = 4;  // of a thread, all read before the first is unpacked

struct Problem {
  const std::uint32_t* words;
  std::uint8_t* codes;
  std::int64_t words_stride, codes_stride, row_length;
  std::int64_t units;
  Divisor row_units;  // the last unit of a row may be short
  bool aligned;       // 16 bytes of codes may be written, and the words of a unit read, at once
};

// Widths whose units are one aligned vector of words.
constexpr bool is_vector(int bits) { return bits == 2 || bits == 4 || bits == 8; }

template <int kBits>
__global__ void __launch_bounds__(cuda::kBlock) unpack(const Problem p) {
  constexpr int kTile = cuda::kBlock * kUnits, kWords = (kBits + 1) / 2;
  const std::int64_t first = std::int64_t{blockIdx.x} * kTile + threadIdx.x;
  std::uint32_t words[kUnits][kWords];
  std::uint8_t* to[kUnits];
  int count[kUnits];  // codes
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const std::int64_t unit = first + k * cuda::kBlock;
    const std::int64_t row = p.row_units.divide(unit), at = unit - row * p.row_units.value();
    const std::int64_t left = unit < p.units ? p.row_length - at * kUnit : 0;
    const std::uint32_t* from = p.words + row * p.words_stride + at * kBits / 2;
    const int shift = kBits % 2 == 0 ? 0 : static_cast<int>(at % 2) * 16;
    to[k] = p.codes + row * p.codes_stride + at * kUnit;
    count[k] = left < kUnit ? static_cast<int>(left) : kUnit;
    if (is_vector(kBits) && p.aligned && count[k] == kUnit) {
      using Words = Pack<std::uint32_t, is_vector(kBits) ? kWords : 1>;
      const auto v = Words::load(from);
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[k][i] = v.at[i];
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        words[k][i] = i * 32 < shift + count[k] * kBits ? __ldg(from + i) : 0;
    }
    if constexpr (kBits % 2 != 0) {
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        words[k][i] = __funnelshift_r(words[k][i], i + 1 < kWords ? words[k][i + 1] : 0u,
                                      static_cast<unsigned>(shift));
    }
  }
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    Pack<std::uint32_t, kUnit / 4> codes;
#pragma unroll
    for (int f = 0; f < kUnit / 4; ++f) {
      const int word = f * 4 * kBits / 32, shift = f * 4 * kBits % 32;
      const std::uint32_t next = word + 1 < kWords ? words[k][word + 1] : 0;
      const std::uint32_t field =
          shift + 4 * kBits > 32
              ? __funnelshift_r(words[k][word], next, static_cast<unsigned>(shift))
              : words[k][word] >> shift;
      codes.at[f] = cuda::spread_out<kBits>(field);
    }
    if (p.aligned && count[k] == kUnit) {
      codes.store(reinterpret_cast<std::uint32_t*>(to[k]));
    } else {
#pragma unroll
      for (int j = 0; j < kUnit; ++j)
        if (j < count[k]) to[k][j] = static_cast<std::uint8_t>(codes.at[j / 4] >> j % 4 * 8);
    }
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
  const std::uintptr_t word_align = is_vector(d.bits) ? 2u * d.bits : 4;
  const Problem p{.words = a.words.as<std::uint32_t>(),
                  .codes = a.codes.as<std::uint8_t>(),
                  .words_stride = a.words.row_stride(),
                  .codes_stride = a.codes.row_stride(),
                  .row_length = length,
                  .units = (one_row ? 1 : rows) * row_units,
                  .row_units = Divisor(row_units),
                  .aligned = lies_on(a.codes.data, a.codes.row_stride(), 16) &&
                             lies_on(a.words.data, 4 * a.words.row_stride(), word_align)};
  return cuda::visit_bits(d.bits, [&](auto width) {
    return cuda::launch(Op::kName, unpack<width()>, cuda::grid_for((p.units + kUnits - 1) / kUnits),
                        a.codes.device.index, stream, p);
  });
}

constexpr Kernel<Op> kKernels[] = {
    {.name = "cuda", .backend = "cuda", .architecture = cuda::architecture, .run = run}};

}  // namespace

std::span<const Kernel<UnpackCodes>> unpack_codes_cuda() { return kKernels; }

}  // namespace bittern
