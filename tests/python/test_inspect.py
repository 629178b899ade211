"""bittern inspect: models written by the gguf and safetensors packages, and what is said of them."""
import json

import arrays
import numpy as np
import pytest
import test_cli
from test_cli import bittern, refused

try:
    import gguf
    import safetensors.numpy as safetensors_numpy
except ImportError:
    pass  # the mark below tells

pytestmark = [test_cli.pytestmark, pytest.mark.peer("gguf", "safetensors")]

RNG = np.random.default_rng(6)


def numbers(*shape):
    return RNG.standard_normal(shape, dtype=np.float32)


def write_gguf(path, tensors, name="tiny", keys=None, **options):
    """tensors: name -> f32 array, or (f32 array, type)."""

    def describe(writer):
        writer.add_name(name)
        writer.add_block_count(2)
        writer.add_embedding_length(64)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_token_list(["a", "b", "c"])
        for key, value in (keys or {}).items():
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    tensors = {
        key: (gguf.quants.quantize(*value), value[1]) if isinstance(value, tuple) else value
        for key, value in tensors.items()
    }
    arrays.write_gguf(path, tensors, "llama", describe, **options)


def write_folder(folder, tensors, metadata=None, **config):
    folder.mkdir()
    safetensors_numpy.save_file(tensors, folder / "model.safetensors", metadata)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def inspect(tmp_path, *args):
    out = tmp_path / "out.json"
    result = bittern("inspect", *args, "--json", out, "--force")
    assert result.returncode == 0, result.stderr
    report = json.loads(out.read_text())
    assert report["schema"] == 1
    return result.stdout, report


def test_a_gguf_file(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, {
        "blk.0.attn_q.weight": (numbers(64, 64), gguf.GGMLQuantizationType.Q4_1),
        "blk.1.attn_q.weight": (numbers(64, 64), gguf.GGMLQuantizationType.Q4_1),
        "token_embd.weight": (numbers(3, 64), gguf.GGMLQuantizationType.Q8_0),
        "output_norm.weight": numbers(64),
    })
    text, report = inspect(tmp_path, path, "--tensors")
    model = report["model"]
    assert model["path"] == str(path) and model["kind"] == "gguf"
    assert (model["architecture"], model["name"]) == ("llama", "tiny")
    assert [model[k] for k in ("layers", "hidden_size", "heads", "key_value_heads", "vocabulary")] \
        == [2, 64, 4, 2, 3]
    assert model["class"] is None and model["experts"] is None and model["quantization"] is None
    assert model["parameters"] == 2 * 64 * 64 + 3 * 64 + 64
    q4_1, q8_0, f32 = 2 * 64 * 2 * 20, 3 * 2 * 34, 64 * 4
    assert model["bytes"] == q4_1 + q8_0 + f32
    assert model["bits_per_weight"] == pytest.approx(8 * model["bytes"] / model["parameters"])
    assert model["storages"] == [
        {"storage": "Q4_1", "tensors": 2, "parameters": 8192, "bytes": q4_1},
        {"storage": "F32", "tensors": 1, "parameters": 64, "bytes": f32},
        {"storage": "Q8_0", "tensors": 1, "parameters": 192, "bytes": q8_0},
    ]
    assert model["tensors"][2] == {"name": "token_embd.weight", "shape": [3, 64],
                                   "storage": "Q8_0", "bytes": q8_0, "bits_per_weight": 8.5,
                                   "decodable": True}
    assert model["notes"] == []
    assert "GGUF file, version 3" in text and "4, 2 for keys and values" in text
    assert "token_embd.weight" in text and "[3,64]" in text and "5.000" in text


def test_without_tensors_there_is_no_line_for_each(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, {"token_embd.weight": numbers(3, 64)})
    assert "token_embd" not in inspect(tmp_path, path)[0]


def test_what_cannot_be_decoded_is_listed_and_noted(tmp_path):
    path = tmp_path / "m.gguf"
    blocks = np.zeros((2, 74), np.uint8), "IQ2_XS"
    arrays.write_gguf(path, {f"x{i}": blocks for i in range(2)}, "llama")
    text, report = inspect(tmp_path, path)
    assert report["model"]["storages"][0] == {"storage": "IQ2_XS", "tensors": 2,
                                              "parameters": 1024, "bytes": 296}
    assert not report["model"]["tensors"][0]["decodable"]
    assert "note: 2 tensors of IQ2_XS: bittern does not turn it into numbers" in text


