#include <cmath>
#include <limits>

#include "bittern/ops/aura_encode.h"
#include "core/numerics.h"
#include "cuda/aura.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = AuraEncode;
using cuda::kAllLanes;
using cuda::lane_index;
using cuda::RowRotation;
using cuda::RowTile;
using cuda::warp_index;

// ---- tuning ----

using cuda::kFewRows;
using cuda::kWarpsOfRows;
constexpr int kCellBytes = 32 << 10;  // of the table of cells, all its copies
constexpr int kLookupCopies = 32;     // of the codebook: one for each bank

// Of a block of encode_by_lanes: what its registers allow.
template <class Tile>
constexpr int kMostWarps = Tile::kEach <= 64 ? 20 : 12;

struct Problem {
  const void* x;
  const float *boundaries, *codebook;
  std::uint32_t* packed;
  void* norms;
  std::int64_t x_stride, packed_stride, norm_stride;  // in elements
  std::int64_t rows;
  RowRotation rotation;
  DType element;
  ScaleRule rule;
  bool f16_norm;
  int bits, words;  // of a code; of a packed row
};

__device__ float stored_scale(ScaleRule rule, float norm, float cc, float rc) {
  switch (rule) {
    case ScaleRule::matched: return sqrtf(cc) > kAuraTiny ? norm / sqrtf(cc) : norm;
    case ScaleRule::least_squares: return sqrtf(cc) > kAuraTiny ? norm * (rc / cc) : norm;
    case ScaleRule::unbiased: return rc > kAuraTiny ? norm / rc : norm;
    default: return norm;
  }
}

__device__ void store_norm(const Problem& p, std::int64_t row, float s) {
  const float most = p.f16_norm ? max_finite<f16>() : max_finite<float>();
  if (s > most) s = most;
  if (s < -most) s = -most;
  cuda::store_element(p.norms, p.f16_norm ? DType::f16 : DType::f32, row * p.norm_stride, s);
}

// ---- a warp to a row ----

// The number of sorted boundaries below r, 0 for a NaN: one bit of it
// after the other.
__device__ unsigned count_below(const float* boundaries, int bits, float r) {
  unsigned count = 0;
  for (unsigned step = 1u << (bits - 1); step > 0; step /= 2)
    if (r > __ldg(boundaries + count + step - 1)) count += step;
  return count;
}

struct Length {
  float norm;
  bool finite;
};

// Steps 1 and 2 but for the rotation: t = u.
__device__ Length normalise_row(const Problem& p, std::int64_t row, float* t) {
  const int lane = lane_index(), n = p.rotation.dim;
  bool finite = true;
  for (int j = lane; j < n; j += 32) {
    t[j] = cuda::load_element(p.x, p.element, row * p.x_stride + j);
    finite = finite && fabsf(t[j]) <= max_finite<float>();
  }
  finite = __all_sync(kAllLanes, finite);
  const auto length = [&] {
    return sqrtf(cuda::sum_by_warp(n, [&](int j) { return t[j] * t[j]; }));
  };
  float norm = length();
  const bool overflows = norm > max_finite<float>();
  if (overflows) {
    for (int j = lane; j < n; j += 32) t[j] *= kAuraShrink;
    norm = length();
  }
  const float inv = norm > kAuraTiny ? 1 / norm : 0;
  if (overflows) norm = fminf(norm / kAuraShrink, max_finite<float>());
  for (int j = lane; j < n; j += 32) t[j] *= inv;
  return {norm, finite};
}

