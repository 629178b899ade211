"""Writes gated_delta.safetensors: the gated delta rule and the layers around it, as its public references compute them.

Peers: torch 2.15.0, transformers 5.22.2, fla-core 0.6.0 (with einops), all from PyPI, on a CPU. Their versions are in
the file's metadata.

    python make_gdn_goldens.py            write the file beside this script
    python make_gdn_goldens.py --check    make it again in memory; every tensor must agree to 1e-5 of its largest value
                                          (another processor adds in another order)

Key: `<case>.<tensor>`. Every tensor is f32 but the bf16 ones of `norm_bf16`.

    plain    keys normalised beforehand, strong and weak decays, initial state.  q k v g beta h0
             o, ht           fla.ops.gated_delta_rule.naive.naive_recurrent_gated_delta_rule
             o_chunk, ht_chunk                              naive_chunk_gated_delta_rule
             o_hf, ht_hf     transformers' torch_chunk_gated_delta_rule
             o_hf_step, ht_hf_step          torch_recurrent_gated_delta_rule
    fused    raw q, k (L2 norm inside), a, b, a_log, dt_bias: g = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b),
             as in Qwen3NextGatedDeltaNet.  o, ht by torch_chunk_gated_delta_rule; for random do, dht autograd's
             dq dk dv da db da_log ddt_bias dh0
    conv     torch's depthwise conv1d over [state, x], then SiLU.  x weight bias state y dy dx dweight dbias dstate
    norm, norm_bf16    Qwen3NextRMSNormGated.  x z weight y; norm adds dy dx dz dweight by autograd

Heads are grouped: value head h uses key head h // (value_heads / key_heads).
"""

import importlib.metadata
import inspect
import pathlib
import sys

import numpy as np
import torch
import torch.nn.functional as F
from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule, naive_recurrent_gated_delta_rule
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.models.qwen3_next import modeling_qwen3_next as hf

# Decorated, they would run FLA's GPU kernels wherever FLA is installed.
torch_chunk_gated_delta_rule = inspect.unwrap(hf.torch_chunk_gated_delta_rule)
torch_recurrent_gated_delta_rule = inspect.unwrap(hf.torch_recurrent_gated_delta_rule)

FILE = pathlib.Path(__file__).with_name("gated_delta.safetensors")
BATCH, TOKENS, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 75, 2, 6, 16, 24
CONV_CHANNELS, CONV_WIDTH = 20, 4


def normal(rng, *shape):
    return torch.tensor(rng.normal(size=shape).astype(np.float32))


def repeated(x):
    return x.repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=2)


def plain(rng):
    q, k = (F.normalize(normal(rng, BATCH, TOKENS, KEY_HEADS, KEY_DIM), dim=-1) for _ in range(2))
    v = normal(rng, BATCH, TOKENS, VALUE_HEADS, VALUE_DIM)
    # Decays from nearly 1 to nearly 0, some of them exactly 1.
    g = -torch.exp(3 * normal(rng, BATCH, TOKENS, VALUE_HEADS) - 2)
    g = torch.where(normal(rng, *g.shape) > 1, torch.zeros(()), g)
    beta = torch.sigmoid(2 * normal(rng, BATCH, TOKENS, VALUE_HEADS))
    h0 = normal(rng, BATCH, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    case = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "h0": h0}
    q, k = repeated(q), repeated(k)
    state = {"initial_state": h0, "output_final_state": True}
    case["o"], case["ht"] = naive_recurrent_gated_delta_rule(q, k, v, beta, g, **state)
    case["o_chunk"], case["ht_chunk"] = naive_chunk_gated_delta_rule(q, k, v, g, beta, **state)
    case["o_hf"], case["ht_hf"] = torch_chunk_gated_delta_rule(q, k, v, g, beta, **state)
    case["o_hf_step"], case["ht_hf_step"] = torch_recurrent_gated_delta_rule(q, k, v, g, beta, **state)
    return case


