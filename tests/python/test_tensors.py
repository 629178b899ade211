"""Tensors of torch, and arrays that are not what they seem."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
from arrays import assert_same_bits
from problems import PACKAGE, gdn_problem, normal

import bittern

if importlib.util.find_spec("torch") is not None:
    import torch


@pytest.mark.peer("torch")
def test_torchs_lazy_views():
    z = torch.complex(torch.randn(2, 64), torch.randn(2, 64)).conj()
    assert z.imag.is_neg()
    for call in (
        lambda: bittern.quantize_per_group(z.imag, 0.1, group_size=64),
        lambda: bittern.plan("quantize_per_group", outer_size=2, axis_size=64, group_size=64).run(
            x=z.imag, scale=torch.ones(2, 1), q=torch.zeros(2, 64, dtype=torch.int8)
        ),
    ):
        with pytest.raises(ValueError, match=r"quantize_per_group: x: a lazy view \(is_neg\(\) is true\)"):
            call()
    x = z.imag.resolve_neg()[:, ::2].contiguous()
    bittern.quantize_per_group(x, 0.1, group_size=32)


@pytest.mark.peer("torch")
def test_plain_functions_do_not_drop_gradients():
    x = torch.randn(2, 64, requires_grad=True)
    scale = torch.ones(2, 1)
    with pytest.raises(ValueError, match="fake_quantize_per_group: x: requires a gradient.*bittern.torch"):
        bittern.fake_quantize_per_group(x, scale, group_size=64)
    with pytest.raises(ValueError, match="scale: requires a gradient"):
        bittern.fake_quantize_per_group(x.detach(), scale.requires_grad_(), group_size=64)
    with pytest.raises(ValueError, match=r"x: requires a gradient.*torch.no_grad\(\)$"):
        bittern.rms_norm(x, x[0])  # bittern.torch has no such function
    with pytest.raises(ValueError, match="x: requires a gradient.*bittern.torch.gated_rms_norm computes it"):
        bittern.gated_rms_norm(x, x, x[0])
    q = torch.zeros(2, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="scales: requires a gradient.*bittern.torch.qdq_affine computes it"):
        bittern.qdq_affine_forward(q, scale, torch.ones(2, 1), group_size=64, bits=4)
    with torch.no_grad():
        y = bittern.fake_quantize_per_group(x, scale, group_size=64)
    assert torch.equal(y, bittern.fake_quantize_per_group(x.detach(), scale.detach(), group_size=64))
    with torch.inference_mode():
        bittern.fake_quantize_per_group(x, scale, group_size=64)
        bittern.fake_quantize_per_group(torch.randn(2, 64), 1.0, group_size=64)


@pytest.mark.peer("torch")
def test_torchs_defaults():
    c = {n: torch.tensor(a) for n, a in gdn_problem(b=1, t=20).items()}
    seqlens = torch.tensor([0, 7, 20])
    assert seqlens.dtype == torch.int64
    o, _ = bittern.gdn_chunk_forward(**c, cu_seqlens=seqlens.int())
    half = {**c, "g": c["g"].bfloat16(), "beta": c["beta"].bfloat16()}
    wide = {**c, "g": half["g"].float(), "beta": half["beta"].float()}
    assert torch.equal(bittern.gdn_chunk_forward(**c, cu_seqlens=seqlens)[0], o)
    assert torch.equal(bittern.gdn_chunk_forward(**half)[0], bittern.gdn_chunk_forward(**wide)[0])
    mask = torch.rand(1, 20) > 0.3
    assert torch.equal(
        bittern.gdn_chunk_forward(**c, mask=mask)[0],
        bittern.gdn_chunk_forward(**c, mask=mask.to(torch.uint8))[0],
    )
    with pytest.raises(ValueError, match="cu_seqlens: holds 4294967316, expected integers that fit"):
        bittern.gdn_chunk_forward(**c, cu_seqlens=torch.tensor([0, 2**32 + 20]))
    turned = {n: a.transpose(1, 2).contiguous().transpose(1, 2) for n, a in c.items()}
    assert torch.equal(bittern.gdn_chunk_forward(**turned)[0], bittern.gdn_chunk_forward(**c)[0])
    assert bittern.quantize_per_group(
        torch.randn(2, 64), 1.0, group_size=64, q_min=0, q_max=9, code=torch.uint8
    ).dtype == torch.uint8  # fmt: skip


@pytest.mark.parametrize("kind", [bool, np.bool_])
def test_false_is_zero_for_an_input_and_leaves_an_output_out(kind):
    q, v, g = normal(1, 3, 1, 16), normal(1, 3, 2, 16), -np.ones((1, 3, 2), np.float32)
    o, _ = bittern.gdn_chunk_forward(q, q, v, g, 0.5, mask=kind(False))
    assert not o.any()
    unmasked = bittern.gdn_chunk_forward(q, q, v, g, 0.5, final_state=kind(False))
    assert unmasked.any()
    masked, _ = bittern.gdn_chunk_forward(q, q, v, g, 0.5, mask=kind(True), final_state=kind(True))
    assert_same_bits(masked, unmasked)
    with pytest.raises(ValueError, match="gdn_chunk_forward: o: False, expected an array: it is not"):
        bittern.gdn_chunk_forward(q, q, v, g, 0.5, o=kind(False))


# ---- arrays that are not what they seem ----


def test_masks_are_not_dropped():
    x = np.ma.masked_less(normal(2, 64), 0)
    plan = bittern.plan("quantize_per_group", outer_size=2, axis_size=64, group_size=64)
    q = np.zeros((2, 64), np.int8)
    for call in (
        lambda: bittern.quantize_per_group(x, 1.0, group_size=64),
        lambda: plan.run(x=x, scale=np.ones((2, 1), np.float32), q=q),
    ):
        with pytest.raises(ValueError, match=r"quantize_per_group: x: a masked array.*filled\(value\)"):
            call()
    bittern.quantize_per_group(x.filled(0), 1.0, group_size=64)


class Raises:
    def __init__(self, error):
        self.error = error

    def __dlpack__(self, **_):
        raise self.error

    def __dlpack_device__(self):
        return 1, 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
def test_an_interrupt_is_not_a_refusal(error):
    with pytest.raises(error):
        bittern.quantize_per_group(Raises(error), 1.0)


def test_detach_alone_is_not_torchs():
    """Other libraries have requires_grad and detach too, and torch need not be there."""
    code = """
