"""mpirun bittern: several processes give the bytes and the figures of one; one that dies ends all of them."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import time

import pytest
from small_models import put_model
from test_cli import COMMAND, bittern

pytestmark = [
    pytest.mark.skipif(COMMAND is None, reason="the command is not built (build/release/bittern)"),
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun"),
    pytest.mark.skipif(
        COMMAND is not None and not pathlib.Path(COMMAND).with_name("libbittern_mpi.so").exists(),
        reason="the command is built without MPI",
    ),
]

# As root, on fewer cores than processes, in a container that may not read another process' memory.
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n"]
ENVIRONMENT = os.environ | {"OMPI_MCA_btl_vader_single_copy_mechanism": "none", "OMPI_MCA_btl": "self,vader"}


def shared(count, *args, **more):
    """The command as several processes."""
    return subprocess.run(
        [*MPIRUN, str(count), COMMAND, *map(str, args)], capture_output=True, text=True, env=ENVIRONMENT, timeout=120, **more
    )


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    words = "the marsh is quiet and the bittern stands in the reeds where no boat comes ".split()
    (folder / "text.txt").write_text(" ".join(words[(7 * i * i + i) % len(words)] for i in range(400)))
    return put_model(folder / "model"), folder / "text.txt"


GPTQ = ("--bits", 3, "--group-size", 32, "--method", "gptq", "--pieces", 7, "--context", 32)


# Zero points of 8 rows are in one word.
PACKED = ("--bits", 4, "--group-size", 32, "--format", "compressed-tensors")


@pytest.mark.parametrize("flags", [("--bits", 4, "--method", "minmax"), GPTQ, PACKED], ids=["minmax", "gptq", "packed"])
def test_quantize(given, tmp_path, flags):
    model, text = given
    data = ("--data", text) if "gptq" in flags else ()
    result = bittern("quantize", model, "-o", tmp_path / "one", *flags, *data, "--json", tmp_path / "one.json")
    assert result.returncode == 0, result.stderr
    for count in (2, 4):
        out = tmp_path / f"of{count}"
        result = shared(count, "quantize", model, "-o", out, *flags, *data, "--json", tmp_path / "r.json", "--force")
        assert result.returncode == 0, result.stderr
        assert "bittern: " not in result.stderr and result.stdout.count("bits per weight") == 1
        assert contents(out) == contents(tmp_path / "one")
        one, many = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "r.json"))
        assert many.pop("processes") == count
        for report in (one, many):
            for key in ("output", "seconds", "seconds_making", "seconds_writing", "seconds_syncing"):
                del report[key]
        assert many == one
    # An error is one line, with the exit status of one process.
    result = shared(2, "quantize", model, "-o", out, *flags, *data)
    assert result.returncode == 2
    assert result.stderr.count("bittern: ") == 1 and f"{out}: exists" in result.stderr


def test_eval(given, tmp_path):
    model, text = given
    assert bittern("quantize", model, "-o", tmp_path / "small", "--bits", 3, "--group-size", 32).returncode == 0
    flags = (tmp_path / "small", "-f", text, "-c", 32, "--teacher", model, "--layers")
    cached = (tmp_path / "small", "-f", text, "-c", 32, "--teacher", model, "--teacher-cache")
    reports = {}
    for count in (1, 2, 4):
        run = bittern if count == 1 else lambda *args, count=count: shared(count, *args)
        result = run("eval", *flags, "--json", "-")
        assert result.returncode == 0, result.stderr
        whole = json.loads(result.stdout)
        result = run("eval", *cached, tmp_path / f"targets{count}", "--json", "-", "--quiet")
        assert result.returncode == 0, result.stderr
        bound = json.loads(result.stdout)
        result = run("eval", *cached, tmp_path / f"targets{count}", "--json", "-", "--quiet")
        assert result.returncode == 0, result.stderr
        again = json.loads(result.stdout)
        for report in (whole, bound, again):
            assert report.pop("processes", 1) == count
            report["teacher"].pop("cache")
            for entry in (*report["models"], report["teacher"]):
                del entry["tokens_per_second"]
        assert again == bound
        reports[count] = whole, bound, (tmp_path / f"targets{count}").read_bytes()
    assert reports[2] == reports[1]
    assert reports[4] == reports[1]


DISTILL = ("--bits", 3, "--group-size", 32, "--ctx", 32, "--calibration", 8, "--validation", 4, "--batch", 3, "--steps", 4)


def test_distill(given, tmp_path):
    teacher, text = given
    reports = {}
    for count in (1, 2, 4):
        run = bittern if count == 1 else lambda *args, count=count: shared(count, *args)
        out = tmp_path / f"of{count}"
        result = run("distill", teacher, "-o", out, "--data", text, *DISTILL, "--json", tmp_path / "r.json", "--force")
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("bits per weight") == 1
        report = json.loads((tmp_path / "r.json").read_text())
        assert report.pop("processes", 1) == count
        for key in ("output", "seconds", "seconds_learning", "peak_bytes", "tokens_per_second"):
            del report[key]
        reports[count] = report, contents(out)
        assert "How they go on" in (tmp_path / f"of{count}.html").read_text()
        assert not (tmp_path / f"of{count}.distill").exists()
    assert reports[2] == reports[1]
    assert reports[4] == reports[1]


def test_a_distillation_whose_process_dies_goes_on(given, tmp_path):
    teacher, text = given
    # Enough steps for some seconds: mpirun passes a signal on after one.
    flags = (*DISTILL[:-1], 1500, "--rate", 0.001, "--data", text, "--no-report")
    assert bittern("distill", teacher, "-o", tmp_path / "whole", *flags).returncode == 0
    state = tmp_path / "out.distill" / "state"
    for who, kind in [(1, signal.SIGKILL), (0, signal.SIGKILL), (None, signal.SIGTERM)]:
        began = time.monotonic()
        process = start(2, "distill", teacher, "-o", tmp_path / "out", *flags, "--checkpoint-minutes", 0)
        pids = children(process)
        while not state.exists() and process.poll() is None:
            time.sleep(0.001)
        assert process.poll() is None, process.communicate()
        if who is None:
            process.send_signal(kind)  # to mpirun
        else:
            os.kill(pids[who], kind)
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - began < 60
        assert process.returncode != 0 and err != "" and state.exists()
        for pid in pids:
            gone(pid)
        result = shared(4 if who == 1 else 2, "distill", teacher, "-o", tmp_path / "out", *flags, "--resume")
        assert result.returncode == 0, result.stderr
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")
        shutil.rmtree(tmp_path / "out")


def test_what_is_refused(given, tmp_path):
    model, text = given
    for count, flags, said, status in [
        (2, ("run", model, "-p", "a"), "run: 2 processes, expected one", 2),
        (2, ("eval", model), "--file", 2),
        (3, ("eval", tmp_path / "none", "-f", text, "--quiet"), "none: ", 4),
    ]:
        result = shared(count, *flags)
        assert result.returncode == status, result.stderr
        lines = [line for line in result.stderr.splitlines() if line.startswith("bittern: ")]
        assert len(lines) == 1 and said in lines[0], result.stderr
    # Without the plug-in the command says what is missing.
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(COMMAND, alone / "bittern")
    env = os.environ | {"OMPI_COMM_WORLD_SIZE": "2"}
    result = subprocess.run([alone / "bittern", "eval", model, "-f", text], capture_output=True, text=True, env=env)
    assert result.returncode == 4 and "libbittern_mpi.so is not beside the command" in result.stderr


def start(count, *args):
    process = subprocess.Popen(
        [*MPIRUN, str(count), COMMAND, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    began = time.monotonic()
    while len(children(process)) < count and time.monotonic() - began < 30:
        time.sleep(0.01)
    return process


def children(process):
    """The processes that mpirun has started, in the order of their ranks."""
    out = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout
    found = [pid for pid in map(int, out.split()) if pathlib.Path(f"/proc/{pid}/comm").read_text().strip() == "bittern"]
    return sorted(found)


def gone(pid):
    """mpirun may end before it has seen the last process go."""
    began = time.monotonic()
    while pathlib.Path(f"/proc/{pid}").exists():
        assert time.monotonic() - began < 20
        time.sleep(0.05)


def test_one_that_dies_ends_all(given, tmp_path):
    model, text = given
    long = tmp_path / "long.txt"
    long.write_text(text.read_text() * 200)
    for kind, returned in [(signal.SIGKILL, 137), (signal.SIGSEGV, 139)]:
        process = start(2, "eval", model, "-f", long, "-c", 32, "--threads", 1)
        pids = children(process)
        time.sleep(0.5)
        os.kill(pids[1], kind)
        killed = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - killed < 20
        assert process.returncode == returned, err
        assert "signal" in err
        for pid in pids:
            gone(pid)
