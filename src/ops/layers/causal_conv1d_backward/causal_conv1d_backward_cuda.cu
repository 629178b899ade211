#include "bittern/ops/causal_conv1d_backward.h"
#include "cuda/runtime.cuh"
#include "cuda/silu.cuh"
#include "cuda/tree_rows.cuh"
#include "ops/layers/conv.cuh"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = CausalConv1dBackward;
using cuda::ConvSequence;
using cuda::Raw;

constexpr int kThreads = 128;
constexpr int kChannels = 4;  // of a thread: packs of 16 bytes of f32, 8 of the half types
// Tokens that are under way while as many are computed.
template <class X>
constexpr int kTokensAhead = 8 / sizeof(X);
constexpr int kScanThreads = 1024;

// silu's slope at u: its bits, or from estimates of exp2 and the reciprocal.
template <bool kQuick>
__device__ float slope_at(float u) {
  if constexpr (!kQuick) return math::silu_slope(u, cuda::sigmoid(u));
  const float e = cuda::approximate_exp2(u * -math::kLog2E);
  return math::silu_slope(u, cuda::approximate_reciprocal(1.0f + e));
}

// Places for blocks of tokens, which are summed one after the other: 64, or what the descriptor
// allows cuda_quick. Where cu_seqlens has the lengths, sequence i's places start at
// begin / block + i: that leaves room for all of its blocks, or one where it has no tokens, and
// needs no sum over the sequences before it. Some places stay empty.
struct Places {
  const std::int32_t* bounds;  // null: each sequence has `each` places
  std::int64_t sequences, all, tokens;
  int block;  // tokens
  cuda::Divisor each;

  __device__ std::int64_t first_of(std::int64_t i) const {
    if (bounds == nullptr) return i * each.value();
    return cuda::conv_bound(bounds[i], tokens) / block + i;
  }
  __device__ std::int64_t sequence_at(std::int64_t place) const {
    if (bounds == nullptr) return each.divide(place);
    std::int64_t low = 0, high = sequences;
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (first_of(middle) <= place ? low : high) = middle;
    }
    return low;
  }
};

struct Problem {
  cuda::ConvInputs in;
  const void* d_y;
  void* d_x;
  cuda::ConvTokens d_y_at, d_x_at;
  cuda::ConvState d_final_state, d_initial_state;
  bool silu;
  Places places;
  float* partial;               // [blocks, width + 1, channels]; null: not wanted
  const std::int64_t* numbers;  // of each sequence's first block; null: its first place
};

// numbers[i]: the blocks of the sequences before i; numbers[sequences]: all of them, which are no
// more than there are places, whatever the bounds are. One block of threads, each with neighbouring
// sequences.
__global__ void __launch_bounds__(kScanThreads)
    number_blocks(const Places places, std::int64_t* numbers) {
  const std::int64_t sequences = places.sequences;
  __shared__ std::int64_t sums[kScanThreads];
  const auto thread = static_cast<int>(threadIdx.x);
  const std::int64_t each = (sequences + kScanThreads - 1) / kScanThreads;
  const std::int64_t first = thread * each < sequences ? thread * each : sequences;
  const std::int64_t end = first + each < sequences ? first + each : sequences;
  const auto blocks = [&](std::int64_t i) {
    const std::int64_t length = cuda::conv_bound(places.bounds[i + 1], places.tokens) -
                                cuda::conv_bound(places.bounds[i], places.tokens);
    return length > 0 ? (length + places.block - 1) / places.block : 0;
  };
  std::int64_t own = 0;
  for (std::int64_t i = first; i < end; ++i) own += blocks(i);
  sums[thread] = own;
  for (int stride = 1; stride < kScanThreads; stride *= 2) {
    __syncthreads();
    const std::int64_t before = thread >= stride ? sums[thread - stride] : 0;
    __syncthreads();
    sums[thread] += before;
  }
  std::int64_t number = sums[thread] - own;
  for (std::int64_t i = first; i < end; ++i) {
    numbers[i] = number;
    number += blocks(i);
  }
  if (thread == kScanThreads - 1) numbers[sequences] = number < places.all ? number : places.all;
}

