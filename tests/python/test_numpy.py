"""Every op against its formula written in numpy, through the functions of the package."""

import numpy as np
import pytest
from arrays import NUMPY, assert_same_bits, from_f32

import bittern

rng = np.random.default_rng(21)
FLOATS = ["f32", "f64", "f16"]


def math(dtype):
    return np.float64 if dtype == "f64" else np.float32


def halving_sum(a):
    """Sum over the last axis: pad with zeros to a power of two n, add the element n/2 ... 1 away."""
    n = 1 << max(0, a.shape[-1] - 1).bit_length()
    a = np.concatenate([a, np.zeros(a.shape[:-1] + (n - a.shape[-1],), a.dtype)], -1)
    while n > 1:
        n //= 2
        a = a[..., :n] + a[..., n : 2 * n]
    return a[..., 0]


class Groups:
    """x [5, 192] in groups of 48, its scales and zero points, spread over the elements."""

    fields = {"group_size": 48, "q_min": -7, "q_max": 9}

    def __init__(self, dtype):
        self.dtype, self.f = dtype, math(dtype)
        steps = rng.integers(-24, 25, (5, 192)) / 2  # ties
        self.scale = from_f32(2.0 ** rng.integers(-4, 3, (5, 4)), dtype)
        self.scale[1] = from_f32(rng.uniform(0.05, 0.3, 4), dtype)
        self.scale[2, 0], self.scale[2, 1] = 0, -0.5
        self.zero_point = rng.integers(-3, 4, (5, 4)).astype(np.int32)
        self.s, self.zp = (np.repeat(a, 48, 1) for a in (self.scale, self.zero_point))
        self.x = (steps * self.s).astype(NUMPY[dtype])
        self.x[3, :4] = [np.inf, -np.inf, np.nan, 0]
        self.d_y = from_f32(rng.normal(size=self.x.shape), dtype)
        with np.errstate(all="ignore"):
            z = self.x.astype(self.f) / self.s.astype(self.f)
        self.z = np.where((self.s == 0) | np.isnan(z), self.f(0), z)
        self.sum = np.rint(self.z) + self.zp
        self.q = np.clip(self.sum, -7, 9)
        self.inside = (self.sum >= -7) & (self.sum <= 9)

    def sums(self, terms):
        return halving_sum(terms.astype(self.f).reshape(5, 4, 48)).astype(NUMPY[self.dtype])

    def same(self, ours, expected):
        assert_same_bits(ours, expected.astype(NUMPY[self.dtype]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize(dtype):
    g = Groups(dtype)
    q = bittern.quantize_per_group(g.x, g.scale, g.zero_point, **g.fields)
    assert np.array_equal(q, g.q.astype(np.int8))
    d_x = bittern.quantize_per_group_backward(g.d_y, g.x, g.scale, g.zero_point, **g.fields)
    with np.errstate(all="ignore"):
        slope = g.d_y.astype(g.f) / g.s.astype(g.f)
    g.same(d_x, np.where(g.inside & (g.s != 0), slope, g.f(0)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_dequantize(dtype):
    g = Groups(dtype)
    q = g.q.astype(np.int8)
    y = bittern.dequantize_per_group(q, g.scale, g.zero_point, group_size=48)
    g.same(y, (q - g.zp).astype(g.f) * g.s.astype(g.f))
    d_q, d_scale = bittern.dequantize_per_group_backward(
        g.d_y, q, g.scale, g.zero_point, group_size=48
    )
    g.same(d_q, g.d_y.astype(g.f) * g.s.astype(g.f))
    g.same(d_scale, g.sums(g.d_y.astype(g.f) * (q - g.zp).astype(g.f)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_fake_quantize(dtype):
    g = Groups(dtype)
    y = bittern.fake_quantize_per_group(g.x, g.scale, g.zero_point, **g.fields)
    g.same(y, (g.q - g.zp).astype(g.f) * g.s.astype(g.f))
    d_x, d_scale, d_zero_point = bittern.fake_quantize_per_group_backward(
        g.d_y, g.x, g.scale, g.zero_point, **g.fields
    )
    d_y = g.d_y.astype(g.f)
    g.same(d_x, np.where(g.inside, d_y, g.f(0)))
    with np.errstate(invalid="ignore"):
        slope = np.where(g.inside, np.rint(g.z) - g.z, g.q - g.zp).astype(g.f)
    assert_equal_but_zero_signs(d_scale, g.sums(d_y * slope))
    outside = np.where(g.inside, g.f(0), -(g.s.astype(g.f) * d_y))
    assert_equal_but_zero_signs(d_zero_point, g.sums(outside))


def assert_equal_but_zero_signs(a, b):
    """numpy's where may keep a -0 that a masked kernel does not make."""
    assert a.dtype == b.dtype and np.array_equal(a, b)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("granularity", ["group", "token", "channel", "tensor"])
def test_dynamic_quantize(dtype, granularity):
    f = math(dtype)
    x = from_f32(rng.normal(size=(6, 80)) + 0.3, dtype)
    x[0] = 0
    axis = 0 if granularity == "channel" else -1
    fields = {"granularity": granularity, "axis": axis, "group_size": 20}
    shape = {"group": (6, 4, 20), "token": (6, 1, 80), "channel": (6, 1, 80), "tensor": (1, 1, 480)}
    groups = x.reshape(shape[granularity]).astype(f)

    scale, q = bittern.dynamic_quantize(x, **fields)
    s = (np.abs(groups).max(-1, keepdims=True) / f(127)).astype(NUMPY[dtype])
    s[s == 0] = 1
    assert_same_bits(scale, s.reshape(scale.shape))
    assert np.array_equal(q, np.clip(np.rint(groups / s.astype(f)), -128, 127).reshape(x.shape))

    fields |= {"symmetric": False, "q_min": 0, "q_max": 15, "code": "u8"}
    scale, zero_point, q = bittern.dynamic_quantize(x, **fields)
    lo = np.minimum(groups.min(-1, keepdims=True), 0)
    hi = np.maximum(groups.max(-1, keepdims=True), 0)
    s = ((hi - lo) / f(15)).astype(NUMPY[dtype])
    s[s == 0] = 1
    zp = np.clip(0 - np.rint(lo / s.astype(f)), 0, 15)
    assert_same_bits(scale, s.reshape(scale.shape))
    assert np.array_equal(zero_point, zp.reshape(scale.shape).astype(np.int32))
    assert np.array_equal(q, np.clip(np.rint(groups / s.astype(f)) + zp, 0, 15).reshape(x.shape))


def half_away(z):
    whole = np.trunc(z)
    return whole + np.where(np.abs(z - whole) >= 0.5, np.sign(z), 0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bins", [2, 3, 16, 100, 256])
def test_affine(dtype, bins):
    f = math(dtype)
    w = from_f32(rng.normal(size=(4, 240)) + rng.normal(size=(4, 1)), dtype)
    w[0, :48] = 1.5  # a uniform group
    scales, biases, q = bittern.qdq_affine_init(w, group_size=48, n_bins=bins)
    groups = w.reshape(4, 5, 48).astype(f)
    b = groups.min(-1)
    s = ((groups.max(-1) - b) / f(bins - 1)).astype(NUMPY[dtype])
    s[~(s > 0)] = 1
    assert_same_bits(scales, s)
    assert_same_bits(biases, b.astype(NUMPY[dtype]))
    s, b = (a.astype(f)[..., None] for a in (s, b))
    assert np.array_equal(q, np.clip(half_away((groups - b) / s), 0, bins - 1).reshape(4, 240))

    y = bittern.qdq_affine_forward(q, scales, biases, group_size=48, n_bins=bins)
    assert y.dtype == w.dtype
    if dtype != "f64":  # one rounding: the f64 product is exact, and so is nearly every sum
        exact = q.reshape(4, 5, 48).astype(np.float64) * s + b
        assert np.mean(exact.astype(np.float32).astype(NUMPY[dtype]).ravel() == y.ravel()) > 0.999
    fields = {"group_size": 48, "n_bins": bins, "rounding": "mlx"}
    product = (q.reshape(4, 5, 48).astype(f) * s).astype(NUMPY[dtype]).astype(f)
    expected = (product + b).astype(NUMPY[dtype]).reshape(4, 240)
    assert_same_bits(bittern.qdq_affine_forward(q, scales, biases, **fields), expected)

    d_y = from_f32(rng.normal(size=w.shape), dtype)
    d_scales, d_biases = bittern.qdq_affine_backward(d_y, q, group_size=48, n_bins=bins)
    d_y = d_y.astype(f).reshape(4, 5, 48)
    assert_same_bits(d_scales, halving_sum(q.reshape(4, 5, 48).astype(f) * d_y).astype(NUMPY[dtype]))
    assert_same_bits(d_biases, halving_sum(d_y).astype(NUMPY[dtype]))


@pytest.mark.parametrize("bits", range(1, 9))
def test_affine_packed(bits):
    """Packed codes are the u8 codes packed, for every op that takes either."""
    w = rng.normal(size=(3, 2, 96)).astype(np.float32)
    fields = {"group_size": 24, "bits": bits}
    scales, biases, codes = bittern.qdq_affine_init(w, **fields)
    packed_scales, packed_biases, packed = bittern.qdq_affine_init(w, storage="packed", **fields)
    assert codes.shape == w.shape and packed.shape == (3, 2, 3 * bits)
    assert_same_bits(packed, bittern.pack_codes(codes, bits=bits))
    assert_same_bits(bittern.unpack_codes(packed, axis_size=96, bits=bits), codes)
    assert_same_bits(packed_scales, scales)
    assert_same_bits(packed_biases, biases)
    y = bittern.qdq_affine_forward(codes, scales, biases, **fields)
    assert y.shape == w.shape
    assert_same_bits(bittern.qdq_affine_forward(packed, scales, biases, **fields), y)
    for a, b in zip(
        bittern.qdq_affine_backward(w, packed, **fields),
        bittern.qdq_affine_backward(w, codes, **fields),
    ):
        assert_same_bits(a, b)


def test_lsq_uses_importance():
    w = rng.normal(size=(8, 128)).astype(np.float32)
    importance = np.where(np.arange(128) % 4 == 0, 100.0, 0.01).astype(np.float32)

    def error(*arrays):
        scales, biases, q = bittern.qdq_affine_init(*arrays, method="lsq", bits=3)
        y = bittern.qdq_affine_forward(q, scales, biases, bits=3)
        return float((importance * (y - w).astype(np.float64) ** 2).sum())

    assert error(w, importance) < error(w)


@pytest.mark.parametrize("bits", range(1, 9))
def test_pack(bits):
    codes = rng.integers(0, 256, (4, 77)).astype(np.uint8)
    words = bittern.pack_codes(codes, bits=bits)
    stream = (codes[:, :, None] >> np.arange(bits)) & 1
    stream = np.pad(stream.reshape(4, -1), ((0, 0), (0, -77 * bits % 32))).astype(np.uint8)
    assert_same_bits(words, np.packbits(stream, axis=1, bitorder="little").view("<u4"))
    unpacked = bittern.unpack_codes(words, axis_size=77, bits=bits)
    assert np.array_equal(unpacked, codes & (2**bits - 1))


@pytest.mark.parametrize("bits, gain", [(4, 0.12), (2, 0.46)])
def test_lsq_gains_on_gaussian_weights(bits, gain):
    w = np.random.default_rng(0).standard_normal((512, 4096), dtype=np.float32)
    error = {}
    for method in ("minmax", "lsq"):
        scales, biases, q = bittern.qdq_affine_init(w, group_size=64, bits=bits, method=method)
        y = bittern.qdq_affine_forward(q, scales, biases, group_size=64, bits=bits)
        error[method] = float(np.square(w.astype(np.float64) - y).mean())
    assert error["lsq"] <= (1 - gain) * error["minmax"]
