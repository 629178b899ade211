"""Arrays that lie in memory in other ways: slices, transposed axes, any strides."""

import importlib.util

import numpy as np
import pytest
from arrays import assert_same_bits
from problems import gdn_problem, normal, rng, tables

import bittern

if importlib.util.find_spec("torch") is not None:
    import torch


# ---- strides ----


def test_slices_of_one_projection():
    """q, k and v as a linear layer gives them, and gradients that go back into one array."""
    b, t, kh, vh, kd, vd = 2, 20, 2, 4, 16, 8
    widths = (kh * kd, kh * kd, vh * vd)
    ends = np.cumsum(widths)
    whole = normal(b, t, ends[-1])
    shapes = ((b, t, kh, kd), (b, t, kh, kd), (b, t, vh, vd))

    def cut(a):
        return [a[..., e - w : e].reshape(s) for e, w, s in zip(ends, widths, shapes)]

    views = cut(whole)
    assert all(v.base is not None for v in views)
    c = gdn_problem(t=t)
    gates = {"g": c["g"], "beta": c["beta"]}
    names = ("q", "k", "v")
    strided, dense = dict(zip(names, views)), {n: v.copy() for n, v in zip(names, views)}
    for got, expected in zip(
        bittern.gdn_chunk_forward(**strided, **gates), bittern.gdn_chunk_forward(**dense, **gates)
    ):
        assert_same_bits(got, expected)
    d_o, out = normal(b, t, vh, vd), np.zeros_like(whole)
    expected = bittern.gdn_chunk_backward(**dense, **gates, d_o=d_o)
    d_q, d_k, d_v = cut(out)
    bittern.gdn_chunk_backward(**strided, **gates, d_o=d_o, d_q=d_q, d_k=d_k, d_v=d_v)
    for got, want in zip(cut(out), expected):
        assert_same_bits(got.copy(), want)
    states = [np.zeros((b, vh, kd, vd), np.float32) for _ in range(2)]
    assert_same_bits(
        bittern.gdn_recurrent_step(**strided, **gates, state=states[0]),
        bittern.gdn_recurrent_step(**dense, **gates, state=states[1]),
    )


def test_transposed_layouts():
    """transformers keeps heads before tokens."""
    c = gdn_problem(t=20)
    turned = {n: np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2) for n, a in c.items()}
    assert turned["g"].strides[2] != 4
    expected = bittern.gdn_chunk_forward(**c)
    out = np.zeros((2, 4, 20, 8), np.float32)
    got = bittern.gdn_chunk_forward(**turned, o=out.swapaxes(1, 2))
    assert_same_bits(out.swapaxes(1, 2).copy(), expected[0])
    assert_same_bits(got[1], expected[1])
    bad = np.zeros((2, 1, 20, 8), np.float32)
    with pytest.raises(NotImplementedError, match="o: stride 0 of axis 2, expected at least"):
        bittern.gdn_chunk_forward(**c, o=np.lib.stride_tricks.as_strided(
            bad, (2, 20, 4, 8), (640, 32, 0, 4)))  # fmt: skip


def test_rows_as_several_axes():
    signs, boundaries, levels = tables()
    x = normal(2, 7, 3, 64)  # batch, tokens, heads
    turned = x.swapaxes(1, 2)
    packed, scales = bittern.aura_encode(turned.copy(), signs, boundaries, levels)
    for got, want in zip(bittern.aura_encode(turned, signs, boundaries, levels), (packed, scales)):
        assert_same_bits(got, want)
    cache, column = np.zeros((2, 3, 20, 8), np.uint32), np.zeros((2, 3, 20), np.float32)
    bittern.aura_encode(
        turned, signs, boundaries, levels, packed=cache[:, :, 5:12], scales=column[:, :, 5:12]
    )
    assert np.array_equal(cache[:, :, 5:12], packed)
    assert np.array_equal(column[:, :, 5:12], scales[..., 0])
    cache[:, :, 5:12], column[:, :, 5:12] = 0, 0
    assert not cache.any() and not column.any()  # nothing outside was written
    cache[:, :, 5:12], column[:, :, 5:12] = packed, scales[..., 0]
    y = bittern.aura_decode(packed, scales, signs, levels)
    assert_same_bits(bittern.aura_decode(cache[:, :, 5:12], column[:, :, 5:12], signs, levels), y)
    out = np.zeros((2, 7, 3, 64), np.float32)
    bittern.aura_rotate(turned, signs, y=out.swapaxes(1, 2))
    assert_same_bits(out, bittern.aura_rotate(x, signs))
    z, weight = normal(2, 3, 7, 64), normal(64)
    assert_same_bits(
        bittern.gated_rms_norm(turned, z, weight), bittern.gated_rms_norm(turned.copy(), z, weight)
    )


