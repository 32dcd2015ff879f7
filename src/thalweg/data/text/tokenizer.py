"""Text to token numbers and back: bytes, byte-level BPE, or any ``tokenizer.json``."""

import copy
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np

from thalweg.config import checked_path
from thalweg.data.text.source import lines
from thalweg.errors import InputError

END_OF_TEXT = "<|endoftext|>"
BYTE_VOCAB = 257  # 256 bytes and the end of a text
MASK = "[MASK]"  # what the entry for a token to be filled in is called where a tokenizer is handed on


class Tokenizer(ABC):
    """Encodes text without reading special tokens out of it; the separator of documents is put in by the caller.

    digest: sha256 of what the encoding depends on. end_of_text: its number, or None where the tokenizer has none. mask: the number that
    stands for a token to be filled in, which follows those of the vocabulary; None where nothing is to be filled in.
    """

    name: str
    vocab_size: int
    end_of_text: int | None
    digest: str
    mask: int | None = None

    def with_mask(self) -> Self:
        """A copy that has a ``mask``: the entry after the last, or the last where that is one already."""
        found = copy.copy(self)
        found.mask = self.vocab_size - self.ends_with(MASK)
        return found

    def ends_with(self, *names: str) -> bool:
        """Whether the last entries have these names: the special tokens of a task that has handed the tokenizer on beside a model."""
        return False

    @abstractmethod
    def pieces(self, text: str) -> list[str]:
        """Cuts ``text`` where no token crosses."""

    @abstractmethod
    def encode_pieces(self, pieces: Sequence[str]) -> list[np.ndarray]:
        """Token numbers of each piece."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of token numbers; bytes that are no UTF-8 become U+FFFD, the end of a text is left out."""

    @abstractmethod
    def to_json(self) -> str:
        """What :func:`from_json` reads back."""

    def vocabulary(self) -> dict[str, int]:
        """Entry -> number, as the library spells it; empty where entries have no spelling."""
        return {}

    def encode(self, text: str) -> list[int]:
        """Token numbers of ``text``, the same as in the cache."""
        return self.encode_texts([text])[0]

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """:meth:`encode` of many texts, their pieces in one call."""
        pieces = [self.pieces(text) for text in texts]
        found = iter(self.encode_pieces([piece for parts in pieces for piece in parts]))
        return [[i for ids in islice(found, len(parts)) for i in ids.tolist()] for parts in pieces]


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes 0..255, and 256 for the end of a text."""

    name = "byte"
    vocab_size = BYTE_VOCAB
    end_of_text = 256
    digest = hashlib.sha256(b"thalweg byte tokenizer 1").hexdigest()

    def pieces(self, text: str) -> list[str]:
        return lines(text)

    def encode_pieces(self, pieces: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(piece.encode(), np.uint8) for piece in pieces]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def to_json(self) -> str:
        return json.dumps({"thalweg": "byte"})


class JsonTokenizer(Tokenizer):
    """A tokenizer of the ``tokenizers`` library.

    by_lines: whether it is cut by lines, as byte-level BPE of our making is; others get each document whole, because a scheme that marks
    the start of a text would mark every line.
    """

    _END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>", "<|im_end|>", "[SEP]")

    def __init__(self, text: str, name: str, *, by_lines: bool):
        import tokenizers

        self.name, self._by_lines = name, by_lines
        self._json = text
        try:
            self._tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(text)
        except BaseException as error:  # the library raises bare Exception, and its panics are not even that
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise InputError(f"{name} is not a tokenizer.json of the tokenizers library: {error}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # '<|endoftext|>' in a text is text
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        if self.vocab_size < 1:
            raise InputError(f"the tokenizer {name} has an empty vocabulary; give another")
        self.end_of_text = next((i for i in map(self._tokenizer.token_to_id, self._END_NAMES) if i is not None), None)
        canonical = json.dumps([json.loads(text), by_lines], sort_keys=True)
        self.digest = hashlib.sha256(canonical.encode()).hexdigest()

    def pieces(self, text: str) -> list[str]:
        return lines(text) if self._by_lines else [text] * bool(text)

    def encode_pieces(self, pieces: Sequence[str]) -> list[np.ndarray]:
        try:
            encoded = self._tokenizer.encode_batch_fast(list(pieces), add_special_tokens=False)
        except Exception as error:  # such as a vocabulary of words without one for the unknown
            raise InputError(f"the tokenizer {self.name} cannot encode this text: {error}; give another") from None
        return [np.array(e.ids, np.uint32) for e in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def ends_with(self, *names: str) -> bool:
        first = self.vocab_size - len(names)
        return all(self._tokenizer.token_to_id(name) == first + i for i, name in enumerate(names))

    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()

    def portable(self, **specials: tuple[str, int]) -> Any:
        """A fast tokenizer of transformers with special tokens beside: keyword -> name and number. None where a name gets another number."""
        from tokenizers import Tokenizer as Library
        from transformers import PreTrainedTokenizerFast

        inner = Library.from_str(self._json)
        inner.add_special_tokens([name for name, _ in specials.values()])
        if any(inner.token_to_id(name) != number for name, number in specials.values()):
            return None
        named: dict[str, Any] = {keyword: name for keyword, (name, _) in specials.items()}
        return PreTrainedTokenizerFast(tokenizer_object=inner, **named)

    def library_json(self) -> str:
        """The ``tokenizer.json`` of the tokenizers library."""
        return self._json

    def to_json(self) -> str:
        return json.dumps(
            {"thalweg": "json", "name": self.name, "by_lines": self._by_lines, "tokenizer": json.loads(self._json)}
        )


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Token numbers of ``text`` by a tokenizer of ours or of transformers, without the special tokens that one would add."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.encode(text)
    return [int(i) for i in tokenizer.encode(text, add_special_tokens=False, verbose=False)]


def from_json(text: str) -> Tokenizer:
    """A tokenizer as :meth:`Tokenizer.to_json` wrote it. Raises: InputError."""
    try:
        saved = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"this file is not JSON: {error}") from None
    kind = saved.get("thalweg") if isinstance(saved, dict) else None
    if kind == "byte":
        return ByteTokenizer()
    if kind == "json":
        for key, wanted in (("tokenizer", dict), ("name", str), ("by_lines", bool)):
            if not isinstance(saved.get(key), wanted):
                raise InputError(f"this tokenizer file has no valid {key!r}; it is broken: make it anew")
        return JsonTokenizer(
            json.dumps(saved["tokenizer"], ensure_ascii=False), saved["name"], by_lines=saved["by_lines"]
        )
    raise InputError("this file holds no tokenizer of ours")


def read_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a ``tokenizer.json`` (of the tokenizers library or of ours) or in a folder that holds one. Raises: InputError."""
    path = checked_path(path, expand=True)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"no tokenizer at {file}; give 'bpe', 'byte' or the path of a tokenizer.json") from None
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"the tokenizer {file} cannot be read: {error}") from None
    try:
        saved = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the tokenizer {file} is not JSON: {error}") from None
    if not isinstance(saved, dict):
        raise InputError(f"the tokenizer {file} is not JSON of a table, but of a {type(saved).__name__}")
    ours = "thalweg" in saved
    return from_json(text) if ours else JsonTokenizer(text, path.name, by_lines=False)
