// Two products (work.h). For d_x a thread takes some columns of W and expands them once for every
// block of rows; for d_scales and d_biases it takes some panels, and sums dw^T over groups, a panel
// in a vector, while it is in cache.
#include "bittern/ops/quantized_matmul_backward.h"
#include "cpu/bf16.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/matmul/quantized_matmul_backward/work.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul/quantized_matmul_backward/quantized_matmul_backward_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/matmul/quantized_matmul_backward/operands-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

// What a thread works in, for words of Terms (operands-inl.h).
template <class Terms>
struct Scratch {
  using Word = typename Terms::Word;
  Scratch(const Work& work, std::uint8_t* at)
      : left(reinterpret_cast<Word*>(at)),
        right(left + work.left()),
        sums(reinterpret_cast<float*>(right + work.right())),
        repacked(reinterpret_cast<std::uint8_t*>(sums + work.sums())) {}
  Word* left;
  Word* right;  // tiles, each of Work::kDepth rows
  float* sums;
  std::uint8_t* repacked;
};

// ---- d_x ----

// right[column / kTileColumns][n - first_output][column % kTileColumns] = w[n][column], where words
// count for n.
template <class Terms>
void ExpandTiles(const PanelPart& part, const Op::Args& a, std::int64_t first,
                 std::int64_t first_output, std::int64_t depth, typename Terms::Word* right) {
  const WeightDesc& w = part.desc();
  if (w.plain() && w.stored()) {
    tile::WithElement(a.w.dtype, [&]<class X>(Type<X>) HWY_ATTR {
      const X* from = a.w.as<X>() + first_output * a.w.row_stride() + first;
      for (std::int64_t j = 0; j < w.inputs; j += kTileColumns)
        Terms::FromRows(from + j, a.w.row_stride(), depth, std::min(kTileColumns, w.inputs - j),
                        right + j * Work::kDepth, kTileColumns);
    });
    return;
  }
  constexpr std::int64_t kMost = 512;
  alignas(64) float numbers[kMost * kPanelRows];
  const std::int64_t step = std::max<std::int64_t>(ExpandStep(w), 2 * Work::kTileColumns);
  for (std::int64_t n = 0; n < depth; n += kPanelRows) {
    const std::uint8_t* panel = part.Panel((first_output + n) / kPanelRows);
    for (std::int64_t k = 0; k < w.inputs; k += step) {
      const std::int64_t count = std::min(step, w.inputs - k);
      Expand(w, panel, k, count, numbers);
      for (std::int64_t j = 0; j < count; j += kTileColumns)
        Terms::FromPanel(numbers + j * kPanelRows, depth - n, std::min(kTileColumns, count - j),
                         right + (k + j) * Work::kDepth + n / Terms::kPerWord * kTileColumns);
    }
  }
}

// Rows [first_row, first_row + rows) of columns [first, first + count) of d_x.
template <class Terms>
void InputBlock(const Work& work, const Op::Args& a, const Scratch<Terms>& s,
                std::int64_t first_row, std::int64_t rows, std::int64_t first, std::int64_t count) {
  const std::int64_t outputs = work.d.weights.outputs, stride = a.d_x.row_stride();
  constexpr std::int64_t kDepth = Work::kDepth * Terms::kPerWord;
  float* d_x = a.d_x.as<float>() + first_row * stride + first;
  if (outputs == 0) {  // nor are there weights
    for (std::int64_t m = 0; m < rows; ++m) std::fill_n(d_x + m * stride, count, 0.0f);
    return;
  }
  const float* d_y = a.d_y.as<float>() + first_row * a.d_y.row_stride();
  const PanelPart part(work.d.weights, a, first, count, s.repacked);
  for (std::int64_t n = 0; n < outputs; n += kDepth) {
    const std::int64_t depth = std::min(kDepth, outputs - n);
    ExpandTiles<Terms>(part, a, first, n, depth, s.right);
    Terms::FromColumns(d_y + n, a.d_y.row_stride(), rows, depth, s.left);
    for (std::int64_t j = 0; j < count; j += kTileColumns)
      Terms::MultiplyColumns(rows, std::min(kTileColumns, count - j), WordsOf<Terms>(depth), s.left,
                             s.right + j * Work::kDepth, s.sums + j * rows, n > 0);
  }
  for (std::int64_t j = 0; j < count; j += kTileColumns)
    tile::StoreAs(s.sums + j * rows, kTileColumns, rows, std::min(kTileColumns, count - j), d_x + j,
                  stride);
}

