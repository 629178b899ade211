"""bittern.transformers.AuraCache: models of transformers that attend to codes."""

import copy
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

from torch_tensors import cuda, device, same  # noqa: F401

import bittern

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.peer("torch", "transformers")
if importlib.util.find_spec("torch") is not None and importlib.util.find_spec("transformers") is not None:
    import torch
    import transformers

    from bittern.transformers import AuraCache

SIZES = {
    "vocab_size": 90,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
HYBRID = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
KINDS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", HYBRID),
}


def tiny(kind="llama", **more):
    config, model, sizes = KINDS[kind]
    torch.manual_seed(3)
    config = getattr(transformers, config)(**{**SIZES, **sizes, **more})
    model = getattr(transformers, model)(config).eval()
    for parameter in model.parameters():  # small at first: attention would not show
        if parameter.dim() == 2:
            parameter.data.mul_(5)
    return model


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def ids(*shape):
    return torch.randint(0, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(5))


def kl(logits, expected):
    p, q = (x.float().log_softmax(-1) for x in (expected, logits))
    return (p.exp() * (p - q)).sum(-1).mean().item()


# ---- one layer ----


class Layer:
    """A layer of the cache alone, and the attention that a model would ask of it."""

    def __init__(self, scheme="aura4v3", device="cpu", **options):
        config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1})
        config._attn_implementation = "sdpa"
        self.cache = AuraCache(config, scheme, preference="exact", **options)
        self.config, self.device = config, device

    def attend(self, q, k, v, mask=None):
        """q [batch, tokens, heads, dim] and k, v [batch, tokens, kv_heads, dim], as KvCache has them."""
        q, k, v = (t.to(self.device).transpose(1, 2) for t in (q, k, v))
        keys, values = self.cache.update(k, v, 0)
        attention = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attention(None, q, keys, values, mask, scaling=32**-0.5)
        return out.cpu()


def rows(batch, tokens, seed=1, dtype="float32"):
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(batch, tokens, heads, 32, generator=generator) for heads in (4, 2, 2))
    return [t.to(getattr(torch, dtype)) for t in made]


REGIONS = {
    "codes": {},
    "first": {"first": 4},
    "recent": {"recent": 10},
    "both": {"first": 4, "recent": 10, "f16_scale": True, "k_scale_rule": "least_squares"},
    "never full": {"first": 3, "recent": 500},
    "other": {"k_rotation": "dense", "v_rotation": "identity", "v_scale_rule": "unbiased"},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("regions", REGIONS)
def test_a_layer_has_the_bits_of_kv_cache(device, regions, dtype):
    """However tokens are grouped, and after tokens were taken back."""
    options = REGIONS[regions]
    q, k, v = rows(2, 330, dtype=dtype)
    ours = Layer(device=device, **options)
    theirs = [bittern.KvCache(**{**bittern.aura_config("aura4v3", 2, 32, 0), **options}) for _ in range(2)]
    at = 0
    for count in (3, 1, 1, 9, -4, 1, 120, -11, -30, 1, 2, 200, 1):
        if count < 0:
            ours.cache.crop(count)
            for cache in theirs:
                cache.truncate(len(cache) + count)
            continue
        new = [t[:, at : at + count] for t in (q, k, v)]
        at += count
        out = ours.attend(*new)
        for row, cache in enumerate(theirs):
            cache.append(new[1][row], new[2][row])
            assert same(out[row], cache.attend(new[0][row])), (regions, count)
        assert ours.cache.get_seq_length() == len(theirs[0])


def test_centring():
    """Means are per layer; what they do is exact, so that keys far from 0 lose much less."""
    q, k, v = rows(1, 60)
    k = k + 20 * torch.ones(2, 32)
    options = {"k_mean": (20 * torch.ones(2, 32)).numpy(), "v_mean": v.mean((0, 1)).numpy()}
    theirs = bittern.KvCache(**{**bittern.aura_config("aura4v3", 2, 32, 0), **options})
    theirs.append(k[0], v[0])
    ours = Layer(layer_options={0: options}).attend(q, k, v)
    assert same(ours[0], theirs.attend(q[0]))
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    without = Layer().attend(q, k, v)
    assert (ours - exact).norm() < 0.25 * (without - exact).norm()


def left_padded(padding, queries, tokens, additive=False):
    """The masks that transformers makes."""
    columns = torch.arange(tokens)
    seen = columns <= columns[tokens - queries :, None]
    seen = seen & (columns >= torch.tensor(padding)[:, None, None])
    if not additive:
        return seen[:, None]
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None]


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("regions", ["codes", "both", "never full"])
def test_a_padded_batch_is_its_sequences(device, regions, additive):
    """Each gives what it gives alone, bit for bit; rows of padding give zeros."""
    padding, options = [7, 0, 12], REGIONS[regions]
    q, k, v = rows(3, 60)
    together = Layer(device=device, **options)
    alone = [Layer(**options) for _ in padding]
    at = 0
    for count in (20, 1, 1, 30, 8):
        new = [t[:, at : at + count].clone() for t in (q, k, v)]
        at += count
        for row, before in enumerate(padding):  # whatever padding holds, nobody sees it
            new[1][row, : max(0, before - at + count)] = torch.inf
        mask = left_padded(padding, count, at, additive).to(device)
        out = together.attend(*new, mask)
        for row, before in enumerate(padding):
            skip = max(0, before - at + count)
            expected = alone[row].attend(*(t[row : row + 1, skip:] for t in new))
            assert same(out[row, skip:], expected[0])
            assert not out[row, :skip].any()


