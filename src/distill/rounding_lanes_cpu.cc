#include "distill/rounding_lanes.h"

#include <algorithm>

#include "cpu/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "distill/rounding_lanes_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/matmul-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using matmul::D;
using matmul::kLanes;
using matmul::V;
using namespace ::bittern::lanes;

// Columns whose steps are felt by each other at once, by all others in one product. The order of
// the operations on each number is the same for every size.
constexpr std::int64_t kBlock = 64;
constexpr int kVectors = static_cast<int>(kRows / kLanes);

template <class F>
HWY_INLINE void EachVector(const F& f) {
  for (std::int64_t v = 0; v < kRows; v += kLanes) f(v);
}

HWY_INLINE V Clamp(V x, V top) { return hn::Min(hn::Max(x, hn::Zero(D())), top); }

HWY_INLINE V Nearest(V w, V scale, V bias, V top) {
  const D d;
  const V code = Clamp(hn::Round(hn::Div(hn::Sub(w, bias), scale)), top);
  return hn::IfThenZeroElse(hn::Eq(scale, hn::Zero(d)), code);
}

void NearestCodes(const Grids& grids, std::int64_t inputs, const float* w, float* codes) {
  const D d;
  const V top = hn::Set(d, grids.top);
  for (std::int64_t j = 0; j < inputs; ++j) {
    const std::int64_t g = j / grids.group * kRows;
    EachVector([&](std::int64_t v) HWY_ATTR {
      hn::StoreU(Nearest(hn::LoadU(d, w + j * kRows + v), hn::LoadU(d, grids.scales + g + v),
                         hn::LoadU(d, grids.biases + g + v), top),
                 d, codes + j * kRows + v);
    });
  }
}

// x[k] = fma(left[k][j], step, x[k]) for j < k < end
HWY_INLINE void Spread(const Square& left, std::int64_t j, std::int64_t end, const float* step,
                       float* x) {
  const D d;
  V s[kVectors];
  for (int v = 0; v < kVectors; ++v) s[v] = hn::LoadU(d, step + v * kLanes);
  for (std::int64_t k = j + 1; k < end; ++k) {
    const V factor = hn::Set(d, left.data[k * left.stride + j]);
    for (int v = 0; v < kVectors; ++v) {
      float* const at = x + k * kRows + v * kLanes;
      hn::StoreU(hn::MulAdd(factor, s[v], hn::LoadU(d, at)), d, at);
    }
  }
}

// step(j, to) for every column j in turn writes [kRows] numbers, which all later x feel:
//   x[k] = fma(left[k][j], to, x[k])
template <class F>
HWY_INLINE void InTurn(const Square& left, float* x, const F& step) {
  HWY_ALIGN float steps[kBlock * kRows];
  const std::int64_t n = left.inputs;
  for (std::int64_t first = 0; first < n; first += kBlock) {
    const std::int64_t end = std::min(n, first + kBlock);
    for (std::int64_t j = first; j < end; ++j) {
      float* const to = steps + (j - first) * kRows;
      step(j, to);
      Spread(left, j, end, to, x);
    }
    if (end < n)
      matmul::Multiply(n - end, kRows, end - first,
                       {left.data + end * left.stride + first, left.stride}, steps, kRows,
                       x + end * kRows, kRows, true);
  }
}

void CompensatedCodes(const Grids& grids, const Square& u, const std::int64_t* order, float* w,
                      float* codes) {
  const D d;
  const V top = hn::Set(d, grids.top);
  InTurn(u, w, [&](std::int64_t j, float* to) HWY_ATTR {
    const std::int64_t c = order[j], g = c / grids.group * kRows;
    const V pivot = hn::Set(d, u.data[j * u.stride + j]);
    EachVector([&](std::int64_t v) HWY_ATTR {
      const V x = hn::LoadU(d, w + j * kRows + v);
      const V scale = hn::LoadU(d, grids.scales + g + v), bias = hn::LoadU(d, grids.biases + g + v);
      const V code = Nearest(x, scale, bias, top);
      hn::StoreU(code, d, codes + c * kRows + v);
      hn::StoreU(hn::Div(hn::Sub(hn::MulAdd(code, scale, bias), x), pivot), d, to + v);
    });
  });
}

void Products(const Square& h, const float* e, float* g) {
  constexpr std::int64_t kDepth = 512;  // of e, which then is in a cache
  for (std::int64_t k = 0; k < h.inputs; k += kDepth)
    matmul::Multiply(h.inputs, kRows, std::min(kDepth, h.inputs - k), {h.data + k, h.stride},
                     e + k * kRows, kRows, g, kRows, k > 0);
}

void Descend(const Grids& grids, const Square& h, float* g, float* codes) {
  const D d;
  const V top = hn::Set(d, grids.top), zero = hn::Zero(d);
  InTurn(h, g, [&](std::int64_t j, float* to) HWY_ATTR {
    const std::int64_t group = j / grids.group * kRows;
    const V pivot = hn::Set(d, h.data[j * h.stride + j]);
    EachVector([&](std::int64_t v) HWY_ATTR {
      const V scale = hn::LoadU(d, grids.scales + group + v);
      const V code = hn::LoadU(d, codes + j * kRows + v);
      const V step = hn::Div(hn::LoadU(d, g + j * kRows + v), hn::Mul(pivot, scale));
      const V moved =
          hn::IfThenElse(hn::Eq(scale, zero), code, Clamp(hn::Round(hn::Add(code, step)), top));
      hn::StoreU(moved, d, codes + j * kRows + v);
      hn::StoreU(hn::Mul(hn::Sub(code, moved), scale), d, to + v);
    });
  });
}

