"""bittern quantize --method gptq: errors under H against a plain numpy version (LAPACK's Cholesky and
solve), the same bytes however it runs, runs that are killed, and what is refused."""

import json
import os
import random
import signal
import subprocess
import time

import numpy as np
import pytest
from small_models import BYTES, put_model, read
from test_cli import COMMAND, bittern, refused
from test_quantize import write_folder
from tiny_models import config_of, tensors_of, tokenizer_files

TEXT = bytes(random.Random(1).choices(BYTES[:72], k=2000)).decode()
OF_TEXT = ("--pieces", 20, "--context", 64)
FLAGS = ("--group-size", 32, "--override", "embed=keep")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = tmp_path_factory.mktemp("gptq")
    put_model(work / "llama")
    (work / "text.txt").write_text(TEXT)
    return work


def gptq(work, out, *flags, bits=3, of_text=OF_TEXT, env=None):
    result = bittern("quantize", work / "llama", "-o", work / out, "--bits", bits, "--method", "gptq",
                     "--data", work / "text.txt", *FLAGS, *of_text, *flags, env=env)  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def f32(tensor):
    dtype, shape, data = tensor
    assert dtype == "BF16"
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)


def decoded(folder, name, bits, group):
    """codes * scales + biases of an MLX folder, in f64."""
    tensors, _ = read(folder / "model.safetensors")
    _, shape, data = tensors[f"{name}.weight"]
    words = np.frombuffer(data, np.uint32).reshape(shape)
    flat = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").reshape(shape[0], -1, bits)
    codes = (flat * (1 << np.arange(bits))).sum(axis=2)
    scales, biases = (np.repeat(f32(tensors[f"{name}.{part}"]), group, axis=1).astype(float) for part in ("scales", "biases"))
    return codes * scales + biases


