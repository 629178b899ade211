# Made by tools/make_python_stubs.py.
"""bittern: quantise, dequantise and their backward passes, the same bits on every backend.

One function per op takes numpy, mlx or torch arrays without copying them:

    q = bittern.quantize_per_group(x, scale, group_size=64)
    scales, biases, q = bittern.qdq_affine_init(w, bits=4, method="mlx", storage="packed")

How a function fills in what it was not told:
  sizes      the arrays' axes give them: operands name their axes (`ops()`, `axes`). An array may
             have more axes than its operand; the first ones then count as one, and outputs have
             them, too. A single axis where rows are expected is one row, and gives one. In the
             quantise family the last axis is the quantised one; `axis` moves it, for granularity
             "channel". Packed codes alone do not say how long a row is; scales do.
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
             under torch.no_grad(). bittern.torch has those that are differentiable:
             fake_quantize_per_group, qdq_affine, the gated delta rule, its convolution and its norm.
             mlx does not say that it differentiates: to mx.grad and mx.jvp the results are
             constants.
  device     that of the first array.
  stream     on CUDA, an int (cudaStream_t) or a stream of torch's; by default torch's current one.
             Another stream first waits for what the current one has to do; the results belong to
             it, as if made under torch.cuda.stream().

Tables of the KV codec come from `sphere_codebook`, `gaussian_codebook` and `make_rotation`:

    levels, boundaries = bittern.sphere_codebook(dim=128, bits=4)
    signs = bittern.make_rotation("hadamard", dim=128, seed=1)
    packed, scales = bittern.aura_encode(k, signs, boundaries, levels)

Model files (docs/quantize.md, docs/inspect.md):

    report = bittern.quantize_model("model", "model-4bit", bits=4)
    print(bittern.inspect_model("model-4bit"))
    bittern.compare_models("model", "model-4bit").relative_error

Models that learn (docs/distill.md):

    report = bittern.distill("model", "model-3bit", bits=3, data="text.txt")

Models that run (docs/run.md):

    model = bittern.load("model.gguf")
    print(model.generate("The capital of France is", max_tokens=20))
    logits = model.logits(tokens)

Text (docs/tokenizers.md):

    tokenizer = bittern.Tokenizer("model.gguf")
    ids = tokenizer.encode("Hello")

`KvCache` keeps the keys and values of an attention layer as such codes, and attends to them.

`plan` is the layer below: every field said, nothing inferred, nothing allocated but scratch.

Errors: ValueError (malformed), NotImplementedError (no kernel does it), MemoryError, RuntimeError; of
model files also FileNotFoundError, OSError and Cancelled.
"""

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

__all__ = [
    "Cancelled",
    "DistillPoint",
    "DistillProgress",
    "DistillReport",
    "DistillTrial",
    "Field",
    "GroupDifference",
    "KvBytes",
    "KvCache",
    "KvCounts",
    "Model",
    "ModelComparison",
    "ModelDescription",
    "ModelInfo",
    "ModelProgress",
    "Op",
    "Operand",
    "Plan",
    "PrecisionGuarantee",
    "QuantizeReport",
    "QuantizedTensor",
    "Session",
    "SessionBytes",
    "Sku",
    "StorageTotal",
    "TensorDescription",
    "TensorDifference",
    "TokenStream",
    "Tokenizer",
    "__version__",
    "aura_config",
    "compare_models",
    "distill",
    "gaussian_codebook",
    "inspect_model",
    "load",
    "make_rotation",
    "num_threads",
    "ops",
    "plan",
    "quantize_model",
    "rope_frequencies",
    "sample",
    "set_num_threads",
    "sphere_codebook",
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
    "gdn_cumsum",
    "gdn_kkt",
    "gdn_solve",
    "gdn_state",
    "gdn_output",
    "gdn_chunk_forward",
    "aura_encode",
    "aura_decode",
    "aura_rotate",
    "aura_attention",
    "gdn_recurrent_step",
    "gdn_decode_step",
    "gdn_chunk_backward",
    "causal_conv1d",
    "causal_conv1d_backward",
    "gated_rms_norm",
    "gated_rms_norm_backward",
    "gguf_dequantize",
    "gguf_quantize",
    "rms_norm",
    "rope",
    "gated_activation",
    "log_softmax",
    "quantized_matmul",
    "quantized_matmul_backward",
    "pack_panels",
    "unpack_panels",
    "embedding",
    "attention_backward",
    "rms_norm_backward",
    "gated_activation_backward",
    "kl_loss",
    "adam",
    "aura_append",
]
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
    """The kernel for one problem, ready to run any number of times.

    `fields` are the op's descriptor (see `ops()`); `kernel` narrows the choice to one name.
    `threads` are those of a CPU kernel, as set_num_threads takes them; 0: num_threads().
    """

