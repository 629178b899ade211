// A thread takes some panels of W and multiplies each with all rows of x in turn: a panel stays in
// L1 or L2, and with one row W is read once, from end to end. Stored weights are repacked panel by
// panel into scratch. All threads share x, packed in tiles (work.h).
#include "bittern/ops/quantized_matmul.h"
#include "cpu/bf16.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/matmul/quantized_matmul/work.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul/quantized_matmul/quantized_matmul_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "ops/matmul/quantized_matmul/activations-inl.h"
#include "ops/matmul/quantized_matmul/tiles-inl.h"
#include "ops/matmul/repack-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = QuantizedMatmul;

// Lanes [0, count) of a panel's results.
HWY_INLINE void StoreLanes(const float* from, std::int64_t count, float* to) {
  if (count == matmul::kLanes) {
    std::memcpy(to, from, matmul::kLanes * sizeof(float));
  } else {
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
  }
}
HWY_INLINE void StoreLanes(const float* from, std::int64_t count, bf16* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = to_bf16(from[i]);
}

class Multiplier {
 public:
  Multiplier(const matmul::Work& work, const Op::Args& a, std::uint8_t* scratch)
      : work_(work),
        w_(work.d.weights),
        a_(a),
        repacker_(w_),
        parts_(StoredPartsOf<const std::uint8_t>(a)) {
    repacked_ = scratch;
    scratch += work.repacked_bytes();
    grid_.s = reinterpret_cast<float*>(scratch);
    grid_.b = grid_.s + work.panels_at_once() * work.runs * matmul::kLanes;
    expanded_ = reinterpret_cast<float*>(scratch + work.grid_bytes());
  }

  void Integers(const matmul::PackedRows& rows, std::int64_t begin, std::int64_t end) {
    const matmul::PanelFormat format = matmul::panel_format(w_);
    const IntegerTiles tiles = TilesFor(work_);
    GridFunction* const grids = GridFunctionOf(w_);
    const QuantizedMatmulDesc& d = work_.d;
    const auto chunks_per_run = static_cast<int>(std::max<std::int64_t>(d.run() / 32, 1));
    const auto repeat = static_cast<int>(std::max<std::int64_t>(w_.group() / d.run(), 1));
    const bool has_bias = matmul::has_bias(w_);
    const std::int64_t units = w_.inputs / format.unit;
    constexpr std::int64_t kMost = kIntegerPanels * matmul::kLanes;
    alignas(64) float results[matmul::kIntegerTile * kMost];
    const std::int64_t next_grid = work_.runs * matmul::kLanes;
    for (std::int64_t p = begin, panels; p < end; p += panels) {
      panels = !work_.few && end - p >= kIntegerPanels ? kIntegerPanels : 1;
      const std::uint8_t* panel = Panel(p, repacked_);
      for (std::int64_t i = 1; i < panels; ++i) (void)Panel(p + i, repacked_ + i * PanelStep());
      for (std::int64_t i = 0; !work_.few && i < panels; ++i)
        grids(w_, format, {panel + i * PanelStep(), units}, repeat,
              {grid_.s + i * next_grid, grid_.b + i * next_grid});
      // While these are multiplied, the next ones are fetched.
      const std::uint8_t* ahead = panel + panels * PanelStep();
      const std::uint8_t* const last =
          w_.stored() || p + 2 * panels > end ? ahead : ahead + panels * PanelStep();
      const bool whole = (p + panels) * matmul::kLanes <= w_.outputs;
      const bool direct = whole && d.y_element() == DType::f32;
      for (std::int64_t first = 0, tile; first < rows.rows; first += tile) {
        tile = work_.tile_rows(rows.rows - first);
        const std::int64_t m = rows.first + first;
        const bool alone = panels == 1 || tile < matmul::kIntegerTile;
        for (std::int64_t i = 0; i < (alone ? panels : 1); ++i) {
          const std::int64_t n = (p + i) * matmul::kLanes;
          const float* const s = grid_.s + i * next_grid;
          const float* const b = grid_.b + i * next_grid;
          tiles({.weights = &w_,
                 .format = &format,
                 .walk = {panel + i * PanelStep(), units},
                 .next_panel = PanelStep(),
                 .s = s,
                 .b = has_bias ? b : nullptr,
                 .next_grid = next_grid,
                 .grids = work_.few ? grids : nullptr,
                 .room = grid_,
                 .repeat = repeat,
                 .ahead = ahead,
                 .ahead_end = last,
                 .x = reinterpret_cast<const std::int32_t*>(rows.x + first * work_.x_row_bytes()),
                 .factors = rows.factors + first * work_.runs * 3,
                 .tile = tile,
                 .chunks_per_run = chunks_per_run,
                 .planes = static_cast<int>(work_.planes),
                 .y = direct ? a_.y.as<float>() + m * a_.y.row_stride() + n
                             : results + i * matmul::kLanes,
                 .y_stride = direct ? a_.y.row_stride() : kMost},
                !alone);
        }
        ahead = std::min(ahead + work_.runs * 64, last);
        for (std::int64_t r = 0; !direct && r < tile; ++r)
          for (std::int64_t i = 0; i < panels; ++i)
            Store(m + r, p + i, results + r * kMost + i * matmul::kLanes);
      }
    }
  }

