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
             merged into that one.
  dtypes     `element`, `code`, `f32_scale` and their like follow the arrays given.
  outputs    those not given are allocated by the framework of the first array; `False` leaves an
             optional one out. They are returned in the op's order, as a tuple if several. An
             operand that is read and then written is given, and not returned.
  numbers    a Python number given for an input fills it.
  device     that of the first array.
  stream     on CUDA, an int (cudaStream_t) or a stream of torch's; by default torch's current one.
             Another stream first waits for what the current one has to do; the results belong to
             it, as if made under torch.cuda.stream().

Tables of the KV codec come from `sphere_codebook`, `gaussian_codebook` and `make_rotation`:

    levels, boundaries = bittern.sphere_codebook(dim=128, bits=4)
    signs = bittern.make_rotation("hadamard", dim=128, seed=1)
    packed, norms = bittern.aura_encode(k, signs, boundaries, levels)

`plan` is the layer below: every field said, nothing inferred, nothing allocated but scratch.

Errors: ValueError (malformed), NotImplementedError (no kernel does it), MemoryError, RuntimeError.
"""

import functools as _functools
import inspect as _inspect
import itertools as _itertools
import math as _math
import os as _os
import types as _types

from . import _cuda
from ._bittern import (
    Field,
    Op,
    Operand,
    Plan,
    PrecisionGuarantee,
    Sku,
    __version__,
    gaussian_codebook,
    make_rotation,
    num_threads,
    ops,
    set_num_threads,
    sphere_codebook,
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
    "gaussian_codebook",
    "make_rotation",
    "num_threads",
    "ops",
    "plan",
    "set_num_threads",
    "sphere_codebook",
]


def plan(op, *, device="cpu", preference="exact", kernel=None, **fields):
    """The kernel for one problem, ready to run any number of times.

    `fields` are the op's descriptor (see `ops()`); `kernel` narrows the choice to one name.
    """
    return _make_desc(op, fields.items()).select(device, preference, kernel)


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


def _make_desc(op, fields):
    desc = _Desc(op)
    for field, value in fields:
        desc.set(field, value)
    return desc


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
        """Sets the sizes; returns the shape of an output, made from the plan's operand."""
        layout, length = found
        rows, axes = self.find(tensors, layout, length, fields, given)
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

        return output_shape

    def find(self, tensors, layout, length, fields, given):
        """The axes before and from the quantised one on."""
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
                return rows, axes
        if given.get("axis_size") is not None:
            name, tensor = next((n, t) for n, t in tensors.items() if n in layout)
            return tensor.shape[:-1], (given["axis_size"],)
        raise ValueError(f"{self.op}: no array given tells the length of a row")


class _NamedSizes:
    """Sizes that are axes of the operands, found by trying two numbers for each field.

    An axis that is then the number plus c is the field plus c. A field with c > 0 (sequences, of
    which n need n + 1 offsets) comes from such axes alone, and keeps its default without them; so
    does a field without which an array already has the right shape. A field that changes how many
    axes there are is a choice, not a size: it is given or has its default.
    """

    PROBES = 1009, 2003

    def __init__(self, op, inputs):
        self.op = op.name
        self.names = ()
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
        """[(operand, its number of axes, axis, c)] of the axes that are `field` + c."""
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
                c = a - self.PROBES[0]
                if a != b and c == b - self.PROBES[1] and abs(c) <= 1:
                    found.append((name, len(first), axis, c))
        return found

    def set(self, desc, tensors, _, fields, given):
        trial = self.safe(desc, fields)
        free = [n for n in self.sizes if n not in fields]
        merged = {}  # a field, and the axes of an array that it counts together
        for counted in (True, False):
            for field in free:
                axes = self.axes_of(trial, field)
                if any(c > 0 for *_, c in axes) != counted:
                    continue
                shapes = {o.name: o.shape for o in trial.unchecked_operands()}
                for name, count, axis, c in axes:
                    shape = tensors[name].shape if name in tensors else ()
                    if (counted and c <= 0) or len(shape) < count:
                        continue
                    if shape == shapes[name]:
                        break
                    extra = len(shape) - count
                    lead, rest = shape[: extra + 1], shape[extra + 1 :]
                    if axis == 0 and extra > 0:
                        merged[field] = lead
                    value = (_math.prod(lead), *rest)[axis] - c
                    desc.set(field, value)
                    if 0 < value < 2**31:
                        trial.set(field, value)
                    break
        leading = {n: f for f in merged for n, _, axis, c in self.axes_of(trial, f) if axis == c == 0}

        def output_shape(operand):
            field = leading.get(operand.name)
            return merged[field] + operand.shape[1:] if field else operand.shape

        return output_shape


