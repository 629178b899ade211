"""Plain functions around decoding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, SupportsFloat, SupportsIndex

from . import _bittern
from ._values import integer, integer_of_bits, is_number, nearest, real

_SCALINGS = ("none", "linear", "llama3", "yarn")


def _number(where: str, value: Any) -> float:
    if not is_number(value):
        raise ValueError(f"{where}: {value!r}, expected a number")
    return real(where, value, "f64")


def _unsigned(where: str, value: Any) -> int:
    number = integer(where, value)
    if not 0 <= number < 2**64:
        raise ValueError(f"{where}: {number}, expected 0..2^64-1")
    return number


def rope_frequencies(
    rotary_dim: int,
    base: SupportsFloat = 10000.0,
    *,
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none",
    factor: SupportsFloat = 1.0,
    original_context: SupportsFloat = 8192,
    low_freq_factor: SupportsFloat = 1.0,
    high_freq_factor: SupportsFloat = 4.0,
    beta_fast: SupportsFloat = 32.0,
    beta_slow: SupportsFloat = 1.0,
    attention_factor: SupportsFloat | None = None,
    mscale: SupportsFloat | None = None,
    mscale_all_dim: SupportsFloat | None = None,
    truncate: bool = True,
) -> tuple[Any, float]:
    """`inverse_frequencies` (f32 numpy) and `factor` for `rope`.

    The keywords are those of `rope_scaling` in config.json; `original_context` is its
    original_max_position_embeddings, `base` its rope_theta.
    """
    if not isinstance(scaling, str) or scaling not in _SCALINGS:
        raise ValueError(
            f"rope_frequencies: scaling: {scaling!r}{nearest(str(scaling), _SCALINGS)}"
        )
    numbers = {
        "factor": factor,
        "original_context": original_context,
        "low_freq_factor": low_freq_factor,
        "high_freq_factor": high_freq_factor,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "attention_factor": 0.0 if attention_factor is None else attention_factor,
        "mscale": 0.0 if mscale is None else mscale,
        "mscale_all_dim": 0.0 if mscale_all_dim is None else mscale_all_dim,
    }
    return _bittern.rope_frequencies(
        integer_of_bits("rope_frequencies: rotary_dim", rotary_dim, 64),
        _number("rope_frequencies: base", base),
        _SCALINGS.index(scaling),
        *(_number(f"rope_frequencies: {name}", value) for name, value in numbers.items()),
        bool(truncate),
    )


def sample(
    logits: Any,
    history: Iterable[SupportsIndex] = (),
    *,
    temperature: SupportsFloat = 1.0,
    top_k: int = 0,
    top_p: SupportsFloat = 1.0,
    min_p: SupportsFloat = 0.0,
    repetition_penalty: SupportsFloat = 1.0,
    seed: int = 0,
    step: int = 0,
) -> int:
    """The next token from one row of logits: an f32 array in CPU memory.

    In this order: `repetition_penalty` on the tokens of `history`, `top_k` (0: all), `top_p`,
    `min_p`, `temperature` (0: the largest logit). `step` counts the tokens drawn with one `seed`:
    the same seed and step give the same token on every machine.
    """
    history = [integer_of_bits("sample: history", token, 32) for token in history]
    arguments = (
        history,
        _number("sample: temperature", temperature),
        integer_of_bits("sample: top_k", top_k, 64),
        _number("sample: top_p", top_p),
        _number("sample: min_p", min_p),
        _number("sample: repetition_penalty", repetition_penalty),
        _unsigned("sample: seed", seed),
        _unsigned("sample: step", step),
    )
    try:
        return _bittern.sample(logits, *arguments)
    except TypeError:
        raise ValueError("sample: logits: expected an f32 array with one axis") from None
