// New tokens into a compressed KV cache: the keys turned by RoPE, K and V encoded, each row written
// where its token's slot says. One launch for a layer.
//
//   x = rope(k[t,h])  or  v[t,h]        as the op rope gives it, rounded to `element`
//   with kept > 0: x is rounded to `exact`
//   a token t with kept_slots[t] = r >= 0:  the row that is coded is the one in kept row r;
//                                           then x is stored there
//   any other token:                        the row that is coded is x
//   slots[t] = n >= 0:                      the row is coded to page n / page_size, row
//                                           n % page_size; n < 0: no row of this token is coded
//
// So a ring of the newest tokens, kept as they are, needs nothing besides: the new token takes the
// place of the one that leaves, which is coded. Kept row r is row [r / kept, h, r % kept] of k_kept
// and v_kept. With kept = 0 there are no kept_slots.
//
// A row y is coded as aura_encode codes it (bittern/ops/aura_encode.h), with the rotation, the
// widths and the rule of its side, after its mean is subtracted, each operation in f32:
//
//   u_j = y_j - mean_j. If a finite y_j gives an infinite u_j, then u_j = y_j / 2 - mean_j / 2 for
//         the whole row, which keeps its direction
//   codes and s of u by aura_encode. s is limited to the largest finite f32; if u was halved,
//         s = 2 s, limited again; then s is limited and rounded to the scales' dtype
//
// RoPE is left out with rotary_dim = 0. positions, inverse_frequencies, factor and the pairs are
// those of bittern/ops/rope.h.
//
// A codec with one page of `capacity` tokens for each sequence is the contiguous layout of
// aura_attention: pages = sequences, page_size = capacity, slot s * capacity + n.
//
// Only the rows of the slots are written, all others stay. On the CPU a slot beyond the last row is
// an error, and so are two tokens with one slot. On CUDA the host does not read the slots: one that
// is too large is skipped, as a negative one is, and of two tokens with one slot either is written,
// or parts of both.
#pragma once
#include "bittern/aura_desc.h"

namespace bittern {

struct AuraAppendDesc {
  std::int64_t tokens = 0;
  std::int64_t kv_heads = 1;
  std::int64_t dim = 128;
  std::int64_t page_size = 64;
  std::int64_t pages = 0;
  std::int64_t sequences = 1;
  std::int64_t kept = 0;
  std::int64_t rotary_dim = 0;
  double factor = 1;
  bool interleaved = false;
  std::int32_t k_bits = 4;
  std::int32_t v_bits = 4;
  Rotation k_rotation = Rotation::hadamard;
  Rotation v_rotation = Rotation::hadamard;
  ScaleRule k_scale_rule = ScaleRule::matched;
  ScaleRule v_scale_rule = ScaleRule::matched;
  DType element = DType::f32;
  bool f16_scale = false;
  DType exact = DType::bf16;
  bool operator==(const AuraAppendDesc&) const = default;

  DType scale_element() const { return f16_scale ? DType::f16 : DType::f32; }
  Axes row_shape() const { return {{"tokens", tokens}, {"kv_heads", kv_heads}, {"dim", dim}}; }
  Axes packed_shape(std::int32_t bits) const {
    return {{"pages", pages},
            {"kv_heads", kv_heads},
            {"page_size", page_size},
            {"words", packed_words(dim, bits)}};
  }
  Axes scale_shape() const {
    return {{"pages", pages}, {"kv_heads", kv_heads}, {"page_size", page_size}};
  }
  Axes kept_shape() const {
    return {{"sequences", sequences}, {"kv_heads", kv_heads}, {"kept", kept}, {"dim", dim}};
  }
  Axes mean_shape() const { return {{"kv_heads", kv_heads}, {"dim", dim}}; }
  Axes frequency_shape() const { return {{"rotary_dim/2", rotary_dim / 2}}; }
  Axes codebook_shape(std::int32_t bits) const { return {{"2^bits", std::int64_t{1} << bits}}; }
  Axes boundary_shape(std::int32_t bits) const {
    return {{"2^bits-1", (std::int64_t{1} << bits) - 1}};
  }
  Axes rotation_shape(Rotation rotation) const {
    if (rotation == Rotation::dense) return {{"dim", dim}, {"dim", dim}};
    return {{"dim", rotation == Rotation::hadamard ? dim : 0}};
  }
  std::int64_t slots() const { return pages * page_size; }
};

struct AuraAppend {
  static constexpr std::string_view kName = "aura_append";
  static constexpr std::string_view kCategory = "kv_codec";

  using Desc = AuraAppendDesc;
  struct Args {
    ConstView k, v, slots;
    ConstView k_boundaries, v_boundaries, k_codebook, v_codebook;
    ConstView k_table{}, v_table{};  // of the rotations
    ConstView kept_slots{}, positions{}, inverse_frequencies{};
    ConstView k_mean{}, v_mean{};
    MutView k_packed, k_scales, v_packed, v_scales;
    MutView k_kept{}, v_kept{};
  };

