"""bittern's backward passes as torch autograd: `import bittern.torch`.

    y = bittern.torch.fake_quantize_per_group(x, scale, zero_point, group_size=64)
    w = bittern.torch.qdq_affine(q, scales, biases, group_size=64, bits=4)
    o, state = bittern.torch.gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    o, state = bittern.torch.recurrent_gated_delta_rule(q, k, v, g, beta=beta, initial_state=state)
    y, state = bittern.torch.causal_conv1d(x, weight, activation="silu")
    y = bittern.torch.gated_rms_norm(x, z, weight)

The last four have the arguments of flash-linear-attention (fla), so that its layers run with the
import changed. All are custom operators of torch (>= 2.4): torch.compile(fullgraph=True) keeps them
whole. They take CPU and CUDA tensors, on torch's current stream. Values and gradients have the bits
of the ops, whose headers give the formulas (bittern/ops/fake_quantize_per_group_backward.h and its
like).

A tensor whose strides an op does not take is copied first; results are contiguous. A gradient has
no gradient of its own. Forward-mode differentiation (torch.func.jvp, dual tensors) is an error.
"""

import torch as _torch
import torch.autograd.forward_ad as _forward_ad
from torch import Tensor
from torch._library.autograd import make_autograd_impl as _make_autograd_impl

import bittern as _bittern

from ._plans import run as _run

__all__ = [
    "causal_conv1d",
    "fake_quantize_per_group",
    "gated_delta_rule",
    "gated_rms_norm",
    "qdq_affine",
    "recurrent_gated_delta_rule",
]


def _plain(tensor):
    """What DLPack exports: dense, and free of autograd and of bits that negate or conjugate."""
    if tensor is not None and tensor.layout is not _torch.strided:
        raise ValueError(
            f"bittern.torch: a tensor of layout {tensor.layout}, expected torch.strided: "
            "call to_dense() first"
        )
    return None if tensor is None else tensor.detach().resolve_conj().resolve_neg().contiguous()


def _rows(tensor):
    """As _plain, but strided where ops take it: rows whose elements are neighbours, on CUDA also
    aligned as the kernels of tensor cores need them."""
    if tensor is None or tensor.layout is not _torch.strided:
        return _plain(tensor)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    dense = tensor.shape[-1:] == (1,) or tensor.stride()[-1:] == (1,)
    if tensor.is_cuda:
        apart = (s for n, s in zip(tensor.shape[:-1], tensor.stride()) if n > 1)
        dense &= tensor.data_ptr() % 16 == 0
        dense &= all(s * tensor.element_size() % 16 == 0 for s in apart)
    return tensor if dense else tensor.contiguous()


def _check_devices(op, **tensors):
    """For fake kernels, which torch runs as soon as one tensor is on the meta device."""
    (first, device), *rest = ((n, t.device) for n, t in tensors.items() if t is not None)
    for name, other in rest:
        if other != device:
            raise ValueError(
                f"bittern.torch.{op}: {name}: on {other}, expected {device}, where {first} is"
            )


def _gradients_like(tensors, wanted):
    """Memory for a gradient of each tensor, without elements where it is not wanted."""
    return tuple(t.new_empty(t.shape if w else (0,)) for t, w in zip(tensors, wanted))


def _given(names, gradients, wanted):
    """The gradients as outputs of a bittern function: False leaves one out."""
    return {n: g if w else False for n, g, w in zip(names, gradients, wanted)}


# ---- fake_quantize_per_group ----


def fake_quantize_per_group(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    group_size: int = 128,
    q_min: int = -128,
    q_max: int = 127,
    granularity: str = "group",
    axis: int = -1,
) -> Tensor:
    """(clamp(R(x / scale) + zero_point, q_min, q_max) - zero_point) * scale, differentiable.

    x             any shape; its last axis is quantised (granularity "channel": `axis`)
    scale         x's dtype, or float32 beside a half x; per group [..., axis / group_size], per
                  "token" x's shape without the last axis, per "channel" [axis], per "tensor" [1]
    zero_point    shaped as scale; int32, or floating: then it is rounded to the nearest integer
                  and learns, its gradient passing the rounding unchanged; NaN makes its group NaN

    The gradients are those of fake_quantize_per_group_backward: for x straight through where the
    code is in range, for the scale that of LSQ, for the zero point -scale where x is clamped.
    """
    return _fake_quantize(x, scale, zero_point, group_size, q_min, q_max, granularity, axis)


