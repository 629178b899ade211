// Dense rotations by products of a warpgroup (sm_90a), to f32's accuracy but not to its bits.
//
//   P           in two f16 parts, P 2^8 = high + low, 22 bits
//   x           times a power of two, which makes a row's norm 2^14 to 2^15: f16 then holds what
//               bf16 had, but for elements below 2^-31 of the norm, and f32 in two parts; f16 as
//               it is
//   y = P x     x low P + x high P, or of f32 x_low high P + x_high low P + x_high high P. The
//               least ones come first, for sums are cut off at 2^-24 of what they have come to.
//               r = y by, by = 1 / (norm and both powers of two)
//   warpgroup   has 64 rows, a warp 16 of them. Columns of P^T are permuted so that of results
//               i = 16 block + 4 q + 2 t + e lane l has those of q = l % 4, of rows l / 4 and
//               l / 4 + 8 (`half`): four neighbouring codes of each block.
#pragma once
#include "ops/aura/aura_encode/encode_device.cuh"

namespace bittern::encode {

// ---- tuning ----

constexpr int kDenseGroups = 4;            // warpgroups of a block, at most
constexpr int kDenseCellBytes = 32 << 10;  // of the table of cells, all its copies

// A warp starts copying a tile of kRows rows of kRowBytes to shared memory, from `stride` bytes
// apart to kRowBytes + 16, so that rows begin in different banks: piece `at` of them, 16 bytes,
// goes to 16 (at + its row). Rows past `rows` become zeros.
template <int kRows, int kRowBytes>
__device__ void fetch_rows(char* tile, const char* from, std::int64_t stride, int rows) {
  constexpr int kPieces = kRowBytes / 16;
  static_assert(32 % kPieces == 0 && kRows * kPieces % 32 == 0);
  const int lane = lane_index();
  if (rows == kRows && stride == kRowBytes) {  // addresses are constants away
    char* const to = cuda::opaque(tile + 16 * (lane + lane / kPieces));
    const char* const mine = cuda::opaque(from + 16 * lane);
#pragma unroll
    for (int k = 0; k < kRows * kPieces / 32; ++k)
      cuda::copy_async_16(to + 16 * (32 * k + 32 * k / kPieces), mine + 16 * 32 * k);
  } else {
#pragma unroll 1
    for (int at = lane; at < kRows * kPieces; at += 32) {
      const int row = at / kPieces;
      const bool there = row < rows;
      cuda::copy_async_16(tile + 16 * (at + row),
                          there ? from + row * stride + 16 * (at % kPieces) : from, there ? 16 : 0);
    }
  }
  cuda::copy_async_commit();
}

// Four neighbouring codes of a lane, the first of them code `first`, to a packed row.
template <int kBits>
__device__ void store_four(std::uint32_t four, int first, char* row) {
  char* const to = row + first * kBits / 8;
  if constexpr (kBits == 8) {
    *reinterpret_cast<std::uint32_t*>(to) = four;
  } else if constexpr (kBits == 4) {
    *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(four);
  } else {
    static_assert(kBits == 2);
    *to = static_cast<char>(four);
  }
}

template <class X, int kDim_>
struct DenseTile {
  static constexpr int kDim = kDim_, kRows = 16, kSteps = kDim / 16, kBlocks = kDim / 16;
  static constexpr bool kScaled = !std::is_same_v<X, f16>;
  static constexpr int kMatrixExponent = 8, kRowExponent = 14;
  static constexpr float kMostEntry = 128.0f;     // of P
  static constexpr int kPanelBytes = 128 * kDim;  // 64 columns of P
  static constexpr int kPartBytes = kDim / 64 * kPanelBytes;
  // Of cells, in r: they are found with other roundings than those of Cells::cell().
  static constexpr float kMargin = 0x1p-20f;
  // Bytes from row to row of x in shared memory: the rows of a tile begin in different banks.
  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(X)), kStride = kRowBytes + 16;

