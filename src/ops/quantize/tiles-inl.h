// ForEachTile, which cuts a tensor of any granularity into tiles, so that an elementwise op of the
// quantise family is one small body.
#if defined(BITTERN_OPS_QUANTIZE_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BITTERN_OPS_QUANTIZE_TILES_INL_H_
#undef BITTERN_OPS_QUANTIZE_TILES_INL_H_
#else
#define BITTERN_OPS_QUANTIZE_TILES_INL_H_
#endif

#include <algorithm>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "cpu/stream-inl.h"
#include "ops/quantize/params-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {

// GroupGeometry with rows joined where memory allows it: element j of row i uses parameter
// i * param_step + j / run % period.
struct TileGeometry {
  std::int64_t rows, row_length, run, param_step, period;

  TileGeometry(const GroupGeometry& g, bool dense)
      : rows(g.rows),
        row_length(g.row_length),
        run(g.run),
        param_step(g.param_step),
        period(g.row_length / g.run) {
    if (!dense) return;
    if (param_step != 0) {
      period *= rows;
    } else if (period == 1) {
      run *= rows;
    }
    row_length *= rows;
    rows = 1;
    param_step = 0;
  }
};

template <class T>
struct Rows {
  T* data;
  std::int64_t stride;
  template <class View>
  explicit Rows(const View& v)
      : data(v.template as<std::remove_const_t<T>>()), stride(v.row_stride()) {}
  T* at(std::int64_t row, std::int64_t j) const { return data + row * stride + j; }
};

// A body may read up to kOverrun elements beyond a tile, but not beyond what its thread owns.
template <class T>
struct Staging {
  alignas(64) T data[kTile + kOverrun];
};

template <class T>
HWY_INLINE const T* StageInput(const T* from, std::int64_t count, std::int64_t readable,
                               Staging<std::remove_const_t<T>>& staging) {
  if (count + kOverrun <= readable) return from;
  std::memcpy(staging.data, from, static_cast<std::size_t>(count) * sizeof(T));
  return staging.data;
}

// Elements between the start of p's cache line and p.
template <class T>
HWY_INLINE std::int64_t InLine(const T* p) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(p) % 64 / sizeof(T));
}

// The runs of a tile. Run k begins k * run - skip elements after the tile does.
struct TileRuns {
  std::int64_t run, skip;  // elements of a run; those of run 0 that lie before the tile
  std::int64_t count;      // elements of the tile

  std::int64_t runs() const { return (skip + count - 1) / run + 1; }
  // Where run k lies in the tile.
  std::int64_t begin(std::int64_t k) const { return std::max<std::int64_t>(k * run - skip, 0); }
  std::int64_t end(std::int64_t k) const { return std::min((k + 1) * run - skip, count); }
};

// A tile's results in L1, and how many of them have been copied out.
template <class Out>
struct StagedTile {
  Out* data;
  Out* to;
  bool stream;
  std::int64_t emitted = 0;

  HWY_INLINE void Emit(std::int64_t until) {
    EmitLines(data + emitted, static_cast<std::size_t>(until - emitted) * sizeof(Out), to + emitted,
              stream);
    emitted = until;
  }
};

// The parameters of a tile's runs, the first of which is run `first` of its row.
template <class F>
HWY_INLINE void LoadTileParams(const ParamTensors& t, const TileGeometry& g, std::int64_t base,
                               std::int64_t first, std::int64_t count, RunParams<F>& runs) {
  runs.any_far = false;
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t at = (first + done) % g.period;
    const std::int64_t n = std::min(count - done, g.period - at);
    LoadParams(t, base + at, n, done, runs);
    done += n;
  }
  SetBounds(t, count, runs);
}

// Whole lines, streamed as they are computed.
template <class F, class Body, class Out, class... In>
HWY_INLINE void StreamRuns(const TileRuns& tile, const RunParams<F>& runs, const Body& body,
                           Out* to, const In*... in) {
  for (std::int64_t k = 0, end = tile.runs(); k < end; ++k) {
    const OneRun<hn::ScalableTag<F>> run(runs, k);
    const std::int64_t at = tile.begin(k), n = tile.end(k) - at;
    body(run, n, Streamed<Out>{to + at}, (in + at)...);
  }
}

// Runs that are short for vectors: each element with parameters of its own.
template <class F, class Body, class Out, class... In>
HWY_INLINE void StageElements(const TileRuns& tile, const RunParams<F>& runs,
                              RunParams<F>& elements, const Body& body, StagedTile<Out>& to,
                              const In*... in) {
  const RunParams<F>* p = &runs;
  if (tile.run > 1) {
    SpreadParams(runs, tile.run, tile.skip, tile.count, elements);
    p = &elements;
  }
  body(PerElement<hn::ScalableTag<F>>{*p}, tile.count, to.data, in...);
}

// Run by run, in pieces.
template <class F, class Body, class Out, class... In>
HWY_INLINE void StageRuns(const TileRuns& tile, const RunParams<F>& runs, const Body& body,
                          StagedTile<Out>& to, const In*... in) {
  for (std::int64_t k = 0, end = tile.runs(); k < end; ++k) {
    const OneRun<hn::ScalableTag<F>> run(runs, k);
    const std::int64_t stop = tile.end(k);
    for (std::int64_t at = tile.begin(k), n = 0; at < stop; at += n) {
      n = std::min(stop - at, kPiece);
      body(run, n, to.data + at, (in + at)...);
      if (!to.stream || runs.any_far) continue;
      // Whole lines leave at once, so that reads and writes of memory take turns.
      const std::int64_t ready = at + n - InLine(to.to + at + n);
      if (ready > to.emitted) to.Emit(ready);
    }
  }
}

