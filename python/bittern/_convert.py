"""Model files: quantize_model, inspect_model and compare_models.

docs/quantize.md and docs/inspect.md explain every option; the command `bittern` is written on the
same calls.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import numbers
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

from . import _bittern  # type: ignore[attr-defined]
from ._values import wrong_arguments as _wrong_arguments

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
_DType = Literal["f32", "f16", "bf16", "float32", "float16", "bfloat16"]
_Type = str  # of GGUF: "Q4_K_M", "Q8_0", ...


class Cancelled(Exception):
    """`progress` returned False. What was written is kept: `resume=True` continues."""


class ModelProgress(NamedTuple):
    """What `progress` is called with."""

    # "planning", "measuring", "checking" (what an earlier run wrote), "calibrating", "writing" or "comparing"
    doing: str
    tensor: str  # the one at hand
    done: int  # weights, or bytes that are checked; it never falls while `doing` is the same, and ends at `total`
    total: int

    @property
    def fraction(self) -> float:
        return self.done / self.total if self.total else 1.0


_Progress = Callable[[ModelProgress], object]


# ---- results ----


def _size(count: int) -> str:
    for unit, scale, digits in (("GB", 1e9, 2), ("MB", 1e6, 1), ("kB", 1e3, 1)):
        if count >= scale:
            return f"{count / scale:.{digits}f} {unit}"
    return f"{count} B"


def _weights(count: int) -> str:
    return f"{count / 1e6:.1f} M weights"


def _bits(bits: float | None) -> str:
    return "no weights" if bits is None else f"{bits:.3f} bits per weight"


def _lines(head: str, rows: Iterable[tuple[str, object]], notes: Iterable[str]) -> str:
    shown = [(label, value) for label, value in rows if value is not None]
    width = max((len(label) for label, _ in shown), default=0)
    body = [f"  {label:<{width}}  {value}" for label, value in shown]
    return "\n".join([head, *body, *(f"note: {note}" for note in notes)])


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A tensor of the output."""

    name: str
    shape: tuple[int, ...]
    sources: list[str]  # the tensors it is made from
    from_storage: str  # "BF16", "Q4_K", "4 bit, group 64, BF16"
    to_storage: str
    way: Literal["copied", "cast", "quantised", "transcoded"]
    bytes: int
    note: str  # why it is not what was asked for; often empty

    def __repr__(self) -> str:
        note = f", note={self.note!r}" if self.note else ""
        return f"<{self.name} {list(self.shape)}: {self.from_storage} -> {self.to_storage}{note}>"


@dataclasses.dataclass(frozen=True, repr=False)
class QuantizeReport:
    """What quantize_model made. print() shows it with its notes."""

    model: str
    output: str
    format: Literal["mlx", "gguf", "safetensors", "compressed-tensors"]
    outputs: list[str]  # `output`, or the parts of a split GGUF file
    dry_run: bool
    weights: int
    bytes: int  # of all files
    bits_per_weight: float  # of the tensors
    seconds: float
    seconds_making: float
    seconds_writing: float
    seconds_syncing: float
    resumed: int  # tensors that an earlier run had written
    scale_change: float | None  # the largest relative change of a scale by scale_dtype
    saturated: int  # numbers that `lossy` clamped
    notes: list[str]
    tensors: list[QuantizedTensor]

    def __repr__(self) -> str:
        what = "would be" if self.dry_run else repr(self.output)
        time = "" if self.dry_run else f", {self.seconds:.2f} s"
        notes = f", {len(self.notes)} notes" if self.notes else ""
        return (
            f"<QuantizeReport {what}: {self.format}, {len(self.tensors)} tensors, {_weights(self.weights)}, "
            f"{_size(self.bytes)}, {_bits(self.bits_per_weight)}{notes}{time}>"
        )

    def __str__(self) -> str:
        rows = (
            ("format", self.format),
            ("tensors", len(self.tensors)),
            ("weights", f"{self.weights:,}"),
            ("size", f"{_size(self.bytes)}, {_bits(self.bits_per_weight)}"),
            ("time", None if self.dry_run else f"{self.seconds:.2f} s"),
        )
        by_note: dict[str, list[str]] = {}
        for tensor in self.tensors:
            if tensor.note:
                by_note.setdefault(tensor.note, []).append(tensor.name)
        notes = [
            f"{note}: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            for note, names in by_note.items()
        ]
        return _lines("would be" if self.dry_run else self.output, rows, notes + self.notes)


