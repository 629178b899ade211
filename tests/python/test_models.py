"""Tiny random models of every architecture, written by transformers, through the command into each
world: transformers, llama.cpp and mlx-lm compute the same logits, and every way back gives the same
tensors."""

import copy
import importlib
import json
import shutil
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
GEMMA2 = {
    "query_pre_attn_scalar": 12,
    "num_hidden_layers": 4,
    "attn_logit_softcapping": 5.0,  # so low that they show
    "final_logit_softcapping": 3.0,
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


def longrope(dims, **more):
    """Factors that f32 does not hold exactly, and of both kinds."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1 + 0.05 * i for i in range(dims // 2)],
        "long_factor": [1.1 + 0.7 * i for i in range(dims // 2)],
        **more,
    }


# TOKENS are longer than the original context, as is that of llama.cpp here: long factors.
LONG = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
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
    "qwen2moe": ("qwen2_moe", {"head_dim": 8, **EXPERTS}),
    "qwen2moe-tied": ("qwen2_moe", {"head_dim": 8, **EXPERTS, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "phi3": ("phi3", {"head_dim": 8, "sliding_window": 256}),
    "phi3-long": ("phi3", {"head_dim": 8, **LONG, "tie_word_embeddings": True, "rope_parameters": longrope(8)}),
    "phi3-partial": ("phi3", {"head_dim": 8, **LONG, "num_key_value_heads": 8, "rope_parameters": longrope(4, partial_rotary_factor=0.5)}),
    "olmo2": ("olmo2", {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "olmo2-tied": ("olmo2", {"head_dim": 8, "num_key_value_heads": 8, "tie_word_embeddings": True, "rope_parameters": YARN}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3-untied": ("smollm3", {"num_hidden_layers": 8, "tie_word_embeddings": False, "rope_parameters": YARN, "use_sliding_window": False}),
    "gemma2": ("gemma2", {**GEMMA2, "sliding_window": 512}),
    "gemma3": ("gemma3_text", GEMMA),
    "gemma3-vision": ("gemma3", GEMMA),
    "qwen3next": ("qwen3_next", {**DELTA, **EXPERTS}),
    "qwen35": ("qwen3_5_text", {**DELTA, "tie_word_embeddings": True}),
    "qwen35-vision": ("qwen3_5", DELTA),
    "qwen35moe": ("qwen3_5_moe_text", {**DELTA, **EXPERTS, "linear_num_value_heads": 4}),
}
# fmt: on
# Tied models of programs that have a head of their own: it is a copy.
WRITTEN_TWICE = {"llama.cpp": ("olmo2-tied", "qwen2moe-tied"), "mlx-lm": ("qwen2moe-tied",)}
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
        fields = {**SIZES, **copy.deepcopy(fields)}  # transformers changes the dicts it is given
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
    for judge, folder in (("llama.cpp", hf), ("mlx-lm", convert(mlx, tmp_path / "back", "safetensors"))):
        twice = {}
        if name in WRITTEN_TWICE.get(judge, ()):
            twice["lm_head.weight"] = text["model.embed_tokens.weight"]
        same(tensors(folder), {**text, **twice})
    across = tensors(convert(gguf, tmp_path / "across", "mlx"))
    if name in WRITTEN_TWICE["llama.cpp"] and name not in WRITTEN_TWICE["mlx-lm"]:
        np.testing.assert_array_equal(
            across.pop("lm_head.weight"), across["model.embed_tokens.weight"]
        )
    same(across, tensors(mlx))
    assert distance(of_mlx_lm(tmp_path / "across"), of_mlx_lm(mlx)) < 1e-5
    again = convert(mlx, tmp_path / "again.gguf", "gguf")
    assert distance(of_llama_cpp(again), of_llama_cpp(gguf)) == 0


def make(folder, kind, **fields):
    """A folder of transformers with random weights, and its logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **copy.deepcopy(fields)})).float()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    byte_tokenizer(folder)
    return folder, text_logits(model)


def test_gemma2_looks_back_as_far_as_its_window(tmp_path):
    """mlx-lm's sees everything, and the note says so."""
    fields = {**GEMMA2, "sliding_window": 8}
    source, expected = make(tmp_path / "source", "gemma2", **fields)
    gguf = convert(source, tmp_path / "m.gguf", "gguf")
    assert distance(of_llama_cpp(gguf), expected) < 2e-3  # ggml takes gelu from a table of halves
    hf = convert(gguf, tmp_path / "hf", "safetensors")
    assert distance(of_transformers(hf), expected) < 1e-5
    result = bittern("quantize", source, "-o", tmp_path / "mlx", "--dequantize", "f32", "--format", "mlx")
    assert "sliding_window 8: mlx-lm's gemma2 sees all tokens before" in result.stdout + result.stderr


