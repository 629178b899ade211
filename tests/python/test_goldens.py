"""Against files made by peers: tests/golden/README.md says what is in them and what to expect."""

import functools
import itertools

import numpy as np
import pytest
from arrays import assert_same_bits, bits_of, load_golden, values_of, zeros

import bittern

mlx = functools.cache(lambda: load_golden("mlx_affine.safetensors"))
torch = functools.cache(lambda: load_golden("torch_fake_quantize.safetensors"))


# ---- MLX ----

MLX_CASES = list(itertools.product(("f32", "f16", "bf16"), (1, 2, 3, 4, 5, 6, 8), (32, 64, 128)))


def plain_unpack(words, bits, count):
    stream = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : count * bits]
    return (stream.reshape(len(words), count, bits) << np.arange(bits)).sum(2).astype(np.uint8)


def quantize(w, dtype, bits, group, storage):
    rows, length = w.shape
    scales, biases = (zeros((rows, length // group), dtype) for _ in range(2))
    q = bittern.qdq_affine_init(
        w,
        scales=scales,
        biases=biases,
        group_size=group,
        bits=bits,
        method="mlx",
        storage=storage,
    )[2]
    return q, scales, biases


@pytest.mark.parametrize("dtype,bits,group", MLX_CASES)
def test_mlx(dtype, bits, group):
    w, packed, scales, biases, dequant = (
        mlx()[f"{dtype}.b{bits}.g{group}.{k}"]
        for k in ("w", "packed", "scales", "biases", "dequant")
    )
    codes = plain_unpack(packed, bits, w.shape[1])
    for storage, expected in (("packed", packed), ("u8", codes)):
        q, s, b = quantize(w, dtype, bits, group, storage)
        assert_same_bits(q, expected)
        assert_same_bits(s, scales)
        if bits > 1:
            assert_same_bits(b, biases)
        else:  # of several zeros MLX keeps the first one's sign, we always store +0
            assert np.array_equal(values_of(b), values_of(biases))
            assert not np.any((bits_of(b) != bits_of(biases)) & (values_of(b) != 0))

        y = zeros(w.shape, dtype)
        bittern.qdq_affine_forward(
            expected, scales, biases, y=y, group_size=group, bits=bits, rounding="mlx"
        )
        assert_same_bits(y, dequant)
    assert_same_bits(bittern.unpack_codes(packed, axis_size=w.shape[1], bits=bits), codes)
    assert_same_bits(bittern.pack_codes(codes, bits=bits), packed)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_mlx_not_finite(dtype, bits):
    """Equal beside NaN. Where MLX gives up (infinities, all NaN, range overflow), ours is finite."""
    w, packed, scales, biases = (
        mlx()[f"special.{dtype}.b{bits}.g64.{k}"] for k in ("w", "packed", "scales", "biases")
    )
    q, s, b = quantize(w, dtype, bits, 64, "packed")
    low, high = (f(values_of(w), axis=1, initial=0) for f in (np.fmin.reduce, np.fmax.reduce))
    same = high - low < np.finfo(np.float32).max
    same[4] = False  # all NaN
    assert same[0] and same.sum() == (3 if dtype == "f16" else 1)
    for ours, theirs in ((q, packed), (s, scales), (b, biases)):
        assert_same_bits(ours[same], theirs[same])
    assert np.all(np.isfinite(values_of(s)[~same])) and np.all(np.isfinite(values_of(b)[~same]))


# ---- torch ----

TORCH_CASES = sorted({k.rpartition(".")[0] for k in torch()})
differences = {}


class Case:
    def __init__(self, key):
        self.kind, self.dtype, self.geometry, self.scales, self.range, self.zero_points = key.split(
            "."
        )
        self.key = key
        self.axis = int(self["axis"][0])
        self.fields = {
            "granularity": "tensor" if self.axis < 0 else "channel",
            "q_min": int(self["quant_min"][0]),
            "q_max": int(self["quant_max"][0]),
            "axis": self.axis,
        }
        along = [1] * len(self["x"].shape)
        if self.axis >= 0:
            along[self.axis] = -1
        self.s, self.zp = (values_of(self[k]).reshape(along) for k in ("scale", "zero_point"))
        self.other_axes = tuple(i for i, n in enumerate(along) if n == 1)

    def __getitem__(self, tensor):
        return torch()[f"{self.key}.{tensor}"]

    def near_tie(self):
        if self.kind == "sums":  # made to stay clear of ties
            return np.zeros(self["x"].shape, bool)
        return self["near_tie"].astype(bool)

    def compare(self, name, ours, theirs, exact):
        """Equal by value; when not `exact`, but near ties, which are counted."""
        wrong = values_of(ours) != values_of(theirs)
        near = self.near_tie()
        assert not np.any(wrong if exact else wrong & ~near), f"{name}: {wrong.sum()} differ"
        count = differences.setdefault(f"{self.kind}.{self.dtype}.{self.scales} {name}", [0, 0, 0])
        count[0] += wrong.size
        count[1] += int(near.sum())
        count[2] += int(wrong.sum())


@pytest.mark.parametrize("key", TORCH_CASES)
def test_torch(key):
    case = Case(key)
    x, d_y, scale, zero_point = (case[k] for k in ("x", "dy", "scale", "zero_point"))
    pow2 = case.scales == "pow2"

    y = bittern.fake_quantize_per_group(
        x, scale, zero_point, y=zeros(x.shape, case.dtype), **case.fields
    )
    case.compare("y", y, case["y"], exact=pow2)
    d_x, d_scale, d_zero_point = bittern.fake_quantize_per_group_backward(
        d_y, x, scale, zero_point, d_x=zeros(x.shape, case.dtype), **case.fields
    )
    case.compare("dx", d_x, case["dx"], exact=pow2)
    if case.kind == "ties":
        return

    # torch's learnable backward rounds x/s + zp in one step, so a zero point moves its ties
    exact = pow2 and (case.kind == "sums" or case.zero_points == "zero")
    if case.kind == "terms":
        case.compare("dx_learnable", d_x, case["dx_learnable"], exact)
    clear = ~case.near_tie().any(case.other_axes) | exact
    z = values_of(x) / case.s
    low, high = case.fields["q_min"], case.fields["q_max"]
    q = np.rint(z) + case.zp
    inside = (q >= low) & (q <= high)
    slope = np.abs(values_of(d_y)) * (np.abs(z) + 1)
    d_scale_term = values_of(d_y) * np.where(inside, np.rint(z) - z, np.clip(q, low, high) - case.zp)
    d_zero_term = np.where(inside, 0, -case.s * values_of(d_y))
    n = x.size // scale.size

    def bound(term):
        return n * 2.0**-24 * np.abs(term).sum(case.other_axes)

    for ours, theirs, allowed in (
        (d_scale, "d_scale", 4 * 2.0**-24 * slope.sum(case.other_axes) + bound(d_scale_term)),
        (d_zero_point, "d_zero_point", bound(d_zero_term) if n > 1 else 0),
    ):
        error = np.abs(values_of(ours) - values_of(case[theirs]))
        assert np.all(error[clear] <= (0 if pow2 else np.broadcast_to(allowed, error.shape)[clear]))


def test_torch_differences(show):
    """Counts what test_torch let pass; nothing but ties may differ."""
    if not differences:
        pytest.skip("test_torch did not run")
    show(
        "torch goldens: elements that differ, all within 2 ulp of a tie (torch uses 1/scale)"
    )
    for name, (elements, near, wrong) in sorted(differences.items()):
        show(f"  {name:28} {wrong:6} of {elements:6} ({near} near a tie)")
        assert wrong <= near
