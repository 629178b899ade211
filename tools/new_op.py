#!/usr/bin/env python3
"""new_op.py FAMILY OP [--root ROOT]: writes the six files of a new op and adds its two lines.

They compile and link; the op's tests fail until the places that say `fill in` are filled in."""
import argparse
import pathlib
import re
import sys

HEADER = '''\
// fill in: y = the formula, with its rounding, ties, clamps, NaN, infinities and empty input
#pragma once
#include "bittern/plan.h"

namespace bittern {

// fill in: sizes, dtypes and choices
struct @Op@Desc {
  std::int64_t outer_size = 0;
  std::int64_t axis_size = 0;
  DType element = DType::f32;
  bool operator==(const @Op@Desc&) const = default;
  Axes shape() const { return {{"outer_size", outer_size}, {"axis_size", axis_size}}; }
};

struct @Op@ {
  static constexpr std::string_view kName = "@op@";
  static constexpr std::string_view kCategory = "new";  // fill in: the family

  using Desc = @Op@Desc;
  struct Args {  // fill in: the tensors
    ConstView x;
    MutView y;
  };

  // fill in: the fields' limits: sizes >= 0, their product countable, the dtypes offered
  static Status check(const Desc&) { return unsupported("@op@: check() is not written"); }
  static PrecisionGuarantee contract(const Desc& d) { return exact_guarantee(d.element); }
  static DType element(const Desc& d) { return d.element; }
  static DType aux_element(const Desc& d) { return d.element; }

  template <class D, class F>
  static void fields(D& d, F&& f) {
    f("outer_size", d.outer_size, "rows");
    f("axis_size", d.axis_size, "length of a row");
    f("element", d.element, "dtype of x and y");
  }
  template <class A, class F>
  static void operands(const Desc& d, A& a, F&& f) {
    f("x", a.x, Operand{d.element, d.shape(), Operand::kRowStride | Operand::kInPlace});
    f("y", a.y, Operand{d.element, d.shape(), Operand::kRowStride | Operand::kInPlace});
  }
};

}  // namespace bittern
'''

REF = '''\
#include "bittern/ops/@op@.h"
#include "core/numerics.h"
#include "plan/kernel.h"

namespace bittern {
namespace {

using Op = @Op@;

// fill in: the header's formula, plain enough to be checked by eye
Status run(const Op::Desc&, const Op::Args&, Stream, Workspace) {
  return unsupported("@op@: ref is not written");
}

constexpr Kernel<Op> kKernels[] = {{.name = "ref", .backend = "ref", .run = run}};

}  // namespace

std::span<const Kernel<@Op@>> @op@_ref() { return kKernels; }

}  // namespace bittern
'''

CPU = '''\
#include "bittern/ops/@op@.h"
#include "core/numerics.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/@family@/@op@/@op@_cpu.cc"
#include "hwy/foreach_target.h"
// after foreach_target.h
#include "cpu/simd-inl.h"

#if BITTERN_SIMD
HWY_BEFORE_NAMESPACE();
namespace bittern {
namespace HWY_NAMESPACE {
namespace {

using Op = @Op@;

// fill in: rows [begin, end)
void Run@Op@(const Op::Desc&, const Op::Args&, std::int64_t, std::int64_t) {}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace bittern
HWY_AFTER_NAMESPACE();
#endif  // BITTERN_SIMD

#if HWY_ONCE
namespace bittern {
namespace {

using Op = @Op@;
BITTERN_EXPORT(Run@Op@);

Status run(const Op::Desc& d, const Op::Args& a, Stream, Workspace) {
  cpu::parallel(d.outer_size, 1, [&](std::int64_t begin, std::int64_t end) {
    BITTERN_CALL(Run@Op@)(d, a, begin, end);
  });
  return {};
}

constexpr Kernel<Op> kKernels[] = {cpu::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<@Op@>> @op@_cpu() { return kKernels; }

}  // namespace bittern
#endif  // HWY_ONCE
'''

