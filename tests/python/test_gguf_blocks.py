"""GGUF's block formats against the gguf package: its files (tests/golden) and itself."""

import ctypes
import functools
import importlib.util
import pathlib
import sys

import numpy as np
import pytest
from arrays import GOLDEN, assert_same_bits, from_f32, load_golden, zeros

import bittern

sys.path.insert(0, str(GOLDEN))  # the generators aim well

golden = functools.cache(lambda: load_golden("gguf_blocks.safetensors"))
TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]


def assert_same(ours, theirs):
    """Bit for bit, but for the bits of a NaN."""
    assert np.array_equal(np.isnan(ours), np.isnan(theirs))
    assert_same_bits(np.nan_to_num(ours, nan=7), np.nan_to_num(theirs, nan=7))


def dequantize(blocks, name, columns, dtype="f32"):
    y = zeros((len(blocks), columns), dtype)
    bittern.gguf_dequantize(blocks, y=y, type=name)
    return y


@pytest.mark.parametrize("name", TYPES)
def test_golden_read(name):
    blocks, y = (golden()[f"read.{name}.{k}"] for k in ("blocks", "y"))
    assert np.isinf(y).any() and (np.isnan(y).any() or name == "MXFP4")
    assert_same(dequantize(blocks, name, y.shape[1]), y)


@pytest.mark.peer("gguf")
@pytest.mark.parametrize("name", TYPES)
def test_read(name):
    """f32 as gguf has it; halves are that value, rounded once."""
    import gguf
    import make_gguf_goldens as aimed

    kind = gguf.GGMLQuantizationType[name]
    columns = 2560
    count = columns // gguf.GGML_QUANT_SIZES[kind][0]
    with np.errstate(all="ignore"):
        blocks = aimed.random_blocks(np.random.default_rng(77), name, 40, count)
        theirs = gguf.quants.dequantize(blocks, kind)
    assert_same(dequantize(blocks, name, columns), theirs)
    ordinary = np.ascontiguousarray(blocks[::4])
    for dtype in ("f16", "bf16"):
        ours = dequantize(ordinary, name, columns, dtype)
        assert_same_bits(ours, from_f32(theirs[::4], dtype))


# ---- writing ----

WRITTEN = TYPES[:5]


def quantize(w, name, **operands):
    return bittern.gguf_quantize(w, type=name, **operands)


@pytest.mark.parametrize("name", WRITTEN)
def test_golden_write(name):
    w, blocks = (golden()[f"write.{name}.{k}"] for k in ("w", "blocks"))
    assert_same_bits(quantize(w, name), blocks)


@pytest.mark.peer("gguf")
@pytest.mark.parametrize("name", WRITTEN)
def test_write(name):
    import gguf
    import make_gguf_goldens as aimed

    rng = np.random.default_rng(78)
    random = rng.normal(size=(64, 256)) * np.exp(rng.normal(size=(64, 1)))
    w = np.concatenate([aimed.weights(rng, name), random]).astype(np.float32)
    for values in (w, w.astype(np.float16)):
        theirs = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
        assert_same_bits(quantize(values, name), theirs)


# Squared error relative to the weights', of Gaussian weights: ggml's own is 8.8e-2, 2.28e-2, 5.12e-3, 1.31e-3, 3.2e-4.
BOUNDS = {"Q2_K": 6.9e-2, "Q3_K": 2.1e-2, "Q4_K": 4.95e-3, "Q5_K": 1.19e-3, "Q6_K": 2.87e-4}


def error(w, y, importance=1.0):
    return (importance * (w - y.astype(np.float64)) ** 2).sum() / (importance * w**2.0).sum()


