"""Writes mlx_affine.safetensors: affine quantisation as MLX's CPU backend does it.

Peer: mlx 0.32.4 (`mlx[cpu]` from PyPI), numpy 2.4.6, x86-64 Linux. The versions that made a file are
in its metadata. MLX's Metal and CUDA kernels give other bits; these goldens speak for the CPU backend only.

    python make_mlx_goldens.py            write the file beside this script
    python make_mlx_goldens.py --check    make it again in memory and compare with the file, byte for byte

What is in it. For dtype f32, f16, bf16; bits 1 2 3 4 5 6 8; group 32 64 128, under `<dtype>.b<bits>.g<group>.`:

    w        [16, 256]          dtype   the weights, one kind of trouble per row (see ROWS)
    packed   [16, 256*bits/32]  U32     mx.quantize: little-endian bit stream along the row
    scales   [16, 256/group]    dtype   mx.quantize
    biases   [16, 256/group]    dtype   mx.quantize
    dequant  [16, 256]          dtype   mx.dequantize of the three above

All of these are finite. Under `special.<dtype>.b<bits>.g64.` are the same five with [8, 64] weights that hold NaN and
infinities, or whose range overflows (see SPECIAL); in f16 it is the dequantised product that overflows, before the bias
is added. A NaN's sign and payload belong to the processor: compare NaN as NaN.
"""

import json
import pathlib
import struct
import sys

import mlx.core as mx
import numpy as np

ROWS = [
    "normal", "normal, sigma 0.02", "all negative", "all positive", "uniform groups", "zeros of both signs",
    "exact ties, minimum side", "exact ties, maximum side", "within 2 ulp of ties", "within 2 ulp of ties, offset",
    "ranges around eps = 1e-7", "denormals", "large", "ranges of a few ulp", "zeros among values", "symmetric groups",
]
SPECIAL = ["NaN among values", "+inf", "-inf", "both infinities", "all NaN", "all +inf", "range overflow, max side",
           "range overflow, min side"]
COLS = 256
F32 = np.float32
ST_NAME = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32"}
DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
MANTISSA = {"f32": 23, "f16": 10, "bf16": 7}


def raw(a):
    """The bytes of an mx.array; numpy has no bfloat16, so go through unsigned integers."""
    return np.array(a.view(mx.uint32 if a.dtype.size == 4 else mx.uint16)).tobytes()


def rounded(x, dtype):
    """x as f32 values that the dtype can hold, so that aiming survives the conversion."""
    with np.errstate(over="ignore"):
        return np.array(mx.array(np.asarray(x, F32)).astype(DTYPES[dtype]).astype(mx.float32))


def step_ulps(x, k, dtype):
    """x moved by k units in the last place of the dtype."""
    unit = 1 << (23 - MANTISSA[dtype]) if dtype != "f16" else 1
    if dtype == "f16":
        bits = x.astype(np.float16).view(np.int16).astype(np.int64)
        sign, word = 0x8000, np.uint16
    else:
        bits = x.astype(F32).view(np.int32).astype(np.int64)
        sign, word = 0x80000000, np.uint32
    order = np.where(bits < 0, -(bits & (sign - 1)), bits) + k * unit  # monotone in the value
    moved = np.where(order < 0, -order | sign, order).astype(word)
    return moved.view(np.float16).astype(F32) if dtype == "f16" else moved.view(F32)


