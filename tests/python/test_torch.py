"""bittern.torch, and torch's CUDA tensors: gradients, compilation, streams, graphs."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

from torch_tensors import cuda, device, replayed, same  # noqa: F401

import bittern

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.peer("torch")
if importlib.util.find_spec("torch") is not None:
    import torch

    import bittern.torch


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)


RANGE = {"q_min": -8, "q_max": 7}
GRANULARITIES = {
    "group": ((3, 4, 4), {"group_size": 32}),
    "token": ((3, 4), {"granularity": "token"}),
    "channel": ((4,), {"granularity": "channel", "axis": 1}),
    "tensor": ((1,), {"granularity": "tensor"}),
}


def fake_quantize_problem(device, granularity="group", dtype="float32", scale_dtype=None):
    """x [3,4,128] with clamped values on both sides, scale, zero points that are integers, d_y."""
    shape, fields = GRANULARITIES[granularity]
    dtype = getattr(torch, dtype)
    x = torch.randn(3, 4, 128).to(dtype)
    scale = torch.empty(shape).uniform_(0.1, 0.3).to(scale_dtype or dtype)
    zero_point = torch.randint(-3, 4, shape)
    d_y = torch.randn(3, 4, 128).to(dtype)
    return [t.to(device) for t in (x, scale, zero_point, d_y)], {**fields, **RANGE}


def affine_problem(device, storage="u8", dtype="float64"):
    """4-bit codes of 6 rows of 128, scales and biases that learn, and the fields."""
    w = torch.randn(6, 128, dtype=getattr(torch, dtype), device=device)
    fields = {"group_size": 32, "bits": 4}
    scales, biases, q = bittern.qdq_affine_init(w, storage=storage, **fields)
    return q, scales.requires_grad_(), biases.requires_grad_(), fields


# ---- gradients ----


@pytest.mark.parametrize("storage", ["u8", "packed"])
def test_affine_gradients_are_the_derivative(device, storage):
    q, scales, biases, fields = affine_problem(device, storage)
    assert torch.autograd.gradcheck(
        lambda s, b: bittern.torch.qdq_affine(q, s, b, **fields), (scales, biases)
    )


@pytest.mark.parametrize("storage", ["u8", "packed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_affine_is_bitterns(device, dtype, storage):
    q, scales, biases, fields = affine_problem(device, storage, dtype)
    y = bittern.torch.qdq_affine(q, scales, biases, **fields)
    assert same(y, bittern.qdq_affine_forward(q, scales.detach(), biases.detach(), **fields))
    d_y = torch.randn_like(y)
    y.backward(d_y)
    d_scales, d_biases = bittern.qdq_affine_backward(d_y, q, **fields)
    assert same(scales.grad, d_scales) and same(biases.grad, d_biases)
    if storage == "packed":
        again = bittern.torch.qdq_affine(q.view(torch.int32), scales, biases, **fields)
        assert same(again, y)
    if dtype != "float32":  # half values from f32 scales
        wide = scales.detach().float().requires_grad_()
        y = bittern.torch.qdq_affine(
            q, wide, biases.detach().float(), dtype=getattr(torch, dtype), **fields
        )
        assert y.dtype == getattr(torch, dtype)
        y.backward(d_y)
        assert wide.grad.dtype == torch.float32 and biases.grad.dtype == biases.dtype


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_fake_quantize_is_bitterns(device, granularity, dtype):
    """Values and gradients are those of the op and its backward; a floating zero point learns."""
    (x, scale, zero_point, d_y), fields = fake_quantize_problem(device, granularity, dtype)
    leaves = [t.clone().requires_grad_() for t in (x, scale, zero_point.to(scale.dtype) + 0.25)]
    y = bittern.torch.fake_quantize_per_group(*leaves, **fields)
    y.backward(d_y)
    integers = zero_point.to(torch.int32)
    assert same(y.detach(), bittern.fake_quantize_per_group(x, scale, integers, **fields))
    for leaf, expected in zip(
        leaves, bittern.fake_quantize_per_group_backward(d_y, x, scale, integers, **fields)
    ):
        assert same(leaf.grad, expected) and torch.any(expected != 0)


def test_fake_quantize_with_f32_scales(device):
    problem, fields = fake_quantize_problem(device, dtype="bfloat16", scale_dtype=torch.float32)
    x, scale, _, d_y = problem
    x, scale = x.requires_grad_(), scale.requires_grad_()
    bittern.torch.fake_quantize_per_group(x, scale, **fields).backward(d_y)
    assert x.grad.dtype == torch.bfloat16 and scale.grad.dtype == torch.float32


@pytest.mark.parametrize("low,high", [(-8, 7), (0, 255)])
def test_torchs_own_autograd_agrees(device, low, high):
    """Where the definitions do: torch multiplies by 1/scale, which a power of two allows; ties
    rounded before or after the zero point may differ, so there are none."""
    rows = 16
    scale = 2.0 ** torch.randint(-5, 1, (rows,))
    zero_point = torch.randint(low, high + 1, (rows,))
    codes = torch.randint(low - 4, high + 5, (rows, 500))
    x = (codes - zero_point[:, None] + torch.empty(rows, 500).uniform_(-0.4, 0.4)) * scale[:, None]
    d_y = torch.randn(rows, 500)
    x, scale, zero_point, d_y = (t.to(device) for t in (x, scale, zero_point.float(), d_y))
    ours = [t.clone().requires_grad_() for t in (x, scale, zero_point)]
    theirs = [t.clone().requires_grad_() for t in (x, scale, zero_point)]
    y = bittern.torch.fake_quantize_per_group(
        *ours, granularity="channel", axis=0, q_min=low, q_max=high
    )
    expected = torch._fake_quantize_learnable_per_channel_affine(*theirs, 0, low, high, 1.0)
    y.backward(d_y)
    expected.backward(d_y)
    assert torch.equal(y, expected) and torch.equal(ours[0].grad, theirs[0].grad)
    for mine, other in zip(ours[1:], theirs[1:]):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-3)
    leaf = x.clone().requires_grad_()
    torch.fake_quantize_per_channel_affine(
        leaf, scale, zero_point.int(), 0, low, high
    ).backward(d_y)
    assert torch.equal(ours[0].grad, leaf.grad)


def test_only_what_is_asked(device):
    (x, scale, zero_point, d_y), fields = fake_quantize_problem(device)
    zero_point = zero_point.to(torch.int32)
    call = bittern.torch.fake_quantize_per_group
    with torch.no_grad():
        assert not call(x.clone().requires_grad_(), scale, zero_point, **fields).requires_grad
    assert not call(x, scale, zero_point, **fields).requires_grad
    full = bittern.fake_quantize_per_group_backward(d_y, x, scale, zero_point, **fields)
    for i in range(2):
        leaves = [x.clone(), scale.clone()]
        leaves[i].requires_grad_()
        call(*leaves, zero_point, **fields).backward(d_y)
        assert same(leaves[i].grad, full[i]) and leaves[1 - i].grad is None
    y = call(x.requires_grad_(), scale, zero_point, **fields)
    (d_x,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        d_x.sum().backward()


def test_not_contiguous(device):
    """Copied first: a transposed x, a padded one, a gradient that is expanded."""
    (x, scale, zero_point, _), fields = fake_quantize_problem(device)
    zero_point = zero_point.to(torch.int32)
    expected = bittern.fake_quantize_per_group(x, scale, zero_point, **fields)
    padded = torch.zeros(3, 4, 160, device=device)
    padded[..., :128] = x
    for strided in (x.transpose(0, 2).contiguous().transpose(0, 2), padded[..., :128]):
        assert not strided.is_contiguous()
        leaf = strided.detach().requires_grad_()
        y = bittern.torch.fake_quantize_per_group(leaf, scale, zero_point, **fields)
        assert same(y.detach(), expected) and y.is_contiguous()
        y.sum().backward()
        ones = torch.ones_like(expected)
        d_x = bittern.fake_quantize_per_group_backward(
            ones, x, scale, zero_point, d_scale=False, d_zero_point=False, **fields
        )
        assert same(leaf.grad, d_x)


# ---- operators and the compiler ----


def operators(device):
    (x, scale, zero_point, d_y), _ = fake_quantize_problem(device)
    leaves = [t.requires_grad_() for t in (x, scale, zero_point.float())]
    fields = (32, -8, 7, "group", -1)
    q, scales, biases, _ = affine_problem(device, "packed")
    y = torch.randn(6, 128, dtype=torch.float64, device=device)
    names = torch.ops.bittern
    return {
        "fake_quantize_per_group": (names.fake_quantize_per_group.default, (*leaves, *fields)),
        "fake_quantize_per_group_backward": (
            names.fake_quantize_per_group_backward.default,
            (d_y, *(t.detach() for t in leaves), *fields, [True, False, True]),
        ),
        "qdq_affine": (
            names.qdq_affine.default,
            (q, scales, biases, 32, 4, 0, "once", torch.float64),
        ),
        "qdq_affine_backward": (
            names.qdq_affine_backward.default,
            (y, q, scales.detach(), 32, 4, 0, [True, True]),
        ),
    }


@pytest.mark.parametrize(
    "name",
    [
        "fake_quantize_per_group",
        "fake_quantize_per_group_backward",
        "qdq_affine",
        "qdq_affine_backward",
    ],
)
def test_opcheck(device, name):
    operator, arguments = operators(device)[name]
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_whole_with_the_same_bits(device, backend, monkeypatch, tmp_path):
    # Inductor keeps graphs on disk and does not see that an op's arguments have changed since.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (x, scale, zero_point, d_y), fields = fake_quantize_problem(device)
    q, scales, biases, affine = affine_problem(device, "packed", "float32")

    def both(x, scale, zero_point, scales, biases):
        y = bittern.torch.fake_quantize_per_group(x, scale, zero_point, **fields)
        return y, bittern.torch.qdq_affine(q, scales, biases, **affine)

    torch.compiler.reset()
    results = []
    for function in (both, torch.compile(both, fullgraph=True, backend=backend)):
        starts = (x, scale, zero_point.float(), scales, biases)
        leaves = [t.detach().clone().requires_grad_() for t in starts]
        y, w = function(*leaves)
        torch.autograd.backward((y, w), (d_y, torch.ones_like(w)))
        results.append([y.detach(), w.detach(), *(leaf.grad for leaf in leaves)])
    assert all(same(a, b) for a, b in zip(*results))


# ---- training ----


def test_scales_learn(device):
    """From scales that clamp half of x, LSQ's gradient finds better ones."""
    x = torch.randn(8, 256, device=device)
    log_scale = torch.full((8, 4), -3.5, device=device, requires_grad=True)
    zero_point = torch.zeros(8, 4, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([log_scale, zero_point], lr=0.05)
    losses = []
    for _ in range(60):
        y = bittern.torch.fake_quantize_per_group(
            x, log_scale.exp(), zero_point, group_size=64, **RANGE
        )
        loss = (y - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("storage", ["u8", "packed"])
def test_affine_learns(device, storage):
    """Scales and biases of frozen codes find what least squares would."""
    w = torch.randn(8, 256, device=device)
    _, _, q = bittern.qdq_affine_init(w, group_size=64, bits=4, storage=storage)
    scales = torch.full((8, 4), 0.05, device=device, requires_grad=True)
    biases = torch.zeros(8, 4, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([scales, biases], lr=0.05)
    losses = []
    for _ in range(200):
        y = bittern.torch.qdq_affine(q, scales, biases, group_size=64, bits=4)
        loss = (y - w).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]


# ---- errors, and what is imported ----


def test_errors(device):
    (x, scale, _, _), fields = fake_quantize_problem(device)
    call = bittern.torch.fake_quantize_per_group
    with pytest.raises(ValueError, match=r"fake_quantize_per_group: scale: shape \[3,4,2\]"):
        call(x, scale[..., :2], **fields)
    with pytest.raises(ValueError, match="scale: dtype f64, expected f32"):
        call(x, scale.double(), **fields)
    with pytest.raises(ValueError, match="granularity: row, expected group, token"):
        call(x, scale, granularity="row")
    q, scales, biases, fields = affine_problem(device)
    with pytest.raises(ValueError, match="qdq_affine_forward: biases: shape"):
        bittern.torch.qdq_affine(q, scales, biases[:, :2], **fields)


@pytest.mark.parametrize("name", ["scale", "zero_point", "x"])
def test_a_meta_tensor_beside_others_is_an_error(name):
    (x, scale, zero_point, _), fields = fake_quantize_problem("cpu")
    tensors = {"x": x, "scale": scale, "zero_point": zero_point}
    tensors[name] = tensors[name].to("meta")
    with pytest.raises(Exception, match="fake_quantize_per_group: .*: on .*, expected"):
        bittern.torch.fake_quantize_per_group(**tensors, **fields)
    all_meta = {n: t.to("meta") for n, t in tensors.items()}
    assert bittern.torch.fake_quantize_per_group(**all_meta, **fields).is_meta
    q, scales, biases = torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 1), torch.ones(2, 1)
    with pytest.raises(Exception, match="qdq_affine: biases: on meta, expected cpu, where q is"):
        bittern.torch.qdq_affine(q, scales, biases.to("meta"), group_size=64, bits=4)


def test_tangents_are_not_dropped():
    (x, scale, _, _), fields = fake_quantize_problem("cpu")
    call = lambda x, s: bittern.torch.fake_quantize_per_group(x, s, **fields)  # noqa: E731
    message = "fake_quantize_per_group: x: has a tangent, and forward-mode"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(lambda x: call(x, scale), (x,), (x,))
    with pytest.raises(NotImplementedError, match="scale: has a tangent"):
        torch.func.jacfwd(lambda s: call(x, s))(scale)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match=message):
            call(dual, scale)
        call(x, scale)  # without a tangent
        with pytest.raises(NotImplementedError, match=message):
            torch.compile(call, backend="eager")(dual, scale)
        with pytest.raises(NotImplementedError, match="qdq_affine: biases: has a tangent"):
            scales = torch.ones(2, 1)
            biases = torch.autograd.forward_ad.make_dual(scales, scales)
            q = torch.zeros(2, 64, dtype=torch.uint8)
            torch.ops.bittern.qdq_affine(q, scales, biases, 64, 4, 0, "once", torch.float32)
        with pytest.raises(ValueError, match="fake_quantize_per_group: x: has a tangent, which"):
            bittern.fake_quantize_per_group(dual, scale, **fields)
        g = torch.ones(1, 4, 2, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="gdn_cumsum: g: has a tangent, which"):
            bittern.gdn_cumsum(torch.autograd.forward_ad.make_dual(g, g))
    q = torch.zeros(2, 64, dtype=torch.uint8)
    affine = lambda s: bittern.torch.qdq_affine(q, s, s, group_size=64, bits=4)  # noqa: E731
    with pytest.raises(NotImplementedError, match="qdq_affine: scales: has a tangent"):
        torch.func.jvp(affine, (torch.ones(2, 1),), (torch.ones(2, 1),))


