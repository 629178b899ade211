"""Writes bittern/__init__.pyi from the op table and the formula at the top of each op's header.

    python tools/make_python_stubs.py            write it
    python tools/make_python_stubs.py --check    is the one in the tree fresh?

`bittern` must be importable: PYTHONPATH=build/release/python, or installed.
"""

import inspect
import pathlib
import sys

import bittern
from bittern._bittern import Desc
from bittern._values import DTYPES

ROOT = pathlib.Path(__file__).resolve().parent.parent
STUB = ROOT / "python" / "bittern" / "__init__.pyi"

HEAD = '''# Made by tools/make_python_stubs.py.
"""{doc}"""

from typing import Any, Literal, Protocol, SupportsFloat, overload

from ._convert import (
    Cancelled as Cancelled,
    GroupDifference as GroupDifference,
    ModelComparison as ModelComparison,
    ModelDescription as ModelDescription,
    ModelProgress as ModelProgress,
    QuantizeReport as QuantizeReport,
    QuantizedTensor as QuantizedTensor,
    StorageTotal as StorageTotal,
    TensorDescription as TensorDescription,
    TensorDifference as TensorDifference,
    compare_models as compare_models,
    inspect_model as inspect_model,
    quantize_model as quantize_model,
)
from ._decoding import rope_frequencies as rope_frequencies, sample as sample
from ._kv_cache import (
    KvBytes as KvBytes,
    KvCache as KvCache,
    KvCounts as KvCounts,
    aura_config as aura_config,
)
from ._model import (
    Model as Model,
    ModelInfo as ModelInfo,
    Session as Session,
    SessionBytes as SessionBytes,
    load as load,
)
from ._tokenizer import TokenStream as TokenStream, Tokenizer as Tokenizer

__all__ = {names}
__version__: str

class _Array(Protocol):
    """An array of numpy, mlx, torch or any library that speaks DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

class _CudaStream(Protocol):
    """torch.cuda.Stream, or any object with `__cuda_stream__`."""

    def __cuda_stream__(self) -> tuple[int, int]: ...

_Stream = int | _CudaStream  # an int is a cudaStream_t

class _Sized(Protocol):
    """numpy.dtype or torch.dtype."""

    @property
    def itemsize(self) -> int: ...

class _MlxDtype(Protocol):
    @property
    def size(self) -> int: ...

_DType = type[Any] | _Sized | _MlxDtype  # numpy.float16, numpy.dtype, torch.float16, mlx's

class _TorchDevice(Protocol):
    @property
    def type(self) -> str: ...
    @property
    def index(self) -> Any: ...

_Device = str | _TorchDevice  # "cpu", "cuda", "cuda:1", or a torch.device

_Result = Any  # an array of the first array's framework

class Field:
    """A field of an op's descriptor: a number, or one of `choices`."""

    @property
    def name(self) -> str: ...
    @property
    def help(self) -> str: ...
    @property
    def choices(self) -> tuple[str, ...]: ...
    @property
    def default(self) -> int | float | bool | str: ...
    @property
    def is_dtype(self) -> bool:
        """The choices are dtypes."""
    @property
    def decides_dtype(self) -> bool:
        """The dtypes of operands follow from it."""
    @property
    def is_size(self) -> bool:
        """An axis of an operand tells it."""

class Operand:
    """A tensor of an op."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def axes(self) -> tuple[str, ...]:
        """What each axis is: a field, an expression of fields, a number, or a name of its own."""
    @property
    def output(self) -> bool: ...
    @property
    def optional(self) -> bool: ...
    @property
    def in_out(self) -> bool:
        """Read, then written."""
    @property
    def unread_without(self) -> str | None:
        """What would have it read, where the descriptor does not."""
    @property
    def read_with(self) -> str | None:
        """What has it read, where that depends on a field."""
    @property
    def extra(self) -> bool:
        """An output that is made only when asked for."""

class Op:
    @property
    def name(self) -> str: ...
    @property
    def category(self) -> str: ...
    @property
    def backends(self) -> tuple[str, ...]: ...
    @property
    def fields(self) -> tuple[Field, ...]: ...
    @property
    def operands(self) -> tuple[Operand, ...]:
        """All that any descriptor can ask for, with the shapes of the default one."""

class Sku:
    """What exactly a plan chose."""

    @property
    def category(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def element(self) -> str: ...
    @property
    def aux_element(self) -> str: ...
    @property
    def architecture(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def kernel(self) -> str: ...

class PrecisionGuarantee:
    @property
    def math_precision(self) -> str: ...
    @property
    def accumulator(self) -> str: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def bit_stable_on_same_hardware(self) -> bool: ...
    @property
    def same_bits_on_all_backends(self) -> bool: ...
    @property
    def error_norm(self) -> str: ...
    @property
    def error_bound(self) -> float: ...

class Plan:
    """A kernel for one problem. Threads may share it."""

    def run(
        self,
        *,
        stream: _Stream | None = None,
        workspace: _Array | None = None,
        **operands: _Array | None,
    ) -> None:
        """Runs on `operands`, outputs included; the GIL is free meanwhile.

        `stream` is read by a CUDA plan: by default torch's current one if an operand is torch's,
        else the default stream. Without `workspace` (64-byte aligned, at least `workspace_bytes`) a
        CPU plan takes its own, and a CUDA plan with an operand of torch's takes it from torch.
        """
    def can_implement(self, **operands: _Array | None) -> None:
        """Raises what `run` would raise about the operands."""
    @property
    def sku(self) -> Sku: ...
    @property
    def precision_guarantee(self) -> PrecisionGuarantee: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def num_groups(self) -> int:
        """Groups along the axis; 0 for an op without groups."""
    @property
    def device(self) -> str: ...
    @property
    def operands(self) -> tuple[Operand, ...]:
        """The dtype and shape of each operand of this problem."""

def ops() -> list[Op]: ...
def num_threads() -> int: ...
def set_num_threads(threads: int) -> None:
    """Threads a CPU kernel may use; results never depend on it. Below 1: the default."""

def sphere_codebook(dim: int, bits: int) -> tuple[Any, Any]:
    """Levels and boundaries of the codebook with the least error for rows of `dim`, f32 numpy."""

def gaussian_codebook(dim: int, bits: int) -> tuple[Any, Any]:
    """The same in the limit of large `dim`."""

def make_rotation(
    rotation: Literal["identity", "hadamard", "dense"], dim: int, seed: int = 0
) -> Any:
    """The table of a rotation, f32 numpy: signs, a matrix, or None for identity."""

def plan(
    op: str,
    *,
    device: _Device = "cpu",
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    **fields: float | str | _DType,
) -> Plan:
    """{plan_doc}"""
'''

