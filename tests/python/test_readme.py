"""README.md's Python examples run as they stand."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from extract_readme import blocks  # noqa: E402

EXAMPLES = [code for language, code in blocks((ROOT / "README.md").read_text()) if language == "python"]


def test_there_is_one():
    assert EXAMPLES


@pytest.mark.parametrize("code", EXAMPLES)
def test_example(code):
    subprocess.run([sys.executable, "-c", code], check=True)
