"""The KV cache of one attention layer and one sequence, compressed to 1 to 8 bits (docs/kv_cache.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from . import _bittern, _cuda  # type: ignore[attr-defined]
from ._arrays import new_array as _new_array
from ._bittern import Tensor as _Tensor  # type: ignore[import-untyped, import-not-found]
from ._functions import fields_of as _fields_of
from ._functions import selection as _selection
from ._values import field_value as _field_value
from ._values import integer as _integer
from ._values import integer_of_bits as _integer_of_bits
from ._values import is_bool as _is_bool
from ._values import nearest as _nearest
from ._values import text as _text

_Bytes = bytes  # KvCache has a property of that name
_Rotation = Literal["identity", "hadamard", "dense"]
_ScaleRule = Literal["matched", "none", "least_squares", "unbiased"]


class KvCounts(NamedTuple):
    """Tokens of a KvCache by region."""

    first: int  # the first ones, in bf16
    coded: int
    recent: int  # the newest ones, in bf16
    forgotten: int  # behind the window


class KvBytes(NamedTuple):
    """Bytes that a KvCache holds."""

    codes: int  # of the coded tokens: their packed words
    scales: int  # and their scales
    exact: int  # tokens held in bf16
    pages: int  # memory of the pages in use, whole ones
    shared: int  # of these, pages that another cache holds too
    regions: int  # memory of the bf16 regions
    tables: int  # codebooks, rotations, means


class KvCache:
    """The keys and values of one attention layer and one sequence, as codes of 1 to 8 bits.

        cache = bittern.KvCache(kv_heads=8, dim=128, k_bits=4, v_bits=4, recent=64)
        cache.append(k, v)                 # [tokens, kv_heads, dim]
        out = cache.attend(q)              # [queries, heads, dim]: the newest tokens' queries
        draft = cache.fork()               # shares pages until either writes to one
        draft.truncate(len(draft) - 3)     # rolls back

    Arrays are of numpy, torch or mlx on the CPU, float32, float16 or bfloat16, and are read where
    they are, whatever their strides. Where tokens are expected, [heads, dim] is one token.

    With device="cuda" ("cuda:1", torch.device("cuda")) all rows are in the device's memory, and so
    are the arrays of append and attend: torch's, or any that DLPack exports. Work goes on torch's
    current stream (`stream`: another), and the host waits for none of it. to() copies a cache from
    one device to another.

    Parameters; each is also a read-only attribute:
      kv_heads, dim         heads of K and V, and the length of their rows (2..1024)
      page_size             tokens of a page, 16..128
      first, recent         how many of the first and of the newest tokens are kept in bf16
      window, slack         tokens that a query sees (0: all), and how many more are kept, for
                            truncate and for several queries at once
      window_keeps_first    the first tokens are seen beyond the window
      f16_scale             scales are float16, not float32
      k_bits                width of a code, 1..8; this and the following also with v_
      k_rotation, k_seed    rotation before encoding, and the seed that its table is made from
      k_scale_rule          how a row's scale follows from the row and its codes
      k_codebook            levels, or (levels, boundaries) as sphere_codebook gives them; with
                            boundaries None the cache can be read, but nothing appended. None:
                            sphere_codebook(dim, bits)
      k_table               table of the rotation. None: make_rotation(k_rotation, dim, k_seed)
      k_mean                float32 [kv_heads, dim], subtracted before encoding. None: zeros

    Threads may share a cache and its forks: a call waits until the one before it has returned. The
    GIL is free meanwhile. copy.copy and copy.deepcopy fork, and a cache can be pickled.

    Errors: ValueError (malformed), NotImplementedError (strides that attend does not take),
    MemoryError. A call that raises leaves the cache as it was.
    """

    __slots__ = ("__weakref__", "_cache", "_config")
    if TYPE_CHECKING:
        kv_heads: int
        dim: int
        page_size: int
        first: int
        recent: int
        window: int
        slack: int
        window_keeps_first: bool
        f16_scale: bool
        k_bits: int
        k_rotation: _Rotation
        k_seed: int
        k_scale_rule: _ScaleRule
        v_bits: int
        v_rotation: _Rotation
        v_seed: int
        v_scale_rule: _ScaleRule
        k_codebook: tuple[Any, Any]
        v_codebook: tuple[Any, Any]
        k_table: Any
        v_table: Any
        k_mean: Any
        v_mean: Any

    def __init__(
        self,
        kv_heads: int,
        dim: int,
        *,
        page_size: int = 64,
        first: int = 0,
        recent: int = 0,
        window: int = 0,
        slack: int = 0,
        window_keeps_first: bool = False,
        f16_scale: bool = False,
        k_bits: int = 4,
        k_rotation: _Rotation = "hadamard",
        k_seed: int = 0,
        k_scale_rule: _ScaleRule = "matched",
        v_bits: int = 4,
        v_rotation: _Rotation = "hadamard",
        v_seed: int = 0,
        v_scale_rule: _ScaleRule = "matched",
        k_codebook: Any = None,
        v_codebook: Any = None,
        k_table: Any = None,
        v_table: Any = None,
        k_mean: Any = None,
        v_mean: Any = None,
        device: Any = "cpu",
    ) -> None:
        given = dict(locals())
        del given["self"], given["device"]
        self._cache = _bittern.KvCache(_checked_config(given), _device(device))
        self._config: dict[str, Any] | None = None

    @classmethod
    def _of(cls, cache: Any, config: dict[str, Any] | None = None) -> KvCache:
        self = cls.__new__(cls)
        self._cache = cache
        self._config = config
        return self

    @property
    def device(self) -> str:
        """Where the rows are: "cpu" or "cuda:0"."""
        return self._cache.device

    def to(self, device: Any) -> KvCache:
        """A cache with the same tokens on another device, or on this one; it shares nothing."""
        return self._of(self._cache.to(_device(device)), self._config)

    def append(self, k: Any, v: Any, *, stream: Any = None) -> None:
        """Adds tokens: k and v [tokens, kv_heads, dim], or [kv_heads, dim] for one."""
        handle = self._stream(stream, k, v)
        self._cache.append(k, v, handle)
        _cuda.keep_until_done((k, v), handle)

    def attend(
        self,
        q: Any,
        out: Any = None,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Any = None,
        causal: bool = True,
        preference: Literal["exact", "fastest"] = "exact",
        stream: Any = None,
    ) -> Any:
        """Attention of the newest tokens' queries, q [queries, heads, dim] or [heads, dim].

        Returns `out`, by default a new array of q's framework and dtype. `scale` multiplies the
        logits: None or 0 is 1 / sqrt(dim). A `softcap` other than 0 bounds them: they become
        softcap * tanh(logit / softcap). `sinks`, float32 [heads], is one more logit per head.
        Without `causal` queries also see the tokens after their own.
        """
        factor = 0.0 if scale is None else _field_value("KvCache", _ATTENTION["scale"], scale)
        cap = _field_value("KvCache", _ATTENTION["softcap"], softcap)
        causal = _flag("KvCache: causal", causal)
        if not isinstance(preference, str):
            raise ValueError(f"KvCache: preference: {preference!r}, expected 'exact' or 'fastest'")
        handle = self._stream(stream, q, out)
        tensor = _Tensor("KvCache: q", q, stream=handle)
        self._cache.check_query(tensor)
        if out is None:
            if tensor.device != "cpu" and _cuda.torch_of(q) is None:
                raise ValueError("KvCache: out: None, and on CUDA only torch's arrays are made")
            with _cuda.allocating_for(q, handle):
                out = _new_array(q, tensor.shape, tensor.dtype)
        self._cache.attend(tensor, out, sinks, factor, cap, causal, _text(preference), handle)
        _cuda.keep_until_done((q, out, sinks), handle)
        return out

    def _stream(self, stream: Any, *arrays: Any) -> int:
        return 0 if self.device == "cpu" else _cuda.stream_handle(stream, arrays, "KvCache")

    def truncate(self, size: int) -> None:
        """Forgets all tokens from `size` on; refused where the window would reach what is gone."""
        self._cache.truncate(_integer_of_bits("KvCache: size", size, 64))

    def fork(self) -> KvCache:
        """A cache with the same tokens; pages are copied when one of the two writes to them."""
        return self._of(self._cache.fork(), self._config)

    def read(self, token: int) -> tuple[Any, Any]:
        """Rows of K and V of a token as attention sees them, float32 numpy [kv_heads, dim]."""
        return self._cache.read(_integer_of_bits("KvCache: token", token, 64))

    def __len__(self) -> int:
        """Tokens appended, less those taken back by truncate."""
        return len(self._cache)

    @property
    def counts(self) -> KvCounts:
        """Tokens in each region."""
        return KvCounts(*self._cache.counts())

    @property
    def bytes(self) -> KvBytes:
        """Bytes held, to the last one."""
        return KvBytes(*self._cache.bytes())

    def serialize(self) -> _Bytes:
        """Everything, in the format of docs/kv_cache.md."""
        return self._cache.serialize()

    @classmethod
    def parse(cls, data: Any, device: Any = "cpu") -> KvCache:
        """The cache that serialize() wrote, from bytes or a contiguous buffer; or why it is none."""
        cache = cls._of(_bittern.KvCache.parse(data))
        return cache if device == "cpu" else cache.to(device)

    def write_aura(self, k_packed: Any, k_scales: Any, v_packed: Any, v_scales: Any) -> None:
        """Writes the coded tokens in AURA's layout; there must be no others.

        packed uint32 [kv_heads, capacity, width], scales float32 [kv_heads, capacity].
        """
        self._cache.write_aura(k_packed, k_scales, v_packed, v_scales)

    @classmethod
    def read_aura(
        cls, k_packed: Any, k_scales: Any, v_packed: Any, v_scales: Any, tokens: int, **config: Any
    ) -> KvCache:
        """A cache of the first `tokens` slots; `config` is the constructor's, or aura_config's."""
        given = _checked_config(config)
        tokens = _integer_of_bits("KvCache: tokens", tokens, 64)
        return cls._of(
            _bittern.KvCache.read_aura(given, k_packed, k_scales, v_packed, v_scales, tokens)
        )

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's parameters, with the tables that were filled in, as numpy arrays."""
        if self._config is None:
            self._config = _read_only(self._cache.config())
        return dict(self._config)

    def __copy__(self) -> KvCache:
        return self.fork()

    def __deepcopy__(self, memo: Any) -> KvCache:
        return self.fork()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).parse, (self.serialize(), self.device)

    def __repr__(self) -> str:
        config = self.config
        shown = ["kv_heads", "dim", "k_bits", "v_bits"]
        shown += [f.name for f in _FIELDS if f.name not in shown and config[f.name] != f.default]
        text = ", ".join(f"{name}={config[name]!r}" for name in shown)
        if self.device != "cpu":
            text += f", device={self.device!r}"
        counts, held = self.counts, self.bytes
        regions = ", ".join(f"{n} {name}" for name, n in counts._asdict().items() if n)
        size = held.codes + held.scales + held.exact
        return (
            f"<bittern.{type(self).__name__}({text}): {len(self)} tokens"
            f"{f' ({regions})' if regions else ''}, {size} bytes>"
        )


