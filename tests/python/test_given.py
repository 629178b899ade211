"""What the functions make of the arrays, numbers and keywords that they are given."""

import importlib.util
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from arrays import assert_same_bits, from_f32

import bittern

rng = np.random.default_rng(6)
BITS = 4
PACKAGE = str(pathlib.Path(bittern.__file__).parents[1])


def tables(dim=64, bits=BITS):
    levels, boundaries = bittern.sphere_codebook(dim, bits)
    return bittern.make_rotation("hadamard", dim, 1), boundaries, levels


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


def gdn_problem(b=2, t=5, kh=2, vh=4, kd=16, vd=8):
    q, k = normal(b, t, kh, kd), normal(b, t, kh, kd)
    g, beta = -rng.random((b, t, vh)).astype(np.float32), rng.random((b, t, vh)).astype(np.float32)
    return {"q": q, "k": k, "v": normal(b, t, vh, vd), "g": g, "beta": beta}


# ---- too few axes ----


def test_one_row_is_one_row():
    x = normal(3, 64)
    signs, boundaries, levels = tables()
    packed, norms = bittern.aura_encode(x, signs, boundaries, levels)
    one, norm = bittern.aura_encode(x[1], signs, boundaries, levels)
    assert one.shape == (8,) and norm.shape == (1,)
    assert np.array_equal(one, packed[1]) and np.array_equal(norm, norms[1])
    y = bittern.aura_decode(packed, norms, signs, levels)
    assert_same_bits(bittern.aura_decode(one, norm, signs, levels), y[1])
    assert_same_bits(bittern.aura_rotate(x[1], signs), bittern.aura_rotate(x, signs)[1])
    weight, z = normal(64), normal(3, 64)
    all_rows = bittern.gated_rms_norm(x, z, weight)
    assert_same_bits(bittern.gated_rms_norm(x[2], z[2], weight), all_rows[2])
    dx, dz, _ = bittern.gated_rms_norm_backward(x[2], z[2], weight, x[0])
    assert dx.shape == dz.shape == (64,)
    # Norms are a column, whether it has an axis of its own or not.
    assert_same_bits(bittern.aura_decode(packed, norms[:, 0].copy(), signs, levels), y)


@pytest.mark.parametrize("axes", [0, 1, 2])
def test_a_missing_axis_is_an_error(axes):
    weight = normal(8, 4)
    x = normal(*(5, 8)[2 - axes :])
    with pytest.raises(ValueError, match=r"causal_conv1d: x: shape .* expected 3 axes: \[batch, tokens, channels\]"):
        bittern.causal_conv1d(x, weight)
    c = gdn_problem()
    inputs = {n: a[0] for n, a in c.items()}
    for op, more in (
        ("gdn_chunk_forward", {}),
        ("gdn_recurrent_step", {"state": np.zeros((2, 4, 16, 8), np.float32)}),
    ):
        with pytest.raises(ValueError, match=r"q: shape \[5, 2, 16\], expected 4 axes: \[batch, tokens, key_heads, key_dim\]"):
            getattr(bittern, op)(**inputs, **more)


SMALL = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "u8": np.uint8, "s8": np.int8}
SMALL |= {"s32": np.int32, "u32": np.uint32, "bf16": np.uint16}


@pytest.mark.parametrize("op", [o.name for o in bittern.ops()])
def test_no_op_makes_nothing_of_a_flat_array(op):
    """Every required input as one axis: a result with elements, or an error that names the op."""
    table = next(o for o in bittern.ops() if o.name == op)
    required = [o for o in table.operands if (not o.output or o.in_out) and not o.optional]
    flat = {o.name: np.ones(64, SMALL[o.dtype]) for o in required}
    try:
        result = getattr(bittern, op)(**flat)
    except (ValueError, NotImplementedError, TypeError) as error:
        assert str(error).startswith(op)
        return
    for array in result if isinstance(result, tuple) else (result,):
        assert array.size > 0


# ---- operands that are not read ----


def test_what_is_not_read_must_not_be_given():
    c = gdn_problem()
    gate = {"a_log": np.zeros(4, np.float32), "dt_bias": np.zeros(4, np.float32)}
    message = "a_log: given, but read only with gate; leave it out"
    with pytest.raises(ValueError, match="gdn_chunk_forward: " + message):
        bittern.gdn_chunk_forward(**c, **gate)
    with pytest.raises(ValueError, match="gdn_recurrent_step: " + message):
        bittern.gdn_recurrent_step(**c, **gate, state=np.zeros((2, 4, 16, 8), np.float32))
    with pytest.raises(ValueError, match="gdn_cumsum: dt_bias: given, but read only with gate"):
        bittern.gdn_cumsum(c["g"], dt_bias=gate["dt_bias"])
    with pytest.raises(ValueError, match="a_log: given, but read only with gate"):
        bittern.gdn_chunk_forward(**c, a_log=0.5)  # a number is given too
    x = normal(2, 64)
    signs, boundaries, levels = tables()
    with pytest.raises(ValueError, match="aura_encode: table: given, but read only with a hadamard"):
        bittern.aura_encode(x, signs, boundaries, levels, rotation="identity")
    with pytest.raises(ValueError, match="importance: given, but read only with method lsq"):
        bittern.qdq_affine_init(x, np.ones(64, np.float32))
    with pytest.raises(ValueError, match="importance: given, but read only with"):
        bittern.gguf_quantize(x, np.ones(64, np.float32), type="Q4_0")
    with pytest.raises(ValueError, match="gguf_quantize: scales: given, but read only with given_grid"):
        bittern.gguf_quantize(normal(2, 256), scales=normal(2, 8), type="Q4_K")
    with pytest.raises(ValueError, match="state_index: given, but read only with pool"):
        bittern.gdn_recurrent_step(
            **c, state=np.zeros((2, 4, 16, 8), np.float32), state_index=np.array([0, 1]), pool=0
        )


