// What the quantise family shares on the GPU: its arithmetic without divisions, and run_elements,
// which walks a tensor of any granularity, so that an elementwise op is one small body.
#pragma once
#include <algorithm>
#include <cmath>
#include <string_view>

#include "bittern/quantize_desc.h"
#include "core/numerics.h"
#include "cuda/device.cuh"
#include "cuda/ptx.cuh"
#include "cuda/runtime.cuh"

namespace bittern::cuda {

// ---- operands ----

template <class T>
struct Rows {
  T* data;  // null: left out
  std::int64_t stride;

  // Codes are taken as bytes: s8 and u8 have the same low byte.
  template <class View>
  explicit Rows(const View& v) : data(static_cast<T*>(v.data)), stride(v.row_stride()) {}
  __device__ T* at(std::int64_t row, std::int64_t column) const {
    return data + row * stride + column;
  }
};

// What every op of the family reads.
struct Params {
  const void* scale;
  const std::int32_t* zero_point;  // null: 0
  std::int32_t q_min, q_max;
  bool f32_scale;
  // For Quick: the zero points [first, first + count) with which it is exact.
  float q_least, q_most;
  std::int32_t first_zero;
  std::uint32_t zero_count;

  Params(const QuantizeDesc& d, const ConstView& scales, const ConstView& zero_points)
      : scale(scales.data),
        zero_point(zero_points.as<std::int32_t>()),
        q_min(d.q_min),
        q_max(d.q_max),
        f32_scale(d.f32_scale),
        q_least(static_cast<float>(d.q_min)),
        q_most(static_cast<float>(d.q_max)) {
    constexpr std::int64_t kFarZero = 1 << 22;  // beyond it, f32 might round q_min - zp
    const std::int64_t far = is_half(d.element) && !d.f32_scale ? 511 : kFarZero - 1;
    const std::int64_t least = std::max(d.q_max - far, -kFarZero);
    const std::int64_t most = std::min(d.q_min + far, kFarZero);
    first_zero = static_cast<std::int32_t>(std::clamp(least, -kFarZero, kFarZero));
    zero_count = most < least ? 0 : static_cast<std::uint32_t>(most - least + 1);
  }

  template <class S>
  __device__ Math<S> scale_as(std::int64_t p) const {
    return load_math(static_cast<const S*>(scale)[p]);
  }
  // For elements of X.
  template <class X>
  __device__ Math<X> scale_for(std::int64_t p) const {
    if constexpr (sizeof(X) == 2) {
      if (f32_scale) return scale_as<float>(p);
    }
    return scale_as<X>(p);
  }
  // A gradient of it; null: left out.
  template <class X>
  __device__ void store_for(void* to, std::int64_t p, Math<X> value) const {
    if (to == nullptr) return;
    if (sizeof(X) == 2 && f32_scale) {
      static_cast<float*>(to)[p] = static_cast<float>(value);
    } else {
      static_cast<X*>(to)[p] = store_math<X>(value);
    }
  }
  __device__ std::int32_t zero(std::int64_t p) const {
    return zero_point != nullptr ? zero_point[p] : 0;
  }
};

// Elements in one access of 16 bytes.
template <class X>
inline constexpr int kPack = 16 / static_cast<int>(sizeof(X));

template <class X, int N>
__device__ inline Pack<X, N> rounded(const float (&values)[N]) {
  Pack<X, N> pack;
  if constexpr (sizeof(X) == 2) {
    std::uint32_t words[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) words[i] = store_pair<X>(values[2 * i], values[2 * i + 1]);
    memcpy(&pack, words, sizeof pack);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) pack.at[i] = values[i];
  }
  return pack;
}

// ---- R(x / s) without a division ----

// Of halves with scales of the same dtype.
template <class X, class S>
inline constexpr bool kHalves = sizeof(X) == 2 && sizeof(S) == 2;

// Added to |z| <= 2^22, rounds it to an integer, half to even, and leaves that in the low bits.
inline constexpr float kToInteger = 0x1.8p23f;

// Sizes for which divide() may be trusted. (Smaller x are as good, except that a tiny quotient may
// be off: see Watch.)
inline constexpr float kMostOrdinary = 0x1p60f;
inline constexpr std::uint32_t kLeastBits = (127 - 60) << 23, kMostBits = (127 + 60) << 23;

