"""Tiny models of every architecture in Hugging Face's form, the same bytes on every machine and with
every version of numpy: test_models' configurations without transformers. bittern refuses a tensor
that is missing, left over or of another shape, so what is wrong here shows."""

import json

import numpy as np
from test_models import MODELS, SIZES, VISION

# exp() and, back, log() of these k/16 are far from a tie of f32: every good libm rounds them alike.
LOGS = (3, 5, 10, 11, 13, 17, 18, 21, 22, 23, 24, 30)


class Numbers:
    """About normal, from integers alone. numpy promises the raw words of a bit generator, but not
    the order in which its distributions use them."""

    def __init__(self, seed):
        self.words = np.random.PCG64(seed)

    def integers(self, low, high, shape):
        words = self.words.random_raw(int(np.prod(shape))) >> np.uint64(11)
        return (low + words % np.uint64(high - low)).astype(np.int64).reshape(shape)

    def standard_normal(self, shape):
        words = self.words.random_raw(int(np.prod(shape)))
        total = sum((words >> np.uint64(16 * i)) & np.uint64(0xFFFF) for i in range(4))
        # Multiples of 2^-15: exact in f32.
        return ((total.astype(np.int64) - 2 * 0xFFFF) / 2**15).reshape(shape)


def config_of(name):
    kind, fields = MODELS[name]
    fields = {**SIZES, **fields}
    if "linear_num_key_heads" in fields:
        fields["linear_conv_kernel_dim"] = 4
    if kind in VISION:
        return {"model_type": kind, "text_config": {"model_type": f"{kind}_text", **fields}, **VISION[kind]}
    return {"model_type": kind, **fields}


def shapes_of(config):
    """Names and shapes of the tensors, as transformers saves them."""
    c = config.get("text_config", config)
    kind = c["model_type"]
    delta = kind.startswith(("qwen3_next", "qwen3_5"))
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    body = "model.language_model." if c is not config else "model."
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    out = {f"{body}embed_tokens.weight": (c["vocab_size"], hidden), f"{body}norm.weight": (hidden,)}
    if not c.get("tie_word_embeddings", kind.startswith(("gemma", "smollm3"))):
        out["lm_head.weight"] = (c["vocab_size"], hidden)

    def attention(at):
        if kind == "phi3":
            out[f"{at}qkv_proj.weight"] = (q + 2 * kv, hidden)
        else:
            for part, rows in (("q", q * (2 if delta else 1)), ("k", kv), ("v", kv)):
                out[f"{at}{part}_proj.weight"] = (rows, hidden)
                if c.get("attention_bias") or kind.startswith("qwen2"):
                    out[f"{at}{part}_proj.bias"] = (rows,)
        out[f"{at}o_proj.weight"] = (hidden, q)
        if c.get("attention_bias"):
            out[f"{at}o_proj.bias"] = (hidden,)
        if delta or kind.startswith(("qwen3", "gemma3", "olmo2")):
            out[f"{at}q_norm.weight"] = (q if kind == "olmo2" else c["head_dim"],)
            out[f"{at}k_norm.weight"] = (kv if kind == "olmo2" else c["head_dim"],)

    def gated_delta(at):
        heads, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
        k, v = heads * c["linear_key_head_dim"], values * c["linear_value_head_dim"]
        out[f"{at}conv1d.weight"] = (2 * k + v, 1, 4)
        if kind == "qwen3_next":
            out[f"{at}in_proj_qkvz.weight"] = (2 * k + 2 * v, hidden)
            out[f"{at}in_proj_ba.weight"] = (2 * values, hidden)
        else:
            for part, rows in (("qkv", 2 * k + v), ("z", v), ("b", values), ("a", values)):
                out[f"{at}in_proj_{part}.weight"] = (rows, hidden)
        out[f"{at}A_log"] = out[f"{at}dt_bias"] = (values,)
        out[f"{at}norm.weight"] = (c["linear_value_head_dim"],)
        out[f"{at}out_proj.weight"] = (hidden, v)

    def gated(at, rows, names=("gate_proj", "up_proj", "down_proj")):
        for part in names:
            out[f"{at}{part}.weight"] = (hidden, rows) if part == names[2] else (rows, hidden)
            if c.get("mlp_bias"):
                out[f"{at}{part}.bias"] = out[f"{at}{part}.weight"][:1]

    def feed_forward(at):
        if kind == "phi3":
            out[f"{at}mlp.gate_up_proj.weight"] = (2 * inner, hidden)
            out[f"{at}mlp.down_proj.weight"] = (hidden, inner)
        elif kind == "mixtral":
            out[f"{at}block_sparse_moe.gate.weight"] = (c["num_local_experts"], hidden)
            for i in range(c["num_local_experts"]):
                gated(f"{at}block_sparse_moe.experts.{i}.", inner, ("w1", "w3", "w2"))
        elif "num_experts" in c:
            experts, rows = c["num_experts"], c["moe_intermediate_size"]
            out[f"{at}mlp.gate.weight"] = (experts, hidden)
            if kind == "qwen3_5_moe_text":  # all experts in one tensor
                out[f"{at}mlp.experts.gate_up_proj"] = (experts, 2 * rows, hidden)
                out[f"{at}mlp.experts.down_proj"] = (experts, hidden, rows)
            else:
                for i in range(experts):
                    gated(f"{at}mlp.experts.{i}.", rows)
            if kind != "qwen3_moe":
                gated(f"{at}mlp.shared_expert.", c["shared_expert_intermediate_size"])
                out[f"{at}mlp.shared_expert_gate.weight"] = (1, hidden)
        else:
            gated(f"{at}mlp.", inner)

    norms = ["input_layernorm", "post_attention_layernorm"]
    if kind.startswith("gemma"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    elif kind == "olmo2":
        norms = ["post_attention_layernorm", "post_feedforward_layernorm"]
    for layer in range(c["num_hidden_layers"]):
        at = f"{body}layers.{layer}."
        for norm in norms:
            out[f"{at}{norm}.weight"] = (hidden,)
        if delta and layer % 4 != 3:
            gated_delta(f"{at}linear_attn.")
        else:
            attention(f"{at}self_attn.")
        feed_forward(at)
    if c is not config:
        out["model.visual.a.weight"] = (4, 8)
    return out


def tensors_of(config, seed=1, dtype=np.float32):
    numbers, tensors = Numbers(seed), {}
    for name, shape in shapes_of(config).items():
        values = numbers.standard_normal(shape)
        if name.endswith("A_log"):
            values = np.array(LOGS[: shape[0]]) / 16
        elif len(shape) == 1:  # so that adding 1 to a norm and taking it off again is exact
            values = np.round((1 + values / 4) * 1024) / 1024
        tensors[name] = (values / (8 if len(shape) > 1 else 1)).astype(np.float32).astype(dtype)
    return tensors


def tokenizer_files():
    """One token a byte, as GPT-2 spells them, some merges, and two special tokens."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in plain] + [chr(256 + i) for i in range(256 - len(plain))]
    vocabulary = {letter: i for i, letter in enumerate(sorted(letters))}
    merges = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("i", "n")]
    special = [{"id": 256 + i, "content": text, "single_word": False, "lstrip": False,
                "rstrip": False, "normalized": False, "special": True}
               for i, text in enumerate(("<s>", "</s>"))]  # fmt: skip
    for i, (a, b) in enumerate(merges):
        vocabulary[a + b] = 258 + i
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocabulary, "merges": merges,
        },
    }  # fmt: skip
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}",
    }
    return {"tokenizer.json": json.dumps(tokenizer), "tokenizer_config.json": json.dumps(config)}