# ---- outputs ----


def test_extras_are_made_when_asked_for():
    c, state = gdn_problem(), np.zeros((2, 4, 16, 8), np.float32)
    o = bittern.gdn_recurrent_step(**c, state=state.copy())
    assert o.shape == (2, 5, 4, 8)  # and nothing else
    again, snapshots = bittern.gdn_recurrent_step(**c, state=state, snapshots=True)
    assert_same_bits(o, again)
    assert snapshots.shape == (2, 5, 4, 16, 8) and np.array_equal(snapshots[:, -1], state)
    mine = np.zeros_like(snapshots)
    assert bittern.gdn_recurrent_step(**c, state=state, snapshots=mine)[1] is mine
    marked = {op.name: [o.name for o in op.operands if o.extra] for op in bittern.ops()}
    assert {k: v for k, v in marked.items() if v} == {"gdn_recurrent_step": ["snapshots"]}
    q = rng.integers(-8, 8, (3, 64)).astype(np.int8)
    for asked in (True, None):
        both = bittern.dequantize_per_group_backward(
            normal(3, 64), q, normal(3, 2), group_size=32, dq=asked
        )
        assert len(both) == 2
    with pytest.raises(ValueError, match="zero_point: given, but this problem has no such operand"):
        bittern.dynamic_quantize(normal(3, 64), group_size=32, zero_point=True)


# ---- numbers ----


@pytest.mark.parametrize("value", [2.7, 2.0, np.float32(2), float("nan"), float("inf"), "2"])
def test_numbers_for_integers_are_integers(value):
    with pytest.raises(ValueError, match="quantize_per_group: zero_point: .*expected an"):
        bittern.quantize_per_group(normal(2, 64), 0.1, value, group_size=64)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 10**30])
def test_numbers_fit_their_dtype(value):
    with pytest.raises(ValueError, match=r"zero_point: -?\d+, expected -2147483648..2147483647"):
        bittern.quantize_per_group(normal(2, 64), 0.1, value, group_size=64)
    with pytest.raises(ValueError, match="scale: .*f16"):
        bittern.quantize_per_group(normal(2, 64).astype(np.float16), 1e6, group_size=64)
    with pytest.raises(ValueError, match="scale: .* f32"):
        bittern.quantize_per_group(normal(2, 64), 10**400, group_size=64)


@pytest.mark.parametrize("kind", [int, np.int64, np.uint8, np.int32])
def test_numpys_numbers_are_numbers(kind):
    x = normal(2, 64)
    expected = bittern.quantize_per_group(x, 0.125, 3, group_size=64)
    for scale in (np.float32(0.125), np.float64(0.125), np.float16(0.125)):
        got = bittern.quantize_per_group(x, scale, kind(3), group_size=kind(64), axis=np.int64(-1))
        assert np.array_equal(got, expected)
    symmetric = bittern.dynamic_quantize(x, group_size=32, symmetric=np.bool_(True))
    assert len(symmetric) == 2
    assert len(bittern.dynamic_quantize(x, group_size=32, symmetric=np.False_)) == 3
    weight, z = normal(64), normal(2, 64)
    told = bittern.gated_rms_norm(x, z, weight, eps=np.float32(0.5))
    assert_same_bits(told, bittern.gated_rms_norm(x, z, weight, eps=0.5))
    assert_same_bits(bittern.gated_rms_norm(x, z, weight, eps=np.int64(1)),
                     bittern.gated_rms_norm(x, z, weight, eps=1))  # fmt: skip
    bittern.plan("quantize_per_group", outer_size=kind(2), axis_size=kind(128))


@pytest.mark.parametrize("value", ["16", 16.0, np.float32(16), True, np.True_, None.__class__, [16]])
def test_integers_are_integers(value):
    x, scale = normal(2, 64), np.ones((2, 4), np.float32)
    bittern.quantize_per_group(x, scale, group_size=16)  # which the cache of plans remembers
    with pytest.raises(ValueError, match="quantize_per_group: group_size: .*, expected an integer"):
        bittern.quantize_per_group(x, scale, group_size=value)
    with pytest.raises(ValueError, match="quantize_per_group: group_size: .*, expected an integer"):
        bittern.plan("quantize_per_group", group_size=value)


# ---- keywords and fields ----


