"""bittern.Tokenizer: ids equal those of the package tokenizers on a folder and of llama.cpp on a GGUF
file, text comes back, streams give whole characters."""

import os
import pathlib
import pickle
import random
import threading
import unicodedata

import pytest
import test_tokenizers as made
from tokenizer_strings import STRINGS, UNNORMALIZED, with_special_tokens

import bittern

np = pytest.importorskip("numpy")

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMAND = os.environ.get("BITTERN_COMMAND") or str(ROOT / "build" / "release" / "bittern")
needs_command = pytest.mark.skipif(not os.path.exists(COMMAND), reason="the command is not built")

# Spaces, quotes, digits, marks and letters at which patterns decide, and what is in no vocabulary.
LETTERS = (
    " \t\n\r'sStTdDmMlLvVeErR019.,!?-_<|>/ab\u00e9\u0301\u4f60\u597d\u3000\u2003\U0001f600\u200d"
    "\u017f\u212a\u0660\u00bc\u0e01\u0e33\u0915\u094d\u0307\x00\x01\x1f\x7f\x85\xa0\u2581\ufeff"
)


def random_texts(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        yield "".join(rng.choice(LETTERS) for _ in range(rng.randrange(1, 40)))
    for _ in range(count // 4):
        yield "".join(
            chr(rng.choice([rng.randrange(1, 0xD800), rng.randrange(0xE000, 0x110000)]))
            for _ in range(rng.randrange(1, 30))
        )


def texts_for(theirs):
    added = [token.content for _, token in sorted(theirs.get_added_tokens_decoder().items())]
    return STRINGS + UNNORMALIZED + with_special_tokens(added[:3] + added[-1:]) + list(random_texts(1, 400))


def streamed(tokenizer, ids):
    stream = tokenizer.stream(skip_special=False)
    parts = [stream.push(i) for i in ids]
    return "".join([*parts, stream.finish()])


def same_as_tokenizers(ours, theirs, texts, nfc=False):
    """How many tokens were compared."""
    count = 0
    for text in texts:
        if nfc:
            text = unicodedata.normalize("NFC", text)
        for add in (False, True):
            want = theirs.encode(text, add_special_tokens=add).ids
            got = ours.encode(text, add_special=add)
            assert got.dtype == np.int32
            assert got.tolist() == want, (text, add)
            count += len(want)
        assert streamed(ours, got) == ours.decode(got), text
    return count


VOCABULARIES = {
    "smollm": made.smollm,
    "qwen2": made.qwen2,
    "llama3": made.llama3,
    "sentencepiece": lambda: made.sentencepiece(True),
    "sentencepiece without prefix": lambda: made.sentencepiece(False),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One model for each vocabulary, made when it is asked for."""
    known = {}

    def folder(name):
        if name not in known:
            known[name] = tmp_path_factory.mktemp("vocabulary") / "hf"
            made.tiny_model(known[name], VOCABULARIES[name](), bos_token="<s>", eos_token="</s>")
        return known[name]

    return folder


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_folder(name, folders):
    from tokenizers import Tokenizer, decoders

    folder = folders(name)
    ours, theirs = bittern.Tokenizer(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = texts_for(theirs)
    same_as_tokenizers(ours, theirs, texts)
    assert len(ours) == theirs.get_vocab_size()
    if not name.startswith("sentencepiece"):  # which this vocabulary has no decoder for
        theirs.decoder = decoders.ByteLevel()
        for text in texts:
            ids = ours.encode(text, add_special=False)
            assert ours.decode(ids) == (unicodedata.normalize("NFC", text) if name == "qwen2" else text)
            assert ours.decode(ids, skip_special=True) == theirs.decode(ids.tolist())
    for text in ["<s>", "a</s>b", "<tool>"]:
        plain = ours.encode(text, add_special=False, parse_special=False)
        theirs.encode_special_tokens = True
        assert plain.tolist() == theirs.encode(text, add_special_tokens=False).ids
        theirs.encode_special_tokens = False
    for data in [b"\xff", b"a\xe4\xbd b", b"\xf0\x9f\x98", b"\xc0\x80\xed\xa0\x80", b"\x80" * 9]:
        want = theirs.encode(data.decode("utf-8", "replace")).ids
        assert ours.encode(data).tolist() == want


@needs_command
@pytest.mark.peer("transformers")
@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_gguf_file_made_of_it(name, folders, tmp_path):
    from tokenizers import Tokenizer

    folder, path = folders(name), tmp_path / "m.gguf"
    made.bittern("quantize", folder, "-o", path, "--type", "Q8_0", "--quiet")
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = bittern.Tokenizer(path)
    texts, special = STRINGS + UNNORMALIZED, with_special_tokens(["<s>", "</s>"])
    same_as_tokenizers(ours, theirs, texts + special, nfc=name == "qwen2")
    pieces = name.startswith("sentencepiece")
    # Comes back exactly. But to sentencepiece U+2581 is a space, and one may follow a special token.
    for text in texts if pieces else texts + special:
        ids = ours.encode(text, add_special=False)
        assert ours.decode(ids) == (text.replace(made.SPACE, " ") if pieces else text)
    if pieces:
        # A space right after an incomplete character would not come back: as in llama.cpp, that
        # character takes the first byte of the space's mark.
        for data in [b"\xff", b"a\xe4\xbdb", b"\xe4\xbd", bytes(range(256))]:
            assert ours.decode_bytes(ours.encode(data, add_special=False)) == data
    assert ours.bos == ours.id("<s>") and ours.eos == ours.id("</s>")
    assert ours.special_tokens.keys() >= {"<s>", "</s>"}


def with_pre_tokenizer(source, path, pre):
    """A copy of a GGUF file with another tokenizer.ggml.pre."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        value = pre if field.name == "tokenizer.ggml.pre" else field.contents()
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, kind, inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


PRE_TOKENIZERS = (
    "gpt-2 olmo smollm command-r llama-bpe glm4 dbrx qwen2 stablelm2 qwen35 deepseek-llm deepseek-coder "
    "deepseek-v3 tekken gpt-4o minimax-m2 granite-embed-multi-97m falcon bloom viking minicpm5 seed-coder "
    "bailingmoe exaone-moe laguna ufakzeka spark2_5 jais-2 chameleon superbpe default"
).split()
# Where llama.cpp cuts otherwise than the model's own tokeniser (docs/tokenizers.md).
CUTS_OTHERWISE = {"tekken", "gpt-4o", "minimax-m2", "granite-embed-multi-97m", "deepseek-llm", "deepseek-coder"}


@needs_command
@pytest.mark.peer("transformers", "gguf")
@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer(pre, folders, tmp_path):
    """The regular expressions, by PCRE2 and by the engine of tokenizers."""
    from tokenizers import Tokenizer

    first = folders("smollm").parent / "first.gguf"
    if not first.exists():
        made.bittern("quantize", folders("smollm"), "-o", first, "--type", "Q8_0", "--quiet")
    path, folder = tmp_path / "m.gguf", tmp_path / "hf"
    with_pre_tokenizer(first, path, pre)
    made.bittern("quantize", path, "-o", folder, "--dequantize", "f16", "--quiet")
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    same_as_tokenizers(bittern.Tokenizer(folder), theirs, texts_for(theirs))
    if pre not in CUTS_OTHERWISE:
        same_as_tokenizers(bittern.Tokenizer(path), theirs, STRINGS, nfc=theirs.normalizer is not None)


@pytest.mark.peer("transformers")
def test_smollm2(smollm2, tmp_path, show):
    """The real vocabulary on 300,000 tokens: prose, code, other scripts, emoji, control characters."""
    from tokenizers import Tokenizer

    if not os.path.exists(COMMAND):
        pytest.skip("the command is not built")
    made.bittern("quantize", smollm2, "-o", tmp_path / "hf", "--dequantize", "f16", "--quiet")
    theirs = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    texts = long_texts() + texts_for(theirs)
    count = same_as_tokenizers(bittern.Tokenizer(tmp_path / "hf"), theirs, texts)
    # Nothing merges across a byte that no token stands for in llama.cpp; in tokenizers it does.
    of_file = bittern.Tokenizer(smollm2)
    whole = [t for t in texts if of_file.decode_bytes(of_file.encode(t, add_special=False)) == t.encode()]
    assert min(count, same_as_tokenizers(of_file, theirs, whole)) > 300_000
    show(f"tokenizer: SmolLM2, {count} tokens equal to those of tokenizers, of a folder and of GGUF")


def long_texts():
    files = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.cc"), *ROOT.glob("tests/python/*.py")])
    return [file.read_text(encoding="utf-8") for file in files] + list(random_texts(2, 2000))


@pytest.mark.peer("llama_cpp")
def test_smollm2_in_llama_cpp(smollm2, show):
    """The real file on the same texts, and on bytes that are no UTF-8."""
    import llama_cpp

    theirs, ours = llama_cpp.Llama(str(smollm2), vocab_only=True, verbose=False), bittern.Tokenizer(smollm2)
    rng, count = random.Random(4), 0
    texts = [text.encode() for text in long_texts()]
    # Not f0 to ff: llama.cpp ends the program at a number beyond Unicode.
    texts += [bytes(rng.randrange(1, 0xF0) for _ in range(3000)) for _ in range(30)]
    for text in [*texts, b"<|im_start|>user\nhello<|im_end|>\n" * 50]:
        for special in (False, True):
            want = theirs.tokenize(text, add_bos=False, special=special)
            assert ours.encode(text, add_special=False, parse_special=special).tolist() == want, text
            count += len(want)
    assert count > 300_000
    show(f"tokenizer: SmolLM2, {count} tokens equal to those of llama.cpp")


@pytest.mark.peer("llama_cpp", "transformers", "gguf")
@needs_command
@pytest.mark.parametrize("name", [*VOCABULARIES, *sorted(CUTS_OTHERWISE)])
def test_llama_cpp(name, folders, tmp_path):
    """The same GGUF file in llama.cpp, bytes that are no UTF-8 included."""
    import llama_cpp

    path = tmp_path / "m.gguf"
    source = folders(name if name in VOCABULARIES else "smollm")
    made.bittern("quantize", source, "-o", tmp_path / "first.gguf", "--type", "Q8_0", "--quiet")
    if name in VOCABULARIES:
        path = tmp_path / "first.gguf"
    else:
        with_pre_tokenizer(tmp_path / "first.gguf", path, name)
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    ours = bittern.Tokenizer(path)
    rng = random.Random(3)
    texts = [text.encode() for text in STRINGS + UNNORMALIZED + with_special_tokens(["<s>", "</s>", "<tool>"])]
    texts += [text.encode() for text in random_texts(3, 1000)]
    texts += [bytes(rng.randrange(1, 256) for _ in range(rng.randrange(1, 30))) for _ in range(500)]
    if name.startswith("deepseek"):  # spaces beyond ASCII are cut otherwise (docs/tokenizers.md)
        texts = [t for t in texts if all(c == " " or c < "\x80" or not c.isspace() for c in t.decode(errors="replace"))]
    for text in texts:
        for special in (False, True):
            want = theirs.tokenize(text, add_bos=False, special=special)
            assert ours.encode(text, add_special=False, parse_special=special).tolist() == want, text
        # llama_cpp leaves the space that sentencepiece puts before a text.
        spelled = theirs.detokenize(want, special=True)
        assert ours.decode_bytes(want) in (spelled, spelled[1:] if name == "sentencepiece" else spelled), text


# ---- the class itself, without peers ----


@pytest.fixture
def tokenizer(tmp_path):
    letters = {chr(c): c - 33 for c in range(33, 127) if chr(c) not in '"\\'}
    vocab = {**letters, "ab": 94, "\u0120": 95, "\u00e4": 96}
    import json

    (tmp_path / "tokenizer.json").write_text(
        json.dumps(
            {
                "added_tokens": [{"id": 97, "content": "<|im_start|>", "special": True}],
                "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
                "decoder": {"type": "ByteLevel"},
                "model": {"type": "BPE", "vocab": vocab, "merges": ["a b"]},
            }
        )
    )
    return bittern.Tokenizer(tmp_path)


def test_what_it_takes_and_gives(tokenizer):
    assert tokenizer.encode("ab a").tolist() == tokenizer.encode(b"ab a").tolist() == [94, 95, 64]
    for ids in ([94, 95], (94, 95), np.array([94, 95]), np.array([94, 95], np.uint16), iter([94, 95])):
        assert tokenizer.decode(ids) == "ab "
    assert tokenizer.decode([]) == "" and tokenizer.encode("").tolist() == []
    assert tokenizer.decode([96]) == "\ufffd" and tokenizer.decode_bytes([96]) == b"\xe4"
    assert tokenizer.token(94) == "ab" and tokenizer.id("ab") == 94 and tokenizer.id("ba") is None
    assert len(tokenizer) == 98 and tokenizer.bos is None and tokenizer.ends == ()
    assert tokenizer.special_tokens == {"<|im_start|>": 97} and tokenizer.chat_template is None
    assert tokenizer.decode([97, 94], skip_special=True) == "ab"
    assert pickle.loads(pickle.dumps(tokenizer)).encode("ab").tolist() == [94]
    assert tokenizer.encode("\ud800a").tolist() == [64]  # nothing here has a token but a


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda t: t.decode([98]), "decode: token 98, expected 0..97"),
        (lambda t: t.decode([-1]), "decode: token -1, expected 0..97"),
        (lambda t: t.decode([2**40]), "decode: ids: expected 32-bit integers"),
        (lambda t: t.decode([2**80]), "decode: ids:"),
        (lambda t: t.decode([0.5]), "decode: ids: float64 of shape (1,), expected integers along one axis"),
        (lambda t: t.decode([[1]]), "decode: ids: int64 of shape (1, 1), expected integers along one axis"),
        (lambda t: t.decode("ab"), "decode: ids: 'ab', expected integers"),
        (lambda t: t.decode(7), "decode: ids: 7, expected integers"),
        (lambda t: t.decode([True]), "decode: ids: bool"),
        (lambda t: t.encode(7), "encode: text: 7, expected str or bytes"),
        (lambda t: t.encode("a", add_special=1), "encode: add_special: 1, expected True or False"),
        (lambda t: t.token(98), "token: token 98, expected 0..97"),
        (lambda t: t.token("a"), "token: id: 'a', expected an integer"),
        (lambda t: t.stream().push(98), "push: token 98, expected 0..97"),
        (lambda t: t.apply_chat("Hi"), "messages: 'Hi', expected a list of messages"),
        (lambda t: t.apply_chat([{"role": "user"}]), "messages: 0: {'role': 'user'}, expected a dict of role and"),
        (lambda t: t.apply_chat([], format="chatml"), "apply_chat: no messages, expected at least one"),
        (lambda t: t.apply_chat([{"role": "user", "content": "a"}], format="x"), "chat format x, expected chatml"),
    ],
)
def test_errors(tokenizer, call, message):
    with pytest.raises(ValueError) as error:
        call(tokenizer)
    assert message in str(error.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError):
        bittern.Tokenizer(tmp_path / "none")
    with pytest.raises(ValueError, match="expected tokenizer.json or tokenizer.model"):
        bittern.Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "WordPiece", "vocab": {"a": 0}}}')
    with pytest.raises(NotImplementedError, match="WordPiece"):
        bittern.Tokenizer(tmp_path)


def test_threads(tokenizer):
    text, results = "ab a " * 20000, []
    threads = [threading.Thread(target=lambda: results.append(tokenizer.encode(text).tolist())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(ids == results[0] for ids in results)
