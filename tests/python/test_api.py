"""The Python interface itself: functions, plans, errors, threads, stubs."""

import inspect
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from arrays import assert_same_bits, from_f32
from problems import normal
from quantized import OPS, ROOT, plan_for, problem, quantize, rng

import bittern


# ---- the functions ----


def test_a_plan_is_chosen_once(problem, monkeypatch):
    """For each problem, and again when what the choice depends on changes."""
    x, scale, expected = problem
    call = bittern.quantize_per_group
    remembered = call._body._remembered
    call(x, scale, group_size=64)
    before = remembered.cache_info()
    assert np.array_equal(call(-x, scale, group_size=64), quantize(-x, scale))
    assert remembered.cache_info().hits == before.hits + 1
    monkeypatch.setenv("BITTERN_KERNEL", "ref")
    assert np.array_equal(call(x, scale, group_size=64), expected)
    assert remembered.cache_info().misses == before.misses + 1
    with pytest.raises(ValueError, match=r"group_size: \[64\], expected an integer"):
        call(x, scale, group_size=[64])


def test_granularities():
    x = rng.normal(size=(4, 5, 6)).astype(np.float32)
    call = bittern.quantize_per_group
    for axis in range(3):
        scale = rng.uniform(0.01, 0.1, x.shape[axis]).astype(np.float32)
        along = [-1 if i == axis else 1 for i in range(3)]
        expected = np.clip(np.rint(x / scale.reshape(along)), -128, 127)
        assert np.array_equal(call(x, scale, granularity="channel", axis=axis), expected)
        assert np.array_equal(call(x, scale, granularity="channel", axis=axis - 3), expected)
    scale = rng.uniform(0.01, 0.1, (4, 5)).astype(np.float32)
    expected = np.clip(np.rint(x / scale[:, :, None]), -128, 127)
    assert np.array_equal(call(x, scale, granularity="token"), expected)
    expected = np.clip(np.rint(x / np.float32(0.03)) + 5, -128, 127)
    assert np.array_equal(call(x, 0.03, 5, granularity="tensor"), expected)
    assert np.array_equal(call(x, np.float32(0.03), np.int32(5), granularity="tensor"), expected)
    with pytest.raises(ValueError, match="axis 3"):
        call(x, scale, granularity="channel", axis=3)


def test_codes_follow_the_output(problem):
    x, scale, _ = problem
    q = np.zeros(x.shape, np.uint8)
    bittern.quantize_per_group(x, scale, 128, q=q, group_size=64, q_min=0, q_max=255)
    assert np.array_equal(q, quantize(x, scale, zp=128, low=0, high=255))
    made = bittern.quantize_per_group(x, scale, 128, group_size=64, q_min=0, q_max=255, code="u8")
    assert made.dtype == np.uint8 and np.array_equal(made, q)


def test_optional_outputs_may_be_left_out():
    q = rng.integers(-128, 128, (3, 64)).astype(np.int8)
    d_y = rng.normal(size=q.shape).astype(np.float32)
    scale = np.full((3, 2), 0.5, np.float32)
    call = bittern.dequantize_per_group_backward
    d_q, d_scale = call(d_y, q, scale, group_size=32)
    assert_same_bits(call(d_y, q, scale, group_size=32, d_q=False), d_scale)
    assert_same_bits(call(d_y, q, scale, group_size=32, d_scale=False), d_q)
    with pytest.raises(ValueError, match="every output is left out"):
        call(d_y, q, scale, group_size=32, d_q=False, d_scale=False)
    with pytest.raises(ValueError, match="d_scale: 3, expected an array or False"):
        call(d_y, q, scale, group_size=32, d_scale=3)


def test_operands_that_one_choice_has():
    x = rng.normal(size=(3, 64)).astype(np.float32)
    assert len(bittern.dynamic_quantize(x, group_size=32)) == 2
    scale, zero_point, q = bittern.dynamic_quantize(x, group_size=32, symmetric=False)
    assert scale.shape == zero_point.shape == (3, 2) and zero_point.dtype == np.int32
    with pytest.raises(ValueError, match="zero_point goes with symmetric false only"):
        bittern.dynamic_quantize(x, group_size=32, zero_point=zero_point)


def _formula(op):
    """The first line of the comment that opens the op's header."""
    header = (ROOT / "include" / "bittern" / "ops" / f"{op}.h").read_text()
    return header.splitlines()[0].removeprefix("// ")


