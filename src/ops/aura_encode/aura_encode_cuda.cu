#include "ops/aura_encode/encode_hadamard.cuh"
#include "ops/aura_encode/encode_lanes.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = AuraEncode;
using namespace encode;
using cuda::kFewRows;
using cuda::kWarpsOfRows;

constexpr int kCellBytes = 32 << 10;  // of the table of cells, all its copies

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
  const int floats = 2 * kRows * block.stride + 2 * kRows;  // of a warp
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
      const Length length = normalise_row(p, first + i, x + i * block.stride);
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

// ---- dense rotations on the tensor cores, to f32's accuracy but not to its bits ----

// Rows of x are scaled by a power of two, so that f16 holds them: exactly what bf16 and f16 had,
// but for elements below 2^-31 of the norm; f32 in two parts. P is taken in two parts, P 2^8 =
// high + low, 22 bits. A row's sum is x_high P_high + x_high P_low (+ x_low P_high), in f32.
// A warp has 32 rows of x and all kDim columns of the product:
//   d[m][t][2h + e] of lane l is row 16 m + 8 h + l / 4, column 8 t + 2 (l % 4) + e.
template <int kDim_>
struct TensorTile {
  static constexpr int kDim = kDim_, kRows = 32, kMostWarps = 8;
  using Rows = RowTile<kDim, 1>;                       // fetches x
  static constexpr int kMatrixStride = 2 * kDim + 16;  // bytes from row to row of a part of P
  static constexpr int kMatrixBytes = kDim * kMatrixStride;
  static constexpr int kCodeStride = kDim + 16;  // bytes from row to row of codes
  static constexpr float kMatrixScale = 0x1p8f, kMostEntry = 128.0f;

  // Shared memory: P's parts, cells, lookup, tables; for each warp rows of x, codes, packed rows.
  struct Layout {
    int cells, lookup, tables, warps;  // offsets in bytes
    int x_stride, codes, out, out_stride, warp;
  };

  // P's two parts, by the whole block. Can f16 hold them?
  __device__ static bool split_matrix(const float* table, char* high, char* low) {
    bool fits = true;
    for (int at = static_cast<int>(threadIdx.x); at < kDim * kDim / 2;
         at += static_cast<int>(blockDim.x)) {
      const int i = at / (kDim / 2), j = 2 * (at % (kDim / 2));
      float v[2], rest[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        v[e] = __ldg(table + i * kDim + j + e);
        fits = fits && fabsf(v[e]) <= kMostEntry;
        v[e] *= kMatrixScale;
        rest[e] = v[e] - cuda::load_math(cuda::store_math<f16>(v[e]));
      }
      const int offset = i * kMatrixStride + 2 * j;
      *reinterpret_cast<std::uint32_t*>(high + offset) = cuda::store_pair<f16>(v[0], v[1]);
      *reinterpret_cast<std::uint32_t*>(low + offset) = cuda::store_pair<f16>(rest[0], rest[1]);
    }
    return __syncthreads_and(fits ? 1 : 0) != 0;
  }

