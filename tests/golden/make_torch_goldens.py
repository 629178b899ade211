"""Writes torch_fake_quantize.safetensors: fake quantisation and its gradients as torch's CPU kernels do them.

Peer: torch 2.15.0 (PyPI), numpy 2.4.6, x86-64 with AVX-512. Versions and the instruction set are in the file's
metadata. The learnable kernels are compiled with fused multiply-add where the processor has it, so another
instruction set may move last bits of the `any` cases.

    python make_torch_goldens.py            write the file beside this script
    python make_torch_goldens.py --check    make it again in memory and compare with the file, byte for byte

Key: `<kind>.<dtype>.<geometry>.<scales>.<range>.<zero points>.<tensor>`, for instance `ties.f32.axis1.pow2.s4.odd.x`

    kind         ties    torch.fake_quantize_per_{channel,tensor}_affine; x within 2 ulp of ties and around the clamps
                 sums    torch._fake_quantize_learnable_per_{channel,tensor}_affine, gradients summed per channel.
                         pow2: values with few bits, so that the sums are exact in any order, and no tie beside an odd
                         zero point. any: x stays clear of ties
                 terms   the same op with one element per channel, so that nothing is summed; x as in `ties`
    dtype        f32; f16 and bf16 for some `ties` (x, dy, y, dx; the scale stays f32)
    geometry     axis0, axis1: channel axis of a rank-3 tensor; tensor: one scale; element: one scale per element
    scales       pow2: powers of two; any: arbitrary
    range        s4 [-8, 7], u4 [0, 15], s8 [-128, 127], u8 [0, 255]
    zero points  zero, odd, even (never 0)

Tensors of every case: x, scale, zero_point (I32), dy, y, dx; quant_min, quant_max, axis (I32, one element; axis is -1
for `tensor`). `sums` and `terms` add d_scale and d_zero_point (grad_factor 1). In `terms`, y and dx come from the plain
op and dx_learnable from the learnable one. `ties` and `terms` add near_tie (U8): 1 where the exact x/scale is within
2 ulp (of f32) of a half-integer; in `terms` that ulp is the larger of those at x/scale and at x/scale + zero_point,
because the learnable backward adds the zero point before it rounds.

Compare by value, not by bits: torch multiplies dy by the mask, so a masked gradient may be -0.
Zero points of `tensor` are never negative: there the learnable backward uses trunc(zp + 0.5), which is off by one.
"""

import json
import pathlib
import struct
import sys

import numpy as np
import torch

RANGES = {"s4": (-8, 7), "u4": (0, 15), "s8": (-128, 127), "u8": (0, 255)}
SHAPES = {"axis0": ((5, 24, 3), 0), "axis1": ((4, 6, 15), 1), "tensor": ((12, 30), -1), "element": ((256, 1), 0)}
TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
ST_NAME = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.uint8: "U8"}
MANTISSA = {"f32": 23, "f16": 10, "bf16": 7}
F32 = np.float32


def rounded(x, dtype):
    """x as f32 values that the dtype can hold."""
    return torch.tensor(np.asarray(x, F32)).to(TORCH[dtype]).float().numpy()


def make_scales(rng, kind, count):
    if kind == "pow2":
        return (2.0 ** rng.integers(-6, 2, count)).astype(F32)
    return (0.05 * np.exp(rng.normal(size=count))).astype(F32)


def make_zero_points(rng, kind, lo, hi, geometry, count):
    if kind == "zero":
        return np.zeros(count, np.int32)
    first = 0 if geometry == "tensor" else lo
    pool = [z for z in range(first, hi + 1) if z % 2 == (kind == "odd") and z != 0]
    return rng.choice(pool, count).astype(np.int32)


def near_tie(x, s, zp=0):
    z = x.astype(np.float64) / s
    ulp = np.spacing(np.maximum(np.abs(z), np.abs(z + zp)).astype(F32)).astype(np.float64)
    return torch.tensor((np.abs(z - np.floor(z) - 0.5) <= 2 * ulp).astype(np.uint8))


def tie_inputs(rng, s, zp, lo, hi, dtype):
    """Ties (k + 1/2) * s from two codes below the range to two above, moved by up to 2 ulp; some on codes, some far."""
    k = rng.integers(lo - 3, hi + 3, s.shape) - zp
    x = rounded((k + 0.5) * s.astype(np.float64), dtype)
    # frexp gives the binade, hence the ulp of the dtype; exact because x has room to spare above its denormals
    x = x + rng.integers(-2, 3, s.shape) * np.exp2(np.frexp(x)[1] - 1.0 - MANTISSA[dtype])
    pick = rng.random(s.shape)
    x = np.where(pick < 0.15, k * s.astype(np.float64), x)
    x = np.where(pick > 0.97, np.sign(k + 0.5) * 1000.0 * s, x)
    return rounded(x, dtype)


