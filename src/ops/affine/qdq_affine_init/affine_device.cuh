// What the kernels of qdq_affine_init share: the problem, parameters in their dtype, and the way of
// codes from registers to memory.
#pragma once
#include <cmath>
#include <limits>

#include "bittern/ops/qdq_affine_init.h"
#include "cuda/device.cuh"
#include "cuda/tree.cuh"
#include "ops/affine/codes.cuh"
#include "ops/affine/qdq_affine_init/affine_rules.h"

namespace bittern::affine {

struct Problem {
  const void* w;
  const float* importance;  // may be null
  void *scales, *biases, *q;
  DType scale_element;
  AffineMethod method;
  std::int64_t w_stride, q_stride, groups;
  cuda::Divisor row_groups;
  bool one_row;  // or rows that follow each other as one
  bool packed;
  int code_align;  // bytes that codes of a row begin on, up to 16
  int group_size, bits, bins;
  float n, inverse_n;  // bins - 1 and the f32 next to its reciprocal
};

// x rounded to the dtype of scales and biases.
struct Stored {
  DType dtype;
  __device__ float operator()(float x) const {
    if (dtype == DType::f16) return cuda::load_math(cuda::store_math<f16>(x));
    if (dtype == DType::bf16) return cuda::load_math(cuda::store_math<bf16>(x));
    return x;
  }
  __device__ double operator()(double x) const { return x; }
};

template <class F>
__device__ F largest_stored(DType dtype) {
  if constexpr (sizeof(F) == 4) {
    if (dtype == DType::f16) return max_finite<f16>();
    if (dtype == DType::bf16) return max_finite<bf16>();
  }
  return max_finite<F>();
}

template <class F>
__device__ void store_param(void* params, DType dtype, std::int64_t at, F x) {
  if constexpr (sizeof(F) == 8) {
    static_cast<double*>(params)[at] = x;
  } else if (dtype == DType::f32) {
    static_cast<float*>(params)[at] = x;
  } else if (dtype == DType::f16) {
    static_cast<f16*>(params)[at] = cuda::store_math<f16>(x);
  } else {
    static_cast<bf16*>(params)[at] = cuda::store_math<bf16>(x);
  }
}

template <class F>
__device__ void extend(Range<F>& r, F x) {
  if (!std::isfinite(x)) return;
  r.min = std::min(r.min, x);
  r.max = std::max(r.max, x);
}

// Two neighbouring halves of a register.
template <class X>
using Two = std::conditional_t<std::is_same_v<X, f16>, __half2, __nv_bfloat162>;
template <class X>
__device__ Two<X> two(const X* p) {
  Two<X> pair;
  memcpy(&pair, p, sizeof pair);
  return pair;
}
__device__ inline float2 load_math(__half2 x) { return __half22float2(x); }
__device__ inline float2 load_math(__nv_bfloat162 x) { return __bfloat1622float2(x); }

// The least and the greatest of a lane's weights. fmin and fmax pass over NaN; an infinity, or no
// number at all, shows in the difference.
template <int N>
__device__ Range<float> lane_range(const cuda::Pack<float, N>& w) {
  Range<float> range{w.at[0], w.at[0]};
#pragma unroll
  for (int i = 1; i < N; ++i) {
    range.min = fminf(range.min, w.at[i]);
    range.max = fmaxf(range.max, w.at[i]);
  }
  return range;
}
// Halves by twos.
template <class X, int N>
__device__ Range<float> lane_range(const cuda::Pack<X, N>& w) {
  auto low = two(w.at), high = low;
#pragma unroll
  for (int i = 2; i < N; i += 2) {
    const auto pair = two(w.at + i);
    low = __hmin2(low, pair);
    high = __hmax2(high, pair);
  }
  const float2 least = load_math(low), most = load_math(high);
  return {fminf(least.x, least.y), fmaxf(most.x, most.y)};
}

// The range over the lanes of teams of kLanes.
template <int kLanes, class F>
__device__ Range<F> team_range(Range<F> r) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    r.min = fmin(r.min, __shfl_xor_sync(cuda::kWarp, r.min, distance));
    r.max = fmax(r.max, __shfl_xor_sync(cuda::kWarp, r.max, distance));
  }
  return r;
}

// ---- without a division ----

__device__ inline float reciprocal(float x) { return __frcp_rn(x); }