class _Function:
    """Runs one op on arrays; made from the op's table alone."""

    def __init__(self, op):
        self.op = op
        self.fields = {f.name: f for f in op.fields}
        self.inputs = [o for o in op.operands if not o.output or o.in_out]
        self.outputs = [o for o in op.operands if o.output and not o.in_out]
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
        output_shape = self.sizes.set(desc, tensors, found, given_fields, dict(options))
        chosen = desc.select(*selection)
        return chosen, {o.name: output_shape(o) for o in chosen.operands if o.output}

    def run(self, given):
        op = self.op.name
        where = {o.name: f"{op}: {o.name}" for o in self.op.operands}
        written = {o.name for o in self.op.operands if o.output}
        arrays = {
            name: given[name]
            for name in where
            if given.get(name) is not None and given.get(name) is not False
        }
        numbers = {n: a for n, a in arrays.items() if isinstance(a, (int, float))}
        for name in numbers:
            del arrays[name]
            if name in written:
                raise ValueError(f"{where[name]}: {numbers[name]}, expected an array or False")
        stream = _cuda.stream_handle(given["stream"], arrays.values())
        tensors = {n: _Tensor(where[n], a, n in written, stream) for n, a in arrays.items()}
        if not tensors:
            raise ValueError(f"{op}: no arrays, expected at least one")

        first, like = next(iter(arrays.items()))
        like_device = tensors[first].device
        device = given["device"] or like_device
        names = self.sizes.names
        problem = (
            tuple((n, given[n]) for n in self.fields if n not in names and given[n] is not None),
            tuple((n, t.dtype, t.shape) for n, t in tensors.items()),
            tuple((n, given[n]) for n in ("axis", "axis_size") if n in given),
            (device, given["preference"], given["kernel"]),
        )
        read_by_select = num_threads(), _os.environ.get("BITTERN_KERNEL")
        chosen, output_shapes = self.choose(problem, read_by_select)

        # A CUDA array that is not torch's brings no way to make another.
        can_allocate = like_device == "cpu" or _cuda.torch_of(like) is not None
        operands, results = {}, []
        for o in chosen.operands:
            made = o.output and not o.in_out
            left_out = o.optional and given.get(o.name) is False
            if o.name in numbers or (made and o.name not in arrays and not left_out):
                if not can_allocate:
                    raise NotImplementedError(
                        f"{where[o.name]}: no array, and on {like_device} only torch's are made"
                    )
                shape = o.shape if o.name in numbers else output_shapes[o.name]
                with _cuda.allocating_for(like, stream):
                    arrays[o.name] = _new_array(like, shape, o.dtype, numbers.get(o.name))
            if o.name in arrays:
                tensor = tensors.pop(o.name, None) or _Tensor(
                    where[o.name], arrays[o.name], o.output, stream
                )
                operands[o.name] = tensor.merge_axes(where[o.name], o.shape)
                if made:
                    results.append(arrays[o.name])
        operands.update(tensors)  # operands this problem does not have: the plan names them
        workspace = given["workspace"]
        if workspace is None and device != "cpu" and chosen.workspace_bytes:
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
