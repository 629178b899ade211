#include <limits>
#include <vector>

#include "bittern/ops/attention_backward.h"
#include "core/sequences.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/layers/attention_backward/scratch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/layers/attention_backward/attention_backward_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/math-inl.h"
#include "cpu/tile-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = AttentionBackward;
using cpu::AttentionPart;
using cpu::AttentionScratch;
using tile::D;
using tile::kLanes;
using tile::V;

constexpr std::int64_t kBlock = AttentionScratch::kBlock;

// A block of queries and one of keys, as positions in their sequence. Matrices over the two have a
// row for each key and vectors along the queries, so that a query's sums over the keys stay in
// their lane.
struct Tile {
  std::int64_t query, queries;  // the first, and how many
  std::int64_t key, keys;
  std::int64_t reach;  // a query sees the keys from query - reach + 1 to query
  float *x, *g, *u;    // the tile's rows of the scratch

  // Whether every query sees every key.
  bool Whole() const { return key + keys - 1 <= query && query + queries - 1 - key < reach; }
  // The queries that see key r of the tile, and the keys that query r sees.
  matmul::Band Queries() const { return {key - query, key - query + reach}; }
  matmul::Band Keys() const { return {query - key - reach + 1, query - key + 1}; }

  // Of the queries j, j + 1, ... those that see key r.
  HWY_INLINE hn::Mask<D> Seen(std::int64_t r, std::int64_t j) const {
    const matmul::Band band = Queries();
    return hn::AndNot(tile::Before(j, r + band.begin), tile::Before(j, r + band.end));
  }
};

// Calls f(r, column, seen) for a vector of queries, from column on, and each key r in turn;
// seen(a, b) is a where the query sees the key, and b elsewhere.
template <class F>
HWY_INLINE void ForKeys(const Tile& t, std::int64_t column, const F& f) {
  if (t.Whole()) {
    for (std::int64_t r = 0; r < t.keys; ++r)
      f(r * kBlock + column, [](V a, V) HWY_ATTR { return a; });
  } else {
    for (std::int64_t r = 0; r < t.keys; ++r) {
      const auto mask = t.Seen(r, column);
      f(r * kBlock + column, [mask](V a, V b) HWY_ATTR { return hn::IfThenElse(mask, a, b); });
    }
  }
}

// x and u from the dots in x; m so far.
template <bool kCapped>
void CapLogits(const Tile& t, float softcap, float* most) {
  const D d;
  const V cap = hn::Set(d, softcap);
  for (std::int64_t j = 0; j < t.queries; j += kLanes) {
    V m = hn::LoadU(d, most + j);
    ForKeys(t, j, [&](std::int64_t at, auto seen) HWY_ATTR {
      V x = hn::LoadU(d, t.x + at);
      if constexpr (kCapped) {
        const V u = Tanh(d, hn::Div(x, cap));
        x = hn::Mul(cap, u);
        hn::StoreU(u, d, t.u + at);
        hn::StoreU(x, d, t.x + at);
      }
      m = seen(hn::IfThenElse(hn::Gt(x, m), x, m), m);
    });
    hn::StoreU(m, d, most + j);
  }
}

// e in place of x; l and the sum of e g so far.
void SumExponentials(const Tile& t, const float* most, float* total, float* mean) {
  const D d;
  const V none = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (std::int64_t j = 0; j < t.queries; j += kLanes) {
    V m = hn::LoadU(d, most + j);
    m = hn::IfThenElse(hn::Eq(m, none), hn::Zero(d), m);
    V l = hn::LoadU(d, total + j), sum = hn::LoadU(d, mean + j);
    ForKeys(t, j, [&](std::int64_t at, auto seen) HWY_ATTR {
      const V e = Exp(d, hn::Sub(hn::LoadU(d, t.x + at), m));
      hn::StoreU(e, d, t.x + at);
      l = seen(hn::Add(l, e), l);
      sum = seen(hn::MulAdd(e, hn::LoadU(d, t.g + at), sum), sum);
    });
    hn::StoreU(l, d, total + j);
    hn::StoreU(sum, d, mean + j);
  }
}

