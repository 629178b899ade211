// The driver of ops that map elements and sum a term of each over the elements of a parameter, for
// every granularity, in one pass over memory.
// Per-target include guard, as in simd-inl.h.
#if defined(BITTERN_CPU_GROUP_SUM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_CPU_GROUP_SUM_INL_H_
#undef BITTERN_CPU_GROUP_SUM_INL_H_
#else
#define BITTERN_CPU_GROUP_SUM_INL_H_
#endif

#include "cpu/reduce-inl.h"
#include "ops/quantize/tiles-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

// Terms of the first sum lie at terms[0 ...], those of the second at terms[kTermStride ...].
inline constexpr std::int64_t kTermStride = kTile + kOverrun;

// A body has element types X (of `out` and `a`) and B (of `b`), kSums, and
//   operator()(source, n, out, terms, a, b)    n elements, reading and writing whole vectors
//   Exact(scale, zero_point, out, terms, a, b)     one element, for zero points too far for vectors
template <class Body>
class GroupSums {
  using X = typename Body::X;
  using B = typename Body::B;
  using F = Math<X>;
  using D = hn::ScalableTag<F>;
  static constexpr std::int64_t kN = kLanes<F>;
  static constexpr int kSums = Body::kSums;

 public:
  // Sums go to sums[k], of the scale's dtype; those and `out` may be null.
  GroupSums(const cpu::SumPlan& plan, const ParamTensors& t, const Body& body, Rows<X> out,
            Rows<const X> a, Rows<const B> b, void* const (&sums)[kSums])
      : plan_(plan), g_(plan.g), t_(t), body_(body), out_(out), a_(a), b_(b) {
    for (int k = 0; k < kSums; ++k) sums_[k] = sums[k];
    stream_ =
        out.data != nullptr && g_.rows * g_.row_length * std::int64_t{sizeof(X)} >= kStreamBytes;
  }

  // Tasks [begin, end) of the plan; an empty range at the end joins what tasks left in `partial`.
  // Every element is read once, before it may be overwritten.
  void Run(std::int64_t begin, std::int64_t end, F* partial) {
    if (begin == end) return Join(partial);
    if (plan_.short_runs) {
      ShortRuns(begin, end);
    } else {
      const D d;
      for (std::int64_t task = begin; task < end; ++task) {
        const std::int64_t unit = task / plan_.split, residue = task % plan_.split;
        const cpu::BlockShape shape(plan_.n, plan_.columns_of(unit), kSums);
        const std::int64_t split = plan_.split_of(shape);
        if (residue >= split) continue;
        LoadUnit(unit);
        HWY_ALIGN F block[cpu::kBlockLanes];
        F* to = plan_.split > 1 ? partial + task * cpu::kBlockLanes : block;
        BlockTree(d, shape, Fill{*this, shape}, residue, split, to);
        if (plan_.split == 1) StoreUnit(unit, shape, block);
      }
    }
    if (stream_) hwy::FlushStream();
  }

 private:
  void Join(F* partial) {
    const D d;
    for (std::int64_t unit = 0; unit < plan_.units(); ++unit) {
      const cpu::BlockShape shape(plan_.n, plan_.columns_of(unit), kSums);
      F* part = partial + unit * plan_.split * cpu::kBlockLanes;
      for (std::int64_t stride = plan_.split_of(shape) / 2; stride > 0; stride /= 2)
        for (std::int64_t r = 0; r < stride; ++r)
          AddTo(d, part + (r + stride) * cpu::kBlockLanes, shape.lanes(),
                part + r * cpu::kBlockLanes);
      StoreUnit(unit, shape, part);
    }
  }

