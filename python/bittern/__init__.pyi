# Made by tools/make_python_stubs.py.
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

from typing import Any, Literal, Protocol

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
    "quantize_per_group",
]
__version__: str

class Array(Protocol):
    """An array of numpy, mlx, torch or any library that speaks DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

class Field:
    """A field of an op's descriptor: an integer, or one of `choices`."""

    @property
    def name(self) -> str: ...
    @property
    def help(self) -> str: ...
    @property
    def choices(self) -> tuple[str, ...]: ...
    @property
    def default(self) -> int | bool | str: ...

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

class Plan:
    """A kernel for one problem. Threads may share it."""

    def run(
        self, *, stream: int | None = None, workspace: Array | None = None, **operands: Array | None
    ) -> None:
        """Runs on `operands`, outputs included; the GIL is free meanwhile.

        Without `workspace` (64-byte aligned, at least `workspace_bytes`) a CPU plan takes its own.
        """
    def can_implement(self, **operands: Array | None) -> None:
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

def plan(
    op: str,
    *,
    device: str = "cpu",
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    **fields: int | bool | str,
) -> Plan:
    """The kernel for one problem, ready to run any number of times.

    `fields` are the op's descriptor (see `ops()`); `kernel` narrows the choice to one name.
    """

def quantize_per_group(
    x: Array | float,
    scale: Array | float,
    zero_point: Array | float | None = None,
    *,
    q: Array | None = None,
    group_size: int = 128,
    granularity: Literal["group", "token", "channel", "tensor"] = "group",
    q_min: int = -128,
    q_max: int = 127,
    element: Literal["f32", "f64", "f16", "bf16", "u8", "s8", "s32", "u32"] | None = None,
    code: Literal["f32", "f64", "f16", "bf16", "u8", "s8", "s32", "u32"] | None = None,
    f32_scale: bool | None = None,
    axis: int = -1,
    device: str | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    stream: int | None = None,
    workspace: Array | None = None,
) -> Any:
    """Returns q.

    q = clamp(R(x / s) + zp, q_min, q_max)

    R rounds half to even. The quotient is a true IEEE division in f32 (f64 for f64 x). R(x/s) + zp
    and the clamp are as if exact: an infinite quotient gives q_max or q_min whatever zp. A NaN
    quotient counts as 0, and so does any quotient with s = 0 or s NaN. Negative scales are fine.
    A zero point left out is 0. Which (s, zp) an element uses: see QuantizeDesc.
    """