// x / y for inverse = 1 / y as division rounds it. The first correction brings z within one ulp;
// then the remainder is exact, and by Markstein's theorem the second gives the IEEE quotient. For y
// and x / y far from the ends of the exponent range; a smaller x gives a smaller z.
__device__ inline float divide_by(float y, float inverse, float x) {
  float z = x * inverse;
  z = fmaf(fmaf(-z, y, x), inverse, z);
  return fmaf(fmaf(-z, y, x), inverse, z);
}

// minmax_params of a range in which nothing is extreme; false for all others.
__device__ inline bool usual_minmax(const Range<float>& r, const Problem& p, Params<float>& found) {
  const float width = r.max - r.min;
  const float s = Stored{p.scale_element}(
      fminf(divide_by(p.n, p.inverse_n, width), largest_stored<float>(p.scale_element)));
  found = {s > 0 ? s : 1.0f, r.min + 0.0f};
  return width < 0x1p60f && (width > 0x1p-60f || width == 0);
}

// minmax_params or mlx_params of a range in which nothing is extreme; false for all others. kOnce:
// also where mlx's s is not one that one correction divides by.
template <class S, bool kMlx, bool kOnce>
__device__ bool usual_params(const Range<float>& r, const Problem& p, Params<float>& found) {
  const float width = r.max - r.min;
  float s = divide_by(p.n, p.inverse_n, width);
  if constexpr (kMlx) {
    s = fmaxf(s, 1e-7f);
    const bool negative = fabsf(r.min) > fabsf(r.max);
    const float step = negative ? s : -s, edge = negative ? r.min : r.max;
    const float k = rintf(divide_by(step, reciprocal(step), edge));
    found =
        k == 0 ? Params<float>{step, 0} : Params<float>{divide_by(k, reciprocal(k), edge), edge};
    if (p.bins == 2) found = {s, r.min + 0.0f};
    if (kOnce && !(fabsf(k) < 256 && p.bins > 2)) return false;
    return width < 0x1p60f && fabsf(edge) < 0x1p60f;
  } else {
    s = cuda::load_math(cuda::store_math<S>(fminf(s, max_finite<S>())));
    found = {s > 0 ? s : 1.0f, r.min + 0.0f};
    return width < 0x1p60f && (width > 0x1p-60f || width == 0);
  }
}

// clamp(A(z), 0, n) and clamp(R(z), 0, n) for z = x / s, without dividing: with v = x / (s n)
// clamped to [0, 1], the code is n v to the nearest integer, unless n v is so near to a half that
// its error may matter. The 4 roundings on the way to v and the definition's one are each worth at
// most 2^-24 of z <= n (beyond, both clamp); a `shift` added to x brings four more of its own size.
// NaN gives 0 and infinities the ends, as they should. v is raised by the margin, so that a
// doubtful code is always one too large, and n v less the code near -1/2: only that end needs
// watching, and as integers such differences are the largest.
//
// Ties of half weights are common. Where b and s are stored as bf16 (f16) as the weights are, a
// code that rounds half away is still right in the zone of doubt if only exact ties can be there:
// they go up. Doubt is |x / s - h| < g / s, g = n (1 + |offset|) 2^-20 s. Weights of 2^8 g (2^11 g)
// or more, b if it is 0 or as large, and h s are multiples of powers of two above g; so is x - h s,
// which then is 0 if it is below g. Smaller weights have x / s within 2^8 g / s of -b / s, and are
// in no doubt where that is farther than this from every h. (Twice g leaves room for rounding.)
class NearCodes {
 public:
  // `bits`: what w, b and s have, when all of them are of one half type; otherwise 24.
  __device__ NearCodes(Params<float> p, float n, float shift = 0, int bits = 24)
      : n_(n), inverse_(reciprocal(p.s * n)), offset_(shift * inverse_) {
    const float size = fabsf(p.s), margin = (1 + fabsf(offset_)) * 0x1p-21f;
    const float limit = fmaf(2 * n, margin, -0.5f);
    const bool ordinary = size > 0x1p-90f && size < 0x1p90f && limit < 0;
    if (bits < 24) {
      const float least = 4 * n * margin * static_cast<float>(1 << bits);  // 2 * 2^bits g / s
      const float zero = -p.b * n * inverse_;                              // z of w = 0
      const float from_tie = fabsf(zero - floorf(zero) - 0.5f);
      only_ties_ =
          ordinary && from_tie > least && (p.b == 0 || fabsf(zero) > least) && fabsf(zero) < 0x1p9f;
    }
    offset_ += margin;
    limit_ = ordinary ? __float_as_uint(limit) : 0;
  }
  // The code of (x + shift) / s, in the low bits of a register.
  __device__ std::uint32_t code(float x) { return __float_as_uint(at_2_23(x)); }
  __device__ float value(float x) { return at_2_23(x) - 0x1p23f; }
  // Were all codes so far far enough from a tie?
  __device__ bool certain() const { return only_ties_ || worst_ < limit_; }

