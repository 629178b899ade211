// A thread unpacks a unit of 16 codes into one 16-byte store. Unit l of a row is the 16 * bits bits
// from half word l * bits on: (bits + 1) / 2 words, from the upper half of the first where l * bits
// is odd. Neighbours share words, and lines, through L1.
#include "bittern/ops/unpack_codes.h"
#include "cuda/device.cuh"
#include "cuda/runtime.cuh"
#include "ops/affine/codes.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = UnpackCodes;
using cuda::Pack;

constexpr int kUnit = 16;  // codes

using Problem = cuda::PackedUnits<std::uint8_t, const std::uint32_t, kUnit>;

// Widths whose units are one aligned vector of words.
constexpr bool is_vector(int bits) { return bits == 2 || bits == 4 || bits == 8; }

template <int kBits>
__global__ void __launch_bounds__(cuda::kBlock) unpack(const Problem p) {
  constexpr int kWords = (kBits + 1) / 2;
  const std::int64_t unit = std::int64_t{blockIdx.x} * cuda::kBlock + threadIdx.x;
  if (unit >= p.units) return;
  const std::int64_t row = p.one_row ? 0 : p.row_units.divide(unit);
  const std::int64_t at = unit - row * p.row_units.value(), left = p.row_length - at * kUnit;
  const int count = left < kUnit ? static_cast<int>(left) : kUnit;
  const std::uint32_t* from = p.words + row * p.words_stride + at * kBits / 2;
  const int shift = kBits % 2 == 0 ? 0 : static_cast<int>(at % 2) * 16;
  std::uint32_t words[kWords];
  if (is_vector(kBits) && p.aligned && count == kUnit) {
    const auto v = Pack < std::uint32_t, is_vector(kBits) ? kWords : 1 > ::load(from);
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = v.at[i];
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      words[i] = i * 32 < shift + count * kBits ? __ldg(from + i) : 0;
  }
  if constexpr (kBits % 2 != 0) {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      words[i] = __funnelshift_r(words[i], i + 1 < kWords ? words[i + 1] : 0u,
                                 static_cast<unsigned>(shift));
  }
  Pack<std::uint32_t, kUnit / 4> codes;
  if constexpr (kBits == 4) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const std::uint32_t even = words[i] & 0x0f0f0f0fu, odd = words[i] >> 4 & 0x0f0f0f0fu;
      codes.at[2 * i] = __byte_perm(even, odd, 0x5140);
      codes.at[2 * i + 1] = __byte_perm(even, odd, 0x7362);
    }
  } else {
#pragma unroll
    for (int f = 0; f < kUnit / 4; ++f) {
      const int word = f * 4 * kBits / 32, low = f * 4 * kBits % 32;
      const std::uint32_t next = word + 1 < kWords ? words[word + 1] : 0;
      codes.at[f] = cuda::spread_out<kBits>(
          low + 4 * kBits > 32 ? __funnelshift_r(words[word], next, static_cast<unsigned>(low))
                               : words[word] >> low);
    }
  }
  std::uint8_t* to = p.codes + row * p.codes_stride + at * kUnit;
  if (p.aligned && count == kUnit) {
    codes.store(reinterpret_cast<std::uint32_t*>(to));
  } else {
#pragma unroll
    for (int j = 0; j < kUnit; ++j)
      if (j < count) to[j] = static_cast<std::uint8_t>(codes.at[j / 4] >> j % 4 * 8);
  }
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  const Problem p(d, a.codes, a.packed, is_vector(d.bits) ? 2u * d.bits : 4);
  return cuda::visit_bits(d.bits, [&](auto width) {
    return cuda::launch(Op::kName, unpack<width()>, cuda::grid_for(p.units), a.codes.device.index,
                        stream, p);
  });
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<UnpackCodes>> unpack_codes_cuda() { return kKernels; }

}  // namespace bittern