@dataclasses.dataclass(frozen=True)
class TensorDescription:
    """A tensor of a model file."""

    name: str
    shape: tuple[int, ...]
    storage: str  # "BF16", "Q4_K", "4 bit, group 64, BF16"
    parameters: int
    bytes: int
    decodable: bool  # whether bittern can turn it into numbers

    @property
    def bits_per_weight(self) -> float | None:
        return 8 * self.bytes / self.parameters if self.parameters else None

    def __repr__(self) -> str:
        return f"<{self.name} {list(self.shape)}: {self.storage}, {_bits(self.bits_per_weight)}>"


@dataclasses.dataclass(frozen=True)
class StorageTotal:
    """All tensors of one storage."""

    storage: str
    tensors: int
    parameters: int
    bytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class ModelDescription:
    """What inspect_model found; what is not known is None. print() shows all but the tensors."""

    path: str
    kind: Literal["gguf", "huggingface", "mlx", "safetensors"]
    form: str  # the same in words: "GGUF file, version 3"
    files: list[str]  # those that were read
    architecture: str | None
    model_class: str | None
    name: str | None
    layers: int | None
    hidden_size: int | None
    heads: int | None
    key_value_heads: int | None
    experts: int | None
    vocabulary: int | None
    context: int | None
    quantization: dict[str, Any] | None  # as config.json has it
    parameters: int
    bytes: int  # of the tensors
    bits_per_weight: float | None
    storages: list[StorageTotal]  # the largest first
    notes: list[str]
    tensors: list[TensorDescription]

    def __repr__(self) -> str:
        architecture = f", {self.architecture}" if self.architecture else ""
        return (
            f"<ModelDescription {self.path!r}: {self.form}{architecture}, {len(self.tensors)} tensors, "
            f"{_weights(self.parameters)}, {_size(self.bytes)}, {_bits(self.bits_per_weight)}>"
        )

    def __str__(self) -> str:
        known = ("architecture", "name", "layers", "hidden_size", "heads", "key_value_heads", "experts", "vocabulary",
                 "context")  # fmt: skip
        rows = [(name.replace("_", " "), getattr(self, name)) for name in known]
        rows += [
            ("parameters", f"{self.parameters:,}"),
            ("size", f"{_size(self.bytes)}, {_bits(self.bits_per_weight)}"),
        ]
        rows += [(s.storage, f"{s.tensors} tensors, {_size(s.bytes)}") for s in self.storages]
        return _lines(f"{self.path}: {self.form}", rows, self.notes)


@dataclasses.dataclass(frozen=True)
class TensorDifference:
    """How far a tensor of `other` is from that of `model`."""

    name: str  # in the model
    shape: tuple[int, ...]
    storage: str
    other_storage: str
    relative_error: float  # ||a - b|| / ||a||
    max_abs_error: float
    different: int  # numbers that are not equal; two NaN are
    not_finite: int  # those of them where one is infinite or NaN
    not_finite_in_model: int
    not_finite_in_other: int

    def __repr__(self) -> str:
        return (
            f"<{self.name} {list(self.shape)}: {self.storage} / {self.other_storage}, "
            f"relative error {self.relative_error:.4g}>"
        )


@dataclasses.dataclass(frozen=True)
class GroupDifference:
    """A group of 32 columns: its root mean square error over that of the tensor's numbers."""

    tensor: str
    row: int
    column: int
    error: float