// r in place of l, D in place of the sum of e g.
void FinishSums(std::int64_t queries, float* total, float* mean) {
  const D d;
  const V zero = hn::Zero(d);
  for (std::int64_t j = 0; j < queries; j += kLanes) {
    const V l = hn::LoadU(d, total + j);
    const V r = hn::IfThenElse(hn::Eq(l, zero), zero, hn::Div(hn::Set(d, 1.0f), l));
    hn::StoreU(r, d, total + j);
    hn::StoreU(hn::Mul(r, hn::LoadU(d, mean + j)), d, mean + j);
  }
}

// p in place of e, z in place of g.
template <bool kCapped>
void LogitGradients(const Tile& t, const float* total, const float* mean) {
  const D d;
  for (std::int64_t j = 0; j < t.queries; j += kLanes) {
    const V r = hn::LoadU(d, total + j), sum = hn::LoadU(d, mean + j);
    for (std::int64_t at = j; at < t.keys * kBlock; at += kBlock) {
      const V p = hn::Mul(hn::LoadU(d, t.x + at), r);
      V z = hn::Mul(p, hn::Sub(hn::LoadU(d, t.g + at), sum));
      if constexpr (kCapped) {
        const V u = hn::LoadU(d, t.u + at);
        z = hn::Mul(z, hn::NegMulAdd(u, u, hn::Set(d, 1.0f)));
      }
      hn::StoreU(p, d, t.x + at);
      hn::StoreU(z, d, t.g + at);
    }
  }
}

// The rows of one head and `count` tokens of x [tokens, heads, dim].
void Load(const ConstView& x, std::int64_t token, std::int64_t head, std::int64_t count,
          std::int64_t stride, float* to) {
  tile::LoadAs(x.as<float>() + x.at(token, head), x.stride[0], count, x.shape[2], to, stride);
}
void Store(const float* from, std::int64_t stride, std::int64_t token, std::int64_t head,
           std::int64_t count, const MutView& x) {
  tile::StoreAs(from, stride, count, x.shape[2], x.as<float>() + x.at(token, head), x.stride[0]);
}

// The block of queries of head h that begins at position `first`: its d_q, and what it adds to d_k
// and d_v.
template <bool kCapped>
void AddQueries(const Op::Desc& d, const Op::Args& a, const AttentionPart& part, std::int64_t h,
                std::int64_t first, const AttentionScratch& s) {
  const std::int64_t queries = std::min(kBlock, part.length - first), token = part.begin + first;
  const float scale = d.softmax_scale(), softcap = static_cast<float>(d.softcap);
  Load(a.q, token, h, queries, s.stride, s.a);
  tile::Scale(scale, s.a, queries * s.stride);
  tile::Transpose(s.a, s.stride, queries, d.dim, s.a_transposed, kBlock);
  Load(a.d_out, token, h, queries, s.stride, s.d_out);
  tile::Transpose(s.d_out, s.stride, queries, d.dim, s.d_out_transposed, kBlock);

  const std::int64_t oldest = std::max<std::int64_t>(first - d.reach() + 1, 0) / kBlock * kBlock;
  const auto tile_at = [&](std::int64_t key) -> Tile {
    const std::int64_t at = (key - oldest) * kBlock;
    return {first,     queries,  key,      std::min(kBlock, part.length - key),
            d.reach(), s.x + at, s.g + at, kCapped ? s.u + at : nullptr};
  };
  std::fill_n(s.most, kBlock, -std::numeric_limits<float>::infinity());
  for (std::int64_t key = oldest; key <= first; key += kBlock) {
    const Tile t = tile_at(key);
    matmul::MultiplyToBand(t.keys, queries, d.dim, t.Queries(), {s.k + key * s.stride, s.stride},
                           s.a_transposed, kBlock, t.x, kBlock);
    CapLogits<kCapped>(t, softcap, s.most);
  }
  std::fill_n(s.total, kBlock, 0.0f);
  std::fill_n(s.mean, kBlock, 0.0f);
  for (std::int64_t key = oldest; key <= first; key += kBlock) {
    const Tile t = tile_at(key);
    matmul::MultiplyToBand(t.keys, queries, d.dim, t.Queries(), {s.v + key * s.stride, s.stride},
                           s.d_out_transposed, kBlock, t.g, kBlock);
    SumExponentials(t, s.most, s.total, s.mean);
  }
  FinishSums(queries, s.total, s.mean);
  for (std::int64_t key = oldest; key <= first; key += kBlock) {
    const Tile t = tile_at(key);
    const std::int64_t at = key * s.stride;
    LogitGradients<kCapped>(t, s.total, s.mean);
    matmul::MultiplyBand(t.keys, d.dim, queries, {t.x, kBlock, 1, t.Queries()}, s.d_out, s.stride,
                         s.d_v + at, s.stride, true);
    matmul::MultiplyBand(t.keys, d.dim, queries, {t.g, kBlock, 1, t.Queries()}, s.a, s.stride,
                         s.d_k + at, s.stride, true);
    matmul::MultiplyBand(queries, d.dim, t.keys, {t.g, 1, kBlock, t.Keys()}, s.k + at, s.stride,
                         s.d_q, s.stride, key > oldest);
  }
  tile::Scale(scale, s.d_q, queries * s.stride);
  Store(s.d_q, s.stride, token, h, queries, a.d_q);
}