def floating_operators():
    """Each operator as a function of its first floating tensor, and that tensor."""
    x, scale, codes = torch.randn(2, 64), torch.full((2, 1), 0.1), torch.zeros(2, 64, dtype=torch.uint8)
    ops, rule, grid = torch.ops.bittern, (64, -8, 7, "group", -1), (64, 4, 0)
    q, g, weight = torch.randn(1, 5, 2, 8), torch.zeros(1, 5, 2), torch.ones(8)
    delta = (q, q, g, g, None, None, None, None, 0.0, 64, False, False, False, False, "exact")
    return {
        "fake_quantize_per_group: x": (lambda x: ops.fake_quantize_per_group(x, scale, None, *rule), x),
        "fake_quantize_per_group_backward: d_y": (
            lambda d_y: ops.fake_quantize_per_group_backward(d_y, x, scale, None, *rule, [True] * 3),
            x,
        ),
        "qdq_affine: scales": (
            lambda s: ops.qdq_affine(codes, s, scale, *grid, "once", torch.float32),
            scale,
        ),
        "qdq_affine_backward: d_y": (
            lambda d_y: ops.qdq_affine_backward(d_y, codes, scale, *grid, [True] * 2),
            x,
        ),
        "gated_delta_rule: q": (lambda q: ops.gated_delta_rule(q, *delta, False, False)[0], q),
        "gated_delta_rule_backward: d_o": (
            lambda d_o: ops.gated_delta_rule_backward(d_o, None, q, *delta, [True] * 5 + [False] * 3)[0],
            q,
        ),
        "causal_conv1d: x": (
            lambda x: ops.causal_conv1d(x, torch.ones(8, 4), None, None, None, True, False)[0],
            q[:, :, 0],
        ),
        "causal_conv1d_backward: d_y": (
            lambda d_y: ops.causal_conv1d_backward(
                d_y, None, d_y, torch.ones(8, 4), None, None, None, True, [True, True, False, False]
            )[0],
            q[:, :, 0],
        ),
        "gated_rms_norm: x": (lambda x: ops.gated_rms_norm(x, q, weight, 1e-6, "once"), q),
        "gated_rms_norm_backward: d_y": (
            lambda d_y: ops.gated_rms_norm_backward(d_y, q, q, weight, 1e-6, [True] * 3)[0],
            q,
        ),
    }


