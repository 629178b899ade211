"""One function per op, made from the op's table alone."""

import functools
import inspect
import itertools
import math
import os
import pathlib
import re
import sys

from . import _cuda
from ._arrays import INTEGERS, copied, needs_copy, new_array
from ._bittern import Desc, Tensor, num_threads, ops
from ._sizes import QUANTISED, Axes, Sizes, parse
from ._values import (
    DTYPES,
    field_value,
    fill_value,
    integer,
    integer_of_bits,
    is_bool,
    is_number,
    text,
    wrong_arguments,
)

_FLOAT64_HINT = "; numpy's default is float64: pass float32"


def _dtype_hint(name, array, found, wanted):
    """How to make an array of integers one of the integers that an operand takes."""
    if (found, wanted) == ("f64", "f32"):
        return _FLOAT64_HINT
    if found not in INTEGERS or wanted not in INTEGERS:
        return ""
    theirs = DTYPES[wanted]
    if _cuda.torch_of(array):
        return f"; pass {name}.to(torch.{theirs})"
    module = "mx" if type(array).__module__.partition(".")[0] == "mlx" else "np"
    return f"; pass {name}.astype({module}.{theirs})"


@functools.cache
def fields_of(op):
    return {f.name: f for o in ops() if o.name == op for f in o.fields}


def selection(op, device, preference, kernel, threads):
    """What a plan's choice is made from, besides the problem; torch's devices have a name."""
    if isinstance(device, getattr(sys.modules.get("torch"), "device", ())):
        device = str(device)
    options = (
        ("device", device, "'cpu', 'cuda' or 'cuda:N'"),
        ("preference", preference, "'exact' or 'fastest'"),
        ("kernel", "any" if kernel is None else kernel, "the name of a kernel"),
    )
    for name, value, expected in options:
        if not isinstance(value, str) or not value:
            raise ValueError(f"{op}: {name}: {value!r}, expected {expected}")
    kernel = None if kernel is None else text(kernel)
    threads = integer_of_bits(f"{op}: threads", threads, 32)
    return text(device), text(preference), kernel, threads


def make_desc(op, fields):
    if not isinstance(op, str):
        raise ValueError(f"op: {op!r}, expected the name of an op")
    desc = Desc(text(op))
    known = fields_of(op)
    for name, value in fields:
        desc.set(name, field_value(op, known[name], value) if name in known else 0)
    return desc


@functools.lru_cache(maxsize=1024)
def _infer_dtypes(op, fields, free, dtypes):
    """The values of the fields `free` with which the op reads the arrays given, and most of them
    have the dtype that their operand wants.

    It raises where the op knows no such values, and where several would do as well.
    """
    desc = make_desc(op, fields)
    tried = []
    for field in free:
        rest = field.choices
        if field.is_dtype:
            rest = [c for c in rest if c in dict(dtypes).values()]
        tried.append(tuple(dict.fromkeys((field.default, *rest))))
    best, best_rank, refusal, refused_rank = [], (-math.inf,), None, (-math.inf,)
    for values in itertools.product(*tried):
        for field, value in zip(free, values):
            desc.set(field.name, value)
        operands = {o.name: o for o in desc.unchecked_operands()}
        given = [(operands[name], dtype) for name, dtype in dtypes if name in operands]
        read = sum(o.unread_without is None for o, _ in given)
        rank = read, sum(o.dtype == dtype for o, dtype in given)
        try:
            desc.operands()
        except (ValueError, NotImplementedError) as error:  # perhaps not a combination the op knows
            if rank > refused_rank:
                refusal, refused_rank = error, rank
            continue
        if rank > best_rank:
            best, best_rank = [], rank
        if rank == best_rank:
            best.append(values)
        if rank == (len(dtypes), len(dtypes)) and values == tuple(f.default for f in free):
            break
    # Values that nobody gave must not leave an array unread where others would read it.
    if not best or refused_rank[0] > best_rank[0]:
        raise refusal
    if best_rank == (len(dtypes), len(dtypes)):
        for i, field in enumerate(free):
            choices = list(dict.fromkeys(values[i] for values in best))
            if len(choices) > 1 and field.default not in choices:
                raise ValueError(
                    f"{op}: {field.name}: not given, and the arrays do not tell it, expected one of "
                    f"{' '.join(choices)}"
                )
    return best[0]


