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

from . import _bittern
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
from ._decoding import rope_frequencies, sample
from ._distill import DistillPoint, DistillProgress, DistillReport, DistillTrial, distill
from ._functions import make_desc as _make_desc
from ._functions import make_function as _make_function
from ._functions import selection as _selection
from ._kv_cache import KvBytes, KvCache, KvCounts, aura_config
from ._model import Model, ModelInfo, Session, SessionBytes, load
from ._tokenizer import Tokenizer, TokenStream
from ._values import integer as _integer
from ._values import integer_of_bits as _integer_of_bits

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


for _op in ops():
    globals()[_op.name] = _make_function(_op, __name__)
    __all__.append(_op.name)
del _op
