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


# ---- strong decays ----


@pytest.mark.parametrize("strong", [-1e4, -1e6, -3e38, -np.inf])
@pytest.mark.parametrize("chunk", [16, 64])
def test_strong_decays_and_resets(strong, chunk):
    """One token in 8 forgets all there was: the others are as exact as without it."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.normal(size=(1, 100, 2, 16)).astype(np.float32) / 4 for _ in range(3))
    beta, g = (rng.random((1, 100, 2)).astype(np.float32) for _ in range(2))
    g *= -0.3
    g[:, 3::8] = strong
    want, state = np.zeros(v.shape), np.zeros((2, 16, 16))
    for t, h in np.ndindex(100, 2):
        state[h] *= np.exp(np.float64(g[0, t, h]))
        state[h] += np.outer(k[0, t, h], beta[0, t, h] * (v[0, t, h] - k[0, t, h] @ state[h]))
        want[0, t, h] = q[0, t, h] @ state[h] / 4
    o, final_state = bittern.gdn_chunk_forward(q, k, v, g, beta, chunk=chunk)
    assert rms_ratio(o, want) < 1e-6
    assert rms_ratio(final_state[0], state) < 1e-6
    gradients = bittern.gdn_chunk_backward(v, q, k, v, g, beta, d_final_state=final_state, chunk=chunk)
    assert all(np.isfinite(x).all() for x in gradients)
    assert not gradients[3][:, 3::8].any()  # d_g of what is gone


# ---- the rule, against FLA and transformers ----


@pytest.mark.parametrize("theirs", ["", "_chunk", "_hf", "_hf_step"])
@pytest.mark.parametrize("layout", ["key_value", "value_key"])
def test_chunk_forward(layout, theirs):
    """NMSE 1e-7, llama.cpp's bar for this op in f32; theirs differ by 4e-10 among themselves."""
    c = case("plain")
    h0 = c["h0"] if layout == "key_value" else np.ascontiguousarray(c["h0"].swapaxes(2, 3))
    o, ht = bittern.gdn_chunk_forward(
        *(c[n] for n in ("q", "k", "v", "g", "beta")), initial_state=h0, state_layout=layout
    )
    ht = ht if layout == "key_value" else ht.swapaxes(2, 3)
    assert rms_ratio(o, c["o" + theirs]) ** 2 < 1e-7
    assert rms_ratio(ht, c["ht" + theirs]) ** 2 < 1e-7


def test_the_ops_one_by_one_are_the_chunk_forward():
    c = case("plain")
    summed = bittern.gdn_cumsum(c["g"])
    lower = bittern.gdn_kkt(c["k"], c["beta"], summed)
    a = bittern.gdn_solve(lower)
    w, u = bittern.gdn_recompute_w_u(c["k"], c["v"], c["beta"], summed, a)
    h, v_new, ht = bittern.gdn_state(c["k"], w, u, summed, initial_state=c["h0"])
    o = bittern.gdn_output(c["q"], c["k"], v_new, h, summed)
    assert rms_ratio(o, c["o"]) ** 2 < 1e-7 and rms_ratio(ht, c["ht"]) ** 2 < 1e-7


def test_recurrent_step():
    """Token by token, the same answer as all at once."""
    c = case("plain")
    names, state = ("q", "k", "v", "g", "beta"), c["h0"].copy()
    steps = [
        bittern.gdn_recurrent_step(
            *(np.ascontiguousarray(c[n][:, t : t + 1]) for n in names), state=state, snapshots=False
        )
        for t in range(c["q"].shape[1])
    ]
    assert rms_ratio(np.concatenate(steps, axis=1), c["o_hf_step"]) < 1e-6
    assert rms_ratio(state, c["ht_hf_step"]) < 1e-6
    state = c["h0"].copy()
    o, snapshots = bittern.gdn_recurrent_step(
        *(c[n] for n in names), state=state, snapshots=True
    )
    assert np.array_equal(o, np.concatenate(steps, axis=1))
    assert np.array_equal(snapshots[:, -1], state)