// N channels of one block of tokens. Step t computes u and d_u of the block's token t and, with
// them, d_x of token t - (width - 1): the last steps lie past the block, where d_u is another
// block's too, or past the sequence, where it is 0; the first give what lies before the block,
// which is d_initial_state if the sequence starts here and another block's d_x if not.
template <class X, int kWidth, int N, bool kQuick>
struct Walk {
  static constexpr int kReach = kWidth - 1, kAhead = kTokensAhead<X>;

  const Problem& p;
  const cuda::ConvTaps<X, kWidth, N> taps;
  std::int64_t sequence, channel;
  const X *x, *d_y;  // step 0's elements
  X* d_x;
  bool starts;       // the sequence starts with this block
  int rows, inside;  // tokens of the block; steps that have a token
  const std::uint8_t* mask;
  float before[kReach][N], d_u_before[kReach][N] = {};  // oldest first
  float weight_sum[kWidth][N] = {}, bias_sum[N] = {};

  __device__ Walk(const Problem& problem, const ConvSequence& s, std::int64_t first,
                  std::int64_t first_channel)
      : p(problem), taps(problem.in, first_channel), sequence(s.index), channel(first_channel) {
    const std::int64_t token = s.begin + first, left = s.end - token;
    x = static_cast<const X*>(p.in.x) + p.in.x_at.at(s, token) + channel;
    d_y = static_cast<const X*>(p.d_y) + p.d_y_at.at(s, token) + channel;
    d_x = static_cast<X*>(p.d_x) + p.d_x_at.at(s, token) + channel;
    starts = first == 0;
    const int block = p.places.block;
    rows = static_cast<int>(left < block ? left : block);
    inside = static_cast<int>(left < block + kReach ? left : block + kReach);
    mask = p.in.mask != nullptr ? p.in.mask + token : nullptr;
    cuda::inputs_before<X>(p.in, s, token, channel, before);
  }

  __device__ bool live(int t) const { return t < inside && (mask == nullptr || mask[t] != 0); }

  // Steps t .. t + kAhead - 1 as they lie in memory; zeros where there is nothing to read.
  struct Steps {
    Raw<X, N> x[kAhead], d_y[kAhead];

