"""bittern.KvCache: against the ops by hand, against plain attention, and every error."""

import copy
import gc
import inspect
import os
import pathlib
import pickle
import re
import struct
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from arrays import assert_same_bits, from_f32, values_of

import bittern
from bittern import KvCache, _bittern

HEADS, DIM, QUERY_HEADS = 2, 64, 4
FRAMEWORKS = [
    "numpy",
    pytest.param("mlx", marks=pytest.mark.peer("mlx")),
    pytest.param("torch", marks=pytest.mark.peer("torch")),
]
ROOT = pathlib.Path(__file__).resolve().parents[2]
rng = np.random.default_rng(11)


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


def rows(tokens):
    return normal(tokens, HEADS, DIM), normal(tokens, HEADS, DIM)


def queries(count):
    return normal(count, QUERY_HEADS, DIM)


def filled(tokens=100, **config):
    cache = KvCache(HEADS, DIM, **config)
    cache.append(*rows(tokens))
    return cache


def make(framework, values, dtype="float32"):
    if framework == "mlx":
        import mlx.core as mx

        return mx.array(values).astype(getattr(mx, dtype))
    if framework == "torch":
        import torch

        return torch.tensor(values).to(getattr(torch, dtype))
    if dtype == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    return values.astype(dtype)


def to_numpy(array):
    if type(array).__module__.startswith("mlx"):
        import mlx.core as mx

        return np.array(array.astype(mx.float32))
    if type(array).__module__.startswith("torch"):
        return array.float().numpy()
    return np.asarray(array, np.float32)


def attention(q, k, v, scale=None, softcap=0, sinks=None, causal=True, window=0):
    """Softmax attention in f64: q [queries, heads, dim] of the last tokens of k and v."""
    count, heads, dim = q.shape
    tokens, kv_heads, _ = k.shape
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for i in range(count):
        at = tokens - count + i
        seen = np.arange(tokens)
        if causal:
            seen = seen[seen <= at]
        if window:
            seen = seen[seen > at - window]
        for h in range(heads):
            kv = h // (heads // kv_heads)
            logits = k[seen, kv] @ q[i, h] * (scale or dim**-0.5)
            if softcap:
                logits = softcap * np.tanh(logits / softcap)
            if sinks is not None:
                logits = np.append(logits, sinks[h])
            p = np.exp(logits - logits.max())
            out[i, h] = (p / p.sum())[: len(seen)] @ v[seen, kv]
    return out


def decoded(cache):
    both = [cache.read(t) for t in range(len(cache))]
    return np.stack([k for k, _ in both]), np.stack([v for _, v in both])


# ---- the ops by hand ----


@pytest.mark.parametrize("f16_scale", [False, True])
@pytest.mark.parametrize("rotation", ["identity", "hadamard", "dense"])
def test_the_bits_are_those_of_the_ops(rotation, f16_scale):
    tokens, k_bits, v_bits = 70, 4, 3
    options = {"k_rotation": rotation, "v_rotation": rotation, "k_seed": 1, "v_seed": 2}
    cache = KvCache(
        HEADS, DIM, k_bits=k_bits, v_bits=v_bits, v_scale_rule="least_squares",
        f16_scale=f16_scale, **options,
    )  # fmt: skip
    k, v = rows(tokens)
    cache.append(k, v)
    q = queries(5)

    coded = []
    for x, bits, seed, rule in ((k, k_bits, 1, "matched"), (v, v_bits, 2, "least_squares")):
        levels, boundaries = bittern.sphere_codebook(DIM, bits)
        table = bittern.make_rotation(rotation, DIM, seed)
        by_head = np.ascontiguousarray(x.transpose(1, 0, 2))
        packed, scales = bittern.aura_encode(
            by_head, table, boundaries, levels, bits=bits, rotation=rotation, scale_rule=rule,
            **{_bittern_name("f16_scale", "f16_scale"): f16_scale},
        )  # fmt: skip
        coded.append((packed, np.ascontiguousarray(scales[..., 0]), levels, table))
    (kc, ks, kl, kt), (vc, vs, vl, vt) = coded
    expected = bittern.aura_attention(
        q[None], kc, ks, vc, vs, kl, vl, kt, vt, capacity=tokens, kv_heads=HEADS,
        k_bits=k_bits, v_bits=v_bits, k_rotation=rotation, v_rotation=rotation,
    )[0]  # fmt: skip
    assert_same_bits(cache.attend(q), expected)
    for t in (0, 33, tokens - 1):
        for got, (packed, scales, levels, table), bits in zip(
            cache.read(t), coded, (k_bits, v_bits)
        ):
            row = bittern.aura_decode(
                np.ascontiguousarray(packed[:, t]), np.ascontiguousarray(scales[:, t, None]),
                table, levels, bits=bits, rotation=rotation, dim=DIM,
            )  # fmt: skip
            assert_same_bits(got, row)
    assert cache.bytes.codes == kc.nbytes + vc.nbytes
    assert cache.bytes.scales == ks.nbytes + vs.nbytes


