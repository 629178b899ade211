// What one thread of a gated delta rule's kernel works in, cut from its share of the workspace.
// Rows of keys and values have room for whole vectors.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "bittern/gdn_desc.h"
#include "cpu/parallel.h"
#include "ops/gdn/gdn.h"

namespace bittern::cpu::gdn {

// Rows of matrices over a chunk's tokens are this far apart, and a number per token has this room.
inline constexpr std::int64_t kRows = 64;

// The pieces of a scratch, one after the other, each at the start of a line. Without memory it
// counts what they need.
class Pieces {
 public:
  Pieces(const GdnDesc& d, float* memory = nullptr) : d_(d), memory_(memory) {}
  const GdnDesc& desc() const { return d_; }
  std::int64_t floats() const { return used_; }

  static std::int64_t padded(std::int64_t n) { return (n + 15) / 16 * 16; }
  float* take(std::int64_t n) {
    float* piece = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += padded(n);
    return piece;
  }
  float* row() { return take(kRows); }                // a number per token
  float* matrix() { return take(d_.chunk * kRows); }  // and per pair of tokens
  float* keys(std::int64_t tiles = 1) { return take(tiles * d_.chunk * padded(d_.key_dim)); }
  float* values(std::int64_t tiles = 1) { return take(tiles * d_.chunk * padded(d_.value_dim)); }
  // Either of them, or the transpose of one.
  float* either() { return take(d_.chunk * padded(std::max(d_.key_dim, d_.value_dim))); }
  float* transposed() { return take(std::max(d_.key_dim, d_.value_dim) * kRows); }
  float* state() { return take(state_size()); }
  // Pairs of bf16 (cpu/bf16-inl.h): of a state's keys, and of tokens.
  std::int64_t key_pairs() const { return (d_.key_dim + 1) / 2; }
  std::uint32_t* pairs(std::int64_t n) { return reinterpret_cast<std::uint32_t*>(take(n)); }
  std::uint32_t* token_pairs(std::int64_t width) {
    return pairs((d_.chunk + 1) / 2 * padded(width));
  }
  std::int64_t state_size() const {  // enough for the transpose
    return std::max(d_.key_dim * padded(d_.value_dim), d_.value_dim * padded(d_.key_dim));
  }