// Again the runs whose zero points are too far for vectors, zero(k) that of run k.
template <class F, class Zero, class Body, class Out, class... In>
HWY_INLINE void StageFarRuns(const ParamTensors& t, const TileRuns& tile, const RunParams<F>& runs,
                             const Zero& zero, const Body& body, Out* to, const In*... in) {
  for (std::int64_t k = 0, end = tile.runs(); k < end; ++k) {
    const std::int32_t zero_point = zero(k);
    if (!IsFar<F>(t, zero_point)) continue;
    for (std::int64_t i = tile.begin(k); i < tile.end(k); ++i)
      to[i] = body.Exact(runs.scale[k], zero_point, in[i]...);
  }
}

// Output elements [begin, end) of an elementwise op. A body has
//   kWholeLines                         with 64-byte vectors, it stores whole lines
//   Prepare(params, runs)               once per set of runs, when runs are long
//   operator()(source, n, out, in...)   n elements, reading and writing whole vectors
//   Exact(scale, zero_point, in...)     one element, for zero points too far for vectors
// Where runs are whole lines of a large output, they are streamed as they are computed. Any other
// tile is computed into a buffer in L1 and copied out: tails need no care, and the copy is made of
// whole streamed lines however runs and rows lie.
template <class F, class Body, class Out, class... In>
void ForEachTile(const GroupGeometry& geometry, const ParamTensors& t, std::int64_t begin,
                 std::int64_t end, Body& body, Rows<Out> out, Rows<const In>... in) {
  constexpr std::int64_t kN = kLanes<F>;
  constexpr auto kLine = static_cast<std::int64_t>(64 / sizeof(Out));
  const std::int64_t length = geometry.row_length;
  const TileGeometry g(geometry, out.stride == length && ((in.stride == length) && ...));
  // Runs that would waste most of a vector take parameters element by element.
  const bool short_runs = g.run < 2 * kN && g.run % kN != 0;
  const bool stream =
      g.rows * g.row_length * static_cast<std::int64_t>(sizeof(Out)) >= kStreamBytes;

  RunParams<F> runs, elements;
  std::int64_t loaded = -1, loaded_runs = 0;
  alignas(64) Out staged_out[kTile + 64 + kOverrun];
  std::tuple<Staging<In>...> staged_in;

  std::int64_t row = begin / g.row_length, j = begin % g.row_length;
  while (begin < end) {
    const std::int64_t first = j / g.run, skip = j % g.run;
    const std::int64_t left = std::min(g.row_length - j, end - begin);
    Out* to = out.at(row, j);
    // Whole lines of whole runs need no buffer, and so may be many.
    bool direct = Body::kWholeLines && kStreams<hn::ScalableTag<F>> && stream && !short_runs &&
                  left >= kLine && InLine(to) == 0 && g.run % kLine == 0 && skip % kLine == 0;
    TileRuns tile{g.run, skip,
                  std::min(left, direct       ? kDirectTile
                                 : short_runs ? kTileRuns
                                              : kTile)};
    if (direct) {
      tile.count -= tile.count % kLine;
    } else {
      if (g.run <= kTile / kTileRuns) tile.count = std::min(tile.count, kTileRuns * g.run - skip);
      if (tile.count < left) tile.count -= InLine(to + tile.count);
    }

    const std::int64_t base = row * g.param_step, index = base + first % g.period;
    if (index != loaded || tile.runs() != loaded_runs) {
      loaded = index;
      loaded_runs = tile.runs();
      LoadTileParams(t, g, base, first, loaded_runs, runs);
      if (!short_runs) body.Prepare(runs, loaded_runs);
    }
    if (direct && runs.any_far) {
      direct = false;
      tile.count = std::min(tile.count, kTile);
    }

    const std::tuple<const In*...> from = std::apply(
        [&](auto&... staging) {
          return std::tuple<const In*...>(StageInput(
              in.at(row, j), tile.count, direct ? tile.count + kOverrun : left, staging)...);
        },
        staged_in);
    std::apply(
        [&](const In*... x) HWY_ATTR {
          if (direct) return StreamRuns(tile, runs, body, to, x...);
          StagedTile<Out> staged{staged_out + InLine(to), to, stream};
          if (short_runs) {
            StageElements(tile, runs, elements, body, staged, x...);
          } else {
            StageRuns(tile, runs, body, staged, x...);
          }
          if (runs.any_far) {
            const auto zero = [&](std::int64_t k) { return t.zero(base + (first + k) % g.period); };
            StageFarRuns(t, tile, runs, zero, body, staged.data, x...);
          }
          staged.Emit(tile.count);
        },
        from);

    begin += tile.count;
    j += tile.count;
    if (j == g.row_length) {
      j = 0;
      ++row;
    }
  }
  if (stream) hwy::FlushStream();
}

}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD
#endif
