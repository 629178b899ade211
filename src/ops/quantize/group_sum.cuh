// What the ops of the quantise family share that reduce over the elements of a parameter: sums by
// the halving tree, and ranges, which need no order but can share its shape.
//
// Pad n terms with zeros to a power of two N; with W a power of two, term i + W j (i < W). The tree
// first joins the j of each i, halving J = N / W, then the i: any thread may have any i, and what
// it joins are terms W apart, so that neighbouring threads read neighbouring elements.
#pragma once
#include <bit>

#include "ops/quantize/quantize.cuh"

namespace bittern::cuda {

// Two reductions at once; a body says how Terms are joined. Terms() is the padding.
template <class F>
struct Terms {
  F first = 0, second = 0;

  __device__ static Terms sum(const Terms& a, const Terms& b) {
    return {a.first + b.first, a.second + b.second};
  }
  __device__ static Terms widest(const Terms& a, const Terms& b) {
    return {a.first < b.first ? a.first : b.first, a.second > b.second ? a.second : b.second};
  }
};

// ---- within lanes ----

// The halving tree over lane * N + k, for kLanes neighbouring lanes; all of them get the sum. At
// each of the first levels a lane keeps one half of its values (k even or odd) and hands over the
// other, so log2 N levels cost N - 1 shuffles; bit b of k is then bit kLanes / 2 >> b of the lane.
template <int kLanes, int N>
__device__ inline float lane_tree(float (&v)[N]) {
  constexpr unsigned kAll = ~0u;
  const unsigned lane = threadIdx.x;
  int held = N;
#pragma unroll
  for (int bit = kLanes / 2; bit > 0; bit /= 2) {
    if (held == 1) {
      v[0] += __shfl_xor_sync(kAll, v[0], bit);
      continue;
    }
    const bool odd = (lane & bit) != 0;
    held /= 2;
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
      if (k >= held) break;
      const float keep = odd ? v[2 * k + 1] : v[2 * k], give = odd ? v[2 * k] : v[2 * k + 1];
      v[k] = keep + __shfl_xor_sync(kAll, give, bit);
    }
  }
#pragma unroll
  for (int k = N / 2; k > 0; k /= 2) {  // the upper bits of k, which this lane still holds
    if (k >= held) continue;
#pragma unroll
    for (int i = 0; i < k; ++i) v[i] += v[i + k];
  }
#pragma unroll
  for (int bit = N / held; bit > 1; bit /= 2)  // the lower ones
    v[0] += __shfl_xor_sync(kAll, v[0], kLanes / bit);
  return v[0];
}

// ---- short runs: several lanes a run, all of it in registers ----

// Runs of at most kPadded elements (more than half of it), whole packs. kLanes neighbouring lanes
// have one: pack l + kLanes k of it belongs to lane l. Two lines are thus what a few lanes read.
template <class X, int kPadded>
struct ShortRun {
  static constexpr int kElements = kPack<X>;
  static constexpr int kFullLanes = sizeof(X) == 2 ? 8 : 16;
  static constexpr int kLanes = kPadded / kElements < kFullLanes ? kPadded / kElements : kFullLanes;
  static constexpr int kPacks = kPadded / (kElements * kLanes);
};

// Blocks on a multiprocessor at once, as many as there are registers for.
template <class X>
inline constexpr int kSumBlocks = std::is_same_v<X, f16> ? 3 : 4;

struct Runs {
  std::uint32_t count;
  std::uint32_t length;
  Divisor32 per_row;
};

