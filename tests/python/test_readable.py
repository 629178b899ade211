"""Whatever bittern quantize writes can be read back, by itself and by mlx: every kind of input, with
and without a config.json, in every mode."""

import json

import numpy as np
import pytest

from test_cli import COMMAND, bittern, refused
from test_quantize import load_numbers, weights, write_folder, write_gguf

pytestmark = pytest.mark.skipif(
    COMMAND is None, reason="the command is not built (build/release/bittern)"
)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 256,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}


def llama_tensors():
    rng = np.random.default_rng(8)
    tensors = {
        f"model.layers.0.{name}.weight": weights(rng, rows, columns)
        for name, rows, columns in (
            ("self_attn.q_proj", 128, 128),
            ("self_attn.k_proj", 64, 128),
            ("self_attn.v_proj", 64, 128),
            ("self_attn.o_proj", 128, 128),
            ("mlp.gate_proj", 256, 128),
            ("mlp.up_proj", 256, 128),
            ("mlp.down_proj", 128, 256),
        )
    }
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        tensors[f"model.{name}.weight"] = 1 + weights(rng, 1, 128)[0]
    tensors["model.embed_tokens.weight"] = weights(rng, 64, 128)
    return tensors


def write_input(folder, kind):
    """The model as one kind of input; the path to give to bittern."""
    tensors = llama_tensors()
    if kind == "gguf":
        folder.mkdir()
        return write_gguf(folder / "in.gguf", {"blk.0.a.weight": tensors["model.embed_tokens.weight"]})
    hf = write_folder(folder, tensors, config=LLAMA, others={})
    config = hf / "config.json"
    if kind in ("file alone", "folder without config"):
        config.unlink()
    if kind == "empty config":
        config.write_text("{}")
    if kind == "unknown architecture":
        config.write_text('{"model_type": "nobodys"}')
    return hf / "model.safetensors" if kind.startswith("file") else hf


KINDS = [
    "folder",
    "folder without config",
    "empty config",
    "unknown architecture",
    "file alone",
    "file beside its config",
]
MODES = {
    "bits": ["--bits", 4],
    "group 32": ["--bits", 3, "--group-size", 32],
    "target": ["--target-bpw", 6],
    "rules": ["--bits", 4, "--override", "mlp=8:32", "--override", "q_proj=keep"],
    "f16 scales": ["--bits", 6, "--scale-dtype", "f16"],
    "through": ["--bits", 4, "--format", "safetensors"],
    "dequantize": ["--dequantize", "f16"],
    "dequantize to mlx": ["--dequantize", "bf16", "--format", "mlx"],
    "transcode": ["--transcode"],
}


def mlx_weights(folder):
    """Every tensor as a reader of MLX folders has it: mx.load and the config's quantisation."""
    import mlx.core as mx

    stored = {}
    for file in folder.glob("*.safetensors"):
        stored.update(mx.load(str(file)))
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").exists() else {}
    quantization = config.get("quantization", {})
    numbers = {}
    for name, w in stored.items():
        module, _, part = name.rpartition(".")
        if part in ("scales", "biases"):
            continue
        if f"{module}.scales" in stored:
            assert w.dtype == mx.uint32
            how = {**quantization, **quantization.get(module, {})}
            w = mx.dequantize(
                w, stored[f"{module}.scales"], stored[f"{module}.biases"], how["group_size"], how["bits"]
            )
        numbers[name] = np.array(w.astype(mx.float32))
    return numbers


@pytest.mark.peer("mlx", "safetensors")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_can_be_read(tmp_path, kind, mode):
    source = write_input(tmp_path / "in", kind)
    out = tmp_path / "out"
    result = bittern("quantize", source, "-o", out, *MODES[mode])
    assert result.returncode == 0, result
    original = llama_tensors()
    peer = mlx_weights(out)
    assert set(peer) == set(original)
    codes = sorted(p.name for p in out.glob("*.safetensors"))
    assert codes == ["model.safetensors"]
    told = "the source has no config.json" in result.stdout
    quantised = mode in ("bits", "group 32", "target", "rules", "f16 scales")
    assert told == (quantised and kind in ("folder without config", "file alone")), result.stdout

    # bittern reads it: inspect, compare and dequantise agree with the peer.
    report = tmp_path / "report.json"
    assert bittern("inspect", out, "--json", report).returncode == 0
    assert json.loads(report.read_text())["model"]["parameters"] == sum(w.size for w in original.values())
    result = bittern("quantize", out, "-o", tmp_path / "back", "--dequantize", "f32", "--quiet")
    assert result.returncode == 0, result
    back = load_numbers(tmp_path / "back")
    for name, w in original.items():
        np.testing.assert_array_equal(back[name], peer[name], err_msg=name)
        if w.ndim == 2 and quantised:
            assert np.square(back[name] - w).mean() < 0.2 * np.square(w).mean(), name


