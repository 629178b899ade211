"""quantized_matmul against its formula in exact fractions, and against numpy; panels there and back."""

from fractions import Fraction

import numpy as np
import pytest
from arrays import from_f32, values_of

import bittern

BITS = [2, 3, 4, 5, 6, 8]
F32 = np.float32


def rounded(x):
    """A fraction rounded to f32, ties to even. (Not for numbers that overflow.)"""
    if x == 0:
        return F32(0)
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    if abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    return F32(float(round(x / unit) * unit))


def fma(a, b, c):
    return rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def quantised(x, group, full):
    """Codes and scales of a row."""
    x = x.reshape(-1, group)
    most = np.abs(x).max(axis=1)
    d = np.where(most == 0, F32(0), np.maximum(most / F32(full), F32(2.0**-141)))
    with np.errstate(all="ignore"):
        c = np.where(d[:, None] > 0, np.rint(x / d[:, None]), 0).astype(np.int64)
    return c.reshape(-1), d


def formula(x, codes, s, b, group, full):
    """The header's sum, for x [rows, inputs], W's codes [outputs, inputs], s and b (or None) [outputs, groups]."""
    inputs = x.shape[1]
    x_group = 64 if group > 32 else 32
    run = 16 if group == 16 else x_group
    y = np.empty((len(x), len(codes)), F32)
    for m, row in enumerate(x):
        c, d = quantised(row, x_group, full)
        for n in range(len(codes)):
            acc = F32(0)
            for k in range(0, inputs, run):
                total, dot = c[k : k + run].sum(), codes[n, k : k + run].astype(np.int64) @ c[k : k + run]
                dk = d[k // x_group]
                if b is not None:
                    acc = fma(b[n, k // group], dk * F32(total), acc)
                acc = fma(F32(dot) * dk, s[n, k // group], acc)
            y[m, n] = acc
    return y


def packed_codes(codes, bits):
    return bittern.pack_codes(codes.astype(np.uint8), bits=bits)


def affine(rng, outputs, inputs, bits, group, dtype="f16"):
    codes = rng.integers(0, 2**bits, (outputs, inputs))
    shape = (outputs, inputs // group)
    s = from_f32(rng.normal(size=shape).astype(F32) * F32(0.01), dtype)
    b = from_f32(rng.normal(size=shape).astype(F32) * F32(0.05), dtype)
    fields = {"type": "affine", "bits": bits, "group_size": group, "scale_element": dtype}
    return codes, s, b, fields


FULL = {"int16": 32512, "int8": 127}


@pytest.mark.parametrize("activations", FULL)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", BITS)
def test_affine_formula(bits, group, activations):
    rng = np.random.default_rng(bits * group)
    codes, s, b, fields = affine(rng, 5, 256, bits, group)
    x = rng.normal(size=(3, 256)).astype(F32)
    x[1, 64:128] = 0
    x[2] *= F32(1e-30)
    y = bittern.quantized_matmul(
        x, packed=packed_codes(codes, bits), scales=s, biases=b, activations=activations, **fields
    )
    want = formula(x, codes, values_of(s), values_of(b), group, FULL[activations])
    assert np.array_equal(y.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("activations", FULL)
def test_q8_0_formula(activations):
    """Signed codes have no bias."""
    rng = np.random.default_rng(5)
    codes = rng.integers(-128, 128, (4, 3, 32)).astype(np.int8)
    d = rng.normal(size=(4, 3)).astype(np.float16)
    blocks = np.concatenate([d[:, :, None].view(np.uint8), codes.view(np.uint8)], axis=2).reshape(4, -1)
    x = rng.normal(size=(2, 96)).astype(F32)
    y = bittern.quantized_matmul(x, blocks=blocks, type="Q8_0", activations=activations)
    want = formula(x, codes.reshape(4, 96), d.astype(F32), None, 32, FULL[activations])
    assert np.array_equal(y.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("bits", BITS)
def test_float_is_near_numpy(bits):
    rng = np.random.default_rng(bits)
    codes, s, b, fields = affine(rng, 40, 192, bits, 64)
    x = rng.normal(size=(7, 192)).astype(F32)
    packed = packed_codes(codes, bits)
    w = codes * np.repeat(values_of(s), 64, axis=1).astype(np.float64) + np.repeat(values_of(b), 64, axis=1)
    want = x.astype(np.float64) @ w.T
    for activations, error in {"float": 1e-6, "int16": 1e-4, "int8": 2e-2}.items():
        y = bittern.quantized_matmul(x, packed=packed, scales=s, biases=b, activations=activations, **fields)
        assert np.linalg.norm(y - want) <= error * np.linalg.norm(want)


@pytest.mark.parametrize("activations", ["float", "int16", "int8"])
def test_panels_give_the_same_bits(activations):
    rng = np.random.default_rng(1)
    for bits in BITS:
        codes, s, b, fields = affine(rng, 37, 128, bits, 32, "f32")
        packed = packed_codes(codes, bits)
        panels = bittern.pack_panels(packed=packed, scales=s, biases=b, inputs=128, **fields)
        x = rng.normal(size=(6, 128)).astype(F32)
        y = bittern.quantized_matmul(x, packed=packed, scales=s, biases=b, activations=activations, **fields)
        again = bittern.quantized_matmul(
            x, panels=panels, outputs=37, layout="panels", activations=activations, **fields
        )
        assert np.array_equal(y.view(np.uint32), again.view(np.uint32))
        # Two matrices, one after the other, are one.
        whole = bittern.pack_panels(packed=packed[:32], scales=s[:32], biases=b[:32], inputs=128, **fields)
        both = np.concatenate([whole, panels])
        y2 = bittern.quantized_matmul(
            x, panels=both, outputs=69, layout="panels", activations=activations, **fields
        )
        assert np.array_equal(y2, np.concatenate([y[:, :32], y], axis=1))


@pytest.mark.parametrize("bits", BITS)
def test_gradients_are_near_numpy(bits):
    rng = np.random.default_rng(bits)
    codes, s, b, fields = affine(rng, 40, 192, bits, 64)
    x, d_y = rng.normal(size=(7, 192)).astype(F32), rng.normal(size=(7, 40)).astype(F32)
    packed = packed_codes(codes, bits)
    got = bittern.quantized_matmul_backward(d_y, x, packed=packed, scales=s, biases=b, **fields)
    w = codes * np.repeat(values_of(s), 64, axis=1).astype(np.float64) + np.repeat(values_of(b), 64, axis=1)
    dw = d_y.T.astype(np.float64) @ x
    groups = (40, 3, 64)
    want = d_y @ w, (codes * dw).reshape(groups).sum(axis=2), dw.reshape(groups).sum(axis=2), dw
    for g, h in zip(got, want, strict=True):
        assert np.linalg.norm(g - h) <= 1e-6 * np.linalg.norm(h)
    panels = bittern.pack_panels(packed=packed, scales=s, biases=b, inputs=192, **fields)
    again = bittern.quantized_matmul_backward(d_y, x, panels=panels, layout="panels", **fields)
    assert all(np.array_equal(g, h) for g, h in zip(got, again, strict=True))


def test_gradient_of_x_needs_no_x():
    rng = np.random.default_rng(2)
    w, d_y = rng.normal(size=(5, 9)).astype(F32), rng.normal(size=(3, 5)).astype(F32)
    d_x, d_scales, d_biases, d_w = bittern.quantized_matmul_backward(d_y, w=w, type="f32")
    assert np.allclose(d_x, d_y @ w, rtol=1e-5, atol=1e-6)
    assert d_scales.shape == d_biases.shape == (5, 0)
    assert d_w.shape == (5, 0)
    codes, s, b, fields = affine(rng, 5, 64, 4, 32)
    given = {"packed": packed_codes(codes, 4), "scales": s, "biases": b, "inputs": 64, **fields}
    with pytest.raises(ValueError, match="x: left out, expected f32 .3,64. for d_scales"):
        bittern.quantized_matmul_backward(d_y, **given)
    assert bittern.quantized_matmul_backward(d_y, d_scales=False, d_biases=False, d_w=False, **given).shape == (3, 64)


def test_embedding():
    rng = np.random.default_rng(2)
    w = rng.normal(size=(11, 20)).astype(F32)
    ids = np.array([3, 10, 0, 3], np.int32)
    assert np.array_equal(bittern.embedding(ids, w=w, type="f32"), w[ids])
    with pytest.raises(ValueError, match=r"embedding: ids: \[1\] is 11, expected 0..10"):
        bittern.embedding(np.array([0, 11], np.int32), w=w, type="f32")


def test_messages_are_about_what_was_given():
    """Not about a size, or about a type that nobody asked for."""
    rng = np.random.default_rng(2)
    x, w = rng.normal(size=(3, 64)).astype(F32), rng.normal(size=(5, 64)).astype(F32)
    codes, s, b, fields = affine(rng, 5, 64, 4, 32)
    packed = packed_codes(codes, 4)
    matmul = bittern.quantized_matmul
    for call, text in [
        (lambda: matmul(x, w=w), "quantized_matmul: activations: int16 with type f32, expected float"),
        (lambda: matmul(x), "quantized_matmul: packed: missing, expected u32 [outputs,words], which is read with type affine"),
        (lambda: matmul(x, w=w, type="affine"),
         "packed: missing, expected u32 [outputs,words], which is read with type affine; w is read only with type f32, f16"),
        (lambda: matmul(x, scales=s, biases=b, **fields),
         "packed: missing, expected u32 [5,8] = [outputs,words], which is read with type affine"),
        (lambda: matmul(x, packed=packed, scales=s, biases=b, group_size=32, bits=7),
         "quantized_matmul: bits: 7, expected one of 2 3 4 5 6 8"),
        (lambda: matmul(x, blocks=np.zeros((5, 36), np.uint8)),
         "quantized_matmul: type: not given, and the arrays do not tell it, expected one of Q4_0 Q4_1"),
        (lambda: bittern.embedding(np.arange(3), w=w), "ids: dtype int64, expected s32 [3] = [rows]; pass ids.astype(np.int32)"),
        (lambda: bittern.kl_loss(x, ids=np.zeros((3, 1), np.int64), log_probs=np.zeros((3, 1), F32), tail=np.zeros(3, F32)),
         "ids: dtype int64, expected s32 [3,1] = [rows,top]; pass ids.astype(np.int32)"),
        (lambda: bittern.pack_codes(np.zeros((2, 64), np.int64), bits=4), "; pass codes.astype(np.uint8)"),
    ]:  # fmt: skip
        with pytest.raises(ValueError) as error:
            call()
        assert text in str(error.value)
    # What the arrays do tell is taken.
    assert np.array_equal(matmul(x, w=w, activations="float"), matmul(x, w=w, activations="float", type="f32"))
    ids = np.array([3, 1], np.int32)
    assert np.array_equal(bittern.embedding(ids, w=w), w[ids])
    assert bittern.embedding(ids, w=w.astype(np.float16), element="f16").dtype == np.float16


@pytest.mark.peer("torch")
def test_integers_of_torch_are_told_in_its_words():
    import torch

    with pytest.raises(ValueError, match=r"ids: dtype int64, expected s32 .*; pass ids.to\(torch.int32\)"):
        bittern.embedding(torch.arange(3), w=torch.zeros(4, 8))
