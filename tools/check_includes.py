#!/usr/bin/env python3
"""check_includes.py [ROOT]: who may include whom. Prints FILE:LINE for each breach and exits 1.

The layers, top to bottom; a file includes its own layer and what its row names, nothing else:
    cli, python, examples -> distill -> eval, report -> model, text -> convert -> formats, codec -> include/bittern
    include/bittern <- plan <- core.
An op sees its own header and its family (src/ops/FAMILY/*), never another op or family; what two
families need is a generic layer (core, cpu, cuda, oracle), and those see no family.
"""
import fnmatch
import pathlib
import re
import sys

CORE = ["bittern/*", "core/*"]
KERNEL = CORE + ["plan/kernel.h", "cpu/*", "hwy/*", "*intrin.h"]
ORACLE = CORE + ["plan/*", "cpu/*", "cuda/plugin.h", "ops/ops.inc", "oracle/*"]
CUDA = ["cuda*", "cub/*", "cutlass/*", "cublas*", "nv*"]
JSON = ["nlohmann/*"]
POSIX = ["dirent.h", "fcntl.h", "sched.h", "sys/*.h", "unistd.h"]
FILES = CORE + ["formats/*", "codec/*"]
MODEL = FILES + ["plan/*", "cpu/parallel.h", "convert/*", "model/*", "text/*"] + JSON + POSIX

# The first pattern that fits a file says what it may include, beside the standard library.
LAYERS = [
    ("include/bittern/*", ["bittern/*"]),
    ("src/core/*_test.cc", ORACLE + ["gtest/*"]),
    ("src/core/*", CORE),
    ("src/plan/*_test.cc", ORACLE + ["gtest/*"]),
    ("src/plan/*", CORE + ["plan/*", "ops/ops.inc", "cuda/plugin.h"]),
    ("src/cuda/*_test.cc", ORACLE + ["gtest/*", "dlfcn.h"]),
    ("src/cuda/*", CORE + ["plan/kernel*.h", "cuda/*", "ops/ops.inc", "dlfcn.h"] + CUDA),
    ("src/ops/*_test.*", ORACLE + ["gtest/*"]),
    ("src/ops/*_cases.cc", ORACLE),
    ("src/ops/*_aims.*", ORACLE),
    ("src/ops/*.cu*", CORE + ["plan/kernel.h", "cuda/*"] + CUDA),
    ("src/ops/*", KERNEL),
    ("src/oracle/*", ORACLE + ["gtest/*"]),
    ("src/formats/test_*.h", CORE + ["formats/*", "gtest/*"]),
    ("src/formats/*_test.*", ORACLE + ["formats/*", "gtest/*"] + JSON + POSIX),
    ("src/formats/*", CORE + ["formats/*"] + JSON + POSIX),
    ("src/convert/*_test.*", ORACLE + ["formats/*", "convert/*", "gtest/*"] + JSON + POSIX),
    ("src/convert/*", CORE + ["cpu/parallel.h", "formats/*", "convert/*", "re2/re2.h"] + JSON + POSIX),
    ("src/cpu/*_test.cc", ORACLE + ["gtest/*", "hwy/*"]),
    ("src/cpu/*", CORE + ["cpu/*", "plan/kernel.h", "hwy/*", "*intrin.h", "cpuid.h", "omp.h", "pthread.h", "sched.h"]),
    ("src/codec/*_test.cc", ORACLE + ["codec/*", "ops/aura/*", "gtest/*"]),
    ("src/codec/*", CORE + ["codec/*", "plan/memory.h", "plan/overlap.h"]),
    ("src/model/*_test.cc", MODEL + ["gtest/*"]),
    ("src/model/*", MODEL),
    ("src/eval/*_test.cc", MODEL + ["eval/*", "cpu/*", "gtest/*"]),
    ("src/eval/*_cpu.cc", KERNEL + ["eval/*"]),
    ("src/eval/*", MODEL + ["eval/*"]),
    ("src/text/*_test.*", FILES + ["convert/*", "text/*", "gtest/*"] + JSON),
    ("src/text/*", CORE + ["formats/*", "convert/*", "text/*", "pcre2.h", "utf8proc.h"]),
    ("src/distill/*_test.cc", MODEL + ["eval/*", "distill/*", "cpu/*", "gtest/*"]),
    ("src/distill/*_cpu.cc", KERNEL + ["distill/*"]),
    ("src/distill/*", MODEL + ["eval/*", "distill/*", "cpu/bf16.h"]),
    ("src/report/*_test.cc", CORE + ["report/*", "gtest/*"]),
    ("src/report/*", CORE + ["report/*", "text/utf8.h"]),
    ("src/c/*", ["bittern/*", "c/*", "core/guarded.h", "plan/any_op.h", "plan/fields.h", "plan/names.h"]),
    ("tests/emulation/*", ["bittern/*", "emulation.h", "sys/mman.h"] + CUDA),
    ("examples/*", ["bittern/*", "CLI/*", "fmt/*"]),
    ("*", ["*"]),  # the command, Python, tests, benchmarks: all but CUDA
]
STANDARD = re.compile(r"[a-z_]+$|(std\w+|string|errno|assert|math)\.h$")
# Layers that know no family; but GGUF's blocks, which files and products need too, are one of them.
GENERIC = ["src/core/*", "src/cpu/*", "src/cuda/*.cuh", "src/oracle/aim*"]
SEES_FAMILIES = ["src/core/blocks.h"]
INCLUDE = re.compile(r'\s*#\s*include\s*[<"]([^>"]+)[>"]')