def _integers(zero_point):
    if zero_point is None or not zero_point.is_floating_point():
        return _plain(zero_point)
    rounded = _plain(zero_point).double().round().nan_to_num(nan=0)
    return rounded.clamp(-(2**31), 2**31 - 1).to(_torch.int32)


def _scales(scale, zero_point):
    """NaN where the zero point is NaN: no integer stands for it, and its group shows so."""
    scale = _plain(scale)
    if zero_point is None or not zero_point.is_floating_point():
        return scale
    lost = _plain(zero_point).isnan()
    return scale.masked_fill(lost.view(scale.shape), _torch.nan) if lost.shape.numel() == scale.shape.numel() else scale


@_torch.library.custom_op("bittern::fake_quantize_per_group", mutates_args=())
def _fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    q_min: int,
    q_max: int,
    granularity: str,
    axis: int,
) -> Tensor:
    return _bittern.fake_quantize_per_group(
        _plain(x),
        _scales(scale, zero_point),
        _integers(zero_point),
        y=x.new_empty(x.shape),
        group_size=group_size,
        q_min=q_min,
        q_max=q_max,
        granularity=granularity,
        axis=axis,
    )


@_fake_quantize.register_fake
def _(x, scale, zero_point, *_):
    _check_devices("fake_quantize_per_group", x=x, scale=scale, zero_point=zero_point)
    return x.new_empty(x.shape)


@_torch.library.custom_op("bittern::fake_quantize_per_group_backward", mutates_args=())
def _fake_quantize_backward(
    d_y: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    q_min: int,
    q_max: int,
    granularity: str,
    axis: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = _gradients_like((x, scale, scale), wanted)
    _bittern.fake_quantize_per_group_backward(
        _plain(d_y),
        _plain(x),
        _scales(scale, zero_point),
        _integers(zero_point),
        **_given(("d_x", "d_scale", "d_zero_point"), gradients, wanted),
        group_size=group_size,
        q_min=q_min,
        q_max=q_max,
        granularity=granularity,
        axis=axis,
    )
    return gradients


@_fake_quantize_backward.register_fake
def _(d_y, x, scale, zero_point, *rest):
    _check_devices(
        "fake_quantize_per_group_backward", d_y=d_y, x=x, scale=scale, zero_point=zero_point
    )
    return _gradients_like((x, scale, scale), rest[-1])


def _save_fake_quantize(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])
    ctx.fields = inputs[3:]


def _differentiate_fake_quantize(ctx, d_y):
    x, scale, zero_point = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3])
    gradients = list(_fake_quantize_backward(d_y, x, scale, zero_point, *ctx.fields, wanted))
    if wanted[2]:
        gradients[2] = gradients[2].view(zero_point.shape).to(zero_point.dtype)
    return *(g if w else None for g, w in zip(gradients, wanted)), *(None for _ in ctx.fields)


_fake_quantize.register_autograd(_differentiate_fake_quantize, setup_context=_save_fake_quantize)


# ---- qdq_affine ----


def qdq_affine(
    q: Tensor,
    scales: Tensor,
    biases: Tensor,
    *,
    group_size: int = 64,
    bits: int = 0,
    n_bins: int = 0,
    rounding: str = "once",
    dtype: _torch.dtype | None = None,
) -> Tensor:
    """q * scales + biases, group by group, differentiable in scales and biases.

    q         codes: uint8 [..., axis], or packed into uint32 (or int32) [..., words]
    scales    and biases: [..., axis / group_size]
    dtype     of the result: that of the scales, or a half one beside float32 scales

    The gradients are those of qdq_affine_backward: the sums of q * d_y and of d_y over each group.
    """
    if scales.dim() == 0:
        raise ValueError("bittern.torch.qdq_affine: scales: shape [], expected an entry per group")
    if q.dtype == _torch.int32:
        q = q.view(_torch.uint32)
    return _qdq_affine(q, scales, biases, group_size, bits, n_bins, rounding, dtype or scales.dtype)


def _restored(scales, group_size, dtype):
    return scales.new_empty((*scales.shape[:-1], scales.shape[-1] * group_size), dtype=dtype)


@_torch.library.custom_op("bittern::qdq_affine", mutates_args=())
def _qdq_affine(
    q: Tensor,
    scales: Tensor,
    biases: Tensor,
    group_size: int,
    bits: int,
    n_bins: int,
    rounding: str,
    dtype: _torch.dtype,
) -> Tensor:
    return _bittern.qdq_affine_forward(
        _plain(q),
        _plain(scales),
        _plain(biases),
        element=dtype,
        group_size=group_size,
        bits=bits,
        n_bins=n_bins,
        rounding=rounding,
    )