  // The two elements of a word.
  template <class Half>
  __device__ static float2 elements(std::uint32_t word) {
    if constexpr (std::is_same_v<Half, bf16>) {
      return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
    } else {
      return make_float2(cuda::load_math(Half{static_cast<std::uint16_t>(word)}),
                         cuda::load_math(Half{static_cast<std::uint16_t>(word >> 16)}));
    }
  }
  // A part of two numbers, and of them what it leaves.
  __device__ static std::uint32_t next_part(float2& v) {
    const std::uint32_t part = cuda::store_pair<f16>(v.x, v.y);
    const float2 held = elements<f16>(part);
    v.x -= held.x;
    v.y -= held.y;
    return part;
  }
  // P's parts, as warpgroup_multiply_f16 wants them, by the whole block. Can f16 hold them?
  __device__ static bool split_matrix(const float* table, char* parts) {
    constexpr float kScale = 1 << kMatrixExponent;
    bool fits = true;
    for (int at = static_cast<int>(threadIdx.x); at < kDim * kDim / 2;
         at += static_cast<int>(blockDim.x)) {
      const int column = at / (kDim / 2), k = 2 * (at % (kDim / 2));
      const int row = column / 16 * 16 + column % 8 / 2 * 4 + column / 8 % 2 * 2 + column % 2;
      const float* const from = table + row * kDim + k;
      float2 v = make_float2(__ldg(from) * kScale, __ldg(from + 1) * kScale);
      fits = fits && fabsf(v.x) <= kMostEntry * kScale && fabsf(v.y) <= kMostEntry * kScale;
      char* const to = parts + k / 64 * kPanelBytes + 128 * column +
                       16 * (k % 64 / 8 ^ column % 8) + 2 * (k % 8);
      *reinterpret_cast<std::uint32_t*>(to) = next_part(v);
      *reinterpret_cast<std::uint32_t*>(to + kPartBytes) = next_part(v);
    }
    cuda::fence_shared();
    return __syncthreads_and(fits ? 1 : 0) != 0;
  }

  using Words = std::uint32_t[4];   // of a lane, in a step: of halves 0, 1, 0, 1
  using Sums = float[kBlocks * 8];  // [block][t][2 half + e]

  // Powers of two of each half.
  struct Scale {
    float up[2], down[2];  // of x; of y
    __device__ explicit Scale(const float (&squares)[2]) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // norm = 1 to 2 times 2^exponent
        const int exponent = static_cast<int>(__float_as_uint(squares[h]) >> 23) - 127 >> 1;
        const int by = kScaled ? kRowExponent - exponent : 0;
        up[h] = __uint_as_float(static_cast<unsigned>(127 + by) << 23);
        down[h] = __uint_as_float(static_cast<unsigned>(127 - by - kMatrixExponent) << 23);
      }
    }
    __device__ float2 scaled(float2 v, int h) const {
      return make_float2(v.x * up[h], v.y * up[h]);
    }
  };
  __device__ static void add_squares(float (&squares)[2], float2 v, int h) {
    squares[h] = fmaf(v.x, v.x, squares[h]);
    squares[h] = fmaf(v.y, v.y, squares[h]);
  }
  __device__ static float2 elements(const char* stage, int step, int i) {
    const int lane = lane_index();
    const char* const row = stage + (lane / 4 + i % 2 * 8) * kStride;
    return reinterpret_cast<const float2*>(row)[8 * step + 4 * (i / 2) + lane % 4];
  }
  __device__ static void multiply(Sums& y, const Words& a, cuda::WarpgroupMatrix matrix, int part,
                                  int step, bool add) {
    cuda::warpgroup_multiply_f16(
        y, a, matrix.at(part * kPartBytes + step / 4 * kPanelBytes + step % 4 * 32), add);
  }

  // y = P x of the rows in `stage`, their squares, and by what y is to be multiplied. loaded() is
  // called when x has been read.
  template <class Loaded>
  __device__ static Scale rotate(Sums& y, const char* stage, cuda::WarpgroupMatrix matrix,
                                 float (&squares)[2], const Loaded& loaded) {
    squares[0] = squares[1] = 0;
    const auto over_quad = [&] {
#pragma unroll
      for (float& sum : squares) {
        sum += cuda::across(sum, 1);
        sum += cuda::across(sum, 2);
      }
      return Scale(squares);
    };
    if constexpr (sizeof(X) == 2) {
      Words a[kSteps];
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        cuda::load_tiles(a[k],
                         stage + lane_index() % 16 * kStride + lane_index() / 16 * 16 + 32 * k);
      loaded();
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i)
        add_squares(squares, elements<X>(a[i / 4][i % 4]), i % 2);
      const Scale scale = over_quad();
      if constexpr (kScaled) {
#pragma unroll
        for (int i = 0; i < 4 * kSteps; ++i) {
          std::uint32_t& word = a[i / 4][i % 4];
          const float2 v = scale.scaled(elements<X>(word), i % 2);
          word = cuda::store_pair<f16>(v.x, v.y);
        }
      }
      cuda::warpgroup_begin();
#pragma unroll
      for (int part = 1; part >= 0; --part) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) multiply(y, a[k], matrix, part, k, part < 1 || k > 0);
      }
      cuda::warpgroup_end();
      return scale;
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) add_squares(squares, elements(stage, k, i), i % 2);
      }
      const Scale scale = over_quad();
      constexpr int kAtOnce = 4;  // steps
