"""Arrays of every framework, without copies; CUDA arrays as far as they can be tried without a device."""

import ctypes
import sys
import types

import numpy as np
import pytest
from arrays import assert_same_bits, from_f32
from quantized import FRAMEWORKS, make, plan_for, problem, rng, to_numpy

import bittern
from bittern import _bittern, _cuda


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
            d_y=x[:1, :128],
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
