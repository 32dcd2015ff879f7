"""One pass over a source: its tokens into files, its bytes counted and hashed, its nulls taken."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from thalweg.data.text.nulls import DICTIONARY, unigram_cross_entropy, xz_rates
from thalweg.data.text.source import SPLITS, Source
from thalweg.data.text.tokenizer import Tokenizer
from thalweg.errors import InputError

BLOCK = 2**20  # characters encoded at once


def encode_source(source: Source, tokenizer: Tokenizer, folder: Path, max_tokens: int | None = None) -> dict[str, Any]:
    """Write ``train.bin``, ``valid.bin`` and ``tokenizer.json`` into ``folder``; return what the cache records of them.

    Tokens are uint16 where the vocabulary allows, else uint32. Between two documents of a split stands the end of a text, if the
    tokenizer has one. At ``max_tokens`` train tokens the source is read no further.
    Raises: InputError for a split without two tokens.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    writers = {split: _SplitWriter(folder / f"{split}.bin", tokenizer, dtype) for split in SPLITS}
    writers["train"].limit = max_tokens
    try:
        for split, text in source.documents():
            writers[split].add(text)
            if writers["train"].full:
                break
    finally:
        for writer in writers.values():
            writer.close()
    for split, writer in writers.items():
        if writer.tokens < 2:
            raise InputError(
                f"{source.name}: the {split} split holds {writer.tokens} token{'s' * (writer.tokens != 1)}, "
                "at least 2 are needed; give more text"
            )
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    xz = source.known_xz if max_tokens is None else None
    train, valid = (np.memmap(folder / f"{split}.bin", dtype, "r") for split in ("train", "valid"))
    return {
        "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.digest,
        "content": {split: writer.hash.hexdigest() for split, writer in writers.items()},
        "documents": {split: writer.documents for split, writer in writers.items()},
        "tokens": {split: writer.tokens for split, writer in writers.items()},
        "bytes": {split: writer.bytes for split, writer in writers.items()},
        "nulls": {
            "unigram_entropy": unigram_cross_entropy(train, valid, tokenizer.vocab_size),
            **(xz or xz_rates(bytes(writers["train"].tail), bytes(writers["valid"].head))),
        },
        "notes": source.notes,
    }


class _SplitWriter:
    """Appends documents of one split; keeps the first and the last 8 MiB of text for ``xz``."""

    def __init__(self, path: Path, tokenizer: Tokenizer, dtype: np.dtype):
        self._file = path.open("wb")
        self._tokenizer, self._dtype = tokenizer, dtype
        self.limit: int | None = None
        self.tokens = self.bytes = self.documents = 0
        self.hash = hashlib.sha256()
        self.head, self.tail = bytearray(), bytearray()

    @property
    def full(self) -> bool:
        return self.limit is not None and self.tokens >= self.limit

    def add(self, text: str) -> None:
        if not text or self.full:
            return
        end = self._tokenizer.end_of_text
        if self.documents and end is not None:
            self._write(np.array([end]))
        self.documents += 1
        for block in _blocks(self._tokenizer.pieces(text)):
            for piece, ids in zip(block, self._tokenizer.encode_pieces(block), strict=True):
                if self.limit is not None and self.tokens + len(ids) > self.limit:
                    ids = ids[: self.limit - self.tokens]
                    piece = self._tokenizer.decode(ids)
                self._write(ids)
                self._count(piece.encode())
                if self.full:
                    return
        self.hash.update(b"\0")

    def _write(self, ids: np.ndarray) -> None:
        self._file.write(ids.astype(self._dtype).tobytes())
        self.tokens += len(ids)

    def _count(self, text: bytes) -> None:
        self.bytes += len(text)
        self.hash.update(text)
        if len(self.head) < DICTIONARY:
            self.head += text
        self.tail += text
        if len(self.tail) > 2 * DICTIONARY:
            del self.tail[:-DICTIONARY]

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _blocks(pieces: list[str]) -> Iterator[list[str]]:
    block: list[str] = []
    size = 0
    for piece in pieces:
        block.append(piece)
        size += len(piece)
        if size >= BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block
