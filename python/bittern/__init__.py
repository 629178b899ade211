"""bittern: quantise, dequantise and their backward passes, the same bits on every backend.

One function per op takes numpy, mlx or torch arrays without copying them:

    q = bittern.quantize_per_group(x, scale, group_size=64)
    scales, biases, q = bittern.qdq_affine_init(w, bits=4, method="mlx", storage="packed")

How a function fills in what it was not told:
  sizes      the arrays' axes give them. Where an op has `outer_size` and `axis_size`, the array of
             the op's full shape does: its last axis is the quantised one (`axis` moves it, for
             granularity "channel"), the axes before it are rows. Other operands may have those axes
             merged or not. Packed codes alone do not say how long a row is; scales do. In any other
             op a size is the axis that is named after it, and axes before an operand's first are
             merged into that one. A single axis where rows are expected is one row, and gives one.
  dtypes     `element`, `code`, `f32_scale` and their like follow the arrays given. A dtype field
             takes bittern's names ("s8") and those of numpy and torch ("int8", np.int8, torch.int8).
  outputs    those not given are allocated by the framework of the first array; `False` leaves an
             optional one out, `True` asks for one. They are returned in the op's order, as a tuple
             if several. By default all are made but extras (`ops()` marks them: the `snapshots` of
             gdn_recurrent_step), which are large and which few callers want. An operand that is
             read and then written is given, and not returned.
  numbers    a number given for an input fills it: Python's or numpy's, an integer within range
             where the input is of an integer dtype. False is 0: mask=False masks all.
  copies     arrays are used where they are, but for small ones in a framework's default dtype:
             lengths, starts, cu_seqlens, block_table, state_index and zero_point of any integer
             dtype become int32, an integer or bool mask becomes uint8, and g, beta, a_log and
             dt_bias in half precision become float32. An integer that int32 cannot hold is an
             error; on CUDA, where looking would mean waiting, it becomes the nearest int32. All of
             these but block_table, g and beta may have any strides: they are copied then, too.
  autograd   these functions have no gradient: a torch tensor that requires one is an error, unless
             under torch.no_grad(). bittern.torch has the differentiable ones. mlx does not say
             that it differentiates: to mx.grad and mx.jvp the results are constants.
  device     that of the first array.
  stream     on CUDA, an int (cudaStream_t) or a stream of torch's; by default torch's current one.
             Another stream first waits for what the current one has to do; the results belong to
             it, as if made under torch.cuda.stream().

Tables of the KV codec come from `sphere_codebook`, `gaussian_codebook` and `make_rotation`:

    levels, boundaries = bittern.sphere_codebook(dim=128, bits=4)
    signs = bittern.make_rotation("hadamard", dim=128, seed=1)
    packed, norms = bittern.aura_encode(k, signs, boundaries, levels)

Model files (docs/quantize.md, docs/inspect.md):

    report = bittern.quantize_model("model", "model-4bit", bits=4)
    print(bittern.inspect_model("model-4bit"))
    bittern.compare_models("model", "model-4bit").relative_error

`KvCache` keeps the keys and values of an attention layer as such codes, and attends to them.

`plan` is the layer below: every field said, nothing inferred, nothing allocated but scratch.

Errors: ValueError (malformed), NotImplementedError (no kernel does it), MemoryError, RuntimeError; of
model files also FileNotFoundError, OSError and Cancelled.
"""

import difflib as _difflib
import functools as _functools
import inspect as _inspect
import itertools as _itertools
import math as _math
import numbers as _numbers
import operator as _operator
import os as _os
import re as _re
import sys as _sys
import types as _types
from fractions import Fraction as _Fraction

from . import _bittern, _cuda
from ._bittern import (
    Field,
    Op,
    Operand,
    Plan,
    PrecisionGuarantee,
    Sku,
    __version__,
    num_threads,
    ops,
)
from ._bittern import Desc as _Desc
from ._bittern import Tensor as _Tensor
from ._convert import (
    Cancelled,
    GroupDifference,
    ModelComparison,
    ModelDescription,
    ModelProgress,
    QuantizeReport,
    QuantizedTensor,
    StorageTotal,
    TensorDescription,
    TensorDifference,
    compare_models,
    inspect_model,
    quantize_model,
)