def test_signatures():
    for op in bittern.ops():
        function = getattr(bittern, op.name)
        parameters = inspect.signature(function).parameters
        assert {o.name for o in op.operands} <= set(parameters)
        assert op.name in bittern.__all__ and _formula(op.name) in function.__doc__
    with pytest.raises(TypeError, match="missing a required argument: 'scale'"):
        bittern.quantize_per_group(np.zeros((1, 128), np.float32))
    with pytest.raises(TypeError, match="unexpected keyword argument 'groupsize'"):
        bittern.quantize_per_group(np.zeros((1, 128), np.float32), 1.0, groupsize=3)


def test_empty():
    for shape in ((0, 128), (3, 0), (0, 0)):
        q = bittern.quantize_per_group(np.zeros(shape, np.float32), 1.0)
        assert q.shape == shape and q.dtype == np.int8


# ---- every op on rows through the table ----

ROW_OPS = [o.name for o in bittern.ops() if o.category in ("quantization", "affine", "packing")]


def filled(operand):
    shape, kinds = operand.shape, {"u8": np.uint8, "s8": np.int8, "s32": np.int32, "u32": np.uint32}
    if operand.dtype in kinds:
        return rng.integers(0, 4, shape).astype(kinds[operand.dtype])
    if "scale" in operand.name:
        return from_f32(rng.uniform(0.1, 1, shape), operand.dtype)
    return from_f32(rng.normal(size=shape), operand.dtype)


