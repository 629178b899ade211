#!/usr/bin/env python3
"""Compares other libraries with `bittern bench`: the same problems, sizes and threads.

    bench/peers.py --threads 2 --json peers.json
    bench/peers.py --python torch=/some/venv/bin/python --op "quantize_per_group f32"

For each op, bittern runs first and measures the machine's copy bandwidth around its own samples. The
peers follow at once and are compared with that same copy. Every peer runs in its own process.
`torch` gives two rows, eager and torch.compile. A peer that is not installed gives a row that says
so. For aura_attention the peer is torch's attention over an f16 cache, whose ratio counts the bytes
of that cache; for a prompt it is its attention in f32, which is faster, the cache converted before.
The gated delta rule and the gradients of products are limited by products, so their peers have a
time and no ratio. torch's gradients are those of all scales and biases, by way of the gradient of W.

All get huge pages where the system grants them, and memory that is kept between calls, so that no
one pays for page faults. GB/s counts the bytes the op must read and write at least.
"""

import argparse
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROWS, COLUMNS = 8192, 4096  # 32 Mi elements, as in `bittern bench`
QUICK_FACTOR = 8

# What bittern calls it, the fields that single out the case, and the peers that do the same work.
OPS = {
    "quantize_per_group f32": (
        "quantize_per_group", {"element": "f32"}, ("torch",)),
    "quantize_per_group bf16": (
        "quantize_per_group", {"element": "bf16"}, ("torch",)),
    "quantize_per_group_backward f32": (
        "quantize_per_group_backward", {"element": "f32"}, ("torch",)),
    "quantize_per_group_backward bf16": (
        "quantize_per_group_backward", {"element": "bf16"}, ("torch",)),
    "qdq_affine_init minmax f32": (
        "qdq_affine_init", {"element": "f32", "method": "minmax"}, ("torch", "ggml")),
    "qdq_affine_init mlx f32 packed": (
        "qdq_affine_init", {"element": "f32", "method": "mlx", "storage": "packed"}, ("mlx",)),
    "qdq_affine_forward f32": (
        "qdq_affine_forward", {"element": "f32", "storage": "u8"}, ("torch",)),
    "qdq_affine_forward f32 packed": (
        "qdq_affine_forward", {"element": "f32", "storage": "packed"}, ("mlx",)),
    "qdq_affine_backward f32": (
        "qdq_affine_backward", {"element": "f32", "storage": "u8"}, ("torch",)),
    "pack_codes 4 bit": ("pack_codes", {"bits": 4}, ("torch",)),
    "unpack_codes 4 bit": ("unpack_codes", {"bits": 4}, ("torch",)),
    "gguf_quantize Q4_0": ("gguf_quantize", {"type": "Q4_0"}, ("ggml",)),
    "gguf_quantize Q8_0": ("gguf_quantize", {"type": "Q8_0"}, ("ggml",)),
    "gguf_quantize Q2_K": ("gguf_quantize", {"type": "Q2_K"}, ("ggml",)),
    "gguf_quantize Q3_K": ("gguf_quantize", {"type": "Q3_K"}, ("ggml",)),
    "gguf_quantize Q4_K": (
        "gguf_quantize", {"type": "Q4_K", "given_grid": "false"}, ("ggml",)),
    "gguf_quantize Q5_K": (
        "gguf_quantize", {"type": "Q5_K", "given_grid": "false"}, ("ggml",)),
    "gguf_quantize Q6_K": ("gguf_quantize", {"type": "Q6_K"}, ("ggml",)),
    "gguf_dequantize Q4_K": ("gguf_dequantize", {"type": "Q4_K", "element": "f32"}, ("ggml",)),
    "gguf_dequantize Q6_K": ("gguf_dequantize", {"type": "Q6_K", "element": "f32"}, ("ggml",)),
    "aura_encode d128 4 bit": (
        "aura_encode", {"element": "f32", "dim": 128, "bits": 4, "rotation": "hadamard"},
        ("torch",)),
    "aura_attention 4/4 bit": (
        "aura_attention", {"k_bits": 4, "v_bits": 4, "heads": 8, "capacity": 65536, "page_size": 0},
        ("torch",)),
    "aura_attention f16 prompt": (
        "aura_attention", {"queries": 4096, "first": 4096, "softcap": 0}, ("torch",)),
    "aura_attention f16 token": (
        "aura_attention", {"queries": 1, "first": 4096}, ("torch",)),
    "quantized_matmul_backward 4 bit": (
        "quantized_matmul_backward",
        {"rows": 512, "outputs": 4096, "inputs": 4096, "type": "affine", "layout": "panels"}, ("torch",)),
    "gdn_chunk_forward f32": ("gdn_chunk_forward", {"element": "f32"}, ("transformers",)),
    "gdn_chunk_forward bf16": (
        "gdn_chunk_forward", {"element": "bf16", "qk_l2norm": "false"}, ("transformers",)),
}  # fmt: skip
# Any one of a peer's modules will do.
MODULES = {
    "torch": ("torch",),
    "mlx": ("mlx",),
    "ggml": ("llama_cpp", "libggml"),
    "transformers": ("transformers",),
}
TITLES = {
    "torch": ("torch eager", "torch.compile"),
    "mlx": ("mlx",),
    "ggml": ("ggml",),
    "transformers": ("transformers",),
}


