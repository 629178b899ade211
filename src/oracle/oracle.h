// One parity check for every op and kernel: fill the operands the op declares, aim them at its
// decision boundaries, run `ref`, run each candidate into poisoned outputs with canaries around
// them, and compare bits; or, of a kernel that declares a bound, judge each element by that bound.
// `bittern check`, the tests and the fuzzer all run this.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/numerics.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "cuda/plugin.h"
#include "plan/fields.h"
#include "plan/kernels.h"

namespace bittern::oracle {

class Rng {  // one call per expression: compilers differ in which of two operands comes first
 public:
  explicit Rng(std::uint64_t seed) : engine_(seed * 0x9E3779B97F4A7C15u + 1) {}
  std::uint64_t next() { return engine_(); }
  // Uniform in [0, n).
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(n));
  }
  bool chance(int one_in) { return below(one_in) == 0; }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  double normal() {  // the sum of twelve uniforms is close enough, and equal on every library
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }
  // Mostly ordinary values, sometimes an awkward one: zeros, ties, denormals, huge, NaN,
  // infinities.
  double awkward();

 private:
  std::mt19937_64 engine_;
};

// Inputs may be written here: the problem owns their memory.
template <class T>
T* data(const ConstView& v) {
  return const_cast<T*>(v.as<T>());
}
// Element `index` of any dtype, counted densely, through the strides.
void put(const ConstView& v, std::int64_t index, double value);
double get(const ConstView& v, std::int64_t index);
// The next representable value of the dtype, `steps` times up (or down, when negative).
double step(DType dtype, double value, int steps);

// ---- kernels that are weaker than their op's contract ----

// Told of every element of a kernel's outputs by the op's <op>_judge, with the unit that the bound
// is relative to (ErrorNorm): of `terms`, the sum of magnitudes that the op's header defines. A
// unit that is NaN says that the element is made of something that is not finite: it must then be
// NaN where ref's is, and the same infinity. An infinite unit: nothing is promised of this element.
class Judge {
 public:
  explicit Judge(double bound) : bound_(bound) {}
  // Element `index` of a floating-point output, against ref's. Half types may be an ulp off.
  void value(std::string_view operand, const ConstView& got, const ConstView& want,
             std::int64_t index, double unit);
  // Anything else: `error` may be bound * unit + slack.
  void distance(std::string_view operand, std::int64_t index, double got, double want, double error,
                double unit, double slack = 0);
  void fail(std::string_view operand, std::int64_t index, const std::string& what);
  double bound() const { return bound_; }
  double worst() const { return worst_; }  // the largest share of what an element may be off by
  const std::string& failure() const { return failure_; }  // the first; "" if there is none

 private:
  double bound_, worst_ = 0;
  std::string failure_;
};

// ---- supplied by each op's <op>_cases.cc ----

// What a case's speed on the CPU is compared with.
enum class BenchLimit {
  usual,  // the copy, or for an op with flops() the GEMM of its dtype
  read,   // reading alone; calls take turns with several sets of operands, so that all come from
          // memory
  f32,    // the f32 multiply-adds that the CPU does at best
  bf16,   // those of bf16, or of f32 on a CPU that has none
  int8,   // those of bytes
};

template <class Desc>
struct BenchCase {
  std::string label;  // "f32->s8 group 128"
  Desc desc;
  // Called for each operand that is read, after it was filled with random values. Some operands
  // need others: an index, a sorted table, a gate.
  void (*fill)(const Desc& desc, std::string_view operand, const ConstView& view,
               Rng& rng) = nullptr;
  const char* left_out = "";  // optional operands, separated by spaces
  Preference preference = Preference::exact;
  bool gpu_only = false;  // of a GPU's size: not run on the CPU
  BenchLimit limit = BenchLimit::usual;
};

#define BITTERN_OP(T, f, CPU, CUDA)                  \
  std::vector<T::Desc> f##_check_cases();            \
  std::vector<BenchCase<T::Desc>> f##_bench_cases(); \
  void f##_aim(const T::Desc& desc, const T::Args& args, Rng& rng);
#include "ops/ops.inc"

// Of ops with T::kBounded: further descriptors, for kernels that no check case is for (those of a
// CUDA device only where there is one), and what judges them. The inputs of `got` and `want` are
// the same.
#define BITTERN_OP(T, f, CPU, CUDA)                     \
  std::vector<T::Desc> f##_bounded_cases(bool on_cuda); \
  void f##_judge(const T::Desc& desc, const T::Args& got, const T::Args& want, Judge& judge);
#include "ops/ops.inc"

