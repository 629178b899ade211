"""The command: what it prints, what it refuses, and with which exit status. No timing is judged."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILDS = [ROOT / "build" / preset / "bittern" for preset in ("release", "dev")]
COMMAND = os.environ.get("BITTERN_COMMAND") or next((str(p) for p in BUILDS if p.exists()), None)

OPS = re.findall(r"^BITTERN_OP\(\w+, +(\w+),", (ROOT / "src/ops/ops.inc").read_text(), re.M)

pytestmark = pytest.mark.skipif(
    COMMAND is None, reason="the command is not built (build/release/bittern)"
)


def bittern(*args, env=None):
    return subprocess.run(
        [COMMAND, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=600,
        errors="replace",
        env={**os.environ, **(env or {})},
    )


def refused(result, status, *texts):
    """One line on stderr, nothing on stdout, the given exit status."""
    assert result.returncode == status, result
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("bittern: "), result.stderr
    for text in texts:
        assert text in result.stderr


def test_version():
    result = bittern("--version")
    assert result.returncode == 0
    assert re.fullmatch(r"bittern \d+\.\d+\.\d+\n", result.stdout)


def test_help_names_the_verbs():
    result = bittern("--help")
    assert result.returncode == 0
    for verb in ("ops", "check", "bench", "inspect"):
        assert verb in result.stdout


@pytest.mark.parametrize("verb", ["ops", "check", "bench"])
def test_help_of_a_verb_has_an_example(verb):
    result = bittern(verb, "--help")
    assert result.returncode == 0
    assert f"Example: bittern {verb}" in result.stdout
    for flag in ("--device", "--threads", "--json", "--quiet"):
        assert flag in result.stdout


@pytest.mark.parametrize(
    "args, texts",
    [
        ([], ["no verb", "ops check bench"]),
        (["frobnicate"], ["frobnicate", "ops check bench"]),
        (["ops", "--frobnicate"], ["--frobnicate", "--frobnicate=value"]),
        (["ops", "--frobnicate=1"], ["--frobnicate", "bittern ops OP"]),
        (["bench", "--frobnicate"], ["--frobnicate", "--quick"]),
        (["ops", "frobnicate"], ["frobnicate", "quantize_per_group"]),
        (["check", "frobnicate"], ["frobnicate", "quantize_per_group"]),
        (["bench", "frobnicate"], ["frobnicate", "quantize_per_group"]),
        (["bench", "--filter", "frobnicate"], ["--filter", "frobnicate"]),
        (["bench", "--threads", "0"], ["--threads", "0, expected an integer 1.."]),
        (["bench", "--threads", "two"], ["--threads", "two, expected an integer 1.."]),
        (["bench", "--threads"], ["--threads"]),
        (["bench", "--shrink", "0"], ["--shrink", "0, expected an integer 1.."]),
        (["bench", "--repeat", "-1"], ["--repeat", "-1, expected an integer 1.."]),
        (["check", "--seed", "x"], ["--seed", "x, expected an integer"]),
        (["ops", "--device", "tpu"], ["--device", "tpu", "expected auto, cpu, cuda or cuda:n"]),
        (["ops", "--device", "cuda:x"], ["--device", "cuda:x", "cuda:n"]),
        (["check", "--outer_size=5"], ["--outer_size", "bittern check OP"]),
        (["check", "quantize_per_group", "--colour=5"], ["colour", "outer_size"]),
        (["check", "quantize_per_group", "--outer_size"], ["--outer_size=value"]),
        (["check", "quantize_per_group", "--outer_size=x"], ["outer_size: x, expected an integer"]),
        (["check", "quantize_per_group", "--element=f33"], ["element: f33, expected", "bf16"]),
        (["check", "quantize_per_group", "--outer_size=-1"], ["outer_size"]),
        (["check", "quantize_per_group", "--q_max=5", "--q_max=6"], ["--q_max: given twice"]),
        (["check", "quantize_per_group", "extra"], ["extra"]),
        (["quantize", "m", "--bits"], ["--bits: no value, expected one (", "bits per weight: 2, 3,"]),
        (["quantize", "m", "--dequantize"], ["--dequantize: no value", "f32, f16 or bf16"]),
        (["quantize", "m", "--bits", "4", "--q-bits", "8"], ["--bits: given more than once"]),
        (["quantize", "m", "--bit", "4"], ["unknown argument --bit (did you mean --bits?), expected"]),
        (["quantize", "m", "--tensor-typ=a=b"], ["(did you mean --tensor-type?)"]),
        (["quantize", "m", "--frobnicate"], ["unknown argument --frobnicate, expected one of"]),
        (["quantize", "in.gguf", "out.gguf", "Q4_K_M"], ["out.gguf: one argument too many", "-o OUT"]),
    ],
)
def test_bad_usage_is_one_line(args, texts):
    refused(bittern(*args), 2, *texts)


VERBS = ("ops", "check", "bench", "inspect", "quantize", "eval") if COMMAND else ()


def options_of(verb):
    """All names of every option of the verb that takes a value, and its positional arguments."""
    lines = bittern(verb, "--help").stdout.splitlines()
    found = [re.match(r"  ([A-Z]+$|[A-Z]+(?= )|-[\w,-]+(?= [A-Z]))", line) for line in lines]
    names = [name for match in found if match for name in match[1].split(",")]
    assert "--json" in names and len(names) >= 4, lines
    return names


@pytest.mark.parametrize("verb", VERBS)
def test_an_empty_value_names_its_flag(verb):
    """A script's variable that was never set is not the same as a flag that was not given."""
    for name in options_of(verb):
        flag = [name] if name.startswith("-") else []
        refused(bittern(verb, *flag, ""), 2, name, ": empty, expected a value")
        refused(bittern(verb, *flag, "", "x", "y"), 2, name, ": empty, expected a value")
        if name.startswith("--"):  # with nothing after it, it is not the next argument that is meant
            refused(bittern(verb, f"{name}=", "/x"), 2, f"bittern: {name}: empty, expected a value")
    refused(bittern(verb, "--quiet="), 2, "--quiet: empty")