#pragma unroll
      for (int first = 0; first < 2 * kSteps; first += kAtOnce) {
        const bool last_sum = first >= kSteps;  // of the high parts
        Words high[kAtOnce], low[kAtOnce];
#pragma unroll
        for (int i = 0; i < 4 * kAtOnce; ++i) {
          float2 v = scale.scaled(elements(stage, first % kSteps + i / 4, i % 4), i % 2);
          high[i / 4][i % 4] = next_part(v);
          low[i / 4][i % 4] = next_part(v);
        }
        if (first + kAtOnce == 2 * kSteps) loaded();
        cuda::warpgroup_begin();
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int step = first % kSteps + k;
          if (last_sum) {
            multiply(y, high[k], matrix, 0, step, true);
          } else {
            multiply(y, low[k], matrix, 0, step, step > 0);
            multiply(y, high[k], matrix, 1, step, true);
          }
        }
        cuda::warpgroup_end();
      }
      return scale;
    }
  }

  // Four codes of each block, of `width` bits each (2, 4 or 8), to a row.
  __device__ static void store_fours(const std::uint32_t (&four)[kBlocks], int width, char* row) {
    const auto each = [&]<int kBits>(std::integral_constant<int, kBits>) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        store_four<kBits>(four[block], 16 * block + 4 * (lane_index() % 4), row);
    };
    if (width == 4) {
      each(std::integral_constant<int, 4>());
    } else if (width == 8) {
      each(std::integral_constant<int, 8>());
    } else {
      each(std::integral_constant<int, 2>());
    }
  }
  // Codes of rows, a byte each, to `bits` bits each in rows that are not farther apart, where they
  // lie: no code moves up.
  __device__ static void close_up(char* rows, int stride, int closed_stride, int bits) {
    constexpr int kChunks = kDim / 8;
#pragma unroll 1
    for (int at = lane_index(); at < kRows * kChunks; at += 32) {
      const int row = at / kChunks, chunk = at % kChunks;
      const uint2 codes = *reinterpret_cast<const uint2*>(rows + row * stride + 8 * chunk);
      const auto four = [&](unsigned w) {
        return (w & 0xff) | (w >> 8 & 0xff) << bits | (w >> 16 & 0xff) << 2 * bits |
               w >> 24 << 3 * bits;
      };
      const std::uint64_t all = four(codes.x) | std::uint64_t{four(codes.y)} << 4 * bits;
      __syncwarp();
      for (int i = 0; i < bits; ++i)
        rows[row * closed_stride + chunk * bits + i] = static_cast<char>(all >> 8 * i);
      __syncwarp();
    }
  }
};

