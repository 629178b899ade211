"""The README's Python examples run as they stand."""

import pathlib
import re

import pytest

README = (pathlib.Path(__file__).resolve().parents[2] / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example(example):
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})


def test_there_is_one():
    assert EXAMPLES
