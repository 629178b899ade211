"""Distillation: distill.

docs/distill.md explains every option; the command `bittern distill` is written on the same call.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from . import _bittern  # type: ignore[attr-defined]
from ._convert import (
    QuantizedTensor,
    QuantizeReport,
    _bits,
    _call,
    _dtype,
    _DType,
    _flag,
    _integer,
    _is_bool,
    _lines,
    _named_options,
    _Path,
    _path,
    _real,
    _rules,
    _size,
    _taken,
    _word,
)
from ._values import is_fastest as _is_fastest


class DistillProgress(NamedTuple):
    """What `progress` is called with."""

    doing: Literal["sampling", "calibrating", "reading", "searching", "learning", "writing", "judging"]
    text: str  # what of it is at hand
    share: float  # of `doing` that is done, 0 to 1
    step: int
    steps: int
    train_kl: float  # of the last step; nan: none yet
    validation_kl: float  # as last measured; nan: not yet
    tokens_per_second: float  # of learning
    seconds_left: float  # of learning


class DistillTrial(NamedTuple):
    """A short run of the search for a rate."""

    rate: float
    validation_kl: float


class DistillPoint(NamedTuple):
    """How far learning was after a step."""

    step: int
    train_kl: float  # mean since the point before; nan at the start
    validation_kl: float


@dataclasses.dataclass(frozen=True, repr=False)
class DistillReport:
    """What distill made. print() shows it."""

    output: QuantizeReport
    type: str | None  # of a GGUF file
    bits: int  # of most grids that learned
    group_size: int
    learned: int  # scales and biases, or scales alone
    codes: int  # that could move
    codes_moved: int  # that are others than at the start
    train_pieces: int
    validation_pieces: int
    steps: int  # made
    best_step: int
    finished_early: bool
    rate: float
    start_kl: float  # of the validation text: calibrated
    kl: float  # what was learned
    written_kl: float  # and what was written: in an MLX folder the same
    written_start_kl: float  # of a GGUF file: the start in the same types; in a folder start_kl
    start_written: bool  # as that was better than what was learned
    trials: list[DistillTrial]
    points: list[DistillPoint]
    seconds: float
    seconds_learning: float
    peak_bytes: int  # the most memory that the process has had so far
    tokens_per_second: float

    def __repr__(self) -> str:
        return (
            f"<DistillReport {self.output.output!r}: {_bits(self.output.bits_per_weight)}, validation KL "
            f"{self.start_kl:.4f} -> {self.written_kl:.4f}, {self.steps} steps, {self.seconds:.1f} s>"
        )

    def __str__(self) -> str:
        written = f", {self.written_kl:.4f} written" if self.written_kl != self.kl else ""
        if self.type:
            written = f", {self.written_kl:.4f} written as {self.type}"
        rows = (
            ("size", f"{_size(self.output.bytes)}, {_bits(self.output.bits_per_weight)}"),
            ("validation KL", f"{self.start_kl:.4f} calibrated, {self.kl:.4f} after {self.best_step} steps{written}"),
            ("rate", f"{self.rate:.5f}"),
            ("time", f"{self.seconds:.1f} s, {self.tokens_per_second:.0f} tokens/s of learning"),
        )
        return _lines(self.output.output, rows, self.output.notes)


_Next = {True: 0, None: 0, "finish": 1, False: 2}


def _callback(progress: Callable[[DistillProgress], object] | None) -> Callable[..., int] | None:
    if progress is None:
        return None
    if not callable(progress):
        raise ValueError(f"progress: {progress!r}, expected a function")

    def tell(*state: Any) -> int:
        result = progress(DistillProgress(*state))
        if isinstance(result, str) and result != "finish":
            raise ValueError(f"progress: returned {result!r}, expected True, False or 'finish'")
        if _is_bool(result):  # numpy's, too
            result = bool(result)
        return _Next.get(result, 0) if isinstance(result, (bool, str)) else 0

    return tell


def _texts(name: str, value: Any) -> list[bytes]:
    one = isinstance(value, (str, bytes, os.PathLike))
    if not one and not isinstance(value, Iterable):
        raise ValueError(f"{name}: {value!r}, expected the path of a text, or a list of them")
    return [_path(name, text) for text in ([value] if one else value)]


def _seed(name: str, value: Any) -> int:
    return _integer(name, value, 0, 2**64 - 1)


def _minutes(name: str, value: Any) -> float:
    number = _real(name, value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name}: {value!r}, expected a number of 0 or more")
    return number


_OPTIONS: dict[str, Callable[[str, Any], Any]] = {
    "data": _texts,
    "self_text": _flag,
    "format": _word,
    "zero_points": _word,
    "type": _word,
    "bits": _integer,
    "group_size": _integer,
    "embedding_bits": _integer,
    "scale_dtype": _dtype,
    "rules": _rules,
    "context": _integer,
    "calibration": _integer,
    "fisher": _flag,
    "learn_codes": _flag,
    "teacher_cache": _path,
    "teacher_top": _integer,
    "validation": _integer,
    "steps": _integer,
    "batch": _integer,
    "rate": _real,
    "seed": _seed,
    "preference": _is_fastest,
    "force": _flag,
    "resume": _flag,
    "checkpoint_minutes": _minutes,
    "threads": _integer,
}


@_named_options
def distill(
    teacher: _Path,
    out: _Path,
    *,
    data: _Path | Iterable[_Path] | None = None,
    self_text: bool = False,
    format: Literal["mlx", "gguf", "compressed-tensors"] | None = None,
    zero_points: Literal["real", "integer"] | None = None,
    type: str | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    embedding_bits: int | None = None,
    scale_dtype: _DType | Any | None = None,
    rules: Iterable[Mapping[str, Any]] | None = None,
    context: int = 512,
    calibration: int = 128,
    fisher: bool = False,
    learn_codes: bool = False,
    teacher_cache: _Path | None = None,
    teacher_top: int = 64,
    validation: int = 16,
    steps: int = 60,
    batch: int = 2,
    rate: float | None = None,
    seed: int = 0,
    preference: Literal["exact", "fastest"] = "exact",
    force: bool = False,
    resume: bool = False,
    checkpoint_minutes: float = 5,
    threads: int | None = None,
    progress: Callable[[DistillProgress], object] | None = None,
) -> DistillReport:
    """Quantises a model, and lets it learn back from the original what that lost.

        bittern.distill("model", "model-3bit", bits=3, data="text.txt")
        bittern.distill("model", "model.gguf", type="Q4_K_M", data="text.txt")

    teacher     the original: a .gguf file, or a folder of Hugging Face or MLX
    out         a folder for MLX, or a .gguf file for llama.cpp
    data        the path of a text to learn from, much like that of later use, or of conversations (.jsonl), or a list
                of them
    self_text   in place of data: a text that the teacher writes itself
    format      "mlx", "gguf" or "compressed-tensors" (default: by `out`)
    zero_points as in quantize_model; where they are integers, scales alone learn
    type        of a GGUF file: Q4_1, Q5_1, Q4_K_S, Q4_K_M, Q5_K_S or Q5_K_M (default: Q4_1; Q5_1 with bits=5)
    bits        bits per weight: 2, 3, 4, 5, 6 or 8; in GGUF 4 or 5 (default: 4)
    group_size  weights that share a scale: 32, 64 or 128 (default: 64; in GGUF 32)
    embedding_bits
                bits of embedding and head (in GGUF 6 is Q6_K, 8 is Q8_0); 0: as the teacher has them (default: 6, or
                `bits` where that is more; in compressed-tensors 0)
    scale_dtype dtype of scales and biases; in GGUF f16
    rules       as in quantize_model; they come before all others
    context     tokens of a piece of text
    calibration pieces that codes are chosen by, at most
    fisher      weigh each of their tokens by what its errors cost the predictions
    teacher_cache
                a file of what the teacher says of the text: made if it is not there, read by later runs
    teacher_top of the teacher's likeliest tokens in it; all others count as one
    learn_codes codes move too, not only scales and biases: for 2 and 3 bits and long runs
    validation  pieces that are held out, to judge by
    steps       steps of learning; 0 only calibrates
    batch       pieces of text a step
    rate        how far a step moves a scale, relative to the matrix' mean scale (default: short runs find it)
    seed        of the order of the pieces
    preference  "fastest": also kernels with a declared bound, where the CPU has them; the bytes then depend on the CPU
    force       replace an output that bittern wrote
    resume      continue a run that was stopped or cancelled
    checkpoint_minutes
                time between two states on disk, from which resume goes on
    threads     CPU threads (default: num_threads()); the result does not depend on it
    progress    called with a DistillProgress on the calling thread; "finish" ends learning and keeps the best so
                far, False raises Cancelled

    The GIL is free while it works. After Ctrl-C, an exception of `progress` or Cancelled, `out`.distill is kept, and
    the same call with resume=True continues. Errors: ValueError, NotImplementedError, FileNotFoundError, OSError.
    """
    given = locals()
    progress_function = _callback(progress)
    options = _taken(_OPTIONS, given)
    options.setdefault("data", [])
    model, to = _path("teacher", teacher), _path("out", out)
    found = _call(_bittern.distill_model, [model, *options["data"]], model, to, options, progress_function)
    written = found["output"]
    written["tensors"] = [QuantizedTensor(**t) for t in written["tensors"]]
    found["output"] = QuantizeReport(**written)
    found["trials"] = [DistillTrial(*t) for t in found["trials"]]
    found["points"] = [DistillPoint(*p) for p in found["points"]]
    return DistillReport(**found)
