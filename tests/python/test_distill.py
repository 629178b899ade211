"""bittern distill: the command and bittern.distill, what they write, and what they refuse."""

import json
import math
import random
import signal
import subprocess
import time

import numpy as np
import pytest
from small_models import put_model
from test_cli import COMMAND, bittern, refused

import bittern as library

pytestmark = pytest.mark.skipif(COMMAND is None, reason="the command is not built (build/release/bittern)")

# On the grids of GGUF.
BLOCKS = ("--ctx", 32, "--calibration", 16, "--validation", 4)
FLAGS = ("--bits", 3, "--group-size", 32, "--ctx", 32, "--calibration", 16, "--validation", 4, "--scale-dtype", "f32")
OPTIONS = {"bits": 3, "group_size": 32, "context": 32, "calibration": 16, "validation": 4, "scale_dtype": "f32"}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A teacher, and a text that has something to be learned."""
    folder = tmp_path_factory.mktemp("distill")
    words = "the marsh is quiet and the bittern stands in the reeds where no boat comes ".split()
    text = " ".join(words[(7 * i * i + i) % len(words)] for i in range(400))
    (folder / "text.txt").write_text(text)
    return put_model(folder / "teacher"), folder / "text.txt"


def contents(model):
    return {file.name: file.read_bytes() for file in model.iterdir()} if model.is_dir() else model.read_bytes()


def test_a_student_learns(given, tmp_path):
    teacher, text = given
    out = tmp_path / "out"
    result = bittern("distill", teacher, "-o", out, "--data", text, *FLAGS, "--steps", 6, "--json", tmp_path / "r.json")
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["kl"] < report["start_kl"] and report["steps"] == 6 and report["best_step"] > 0
    assert (report["format"], report["type"], report["bits"], report["group_size"]) == ("mlx", None, 3, 32)
    assert report["written_kl"] == report["kl"]
    assert len(report["trials"]) == 3 and report["rate"] in [trial["rate"] for trial in report["trials"]]
    assert report["points"][0] == {"step": 0, "train_kl": None, "validation_kl": report["start_kl"]}
    assert "taken" in result.stdout and f"{report['kl']:.4f} after" in result.stdout
    page = (tmp_path / "out.html").read_text()
    for words in ("Learning", "How they go on", "Error along the depth", "KL by position", "<svg"):
        assert words in page
    assert not (tmp_path / "out.distill").exists()
    for verb in (["run", out, "-p", "a", "-n", 1], ["calibrate", out, "--data", text, "--chunks", 1, "-o", tmp_path / "i.gguf"]):
        for _ in range(2):  # every report may be replaced
            result = bittern(*verb, "--json", tmp_path / "r.json", "--force", "--ctx", 32)
            assert result.returncode == 0, result.stderr

    # From Python the same bytes; and what was written is what was judged.
    again = library.distill(teacher, tmp_path / "again", data=text, steps=6, **OPTIONS)
    assert contents(tmp_path / "again") == contents(out)
    assert (again.start_kl, again.kl, again.rate) == (report["start_kl"], report["kl"], report["rate"])
    assert math.isnan(again.points[0].train_kl) and again.points[-1].step == 6
    assert "validation KL" in str(again) and "6 steps" in repr(again)
    logits = library.load(out, activations="float").logits([3, 4, 5, 6])
    assert logits.shape == (4, 96)


def test_fastest(given, tmp_path):
    teacher, text = given
    flags = [*FLAGS, "--data", text, "--steps", 4, "--rate", 0.001, "--no-report"]
    result = bittern("distill", teacher, "-o", tmp_path / "out", *flags, "--fastest", "--json", tmp_path / "r.json")
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["preference"] == "fastest" and report["kl"] < report["start_kl"]
    library.distill(teacher, tmp_path / "again", data=text, steps=4, rate=0.001, preference="fastest", **OPTIONS)
    assert contents(tmp_path / "again") == contents(tmp_path / "out")
    with pytest.raises(ValueError, match="preference: 'quick', expected 'exact' or 'fastest'"):
        library.distill(teacher, tmp_path / "no", data=text, preference="quick")


def test_a_file_for_llama_cpp(given, tmp_path):
    teacher, text = given
    out = tmp_path / "out.gguf"
    result = bittern("distill", teacher, "-o", out, "--data", text, *BLOCKS, "--steps", 4, "--json", tmp_path / "r.json")
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["format"], report["type"], report["bits"], report["group_size"]) == ("gguf", "Q4_1", 4, 32)
    assert report["kl"] < report["start_kl"] and report["written_kl"] > 0
    assert f"validation KL of the file as Q4_1: {report['written_kl']:.4f}" in result.stdout
    assert f"{report['kl']:.4f} learned, {report['written_kl']:.4f} written" in (tmp_path / "out.gguf.html").read_text()
    assert out.read_bytes().startswith(b"GGUF") and not (tmp_path / "out.gguf.distill").exists()
    stored = {tensor.name: tensor.storage for tensor in library.inspect_model(out).tensors}
    assert stored["blk.1.ffn_down.weight"] == "Q4_1" and stored["token_embd.weight"] == "Q8_0"

    # From Python the same bytes, also under a name that tells nothing.
    options = {"context": 32, "calibration": 16, "validation": 4, "steps": 4}
    again = library.distill(teacher, tmp_path / "again", data=text, type="Q4_1", **options)
    assert contents(tmp_path / "again") == contents(out)
    assert (again.type, again.kl, again.written_kl) == ("Q4_1", report["kl"], report["written_kl"])
    assert f"{again.written_kl:.4f} written as Q4_1" in str(again)
    assert again.written_start_kl == report["written_start_kl"] >= again.written_kl
    assert not again.start_written and not report["start_written"]
    assert f"of the start in the same types: {report['written_start_kl']:.4f}" in result.stdout
    five = library.distill(teacher, tmp_path / "five", data=text, format="gguf", bits=5, **options)
    assert five.type == "Q5_1" and five.written_kl < again.written_kl
    with pytest.raises(ValueError, match="type and bits both given"):
        library.distill(teacher, tmp_path / "no.gguf", data=text, type="Q4_1", bits=4)

    # A GGUF file may teach, too, and be replaced by nothing but --force.
    result = bittern("distill", out, "-o", tmp_path / "five", "--type", "Q5_1", "--data", text, *BLOCKS, "--no-report")
    refused(result, 2, "exists")
    result = bittern("distill", out, "-o", tmp_path / "five", "--type", "Q5_1", "--data", text, *BLOCKS, "--no-report",
                     "--steps", 0, "--embedding-bits", 0, "--force")
    assert result.returncode == 0, result.stderr
    assert {tensor.name: tensor.storage for tensor in library.inspect_model(tmp_path / "five").tensors}[
        "token_embd.weight"] == "Q8_0"


def test_single_tensors_get_other_bits(given, tmp_path):
    teacher, text = given
    rules = ["--override", "v_proj=8", "--override", r"layers\.0\..*_proj=keep", "--override", "nothing=4"]
    result = bittern("distill", teacher, "-o", tmp_path / "out", "--data", text, *FLAGS, "--steps", 2, *rules)
    assert result.returncode == 0, result.stderr
    assert "note: the rule nothing matches no tensor" in result.stdout
    stored = {tensor.name: tensor.storage for tensor in library.inspect_model(tmp_path / "out").tensors}
    layer = "model.layers.{}.self_attn.{}_proj.weight"
    assert stored[layer.format(0, "v")].startswith("8 bit") and stored[layer.format(1, "v")].startswith("8 bit")
    assert stored[layer.format(1, "q")].startswith("3 bit") and "bit" not in stored[layer.format(0, "q")]
    again = library.distill(teacher, tmp_path / "again", data=text, steps=2, **OPTIONS, rules=[
        {"match": "v_proj", "bits": 8}, {"match": r"layers\.0\..*_proj", "keep": True}])  # fmt: skip
    assert contents(tmp_path / "again") == contents(tmp_path / "out")
    assert again.output.notes == []
    result = bittern("distill", teacher, "-o", tmp_path / "b.gguf", "--data", text, *BLOCKS, "--steps", 2, "--override", "v_proj=5")
    assert result.returncode == 0, result.stderr
    stored = {tensor.name: tensor.storage for tensor in library.inspect_model(tmp_path / "b.gguf").tensors}
    assert (stored["blk.0.attn_v.weight"], stored["blk.0.attn_q.weight"]) == ("Q5_1", "Q4_1")
    # In JSON, too; and the rule of embedding and head is nobody's.
    result = bittern("distill", teacher, "-o", tmp_path / "c", "--data", text, *FLAGS, "--steps", 0, "--format", "compressed-tensors",
                     "--embedding-bits", 8, "--override", "nothing=4", "--json", tmp_path / "c.json")
    assert result.returncode == 0, result.stderr
    notes = json.loads((tmp_path / "c.json").read_text())["notes"]
    assert notes[-2:] == ["the rule nothing matches no tensor", "--embedding-bits has no effect: the embedding is plain in compressed-tensors"]
    assert all(f"note: {note}\n" in result.stdout for note in notes) and "embed_tokens|" not in result.stdout
    page = (tmp_path / "c.html").read_text(errors="replace")
    assert ">compressed-tensors<" in page and ">MLX<" not in page


@pytest.mark.peer("numpy", "llama_cpp")
def test_llama_cpp_computes_what_was_written(given, tmp_path):
    import llama_cpp
    import numpy as np

    teacher, text = given
    out = tmp_path / "out.gguf"
    library.distill(teacher, out, data=text, context=32, calibration=16, validation=4, steps=4, rate=0.001)
    tokens = [3, 30, 66, 11, 7, 90, 45, 8]
    model = llama_cpp.Llama(str(out), n_ctx=64, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0)
    model.eval(tokens)
    theirs = np.array(model.scores[: len(tokens)])
    ours = library.load(out, activations="float").logits(tokens)
    # llama.cpp quantises activations to 8 bits.
    assert np.square(theirs - ours).mean() < 1e-3 * np.square(ours).mean()


def test_progress_decides(given, tmp_path):
    teacher, text = given
    seen = []

    def watch(state):
        seen.append(state)
        return "finish" if state.step == 2 else None

    report = library.distill(teacher, tmp_path / "out", data=[text], steps=50, rate=0.002, progress=watch, **OPTIONS)
    assert report.finished_early and report.steps == 2
    assert [state.doing for state in seen if state.doing == "learning"] == ["learning"] * 2
    assert seen[-1].doing == "writing"

    with pytest.raises(library.Cancelled, match="resume"):  # by a bool of numpy
        library.distill(teacher, tmp_path / "b", data=text, steps=4, rate=0.002, progress=lambda s: np.less(s.step, 2), **OPTIONS)
    with pytest.raises(OSError, match="b.distill: left by a run that was stopped; resume continues it"):
        library.distill(teacher, tmp_path / "b", data=text, steps=4, rate=0.002, **OPTIONS)
    library.distill(teacher, tmp_path / "b", data=text, steps=4, rate=0.002, resume=True, **OPTIONS)
    library.distill(teacher, tmp_path / "c", data=text, steps=4, rate=0.002, **OPTIONS)
    assert contents(tmp_path / "b") == contents(tmp_path / "c")
    with pytest.raises(ValueError, match="progress: returned 'stop'"):
        library.distill(teacher, tmp_path / "d", data=text, steps=1, rate=0.002, progress=lambda s: "stop", **OPTIONS)


@pytest.mark.parametrize("name, grids, steps", [("out", FLAGS, 400), ("out.gguf", BLOCKS, 200)])
def test_killed_it_goes_on_to_the_same_bytes(given, tmp_path, name, grids, steps):
    teacher, text = given
    flags = ["--data", text, *grids, "--steps", steps, "--rate", 0.002, "--no-report", "--checkpoint-minutes", 0,
             "--threads", 1]
    begun = time.monotonic()
    whole = bittern("distill", teacher, "-o", tmp_path / f"whole-{name}", *flags)
    took = time.monotonic() - begun
    assert whole.returncode == 0, whole.stderr
    command = [COMMAND, "distill", teacher, "-o", tmp_path / name, *flags]
    for _ in range(20):
        if (tmp_path / name).exists():
            break
        resume = ["--resume"] if (tmp_path / f"{name}.distill").exists() else []
        run = subprocess.Popen([str(word) for word in command + resume], stderr=subprocess.DEVNULL)
        time.sleep(random.uniform(0, took / 8))
        run.send_signal(signal.SIGKILL)
        run.wait()
    if not (tmp_path / name).exists():
        end = bittern(*command[1:], "--resume")
        assert end.returncode == 0, end.stderr
    assert contents(tmp_path / name) == contents(tmp_path / f"whole-{name}")


def test_ctrl_c_writes_the_best_so_far(given, tmp_path):
    teacher, text = given
    command = [COMMAND, "distill", teacher, "-o", tmp_path / "out.gguf", "--data", text, *BLOCKS, "--steps", 100000,
               "--rate", 0.0001, "--no-report", "--checkpoint-minutes", 0]
    run = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out.gguf.distill" / "state").exists() and run.poll() is None:
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    stdout, stderr = run.communicate(timeout=300)
    assert run.returncode == 0, stderr
    assert "ended by Ctrl-C" in stdout and library.load(tmp_path / "out.gguf").logits([3]).shape == (1, 96)


@pytest.mark.parametrize("flags, status, text", [
    (["--bits", 7], 2, "--bits: 7"),
    (["--steps", -1], 2, "--steps"),
    (["--data", "/no/such.txt"], 4, "/no/such.txt"),
    (["--validation", 100000], 2, "--validation"),
    (["--embedding-bits", 7], 2, "7"),
    (["--type", "Q8_0"], 2, "--type: Q8_0 has no scales and biases that could learn, expected Q4_1"),
    (["--format", "gguf", "--bits", 3], 2, "--bits: 3 in a GGUF file, expected 4 (Q4_1), 5 (Q5_1), a --type or --format mlx"),
    (["--format", "gguf", "--group-size", 64], 2, "--group-size: 64: groups of GGUF have 32 weights"),
    (["--format", "gguf", "--scale-dtype", "bf16"], 2, "--scale-dtype: bf16: scales of GGUF are f16"),
    (["--format", "mlx", "--type", "Q4_1"], 2, "--type Q4_1: the format is mlx"),
    (["--override", ".*=keep"], 2, "--override: no matrix of a layer is left that could learn, expected one of 2 to 8 bits"),
    (["--format", "gguf", "--override", "layers=keep"], 2, "--override: no matrix of a layer is left that could learn"),
    (["--group-size", 128], 2, "--group-size: no matrix of a layer is left that could learn"),
    (["--override", "v_proj="], 2, "--override: v_proj=, expected REGEX=BITS, REGEX=BITS:GROUP, REGEX=TYPE or REGEX=keep"),
    (["--override", "v_proj=7"], 2, "--override: v_proj: bits: 7, expected 2, 3, 4, 5, 6 or 8"),
    (["--format", "gguf", "--override", "v_proj=7"], 2, "--override: v_proj: bits: 7"),
    (["--report", "-"], 2, "--report: -: standard output, expected the name of a file"),
    (["--report", "page.html", "--no-report"], 2, "--report and --no-report both given, expected one"),
    (["--seed", -1], 2, "--seed: -1, expected an integer 0..18446744073709551615"),
    (["--seed", 2**64], 2, "--seed: 18446744073709551616, expected an integer 0..18446744073709551615"),
])
def test_refusals(given, tmp_path, flags, status, text):
    teacher, data = given
    given_data = [] if "--data" in flags else ["--data", data]
    result = bittern("distill", teacher, "-o", tmp_path / "out", "--ctx", 32, *given_data, *flags)
    refused(result, status, text)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_stays(given, tmp_path):
    teacher, text = given
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    result = bittern("distill", teacher, "-o", tmp_path / "out", "--data", text, *FLAGS, "--force")
    assert result.returncode != 0 and "out" in result.stderr
    assert (tmp_path / "out" / "mine.txt").read_text() == "precious"
    (tmp_path / "page.html").write_text("<html>mine</html>")
    result = bittern("distill", teacher, "-o", tmp_path / "new", "--data", text, *FLAGS, "--report",
                     tmp_path / "page.html", "--force")
    assert result.returncode != 0 and "--report" in result.stderr
    assert not (tmp_path / "new").exists() and not (tmp_path / "new.distill").exists()


def test_outputs_are_apart_and_named_by_their_flags(given, tmp_path):
    teacher, text = given
    out = tmp_path / "out"
    run = ["distill", teacher, "-o", out, "--data", text, *FLAGS, "--steps", 1, "--rate", 0.001]
    assert bittern(*run, "--no-report").returncode == 0
    refused(bittern(*run, "--report", out / "page.html", "--force"), 2, f"--report: {out}/page.html is inside {out}")
    refused(bittern(*run, "--json", out / "r.json", "--no-report", "--force"), 2, f"--json: {out}/r.json is inside {out}")
    one = tmp_path / "one"
    refused(bittern(*run, "--report", one, "--json", one, "--force"), 2, f"--json: {one} is also the output {one}")
    refused(bittern(*run, "--report", one, "--teacher-cache", one, "--force"), 2, f"--report: {one} is also the output {one}")
    refused(bittern(*run, "--report", teacher / "page.html", "--force"), 2, "--report: ", "inside the input")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out"]


def test_another_run_is_told_by_what_differs(given, tmp_path):
    teacher, text = given
    out = tmp_path / "out"
    run = ["distill", teacher, "-o", out, *FLAGS, "--rate", 0.001, "--no-report"]
    started = subprocess.Popen(
        [str(word) for word in [COMMAND, *run, "--data", text, "--steps", 100000, "--checkpoint-minutes", 0]],
        stderr=subprocess.DEVNULL,
    )
    while not (tmp_path / "out.distill" / "state").exists() and started.poll() is None:
        time.sleep(0.01)
    started.kill()
    started.wait()
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().upper())
    of = f"{out}.distill: left by a run with "
    refused(bittern(*run, "--data", text, "--steps", 5, "--resume"), 2, of + "--steps 100000, and it is 5 now", "--force")
    refused(bittern(*run, "--data", other, "--steps", 100000, "--resume"), 2, of + "another --data; give the same")
    refused(bittern(*run, "--data", text, "--steps", 100000, "--learn", "codes", "--resume"), 2,
            of + "--learn codes off, and it is on now")
    refused(bittern(*run, "--data", text, "--steps", 100000, "--override", "v_proj=4", "--override", "o_proj=keep", "--resume"), 2,
            of + "--override none, and it is v_proj=4, o_proj=keep now")
    (tmp_path / "out.distill" / "state").unlink()
    refused(bittern(*run, "--data", other, "--steps", 5, "--resume"), 2, of + "another --data; give the same")
    assert bittern(*run, "--data", text, "--steps", 5, "--resume").returncode == 0


def test_ctrl_c_before_anything_is_learned(given, tmp_path):
    teacher, text = given
    (tmp_path / "long.txt").write_text(text.read_text() * 200)
    out = tmp_path / "out"
    command = [COMMAND, "distill", teacher, "-o", out, "--data", tmp_path / "long.txt", "--group-size", 32, "--ctx", 32,
               "--calibration", 100000, "--no-report", "--threads", 1]
    run = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out.distill" / "start.partial.journal").exists() and run.poll() is None:
        time.sleep(0.001)
    run.send_signal(signal.SIGINT)
    stdout, stderr = run.communicate(timeout=300)
    assert run.returncode == 130 and stdout == ""
    assert stderr.splitlines()[-1] == (
        "bittern: distill: stopped while calibrating, before anything was learned; --resume goes on from here"
    )
