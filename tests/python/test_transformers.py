"""bittern.transformers.patch: gated-delta layers of transformers on bittern's functions."""

import copy
import importlib.util
import os
import subprocess
import sys

import pytest

import bittern

pytestmark = pytest.mark.peer("torch", "transformers")
if importlib.util.find_spec("torch") is not None and importlib.util.find_spec("transformers") is not None:
    import torch
    import transformers

    import bittern.transformers

SIZES = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "max_position_embeddings": 512,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
KINDS = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**SIZES, **EXPERTS}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", SIZES),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**SIZES, **EXPERTS}),
}


def tiny(kind, seed=3):
    config, model, sizes = KINDS[kind]
    torch.manual_seed(seed)
    model = getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval()
    for name, parameter in model.named_parameters():  # small at first: the layers would not show
        if parameter.dim() == 2:
            parameter.data.mul_(4)
        if name.endswith(("dt_bias", "A_log")):
            parameter.data.add_(torch.randn_like(parameter) / 2)
    return model


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def ids(*shape):
    return torch.randint(0, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(5))


def logits_and_gradients(model, tokens):
    model.zero_grad()
    logits = model(tokens, use_cache=False).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(6))
    (logits.float() * weights).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def rule_in_f64(query, key, value, g, beta, **_):
    """In place of transformers' chunks: token by token, with torch's own gradients."""
    q, k, v, g, beta = (t.double() for t in (query, key, value, g, beta))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    state, out = 0, []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        known = (state * k[:, t, :, :, None]).sum(-2)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - known))[:, :, None]
        out.append((state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(out, 1).to(query.dtype), None


def test_logits_and_gradients(kind, monkeypatch):
    """Tokens of three chunks. transformers' gradients of the gates are the less accurate ones."""
    model = tiny(kind)
    theirs, their_gradients = logits_and_gradients(model, ids(2, 150))
    with monkeypatch.context() as changed:
        module = sys.modules[type(model).__module__]
        changed.setattr(module, "torch_chunk_gated_delta_rule", rule_in_f64)
        logits, gradients = logits_and_gradients(model, ids(2, 150))
    with bittern.transformers.patch(model) as patched:
        assert len(patched.layers) == 3
        ours, our_gradients = logits_and_gradients(model, ids(2, 150))
    assert distance(ours, logits) < 2e-6 and distance(ours, theirs) < 2e-6
    assert gradients.keys() == our_gradients.keys() == their_gradients.keys()
    for name, gradient in gradients.items():
        assert distance(our_gradients[name], gradient) < 1e-5, name
        assert distance(our_gradients[name], their_gradients[name]) < 1e-3, name
    assert any("A_log" in n for n in gradients) and any("conv1d" in n for n in gradients)


def test_in_bf16(kind, show):
    """Beside the same weights in float32 we are no further off than transformers is itself."""
    errors = torch.zeros(2, 2)  # ours and theirs; of logits and gradients
    for seed in range(3):
        model = tiny(kind, seed).bfloat16()
        truth, gradients = logits_and_gradients(copy.deepcopy(model).float(), ids(2, 100))
        for row in (1, 0):
            if row == 0:
                bittern.transformers.patch(model)
            logits, found = logits_and_gradients(model, ids(2, 100))
            assert logits.dtype == torch.bfloat16
            off = [distance(found[name], gradient) for name, gradient in gradients.items()]
            errors[row] += torch.tensor([distance(logits, truth), sum(off) / len(off)]) / 3
    (ours, our_gradients), (theirs, their_gradients) = errors.tolist()
    show(
        f"{kind} in bf16, relative error of logits {ours:.4f} (transformers {theirs:.4f}), of "
        f"gradients {our_gradients:.4f} ({their_gradients:.4f})"
    )
    assert ours < 1.1 * theirs and our_gradients < 1.1 * their_gradients


def test_generation_with_a_cache(kind):
    """The same tokens as without bittern, greedy and by beams; a batch padded on the left."""
    model = tiny(kind)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :6] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    runs = [
        {"inputs": ids(1, 70)},
        {"inputs": ids(2, 20), "attention_mask": mask},
        {"inputs": ids(2, 3), "num_beams": 3},
    ]
    theirs = [model.generate(**run, **options) for run in runs]
    bittern.transformers.patch(model)
    for run, expected in zip(runs, theirs):
        assert torch.equal(model.generate(**run, **options), expected)


def test_tokens_in_pieces(kind):
    """A prompt at once, and in pieces through a cache: of one token, of two, of many."""
    model = tiny(kind)
    tokens = ids(2, 90)
    with torch.no_grad():
        expected = model(tokens).logits
        bittern.transformers.patch(model)
        cache = transformers.DynamicCache(config=model.config)
        pieces = [
            model(piece, past_key_values=cache).logits for piece in tokens.split([2, 1, 1, 2, 80, 1, 3], 1)
        ]
    assert distance(torch.cat(pieces, 1), expected) < 2e-6


def test_a_new_token_is_one_op_per_layer(kind, monkeypatch):
    """With the bits of the ops one by one, which a cache that records its past still takes."""
    model = tiny(kind)
    bittern.transformers.patch(model)
    step, calls = bittern.torch._gated_delta_step, []
    monkeypatch.setattr(
        bittern.torch, "_gated_delta_step", lambda *args: calls.append(1) or step(*args)
    )
    logits, counts = [], []
    for records in (False, True):
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids(2, 20), past_key_values=cache)
            for layer in cache.layers:
                layer.record_past = records
            for _ in range(3):
                logits.append(model(ids(2, 1), past_key_values=cache).logits)
        counts.append(len(calls))
    assert counts == [9, 9]
    for one, apart in zip(logits[:3], logits[3:]):
        assert torch.equal(one, apart)