__all__ = [
    "Cancelled",
    "Field",
    "GroupDifference",
    "KvBytes",
    "KvCache",
    "KvCounts",
    "ModelComparison",
    "ModelDescription",
    "ModelProgress",
    "Op",
    "Operand",
    "Plan",
    "PrecisionGuarantee",
    "QuantizeReport",
    "QuantizedTensor",
    "Sku",
    "StorageTotal",
    "TensorDescription",
    "TensorDifference",
    "__version__",
    "aura_config",
    "compare_models",
    "gaussian_codebook",
    "inspect_model",
    "make_rotation",
    "num_threads",
    "ops",
    "plan",
    "quantize_model",
    "set_num_threads",
    "sphere_codebook",
]


def plan(op, *, device="cpu", preference="exact", kernel=None, threads=0, **fields):
    """The kernel for one problem, ready to run any number of times.

    `fields` are the op's descriptor (see `ops()`); `kernel` narrows the choice to one name.
    `threads` are those of a CPU kernel, as set_num_threads takes them; 0: num_threads().
    """
    desc = _make_desc(op, fields.items())
    return desc.select(*_selection(op, device, preference, kernel, threads))


def set_num_threads(threads):
    """Threads a CPU kernel may use; results never depend on it. Below 1: the default."""
    _bittern.set_num_threads(_integer_of_bits("set_num_threads: threads", threads, 32))


def sphere_codebook(dim, bits):
    """Levels and boundaries of the codebook with the least error for rows of `dim`, f32 numpy."""
    return _codebook(_bittern.sphere_codebook, dim, bits)


def gaussian_codebook(dim, bits):
    """The same in the limit of large `dim`."""
    return _codebook(_bittern.gaussian_codebook, dim, bits)


def _codebook(function, dim, bits):
    name = function.__name__
    return function(
        _integer_of_bits(f"{name}: dim", dim, 64), _integer_of_bits(f"{name}: bits", bits, 32)
    )


def make_rotation(rotation, dim, seed=0):
    """The table of a rotation, f32 numpy: signs, a matrix, or None for identity."""
    if not isinstance(rotation, str):
        raise ValueError(
            f"make_rotation: rotation: {rotation!r}, expected identity, hadamard or dense"
        )
    seed = _integer("make_rotation: seed", seed)
    if not 0 <= seed < 2**64:
        raise ValueError(f"make_rotation: seed: {seed}, expected 0..2^64-1")
    return _bittern.make_rotation(rotation, _integer_of_bits("make_rotation: dim", dim, 64), seed)


_SIZES = ("outer_size", "axis_size", "inner_size")
# Sizes that show what an operand's axes mean: rows, groups and (times group_size) a row. No count
# of packed words equals the second by chance.
_ROWS, _GROUPS = 5, 1009

_FRAMEWORK_DTYPES = {
    "f32": "float32",
    "f64": "float64",
    "f16": "float16",
    "bf16": "bfloat16",
    "u8": "uint8",
    "s8": "int8",
    "s32": "int32",
    "u32": "uint32",
}


def _new_array(like, shape, dtype, value=None):
    """An array of `like`'s framework and device, filled with `value` if there is one."""
    framework = type(like).__module__.partition(".")[0]
    dtype = _FRAMEWORK_DTYPES[dtype]
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


@_functools.cache
def _fields_of(op):
    return {f.name: f for o in ops() if o.name == op for f in o.fields}


def _nearest(name, names):
    """"; did you mean 'x'?" where a name is like `name`, else all of them."""
    close = _difflib.get_close_matches(name, names, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; expected one of {' '.join(names)}"


def _is_bool(value):
    numpy = _sys.modules.get("numpy")
    return isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_))


def _is_number(value):
    return isinstance(value, _numbers.Real) or _is_bool(value)