@pytest.mark.parametrize(
    "padding, tokens, options",
    [([0, 90], 100, {"first": 4, "recent": 128}), ([0, 62], 66, {"first": 4, "recent": 4}), ([0], 90, {"first": 80, "recent": 100})],
)
def test_sequences_without_coded_tokens(device, padding, tokens, options):
    """Their first coded token would lie beyond the room for codes."""
    new = rows(len(padding), tokens)
    out = Layer(device=device, **options).attend(*new, left_padded(padding, tokens, tokens).to(device))
    for row, before in enumerate(padding):
        expected = Layer(**options).attend(*(t[row : row + 1, before:] for t in new))
        assert same(out[row, before:], expected[0])


def test_rows_are_chosen(device):
    """By beams, by repetition, by index; the padding goes with them."""
    padding = [3, 0, 5]
    q, k, v = rows(3, 25)
    layer = Layer(device=device, first=2, recent=6)
    layer.attend(q[:, :20], k[:, :20], v[:, :20], left_padded(padding, 20, 20).to(device))
    selections = {
        "reorder_cache": (torch.tensor([2, 2, 0]), [2, 2, 0]),
        "batch_repeat_interleave": (2, [0, 0, 1, 1, 2, 2]),
        "batch_select_indices": (torch.tensor([2, 0]), [2, 0]),
    }
    for name, (argument, chosen) in selections.items():
        other = Layer(device=device, first=2, recent=6)
        other.cache = copy.deepcopy(layer.cache)
        getattr(other.cache, name)(argument)
        new = [t[chosen, 20:] for t in (q, k, v)]
        out = other.attend(*new, left_padded([padding[i] for i in chosen], 5, 25).to(device))
        same_tokens = Layer(device=device, first=2, recent=6)
        begin = [t[chosen, :20] for t in (q, k, v)]
        mask = left_padded([padding[i] for i in chosen], 20, 20).to(device)
        same_tokens.attend(*begin, mask)
        mask = left_padded([padding[i] for i in chosen], 5, 25).to(device)
        assert same(out, same_tokens.attend(*new, mask)), name
        assert other.cache.batch_size == len(chosen)
    assert layer.cache.batch_size == 3  # the copies were copies


def test_memory():
    """Codes are what is held: 4 bits of 32 values and a scale make 20 bytes of 128."""
    q, k, v = rows(1, 1024)
    layer = Layer("aura4v4")
    assert layer.cache.nbytes == 0
    layer.attend(q, k, v)
    assert layer.cache.nbytes == 2 * 2 * 1024 * (16 + 4) and layer.cache.plain_nbytes == 2 * 2 * 1024 * 32 * 4
    layer.attend(*(t[:, :1] for t in (q, k, v)))  # room for a quarter more
    assert layer.cache.nbytes == 2 * 2 * 1280 * (16 + 4)
    small = Layer("aura2v2", f16_scale=True)
    small.attend(q, k, v)
    assert small.cache.nbytes == 2 * 2 * 1024 * (8 + 2)
    assert re.fullmatch(r"<AuraCache\('aura2v2'\): 1024 tokens, 40960 bytes>", repr(small.cache))
    small.cache.reset()
    assert small.cache.nbytes == 0 and small.cache.get_seq_length() == 0
    small.attend(*(torch.cat([t[:, :9]] * 2) for t in (q, k, v)))  # another batch
    assert small.cache.batch_size == 2


# ---- models ----