def test_a_field_without_a_value():
    for args in (["--outer_size="], ["--outer_size", ""]):
        refused(bittern("check", "quantize_per_group", *args), 2, "--outer_size: empty, expected a value")


def test_a_rule_takes_one_value():
    """What follows it is the model."""
    for flag in ("--override", "--tensor-type"):
        refused(bittern("quantize", flag, "x=4", "/no/model", "--dry-run", "--bits", 4), 4, "/no/model")


@pytest.mark.parametrize("verb", ["ops", "check", "bench"])
def test_a_device_that_is_not_there(verb, tmp_path):
    env = {"BITTERN_CUDA_PLUGIN": str(tmp_path / "none.so")}
    refused(bittern(verb, "--device", "cuda", env=env), 4, "--device cuda", "none.so")


@pytest.mark.parametrize("verb", ["ops", "check", "bench"])
def test_json_that_cannot_be_written(verb, tmp_path):
    refused(bittern(verb, "--json", tmp_path / "no" / "x.json"), 4, "--json", "no/x.json")
    there = tmp_path / "there.json"
    there.write_text("mine")
    refused(bittern(verb, "--json", there), 2, "--json", "exists", "--force")
    assert there.read_text() == "mine"


def test_ops_lists_every_op_with_its_guarantee(tmp_path):
    path = tmp_path / "ops.json"
    result = bittern("ops", "--json", path)
    assert result.returncode == 0 and result.stderr == ""
    ops = json.loads(path.read_text())
    assert list(tmp_path.iterdir()) == [path]
    for op in ops:
        line = next(l for l in result.stdout.splitlines() if l.startswith(op["op"] + " "))
        assert "same bits on all backends" in line
        backends = {b["backend"]: b for b in op["backends"]}
        assert backends["ref"]["dtypes"] and list(backends) == ["ref", "cpu", "cuda"]
        assert backends["ref"]["guarantee"]["same_bits_on_all_backends"] is True
        assert op["fields"] and op["operands"] and op["chosen_here"]["backend"] in backends
    assert bittern("ops", "--quiet", "--json", path, "--force").stdout == ""