def _scalar(value):
    """The number in an array without axes, as frameworks give for a sum; else the value itself."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) == () else value


def _integer(where, value):
    number = _scalar(value)
    try:
        if not _is_bool(number):
            return _operator.index(number)
    except TypeError:
        pass
    raise ValueError(f"{where}: {value!r}, expected an integer")


def _integer_of_bits(where, value, bits):
    number = _integer(where, value)
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise ValueError(f"{where}: {number}, expected a {bits}-bit integer")
    return number


def _text(value):
    """A string that UTF-8 can write, whatever Python lets it hold."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def _selection(op, device, preference, kernel, threads):
    """What a plan's choice is made from, besides the problem; torch's devices have a name."""
    if isinstance(device, getattr(_sys.modules.get("torch"), "device", ())):
        device = str(device)
    options = (
        ("device", device, "'cpu', 'cuda' or 'cuda:N'"),
        ("preference", preference, "'exact' or 'fastest'"),
        ("kernel", "any" if kernel is None else kernel, "the name of a kernel"),
    )
    for name, value, expected in options:
        if not isinstance(value, str) or not value:
            raise ValueError(f"{op}: {name}: {value!r}, expected {expected}")
    kernel = None if kernel is None else _text(kernel)
    threads = _integer_of_bits(f"{op}: threads", threads, 32)
    return _text(device), _text(preference), kernel, threads


def _field_value(op, field, value):
    """A field's value as Python's own type, so that equal ones are equal to the cache of plans."""
    where = f"{op}: {field.name}"
    if field.choices:
        if set(field.choices) & set(_FRAMEWORK_DTYPES):
            named = getattr(value, "name", None) or getattr(value, "__name__", None) or value
            named = str(named).removeprefix("torch.").removeprefix("mlx.core.")
            ours = {theirs: name for name, theirs in _FRAMEWORK_DTYPES.items()}
            if named in ours or isinstance(value, str):
                return ours.get(named, _text(named))
        if isinstance(value, str):
            return _text(value)
        found, value = value, _scalar(value)
        if field.choices == ("false", "true"):
            if _is_bool(value) or (isinstance(value, _numbers.Integral) and value in (0, 1)):
                return bool(value)
            raise ValueError(f"{where}: {found!r}, expected True or False")
        if _is_bool(value) or not isinstance(value, _numbers.Integral):
            raise ValueError(f"{where}: {found!r}, expected one of {' '.join(field.choices)}")
        return _operator.index(value)
    if not isinstance(field.default, float):
        return _integer(where, value)
    number = _scalar(value)
    if _is_bool(number) or not isinstance(number, _numbers.Real):
        raise ValueError(f"{where}: {value!r}, expected a number")
    return _real(where, number, "f64")


def _real(where, number, dtype):
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{where}: {number}, expected a number that fits {dtype}") from None


def _make_desc(op, fields):
    if not isinstance(op, str):
        raise ValueError(f"op: {op!r}, expected the name of an op")
    desc = _Desc(_text(op))
    known = _fields_of(op)
    for name, value in fields:
        desc.set(name, _field_value(op, known[name], value) if name in known else 0)
    return desc


_LIMITS = {
    "u8": (0, 2**8 - 1),
    "s8": (-(2**7), 2**7 - 1),
    "s32": (-(2**31), 2**31 - 1),
    "u32": (0, 2**32 - 1),
    "f16": (-65504.0, 65504.0),
    "bf16": (-(2.0 - 2.0**-7) * 2.0**127, (2.0 - 2.0**-7) * 2.0**127),
    "f32": (-(2.0 - 2.0**-23) * 2.0**127, (2.0 - 2.0**-23) * 2.0**127),
}


def _fill_value(where, dtype, value):
    """A number that fills an input of `dtype`."""
    if dtype in ("u8", "s8", "s32", "u32"):
        value = _integer(where, int(value) if dtype == "u8" and _is_bool(value) else value)
    else:
        value = _real(where, value, dtype)
        if not _math.isfinite(value):
            return value
    low, high = _LIMITS.get(dtype, (-_math.inf, _math.inf))
    if not low <= value <= high:
        raise ValueError(f"{where}: {value}, expected {low}..{high} ({dtype})")
    return value


# Small inputs that frameworks hand over in a dtype of their own, and the one that ops take.
_COPIED = {
    **dict.fromkeys(
        ("lengths", "starts", "cu_seqlens", "block_table", "state_index", "zero_point"), "s32"
    ),
    "mask": "u8",
    **dict.fromkeys(("g", "beta", "a_log", "dt_bias"), "f32"),
}
_INTEGERS = ("u8", "s8", "s32", "u32", "int16", "uint16", "int64", "uint64")