def _alternatives(op):
    """The inputs that some choice of a field, or a size that is not 0, replaces by others."""
    unread = lambda operands: {o.name for o in operands if o.unread_without is not None}
    usual = unread(op.operands)
    found = set()
    for field in op.fields if usual else ():
        for choice in field.choices or ((1,) if field.is_size else ()):
            desc = Desc(op.name)
            desc.set(field.name, choice)
            now = unread(desc.unchecked_operands())
            if usual - now:
                found |= now - usual
    return found


class Function:
    """Runs one op on arrays."""

    def __init__(self, op):
        self.op = op
        self.fields = {f.name: f for f in op.fields}
        self.sizes = {f.name: f.default for f in op.fields if f.is_size}
        self.integers = {
            f.name: f.default for f in op.fields if not f.choices and isinstance(f.default, int)
        }
        self.has_axis = "inner_size" in self.fields
        self.inputs = [o for o in op.operands if not o.output or o.in_out]
        self.outputs = [o for o in op.operands if o.output and not o.in_out]
        self.alternatives = _alternatives(op)
        self.where = {o.name: f"{op.name}: {o.name}" for o in op.operands}
        # The sizes that some array tells in most problems; in others they have to be said. Those of
        # outputs alone are a choice, with a default.
        self.told = {n for o in self.inputs if not o.optional for n in _size_names(o)} & set(
            self.sizes
        )
        self._remembered = functools.lru_cache(maxsize=1024)(self._choose)

    def parameters(self):
        """(name, kind, default) of each parameter; kind is input, output, field or option."""
        may_lack = lambda o: o.optional or o.name in self.alternatives
        for o in sorted(self.inputs, key=may_lack):
            yield o.name, "input", None if may_lack(o) else inspect.Parameter.empty
        for o in self.outputs:
            yield o.name, "output", None
        for f in self.fields.values():
            yield f.name, "field", None if f.decides_dtype or f.is_size else f.default
        if self.has_axis:
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
        fields, described, filled, axis, selected = problem
        op, given = self.op.name, dict(fields)
        desc = make_desc(op, fields)
        # What operands there are, their dtypes and the names of their axes: all that follows from
        # choices, and from which sizes are not 0.
        table = Desc(op)
        for name, value in fields:
            if self.fields[name].choices:
                table.set(name, value)
            elif name in self.sizes:
                table.set(name, int(value > 0))
        free = tuple(f for n, f in self.fields.items() if n not in given and f.decides_dtype)
        rules = tuple((n, v) for n, v in fields if n not in self.sizes)
        dtypes = tuple((name, dtype) for name, dtype, _ in described)
        for field, value in zip(free, _infer_dtypes(op, rules, free, dtypes)):
            desc.set(field.name, value)
            table.set(field.name, value)
        shapes = {n: shape for n, _, shape in described}
        sizes = self._find_sizes(table, shapes, filled, given, axis)
        for field, value in sizes.found.items():
            desc.set(field, value)
        try:
            chosen = desc.select(*selected)
        except (ValueError, NotImplementedError) as error:
            hint = _FLOAT64_HINT if "element: f64" in str(error) else ""
            for field, source in sizes.source.items():  # nobody said these numbers
                if re.search(rf"\b{field}\b", str(error)):
                    hint += f"; {field} is from {source.operand}, shape {list(source.shape)}"
            raise type(error)(f"{error}{hint}") from None
        return chosen, {o.name: sizes.output_shape(o) for o in chosen.operands if o.output}

    def _find_sizes(self, table, shapes, filled, given, axis):
        op = self.op.name
        for o in table.unchecked_operands():
            # An array that is read only where a size is not 0 says that it is not.
            switch = o.unread_without
            if o.name in shapes and switch in self.sizes and switch not in given:
                table.set(switch, int(0 not in shapes[o.name]))
        operands = table.unchecked_operands()
        arrays = []
        for o in operands:
            if o.name not in shapes or o.unread_without is not None:
                continue
            shape, at = shapes[o.name], None
            if axis is not None and o.axes[:2] == QUANTISED:
                if not -len(shape) <= axis < len(shape):
                    raise ValueError(f"{op}: {o.name}: shape {list(shape)} has no axis {axis}")
                at = axis % len(shape)
            arrays.append(Axes(o, shape, at))
        known = {n: v for n, v in given.items() if n in self.integers}
        sizes = Sizes(self.sizes, self.integers, known, arrays)
        if (few := sizes.too_few_axes()) is not None:
            axes = "axis" if len(few.names) == 1 else "axes"
            raise ValueError(
                f"{op}: {few.operand}: shape {list(few.shape)}, expected {len(few.names)} {axes}: "
                f"[{', '.join(few.names)}]"
            )
        full = sizes.full
        if full is not None and full.lengths[2] != 1 and given.get("granularity") != "channel":
            raise ValueError(
                f"{op}: axis: {axis} of shape {list(full.shape)}, expected the last axis, along "
                "which groups and tokens lie, or granularity channel"
            )
        needed = {n for o in operands if not o.optional for n in _size_names(o)}
        if sizes.value("page_size"):  # no array but the table of pages has an axis for it
            needed.add("capacity")
        for name in self.sizes:
            if name in needed and sizes.is_free(name) and (
                self.sizes[name] == 0 or name in self.told
            ):
                for o in operands:
                    if not (o.optional or o.output or o.name in shapes or o.name in filled):
                        unread = [o for o in operands if o.name in shapes and o.unread_without]
                        raise ValueError(f"{op}: {_missing(o, unread)}")
                raise ValueError(f"{op}: {name}: no array given tells it, expected {name}=")
        return sizes

    def check(self, operand, tensor, array):
        """Says what is wrong with an array where more is known about it than the plan knows."""
        where = self.where[operand.name]
        if operand.unread_without is not None:
            return tensor  # as the plan says
        if tensor.dtype != operand.dtype:
            hint = _dtype_hint(operand.name, array, tensor.dtype, operand.dtype)
            raise ValueError(
                f"{where}: dtype {tensor.dtype}, expected {operand.dtype} {_axes(operand)}{hint}"
            )
        merged = tensor.merge_axes(where, operand)
        if tensor.shape == () and not operand.output and not merged.fits(operand):
            raise ValueError(
                f"{where}: shape [], expected {_axes(operand)}; a number would fill it"
            )
        return merged

    def run(self, given):
        op, where = self.op.name, self.where
        written = {o.name for o in self.op.operands if o.output}
        made = {o.name for o in self.outputs}
        for o in self.outputs:
            if is_bool(given.get(o.name)):
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
        numbers = {n: a for n, a in arrays.items() if is_number(a)}
        for name in numbers:
            del arrays[name]
            if name in written:
                may = " or False" if any(o.name == name and o.optional for o in self.outputs) else ""
                raise ValueError(f"{where[name]}: {numbers[name]}, expected an array{may}")
        stream = _cuda.stream_handle(given["stream"], arrays.values(), op)
        tensors = {n: Tensor(where[n], a, n in written, stream) for n, a in arrays.items()}
        if not tensors:
            names = " ".join(o.name for o in self.inputs)
            raise ValueError(f"{op}: no arrays, expected at least one of {names}")

        first, like = next(iter(arrays.items()))
        like_device = tensors[first].device
        for name, tensor in tensors.items():
            can_copy = tensor.device == "cpu" or _cuda.torch_of(arrays[name]) is not None
            if name not in written and can_copy and needs_copy(name, tensor):
                with _cuda.allocating_for(arrays[name], stream):
                    arrays[name] = copied(where[name], name, arrays[name], tensor.dtype)
                tensors[name] = Tensor(where[name], arrays[name], False, stream)
        device = like_device if given["device"] is None else given["device"]
        selected = selection(
            op, device, given["preference"], given["kernel"], given["threads"]
        )
        problem = (
            tuple(
                (n, field_value(op, f, given[n]))
                for n, f in self.fields.items()
                if given[n] is not None
            ),
            tuple((n, t.dtype, t.shape) for n, t in tensors.items()),
            tuple(numbers),
            integer(f"{op}: axis", given["axis"]) if self.has_axis else None,
            selected,
        )
        read_by_select = num_threads(), os.environ.get("BITTERN_KERNEL")
        chosen, output_shapes = self.choose(problem, read_by_select)

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
                    value = fill_value(where[o.name], o.dtype, numbers[o.name])
                with _cuda.allocating_for(like, stream):
                    arrays[o.name] = new_array(like, shape, o.dtype, value)
            if o.name in arrays:
                tensor = tensors.pop(o.name, None) or Tensor(
                    where[o.name], arrays[o.name], o.output, stream
                )
                operands[o.name] = self.check(o, tensor, arrays[o.name])
                if is_made:
                    results.append(arrays[o.name])
        asked = {n for n in made if given.get(n) is True} | set(numbers)
        for name in asked - {o.name for o in chosen.operands}:
            raise ValueError(
                f"{where[name]}: given, but this problem has no such operand; leave it out"
            )
        operands.update(tensors)  # operands this problem does not have: the plan names them
        workspace = given["workspace"]
        if workspace is None and selected[0] != "cpu" and chosen.workspace_bytes:
            workspace = _cuda.new_workspace(arrays.values(), chosen.workspace_bytes, stream)
        chosen.run(stream=stream, workspace=workspace, **operands)
        _cuda.keep_until_done(arrays.values(), stream)
        # An op that only updates what it is given returns nothing.
        return results[0] if len(results) == 1 else tuple(results) or None