// Items [begin, end): each is a unit of columns of one of `parts` of the rows.
template <class Terms>
void InputBlocks(const Work& work, const Op::Args& a, std::int64_t parts, std::uint8_t* scratch,
                 std::int64_t begin, std::int64_t end) {
  const std::int64_t units = work.column_units(), unit = work.column_unit();
  const std::int64_t block = work.block_rows(parts);
  const Scratch<Terms> s(work, scratch);
  for (std::int64_t i = begin, next; i < end; i = next) {
    next = std::min(end, (i / units + 1) * units);
    const std::int64_t row = i / units * block, rows = std::min(block, work.d.rows - row);
    const std::int64_t last = std::min(work.d.weights.inputs, (i % units + next - i) * unit);
    for (std::int64_t k = i % units * unit; rows > 0 && k < last; k += Work::kColumns)
      InputBlock(work, a, s, row, rows, k, std::min(Work::kColumns, last - k));
  }
}

// ---- d_scales, d_biases and d_w ----

// Lanes [0, count) of the gradients of group g of rows n, n + 1, ... of W.
HWY_INLINE void StoreLanes(const MutView& to, std::int64_t n, std::int64_t g, VF v,
                           std::int64_t count) {
  if (!to) return;
  alignas(64) float lane[kWidth];
  hn::Store(v, DF(), lane);
  for (std::int64_t i = 0; i < std::min<std::int64_t>(count, kWidth); ++i)
    to.as<float>()[(n + i) * to.row_stride() + g] = lane[i];
}

// Sums over the groups of a part's panel, which has rows [n, n + lanes) of W. dw has kTileColumns
// numbers for each input.
template <class C>
HWY_NOINLINE void SumGroups(const WeightDesc& part, const std::uint8_t* panel, const float* dw,
                            const Op::Args& a, std::int64_t n, std::int64_t lanes,
                            std::int64_t first_group) {
  const DF df;
  const C codes;
  const bittern::matmul::PanelFormat format = bittern::matmul::panel_format(part);
  for (std::int64_t g = 0; g < part.groups(); ++g) {
    for (std::int64_t lane = 0; lane < lanes; lane += kWidth) {
      VF scale = hn::Zero(df), bias = hn::Zero(df);
      const std::uint8_t* chunk = panel + format.codes_at(g, part.groups()) + 4 * lane;
      const float* from = dw + g * format.unit * kTileColumns + lane;
      for (int k = 0; k < format.unit; k += bittern::matmul::kChunk) {
        Unroll<8>([&](auto q) BITTERN_INLINE_LAMBDA {
          const VU quad = codes.template Quad<q>(chunk);
          Unroll<4>([&](auto t) BITTERN_INLINE_LAMBDA {
            const VF v = hn::LoadU(df, from + (k + 4 * q + t) * kTileColumns);
            scale = hn::MulAdd(FloatOf(BitsAt(quad, 8 * t, 255)), v, scale);
            bias = hn::Add(bias, v);
          });
        });
        chunk += C::kChunkBytes;
      }
      StoreLanes(a.d_scales, n + lane, first_group + g, scale, lanes - lane);
      StoreLanes(a.d_biases, n + lane, first_group + g, bias, lanes - lane);
    }
  }
}

