// Dense rotations by products of a warpgroup (sm_90a), to f32's accuracy but not to its bits.
//
//   x, P        in bf16 parts, each what the parts before it leave: P in three, 24 bits; x in one
//               (bf16), two (f16) or three (f32). Neither is scaled: bf16 has f32's exponents.
//   y = P x     the sum of part i of x times part j of P, i + j <= 2, the least ones first: sums
//               are cut off at 2^-24 of what they have come to. r = y / norm
//   warpgroup   has 64 rows, a warp 16 of them. Columns of P^T are permuted so that of results
//               i = 16 block + 4 q + 2 t + e lane l has those of q = l % 4, of rows l / 4 and
//               l / 4 + 8 (`half`): four neighbouring codes of each block. See encode_hadamard.cuh.
#pragma once
#include "ops/aura_encode/encode_hadamard.cuh"

namespace bittern::encode {

// ---- tuning ----

constexpr int kDenseGroups = 4;            // warpgroups of a block, at most
constexpr int kDenseCellBytes = 32 << 10;  // of the table of cells, all its copies

template <class X, int kDim_>
struct DenseTile {
  static constexpr int kDim = kDim_, kRows = 16, kSteps = kDim / 16, kBlocks = kDim / 16;
  static constexpr int kParts = sizeof(X) == 4 ? 3 : std::is_same_v<X, bf16> ? 1 : 2;  // of x
  static constexpr int kMatrixParts = 3;
  static constexpr int kPanelBytes = 128 * kDim;  // 64 columns of P
  static constexpr int kPartBytes = kDim / 64 * kPanelBytes;
  static constexpr float kMostEntry = 0x1p32f;  // of P, so that no sum overflows
  // |cell of v times slope by - cell of v by times slope| in r: see Cells.
  static constexpr float kMargin = 0x1p-20f;
  using Rows = HadamardTile<bf16, kDim* static_cast<int>(sizeof(X)) / 2>;  // fetches x
  using Codes = HadamardTile<bf16, kDim>;                                  // stores codes

  // P's parts, as warpgroup_multiply_bf16 wants them, by the whole block. Is none too large?
  __device__ static bool split_matrix(const float* table, char* parts) {
    bool fits = true;
    for (int at = static_cast<int>(threadIdx.x); at < kDim * kDim / 2;
         at += static_cast<int>(blockDim.x)) {
      const int column = at / (kDim / 2), k = 2 * (at % (kDim / 2));
      const int row = column / 16 * 16 + column % 8 / 2 * 4 + column / 8 % 2 * 2 + column % 2;
      float2 v = *reinterpret_cast<const float2*>(table + row * kDim + k);
      fits = fits && fabsf(v.x) <= kMostEntry && fabsf(v.y) <= kMostEntry;
      char* const to = parts + k / 64 * kPanelBytes + 128 * column +
                       16 * (k % 64 / 8 ^ column % 8) + 2 * (k % 8);
#pragma unroll
      for (int part = 0; part < kMatrixParts; ++part)
        *reinterpret_cast<std::uint32_t*>(to + part * kPartBytes) = next_part(v);
    }
    cuda::fence_shared_for_tensor_cores();
    return __syncthreads_and(fits ? 1 : 0) != 0;
  }

  // A part of two numbers, and of them what it leaves.
  __device__ static std::uint32_t next_part(float2& v) {
    const std::uint32_t part = cuda::store_pair<bf16>(v.x, v.y);
    v.x -= Codes::element(part, 0);
    v.y -= Codes::element(part, 1);
    return part;
  }

  using Elements = std::uint32_t[kParts][4];  // of a lane, in a step, in parts
  using Sums = float[kBlocks * 8];            // [block][t][2 half + e]

  // Adds the squares of the elements of each half.
  __device__ static void load(Elements& a, const char* stage, int step, float (&squares)[2]) {
    std::uint32_t words[4];
    if constexpr (sizeof(X) == 2) Rows::load(words, stage, step);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 v;
      if constexpr (sizeof(X) == 4) {
        const int lane = lane_index();
        const char* const row = stage + (lane / 4 + i % 2 * 8) * Rows::kStride;
        v = reinterpret_cast<const float2*>(row)[8 * step + 4 * (i / 2) + lane % 4];
      } else {
        v.x = HadamardTile<X, kDim>::element(words[i], 0);
        v.y = HadamardTile<X, kDim>::element(words[i], 1);
      }
      squares[i % 2] = fmaf(v.x, v.x, squares[i % 2]);
      squares[i % 2] = fmaf(v.y, v.y, squares[i % 2]);
      if constexpr (kParts == 1) {
        a[0][i] = words[i];
      } else {
#pragma unroll
        for (int part = 0; part < kParts; ++part) a[part][i] = next_part(v);
      }
    }
  }