def test_unknown_keywords():
    x = normal(2, 64)
    with pytest.raises(TypeError, match="quantize_per_group: .*'groupsize'; did you mean 'group_size'"):
        bittern.quantize_per_group(x, 1.0, groupsize=64)
    with pytest.raises(TypeError, match="quantize_per_group: .*'dtype'; expected one of x scale"):
        bittern.quantize_per_group(x, 1.0, dtype="u8")
    with pytest.raises(ValueError, match="no arrays, expected at least one of x scale zero_point$"):
        bittern.quantize_per_group(None, 1.0)
    with pytest.raises(TypeError, match="aura_rotate: .*'inversed'; did you mean 'inverse'"):
        bittern.aura_rotate(x, x, inversed=True)
    with pytest.raises(TypeError, match="quantize_per_group: missing a required argument: 'scale'"):
        bittern.quantize_per_group(x)
    with pytest.raises(ValueError, match=r"no field groupsize \(did you mean group_size\?\)"):
        bittern.plan("quantize_per_group", groupsize=64)


def test_dtypes_by_any_name():
    x = normal(2, 64)
    for name in ("u8", "uint8", np.uint8, np.dtype("uint8")):
        q = bittern.quantize_per_group(x, 1.0, group_size=64, q_min=0, q_max=9, code=name)
        assert q.dtype == np.uint8
    assert bittern.plan("quantize_per_group", element="float16").sku.element == "f16"
    with pytest.raises(ValueError, match="code: int9, expected u8 or s8"):
        bittern.quantize_per_group(x, 1.0, group_size=64, code="int9")
    with pytest.raises(NotImplementedError, match="code: s32, expected s8 or u8"):
        bittern.quantize_per_group(x, 1.0, group_size=64, code="int32")


def test_groups_lie_along_the_last_axis():
    x = normal(64, 8)
    with pytest.raises(ValueError, match=r"quantize_per_group: axis: 0 of shape \[64, 8\], expected the last"):
        bittern.quantize_per_group(x, 1.0, axis=0, group_size=64)
    assert bittern.quantize_per_group(x[:, :1].copy(), 1.0, axis=0, group_size=64).shape == (64, 1)
    with pytest.raises(ValueError, match="axis: '0', expected an integer"):
        bittern.quantize_per_group(x, 1.0, axis="0", granularity="channel")


def test_shapes_come_with_their_reason():
    x = normal(2, 64)
    signs, boundaries, levels = tables(bits=2)
    with pytest.raises(ValueError, match=r"boundaries: shape \[3\], expected \[15\] \(bits=4\)"):
        bittern.aura_encode(x, signs, boundaries, levels)
    dense = bittern.make_rotation("dense", 64)
    with pytest.raises(ValueError, match=r"table: shape \[64,64\], expected \[64\] \(.*rotation=hadamard"):
        bittern.aura_rotate(x, dense)
    with pytest.raises(NotImplementedError, match="element: f64, expected f32.*: pass float32"):
        bittern.aura_rotate(x.astype(np.float64), signs)
    c = gdn_problem()
    with pytest.raises(ValueError, match="beta: dtype f64, expected f32 .*pass float32"):
        bittern.gdn_chunk_forward(**{**c, "beta": c["beta"].astype(np.float64)})


# ---- what frameworks hand over ----


@pytest.mark.parametrize("kind", [np.int64, np.int16, np.uint8, np.uint64])
def test_integers_of_any_width(kind):
    c = gdn_problem(b=1, t=20)
    o, state = bittern.gdn_chunk_forward(**c, cu_seqlens=np.array([0, 7, 20], np.int32))
    got = bittern.gdn_chunk_forward(**c, cu_seqlens=np.array([0, 7, 20], kind))
    assert_same_bits(got[0], o) and assert_same_bits(got[1], state)
    x, scale = normal(2, 64), np.ones((2, 1), np.float32)
    zero_point = np.array([[3], [5]])
    expected = bittern.quantize_per_group(x, scale, zero_point.astype(np.int32), group_size=64)
    got = bittern.quantize_per_group(x, scale, zero_point.astype(kind), group_size=64)
    assert np.array_equal(got, expected)


def test_integers_out_of_range():
    x, scale = normal(2, 64), np.ones((2, 1), np.float32)
    for bad in (2**31, -(2**40)):
        with pytest.raises(ValueError, match=f"zero_point: holds {bad}, expected integers that fit int32"):
            bittern.quantize_per_group(x, scale, np.array([[3], [bad]]), group_size=64)
    with pytest.raises(ValueError, match="zero_point: dtype f64, expected s32"):
        bittern.quantize_per_group(x, scale, np.zeros((2, 1)), group_size=64)


