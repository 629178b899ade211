"""Arrays of numpy, mlx and torch: new ones, and copies of small ones in another dtype."""

from . import _cuda
from ._values import DTYPES, LIMITS

# Small inputs that frameworks hand over in a dtype of their own, and the one that ops take.
COPIED = {
    **dict.fromkeys(
        (
            *("lengths", "starts", "cu_seqlens", "block_table", "state_index", "zero_point"),
            *("slots", "kept_slots"),
        ),
        "s32",
    ),
    "mask": "u8",
    **dict.fromkeys(("g", "beta", "a_log", "dt_bias"), "f32"),
}
INTEGERS = ("u8", "s8", "s32", "u32", "int16", "uint16", "int64", "uint64")


def new_array(like, shape, dtype, value=None):
    """An array of `like`'s framework and device, filled with `value` if there is one."""
    framework = type(like).__module__.partition(".")[0]
    dtype = DTYPES[dtype]
    if torch := _cuda.torch_of(like):
        array = torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
        return array if value is None else array.fill_(value)
    if framework == "mlx":
        import mlx.core as mx

        return mx.full(shape, 0 if value is None else value, getattr(mx, dtype))
    import numpy as np

    if dtype == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise NotImplementedError(
                "bf16 in numpy needs the package ml_dtypes; torch and mlx have their own"
            ) from None
        dtype = ml_dtypes.bfloat16
    return np.empty(shape, dtype) if value is None else np.full(shape, value, dtype)


def needs_copy(name, tensor):
    wanted, dtype = COPIED.get(name), tensor.dtype
    if wanted is None:
        return False
    if dtype == wanted:  # g and beta may be as large as v, and most ops take their strides
        return name not in ("g", "beta", "block_table") and not is_dense(tensor)
    if wanted == "s32":
        return dtype in INTEGERS
    if wanted == "u8":
        return dtype == "bool" or dtype in INTEGERS
    return dtype in ("f16", "bf16")


def is_dense(tensor):
    step = 1
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.strides)):
        if length != 1 and stride != step:
            return 0 in tensor.shape
        step *= length
    return True


def copied(where, name, array, dtype):
    """The array in the dtype that the op takes, dense; exact, or an error."""
    wanted = COPIED[name]
    low, high = LIMITS["s32"]
    if torch := _cuda.torch_of(array):
        array = array.contiguous()
        if dtype == wanted:
            return array
        if wanted != "s32":
            return (array != 0).to(torch.uint8) if wanted == "u8" else array.to(torch.float32)
        wide = array.to(torch.int64) if dtype != "uint64" else array.view(torch.int64)
        if dtype == "uint64":  # beyond int64: beyond int32 all the more
            wide = torch.where(wide < 0, high + 1, wide)
        if array.is_cuda:
            return wide.clamp(low, high).to(torch.int32)
        least, most = (int(wide.min()), int(wide.max())) if wide.numel() else (0, 0)
        result = wide
    else:
        import numpy as np

        if dtype == "bf16" and not hasattr(array, "astype"):  # raw bits under another name
            return (np.asarray(array.view("uint16")).astype(np.uint32) << 16).view(np.float32)
        if type(array).__module__.partition(".")[0] == "mlx":
            import mlx.core as mx

            if wanted == "f32":
                return mx.contiguous(array.astype(mx.float32))
            array = np.array(array)
        elif not isinstance(array, np.ndarray):
            array = np.from_dlpack(array) if hasattr(array, "__dlpack__") else np.asarray(array)
        array = np.asarray(array, order="C")
        if dtype == wanted:
            return array
        if wanted != "s32":
            return (array != 0).astype(np.uint8) if wanted == "u8" else array.astype(np.float32)
        least, most = (int(array.min()), int(array.max())) if array.size else (0, 0)
        result = array
    for value in (least, most):
        if not low <= value <= high:
            raise ValueError(f"{where}: holds {value}, expected integers that fit int32")
    return result.to(torch.int32) if torch else result.astype("int32")
