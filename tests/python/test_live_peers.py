"""Against peers as installed here, on fresh random and aimed data."""

import sys

import numpy as np
import pytest
from arrays import GOLDEN

import bittern

sys.path.insert(0, str(GOLDEN))  # the generators aim well


# ---- mlx ----


@pytest.mark.peer("mlx")
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_mlx(dtype, bits):
    """codes, scales, biases and values, straight from mlx arrays to mlx arrays."""
    import make_mlx_goldens as golden
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    short = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]
    unsigned = mx.uint32 if dtype == "float32" else mx.uint16
    for group in (32, 64, 128):
        rng = np.random.default_rng(7000 + 100 * bits + group)
        aimed = golden.aimed_rows(rng, bits, group, short)
        random = rng.normal(size=(16, 256)) * np.exp(rng.normal(size=(16, 1)))
        w = mx.array(np.concatenate([aimed, random]).astype(np.float32)).astype(getattr(mx, dtype))
        theirs = mx.quantize(w, group_size=group, bits=bits)
        fields = {"group_size": group, "bits": bits, "storage": "packed"}
        scales, biases, packed = bittern.qdq_affine_init(w, method="mlx", **fields)
        assert mx.array_equal(packed, theirs[0])
        assert mx.array_equal(scales.view(unsigned), theirs[1].view(unsigned))
        assert mx.array_equal(biases, theirs[2])  # by value: at 1 bit MLX may store -0
        fields["rounding"] = "mlx"
        y = bittern.qdq_affine_forward(*theirs, **fields)
        expected = mx.dequantize(*theirs, group_size=group, bits=bits)
        assert y.dtype == expected.dtype and mx.array_equal(
            y.view(unsigned), expected.view(unsigned)
        )


@pytest.mark.peer("mlx")
def test_mlx_reads_what_we_pack():
    """mx.quantized_matmul takes the arrays as they are; lsq loses less than MLX's own rule."""
    import mlx.core as mx

    rng = np.random.default_rng(3)
    w = mx.array(rng.normal(size=(64, 512)).astype(np.float32))
    error = {}
    for method in ("mlx", "minmax", "lsq"):
        scales, biases, q = bittern.qdq_affine_init(w, bits=4, method=method, storage="packed")
        y = mx.dequantize(q, scales, biases, group_size=64, bits=4)
        error[method] = mx.square(y - w).mean().item()
    assert error["lsq"] < error["minmax"] and error["lsq"] < error["mlx"]
    x = mx.array(rng.normal(size=(2, 512)).astype(np.float32))
    product = mx.quantized_matmul(x, q, scales, biases, group_size=64, bits=4)
    assert mx.allclose(product, x @ y.T, rtol=1e-4, atol=1e-3)


# ---- torch ----

RANGES = [(-8, 7), (-128, 127), (0, 255)]


def torch_problem(rng, shape, channels, low, high, pow2):
    """x with many exact ties (when the scales are powers of two), clamps on both sides."""
    exponent = rng.integers(-6, 2, channels)
    scale = (2.0**exponent if pow2 else 0.05 * np.exp(rng.normal(size=channels))).astype(np.float32)
    zero_point = rng.integers(low, high + 1, channels).astype(np.int32)
    s, zp = scale[:, None], zero_point[:, None]
    steps = rng.integers(2 * low - 6, 2 * high + 7, shape) / 2
    x = ((steps - zp) * s).astype(np.float32)
    x = np.where(rng.random(shape) < 0.3, (x + rng.normal(size=shape) * s).astype(np.float32), x)
    return x, scale, zero_point


@pytest.mark.peer("torch")
@pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor"
)  # deprecated, but a judge while it lasts
@pytest.mark.parametrize("low,high", RANGES)
@pytest.mark.parametrize("pow2", [True, False])
def test_torch_quantize(low, high, pow2):
    """Eager torch divides, so any scale agrees; quantize_per_channel multiplies by 1/scale."""
    import torch

    rng = np.random.default_rng(11)
    code, kind = ("u8", torch.quint8) if low == 0 else ("s8", torch.qint8)
    x, scale, zero_point = (
        torch.tensor(a) for a in torch_problem(rng, (16, 4000), 16, low, high, pow2)
    )
    fields = {"granularity": "channel", "axis": 0, "q_min": low, "q_max": high, "code": code}
    q = bittern.quantize_per_group(x, scale, zero_point, **fields)
    eager = torch.clamp(torch.round(x / scale[:, None]) + zero_point[:, None], low, high)
    assert torch.equal(q.float(), eager)
    if pow2 and high - low == 255:
        assert torch.equal(q, torch.quantize_per_channel(x, scale, zero_point, 0, kind).int_repr())
    y = bittern.dequantize_per_group(
        q, scale, zero_point, **{k: fields[k] for k in ("granularity", "axis")}
    )
    assert torch.equal(y, (q.float() - zero_point[:, None]) * scale[:, None])


