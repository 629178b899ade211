"""bittern calibrate: the file it writes, what quantize makes of it, and what is refused."""

import json
import pathlib
import signal
import subprocess
import time

import numpy as np
import pytest
from arrays import write_gguf
from test_cli import COMMAND, bittern, refused
from test_quantize import write_folder
from tiny_models import config_of, tensors_of, tokenizer_files

gguf = pytest.importorskip("gguf")

TEXT = "the thing in the inn thinks: then the thin ink in it thins. " * 20


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("calibrate")


def model(work, name):
    folder = work / name
    if not folder.exists():
        config = config_of(name)
        write_folder(folder, tensors_of(config), config, tokenizer_files())
    return folder


def entries(path):
    """name -> (sums [matrices, columns], counts [matrices]), and the keys."""
    reader = gguf.GGUFReader(path)
    tensors = {t.name: np.array(t.data) for t in reader.tensors}
    assert all(t.tensor_type == gguf.GGMLQuantizationType.F32 for t in reader.tensors)
    names = [n.removesuffix(".in_sum2") for n in tensors if n.endswith(".in_sum2")]
    assert len(tensors) == 2 * len(names)
    keys = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    return {n: (tensors[f"{n}.in_sum2"], tensors[f"{n}.counts"]) for n in names}, keys


def text_file(work, text=TEXT):
    path = work / "text.txt"
    path.write_text(text)
    return path


def calibrate(source, out, text, *flags):
    result = bittern("calibrate", source, "--data", text, "-o", out, "--ctx", 64, "--force", *flags)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_file_is_as_llama_imatrix_writes_it(work):
    text = text_file(work)
    told = calibrate(model(work, "llama"), work / "i.gguf", text, "--chunks", 3, "--json", work / "i.json")
    assert "over 192 tokens in 3 pieces of 64" in told
    found, keys = entries(work / "i.gguf")
    assert keys == {
        "general.type": "imatrix",
        "imatrix.datasets": [str(text)],
        "imatrix.chunk_count": 3,
        "imatrix.chunk_size": 64,
    }
    config = config_of("llama")
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    parts = {"attn_q": hidden, "attn_k": hidden, "attn_v": hidden, "ffn_gate": hidden, "ffn_up": hidden, "ffn_down": inner}
    parts["attn_output"] = config["num_attention_heads"] * config["head_dim"]
    expected = {f"blk.{i}.{p}.weight": n for i in range(config["num_hidden_layers"]) for p, n in parts.items()}
    if not config.get("tie_word_embeddings"):
        expected["output.weight"] = hidden
    assert {n: sums.shape for n, (sums, _) in found.items()} == {n: (1, w) for n, w in expected.items()}
    assert all(counts.shape == (1, 1) and counts[0, 0] == 192 for _, counts in found.values())
    assert all((sums > 0).all() for sums, _ in found.values())
    for same in ("attn_k", "attn_v"):
        assert (found["blk.0.attn_q.weight"][0] == found[f"blk.0.{same}.weight"][0]).all()
    report = json.loads((work / "i.json").read_text())
    assert report["tokens"] == 192 and len(report["matrices"]) == len(found)


def test_threads_formats_and_activations(work):
    source, text = model(work, "llama"), text_file(work)
    first = calibrate(source, work / "a.gguf", text)
    assert "note" not in first
    for threads in (1, 2, 5):
        calibrate(source, work / "b.gguf", text, "--threads", threads)
        assert (work / "a.gguf").read_bytes() == (work / "b.gguf").read_bytes()
    whole = entries(work / "a.gguf")[0]
    for out, flags in (("m.gguf", ("--format", "gguf")), ("mlx", ("--format", "mlx"))):
        result = bittern("quantize", source, "-o", work / out, "--dtype", "f32", "--force", *flags)
        assert result.returncode == 0, result.stderr
        calibrate(work / out, work / "c.gguf", text)
        other = entries(work / "c.gguf")[0]
        assert whole.keys() == other.keys()
        for name, (sums, counts) in whole.items():
            np.testing.assert_allclose(other[name][0], sums, rtol=1e-4)
            assert (other[name][1] == counts).all()
    # Of a quantised model, int8 activations are not quite those of the model itself.
    result = bittern("quantize", source, "-o", work / "q.gguf", "--type", "Q8_0", "--force")
    assert result.returncode == 0, result.stderr
    calibrate(work / "q.gguf", work / "float.gguf", text)
    calibrate(work / "q.gguf", work / "int8.gguf", text, "--activations", "int8")
    a, b = (entries(work / f"{k}.gguf")[0]["blk.1.ffn_down.weight"][0] for k in ("float", "int8"))
    assert (a != b).any()
    np.testing.assert_allclose(a, b, rtol=0.1)


