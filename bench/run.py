#!/usr/bin/env python3
"""run.py MODEL.gguf [--threads N] [--rounds N] [--file NAME=PATH ...]: compares running a model with
llama.cpp, on the same file, tokens and number of threads.

    PYTHONPATH=build/release/python bench/run.py model.gguf --threads 2
    ... --file 4bit=folder --peer-file Q4_0=best.gguf      other files of the same model, for either

In each round the programs run one after another, each in a process of its own, and reading memory is
timed between them: the memory of some machines has fast and slow minutes, so only ratios of one round
mean much. Printed are medians over the rounds and, of each round's ratios to llama.cpp on MODEL, the
median.

    prompt       tokens/s of 512 tokens in one call; the better of two
    generation   tokens/s of 128 tokens, one after another, in an empty context; the better of two
    of reading   bytes of the weights times tokens/s in a context of 64, over plain reading
    load         seconds until the model can take tokens
    first token  seconds of the whole command `bittern run` that ends with the first token of an answer;
                 for llama.cpp of loading and that token alone, without starting Python

--plain-peer also runs llama.cpp without its repacking of weights. llama.cpp is that of llama-cpp-python, called from Python as bittern is; only the last token has logits.
"""
import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMMAND = os.environ.get("BITTERN_COMMAND", str(ROOT / "build" / "release" / "bittern"))
PROMPT, GENERATED, SHORT = 512, 128, 64
QUESTION = "The capital of France is"


def tokens(count, vocab):
    return [(7919 * i + 11) % (vocab - 100) + 50 for i in range(count)]


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def better(call):
    return min(seconds(call), seconds(call))


def run_bittern(path, kind, threads):
    import bittern

    start = time.perf_counter()
    model = bittern.load(path, activations=kind, threads=threads)
    load = time.perf_counter() - start
    ids = tokens(PROMPT, model.info.vocab)

    def generate(count):
        session = model.session(context=GENERATED)
        for token in ids[:count]:
            session.append([token])

    generate(8)
    return {
        "load": load,
        "prompt": PROMPT / better(lambda: model.session(context=PROMPT).append(ids)),
        "generation": GENERATED / better(lambda: generate(GENERATED)),
        "first": min(first_token(path, kind, threads) for _ in range(3)),
        "gb_s": model.info.weight_bytes * SHORT / better(lambda: generate(SHORT)) / 1e9,
    }


def first_token(path, kind, threads):
    args = [COMMAND, "run", path, "-p", QUESTION, "-n", "1", "--temp", "0", "--activations", kind]
    return seconds(lambda: subprocess.run([*args, "--threads", str(threads)], check=True, capture_output=True))


def run_llama(path, kind, threads):
    import llama_cpp

    if kind == "plain":
        defaults = llama_cpp.llama_cpp.llama_model_default_params()
        defaults.use_extra_bufts = False
        llama_cpp.llama_cpp.llama_model_default_params = lambda: defaults

    def open_model():
        return llama_cpp.Llama(
            path, n_ctx=PROMPT + 8, n_batch=PROMPT, n_ubatch=PROMPT, n_threads=threads, n_threads_batch=threads,
            verbose=False,
        )  # fmt: skip

    def answer():
        model = open_model()
        model.eval(model.tokenize(QUESTION.encode()))
        model.sample(temp=0.0)

    first = min(seconds(answer) for _ in range(3))
    start = time.perf_counter()
    llama = open_model()
    load = time.perf_counter() - start
    ids = tokens(PROMPT, llama.n_vocab())

    def prompt():
        llama.reset()
        llama.eval(ids)

    def generate(count):
        llama.reset()
        for token in ids[:count]:
            llama.eval([token])

    generate(8)
    return {
        "load": load,
        "prompt": PROMPT / better(prompt),
        "generation": GENERATED / better(lambda: generate(GENERATED)),
        "first": first,
    }


def measure(program, path, kind, threads):
    """In a process of its own."""
    args = [sys.executable, __file__, "--one", program, str(path), kind, str(threads)]
    return json.loads(subprocess.run(args, check=True, capture_output=True, text=True).stdout)


def reading(threads):
    """GB/s that `bittern bench` reads in large pages."""
    args = [COMMAND, "bench", "quantized_matmul", "--filter", "1 row, Q4_1 int8", "--repeat", "3"]
    result = subprocess.run(
        [*args, "--threads", str(threads), "--json", "-"], check=True, capture_output=True, text=True
    )
    row = json.loads(result.stdout)["rows"][0]
    return row["gb_s"] / row["ratio"]


def named(text):
    name, equals, path = text.partition("=")
    return (name, path) if equals else (pathlib.Path(text).stem, text)


def main():
    if sys.argv[1:2] == ["--one"]:
        program, path, kind, threads = sys.argv[2:]
        print(json.dumps({"bittern": run_bittern, "llama.cpp": run_llama}[program](path, kind, int(threads))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default="int8,int16,float", help="activations of bittern")
    parser.add_argument("--file", action="append", default=[], metavar="NAME=PATH", help="for bittern, int8 and int16")
    parser.add_argument("--peer-file", action="append", default=[], metavar="NAME=PATH", help="for llama.cpp")
    parser.add_argument("--plain-peer", action="store_true", help="also llama.cpp without repacking")
    flags = parser.parse_args()
    runs = {f"bittern {kind}": ("bittern", flags.model, kind) for kind in flags.kinds.split(",")}
    for name, path in map(named, flags.file):
        runs |= {f"bittern {kind} {name}": ("bittern", path, kind) for kind in ("int8", "int16")}
    if importlib.util.find_spec("llama_cpp"):
        runs["llama.cpp"] = ("llama.cpp", flags.model, "")
        runs |= {f"llama.cpp {name}": ("llama.cpp", path, "") for name, path in map(named, flags.peer_file)}
        if flags.plain_peer:
            runs["llama.cpp, not repacked"] = ("llama.cpp", flags.model, "plain")
    else:
        print("llama_cpp is not installed: no peer")
    rounds = []
    for _ in range(flags.rounds):
        row = {}
        for name, (program, path, kind) in runs.items():
            before = reading(flags.threads)
            row[name] = measure(program, path, kind, flags.threads)
            row[name]["read"] = (before + reading(flags.threads)) / 2
        rounds.append(row)
    over = lambda name, key: (  # noqa: E731
        "" if "llama.cpp" not in runs
        else f"{statistics.median(r[name][key] / r['llama.cpp'][key] for r in rounds):.2f} x"
    )  # fmt: skip
    print(f"{'program':<28}{'prompt':>9}{'':>9}{'generation':>12}{'':>9}{'of reading':>12}{'load, s':>9}{'first token, s':>16}{'read, GB/s':>12}")
    for name in runs:
        middle = lambda key: statistics.median(r[name][key] for r in rounds)  # noqa: B023, E731
        share = (
            f"{statistics.median(r[name]['gb_s'] / r[name]['read'] for r in rounds):.2f}" if "gb_s" in rounds[0][name] else ""
        )
        print(
            f"{name:<28}{middle('prompt'):>9.0f}{over(name, 'prompt'):>9}{middle('generation'):>12.1f}"
            f"{over(name, 'generation'):>9}{share:>12}{middle('load'):>9.2f}{middle('first'):>16.3f}{middle('read'):>12.1f}"
        )


if __name__ == "__main__":
    main()