def test_phi3_has_short_factors_up_to_its_original_context(tmp_path):
    fields = {"head_dim": 8, "rope_parameters": longrope(8), "max_position_embeddings": 1024}
    source, expected = make(tmp_path / "source", "phi3", original_max_position_embeddings=256, **fields)
    gguf = convert(source, tmp_path / "m.gguf", "gguf")
    assert distance(of_llama_cpp(gguf), expected) < 1e-5
    hf = convert(gguf, tmp_path / "hf", "safetensors")
    assert distance(of_transformers(hf), expected) < 1e-5
    config = json.loads((hf / "config.json").read_text())
    assert config["rope_scaling"]["short_factor"] == fields["rope_parameters"]["short_factor"]
    assert config["original_max_position_embeddings"] == 256


def test_phi3_tokens_take_the_spaces_after_them(tmp_path):
    """Which GGUF says by the model's name alone."""
    import gguf

    source, _ = make(tmp_path / "source", "phi3", head_dim=8)
    path = source / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    special = tokenizer["added_tokens"][0]
    assert special["content"] == "<s>"
    for i, content in enumerate(["<unk>", "<|endoftext|>", "<|end|>", "<|user|>"]):
        tokenizer["added_tokens"].append({**special, "id": 258 + i, "content": content})
    kept = ("<s>", "<unk>", "<|endoftext|>")
    for token in tokenizer["added_tokens"]:
        token["rstrip"] = token["content"] not in kept
    path.write_text(json.dumps(tokenizer))

    out = convert(source, tmp_path / "m.gguf", "gguf")
    assert gguf.GGUFReader(out).fields["general.name"].contents() == "Phi-3 source"
    hf = convert(out, tmp_path / "hf", "safetensors")
    back = json.loads((hf / "tokenizer.json").read_text())["added_tokens"]
    assert {t["content"]: t["rstrip"] for t in back} == {
        t["content"]: t["rstrip"] for t in tokenizer["added_tokens"]
    }

    # Of another set nothing in GGUF speaks; and a name must not say what is not so.
    tokenizer["added_tokens"][-1]["rstrip"] = False
    path.write_text(json.dumps(tokenizer))
    result = bittern("quantize", source, "-o", tmp_path / "x.gguf", "--dequantize", "f32")
    assert result.returncode == 3 and "has lstrip, rstrip or single_word" in result.stderr
    plain, _ = make(tmp_path / "My-Phi-3", "phi3", head_dim=8)
    out = convert(plain, tmp_path / "plain.gguf", "gguf")
    assert gguf.GGUFReader(out).fields["general.name"].contents() == "My-Phi 3"


@pytest.mark.parametrize("head_dim", [8, 16, 32, 64])
@pytest.mark.parametrize("original", [16, 64, 8192])
def test_llama3_rope_comes_back(head_dim, original, tmp_path):
    """Its factors are those of llama.cpp's converter, and its numbers survive."""
    import gguf
    import torch

    rope = {**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": original}
    source, expected = make(tmp_path / "source", "llama", head_dim=head_dim, rope_parameters=rope)
    path = convert(source, tmp_path / "m.gguf", "gguf")
    assert distance(of_llama_cpp(path), expected) < 1e-5
    hf = convert(path, tmp_path / "hf", "safetensors")
    assert distance(of_transformers(hf), expected) == 0
    config = json.loads((hf / "config.json").read_text())
    assert {**config["rope_scaling"], "rope_theta": config["rope_theta"]} == rope

    freqs = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    factors = []
    for freq in freqs:
        wavelength = 2 * np.pi / freq
        if wavelength < original / 4:
            factors.append(1.0)
        elif wavelength > original:
            factors.append(8.0)
        else:
            smooth = (original / wavelength - 1.0) / 3.0
            factors.append(float(1 / ((1 - smooth) / 8.0 + smooth)))
    ours = {t.name: t.data for t in gguf.GGUFReader(path).tensors}["rope_freqs.weight"]
    np.testing.assert_array_max_ulp(ours, np.array(factors, np.float32), 8)  # of torch's power


def test_licence_and_name_survive(tmp_path):
    """From a card into GGUF, through a folder, and back."""
    import gguf

    source, _ = make(tmp_path / "source", "llama")
    (source / "README.md").write_text(
        "---\nlicense: apache-2.0\nlanguage:\n- en\ntags: [chat]\n"
        "base_model: org/Base-1B\nmodel_name: Tiny of mine\n---\n# Tiny\n"
    )

    def general(path):
        return {
            name: field.contents()
            for name, field in gguf.GGUFReader(path).fields.items()
            if name.startswith("general.")
        }

    first = convert(source, tmp_path / "a.gguf", "gguf")
    said = general(first)
    assert said["general.license"] == "apache-2.0" and said["general.name"] == "Tiny of mine"
    assert said["general.languages"] == ["en"] and said["general.tags"] == ["chat"]
    assert said["general.base_model.0.repo_url"] == "https://huggingface.co/org/Base-1B"
    for world in ("safetensors", "mlx"):
        folder = convert(first, tmp_path / world, world)
        assert 'license: "apache-2.0"' in (folder / "README.md").read_text()
        assert general(convert(folder, tmp_path / f"{world}.gguf", "gguf")) == said


def test_left_out_tensors_are_noted_by_kind(tmp_path):
    from safetensors.numpy import save_file

    source, _ = make(tmp_path / "source", "llama")
    every = tensors(source)
    for layer in range(3):
        every[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = np.ones(6, np.float32)
    save_file(every, source / "model.safetensors", metadata={"format": "pt"})
    for world, name in (("gguf", "GGUF"), ("mlx", "MLX")):
        out = tmp_path / ("m.gguf" if world == "gguf" else world)
        result = bittern("quantize", source, "-o", out, "--dequantize", "f32", "--format", world)
        assert result.returncode == 0, result.stderr
        text = result.stdout + result.stderr
        assert text.count("rotary_emb") == 1
        assert (
            f"left out 3 tensors that {name} has no place for: "
            "model.layers.N.self_attn.rotary_emb.inv_freq"
        ) in text


# What llama.cpp cannot compute, mlx-lm can.
# fmt: off
MLX_ONLY = {
    "smollm3-nope": ("smollm3", {"no_rope_layers": [1, 0, 0]}, "no_rope_layers"),
    "smollm3-window": ("smollm3", {"use_sliding_window": True, "sliding_window": 8, "no_rope_layer_interval": 2}, "use_sliding_window"),
    "smollm3-biases": ("smollm3", {"attention_bias": True, "mlp_bias": True}, "attention_bias"),
    "olmo2-wide": ("olmo2", {"head_dim": 16}, "head_dim"),
    "olmo2-biases": ("olmo2", {"attention_bias": True, "head_dim": 8}, "attention_bias"),
    "qwen3-llama3": ("qwen3", {"rope_parameters": LLAMA3}, "rope_scaling"),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}, "rope_scaling"),
    "qwen2-yarn": ("qwen2", {"head_dim": 8, "rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}}, "beta_fast"),
    "qwen3moe-plain": ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": False}, "norm_topk_prob"),
    "qwen3moe-dense": ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [1]}, "mlp_only_layers"),
    "gemma3-scalar": ("gemma3_text", {**GEMMA, "query_pre_attn_scalar": 20}, "query_pre_attn_scalar"),
}
# fmt: on