# Public descriptors that are not named after their family.
DESCRIPTORS = {"conv": "layers", "norm": "layers"}


FAMILY = {}  # of each op


def family_of(header):
    """The family that a header belongs to, and its op if it is one's own; None, None: no family's."""
    if match := re.match(r"ops/(\w+)/(?:(\w+)/)?", header):
        return match[1], match[2]
    if match := re.match(r"bittern/ops/(\w+)\.h", header):
        return FAMILY.get(match[1]), match[1]
    if match := re.match(r"bittern/(\w+)_desc\.h", header):
        return DESCRIPTORS.get(match[1], match[1]), None
    return None, None


def allowed(path, header):
    if STANDARD.match(header):
        return True
    family, op = family_of(header)
    own_family, own_op = family_of(path.removeprefix("src/"))
    if family and own_family:  # an op sees its family, never another op; a family none but its own
        if own_family != family or (own_op and op and own_op != op):
            return False
        return True
    sees_cuda = path.startswith(("src/cuda/", "tests/emulation/")) or path.endswith((".cu", ".cuh"))
    if not sees_cuda and header != "cuda/plugin.h" and any(fnmatch.fnmatch(header, c) for c in CUDA):
        return False
    headers = next(rule for pattern, rule in LAYERS if fnmatch.fnmatch(path, pattern))
    if family and path not in SEES_FAMILIES and any(fnmatch.fnmatch(path, g) for g in GENERIC):
        return False
    return any(fnmatch.fnmatch(header, h) for h in headers)


def main(root):
    FAMILY.update({op.name: op.parent.name for op in (root / "src/ops").glob("*/*/")})
    breaches = 0
    for folder in ["include", "src", "python", "examples", "tests", "fuzz", "bench"]:
        for file in sorted((root / folder).rglob("*.*")):
            if file.suffix not in {".h", ".cc", ".c", ".cu", ".cuh", ".inc"}:
                continue
            path = file.relative_to(root).as_posix()
            for number, line in enumerate(file.read_text().splitlines(), 1):
                match = INCLUDE.match(line)
                if match and not allowed(path, match[1]):
                    print(f"{path}:{number}: may not include {match[1]}")
                    breaches += 1
    return breaches != 0


if __name__ == "__main__":
    here = pathlib.Path(__file__).resolve().parent.parent
    sys.exit(main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here))