// x / s as IEEE rounds it, given r = 1 / s rounded: the first correction brings z within one ulp;
// then the remainder is exact, and by Markstein's theorem the second gives the quotient. 0 gives 0,
// of the right sign where s > 0: the remainder is then +0, and what is added -0.
//
// kHalf: x and s have at most 11 significant bits each. The first remainder is then exact (its
// product has 35 bits, of which 22 cancel), so the first correction adds the true one within 2^-46
// of z, while z is 2^-36 away from where rounding would change: one correction does.
template <bool kHalf>
__device__ inline float divide(float x, float s, float r) {
  float z = x * r;
  z = fmaf(fmaf(z, s, -x), -r, z);
  return kHalf ? z : fmaf(fmaf(z, s, -x), -r, z);
}

// Sees whether all x are ordinary enough.
class Watch {
 public:
  __device__ void take(float x) { sum_ += fabsf(x); }
  // Also looks for x that are tiny but not 0, in dtypes that have them. Twice the bits drop the
  // sign, and 0 becomes the largest.
  template <class X>
  __device__ void take_exactly(float x) {
    take(x);
    if constexpr (!std::is_same_v<X, f16>) least_ = min(least_, 2 * __float_as_uint(x) - 2);
  }
  // No NaN, infinity or huge x (and no tiny one).
  __device__ bool ordinary() const {
    return (sum_ < kMostOrdinary) & (least_ >= 2 * kLeastBits - 2);
  }

 private:
  float sum_ = 0;
  std::uint32_t least_ = ~0u;
};

// The elements of one parameter, in f32; for x that Watch passes.
template <bool kHalf>
class Quick {
 public:
  __device__ Quick(float s, std::int32_t zp, const Params& t)
      : scale(s),
        inverse(ordinary_reciprocal(s)),
        zero(static_cast<float>(zp)),
        lo(t.q_least - zero),
        hi(t.q_most - zero) {
    // Twice the bits drop the sign.
    usable = (2 * (__float_as_uint(s) - kLeastBits) < 2 * (kMostBits - kLeastBits)) &
             (static_cast<std::uint32_t>(zp - t.first_zero) < t.zero_count);
  }

  __device__ float quotient(float x) const { return divide<kHalf>(x, scale, inverse); }

  // kToInteger + R(x / s) where that is in [lo, hi]; otherwise a number on the same side of them.
  //
  // kHalf: x / s is a tie k + 1/2 exactly, or at least 2^-12 away from one. Up to |z| = 512, x
  // times the rounded 1 / s is within 2^-15 of it, and the sum with kToTies, one rounding of the
  // exact product, within 2^-14 of that. So ties come out as ties, exactly, being multiples of
  // 2^-13, and all else on its side of them: R is the same. Beyond 512 it is as far outside.
  __device__ float nearest(float x) const {
    if constexpr (kHalf) {
      constexpr float kToTies = 0x1.8p10f;
      return fmaf(x, inverse, kToTies) + (kToInteger - kToTies);
    } else {
      return quotient(x) + kToInteger;
    }
  }

  __device__ bool inside(float nearest) const {
    return nearest >= kToInteger + lo && nearest <= kToInteger + hi;
  }
  // kToInteger + clamp(R(x / s), lo, hi)
  __device__ float clamped(float x) const {
    return fminf(fmaxf(nearest(x), kToInteger + lo), kToInteger + hi);
  }
  // The code in the low byte.
  __device__ std::uint32_t code(float x) const { return __float_as_uint(clamped(x) + zero); }

  float scale, inverse, zero;
  float lo, hi;  // q_min - zp, q_max - zp
  bool usable;   // lo and hi are at most 511 (2^22 - 1) in size, and s is ordinary
};

// The low bytes of four registers.
__device__ inline std::uint32_t low_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                          std::uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// ---- q - zp ----

// s8 codes are read as q + 128, so that no byte has a sign.
class Codes {
 public:
  explicit Codes(DType code) : flip_(code == DType::s8 ? 0x80808080u : 0) {}

  // N codes, four in a word.
  template <int N>
  __device__ Pack<std::uint32_t, N / 4> load(const std::uint8_t* q) const {
    auto words = Pack<std::uint32_t, N / 4>::load(reinterpret_cast<const std::uint32_t*>(q));
#pragma unroll
    for (int i = 0; i < N / 4; ++i) pin(words.at[i]);
    return words;
  }
  // Code i less the zero point, exactly: the byte in the low bits of 2^23 makes the float 2^23 + q
  // (+ 128).
  template <int N, class Param>
  __device__ float difference(const Pack<std::uint32_t, N>& words, int i, const Param& p) const {
    const std::uint32_t bits =
        __byte_perm(words.at[i / 4] ^ flip_, 0x4b000000u, 0x7440u + static_cast<unsigned>(i % 4));
    return __uint_as_float(bits) - (p.offset + static_cast<float>(flip_ & 0x80));
  }
  __device__ std::int64_t value(std::uint8_t byte) const {
    return static_cast<std::int64_t>(byte ^ (flip_ & 0x80)) - (flip_ & 0x80);
  }