    __device__ void load(const Walk& w, int t) {
      const X* from_x = w.x + t * w.p.in.x_at.step;
      const X* from_d_y = w.d_y + t * w.p.d_y_at.step;
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const bool live = w.live(t + k);
        x[k] = Raw<X, N>::load(from_x, live);
        d_y[k] = Raw<X, N>::load(from_d_y, live);
        from_x += w.p.in.x_at.step;
        from_d_y += w.p.d_y_at.step;
      }
    }
  };

  __device__ void run() {
    Steps next;
    next.load(*this, 0);
    const bool plain = p.silu && p.d_x != nullptr && mask == nullptr;
    X* to = d_x - kReach * p.d_x_at.step;
    for (int t = 0; t < rows + kReach; t += kAhead) {
      const Steps steps = next;
      next.load(*this, t + kAhead);
      if (plain && t >= kReach && t + kAhead <= rows) {
        take<false>(steps, t, to);
      } else {
        take<true>(steps, t, to);
      }
      to += kAhead * p.d_x_at.step;
    }
  }

  // kEdge: any steps. Otherwise all of them are of this block, have their d_x in it, and nothing is
  // masked or left out; most are, and need no branches.
  template <bool kEdge>
  __device__ void take(const Steps& steps, int t, X* to) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (kEdge && t + k >= rows + kReach) break;
      float now[N], d_u[N];
      steps.x[k].widen(now);
      steps.d_y[k].widen(d_u);
      if (!kEdge || (p.silu && live(t + k))) {
#pragma unroll
        for (int c = 0; c < N; ++c) d_u[c] *= slope_at<kQuick>(taps.sum(before, now[c], c));
      }
      if (!kEdge || t + k < rows) add_to_sums(now, d_u);
      if constexpr (!kEdge) {
        float sum[N];
        input_gradient(d_u, sum);
        Raw<X, N>::narrow(sum).store(to);
      } else if (t + k >= kReach ? p.d_x != nullptr : starts && p.d_initial_state.data != nullptr) {
        emit(t + k, d_u, to);
      }
      to += p.d_x_at.step;
      cuda::shift_in(before, now);
      cuda::shift_in(d_u_before, d_u);
    }
  }

  __device__ void add_to_sums(const float (&now)[N], const float (&d_u)[N]) {
#pragma unroll
    for (int c = 0; c < N; ++c) {
#pragma unroll
      for (int j = 0; j < kReach; ++j)
        weight_sum[j][c] = fmaf(d_u[c], before[j][c], weight_sum[j][c]);
      weight_sum[kReach][c] = fmaf(d_u[c], now[c], weight_sum[kReach][c]);
      bias_sum[c] += d_u[c];
    }
  }

  __device__ void input_gradient(const float (&d_u)[N], float (&sum)[N]) const {
#pragma unroll
    for (int c = 0; c < N; ++c) {
      sum[c] = fmaf(taps.weight[0][c], d_u[c], 0.0f);
#pragma unroll
      for (int j = 1; j < kWidth; ++j)
        sum[c] = fmaf(taps.weight[j][c], d_u_before[kReach - j][c], sum[c]);
    }
  }

  // What step t has of d_x, or of d_initial_state.
  __device__ void emit(int t, const float (&d_u)[N], X* to) const {
    float sum[N];
    input_gradient(d_u, sum);
    if (t >= inside && p.d_final_state.data != nullptr) {  // final_state holds this input
#pragma unroll
      for (int c = 0; c < N; ++c)
        sum[c] += cuda::load_math(
            *p.d_final_state.template at<const X>(sequence, channel + c, t - inside));
    }
    if (t < kReach && starts) {
#pragma unroll
      for (int c = 0; c < N; ++c)
        *p.d_initial_state.template at<X>(sequence, channel + c, t) = cuda::store_math<X>(sum[c]);
      return;
    }
    if (mask != nullptr && mask[t - kReach] == 0) {
#pragma unroll
      for (float& value : sum) value = 0;
    }
    Raw<X, N>::narrow(sum).store(to);
  }
};

// Item: (place, N channels), channels fastest.
template <class X, int kWidth, int N, bool kQuick>
__global__ void __launch_bounds__(kThreads, 3) differentiate(const Problem p) {
  const std::int64_t items = p.places.all * p.in.packs.value();
  for (std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; item < items;
       item += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t place = p.in.packs.divide(item);
    const std::int64_t channel = (item - place * p.in.packs.value()) * N;
    const ConvSequence s = p.in.sequence(p.places.sequence_at(place));
    const std::int64_t block = place - p.places.first_of(s.index), first = block * p.places.block;
    if (block < 0 || (block > 0 && first >= s.end - s.begin)) continue;  // an empty place
    Walk<X, kWidth, N, kQuick> walk(p, s, first, channel);
    walk.run();
    if (p.partial == nullptr || s.begin == s.end) continue;
    const std::int64_t number = p.numbers != nullptr ? p.numbers[s.index] + block : place;
    if (number >= p.places.all) continue;  // bounds that fall
    float* to = p.partial + number * (kWidth + 1) * p.in.channels + channel;
#pragma unroll
    for (int j = 0; j <= kWidth; ++j) {
      Raw<float, N>::narrow(j < kWidth ? walk.weight_sum[j] : walk.bias_sum)
          .store(to + j * p.in.channels);
    }
  }
}

// Columns are (tap or bias, channel).
template <class X>
struct WriteSums {
  X *d_weight, *d_bias;  // null: not wanted
  int width;
  cuda::Divisor channels;

  __device__ void operator()(std::int64_t column, float sum) const {
    const std::int64_t j = channels.divide(column), c = column - j * channels.value();
    X* to = j < width ? d_weight : d_bias;
    if (to != nullptr) to[j < width ? c * width + j : c] = cuda::store_math<X>(sum);
  }
};

// Long blocks where there are many: less is written for the sums over blocks, and read again.
template <bool kQuick>
Sequences blocks_of(const Op::Desc& d) {
  Sequences rows = d.rows();
  if (kQuick && d.tokens >= 8192) rows.chunk = 256;
  return rows;
}

