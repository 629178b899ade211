"""bittern: quantise, dequantise and their backward passes, the same bits on every backend.

One function per op takes numpy, mlx or torch arrays without copying them:

    q = bittern.quantize_per_group(x, scale, group_size=64)
    scales, biases, q = bittern.qdq_affine_init(w, bits=4, method="mlx", storage="packed")

How a function fills in what it was not told:
  sizes      the array that has the op's full shape gives them: its last axis is the quantised one
             (`axis` moves it, for granularity "channel"), the axes before it are rows. Other
             operands may have those axes merged or not. Packed codes alone do not say how long a
             row is; scales do.
  dtypes     `element`, `code`, `f32_scale` and `storage` follow the arrays given.
  outputs    those not given are allocated by the framework of the first array; `False` leaves an
             optional one out. They are returned in the op's order, as a tuple if several.
  numbers    a Python number given for an input fills it.
  device     that of the first array.

`plan` is the layer below: every field said, nothing inferred, nothing allocated but scratch.

Errors: ValueError (malformed), NotImplementedError (no kernel does it), MemoryError, RuntimeError.
"""

import functools as _functools
import inspect as _inspect
import itertools as _itertools
import math as _math

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
    set_num_threads,
)
from ._bittern import Desc as _Desc
from ._bittern import Tensor as _Tensor

__all__ = [
    "Field",
    "Op",
    "Operand",
    "Plan",
    "PrecisionGuarantee",
    "Sku",
    "__version__",
    "num_threads",
    "ops",
    "plan",
    "set_num_threads",
]


def plan(op, *, device="cpu", preference="exact", kernel=None, **fields):
    """The kernel for one problem, ready to run any number of times.

    `fields` are the op's descriptor (see `ops()`); `kernel` narrows the choice to one name.
    """
    return _make_desc(op, fields.items()).select(device, preference, kernel)


_SIZES = ("outer_size", "axis_size", "inner_size")
_DTYPE_FIELDS = ("element", "code", "storage", "f32_scale")
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
    if framework == "torch":
        import torch

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


def _make_desc(op, fields):
    desc = _Desc(op)
    for field, value in fields:
        desc.set(field, value)
    return desc


def _probe_layout(desc, group_size):
    """Each operand's shape for sizes that show what its axes are, and the length of a row there."""
    length = _GROUPS * group_size if 0 < group_size < 2**40 else _GROUPS
    desc.set("outer_size", _ROWS)
    desc.set("axis_size", length)
    return {o.name: o.shape for o in desc.operands()}, length


@_functools.lru_cache(maxsize=1024)
def _infer(op, fields, free, dtypes):
    """The values of the fields `free` for which most arrays have the dtype their operand wants.

    With them come the operands' shapes and row length of `_probe_layout`.
    """
    desc = _make_desc(op, fields)
    group_size = dict(fields).get("group_size", 1)
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
            layout, length = _probe_layout(desc, group_size)
        except (ValueError, NotImplementedError) as error:
            first_error = first_error or error  # perhaps not a combination the op knows
            continue
        wanted = {o.name: o.dtype for o in desc.operands()}
        matches = sum(dtype == wanted.get(name) for name, dtype in dtypes)
        if matches > best_matches:
            best, best_matches = (values, layout, length), matches
        if matches == len(dtypes):
            break
    if best is None:
        raise first_error
    return best


