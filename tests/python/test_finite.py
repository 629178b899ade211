"""Numbers that are infinite or NaN, or become so in a smaller dtype: refused by every path, with the
tensor, the value and its place; --lossy clamps what is merely too large. Nothing is left behind."""

import itertools
import json

import arrays
import numpy as np
import pytest

from test_cli import COMMAND, bittern, refused
from test_quantize import DTYPES, load_numbers, weights, write_folder, write_gguf

pytestmark = pytest.mark.skipif(
    COMMAND is None, reason="the command is not built (build/release/bittern)"
)


def nothing_but(folder, *names):
    assert sorted(p.name for p in folder.iterdir()) == sorted(names)


PATHS = {
    "bits": ["--bits", 4],
    "bits gguf": ["--bits", 8, "--format", "gguf"],
    "type": ["--type", "Q8_0"],
    "type F16": ["--type", "F16"],
    "through": ["--bits", 4, "--format", "safetensors"],
    "dequantize f32": ["--dequantize", "f32"],
    "dequantize f16": ["--dequantize", "f16"],
    "dequantize gguf": ["--dequantize", "bf16", "--format", "gguf"],
    "transcode": ["--transcode"],
    "transcode gguf": ["--transcode", "--format", "gguf"],
    "target": ["--target-bpw", 8],
    "target gguf": ["--target-bpw", 9, "--format", "gguf"],
}


