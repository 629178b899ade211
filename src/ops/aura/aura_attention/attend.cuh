// aura_attention's operands as kernels take them: which tokens a query row sees, and where their
// codes lie. Contents are not checked on CUDA: what is out of range is limited to it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/math.h"
#include "ops/aura/aura_attention/walk.h"
#include "ops/aura/aura_rotation.cuh"

namespace bittern::attend {

using aura::Region;
using cuda::lane_index;
using cuda::RowRotation;
using cuda::warp_index;
using Op = AuraAttention;

inline constexpr std::int64_t kSplit = AuraAttentionDesc::kSplit;
inline constexpr float kNone = -std::numeric_limits<float>::infinity();

// Codes and scales of K or V.
struct CodedRows {
  const std::uint32_t* packed;
  const void* scales;
  const float* codebook;
  std::int64_t packed_stride, scale_stride;  // of the first axis, in elements
  int bits, words;                           // of a code; of a row
};

// First or recent tokens of K or V: their first axis may be several.
struct ExactRows {
  const void* data = nullptr;
  std::int64_t slot_stride = 0;
  int axes = 0;
  std::int64_t size[kMaxRank - 2] = {}, stride[kMaxRank - 2] = {};

  // The elements of KV head `row`, which counts those of all sequences.
  __device__ std::int64_t offset(std::int64_t row) const {
    std::int64_t at = 0;
    for (int i = axes - 1; i >= 0; row /= size[i--]) at += row % size[i] * stride[i];
    return at;
  }
};

// Where the codes of a token lie: outer * stride + inner * row length.
struct Place {
  std::int64_t outer, inner;
};

struct Problem {
  AuraAttentionDesc d;
  std::int64_t group, head_rows;  // query heads and query rows of a KV head
  const void* q;
  void* out;
  std::int64_t q_stride[3], out_stride[3];
  CodedRows k, v;
  const std::int32_t *block_table, *lengths, *starts;
  std::int64_t table_stride;
  ExactRows k_first, v_first, k_recent, v_recent;
  const float *k_mean, *v_mean, *sinks;
  RowRotation k_rotation, v_rotation;
  float scale, softcap;

  std::int64_t rows() const { return d.sequences * d.kv_heads * head_rows; }

  __device__ aura::Sequence sequence(std::int64_t s) const {
    aura::Sequence sequence(d);
    for (int i = 0; i < aura::kRegions; ++i) {
      auto& tokens = sequence.tokens[i];
      if (lengths != nullptr)
        tokens = std::clamp<std::int64_t>(lengths[s * aura::kRegions + i], 0, tokens);
      if (starts != nullptr && i != aura::kFirst)
        sequence.start[i] = std::clamp<std::int64_t>(
            starts[2 * s + i - 1], 0, std::max<std::int64_t>(sequence.slots[i] - 1, 0));
    }
    if (d.page_size != 0 && d.pages == 0) sequence.tokens[aura::kCoded] = 0;
    return sequence;
  }
  __device__ Place place(std::int64_t s, std::int64_t head, std::int64_t slot) const {
    if (d.page_size == 0) return {s * d.kv_heads + head, slot};
    const std::int64_t page = std::clamp<std::int64_t>(
        block_table[s * table_stride + slot / d.page_size], 0, d.pages - 1);
    return {page, head * d.page_size + slot % d.page_size};
  }
  __device__ float scale_of(const CodedRows& rows, Place at) const {
    return cuda::load_element(rows.scales, d.f16_scale ? DType::f16 : DType::f32,
                              at.outer * rows.scale_stride + at.inner);
  }
  __device__ const ExactRows& exact_rows(Region region, bool of_v) const {
    return region == aura::kFirst ? (of_v ? v_first : k_first) : (of_v ? v_recent : k_recent);
  }
};

// A query row: `row` counts the queries of a KV head and their heads.
struct QueryRow {
  std::int64_t s, query, head;  // head is the query's own

