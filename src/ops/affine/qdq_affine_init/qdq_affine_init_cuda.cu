// minmax and mlx of groups of 32, 64 and 128: a team of lanes per group, 64 bytes of neighbouring
// weights a lane (16 of f32, 32 halves), so that a warp's reads and codes are whole lines.
// lsq of these: affine_lsq.cuh. All else: a warp per run of groups that fills whole words, weights
// read again for each pass.
#include <algorithm>
#include <numeric>

#include "bittern/ops/qdq_affine_init.h"
#include "cuda/runtime.cuh"
#include "ops/affine/qdq_affine_init/affine_device.cuh"
#include "ops/affine/qdq_affine_init/affine_lsq.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = QdqAffineInit;
using affine::Params;
using affine::Problem;
using affine::Range;
using affine::Stored;
using cuda::Divisor;
using cuda::kWarp;
using cuda::Pack;
using cuda::Sums;

template <class X>
constexpr int kChunk = 64 / static_cast<int>(sizeof(X));  // weights of a lane
constexpr int kMaxGroup = 1024;                           // of check_affine_desc
constexpr int kWarps = cuda::kBlock / 32;

template <class F>
__device__ Params<F> params(const Problem& p, const Range<F>& range, bool mlx) {
  if (mlx) return affine::mlx_params(range, p.bins);
  return affine::minmax_params(range, p.bins, affine::largest_stored<F>(p.scale_element),
                               Stored{p.scale_element});
}

// The code of each weight, four to a word. False where some are in doubt.
template <class S, bool kMlx, class X, int N>
__device__ bool near_codes(const Pack<X, N>& w, const Params<float>& by, float n,
                           std::uint32_t (&bytes)[N / 4]) {
  const auto all = [&](auto&& code) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
      bytes[i / 4] = affine::four_bytes(code(w.math(i)), code(w.math(i + 1)), code(w.math(i + 2)),
                                        code(w.math(i + 3)));
  };
  if constexpr (sizeof(X) == 2) {
    const affine::HalfCodes<kMlx, kMlx || sizeof(S) == 2> codes(by, n);
    all([&](float x) { return codes.code(x); });
    return true;
  } else {
    affine::NearCodes near(by, n);
    all([&](float x) { return near.code(x - by.b); });
    return near.certain();
  }
}

template <class X, class S, int kLanes, bool kMlx>
__global__ void __launch_bounds__(cuda::kBlock) init_teams(const Problem p) {
  constexpr int N = kChunk<X>;
  const int t = static_cast<int>(threadIdx.x % kLanes);
  // Teams beyond the last group take it again, so that whole warps meet in the shuffles.
  std::int64_t group = (std::int64_t{blockIdx.x} * cuda::kBlock + threadIdx.x) / kLanes;
  const bool valid = group < p.groups;
  if (!valid) group = p.groups - 1;
  std::int64_t in_row = group;
  const X* from = static_cast<const X*>(p.w);
  auto* codes = static_cast<std::uint8_t*>(p.q);
  if (!p.one_row) {
    const std::int64_t row = p.row_groups.divide(group);
    in_row -= row * p.row_groups.value();
    from += row * p.w_stride;
    codes += row * p.q_stride * (p.packed ? 4 : 1);
  }
  const std::int64_t chunk = in_row * kLanes + t;
  const auto w = Pack<X, N>::load(from + chunk * N);

  Range<float> range = affine::team_range<kLanes>(affine::lane_range(w));
  Params<float> found;
  bool usual = true, halved = false;
  if (!__all_sync(kWarp, affine::usual_params < S, kMlx, sizeof(X) == 2 > (range, p, found))) {
    usual = sizeof(X) == 4;  // what is extreme is no matter for NearCodes
    Range<float> numbers;
#pragma unroll
    for (int i = 0; i < N; ++i) affine::extend(numbers, w.math(i));
    range = affine::team_range<kLanes>(numbers);
    halved = range.overflows();
    found = params(p, range, kMlx && !halved);
  }
  if (valid && (t == 0 || kLanes == 1))
    static_cast<S*>(p.scales)[group] = cuda::store_math<S>(found.s);
  if (valid && (t == 1 || kLanes == 1))
    static_cast<S*>(p.biases)[group] = cuda::store_math<S>(found.b);

  std::uint32_t bytes[N / 4];
  if (!near_codes<S, kMlx>(w, found, p.n, bytes) || halved || !usual) {
    float spare[N];
#pragma unroll
    for (int i = 0; i < N; ++i) spare[i] = w.math(i);
    affine::rarely(spare, [&](float x) -> float {
      return kMlx && !halved ? affine::mlx_code(x, found, p.bins)
                             : affine::minmax_code(x, found, p.bins, halved);
    });
    const auto code = [&](int i) { return __float_as_uint(spare[i] + 0x1p23f); };
#pragma unroll
    for (int i = 0; i < N; i += 4)
      bytes[i / 4] = affine::four_bytes(code(i), code(i + 1), code(i + 2), code(i + 3));
  }
  if constexpr (sizeof(X) == 4) {
    affine::write_codes(p, codes, chunk, bytes, valid);
  } else if (valid) {
    affine::write_codes(p, codes, chunk, bytes);
  }
}

