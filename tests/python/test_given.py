"""What the functions make of the arrays, numbers and keywords that they are given."""

import numpy as np
import pytest
from arrays import assert_same_bits, from_f32
from problems import gdn_problem, normal, rng, tables

import bittern


# ---- too few axes ----


def test_one_row_is_one_row():
    x = normal(3, 64)
    signs, boundaries, levels = tables()
    packed, scales = bittern.aura_encode(x, signs, boundaries, levels)
    one, scale = bittern.aura_encode(x[1], signs, boundaries, levels)
    assert one.shape == (8,) and scale.shape == (1,)
    assert np.array_equal(one, packed[1]) and np.array_equal(scale, scales[1])
    y = bittern.aura_decode(packed, scales, signs, levels)
    assert_same_bits(bittern.aura_decode(one, scale, signs, levels), y[1])
    assert_same_bits(bittern.aura_rotate(x[1], signs), bittern.aura_rotate(x, signs)[1])
    weight, z = normal(64), normal(3, 64)
    all_rows = bittern.gated_rms_norm(x, z, weight)
    assert_same_bits(bittern.gated_rms_norm(x[2], z[2], weight), all_rows[2])
    d_x, d_z, _ = bittern.gated_rms_norm_backward(x[0], x[2], z[2], weight)
    assert d_x.shape == d_z.shape == (64,)
    # Scales are a column, whether it has an axis of its own or not.
    assert_same_bits(bittern.aura_decode(packed, scales[:, 0].copy(), signs, levels), y)


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
    if not any(o.output and not o.in_out for o in table.operands):
        assert result is None  # it only updates
        return
    for array in result if isinstance(result, tuple) else (result,):
        assert array.size > 0


def test_empty_arrays_have_shapes_too():
    """No element is read, but outputs have the sizes that arrays tell."""
    c = {n: a[:, :0] for n, a in gdn_problem(b=3).items()}
    o, state = bittern.gdn_chunk_forward(**c)
    assert o.shape == (3, 0, 4, 8) and state.shape == (3, 4, 16, 8)
    with pytest.raises(ValueError, match=r"g: shape \[3,0,5\], expected \[3,0,4\] = \[batch,tokens,value_heads\]"):
        bittern.gdn_chunk_forward(**{**c, "g": normal(3, 0, 5)})
    with pytest.raises(ValueError, match=r"scales: shape \[0,8\], expected \[0,4\]"):
        q = np.zeros((0, 128), np.uint8)
        bittern.qdq_affine_forward(q, normal(0, 8), normal(0, 4), group_size=32, bits=4)
    x = normal(2, 0, 64)  # axes merge as others do
    assert bittern.gated_rms_norm(x, normal(0, 64), normal(64)).shape == (2, 0, 64)


def test_sizes_that_no_array_tells():
    """A default is no answer where arrays usually tell the size."""
    signs, boundaries, levels = tables()
    packed, scales = bittern.aura_encode(normal(3, 64), signs, boundaries, levels)
    with pytest.raises(ValueError, match="aura_decode: dim: no array given tells it, expected dim="):
        bittern.aura_decode(packed, scales, None, levels, rotated=True)
    assert bittern.aura_decode(packed, scales, None, levels, rotated=True, dim=64).shape == (3, 64)
    # Pages without the table that says which.
    k = {"packed": np.zeros((2, 1, 16, 8), np.uint32), "scales": np.ones((2, 1, 16), np.float32)}
    kv = {f"{side}_{n}": a for n, a in k.items() for side in "kv"}
    kv |= {f"{side}_{n}": a for n, a in (("codebook", levels), ("table", signs)) for side in "kv"}
    with pytest.raises(ValueError, match="aura_attention: capacity: no array given tells it"):
        bittern.aura_attention(normal(2, 1, 2, 64), **kv, page_size=16)
    table = np.array([[0], [1]])
    assert bittern.aura_attention(normal(2, 1, 2, 64), **kv, page_size=16, block_table=table).shape == (2, 1, 2, 64)


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
    assert {k: v for k, v in marked.items() if v} == {
        "gdn_recurrent_step": ["snapshots"],
        "gdn_decode_step": ["snapshots", "conv_snapshots"],
        "rms_norm": ["sum"],
    }
    q = rng.integers(-8, 8, (3, 64)).astype(np.int8)
    for asked in (True, None):
        both = bittern.dequantize_per_group_backward(
            normal(3, 64), q, normal(3, 2), group_size=32, d_q=asked
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
    with pytest.raises(TypeError, match="quantize_per_group: got an unexpected keyword argument 'scales'; did you mean 'scale'"):
        bittern.quantize_per_group(x, scales=1.0)
    with pytest.raises(TypeError, match="inspect_model: got an unexpected keyword argument 'paths'; did you mean 'path'"):
        bittern.inspect_model(paths="model")
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
    with pytest.raises(ValueError, match=r"boundaries: shape \[3\], expected \[15\] = \[2\^bits-1\]: 4-bit"):
        bittern.aura_encode(x, signs, boundaries, levels)
    dense = bittern.make_rotation("dense", 64)
    with pytest.raises(ValueError, match=r"table: shape \[64,64\], expected \[64\] = \[dim\]: .*hadamard.* dense"):
        bittern.aura_rotate(x, dense)
    with pytest.raises(ValueError, match="x: dtype f64, expected f32 .*: pass float32"):
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


def test_everything_has_help():
    for name in bittern.__all__:
        assert name == "__version__" or getattr(bittern, name).__doc__, name