def seconds(work, repeat):
    work()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


# ---- the peers; each returns [(title, version, seconds, bytes, note)] ----


def codec_problem(torch, op, rows):
    """What a torch user writes for the KV codec: its encode, and attention over an f16 cache."""
    import torch.nn.functional as F

    if OPS[op][0] == "aura_encode":
        n = 65536 * rows // ROWS
        x, rotation = torch.randn(n, 128), torch.linalg.qr(torch.randn(128, 128))[0]
        levels = torch.linspace(-0.24, 0.24, 16)
        boundaries, shifts = (levels[1:] + levels[:-1]) / 2, torch.arange(0, 32, 4)

        def encode(x):
            norm = x.norm(dim=1, keepdim=True)
            codes = torch.bucketize((x / norm) @ rotation.T, boundaries)
            words = (codes.view(-1, 16, 8) << shifts).sum(2).to(torch.int32)
            return words, norm / levels[codes].norm(dim=1, keepdim=True)

        return encode, (x,), n * (512 + 64 + 4)
    if op in ("aura_attention f16 prompt", "aura_attention f16 token"):
        tokens, prompt = 4096, op.endswith("prompt")
        k, v = (torch.randn(1, 3, tokens, 64).half() for _ in range(2))
        q = torch.randn(1, 9, tokens if prompt else 1, 64)

        def attend(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=prompt, enable_gqa=True)

        def attend_heads(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=prompt)

        if not prompt:
            return attend, (q.half(), k, v), 2 * 3 * tokens * 128
        # Each KV head three times in memory: faster than enable_gqa.
        k, v = (t.float().repeat_interleave(3, 1) for t in (k, v))
        return attend_heads, (q, k, v), None
    tokens = 65536 * rows // ROWS
    q = torch.randn(1, 8, 1, 128).half()
    k, v = (torch.randn(1, 8, tokens, 128).half() for _ in range(2))
    return F.scaled_dot_product_attention, (q, k, v), 2 * 8 * tokens * 256