@_qdq_affine.register_fake
def _(q, scales, biases, group_size, bits, n_bins, rounding, dtype):
    _check_devices("qdq_affine", q=q, scales=scales, biases=biases)
    return _restored(scales, group_size, dtype)


@_torch.library.custom_op("bittern::qdq_affine_backward", mutates_args=())
def _qdq_affine_backward(
    d_y: Tensor,
    q: Tensor,
    scales: Tensor,
    group_size: int,
    bits: int,
    n_bins: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor]:
    gradients = _gradients_like((scales, scales), wanted)
    _bittern.qdq_affine_backward(
        _plain(d_y),
        _plain(q),
        **_given(("d_scales", "d_biases"), gradients, wanted),
        group_size=group_size,
        bits=bits,
        n_bins=n_bins,
    )
    return gradients


@_qdq_affine_backward.register_fake
def _(d_y, q, scales, group_size, bits, n_bins, wanted):
    _check_devices("qdq_affine_backward", d_y=d_y, q=q, scales=scales)
    return _gradients_like((scales, scales), wanted)


def _save_qdq_affine(ctx, inputs, output):
    q, scales, _, *ctx.fields = inputs
    ctx.save_for_backward(q, scales)


def _differentiate_qdq_affine(ctx, d_y):
    wanted = list(ctx.needs_input_grad[1:3])
    q, scales = ctx.saved_tensors
    gradients = _qdq_affine_backward(d_y, q, scales, *ctx.fields[:3], wanted)
    return None, *(g if w else None for g, w in zip(gradients, wanted)), *(None for _ in ctx.fields)


_qdq_affine.register_autograd(_differentiate_qdq_affine, setup_context=_save_qdq_affine)


# ---- the gated delta rule ----


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    preference: str | None = None,
    **unknown: object,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule over whole sequences; fla's chunk_gated_delta_rule, differentiable.

        S = e^g[t] S;   S = S + k[t]^T (beta[t] (v[t] - k[t] S));   o[t] = scale q[t] S

    q, k             [B, T, H, K], of v's dtype: float32, float16 or bfloat16
    v                [B, T, HV, V]; HV is a multiple of H, and value head h uses key head h // (HV / H)
    g, beta          [B, T, HV]: log decay and strength
    scale            of q; None: K ^ -0.5
    initial_state    [N, HV, K, V]; N is B, or the number of sequences of cu_seqlens
    cu_seqlens       [N + 1]: where the sequences of a single row (B = 1) begin and end
    state_v_first    states are [N, HV, V, K]

    With use_qk_l2norm_in_kernel q and k are normalised first. With use_gate_in_kernel g is
    -exp(A_log) * softplus(g + dt_bias), both [HV]; with use_beta_sigmoid_in_kernel beta is
    sigmoid(beta), and with allow_neg_eigval twice that. cu_seqlens_cpu and chunk_indices, which
    spare fla a wait, are not needed.

    Returns o [B, T, HV, V], and the final state in float32 if output_final_state, else None.
    g, beta, A_log, dt_bias and states are computed in float32 whatever their dtype. Under
    torch.autocast q, k and v take the autocast dtype, as for a matrix product.

    `preference` is "exact" (the bits of `ref`) or "fastest" (a kernel with a declared error bound
    where there is one); None is "fastest" on CUDA and "exact" on the CPU. The gradients are those
    of gdn_chunk_backward.
    """
    where = "gated_delta_rule"
    _refuse_unknown(where, unknown)
    if cp_context is not None:
        raise NotImplementedError(
            f"bittern.torch.{where}: cp_context: given, expected None: a sequence is computed on one "
            "device"
        )
    return _delta_rule(
        where, q, k, v, g, beta, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
        cu_seqlens, use_gate_in_kernel, A_log, dt_bias, chunk_size, preference, False,
    )  # fmt: skip


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    preference: str | None = None,
    **unknown: object,
) -> tuple[Tensor, Tensor | None]:
    """gated_delta_rule token by token, for decoding; fla's fused_recurrent_gated_delta_rule.

    g None is no decay, beta None is 1. Decays of single channels (gk, gv) are an error. With
    cu_seqlens it is computed as gated_delta_rule is, by chunks. Unlike fla's it has gradients:
    those of gdn_chunk_backward.
    """
    where = "recurrent_gated_delta_rule"
    _refuse_unknown(where, unknown)
    for name, given in (("gk", gk), ("gv", gv)):
        if given is not None:
            raise NotImplementedError(
                f"bittern.torch.{where}: {name}: given, expected None: one decay per head, in g"
            )
    if g is None:
        if use_gate_in_kernel:
            raise ValueError(
                f"bittern.torch.{where}: g: None, expected the gate's input beside use_gate_in_kernel"
            )
        g = v.new_zeros(v.shape[:3], dtype=_torch.float32)
    if beta is None:
        beta = v.new_ones(v.shape[:3], dtype=_torch.float32)
    return _delta_rule(
        where, q, k, v, g, beta, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
        cu_seqlens, use_gate_in_kernel, A_log, dt_bias, 64, preference, cu_seqlens is None,
    )  # fmt: skip


# Options of older releases of fla, and what takes their place.
_RENAMED = {
    "transpose_state_layout": "expected state_v_first, its name since fla 0.5",
    "head_first": "expected tensors [B, T, H, ...]",
}


def _refuse_unknown(where, unknown):
    for name in unknown:
        hint = _RENAMED.get(name, "expected an option of help(bittern.torch." + where + ")")
        raise TypeError(f"bittern.torch.{where}: {name}: no such option, {hint}")


def _autocast(tensor):
    """The dtype that torch.autocast asks for on the tensor's device; None outside of it."""
    kind = tensor.device.type
    if kind not in ("cpu", "cuda") or not _torch.is_autocast_enabled(kind):
        return None
    return _torch.get_autocast_dtype(kind)