template <class Op>
inline constexpr bool kBounded = requires { Op::kBounded; };

template <class Op>
struct Cases;
#define BITTERN_OP(T, f, CPU, CUDA)                                                          \
  template <>                                                                                \
  struct Cases<T> {                                                                          \
    static std::vector<T::Desc> check() { return f##_check_cases(); }                        \
    static std::vector<BenchCase<T::Desc>> bench() { return f##_bench_cases(); }             \
    static void aim(const T::Desc& d, const T::Args& a, Rng& rng) { f##_aim(d, a, rng); }    \
    static std::vector<T::Desc> bounded(bool on_cuda) {                                      \
      if constexpr (kBounded<T>) return f##_bounded_cases(on_cuda);                          \
      return {};                                                                             \
    }                                                                                        \
    static void judge(const T::Desc& d, const T::Args& got, const T::Args& want, Judge& j) { \
      if constexpr (kBounded<T>) f##_judge(d, got, want, j);                                 \
    }                                                                                        \
  };
#include "ops/ops.inc"

// ---- problems ----

inline constexpr std::size_t kCanary = 128;
inline constexpr std::byte kPoison{0xA5};
inline constexpr std::byte kOtherPoison{0x5A};

struct Store {
  std::string name;
  Operand expected;
  bool output = false;
  bool present = true;
  Shape shape, stride;     // of the view: as expected, or with several axes for the first
  std::size_t offset = 0;  // of the first element in `bytes`
  std::vector<std::byte> bytes;
};

// How operands are laid out in memory; derived from a seed, so that every layout occurs.
struct Layout {
  bool padded_rows = false;  // row strides beyond the row, where the operand allows them
  bool unaligned = false;    // addresses that are multiples of only the element size
  int left_out = 0;          // a mask over the optional operands
  int in_place = -1;         // which (input, output) pair shares memory, -1: none
  int axis_order = 0;        // the order of the axes where any strides are allowed; 0: usual
};

template <class Op>
struct Problem {
  typename Op::Desc desc;
  std::vector<Store> stores;
  typename Op::Args args;
  std::string shared_input;  // the input an in-place run overwrites
};

// Allocates and fills a problem. The same seed gives the same values whatever the layout.
template <class Op>
Problem<Op> make_problem(const typename Op::Desc& desc, std::uint64_t seed, const Layout& layout,
                         bool aim = true);

// What was seen of one kernel.
struct KernelReport {
  std::int64_t compared = 0;  // runs
  std::int64_t refused = 0;   // layouts that it does not take
  bool bounded = false;       // it declares a bound
  double worst = 0;           // and this much of it was used
  std::string why_not;        // when it supports no descriptor that was tried: its last reason
};

struct Report {
  std::int64_t compared = 0;          // kernel runs compared with ref
  std::int64_t compared_cuda = 0;     // of these, on a CUDA device
  std::vector<std::string> failures;  // each one line, with its reproducer
  std::map<std::string, KernelReport> kernels;
  void add(const Report& other) {
    compared += other.compared;
    compared_cuda += other.compared_cuda;
    failures.insert(failures.end(), other.failures.begin(), other.failures.end());
    for (const auto& [name, k] : other.kernels) {
      KernelReport& mine = kernels[name];
      mine.compared += k.compared;
      mine.refused += k.refused;
      mine.bounded = mine.bounded || k.bounded;
      mine.worst = std::max(mine.worst, k.worst);
      if (!k.why_not.empty()) mine.why_not = k.why_not;
    }
  }
};

struct Settings {
  bool cpu = true;
  bool cuda = true;  // where a device is
  int cuda_index = 0;
  std::vector<int> threads = {1, 2, 7};
  std::uint64_t seed = 1;
  std::size_t max_failures = 20;
  // check_op alone: every n-th case, and a call before each.
  std::size_t every = 1;
  std::function<void(std::size_t done, std::size_t total)> progress = {};
};

// Compares `candidate` (or, when null, every kernel this machine can run) with ref on one
// descriptor, over the layouts that apply. `candidate` lets the oracle's own test feed it wrong
// kernels.
template <class Op>
Report parity(const typename Op::Desc& desc, const Settings& settings,
              const Kernel<Op>* candidate = nullptr);

// All of an op's check cases and bounded cases; an op's name or "" for all ops.
Report check_op(std::string_view op, const Settings& settings);
// One descriptor of one op, given as field=value pairs.
Result<Report> check_flags(std::string_view op,
                           const std::vector<std::pair<std::string, std::string>>& fields,
                           const Settings& settings);

}  // namespace bittern::oracle