def _bittern_name(*names):
    """The one of `names` that aura_encode has."""
    return next(n for n in names if n in inspect.signature(bittern.aura_encode).parameters)


def test_attention_is_softmax_over_what_read_gives():
    sinks = normal(QUERY_HEADS)
    for config in ({}, {"first": 3, "recent": 9}, {"window": 20, "slack": 80, "recent": 5}):
        cache = filled(60, **config)
        k, v = decoded(cache)
        q = queries(4)
        window = cache.window
        for how in ({}, {"scale": 0.3}, {"softcap": 0.7}, {"sinks": sinks}, {"causal": False}):
            want = attention(q, k, v, window=window, **how)
            assert np.allclose(cache.attend(q, **how), want, rtol=0, atol=2e-5), (config, how)


def test_the_error_is_the_codecs():
    k, v = rows(400)
    q = queries(1)
    exact = attention(q, k, v)
    errors = []
    for bits in (2, 4, 6, 8):
        cache = KvCache(HEADS, DIM, k_bits=bits, v_bits=bits)
        cache.append(k, v)
        for x, y in zip((k, v), decoded(cache)):
            error = np.square(x - y).sum() / np.square(x).sum()
            levels, boundaries = bittern.sphere_codebook(DIM, bits)
            assert error < 1.5 * {2: 0.116, 4: 0.0093, 6: 7e-4, 8: 5e-5}[bits], bits
        errors.append(np.abs(cache.attend(q) - exact).max())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.005


def test_exact_regions_are_bf16():
    cache = KvCache(HEADS, DIM, first=4, recent=8)
    k, v = rows(30)
    cache.append(k, v)
    assert cache.counts == (4, 18, 8, 0)
    for t in (0, 3, 22, 29):
        for got, x in zip(cache.read(t), (k, v)):
            assert (got == values_of(from_f32(x[t], "bf16"))).all()


def test_means_are_taken_out_and_put_back():
    mean = 100 * normal(HEADS, DIM)
    k, v = rows(50)
    k += mean
    plain, centred = KvCache(HEADS, DIM), KvCache(HEADS, DIM, k_mean=mean)
    for cache in (plain, centred):
        cache.append(k, v)
    error = [np.abs(decoded(cache)[0] - k).max() for cache in (plain, centred)]
    assert error[1] < error[0] / 20
    assert (centred.k_mean == mean).all() and plain.k_mean is None


def test_fastest_is_close():
    cache = filled(300)
    q = queries(1)
    assert np.allclose(cache.attend(q, preference="fastest"), cache.attend(q), atol=1e-3)


# ---- frameworks, dtypes, strides ----


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_frameworks(framework, dtype):
    k, v = rows(40)
    q = queries(3)
    cache = KvCache(HEADS, DIM, recent=4)
    cache.append(make(framework, k, dtype), make(framework, v, dtype))
    out = cache.attend(make(framework, q, dtype))
    assert type(out) is type(make(framework, q, dtype))
    assert str(out.dtype).rpartition(".")[2] == dtype and tuple(out.shape) == q.shape
    # The same as from f32 that holds the same values.
    same = KvCache(HEADS, DIM, recent=4)
    rounded = [to_numpy(make(framework, x, dtype)) for x in (k, v, q)]
    same.append(*rounded[:2])
    assert same.serialize() == cache.serialize()
    assert np.allclose(to_numpy(out), same.attend(rounded[2]), rtol=1e-2, atol=1e-2)


def test_any_strides_without_a_copy():
    k, v = rows(40)
    want = KvCache(HEADS, DIM)
    want.append(k, v)
    wide = np.zeros((40, 3 * HEADS, 2 * DIM), np.float32)
    wide[:, 1:3, :DIM] = k
    by_head = np.ascontiguousarray(v.transpose(1, 0, 2))
    variants = [
        (wide[:, 1:3, :DIM], by_head.transpose(1, 0, 2)),
        (np.asfortranarray(k), v[::-1].copy()[::-1]),
        (np.repeat(k, 2, axis=2)[..., ::2], np.ascontiguousarray(v[..., ::-1])[..., ::-1]),
    ]
    for k2, v2 in variants:
        cache = KvCache(HEADS, DIM)
        cache.append(k2, v2)
        assert cache.serialize() == want.serialize()
    one = KvCache(HEADS, DIM)
    one.append(np.broadcast_to(k[:1], k.shape), np.broadcast_to(v[:1], v.shape))
    assert (one.read(0)[0] == one.read(39)[0]).all()

    q = queries(3)
    expected = want.attend(q)
    slices = np.zeros((QUERY_HEADS, 3, 2 * DIM), np.float32)
    slices[..., :DIM] = q.transpose(1, 0, 2)
    out = np.full((3, 5, 2 * DIM), 7, np.float32)
    result = want.attend(slices[..., :DIM].transpose(1, 0, 2), out[:, 1:, DIM:])
    assert (result == expected).all() and result.base is not None
    assert (out[:, 0] == 7).all() and (out[..., :DIM] == 7).all()
    for bad in (np.ascontiguousarray(q[::-1])[::-1], np.repeat(q, 2, axis=2)[..., ::2]):
        with pytest.raises(NotImplementedError, match="q: stride .* a contiguous array will do"):
            want.attend(bad)
    with pytest.raises(NotImplementedError, match="out: stride"):
        want.attend(q, np.repeat(q, 2, axis=2)[..., ::2])


