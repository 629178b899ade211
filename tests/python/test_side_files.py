"""Files beside the weights: links, caches, permissions, odd names."""

import os
import pathlib
import shutil
import socket
import stat
import subprocess
import tempfile

import numpy as np
import pytest
from runs import folder, names
from test_cli import COMMAND, bittern, refused
from test_quantize import contents, weights, write_folder, write_gguf

pytestmark = pytest.mark.skipif(
    COMMAND is None, reason="the command is not built (build/release/bittern)"
)
pytest.importorskip("ml_dtypes")


# ---- links beside the weights ----


def test_links_are_not_followed_out_of_the_folder(folder, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("do not copy")
    (folder / "notes.txt").symlink_to(secret)
    (folder / "up.md").symlink_to("../secret")
    (folder / "own.txt").symlink_to("tokenizer.json")
    (folder / "gone.txt").symlink_to("nowhere")
    out = tmp_path / "out"
    result = bittern("quantize", folder, "-o", out, "--bits", 4)
    assert result.returncode == 0, result
    for name in ("notes.txt", "up.md"):
        assert not (out / name).exists()
        assert f"note: not copied: {folder}/{name}: a symbolic link to {secret}" in result.stdout
    assert "gone.txt: a symbolic link that leads nowhere" in result.stdout
    assert (out / "own.txt").read_text() == "{ }\n" and not (out / "own.txt").is_symlink()
    # What the conversion needs is refused.
    (folder / "config.json").rename(tmp_path / "elsewhere.json")
    (folder / "config.json").symlink_to(tmp_path / "elsewhere.json")
    refused(bittern("quantize", folder, "-o", tmp_path / "other", "--bits", 4), 2, "config.json", "symbolic link")
    refused(bittern("inspect", folder), 2, "config.json", "symbolic link")


def test_weights_may_be_links(folder, tmp_path):
    (folder / "model.safetensors").rename(tmp_path / "weights")
    (folder / "model.safetensors").symlink_to(tmp_path / "weights")
    assert bittern("quantize", folder, "-o", tmp_path / "out", "--bits", 4).returncode == 0


def hugging_face_cache(folder, cache):
    snapshot = cache / "models--a--b" / "snapshots" / "c0ffee"
    blobs = cache / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (cache / "models--a--b" / "refs").mkdir()
    (cache / "models--a--b" / "refs" / "main").write_text("c0ffee")
    for i, file in enumerate(sorted(folder.iterdir())):
        shutil.copyfile(file, blobs / f"{i}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    return snapshot


def test_a_hugging_face_cache(folder, tmp_path):
    snapshot = hugging_face_cache(folder, tmp_path / "hub")
    assert bittern("quantize", folder, "-o", tmp_path / "plain", "--bits", 4).returncode == 0
    for i, model in enumerate((snapshot, snapshot.parents[1])):
        out = tmp_path / f"out{i}"
        result = bittern("quantize", model, "-o", out, "--bits", 4)
        assert result.returncode == 0 and "symbolic" not in result.stdout, result
        assert contents(out) == contents(tmp_path / "plain")
        refused(bittern("quantize", model, "-o", model / "x", "--bits", 4), 2, "inside the input")
    # Blobs of another model, and blobs that are elsewhere themselves.
    other = tmp_path / "hub" / "models--x--y" / "blobs"
    other.mkdir(parents=True)
    (other / "secret").write_text("secret")
    (snapshot / "notes.txt").symlink_to(other / "secret")
    result = bittern("quantize", snapshot, "-o", tmp_path / "out", "--bits", 4)
    assert result.returncode == 0 and "not copied" in result.stdout
    assert not (tmp_path / "out" / "notes.txt").exists()
    blobs = snapshot.parents[1] / "blobs"
    blobs.rename(tmp_path / "blobs")
    blobs.symlink_to(tmp_path / "blobs")
    refused(bittern("quantize", snapshot, "-o", tmp_path / "out2", "--bits", 4), 2, "symbolic link")


# ---- permissions ----


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o002])
def test_modes_follow_umask(folder, tmp_path, mask):
    out, report, file = tmp_path / "out", tmp_path / "report.json", tmp_path / "out.gguf"
    (folder / "tokenizer.json").chmod(0o600)
    model = write_gguf(tmp_path / "in.gguf", {"a.weight": weights(np.random.default_rng(0))})
    for args in (
        ["quantize", folder, "-o", out, "--bits", 4, "--json", report],
        ["quantize", model, "-o", file, "--type", "Q8_0"],
    ):
        subprocess.run([COMMAND, *map(str, args)], check=True, preexec_fn=lambda: os.umask(mask))
    assert stat.S_IMODE(out.stat().st_mode) == 0o777 & ~mask
    for made in (report, file, *out.iterdir()):
        assert stat.S_IMODE(made.stat().st_mode) == 0o666 & ~mask, made


