"""A cache for models of transformers that keeps keys and values as codes (docs/transformers.md)."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    get_layer_types_and_kwargs,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import bittern

from ._plans import run as _run

_Preference = Literal["exact", "fastest"]
_LEAST_ROOM = 64  # tokens that memory is made for at first
# Of a KvCache, what the model or the cache itself decides here.
_NOT_OPTIONS = ("kv_heads", "dim", "page_size", "window", "slack", "window_keeps_first")


class AuraCache(Cache):
    """Keys and values as codes of 1 to 8 bits, and attention computed on the codes.

        cache = AuraCache(model.config, "aura4v4")
        model.generate(**inputs, past_key_values=cache)

    config         of the model itself (model.config): its attention is told to read the codes. It
                   computes as before for every other cache, and without one
    scheme         bits of K and V: "aura8v4"; "aura4" is "aura4v4"
    first, recent  how many of the first and of the newest tokens are kept in bf16
    preference     of aura_attention: "exact", "fastest", or None for fastest on CUDA
    options        other parameters of bittern.KvCache: f16_scale, k_scale_rule, v_rotation, ...
    layer_options  the same for single layers: {0: {"k_bits": 8}}

    Linear-attention layers of hybrid models keep their own states. Batches may be padded on the
    left. There are no gradients. docs/transformers.md has the rest.
    """

    def __init__(
        self,
        config: Any,
        scheme: str = "aura4v4",
        *,
        first: int = 0,
        recent: int = 0,
        preference: _Preference | None = None,
        layer_options: Mapping[int, Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        if not hasattr(config, "get_text_config"):
            raise ValueError(
                f"AuraCache: config: {type(config).__name__}, expected model.config of transformers"
            )
        if preference not in (None, "exact", "fastest"):
            raise ValueError(
                f"AuraCache: preference: {preference!r}, expected 'exact', 'fastest' or None"
            )
        config = config.get_text_config(decoder=True)
        types, kwargs = get_layer_types_and_kwargs(config)
        if isinstance(kwargs, dict):  # before transformers 5.18: the same for all
            kwargs = [kwargs] * len(types)
        others = sorted(set(types) - {"full_attention", "linear_attention"})
        if others:
            raise NotImplementedError(
                f"AuraCache: config: layers of type {', '.join(others)}, expected full_attention "
                "and linear_attention"
            )
        for index in layer_options or ():
            if index not in range(len(types)) or types[index] != "full_attention":
                raise ValueError(f"AuraCache: layer_options: {index!r}, expected an attention layer")
        options = {"first": first, "recent": recent, **options}
        layers, masks = [], _Masks()
        for index, (kind, arguments) in enumerate(zip(types, kwargs)):
            if kind == "full_attention":
                own = {**options, **(layer_options or {}).get(index, {})}
                layers.append(AuraLayer(scheme, index, own, preference, masks))
            else:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**arguments))
        super().__init__(layers=layers)
        self.scheme = scheme
        _use_codes(config)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the attention layers hold, with the room that is not used yet."""
        return sum(layer.nbytes for layer in self._coded)

    @property
    def plain_nbytes(self) -> int:
        """Bytes that the same tokens would take in the model's dtype, as in a DynamicCache."""
        return sum(layer.plain_nbytes for layer in self._coded)

    @property
    def _coded(self) -> list[AuraLayer]:
        return [layer for layer in self.layers if isinstance(layer, AuraLayer)]

    def __repr__(self) -> str:
        tokens = max(layer.get_seq_length() for layer in self._coded) if self._coded else 0
        return f"<AuraCache({self.scheme!r}): {tokens} tokens, {self.nbytes} bytes>"


class _Masks:
    """The padding that masks tell: all layers get the same one, and it is read once."""

    def __init__(self) -> None:
        self._mask: Any = lambda: None
        self._padding: list[int] = []

    def padding_of(self, mask: Tensor, queries: int, length: int) -> list[int]:
        if self._mask() is not mask:
            self._padding = _read_padding(mask, queries, length)
            self._mask = weakref.ref(mask)
        return self._padding


class _Coded:
    """Stands for the keys and values of a layer, between Cache.update and the attention."""

    __slots__ = ("layer",)

    def __init__(self, layer: AuraLayer) -> None:
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(
            "AuraCache: the model reads keys and values itself, expected attention through "
            "transformers' AttentionInterface, and a cache that was made from model.config, not "
            "from a copy of it"
        )


