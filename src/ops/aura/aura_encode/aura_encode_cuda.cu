#include "ops/aura/aura_encode/encode_dense.cuh"
#include "ops/aura/aura_encode/encode_lanes.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = AuraEncode;
using namespace encode;
using cuda::kFewRows;
using cuda::kWarpsOfRows;

// ---- a warp to a row ----

__global__ void __launch_bounds__(32 * kWarpsOfRows)
    encode_by_warps(const __grid_constant__ Problem p) {
  float* const scratch = cuda::dynamic_shared<float>() + warp_index() * 2 * p.rotation.dim;
  const std::int64_t warps = std::int64_t{gridDim.x} * kWarpsOfRows;
  for (std::int64_t row = std::int64_t{blockIdx.x} * kWarpsOfRows + warp_index(); row < p.rows;
       row += warps) {
    encode_row(p, row, scratch);
  }
}

Status run_by_warps(const Problem& p, int device, Stream stream) {
  const cuda::Grid grid{
      .blocks = (p.rows + kWarpsOfRows - 1) / kWarpsOfRows,
      .threads = 32 * kWarpsOfRows,
      .shared = sizeof(float) * 2 * kWarpsOfRows * static_cast<std::size_t>(p.rotation.dim)};
  return cuda::launch(Op::kName, encode_by_warps, grid, device, stream, p);
}

// ---- a block to many rows, for dense rotations ----

__global__ void __launch_bounds__(32 * cuda::DenseBlock::kMostWarps)
    encode_dense(const __grid_constant__ Problem p, const cuda::DenseBlock block) {
  constexpr int kRows = cuda::DenseBlock::kRows;
  auto* const tile = cuda::dynamic_shared<float>();
  const int floats =  // of a warp
      kRows * (2 * block.stride + static_cast<int>(sizeof(Length) / sizeof(float)));
  float* const x = tile + cuda::DenseBlock::kTileBytes / 4 + warp_index() * floats;
  float* const r = x + kRows * block.stride;
  auto* const lengths = reinterpret_cast<Length*>(r + kRows * block.stride);
  const std::int64_t step = std::int64_t{gridDim.x} * block.warps * kRows;
  for (std::int64_t base = std::int64_t{blockIdx.x} * block.warps * kRows; base < p.rows;
       base += step) {
    const std::int64_t first = base + warp_index() * kRows;
    const auto for_rows = [&](auto&& f) {
      for (int i = 0; i < kRows && first + i < p.rows; ++i) f(i);
    };
    for_rows([&](int i) {
      float* const u = x + i * block.stride;
      const Length length = measure_row(p, first + i, u);
      for (int j = lane_index(); j < p.rotation.dim; j += 32) u[j] *= length.inv;
      if (lane_index() == 0) lengths[i] = length;
    });
    __syncwarp();
    block.rotate(p.rotation, x, r, tile);
    for_rows([&](int i) {
      quantise_row(p, first + i, lengths[i], r + i * block.stride,
                   reinterpret_cast<std::uint32_t*>(x + i * block.stride));
    });
  }
}

Status run_dense(const Problem& p, int device, Stream stream) {
  const auto block = cuda::DenseBlock::plan(
      p.rotation.dim, cuda::DenseBlock::kRows * static_cast<int>(sizeof(Length)), device);
  const std::int64_t rows = block.warps * cuda::DenseBlock::kRows;
  const cuda::Grid grid{
      .blocks = (p.rows + rows - 1) / rows, .threads = 32 * block.warps, .shared = block.shared};
  return cuda::launch(Op::kName, encode_dense, grid, device, stream, p, block);
}

// ---- dispatch ----

Problem problem(const Op::Desc& d, const Op::Args& a) {
  Problem p{row_coder(d, a.table.as<float>(), a.boundaries.as<float>(), a.codebook.as<float>())};
  p.x = a.x.data;
  p.packed = a.packed.as<std::uint32_t>();
  p.scales = a.scales.data;
  p.x_stride = a.x.row_stride();
  p.packed_stride = a.packed.row_stride();
  p.scale_stride = a.scales.row_stride();
  p.rows = d.rows;
  p.element = d.element;
  p.f16_scale = d.f16_scale;
  return p;
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  const Problem p = problem(d, a);
  const int device = a.x.device.index;
  const auto by_warps = [&] { return run_by_warps(p, device, stream); };
  if (p.rows < kFewRows * cuda::limits(device).multiprocessors) return by_warps();
  if (d.rotation == Rotation::dense) return run_dense(p, device, stream);
  if (d.rotation != Rotation::hadamard || !cuda::pieces_aligned(a.x, p.rows)) return by_warps();
  return cuda::visit_tuned_dim<64>(
      d.dim,
      [&]<class Tile>(Tile) {
        return visit<float, f16, bf16>(
            d.element, [&]<class X>(Type<X>) { return run_by_lanes<Tile, X>(p, device, stream); });
      },
      by_warps);
}

Status run_tensors(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  const int device = a.x.device.index;
  const Problem p = problem(d, a);
  return visit<float, f16, bf16>(d.element, [&]<class X>(Type<X>) {
    return d.dim == 64 ? run_by_warpgroups<X, 64>(p, device, stream)
                       : run_by_warpgroups<X, 128>(p, device, stream);
  });
}
Status supports_tensors(const Op::Desc& d, Device device) {
  if (d.rotation != Rotation::dense) {
    const auto name = kRotationNames[static_cast<std::size_t>(d.rotation)];
    return unsupported("rotation: " + std::string(name) + ", expected dense");
  }
  if (d.dim != 64 && d.dim != 128)
    return unsupported("dim: " + std::to_string(d.dim) + ", expected 64 or 128");
  return cuda::needs_warpgroups(device);
}
Status accepts_pieces(const Op::Desc& d, const Op::Args& a) {
  BITTERN_TRY(cuda::starts_aligned("x", a.x.data));
  if (cuda::pieces_aligned(a.x, d.rows)) return {};
  return unsupported("x: stride " + std::to_string(a.x.row_stride()) +
                     " of axis 0, expected a multiple of " +
                     std::to_string(16 / size_of(d.element)));
}
// Of d = dim terms, in 2^-24 of T (bittern/ops/aura_encode.h): the definition's fma chain d,
// its u 8; here d / 16 products of the high parts 10.5 each, what two parts leave of P and of x 4,
// the squares' d / 4 + 2 half of that, 1 / norm and the product with it 4. That is below
// 1.8 d + 16.
PrecisionGuarantee tensor_guarantee(const Op::Desc& d) {
  return {.math_precision = DType::f32,
          .accumulator = DType::f32,
          .bit_stable_on_same_hardware = true,
          .same_bits_on_all_backends = false,
          .error_norm = ErrorNorm::terms,
          .error_bound = 2 * static_cast<double>(d.dim + 8) * 0x1p-24};
}

constexpr Kernel<Op> kKernels[] = {{.name = "cuda_tensor",
                                    .backend = "cuda",
                                    .weaker = tensor_guarantee,
                                    .supports = supports_tensors,
                                    .accepts = accepts_pieces,
                                    .architecture = cuda::architecture,
                                    .run = run_tensors},
                                   cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<AuraEncode>> aura_encode_cuda() { return kKernels; }

}  // namespace bittern