def _parameter(name: str) -> property:
    return property(lambda cache: cache.config[name])


_FIELDS = _bittern.kv_fields()
_TABLES = tuple(f"{side}_{table}" for table in ("codebook", "table", "mean") for side in "kv")
_PARAMETERS = tuple(f.name for f in _FIELDS) + _TABLES
_ATTENTION = _fields_of("aura_attention")

for _class in (KvBytes, KvCache, KvCounts):
    _class.__module__ = "bittern"
for _name in _PARAMETERS:
    setattr(KvCache, _name, _parameter(_name))
del _class, _name


def aura_config(
    scheme: str, kv_heads: int, dim: int, layer: int, *, legacy: bool = False
) -> dict[str, Any]:
    """Parameters of a KvCache that reads and writes AURA's caches: KvCache(**aura_config(...)).

    `scheme` is "aura4", "aura8v4", ...; `layer` seeds the rotations. With `legacy`, the tables that
    AURA shipped: for decoding only.
    """
    if not isinstance(scheme, str):
        raise ValueError(f"aura_config: scheme: {scheme!r}, expected a name such as 'aura4v4'")
    config = _bittern.aura_config(
        _text(scheme),
        _integer_of_bits("aura_config: kv_heads", kv_heads, 64),
        _integer_of_bits("aura_config: dim", dim, 64),
        _seed("aura_config: layer", layer),
        _flag("aura_config: legacy", legacy),
    )
    return {name: value for name, value in config.items() if value is not None}