void RunAttentionBackward(const Op::Desc& d, const Op::Args& a, const AttentionPart& part,
                          const AttentionScratch& s) {
  Load(a.k, part.begin, part.kv_head, part.length, s.stride, s.k);
  Load(a.v, part.begin, part.kv_head, part.length, s.stride, s.v);
  std::fill_n(s.d_k, part.length * s.stride, 0.0f);
  std::fill_n(s.d_v, part.length * s.stride, 0.0f);
  for (std::int64_t h = part.kv_head * d.group(); h < (part.kv_head + 1) * d.group(); ++h) {
    for (std::int64_t first = 0; first < part.length; first += kBlock) {
      if (d.softcap > 0) {
        AddQueries<true>(d, a, part, h, first, s);
      } else {
        AddQueries<false>(d, a, part, h, first, s);
      }
    }
  }
  Store(s.d_k, s.stride, part.begin, part.kv_head, part.length, a.d_k);
  Store(s.d_v, s.stride, part.begin, part.kv_head, part.length, a.d_v);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = AttentionBackward;
using cpu::AttentionPart;
using cpu::AttentionScratch;
BITTERN_EXPORT(RunAttentionBackward);

std::size_t workspace(const Op::Desc& d, Device) {
  const std::int64_t parts = d.rows().count() * d.kv_heads;
  return static_cast<std::size_t>(std::min<std::int64_t>(num_threads(), parts) *
                                  AttentionScratch(d).floats()) *
         sizeof(float);
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace space) {
  std::vector<AttentionPart> parts;
  for (const Sequence& s : sequences_of(d.rows(), a.cu_seqlens))
    for (std::int64_t h = 0; h < d.kv_heads && s.begin < s.end; ++h)
      parts.push_back({s.begin, s.end - s.begin, h});
  // The longest first: threads then end at about the same time.
  std::stable_sort(parts.begin(), parts.end(),
                   [](const auto& x, const auto& y) { return x.length > y.length; });
  const std::int64_t floats = AttentionScratch(d).floats();
  const auto slots = static_cast<std::int64_t>(space.bytes / sizeof(float)) / floats;
  return cpu::parallel_queue(
      static_cast<std::int64_t>(parts.size()), slots,
      [&](std::int64_t i, std::int64_t slot) -> Status {
        const AttentionScratch scratch(d, static_cast<float*>(space.data) + slot * floats);
        BITTERN_CALL(RunAttentionBackward)(d, a, parts[static_cast<std::size_t>(i)], scratch);
        return {};
      });
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run, workspace)};

}  // namespace

std::span<const Kernel<AttentionBackward>> attention_backward_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