// Steps 3 to 5, with room for the codes of a row.
__device__ void quantise_row(const Problem& p, std::int64_t row, Length length, const float* r,
                             std::uint32_t* codes) {
  const int lane = lane_index(), n = p.rotation.dim;
  for (int j = lane; j < n; j += 32)
    codes[j] = length.finite ? count_below(p.boundaries, p.bits, r[j]) : 0;
  const auto level = [&](int j) { return __ldg(p.codebook + codes[j]); };
  float cc = 0, rc = 0;
  if (p.rule != ScaleRule::none)
    cc = cuda::sum_by_warp(n, [&](int j) { return level(j) * level(j); });
  if (p.rule == ScaleRule::least_squares || p.rule == ScaleRule::unbiased)
    rc = cuda::sum_by_warp(n, [&](int j) { return r[j] * level(j); }) + 0.0f;
  __syncwarp();
  for (int w = lane; w < p.words; w += 32) {
    std::uint32_t word = 0;
    int j = 32 * w / p.bits, at = j * p.bits - 32 * w;  // the first code that reaches this word
    for (; at < 32 && j < n; ++j, at += p.bits) word |= at < 0 ? codes[j] >> -at : codes[j] << at;
    p.packed[row * p.packed_stride + w] = word;
  }
  if (lane == 0) {
    const float s = stored_scale(p.rule, length.norm, cc, rc);
    store_norm(p, row, length.finite ? s : std::numeric_limits<float>::quiet_NaN());
  }
  __syncwarp();
}

// `scratch` holds two rows of floats.
__device__ __noinline__ void encode_row(const Problem& p, std::int64_t row, float* scratch) {
  float* const spare = scratch + p.rotation.dim;
  const Length length = normalise_row(p, row, scratch);
  const float* r = cuda::rotate_by_warp(p.rotation, scratch, spare);
  quantise_row(p, row, length, r, reinterpret_cast<std::uint32_t*>(r == scratch ? spare : scratch));
}

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

// ---- a lane to a row ----

// Finds codes without a search: [-1.0625, 1.0625], where the coordinates of a unit vector lie, is
// cut into equal cells, so fine that none holds two boundaries. cell(r), the low bits of
// fma(r, slope, 2^23 + half the cells), never descends in r, so code(r) = boundaries in the cells
// before, plus 1 if r is above the one in its own.
struct Cell {
  float boundary;  // +inf if there is none; not -0, so that r is above it where boundary - r < 0
  unsigned before;
};
struct Cells {
  int count;   // a power of two
  int copies;  // lane l has copy l % copies, so that lanes rarely meet in a bank
  float slope, middle;

  static constexpr float kReach = 1.0625f;
  static constexpr float kInteger = 0x1p23f;
  static constexpr unsigned kFirst = 0x4b000000;  // its bits
  __device__ unsigned cell(float r) const { return __float_as_uint(fmaf(r, slope, middle)); }
};

// Lloyd-Max boundaries in the middle are about 4.1 sigma / levels apart, sigma = dim^-1/2.
Cells cells_for(int dim, int bits) {
  const double apart = 4.1 / std::sqrt(dim) / (1 << bits);
  const auto needed = static_cast<unsigned>(1.1 * 2 * Cells::kReach / apart) + 2;
  const int most = kCellBytes / static_cast<int>(sizeof(Cell));
  const int count = std::min(static_cast<int>(std::bit_ceil(needed)), most);
  return {.count = count,
          .copies = std::min(most / count, 16),
          .slope = (static_cast<float>(count / 2) - 1) / Cells::kReach,
          .middle = Cells::kInteger + static_cast<float>(count / 2)};
}

// Shared memory of encode_by_lanes: cells, lookup, the operands' tables; then for each
// warp its rows of x and its packed rows.
struct Layout {
  int element_bytes;
  unsigned radix;               // 2^bits, but the compiler must not know
  int lookup, tables, warps;    // offsets in bytes
  int stage, out_stride, warp;  // bytes of a warp's rows; of a packed row; of a warp
};

// The whole block fills table[entry][copy] with what value(entry) gives; copies are a power of two.
template <class T, class F>
__device__ void fill_table(T* table, int entries, int copies, const F& value) {
  const int shift = 31 - __clz(copies), step = static_cast<int>(blockDim.x);
  for (int i = static_cast<int>(threadIdx.x); i < entries << shift; i += step)
    table[i] = value(i >> shift);
}

