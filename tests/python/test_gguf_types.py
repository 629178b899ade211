"""Q2_K, Q3_K, IQ4_NL, IQ4_XS and MXFP4 through the command, judged by gguf and mlx."""

import json

import arrays
import numpy as np
import pytest

from test_cli import COMMAND, bittern, refused

pytestmark = [
    pytest.mark.skipif(COMMAND is None, reason="the command is not built (build/release/bittern)"),
    pytest.mark.peer("gguf"),
]
TABLES = ["IQ4_NL", "IQ4_XS", "MXFP4"]


def blocks_of(rng, name, rows, columns):
    """Any codes; scales of ordinary weights."""
    import gguf

    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    data = rng.integers(0, 256, (rows, columns // weights, size), dtype=np.uint8)
    if name == "MXFP4":
        data[:, :, 0] = rng.integers(115, 125, data.shape[:2])
    else:
        scales = (rng.normal(size=data.shape[:2]) * 1e-4).astype(np.float16)
        data[:, :, :2] = scales.view(np.uint8).reshape(*data.shape[:2], 2)
    return data.reshape(rows, -1)


def write_gguf(path, tensors, keys=None, architecture="nobodys", type="model"):
    """tensors: name -> numbers, or (blocks, the name of their type)."""

    def describe(writer):
        if not keys:
            writer.add_type(type)
            writer.add_file_type(30)  # IQ4_XS
        for key, field in (keys or {}).items():
            kinds = field.types
            writer.add_key_value(key, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)

    return arrays.write_gguf(path, tensors, architecture, describe)


def read_gguf(path):
    """name -> (the name of its type, its numbers), and the file's type."""
    import gguf

    reader = gguf.GGUFReader(path)
    tensors = {
        t.name: (t.tensor_type.name, gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors
    }
    return tensors, reader.get_field("general.file_type").contents()


def error(w, y):
    return ((w - y.astype(np.float64)) ** 2).sum() / (w.astype(np.float64) ** 2).sum()


@pytest.fixture
def plain(tmp_path):
    rng = np.random.default_rng(1)
    tensors = {f"{name}.weight": rng.standard_normal((24, columns)).astype(np.float32)
               for name, columns in (("a", 512), ("b", 256), ("small", 96), ("odd", 100))}
    return write_gguf(tmp_path / "plain.gguf", tensors), tensors


@pytest.mark.parametrize("flags, name, number, bound", [
    (("--type", "Q2_K"), "Q2_K", 10, 0.071),
    (("--type", "q3_k"), "Q3_K", 12, 0.0215),  # as llama-quantize: an alias of Q3_K_M
    (("--type", "Q3_K_S"), "Q3_K", 11, 0.0215),
    (("--bits", 2), "Q2_K", 10, 0.071),
    (("--bits", 3), "Q3_K", 11, 0.0215),
])
def test_two_and_three_bits(plain, tmp_path, flags, name, number, bound):
    path, tensors = plain
    result = bittern("quantize", path, "-o", tmp_path / "out.gguf", *flags)
    assert result.returncode == 0, result
    for text in (f"rows of 96 are no multiple of 256: Q4_0 in place of {name}: small.weight",
                 f"rows of 100 are no multiple of 256: F16 in place of {name}: odd.weight"):
        assert text in result.stdout
    made, file_type = read_gguf(tmp_path / "out.gguf")
    assert file_type == number
    assert {n: t for n, (t, _) in made.items()} == {
        "a.weight": name, "b.weight": name, "small.weight": "Q4_0", "odd.weight": "F16"}
    for tensor in ("a.weight", "b.weight"):
        assert error(tensors[tensor], made[tensor][1]) < bound
    # A dry run promises the same, and the file is one that bittern reads.
    dry = bittern("quantize", path, "--format", "gguf", "--dry-run", *flags)
    assert dry.returncode == 0 and f"Q4_0 in place of {name}" in dry.stdout
    compared = bittern("inspect", path, "--compare", tmp_path / "out.gguf")
    assert compared.returncode == 0, compared


def test_rules_mix_types(plain, tmp_path):
    path, _ = plain
    flags = ("--override", r"^a\.=2", "--tensor-type", r"^b\.=Q3_K")
    result = bittern("quantize", path, "-o", tmp_path / "out.gguf", "--bits", 8, *flags)
    assert result.returncode == 0, result
    made, _ = read_gguf(tmp_path / "out.gguf")
    assert [made[f"{n}.weight"][0] for n in ("a", "b", "small")] == ["Q2_K", "Q3_K", "Q8_0"]


def test_importance_weighs_them(plain, tmp_path):
    path, tensors = plain
    rng = np.random.default_rng(2)
    weight = np.exp(2 * rng.normal(size=512)).astype(np.float32)
    write_gguf(tmp_path / "imatrix.gguf", {"a.weight.in_sum2": weight[None], "a.weight.counts": np.ones((1, 1), np.float32)},
               type="imatrix")
    for name in ("Q2_K", "Q3_K"):
        errors = []
        for flags in ((), ("--imatrix", tmp_path / "imatrix.gguf")):
            out = tmp_path / f"{name}{len(errors)}.gguf"
            result = bittern("quantize", path, "-o", out, "--type", name, *flags)
            assert result.returncode == 0, result
            y = read_gguf(out)[0]["a.weight"][1]
            errors.append((weight * (tensors["a.weight"] - y.astype(np.float64)) ** 2).sum())
        assert errors[1] < 0.9 * errors[0]


@pytest.fixture
def tables(tmp_path):
    rng = np.random.default_rng(3)
    tensors = {f"{name.lower()}.weight": (blocks_of(rng, name, 24, 512), name) for name in TABLES}
    return write_gguf(tmp_path / "tables.gguf", tensors), tensors


def numbers_of(tensors):
    import gguf

    return {n: gguf.quants.dequantize(b, gguf.GGMLQuantizationType[t]) for n, (b, t) in tensors.items()}


def test_tables_are_read(tables, tmp_path):
    path, tensors = tables
    wanted = numbers_of(tensors)
    result = bittern("inspect", path, "--json", tmp_path / "report.json")
    assert result.returncode == 0 and "unsupported" not in result.stdout, result
    assert all(name in result.stdout for name in TABLES)

    out = tmp_path / "plain.gguf"
    assert bittern("quantize", path, "-o", out, "--dequantize", "f32").returncode == 0
    made, _ = read_gguf(out)
    for name, y in wanted.items():
        assert np.array_equal(made[name][1].view(np.uint32), y.view(np.uint32)), name
    compared = bittern("inspect", path, "--compare", out, "--json", tmp_path / "compared.json")
    assert compared.returncode == 0, compared


def test_tables_are_kept_or_quantised_again(tables, tmp_path):
    path, tensors = tables
    # From GGUF to GGUF the blocks go as they are.
    out = tmp_path / "same.gguf"
    assert bittern("quantize", path, "-o", out, "--transcode").returncode == 0
    made, file_type = read_gguf(out)
    assert {n: t for n, (t, _) in made.items()} == {n: t for n, (_, t) in tensors.items()}
    assert file_type == 30
    # Again only when told to, and never into a type that is read only.
    flags = ("quantize", path, "-o", tmp_path / "again.gguf", "--bits", 4)
    refused(bittern(*flags), 2, "is quantised already (IQ4_NL)")
    assert bittern(*flags, "--allow-requantize").returncode == 0
    made, _ = read_gguf(tmp_path / "again.gguf")
    for name, y in numbers_of(tensors).items():
        assert made[name][0] == "Q4_K" and error(y, made[name][1]) < 0.01
    for name in TABLES:
        result = bittern("quantize", path, "-o", tmp_path / "no.gguf", "--type", name, "--allow-requantize")
        refused(result, 3, f"--type {name}: not written, expected one of Q2_K Q3_K")
    assert not (tmp_path / "no.gguf").exists()


@pytest.mark.peer("mlx")
def test_tables_go_to_mlx_exactly(smollm2, tmp_path):
    """A llama whose one layer has table types; mlx gives the numbers that gguf gives."""
    import gguf
    import mlx.core as mx

    reader = gguf.GGUFReader(smollm2)
    rng = np.random.default_rng(4)
    tensors = {t.name: (t.data, t.tensor_type.name) for t in reader.tensors if not t.name.startswith("blk.")}
    types = {"ffn_up": "IQ4_NL", "ffn_gate": "MXFP4", "ffn_down": "IQ4_XS"}
    for t in reader.tensors:
        if not t.name.startswith("blk.0."):
            continue
        name = types.get(t.name.split(".")[2])
        if name is None:
            tensors[t.name] = (t.data, t.tensor_type.name)
        else:
            tensors[t.name] = (blocks_of(rng, name, int(t.shape[1]), int(t.shape[0])), name)
    keys = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.") and k != "general.architecture"}
    keys["llama.block_count"].parts[keys["llama.block_count"].data[0]] = np.array([1], np.uint32)
    path = write_gguf(tmp_path / "one.gguf", tensors, keys, "llama")
    result = bittern("quantize", path, "-o", tmp_path / "mlx", "--transcode")
    assert result.returncode == 0, result
    made = mx.load(str(tmp_path / "mlx" / "model.safetensors"))
    config = json.loads((tmp_path / "mlx" / "config.json").read_text())["quantization"]
    for part, name in types.items():
        module = f"model.layers.0.mlp.{part[4:]}_proj"
        bits = 5 if name == "MXFP4" else 8
        assert (config[module] if isinstance(config.get(module), dict) else config)["bits"] == bits
        y = mx.dequantize(made[f"{module}.weight"], made[f"{module}.scales"], made[f"{module}.biases"], 32, bits)
        blocks, _ = tensors[f"blk.0.{part}.weight"]
        wanted = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
        assert np.array_equal(np.array(y), wanted), name