CUDA = '''\
#include "bittern/ops/@op@.h"
#include "cuda/runtime.cuh"

namespace bittern {
namespace {

using Op = @Op@;

// fill in: cuda::launch(Op::kName, kernel, cuda::grid_for(items), a.y.device.index, stream, ...)
Status run(const Op::Desc&, const Op::Args&, Stream, Workspace) {
  return unsupported("@op@: cuda is not written");
}

constexpr Kernel<Op> kKernels[] = {cuda::exact_kernel<Op>(run)};

}  // namespace

std::span<const Kernel<@Op@>> @op@_cuda() { return kKernels; }

}  // namespace bittern
'''

CASES = '''\
#include "oracle/aim.h"

namespace bittern::oracle {

// fill in: every dtype, and sizes that leave one-element vector tails
std::vector<@Op@Desc> @op@_check_cases() {
  return {{.outer_size = 3, .axis_size = 65}};
}

// fill in: what to measure
std::vector<BenchCase<@Op@Desc>> @op@_bench_cases() {
  return {{"f32", {.outer_size = 8192, .axis_size = 4096}}};
}

// fill in: inputs within 2 ulp of every decision the formula makes
void @op@_aim(const @Op@Desc&, const @Op@::Args&, Rng&) {}

}  // namespace bittern::oracle
'''

TEST = '''\
#include <gtest/gtest.h>

#include "oracle/oracle_test.h"

namespace bittern {
namespace {

TEST(@Op@, MatchesRefEverywhere) { oracle::expect_parity("@op@"); }

TEST(@Op@, MatchesAnExampleWorkedByHand) { FAIL() << "fill in: an example"; }

TEST(@Op@, RefusesWhatItCannotDo) { FAIL() << "fill in: every error's code and message"; }

}  // namespace
}  // namespace bittern
'''


def check_name(name):
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        sys.exit(f"new_op: {name}: expected lower_snake_case")


def insert(file, line, before, after=""):
    """Adds a line to a file, after the last line that starts with `after`, or before `before`."""
    lines = file.read_text().splitlines()
    same = [i for i, text in enumerate(lines) if after and text.startswith(after)]
    at = same[-1] + 1 if same else lines.index(before)
    lines.insert(at, line)
    if after:  # in alphabetical order
        lines[same[0]:at + 1] = sorted(lines[same[0]:at + 1])
    file.write_text("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", help="a folder of src/ops, or a new one")
    parser.add_argument("op", help="in lower_snake_case")
    parser.add_argument("--root", type=pathlib.Path,
                        default=pathlib.Path(__file__).resolve().parent.parent)
    args = parser.parse_args()
    check_name(args.family)
    check_name(args.op)
    name = "".join(word.capitalize() for word in args.op.split("_"))
    folder = args.root / "src/ops" / args.family / args.op
    files = {args.root / f"include/bittern/ops/{args.op}.h": HEADER,
             folder / f"{args.op}_ref.cc": REF, folder / f"{args.op}_cpu.cc": CPU,
             folder / f"{args.op}_cuda.cu": CUDA, folder / f"{args.op}_cases.cc": CASES,
             folder / f"{args.op}_test.cc": TEST}
    if taken := [str(file) for file in files if file.exists()]:
        sys.exit(f"new_op: {taken[0]}: exists")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        text = text.replace("@family@", args.family).replace("@Op@", name).replace("@op@", args.op)
        file.write_text(text)
        print(f"wrote {file.relative_to(args.root)}")
    lines = {"include/bittern/bittern.h":
                 (f'#include "bittern/ops/{args.op}.h"', "", '#include "bittern/ops/'),
             "src/ops/ops.inc":
                 (f"BITTERN_OP({name + ',':<31} {args.op + ',':<34} 1,  1)", "#undef BITTERN_OP")}
    for path, line in lines.items():
        insert(args.root / path, *line)
        print(f"added {path}: {line[0]}")


main()