def matmul_problem(torch, rows, size):
    """The gradients of x W^T with W = codes * scale + bias: function, inputs, no bytes to count."""

    def backward(d_y, x, codes, s, b):
        d_x = d_y @ (codes * s + b).view(size, size)
        d_w = (d_y.T @ x).view(codes.shape)
        return d_x, (codes * d_w).sum(2), d_w.sum(2)

    codes = torch.randint(0, 16, (size, size // 64, 64), dtype=torch.uint8)
    s = torch.rand(size, size // 64, 1) * 1e-3
    return backward, (torch.randn(rows, size), torch.randn(rows, size), codes, s, -8 * s), None


def transformers_rows(op, rows, threads, repeat):
    import inspect

    import torch
    import transformers
    from transformers.models.qwen3_next import modeling_qwen3_next as model

    torch.set_num_threads(threads)
    tokens, dtype = 4096 * rows // ROWS, torch.bfloat16 if "bf16" in op else torch.float32
    rule = inspect.unwrap(model.torch_chunk_gated_delta_rule)
    q, k = (torch.nn.functional.normalize(torch.randn(1, tokens, 32, 128), dim=-1) for _ in "qk")
    inputs = [t.to(dtype) for t in (q, k, torch.randn(1, tokens, 32, 128))]
    g, beta = -torch.rand(1, tokens, 32), torch.rand(1, tokens, 32)
    with torch.no_grad():
        took = seconds(lambda: rule(*inputs, g, beta), min(repeat, 5))
    # Bound by its products: bytes say nothing.
    return [(TITLES["transformers"][0], transformers.__version__, took, None, "")]


def torch_rows(op, rows, threads, repeat):
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    if OPS[op][0].startswith("aura"):
        return time_torch(torch, *codec_problem(torch, op, rows), repeat)
    if OPS[op][0] == "quantized_matmul_backward":
        return time_torch(torch, *matmul_problem(torch, 512, 4096), repeat)
    n, group = rows * COLUMNS, 64 if "affine" in op else 128
    dtype = torch.bfloat16 if "bf16" in op else torch.float32
    x = (torch.randn(n // group, group) * 0.02).to(dtype)
    s = (torch.rand(n // group, 1) * 2.4e-4 + 3.6e-4).to(dtype)
    zp = torch.randint(-3, 4, (n // group, 1), dtype=torch.int32)

    # Arithmetic in f32, as the op's contract has it.
    def quantize(x, s, zp):
        return (torch.round(x.float() / s.float()) + zp).clamp(-128, 127).to(torch.int8)

    def quantize_backward(d_y, x, s, zp):
        code = torch.round(x.float() / s.float()) + zp
        inside = (code >= -128) & (code <= 127)
        return torch.where(inside, d_y.float() / s.float(), 0.0).to(dtype)

    def affine_init(w):
        low, high = torch.aminmax(w, dim=1, keepdim=True)
        s = (high - low) / 15
        s = torch.where(s > 0, s, 1.0)
        return torch.floor((w - low) / s + 0.5).clamp(0, 15).to(torch.uint8), s, low

    def affine_forward(q, s, b):
        return q * s + b

    def affine_backward(d_y, q):
        return (q * d_y).sum(1), d_y.sum(1)

    shifts = torch.arange(0, 32, 4, dtype=torch.int32)

    def pack(codes):
        return (codes.to(torch.int32) << shifts).sum(1, dtype=torch.int32)

    def unpack(words):
        return ((words[:, None] >> shifts) & 15).to(torch.uint8)

    codes = torch.randint(0, 16, (n // group, group), dtype=torch.uint8)
    nibbles = codes.view(-1, 8)
    wide = x.element_size()
    params = n // group
    function, inputs, size = {
        "quantize_per_group": (quantize, (x, s, zp), n * (wide + 1) + params * (wide + 4)),
        "quantize_per_group_backward": (
            quantize_backward, (torch.randn(x.shape).to(dtype), x, s, zp),
            3 * n * wide + params * (wide + 4)),
        "qdq_affine_init": (affine_init, (x,), n * 5 + params * 8),
        "qdq_affine_forward": (affine_forward, (codes, s, s), n * 5 + params * 8),
        "qdq_affine_backward": (affine_backward, (x, codes), n * 5 + params * 8),
        "pack_codes": (pack, (nibbles,), n + n // 2),
        "unpack_codes": (unpack, (pack(nibbles),), n + n // 2),
    }[OPS[op][0]]  # fmt: skip
    return time_torch(torch, function, inputs, size, repeat)


def time_torch(torch, function, inputs, size, repeat):
    out = []
    with torch.no_grad():
        for title, f in zip(TITLES["torch"], (function, torch.compile(function, dynamic=False))):
            try:
                took, note = seconds(lambda: f(*inputs), repeat), ""
            except Exception as error:  # no compiler, or one that fails: a row, not the end
                took, note = None, f"failed: {type(error).__name__}"
            out.append((title, torch.__version__, took, size, note))
    return out


def mlx_rows(op, rows, threads, repeat):
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    n = rows * COLUMNS
    w = mx.random.normal((rows, COLUMNS)) * 0.02
    packed = mx.quantize(w, group_size=64, bits=4)
    mx.eval(w, packed)
    if OPS[op][0] == "qdq_affine_init":
        work = lambda: mx.eval(mx.quantize(w, group_size=64, bits=4))
    else:
        work = lambda: mx.eval(mx.dequantize(*packed, group_size=64, bits=4))
    size = 4 * n + n // 2 + n // 64 * 8
    version = importlib.metadata.version("mlx")
    return [("mlx", version, seconds(work, repeat), size, "threads as mlx chooses")]


# ggml's number of a type, the weights and the bytes of its block.
GGML_TYPES = {
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
}


def ggml_library():
    """The library of llama-cpp-python or of libggml-python, and its version."""
    for module, package in (("llama_cpp", "llama-cpp-python"), ("libggml", "libggml-python")):
        spec = importlib.util.find_spec(module)
        if spec is None:
            continue
        found = sorted(pathlib.Path(spec.origin).parent.glob("lib*/libggml-base.so*"))
        if found:
            version = importlib.metadata.version(package)
            return ctypes.CDLL(str(found[0])), f"{package} {version}"
    raise FileNotFoundError("libggml-base.so")


def ggml_rows(op, rows, threads, repeat):
    import concurrent.futures

    import numpy

    library, version = ggml_library()
    quantize = library.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    name = op.split()[1] if op.startswith("gguf") else "Q4_1"
    number, block, block_bytes = GGML_TYPES[name]
    dequantize = getattr(library, f"dequantize_row_{name.lower().replace('_k', '_K')}")
    dequantize.restype, dequantize.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    n = rows * COLUMNS
    w = (numpy.random.default_rng(1).standard_normal(n, dtype=numpy.float32) * 0.02).copy()
    out = numpy.zeros(n // block * block_bytes, dtype=numpy.uint8)
    back = numpy.zeros(n, dtype=numpy.float32)
    edges = [rows * t // threads for t in range(threads + 1)]
    pool = concurrent.futures.ThreadPoolExecutor(threads)

    # ctypes releases the GIL.
    def write(t):
        first, count = edges[t], edges[t + 1] - edges[t]
        quantize(number, w.ctypes.data, out.ctypes.data, first * COLUMNS, count, COLUMNS, None)

    def read(t):
        first, count = edges[t] * COLUMNS, (edges[t + 1] - edges[t]) * COLUMNS
        blocks = out.ctypes.data + first // block * block_bytes
        dequantize(blocks, back.ctypes.data + 4 * first, count)

    def on_all(part):
        list(pool.map(part, range(threads)))

    on_all(write)
    if op.startswith("gguf_dequantize"):
        took, note = seconds(lambda: on_all(read), repeat), ""
    elif op.startswith("gguf_quantize"):
        took = seconds(lambda: on_all(write), min(repeat, 5))
        on_all(read)
        note = f"{n / took / threads / 1e6:.1f} M weights/s a thread, error {error(w, back):.4e}"
        if importlib.util.find_spec("bittern") is not None:
            import bittern

            blocks = bittern.gguf_quantize(w.reshape(rows, COLUMNS), type=name)
            bittern.gguf_dequantize(blocks, y=back.reshape(rows, COLUMNS), type=name)
            note += f", bittern's {error(w, back):.4e}"
    else:
        took, note = seconds(lambda: on_all(write), repeat), "Q4_1: groups of 32, scales f16"
    return [("ggml", version, took, 4 * n + out.nbytes, note)]


def error(w, y):
    """Squared, relative to the weights'."""
    return float((abs(w - y) ** 2).sum(dtype="f8") / (w**2).sum(dtype="f8"))


WORKERS = {"torch": torch_rows, "mlx": mlx_rows, "ggml": ggml_rows, "transformers": transformers_rows}


# ---- the orchestra ----


def worker_environment(peer, threads):
    env = dict(os.environ)
    # Memory from brk, never handed back, in huge pages: what malloc gives is reused by later calls.
    env["GLIBC_TUNABLES"] = (
        "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776:glibc.malloc.hugetlb=1"
    )
    env["OMP_NUM_THREADS"] = str(threads)
    if peer == "torch":  # others start threads that would inherit the first one's place
        env.update(OMP_PROC_BIND="spread", OMP_PLACES="cores", THP_MEM_ALLOC_ENABLE="1")
    return env


def run_peer(args, peer, op, rows):
    python = dict(p.split("=", 1) for p in args.python).get(peer, sys.executable)
    command = [python, __file__, "--worker", peer, "--op", op, "--rows", str(rows)]
    command += ["--threads", str(args.threads), "--repeat", str(args.repeat)]
    env = worker_environment(peer, args.threads)
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1200)
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        why = (done.stderr.strip().splitlines() or ["no output"])[-1]
    except subprocess.TimeoutExpired:
        why = "more than 20 minutes"
    return [(title, "", None, None, f"failed: {why}") for title in TITLES[peer]]


def run_worker(args):
    if not any(importlib.util.find_spec(m) for m in MODULES[args.worker]):
        result = [(t, "", None, None, "not installed") for t in TITLES[args.worker]]
    else:
        result = WORKERS[args.worker](args.op[0], args.rows, args.threads, args.repeat)
    print(json.dumps(result))


def run_bittern(args, op):
    name, fields, _ = OPS[op]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "bench.json"
        command = [args.bittern, "bench", name, "--device", "cpu", "--quiet", "--json", path]
        command += ["--threads", str(args.threads)] + ["--quick"] * args.quick
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"peers.py: {done.stderr.strip()}")
        report = json.loads(path.read_text())
    for row in report["rows"]:
        if all(row["problem"].get(k) == v for k, v in fields.items()):
            return report["machine"], row
    sys.exit(f"peers.py: bittern bench {name} has no case with {fields}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bittern", default=str(ROOT / "build/release/bittern"), metavar="PATH")
    parser.add_argument("--op", action="append", metavar="OP", help=f"of: {', '.join(OPS)}")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="1/8 of the elements")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument(
        "--python", action="append", default=[], metavar="PEER=PATH",
        help="the Python that has torch, mlx, transformers or ggml (llama_cpp or libggml); default: this one",
    )  # fmt: skip
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, default=ROWS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for op in args.op or []:
        if op not in OPS:
            parser.error(f"--op: {op}, expected one of: {', '.join(OPS)}")
    if args.worker:
        return run_worker(args)
    if not os.access(args.bittern, os.X_OK):
        parser.error(f"--bittern: {args.bittern}: no such program, expected the command's path")

    line = "{:<33} {:<14} {:<26} {:>9} {:>7} {:>9} {:>6}  {}"
    rows, machine = [], None
    for op in args.op or OPS:
        machine, ours = run_bittern(args, op)
        if not rows:
            print(f"{machine['cpu']}, {machine['threads']} threads, bittern {machine['isa']}")
            print(line.format("op", "peer", "version", "ms", "GB/s", "copy GB/s", "ratio", "note"))
        copy = ours["limit_gb_s"]
        found = [("bittern", machine["version"], ours["ms"], ours["gb_s"], ours["ratio"], "")]
        size = ROWS // (QUICK_FACTOR if args.quick else 1)
        for peer in OPS[op][2]:
            for title, version, took, bytes_, note in run_peer(args, peer, op, size):
                gb_s = bytes_ / took / 1e9 if took and bytes_ else None
                found.append(
                    (title, version, took and 1e3 * took, gb_s, gb_s and gb_s / copy, note)
                )
        for title, version, ms, gb_s, ratio, note in found:
            rows.append(
                {"op": op, "peer": title, "version": version, "ms": ms, "gb_s": gb_s,
                 "limit_gb_s": copy, "ratio": ratio, "note": note}
            )  # fmt: skip
            show = lambda x, form: "-" if x is None else format(x, form)
            text = line.format(
                op, title, version or "-", show(ms, ".3f"), show(gb_s, ".1f"), show(copy, ".1f"),
                show(ratio, ".2f"), note,
            )  # fmt: skip
            print(text.rstrip(), flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": machine, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