// Groups of inputs [first, first + count) of some panels.
template <class Terms>
void GridBlock(const Work& work, const Op::Args& a, const Scratch<Terms>& s,
               std::int64_t first_panel, std::int64_t panels, std::int64_t first,
               std::int64_t count) {
  const WeightDesc& w = work.d.weights;
  const std::int64_t n = first_panel * kPanelRows;
  const std::int64_t outputs = std::min(panels * kPanelRows, w.outputs - n);
  const std::int64_t x_stride = a.x.row_stride(), y_stride = a.d_y.row_stride();
  constexpr std::int64_t kDepth = Work::kDepth * Terms::kPerWord;
  for (std::int64_t m = 0; m < work.d.rows; m += kDepth) {
    const std::int64_t depth = std::min(kDepth, work.d.rows - m);
    for (std::int64_t k = 0; k < count; k += Work::kStrip)
      Terms::FromRows(a.x.as<float>() + m * x_stride + first + k, x_stride, depth,
                      std::min(Work::kStrip, count - k), s.left + k * Work::kDepth, Work::kStrip);
    for (std::int64_t j = 0; j < outputs; j += kTileColumns) {
      const std::int64_t width = std::min(kTileColumns, outputs - j);
      auto* right = s.right + j * Work::kDepth;
      Terms::FromRows(a.d_y.as<float>() + m * y_stride + n + j, y_stride, depth, width, right,
                      kTileColumns);
      for (std::int64_t k = 0; k < count; k += Work::kStrip)
        Terms::MultiplyStrip(std::min(Work::kStrip, count - k), width, WordsOf<Terms>(depth),
                             s.left + k * Work::kDepth, right,
                             s.sums + j * work.inputs() + k * kTileColumns, m > 0);
    }
  }
  if (work.d.rows == 0) std::fill_n(s.sums, work.sums(), 0.0f);
  // Inputs are whole vectors.
  for (std::int64_t j = 0; a.d_w && j < outputs; j += kTileColumns)
    tile::Transpose(s.sums + j * work.inputs(), kTileColumns, count,
                    std::min(kTileColumns, outputs - j),
                    a.d_w.as<float>() + (n + j) * a.d_w.row_stride() + first, a.d_w.row_stride());
  if (!a.d_scales && !a.d_biases) return;
  const PanelPart part(w, a, first, count, s.repacked);
  for (std::int64_t j = 0; j < outputs; j += kPanelRows) {
    const float* dw = s.sums + j / kTileColumns * kTileColumns * work.inputs() + j % kTileColumns;
    const std::uint8_t* panel = part.Panel(first_panel + j / kPanelRows);
    WithCodes(w, [&]<class C>(Type<C>) HWY_ATTR {
      SumGroups<C>(part.desc(), panel, dw, a, n + j, std::min(kPanelRows, outputs - j),
                   first / w.group_size);
    });
  }
}

// Items [begin, end): each is a panel's share of one of `parts` of the groups.
template <class Terms>
void GridBlocks(const Work& work, const Op::Args& a, std::int64_t parts, std::uint8_t* scratch,
                std::int64_t begin, std::int64_t end) {
  const WeightDesc& w = work.d.weights;
  const std::int64_t panels = w.panels(), groups = w.groups();
  const Scratch<Terms> s(work, scratch);
  for (std::int64_t i = begin, next; i < end; i = next) {
    const std::int64_t part = i / panels;
    next = std::min({end, (part + 1) * panels, i + Work::kPanels});
    const std::int64_t last = groups * (part + 1) / parts * w.group_size;
    for (std::int64_t k = groups * part / parts * w.group_size; k < last; k += Work::kInputs)
      GridBlock(work, a, s, i % panels, next - i, k, std::min(Work::kInputs, last - k));
  }
}

// ---- both, of the terms that `work` names ----

void RunInputs(const Work& work, const Op::Args& a, std::int64_t parts, std::uint8_t* scratch,
               std::int64_t begin, std::int64_t end) {
  WithTerms(work, [&]<class Terms>(Type<Terms>) {
    InputBlocks<Terms>(work, a, parts, scratch, begin, end);
  });
}