@pytest.mark.parametrize("name", MLX_ONLY)
def test_mlx_gets_what_llama_cpp_cannot_do(name, tmp_path):
    kind, fields, key = MLX_ONLY[name]
    source, expected = make(tmp_path / "source", kind, **fields)
    result = bittern("quantize", source, "-o", tmp_path / "m.gguf", "--dequantize", "f32")
    assert result.returncode == 3 and f'"{key}": llama.cpp\'s {kind}' in result.stderr, result.stderr
    assert not (tmp_path / "m.gguf").exists()
    mlx = convert(source, tmp_path / "mlx", "mlx")
    assert distance(of_mlx_lm(mlx), expected) < 1e-5
    back = convert(mlx, tmp_path / "back", "safetensors")
    assert distance(of_transformers(back), expected) < 1e-5
    same(tensors(back), tensors(source))


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


def test_types_that_differ_within_a_tensor(written, tmp_path):
    """llama-quantize's mixes give the parts of qwen3_next's in_proj_qkvz types of their own."""
    source, _ = written("qwen3next")
    gguf = convert(source, tmp_path / "m.gguf", "gguf", "--type", "Q4_K_M")
    mixed = "model.layers.2.linear_attn.in_proj_qkvz.weight"
    plain = convert(gguf, tmp_path / "plain", "safetensors")
    of_transformers(plain)
    exact = bittern("quantize", gguf, "-o", tmp_path / "mlx", "--transcode")
    assert exact.returncode == 0, exact.stderr
    assert "Q8_0 beside other types in one tensor: kept as plain F32: " + mixed in exact.stdout
    same(tensors(convert(tmp_path / "mlx", tmp_path / "from_mlx", "safetensors")), tensors(plain))
    again = ("quantize", gguf, "-o", tmp_path / "again", "--bits", "4", "--group-size", "32")
    result = bittern(*again)
    assert result.returncode == 2 and "is quantised already" in result.stderr
    result = bittern(*again, "--allow-requantize")
    assert result.returncode == 0, result.stderr
    of_mlx_lm(tmp_path / "again")
    compared = bittern("inspect", source, "--compare", gguf)
    assert compared.returncode == 0 and "alone" not in compared.stdout, compared
    # Experts of several dtypes in one stack.
    source, _ = written("mixtral")
    from safetensors.numpy import save_file

    folder = tmp_path / "mixtral"
    shutil.copytree(source, folder)
    ours = tensors(folder)
    for name in ours:
        if "experts.1." in name:
            ours[name] = ours[name].astype(np.float16)
    save_file(ours, folder / "model.safetensors", {"format": "pt"})
    gguf = convert(folder, tmp_path / "mixtral.gguf", "gguf", "--dtype", "f32")
    back = tensors(convert(gguf, tmp_path / "back", "safetensors"))
    same(back, {name: values.astype(np.float32) for name, values in ours.items()})