 private:
  std::uint32_t flip_;
};

struct CodeParam {
  __device__ CodeParam(float s, std::int32_t zp, const Params&)
      : scale(s),
        offset(0x1p23f + static_cast<float>(zp)),
        usable(zp >= -(1 << 22) && zp <= (1 << 22)) {}
  float scale;
  float offset;  // 2^23 + zp
  bool usable;   // nothing was rounded
};

// By the definition.
template <class F>
__device__ std::uint8_t exact_code(F x, F s, std::int32_t zp, const Params& t) {
  return static_cast<std::uint8_t>(quantize_code(quotient(x, s), zp, t.q_min, t.q_max));
}

// ---- the walk ----

// GroupGeometry with rows joined where memory and parameters allow it.
struct JoinedRows : GroupGeometry {
  JoinedRows(const GroupGeometry& g, bool dense) : GroupGeometry(g) {
    if (!dense || rows <= 1 || (param_step == 0 && params != 1)) return;
    if (params == 1) run *= rows;
    row_length *= rows;
    rows = 1;
  }
};

struct Place {
  std::int64_t row, column, param;
};

// Elements' parameters: one for all, or each its own.
template <class Param>
struct OneParam {
  Param param;
  __device__ const Param& operator()(int) const { return param; }
};
template <class Param, int N>
struct EachParam {
  Param param[N];
  __device__ const Param& operator()(int i) const { return param[i]; }
};

// Rows cut into units of N consecutive elements, each within one run.
struct Units {
  std::uint32_t count;
  Divisor32 per_row, per_run;
  std::int64_t param_step;

  template <int N, bool kOneRow>
  __device__ Place at(std::uint32_t unit) const {
    if constexpr (kOneRow) return {0, std::int64_t{unit} * N, per_run.divide(unit)};
    const std::uint32_t row = per_row.divide(unit), in_row = unit - row * per_row.value();
    return {row, std::int64_t{in_row} * N, row * param_step + per_run.divide(in_row)};
  }
};

// A body of an elementwise op has
//   Element                        the widest dtype of its tensors
//   kWide                          elements a thread takes at most
//   each_operand(f)                f(rows) for every tensor
//   params
//   Param<S>                       made of (scale, zero point, params), with `usable`
//   load<N>(row, column)           N elements of every input
//   quick(param, loaded, sure)     their results, with param(i) for element i; sets sure to false
//                                  where exact must be taken
//   store(results, row, column)
//   exact(row, column, param)      one element, by the definition
//
// Thread -> unit. A warp's accesses are then whole lines; it is the number of warps, not of loads
// in a thread, that hides the latency of memory.
template <class Body, class S, int N, bool kOneRow>
__global__ void __launch_bounds__(kBlock) walk_quick(const Body body, const Units units) {
  const std::uint32_t unit = blockIdx.x * kBlock + threadIdx.x;
  if (unit >= units.count) return;
  const Place at = units.template at<N, kOneRow>(unit);
  const auto loaded = body.template load<N>(at.row, at.column);
  const OneParam<typename Body::template Param<S>> param{
      {body.params.template scale_as<S>(at.param), body.params.zero(at.param), body.params}};
  // One decision, after all loads: a branch upon the scale alone would hold back those of x.
  bool sure = param(0).usable;
  const auto results = body.quick(param, loaded, sure);
  if (sure) [[likely]]
    return body.store(results, at.row, at.column);
#pragma unroll 1
  for (int i = 0; i < N; ++i) body.exact(at.row, at.column + i, at.param);
}

// Where every column has a parameter of its own: a thread keeps those of N columns and goes down
// kColumnRows rows, kAhead of which are in flight.
struct Columns {
  std::int64_t rows;
  std::uint32_t units, tiles;  // of N columns; of kBlock units
};

inline constexpr int kColumnRows = 32, kAhead = 4;

