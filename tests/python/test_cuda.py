"""CUDA arrays on a device, without any framework: memory from the driver, exported by DLPack."""

import ctypes
import os

import numpy as np
import pytest
from arrays import assert_same_bits
from test_arrays import OnCuda

import bittern

rng = np.random.default_rng(9)


class Driver:
    """The few calls of libcuda.so.1 that a test needs, in the context that bittern uses too."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        error = getattr(self.library, name)(*arguments)
        if error != 0:
            raise RuntimeError(f"{name}: error {error}")

    def stream(self):
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)  # not ordered with the default one
        return stream


class DeviceArray(OnCuda):
    """A copy of a numpy array in device memory."""

    def __init__(self, driver, array):
        super().__init__(np.ascontiguousarray(array))
        self.driver, self.address = driver, ctypes.c_uint64()
        size = ctypes.c_size_t(max(array.nbytes, 1))
        driver.call("cuMemAlloc_v2", ctypes.byref(self.address), size)
        source = ctypes.c_void_p(self.array.ctypes.data)
        driver.call("cuMemcpyHtoD_v2", self.address, source, ctypes.c_size_t(array.nbytes))

    def __del__(self):
        self.driver.library.cuMemFree_v2(self.address)

    def data_pointer(self):
        return self.address.value

    def numpy(self):
        result = np.empty_like(self.array)
        target = ctypes.c_void_p(result.ctypes.data)
        self.driver.call("cuCtxSynchronize")
        self.driver.call("cuMemcpyDtoH_v2", target, self.address, ctypes.c_size_t(result.nbytes))
        return result


@pytest.fixture(scope="module")
def driver():
    try:
        bittern.plan("quantize_per_group", device="cuda:0")
        return Driver()
    except (RuntimeError, OSError) as error:  # no plug-in, no device; the emulated one has no driver
        if os.environ.get("BITTERN_REQUIRE_CUDA", "") not in ("", "0"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@pytest.fixture
def problem(driver):
    """x, scale, memory for the codes, and the codes."""
    x = rng.normal(size=(6, 256)).astype(np.float32)
    scale = rng.uniform(0.01, 0.05, (6, 4)).astype(np.float32)
    expected = bittern.quantize_per_group(x, scale, group_size=64)
    there = [DeviceArray(driver, a) for a in (x, scale, np.zeros_like(expected))]
    return *there, expected


def test_function(problem):
    x, scale, q, expected = problem
    assert bittern.quantize_per_group(x, scale, q=q, group_size=64) is q
    assert_same_bits(q.numpy(), expected)
    assert x.streams == [1]  # the default stream


def test_plan_on_a_stream(driver, problem):
    x, scale, q, expected = problem
    stream = driver.stream()
    plan = bittern.plan(
        "quantize_per_group", device="cuda:0", outer_size=6, axis_size=256, group_size=64
    )
    plan.can_implement(x=x, scale=scale, q=q)
    plan.run(x=x, scale=scale, q=q, stream=stream.value)
    assert_same_bits(q.numpy(), expected)
    assert q.streams == [1, stream.value]
    driver.call("cuStreamDestroy_v2", stream)


def test_errors(driver, problem):
    x, scale, q, _ = problem
    call = bittern.quantize_per_group
    with pytest.raises(ValueError, match="x: host memory, expected memory of cuda:0"):
        call(OnCuda(x.array), scale, q=q, group_size=64)
    with pytest.raises(ValueError, match="scale: on cpu, expected cuda:0"):
        call(x, scale.array, q=q, group_size=64)
    with pytest.raises(NotImplementedError, match="q: no array, and on cuda:0 only torch's"):
        call(x, scale, group_size=64)
    with pytest.raises(RuntimeError, match="cuda:99: no such device"):
        call(x, scale, q=q, group_size=64, device="cuda:99")


def test_kv_cache(driver):
    """The bytes and the bits of the CPU's, and arrays that are not where the cache is."""
    k, v = rng.standard_normal((2, 90, 2, 128), dtype=np.float32)
    q = rng.standard_normal((3, 4, 128), dtype=np.float32)
    host = bittern.KvCache(2, 128, first=3, recent=16)
    there = bittern.KvCache(2, 128, first=3, recent=16, device="cuda")
    stream = driver.stream()
    for begin, end in [(0, 60), (60, 61), (61, 90)]:
        host.append(k[begin:end], v[begin:end])
        arrays = [DeviceArray(driver, a[begin:end]) for a in (k, v)]
        there.append(*arrays, stream=stream.value)
        driver.call("cuStreamSynchronize", stream)
    assert there.serialize() == host.serialize()
    queries, out = DeviceArray(driver, q), DeviceArray(driver, np.zeros_like(q))
    assert there.attend(queries, out, stream=stream.value) is out
    assert_same_bits(out.numpy(), host.attend(q))
    with pytest.raises(ValueError, match="KvCache: q: on cpu, expected cuda:0"):
        there.attend(q)
    with pytest.raises(ValueError, match="KvCache: k: on cuda:0, expected cpu"):
        host.append(queries, queries)
    with pytest.raises(ValueError, match="KvCache: out: None, and on CUDA only torch's"):
        there.attend(queries)
    driver.call("cuStreamDestroy_v2", stream)


ROW_OPS = [o.name for o in bittern.ops() if o.category in ("quantization", "affine", "packing")]


@pytest.mark.parametrize("op", ROW_OPS)
def test_every_op_on_rows(driver, op):
    """The plan's own scratch has to be given: only torch's arrays come with an allocator."""
    fields = {"outer_size": 5, "axis_size": 256}
    cpu, plan = bittern.plan(op, **fields), bittern.plan(op, device="cuda:0", **fields)
    kinds = {"u8": np.uint8, "s8": np.int8, "s32": np.int32, "u32": np.uint32, "f32": np.float32}
    host = {
        o.name: np.zeros(o.shape, kinds[o.dtype])
        if o.output
        else rng.uniform(1, 16, o.shape).astype(kinds[o.dtype])
        for o in plan.operands
    }
    there = {name: DeviceArray(driver, array) for name, array in host.items()}
    scratch = DeviceArray(driver, np.zeros(plan.workspace_bytes, np.uint8))
    plan.run(**there, workspace=scratch)
    cpu.run(**host)
    for operand in plan.operands:
        assert_same_bits(there[operand.name].numpy(), host[operand.name])