// Shared memory: P's parts, cells, lookup, boundaries; for each warp rows of x, packed rows.
struct DenseLayout {
  PackedRows packed;
  unsigned radix;  // 2^bits, but the compiler must not know
  // Cell of r = last_cell (r slope + middle): what is in brackets is clamped to [0, 1].
  float last_cell, slope, middle;
  int width;  // bits of a code in shared memory: 2, 4 or 8
  unsigned width_radix;
  int cells, lookup, boundaries, warps;
  int out, out_stride, warp;
};

// kPairs: for rules that want C alone, the sum of two squares is looked up by both codes at once
// (at most 4 bits). Otherwise levels are.
template <class X, int kDim, bool kPairs>
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
      fetch_rows<kRows, Tile::kRowBytes>(stage, static_cast<const char*>(p.x) + row * stride,
                                         stride, p.rows_at(row, kRows));
  };
  fetch(first);
  const int levels = 1 << p.bits;
  for (int i = static_cast<int>(threadIdx.x); i + 1 < levels; i += static_cast<int>(blockDim.x))
    boundaries[i] = p.boundaries[i];
  const auto level = [&](int i) { return __ldg(p.codebook + i); };
  fill_table(lookup, kPairs ? levels * levels : levels, kLookupCopies, [&](int i) {
    if (!kPairs) return level(i);
    const float low = level(i & (levels - 1)), high = level(i >> p.bits);
    return fmaf(low, low, high * high);
  });
  const bool fits = Tile::split_matrix(p.rotation.table, shared);
  const bool fine = fill_cells(cell_table, cells, boundaries, p.bits);
  if (!fits || !fine) {
    cuda::copy_async_wait<0>();
    for (; first < p.rows; first += step)
      for (int i = 0; i < p.rows_at(first, kRows); ++i)
        encode_row(p, first + i, reinterpret_cast<float*>(out));
    return;
  }
  const Tables<0> tables(cells, cell_table, lookup);
  const auto matrix = cuda::warpgroup_matrix(shared);

  for (; first - behind < p.rows; first += step) {
    const int rows = p.rows_at(first, kRows);
    cuda::copy_async_wait<0>();
    __syncwarp();
    typename Tile::Sums y;
    float squares[2];
    const auto scale = Tile::rotate(y, stage, matrix, squares, [&] {
      __syncwarp();
      fetch(first + step);
    });
    // What a row takes once is done by even lanes for their first row, by odd ones for their
    // second.
    const int half = lane % 2, my_row = lane / 4 + 8 * half;
    const float my_squares = half == 0 ? squares[0] : squares[1];
    const bool extreme = !ordinary(my_squares);
    const float norm = sqrtf(my_squares);
    const float my_by = extreme ? 0.0f : 1 / norm;
    const float by[2] = {__shfl_sync(kAllLanes, my_by, lane & ~1) * scale.down[0],
                         __shfl_sync(kAllLanes, my_by, lane | 1) * scale.down[1]};
    float cc[2] = {}, rc[2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float slope = by[h] * layout.slope;
      std::uint32_t four[kBlocks] = {};
#pragma unroll
      for (int i = 3; i >= 0; --i) {
        const auto value = [&](int block) { return y[8 * block + i / 2 * 4 + 2 * h + i % 2]; };
        const auto gather = [&](int block) {
          const float v = value(block);
          // P need not be orthogonal, so r may be anything; a NaN has the first cell.
          const float share = __saturatef(fmaf(v, slope, layout.middle));
          const float place = fmaf(share, layout.last_cell, Cells::kInteger);
          const Cell cell = tables.cell(__float_as_uint(place));
          const unsigned code =
              cell.before + (__float_as_uint(fmaf(v, -by[h], cell.boundary)) >> 31);
          four[block] = four[block] * layout.width_radix + code;
          return code;
        };
        if constexpr (kPairs) {
#pragma unroll
          for (int block = 0; block < kBlocks; block += 2) {
            const unsigned low = gather(block), high = gather(block + 1);
            cc[h] += tables.look_up(high * layout.radix + low);
          }
        } else {
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            const float c = tables.look_up(gather(block));
            cc[h] = fmaf(c, c, cc[h]);
            rc[h] = fmaf(value(block), c, rc[h]);
          }
        }
      }
      // Opaque, or everything is compiled once for each width.
      const auto width = static_cast<int>(cuda::opaque(static_cast<unsigned>(layout.width)));
      Tile::store_fours(four, width, out + (lane / 4 + 8 * h) * layout.out_stride);
      cc[h] += cuda::across(cc[h], 1);
      rc[h] += cuda::across(rc[h], 1);
      cc[h] += cuda::across(cc[h], 2);
      rc[h] += cuda::across(rc[h], 2);
    }
    if (quarter < 2 && my_row < rows) {
      const float my_rc = half == 0 ? rc[0] * by[0] : rc[1] * by[1];
      store_scale(p, first + my_row, stored_scale(p.rule, norm, half == 0 ? cc[0] : cc[1], my_rc));
    }
    __syncwarp();
    if (layout.width != p.bits)
      Tile::close_up(out, layout.out_stride, layout.packed.stride, p.bits);
    layout.packed.copy_out<kRows>(out, p, first, rows);
    __syncwarp();
    unsigned left = __ballot_sync(kAllLanes, extreme && quarter < 2 && my_row < rows);
    for (; left != 0; left &= left - 1) {
      const int at = __ffs(static_cast<int>(left)) - 1;
      const std::int64_t row = first + at / 4 + at % 4 * 8;
      if (!is_zero_row(p, row)) encode_row(p, row, reinterpret_cast<float*>(out));
    }
  }
}