  void ShortRuns(std::int64_t begin, std::int64_t end) {
    const std::int64_t run = g_.run;
    const std::int64_t most =
        std::min(kTileRuns, std::max<std::int64_t>(1, (Spread(run) ? kTileRuns : kTile) / run));
    for (std::int64_t p = begin; p < end;) {
      const std::int64_t row = p / g_.param_step, at = p % g_.param_step;
      const std::int64_t left = std::min(end - p, g_.param_step - at);
      const std::int64_t count = std::min(left, most);
      SetParams(p, count, 1);
      Tile(row, at * run, count * run, left * run, run);
      for (std::int64_t k = 0; k < kSums; ++k)
        if (sums_[k] != nullptr) SumRuns(k, p, count);
      p += count;
    }
  }

  // Sum k of the tile's runs, parameters p ... p + count - 1.
  void SumRuns(std::int64_t k, std::int64_t p, std::int64_t count) {
    const D d;
    const std::int64_t run = g_.run;
    const F* terms = terms_ + k * kTermStride;
    for (std::int64_t first = 0; first < count; first += kN) {
      const std::int64_t some = std::min(kN, count - first);
      HWY_ALIGN F sum[kN];
      if (run >= kN) {
        hn::Vec<D> v[kN];
        for (std::int64_t i = 0; i < some; ++i)
          v[i] = RowTree(d, run, FromMemory{terms + (first + i) * run});
        for (std::int64_t i = some; i < kN; ++i) v[i] = hn::Zero(d);
        hn::Store(LaneTrees(d, v), d, sum);
      } else {
        for (std::int64_t i = 0; i < some; ++i)
          sum[i] = LaneTree(d, FromMemory{terms + (first + i) * run}(0, run), RowWidth(d, run));
      }
      for (std::int64_t i = 0; i < some; ++i) StoreSum(k, p + first + i, sum[i]);
    }
  }

  struct FromMemory {
    const F* terms;
    HWY_INLINE hn::Vec<D> operator()(std::int64_t i) const { return hn::LoadU(D(), terms + i); }
    HWY_INLINE hn::Vec<D> operator()(std::int64_t i, std::int64_t count) const {
      const D d;
      const auto in = hn::FirstN(d, static_cast<std::size_t>(count));
      return hn::IfThenElseZero(in, hn::LoadU(d, terms + i));
    }
  };

  // ---- units of columns ----

  void LoadUnit(std::int64_t unit) {
    first_row_ = g_.param_step == 0 ? 0 : unit / g_.param_step;
    first_position_ = (g_.param_step == 0 ? unit * plan_.columns : unit % g_.param_step) * g_.run;
    const std::int64_t columns = plan_.columns_of(unit);
    // Dense rows of few columns are taken several at a time.
    rows_per_tile_ = g_.run == 1 && plan_.dense && columns == g_.row_length
                         ? std::max<std::int64_t>(1, kTileRuns / columns)
                         : 1;
    SetParams(unit * plan_.columns, columns, rows_per_tile_);
  }

  struct Fill {
    GroupSums& self;
    const cpu::BlockShape& shape;
    void operator()(std::int64_t first, std::int64_t count, F* block) const {
      self.FillBlock(shape, first, count, block);
    }
  };

  void FillBlock(const cpu::BlockShape& shape, std::int64_t first, std::int64_t count, F* block) {
    const std::int64_t columns = shape.columns;
    for (std::int64_t done = 0; done < count;) {
      const std::int64_t term = first + done;
      const std::int64_t row = first_row_ + term / g_.run, offset = term % g_.run;
      const std::int64_t some = g_.run == 1 ? std::min(count - done, rows_per_tile_)
                                            : std::min({count - done, g_.run - offset, kTile});
      Tile(row, first_position_ + offset, some * columns, some * columns,
           columns == 1 && g_.run > 1 ? some : 1);
      for (std::int64_t k = 0; k < kSums; ++k)
        std::memcpy(block + (k * shape.rows + done) * columns, terms_ + k * kTermStride,
                    static_cast<std::size_t>(some * columns) * sizeof(F));
      done += some;
    }
  }

