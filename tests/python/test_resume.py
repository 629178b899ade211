"""What --resume takes for granted, and what a run does when files change under it."""

import json
import os
import pathlib
import shutil

import numpy as np
import pytest
from runs import go_on, kill, larger, names, own, start
from test_cli import COMMAND, bittern, refused
from test_quantize import contents, load_numbers, write_gguf

pytestmark = pytest.mark.skipif(
    COMMAND is None, reason="the command is not built (build/release/bittern)"
)
pytest.importorskip("ml_dtypes")


# ---- --resume ----


def damages():
    def empty(file):
        os.truncate(file, 0)

    def cut(file):
        os.truncate(file, file.stat().st_size // 2)

    def cut_and_zeros(file):
        size = file.stat().st_size
        os.truncate(file, size // 3)
        os.truncate(file, size)

    def flip(part):
        def change(file):
            at = min(int(file.stat().st_size * part), file.stat().st_size - 1)
            with open(file, "r+b") as f:
                f.seek(at)
                byte = f.read(1)[0]
                f.seek(at)
                f.write(bytes([byte ^ 0x10]))

        change.__name__ = f"flip_{part}"
        return change

    def longer(file):
        with open(file, "ab") as f:
            f.write(b"x" * 100_000_000)

    return [pathlib.Path.unlink, empty, cut, cut_and_zeros, *map(flip, (0, 0.001, 0.02, 0.5, 1)), longer]


@pytest.mark.peer("gguf")
@pytest.mark.parametrize("form", ["mlx", "safetensors", "gguf"])
def test_resume_believes_no_byte_it_has_not_read(larger, tmp_path, form):
    if form == "gguf":
        larger = write_gguf(tmp_path / "larger.gguf", load_numbers(larger))
    args = ["quantize", larger, "--bits", 8, "--format", form]
    whole = tmp_path / "whole" / "out"
    whole.parent.mkdir()
    assert bittern(*args, "-o", whole).returncode == 0
    expected = contents(whole)
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    kill(start(*args, out=stopped / "out"))
    resumed = tmp_path / "resumed"
    for damage in damages():
        for file in ("out.partial", "out.partial.journal"):
            if file == "out.partial" and form != "gguf":
                file = "out.partial/model.safetensors"
            shutil.copytree(stopped, resumed)
            damage(resumed / file)
            result = bittern(*args, "-o", resumed / "out", "--resume", "--threads", 2)
            assert result.returncode == 0, (damage.__name__, file, result)
            assert contents(resumed / "out") == expected, (damage.__name__, file)
            assert names(resumed) == ["out"]
            shutil.rmtree(resumed)


def test_resume_tells_a_model_of_the_same_size_and_time(larger, tmp_path):
    model = own(larger, tmp_path / "hf")
    kill(start("quantize", model, "--bits", "4", out=tmp_path / "out"))
    file = model / "model.safetensors"
    before, data = file.stat(), file.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    values = np.frombuffer(data[header:], np.uint16) ^ 1
    file.write_bytes(data[:header] + values.tobytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    result = bittern("quantize", model, "--bits", "4", "-o", tmp_path / "out", "--resume", "--quiet")
    refused(result, 2, "out.partial: begun from another model")


def overwrite_in_silence(file):
    """Bytes in the middle, and the old time again."""
    before = file.stat()
    with open(file, "r+b") as f:
        f.seek(before.st_size // 64)
        f.write(b"\0" * 4096)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_resume_believes_no_source_that_was_touched(larger, tmp_path):
    """Bytes that no fingerprint has looked at: what was made of the old ones is made again."""
    model = own(larger, tmp_path / "hf")
    args = ["quantize", model, "--bits", "4"]
    kill(start(*args, out=tmp_path / "out"))
    overwrite_in_silence(model / "model.safetensors")
    result = bittern(*args, "-o", tmp_path / "out", "--resume", "--json", tmp_path / "report.json")
    assert result.returncode == 0, result
    assert json.loads((tmp_path / "report.json").read_text())["resumed"] == 0
    assert bittern(*args, "-o", tmp_path / "expected").returncode == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_resume_makes_only_what_is_missing(larger, tmp_path):
    args = ["quantize", larger, "--bits", 8]
    out = tmp_path / "out"
    kill(start(*args, out=out, least=30))
    report = tmp_path / "report.json"
    result = bittern(*args, "-o", out, "--resume", "--json", report)
    assert result.returncode == 0, result
    assert 5 <= json.loads(report.read_text())["resumed"] < 48
    assert "tensors were whole already" in result.stdout


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "hard link", "foreign file"])
def test_resume_refuses_things_of_another_kind(larger, tmp_path, kind):
    args = ["quantize", larger, "--bits", 8, "--quiet"]
    out, mine = tmp_path / "out", tmp_path / "mine"
    kill(start(*args, out=out))
    mine.write_text("mine")
    file = tmp_path / "out.partial" / ("model.safetensors" if kind != "foreign file" else "thesis.tex")
    if kind != "foreign file":
        file.unlink()
    if kind == "link":
        file.symlink_to(mine)
    elif kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "hard link":
        os.link(mine, file)
    else:
        file.write_text("mine")
    refused(bittern(*args, "-o", out, "--resume"), 2, str(file))
    if kind != "hard link":
        refused(bittern(*args, "-o", out, "--force"), 2, str(file))
    assert mine.read_text() == "mine" and os.path.lexists(file)


def test_a_live_run_is_told_from_a_stopped_one(larger, tmp_path):
    args = ["quantize", larger, "--bits", 8]
    out = tmp_path / "out"
    process = start(*args, out=out)
    before = names(tmp_path)
    for flags in ([], ["--force"], ["--resume"], ["--force", "--resume"]):
        refused(bittern(*args, "-o", out, *flags), 4, "out: another run is writing it")
    assert names(tmp_path) == before
    assert go_on(process).returncode == 0
    assert names(tmp_path) == ["out"]
    shutil.rmtree(out)
    kill(start(*args, out=out))
    refused(bittern(*args, "-o", out), 2, "left by a run that was stopped", "--resume")
    refused(bittern(*args, "-o", out, "--dry-run"), 2, "left by a run that was stopped", "--resume")
    assert bittern(*args, "-o", out, "--force").returncode == 0
    assert names(tmp_path) == ["out"]


@pytest.mark.peer("gguf")
@pytest.mark.parametrize("form", ["mlx", "gguf", "parts"])
@pytest.mark.parametrize("then", ["end", "fail"])
def test_a_run_whose_partial_was_removed_touches_no_other(larger, tmp_path, form, then):
    source = own(larger, tmp_path / "source")
    if form != "mlx":
        source = write_gguf(tmp_path / "source.gguf", load_numbers(larger))
    args = ["quantize", source, "--bits", 8, "--format", "mlx" if form == "mlx" else "gguf"]
    args += ["--split-max-tensors", 20] if form == "parts" else []
    out = tmp_path / "out"
    first = start(*args, out=out)
    for left in tmp_path.glob("out.partial*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    second = start(*args, out=out)
    if then == "fail":
        os.utime(source / "model.safetensors" if form == "mlx" else source, (1, 1))
    refused(go_on(first), 4, "while bittern was " + ("reading" if then == "fail" else "writing") + " it")
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out.partial", "out.partial.journal"]
    if then == "fail":
        kill(second)
        return
    assert go_on(second).returncode == 0
    whole = tmp_path / "whole"
    whole.mkdir()
    assert bittern(*args, "-o", whole / "out").returncode == 0
    made = [out] if form != "parts" else sorted(tmp_path.glob("out-*"))
    assert [p.name for p in made] == names(whole)
    for path in made:
        assert contents(path) == contents(whole / path.name)


# ---- files that change while they are read ----


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)


def empty(file):
    os.truncate(file, 0)


def append(file):
    with open(file, "ab") as f:
        f.write(b"more")


def overwrite(file):
    with open(file, "r+b") as f:
        f.seek(file.stat().st_size // 2)
        f.write(b"x" * 4096)


def replace(file):
    shutil.copyfile(file, f"{file}.new")
    os.replace(f"{file}.new", file)


@pytest.mark.peer("gguf")
@pytest.mark.parametrize("form", ["folder", "gguf"])
@pytest.mark.parametrize(
    "change", [truncate, empty, append, overwrite, overwrite_in_silence, replace, os.unlink]
)
def test_a_source_that_changes_is_an_error(larger, tmp_path, form, change):
    if form == "gguf":
        source = file = write_gguf(tmp_path / "in.gguf", load_numbers(larger))
    else:
        source = own(larger, tmp_path / "hf")
        file = source / "model.safetensors"
    out = tmp_path / "made" / "out"
    out.parent.mkdir()
    process = start("quantize", source, "--bits", 8, "--format", "mlx" if form == "folder" else "gguf", out=out)
    change(file)
    refused(go_on(process), 4, str(file), "while bittern was reading it")
    assert names(out.parent) == []


def test_a_side_file_that_changes_is_an_error(larger, tmp_path):
    source = own(larger, tmp_path / "hf")
    out = tmp_path / "made" / "out"
    out.parent.mkdir()
    process = start("quantize", source, "--bits", 8, out=out)
    (source / "config.json").write_text('{"model_type": "others"}')
    refused(go_on(process), 4, "config.json", "while bittern was reading it")
    assert names(out.parent) == []