// A body that sums has Element, each_operand, params, Param<S>, load and store as in walk_quick,
// and
//   quick(param, loaded, first, second, sure)   results, and the terms of both sums
//   exact(row, column, param)                   one element, stored, and its Terms
//   join(terms, terms)
//   finish(param, terms)                        stores them
//
// kPlain: one row, runs of kPadded.
template <class Body, class S, int kPadded, bool kPlain>
__global__ void __launch_bounds__(kBlock, kPlain ? kSumBlocks<typename Body::Element> : 1)
    sum_runs(const Body body, const Runs runs) {
  using X = typename Body::Element;
  using Shape = ShortRun<X, kPadded>;
  constexpr int N = Shape::kElements, kPacks = Shape::kPacks;
  constexpr unsigned kLanes = Shape::kLanes;

  const std::uint32_t slot = blockIdx.x * kBlock + threadIdx.x, lane = slot % kLanes;
  const bool active = slot / kLanes < runs.count;  // every lane takes part in the shuffles
  const std::uint32_t run = active ? slot / kLanes : 0;
  const std::uint32_t row = kPlain ? 0 : runs.per_row.divide(run);
  const std::uint32_t in_row = kPlain ? run : run - row * runs.per_row.value();
  const int length = kPlain ? kPadded : static_cast<int>(runs.length);
  const std::int64_t first = std::int64_t{in_row} * length;
  const auto offset = [&](int k) { return static_cast<int>((lane + kLanes * k) * N); };
  const auto has = [&](int k) { return kPlain || offset(k) < length; };

  // Packs beyond the run's end are read from its beginning and ignored: loads behind a branch would
  // wait for each other.
  typename Body::template Loaded<N> loaded[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k)
    loaded[k] = body.template load<N>(row, first + (has(k) ? offset(k) : 0));
  const typename Body::template Param<S> param(body.params.template scale_as<S>(run),
                                               body.params.zero(run), body.params);

  // The tree over packs k: those of even k joined with those of odd k, and so within each.
  struct Pair {
    float first[N], second[N];
  };
  const auto terms = [&](int k) {
    Pair pair{};
    if (!has(k)) return pair;
    bool sure = param.usable;
    const auto results = body.quick(param, loaded[k], pair.first, pair.second, sure);
    const std::int64_t column = first + offset(k);
    if (sure) [[likely]] {
      if (active) body.store(results, row, column);
    } else if (active) {
      Pair by_definition;
#pragma unroll 1
      for (int i = 0; i < N; ++i) {
        const Terms<float> t = body.exact(row, column + i, run);
        by_definition.first[i] = t.first;
        by_definition.second[i] = t.second;
      }
      pair = by_definition;
    }
    return pair;
  };
  const auto joined = [&](auto&& self, auto count, int first) -> Pair {
    if constexpr (count() == 1) {
      return terms(first);
    } else {
      const std::integral_constant<int, count() / 2> half;
      Pair even = self(self, half, first);
      const Pair odd = self(self, half, first + kPacks / count());
#pragma unroll
      for (int i = 0; i < N; ++i) {
        even.first[i] += odd.first[i];
        even.second[i] += odd.second[i];
      }
      return even;
    }
  };
  Pair pair = joined(joined, std::integral_constant<int, kPacks>(), 0);
  const Terms<float> total{lane_tree<kLanes>(pair.first), lane_tree<kLanes>(pair.second)};
  if (lane == 0 && active) body.finish(run, total);
}

// ---- runs of any length ----

// Which element term t of a parameter is.
struct TermPlaces {
  std::int64_t params, terms;
  std::int64_t param_step, run;
  Divisor by_step, by_run;

  explicit TermPlaces(const GroupGeometry& g)
      : params(g.params),
        terms(g.row_length == 0 || g.rows == 0 ? 0 : g.count()),
        param_step(g.param_step),
        run(g.run),
        by_step(g.param_step > 0 ? g.param_step : 1),
        by_run(g.run) {}

  __device__ Place at(std::int64_t param, std::int64_t term) const {
    if (param_step != 0) {
      const std::int64_t row = by_step.divide(param);
      return {row, (param - row * param_step) * run + term, param};
    }
    const std::int64_t row = by_run.divide(term);
    return {row, param * run + term - row * run, param};
  }
};

