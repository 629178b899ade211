// What the kernels of aura_encode share: the problem, a row by the definition, and the tables by
// which codes are found.
#pragma once
#include <bit>
#include <cmath>

#include "bittern/ops/aura_encode.h"
#include "ops/aura/aura_tile.cuh"
#include "ops/aura/aura_tiles.cuh"
#include "ops/aura/encode_row.cuh"

namespace bittern::encode {

using cuda::RowTile;

struct Problem : RowCoder {
  const void* x;
  std::uint32_t* packed;
  void* scales;
  std::int64_t x_stride, packed_stride, scale_stride;  // in elements
  std::int64_t rows;
  DType element;
  bool f16_scale;

  // How many of `most` rows there are from `row` on.
  __device__ int rows_at(std::int64_t row, int most) const {
    return static_cast<int>(rows - row < most ? rows - row : most);
  }
};

__device__ inline void store_scale(const Problem& p, std::int64_t row, float s) {
  store_scale(p.scales, p.f16_scale, row * p.scale_stride, s);
}

// Packed rows in shared memory, on their way out. Rows that follow each other in device memory
// without a gap leave as one run of 16-byte pieces.
struct PackedRows {
  int stride;  // bytes
  bool joined;
  bool padded;  // to an odd number of pieces, so that neighbouring rows begin in different banks
  int pieces;   // of a row, if padded
  unsigned reciprocal;  // for small_quotient by that

  explicit PackedRows(const Problem& p)
      : joined(p.packed_stride == p.words && reinterpret_cast<std::uintptr_t>(p.packed) % 16 == 0),
        padded(p.words % 8 == 0),
        pieces(p.words / 4),
        reciprocal(pieces > 1 ? 0xffffffffu / static_cast<unsigned>(pieces) + 1u : 0u) {
    stride = padded || !joined ? (4 * p.words + 15) / 16 * 16 + (padded ? 16 : 0) : 4 * p.words;
  }
  __device__ static __noinline__ void copy_some(const char* tile, int stride, std::uint32_t* to,
                                                std::int64_t to_stride, int words, int rows) {
    cuda::copy_rows_out(tile, stride, to, to_stride, words, rows);
  }
  // A warp's: `rows` rows from `first` on, of a tile of kRows.
  template <int kRows>
  __device__ void copy_out(const char* tile, const Problem& p, std::int64_t first, int rows) const {
    std::uint32_t* const to = p.packed + first * p.packed_stride;
    if (!joined || rows < kRows || kRows * p.words % 4 != 0)
      return copy_some(tile, stride, to, p.packed_stride, p.words, rows);
#pragma unroll 1
    for (int at = lane_index(); at < kRows * p.words / 4; at += 32) {
      const int row = padded ? cuda::small_quotient(at, pieces, reciprocal) : 0;
      __stcs(reinterpret_cast<uint4*>(to) + at,
             *reinterpret_cast<const uint4*>(tile + 16 * (at + row)));
    }
  }
};

// ---- a row by the definition, a warp to it ----

// Step 1, and t = x, times a power of two where its squares are not ordinary.
__device__ inline Length measure_row(const Problem& p, std::int64_t row, float* t) {
  for (int j = lane_index(); j < p.rotation.dim; j += 32)
    t[j] = cuda::load_element(p.x, p.element, row * p.x_stride + j);
  return measure_row(p.rotation.dim, t);
}
// Nothing but zeros?
__device__ inline bool is_zero_row(const Problem& p, std::int64_t row) {
  bool zero = true;
  for (int j = lane_index(); j < p.rotation.dim; j += 32)
    zero = zero && cuda::load_element(p.x, p.element, row * p.x_stride + j) == 0;
  return __all_sync(kAllLanes, zero) != 0;
}

// Steps 3 to 5, with room for the codes of a row.
__device__ inline void quantise_row(const Problem& p, std::int64_t row, Length length,
                                    const float* r, std::uint32_t* codes) {
  const float s = quantise_row(p, length, r, codes, p.packed + row * p.packed_stride);
  if (lane_index() == 0) store_scale(p, row, s);
  __syncwarp();
}

// `scratch` holds two rows of floats.
__device__ __noinline__ inline void encode_row(const Problem& p, std::int64_t row, float* scratch) {
  const Length length = measure_row(p, row, scratch);
  const float s = encode_row(p, length, scratch, p.packed + row * p.packed_stride);
  if (lane_index() == 0) store_scale(p, row, s);
  __syncwarp();
}

// ---- codes without a search ----

// [-1.0625, 1.0625], where the coordinates of a unit vector lie, is cut into equal cells, so fine
// that none has two boundaries within it or `margin` beside it. cell(r), the low bits of
// fma(r, slope, 2^23 + half the cells), never descends in r, so code(r) = boundaries before the
// cell's own, plus 1 if r is above that. r that is known within less than `margin` has the right
// code unless it is as near to the cell's boundary.
struct Cell {
  float boundary;  // +inf if there is none; not -0, so that r is above it where boundary - r < 0
  unsigned before;
};
struct Cells {
  int count;   // a power of two
  int copies;  // at most kMostCopies: lane l has copy l % copies, so that lanes rarely meet in a
               // bank
  float slope, middle;
  float margin;