  // Adds the products of i + j = kMost ... kLeast, kMost == 2 being the first ones. loaded() is
  // called when x has been read.
  template <int kMost, int kLeast, class Loaded>
  __device__ static void add_products(Sums& y, const char* stage, cuda::WarpgroupMatrix matrix,
                                      float (&squares)[2], const Loaded& loaded) {
    constexpr int kAtOnce = kParts == 1 ? kSteps : 2;
    squares[0] = squares[1] = 0;
#pragma unroll
    for (int first = 0; first < kSteps; first += kAtOnce) {
      Elements a[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) load(a[k], stage, first + k, squares);
      if (first + kAtOnce == kSteps) loaded();
      cuda::warpgroup_begin();
#pragma unroll
      for (int sum = kMost; sum >= kLeast; --sum) {
#pragma unroll
        for (int i = 0; i < kParts && i <= sum; ++i) {
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) {
            const int step = first + k;
            cuda::warpgroup_multiply_bf16(
                y, a[k][i],
                matrix.at((sum - i) * kPartBytes + step / 4 * kPanelBytes + step % 4 * 32),
                sum < 2 || i > 0 || step > 0);
          }
        }
      }
      cuda::warpgroup_end();
    }
  }
  template <class Loaded>
  __device__ static void rotate(Sums& y, const char* stage, cuda::WarpgroupMatrix matrix,
                                float (&squares)[2], const Loaded& loaded) {
    if constexpr (kParts == 1) {
      add_products<2, 0>(y, stage, matrix, squares, loaded);
    } else {
      add_products<2, 1>(y, stage, matrix, squares, [] {});
      add_products<0, 0>(y, stage, matrix, squares, loaded);
    }
  }
};

// Shared memory: P's parts, cells, lookup, boundaries; for each warp rows of x, packed rows.
struct DenseLayout {
  int width;  // bits of a code in shared memory: 2, 4 or 8
  unsigned width_radix;
  int cells, lookup, boundaries, warps;
  int out, out_stride, warp;
};