// How the work is cut: W threads a parameter.
struct TermCut {
  std::int64_t width;      // W
  int log2_joined;         // of J
  bool neighbours_params;  // neighbouring threads have neighbouring parameters, not terms
  bool within_block;       // the block joins its W threads; otherwise they leave Terms to be joined

  TermCut(const TermPlaces& t, bool rows_shared) {
    constexpr std::int64_t kThreads = 1 << 19;  // in all, if there is work enough for them
    constexpr std::int64_t kLine = 32;
    const auto padded = static_cast<std::int64_t>(
        std::bit_ceil(static_cast<std::uint64_t>(t.terms > 0 ? t.terms : 1)));
    neighbours_params = rows_shared && t.run < 8;
    width = 1;
    while (width < padded &&
           (width * 2 * t.params <= kThreads || (!neighbours_params && width < kLine)))
      width *= 2;
    log2_joined = std::bit_width(static_cast<std::uint64_t>(padded / width)) - 1;
    within_block = width == 1 || (!neighbours_params && width <= kBlock);
  }
  std::int64_t left(std::int64_t params) const { return within_block ? 0 : params * width; }
};

// `count` = 2^log2 leaves by the halving tree, one at a time: in the order of reversed bits,
// neighbours are those that the tree joins first.
template <class Body, class F, class Leaf>
__device__ Terms<F> tree(const Body& body, int log2, Leaf&& leaf) {
  Terms<F> waiting[60];
  Terms<F> joined;
  const auto count = std::uint64_t{1} << log2;
#pragma unroll 1
  for (std::uint64_t c = 0; c < count; ++c) {
    const std::uint64_t j = log2 == 0 ? 0 : __brevll(c) >> (64 - log2);
    joined = leaf(static_cast<std::int64_t>(j));
    int level = 0;
    for (; (c >> level & 1) != 0; ++level) joined = body.join(waiting[level], joined);
    waiting[level] = joined;
  }
  return joined;
}

// Thread -> (parameter, i). `left` takes [i][parameter] where the block does not join them.
template <class Body>
__global__ void __launch_bounds__(kBlock)
    join_terms(const Body body, const TermPlaces places, const TermCut cut, const Divisor by_width,
               const Divisor by_params, Terms<Math<typename Body::Element>>* left) {
  using F = Math<typename Body::Element>;
  const std::int64_t id = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  std::int64_t i, param;
  if (cut.neighbours_params) {
    i = by_params.divide(id);
    param = id - i * places.params;
  } else {
    param = by_width.divide(id);
    i = id - param * cut.width;
  }
  const bool has = i < cut.width && param < places.params;
  Terms<F> joined;
  if (has) {
    joined = tree<Body, F>(body, cut.log2_joined, [&](std::int64_t j) {
      const std::int64_t term = i + cut.width * j;
      if (term >= places.terms) return Terms<F>();
      const Place at = places.at(param, term);
      return body.exact(at.row, at.column, at.param);
    });
  }
  if (!cut.within_block) {
    if (has) left[i * places.params + param] = joined;
    return;
  }
  __shared__ F shared[2][kBlock];  // a width never straddles blocks: both are powers of two
  for (int stride = static_cast<int>(cut.width) / 2; stride > 0; stride /= 2) {
    shared[0][threadIdx.x] = joined.first;
    shared[1][threadIdx.x] = joined.second;
    __syncthreads();
    if (i < stride)
      joined =
          body.join(joined, {shared[0][threadIdx.x + stride], shared[1][threadIdx.x + stride]});
    __syncthreads();
  }
  if (has && i == 0) body.finish(param, joined);
}