def sum_inputs(rng, s, zp, lo, hi, scales, zero_points):
    if scales == "pow2":
        eighths = rng.integers(8 * (lo - 2), 8 * (hi + 2) + 1, s.shape)
        if zero_points == "odd":  # the learnable backward rounds x/s + zp, so a tie goes the other way
            eighths = np.where(eighths % 8 == 4, eighths + 1, eighths)
        x = (eighths / 8 - zp) * s
        dy = rng.integers(-8, 9, s.shape) / 4
        # every term is a multiple of 1/32 of its unit: below 2^24 units, f32 sums are exact in any order
        assert np.abs(dy).sum() * (hi - lo + 1) * 32 < 2**24
    else:
        away = rng.choice([-1.0, 1.0], s.shape) * rng.uniform(0.0, 0.45, s.shape)
        x = (rng.integers(lo - 2, hi + 3, s.shape) - zp + away) * s.astype(np.float64)
        dy = rng.normal(size=s.shape)
    return x.astype(F32), dy.astype(F32)


def plain(x, s, zp, axis, lo, hi, dy):
    x = x.clone().requires_grad_()
    if axis >= 0:
        y = torch.fake_quantize_per_channel_affine(x, s, zp, axis, lo, hi)
    else:
        y = torch.fake_quantize_per_tensor_affine(x, s.item(), zp.item(), lo, hi)
        assert torch.equal(y, torch.fake_quantize_per_tensor_affine(x, s, zp, lo, hi))
    y.backward(dy)
    return y.detach(), x.grad


def learnable(x, s, zp, axis, lo, hi, dy):
    x, s, zp = (t.clone().float().requires_grad_() for t in (x, s, zp))
    if axis >= 0:
        y = torch._fake_quantize_learnable_per_channel_affine(x, s, zp, axis, lo, hi, 1.0)
    else:
        y = torch._fake_quantize_learnable_per_tensor_affine(x, s, zp, lo, hi, 1.0)
    y.backward(dy)
    return y.detach(), x.grad, s.grad, zp.grad


def cases():
    for scales in ("pow2", "any"):
        for span in RANGES:
            for zero_points in ("zero", "odd", "even"):
                for geometry in ("axis0", "axis1", "tensor"):
                    yield "ties", "f32", geometry, scales, span, zero_points
                    yield "sums", "f32", geometry, scales, span, zero_points
                yield "ties", "f16", "axis1", scales, span, zero_points
                yield "ties", "bf16", "axis1", scales, span, zero_points
                yield "terms", "f32", "element", scales, span, zero_points


def make():
    torch.set_num_threads(1)
    tensors = {}
    for index, case in enumerate(cases()):
        kind, dtype, geometry, scales, span, zero_points = case
        rng = np.random.default_rng(2000 + index)
        (shape, axis), (lo, hi) = SHAPES[geometry], RANGES[span]
        count = shape[axis] if axis >= 0 else 1
        s = make_scales(rng, scales, count)
        zp = make_zero_points(rng, zero_points, lo, hi, geometry, count)
        along = [-1 if d == axis else 1 for d in range(len(shape))]
        full_s, full_zp = (np.broadcast_to(v.reshape(along) if axis >= 0 else v, shape) for v in (s, zp))
        if kind == "sums":
            x, dy = sum_inputs(rng, full_s, full_zp, lo, hi, scales, zero_points)
        else:
            x, dy = tie_inputs(rng, full_s, full_zp, lo, hi, dtype), rounded(rng.normal(size=shape), dtype)
        out = dict(x=torch.tensor(x).to(TORCH[dtype]), scale=torch.tensor(s), zero_point=torch.tensor(zp))
        out["dy"] = torch.tensor(dy).to(TORCH[dtype])
        args = (out["x"], out["scale"], out["zero_point"], axis, lo, hi, out["dy"])
        out["y"], out["dx"] = plain(*args)
        if kind != "ties":
            y, dx, out["d_scale"], out["d_zero_point"] = learnable(*args)
            assert torch.equal(y, out["y"])
            if kind == "sums":
                assert torch.equal(dx, out["dx"])  # no input is close enough to a tie for torch to contradict itself
            else:
                out["dx_learnable"] = dx
        if kind != "sums":
            out["near_tie"] = near_tie(x, full_s, full_zp if kind == "terms" else 0)
        for key, value in dict(quant_min=lo, quant_max=hi, axis=axis).items():
            out[key] = torch.tensor([value], dtype=torch.int32)
        for key, a in out.items():
            a = a.contiguous()
            data = a.view(torch.int16).numpy() if a.dtype.itemsize == 2 else a.numpy()
            tensors[".".join(case + (key,))] = (ST_NAME[a.dtype], tuple(a.shape), data.tobytes())
    return tensors


def safetensors_bytes(tensors, metadata):
    """Sorted, so that the same tensors always give the same bytes; widest types first, so that all are aligned."""
    width = {"F32": 0, "I32": 0, "F16": 1, "BF16": 1, "U8": 2}
    header, offset, order = {"__metadata__": metadata}, 0, sorted(tensors, key=lambda k: (width[tensors[k][0]], k))
    for key in order:
        dtype, shape, data = tensors[key]
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(tensors[k][2] for k in order)


def main():
    path = pathlib.Path(__file__).with_name("torch_fake_quantize.safetensors")
    metadata = {
        "generator": "tests/golden/make_torch_goldens.py",
        "peer": "torch, CPU kernels",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
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
