"""Writes bittern/__init__.pyi from the op table and the formula at the top of each op's header.

    python tools/make_python_stubs.py            write it
    python tools/make_python_stubs.py --check    is the one in the tree fresh?

`bittern` must be importable: PYTHONPATH=build/release/python, or installed.
"""

import inspect
import pathlib
import sys

import bittern

ROOT = pathlib.Path(__file__).resolve().parent.parent
STUB = ROOT / "python" / "bittern" / "__init__.pyi"

HEAD = '''# Made by tools/make_python_stubs.py.
"""{doc}"""

from typing import Any, Literal, Protocol, SupportsFloat

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
from ._kv_cache import (
    KvBytes as KvBytes,
    KvCache as KvCache,
    KvCounts as KvCounts,
    aura_config as aura_config,
)

__all__ = {names}
__version__: str

class _Array(Protocol):
    """An array of numpy, mlx, torch or any library that speaks DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

class _CudaStream(Protocol):
    """torch.cuda.Stream, or any object with `__cuda_stream__`."""

    def __cuda_stream__(self) -> tuple[int, int]: ...

_Stream = int | _CudaStream  # an int is a cudaStream_t

_DType = Literal["f32", "f64", "f16", "bf16", "u8", "s8", "s32", "u32"] | Any  # numpy's, torch's, mlx's

_Device = str | Any  # "cpu", "cuda", "cuda:1", or a torch.device

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

class Operand:
    """A tensor of an op."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
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


def field_type(field):
    if field.choices == ("false", "true"):
        return "bool"
    if "f32" in field.choices:
        return "_DType"
    if field.choices:
        return "Literal[" + ", ".join(f'"{c}"' for c in field.choices) + "]"
    return "float" if isinstance(field.default, float) else "int"


def stub(function):
    body = function._body
    optional = {o.name for o in body.outputs if o.optional}
    lines = [f"def {function.__name__}("]
    star = False
    for name, kind, default in body.parameters():
        if kind != "input" and not star:
            lines.append("    *,")
            star = True
        if kind == "input":
            kinds = "_Array | SupportsFloat"
        elif kind == "output":
            kinds = "_Array | bool" if name in optional else "_Array"
        elif kind == "field":
            kinds = field_type(body.fields[name])
        else:
            kinds = OPTIONS[name]
        if default is inspect.Parameter.empty:
            lines.append(f"    {name}: {kinds},")
            continue
        if default is None and "None" not in kinds:
            kinds += " | None"
        text = f'"{default}"' if isinstance(default, str) else str(default)
        lines.append(f"    {name}: {kinds} = {text},")
    always_several = len(body.outputs) - len(optional) > 1  # a single one is no tuple
    lines.append(f") -> {'tuple[Any, ...]' if always_several else 'Any'}:")
    returns = ", ".join(o.name for o in body.outputs)
    lines.append(f'    """Returns {returns}.\n\n{formula(function.__name__)}\n    """')
    return "\n".join(lines) + "\n"


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