// From the boundaries in shared memory. Are the cells fine enough?
__device__ bool fill_cells(Cell* table, const Cells& cells, const float* boundaries, int bits) {
  const int count = (1 << bits) - 1;
  // The cell of a boundary; before the first or after the last, where r never is.
  const auto cell_of = [&](int i) {
    const float b = boundaries[i];
    if (fabsf(b) > Cells::kReach) return b < 0 ? -1 : cells.count;
    return static_cast<int>(cells.cell(b) - Cells::kFirst);
  };
  bool fine = true;
  fill_table(table, cells.count, cells.copies, [&](int cell) {
    int before = 0;
    for (int step = 1 << (bits - 1); step > 0; step /= 2)
      if (cell_of(before + step - 1) < cell) before += step;
    Cell made{INFINITY, static_cast<unsigned>(before)};
    if (before < count && cell_of(before) == cell) made.boundary = boundaries[before] + 0.0f;
    if (before + 1 < count && cell_of(before + 1) == cell) fine = false;
    return made;
  });
  return __syncthreads_and(fine ? 1 : 0) != 0;
}

// A lane's codes to its packed row in shared memory; four[i] holds codes 4i to 4i + 3. A chunk of
// eight codes is `bits` bytes.
template <class Tile>
__device__ void store_codes(const std::uint32_t (&four)[Tile::kEach / 4], int bits, char* row) {
  constexpr int kChunks = Tile::kChunks;
  constexpr bool kWhole = Tile::kRows == 32 && kChunks % 4 == 0;  // the lane has the whole row
  if (kWhole && bits == 4) {
#pragma unroll
    for (int k = 0; k < kChunks / 4 * 4; k += 4) {
      reinterpret_cast<uint4*>(row)[k / 4] = make_uint4(
          four[2 * k] | four[2 * k + 1] << 16, four[2 * k + 2] | four[2 * k + 3] << 16,
          four[2 * k + 4] | four[2 * k + 5] << 16, four[2 * k + 6] | four[2 * k + 7] << 16);
    }
  } else if (kWhole && bits == 3) {
#pragma unroll
    for (int k = 0; k < kChunks / 4 * 4; k += 4) {
      std::uint32_t chunk[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) chunk[i] = four[2 * (k + i)] | four[2 * (k + i) + 1] << 12;
      auto* const words = reinterpret_cast<std::uint32_t*>(row) + k / 4 * 3;
      words[0] = chunk[0] | chunk[1] << 24;
      words[1] = chunk[1] >> 8 | chunk[2] << 16;
      words[2] = chunk[2] >> 16 | chunk[3] << 8;
    }
  } else if (bits == 4) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k)
      reinterpret_cast<std::uint32_t*>(row)[Tile::first_of_chunk(k) / 8] =
          four[2 * k] | four[2 * k + 1] << 16;
  } else if (bits == 8) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k)
      reinterpret_cast<uint2*>(row)[Tile::first_of_chunk(k) / 8] =
          make_uint2(four[2 * k], four[2 * k + 1]);
  } else if (bits == 2) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k)
      reinterpret_cast<std::uint16_t*>(row)[Tile::first_of_chunk(k) / 8] =
          static_cast<std::uint16_t>(four[2 * k] | four[2 * k + 1] << 8);
  } else {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const std::uint64_t chunk = four[2 * k] | static_cast<std::uint64_t>(four[2 * k + 1])
                                                    << 4 * bits;
      char* const to = row + Tile::first_of_chunk(k) / 8 * bits;
      for (int i = 0; i < bits; ++i) to[i] = static_cast<char>(chunk >> 8 * i);
    }
  }
}

// What the scale rule needs beyond the norm, and how it is found: nothing, or C, whose first sums,
// of two squares, are looked up by both codes at once (at most 4 bits); C; or C and D.
enum class Sums { pairs, squares, products };