template <class X, int kDim>
Status run_by_warpgroups(const Problem& p, int device, Stream stream) {
  using Tile = DenseTile<X, kDim>;
  const Cells cells = cells_for(kDim, p.bits, kDenseCellBytes, Tile::kMargin);
  const auto align = [](int bytes) { return (bytes + 15) / 16 * 16; };
  const int levels = 1 << p.bits;
  const bool pairs = p.bits <= 4 && !p.needs_products();
  DenseLayout l{.packed = PackedRows(p), .radix = static_cast<unsigned>(levels)};
  l.last_cell = static_cast<float>(cells.count - 1);
  l.slope = cells.slope / l.last_cell;
  l.middle = (cells.middle - Cells::kInteger) / l.last_cell;
  l.width = p.bits == 2 || p.bits == 4 ? p.bits : 8;
  l.width_radix = 1u << l.width;
  l.cells = 2 * Tile::kPartBytes;
  l.lookup = l.cells + cells.bytes();
  l.boundaries = l.lookup + (pairs ? levels * levels : levels) * kLookupCopies * 4;
  l.warps = l.boundaries + align(4 * levels);
  l.out = Tile::kRows * Tile::kStride;
  l.out_stride = l.width == p.bits ? l.packed.stride : kDim + 16;
  l.warp = l.out + std::max(Tile::kRows * l.out_stride, 2 * 4 * kDim);
  auto grid = cuda::tiles_grid(p.rows, 4 * Tile::kRows, kDenseGroups, l.warps, 4 * l.warp, device);
  grid.threads *= 4;
  return cuda::launch(
      AuraEncode::kName,
      pairs ? encode_by_warpgroups<X, kDim, true> : encode_by_warpgroups<X, kDim, false>, grid,
      device, stream, p, cells, l);
}

}  // namespace bittern::encode