def test_ops_and_check_tell_of_kernels_with_a_bound(tmp_path):
    path = tmp_path / "ops.json"
    result = bittern("ops", "aura_attention", "--json", path)
    (op,) = json.loads(path.read_text())
    assert all(b["guarantee"]["error_bound"] == 0 for b in op["backends"] if "guarantee" in b)
    weaker = {w["kernel"]: w for w in op["weaker_kernels"]}
    if "guarantee" not in weaker["cpu_int8"]:
        pytest.skip(weaker["cpu_int8"]["why_not"])
    guarantee = weaker["cpu_int8"]["guarantee"]
    assert guarantee["error_norm"] == "terms" and guarantee["error_bound"] == 1 / 32512
    assert "error at most 3.08e-05 x terms" in result.stdout
    assert "with preference fastest also cpu_int8" in bittern("ops").stdout
    result = bittern("check", "aura_attention", "--quick", "--json", path, "--force")
    assert result.returncode == 0 and "within its declared bound" in result.stdout
    (row,) = json.loads(path.read_text())
    assert row["kernels"]["cpu_int8"]["compared"] > 10
    assert 0 < row["kernels"]["cpu_int8"]["share_of_bound"] <= 1
    assert "share_of_bound" not in row["kernels"]["cpu"]
    assert "cpu_int8: errors up to" in result.stdout


def test_ops_tells_what_a_variable_chooses(tmp_path):
    path = tmp_path / "ops.json"
    for kernel in ("ref", "REF"):
        result = bittern("ops", "--json", path, "--force", env={"BITTERN_KERNEL": kernel})
        assert result.returncode == 0, result
        assert {op["chosen_here"]["backend"] for op in json.loads(path.read_text())} == {"ref"}
    # A kernel that one op has is refused by the plans of the others.
    result = bittern("ops", "--json", path, "--force", env={"BITTERN_KERNEL": "cpu_int8"})
    assert result.returncode == 0 and "none: quantize_per_group: BITTERN_KERNEL: cpu_int8, expected" in result.stdout
    chosen = {op["op"]: op["chosen_here"] for op in json.loads(path.read_text())}
    assert chosen["pack_codes"]["backend"] is None
    assert "BITTERN_KERNEL: cpu_int8, expected cpu or ref" in chosen["pack_codes"]["why_not"]
    result = bittern("ops", "pack_codes", env={"BITTERN_KERNEL": "cpu_int8"})
    assert "none is chosen here: pack_codes: BITTERN_KERNEL: cpu_int8" in result.stdout


def test_ops_shows_an_op():
    result = bittern("ops", "quantize_per_group")
    assert result.returncode == 0
    for text in ("--granularity", "group token channel tensor", "zero_point", "optional", "ref"):
        assert text in result.stdout


def test_ops_shows_the_operands_of_the_fields_that_are_asked_for(tmp_path):
    text = bittern("ops", "aura_decode", "--element", "bf16", "--rotated=false").stdout
    assert re.search(r"^  out  y +bf16  \[rows,dim\] +\[\d+,128\] ", text, re.M)
    assert re.search(r"^  in   table +f32   \[dim\] +\[128\] *$", text, re.M)
    assert re.search(r"^Example: bittern check aura_decode .*--element=bf16", text, re.M)
    text = bittern("ops", "dynamic_quantize", "--symmetric=true").stdout
    assert re.search(r"^  out  zero_point +s32 .* not for these *$", text, re.M)
    path = tmp_path / "op.json"
    bittern("ops", "pack_codes", "--json", path)
    (op,) = json.loads(path.read_text())
    assert [o["axes"] for o in op["operands"]] == [["outer_size", "axis_size"], ["outer_size", "words"]]
    wrong = bittern("ops", "pack_codes", "--bits=9")
    assert wrong.returncode == 2 and "pack_codes: bits: 9, expected 1..8" in wrong.stderr


