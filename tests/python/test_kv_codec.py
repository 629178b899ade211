"""The KV codec and its attention from Python."""

import numpy as np
import pytest
from arrays import from_f32

import bittern

rng = np.random.default_rng(4)
DISTORTION = {2: 0.116000, 3: 0.033966, 4: 0.009315, 8: 4.024e-5}  # d = 128, exact tables


def encode(x, bits, seed=1, **fields):
    dim = x.shape[-1]
    levels, boundaries = bittern.sphere_codebook(dim, bits)
    signs = bittern.make_rotation("hadamard", dim, seed)
    packed, scales = bittern.aura_encode(x, signs, boundaries, levels, bits=bits, **fields)
    return packed, scales, signs, levels


@pytest.mark.parametrize("bits", DISTORTION)
def test_the_error_is_the_tables_own(bits):
    x = rng.normal(size=(4000, 128)).astype(np.float32)
    packed, scales, signs, levels = encode(x, bits, scale_rule="none")
    assert packed.shape == (4000, 4 * bits) and packed.dtype == np.uint32
    y = bittern.aura_decode(packed, scales, signs, levels, bits=bits)
    error = (np.square(x - y).sum(1) / np.square(x).sum(1)).mean()
    assert abs(error / DISTORTION[bits] - 1) < 0.02


def test_axes_before_the_row_are_kept():
    x = rng.normal(size=(2, 3, 5, 96)).astype(np.float32)
    packed, scales, signs, levels = encode(x, 3)
    assert packed.shape == (2, 3, 5, 9) and scales.shape == (2, 3, 5, 1)
    y = bittern.aura_decode(packed, scales, signs, levels, bits=3)
    assert y.shape == x.shape
    rotated = bittern.aura_decode(packed, scales, None, levels, bits=3, dim=96, rotated=True)
    back = bittern.aura_rotate(rotated, signs, inverse=True)
    assert np.allclose(back, y, rtol=0, atol=1e-5)


def test_half_rows_and_scales():
    x = from_f32(rng.normal(size=(7, 64)), "f16")
    packed, scales, signs, levels = encode(x, 4, f16_scale=True)
    assert scales.dtype == np.float16
    y = bittern.aura_decode(packed, scales, signs, levels, element="f16")
    assert y.dtype == np.float16 and np.abs(y - x).max() < 1


@pytest.mark.parametrize("size", [1e-37, 1e-20, 1e-9, 1e18, 1e19, 1e20, 1e36])
def test_rows_of_any_size(size):
    x = (size * rng.normal(size=(7, 64))).astype(np.float32)
    packed, scales, signs, levels = encode(x, 4)
    y = bittern.aura_decode(packed, scales, signs, levels)
    x, y = x.astype(np.float64), y.astype(np.float64)
    assert (np.square(x - y).sum(1) / np.square(x).sum(1)).max() < 0.02


def test_attention_is_softmax_over_the_decoded_rows():
    heads, kv_heads, tokens, dim = 4, 2, 300, 128
    k, v = (rng.normal(size=(kv_heads, tokens, dim)).astype(np.float32) for _ in range(2))
    q = rng.normal(size=(1, 1, heads, dim)).astype(np.float32)
    kc, ks, signs, levels = encode(k, 4)
    vc, vs, _, _ = encode(v, 4)
    out = bittern.aura_attention(
        q, kc, ks[..., 0].copy(), vc, vs[..., 0].copy(), levels, levels, signs, signs,
        capacity=tokens, kv_heads=kv_heads,
    )  # fmt: skip
    for h in range(heads):
        k_h, v_h = (
            bittern.aura_decode(c[h // 2], s[h // 2], signs, levels).astype(np.float64)
            for c, s in ((kc, ks), (vc, vs))
        )
        logits = k_h @ q[0, 0, h].astype(np.float64) / np.sqrt(dim)
        p = np.exp(logits - logits.max())
        assert np.allclose(out[0, 0, h], p @ v_h / p.sum(), rtol=0, atol=1e-5)


def test_errors():
    with pytest.raises(ValueError, match="bits: 9, expected 1..8"):
        bittern.sphere_codebook(128, 9)
    with pytest.raises(ValueError, match="rotation: 'spin', expected identity, hadamard or dense"):
        bittern.make_rotation("spin", 128)
    assert bittern.make_rotation("identity", 128) is None
    assert bittern.make_rotation("dense", 6).shape == (6, 6)
    x = np.ones((2, 128), np.float32)
    levels, boundaries = bittern.sphere_codebook(128, 4)
    signs = bittern.make_rotation("hadamard", 128)
    with pytest.raises(ValueError, match="aura_encode: boundaries"):
        bittern.aura_encode(x, signs, boundaries[::-1].copy(), levels)
