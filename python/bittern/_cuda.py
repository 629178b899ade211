"""CUDA arrays: the stream a plan runs on, and torch as the owner of memory there.

Nothing here imports torch: an array of torch's means that it is there.
"""

import contextlib
import operator
import sys


def torch_of(array):
    """The module torch when `array` is a tensor of it, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(array, torch.Tensor) else None


def torch_tensors(arrays):
    """The CUDA tensors of torch among `arrays`."""
    return [a for a in arrays if torch_of(a) is not None and a.is_cuda]


def stream_handle(stream, arrays=(), op="plan"):
    """The cudaStream_t of `stream`: an int, a stream of torch's, or any that says __cuda_stream__.

    None is torch's current stream on the device of its first CUDA tensor, without one the default
    stream.
    """
    if stream is None:
        for tensor in torch_tensors(arrays):
            return torch_of(tensor).cuda.current_stream(tensor.device).cuda_stream
        return 0
    if hasattr(stream, "cuda_stream"):
        stream = stream.cuda_stream
    elif hasattr(stream, "__cuda_stream__"):
        stream = stream.__cuda_stream__()[1]
    try:
        handle = operator.index(stream)
        if not isinstance(stream, bool) and 0 <= handle < 2**64:
            return handle
    except TypeError:
        pass
    raise ValueError(f"{op}: stream: {stream!r}, expected an int or a CUDA stream of torch's")


def export(array, device, handle):
    """The DLPack capsule of an array on CUDA device `device`, for work on the stream `handle`.

    The producer makes that stream wait for what it has under way. Torch's own current stream needs
    not, and -1 says so: nothing is recorded, and a graph may be captured.
    """
    guard, producer = contextlib.nullcontext(), handle or 1  # DLPack's name for the default stream
    if (torch := torch_of(array)) is not None:
        guard = torch.cuda.device(device)  # torch exports what is on its current device
        if torch.cuda.current_stream(device).cuda_stream == handle:
            producer = -1
    with guard:
        try:
            return array.__dlpack__(stream=producer, max_version=(1, 1))
        except TypeError:  # before DLPack 1.0
            return array.__dlpack__(stream=producer)


def torch_stream(torch, device, handle):
    """`handle` as a stream of torch's."""
    if handle in (0, 1):
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)


def allocating_for(array, handle):
    """A context in which torch allocates and fills for use on the stream `handle`.

    Memory that torch hands out belongs to the stream that was current: freed, it is reused by later
    work on that stream alone.
    """
    for tensor in torch_tensors([array]):
        torch = torch_of(tensor)
        if torch.cuda.current_stream(tensor.device).cuda_stream != handle:
            return torch.cuda.stream(torch_stream(torch, tensor.device, handle))
    return contextlib.nullcontext()


def keep_until_done(arrays, handle):
    """Tells torch that the stream `handle` uses these tensors, if another stream owns them."""
    for tensor in torch_tensors(arrays):
        torch = torch_of(tensor)
        if torch.cuda.current_stream(tensor.device).cuda_stream != handle:
            tensor.record_stream(torch_stream(torch, tensor.device, handle))


def new_workspace(arrays, bytes, handle):
    """Scratch from torch when one of the arrays is its CUDA tensor, else None."""
    for tensor in torch_tensors(arrays):
        torch = torch_of(tensor)
        with allocating_for(tensor, handle):
            return torch.empty(bytes, dtype=torch.uint8, device=tensor.device)
    return None
