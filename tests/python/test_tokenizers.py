"""What `bittern quantize` writes as a tokeniser, in one world, against the other: ids of transformers
and tokenizers on the folder equal llama.cpp's on the GGUF file, for strings aimed at trouble."""

import json
import os
import pathlib
import subprocess
import unicodedata

import pytest
from tokenizer_strings import STRINGS, UNNORMALIZED, with_special_tokens

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMAND = os.environ.get("BITTERN_COMMAND") or str(ROOT / "build" / "release" / "bittern")

pytestmark = [
    pytest.mark.peer("llama_cpp", "transformers", "gguf"),
    pytest.mark.skipif(not os.path.exists(COMMAND), reason="the command is not built"),
]

SPACE = "\u2581"


def bittern(*args):
    result = subprocess.run([COMMAND, *map(str, args)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def tokenizer_keys(path):
    import gguf

    fields = gguf.GGUFReader(path).fields
    return {key: f.contents() for key, f in fields.items() if key.startswith("tokenizer.")}


def same_ids(gguf_path, folder):
    """The number of strings compared."""
    import llama_cpp
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    theirs = llama_cpp.Llama(str(gguf_path), vocab_only=True, verbose=False)
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = [token["content"] for token in config["added_tokens"]]
    texts = STRINGS + UNNORMALIZED + with_special_tokens(added[:3] + added[-1:])
    for text in texts:
        if "NFC" in json.dumps(config["normalizer"]):
            text = unicodedata.normalize("NFC", text)  # llama.cpp leaves that to who calls it
        for add in (False, True):
            expected = theirs.tokenize(text.encode(), add_bos=add, special=True)
            assert ours.encode(text, add_special_tokens=add).ids == expected, (text, add)
            assert auto(text, add_special_tokens=add)["input_ids"] == expected, (text, add)
    return len(texts)


def test_smollm2(smollm2, tmp_path, show):
    """The real vocabulary there and back: ids, and every key but those only the file has."""
    bittern("quantize", smollm2, "-o", tmp_path / "hf", "--dequantize", "f16", "--quiet")
    count = same_ids(smollm2, tmp_path / "hf")
    show(f"tokenizer: SmolLM2, {count} strings with equal ids in llama.cpp and transformers")
    bittern("quantize", tmp_path / "hf", "-o", tmp_path / "back.gguf", "--type", "Q8_0", "--quiet")
    before, after = tokenizer_keys(smollm2), tokenizer_keys(tmp_path / "back.gguf")
    del before["tokenizer.ggml.add_space_prefix"]  # of no meaning to byte-level BPE
    assert {key: after[key] for key in before} == before


# ---- vocabularies made here ----


def tiny_model(folder, tokenizer, **special):
    """A random model of 2 layers with this tokeniser, as transformers saves it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size() + 7,  # some ids have no token
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
    fast.save_pretrained(folder)


def byte_level(steps, nfc=False, ignore_merges=False, template=False):
    """Merges cross every boundary a pre-tokeniser may set, so that a missing cut is seen."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = BpeTrainer(
        vocab_size=4000,
        min_frequency=1,
        max_token_length=12,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([text * 2 for text in STRINGS + UNNORMALIZED], trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.model.ignore_merges = ignore_merges
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
        )
    return tokenizer


def split(regex):
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Split(Regex(regex), "isolated")


CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def smollm():
    from tokenizers import pre_tokenizers

    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return byte_level([pre_tokenizers.Digits(individual_digits=True), split(words)])


def qwen2():
    return byte_level([split(CONTRACTIONS + WORDS + r"\p{N}" + ENDS)], nfc=True)


def llama3():
    steps = [split(CONTRACTIONS + WORDS + r"\p{N}{1,3}" + ENDS)]
    return byte_level(steps, ignore_merges=True, template=True)


def sentencepiece(prefix):
    """BPE over letters with all ways to a token among the merges, as conversions of sentencepiece
    models have them."""
    from tokenizers import Tokenizer, models, normalizers, processors
    from tokenizers.trainers import BpeTrainer

    mark = normalizers.Replace(" ", SPACE)
    whole = normalizers.Sequence([normalizers.Prepend(SPACE), mark]) if prefix else mark
    trained = Tokenizer(models.BPE())
    trained.normalizer = whole
    trainer = BpeTrainer(
        vocab_size=2500, min_frequency=1, max_token_length=8, limit_alphabet=400, show_progress=False
    )
    texts = [text * 2 for text in STRINGS if "<0x" not in text]  # no way to the text of a byte token
    trained.train_from_iterator(texts, trainer)
    pieces = json.loads(trained.to_str())["model"]["vocab"]
    pieces = sorted(pieces, key=pieces.get)
    runs = {SPACE * n for n in range(2, 9)}
    letters = [piece for piece in pieces if len(piece) == 1]
    joined = [piece for piece in pieces if len(piece) > 1 and piece not in runs]
    joined += sorted(runs)
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + joined + letters
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = []
    for rank, piece in enumerate(joined):
        rank = len(joined) if piece in runs else rank
        for i in range(1, len(piece)):
            if piece[:i] in vocab and piece[i:] in vocab:
                merges.append((rank, -i, i - len(piece), piece[:i], piece[i:]))
    merges = [(left, right) for _, _, _, left, right in sorted(merges)]
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = whole
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


@pytest.mark.parametrize(
    "make, model, pre",
    [
        (smollm, "gpt2", "smollm"),
        (qwen2, "gpt2", "qwen2"),
        (llama3, "gpt2", "llama-bpe"),
        (lambda: sentencepiece(True), "llama", "default"),
        (lambda: sentencepiece(False), "llama", "default"),
    ],
    ids=["smollm", "qwen2", "llama3", "sentencepiece", "sentencepiece without prefix"],
)
def test_there_and_back(make, model, pre, tmp_path):
    source, there = tmp_path / "source", tmp_path / "there.gguf"
    tiny_model(source, make(), bos_token="<s>", eos_token="</s>")
    bittern("quantize", source, "-o", there, "--type", "Q8_0", "--quiet")
    keys = tokenizer_keys(there)
    assert keys["tokenizer.ggml.model"] == model
    assert keys["tokenizer.ggml.pre"] == pre
    assert keys["tokenizer.ggml.tokens"][-1].startswith("[PAD")
    assert len(keys["tokenizer.ggml.tokens"]) == len(keys["tokenizer.ggml.token_type"])
    same_ids(there, source)
    bittern("quantize", there, "-o", tmp_path / "back", "--dequantize", "f32", "--quiet")
    same_ids(there, tmp_path / "back")
    bittern("quantize", tmp_path / "back", "-o", tmp_path / "again.gguf", "--type", "Q8_0", "--quiet")
    assert tokenizer_keys(tmp_path / "again.gguf") == keys