def _needs_copy(name, tensor):
    wanted, dtype = _COPIED.get(name), tensor.dtype
    if wanted is None:
        return False
    if dtype == wanted:  # g and beta may be as large as v, and most ops take their strides
        return name not in ("g", "beta", "block_table") and not _is_dense(tensor)
    if wanted == "s32":
        return dtype in _INTEGERS
    if wanted == "u8":
        return dtype == "bool" or dtype in _INTEGERS
    return dtype in ("f16", "bf16")


def _is_dense(tensor):
    step = 1
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.strides)):
        if length != 1 and stride != step:
            return 0 in tensor.shape
        step *= length
    return True


def _copied(where, name, array, dtype):
    """The array in the dtype that the op takes, dense; exact, or an error."""
    wanted = _COPIED[name]
    low, high = _LIMITS["s32"]
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


def _is_dtype_field(field):
    """Whether the arrays given say what it is."""
    named = ("storage", "f32_scale", "f16_scale", "f16_norm")
    return field.name in named or set(field.choices) & set(_FRAMEWORK_DTYPES)


@_functools.lru_cache(maxsize=1024)
def _infer_dtypes(op, fields, free, dtypes, probe):
    """The values of the fields `free` for which most arrays have the dtype their operand wants.

    With them comes what `probe` says about the sizes. It raises where the op knows no such values.
    """
    desc = _make_desc(op, fields)
    choices = []
    for field in free:
        rest = field.choices
        if "f32" in rest:
            rest = [c for c in rest if c in dict(dtypes).values()]
        choices.append((field.default, *rest))
    best, best_matches, first_error = None, -1, None
    for values in _itertools.product(*choices):
        for field, value in zip(free, values):
            desc.set(field.name, value)
        try:
            wanted, layout = probe(desc, fields)
        except (ValueError, NotImplementedError) as error:
            first_error = first_error or error  # perhaps not a combination the op knows
            continue
        matches = sum(dtype == wanted.get(name) for name, dtype in dtypes)
        if matches > best_matches:
            best, best_matches = (values, layout), matches
        if matches == len(dtypes):
            break
    if best is None:
        raise first_error
    return best


class _RowSizes:
    """outer_size, axis_size and inner_size, from an array of the op's full shape."""

    def __init__(self, op, inputs):
        self.op = op.name
        self.names = _SIZES
        fields = {f.name: f for f in op.fields}
        self.has_inner = "inner_size" in fields
        group_size = fields["group_size"].default if "group_size" in fields else 1
        _, (layout, length) = self.probe(_Desc(op.name), (("group_size", group_size),))
        # An op whose inputs do not show the length of a row must be told.
        self.needs_axis_size = not any(
            layout.get(o.name) in ((_ROWS, length), (_ROWS, _GROUPS)) for o in inputs
        )
        self.options = ("axis",) * self.has_inner + ("axis_size",) * self.needs_axis_size

    @staticmethod
    def probe(desc, fields):
        """The operands' dtypes, and their shapes for sizes that show what their axes are."""
        group_size = dict(fields).get("group_size", 1)
        length = _GROUPS * group_size if 0 < group_size < 2**40 else _GROUPS
        desc.set("outer_size", _ROWS)
        desc.set("axis_size", length)
        operands = desc.operands()
        return {o.name: o.dtype for o in operands}, ({o.name: o.shape for o in operands}, length)

    def set(self, desc, tensors, found, fields, given):
        """Sets the sizes. Returns the shape of an output, made from the plan's operand, and the
        array that each size is from."""
        layout, length = found
        rows, axes, source = self.find(tensors, layout, length, fields, given)
        if _math.prod(axes[1:]) != 1 and fields.get("granularity", "group") != "channel":
            raise ValueError(
                f"{self.op}: axis: {given['axis']} of shape {list(rows + axes)}, expected the last"
                " axis, along which groups and tokens lie, or granularity channel"
            )
        desc.set("outer_size", _math.prod(rows))
        desc.set("axis_size", axes[0])
        if self.has_inner:
            desc.set("inner_size", _math.prod(axes[1:]))

        def output_shape(operand):
            if layout[operand.name] == (_ROWS, length):
                return rows + axes
            if layout[operand.name][0] == _ROWS:
                return rows + operand.shape[1:]
            return operand.shape

        return output_shape, dict.fromkeys(_SIZES, source)

    def find(self, tensors, layout, length, fields, given):
        """The axes before and from the quantised one on, and the array that has them."""
        for full in (True, False):  # an array of the full shape, else one with an entry per group
            for name, tensor in tensors.items():
                if layout.get(name) != ((_ROWS, length) if full else (_ROWS, _GROUPS)):
                    continue
                shape = tensor.shape
                axis = given.get("axis", -1) if full else -1
                if not -len(shape) <= axis < len(shape):
                    raise ValueError(f"{self.op}: {name}: shape {list(shape)} has no axis {axis}")
                axis %= len(shape)
                rows, axes = shape[:axis], shape[axis:]
                if not full:
                    axes = (axes[0] * fields.get("group_size", 1),)
                if given.get("axis_size", axes[0]) != axes[0]:
                    raise ValueError(
                        f"{self.op}: {name}: shape {list(shape)}, expected rows of axis_size "
                        f"{given['axis_size']}"
                    )
                return rows, axes, name
        if given.get("axis_size") is not None:
            name, tensor = next((n, t) for n, t in tensors.items() if n in layout)
            return tensor.shape[:-1], (given["axis_size"],), None
        raise ValueError(f"{self.op}: no array given tells the length of a row")