OPTIONS = {
    "axis": "int",
    "device": "_Device | None",
    "preference": 'Literal["exact", "fastest"]',
    "kernel": "str | None",
    "threads": "int",
    "stream": "_Stream | None",
    "workspace": "_Array | None",
}


def formula(op):
    """The comment that opens the op's header."""
    lines = []
    for line in (ROOT / "include" / "bittern" / "ops" / f"{op}.h").read_text().splitlines():
        if not line.startswith("//"):
            return "\n".join(f"    {line}".rstrip() for line in lines)
        lines.append(line[3:].replace("\\", "\\\\"))
    raise ValueError(f"{op}.h: no code after the comment")


def literal(values):
    return "Literal[" + ", ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in values) + "]"


def field_type(field):
    if field.choices == ("false", "true"):
        return "bool"
    if field.is_dtype:
        return literal([*field.choices, *(DTYPES[c] for c in field.choices)]) + " | _DType"
    if field.choices:
        return literal(field.choices)
    return "float" if isinstance(field.default, float) else "int"


def outputs_by_choice(op, body):
    """[(field, values, names)]: the outputs for each choice that another set of them goes with."""
    names = [o.name for o in body.outputs]

    def made(*setting):
        desc = Desc(op)
        for value in setting:
            desc.set(*value)
        return [n for n in names if n in {o.name for o in desc.unchecked_operands()}]

    default = made()
    for field in body.fields.values():
        values = [False, True] if isinstance(field.default, bool) else field.choices
        other = [v for v in values if made((field.name, v)) != default]
        if other:
            same = [v for v in values if v not in other]
            return [(field.name, same, default), (field.name, other, made((field.name, other[0])))]
    return [(None, (), default)]