// A warp takes RowTile::kRows rows at a time.
template <class Tile, Sums kSums>
__global__ void __launch_bounds__(32 * kMostWarps<Tile>, 1)
    encode_by_lanes(const __grid_constant__ Problem p, const Cells cells, const Layout layout) {
  constexpr int kEach = Tile::kEach;
  char* const shared = cuda::dynamic_shared<char>();
  auto* const cell_table = reinterpret_cast<Cell*>(shared);
  auto* const lookup = reinterpret_cast<float*>(shared + layout.lookup);
  char* const stage = shared + layout.warps + warp_index() * layout.warp;
  char* const out = stage + layout.stage;
  auto* const scratch = reinterpret_cast<float*>(out);  // of encode_row

  const int warps = static_cast<int>(blockDim.x / 32), lane = lane_index();
  const std::int64_t step = std::int64_t{gridDim.x} * warps * Tile::kRows;
  std::int64_t first = (std::int64_t{blockIdx.x} * warps + warp_index()) * Tile::kRows;
  const auto rows_at = [&](std::int64_t row) {
    return static_cast<int>(p.rows - row < Tile::kRows ? p.rows - row : Tile::kRows);
  };
  const auto fetch = [&](std::int64_t row) {
    if (row >= p.rows) return;
    const std::int64_t stride = p.x_stride * layout.element_bytes;
    const char* const from = static_cast<const char*>(p.x) + row * stride;
    if (p.element == DType::f32) {
      Tile::template fetch<float>(stage, from, stride, rows_at(row));
    } else {
      Tile::template fetch<bf16>(stage, from, stride, rows_at(row));
    }
  };
  fetch(first);
  const auto signs = Tile::Signs::of(p.rotation.table);

  const int levels = 1 << p.bits;
  auto* const boundaries = reinterpret_cast<float*>(shared + layout.tables);
  float* const codebook = boundaries + levels;
  for (int i = static_cast<int>(threadIdx.x); i < levels; i += static_cast<int>(blockDim.x)) {
    if (i + 1 < levels) boundaries[i] = p.boundaries[i];
    codebook[i] = p.codebook[i];
  }
  __syncthreads();
  if constexpr (kSums == Sums::pairs) {
    fill_table(lookup, levels * levels, kLookupCopies, [&](int pair) {
      const float low = codebook[pair & (levels - 1)], high = codebook[pair >> p.bits];
      return low * low + high * high;
    });
  } else {
    fill_table(lookup, levels, kLookupCopies, [&](int i) { return codebook[i]; });
  }
  if (!fill_cells(cell_table, cells, boundaries, p.bits)) {
    cuda::copy_async_wait<0>();
    for (; first < p.rows; first += step)
      for (int i = 0; i < rows_at(first); ++i) encode_row(p, first + i, scratch);
    return;
  }

  // Addresses in the tables are one integer multiplication and addition:
  // bits of a cell times cell_step, and so on.
  const unsigned cell_step = static_cast<unsigned>(cells.copies) * sizeof(Cell);
  const unsigned cell_base =
      static_cast<unsigned>(lane & (cells.copies - 1)) * sizeof(Cell) - Cells::kFirst * cell_step;
  constexpr unsigned kLookupStep = kLookupCopies * sizeof(float);
  const unsigned radix = layout.radix;
  const char* const lane_lookup = reinterpret_cast<const char*>(lookup + lane);
  const auto look_up = [&](unsigned index) {
    return *reinterpret_cast<const float*>(lane_lookup + index * kLookupStep);
  };

  for (; first < p.rows; first += step) {
    const int rows = rows_at(first);
    float x[kEach];
    cuda::copy_async_wait<0>();
    __syncwarp();
    switch (p.element) {
      case DType::f16: Tile::template load<f16>(stage, signs.again(), x); break;
      case DType::bf16: Tile::template load<bf16>(stage, signs.again(), x); break;
      default: Tile::template load<float>(stage, signs.again(), x);
    }
    __syncwarp();
    fetch(first + step);

    // 1. and 2. Rows whose squares overflow or that are not finite are
    // left to encode_row.
    const float squares = Tile::template sum<kEach>([&](int i) { return x[i] * x[i]; });
    const bool extreme = !(squares <= max_finite<float>());
    const float norm = sqrtf(squares);
    const float inv = norm > kAuraTiny ? 1 / norm : 0;
    if (extreme) {
#pragma unroll
      for (float& v : x) v = 0;
    }
#pragma unroll
    for (float& v : x) v = v * inv * p.rotation.scale;
    Tile::butterflies(x);
    Tile::template mix<false>(x);

    // 3. and 5. Codes gather in words of four, the last one first.
    std::uint32_t four[kEach / 4] = {};
    const auto gather = [&](int i) {
      const float r = x[i];
      const Cell& cell = *reinterpret_cast<const Cell*>(reinterpret_cast<const char*>(cell_table) +
                                                        (cells.cell(r) * cell_step + cell_base));
      const unsigned code = cell.before + (__float_as_uint(cell.boundary - r) >> 31);
      four[i / 4] = four[i / 4] * radix + code;
      return code;
    };
    float cc, rc = 0;
    if constexpr (kSums == Sums::pairs) {
      cc = Tile::template sum<kEach / 2>([&](int i) {
        const unsigned low = gather(i), high = gather(i + kEach / 2);
        return look_up(high * radix + low);
      });
    } else if constexpr (kSums == Sums::squares) {
      cc = Tile::template sum<kEach>([&](int i) {
        const float c = look_up(gather(i));
        return c * c;
      });
    } else {
      const cuda::TwoSums both = Tile::template sum<kEach>([&](int i) -> cuda::TwoSums {
        const float c = look_up(gather(i));
        return {c * c, x[i] * c};
      });
      cc = both.a;
      rc = both.b + 0.0f;
    }
    if (Tile::row() < rows && Tile::part() == 0)
      store_norm(p, first + Tile::row(), stored_scale(p.rule, norm, cc, rc));

    // 4. Through shared memory, so that the warp writes whole lines.
    char* const row_out = out + Tile::row() * layout.out_stride;
    store_codes<Tile>(four, p.bits, row_out);
    if (Tile::part() == 0) {
      for (int i = p.rotation.dim / 8 * p.bits; i < 4 * p.words; ++i) row_out[i] = 0;
    }
    __syncwarp();
    cuda::copy_rows_out(out, layout.out_stride, p.packed + first * p.packed_stride, p.packed_stride,
                        p.words, rows);
    __syncwarp();
    // The lanes of a row agree; its first one tells.
    unsigned left = __ballot_sync(kAllLanes, extreme && Tile::part() == 0 && Tile::row() < rows);
    for (; left != 0; left &= left - 1)
      encode_row(p, first + (__ffs(static_cast<int>(left)) - 1) / (32 / Tile::kRows), scratch);
  }
}