def test_one_token_has_two_axes():
    k, v = rows(5)
    cache, same = KvCache(HEADS, DIM), KvCache(HEADS, DIM)
    for t in range(5):
        cache.append(k[t], v[t])
    same.append(k, v)
    assert cache.serialize() == same.serialize()
    q = queries(2)
    assert (cache.attend(q[1]) == cache.attend(q)[1]).all()
    out = np.empty_like(q[1])
    assert cache.attend(q[1], out=out) is out and (out == cache.attend(q)[1]).all()


def test_nothing_is_appended_by_no_tokens():
    cache = KvCache(HEADS, DIM)
    empty = np.zeros((0, HEADS, DIM), np.float32)
    cache.append(empty, empty)
    assert len(cache) == 0 and cache.attend(np.zeros((0, QUERY_HEADS, DIM), np.float32)).size == 0
    cache.append(*rows(3))
    cache.append(empty, empty)
    assert len(cache) == 3
    with pytest.raises(ValueError, match="KvCache: queries: 4, expected 0..3"):
        cache.attend(queries(4))


# ---- state ----


def test_appends_may_be_grouped_in_any_way():
    k, v = rows(90)
    caches = [KvCache(HEADS, DIM, first=2, recent=7) for _ in range(3)]
    caches[0].append(k, v)
    for t in range(90):
        caches[1].append(k[t], v[t])
    for t in range(0, 90, 13):
        caches[2].append(k[t : t + 13], v[t : t + 13])
    assert len({c.serialize() for c in caches}) == 1


def test_forks_go_their_own_ways():
    cache = filled(50, page_size=16, recent=3)
    before = cache.serialize()
    forks = [cache.fork(), copy.copy(cache), copy.deepcopy(cache), copy.deepcopy([cache])[0]]
    assert all(f.serialize() == before and type(f) is KvCache for f in forks)
    assert cache.bytes.shared == cache.bytes.pages > 0
    for i, fork in enumerate(forks):
        fork.truncate(20 + i)
        fork.append(*rows(i + 1))
        assert len(fork) == 21 + 2 * i
    assert cache.serialize() == before
    again = forks[0].fork()
    del forks, fork
    gc.collect()
    assert cache.bytes.shared < cache.bytes.pages
    assert len(again) == 21 and cache.serialize() == before


