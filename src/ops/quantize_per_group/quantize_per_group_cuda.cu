#include <cmath>

#include "bittern/ops/quantize_per_group.h"
#include "cuda/device.cuh"
#include "cuda/runtime.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = QuantizePerGroup;
using cuda::Divisor;
using cuda::Pack;

// Chunks a thread has in flight, a block apart, to hide the latency of memory.
constexpr int kChunks = 4;

// Rows are cut into chunks of N elements; the last chunk of a row may be short.
struct Problem {
  const void* x;
  const void* scale;
  const std::int32_t* zero_point;  // null: 0
  std::uint8_t* q;                 // s8 and u8 codes have the same low byte
  std::int64_t x_stride, q_stride, row_length;
  std::int64_t chunks;
  Divisor chunks_per_row, run, params;
  std::int64_t param_step;
  bool wrap;  // rows joined into one: the parameters repeat
  std::int32_t q_min, q_max;
};

// clamp(R(x / s) + zp, q_min, q_max) for the elements of one parameter.
template <class F>
class Quantizer {
 public:
  __device__ Quantizer(F scale, std::int32_t zero_point, const Problem& p)
      // s = 0 and s NaN give the quotient 0; so does s = inf once NaN quotients count as 0.
      : scale_(scale == 0 || isnan(scale) ? F(INFINITY) : scale),
        zero_point_(zero_point),
        q_min_(p.q_min),
        q_max_(p.q_max) {
    if constexpr (sizeof(F) == 4) {
      if (zero_point < -512 || zero_point > 512) return;
      if (!(fabsf(scale) > 0x1p-100f && fabsf(scale) < 0x1p100f)) return;
      low_ = static_cast<float>(p.q_min - zero_point);
      high_ = static_cast<float>(p.q_max - zero_point);
      reciprocal_ = __frcp_rn(scale);
      const bool power_of_two = (__float_as_int(scale) & 0x7fffff) == 0;  // then 1/s is exact
      certain_ = power_of_two ? 1.0f : 0.5f - 0x1p-12f;
    }
  }

  // By the definition. In f64 the sum is exact wherever it can fall inside the code range: see
  // unclamped_code().
  __device__ std::uint8_t exact(F x) const {
    F z = x / scale_;
    z = isnan(z) ? F(0) : z;
    const double code = static_cast<double>(rint(z)) + zero_point_;
    return static_cast<std::uint8_t>(static_cast<std::int32_t>(
        fmin(fmax(code, static_cast<double>(q_min_)), static_cast<double>(q_max_))));
  }

  // Without a division, and whether the code is certain. x * (1/s) and the true quotient differ by
  // at most 3 * 2^-24 of it, less than 2^-12 where the clamp leaves it alone (below 2^10), so they
  // round alike unless a tie is that near.
  __device__ bool quick(F x, std::uint8_t& code) const {
    if constexpr (sizeof(F) == 4) {
      const float z = x * reciprocal_;
      const float clamped = fminf(fmaxf(z, low_), high_);
      // Rounds to an integer, ties to even, and leaves it in the low bits.
      const float shifted = clamped + 0x1.8p23f;
      code = static_cast<std::uint8_t>(__float_as_int(shifted) + zero_point_);
      return fabsf(clamped - (shifted - 0x1.8p23f)) <= certain_ && !isnan(z);
    } else {
      return false;
    }
  }

  __device__ std::uint8_t operator()(F x) const {
    std::uint8_t code;
    return quick(x, code) ? code : exact(x);
  }

 private:
  F scale_;
  std::int32_t zero_point_, q_min_, q_max_;
  float low_ = 0, high_ = 0, reciprocal_ = 0;
  float certain_ = -1;  // the largest distance from an integer; below 0: never certain
};