// One group for a whole warp.
template <class X>
class WarpGroup {
 public:
  using F = Math<X>;
  __device__ WarpGroup(const Problem& p, const X* w, const float* importance)
      : p_(p), w_(w), importance_(importance), lane_(static_cast<int>(threadIdx.x % 32)) {
    Range<F> range;
    bool finite = true;
    for (int j = lane_; j < p.group_size; j += 32) {
      const F x = weight(j);
      affine::extend(range, x);
      finite &= std::isfinite(x);
    }
    range = affine::team_range<32>(range);
    finite = __all_sync(kWarp, finite);
    halved_ = range.overflows();
    mlx_ = p.method == AffineMethod::mlx && !halved_;
    found_ = params(p, range, mlx_);
    if (p.method == AffineMethod::lsq && finite && !halved_) refine();
  }

  __device__ Params<F> found() const { return found_; }
  __device__ std::uint8_t code(int j) const { return code(j, found_); }

 private:
  __device__ F weight(int j) const { return cuda::load_math(w_[j]); }
  __device__ F importance(int j) const {
    if (importance_ == nullptr) return 1;
    const float c = importance_[j];
    return c > 0 && std::isfinite(c) ? static_cast<F>(c) : F(0);
  }
  __device__ std::uint8_t code(int j, Params<F> by) const {
    return mlx_ ? affine::mlx_code(weight(j), by, p_.bins)
                : affine::minmax_code(weight(j), by, p_.bins, halved_);
  }

  __device__ double squared_error(Params<F> by) const {
    return cuda::warp_tree<double, 1>(
               p_.group_size,
               [&](int j) -> Sums<double, 1> {
                 if (j >= p_.group_size) return {};
                 const double d = weight(j) - std::fma(static_cast<F>(code(j, by)), by.s, by.b);
                 return {static_cast<double>(importance(j)) * (d * d)};
               })
        .at[0];
  }

  __device__ void refine() {
    const Params<F> start = found_;
    const auto fixed = cuda::warp_tree<F, 2>(p_.group_size, [&](int j) -> Sums<F, 2> {
      if (j >= p_.group_size) return {};
      const F c = importance(j);
      return {c, c * (weight(j) - start.b)};
    });
    double least = squared_error(start);
    for (int k = 0; k < affine::lsq_starts(p_.bins); ++k) {
      Params<F> now = affine::lsq_start(start, p_.bins, k, Stored{p_.scale_element});
      if (!(now.s > 0)) continue;
      for (int round = 0; round < affine::kMostFits; ++round) {
        const auto sums = cuda::warp_tree<F, 3>(p_.group_size, [&](int j) -> Sums<F, 3> {
          if (j >= p_.group_size) return {};
          const F q = static_cast<F>(code(j, now)), cq = importance(j) * q;
          return {cq, cq * q, cq * (weight(j) - start.b)};
        });
        const Params<F> next =
            affine::fit(affine::least_squares(fixed.at[0], sums.at[0], sums.at[1], fixed.at[1],
                                              sums.at[2], start.b),
                        Stored{p_.scale_element});
        if (!(next.s > 0) || (next.s == now.s && next.b == now.b)) break;
        now = next;
      }
      const double error = squared_error(now);
      if (!affine::gains(least, error)) continue;
      least = error;
      found_ = now;
    }
  }

