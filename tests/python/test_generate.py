"""`bittern.load`: logits, sessions, generation, and what they refuse."""

import copy
import inspect
import json
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import threading
import time

import pytest
from small_models import golden, names, put_model, read
from test_cli import COMMAND, ROOT, bittern as command

np = pytest.importorskip("numpy")
import bittern  # noqa: E402

PROMPT = [10, 20, 30]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return put_model(tmp_path_factory.mktemp("load") / "llama")


@pytest.fixture(scope="module")
def model(folder):
    return bittern.load(folder)


def test_the_documentation_lists_what_runs():
    """All types that the configs may have, each of them tested."""
    text = (ROOT / "docs" / "run.md").read_text().split("| `model_type` |")[1].split("\n\n")[0]
    listed = sorted(word for row in text.splitlines()[2:] for word in row.split("|")[1].strip().split(", "))
    source = (ROOT / "src" / "convert" / "model_config.cc").read_text()
    types = re.search(r"kTypes\[\] = \{(.*?)\n\};", source, re.S)[1]
    assert listed == sorted(re.findall(r'^ +\{"(\w+)"', types, re.M))
    _, configs = read()
    tested = {json.loads(config)["model_type"] for name, config in configs.items() if name != "made with"}
    assert tested == set(listed)


# ---- logits ----


@pytest.mark.parametrize("name", names())
def test_logits_are_transformers(name, tmp_path):
    tokens, expected = golden(name)
    model = bittern.load(put_model(tmp_path / name, name), activations="float")
    logits = model.logits(tokens, kv="f32")
    assert logits.dtype == np.float32 and logits.shape == expected.shape
    assert np.abs(logits - expected).max() <= 1e-4
    assert name.startswith(model.info.architecture) or model.info.architecture.startswith(name)
    assert model.info.vocab == 96 and model.info.context == 128


def test_logits_of_anything_like_tokens(model):
    tokens, _ = golden("llama")
    expected = model.logits(tokens)
    for same in (tokens.tolist(), tuple(tokens.tolist()), tokens.astype(np.int64), tokens.astype(np.uint8),
                 iter(tokens.tolist()), np.repeat(tokens, 2)[::2]):  # fmt: skip
        np.testing.assert_array_equal(model.logits(same), expected)
    assert model.logits([]).shape == (0, 96)
    assert bittern.load(model._arguments[0], threads=1).logits(tokens).tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "mixtral"])
def test_batches_are_the_sequences_one_by_one(name, tmp_path):
    model = bittern.load(put_model(tmp_path / name, name))
    tokens, _ = golden(name)
    sequences = [tokens[:17], tokens[3:4].tolist(), [], tokens, tokens[::-1]]
    together = model.logits(sequences)
    assert isinstance(together, list) and len(together) == 5
    for one, found in zip(sequences, together):
        assert found.shape == (len(one), 96)
        assert found.tobytes() == model.logits(one).tobytes()
    rectangle = model.logits(np.stack([tokens[:9], tokens[9:18]]))
    assert rectangle.shape == (2, 9, 96)
    assert rectangle[1].tobytes() == model.logits(tokens[9:18]).tobytes()


@pytest.mark.peer("torch")
def test_torch_in_torch_out(model):
    import torch

    tokens, _ = golden("llama")
    expected = model.logits(tokens)
    logits = model.logits(torch.tensor(tokens))
    assert isinstance(logits, torch.Tensor) and logits.dtype == torch.float32
    np.testing.assert_array_equal(logits.numpy(), expected)
    assert model.logits(torch.tensor(tokens.reshape(2, 20), dtype=torch.int64)).shape == (2, 20, 96)
    both = model.logits([torch.tensor(tokens), tokens])
    assert isinstance(both[0], torch.Tensor) and isinstance(both[1], np.ndarray)
    assert isinstance(model.session().append(torch.tensor(tokens)), torch.Tensor)
    ids = model.generate(torch.tensor(PROMPT), max_tokens=5, ignore_eos=True)
    assert isinstance(ids, torch.Tensor) and ids.dtype == torch.int64
    assert ids.tolist() == model.generate(PROMPT, max_tokens=5, ignore_eos=True).tolist()


