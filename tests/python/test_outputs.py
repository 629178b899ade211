"""What commands may write, replace and remove."""

import json
import os
import pathlib
import resource
import shutil
import signal
import socket
import stat
import subprocess
import time

import arrays
import numpy as np
import pytest
from runs import folder, go_on, larger, names, pieces, start
from test_cli import COMMAND, bittern, refused
from test_quantize import contents, load_numbers, weights, write_folder, write_gguf

pytestmark = pytest.mark.skipif(
    COMMAND is None, reason="the command is not built (build/release/bittern)"
)
pytest.importorskip("ml_dtypes")


# ---- standard input, output and error ----


def test_progress_that_nobody_can_read(larger, tmp_path):
    """With standard output and error closed, the files of a run had their numbers, and a line of
    progress, which comes every five seconds, was written into the model. On a full disk it was an
    exception among threads."""
    assert bittern("quantize", larger, "-o", tmp_path / "expected", "--bits", "4").returncode == 0

    def close_all():
        for file in range(3):
            os.close(file)

    def close_text():
        os.close(1)
        os.close(2)

    with open("/dev/full", "w") as full:
        ways = [{"preexec_fn": close_all}, {"preexec_fn": close_text}, {"stderr": full}]
        runs = []
        for i, way in enumerate(ways):
            out = tmp_path / f"{i}"
            args = [COMMAND, "quantize", larger, "-o", out, "--bits", "4", "--threads", "1"]
            runs.append((out, subprocess.Popen(args, stdout=subprocess.DEVNULL, **way)))
            while runs[-1][1].poll() is None and pieces(out) < 8:
                time.sleep(0.0005)
            runs[-1][1].send_signal(signal.SIGSTOP)
    time.sleep(5.5)
    for out, process in runs:
        process.send_signal(signal.SIGCONT)
        lost = out.name in "01"  # what a closed standard output should have had: the model is whole
        assert process.wait() == (1 if lost else 0)
        assert contents(out) == contents(tmp_path / "expected")


