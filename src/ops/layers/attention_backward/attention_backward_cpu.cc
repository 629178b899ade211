#include <algorithm>
#include <limits>
#include <vector>

#include "bittern/ops/attention_backward.h"
#include "core/sequences.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "ops/layers/attention_backward/work.h"

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
using cpu::AttentionSums;
using tile::D;
using tile::kLanes;
using tile::V;

constexpr std::int64_t kBlock = cpu::kAttentionBlock;

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

// Calls f(at, seen) for the vector of queries from `column` on and each key in turn: `at` is their
// place in the tile, and seen(a, b) is a where the query sees the key, b elsewhere.
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
void SumExponentials(const Tile& t, const AttentionSums& sums) {
  const D d;
  const V none = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (std::int64_t j = 0; j < t.queries; j += kLanes) {
    V m = hn::LoadU(d, sums.most + j);
    m = hn::IfThenElse(hn::Eq(m, none), hn::Zero(d), m);
    V l = hn::LoadU(d, sums.total + j), mean = hn::LoadU(d, sums.mean + j);
    ForKeys(t, j, [&](std::int64_t at, auto seen) HWY_ATTR {
      const V e = Exp(d, hn::Sub(hn::LoadU(d, t.x + at), m));
      hn::StoreU(e, d, t.x + at);
      l = seen(hn::Add(l, e), l);
      mean = seen(hn::MulAdd(e, hn::LoadU(d, t.g + at), mean), mean);
    });
    hn::StoreU(l, d, sums.total + j);
    hn::StoreU(mean, d, sums.mean + j);
  }
}

// r in place of l, D in place of the sum of e g.
void FinishSums(std::int64_t queries, const AttentionSums& sums) {
  const D d;
  const V zero = hn::Zero(d);
  for (std::int64_t j = 0; j < queries; j += kLanes) {
    const V l = hn::LoadU(d, sums.total + j);
    const V r = hn::IfThenElse(hn::Eq(l, zero), zero, hn::Div(hn::Set(d, 1.0f), l));
    hn::StoreU(r, d, sums.total + j);
    hn::StoreU(hn::Mul(r, hn::LoadU(d, sums.mean + j)), d, sums.mean + j);
  }
}