  struct RowLength {
    float norm;
    float factor;  // of the product: 1 / (norm's mantissa 2^14 kMatrixScale)
    bool extreme;
  };
  // A row in shared memory becomes f16, in its place, for f32 a low part behind it. Four lanes have
  // a row and take its 16-byte pieces in turn.
  template <class X>
  __device__ static RowLength scale_row(char* row, int quarter) {
    constexpr int kEach = 16 / sizeof(X), kPieces = kDim / kEach / 4;
    float x[kPieces][kEach];
    float squares = 0;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const uint4 words = *reinterpret_cast<const uint4*>(row + 16 * (4 * k + quarter));
      const unsigned word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if constexpr (sizeof(X) == 4) {
          x[k][i] = __uint_as_float(word[i]);
        } else {
          x[k][i] = cuda::load_math(X{static_cast<std::uint16_t>(word[i / 2] >> 16 * (i % 2))});
        }
        squares = fmaf(x[k][i], x[k][i], squares);
      }
    }
    squares += cuda::across(squares, 1);
    squares += cuda::across(squares, 2);
    RowLength length{sqrtf(squares), 0, !(squares <= max_finite<float>())};
    float scale = 1;
    if (length.norm > kAuraTiny && !length.extreme) {
      const unsigned exponent = __float_as_uint(length.norm) >> 23;
      scale = __uint_as_float((127 + 127 + 14 - exponent) << 23);
      length.factor = 1 / (length.norm * scale * kMatrixScale);
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      char* const to = row + 2 * kEach * (4 * k + quarter);
#pragma unroll
      for (int i = 0; i < kEach; i += 2) {
        const float a = x[k][i] * scale, b = x[k][i + 1] * scale;
        *reinterpret_cast<std::uint32_t*>(to + 2 * i) = cuda::store_pair<f16>(a, b);
        if constexpr (sizeof(X) == 4) {
          *reinterpret_cast<std::uint32_t*>(to + 2 * kDim + 2 * i) =
              cuda::store_pair<f16>(a - cuda::load_math(cuda::store_math<f16>(a)),
                                    b - cuda::load_math(cuda::store_math<f16>(b)));
        }
      }
    }
    return length;
  }

  // d = x P^T
  __device__ static void multiply(const char* x, int x_stride, bool split, const char* high,
                                  const char* low, float (&d)[2][kDim / 8][4]) {
    const int lane = lane_index();
    const char* a_row = x + (lane % 16) * x_stride + lane / 16 * 16;
    const int b_row = (lane % 8 + lane / 16 * 8) * kMatrixStride + lane / 8 % 2 * 16;
#pragma unroll 1
    for (int k = 0; k < kDim; k += 16) {
      std::uint32_t a[2][4], rest[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        cuda::load_tiles(a[m], a_row + 16 * m * x_stride + 2 * k);
        if (split) cuda::load_tiles(rest[m], a_row + 16 * m * x_stride + 2 * k + 2 * kDim);
      }
#pragma unroll
      for (int t = 0; t < kDim / 8; t += 2) {
        std::uint32_t b[4], b_low[4];
        cuda::load_tiles(b, high + b_row + 8 * t * kMatrixStride + 2 * k);
        cuda::load_tiles(b_low, low + b_row + 8 * t * kMatrixStride + 2 * k);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const std::uint32_t column[2] = {b[2 * i], b[2 * i + 1]};
          const std::uint32_t column_low[2] = {b_low[2 * i], b_low[2 * i + 1]};
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            cuda::multiply_f16(d[m][t + i], a[m], column);
            cuda::multiply_f16(d[m][t + i], a[m], column_low);
            if (split) cuda::multiply_f16(d[m][t + i], rest[m], column);
          }
        }
      }
    }
  }
};

// Eight codes, a byte each, to `bits` bytes.
__device__ void pack_chunk(uint2 codes, int bits, char* to) {
  const auto four = [&](unsigned w) {
    return (w & 0xff) | (w >> 8 & 0xff) << bits | (w >> 16 & 0xff) << 2 * bits |
           w >> 24 << 3 * bits;
  };
  const unsigned low = four(codes.x), high = four(codes.y);
  if (bits == 4) {
    *reinterpret_cast<std::uint32_t*>(to) = low | high << 16;
  } else if (bits == 8) {
    *reinterpret_cast<uint2*>(to) = codes;
  } else {
    const std::uint64_t all = low | static_cast<std::uint64_t>(high) << 4 * bits;
    for (int i = 0; i < bits; ++i) to[i] = static_cast<char>(all >> 8 * i);
  }
}