class _Function:
    """Runs one op on arrays; made from the op's table alone."""

    def __init__(self, op):
        self.op = op
        self.fields = {f.name: f for f in op.fields}
        self.inputs = [o for o in op.operands if not o.output]
        self.outputs = [o for o in op.operands if o.output]
        self.has_inner = "inner_size" in self.fields
        group_size = self.fields["group_size"].default if "group_size" in self.fields else 1
        layout, length = _probe_layout(_Desc(op.name), group_size)
        # An op whose inputs do not show the length of a row must be told.
        self.needs_axis_size = not any(
            layout.get(o.name) in ((_ROWS, length), (_ROWS, _GROUPS)) for o in self.inputs
        )

    def parameters(self):
        """(name, kind, default) of each parameter; kind is input, output, field or option."""
        for o in sorted(self.inputs, key=lambda o: o.optional):
            yield o.name, "input", None if o.optional else _inspect.Parameter.empty
        if self.needs_axis_size:
            yield "axis_size", "field", _inspect.Parameter.empty
        for o in self.outputs:
            yield o.name, "output", None
        for f in self.fields.values():
            if f.name not in _SIZES:
                yield f.name, "field", None if f.name in _DTYPE_FIELDS else f.default
        if self.has_inner:
            yield "axis", "option", -1
        yield "device", "option", None
        yield "preference", "option", "exact"
        yield "kernel", "option", None
        yield "stream", "option", None
        yield "workspace", "option", None

    def run(self, given):
        op = self.op.name
        where = {o.name: f"{op}: {o.name}" for o in self.op.operands}
        outputs = {o.name for o in self.outputs}
        arrays = {
            name: given[name]
            for name in where
            if given.get(name) is not None and given.get(name) is not False
        }
        numbers = {n: a for n, a in arrays.items() if isinstance(a, (int, float))}
        for name in numbers:
            del arrays[name]
            if name in outputs:
                raise ValueError(f"{where[name]}: {numbers[name]}, expected an array or False")
        tensors = {n: _Tensor(where[n], a, n in outputs) for n, a in arrays.items()}
        if not tensors:
            raise ValueError(f"{op}: no arrays, expected at least one")

        fields = {n: given[n] for n in self.fields if n not in _SIZES and given[n] is not None}
        desc = _make_desc(op, fields.items())
        free = tuple(self.fields[n] for n in _DTYPE_FIELDS if n in self.fields and n not in fields)
        dtypes = tuple((n, t.dtype) for n, t in tensors.items())
        values, layout, length = _infer(op, tuple(fields.items()), free, dtypes)
        for field, value in zip(free, values):
            desc.set(field.name, value)
        rows, axes = self.set_sizes(desc, tensors, layout, length, fields, given)
        device = given["device"] or next(iter(tensors.values())).device
        chosen = desc.select(device, given["preference"], given["kernel"])

        like = next(iter(arrays.values()))
        operands, results = {}, []
        for o in chosen.operands:
            if o.name in numbers:
                arrays[o.name] = _new_array(like, o.shape, o.dtype, numbers[o.name])
            elif (
                o.output
                and o.name not in arrays
                and not (o.optional and given.get(o.name) is False)
            ):
                shape = o.shape
                if layout[o.name] == (_ROWS, length):
                    shape = rows + axes
                elif layout[o.name][0] == _ROWS:
                    shape = rows + o.shape[1:]
                arrays[o.name] = _new_array(like, shape, o.dtype)
            if o.name in arrays:
                tensor = tensors.pop(o.name, None) or _Tensor(
                    where[o.name], arrays[o.name], o.output
                )
                operands[o.name] = tensor.merge_axes(where[o.name], o.shape)
                if o.output:
                    results.append(arrays[o.name])
        operands.update(tensors)  # operands this problem does not have: the plan names them
        chosen.run(stream=given["stream"], workspace=given["workspace"], **operands)
        return results[0] if len(results) == 1 else tuple(results)

    def set_sizes(self, desc, tensors, layout, length, fields, given):
        """Sets outer_size, axis_size and inner_size; returns the axes before and from `axis` on."""
        op = self.op.name
        for full in (True, False):  # an array of the full shape, else one with an entry per group
            for name, tensor in tensors.items():
                if layout.get(name) != ((_ROWS, length) if full else (_ROWS, _GROUPS)):
                    continue
                shape = tensor.shape
                axis = given.get("axis", -1) if full else -1
                if not -len(shape) <= axis < len(shape):
                    raise ValueError(f"{op}: {name}: shape {list(shape)} has no axis {axis}")
                axis %= len(shape)
                rows, axes = shape[:axis], shape[axis:]
                if not full:
                    axes = (axes[0] * fields.get("group_size", 1),)
                return self.apply_sizes(desc, rows, axes)
        if given.get("axis_size") is not None:
            name, tensor = next((n, t) for n, t in tensors.items() if n in layout)
            return self.apply_sizes(desc, tensor.shape[:-1], (given["axis_size"],))
        raise ValueError(f"{op}: no array given tells the length of a row")

    def apply_sizes(self, desc, rows, axes):
        desc.set("outer_size", _math.prod(rows))
        desc.set("axis_size", axes[0])
        if self.has_inner:
            desc.set("inner_size", _math.prod(axes[1:]))
        return rows, axes


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
        bound = signature.bind(*args, **kwargs)
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