  const Problem& p_;
  const X* w_;
  const float* importance_;
  int lane_;
  bool halved_, mlx_;
  Params<F> found_;
};

// A warp takes unit_groups groups of a row, which begin on a word. Their codes pass through shared
// memory; the last word of a group waits for the next group, which fills it up.
template <class X>
__global__ void __launch_bounds__(cuda::kBlock)
    init_groups(const Problem p, int unit_groups, std::int64_t units, Divisor row_units) {
  __shared__ std::uint8_t staged[kWarps][kMaxGroup];
  std::uint8_t* codes = staged[threadIdx.x / 32];
  const int lane = static_cast<int>(threadIdx.x % 32), size = p.group_size;
  const std::int64_t unit = (std::int64_t{blockIdx.x} * cuda::kBlock + threadIdx.x) / 32;
  if (unit >= units) return;
  const std::int64_t row = row_units.divide(unit), row_groups = p.row_groups.value();
  const std::int64_t first = (unit - row * row_units.value()) * unit_groups;
  const std::int64_t end = first + unit_groups < row_groups ? first + unit_groups : row_groups;
  std::uint32_t carry = 0;
  for (std::int64_t k = first; k < end; ++k) {
    const WarpGroup<X> group(p, static_cast<const X*>(p.w) + row * p.w_stride + k * size,
                             p.importance == nullptr ? nullptr : p.importance + k * size);
    const std::int64_t at = row * row_groups + k;
    if (lane == 0) affine::store_param(p.scales, p.scale_element, at, group.found().s);
    if (lane == 1) affine::store_param(p.biases, p.scale_element, at, group.found().b);
    if (!p.packed) {
      std::uint8_t* to = static_cast<std::uint8_t*>(p.q) + row * p.q_stride + k * size;
      for (int j = lane; j < size; j += 32) to[j] = group.code(j);
      continue;
    }
    for (int j = lane; j < size; j += 32) codes[j] = group.code(j);
    __syncwarp();
    // Words counted from the one that the group's first bit is in.
    const std::int64_t first_bit = k * size * p.bits;
    const int skipped = static_cast<int>(first_bit % 32), bits = skipped + size * p.bits;
    std::uint32_t* words = static_cast<std::uint32_t*>(p.q) + row * p.q_stride + first_bit / 32;
    const int whole = k + 1 == end ? (bits + 31) / 32 : bits / 32;  // may be written now
    std::uint32_t last = 0;
    for (int i = lane; i < (bits + 31) / 32; i += 32) {
      std::uint32_t word = i == 0 ? carry : 0;
      int j = i * 32 <= skipped ? 0 : (i * 32 - skipped) / p.bits;
      for (; j < size && skipped + j * p.bits < (i + 1) * 32; ++j) {
        const int shift = skipped + j * p.bits - i * 32;
        word |= shift >= 0 ? std::uint32_t{codes[j]} << shift : std::uint32_t{codes[j]} >> -shift;
      }
      if (i < whole) {
        words[i] = word;
      } else {
        last = word;
      }
    }
    carry = bits % 32 == 0 ? 0 : __shfl_sync(kWarp, last, bits / 32 % 32);
    __syncwarp();
  }
}

// All warps at once, with equal runs: they end at about the same time.
template <class X, int kSize, bool kWeighted>
Status launch_lsq(const Problem& p, int device, Stream stream) {
  const std::int64_t warps = std::int64_t{cuda::limits(device).multiprocessors} *
                             affine::LsqWarp<X, kSize, kWeighted>::kResident;
  const std::int64_t run = std::max<std::int64_t>((p.groups + warps - 1) / warps, 32);
  return cuda::launch(Op::kName, affine::lsq_groups<X, kSize, kWeighted>,
                      cuda::grid_for((p.groups + run - 1) / run * 32, 32), device, stream, p,
                      static_cast<int>(run));
}