 private:
  __device__ float at_2_23(float x) {
    const float v = __saturatef(fmaf(x, inverse_, offset_)), shifted = fmaf(v, n_, 0x1p23f);
    worst_ = max(worst_, __float_as_uint(fmaf(v, n_, -(shifted - 0x1p23f))));
    return shifted;
  }
  float n_, inverse_, offset_;
  std::uint32_t limit_, worst_ = 0;
  bool only_ties_ = false;
};

// Codes of half weights: with few bits in w, b and s, exact ties are common, so nothing is left in
// doubt. z / 256 stands for z = x / s, which keeps it in [0, 1]: NaN gives 0. For parameters that
// usual_params finds; kOnce: where one correction divides (affine_rules.h: divide_once).
template <bool kHalfEven, bool kOnce>
class HalfCodes {
 public:
  __device__ HalfCodes(Params<float> p, float n)
      : s_(256 * p.s), inverse_(reciprocal(s_)), b_(p.b), most_(0x1p23f + n) {}
  // In the low bits of a register.
  __device__ std::uint32_t code(float w) const {
    const float x = w - b_;
    float z = divide_once(x, s_, inverse_);
    if constexpr (!kOnce) z = fmaf(fmaf(-z, s_, x), inverse_, z);
    z = __saturatef(z);
    // The sum with 1/2 less an ulp reaches the next integer just when the fraction is 1/2 or more.
    const float shifted =
        kHalfEven ? fmaf(z, 256, 0x1p23f) : __fadd_rd(fmaf(z, 256, 0x1.fffffep-2f), 0x1p23f);
    return __float_as_uint(fminf(shifted, most_));
  }

 private:
  float s_, inverse_, b_, most_;
};

// v[i] = f(v[i]) where it hardly ever happens: a loop through local memory, to keep kernels short.
template <int N, class F>
__device__ void rarely(float (&v)[N], const F& f) {
  float spare[N];
#pragma unroll
  for (int i = 0; i < N; ++i) spare[i] = v[i];
#pragma unroll 1
  for (int i = 0; i < N; ++i) spare[i] = f(spare[i]);
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = spare[i];
}

// The low bytes of four registers.
__device__ inline std::uint32_t four_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                           std::uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// ---- 16 neighbouring codes of a lane ----

// Four codes in bytes, closed up to `bits` bits each.
__device__ inline std::uint32_t close_up(std::uint32_t bytes, int bits) {
  const std::uint32_t pairs = (bytes & 0x00ff00ffu) + ((bytes >> 8 & 0x00ff00ffu) << bits);
  return (pairs & 0xffffu) + (pairs >> 16 << 2 * bits);
}

// Eight codes in bytes, closed up to 4 bits each.
__device__ inline std::uint32_t close_up_nibbles(std::uint32_t low, std::uint32_t high) {
  return __byte_perm(low | low >> 4, high | high >> 4, 0x6420);  // pairs are in bytes 0 and 2
}

// N words of a lane to where they belong, in stores as wide as `align` allows.
template <int N>
__device__ void store_words(void* to, const std::uint32_t (&words)[N], int align) {
  if (align >= 4 * N) {
    cuda::Pack<std::uint32_t, N> v;
#pragma unroll
    for (int i = 0; i < N; ++i) v.at[i] = words[i];
    v.store(static_cast<std::uint32_t*>(to));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) static_cast<std::uint32_t*>(to)[i] = words[i];
  }
}