@pytest.mark.peer("gguf")
@pytest.mark.parametrize("name", ["norm.weight", "a.bias", "a.weight", "conv.weight"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("path", PATHS)
def test_every_path_refuses_what_is_not_finite(tmp_path, path, bad, name):
    rng = np.random.default_rng(0)
    tensors = {
        "a.weight": weights(rng, 40, 256),
        "a.bias": weights(rng, 1)[0],
        "conv.weight": weights(rng, 8, 12),
        "norm.weight": weights(rng, 1)[0],
    }
    tensors[name].reshape(-1)[-3] = bad
    tensors[name].reshape(-1)[-1] = bad
    rows = tensors[name].reshape(-1, tensors[name].shape[-1])
    flags = PATHS[path]
    if "gguf" in flags or "--type" in flags:
        source = write_gguf(tmp_path / "in.gguf", tensors)
    else:
        source = write_folder(tmp_path / "in", tensors)
    args = ("-o", tmp_path / "out", *flags, "--format", "gguf") if "--type" in flags else ("-o", tmp_path / "out", *flags)
    result = bittern("quantize", source, "--quiet", *args)
    place = f"{bad} at row {rows.shape[0] - 1}, column {rows.shape[1] - 3}"
    refused(result, 2, f"tensor {name}: holds infinities or NaN", place)
    nothing_but(tmp_path, source.name)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_quantised_model_with_a_sick_scale_is_refused(tmp_path, dtype):
    from safetensors.numpy import load_file, save_file

    source = write_folder(tmp_path / "hf", {"a.weight": weights(np.random.default_rng(1), 8, 256, dtype)})
    four = tmp_path / "four"
    assert bittern("quantize", source, "-o", four, "--bits", 4).returncode == 0
    tensors = load_file(four / "model.safetensors")
    tensors["a.scales"][5, 2] = np.inf
    save_file(tensors, four / "model.safetensors", metadata={"format": "mlx"})
    for flags in (["--transcode"], ["--dequantize", "f32"], ["--bits", 4], ["--bits", 8, "--allow-requantize"]):
        result = bittern("quantize", four, "-o", tmp_path / "out", *flags, "--quiet")
        refused(result, 2, "tensor a.weight: ", "row 5")
        nothing_but(tmp_path, "hf", "four")


@pytest.mark.peer("gguf")
def test_blocks_with_a_sick_scale_are_refused(tmp_path):
    w = weights(np.random.default_rng(1), 8, 256)
    source = write_gguf(tmp_path / "in.gguf", {"a.weight": w})
    out = tmp_path / "q.gguf"
    assert bittern("quantize", source, "-o", out, "--type", "Q8_0").returncode == 0
    data = bytearray(out.read_bytes())
    at = len(data) - 8 * 8 * 34 + 5 * 8 * 34  # row 5's first block
    data[at : at + 2] = np.float16(np.nan).tobytes()
    out.write_bytes(data)
    for flags in (["--transcode"], ["--dequantize", "f16"], ["--type", "Q8_0"]):
        result = bittern("quantize", out, "-o", tmp_path / "again.gguf", *flags, "--quiet")
        refused(result, 2, "tensor a.weight: ", "at row 5, column 0")
        nothing_but(tmp_path, "in.gguf", "q.gguf")


# ---- too large ----


def wide(value, columns=256, dtype="f32"):
    w = weights(np.random.default_rng(2), 6, columns)
    w[4, 7] = value
    w[5, 9] = -value
    return w.astype(DTYPES[dtype])


@pytest.mark.peer("gguf")
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    "flags",
    [
        ["--dequantize", "f16"],
        ["--dequantize", "f16", "--format", "mlx"],
        ["--bits", 4, "--scale-dtype", "f16"],
        ["--bits", 8, "--scale-dtype", "f16", "--format", "safetensors"],
        ["--target-bpw", 8.5, "--scale-dtype", "f16"],
    ],
)
def test_overflow_of_f16_is_refused_or_clamped(tmp_path, flags, dtype):
    source = write_folder(tmp_path / "hf", {"a.weight": wide(70144, dtype=dtype)})
    args = ("quantize", source, "-o", tmp_path / "out", *flags)
    refused(
        bittern(*args, "--quiet"), 3, "tensor a.weight: 70144 at row 4, column 7 is beyond the range of f16"
    )
    nothing_but(tmp_path, "hf")
    report = tmp_path / "report.json"
    result = bittern(*args, "--lossy", "--json", report)
    assert result.returncode == 0, result
    assert "note: 2 numbers were too large" in result.stdout
    assert json.loads(report.read_text())["saturated"] == 2
    back = tmp_path / "back"
    assert bittern("quantize", tmp_path / "out", "-o", back, "--dequantize", "f32").returncode == 0
    y = load_numbers(back)["a.weight"]
    assert np.isfinite(y).all()
    # The largest that survives decoding: code * scale + bias is rounded, too.
    assert y[4, 7] == pytest.approx(65504, rel=0.1) and y[5, 9] == pytest.approx(-65504, rel=0.1)


def test_the_limits_themselves(tmp_path):
    """65519.996 rounds to 65504, 65520 to infinity; f32's largest is beyond bf16. Small numbers may
    become zero."""
    below = np.nextafter(np.float32(65520), np.float32(0))
    for value, dtype, fine in (
        (below, "f16", True),
        (65520, "f16", False),
        (np.finfo(np.float32).max, "bf16", False),
        (3.3895314e38, "bf16", True),
        (1e-30, "f16", True),
        (1e-45, "bf16", True),
    ):
        folder = tmp_path / f"{value}{dtype}"
        source = write_folder(folder / "hf", {"a.weight": wide(value), "norm.weight": wide(value)[4]})
        result = bittern("quantize", source, "-o", folder / "out", "--dequantize", dtype, "--quiet")
        if fine:
            assert result.returncode == 0, result
            assert np.isfinite(load_numbers(folder / "out")["a.weight"]).all()
        else:
            refused(result, 3, "is beyond the range of " + dtype)


@pytest.mark.peer("gguf")
def test_gguf_types_refuse_or_clamp_what_their_scales_cannot_hold(tmp_path):
    import gguf

    for type, value in itertools.product(
        ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16"], [7e4, 1e6, 1e9, 3e38]
    ):
        folder = tmp_path / f"{type}{value}"
        folder.mkdir()
        w = wide(value)
        source = write_gguf(folder / "in.gguf", {"a.weight": w})
        args = ("quantize", source, "-o", folder / "out.gguf", "--type", type)
        result = bittern(*args, "--quiet")
        if result.returncode != 0:
            refused(result, 3, "tensor a.weight: ", f"{value:.6g} at row 4, column 7 is beyond the range")
            nothing_but(folder, "in.gguf")
            assert bittern(*args, "--lossy").returncode == 0
        tensor = gguf.GGUFReader(folder / "out.gguf").tensors[0]
        y = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(w.shape)
        assert np.isfinite(y).all(), (type, value)
        assert result.returncode != 0 or y[4, 7] == pytest.approx(value, rel=0.2), (type, value)
        assert result.returncode == 0 or y[4, 7] >= 60000
        assert value < 1e8 or result.returncode == 3


@pytest.mark.peer("gguf")
@pytest.mark.parametrize("dtype,type", [("f32", "F32"), ("bf16", "BF16")])
def test_the_fallback_to_f16_becomes_one_that_holds_the_numbers(tmp_path, dtype, type):
    import gguf

    fine, large = wide(60000, 20, dtype), wide(1e6, 20, dtype)
    if dtype == "bf16":
        # gguf writes bf16 as raw bytes.
        named = {"fine.weight": fine, "large.weight": large}
        source = arrays.write_gguf(
            tmp_path / "in.gguf", {n: (w.view(np.uint8), "BF16") for n, w in named.items()}
        )
    else:
        source = write_gguf(tmp_path / "in.gguf", {"fine.weight": fine, "large.weight": large})
    result = bittern("quantize", source, "-o", tmp_path / "out.gguf", "--type", "Q4_K")
    assert result.returncode == 0, result
    assert f"{type} in place of Q4_K" in result.stdout and "F16 in place of Q4_K" in result.stdout
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert types == {"fine.weight": "F16", "large.weight": type}


def test_transcoding_to_f16_scales(tmp_path):
    w = weights(np.random.default_rng(3), 4, 64)
    w[2] *= np.float32(1e7)
    source = write_folder(tmp_path / "hf", {"a.weight": w})
    eight = tmp_path / "eight"
    assert bittern("quantize", source, "-o", eight, "--bits", 8).returncode == 0
    args = ("quantize", eight, "-o", tmp_path / "out", "--transcode", "--scale-dtype", "f16")
    refused(bittern(*args, "--quiet"), 3, "tensor a.weight: ", "of row 2 is beyond the range of f16")
    nothing_but(tmp_path, "hf", "eight")
    result = bittern(*args, "--lossy")
    assert result.returncode == 0 and "too large" in result.stdout, result


@pytest.mark.peer("mlx")
@pytest.mark.parametrize("scale", [1e4, 6e4, 1e7])
@pytest.mark.parametrize("bits,group", [(8, 32), (4, 64), (2, 128), (3, 32)])
def test_transcoding_to_f16_scales_leaves_no_infinity(tmp_path, bits, group, scale):
    """Scales and biases that f16 holds may decode to infinities, and a bias that is clamped moves
    every weight of its group. Other rows keep their codes."""
    from test_quantize import mlx_numbers

    w = weights(np.random.default_rng(3), 6, 256)
    w[2] *= np.float32(scale / np.abs(w[2]).max())
    source = write_folder(tmp_path / "hf", {"a.weight": w})
    exact, out = tmp_path / "exact", tmp_path / "out"
    flags = ["--bits", bits, "--group-size", group]
    assert bittern("quantize", source, "-o", exact, *flags).returncode == 0
    args = ("quantize", exact, "--transcode", "--scale-dtype", "f16", "--lossy")
    result = bittern(*args, "-o", out)
    assert result.returncode == 0, result
    was, now = mlx_numbers(exact, "a", bits, group), mlx_numbers(out, "a", bits, group)
    assert np.isfinite(now).all()
    others = [0, 1, 3, 4, 5]
    np.testing.assert_allclose(now[others], was[others], rtol=0, atol=0.02)
    # A group of 2 or 3 bits from -65504 to 65504 would overflow as MLX multiplies.
    inside = np.clip(was[2], -65504, 65504)
    step = (inside.max() - inside.min()) / (2**bits - 1)
    assert np.abs(now[2] - inside).max() <= max(step, 0.51 * 65504 if scale > 3e4 else 0)
    assert bittern(*args, "-o", tmp_path / "again", "--threads", 1).returncode == 0
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    back = bittern("quantize", out, "-o", tmp_path / "back", "--dequantize", "f32")
    assert back.returncode == 0, back


# ---- told by inspect --compare ----


def test_the_summary_of_a_comparison_names_what_is_not_finite(tmp_path):
    rng = np.random.default_rng(4)
    tensors = {f"t{i}.weight": weights(rng, 4, 64) for i in range(4)}
    a = write_folder(tmp_path / "a", tensors)
    sick = {name: t.copy() for name, t in tensors.items()}
    sick["t1.weight"][:] = np.inf
    sick["t3.weight"][2, 5] = np.nan
    b = write_folder(tmp_path / "b", sick)
    report = tmp_path / "report.json"
    for one, other, texts in (
        (a, b, ["t1.weight: 0 in the model, 256 in the other", "t3.weight: 0 in the model, 1 in the other"]),
        (b, b, ["t1.weight: 256 in the model, 256 in the other"]),
    ):
        result = bittern("inspect", one, "--compare", other, "--json", report, "--force")
        summary = result.stdout[result.stdout.index("tensors compared") :]
        assert "2 tensors hold infinities or NaN, which these totals leave out:" in summary
        for text in texts:
            assert text in summary
        told = json.loads(report.read_text())["comparison"]
        assert told["not_finite_tensors"] == ["t1.weight", "t3.weight"]
    result = bittern("inspect", a, "--compare", a)
    assert "infinities" not in result.stdout


def test_names_do_not_write_to_the_terminal(tmp_path):
    """An escape sequence or a newline in a tensor's name stays out of the error."""
    sick = {"a\x1b[31m\n.weight": np.full((4, 64), np.nan, np.float32)}
    source = write_folder(tmp_path / "hf", sick)
    result = bittern("quantize", source, "-o", tmp_path / "out", "--bits", 4)
    refused(result, 2, "a?[31m?.weight: holds infinities or NaN")
    assert "\x1b" not in result.stderr


F64_PATHS = {
    "bits": ["--bits", 4],
    "bits bf16": ["--bits", 4, "--scale-dtype", "bf16"],
    "type": ["--type", "Q8_0", "--format", "gguf"],
    "K type": ["--type", "Q4_K", "--format", "gguf"],
    "F16": ["--type", "F16", "--format", "gguf"],
    "through": ["--bits", 4, "--format", "safetensors"],
    "f32": ["--dequantize", "f32"],
    "f16": ["--dequantize", "f16"],
    "bf16 gguf": ["--dequantize", "bf16", "--format", "gguf"],
    "dtype": ["--dtype", "f32", "--format", "safetensors"],
    "transcode": ["--transcode"],
    "target": ["--target-bpw", 8],
    "target gguf": ["--target-bpw", 9, "--format", "gguf"],
}


@pytest.mark.peer("safetensors", "gguf")
@pytest.mark.parametrize("name", ["a.weight", "a.bias"])
@pytest.mark.parametrize("path", F64_PATHS)
def test_f64_that_f32_cannot_hold_is_refused_or_clamped(tmp_path, path, name):
    """1e300 is no infinity: the message tells the value, and --lossy clamps it as it clamps for f16."""
    import gguf

    rng = np.random.default_rng(0)
    tensors = {"a.weight": weights(rng, 8, 256).astype(np.float64), "a.bias": weights(rng, 1)[0].astype(np.float64)}
    rows = tensors[name].reshape(-1, 256)
    rows[-1, 5], rows[-1, 9] = 1e300, -1e39
    flags = F64_PATHS[path]
    if "gguf" in flags:
        source = write_gguf(tmp_path / "in.gguf", tensors)
    else:
        source = write_folder(tmp_path / "in", tensors)
    out = tmp_path / ("out.gguf" if "gguf" in flags else "out")
    args = ("quantize", source, "-o", out, *flags)
    if path == "through" and name == "a.bias":  # F64 stays F64 there
        result = bittern(*args)
        place = f"1e+300 at row {rows.shape[0] - 1}, column 5 is beyond the range of f32: kept as F64"
        assert result.returncode == 0 and place in result.stdout, result
        return
    place = f"tensor {name}: 1e+300 at row {rows.shape[0] - 1}, column 5 is beyond the range of f32"
    refused(bittern(*args, "--quiet"), 3, place, "--lossy")
    nothing_but(tmp_path, source.name)
    report = tmp_path / "report.json"
    result = bittern(*args, "--lossy", "--json", report)
    assert result.returncode == 0, result
    assert json.loads(report.read_text())["saturated"] >= 2
    if "gguf" in flags:
        tensor = next(t for t in gguf.GGUFReader(out).tensors if t.name == name)
        y = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(rows.shape)
    else:
        back = tmp_path / "back"
        assert bittern("quantize", out, "-o", back, "--dequantize", "f32", "--lossy").returncode == 0
        y = load_numbers(back)[name].reshape(rows.shape)
    assert np.isfinite(y).all() and y[-1, 5] >= 60000 and y[-1, 9] <= -60000


@pytest.mark.peer("safetensors")
def test_f64_that_f32_cannot_hold_is_not_compared_as_if_it_could(tmp_path):
    w = np.ones((2, 64))
    w[1, 3] = 1e300
    a = write_folder(tmp_path / "a", {"a.weight": w})
    b = write_folder(tmp_path / "b", {"a.weight": np.full((2, 64), np.finfo(np.float32).max)})
    result = bittern("inspect", a, "--compare", b)
    assert "1e+300 at row 1, column 3 is beyond the range of f32, in which numbers are compared" in result.stdout


@pytest.mark.peer("gguf")
@pytest.mark.parametrize(
    "type,steps",
    [("Q4_0", 8), ("Q4_1", 1), ("Q5_0", 16), ("Q5_1", 1), ("Q8_0", 127), ("Q2_K", 15), ("Q3_K", 64)]
    + [("Q4_K", 63), ("Q5_K", 63), ("Q6_K", 2048)],
)
def test_the_limit_of_a_block_type(tmp_path, type, steps):
    """A weight is held to within a step of its group, or refused: none is clamped in silence."""
    import gguf

    limit = np.float32(65504) * steps
    for value, fine in ((limit, True), (np.nextafter(limit, np.float32(np.inf)), False)):
        folder = tmp_path / str(fine)
        folder.mkdir()
        w = np.zeros((4, 256), np.float32)
        w[2, 77], w[3, 200] = value, -value
        source = write_gguf(folder / "in.gguf", {"a.weight": w})
        args = ("quantize", source, "-o", folder / "out.gguf", "--type", type, "--pure")
        result = bittern(*args, "--quiet")
        if not fine:
            refused(result, 3, "at row 2, column 77 is beyond the range of " + type)
            assert bittern(*args, "--lossy").returncode == 0
        else:
            assert result.returncode == 0, result
        tensor = gguf.GGUFReader(folder / "out.gguf").tensors[0]
        y = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(w.shape)
        assert np.abs(y[[2, 3], [77, 200]] / w[[2, 3], [77, 200]] - 1).max() < 0.01, (type, y[[2, 3], [77, 200]], limit)