@pytest.mark.parametrize("op", OPS)
def test_the_example_of_every_op_runs(op):
    for fields in ([], ["--element=bf16"]):
        shown = bittern("ops", op, *fields)
        if fields and "no field element" in shown.stderr:
            continue
        assert shown.returncode == 0, shown
        (example,) = re.findall(r"^Example: bittern (check .*)$", shown.stdout, re.M)
        result = bittern(*example.split())
        assert result.returncode == 0, result
        assert re.search(rf"^{op} +[1-9]\d* +0 ", result.stdout, re.M)


def test_check_one_problem_as_the_oracle_prints_it(tmp_path):
    # The form of an oracle's reproducer, word for word.
    line = (
        "check quantize_per_group --outer_size=5 --axis_size=96 --inner_size=1 --group_size=32 "
        "--granularity=group --q_min=-128 --q_max=127 --element=bf16 --code=s8 "
        "--f32_scale=false --seed=3"
    )
    path = tmp_path / "check.json"
    result = bittern(*line.split(), "--json", path)
    assert result.returncode == 0, result
    (row,) = json.loads(path.read_text())
    assert row["op"] == "quantize_per_group" and row["compared"] > 0 and row["failures"] == []
    spaced = bittern("check", "quantize_per_group", "--outer_size", 5, "--axis_size", 128)
    assert spaced.returncode == 0, spaced


def test_check_prints_a_line_per_op():
    result = bittern("check", "pack_codes", "--quick", "--threads", 2)
    assert result.returncode == 0, result
    assert re.search(r"^pack_codes +[1-9]\d* +0 +[\d.]+$", result.stdout, re.M)
    assert result.stderr == ""


def test_bench_prints_its_limits_and_ratios(tmp_path):
    path = tmp_path / "bench.json"
    result = bittern(
        "bench", "pack_codes", "quantize_per_group", "--quick", "--repeat", 1, "--threads", 2,
        "--device", "cpu", "--json", path,
    )  # fmt: skip
    assert result.returncode == 0, result
    assert "QUICK" in result.stdout and "2 threads" in result.stdout
    assert "streaming copy" in result.stdout and "reading alone" in result.stdout
    heading = next(l for l in result.stdout.splitlines() if l.startswith("op "))
    assert heading.split() == ["op", "case", "kernel", "ms", "rate", "limit", "ratio", "Melem/s/core"]
    report = json.loads(path.read_text())
    machine = report["machine"]
    for key in ("copy_gb_s", "streaming_gb_s", "memcpy_gb_s", "read_gb_s", "gemm_gflop_s"):
        assert machine[key] > 0
    assert machine["threads"] == 2 and machine["quick"] is True
    assert {"cpu", "cores", "pinned", "isa", "version"} <= machine.keys()
    assert {r["op"] for r in report["rows"]} == {"pack_codes", "quantize_per_group"}
    for row in report["rows"]:
        assert row["ms"] > 0 and row["gb_s"] > 0 and row["limit_gb_s"] > 0 and row["ratio"] > 0
        assert row["kernel"] in ("cpu", "ref") and row["device"] == "cpu"
        assert row["traffic_ratio"] == row["ratio"] and row["sets"] == row["calls"] == 1
        assert row["problem"]["outer_size"] > 0 and row["case"]


def test_bench_leaves_a_gpus_cases_off_the_cpu():
    label = "gated_rms_norm bf16 1048576 x 128"
    refused(bittern("bench", "--device", "cpu", "--filter", label), 2, "GPU's size", "--device cuda")


