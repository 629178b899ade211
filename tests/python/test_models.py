"""Tiny random models of every architecture, written by transformers, through the command into each
world: transformers, llama.cpp and mlx-lm compute the same logits, and every way back gives the same
tensors."""

import importlib
import json
import sys

import numpy as np
import pytest

from test_cli import COMMAND, bittern

pytestmark = [
    pytest.mark.skipif(COMMAND is None, reason="the command is not built (build/release/bittern)"),
    pytest.mark.peer("torch", "transformers", "mlx_lm", "llama_cpp", "gguf", "safetensors"),
]

VOCABULARY = 288
TOKENS = [(i * 37 + 5) % 256 for i in range(40)]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
}
DELTA = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
GEMMA = {
    "query_pre_attn_scalar": 12,
    "sliding_window": 8,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 20000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
# fmt: off
MODELS = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama3": ("llama", {"head_dim": 32, "rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": 256}),
    "mixtral": ("mixtral", {"head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-yarn": ("qwen2", {"head_dim": 8, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3moe": ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "gemma3": ("gemma3_text", GEMMA),
    "gemma3-vision": ("gemma3", GEMMA),
    "qwen3next": ("qwen3_next", {**DELTA, **EXPERTS}),
    "qwen35": ("qwen3_5_text", {**DELTA, "tie_word_embeddings": True}),
    "qwen35-vision": ("qwen3_5", DELTA),
    "qwen35moe": ("qwen3_5_moe_text", {**DELTA, **EXPERTS, "linear_num_value_heads": 4}),
}
# fmt: on
VISION = {
    "gemma3": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
        "image_token_index": 287,
        "boi_token_index": 286,
        "eoi_token_index": 285,
    },
    "qwen3_5": {
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "patch_size": 4,
        },
        "image_token_id": 287,
        "video_token_id": 286,
        "vision_start_token_id": 285,
        "vision_end_token_id": 284,
    },
}


@pytest.fixture(scope="module", autouse=True)
def plain_torch():
    """transformers' own gated delta net: the package fla, where installed, wants a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fla", None)
        for family in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
            importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    yield


def byte_tokenizer(folder):
    """One token a byte, as GPT-2 spells them, and two special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


def text_logits(model):
    import torch

    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([TOKENS])).logits[0].numpy()


def keys_like_queries(key, p):
    """In a gated delta net: the output is normed, so of a query and key whose product is near 0
    rounding would decide the sign."""
    heads, dim = DELTA["linear_num_key_heads"], DELTA["linear_key_head_dim"]
    if "in_proj_qkvz" in key:
        by_head = p.view(heads, -1, p.shape[-1])
        by_head[:, dim : 2 * dim] = by_head[:, :dim] + 0.3 * by_head[:, dim : 2 * dim]
    elif "in_proj_qkv" in key or "conv1d" in key:
        rows = heads * dim
        p[rows : 2 * rows] = p[:rows] + 0.3 * p[rows : 2 * rows]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """written(name): the folder of a model and its logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    known = {}

    def write(name):
        if name in known:
            return known[name]
        folder = tmp_path_factory.mktemp(name)
        kind, fields = MODELS[name]
        fields = {**SIZES, **fields}
        maker = AutoModelForCausalLM
        if kind in VISION:
            fields = {"text_config": fields, **VISION[kind]}
            maker = AutoModelForImageTextToText
        torch.manual_seed(7)
        model = maker.from_config(AutoConfig.for_model(kind, **fields)).float()
        with torch.no_grad():
            for key, p in model.named_parameters():
                noise = torch.randn_like(p)
                if p.ndim > 1:
                    p.copy_(noise * (0.5 if "conv1d" in key else p.shape[-1] ** -0.5))
                else:  # so that adding 1 to a norm and taking it off again is exact
                    p.copy_(((p + 0.3 * noise) * 1024).round() / 1024)
            for key, p in model.named_parameters():
                keys_like_queries(key, p)
        model.save_pretrained(folder)
        byte_tokenizer(folder)
        known[name] = folder, text_logits(model)
        return known[name]

    return write


def convert(source, out, world, *more):
    more = more or ("--dequantize", "f32")
    result = bittern("quantize", source, "-o", out, "--format", world, *more)
    assert result.returncode == 0, result.stderr
    return out


def of_transformers(folder):
    import torch
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    return text_logits(model)


def of_llama_cpp(path):
    import llama_cpp

    model = llama_cpp.Llama(
        str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0
    )
    model.eval(TOKENS)
    return np.array(model.scores[: len(TOKENS)])


def of_mlx_lm(folder):
    import mlx.core as mx
    from mlx_lm import load

    mx.set_default_device(mx.cpu)
    model, _ = load(str(folder))
    return np.array(model(mx.array([TOKENS]))[0].astype(mx.float32))


def distance(logits, expected):
    return np.abs(logits - expected).max() / np.abs(expected).max()


def tensors(folder):
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def same(ours, expected):
    """All of them, bit for bit; A_log went through an exponential and a logarithm."""
    assert ours.keys() == expected.keys()
    for name, values in expected.items():
        assert ours[name].shape == values.shape, name
        if name.endswith("A_log"):
            np.testing.assert_allclose(ours[name], values, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(ours[name], values, err_msg=name)
    return True


@pytest.mark.parametrize("name", MODELS)
def test_the_same_model_in_every_world(name, written, tmp_path, show):
    source, expected = written(name)
    gguf = convert(source, tmp_path / "m.gguf", "gguf")
    mlx = convert(source, tmp_path / "mlx", "mlx")
    hf = convert(gguf, tmp_path / "hf", "safetensors")
    errors = {
        "llama.cpp": distance(of_llama_cpp(gguf), expected),
        "mlx-lm": distance(of_mlx_lm(mlx), expected),
        "transformers": distance(of_transformers(hf), expected),
    }
    show(f"{name}: logits " + ", ".join(f"{k} {v:.1e}" for k, v in errors.items()))
    for judge, error in errors.items():  # ggml takes gelu from a table of halves
        assert error < (2e-3 if "gemma" in name and judge == "llama.cpp" else 1e-5), judge

    # Every way back, and across.
    text = tensors(source)
    if MODELS[name][0] in VISION:
        text = {
            "model." + key.split("language_model.")[1].removeprefix("model."): values
            for key, values in text.items()
            if "language_model." in key
        }
        head = tensors(source).get("lm_head.weight")
        if head is not None:
            text["lm_head.weight"] = head
    same(tensors(hf), text)
    same(tensors(convert(mlx, tmp_path / "back", "safetensors")), text)
    same(tensors(convert(gguf, tmp_path / "across", "mlx")), tensors(mlx))
    assert distance(of_mlx_lm(tmp_path / "across"), of_mlx_lm(mlx)) < 1e-5
    again = convert(mlx, tmp_path / "again.gguf", "gguf")
    assert distance(of_llama_cpp(again), of_llama_cpp(gguf)) == 0


@pytest.mark.parametrize("name", MODELS)
def test_quantised_modules_have_the_names_mlx_lm_looks_for(name, written, tmp_path, show):
    """It computes what transformers does with the same weights, dequantised."""
    source, _ = written(name)
    mlx = convert(source, tmp_path / "mlx", "mlx", "--bits", "4", "--group-size", "32")
    config = json.loads((mlx / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"]
    plain = convert(mlx, tmp_path / "from_mlx", "safetensors")
    error = distance(of_mlx_lm(mlx), of_transformers(plain))
    show(f"{name}: 4 bits, mlx-lm: {error:.1e}")
    assert error < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_runs_quantised_models(name, written, tmp_path, show):
    """Close to what transformers computes with the same weights: llama.cpp quantises activations
    too, and another expert may be taken."""
    source, _ = written(name)
    gguf = convert(source, tmp_path / "m.gguf", "gguf", "--type", "Q8_0")
    expected = of_transformers(convert(gguf, tmp_path / "plain", "safetensors"))
    error = np.square(of_llama_cpp(gguf) - expected).mean() / np.square(expected).mean()
    show(f"{name}: Q8_0, llama.cpp: squared error {error:.1e}")
    assert error < (0.1 if "moe" in name or "next" in name else 0.01)