template <class X, class S, int N>
__global__ void __launch_bounds__(cuda::kBlock) quantize(const Problem p) {
  const auto quantizer = [&](std::int64_t param) {
    return Quantizer<Math<X>>(cuda::load_math(static_cast<const S*>(p.scale)[param]),
                              p.zero_point != nullptr ? p.zero_point[param] : 0, p);
  };
  const std::int64_t tile = std::int64_t{cuda::kBlock} * kChunks;
  for (std::int64_t first = blockIdx.x * tile + threadIdx.x; first < p.chunks;
       first += gridDim.x * tile) {
    Pack<X, N> x[kChunks];
    std::int64_t row[kChunks], column[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const std::int64_t chunk = first + k * cuda::kBlock;
      row[k] = p.chunks_per_row.divide(chunk);
      column[k] = (chunk - row[k] * p.chunks_per_row.value()) * N;
      if (chunk < p.chunks && column[k] + N <= p.row_length)
        x[k] = Pack<X, N>::load(static_cast<const X*>(p.x) + row[k] * p.x_stride + column[k]);
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (first + k * cuda::kBlock >= p.chunks) break;
      std::int64_t param = p.run.divide(column[k]);
      std::int64_t left = (param + 1) * p.run.value() - column[k];  // elements of this parameter
      if (p.wrap) param -= p.params.divide(param) * p.params.value();
      param += row[k] * p.param_step;
      std::uint8_t* q = p.q + row[k] * p.q_stride + column[k];
      Quantizer<Math<X>> code = quantizer(param);
      const auto next = [&] {
        if (left-- > 0) return;
        left = p.run.value() - 1;
        if (++param == p.params.value()) param = 0;
        code = quantizer(param);
      };
      if (column[k] + N > p.row_length) {
        const X* tail = static_cast<const X*>(p.x) + row[k] * p.x_stride + column[k];
        for (std::int64_t i = 0; i < p.row_length - column[k]; ++i) {
          next();
          q[i] = code(cuda::load_math(tail[i]));
        }
        continue;
      }
      Pack<std::uint8_t, N> codes;
      if (left >= N) {
        bool certain = true;
#pragma unroll
        for (int i = 0; i < N; ++i) certain &= code.quick(cuda::load_math(x[k].at[i]), codes.at[i]);
        if (!certain) {
#pragma unroll
          for (int i = 0; i < N; ++i) codes.at[i] = code.exact(cuda::load_math(x[k].at[i]));
        }
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          next();
          codes.at[i] = code(cuda::load_math(x[k].at[i]));
        }
      }
      codes.store(q);
    }
  }
}

template <class X, class S, int N>
Status run_chunks(Problem p, std::int64_t rows, int device, Stream stream) {
  const std::int64_t per_row = (p.row_length + N - 1) / N;
  p.chunks = rows * per_row;
  p.chunks_per_row = Divisor(per_row);
  return cuda::launch(Op::kName, quantize<X, S, N>,
                      cuda::grid_for((p.chunks + kChunks - 1) / kChunks), device, stream, p);
}

template <class X, class S>
Status run_typed(const Op::Desc& d, const Op::Args& a, Stream stream) {
  GroupGeometry g = d.geometry();
  std::int64_t x_stride = a.x.row_stride(), q_stride = a.q.row_stride();
  const bool dense = g.rows == 1 || (x_stride == g.row_length && q_stride == g.row_length);
  bool wrap = false;
  if (dense) {
    wrap = g.param_step == 0 && g.params > 1 && g.rows > 1;
    if (g.param_step == 0 && g.params == 1) g.run *= g.rows;
    g.row_length *= g.rows;
    g.rows = 1;
    g.param_step = 0;
  }
  const Problem p{.x = a.x.data,
                  .scale = a.scale.data,
                  .zero_point = a.zero_point.as<std::int32_t>(),
                  .q = static_cast<std::uint8_t*>(a.q.data),
                  .x_stride = x_stride,
                  .q_stride = q_stride,
                  .row_length = g.row_length,
                  .chunks = 0,
                  .chunks_per_row = {},
                  .run = Divisor(g.run),
                  .params = Divisor(g.params),
                  .param_step = g.param_step,
                  .wrap = wrap,
                  .q_min = d.q_min,
                  .q_max = d.q_max};
  const int device = a.q.device.index;
  constexpr int kWide = 16 / sizeof(X);
  if (cuda::packs_aligned<X, kWide>(p.x, g.rows, x_stride) &&
      cuda::packs_aligned<std::uint8_t, kWide>(p.q, g.rows, q_stride)) {
    return run_chunks<X, S, kWide>(p, g.rows, device, stream);
  }
  return run_chunks<X, S, 1>(p, g.rows, device, stream);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) {
    if constexpr (sizeof(X) == 2) {
      if (d.f32_scale) return run_typed<X, float>(d, a, stream);
    }
    return run_typed<X, X>(d, a, stream);
  });
}

constexpr Kernel<Op> kKernels[] = {
    {.name = "cuda", .backend = "cuda", .architecture = cuda::architecture, .run = run}};

}  // namespace

std::span<const Kernel<QuantizePerGroup>> quantize_per_group_cuda() { return kKernels; }

}  // namespace bittern