def test_everything_fused():
    c = case("fused")
    fused = {"qk_l2norm": True, "gate": True, "beta_sigmoid": True}
    inputs = {n: c[n] for n in ("q", "k", "v", "a_log", "dt_bias")} | {"g": c["a"], "beta": c["b"]}
    o, ht = bittern.gdn_chunk_forward(**inputs, initial_state=c["h0"], **fused)
    assert rms_ratio(o, c["o"]) < 1e-4 and rms_ratio(ht, c["ht"]) < 1e-4
    state = c["h0"].copy()
    o = bittern.gdn_recurrent_step(**inputs, state=state, snapshots=False, **fused)
    assert rms_ratio(o, c["o"]) < 1e-4 and rms_ratio(state, c["ht"]) < 1e-4
    gradients = bittern.gdn_chunk_backward(
        **inputs, initial_state=c["h0"], d_o=c["do"], d_final_state=c["dht"], **fused
    )
    theirs = ("dq", "dk", "dv", "da", "db", "da_log", "ddt_bias", "dh0")
    assert len(gradients) == len(theirs)
    for ours, name in zip(gradients, theirs):
        assert rms_ratio(ours, c[name]) < 1e-4, name


def test_decode_step_is_the_three_ops():
    """Two drafts of three tokens; the second sequence then goes back to its first token."""
    rng = np.random.default_rng(3)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    x, z, g, beta = normal(2, 3, 96), normal(2, 3, 4, 8), normal(2, 3, 4), normal(2, 3, 4)
    weight, scale, a_log, dt_bias = normal(96, 4), normal(8), normal(4), normal(4)
    conv_state, state = normal(2, 96, 3), normal(2, 4, 16, 8)
    mixed, conv_end = bittern.causal_conv1d(x, weight, initial_state=conv_state)
    q, k, v = (t.reshape(2, 3, -1, d) for t, d in zip(np.split(mixed, [32, 64], -1), (16, 16, 8)))
    end, fused = state.copy(), {"qk_l2norm": True, "gate": True, "beta_sigmoid": True}
    o = bittern.gdn_recurrent_step(
        q, k, v, g, beta, state=end, a_log=a_log, dt_bias=dt_bias, **fused
    )
    want = bittern.gated_rms_norm(o, z, scale)
    layer = (weight, scale, a_log, dt_bias)
    y, states, conv_states = bittern.gdn_decode_step(
        x, z, g, beta, *layer, conv_state=conv_state, state=state, key_heads=2, value_heads=4,
        snapshots=True, conv_snapshots=True,
    )  # fmt: skip
    assert np.array_equal(y, want)
    assert np.array_equal(state, end) and np.array_equal(conv_state, conv_end)
    state[1], conv_state[1] = states[1, 0], conv_states[1, 0]
    again = bittern.gdn_decode_step(
        *(t[1:, 1:].copy() for t in (x, z, g, beta)), *layer, conv_state=conv_state[1:],
        state=state[1:], key_heads=2, value_heads=4,
    )  # fmt: skip
    assert np.array_equal(again, want[1:, 1:])
    assert np.array_equal(state[1], end[1])


# ---- the layers around it, against torch and transformers ----


def test_conv():
    c = case("conv")
    y, state = bittern.causal_conv1d(c["x"], c["weight"], c["bias"], c["state"])
    assert rms_ratio(y, c["y"]) < 1e-6
    assert np.array_equal(state, c["x"][:, -3:].swapaxes(1, 2))
    gradients = bittern.causal_conv1d_backward(
        c["dy"], c["x"], c["weight"], bias=c["bias"], initial_state=c["state"]
    )
    for ours, name in zip(gradients, ("dx", "dweight", "dbias", "dstate"), strict=True):
        assert rms_ratio(ours, c[name]) < 1e-6, name
    narrow = bittern.causal_conv1d(c["x"], np.ascontiguousarray(c["weight"][:, 1:]), final_state=False)
    assert narrow.shape == c["x"].shape  # the width is the weight's


def test_gated_norm():
    c = case("norm")
    assert rms_ratio(bittern.gated_rms_norm(c["x"], c["z"], c["weight"]), c["y"]) < 1e-6
    gradients = bittern.gated_rms_norm_backward(c["dy"], c["x"], c["z"], c["weight"])
    for ours, name in zip(gradients, ("dx", "dz", "dweight"), strict=True):
        assert rms_ratio(ours, c[name]) < 2e-6, name
    many = c["x"].reshape(3, 25, -1), c["z"].reshape(3, 25, -1)
    assert bittern.gated_rms_norm(*many, c["weight"]).shape == many[0].shape


def test_gated_norm_rounds_where_transformers_does():
    """In bf16, with `rounding` each: all but the last bit, where their rsqrt or sigmoid differs."""
    c = case("norm_bf16")
    y = np.zeros(c["y"].shape, np.uint16)
    bittern.gated_rms_norm(c["x"], c["z"], c["weight"], y=(out := type(c["x"])(y)), rounding="each")
    theirs = c["y"].bits.astype(np.int32)
    ulps = np.abs(out.bits.astype(np.int32) - theirs)
    assert ulps.max() <= 1 and (ulps > 0).mean() < 0.01
