// Sequences cut into segments of whole chunks, which all go on at once where there are few heads.
//
// What a segment makes of its first state is M S + N, and of the gradient of its last one M^T H +
// N', where M does not depend on v or d_o. So a chain runs twice. The first time it leaves out what
// it is for, and finds N, from no state, and M, as the last state for v = 0 from the identity. Then
// the states between segments are found, in f32, and with these it runs again.
#pragma once
#include <algorithm>

#include "ops/gdn/chunk_record.cuh"

namespace bittern::chunk_forward {

// Measured on an H200: two segments pay from about 120 chunks on, three for 32 chunks already.
// Where heads do not limit their number, 16 and 32 segments of 512 chunks are alike, and 64 are
// slower, since chunk_join takes one after the other.
constexpr int kMostSegments = 24;
#ifdef BITTERN_CUDA_EMULATED
constexpr int kLeastChunks = 1, kLeastForTwo = 2;  // so that small problems have segments
#else
constexpr int kLeastChunks = 8, kLeastForTwo = 192;
#endif

__device__ inline int chunks_of(const Problem::Item& item) {
  const std::int64_t tokens = item.end > item.begin ? item.end - item.begin : 0;
  return static_cast<int>((tokens + kMostRows - 1) / kMostRows);
}

// Rows of a state [values, keys] and of M, [keys, keys]: as many as either needs.
BITTERN_HOST_DEVICE inline std::int64_t segment_rows(const GdnDesc& d) {
  return d.value_dim > d.key_dim ? d.value_dim : d.key_dim;
}

// `count` segments at most, each but the last with the same number of chunks. That number follows
// from the sequence's length, which the host does not know.
struct Segments {
  int count;
  // Before every segment but the first, the state [values, keys], or its gradient; join_segments
  // makes it of N. And M of every segment but the first, transposed.
  float *states, *transfers;

  __device__ int chunks_of_each(int chunks) const {
    const int each = (chunks + count - 1) / count;
    return each > kLeastChunks ? each : kLeastChunks;
  }
  // Of segment 1..: its place in `states`, and in `transfers`.
  __device__ std::int64_t at(const Problem& p, const Problem::Item& item, int segment) const {
    return ((item.sequence * p.d.value_heads + item.head) * (count - 1) + segment - 1) *
           segment_rows(p.d) * p.d.key_dim;
  }
};

// As many segments as keep all multiprocessors busy, where that pays for the chain's going twice;
// `blocks` for each sequence and head. With cu_seqlens, a sequence may have all the tokens.
inline int segment_count(const GdnDesc& d, int device, std::int64_t blocks) {
  const std::int64_t chunks = d.chunks(d.tokens), heads = d.sequence_count() * d.value_heads;
  if (heads == 0) return 1;
  const std::int64_t at_once = cuda::limits(device).multiprocessors / (blocks * heads);
  const auto count = std::min<std::int64_t>({at_once, chunks / kLeastChunks, kMostSegments});
  return count > 2 || (count == 2 && chunks >= kLeastForTwo) ? static_cast<int>(count) : 1;
}
// The bytes of Segments::states, and of `transfers`.
inline std::size_t segment_bytes(const GdnDesc& d, int segments) {
  return static_cast<std::size_t>(d.sequence_count() * d.value_heads * (segments - 1) *
                                  segment_rows(d) * d.key_dim) *
         sizeof(float);
}

// The states between a head's segments one after the other, for kJoinValues of its values: S of
// the next one is M S + N. Backwards, H of the one before is M^T H + N'. A thread has four keys of
// the result, and a team of threads, which has all keys, some of the terms.
constexpr int kJoinValues = 8, kJoinTerms = 8;
template <int kKeyDim>
struct JoinShared {
  static constexpr int kTeam = kKeyDim / 4, kTeams = kKeyDim / kJoinTerms;
  static constexpr int kThreads = kTeams * kTeam;
  float state[kJoinValues][kKeyDim], sums[kTeams][kJoinValues][kKeyDim];
};
template <int kKeyDim, bool kBackward>
__device__ void join_segments(const Problem& p, const Segments& cut, const Problem::Item& item) {
  using Shared = JoinShared<kKeyDim>;
  auto& shared = shared_at<Shared>(0);
  auto& state = shared.state;
  auto& sums = shared.sums;
  const int thread = static_cast<int>(threadIdx.x), team = thread / Shared::kTeam;
  const int keys = thread % Shared::kTeam * 4;
  const int chunks = chunks_of(item), each = cut.chunks_of_each(chunks);
  const int segments = (chunks + each - 1) / each;
  // m[j]: how much of term j is in each of the lane's keys.
  const auto load = [&](int segment, float4(&m)[kJoinTerms]) {
    const float* const from = cut.transfers + cut.at(p, item, segment);
    if constexpr (kBackward) {
      const auto row = [&](int i, int j) {
        return *reinterpret_cast<const float4*>(from + (keys + i) * kKeyDim + team * kJoinTerms +
                                                j);
      };
#pragma unroll
      for (int j = 0; j < kJoinTerms; j += 4) {
        const float4 a = row(0, j), b = row(1, j), c = row(2, j), d = row(3, j);
        m[j] = make_float4(a.x, b.x, c.x, d.x);
        m[j + 1] = make_float4(a.y, b.y, c.y, d.y);
        m[j + 2] = make_float4(a.z, b.z, c.z, d.z);
        m[j + 3] = make_float4(a.w, b.w, c.w, d.w);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kJoinTerms; ++j)
        m[j] = *reinterpret_cast<const float4*>(from + (team * kJoinTerms + j) * kKeyDim + keys);
    }
  };
  // A thread's elements of a state.
  const auto for_elements = [&](int segment, auto&& f) {
    float* const of = cut.states + cut.at(p, item, segment) + item.part * kJoinValues * kKeyDim;
    for (int i = thread; i < kJoinValues * kKeyDim; i += Shared::kThreads)
      f(i / kKeyDim, i % kKeyDim, of[i]);
  };
  cuda::wait_for_last_kernel();
  if (segments <= 2) return;
  // The n-th state, and the segment whose M leads from it to the next.
  const auto at = [&](int n) { return kBackward ? segments - n : n; };
  const auto through = [&](int n) { return kBackward ? segments - 1 - n : n; };
  float4 m[kJoinTerms];
  load(through(1), m);
  for_elements(at(1), [&](int value, int key, float& s) { state[value][key] = s; });
  for (int n = 1; n + 1 < segments; ++n) {
    __syncthreads();
#pragma unroll
    for (int value = 0; value < kJoinValues; ++value) {
      float4 sum{};
#pragma unroll
      for (int j = 0; j < kJoinTerms; ++j) {
        const float s = state[value][team * kJoinTerms + j];
        sum.x = std::fma(m[j].x, s, sum.x);
        sum.y = std::fma(m[j].y, s, sum.y);
        sum.z = std::fma(m[j].z, s, sum.z);
        sum.w = std::fma(m[j].w, s, sum.w);
      }
      *reinterpret_cast<float4*>(&sums[team][value][keys]) = sum;
    }
    if (n + 2 < segments) load(through(n + 1), m);
    __syncthreads();
    for_elements(at(n + 1), [&](int value, int key, float& s) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < Shared::kTeams; ++i) sum += sums[i][value][key];
      state[value][key] = s += sum;
    });
  }
}

}  // namespace bittern::chunk_forward