def test_threads_share_a_model(model):
    tokens, _ = golden("llama")
    expected = model.logits(tokens).tobytes()
    found = []
    threads = [threading.Thread(target=lambda: found.append(model.logits(tokens).tobytes())) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == [expected] * 6


HASHES = """
import hashlib, sys
import bittern
for path in sys.argv[1:]:
    for activations in ("float", "int16", "int8"):
        model = bittern.load(path, activations=activations)
        tokens = [(7 * i + 5) % 90 for i in range(40)]
        for kv in ("f32", "f16", "bf16", "aura8v4"):
            session = model.session(kv=kv)
            logits = [session.append(tokens[:33], logits=33), *(session.append([t]) for t in tokens[33:])]
            session.truncate(20)
            logits.append(session.append(tokens[20:]))
            print(path, activations, kv, hashlib.sha256(b"".join(x.tobytes() for x in logits)).hexdigest())
        print(model.generate(tokens, max_tokens=20, ignore_eos=True).tolist())
"""


def test_the_same_bits_on_every_simd_target_and_thread_count(tmp_path):
    """Of plain and quantised weights, and of what the formulas give (BITTERN_KERNEL=ref)."""
    paths = []
    for name in ("llama", "gemma2", "mixtral", "qwen3_5_text"):
        paths.append(put_model(tmp_path / name, name))
        paths.append(tmp_path / f"{name}-4bit")
        bittern.quantize_model(paths[-2], paths[-1], bits=4, group_size=32)
    paths.append(tmp_path / "llama.gguf")
    bittern.quantize_model(paths[0], paths[-1], type="Q8_0")

    def hashes(paths=paths, **env):
        done = subprocess.run(
            [sys.executable, "-c", HASHES, *paths], env={**os.environ, **env}, capture_output=True, text=True
        )
        return done.stdout if done.returncode == 0 else done.stderr

    expected = hashes()
    assert expected.count("\n") == len(paths) * 3 * 5, expected
    for threads in ("1", "3"):
        assert hashes(BITTERN_THREADS=threads) == expected
    for isa in ("AVX2", "AVX3", "AVX3_DL"):
        found = hashes(BITTERN_ISA=isa)
        assert found == expected or "BITTERN_ISA" in found  # a target that this CPU has not
    few = [paths[1], paths[-2]]
    assert hashes(few, BITTERN_KERNEL="ref") == hashes(few)


# ---- sessions ----


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5_text"])
@pytest.mark.parametrize("kv", ["f16", "f32", "aura8v4"])
def test_sessions_go_on_go_back_and_fork(name, kv, tmp_path):
    model = bittern.load(put_model(tmp_path / name, name))
    tokens, _ = golden(name)
    session = model.session(kv=kv)
    whole = session.append(tokens, logits=len(tokens))
    if kv == "f16":
        assert whole.tobytes() == model.logits(tokens).tobytes()
    session.truncate(25)
    assert session.size == len(session) == 25 and session.tokens == tuple(tokens[:25].tolist())
    fork, other = session.fork(), copy.copy(session)
    last = session.append(tokens[25:])
    assert last.shape == (1, 96)
    bound = 0 if name in ("llama", "gemma3") else 2e-2  # gated delta layers: docs/run.md
    assert np.abs(last[0] - whole[-1]).max() <= bound
    assert fork.append(tokens[25:]).tobytes() == last.tobytes()
    assert other.append(tokens[25:27], logits=0) is None and other.size == 27
    assert session.context == 128 and model.session(context=7).context == 7
    assert session.bytes.cache > 0 and (session.bytes.states > 0) == (name == "qwen3_5_text")
    assert "size=40" in repr(session)


def test_a_compressed_cache_is_smaller(model):
    tokens, _ = golden("llama")

    def size(**options):
        session = model.session(**options)
        session.append(tokens)
        return session.bytes.cache

    assert size(kv="f32") == 2 * size(kv="f16") == 2 * size(kv="bf16")
    assert size(kv="aura8v4") < size(kv="f16")
    assert size(kv="aura8v4") < size(kv="aura8v4", skip_first=1) < size(kv="f16")
    assert size(kv="aura8v4") < size(kv="aura8v4", first=4, recent=4)


def test_calls_of_threads_on_one_session_follow_one_another(model):
    session = model.session()

    def work():
        for i in range(20):
            session.append([i])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert session.size == 80 and sorted(session.tokens) == sorted(list(range(20)) * 4)


# ---- generation ----


def test_it_is_bittern_runs_text(model, folder):
    if COMMAND is None:
        pytest.skip("the command is not built (build/release/bittern)")
    for flags, keywords in [
        ([], {}),
        (["--seed", 5], {"seed": 5}),
        (["--temp", 0], {"temperature": 0}),
        (["--temp", 1.4, "--top-k", 0, "--top-p", 0.7, "--min-p", 0], {"temperature": 1.4, "top_k": 0, "top_p": 0.7, "min_p": 0}),
        (["--repeat-penalty", 1.3, "--kv", "aura8v4"], {"repetition_penalty": 1.3, "kv": "aura8v4"}),
        (["--stop", "e", "--stop", "Z"], {"stop": ["e", "Z"]}),
        (["--special", "--temp", 3], {"special": True, "temperature": 3}),
        (["-c", 20], {"context": 20}),
    ]:  # fmt: skip
        result = command("run", folder, "-p", "Hello", "-n", 60, "--no-display-prompt", "--ignore-eos", *flags)
        assert result.returncode == 0, result.stderr
        assert model.generate("Hello", max_tokens=60, ignore_eos=True, **keywords) == result.stdout[:-1]
    result = command("run", folder, "-p", "Hello", "--no-display-prompt")
    assert model.generate("Hello") == result.stdout[:-1]


def test_defaults_are_those_of_the_header():
    text = (ROOT / "include" / "bittern" / "generate.h").read_text()
    sample = re.search(r"SampleOptions sample\{(.*?)\}", text)[1]
    told = {k: float(v) for k, v in re.findall(r"\.(\w+) = ([\d.]+)", sample)}
    for function in (bittern.Model.generate, bittern.Model.stream):
        defaults = {n: p.default for n, p in inspect.signature(function).parameters.items()}
        assert {name: float(defaults[name]) for name in told} == told
        assert defaults["repetition_penalty"] == 1 and defaults["seed"] == 0 and defaults["max_tokens"] is None
    ours, theirs = (inspect.signature(f).parameters for f in (bittern.Model.generate, bittern.Model.stream))
    assert [n for n in ours if n != "stream"] == list(theirs)


def test_tokens_in_tokens_out(model):
    ids = model.generate(PROMPT, max_tokens=30, ignore_eos=True)
    assert ids.dtype == np.int32 and ids.shape == (30,)
    text = model.tokenizer.decode(PROMPT)
    assert model.tokenizer.encode(text).tolist() == PROMPT
    assert model.tokenizer.decode(ids, skip_special=True) == model.generate(text, max_tokens=30, ignore_eos=True)
    assert model.generate(PROMPT, max_tokens=0).shape == (0,)


def test_greedy_is_the_largest_logit(model):
    ids = model.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
    logits = model.logits([*PROMPT, *ids])[len(PROMPT) - 1 : -1, : len(model.tokenizer)]
    assert logits.argmax(-1).tolist() == ids.tolist()


def test_streams(model):
    expected = model.generate("Hello", max_tokens=30, ignore_eos=True)
    pieces = []
    assert model.generate("Hello", max_tokens=30, ignore_eos=True, stream=pieces.append) == expected
    assert "".join(pieces) == expected and all(pieces)
    assert "".join(model.stream("Hello", max_tokens=30, ignore_eos=True)) == expected
    assert list(model.stream(PROMPT, max_tokens=4, ignore_eos=True)) == model.generate(PROMPT, max_tokens=4, ignore_eos=True).tolist()
    few = []

    def three(token):
        few.append(token)
        return len(few) < 3

    assert model.generate(PROMPT, max_tokens=30, ignore_eos=True, stream=three).tolist() == few and len(few) == 3

    class Mine(Exception):
        pass

    def broken(piece):
        raise Mine

    with pytest.raises(Mine):
        model.generate("Hello", stream=broken)


def test_a_conversation(model):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    ids = model.generate(model.tokenizer.apply_chat(messages), max_tokens=9, ignore_eos=True)
    assert model.generate(messages, max_tokens=9, ignore_eos=True) == model.tokenizer.decode(ids, skip_special=True)


def test_a_session_is_gone_on_with(model):
    whole = model.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True).tolist()
    session = model.session()
    first = model.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True, session=session).tolist()
    assert session.tokens == (*PROMPT, *first[:-1])
    rest = model.generate(first[-1:], max_tokens=12, temperature=0, ignore_eos=True, session=session).tolist()
    assert first + rest == whole


