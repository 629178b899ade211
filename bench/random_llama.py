#!/usr/bin/env python3
"""random_llama.py FOLDER OUT: writes a llama of 1.07 G random weights (the shape of Llama 3.2 1B with a
smaller vocabulary) with the tokeniser and vocabulary of FOLDER, for measurements of speed.

    bittern quantize model.gguf -o small --dequantize f16
    bench/random_llama.py small large
    bittern quantize large -o large.gguf --type Q4_K
    bench/run.py large.gguf --plain-peer
"""
import json
import pathlib
import shutil
import sys

import numpy as np
from safetensors.numpy import save_file

HIDDEN, MIDDLE, LAYERS, HEADS, KV_HEADS, HEAD = 2048, 8192, 16, 32, 8, 64


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, out = map(pathlib.Path, sys.argv[1:])
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((source / "config.json").read_text())
    config |= {
        "hidden_size": HIDDEN, "intermediate_size": MIDDLE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (MIDDLE, HIDDEN), "mlp.up_proj": (MIDDLE, HIDDEN), "mlp.down_proj": (HIDDEN, MIDDLE),
    }  # fmt: skip

    def matrix(shape):
        return (random.standard_normal(shape, np.float32) / np.sqrt(shape[1])).astype(np.float16)

    ones = np.ones(HIDDEN, np.float16)
    tensors = {"model.embed_tokens.weight": matrix((config["vocab_size"], HIDDEN)), "model.norm.weight": ones}
    for layer in range(LAYERS):
        of = f"model.layers.{layer}."
        tensors |= {f"{of}{name}.weight": matrix(shape) for name, shape in shapes.items()}
        tensors |= {f"{of}{name}.weight": ones for name in ("input_layernorm", "post_attention_layernorm")}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