def test_a_part_of_a_split_file(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, {f"blk.{i}.w": numbers(64, 64) for i in range(3)}, split_max_tensors=1)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 3
    text, report = inspect(tmp_path, parts[1])
    assert "GGUF file, version 3, 3 parts" in text
    assert len(report["model"]["tensors"]) == 3 and report["model"]["architecture"] == "llama"
    parts[2].unlink()
    text, report = inspect(tmp_path, parts[1])
    assert "one part of a split file" in text
    assert [t["name"] for t in report["model"]["tensors"]] == ["blk.1.w"]
    assert report["model"]["notes"] == [
        f"this part alone, as the whole does not open: {parts[2]}: no such file or folder, "
        f"expected part 3 of 3 of {path.with_suffix('')}"]


def test_a_hugging_face_folder(tmp_path):
    folder = write_folder(
        tmp_path / "hf", {"a.weight": numbers(8, 32).astype(np.float16), "n": numbers(8)},
        {"format": "pt"}, model_type="llama", architectures=["LlamaForCausalLM"],
        num_hidden_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=8)
    text, report = inspect(tmp_path, folder)
    model = report["model"]
    assert model["kind"] == "huggingface" and model["class"] == "LlamaForCausalLM"
    assert (model["layers"], model["heads"], model["key_value_heads"]) == (1, 4, None)
    assert "llama (LlamaForCausalLM)" in text and "Hugging Face folder" in text
    # One shard alone, with the config.json beside it.
    text, report = inspect(tmp_path, folder / "model.safetensors")
    assert report["model"]["kind"] == "safetensors" and report["model"]["layers"] == 1


def test_sizes_of_a_text_config_and_other_spellings(tmp_path):
    folder = write_folder(tmp_path / "a", {"a": numbers(2)}, model_type="gemma3",
                          text_config={"num_hidden_layers": 7, "hidden_size": -1})
    model = inspect(tmp_path, folder)[1]["model"]
    assert (model["layers"], model["hidden_size"]) == (7, None)
    folder = write_folder(tmp_path / "b", {"a": numbers(2)}, model_type="gpt2", n_layer=3,
                          n_embd="many")
    model = inspect(tmp_path, folder)[1]["model"]
    assert (model["layers"], model["hidden_size"]) == (3, None)