class AuraLayer(CacheLayerMixin):
    """The codes of one attention layer: a slot for each token of the padded batch, in order.

    With `recent` > 0 a token's rows are in a ring first, at slot position % recent, and are encoded
    when they leave it. `first` tokens are kept beside: their slots in the codes are not read.
    """

    is_compileable = False
    is_sliding = False

    def __init__(
        self,
        scheme: str,
        index: int,
        options: Mapping[str, Any],
        preference: _Preference | None,
        masks: _Masks,
    ) -> None:
        super().__init__()
        for name in _NOT_OPTIONS:
            if name in options:
                raise TypeError(f"AuraCache: {name}: given, expected none: the model says it")
        self._scheme, self._index, self._options = scheme, index, dict(options)
        self._preference, self._masks = preference, masks
        # The sizes come with the first tokens, but what else is wrong is told now.
        tables = ("_codebook", "_table", "_mean")
        sizeless = {n: v for n, v in self._options.items() if not n.endswith(tables)}
        self._settings = self._fill_in(sizeless, kv_heads=1, dim=64)
        self._clear()

    def _fill_in(self, options: Mapping[str, Any], kv_heads: int, dim: int) -> dict[str, Any]:
        config = bittern.aura_config(self._scheme, kv_heads, dim, self._index)
        return bittern.KvCache(**{**config, **options}).config

    def _clear(self) -> None:
        self.is_initialized = False
        self._length = self._ring = 0  # tokens of the padded batch, and how many are in the ring
        self._padding: list[int] = []
        self._room = 0
        self._tensors: dict[str, Tensor] = {}
        self._pending: tuple[Tensor, Tensor] | None = None

    # ---- as a layer of transformers' cache ----

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, kv_heads, _, dim = key_states.shape
        if value_states.shape != key_states.shape:
            raise NotImplementedError(
                f"AuraCache: layer {self._index}: values of shape {list(value_states.shape)}, expected "
                f"{list(key_states.shape)}, as the keys have"
            )
        self.batch_size, self.kv_heads, self.dim = batch, kv_heads, dim
        self.device, self.dtype = key_states.device, key_states.dtype
        self._settings = settings = self._fill_in(self._options, kv_heads, dim)
        self._tables = {}
        for side in "kv":
            levels, boundaries = settings[f"{side}_codebook"]
            tables = {
                "codebook": levels,
                "boundaries": boundaries,
                "table": settings[f"{side}_table"],
                "mean": settings[f"{side}_mean"],
            }
            for name, table in tables.items():
                if table is not None:
                    table = torch.tensor(table, device=self.device)
                self._tables[f"{side}_{name}"] = table
            for region in ("first", "recent"):
                shape = batch, kv_heads, settings[region], dim
                self._tensors[f"{side}_{region}"] = key_states.new_zeros(shape, dtype=torch.bfloat16)
        self._padding = [0] * batch
        self.is_initialized = True
        self._reserve(_LEAST_ROOM)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Takes the new tokens; they are encoded by the attention, which knows the padding."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._pending is not None:
            raise RuntimeError(
                f"AuraCache: layer {self._index}: the attention before this one did not end; expected "
                "reset() before the cache is used again"
            )
        expected = self.batch_size, self.kv_heads, key_states.shape[2], self.dim
        if key_states.shape != expected:
            raise ValueError(
                f"AuraCache: layer {self._index}: keys of shape {list(key_states.shape)}, expected "
                f"{list(expected)}: one batch until reset()"
            )
        self._pending = key_states, value_states
        self._length += key_states.shape[2]
        coded = _Coded(self)
        return coded, coded

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def is_croppable(self) -> bool:
        """Without a trace only if no token of the ring is encoded meanwhile."""
        return not self._settings["recent"]

    def reset(self) -> None:
        self._clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest tokens: crop(-3). Tokens that left the ring remain encoded."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"AuraCache: crop: {tokens_to_remove}, expected 0 or less: minus the number of tokens "
                "to remove"
            )
        removed = min(-tokens_to_remove, self._length)
        self._length -= removed
        self._ring = max(0, self._ring - removed)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            rows = torch.arange(self.batch_size, device=self.device)
            self._select(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            rows = torch.arange(self.batch_size, device=self.device)
            self._select(rows[indices.to(self.device)])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_initialized:
            self._select(beam_idx.to(self.device))

    def _select(self, rows: Tensor) -> None:
        if any(self._padding):  # else the device need not be waited for
            self._padding = [self._padding[row] for row in rows.tolist()]
        self._tensors = {n: t.index_select(0, rows) for n, t in self._tensors.items()}
        self.batch_size = rows.shape[0]
        self._padding = self._padding if any(self._padding) else [0] * self.batch_size

    def offload(self) -> None:
        raise NotImplementedError("AuraCache: offload: codes stay on the model's device")

    prefetch = offload

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._tensors.values())

    @property
    def plain_nbytes(self) -> int:
        if not self.is_initialized:
            return 0
        rows = self.batch_size * self.kv_heads * self._length
        return 2 * rows * self.dim * torch.empty(0, dtype=self.dtype).element_size()

    # ---- codes ----

    def _reserve(self, tokens: int) -> None:
        """Room for so many tokens; a quarter more than was there at least, so that few are copied."""
        if tokens <= self._room:
            return
        wanted = max(tokens, self._room + self._room // 4)
        room = -(-wanted // _LEAST_ROOM) * _LEAST_ROOM
        scale = torch.float16 if self._settings["f16_scale"] else torch.float32
        for side in "kv":
            words = -(-self.dim * self._settings[f"{side}_bits"] // 32)
            kinds = {"packed": ((words,), torch.uint32), "scales": ((), scale)}
            for name, (shape, dtype) in kinds.items():
                name = f"{side}_{name}"
                shape = self.batch_size, self.kv_heads, room, *shape
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
                if self._room:
                    tensor[:, :, : self._room] = self._tensors[name]
                self._tensors[name] = tensor
        self._room = room

    def _encode(self, side: str, rows: Tensor, begin: int) -> None:
        """rows [batch, kv_heads, tokens, dim] to the slots from `begin` on."""
        if not rows.shape[2]:
            return
        end = begin + rows.shape[2]
        mean = self._tables[f"{side}_mean"]
        if mean is not None:
            rows = rows.float() - mean[:, None]
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        tables = ("table", "boundaries", "codebook")
        _run(
            "aura_encode",
            {
                "x": rows,
                "packed": self._tensors[f"{side}_packed"][:, :, begin:end],
                "scales": self._tensors[f"{side}_scales"][:, :, begin:end, None],
                **{name: self._tables[f"{side}_{name}"] for name in tables},
            },
            rows=rows.shape[0] * rows.shape[1] * rows.shape[2],
            dim=self.dim,
            bits=self._settings[f"{side}_bits"],
            rotation=self._settings[f"{side}_rotation"],
            scale_rule=self._settings[f"{side}_scale_rule"],
            f16_scale=self._settings["f16_scale"],
            element=rows.dtype,
        )

    def _append(self, keys: Tensor, values: Tensor) -> None:
        recent, end = self._settings["recent"], self._length
        begin = end - keys.shape[2]
        oldest = begin - self._ring  # the first token that is not encoded
        self._ring = min(recent, self._ring + keys.shape[2])
        encoded = end - self._ring
        self._reserve(encoded)
        for side, rows in (("k", keys), ("v", values)):
            rows = rows.detach()
            self._keep_first(self._tensors[f"{side}_first"], rows, begin)
            if recent:
                ring, rows = self._tensors[f"{side}_recent"], rows.bfloat16()
                slots = torch.arange(oldest, min(begin, encoded), device=self.device) % recent
                self._encode(side, ring.index_select(2, slots), oldest)
                kept = max(begin, encoded)
                self._encode(side, rows[:, :, : kept - begin], begin)
                slots = torch.arange(kept, end, device=self.device) % recent
                ring.index_copy_(2, slots, rows[:, :, kept - begin :])
            else:
                self._encode(side, rows, begin)

    def _keep_first(self, kept: Tensor, rows: Tensor, begin: int) -> None:
        count, end = kept.shape[2], begin + rows.shape[2]
        for row, padding in enumerate(self._padding):
            low, high = max(begin, padding), min(end, padding + count)
            if low < high:
                kept[row, :, low - padding : high - padding] = rows[row, :, low - begin : high - begin]

    def attend(
        self, query: Tensor, mask: Tensor | None, scale: float | None, softcap: float, sinks: Any
    ) -> Tensor:
        """Encodes what `update` took. query [batch, heads, queries, dim] of the newest tokens."""
        if self._pending is None:
            raise RuntimeError(f"AuraCache: layer {self._index}: attention without new tokens")
        queries, begin = query.shape[2], self._length - self._pending[0].shape[2]
        if torch.is_grad_enabled() and any(t.requires_grad for t in (query, *self._pending)):
            raise ValueError(
                "AuraCache: the model asks for gradients, and codes have none; expected "
                "torch.no_grad(), under which generate runs"
            )
        if mask is not None:
            padding = self._masks.padding_of(mask, queries, self._length)
            if begin and padding != self._padding:
                raise ValueError(
                    f"AuraCache: attention_mask: padding of {padding} tokens, expected "
                    f"{self._padding} as before: tokens that were cached cannot be masked later"
                )
            self._padding = padding
        elif any(self._padding):
            raise ValueError("AuraCache: attention_mask: none, expected one: the batch is padded")
        (keys, values), self._pending = self._pending, None
        self._append(keys, values)

        batch, heads = query.shape[:2]
        settings = ("first", "recent", "k_bits", "v_bits", "k_rotation", "v_rotation", "f16_scale")
        rows = query.transpose(1, 2)
        out = rows.new_empty(rows.shape)
        lengths, starts = self._regions()
        held = {n: t.flatten(0, 1) for n, t in self._tensors.items() if t.shape[2]}
        tables = ("k_codebook", "v_codebook", "k_table", "v_table", "k_mean", "v_mean")
        _run(
            "aura_attention",
            {
                "q": rows if rows.stride(-1) == 1 else rows.contiguous(),
                **held,
                **{name: self._tables[name] for name in tables},
                "sinks": sinks,
                "lengths": lengths,
                "starts": starts,
                "out": out,
            },
            self._preference or ("fastest" if query.is_cuda else "exact"),
            sequences=batch,
            queries=queries,
            heads=heads,
            kv_heads=self.kv_heads,
            dim=self.dim,
            capacity=self._room,
            element=query.dtype,
            scale=scale or 0.0,
            softcap=softcap,
            **{name: self._settings[name] for name in settings},
        )
        return out

    def _regions(self) -> tuple[Tensor, Tensor]:
        lengths, starts = [], []
        for padding in self._padding:
            real = max(0, self._length - padding)
            first = min(self._settings["first"], real)
            recent = min(self._ring, real - first)
            coded = real - first - recent
            lengths.append((first, coded, recent))
            oldest = self._length - recent
            # Without coded tokens `padding + first` may lie beyond the room for them.
            starts.append((padding + first if coded else 0, oldest % max(1, self._settings["recent"])))
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        return tuple(_to_device(tuple(table), self.device, stream) for table in (lengths, starts))


# All layers of a step ask for the same. A stream has its own: the memory of a tensor that is dropped
# is used again in the order of its stream alone.
@functools.lru_cache(maxsize=8)
def _to_device(table: tuple[Any, ...], device: torch.device, stream: int) -> Tensor:
    return torch.tensor(table, dtype=torch.int32, device=device)


# ---- through transformers' attention ----


def _use_codes(config: Any) -> None:
    """Lets the attention of the config's model read codes where a layer's cache has them."""
    before = config._attn_implementation or "eager"
    if before.startswith("aura_"):
        return
    if before not in ("sdpa", "eager"):
        raise NotImplementedError(
            f"AuraCache: config: attention by {before}, expected sdpa or eager: "
            'model.set_attn_implementation("sdpa") before the cache is made'
        )
    name = f"aura_{before}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _attention_beside(before))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
    config._attn_implementation = name


def _attention_beside(before: str) -> Any:
    """The attention on codes, which leaves tensors to the implementation called `before`."""

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Any,
        value: Any,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(key, _Coded):
            function = ALL_ATTENTION_FUNCTIONS.get(before, None)
            if function is None:  # each model has its own
                function = sys.modules[type(module).__module__].eager_attention_forward
            return function(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        if dropout:
            raise ValueError("AuraCache: dropout in attention, expected model.eval()")
        if kwargs.get("sliding_window") is not None or kwargs.get("is_causal") is False:
            raise NotImplementedError(
                "AuraCache: attention in a window or not causal, expected full causal attention"
            )
        if kwargs.get("position_bias") is not None:
            raise NotImplementedError("AuraCache: position_bias: given, expected none")
        sinks = kwargs.get("s_aux")
        out = key.layer.attend(
            query,
            attention_mask,
            scaling,
            kwargs.get("softcap") or 0.0,
            None if sinks is None else sinks.detach().float(),
        )
        return out, None

    return attention


def _read_padding(mask: Tensor, queries: int, length: int) -> list[int]:
    """Of a mask [batch, 1, queries, tokens], True or 0 where a query sees a token."""
    seen = mask if mask.dtype == torch.bool else mask == 0
    if mask.dim() != 4 or mask.shape[1] != 1 or tuple(mask.shape[2:]) != (queries, length):
        raise NotImplementedError(
            f"AuraCache: attention_mask: shape {list(mask.shape)}, expected [batch, 1, {queries}, "
            f"{length}]"
        )
    seen = seen[:, 0]
    padding = (~seen[:, -1]).sum(-1)
    tokens = torch.arange(length, device=mask.device)
    query = tokens[length - queries :, None]
    real = tokens >= padding[:, None, None]
    expected = real & (tokens <= query)
    padded = query < padding[:, None, None]  # queries of padding see whatever they like
    if not bool(((seen == expected) | padded).all()):
        raise NotImplementedError(
            "AuraCache: attention_mask: neither causal nor causal after padding on the left, "
            'expected one of these (padding_side="left" for a tokenizer)'
        )
    return padding.tolist()