def _f32(tensor):
    return None if tensor is None else tensor.to(_torch.float32)


def _delta_rule(
    where, q, k, v, g, beta, scale, initial_state, output_final_state, qk_l2norm, beta_sigmoid,
    allow_neg_eigval, value_first, cu_seqlens, gate, a_log, dt_bias, chunk, preference, recurrent,
):  # fmt: skip
    where = f"bittern.torch.{where}"
    if (dtype := _autocast(v)) is not None:
        q, k, v = (t.to(dtype) for t in (q, k, v))
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{where}: {name}: shape {list(tensor.shape)}, expected [batch, tokens, heads, dim]"
            )
        if tensor.dtype != v.dtype:
            raise ValueError(f"{where}: {name}: dtype {tensor.dtype}, expected {v.dtype}, as v has")
    if gate and a_log is None:
        raise ValueError(f"{where}: A_log: None, expected [HV] beside use_gate_in_kernel")
    if not gate and not (a_log is None and dt_bias is None):
        name = "A_log" if a_log is not None else "dt_bias"
        raise ValueError(f"{where}: {name}: given, expected use_gate_in_kernel=True beside it")
    if allow_neg_eigval and not beta_sigmoid:
        raise ValueError(
            f"{where}: allow_neg_eigval: True, expected use_beta_sigmoid_in_kernel=True beside it"
        )
    if gate and dt_bias is None:
        dt_bias = a_log.new_zeros(a_log.shape)
    if scale == 0:  # which asks the op for its default
        raise ValueError(f"{where}: scale: 0, expected another number, or None")
    if preference is None:
        preference = "fastest" if v.is_cuda else "exact"
    o, state = _gated_delta_rule(
        q, k, v, _f32(g), _f32(beta), _f32(a_log), _f32(dt_bias), _f32(initial_state), cu_seqlens,
        0.0 if scale is None else float(scale), chunk, qk_l2norm, beta_sigmoid, allow_neg_eigval,
        value_first, preference, recurrent, output_final_state,
    )  # fmt: skip
    return o, state if output_final_state else None


def _state_like(v, k, cu_seqlens, value_first, wanted):
    """Memory for the states of v's sequences, without elements where they are not wanted."""
    batch = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (v.shape[3], k.shape[3]) if value_first else (k.shape[3], v.shape[3])
    return v.new_empty((batch, v.shape[2], *state) if wanted else (0,), dtype=_torch.float32)


def _delta_fields(
    q, v, a_log, cu_seqlens, scale, chunk, qk_l2norm, beta_sigmoid, allow_neg_eigval, value_first
):  # fmt: skip
    return {
        "batch": v.shape[0],
        "tokens": v.shape[1],
        "key_heads": q.shape[2],
        "value_heads": v.shape[2],
        "key_dim": q.shape[3],
        "value_dim": v.shape[3],
        "chunk": chunk,
        "sequences": _sequences(cu_seqlens),
        "element": v.dtype,
        "state_layout": "value_key" if value_first else "key_value",
        "qk_l2norm": qk_l2norm,
        "gate": a_log is not None,
        "beta_sigmoid": beta_sigmoid,
        "allow_neg_eigval": allow_neg_eigval,
        "scale": scale,
    }