template <class Body, class S, int N>
__global__ void __launch_bounds__(kBlock) walk_columns(const Body body, const Columns columns) {
  using Param = typename Body::template Param<S>;
  const std::uint32_t slab = blockIdx.x / columns.tiles;
  const std::uint32_t unit = (blockIdx.x - slab * columns.tiles) * kBlock + threadIdx.x;
  if (unit >= columns.units) return;
  const std::int64_t column = std::int64_t{unit} * N;
  const auto param_of = [&](int i) {
    return Param(body.params.template scale_as<S>(column + i), body.params.zero(column + i),
                 body.params);
  };
  const auto params = [&]<int... i>(std::integer_sequence<int, i...>) {
    return EachParam<Param, N>{{param_of(i)...}};
  }(std::make_integer_sequence<int, N>());
  bool usable = true;
#pragma unroll
  for (int i = 0; i < N; ++i) usable &= params(i).usable;

  const std::int64_t first = std::int64_t{slab} * kColumnRows;
  const std::int64_t left = columns.rows - first;
  const int rows = left < kColumnRows ? static_cast<int>(left) : kColumnRows;
#pragma unroll 1
  for (int from = 0; from < rows; from += kAhead) {
    decltype(body.template load<N>(0, 0)) loaded[kAhead];
    const auto row = [&](int k) { return first + (from + k < rows ? from + k : rows - 1); };
#pragma unroll
    for (int k = 0; k < kAhead; ++k) loaded[k] = body.template load<N>(row(k), column);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (from + k >= rows) break;
      bool sure = usable;
      const auto results = body.quick(params, loaded[k], sure);
      if (sure) [[likely]] {
        body.store(results, row(k), column);
      } else {
#pragma unroll 1
        for (int i = 0; i < N; ++i) body.exact(row(k), column + i, column + i);
      }
    }
  }
}

// Elements [first, end) of the joined rows, one by one.
struct Elements {
  std::int64_t first, end;
  Divisor row_length, run;
  std::int64_t param_step;
};

inline constexpr int kElementTurns = 4;

template <class Body>
__global__ void __launch_bounds__(kBlock) walk_exact(const Body body, const Elements e) {
  constexpr std::int64_t kTile = kBlock * kElementTurns;
  const std::int64_t tile = e.first + blockIdx.x * kTile + threadIdx.x;
#pragma unroll 1
  for (std::int64_t i = tile; i < e.end && i < tile + kTile; i += kBlock) {
    const std::int64_t row = e.row_length.divide(i), column = i - row * e.row_length.value();
    body.exact(row, column, row * e.param_step + e.run.divide(column));
  }
}

inline constexpr std::int64_t kMostThreads = (std::int64_t{1} << 31) - 2;  // of 32-bit indices

// Units of N; returns how many elements they cover, the first ones.
template <class Body, class S, int N>
Result<std::int64_t> launch_quick(std::string_view op, const Body& body, const JoinedRows& g,
                                  int device, Stream stream) {
  const bool one_run = g.rows == 1 && g.run == g.row_length;
  const std::int64_t per_row = g.row_length / N, count = g.rows * per_row;
  const Units units{.count = static_cast<std::uint32_t>(count),
                    .per_row = Divisor32(per_row > 0 ? per_row : 1),
                    .per_run = Divisor32(one_run ? per_row + 1 : g.run / N),
                    .param_step = g.param_step};
  auto* kernel = walk_quick<Body, S, N, false>;
  if constexpr (N == Body::kWide) {
    if (g.rows == 1) kernel = walk_quick<Body, S, N, true>;
  }
  BITTERN_TRY(launch(op, kernel, grid_for(count), device, stream, body, units));
  return count * N;
}

template <class Body, class S>
Result<std::int64_t> launch_columns(std::string_view op, const Body& body, const JoinedRows& g,
                                    int device, Stream stream) {
  constexpr int N = kPack<typename Body::Element>;
  const std::int64_t units = g.row_length / N, tiles = (units + kBlock - 1) / kBlock;
  const std::int64_t blocks = (g.rows + kColumnRows - 1) / kColumnRows * tiles;
  if (blocks > kMostThreads) return std::int64_t{0};
  const Columns columns{g.rows, static_cast<std::uint32_t>(units),
                        static_cast<std::uint32_t>(tiles)};
  BITTERN_TRY(
      launch(op, walk_columns<Body, S, N>, {.blocks = blocks}, device, stream, body, columns));
  return g.rows * g.row_length;
}

