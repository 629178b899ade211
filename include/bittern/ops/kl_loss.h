// KL(teacher || student) of rows of logits, and its gradient:
//
//   c_j = x_j, or softcap * tanh(x_j / softcap) with softcap > 0      the student's logits
//   b_j = (c_j - max c) / temperature      F_j = exp(b_j)      q_j = F_j / sum F
//
// With top = 0 the teacher gives all its logits, before softmax, with its own soft cap applied:
//
//   a_j = (teacher_j - max teacher) / temperature      E_j = exp(a_j)      p_j = E_j / sum E
//   KL = (sum of E_j (a_j - b_j)) / sum E + (log sum F - log sum E)
//   slope_j = F_j / sum F - E_j / sum E
//
// With top > 0 it gives, at this temperature, log probabilities of some tokens (`ids`, all
// different, in any order) and of all others together (`tail`; -infinity: there are none).
// Q is what the student gives to the others, G_j = exp((c_j - t) / temperature) with t the largest
// c_j among them (max c where all of them are -infinity, or none is left), R = sum of G over them:
//
//   p_i = exp(log_probs_i)      P = exp(tail)      S = sum of p + P, 1 but for roundings
//   r = (t - max c) / temperature      L = exp(r) R + sum over the top of F
//   KL = (sum of p_i (log_probs_i - (b_i - log L)) + P (tail - (r + log R - log L))) / S - log S
//   slope_i = F_i / L - p_i / S in the top      slope_j = G_j (exp(r) / L - P / (S R)) elsewhere
//
//   loss  = weight * KL
//   d_x_j = (weight / temperature) * slope_j * (softcap - c_j)(softcap + c_j) / softcap^2
//
// the last factor with softcap alone. c_j is f32, each operation rounded once; tanh is
// core/math.h's and softcap is rounded to f32. Everything else is in f64, each operation rounded
// once, and exp is exp64 of core/math.h, log core/exp_log.h's; quotients by temperature, sums, S
// and softcap^2 are products with the reciprocal. loss and d_x are rounded to f32 once, at the end.
// Sums over the vocabulary: the elements of a block of 4096 go to 16 chains, element j to chain j
// mod 16, which the halving tree adds; the blocks are added in order. Sums over the top go in
// order, and end with P's term.
//
// So KL is that of two distributions, whatever the roundings of the logits: equal logits give 0,
// and it is not below 0 by more than roundings of f64. A p or E that is 0 counts as 0, whatever it
// is multiplied by. The loss is +infinity where q is 0 but p is not (Q and P alike; slopes of the
// others are then 0). A row whose c_j or teacher_j hold NaN or +infinity, or nothing but -infinity,
// gives NaN, and so do log probabilities that are NaN or all -infinity.
//
// A row of weight 0 has loss 0 and gradient 0 and is not read, ids included. d_x may be the memory
// of x.
#pragma once
#include "bittern/layers_desc.h"

namespace bittern {

struct KlLoss {
  static constexpr std::string_view kName = "kl_loss";
  static constexpr std::string_view kCategory = "layers";

  using Desc = KlLossDesc;
  struct Args {
    ConstView x;
    ConstView teacher{}, ids{}, log_probs{}, tail{}, weights{};
    MutView loss{}, d_x{};
  };

  static Status check(const Desc& d) { return check_kl_loss_desc(kName, d); }
  // Ids are 0 .. dim - 1, and a row has none twice.
  static Status check_contents(const Desc& d, const Args& a) noexcept;
  static PrecisionGuarantee contract(const Desc&) {
    return {.math_precision = DType::f64, .accumulator = DType::f64};
  }
  static DType element(const Desc&) { return DType::f32; }
  static DType aux_element(const Desc&) { return DType::s32; }
  static std::int64_t elements(const Desc& d) { return d.shape().numel(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    f("rows", d.rows, "number of rows");
    f("dim", d.dim, "length of a row: the vocabulary");
    f("top", d.top, "tokens that the teacher gives; 0: all, as logits");
    f("softcap", d.softcap, "limit that tanh bends the student's logits to; 0: none");
    f("temperature", d.temperature, "divides the logits");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    constexpr unsigned kByRow = Operand::kRowStride;
    const bool some = d.top > 0;
    f("x", a.x, Operand{DType::f32, d.shape(), kByRow | Operand::kInPlace});
    f("teacher", a.teacher, Operand::read_if(!some, DType::f32, d.shape(), "top 0", kByRow));
    f("ids", a.ids, Operand::read_if(some, DType::s32, d.top_shape(), "top", kByRow));
    f("log_probs", a.log_probs, Operand::read_if(some, DType::f32, d.top_shape(), "top", kByRow));
    f("tail", a.tail, Operand::read_if(some, DType::f32, d.row_shape(), "top"));
    f("weights", a.weights, Operand{DType::f32, d.row_shape(), Operand::kOptional});
    f("loss", a.loss, Operand{DType::f32, d.row_shape(), Operand::kOptional});
    f("d_x", a.d_x,
      Operand{DType::f32, d.shape(), kByRow | Operand::kOptional | Operand::kInPlace});
  }
};

}  // namespace bittern
