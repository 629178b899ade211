// Attention over a compressed KV cache, computed on the codes: K and V are never decoded to memory.
//
//   out[s,i,h] = sum_t p_t v_t / l      p_t = exp(x_t - m)      l = sum_t p_t      m = max_t x_t
//   x_t = scale * q[s,i,h] . k_t        over the tokens t that query i sees
//
// With a softcap > 0 (Gemma 2), softcap * tanh(x_t / softcap) takes the place of x_t.
//
// A sequence's tokens are numbered 0, 1, ... through three regions, each of which may be empty:
//
//   first    lengths[s,0] tokens kept as they were, rows of k_first and v_first
//   coded    lengths[s,1] tokens as aura_encode leaves them: k_t = k_scale_t P_k^T c[code] + k_mean
//   recent   lengths[s,2] tokens kept as they were, rows of k_recent and v_recent
//
// Query head h reads KV head h / (heads / kv_heads). With n tokens in all, query i belongs to token
// n - queries + i. It sees every token up to that one (causal) or all tokens (not causal). With a
// window w > 0 it sees none that is w or more before it (except first tokens, if
// window_keeps_first). A query that sees no token gives zeros. sinks[h] is one more logit, whose
// value is a row of zeros.
//
// Centring: codes hold k - k_mean and v - v_mean. q . k_mean is the same for every coded token. If
// there are only coded tokens and no softcap it cancels, and k_mean may be left out. If k_mean is
// given, q . k_mean is added to the logits of coded tokens, so that they compare with sinks and
// with the other regions, which are not centred. v_mean is added in proportion to the coded tokens'
// share of l.
//
// The order of operations, all in f32, exp as in core/math.h:
//
//   a = q * scale        r = P_k a (bittern/aura_desc.h)        b = a . k_mean, or 0
//   coded:          x_t = fma(r . c, k_scale_t, b)    element j in accumulator (j / 8) mod 16
//   first, recent:  x_t = a . k_t                     element j in accumulator j mod 16; so in b
//
//   with a softcap: x_t = softcap * tanh(x_t / softcap)  tanh as in core/math.h; not for sinks
//
// where a dot has 16 accumulators, acc = fma(a_j, k_j, acc) from 0 with j ascending, which the
// halving tree adds. A region is cut into splits of 256 tokens from its first on. In each, over the
// tokens seen, in order:
//
//   m    the largest x_t that is not NaN, or -inf
//   p_t  = exp(x_t - m), or exp(x_t) where m = -inf
//   l    the n-th p_t seen goes to accumulator n mod 16 by acc + p_t; then the halving tree
//   o_j  = fma(w_t, y_tj, o_j) from 0: y the centroid and w_t = p_t * v_scale_t (coded), or
//        y = v_t and w_t = p_t
//
// Splits with a token seen are merged in order into a state of m, l, l_coded, o_coded, o_exact that
// starts at -inf, 0, 0, 0, 0 (with sinks at m = sinks[h], l = 1):
//
//   M = m_split > m ? m_split : m
//   f = exp(m - M), g = exp(m_split - M); if M = -inf, f = exp(m), g = exp(m_split)
//   l = fma(l_split, g, l * f); o and l_coded likewise. Those that the split does not add to are
//       multiplied by f
//
// Then u = P_v^T o_coded; if v_mean is given, u = fma(l_coded, v_mean, u); and
// out = (u + o_exact) / l, or 0 if l = 0. A row or scale that is not finite affects only the
// queries that see it.
//
// Kernel cpu_int8 (k_bits 4, Preference::fastest) computes as the exact one does where a KV head
// has 10 or more query rows (queries * heads / kv_heads). With fewer it takes r and c as 16-bit
// integers of full scale 32512, in two bytes each, and leaves out the product of the lower bytes.
// On AVX-512 and with v_bits 4 it also takes w and the centroids y of V as integers: y of full
// scale 2047, w in units of max(max|w| / 32767, sum|w| / 2^19) of its split. Its ErrorNorm is
// `terms`, and error_bound is e = 1 / 32512. For one query let h_t = p_t / l be its weights, S the
// number of splits with a token seen, R = max|r_j|, K = max|k_codebook| and Y = max|v_codebook|,
// each at least 2^-126. Then:
//
//   X_t  = (1 + S) (1 + max|x|) / 32. For a coded token add
//          |k_scale_t| (K sum|r_j| / 2 + R sum|c_tj| / 2 + (1.1 + dim / 4096) dim R K).
//          The logit x_t is off by at most e X_t.
//   L_j  = exp(2 e max X) sum h_t X_t |v_tj - out_j|, over the tokens and the sink: what the logits
//          do to out_j.
//   N    = 2^-100 + Y sum over the splits of coded tokens of (f + S / 16) Z, where Z is the split's
//          sum of h_t |v_scale_t|, and f = 2 + dim / 256. With v_bits 4, f = 16, and a split of n
//          tokens adds n (max(z / 2, Z / 32) + 2^-85), z its largest h_t |v_scale_t|.
//   A_j  = sum h_t |v_tj|, where |v_tj| of a coded token is |v_scale_t (P_v^T c)_j| + |v_mean_j|.
//   out_j is off by at most e (L_j + N sum_i |P_v|_ij + (1 + S / 16) A_j), and one ulp of an f16 or
//          bf16 element.
//
// Kernels cuda_tensor and cuda_wgmma (CUDA, Preference::fastest; dim 64, 80, 96, 128, 192 or 256,
// and 512 for cuda_tensor) take r, c, w and y in f16, each divided by a power of two, and add their
// products in f32.
// cuda_wgmma does the same with q, k_t, w and v_t of first and recent tokens. cuda_tensor (sm_90 or
// later, with the shared memory that the shape needs) has 1 query, at most 8 query heads to a KV
// head, k_bits / v_bits 2/2, 3/2, 3/3, 4/2, 4/3, 4/4, 8/4 or 8/8, capacity and page_size in
// multiples of 16, and first + recent <= 1024. cuda_wgmma (sm_90a) has more queries and no dense
// rotation. The bound is that of cpu_int8 with e = 1 / 1000, and first and recent tokens are
// treated like coded ones:
//
//   X_t  also has K_t sum|a_j| / 2 + A sum|k_tj| / 2 + (1.1 + dim / 4096) dim A K_t, where
//        A = max|a_j| and K_t = max|k_tj|
//   A_j  has |v_tj| + max_i|v_ti| / 4096
//
// For a row that sees a |v_scale| of 2^100 nothing is promised; nor, with cuda_wgmma, for one that
// sees two that are 2^112 apart (each counts as at least 2^-60, and a first or recent token with
// its largest |v|), or with k_mean that is not finite.
//
// If a query sees a NaN, its results are NaN wherever the contract's are. If it sees an infinity,
// or if R K dim, a logit, sum|w| of a split, exp(2 e max X) or another of these magnitudes reaches
// 2^127, nothing is promised for its row.
//
// Layout. Contiguous (page_size 0): slot n of KV head h is row [s * kv_heads + h, n] of codes and
// scales. Paged: row [block_table[s, n / page_size], h, n % page_size]. Coded token t has slot
// (starts[s,0] + t) mod capacity, recent token t slot (starts[s,1] + t) mod recent: both are rings.
// Without `starts` these are 0; without `lengths` every region is full.
//
// On the CPU a length, a start or a page that is out of range is an error. On CUDA the host does
// not read them. Kernels there limit each to its range: a wrong one causes no fault and no access
// outside the operands, but the values of the outputs are then not specified.
#pragma once
#include "bittern/aura_desc.h"