def _device(device: Any) -> str:
    return _selection("KvCache", device, "exact", None, 0)[0]


def _seed(where: str, value: Any) -> int:
    seed = _integer(where, value)
    if not 0 <= seed < 2**64:
        raise ValueError(f"{where}: {seed}, expected 0..2^64-1")
    return seed


def _flag(where: str, value: Any) -> bool:
    if not _is_bool(value):
        raise ValueError(f"{where}: {value!r}, expected True or False")
    return bool(value)


def _read_only(config: dict[str, Any]) -> dict[str, Any]:
    for value in config.values():
        for array in value if isinstance(value, tuple) else (value,):
            if hasattr(array, "setflags"):
                array.setflags(write=False)
    return config


def _checked_config(given: dict[str, Any]) -> dict[str, Any]:
    """The parameters as Python's own types; arrays are left as they are."""
    for name in given:
        if name not in _PARAMETERS:
            raise TypeError(f"KvCache: no parameter {name!r}{_nearest(name, _PARAMETERS)}")
    for name in ("kv_heads", "dim"):
        if name not in given:
            raise TypeError(f"KvCache: {name}: missing")
    checked = {}
    for field in _FIELDS:
        if field.name not in given:
            continue
        value = given[field.name]
        if field.name.endswith("_seed"):
            checked[field.name] = _seed(f"KvCache: {field.name}", value)
        else:
            checked[field.name] = _field_value("KvCache", field, value)
    checked.update((name, given[name]) for name in _TABLES if given.get(name) is not None)
    return checked
