"""The stubs as a type checker reads them."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import bittern

PACKAGE = pathlib.Path(bittern.__file__).parents[1]

# Each line that ends in "# wrong" must be refused, and no other.
PROGRAM = """\
import numpy as np

import bittern

x = np.ones((2, 64), np.float32)
q = bittern.quantize_per_group(x, 0.1, group_size=32)
bittern.quantize_per_group(x, 0.1, granularity="token", code="u8", q_min=0, q_max=255)
bittern.quantize_per_group(x, 0.1, granularity="tensor", code=np.uint8, element=np.dtype("float32"))
bittern.quantize_per_group(x, 0.1, granularity="row")  # wrong
bittern.quantize_per_group(x, 0.1, code="s32")  # wrong
bittern.quantize_per_group(x, 0.1, groupsize=32)  # wrong
bittern.quantize_per_group(x)  # wrong
bittern.quantize_per_group(x, "0.1")  # wrong

scales, biases, codes = bittern.qdq_affine_init(x, bits=4, method="mlx", storage="packed")
scales, codes = bittern.qdq_affine_init(x, bits=4)  # wrong
bittern.qdq_affine_init(x, method="best")  # wrong

scale, codes = bittern.dynamic_quantize(x, group_size=32)
scale, zero_point, codes = bittern.dynamic_quantize(x, group_size=32, symmetric=False)
scale, codes = bittern.dynamic_quantize(x, group_size=32, symmetric=False)  # wrong

d_q, d_scale = bittern.dequantize_per_group_backward(x, codes, scale, group_size=32)
d_q, d_scale, d_zero = bittern.dequantize_per_group_backward(x, codes, scale)  # wrong
d_scale = bittern.dequantize_per_group_backward(x, codes, scale, group_size=32, d_q=False)

packed = bittern.pack_codes(codes, bits=4)
bittern.unpack_codes(packed, axis_size=64, bits=4)
bittern.unpack_codes(packed, axis_size="64", bits=4)  # wrong

state = np.zeros((2, 4, 16, 8), np.float32)
o = bittern.gdn_recurrent_step(x, x, x, x, 0.5, state)
o, snapshots = bittern.gdn_recurrent_step(x, x, x, x, 0.5, state, snapshots=True)
plan = bittern.plan("quantize_per_group", outer_size=2, axis_size=64, element="f16", device="cpu")
plan.run(x=x, scale=scale, q=codes)
bittern.plan("quantize_per_group", preference="best")  # wrong
print(plan.operands[0].axes, bittern.ops()[0].fields[0].is_size)
"""


@pytest.mark.peer("mypy", "numpy")
def test_a_checker_accepts_what_is_right_and_refuses_what_is_wrong(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", "program.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(PACKAGE)},
        capture_output=True,
        text=True,
    )
    refused = {int(n) for n in re.findall(r"^program\.py:(\d+): error", done.stdout, re.M)}
    wrong = {n for n, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}
    assert refused == wrong, done.stdout + done.stderr
    others = [line for line in done.stdout.splitlines() if not line.startswith(("program.py", "Found"))]
    assert not others, done.stdout
