"""The gated delta rule's ops from Python, against what public references computed (tests/golden)."""

import numpy as np
import pytest
from arrays import load_golden

import bittern

golden = load_golden("gated_delta.safetensors")


def case(name):
    return {k.split(".")[1]: v for k, v in golden.items() if k.startswith(name + ".")}


def rms_ratio(ours, theirs):
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return np.sqrt(np.square(ours - theirs).mean() / np.square(theirs).mean())


def test_sizes_follow_the_arrays():
    rng = np.random.default_rng(1)
    sizes = {"batch": 2, "tokens": 70, "key_heads": 2, "value_heads": 6, "key_dim": 32}
    b, t, kh, vh, kd = sizes.values()
    k, v = rng.normal(size=(b, t, kh, kd)), rng.normal(size=(b, t, vh, 48))
    beta, g, a = rng.random((b, t, vh)), -rng.random((b, t, vh)), rng.normal(size=(b, t, vh, 32))
    inputs = [x.astype(np.float32) for x in (k, v, beta, g, a)]
    w, u = bittern.gdn_recompute_w_u(*inputs)  # A's last axis is the chunk
    assert w.shape == (b, t, vh, kd) and u.shape == v.shape
    told = bittern.gdn_recompute_w_u(*inputs, **sizes, value_dim=48, chunk=32)
    assert np.array_equal(w, told[0]) and np.array_equal(u, told[1])
    one = [x[:1] for x in inputs]
    packed, _ = bittern.gdn_recompute_w_u(*one, np.array([0, 10, 10, 70], np.int32))
    alone, _ = bittern.gdn_recompute_w_u(*(x[:, 10:] for x in map(np.ascontiguousarray, one)))
    assert np.array_equal(packed[:, 10:], alone)
    with pytest.raises(ValueError, match="value_heads: 5, expected a multiple of key_heads 2"):
        bittern.gdn_recompute_w_u(inputs[0], inputs[1][:, :, :5].copy(), *inputs[2:])
    with pytest.raises(ValueError, match="chunk: 0, expected 16, 32 or 64"):
        bittern.gdn_recompute_w_u(*inputs, chunk=0)
    with pytest.raises(ValueError, match="cu_seqlens"):
        bittern.gdn_recompute_w_u(*one, np.array([0, 80], np.int32))