def test_json_needs_a_standard_output(folder, tmp_path):
    result = subprocess.run(
        [COMMAND, "quantize", folder, "-o", tmp_path / "out", "--bits", "4", "--json", "-"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.close(1),
    )
    assert result.returncode == 4 and "--json: -: Bad file descriptor" in result.stderr, result
    assert names(tmp_path) == ["hf"]


# ---- --force ----


def test_force_keeps_what_is_beside_the_output(folder, tmp_path):
    out = tmp_path / "u"
    args = ["quantize", folder, "-o", out, "--bits", 4, "--quiet"]
    assert bittern(*args).returncode == 0
    for suffix in (".replaced", ".partial", ".partial.journal"):
        for is_folder in (True, False):
            other = tmp_path / f"u{suffix}"
            if is_folder:
                other.mkdir()
                (other / "thesis.tex").write_text("mine")
            else:
                other.write_text("mine")
            refused(bittern(*args, "--force"), 2, str(other))
            assert (other / "thesis.tex" if is_folder else other).read_text() == "mine"
            shutil.rmtree(other) if is_folder else other.unlink()
    assert bittern(*args, "--force").returncode == 0
    assert names(tmp_path) == ["hf", "u"]


@pytest.mark.parametrize("name", ["thesis.tex", "notes.txt", "more.safetensors", "sub/a", "README.md"])
def test_force_replaces_only_a_folder_that_bittern_wrote(folder, tmp_path, name):
    out = tmp_path / "out"
    args = ["quantize", folder, "-o", out, "--bits", 4, "--force"]
    assert bittern(*args).returncode == 0
    mine = out / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    before = contents(out) if mine.parent == out else None
    refused(bittern(*args), 2, str(out / name.split("/")[0]), "bittern did not write")
    assert mine.read_text() == "mine"
    if before:
        assert contents(out) == before


def test_force_keeps_models_of_others(folder, tmp_path):
    others = write_folder(tmp_path / "other", {"a.weight": weights(np.random.default_rng(0))})
    (tmp_path / "poor").mkdir()
    (tmp_path / "poor" / "config.json").write_text("{}")
    (tmp_path / "file.txt").write_text("mine")
    for out in (others, tmp_path / "poor"):
        before = contents(out)
        refused(bittern("quantize", folder, "-o", out, "--bits", 4, "--force"), 2, "bittern did not write")
        assert contents(out) == before
    args = ["quantize", folder, "-o", tmp_path / "file.txt", "--bits", 4]
    refused(bittern(*args, "--force"), 2, "file.txt: a file, and the output is a folder")
    refused(bittern(*args), 2, "file.txt: a file, and the output is a folder")
    assert (tmp_path / "file.txt").read_text() == "mine"


def special(path, kind):
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    elif kind == "device":
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # the null device
        except PermissionError:
            pytest.skip("only root makes devices")
    elif kind == "link":
        path.with_name("target").write_text("[]")
        path.symlink_to("target")
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "folder":
        path.mkdir()


KINDS = ["fifo", "socket", "device", "link", "dangling"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [[], ["--force"]])
def test_no_special_file_is_replaced(folder, tmp_path, kind, flags, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    special(pathlib.Path("x"), kind)
    before = os.lstat("x")
    model = write_gguf(tmp_path / "in.gguf", {"a.weight": weights(np.random.default_rng(0))})
    refused(bittern("quantize", folder, "-o", "x", "--bits", 4, *flags), 2, "x: a ")
    refused(bittern("quantize", model, "-o", "x", "--type", "Q8_0", *flags), 2, "x: a ")
    refused(bittern("inspect", folder, "--json", "x", *flags), 2, "--json: x: a ")
    refused(bittern("ops", "--json", "x", *flags), 2, "--json: x: a ")
    after = os.lstat("x")
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    if kind == "link":
        assert pathlib.Path("target").read_text() == "[]"


def test_the_null_device_survives(folder):
    before = os.stat("/dev/null")
    refused(bittern("quantize", folder, "-o", "/dev/null", "--bits", 4, "--force"), 2, "/dev/null: a device")
    refused(bittern("inspect", folder, "--json", "/dev/null", "--force"), 2, "/dev/null: a device")
    assert os.stat("/dev/null").st_rdev == before.st_rdev and stat.S_ISCHR(os.stat("/dev/null").st_mode)


# ---- --json ----


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_json_on_standard_output(folder, tmp_path, name):
    for args in (
        ["inspect", folder],
        ["inspect", folder, "--compare", folder],
        ["quantize", folder, "-o", tmp_path / "out", "--bits", 4],
        ["quantize", folder, "--dry-run", "--bits", 4],
        ["ops"],
        ["check", "pack_codes", "--quick"],
        ["bench", "--quick", "--filter", "plan overhead"],
    ):
        for quiet in ([], ["--quiet"]):
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            result = bittern(*args, "--json", name, *quiet)
            assert result.returncode == 0, result
            assert json.loads(result.stdout)
            assert bool(result.stderr) == (not quiet), result


def test_json_that_cannot_be_written_fails_before_the_work(folder, tmp_path):
    """/dev/fd takes no new file, whoever asks."""
    for name in ("/dev/fd/99", "/proc/report.json"):
        result = bittern("quantize", folder, "-o", tmp_path / "out", "--bits", 4, "--json", name)
        assert result.returncode != 0 and "--json: " + name in result.stderr, result
        assert names(tmp_path) == ["hf"]


def test_json_takes_the_longest_name(folder, tmp_path):
    report = tmp_path / ("a" * 250 + ".json")
    for _ in range(2):
        args = ["quantize", folder, "-o", tmp_path / "o", "--bits", 4, "--json", report, "--force"]
        assert bittern(*args).returncode == 0
        assert json.loads(report.read_text())["schema"] == 1
    assert names(tmp_path) == [report.name, "hf", "o"]


def test_json_replaces_only_reports(folder, tmp_path):
    report = tmp_path / "report.json"
    model = folder / "model.safetensors"
    precious = tmp_path / "precious.json"
    precious.write_text('{"model_type": "llama"}')
    for verb in (["inspect", folder], ["ops"], ["quantize", folder, "--dry-run", "--bits", 4]):
        for _ in range(2):
            assert bittern(*verb, "--json", report, "--force").returncode == 0
        refused(bittern(*verb, "--json", report), 2, "exists", "--force")
        for kept in (model, folder / "config.json", precious):
            before = kept.read_bytes()
            refused(bittern(*verb, "--json", kept, "--force"), 2, "--json", str(kept))
            assert kept.read_bytes() == before
    assert names(tmp_path) == ["hf", "precious.json", "report.json"]


@pytest.mark.parametrize("flags", [[], ["--force"]])
def test_a_file_that_came_during_the_run_is_kept(larger, tmp_path, flags):
    report = tmp_path / "report.json"
    run = start("quantize", larger, "--bits", 8, "--json", report, *flags, out=tmp_path / "o")
    report.write_text("precious")
    refused(go_on(run), 4, "--json", "exists")
    assert report.read_text() == "precious"
    assert names(tmp_path) == ["o", "report.json"]


# ---- outputs and inputs ----


def test_outputs_are_apart_from_inputs(folder, tmp_path):
    policy = tmp_path / "policy.json"
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "up").symlink_to(tmp_path)
    before = contents(folder)

    def wrong(out, *flags, words):
        refused(bittern("quantize", folder, "-o", out, "--bits", 4, *flags), 2, *words)
        assert contents(folder) == before

    wrong(folder / "out", words=["-o", "inside the input"])
    wrong(tmp_path / "link" / "out", words=["-o", "inside the input"])
    wrong(tmp_path / "up" / "hf" / "out", words=["-o", "inside the input"])
    # `down/..` is the model's folder, however it looks.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (folder / "sub").mkdir()
    (elsewhere / "down").symlink_to(folder / "sub")
    result = bittern("quantize", folder, "-o", elsewhere / "down" / ".." / "out", "--bits", 4)
    refused(result, 2, "-o", "inside the input")
    result = bittern("inspect", folder, "--json", elsewhere / "down" / ".." / "report.json")
    refused(result, 2, "--json", "inside the input")
    result = bittern("quantize", folder, "-o", folder / ".." / "beside", "--bits", 4)
    assert result.returncode == 0, result
    (folder / "sub").rmdir()
    before = contents(folder)
    wrong(folder, "--force", words=[str(folder)])
    wrong(tmp_path, "--force", words=[str(tmp_path)])
    out = tmp_path / "out"
    wrong(out, "--json", folder / "report.json", words=["--json", "inside the input"])
    wrong(out, "--json", tmp_path / "link" / "report.json", words=["--json", "inside the input"])
    wrong(out, "--json", out, words=["--json", "-o", "out"][:1])
    wrong(out, "--json", f"{out}.partial", words=["--json", "also the output"])
    wrong(out, "--json", tmp_path / "up" / "out.partial.journal", words=["--json", "also the output"])
    os.link(folder / "config.json", tmp_path / "hard.json")
    wrong(out, "--json", tmp_path / "hard.json", "--force", words=["--json"])
    (tmp_path / "hard.json").unlink()
    result = bittern("inspect", folder, "--json", folder / "report.json")
    refused(result, 2, "--json", "inside the input")
    assert not out.exists() and contents(folder) == before
    # An input that says it is a report is an input all the same.
    policy.write_text('{"bits": 4, "rules": []}')
    wrong(out, "--policy", policy, "--json", policy, "--force", words=["--json", "policy.json"])
    # A model that is the partial of another run.
    shutil.copytree(folder, f"{out}.partial")
    result = bittern("quantize", f"{out}.partial", "-o", out, "--bits", 4, "--force")
    assert result.returncode == 2 and contents(pathlib.Path(f"{out}.partial")) == before


@pytest.fixture
def parts(tmp_path):
    """The three parts of a GGUF file."""
    tensors = {f"blk.{i}.a.weight": weights(np.random.default_rng(i)) for i in range(5)}
    arrays.write_gguf(tmp_path / "m.gguf", tensors, split_max_tensors=2)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) == 3
    return parts