@pytest.mark.peer("gguf")
@pytest.mark.parametrize("name", BOUNDS)
def test_search(name):
    import gguf

    kind = gguf.GGMLQuantizationType[name]
    rng = np.random.default_rng(79)
    w = (rng.normal(size=(64, 2048)) * 0.02).astype(np.float32)
    plain = gguf.quants.dequantize(quantize(w, name), kind)
    assert 0.9 * BOUNDS[name] < error(w, plain) < BOUNDS[name]

    importance = np.exp(rng.normal(size=2048)).astype(np.float32)
    weighted = gguf.quants.dequantize(quantize(w, name, importance=importance), kind)
    assert error(w, weighted, importance) < 0.95 * error(w, plain, importance)
    assert error(w, weighted) > error(w, plain)


@pytest.mark.peer("gguf")
@pytest.mark.parametrize("name", ["Q4_K", "Q5_K"])
@pytest.mark.parametrize("method", ["minmax", "mlx", "lsq"])
def test_given_grid(name, method):
    """The affine ops' own grids, negative scales of mlx included, in six bits."""
    import gguf

    rng = np.random.default_rng(80)
    w = (rng.normal(size=(64, 2048)) * 0.02).astype(np.float32)
    fields = {"group_size": 32, "bits": int(name[1])}
    scales, biases, q = bittern.qdq_affine_init(w, method=method, **fields)
    affine = bittern.qdq_affine_forward(q, scales, biases, **fields)
    blocks = quantize(w, name, scales=scales, biases=biases, given_grid=True)
    fitted = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    assert error(w, fitted) < 1.06 * error(w, affine)


class Ggml:
    """ggml's own functions, in the library that llama-cpp-python brings."""

    def __init__(self):
        folder = pathlib.Path(importlib.util.find_spec("llama_cpp").origin).parent
        self.library = ctypes.CDLL(str(sorted(folder.glob("lib*/libggml-base.so*"))[0]))
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self.library.ggml_quantize_chunk.restype = ctypes.c_size_t
        self.library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, integer, integer, integer, pointer]

    def quantize(self, w, name, importance=None):
        import gguf

        kind = gguf.GGMLQuantizationType[name]
        weights, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.zeros((w.shape[0], w.shape[1] // weights * size), np.uint8)
        by = importance.ctypes.data if importance is not None else None
        self.library.ggml_quantize_chunk(kind.value, w.ctypes.data, blocks.ctypes.data, 0, *w.shape, by)
        return blocks

    def validates(self, blocks, name):
        import gguf

        function = self.library.ggml_validate_row_data
        function.restype, function.argtypes = ctypes.c_bool, [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
        return function(gguf.GGMLQuantizationType[name].value, blocks.ctypes.data, blocks.nbytes)

    def dequantize(self, blocks, name, columns):
        function = getattr(self.library, f"dequantize_row_{name.lower().replace('_k', '_K')}")
        function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        y = np.zeros((len(blocks), columns), np.float32)
        function(blocks.ctypes.data, y.ctypes.data, y.size)
        return y


@pytest.mark.peer("gguf", "llama_cpp")
def test_ggml():
    """ggml itself reads the three table types as bittern does, and its quantiser leaves more error than ours."""
    import gguf

    ggml = Ggml()
    rng = np.random.default_rng(81)
    for kind in ("normal", "heavy tails"):
        w = rng.normal(size=(64, 2048)) if kind == "normal" else rng.standard_t(4, size=(64, 2048))
        w = (w * 0.02).astype(np.float32)
        for name in TYPES[-3:]:
            blocks = ggml.quantize(w, name)
            assert_same(dequantize(blocks, name, 2048), ggml.dequantize(blocks, name, 2048))
        for name in BOUNDS:
            for importance in (None, np.exp(rng.normal(size=2048)).astype(np.float32)):
                theirs = gguf.quants.dequantize(ggml.quantize(w, name, importance), gguf.GGMLQuantizationType[name])
                operands = {} if importance is None else {"importance": importance}
                blocks = quantize(w, name, **operands)
                ours = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
                assert ggml.validates(blocks, name)
                assert_same(ggml.dequantize(blocks, name, 2048), ours)
                weight = 1.0 if importance is None else importance
                assert error(w, ours, weight) < error(w, theirs, weight), (kind, name, importance is not None)
