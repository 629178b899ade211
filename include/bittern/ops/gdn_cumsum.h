// The log decay summed within each chunk:   sum[i] = sum[i-1] + g[i]   from 0 at the chunk's start,
// in f32, i ascending, as FLA has it. So e^(sum[i] - sum[j]) of the ops that follow has a relative
// error of up to i 2^-24 |sum[i]|: after one g of -1e4 up to 5e-4 a token. -infinity and NaN stay
// until the chunk's end, and make these NaN. gdn_chunk_forward has neither limit.
// With `gate`, g holds the projection a, and -exp(a_log) * softplus(a + dt_bias) takes its place:
// a_log and dt_bias are given per head, each operation is rounded once to f32, exp and softplus are
// core/math.h's, within 1 ulp.
#pragma once
#include "bittern/gdn_desc.h"

namespace bittern {

struct GdnCumsum {
  static constexpr std::string_view kName = "gdn_cumsum";
  static constexpr std::string_view kCategory = "gated_delta";
  static constexpr GdnFields kFields{.gate = true};

  using Desc = GdnDesc;
  struct Args {
    ConstView g;
    ConstView a_log{}, dt_bias{};  // with `gate`
    ConstView cu_seqlens{};
    MutView sum;
  };

  static Status check(const Desc& d) { return check_gdn_desc(kName, d); }
  static Status check_contents(const Desc& d, const Args& a) {
    return check_cu_seqlens(kName, d.rows(), a.cu_seqlens);
  }
  static PrecisionGuarantee contract(const Desc&) { return exact_guarantee(DType::f32); }
  static DType element(const Desc&) { return DType::f32; }
  static DType aux_element(const Desc&) { return DType::f32; }
  static std::int64_t elements(const Desc& d) { return d.gate_shape().numel(); }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    visit_gdn_fields<kFields>(d, f);
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("g", a.g, Operand{DType::f32, d.gate_shape()});
    f("a_log", a.a_log, d.gate_operand());
    f("dt_bias", a.dt_bias, d.gate_operand());
    f("cu_seqlens", a.cu_seqlens, d.sequence_operand());
    f("sum", a.sum, Operand{DType::f32, d.gate_shape()});
  }
};

}  // namespace bittern