namespace bittern {

struct AuraAttentionDesc {
  std::int64_t sequences = 1;
  std::int64_t queries = 1;
  std::int64_t heads = 1;
  std::int64_t kv_heads = 1;
  std::int64_t dim = 128;
  std::int64_t capacity = 0;
  std::int64_t page_size = 0;
  std::int64_t pages = 0;
  std::int64_t first = 0;
  std::int64_t recent = 0;
  std::int32_t k_bits = 4;
  std::int32_t v_bits = 4;
  Rotation k_rotation = Rotation::hadamard;
  Rotation v_rotation = Rotation::hadamard;
  double scale = 0;
  double softcap = 0;
  std::int64_t window = 0;
  bool window_keeps_first = false;
  bool causal = true;
  DType element = DType::f32;
  bool f16_scale = false;
  DType exact = DType::bf16;
  bool operator==(const AuraAttentionDesc&) const = default;

  static constexpr std::int64_t kSplit = 256;  // tokens

  std::int64_t group() const { return heads / kv_heads; }  // query heads of a KV head
  DType scale_element() const { return f16_scale ? DType::f16 : DType::f32; }
  float softmax_scale() const noexcept;
  Axes query_shape() const {
    return {{"sequences", sequences}, {"queries", queries}, {"heads", heads}, {"dim", dim}};
  }
  Axes packed_shape(std::int32_t bits) const {
    const Axis words{"words", packed_words(dim, bits)};
    if (page_size == 0) return {row_axis(), {"capacity", capacity}, words};
    return {{"pages", pages}, {"kv_heads", kv_heads}, {"page_size", page_size}, words};
  }
  Axes scale_shape() const {
    if (page_size == 0) return {row_axis(), {"capacity", capacity}};
    return {{"pages", pages}, {"kv_heads", kv_heads}, {"page_size", page_size}};
  }
  Axes table_shape() const {
    return {{"sequences", sequences},
            {"capacity/page_size", page_size == 0 ? 0 : capacity / page_size}};
  }
  Axes first_shape() const { return {row_axis(), {"first", first}, {"dim", dim}}; }
  Axes recent_shape() const { return {row_axis(), {"recent", recent}, {"dim", dim}}; }
  Axes mean_shape() const { return {{"kv_heads", kv_heads}, {"dim", dim}}; }
  Axes codebook_shape(std::int32_t bits) const { return {{"2^bits", std::int64_t{1} << bits}}; }
  Axes rotation_shape(Rotation rotation) const {
    if (rotation == Rotation::dense) return {{"dim", dim}, {"dim", dim}};
    return {{"dim", rotation == Rotation::hadamard ? dim : 0}};
  }
  // A row for each KV head of each sequence.
  Axis row_axis() const { return {"sequences*kv_heads", sequences * kv_heads}; }
};

struct AuraAttention {
  static constexpr std::string_view kName = "aura_attention";
  static constexpr std::string_view kCategory = "kv_codec";
  static constexpr bool kBounded = true;  // has kernels with a bound: see Judge in oracle.h