@pytest.mark.parametrize("number", range(10))  # names are known only where torch is
def test_no_operator_drops_a_tangent(number):
    table = floating_operators()
    assert len(table) == 10
    where, (call, at) = list(table.items())[number]
    refused = pytest.raises(NotImplementedError, match=f"{where}: has a tangent, and forward-mode")
    with refused:
        torch.func.jvp(call, (at,), (at,))
    with refused:
        torch.func.jacfwd(call)(at)
    with refused:
        torch.func.jvp(torch.compile(call, backend="eager"), (at,), (at,))
    with refused:
        torch.compile(lambda at: torch.func.jvp(call, (at,), (at,)), backend="eager")(at)
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        call(at)
        with refused:
            call(torch.autograd.forward_ad.make_dual(at, at))


def test_a_zero_point_that_is_nan_shows():
    x, scale = torch.randn(2, 128), torch.full((2, 2), 0.1, requires_grad=True)
    zero_point = torch.tensor([[1.0, torch.nan], [2.0, 3.0]], requires_grad=True)
    y = bittern.torch.fake_quantize_per_group(x, scale, zero_point, group_size=64)
    y.sum().backward()
    assert y.isnan().sum() == 64 and y[0, 64:].isnan().all()
    assert not y[1].isnan().any() and scale.grad[0, 1] == 0  # as beside a scale that is NaN
    with pytest.raises(ValueError, match="qdq_affine: scales: shape .., expected an entry per group"):
        q = torch.zeros(64, dtype=torch.uint8)
        bittern.torch.qdq_affine(q, torch.tensor(1.0), torch.tensor(1.0), group_size=64, bits=4)