@pytest.mark.peer("torch")
@pytest.mark.parametrize("kernel", ["ref", "cpu"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_convolution_takes_slices(kernel, packed, dtype):
    """x and y as slices of wider rows, states as transformers (one input longer) and vLLM (channels
    last) have them."""
    to = getattr(torch, dtype)
    b, t, c, n = (1, 90, 21, 3) if packed else (3, 70, 21, 3)
    rng = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(*shape, generator=rng).to(to)  # noqa: E731
    mask = torch.ones(b, t, dtype=torch.uint8)
    mask[0, 4:7] = 0
    bounds = torch.tensor([0, 2, 2, t], dtype=torch.int32) if packed else None
    common = {"mask": mask, "cu_seqlens": bounds, "kernel": kernel, "bias": normal(c)}
    weight = normal(c, 4)
    whole, cache, last = normal(b, t, 3 * c), normal(n, c, 4), normal(n, 3, c)
    views = {"x": whole[..., c : 2 * c], "initial_state": cache[..., 1:]}
    dense = {name: v.contiguous() for name, v in views.items()}
    assert not any(v.is_contiguous() for v in views.values())
    y, final = bittern.causal_conv1d(weight=weight, **dense, **common)
    rows, states = normal(b, t, 2 * c), normal(n, 3, c)
    before = rows.clone()
    bittern.causal_conv1d(
        weight=weight, **views, **common, y=rows[..., 1 : c + 1], final_state=states.mT
    )
    assert torch.equal(rows[..., 1 : c + 1], y) and torch.equal(states.mT, final)
    assert torch.equal(rows[..., c + 1 :], before[..., c + 1 :])
    assert torch.equal(rows[..., :1], before[..., :1])
    # Tokens before the batch, and every second token.
    turned = views["x"].transpose(0, 1).contiguous().transpose(0, 1)
    sparse = normal(b, 2 * t, c)[:, ::2].copy_(dense["x"])
    for x in (turned, sparse):
        got = bittern.causal_conv1d(x, weight, initial_state=dense["initial_state"], **common)
        assert torch.equal(got[0], y) and torch.equal(got[1], final)
    d_y, d_final = whole[..., 2 * c :], last.mT
    grads = bittern.causal_conv1d_backward(
        weight=weight, d_y=d_y.contiguous(), d_final_state=d_final.contiguous(), **dense, **common
    )
    d_x, d_initial = torch.empty(t, b, c + 3, dtype=to), torch.empty(n, c, 5, dtype=to)
    got = bittern.causal_conv1d_backward(
        weight=weight, d_y=d_y, d_final_state=d_final, **views, **common,
        d_x=d_x.transpose(0, 1)[..., 2:-1], d_initial_state=d_initial[..., 1:4],
    )  # fmt: skip
    for a, want in zip(got, grads):
        assert torch.equal(a, want)
    with pytest.raises(NotImplementedError, match="causal_conv1d: x: stride 2 of axis 2, expected 1"):
        bittern.causal_conv1d(whole[..., : 2 * c : 2], weight, cu_seqlens=bounds)


@pytest.mark.parametrize("kernel", ["ref", "cpu"])
@pytest.mark.parametrize("layout", ["key_value", "value_key"])
def test_states_may_be_slices(kernel, layout):
    """Of a pool that has all layers, and of larger rows."""
    c = gdn_problem(t=3)
    b, heads, rows, columns = 2, 4, *((16, 8) if layout == "key_value" else (8, 16))
    pool = normal(6, 3, heads + 1, rows + 2, columns + 3)
    part = pool[:, 1, 1:, 1:-1, 2:-1]
    index = np.array([4, -1], np.int64)
    common = {"state_layout": layout, "kernel": kernel}
    snapshots = [np.zeros((b, 3, heads, rows, columns), np.float32) for _ in range(2)]
    expected, before = part.copy(), pool.copy()
    want = bittern.gdn_recurrent_step(
        **c, state=expected, state_index=index, snapshots=snapshots[0], **common
    )
    got = bittern.gdn_recurrent_step(
        **c, state=part, state_index=index, snapshots=snapshots[1], **common
    )
    assert_same_bits(got[0], want[0])
    assert_same_bits(*snapshots)
    assert_same_bits(part.copy(), expected)
    part[...] = before[:, 1, 1:, 1:-1, 2:-1]
    assert_same_bits(pool, before)  # nothing beside the slice was written
    # The whole sequence: states in and out, and their gradients.
    first, out = part[:b], np.zeros((b, heads, rows + 1, columns + 2), np.float32)
    o, final = bittern.gdn_chunk_forward(**c, initial_state=first.copy(), **common)
    last = out[..., :-1, 1:-1]
    got = bittern.gdn_chunk_forward(**c, initial_state=first, final_state=last, **common)
    assert_same_bits(got[0], o)
    assert_same_bits(last.copy(), final)
    given = {"d_o": normal(*o.shape), "d_final_state": part[2 : 2 + b]}
    want = bittern.gdn_chunk_backward(
        **c, initial_state=first.copy(), **{n: a.copy() for n, a in given.items()}, **common
    )
    got = bittern.gdn_chunk_backward(
        **c, initial_state=first, **given, d_initial_state=last, **common
    )
    for a, e in zip(got, want):
        assert_same_bits(a.copy(), e)


def test_attention_takes_strides():
    signs, boundaries, levels = tables(bits=4)
    s, heads, kv_heads, tokens, dim = 2, 4, 2, 6, 64
    k, v = normal(s, kv_heads, tokens, dim), normal(s, kv_heads, tokens, dim)
    codes = [bittern.aura_encode(a.reshape(s * kv_heads, tokens, dim), signs, boundaries, levels) for a in (k, v)]
    coded = {"k_packed": codes[0][0], "k_scales": codes[0][1][..., 0].copy(),
             "v_packed": codes[1][0], "v_scales": codes[1][1][..., 0].copy()}  # fmt: skip
    fixed = {"k_codebook": levels, "v_codebook": levels, "k_table": signs, "v_table": signs,
             "kv_heads": kv_heads, "capacity": tokens}  # fmt: skip
    q = normal(s, 3, heads, dim)
    recent = [normal(s, kv_heads, 5, dim) for _ in range(2)]
    expected = bittern.aura_attention(
        q, **coded, **fixed, k_recent=recent[0], v_recent=recent[1], exact="f32"
    )
    turned = [np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2) for a in recent]
    out = np.zeros((s, heads, 3, dim), np.float32)
    bittern.aura_attention(
        np.ascontiguousarray(q.swapaxes(1, 2)).swapaxes(1, 2), **coded, **fixed,
        k_recent=turned[0], v_recent=turned[1], exact="f32", out=out.swapaxes(1, 2),
    )  # fmt: skip
    assert_same_bits(out.swapaxes(1, 2).copy(), expected)


@pytest.mark.parametrize("s, heads, kv_heads", [(1, 4, 2), (2, 4, 2), (3, 6, 6), (3, 4, 1)])
def test_attention_finds_its_kv_heads(s, heads, kv_heads):
    """Rows of codes are sequences times kv_heads, and q has the sequences."""
    signs, boundaries, levels = tables(bits=4)
    tokens, dim = 6, 64
    codes = []
    for _ in range(2):
        packed, scales = bittern.aura_encode(
            normal(s * kv_heads, tokens, dim), signs, boundaries, levels
        )
        codes += [packed, scales[..., 0].copy()]
    recent = {"k_recent": normal(s, kv_heads, 5, dim), "v_recent": normal(s, kv_heads, 5, dim)}
    given = normal(s, 3, heads, dim), *codes, levels, levels, signs, signs
    expected = bittern.aura_attention(*given, **recent, exact="f32", kv_heads=kv_heads)
    assert_same_bits(bittern.aura_attention(*given, **recent, exact="f32"), expected)
    apart = [a.reshape(s, kv_heads, *a.shape[1:]) for a in codes]
    assert_same_bits(
        bittern.aura_attention(given[0], *apart, *given[5:], **recent, exact="f32"), expected
    )
    none = bittern.aura_attention(given[0][:0], *(a[:0] for a in codes), *given[5:])
    assert none.shape == (0, 3, heads, dim)
    if s > 1:
        pages = [np.zeros((s + 1, kv_heads, 16, *a.shape[2:]), a.dtype) for a in codes]
        with pytest.raises(ValueError, match="k_packed: .*page_size"):
            bittern.aura_attention(given[0], *pages, *given[5:])
        with pytest.raises(ValueError, match=r"k_packed: shape .* = \[sequences\*kv_heads,capacity,words\]"):
            bittern.aura_attention(given[0], *(a[1:] for a in codes), *given[5:])


# ---- sizes and strides of small arrays ----


def test_small_arrays_may_have_any_strides():
    """As in vLLM, whose state indices are a column of a block table; int64 ones are copied anyway."""
    c, pool = gdn_problem(b=3, t=1), normal(4, 4, 16, 8)
    table = np.array([[2, 9], [0, 9], [3, 9]])
    for kind in (np.int32, np.int64):
        states = [pool.copy() for _ in range(2)]
        column = table.astype(kind)[:, 0]
        assert not column.flags.c_contiguous
        got = bittern.gdn_recurrent_step(**c, state=states[0], state_index=column)
        expected = bittern.gdn_recurrent_step(**c, state=states[1], state_index=column.copy())
        assert_same_bits(got, expected)
        assert_same_bits(*states)
    c = gdn_problem(t=20)
    mask = rng.integers(0, 2, (2, 40)).astype(np.uint8)
    for cut in (mask[:, :20], mask[:, ::2], mask[::-1, 20:], np.broadcast_to(mask[:1, :20], (2, 20))):
        got = bittern.gdn_chunk_forward(**c, mask=cut)
        expected = bittern.gdn_chunk_forward(**c, mask=np.array(cut, order="C"))
        assert_same_bits(got[0], expected[0])


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_offsets_with_an_axis_more(kind):
    c = gdn_problem(b=1, t=20)
    offsets = np.array([[0, 7, 20]], kind)
    o, state = bittern.gdn_chunk_forward(**c, cu_seqlens=offsets)
    expected = bittern.gdn_chunk_forward(**c, cu_seqlens=offsets[0])
    assert_same_bits(o, expected[0])
    assert state.shape == (2, 4, 16, 8)
    assert_same_bits(state, expected[1])


def test_a_block_table_tells_the_capacity():
    signs, boundaries, levels = tables(bits=4)
    s, kv_heads, tokens, page = 2, 2, 40, 16
    block_table = np.array([[2, 0, 5], [1, 3, 4]])
    flat, paged = {}, {}
    for name in ("k", "v"):
        packed, scales = bittern.aura_encode(normal(s * kv_heads, tokens, 64), signs, boundaries, levels)
        for kind, rows in ((f"{name}_packed", packed), (f"{name}_scales", scales[..., 0].copy())):
            flat[kind] = rows
            rows = rows.reshape(s, kv_heads, *rows.shape[1:])
            pages = paged[kind] = np.zeros((7, kv_heads, page, *rows.shape[3:]), rows.dtype)
            for t in range(tokens):
                pages[block_table[:, t // page], :, t % page] = rows[:, :, t]
    fixed = {"q": normal(s, 3, 4, 64), "k_codebook": levels, "v_codebook": levels, "k_table": signs,
             "v_table": signs, "lengths": np.array([[0, 40, 0], [0, 33, 0]])}  # fmt: skip
    expected = bittern.aura_attention(**flat, **fixed)
    for more in ({}, {"capacity": 48}):
        got = bittern.aura_attention(**paged, **fixed, block_table=block_table, page_size=page, **more)
        assert_same_bits(got, expected)


def test_the_length_of_a_row_is_said_once():
    words = bittern.pack_codes(np.zeros((2, 64), np.uint8), bits=4)
    with pytest.raises(ValueError, match=r"codes: shape \[2,63\], expected \[2,64\] = \[outer_size,axis_size\]"):
        bittern.unpack_codes(words, axis_size=64, bits=4, codes=np.zeros((2, 63), np.uint8))


def test_a_size_says_where_it_is_from():
    with pytest.raises(ValueError, match=r"axis_size: 65, .*; axis_size is from x, shape \[2, 65\]"):
        bittern.quantize_per_group(normal(2, 65), 1.0, group_size=64)
    c = gdn_problem(vh=5)
    with pytest.raises(ValueError, match="value_heads: 5, .*key_heads is from q, .*value_heads is from v, shape"):
        bittern.gdn_chunk_forward(**c)
    with pytest.raises(ValueError, match="group_size: 0, expected at least 1$"):  # said
        bittern.quantize_per_group(normal(2, 64), 1.0, group_size=0)