def test_gradients_through_a_cache(kind):
    """Of inputs behind others that are in the cache; transformers' own code cannot do it."""
    model = tiny(kind)
    bittern.transformers.patch(model)
    layer = model.model.layers[0].linear_attn
    x = torch.randn(1, 30, SIZES["hidden_size"])
    whole, piece = x.clone().requires_grad_(), x[:, 20:].clone().requires_grad_()
    out = layer(whole)[:, 20:]
    seed = torch.randn_like(out)
    expected = torch.autograd.grad(out, whole, seed)[0][:, 20:]
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        layer(x[:, :20], cache_params=cache)
    gradient = torch.autograd.grad(layer(piece, cache_params=cache), piece, seed)[0]
    assert distance(gradient, expected) < 1e-5


def test_packed_sequences(kind):
    """Kept apart in convolution and rule, which transformers' own torch code refuses to do."""
    model = tiny(kind)
    bittern.transformers.patch(model)
    ends = [0, 13, 14, 80]
    packed = {"cu_seq_lens_q": torch.tensor(ends, dtype=torch.int32)}
    layer = model.model.layers[0].linear_attn
    x = torch.randn(1, 80, SIZES["hidden_size"])
    with torch.no_grad():
        together = layer(x, **packed)
        for begin, end in zip(ends, ends[1:]):
            assert distance(together[:, begin:end], layer(x[:, begin:end])) < 1e-6  # torch.matmul
    with pytest.raises(ValueError, match="seq_idx: given without cu_seq_lens_q, expected both"):
        layer(x, seq_idx=torch.zeros(1, 80, dtype=torch.int32))


def test_compiled_as_one_graph(kind):
    model = tiny(kind)
    bittern.transformers.patch(model)
    layer = model.model.layers[0].linear_attn
    x = torch.randn(2, 40, SIZES["hidden_size"], requires_grad=True)
    expected = layer(x)
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(found, expected)
    seed = torch.randn_like(expected)
    assert torch.equal(*(torch.autograd.grad(y, x, seed)[0] for y in (found, expected)))


def test_it_can_be_undone(kind):
    model, other = tiny(kind), tiny(kind)
    tokens = ids(1, 33)
    with torch.no_grad():
        before = model(tokens).logits
        handle = bittern.transformers.patch(model)
        ours = model(tokens).logits
        assert not torch.equal(ours, before)
        assert torch.equal(other(tokens).logits, before)  # another model of the class
        copied = copy.deepcopy(model)
        with pytest.raises(ValueError, match="layer 0: patched already, expected unpatch"):
            bittern.transformers.patch(model)
        handle.unpatch()
        handle.unpatch()
        assert torch.equal(model(tokens).logits, before)
        assert torch.equal(copied(tokens).logits, ours)
        assert bittern.transformers.unpatch(copied) == 3 and bittern.transformers.unpatch(copied) == 0
        assert torch.equal(copied(tokens).logits, before)
        bittern.transformers.patch(model, preference="exact")
        assert torch.equal(model(tokens).logits, ours)
    assert model.state_dict().keys() == other.state_dict().keys()


def test_what_is_wrong_is_named():
    patch = bittern.transformers.patch
    with pytest.raises(ValueError, match="model: Linear has no gated-delta layer, expected one of Qwen3Next"):
        patch(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="model: str, expected a model of transformers"):
        patch("model")
    with pytest.raises(ValueError, match="preference: 'best', expected"):
        patch(tiny("qwen3_5"), preference="best")
    model = tiny("qwen3_5")
    model.model.layers[1].linear_attn.activation = "gelu"
    with pytest.raises(NotImplementedError, match="layer 1: activation gelu, expected silu"):
        patch(model)
    assert bittern.transformers.unpatch(model) == 0  # nothing was done by halves


@pytest.mark.parametrize("version", [None, "4.57.1", "5.9.0.dev0"])
def test_transformers_missing_or_old(tmp_path, version):
    code = "import sys\n"
    if version is None:
        code += "sys.modules['transformers'] = None\n"
        expected = "bittern.transformers: the package transformers is missing, expected 5.17 or newer"
    else:
        (tmp_path / "transformers.py").write_text(f"__version__ = '{version}'\n")
        code += f"sys.path.insert(0, {str(tmp_path)!r})\n"
        expected = f"bittern.transformers: transformers {version}, expected 5.17 or newer"
    done = subprocess.run(
        [sys.executable, "-c", code + "import bittern.transformers"],
        env={**os.environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and expected in done.stderr
