"""A run that asks for a tier of peers has all of them."""

import importlib

import pytest
from conftest import HEAVY


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.peer(n)) for n in HEAVY])
def test_installed(name):
    importlib.import_module(name)