@dataclasses.dataclass(frozen=True, repr=False)
class ModelComparison:
    """How far `other` is from `model`. print() shows the totals."""

    model: ModelDescription
    other: ModelDescription
    relative_error: float  # of all tensors compared as one vector
    max_abs_error: float
    equal: int  # tensors that have the same numbers throughout
    tensors: list[TensorDifference]
    worst_groups: list[GroupDifference]  # the worst first
    only_in_model: list[str]
    only_in_other: list[str]
    shapes_differ: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    not_compared: list[tuple[str, str]]  # names and reasons
    not_finite_tensors: list[str]  # those that hold an infinity or NaN in either model

    def __repr__(self) -> str:
        apart = len(self.only_in_model) + len(self.only_in_other) + len(self.shapes_differ) + len(self.not_compared)
        rest = f", {apart} not compared" if apart else ""
        return (
            f"<ModelComparison {self.model.path!r} / {self.other.path!r}: {len(self.tensors)} tensors, "
            f"{self.equal} equal{rest}, relative error {self.relative_error:.6g}>"
        )

    def __str__(self) -> str:
        rows = (
            ("compared", f"{len(self.tensors)} tensors, {self.equal} equal"),
            ("relative error", f"{self.relative_error:.6g}"),
            ("max abs error", f"{self.max_abs_error:.6g}"),
            ("only in model", ", ".join(self.only_in_model) or None),
            ("only in other", ", ".join(self.only_in_other) or None),
            ("other shapes", ", ".join(name for name, _, _ in self.shapes_differ) or None),
            ("not compared", ", ".join(name for name, _ in self.not_compared) or None),
            ("not finite", ", ".join(self.not_finite_tensors) or None),
        )
        return _lines(f"{self.model.path} / {self.other.path}", rows, ())


def _description(found: dict[str, Any]) -> ModelDescription:
    del found["quantization"]
    text = found.pop("quantization_json")
    found["quantization"] = None if text is None else json.loads(text)
    found["storages"] = [StorageTotal(**s) for s in found["storages"]]
    found["tensors"] = [TensorDescription(**t) for t in found["tensors"]]
    return ModelDescription(**found)


# ---- arguments ----