def test_logits(kind, show):
    """More bits, less KL; of all tokens of a prompt, and of those that come one by one."""
    model = tiny(kind)
    tokens = ids(2, 300)
    with torch.no_grad():
        expected = model(tokens).logits
        found = []
        for bits in (2, 3, 4, 6, 8):
            cache = AuraCache(model.config, f"aura{bits}v{bits}")
            begin = model(tokens[:, :290], past_key_values=cache).logits
            rest = [model(tokens[:, t : t + 1], past_key_values=cache).logits for t in range(290, 300)]
            found.append((kl(begin, expected[:, :290]), kl(torch.cat(rest, 1), expected[:, 290:])))
            assert cache.get_seq_length() == 300
        recent = AuraCache(model.config, "aura2v2", first=4, recent=296)
        kept = kl(model(tokens, past_key_values=recent).logits, expected)
    show(f"{kind}: KL of random weights at 2 3 4 6 8 bits: {' '.join(f'{a:.1e}' for a, _ in found)}")
    for a, b in zip(found, found[1:]):
        assert b[0] < a[0] / 2 and b[1] < a[1]
    assert found[-1][0] < 1e-4 and kept < 1e-4 and found[0][0] > 1e-3


def in_bf16(config):
    """transformers' own cache, with keys and values as the regions beside the codes hold them."""

    class Rounded(transformers.DynamicCache):
        def update(self, keys, values, *rest):
            return super().update(keys.bfloat16().float(), values.bfloat16().float(), *rest)

    return Rounded(config=config)


def test_generate(kind):
    """Greedy, by beams, padded, with drafts taken back: the text of transformers' own cache."""
    model = tiny(kind)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :6] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    runs = {
        "greedy": {"inputs": ids(1, 70)},
        "padded": {"inputs": ids(2, 20), "attention_mask": mask},
        "beams": {"inputs": ids(2, 9), "num_beams": 3},
        "sequences": {"inputs": ids(1, 9), "num_return_sequences": 2, "num_beams": 2},
        "drafts": {"inputs": ids(1, 9).repeat(1, 4), "prompt_lookup_num_tokens": 3},
    }
    if kind == "qwen3_5":  # linear attention cannot be taken back
        del runs["drafts"]
    for name, run in runs.items():
        expected = model.generate(**run, **options, past_key_values=in_bf16(model.config))
        whole = AuraCache(model.config, "aura2v2", first=3, recent=500)
        assert torch.equal(model.generate(**run, **options, past_key_values=whole), expected), name
        assert whole.get_seq_length() == expected.shape[1] - 1
        coded = AuraCache(model.config, "aura8v8", first=2, recent=5)
        found = model.generate(**run, **options, past_key_values=coded)
        if name in ("greedy", "padded", "drafts"):  # beams are often as good as one another
            assert torch.equal(found, expected), name


def test_other_caches_are_not_changed(kind):
    for implementation in ("sdpa", "eager"):
        model = tiny(kind, attn_implementation=implementation)
        tokens = ids(1, 40)
        with torch.no_grad():
            plain = model(tokens).logits
            cached = model(tokens, past_key_values=transformers.DynamicCache(config=model.config)).logits
        cache = AuraCache(model.config, "aura8v8")
        assert model.config._attn_implementation == f"aura_{implementation}"
        AuraCache(model.config, "aura4v4")  # once more does nothing more
        assert model.config._attn_implementation == f"aura_{implementation}"
        with torch.no_grad():
            assert kl(model(tokens, past_key_values=cache).logits, plain) < 1e-4
            assert torch.equal(model(tokens).logits, plain)
            again = model(tokens, past_key_values=transformers.DynamicCache(config=model.config)).logits
            assert torch.equal(again, cached)
        model(tokens).logits.sum().backward()  # training, too
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            assert torch.equal(model(tokens).logits, plain)


def test_layers_of_their_own():
    model = tiny()
    tokens = ids(1, 100)
    with torch.no_grad():
        expected = model(tokens).logits
        low = AuraCache(model.config, "aura2v2")
        mixed = AuraCache(model.config, "aura2v2", layer_options={0: {"k_bits": 8, "v_bits": 8}})
        worse, better = (kl(model(tokens, past_key_values=c).logits, expected) for c in (low, mixed))
    assert better < worse and mixed.nbytes > low.nbytes


