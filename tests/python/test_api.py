"""The Python interface itself: copies, strides, errors, threads, what plans say, stubs."""

import ctypes
import inspect
import os
import pathlib
import signal
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
from arrays import assert_same_bits, from_f32

import bittern
from bittern import _bittern, _cuda

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


# ---- arrays ----


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_copies(framework, dtype):
    if framework == "numpy" and dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    array = make(framework, rng.normal(size=(3, 8)), dtype)
    tensor = _bittern.Tensor("op: x", array)
    if framework == "numpy":
        address = array.ctypes.data
    elif framework == "torch":
        address = array.data_ptr()
    else:
        address = np.frombuffer(memoryview(array).cast("B"), np.uint8).ctypes.data
    assert tensor.address == address
    assert tensor.shape == (3, 8) and tensor.strides == (8, 1) and tensor.device == "cpu"
    names = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}
    assert tensor.dtype == names.get(dtype, "bf16")


def test_bfloat16_imitation_is_not_copied():
    array = from_f32(np.ones((2, 3)), "bf16")
    tensor = _bittern.Tensor("op: x", array)
    assert tensor.address == array.bits.ctypes.data and tensor.dtype == "bf16"
    assert _bittern.Tensor("op: x", array.bits).dtype == "uint16"  # raw bits are no bf16


