#!/usr/bin/env python3
"""bench/text.py MODEL.gguf TEXT: tokens per second of bittern.Tokenizer and of the package tokenizers.

One thread; the same text in one call, and line by line; the two in turns, the best of each. `bittern` must be importable,
and the command be built (BITTERN_COMMAND, or build/release/bittern), which makes the folder that
tokenizers reads."""

import os

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pathlib
import subprocess
import sys
import tempfile
import time

import tokenizers

import bittern

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMAND = os.environ.get("BITTERN_COMMAND") or str(ROOT / "build" / "release" / "bittern")
ROUNDS = 5


def seconds(call):
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def main(model, text_file):
    text = pathlib.Path(text_file).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as temporary:
        folder = os.path.join(temporary, "hf")
        subprocess.run([COMMAND, "quantize", model, "-o", folder, "--dequantize", "f16", "--quiet"], check=True)
        theirs = tokenizers.Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        of_folder, of_gguf = bittern.Tokenizer(folder), bittern.Tokenizer(model)
        loading, _ = seconds(lambda: bittern.Tokenizer(model))
        their_loading, _ = seconds(lambda: tokenizers.Tokenizer.from_file(os.path.join(folder, "tokenizer.json")))
    data = text.encode()
    calls = {
        "tokenizers, encode": lambda: theirs.encode(text, add_special_tokens=False),
        "bittern of the folder, encode": lambda: of_folder.encode(data, add_special=False),
        "bittern of GGUF, encode": lambda: of_gguf.encode(data, add_special=False),
    }
    lines = text.splitlines(keepends=True)
    calls["tokenizers, lines"] = lambda: theirs.encode_batch(lines, add_special_tokens=False)
    calls["bittern of the folder, lines"] = lambda: [of_folder.encode(line, add_special=False) for line in lines]
    ids = of_folder.encode(data, add_special=False)
    list_of_ids = ids.tolist()
    calls["tokenizers, decode"] = lambda: theirs.decode(list_of_ids)
    calls["bittern of the folder, decode"] = lambda: of_folder.decode(ids)
    assert theirs.encode(text, add_special_tokens=False).ids == list_of_ids
    best = {name: min(seconds(call)[0] for _ in range(2)) for name, call in calls.items()}
    for _ in range(ROUNDS - 2):
        for name, call in calls.items():
            best[name] = min(best[name], seconds(call)[0])
    print(f"{len(list_of_ids)} tokens, {len(data)} bytes, equal ids")
    for name, time_taken in best.items():
        base = best["tokenizers, " + name.split(", ")[1]]
        print(f"{name:32} {len(list_of_ids) / time_taken / 1e6:6.2f} M tokens/s  {base / time_taken:5.2f} x")
    print(f"load: bittern of GGUF {loading:.3f} s, tokenizers {their_loading:.3f} s")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