def _axes(operand):
    """An operand's shape and what its axes are, as the library's errors write them."""
    shape, names = (",".join(map(str, s)) for s in (operand.shape, operand.axes))
    return f"[{shape}] = [{names}]"


def _missing(operand, unread):
    """What to say of an array that was not given, beside others that are not read."""
    text = f"{operand.name}: missing, expected {operand.dtype} [{','.join(operand.axes)}]"
    if operand.read_with:
        text += f", which is read with {operand.read_with}"
    for other in unread:
        text += f"; {other.name} is read only with {other.unread_without}"
    return text


def _size_names(operand):
    """The fields that the names of an operand's axes begin with."""
    return [term[0] for term in map(parse, operand.axes) if term]


@functools.cache
def _formulas():
    """What the package's stub says about each op: the formula that its header opens with."""
    try:
        stub = pathlib.Path(__file__).with_name("__init__.pyi").read_text(encoding="utf-8")
    except OSError:
        return {}
    found = {}
    for part in re.split(r"^(?=def |@overload)", stub, flags=re.M):
        match = re.match(r'(?:@overload\n)?def (\w+)\(.*?"""(.*?)"""', part, re.S)
        if match:
            found[match[1]] = re.sub(r"^    ", "", match[2], flags=re.M).strip()
    return found


def make_function(op, module):
    body = Function(op)
    signature = inspect.Signature(
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD
            if kind == "input"
            else inspect.Parameter.KEYWORD_ONLY,
            default=default,
        )
        for name, kind, default in body.parameters()
    )

    def function(*args, **kwargs):
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise wrong_arguments(op.name, error, kwargs, signature.parameters) from None
        bound.apply_defaults()
        return body.run(bound.arguments)

    names = [o.name + (" (optional)" if o.optional else "") for o in body.inputs]
    lines = [f"{', '.join(names)} -> {', '.join(o.name for o in body.outputs)}", ""]
    for name, kind, _ in body.parameters():
        if kind == "field":
            lines.append(f"    {name:12} {body.fields[name].help}")
    if op.name in _formulas():
        lines += ["", _formulas()[op.name]]
    function.__doc__ = "\n".join(lines)
    function.__name__ = function.__qualname__ = op.name
    function.__module__ = module
    function.__signature__ = signature
    function._body = body
    return function