@pytest.mark.peer("gguf")
def test_no_part_of_a_split_file_is_replaced(parts, tmp_path):
    before = [part.read_bytes() for part in parts]
    for part in parts:
        args = ["quantize", parts[0], "-o", part, "--type", "Q8_0", "--force"]
        refused(bittern(*args), 2, "-o", str(part), "is the input")
        hard = tmp_path / "hard.gguf"
        os.link(part, hard)
        args[3] = hard
        refused(bittern(*args), 2, "-o", "hard.gguf is the input")
        hard.unlink()
        refused(bittern("inspect", parts[0], "--json", part, "--force"), 2, "--json", str(part))
    # Nor by the parts of an output that have its names.
    for out in ("m.gguf", "m", "./m.gguf"):
        for flags in ([], ["--dry-run"]):
            args = ["quantize", parts[0], "-o", f"{tmp_path}/{out}", "--split-max-tensors", 2]
            args += ["--type", "Q8_0", "--force", *flags]
            refused(bittern(*args), 2, "-o", "m-00001-of-00003.gguf is the input")
    assert sorted(tmp_path.iterdir()) == parts
    assert [part.read_bytes() for part in parts] == before


@pytest.mark.peer("gguf")
@pytest.mark.parametrize("which", [1, 2, 3])
def test_parts_of_an_output_are_outputs(parts, tmp_path, which):
    out = tmp_path / "out"
    out.mkdir()
    name = f"o-0000{which}-of-00003.gguf"
    args = ["quantize", parts[0], "-o", out / "o.gguf", "--type", "Q8_0", "--split-max-tensors", 2]
    refused(bittern(*args, "--json", out / name), 2, "--json", name, "is also the output")
    # What is there is refused by the dry run, too, and nothing is left behind.
    for flags in ([], ["--dry-run"]):
        (out / name).write_bytes(b"GGUF")
        refused(bittern(*args, *flags), 2, name, "exists", "--force")
        refused(bittern(*args, *flags, "--resume" if not flags else "--quiet"), 2, name, "exists")
        (out / name).write_bytes(b"mine")
        refused(bittern(*args, *flags, "--force"), 2, name, "not a GGUF file")
        (out / name).unlink()
        (out / name).symlink_to("/etc/hostname")
        refused(bittern(*args, *flags, "--force"), 2, name, "a symbolic link")
        (out / name).unlink()
        os.mkfifo(out / name)
        refused(bittern(*args, *flags), 2, name, "pipe")
        assert names(out) == [name]
        (out / name).unlink()
    assert bittern(*args).returncode == 0
    assert names(out) == [f"o-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


@pytest.mark.peer("gguf")
def test_an_old_first_part_is_never_with_new_ones(larger, tmp_path):
    source = write_gguf(tmp_path / "larger.gguf", load_numbers(larger))
    out = tmp_path / "out"
    out.mkdir()
    args = ["quantize", source, "--split-max-tensors", 20, "--type"]
    assert bittern(*args, "Q4_0", "-o", out / "o.gguf").returncode == 0
    first, second, third = sorted(out.iterdir())
    old = second.read_bytes()
    run = start(*args, "Q8_0", "--force", out=out / "o.gguf")
    # A part that cannot be moved.
    second.unlink()
    second.mkdir()
    refused(go_on(run), 2, str(second), "a folder")
    assert not first.exists()
    assert third.stat().st_size > 0
    second.rmdir()
    second.write_bytes(old)
    args += ["Q8_0", "-o", out / "o.gguf", "--resume"]
    refused(bittern(*args, "--quiet"), 2, str(second), "exists")
    assert bittern(*args, "--force").returncode == 0
    assert names(out) == [first.name, second.name, third.name]
    assert bittern(*args[:-3], "-o", tmp_path / "p.gguf").returncode == 0
    for part in (first, second, third):
        assert part.read_bytes() == (tmp_path / part.name.replace("o-", "p-", 1)).read_bytes()


def test_a_limit_on_the_size_of_files(larger, tmp_path):
    args = ["quantize", larger, "--bits", 8, "-o", tmp_path / "o", "--quiet"]
    limited = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, 4_000_000))
    command = [COMMAND, *map(str, args)]
    result = subprocess.run(command, preexec_fn=limited, capture_output=True, text=True)
    refused(result, 1, "o.partial/model.safetensors", "too large")
    assert bittern(*args, "--resume").returncode == 0
    assert bittern(*args[:-2], tmp_path / "whole").returncode == 0
    assert contents(tmp_path / "o") == contents(tmp_path / "whole")