template <class Tile>
__global__ void __launch_bounds__(32 * Tile::kMostWarps, 1)
    encode_by_tensors(const __grid_constant__ Problem p, const Cells cells,
                      const typename Tile::Layout layout) {
  constexpr int kDim = Tile::kDim, kRows = Tile::kRows;
  using Rows = typename Tile::Rows;
  char* const shared = cuda::dynamic_shared<char>();
  char* const low_part = shared + Tile::kMatrixBytes;
  auto* const cell_table = reinterpret_cast<Cell*>(shared + layout.cells);
  auto* const lookup = reinterpret_cast<float*>(shared + layout.lookup);
  auto* const boundaries = reinterpret_cast<float*>(shared + layout.tables);
  char* const x = shared + layout.warps + warp_index() * layout.warp;
  char* const codes = x + layout.codes;
  char* const out = x + layout.out;

  const int warps = static_cast<int>(blockDim.x / 32), lane = lane_index(), quarter = lane % 4;
  const std::int64_t step = std::int64_t{gridDim.x} * warps * kRows;
  std::int64_t first = (std::int64_t{blockIdx.x} * warps + warp_index()) * kRows;
  const auto rows_at = [&](std::int64_t row) {
    return static_cast<int>(p.rows - row < kRows ? p.rows - row : kRows);
  };
  const bool split = p.element == DType::f32;
  const auto fetch = [&](std::int64_t row) {
    if (row >= p.rows) return;
    const std::int64_t stride = p.x_stride * (split ? 4 : 2);
    const char* const from = static_cast<const char*>(p.x) + row * stride;
    if (split) {
      Rows::template fetch<float>(x, from, stride, rows_at(row));
    } else {
      Rows::template fetch<bf16>(x, from, stride, rows_at(row));
    }
  };
  fetch(first);
  const int levels = 1 << p.bits;
  for (int i = static_cast<int>(threadIdx.x); i + 1 < levels; i += static_cast<int>(blockDim.x))
    boundaries[i] = p.boundaries[i];
  fill_table(lookup, levels, kLookupCopies, [&](int i) { return __ldg(p.codebook + i); });
  const bool fits = Tile::split_matrix(p.rotation.table, shared, low_part);
  const bool fine = fill_cells(cell_table, cells, boundaries, p.bits);
  if (!fits) {
    cuda::copy_async_wait<0>();
    for (; first < p.rows; first += step)
      for (int i = 0; i < rows_at(first); ++i)
        encode_row(p, first + i, reinterpret_cast<float*>(out));
    return;
  }
  const Cell* const my_cells = cell_table + (lane & (cells.copies - 1));
  const auto code_of = [&](float r) {
    if (!fine) return count_below(p.boundaries, p.bits, r);
    // P need not be orthogonal, so r may be anything; a NaN has the first cell.
    const float inside = fminf(fmaxf(r, -Cells::kReach), Cells::kReach);
    const Cell cell = my_cells[(cells.cell(inside) - Cells::kFirst) * cells.copies];
    return cell.before + (r > cell.boundary ? 1u : 0u);
  };

  for (; first < p.rows; first += step) {
    const int rows = rows_at(first);
    cuda::copy_async_wait<0>();
    __syncwarp();
    typename Tile::RowLength length[4];  // of row 8 i + lane / 4
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      char* const row = x + (8 * i + lane / 4) * layout.x_stride;
      switch (p.element) {
        case DType::f16: length[i] = Tile::template scale_row<f16>(row, quarter); break;
        case DType::bf16: length[i] = Tile::template scale_row<bf16>(row, quarter); break;
        default: length[i] = Tile::template scale_row<float>(row, quarter);
      }
    }
    __syncwarp();
    float d[2][kDim / 8][4] = {};
    Tile::multiply(x, layout.x_stride, split, shared, low_part, d);
    __syncwarp();
    fetch(first + step);

#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 8 * i + lane / 4;
      float cc = 0, rc = 0;
#pragma unroll
      for (int t = 0; t < kDim / 8; ++t) {
        unsigned code[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float r = d[i / 2][t][i % 2 * 2 + e] * length[i].factor;
          code[e] = code_of(r);
          const float c = lookup[code[e] * kLookupCopies + static_cast<unsigned>(lane)];
          cc = fmaf(c, c, cc);
          rc = fmaf(r, c, rc);
        }
        *reinterpret_cast<std::uint16_t*>(codes + row * Tile::kCodeStride + 8 * t + 2 * quarter) =
            static_cast<std::uint16_t>(code[0] | code[1] << 8);
      }
      cc += cuda::across(cc, 1);
      rc += cuda::across(rc, 1);
      cc += cuda::across(cc, 2);
      rc += cuda::across(rc, 2);
      if (quarter == 0 && row < rows)
        store_norm(p, first + row, stored_scale(p.rule, length[i].norm, cc, rc));
    }
    __syncwarp();
    constexpr int kChunks = kDim / 8;
    for (int at = lane; at < kRows * kChunks; at += 32) {
      const int row = at / kChunks, chunk = at % kChunks;
      pack_chunk(*reinterpret_cast<const uint2*>(codes + row * Tile::kCodeStride + 8 * chunk),
                 p.bits, out + row * layout.out_stride + chunk * p.bits);
    }
    __syncwarp();
    cuda::copy_rows_out(out, layout.out_stride, p.packed + first * p.packed_stride, p.packed_stride,
                        p.words, rows);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned left =
          __ballot_sync(kAllLanes, length[i].extreme && quarter == 0 && 8 * i + lane / 4 < rows);
      for (; left != 0; left &= left - 1)
        encode_row(p, first + 8 * i + (__ffs(static_cast<int>(left)) - 1) / 4,
                   reinterpret_cast<float*>(out));
    }
  }
}

