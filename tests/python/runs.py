"""Folders to convert, and runs of the command that are stopped in the middle."""

import pathlib
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from test_cli import COMMAND
from test_quantize import weights, write_folder


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(1)
    tensors = {f"layers.{i}.a.weight": weights(rng) for i in range(4)}
    return write_folder(tmp_path / "hf", tensors)


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """Enough work for one thread that a run can be caught in the middle."""
    rng = np.random.default_rng(2)
    tensors = {f"layers.{i}.a.weight": weights(rng, 512, 1024, "bf16") for i in range(48)}
    return write_folder(tmp_path_factory.mktemp("larger") / "hf", tensors)


def own(path, to):
    """A copy that a test may change; times are kept."""
    shutil.copytree(path, to)
    return to


def names(path):
    return sorted(p.name for p in path.iterdir())


def pieces(out):
    try:
        return pathlib.Path(f"{out}.partial.journal").read_bytes().count(b"\npiece ")
    except FileNotFoundError:
        return 0


def start(*args, out, least=8):
    """A run, stopped by SIGSTOP when it has written some pieces."""
    for _ in range(20):
        process = subprocess.Popen(
            [COMMAND, *map(str, args), "-o", str(out), "--threads", "1", *(["--quiet"] if "--quiet" not in args else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while process.poll() is None and pieces(out) < least:
            time.sleep(0.0005)
        process.send_signal(signal.SIGSTOP)
        if process.poll() is None and pieces(out) >= least:
            return process
        process.wait()
        shutil.rmtree(out) if out.is_dir() else out.unlink()
    raise AssertionError("the run was never caught in the middle")


def kill(process):
    process.kill()
    process.communicate()


def go_on(process):
    process.send_signal(signal.SIGCONT)
    stdout, stderr = process.communicate()
    return subprocess.CompletedProcess([], process.returncode, stdout, stderr)