  void Floats(const matmul::PackedRows& rows, std::int64_t begin, std::int64_t end) {
    constexpr int kMostVectors = 8;
    const std::int64_t at_once = work_.panels_at_once(), slab = work_.slab();
    float* acc = expanded_ + at_once * slab * matmul::kLanes;
    for (std::int64_t p = begin; p < end; p += at_once) {
      const std::int64_t panels = std::min(at_once, end - p);
      const std::uint8_t* panel[4];
      const float* w[kMostVectors];
      float* sums[kMostVectors];
      int vectors = 0;
      for (std::int64_t i = 0; i < panels; ++i) {
        panel[i] = Panel(p + i, repacked_ + i * work_.panel_bytes());
        for (int part = 0; part < kParts; ++part, ++vectors) {
          w[vectors] = expanded_ + i * slab * matmul::kLanes + part * kWidth;
          sums[vectors] = acc + i * rows.rows * matmul::kLanes + part * kWidth;
        }
      }
      std::memset(acc, 0,
                  static_cast<std::size_t>(panels * rows.rows) * matmul::kLanes * sizeof(float));
      for (std::int64_t k = 0; k < w_.inputs; k += slab) {
        const std::int64_t count = std::min(slab, w_.inputs - k);
        for (std::int64_t i = 0; i < panels; ++i)
          Expand(w_, panel[i], k, count, expanded_ + i * slab * matmul::kLanes);
        for (std::int64_t first = 0, tile; first < rows.rows; first += tile) {
          tile = work_.tile_rows(rows.rows - first);
          const float* x =
              reinterpret_cast<const float*>(rows.x + first * work_.x_row_bytes()) + k * tile;
          float* at[kMostVectors];
          for (int v = 0; v < vectors; ++v) at[v] = sums[v] + first * matmul::kLanes;
          FloatTiles(w, vectors, x, tile, count, at);
        }
      }
      for (std::int64_t i = 0; i < panels; ++i)
        for (std::int64_t m = 0; m < rows.rows; ++m)
          Store(rows.first + m, p + i, acc + (i * rows.rows + m) * matmul::kLanes);
    }
  }

#if HWY_TARGET == HWY_AVX3_DL
  void Pairs(const matmul::PackedRows& rows, std::int64_t begin, std::int64_t end) {
    const std::int64_t at_once = work_.panels_at_once(), slab = work_.slab();
    const std::int64_t next = slab / 2 * matmul::kLanes, row = at_once * matmul::kLanes;
    auto* const words = reinterpret_cast<std::uint32_t*>(expanded_);
    float* const acc = expanded_ + at_once * next;
    for (std::int64_t p = begin; p < end; p += at_once) {
      const std::int64_t panels = std::min(at_once, end - p), n = p * matmul::kLanes;
      const bool whole = n + panels * matmul::kLanes <= w_.outputs;
      const bool direct = whole && work_.d.y_element() == DType::f32;
      const std::uint8_t* panel[matmul::kPairPanels];
      for (std::int64_t i = 0; i < panels; ++i)
        panel[i] = Panel(p + i, repacked_ + i * work_.panel_bytes());
      std::int64_t k = 0, count;
      do {  // once without inputs
        count = std::min(slab, w_.inputs - k);
        for (std::int64_t i = 0; i < panels; ++i)
          ExpandPairs(w_, panel[i], k, count, words + i * next);
        for (std::int64_t first = 0, tile; first < rows.rows; first += tile) {
          tile = work_.tile_rows(rows.rows - first);
          const auto* x =
              reinterpret_cast<const std::uint32_t*>(rows.x + first * work_.x_row_bytes());
          float* const sums = acc + first * row;
          PairJob job{.w = {words, next},
                      .panels = panels,
                      .x = {x + k / 2 * tile, tile},
                      .count = (count + 1) / 2,
                      .from = k == 0 ? nullptr : sums,
                      .from_stride = row,
                      .to = sums,
                      .to_stride = row};
          if (direct && k + count == w_.inputs) {
            job.to_stride = a_.y.row_stride();
            job.to = a_.y.as<float>() + (rows.first + first) * job.to_stride + n;
          }
          PairTiles(job, tile);
        }
        k += count;
      } while (k < w_.inputs);
      for (std::int64_t m = 0; !direct && m < rows.rows; ++m)
        for (std::int64_t i = 0; i < panels; ++i)
          Store(rows.first + m, p + i, acc + m * row + i * matmul::kLanes);
    }
  }
#endif