def test_lazy_views_are_resolved():
    (_, scale, _, _), fields = fake_quantize_problem("cpu")
    x = torch.complex(torch.randn(3, 4, 128), torch.randn(3, 4, 128)).conj().imag
    assert x.is_neg()
    y = bittern.torch.fake_quantize_per_group(x, scale, **fields)
    assert same(y, bittern.torch.fake_quantize_per_group(x.resolve_neg(), scale, **fields))


def test_bittern_does_not_import_torch():
    code = "import bittern, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ}).returncode == 0


# ---- what readers copy ----


def test_the_page_runs():
    page = (ROOT / "docs" / "torch.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert blocks
    for block in blocks:
        exec(block, {})


def test_the_example_runs(device):
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "learn_scales.py", device.type],
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(bittern.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---- CUDA tensors ----


def test_cuda_tensors_are_not_copied(cuda):
    from bittern import _bittern

    x = torch.randn(3, 8, device=cuda)
    tensor = _bittern.Tensor("op: x", x)
    assert tensor.address == x.data_ptr() and tensor.device == "cuda:0"
    q = bittern.quantize_per_group(x, 0.1, group_size=8)
    assert q.device == x.device and q.dtype == torch.int8


def test_devices_are_not_mixed(cuda):
    x, scale = torch.randn(3, 64), torch.ones(3, 1)
    call = bittern.quantize_per_group
    with pytest.raises(ValueError, match="quantize_per_group: scale: on cpu, expected cuda:0"):
        call(x.to(cuda), scale, group_size=64)
    with pytest.raises(ValueError, match="quantize_per_group: scale: on cuda:0, expected cpu"):
        call(x, scale.to(cuda), group_size=64)
    plan = bittern.plan("quantize_per_group", outer_size=3, axis_size=64, group_size=64)
    q = torch.zeros(3, 64, dtype=torch.int8)
    with pytest.raises(ValueError, match="quantize_per_group: x: on cuda:0, expected cpu"):
        plan.run(x=x.to(cuda), scale=scale, q=q)
    with pytest.raises(ValueError, match="fake_quantize_per_group: scale: on cpu"):
        bittern.torch.fake_quantize_per_group(x.to(cuda), scale, group_size=64)


def busy(stream):
    """Work that keeps a stream for some milliseconds."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)


def test_work_goes_to_torchs_current_stream(cuda):
    """x is ready late, on a stream of its own: only work behind it on that stream sees it."""
    values = torch.randn(64, 4096, device=cuda)
    expected = bittern.quantize_per_group(values, 0.05, group_size=128)
    stream = torch.cuda.Stream(cuda)
    x = torch.zeros_like(values)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        busy(stream)
        x.copy_(values)
        q = bittern.quantize_per_group(x, 0.05, group_size=128)
        later = q.clone()
    stream.synchronize()
    assert torch.equal(later, expected)


@pytest.mark.parametrize("kind", [lambda s: s, lambda s: s.cuda_stream], ids=["torch", "int"])
def test_another_stream_waits_for_the_current_one(cuda, kind):
    values = torch.randn(64, 4096, device=cuda)
    scale = torch.full((64, 32), 0.05, device=cuda)
    expected = bittern.quantize_per_group(values, scale, group_size=128)
    current, other = torch.cuda.Stream(cuda), torch.cuda.Stream(cuda)
    x = torch.zeros_like(values)
    torch.cuda.synchronize()
    with torch.cuda.stream(current):
        busy(current)
        x.copy_(values)
        q = bittern.quantize_per_group(x, scale, group_size=128, stream=kind(other))
        del x  # its memory must not be handed out before `other` has read it
        torch.zeros_like(values)
    other.synchronize()
    assert torch.equal(q, expected)
    plan = bittern.plan(
        "quantize_per_group", outer_size=64, axis_size=4096, group_size=128, device="cuda:0"
    )
    again = torch.zeros_like(q)
    torch.cuda.synchronize()
    plan.run(x=values, scale=scale, q=again, stream=kind(other))
    other.synchronize()
    assert torch.equal(again, expected)


def test_scratch_comes_from_torch(cuda):
    """An op with a workspace on CUDA runs without being given one, by function and by plan."""
    op, fields = "fake_quantize_per_group_backward", {"granularity": "tensor", **RANGE}
    d_y, x = (torch.randn(512, 1024, device=cuda) for _ in range(2))
    scale = torch.full((1,), 0.2, device=cuda)
    results = bittern.fake_quantize_per_group_backward(d_y, x, scale, **fields)
    expected = bittern.fake_quantize_per_group_backward(d_y.cpu(), x.cpu(), scale.cpu(), **fields)
    assert all(same(a.cpu(), b) for a, b in zip(results, expected))
    plan = bittern.plan(op, outer_size=512, axis_size=1024, device="cuda:0", **fields)
    d_scale = torch.zeros(1, device=cuda)
    plan.run(d_y=d_y, x=x, scale=scale, d_scale=d_scale)
    assert same(d_scale.cpu(), expected[1])


def test_a_graph_captures_a_training_step(cuda):
    (x, scale, zero_point, d_y), fields = fake_quantize_problem(cuda)
    leaves = [t.requires_grad_() for t in (x, scale, zero_point.float())]

    def step():
        y = bittern.torch.fake_quantize_per_group(*leaves, **fields)
        return y, *torch.autograd.grad(y, leaves, d_y)

    captured, plain = replayed(step, x, cuda)
    assert all(same(a.detach(), b.detach()) for a, b in zip(captured, plain))


def test_what_cannot_be_a_result_is_told_before_it_is_made():
    q, scales = torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 1)
    for group_size in (-64, 0, 2**40):
        with pytest.raises(ValueError, match=f"qdq_affine_forward: group_size: {group_size}, expected 2..1024"):
            bittern.torch.qdq_affine(q, scales, scales, group_size=group_size, bits=4)
    with pytest.raises((ValueError, NotImplementedError), match="qdq_affine_forward: element: s32, expected"):
        bittern.torch.qdq_affine(q, scales, scales, group_size=64, bits=4, dtype=torch.int32)
    half = bittern.torch.qdq_affine(q, scales, scales, group_size=64, bits=4, dtype=torch.float16)
    assert half.dtype == torch.float16 and half.shape == (2, 64)
    with pytest.raises(ValueError, match="layout torch.sparse_coo, expected torch.strided"):
        bittern.torch.fake_quantize_per_group(torch.ones(2, 64).to_sparse(), scales, group_size=64)