def test_a_window_forgets():
    cache = KvCache(HEADS, DIM, page_size=16, window=24, slack=4, first=2)
    k, v = rows(200)
    most = 0
    for t in range(200):
        cache.append(k[t], v[t])
        most = max(most, cache.bytes.pages)
    page = 16 * HEADS * (2 * 4 * DIM // 8 + 8)
    assert most <= 4 * page
    assert cache.counts == (2, 28, 0, 170) and len(cache) == 200
    want = KvCache(HEADS, DIM)
    want.append(k[-24:], v[-24:])
    q = queries(1)
    assert np.allclose(cache.attend(q), want.attend(q), rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="KvCache: token: 5 is gone, expected at least 172"):
        cache.read(5)
    with pytest.raises(ValueError, match="KvCache: queries: 6, expected at most 5: the first"):
        cache.attend(queries(6))
    cache.truncate(196)
    with pytest.raises(ValueError, match="KvCache: truncate: 195, expected at least 196"):
        cache.truncate(195)


def test_bytes_and_back():
    for config in (
        {},
        {"first": 3, "recent": 5, "k_bits": 3, "f16_scale": True},
        {"window": 20, "slack": 3, "k_rotation": "dense", "v_rotation": "identity"},
        {"k_mean": normal(HEADS, DIM), "v_codebook": bittern.gaussian_codebook(DIM, 4)},
        {"k_seed": 2**64 - 1},
    ):
        cache = filled(70, **config)
        data = cache.serialize()
        assert type(data) is bytes
        back = [KvCache.parse(form(data)) for form in (bytes, bytearray, memoryview)]
        back.append(KvCache.parse(np.frombuffer(data, np.uint8)))
        back += [pickle.loads(pickle.dumps(cache, p)) for p in range(pickle.HIGHEST_PROTOCOL + 1)]
        q = queries(2)
        for same in back:
            assert same.serialize() == data and (same.attend(q) == cache.attend(q)).all()
            assert repr(same) == repr(cache)
        again = KvCache(**cache.config)
        k, v = rows(3)
        empty = cache.fork()
        if not cache.window:
            empty.truncate(0)
            for each in (again, empty):
                each.append(k, v)
            assert [a.tobytes() for a in again.read(1)] == [a.tobytes() for a in empty.read(1)]


def test_bad_bytes_are_refused_and_nothing_is_left():
    data = bytearray(filled(20).serialize())
    refused = [b"", data[:-1], data + b"x", data[:100], b"\0" * len(data)]
    refused.append(data[:50] + bytes([data[50] ^ 4]) + data[51:])
    for bad in refused:
        with pytest.raises(ValueError, match="KvCache: bytes: "):
            KvCache.parse(bad)
    for what, name in (("text", "str"), (5, "int"), (None, "NoneType"), ([1], "list")):
        with pytest.raises(ValueError, match=f"KvCache: bytes: {name}, expected bytes"):
            KvCache.parse(what)
    with pytest.raises(ValueError, match="a contiguous array"):
        KvCache.parse(memoryview(data)[::2])
    # With a checksum to match: 2^40 heads.
    lie = bytearray(data)
    lie[20:28] = struct.pack("<q", 2**40)
    lie[-8:] = struct.pack("<Q", fnv(lie[:-8]))
    with pytest.raises(ValueError, match="KvCache: bytes: kv_heads at byte 20: 1099511627776"):
        KvCache.parse(lie)
    lie = bytearray(data)
    lie[78:82] = struct.pack("<i", 9)
    lie[-8:] = struct.pack("<Q", fnv(lie[:-8]))
    with pytest.raises(ValueError, match="KvCache: bytes: k_bits at byte 78: 9, expected 1..8"):
        KvCache.parse(lie)
    assert len(KvCache.parse(data)) == 20


def fnv(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def test_the_layout_of_aura():
    config = bittern.aura_config("aura4v2", HEADS, DIM, layer=5)
    cache = KvCache(**config)
    assert (cache.k_bits, cache.v_bits, cache.k_seed, cache.v_seed) == (4, 2, 5, 5)
    cache.append(*rows(20))
    kp, vp = (np.zeros((HEADS, 30, DIM * b // 32), np.uint32) for b in (4, 2))
    ks, vs = (np.zeros((HEADS, 30), np.float32) for _ in range(2))
    cache.write_aura(kp, ks, vp, vs)
    assert ks[:, :20].all() and not ks[:, 20:].any()
    back = KvCache.read_aura(kp, ks, vp, vs, tokens=20, **config)
    assert back.serialize() == cache.serialize()
    with pytest.raises(ValueError, match="KvCache: k_packed: u32 .*capacity at least 31"):
        KvCache.read_aura(kp, ks, vp, vs, tokens=31, **config)
    with pytest.raises(ValueError, match="overlaps"):
        cache.write_aura(kp, ks, vp, ks)
    with pytest.raises(TypeError, match="KvCache: no parameter 'recnt'; did you mean 'recent'"):
        KvCache.read_aura(kp, ks, vp, vs, tokens=1, recnt=3, **config)
    with pytest.raises(TypeError, match="KvCache: dim: missing"):
        KvCache.read_aura(kp, ks, vp, vs, tokens=1, kv_heads=HEADS)
    kp.flags.writeable = False
    with pytest.raises(ValueError, match="KvCache: k_packed: read-only"):
        cache.write_aura(kp, ks, vp, vs)
    assert len(KvCache.read_aura(kp, ks, vp, vs, tokens=1, **config)) == 1
    legacy = bittern.aura_config("aura4", HEADS, DIM, 5, legacy=True)
    old = KvCache(**legacy)
    assert old.k_codebook[1] is None
    with pytest.raises(ValueError, match="k_codebook: boundaries: none: this table can only decode"):
        old.append(*rows(1))
    with pytest.raises(ValueError, match="aura scheme: aura, expected"):
        bittern.aura_config("aura", 1, 64, 0)
    with pytest.raises(ValueError, match="aura_config: layer: -1, expected 0"):
        bittern.aura_config("aura4", 1, 64, -1)


# ---- parameters ----


def test_parameters_are_the_fields_and_their_defaults():
    parameters = dict(inspect.signature(KvCache).parameters)
    assert parameters.pop("device").default == KvCache(HEADS, DIM).device == "cpu"
    fields = {f.name: f.default for f in _bittern.kv_fields()}
    assert set(fields) | {f"{s}_{t}" for s in "kv" for t in ("codebook", "table", "mean")} == set(
        parameters
    )
    for name, parameter in parameters.items():
        if name in ("kv_heads", "dim"):
            assert parameter.default is inspect.Parameter.empty
        else:
            assert parameter.default == fields.get(name), name
    cache = KvCache(HEADS, DIM, recent=3, k_rotation="dense", f16_scale=True)
    for name in parameters:
        value = getattr(cache, name)
        assert name in dir(cache) and name in cache.config
        assert name not in fields or type(value) is type(fields[name]), name
        with pytest.raises(AttributeError):
            setattr(cache, name, value)
    assert cache.recent == 3 and cache.f16_scale is True and cache.k_rotation == "dense"
    assert cache.k_table.shape == (DIM, DIM) and cache.v_table.shape == (DIM,)
    with pytest.raises(ValueError, match="read-only"):
        cache.v_table[0] = 3
    with pytest.raises(AttributeError):
        cache.reecnt = 3
    assert repr(cache) == (
        f"<bittern.KvCache(kv_heads=2, dim=64, k_bits=4, v_bits=4, recent=3, f16_scale=True, "
        f"k_rotation='dense'): 0 tokens, 0 bytes>"
    )
    cache.append(*rows(10))
    size = 7 * HEADS * (64 + 4) + 3 * HEADS * DIM * 4
    assert repr(cache).endswith(f": 10 tokens (7 coded, 3 recent), {size} bytes>")


def test_tables_from_arrays():
    levels, boundaries = bittern.sphere_codebook(DIM, 4)
    signs = bittern.make_rotation("hadamard", DIM, 3)
    same = [
        filled_with(k_seed=3),
        filled_with(k_table=signs, k_seed=3),
        filled_with(k_table=signs.astype(np.float16), k_seed=3),
        filled_with(k_codebook=(levels, boundaries), k_seed=3),
        filled_with(k_codebook=[levels, boundaries], k_seed=3),
        filled_with(k_codebook=levels, k_seed=3),
        filled_with(k_codebook=np.repeat(levels, 2)[::2], k_seed=3),
    ]
    assert all((a.read(4)[0] == same[0].read(4)[0]).all() for a in same)
    other = filled_with(k_codebook=bittern.gaussian_codebook(DIM, 4), k_seed=3)
    assert (other.read(4)[0] != same[0].read(4)[0]).any()


def filled_with(**config):
    fixed = np.random.default_rng(3)
    cache = KvCache(HEADS, DIM, **config)
    x = fixed.normal(size=(5, HEADS, DIM)).astype(np.float32)
    cache.append(x, x)
    return cache


LEVELS = np.arange(16, dtype=np.float32)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kv_heads": 0}, "kv_heads: 0, expected 1..65536"),
        ({"kv_heads": 2**40}, "kv_heads: 1099511627776, expected 1..65536"),
        ({"kv_heads": 2**80}, f"kv_heads: {2**80}, expected a 64-bit integer"),
        ({"dim": 1}, "dim: 1, expected 2..1024"),
        ({"dim": 100}, "k: dim: 100 with rotation hadamard, expected a power of two times one of"),
        ({"dim": 64.0}, "dim: 64.0, expected an integer"),
        ({"dim": None}, "dim: None, expected an integer"),
        ({"page_size": 8}, "page_size: 8, expected 16..128"),
        ({"recent": -1}, "recent: -1, expected 0.."),
        ({"recent": 2**50}, f"recent: {2**50}, expected 0.."),
        ({"first": True}, "first: True, expected an integer"),
        ({"slack": 3}, "slack: 3, expected 0..0"),
        ({"window": 2**30}, "window: 1073741824, expected 0..536870912"),
        ({"window_keeps_first": 2}, "window_keeps_first: 2, expected True or False"),
        ({"f16_scale": "maybe"}, "f16_scale: maybe, expected false or true"),
        ({"k_bits": 0}, "k_bits: 0, expected 1..8"),
        ({"v_bits": 9}, "v_bits: 9, expected 1..8"),
        ({"v_bits": 2**40}, "v_bits: 1099511627776 does not fit 32 bits"),
        ({"k_bits": "4"}, "k_bits: '4', expected an integer"),
        ({"k_rotation": "spin"}, "k_rotation: spin, expected identity, hadamard or dense"),
        ({"k_rotation": 7}, "k_rotation: 7, expected 0..2"),
        ({"v_scale_rule": ""}, "v_scale_rule: empty, expected matched, none, least_squares or unb"),
        ({"v_seed": -1}, "v_seed: -1, expected 0..2^64-1"),
        ({"v_seed": 2**64}, "v_seed: 18446744073709551616, expected 0..2^64-1"),
        ({"k_mean": np.zeros((DIM, HEADS), np.float32)}, "k_mean: shape [64,2], expected [2,64]"),
        ({"k_mean": np.zeros(HEADS * DIM, np.float32)}, "k_mean: shape [128], expected [2,64]"),
        ({"v_mean": np.zeros((HEADS, DIM))}, "v_mean: dtype f64, expected f32, f16 or bf16; numpy"),
        ({"v_mean": 1.0}, "v_mean: float, expected an array that speaks DLPack"),
        ({"v_mean": np.full((HEADS, DIM), np.nan, np.float32)}, "v_mean: [0] is nan, expected a"),
        ({"k_table": np.full(DIM, 0.5, np.float32)}, "k_table: [0] is 0.5, expected 1 or -1"),
        ({"k_table": np.ones((DIM, DIM), np.float32)}, "k_table: shape [64,64], expected [64]"),
        ({"v_rotation": "identity", "v_table": LEVELS}, "v_table: given, but read only with a had"),
        ({"k_codebook": LEVELS[::-1].copy()}, "k_codebook: levels: [1] is not greater than the"),
        ({"k_codebook": LEVELS[:8]}, "k_codebook: levels: 8 values, expected 16"),
        ({"k_codebook": LEVELS[:7]}, "k_codebook: levels: 7 of them, expected 2, 4, 8, ... 256"),
        ({"k_codebook": LEVELS[0]}, "k_codebook: shape [], expected [levels]"),
        ({"k_codebook": (LEVELS,)}, "k_codebook: 1 arrays, expected levels, or (levels, bound"),
        ({"k_codebook": (LEVELS, LEVELS)}, "k_codebook: boundaries: 16 values, expected 15"),
        ({"k_codebook": (None, LEVELS[1:])}, "k_codebook: levels: NoneType, expected an array"),
        ({"k_codebook": (LEVELS[:0], None)}, "k_codebook: levels: none"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:30],
)
def test_parameters_that_are_wrong(config, message):
    with pytest.raises(ValueError) as error:
        KvCache(**{"kv_heads": HEADS, "dim": DIM, **config})
    assert str(error.value).startswith(f"KvCache: {message}")


def test_unknown_parameters():
    with pytest.raises(TypeError, match="kbits"):
        KvCache(HEADS, DIM, kbits=4)
    with pytest.raises(TypeError, match="kv_heads"):
        KvCache()


# ---- operands ----


def test_operands_that_are_wrong():
    cache = filled(10)
    before = cache.serialize()
    k, v = rows(3)
    q = queries(3)
    append, attend = cache.append, cache.attend
    masked = np.ma.masked_array(k, k > 0)
    cases = [
        (append, (k, v[:2]), "v: 2 tokens, expected those of k, 3"),
        (append, (k[..., :32], v), "k: shape [3,2,32], expected [n,2,64] = [tokens,kv_heads,dim]"),
        (append, (None, v), "k: NoneType, expected an array"),
        (attend, (None,), "q: NoneType, expected an array"),
        (append, (k, v[:, :1]), "v: shape [3,1,64], expected [n,2,64]"),
        (append, (k[None], v), "k: shape [1,3,2,64], expected [n,2,64]"),
        (append, (k[0, 0], v), "k: shape [64], expected [n,2,64]"),
        (append, (k.reshape((1,) * 5 + k.shape), v), "k: 8 axes, expected [tokens,heads,dim]"),
        (append, (np.float32(1), v), "k: "),
        (append, (np.array(1, np.float32), v), "k: shape [], expected [n,2,64]"),
        (append, (k.astype(np.float64), v), "k: dtype f64, expected f32, f16 or bf16; numpy's"),
        (append, (k, v.astype(np.int32)), "v: dtype s32, expected f32, f16 or bf16"),
        (append, (k, v.astype(np.int64)), "v: dtype int64, expected f32, f16 or bf16"),
        (append, (k.astype(np.complex64), v), "k: dtype complex64, expected"),
        (append, (k.astype(">f4"), v), "k: "),
        (append, (k.astype(object), v), "k: "),
        (append, (masked, v), "k: a masked array"),
        (append, (k.tolist(), v), "k: list, expected an array"),
        (append, (None, v), "k: NoneType, expected an array"),
        (append, (np.broadcast_to(k[:1], (2**40, HEADS, DIM)),) * 2, "append: more than 2^29"),
        (attend, (q[0, 0],), "q: shape [64], expected [queries,heads,64]"),
        (attend, (q[None],), "q: shape [1,3,4,64], expected [queries,heads,64]"),
        (attend, (q[..., :32],), "q: shape [3,4,32], expected [n,4,64]"),
        (attend, (q[:, :3],), "heads: 3, expected a multiple of kv_heads 2"),
        (attend, (q[:, :0],), "heads: 0, expected 1..65536"),
        (attend, (q.astype(np.float64),), "q: dtype f64, expected f32, f16 or bf16; numpy's"),
        (attend, (q.astype(np.int16),), "q: dtype int16, expected f32, f16 or bf16"),
        (attend, (queries(11),), "queries: 11, expected 0..10"),
        (attend, (np.broadcast_to(q[:1], (2**40, 4, 64)),), "queries: 1099511627776, expected"),
        (attend, (np.broadcast_to(q[:1, :1], (1, 2**40, 64)),), "heads: 1099511627776, expected"),
        (attend, (q, q), "out: overlaps q"),
        (attend, (q, q[:2].copy()), "out: f32 [2,4,64], expected f32 [3,4,64]"),
        (attend, (q, q.astype(np.float16)), "out: f16 [3,4,64], expected f32 [3,4,64]"),
        (attend, (q, [1]), "out: list, expected an array"),
        (attend, (q, np.broadcast_to(q[:1], q.shape)), "out: read-only"),
        (cache.truncate, (11,), "truncate: 11, expected 0..10"),
        (cache.truncate, (-1,), "truncate: -1, expected 0..10"),
        (cache.truncate, (1.0,), "size: 1.0, expected an integer"),
        (cache.truncate, (2**64,), f"size: {2**64}, expected a 64-bit integer"),
        (cache.read, (10,), "token: 10, expected 0..9"),
        (cache.read, (-1,), "token: -1, expected 0..9"),
        (cache.read, ("1",), "token: '1', expected an integer"),
    ]
    for call, arguments, message in cases:
        with pytest.raises(ValueError) as error:
            call(*arguments)
        assert str(error.value).startswith(f"KvCache: {message}"), (str(error.value), message)
    options = [
        ({"scale": "x"}, "scale: 'x', expected a number"),
        ({"scale": np.nan}, "scale: nan, expected a number that is finite in f32"),
        ({"scale": 1e300}, "scale: 1e+300, expected a number that is finite in f32"),
        ({"scale": True}, "scale: True, expected a number"),
        ({"softcap": "x"}, "softcap: 'x', expected a number"),
        ({"softcap": -1.0}, "softcap: -1, expected 0 or a positive normal number of f32"),
        ({"causal": "no"}, "causal: 'no', expected True or False"),
        ({"causal": None}, "causal: None, expected True or False"),
        ({"preference": "best"}, "preference: best, expected exact or fastest"),
        ({"preference": None}, "preference: None, expected 'exact' or 'fastest'"),
        ({"sinks": np.zeros(3, np.float32)}, "sinks: shape [3], expected [4]"),
        ({"sinks": np.zeros(4)}, "sinks: dtype f64, expected f32; numpy's default"),
        ({"sinks": 0.0}, "sinks: float, expected an array"),
    ]
    for option, message in options:
        with pytest.raises(ValueError) as error:
            attend(q, **option)
        assert str(error.value).startswith(f"KvCache: {message}"), (str(error.value), message)
    assert cache.serialize() == before


def test_an_append_that_fails_changes_nothing(monkeypatch):
    cache = filled(4, first=5, recent=3)
    before = cache.serialize()
    monkeypatch.setenv("BITTERN_KERNEL", "nope")
    with pytest.raises(ValueError, match="BITTERN_KERNEL: nope, expected"):
        cache.append(*rows(20))
    monkeypatch.undo()
    assert cache.serialize() == before
    k, v = rows(20)
    same = KvCache.parse(before)
    for each in (cache, same):
        each.append(k, v)
    assert cache.serialize() == same.serialize()


@pytest.mark.peer("torch")
def test_torch():
    import torch

    cache = filled(10)
    q = torch.tensor(queries(2))
    with pytest.raises(ValueError, match="KvCache: q: requires a gradient"):
        cache.attend(q.clone().requires_grad_())
    with pytest.raises(ValueError, match="KvCache: k: requires a gradient"):
        cache.append(torch.ones(1, HEADS, DIM, requires_grad=True), torch.ones(1, HEADS, DIM))
    with torch.no_grad():
        assert torch.equal(cache.attend(q.clone().requires_grad_()), cache.attend(q))
    with pytest.raises(ValueError, match="KvCache: q: "):
        cache.attend(q.to("meta"))
    with pytest.raises(ValueError, match="KvCache: k: "):
        cache.append(torch.ones(1, HEADS, DIM).to_sparse(), torch.ones(1, HEADS, DIM))
    out = torch.zeros_like(q)
    version = out._version
    assert cache.attend(q, out) is out and out._version > version
    with pytest.raises(ValueError, match="KvCache: out: requires a gradient"):
        cache.attend(q, torch.zeros_like(q, requires_grad=True))
    # As a layer hands them over: [batch, heads, tokens, dim], one projection for all.
    fused = torch.randn(1, 5, 2 * HEADS + QUERY_HEADS, DIM).transpose(1, 2)
    k, v, queries_ = (x.transpose(0, 1) for x in fused[0].split([HEADS, HEADS, QUERY_HEADS]))
    same = cache.fork()
    cache.append(k, v)
    same.append(k.contiguous(), v.contiguous())
    assert cache.serialize() == same.serialize()
    assert torch.equal(cache.attend(queries_), same.attend(queries_.contiguous()))
    with torch.inference_mode():
        assert cache.attend(torch.ones(1, QUERY_HEADS, DIM)).shape == (1, QUERY_HEADS, DIM)


def test_the_example_of_the_page_runs(capsys):
    page = (ROOT / "docs" / "kv_cache.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    exec(block, {})
    assert "100 tokens (36 coded, 64 recent)" in capsys.readouterr().out


# ---- devices ----

ON_A_DEVICE = """
import pickle
import numpy as np
from bittern import KvCache

rng = np.random.default_rng(3)
k, v = rng.standard_normal((2, 50, 2, 64), dtype=np.float32)
host = KvCache(2, 64, first=2, recent=5, page_size=16)
host.append(k, v)
there = host.to("cuda")
assert there.device == "cuda:0" and "device='cuda:0'" in repr(there) and len(there) == 50
assert there.serialize() == host.serialize() and there.counts == host.counts
assert there.config.keys() == host.config.keys()
for token in (0, 20, 49):
    for a, b in zip(there.read(token), host.read(token)):
        assert np.array_equal(a, b)
draft = there.fork()
draft.truncate(30)
host.truncate(30)
assert draft.to("cpu").serialize() == host.serialize() != there.serialize()
same = pickle.loads(pickle.dumps(draft))
assert same.device == "cuda:0" and same.serialize() == host.serialize()
assert KvCache.parse(host.serialize(), device="cuda:0").device == "cuda:0"
assert KvCache(2, 64, device="cuda").device == "cuda:0"
for call in (lambda: there.append(k, v), lambda: there.attend(k[:1])):
    try:
        call()
    except ValueError as error:
        assert "on cpu, expected cuda:0" in str(error), error
    else:
        assert False
print("ok")
"""


def test_moves_to_an_emulated_device():
    command = os.environ.get("BITTERN_COMMAND") or ROOT / "build" / "release" / "bittern"
    plugin = pathlib.Path(command).parent / "libbittern_cuda_emulated.so"
    if not plugin.exists():
        pytest.skip("no emulated device beside the command")
    result = subprocess.run(
        [sys.executable, "-c", ON_A_DEVICE],
        env={**os.environ, "BITTERN_CUDA_PLUGIN": str(plugin), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


def test_without_a_device_the_error_says_what_is_missing():
    for call in (
        lambda: KvCache(HEADS, DIM, device="cuda:1000"),
        lambda: filled(3).to("cuda:1000"),
        lambda: KvCache.parse(filled(3).serialize(), device="cuda:1000"),
    ):
        with pytest.raises(RuntimeError, match="KvCache: device: cuda"):
            call()
    with pytest.raises(ValueError, match="KvCache: device: gpu, expected cpu, cuda or cuda:N"):
        KvCache(HEADS, DIM, device="gpu")
    with pytest.raises(ValueError, match="KvCache: device: 3, expected 'cpu', 'cuda' or 'cuda:N'"):
        filled(3).to(3)


# ---- lifetime, threads ----


def test_arrays_are_not_kept_alive():
    cache = KvCache(HEADS, DIM)
    k, v = rows(5)
    q = queries(1)
    kept = [weakref.ref(a) for a in (k, v, q)]
    cache.append(k, v)
    out = cache.attend(q)
    del k, v, q
    gc.collect()
    assert not any(r() for r in kept)
    reference = weakref.ref(cache)
    del cache
    assert reference() is None and np.isfinite(out).all()


def test_threads_wait_for_each_other():
    """Several threads on one cache and its forks: all appends arrive, no call fails or crashes."""
    cache = KvCache(HEADS, DIM, page_size=16, recent=5)
    cache.append(*rows(20))
    k, v = rows(7)
    q = queries(2)
    errors = []

    def work(number):
        try:
            for i in range(40):
                cache.append(k, v)
                out = cache.attend(q)
                assert np.isfinite(out).all()
                fork = cache.fork()
                fork.truncate(10)
                fork.append(k, v)
                assert len(fork) == 17
                cache.read(3)
                _ = cache.bytes, cache.counts, repr(fork)
                if i % 10 == number:
                    assert len(KvCache.parse(cache.serialize())) >= 20
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
    assert len(cache) == 20 + 4 * 40 * 7
    assert cache.bytes.shared == 0


def test_the_gil_is_free_while_a_call_runs():
    """A counter in another thread moves on during one long append."""
    cache = KvCache(8, 128, k_rotation="dense", v_rotation="dense")
    x = normal(3000, 8, 128)
    ticks, done = [0], threading.Event()

    def count():
        while not done.is_set():
            ticks[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    while ticks[0] == 0:
        pass
    before = ticks[0]
    cache.append(x, x)
    moved = ticks[0] - before
    done.set()
    thread.join()
    assert moved > 0 and len(cache) == 3000
