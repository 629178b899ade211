"""Numbers, names and dtypes as callers write them."""

import difflib
import math
import numbers
import operator
import sys

# Names of dtypes: ours, and those of numpy, torch and mlx.
DTYPES = {
    "f32": "float32",
    "f64": "float64",
    "f16": "float16",
    "bf16": "bfloat16",
    "u8": "uint8",
    "s8": "int8",
    "s32": "int32",
    "u32": "uint32",
}

LIMITS = {
    "u8": (0, 2**8 - 1),
    "s8": (-(2**7), 2**7 - 1),
    "s32": (-(2**31), 2**31 - 1),
    "u32": (0, 2**32 - 1),
    "f16": (-65504.0, 65504.0),
    "bf16": (-(2.0 - 2.0**-7) * 2.0**127, (2.0 - 2.0**-7) * 2.0**127),
    "f32": (-(2.0 - 2.0**-23) * 2.0**127, (2.0 - 2.0**-23) * 2.0**127),
}


def is_fastest(where, preference):
    if preference not in ("exact", "fastest"):
        raise ValueError(f"{where}: {preference!r}, expected 'exact' or 'fastest'")
    return preference == "fastest"


def nearest(name, names):
    """"; did you mean 'x'?" where a name is like `name`, else all of them."""
    close = difflib.get_close_matches(name.lower(), names, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; expected one of {' '.join(names)}"


def wrong_arguments(function, error, keywords, names):
    """What to raise where arguments do not bind: first about a keyword that there is not."""
    for keyword in keywords:
        if keyword not in names:
            error = f"got an unexpected keyword argument '{keyword}'{nearest(keyword, names)}"
            break
    return TypeError(f"{function}: {error}")


def is_bool(value):
    numpy = sys.modules.get("numpy")
    return isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_))


def is_number(value):
    return isinstance(value, numbers.Real) or is_bool(value)


def scalar(value):
    """The number in an array without axes, as frameworks give for a sum; else the value itself."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) == () else value


def integer(where, value):
    number = scalar(value)
    try:
        if not is_bool(number):
            return operator.index(number)
    except TypeError:
        pass
    raise ValueError(f"{where}: {value!r}, expected an integer")


def integer_of_bits(where, value, bits):
    number = integer(where, value)
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise ValueError(f"{where}: {number}, expected a {bits}-bit integer")
    return number


def real(where, number, dtype):
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{where}: {number}, expected a number that fits {dtype}") from None


def text(value):
    """A string that UTF-8 can write, whatever Python lets it hold."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def dtype_name(value):
    """Our name of a dtype, given by its name or as an object of numpy's, torch's or mlx's."""
    named = getattr(value, "name", None) or getattr(value, "__name__", None) or value
    named = str(named).removeprefix("torch.").removeprefix("mlx.core.")
    ours = {theirs: name for name, theirs in DTYPES.items()}
    return ours.get(named, text(named)) if named in ours or isinstance(value, str) else None


def field_value(op, field, value):
    """A field's value as Python's own type, so that equal ones are equal to the cache of plans."""
    where = f"{op}: {field.name}"
    if field.choices:
        if field.is_dtype and (name := dtype_name(value)) is not None:
            return name
        if isinstance(value, str):
            return text(value)
        found, value = value, scalar(value)
        if field.choices == ("false", "true"):
            if is_bool(value) or (isinstance(value, numbers.Integral) and value in (0, 1)):
                return bool(value)
            raise ValueError(f"{where}: {found!r}, expected True or False")
        if is_bool(value) or not isinstance(value, numbers.Integral):
            raise ValueError(f"{where}: {found!r}, expected one of {' '.join(field.choices)}")
        return operator.index(value)
    if not isinstance(field.default, float):
        return integer(where, value)
    number = scalar(value)
    if is_bool(number) or not isinstance(number, numbers.Real):
        raise ValueError(f"{where}: {value!r}, expected a number")
    return real(where, number, "f64")


def fill_value(where, dtype, value):
    """A number that fills an input of `dtype`."""
    if dtype in ("u8", "s8", "s32", "u32"):
        value = integer(where, int(value) if dtype == "u8" and is_bool(value) else value)
    else:
        value = real(where, value, dtype)
        if not math.isfinite(value):
            return value
    low, high = LIMITS.get(dtype, (-math.inf, math.inf))
    if not low <= value <= high:
        raise ValueError(f"{where}: {value}, expected {low}..{high} ({dtype})")
    return value
