"""bittern.torch: the gated delta rule, the convolution and the gated norm, beside formulas in f64."""

import importlib.util
import inspect

import pytest

from torch_tensors import cuda, device, replayed, same  # noqa: F401

import bittern

pytestmark = pytest.mark.peer("torch")
if importlib.util.find_spec("torch") is not None:
    import torch

    import bittern.torch as bt


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(11)


def near(a, b, bound):
    """|a - b| within `bound` of b's largest magnitude."""
    assert a.shape == b.shape
    scale = b.detach().double().abs().max().item() or 1.0
    worst = (a.detach().double() - b.detach().double()).abs().max().item() / scale
    assert worst <= bound, worst


def leaves(tensors, device="cpu"):
    return [t.to(device).requires_grad_() for t in tensors]


# ---- the gated delta rule ----

NAMES = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")


def delta_problem(batch=2, tokens=70, heads=2, value_heads=4, key=16, value=8, states=None):
    """q, k, v, g, beta, initial_state, A_log, dt_bias; two chunks, the second of them cut."""
    tokens_of = lambda *shape: torch.randn(batch, tokens, *shape)  # noqa: E731
    return [
        tokens_of(heads, key),
        tokens_of(heads, key),
        tokens_of(value_heads, value),
        -torch.rand(batch, tokens, value_heads),
        torch.rand(batch, tokens, value_heads),
        torch.randn(states or batch, value_heads, key, value),
        torch.randn(value_heads),
        torch.randn(value_heads),
    ]


def plain_rule(q, k, v, g, beta, state, scale=None, norm=False, a_log=None, dt_bias=None, sigmoid=0):
    """Token by token in f64, with torch's own gradients: q [tokens, heads, key], state [heads, ..]."""
    q, k, v, g, beta, state = (t.double() for t in (q, k, v, g, beta, state))
    if norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if a_log is not None:
        g = -a_log.double().exp() * torch.nn.functional.softplus(g + dt_bias.double())
    if sigmoid:
        beta = sigmoid * beta.sigmoid()
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    out = []
    for t in range(q.shape[0]):
        state = state * g[t].exp()[:, None, None]
        change = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], change)
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return (torch.stack(out) if out else v.new_zeros(0, *v.shape[1:])), state


def plain_rule_of_rows(q, k, v, g, beta, state, **options):
    pairs = [plain_rule(*row, **options) for row in zip(q, k, v, g, beta, state)]
    return tuple(torch.stack(side) for side in zip(*pairs))