@pytest.mark.peer("torch")
@pytest.mark.parametrize("low,high", RANGES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_fake_quantize(dtype, low, high):
    import torch

    rng = np.random.default_rng(12)
    x, scale, zero_point = (
        torch.tensor(a) for a in torch_problem(rng, (16, 4000), 16, low, high, True)
    )
    x = x.to(getattr(torch, dtype)).requires_grad_()
    y = torch.fake_quantize_per_channel_affine(x, scale, zero_point, 0, low, high)
    d_y = torch.tensor(rng.normal(size=x.shape)).to(x.dtype)
    y.backward(d_y)
    fields = {"granularity": "channel", "axis": 0, "q_min": low, "q_max": high}
    x = x.detach(), x.grad
    assert torch.equal(
        bittern.fake_quantize_per_group(x[0], scale, zero_point, **fields), y.detach()
    )
    d_x = bittern.fake_quantize_per_group_backward(
        d_y, x[0], scale, zero_point, d_scale=False, d_zero_point=False, **fields
    )
    assert torch.equal(d_x, x[1])


def straight_through_codes(torch, x, scale, zero_point, low, high):
    """clamp(R(x/s) + zp) whose rounding has gradient 1, and whose clamp passes both ends.

    (The gradient of torch.clamp itself is 0 at the ends.)
    """
    z = x / scale[:, None]
    r = z + (torch.round(z) - z).detach() + zero_point[:, None]
    return torch.where((r >= low) & (r <= high), r, torch.clamp(r, low, high).detach())


@pytest.mark.peer("torch")
@pytest.mark.parametrize("low,high", RANGES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_quantize_backward_is_autograd_of_the_surrogate(dtype, low, high):
    import torch

    rng = np.random.default_rng(13)
    x, scale, zero_point = torch_problem(rng, (16, 4000), 16, low, high, False)
    x, scale = (torch.tensor(a.astype(dtype)) for a in (x, scale))
    zero_point = torch.tensor(zero_point)
    d_y = torch.tensor(rng.normal(size=x.shape).astype(dtype))
    leaf = x.clone().requires_grad_()
    straight_through_codes(torch, leaf, scale, zero_point, low, high).backward(d_y)
    d_x = bittern.quantize_per_group_backward(
        d_y, x, scale, zero_point, granularity="channel", axis=0, q_min=low, q_max=high
    )
    assert torch.equal(d_x, leaf.grad)


@pytest.mark.peer("torch")
@pytest.mark.parametrize("low,high", RANGES)
def test_fake_quantize_backward_is_autograd_of_the_surrogate(low, high):
    """In f64: autograd rounds elsewhere, so sums agree to a bound of n * eps * sum|terms|."""
    import torch

    rng = np.random.default_rng(14)
    x, scale, zero_point = torch_problem(rng, (16, 4000), 16, low, high, False)
    x, s = (torch.tensor(a.astype(np.float64)) for a in (x, scale))
    d_y = torch.tensor(rng.normal(size=x.shape))
    leaves = [t.clone().requires_grad_() for t in (x, s, torch.tensor(zero_point).double())]
    codes = straight_through_codes(torch, *leaves, low, high)
    ((codes - leaves[2][:, None]) * leaves[1][:, None]).backward(d_y)
    d_x, d_scale, d_zero_point = bittern.fake_quantize_per_group_backward(
        d_y, x, s, torch.tensor(zero_point), granularity="channel", axis=0, q_min=low, q_max=high
    )
    eps = 2.0**-52
    assert torch.allclose(d_x, leaves[0].grad, rtol=4 * eps, atol=0)  # autograd: d_y * s / s
    terms = (d_y.abs() * ((x / s[:, None]).abs() + 2 * (high - low))).sum(1)
    assert torch.all((d_scale - leaves[1].grad).abs() <= x.shape[1] * eps * terms)
    terms = (d_y.abs() * s[:, None]).sum(1)
    assert torch.all((d_zero_point - leaves[2].grad).abs() <= x.shape[1] * eps * terms)


@pytest.mark.peer("torch")
def test_affine_backward_is_autograd():
    import torch

    rng = np.random.default_rng(15)
    q = torch.tensor(rng.integers(0, 16, (8, 256)).astype(np.uint8))
    d_y = torch.tensor(rng.normal(size=(8, 256)))
    scales, biases = (torch.tensor(rng.normal(size=(8, 4))).requires_grad_() for _ in range(2))
    groups = q.double().reshape(8, 4, 64)
    (groups * scales[..., None] + biases[..., None]).reshape(8, 256).backward(d_y)
    d_scales, d_biases = bittern.qdq_affine_backward(d_y, q, group_size=64, bits=4)
    bound = 64 * 2.0**-52 * (d_y.reshape(8, 4, 64).abs() * 16).sum(-1)
    assert torch.all((d_scales - scales.grad).abs() <= bound)
    assert torch.all((d_biases - biases.grad).abs() <= bound)