@pytest.mark.parametrize("kind", [np.bool_, np.int64, np.int32])
def test_masks(kind):
    c = gdn_problem(t=20)
    mask = rng.integers(0, 2, (2, 20)).astype(np.uint8)
    o, state = bittern.gdn_chunk_forward(**c, mask=mask)
    got = bittern.gdn_chunk_forward(**c, mask=mask.astype(kind) * (256 if kind == np.int64 else 1))
    assert_same_bits(got[0], o) and assert_same_bits(got[1], state)
    x, weight = normal(2, 20, 8), normal(8, 4)
    assert_same_bits(
        bittern.causal_conv1d(x, weight, mask=mask.astype(kind))[0],
        bittern.causal_conv1d(x, weight, mask=mask)[0],
    )
    with pytest.raises(ValueError, match="mask: dtype f32, expected u8"):
        bittern.gdn_chunk_forward(**c, mask=mask.astype(np.float32))  # perhaps an additive one


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_gates_are_widened(kind):
    c = gdn_problem(t=20)
    half = {n: from_f32(c[n], kind) for n in ("g", "beta")}
    wide = {n: (a.bits.astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else a.astype(np.float32)
            for n, a in half.items()}  # fmt: skip
    got, expected = (bittern.gdn_chunk_forward(**{**c, **g}) for g in (half, wide))
    assert_same_bits(got[0], expected[0]) and assert_same_bits(got[1], expected[1])
    assert bittern.gdn_cumsum(half["g"]).dtype == np.float32
    states = [np.zeros((2, 4, 16, 8), np.float32) for _ in range(2)]
    got, expected = (
        bittern.gdn_recurrent_step(**{**c, **g}, state=s) for g, s in zip((half, wide), states)
    )
    assert_same_bits(got, expected)


def test_a_negative_index_skips():
    c, pool = gdn_problem(b=3), normal(2, 4, 16, 8)
    state = pool.copy()
    o = bittern.gdn_recurrent_step(**c, state=state, state_index=np.array([1, -1, 0]))
    one = pool[[1, 0]].copy()
    two = {n: np.ascontiguousarray(a[[0, 2]]) for n, a in c.items()}
    assert_same_bits(o[[0, 2]], bittern.gdn_recurrent_step(**two, state=one))
    assert np.all(o[1] == 0) and np.array_equal(state, one[[1, 0]])
    states, same_size = [pool.copy(), pool[[1, 0]]], {n: a[:2] for n, a in c.items()}
    bittern.gdn_recurrent_step(**same_size, state=states[0], state_index=np.array([1, 0]))
    bittern.gdn_recurrent_step(**same_size, state=states[1])
    assert np.array_equal(states[0], states[1][[1, 0]])  # a pool as large as the batch
    with pytest.raises(ValueError, match=r"state_index: \[1\] is -2, expected 0..1, or -1 to skip"):
        bittern.gdn_recurrent_step(**c, state=state, state_index=np.array([1, -2, 0]))


# ---- strides ----


def test_slices_of_one_projection():
    """q, k and v as a linear layer gives them, and gradients that go back into one array."""
    b, t, kh, vh, kd, vd = 2, 20, 2, 4, 16, 8
    widths = (kh * kd, kh * kd, vh * vd)
    ends = np.cumsum(widths)
    whole = normal(b, t, ends[-1])
    shapes = ((b, t, kh, kd), (b, t, kh, kd), (b, t, vh, vd))

    def cut(a):
        return [a[..., e - w : e].reshape(s) for e, w, s in zip(ends, widths, shapes)]

    views = cut(whole)
    assert all(v.base is not None for v in views)
    c = gdn_problem(t=t)
    gates = {"g": c["g"], "beta": c["beta"]}
    names = ("q", "k", "v")
    strided, dense = dict(zip(names, views)), {n: v.copy() for n, v in zip(names, views)}
    for got, expected in zip(
        bittern.gdn_chunk_forward(**strided, **gates), bittern.gdn_chunk_forward(**dense, **gates)
    ):
        assert_same_bits(got, expected)
    d_o, out = normal(b, t, vh, vd), np.zeros_like(whole)
    expected = bittern.gdn_chunk_backward(**dense, **gates, d_o=d_o)
    d_q, d_k, d_v = cut(out)
    bittern.gdn_chunk_backward(**strided, **gates, d_o=d_o, d_q=d_q, d_k=d_k, d_v=d_v)
    for got, want in zip(cut(out), expected):
        assert_same_bits(got.copy(), want)
    states = [np.zeros((b, vh, kd, vd), np.float32) for _ in range(2)]
    assert_same_bits(
        bittern.gdn_recurrent_step(**strided, **gates, state=states[0]),
        bittern.gdn_recurrent_step(**dense, **gates, state=states[1]),
    )


def test_transposed_layouts():
    """transformers keeps heads before tokens."""
    c = gdn_problem(t=20)
    turned = {n: np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2) for n, a in c.items()}
    assert turned["g"].strides[2] != 4
    expected = bittern.gdn_chunk_forward(**c)
    out = np.zeros((2, 4, 20, 8), np.float32)
    got = bittern.gdn_chunk_forward(**turned, o=out.swapaxes(1, 2))
    assert_same_bits(out.swapaxes(1, 2).copy(), expected[0])
    assert_same_bits(got[1], expected[1])
    bad = np.zeros((2, 1, 20, 8), np.float32)
    with pytest.raises(NotImplementedError, match="o: stride 0 of axis 2, expected at least"):
        bittern.gdn_chunk_forward(**c, o=np.lib.stride_tricks.as_strided(
            bad, (2, 20, 4, 8), (640, 32, 0, 4)))  # fmt: skip


