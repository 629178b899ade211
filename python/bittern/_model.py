"""Models that run on the CPU (docs/run.md)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat

from . import _bittern  # type: ignore[attr-defined]
from . import _cuda
from ._convert import _call, _flag, _integer, _path
from ._decoding import _number, _unsigned
from ._tokenizer import Tokenizer, _bytes, _ids, _Path, _Text
from ._values import is_fastest as _is_fastest
from ._values import nearest as _nearest

_Activations = Literal["float", "int16", "int8"]
_KINDS = ("float", "int16", "int8")
_MOST = 2**62


@dataclass(frozen=True)
class ModelInfo:
    """What a model is."""

    architecture: str  # "llama", as transformers' model_type
    layers: int
    attention_layers: int
    hidden: int
    vocab: int
    context: int  # tokens that it was made for
    parameters: int  # numbers, a tied head counted once
    weight_bytes: int  # memory that the weights take


@dataclass(frozen=True)
class SessionBytes:
    """Memory of what the layers remember."""

    cache: int  # keys and values of the tokens held
    states: int  # of gated delta layers


def _size(where: str, value: Any) -> int:
    return _integer(where, value, 0, _MOST)


def _kv(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {value!r}, expected f32, f16, bf16, or a scheme such as aura8v4")
    return value.encode("utf-8", "backslashreplace").decode()


def _tokens(where: str, value: Any) -> Any:
    """int32 numpy, of a list or an array of any framework."""
    if _cuda.torch_of(value):
        value = value.detach().cpu().numpy()
    return _ids(where, value)


def _like(given: Any, array: Any, dtype: Any = None) -> Any:
    """The array as a tensor of torch's where one was given."""
    torch = _cuda.torch_of(given)
    return torch.from_numpy(array).to(device=given.device, dtype=dtype) if torch else array


class Session:
    """One sequence of tokens and what a model's layers remember of it: what `Model.session` gives.

        session = model.session(kv="aura8v4")
        logits = session.append(tokens)              # f32 [1, vocab]: after the last token
        session.truncate(session.size - 3)           # takes tokens back
        other = session.fork()

    Calls of several threads follow one another. A call that fails leaves it as it was.
    """

    __slots__ = ("__weakref__", "_session")

    def __init__(self, session: Any) -> None:
        if not isinstance(session, _bittern.Session):
            raise ValueError("Session: expected what Model.session gives")
        self._session: Any = session

    def append(self, tokens: Any, *, logits: int = 1) -> Any:
        """Appends tokens: a list or an array of integers. Gives the logits of the last `logits` of
        them, f32 [logits, vocab], of torch where the tokens are; None where `logits` is 0."""
        ids = _tokens("append: tokens", tokens)
        rows = _size("append: logits", logits)
        if rows > len(ids):
            if not len(ids):
                raise ValueError("append: tokens: none, expected at least one (none only with logits=0)")
            raise ValueError(f"append: logits: {rows}, expected at most {len(ids)}, the number of tokens")
        found = self._session.append(ids, rows)
        return None if found is None else _like(tokens, found)

    def truncate(self, size: int) -> None:
        """Forgets all tokens from `size` on."""
        self._session.truncate(_size("truncate: size", size))

    def fork(self) -> Session:
        """A session with the same tokens."""
        return Session(self._session.fork())

    __copy__ = fork

    @property
    def size(self) -> int:
        """Tokens held."""
        size: int = self._session.size()
        return size

    def __len__(self) -> int:
        return self.size

    @property
    def context(self) -> int:
        """The most tokens."""
        context: int = self._session.context()
        return context

    @property
    def tokens(self) -> tuple[int, ...]:
        """Those held."""
        tokens: tuple[int, ...] = self._session.tokens()
        return tokens

    @property
    def bytes(self) -> SessionBytes:
        return SessionBytes(*self._session.bytes())

    def __repr__(self) -> str:
        return f"Session(size={self.size}, context={self.context})"


def _is_batch(tokens: Any) -> bool:
    if hasattr(tokens, "ndim"):
        return bool(tokens.ndim == 2)
    return isinstance(tokens, (list, tuple)) and any(
        isinstance(t, (list, tuple)) or getattr(t, "ndim", 0) == 1 for t in tokens
    )


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, (list, tuple)) and any(isinstance(m, Mapping) for m in prompt)