  void StoreUnit(std::int64_t unit, const cpu::BlockShape& shape, F* block) {
    FinishBlock(D(), shape, block);
    for (std::int64_t k = 0; k < kSums; ++k)
      for (std::int64_t c = 0; c < shape.columns; ++c)
        StoreSum(k, unit * plan_.columns + c, block[k * shape.rows * shape.columns + c]);
  }

  void StoreSum(std::int64_t k, std::int64_t p, F sum) {
    if (sums_[k] == nullptr) return;
    if constexpr (sizeof(F) == 8) {
      static_cast<double*>(sums_[k])[p] = sum;
    } else if (t_.scale_dtype == DType::f32) {
      static_cast<float*>(sums_[k])[p] = sum;
    } else if (t_.scale_dtype == DType::bf16) {
      static_cast<bf16*>(sums_[k])[p] = to_bf16(sum);
    } else {
      static_cast<f16*>(sums_[k])[p] = to_f16(sum);
    }
  }

  // ---- tiles ----

  // Runs that would waste most of a vector take parameters element by element.
  static bool Spread(std::int64_t run) { return run < 2 * kN && run % kN != 0; }

  // Parameters p ... p + count - 1, `repeats` times over.
  void SetParams(std::int64_t p, std::int64_t count, std::int64_t repeats) {
    first_param_ = p;
    period_ = count;
    runs_.any_far = false;
    for (std::int64_t i = 0; i < repeats; ++i) LoadParams(t_, p, count, i * count, runs_);
    SetBounds(t_, count * repeats, runs_);
  }

  // Elements [j, j + count) of a row: writes their output, and their terms to terms_. Each `run` of
  // them has a parameter of its own. Up to `readable` elements may be read.
  void Tile(std::int64_t row, std::int64_t j, std::int64_t count, std::int64_t readable,
            std::int64_t run) {
    const bool spread = count > run && Spread(run);
    const bool whole = (spread ? count : run) % kN == 0;
    if (whole) readable = count + kOverrun;
    const X* a = StageInput(a_.at(row, j), count, readable, staged_a_);
    const B* b = StageInput(b_.at(row, j), count, readable, staged_b_);
    X* to = out_.data == nullptr ? nullptr : out_.at(row, j);
    X* out = staged_out_ + reinterpret_cast<std::uintptr_t>(to) % 64 / sizeof(X);
    if (spread) {
      const RunParams<F>* p = &runs_;
      if (run > 1) {
        SpreadParams(runs_, run, 0, count, elements_);
        p = &elements_;
      }
      body_(PerElement<D>{*p}, count, out, terms_, a, b);
    } else {
      for (std::int64_t i = 0, k = 0; i < count; i += run, ++k)
        body_(OneRun<D>(runs_, k), run, out + i, terms_ + i, a + i, b + i);
    }
    if (runs_.any_far) {
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t k = i / run;
        const std::int32_t zero = t_.zero(first_param_ + k % period_);
        if (IsFar<F>(t_, zero)) body_.Exact(runs_.scale[k], zero, out[i], terms_ + i, a[i], b[i]);
      }
    }
    if (to != nullptr) EmitLines(out, static_cast<std::size_t>(count) * sizeof(X), to, stream_);
  }

  const cpu::SumPlan& plan_;
  const GroupGeometry& g_;
  const ParamTensors& t_;
  const Body& body_;
  const Rows<X> out_;
  const Rows<const X> a_;
  const Rows<const B> b_;
  void* sums_[kSums];
  bool stream_;

  std::int64_t first_param_ = 0, period_ = 1;
  std::int64_t first_row_ = 0, first_position_ = 0, rows_per_tile_ = 1;
  RunParams<F> runs_, elements_;
  alignas(64) X staged_out_[kTile + 64 + kOverrun];
  alignas(64) F terms_[kSums * kTermStride + kOverrun];
  Staging<X> staged_a_;
  Staging<B> staged_b_;
};

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif
#endif