def inputs_of_the_first_layer(model, pieces, context):
    """Of q, k and v: the normed embeddings of the tokens that are read."""
    tensors, _ = read(model / "model.safetensors")
    ids = np.array([3 + BYTES.index(b) for b in TEXT.encode()])
    every = len(ids) // context
    ids = np.concatenate([ids[every * i // pieces * context :][:context] for i in range(pieces)])
    x = f32(tensors["model.embed_tokens.weight"])[ids].astype(float)
    x /= np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6)
    return x * f32(tensors["model.layers.0.input_layernorm.weight"])


def plain_gptq(w, h, bits, group):
    """The same stages from minmax's grids, one row at a time, in f64."""
    n, top = len(h), 2**bits - 1
    order = np.argsort(-np.diag(h), kind="stable")
    upper = np.linalg.cholesky(np.linalg.inv(h[np.ix_(order, order)])).T
    basis = np.zeros((n, 2 * n // group))
    errors = []
    for row in w:
        s = np.array([(g.max() - g.min()) / top or 1 for g in row.reshape(-1, group)])
        b = np.array([g.min() for g in row.reshape(-1, group)])
        codes, left = np.zeros(n), row[order].copy()
        for j, c in enumerate(order):
            codes[c] = np.clip(np.rint((left[j] - b[c // group]) / s[c // group]), 0, top)
            e = (left[j] - (codes[c] * s[c // group] + b[c // group])) / upper[j, j]
            left[j + 1 :] -= e * upper[j, j + 1 :]
        for _ in range(2):
            for g in range(n // group):
                basis[g * group : (g + 1) * group, 2 * g] = codes[g * group : (g + 1) * group]
                basis[g * group : (g + 1) * group, 2 * g + 1] = 1
            a = basis.T @ h @ basis
            s, b = np.linalg.solve(a + 1e-4 * np.diag(np.diag(a)), basis.T @ h @ row).reshape(-1, 2).T
            gradient = (row - codes * np.repeat(s, group) - np.repeat(b, group)) @ h
            for j in range(n):
                scale = s[j // group]
                to = np.clip(np.rint(codes[j] + gradient[j] / h[j, j] / scale), 0, top)
                gradient -= (to - codes[j]) * scale * h[j]
                codes[j] = to
        e = row - codes * np.repeat(s, group) - np.repeat(b, group)
        errors.append(e @ h @ e)
    return np.array(errors)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_errors_are_those_of_a_plain_version(work, bits):
    x = inputs_of_the_first_layer(work / "llama", 20, 64)
    h = x.T @ x
    h = h / np.diag(h).mean() + 0.01 * np.eye(len(h))
    gptq(work, f"{bits}bit", bits=bits)
    lsq = bittern("quantize", work / "llama", "-o", work / f"lsq{bits}", "--bits", bits, *FLAGS)
    assert lsq.returncode == 0, lsq.stderr
    source, _ = read(work / "llama" / "model.safetensors")
    for part in ("q", "k", "v"):
        name = f"model.layers.0.self_attn.{part}_proj"
        w = f32(source[f"{name}.weight"]).astype(float)

        def error(folder):
            e = w - decoded(work / folder, name, bits, 32)
            return ((e @ h) * e).sum(axis=1)

        ours, plain = error(f"{bits}bit"), plain_gptq(w, h, bits, 32)
        # Scales are bf16 here and f64 there, which matters at 8 bits alone.
        assert ours.sum() < (1.05 if bits < 8 else 3) * plain.sum()
        assert ours.sum() < 0.8 * error(f"lsq{bits}").sum()
        assert (ours <= error(f"lsq{bits}") * 1.0001).mean() > 0.95


def test_the_bytes_depend_on_nothing_else(work):
    gptq(work, "first")
    first = files(work / "first")
    for i, (flags, env) in enumerate([
        (("--threads", 1), {}), (("--threads", 2), {}), (("--threads", 3), {"BITTERN_ISA": "AVX2"}),
    ]):  # fmt: skip
        gptq(work, f"again{i}", *flags, env={**os.environ, **env})
        assert files(work / f"again{i}") == first
    gptq(work, "aliases", of_text=("--chunks", 20, "--ctx", 64))
    assert files(work / "aliases") == first


def test_blocks_of_columns_may_have_another_order(work):
    """llama.cpp has the value heads of qwen3_5 in another order, so that of a matrix' columns differs, too."""
    config = config_of("qwen35")
    write_folder(work / "hf", tensors_of(config), config, tokenizer_files())
    (work / "words.txt").write_text("the thing in the inn thinks: then the thin ink in it thins. " * 40)
    assert bittern("quantize", work / "hf", "-o", work / "f32.gguf", "--dtype", "f32").returncode == 0
    flags = ("--method", "gptq", "--data", work / "words.txt", "--context", 32, "--pieces", 8)
    for kind, how in (("mlx", ("--bits", 4, "--group-size", 32)), ("gguf", ("--type", "Q4_1"))):
        for source in ("hf", "f32.gguf"):
            result = bittern("quantize", work / source, "-o", work / f"of-{source}.{kind}", *how, "--format", kind, *flags)
            assert result.returncode == 0, result.stderr
        result = bittern("inspect", work / f"of-hf.{kind}", "--compare", work / f"of-f32.gguf.{kind}", "--json", work / "c.json", "--force")
        assert result.returncode == 0, result.stderr
        tensors = json.loads((work / "c.json").read_text())["comparison"]["tensors"]
        coded = [t for t in tensors if "out_proj" in t["name"] or "ssm_out" in t["name"]]
        assert coded and all("4 bit" in t["storage"] or t["storage"] == "Q4_1" for t in coded)
        # A few codes differ, where sums of inputs in another order do.
        assert max(t["relative_error"] for t in tensors) < 0.02


def test_the_report_tells_what_was_not_coded(work):
    told = bittern("quantize", work / "llama", "--bits", 3, "--method", "gptq", "--data", work / "text.txt",
                   "--context", 64, "--dry-run", "--group-size", 32, "--json", work / "r.json")  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert "not by --method gptq: it is looked up, not multiplied: model.embed_tokens.weight" in told.stdout
    tensors = json.loads((work / "r.json").read_text())["tensors"]
    assert [t["name"] for t in tensors if "gptq" in t["note"]] == ["model.embed_tokens.weight"]


def test_a_run_that_was_killed_goes_on(work):
    gptq(work, "whole")
    args = [COMMAND, "quantize", work / "llama", "-o", work / "killed", "--bits", 3, "--method", "gptq",
            "--data", work / "text.txt", *FLAGS, *OF_TEXT, "--quiet"]  # fmt: skip
    args = [str(a) for a in args]
    journal = work / "killed.partial.journal"
    caught = 0
    for least in (1, 8, 20):
        run = subprocess.Popen(args + ["--resume"] * journal.exists())
        while run.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\npiece ") < least):
            time.sleep(0.0002)
        run.send_signal(signal.SIGKILL)
        caught += run.wait() == -signal.SIGKILL
        if (work / "killed").exists():
            break
    if not (work / "killed").exists():
        assert caught > 0
        assert subprocess.run(args + ["--resume"]).returncode == 0
    assert files(work / "killed") == files(work / "whole")


def test_what_is_refused(work):
    def run(*flags, model="llama"):
        return bittern("quantize", work / model, "-o", work / "no", *flags)

    (work / "short.txt").write_text("abc")
    put_model(work / "moved", model_type="nobodys")
    gptq_flags = ("--bits", 4, "--method", "gptq")
    data = ("--data", work / "text.txt", "--context", 64)
    refused(run(*gptq_flags), 2, "--method gptq: no text given, expected --data")
    refused(run(*gptq_flags, "--data", work / "none.txt"), 4, "none.txt: cannot be opened")
    refused(run(*gptq_flags, *data, "--context", 1), 2, "--context: 1, expected an integer 2..")
    refused(run(*gptq_flags, "--data", work / "short.txt"), 2, "short.txt: 3 tokens", "--context makes it shorter")
    refused(run("--bits", 4, *data), 2, "--data: has no effect without --method gptq")
    refused(run("--type", "Q6_K", "--override", ".=keep", "--method", "gptq", *data), 2, "--method gptq has no effect", "Q5_K")
    refused(run(*gptq_flags, *data, model="moved"), 3, "nobodys")
    refused(run(*gptq_flags, *data, model="llama/model.safetensors"), 2, "model.safetensors: has no tokeniser, expected the folder")
    refused(run(*gptq_flags, *data, "--imatrix", "x"), 2, "--imatrix: --method gptq measures the inputs itself")
    assert not (work / "no").exists() and not (work / "no.partial").exists()