# ---- OUT's name ----


def test_a_slash_at_the_end(folder, tmp_path):
    report = tmp_path / "report.json"
    result = bittern("quantize", folder, "-o", f"{tmp_path}/new/", "--bits", 4, "--json", report)
    assert result.returncode == 0, result
    assert names(tmp_path) == ["hf", "new", "report.json"] and (tmp_path / "new/config.json").exists()
    assert json.loads(report.read_text())["output"] == f"{tmp_path}/new"
    assert bittern("quantize", folder, "-o", f"{tmp_path}/new//", "--bits", 4, "--force").returncode == 0
    model = write_gguf(tmp_path / "in.gguf", {"a.weight": weights(np.random.default_rng(0))})
    for name in ("x/", "x.gguf/"):
        result = bittern("quantize", model, "-o", f"{tmp_path}/{name}", "--type", "Q8_0")
        refused(result, 2, name, "ends in '/'")
    refused(bittern("quantize", model, "-o", f"{tmp_path}/x.gguf/", "--bits", 8), 2, "ends in '/'")
    for name in (".", "..", "/", f"{tmp_path}/."):
        refused(bittern("quantize", folder, "-o", name, "--bits", 4, "--force"), 2, "expected the name")


def test_a_name_of_the_wrong_kind_fails_before_the_work(folder, tmp_path):
    model = write_gguf(tmp_path / "in.gguf", {"a.weight": weights(np.random.default_rng(0))})
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    for flags in ([], ["--force"], ["--resume"]):
        args = ["quantize", model, "-o", tmp_path / "folder", "--type", "Q8_0", *flags]
        refused(bittern(*args), 2, "folder: a folder, and the output is a file")
        args = ["quantize", folder, "-o", tmp_path / "file", "--bits", 4, *flags]
        refused(bittern(*args), 2, "file: a file, and the output is a folder")
    refused(bittern("quantize", folder, "-o", tmp_path / "file" / "x", "--bits", 4), 4, "file/")
    refused(bittern("quantize", folder, "-o", tmp_path / "none" / "x", "--bits", 4), 4, "none/")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "text",
    [
        '{"schema": 1, "model": "x"}',
        '{"schema": 1, "model": {}, "mine": 1}',
        '{"machine": "mine", "rows": []}',
        '{"schema": 1, "bittern": {"mine": 1}}',
        '[{"op": "mine"}]',
        "[]",
        '[{"op": "x", "compared": 1, "failures": [], "seconds": 1, "mine": 2}]',
        "{",
    ],
)
def test_what_resembles_a_report_is_kept(folder, tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text)
    refused(bittern("inspect", folder, "--json", path, "--force"), 2, "--json", "no report of bittern's")
    assert path.read_text() == text