 private:
  const GdnDesc& d_;
  float* memory_;
  std::int64_t used_ = 0;
};

// Floats of a Scratch, and the workspace that has one for each thread.
template <class Scratch>
std::int64_t scratch_floats(const GdnDesc& d) {
  Pieces pieces(d);
  (void)Scratch(pieces);
  return pieces.floats();
}
template <class Scratch>
std::size_t scratch_bytes(const GdnDesc& d, Device = {}) {
  return static_cast<std::size_t>(std::max(num_threads(), 1) * scratch_floats<Scratch>(d)) *
         sizeof(float);
}

// Calls f(begin, end, scratch) on disjoint ranges that cover [0, items), calls that run at once
// with a Scratch of their own. The workspace says how many there are: it was made when the plan
// was, perhaps for other threads than now.
template <class Scratch, class F>
void parallel_scratch(const GdnDesc& d, std::int64_t items, Workspace workspace, F&& f) {
  const std::int64_t floats = scratch_floats<Scratch>(d);
  const auto slots = static_cast<std::int64_t>(workspace.bytes / sizeof(float)) / floats;
  parallel_slots(items, slots, [&](std::int64_t slot, std::int64_t begin, std::int64_t end) {
    Pieces pieces(d, static_cast<float*>(workspace.data) + slot * floats);
    f(begin, end, Scratch(pieces));
  });
}

// Calls f(d, a, parts, begin, end, scratch, more...) on ranges of items. An item is one head of one
// part: item i is head i % heads of part i / heads.
template <class Scratch, class Part, class Args, class F, class... More>
Status run_parts(const GdnDesc& d, const Args& a, const std::vector<Part>& parts,
                 std::int64_t heads, Workspace workspace, F& f, More... more) {
  const auto items = static_cast<std::int64_t>(parts.size()) * heads;
  parallel_scratch<Scratch>(d, items, workspace,
                            [&](std::int64_t begin, std::int64_t end, const Scratch& scratch) {
                              f(d, a, parts.data(), begin, end, scratch, more...);
                            });
  return {};
}
// Parts are chunks, where these do not wait for each other, or whole sequences.
template <class Scratch, class Args, class F>
Status run_chunks(const GdnDesc& d, const Args& a, Workspace workspace, F& f) {
  return run_parts<Scratch>(d, a, gdn_chunks(d, a.cu_seqlens), d.value_heads, workspace, f);
}
template <class Scratch, class Args, class F, class... More>
Status run_sequences(const GdnDesc& d, const Args& a, std::int64_t heads, Workspace workspace, F& f,
                     More... more) {
  return run_parts<Scratch>(d, a, sequences_of(d.rows(), a.cu_seqlens), heads, workspace, f,
                            more...);
}

// The two parts of each token's sum of log decays (gdn.h).
struct Sums {
  explicit Sums(Pieces& p) : high(p.row()), low(p.row()) {}
  float *high, *low;
};

struct RecomputeScratch {
  explicit RecomputeScratch(Pieces& p)
      : a(p.matrix()), scaled(p.either()), product(p.either()), beta(p.row()), decay(p.row()) {}
  float *a, *scaled, *product, *beta, *decay;
};

struct KktScratch {
  explicit KktScratch(Pieces& p)
      : k(p.keys()),
        k_transposed(p.transposed()),
        kk(p.matrix()),
        l(p.matrix()),
        beta(p.row()),
        g(p.row()) {}
  float *k, *k_transposed, *kk, *l, *beta, *g;
};

struct SolveScratch {
  explicit SolveScratch(Pieces& p) : l(p.matrix()), a(p.matrix()) {}
  float *l, *a;
};

struct StateScratch {
  explicit StateScratch(Pieces& p)
      : state(p.state()),
        rounded(p.state()),
        k(p.keys()),
        v(p.values()),
        product(p.values()),
        g(p.row()),
        decay(p.row()) {}
  float *state, *rounded, *k, *v, *product, *g, *decay;
};

struct OutputScratch {
  explicit OutputScratch(Pieces& pieces)
      : state(pieces.state()),
        q(pieces.keys()),
        k_transposed(pieces.transposed()),
        v(pieces.values()),
        o(pieces.values()),
        qk(pieces.matrix()),
        p(pieces.matrix()),
        g(pieces.row()),
        decay(pieces.row()) {}
  float *state, *q, *k_transposed, *v, *o, *qk, *p, *g, *decay;
};

// Value heads of one key head that go through the chunks together.
inline constexpr std::int64_t kShared = 4;

struct ForwardScratch {
  explicit ForwardScratch(Pieces& pieces)
      : keys_queries(pieces.keys(2)),
        products(pieces.values(2)),
        k_transposed(pieces.transposed()),
        v(pieces.values()),
        kk(pieces.matrix()),
        qk(pieces.matrix()),
        l(pieces.matrix()),
        p(pieces.matrix()),
        sum(pieces),
        decay(pieces.row()),
        beta(pieces.row()) {
    for (float*& s : state) s = pieces.state();
  }
  float* state[kShared];
  float* keys_queries;  // the queries right after the last key
  float* products;      // of these with the state
  float *k_transposed, *v, *kk, *qk, *l, *p;
  Sums sum;
  float *decay, *beta;
};

// That of products in pairs of bf16.
struct PairScratch {
  explicit PairScratch(Pieces& pieces)
      : state_pairs(pieces.pairs(pieces.key_pairs() * Pieces::padded(pieces.desc().value_dim))),
        rows(pieces.pairs(pieces.desc().chunk * Pieces::padded(pieces.key_pairs()))),
        keys(pieces.pairs(pieces.key_pairs() * kRows)),
        queries(pieces.pairs(pieces.key_pairs() * kRows)),
        keys_by_token(pieces.token_pairs(pieces.desc().key_dim)),
        p_pairs(pieces.token_pairs(kRows)),
        y_pairs(pieces.token_pairs(pieces.desc().value_dim)),
        rest_pairs(pieces.token_pairs(pieces.desc().value_dim)),
        wide(pieces.keys()),
        v(pieces.values()),
        y(pieces.values()),
        o(pieces.values()),
        kk(pieces.matrix()),
        kq(pieces.matrix()),
        l(pieces.matrix()),
        p(pieces.matrix()),
        sum(pieces),
        decay(pieces.row()),
        beta(pieces.row()),
        k_factor(pieces.row()),
        q_factor(pieces.row()) {
    for (float*& s : state) s = pieces.state();
  }
  float* state[kShared];
  std::uint32_t* state_pairs;           // of neighbouring keys, for each value
  std::uint32_t* rows;                  // keys or queries as they are
  std::uint32_t *keys, *queries;        // of neighbouring keys, for each token
  std::uint32_t* keys_by_token;         // of neighbouring tokens, for each key
  std::uint32_t* p_pairs;               // of neighbouring tokens j, for each token i
  std::uint32_t *y_pairs, *rest_pairs;  // of neighbouring tokens, for each value
  float *wide, *v, *y, *o;
  float *kk, *kq, *l, *p;  // element i of row j belongs to tokens i >= j
  Sums sum;
  float *decay, *beta;
  float *k_factor, *q_factor;  // what the rows of keys and queries are to be multiplied by
};

// Gradients are named as in bittern/ops/gdn_chunk_backward.h.
struct BackwardScratch {
  explicit BackwardScratch(Pieces& pieces)
      : state(pieces.state()),
        grad(pieces.state()),
        grad_transposed(pieces.state()),
        keys_queries(pieces.keys(2)),
        gradients(pieces.values(2)),
        projected(pieces.keys(2)),
        transposed(pieces.transposed()),
        v(pieces.values()),
        z(pieces.keys()),
        dq(pieces.keys()),
        dk(pieces.keys()),
        qk(pieces.matrix()),
        e(pieces.matrix()),
        l(pieces.matrix()),
        p(pieces.matrix()),
        dl(pieces.matrix()),
        dp(pieces.matrix()),
        x(pieces.matrix()),
        w(pieces.matrix()),
        sum(pieces),
        decay(pieces.row()),
        rest(pieces.row()),
        beta(pieces.row()),
        b(pieces.row()),
        columns(pieces.row()),
        own(pieces.row()),
        before(pieces.row()),
        dbeta(pieces.row()),
        ones(pieces.row()),
        state_size(pieces.state_size()) {
    const GdnDesc& d = pieces.desc();
    const std::int64_t chunks = d.chunks(d.tokens);  // a sequence may have all the tokens
    states = pieces.take(chunks * state_size);
    kk = pieces.take(chunks * d.chunk * kRows);
    y = pieces.values(chunks);
    dq_sum = pieces.keys(chunks);
    dk_sum = pieces.keys(chunks);
    dg = pieces.take(chunks * d.chunk);
  }
  float *state, *grad, *grad_transposed;
  float* keys_queries;  // the queries right after the last key
  float* gradients;     // r, and d_o right after it
  float* projected;     // M and N: these times the state
  float *transposed, *v, *z, *dq, *dk;
  float *qk, *e, *l, *p, *dl, *dp, *x, *w;
  Sums sum;
  float *decay, *rest, *beta, *b, *columns, *own, *before, *dbeta, *ones;
  // Of every chunk of a head: the state before it, transposed, k k^T, y, and the sums over value
  // heads of dq and dk.
  std::int64_t state_size;
  float *states, *kk, *y, *dq_sum, *dk_sum, *dg;
};

struct GateSums {
  float a_log, dt_bias;
};

}  // namespace bittern::cpu::gdn