def _sequences(cu_seqlens):
    return 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _ends(cu_seqlens):
    """As ops take them; what int32 cannot hold becomes a number that is out of range, too."""
    if cu_seqlens is None or cu_seqlens.dtype == _torch.int32:
        return _plain(cu_seqlens)
    return _plain(cu_seqlens).clamp(-1, 2**31 - 1).to(_torch.int32)


def _delta_tensors(q, k, v, g, beta, a_log, dt_bias):
    rows = {"q": _rows(q), "k": _rows(k), "v": _rows(v)}
    gates = {"g": g, "beta": beta, "a_log": a_log, "dt_bias": dt_bias}
    return {**rows, **{name: _plain(gate) for name, gate in gates.items()}}


@_torch.library.custom_op("bittern::gated_delta_rule", mutates_args=())
def _gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk: int,
    qk_l2norm: bool,
    beta_sigmoid: bool,
    allow_neg_eigval: bool,
    value_first: bool,
    preference: str,
    recurrent: bool,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    fields = _delta_fields(
        q, v, a_log, cu_seqlens, scale, chunk, qk_l2norm, beta_sigmoid, allow_neg_eigval, value_first
    )  # fmt: skip
    o = v.new_empty(v.shape)
    tensors = {**_delta_tensors(q, k, v, g, beta, a_log, dt_bias), "o": o}
    state = _state_like(v, k, cu_seqlens, value_first, output_final_state or recurrent)
    if not recurrent:
        states = {
            "initial_state": _plain(initial_state),
            "cu_seqlens": _ends(cu_seqlens),
            "final_state": output_final_state and state,
        }
        _run("gdn_chunk_forward", {**tensors, **states}, preference, **fields)
        return o, state
    if initial_state is None:
        state.zero_()
    elif initial_state.shape == state.shape:
        state.copy_(initial_state)
    else:
        raise ValueError(
            f"bittern.torch.recurrent_gated_delta_rule: initial_state: shape "
            f"{list(initial_state.shape)}, expected {list(state.shape)}"
        )
    del fields["chunk"], fields["sequences"]
    _run("gdn_recurrent_step", {**tensors, "state": state}, preference, **fields)
    return o, state if output_final_state else state.new_empty(0)


@_gated_delta_rule.register_fake
def _(q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens, *rest):
    _check_devices(
        "gated_delta_rule", q=q, k=k, v=v, g=g, beta=beta, A_log=a_log, dt_bias=dt_bias,
        initial_state=initial_state, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    value_first, output_final_state = rest[5], rest[-1]
    return v.new_empty(v.shape), _state_like(v, k, cu_seqlens, value_first, output_final_state)


@_torch.library.custom_op("bittern::gated_delta_rule_backward", mutates_args=())
def _gated_delta_rule_backward(
    d_o: Tensor,
    d_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk: int,
    qk_l2norm: bool,
    beta_sigmoid: bool,
    allow_neg_eigval: bool,
    value_first: bool,
    preference: str,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    wanted = [True] * 5 + wanted[5:]  # the op makes the first five in any case
    inputs = (q, k, v, g, beta, a_log, dt_bias, initial_state)
    gradients = _delta_gradients(inputs, wanted)
    names = ("d_q", "d_k", "d_v", "d_g", "d_beta", "d_a_log", "d_dt_bias", "d_initial_state")
    tensors = {
        "d_o": _rows(d_o),
        "d_final_state": _plain(d_final_state),
        **_delta_tensors(q, k, v, g, beta, a_log, dt_bias),
        "initial_state": _plain(initial_state),
        "cu_seqlens": _ends(cu_seqlens),
        **_given(names, gradients, wanted),
    }
    fields = _delta_fields(
        q, v, a_log, cu_seqlens, scale, chunk, qk_l2norm, beta_sigmoid, allow_neg_eigval, value_first
    )  # fmt: skip
    _run("gdn_chunk_backward", tensors, preference, **fields)
    return gradients


def _delta_gradients(inputs, wanted):
    like = [inputs[2] if t is None else t for t in inputs]
    return _gradients_like(like, [w and t is not None for w, t in zip(wanted, inputs)])


@_gated_delta_rule_backward.register_fake
def _(d_o, d_final_state, q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens, *rest):
    _check_devices("gated_delta_rule_backward", d_o=d_o, d_final_state=d_final_state, q=q, k=k, v=v)
    inputs = (q, k, v, g, beta, a_log, dt_bias, initial_state)
    return _delta_gradients(inputs, [True] * 5 + rest[-1][5:])


def _save_delta_rule(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:9])
    ctx.fields = inputs[9:]


def _differentiate_delta_rule(ctx, d_o, d_state):
    *fields, _, output_final_state = ctx.fields  # the form of the forward is no matter here
    saved = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:8])
    if d_o is None:
        d_o = _torch.zeros_like(saved[2])
    if not output_final_state:
        d_state = None
    gradients = _gated_delta_rule_backward(d_o, d_state, *saved, *fields, wanted)
    return *(g if w else None for g, w in zip(gradients, wanted)), None, *(None for _ in ctx.fields)