@pytest.mark.parametrize("text,what", [("[]", "not an object"), ("[1, 2]", "not an object"), ("{", "JSON"), ("", "empty")])
def test_a_config_that_is_none_is_refused(tmp_path, text, what):
    source = write_input(tmp_path / "in", "folder")
    (source / "config.json").write_text(text)
    for path in (source, source / "model.safetensors"):
        for flags in (["--bits", 4], ["--dequantize", "f32"]):
            refused(bittern("quantize", path, "-o", tmp_path / "out", *flags), 2, "config.json", what)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize("kind", ["folder without config", "file alone", "empty config"])
def test_gguf_needs_a_config(tmp_path, kind):
    source = write_input(tmp_path / "in", kind)
    result = bittern("quantize", source, "-o", tmp_path / "out.gguf", "--type", "Q8_0")
    refused(result, 2, "no config.json" if kind != "empty config" else "model_type")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_tensors_named_like_scales_are_not_mixed_up(tmp_path):
    """A plain a.scales beside a.weight would be read as the scales of its codes."""
    rng = np.random.default_rng(9)
    tensors = {"a.weight": weights(rng, 8, 128), "a.scales": weights(rng, 8, 2), "b.weight": weights(rng, 8, 128)}
    source = write_folder(tmp_path / "in", tensors)
    result = bittern("quantize", source, "-o", tmp_path / "out", "--bits", 4)
    refused(result, 2, "a.scales")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


@pytest.mark.peer("mlx")
@pytest.mark.parametrize("flags", ["--bits 4", "--transcode", "--bits 4 --dtype bf16", "--dtype f16"])
def test_f64_becomes_what_mlx_reads(tmp_path, flags):
    import mlx.core as mx

    tensors = {name: w.astype(np.float64) for name, w in llama_tensors().items()}
    source = write_folder(tmp_path / "hf", tensors, config=LLAMA, others={})
    out = tmp_path / "out"
    result = bittern("quantize", source, "-o", out, *flags.split())
    assert result.returncode == 0, result
    norm = mx.load(str(out / "model.safetensors"))["model.norm.weight"]
    wanted = {"bf16": mx.bfloat16, "f16": mx.float16}.get(flags.split()[-1], mx.float32)
    assert norm.dtype == wanted
    assert ("F64, which mlx has not: written as F32" in result.stdout) == (wanted == mx.float32)


@pytest.mark.peer("gguf")
def test_f64_in_other_formats(tmp_path):
    tensors = {name: w.astype(np.float64) for name, w in llama_tensors().items()}
    source = write_folder(tmp_path / "hf", tensors, config=LLAMA, others={})
    report = tmp_path / "report.json"

    def planned(*flags, source=source):
        result = bittern("quantize", source, "--dry-run", *flags, "--json", report, "--force")
        assert result.returncode == 0, result
        return {t["name"]: t["to"] for t in json.loads(report.read_text())["tensors"]}

    assert planned("--bits", 4, "--format", "safetensors")["model.norm.weight"] == "F64"
    assert planned("--dtype", "bf16", "--format", "safetensors")["model.norm.weight"] == "BF16"
    vector = {"blk.0.a.weight": tensors["model.embed_tokens.weight"], "output_norm.weight": tensors["model.norm.weight"]}
    gguf = write_gguf(tmp_path / "in.gguf", vector)
    assert planned("--bits", 8, "--format", "gguf", source=gguf)["output_norm.weight"] == "F32"


