"""bittern in models of Hugging Face's transformers: `import bittern.transformers`.

    bittern.transformers.patch(model)      # gated-delta layers run on bittern's kernels
    cache = bittern.transformers.AuraCache(model.config, "aura4v4")
    model.generate(**inputs, past_key_values=cache)    # keys and values as codes of 4 bits

docs/transformers.md says what is computed and what is refused. transformers is not a dependency:
only this module imports it, 5.17 or newer.
"""

from __future__ import annotations

import re as _re
import types as _types
from typing import Any, Literal

try:
    import transformers as _transformers
except ImportError as _error:
    raise ImportError(
        "bittern.transformers: the package transformers is missing, expected 5.17 or newer: "
        "pip install transformers"
    ) from _error

if tuple(map(int, _re.findall(r"\d+", _transformers.__version__)[:2])) < (5, 17):
    raise ImportError(
        f"bittern.transformers: transformers {_transformers.__version__}, expected 5.17 or newer: "
        "pip install --upgrade transformers"
    )

import torch as _torch
from transformers.integrations.accelerate import force_accelerate_hooks as _force_hooks

from . import torch as _functions
from ._aura_cache import AuraCache

__all__ = ["AuraCache", "Patch", "patch", "unpatch"]


# ---- gated-delta layers ----


def patch(
    model: _torch.nn.Module, *, preference: Literal["exact", "fastest"] | None = None
) -> Patch:
    """Lets the gated-delta layers of Qwen3-Next and Qwen3.5 in `model` run on bittern's functions.

    The layers of this model alone are changed; weights stay where they are. Training, caches,
    packed sequences (cu_seq_lens_q) and torch.compile work as before. The result undoes it:

        handle = bittern.transformers.patch(model)
        handle.unpatch()                 # or unpatch(model), or `with patch(model):`

    `preference` is that of bittern.torch.gated_delta_rule: "exact", "fastest", or None for fastest
    on CUDA and exact on the CPU.
    """
    if not isinstance(model, _torch.nn.Module):
        raise ValueError(f"patch: model: {type(model).__name__}, expected a model of transformers")
    if preference not in (None, "exact", "fastest"):
        raise ValueError(f"patch: preference: {preference!r}, expected 'exact', 'fastest' or None")
    layers = [m for m in model.modules() if type(m).__name__ in _PROJECTIONS]
    if not layers:
        raise ValueError(
            f"patch: model: {type(model).__name__} has no gated-delta layer, expected one of "
            f"{', '.join(_PROJECTIONS)}"
        )
    for layer in layers:
        _check_layer(layer)
    for layer in layers:
        _replace(layer, _make_forward(_PROJECTIONS[type(layer).__name__], preference))
        _replace(layer.norm, _norm_forward)
    return Patch(layers)


def unpatch(model: _torch.nn.Module) -> int:
    """Puts transformers' own functions back. Returns how many layers had been patched."""
    layers = [m for m in model.modules() if type(m).__name__ in _PROJECTIONS]
    return sum(_restore(layer) and _restore(layer.norm) for layer in layers)


class Patch:
    """What `patch` did: the layers that run on bittern. Leaving it as a context undoes it."""

    def __init__(self, layers: list[_torch.nn.Module]) -> None:
        self.layers = layers

    def unpatch(self) -> None:
        for layer in self.layers:
            unpatch(layer)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: Any) -> None:
        self.unpatch()

    def __repr__(self) -> str:
        return f"<bittern.transformers.Patch: {len(self.layers)} layers>"


def _check_layer(layer):
    where = f"patch: layer {layer.layer_idx}"
    if _BEFORE in layer.__dict__:
        raise ValueError(f"{where}: patched already, expected unpatch(model) before")
    if layer.activation not in ("silu", "swish"):
        raise NotImplementedError(f"{where}: activation {layer.activation}, expected silu")
    if not 2 <= layer.conv_kernel_size <= 4:
        raise NotImplementedError(
            f"{where}: a convolution of width {layer.conv_kernel_size}, expected 2..4"
        )
    for name, dim in (("keys", layer.head_k_dim), ("values", layer.head_v_dim)):
        if dim > 256:
            raise NotImplementedError(f"{where}: {name} of {dim}, expected at most 256")


_BEFORE = "_bittern_before"  # on a patched module: the name that was replaced, and what it was


def _replace(module, forward):
    # accelerate keeps a module's own function beside the one with its hooks.
    name = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    module.__dict__[_BEFORE] = name, module.__dict__.get(name)
    module.__dict__[name] = _types.MethodType(forward, module)


