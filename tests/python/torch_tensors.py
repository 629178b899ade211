"""Tensors of torch: the devices they are tested on, and how they are compared."""

import importlib.util
import os

import pytest

import bittern

if importlib.util.find_spec("torch") is not None:
    import torch


def why_no_cuda():
    """Why CUDA tensors cannot be tested here; None if they can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    try:
        bittern.plan("quantize_per_group", device="cuda:0")
    except RuntimeError as error:
        return str(error)
    return None


@pytest.fixture
def cuda():
    if reason := why_no_cuda():
        if os.environ.get("BITTERN_REQUIRE_CUDA", "") not in ("", "0"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return torch.device("cuda:0")


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    return request.getfixturevalue("cuda") if request.param == "cuda" else torch.device("cpu")


def same(a, b):
    """Equal bits, and equal dtype and shape."""
    assert a.dtype == b.dtype and a.shape == b.shape
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def replayed(step, x, device):
    """The results of a captured step() after x has changed, and those of a plain one."""
    side = torch.cuda.Stream(device)  # torch asks for a run on a side stream first
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    return captured, step()