class Model:
    """A model that runs: what `load` gives.

        model = bittern.load("model.gguf")
        print(model.generate("The capital of France is", max_tokens=20, temperature=0))
        logits = model.logits(tokens)                # f32 [n, vocab]
        session = model.session()

    Threads may share it. It can be pickled: then it is loaded again, from the same path.
    """

    __slots__ = ("__weakref__", "_arguments", "_info", "_model", "_no_tokenizer", "_tokenizer")

    def __init__(
        self,
        path: _Path,
        activations: _Activations = "int16",
        threads: int = 0,
        context: int = 0,
        preference: Literal["exact", "fastest"] = "exact",
    ) -> None:
        if not isinstance(activations, str) or activations not in _KINDS:
            raise ValueError(f"activations: {activations!r}{_nearest(str(activations), _KINDS)}")
        self._arguments = (
            _path("path", path),
            activations,
            _integer("threads", threads, 0),
            _size("context", context),
            preference,
        )
        fastest = _is_fastest("preference", preference)
        self._tokenizer: Tokenizer | None = None
        self._no_tokenizer: str | None = None
        self._model: Any = _call(_bittern.Model, [self._arguments[0]], *self._arguments[:-1], fastest)
        self._info = ModelInfo(**self._model.info())

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokeniser; None where its files have none, or one of a kind that is not read."""
        if self._tokenizer is None and self._no_tokenizer is None:
            try:
                self._tokenizer = Tokenizer(self._arguments[0])
            except (OSError, ValueError, NotImplementedError) as error:
                self._no_tokenizer = str(error)
        return self._tokenizer

    def _words(self, where: str) -> Tokenizer:
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ValueError(f"{where}: text, but the model has no tokeniser ({self._no_tokenizer}); expected tokens")
        return tokenizer

    def logits(self, tokens: Any, *, kv: str = "f16") -> Any:
        """The logits after every token, f32.

        tokens    [n] integers give [n, vocab]. A list of such sequences, of different lengths too, gives
                  a list of arrays, and [batch, n] give [batch, n, vocab]; they run side by side.
        kv        the cache that attention reads, as in `session`

        numpy, or torch where the tokens are. The same bits for any number of threads and sequences.
        """
        kind = _kv("logits: kv", kv)
        context = self._arguments[3]
        if not _is_batch(tokens):
            return _like(tokens, self._model.logits([_tokens("logits: tokens", tokens)], context, kind)[0])
        given = list(tokens)
        ids = [_tokens(f"logits: tokens: {i}", one) for i, one in enumerate(given)]
        found = self._model.logits(ids, context, kind)
        if hasattr(tokens, "ndim"):
            import numpy as np

            vocab = self._info.vocab
            shape = (len(ids), tokens.shape[1], vocab)
            return _like(tokens, np.stack(found) if found else np.empty(shape, np.float32))
        return [_like(one, array) for one, array in zip(given, found)]

    def session(
        self,
        *,
        context: int = 0,
        kv: str = "f16",
        first: int = 0,
        recent: int = 0,
        skip_first: int = 0,
        skip_last: int = 0,
    ) -> Session:
        """An empty sequence of tokens.

        context                  the most tokens; 0: that of `load`, or what the model was made for
        kv                       the cache: f32, f16, bf16, or compressed: aura and the bits of K and V, "aura8v4"
        first, recent            of a compressed cache: tokens kept in bf16 at the start and at the end
        skip_first, skip_last    attention layers whose cache is not compressed but f16
        """
        return Session(
            self._model.session(
                _size("session: context", context),
                _kv("session: kv", kv),
                _size("session: first", first),
                _size("session: recent", recent),
                _size("session: skip_first", skip_first),
                _size("session: skip_last", skip_last),
            )
        )

    def generate(
        self,
        prompt: Any,
        *,
        max_tokens: int | None = None,
        temperature: SupportsFloat = 0.8,
        top_k: int = 40,
        top_p: SupportsFloat = 0.95,
        min_p: SupportsFloat = 0.05,
        repetition_penalty: SupportsFloat = 1.0,
        seed: int = 0,
        stop: _Text | Iterable[_Text] = (),
        ignore_eos: bool = False,
        special: bool = False,
        stream: Callable[[Any], Any] | None = None,
        session: Session | None = None,
        kv: str = "f16",
        context: int = 0,
    ) -> Any:
        """What comes after the prompt.

        prompt         a text, or a conversation: a list of {"role": ..., "content": ...}; then the result is
                       a str. Or tokens, a list or an array of integers: then it is an array of tokens.
        max_tokens     None: until the model ends or the context is full
        temperature, top_k, top_p, min_p, repetition_penalty, seed
                       as in `sample`; temperature 0 takes the likeliest
        stop           a text, or several, before which the result ends
        ignore_eos     go on after a token that ends an answer
        special        control tokens are part of the text
        stream         called with every piece: whole characters of the text, or a token. False ends it.
        session        one to append to, with its own cache and context; the last token is not appended

        Defaults and text are those of `bittern run`. Ctrl-C ends it.
        """
        if stream is not None and not callable(stream):
            raise ValueError(f"generate: stream: {stream!r}, expected a function")
        run = self._start(
            prompt, max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop, ignore_eos,
            special, session, kv, context,
        )  # fmt: skip
        pieces = []
        for piece in run:
            pieces.append(piece)
            if stream is not None and stream(piece) is False:
                run.finish()
        if run.is_text:
            return "".join(pieces)
        import numpy as np

        return _like(prompt, np.array(pieces, np.int32), getattr(prompt, "dtype", None))

    def stream(
        self,
        prompt: Any,
        *,
        max_tokens: int | None = None,
        temperature: SupportsFloat = 0.8,
        top_k: int = 40,
        top_p: SupportsFloat = 0.95,
        min_p: SupportsFloat = 0.05,
        repetition_penalty: SupportsFloat = 1.0,
        seed: int = 0,
        stop: _Text | Iterable[_Text] = (),
        ignore_eos: bool = False,
        special: bool = False,
        session: Session | None = None,
        kv: str = "f16",
        context: int = 0,
    ) -> Iterator[Any]:
        """The pieces of `generate`, one after the other.

            for text in model.stream("Once upon a time"):
                print(text, end="", flush=True)
        """
        return self._start(
            prompt, max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop, ignore_eos,
            special, session, kv, context,
        )  # fmt: skip

    def _start(
        self, prompt: Any, max_tokens: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any,
        repetition_penalty: Any, seed: Any, stop: Any, ignore_eos: Any, special: Any, session: Any, kv: Any,
        context: Any,
    ) -> _Run:  # fmt: skip
        if session is None:
            session = self.session(context=context, kv=kv)
        elif not isinstance(session, Session):
            raise ValueError(f"generate: session: {session!r}, expected what Model.session gives")
        elif kv != "f16" or context != 0:
            raise ValueError("generate: kv and context: the session has its own, expected none beside it")
        is_text = True
        if isinstance(prompt, (str, bytes)):
            ids = self._words("generate: prompt").encode(prompt)
        elif _is_conversation(prompt):
            ids = self._words("generate: prompt").apply_chat(prompt)
        else:
            ids = _tokens("generate: prompt", prompt)
            is_text = False
        stops = [stop] if isinstance(stop, (str, bytes)) else stop
        if isinstance(stops, Mapping) or not isinstance(stops, Iterable):
            raise ValueError(f"generate: stop: {stop!r}, expected a text or a list of texts")
        tokenizer = self.tokenizer
        return _Run(
            _bittern.Generator(
                session._session,
                None if tokenizer is None else tokenizer._tokenizer,
                ids,
                _number("generate: temperature", temperature),
                _size("generate: top_k", top_k),
                _number("generate: top_p", top_p),
                _number("generate: min_p", min_p),
                _number("generate: repetition_penalty", repetition_penalty),
                _unsigned("generate: seed", seed),
                -1 if max_tokens is None else _size("generate: max_tokens", max_tokens),
                [_bytes("generate: stop", text) for text in stops],
                _flag("generate: ignore_eos", ignore_eos),
                _flag("generate: special", special),
            ),
            is_text,
        )

    def __repr__(self) -> str:
        return f"Model({os.fsdecode(self._arguments[0])!r}, architecture={self._info.architecture!r})"

    def __reduce__(self) -> tuple[type[Model], tuple[Any, ...]]:
        return Model, self._arguments


class _Run(Iterator[Any]):
    """The pieces of one generation."""

    __slots__ = ("_generator", "is_text")

    def __init__(self, generator: Any, is_text: bool) -> None:
        self._generator = generator
        self.is_text = is_text

    def __next__(self) -> Any:
        while (piece := self._generator.next()) is not None:
            token, text = piece
            if self.is_text and text:
                return text.decode()
            if not self.is_text and token >= 0:
                return token
        raise StopIteration

    def finish(self) -> None:
        """Ends it: what was held back of the text comes, and nothing else."""
        self._generator.finish()


def load(
    path: _Path,
    *,
    activations: _Activations = "int16",
    threads: int = 0,
    context: int = 0,
    preference: Literal["exact", "fastest"] = "exact",
) -> Model:
    """A model that runs on the CPU, from a GGUF file, or a Hugging Face or MLX folder.

    activations    how activations meet quantised weights: "float", "int16" or "int8" (docs/run.md)
    threads        as set_num_threads takes them; 0: num_threads()
    context        the most tokens of a session; 0: what the model was made for
    preference     "fastest" also uses kernels that are less exact, each with a stated bound (docs/run.md)

    Errors: ValueError (malformed, or a config that contradicts the tensors), NotImplementedError (an
    architecture that does not run), FileNotFoundError, OSError, MemoryError (weights larger than the memory
    that is available).
    """
    return Model(path, activations, threads, context, preference)
