"""Writes gguf_blocks.safetensors: GGUF's block formats as the `gguf` Python package reads and writes them.

Peer: gguf 0.19.0 from PyPI, numpy 2.4.6. The versions that made a file are in its metadata.

    python make_gguf_goldens.py            write the file beside this script
    python make_gguf_goldens.py --check    make it again in memory and compare with the file, byte for byte

What is in it, with TYPE one of Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4:

    read.TYPE.blocks   [4, bytes]  U8    random blocks; rows: ordinary scales, wild ones, subnormal ones, any bytes
    read.TYPE.y        [4, 1024]   F32   gguf.quants.dequantize of them
    write.TYPE.w       [9, 256]    F32   weights, one kind of trouble per row (see ROWS); the first five types
    write.TYPE.blocks  [9, bytes]  U8    gguf.quants.quantize of them

A NaN's sign and payload belong to the processor: compare NaN as NaN.
"""

import importlib.metadata
import json
import pathlib
import struct
import sys

import gguf
import numpy as np

READ = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
WRITTEN = READ[:5]
# Where the f16 fields lie in a block.
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
          "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": ()}
ROWS = ["normal", "normal, sigma 0.02", "all negative", "all positive", "exact ties", "within 2 ulp of ties",
        "both signs of the largest magnitude", "f16 subnormal scales", "large"]


def kind(name):
    return gguf.GGMLQuantizationType[name]


def random_blocks(rng, name, rows, blocks):
    """Any bytes; the scales are ordinary, wild (infinities, NaN and huge among them), subnormal, any, row by row."""
    size = gguf.GGML_QUANT_SIZES[kind(name)][1]
    data = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in HALVES[name]:
        shape = (rows, blocks)
        wild = np.array([0x7C00, 0x7E00, 0xFC00, 0x7BFF, 0xFBFF, 0, 0x8000, 1], np.uint16)
        wild = np.tile(np.resize(np.roll(wild, -3 * HALVES[name].index(at)), blocks), (rows, 1))
        choices = [(rng.normal(size=shape) * 0.05).astype(np.float16).view(np.uint16), wild,
                   rng.integers(0, 1024, shape).astype(np.uint16) | np.uint16(0x8000) * rng.integers(0, 2, shape, np.uint16)]
        for row in range(rows):
            if row % 4 < 3:
                data[row, :, at : at + 2] = choices[row % 4][row].view(np.uint8).reshape(blocks, 2)
    if name == "MXFP4":  # a power of 2 in the first byte; 255 is 2^127
        ends = [np.arange(100, 160), np.array([255, 254, 253, 252, 128, 0, 1, 2]), np.arange(4)]
        for row in range(rows):
            if row % 4 < 3:
                data[row, :, 0] = np.resize(ends[row % 4], blocks)
    return data.reshape(rows, -1)


def weights(rng, name):
    """[9, 256] f32, groups of 32; no group is all zeros or has a zero minimum, whose sign peers do not agree on."""
    levels = {"Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 127}[name]
    normal = lambda: rng.normal(size=(8, 32))
    scale = 2.0 ** rng.integers(-6, 3, (8, 1))
    if name.endswith("_1"):
        steps = rng.integers(0, levels, (8, 32)) + 0.5
        steps[:, 3], steps[:, 20] = 0, levels
        ties = (steps - levels - 3) * scale
    else:
        steps = rng.integers(-levels + 1, levels - 1, (8, 32)) + 0.5
        steps[:, 3] = -levels * rng.choice([-1, 1], 8)
        ties = steps * scale
    near = ties.astype(np.float32) * rng.choice([1.0, 1.7, 0.3], (8, 1)).astype(np.float32)
    near = (near.view(np.int32) + rng.integers(-2, 3, near.shape, np.int32)).view(np.float32)
    symmetric = normal()
    symmetric[:, 5], symmetric[:, 17] = np.array([[1], [-1]]) * np.abs(symmetric).max(1) * rng.choice([-1, 1], 8)
    rows = [normal(), normal() * 0.02, -np.abs(normal()) - 0.3, np.abs(normal()) + 0.3, ties, near, symmetric,
            normal() * 1e-6, np.clip(normal(), -3, 3) * 2e4]
    assert len(rows) == len(ROWS)
    return np.stack([np.asarray(r, np.float32).reshape(256) for r in rows])


def make():
    tensors = {}
    with np.errstate(all="ignore"):
        for index, name in enumerate(READ):
            rng = np.random.default_rng(6000 + index)
            blocks = random_blocks(rng, name, 4, 1024 // gguf.GGML_QUANT_SIZES[kind(name)][0])
            tensors[f"read.{name}.blocks"] = blocks
            tensors[f"read.{name}.y"] = gguf.quants.dequantize(blocks, kind(name))
            if name in WRITTEN:
                w = weights(rng, name)
                tensors[f"write.{name}.w"] = w
                tensors[f"write.{name}.blocks"] = gguf.quants.quantize(w, kind(name))
    return tensors


def safetensors_bytes(tensors, metadata):
    """Sorted, so that the same tensors always give the same bytes; f32 first, so that all are aligned."""
    header, offset, order = {"__metadata__": metadata}, 0, sorted(tensors, key=lambda k: (tensors[k].itemsize == 1, k))
    for key in order:
        a = tensors[key]
        dtype = {"float32": "F32", "uint8": "U8"}[a.dtype.name]
        header[key] = {"dtype": dtype, "shape": list(a.shape), "data_offsets": [offset, offset + a.nbytes]}
        offset += a.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(tensors[k].tobytes() for k in order)


def main():
    path = pathlib.Path(__file__).with_name("gguf_blocks.safetensors")
    metadata = {
        "generator": "tests/golden/make_gguf_goldens.py",
        "peer": "gguf",
        "gguf": importlib.metadata.version("gguf"),
        "numpy": np.__version__,
        "rows": "; ".join(ROWS),
    }
    data = safetensors_bytes(make(), metadata)
    if "--check" in sys.argv[1:]:
        same = path.read_bytes() == data
        print(f"{path.name}: {'identical' if same else 'DIFFERENT'}")
        return 0 if same else 1
    path.write_bytes(data)
    print(f"{path.name}: {len(data)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