def test_weights_that_the_index_does_not_list_are_told(tmp_path):
    """Other programs read all tensors of a shard, or all files called model*."""
    from safetensors.numpy import save_file

    folder = tmp_path / "in"
    folder.mkdir()
    tensors = {f"l.{i}.weight": weights(np.random.default_rng(i), 4, 64) for i in range(4)}
    shards = [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    for shard, (name, w) in zip(shards, tensors.items()):
        save_file({name: w, f"{name}.more": w}, folder / shard)
    weight_map = dict(zip(tensors, shards[:2])) | {"l.0.weight.more": shards[0]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for flags in (["--bits", 4], ["--dequantize", "f16"]):
        result = bittern("quantize", folder, "--dry-run", *flags)
        assert result.returncode == 0, result
        assert 'note: not read: tensors that the index does not list: "l.1.weight.more"\n' in result.stdout
        assert f'note: not read: files that are not of the model: "{shards[2]}" and 1 more\n' in result.stdout


# ---- what no reader could make sense of ----


def write_raw(path, tensors):
    """name -> (dtype, shape, bytes), in dtypes that numpy has not."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("flags", [["--bits", 4], ["--dequantize", "f16"], ["--transcode"], ["--dtype", "f16"]])
def test_a_model_without_tensors_makes_no_folder(tmp_path, flags):
    source = write_raw(tmp_path / "in.safetensors", {})
    refused(bittern("quantize", source, "-o", tmp_path / "out", *flags), 2, "no tensors")
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


@pytest.mark.parametrize("flags", [["--bits", 4], ["--transcode"], ["--dequantize", "f16", "--format", "mlx"]])
@pytest.mark.parametrize("dtype,bits", [("F8_E5M2", 8), ("F8_E4M3FNUZ", 8), ("F8_E5M2FNUZ", 8), ("F4", 4), ("F6_E2M3", 6)])
def test_a_dtype_that_mlx_does_not_read_is_refused(tmp_path, dtype, bits, flags):
    """mx.load refuses a file for one such tensor."""
    tensors = {"a.weight": ("F32", [2, 64], b"\0" * 512), "x": (dtype, [32], b"\0" * (4 * bits))}
    source = write_raw(tmp_path / "in.safetensors", tensors)
    refused(bittern("quantize", source, "-o", tmp_path / "out", *flags), 3, "tensor x: " + dtype, "MLX does not read")
    result = bittern("quantize", source, "-o", tmp_path / "out", "--dequantize", "f16")
    assert result.returncode == 0, result


def test_words_that_look_packed_are_not_read_as_codes(tmp_path):
    """Beside codes of 5 bits, config.json would say that these are, too."""
    rng = np.random.default_rng(9)
    tensors = {
        "a.weight": np.zeros((4, 8), np.uint32),
        "a.scales": weights(rng, 4, 1),
        "a.biases": weights(rng, 4, 1),
        "b.weight": weights(rng, 4, 64),
    }
    source = write_folder(tmp_path / "in", tensors)
    refused(bittern("quantize", source, "-o", tmp_path / "out", "--bits", 5), 2, "a.weight", "config.json")
    result = bittern("quantize", source, "-o", tmp_path / "out", "--dequantize", "f16")
    assert result.returncode == 0, result


@pytest.mark.peer("mlx")
def test_modules_named_like_keys_of_the_config(tmp_path):
    rng = np.random.default_rng(9)
    tensors = {f"{name}.weight": weights(rng, 4, 64) for name in ("bits", "group_size", "mode", "a")}
    source = write_folder(tmp_path / "in", tensors)
    rules = [word for name in ("bits", "group_size", "mode") for word in ("--override", f"{name}=8:32")]
    out = tmp_path / "out"
    result = bittern("quantize", source, "-o", out, "--bits", 4, *rules)
    assert result.returncode == 0 and "no place for a module of this name" in result.stdout, result
    numbers = mlx_weights(out)
    for name in ("bits", "group_size", "mode"):
        np.testing.assert_array_equal(numbers[f"{name}.weight"], tensors[f"{name}.weight"])
    assert bittern("inspect", out).returncode == 0


def test_a_config_that_could_not_be_read_is_not_written(tmp_path):
    """Every tensor that differs from the rest is an entry of config.json, whose size is limited."""
    count = 70_000
    data = b"\0" * (128 * count)
    header = {
        f"{'ab'[i % 2]}.{i}.weight": {"dtype": "F32", "shape": [1, 32], "data_offsets": [128 * i, 128 * i + 128]}
        for i in range(count)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (tmp_path / "in.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    args = ["quantize", tmp_path / "in.safetensors", "-o", tmp_path / "out", "--group-size", 32, "--quiet"]
    result = bittern(*args, "--bits", 4, "--override", r"^a\.=8:32")
    refused(result, 2, "config.json: more than 262144 values")
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]