def test_stop_and_end(model):
    text = model.generate("Hello", max_tokens=50, ignore_eos=True)
    assert model.generate("Hello", max_tokens=50, ignore_eos=True, stop=text[9:12]) == text[: text.index(text[9:12])]
    assert model.generate("Hello", max_tokens=50, ignore_eos=True, stop=[b"never", text[4]]) == text[: text.index(text[4])]


def test_a_model_without_a_tokeniser(tmp_path):
    model = bittern.load(put_model(tmp_path / "bare", tokenizer=False))
    assert model.tokenizer is None
    assert model.generate(PROMPT, max_tokens=5).shape == (5,)
    for prompt in ("Hello", [{"role": "user", "content": "Hello"}]):
        with pytest.raises(ValueError, match="prompt: text, but the model has no tokeniser .*bare"):
            model.generate(prompt)
    with pytest.raises(ValueError, match="without a tokeniser"):
        model.generate(PROMPT, stop="x")


def test_it_is_pickled_as_its_path(model):
    again = pickle.loads(pickle.dumps(model))
    assert again.info == model.info and again.generate(PROMPT, max_tokens=3).tolist() == model.generate(PROMPT, max_tokens=3).tolist()
    assert "llama" in repr(model)


PROGRAM = """
import signal, sys
import numpy  # not in the middle of its import
import bittern
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
model = bittern.load(sys.argv[1])
print("ready", flush=True)
try:
    {call}
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    "call",
    [
        "model.generate('Hello', ignore_eos=True)",
        "model.logits([list(range(90)) * 300] * 50)",
        "model.session(kv='aura8v4').append(list(range(90)) * 10000)",
        "model.generate(list(range(90)) * 10000)",
    ],
)
def test_ctrl_c_ends_a_call(call, tmp_path):
    folder = put_model(tmp_path / "endless", max_position_embeddings=1 << 20)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(call=call), folder], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert out == "interrupted\n" and process.returncode == 0
    finally:
        process.kill()


# ---- refusals ----


def test_refused_arguments(model):
    session = model.session(context=4)
    for call, text in [
        (lambda: model.logits([96]), "tokens: 96 at 0, expected 0 to 95"),
        (lambda: model.logits([[1], [2, -1]]), "tokens: -1 at 1, expected 0 to 95"),
        (lambda: model.logits([2**40]), "32-bit"),
        (lambda: model.logits([1.5]), "logits: tokens: float64"),
        (lambda: model.logits("abc"), "logits: tokens: 'abc', expected integers"),
        (lambda: model.logits(None), "logits: tokens: None, expected integers"),
        (lambda: model.logits(np.zeros((1, 2, 3), int)), "shape (1, 2, 3)"),
        (lambda: model.logits([1] * 129), "tokens: 129, expected at most 128, the context"),
        (lambda: model.logits([1], kv="f8"), 'kv: "f8", expected f32, f16, bf16'),
        (lambda: model.logits([1], kv=4), "kv: 4, expected f32"),
        (lambda: model.session(context=-1), "session: context: -1, expected"),
        (lambda: model.session(context=2**40), "context: 1099511627776, expected 1 to"),
        (lambda: model.session(recent=True), "recent: True, expected an integer"),
        (lambda: session.append([1] * 5), "expected at most 4"),
        (lambda: session.append([1], logits=2), "append: logits: 2, expected at most 1, the number of tokens"),
        (lambda: session.append([]), "append: tokens: none, expected at least one (none only with logits=0)"),
        (lambda: model.session(kv="aura4", skip_first=3), "skip_first: 3, expected at most 2, the model's attention"),
        (lambda: session.truncate(1), "truncate: size 1, expected 0 to 0"),
        (lambda: bittern.Session(3), "expected what Model.session gives"),
        (lambda: model.generate(""), "prompt: no tokens"),
        (lambda: model.generate([]), "prompt: no tokens"),
        (lambda: model.generate(5), "prompt: 5, expected integers"),
        (lambda: model.generate([1] * 128), "128 tokens, which leave no room for an answer in a context of 128"),
        (lambda: model.generate([200]), "tokens: 200 at 0"),
        (lambda: model.generate("a", temperature=-1), "temperature: -1, expected"),
        (lambda: model.generate("a", temperature="hot"), "temperature: 'hot', expected a number"),
        (lambda: model.generate("a", top_k=-1), "top_k: -1, expected"),
        (lambda: model.generate("a", top_p=0), "top_p: 0, expected"),
        (lambda: model.generate("a", seed=-1), "seed: -1, expected 0..2^64-1"),
        (lambda: model.generate("a", max_tokens=-1), "max_tokens: -1, expected"),
        (lambda: model.generate("a", stop=""), "stops: an empty text"),
        (lambda: model.generate("a", stop=[3]), "stop: 3, expected str or bytes"),
        (lambda: model.generate("a", stop=3), "generate: stop: 3, expected a text or a list of texts"),
        (lambda: model.generate("a", stop={"a": 1}), "generate: stop: {'a': 1}, expected a text or a list"),
        (lambda: model.generate("a", stream=3), "stream: 3, expected a function"),
        (lambda: model.generate("a", session=3), "session: 3, expected what Model.session gives"),
        (lambda: model.generate("a", session=session, kv="f32"), "the session has its own"),
        (lambda: model.generate("a", ignore_eos=3), "ignore_eos: 3, expected True or False"),
    ]:
        with pytest.raises(ValueError) as error:
            call()
        assert text in str(error.value)
    assert session.size == 0 and session.append([], logits=0) is None


def test_refused_models(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        bittern.load(tmp_path / "none")
    with pytest.raises(ValueError, match="activations: 'int7'; did you mean"):
        bittern.load(folder, activations="int7")
    with pytest.raises(ValueError, match="preference: 'fast', expected 'exact' or 'fastest'"):
        bittern.load(folder, preference="fast")
    with pytest.raises(ValueError, match="threads: -1"):
        bittern.load(folder, threads=-1)
    with pytest.raises(ValueError, match="context: -1"):
        bittern.load(folder, context=-1)
    with pytest.raises(NotImplementedError, match="mamba9"):
        bittern.load(put_model(tmp_path / "unknown", model_type="mamba9"))
    with pytest.raises(ValueError, match="layers.2"):
        bittern.load(put_model(tmp_path / "more", num_hidden_layers=3))
    (tmp_path / "empty").mkdir()
    with pytest.raises((OSError, ValueError), match="empty"):
        bittern.load(tmp_path / "empty")


def hostile(data):
    """Headers cut and changed at every few bytes, and tensors that lie about themselves."""
    (size,) = struct.unpack_from("<Q", data)
    for at in range(0, size + 16, 41):
        yield data[:at]
    for at in range(8, size + 8, 29):
        for byte in (0x00, 0x22, 0x39, 0xFF):
            yield data[:at] + bytes([byte]) + data[at + 1 :]


def test_hostile_files(tmp_path):
    """Whatever a file holds, it loads or is refused with one line that names it."""
    folder = put_model(tmp_path / "hostile")
    path, refusals = folder / "model.safetensors", 0
    data = path.read_bytes()
    for changed in hostile(data):
        path.write_bytes(changed)
        try:
            bittern.load(folder).logits([1, 2])
        except (OSError, ValueError, NotImplementedError) as error:
            assert "hostile" in str(error) and "\n" not in str(error)
            refusals += 1
    path.write_bytes(data)
    assert refusals > 300
    config = (folder / "config.json").read_bytes()
    for at in range(0, len(config), 7):
        for changed in (config[:at], config[:at] + b"9" + config[at + 1 :], config[:at] + b"-" + config[at:]):
            (folder / "config.json").write_bytes(changed)
            try:
                bittern.load(folder).logits([1, 2])
            except (OSError, ValueError, NotImplementedError, MemoryError) as error:
                assert "\n" not in str(error)


def test_hostile_gguf_files(tmp_path):
    bittern.quantize_model(put_model(tmp_path / "mixtral", "mixtral"), tmp_path / "hostile.gguf", type="Q8_0")
    path, refusals = tmp_path / "hostile.gguf", 0
    data = path.read_bytes()
    end = data.rindex(b"blk.1.") + 64
    used = data.index(b"expert_used_count") + len(b"expert_used_count") + 4
    changes = [(at, byte) for at in range(0, end, 23) for byte in (0x03, 0xFF)]
    for at, byte in [*changes, (used, 5), (used, 4), (used, 0), (used + 2, 0x9A)]:
        path.write_bytes(data[:at] + bytes([byte]) + data[at + 1 :])
        try:
            bittern.load(path, threads=1).session(context=8).append([1, 2])
        except (OSError, ValueError, NotImplementedError) as error:
            assert "hostile.gguf" in str(error) and "\n" not in str(error)
            refusals += 1
        else:
            assert (at, byte) == (used, 4) or at != used
    assert refusals > 50
