"""What surrounds a call and must not matter, or must be refused: environment variables, thread
counts, the caller's floating-point modes, tensors without elements."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import bittern

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = pathlib.Path(bittern.__file__).parents[1]  # its files are links in a build tree
BUILDS = [ROOT / "build" / preset / "bittern" for preset in ("release", "dev")]
COMMAND = os.environ.get("BITTERN_COMMAND") or next((str(p) for p in BUILDS if p.exists()), None)
if importlib.util.find_spec("torch") is not None:
    import torch

    import bittern.torch

BAD = [
    ("BITTERN_THREADS", "99999999999", "expected an integer 1.."),
    ("BITTERN_THREADS", "3x", "expected an integer 1.."),
    ("BITTERN_THREADS", "0", "expected an integer 1.."),
    ("BITTERN_THREADS", "-1", "expected an integer 1.."),
    ("BITTERN_THREADS", "", "expected an integer 1.."),
    ("BITTERN_THREADS", "100000", "expected an integer 1.."),
    ("BITTERN_ISA", "AVX512", "expected AVX2, AVX3 (AVX-512) or AVX3_DL"),
    ("BITTERN_ISA", "", "expected AVX2, AVX3 (AVX-512) or AVX3_DL"),
    ("BITTERN_KERNEL", "fast", "expected cpu or ref"),
    ("BITTERN_KERNEL", "", "expected cpu or ref"),
    ("BITTERN_CUDA_PLUGIN", "", "expected an absolute path"),
    ("BITTERN_CUDA_PLUGIN", "libbittern_cuda.so", "expected an absolute path"),
]


def python(code, **environment):
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run(
        [sys.executable, "-c", "import bittern, numpy as np\n" + code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


@pytest.mark.parametrize("variable, value, expected", BAD)
def test_a_bad_variable_is_an_error_of_the_first_plan(variable, value, expected):
    result = python("bittern.plan('pack_codes', axis_size=8)", **{variable: value})
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: ") and f"{variable}: {value or 'empty'}" in last, last
    assert expected in last


@pytest.mark.skipif(COMMAND is None, reason="the command is not built (build/release/bittern)")
@pytest.mark.parametrize("verb", ["ops", "check", "bench", "inspect", "quantize"])
@pytest.mark.parametrize("variable, value, expected", BAD)
def test_a_bad_variable_is_an_error_of_the_command(variable, value, expected, verb):
    if variable == "BITTERN_KERNEL":  # of any op
        expected = "expected one of cpu "
    result = subprocess.run(
        [COMMAND, verb, "/x"], capture_output=True, text=True, env={**os.environ, variable: value}
    )
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith(f"bittern: {variable}: {value or 'empty'}"), result.stderr
    assert expected in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.skipif(COMMAND is None, reason="the command is not built (build/release/bittern)")
def test_the_command_takes_no_more_threads_than_the_library():
    result = subprocess.run([COMMAND, "ops", "--threads", "100000"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "--threads" in result.stderr and "expected an integer 1.." in result.stderr


def test_names_of_targets_in_either_case():
    code = "print(bittern.plan('quantize_per_group', axis_size=128).sku.architecture)"
    result = python(code, BITTERN_ISA="avx2", BITTERN_THREADS="2", BITTERN_KERNEL="CPU")
    assert result.stdout.strip() == "AVX2", result.stderr


def test_too_many_threads_are_refused():
    before = bittern.num_threads()
    with pytest.raises(ValueError, match="num_threads: 100000, expected an integer 1.."):
        bittern.set_num_threads(100000)
    assert bittern.num_threads() == before
    bittern.plan("pack_codes", axis_size=8)  # nothing is left behind


def test_a_thread_the_system_refuses_is_an_error_not_the_end():
    """Under a limit of address space OpenMP's runtime would end the process."""
    result = python(
        "import resource\n"
        "x, scale = np.ones((4096, 4096), np.float32), np.ones((4096, 32), np.float32)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, -1))\n"
        "try:\n"
        "    bittern.set_num_threads(250)\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "bittern.set_num_threads(2)\n"
        "print(bittern.quantize_per_group(x, scale, group_size=128).sum())"
    )
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first.startswith("num_threads: 250 threads; the system lets this process start ")
    assert second == str(4096 * 4096)


