"""bittern quantize: what it writes, judged by mlx, gguf and safetensors; what it refuses; that it
resumes; that memory does not follow the model. No timing is judged."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time

import arrays
import numpy as np
import pytest

from test_cli import COMMAND, bittern, refused

pytestmark = pytest.mark.skipif(
    COMMAND is None, reason="the command is not built (build/release/bittern)"
)
ml_dtypes = pytest.importorskip("ml_dtypes")
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def write_folder(folder, tensors, config=None, others=None):
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "nobodys"}))
    for name, text in (others or {"tokenizer.json": "{ }\n"}).items():
        (folder / name).write_text(text)
    return folder


def weights(rng, rows=48, columns=256, dtype="f32"):
    return rng.standard_normal((rows, columns)).astype(np.float32).astype(DTYPES[dtype])


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(1)
    tensors = {
        f"model.layers.{layer}.mlp.{name}.weight": weights(rng)
        for layer in range(4)
        for name in ("up_proj", "gate_proj")
    }
    tensors["model.embed_tokens.weight"] = weights(rng, 96)
    tensors["model.norm.weight"] = weights(rng, 1)[0]
    tensors["model.odd.weight"] = weights(rng, 4, 100)
    return write_folder(tmp_path / "hf", tensors)


def load(path):
    """All tensors of a folder."""
    from safetensors.numpy import load_file

    return load_file(path / "model.safetensors")


def load_numbers(path):
    return {name: t.astype(np.float32) for name, t in load(path).items()}


def write_gguf(path, tensors, **strings):
    def describe(writer):
        for key, value in strings.items():
            writer.add_string(f"general.{key}", value)

    return arrays.write_gguf(path, tensors, describe=describe)


def mlx_numbers(path, module, bits, group):
    import mlx.core as mx

    t = mx.load(str(path / "model.safetensors"))
    y = mx.dequantize(
        t[f"{module}.weight"], t[f"{module}.scales"], t[f"{module}.biases"], group, bits
    )
    return np.array(y.astype(mx.float32))


# ---- what is written ----


@pytest.mark.peer("mlx", "safetensors")
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_mlx_rule_gives_what_mlx_gives(tmp_path, bits, group, dtype):
    import mlx.core as mx

    w = weights(np.random.default_rng(bits * group), 24, 384, dtype)
    folder = write_folder(tmp_path / "hf", {"a.weight": w})
    out = tmp_path / "out"
    result = bittern(
        "quantize", folder, "-o", out, "--bits", bits, "--group-size", group, "--method", "mlx"
    )
    assert result.returncode == 0, result
    ours = mx.load(str(out / "model.safetensors"))
    mx_w = mx.array(w.astype(np.float32)).astype(
        {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}[dtype]
    )
    for part, theirs in zip(("weight", "scales", "biases"), mx.quantize(mx_w, group, bits)):
        mine = ours[f"a.{part}"]
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert np.array_equal(np.array(mine.view(mx.uint8)), np.array(theirs.view(mx.uint8)))
    config = json.loads((out / "config.json").read_text())
    assert config["quantization"] == {"group_size": group, "bits": bits, "mode": "affine"}
    assert config["quantization_config"] == config["quantization"]
    assert (out / "tokenizer.json").read_text() == "{ }\n"


@pytest.mark.peer("mlx", "safetensors")
def test_every_tensor_has_a_fate_and_the_index_knows_it(folder, tmp_path):
    out = tmp_path / "out"
    result = bittern("quantize", folder, "-o", out, "--bits", 4)
    assert result.returncode == 0, result
    assert "rows of 100 are no multiple of 64: left as it is: model.odd.weight" in result.stdout
    tensors = load(out)
    assert tensors["model.odd.weight"].dtype == np.float32
    assert tensors["model.norm.weight"].dtype == np.float32
    assert tensors["model.embed_tokens.weight"].dtype == np.uint32
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == sorted(tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert index["metadata"]["total_parameters"] == sum(t.size for t in load(folder).values())


@pytest.mark.peer("mlx")
def test_lsq_loses_less_than_minmax(folder, tmp_path):
    error = {}
    name = "model.embed_tokens"
    truth = load(folder)[f"{name}.weight"]
    for method in ("minmax", "mlx", "lsq"):
        out = tmp_path / method
        assert bittern("quantize", folder, "-o", out, "--bits", 3, "--method", method).returncode == 0
        error[method] = float(np.square(mlx_numbers(out, name, 3, 64) - truth).sum())
    assert error["lsq"] < 0.9 * error["minmax"]
    assert error["lsq"] < error["mlx"]


@pytest.mark.peer("safetensors")
def test_the_safetensors_format_holds_the_dequantised_numbers(folder, tmp_path):
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    for out, form in ((plain, "safetensors"), (packed, "mlx")):
        assert bittern("quantize", folder, "-o", out, "--bits", 4, "--format", form).returncode == 0
    ours = load(plain)
    for name in ("model.embed_tokens", "model.layers.0.mlp.up_proj"):
        assert np.array_equal(ours[f"{name}.weight"], mlx_numbers(packed, name, 4, 64))
    assert "quantization" not in json.loads((plain / "config.json").read_text())


def test_threads_change_nothing(tmp_path):
    rng = np.random.default_rng(2)
    # Of less than a row for each thread; of uneven runs; of many runs.
    shapes = {"few": (3, 256), "some": (1000, 192), "many": (5000, 320)}
    tensors = {f"{name}.weight": weights(rng, *shape) for name, shape in shapes.items()}
    folder = write_folder(tmp_path / "hf", tensors)
    outs = []
    for threads in (1, 2, 7):
        out = tmp_path / f"out{threads}"
        result = bittern("quantize", folder, "-o", out, "--bits", 4, "--threads", threads)
        assert result.returncode == 0
        outs.append({p.name: p.read_bytes() for p in out.iterdir()})
    assert outs[0] == outs[1] == outs[2]


def test_overrides_and_policy(folder, tmp_path):
    policy = tmp_path / "policy.json"
    policy.write_text(
        json.dumps(
            {
                "bits": 3,
                "group_size": 32,
                "rules": [
                    {"match": r"layers\.0\.", "bits": 8},
                    {"match": "embed", "keep": True},
                    {"match": "gate_proj", "group_size": 128},
                ],
            }
        )
    )
    out, report = tmp_path / "out", tmp_path / "report.json"
    result = bittern(
        "quantize", folder, "-o", out, "--policy", policy,
        "--override", r"layers\.1.*up=6:64", "--json", report,
    )  # fmt: skip
    assert result.returncode == 0, result
    to = {t["name"]: t["to"] for t in json.loads(report.read_text())["tensors"]}
    assert to["model.layers.0.mlp.gate_proj.weight"].startswith("8 bit, group 32")
    assert to["model.layers.1.mlp.up_proj.weight"].startswith("6 bit, group 64")
    assert to["model.layers.2.mlp.gate_proj.weight"].startswith("3 bit, group 128")
    assert to["model.layers.2.mlp.up_proj.weight"].startswith("3 bit, group 32")
    assert to["model.embed_tokens.weight"] == "F32"
    config = json.loads((out / "config.json").read_text())["quantization"]
    assert (config["bits"], config["group_size"]) == (3, 32) or "model.layers.2.mlp.up_proj" in config
    assert config["model.layers.0.mlp.up_proj"] == {"group_size": 32, "bits": 8, "mode": "affine"}


def test_target_bits_are_met_and_spent_where_they_help(tmp_path):
    rng = np.random.default_rng(3)
    tensors = {f"model.layers.{i}.a.weight": weights(rng, 64, 512, "bf16") for i in range(6)}
    # Two values a group: two bits lose nothing, so more would be wasted.
    easy = np.sign(rng.standard_normal((64, 512))).astype(np.float32).astype(DTYPES["bf16"])
    tensors["model.layers.3.easy.weight"] = easy
    folder = write_folder(tmp_path / "hf", tensors)
    report = tmp_path / "report.json"
    result = bittern("quantize", folder, "--dry-run", "--target-bpw", 4.5, "--group-size", 64, "--json", report)
    assert result.returncode == 0, result
    told = json.loads(report.read_text())
    assert 4.0 < told["bits_per_weight"] <= 4.5
    to = {t["name"]: t["to"] for t in told["tensors"]}
    assert to["model.layers.3.easy.weight"].startswith("2 bit")
    # The others are alike: four bits for all, and the room that is left for as many as it holds.
    assert sorted(int(to[f"model.layers.{i}.a.weight"][0]) for i in range(6)) == [4, 4, 4, 4, 5, 5]
    refused(bittern("quantize", folder, "--dry-run", "--target-bpw", 1.5), 2, "--target-bpw 1.5", "the smallest possible is")


def test_dry_run_writes_nothing(folder, tmp_path):
    result = bittern("quantize", folder, "-o", tmp_path / "out", "--bits", 4, "--dry-run")
    assert result.returncode == 0
    for name in load(folder):
        assert name in result.stdout
    assert "bits per weight" in result.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


# ---- what is refused ----


def test_wrong_flags(folder, tmp_path):
    out = tmp_path / "out"

    def wrong(*flags, status=2):
        result = bittern("quantize", folder, "-o", out, *flags)
        assert not out.exists()
        return result, status

    refused(*wrong(), "nothing asked for", "--bits")
    refused(*wrong("--bits", 7), "--bits: 7, expected 2, 3, 4, 5, 6 or 8")
    refused(*wrong("--bits", 4, "--group-size", 48), "--group-size: 48, expected 32, 64 or 128")
    refused(*wrong("--bits", 7, "--format", "gguf"), "--bits: 7, expected 2, 3, 4, 5, 6 or 8")
    refused(*wrong("--bits", 2, "--group-size", 64, "--format", "gguf"), "--group-size: 64", "expected 32")
    refused(*wrong("--type", "MXFP4", "--format", "gguf", status=3), "MXFP4: not written", "Q2_K Q3_K")
    refused(*wrong("--bits", 4, "--type", "Q4_K", "--format", "gguf"), "--type and --bits")
    refused(*wrong("--type", "Q9_K"), "--type: Q9_K", "Q4_K")
    refused(*wrong("--type", "Q4_K", "--format", "mlx"), "--type Q4_K", "--format gguf")
    refused(*wrong("--bits", 4, "--method", "best"), "--method: best", "minmax, mlx, lsq or gptq")
    refused(*wrong("--bits", 4, "--override", "a(=8"), "a(: RE2 does not accept this pattern")
    refused(*wrong("--bits", 4, "--override", "a=eight"), "--override: a=eight", "REGEX=BITS")
    refused(*wrong("--bits", 4, "--dequantize", "f32"), "exclude each other")
    refused(*wrong("--bits", 4, "--policy", tmp_path / "none", status=4), "no such file")
    refused(*wrong("--bits", 4, "--imatrix", folder / "model.safetensors"), "model.safetensors")
    refused(bittern("quantize", tmp_path / "none", "-o", out, "--bits", 4), 4, "none: no such file")
    refused(bittern("quantize", folder, "--bits", 4), 2, "-o: not given")
    refused(*wrong("--bits", 4, "--format", "gguf", status=3), "nobodys")


@pytest.mark.parametrize("rows", [48, 8000])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(tmp_path, bad, rows):
    w = weights(np.random.default_rng(0), rows)
    w[-1, -1] = bad
    folder = write_folder(tmp_path / "hf", {"fine.weight": w[:8], "sick.weight": w})
    for args in (["--bits", 4], ["--bits", 2, "--method", "lsq"], ["--bits", 8, "--format", "safetensors"]):
        result = bittern("quantize", folder, "-o", tmp_path / "out", "--quiet", *args)
        refused(result, 2, "sick.weight: holds infinities or NaN, expected finite numbers")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    model = tmp_path / "model.gguf"
    write_gguf(model, {"sick.weight": w})
    args = ("--format", "gguf", "--type", "Q8_0")
    refused(bittern("quantize", model, "-o", tmp_path / "out", *args), 2, "sick.weight: holds inf")


def test_output_that_exists(folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    args = ("quantize", folder, "-o", out, "--bits", 4)
    refused(bittern(*args), 2, "out: exists", "--force")
    refused(bittern(*args, "--force"), 2, "bittern did not write")
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    assert bittern(*args, "--force").returncode == 0
    assert bittern(*args, "--force").returncode == 0
    refused(bittern(*args), 2, "out: exists")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out"]


def test_a_quantised_model_is_not_quantised_by_accident(folder, tmp_path):
    once = tmp_path / "once"
    assert bittern("quantize", folder, "-o", once, "--bits", 4).returncode == 0
    args = ("quantize", once, "-o", tmp_path / "twice", "--bits", 3, "--quiet")
    refused(bittern(*args), 2, "quantised already (4 bit, group 64, F32)", "--allow-requantize")
    assert bittern(*args, "--allow-requantize").returncode == 0


@pytest.mark.peer("gguf")
def test_an_importance_matrix_weighs_lsq(folder, tmp_path):
    import gguf

    w = weights(np.random.default_rng(5), 16, 256)
    source = write_gguf(tmp_path / "in.gguf", {"blk.0.a.weight": w})
    importance = np.zeros(256, np.float32)
    importance[::2] = 1
    imatrix = write_gguf(
        tmp_path / "imatrix.gguf",
        {
            "blk.0.a.weight.in_sum2": importance * 7,
            "blk.0.a.weight.counts": np.array([7], np.float32),
        },
        type="imatrix",
    )

    def error(*flags):
        out = tmp_path / f"out{len(flags)}.gguf"
        result = bittern("quantize", source, "-o", out, "--type", "Q4_1", "--method", "lsq", *flags)
        assert result.returncode == 0, result
        tensor = gguf.GGUFReader(out).tensors[0]
        y = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(w.shape)
        return float((np.square(y - w) * importance).sum())

    assert error("--imatrix", imatrix) < 0.97 * error()


# ---- killed, resumed, out of room ----


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    rng = np.random.default_rng(2)
    tensors = {f"layers.{i}.a.weight": weights(rng, 1024, 1024, "bf16") for i in range(24)}
    return write_folder(tmp_path_factory.mktemp("larger") / "hf", tensors)


def contents(path):
    return {p.name: p.read_bytes() for p in (path.iterdir() if path.is_dir() else [path])}


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@pytest.mark.peer("gguf")
@pytest.mark.parametrize("form", ["mlx", "safetensors", "gguf"])
def test_killed_at_any_moment_a_rerun_ends_the_same(larger, tmp_path, form):
    if form == "gguf":
        larger = write_gguf(tmp_path / "larger.gguf", load_numbers(larger))
    args = ["quantize", larger, "--bits", 8, "--format", form]
    whole = tmp_path / "whole" / "out"
    whole.parent.mkdir()
    start = time.monotonic()
    assert bittern(*args, "-o", whole).returncode == 0
    took = time.monotonic() - start
    expected = contents(whole)
    moments = random.Random(4)
    out = tmp_path / "out"
    resumed = 0
    for _ in range(20):
        for name in ("out", "out.partial", "out.partial.journal"):
            remove(tmp_path / name)
        process = subprocess.Popen([COMMAND, *map(str, args), "-o", str(out), "--quiet"])
        time.sleep(moments.random() * took)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if not out.exists():
            resumed += (tmp_path / "out.partial").exists()
            result = bittern(*args, "-o", out, "--resume")
            assert result.returncode == 0, result
        assert contents(out) == expected
        assert not (tmp_path / "out.partial").exists()
    assert resumed > 0


def test_a_partial_of_something_else_is_refused(larger, tmp_path):
    out = tmp_path / "out"
    args = ["quantize", larger, "-o", out, "--quiet"]
    process = subprocess.Popen([COMMAND, *map(str, args), "--bits", "4"])
    for _ in range(2000):
        journal = tmp_path / "out.partial.journal"
        if journal.exists() and journal.read_bytes().count(b"\n") > 2:
            break
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / "out.partial").exists()
    refused(bittern(*args, "--bits", 4), 2, "out.partial: left by a run that was stopped", "--resume")
    refused(bittern(*args, "--bits", 3, "--resume"), 2, "other options", "--force")
    assert bittern(*args, "--bits", 4, "--resume").returncode == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_no_room_keeps_what_there_is(larger, tmp_path):
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))

    out = tmp_path / "out"
    args = [COMMAND, "quantize", str(larger), "-o", str(out), "--bits", "4"]
    result = subprocess.run(args, capture_output=True, text=True, preexec_fn=limit)
    assert result.returncode == 1 and "out.partial/model.safetensors: cannot write" in result.stderr
    assert not out.exists() and (tmp_path / "out.partial").exists()
    assert subprocess.run([*args, "--resume"]).returncode == 0
    reference = tmp_path / "reference"
    assert bittern("quantize", larger, "-o", reference, "--bits", 4).returncode == 0
    assert (out / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes()


# ---- memory ----


def sparse_model(folder, gigabytes, tensors=8):
    """A model of zeros that takes no room on the disk."""
    folder.mkdir()
    rows, columns = (gigabytes << 30) // tensors // (4 * 4096), 4096
    size = rows * columns * 4
    header = {
        f"layers.{i}.a.weight": {
            "dtype": "F32",
            "shape": [rows, columns],
            "data_offsets": [i * size, (i + 1) * size],
        }
        for i in range(tensors)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + tensors * size)
    (folder / "config.json").write_text('{"model_type": "nobodys"}')
    return folder


def quantize_within(folder, out, data_bytes):
    """RLIMIT_DATA counts every private writable page: heap, stacks, anonymous maps."""

    def limit():
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))

    return subprocess.run(
        [COMMAND, "quantize", str(folder), "-o", str(out), "--bits", "4", "--method", "mlx", "--threads", "2"],
        capture_output=True,
        text=True,
        preexec_fn=limit,
    )


def test_two_gigabytes_in_a_quarter_of_one(tmp_path):
    if shutil.disk_usage(tmp_path).free < 2 << 30:
        pytest.skip("less than 2 GiB free on the disk")
    folder = sparse_model(tmp_path / "hf", 2)
    result = quantize_within(folder, tmp_path / "out", 256 << 20)
    assert result.returncode == 0, result


@pytest.mark.large
def test_twenty_gigabytes_in_a_quarter_of_one(tmp_path):
    if shutil.disk_usage(tmp_path).free < 8 << 30:
        pytest.skip("less than 8 GiB free on the disk")
    folder = sparse_model(tmp_path / "hf", 20, 4)
    result = quantize_within(folder, tmp_path / "out", 256 << 20)
    assert result.returncode == 0, result
