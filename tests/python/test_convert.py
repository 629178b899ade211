"""quantize_model, inspect_model and compare_models: the command's bytes and words, progress,
cancellation, and what they are given by strangers. No timing is judged."""

import dataclasses
import inspect
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import bittern
from test_cli import COMMAND
from test_cli import bittern as command
from test_quantize import write_folder
from test_result_hashes import WIDE, hashes
from tiny_models import Numbers, tensors_of, tokenizer_files

pytestmark = pytest.mark.peer("gguf", "safetensors")
needs_command = pytest.mark.skipif(COMMAND is None, reason="the command is not built (build/release/bittern)")
PACKAGE = str(pathlib.Path(bittern.__file__).parents[1])
POLICY = {"bits": 3, "rules": [{"match": "up_proj", "bits": 8, "group_size": 32}, {"match": "embed", "keep": True}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "wide"
    return write_folder(folder, tensors_of(WIDE, 1, np.float16), WIDE, tokenizer_files())


@pytest.fixture(scope="module")
def four_bits(model):
    out = model.parent / "four"
    bittern.quantize_model(model, out, bits=4)
    return out


# ---- the same as the command ----

# Keywords, and the command's flags.
CONVERSIONS = {
    "bits": ({"bits": 4}, ["--bits", 4]),
    "group": ({"bits": 3, "group_size": 32, "method": "mlx"}, ["--bits", 3, "--group-size", 32, "--method", "mlx"]),
    "scales": ({"bits": 5, "scale_dtype": np.float32}, ["--bits", 5, "--scale-dtype", "f32"]),
    "integer": ({"bits": 3, "zero_points": "integer"}, ["--bits", 3, "--zero-points", "integer"]),
    "packed": ({"bits": 4, "group_size": 32, "format": "compressed-tensors"}, ["--bits", 4, "--group-size", 32, "--format", "compressed-tensors"]),
    "quantize": ({"quantize": True}, ["-q"]),
    "mix.gguf": ({"type": "Q4_K_M"}, ["--type", "Q4_K_M"]),
    "types.gguf": (
        {"type": "Q8_0", "output_tensor_type": "Q4_0", "token_embedding_type": "F16"},
        ["--type", "Q8_0", "--output-tensor-type", "Q4_0", "--token-embedding-type", "F16"],
    ),
    "split.gguf": ({"bits": 8, "split_max_tensors": 3}, ["--bits", 8, "--split-max-tensors", 3]),
    "head": ({"bits": 4, "leave_output_tensor": True}, ["--bits", 4, "--leave-output-tensor"]),
    "target": ({"target_bpw": 5.5}, ["--target-bpw", 5.5]),
    "rules": (
        {"bits": 4, "rules": [{"match": "q_proj", "bits": 8, "group_size": 32}, {"match": "embed", "keep": True}]},
        ["--bits", 4, "--override", "q_proj=8:32", "--override", "embed=keep"],
    ),
    "rule.gguf": ({"bits": 4, "rules": [{"match": "down", "type": "Q6_K"}]}, ["--bits", 4, "--override", "down=Q6_K"]),
    "policy": ({"policy": "policy.json"}, ["--policy", "policy.json"]),
    "plain": ({"dequantize": "bf16"}, ["--dequantize", "bf16"]),
    "plain-mlx": ({"dequantize": "float32", "format": "mlx"}, ["--dequantize", "f32", "--format", "mlx"]),
    "cast": ({"dtype": "bfloat16"}, ["--dtype", "bf16"]),
    "pure.gguf": ({"type": "Q5_K_S", "pure": True}, ["--type", "Q5_K_S", "--pure"]),
    "threads": ({"bits": 6, "threads": 3}, ["--bits", 6, "--threads", 1]),
}


@needs_command
@pytest.mark.parametrize("name", CONVERSIONS)
def test_the_bytes_and_the_report_of_the_command(model, tmp_path, monkeypatch, name):
    keywords, flags = CONVERSIONS[name]
    for folder in ("ours", "theirs"):  # a GGUF file holds names: both runs see the same ones
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "policy.json").write_text(json.dumps(POLICY))
        (tmp_path / folder / "wide").symlink_to(model)
    monkeypatch.chdir(tmp_path / "ours")
    report = bittern.quantize_model("wide", name, **keywords)
    monkeypatch.chdir(tmp_path / "theirs")
    result = command("quantize", "wide", "-o", name, *flags, "--json", "report.json")
    assert result.returncode == 0, result
    assert hashes(tmp_path / "ours" / name) == hashes(tmp_path / "theirs" / name)
    theirs = json.loads(pathlib.Path("report.json").read_text())
    for key in ("model", "output", "weights", "bytes", "bits_per_weight", "resumed", "saturated"):
        assert getattr(report, key) == theirs[key], key
    assert len(report.notes) == len(theirs["notes"])
    ours = [(t.name, list(t.shape), t.sources, t.from_storage, t.to_storage, t.way, t.bytes) for t in report.tensors]
    keys = ("name", "shape", "sources", "from", "to", "way", "bytes")
    assert ours == [tuple(t[key] for key in keys) for t in theirs["tensors"]]


@needs_command
def test_transcoding_and_lossy_as_the_command(four_bits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, keywords, flags in (
        ("a", {"transcode": True}, ["--transcode"]),
        ("b", {"transcode": True, "scale_dtype": "bf16", "lossy": True}, ["--transcode", "--scale-dtype", "bf16", "--lossy"]),
        ("c", {"bits": 2, "allow_requantize": True}, ["--bits", 2, "--allow-requantize"]),
        ("d", {"dequantize": "f32"}, ["--dequantize", "f32"]),
    ):
        report = bittern.quantize_model(four_bits, name, **keywords)
        assert command("quantize", four_bits, "-o", f"{name}2", *flags).returncode == 0
        assert hashes(tmp_path / name) == hashes(tmp_path / f"{name}2")
        assert (report.scale_change is not None) == (name == "b")


@needs_command
def test_inspection_is_the_commands(model, four_bits, tmp_path):
    for path in (model, four_bits, model / "model.safetensors"):
        assert command("inspect", path, "--json", tmp_path / "r.json", "--force").returncode == 0
        theirs = json.loads((tmp_path / "r.json").read_text())["model"]
        ours = bittern.inspect_model(path)
        for key, value in theirs.items():
            if key == "tensors":
                found = [(t.name, list(t.shape), t.storage, t.bytes, t.bits_per_weight) for t in ours.tensors]
                keys = ("name", "shape", "storage", "bytes", "bits_per_weight")
                assert found == [tuple(t[k] for k in keys) for t in value]
            elif key == "storages":
                assert [dataclasses.asdict(s) for s in ours.storages] == value
            else:
                assert getattr(ours, {"class": "model_class"}.get(key, key)) == value, key


@needs_command
def test_comparison_is_the_commands(model, four_bits, tmp_path):
    report = tmp_path / "r.json"
    assert command("inspect", model, "--compare", four_bits, "--json", report).returncode == 0
    theirs = json.loads(report.read_text())["comparison"]
    ours = bittern.compare_models(model, four_bits)
    for key in ("relative_error", "max_abs_error", "equal", "only_in_model", "only_in_other", "not_finite_tensors"):
        assert getattr(ours, key) == theirs[key], key
    for key in ("tensors", "worst_groups"):
        found = [dataclasses.asdict(one) for one in getattr(ours, key)]
        assert [{k: list(v) if k == "shape" else v for k, v in one.items()} for one in found] == theirs[key]
    assert ours.model.path == str(model) and ours.other.kind == "mlx"
    assert len(bittern.compare_models(model, four_bits, worst_groups=3, threads=1).worst_groups) == 3


def test_every_option_of_the_command_is_a_keyword():
    parameters = inspect.signature(bittern.quantize_model).parameters
    if COMMAND:
        text = command("quantize", "--help").stdout
        for name in parameters:
            if name in ("source", "out", "progress", "rules"):
                continue
            assert f"--{name.replace('_', '-')}" in text, name
    header = (pathlib.Path(__file__).parents[2] / "include/bittern/convert.h").read_text()
    fields = header[header.index("struct QuantizeOptions") : header.index("struct QuantizedTensor")]
    for name in parameters:
        assert name in ("source", "out") or name in fields, name


# ---- progress and cancellation ----


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("options", [{"bits": 4}, {"target_bpw": 6}, {"dequantize": "f32"}])
def test_progress_never_falls_and_is_complete(model, tmp_path, options, threads):
    caller, seen = threading.get_ident(), []

    def progress(state):
        assert threading.get_ident() == caller
        seen.append(state)

    report = bittern.quantize_model(model, tmp_path / "out", threads=threads, progress=progress, **options)
    phases = list(dict.fromkeys(state.doing for state in seen))
    assert phases == (["planning", "measuring", "writing"] if "target_bpw" in options else ["planning", "writing"])
    for phase in phases:
        states = [state for state in seen if state.doing == phase]
        assert [s.done for s in states] == sorted(s.done for s in states)
        assert states[-1].done == states[-1].total and states[-1].fraction == 1
        assert len({s.total for s in states}) == 1
    doing, tensor, done, total = seen[-1]
    assert total == report.weights and tensor in {t.name for t in report.tensors}


@pytest.mark.parametrize("threads", [1, 3])
def test_what_was_cancelled_resumes_to_the_same_bytes(model, tmp_path, threads):
    whole = bittern.quantize_model(model, tmp_path / "whole", bits=4)
    calls = []
    bittern.quantize_model(model, tmp_path / "count", bits=4, threads=threads, progress=calls.append)
    out = tmp_path / "out"
    resumed = 0
    for stop in range(0, len(calls), 5):
        count = iter(range(len(calls) + 100))
        state = []

        def progress(now):
            state.append(now.doing)
            return next(count) != stop

        try:
            bittern.quantize_model(model, out, bits=4, threads=threads, progress=progress)
        except bittern.Cancelled as error:
            assert "cancelled" in str(error)
            writes = state[-1] == "writing"
            assert (tmp_path / "out.partial").exists() == writes
            assert (tmp_path / "out.partial.journal").exists() == writes and not out.exists()
            if writes:
                with pytest.raises(ValueError, match=r"left by a run that was stopped.*\(resume goes on with it, force"):
                    bittern.quantize_model(model, out, bits=4)
            report = bittern.quantize_model(model, out, bits=4, resume=True)
            assert report.bytes == whole.bytes
            resumed += report.resumed
        assert hashes(out) == hashes(tmp_path / "whole")
        for file in out.iterdir():
            file.unlink()
        out.rmdir()
    assert resumed > 0


def test_what_a_callback_raises_comes_out(model, tmp_path):
    class Stop(BaseException):
        pass

    for error in (RuntimeError("no more"), KeyboardInterrupt(), Stop(), StopIteration(3), SystemExit(4)):

        def progress(state):
            if state.doing == "writing":
                raise error

        with pytest.raises(type(error)) as raised:
            bittern.quantize_model(model, tmp_path / "out", bits=4, force=True, progress=progress)
        assert raised.value is error
        assert (tmp_path / "out.partial").exists() and not (tmp_path / "out").exists()
    assert bittern.quantize_model(model, tmp_path / "out", bits=4, resume=True).resumed >= 0
    with pytest.raises(ZeroDivisionError):
        bittern.compare_models(model, tmp_path / "out", progress=lambda state: 1 / 0)
    with pytest.raises(bittern.Cancelled):
        bittern.compare_models(model, tmp_path / "out", progress=lambda state: False)


@pytest.mark.parametrize("result", [None, True, 0, "", [], np.True_])
def test_only_false_cancels(model, tmp_path, result):
    bittern.quantize_model(model, tmp_path / "out", bits=4, progress=lambda state: result)
    with pytest.raises(bittern.Cancelled):
        bittern.quantize_model(model, tmp_path / "other", bits=4, progress=lambda state: np.False_)


def test_a_callback_may_call_bittern(model, four_bits, tmp_path):
    found = []

    def progress(state):
        if not found:
            found.append(bittern.inspect_model(four_bits).bits_per_weight)
            found.append(bittern.compare_models(model, four_bits).equal)
            bittern.quantize_model(model, tmp_path / "inner", bits=4)

    bittern.quantize_model(model, tmp_path / "out", bits=4, progress=progress)
    assert len(found) == 2 and hashes(tmp_path / "inner") == hashes(tmp_path / "out") == hashes(four_bits)


INTERRUPTED = """
import os, signal, sys, threading
sys.path.insert(0, {package!r})
import bittern
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
try:
    {setup}
    bittern.quantize_model({source!r}, {out!r}, target_bpw=5, threads=2{more})
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("with_progress", [False, True])
def test_ctrl_c_ends_it(tmp_path, with_progress):
    """In a process of its own, where the signal comes while it works; with and without a callback."""
    numbers = Numbers(3)
    tensors = {f"{i}.weight": numbers.standard_normal((512, 1024)).astype(np.float32) for i in range(24)}
    source = write_folder(tmp_path / "large", tensors)
    setup = "threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()"
    more = ", progress=lambda state: None" if with_progress else ""
    script = INTERRUPTED.format(package=PACKAGE, setup=setup, source=str(source), out=str(tmp_path / "out"), more=more)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert result.stdout == "interrupted\n", result
    assert not (tmp_path / "out").exists() or (tmp_path / "out" / "config.json").exists()


def test_the_gil_is_free_meanwhile(model, tmp_path):
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.wait(0.0005):
            ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        before = len(ticks)
        while len(ticks) < before + 3:
            bittern.quantize_model(model, tmp_path / "out", target_bpw=5, force=True)
    finally:
        stop.set()
        thread.join()


def test_from_several_threads_at_once(model, four_bits, tmp_path):
    errors = []

    def work(i):
        try:
            bittern.quantize_model(model, tmp_path / f"out{i}", bits=4, threads=1 + i % 3, progress=lambda state: None)
            assert hashes(tmp_path / f"out{i}") == hashes(four_bits)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# ---- what strangers give ----


@pytest.mark.parametrize("name", ["with space", "über-模型-🐦", "per%cent {bits} @{force}", "-o", "new\nline", b"\xff\xfe"])
@pytest.mark.parametrize("kind", [str, bytes, pathlib.Path])
def test_any_path(model, tmp_path, name, kind):
    raw = os.fsencode(name)
    folder = os.fsencode(tmp_path) + b"/" + raw
    os.makedirs(folder)
    source, out = folder + b"/model", folder + b"/out"
    os.symlink(model, source)

    def as_kind(path):
        return path if kind is bytes else kind(os.fsdecode(path))

    report = bittern.quantize_model(as_kind(source), as_kind(out), bits=4)
    assert os.fsencode(report.output) == out and os.fsencode(report.model) == source
    assert os.fsencode(bittern.inspect_model(as_kind(out)).path) == out
    assert bittern.compare_models(as_kind(source), as_kind(out)).equal > 0
    with pytest.raises(ValueError, match="exists, expected a new name") as raised:
        bittern.quantize_model(as_kind(source), as_kind(out), bits=4)
    if "force" not in os.fsdecode(raw) and raw != b"\xff\xfe":
        assert os.fsdecode(out) in str(raised.value)


WRONG = {
    "bits": [("4", "bits: '4', expected an integer"), (True, "bits: True, expected an integer"),
             (4.0, "bits: 4.0, expected an integer"), (7, "bits: 7, expected 2, 3, 4, 5, 6 or 8"),
             (0, "bits: 0, expected 2, 3, 4, 5, 6 or 8"), (-1, "bits: -1, expected 2"),
             (2**70, f"bits: {2**70}, expected an integer"), ([4], "bits: \\[4\\], expected an integer")],
    "group_size": [("64", "group_size: '64', expected an integer"), (48, "group_size: 48, expected 32, 64 or 128")],
    "method": [(3, "method: 3, expected a string"), ("", "method: empty, expected minmax, mlx, lsq or gptq"),
               ("LSQ ", "method: LSQ , expected minmax"), (b"lsq", "method: b'lsq', expected a string")],
    "data": [(3, "data: 3, expected a path"), ("text.txt", "data: has no effect without method gptq")],
    "pieces": [("3", "pieces: '3', expected an integer"), (3, "pieces: has no effect without method gptq"),
               (2**70, f"pieces: {2**70}, expected an integer")],
    "context": [(True, "context: True, expected an integer"), (64, "context: has no effect without method gptq")],
    "format": [("GGUF", "format: GGUF, expected mlx, gguf, safetensors or compressed-tensors"), (None.__class__, "format: <class")],
    "zero_points": [("whole", "zero_points: whole, expected real or integer"), (8, "zero_points: 8, expected a string")],
    "type": [("Q4", "type: Q4: no type of GGUF"), (4, "type: 4, expected a string"), ("\ud800", "type: .*no type of GGUF")],
    "output_tensor_type": [("x", "output_tensor_type: x: no type"), (1, "output_tensor_type: 1, expected a string")],
    "token_embedding_type": [("x", "token_embedding_type: x: no type")],
    "leave_output_tensor": [("yes", "leave_output_tensor: 'yes', expected True or False"), (1, "expected True or False")],
    "target_bpw": [("5", "target_bpw: '5', expected a number"), (True, "target_bpw: True, expected a number"),
                   (0, "target_bpw: 0, expected 1 to 32"), (float("nan"), "target_bpw: nan"),
                   (33, "target_bpw: 33"), (5j, "target_bpw: 5j, expected a number")],
    "rules": [("lm_head=8", "rules: 'lm_head=8', expected a list of rules"), ({"match": "a"}, "expected a list of rules"),
              ([3], "rules: 3, expected a dictionary with 'match'"), ([{"bits": 4}], "expected a dictionary with 'match'"),
              ([{"match": "a", "bit": 4}], "rules: 'a': 'bit', expected match, bits, group_size, type or keep"),
              ([{"match": "a", "bits": "4"}], "rules: 'a': bits: '4', expected an integer"),
              ([{"match": 3, "keep": True}], "rules: 3: match: 3, expected a string"),
              ([{"match": "a"}], "rules: a: nothing asked for"), ([{"match": "(", "keep": True}], "rules: .*RE2 does not accept this pattern")],
    "policy": [(3, "policy: 3, expected a path"), ("", "policy: empty, expected the path of a file"),
               ("a\0b", "policy: .*null character")],
    "imatrix": [(3.5, "imatrix: 3.5, expected a path"), ("", "imatrix: empty, expected the path")],
    "fisher": [("no", "fisher: 'no', expected True or False"), (1, "fisher: 1, expected True or False")],
    "transcode": [("no", "transcode: 'no', expected True or False"), (True, "bits and transcode exclude each other")],
    "lossy": [(2, "lossy: 2, expected True or False")],
    "dequantize": [(True, "dequantize: True, expected f32, f16 or bf16"), ("f8", "dequantize: f8, expected f32"),
                   (np.float64, "dequantize: .*float64.*, expected f32, f16 or bf16")],
    "dtype": [(16, "dtype: 16, expected f32, f16 or bf16"), ("float64", "dtype: float64, expected f32")],
    "scale_dtype": [(np.int8, "scale_dtype: .*int8.*, expected f32"), ("f64", "scale_dtype: f64, expected f32")],
    "pure": [(0, "pure: 0, expected True or False")],
    "allow_requantize": [("x", "allow_requantize: 'x', expected True or False")],
    "quantize": [(4, "quantize: 4, expected True or False")],
    "split_max_size": [(500, "split_max_size: 500, expected a string"), ("500", "split_max_size: 500, expected 1 to 1000000 with")],
    "split_max_tensors": [(0, "split_max_tensors: 0, expected an integer 1..1048576"), ("2", "expected an integer")],
    "force": [("x", "force: 'x', expected True or False")],
    "resume": [(1, "resume: 1, expected True or False")],
    "dry_run": [("no", "dry_run: 'no', expected True or False")],
    "threads": [(0, "threads: 0, expected an integer 1.."), (True, "threads: True, expected an integer"),
                (10**6, "threads: 1000000, expected an integer 1.."), ("2", "threads: '2', expected an integer")],
    "progress": [(3, "progress: 3, expected a function")],
    "out": [(3, "out: 3, expected a path"), ("", "out: not given, expected the name of the output"), ("a\0", "null character")],
    "source": [(3, "source: 3, expected a path"), (None, "source: None, expected a path"), ("", "source: empty, expected a model")],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_named(model, tmp_path, name):
    for value, message in WRONG[name]:
        keywords = {"source": model, "out": tmp_path / "out", "bits": 4, name: value}
        with pytest.raises((ValueError, NotImplementedError), match=message):
            bittern.quantize_model(keywords.pop("source"), keywords.pop("out"), **keywords)
        assert not list(tmp_path.iterdir())


def test_wrong_values_are_all_of_them():
    assert set(WRONG) == set(inspect.signature(bittern.quantize_model).parameters)


def test_unknown_keywords_are_told_with_what_was_meant(model, tmp_path):
    for wrong, meant in (("bit", "bits"), ("groupsize", "group_size"), ("targetbpw", "target_bpw"), ("dryrun", "dry_run"),
                         ("Bits", "bits"), ("overwrite", None)):  # fmt: skip
        with pytest.raises(TypeError, match=f"quantize_model: .*'{wrong}'" + (f"; did you mean '{meant}'" if meant else "; expected one of source out bits")):
            bittern.quantize_model(model, tmp_path / "out", **{wrong: 4})
    with pytest.raises(TypeError, match="quantize_model: missing a required argument: 'source'"):
        bittern.quantize_model()
    with pytest.raises(TypeError, match="quantize_model: too many positional arguments"):
        bittern.quantize_model(model, tmp_path / "out", 4)
    with pytest.raises(TypeError, match="compare_models: .*'thread'; did you mean 'threads'"):
        bittern.compare_models(model, model, thread=1)


def test_files_that_are_not_there(model, tmp_path):
    missing = tmp_path / "no such model"
    for call in (
        lambda: bittern.quantize_model(missing, tmp_path / "out", bits=4),
        lambda: bittern.inspect_model(missing),
        lambda: bittern.compare_models(model, missing),
        lambda: bittern.quantize_model(model, tmp_path / "out", bits=4, imatrix=missing),
        lambda: bittern.quantize_model(model, tmp_path / "out", policy=missing),
    ):
        with pytest.raises(FileNotFoundError, match="no such model"):
            call()
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(ValueError, match="text.gguf"):
        bittern.inspect_model(tmp_path / "text.gguf")
    with pytest.raises(OSError):
        bittern.quantize_model(model, tmp_path / "no folder" / "out", bits=4)
    for wrong in (3, None, ["a"], 1.5):
        with pytest.raises(ValueError, match="path: .*, expected a path"):
            bittern.inspect_model(wrong)
    assert sorted(os.listdir(tmp_path)) == ["text.gguf"]


def test_messages_name_keywords_and_no_flags(model, four_bits, tmp_path):
    """What the command says of its flags, the library says of its keywords."""
    cases = [
        (model, {"bits": 4, "dequantize": "f32"}, "bits and dequantize exclude each other, expected one"),
        (model, {"transcode": True, "imatrix": "x"}, "imatrix: has no effect with transcode; leave one of them out"),
        (four_bits, {"bits": 3}, "transcode keeps every number, dequantize writes them plain, allow_requantize quantises"),
        (four_bits, {"dtype": "f32"}, "dtype converts plain numbers, dequantize makes numbers plain"),
        (model, {"bits": 4, "format": "mlx", "split_max_size": "1G"}, "split_max_size: the format is mlx, expected format gguf"),
    ]
    for source, keywords, message in cases:
        with pytest.raises(ValueError) as raised:
            bittern.quantize_model(source, tmp_path / "out", **keywords)
        assert message in str(raised.value)
        assert "--" not in str(raised.value) and "@{" not in str(raised.value)
    report = bittern.quantize_model(model, dry_run=True, bits=4, pure=True)
    assert any(note.startswith("pure has no effect") for note in report.notes)


def test_infinite_weights_name_the_keywords(tmp_path):
    big = np.full((4, 256), 1e30, np.float32)
    source = write_folder(tmp_path / "big", {"a.weight": big})
    with pytest.raises(NotImplementedError, match="expected scale_dtype f32, or lossy, which takes"):
        bittern.quantize_model(source, tmp_path / "out", bits=4, scale_dtype="f16")
    assert bittern.quantize_model(source, tmp_path / "out", bits=4, scale_dtype="f16", lossy=True).saturated == 1024


# ---- results ----


def test_results_are_small_and_readable(model, four_bits, tmp_path):
    report = bittern.quantize_model(model, tmp_path / "out", bits=4)
    found = bittern.inspect_model(tmp_path / "out")
    comparison = bittern.compare_models(model, tmp_path / "out")
    for result in (report, found, comparison):
        assert len(repr(result)) < 400 and "\n" not in repr(result), repr(result)
        assert 2 < len(str(result).splitlines()) < 30
        assert pickle.loads(pickle.dumps(result)) == result
        json.dumps(dataclasses.asdict(result))
        with pytest.raises(dataclasses.FrozenInstanceError):
            result.tensors = []
    assert "bits per weight" in repr(report) and "mlx" in repr(report)
    assert "MLX folder, llama" in repr(found)
    assert found.quantization["bits"] == 4 and found.quantization["group_size"] == 64
    assert "4 bit, group 64, F16" in str(found) and "4 bit, group 64, F16" in repr(found.tensors[0])
    assert "F16 -> 4 bit, group 64, F16" in repr(report.tensors[0])
    assert "relative error" in repr(comparison.tensors[0])
    dry = bittern.quantize_model(model, bits=4, dry_run=True)
    assert dry.dry_run and "would be" in repr(dry) and dry.output == "" and dry.outputs == []
    assert dry.tensors == report.tensors and dry.bits_per_weight == report.bits_per_weight


def test_help_names_every_keyword():
    for function in (bittern.quantize_model, bittern.inspect_model, bittern.compare_models):
        for name in inspect.signature(function).parameters:
            assert name in function.__doc__, name
        assert function.__name__ in bittern.__all__


def test_numpy_numbers_are_numbers(model, four_bits, tmp_path):
    bittern.quantize_model(model, tmp_path / "out", bits=np.int64(4), group_size=np.uint8(64), threads=np.int32(1),
                           force=np.bool_(False))  # fmt: skip
    assert hashes(tmp_path / "out") == hashes(four_bits)
    bittern.quantize_model(model, tmp_path / "target", target_bpw=np.float32(5.5))


@pytest.mark.peer("torch")
def test_torchs_modes_and_dtypes_change_no_byte(tmp_path):
    import torch

    numbers = Numbers(5)
    tiny = (numbers.standard_normal((64, 256)) * 2.0**-140).astype(np.float32)  # subnormal
    source = write_folder(tmp_path / "tiny", {"a.weight": tiny, "b.weight": tiny[:8] * 3})
    bittern.quantize_model(source, tmp_path / "a", bits=4, scale_dtype=torch.float32)
    bittern.quantize_model(source, tmp_path / "c", dequantize=torch.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("no flush mode here")
    try:
        bittern.quantize_model(source, tmp_path / "b", bits=4, scale_dtype="f32", threads=2)
        bittern.quantize_model(source, tmp_path / "d", dequantize="f32")
        assert bittern.compare_models(tmp_path / "a", tmp_path / "b").relative_error == 0
    finally:
        torch.set_flush_denormal(False)
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    assert hashes(tmp_path / "c") == hashes(tmp_path / "d")


def test_a_source_that_shrinks_is_an_error(tmp_path):
    numbers = Numbers(7)
    tensors = {f"{i}.weight": numbers.standard_normal((256, 1024)).astype(np.float32) for i in range(8)}
    source = write_folder(tmp_path / "model", tensors)

    def progress(state):
        if state.doing == "writing":
            os.truncate(source / "model.safetensors", 4096)

    with pytest.raises((ValueError, OSError, RuntimeError), match="model.safetensors"):
        bittern.quantize_model(source, tmp_path / "out", bits=4, progress=progress)
    assert sorted(os.listdir(tmp_path)) == ["model"]


def test_signals_are_still_pythons(model, tmp_path):
    """A handler of Python's own runs on the way, and what it raises ends the call."""

    class Alarm(Exception):
        pass

    def handler(number, frame):
        raise Alarm

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Alarm):
            bittern.quantize_model(model, tmp_path / "out", bits=4,
                                   progress=lambda state: os.kill(os.getpid(), signal.SIGUSR1))  # fmt: skip
    finally:
        signal.signal(signal.SIGUSR1, before)


FORKED = """
import os, sys
sys.path.insert(0, {package!r})
import bittern
bittern.quantize_model({source!r}, {out!r} + "1", bits=4, threads=2)
bittern.compare_models({source!r}, {out!r} + "1", threads=2)
child = os.fork()
if child == 0:
    bittern.quantize_model({source!r}, {out!r} + "2", bits=4, threads=2)
    os._exit(0 if bittern.compare_models({out!r} + "1", {out!r} + "2").relative_error == 0 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_converts_too(model, tmp_path):
    script = FORKED.format(package=PACKAGE, source=str(model), out=str(tmp_path / "out"))
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result
    assert hashes(tmp_path / "out1") == hashes(tmp_path / "out2")


def test_types_that_a_checker_rejects(tmp_path):
    """mypy, where it is there, knows the keywords and their choices."""
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(
        "import bittern\n"
        "report = bittern.quantize_model('a', 'b', bits=4, method='lsq', progress=lambda p: p.done < 3)\n"
        "bits: float = report.bits_per_weight\n"
        "names: list[str] = [tensor.name for tensor in bittern.inspect_model('a').tensors]\n"
        "bittern.quantize_model('a', 'b', method='best')  # wrong\n"
        "bittern.quantize_model('a', 'b', bit=4)  # wrong\n"
    )
    result = subprocess.run([sys.executable, "-m", "mypy", str(program)], capture_output=True, text=True, env={**os.environ, "MYPYPATH": PACKAGE})  # fmt: skip
    lines = {line.split(":")[1] for line in result.stdout.splitlines() if "program.py" in line and "error" in line}
    assert lines == {"5", "6"}, result