// Are the rows of every tensor next to each other?
template <class Body>
bool dense_rows(const Body& body, const GroupGeometry& g) {
  bool dense = true;
  body.each_operand([&](const auto& rows) {
    dense &= rows.data == nullptr || g.rows <= 1 || rows.stride == g.row_length;
  });
  return dense;
}

// May N elements at a time be read and written?
template <int N, class Body>
bool aligned_rows(const Body& body, const GroupGeometry& g) {
  bool aligned = true;
  body.each_operand([&]<class T>(const Rows<T>& rows) {
    aligned &= rows.data == nullptr ||
               packs_aligned<std::remove_const_t<T>, N>(rows.data, g.rows, rows.stride);
  });
  return aligned;
}

template <class Body>
Status run_elements(std::string_view op, const QuantizeDesc& d, const Body& body, int device,
                    Stream stream) {
  using X = typename Body::Element;
  static_assert(Body::kWide % kPack<X> == 0);
  const GroupGeometry geometry = d.geometry();
  const JoinedRows g(geometry, dense_rows(body, geometry));
  std::int64_t done = 0;  // elements
  if constexpr (sizeof(X) < 8) {
    const auto fits = [&]<int N>(std::integral_constant<int, N>) {
      // A single run may end within a unit: what is left over goes one by one.
      return (g.run % N == 0 || (g.rows == 1 && g.run == g.row_length)) &&
             g.rows * g.row_length / N <= kMostThreads && aligned_rows<N>(body, g);
    };
    const auto quick = [&]<class S>(Type<S>) -> Result<std::int64_t> {
      if (fits(std::integral_constant<int, Body::kWide>()))
        return launch_quick<Body, S, Body::kWide>(op, body, g, device, stream);
      if constexpr (kPack<X> != Body::kWide) {
        if (fits(std::integral_constant<int, kPack<X>>()))
          return launch_quick<Body, S, kPack<X>>(op, body, g, device, stream);
      }
      if (g.run == 1 && g.param_step == 0 && g.row_length % kPack<X> == 0 &&
          g.row_length / kPack<X> <= kMostThreads / kColumnRows &&
          aligned_rows<kPack<X>>(body, g)) {
        return launch_columns<Body, S>(op, body, g, device, stream);
      }
      return std::int64_t{0};
    };
    const auto covered = d.f32_scale || sizeof(X) == 4 ? quick(Type<float>()) : quick(Type<X>());
    if (!covered) return covered.status();
    done = *covered;
  }
  const Elements rest{.first = done,
                      .end = g.rows * g.row_length,
                      .row_length = Divisor(g.row_length),
                      .run = Divisor(g.run),
                      .param_step = g.param_step};
  return launch(op, walk_exact<Body>,
                grid_for((rest.end - rest.first + kElementTurns - 1) / kElementTurns), device,
                stream, body, rest);
}

// ---- bodies that several ops need ----

// q = clamp(R(x / s) + zp, q_min, q_max)
template <class X>
struct QuantizeBody {
  using Element = X;
  template <class S>
  using Param = Quick<kHalves<X, S>>;
  static constexpr int kWide = 16;  // a store of 16 bytes

  Params params;
  Rows<const X> x;
  Rows<std::uint8_t> q;

  template <class F>
  void each_operand(F&& f) const {
    f(x);
    f(q);
  }
  template <int N>
  __device__ auto load(std::int64_t row, std::int64_t column) const {
    return Pack<X, N>::load(x.at(row, column));
  }
  template <class P, int N>
  __device__ auto quick(const P& p, const Pack<X, N>& from, bool& sure) const {
    Pack<std::uint32_t, N / 4> to;
    Watch watch;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const auto code = [&](int k) {
        const float v = from.math(4 * i + k);
        watch.take(v);
        return p(4 * i + k).code(v);
      };
      const std::uint32_t first = code(0), second = code(1), third = code(2);
      to.at[i] = low_bytes(first, second, third, code(3));
    }
    sure &= watch.ordinary();
    return to;
  }
  template <int N>
  __device__ void store(const Pack<std::uint32_t, N>& to, std::int64_t row,
                        std::int64_t column) const {
    to.store(reinterpret_cast<std::uint32_t*>(q.at(row, column)));
  }
  __device__ void exact(std::int64_t row, std::int64_t column, std::int64_t p) const {
    *q.at(row, column) = exact_code(load_math(*x.at(row, column)), params.template scale_for<X>(p),
                                    params.zero(p), params);
  }
};

}  // namespace bittern::cuda
