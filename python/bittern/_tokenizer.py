"""Text to tokens and back (docs/tokenizers.md)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from . import _bittern  # type: ignore[attr-defined]
from ._convert import _call, _flag, _path
from ._values import integer_of_bits as _integer_of_bits

_Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
_Text = str | bytes
_Format = Literal["chatml", "llama-3", "gemma", "qwen"]
_Messages = Iterable[Mapping[str, _Text]]


def _bytes(where: str, value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")  # half a surrogate pair counts as U+FFFD
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise ValueError(f"{where}: {value!r}, expected str or bytes")


def _ids(where: str, value: Any) -> Any:
    import numpy as np

    if isinstance(value, (str, bytes, Mapping)):
        raise ValueError(f"{where}: {value!r}, expected integers")
    if not hasattr(value, "__array__"):
        try:
            value = list(value)
        except TypeError:
            raise ValueError(f"{where}: {value!r}, expected integers") from None
    try:
        array = np.asarray(value)
    except (OverflowError, ValueError):
        raise ValueError(f"{where}: expected a list or an array of integers") from None
    if array.size == 0:
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{where}: {array.dtype} of shape {array.shape}, expected integers along one axis"
        )
    if array.size and (int(array.min()) < -(2**31) or int(array.max()) >= 2**31):
        raise ValueError(f"{where}: expected 32-bit integers")
    return np.ascontiguousarray(array, np.int32)


class TokenStream:
    """Text, token by token: what `Tokenizer.stream` gives.

        stream = tokenizer.stream()
        for id in ids:
            print(stream.push(id), end="")
        print(stream.finish())

    A character that needs several tokens comes with the last of them. One thread at a time.
    """

    __slots__ = ("_stream",)

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        if not isinstance(tokenizer, Tokenizer):
            raise ValueError(f"TokenStream: {tokenizer!r}, expected a Tokenizer")
        self._stream = _bittern.TokenStream(
            tokenizer._tokenizer, _flag("TokenStream: skip_special", skip_special)
        )

    def push(self, id: int) -> str:
        """The text that is complete with this token, often none."""
        text: bytes = self._stream.push(_integer_of_bits("push: id", id, 32))
        return text.decode()

    def finish(self) -> str:
        """U+FFFD if a character is cut off, else nothing. The stream then starts anew."""
        text: bytes = self._stream.finish()
        return text.decode()


class Tokenizer:
    """The tokeniser of a GGUF file, or of a folder with tokenizer.json or tokenizer.model.

        tokenizer = bittern.Tokenizer("model.gguf")
        ids = tokenizer.encode("Hello")              # int32 numpy
        text = tokenizer.decode(ids)
        ids = tokenizer.apply_chat([{"role": "user", "content": "Hello"}])

    Ids are those of llama.cpp for GGUF, and of `tokenizers` for a folder (docs/tokenizers.md).
    Byte-level BPE and sentencepiece's BPE are read.

    Text is str or bytes; bytes need not be UTF-8. Ids are a list or an array of integers. Threads
    may share a tokeniser. It can be pickled: then it is loaded again, from the same path.

    Errors: ValueError (malformed), NotImplementedError (another kind of tokeniser, or an unknown
    chat template), FileNotFoundError, OSError, MemoryError.
    """

    __slots__ = ("__weakref__", "_path", "_special", "_tokenizer")

    def __init__(self, path: _Path) -> None:
        self._path: bytes = _path("path", path)
        self._special: dict[str, int] | None = None
        self._tokenizer: Any = _call(_bittern.Tokenizer, [self._path], self._path)

    def encode(self, text: _Text, *, add_special: bool = True, parse_special: bool = True) -> Any:
        """The tokens of a text, int32 numpy.

        add_special      put bos and eos around the text, if the model asks for them
        parse_special    text that spells a control token becomes that token
        """
        return self._tokenizer.encode(
            _bytes("encode: text", text),
            _flag("encode: add_special", add_special),
            _flag("encode: parse_special", parse_special),
        )

    def decode(self, ids: Any, *, skip_special: bool = False) -> str:
        """The text of tokens. Bytes that are no UTF-8 are U+FFFD; skip_special leaves control tokens out."""
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", "replace")

    def decode_bytes(self, ids: Any, *, skip_special: bool = False) -> bytes:
        """The same as the bytes that the tokens spell."""
        text: bytes = self._tokenizer.decode(
            _ids("decode: ids", ids), _flag("decode: skip_special", skip_special)
        )
        return text

    def stream(self, *, skip_special: bool = True) -> TokenStream:
        """Decodes token by token, and never gives half a character."""
        return TokenStream(self, skip_special)

    def __len__(self) -> int:
        """Ids are below it."""
        size: int = self._tokenizer.size()
        return size

    def token(self, id: int) -> str:
        """The token as its file spells it: "<|im_end|>", "<0x0A>"."""
        text: bytes = self._tokenizer.token(_integer_of_bits("token: id", id, 32))
        return text.decode("utf-8", "replace")

    def id(self, token: _Text) -> int | None:
        """The token that is spelled so."""
        found: int | None = self._tokenizer.id(_bytes("id: token", token))
        return found

    def is_special(self, id: int) -> bool:
        """Whether it is a control token, which skip_special leaves out."""
        special: bool = self._tokenizer.is_special(_integer_of_bits("is_special: id", id, 32))
        return special

    @property
    def special_tokens(self) -> dict[str, int]:
        """All control tokens and their ids."""
        if self._special is None:
            self._special = {self.token(i): i for i in range(len(self)) if self.is_special(i)}
        return dict(self._special)

    @property
    def bos(self) -> int | None:
        """The token that begins a text."""
        found: int | None = self._tokenizer.bos()
        return found

    @property
    def eos(self) -> int | None:
        """The token that ends a text."""
        found: int | None = self._tokenizer.eos()
        return found

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end an answer: eos, end of turn."""
        found: tuple[int, ...] = self._tokenizer.ends()
        return found

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, as its file has it."""
        text: bytes = self._tokenizer.chat_template()
        return text.decode("utf-8", "replace") or None

    def apply_chat(
        self,
        messages: _Messages,
        *,
        add_generation_prompt: bool = True,
        thinking: bool = True,
        date: str | None = None,
        format: _Format | None = None,
    ) -> Any:
        """The tokens of a conversation, int32 numpy.

        messages                 {"role": "system", "user" or "assistant", "content": text} each
        add_generation_prompt    end with the beginning of the assistant's answer
        thinking                 False: an empty thought opens the answer (Qwen3)
        date                     today to Llama 3.1 and later; None: "26 Jul 2024", as their templates have it
        format                   chatml, llama-3, gemma or qwen; None: that of the model's chat template, which
                                 is recognised by its text. An unknown one is an error.

        Only the template's own text becomes control tokens: where a message spells one, that stays text.
        """
        options = _chat_options(add_generation_prompt, thinking, date, format)
        return self._tokenizer.apply_chat(_chat_messages(messages), options)

    def chat_text(
        self,
        messages: _Messages,
        *,
        add_generation_prompt: bool = True,
        thinking: bool = True,
        date: str | None = None,
        format: _Format | None = None,
    ) -> str:
        """The same as text, to look at: it no longer says what was whose."""
        options = _chat_options(add_generation_prompt, thinking, date, format)
        text: bytes = self._tokenizer.chat_text(_chat_messages(messages), options)
        return text.decode("utf-8", "replace")

    def __repr__(self) -> str:
        return f"Tokenizer({os.fsdecode(self._path)!r})"

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[bytes]]:
        return Tokenizer, (self._path,)


def _chat_messages(messages: Any) -> list[tuple[bytes, bytes]]:
    out = []
    if isinstance(messages, (str, bytes, Mapping)):
        raise ValueError(f"messages: {messages!r}, expected a list of messages")
    for i, message in enumerate(messages):
        where = f"messages: {i}"
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ValueError(f"{where}: {message!r}, expected a dict of role and content")
        role = _bytes(f"{where}: role", message["role"])
        out.append((role, _bytes(f"{where}: content", message["content"])))
    return out


def _chat_options(
    add_generation_prompt: Any, thinking: Any, date: Any, format: Any
) -> dict[str, bool | bytes]:
    options: dict[str, bool | bytes] = {
        "add_generation_prompt": _flag("add_generation_prompt", add_generation_prompt),
        "thinking": _flag("thinking", thinking),
    }
    for name, value in (("date", date), ("format", format)):
        if value is not None:
            options[name] = _bytes(name, value)
    return options
