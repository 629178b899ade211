"""bittern quantize --target-bpw: never above the target, never more error for more bits, never worse
than one number of bits or one type for all tensors. Judged by bittern inspect --compare."""

import json

import numpy as np
import pytest

from test_cli import COMMAND, bittern, refused
from test_quantize import weights, write_folder, write_gguf

pytestmark = pytest.mark.skipif(
    COMMAND is None, reason="the command is not built (build/release/bittern)"
)


class Sizes:
    """Makes outputs of one source and tells their bits per weight and relative error."""

    def __init__(self, source, folder, *flags):
        self.source, self.folder, self.flags, self.made = source, folder, flags, 0

    def __call__(self, *flags):
        self.made += 1
        out = self.folder / f"out{self.made}"
        if "gguf" in self.flags:
            out = out.with_suffix(".gguf")
        report = self.folder / "report.json"
        args = (*self.flags, *flags, "--json", report, "--force")
        result = bittern("quantize", self.source, "-o", out, *args)
        assert result.returncode == 0, result
        told = json.loads(report.read_text())
        # What the summary says is what the file has.
        assert f"{told['bits_per_weight']:.3f} bits per weight" in result.stdout
        assert told["bits_per_weight"] == pytest.approx(
            8 * sum(t["bytes"] for t in told["tensors"]) / told["weights"]
        )
        compared = self.folder / "compared.json"
        result = bittern("inspect", self.source, "--compare", out, "--json", compared, "--force")
        assert result.returncode == 0, result
        error = json.loads(compared.read_text())["comparison"]["relative_error"]
        return told["bits_per_weight"], error


def check_sweep(sizes, targets, uniforms):
    """Monotone over the targets and, at the size of each uniform choice, no worse than it."""
    points = [(f"--target-bpw {t}", t, *sizes("--target-bpw", t)) for t in targets]
    for name, target, bits, _ in points:
        assert bits <= target, name
    plain = [(" ".join(map(str, flags)), *sizes(*flags)) for flags in uniforms]
    for name, bits, error in plain:
        reached, ours = sizes("--target-bpw", repr(bits))
        points.append((f"at the size of {name}", bits, reached, ours))
        assert reached <= bits, name
        assert ours <= error * (1 + 1e-9), (name, error, ours)
    points.sort(key=lambda p: p[1])
    for (a, _, _, before), (b, _, _, after) in zip(points, points[1:]):
        assert after <= before * (1 + 1e-9), (a, before, b, after)
    # Any target is at least as good as every uniform choice that is no larger.
    for name, bits, error in plain:
        for other, target, _, ours in points:
            assert target < bits or ours <= error * (1 + 1e-9), (name, error, other, ours)


@pytest.fixture
def uneven(tmp_path):
    """Tensors of very different sizes and scales; rows that hold no block of 256 or of 32."""
    rng = np.random.default_rng(5)
    tensors = {
        f"model.layers.{i}.{name}.weight": weights(rng, rows, columns) * np.float32(10.0 ** rng.uniform(-2, 0.5))
        for i in range(4)
        for name, rows, columns in (("a", 16, 256), ("b", 64, 192), ("c", 96, 512))
    }  # fmt: skip
    tensors["model.embed_tokens.weight"] = weights(rng, 512, 256) ** 3
    tensors["model.norm.weight"] = weights(rng, 1)[0]
    tensors["model.odd.weight"] = weights(rng, 4, 100)
    return tensors


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("format", ["mlx", "safetensors"])
def test_folders(uneven, tmp_path, group, format):
    source = write_folder(tmp_path / "hf", uneven)
    sizes = Sizes(source, tmp_path, "--format", format, "--group-size", group)
    if format == "safetensors":
        errors = [sizes("--target-bpw", t)[1] for t in np.arange(4.1, 10.2, 0.6)]
        assert all(b <= a * (1 + 1e-9) for a, b in zip(errors, errors[1:]))
        return
    check_sweep(sizes, np.arange(4.1, 10.2, 0.4), [("--bits", b) for b in (2, 3, 4, 5, 6, 8)])


def test_groups_are_chosen_where_none_is_asked_for(uneven, tmp_path):
    """No worse than any --bits with any --group-size, tensors included that a group leaves plain."""
    source = write_folder(tmp_path / "hf", uneven)
    sizes = Sizes(source, tmp_path)
    uniforms = [("--bits", b, "--group-size", g) for b in (2, 4, 6, 8) for g in (32, 64, 128)]
    check_sweep(sizes, np.arange(4.1, 10.2, 1.2), uniforms)
    # A group that was asked for stays.
    report = tmp_path / "report.json"
    args = ("--dry-run", "--target-bpw", 6, "--group-size", 64, "--json", report, "--force")
    assert bittern("quantize", source, *args).returncode == 0
    told = json.loads(report.read_text())["tensors"]
    assert all("group 64" in t["to"] for t in told if t["way"] == "quantised")


@pytest.mark.peer("gguf")
def test_gguf(uneven, tmp_path):
    source = write_gguf(tmp_path / "source.gguf", uneven)
    sizes = Sizes(source, tmp_path, "--format", "gguf")
    types = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16"]
    check_sweep(sizes, [5, 5.5, 6, 6.2, 7, 8, 9, 12, 20], [("--type", t) for t in types])