def exact_ties(rng, bits, group, side):
    """Ends at whole multiples of a power of two that make the scale exactly that power; the rest on half steps."""
    n, groups = 2**bits - 1, COLS // group
    out = np.empty((groups, group))
    for g in range(groups):
        far = int(rng.integers((n + 1) // 2, n + 1))  # code of zero
        k = rng.integers(0, n, group) + 0.5 - far
        k[:2] = -far, n - far
        out[g] = side * k * 2.0 ** int(rng.integers(-6, 3))
    return out.reshape(-1)


def near_ties(rng, bits, group, dtype, offset):
    """Random ends; the rest within 2 ulp of (k + 1/2) * s + b. MLX itself says what s and b are."""
    groups = COLS // group
    w = rounded(rng.normal(size=(groups, group)) + offset, dtype)
    ends = np.stack([w.min(1), w.max(1)], 1)
    w[:, :2] = ends
    s, b = (np.array(a, dtype=np.float64) for a in mx.quantize(mx.array(w), group_size=group, bits=bits)[1:])
    k = rng.integers(0, 2**bits, (groups, group))
    w = step_ulps(rounded((k + 0.5) * s + b, dtype), rng.integers(-2, 3, (groups, group)), dtype)
    w = np.clip(w, ends[:, :1], ends[:, 1:])  # an outlier would change s and b
    w[:, :2] = ends
    return w.reshape(-1)


def aimed_rows(rng, bits, group, dtype):
    groups = COLS // group
    per_group = lambda v: np.repeat(np.asarray(v), group)
    sign = per_group(rng.choice([-1.0, 1.0], groups))
    shift = per_group(rng.uniform(0, 3, groups))
    normal = lambda: rng.normal(size=COLS)
    smallest = {"f32": 2.0**-149, "f16": 2.0**-24, "bf16": 2.0**-133}[dtype]
    large = {"f32": 5e37, "f16": 1e4, "bf16": 5e37}[dtype]
    zeros = np.where(rng.random(COLS) < 0.5, 0.0, -0.0)
    zeros[:group] = 0.0
    zeros[group : 2 * group] = -0.0
    symmetric = normal()
    ends = np.abs(symmetric.reshape(groups, group)).max(1)
    symmetric.reshape(groups, group)[:, 0] = ends
    symmetric.reshape(groups, group)[:, -1] = -ends
    rows = [
        normal(),
        normal() * 0.02,
        -np.abs(normal()) - shift,
        np.abs(normal()) + shift,
        per_group(rng.normal(size=groups)) * sign,
        zeros,
        exact_ties(rng, bits, group, 1),
        exact_ties(rng, bits, group, -1),
        near_ties(rng, bits, group, dtype, 0.0),
        near_ties(rng, bits, group, dtype, 1.5),
        normal() * 1e-7 * per_group(10.0 ** rng.uniform(-1.0, 2.0, groups)),
        rng.integers(-99, 100, COLS) * smallest,
        np.clip(normal(), -3, 3) * large,
        per_group(rng.normal(size=groups)) * (1 + rng.integers(-3, 4, COLS) * 2.0 ** -MANTISSA[dtype]),
        rng.choice([0.0, -0.0, 3.0, -1.0], COLS),
        symmetric,
    ]
    assert len(rows) == len(ROWS)
    return rounded(np.stack(rows), dtype)


def special_rows(rng, dtype):
    w = rng.normal(size=(len(SPECIAL), 64))
    w[0, ::7] = np.nan
    w[1, 5] = np.inf
    w[2, 6] = -np.inf
    w[3, 7], w[3, 8] = -np.inf, np.inf
    w[4] = np.nan
    w[5] = np.inf
    top = {"f32": 3e38, "f16": 6e4, "bf16": 3e38}[dtype]  # in f16, bits = 1 stores an infinite scale
    w[6, :2] = -top, top * 1.05
    w[7, :2] = -top * 1.05, top
    return rounded(w, dtype)


def cases():
    for dtype in DTYPES:
        for bits in (1, 2, 3, 4, 5, 6, 8):
            for group in (32, 64, 128):
                yield "", dtype, bits, group
                if group == 64:
                    yield "special.", dtype, bits, group


def make():
    mx.set_default_device(mx.cpu)
    tensors = {}
    for index, (prefix, dtype, bits, group) in enumerate(cases()):
        rng = np.random.default_rng(1000 + index)
        w = mx.array(special_rows(rng, dtype) if prefix else aimed_rows(rng, bits, group, dtype)).astype(DTYPES[dtype])
        packed, scales, biases = mx.quantize(w, group_size=group, bits=bits)
        dequant = mx.dequantize(packed, scales, biases, group_size=group, bits=bits)
        for key, a in dict(w=w, packed=packed, scales=scales, biases=biases, dequant=dequant).items():
            tensors[f"{prefix}{dtype}.b{bits}.g{group}.{key}"] = (ST_NAME[a.dtype], a.shape, raw(a))
    return tensors


def safetensors_bytes(tensors, metadata):
    """Sorted, so that the same tensors always give the same bytes; 4-byte types first, so that all are aligned."""
    header, offset, order = {"__metadata__": metadata}, 0, sorted(tensors, key=lambda k: ("16" in tensors[k][0], k))
    for key in order:
        dtype, shape, data = tensors[key]
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(tensors[k][2] for k in order)


def main():
    path = pathlib.Path(__file__).with_name("mlx_affine.safetensors")
    metadata = {
        "generator": "tests/golden/make_mlx_goldens.py",
        "peer": "mlx, CPU backend",
        "mlx": mx.__version__,
        "numpy": np.__version__,
        "rows": "; ".join(ROWS),
        "special_rows": "; ".join(SPECIAL),
    }
    data = safetensors_bytes(make(), metadata)
    if "--check" in sys.argv[1:]:
        same = path.read_bytes() == data
        print(f"{path.name}: {'identical' if same else 'DIFFERENT'}")
        return 0 if same else 1
    path.write_bytes(data)
    print(f"{path.name}: {len(data)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