void RunGrids(const Work& work, const Op::Args& a, std::int64_t parts, std::uint8_t* scratch,
              std::int64_t begin, std::int64_t end) {
  WithTerms(work, [&]<class Terms>(Type<Terms>) {
    GridBlocks<Terms>(work, a, parts, scratch, begin, end);
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = QuantizedMatmulBackward;
using Work = matmul::BackwardWork;
BITTERN_EXPORT(RunInputs);
BITTERN_EXPORT(RunGrids);

template <bool kPairs>
std::size_t workspace(const Op::Desc& d, Device) {
  return static_cast<std::size_t>(std::max(num_threads(), 1) * Work(d, kPairs).slot_bytes());
}

template <bool kPairs>
Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace workspace) {
  const Work work(d, kPairs);
  const WeightDesc& w = d.weights;
  auto* scratch = static_cast<std::uint8_t*>(workspace.data);
  std::int64_t slots = static_cast<std::int64_t>(workspace.bytes) / work.slot_bytes();
  if (!cpu::grain_ignored()) {
    // Multiply-adds that are worth another thread.
    const double most = Op::flops(d) / 2 / static_cast<double>(16 * cpu::kGrain);
    slots = static_cast<std::int64_t>(std::clamp(most, 1.0, static_cast<double>(slots)));
  }
  const std::int64_t threads = std::min<std::int64_t>(slots, num_threads());
  // The second team is not the larger one: OpenMP would end threads of the caller's after the first
  // and start others, in another float mode, for the second.
  if (a.d_x && d.rows > 0 && w.inputs > 0) {
    const std::int64_t least = (d.rows + Work::kRows - 1) / Work::kRows;
    const std::int64_t parts =
        matmul::parts_for(work.column_units(), least, d.rows / Work::kLeastRows, threads);
    const std::int64_t units = work.column_units() * parts;
    slots = std::min(slots, units);
    cpu::parallel_slots(units, slots, [&](std::int64_t slot, std::int64_t begin, std::int64_t end) {
      BITTERN_CALL(RunInputs)
      (work, a, parts, scratch + slot * work.slot_bytes(), begin, end);
    });
  }
  if ((a.d_scales || a.d_biases || a.d_w) && w.grid_shape().numel() > 0) {
    const std::int64_t parts = matmul::parts_for(w.panels(), 1, w.groups(), threads);
    cpu::parallel_slots(w.panels() * parts, slots,
                        [&](std::int64_t slot, std::int64_t begin, std::int64_t end) {
                          BITTERN_CALL(RunGrids)
                          (work, a, parts, scratch + slot * work.slot_bytes(), begin, end);
                        });
  }
  return {};
}

// Rounding a factor to bf16 changes a term by 2^-8 of itself, both by r = 2^-7 + 2^-16. A sum of n
// terms in f32 is off by n 2^-24 of the sum of their magnitudes, in the kernel's order as in the
// contract's; in d_scales and d_biases n counts those of dw and of the group.
PrecisionGuarantee bf16_guarantee(const Op::Desc& d) {
  constexpr double kRounding = 0x1p-7 + 0x1p-16;
  const WeightDesc& w = d.weights;
  const std::int64_t terms = std::max(w.outputs, w.affine() ? d.rows + w.group_size : 0);
  return {.math_precision = DType::bf16,
          .accumulator = DType::f32,
          .same_bits_on_all_backends = false,
          .error_norm = ErrorNorm::terms,
          .error_bound = kRounding + (1 + kRounding) * static_cast<double>(terms + 8) * 0x1p-23};
}

constexpr Kernel<Op> kKernels[] = {
    {.name = "cpu_bf16",
     .backend = "cpu",
     .weaker = bf16_guarantee,
     .supports = [](const Op::Desc&, Device) { return cpu::bf16_supported(); },
     .workspace = workspace<true>,
     .architecture = cpu::architecture,
     .run = run<true>},
    cpu::exact_kernel<Op>(run<false>, workspace<false>)};

}  // namespace

std::span<const Kernel<QuantizedMatmulBackward>> quantized_matmul_backward_cpu() {
  return kKernels;
}

}  // namespace bittern
#endif  // HWY_ONCE