// p in place of e, z in place of g.
template <bool kCapped>
void LogitGradients(const Tile& t, const AttentionSums& sums) {
  const D d;
  for (std::int64_t j = 0; j < t.queries; j += kLanes) {
    const V r = hn::LoadU(d, sums.total + j), mean = hn::LoadU(d, sums.mean + j);
    for (std::int64_t at = j; at < t.keys * kBlock; at += kBlock) {
      const V p = hn::Mul(hn::LoadU(d, t.x + at), r);
      V z = hn::Mul(p, hn::Sub(hn::LoadU(d, t.g + at), mean));
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

// A KV head of a sequence, and the scratch that holds what is loaded of it.
struct Part {
  const Op::Desc& d;
  const Op::Args& a;
  const AttentionPart& part;
  const AttentionScratch& s;

  std::int64_t FirstHead() const { return part.kv_head * d.group(); }
  std::int64_t EndHead() const { return FirstHead() + d.group(); }
  // Where the block begins with the first key that the block of queries at `query` sees.
  std::int64_t Oldest(std::int64_t query) const {
    return std::max<std::int64_t>(query - d.reach() + 1, 0) / kBlock * kBlock;
  }
  // The sums of a head's block of queries, in a list of `blocks` for each head.
  AttentionSums Kept(float* sums, std::int64_t blocks, std::int64_t h, std::int64_t query) const {
    const std::int64_t at = h * blocks + part.first_block + query / kBlock;
    return AttentionSums(sums + at * AttentionSums::kFloats);
  }
  // A tile whose numbers are in the scratch's rows from `row` on.
  Tile At(std::int64_t query, std::int64_t key, std::int64_t row) const {
    const std::int64_t at = row * kBlock;
    return {.query = query,
            .queries = std::min(kBlock, part.length - query),
            .key = key,
            .keys = std::min(kBlock, part.length - key),
            .reach = d.reach(),
            .x = s.x + at,
            .g = s.g + at,
            .u = d.softcap > 0 ? s.u + at : nullptr};
  }

  void LoadKeys(std::int64_t begin, std::int64_t end) const {
    const std::int64_t at = begin * s.stride;
    Load(a.k, part.begin + begin, part.kv_head, end - begin, s.stride, s.k + at);
    Load(a.v, part.begin + begin, part.kv_head, end - begin, s.stride, s.v + at);
  }
  void ClearGradients(std::int64_t begin, std::int64_t end) const {
    std::fill(s.d_k + begin * s.stride, s.d_k + end * s.stride, 0.0f);
    std::fill(s.d_v + begin * s.stride, s.d_v + end * s.stride, 0.0f);
  }
  void StoreGradients(std::int64_t begin, std::int64_t end) const {
    const std::int64_t at = begin * s.stride;
    Store(s.d_k + at, s.stride, part.begin + begin, part.kv_head, end - begin, a.d_k);
    Store(s.d_v + at, s.stride, part.begin + begin, part.kv_head, end - begin, a.d_v);
  }
  void LoadQueries(std::int64_t h, std::int64_t query) const {
    const std::int64_t count = std::min(kBlock, part.length - query);
    Load(a.q, part.begin + query, h, count, s.stride, s.a);
    tile::Scale(d.softmax_scale(), s.a, count * s.stride);
    tile::Transpose(s.a, s.stride, count, d.dim, s.a_transposed, kBlock);
    Load(a.d_out, part.begin + query, h, count, s.stride, s.d_out);
    tile::Transpose(s.d_out, s.stride, count, d.dim, s.d_out_transposed, kBlock);
  }

  // The rest works on the queries that were loaded last.
  void Logits(const Tile& t, float* most) const {
    matmul::MultiplyToBand(t.keys, t.queries, d.dim, t.Queries(),
                           {s.k + t.key * s.stride, s.stride}, s.a_transposed, kBlock, t.x, kBlock);
    if (d.softcap > 0) {
      CapLogits<true>(t, static_cast<float>(d.softcap), most);
    } else {
      CapLogits<false>(t, 0, most);
    }
  }
  void Exponentials(const Tile& t, const AttentionSums& sums) const {
    matmul::MultiplyToBand(t.keys, t.queries, d.dim, t.Queries(),
                           {s.v + t.key * s.stride, s.stride}, s.d_out_transposed, kBlock, t.g,
                           kBlock);
    SumExponentials(t, sums);
  }
  void Gradients(const Tile& t, const AttentionSums& sums) const {
    if (d.softcap > 0) {
      LogitGradients<true>(t, sums);
    } else {
      LogitGradients<false>(t, sums);
    }
  }
  void AddToKeys(const Tile& t) const {
    const std::int64_t at = t.key * s.stride;
    matmul::MultiplyBand(t.keys, d.dim, t.queries, {t.x, kBlock, 1, t.Queries()}, s.d_out, s.stride,
                         s.d_v + at, s.stride, true);
    matmul::MultiplyBand(t.keys, d.dim, t.queries, {t.g, kBlock, 1, t.Queries()}, s.a, s.stride,
                         s.d_k + at, s.stride, true);
  }
  void AddToQueries(const Tile& t, bool first) const {
    matmul::MultiplyBand(t.queries, d.dim, t.keys, {t.g, 1, kBlock, t.Keys()},
                         s.k + t.key * s.stride, s.stride, s.d_q, s.stride, !first);
  }

  // The sums over all keys of a block of queries, its d_q and, if `keys`, what it adds to d_k and
  // d_v.
  void Queries(std::int64_t h, std::int64_t query, const AttentionSums& sums, bool keys) const {
    const std::int64_t oldest = Oldest(query), count = std::min(kBlock, part.length - query);
    const auto for_tiles = [&](const auto& f) {
      for (std::int64_t key = oldest; key <= query; key += kBlock) f(At(query, key, key - oldest));
    };
    LoadQueries(h, query);
    std::fill_n(sums.most, kBlock, -std::numeric_limits<float>::infinity());
    std::fill_n(sums.total, kBlock, 0.0f);
    std::fill_n(sums.mean, kBlock, 0.0f);
    for_tiles([&](const Tile& t) { Logits(t, sums.most); });
    for_tiles([&](const Tile& t) { Exponentials(t, sums); });
    FinishSums(count, sums);
    for_tiles([&](const Tile& t) {
      Gradients(t, sums);
      if (keys) AddToKeys(t);
      AddToQueries(t, t.key == oldest);
    });
    tile::Scale(d.softmax_scale(), s.d_q, count * s.stride);
    Store(s.d_q, s.stride, part.begin + query, h, count, a.d_q);
  }
};

// All gradients of a part.
void RunAttentionPart(const Op::Desc& d, const Op::Args& a, const AttentionPart& of,
                      const AttentionScratch& s) {
  const Part part{d, a, of, s};
  part.LoadKeys(0, of.length);
  part.ClearGradients(0, of.length);
  for (std::int64_t h = part.FirstHead(); h < part.EndHead(); ++h)
    for (std::int64_t query = 0; query < of.length; query += kBlock)
      part.Queries(h, query, AttentionSums(s.sums), true);
  part.StoreGradients(0, of.length);
}

// The same in two passes over blocks, for more threads than there are parts. First d_q of a block
// of queries. Its sums are kept in `sums`, where each head has `blocks` of them.
void RunAttentionQueries(const Op::Desc& d, const Op::Args& a, const AttentionPart& of,
                         std::int64_t query, const AttentionScratch& s, float* sums,
                         std::int64_t blocks) {
  const Part part{d, a, of, s};
  part.LoadKeys(part.Oldest(query), std::min(query + kBlock, of.length));
  for (std::int64_t h = part.FirstHead(); h < part.EndHead(); ++h) {
    part.Queries(h, query, part.Kept(sums, blocks, h, query), false);
  }
}

// Then d_k and d_v of a block of keys, for which the tiles are computed once more.
void RunAttentionKeys(const Op::Desc& d, const Op::Args& a, const AttentionPart& of,
                      std::int64_t key, const AttentionScratch& s, float* sums,
                      std::int64_t blocks) {
  const Part part{d, a, of, s};
  const std::int64_t end = std::min(key + kBlock, of.length);
  part.LoadKeys(key, end);
  part.ClearGradients(key, end);
  const AttentionSums unused(s.sums);
  for (std::int64_t h = part.FirstHead(); h < part.EndHead(); ++h) {
    for (std::int64_t query = key; query < of.length && part.Oldest(query) <= key;
         query += kBlock) {
      const AttentionSums kept = part.Kept(sums, blocks, h, query);
      const Tile t = part.At(query, key, 0);
      part.LoadQueries(h, query);
      part.Logits(t, unused.most);
      std::copy_n(kept.most, kBlock, unused.most);
      part.Exponentials(t, unused);
      part.Gradients(t, kept);
      part.AddToKeys(t);
    }
  }
  part.StoreGradients(key, end);
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
using cpu::AttentionSums;
using cpu::kAttentionBlock;
BITTERN_EXPORT(RunAttentionPart);
BITTERN_EXPORT(RunAttentionQueries);
BITTERN_EXPORT(RunAttentionKeys);

// Blocks there can be at most; an empty sequence has none.
std::int64_t most_blocks(const Op::Desc& d) { return std::min(d.tokens, d.rows().most_chunks()); }

// The workspace is the sums of all blocks of queries, then the threads' scratch.
std::int64_t shared_floats(const Op::Desc& d) {
  return d.heads * most_blocks(d) * AttentionSums::kFloats;
}

std::size_t workspace(const Op::Desc& d, Device) {
  const std::int64_t threads = std::min<std::int64_t>(num_threads(), most_blocks(d) * d.kv_heads);
  return static_cast<std::size_t>(shared_floats(d) + threads * AttentionScratch(d).floats()) *
         sizeof(float);
}

// Pairs of a query and a key that it sees.
double pairs(const Op::Desc& d, const AttentionPart& part) {
  const auto length = static_cast<double>(part.length);
  const double reach = std::min(static_cast<double>(d.reach()), length);
  return reach * (reach + 1) / 2 + (length - reach) * reach;
}

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace space) {
  static_assert(Sequences().chunk == kAttentionBlock);
  std::vector<AttentionPart> parts;
  for (const Sequence& s : sequences_of(d.rows(), a.cu_seqlens))
    for (std::int64_t h = 0; h < d.kv_heads && s.begin < s.end; ++h)
      parts.push_back({s.begin, s.end - s.begin, h, s.first_chunk});
  if (parts.empty()) return {};
  // The longest first: threads then end at about the same time.
  std::stable_sort(parts.begin(), parts.end(),
                   [](const auto& x, const auto& y) { return x.length > y.length; });

  auto* const sums = static_cast<float*>(space.data);
  const std::int64_t floats = AttentionScratch(d).floats();
  const std::int64_t slots =
      (static_cast<std::int64_t>(space.bytes / sizeof(float)) - shared_floats(d)) / floats;
  double work = 0;
  for (const AttentionPart& part : parts) work += pairs(d, part);
  std::int64_t team = std::min<std::int64_t>(slots, num_threads());
  if (!cpu::grain_ignored()) {
    const double threads =
        work * static_cast<double>(d.group() * d.dim) / static_cast<double>(cpu::grain_now());
    team = std::clamp<std::int64_t>(static_cast<std::int64_t>(std::min(threads, 1e6)), 1, team);
  }
  const auto each = [&](std::int64_t count, const auto& f) {
    return cpu::parallel_queue(count, team, [&](std::int64_t i, std::int64_t slot) -> Status {
      f(i, AttentionScratch(d, sums + shared_floats(d) + slot * floats));
      return {};
    });
  };

  // Whole parts take 5 products, blocks 7, but blocks are shared out evenly.
  std::vector<double> busy(static_cast<std::size_t>(team));
  for (const AttentionPart& part : parts)
    *std::min_element(busy.begin(), busy.end()) += pairs(d, part);
  const double whole = *std::max_element(busy.begin(), busy.end());
  if (5 * whole * static_cast<double>(team) <= 7 * work) {
    return each(static_cast<std::int64_t>(parts.size()),
                [&](std::int64_t i, const AttentionScratch& s) {
                  BITTERN_CALL(RunAttentionPart)(d, a, parts[static_cast<std::size_t>(i)], s);
                });
  }
  struct Block {
    const AttentionPart* part;
    std::int64_t first;
  };
  std::vector<Block> blocks;
  for (const AttentionPart& part : parts)
    for (std::int64_t first = 0; first < part.length; first += kAttentionBlock)
      blocks.push_back({&part, first});
  const auto for_blocks = [&](auto& f) {
    return each(static_cast<std::int64_t>(blocks.size()),
                [&](std::int64_t i, const AttentionScratch& s) {
                  const Block& block = blocks[static_cast<std::size_t>(i)];
                  f(d, a, *block.part, block.first, s, sums, most_blocks(d));
                });
  };
  BITTERN_TRY(for_blocks(BITTERN_CALL(RunAttentionQueries)));
  return for_blocks(BITTERN_CALL(RunAttentionKeys));
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run, workspace)};

}  // namespace

std::span<const Kernel<AttentionBackward>> attention_backward_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