_gated_delta_rule.register_autograd(_differentiate_delta_rule, setup_context=_save_delta_rule)


@_torch.library.custom_op("bittern::gated_delta_step", mutates_args=("conv_state", "state"))
def _gated_delta_step(
    x: Tensor,
    z: Tensor,
    g: Tensor,
    beta: Tensor,
    conv_weight: Tensor,
    norm_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    state: Tensor,
    eps: float,
    preference: str,
) -> Tensor:
    """What a layer of Qwen3.5 does with a few new tokens between its projections, without
    gradients: both states are updated where they are (bittern.transformers)."""
    batch, tokens, heads, value_dim = z.shape
    key_dim = state.shape[2]
    y = z.new_empty(z.shape)
    read = {
        "g": g, "beta": beta, "conv_weight": conv_weight, "norm_weight": norm_weight,
        "a_log": a_log, "dt_bias": dt_bias, "conv_bias": conv_bias,
    }  # fmt: skip
    tensors = {name: _plain(t) for name, t in read.items()}
    tensors |= {"x": _rows(x), "z": _rows(z), "conv_state": conv_state, "state": state, "y": y}
    fields = {
        "batch": batch,
        "tokens": tokens,
        "key_heads": (x.shape[2] - heads * value_dim) // (2 * key_dim),
        "value_heads": heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "width": conv_weight.shape[1],
        "element": x.dtype,
        "eps": eps,
        "rounding": "each",
    }
    _run("gdn_decode_step", tensors, preference, **fields)
    return y


@_gated_delta_step.register_fake
def _(x, z, *_):
    return z.new_empty(z.shape)


# ---- causal_conv1d ----


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object = None,
    **unknown: object,
) -> tuple[Tensor, Tensor | None]:
    """A depthwise causal convolution along each sequence; fla's causal_conv1d, differentiable.

        y[t][c] = f(bias[c] + sum over j < W of weight[c][j] * x[t - W + 1 + j][c]) + residual[t][c]

    x, residual      [B, T, D]
    weight, bias     [D, W] with W 2, 3 or 4, and [D]
    initial_state    [N, D, W] as fla has it, its first column not being read, or [N, D, W - 1]
    cu_seqlens       [N + 1]: where the sequences of a single row (B = 1) begin and end
    activation       None, "silu" or "swish"

    Returns y, and the final state [N, D, W] if output_final_state, else None: the last W - 1
    inputs, behind a column of zeros that nothing reads. `backend`, cu_seqlens_cpu and chunk_indices
    say how fla is to compute it, and are not needed.

    Tensors of several dtypes are promoted to one; the result has that of x. Under torch.autocast it
    is computed in the autocast dtype, as torch's convolutions are.
    """
    where = "bittern.torch.causal_conv1d"
    _refuse_unknown("causal_conv1d", unknown)
    if cp_context is not None:
        raise NotImplementedError(f"{where}: cp_context: given, expected None: one device alone")
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"{where}: activation: {activation!r}, expected None, 'silu' or 'swish'")
    if x.dim() != 3 or weight.dim() != 2:
        name, tensor, shape = (
            ("x", x, "[batch, tokens, channels]") if x.dim() != 3
            else ("weight", weight, "[channels, width]")
        )  # fmt: skip
        raise ValueError(f"{where}: {name}: shape {list(tensor.shape)}, expected {shape}")
    width = weight.shape[1]
    if initial_state is not None:
        if initial_state.dim() != 3 or initial_state.shape[2] not in (width, width - 1):
            raise ValueError(
                f"{where}: initial_state: shape {list(initial_state.shape)}, expected [sequences, "
                f"{x.shape[2]}, {width}] or [.., {width - 1}]"
            )
        initial_state = initial_state[:, :, initial_state.shape[2] - width + 1 :]
    dtype = _autocast(x)
    result = x.dtype if dtype is None else dtype
    tensors = _promoted(dtype, x, weight, bias, initial_state)
    y, state = _causal_conv1d(*tensors, cu_seqlens, activation is not None, output_final_state)
    y = y.to(result)
    if residual is not None:
        y = y + residual
    if not output_final_state:
        return y, None
    return y, _torch.nn.functional.pad(state.to(result), (1, 0))


