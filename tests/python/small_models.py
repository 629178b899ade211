"""The tiny models of tests/golden/tiny_models.safetensors as folders, with a tokeniser of their own."""

import json
import pathlib
import struct

GOLDENS = pathlib.Path(__file__).resolve().parents[1] / "golden" / "tiny_models.safetensors"

# Tokens 0 and 1 are ChatML's, 2 is </s>; from 3 on a token a byte. The models have 96 embeddings.
BYTES = (
    b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n.,:;!?'-" + "é€".encode()
)
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' "
    "}}{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "</s>")


def read(path=GOLDENS):
    """The header and the bytes of a safetensors file."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__", {})
    return {
        name: (t["dtype"], t["shape"], data[8 + size + t["data_offsets"][0] : 8 + size + t["data_offsets"][1]])
        for name, t in header.items()
    }, metadata


def write(path, tensors):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))


def byte_letter(byte):
    """GPT-2's letter of a byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


def tokenizer_json():
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": text, "special": True} for i, text in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {byte_letter(b): 3 + i for i, b in enumerate(BYTES)}, "merges": []},
    }


def put_tokenizer(folder):
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML})
    )


def put_model(folder, name="llama", tokenizer=True, change=None, **config):
    """The folder of a tiny model; `change(tensors)` may change them, `config` fields of its config."""
    tensors, metadata = read()
    own = {key.removeprefix(f"{name}/"): t for key, t in tensors.items() if key.startswith(f"{name}/")}
    if change is not None:
        change(own)
    folder.mkdir(parents=True)
    write(folder / "model.safetensors", own)
    (folder / "config.json").write_text(json.dumps({**json.loads(metadata[name]), **config}))
    if tokenizer:
        put_tokenizer(folder)
    return folder


def golden(name):
    """Tokens and transformers' logits."""
    import numpy as np

    tensors, _ = read()
    _, shape, data = tensors[f"{name}.tokens"]
    tokens = np.frombuffer(data, np.int32).reshape(shape)
    _, shape, data = tensors[f"{name}.logits"]
    return tokens, np.frombuffer(data, np.float32).reshape(shape)


def names():
    _, metadata = read()
    return sorted(set(metadata) - {"made with"})
