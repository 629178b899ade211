// Rows of x to codes and scales, by the row format of bittern/aura_desc.h. Everything in f32, each
// operation rounded.
//
//   1. norm = sqrt(dot(x, x));  inv = norm > 0 ? 1 / norm : 0. Unless 2^-100 <= dot(x, x) < 2^128,
//      steps 1 and 2 take x_j 2^-e for x_j, with 2^e <= largest |x_j| < 2^(e+1) but e at least -126
//      and at most 126; after them norm := the smaller of norm 2^e and the largest finite f32
//   2. r = P u, u_j = x_j * inv; a hadamard rotation takes inv and its own scale as one factor:
//      its first step is t_j = x_j * (sign_j * (inv * d^-1/2))
//   3. code_j = number of boundaries strictly below r_j (0 for a NaN)
//   4. codes are packed; the row's spare bits are zero
//   5. with c_j = codebook[code_j], C = sum of c_j c_j, D = dot(r, c) + 0:
//      matched         s = sqrt(C) > 1e-8f ? norm / sqrt(C) : norm     |x'| = |x|
//      none            s = norm
//      least_squares   s = sqrt(C) > 1e-8f ? norm * (D / C) : norm     least |x - x'|
//      unbiased        s = D > 1e-8f ? norm / D : norm                 <x, x'> = |x|^2
//      s is clamped to the largest finite values of the scales' dtype, of either sign, and rounded
//      to it.
//
//   dot   32 chains: sum[j % 32] = fma(a_j, b_j, sum[j % 32]), j ascending, each from +0; then the
//         halving tree (docs/numerics.md) of the 32
//   sum   of each eight neighbours s_0 .. s_7 (zeros past the row's end)
//         ((s_0 + s_1) + (s_2 + s_3)) + ((s_4 + s_5) + (s_6 + s_7)); then the halving tree of these
//
// The codes of a finite row depend only on its direction, however small or large the row is. s
// follows the norm within the range of the scales' dtype: it has fewer bits where it is subnormal,
// and is the largest finite value where the norm or s would exceed it. A row of zeros has the codes
// of 0, s = 0 and x' = 0. A row with a NaN or an infinity has codes 0 and s NaN, and decodes to
// NaN. No row affects another.
//
// With rotation dense, rule matched and f32 scales this is AURA's fused encode, except for rows of
// norm 1e-8 or less, to which AURA gives no direction, and rows whose squares overflow.
//
// Kernel cuda_tensor (dense rotations of 64 and 128, sm_90, Preference::fastest) computes r in
// another order, and s from its own r and codes. Its ErrorNorm is `terms`, and error_bound is
// e = 2 (dim + 8) 2^-24. With T_i = sum over j of (|P_ij| + 2^-16) (|u_j| + 2^-16):
//
//   code_i  is the code of some r' with |r' - r_i| <= e T_i. So it can differ from the contract's
//           only if r_i is that near to a boundary.
//   s       is off by at most e M, and one ulp of the scales' dtype, from what step 5 gives for the
//           codes that the kernel found. M = |s| (none, matched), 2 norm sum T_i |c_i| / C
//           (least_squares), 2 |s| sum T_i |c_i| / D (unbiased). If D is within
//           2 e sum T_i |c_i| of 0 or of 1e-8, nothing is promised for s (unbiased).
//
// A row with a NaN or an infinity has codes 0 and s NaN here too.
//
// boundaries must be finite and never decrease; the codebook must be finite, and ascending where
// the codes are to be the nearest levels. A dense matrix is not checked.
#pragma once
#include "bittern/aura_desc.h"

namespace bittern {

struct AuraEncode {
  static constexpr std::string_view kName = "aura_encode";
  static constexpr std::string_view kCategory = "kv_codec";
  static constexpr bool kBounded = true;  // has kernels with a bound: see Judge in oracle.h
  static constexpr AuraFields kFields{.codes = true, .scale_rule = true};

  using Desc = AuraDesc;
  struct Args {
    ConstView x;
    ConstView table{};  // not for identity
    ConstView boundaries, codebook;
    MutView packed, scales;
  };

  static std::int64_t& rows(Desc& d) { return d.rows; }
  static std::int64_t elements(const Desc& d) { return d.tensor_shape().numel(); }
  static Status check(const Desc& d) { return check_aura_desc(kName, d); }
  static std::string shape_hint(const Desc& d, std::string_view operand, const Shape& found) {
    if (operand == "table") return rotation_hint(operand, d.rotation, found);
    return width_hint(operand, d.dim, d.bits, found);
  }
  static Status check_contents(const Desc& d, const Args& a) {
    BITTERN_TRY(check_rotation(kName, d, a.table));
    BITTERN_TRY(check_boundaries(kName, "boundaries", a.boundaries.as<float>(), d.levels() - 1));
    return check_codebook(kName, "codebook", a.codebook.as<float>(), d.levels());
  }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc&) { return DType::u32; }
  static double flops(const Desc& d) { return d.rotation_flops(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_aura_fields<kFields>(d, f);
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("x", a.x, Operand{d.element, d.tensor_shape(), kAuraRows});
    visit_rotation(d, a, f);
    f("boundaries", a.boundaries, Operand{DType::f32, {{"2^bits-1", d.levels() - 1}}});
    f("codebook", a.codebook, Operand{DType::f32, {{"2^bits", d.levels()}}});
    f("packed", a.packed, Operand{DType::u32, d.packed_shape(), kAuraRows});
    f("scales", a.scales, Operand{d.scale_element(), d.scale_shape(), kAuraRows});
    visit_unread_rotation(d, a, f);
  }
};

}  // namespace bittern