def test_an_mlx_folder(tmp_path):
    words = RNG.integers(0, 2**32, (8, 64 * 4 // 32), dtype=np.uint32)
    params = np.ones((8, 1), np.float16)
    settings = {"group_size": 64, "bits": 4, "mode": "affine", "norm": False}
    folder = write_folder(
        tmp_path / "mlx",
        {"up.weight": words, "up.scales": params, "up.biases": params, "norm.weight": numbers(64)},
        {"format": "mlx"}, model_type="llama", quantization=settings, quantization_config=settings)
    text, report = inspect(tmp_path, folder)
    model = report["model"]
    assert model["kind"] == "mlx" and model["quantization"] == settings
    assert {"storage": "4 bit, group 64, F16", "tensors": 1, "parameters": 512, "bytes": 288} \
        in model["storages"]
    assert "4 bit, group 64, affine; 1 module apart" in text and "MLX folder" in text


def test_a_method_that_is_not_known_is_noted(tmp_path):
    folder = write_folder(tmp_path / "m", {"a.weight": np.zeros((4, 4), np.uint8)},
                          quantization_config={"quant_method": "bitsandbytes"})
    text, _ = inspect(tmp_path, folder)
    assert "note: quantised by bitsandbytes, which bittern does not decode" in text
    assert "note: 1 tensor of U8: bittern does not turn it into numbers" in text


def test_a_packing_that_is_not_read_is_listed_as_it_is_stored(tmp_path):
    settings = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    folder = write_folder(
        tmp_path / "mlx", {"a.weight": np.zeros((8, 8), np.uint32), "a.scales": numbers(8, 2)},
        {"format": "mlx"}, model_type="llama", num_hidden_layers=1, quantization=settings)
    for path in (folder, folder / "model.safetensors"):
        text, report = inspect(tmp_path, path)
        model = report["model"]
        assert sorted(t["name"] for t in model["tensors"]) == ["a.scales", "a.weight"]
        assert (model["layers"], model["quantization"]) == (1, settings)
        assert "tensors are shown as they are stored" in model["notes"][-1]
        assert 'mode "mxfp4", expected "affine"' in model["notes"][-1]
    refused(bittern("inspect", folder, "--compare", folder), 3, 'mode "mxfp4"')


def test_help_has_an_example():
    result = bittern("inspect", "--help")
    assert result.returncode == 0 and "Example: bittern inspect" in result.stdout
    for flag in ("--tensors", "--compare", "--json", "--threads", "--quiet"):
        assert flag in result.stdout


def test_names_of_strangers_do_not_steer_the_terminal(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, {"a\x1b[31mb": numbers(2, 32)}, name="x\r\x1b[2Jy")
    text, report = inspect(tmp_path, path, "--tensors")
    assert "\x1b" not in text and "\r" not in text and "a?[31mb" in text
    assert report["model"]["tensors"][0]["name"] == "a\x1b[31mb"


def test_names_that_are_not_utf_8_are_written_all_the_same(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, {"abcd": numbers(2, 32)})
    path.write_bytes(path.read_bytes().replace(b"abcd", b"ab\xff\xfe"))
    assert inspect(tmp_path, path)[1]["model"]["tensors"][0]["name"].startswith("ab\ufffd")


@pytest.mark.parametrize("case, status, text", [
    ("missing", 4, "missing: no such file or folder"),
    ("text", 3, 'starts with "hell", expected a GGUF or safetensors file or a folder'),
    ("folder", 4, "neither model.safetensors.index.json nor model.safetensors, expected one"),
    ("cut.gguf", 2, "cut.gguf: "),
    ("cut.safetensors", 2, "cut.safetensors: "),
])
def test_refused(tmp_path, case, status, text):
    path = tmp_path / case
    if case == "text":
        path.write_text("hello, model")
    if case == "folder":
        path.mkdir()
    if case == "cut.gguf":
        write_gguf(path, {"a": numbers(64, 64)})
        path.write_bytes(path.read_bytes()[:-4096])
    if case == "cut.safetensors":
        safetensors_numpy.save_file({"a": numbers(64, 64)}, path)
        path.write_bytes(path.read_bytes()[:-100])
    refused(bittern("inspect", path), status, str(path), text)


def test_json_is_not_overwritten(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, {"a": numbers(2, 32)})
    refused(bittern("inspect", path, "--json", path), 2, "exists, expected a new name")


# ---- --compare ----


def test_compare_with_numpy(tmp_path):
    """Blocks against the numbers they were made from, as gguf and numpy see them."""
    kinds = {name: getattr(gguf.GGMLQuantizationType, name)
             for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")}
    tensors = {name: numbers(70, 96) for name in kinds}
    tensors["plain"] = numbers(33)
    a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
    write_gguf(a, tensors)
    write_gguf(b, {name: (w, kinds[name]) if name in kinds else w for name, w in tensors.items()})
    text, report = inspect(tmp_path, a, "--compare", b)
    assert set(report) == {"bittern", "schema", "model", "other", "comparison"}
    comparison = report["comparison"]
    error = norm = 0.0
    groups = []
    for tensor in comparison["tensors"]:
        name = tensor["name"]
        w = tensors[name].astype(np.float64)
        y = w if name == "plain" else gguf.quants.dequantize(
            gguf.quants.quantize(tensors[name], kinds[name]), kinds[name]).astype(np.float64)
        assert tensor["storage"] == "F32"
        assert tensor["other_storage"] == ("F32" if name == "plain" else name)
        assert tensor["relative_error"] == pytest.approx(
            np.linalg.norm(w - y) / np.linalg.norm(w), rel=1e-12)
        assert tensor["max_abs_error"] == np.abs(w - y).max()
        assert tensor["different"] == np.count_nonzero(w != y) and tensor["not_finite"] == 0
        error, norm = error + np.sum((w - y) ** 2), norm + np.sum(w**2)
        if name != "plain":
            rms = np.sqrt(np.mean((w - y).reshape(70, 3, 32) ** 2, -1)) / np.sqrt(np.mean(w**2))
            groups += [(float(rms[r, g]), name, r, 32 * g) for r in range(70) for g in range(3)]
    assert comparison["relative_error"] == pytest.approx(np.sqrt(error / norm), rel=1e-12)
    assert comparison["equal"] == 1 and comparison["group_columns"] == 32
    worst = [(g["tensor"], g["row"], g["column"]) for g in comparison["worst_groups"]]
    expected = sorted(groups, reverse=True)[:10]
    assert worst == [group[1:] for group in expected]
    assert [g["error"] for g in comparison["worst_groups"]] == pytest.approx(
        [group[0] for group in expected], rel=1e-12)
    assert "6 tensors compared, 1 equal" in text and "worst groups of 32 columns" in text


def test_compare_lists_what_has_no_counterpart(tmp_path):
    w = numbers(4, 32)
    a = write_folder(tmp_path / "a", {"same": w, "ours": w, "turned": w, "ids": np.arange(4)})
    b = write_folder(tmp_path / "b", {"same": w, "theirs": w, "turned": w.reshape(32, 4),
                                      "ids": np.arange(4)})
    text, report = inspect(tmp_path, a, "--compare", b)
    comparison = report["comparison"]
    assert [t["name"] for t in comparison["tensors"]] == ["same"]
    assert comparison["relative_error"] == 0 and comparison["worst_groups"] == []
    assert comparison["only_in_model"] == ["ours"] and comparison["only_in_other"] == ["theirs"]
    assert comparison["shapes_differ"] == [
        {"name": "turned", "shape": [4, 32], "other_shape": [32, 4]}]
    assert comparison["not_compared"][0]["name"] == "ids"
    for line in ("only in the model:\n  ours", "only in the other:\n  theirs",
                 "turned [4,32] and [32,4]", "not compared:\n  ids: unsupported type I64"):
        assert line in text


def test_compare_writes_the_same_for_any_number_of_threads(tmp_path):
    a = write_folder(tmp_path / "a", {"w": numbers(999, 2048)})
    b = write_folder(tmp_path / "b", {"w": numbers(999, 2048)})
    reports = []
    for threads in (1, 2, 5):
        reports.append(inspect(tmp_path, a, "--compare", b, "--threads", threads)[1])
    assert reports[0] == reports[1] == reports[2]


HIDDEN, HEADS, KEY_VALUE_HEADS, FEED, VOCABULARY = 64, 4, 2, 96, 3
LLAMA = dict(model_type="llama", architectures=["LlamaForCausalLM"], num_hidden_layers=2,
             hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KEY_VALUE_HEADS,
             intermediate_size=FEED, vocab_size=VOCABULARY, max_position_embeddings=128,
             rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True, hidden_act="silu")
LAYER = {  # Hugging Face's name, llama.cpp's, shape
    "input_layernorm": ("attn_norm", [HIDDEN]),
    "post_attention_layernorm": ("ffn_norm", [HIDDEN]),
    "self_attn.q_proj": ("attn_q", [HIDDEN, HIDDEN]),
    "self_attn.k_proj": ("attn_k", [HIDDEN // 2, HIDDEN]),
    "self_attn.v_proj": ("attn_v", [HIDDEN // 2, HIDDEN]),
    "self_attn.o_proj": ("attn_output", [HIDDEN, HIDDEN]),
    "mlp.gate_proj": ("ffn_gate", [FEED, HIDDEN]),
    "mlp.up_proj": ("ffn_up", [FEED, HIDDEN]),
    "mlp.down_proj": ("ffn_down", [HIDDEN, FEED]),
}


def llama(tmp_path, kind=None):
    """A model as a folder and as llama.cpp has it: q and k with the halves of each head in turns."""
    folder, file = {}, {}

    def add(hf, llama_cpp, shape, heads=None):
        w = folder[hf + ".weight"] = numbers(*shape)
        if heads:
            w = w.reshape(heads, 2, shape[0] // heads // 2, shape[1]).swapaxes(1, 2).reshape(shape)
        w = np.ascontiguousarray(w)
        file[llama_cpp + ".weight"] = (w, kind) if kind and w.ndim == 2 else w

    add("model.embed_tokens", "token_embd", [VOCABULARY, HIDDEN])
    add("model.norm", "output_norm", [HIDDEN])
    for layer in range(2):
        for hf, (name, shape) in LAYER.items():
            heads = {"attn_q": HEADS, "attn_k": KEY_VALUE_HEADS}.get(name)
            add(f"model.layers.{layer}.{hf}", f"blk.{layer}.{name}", shape, heads)
    path = tmp_path / "llama.gguf"
    write_gguf(path, file, keys={
        "llama.feed_forward_length": FEED, "llama.context_length": 128,
        "llama.rope.dimension_count": HIDDEN // HEADS, "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5})
    return write_folder(tmp_path / "llama", folder, **LLAMA), path, folder


def test_compare_between_worlds(tmp_path):
    folder, path, tensors = llama(tmp_path)
    for a, b in ((folder, path), (path, folder)):
        comparison = inspect(tmp_path, a, "--compare", b)[1]["comparison"]
        assert comparison["equal"] == len(comparison["tensors"]) == len(tensors)
        assert comparison["relative_error"] == 0
        for key in ("only_in_model", "only_in_other", "shapes_differ", "not_compared"):
            assert comparison[key] == []


def test_an_error_between_worlds_is_that_of_the_numbers(tmp_path):
    folder, path, tensors = llama(tmp_path, gguf.GGMLQuantizationType.Q4_0)
    comparison = inspect(tmp_path, folder, "--compare", path)[1]["comparison"]
    for tensor in comparison["tensors"]:
        w = tensors[tensor["name"]]
        if w.ndim == 1:
            assert tensor["different"] == 0
            continue
        kind = gguf.GGMLQuantizationType.Q4_0  # a row is quantised by itself, wherever it lies
        y = gguf.quants.dequantize(gguf.quants.quantize(w, kind), kind).astype(np.float64)
        assert tensor["other_storage"] == "Q4_0"
        assert tensor["relative_error"] == pytest.approx(
            np.linalg.norm(w - y) / np.linalg.norm(w.astype(np.float64)), rel=1e-12)


def test_a_model_for_images_too_against_its_text_alone(tmp_path):
    """Folders that share no name: both are compared under llama.cpp's."""
    shapes = {"embed_tokens": [8, 32], "norm": [32], "layers.0.self_attn.q_proj": [32, 32],
              "layers.0.self_attn.k_proj": [16, 32], "layers.0.self_attn.v_proj": [16, 32],
              "layers.0.self_attn.o_proj": [32, 32], "layers.0.self_attn.q_norm": [16],
              "layers.0.self_attn.k_norm": [16], "layers.0.mlp.gate_proj": [48, 32],
              "layers.0.mlp.up_proj": [48, 32], "layers.0.mlp.down_proj": [32, 48]}
    for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        shapes[f"layers.0.{norm}_layernorm"] = [32]
    tensors = {f"model.{name}.weight": numbers(*shape) for name, shape in shapes.items()}
    config = dict(
        model_type="gemma3_text", num_hidden_layers=1, hidden_size=32, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=48, vocab_size=8,
        max_position_embeddings=64, rms_norm_eps=1e-6, sliding_window=8, query_pre_attn_scalar=16,
        rope_theta=1e6, rope_local_base_freq=1e4, tie_word_embeddings=True,
        layer_types=["sliding_attention"], hidden_activation="gelu_pytorch_tanh")
    text = write_folder(tmp_path / "text", tensors, **config)
    changed = {f"language_model.{name}": w.copy() for name, w in tensors.items()}
    changed["language_model.model.layers.0.mlp.up_proj.weight"][3, 5] += 1
    changed["vision_tower.embed.weight"] = numbers(4)
    both = write_folder(tmp_path / "both", changed, model_type="gemma3", text_config=config)
    comparison = inspect(tmp_path, text, "--compare", both)[1]["comparison"]
    assert len(comparison["tensors"]) == len(tensors) == comparison["equal"] + 1
    [group] = comparison["worst_groups"]
    assert (group["tensor"], group["row"], group["column"]) == ("blk.0.ffn_up.weight", 3, 0)
    assert comparison["only_in_model"] == []
    assert comparison["only_in_other"] == ["vision_tower.embed.weight"]


def test_compare_between_worlds_refuses(tmp_path):
    folder, path, tensors = llama(tmp_path)
    (folder / "config.json").write_text(json.dumps({**LLAMA, "model_type": "nobodys"}))
    refused(bittern("inspect", path, "--compare", folder), 3, f"{folder}: ", "nobodys")
    (folder / "config.json").unlink()
    refused(bittern("inspect", path, "--compare", folder), 2, f"{folder}: no config.json, expected")


def test_a_real_model_transcoded_is_the_same(tmp_path, smollm2):
    result = bittern("quantize", smollm2, "-o", tmp_path / "mlx", "--transcode")
    assert result.returncode == 0, result.stderr
    comparison = inspect(tmp_path, smollm2, "--compare", tmp_path / "mlx")[1]["comparison"]
    assert comparison["equal"] == len(comparison["tensors"]) == 272
    assert comparison["only_in_model"] == comparison["only_in_other"] == []


def test_an_infinite_error_is_null_in_json(tmp_path):
    a = write_folder(tmp_path / "a", {"w": np.zeros((1, 4), np.float32)})
    b = write_folder(tmp_path / "b", {"w": np.ones((1, 4), np.float32)})
    text, report = inspect(tmp_path, a, "--compare", b)
    assert report["comparison"]["tensors"][0]["relative_error"] is None
    assert "inf" in text


def test_compare_refuses(tmp_path):
    a = write_folder(tmp_path / "a", {"w": numbers(1, 4)})
    refused(bittern("inspect", a, "--compare", tmp_path / "none"), 4, "none: no such file or folder")