def test_rows_as_several_axes():
    signs, boundaries, levels = tables()
    x = normal(2, 7, 3, 64)  # batch, tokens, heads
    turned = x.swapaxes(1, 2)
    packed, norms = bittern.aura_encode(turned.copy(), signs, boundaries, levels)
    for got, want in zip(bittern.aura_encode(turned, signs, boundaries, levels), (packed, norms)):
        assert_same_bits(got, want)
    cache, scales = np.zeros((2, 3, 20, 8), np.uint32), np.zeros((2, 3, 20), np.float32)
    bittern.aura_encode(
        turned, signs, boundaries, levels, packed=cache[:, :, 5:12], norms=scales[:, :, 5:12]
    )
    assert np.array_equal(cache[:, :, 5:12], packed)
    assert np.array_equal(scales[:, :, 5:12], norms[..., 0])
    cache[:, :, 5:12], scales[:, :, 5:12] = 0, 0
    assert not cache.any() and not scales.any()  # nothing outside was written
    cache[:, :, 5:12], scales[:, :, 5:12] = packed, norms[..., 0]
    y = bittern.aura_decode(packed, norms, signs, levels)
    assert_same_bits(bittern.aura_decode(cache[:, :, 5:12], scales[:, :, 5:12], signs, levels), y)
    out = np.zeros((2, 7, 3, 64), np.float32)
    bittern.aura_rotate(turned, signs, y=out.swapaxes(1, 2))
    assert_same_bits(out, bittern.aura_rotate(x, signs))
    z, weight = normal(2, 3, 7, 64), normal(64)
    assert_same_bits(
        bittern.gated_rms_norm(turned, z, weight), bittern.gated_rms_norm(turned.copy(), z, weight)
    )


