"""bittern eval: perplexity, KL and the errors of layers against a forward pass in numpy; files of a
teacher's targets; tables, JSON and the page; bad input and signals."""

import html.parser
import json
import os
import pty
import signal
import subprocess
import time

import numpy as np
import pytest
from test_cli import COMMAND, bittern, refused
from test_quantize import write_folder
from tiny_models import config_of, tensors_of, tokenizer_files

pytestmark = [
    pytest.mark.skipif(COMMAND is None, reason="the command is not built (build/release/bittern)"),
    pytest.mark.peer("safetensors"),
]

CONFIG = config_of("llama")
FILES = tokenizer_files()
VOCABULARY = json.loads(FILES["tokenizer.json"])["model"]["vocab"]
BOS = 256
EXACT = ("--activations", "float", "--kv", "f32")


def letters(count, seed=3):
    """Text without merges: a token a letter."""
    rng = np.random.default_rng(seed)
    return "".join(rng.choice(list("abcdefg ,."), count))


def ids_of(text):
    return [VOCABULARY["\u0120" if c == " " else c] for c in text]


def model(folder, seed=1, noise=0.0, config=CONFIG, files=FILES, **changed):
    tensors = tensors_of(config, seed)
    rng = np.random.default_rng(seed)
    for name, values in tensors.items():
        scale = noise * np.abs(values).mean()
        tensors[name] = (values + scale * rng.standard_normal(values.shape)).astype(np.float32)
    tensors.update(changed)
    return write_folder(folder, tensors, config, files), tensors


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A teacher and two students, and a text."""
    root = tmp_path_factory.mktemp("eval")
    found = {
        "teacher": model(root / "teacher"),
        "near": model(root / "near", noise=0.02),
        "far": model(root / "far", noise=0.2),
    }
    text = letters(170)
    (root / "text.txt").write_text(text)
    return {**found, "root": root, "text": root / "text.txt", "ids": ids_of(text)}


def evaluate(*args):
    result = bittern("eval", *args, "--json", "-")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


# ---- the forward pass of a llama, once more ----


def forward(tensors, tokens, config=CONFIG):
    """Log probabilities after each token, and the stream after each layer."""
    t = {name: values.astype(np.float64) for name, values in tensors.items()}
    heads, groups, dim = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight

    n = len(tokens)
    angle = np.arange(n)[:, None] * 10000.0 ** -(np.arange(0, dim, 2) / dim)
    cos, sin = np.tile(np.cos(angle), 2)[:, None], np.tile(np.sin(angle), 2)[:, None]

    def rotated(x):
        half = np.concatenate([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        return x * cos + half * sin

    x, streams = t["model.embed_tokens.weight"][tokens], []
    for layer in range(config["num_hidden_layers"]):
        w = {k.split(".", 3)[3]: v for k, v in t.items() if k.startswith(f"model.layers.{layer}.")}
        y = norm(x, w["input_layernorm.weight"])
        q = rotated((y @ w["self_attn.q_proj.weight"].T).reshape(n, heads, dim))
        k = rotated((y @ w["self_attn.k_proj.weight"].T).reshape(n, groups, dim))
        v = (y @ w["self_attn.v_proj.weight"].T).reshape(n, groups, dim)
        k, v = (np.repeat(z, heads // groups, 1) for z in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        scores[:, np.triu_indices(n, 1)[0], np.triu_indices(n, 1)[1]] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", p, v).reshape(n, -1) @ w["self_attn.o_proj.weight"].T
        y = norm(x, w["post_attention_layernorm.weight"])
        gate = y @ w["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["mlp.up_proj.weight"].T)) @ w[
            "mlp.down_proj.weight"
        ].T
        streams.append(x)
    head = t.get("lm_head.weight", t["model.embed_tokens.weight"])
    logits = norm(x, t["model.norm.weight"]) @ head.T
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True)), np.array(streams)


def pieces(dialect, context, count):
    """(begin, end, the first token scored)"""
    if dialect == "windows":
        found, scored = [], 1
        while scored < count:
            end = min(context if not found else scored + context - context // 2, count)
            found.append((max(0, end - context), end, scored))
            scored = end
        return found
    skip = context // 2 + 1 if dialect == "llama" else 1
    return [(b, b + context, b + skip) for b in range(0, count - context + 1, context)]


def by_hand(tensors, ids, dialect, context, first=None):
    """For each piece: the log probabilities of the positions scored, the right tokens, streams."""
    for begin, end, scored in pieces(dialect, context, len(ids)):
        tokens = list(ids[begin:end])
        if first is not None:
            tokens[0] = first
        log_p, streams = forward(tensors, tokens)
        rows = slice(scored - 1 - begin, end - 1 - begin)
        yield log_p[rows], ids[scored:end], streams[:, rows]


def nll_by_hand(*args, **more):
    each = [-p[np.arange(len(right)), right] for p, right, _ in by_hand(*args, **more)]
    return each, np.concatenate(each)


@pytest.mark.parametrize("dialect", ["llama", "segments", "windows"])
@pytest.mark.parametrize("context", [16, 33, 170])
def test_perplexity_of_each_dialect(made, dialect, context):
    folder, tensors = made["near"]
    each, all_of_them = nll_by_hand(tensors, made["ids"], dialect, context)
    got = evaluate(folder, "-f", made["text"], "--dialect", dialect, "-c", context, *EXACT)
    mean = np.mean([e.mean() for e in each]) if dialect == "segments" else all_of_them.mean()
    row = got["models"][0]
    assert row["nll"] == pytest.approx(mean, abs=1e-5)
    assert row["perplexity"] == pytest.approx(np.exp(mean), rel=1e-5)
    error = all_of_them.std(ddof=1) / np.sqrt(len(all_of_them)) * np.exp(mean)
    assert row["error"] == pytest.approx(error, rel=1e-3)
    assert got["scored"] == len(all_of_them) and got["pieces"] == len(each)
    assert got["dialect"] == dialect and got["context"] == context and got["first"] is None


def test_chunks_and_the_first_token(made, tmp_path):
    folder, tensors = made["near"]
    flags = ("-f", made["text"], "-c", 32, *EXACT)
    assert evaluate(folder, *flags, "--chunks", 2)["pieces"] == 2
    for dialect in ("llama", "segments", "windows"):
        each, numbers = nll_by_hand(tensors, made["ids"], dialect, 32, first=BOS)
        got = evaluate(folder, *flags, "--bos", "always", "--dialect", dialect)
        assert got["first"] == BOS
        assert got["models"][0]["nll"] == pytest.approx(numbers.mean(), abs=1e-5)
    # A tokeniser that puts bos before texts: llama.cpp's dialect then has it in every piece.
    tokenizer = json.loads(FILES["tokenizer.json"])
    bos = {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": bos},
    }
    adds, _ = model(tmp_path / "adds", files={**FILES, "tokenizer.json": json.dumps(tokenizer)})
    assert evaluate(adds, *flags)["first"] == BOS
    assert evaluate(adds, *flags, "--bos", "never")["first"] is None
    assert evaluate(adds, *flags, "--dialect", "segments")["first"] is None


def test_gguf_and_folder_give_the_same(made, tmp_path):
    folder, _ = made["near"]
    gguf = tmp_path / "m.gguf"
    assert bittern("quantize", folder, "-o", gguf, "--dequantize", "f32", "--format", "gguf").returncode == 0
    flags = ("-f", made["text"], "-c", 64, *EXACT)
    a, b = evaluate(folder, *flags), evaluate(gguf, *flags)
    assert a["models"][0]["nll"] == b["models"][0]["nll"]
    assert evaluate(folder, gguf, *flags)["models"][1]["nll"] == a["models"][0]["nll"]


def test_divergence_and_layers(made):
    students = ("near", "far")
    got = evaluate(*(made[s][0] for s in students), "-f", made["text"], "-c", 32, "--teacher",
                   made["teacher"][0], "--layers", *EXACT)  # fmt: skip
    assert [m["model"] for m in got["models"]] == [str(made[s][0]) for s in students]
    assert got["teacher"]["model"] == str(made["teacher"][0]) and got["teacher"]["cache"] is None
    for student, row in zip(students, got["models"]):
        kl, dp, top1, errors = [], [], [], []
        pairs = zip(
            by_hand(made["teacher"][1], made["ids"], "llama", 32),
            by_hand(made[student][1], made["ids"], "llama", 32),
        )
        for (p, right, t), (q, _, s) in pairs:
            kl += list((np.exp(p) * (p - q)).sum(-1))
            at = np.arange(len(right)), right
            dp += list(np.exp(q[at]) - np.exp(p[at]))
            top1 += list(p.argmax(-1) == q.argmax(-1))
            errors.append(((s - t) ** 2).sum(-1) / (t**2).sum(-1))
        assert row["kl"]["mean"] == pytest.approx(np.mean(kl), rel=1e-3, abs=1e-6)
        assert row["kl"]["max"] == pytest.approx(np.max(kl), rel=1e-3, abs=1e-6)
        for key, q in (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)):
            assert row["kl"][key] == pytest.approx(np.quantile(kl, q), rel=1e-3, abs=1e-6)
        assert row["rms_dp"] == pytest.approx(np.sqrt(np.mean(np.square(dp))), rel=1e-3)
        assert row["same_top1"] == pytest.approx(np.mean(top1))
        assert not row["kl_is_lower_bound"]
        assert sum(row["kl_histogram"]) == got["scored"] == len(kl)
        expected = np.concatenate(errors, 1).mean(1)
        np.testing.assert_allclose(row["layers"], expected, rtol=1e-3)
    near, far = got["models"]
    assert near["kl"]["mean"] < far["kl"]["mean"]
    assert near["layers"][-1] < far["layers"][-1]


def test_threads_change_nothing(made):
    flags = (made["near"][0], "-f", made["text"], "-c", 32, "--teacher", made["teacher"][0], "--layers")

    def numbers(threads):
        got = evaluate(*flags, "--threads", threads)
        for row in (*got["models"], got["teacher"]):
            del row["tokens_per_second"]
        return got

    assert numbers(1) == numbers(2) == numbers(3)


# ---- targets in a file ----


def test_a_teacher_is_paid_for_once(made, tmp_path):
    cache = tmp_path / "targets"
    flags = ("-f", made["text"], "-c", 32, *EXACT)
    teacher = ("--teacher", made["teacher"][0])
    exact = evaluate(made["near"][0], *flags, *teacher)
    first = evaluate(made["near"][0], *flags, *teacher, "--teacher-cache", cache, "--teacher-top", 20)
    assert [p.name for p in tmp_path.iterdir()] == ["targets"]
    again = evaluate(made["near"][0], *flags, *teacher, "--teacher-cache", cache)
    alone = evaluate(made["near"][0], made["far"][0], *flags, "--teacher-cache", cache)
    for got in (first, again, alone):
        row = got["models"][0]
        assert row["kl_is_lower_bound"] and row["kl"] == first["models"][0]["kl"]
        assert row["kl"]["mean"] <= exact["models"][0]["kl"]["mean"] + 1e-7
        assert row["same_top1"] == exact["models"][0]["same_top1"]
        assert row["rms_dp"] == exact["models"][0]["rms_dp"]
        assert got["teacher"]["nll"] == exact["teacher"]["nll"]
        assert got["teacher"]["tokens_per_second"] is None
        assert got["teacher"]["cache"] == str(cache)
    # By hand, from the numbers in the file.
    from safetensors.numpy import load_file

    stored = load_file(cache)
    kl, at = [], 0
    for q, right, _ in by_hand(made["near"][1], made["ids"], "llama", 32):
        for row in q:
            p, ids = stored["log_p"][at].astype(float), stored["ids"][at]
            rest = np.delete(row, ids)
            tail = float(stored["tail"][at])
            kl.append((np.exp(p) * (p - row[ids])).sum() + tail * np.log(tail / np.exp(rest).sum()))
            assert (np.diff(p) <= 0).all() and np.exp(p).sum() + tail == pytest.approx(1, abs=1e-5)
            at += 1
    assert at == len(stored["tail"]) == len(stored["right"])
    assert first["models"][0]["kl"]["mean"] == pytest.approx(np.mean(kl), rel=1e-3, abs=1e-6)
    # With all tokens it is exact.
    for _ in range(2):  # writes it, reads it
        whole = evaluate(made["near"][0], *flags, *teacher, "--teacher-cache", tmp_path / "all", "--teacher-top", 5000)
    assert not whole["models"][0]["kl_is_lower_bound"]
    assert whole["models"][0]["kl"]["mean"] == pytest.approx(exact["models"][0]["kl"]["mean"], abs=1e-6)
    text = bittern("eval", made["near"][0], *flags, "--teacher-cache", cache).stdout
    assert "KL is a lower bound" in text


def test_targets_of_something_else(made, tmp_path):
    cache, near = tmp_path / "targets", made["near"][0]
    flags = ("-f", made["text"], "-c", 32, *EXACT)
    teacher = ("--teacher", made["teacher"][0])
    refused(bittern("eval", near, *flags, "--teacher-cache", cache), 4, "no such file", "--teacher")
    evaluate(near, *flags, *teacher, "--teacher-cache", cache)
    whole = cache.read_bytes()

    def wrong(*args, status=2, **expected):
        for text in expected.values():
            refused(bittern("eval", near, *args, "--teacher-cache", cache), status, "--teacher-cache: ", text)

    wrong("-f", made["text"], "-c", 16, *EXACT, a="made with context 32, expected 16")
    wrong(*flags, "--dialect", "windows", a="made with dialect llama, expected windows")
    wrong(*flags, "--chunks", 2, a="made of 5 pieces, expected 2")
    wrong(*flags, "--bos", "always", a="made with first token -1, expected 256")
    wrong(*flags, "--teacher", made["far"][0], a="made by another teacher", b="--force makes it again")
    wrong(*flags, *teacher, "--teacher-top", 9, a="made with --teacher-top 64, expected 9")
    wrong("-f", made["text"], "-c", 32, *teacher, a="made by another teacher")  # other activations
    (tmp_path / "other.txt").write_text(letters(170, seed=9))
    wrong("-f", tmp_path / "other.txt", "-c", 32, *EXACT, a="made of other tokens")
    for damaged in (whole[:-10], whole[:60], b"a letter", whole[:-9] + b"x" + whole[-8:]):
        cache.write_bytes(damaged)
        wrong(*flags, a="targets")
    (tmp_path / "folder").mkdir()
    refused(bittern("eval", near, *flags, *teacher, "--teacher-cache", tmp_path / "folder"), 2, "a folder")
    (tmp_path / "folder").rmdir()
    refused(bittern("eval", near, *flags, *teacher, "--teacher-cache", made["root"]), 2, "contains the input")
    refused(bittern("eval", near, *flags, *teacher, "--teacher-cache", cache, "--layers"), 2, "--layers: ")
    # --force makes it again, but not of a file that is something else.
    cache.write_bytes(whole[:-10])
    assert evaluate(near, *flags, *teacher, "--teacher-cache", cache, "--force")["scored"]
    assert cache.read_bytes() == whole
    letter = tmp_path / "letter"
    letter.write_text("dear mother")
    refused(bittern("eval", near, *flags, *teacher, "--teacher-cache", letter, "--force"), 2, "letter")
    assert letter.read_text() == "dear mother"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["letter", "other.txt", "targets"]


# ---- what it prints ----


def test_the_tables(made):
    result = bittern("eval", made["near"][0], made["far"][0], "-f", made["text"], "-c", 32, "--teacher",
                     made["teacher"][0], "--layers")  # fmt: skip
    assert result.returncode == 0 and result.stderr == ""
    text = result.stdout
    assert text.startswith("dialect llama, context 32, int16 activations, f16 cache\n")
    assert "text.txt: sha256 " in text and "160 tokens in 5 pieces, 75 scored" in text
    rows = [line.split()[0] for line in text.splitlines() if line]
    assert rows.count("near") == 2 and rows.count("far") == 2
    assert "teacher (teacher)" in text
    for part in ("perplexity", "mean KL", "same top 1", "tokens/s", "99.9 %", "RMS of dp",
                 "KL at positions", "error after layer"):  # fmt: skip
        assert part in text
    quiet = bittern("eval", made["near"][0], "-f", made["text"], "-c", 32, "--quiet")
    assert quiet.returncode == 0 and quiet.stdout == quiet.stderr == ""


def test_the_sweep_over_caches(tmp_path):
    # Keys and values of 32 numbers: what a compressed cache needs.
    config = {**CONFIG, "head_dim": 32, "num_hidden_layers": 2}
    folder, _ = model(tmp_path / "m", config=config)
    (tmp_path / "t.txt").write_text(letters(70))
    flags = (folder, "-f", tmp_path / "t.txt", "-c", 32, "--kv-sweep", "--activations", "float")
    got = evaluate(*flags, "--layers")
    pairs = [(m["k_bits"], m["v_bits"]) for m in got["models"]]
    assert pairs == [(k, v) for k in (2, 3, 4, 8) for v in (2, 3, 4, 8)]
    kl = {pair: m["kl"]["mean"] for pair, m in zip(pairs, got["models"])}
    assert kl[8, 8] < kl[4, 4] < kl[2, 2] and kl[8, 8] < 1e-3
    assert got["kv"] is None and got["models"][3]["kv"] == "aura2v8" and len(got["models"][0]["layers"]) == 2
    assert "aura8v4" in bittern("eval", *flags).stdout
    for more, text in (
        (("--teacher", folder), "--kv-sweep: the f16 cache is the teacher"),
        ((folder,), "--kv-sweep: 2 models, expected one"),
        (("--kv", "f32"), "--kv-sweep: --kv is f32"),
    ):
        refused(bittern("eval", *flags, *more), 2, text)
    # Layers whose cache is not compressed: none is, so nothing differs.
    skipped = evaluate(folder, "-f", tmp_path / "t.txt", "-c", 32, "--teacher", folder, "--kv", "aura2v2",
                       "--kv-skip-layers", "first1,last1")  # fmt: skip
    assert skipped["models"][0]["kl"]["max"] == 0


class Page(html.parser.HTMLParser):
    VOID = {"meta", "line", "circle", "rect", "path", "br"}

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.titles, self.words = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            assert name not in ("src", "href", "onload", "onclick"), (name, value)
        self.seen.append(tag)
        if tag not in self.VOID or tag in ("circle", "rect", "path") and False:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        if tag in self.VOID:
            return
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)


def test_the_page(made, tmp_path):
    page = tmp_path / "report.html"
    odd = tmp_path / "<b>&odd"
    os.symlink(made["far"][0], odd)
    small = tmp_path / "small"
    assert bittern("quantize", made["near"][0], "-o", small, "--bits", 4, "--group-size", 32).returncode == 0
    flags = ("-f", made["text"], "-c", 32, "--report", page, "--quiet")
    result = bittern("eval", made["near"][0], odd, small, *flags, "--teacher", made["teacher"][0], "--layers")
    assert result.returncode == 0, result.stderr
    text = page.read_text()
    found = Page(text)
    assert found.titles == ["Summary", "Size against quality", "Distribution of KL over positions",
                            "KL by position", "Error along the depth"]  # fmt: skip
    assert "http" not in text and "<script" not in text and "url(" not in text
    assert "nan" not in text.lower().split("</style>")[1]
    assert "<b>&odd" not in text and "&lt;b&gt;&amp;odd" in text
    assert found.seen.count("svg") >= 4 and "prefers-color-scheme: dark" in text
    assert "±" in text
    # Replaced if it is asked for, and only if it is ours.
    refused(bittern("eval", made["near"][0], *flags), 2, "--report: ", "exists")
    assert bittern("eval", made["near"][0], *flags, "--force").returncode == 0
    assert Page(page.read_text()).titles == ["Summary"]
    page.write_text("<!doctype html>\n<p>mine")
    refused(bittern("eval", made["near"][0], *flags, "--force"), 2, "is no report of bittern's")
    inside = ("-f", made["text"], "-c", 32, "--report", made["near"][0] / "r.html")
    refused(bittern("eval", made["near"][0], *inside), 2, "--report")
    refused(bittern("eval", made["near"][0], "-f", made["text"], "-c", 32, "--report", tmp_path / "no" / "r.html"), 4)


def test_json_files(made, tmp_path):
    file = tmp_path / "r.json"
    flags = (made["near"][0], "-f", made["text"], "-c", 32, "--json", file, "--quiet")
    assert bittern("eval", *flags).returncode == 0
    got = json.loads(file.read_text())
    assert got["schema"] == 1 and got["models"][0]["bits_per_weight"] == 32
    assert got["models"][0]["bytes"] > 1000 and got["models"][0]["tokens_per_second"] > 0
    refused(bittern("eval", *flags), 2, "--json: ", "exists")
    assert bittern("eval", *flags, "--force", "--teacher", made["teacher"][0]).returncode == 0
    assert bittern("eval", *flags, "--force").returncode == 0
    refused(bittern("eval", *flags[:-2], made["text"], "--quiet", "--force"), 2, "--json")
    assert made["text"].read_text() == letters(170)


# ---- bad input ----


def test_texts_that_cannot_be_scored(made, tmp_path):
    folder = made["near"][0]

    def wrong(contents, *texts, flags=("-c", 32), status=2):
        (tmp_path / "t.txt").write_bytes(contents)
        refused(bittern("eval", folder, "-f", tmp_path / "t.txt", *flags), status, "t.txt", *texts)

    wrong(b"", "empty, expected text")
    wrong(b"a", "1 tokens, expected at least 32 (the context, -c)")
    wrong(b"a", "1 tokens, expected at least 2", flags=("--dialect", "windows"))
    wrong(b"abcdefg" * 4, "28 tokens, expected at least 32")
    wrong(b"abcdefg" * 9 + b"\xff\xfe", "byte 63 is not UTF-8", "--any-bytes")
    (tmp_path / "t.txt").write_bytes(b"abcdefg" * 9 + b"\xff\xfe")
    assert evaluate(folder, "-f", tmp_path / "t.txt", "-c", 32, "--any-bytes")["scored"] > 0
    (tmp_path / "t.txt").write_bytes(b"ab")
    assert evaluate(folder, "-f", tmp_path / "t.txt", "--dialect", "windows")["scored"] == 1
    refused(bittern("eval", folder, "-f", tmp_path / "none"), 4, "none: cannot be opened")
    refused(bittern("eval", folder, "-f", tmp_path), 2, "a folder, expected a file of text")


def test_models_that_do_not_fit(made, tmp_path):
    flags = ("-f", made["text"], "-c", 32)
    near = made["near"][0]
    fewer, _ = model(tmp_path / "fewer", config={**CONFIG, "vocab_size": 280})
    refused(bittern("eval", near, fewer, *flags), 2, "fewer: a vocabulary of 280 tokens, expected 288 as")
    refused(bittern("eval", near, *flags, "--teacher", fewer), 2, "fewer: a vocabulary of 280 tokens")
    other = FILES["tokenizer.json"].replace('"a":', '"@@":').replace('"b":', '"a":').replace('"@@":', '"b":')
    swapped, _ = model(tmp_path / "swapped", files={**FILES, "tokenizer.json": other})
    refused(bittern("eval", near, *flags, "--teacher", swapped), 2, "swapped: token ", 'is "b", expected "a" as in')
    mute, _ = model(tmp_path / "mute", files={"README.md": "no tokeniser"})
    assert "mute: its tokeniser cannot be read" in evaluate(near, mute, *flags)["notes"][0]
    shallow, _ = model(tmp_path / "shallow", config={**CONFIG, "num_hidden_layers": 2})
    refused(bittern("eval", shallow, *flags, "--teacher", near, "--layers"), 2, "2 layers of 64", "expected the same")
    assert evaluate(shallow, *flags, "--teacher", near)["models"][0]["kl"]["mean"] > 0
    norm = np.ones(64, np.float32)
    norm[5] = np.nan
    sick, _ = model(tmp_path / "sick", **{"model.layers.1.input_layernorm.weight": norm})
    why = "is not finite; do its weights hold a NaN or an infinity?"
    refused(bittern("eval", sick, *flags), 2, "sick: the log probability of token", why)
    refused(bittern("eval", near, sick, *flags), 2, "sick: the log", why)
    refused(bittern("eval", near, *flags, "--teacher", sick), 2, "sick: the log", why)
    cache = tmp_path / "targets"
    refused(bittern("eval", near, *flags, "--teacher", sick, "--teacher-cache", cache), 2, "sick", why)
    assert not list(tmp_path.glob("targets*"))
    refused(bittern("eval", tmp_path / "none", *flags), 4, "none")
    few, _ = model(tmp_path / "few", config={**CONFIG, "vocab_size": 200})
    result = bittern("eval", few, *flags)  # fewer embeddings than tokens
    assert result.returncode == 2 and "expected" in result.stderr


@pytest.mark.parametrize(
    "flags, texts",
    [
        (["--dialect", "gptq"], ["--dialect: gptq, expected llama, segments, windows"]),
        (["--ctx", "1"], ["--ctx: 1, expected an integer 2.."]),
        (["--chunks", "0"], ["--chunks: 0, expected an integer 1.."]),
        (["--bos", "maybe"], ["--bos: maybe, expected auto, always, never"]),
        (["--layers"], ["--layers: no teacher, expected --teacher"]),
        (["--teacher-top", "9"], ["--teacher-top: no --teacher-cache"]),
        (["--teacher-top", "4"], ["--teacher-top: 4, expected an integer 5.."]),
        (["--kv", "f17"], ["--kv: ", "f17"]),
        (["--kv-first", "4"], ["--kv-first", "compressed cache"]),
        (["--kv", "aura4v4", "--kv-skip-layers", "some"], ["--kv-skip-layers: some"]),
        (["--activations", "int4"], ["int4, expected float, int16 or int8"]),
        (["--teacher-cach", "x"], ["did you mean --teacher-cache?"]),
        (["--report", "-"], ["--report: -: standard output, expected the name of a file"]),
        (["--report", "/dev/stdout"], ["--report: /dev/stdout: standard output, expected the name of a file"]),
        (["--kv", "aura4v4", "--kv-skip-layers", "last9"], ["--kv-skip-layers: last9, expected at most"]),
    ],
)
def test_wrong_flags(made, flags, texts):
    refused(bittern("eval", made["near"][0], "-f", made["text"], "-c", "32", *flags), 2, *texts)


def test_help_has_examples():
    text = bittern("eval", "--help").stdout
    for part in ("bittern eval model.gguf -f wiki.test.raw", "--teacher-cache FILE", "tokens of a piece (default: 512)"):
        assert part in text


def test_targets_of_more_than_a_mebibyte(made, tmp_path):
    (tmp_path / "long.txt").write_text(letters(30000))
    for _ in range(2):  # made, then read
        args = [COMMAND, "eval", made["near"][0], "-f", tmp_path / "long.txt", "--teacher", made["teacher"][0]]
        done = subprocess.run([*args, "--teacher-cache", tmp_path / "targets"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "targets").stat().st_size > 2**20


# ---- signals and the terminal ----


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_one_line_and_leaves_nothing(made, tmp_path, number, status):
    (tmp_path / "long.txt").write_text(letters(300000))
    out = tmp_path / "out"
    out.mkdir()
    process = subprocess.Popen(
        [COMMAND, "eval", made["near"][0], "-f", tmp_path / "long.txt", "--teacher", made["teacher"][0],
         "--teacher-cache", out / "targets", "--json", out / "r.json", "--report", out / "r.html"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while process.poll() is None and not (out / "targets.partial").exists():
        time.sleep(0.001)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == status, stderr
    assert stderr == f"bittern: stopped by {number.name}\n" and stdout == ""
    assert list(out.iterdir()) == []


def test_progress_on_a_terminal(made):
    reader, writer = pty.openpty()
    process = subprocess.Popen(
        [COMMAND, "eval", made["near"][0], "-f", made["text"], "-c", "16"],
        stdout=subprocess.PIPE, stderr=writer, text=True,
    )  # fmt: skip
    os.close(writer)
    seen = b""
    while True:
        try:
            part = os.read(reader, 4096)
        except OSError:  # nobody has the other end
            break
        if not part:
            break
        seen += part
    os.close(reader)
    assert "perplexity" in process.communicate()[0] and process.returncode == 0
    assert b" 10 %, 16 of 160 tokens" in seen and b"100 %" in seen
    assert seen.endswith(b"\r\x1b[K")  # the line is gone at the end
    # And before the tables come, where both go to the terminal.
    reader, writer = pty.openpty()
    process = subprocess.Popen(
        [COMMAND, "eval", made["near"][0], "-f", made["text"], "-c", "16"], stdout=writer, stderr=writer
    )
    os.close(writer)
    seen = b""
    while True:
        try:
            part = os.read(reader, 4096)
        except OSError:
            break
        seen += part
    os.close(reader)
    assert process.wait() == 0
    assert b"\x1b[K" in seen and b"\x1b" not in seen.split(b"dialect llama")[1]
