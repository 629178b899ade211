"""The small ops and functions of a decoder against torch, transformers and slow models of them."""

import math

import numpy as np
import pytest

import bittern


def normals(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


# ---- frequencies ----

SCALINGS = [
    {},
    {"scaling": "linear", "factor": 2.5},
    {"scaling": "llama3", "factor": 8.0},
    {"scaling": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"scaling": "yarn", "factor": 4.0, "original_context": 32768},
    {"scaling": "yarn", "factor": 40.0, "original_context": 4096, "mscale": 0.707,
     "mscale_all_dim": 1.0},
    {"scaling": "yarn", "factor": 32.0, "original_context": 4096, "truncate": False},
    {"scaling": "yarn", "factor": 0.5, "original_context": 2048, "beta_fast": 16, "beta_slow": 2},
    {"scaling": "yarn", "factor": 8.0, "original_context": 4096, "attention_factor": 1.5},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: "-".join(map(str, s.values())) or "none")
@pytest.mark.parametrize("dim,base", [(64, 10000.0), (128, 500000.0), (32, 1000000.0)])
def test_frequencies_are_those_of_transformers(scaling, dim, base):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inverse, factor = bittern.rope_frequencies(dim, base, **scaling)
    kind = scaling.get("scaling", "none")
    if kind == "none":
        want, want_factor = base ** (-np.arange(0, dim, 2) / dim), 1.0
    else:
        config = LlamaConfig(hidden_size=2 * dim, num_attention_heads=2, head_dim=dim)
        parameters = {k: v for k, v in scaling.items() if k not in ("scaling", "original_context")}
        if kind == "llama3":
            parameters = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **parameters}
        if kind != "linear":
            parameters["original_max_position_embeddings"] = scaling.get("original_context", 8192)
        config.rope_parameters = {"rope_type": kind, "rope_theta": base, **parameters}
        want, want_factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        want = want.numpy()
    assert inverse.dtype == np.float32
    np.testing.assert_allclose(inverse, want, rtol=2e-6, atol=0)
    assert factor == pytest.approx(want_factor, rel=1e-12)


def test_errors_of_frequencies():
    with pytest.raises(ValueError, match="scaling: 'lama3'; did you mean 'llama3'"):
        bittern.rope_frequencies(64, scaling="lama3")
    with pytest.raises(ValueError, match="rotary_dim: 7, expected an even number"):
        bittern.rope_frequencies(7)
    with pytest.raises(ValueError, match="rope_frequencies: factor: 'x', expected a number"):
        bittern.rope_frequencies(8, scaling="linear", factor="x")


# ---- ops ----


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dim,rotary_dim", [(64, 64), (80, 32)])
def test_rope_is_a_rotation(layout, dim, rotary_dim):
    x = normals(5, 3, dim)
    positions = np.array([0, 1, 17, 4000, 1048575], np.int32)
    inverse, factor = bittern.rope_frequencies(rotary_dim, 10000.0, scaling="yarn", factor=4)
    y = bittern.rope(x, positions, inverse, layout=layout, factor=factor)
    pairs = x[..., :rotary_dim].astype(np.float64)
    if layout == "half":
        a, b = np.split(pairs, 2, axis=-1)
    else:
        a, b = pairs[..., ::2], pairs[..., 1::2]
    turned = (a + 1j * b) * factor * np.exp(
        1j * positions[:, None, None].astype(np.float64) * inverse.astype(np.float64))
    want = x.astype(np.float64)
    if layout == "half":
        want[..., :rotary_dim] = np.concatenate([turned.real, turned.imag], -1)
    else:
        want[..., :rotary_dim:2], want[..., 1:rotary_dim:2] = turned.real, turned.imag
    np.testing.assert_allclose(y, want, atol=2e-6)
    assert (y[..., rotary_dim:] == x[..., rotary_dim:]).all()


