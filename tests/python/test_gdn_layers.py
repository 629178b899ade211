"""Decoding, the convolution and the gated norm, against what public references computed (tests/golden)."""

import numpy as np
from arrays import BF16, load_golden

import bittern

golden = load_golden("gated_delta.safetensors")


def case(name):
    return {k.split(".")[1]: v for k, v in golden.items() if k.startswith(name + ".")}


def close(ours, theirs, tolerance):
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max()


def test_steps_are_the_recurrence():
    c = case("plain")
    for tokens in (75, 1):  # all at once, and one call a token
        state, o = c["h0"].copy(), np.empty_like(c["v"])
        for t in range(0, 75, tokens):
            part = {n: np.ascontiguousarray(c[n][:, t : t + tokens]) for n in ("q", "k", "v", "g", "beta")}
            out = np.empty_like(part["v"])
            bittern.gdn_recurrent_step(**part, state=state, o=out)
            o[:, t : t + tokens] = out
        close(o, c["o_hf_step"], 2e-6)
        close(o, c["o"], 2e-6)
        close(state, c["ht_hf_step"], 2e-6)


def test_steps_fuse_norm_gate_and_sigmoid():
    c = case("fused")
    state, o = c["h0"].copy(), np.empty_like(c["v"])
    bittern.gdn_recurrent_step(
        **{n: c[n] for n in ("q", "k", "v", "a_log", "dt_bias")}, g=c["a"], beta=c["b"], state=state, o=o,
        qk_l2norm=True, gate=True, beta_sigmoid=True,
    )  # fmt: skip
    close(o, c["o"], 1e-5)
    close(state, c["ht"], 1e-5)


def test_convolution():
    c = case("conv")
    y = bittern.causal_conv1d(c["x"], c["weight"], bias=c["bias"], initial_state=c["state"])[0]
    close(y, c["y"], 1e-6)
    dx, dw, db, ds = bittern.causal_conv1d_backward(
        c["x"], c["weight"], c["dy"], bias=c["bias"], initial_state=c["state"]
    )
    close(dx, c["dx"], 1e-6)
    close(dw, c["dweight"], 2e-6)
    close(db, c["dbias"], 2e-6)
    close(ds, c["dstate"], 1e-6)


def test_gated_norm():
    c = case("norm")
    close(bittern.gated_rms_norm(c["x"], c["z"], c["weight"]), c["y"], 1e-6)
    dx, dz, dw = bittern.gated_rms_norm_backward(c["x"], c["z"], c["weight"], c["dy"])
    close(dx, c["dx"], 2e-6)
    close(dz, c["dz"], 2e-6)
    close(dw, c["dweight"], 2e-6)


def test_gated_norm_rounds_as_transformers_does():
    c = {name: BF16(bits) for name, bits in case("norm_bf16").items()}
    y = bittern.gated_rms_norm(c["x"], c["z"], c["weight"], rounding="each")
    ours, theirs = (np.asarray(a.view(np.uint16)).astype(np.int32) for a in (y, c["y"]))
    # torch's rsqrt and silu are rounded differently: hardly ever another bf16.
    assert np.abs(ours - theirs).max() <= 1
    assert (ours != theirs).mean() < 0.005