def test_what_is_wrong_is_named():
    model = tiny()
    config = model.config
    wrong = [
        (ValueError, "config: dict, expected model.config", lambda: AuraCache({}, "aura4v4")),
        (ValueError, "aura9v4", lambda: AuraCache(config, "aura9v4")),
        (ValueError, "preference: 'best', expected", lambda: AuraCache(config, preference="best")),
        (TypeError, "colour", lambda: AuraCache(config, colour=1)),
        (TypeError, "dim: given, expected none", lambda: AuraCache(config, dim=64)),
        (ValueError, "recent", lambda: AuraCache(config, recent=-1)),
        (ValueError, "layer_options: 3, expected an attention layer", lambda: AuraCache(config, layer_options={3: {}})),
        (NotImplementedError, "layers of type sliding_attention, expected full_attention",
         lambda: AuraCache(transformers.MistralConfig(**SIZES, sliding_window=8))),
    ]  # fmt: skip
    for kind, message, call in wrong:
        with pytest.raises(kind, match=message):
            call()
    other = copy.deepcopy(config)
    other._attn_implementation = "flex_attention"
    with pytest.raises(NotImplementedError, match="attention by flex_attention, expected sdpa or eager"):
        AuraCache(other)
    with pytest.raises(NotImplementedError, match="made from model.config, not from a copy"), torch.no_grad():
        model(ids(1, 5), past_key_values=AuraCache(copy.deepcopy(config)))
    cache = AuraCache(config)
    with pytest.raises(ValueError, match="asks for gradients.*expected torch.no_grad"):
        model(ids(1, 5), past_key_values=cache)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="did not end; expected reset"):
            model(ids(1, 5), past_key_values=cache)
        cache.reset()
        model(ids(1, 5), past_key_values=cache)
        with pytest.raises(ValueError, match="keys of shape .*: one batch until reset"):
            model(ids(2, 5), past_key_values=cache)
        with pytest.raises(ValueError, match="crop: 3, expected 0 or less"):
            cache.crop(3)
        right = torch.ones(2, 8, dtype=torch.int64)
        right[0, 5:] = 0
        with pytest.raises(NotImplementedError, match="padding on the left, expected one of these"):
            model(ids(2, 8), attention_mask=right, past_key_values=AuraCache(config))
        cache, left = AuraCache(config), right.flip(1)
        model(ids(2, 8), attention_mask=left, past_key_values=cache)
        changed = torch.ones(2, 9, dtype=torch.int64)
        changed[:, 0] = 0
        with pytest.raises(ValueError, match=r"padding of \[1, 1\] tokens, expected \[3, 0\] as before"):
            model(ids(2, 1), attention_mask=changed, past_key_values=cache)


# ---- what readers copy, and a real model ----


def test_the_page_runs():
    page = (ROOT / "docs" / "transformers.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert len(blocks) >= 2
    for block in blocks:
        exec(block, {})


@pytest.fixture(scope="module")
def real(smollm2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    bittern.quantize_model(smollm2, folder, dequantize="bf16")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), bittern.Tokenizer(smollm2)


@pytest.mark.peer("gguf")
def test_smollm2(real, show):
    """Text, memory, and KL on English that it can continue."""
    model, tokenizer = real
    text = (ROOT / "examples" / "texts" / "marsh.txt").read_text()
    tokens = torch.tensor(tokenizer.encode(text)[:256].tolist())[None]
    with torch.no_grad():
        plain = model(tokens).logits
        found = {}
        for scheme in ("aura8v8", "aura4v4", "aura4v2", "aura2v2"):
            cache = AuraCache(model.config, scheme)
            found[scheme] = kl(model(tokens, past_key_values=cache).logits, plain)
            assert cache.nbytes < 0.32 * cache.plain_nbytes
        sink = kl(model(tokens, past_key_values=AuraCache(model.config, first=4, recent=32)).logits, plain)
    show(f"SmolLM2, KL from the plain cache: {' '.join(f'{s} {x:.4f}' for s, x in found.items())}")
    assert found["aura8v8"] < 1e-3 < found["aura4v4"] < 0.15 < found["aura2v2"]
    assert sink < found["aura4v4"] < found["aura4v2"]
    prompt = torch.tensor(tokenizer.encode("The best way to learn a new language is").tolist())[None]
    cache = AuraCache(model.config, "aura4v4", first=4)
    out = model.generate(prompt, max_new_tokens=12, do_sample=False, past_key_values=cache)
    assert "immerse yourself" in tokenizer.decode(out[0].tolist())


def test_the_example_runs(smollm2):
    example = [sys.executable, ROOT / "examples" / "aura_cache.py", smollm2, ROOT / "examples/texts/marsh.txt"]
    done = subprocess.run([*example, "--tokens", "60", "--bits", "8"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    k_bits, v_bits, divergence, same_token, held, share = done.stdout.splitlines()[-1].split()
    assert (k_bits, v_bits) == ("8", "8") and 0 < float(divergence) < 1e-3
