"""bittern's backward passes as torch autograd: `import bittern.torch`.

    y = bittern.torch.fake_quantize_per_group(x, scale, zero_point, group_size=64)
    w = bittern.torch.qdq_affine(q, scales, biases, group_size=64, bits=4)

Both are custom operators of torch (>= 2.4): torch.compile(fullgraph=True) keeps them whole. They
take CPU and CUDA tensors, on torch's current stream. Values and gradients have the bits of the ops,
whose headers give the formulas (bittern/ops/fake_quantize_per_group_backward.h and its like).

A tensor that is not contiguous is copied first; results are contiguous. A gradient has no gradient
of its own. Forward-mode differentiation (torch.func.jvp, dual tensors) is an error.
"""

import torch as _torch
import torch.autograd.forward_ad as _forward_ad
from torch import Tensor
from torch._library.autograd import make_autograd_impl as _make_autograd_impl

import bittern as _bittern

__all__ = ["fake_quantize_per_group", "qdq_affine"]


def _plain(tensor):
    """What DLPack exports: dense, and free of autograd and of bits that negate or conjugate."""
    if tensor is not None and tensor.layout is not _torch.strided:
        raise ValueError(
            f"bittern.torch: a tensor of layout {tensor.layout}, expected torch.strided: "
            "call to_dense() first"
        )
    return None if tensor is None else tensor.detach().resolve_conj().resolve_neg().contiguous()


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


for _definition in (_fake_quantize, _fake_quantize_backward, _qdq_affine, _qdq_affine_backward):
    _refuse_tangents(_definition)
