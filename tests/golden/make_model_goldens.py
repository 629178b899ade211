#!/usr/bin/env python3
"""make_model_goldens.py [--check]: tiny random models of every architecture that runs, by transformers.

Writes tiny_models.safetensors beside itself:

  <model>/<tensor>     the weights, bf16, under transformers' names
  <model>.tokens       s32 [tokens]
  <model>.logits       f32 [tokens, vocab]: transformers' logits of one forward pass in f32, with
                       eager attention and the weights widened to f32
  __metadata__         <model>: its config.json

Weights are larger than at initialisation, so that every part changes the logits: gates, biases,
norms, windows (shorter than the text), soft caps and experts.
"""
import json
import pathlib
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).resolve().parent
FILE = HERE / "tiny_models.safetensors"
TOKENS = 40

SMALL = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0)
HEADS = dict(head_dim=32)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
DELTA = dict(
    head_dim=32, full_attention_interval=2, linear_conv_kernel_dim=4, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32,
    layer_types=["linear_attention", "full_attention"])

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16, rope_theta=500.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=1000.0)


def models():
    """Name -> config."""
    t = transformers
    yield "llama", t.LlamaConfig(**SMALL, tie_word_embeddings=True)
    yield "llama3", t.LlamaConfig(**SMALL, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True)
    yield "mistral", t.MistralConfig(**SMALL, **HEADS, sliding_window=9)
    yield "mixtral", t.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    yield "qwen2", t.Qwen2Config(**SMALL, rope_parameters=YARN)
    yield "qwen2_moe", t.Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=64,
                                        norm_topk_prob=False)
    yield "qwen3", t.Qwen3Config(**SMALL, **HEADS)
    yield "qwen3_moe", t.Qwen3MoeConfig(**SMALL, **HEADS, **EXPERTS, norm_topk_prob=True)
    yield "gemma2", t.Gemma2Config(**SMALL, **HEADS, sliding_window=7, query_pre_attn_scalar=24,
                                   layer_types=["sliding_attention", "full_attention"])
    yield "gemma3", t.Gemma3TextConfig(**SMALL, **HEADS, sliding_window=7, query_pre_attn_scalar=24,
                                       layer_types=["sliding_attention", "full_attention"])
    yield "phi3", t.Phi3Config(**SMALL, sliding_window=11)
    yield "olmo2", t.Olmo2Config(**SMALL)
    yield "smollm3", t.SmolLM3Config(**SMALL, no_rope_layers=[1, 0])
    yield "qwen3_next", t.Qwen3NextConfig(**SMALL, **DELTA, **EXPERTS, shared_expert_intermediate_size=32)
    yield "qwen3_5_text", t.Qwen3_5TextConfig(**SMALL, **DELTA)
    yield "qwen3_5_moe_text", t.Qwen3_5MoeTextConfig(
        **{k: v for k, v in SMALL.items() if k != "intermediate_size"}, **DELTA, **EXPERTS,
        shared_expert_intermediate_size=32)


def widen(model, generator):
    """Weights that make a difference: normal numbers, norms around 1 (or 0 where 1 is added)."""
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim == 1 or "A_log" in name:
            weight.data = (weight.data + 0.3 * noise).to(torch.bfloat16).float()
        elif "conv1d" in name:
            weight.data = (0.5 * noise).to(torch.bfloat16).float()
        else:
            weight.data = (noise * 1.4 / weight.shape[-1] ** 0.5).to(torch.bfloat16).float()


def main(check):
    torch.use_deterministic_algorithms(True)
    tensors, metadata = {}, {
        "made with": f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"}
    for number, (name, config) in enumerate(models()):
        config._attn_implementation = "eager"
        generator = torch.Generator().manual_seed(1000 + number)
        torch.manual_seed(number)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        widen(model, generator)
        tokens = torch.randint(3, config.vocab_size, (TOKENS,), generator=generator)
        with torch.no_grad():
            logits = model(tokens[None], use_cache=False).logits[0]
        with tempfile.TemporaryDirectory() as folder:  # names on disk are not those in memory
            model.save_pretrained(folder)
            state = load_file(pathlib.Path(folder) / "model.safetensors")
            saved = json.loads((pathlib.Path(folder) / "config.json").read_text())
        for key, weight in state.items():
            tensors[f"{name}/{key}"] = weight.to(torch.bfloat16).contiguous()
        tensors[f"{name}.tokens"] = tokens.to(torch.int32)
        tensors[f"{name}.logits"] = logits.float().contiguous()
        metadata[name] = json.dumps(saved, sort_keys=True)
        print(f"{name}: {sum(w.numel() for w in state.values())} weights, "
              f"logits of deviation {logits.std():.3f}")
    if check:
        stored = load_file(FILE)
        assert stored.keys() == tensors.keys(), sorted(stored.keys() ^ tensors.keys())
        for key, value in tensors.items():
            difference = (stored[key].float() - value.float()).abs().max()
            assert difference <= (1e-5 * value.float().abs().max() if key.endswith(".logits") else 0), key
        print("as stored")
        return
    save_file(tensors, FILE, metadata)
    print(f"{FILE.name}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