def quantize_per_group(
    x: _Array | SupportsFloat,
    scale: _Array | SupportsFloat,
    zero_point: _Array | SupportsFloat | None = None,
    *,
    q: _Array | None = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    inner_size: int | None = None,
    group_size: int = 128,
    granularity: Literal["group", "token", "channel", "tensor"] = "group",
    q_min: int = -128,
    q_max: int = 127,
    element: Literal["f32", "f64", "f16", "bf16", "float32", "float64", "float16", "bfloat16"] | _DType | None = None,
    code: Literal["u8", "s8", "uint8", "int8"] | _DType | None = None,
    f32_scale: bool | None = None,
    axis: int = -1,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns q.

    q = clamp(R(x / s) + zp, q_min, q_max)

    R rounds half to even. The quotient is a true IEEE division in f32 (f64 for f64 x). R(x/s) + zp
    and the clamp are as if exact: an infinite quotient gives q_max or q_min whatever zp. A NaN
    quotient counts as 0, and so does any quotient with s = 0 or s NaN. Negative scales are fine.
    A zero point left out is 0. Which (s, zp) an element uses: see QuantizeDesc.
    """

def quantize_per_group_backward(
    d_y: _Array | SupportsFloat,
    x: _Array | SupportsFloat,
    scale: _Array | SupportsFloat,
    zero_point: _Array | SupportsFloat | None = None,
    *,
    d_x: _Array | None = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    inner_size: int | None = None,
    group_size: int = 128,
    granularity: Literal["group", "token", "channel", "tensor"] = "group",
    q_min: int = -128,
    q_max: int = 127,
    element: Literal["f32", "f64", "f16", "bf16", "float32", "float64", "float16", "bfloat16"] | _DType | None = None,
    f32_scale: bool | None = None,
    axis: int = -1,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns d_x.

    d_x = d_y / s   where q_min <= R(x / s) + zp <= q_max,   else 0

    The straight-through estimator of quantize_per_group: R(x/s) + zp is the very value the forward
    clamps (NaN quotient counts as 0, the sum is exact), both ends are inside, and d_y / s is a true
    division. s = 0 gives 0; s NaN gives d_y / s, that is NaN, where zp is in range. In place: d_x
    may be d_y or x.
    """

def dequantize_per_group(
    q: _Array | SupportsFloat,
    scale: _Array | SupportsFloat,
    zero_point: _Array | SupportsFloat | None = None,
    *,
    y: _Array | None = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    inner_size: int | None = None,
    group_size: int = 128,
    granularity: Literal["group", "token", "channel", "tensor"] = "group",
    element: Literal["f32", "f64", "f16", "bf16", "float32", "float64", "float16", "bfloat16"] | _DType | None = None,
    code: Literal["u8", "s8", "uint8", "int8"] | _DType | None = None,
    f32_scale: bool | None = None,
    axis: int = -1,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns y.

    y = (q - zp) * s

    The difference is exact (a 33-bit integer) and the product is rounded once, to f32 (f64 for f64);
    half y then takes one more rounding to its dtype, to nearest even. A zero point left out is 0.
    """

@overload
def dequantize_per_group_backward(
    d_y: _Array | SupportsFloat,
    q: _Array | SupportsFloat,
    scale: _Array | SupportsFloat,
    zero_point: _Array | SupportsFloat | None = None,
    *,
    d_q: _Array | Literal[True] | None = None,
    d_scale: _Array | Literal[True] | None = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    inner_size: int | None = None,
    group_size: int = 128,
    granularity: Literal["group", "token", "channel", "tensor"] = "group",
    element: Literal["f32", "f64", "f16", "bf16", "float32", "float64", "float16", "bfloat16"] | _DType | None = None,
    code: Literal["u8", "s8", "uint8", "int8"] | _DType | None = None,
    f32_scale: bool | None = None,
    axis: int = -1,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result]:
    """Returns d_q, d_scale.

    d_q = d_y * s        d_scale = sum of d_y * (q - zp) over the elements that share the scale

    q - zp is exact and each product is rounded once, to f32 (f64 for f64). The sum is the halving
    tree over GroupGeometry's order: pad with +0 to a power of two n, then add the element n/2, n/4,
    ... 1 away; a scale without elements gets 0. d_q has y's dtype (codes are taken as real numbers),
    d_scale the scale's; half ones take one more rounding, to nearest even. Either output may be left
    out, not both. In place: d_q may be d_y.
    """

@overload
def dequantize_per_group_backward(
    d_y: _Array | SupportsFloat,
    q: _Array | SupportsFloat,
    scale: _Array | SupportsFloat,
    zero_point: _Array | SupportsFloat | None = None,
    *,
    d_q: _Array | bool | None = None,
    d_scale: _Array | bool | None = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    inner_size: int | None = None,
    group_size: int = 128,
    granularity: Literal["group", "token", "channel", "tensor"] = "group",
    element: Literal["f32", "f64", "f16", "bf16", "float32", "float64", "float16", "bfloat16"] | _DType | None = None,
    code: Literal["u8", "s8", "uint8", "int8"] | _DType | None = None,
    f32_scale: bool | None = None,
    axis: int = -1,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> Any: ...

def fake_quantize_per_group(
    x: _Array | SupportsFloat,
    scale: _Array | SupportsFloat,
    zero_point: _Array | SupportsFloat | None = None,
    *,
    y: _Array | None = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    inner_size: int | None = None,
    group_size: int = 128,
    granularity: Literal["group", "token", "channel", "tensor"] = "group",
    q_min: int = -128,
    q_max: int = 127,
    element: Literal["f32", "f64", "f16", "bf16", "float32", "float64", "float16", "bfloat16"] | _DType | None = None,
    f32_scale: bool | None = None,
    axis: int = -1,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns y.

    y = (clamp(R(x / s) + zp, q_min, q_max) - zp) * s

    dequantize_per_group(quantize_per_group(x)) in one pass, with the rules of both; no code is
    stored, so q_min and q_max may be any 32-bit range. In place: y may be x.
    """

@overload
def fake_quantize_per_group_backward(
    d_y: _Array | SupportsFloat,
    x: _Array | SupportsFloat,
    scale: _Array | SupportsFloat,
    zero_point: _Array | SupportsFloat | None = None,
    *,
    d_x: _Array | Literal[True] | None = None,
    d_scale: _Array | Literal[True] | None = None,
    d_zero_point: _Array | Literal[True] | None = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    inner_size: int | None = None,
    group_size: int = 128,
    granularity: Literal["group", "token", "channel", "tensor"] = "group",
    q_min: int = -128,
    q_max: int = 127,
    element: Literal["f32", "f64", "f16", "bf16", "float32", "float64", "float16", "bfloat16"] | _DType | None = None,
    f32_scale: bool | None = None,
    axis: int = -1,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result, _Result]:
    """Returns d_x, d_scale, d_zero_point.

    With z = x / s, in range: q_min <= R(z) + zp <= q_max, and q = clamp(R(z) + zp, q_min, q_max):

      d_x          = in range ? d_y : 0
      d_scale      = sum of d_y * (in range ? R(z) - z : q - zp)
      d_zero_point = sum of (in range ? 0 : -(s * d_y))

    z follows quantize_per_group (NaN, s = 0 and s NaN count as 0). R(z) - z and q - zp are exact,
    each product is rounded once, to f32 (f64 for f64). Sums are the halving tree over
    GroupGeometry's order, padded with +0. d_scale and d_zero_point have the scale's dtype; half ones
    take one more rounding, to nearest even. Any output may be left out, not all three. In place: d_x
    may be d_y or x.
    """

@overload
def fake_quantize_per_group_backward(
    d_y: _Array | SupportsFloat,
    x: _Array | SupportsFloat,
    scale: _Array | SupportsFloat,
    zero_point: _Array | SupportsFloat | None = None,
    *,
    d_x: _Array | bool | None = None,
    d_scale: _Array | bool | None = None,
    d_zero_point: _Array | bool | None = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    inner_size: int | None = None,
    group_size: int = 128,
    granularity: Literal["group", "token", "channel", "tensor"] = "group",
    q_min: int = -128,
    q_max: int = 127,
    element: Literal["f32", "f64", "f16", "bf16", "float32", "float64", "float16", "bfloat16"] | _DType | None = None,
    f32_scale: bool | None = None,
    axis: int = -1,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> Any: ...

@overload
def dynamic_quantize(
    x: _Array | SupportsFloat,
    *,
    scale: _Array | None = None,
    zero_point: _Array | None = None,
    q: _Array | None = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    inner_size: int | None = None,
    group_size: int = 128,
    granularity: Literal["group", "token", "channel", "tensor"] = "group",
    q_min: int = -128,
    q_max: int = 127,
    element: Literal["f32", "f64", "f16", "bf16", "float32", "float64", "float16", "bfloat16"] | _DType | None = None,
    code: Literal["u8", "s8", "uint8", "int8"] | _DType | None = None,
    f32_scale: bool | None = None,
    symmetric: Literal[True] = True,
    axis: int = -1,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result]:
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

@overload
def dynamic_quantize(
    x: _Array | SupportsFloat,
    *,
    scale: _Array | None = None,
    zero_point: _Array | None = None,
    q: _Array | None = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    inner_size: int | None = None,
    group_size: int = 128,
    granularity: Literal["group", "token", "channel", "tensor"] = "group",
    q_min: int = -128,
    q_max: int = 127,
    element: Literal["f32", "f64", "f16", "bf16", "float32", "float64", "float16", "bfloat16"] | _DType | None = None,
    code: Literal["u8", "s8", "uint8", "int8"] | _DType | None = None,
    f32_scale: bool | None = None,
    symmetric: Literal[False],
    axis: int = -1,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result, _Result]: ...

@overload
def dynamic_quantize(
    x: _Array | SupportsFloat,
    *,
    scale: _Array | None = None,
    zero_point: _Array | None = None,
    q: _Array | None = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    inner_size: int | None = None,
    group_size: int = 128,
    granularity: Literal["group", "token", "channel", "tensor"] = "group",
    q_min: int = -128,
    q_max: int = 127,
    element: Literal["f32", "f64", "f16", "bf16", "float32", "float64", "float16", "bfloat16"] | _DType | None = None,
    code: Literal["u8", "s8", "uint8", "int8"] | _DType | None = None,
    f32_scale: bool | None = None,
    symmetric: bool = True,
    axis: int = -1,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> Any: ...

def qdq_affine_init(
    w: _Array | SupportsFloat,
    importance: _Array | SupportsFloat | None = None,
    *,
    scales: _Array | None = None,
    biases: _Array | None = None,
    q: _Array | None = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    group_size: int = 64,
    bits: int = 0,
    n_bins: int = 0,
    element: Literal["f32", "f64", "f16", "bf16", "float32", "float64", "float16", "bfloat16"] | _DType | None = None,
    storage: Literal["u8", "packed"] | None = None,
    f32_scale: bool | None = None,
    method: Literal["minmax", "mlx", "lsq"] = "minmax",
    expect_finite: bool = False,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result, _Result]:
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

    lsq      from minmax's range and, up to 32 bins, from its middle 0.85, 0.7 and 0.55, at most 20
             times: fit s, b to the codes by least squares (weighted by `importance`), round them to
             their dtype, re-quantise as minmax does; stop when s and b no longer change, or the fit
             has no finite s > 0. The start with the least squared error sum c (w - fma(q, s, b))^2
             counts; minmax's result stays unless one gains at least one part in 2^20.
             docs/numerics.md gives the sums, their order and the proof.

    NaN weights get code 0. Infinite weights saturate to the end codes. No finite weight: s = 1,
    b = 0. When max - min overflows, every method is minmax with
             s = (max/2 - min/2) / (n/2), bounded as above
             q = clamp(A((w/2 - b/2) / (s/2)), 0, n)
    For a group with a weight that is not finite, lsq gives minmax's result, and mlx applies its
    formula to the finite weights (MLX itself stores NaN there). With expect_finite the outputs are
    the same, and run returns an error if there was such a weight; kernels that run asynchronously
    cannot, and refuse the field.
    """

def qdq_affine_forward(
    q: _Array | SupportsFloat,
    scales: _Array | SupportsFloat,
    biases: _Array | SupportsFloat,
    *,
    y: _Array | None = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    group_size: int = 64,
    bits: int = 0,
    n_bins: int = 0,
    element: Literal["f32", "f64", "f16", "bf16", "float32", "float64", "float16", "bfloat16"] | _DType | None = None,
    storage: Literal["u8", "packed"] | None = None,
    f32_scale: bool | None = None,
    rounding: Literal["once", "mlx"] = "once",
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns y.

    y = q * s + b

    rounding once   fma(q, s, b) in f32 (f64 for f64): one rounding, then the conversion to y's dtype
    rounding mlx    the product is rounded to y's dtype before the addition, then the sum is, as in
                    MLX's CPU backend

    Codes are not checked; packed codes have `bits` bits, so none exceeds 2^bits - 1.
    """

@overload
def qdq_affine_backward(
    d_y: _Array | SupportsFloat,
    q: _Array | SupportsFloat,
    *,
    d_scales: _Array | Literal[True] | None = None,
    d_biases: _Array | Literal[True] | None = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    group_size: int = 64,
    bits: int = 0,
    n_bins: int = 0,
    element: Literal["f32", "f64", "f16", "bf16", "float32", "float64", "float16", "bfloat16"] | _DType | None = None,
    storage: Literal["u8", "packed"] | None = None,
    f32_scale: bool | None = None,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result]:
    """Returns d_scales, d_biases.

    d_scales = sum of q * d_y        d_biases = sum of d_y        over each group, in one pass

    Each product is rounded once, to f32 (f64 for f64). The sums are the halving tree: pad the group
    with zeros to the next power of two n, then add the element n/2, n/4, ... 1 away; every backend
    and vector width gives the same bits. Either output may be left out, not both.
    """

@overload
def qdq_affine_backward(
    d_y: _Array | SupportsFloat,
    q: _Array | SupportsFloat,
    *,
    d_scales: _Array | bool | None = None,
    d_biases: _Array | bool | None = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    group_size: int = 64,
    bits: int = 0,
    n_bins: int = 0,
    element: Literal["f32", "f64", "f16", "bf16", "float32", "float64", "float16", "bfloat16"] | _DType | None = None,
    storage: Literal["u8", "packed"] | None = None,
    f32_scale: bool | None = None,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> Any: ...

def pack_codes(
    codes: _Array | SupportsFloat,
    *,
    packed: _Array | None = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    bits: int = 4,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns packed.

    Code j of a row goes to bits [j*bits, (j+1)*bits) of a little-endian bit stream in u32 words:

      packed[w] = OR over j of (codes[j] mod 2^bits) << (j*bits - 32*w), kept to 32 bits

    A code may continue in the next word. A row has ceil(axis_size * bits / 32) words, and its unused
    bits are zero. bits is 1..8. This is MLX's layout, and that of the KV codec.
    """

def unpack_codes(
    packed: _Array | SupportsFloat,
    *,
    codes: _Array | None = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    bits: int = 4,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns codes.

    codes[j] = bits [j*bits, (j+1)*bits) of a row's little-endian bit stream in u32 words: the
    inverse of pack_codes.
    """

@overload
def gdn_recompute_w_u(
    k: _Array | SupportsFloat,
    v: _Array | SupportsFloat,
    beta: _Array | SupportsFloat,
    g: _Array | SupportsFloat,
    a: _Array | SupportsFloat,
    cu_seqlens: _Array | SupportsFloat | None = None,
    *,
    w: _Array | Literal[True] | None = None,
    u: _Array | Literal[True] | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    chunk: int | None = None,
    sequences: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    a_element: Literal["f32", "bf16", "float32", "bfloat16"] | _DType | None = None,
    head_map: Literal["grouped", "tiled"] = "grouped",
    lower_triangular: bool = False,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result]:
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

    Kernels cuda_mma and cuda_wgmma (f16 and bf16, Preference::fastest) add the same terms in another
    order, and tensor cores truncate where fma rounds. Their ErrorNorm is `terms`: each element of u
    and w is off by at most error_bound = 2 chunk 2^-24 times the sum of |A[i][j]| |b[j]|, b being vb
    or kb, and one ulp of `element`. In that sum an |A[i][j]| > 0 counts as at least 2^-114. With a
    term that is not finite, the element is NaN or an infinity as in the definition. But if the sum
    of the finite magnitudes reaches 2^127, one order may overflow and the other not, and nothing is
    promised for that element.
    """

@overload
def gdn_recompute_w_u(
    k: _Array | SupportsFloat,
    v: _Array | SupportsFloat,
    beta: _Array | SupportsFloat,
    g: _Array | SupportsFloat,
    a: _Array | SupportsFloat,
    cu_seqlens: _Array | SupportsFloat | None = None,
    *,
    w: _Array | bool | None = None,
    u: _Array | bool | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    chunk: int | None = None,
    sequences: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    a_element: Literal["f32", "bf16", "float32", "bfloat16"] | _DType | None = None,
    head_map: Literal["grouped", "tiled"] = "grouped",
    lower_triangular: bool = False,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> Any: ...

def gdn_cumsum(
    g: _Array | SupportsFloat,
    a_log: _Array | SupportsFloat | None = None,
    dt_bias: _Array | SupportsFloat | None = None,
    cu_seqlens: _Array | SupportsFloat | None = None,
    *,
    sum: _Array | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    value_heads: int | None = None,
    chunk: int = 64,
    sequences: int | None = None,
    gate: bool = False,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns sum.

    The log decay summed within each chunk:   sum[i] = sum[i-1] + g[i]   from 0 at the chunk's start,
    in f32, i ascending, as FLA has it. So e^(sum[i] - sum[j]) of the ops that follow has a relative
    error of up to i 2^-24 |sum[i]|: after one g of -1e4 up to 5e-4 a token. -infinity and NaN stay
    until the chunk's end, and make these NaN. gdn_chunk_forward has neither limit.
    With `gate`, g holds the projection a, and -exp(a_log) * softplus(a + dt_bias) takes its place:
    a_log and dt_bias are given per head, each operation is rounded once to f32, exp and softplus are
    core/math.h's, within 1 ulp.
    """

def gdn_kkt(
    k: _Array | SupportsFloat,
    beta: _Array | SupportsFloat,
    g: _Array | SupportsFloat,
    cu_seqlens: _Array | SupportsFloat | None = None,
    *,
    l: _Array | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    chunk: int | None = None,
    sequences: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    head_map: Literal["grouped", "tiled"] = "grouped",
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns l.

    The matrix of each chunk's delta rule, strictly lower triangular:

      l[i][j] = (beta[i] * (k[i] . k[j])) * e^(g[i] - g[j])      j < i; 0 for all other j < chunk

    for rows i, j of one chunk, g being summed from its start (gdn_cumsum, with its bound). The dot
    product is acc = fma(k[i][d], k[j][d], acc) in f32, d ascending, from 0; the difference, the
    exponential (core/math.h, within 1 ulp) and the two products are each rounded once to f32. The
    exponential is taken of differences with j < i alone: never above 0 for log decays that are not,
    so it cannot overflow; g down to -1e4 a token gives 0, not NaN (-infinity gives NaN).

    Kernel cuda_mma (Preference::fastest, f16 and bf16, key_dim 64 or 128, chunk 64) adds the terms
    of the dot product in another order, and tensor cores truncate where fma rounds. Its exponentials
    are within 2^-16 of themselves. Its ErrorNorm is `terms`: an element is off by at most
    error_bound = 2^-15 times |beta[i]| (|k[i]| . |k[j]|) e^(g[i] - g[j]), where each of the three
    factors counts as at least 2^-80 if it is above 0. With a factor that is not finite the element
    is what the definition makes of it, unless the exponential is subnormal. If the exponential, or
    |beta[i]| (|k[i]| . |k[j]|), or the product of both reaches 2^126, nothing is promised for that
    element.
    """

def gdn_solve(
    l: _Array | SupportsFloat,
    cu_seqlens: _Array | SupportsFloat | None = None,
    *,
    a: _Array | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    value_heads: int | None = None,
    chunk: int | None = None,
    sequences: int | None = None,
    a_element: Literal["f32", "bf16", "float32", "bfloat16"] | _DType | None = None,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns a.

    The inverse of each chunk's unit lower triangular matrix: A = (I + L)^-1, L from gdn_kkt.

      A[i] = e[i] - (sum over j < i of L[i][j] * A[j])

    by rows, for rows i, j of one chunk: the sum is acc = fma(L[i][j], A[j][c], acc) in f32, j
    ascending, from 0, and is subtracted from 1 (c = i) or 0. Every j < i counts, also where A[j][c]
    is 0. L is not read on or above the diagonal, nor past a ragged chunk. A is 0 above the diagonal
    (whatever L holds) and past a ragged chunk; it is rounded to a_element last.
    A NaN or infinity of L makes its row and rows below it NaN, in its chunk and head.
    """

@overload
def gdn_state(
    k: _Array | SupportsFloat,
    w: _Array | SupportsFloat,
    u: _Array | SupportsFloat,
    g: _Array | SupportsFloat,
    initial_state: _Array | SupportsFloat | None = None,
    cu_seqlens: _Array | SupportsFloat | None = None,
    *,
    h: _Array | Literal[True] | None = None,
    v_new: _Array | Literal[True] | None = None,
    final_state: _Array | Literal[True] | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    chunk: int = 64,
    sequences: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    head_map: Literal["grouped", "tiled"] = "grouped",
    state_layout: Literal["key_value", "value_key"] = "key_value",
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result, _Result]:
    """Returns h, v_new, final_state.

    The gated delta rule's state from chunk to chunk, and the values each chunk writes into it. For a
    sequence and head, with S [key_dim, value_dim] in f32, at first initial_state, or 0 if left out:

      for each chunk n:   h[n] = X(S)
                          y[i] = u[i] - w[i] X(S)              v_new[i] = X(y[i])
                          z[i] = X(y[i] * e^(g[last] - g[i]))
                          S    = e^g[last] * S + (sum over i of k[i]^T z[i])
      final_state = S

    for rows i of the chunk, `last` its last one, g summed from its start (gdn_cumsum), w and u from
    gdn_recompute_w_u. X rounds to `element`, nearest even. Matrix products are acc = fma(a, b, acc)
    in f32, terms ascending: w X(S) from 0, the sum over i from the product e^g[last] * S. Every
    other operation is rounded once to f32; exp is core/math.h's, within 1 ulp. h lies as the state
    does (state_layout). An empty sequence passes its state on. Any output may be left out.

    Kernel cuda_wgmma (Preference::fastest, sm_90, f16 and bf16, key_dim 64 or 128, value_dim a
    multiple of 64, chunk 64) rounds where the definition does, but adds in another order, and tensor
    cores truncate where fma rounds. Its exponentials are within 2^-16 of themselves. So S differs,
    and X(S) and z now and then by an ulp, which goes on to later chunks. Its ErrorNorm is `terms`,
    and error_bound is b = r + 2^-11, where r is 2^-8 for bf16 and 2^-11 for f16. For a chunk of one
    head let E be the diagonal matrix of e^(g[last] - g[i]), |X| the magnitudes of X, and

      F_c     what a change of S at the end of an earlier chunk c has become before this chunk: I;
              every chunk in between makes e^g[last] F_c - k^T E w F_c of it
      D       = the sum over c of |F_c| N_c;                  S' = |S| + b D
      R       = |w| S' + |u| / 64
      Y       = R + the sum over c of |w F_c| N_c;            y' = |y| + b Y
      N       = |k|^T E (y' + R) + e^g[last] S' / 64, the N_c of this chunk

    Then h is off by at most b D and an ulp of `element`, v_new by b Y and an ulp, final_state by b D
    after the last chunk. Each factor above 0 counts as at least 2^-80 (2^-13 for f16) in these sums,
    and each sum as as much more. If an input is not finite, or one of these magnitudes or an
    exponential reaches 2^126 (for f16 2^14), nothing is promised for that chunk and head, and for
    what follows in the sequence.
    """

@overload
def gdn_state(
    k: _Array | SupportsFloat,
    w: _Array | SupportsFloat,
    u: _Array | SupportsFloat,
    g: _Array | SupportsFloat,
    initial_state: _Array | SupportsFloat | None = None,
    cu_seqlens: _Array | SupportsFloat | None = None,
    *,
    h: _Array | bool | None = None,
    v_new: _Array | bool | None = None,
    final_state: _Array | bool | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    chunk: int = 64,
    sequences: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    head_map: Literal["grouped", "tiled"] = "grouped",
    state_layout: Literal["key_value", "value_key"] = "key_value",
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> Any: ...

def gdn_output(
    q: _Array | SupportsFloat,
    k: _Array | SupportsFloat,
    v_new: _Array | SupportsFloat,
    h: _Array | SupportsFloat,
    g: _Array | SupportsFloat,
    cu_seqlens: _Array | SupportsFloat | None = None,
    *,
    o: _Array | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    chunk: int = 64,
    sequences: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    head_map: Literal["grouped", "tiled"] = "grouped",
    state_layout: Literal["key_value", "value_key"] = "key_value",
    scale: float = 0.0,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns o.

    The gated delta rule's output of each chunk, from the state before it and what it writes:

      p[i][j] = X((q[i] . k[j]) * e^(g[i] - g[j]))      j <= i
      o[i]    = X(scale * (e^g[i] * (q[i] h) + sum over j <= i of p[i][j] * v_new[j]))

    for rows i, j of one chunk, h [key_dim, value_dim] its state (gdn_state), g summed from its start
    (gdn_cumsum). X rounds to `element`, nearest even. Matrix products are acc = fma(a, b, acc) in
    f32, terms ascending: q . k and q h from 0, the sum over j from e^g[i] * (q[i] h). Every other
    operation is rounded once to f32; exp is core/math.h's, within 1 ulp, and is taken of differences
    with j <= i alone. scale is query_scale().

    Kernel cuda_wgmma (Preference::fastest, sm_90, f16 and bf16, key_dim 64 or 128, value_dim a
    multiple of 64, chunk 64) adds the same terms in another order, and tensor cores truncate where
    fma rounds. Its exponentials are within 2^-16 of themselves. p is rounded as above. Its ErrorNorm
    is `terms`: an element of o is off by an ulp of `element` and at most error_bound = r + 2^-13,
    where r is 2^-8 for bf16 and 2^-11 for f16, times

      |scale| (e^g[i] (|q[i]| . |h|) + sum over j <= i of (|q[i]| . |k[j]|) e^(g[i] - g[j])
      |v_new[j]|)

    in which each dot product, exponential and product of both counts as at least 2^-80 (2^-13 for
    f16) if it is above 0, and each |v_new| too. With a term that is not finite, the element is NaN
    or an infinity as in the definition. But if an exponential or one of these magnitudes reaches
    2^126 (for f16 2^14), nothing is promised for that element.
    """

@overload
def gdn_chunk_forward(
    q: _Array | SupportsFloat,
    k: _Array | SupportsFloat,
    v: _Array | SupportsFloat,
    g: _Array | SupportsFloat,
    beta: _Array | SupportsFloat,
    a_log: _Array | SupportsFloat | None = None,
    dt_bias: _Array | SupportsFloat | None = None,
    mask: _Array | SupportsFloat | None = None,
    initial_state: _Array | SupportsFloat | None = None,
    cu_seqlens: _Array | SupportsFloat | None = None,
    *,
    o: _Array | None = None,
    final_state: _Array | Literal[True] | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    chunk: int = 64,
    sequences: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    head_map: Literal["grouped", "tiled"] = "grouped",
    state_layout: Literal["key_value", "value_key"] = "key_value",
    qk_l2norm: bool = False,
    gate: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    scale: float = 0.0,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result]:
    """Returns o, final_state.

    The gated delta rule over whole sequences, chunk by chunk, in one call. Token by token it is

      S = e^g[t] S;   S = S + k[t]^T (beta[t] (v[t] - k[t] S));   o[t] = scale q[t] S

    with S [key_dim, value_dim] at first initial_state, or 0 if left out, and at last final_state. It
    is computed so: for each sequence, head and chunk, with rows i, j of the chunk,

      q, k    = x * (1 / sqrt(x.x + 1e-6)) each, if qk_l2norm (x.x as core/dot.h);  q = q * scale
      g       = -exp(a_log) * softplus(g + dt_bias), if gate
      beta    = sigmoid(beta), if beta_sigmoid;  2 * that, if allow_neg_eigval
      G[i]    = G[i-1] + max(g[i], -2^13) in f64, kept as hi + lo: hi the nearest multiple of 1/16,
                ties to even, lo the rest, in f32
      e^(G[i] - G[j]) = exp(hi[i] - hi[j], lo[i] - lo[j]);  e^G[i] the same with 0 for G[j]
      L[i][j] = (beta[i] * (k[i] . k[j])) * e^(G[i] - G[j])        j < i
      P[i][j] = (q[i] . k[j]) * e^(G[i] - G[j])                    j <= i
      y[i]    = beta[i] * fma(-e^G[i], k[i] S, v[i]) - (sum over j < i of L[i][j] y[j])
      o[i]    = X(e^G[i] * (q[i] S) + sum over j <= i of P[i][j] y[j])
      S       = e^G[last] * S + sum over i of k[i]^T (e^(G[last] - G[i]) * y[i])

    All else in f32, whatever `element` is: X, the rounding of o to `element`, is the only one to a
    half type. Sums of products are acc = fma(a, b, acc), terms ascending: k.k, q.k, k S, q S and the
    sum in y from 0 (the latter is then subtracted), the sum in o from e^G[i] * (q[i] S), that in S
    from e^G[last] * S. Every other operation is rounded once; exp, softplus, sigmoid: core/math.h.
    y is what the chain of gdn_cumsum .. gdn_output calls v_new, by substitution, not by an inverse.

    e^(G[i] - G[j]) is within 2e-7 of e^(g[j+1] + .. + g[i]), relative, whatever the other g are, and
    at most 1 while no g is above 0. g <= -2^13, so also -infinity, is a reset: what is before it
    counts for 0 after it. A NaN, or an infinity elsewhere, reaches the later tokens of its sequence
    and head alone. A token whose `mask` is 0 is not looked at: q = k = v = 0, g = beta = 0, so the
    state passes it by, and its o is 0. An empty sequence passes its state on.

    Kernel cpu_bf16 (element bf16, Preference::fastest, a CPU with AVX512_BF16) keeps S and y in f32,
    and solves for y in f32. It rounds to bf16, nearest even: S in k S and q S; P and y in the sum of
    o, save where j is among the last rows before i (at most 8); e^(G[last] - G[i]) * y[i] in S. k
    and q enter products as they are, and the results are multiplied by scale and norms. Products
    take subnormal numbers for 0. Its ErrorNorm is `terms`, and error_bound is b = 2^-7 + 2^-12. For
    a chunk of one head let E, W and B be diagonal matrices of e^G[i], e^(G[last] - G[i]) and beta[i]
    e^G[i], K and Q its keys and queries, T = (I + L)^-1, |X| the magnitudes of X, and

      A[i][j] = |beta[i]| (|k[i]| . |k[j]|) e^(G[i] - G[j]), j < i
      C[i][j] = (|q[i]| . |k[j]|) e^(G[i] - G[j]), j <= i
      F_c     what a change of S at the end of an earlier chunk c has become before this chunk: I;
              every chunk in between makes e^G[last] F_c - K^T W T B K F_c of it
      D       = the sum over c of |F_c| N_c;                      S' = |S| + b D
      R       = |beta| |v| / 64 + |B| |K| S' / 2 + A y' / 64
      Y       = |T| R + the sum over c of |T B K F_c| N_c;        y' = |y| + b Y
      N       = |K|^T W y' / 2 + e^G[last] S' / 64 + |K^T W T| R, the N_c of this chunk
      O       = E |Q| S' / 2 + (|P| + C / 64) y' + |P T| R
                + the sum over c of |(E Q - P T B K) F_c| N_c

    Then y is off by at most b Y, o by b O and an ulp of `element`, and S, also as final_state, by
    b D. So errors go on as the rule itself takes them on: a decay, or a key that is seen again,
    removes them. Each factor above 0 counts as at least 2^-80 in these sums, and each sum as 2^-80
    more. A NaN goes where the definition takes it. If an input is infinite (other than
    g = -infinity), or if one of these magnitudes reaches 2^126, also with k and q as they are before
    qk_l2norm and scale, nothing is promised for that chunk and head and for what follows in the
    sequence.

    Kernel cuda_wgmma (Preference::fastest, sm_90, element bf16 or f16, key_dim 64 or 128, value_dim
    a multiple of 64, chunk 64) keeps S and all sums in f32 too. It rounds to `element`: S in k S and
    q S; the right side of y, beta[i] * fma(-e^G[i], k[i] S, v[i]); T, whose product with it is y; P
    and y in the sum of o; e^(G[last] - G[i]) * y[i] in S. T itself is found within 2^-15. Decays are
    within 2^-16 of themselves, whatever the other g are. Its bound is the same with b = 2^-7 + 2^-11
    and

      R       = |beta| |v| + |B| |K| S' 3 / 2 + A y' / 64
      Z       = |T| (|beta| |v| + |B| |K| S') / 2, for T's rounding: O has |P| Z and N |K|^T W Z more

    and, for f16, with 2^-14 and 2^14 for 2^-80 and 2^126, which T must not reach either.

    With few heads it cuts sequences into segments, and makes M S + N of a segment's first state S: N
    is the last state that S = 0 would give, and M has those of the columns of the identity with v =
    0. Both are found as above and kept in f32. In the sums, the magnitudes of a state and of y are
    then those of their parts, |M| |S| + |N| for the state after any chunk of the segment, and M must
    not reach 2^126 (2^14) either. The number of segments follows from the numbers of tokens,
    sequences, heads and multiprocessors, so the bits depend on these too.
    """

@overload
def gdn_chunk_forward(
    q: _Array | SupportsFloat,
    k: _Array | SupportsFloat,
    v: _Array | SupportsFloat,
    g: _Array | SupportsFloat,
    beta: _Array | SupportsFloat,
    a_log: _Array | SupportsFloat | None = None,
    dt_bias: _Array | SupportsFloat | None = None,
    mask: _Array | SupportsFloat | None = None,
    initial_state: _Array | SupportsFloat | None = None,
    cu_seqlens: _Array | SupportsFloat | None = None,
    *,
    o: _Array | None = None,
    final_state: _Array | bool | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    chunk: int = 64,
    sequences: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    head_map: Literal["grouped", "tiled"] = "grouped",
    state_layout: Literal["key_value", "value_key"] = "key_value",
    qk_l2norm: bool = False,
    gate: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    scale: float = 0.0,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> Any: ...

def aura_encode(
    x: _Array | SupportsFloat,
    table: _Array | SupportsFloat,
    boundaries: _Array | SupportsFloat,
    codebook: _Array | SupportsFloat,
    *,
    packed: _Array | None = None,
    scales: _Array | None = None,
    rows: int | None = None,
    dim: int | None = None,
    bits: int = 4,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    rotation: Literal["identity", "hadamard", "dense"] = "hadamard",
    scale_rule: Literal["matched", "none", "least_squares", "unbiased"] = "matched",
    f16_scale: bool | None = None,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result]:
    """Returns packed, scales.

    Rows of x to codes and scales, by the row format of bittern/aura_desc.h. Everything in f32, each
    operation rounded.

      1. norm = sqrt(dot(x, x));  inv = norm > 0 ? 1 / norm : 0. Unless 2^-100 <= dot(x, x) < 2^128,
         steps 1 and 2 take x_j 2^-e for x_j, with 2^e <= largest |x_j| < 2^(e+1) but e at least -126
         and at most 126; after them norm := the smaller of norm 2^e and the largest finite f32
      2. r = P u, u_j = x_j * inv; a hadamard rotation takes inv and its own scale as one factor:
         its first step is t_j = x_j * (sign_j * (inv * d^-1/2))
      3. code_j = number of boundaries strictly below r_j (0 for a NaN)
      4. codes are packed; the row's spare bits are zero
      5. with c_j = codebook[code_j], C = sum of c_j c_j, D = dot(r, c) + 0:
         matched         s = sqrt(C) > 1e-8f ? norm / sqrt(C) : norm     |x'| = |x|
         none            s = norm
         least_squares   s = sqrt(C) > 1e-8f ? norm * (D / C) : norm     least |x - x'|
         unbiased        s = D > 1e-8f ? norm / D : norm                 <x, x'> = |x|^2
         s is clamped to the largest finite values of the scales' dtype, of either sign, and rounded
         to it.

      dot   32 chains: sum[j % 32] = fma(a_j, b_j, sum[j % 32]), j ascending, each from +0; then the
            halving tree (docs/numerics.md) of the 32
      sum   of each eight neighbours s_0 .. s_7 (zeros past the row's end)
            ((s_0 + s_1) + (s_2 + s_3)) + ((s_4 + s_5) + (s_6 + s_7)); then the halving tree of these

    The codes of a finite row depend only on its direction, however small or large the row is. s
    follows the norm within the range of the scales' dtype: it has fewer bits where it is subnormal,
    and is the largest finite value where the norm or s would exceed it. A row of zeros has the codes
    of 0, s = 0 and x' = 0. A row with a NaN or an infinity has codes 0 and s NaN, and decodes to
    NaN. No row affects another.

    With rotation dense, rule matched and f32 scales this is AURA's fused encode, except for rows of
    norm 1e-8 or less, to which AURA gives no direction, and rows whose squares overflow.

    Kernel cuda_tensor (dense rotations of 64 and 128, sm_90, Preference::fastest) computes r in
    another order, and s from its own r and codes. Its ErrorNorm is `terms`, and error_bound is
    e = 2 (dim + 8) 2^-24. With T_i = sum over j of (|P_ij| + 2^-16) (|u_j| + 2^-16):

      code_i  is the code of some r' with |r' - r_i| <= e T_i. So it can differ from the contract's
              only if r_i is that near to a boundary.
      s       is off by at most e M, and one ulp of the scales' dtype, from what step 5 gives for the
              codes that the kernel found. M = |s| (none, matched), 2 norm sum T_i |c_i| / C
              (least_squares), 2 |s| sum T_i |c_i| / D (unbiased). If D is within
              2 e sum T_i |c_i| of 0 or of 1e-8, nothing is promised for s (unbiased).

    A row with a NaN or an infinity has codes 0 and s NaN here too.

    boundaries must be finite and never decrease; the codebook must be finite, and ascending where
    the codes are to be the nearest levels. A dense matrix is not checked.
    """

def aura_decode(
    packed: _Array | SupportsFloat,
    scales: _Array | SupportsFloat,
    table: _Array | SupportsFloat,
    codebook: _Array | SupportsFloat,
    *,
    y: _Array | None = None,
    rows: int | None = None,
    dim: int | None = None,
    bits: int = 4,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    rotation: Literal["identity", "hadamard", "dense"] = "hadamard",
    f16_scale: bool | None = None,
    rotated: bool = False,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns y.

    Codes and scales back to rows, by the row format of bittern/aura_desc.h. In f32, each operation
    rounded:

      y_j = s * codebook[code_j], and unless `rotated`, y := P^T y; then rounded to its dtype

    `rotated` leaves y in the rotated space, for attention that works there. NaN and infinities
    follow from the operations and affect only their row. The codebook need not be sorted.
    """

def aura_rotate(
    x: _Array | SupportsFloat,
    table: _Array | SupportsFloat,
    *,
    y: _Array | None = None,
    rows: int | None = None,
    dim: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    rotation: Literal["identity", "hadamard", "dense"] = "hadamard",
    inverse: bool = False,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns y.

    y = P x, or y = P^T x if `inverse`: each row of x widened to f32, rotated as bittern/aura_desc.h
    states, and rounded to its dtype. Used for queries, and inversely for attention's output. NaN and
    infinities follow from the operations and affect only their row.
    """

def aura_attention(
    q: _Array | SupportsFloat,
    k_packed: _Array | SupportsFloat,
    k_scales: _Array | SupportsFloat,
    v_packed: _Array | SupportsFloat,
    v_scales: _Array | SupportsFloat,
    k_codebook: _Array | SupportsFloat,
    v_codebook: _Array | SupportsFloat,
    k_table: _Array | SupportsFloat,
    v_table: _Array | SupportsFloat,
    block_table: _Array | SupportsFloat | None = None,
    lengths: _Array | SupportsFloat | None = None,
    starts: _Array | SupportsFloat | None = None,
    k_first: _Array | SupportsFloat | None = None,
    v_first: _Array | SupportsFloat | None = None,
    k_recent: _Array | SupportsFloat | None = None,
    v_recent: _Array | SupportsFloat | None = None,
    k_mean: _Array | SupportsFloat | None = None,
    v_mean: _Array | SupportsFloat | None = None,
    sinks: _Array | SupportsFloat | None = None,
    *,
    out: _Array | None = None,
    sequences: int | None = None,
    queries: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    dim: int | None = None,
    capacity: int | None = None,
    page_size: int | None = None,
    pages: int | None = None,
    first: int | None = None,
    recent: int | None = None,
    k_bits: int = 4,
    v_bits: int = 4,
    k_rotation: Literal["identity", "hadamard", "dense"] = "hadamard",
    v_rotation: Literal["identity", "hadamard", "dense"] = "hadamard",
    scale: float = 0.0,
    softcap: float = 0.0,
    window: int = 0,
    window_keeps_first: bool = False,
    causal: bool = True,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    f16_scale: bool | None = None,
    exact: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns out.

    Attention over a compressed KV cache, computed on the codes: K and V are never decoded to memory.

      out[s,i,h] = sum_t p_t v_t / l      p_t = exp(x_t - m)      l = sum_t p_t      m = max_t x_t
      x_t = scale * q[s,i,h] . k_t        over the tokens t that query i sees

    With a softcap > 0 (Gemma 2), softcap * tanh(x_t / softcap) takes the place of x_t.

    A sequence's tokens are numbered 0, 1, ... through three regions, each of which may be empty:

      first    lengths[s,0] tokens kept as they were, rows of k_first and v_first
      coded    lengths[s,1] tokens as aura_encode leaves them: k_t = k_scale_t P_k^T c[code] + k_mean
      recent   lengths[s,2] tokens kept as they were, rows of k_recent and v_recent

    Query head h reads KV head h / (heads / kv_heads). With n tokens in all, query i belongs to token
    n - queries + i. It sees every token up to that one (causal) or all tokens (not causal). With a
    window w > 0 it sees none that is w or more before it (except first tokens, if
    window_keeps_first). A query that sees no token gives zeros. sinks[h] is one more logit, whose
    value is a row of zeros.

    Centring: codes hold k - k_mean and v - v_mean. q . k_mean is the same for every coded token. If
    there are only coded tokens and no softcap it cancels, and k_mean may be left out. If k_mean is
    given, q . k_mean is added to the logits of coded tokens, so that they compare with sinks and
    with the other regions, which are not centred. v_mean is added in proportion to the coded tokens'
    share of l.

    The order of operations, all in f32, exp as in core/math.h:

      a = q * scale        r = P_k a (bittern/aura_desc.h)        b = a . k_mean, or 0
      coded:          x_t = fma(r . c, k_scale_t, b)    element j in accumulator (j / 8) mod 16
      first, recent:  x_t = a . k_t                     element j in accumulator j mod 16; so in b

      with a softcap: x_t = softcap * tanh(x_t / softcap)  tanh as in core/math.h; not for sinks

    where a dot has 16 accumulators, acc = fma(a_j, k_j, acc) from 0 with j ascending, which the
    halving tree adds. A region is cut into splits of 256 tokens from its first on. In each, over the
    tokens seen, in order:

      m    the largest x_t that is not NaN, or -inf
      p_t  = exp(x_t - m), or exp(x_t) where m = -inf
      l    the n-th p_t seen goes to accumulator n mod 16 by acc + p_t; then the halving tree
      o_j  = fma(w_t, y_tj, o_j) from 0: y the centroid and w_t = p_t * v_scale_t (coded), or
           y = v_t and w_t = p_t

    Splits with a token seen are merged in order into a state of m, l, l_coded, o_coded, o_exact that
    starts at -inf, 0, 0, 0, 0 (with sinks at m = sinks[h], l = 1):

      M = m_split > m ? m_split : m
      f = exp(m - M), g = exp(m_split - M); if M = -inf, f = exp(m), g = exp(m_split)
      l = fma(l_split, g, l * f); o and l_coded likewise. Those that the split does not add to are
          multiplied by f

    Then u = P_v^T o_coded; if v_mean is given, u = fma(l_coded, v_mean, u); and
    out = (u + o_exact) / l, or 0 if l = 0. A row or scale that is not finite affects only the
    queries that see it.

    Kernel cpu_int8 (k_bits 4, Preference::fastest) computes as the exact one does where a KV head
    has 10 or more query rows (queries * heads / kv_heads). With fewer it takes r and c as 16-bit
    integers of full scale 32512, in two bytes each, and leaves out the product of the lower bytes.
    On AVX-512 and with v_bits 4 it also takes w and the centroids y of V as integers: y of full
    scale 2047, w in units of max(max|w| / 32767, sum|w| / 2^19) of its split. Its ErrorNorm is
    `terms`, and error_bound is e = 1 / 32512. For one query let h_t = p_t / l be its weights, S the
    number of splits with a token seen, R = max|r_j|, K = max|k_codebook| and Y = max|v_codebook|,
    each at least 2^-126. Then:

      X_t  = (1 + S) (1 + max|x|) / 32. For a coded token add
             |k_scale_t| (K sum|r_j| / 2 + R sum|c_tj| / 2 + (1.1 + dim / 4096) dim R K).
             The logit x_t is off by at most e X_t.
      L_j  = exp(2 e max X) sum h_t X_t |v_tj - out_j|, over the tokens and the sink: what the logits
             do to out_j.
      N    = 2^-100 + Y sum over the splits of coded tokens of (f + S / 16) Z, where Z is the split's
             sum of h_t |v_scale_t|, and f = 2 + dim / 256. With v_bits 4, f = 16, and a split of n
             tokens adds n (max(z / 2, Z / 32) + 2^-85), z its largest h_t |v_scale_t|.
      A_j  = sum h_t |v_tj|, where |v_tj| of a coded token is |v_scale_t (P_v^T c)_j| + |v_mean_j|.
      out_j is off by at most e (L_j + N sum_i |P_v|_ij + (1 + S / 16) A_j), and one ulp of an f16 or
             bf16 element.

    Kernels cuda_tensor and cuda_wgmma (CUDA, Preference::fastest; dim 64, 80, 96, 128, 192 or 256,
    and 512 for cuda_tensor) take r, c, w and y in f16, each divided by a power of two, and add their
    products in f32.
    cuda_wgmma does the same with q, k_t, w and v_t of first and recent tokens. cuda_tensor (sm_90 or
    later, with the shared memory that the shape needs) has 1 query, at most 8 query heads to a KV
    head, k_bits / v_bits 2/2, 3/2, 3/3, 4/2, 4/3, 4/4, 8/4 or 8/8, capacity and page_size in
    multiples of 16, and first + recent <= 1024. cuda_wgmma (sm_90a) has more queries and no dense
    rotation. The bound is that of cpu_int8 with e = 1 / 1000, and first and recent tokens are
    treated like coded ones:

      X_t  also has K_t sum|a_j| / 2 + A sum|k_tj| / 2 + (1.1 + dim / 4096) dim A K_t, where
           A = max|a_j| and K_t = max|k_tj|
      A_j  has |v_tj| + max_i|v_ti| / 4096

    For a row that sees a |v_scale| of 2^100 nothing is promised; nor, with cuda_wgmma, for one that
    sees two that are 2^112 apart (each counts as at least 2^-60, and a first or recent token with
    its largest |v|), or with k_mean that is not finite.

    If a query sees a NaN, its results are NaN wherever the contract's are. If it sees an infinity,
    or if R K dim, a logit, sum|w| of a split, exp(2 e max X) or another of these magnitudes reaches
    2^127, nothing is promised for its row.

    Layout. Contiguous (page_size 0): slot n of KV head h is row [s * kv_heads + h, n] of codes and
    scales. Paged: row [block_table[s, n / page_size], h, n % page_size]. Coded token t has slot
    (starts[s,0] + t) mod capacity, recent token t slot (starts[s,1] + t) mod recent: both are rings.
    Without `starts` these are 0; without `lengths` every region is full.

    On the CPU a length, a start or a page that is out of range is an error. On CUDA the host does
    not read them. Kernels there limit each to its range: a wrong one causes no fault and no access
    outside the operands, but the values of the outputs are then not specified.
    """

@overload
def gdn_recurrent_step(
    q: _Array | SupportsFloat,
    k: _Array | SupportsFloat,
    v: _Array | SupportsFloat,
    g: _Array | SupportsFloat,
    beta: _Array | SupportsFloat,
    state: _Array | SupportsFloat,
    a_log: _Array | SupportsFloat | None = None,
    dt_bias: _Array | SupportsFloat | None = None,
    state_index: _Array | SupportsFloat | None = None,
    *,
    o: _Array | None = None,
    snapshots: Literal[False] | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    pool: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    head_map: Literal["grouped", "tiled"] = "grouped",
    state_layout: Literal["key_value", "value_key"] = "key_value",
    qk_l2norm: bool = False,
    gate: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    scale: float = 0.0,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns o, snapshots.

    The gated delta rule token by token: decoding. For each sequence, value head and token in turn,
    with the state S [key_dim, value_dim] and the head's q, k, v (widened to f32):

      q, k   = x * (1 / sqrt(x.x + 1e-6)) each, if qk_l2norm;  then q = q * query_scale()
      a      = exp(g)                 g    = -exp(a_log) * softplus(g + dt_bias), if gate
      b      = beta                   beta = sigmoid(beta), if beta_sigmoid;  2 * that, if
                                             allow_neg_eigval
      sk_j   = sum_i S_ij k_i         sq_j = sum_i S_ij q_i
      d_j    = b * fma(-a, sk_j, v_j)
      o_j    = fma(k.q, d_j, a * sq_j)              rounded to the element's dtype
      S_ij   = fma(k_i, d_j, a * S_ij)

    which is S' = a S, d = b (v - S'^T k), S = S' + k d^T, o = S^T q, with the state read once and
    written once. Everything is f32; each operation written above rounds once, products of three from
    the left. exp, softplus and sigmoid are core/math.h's. x.x and k.q are summed as core/dot.h says.
    sk and sq depend on state_layout:

      key_value   sum = fma(S_ij, k_i, sum), i ascending, from 0
      value_key   as core/dot.h: 16 strided sums, then the halving tree

    NaN and infinities follow from this arithmetic; those of a sequence never reach another.

    States. With pool = 0 sequence s has state s. With pool = P > 0 there are P states and sequence s
    uses state state_index[s]; the indices must be in range and different. The other states are not
    changed. An index of -1 skips its sequence, for servers that pad their batches: its o and
    snapshots are zeros, and nothing of it is read. On CUDA the host does not read state_index. Any
    other index that is out of range then leaves its sequence out: its o and snapshots are not
    written. If two sequences have the same index, their results and that state are not specified.
    snapshots, if given, receives the state after each token, to return to it when later tokens are
    rejected.
    """

@overload
def gdn_recurrent_step(
    q: _Array | SupportsFloat,
    k: _Array | SupportsFloat,
    v: _Array | SupportsFloat,
    g: _Array | SupportsFloat,
    beta: _Array | SupportsFloat,
    state: _Array | SupportsFloat,
    a_log: _Array | SupportsFloat | None = None,
    dt_bias: _Array | SupportsFloat | None = None,
    state_index: _Array | SupportsFloat | None = None,
    *,
    o: _Array | None = None,
    snapshots: _Array | Literal[True],
    batch: int | None = None,
    tokens: int | None = None,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    pool: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    head_map: Literal["grouped", "tiled"] = "grouped",
    state_layout: Literal["key_value", "value_key"] = "key_value",
    qk_l2norm: bool = False,
    gate: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    scale: float = 0.0,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result]: ...

@overload
def gdn_recurrent_step(
    q: _Array | SupportsFloat,
    k: _Array | SupportsFloat,
    v: _Array | SupportsFloat,
    g: _Array | SupportsFloat,
    beta: _Array | SupportsFloat,
    state: _Array | SupportsFloat,
    a_log: _Array | SupportsFloat | None = None,
    dt_bias: _Array | SupportsFloat | None = None,
    state_index: _Array | SupportsFloat | None = None,
    *,
    o: _Array | None = None,
    snapshots: _Array | bool | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    pool: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    head_map: Literal["grouped", "tiled"] = "grouped",
    state_layout: Literal["key_value", "value_key"] = "key_value",
    qk_l2norm: bool = False,
    gate: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    scale: float = 0.0,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> Any: ...

@overload
def gdn_decode_step(
    x: _Array | SupportsFloat,
    z: _Array | SupportsFloat,
    g: _Array | SupportsFloat,
    beta: _Array | SupportsFloat,
    conv_weight: _Array | SupportsFloat,
    norm_weight: _Array | SupportsFloat,
    a_log: _Array | SupportsFloat,
    dt_bias: _Array | SupportsFloat,
    conv_state: _Array | SupportsFloat,
    state: _Array | SupportsFloat,
    conv_bias: _Array | SupportsFloat | None = None,
    state_index: _Array | SupportsFloat | None = None,
    *,
    y: _Array | None = None,
    snapshots: Literal[False] | None = None,
    conv_snapshots: Literal[False] | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    width: int | None = None,
    pool: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    head_map: Literal["grouped", "tiled"] = "grouped",
    state_layout: Literal["key_value", "value_key"] = "key_value",
    allow_neg_eigval: bool = False,
    eps: float = 1e-06,
    rounding: Literal["once", "each"] = "once",
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns y, snapshots, conv_snapshots.

    A gated-delta layer's step while decoding, all that lies between its projections: for each
    sequence, and token by token,

      q | k | v = silu(conv(x))           causal_conv1d, with conv_weight, conv_bias, and conv_state
                                          as the inputs before x
      o         = delta rule of q, k, v   gdn_recurrent_step with qk_l2norm, gate and beta_sigmoid:
                                          g and beta hold the projections a and b
      y         = gated norm of o, z      gated_rms_norm with norm_weight, for each value head

    The bits are those of the three ops one after the other: q, k, v and o are rounded to `element`.
    The channels of x are the heads of q, those of k, then those of v, each head's elements together.

    States. conv_state holds each sequence's last width - 1 inputs of the convolution, oldest first,
    and state that of the delta rule; both are read and written. pool, state_index and an index of -1
    are those of gdn_recurrent_step, for both states: a sequence that is skipped gives zeros in y and
    in the snapshots. On CUDA an index that is out of range leaves its sequence out. snapshots and
    conv_snapshots, if given, receive the states after each token, to return to them when later
    tokens are rejected.
    """

@overload
def gdn_decode_step(
    x: _Array | SupportsFloat,
    z: _Array | SupportsFloat,
    g: _Array | SupportsFloat,
    beta: _Array | SupportsFloat,
    conv_weight: _Array | SupportsFloat,
    norm_weight: _Array | SupportsFloat,
    a_log: _Array | SupportsFloat,
    dt_bias: _Array | SupportsFloat,
    conv_state: _Array | SupportsFloat,
    state: _Array | SupportsFloat,
    conv_bias: _Array | SupportsFloat | None = None,
    state_index: _Array | SupportsFloat | None = None,
    *,
    y: _Array | None = None,
    snapshots: _Array | Literal[True],
    conv_snapshots: Literal[False] | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    width: int | None = None,
    pool: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    head_map: Literal["grouped", "tiled"] = "grouped",
    state_layout: Literal["key_value", "value_key"] = "key_value",
    allow_neg_eigval: bool = False,
    eps: float = 1e-06,
    rounding: Literal["once", "each"] = "once",
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result]: ...

@overload
def gdn_decode_step(
    x: _Array | SupportsFloat,
    z: _Array | SupportsFloat,
    g: _Array | SupportsFloat,
    beta: _Array | SupportsFloat,
    conv_weight: _Array | SupportsFloat,
    norm_weight: _Array | SupportsFloat,
    a_log: _Array | SupportsFloat,
    dt_bias: _Array | SupportsFloat,
    conv_state: _Array | SupportsFloat,
    state: _Array | SupportsFloat,
    conv_bias: _Array | SupportsFloat | None = None,
    state_index: _Array | SupportsFloat | None = None,
    *,
    y: _Array | None = None,
    snapshots: Literal[False] | None = None,
    conv_snapshots: _Array | Literal[True],
    batch: int | None = None,
    tokens: int | None = None,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    width: int | None = None,
    pool: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    head_map: Literal["grouped", "tiled"] = "grouped",
    state_layout: Literal["key_value", "value_key"] = "key_value",
    allow_neg_eigval: bool = False,
    eps: float = 1e-06,
    rounding: Literal["once", "each"] = "once",
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result]: ...

@overload
def gdn_decode_step(
    x: _Array | SupportsFloat,
    z: _Array | SupportsFloat,
    g: _Array | SupportsFloat,
    beta: _Array | SupportsFloat,
    conv_weight: _Array | SupportsFloat,
    norm_weight: _Array | SupportsFloat,
    a_log: _Array | SupportsFloat,
    dt_bias: _Array | SupportsFloat,
    conv_state: _Array | SupportsFloat,
    state: _Array | SupportsFloat,
    conv_bias: _Array | SupportsFloat | None = None,
    state_index: _Array | SupportsFloat | None = None,
    *,
    y: _Array | None = None,
    snapshots: _Array | bool | None = None,
    conv_snapshots: _Array | bool | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    width: int | None = None,
    pool: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    head_map: Literal["grouped", "tiled"] = "grouped",
    state_layout: Literal["key_value", "value_key"] = "key_value",
    allow_neg_eigval: bool = False,
    eps: float = 1e-06,
    rounding: Literal["once", "each"] = "once",
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> Any: ...

@overload
def gdn_chunk_backward(
    d_o: _Array | SupportsFloat,
    q: _Array | SupportsFloat,
    k: _Array | SupportsFloat,
    v: _Array | SupportsFloat,
    g: _Array | SupportsFloat,
    beta: _Array | SupportsFloat,
    d_final_state: _Array | SupportsFloat | None = None,
    a_log: _Array | SupportsFloat | None = None,
    dt_bias: _Array | SupportsFloat | None = None,
    mask: _Array | SupportsFloat | None = None,
    initial_state: _Array | SupportsFloat | None = None,
    cu_seqlens: _Array | SupportsFloat | None = None,
    *,
    d_q: _Array | None = None,
    d_k: _Array | None = None,
    d_v: _Array | None = None,
    d_g: _Array | None = None,
    d_beta: _Array | None = None,
    d_a_log: _Array | Literal[True] | None = None,
    d_dt_bias: _Array | Literal[True] | None = None,
    d_initial_state: _Array | Literal[True] | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    chunk: int = 64,
    sequences: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    head_map: Literal["grouped", "tiled"] = "grouped",
    state_layout: Literal["key_value", "value_key"] = "key_value",
    qk_l2norm: bool = False,
    gate: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    scale: float = 0.0,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result, _Result, _Result, _Result, _Result, _Result, _Result]:
    """Returns d_q, d_k, d_v, d_g, d_beta, d_a_log, d_dt_bias, d_initial_state.

    The gradient of gdn_chunk_forward: from d_o and d_final_state (0 if left out) to d_q, d_k, d_v,
    d_g, d_beta and d_initial_state, through the normalisation, gate and sigmoid where these are
    fused, then also d_a_log and d_dt_bias (0 without `gate`).

    The forward pass is computed anew; q, k, beta, G, L, P, y and S (before the chunk) are as in
    gdn_chunk_forward.h, q being normalised and scaled. Chunks go from the last to the first, with H
    the gradient of the state after the chunk. For rows i, j of a chunk, e[i] = e^G[i], l[i] =
    e^(G[last] - G[i]), E[i][j] = e^(G[i] - G[j]), b[i] = -(beta[i] * e[i]), and sums over j:

      r[i]     = (l[i] * (k[i] H) + sum j >= i of P[j][i] d_o[j]) - (sum j > i of L[j][i] r[j])
      dl[i][j] = -(r[i] . y[j])   j < i      DL[i][j] = dl[i][j] * E[i][j]
      dp[i][j] = d_o[i] . y[j]    j <= i     DP[i][j] = dp[i][j] * E[i][j]
      M[i]     = r[i] S^T        N[i] = d_o[i] S^T        Z[i] = y[i] H^T
      X[i][j]  = beta[i] * DL[i][j], X[i][i] = 0
      dq[i]    = e[i] * N[i] + sum j <= i of DP[i][j] k[j]
      dk[i]    = fma(b[i], M[i], l[i] * Z[i]) + sum j >= i of DP[j][i] q[j]
                 + sum j <= i of X[i][j] k[j] + sum j >= i of X[j][i] k[j]
      dv[i]    = beta[i] * r[i]
      dbeta[i] = fma(-e[i], k[i] . M[i], r[i] . v[i]) + (DL[i] . (k k^T)[i] over j < i)
      W[i][j]  = fma(dl[i][j], L[i][j], dp[i][j] * P[i][j])        j < i
      C[i][j]  = C[i+1][j] + W[i][j]                               j < i
      f[i]     = f[i+1] + fma(b[i], k[i] . M[i], e[i] * (q[i] . N[i]))
      z[i]     = z[i-1] + l[i-1] * (k[i-1] . Z[i-1])
      dg[i]    = fma(e[last], <S, H>, (f[i] + (sum j < i of C[i][j])) + z[i])
      H        = e[last] * H + sum of k[i]^T (b[i] * r[i]) + sum of q[i]^T (e[i] * d_o[i])

    dg[i] adds up what g[i] decays and nothing else: terms that g[i] does not decay need not cancel.

    All of it in f32; X, the rounding of d_q, d_k and d_v to `element`, comes last. Products of
    matrices and sums written after one another are acc = fma(a, b, acc), terms ascending, from what
    stands before them or from 0; but the sum over j > i in r descends, and is subtracted at the end.
    a . b is core/dot.h's sum, so is that of C[i] (times 1); <S, H> is the sum over the columns of S,
    ascending, of their dot products; C, f and z start from 0. Every other operation is rounded once.

    Then the d_q and d_k of a key head are summed over its value heads, in order of heads, and with
    a = g + dt_bias, rate = -exp(a_log), and n the normalised k, or q before it is scaled:

      d_q = X(scale * dq), d_k = X(dk)     or, if qk_l2norm, with D either one before X:
            X(1 / sqrt(x.x + 1e-6) * fma(-(D . n), n, D))
      d_g = (dg * rate) * (a > 20 ? 1 : sigmoid(a)), if gate; a reset has dg, which is 0, and adds
            nothing to:
      d_dt_bias = sum of d_g, d_a_log = sum of dg * (rate * softplus(a)): over the tokens of a
            sequence, ascending, acc + d_g and acc = fma(dg, rate * softplus(a), acc), from 0; then
            over sequences
      d_beta = dbeta * slope, if beta_sigmoid, with slope = sigmoid(beta) * sigmoid(-beta), twice
            that if allow_neg_eigval (1 - sigmoid(beta) would lose its digits near 0)

    The gradients of a masked token are 0, and its d_o is not looked at. NaN and infinities stay in
    their sequence and head, or key head for d_q and d_k (d_a_log and d_dt_bias: head).

    Kernel cuda_wgmma (Preference::fastest, sm_90, element bf16 or f16, key_dim 64 or 128, value_dim
    a multiple of 64, chunk 64) keeps S, H and all sums in f32. It rounds to `element` what enters a
    product: S, H, y and r; P and T = (I + L)^-1; the right sides that T turns into y and r;
    e^(G[last] - G[i]) y[i], b[i] r[i] and e[i] d_o[i] on their way into S and H; DP and X. k and q
    enter as they are, and norms and scale go to the other side. d_v, r . v and <S, H> are made of
    the rounded ones, too. Its ErrorNorm is `terms`, and error_bound is b = 2^-7 + 2^-11. S, y and
    the sums D and Y are those of gdn_chunk_forward.h for the kernel of that name; with its letters,
    and ' as there, let

      F_c     what a change of H before a later chunk c has become after this one: every chunk in
              between makes e^G[last] F_c - K^T B T^T W K F_c of it
      D_h     = the sum over c of |F_c| N_c;                         H' = |H| + b D_h
      R_h     = (W |K| H' + |P|^T |d_o|) 3 / 2 + C^T |d_o| / 64 + A^T r' / 64
      D_r     = |T|^T R_h + the sum over c of |T^T W K F_c| N_c;     r' = |r| + b D_r
      Z_h     = |T|^T (W |K| H' + |P|^T |d_o|) / 2, for T's rounding
      N       = |K|^T |B| (r' / 2 + Z_h) + |Q|^T E |d_o| / 2 + e^G[last] H' / 64 + |K^T B T^T| R_h

    Then H, also as d_initial_state, is off by at most b D_h, and r by b D_r. Rounded, x in S, H, y,
    r is off by b U(x), U(x) = D(x) + x' / 2. A product of two such is off by b (U(x) y' + x' U(y) +
    x' y' / 64), and each gradient by what the formulas above make of these, with magnitudes for all
    other factors, half the magnitude of each DP and X, and a 64th of all terms; d_q, d_k and d_v and
    their like in `element` by an ulp more. Each factor above 0 counts as at least 2^-80 (f16:
    2^-14). If an input is NaN or infinite (other than g = -infinity), or if a magnitude that is
    rounded reaches 2^126 (f16: 2^14), or another one 2^126, nothing is promised for that sequence
    and head (or key head).

    With few heads it cuts sequences into segments, as gdn_chunk_forward.h says for S. H before a
    segment is M^T H + N' of H after it: N' is what H = 0 would give, and M the one of S. What is
    said there of the magnitudes of S and y then holds for H and r too, with |M|^T |H| + |N'|.
    """

@overload
def gdn_chunk_backward(
    d_o: _Array | SupportsFloat,
    q: _Array | SupportsFloat,
    k: _Array | SupportsFloat,
    v: _Array | SupportsFloat,
    g: _Array | SupportsFloat,
    beta: _Array | SupportsFloat,
    d_final_state: _Array | SupportsFloat | None = None,
    a_log: _Array | SupportsFloat | None = None,
    dt_bias: _Array | SupportsFloat | None = None,
    mask: _Array | SupportsFloat | None = None,
    initial_state: _Array | SupportsFloat | None = None,
    cu_seqlens: _Array | SupportsFloat | None = None,
    *,
    d_q: _Array | None = None,
    d_k: _Array | None = None,
    d_v: _Array | None = None,
    d_g: _Array | None = None,
    d_beta: _Array | None = None,
    d_a_log: _Array | bool | None = None,
    d_dt_bias: _Array | bool | None = None,
    d_initial_state: _Array | bool | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    chunk: int = 64,
    sequences: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    head_map: Literal["grouped", "tiled"] = "grouped",
    state_layout: Literal["key_value", "value_key"] = "key_value",
    qk_l2norm: bool = False,
    gate: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    scale: float = 0.0,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> Any: ...

@overload
def causal_conv1d(
    x: _Array | SupportsFloat,
    weight: _Array | SupportsFloat,
    bias: _Array | SupportsFloat | None = None,
    initial_state: _Array | SupportsFloat | None = None,
    mask: _Array | SupportsFloat | None = None,
    cu_seqlens: _Array | SupportsFloat | None = None,
    *,
    y: _Array | Literal[True] | None = None,
    final_state: _Array | Literal[True] | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    channels: int | None = None,
    width: int | None = None,
    sequences: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    silu: bool = True,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result]:
    """Returns y, final_state.

    A depthwise causal convolution along each sequence, with the state it starts from and leaves:

      u[t][c] = bias[c] + sum over j < width of weight[c][j] * x[t - width + 1 + j][c]
      y[t][c] = silu(u[t][c]), or u[t][c]

    Positions t count from the sequence's start. x[-1], x[-2] ... are initial_state's, newest last,
    or +0 where it is left out. final_state receives the last width - 1 inputs, those of
    initial_state included when the sequence is shorter: exact copies.

    In f32: u starts from the bias (+0 if left out) and is u = fma(weight, x, u), j ascending; silu
    is core/math.h's; y is rounded to `element` once. Zeros that stand for absent inputs take part in
    the sum like any other.

    A token whose mask is 0 is not read: it counts as x = +0, also in final_state, and its y is +0.
    NaN and infinities reach the next width - 1 tokens of their channel and sequence, and no others.
    """

@overload
def causal_conv1d(
    x: _Array | SupportsFloat,
    weight: _Array | SupportsFloat,
    bias: _Array | SupportsFloat | None = None,
    initial_state: _Array | SupportsFloat | None = None,
    mask: _Array | SupportsFloat | None = None,
    cu_seqlens: _Array | SupportsFloat | None = None,
    *,
    y: _Array | bool | None = None,
    final_state: _Array | bool | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    channels: int | None = None,
    width: int | None = None,
    sequences: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    silu: bool = True,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> Any: ...

@overload
def causal_conv1d_backward(
    d_y: _Array | SupportsFloat,
    x: _Array | SupportsFloat,
    weight: _Array | SupportsFloat,
    d_final_state: _Array | SupportsFloat | None = None,
    bias: _Array | SupportsFloat | None = None,
    initial_state: _Array | SupportsFloat | None = None,
    mask: _Array | SupportsFloat | None = None,
    cu_seqlens: _Array | SupportsFloat | None = None,
    *,
    d_x: _Array | Literal[True] | None = None,
    d_weight: _Array | Literal[True] | None = None,
    d_bias: _Array | Literal[True] | None = None,
    d_initial_state: _Array | Literal[True] | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    channels: int | None = None,
    width: int | None = None,
    sequences: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    silu: bool = True,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result, _Result, _Result]:
    """Returns d_x, d_weight, d_bias, d_initial_state.

    The gradients of causal_conv1d. With u, x and the sequences as there (u is computed anew, in f32,
    and never rounded further), and positions counted from the sequence's start:

      d_u[t][c]         = d_y[t][c] * silu_slope(u[t][c]), or d_y[t][c];  +0 past the sequence's end
      d_x[t][c]         = sum over j < width of weight[c][j] * d_u[t + width - 1 - j][c]
                          + d_final_state's value for x[t], where final_state holds x[t]
      d_initial_state   the same at the positions t < 0
      d_weight[c][j]    = sum over tokens of d_u[t][c] * x[t - width + 1 + j][c]
      d_bias[c]         = sum over tokens of d_u[t][c]

    d_x is sum = fma(weight, d_u, sum), j ascending, from 0, then + d_final_state (only where that is
    given and has a value), rounded to `element` once. At t < 0 the d_u of tokens before the start
    are +0 and take part.

    d_weight and d_bias go over each sequence in blocks of 64 tokens from its start: inside a block
    sum = fma(d_u, x, sum) (sum + d_u for the bias), t ascending, from 0; then the halving tree over
    all blocks of all sequences, in order. So bits do not depend on threads.

    A masked token's d_y is not read: its d_u and its d_x are +0, and x there counts as +0.

    Kernel cuda_quick (Preference::fastest, with silu) makes silu_slope of the GPU's estimates of
    exp2 and 1 / x, and sums blocks of 256 tokens where there are many. Its ErrorNorm is `terms` and
    error_bound 2^-16. With s = sigmoid(u), at least 2^-100, the terms of d_u are
    |d_y| s (1 + |u| (1 - s)), and those of the gradients the sums above with these and with
    magnitudes. Where they reach 2^127, nothing is promised.
    """

@overload
def causal_conv1d_backward(
    d_y: _Array | SupportsFloat,
    x: _Array | SupportsFloat,
    weight: _Array | SupportsFloat,
    d_final_state: _Array | SupportsFloat | None = None,
    bias: _Array | SupportsFloat | None = None,
    initial_state: _Array | SupportsFloat | None = None,
    mask: _Array | SupportsFloat | None = None,
    cu_seqlens: _Array | SupportsFloat | None = None,
    *,
    d_x: _Array | bool | None = None,
    d_weight: _Array | bool | None = None,
    d_bias: _Array | bool | None = None,
    d_initial_state: _Array | bool | None = None,
    batch: int | None = None,
    tokens: int | None = None,
    channels: int | None = None,
    width: int | None = None,
    sequences: int | None = None,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    silu: bool = True,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> Any: ...

def gated_rms_norm(
    x: _Array | SupportsFloat,
    z: _Array | SupportsFloat,
    weight: _Array | SupportsFloat,
    *,
    y: _Array | None = None,
    rows: int | None = None,
    dim: int | None = None,
    eps: float = 1e-06,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    rounding: Literal["once", "each"] = "once",
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns y.

    A row normalised to root mean square 1, weighted, and gated:

      rstd = 1 / sqrt((x.x) / dim + eps)
      y_j  = ((x_j * rstd) * weight_j) * silu(z_j)

    In f32, each operation above rounded once; x.x is summed as core/dot.h says, silu is
    core/math.h's, eps is rounded to f32. y is rounded to `element`. With rounding = each so are x_j
    * rstd and its product with weight_j, before they are used.

    A row of zeros gives zeros (NaN when eps is 0). NaN and infinities stay in their row.
    """

@overload
def gated_rms_norm_backward(
    d_y: _Array | SupportsFloat,
    x: _Array | SupportsFloat,
    z: _Array | SupportsFloat,
    weight: _Array | SupportsFloat,
    *,
    d_x: _Array | Literal[True] | None = None,
    d_z: _Array | Literal[True] | None = None,
    d_weight: _Array | Literal[True] | None = None,
    rows: int | None = None,
    dim: int | None = None,
    eps: float = 1e-06,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result, _Result]:
    """Returns d_x, d_z, d_weight.

    The gradients of gated_rms_norm. With rstd as there, and in each row

      n_j = x_j * rstd     s_j = sigmoid(z_j)     h_j = d_y_j * (z_j * s_j)     e_j = h_j * weight_j

      d_x_j    = rstd * fma(-n_j, (e.n) / dim, e_j)
      d_z_j    = (d_y_j * (n_j * weight_j)) * silu_slope(z_j)
      d_weight = sum over rows of h_j * n_j

    In f32, each operation rounded once; e.n is summed as core/dot.h says, sigmoid and silu_slope are
    core/math.h's. Results are rounded to `element`. The forward's roundings pass gradients straight
    through. d_weight goes over rows in blocks of 64: sum = fma(h, n, sum) from 0, then the halving
    tree over the blocks, in order. NaN and infinities stay in their row, and in d_weight's column.
    """

@overload
def gated_rms_norm_backward(
    d_y: _Array | SupportsFloat,
    x: _Array | SupportsFloat,
    z: _Array | SupportsFloat,
    weight: _Array | SupportsFloat,
    *,
    d_x: _Array | bool | None = None,
    d_z: _Array | bool | None = None,
    d_weight: _Array | bool | None = None,
    rows: int | None = None,
    dim: int | None = None,
    eps: float = 1e-06,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> Any: ...

def gguf_dequantize(
    blocks: _Array | SupportsFloat,
    *,
    y: _Array | None = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    type: Literal["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"] = "Q4_0",
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns y.

    y[j] = s q[j] - m (s q[j] + m in Q4_1 and Q5_1), with s = d sc and m = dmin mn in the K formats,
    and y[j] = s v[q[j]] in IQ4_NL, IQ4_XS and MXFP4, from the blocks of bittern/gguf_desc.h: each
    operation in f32, rounded, in this order; then y is rounded to its dtype. Types without m
    subtract nothing.

    f32 results equal those of the `gguf` Python package bit for bit, infinities and signed zeros
    included: blocks are any bytes, so d, m and dmin may be infinite, NaN or subnormal, and follow
    IEEE arithmetic (an infinite scale times code 0 is NaN). Bits of a NaN are not promised.
    """

def gguf_quantize(
    w: _Array | SupportsFloat,
    importance: _Array | SupportsFloat | None = None,
    scales: _Array | SupportsFloat | None = None,
    biases: _Array | SupportsFloat | None = None,
    *,
    blocks: _Array | None = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    type: Literal["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"] = "Q4_0",
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    given_grid: bool = False,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns blocks.

    Weights into the blocks of bittern/gguf_desc.h. All arithmetic is f32, each operation rounded;
    x are the weights of a block: NaN counts as 0, and a weight beyond the largest that the type can
    hold, infinities among them, is clamped to +-65504 times

      Q4_0 8   Q5_0 16   Q8_0 127   Q4_1 Q5_1 1   Q2_K 15   Q3_K 64   Q4_K Q5_K 63   Q6_K 2048

    so no scale that is stored is infinite or NaN. With f16() to nearest even, A() half away from
    zero, and r = 1 / d, or 0 where d = 0 or 1 / d overflows:

      Q4_0 Q5_0   e = the first weight of largest magnitude;  d = e / -8 (-16)
                  q = min(trunc(x r + 8.5), 15)  (16.5, 31):  ties towards the higher code
      Q4_1 Q5_1   d = (max - min + 0) / 15 (31);  m = min + 0:  never -0
                  q = min(trunc((x - m) r + 0.5), 15 (31)):   ties towards the higher code
      Q8_0        d = max |x| / 127;  q = A(x r)

    and f16(d), f16(m) are stored. These are ggml's rules: the blocks equal those of the `gguf`
    Python package bit for bit, but for weights that were clamped and the signs of zeros in
    Q4_1 and Q5_1.

    The K types minimise the squared error, weighted by `importance` per column where it is given.
    Their codes are the nearest of the stored grid, half to even.

      Q4_K Q5_K   Each group of 32 has an ideal scale and minimum: by a search (16 step widths for
                  its range, a least-squares line through the codes of each), or, with given_grid,
                  from `scales` and `biases`, w = scale q + bias. d and dmin are those of 16 tries
                  each whose multiples sc and mn come nearest to the ideal; then every group tries
                  sc and its neighbours, each with the best mn, and keeps the least error. The
                  groups try once more with d and dmin fitted to these codes by least squares, and
                  the better result is stored.
      Q2_K        The same for groups of 16, with sc and mn of four bits. For each width the search
                  fits two lines in turn, the second one through the codes that the first one
                  gives.
      Q6_K Q3_K   The same for groups of 16, with a signed scale and no minimum. Q3_K tries the
                  largest weight of a group at both ends of its codes, Q6_K at the lower one.

    IQ4_NL, IQ4_XS and MXFP4 are read only.

    Over a tensor of a real model the error is at most ggml's. A negative scale of a given grid means
    the same grid counted from its other end. A bias above 0 cannot be stored, so the grid then runs
    from 0 to the same top. Scales and biases that are not finite count as 0. An importance that is
    not > 0 or not finite counts as 0, and one above 2^40 as 2^40. docs/numerics.md gives every
    step.
    """

@overload
def rms_norm(
    x: _Array | SupportsFloat,
    weight: _Array | SupportsFloat,
    residual: _Array | SupportsFloat | None = None,
    *,
    y: _Array | None = None,
    sum: Literal[False] | None = None,
    rows: int | None = None,
    dim: int | None = None,
    eps: float = 1e-06,
    offset: float = 0.0,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    rounding: Literal["once", "each"] = "once",
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns y, sum.

    A row normalised to root mean square 1 and weighted, after an optional addition:

      s_j  = x_j + residual_j, rounded to `element`; x_j where residual is left out
      rstd = 1 / sqrt((s.s) / dim + eps)
      y_j  = (s_j * rstd) * (weight_j + offset)

    In f32, each operation above rounded once; s.s is summed as core/dot.h says, eps and offset are
    rounded to f32. y is rounded to `element`. With rounding = each, s_j * rstd is rounded to
    `element` before it is used. `sum` receives s. It may be the memory of residual, so that one call
    updates the residual stream and normalises it.

    A row of zeros gives zeros (NaN when eps is 0). NaN and infinities stay in their row.
    """

@overload
def rms_norm(
    x: _Array | SupportsFloat,
    weight: _Array | SupportsFloat,
    residual: _Array | SupportsFloat | None = None,
    *,
    y: _Array | None = None,
    sum: _Array | Literal[True],
    rows: int | None = None,
    dim: int | None = None,
    eps: float = 1e-06,
    offset: float = 0.0,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    rounding: Literal["once", "each"] = "once",
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result]: ...

@overload
def rms_norm(
    x: _Array | SupportsFloat,
    weight: _Array | SupportsFloat,
    residual: _Array | SupportsFloat | None = None,
    *,
    y: _Array | None = None,
    sum: _Array | bool | None = None,
    rows: int | None = None,
    dim: int | None = None,
    eps: float = 1e-06,
    offset: float = 0.0,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    rounding: Literal["once", "each"] = "once",
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> Any: ...

def rope(
    x: _Array | SupportsFloat,
    positions: _Array | SupportsFloat,
    inverse_frequencies: _Array | SupportsFloat,
    *,
    y: _Array | None = None,
    tokens: int | None = None,
    heads: int | None = None,
    dim: int | None = None,
    rotary_dim: int | None = None,
    factor: float = 1.0,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    layout: Literal["half", "interleaved"] = "half",
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns y.

    Rotary position embedding: pairs of elements of a head, turned by an angle that grows with the
    token's position.

      angle = positions[t] * inverse_frequencies[i]     i < rotary_dim / 2
      c = cos(angle) * factor       s = sin(angle) * factor
      y_a = x_a * c - x_b * s       y_b = x_b * c + x_a * s

    a, b = i, i + rotary_dim / 2 (layout half) or 2 i, 2 i + 1 (interleaved). Elements from
    rotary_dim on are copied. `factor` is yarn's scaling of attention; bittern/rope_frequencies.h
    makes the frequencies.

    The angle is the product in f64, which is exact for |position| <= 2^29. cos and sin are
    core/angle.h's, within 0.501 ulp of f32 for |angle| < 2^30, and NaN for larger angles. The other
    operations are in f32, each rounded once; factor is rounded to f32, y to `element`.

    y may be the memory of x. NaN and infinities stay in their pair.

    The gradient is rope itself with negated frequencies: cos is even and sin odd, so it turns d_y
    back, times the same factor.
    """

def gated_activation(
    gate: _Array | SupportsFloat,
    up: _Array | SupportsFloat,
    *,
    y: _Array | None = None,
    rows: int | None = None,
    dim: int | None = None,
    kind: Literal["swiglu", "geglu_tanh", "geglu_erf"] = "swiglu",
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    rounding: Literal["once", "each"] = "once",
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns y.

    The gate of an MLP:

      y = f(gate) * up     f = silu (swiglu), gelu_tanh (geglu_tanh) or gelu (geglu_erf)

    In f32; silu is core/math.h's, gelu and gelu_tanh are core/activations.h's. The product is
    rounded once, and to `element`. With rounding = each, f(gate) is rounded to `element` before it
    is used.

    gate and up have strides of their own, so they may be halves of one matrix; y may be the memory
    of either. f(-infinity) is NaN.
    """

def log_softmax(
    x: _Array | SupportsFloat,
    *,
    y: _Array | None = None,
    rows: int | None = None,
    dim: int | None = None,
    softcap: float = 0.0,
    temperature: float = 1.0,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns y.

    The logarithm of a row's softmax:

      v_j = x_j                                     without softcap
      v_j = softcap * tanh(x_j / softcap)         with softcap > 0
      v_j = v_j / temperature                       with temperature != 1
      m = max v      l = sum of exp(v_j - m)      y_j = (v_j - m) - log(l)

    In f32, each operation rounded once; softcap and temperature are rounded to f32, exp is
    core/math.h's, tanh core/activations.h's. l is summed in f64: the elements of a block of 4096 go
    to 16 chains, element j to chain j mod 16, which the halving tree adds; the blocks are added in
    order. log is core/exp_log.h's, in f64, and is rounded to f32 once.

    y is f32. A row that holds NaN or +infinity, or nothing but -infinity, gives NaN. -infinity
    beside finite numbers gives -infinity. y may be the memory of an f32 x.
    """

def quantized_matmul(
    x: _Array | SupportsFloat,
    w: _Array | SupportsFloat | None = None,
    packed: _Array | SupportsFloat | None = None,
    scales: _Array | SupportsFloat | None = None,
    biases: _Array | SupportsFloat | None = None,
    blocks: _Array | SupportsFloat | None = None,
    panels: _Array | SupportsFloat | None = None,
    *,
    y: _Array | None = None,
    rows: int | None = None,
    outputs: int | None = None,
    inputs: int | None = None,
    type: Literal["f32", "f16", "bf16", "affine", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"] | None = None,
    bits: int = 4,
    group_size: int = 64,
    scale_element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    layout: Literal["stored", "panels"] = "stored",
    activations: Literal["float", "int16", "int8"] = "int16",
    element: Literal["f32", "bf16", "float32", "bfloat16"] | _DType | None = None,
    f32_y: bool | None = None,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns y.

    y = x W^T: y[m][n] is the product of row m of x and row n of W, a matrix as a model stores it
    (bittern/matmul_desc.h), which is never expanded as a whole.

    activations float

      y[m][n] = fma(x[m][k], w[n][k], ...), k ascending, from +0

      with w the number that the weight stands for, in f32. NaN and infinities follow IEEE.

    activations int16 (the default) and int8: x is quantised, and products are integers.

      Row m of x is cut into groups of 32 (64, where W has groups of 64 or 128), a = max|x| of one.
      d = max(a / L, 2^-141) with L = 32512 (int16) or 127 (int8), the quotient rounded to f32;
          d = 0 if a = 0; d = NaN if an element is NaN or infinite, and its codes are then 0
      c[k] = R(x[k] / d), the quotient rounded to f32, R to the nearest integer, ties to even;
          0 if d = 0. |c| is at most 32640 or 127.

      The sum runs over the runs of inputs that share both a group of x and a group of W: of 16 for
      W's groups of 16, of 32, or of 64 for those of 64 and 128. For each run, ascending, from +0:

        C = the sum of c[k],  D = the sum of code[n][k] c[k]       integers, exact
        acc = fma(b, d C, acc)           where W's type has biases
        acc = fma(float(D) d, s, acc)

      with s and b of W's group. d C, float(D) and its product with d are rounded to f32, float(D) to
      the nearest, ties to even. y[m][n] = acc. A NaN or an infinity in a row of x makes all of that
      row of y NaN, if inputs is not 0.

      An int16 is two bytes, 256 h + l with l in -128 .. 127: two products of bytes.

    Kernel cpu_bf16 (activations float, Preference::fastest, a CPU with AVX512_BF16) rounds x and w
    to bf16, nearest even, and adds the same terms in f32, those of two inputs at a time, the odd one
    first. It takes subnormal numbers for 0. Its ErrorNorm is `terms`. Let r_x = 2^-8, or 0 for x in
    bf16, r_w = 2^-8, or 0 for type bf16, and r = r_x + r_w + r_x r_w. Then y[m][n] is off by at most
    error_bound = r + (1 + r) (inputs + 8) 2^-23 times 2^-100 plus the sum of |x[m][k]| |w[n][k]|,
    and one ulp of a bf16 y. In that sum each factor above 0 counts as at least 2^-100. With a term
    that is not finite, the element is NaN or an infinity as in the definition. But nothing is
    promised for an element if that sum or one of its finite factors reaches 2^127, or if an infinity
    meets a number of magnitude below 2^-126. Its bits do not depend on rows, threads and layout.

    y is f32, or rounded to x's dtype. A row of y does not depend on the other rows, nor on how many
    there are. Integers have no order and the f32 operations are listed, so every backend, SIMD
    target, thread count and layout gives the same bits, but for cpu_bf16.
    """

@overload
def quantized_matmul_backward(
    d_y: _Array | SupportsFloat,
    x: _Array | SupportsFloat | None = None,
    w: _Array | SupportsFloat | None = None,
    packed: _Array | SupportsFloat | None = None,
    scales: _Array | SupportsFloat | None = None,
    biases: _Array | SupportsFloat | None = None,
    blocks: _Array | SupportsFloat | None = None,
    panels: _Array | SupportsFloat | None = None,
    *,
    d_x: _Array | Literal[True] | None = None,
    d_scales: _Array | Literal[True] | None = None,
    d_biases: _Array | Literal[True] | None = None,
    d_w: _Array | Literal[True] | None = None,
    rows: int | None = None,
    outputs: int | None = None,
    inputs: int | None = None,
    type: Literal["f32", "f16", "bf16", "affine", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"] | None = None,
    bits: int = 4,
    group_size: int = 64,
    scale_element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    layout: Literal["stored", "panels"] = "stored",
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result, _Result, _Result]:
    """Returns d_x, d_scales, d_biases, d_w.

    The gradients of quantized_matmul with activations float, y = x W^T. W is never made as a whole,
    and nor is its gradient dw, unless d_w asks for it.

      d_x[m][k] = fma(d_y[m][n], w[n][k], ...), n ascending, from +0

    with w the number that the weight stands for, in f32 (bittern/matmul_desc.h). With type affine,
    where w = code s + b, there are also the gradients of scales and biases. For group g of row n:

      dw[n][k]       = fma(d_y[m][n], x[m][k], ...), m ascending, from +0
      d_scales[n][g] = fma(code[n][k], dw[n][k], ...), k of the group ascending, from +0
      d_biases[n][g] = the sum of dw[n][k], k of the group ascending, from +0
      d_w[n][k]      = dw[n][k]

    All in f32. The rounding of w passes gradients straight through. NaN and infinities follow IEEE.
    Any output may be left out, not all of them. x is read for d_scales, d_biases and d_w alone, and
    may be left out if none of them is wanted. Without rows these are 0, without outputs d_x is.
    Every backend, SIMD target, thread count and layout gives the same bits, but for cpu_bf16.

    Kernel cpu_bf16 (Preference::fastest, a CPU with AVX512_BF16) rounds d_y, x and w to bf16,
    nearest even, and adds the terms of d_x and dw in f32, those of two outputs or rows at a time,
    the odd one first. It takes subnormal numbers for 0. Sums over groups are as above. Its bits
    do not depend on the number of threads. Its ErrorNorm is `terms`: with r = 2^-7 + 2^-16, an
    element is off by at most error_bound = r + (1 + r) (terms + 8) 2^-23 times

      d_x[m][k]       2^-100 + the sum of |d_y[m][n]| |w[n][k]|
      d_w[n][k]       2^-100 + the sum of |d_y[m][n]| |x[m][k]|
      d_scales[n][g]  2^-100 + the sum of code[n][k] times that of d_w[n][k]
      d_biases[n][g]  2^-100 + the sum of those of d_w[n][k]

    where terms is outputs or, with type affine, rows + group_size if that is more. In products each
    factor above 0 counts as at least 2^-100. With a term that is not finite, the element is NaN or
    an infinity as in the definition. But nothing is promised for an element if such a sum or one of
    its finite factors reaches 2^127, or if an infinity meets a number of
    magnitude below 2^-126.
    """

@overload
def quantized_matmul_backward(
    d_y: _Array | SupportsFloat,
    x: _Array | SupportsFloat | None = None,
    w: _Array | SupportsFloat | None = None,
    packed: _Array | SupportsFloat | None = None,
    scales: _Array | SupportsFloat | None = None,
    biases: _Array | SupportsFloat | None = None,
    blocks: _Array | SupportsFloat | None = None,
    panels: _Array | SupportsFloat | None = None,
    *,
    d_x: _Array | bool | None = None,
    d_scales: _Array | bool | None = None,
    d_biases: _Array | bool | None = None,
    d_w: _Array | bool | None = None,
    rows: int | None = None,
    outputs: int | None = None,
    inputs: int | None = None,
    type: Literal["f32", "f16", "bf16", "affine", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"] | None = None,
    bits: int = 4,
    group_size: int = 64,
    scale_element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    layout: Literal["stored", "panels"] = "stored",
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> Any: ...

def pack_panels(
    w: _Array | SupportsFloat | None = None,
    packed: _Array | SupportsFloat | None = None,
    scales: _Array | SupportsFloat | None = None,
    biases: _Array | SupportsFloat | None = None,
    blocks: _Array | SupportsFloat | None = None,
    *,
    panels: _Array | None = None,
    outputs: int | None = None,
    inputs: int | None = None,
    type: Literal["f32", "f16", "bf16", "affine", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"] | None = None,
    bits: int = 4,
    group_size: int = 64,
    scale_element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns panels.

    Weights as a model stores them, into the panels that quantized_matmul and embedding read fastest
    (layout panels). The bytes of bittern/matmul_desc.h are put in another order and nothing else is
    done to them, so unpack_panels brings every bit back. As many bytes as stored, for outputs
    rounded up to a multiple of 16; the rows that the last panel lacks are zeros.
    """

@overload
def unpack_panels(
    panels: _Array | SupportsFloat,
    *,
    w: _Array | Literal[True] | None = None,
    packed: _Array | None = None,
    scales: _Array | None = None,
    biases: _Array | None = None,
    blocks: _Array | Literal[True] | None = None,
    outputs: int | None = None,
    inputs: int | None = None,
    type: Literal["f32", "f16", "bf16", "affine", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"] | None = None,
    bits: int = 4,
    group_size: int = 64,
    scale_element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result, _Result, _Result, _Result]:
    """Returns w, packed, scales, biases, blocks.

    The inverse of pack_panels: weights as a model stores them, from panels. The rows that the last
    panel has beyond `outputs` are not read.
    """

@overload
def unpack_panels(
    panels: _Array | SupportsFloat,
    *,
    w: _Array | bool | None = None,
    packed: _Array | None = None,
    scales: _Array | None = None,
    biases: _Array | None = None,
    blocks: _Array | bool | None = None,
    outputs: int | None = None,
    inputs: int | None = None,
    type: Literal["f32", "f16", "bf16", "affine", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"] | None = None,
    bits: int = 4,
    group_size: int = 64,
    scale_element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> Any: ...

def embedding(
    ids: _Array | SupportsFloat,
    w: _Array | SupportsFloat | None = None,
    packed: _Array | SupportsFloat | None = None,
    scales: _Array | SupportsFloat | None = None,
    biases: _Array | SupportsFloat | None = None,
    blocks: _Array | SupportsFloat | None = None,
    panels: _Array | SupportsFloat | None = None,
    *,
    y: _Array | None = None,
    rows: int | None = None,
    outputs: int | None = None,
    inputs: int | None = None,
    type: Literal["f32", "f16", "bf16", "affine", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"] | None = None,
    bits: int = 4,
    group_size: int = 64,
    scale_element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    layout: Literal["stored", "panels"] = "stored",
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> _Result:
    """Returns y.

    y[i] = row ids[i] of W: the numbers that its weights stand for (bittern/matmul_desc.h), in f32,
    rounded to y's dtype.
    """

def attention_backward(
    d_out: _Array | SupportsFloat,
    q: _Array | SupportsFloat,
    k: _Array | SupportsFloat,
    v: _Array | SupportsFloat,
    cu_seqlens: _Array | SupportsFloat | None = None,
    *,
    d_q: _Array | None = None,
    d_k: _Array | None = None,
    d_v: _Array | None = None,
    tokens: int | None = None,
    sequences: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    dim: int | None = None,
    scale: float = 0.0,
    softcap: float = 0.0,
    window: int = 0,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result, _Result]:
    """Returns d_q, d_k, d_v.

    The gradients of causal softmax attention: of what aura_attention computes where all tokens are
    `first` ones. For query i and head h, with the keys and values of KV head h / (heads / kv_heads)
    and sums over the tokens t that the query sees:

      out[i,h] = sum_t p_t v_t      p_t = exp(x_t - m) / l      l = sum_t exp(x_t - m)
      x_t = scale * q[i,h] . k_t    or with a softcap > 0: softcap * tanh(that / softcap)

    Sequences are runs of the tokens (bittern/sequences.h); with sequences 0 there is one. They may
    be empty. Token i sees those of its sequence up to itself, and with a window w > 0 none that is w
    or more before it. Nothing of the forward pass is kept: all is computed anew.

    The order of operations, all in f32; exp and tanh as in core/math.h. Dots and sums over t are
    acc = fma(a, b, acc) from 0 with j or t ascending, but l is acc + e_t:

      a    = q * scale              s_t = sum_j a_j k_tj
      x_t  = s_t                    or with a softcap: u_t = tanh(s_t / softcap), x_t = softcap * u_t
      m    the largest x_t that is not NaN, or -inf
      e_t  = exp(x_t - m), or exp(x_t) where m = -inf
      l    = sum_t e_t              r = 1 / l, or 0 where l = 0
      g_t  = sum_j d_out_j v_tj     D = r * sum_t e_t g_t
      p_t  = e_t * r
      z_t  = p_t * (g_t - D)        or with a softcap: (that) * fma(-u_t, u_t, 1)

      d_q_j  = scale * sum_t z_t k_tj
      d_k_tj = sum of z_t a_j       over the heads of the group, and for each over the queries that
      d_v_tj = sum of p_t d_out_j   see t, both ascending: one accumulator, from 0

    What a query does not see is not computed: a NaN in a row affects only the queries that see it,
    and what these see. A query whose logits are all -inf adds nothing.
    """

@overload
def rms_norm_backward(
    d_y: _Array | SupportsFloat,
    x: _Array | SupportsFloat,
    weight: _Array | SupportsFloat,
    d_sum: _Array | SupportsFloat | None = None,
    *,
    d_x: _Array | Literal[True] | None = None,
    d_weight: _Array | Literal[True] | None = None,
    rows: int | None = None,
    dim: int | None = None,
    eps: float = 1e-06,
    offset: float = 0.0,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result]:
    """Returns d_x, d_weight.

    The gradients of rms_norm. x is what was normalised: `sum`, where the forward had a residual.
    With rstd as there, and in each row

      n_j = x_j * rstd     e_j = d_y_j * (weight_j + offset)

      d_x_j    = rstd * fma(-n_j, (e.n) / dim, e_j), plus d_sum_j if d_sum is given
      d_weight = sum over rows of d_y_j * n_j

    d_sum is the gradient that reaches x by another way: the residual stream's. d_x may be its
    memory.

    In f32, each operation rounded once; x.x and e.n are summed as core/dot.h says, eps and offset
    are rounded to f32. Results are rounded to `element`. The forward's roundings pass gradients
    straight through. d_weight goes over rows in blocks of 64: sum = fma(d_y, n, sum) from 0, then
    the halving tree over the blocks, in order. NaN and infinities stay in their row, and in
    d_weight's column. A row of zeros gives NaN when eps is 0.
    """

@overload
def rms_norm_backward(
    d_y: _Array | SupportsFloat,
    x: _Array | SupportsFloat,
    weight: _Array | SupportsFloat,
    d_sum: _Array | SupportsFloat | None = None,
    *,
    d_x: _Array | bool | None = None,
    d_weight: _Array | bool | None = None,
    rows: int | None = None,
    dim: int | None = None,
    eps: float = 1e-06,
    offset: float = 0.0,
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> Any: ...

@overload
def gated_activation_backward(
    d_y: _Array | SupportsFloat,
    gate: _Array | SupportsFloat,
    up: _Array | SupportsFloat,
    *,
    d_gate: _Array | Literal[True] | None = None,
    d_up: _Array | Literal[True] | None = None,
    rows: int | None = None,
    dim: int | None = None,
    kind: Literal["swiglu", "geglu_tanh", "geglu_erf"] = "swiglu",
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result]:
    """Returns d_gate, d_up.

    The gradients of gated_activation:

      d_gate = (d_y * up) * f'(gate)
      d_up   = d_y * f(gate)

    In f32, each operation rounded once, and results to `element`. f is the forward's; its slope f'
    is silu_slope of core/math.h (swiglu), gelu_tanh_slope (geglu_tanh) or gelu_slope (geglu_erf) of
    core/activations.h. The forward's rounding of f(gate) passes gradients straight through, and
    d_up has f(gate) before it.

    Each tensor has strides of its own, so gate and up, and their gradients, may be halves of one
    matrix. Either gradient may be the memory of gate, up or d_y. NaN stays in its element, which is
    also NaN where f or f' is: swiglu's f' at both infinities, f at -infinity.
    """

@overload
def gated_activation_backward(
    d_y: _Array | SupportsFloat,
    gate: _Array | SupportsFloat,
    up: _Array | SupportsFloat,
    *,
    d_gate: _Array | bool | None = None,
    d_up: _Array | bool | None = None,
    rows: int | None = None,
    dim: int | None = None,
    kind: Literal["swiglu", "geglu_tanh", "geglu_erf"] = "swiglu",
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> Any: ...

@overload
def kl_loss(
    x: _Array | SupportsFloat,
    teacher: _Array | SupportsFloat | None = None,
    ids: _Array | SupportsFloat | None = None,
    log_probs: _Array | SupportsFloat | None = None,
    tail: _Array | SupportsFloat | None = None,
    weights: _Array | SupportsFloat | None = None,
    *,
    loss: _Array | Literal[True] | None = None,
    d_x: _Array | Literal[True] | None = None,
    rows: int | None = None,
    dim: int | None = None,
    top: int | None = None,
    softcap: float = 0.0,
    temperature: float = 1.0,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> tuple[_Result, _Result]:
    """Returns loss, d_x.

    KL(teacher || student) of rows of logits, and its gradient:

      c_j = x_j, or softcap * tanh(x_j / softcap) with softcap > 0      the student's logits
      b_j = (c_j - max c) / temperature      F_j = exp(b_j)      q_j = F_j / sum F

    With top = 0 the teacher gives all its logits, before softmax, with its own soft cap applied:

      a_j = (teacher_j - max teacher) / temperature      E_j = exp(a_j)      p_j = E_j / sum E
      KL = (sum of E_j (a_j - b_j)) / sum E + (log sum F - log sum E)
      slope_j = F_j / sum F - E_j / sum E

    With top > 0 it gives, at this temperature, log probabilities of some tokens (`ids`, all
    different, in any order) and of all others together (`tail`; -infinity: there are none).
    Q is what the student gives to the others, G_j = exp((c_j - t) / temperature) with t the largest
    c_j among them (max c where all of them are -infinity, or none is left), R = sum of G over them:

      p_i = exp(log_probs_i)      P = exp(tail)      S = sum of p + P, 1 but for roundings
      r = (t - max c) / temperature      L = exp(r) R + sum over the top of F
      KL = (sum of p_i (log_probs_i - (b_i - log L)) + P (tail - (r + log R - log L))) / S - log S
      slope_i = F_i / L - p_i / S in the top      slope_j = G_j (exp(r) / L - P / (S R)) elsewhere

      loss  = weight * KL
      d_x_j = (weight / temperature) * slope_j * (softcap - c_j)(softcap + c_j) / softcap^2

    the last factor with softcap alone. c_j is f32, each operation rounded once; tanh is
    core/math.h's and softcap is rounded to f32. Everything else is in f64, each operation rounded
    once, and exp is exp64 of core/math.h, log core/exp_log.h's; quotients by temperature, sums, S
    and softcap^2 are products with the reciprocal. loss and d_x are rounded to f32 once, at the end.
    Sums over the vocabulary: the elements of a block of 4096 go to 16 chains, element j to chain j
    mod 16, which the halving tree adds; the blocks are added in order. Sums over the top go in
    order, and end with P's term.

    So KL is that of two distributions, whatever the roundings of the logits: equal logits give 0,
    and it is not below 0 by more than roundings of f64. A p or E that is 0 counts as 0, whatever it
    is multiplied by. The loss is +infinity where q is 0 but p is not (Q and P alike; slopes of the
    others are then 0). A row whose c_j or teacher_j hold NaN or +infinity, or nothing but -infinity,
    gives NaN, and so do log probabilities that are NaN or all -infinity.

    A row of weight 0 has loss 0 and gradient 0 and is not read, ids included. d_x may be the memory
    of x.
    """

@overload
def kl_loss(
    x: _Array | SupportsFloat,
    teacher: _Array | SupportsFloat | None = None,
    ids: _Array | SupportsFloat | None = None,
    log_probs: _Array | SupportsFloat | None = None,
    tail: _Array | SupportsFloat | None = None,
    weights: _Array | SupportsFloat | None = None,
    *,
    loss: _Array | bool | None = None,
    d_x: _Array | bool | None = None,
    rows: int | None = None,
    dim: int | None = None,
    top: int | None = None,
    softcap: float = 0.0,
    temperature: float = 1.0,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> Any: ...

def adam(
    gradient: _Array | SupportsFloat,
    parameter: _Array | SupportsFloat,
    mean: _Array | SupportsFloat,
    variance: _Array | SupportsFloat,
    *,
    count: int | None = None,
    rate: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-08,
    step: int = 1,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> None:
    """Returns nothing; updates parameter, mean, variance.

    One step of Adam, in place, each element by itself. g is the gradient, t is `step`:

      mean      = fma(beta1, mean, (1 - beta1) * g)
      variance  = fma(beta2, variance, ((1 - beta2) * g) * g)
      parameter = parameter - (rate / (1 - beta1^t)) * (mean / fma(1 / sqrt(1 - beta2^t),
                                                                    sqrt(variance), epsilon))

    In f32, each operation rounded once. The factors that do not depend on the element (beta1,
    1 - beta1, beta2, 1 - beta2, rate / (1 - beta1^t), 1 / sqrt(1 - beta2^t), epsilon) are computed
    in f64 and rounded to f32 once. Powers are products by repeated squaring: for each bit of t from
    the lowest, where it is set power = power * b, then b = b * b, from power = 1 and b = beta.

    mean and variance start as zeros, and the first step is 1. NaN and infinities stay in their
    element. A variance of 0 with epsilon 0 gives NaN.
    """

def aura_append(
    k: _Array | SupportsFloat,
    v: _Array | SupportsFloat,
    slots: _Array | SupportsFloat,
    k_boundaries: _Array | SupportsFloat,
    v_boundaries: _Array | SupportsFloat,
    k_codebook: _Array | SupportsFloat,
    v_codebook: _Array | SupportsFloat,
    k_table: _Array | SupportsFloat,
    v_table: _Array | SupportsFloat,
    k_packed: _Array | SupportsFloat,
    k_scales: _Array | SupportsFloat,
    v_packed: _Array | SupportsFloat,
    v_scales: _Array | SupportsFloat,
    kept_slots: _Array | SupportsFloat | None = None,
    positions: _Array | SupportsFloat | None = None,
    inverse_frequencies: _Array | SupportsFloat | None = None,
    k_mean: _Array | SupportsFloat | None = None,
    v_mean: _Array | SupportsFloat | None = None,
    k_kept: _Array | SupportsFloat | None = None,
    v_kept: _Array | SupportsFloat | None = None,
    *,
    tokens: int | None = None,
    kv_heads: int | None = None,
    dim: int | None = None,
    page_size: int | None = None,
    pages: int | None = None,
    sequences: int | None = None,
    kept: int | None = None,
    rotary_dim: int | None = None,
    factor: float = 1.0,
    interleaved: bool = False,
    k_bits: int = 4,
    v_bits: int = 4,
    k_rotation: Literal["identity", "hadamard", "dense"] = "hadamard",
    v_rotation: Literal["identity", "hadamard", "dense"] = "hadamard",
    k_scale_rule: Literal["matched", "none", "least_squares", "unbiased"] = "matched",
    v_scale_rule: Literal["matched", "none", "least_squares", "unbiased"] = "matched",
    element: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    f16_scale: bool | None = None,
    exact: Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"] | _DType | None = None,
    device: _Device | None = None,
    preference: Literal["exact", "fastest"] = "exact",
    kernel: str | None = None,
    threads: int = 0,
    stream: _Stream | None = None,
    workspace: _Array | None = None,
) -> None:
    """Returns nothing; updates k_packed, k_scales, v_packed, v_scales, k_kept, v_kept.

    New tokens into a compressed KV cache: the keys turned by RoPE, K and V encoded, each row written
    where its token's slot says. One launch for a layer.

      x = rope(k[t,h])  or  v[t,h]        as the op rope gives it, rounded to `element`
      with kept > 0: x is rounded to `exact`
      a token t with kept_slots[t] = r >= 0:  the row that is coded is the one in kept row r;
                                              then x is stored there
      any other token:                        the row that is coded is x
      slots[t] = n >= 0:                      the row is coded to page n / page_size, row
                                              n % page_size; n < 0: no row of this token is coded

    So a ring of the newest tokens, kept as they are, needs nothing besides: the new token takes the
    place of the one that leaves, which is coded. Kept row r is row [r / kept, h, r % kept] of k_kept
    and v_kept. With kept = 0 there are no kept_slots.

    A row y is coded as aura_encode codes it (bittern/ops/aura_encode.h), with the rotation, the
    widths and the rule of its side, after its mean is subtracted, each operation in f32:

      u_j = y_j - mean_j. If a finite y_j gives an infinite u_j, then u_j = y_j / 2 - mean_j / 2 for
            the whole row, which keeps its direction
      codes and s of u by aura_encode. s is limited to the largest finite f32; if u was halved,
            s = 2 s, limited again; then s is limited and rounded to the scales' dtype

    RoPE is left out with rotary_dim = 0. positions, inverse_frequencies, factor and the pairs are
    those of bittern/ops/rope.h.

    A codec with one page of `capacity` tokens for each sequence is the contiguous layout of
    aura_attention: pages = sequences, page_size = capacity, slot s * capacity + n.

    Only the rows of the slots are written, all others stay. On the CPU a slot beyond the last row is
    an error, and so are two tokens with one slot. On CUDA the host does not read the slots: one that
    is too large is skipped, as a negative one is, and of two tokens with one slot either is written,
    or parts of both.
    """