class _NamedSizes:
    """Sizes that are axes of the operands, found by trying two numbers for each field.

    An axis that is then the number plus c is the field plus c. One that is a multiple of the number
    is that of the field: the other factor is known where it is a field found before (kv_heads, of
    which each of the sequences has its own). One that is the number divided by another field is the
    field's, too (capacity, of which a block table has the pages). A field with c > 0 (sequences, of
    which n need n + 1 offsets) comes from such axes alone, and keeps its default without them; so
    does a field without which an array already has the right shape. A field that changes how many
    axes there are is a choice, not a size: it is given or has its default.
    """

    PROBES = 1009, 2003

    def __init__(self, op, inputs):
        self.op = op.name
        self.names = self.options = ()
        self.has_inner = self.needs_axis_size = False
        self.sizes = [f.name for f in op.fields if not f.choices and isinstance(f.default, int)]
        self.defaults = {f.name: f.default for f in op.fields}

    def probe(self, desc, fields):
        wanted = {o.name: o.dtype for o in self.safe(desc, fields).unchecked_operands()}
        return wanted, None

    def safe(self, desc, fields):
        """A copy whose sizes can be computed with, whatever was given."""
        desc = desc.copy()
        for name, value in dict(fields).items():
            if name in self.sizes and not (isinstance(value, int) and 0 < value < 2**31):
                desc.set(name, self.defaults[name])
        return desc

    def axes_of(self, desc, field):
        """[(operand, its number of axes, axis, c, times)] of the axes that are `field` * times + c.

        Multiples come last.
        """
        others = {v for v in map(desc.get, self.sizes) if v > 1}
        shapes = []
        for value in (desc.get(field), *self.PROBES):
            trial = desc.copy()
            trial.set(field, value)
            shapes.append({o.name: o.shape for o in trial.unchecked_operands()})
        found = []
        for name, first in shapes[1].items():
            second = shapes[2].get(name, ())
            if not len(shapes[0].get(name, first)) == len(first) == len(second):
                return []
            for axis, (a, b) in enumerate(zip(first, second)):
                c, times = a - self.PROBES[0], a // self.PROBES[0]
                if a != b and c == b - self.PROBES[1] and abs(c) <= 1:
                    found.append((name, len(first), axis, c, 1))
                elif (a, b) == tuple(times * p for p in self.PROBES) and times > 1:
                    found.append((name, len(first), axis, 0, times))
                for d in others:
                    if (a, b) == tuple(p // d for p in self.PROBES):
                        found.append((name, len(first), axis, 0, _Fraction(1, d)))
        return sorted(found, key=lambda axis: axis[-1] > 1)

    def refuse_rank(self, name, shape, desc):
        """Says what each axis of the operand is."""
        axes = next([str(n) for n in o.shape] for o in desc.unchecked_operands() if o.name == name)
        for field in self.sizes:
            for operand, _, axis, c, times in self.axes_of(desc, field):
                if operand == name and times == 1:
                    axes[axis] = field if c == 0 else f"{field} {c:+d}"
        raise ValueError(
            f"{self.op}: {name}: shape {list(shape)}, expected {len(axes)} "
            f"{'axis' if len(axes) == 1 else 'axes'}: [{', '.join(axes)}]"
        )

    def set(self, desc, tensors, _, fields, given):
        trial = self.safe(desc, fields)
        free = [n for n in self.sizes if n not in fields]
        merged = {}  # a field, and the axes of an array that it counts together
        sources = {}  # a field, and the array that it is from
        empty = set()  # axes that are 0, whatever their other factor is
        for counted in (True, False):
            for field in free:
                axes = self.axes_of(trial, field)
                if any(c > 0 for *_, c, _ in axes) != counted:
                    continue
                shapes = {o.name: o.shape for o in trial.unchecked_operands()}
                # A field that has a given array read is not at its default, whatever its size.
                has_read = any(
                    o.unread_without == field and 0 not in tensors[o.name].shape
                    for o in trial.unchecked_operands()
                    if o.name in tensors
                )
                too_few = None
                for name, count, axis, c, times in axes:
                    if name not in tensors or (counted and c <= 0):
                        continue
                    shape = tensors[name].shape
                    # Of rows, one by itself; but a column of numbers has no axis for each.
                    one_row = count == 2 and len(shape) == 1 and shapes[name][1] != 1
                    if len(shape) < count and not one_row:
                        too_few = too_few or name
                        continue
                    if shape == shapes[name] and not has_read:
                        break
                    extra = len(shape) - count
                    lead, rest = shape[: extra + 1], shape[extra + 1 :]
                    value = (_math.prod(lead), *rest)[axis] - c
                    apart = axis == 0 and extra == 1 and times > 1  # both factors have an axis
                    if (name, axis) in empty or value % times or (apart and lead[0] != times):
                        continue
                    value //= times
                    if value == 0:
                        empty.update((n, at) for n, _, at, zero, _ in axes if zero == 0)
                    if axis == 0 and extra != 0 and times == 1 and c == 0:
                        merged[field] = lead
                    sources[field] = name
                    desc.set(field, value)
                    if 0 < value < 2**31:
                        trial.set(field, value)
                    break
                else:
                    if too_few:
                        self.refuse_rank(too_few, tensors[too_few].shape, trial)
        leading = {
            n: f for f in merged for n, _, axis, c, _ in self.axes_of(trial, f) if axis == c == 0
        }

        def output_shape(operand):
            field = leading.get(operand.name)
            return merged[field] + operand.shape[1:] if field else operand.shape

        return output_shape, sources


_FLOAT64_HINT = "; numpy's default is float64: pass float32"


class _Function:
    """Runs one op on arrays; made from the op's table alone."""

    def __init__(self, op):
        self.op = op
        self.fields = {f.name: f for f in op.fields}
        self.inputs = [o for o in op.operands if not o.output or o.in_out]
        self.outputs = [o for o in op.operands if o.output and not o.in_out]
        self.where = {o.name: f"{op.name}: {o.name}" for o in op.operands}
        self._remembered = _functools.lru_cache(maxsize=1024)(self._choose)
        try:
            self.sizes = _RowSizes(op, self.inputs)
        except (ValueError, NotImplementedError):  # no rows, or not rows of any length
            self.sizes = _NamedSizes(op, self.inputs)

    def parameters(self):
        """(name, kind, default) of each parameter; kind is input, output, field or option."""
        for o in sorted(self.inputs, key=lambda o: o.optional):
            yield o.name, "input", None if o.optional else _inspect.Parameter.empty
        if self.sizes.needs_axis_size:
            yield "axis_size", "field", _inspect.Parameter.empty
        for o in self.outputs:
            yield o.name, "output", None
        for f in self.fields.values():
            if f.name in self.sizes.names:
                continue
            inferred = _is_dtype_field(f) or f.name in getattr(self.sizes, "sizes", ())
            yield f.name, "field", None if inferred else f.default
        if self.sizes.has_inner:
            yield "axis", "option", -1
        yield "device", "option", None
        yield "preference", "option", "exact"
        yield "kernel", "option", None
        yield "threads", "option", 0
        yield "stream", "option", None
        yield "workspace", "option", None

    def choose(self, problem, environment):
        """The plan for a problem and the shapes of its outputs, once for each problem."""
        try:
            return self._remembered(problem, environment)
        except TypeError as error:
            if "unhashable" not in str(error):
                raise
            return self._choose(problem, environment)

    def _choose(self, problem, _):
        fields, described, options, selection = problem
        op, given_fields = self.op.name, dict(fields)
        desc = _make_desc(op, fields)
        free = tuple(
            f for n, f in self.fields.items() if n not in given_fields and _is_dtype_field(f)
        )
        dtypes = tuple((name, dtype) for name, dtype, _ in described)
        values, found = _infer_dtypes(op, fields, free, dtypes, self.sizes.probe)
        for field, value in zip(free, values):
            desc.set(field.name, value)
        tensors = {name: _types.SimpleNamespace(shape=shape) for name, _, shape in described}
        output_shape, sources = self.sizes.set(desc, tensors, found, given_fields, dict(options))
        try:
            chosen = desc.select(*selection)
        except (ValueError, NotImplementedError) as error:
            hint = _FLOAT64_HINT if "element: f64" in str(error) else ""
            for field, source in sources.items():  # nobody said these numbers
                if source and _re.search(rf"\b{field}\b", str(error)):
                    hint += f"; {field} is from {source}, shape {list(tensors[source].shape)}"
            raise type(error)(f"{error}{hint}") from None
        return chosen, {o.name: output_shape(o) for o in chosen.operands if o.output}, desc

    def check(self, operand, tensor, desc):
        """Says what is wrong with an array before the plan does, which knows less about it."""
        where, shape = self.where[operand.name], list(operand.shape)
        if operand.unread_without is not None:
            return tensor  # as the plan says
        if tensor.dtype != operand.dtype:
            hint = _FLOAT64_HINT if (tensor.dtype, operand.dtype) == ("f64", "f32") else ""
            raise ValueError(
                f"{where}: dtype {tensor.dtype}, expected {operand.dtype} {shape}{hint}"
            )
        merged = tensor.merge_axes(where, operand)
        if not merged.fits(operand):
            given, wanted = (str(list(s)).replace(" ", "") for s in (tensor.shape, shape))
            hint = "" if tensor.shape or operand.output else "; a number would fill it"
            raise ValueError(
                f"{where}: shape {given}, expected {wanted}{self.because(operand, desc)}{hint}"
            )
        return merged

    def because(self, operand, desc):
        """" (bits=4)": the fields that an operand's shape follows from."""
        found = []
        for field in self.fields.values():
            value = desc.get(field.name)
            # One more, twice as many, and blocks of 32 to 256 more where none is there.
            others = range(len(field.choices)) if field.choices else (value + 1, value * 2, value + 256)
            for other in others:
                trial = desc.copy()
                try:
                    trial.set(field.name, other)
                    shapes = {o.name: o.shape for o in trial.unchecked_operands()}
                except (ValueError, NotImplementedError):
                    continue
                if shapes.get(operand.name, operand.shape) != operand.shape:
                    found.append(f"{field.name}={field.choices[value] if field.choices else value}")
                    break
        return f" ({', '.join(found)})" if found else ""

    def run(self, given):
        op, where = self.op.name, self.where
        written = {o.name for o in self.op.operands if o.output}
        made = {o.name for o in self.outputs}
        for o in self.outputs:
            if _is_bool(given.get(o.name)):
                given[o.name] = bool(given[o.name])  # not numpy's
                if not given[o.name] and not o.optional:
                    raise ValueError(f"{where[o.name]}: False, expected an array: it is not optional")
        arrays = {
            name: given[name]
            for name in where
            if given.get(name) is not None
            and not (given[name] is False and name in written)
            and not (given[name] is True and name in made)
        }
        numbers = {n: a for n, a in arrays.items() if _is_number(a)}
        for name in numbers:
            del arrays[name]
            if name in written:
                may = " or False" if any(o.name == name and o.optional for o in self.outputs) else ""
                raise ValueError(f"{where[name]}: {numbers[name]}, expected an array{may}")
        stream = _cuda.stream_handle(given["stream"], arrays.values(), op)
        tensors = {n: _Tensor(where[n], a, n in written, stream) for n, a in arrays.items()}
        if not tensors:
            names = " ".join(o.name for o in self.inputs)
            raise ValueError(f"{op}: no arrays, expected at least one of {names}")

        first, like = next(iter(arrays.items()))
        like_device = tensors[first].device
        for name, tensor in tensors.items():
            can_copy = tensor.device == "cpu" or _cuda.torch_of(arrays[name]) is not None
            if name not in written and can_copy and _needs_copy(name, tensor):
                with _cuda.allocating_for(arrays[name], stream):
                    arrays[name] = _copied(where[name], name, arrays[name], tensor.dtype)
                tensors[name] = _Tensor(where[name], arrays[name], False, stream)
        device = like_device if given["device"] is None else given["device"]
        selection = _selection(
            op, device, given["preference"], given["kernel"], given["threads"]
        )
        names = self.sizes.names
        problem = (
            tuple(
                (n, _field_value(op, f, given[n]))
                for n, f in self.fields.items()
                if n not in names and given[n] is not None
            ),
            tuple((n, t.dtype, t.shape) for n, t in tensors.items()),
            tuple((n, _integer(f"{op}: {n}", given[n])) for n in self.sizes.options),
            selection,
        )
        read_by_select = num_threads(), _os.environ.get("BITTERN_KERNEL")
        chosen, output_shapes, desc = self.choose(problem, read_by_select)

        # A CUDA array that is not torch's brings no way to make another.
        can_allocate = like_device == "cpu" or _cuda.torch_of(like) is not None
        operands, results = {}, []
        for o in chosen.operands:
            is_made = o.output and not o.in_out
            wanted = given.get(o.name)
            left_out = o.optional and (wanted is False or (wanted is None and o.extra))
            if o.name in numbers or (is_made and o.name not in arrays and not left_out):
                if not can_allocate:
                    raise NotImplementedError(
                        f"{where[o.name]}: no array, and on {like_device} only torch's are made"
                    )
                shape, value = output_shapes.get(o.name), None
                if o.name in numbers:
                    shape = o.shape if o.unread_without is None else (1,)
                    value = _fill_value(where[o.name], o.dtype, numbers[o.name])
                with _cuda.allocating_for(like, stream):
                    arrays[o.name] = _new_array(like, shape, o.dtype, value)
            if o.name in arrays:
                tensor = tensors.pop(o.name, None) or _Tensor(
                    where[o.name], arrays[o.name], o.output, stream
                )
                operands[o.name] = self.check(o, tensor, desc)
                if is_made:
                    results.append(arrays[o.name])
        asked = {n for n in made if given.get(n) is True} | set(numbers)
        for name in asked - {o.name for o in chosen.operands}:
            raise ValueError(
                f"{where[name]}: given, but this problem has no such operand; leave it out"
            )
        operands.update(tensors)  # operands this problem does not have: the plan names them
        workspace = given["workspace"]
        if workspace is None and selection[0] != "cpu" and chosen.workspace_bytes:
            workspace = _cuda.new_workspace(arrays.values(), chosen.workspace_bytes, stream)
        chosen.run(stream=stream, workspace=workspace, **operands)
        _cuda.keep_until_done(arrays.values(), stream)
        return results[0] if len(results) == 1 else tuple(results)


def _make_function(op):
    body = _Function(op)
    signature = _inspect.Signature(
        _inspect.Parameter(
            name,
            _inspect.Parameter.POSITIONAL_OR_KEYWORD
            if kind == "input"
            else _inspect.Parameter.KEYWORD_ONLY,
            default=default,
        )
        for name, kind, default in body.parameters()
    )

    def function(*args, **kwargs):
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = [name for name in kwargs if name not in signature.parameters]
            hint = _nearest(unknown[0], signature.parameters) if unknown else ""
            raise TypeError(f"{op.name}: {error}{hint}") from None
        bound.apply_defaults()
        return body.run(bound.arguments)

    names = [o.name + (" (optional)" if o.optional else "") for o in body.inputs]
    lines = [f"{', '.join(names)} -> {', '.join(o.name for o in body.outputs)}", ""]
    for name, kind, _ in body.parameters():
        if kind == "field":
            lines.append(f"    {name:12} {body.fields[name].help}")
    lines += ["", f"The formula is at the top of bittern/ops/{op.name}.h."]
    function.__doc__ = "\n".join(lines)
    function.__name__ = function.__qualname__ = op.name
    function.__module__ = __name__
    function.__signature__ = signature
    function._body = body
    return function


for _op in ops():
    globals()[_op.name] = _make_function(_op)
    __all__.append(_op.name)
del _op

from ._kv_cache import KvBytes, KvCache, KvCounts, aura_config  # noqa: E402  (uses the above)