def test_experts_have_counts_of_their_own(work):
    for name in ("mixtral", "qwen3moe"):
        config = config_of(name)
        told = calibrate(model(work, name), work / "e.gguf", text_file(work), "--chunks", 2)
        found = entries(work / "e.gguf")[0]
        experts = config.get("num_local_experts") or config["num_experts"]
        unseen = 0
        for part in ("gate", "up", "down"):
            sums, counts = found[f"blk.0.ffn_{part}_exps.weight"]
            assert counts.shape == (experts, 1) and counts.sum() == 128 * config["num_experts_per_tok"]
            assert ((sums > 0).any(1) == (counts[:, 0] > 0)).all()
            assert (found["blk.0.ffn_gate_exps.weight"][1] == counts).all()
        for sums, counts in found.values():
            unseen += (counts == 0).sum()
        assert (f"{unseen} matrices of experts saw no token" in told) == (unseen > 0)
        router = found["blk.0.ffn_gate_inp.weight"]
        assert router[1][0, 0] == 128
        # What the experts see is what the router sees, once for each of those used.
        np.testing.assert_allclose(
            found["blk.0.ffn_up_exps.weight"][0].sum(0), config["num_experts_per_tok"] * router[0][0], rtol=1e-5
        )


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "qwen3next", "qwen35moe", "phi3", "gemma3"])
def test_quantize_takes_it(work, name):
    source = model(work, name)
    calibrate(source, work / f"{name}.gguf", text_file(work))
    flags = ("--imatrix", work / f"{name}.gguf", "--force", "--pure")
    for out, more in (("w", ("--bits", 3, "--group-size", 32)), ("w.gguf", ("--type", "Q4_1", "--method", "lsq"))):
        result = bittern("quantize", source, "-o", work / out, *flags, *more)
        assert result.returncode == 0, result.stderr
        assert "weighs the errors of" in result.stdout


def test_columns_keep_their_weights_in_every_order(work):
    """qwen35 has the value heads of ssm_out's columns in another order in GGUF: a weight stays with its
    column from a folder to MLX and GGUF, and from GGUF to MLX."""
    config = config_of("qwen35moe")
    tensors = tensors_of(config)
    heads, dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    assert heads > config["linear_num_key_heads"]
    folder = work / "ordered"
    write_folder(folder, tensors, config, tokenizer_files())
    result = bittern("quantize", folder, "-o", work / "plain.gguf", "--dtype", "f32", "--format", "gguf", "--force")
    assert result.returncode == 0, result.stderr
    # In GGUF's order, value head h of key head k is at h * key heads + k. Only one head counts.
    keys = config["linear_num_key_heads"]
    per_key = heads // keys
    alone = 1  # in Hugging Face's order: the second value head of the first key head
    place = alone % per_key * keys + alone // per_key
    weight = np.full((heads, dim), 1e-6, np.float32)
    weight[place] = 1
    write_gguf(
        work / "one.gguf",
        {"blk.0.ssm_out.weight.in_sum2": weight.reshape(1, -1), "blk.0.ssm_out.weight.counts": np.ones((1, 1), np.float32)},
        describe=lambda writer: writer.add_type("imatrix"),
    )
    name = "model.layers.0.linear_attn.out_proj"
    wanted = tensors[f"{name}.weight"].reshape(-1, heads, dim)

    def errors(numbers):
        return ((numbers.reshape(wanted.shape) - wanted) ** 2).mean((0, 2))

    gain = {}
    for source in (folder, work / "plain.gguf"):
        for format, flags in (("mlx", ("--bits", 2, "--group-size", 64)), ("gguf", ("--type", "Q4_1", "--method", "lsq"))):
            found = []
            for more in ((), ("--imatrix", work / "one.gguf")):
                out = work / ("o.gguf" if format == "gguf" else "o")
                result = bittern("quantize", source, "-o", out, "--format", format, "--pure", "--force", *flags, *more)
                assert result.returncode == 0, result.stderr
                back = bittern("quantize", out, "-o", work / "back", "--dequantize", "f32", "--force")
                assert back.returncode == 0, back.stderr
                found.append(errors(read_folder(work / "back")[f"{name}.weight"]))
            plain, weighed = found
            if (weighed != plain).any():
                gain[source.name, format] = weighed / plain
                assert np.argmin(weighed / plain) == alone, (source, format, weighed / plain)
    assert len(gain) == 4


