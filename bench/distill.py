#!/usr/bin/env python3
"""distill.py TEACHER TEXT [--threads N] [--steps N] [--batch N]: compares a step of `bittern distill` with the
same step in torch: the teacher reads BATCH pieces of 512 tokens, the student reads them too, and the KL
divergence of every position goes back to all scales and biases, which Adam moves.

    PYTHONPATH=build/release/python bench/distill.py model.gguf text.txt --threads 2

torch keeps all activations, in f32 and under bf16 autocast; a matrix is `codes * scale + bias`. Printed are
tokens/s of the fastest step, the ratio to the faster torch, and the share of the machine's GEMM (of bf16 where the
program multiplies in bf16) that the multiply-adds of the method are: one forward pass of the teacher, one of the student, and its gradients (dX of
every matrix and dW's worth for those that learn; the recomputation of layers is not counted).
"""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMMAND = os.environ.get("BITTERN_COMMAND", str(ROOT / "build" / "release" / "bittern"))
CONTEXT, BITS, GROUP = 512, 4, 64


def run_bittern(teacher, text, batch, steps, threads, preference):
    """Seconds of the fastest step."""
    import bittern

    at = {}

    def progress(event):
        if event.doing == "learning":
            at.setdefault(event.step, time.perf_counter())

    with tempfile.TemporaryDirectory() as scratch:
        bittern.distill(
            teacher, f"{scratch}/out", bits=BITS, group_size=GROUP, embedding_bits=0, data=[text], context=CONTEXT,
            calibration=1, validation=1, steps=steps, batch=batch, rate=1e-4, preference=preference, threads=threads,
            progress=progress,
        )  # fmt: skip
    times = sorted(at.items())
    return min((b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(times, times[1:]))


def run_torch(folder, text, batch, steps, threads, dtype):
    import torch
    import transformers
    from torch.nn import functional

    torch.set_num_threads(threads)

    class Quantised(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            w = weight.view(weight.shape[0], -1, GROUP)
            low = w.amin(-1, keepdim=True)
            scale = (w.amax(-1, keepdim=True) - low) / (2**BITS - 1)
            self.codes = ((w - low) / scale).round().to(torch.uint8)
            self.scale, self.bias = torch.nn.Parameter(scale), torch.nn.Parameter(low)

        def forward(self, x):
            return functional.linear(x, (self.codes * self.scale + self.bias).flatten(1))

    def load():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model.requires_grad_(False).eval()

    teacher, student = load(), load()
    for layer in student.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(part, name, Quantised(child.weight.data))
    learned = [p for p in student.parameters() if p.requires_grad]
    adam = torch.optim.Adam(learned, 1e-6)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(pathlib.Path(text).read_text()[: 8 * CONTEXT * batch], return_tensors="pt").input_ids[0]
    ids = ids[: batch * CONTEXT].view(batch, CONTEXT)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            with torch.no_grad():
                target = teacher(ids).logits.float().log_softmax(-1)
            loss = functional.kl_div(
                student(ids).logits.float().log_softmax(-1).flatten(0, 1), target.flatten(0, 1),
                log_target=True, reduction="batchmean",
            )  # fmt: skip
        loss.backward()
        adam.step()
        adam.zero_grad()

    best = float("inf")
    for _ in range(steps):
        start = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - start)
    return best


def multiply_adds(folder):
    """Of the method, a token: matrices once for the teacher, once forward and twice back for those that learn;
    embedding and head do not learn. Attention's own products are left out: they are few in pieces of 512."""
    c = json.loads((pathlib.Path(folder) / "config.json").read_text())
    hidden, heads, kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    head = c.get("head_dim") or hidden // heads
    layer = 2 * hidden * head * (heads + kv) + 3 * hidden * c["intermediate_size"]
    return c["num_hidden_layers"] * layer * 4 + c["vocab_size"] * hidden * 3


def gemm_rates(threads):
    """Multiply-adds a second by dtype, as bittern bench measures them."""
    args = [COMMAND, "bench", "gdn_chunk_forward", "--repeat", "3", "--threads", str(threads)]
    text = subprocess.run(args, check=True, capture_output=True, text=True).stdout
    rates = re.search(r"GEMM (.*) GFLOP", text)[1]
    return {dtype: float(rate) * 1e9 / 2 for dtype, rate in re.findall(r"(\w+) ([\d.]+)", rates)}


def main():
    if sys.argv[1:2] == ["--one"]:
        program, source, text, batch, steps, threads, *rest = sys.argv[2:]
        run = {"bittern": run_bittern, "torch": run_torch}[program]
        print(run(source, text, int(batch), int(steps), int(threads), *rest))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher")
    parser.add_argument("text")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = f"{scratch}/teacher"
        subprocess.run([COMMAND, "quantize", flags.teacher, "-o", folder, "--dequantize", "f32", "--quiet"], check=True)
        runs = {
            "bittern": ("bittern", flags.teacher, "exact"),
            "bittern --fastest": ("bittern", flags.teacher, "fastest"),
            "torch f32": ("torch", folder, "f32"),
            "torch bf16": ("torch", folder, "bf16"),
        }
        tokens, rates = flags.batch * CONTEXT, {}
        gemm = gemm_rates(flags.threads)
        for name, (program, source, *rest) in runs.items():
            args = [sys.executable, __file__, "--one", program, source, flags.text, flags.batch, flags.steps, flags.threads]
            result = subprocess.run([*map(str, args), *rest], capture_output=True, text=True)
            if result.returncode != 0:
                print(f"{name}: {(result.stderr.strip().splitlines() or ['ended'])[-1]}")
                continue
            rates[name] = tokens / float(result.stdout.splitlines()[-1])
        needed = multiply_adds(folder)
    peer = max((rate for name, rate in rates.items() if name.startswith("torch")), default=None)
    print(f"The method needs {needed / 1e6:.0f} M multiply-adds a token. GEMM, G multiply-adds/s:",
          ", ".join(f"{dtype} {rate / 1e9:.0f}" for dtype, rate in gemm.items()))  # fmt: skip
    print(f"{'program':<18}{'tokens/s':>10}{'':>9}{'of GEMM':>9}")
    for name, rate in rates.items():
        dtype = "bf16" if name in ("bittern --fastest", "torch bf16") and "bf16" in gemm else "f32"
        share = f"{rate * needed / gemm[dtype]:.2f} {dtype}"
        print(f"{name:<18}{rate:>10.1f}{f'{rate / peer:.2f} x' if peer else '':>9}{share:>11}")


if __name__ == "__main__":
    main()