def test_bench_on_an_emulated_gpu(tmp_path):
    """The flow alone: streams, graphs, operands that take turns. Its times mean nothing."""
    plugin = pathlib.Path(COMMAND).parent / "libbittern_cuda_emulated.so"
    if not plugin.exists():
        pytest.skip("no emulated device beside the command")
    path = tmp_path / "bench.json"
    result = bittern(
        "bench", "quantize_per_group", "rope", "--device", "cuda", "--quick", "--shrink", 2048,
        "--repeat", 1, "--json", path, env={"BITTERN_CUDA_PLUGIN": str(plugin)},
    )  # fmt: skip
    assert result.returncode == 0, result
    assert "1/2048 of the elements" in result.stdout and "multiprocessors" in result.stdout
    assert "copy kernel" in result.stdout and "no GEMM rate" in result.stdout
    assert "rope: no kernel on cuda:0" in result.stdout
    heading = next(l for l in result.stdout.splitlines() if l.startswith("op "))
    assert heading.split() == ["op", "case", "kernel", "ms", "rate", "limit", "ratio", "of", "GEMM"]
    report = json.loads(path.read_text())
    cuda = report["machine"]["cuda"]
    for key in ("multiprocessors", "l2_bytes", "copy_bytes", "memcpy_gb_s", "kernel_copy_gb_s"):
        assert cuda[key] > 0
    assert cuda["copy_gb_s"] == max(cuda["memcpy_gb_s"], cuda["kernel_copy_gb_s"])
    assert report["machine"]["shrink"] == 2048
    assert {r["op"] for r in report["rows"]} == {"quantize_per_group"}
    for row in report["rows"]:
        assert row["device"] == "cuda:0" and row["ms"] > 0
        assert row["ratio"] == row["traffic_ratio"] > 0
        # Four caches' worth of operands take turns, each as often as any other.
        assert row["sets"] > 1 and row["calls"] % row["sets"] == 0


def test_bench_measures_the_plan(tmp_path):
    path = tmp_path / "bench.json"
    result = bittern("bench", "--quick", "--filter", "plan overhead", "--quiet", "--json", path)
    assert result.returncode == 0 and result.stdout == "", result
    (row,) = json.loads(path.read_text())["rows"]
    assert row["op"] == "plan overhead" and 0 < row["ms"]


def test_peers_script_explains_itself():
    result = subprocess.run(
        [sys.executable, ROOT / "bench" / "peers.py", "--help"], capture_output=True, text=True
    )
    assert result.returncode == 0 and "torch" in result.stdout


def test_cuda_peers_script_explains_itself():
    script = ROOT / "bench" / "peers_cuda.py"
    result = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert result.returncode == 0 and "FLA" in result.stdout


def test_peers_script_names_what_is_missing(tmp_path):
    path = tmp_path / "peers.json"
    result = subprocess.run(
        [sys.executable, ROOT / "bench" / "peers.py", "--bittern", COMMAND, "--quick", "--op",
         "pack_codes 4 bit", "--threads", "2", "--json", path],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result
    rows = json.loads(path.read_text())["rows"]
    assert {"bittern", "torch eager", "torch.compile"} <= {r["peer"] for r in rows}
    for row in rows:
        assert row["ms"] is None or row["ms"] > 0
        assert row["ms"] is not None or row["note"]


@pytest.mark.parametrize("args", [["--version"], ["ops"], ["ops", "pack_codes"], ["bench", "--help"]])
def test_text_that_is_lost_is_an_error(args):
    closed = subprocess.run([COMMAND, *args], stderr=subprocess.PIPE, text=True, preexec_fn=lambda: os.close(1))
    assert closed.returncode == 1
    assert closed.stderr == "bittern: standard output: Bad file descriptor, cannot write to it\n"
    with open("/dev/full", "w") as full:
        result = subprocess.run([COMMAND, *args], stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1
    assert result.stderr == "bittern: standard output: No space left on device, cannot write to it\n"
    out, into = os.pipe()
    os.close(out)
    result = subprocess.run(
        [COMMAND, *args], stdout=into, stderr=subprocess.PIPE, text=True, restore_signals=False
    )  # Python ignores SIGPIPE, and so does its child
    os.close(into)
    assert result.returncode == 1
    assert result.stderr == "bittern: standard output: Broken pipe, cannot write to it\n"
