"""Peers in tiers, and figures that a test wants to show.

@pytest.mark.peer("mlx"): without mlx the test is skipped by name; when BITTERN_PEERS=light or heavy
asks for a tier that holds it, the test fails instead.
"""

import importlib.util
import os

import pytest

LIGHT = ("numpy", "pytest", "mlx", "gguf", "safetensors")
HEAVY = LIGHT + ("torch", "transformers", "mlx_lm", "llama_cpp")
TIERS = {"": (), "light": LIGHT, "heavy": HEAVY}

figures = pytest.StashKey[list]()


def pytest_configure(config):
    config.stash[figures] = []
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


@pytest.fixture
def show(request):
    """show("text"): a line under "figures" at the end of the run."""
    return request.config.stash[figures].append


def pytest_terminal_summary(terminalreporter, config):
    if config.stash[figures]:
        terminalreporter.section("figures")
        for line in config.stash[figures]:
            terminalreporter.write_line(line)
