"""A problem of quantize_per_group in any framework, and the answer of numpy."""

import pathlib

import numpy as np
import pytest

import bittern

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPS = [op.name for op in bittern.ops()]
FRAMEWORKS = [
    "numpy",
    pytest.param("mlx", marks=pytest.mark.peer("mlx")),
    pytest.param("torch", marks=pytest.mark.peer("torch")),
]
rng = np.random.default_rng(5)


def make(framework, values, dtype="float32"):
    """`values` as an array of the framework, in a dtype numpy may not have."""
    if framework == "mlx":
        import mlx.core as mx

        array = mx.array(np.asarray(values, np.float32)).astype(getattr(mx, dtype))
        mx.eval(array)
        return array
    if framework == "torch":
        import torch

        return torch.tensor(np.asarray(values, np.float32)).to(getattr(torch, dtype))
    return np.asarray(values).astype(dtype)


def to_numpy(array):
    if type(array).__module__.startswith("mlx"):
        import mlx.core as mx

        return np.array(array.astype(mx.float32))
    if type(array).__module__.startswith("torch"):
        return array.float().numpy()
    return np.asarray(array, np.float32)


def quantize(x, s, group=64, zp=0, low=-128, high=127):
    """numpy's own clamp(R(x / s) + zp)."""
    return np.clip(np.rint(x / np.repeat(s, group, 1)) + zp, low, high)


@pytest.fixture
def problem():
    x = rng.normal(size=(6, 256)).astype(np.float32)
    scale = rng.uniform(0.01, 0.05, (6, 4)).astype(np.float32)
    return x, scale, quantize(x, scale).astype(np.int8)


def plan_for(x, **more):
    return bittern.plan(
        "quantize_per_group", outer_size=x.shape[0], axis_size=x.shape[1], group_size=64, **more
    )