// A team of lanes per group of kSize.
template <class X, int kSize>
Status launch_teams(const Problem& p, int device, Stream stream) {
  if (p.method == AffineMethod::lsq) {
    return p.importance != nullptr ? launch_lsq<X, kSize, true>(p, device, stream)
                                   : launch_lsq<X, kSize, false>(p, device, stream);
  }
  constexpr int kLanes = kSize / kChunk<X>;
  const auto launch = [&]<class S>(Type<S>) {
    const auto kernel = p.method == AffineMethod::mlx ? init_teams<X, S, kLanes, true>
                                                      : init_teams<X, S, kLanes, false>;
    return cuda::launch(Op::kName, kernel, cuda::grid_for(p.groups * kLanes), device, stream, p);
  };
  return p.scale_element == DType::f32 ? launch(Type<float>()) : launch(Type<X>());
}

template <class X>
Status run_typed(const Op::Desc& d, const Op::Args& a, Stream stream) {
  const std::int64_t rows = d.outer_size;
  const bool one_row =
      cuda::codes_dense(d, a.q.row_stride()) && (rows <= 1 || a.w.row_stride() == d.axis_size);
  const std::int64_t code_bytes = d.storage == CodeStorage::packed ? 4 : 1;
  std::uintptr_t code_align = 16;
  while (reinterpret_cast<std::uintptr_t>(a.q.data) % code_align != 0 ||
         (rows > 1 && a.q.row_stride() * code_bytes % static_cast<std::int64_t>(code_align) != 0))
    code_align /= 2;
  const Problem p{.w = a.w.data,
                  .importance = a.importance.as<float>(),
                  .scales = a.scales.data,
                  .biases = a.biases.data,
                  .q = a.q.data,
                  .scale_element = d.scale_element(),
                  .method = d.method,
                  .w_stride = a.w.row_stride(),
                  .q_stride = a.q.row_stride(),
                  .groups = rows * d.num_groups(),
                  .row_groups = Divisor(d.num_groups()),
                  .one_row = one_row,
                  .packed = d.storage == CodeStorage::packed,
                  .code_align = static_cast<int>(code_align),
                  .group_size = static_cast<int>(d.group_size),
                  .bits = d.code_bits(),
                  .bins = d.bins(),
                  .n = static_cast<float>(d.bins() - 1),
                  .inverse_n = 1.0f / static_cast<float>(d.bins() - 1)};
  const int device = a.q.device.index;
  if constexpr (sizeof(X) <= 4) {
    if (cuda::codes_aligned<4>(d, a.q.data, a.q.row_stride()) &&
        cuda::packs_aligned<X, 16 / sizeof(X)>(a.w.data, rows, a.w.row_stride())) {
      switch (d.group_size) {
        case 32: return launch_teams<X, 32>(p, device, stream);
        case 64: return launch_teams<X, 64>(p, device, stream);
        case 128: return launch_teams<X, 128>(p, device, stream);
        default: break;
      }
    }
  }
  const int unit_groups =
      p.packed ? 32 / std::gcd(32, static_cast<int>(d.group_size) * d.code_bits()) : 1;
  const std::int64_t row_units = (d.num_groups() + unit_groups - 1) / unit_groups;
  return cuda::launch(Op::kName, init_groups<X>, cuda::grid_for(32 * rows * row_units), device,
                      stream, p, unit_groups, rows * row_units, Divisor(row_units));
}

Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace) {
  return visit_float(d.element, [&]<class X>(Type<X>) { return run_typed<X>(d, a, stream); });
}

Status supports(const Op::Desc& d, Device) {
  if (!d.expect_finite) return {};
  return unsupported("expect_finite: true, expected false: it runs asynchronously");
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run, nullptr, supports)};

}  // namespace

std::span<const Kernel<QdqAffineInit>> qdq_affine_init_cuda() { return kKernels; }

}  // namespace bittern
