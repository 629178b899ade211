# Made by tools/make_python_stubs.py.
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
    "quantize_per_group_backward",
    "dequantize_per_group",
    "dequantize_per_group_backward",
    "fake_quantize_per_group",
    "fake_quantize_per_group_backward",
    "dynamic_quantize",
    "qdq_affine_init",
    "qdq_affine_forward",
    "qdq_affine_backward",
    "pack_codes",
    "unpack_codes",
    "gdn_recompute_w_u",
]
__version__: str

class Array(Protocol):
    """An array of numpy, mlx, torch or any library that speaks DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

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

def quantize_per_group_backward(
    dy: Array | float,
    x: Array | float,
    scale: Array | float,
    zero_point: Array | float | None = None,
    *,
    dx: Array | None = None,
    group_size: int = 128,
    granularity: Literal["group", "token", "channel", "tensor"] = "group",
    q_min: int = -128,
    q_max: int = 127,
    element: Literal["f32", "f64", "f16", "bf16", "u8", "s8", "s32", "u32"] | None = None,
    f32_scale: bool | None = None,
    axis: int = -1,
    device: str | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    stream: int | None = None,
    workspace: Array | None = None,
) -> Any:
    """Returns dx.

    dx = dy / s   where q_min <= R(x / s) + zp <= q_max,   else 0

    The straight-through estimator of quantize_per_group: R(x/s) + zp is the very value the forward
    clamps (NaN quotient counts as 0, the sum is exact), both ends are inside, and dy / s is a true
    division. s = 0 gives 0; s NaN gives dy / s, that is NaN, where zp is in range. In place: dx may
    be dy or x.
    """

def dequantize_per_group(
    q: Array | float,
    scale: Array | float,
    zero_point: Array | float | None = None,
    *,
    y: Array | None = None,
    group_size: int = 128,
    granularity: Literal["group", "token", "channel", "tensor"] = "group",
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
    """Returns y.

    y = (q - zp) * s

    The difference is exact (a 33-bit integer) and the product is rounded once, to f32 (f64 for f64);
    half y then takes one more rounding to its dtype, to nearest even. A zero point left out is 0.
    """

def dequantize_per_group_backward(
    dy: Array | float,
    q: Array | float,
    scale: Array | float,
    zero_point: Array | float | None = None,
    *,
    dq: Array | Literal[False] | None = None,
    d_scale: Array | Literal[False] | None = None,
    group_size: int = 128,
    granularity: Literal["group", "token", "channel", "tensor"] = "group",
    element: Literal["f32", "f64", "f16", "bf16", "u8", "s8", "s32", "u32"] | None = None,
    code: Literal["f32", "f64", "f16", "bf16", "u8", "s8", "s32", "u32"] | None = None,
    f32_scale: bool | None = None,
    axis: int = -1,
    device: str | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    stream: int | None = None,
    workspace: Array | None = None,
) -> tuple[Any, ...]:
    """Returns dq, d_scale.

    dq = dy * s        d_scale = sum of dy * (q - zp) over the elements that share the scale

    q - zp is exact and each product is rounded once, to f32 (f64 for f64). The sum is the halving
    tree over GroupGeometry's order: pad with +0 to a power of two n, then add the element n/2, n/4,
    ... 1 away; a scale without elements gets 0. dq has y's dtype (codes are taken as real numbers),
    d_scale the scale's; half ones take one more rounding, to nearest even. Either output may be left
    out, not both. In place: dq may be dy.
    """

def fake_quantize_per_group(
    x: Array | float,
    scale: Array | float,
    zero_point: Array | float | None = None,
    *,
    y: Array | None = None,
    group_size: int = 128,
    granularity: Literal["group", "token", "channel", "tensor"] = "group",
    q_min: int = -128,
    q_max: int = 127,
    element: Literal["f32", "f64", "f16", "bf16", "u8", "s8", "s32", "u32"] | None = None,
    f32_scale: bool | None = None,
    axis: int = -1,
    device: str | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    stream: int | None = None,
    workspace: Array | None = None,
) -> Any:
    """Returns y.

    y = (clamp(R(x / s) + zp, q_min, q_max) - zp) * s

    dequantize_per_group(quantize_per_group(x)) in one pass, with the rules of both; no code is
    stored, so q_min and q_max may be any 32-bit range. In place: y may be x.
    """

def fake_quantize_per_group_backward(
    dy: Array | float,
    x: Array | float,
    scale: Array | float,
    zero_point: Array | float | None = None,
    *,
    dx: Array | Literal[False] | None = None,
    d_scale: Array | Literal[False] | None = None,
    d_zero_point: Array | Literal[False] | None = None,
    group_size: int = 128,
    granularity: Literal["group", "token", "channel", "tensor"] = "group",
    q_min: int = -128,
    q_max: int = 127,
    element: Literal["f32", "f64", "f16", "bf16", "u8", "s8", "s32", "u32"] | None = None,
    f32_scale: bool | None = None,
    axis: int = -1,
    device: str | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    stream: int | None = None,
    workspace: Array | None = None,
) -> tuple[Any, ...]:
    """Returns dx, d_scale, d_zero_point.

    With z = x / s, in range: q_min <= R(z) + zp <= q_max, and q = clamp(R(z) + zp, q_min, q_max):

      dx           = in range ? dy : 0
      d_scale      = sum of dy * (in range ? R(z) - z : q - zp)
      d_zero_point = sum of (in range ? 0 : -(s * dy))

    z follows quantize_per_group (NaN, s = 0 and s NaN count as 0). R(z) - z and q - zp are exact,
    each product is rounded once, to f32 (f64 for f64). Sums are the halving tree over
    GroupGeometry's order, padded with +0. d_scale and d_zero_point have the scale's dtype; half ones
    take one more rounding, to nearest even. Any output may be left out, not all three. In place: dx
    may be dy or x.
    """

def dynamic_quantize(
    x: Array | float,
    *,
    scale: Array | None = None,
    zero_point: Array | None = None,
    q: Array | None = None,
    group_size: int = 128,
    granularity: Literal["group", "token", "channel", "tensor"] = "group",
    q_min: int = -128,
    q_max: int = 127,
    element: Literal["f32", "f64", "f16", "bf16", "u8", "s8", "s32", "u32"] | None = None,
    code: Literal["f32", "f64", "f16", "bf16", "u8", "s8", "s32", "u32"] | None = None,
    f32_scale: bool | None = None,
    symmetric: bool = True,
    axis: int = -1,
    device: str | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    stream: int | None = None,
    workspace: Array | None = None,
) -> tuple[Any, ...]:
    """Returns scale, zero_point, q.

    The scale (and zero point) from the data, then q = clamp(R(x / s) + zp, q_min, q_max) with the
    scale as stored, that is rounded to its dtype.

      symmetric    s = max|x| / q_max                  zp = 0 (not stored)
      asymmetric   s = (hi - lo) / (q_max - q_min)     zp = clamp(q_min - R(lo / s), q_min, q_max)
                   lo = min(0, min x), hi = max(0, max x)

    Each operation rounds to f32 (f64 for f64); s is then limited to the largest finite value of its
    dtype and rounded to that. Only finite x count towards max|x|, lo and hi; where there is none, or
    s as stored is not > 0, s = 1. When hi - lo overflows, s = (hi/2 - lo/2) / (q_max - q_min) * 2.
    zp uses s as stored. x then follows quantize_per_group: infinities saturate, NaN gives zp.
    Symmetric needs q_max > 0; asymmetric needs q_max > q_min.
    """

def qdq_affine_init(
    w: Array | float,
    importance: Array | float | None = None,
    *,
    scales: Array | None = None,
    biases: Array | None = None,
    q: Array | None = None,
    group_size: int = 64,
    bits: int = 0,
    n_bins: int = 0,
    element: Literal["f32", "f64", "f16", "bf16", "u8", "s8", "s32", "u32"] | None = None,
    storage: Literal["u8", "packed"] | None = None,
    f32_scale: bool | None = None,
    method: Literal["minmax", "mlx", "lsq"] = "minmax",
    device: str | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    stream: int | None = None,
    workspace: Array | None = None,
) -> tuple[Any, ...]:
    """Returns scales, biases, q.

    Scales, biases and codes of a weight, group by group. All arithmetic is f32 (f64 for f64), each
    operation rounded; n = n_bins - 1; min and max are of the group's finite weights.

    minmax   s = min((max - min) / n, largest finite value of its dtype), rounded to its dtype;
             s := 1 when that is not > 0;  b = min + 0 (never -0)
             q = clamp(A((w - b) / s), 0, n), A rounds half away from zero, s and b as stored

    mlx      what MLX's CPU backend does, bit for bit. With R half to even and eps = 1e-7:
             s = max((max - min) / n, eps), negated unless |min| > |max|
             edge = |min| > |max| ? min : max;  k = R(edge / s)
             k != 0: s = edge / k, b = edge;  k = 0: b = 0
             n_bins = 2 instead: s = max(max - min, eps), b = min + 0 (MLX may store -0)
             q = clamp(R((w - b) / s), 0, n), with s and b before they are rounded to their dtype
             MLX's Metal and CUDA kernels differ in three ways: they round half away, start the
             maximum at 0 (so an all-negative group gets another scale), and clamp only above.

    lsq      from minmax's s, b and q, at most 20 times: fit s, b to the codes by least squares
             (weighted by `importance` where given), round them to their dtype, re-quantise as minmax
             does; stop when s and b stay, hence the codes, or when the fit has no finite s > 0.
             Never worse than minmax in the squared error sum c (w - fma(q, s, b))^2: a group keeps
             minmax's result unless the fit gains at least one part in 2^20.
             docs/numerics.md gives the sums, their order and the proof.

    NaN weights get code 0. Infinite weights saturate to the end codes. No finite weight: s = 1,
    b = 0. When max - min overflows, every method is minmax with
             s = (max/2 - min/2) / (n/2), bounded as above
             q = clamp(A((w/2 - b/2) / (s/2)), 0, n)
    A group with a weight that is not finite is left to minmax by lsq; mlx applies its own formula to
    the finite part (MLX itself stores NaN there).
    """

def qdq_affine_forward(
    q: Array | float,
    scales: Array | float,
    biases: Array | float,
    *,
    y: Array | None = None,
    group_size: int = 64,
    bits: int = 0,
    n_bins: int = 0,
    element: Literal["f32", "f64", "f16", "bf16", "u8", "s8", "s32", "u32"] | None = None,
    storage: Literal["u8", "packed"] | None = None,
    f32_scale: bool | None = None,
    rounding: Literal["once", "mlx"] = "once",
    device: str | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    stream: int | None = None,
    workspace: Array | None = None,
) -> Any:
    """Returns y.

    y = q * s + b

    rounding once   fma(q, s, b) in f32 (f64 for f64): one rounding, then the conversion to y's dtype
    rounding mlx    the product is rounded to y's dtype before the add, and the sum to y's dtype:
    what
                    MLX's CPU backend does

    A code is taken as it is stored; packed codes have `bits` bits, so none exceeds 2^bits - 1.
    """

def qdq_affine_backward(
    q: Array | float,
    dy: Array | float,
    *,
    d_scales: Array | Literal[False] | None = None,
    d_biases: Array | Literal[False] | None = None,
    group_size: int = 64,
    bits: int = 0,
    n_bins: int = 0,
    element: Literal["f32", "f64", "f16", "bf16", "u8", "s8", "s32", "u32"] | None = None,
    storage: Literal["u8", "packed"] | None = None,
    f32_scale: bool | None = None,
    device: str | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    stream: int | None = None,
    workspace: Array | None = None,
) -> tuple[Any, ...]:
    """Returns d_scales, d_biases.

    d_scales = sum of q * dy        d_biases = sum of dy        over each group, in one pass

    Each product is rounded once, to f32 (f64 for f64). The sums are the halving tree: pad the group
    with zeros to the next power of two n, then add the element n/2, n/4, ... 1 away; every backend
    and vector width gives the same bits. Either output may be left out, not both.
    """

def pack_codes(
    codes: Array | float,
    *,
    words: Array | None = None,
    bits: int = 4,
    device: str | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    stream: int | None = None,
    workspace: Array | None = None,
) -> Any:
    """Returns words.

    Code j of a row goes to bits [j*bits, (j+1)*bits) of a little-endian bit stream in u32 words:

      words[w] = OR over j of (codes[j] mod 2^bits) << (j*bits - 32*w), kept to 32 bits

    A code may spill into the next word; a row has ceil(axis_size * bits / 32) words and its spare
    bits are zero. bits is 1..8. This is MLX's layout, and that of the KV codec.
    """

def unpack_codes(
    words: Array | float,
    *,
    axis_size: int,
    codes: Array | None = None,
    bits: int = 4,
    device: str | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    stream: int | None = None,
    workspace: Array | None = None,
) -> Any:
    """Returns codes.

    codes[j] = bits [j*bits, (j+1)*bits) of a row's little-endian bit stream in u32 words: the
    inverse of pack_codes.
    """

def gdn_recompute_w_u(
    k: Array | float,
    v: Array | float,
    beta: Array | float,
    g: Array | float,
    a: Array | float,
    cu_seqlens: Array | float | None = None,
    *,
    w: Array | Literal[False] | None = None,
    u: Array | Literal[False] | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    chunk: int | None = None,
    n_sequences: int | None = None,
    element: Literal["f32", "f64", "f16", "bf16", "u8", "s8", "s32", "u32"] | None = None,
    a_element: Literal["f32", "f64", "f16", "bf16", "u8", "s8", "s32", "u32"] | None = None,
    head_map: Literal["grouped", "tiled"] = "grouped",
    lower_triangular: bool = False,
    device: str | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    stream: int | None = None,
    workspace: Array | None = None,
) -> tuple[Any, ...]:
    """Returns w, u.

    The gated delta rule's WY factors of each chunk, from A = (I + L)^-1:

      u[i] = X(sum over j of A[i][j] * vb[j])      vb[j] = X(v[j] * beta[j])
      w[i] = X(sum over j of A[i][j] * kb[j])      kb[j] = X((k[j] * beta[j]) * e^g[j])

    for rows i, j of one chunk, g being summed from the chunk's start (gdn_cumsum). X rounds to
    `element`, nearest even. v * beta, k * beta and (k * beta) * e^g are each rounded to f32 first,
    e^g is exp of core/math.h, within 1 ulp. A sum is acc = fma(A[i][j], b[j], acc) in f32, j
    ascending, from 0. So each result lies within 64 * 2^-24 * sum |terms| and half an ulp of the
    exact product of the rounded operands.

    j runs over the tokens of the chunk: columns of A past a ragged chunk are never read. All of
    these j count, also those above the diagonal; with lower_triangular those alone with j <= i, and
    the others are not read. NaN and infinities go where these products put them: no further than
    their chunk and head. Either output may be left out.
    """
