#!/usr/bin/env python3
"""models.py [--repeat N]: compares bittern quantize with MLX and mlx-lm on this machine, in one run.

Two measurements, each the best of N. A random f32 model of 1 GB in the page cache: the speed of
`bittern quantize --method mlx` as a ratio to copying memory and to mx.quantize. SmolLM2, dequantised
to a Hugging Face folder: the time to a synced 4-bit folder, compared with mlx_lm.convert (its import
not counted)."""
import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMMAND = os.environ.get("BITTERN_COMMAND", str(ROOT / "build" / "release" / "bittern"))


def run(*args):
    return subprocess.run(list(map(str, args)), check=True, capture_output=True, text=True).stdout


def quantize(source, out, *flags):
    """The report of one run, and its wall time."""
    report = out.with_suffix(".json")
    shutil.rmtree(out, ignore_errors=True)
    start = time.perf_counter()
    run(COMMAND, "quantize", source, "-o", out, *flags, "--force", "--json", report)
    return json.loads(report.read_text()) | {"wall": time.perf_counter() - start}


def best(repeat, measure):
    return min(measure() for _ in range(repeat))


def copy_rate():
    """Bytes read plus written a second, as bittern bench measures it."""
    text = run(COMMAND, "bench", "qdq_affine_init", "--quick")
    return float(re.search(r"streaming copy ([\d.]+) GB/s", text)[1]) * 1e9


def in_page_cache(folder, repeat):
    from safetensors.numpy import save_file

    source = folder / "random"
    source.mkdir()
    w = np.random.default_rng(0).standard_normal((4096, 4096)).astype(np.float32)
    save_file({f"layers.{i}.a.weight": w for i in range(16)}, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "none"}')
    flags = ("--bits", 4, "--method", "mlx")
    before = copy_rate()
    making = best(repeat, lambda: quantize(source, folder / "random4", *flags)["seconds_making"])
    after = copy_rate()
    bytes_moved = 16 * w.nbytes * (1 + 5 / 32)  # f32 in; 4 bits, and a scale and a bias per 64, out
    rate = bytes_moved / making
    print(f"mlx rule, f32 safetensors in the page cache, 4 bit, group 64: {rate / 1e9:.1f} GB/s, "
          f"{2 * rate / (before + after):.2f} of copy ({before / 1e9:.1f} GB/s before, "
          f"{after / 1e9:.1f} after)")
    weights = 16 * w.size / making
    line = f"  {weights / 1e6:.0f} M weights/s"
    try:
        import mlx.core as mx

        mx.set_default_device(mx.cpu)
        x = mx.array(w)

        def theirs():
            start = time.perf_counter()
            mx.eval(mx.quantize(x, 64, 4))
            return time.perf_counter() - start

        theirs()
        rate = w.size / best(repeat, theirs)
        line += f", mx.quantize {rate / 1e6:.0f}: {weights / rate:.1f} times"
    except ImportError:
        line += ", mx.quantize not installed"
    print(line)


def end_to_end(folder, repeat):
    smollm2 = run(sys.executable, ROOT / "tools" / "get_model", "smollm2").strip()
    source = folder / "smollm2"
    quantize(smollm2, source, "--dequantize", "f32")
    flags = ("--bits", 4, "--method", "mlx")
    ours = best(repeat, lambda: quantize(source, folder / "smollm2-4", *flags)["wall"])
    line = f"SmolLM2, f32 folder to synced 4-bit MLX folder: {ours:.3f} s"
    try:
        import mlx.core as mx
        from mlx_lm import convert

        mx.set_default_device(mx.cpu)

        def theirs():
            shutil.rmtree(folder / "theirs", ignore_errors=True)
            start = time.perf_counter()
            convert(str(source), str(folder / "theirs"), quantize=True, q_bits=4, q_group_size=64)
            return time.perf_counter() - start

        seconds = best(repeat, theirs)
        line += f", mlx_lm.convert {seconds:.3f} s: {seconds / ours:.1f} times"
    except ImportError:
        line += ", mlx_lm not installed"
    print(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", help="where to put 2 GB of files (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        in_page_cache(pathlib.Path(folder), args.repeat)
        end_to_end(pathlib.Path(folder), args.repeat)


if __name__ == "__main__":
    main()
