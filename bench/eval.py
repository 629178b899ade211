#!/usr/bin/env python3
"""eval.py TEACHER STUDENT TEXT [--chunks N] [--threads N] [--rounds N]: compares the speed of `bittern eval
STUDENT --teacher TEACHER` with the same done by transformers in f32: both models read the same pieces of
1024 tokens, and the KL divergence of every position is taken.

    bench/eval.py model.gguf model-4bit text.txt --threads 2

In each round the programs run one after another. Printed are tokens/s (each counted once, though two
models read it), medians over the rounds, and the ratio to transformers. Loading is not counted for
transformers and is for bittern.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMMAND = os.environ.get("BITTERN_COMMAND", str(ROOT / "build" / "release" / "bittern"))
CONTEXT = 1024


def run_bittern(flags, kind):
    start = time.perf_counter()
    result = subprocess.run(
        [COMMAND, "eval", flags.student, "--teacher", flags.teacher, "--text", flags.text, "--dialect", "segments",
         "--ctx", str(CONTEXT), "--chunks", str(flags.chunks), "--activations", kind, "--threads", str(flags.threads),
         "--quiet", "--json", "-"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    return {"rate": flags.chunks * CONTEXT / seconds, "kl": json.loads(result.stdout)["models"][0]["kl"]["mean"]}


def run_transformers(folders, flags):
    """In a process of its own, so that torch's threads do not spin beside bittern's."""
    args = [sys.executable, __file__, "--one", *folders, flags.text, str(flags.chunks), str(flags.threads)]
    return json.loads(subprocess.run(args, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def one(teacher, student, text, chunks, threads):
    import torch
    import transformers

    torch.set_num_threads(int(threads))
    load = lambda path: transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()  # noqa: E731
    models = [load(teacher), load(student)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(teacher)
    ids = tokenizer(pathlib.Path(text).read_text(), return_tensors="pt", add_special_tokens=False).input_ids[0]
    total, count = 0.0, int(chunks)
    start = time.perf_counter()
    with torch.inference_mode():
        for piece in ids[: count * CONTEXT].view(count, 1, CONTEXT):
            p, q = (torch.log_softmax(m(piece).logits[0, :-1], -1) for m in models)
            total += float((p.exp() * (p - q)).sum(-1).mean())
    print(json.dumps({"rate": count * CONTEXT / (time.perf_counter() - start), "kl": total / count}))


def main():
    if sys.argv[1:2] == ["--one"]:
        return one(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher")
    parser.add_argument("student")
    parser.add_argument("text")
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=2)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = [f"{scratch}/teacher", f"{scratch}/student"]
        for source, folder in zip((flags.teacher, flags.student), folders):
            subprocess.run([COMMAND, "quantize", source, "-o", folder, "--dequantize", "f32", "--quiet"], check=True)
        rounds = []
        for _ in range(flags.rounds):
            row = {f"bittern {kind}": run_bittern(flags, kind) for kind in ("float", "int16", "int8")}
            row["transformers f32"] = run_transformers(folders, flags)
            rounds.append(row)
    print(f"{'program':<20}{'tokens/s':>10}{'':>9}{'KL, nats':>12}")
    for name in rounds[0]:
        middle = statistics.median(r[name]["rate"] for r in rounds)
        ratio = statistics.median(r[name]["rate"] / r["transformers f32"]["rate"] for r in rounds)
        print(f"{name:<20}{middle:>10.0f}{ratio:>7.2f} x{rounds[0][name]['kl']:>12.5f}")


if __name__ == "__main__":
    main()