  using Desc = AuraAttentionDesc;
  struct Args {
    ConstView q;
    ConstView k_packed, k_scales, v_packed, v_scales;
    ConstView k_codebook, v_codebook;
    ConstView k_table{}, v_table{};  // of the rotations
    ConstView block_table{}, lengths{}, starts{};
    ConstView k_first{}, v_first{}, k_recent{}, v_recent{};
    ConstView k_mean{}, v_mean{}, sinks{};
    MutView out;
  };

  static Status check(const Desc& d) noexcept;
  static Status check_contents(const Desc& d, const Args& a) noexcept;
  static std::string shape_hint(const Desc& d, std::string_view operand,
                                const Shape& found) noexcept;
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc&) { return DType::u32; }
  static std::int64_t elements(const Desc& d) {
    return 2 * d.sequences * d.kv_heads * (d.first + d.capacity + d.recent) * d.dim;
  }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    f("sequences", d.sequences, "number of sequences");
    f("queries", d.queries, "query tokens per sequence: its last ones");
    f("heads", d.heads, "number of query heads");
    f("kv_heads", d.kv_heads, "number of KV heads, a divisor of heads");
    f("dim", d.dim, "length of a head's row, 2..1024");
    f("capacity", d.capacity, "largest number of coded tokens of a sequence");
    f("page_size", d.page_size, "tokens per page, 16..128 (0: contiguous, no pages)");
    f("pages", d.pages, "number of pages in the pool");
    f("first", d.first, "largest number of first tokens, which are not coded");
    f("recent", d.recent, "largest number of recent tokens, which are not coded");
    f("k_bits", d.k_bits, "bits per code of K, 1..8");
    f("v_bits", d.v_bits, "bits per code of V, 1..8");
    f("k_rotation", d.k_rotation, "rotation of K (hadamard takes signs, dense a matrix)");
    f("v_rotation", d.v_rotation, "rotation of V (hadamard takes signs, dense a matrix)");
    f("scale", d.scale, "factor of the logits (0: 1 / sqrt(dim))");
    f("softcap", d.softcap, "bound of the logits: softcap * tanh(logit / softcap) (0: none)");
    f("window", d.window, "number of tokens that a query sees (0: all)");
    f("window_keeps_first", d.window_keeps_first,
      "let queries see the first tokens outside the window too");
    f("causal", d.causal, "hide the tokens after a query from it");
    f("element", d.element, "dtype of q and out: f32 f16 bf16");
    f("f16_scale", d.f16_scale, "store scales in f16 instead of f32");
    f("exact", d.exact, "dtype of first and recent tokens: f32 f16 bf16");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    constexpr unsigned kRow = Operand::kRowStride, kMay = Operand::kOptional;
    constexpr unsigned kRows = Operand::kStrided | Operand::kRowAxes;
    // What a descriptor has no use for is empty, and must not be given.
    const auto used = [](DType dtype, const Axes& shape, unsigned flags, const char* with) {
      return Operand::read_if(shape.numel() != 0, dtype, shape, with, flags);
    };
    const char* const kRotation = "a hadamard or dense rotation";
    f("q", a.q, Operand{d.element, d.query_shape(), Operand::kStrided});
    f("k_packed", a.k_packed, Operand{DType::u32, d.packed_shape(d.k_bits), kRow});
    f("k_scales", a.k_scales, Operand{d.scale_element(), d.scale_shape(), kRow});
    f("v_packed", a.v_packed, Operand{DType::u32, d.packed_shape(d.v_bits), kRow});
    f("v_scales", a.v_scales, Operand{d.scale_element(), d.scale_shape(), kRow});
    f("k_codebook", a.k_codebook, Operand{DType::f32, d.codebook_shape(d.k_bits)});
    f("v_codebook", a.v_codebook, Operand{DType::f32, d.codebook_shape(d.v_bits)});
    f("k_table", a.k_table, used(DType::f32, d.rotation_shape(d.k_rotation), 0, kRotation));
    f("v_table", a.v_table, used(DType::f32, d.rotation_shape(d.v_rotation), 0, kRotation));
    const unsigned paged = d.table_shape().numel() == 0 ? kRow | kMay : kRow;
    f("block_table", a.block_table, Operand{DType::s32, d.table_shape(), paged});
    f("lengths", a.lengths, Operand{DType::s32, {{"sequences", d.sequences}, {"3", 3}}, kMay});
    f("starts", a.starts, Operand{DType::s32, {{"sequences", d.sequences}, {"2", 2}}, kMay});
    f("k_first", a.k_first, used(d.exact, d.first_shape(), kRows, "first"));
    f("v_first", a.v_first, used(d.exact, d.first_shape(), kRows, "first"));
    f("k_recent", a.k_recent, used(d.exact, d.recent_shape(), kRows, "recent"));
    f("v_recent", a.v_recent, used(d.exact, d.recent_shape(), kRows, "recent"));
    f("k_mean", a.k_mean, Operand{DType::f32, d.mean_shape(), kMay});
    f("v_mean", a.v_mean, Operand{DType::f32, d.mean_shape(), kMay});
    f("sinks", a.sinks, Operand{DType::f32, {{"heads", d.heads}}, kMay});
    f("out", a.out, Operand{d.element, d.query_shape(), Operand::kStrided});
  }
};

}  // namespace bittern