def read_folder(path):
    from safetensors.numpy import load_file

    return {n: t for file in sorted(path.glob("*.safetensors")) for n, t in load_file(file).items()}


def test_what_is_refused(work):
    source, out = model(work, "llama"), work / "never.gguf"
    text = text_file(work)

    def attempt(*flags, data=text, source=source, out=out):
        result = bittern("calibrate", source, "--data", data, "-o", out, *flags)
        assert not (work / "never.gguf").exists()
        return result

    (work / "empty.txt").write_bytes(b"")
    refused(attempt(data=work / "empty.txt"), 2, "empty.txt: empty, expected text")
    (work / "short.txt").write_text("the")
    refused(attempt(data=work / "short.txt"), 2, "short.txt: ", "tokens, expected at least 512")
    (work / "bytes.txt").write_bytes(b"the \xff thing" * 100)
    refused(attempt("--ctx", 64, data=work / "bytes.txt"), 2, "byte 4 is not UTF-8", "--any-bytes")
    assert attempt("--ctx", 64, "--any-bytes", data=work / "bytes.txt", out=work / "any.gguf").returncode == 0
    refused(attempt(data=work / "missing.txt"), 4, "missing.txt: cannot be opened")
    refused(attempt(data=source), 2, "a folder, expected a file of text")
    refused(attempt(source=work / "nothing"), 4, "nothing")
    refused(attempt("--ctx", 0), 2, "--ctx", "0, expected an integer")
    refused(attempt("--chunks", 0), 2, "0, expected an integer")
    refused(attempt("--activations", "int4"), 2, "int4, expected float, int16 or int8")
    refused(attempt(out=work / "nowhere" / "i.gguf"), 4, "nowhere")
    refused(attempt(out=source / "config.json"), 2, "config.json")
    refused(attempt(out=text), 2, "text.txt")
    refused(bittern("calibrate", source, "-o", out), 2, "--data")
    refused(bittern("calibrate", source, "--data", text), 2, "-o")
    # An output that is there stays unless --force, and then only an importance matrix gives way.
    kept = work / "any.gguf"
    before = kept.read_bytes()
    refused(attempt("--ctx", 64, out=kept), 2, "any.gguf: exists, expected a new name (--force replaces it)")
    assert kept.read_bytes() == before
    assert attempt("--ctx", 64, "--force", out=kept).returncode == 0
    assert kept.read_bytes() != before
    weights = work / "weights.gguf"
    assert bittern("quantize", source, "-o", weights, "--type", "F16").returncode == 0
    other = work / "notes.txt"
    other.write_text("something else")
    for file in (weights, other):
        before = file.read_bytes()
        refused(attempt("--ctx", 64, "--force", out=file), 2, f"{file}: not an importance matrix", "--force replaces only")
        assert file.read_bytes() == before


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_nothing(work, stop):
    folder = work / f"stopped-{stop}"
    folder.mkdir()
    text = folder / "long.txt"
    text.write_text(TEXT * 2000)
    command = [COMMAND, "calibrate", model(work, "llama"), "--data", text, "-o", folder / "i.gguf", "--threads", "1"]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(stop)
    told = process.communicate(timeout=120)[1].decode()
    assert process.returncode == 128 + stop and told == f"bittern: stopped by {stop.name}\n"
    assert [p.name for p in pathlib.Path(folder).iterdir()] == ["long.txt"]
