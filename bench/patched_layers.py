#!/usr/bin/env python3
"""Compares gated-delta layers of transformers on FLA's kernels with the same layers patched.

    PYTHONPATH=build/release/python bench/patched_layers.py --json layers.json

A layer of Qwen3-Next and one of Qwen3.5 (hidden size 2048, 16/32 heads of 128, bf16, random
weights) run as transformers runs them where FLA, flash-linear-attention, is installed, and after
bittern.transformers.patch. transformers takes the delta rule alone from FLA, and the convolution
from the package causal_conv1d if there is one; `FLA+` has FLA's convolution and gated norm too.

Times are medians in ms: `graph` of a CUDA graph of calls, without the cost of launches, `calls` of
calls from Python. Samples of all candidates go round in turn. `error` is the relative 2-norm of the
difference from the layer in float32 on transformers' own torch code: of the output, then the
largest and the mean one of the gradients. `from FLA` sets bittern's results against FLA's.

--device cpu runs small layers on the CPU: a check of this script, not a result.
"""

import argparse
import copy
import importlib
import inspect
import json
import os
import pathlib
import statistics
import sys
import time

from peers_cuda import Meter

KINDS = {
    "Qwen3-Next": ("qwen3_next", "Qwen3NextConfig", "Qwen3NextGatedDeltaNet"),
    "Qwen3.5": ("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet"),
}
# What transformers replaces by functions of FLA and of causal_conv1d where it finds them.
RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
LINE = "{:<40} {:<8} {:>9} {:>9}  {}"


def make_layer(torch, kind, where, small):
    folder, config, layer = KINDS[kind]
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    configs = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    hidden, key_heads, size = (64, 2, 16) if small else (2048, 16, 128)
    config = getattr(configs, config)(
        hidden_size=hidden, linear_num_key_heads=key_heads, linear_num_value_heads=2 * key_heads,
        linear_key_head_dim=size, linear_value_head_dim=size, num_hidden_layers=1,
        layer_types=["linear_attention"],
    )  # fmt: skip
    torch.manual_seed(1)
    return modeling, config, getattr(modeling, layer)(config, 0).to(where, torch.bfloat16).eval()


class replaced:
    """Functions of a module that others take the place of, for a while."""

    def __init__(self, module, functions):
        self.module, self.functions = module, functions

    def __enter__(self):
        self.before = {name: getattr(self.module, name) for name in self.functions}
        self.module.__dict__.update(self.functions)

    def __exit__(self, *_):
        self.module.__dict__.update(self.before)


def on_fla_throughout(layer):
    """-> the layer with FLA's gated norm, and FLA's convolutions as transformers calls them."""
    from fla.modules import FusedRMSNormGated
    from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update

    def convolve(x, weight, bias=None, activation=None, **_):
        y, _ = causal_conv1d(x.transpose(1, 2), weight, bias, activation=activation)
        return y.transpose(1, 2)

    def update(x, state, weight, bias=None, activation=None):
        x = x.transpose(1, 2).contiguous()
        y, _ = causal_conv1d_update(x, state, weight=weight, bias=bias, activation=activation)
        return y.transpose(1, 2)

    other = copy.deepcopy(layer)
    norm = FusedRMSNormGated(
        layer.head_v_dim, eps=layer.layer_norm_epsilon, device=layer.norm.weight.device,
        dtype=layer.norm.weight.dtype,
    )  # fmt: skip
    norm.weight = other.norm.weight
    other.norm = norm
    return other, dict(zip(CONVOLUTIONS, (convolve, update)))


def candidates(kind, layer, modeling, where):
    """-> {name: (layer, the functions of `modeling` that it runs with)}."""
    import bittern.transformers

    patched = copy.deepcopy(layer)
    bittern.transformers.patch(patched)
    found = {"FLA": (layer, {}), "FLA+": on_fla_throughout(layer)} if where == "cuda" else {}
    found = found or {"torch": (layer, {})}
    for name in RULES + CONVOLUTIONS:
        taken = inspect.getclosurevars(getattr(modeling, name)).nonlocals["implementation"]
        print(f"{kind}: {name} is {taken.__module__}.{taken.__name__}")
        if where == "cuda" and name in RULES and not taken.__module__.startswith("fla."):
            sys.exit(f"patched_layers.py: {name}: not FLA's, expected flash-linear-attention")
    return {**found, "bittern": (patched, {})}


def distance(a, b):
    a, b = a.double(), b.double()
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def distances(results, expected):
    """Of the output; the largest and the mean one of the gradients, if there are any."""
    output, *gradients = (distance(a, b) for a, b in zip(results, expected))
    return [output, max(gradients), statistics.mean(gradients)] if gradients else [output]