template <class Tile>
Status run_by_lanes(const Problem& p, int device, Stream stream) {
  constexpr int kDim = Tile::kEach * (32 / Tile::kRows);
  const Cells cells = cells_for(kDim, p.bits);
  constexpr bool kPower = Tile::kFactor == 1;
  const bool products = p.rule == ScaleRule::least_squares || p.rule == ScaleRule::unbiased;
  const bool pairs = kPower && p.bits <= 4 && !products;
  const auto align = [](int bytes) { return (bytes + 15) / 16 * 16; };
  Layout l{.element_bytes = static_cast<int>(size_of(p.element)), .radix = 1u << p.bits};
  l.lookup = cells.count * cells.copies * static_cast<int>(sizeof(Cell));
  l.tables = l.lookup + (1 << (pairs ? 2 * p.bits : p.bits)) * kLookupCopies * 4;
  l.warps = l.tables + 2 * 4 * (1 << p.bits);
  l.stage = Tile::kRows * (p.element == DType::f32 ? Tile::template kStageStride<float>
                                                   : Tile::template kStageStride<bf16>);
  l.out_stride = align(4 * p.words) | 16;
  l.warp = l.stage + std::max(Tile::kRows * l.out_stride, 2 * 4 * kDim);
  const auto grid =
      cuda::tiles_grid(p.rows, Tile::kRows, kMostWarps<Tile>, l.warps, l.warp, device);
  const auto launch = [&](auto kernel) {
    return cuda::launch(Op::kName, kernel, grid, device, stream, p, cells, l);
  };
  if (products) return launch(encode_by_lanes<Tile, Sums::products>);
  if constexpr (kPower) {
    if (pairs) return launch(encode_by_lanes<Tile, Sums::pairs>);
  }
  return launch(encode_by_lanes<Tile, Sums::squares>);
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
  const Cells cells = cells_for(Tile::kDim, p.bits);
  const auto align = [](int bytes) { return (bytes + 15) / 16 * 16; };
  typename Tile::Layout l{};
  l.cells = 2 * Tile::kMatrixBytes;
  l.lookup = l.cells + cells.count * cells.copies * static_cast<int>(sizeof(Cell));
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