  static constexpr int kMostCopies = 16;
  static constexpr float kReach = 1.0625f;
  static constexpr float kInteger = 0x1p23f;
  static constexpr unsigned kFirst = 0x4b000000;  // its bits
  __device__ unsigned cell(float r) const { return __float_as_uint(fmaf(r, slope, middle)); }
  __host__ __device__ int bytes() const { return count * copies * static_cast<int>(sizeof(Cell)); }
};

constexpr int kLookupCopies = 32;  // of the codebook: one for each bank

// Lloyd-Max boundaries in the middle are about 4.1 sigma / levels apart, sigma = dim^-1/2. At most
// `bytes` in all copies.
inline Cells cells_for(int dim, int bits, int bytes, float margin = 0) {
  const double apart = 4.1 / std::sqrt(dim) / (1 << bits);
  const auto needed = static_cast<unsigned>(1.1 * 2 * Cells::kReach / apart) + 2;
  const int most = bytes / static_cast<int>(sizeof(Cell));
  const int count = std::min(static_cast<int>(std::bit_ceil(needed)), most);
  return {.count = count,
          .copies = std::min(most / count, Cells::kMostCopies),
          .slope = (static_cast<float>(count / 2) - 1) / Cells::kReach,
          .middle = Cells::kInteger + static_cast<float>(count / 2),
          .margin = margin};
}

// The whole block fills table[entry][copy] with what value(entry) gives; copies are a power of two.
template <class T, class F>
__device__ void fill_table(T* table, int entries, int copies, const F& value) {
  const int shift = 31 - __clz(copies), step = static_cast<int>(blockDim.x);
  for (int i = static_cast<int>(threadIdx.x); i < entries << shift; i += step)
    table[i] = value(i >> shift);
}

// From the boundaries in shared memory. Are the cells fine enough?
__device__ inline bool fill_cells(Cell* table, const Cells& cells, const float* boundaries,
                                  int bits) {
  const int count = (1 << bits) - 1;
  // The cell of a boundary; before the first or after the last, where r never is.
  const auto cell_of = [&](float b) {
    if (fabsf(b) > Cells::kReach) return b < 0 ? -1 : cells.count;
    return static_cast<int>(cells.cell(b) - Cells::kFirst);
  };
  const auto first_cell = [&](int i) { return cell_of(boundaries[i] - cells.margin); };
  const auto last_cell = [&](int i) { return cell_of(boundaries[i] + cells.margin); };
  bool fine = true;
  fill_table(table, cells.count, cells.copies, [&](int cell) {
    int before = 0;
    for (int step = 1 << (bits - 1); step > 0; step /= 2)
      if (last_cell(before + step - 1) < cell) before += step;
    Cell made{INFINITY, static_cast<unsigned>(before)};
    if (before < count && first_cell(before) <= cell) made.boundary = boundaries[before] + 0.0f;
    if (before + 1 < count && first_cell(before + 1) <= cell) fine = false;
    return made;
  });
  return __syncthreads_and(fine ? 1 : 0) != 0;
}

// A lane's way into the tables. An address is one instruction: a multiplication and addition of the
// bits of a cell or, where their copies are known (not 0), a shift and addition.
template <int kCopies>
class Tables {
 public:
  __device__ Tables(const Cells& cells, const Cell* table, const float* lookup)
      : step_(static_cast<unsigned>(cells.copies) * sizeof(Cell)),
        cells_(cuda::shared_address(table + (lane_index() & (cells.copies - 1))) -
               Cells::kFirst * step_),
        lookup_(cuda::shared_address(lookup + lane_index())) {}
  // What cell() gave.
  __device__ Cell cell(unsigned bits) const {
    const unsigned step = kCopies == 0 ? step_ : kCopies * sizeof(Cell);
    return cuda::load_shared<Cell>(bits * step + cells_);
  }
  __device__ float look_up(unsigned index) const {
    constexpr unsigned kStep = kLookupCopies * sizeof(float);
    return cuda::load_shared<float>(index * kStep + lookup_);
  }

 private:
  unsigned step_, cells_, lookup_;
};

}  // namespace bittern::encode