template <class Tile>
Status run_by_tensors(const Problem& p, int device, Stream stream) {
  constexpr int kRows = Tile::kRows;
  const Cells cells = cells_for(Tile::kDim, p.bits, kCellBytes);
  const auto align = [](int bytes) { return (bytes + 15) / 16 * 16; };
  typename Tile::Layout l{};
  l.cells = 2 * Tile::kMatrixBytes;
  l.lookup = l.cells + cells.bytes();
  l.tables = l.lookup + (kLookupCopies * 4 << p.bits);
  l.warps = l.tables + align(4 << p.bits);
  l.x_stride = p.element == DType::f32 ? Tile::Rows::template kStageStride<float>
                                       : Tile::Rows::template kStageStride<bf16>;
  l.codes = kRows * l.x_stride;
  l.out = l.codes + kRows * Tile::kCodeStride;
  l.out_stride = align(4 * p.words) | 16;
  l.warp = l.out + std::max(kRows * l.out_stride, 2 * 4 * Tile::kDim);
  const auto grid = cuda::tiles_grid(p.rows, kRows, Tile::kMostWarps, l.warps, l.warp, device);
  return cuda::launch(Op::kName, encode_by_tensors<Tile>, grid, device, stream, p, cells, l);
}

// ---- dispatch ----

Problem problem(const Op::Desc& d, const Op::Args& a) {
  return {.x = a.x.data,
          .boundaries = a.boundaries.as<float>(),
          .codebook = a.codebook.as<float>(),
          .packed = a.packed.as<std::uint32_t>(),
          .norms = a.norms.data,
          .x_stride = a.x.row_stride(),
          .packed_stride = a.packed.row_stride(),
          .norm_stride = a.norms.row_stride(),
          .rows = d.outer_size,
          .rotation = cuda::row_rotation(d.rotation, d.axis_size, a.table.as<float>(), false),
          .element = d.element,
          .rule = d.scale_rule,
          .f16_norm = d.f16_norm,
          .bits = d.bits,
          .words = static_cast<int>(packed_words(d.axis_size, d.bits))};
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  const Problem p = problem(d, a);
  const int device = a.x.device.index;
  const auto by_warps = [&] { return run_by_warps(p, device, stream); };
  if (p.rows < kFewRows * cuda::limits(device).multiprocessors) return by_warps();
  if (d.rotation == Rotation::dense) return run_dense(p, device, stream);
  if (d.rotation != Rotation::hadamard || !cuda::pieces_aligned(a.x, p.rows)) return by_warps();
  if (is_half(d.element) && d.axis_size == 128 && (d.bits == 2 || d.bits == 4) &&
      !p.needs_products()) {
    return visit<f16, bf16>(d.element, [&]<class X>(Type<X>) {
      return d.bits == 2 ? run_hadamard<X, 128, 2>(p, device, stream)
                         : run_hadamard<X, 128, 4>(p, device, stream);
    });
  }
  return cuda::visit_tuned_dim<64>(
      d.axis_size, [&]<class Tile>(Tile) { return run_by_lanes<Tile>(p, device, stream); },
      by_warps);
}

Status run_tensors(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace none) {
  if (!cuda::pieces_aligned(a.x, d.outer_size)) return run(d, a, stream, none);
  const Problem p = problem(d, a);
  if (d.axis_size == 64) return run_by_tensors<TensorTile<64>>(p, a.x.device.index, stream);
  return run_by_tensors<TensorTile<128>>(p, a.x.device.index, stream);
}
Status supports_tensors(const Op::Desc& d) {
  if (d.rotation != Rotation::dense) {
    const auto name = kRotationNames[static_cast<std::size_t>(d.rotation)];
    return unsupported("rotation: " + std::string(name) + ", expected dense");
  }
  if (d.axis_size == 64 || d.axis_size == 128) return {};
  return unsupported("axis_size: " + std::to_string(d.axis_size) + ", expected 64 or 128");
}
// Products of 22 bits by what x has, sums in the tensor cores' order.
PrecisionGuarantee tensor_guarantee(const Op::Desc&) {
  return {.math_precision = DType::f32,
          .accumulator = DType::f32,
          .bit_stable_on_same_hardware = true,
          .same_bits_on_all_backends = false};
}

constexpr Kernel<Op> kKernels[] = {{.name = "cuda_tensor",
                                    .backend = "cuda",
                                    .weaker = tensor_guarantee,
                                    .supports = supports_tensors,
                                    .architecture = cuda::architecture,
                                    .run = run_tensors},
                                   cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<AuraEncode>> aura_encode_cuda() { return kKernels; }

}  // namespace bittern