def fused(rng):
    leaves = {
        "q": normal(rng, BATCH, TOKENS, KEY_HEADS, KEY_DIM),
        "k": normal(rng, BATCH, TOKENS, KEY_HEADS, KEY_DIM),
        "v": normal(rng, BATCH, TOKENS, VALUE_HEADS, VALUE_DIM),
        "a": normal(rng, BATCH, TOKENS, VALUE_HEADS),
        "b": normal(rng, BATCH, TOKENS, VALUE_HEADS),
        "a_log": torch.log(torch.tensor(rng.uniform(0.01, 16, VALUE_HEADS).astype(np.float32))),
        "dt_bias": normal(rng, VALUE_HEADS),
        "h0": normal(rng, BATCH, VALUE_HEADS, KEY_DIM, VALUE_DIM),
    }
    for leaf in leaves.values():
        leaf.requires_grad_()
    g = -leaves["a_log"].exp() * F.softplus(leaves["a"] + leaves["dt_bias"])
    o, ht = torch_chunk_gated_delta_rule(
        repeated(leaves["q"]), repeated(leaves["k"]), leaves["v"], g, torch.sigmoid(leaves["b"]),
        initial_state=leaves["h0"], output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    do, dht = normal(rng, *o.shape), normal(rng, *ht.shape)
    torch.autograd.backward([o, ht], [do, dht])
    gradients = {"d" + name: leaf.grad for name, leaf in leaves.items()}
    return leaves | {"o": o, "ht": ht, "do": do, "dht": dht} | gradients


def conv(rng):
    x = normal(rng, BATCH, TOKENS, CONV_CHANNELS).requires_grad_()
    weight = normal(rng, CONV_CHANNELS, CONV_WIDTH).requires_grad_()
    bias = normal(rng, CONV_CHANNELS).requires_grad_()
    state = normal(rng, BATCH, CONV_CHANNELS, CONV_WIDTH - 1).requires_grad_()
    past_and_now = torch.cat([state, x.transpose(1, 2)], dim=2)
    y = F.silu(F.conv1d(past_and_now, weight[:, None], bias, groups=CONV_CHANNELS)).transpose(1, 2)
    dy = normal(rng, *y.shape)
    y.backward(dy)
    case = {"x": x, "weight": weight, "bias": bias, "state": state, "y": y, "dy": dy}
    return case | {"dx": x.grad, "dweight": weight.grad, "dbias": bias.grad, "dstate": state.grad}


def norm(rng, dtype):
    module = hf.Qwen3NextRMSNormGated(VALUE_DIM, eps=1e-6).to(dtype)
    module.weight.data = normal(rng, VALUE_DIM).to(dtype)
    x, z = (normal(rng, TOKENS, VALUE_DIM).to(dtype).requires_grad_() for _ in range(2))
    y = module(x, z)
    dy = normal(rng, *y.shape).to(dtype)
    y.backward(dy)
    case = {"x": x, "z": z, "weight": module.weight, "y": y}
    if dtype == torch.bfloat16:  # autograd rounds in between
        return case
    return case | {"dy": dy, "dx": x.grad, "dz": z.grad, "dweight": module.weight.grad}


def make():
    rng = np.random.default_rng(20)
    cases = {
        "plain": plain(rng),
        "fused": fused(rng),
        "conv": conv(rng),
        "norm": norm(rng, torch.float32),
        "norm_bf16": norm(rng, torch.bfloat16),
    }
    return {
        f"{case}.{name}": tensor.detach().contiguous()
        for case, tensors in cases.items()
        for name, tensor in tensors.items()
    }


def main():
    tensors = make()
    if "--check" not in sys.argv[1:]:
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "fla-core", "numpy")}
        save_file(tensors, FILE, metadata=versions)
        return
    with safe_open(FILE, "pt") as file:
        if set(file.keys()) != set(tensors):
            sys.exit("make_gdn_goldens: the file's keys differ")
        for key, tensor in tensors.items():
            known = file.get_tensor(key)
            if known.shape != tensor.shape or (known - tensor).abs().max() > 1e-5 * tensor.abs().max():
                sys.exit(f"make_gdn_goldens: {key} differs")
    print(f"{len(tensors)} tensors agree")


if __name__ == "__main__":
    main()