 private:
  // Bytes from one panel to the next, in W or in scratch.
  std::int64_t PanelStep() const {
    return w_.stored() ? work_.panel_bytes() : matmul::kLanes * w_.row_bytes();
  }
  const std::uint8_t* Panel(std::int64_t p, std::uint8_t* scratch) const {
    if (!w_.stored()) return a_.panels.as<std::uint8_t>() + p * matmul::kLanes * w_.row_bytes();
    repacker_.ToPanel(parts_, p * matmul::kLanes, scratch);
    return scratch;
  }

  HWY_INLINE void Store(std::int64_t m, std::int64_t p, const float* results) const {
    const std::int64_t n = p * matmul::kLanes;
    const std::int64_t count = std::min<std::int64_t>(matmul::kLanes, w_.outputs - n);
    const std::int64_t at = m * a_.y.row_stride() + n;
    if (work_.d.y_element() == DType::f32) {
      StoreLanes(results, count, a_.y.as<float>() + at);
    } else {
      StoreLanes(results, count, a_.y.as<bf16>() + at);
    }
  }

  const matmul::Work& work_;
  const WeightDesc& w_;
  const Op::Args& a_;
  Repacker repacker_;
  StoredParts<const std::uint8_t> parts_;
  std::uint8_t* repacked_;
  Grid grid_;
  float* expanded_;
};