// Rows of partial sums, then the numbers of blocks.
std::int64_t partial_sums(const Op::Desc& d) { return d.blocks() * (d.width + 1) * d.channels; }

std::size_t workspace(const Op::Desc& d, Device) {
  const std::int64_t numbers = d.sequences > 0 ? d.sequences + 1 : 0;
  return static_cast<std::size_t>((partial_sums(d) + 1) / 2 + numbers) * sizeof(std::int64_t);
}

template <class X, int kWidth, int N, bool kQuick>
Status run_packs(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace space) {
  const int device = a.x.device.index;
  const bool sums = a.d_weight || a.d_bias;
  auto* numbers = static_cast<std::int64_t*>(space.data) + (partial_sums(d) + 1) / 2;
  const Sequences rows = blocks_of<kQuick>(d);
  const std::int64_t each = std::max<std::int64_t>(rows.chunks(d.tokens), 1);
  const Problem p{.in = {d, a, N},
                  .d_y = a.d_y.data,
                  .d_x = a.d_x.data,
                  .d_y_at = {d, a.d_y},
                  .d_x_at = {d, a.d_x},
                  .d_final_state = cuda::ConvState(a.d_final_state),
                  .d_initial_state = cuda::ConvState(a.d_initial_state),
                  .silu = d.silu,
                  .places = {.bounds = d.sequences > 0 ? a.cu_seqlens.as<std::int32_t>() : nullptr,
                             .sequences = d.sequence_count(),
                             .all = d.sequences > 0 ? rows.most_chunks() : d.batch * each,
                             .tokens = d.tokens,
                             .block = rows.chunk,
                             .each = cuda::Divisor(each)},
                  .partial = sums ? static_cast<float*>(space.data) : nullptr,
                  .numbers = sums && d.sequences > 0 ? numbers : nullptr};
  if (p.numbers != nullptr) {
    BITTERN_TRY(cuda::launch(Op::kName, number_blocks, {.blocks = 1, .threads = kScanThreads},
                             device, stream, p.places, numbers));
  }
  BITTERN_TRY(cuda::launch(Op::kName, differentiate<X, kWidth, N, kQuick>,
                           cuda::grid_for(p.places.all * (d.channels / N), kThreads), device,
                           stream, p));
  if (!sums) return {};
  const cuda::TreeRows tree{.partial = p.partial,
                            .columns = (d.width + 1) * d.channels,
                            .rows = d.batch * rows.most_chunks(),
                            .counted = p.numbers != nullptr ? p.numbers + d.sequences : nullptr};
  return cuda::sum_rows(
      Op::kName, tree,
      WriteSums<X>{a.d_weight.as<X>(), a.d_bias.as<X>(), d.width, cuda::Divisor(d.channels)},
      device, stream);
}

// Channels that are not packs take long enough for the exact slope.
template <bool kQuick>
Status run(const Op::Desc& d, const Op::Args& a, Stream stream, Workspace space) {
  return cuda::visit_conv(d, [&]<class X, class Width>(Type<X>, Width width) {
    return cuda::conv_packs<X, kChannels>(d, a.x, a.weight, a.d_y, a.bias, a.initial_state, a.d_x)
               ? run_packs<X, width(), kChannels, kQuick>(d, a, stream, space)
               : run_packs<X, width(), 1, false>(d, a, stream, space);
  });
}

Status supports_quick(const Op::Desc& d, Device) {
  return d.silu ? Status() : unsupported("silu: false, expected true");
}
PrecisionGuarantee quick_guarantee(const Op::Desc& d) {
  return cuda::within_terms(Op::contract(d), 0x1p-16);  // see the op's header
}

constexpr Kernel<Op> kKernels[] = {{.name = "cuda_quick",
                                    .backend = "cuda",
                                    .weaker = quick_guarantee,
                                    .supports = supports_quick,
                                    .workspace = workspace,
                                    .architecture = cuda::architecture,
                                    .run = run<true>},
                                   cuda::exact_kernel<Op>(run<false>, workspace)};

}  // namespace

std::span<const Kernel<CausalConv1dBackward>> causal_conv1d_backward_cuda() { return kKernels; }

}  // namespace bittern