  static Status check(const Desc& d) noexcept;
  static Status check_contents(const Desc& d, const Args& a) noexcept;
  static std::string shape_hint(const Desc& d, std::string_view operand,
                                const Shape& found) noexcept;
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc&) { return DType::u32; }
  static std::int64_t elements(const Desc& d) { return 2 * d.row_shape().numel(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    f("tokens", d.tokens, "number of new tokens");
    f("kv_heads", d.kv_heads, "heads of K and V");
    f("dim", d.dim, "length of a head's row, 2..1024");
    f("page_size", d.page_size, "tokens per page");
    f("pages", d.pages, "number of pages in the pool");
    f("sequences", d.sequences, "number of sequences that keep rows");
    f("kept", d.kept, "rows of a sequence that are kept as they are (0: none)");
    f("rotary_dim", d.rotary_dim,
      "elements of a head of K that are rotated, from its first on; even (0: none)");
    f("factor", d.factor, "multiplies cos and sin");
    f("interleaved", d.interleaved, "rotate pairs 2i and 2i + 1, not i and i + rotary_dim/2");
    f("k_bits", d.k_bits, "bits per code of K, 1..8");
    f("v_bits", d.v_bits, "bits per code of V, 1..8");
    f("k_rotation", d.k_rotation, "rotation of K (hadamard takes signs, dense a matrix)");
    f("v_rotation", d.v_rotation, "rotation of V (hadamard takes signs, dense a matrix)");
    f("k_scale_rule", d.k_scale_rule, "rule for the stored norm of K");
    f("v_scale_rule", d.v_scale_rule, "rule for the stored norm of V");
    f("element", d.element, "dtype of k and v: f32 f16 bf16");
    f("f16_scale", d.f16_scale, "store scales in f16 instead of f32");
    f("exact", d.exact, "dtype of rows that are kept as they are: f32 f16 bf16");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    constexpr unsigned kUpdated = Operand::kInOut | Operand::kRowStride;
    constexpr unsigned kMay = Operand::kOptional;
    const char* const kRotation = "a hadamard or dense rotation";
    // What a descriptor has no use for is empty, and must not be given.
    const auto used = [](DType dtype, const Axes& shape, const char* with, unsigned flags = 0) {
      return Operand::read_if(shape.numel() != 0, dtype, shape, with, flags);
    };
    const auto for_tokens = [&](bool read, const char* with) {
      return Operand::read_if(read, DType::s32, {{"tokens", d.tokens}}, with);
    };
    f("k", a.k, Operand{d.element, d.row_shape(), Operand::kScattered});
    f("v", a.v, Operand{d.element, d.row_shape(), Operand::kScattered});
    f("slots", a.slots, Operand{DType::s32, {{"tokens", d.tokens}}});
    f("k_boundaries", a.k_boundaries, Operand{DType::f32, d.boundary_shape(d.k_bits)});
    f("v_boundaries", a.v_boundaries, Operand{DType::f32, d.boundary_shape(d.v_bits)});
    f("k_codebook", a.k_codebook, Operand{DType::f32, d.codebook_shape(d.k_bits)});
    f("v_codebook", a.v_codebook, Operand{DType::f32, d.codebook_shape(d.v_bits)});
    f("k_table", a.k_table, used(DType::f32, d.rotation_shape(d.k_rotation), kRotation));
    f("v_table", a.v_table, used(DType::f32, d.rotation_shape(d.v_rotation), kRotation));
    f("kept_slots", a.kept_slots, for_tokens(d.kept > 0, "kept"));
    f("positions", a.positions, for_tokens(d.rotary_dim > 0, "rotary_dim"));
    f("inverse_frequencies", a.inverse_frequencies,
      used(DType::f32, d.frequency_shape(), "rotary_dim"));
    f("k_mean", a.k_mean, Operand{DType::f32, d.mean_shape(), kMay});
    f("v_mean", a.v_mean, Operand{DType::f32, d.mean_shape(), kMay});
    f("k_packed", a.k_packed, Operand{DType::u32, d.packed_shape(d.k_bits), kUpdated});
    f("k_scales", a.k_scales, Operand{d.scale_element(), d.scale_shape(), kUpdated});
    f("v_packed", a.v_packed, Operand{DType::u32, d.packed_shape(d.v_bits), kUpdated});
    f("v_scales", a.v_scales, Operand{d.scale_element(), d.scale_shape(), kUpdated});
    constexpr unsigned kKept = Operand::kInOut | Operand::kStrided;
    f("k_kept", a.k_kept, used(d.exact, d.kept_shape(), "kept", kKept));
    f("v_kept", a.v_kept, used(d.exact, d.kept_shape(), "kept", kKept));
  }
};

}  // namespace bittern