def call_sampler(torch, meter, call, count):
    """Seconds of a call from Python, of `count` in a row."""

    def sample():
        wait = torch.cuda.synchronize if meter.where == "cuda" else lambda: None
        wait()
        start = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        return (time.perf_counter() - start) / count

    sample()
    return sample


def measure(torch, meter, title, modeling, found, run, expected, repeat):
    """`run(layer)` -> (a call to time, results to compare)."""
    samplers, results = {}, {}
    for name, (layer, functions) in found.items():
        with replaced(modeling, functions):
            try:
                call, results[name] = run(layer)
            except RuntimeError as refused:  # FLA's backward, on Hopper with some versions of Triton
                if name == "bittern":
                    raise
                print(LINE.format(title, name, "-", "-", f"refused: {refused}"), flush=True)
                continue
            samplers[name, "graph"] = (functions, meter.sampler([call]))
            samplers[name, "calls"] = (functions, call_sampler(torch, meter, call, 10))
    times = {key: [] for key in samplers}
    for _ in range(repeat):
        for key, (functions, sample) in samplers.items():
            with replaced(modeling, functions):
                times[key].append(sample())
    rows = []
    for name in results:
        row = {"problem": title, "candidate": name, "error": distances(results[name], expected)}
        row |= {how: 1e3 * statistics.median(times[name, how]) for how in ("graph", "calls")}
        if name == "bittern" and "FLA" in results:
            row["from FLA"] = distances(results[name], results["FLA"])
        rows.append(row)
        texts = {what: " ".join(f"{d:.1e}" for d in row.get(what, ())) for what in ("error", "from FLA")}
        errors = "; ".join(f"{what} {text}" for what, text in texts.items() if text)
        print(LINE.format(title, name, f"{row['graph']:.4f}", f"{row['calls']:.4f}", errors), flush=True)
    return rows


def problems(torch, kind, where, small, repeat, meter):
    modeling, config, layer = make_layer(torch, kind, where, small)
    found = candidates(kind, layer, modeling, where)
    plain = {name: getattr(modeling, name).__wrapped__ for name in RULES + CONVOLUTIONS}
    in_f32 = copy.deepcopy(layer).float()
    random = torch.Generator(device=where).manual_seed(2)

    def normal(batch, tokens):
        shape = batch, tokens, config.hidden_size
        return torch.randn(shape, generator=random, device=where).bfloat16()

    for batch, tokens in ((1, 130), (2, 64)) if small else ((1, 8192), (4, 2048)):
        x, d_y = normal(batch, tokens), normal(batch, tokens)

        def forward(layer, x=x):
            def call():
                with torch.no_grad():
                    return layer(x.to(layer.out_proj.weight.dtype))

            return call, [call()]

        def both(layer, x=x, d_y=d_y):
            dtype = layer.out_proj.weight.dtype
            inputs = [x.to(dtype).requires_grad_(), *layer.parameters()]

            def call():
                y = layer(inputs[0])
                return [y, *torch.autograd.grad(y, inputs, d_y.to(dtype))]

            return call, [t.detach() for t in call()]

        for what, run in (("forward", forward), ("forward + backward", both)):
            with replaced(modeling, plain):
                expected = run(in_f32)[1]
            title = f"{kind} {batch} x {tokens} {what}"
            yield from measure(torch, meter, title, modeling, found, run, expected, repeat)

    for batch in (1, 3) if small else (1, 128):
        prompt, new = normal(batch, 64), [normal(batch, 1) for _ in range(8)]

        def decode(layer, prompt=prompt, new=new):
            from transformers import DynamicCache

            dtype, cache = layer.out_proj.weight.dtype, DynamicCache(config=config)

            def call(x=new[0]):
                with torch.no_grad():
                    return layer(x.to(dtype), cache_params=cache)

            call(prompt)
            return call, [torch.cat([call(x) for x in new])]

        with replaced(modeling, plain):
            expected = decode(in_f32)[1]
        title = f"{kind} decoding, batch {batch}"
        yield from measure(torch, meter, title, modeling, found, decode, expected, repeat)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--repeat", type=int, default=11)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")  # its plain Triton kernels
    import torch
    import transformers

    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("patched_layers.py: torch sees no CUDA device, expected one (or --device cpu)")
    meter = Meter(torch, args.device)
    device = torch.cuda.get_device_name(0) if args.device == "cuda" else "CPU, small layers"
    print(f"{device}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(LINE.format("layer and problem", "", "graph", "calls", ""))
    rows = []
    for kind in [args.only] if args.only else KINDS:
        for row in problems(torch, kind, args.device, args.device == "cpu", args.repeat, meter):
            rows.append(row)
            if args.json:
                pathlib.Path(args.json).write_text(json.dumps({"device": device, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
