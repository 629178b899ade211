"""`bittern run`: what it writes, what it refuses before it works, signals, and a chat on a terminal."""

import json
import os
import pty
import select
import signal
import struct
import subprocess
import time

import pytest
from small_models import put_model
from test_cli import COMMAND, bittern, refused

pytestmark = pytest.mark.skipif(COMMAND is None, reason="the command is not built (build/release/bittern)")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return put_model(tmp_path_factory.mktemp("run") / "llama", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """One that takes long enough to be caught in the middle: it never ends, and has room."""
    return put_model(tmp_path_factory.mktemp("run") / "endless", max_position_embeddings=1 << 20)


def test_help_has_examples_and_llama_clis_flags():
    text = bittern("run", "--help").stdout
    assert "Example: bittern run" in text
    flags = (
        "-m, -p, -f, -n, -c, -s, -r, -t, --model, --prompt, --file, --predict, --n-predict, --ctx-size, --temp, "
        "--top-k, --top-p, --min-p, --repeat-penalty, --seed, --reverse-prompt, --ignore-eos, --special, "
        "--no-display-prompt, --system-prompt, --conversation, --threads"
    )
    for flag in flags.split(", "):
        assert flag in text, flag
    for flag in ("--kv", "--activations", "--stats", "--chat", "--stop", "--kv-skip-layers"):
        assert flag in text, flag


def test_a_text_and_its_continuation(llama):
    result = bittern("run", llama, "-p", "Hello", "-n", 20)
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.startswith("Hello") and result.stdout.endswith("\n")
    bare = bittern("run", llama, "-p", "Hello", "-n", 20, "--no-display-prompt")
    assert "Hello" + bare.stdout == result.stdout
    assert bittern("run", "-m", llama, "-p", "Hello", "-n", 20).stdout == result.stdout


def test_the_same_seed_gives_the_same_text(llama, tmp_path):
    def text(*flags):
        result = bittern("run", llama, "-p", "abc", "-n", 40, "--ignore-eos", *flags)
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert text() == text("--seed", 0, "--temp", 0.8, "--top-k", 40, "--top-p", 0.95, "--min-p", 0.05)
    assert text("-s", 1) != text()
    assert text("-s", 2**64 - 1) != text()
    assert text("--temp", 0) == text("--temp", 0, "-s", 9)
    assert text("--threads", 1) == text("-t", 3)
    assert text("--temp", 0, "--repeat-penalty", 5) != text("--temp", 0)
    (tmp_path / "prompt").write_text("abc")
    file = bittern("run", llama, "-f", tmp_path / "prompt", "-n", 40, "--ignore-eos")
    assert file.stdout == text()


@pytest.mark.parametrize("kv", ["f32", "bf16", "aura8v4"])
def test_caches_and_activations(llama, kv):
    for kind in ("float", "int8"):
        result = bittern("run", llama, "-p", "abc", "-n", 5, "--kv", kv, "--activations", kind, "--ignore-eos")
        assert result.returncode == 0, result.stderr
    assert bittern("run", llama, "-p", "abc", "-n", 5, "--kv", kv, "--fastest").returncode == 0
    if kv == "aura8v4":
        short, long = (bittern("run", llama, "-p", "abc", "-n", 20, "--kv", name) for name in ("aura4", "aura4v4"))
        assert short.returncode == 0 and short.stdout == long.stdout
        more = ("--kv-first", 2, "--kv-recent", 2, "--kv-skip-layers", "first1,last0")
        assert bittern("run", llama, "-p", "abc", "-n", 5, "--kv", kv, *more).returncode == 0


def test_stops(llama):
    text = bittern("run", llama, "-p", "abc", "-n", 60, "--ignore-eos", "--no-display-prompt").stdout[:-1]
    stop = text[20:23]
    for flags in (["--stop", stop], ["-r", stop], ["--stop", "never", "--stop", stop]):
        result = bittern("run", llama, "-p", "abc", "-n", 60, "--ignore-eos", "--no-display-prompt", *flags)
        assert result.stdout == text[: text.index(stop)] + "\n"


def test_whole_characters_only(llama):
    """The tokens of longer characters are drawn often; what is printed is UTF-8 at every write."""
    process = subprocess.Popen(
        [COMMAND, "run", llama, "-p", "abc", "-n", "400", "--temp", "5", "--top-k", "0", "--top-p", "1", "--min-p", "0"]
        + ["--ignore-eos", "--no-display-prompt"],
        stdout=subprocess.PIPE,
    )
    pieces = []
    while piece := os.read(process.stdout.fileno(), 65536):
        pieces.append(piece)
    assert process.wait() == 0
    for piece in pieces:
        piece.decode()
    text = b"".join(pieces).decode()
    assert "\ufffd" in text and len(pieces) > 10


def test_stats_and_json(llama, tmp_path):
    report = tmp_path / "report.json"
    result = bittern("run", llama, "-p", "abc", "-n", 9, "--ignore-eos", "--stats", "--json", report)
    assert result.returncode == 0, result.stderr
    for word in ("load ", "prompt ", "generation ", "memory ", "tokens/s", "weights", "cache", "3 tokens", "9 tokens"):
        assert word in result.stderr, word
    told = json.loads(report.read_text())
    assert told["text"] == result.stdout[3:-1] and told["end"] == "max_tokens"
    assert told["prompt_tokens"] == 3 and told["tokens"] == 9 and told["architecture"] == "llama"
    # 11 tokens are held: the last one is never appended. 2 layers, K and V, 2 heads of 16, f16.
    assert told["bytes"]["cache"] == 11 * 2 * 2 * 2 * 16 * 2
    assert told["bytes"]["peak"] > told["bytes"]["weights"] > 0
    refused(bittern("run", llama, "-p", "abc", "--json", report), 2, "report.json")
    alone = bittern("run", llama, "-p", "abc", "-n", 9, "--ignore-eos", "--json", "-")
    assert json.loads(alone.stdout)["text"] == told["text"]


def test_a_context_beyond_the_models_own_is_told(llama):
    told = bittern("run", llama, "-p", "abc", "-n", 3, "-c", 4097)
    assert told.returncode == 0
    assert told.stderr == "note: -c 4097: the model was made for 4096 tokens; what it says beyond them may be worse\n"
    for flags in (["-c", 4096], ["-c", 4097, "--quiet"]):
        assert bittern("run", llama, "-p", "abc", "-n", 3, *flags).stderr == ""


@pytest.mark.parametrize("flags", [["-n", "3"], ["-n", "3", "--no-display-prompt"], ["-n", "0"]])
def test_text_that_is_lost_is_an_error(llama, flags):
    command = [COMMAND, "run", llama, "-p", "abc", *flags]
    closed = subprocess.run(command, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: os.close(1))
    assert closed.returncode == 1
    assert closed.stderr.startswith("bittern: standard output: ") and closed.stderr.count("\n") == 1
    with open("/dev/full", "w") as full:
        lost = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert lost.returncode == 1
    assert lost.stderr.startswith("bittern: standard output: ") and lost.stderr.count("\n") == 1


# ---- refusals, before the work ----


def test_refused_flags(llama, tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("")
    for status, args, *texts in [
        (2, ["-p", "a", "-f", "x"], "-f: given beside -p"),
        (2, [], "-p: no prompt"),
        (2, ["-p", ""], "empty, expected a value"),
        (2, ["-f", empty], "empty file"),
        (4, ["-f", tmp_path / "none"], "-f: ", "No such file"),
        (2, ["-p", "a", "--temp", "-1"], "--temp: -1, expected"),
        (2, ["-p", "a", "--top-p", "0"], "--top-p: 0, expected"),
        (2, ["-p", "a", "--kv", "f8"], '--kv: "f8", expected f32, f16, bf16'),
        (2, ["-p", "a", "--kv", "aura9v4"], "--kv: "),
        (2, ["-p", "a", "--kv-first", "3"], "--kv-first", "compressed cache"),
        (2, ["-p", "a", "--kv", "aura4", "--kv-skip-layers", "middle2"], "--kv-skip-layers: middle2, expected"),
        (2, ["-p", "a", "--activations", "int7"], "--activations: int7, expected float, int16 or int8"),
        (2, ["-p", "a", "--tempp", "1"], "did you mean --temp"),
        (2, ["-p", "a", "--system", "Be brief."], "--system: given without a conversation, expected --chat"),
        (2, ["-p", "a", "--kv", "aura8v9"], '--kv: "aura8v9", expected', "1 to 8", "aura8 is aura8v8"),
        (2, ["-p", "a", "--kv", "aura4", "--kv-skip-layers", "first99"],
         "--kv-skip-layers: first99, expected at most 2, the model's attention layers"),
        (2, ["-p", "a", "--kv", "aura4", "--kv-skip-layers", "first1,last3"], "--kv-skip-layers: last3, expected at most 2"),
        (2, ["-p", "a", "--kv", "aura4", "--kv-skip-layers", "first1,first2"], "expected first and last once each"),
        (2, ["-p", "a", "--kv", "aura4", "--kv-skip-layers", "first1,"], "--kv-skip-layers: first1,, expected words"),
        (2, ["-p", "a", "--seed", "18446744073709551616"],
         "--seed: 18446744073709551616, expected an integer 0..18446744073709551615"),
        (2, ["-p", "a", "--seed", "-1"], "--seed: -1, expected an integer 0.."),
        (2, ["-p", "a", "--seed", "1.5"], "--seed: 1.5, expected an integer 0.."),
        (2, ["-p", "abc", "-c", "3"], "-c: a context of 3 tokens has no room for the 3 of the prompt"),
        (2, ["-p", "a" * 5000], "-c: a context of 4096 tokens has no room for the 5000"),
    ]:
        refused(bittern("run", llama, *args), status, *texts)


def test_refused_models(tmp_path):
    refused(bittern("run", tmp_path / "none", "-p", "a"), 4, "none")
    bare = put_model(tmp_path / "bare", tokenizer=False)
    refused(bittern("run", bare, "-p", "a"), 2, "bare: no tokeniser, expected tokenizer.json")
    unknown = put_model(tmp_path / "unknown", model_type="mamba9")
    refused(bittern("run", unknown, "-p", "a"), 3, "mamba9")
    contradicted = put_model(tmp_path / "contradicted", num_hidden_layers=3)
    refused(bittern("run", contradicted, "-p", "a"), 2, "layers.2")
    small = put_model(tmp_path / "small", change=fewer_embeddings, vocab_size=50)
    refused(bittern("run", small, "-p", "a"), 2, "80 tokens, but the model has embeddings of 50")


def fewer_embeddings(tensors):
    dtype, (_, columns), data = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = (dtype, [50, columns], data[: 50 * columns * 2])


def test_nan_in_weights_is_told(tmp_path):
    def nan_norm(tensors):
        dtype, shape, data = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = (dtype, shape, struct.pack("<H", 0x7FC0) + data[2:])

    broken = put_model(tmp_path / "nan", change=nan_norm)
    result = bittern("run", broken, "-p", "abc", "--no-display-prompt")
    refused(result, 2, "the model's logits are not all numbers after 3 tokens; are its weights whole?")


def test_a_model_that_is_too_large_for_memory(tmp_path):
    """Its file is all holes: 3 TB of weights, and no work."""
    hidden, inner = 1 << 16, 1 << 22
    folder = put_model(tmp_path / "huge", hidden_size=hidden, intermediate_size=inner)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header, at = json.loads(data[8 : 8 + size]), 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        part = name.split(".")[-2]
        shape = {
            "embed_tokens": [96, hidden],
            "q_proj": [64, hidden],
            "k_proj": [32, hidden],
            "v_proj": [32, hidden],
            "o_proj": [hidden, 64],
            "gate_proj": [inner, hidden],
            "up_proj": [inner, hidden],
            "down_proj": [hidden, inner],
        }.get(part, [hidden])
        count = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        tensor["shape"], tensor["data_offsets"] = shape, [at, at + count]
        at += count
    text = json.dumps(header).encode()
    try:
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + at)
    except OSError:
        pytest.skip("no files with holes of this size here")
    start = time.monotonic()
    result = bittern("run", folder, "-p", "abc")
    if result.returncode == 4 and "map" in result.stderr:
        pytest.skip(result.stderr)
    refused(result, 1, "huge: weights of ", "MiB of memory are available")
    assert time.monotonic() - start < 30


# ---- signals ----


def started(model, *args):
    process = subprocess.Popen(
        [COMMAND, "run", model, "-p", "abc", "--ignore-eos", "--no-display-prompt", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert os.read(process.stdout.fileno(), 1)  # it generates
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_one_line(endless, number):
    process = started(endless)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == -number  # as a shell sees it: 130, 143
    assert err.decode() == f"bittern: run: stopped by {number.name}\n"
    assert out.decode().endswith("\n")


def test_a_reader_that_goes_away_ends_it(endless):
    process = started(endless)
    process.stdout.close()
    assert process.wait(timeout=60) != 0
    process.stderr.close()


# ---- conversations ----


def test_a_chat_from_a_pipe(llama):
    def talk(text, *flags):
        result = subprocess.run(
            [COMMAND, "run", llama, "--chat", "-n", "8", "--ignore-eos", *flags],
            input=text,
            capture_output=True,
            timeout=60,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.decode()

    one = talk(b"Hello\n")
    two = talk(b"Hello\n\nAnd now?\n")
    assert two.startswith(one) and len(two) > len(one)  # an empty line is none
    assert talk(b"Hello\nAnd now?") == two  # nor need the last line end
    assert talk(b"And now?\n", "-p", "Hello") == two
    assert talk(b"Hello\n", "--system-prompt", "Be brief.") != one
    assert talk(b"") == ""


def test_a_chat_has_history(llama):
    """The second answer is that of the whole conversation, with the seed's next steps."""
    bittern_ = pytest.importorskip("bittern")
    model = bittern_.load(llama)
    result = subprocess.run(
        [COMMAND, "run", llama, "--chat", "-n", "8", "--temp", "0", "--ignore-eos"],
        input=b"Hello\nAnd now?\n",
        capture_output=True,
    )
    messages = [{"role": "user", "content": "Hello"}]
    first = model.generate(messages, max_tokens=8, temperature=0, ignore_eos=True)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And now?"}]
    second = model.generate(messages, max_tokens=8, temperature=0, ignore_eos=True)
    assert result.stdout.decode() == f"{first}\n{second}\n"


def test_a_message_that_is_too_long_is_left_out(llama):
    def talk(text):
        return subprocess.run(
            [COMMAND, "run", llama, "--chat", "-n", "4", "--temp", "0", "--ignore-eos", "-c", "200"],
            input=text,
            capture_output=True,
            timeout=60,
        )

    whole = talk(b"Hello\nAnd now?\n")
    assert whole.returncode == 0 and whole.stderr == b""
    result = talk(b"Hello\n" + b"a" * 300 + b"\nAnd now?\n")
    assert result.returncode == 0 and result.stdout == whole.stdout
    told = result.stderr.decode()
    assert told.count("\n") == 1 and told.startswith("bittern: run: the conversation would have ")
    assert "a context of 200 (-c) has no room" in told and told.endswith("the message is left out\n")
    first = talk(b"a" * 300 + b"\nHello\nAnd now?\n")
    assert first.returncode == 0 and first.stdout == whole.stdout


def test_a_chat_needs_a_template(llama, tmp_path):
    plain = put_model(tmp_path / "plain")
    (plain / "tokenizer_config.json").write_text("{}")
    refused(bittern("run", plain, "--chat"), 3, "chat")
    refused(bittern("run", llama, "--chat", "-c", "5"), 2, "-c: a context of 5 tokens has no room")


class Terminal:
    def __init__(self, *args):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "xterm"
            os.execv(COMMAND, [COMMAND, "run", *map(str, args)])
        self.text = b""

    def read(self, until, timeout=60):
        """All text up to and with `until`."""
        end = time.monotonic() + timeout
        while until not in self.text:
            assert time.monotonic() < end, self.text
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.fd, 65536)
                except OSError:
                    raise AssertionError(f"it ended: {self.text!r}") from None
        at = self.text.index(until) + len(until)
        found, self.text = self.text[:at], self.text[at:]
        return found

    def write(self, data):
        os.write(self.fd, data)

    def ended(self, timeout=60):
        """Its exit status; negative: of a signal."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if select.select([self.fd], [], [], 0.01)[0]:
                try:
                    self.text += os.read(self.fd, 65536)
                except OSError:
                    pass
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid != 0:
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.fd)
        raise AssertionError(f"it does not end: {self.text!r}")


def test_a_chat_on_a_terminal(llama):
    chat = Terminal(llama, "--chat", "-n", 8, "--ignore-eos", "--stats")
    chat.read(b"> ")
    chat.write(b"Helo\x1b[Dl\n")  # the arrow to the left: a line that is edited
    chat.read(b"\n")
    chat.read(b"\n")  # the answer
    chat.read(b"> ")
    chat.write(b"half a line\x03")  # Ctrl-C drops it, and the program stays
    chat.read(b"Ctrl-D ends the conversation")
    chat.read(b"> ")
    chat.write(b"\x1b[A\n")  # the arrow up: what was said before
    assert b"Hello" in chat.read(b"Hello")
    chat.read(b"> ")
    chat.write(b"\x04")
    assert chat.ended() == 0
    assert b"generation" in chat.text


def test_ctrl_c_stops_the_answer_and_not_the_program(endless):
    chat = Terminal(endless, "--chat", "--ignore-eos")
    for _ in range(2):
        chat.read(b"> ")
        chat.write(b"Hello\n")
        chat.read(b"\n")
        time.sleep(0.5)
        chat.write(b"\x03")
    chat.read(b"> ")
    chat.write(b"\x04")
    assert chat.ended() == 0


def test_sigterm_ends_a_chat(endless):
    for waiting in (True, False):
        chat = Terminal(endless, "--chat", "--ignore-eos")
        chat.read(b"> ")
        if not waiting:
            chat.write(b"Hello\n")
            chat.read(b"\n")
            time.sleep(0.3)
        os.kill(chat.pid, signal.SIGTERM)
        assert chat.ended() == -signal.SIGTERM
