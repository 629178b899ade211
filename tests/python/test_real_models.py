"""SmolLM2 and MiniLM through the command: exact transcoding over every tensor, judged by gguf and
mlx; with the heavy peers, what mlx-lm, transformers and llama.cpp say when they run the outputs."""

import json

import numpy as np
import pytest

from test_cli import COMMAND, bittern, refused

pytestmark = pytest.mark.skipif(
    COMMAND is None, reason="the command is not built (build/release/bittern)"
)


def made(folder, source, name, *flags):
    out = folder / name
    result = bittern("quantize", source, "-o", out, *flags)
    assert result.returncode == 0, result
    return out


@pytest.fixture(scope="module")
def outputs(smollm2, tmp_path_factory):
    """What each test needs, made once: outputs("name", flags...)."""
    folder = tmp_path_factory.mktemp("smollm2")

    def output(name, *flags, source=smollm2):
        out = folder / name
        return out if out.exists() else made(folder, source, name, *flags)

    return output


# The source's names beside those of a folder, and whose rows llama.cpp orders anew.
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def folder_name(name):
    parts = name.removesuffix(".weight").split(".")
    prefix = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    return prefix + NAMES[parts[-1]]


def in_folder_order(name, w, heads):
    """llama.cpp interleaves the two halves of each head of q and k."""
    kind = name.split(".")[-2]
    if kind not in ("attn_q", "attn_k"):
        return w
    n = heads[kind]
    rows = np.arange(w.shape[0]).reshape(n, w.shape[0] // n // 2, 2).swapaxes(1, 2).reshape(-1)
    return w[rows]


def source_tensors(path):
    import gguf

    for tensor in gguf.GGUFReader(path).tensors:
        w = gguf.dequantize(tensor.data, tensor.tensor_type)
        w = w.reshape(tuple(int(d) for d in reversed(tensor.shape)))
        yield tensor.name, in_folder_order(tensor.name, w, {"attn_q": 9, "attn_k": 3})


def assert_same_numbers(path, folder, bits=True):
    """Every number of the file is what mx.dequantize makes of the folder, bit for bit, or but for
    the sign of zeros (docs/formats.md says where that must be). How many tensors are codes."""
    import mlx.core as mx

    ours = mx.load(str(folder / "model.safetensors"))
    config = json.loads((folder / "config.json").read_text())["quantization"]
    count = 0
    for name, expected in source_tensors(path):
        module = folder_name(name)
        y = ours.pop(f"{module}.weight")
        if f"{module}.scales" in ours:
            q = config.get(module, config)
            y = mx.dequantize(
                y, ours.pop(f"{module}.scales"), ours.pop(f"{module}.biases"),
                q["group_size"], q["bits"],
            )  # fmt: skip
            count += 1
        assert y.dtype == mx.float32
        y = np.array(y)
        if bits:
            y, expected = y.view(np.uint32), expected.view(np.uint32)
        assert np.array_equal(y, expected), name
    assert not ours
    return count


@pytest.mark.peer("gguf", "mlx")
def test_transcoding_keeps_every_number(smollm2, outputs):
    assert assert_same_numbers(smollm2, outputs("mlx", "--transcode", "--format", "mlx")) == 211


@pytest.mark.peer("gguf", "mlx")
@pytest.mark.parametrize(
    "flags, codes",  # with Q5_0, Q5_1 where rows are of 576
    [
        (("--type", "Q4_K", "--pure"), 211),
        (("--type", "Q5_K", "--pure"), 211),
        (("--type", "Q4_K_M"), 211 - 14),  # ffn_down of 14 layers is Q6_K, and stays plain
    ],
)
def test_transcoding_of_what_we_write(outputs, flags, codes):
    name = "-".join(flag.strip("-") for flag in flags)
    path = outputs(f"{name}.gguf", *flags, source=outputs("hf", "--dequantize", "f32"))
    folder = outputs(f"{name}-mlx", "--transcode", "--format", "mlx", source=path)
    assert assert_same_numbers(path, folder, bits=False) == codes


@pytest.mark.peer("gguf", "mlx")
def test_groups_of_sixteen_are_kept_plain(outputs, tmp_path):
    source = outputs("Q6_K.gguf", "--type", "Q6_K", source=outputs("hf", "--dequantize", "f32"))
    args = ("quantize", source, "-o", tmp_path / "x", "--transcode", "--format", "mlx")
    result = bittern(*args)
    assert result.returncode == 0, result
    told = "Q6_K has no form in MLX's groups of 32, 64 or 128: kept as plain F32"
    assert f"{told}: model.layers.0.mlp.down_proj.weight and 29 more" in result.stdout
    assert assert_same_numbers(source, tmp_path / "x", bits=False) == 211 - 30
    result = bittern(*args, "--lossy", "--force")
    assert result.returncode == 0 and "not exact: Q6_K quantised again to 8 bits" in result.stdout


@pytest.mark.peer("gguf", "mlx")
def test_groups_of_sixteen_are_halves_where_that_is_exact(outputs, tmp_path):
    import gguf

    source = outputs("Q6_K.gguf", "--type", "Q6_K", source=outputs("hf", "--dequantize", "f32"))
    data = bytearray(source.read_bytes())
    tensor = next(t for t in gguf.GGUFReader(source).tensors if t.name == "blk.3.ffn_down.weight")
    for at in range(tensor.data_offset, tensor.data_offset + tensor.n_bytes, 210):
        data[at + 192 : at + 208] = bytes([1] * 16)  # scales
        data[at + 208 : at + 210] = np.float16(0.25).tobytes()  # d
    (tmp_path / "x.gguf").write_bytes(data)
    args = ("--transcode", "--format", "mlx", "--json", tmp_path / "report.json")
    made(tmp_path, tmp_path / "x.gguf", "mlx", *args)
    to = {t["name"]: t["to"] for t in json.loads((tmp_path / "report.json").read_text())["tensors"]}
    assert to["model.layers.3.mlp.down_proj.weight"] == "F16"
    assert to["model.layers.4.mlp.down_proj.weight"] == "F32"
    made(tmp_path, tmp_path / "x.gguf", "there", "--dequantize", "f32")
    made(tmp_path, tmp_path / "mlx", "back", "--dequantize", "f32")
    from safetensors.numpy import load_file

    there, back = (load_file(tmp_path / n / "model.safetensors") for n in ("there", "back"))
    for name, values in there.items():
        assert np.array_equal(back[name], values), name


@pytest.mark.peer("gguf")
def test_and_back_to_the_same_file(smollm2, outputs):
    """MLX's codes fit the types they came from: tensors equal byte for byte."""
    import gguf

    back = outputs("back.gguf", "--transcode", source=outputs("mlx", "--transcode", "--format", "mlx"))
    there = {t.name: t for t in gguf.GGUFReader(back).tensors}
    for tensor in gguf.GGUFReader(smollm2).tensors:
        ours = there.pop(tensor.name)
        assert ours.tensor_type == tensor.tensor_type, tensor.name
        assert np.array_equal(ours.data, tensor.data), tensor.name
    assert not there


@pytest.mark.peer("safetensors", "gguf")
def test_dequantised_is_a_folder_of_hugging_face(smollm2, outputs):
    from safetensors.numpy import load_file

    out = outputs("hf", "--dequantize", "f32")
    ours = load_file(out / "model.safetensors")
    for name, expected in source_tensors(smollm2):
        assert np.array_equal(ours[f"{folder_name(name)}.weight"], expected), name
    assert (out / "tokenizer.json").exists() and (out / "tokenizer_config.json").exists()


def test_requantising_is_refused_unless_asked_for(smollm2, tmp_path):
    refused(bittern("quantize", smollm2, "-o", tmp_path / "x", "--bits", 4, "--quiet"), 2, "quantised already")


@pytest.mark.peer("mlx", "safetensors")
def test_lsq_is_never_worse_than_minmax_in_any_group_of_a_real_model(minilm, tmp_path):
    import mlx.core as mx
    from safetensors.numpy import load_file

    truth = load_file(f"{minilm}/model.safetensors")
    for bits in (2, 4):
        out = {
            m: made(tmp_path, minilm, f"{m}{bits}", "--bits", bits, "--method", m)
            for m in ("minmax", "lsq")
        }
        packed = {m: mx.load(str(o / "model.safetensors")) for m, o in out.items()}
        total = {"minmax": 0.0, "lsq": 0.0}
        groups = 0
        for name in packed["lsq"]:
            if not name.endswith(".scales"):
                continue
            module = name.removesuffix(".scales")
            w = truth[f"{module}.weight"].astype(np.float64)
            error = {}
            for m, t in packed.items():
                q = mx.array(t[f"{module}.weight"])
                s, b = t[f"{module}.scales"], t[f"{module}.biases"]
                codes = np.array(mx.dequantize(q, mx.ones_like(s), mx.zeros_like(b), 64, bits))
                y = codes.reshape(*s.shape, 64) * np.array(s)[..., None].astype(np.float64)
                y = y + np.array(b)[..., None]
                error[m] = np.square(y - w.reshape(y.shape)).sum(-1)
                total[m] += float(error[m].sum())
            groups += error["lsq"].size
            assert (error["lsq"] <= error["minmax"] * (1 + 1e-12) + 1e-300).all(), module
        assert groups > 300_000 and total["lsq"] < total["minmax"]


# ---- run by those it is for ----

PROMPT = "The capital of France is Paris. The capital of Italy is"


def log_softmax(x):
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def divergence(p, q):
    """Mean over positions of KL(p || q) in nats."""
    p, q = log_softmax(p), log_softmax(q)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def transformers_logits(folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return ids[0].tolist(), network(ids).logits[0].numpy()


def llama_logits(path):
    import llama_cpp

    llama = llama_cpp.Llama(str(path), logits_all=True, verbose=False, n_ctx=64, seed=0)
    ids = llama.tokenize(PROMPT.encode(), add_bos=False)
    llama.eval(ids)
    return ids, np.array(llama.scores[: len(ids)])


def mlx_logits(folder):
    import mlx.core as mx
    import mlx_lm

    mx.set_default_device(mx.cpu)
    network, tokenizer = mlx_lm.load(str(folder))
    ids = tokenizer.encode(PROMPT)
    return ids, np.array(network(mx.array([ids]))[0].astype(mx.float32))


@pytest.fixture(scope="module")
def truth(outputs):
    ids, logits = transformers_logits(outputs("hf", "--dequantize", "f32"))
    assert logits.argmax(-1)[-1] != 0
    return ids, logits


@pytest.mark.peer("torch", "transformers", "mlx_lm")
def test_mlx_runs_the_exact_transcode(outputs, truth):
    ids, logits = mlx_logits(outputs("mlx", "--transcode", "--format", "mlx"))
    assert ids == truth[0]
    assert np.abs(logits - truth[1]).max() < 1e-4 * np.abs(truth[1]).max()


@pytest.mark.peer("torch", "transformers", "mlx_lm")
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_mlx_runs_what_is_quantised(outputs, bits):
    """mlx-lm on the codes and transformers on the dequantised numbers: the same model."""
    flags = ("--bits", bits, "--allow-requantize", "--scale-dtype", "f32")
    ids, logits = mlx_logits(outputs(f"mlx{bits}", *flags, "--format", "mlx"))
    plain_ids, plain = transformers_logits(outputs(f"plain{bits}", *flags, "--format", "safetensors"))
    assert ids == plain_ids
    assert np.abs(logits - plain).max() < 1e-4 * np.abs(plain).max()


@pytest.mark.peer("torch", "transformers", "llama_cpp")
def test_llama_runs_the_plain_file(outputs, truth):
    back = outputs("f32.gguf", "--dequantize", "f32", source=outputs("hf", "--dequantize", "f32"))
    ids, logits = llama_logits(back)
    assert ids == truth[0]
    assert divergence(truth[1], logits) < 1e-6


@pytest.mark.peer("torch", "transformers", "llama_cpp")
@pytest.mark.parametrize("type", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_llama_runs_what_is_quantised(outputs, type, show):
    """llama.cpp rounds activations to 8 bits, which alone gives a KL of 0.02 or so; beside that it
    sees the numbers we say it does: other numbers of that size would give 0.1 to 1."""
    source = outputs("hf", "--dequantize", "f32")
    path = outputs(f"{type}.gguf", "--type", type, source=source)
    ids, logits = llama_logits(path)
    _, plain = transformers_logits(outputs(f"{type}_plain", "--dequantize", "f32", source=path))
    _, exact = transformers_logits(source)
    show(f"SmolLM2 {type}: KL to the source {divergence(exact, logits):.5f}, "
         f"to its own numbers {divergence(plain, logits):.6f}")
    assert divergence(plain, logits) < 0.05
