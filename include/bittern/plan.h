// descriptor -> select -> can_implement -> run. One template serves every op.
//
// An Op is a struct with
//   kName, kCategory          its name and family
//   Desc, Args                the problem and its tensors (ConstView: input, MutView: output)
//   check(desc)               whether the problem is valid, on any backend
//   contract(desc)            the guarantee that every `exact` kernel gives
//   element(desc), aux_element(desc)   the dtypes in its sku
//   fields(desc, f)           f(name, member, help) for each descriptor field
//   operands(desc, args, f)   f(name, view, Operand{dtype, axes, flags}) for each tensor
// and may have
//   check_contents(desc, args)  checks the values of an operand (a table is sorted, an index is in
//                               range); can_implement calls it last, on the CPU
//   shape_hint(desc, operand, found)  more words about a wrong shape, if the numbers alone do not
//                               explain it; otherwise ""
//   flops(desc)               for an op limited by matrix work: `bench` compares it with the GEMM
//   elements(desc)            how many elements `bench` counts, if not outer * axis * inner size
//   rows(desc)                the field that counts rows, if each row is computed separately: views
//                             whose rows are not at equal distances then run piece by piece
#pragma once
#include <cstddef>
#include <string_view>

#include "bittern/status.h"
#include "bittern/tensor.h"

namespace bittern {

struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

enum class Preference {
  exact,    // only kernels that meet the op's contract
  fastest,  // also kernels that declare a weaker bound
};

// What PrecisionGuarantee::error_bound is relative to.
enum class ErrorNorm {
  exact,  // nothing: results are those of the op's contract, and error_bound is 0
  // The magnitudes of the terms that an element is made of. A result differs from the contract's by
  // at most error_bound times their sum, which the op's header defines, and one ulp of an f16 or
  // bf16 output. For codes the header says what may differ.
  terms,
};
inline constexpr std::string_view kErrorNormNames[] = {"exact", "terms"};
inline std::string_view name(ErrorNorm norm) {
  return kErrorNormNames[static_cast<std::size_t>(norm)];
}

struct PrecisionGuarantee {
  DType math_precision = DType::f32;        // the type of each elementary operation
  DType accumulator = DType::f32;           // the type sums are kept in
  bool deterministic = true;                // the same bits on every run
  bool bit_stable_on_same_hardware = true;  // also for every thread count and vector width
  bool same_bits_on_all_backends = true;    // ref, every SIMD target and CUDA agree
  ErrorNorm error_norm = ErrorNorm::exact;
  double error_bound = 0;
  bool operator==(const PrecisionGuarantee&) const = default;
};

// Elementary operations in f32, or f64 when the element is f64; the same bits everywhere.
inline PrecisionGuarantee exact_guarantee(DType element) {
  const DType math = element == DType::f64 ? DType::f64 : DType::f32;
  return {.math_precision = math, .accumulator = math};
}

// What exactly was chosen.
struct Sku {
  std::string_view category;       // "quantization"
  std::string_view op;             // "quantize_per_group"
  DType element = DType::f32;      // of the floating-point operands
  DType aux_element = DType::f32;  // of the codes
  std::string_view architecture;   // "AVX3_DL", "sm_90", "any"
  std::string_view backend;        // "ref", "cpu", "cuda"
  std::string_view kernel;         // unique in its backend
};

struct Operand {
  enum Flags : unsigned {
    kOptional = 1,   // may be left out: null data (with a 0 in the shape: whole but empty)
    kRowStride = 2,  // the first axis may have any stride that keeps rows apart
    // An output that may be the same memory as an input with this flag and the same dtype, shape
    // and strides: element i of the output depends only on element i of that input.
    kInPlace = 4,
    kInOut = 8,  // an output that is read first: a state, a cache
    // Any strides, except that the elements of the last axis are neighbours. Strides of an input
    // may be 0; those of an output must keep its elements apart.
    kStrided = 16,
    // The first axis counts rows. A view may have several axes in its place: [batch, heads, tokens,
    // dim] for [rows, dim].
    kRowAxes = 32,
    kScattered = 256 | kStrided,  // any stride of the last axis too
    kExtra = 64,    // an optional output that few callers want: it is made only on request
    kUnread = 128,  // not read with this descriptor: it must be left out, or be empty
  };
  DType dtype;
  Axes shape;
  unsigned flags = 0;
  const char* read_with = "";  // for kUnread: the field that decides whether it is read

  // An operand that is read, and then required, only if a field says so.
  static Operand read_if(bool read, DType dtype, const Axes& shape, const char* with,
                         unsigned flags = 0) {
    return {dtype, shape, read ? flags : flags | kOptional | kUnread, with};
  }
};

template <class Op>
struct Kernel;

template <class Op>
class Plan {
 public:
  using Desc = typename Op::Desc;
  using Args = typename Op::Args;

  // Validates `desc` and takes the first kernel that supports it on `device`; if none does, the
  // status gives every kernel's reason. run() runs this kernel and no other. A kernel that needs
  // aligned operands refuses others in can_implement(), with the operand and the alignment. Kernels
  // that meet the contract take every address and stride that the op allows.
  // `kernel` narrows the choice to one name (so does the environment variable BITTERN_KERNEL, when
  // `kernel` is empty). Fails where a variable has a value that it cannot have
  // (bittern/environment.h). `threads` are those of a CPU plan, as set_num_threads takes
  // them; 0: num_threads() when it runs.
  static Result<Plan> select(const Desc& desc, Device device = {},
                             Preference preference = Preference::exact,
                             std::string_view kernel = {}, int threads = 0) noexcept;

  // Checks each operand's dtype, shape, device (for CUDA, where its memory is), strides, overlap,
  // and what this kernel needs besides. On CUDA the contents are not checked: the op's header says
  // what an index or a length that is out of range does.
  Status can_implement(const Args& args) const noexcept;

  // The caller owns scratch: at least this many bytes, 64-byte aligned, go to run(). Fixed by
  // select(): raising num_threads() later does not enlarge it.
  std::size_t workspace_bytes() const { return workspace_bytes_; }

  // The thread's floating-point modes (flush to zero, rounding) have no effect, and are restored.
  Status run(const Args& args, Stream stream = {}, Workspace workspace = {}) const noexcept;

  Sku sku() const noexcept;
  PrecisionGuarantee precision_guarantee() const noexcept;
  const Desc& desc() const { return desc_; }
  Device device() const { return device_; }
  int threads() const { return threads_; }  // as select() was given them

 private:
  Plan(const Desc& desc, Device device, const Kernel<Op>* kernel, int threads,
       std::size_t workspace_bytes)
      : desc_(desc),
        device_(device),
        kernel_(kernel),
        threads_(threads),
        workspace_bytes_(workspace_bytes) {}
  Desc desc_;
  Device device_;
  const Kernel<Op>* kernel_;
  int threads_;
  std::size_t workspace_bytes_;
};

}  // namespace bittern