def test_buffer_protocol(problem):
    x, scale, expected = problem
    q = bytearray(x.size)
    plan_for(x).run(x=memoryview(x), scale=scale, q=memoryview(q).cast("b", x.shape))
    assert np.array_equal(np.frombuffer(q, np.int8).reshape(x.shape), expected)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_writes_the_array_given(framework, problem):
    x, scale, expected = problem
    q = make(framework, np.zeros(x.shape), "int8")
    result = bittern.quantize_per_group(
        make(framework, x), make(framework, scale), q=q, group_size=64
    )
    assert result is q and np.array_equal(to_numpy(q), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("f32_scale", [False, True])
def test_outputs_follow_the_framework(framework, dtype, f32_scale):
    if framework == "numpy" and dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    x = make(framework, rng.normal(size=(2, 3, 64)), dtype)
    scale = make(framework, np.full((2, 3, 2), 0.0625), "float32" if f32_scale else dtype)
    q = bittern.quantize_per_group(x, scale, group_size=32)
    assert type(q) is type(x) and tuple(q.shape) == (2, 3, 64)
    z = to_numpy(x) / np.float32(0.0625)
    assert np.array_equal(to_numpy(q), np.clip(np.rint(z), -128, 127))
    y = bittern.dequantize_per_group(q, scale, group_size=32)
    assert type(y) is type(x) and y.dtype == scale.dtype and tuple(y.shape) == (2, 3, 64)


def test_strides_are_passed_on(problem):
    x, scale, expected = problem
    wide = np.full((6, 300), 99.0, np.float32)
    wide[:, 7:263] = x
    codes = np.full((6, 400), 55, np.int8)
    bittern.quantize_per_group(wide[:, 7:263], scale, q=codes[:, 3:259], group_size=64)
    assert np.array_equal(codes[:, 3:259], expected)
    codes[:, 3:259] = 55
    assert np.all(codes == 55)  # nothing outside the view was touched
    assert np.array_equal(
        bittern.quantize_per_group(wide[::2, 7:263], scale[::2].copy(), group_size=64),
        expected[::2],
    )
    with pytest.raises(NotImplementedError, match="x: stride 6 of axis 1, expected 1"):
        plan_for(x).run(x=np.asfortranarray(x), scale=scale, q=codes[:, :256])


def test_axes_merge_without_copies():
    x = rng.normal(size=(2, 3, 4, 64)).astype(np.float32)
    scale = np.full((2, 3, 4, 1), 0.1, np.float32)
    q = bittern.quantize_per_group(x, scale, group_size=64)
    assert q.shape == x.shape and np.array_equal(q, np.rint(x / scale).astype(np.int8))
    with pytest.raises(NotImplementedError, match="x: strides .* merge to .* without a copy"):
        bittern.quantize_per_group(x.transpose(1, 0, 2, 3), scale, group_size=64)
    with pytest.raises(ValueError, match=r"scale: shape \[4,24\], expected \[24,4\]"):
        bittern.quantize_per_group(x, np.ones((4, 24), np.float32), group_size=16)
    one_row = bittern.quantize_per_group(x[0, 0, 0], scale[0, 0, 0], group_size=64)
    assert np.array_equal(one_row, q[0, 0, 0])


def test_in_place():
    x = rng.normal(size=(4, 128)).astype(np.float32)
    scale = np.full((4, 2), 0.125, np.float32)
    expected = bittern.fake_quantize_per_group(x, scale, group_size=64)
    assert bittern.fake_quantize_per_group(x, scale, y=x, group_size=64) is x
    assert_same_bits(x, expected)
    with pytest.raises(ValueError, match="y: overlaps x, expected memory of its own"):
        wide = np.zeros((4, 160), np.float32)
        bittern.fake_quantize_per_group(wide[:, :128], scale, y=wide[:, 32:], group_size=64)


def test_read_only(problem):
    x, scale, expected = problem
    q = np.zeros(x.shape, np.int8)
    for a in (x, scale):
        a.flags.writeable = False  # inputs may be
    bittern.quantize_per_group(x, scale, q=q, group_size=64)
    assert np.array_equal(q, expected)
    q.flags.writeable = False
    before = q.copy()
    for call in (
        lambda: bittern.quantize_per_group(-x, scale, q=q, group_size=64),
        lambda: plan_for(x).run(x=-x, scale=scale, q=q),
        lambda: plan_for(x).can_implement(x=-x, scale=scale, q=q),
        lambda: plan_for(x).run(x=-x, scale=scale, q=bytes(x.size)),
    ):
        with pytest.raises(ValueError, match="quantize_per_group: q: read-only"):
            call()
    assert np.array_equal(q, before)


class Refuses:
    def __dlpack__(self, **kwargs):
        raise BufferError("this one stays here")


def test_an_array_says_why_it_does_not_export(problem):
    with pytest.raises(ValueError, match="quantize_per_group: x: this one stays here"):
        bittern.quantize_per_group(Refuses(), problem[1])


# ---- CUDA arrays, as far as they can be tried without a device ----


class OnCuda:
    """A numpy array that DLPack declares to be on a CUDA device; notes the streams it is told."""

    def __init__(self, array, index=0):
        self.array, self.index, self.streams = array, index, []
        self.is_cuda, self.device = True, index  # as torch names them

    def __dlpack_device__(self):
        return 2, self.index

    def __dlpack__(self, *, stream=None, max_version=None):
        self.streams.append(stream)
        capsule = self.array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # DLTensor: the address, then the device's type and index.
        tensor = pointer(capsule, b"dltensor")
        ctypes.c_uint64.from_address(tensor).value = self.data_pointer()
        device = (ctypes.c_int32 * 2).from_address(tensor + 8)
        device[0], device[1] = 2, self.index
        return capsule

    def data_pointer(self):
        return self.array.ctypes.data


class OldOnCuda(OnCuda):
    """A producer from before DLPack 1.0."""

    def __dlpack__(self, *, stream=None):
        return super().__dlpack__(stream=stream)


@pytest.mark.parametrize("kind", [OnCuda, OldOnCuda])
def test_cuda_arrays(kind, problem):
    x = problem[0]
    array = kind(x, index=3)
    tensor = _bittern.Tensor("op: x", array)
    assert (tensor.address, tensor.device) == (x.ctypes.data, "cuda:3")
    _bittern.Tensor("op: x", array, stream=0x1234)
    assert array.streams == [1, 0x1234]  # 1 is DLPack's name for the default stream


def test_cuda_arrays_are_not_mixed_with_others(problem):
    x, scale, expected = problem
    q = np.zeros(x.shape, np.int8)
    message = "quantize_per_group: scale: on cuda:0, expected cpu"
    with pytest.raises(ValueError, match=message):
        bittern.quantize_per_group(x, OnCuda(scale), q=q, group_size=64)
    for call in (plan_for(x).run, plan_for(x).can_implement):
        with pytest.raises(ValueError, match=message):
            call(x=x, scale=OnCuda(scale), q=q)
    with pytest.raises(ValueError, match="fake_quantize_per_group_backward: workspace: on cuda:1"):
        bittern.plan("fake_quantize_per_group_backward", outer_size=1, axis_size=128).run(
            dy=x[:1, :128],
            x=x[:1, :128],
            scale=scale[:1, :1],
            d_scale=np.zeros((1, 1), np.float32),
            workspace=OnCuda(np.zeros(64, np.uint8), index=1),
        )


def test_a_cuda_array_says_why_it_does_not_export(problem):
    class RefusesOnCuda(OnCuda):
        def __dlpack__(self, **kwargs):
            raise BufferError("this one stays there")

    with pytest.raises(ValueError, match="quantize_per_group: x: this one stays there"):
        bittern.quantize_per_group(RefusesOnCuda(problem[0]), problem[1])


class Context:
    """Notes that it was entered."""

    def __init__(self, log, *what):
        self.log, self.what = log, what

    def __enter__(self):
        self.log.append(self.what)

    def __exit__(self, *_):
        pass


@pytest.fixture
def torch_with_cuda(monkeypatch):
    """As much of torch as streams need: its tensors are OnCuda, its current stream is 77."""
    log = []
    stream = types.SimpleNamespace
    cuda = types.SimpleNamespace(
        current_stream=lambda device: stream(cuda_stream=77),
        default_stream=lambda device: stream(cuda_stream=0),
        ExternalStream=lambda handle, device: stream(cuda_stream=handle),
        device=lambda index: Context(log, "device", index),
        stream=lambda s: Context(log, "stream", s.cuda_stream),
    )
    empty = lambda n, dtype, device: OnCuda(np.zeros(n, np.uint8), device)  # noqa: E731
    torch = types.SimpleNamespace(Tensor=OnCuda, cuda=cuda, uint8="uint8", empty=empty)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return log


def test_torchs_current_stream_needs_no_waiting(torch_with_cuda):
    log, array = torch_with_cuda, OnCuda(np.zeros(4, np.float32), index=2)
    assert _cuda.stream_handle(None, ["not torch's", array]) == 77
    _bittern.Tensor("op: x", array, stream=77)
    _bittern.Tensor("op: x", array, stream=5)
    _bittern.Tensor("op: x", array, stream=0)
    assert array.streams == [-1, 5, 1]
    assert log == [("device", 2)] * 3  # torch exports from its current device alone


def test_torch_allocates_for_the_stream(torch_with_cuda):
    log, array = torch_with_cuda, OnCuda(np.zeros(4, np.float32))
    for handle in (77, 5, 0):
        assert _cuda.new_workspace([None, array], 100, handle).array.size == 100
    assert log == [("stream", 5), ("stream", 0)]
    used = []
    array.record_stream = lambda stream: used.append(stream.cuda_stream)
    for handle in (77, 5):
        _cuda.keep_until_done([array], handle)
    assert used == [5]
    assert _cuda.new_workspace([np.zeros(3)], 100, 5) is None


def test_streams():
    class Stream:
        def __cuda_stream__(self):
            return 0, 9

    assert _cuda.stream_handle(None) == 0
    assert _cuda.stream_handle(np.int64(8)) == 8
    assert _cuda.stream_handle(types.SimpleNamespace(cuda_stream=7)) == 7
    assert _cuda.stream_handle(Stream()) == 9
    with pytest.raises(ValueError, match="stream: 'fast', expected an int or a CUDA stream"):
        bittern.quantize_per_group(np.zeros((1, 128), np.float32), 1.0, stream="fast")


# ---- the functions ----


def test_a_plan_is_chosen_once(problem, monkeypatch):
    """For each problem, and again when what the choice depends on changes."""
    x, scale, expected = problem
    call = bittern.quantize_per_group
    remembered = call._body._remembered
    call(x, scale, group_size=64)
    before = remembered.cache_info()
    assert np.array_equal(call(-x, scale, group_size=64), quantize(-x, scale))
    assert remembered.cache_info().hits == before.hits + 1
    monkeypatch.setenv("BITTERN_KERNEL", "ref")
    assert np.array_equal(call(x, scale, group_size=64), expected)
    assert remembered.cache_info().misses == before.misses + 1
    with pytest.raises(ValueError, match=r"group_size: \[64\], expected an integer"):
        call(x, scale, group_size=[64])


def test_granularities():
    x = rng.normal(size=(4, 5, 6)).astype(np.float32)
    call = bittern.quantize_per_group
    for axis in range(3):
        scale = rng.uniform(0.01, 0.1, x.shape[axis]).astype(np.float32)
        along = [-1 if i == axis else 1 for i in range(3)]
        expected = np.clip(np.rint(x / scale.reshape(along)), -128, 127)
        assert np.array_equal(call(x, scale, granularity="channel", axis=axis), expected)
        assert np.array_equal(call(x, scale, granularity="channel", axis=axis - 3), expected)
    scale = rng.uniform(0.01, 0.1, (4, 5)).astype(np.float32)
    expected = np.clip(np.rint(x / scale[:, :, None]), -128, 127)
    assert np.array_equal(call(x, scale, granularity="token"), expected)
    expected = np.clip(np.rint(x / np.float32(0.03)) + 5, -128, 127)
    assert np.array_equal(call(x, 0.03, 5, granularity="tensor"), expected)
    assert np.array_equal(call(x, np.float32(0.03), np.int32(5), granularity="tensor"), expected)
    with pytest.raises(ValueError, match="axis 3"):
        call(x, scale, granularity="channel", axis=3)


def test_codes_follow_the_output(problem):
    x, scale, _ = problem
    q = np.zeros(x.shape, np.uint8)
    bittern.quantize_per_group(x, scale, 128, q=q, group_size=64, q_min=0, q_max=255)
    assert np.array_equal(q, quantize(x, scale, zp=128, low=0, high=255))
    made = bittern.quantize_per_group(x, scale, 128, group_size=64, q_min=0, q_max=255, code="u8")
    assert made.dtype == np.uint8 and np.array_equal(made, q)


def test_optional_outputs_may_be_left_out():
    q = rng.integers(-128, 128, (3, 64)).astype(np.int8)
    dy = rng.normal(size=q.shape).astype(np.float32)
    scale = np.full((3, 2), 0.5, np.float32)
    call = bittern.dequantize_per_group_backward
    dq, d_scale = call(dy, q, scale, group_size=32)
    assert_same_bits(call(dy, q, scale, group_size=32, dq=False), d_scale)
    assert_same_bits(call(dy, q, scale, group_size=32, d_scale=False), dq)
    with pytest.raises(ValueError, match="every output is left out"):
        call(dy, q, scale, group_size=32, dq=False, d_scale=False)
    with pytest.raises(ValueError, match="d_scale: 3, expected an array or False"):
        call(dy, q, scale, group_size=32, d_scale=3)


def test_operands_that_one_choice_has():
    x = rng.normal(size=(3, 64)).astype(np.float32)
    assert len(bittern.dynamic_quantize(x, group_size=32)) == 2
    scale, zero_point, q = bittern.dynamic_quantize(x, group_size=32, symmetric=False)
    assert scale.shape == zero_point.shape == (3, 2) and zero_point.dtype == np.int32
    with pytest.raises(ValueError, match="zero_point goes with symmetric false only"):
        bittern.dynamic_quantize(x, group_size=32, zero_point=zero_point)


def test_signatures():
    for op in bittern.ops():
        function = getattr(bittern, op.name)
        parameters = inspect.signature(function).parameters
        assert {o.name for o in op.operands} <= set(parameters)
        assert op.name in bittern.__all__ and "formula" in function.__doc__
    with pytest.raises(TypeError, match="missing a required argument: 'scale'"):
        bittern.quantize_per_group(np.zeros((1, 128), np.float32))
    with pytest.raises(TypeError, match="unexpected keyword argument 'groupsize'"):
        bittern.quantize_per_group(np.zeros((1, 128), np.float32), 1.0, groupsize=3)


def test_empty():
    for shape in ((0, 128), (3, 0), (0, 0)):
        q = bittern.quantize_per_group(np.zeros(shape, np.float32), 1.0)
        assert q.shape == shape and q.dtype == np.int8


# ---- every op on rows through the table ----

ROW_OPS = [o.name for o in bittern.ops() if o.category in ("quantization", "affine", "packing")]


def filled(operand):
    shape, kinds = operand.shape, {"u8": np.uint8, "s8": np.int8, "s32": np.int32, "u32": np.uint32}
    if operand.dtype in kinds:
        return rng.integers(0, 4, shape).astype(kinds[operand.dtype])
    if "scale" in operand.name:
        return from_f32(rng.uniform(0.1, 1, shape), operand.dtype)
    return from_f32(rng.normal(size=shape), operand.dtype)


@pytest.mark.parametrize("element", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("op", ROW_OPS)
def test_every_op_equals_ref(op, element):
    fields = {"outer_size": 3, "axis_size": 256}
    names = {f.name for f in next(o for o in bittern.ops() if o.name == op).fields}
    if "element" in names:
        fields["element"] = element
    chosen, ref = bittern.plan(op, **fields), bittern.plan(op, kernel="ref", **fields)
    inputs = {o.name: filled(o) for o in chosen.operands if not o.output}
    results = []
    for p in (chosen, ref):
        outputs = {o.name: filled(o) for o in p.operands if o.output}
        p.can_implement(**inputs, **outputs)
        p.run(**inputs, **outputs)
        results.append(outputs)
    for name in results[0]:
        assert_same_bits(results[0][name], results[1][name])


@pytest.mark.parametrize("op", ROW_OPS)
def test_what_plans_say(op):
    table = next(o for o in bittern.ops() if o.name == op)
    fields = {"outer_size": 3, "axis_size": 256}
    has_element = "element" in {f.name for f in table.fields}
    for element in ("f32", "f16", "bf16", "f64") if has_element else (None,):
        more = {"element": element} if element else {}
        for kernel in (None, "ref"):
            p = bittern.plan(op, kernel=kernel, **fields, **more)
            assert p.sku.op == op and p.sku.category == table.category
            assert p.sku.backend in table.backends and p.device == "cpu"
            assert kernel is None or (p.sku.kernel, p.sku.backend, p.sku.architecture) == (
                "ref",
                "ref",
                "any",
            )
            assert p.workspace_bytes >= 0
            guarantee = p.precision_guarantee
            math = ("f64" if element == "f64" else "f32") if element else "u32"
            assert guarantee.math_precision == guarantee.accumulator == math
            assert guarantee.deterministic and guarantee.bit_stable_on_same_hardware
            assert guarantee.same_bits_on_all_backends
            if element:
                assert p.sku.element == element
            groups = {f.name: f.default for f in table.fields}.get("group_size")
            assert p.num_groups == (256 // groups if groups else 0)


def test_sku(problem):
    p = plan_for(problem[0])
    assert repr(p.sku).startswith(
        "Sku(category='quantization', op='quantize_per_group', element='f32'"
    )
    assert p.sku.aux_element == "s8"
    assert (
        repr(p)
        == f"<bittern.Plan quantize_per_group on cpu, kernel {p.sku.kernel} ({p.sku.architecture})>"
    )
    x, scale, zero_point, q = p.operands
    assert (x.name, x.dtype, x.shape, x.output, x.optional) == ("x", "f32", (6, 256), False, False)
    assert (zero_point.dtype, zero_point.shape, zero_point.optional) == ("s32", (6, 4), True)
    assert q.output and q.dtype == "s8"
    assert bittern.plan("quantize_per_group", granularity="token", group_size=0).num_groups == 0


def test_workspace():
    fields = {"outer_size": 512, "axis_size": 64, "granularity": "channel"}
    x, dy = (rng.normal(size=(512, 64)).astype(np.float32) for _ in range(2))
    scale = rng.uniform(0.1, 1, 64).astype(np.float32)
    outputs = []
    for kernel in (None, "ref"):
        p = bittern.plan("fake_quantize_per_group_backward", kernel=kernel, **fields)
        d_scale = np.zeros(64, np.float32)
        p.run(dy=dy, x=x, scale=scale, d_scale=d_scale)  # takes its own
        outputs.append(d_scale)
        need = p.workspace_bytes
        memory = np.zeros(need + 64, np.uint8)
        aligned = memory[-memory.ctypes.data % 64 :][:need]
        again = np.zeros(64, np.float32)
        p.run(dy=dy, x=x, scale=scale, d_scale=again, workspace=aligned)
        assert_same_bits(again, d_scale)
        if need:
            with pytest.raises(
                ValueError, match=f"workspace: {need - 1} bytes, expected at least {need}"
            ):
                p.run(dy=dy, x=x, scale=scale, d_scale=again, workspace=aligned[:-1])
    assert_same_bits(*outputs)
    with pytest.raises(ValueError, match="workspace: read-only"):
        p.run(dy=dy, x=x, scale=scale, d_scale=d_scale, workspace=b"123")
    with pytest.raises(ValueError, match="workspace: expected one axis of stride 1"):
        p.run(dy=dy, x=x, scale=scale, d_scale=d_scale, workspace=np.zeros(9, np.uint8)[::2])


# ---- errors ----

PLAN_ERRORS = [
    (ValueError, "no op called nothing, expected one of quantize_per_group", "nothing", {}),
    (ValueError, "no field size (did you mean outer_size?), expected one of outer_size", "quantize_per_group", {"size": 1}),
    (ValueError, "outer_size: -1, expected at least 0", "quantize_per_group", {"outer_size": -1}),
    (ValueError, "group_size: 0, expected at least 1", "quantize_per_group", {"group_size": 0}),
    (ValueError, "outer_size: 1.5, expected an integer", "quantize_per_group", {"outer_size": 1.5}),
    (ValueError, "a 64-bit integer", "quantize_per_group", {"outer_size": 2**63}),
    (ValueError, "does not fit 32 bits", "quantize_per_group", {"q_min": 2**40}),
    (ValueError, "element: f33, expected f32, f64, f16 or bf16", "quantize_per_group", {"element": "f33"}),
    (ValueError, "axis_size: 9, expected a multiple", "quantize_per_group", {"axis_size": 9}),
    (ValueError, "q_max: 300, expected -128..127", "quantize_per_group", {"q_max": 300}),
    (ValueError, "bits: 9, expected 1..8", "pack_codes", {"bits": 9}),
    (ValueError, "device: tpu, expected cpu, cuda", "pack_codes", {"device": "tpu"}),
    (ValueError, "device: cuda:x, expected", "pack_codes", {"device": "cuda:x"}),
    (
        ValueError,
        "preference: best, expected exact or fastest",
        "pack_codes",
        {"preference": "best"},
    ),
    (NotImplementedError, "element: u8, expected f32", "quantize_per_group", {"element": "u8"}),
    (NotImplementedError, "code: s32, expected s8 or u8", "quantize_per_group", {"code": "s32"}),
    (NotImplementedError, "no kernel on cpu named magic", "pack_codes", {"kernel": "magic"}),
]


@pytest.mark.parametrize("error,message,op,fields", PLAN_ERRORS)
def test_plan_errors(error, message, op, fields):
    with pytest.raises(error) as caught:
        bittern.plan(op, **fields)
    assert caught.type is error and message in str(caught.value)


def test_no_cuda_is_a_runtime_error():
    code = "import bittern\nbittern.plan('quantize_per_group', device='cuda:0')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "PYTHONPATH": str(pathlib.Path(bittern.__file__).parents[1]),
            "BITTERN_CUDA_PLUGIN": "/nowhere.so",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "RuntimeError: cuda: /nowhere.so" in done.stderr


def test_operand_errors(problem):
    x, scale, expected = problem
    good = {"x": x, "scale": scale, "q": np.full(x.shape, 77, np.int8)}
    p = plan_for(x)

    def fails(error, message, **changes):
        operands = {k: v for k, v in {**good, **changes}.items() if v is not ...}
        for call in (p.run, p.can_implement):
            with pytest.raises(error) as caught:
                call(**operands)
            assert caught.type is error and message in str(caught.value)
        assert np.all(good["q"] == 77)  # an error touches nothing

    fails(ValueError, "quantize_per_group: scale: missing, expected f32 [6,4]", scale=...)
    fails(ValueError, "quantize_per_group: q: missing, expected s8 [6,256]", q=None)
    fails(ValueError, "no operand scales (did you mean scale?), expected one of x scale", scales=scale)
    fails(ValueError, "x: dtype f64, expected f32", x=x.astype(np.float64))
    fails(ValueError, "x: dtype uint16, expected f32", x=x.astype(np.uint16))
    fails(
        ValueError, "zero_point: dtype int64, expected s32", zero_point=np.zeros((6, 4), np.int64)
    )
    fails(ValueError, "x: dtype bool, expected f32", x=x > 0)
    fails(ValueError, "x: dtype complex64, expected f32", x=x.astype(np.complex64))
    fails(ValueError, "x: shape [6,128], expected [6,256]", x=x[:, :128].copy())
    fails(
        ValueError,
        "x: shape [1,1,1,1,1,1,6,256], expected [6,256]",
        x=x.reshape((1,) * 6 + x.shape),
    )
    fails(ValueError, "x: float, expected an array", x=1.0)
    fails(ValueError, "x: list, expected an array", x=[1.0])
    fails(
        ValueError,
        "x: address is not a multiple of 4",
        x=np.zeros(x.nbytes + 4, np.uint8)[1:-3].view(np.float32).reshape(x.shape),
    )
    fails(NotImplementedError, "q: stride -256 of axis 0", q=np.zeros(x.shape, np.int8)[::-1])
    p.run(**good)
    assert np.array_equal(good["q"], expected)


def test_function_errors(problem):
    x, scale, _ = problem
    call = bittern.quantize_per_group
    with pytest.raises(ValueError, match="scale: dtype f16, expected f32"):
        call(x, scale.astype(np.float16), group_size=64)
    with pytest.raises(ValueError, match=r"scale: shape \[6,4\], expected \[6,2\]"):
        call(x, scale, group_size=128)
    with pytest.raises(ValueError, match=r"axis: 0 of shape \[6, 256\], expected the last axis"):
        call(x, scale, axis=0, group_size=3)
    with pytest.raises(ValueError, match="x: dtype int64"):
        call(x.astype(np.int64), scale, group_size=64)
    with pytest.raises(ValueError, match="no arrays"):
        call(1.0, 2.0)
    with pytest.raises(ValueError, match="granularity: row, expected group, token, channel or tensor"):
        call(x, scale, granularity="row")
    with pytest.raises(NotImplementedError, match="element: f64 with f32_scale"):
        call(x.astype(np.float64), scale, group_size=64, element="f64", f32_scale=True)


# ---- threads ----


def test_the_lock_is_free_while_running():
    """A long run on one thread does not keep another from working."""
    x = np.zeros((4096, 4096), np.float32)
    scale, q = np.ones((4096, 32), np.float32), np.zeros(x.shape, np.int8)
    p = bittern.plan("quantize_per_group", outer_size=4096, axis_size=4096, kernel="ref")
    started, done = threading.Event(), threading.Event()

    def work():
        started.set()
        p.run(x=x, scale=scale, q=q)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    steps = 0
    while not done.is_set():
        steps += 1
    thread.join()
    # Holding the lock, run() would let this loop take a step or two before and after it.
    assert steps > 1000


def test_threads_share_a_plan():
    p = bittern.plan("quantize_per_group", outer_size=64, axis_size=4096, group_size=64)
    failures = []

    def work(seed):
        local = np.random.default_rng(seed)
        for _ in range(10):
            x = local.normal(size=(64, 4096)).astype(np.float32)
            scale = local.uniform(0.01, 0.05, (64, 64)).astype(np.float32)
            q = np.zeros(x.shape, np.int8)
            p.run(x=x, scale=scale, q=q)
            if not np.array_equal(q, quantize(x, scale)):
                failures.append("wrong codes")
            try:
                p.run(x=x, scale=scale, q=q[:, :5])
                failures.append("no error")
            except ValueError as error:
                if "q: shape [64,5], expected [64,4096]" not in str(error):
                    failures.append(str(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=60)
    assert not failures and not any(t.is_alive() for t in threads)


def test_num_threads():
    before = bittern.num_threads()
    try:
        bittern.set_num_threads(3)
        assert bittern.num_threads() == 3
        bittern.set_num_threads(0)
        assert bittern.num_threads() >= 1
    finally:
        bittern.set_num_threads(before)


# ---- the package ----


def test_version():
    header = (ROOT / "include" / "bittern" / "version.h").read_text()
    numbers = [line.split()[2] for line in header.splitlines() if "define BITTERN_VERSION_" in line]
    assert bittern.__version__ == ".".join(numbers)


def test_stubs_are_fresh():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "make_python_stubs.py", "--check"],
        env={"PYTHONPATH": str(pathlib.Path(bittern.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = pathlib.Path(bittern.__file__).parent
    assert (folder / "py.typed").exists() and (folder / "__init__.pyi").exists()


def test_every_op_has_a_line():
    lines = (ROOT / "src" / "ops" / "ops.inc").read_text().splitlines()
    folders = [line.split(",")[1].strip() for line in lines if line.startswith("BITTERN_OP(")]
    assert OPS == folders
    assert all(op.backends[-1] == "ref" for op in bittern.ops())


def test_a_forked_child_works():
    """GCC's OpenMP waits, in a child, for the threads of its parent's team."""
    code = """
import os, numpy as np, bittern
x = np.ones((512, 1024), np.float32)
bittern.set_num_threads(2)
expected = bittern.quantize_per_group(x, 0.1, group_size=64)
child = os.fork()
if child == 0:
    for threads in (None, 2):
        if threads:
            bittern.set_num_threads(threads)
        same = np.array_equal(bittern.quantize_per_group(x, 0.1, group_size=64), expected)
        if not same or bittern.num_threads() != 1:
            os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert np.array_equal(bittern.quantize_per_group(x, 0.1, group_size=64), expected)
assert bittern.num_threads() == 2
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(pathlib.Path(bittern.__file__).parents[1])},
        start_new_session=True,
    )
    try:
        assert process.wait(timeout=60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the child too
            process.wait()