@pytest.mark.parametrize("element", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("op", ROW_OPS)
def test_every_op_equals_ref(op, element):
    fields = {"outer_size": 3, "axis_size": 256}
    names = {f.name for f in next(o for o in bittern.ops() if o.name == op).fields}
    if "element" in names:
        fields["element"] = element
    chosen, ref = bittern.plan(op, **fields), bittern.plan(op, kernel="ref", **fields)
    inputs = {o.name: filled(o) for o in chosen.operands if not o.output}
    results = []
    for p in (chosen, ref):
        outputs = {o.name: filled(o) for o in p.operands if o.output}
        p.can_implement(**inputs, **outputs)
        p.run(**inputs, **outputs)
        results.append(outputs)
    for name in results[0]:
        assert_same_bits(results[0][name], results[1][name])


@pytest.mark.parametrize("op", ROW_OPS)
def test_what_plans_say(op):
    table = next(o for o in bittern.ops() if o.name == op)
    fields = {"outer_size": 3, "axis_size": 256}
    has_element = "element" in {f.name for f in table.fields}
    for element in ("f32", "f16", "bf16", "f64") if has_element else (None,):
        more = {"element": element} if element else {}
        for kernel in (None, "ref"):
            p = bittern.plan(op, kernel=kernel, **fields, **more)
            assert p.sku.op == op and p.sku.category == table.category
            assert p.sku.backend in table.backends and p.device == "cpu"
            assert kernel is None or (p.sku.kernel, p.sku.backend, p.sku.architecture) == (
                "ref",
                "ref",
                "any",
            )
            assert p.workspace_bytes >= 0
            guarantee = p.precision_guarantee
            math = ("f64" if element == "f64" else "f32") if element else "u32"
            assert guarantee.math_precision == guarantee.accumulator == math
            assert guarantee.deterministic and guarantee.bit_stable_on_same_hardware
            assert guarantee.same_bits_on_all_backends
            assert (guarantee.error_norm, guarantee.error_bound) == ("exact", 0)
            if element:
                assert p.sku.element == element
            groups = {f.name: f.default for f in table.fields}.get("group_size")
            assert p.num_groups == (256 // groups if groups else 0)


def test_a_weaker_kernel_declares_its_bound():
    try:
        p = bittern.plan("aura_attention", capacity=16, kernel="cpu_int8", preference="fastest")
    except NotImplementedError as e:
        pytest.skip(str(e))
    guarantee = p.precision_guarantee
    assert (guarantee.error_norm, guarantee.error_bound) == ("terms", 1 / 32512)
    assert "error_bound=" in repr(guarantee) and not guarantee.same_bits_on_all_backends


def test_sku(problem):
    p = plan_for(problem[0])
    assert repr(p.sku).startswith(
        "Sku(category='quantization', op='quantize_per_group', element='f32'"
    )
    assert p.sku.aux_element == "s8"
    assert (
        repr(p)
        == f"<bittern.Plan quantize_per_group on cpu, kernel {p.sku.kernel} ({p.sku.architecture})>"
    )
    x, scale, zero_point, q = p.operands
    assert (x.name, x.dtype, x.shape, x.output, x.optional) == ("x", "f32", (6, 256), False, False)
    assert (zero_point.dtype, zero_point.shape, zero_point.optional) == ("s32", (6, 4), True)
    assert q.output and q.dtype == "s8"
    assert bittern.plan("quantize_per_group", granularity="token", group_size=0).num_groups == 0


def test_workspace():
    fields = {"outer_size": 512, "axis_size": 64, "granularity": "channel"}
    x, d_y = (rng.normal(size=(512, 64)).astype(np.float32) for _ in range(2))
    scale = rng.uniform(0.1, 1, 64).astype(np.float32)
    outputs = []
    for kernel in (None, "ref"):
        p = bittern.plan("fake_quantize_per_group_backward", kernel=kernel, **fields)
        d_scale = np.zeros(64, np.float32)
        p.run(d_y=d_y, x=x, scale=scale, d_scale=d_scale)  # takes its own
        outputs.append(d_scale)
        need = p.workspace_bytes
        memory = np.zeros(need + 64, np.uint8)
        aligned = memory[-memory.ctypes.data % 64 :][:need]
        again = np.zeros(64, np.float32)
        p.run(d_y=d_y, x=x, scale=scale, d_scale=again, workspace=aligned)
        assert_same_bits(again, d_scale)
        if need:
            with pytest.raises(
                ValueError, match=f"workspace: {need - 1} bytes, expected at least {need}"
            ):
                p.run(d_y=d_y, x=x, scale=scale, d_scale=again, workspace=aligned[:-1])
    assert_same_bits(*outputs)
    with pytest.raises(ValueError, match="workspace: read-only"):
        p.run(d_y=d_y, x=x, scale=scale, d_scale=d_scale, workspace=b"123")
    with pytest.raises(ValueError, match="workspace: expected one axis of stride 1"):
        p.run(d_y=d_y, x=x, scale=scale, d_scale=d_scale, workspace=np.zeros(9, np.uint8)[::2])


# ---- errors ----

PLAN_ERRORS = [
    (ValueError, "no op called nothing, expected one of quantize_per_group", "nothing", {}),
    (ValueError, "no field size (did you mean outer_size?), expected one of outer_size", "quantize_per_group", {"size": 1}),
    (ValueError, "outer_size: -1, expected at least 0", "quantize_per_group", {"outer_size": -1}),
    (ValueError, "group_size: 0, expected at least 1", "quantize_per_group", {"group_size": 0}),
    (ValueError, "outer_size: 1.5, expected an integer", "quantize_per_group", {"outer_size": 1.5}),
    (ValueError, "a 64-bit integer", "quantize_per_group", {"outer_size": 2**63}),
    (ValueError, "does not fit 32 bits", "quantize_per_group", {"q_min": 2**40}),
    (ValueError, "element: f33, expected f32, f64, f16 or bf16", "quantize_per_group", {"element": "f33"}),
    (ValueError, "axis_size: 9, expected a multiple", "quantize_per_group", {"axis_size": 9}),
    (ValueError, "q_max: 300, expected -128..127", "quantize_per_group", {"q_max": 300}),
    (ValueError, "bits: 9, expected 1..8", "pack_codes", {"bits": 9}),
    (ValueError, "device: tpu, expected cpu, cuda", "pack_codes", {"device": "tpu"}),
    (ValueError, "device: cuda:x, expected", "pack_codes", {"device": "cuda:x"}),
    (
        ValueError,
        "preference: best, expected exact or fastest",
        "pack_codes",
        {"preference": "best"},
    ),
    (NotImplementedError, "element: u8, expected f32", "quantize_per_group", {"element": "u8"}),
    (NotImplementedError, "code: s32, expected s8 or u8", "quantize_per_group", {"code": "s32"}),
    (NotImplementedError, "no kernel on cpu named magic", "pack_codes", {"kernel": "magic"}),
]


@pytest.mark.parametrize("error,message,op,fields", PLAN_ERRORS)
def test_plan_errors(error, message, op, fields):
    with pytest.raises(error) as caught:
        bittern.plan(op, **fields)
    assert caught.type is error and message in str(caught.value)


def test_no_cuda_is_a_runtime_error():
    code = "import bittern\nbittern.plan('quantize_per_group', device='cuda:0')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "PYTHONPATH": str(pathlib.Path(bittern.__file__).parents[1]),
            "BITTERN_CUDA_PLUGIN": "/nowhere.so",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "RuntimeError: cuda: /nowhere.so" in done.stderr


def test_operand_errors(problem):
    x, scale, expected = problem
    good = {"x": x, "scale": scale, "q": np.full(x.shape, 77, np.int8)}
    p = plan_for(x)

    def fails(error, message, **changes):
        operands = {k: v for k, v in {**good, **changes}.items() if v is not ...}
        for call in (p.run, p.can_implement):
            with pytest.raises(error) as caught:
                call(**operands)
            assert caught.type is error and message in str(caught.value)
        assert np.all(good["q"] == 77)  # an error touches nothing

    fails(ValueError, "quantize_per_group: scale: missing, expected f32 [6,4]", scale=...)
    fails(ValueError, "quantize_per_group: q: missing, expected s8 [6,256]", q=None)
    fails(ValueError, "no operand scales (did you mean scale?), expected one of x scale", scales=scale)
    fails(ValueError, "x: dtype f64, expected f32", x=x.astype(np.float64))
    fails(ValueError, "x: dtype uint16, expected f32", x=x.astype(np.uint16))
    fails(
        ValueError, "zero_point: dtype int64, expected s32", zero_point=np.zeros((6, 4), np.int64)
    )
    fails(ValueError, "x: dtype bool, expected f32", x=x > 0)
    fails(ValueError, "x: dtype complex64, expected f32", x=x.astype(np.complex64))
    fails(ValueError, "x: shape [6,128], expected [6,256] = [outer_size,axis_size]", x=x[:, :128].copy())
    fails(
        ValueError,
        "x: shape [1,1,1,1,1,1,6,256], expected [6,256]",
        x=x.reshape((1,) * 6 + x.shape),
    )
    fails(ValueError, "x: float, expected an array", x=1.0)
    fails(ValueError, "x: list, expected an array", x=[1.0])
    fails(
        ValueError,
        "x: address is not a multiple of 4",
        x=np.zeros(x.nbytes + 4, np.uint8)[1:-3].view(np.float32).reshape(x.shape),
    )
    fails(NotImplementedError, "q: stride -256 of axis 0", q=np.zeros(x.shape, np.int8)[::-1])
    p.run(**good)
    assert np.array_equal(good["q"], expected)


def test_function_errors(problem):
    x, scale, _ = problem
    call = bittern.quantize_per_group
    with pytest.raises(ValueError, match="scale: dtype f16, expected f32"):
        call(x, scale.astype(np.float16), group_size=64)
    with pytest.raises(ValueError, match=r"scale: shape \[6,4\], expected \[6,2\]"):
        call(x, scale, group_size=128)
    with pytest.raises(ValueError, match=r"axis: 0 of shape \[6, 256\], expected the last axis"):
        call(x, scale, axis=0, group_size=3)
    with pytest.raises(ValueError, match="x: dtype int64"):
        call(x.astype(np.int64), scale, group_size=64)
    with pytest.raises(ValueError, match="no arrays"):
        call(1.0, 2.0)
    with pytest.raises(ValueError, match="granularity: row, expected group, token, channel or tensor"):
        call(x, scale, granularity="row")
    with pytest.raises(NotImplementedError, match="element: f64 with f32_scale"):
        call(x.astype(np.float64), scale, group_size=64, element="f64", f32_scale=True)


# ---- threads ----


def test_the_lock_is_free_while_running():
    """A long run on one thread does not keep another from working."""
    x = np.zeros((4096, 4096), np.float32)
    scale, q = np.ones((4096, 32), np.float32), np.zeros(x.shape, np.int8)
    p = bittern.plan("quantize_per_group", outer_size=4096, axis_size=4096, kernel="ref")
    started, done = threading.Event(), threading.Event()

    def work():
        started.set()
        p.run(x=x, scale=scale, q=q)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    steps = 0
    while not done.is_set():
        steps += 1
    thread.join()
    # Holding the lock, run() would let this loop take a step or two before and after it.
    assert steps > 1000


def test_threads_share_a_plan():
    p = bittern.plan("quantize_per_group", outer_size=64, axis_size=4096, group_size=64)
    failures = []

    def work(seed):
        local = np.random.default_rng(seed)
        for _ in range(10):
            x = local.normal(size=(64, 4096)).astype(np.float32)
            scale = local.uniform(0.01, 0.05, (64, 64)).astype(np.float32)
            q = np.zeros(x.shape, np.int8)
            p.run(x=x, scale=scale, q=q)
            if not np.array_equal(q, quantize(x, scale)):
                failures.append("wrong codes")
            try:
                p.run(x=x, scale=scale, q=q[:, :5])
                failures.append("no error")
            except ValueError as error:
                if "q: shape [64,5], expected [64,4096]" not in str(error):
                    failures.append(str(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=60)
    assert not failures and not any(t.is_alive() for t in threads)


def test_num_threads():
    before = bittern.num_threads()
    try:
        bittern.set_num_threads(3)
        assert bittern.num_threads() == 3
        bittern.set_num_threads(0)
        assert bittern.num_threads() >= 1
    finally:
        bittern.set_num_threads(before)


def team_size(call):
    """How many threads a process has that makes `call`: OpenMP keeps those of a team."""
    code = f"""
import os, sys
import numpy as np
import bittern
x = np.ones((4096, 1024), np.float32)
bittern.set_num_threads(2)
for _ in range(3):
    {call}
print(len(os.listdir("/proc/self/task")))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(result.stdout)


def test_a_plan_may_have_its_own_threads():
    one = team_size("bittern.quantize_per_group(x, 0.5, group_size=64, threads=1)")
    two = team_size("bittern.quantize_per_group(x, 0.5, group_size=64)")
    five = team_size("bittern.quantize_per_group(x, 0.5, group_size=64, threads=5)")
    assert two == one + 1 and five == one + 4
    x = normal(64, 1024)
    want = bittern.dynamic_quantize(x, group_size=64)
    for threads in (1, 2, 7):
        got = bittern.dynamic_quantize(x, group_size=64, threads=threads)
        assert all(np.array_equal(a, b) for a, b in zip(got, want))
        fields = {"outer_size": 64, "axis_size": 1024, "group_size": 64}
        p = bittern.plan("dynamic_quantize", threads=threads, **fields)
        scale, q = np.zeros_like(want[0]), np.zeros_like(want[1])
        p.run(x=x, scale=scale, q=q)
        assert np.array_equal(scale, want[0]) and np.array_equal(q, want[1])


def test_a_plans_threads_are_checked():
    x = normal(2, 64)
    for value, message in (
        (-1, "threads: -1, expected 0 "),
        (100000, "threads: 100000, expected an integer 1.."),
        (2**40, "threads: 1099511627776, expected a 32-bit integer"),
        (1.5, "threads: 1.5, expected an integer"),
        (True, "threads: True, expected an integer"),
    ):
        for call in (
            lambda: bittern.plan(
                "quantize_per_group", axis_size=64, group_size=64, threads=value
            ),
            lambda: bittern.quantize_per_group(x, 1.0, group_size=64, threads=value),
        ):
            with pytest.raises(ValueError, match="quantize_per_group: " + re.escape(message)):
                call()
    assert bittern.quantize_per_group(x, 1.0, group_size=64).shape == (2, 64)


# ---- the package ----


def test_version():
    header = (ROOT / "include" / "bittern" / "version.h").read_text()
    numbers = [line.split()[2] for line in header.splitlines() if "define BITTERN_VERSION_" in line]
    assert bittern.__version__ == ".".join(numbers)


def test_stubs_are_fresh():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "make_python_stubs.py", "--check"],
        env={"PYTHONPATH": str(pathlib.Path(bittern.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = pathlib.Path(bittern.__file__).parent
    assert (folder / "py.typed").exists() and (folder / "__init__.pyi").exists()


def test_every_op_has_a_line():
    lines = (ROOT / "src" / "ops" / "ops.inc").read_text().splitlines()
    folders = [line.split(",")[1].strip() for line in lines if line.startswith("BITTERN_OP(")]
    assert OPS == folders
    assert all(op.backends[-1] == "ref" for op in bittern.ops())


def test_a_forked_child_works():
    """GCC's OpenMP waits, in a child, for the threads of its parent's team."""
    code = """
import os, numpy as np, bittern
x = np.ones((512, 1024), np.float32)
bittern.set_num_threads(2)
expected = bittern.quantize_per_group(x, 0.1, group_size=64)
child = os.fork()
if child == 0:
    for threads in (None, 2):
        if threads:
            bittern.set_num_threads(threads)
        same = np.array_equal(bittern.quantize_per_group(x, 0.1, group_size=64), expected)
        if not same or bittern.num_threads() != 1:
            os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert np.array_equal(bittern.quantize_per_group(x, 0.1, group_size=64), expected)
assert bittern.num_threads() == 2
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(pathlib.Path(bittern.__file__).parents[1])},
        start_new_session=True,
    )
    try:
        assert process.wait(timeout=60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the child too
            process.wait()