def _named_options(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """An unknown keyword is told with the one that was perhaps meant."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise _wrong_arguments(function.__name__, error, kwargs, signature.parameters) from None
        return function(*args, **kwargs)

    return call


def _is_bool(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_))


def _path(name: str, value: Any) -> bytes:
    try:
        path = os.fsencode(value)
    except (TypeError, UnicodeEncodeError):
        raise ValueError(f"{name}: {value!r}, expected a path") from None
    if b"\0" in path:
        raise ValueError(f"{name}: {value!r}: a path has no null character")
    return path


def _integer(name: str, value: Any, low: int = -(2**31), high: int = 2**31 - 1) -> int:
    number = None
    if not _is_bool(value):
        try:
            number = operator.index(value)
        except TypeError:
            pass
    if number is None:
        raise ValueError(f"{name}: {value!r}, expected an integer")
    if not low <= number <= high:
        raise ValueError(f"{name}: {number}, expected an integer {low}..{high}")
    return number


def _real(name: str, value: Any) -> float:
    if _is_bool(value) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}: {value!r}, expected a number")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not _is_bool(value):
        raise ValueError(f"{name}: {value!r}, expected True or False")
    return bool(value)


def _word(name: str, value: Any) -> bytes:
    if not isinstance(value, str):
        raise ValueError(f"{name}: {value!r}, expected a string")
    return value.encode("utf-8", "backslashreplace")


def _dtype(name: str, value: Any) -> bytes:
    """bittern's names and numpy's, torch's and mlx's dtypes."""
    if not isinstance(value, str):
        named = getattr(value, "__name__", None) or getattr(value, "name", None) or value
        named = str(named).removeprefix("torch.").removeprefix("mlx.core.")
        if named not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"{name}: {value!r}, expected f32, f16 or bf16")
        value = named
    return _word(name, value)


_RULE = {"match": _word, "keep": _flag, "bits": _integer, "group_size": _integer, "type": _word}


def _rules(name: str, value: Any) -> list[dict[str, Any]]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"{name}: {value!r}, expected a list of rules such as {{'match': 'lm_head', 'bits': 8}}")
    rules = []
    for given in value:
        if not isinstance(given, Mapping) or "match" not in given:
            raise ValueError(f"{name}: {given!r}, expected a dictionary with 'match', a regular expression")
        for key in given:
            if key not in _RULE:
                raise ValueError(f"{name}: {given['match']!r}: {key!r}, expected match, bits, group_size, type or keep")
        where = f"{name}: {given['match']!r}"
        rules.append({key: _RULE[key](f"{where}: {key}", given[key]) for key in given if given[key] is not None})
    return rules


def _call(function: Callable[..., dict[str, Any]], inputs: Iterable[bytes], *args: Any) -> dict[str, Any]:
    try:
        return function(*args)
    except OSError as error:
        if all(os.path.exists(path) for path in inputs):
            raise
        raise FileNotFoundError(str(error)) from None


def _callback(progress: _Progress | None) -> Callable[..., bool] | None:
    if progress is None:
        return None
    if not callable(progress):
        raise ValueError(f"progress: {progress!r}, expected a function")

    def tell(doing: str, tensor: str, done: int, total: int) -> bool:
        result = progress(ModelProgress(doing, tensor, done, total))
        return not (_is_bool(result) and not result)

    return tell


def _taken(checks: Mapping[str, Callable[[str, Any], Any]], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: check(name, given[name]) for name, check in checks.items() if given[name] is not None}


def _tensors(name: str, value: Any) -> int:
    return _integer(name, value, 1, 2**20)


_OPTIONS: dict[str, Callable[[str, Any], Any]] = {
    "bits": _integer,
    "group_size": _integer,
    "method": _word,
    "data": _path,
    "pieces": _integer,
    "context": _integer,
    "fisher": _flag,
    "format": _word,
    "zero_points": _word,
    "type": _word,
    "output_tensor_type": _word,
    "token_embedding_type": _word,
    "leave_output_tensor": _flag,
    "target_bpw": _real,
    "rules": _rules,
    "policy": _path,
    "imatrix": _path,
    "transcode": _flag,
    "lossy": _flag,
    "dequantize": _dtype,
    "dtype": _dtype,
    "scale_dtype": _dtype,
    "pure": _flag,
    "allow_requantize": _flag,
    "quantize": _flag,
    "split_max_size": _word,
    "split_max_tensors": _tensors,
    "force": _flag,
    "resume": _flag,
    "dry_run": _flag,
    "threads": _integer,
}


# ---- the functions ----


@_named_options
def quantize_model(
    source: _Path,
    out: _Path | None = None,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    method: Literal["minmax", "mlx", "lsq", "gptq"] | None = None,
    data: _Path | None = None,
    pieces: int | None = None,
    context: int | None = None,
    fisher: bool = False,
    format: Literal["mlx", "gguf", "safetensors", "compressed-tensors"] | None = None,
    zero_points: Literal["real", "integer"] | None = None,
    type: _Type | None = None,
    output_tensor_type: _Type | None = None,
    token_embedding_type: _Type | None = None,
    leave_output_tensor: bool = False,
    target_bpw: float | None = None,
    rules: Iterable[Mapping[str, Any]] | None = None,
    policy: _Path | None = None,
    imatrix: _Path | None = None,
    transcode: bool = False,
    lossy: bool = False,
    dequantize: _DType | Any | None = None,
    dtype: _DType | Any | None = None,
    scale_dtype: _DType | Any | None = None,
    pure: bool = False,
    allow_requantize: bool = False,
    quantize: bool = False,
    split_max_size: str | None = None,
    split_max_tensors: int | None = None,
    force: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
    progress: _Progress | None = None,
) -> QuantizeReport:
    """Quantises a model, or converts it to another file format.

        bittern.quantize_model("model", "model-4bit", bits=4)
        bittern.quantize_model("model", "model-3bit", bits=3, method="gptq", data="text.txt")
        bittern.quantize_model("model", "model.gguf", type="Q4_K_M", imatrix="imatrix.gguf")
        bittern.quantize_model("model.gguf", "model-mlx", transcode=True)
        bittern.quantize_model("model", "out", bits=4, rules=[{"match": "lm_head", "bits": 8}])

    source      a .gguf or .safetensors file, or a folder of Hugging Face or MLX
    out         the folder or .gguf file to write; may be left out with dry_run
    bits        bits per weight: 2, 3, 4, 5, 6 or 8
    group_size  weights that share a scale: 32, 64 (default) or 128
    method      the rule for scales and biases: "minmax", "mlx" or "lsq" (default; in GGUF the type's own); or
                "gptq": codes, too, are chosen by what the layers see when the model reads a text
    data        path of that text
    pieces      how many pieces of it are read, evenly spread (default 128)
    context     tokens of a piece (default 512)
    fisher      weigh each of its tokens by what its errors cost the predictions
    format      "mlx", "gguf", "safetensors" or "compressed-tensors" (for vLLM and transformers); default: "gguf" if
                `out` ends in .gguf or an option is for GGUF only, "safetensors" with dequantize, else "mlx"
    zero_points "real" (default): a group's bias is any number; "integer": 0 is one of its values, as in AWQ, GPTQ and
                compressed-tensors
    type        the type of a GGUF file, with llama-quantize's mix: "Q4_K_M", "Q8_0", ...
    output_tensor_type, token_embedding_type
                GGUF types of the head and of the embedding
    leave_output_tensor
                leave the head as it is
    target_bpw  most bits per weight of the whole model, 1 to 32; each tensor's bits are chosen by measured error
    rules       for tensors whose name matches a regular expression of RE2: dictionaries with "match" and
                "bits" (and "group_size"), "type" or "keep"; the first that matches decides
    policy      path of a JSON file with bits, group_size, type and rules
    imatrix     path of an importance matrix of llama.cpp
    transcode   keep every number exactly
    lossy       clamp numbers that the output cannot hold; with transcode, quantise again what cannot be exact
    dequantize  write plain numbers: "f32", "f16" or "bf16"
    dtype       dtype of the tensors that are not quantised; alone, it converts plain numbers
    scale_dtype dtype of scales and biases in a folder
    pure        one type for every matrix
    allow_requantize
                accept a model that is quantised already
    quantize    4 bits, unless another option or the policy says how
    split_max_size, split_max_tensors
                cut a GGUF file into parts of at most "500M" or "2G", or of this many tensors
    force       replace an output that bittern wrote
    resume      continue a run that was stopped or cancelled
    dry_run     decide everything and write nothing
    threads     CPU threads (default: num_threads()); the result does not depend on it
    progress    called with a ModelProgress on the calling thread; if it returns False, Cancelled is raised

    The GIL is free while it works. After Ctrl-C, an exception of `progress` or Cancelled, `out`.partial is kept, and
    the same call with resume=True continues. Errors: ValueError, NotImplementedError, FileNotFoundError, OSError.
    """
    given = locals()
    progress_function = _callback(progress)
    if out is None and not _flag("dry_run", dry_run):
        raise ValueError("out: not given, expected the name of the output (or dry_run)")
    to = b"" if out is None else _path("out", out)
    options = _taken(_OPTIONS, given)
    model = _path("source", source)
    inputs = [model, *(options[name] for name in ("policy", "imatrix", "data") if name in options)]
    found = _call(_bittern.quantize_model, inputs, model, to, options, progress_function)
    found["tensors"] = [QuantizedTensor(**t) for t in found["tensors"]]
    return QuantizeReport(**found)


@_named_options
def inspect_model(path: _Path) -> ModelDescription:
    """What a model file holds: format, architecture, sizes, and every tensor's shape, storage and bytes.

        model = bittern.inspect_model("model.gguf")
        print(model)
        model.tensors[0].storage

    `path` is a .gguf file (any part of a split one), a .safetensors file, or a folder of Hugging Face or MLX. Only
    headers are read. Errors: ValueError, NotImplementedError, FileNotFoundError, OSError.
    """
    model = _path("path", path)
    return _description(_call(_bittern.inspect_model, [model], model))


@_named_options
def compare_models(
    model: _Path,
    other: _Path,
    *,
    worst_groups: int = 10,
    threads: int | None = None,
    progress: _Progress | None = None,
) -> ModelComparison:
    """How far `other` is from `model`, tensor by tensor; they may be of different formats.

        comparison = bittern.compare_models("model", "model-4bit")
        comparison.relative_error
        max(comparison.tensors, key=lambda tensor: tensor.relative_error)

    worst_groups  how many groups of 32 columns to list, those with the largest error
    threads       CPU threads (default: num_threads()); the result does not depend on it
    progress      called with a ModelProgress; if it returns False, Cancelled is raised

    Errors: ValueError, NotImplementedError, FileNotFoundError, OSError.
    """
    options = {"worst_groups": _integer("worst_groups", worst_groups, 0, 2**20)}
    if threads is not None:
        options["threads"] = _integer("threads", threads)
    models = [_path("model", model), _path("other", other)]
    found = _call(_bittern.compare_models, models, *models, options, _callback(progress))
    found["model"] = _description(found["model"])
    found["other"] = _description(found["other"])
    found["tensors"] = [TensorDifference(**t) for t in found["tensors"]]
    found["worst_groups"] = [GroupDifference(**g) for g in found["worst_groups"]]
    return ModelComparison(**found)