// Of `left`, [i][parameter], the i that are `width` apart: in place, since what a thread writes
// only it reads.
template <class Body>
__global__ void __launch_bounds__(kBlock)
    join_left(const Body body, std::int64_t params, std::int64_t width, int log2_joined,
              Terms<Math<typename Body::Element>>* left) {
  using F = Math<typename Body::Element>;
  const std::int64_t id = std::int64_t{blockIdx.x} * kBlock + threadIdx.x, step = params * width;
  if (id >= step) return;
  const Terms<F> joined =
      tree<Body, F>(body, log2_joined, [&](std::int64_t j) { return left[id + step * j]; });
  if (width == 1) {
    body.finish(id, joined);
  } else {
    left[id] = joined;
  }
}

// ---- on the host ----

// Bytes that run_reduction may need.
inline std::size_t reduction_workspace(const QuantizeDesc& d, Device) {
  const GroupGeometry g = d.geometry();
  const TermCut cut(TermPlaces(g), g.param_step == 0);
  const std::size_t bytes = d.element == DType::f64 ? sizeof(Terms<double>) : sizeof(Terms<float>);
  return static_cast<std::size_t>(cut.left(g.params)) * bytes;
}

// Every parameter, whatever it covers.
template <class Body>
Status run_reduction(std::string_view op, const GroupGeometry& g, const Body& body, int device,
                     Stream stream, Workspace workspace) {
  const TermPlaces places(g);
  const TermCut cut(places, g.param_step == 0);
  auto* left = static_cast<Terms<Math<typename Body::Element>>*>(workspace.data);
  BITTERN_TRY(launch(op, join_terms<Body>, grid_for(g.params * cut.width), device, stream, body,
                     places, cut, Divisor(cut.width), Divisor(g.params), left));
  if (cut.within_block) return {};
  constexpr int kLog2Most = 6;  // joined by one thread at a time
  for (std::int64_t width = cut.width; width > 1;) {
    int log2 = 0;
    for (; log2 < kLog2Most && width > 1; ++log2) width /= 2;
    BITTERN_TRY(launch(op, join_left<Body>, grid_for(g.params * width), device, stream, body,
                       g.params, width, log2, left));
  }
  return {};
}

// Sums, short runs in registers.
template <class Body>
Status run_sums(std::string_view op, const QuantizeDesc& d, const Body& body, int device,
                Stream stream, Workspace workspace) {
  using X = typename Body::Element;
  const GroupGeometry geometry = d.geometry();
  if constexpr (sizeof(X) < 8) {
    const JoinedRows g(geometry, dense_rows(body, geometry));
    const auto launch_runs = [&]<class S, int kPadded>(Type<S>,
                                                       std::integral_constant<int, kPadded>) {
      const Runs runs{.count = static_cast<std::uint32_t>(g.params),
                      .length = static_cast<std::uint32_t>(g.run),
                      .per_row = Divisor32(g.row_length / g.run)};
      auto* kernel = sum_runs<Body, S, kPadded, false>;
      if constexpr (kPadded == 64 || kPadded == 128) {
        if (g.rows == 1 && g.run == kPadded) kernel = sum_runs<Body, S, kPadded, true>;
      }
      return launch(op, kernel, grid_for(g.params * ShortRun<X, kPadded>::kLanes), device, stream,
                    body, runs);
    };
    const auto launch_padded = [&]<class S>(Type<S> s) {
      if (g.run <= 32) return launch_runs(s, std::integral_constant<int, 32>());
      if (g.run <= 64) return launch_runs(s, std::integral_constant<int, 64>());
      if (g.run <= 128) return launch_runs(s, std::integral_constant<int, 128>());
      return launch_runs(s, std::integral_constant<int, 256>());
    };
    if (geometry.param_step != 0 && g.run > 16 && g.run <= 256 && g.run % kPack<X> == 0 &&
        g.params <= kMostThreads / 16 && aligned_rows<kPack<X>>(body, g)) {
      return d.f32_scale || sizeof(X) == 4 ? launch_padded(Type<float>())
                                           : launch_padded(Type<X>());
    }
  }
  return run_reduction(op, geometry, body, device, stream, workspace);
}

}  // namespace bittern::cuda