import numpy as np, bittern

class Tensor:
    requires_grad = False

    def __init__(self, array):
        self.array = array

    def detach(self):
        return self

    def __dlpack__(self, **_):
        return self.array.__dlpack__()

x = np.ones((2, 64), np.float32)
import sys
sys.modules["torch.autograd.forward_ad"] = None
q = bittern.quantize_per_group(Tensor(x), np.ones((2, 1), np.float32), group_size=64)
assert q.shape == (2, 64)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": PACKAGE})


def fakes(tensor):
    from torch._subclasses import FakeTensorMode

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, t):
            return torch.Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError

    yield FakeTensorMode().from_tensor(tensor)
    yield Wrapper(tensor)


@pytest.mark.peer("torch")
def test_tensors_without_memory():
    x, scale = torch.randn(2, 64), torch.ones(2, 1)
    for name, tensor in (("x", x), ("scale", scale), ("zero_point", torch.ones(2, 1, dtype=torch.int32))):
        for fake in fakes(tensor):
            with pytest.raises(ValueError, match=f"quantize_per_group: {name}: no memory behind it"):
                bittern.quantize_per_group(**{"x": x, "scale": scale, name: fake}, group_size=64)


@pytest.mark.peer("torch")
def test_autograd_sees_what_is_overwritten():
    x, scale = torch.randn(2, 64), torch.ones(2, 1)
    plan = bittern.plan("fake_quantize_per_group", outer_size=2, axis_size=64, group_size=64)
    for write in (
        lambda y: bittern.fake_quantize_per_group(x, scale, y=y, group_size=64),
        lambda y: plan.run(x=x, scale=scale, y=y),
        lambda y: plan.run(x=x, scale=scale, y=y.detach()),
    ):
        y, weight = torch.randn(2, 64), torch.ones(2, 64, requires_grad=True)
        loss = (weight * y).sum()
        write(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    before = x._version
    bittern.fake_quantize_per_group(x, scale, group_size=64)
    assert x._version == before  # what is read is not written
    with torch.inference_mode():
        y = torch.zeros(2, 64)
        bittern.fake_quantize_per_group(x, scale, y=y, group_size=64)
    bittern.fake_quantize_per_group(x, scale, y=y, group_size=64)  # which has no version


@pytest.mark.peer("torch")
def test_torchs_devices_are_devices():
    x = torch.randn(2, 64)
    bittern.quantize_per_group(x, 1.0, group_size=64, device=x.device)
    assert bittern.plan("quantize_per_group", device=torch.device("cpu")).device == "cpu"


@pytest.mark.peer("torch")
def test_small_floats_have_names():
    x = torch.zeros(2, 64)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(ValueError, match=f"quantize_per_group: x: dtype {name}, expected f32"):
            bittern.quantize_per_group(x.to(dtype), 1.0, group_size=64)


@pytest.mark.peer("torch")
def test_nested_tensors():
    for layout in (torch.strided, torch.jagged):
        x = torch.nested.nested_tensor([torch.zeros(2, 64), torch.zeros(3, 64)], layout=layout)
        with pytest.raises(ValueError, match="quantize_per_group: x: a nested tensor, expected one shape"):
            bittern.quantize_per_group(x, 1.0, group_size=64)