// Panels [begin, end) times a block of rows. `scratch` is the thread's own.
void MultiplyPanels(const matmul::Work& work, const Op::Args& a, matmul::PackedRows rows,
                    std::uint8_t* scratch, std::int64_t begin, std::int64_t end) {
  if (work.few) {
    rows.x = scratch;
    rows.factors = reinterpret_cast<float*>(scratch + work.x_bytes(work.block_rows));
    PackRows(work, a.x, rows, 0, rows.rows);
    scratch += work.own_x_bytes();
  }
  Multiplier multiplier(work, a, scratch);
  switch (work.terms) {
    case matmul::Terms::integers: return multiplier.Integers(rows, begin, end);
    case matmul::Terms::floats: return multiplier.Floats(rows, begin, end);
    case matmul::Terms::pairs:
#if HWY_TARGET == HWY_AVX3_DL
      multiplier.Pairs(rows, begin, end);
#endif
      break;
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = QuantizedMatmul;
BITTERN_EXPORT(PackRows);
BITTERN_EXPORT(MultiplyPanels);

template <bool kPairs>
std::size_t workspace(const Op::Desc& d, Device) {
  const matmul::Work work(d, kPairs);
  return static_cast<std::size_t>(work.shared_bytes() +
                                  std::max(num_threads(), 1) * work.slot_bytes());
}

template <bool kPairs>
Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace workspace) {
  const matmul::Work work(d, kPairs);
  const WeightDesc& w = d.weights;
  if (d.rows == 0 || w.outputs == 0) return {};
  auto* shared = static_cast<std::uint8_t*>(workspace.data);
  std::uint8_t* own = shared + work.shared_bytes();
  std::int64_t slots =
      (static_cast<std::int64_t>(workspace.bytes) - work.shared_bytes()) / work.slot_bytes();
  // Weights that are worth another thread.
  const std::int64_t products = w.outputs * std::max<std::int64_t>(w.inputs, 1);
  if (!cpu::grain_ignored())
    slots = std::clamp<std::int64_t>(products / cpu::kGrain * work.block_rows, 1, slots);
  for (std::int64_t first = 0; first < d.rows; first += work.block_rows) {
    const matmul::PackedRows rows{first, std::min(work.block_rows, d.rows - first), shared,
                                  reinterpret_cast<float*>(shared + work.x_bytes(work.block_rows))};
    if (!work.few) {
      cpu::parallel(
          rows.rows,
          std::max<std::int64_t>(cpu::kGrain / 4 / std::max<std::int64_t>(w.inputs, 1), 1),
          [&](std::int64_t begin, std::int64_t end) {
            BITTERN_CALL(PackRows)(work, a.x, rows, begin, end);
          },
          work.tile());
    }
    cpu::parallel_slots(w.panels(), slots,
                        [&](std::int64_t slot, std::int64_t begin, std::int64_t end) {
                          BITTERN_CALL(MultiplyPanels)
                          (work, a, rows, own + slot * work.slot_bytes(), begin, end);
                        });
  }
  return {};
}

Status supports_bf16(const Op::Desc& d, Device) {
  if (d.activations != Activations::exact) {
    const auto activations = static_cast<std::size_t>(d.activations);
    return unsupported(std::string("activations: ").append(kActivationsNames[activations]) +
                       ", expected float");
  }
  return cpu::bf16_supported();
}

// A sum of n terms in f32 is off by n 2^-24 of the sum of their magnitudes, in the kernel's order
// as in the contract's. Rounding a factor to bf16 changes each term, and their magnitudes, by 2^-8:
// both factors by (1 + 2^-8)^2 - 1.
PrecisionGuarantee bf16_guarantee(const Op::Desc& d) {
  const double x = d.element == DType::f32 ? 0x1p-8 : 0;
  const double w = d.weights.type != WeightType::bf16 ? 0x1p-8 : 0;
  const double rounding = x + w + x * w;
  return {.math_precision = DType::bf16,
          .accumulator = DType::f32,
          .same_bits_on_all_backends = false,
          .error_norm = ErrorNorm::terms,
          .error_bound =
              rounding + (1 + rounding) * static_cast<double>(d.weights.inputs + 8) * 0x1p-23};
}

constexpr Kernel<Op> kKernels[] = {{.name = "cpu_bf16",
                                    .backend = "cpu",
                                    .weaker = bf16_guarantee,
                                    .supports = supports_bf16,
                                    .workspace = workspace<true>,
                                    .architecture = cpu::architecture,
                                    .run = run<true>},
                                   cpu::exact_kernel<Op>(run<false>, workspace<false>)};

}  // namespace

std::span<const Kernel<QuantizedMatmul>> quantized_matmul_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