def returned(names):
    if len(names) < 2:
        return "_Result" if names else "None"
    return f"tuple[{', '.join(['_Result'] * len(names))}]"


def variants(function):
    """({parameter: its type}, the type returned) of each overload; the last takes everything."""
    body = function._body
    optional = [o.name for o in body.outputs if o.optional and not o.extra]
    extra = [o.name for o in body.outputs if o.extra]
    found = []
    for field, values, names in outputs_by_choice(function.__name__, body):
        types = {n: "_Array | Literal[True] | None" for n in optional}
        types |= {n: "Literal[False] | None" for n in extra}
        if field is not None:
            types[field] = literal(values)
        plain = [n for n in names if n not in extra]
        found.append((types, returned(plain)))
        for name in extra:
            found.append(({**types, name: "_Array | Literal[True]"}, returned([*plain, name])))
    if len(found) > 1 or optional:
        found.append(({}, "Any"))
    return found


def signature(function, types, result, text):
    body = function._body
    optional = {o.name for o in body.outputs if o.optional}
    lines = [f"def {function.__name__}("]
    star = False
    for name, kind, default in body.parameters():
        if kind != "input" and not star:
            lines.append("    *,")
            star = True
        if name in types:
            kinds = types[name]
        elif kind == "input":
            kinds = "_Array | SupportsFloat"
        elif kind == "output":
            kinds = "_Array | bool" if name in optional else "_Array"
        elif kind == "field":
            kinds = field_type(body.fields[name])
        else:
            kinds = OPTIONS[name]
        value = f'"{default}"' if isinstance(default, str) else str(default)
        required = default is inspect.Parameter.empty
        if name in types and not required and kinds.startswith("Literal[") and value not in kinds:
            required = default is not None or "None" not in kinds
        if name in types and kinds == "_Array | Literal[True]":
            required = True
        if required:
            lines.append(f"    {name}: {kinds},")
            continue
        if default is None and "None" not in kinds:
            kinds += " | None"
        lines.append(f"    {name}: {kinds} = {value},")
    lines.append(f") -> {result}:{text}")
    return "\n".join(lines) + "\n"


def stub(function):
    updated = ", ".join(o.name for o in function._body.inputs if o.output)
    returns = ", ".join(o.name for o in function._body.outputs) or f"nothing; updates {updated}"
    text = f'\n    """Returns {returns}.\n\n{formula(function.__name__)}\n    """'
    all_of_them = variants(function)
    if len(all_of_them) == 1:
        return signature(function, *all_of_them[0], text)
    return "\n".join(
        "@overload\n" + signature(function, types, result, text if i == 0 else " ...")
        for i, (types, result) in enumerate(all_of_them)
    )


def make():
    names = "[\n" + "".join(f'    "{n}",\n' for n in bittern.__all__) + "]"
    text = HEAD.replace("{doc}", bittern.__doc__).replace("{names}", names)
    text = text.replace("{plan_doc}", bittern.plan.__doc__)
    return "\n".join([text, *(stub(getattr(bittern, op.name)) for op in bittern.ops())])


def main():
    text = make()
    if "--check" not in sys.argv[1:]:
        STUB.write_text(text)
        return 0
    fresh = STUB.exists() and STUB.read_text() == text
    print(f"{STUB.name}: {'fresh' if fresh else 'stale: run tools/make_python_stubs.py'}")
    return 0 if fresh else 1


if __name__ == "__main__":
    sys.exit(main())