template <class X, int kDim>
__global__ void __launch_bounds__(128 * kDenseGroups, 1)
    encode_by_warpgroups(const __grid_constant__ Problem p, const Cells cells,
                         const DenseLayout layout) {
  using Tile = DenseTile<X, kDim>;
  constexpr int kRows = Tile::kRows, kBlocks = Tile::kBlocks;
  char* const shared = cuda::dynamic_shared<char>();
  auto* const cell_table = reinterpret_cast<Cell*>(shared + layout.cells);
  auto* const lookup = reinterpret_cast<float*>(shared + layout.lookup);
  auto* const boundaries = reinterpret_cast<float*>(shared + layout.boundaries);
  char* const stage = shared + layout.warps + warp_index() * layout.warp;
  char* const out = stage + layout.out;

  // The four warps of a group go on for as long as one of them has rows.
  const int warps = static_cast<int>(blockDim.x / 32), lane = lane_index(), quarter = lane % 4;
  const int behind = warp_index() % 4 * kRows;  // of the group's first row
  const std::int64_t step = std::int64_t{gridDim.x} * warps * kRows;
  std::int64_t first = (std::int64_t{blockIdx.x} * warps + warp_index()) * kRows;
  const auto fetch = [&](std::int64_t row) {
    const std::int64_t stride = p.x_stride * static_cast<int>(sizeof(X));
    if (row - behind < p.rows)
      Tile::Rows::fetch(stage, static_cast<const char*>(p.x) + row * stride, stride,
                        p.rows_at(row, kRows));
  };
  fetch(first);
  const int levels = 1 << p.bits;
  for (int i = static_cast<int>(threadIdx.x); i + 1 < levels; i += static_cast<int>(blockDim.x))
    boundaries[i] = p.boundaries[i];
  fill_table(lookup, levels, kLookupCopies, [&](int i) { return __ldg(p.codebook + i); });
  const bool fits = Tile::split_matrix(p.rotation.table, shared);
  const bool fine = fill_cells(cell_table, cells, boundaries, p.bits);
  if (!fits || !fine) {
    cuda::copy_async_wait<0>();
    for (; first < p.rows; first += step)
      for (int i = 0; i < p.rows_at(first, kRows); ++i)
        encode_row(p, first + i, reinterpret_cast<float*>(out));
    return;
  }
  const Tables tables(cells, cell_table, lookup);
  const auto matrix = cuda::warpgroup_matrix(shared);
  const float last_cell = Cells::kInteger + static_cast<float>(cells.count - 1);

  for (; first - behind < p.rows; first += step) {
    const int rows = p.rows_at(first, kRows);
    cuda::copy_async_wait<0>();
    __syncwarp();
    typename Tile::Sums y;
    float squares[2];
    Tile::rotate(y, stage, matrix, squares, [&] {
      __syncwarp();
      fetch(first + step);
    });
#pragma unroll
    for (float& sum : squares) {
      sum += cuda::across(sum, 1);
      sum += cuda::across(sum, 2);
    }
    // What a row takes once is done by even lanes for their first row, by odd ones for their
    // second.
    const int half = lane % 2, my_row = lane / 4 + 8 * half;
    const float my_squares = half == 0 ? squares[0] : squares[1];
    const bool extreme = !(my_squares <= max_finite<float>());
    const float norm = sqrtf(my_squares);
    const float my_by = norm > kAuraTiny && !extreme ? 1 / norm : 0.0f;
    const float by[2] = {__shfl_sync(kAllLanes, my_by, lane & ~1),
                         __shfl_sync(kAllLanes, my_by, lane | 1)};
    float cc[2] = {}, rc[2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float slope = by[h] * cells.slope;
      std::uint32_t four[kBlocks] = {};
#pragma unroll
      for (int i = 3; i >= 0; --i) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const float v = y[8 * block + i / 2 * 4 + 2 * h + i % 2];
          // P need not be orthogonal, so r may be anything; a NaN has the first cell.
          const float place =
              fminf(fmaxf(fmaf(v, slope, cells.middle), Cells::kInteger), last_cell);
          const Cell& cell = tables.cell(__float_as_uint(place));
          const unsigned code =
              cell.before + (__float_as_uint(fmaf(v, -by[h], cell.boundary)) >> 31);
          four[block] = four[block] * layout.width_radix + code;
          const float c = tables.look_up(code);
          cc[h] = fmaf(c, c, cc[h]);
          rc[h] = fmaf(v, c, rc[h]);
        }
      }
      // Opaque, or everything is compiled once for each width.
      const auto width = static_cast<int>(cuda::opaque(static_cast<unsigned>(layout.width)));
      Tile::Codes::store_fours(four, 0, width, out + (lane / 4 + 8 * h) * layout.out_stride);
      cc[h] += cuda::across(cc[h], 1);
      rc[h] += cuda::across(rc[h], 1);
      cc[h] += cuda::across(cc[h], 2);
      rc[h] += cuda::across(rc[h], 2);
    }
    if (quarter < 2 && my_row < rows) {
      const float my_rc = (half == 0 ? rc[0] : rc[1]) * my_by;
      store_norm(p, first + my_row, stored_scale(p.rule, norm, half == 0 ? cc[0] : cc[1], my_rc));
    }
    __syncwarp();
    if (layout.width != p.bits) Tile::Codes::close_up(out, layout.out_stride, p);
    cuda::copy_rows_out(out, layout.out_stride, p.packed + first * p.packed_stride, p.packed_stride,
                        p.words, rows);
    __syncwarp();
    unsigned left = __ballot_sync(kAllLanes, extreme && quarter < 2 && my_row < rows);
    for (; left != 0; left &= left - 1) {
      const int at = __ffs(static_cast<int>(left)) - 1;
      encode_row(p, first + at / 4 + at % 4 * 8, reinterpret_cast<float*>(out));
    }
  }
}

template <class X, int kDim>
Status run_by_warpgroups(const Problem& p, int device, Stream stream) {
  using Tile = DenseTile<X, kDim>;
  const Cells cells = cells_for(kDim, p.bits, kDenseCellBytes, Tile::kMargin);
  const auto align = [](int bytes) { return (bytes + 15) / 16 * 16; };
  const int levels = 1 << p.bits;
  DenseLayout l{.width = p.bits == 2 || p.bits == 4 ? p.bits : 8};
  l.width_radix = 1u << l.width;
  l.cells = Tile::kMatrixParts * Tile::kPartBytes;
  l.lookup = l.cells + cells.bytes();
  l.boundaries = l.lookup + levels * kLookupCopies * 4;
  l.warps = l.boundaries + align(4 * levels);
  l.out = Tile::kRows * Tile::Rows::kStride;
  l.out_stride = align(std::max(4 * p.words, kDim * l.width / 8)) | 16;
  l.warp = l.out + std::max(Tile::kRows * l.out_stride, 2 * 4 * kDim);
  auto grid = cuda::tiles_grid(p.rows, 4 * Tile::kRows, kDenseGroups, l.warps, 4 * l.warp, device);
  grid.threads *= 4;
  return cuda::launch(AuraEncode::kName, encode_by_warpgroups<X, kDim>, grid, device, stream, p,
                      cells, l);
}

}  // namespace bittern::encode