def _promoted(dtype, *tensors):
    """The tensors in `dtype`, or if that is None in the one that holds all of theirs."""
    for tensor in tensors if dtype is None else ():
        if tensor is not None:
            dtype = tensor.dtype if dtype is None else _torch.promote_types(dtype, tensor.dtype)
    return [None if t is None else t.to(dtype) for t in tensors]


def _conv_state_like(x, weight, cu_seqlens, wanted):
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty((batch, x.shape[2], weight.shape[1] - 1) if wanted else (0,))


@_torch.library.custom_op("bittern::causal_conv1d", mutates_args=())
def _causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    y, state = x.new_empty(x.shape), _conv_state_like(x, weight, cu_seqlens, output_final_state)
    tensors = {
        "x": _rows(x),
        "weight": _plain(weight),
        "bias": _plain(bias),
        "initial_state": _plain(initial_state),
        "cu_seqlens": _ends(cu_seqlens),
        "y": y,
        "final_state": output_final_state and state,
    }
    _run("causal_conv1d", tensors, **_conv_fields(x, weight, cu_seqlens, silu))
    return y, state


def _conv_fields(x, weight, cu_seqlens, silu):
    return {
        "batch": x.shape[0],
        "tokens": x.shape[1],
        "channels": x.shape[2],
        "width": weight.shape[1],
        "sequences": _sequences(cu_seqlens),
        "element": x.dtype,
        "silu": silu,
    }


@_causal_conv1d.register_fake
def _(x, weight, bias, initial_state, cu_seqlens, silu, output_final_state):
    _check_devices(
        "causal_conv1d", x=x, weight=weight, bias=bias, initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return x.new_empty(x.shape), _conv_state_like(x, weight, cu_seqlens, output_final_state)


@_torch.library.custom_op("bittern::causal_conv1d_backward", mutates_args=())
def _causal_conv1d_backward(
    d_y: Tensor,
    d_final_state: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradients = _conv_gradients(x, weight, initial_state, wanted)
    tensors = {
        "d_y": _rows(d_y),
        "d_final_state": _plain(d_final_state),
        "x": _rows(x),
        "weight": _plain(weight),
        "bias": _plain(bias),
        "initial_state": _plain(initial_state),
        "cu_seqlens": _ends(cu_seqlens),
        **_given(("d_x", "d_weight", "d_bias", "d_initial_state"), gradients, wanted),
    }
    _run("causal_conv1d_backward", tensors, **_conv_fields(x, weight, cu_seqlens, silu))
    return gradients


def _conv_gradients(x, weight, initial_state, wanted):
    state = x if initial_state is None else initial_state
    return _gradients_like((x, weight, weight[:, 0], state), wanted)


@_causal_conv1d_backward.register_fake
def _(d_y, d_final_state, x, weight, bias, initial_state, cu_seqlens, silu, wanted):
    _check_devices("causal_conv1d_backward", d_y=d_y, d_final_state=d_final_state, x=x)
    return _conv_gradients(x, weight, initial_state, wanted)


def _save_conv(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5])
    ctx.silu, ctx.output_final_state = inputs[5:]


def _differentiate_conv(ctx, d_y, d_state):
    wanted = list(ctx.needs_input_grad[:4])
    saved = ctx.saved_tensors
    if d_y is None:
        d_y = _torch.zeros_like(saved[0])
    if not ctx.output_final_state:
        d_state = None
    gradients = _causal_conv1d_backward(d_y, d_state, *saved, ctx.silu, wanted)
    return *(g if w else None for g, w in zip(gradients, wanted)), None, None, None


_causal_conv1d.register_autograd(_differentiate_conv, setup_context=_save_conv)


# ---- gated_rms_norm ----


def gated_rms_norm(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
    *,
    rounding: str = "once",
) -> Tensor:
    """Rows of root mean square 1, weighted, and gated; fla's rms_norm_gated, differentiable.

        y = x / sqrt(mean(x^2) + eps) * weight * silu(g)

    x, g       of one shape [..., dim]
    weight     [dim]; None: 1
    rounding   to x's dtype: "once" as fla does, or "each" step (norm, weight, gate) as transformers

    A bias, a residual, prenorm and activations other than "swish" or "silu" are errors. Tensors of
    several dtypes are promoted to one; the result has that of x.
    """
    where = "bittern.torch.gated_rms_norm"
    refused = {
        "bias": bias is not None,
        "residual": residual is not None,
        "prenorm": prenorm,
        "residual_in_fp32": residual_in_fp32,
    }
    for name, given in refused.items():
        if given:
            raise NotImplementedError(f"{where}: {name}: given, expected none: add it outside")
    if activation not in ("swish", "silu"):
        raise NotImplementedError(f"{where}: activation: {activation!r}, expected 'swish' or 'silu'")
    if g.shape != x.shape or x.dim() == 0:
        raise ValueError(f"{where}: g: shape {list(g.shape)}, expected {list(x.shape)}, as x has")
    if weight is None:
        weight = x.new_ones(x.shape[-1])
    return _gated_rms_norm(*_promoted(None, x, g, weight), eps, rounding).to(x.dtype)


@_torch.library.custom_op("bittern::gated_rms_norm", mutates_args=())
def _gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, rounding: str) -> Tensor:
    y = x.new_empty(x.shape)
    tensors = {"x": _rows(x), "z": _rows(z), "weight": _plain(weight), "y": y}
    _run("gated_rms_norm", tensors, **_norm_fields(x, eps), rounding=rounding)
    return y


