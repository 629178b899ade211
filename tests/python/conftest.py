"""Peers in tiers, and figures that a test wants to show.

@pytest.mark.peer("mlx"): without mlx the test is skipped by name; when BITTERN_PEERS=light or heavy
asks for a tier that holds it, the test fails instead.
"""

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

LIGHT = ("numpy", "pytest", "mlx", "gguf", "safetensors")
HEAVY = LIGHT + ("torch", "transformers", "compressed_tensors", "mlx_lm", "llama_cpp")
TIERS = {"": (), "light": LIGHT, "heavy": HEAVY}

figures = pytest.StashKey[list]()


def pytest_configure(config):
    config.stash[figures] = []
    # A shell starts what runs in the background with SIGINT ignored, and commands inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("BITTERN_PEERS", "") not in TIERS:
        raise pytest.UsageError("BITTERN_PEERS: expected light or heavy")


def pytest_runtest_setup(item):
    asked = os.environ.get("BITTERN_PEERS", "")
    for mark in item.iter_markers("peer"):
        for name in mark.args:
            if importlib.util.find_spec(name) is not None:
                continue
            message = f"peer {name} not installed"
            if name in TIERS[asked]:
                pytest.fail(f"{message}, and BITTERN_PEERS={asked} asks for it", pytrace=False)
            pytest.skip(message)


def real_model(name):
    """The path of a model of tools/get_model; without a network the test is skipped."""
    tool = [sys.executable, ROOT / "tools" / "get_model", name]
    result = subprocess.run(tool, capture_output=True, text=True)
    if result.returncode == 4:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stderr
    return pathlib.Path(result.stdout.strip())


@pytest.fixture(scope="session")
def smollm2():
    return real_model("smollm2")


@pytest.fixture(scope="session")
def minilm():
    return real_model("minilm")


@pytest.fixture
def show(request):
    """show("text"): a line under "figures" at the end of the run."""
    return request.config.stash[figures].append


def pytest_terminal_summary(terminalreporter, config):
    if config.stash[figures]:
        terminalreporter.section("figures")
        for line in config.stash[figures]:
            terminalreporter.write_line(line)