@pytest.mark.peer("torch")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_flush_to_zero_changes_nothing(threads):
    rng = np.random.default_rng(5)
    x = (rng.integers(-900, 900, (512, 2048)) * 2.0**-149).astype(np.float32)
    scale = np.full((512, 64), 9 * 2.0**-149, np.float32)
    half = torch.from_numpy(rng.integers(-99, 99, (64, 1024)) * 2.0**-24).to(torch.float16)

    def results():
        yield bittern.quantize_per_group(x, scale, group_size=32)
        yield bittern.fake_quantize_per_group(x, scale, group_size=32)
        yield from bittern.dynamic_quantize(x)
        yield from bittern.qdq_affine_init(x, bits=4, group_size=32, method="lsq")
        yield bittern.fake_quantize_per_group(half, half[:, :32].abs() + 1e-6, group_size=32)
        yield bittern.make_rotation("dense", 24)
        yield from bittern.sphere_codebook(128, 4)

    before = bittern.num_threads()
    try:
        bittern.set_num_threads(threads)
        expected = [np.asarray(r) for r in results()]
        assert np.abs(expected[0]).max() == 100
        assert torch.set_flush_denormal(True)
        got = [np.asarray(r) for r in results()]
        # The mode is the caller's again.
        assert (torch.full((4,), 1e-40) * 0.5).tolist() == [0.0] * 4
    finally:
        torch.set_flush_denormal(False)
        bittern.set_num_threads(before)
    for a, b in zip(expected, got, strict=True):
        assert a.tobytes() == b.tobytes()


DTYPES = {"f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16", "u8": "uint8",
          "s8": "int8", "s32": "int32", "u32": "uint32"}  # fmt: skip


@pytest.mark.peer("torch")
@pytest.mark.parametrize("op", [op.name for op in bittern.ops()])
def test_torch_tensors_without_elements(op):
    """Their data is null, which does not leave them out."""
    info = next(o for o in bittern.ops() if o.name == op)
    ran = 0
    for field in info.fields:
        if field.choices or not isinstance(field.default, int):
            continue
        try:
            plan = bittern.plan(op, **{field.name: 0})
        except (ValueError, NotImplementedError):
            continue  # not a size
        tensors = {o.name: torch.ones(o.shape, dtype=getattr(torch, DTYPES[o.dtype]))
                   for o in plan.operands}  # fmt: skip
        if all(t.numel() for t in tensors.values()):
            continue
        try:
            plan.run(**tensors)
        except ValueError as error:  # ones are not contents that every table may have
            assert "left out" not in str(error) and "null" not in str(error), error
        ran += 1
    assert ran > 0


@pytest.mark.peer("torch")
def test_gradients_of_nothing():
    x = torch.empty(0, 64)
    d_x, d_z, d_weight = bittern.gated_rms_norm_backward(x, x, x, torch.ones(64))
    assert d_x.shape == d_z.shape == (0, 64) and d_weight.tolist() == [0.0] * 64
    only = bittern.gated_rms_norm_backward(x, x, x, torch.ones(64), d_z=False, d_weight=False)
    assert only.shape == (0, 64)

    x = torch.empty(0, 64, requires_grad=True)
    scale = torch.empty(0, 2, requires_grad=True)
    y = bittern.torch.fake_quantize_per_group(x, scale, group_size=32)
    y.sum().backward()
    assert x.grad.shape == (0, 64) and scale.grad.shape == (0, 2)
    q = torch.empty(0, 64, dtype=torch.uint8)
    scales, biases = (torch.empty(0, 2, requires_grad=True) for _ in range(2))
    bittern.torch.qdq_affine(q, scales, biases, group_size=32).sum().backward()
    assert scales.grad.shape == biases.grad.shape == (0, 2)


def test_the_build_trees_plugin_is_found():
    """The Python package of a build tree loads the CUDA plug-in that the same build made."""
    if not (PACKAGE.parent / "libbittern_cuda.so").exists():
        pytest.skip("no libbittern_cuda.so beside the build's Python package")
    if os.environ.get("BITTERN_CUDA_PLUGIN"):
        pytest.skip("BITTERN_CUDA_PLUGIN names another")
    try:
        bittern.plan("quantize_per_group", device="cuda:0")
    except RuntimeError as error:
        assert "no such file" not in str(error)