def _restore(module):
    if _BEFORE not in module.__dict__:
        return False
    name, before = module.__dict__.pop(_BEFORE)
    del module.__dict__[name]
    if before is not None:
        module.__dict__[name] = before
    return True


def _project_qwen3_next(layer, x):
    """What the convolution reads [batch, tokens, channels]; z by heads; b and a."""
    *qkv, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    return _torch.cat([t.flatten(2) for t in qkv], dim=-1), z, b, a


def _project_qwen3_5(layer, x):
    z = layer.in_proj_z(x).unflatten(-1, (-1, layer.head_v_dim))
    return layer.in_proj_qkv(x), z, layer.in_proj_b(x), layer.in_proj_a(x)


_PROJECTIONS = {
    "Qwen3NextGatedDeltaNet": _project_qwen3_next,
    "Qwen3_5GatedDeltaNet": _project_qwen3_5,
    "Qwen3_5MoeGatedDeltaNet": _project_qwen3_5,
}


def _norm_forward(self, hidden_states, gate):
    """As transformers rounds: after the norm, after the weight, and at the end."""
    return _functions.gated_rms_norm(
        hidden_states, gate, self.weight, eps=self.variance_epsilon, rounding="each"
    )


def _decodes_in_place(layer, past, x):
    """Whether one op may do the layer's work on a new token between its projections. It overwrites
    both states, keeps no inputs that the convolution has left behind (record_past), and does not
    call the norm, whose weights accelerate may have put elsewhere."""
    dtypes = {t.dtype for t in (x, past.conv_states[0], layer.conv1d.weight, layer.norm.weight)}
    return (
        x.shape[1] == 1
        and len(dtypes) == 1
        and past.recurrent_states[0].dtype == _torch.float32
        and not past.record_past
        and not hasattr(layer.norm, "_hf_hook")
        and not _torch.is_grad_enabled()
    )


def _make_forward(project, preference):
    @_force_hooks("conv1d")
    def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        if cu_seqlens is None and kwargs.get("seq_idx") is not None:
            raise ValueError(
                f"bittern.transformers: layer {self.layer_idx}: seq_idx: given without "
                "cu_seq_lens_q, expected both: packed sequences would see one another"
            )
        if attention_mask is not None:
            hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
        tokens = hidden_states.shape[1]
        mixed, z, b, a = project(self, hidden_states)

        conv_state = state = None
        if cache_params is not None and cache_params.has_previous_state(self.layer_idx):
            past = cache_params.layers[self.layer_idx]
            conv_state = past.conv_states[0][..., 1 - self.conv_kernel_size :]
            state = past.recurrent_states[0]
            if _decodes_in_place(self, past, mixed):
                out = _functions._gated_delta_step(
                    mixed, z, a, b, self.conv1d.weight.squeeze(1), self.norm.weight,
                    self.A_log.float(), self.dt_bias.float(), self.conv1d.bias, conv_state, state,
                    self.norm.variance_epsilon,
                    preference or ("fastest" if mixed.is_cuda else "exact"),
                )  # fmt: skip
                return self.out_proj(out.flatten(2))
            if _torch.is_grad_enabled():  # both are overwritten, and a gradient needs them
                conv_state, state = conv_state.clone(), state.clone()
        convolved, _ = _functions.causal_conv1d(
            mixed,
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            initial_state=conv_state,
            activation="silu",
            cu_seqlens=cu_seqlens,
        )
        if cache_params is not None:
            cache_params.update_conv_state(
                mixed.transpose(1, 2), self.layer_idx, conv_kernel_size=self.conv_kernel_size
            )

        q, k, v = convolved.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        q, k = (t.unflatten(-1, (-1, self.head_k_dim)) for t in (q, k))
        v = v.unflatten(-1, (-1, self.head_v_dim))
        decoding = state is not None and tokens == 1
        rule = _functions.recurrent_gated_delta_rule if decoding else _functions.gated_delta_rule
        out, last = rule(
            q,
            k,
            v,
            g=a,
            beta=b,
            initial_state=state,
            output_final_state=cache_params is not None,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_beta_sigmoid_in_kernel=True,
            cu_seqlens=cu_seqlens,
            preference=preference,
        )
        if cache_params is not None:
            cache_params.update_recurrent_state(last, self.layer_idx)
        out = self.norm(out.flatten(0, 2), z.flatten(0, 2))
        return self.out_proj(out.view(*hidden_states.shape[:2], -1))

    return forward