@pytest.fixture
def open_folder():
    """A folder that everybody can reach: that of pytest is root's alone."""
    path = pathlib.Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def as_nobody(*args, cwd):
    """Root may read anything, so the command runs as somebody else."""
    shutil.copy(COMMAND, cwd / "command")
    (cwd / "command").chmod(0o755)

    def become():
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)

    return subprocess.run(
        [cwd / "command", *map(str, args)], capture_output=True, text=True, preexec_fn=become, cwd="/"
    )


def test_what_cannot_be_read_is_called_so(open_folder):
    model = write_folder(open_folder / "hf", {"a.weight": weights(np.random.default_rng(0))})
    for path in model.iterdir():
        path.chmod(0o644)
    for mode in (0o000, 0o600, 0o311):
        model.chmod(mode)
        for verb in (["inspect", model], ["quantize", model, "-o", open_folder / "out", "--bits", "4"]):
            refused(as_nobody(*verb, cwd=open_folder), 4, f"{model}: the folder cannot be read: Permission denied")
    model.chmod(0o755)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).chmod(0)
        verb = ["quantize", model, "-o", open_folder / "out", "--bits", "4"]
        refused(as_nobody(*verb, cwd=open_folder), 4, f"{model / name}: cannot open: Permission denied")
        (model / name).chmod(0o644)
    secret = open_folder / "secret.json"
    secret.write_text("[]")
    secret.chmod(0o200)
    result = as_nobody("inspect", model, "--json", secret, "--force", cwd=open_folder)
    refused(result, 4, f"--json: {secret}: cannot be read", "Permission denied")
    for option in ("--policy", "--imatrix"):
        result = as_nobody("quantize", model, "-o", open_folder / "out", "--bits", "4", option, secret, cwd=open_folder)
        refused(result, 4, f"{secret}: cannot open: Permission denied")
    closed = open_folder / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    result = as_nobody("quantize", model, "-o", closed / "out", "--bits", "4", cwd=open_folder)
    refused(result, 4, "cannot write into", "Permission denied")
    assert not (open_folder / "out").exists()


def test_side_files_of_any_name(folder, tmp_path):
    """A name that the list of the output's files cannot hold would make it a stranger's folder."""
    for name in (b"\xff\xfe.txt", b"a\nb.md", b"vocab.safetensors", "\u00fc n\u00ef.txt".encode()):
        with open(os.fsencode(folder) + b"/" + name, "wb") as file:
            file.write(b"text")
    out = tmp_path / "out"
    args = ["quantize", folder, "-o", out, "--bits", 4]
    result = bittern(*args)
    assert result.returncode == 0 and result.stdout.count("not plain UTF-8") == 2, result
    expected = ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    assert names(out) == [*expected, "\u00fc n\u00ef.txt"]
    result = bittern(*args, "--force", "--quiet")
    assert result.returncode == 0, result


def test_side_files_that_are_no_files_are_told(folder, tmp_path):
    """One note for all of them; a link that leads nowhere has a reason of its own."""
    os.mkfifo(folder / "pipe.json")
    (folder / "vocab").mkdir()
    server = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(folder)  # a socket's path is short
    server.bind("socket.txt")
    os.chdir(here)
    (folder / "loop.json").symlink_to("loop.json")
    (folder / "to_pipe.txt").symlink_to("pipe.json")
    (folder / "empty.txt").write_text("")
    result = bittern("quantize", folder, "-o", tmp_path / "out", "--bits", 4)
    assert result.returncode == 0, result
    notes = [line for line in result.stdout.splitlines() if line.startswith("note: not copied")]
    assert len(notes) == 2, notes
    assert "loop.json: a symbolic link that leads nowhere" in " ".join(notes)
    for name in ("pipe.json", "socket.txt", "to_pipe.txt", "vocab"):
        assert sum(name in note for note in notes) == 1, notes
    assert (tmp_path / "out" / "empty.txt").read_text() == ""
    server.close()