DELTA = {
    "plain": ({}, {}),
    "scale": ({"scale": 0.3}, {"scale": 0.3}),
    "l2norm": ({"use_qk_l2norm_in_kernel": True}, {"norm": True}),
    "sigmoid": ({"use_beta_sigmoid_in_kernel": True}, {"sigmoid": 1}),
    "negative": ({"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}, {"sigmoid": 2}),
    "gate": ({"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True}, {"norm": True}),
}


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("case", DELTA)
def test_the_rule_and_its_gradients(device, case, form):
    options, theirs = DELTA[case]
    inputs = delta_problem()
    if case in ("plain", "scale", "sigmoid", "negative"):  # keys of norm 1 keep the rule stable
        inputs[1] = torch.nn.functional.normalize(inputs[1], dim=-1)
    inputs = leaves(inputs, device)
    used = inputs if case == "gate" else inputs[:6]
    if case == "gate":
        options = {**options, "A_log": inputs[6], "dt_bias": inputs[7]}
        theirs = {**theirs, "a_log": inputs[6], "dt_bias": inputs[7]}
    rule = bt.gated_delta_rule if form == "chunk" else bt.recurrent_gated_delta_rule
    given = dict(zip(NAMES[:5], inputs[:5]), initial_state=inputs[5], output_final_state=True)
    o, state = rule(**given, preference="exact", **options)
    expected, expected_state = plain_rule_of_rows(*inputs[:6], **theirs)
    near(o, expected, 3e-6)
    near(state, expected_state, 3e-6)
    d_o, d_state = torch.randn_like(o), torch.randn_like(state)
    ours = torch.autograd.grad([o, state], used, [d_o, d_state])
    judge = torch.autograd.grad([expected, expected_state], used, [d_o.double(), d_state.double()])
    for name, a, b in zip(NAMES, ours, judge):
        assert b.abs().max() > 0, name
        near(a, b, 1e-5)


@pytest.mark.parametrize("which", ["o", "state"])
def test_one_result_alone_has_a_gradient(which):
    inputs = leaves(delta_problem()[:6])
    o, state = bt.gated_delta_rule(
        *inputs[:5], initial_state=inputs[5], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    expected = plain_rule_of_rows(*inputs, norm=True)[which == "state"]
    result = o if which == "o" else state
    seed = torch.randn_like(result)
    ours = torch.autograd.grad(result, inputs[1:], seed)  # q does not change the state
    judge = torch.autograd.grad(expected, inputs[1:], seed.double())
    for a, b in zip(ours, judge):
        near(a, b, 1e-5)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_packed_sequences_do_not_leak(device, form):
    """Each gives what it gives alone, bit for bit, an empty one passes its state on; so do gradients."""
    ends = [0, 5, 5, 80, 200]
    inputs = leaves(delta_problem(batch=1, tokens=200, states=4)[:6], device)
    cu_seqlens = torch.tensor(ends, device=device)
    rule = bt.gated_delta_rule if form == "chunk" else bt.recurrent_gated_delta_rule
    call = lambda t, s, **more: rule(  # noqa: E731
        **dict(zip(NAMES, t)), initial_state=s, output_final_state=True,
        use_qk_l2norm_in_kernel=True, preference="exact", **more,
    )  # fmt: skip
    o, state = call(inputs[:5], inputs[5], cu_seqlens=cu_seqlens)
    d_o, d_state = torch.randn_like(o), torch.randn_like(state)
    ours = torch.autograd.grad([o, state], inputs, [d_o, d_state])
    assert torch.equal(state[1], inputs[5][1]) and torch.equal(ours[5][1], d_state[1])
    for n, (begin, end) in enumerate(zip(ends, ends[1:])):
        parts = [t.detach()[:, begin:end] for t in inputs[:5]]
        alone = leaves([*parts, inputs[5].detach()[n : n + 1]], device)
        alone_o, alone_state = bt.gated_delta_rule(
            *alone[:5], initial_state=alone[5], output_final_state=True,
            use_qk_l2norm_in_kernel=True, preference="exact",
        )  # fmt: skip
        assert same(o[:, begin:end].detach(), alone_o.detach())
        assert same(state[n : n + 1].detach(), alone_state.detach())
        seeds = [d_o[:, begin:end], d_state[n : n + 1]]
        gradients = torch.autograd.grad([alone_o, alone_state], alone, seeds)
        for a, b in zip(ours[:5], gradients):
            assert same(a[:, begin:end], b)
        assert same(ours[5][n : n + 1], gradients[5])


def test_values_first(device):
    inputs = [t.to(device) for t in delta_problem()[:6]]
    for rule in (bt.gated_delta_rule, bt.recurrent_gated_delta_rule):
        given = dict(zip(NAMES, inputs[:5]), output_final_state=True, use_qk_l2norm_in_kernel=True)
        o, state = rule(**given, initial_state=inputs[5])
        turned = inputs[5].transpose(-1, -2).contiguous()
        again, turned = rule(**given, initial_state=turned, state_v_first=True)
        near(again, o, 1e-6)
        near(turned.transpose(-1, -2), state, 1e-6)


def test_the_rule_has_the_bits_of_the_ops(device):
    inputs = [t.to(device) for t in delta_problem()[:6]]
    fields = {"qk_l2norm": True, "scale": 0.25}
    o, state = bittern.gdn_chunk_forward(*inputs[:5], initial_state=inputs[5], **fields)
    given = [t.clone().requires_grad_() for t in inputs]
    ours = bt.gated_delta_rule(*given[:5], 0.25, given[5], True, True, preference="exact")
    assert same(ours[0].detach(), o) and same(ours[1].detach(), state)
    d_o, d_state = torch.randn_like(o), torch.randn_like(state)
    gradients = torch.autograd.grad(ours, given, [d_o, d_state])
    made = bittern.gdn_chunk_backward(
        d_o, *inputs[:5], d_final_state=d_state, initial_state=inputs[5], d_a_log=False,
        d_dt_bias=False, **fields,
    )  # fmt: skip
    assert len(made) == 6 and all(same(a, b) for a, b in zip(gradients, made))
    copy = inputs[5].clone()
    step = bt.recurrent_gated_delta_rule(
        *inputs[:4], beta=inputs[4], scale=0.25, initial_state=copy, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert torch.equal(copy, inputs[5])  # read, and not changed
    assert same(step[0], bittern.gdn_recurrent_step(*inputs[:5], copy, **fields))
    assert same(step[1], copy)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_tensors_of_any_dtype(dtype):
    """g, beta and states in half precision count as float32, and get gradients of their own dtype."""
    half = getattr(torch, dtype)
    inputs = [t.to(half) for t in delta_problem()[:6]]
    given = leaves(inputs)
    o, state = bt.gated_delta_rule(
        *given[:5], initial_state=given[5], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    wide = [t.detach().float() if n > 2 else t.detach() for n, t in enumerate(inputs)]
    again, _ = bt.gated_delta_rule(*wide[:5], initial_state=wide[5], use_qk_l2norm_in_kernel=True)
    assert o.dtype == half and state.dtype == torch.float32 and same(o.detach(), again)
    (o.float().sum() + state.sum()).backward()
    assert all(t.grad.dtype == half and t.grad.abs().max() > 0 for t in given)


def test_slices_are_read_in_place():
    """q, k and v as parts of one projection give the bits of copies of them."""
    together = torch.randn(2, 70, 2 * 32 + 2 * 32 + 4 * 16)
    q, k, v = together.split([64, 64, 64], -1)
    q, k, v = q.view(2, 70, 2, 32), k.view(2, 70, 2, 32), v.view(2, 70, 4, 16)
    g, beta = -torch.rand(2, 4, 70).transpose(1, 2), torch.rand(2, 4, 70).transpose(1, 2)
    assert not q.is_contiguous() and not g.is_contiguous()
    options = {"use_qk_l2norm_in_kernel": True}
    o, _ = bt.gated_delta_rule(q, k, v, g, beta, **options)
    copies = [t.contiguous() for t in (q, k, v, g, beta)]
    assert same(o, bt.gated_delta_rule(*copies, **options)[0])
    odd = [torch.stack([t, t], -1)[..., 0] for t in copies]  # no neighbours along the last axis
    assert odd[0].stride(-1) == 2 and same(o, bt.gated_delta_rule(*odd, **options)[0])


def test_flas_arguments():
    """In its order, with its defaults; what it takes by keyword we take by keyword."""
    chunk = {
        "scale": None, "initial_state": None, "output_final_state": False,
        "use_qk_l2norm_in_kernel": False, "use_beta_sigmoid_in_kernel": False,
        "allow_neg_eigval": False, "state_v_first": False, "cu_seqlens": None,
        "cu_seqlens_cpu": None, "chunk_indices": None, "cp_context": None,
    }  # fmt: skip
    recurrent = {
        "g": None, "gk": None, "gv": None, "beta": None, "scale": None, "initial_state": None,
        "output_final_state": False, "use_qk_l2norm_in_kernel": False, "use_gate_in_kernel": False,
        "A_log": None, "dt_bias": None, "use_beta_sigmoid_in_kernel": False,
        "allow_neg_eigval": False, "state_v_first": False, "cu_seqlens": None,
    }  # fmt: skip
    norm = {
        "bias": inspect.Parameter.empty, "activation": "swish", "residual": None, "prenorm": False,
        "residual_in_fp32": False, "eps": 1e-6,
    }  # fmt: skip
    conv = {
        "bias": None, "residual": None, "initial_state": None, "output_final_state": False,
        "activation": None, "backend": "triton", "cu_seqlens": None, "cu_seqlens_cpu": None,
        "chunk_indices": None, "cp_context": None,
    }  # fmt: skip
    first = {"chunk": "q k v g beta", "recurrent": "q k v", "norm": "x g weight", "conv": "x weight"}
    ours = {
        "chunk": (bt.gated_delta_rule, chunk),
        "recurrent": (bt.recurrent_gated_delta_rule, recurrent),
        "norm": (bt.gated_rms_norm, norm),
        "conv": (bt.causal_conv1d, conv),
    }
    for name, (function, theirs) in ours.items():
        parameters = inspect.signature(function).parameters
        positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == [*first[name].split(), *theirs]
        for option, default in theirs.items():
            if option not in ("backend", "bias"):  # bias has no default there
                assert parameters[option].default == default, (name, option)


def test_what_is_wrong_is_named():
    q, k, v, g, beta, state, a_log, _ = delta_problem()
    rule, step = bt.gated_delta_rule, bt.recurrent_gated_delta_rule
    wrong = [
        (TypeError, "gated_delta_rule: colour: no such option", lambda: rule(q, k, v, g, beta, colour=1)),
        (TypeError, "head_first: no such option, expected tensors", lambda: rule(q, k, v, g, beta, head_first=True)),
        (TypeError, "transpose_state_layout.*state_v_first", lambda: step(q, k, v, g, transpose_state_layout=True)),
        (NotImplementedError, "cp_context: given, expected None", lambda: rule(q, k, v, g, beta, cp_context=1)),
        (NotImplementedError, "gk: given, expected None", lambda: step(q, k, v, gk=q)),
        (ValueError, "k: dtype torch.bfloat16, expected torch.float32", lambda: rule(q, k.bfloat16(), v, g, beta)),
        (ValueError, r"v: shape \[70, 4, 8\], expected \[batch, tokens, heads, dim\]", lambda: rule(q, k, v[0], g, beta)),
        (ValueError, "A_log: None, expected", lambda: rule(q, k, v, g, beta, use_gate_in_kernel=True)),
        (ValueError, "A_log: given, expected use_gate_in_kernel", lambda: rule(q, k, v, g, beta, A_log=a_log)),
        (ValueError, "allow_neg_eigval: True, expected use_beta", lambda: rule(q, k, v, g, beta, allow_neg_eigval=True)),
        (ValueError, "g: None, expected the gate's input", lambda: step(q, k, v, use_gate_in_kernel=True, A_log=a_log)),
        (ValueError, "scale: 0, expected", lambda: rule(q, k, v, g, beta, 0)),
        (ValueError, "chunk: 48, expected 16, 32 or 64", lambda: rule(q, k, v, g, beta, chunk_size=48)),
        (ValueError, "preference: 'best'|preference: best", lambda: rule(q, k, v, g, beta, preference="best")),
        (ValueError, "initial_state", lambda: rule(q, k, v, g, beta, initial_state=state[:1])),
        (ValueError, r"initial_state: shape \[1, 4, 16, 8\], expected \[2, 4, 16, 8\]",
         lambda: step(q, k, v, g, beta=beta, initial_state=state[:1])),
        (ValueError, "activation: 'gelu', expected", lambda: bt.causal_conv1d(g, g[0, :4].T, activation="gelu")),
        (ValueError, r"weight: shape \[4\], expected \[channels, width\]", lambda: bt.causal_conv1d(g, g[0, 0])),
        (ValueError, "initial_state: shape", lambda: bt.causal_conv1d(g, g[0, :4].T, initial_state=g)),
        (TypeError, "mask: no such option", lambda: bt.causal_conv1d(g, g[0, :4].T, mask=g)),
        (NotImplementedError, "residual: given", lambda: bt.gated_rms_norm(v, v, v[0, 0, 0], residual=v)),
        (NotImplementedError, "activation: 'sigmoid'", lambda: bt.gated_rms_norm(v, v, None, activation="sigmoid")),
        (ValueError, "g: shape", lambda: bt.gated_rms_norm(v, v[0], None)),
    ]  # fmt: skip
    for kind, message, call in wrong:
        with pytest.raises(kind, match=message):
            call()


# ---- the convolution ----


def plain_conv(x, weight, bias, state, silu):
    """By torch's own convolution in f64; state [batch, channels, width - 1]."""
    x, weight, bias, state = (t.double() for t in (x, weight, bias, state))
    full = torch.cat([state, x.transpose(1, 2)], -1)
    y = torch.nn.functional.conv1d(full, weight[:, None], bias, groups=weight.shape[0])
    y = torch.nn.functional.silu(y) if silu else y
    return y.transpose(1, 2), full[..., full.shape[-1] - state.shape[-1] :]


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("tokens", [1, 70])
def test_the_convolution_and_its_gradients(device, tokens, activation, width):
    x, state = torch.randn(2, tokens, 12), torch.randn(2, 12, width - 1)
    inputs = leaves((x, torch.randn(12, width), torch.randn(12), state), device)
    y, final = bt.causal_conv1d(
        *inputs[:3], initial_state=inputs[3], output_final_state=True, activation=activation
    )
    expected, expected_final = plain_conv(*inputs, activation is not None)
    near(y, expected, 1e-6)
    assert final.shape == (2, 12, width) and not final[..., 0].any()
    assert torch.equal(final[..., 1:].double(), expected_final)
    seeds = [torch.randn_like(y), torch.randn_like(final)]
    ours = torch.autograd.grad([y, final], inputs, seeds)
    judge = torch.autograd.grad(
        [expected, expected_final], inputs, [seeds[0].double(), seeds[1][..., 1:].double()]
    )
    for a, b in zip(ours, judge):
        assert b.abs().max() > 0
        near(a, b, 1e-5)
    # fla's state has one more column, and what goes out comes in again
    wide = torch.nn.functional.pad(inputs[3], (1, 0), value=torch.nan)
    assert same(y, bt.causal_conv1d(*inputs[:3], initial_state=wide, activation=activation)[0])
    both, _ = bt.causal_conv1d(
        torch.cat([inputs[0]] * 2, 1), *inputs[1:3], initial_state=inputs[3], activation=activation
    )
    second, _ = bt.causal_conv1d(*inputs[:3], initial_state=final, activation=activation)
    assert same(both[:, tokens:].contiguous(), second)


def test_packed_sequences_of_the_convolution():
    x, weight = torch.randn(1, 20, 8), torch.randn(8, 4)
    y, final = bt.causal_conv1d(
        x, weight, cu_seqlens=torch.tensor([0, 3, 3, 20]), output_final_state=True, activation="silu"
    )
    for n, (begin, end) in enumerate([(0, 3), (3, 3), (3, 20)]):
        alone, state = bt.causal_conv1d(
            x[:, begin:end], weight, output_final_state=True, activation="silu"
        )
        assert same(y[:, begin:end].contiguous(), alone) and same(final[n : n + 1], state)
    residual = torch.randn_like(x)
    assert torch.equal(bt.causal_conv1d(x, weight, residual=residual)[0], bt.causal_conv1d(x, weight)[0] + residual)


# ---- the norm ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_norm_and_its_gradients(device, dtype):
    x, z, weight = torch.randn(3, 5, 24), torch.randn(3, 5, 24), torch.rand(24) + 0.5
    inputs = leaves([t.to(getattr(torch, dtype)) for t in (x, z, weight)], device)
    y = bt.gated_rms_norm(*inputs, eps=1e-5)
    x, z, weight = (t.double() for t in inputs)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    expected = expected * torch.nn.functional.silu(z)
    bound = 1e-6 if dtype == "float32" else 2**-8
    near(y, expected, bound)
    seed = torch.randn_like(y)
    ours = torch.autograd.grad(y, inputs, seed)
    for a, b in zip(ours, torch.autograd.grad(expected, inputs, seed.double())):
        assert a.dtype == getattr(torch, dtype)
        near(a, b, max(bound, 3e-6))
    ones = bt.gated_rms_norm(inputs[0], inputs[1], None, eps=1e-5)
    assert same(ones, bt.gated_rms_norm(*inputs[:2], torch.ones_like(inputs[2]), eps=1e-5))


# ---- dtypes ----


def test_mixed_dtypes_are_promoted():
    x, weight = torch.randn(1, 9, 16), torch.randn(16, 4)
    y, _ = bt.causal_conv1d(x.bfloat16(), weight)
    assert same(y, bt.causal_conv1d(x.bfloat16().float(), weight)[0].bfloat16())
    y = bt.gated_rms_norm(x.bfloat16(), x.bfloat16(), weight[:, 0])
    wide = x.bfloat16().float()
    assert same(y, bt.gated_rms_norm(wide, wide, weight[:, 0]).bfloat16())


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(device, compiled):
    """q, k, v and the convolution take its dtype; gates and states are in float32 all the same."""
    inputs = leaves(delta_problem()[:6], device)
    weight = torch.randn(8, 4, device=device, requires_grad=True)

    def layer(q, k, v, g, beta, state):
        conv, _ = bt.causal_conv1d(v.flatten(2)[..., :8], weight, activation="silu")
        o, last = bt.gated_delta_rule(q, k, v, g, beta, None, state, True, True)
        return o, last, conv

    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    with torch.autocast(device.type, torch.bfloat16):
        o, last, conv = run(*inputs)
    assert (o.dtype, last.dtype, conv.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    rounded = [t.detach().bfloat16() if n < 3 else t.detach() for n, t in enumerate(inputs)]
    again, last_again, conv_again = layer(*rounded)
    assert same(o.detach(), again) and same(last.detach(), last_again)
    bf16_conv, _ = bt.causal_conv1d(
        rounded[2].flatten(2)[..., :8], weight.detach().bfloat16(), activation="silu"
    )
    assert same(conv.detach(), bf16_conv)
    (o.float().sum() + last.sum() + conv.float().sum()).backward()
    assert all(t.grad.dtype == torch.float32 for t in (*inputs, weight))


# ---- torch's own checks ----


def operators():
    """Each operator of this page with arguments of all kinds."""
    ops = torch.ops.bittern
    inputs = leaves(delta_problem(batch=1, tokens=20, states=2))
    q, k, v, g, beta, state, a_log, dt_bias = inputs
    ends = torch.tensor([0, 7, 20], dtype=torch.int32)
    fields = (0.0, 64, True, True, True, False, "exact")
    rule = (q, k, v, g, beta, a_log, dt_bias, state, ends, *fields)
    bare = (q, k, v, g, beta, None, None, None, None, *fields[:5], True, "exact")
    x, weight = leaves([torch.randn(1, 20, 8), torch.randn(8, 4)])
    conv = (x, weight, None, None, ends, True)
    detach = lambda *args: [a.detach() if torch.is_tensor(a) else a for a in args]  # noqa: E731
    d_conv = detach(x, None, *conv)
    channels = 2 * 2 * 16 + 4 * 8
    step_states = torch.randn(1, channels, 3), state[:1].detach()
    layer = (
        torch.randn(1, 3, channels), torch.randn(1, 3, 4, 8), *detach(g[:, :3], beta[:, :3]),
        torch.randn(channels, 4), torch.randn(8), *detach(a_log, dt_bias), None, *step_states, 1e-6,
    )  # fmt: skip
    return {
        "rule": (ops.gated_delta_rule, (*rule, False, True)),
        "rule without states": (ops.gated_delta_rule, (*bare, False, False)),
        "step": (ops.gated_delta_rule, (*bare, True, True)),
        "rule backward": (ops.gated_delta_rule_backward, (*detach(v, state, *rule), [True] * 8)),
        "step in place": (ops.gated_delta_step, (*layer, "exact")),
        "conv": (ops.causal_conv1d, (*conv, True)),
        "conv backward": (ops.causal_conv1d_backward, (*d_conv, [True, True, False, False])),
        "norm": (ops.gated_rms_norm, (v, v.detach(), v.detach()[0, 0, 0], 1e-6, "once")),
        "norm backward": (
            ops.gated_rms_norm_backward, (*detach(v, v, v, v[0, 0, 0]), 1e-6, [True, False, True]),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["rule", "rule without states", "step", "rule backward",
                                  "step in place", "conv", "conv backward", "norm",
                                  "norm backward"])  # fmt: skip
def test_torchs_check_of_operators(name):
    op, args = operators()[name]
    torch.library.opcheck(op.default, args)


def test_compiled_as_one_graph(device):
    inputs = leaves(delta_problem()[:6], device)
    weight = torch.rand(8, device=device, requires_grad=True)

    def layer(q, k, v, g, beta, state, weight):
        o, last = bt.gated_delta_rule(q, k, v, g, beta, None, state, True, True)
        o, _ = bt.recurrent_gated_delta_rule(q, k, o, g, None, None, beta, None, last, False, True)
        return bt.gated_rms_norm(o, v, weight).square().sum() + last.sum()

    expected = layer(*inputs, weight)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = compiled(*inputs, weight)
    assert same(found.detach(), expected.detach())
    ours = torch.autograd.grad(found, [*inputs, weight])
    for a, b in zip(ours, torch.autograd.grad(expected, [*inputs, weight])):
        assert same(a, b)


def test_on_the_meta_device():
    inputs = [t.to("meta") for t in delta_problem()]
    o, state = bt.gated_delta_rule(*inputs[:5], output_final_state=True)
    assert o.shape == (2, 70, 4, 8) and state.shape == (2, 4, 16, 8) and o.is_meta
    with pytest.raises(ValueError, match="gated_delta_rule: k: on cpu, expected meta, where q is"):
        bt.gated_delta_rule(inputs[0], torch.randn(2, 70, 2, 16), *inputs[2:5])


def test_a_graph_captures_a_training_step(cuda):
    inputs = leaves(delta_problem()[:6], cuda)
    q, k, v, g, beta, state = inputs

    def step():
        o, last = bt.gated_delta_rule(q, k, v, g, beta, None, state, True, True)
        return o, *torch.autograd.grad([o, last], inputs, [torch.ones_like(o), torch.ones_like(last)])

    captured, plain = replayed(step, q, cuda)
    assert all(same(a.detach(), b.detach()) for a, b in zip(captured, plain))


def test_fastest_on_tensor_cores(cuda):
    """bf16, K and V of 128: within the rounding of bf16 of the exact kernel."""
    inputs = [t.to(cuda) for t in delta_problem(1, 300, 2, 4, 128, 128)[:5]]
    q, k, v = (t.bfloat16() for t in inputs[:3])
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    o, state = bt.gated_delta_rule(q, k, v, *inputs[3:], **options)
    exact, exact_state = bt.gated_delta_rule(q, k, v, *inputs[3:], preference="exact", **options)
    near(o, exact, 2**-6)
    near(state, exact_state, 2**-6)


def test_offsets_past_2_to_the_31(cuda):
    """Tokens x heads x dim of more than 2^31: the last sequence is as if it were alone."""
    heads, key_heads, last = 32, 8, 200
    first = 2**31 // (heads * 128)
    if torch.cuda.mem_get_info(cuda)[0] < 90 * 2**30:
        pytest.skip("needs 90 GiB of device memory")

    def tokens_of(*shape, dtype=torch.bfloat16):
        return torch.randn(1, first + last, *shape, dtype=dtype, device=cuda)

    q, k, v = tokens_of(key_heads, 128), tokens_of(key_heads, 128), tokens_of(heads, 128)
    g, beta = -tokens_of(heads, dtype=torch.float32).abs(), tokens_of(heads, dtype=torch.float32).sigmoid()
    bounds = torch.tensor([0, first, first + last], dtype=torch.int32, device=cuda)
    whole = [t.requires_grad_() for t in (q, k, v, g, beta)]
    alone = [t.detach()[:, first:].clone().requires_grad_() for t in whole]
    o, _ = bt.gated_delta_rule(*whole, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds)
    o_alone, _ = bt.gated_delta_rule(*alone, use_qk_l2norm_in_kernel=True)
    near(o[:, first:], o_alone, 2**-8)
    d_o = torch.randn_like(o)
    ours = torch.autograd.grad(o, whole, d_o)
    for a, b in zip(ours, torch.autograd.grad(o_alone, alone, d_o[:, first:])):
        near(a[:, first:], b, 2**-8)