  __device__ QueryRow(const Problem& p, std::int64_t s_, std::int64_t kv_head, std::int64_t row)
      : s(s_), query(row / p.group), head(kv_head * p.group + row % p.group) {}
  __device__ QueryRow(std::int64_t s_, std::int64_t query_, std::int64_t head_)
      : s(s_), query(query_), head(head_) {}
  __device__ std::int64_t offset(const std::int64_t (&stride)[3]) const {
    return s * stride[0] + query * stride[1] + head * stride[2];
  }
};

inline CodedRows coded_rows(const Op::Desc& d, const ConstView& packed, const ConstView& scales,
                            const ConstView& codebook, std::int32_t bits) {
  return {.packed = packed.as<std::uint32_t>(),
          .scales = scales.data,
          .codebook = codebook.as<float>(),
          .packed_stride = packed.row_stride(),
          .scale_stride = scales.row_stride(),
          .bits = bits,
          .words = static_cast<int>(packed_words(d.dim, bits))};
}

inline ExactRows exact_rows(const ConstView& view) {
  if (!view) return {};
  ExactRows rows{.data = view.data,
                 .slot_stride = view.stride[view.shape.rank - 2],
                 .axes = view.shape.rank - 2};
  for (int i = 0; i < rows.axes; ++i) {
    rows.size[i] = view.shape[i];
    rows.stride[i] = view.stride[i];
  }
  return rows;
}

inline Problem problem(const Op::Desc& d, const Op::Args& a) {
  return {.d = d,
          .group = d.group(),
          .head_rows = d.queries * d.group(),
          .q = a.q.data,
          .out = a.out.data,
          .q_stride = {a.q.stride[0], a.q.stride[1], a.q.stride[2]},
          .out_stride = {a.out.stride[0], a.out.stride[1], a.out.stride[2]},
          .k = coded_rows(d, a.k_packed, a.k_scales, a.k_codebook, d.k_bits),
          .v = coded_rows(d, a.v_packed, a.v_scales, a.v_codebook, d.v_bits),
          .block_table = a.block_table.as<std::int32_t>(),
          .lengths = a.lengths.as<std::int32_t>(),
          .starts = a.starts.as<std::int32_t>(),
          .table_stride = a.block_table ? a.block_table.row_stride() : 0,
          .k_first = exact_rows(a.k_first),
          .v_first = exact_rows(a.v_first),
          .k_recent = exact_rows(a.k_recent),
          .v_recent = exact_rows(a.v_recent),
          .k_mean = a.k_mean.as<float>(),
          .v_mean = a.v_mean.as<float>(),
          .sinks = a.sinks.as<float>(),
          .k_rotation = cuda::row_rotation(d.k_rotation, d.dim, a.k_table.as<float>(), false),
          .v_rotation = cuda::row_rotation(d.v_rotation, d.dim, a.v_table.as<float>(), true),
          .scale = d.softmax_scale(),
          .softcap = static_cast<float>(d.softcap)};
}

__device__ inline float difference_exp(float x, float m) {
  return math::exp(m == kNone ? x : x - m);
}

// out, by a warp, from sums in shared memory; `spare` holds as much as one of them. Without `exact`
// tokens these sums are zeros. The coded ones are multiplied by `factor` first.
__device__ inline void finish_row(const Problem& p, const QueryRow& query, float l, float l_coded,
                                  float* coded, float* spare, const float* exact,
                                  float factor = 1) {
  const float* const u = cuda::rotate_by_warp(p.v_rotation, coded, spare, factor);
  const std::int64_t kv_head = query.head / p.group, to = query.offset(p.out_stride);
#pragma unroll 4
  for (int j = lane_index(); j < static_cast<int>(p.d.dim); j += 32) {
    float sum = u[j];
    if (p.v_mean != nullptr) sum = fmaf(l_coded, __ldg(p.v_mean + kv_head * p.d.dim + j), sum);
    if (exact != nullptr) sum += exact[j];
    cuda::store_element(p.out, p.d.element, to + j, l == 0 ? 0.0f : sum / l);
  }
}

}  // namespace bittern::attend