// Writes codes 16 chunk .. 16 chunk + 15 of a row whose codes begin at `row`, given as bytes.
// Packed, 16 codes are 2 `bits` bytes, and a pair of lanes with neighbouring chunks, the first of
// them even, has `bits` whole words: a width that is not a store's is put together there. Whole
// warps call this; lanes that are not to `store` still take part.
__device__ inline void write_codes(const Problem& p, std::uint8_t* row, std::int64_t chunk,
                                   const std::uint32_t (&bytes)[4], bool store) {
  if (!p.packed || p.bits == 8) {
    if (store) store_words(row + 16 * chunk, bytes, p.code_align);
    return;
  }
  const int bits = p.bits;
  if (bits == 4) {
    const std::uint32_t words[2] = {close_up_nibbles(bytes[0], bytes[1]),
                                    close_up_nibbles(bytes[2], bytes[3])};
    if (store) store_words(row + 8 * chunk, words, p.code_align);
    return;
  }
  std::uint64_t half[2];  // 8 codes each
#pragma unroll
  for (int i = 0; i < 2; ++i)
    half[i] = close_up(bytes[2 * i], bits) | std::uint64_t{close_up(bytes[2 * i + 1], bits)}
                                                 << 4 * bits;
  std::uint8_t* to = row + 2 * bits * chunk;
  if (bits == 2) {
    const std::uint32_t words[1] = {static_cast<std::uint32_t>(half[0] | half[1] << 16)};
    if (store) store_words(to, words, 4);
  } else if (bits == 1) {
    if (store)
      *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(half[0] | half[1] << 8);
  } else {
    const int odd = static_cast<int>(threadIdx.x % 2);
    auto* words = reinterpret_cast<std::uint32_t*>(to - odd * 2 * bits);
    std::uint64_t part[4];  // of the pair
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint64_t other =
          __shfl_xor_sync(cuda::kWarp, static_cast<unsigned long long>(half[i]), 1);
      part[i] = odd != 0 ? other : half[i];
      part[2 + i] = odd != 0 ? half[i] : other;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // the even lane's words are 0 .. 3
      const int index = 4 * odd + k;
      std::uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int shift = 8 * bits * i - 32 * index;
        if (shift >= 0 && shift < 32) word |= static_cast<std::uint32_t>(part[i] << shift);
        if (shift < 0 && shift > -64) word |= static_cast<std::uint32_t>(part[i] >> -shift);
      }
      if (store && index < bits) words[index] = word;
    }
  }
}

// The same for 32 codes of a lane, which are `bits` whole words; lanes that are not to store need
// not call it.
__device__ inline void write_codes(const Problem& p, std::uint8_t* row, std::int64_t chunk,
                                   const std::uint32_t (&bytes)[8]) {
  const int bits = p.packed ? p.bits : 8;
  std::uint8_t* to = row + 4 * bits * chunk;
  if (bits == 8) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const std::uint32_t words[4] = {bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]};
      store_words(to + 4 * i, words, p.code_align);
    }
    return;
  }
  if (bits == 4) {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = close_up_nibbles(bytes[2 * i], bytes[2 * i + 1]);
    store_words(to, words, p.code_align);
    return;
  }
  std::uint64_t part[4];  // 8 codes each
#pragma unroll
  for (int i = 0; i < 4; ++i)
    part[i] = close_up(bytes[2 * i], bits) | std::uint64_t{close_up(bytes[2 * i + 1], bits)}
                                                 << 4 * bits;
#pragma unroll
  for (int k = 0; k < 7; ++k) {
    std::uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int shift = 8 * bits * i - 32 * k;
      if (shift >= 0 && shift < 32) word |= static_cast<std::uint32_t>(part[i] << shift);
      if (shift < 0 && shift > -64) word |= static_cast<std::uint32_t>(part[i] >> -shift);
    }
    if (k < bits) reinterpret_cast<std::uint32_t*>(to)[k] = word;
  }
}

// ---- lsq ----

// The least-squares s and b of a group's sums.
template <class F>
__device__ Params<F> least_squares(double c, double cq, double cqq, double cu, double cqu, F b0) {
  // v w - x y. Products of f32 are exact.
  const auto difference = [](double v, double w, double x, double y) {
    return sizeof(F) == 4 ? fma(v, w, -(x * y)) : v * w - x * y;
  };
  const double r = 1 / difference(c, cqq, cq, cq);
  const double s = difference(c, cqu, cq, cu) * r;
  const double b = static_cast<double>(b0) + difference(cqq, cu, cq, cqu) * r;
  return {static_cast<F>(s), static_cast<F>(b)};
}

// These as stored; s is NaN where they are no s and b.
template <class F>
__device__ Params<F> fit(const Params<F>& exact, const Stored& stored) {
  const Params<F> p{stored(exact.s), stored(exact.b) + F(0)};
  if (p.s > 0 && std::isfinite(p.s) && std::isfinite(p.b)) return p;
  return {std::numeric_limits<F>::quiet_NaN(), 0};
}

}  // namespace bittern::affine