def _norm_fields(x, eps):
    rows, dim = x.shape[:-1].numel(), x.shape[-1]
    return {"rows": rows, "dim": dim, "eps": eps, "element": x.dtype}


@_gated_rms_norm.register_fake
def _(x, z, weight, eps, rounding):
    _check_devices("gated_rms_norm", x=x, g=z, weight=weight)
    return x.new_empty(x.shape)


@_torch.library.custom_op("bittern::gated_rms_norm_backward", mutates_args=())
def _gated_rms_norm_backward(
    d_y: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = _gradients_like((x, z, weight), wanted)
    rows = lambda t: _plain(t).view(-1, x.shape[-1])  # noqa: E731
    made = _given(("d_x", "d_z", "d_weight"), [rows(g) for g in gradients[:2]] + [gradients[2]], wanted)
    tensors = {"d_y": rows(d_y), "x": rows(x), "z": rows(z), "weight": _plain(weight), **made}
    _run("gated_rms_norm_backward", tensors, **_norm_fields(x, eps))
    return gradients


@_gated_rms_norm_backward.register_fake
def _(d_y, x, z, weight, eps, wanted):
    _check_devices("gated_rms_norm_backward", d_y=d_y, x=x, z=z, weight=weight)
    return _gradients_like((x, z, weight), wanted)


def _save_norm(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])
    ctx.eps = inputs[3]


def _differentiate_norm(ctx, d_y):
    wanted = list(ctx.needs_input_grad[:3])
    gradients = _gated_rms_norm_backward(d_y, *ctx.saved_tensors, ctx.eps, wanted)
    return *(g if w else None for g, w in zip(gradients, wanted)), None, None


_gated_rms_norm.register_autograd(_differentiate_norm, setup_context=_save_norm)


# ---- forward mode ----

_kernels = _torch.library.Library("bittern", "IMPL")


def _refuse_tangents(definition):
    """torch drops the tangents of a custom operator without a word; this makes them an error.

    Only a kernel of the autograd keys sees them in every case: torch.func.jvp hides a tensor's
    tangent from the operator's own function, and compiled code runs no Python before it.
    """
    op = definition._opoverload
    differentiate = _make_autograd_impl(op, definition)

    def kernel(keyset, *args):
        if _forward_ad._current_level >= 0:
            for argument, value in zip(op._schema.arguments, args):
                if isinstance(value, Tensor) and _forward_ad.unpack_dual(value).tangent is not None:
                    raise NotImplementedError(
                        f"bittern.torch.{definition._name}: {argument.name}: has a tangent, and "
                        "forward-mode differentiation is not supported; use backward() or "
                        "torch.autograd.grad"
                    )
        return differentiate(keyset, *args)

    # Before the kernel for all devices, which register_autograd makes.
    for device in ("CPU", "CUDA", "Meta"):
        _kernels.impl(definition._name, kernel, f"Autograd{device}", with_keyset=True)


for _definition in (
    _fake_quantize,
    _fake_quantize_backward,
    _qdq_affine,
    _qdq_affine_backward,
    _gated_delta_rule,
    _gated_delta_rule_backward,
    _causal_conv1d,
    _causal_conv1d_backward,
    _gated_rms_norm,
    _gated_rms_norm_backward,
):
    _refuse_tangents(_definition)