def test_rope_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x = torch.from_numpy(normals(1, 4, 11, 64))  # batch, heads, tokens, dim
    positions = torch.arange(11, dtype=torch.int32)
    inverse, _ = bittern.rope_frequencies(64, 10000.0)
    angles = positions[:, None].double() * torch.from_numpy(inverse).double()
    cos, sin = (f(torch.cat([angles, angles], -1)).float()[None] for f in (torch.cos, torch.sin))
    want, _ = llama.apply_rotary_pos_emb(x, x, cos, sin)
    y = bittern.rope(x[0].transpose(0, 1), positions, torch.from_numpy(inverse))
    assert torch.equal(y, want[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rms_norm_is_that_of_transformers(dtype):
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    dtype = getattr(torch, dtype)
    x, residual = (torch.from_numpy(normals(2, 7, 96, seed=s)).to(dtype) for s in (1, 2))
    norm = llama.LlamaRMSNorm(96, eps=1e-5).to(dtype)
    norm.weight.data = torch.from_numpy(normals(96, seed=3)).to(dtype)
    y, total = bittern.rms_norm(x, norm.weight.data, residual, eps=1e-5, rounding="each", sum=True)
    assert torch.equal(total, x + residual)
    want = norm(x + residual).detach()
    # The mean's sum has another order.
    step = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    assert torch.allclose(y.float(), want.float(), rtol=step, atol=step)
    assert (y != want).float().mean() < (1 if dtype == torch.float32 else 0.02)


def test_rms_norm_with_an_offset_is_gemmas():
    torch = pytest.importorskip("torch")
    gemma = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    norm = gemma.Gemma3RMSNorm(96, eps=1e-6)
    norm.weight.data = torch.from_numpy(normals(96, seed=3))
    x = torch.from_numpy(normals(5, 96))
    y = bittern.rms_norm(x, norm.weight.data, offset=1.0)
    assert torch.allclose(y, norm(x).detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["swiglu", "geglu_tanh", "geglu_erf"])
def test_gated_activation_is_that_of_torch(kind):
    torch = pytest.importorskip("torch")
    both = torch.from_numpy(4 * normals(9, 2 * 50))
    gate, up = both[:, :50], both[:, 50:]  # halves of one matrix, without copies
    f = {"swiglu": torch.nn.functional.silu,
         "geglu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
         "geglu_erf": torch.nn.functional.gelu}[kind]
    y = bittern.gated_activation(gate, up, kind=kind)
    want = f(gate.double()) * up.double()
    assert torch.allclose(y.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("softcap,temperature", [(0, 1), (30, 1), (0, 0.7), (5, 2)])
def test_log_softmax_is_that_of_torch(softcap, temperature):
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(10 * normals(3, 50000))
    v = x.double()
    if softcap:
        v = softcap * torch.tanh(v / softcap)
    want = torch.log_softmax(v / temperature, -1)
    y = bittern.log_softmax(x, softcap=softcap, temperature=temperature)
    assert y.dtype == torch.float32
    assert torch.allclose(y.double(), want, rtol=1e-6, atol=4e-6)


def test_rms_norm_backward_is_that_of_torch():
    torch = pytest.importorskip("torch")
    fused = torch.from_numpy(normals(6, 5, 32))  # heads of q, k and v
    weight, d_y = torch.from_numpy(normals(32, seed=2)), torch.from_numpy(normals(6, 3, 32, seed=3))
    d_sum = torch.from_numpy(normals(6, 3, 32, seed=4))
    x, w = (t.double().requires_grad_() for t in (fused[:, :3], weight))
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * (w + 1)
    ((y * d_y).sum() + (x * d_sum).sum()).backward()
    more = {"eps": 1e-5, "offset": 1.0}
    d_x, d_weight = bittern.rms_norm_backward(d_y, fused[:, :3], weight, d_sum, **more)
    assert torch.allclose(d_x.double(), x.grad, rtol=1e-5, atol=2e-6)
    assert torch.allclose(d_weight.double(), w.grad, rtol=1e-5, atol=1e-5)
    only = bittern.rms_norm_backward(d_y, fused[:, :3], weight, d_sum, d_weight=False, **more)
    assert torch.equal(only, d_x)


@pytest.mark.parametrize("kind", ["swiglu", "geglu_tanh", "geglu_erf"])
def test_gated_activation_backward_is_that_of_torch(kind):
    torch = pytest.importorskip("torch")
    both, d_y = torch.from_numpy(4 * normals(9, 2 * 50)), torch.from_numpy(normals(9, 50, seed=2))
    gate, up = (t.double().requires_grad_() for t in (both[:, :50], both[:, 50:]))
    f = {"swiglu": torch.nn.functional.silu,
         "geglu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
         "geglu_erf": torch.nn.functional.gelu}[kind]
    (f(gate) * up * d_y).sum().backward()
    d_gate, d_up = bittern.gated_activation_backward(d_y, both[:, :50], both[:, 50:], kind=kind)
    assert torch.allclose(d_gate.double(), gate.grad, rtol=1e-6, atol=2e-5)
    assert torch.allclose(d_up.double(), up.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("softcap,temperature", [(0, 1), (30, 1), (0, 0.7), (5, 2)])
def test_kl_loss_is_that_of_torch(softcap, temperature):
    torch = pytest.importorskip("torch")
    logits, teacher = (torch.from_numpy(3 * normals(4, 5000, seed=s)) for s in (1, 2))
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0])
    x = logits.double().requires_grad_()
    v = softcap * torch.tanh(x / softcap) if softcap else x
    log_q = torch.log_softmax(v / temperature, -1)
    log_p = torch.log_softmax(teacher.double() / temperature, -1)
    want = weights * torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    want.sum().backward(retain_graph=True)
    more = {"softcap": softcap, "temperature": temperature, "weights": weights}
    loss, d_x = bittern.kl_loss(logits, teacher, **more)
    assert torch.allclose(loss.double(), want, rtol=1e-6, atol=1e-6)
    assert torch.allclose(d_x.double(), x.grad, rtol=2e-6, atol=1e-9)
    # The top of the teacher, and the rest as one token.
    x.grad = None
    top, ids = log_p.float().topk(20)
    rest = torch.ones_like(log_p).scatter(1, ids, 0)
    tail, other = ((p.exp() * rest).sum(-1).log() for p in (log_p, log_q))
    p = torch.cat([top.double(), tail.float().double()[:, None]], 1)
    q = torch.cat([log_q.gather(1, ids), other[:, None]], 1)
    want = weights * (p.exp() * (p - q)).sum(-1)
    want.sum().backward()
    given = {"ids": ids.int(), "log_probs": top, "tail": tail.float()}
    loss, d_x = bittern.kl_loss(logits, **given, **more)
    assert torch.allclose(loss.double(), want, rtol=2e-6, atol=2e-6)
    assert torch.allclose(d_x.double(), x.grad, rtol=2e-6, atol=1e-7)
    with pytest.raises(ValueError, match=r"kl_loss: teacher: missing, expected f32 \[4,5000\]"):
        bittern.kl_loss(logits)


def test_adam_is_that_of_torch():
    torch = pytest.importorskip("torch")
    parameter = torch.from_numpy(normals(300))
    want = torch.nn.Parameter(parameter.double())
    optimizer = torch.optim.Adam([want], lr=0.01, betas=(0.8, 0.99), eps=1e-7)
    mean, variance = torch.zeros(300), torch.zeros(300)
    for step in range(1, 20):
        gradient = torch.from_numpy(normals(300, seed=step))
        more = {"rate": 0.01, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-7, "step": step}
        assert bittern.adam(gradient, parameter, mean, variance, **more) is None
        want.grad = gradient.double()
        optimizer.step()
    assert torch.allclose(parameter.double(), want.detach(), rtol=1e-6, atol=1e-6)


# ---- sampling ----


def mix(z):
    m = 2**64 - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & m
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & m
    return z ^ (z >> 31)


def slow_sample(logits, history, temperature, top_k, top_p, min_p, repetition_penalty, seed, step):
    """bittern/sample.h, line by line."""
    logits = [float(v) for v in logits]
    for token in set(history):
        v = logits[token]
        scaled = v / repetition_penalty if v > 0 else v * repetition_penalty
        logits[token] = float(np.float32(scaled))
    largest = max(logits)
    if temperature == 0:
        return logits.index(largest)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k:
        order = order[:top_k]
    w = {i: math.exp(logits[i] - largest) for i in order}
    if top_p < 1:
        total, kept, so_far = sum(w.values()), [], 0.0
        for i in order:
            kept.append(i)
            so_far += w[i]
            if so_far >= top_p * total:
                break
        order = kept
    ids = sorted(i for i in order if min_p == 0 or w[i] >= min_p)
    g, m = 0x9E3779B97F4A7C15, 2**64 - 1
    u = (mix((mix((seed + g) & m) + g * (step + 1)) & m) >> 11) * 2.0**-53
    weights = [math.exp((logits[i] - largest) / temperature) for i in ids]
    target, so_far = u * sum(weights), 0.0
    for i, weight in zip(ids, weights):
        so_far += weight
        if so_far > target:
            return i
    return ids[-1]


def test_sample_is_the_slow_model():
    rng = np.random.default_rng(5)
    seen = set()
    for turn in range(1500):
        logits = (3 * rng.standard_normal(int(rng.integers(1, 300)))).astype(np.float32)
        if turn % 3 == 0:
            logits = np.round(logits)  # ties
        if turn % 5 == 0 and len(logits) > 1:
            logits[rng.integers(0, len(logits) - 1)] = -np.inf
        options = {
            "temperature": float(rng.choice([0, 0.25, 0.7, 1, 1.5])),
            "top_k": int(rng.choice([0, 1, 5, 40, 1000])),
            "top_p": float(rng.choice([1, 0.95, 0.5, 0.01])),
            "min_p": float(rng.choice([0, 0.03, 0.3])),
            "repetition_penalty": float(rng.choice([1, 1.25, 0.5])),
            "seed": int(rng.integers(0, 2**63)),
            "step": int(rng.integers(0, 5000)),
        }
        history = [int(t) for t in rng.integers(0, len(logits), 4)] if turn % 2 else []
        token = bittern.sample(logits, history, **options)
        assert token == slow_sample(logits, history, **options), (turn, options)
        seen.add(token)
    assert len(seen) > 50


def test_sample_takes_arrays_of_torch():
    torch = pytest.importorskip("torch")
    assert bittern.sample(torch.tensor([0.0, 3.0, 1.0]), temperature=0) == 1


def test_errors_of_sample():
    logits = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=r"logits: \[2\] is NaN"):
        bittern.sample(np.array([0, 1, np.nan], np.float32))
    with pytest.raises(ValueError, match="history: 4, expected 0..3"):
        bittern.sample(logits, [4])
    with pytest.raises(ValueError, match="sample: seed: -1, expected"):
        bittern.sample(logits, seed=-1)
    with pytest.raises(ValueError, match="sample: logits: expected an f32 array with one axis"):
        bittern.sample(np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match="sample: temperature: None, expected a number"):
        bittern.sample(logits, temperature=None)