void NormalEquations(const Square& h, std::int64_t group, const float* sums, const float* totals,
                     const float* codes, float* room, float* system) {
  const D d;
  const std::int64_t groups = h.inputs / group;
  const auto at = [&](std::int64_t i, std::int64_t j) {
    return system + (i * (i + 1) / 2 + j) * kRows;
  };
  for (std::int64_t b = 0; b < groups; ++b) {
    // room = H's columns of group b times the group's codes
    matmul::Multiply((b + 1) * group, kRows, group, {h.data + b * group, h.stride},
                     codes + b * group * kRows, kRows, room, kRows);
    for (std::int64_t a = 0; a <= b; ++a) {
      EachVector([&](std::int64_t v) HWY_ATTR {
        V both = hn::Zero(d), first = hn::Zero(d), second = hn::Zero(d);
        for (std::int64_t i = a * group; i < (a + 1) * group; ++i) {
          const V code = hn::LoadU(d, codes + i * kRows + v),
                  x = hn::LoadU(d, room + i * kRows + v);
          both = hn::MulAdd(code, x, both);
          second = hn::Add(second, x);
          first = hn::MulAdd(code, hn::Set(d, sums[i * groups + b]), first);
        }
        hn::StoreU(both, d, at(2 * b, 2 * a) + v);
        if (a < b) hn::StoreU(second, d, at(2 * b, 2 * a + 1) + v);
        hn::StoreU(first, d, at(2 * b + 1, 2 * a) + v);
        hn::StoreU(hn::Set(d, totals[a * groups + b]), d, at(2 * b + 1, 2 * a + 1) + v);
      });
    }
  }
}

// By Cholesky's L L^T.
void Solve(std::int64_t unknowns, float ridge, float* system, float* x) {
  const D d;
  const auto row = [&](std::int64_t i) { return system + i * (i + 1) / 2 * kRows; };
  const V more = hn::Set(d, 1 + ridge), least = hn::Set(d, ridge / 2);
  const auto subtract = [&](const float* a, const float* b, std::int64_t count,
                            V(&sum)[kVectors]) HWY_ATTR {
    for (std::int64_t k = 0; k < count; ++k)
      for (int v = 0; v < kVectors; ++v)
        sum[v] = hn::NegMulAdd(hn::LoadU(d, a + k * kRows + v * kLanes),
                               hn::LoadU(d, b + k * kRows + v * kLanes), sum[v]);
  };
  V sum[kVectors];
  const auto load = [&](const float* from) HWY_ATTR {
    for (int v = 0; v < kVectors; ++v) sum[v] = hn::LoadU(d, from + v * kLanes);
  };
  const auto divide = [&](const float* by, float* to) HWY_ATTR {
    for (int v = 0; v < kVectors; ++v)
      hn::StoreU(hn::Div(sum[v], hn::LoadU(d, by + v * kLanes)), d, to + v * kLanes);
  };
  for (std::int64_t i = 0; i < unknowns; ++i) {
    for (std::int64_t j = 0; j < i; ++j) {
      load(row(i) + j * kRows);
      subtract(row(i), row(j), j, sum);
      divide(row(j) + j * kRows, row(i) + j * kRows);
    }
    float* const pivot = row(i) + i * kRows;
    V floor[kVectors];
    load(pivot);
    for (int v = 0; v < kVectors; ++v) {
      floor[v] = hn::Mul(sum[v], least);
      sum[v] = hn::Mul(sum[v], more);
    }
    subtract(row(i), row(i), i, sum);
    // Without rounding no pivot is below the ridge.
    for (int v = 0; v < kVectors; ++v)
      hn::StoreU(hn::Sqrt(hn::Max(sum[v], floor[v])), d, pivot + v * kLanes);
    load(x + i * kRows);
    subtract(row(i), x, i, sum);
    divide(pivot, x + i * kRows);
  }
  for (std::int64_t i = unknowns - 1; i >= 0; --i) {
    load(x + i * kRows);
    divide(row(i) + i * kRows, x + i * kRows);
    load(x + i * kRows);
    for (std::int64_t j = 0; j < i; ++j)
      for (int v = 0; v < kVectors; ++v) {
        float* const to = x + j * kRows + v * kLanes;
        hn::StoreU(
            hn::NegMulAdd(hn::LoadU(d, row(i) + j * kRows + v * kLanes), sum[v], hn::LoadU(d, to)),
            d, to);
      }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern::lanes {
namespace {

BITTERN_EXPORT(NearestCodes);
BITTERN_EXPORT(CompensatedCodes);
BITTERN_EXPORT(Products);
BITTERN_EXPORT(Descend);
BITTERN_EXPORT(NormalEquations);
BITTERN_EXPORT(Solve);

}  // namespace

void nearest_codes(const Grids& grids, std::int64_t inputs, const float* w, float* codes) {
  BITTERN_CALL(NearestCodes)(grids, inputs, w, codes);
}
void compensated_codes(const Grids& grids, const Square& u, const std::int64_t* order, float* w,
                       float* codes) {
  BITTERN_CALL(CompensatedCodes)(grids, u, order, w, codes);
}
void products(const Square& h, const float* e, float* g) { BITTERN_CALL(Products)(h, e, g); }
void descend(const Grids& grids, const Square& h, float* g, float* codes) {
  BITTERN_CALL(Descend)(grids, h, g, codes);
}
void normal_equations(const Square& h, std::int64_t group, const float* sums, const float* totals,
                      const float* codes, float* room, float* system) {
  BITTERN_CALL(NormalEquations)(h, group, sums, totals, codes, room, system);
}
void solve(std::int64_t unknowns, float ridge, float* system, float* x) {
  BITTERN_CALL(Solve)(unknowns, ridge, system, x);
}
Status supported() { return cpu::supported(); }

}  // namespace bittern::lanes
#endif  // HWY_ONCE