@pytest.mark.peer("gguf")
@pytest.mark.parametrize("shape", [{"layers": 4, "width": 96}, {"layers": 3, "tied": True}])
def test_no_worse_than_a_mix(tmp_path, shape):
    """Which gives some tensors more bits, and so may lie between two answers of the target's own."""
    from test_recipes import tiny_gguf

    source = tiny_gguf(tmp_path / "source.gguf", **shape)
    sizes = Sizes(source, tmp_path, "--format", "gguf")
    mixes = ["Q2_K", "Q3_K_M", "Q3_K_L", "Q4_0", "Q4_1", "Q4_K_S", "Q4_K_M", "Q5_0", "Q5_K_S", "Q5_K_M"]
    check_sweep(sizes, [7, 8, 9], [("--type", mix) for mix in mixes])


def test_the_ends_of_the_range(uneven, tmp_path):
    source = write_folder(tmp_path / "hf", uneven)
    report = tmp_path / "report.json"

    def planned(target, *flags):
        args = ("--dry-run", "--target-bpw", target, *flags, "--json", report, "--force")
        return bittern("quantize", source, *args)

    refused(planned(1.5), 2, "--target-bpw 1.5", "the smallest possible is ")
    least = planned(1.5).stderr.split("the smallest possible is ")[1].split()[0]
    assert planned(least).returncode == 0  # what is printed can be asked for
    assert json.loads(report.read_text())["bits_per_weight"] == pytest.approx(float(least), abs=1e-4)
    result = planned(32)
    assert "every tensor has its best choice at" in result.stdout
    told = json.loads(report.read_text())
    assert all(t["to"].startswith("8 bit") for t in told["tensors"] if t["way"] == "quantised")


def test_groups_by_rule_take_part_and_rules_with_bits_do_not(uneven, tmp_path):
    source = write_folder(tmp_path / "hf", uneven)
    policy = tmp_path / "policy.json"
    policy.write_text('{"rules": [{"match": "\\\\.c\\\\.", "group_size": 32}, {"match": "\\\\.a\\\\.", "bits": 8}]}')
    report = tmp_path / "report.json"
    result = bittern("quantize", source, "--dry-run", "--target-bpw", 5.2, "--policy", policy, "--json", report)
    assert result.returncode == 0, result
    to = {t["name"]: t["to"] for t in json.loads(report.read_text())["tensors"]}
    c = [to[f"model.layers.{i}.c.weight"] for i in range(4)]
    assert all("group 32" in t for t in c) and {t[0] for t in c} != {"4"}
    assert all(to[f"model.layers.{i}.a.weight"].startswith("8 bit") for i in range(4))


def test_a_quantised_model_is_refused_whatever_its_bits(uneven, tmp_path):
    source = write_folder(tmp_path / "hf", uneven)
    assert bittern("quantize", source, "-o", tmp_path / "four", "--bits", 4).returncode == 0
    refused(bittern("quantize", tmp_path / "four", "--dry-run", "--target-bpw", 5), 2, "quantised already")


@pytest.mark.peer("gguf")
def test_importance_decides_where_bits_go(tmp_path):
    """Tensors alike; the inputs of one are ten times as large, so that its errors count 100 times.
    One that the matrix does not know counts with the mean."""
    rng = np.random.default_rng(6)
    names = ["blk.0.a.weight", "blk.1.a.weight", "blk.2.a.weight", "blk.3.a.weight"]
    source = write_gguf(tmp_path / "in.gguf", {name: weights(rng, 64, 256) for name in names})
    entries = {}
    for name, importance in zip(names, (1, 100, 1)):
        entries[f"{name}.in_sum2"] = np.full(256, 7 * importance, np.float32)
        entries[f"{name}.counts"] = np.array([7], np.float32)
    imatrix = write_gguf(tmp_path / "imatrix.gguf", entries, type="imatrix")
    report = tmp_path / "report.json"
    args = ("--dry-run", "--format", "gguf", "--target-bpw", 6, "--json", report, "--force")

    def sizes(*flags):
        result = bittern("quantize", source, *args, *flags)
        assert result.returncode == 0, result
        return {t["name"]: t["bytes"] for t in json.loads(report.read_text())["tensors"]}

    plain, weighed = sizes(), sizes("--imatrix", imatrix)
    assert plain != weighed
    assert weighed[names[1]] == max(weighed.values()) > weighed[names[0]]
    assert weighed[names[0]] <= weighed[names[3]] <= weighed[names[1]]


# ---- real models ----


def test_minilm(minilm, tmp_path):
    sizes = Sizes(minilm, tmp_path, "--method", "minmax")
    uniforms = [("--bits", b) for b in (3, 4, 5, 6)] + [("--bits", 4, "--group-size", 128)]
    check_sweep(sizes, [3.5, 4.5, 5, 5.5, 6, 6.2, 7, 8], uniforms)


@pytest.mark.parametrize("format", ["mlx", "gguf"])
def test_smollm2(smollm2, tmp_path, format):
    plain = tmp_path / "plain.gguf"
    result = bittern("quantize", smollm2, "-o", plain, "--dequantize", "f32")
    assert result.returncode == 0, result
    sizes = Sizes(plain, tmp_path, "--format", format)
    if format == "mlx":
        check_sweep(sizes, [4.4, 6, 6.2], [("--bits", 4)])
    else:
        check_sweep(sizes, [5, 6, 6.2], [("--type", "Q4_1"), ("--bits", 5)])
