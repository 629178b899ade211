"""Bits, dtypes and a numpy that has no bfloat16."""

import json
import pathlib
import struct
import types

import numpy as np

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
NUMPY = {"f32": np.float32, "f64": np.float64, "f16": np.float16}


class BF16:
    """bfloat16 as raw bits, for a numpy without ml_dtypes, whose arrays it imitates."""

    dtype = types.SimpleNamespace(name="bfloat16")

    def __init__(self, bits):
        assert bits.dtype == np.uint16
        self.bits = bits

    def view(self, dtype):
        return self.bits.view(dtype)

    def __getitem__(self, index):
        return BF16(self.bits[index])

    @property
    def shape(self):
        return self.bits.shape


def zeros(shape, dtype):
    return BF16(np.zeros(shape, np.uint16)) if dtype == "bf16" else np.zeros(shape, NUMPY[dtype])


def bits_of(a):
    """The array's bits, one unsigned integer per element."""
    if isinstance(a, BF16):
        return a.bits
    return np.ascontiguousarray(a).view(f"u{a.dtype.itemsize}")


def values_of(a):
    """The array's values as f64."""
    if isinstance(a, BF16):
        return (a.bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return a.astype(np.float64)


def from_f32(values, dtype):
    """f32 values rounded to nearest even; no NaN."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype != "bf16":
        return values.astype(NUMPY[dtype])
    bits = values.view(np.uint32).astype(np.uint64)
    return BF16(((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16))


def assert_same_bits(a, b):
    a, b = bits_of(a), bits_of(b)
    assert a.shape == b.shape and a.dtype == b.dtype
    wrong = np.argwhere(a != b)
    assert len(wrong) == 0, f"{len(wrong)} of {a.size} differ, first at {wrong[0]}"


def load_golden(name):
    """A safetensors file; BF16 tensors come as BF16."""
    data = (GOLDEN / name).read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + n])
    header.pop("__metadata__", None)
    kinds = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4", "I32": "<i4", "U8": "u1"}
    tensors = {}
    for key, entry in header.items():
        begin, end = entry["data_offsets"]
        a = np.frombuffer(data[8 + n + begin : 8 + n + end], kinds[entry["dtype"]])
        a = a.reshape(entry["shape"])
        tensors[key] = BF16(a) if entry["dtype"] == "BF16" else a
    return tensors


def write_gguf(path, tensors, architecture="nobodys", describe=None, **options):
    """tensors: name -> numbers, or (blocks, their type or its name); describe(writer) adds keys."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture, **options)
    if describe:
        describe(writer)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            data, kind = tensor
            kind = gguf.GGMLQuantizationType[kind] if isinstance(kind, str) else kind
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
