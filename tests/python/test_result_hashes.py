"""Every file that bittern quantize writes, as a list of hashes in the tree: tests/golden/conversions.json.
A change of structure must leave the list as it is; a change of results rewrites it and says why in the
changelog. Nothing judges here whether a file is right: the other tests do.

BITTERN_UPDATE_GOLDENS=1 python -m pytest tests/python/test_result_hashes.py rewrites the list.

The sources are made of integers (tiny_models.Numbers), and their hashes are listed apart: other inputs
are told from other outputs. Nothing is masked: no file names a version, a date or a path. Paths are
relative, because a GGUF file keeps its source's name and the path of its importance matrix."""

import hashlib
import json
import os
import pathlib
from concurrent.futures import ThreadPoolExecutor

import arrays
import numpy as np
import pytest

import test_recipes
from test_cli import COMMAND, bittern
from test_gguf_types import TABLES, write_gguf
from test_models import MODELS, SIZES
from test_quantize import DTYPES, write_folder
from tiny_models import Numbers, config_of, tensors_of, tokenizer_files

pytestmark = [
    pytest.mark.skipif(COMMAND is None, reason="the command is not built (build/release/bittern)"),
    pytest.mark.peer("gguf", "safetensors"),
]
LIST = arrays.GOLDEN / "conversions.json"
UPDATING = os.environ.get("BITTERN_UPDATE_GOLDENS", "") not in ("", "0")
BITS = (2, 3, 4, 5, 6, 8)
PURE = ("Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "F16", "BF16", "F32")
MIXES = ("Q2_K", "Q2_K_S", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M")
# Rows that super-blocks divide, and one kind that they do not.
WIDE = {
    "model_type": "llama",
    **SIZES,
    "vocab_size": 264,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": 1,
}


# ---- the list ----


def hashes(path):
    """Of a file, of the files of a folder, or of the parts of a GGUF file."""

    def one(file):
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]

    if path.is_file():
        return one(path)
    files = path.iterdir() if path.is_dir() else path.parent.glob(f"{path.stem}-?????-of-?????.gguf")
    found = {file.name: one(file) for file in sorted(files)}
    assert found, f"{path}: not written"
    return found


def differences(group, listed, got):
    """A line for each source, conversion and file that is not as listed."""
    lines = []
    for kind, what in (("inputs", "the input changed"), ("outputs", "the output changed")):
        then, now = listed.get(kind, {}), got[kind]
        for name in sorted({*then, *now}):
            a, b = then.get(name), now.get(name)
            if a == b:
                continue
            if a is None or b is None:
                lines.append(f"{group}: {name}: {'not listed' if a is None else 'listed, but not made'}")
            elif isinstance(a, dict) and isinstance(b, dict):
                files = sorted(file for file in {*a, *b} if a.get(file) != b.get(file))
                lines.append(f"{group}: {name}: {what}: {', '.join(files)}")
            else:
                lines.append(f"{group}: {name}: {what}")
    return lines


def read_list():
    return json.loads(LIST.read_text()) if LIST.exists() else {}


def write_list(groups):
    """A line for each source and conversion, so that a difference of two lists can be read."""

    def section(entries):
        lines = [f"      {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(entries.items())]
        return "{\n" + ",\n".join(lines) + "\n    }"

    texts = [
        f'  {json.dumps(name)}: {{\n    "inputs": {section(group["inputs"])},\n'
        f'    "outputs": {section(group["outputs"])}\n  }}'
        for name, group in sorted(groups.items())
    ]
    LIST.write_text("{\n" + ",\n".join(texts) + "\n}\n")


class Work:
    """The sources and conversions of a group, in the current folder."""

    def __init__(self):
        self.made = {"inputs": {}, "outputs": {}}

    def source(self, path):
        path = pathlib.Path(path)
        self.made["inputs"][path.name] = hashes(path)
        return path

    def folder(self, name, config, dtype="f32", seed=1):
        tensors = tensors_of(config, seed, DTYPES[dtype])
        return self.source(write_folder(pathlib.Path(name), tensors, config, tokenizer_files()))

    def convert(self, conversions):
        """conversions: output -> (source, flags...)"""

        def one(item):
            out, (source, *flags) = item
            # Threads of two runs on two cores must not spin while they wait.
            passive = {"OMP_WAIT_POLICY": "passive"}
            result = bittern("quantize", source, "-o", out, *flags, "--quiet", env=passive)
            assert result.returncode == 0, (out, result)
            return out, hashes(pathlib.Path(out))

        with ThreadPoolExecutor(2) as pool:
            for out, found in pool.map(one, conversions.items()):
                assert out not in self.made["outputs"]
                self.made["outputs"][out] = found


# ---- what is converted ----


def architecture(work, name):
    """Through every world and back, plain and quantised."""
    dtype = list(DTYPES)[list(MODELS).index(name) % 3]
    source = work.folder(name, config_of(name), dtype)
    plain = ("--dequantize", "f32", "--format")
    work.convert({
        "plain.gguf": (source, *plain, "gguf"),
        "plain-mlx": (source, *plain, "mlx"),
        "mixed.gguf": (source, "--type", "Q4_K_M"),
        "four-mlx": (source, "--bits", 4, "--group-size", 32),
    })  # fmt: skip
    work.convert({
        "gguf-hf": ("plain.gguf", *plain, "safetensors"),
        "mlx-hf": ("plain-mlx", *plain, "safetensors"),
        "gguf-mlx": ("mixed.gguf", "--transcode"),
        "mlx-gguf.gguf": ("four-mlx", "--type", "Q8_0", "--allow-requantize"),
    })  # fmt: skip


def folders(work):
    """Groups of MLX, and what decides about them."""
    wide = work.folder("wide", WIDE, "bf16")
    work.convert({
        f"{bits}-{group}-{method}": (wide, "--bits", bits, "--group-size", group, "--method", method)
        for bits in BITS
        for group in (32, 64, 128)
        for method in ("minmax", "mlx", "lsq")
    })  # fmt: skip
    jobs = {}
    for dtype in DTYPES:
        source = work.folder(f"wide-{dtype}", WIDE, dtype, seed=2)
        jobs[f"{dtype}-4"] = (source, "--bits", 4)
        for scales in DTYPES:
            jobs[f"{dtype}-scales-{scales}"] = (source, "--bits", 3, "--scale-dtype", scales)
            jobs[f"{dtype}-to-{scales}"] = (source, "--dtype", scales)
        jobs[f"{dtype}-through"] = (source, "--bits", 5, "--format", "safetensors")
        jobs[f"{dtype}-numbers"] = (wide, "--dequantize", dtype)
        jobs[f"{dtype}-numbers-mlx"] = (wide, "--dequantize", dtype, "--format", "mlx")
    policy = {"bits": 3, "rules": [{"match": "up_proj", "bits": 8, "group_size": 32}, {"match": "embed", "keep": True}]}
    pathlib.Path("policy.json").write_text(json.dumps(policy))
    rules = ("--override", "q_proj=8:32", "--override", "embed=keep", "--override", "mlp=6")
    experts = work.folder("experts", config_of("qwen2moe"))
    work.convert({
        **jobs,
        "q": (wide, "-q"),
        "rules": (wide, "--bits", 4, *rules),
        "policy": (wide, "--policy", "policy.json"),
        "head-left": (wide, "--bits", 4, "--leave-output-tensor"),
        "pure": (experts, "--bits", 4, "--group-size", 32, "--pure"),
        "target-4.6": (wide, "--target-bpw", 4.6),
        "target-6": (wide, "--target-bpw", 6),
        "target-6-group-32": (wide, "--target-bpw", 6, "--group-size", 32),
        "target-6-minmax": (wide, "--target-bpw", 6, "--method", "minmax"),
    })  # fmt: skip
    work.convert({
        "again": ("4-64-lsq", "--bits", 3, "--allow-requantize"),
        "4-numbers": ("4-64-lsq", "--dequantize", "f16"),
        "4-moved": ("4-64-lsq", "--transcode"),
    })  # fmt: skip


def importance(work, source):
    """A matrix for all tensors of a GGUF file but one, in both of llama.cpp's forms."""
    import gguf

    numbers, old, new = Numbers(9), [], {}
    for tensor in gguf.GGUFReader(source).tensors[1:]:
        if len(tensor.shape) > 1:
            mean = (numbers.integers(0, 64, int(tensor.shape[0])) ** 2 / 256).astype(np.float32)
            old.append((tensor.name.encode(), 8, mean * 8))
            new[f"{tensor.name}.in_sum2"] = mean * 4
            new[f"{tensor.name}.counts"] = np.array([4], np.float32)
    pathlib.Path("old.dat").write_bytes(test_recipes.legacy(old))
    work.source("old.dat")
    return work.source(write_gguf("imatrix.gguf", new, type="imatrix"))


def types(work):
    """Every type of GGUF, and what decides about them."""
    source = work.folder("wide", WIDE)
    work.convert({"plain.gguf": (source, "--dequantize", "f32", "--format", "gguf")})
    plain = "plain.gguf"
    matrix = importance(work, plain)
    weighed = ("--imatrix", matrix)
    jobs = {f"pure-{t}.gguf": (plain, "--type", t, "--pure") for t in PURE}
    jobs |= {f"{t}.gguf": (plain, "--type", t) for t in (*MIXES, "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "F16")}
    jobs |= {f"weighed-{t}.gguf": (plain, "--type", t, *weighed) for t in (*MIXES, "Q6_K")}
    jobs |= {f"bits-{b}.gguf": (plain, "--bits", b) for b in BITS}
    for t in ("Q4_1", "Q5_1"):
        jobs |= {f"{t}-{m}.gguf": (plain, "--type", t, "--method", m) for m in ("minmax", "lsq")}
        jobs[f"{t}-weighed.gguf"] = (plain, "--type", t, "--method", "lsq", *weighed)
    for target in (5, 6.5, 9):
        jobs[f"target-{target}.gguf"] = (plain, "--target-bpw", target)
        jobs[f"target-{target}-weighed.gguf"] = (plain, "--target-bpw", target, *weighed)
    mix = ("--type", "Q4_K_M")
    work.convert({
        **jobs,
        "weighed-mlx": (plain, "--bits", 3, "--format", "mlx", *weighed),
        "target-mlx-weighed": (plain, "--target-bpw", 5, "--format", "mlx", *weighed),
        "dat.gguf": (plain, *mix, "--imatrix", "old.dat"),
        "head.gguf": (plain, *mix, "--output-tensor-type", "Q8_0"),
        "embedding.gguf": (plain, *mix, "--token-embedding-type", "Q5_K"),
        "head-left.gguf": (plain, *mix, "--leave-output-tensor"),
        "rules.gguf": (plain, "--bits", 4, "--override", "attn_q=8", "--tensor-type", "ffn_up=Q3_K"),
        "dtype.gguf": (plain, "--dtype", "bf16"),
        "few.gguf": (plain, *mix, "--split-max-tensors", 4),
        "small.gguf": (plain, "--dequantize", "f32", "--split-max-size", "1M"),
    })  # fmt: skip
    work.convert({
        "joined.gguf": (next(pathlib.Path().glob("few-00002-of-*.gguf")), "--transcode"),
        "again.gguf": ("pure-Q8_0.gguf", "--type", "Q4_0", "--allow-requantize"),
    })  # fmt: skip
    work.convert({f"{t}-mlx": (f"pure-{t}.gguf", "--transcode") for t in PURE})
    work.convert({f"{t}-hf": (f"pure-{t}.gguf", "--dequantize", "f32") for t in PURE})
    work.convert({f"{t}-lossy": (f"pure-{t}.gguf", "--transcode", "--lossy") for t in ("Q2_K", "Q6_K")})
    work.convert({f"{t}-f16": (f"pure-{t}.gguf", "--transcode", "--scale-dtype", "f16") for t in ("Q4_K", "Q5_1")})


def mixes(work):
    """llama-quantize's types per tensor, for all that decides about them."""
    jobs = {}
    for name, model in test_recipes.MODELS.items():
        path = pathlib.Path(name.replace(", ", "-").replace(" ", "-") + ".gguf")
        work.source(test_recipes.tiny_gguf(path, **model, rng=Numbers(4)))
        jobs |= {f"{path.stem}-{t}.gguf": (path, "--type", t) for t in MIXES}
    work.convert(jobs)


def words(numbers, *shape):
    return numbers.integers(0, 2**32, shape).astype(np.uint32).view(np.int32)


def halves(numbers, *shape):
    return (numbers.integers(1, 64, shape) / 2048).astype(np.float16)


def others(work):
    """Grids that are read and not written: tables of GGUF, AWQ, GPTQ; and other forms of a folder."""
    import gguf
    from safetensors.numpy import save_file

    numbers = Numbers(6)
    source = work.folder("wide", WIDE)
    work.convert({"plain.gguf": (source, "--dequantize", "f32", "--format", "gguf")})
    reader = gguf.GGUFReader("plain.gguf")
    tensors = {t.name: (t.data, t.tensor_type.name) for t in reader.tensors}
    for part, name in zip(("ffn_up", "attn_q", "attn_output"), TABLES):
        rows = tensors[f"blk.0.{part}.weight"][0].shape[0]
        weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        blocks = numbers.integers(0, 256, (rows, 256 // weights, size)).astype(np.uint8)
        if name == "MXFP4":
            blocks[:, :, 0] = numbers.integers(115, 125, blocks.shape[:2])
        else:
            blocks[:, :, :2] = halves(numbers, *blocks.shape[:2], 1).view(np.uint8)
        tensors[f"blk.0.{part}.weight"] = (blocks.reshape(rows, -1), name)
    keys = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.") and k != "general.architecture"}
    tables = work.source(write_gguf(pathlib.Path("tables.gguf"), tensors, keys, "llama"))

    rows, columns, group = 32, 128, 64
    awq = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group, "zero_point": True}
    quantised = {"awq": (awq, {
        "a.qweight": words(numbers, columns, rows // 8),
        "a.qzeros": words(numbers, columns // group, rows // 8),
        "a.scales": halves(numbers, columns // group, rows),
    })}  # fmt: skip
    for bits in (2, 3, 4, 8):
        settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": False}
        quantised[f"gptq-{bits}"] = (settings, {
            "a.qweight": words(numbers, columns * bits // 32, rows),
            "a.qzeros": words(numbers, columns // group, rows * bits // 32),
            "a.scales": halves(numbers, columns // group, rows),
            "a.g_idx": (np.arange(columns) // group).astype(np.int32),
        })  # fmt: skip
    jobs = {
        "tables.out.gguf": (tables, "--transcode", "--format", "gguf"),
        "tables-mlx": (tables, "--transcode", "--format", "mlx"),
        "tables-hf": (tables, "--dequantize", "f32"),
        "tables-4.gguf": (tables, "--bits", 4, "--format", "gguf", "--allow-requantize"),
    }
    for name, (settings, tensors) in quantised.items():
        folder = write_folder(pathlib.Path(name), tensors, {"model_type": "nobodys", "quantization_config": settings})
        work.source(folder)
        jobs[f"{name}-mlx"] = (folder, "--transcode")
        jobs[f"{name}-hf"] = (folder, "--dequantize", "f32")

    # Shards, a file alone, numbers of f64, and those beyond f16.
    shards = pathlib.Path("shards")
    shards.mkdir()
    every = tensors_of(WIDE)
    where = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(every)}
    for file in sorted(set(where.values())):
        save_file({n: t for n, t in every.items() if where[n] == file}, shards / file, {"format": "pt"})
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (shards / "config.json").write_text(json.dumps(WIDE))
    work.source(shards)
    large = {"a.weight": (numbers.standard_normal((16, 256)) * 2**16).astype(np.float32)}
    wild = work.source(write_folder(pathlib.Path("wild"), large))
    doubles = {"a.weight": numbers.standard_normal((16, 256)) / 3, "b": numbers.standard_normal((5,)) / 3}
    f64 = work.source(write_folder(pathlib.Path("f64"), doubles))
    work.convert({
        **jobs,
        "shards-4": (shards, "--bits", 4),
        "alone-4": (source / "model.safetensors", "--bits", 4),
        "wild-f16": (wild, "--dequantize", "f16", "--lossy"),
        "f64-4": (f64, "--bits", 4),
        "f64-mlx": (f64, "--transcode"),
        "f64-bf16": (f64, "--dequantize", "bf16"),
    })  # fmt: skip


GROUPS = {f"architecture {name}": lambda work, name=name: architecture(work, name) for name in MODELS}
GROUPS |= {"folders": folders, "types": types, "mixes": mixes, "others": others}


@pytest.mark.parametrize("group", GROUPS)
def test_files_are_those_of_the_list(group, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    work = Work()
    GROUPS[group](work)
    listed = read_list()
    if UPDATING:
        write_list({**listed, group: work.made})
        return
    lines = differences(group, listed.get(group, {}), work.made)
    assert not lines, "\n".join(lines)


def test_the_list_has_no_other_groups():
    listed = read_list()
    if UPDATING:
        write_list({name: group for name, group in listed.items() if name in GROUPS})
        return
    assert sorted(listed) == sorted(GROUPS)


def test_a_changed_byte_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    work = Work()
    source = work.folder("llama", config_of("llama"))
    work.convert({"four": (source, "--bits", 4, "--group-size", 32), "q8.gguf": (source, "--type", "Q8_0")})
    listed = json.loads(json.dumps(work.made))
    assert differences("g", listed, work.made) == []
    for path in (tmp_path / "four" / "model.safetensors", tmp_path / "q8.gguf", source / "config.json"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    made = {
        "inputs": {"llama": hashes(source)},
        "outputs": {"four": hashes(tmp_path / "four"), "q8.gguf": hashes(tmp_path / "q8.gguf")},
    }
    assert differences("g", listed, made) == [
        "g: llama: the input changed: config.json",
        "g: four: the output changed: model.safetensors",
        "g: q8.gguf: the output changed",
    ]
    del listed["outputs"]["four"]
    assert "g: four: not listed" in differences("g", listed, made)