@pytest.mark.peer("torch")
@pytest.mark.parametrize("kernel", ["ref", "cpu"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_convolution_takes_slices(kernel, packed, dtype):
    """x and y as slices of wider rows, states as transformers (one input longer) and vLLM (channels
    last) have them."""
    to = getattr(torch, dtype)
    b, t, c, n = (1, 90, 21, 3) if packed else (3, 70, 21, 3)
    rng = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(*shape, generator=rng).to(to)  # noqa: E731
    mask = torch.ones(b, t, dtype=torch.uint8)
    mask[0, 4:7] = 0
    bounds = torch.tensor([0, 2, 2, t], dtype=torch.int32) if packed else None
    common = {"mask": mask, "cu_seqlens": bounds, "kernel": kernel, "bias": normal(c)}
    weight = normal(c, 4)
    whole, cache, last = normal(b, t, 3 * c), normal(n, c, 4), normal(n, 3, c)
    views = {"x": whole[..., c : 2 * c], "initial_state": cache[..., 1:]}
    dense = {name: v.contiguous() for name, v in views.items()}
    assert not any(v.is_contiguous() for v in views.values())
    y, final = bittern.causal_conv1d(weight=weight, **dense, **common)
    rows, states = normal(b, t, 2 * c), normal(n, 3, c)
    before = rows.clone()
    bittern.causal_conv1d(
        weight=weight, **views, **common, y=rows[..., 1 : c + 1], final_state=states.mT
    )
    assert torch.equal(rows[..., 1 : c + 1], y) and torch.equal(states.mT, final)
    assert torch.equal(rows[..., c + 1 :], before[..., c + 1 :])
    assert torch.equal(rows[..., :1], before[..., :1])
    # Tokens before the batch, and every second token.
    turned = views["x"].transpose(0, 1).contiguous().transpose(0, 1)
    sparse = normal(b, 2 * t, c)[:, ::2].copy_(dense["x"])
    for x in (turned, sparse):
        got = bittern.causal_conv1d(x, weight, initial_state=dense["initial_state"], **common)
        assert torch.equal(got[0], y) and torch.equal(got[1], final)
    dy, d_final = whole[..., 2 * c :], last.mT
    grads = bittern.causal_conv1d_backward(
        weight=weight, dy=dy.contiguous(), d_final_state=d_final.contiguous(), **dense, **common
    )
    dx, d_initial = torch.empty(t, b, c + 3, dtype=to), torch.empty(n, c, 5, dtype=to)
    got = bittern.causal_conv1d_backward(
        weight=weight, dy=dy, d_final_state=d_final, **views, **common,
        dx=dx.transpose(0, 1)[..., 2:-1], d_initial_state=d_initial[..., 1:4],
    )  # fmt: skip
    for a, want in zip(got, grads):
        assert torch.equal(a, want)
    with pytest.raises(NotImplementedError, match="causal_conv1d: x: stride 2 of axis 2, expected 1"):
        bittern.causal_conv1d(whole[..., : 2 * c : 2], weight, cu_seqlens=bounds)


@pytest.mark.parametrize("kernel", ["ref", "cpu"])
@pytest.mark.parametrize("layout", ["key_value", "value_key"])
def test_states_may_be_slices(kernel, layout):
    """Of a pool that has all layers, and of larger rows."""
    c = gdn_problem(t=3)
    b, heads, rows, columns = 2, 4, *((16, 8) if layout == "key_value" else (8, 16))
    pool = normal(6, 3, heads + 1, rows + 2, columns + 3)
    part = pool[:, 1, 1:, 1:-1, 2:-1]
    index = np.array([4, -1], np.int64)
    common = {"state_layout": layout, "kernel": kernel}
    snapshots = [np.zeros((b, 3, heads, rows, columns), np.float32) for _ in range(2)]
    expected, before = part.copy(), pool.copy()
    want = bittern.gdn_recurrent_step(
        **c, state=expected, state_index=index, snapshots=snapshots[0], **common
    )
    got = bittern.gdn_recurrent_step(
        **c, state=part, state_index=index, snapshots=snapshots[1], **common
    )
    assert_same_bits(got[0], want[0])
    assert_same_bits(*snapshots)
    assert_same_bits(part.copy(), expected)
    part[...] = before[:, 1, 1:, 1:-1, 2:-1]
    assert_same_bits(pool, before)  # nothing beside the slice was written
    # The whole sequence: states in and out, and their gradients.
    first, out = part[:b], np.zeros((b, heads, rows + 1, columns + 2), np.float32)
    o, final = bittern.gdn_chunk_forward(**c, initial_state=first.copy(), **common)
    last = out[..., :-1, 1:-1]
    got = bittern.gdn_chunk_forward(**c, initial_state=first, final_state=last, **common)
    assert_same_bits(got[0], o)
    assert_same_bits(last.copy(), final)
    given = {"d_o": normal(*o.shape), "d_final_state": part[2 : 2 + b]}
    want = bittern.gdn_chunk_backward(
        **c, initial_state=first.copy(), **{n: a.copy() for n, a in given.items()}, **common
    )
    got = bittern.gdn_chunk_backward(
        **c, initial_state=first, **given, d_initial_state=last, **common
    )
    for a, e in zip(got, want):
        assert_same_bits(a.copy(), e)


def test_attention_takes_strides():
    signs, boundaries, levels = tables(bits=4)
    s, heads, kv_heads, tokens, dim = 2, 4, 2, 6, 64
    k, v = normal(s, kv_heads, tokens, dim), normal(s, kv_heads, tokens, dim)
    codes = [bittern.aura_encode(a.reshape(s * kv_heads, tokens, dim), signs, boundaries, levels) for a in (k, v)]
    coded = {"k_codes": codes[0][0], "k_scales": codes[0][1][..., 0].copy(),
             "v_codes": codes[1][0], "v_scales": codes[1][1][..., 0].copy()}  # fmt: skip
    fixed = {"k_codebook": levels, "v_codebook": levels, "k_table": signs, "v_table": signs,
             "kv_heads": kv_heads, "capacity": tokens}  # fmt: skip
    q = normal(s, 3, heads, dim)
    recent = [normal(s, kv_heads, 5, dim) for _ in range(2)]
    expected = bittern.aura_attention(
        q, **coded, **fixed, k_recent=recent[0], v_recent=recent[1], exact="f32"
    )
    turned = [np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2) for a in recent]
    out = np.zeros((s, heads, 3, dim), np.float32)
    bittern.aura_attention(
        np.ascontiguousarray(q.swapaxes(1, 2)).swapaxes(1, 2), **coded, **fixed,
        k_recent=turned[0], v_recent=turned[1], exact="f32", out=out.swapaxes(1, 2),
    )  # fmt: skip
    assert_same_bits(out.swapaxes(1, 2).copy(), expected)


@pytest.mark.parametrize("s, heads, kv_heads", [(1, 4, 2), (2, 4, 2), (3, 6, 6), (3, 4, 1)])
def test_attention_finds_its_kv_heads(s, heads, kv_heads):
    """Rows of codes are sequences times kv_heads, and q has the sequences."""
    signs, boundaries, levels = tables(bits=4)
    tokens, dim = 6, 64
    codes = []
    for _ in range(2):
        packed, norms = bittern.aura_encode(
            normal(s * kv_heads, tokens, dim), signs, boundaries, levels
        )
        codes += [packed, norms[..., 0].copy()]
    recent = {"k_recent": normal(s, kv_heads, 5, dim), "v_recent": normal(s, kv_heads, 5, dim)}
    given = normal(s, 3, heads, dim), *codes, levels, levels, signs, signs
    expected = bittern.aura_attention(*given, **recent, exact="f32", kv_heads=kv_heads)
    assert_same_bits(bittern.aura_attention(*given, **recent, exact="f32"), expected)
    apart = [a.reshape(s, kv_heads, *a.shape[1:]) for a in codes]
    assert_same_bits(
        bittern.aura_attention(given[0], *apart, *given[5:], **recent, exact="f32"), expected
    )
    none = bittern.aura_attention(given[0][:0], *(a[:0] for a in codes), *given[5:])
    assert none.shape == (0, 3, heads, dim)
    if s > 1:
        pages = [np.zeros((s + 1, kv_heads, 16, *a.shape[2:]), a.dtype) for a in codes]
        with pytest.raises(ValueError, match="k_codes: .*page_size"):
            bittern.aura_attention(given[0], *pages, *given[5:])
        with pytest.raises(ValueError, match=r"k_codes: shape .* \(sequences=.*, kv_heads=1"):
            bittern.aura_attention(given[0], *(a[1:] for a in codes), *given[5:])


# ---- torch ----

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


# ---- numbers in arrays, options, and functions without arrays ----


@pytest.mark.parametrize("value", [-1.0, True, "1", None, [1], np.float32(1)])
def test_the_axis_is_an_integer(value):
    x, scale = normal(2, 64), np.ones(64, np.float32)
    for axis in (-1, 1):
        bittern.quantize_per_group(x, scale, granularity="channel", axis=axis)  # remembered
    with pytest.raises(ValueError, match="quantize_per_group: axis: .*, expected an integer"):
        bittern.quantize_per_group(x, scale, granularity="channel", axis=value)
    words = bittern.pack_codes(np.zeros((2, 64), np.uint8), bits=4)
    bittern.unpack_codes(words, axis_size=64, bits=4)
    with pytest.raises(ValueError, match="unpack_codes: axis_size: 64.0, expected an integer"):
        bittern.unpack_codes(words, axis_size=64.0, bits=4)


@pytest.mark.parametrize("value", [True, np.True_, 1.0, None.__class__, [0], np.ones(2)])
def test_fields_with_names_take_no_other_things(value):
    x = normal(2, 64)
    with pytest.raises(ValueError, match="quantize_per_group: code: .*, expected "):
        bittern.quantize_per_group(x, 1.0, group_size=64, code=value)
    with pytest.raises(ValueError, match="quantize_per_group: granularity: .*, expected one of group"):
        bittern.plan("quantize_per_group", granularity=value)
    for unclear in (2, 0.5, np.ones(2), [True]):
        with pytest.raises(ValueError, match="dynamic_quantize: symmetric: .*, expected True or False"):
            bittern.dynamic_quantize(x, group_size=64, symmetric=unclear)


@pytest.mark.parametrize("array", [np.array, "mlx", "torch"])
def test_an_array_without_axes_is_a_number_for_a_field(array):
    if isinstance(array, str):
        module = pytest.importorskip({"mlx": "mlx.core"}.get(array, array))
        array = module.tensor if array == "torch" else module.array
    x, z, weight = normal(2, 64), normal(2, 64), normal(64)
    told = bittern.gated_rms_norm(x, z, weight, eps=array(0.5))
    assert_same_bits(told, bittern.gated_rms_norm(x, z, weight, eps=0.5))
    expected = bittern.quantize_per_group(x, 0.125, group_size=32)
    assert np.array_equal(bittern.quantize_per_group(x, 0.125, group_size=array(32)), expected)
    assert len(bittern.dynamic_quantize(x, group_size=32, symmetric=array(False))) == 3
    for wrong in (array(32.0), array(True)):
        with pytest.raises(ValueError, match="group_size: .*, expected an integer"):
            bittern.quantize_per_group(x, 0.125, group_size=wrong)


@pytest.mark.parametrize("option", ["device", "preference", "kernel"])
@pytest.mark.parametrize("value", [0, b"cpu", ["cpu"], object()])
def test_options_are_text(option, value):
    x = normal(2, 64)
    for call in (
        lambda: bittern.quantize_per_group(x, 1.0, group_size=64, **{option: value}),
        lambda: bittern.plan("quantize_per_group", **{option: value}),
    ):
        with pytest.raises(ValueError, match=f"quantize_per_group: {option}: .*, expected "):
            call()
    with pytest.raises(ValueError, match="quantize_per_group: device: tpu, expected cpu"):
        bittern.plan("quantize_per_group", device="tpu")


@pytest.mark.parametrize("value", ["64", 64.0, None, True, [64], 2**70])
def test_tables_want_integers(value):
    for call, name in (
        (lambda: bittern.sphere_codebook(value, 4), "sphere_codebook: dim"),
        (lambda: bittern.sphere_codebook(64, value), "sphere_codebook: bits"),
        (lambda: bittern.gaussian_codebook(64, bits=value), "gaussian_codebook: bits"),
        (lambda: bittern.make_rotation("hadamard", value), "make_rotation: dim"),
        (lambda: bittern.make_rotation("hadamard", 64, value), "make_rotation: seed"),
        (lambda: bittern.set_num_threads(value), "set_num_threads: threads"),
    ):
        with pytest.raises(ValueError, match=f"{name}: .*, expected "):
            call()
    with pytest.raises(ValueError, match="make_rotation: seed: -1, expected 0"):
        bittern.make_rotation("hadamard", 64, -1)
    for wrong in ("Hadamard", 1, None):
        with pytest.raises(ValueError, match="make_rotation: rotation: .*, expected identity, hadamard"):
            bittern.make_rotation(wrong, 64)
    with pytest.raises(ValueError, match="op: 3, expected the name of an op"):
        bittern.plan(3)
    assert_same_bits(bittern.make_rotation("hadamard", np.int64(64), np.uint64(1)), tables()[0])


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


# ---- sizes and strides of small arrays ----


def test_small_arrays_may_have_any_strides():
    """As in vLLM, whose state indices are a column of a block table; int64 ones are copied anyway."""
    c, pool = gdn_problem(b=3, t=1), normal(4, 4, 16, 8)
    table = np.array([[2, 9], [0, 9], [3, 9]])
    for kind in (np.int32, np.int64):
        states = [pool.copy() for _ in range(2)]
        column = table.astype(kind)[:, 0]
        assert not column.flags.c_contiguous
        got = bittern.gdn_recurrent_step(**c, state=states[0], state_index=column)
        expected = bittern.gdn_recurrent_step(**c, state=states[1], state_index=column.copy())
        assert_same_bits(got, expected)
        assert_same_bits(*states)
    c = gdn_problem(t=20)
    mask = rng.integers(0, 2, (2, 40)).astype(np.uint8)
    for cut in (mask[:, :20], mask[:, ::2], mask[::-1, 20:], np.broadcast_to(mask[:1, :20], (2, 20))):
        got = bittern.gdn_chunk_forward(**c, mask=cut)
        expected = bittern.gdn_chunk_forward(**c, mask=np.array(cut, order="C"))
        assert_same_bits(got[0], expected[0])


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_offsets_with_an_axis_more(kind):
    c = gdn_problem(b=1, t=20)
    offsets = np.array([[0, 7, 20]], kind)
    o, state = bittern.gdn_chunk_forward(**c, cu_seqlens=offsets)
    expected = bittern.gdn_chunk_forward(**c, cu_seqlens=offsets[0])
    assert_same_bits(o, expected[0])
    assert state.shape == (2, 4, 16, 8)
    assert_same_bits(state, expected[1])


def test_a_block_table_tells_the_capacity():
    signs, boundaries, levels = tables(bits=4)
    s, kv_heads, tokens, page = 2, 2, 40, 16
    block_table = np.array([[2, 0, 5], [1, 3, 4]])
    flat, paged = {}, {}
    for name in ("k", "v"):
        codes, norms = bittern.aura_encode(normal(s * kv_heads, tokens, 64), signs, boundaries, levels)
        for kind, rows in ((f"{name}_codes", codes), (f"{name}_scales", norms[..., 0].copy())):
            flat[kind] = rows
            rows = rows.reshape(s, kv_heads, *rows.shape[1:])
            pages = paged[kind] = np.zeros((7, kv_heads, page, *rows.shape[3:]), rows.dtype)
            for t in range(tokens):
                pages[block_table[:, t // page], :, t % page] = rows[:, :, t]
    fixed = {"q": normal(s, 3, 4, 64), "k_codebook": levels, "v_codebook": levels, "k_table": signs,
             "v_table": signs, "lengths": np.array([[0, 40, 0], [0, 33, 0]])}  # fmt: skip
    expected = bittern.aura_attention(**flat, **fixed)
    for more in ({}, {"capacity": 48}):
        got = bittern.aura_attention(**paged, **fixed, block_table=block_table, page_size=page, **more)
        assert_same_bits(got, expected)


def test_the_length_of_a_row_is_said_once():
    words = bittern.pack_codes(np.zeros((2, 64), np.uint8), bits=4)
    with pytest.raises(ValueError, match=r"codes: shape \[2, 63\], expected rows of axis_size 64"):
        bittern.unpack_codes(words, axis_size=64, bits=4, codes=np.zeros((2, 63), np.uint8))


def test_a_size_says_where_it_is_from():
    with pytest.raises(ValueError, match=r"axis_size: 65, .*; axis_size is from x, shape \[2, 65\]"):
        bittern.quantize_per_group(normal(2, 65), 1.0, group_size=64)
    c = gdn_problem(vh=5)
    with pytest.raises(ValueError, match="value_heads: 5, .*key_heads is from q, .*value_heads is from v, shape"):
        bittern.gdn_chunk_forward(**c)
    with pytest.raises(ValueError, match="group_size: 0, expected at least 1$"):  # said
        bittern.quantize_per_group(normal(2, 64), 1.0, group_size=0)


def test_messages_name_what_was_found():
    x = normal(2, 64)
    for wrong, name in ((x.astype(">f4"), ">f4"), (x.astype(object), "object"), (x.astype("U8"), "<U8")):
        with pytest.raises(ValueError, match=f"quantize_per_group: x: dtype {name}: "):
            bittern.quantize_per_group(wrong, 1.0, group_size=64)
    with pytest.raises(ValueError, match=r"scale: shape \[\], expected \[2,1\] .*; a number would fill it"):
        bittern.quantize_per_group(x, np.array(1, np.float32), group_size=64)
    with pytest.raises(NotImplementedError, match="x: stride 2 of axis 1, expected 1; a contiguous array"):
        bittern.quantize_per_group(normal(2, 128)[:, ::2], 1.0, group_size=64)
    with pytest.raises(ValueError, match="q: 1, expected an array$"):
        bittern.quantize_per_group(x, 1.0, group_size=64, q=1)
    with pytest.raises(ValueError, match=r"granularity: \\udc80, expected group, token"):
        bittern.quantize_per_group(x, 1.0, group_size=64, granularity="\udc80")
    with pytest.raises(ValueError) as caught:
        bittern.plan("quantize_per_group", granularity="a\0b")
    assert "a\0b, expected group" in str(caught.value)
    with pytest.raises(ValueError, match="gated_rms_norm: eps: 1000.*, expected a number that fits f64"):
        bittern.gated_rms_norm(x, x, normal(64), eps=10**400)
    for stream in (-1, 2**64, True):
        with pytest.raises(ValueError, match="quantize_per_group: stream: .*, expected an int or a CUDA"):
            bittern.quantize_per_group(x, 1.0, group_size=64, stream=stream)


@pytest.mark.peer("torch")
def test_nested_tensors():
    for layout in (torch.strided, torch.jagged):
        x = torch.nested.nested_tensor([torch.zeros(2, 64), torch.zeros(3, 64)], layout=layout)
        with pytest.raises(ValueError, match="quantize_per_group: x: a nested tensor, expected one shape"):
            bittern.quantize_per_group(x, 1.0, group_size=64)


def test_everything_has_help():
    for name in bittern.__all__:
        assert name == "__version__" or getattr(bittern, name).__doc__, name