def test_every_report_may_be_replaced(folder, tmp_path):
    path = tmp_path / "report.json"
    verbs = (
        ["inspect", folder],
        ["inspect", folder, "--compare", folder],
        ["quantize", folder, "--bits", 4, "--dry-run"],
        ["ops"],
        ["ops", "pack_codes"],
        ["check", "pack_codes", "--outer_size=2", "--axis_size=64"],
        ["bench", "pack_codes", "--quick", "--repeat", 1, "--shrink", 64],
        ["inspect", folder],
    )
    for verb in verbs:
        result = bittern(*verb, "--json", path, "--force", "--quiet")
        assert result.returncode == 0, (verb, result)


def test_parts_of_another_set_are_kept_and_told(tmp_path):
    rng = np.random.default_rng(0)
    source = write_gguf(tmp_path / "in.gguf", {f"blk.{i}.a.weight": weights(rng) for i in range(6)})
    folder = tmp_path / "out"
    folder.mkdir()
    args = ("quantize", source, "-o", folder / "m.gguf", "--type", "Q8_0", "--split-max-tensors")
    assert "kept" not in bittern(*args, 2).stdout
    old = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert len(old) == 3
    (folder / "m-00001-of-00003.gguf.txt").write_text("mine")
    (folder / "mm-00001-of-00009.gguf").write_text("another's")
    result = bittern(*args, 3, "--force")
    assert result.returncode == 0, result
    assert "note: kept: m-00001-of-00003.gguf and 2 more, of a set with another number of parts" in result.stdout
    assert {name: (folder / name).read_bytes() for name in old} == old
    assert "kept" in bittern(*args, 3, "--force", "--dry-run").stdout
    (folder / "m-00002-of-00002.gguf").unlink()
    assert "and 2 more" in bittern(*args, 3, "--force").stdout


def test_parts_need_a_name(tmp_path):
    source = write_gguf(tmp_path / "in.gguf", {"a.weight": weights(np.random.default_rng(0))})
    for flags in (["--split-max-size", "1M"], ["--split-max-tensors", 1]):
        for dry in ([], ["--dry-run"]):
            result = bittern("quantize", source, "-o", tmp_path / ".gguf", "--type", "Q8_0", *flags, *dry)
            refused(result, 2, "-o: ", ".gguf: no name before .gguf, expected one such as model.gguf")
    assert names(tmp_path) == ["in.gguf"]
