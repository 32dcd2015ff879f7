"""A source is documents, each in a split, and a name that changes when they do."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from thalweg.errors import InputError

SPLITS = ("train", "valid")
Documents = Iterator[tuple[str, str]]  # (split, text); within a split in order


class Source(Protocol):
    """What a text task is made from.

    identity: changes whenever the text or its split does; part of the cache's key. split_rule: in words. ``documents`` can be read again
    and again; where the source has its own validation split, that comes first, so a reader may stop when it has enough to train on.
    known_xz: the rates of ``nulls.xz_rates`` where they are known for these very texts, else None.
    """

    name: str
    notes: list[str]
    known_xz: dict[str, float] | None
    split_rule: str

    @property
    def identity(self) -> str: ...

    def documents(self) -> Documents: ...


@dataclass
class TextSource:
    """Documents that are in memory."""

    name: str
    identity: str
    split_rule: str
    splits: dict[str, list[str]]
    notes: list[str] = field(default_factory=list)
    known_xz: dict[str, float] | None = None

    def documents(self) -> Documents:
        for split in ("valid", "train"):
            yield from ((split, text) for text in self.splits[split])


def split_block(text: str, fraction: float, what: str) -> dict[str, list[str]]:
    """The last ``fraction`` of ``text`` as validation, one contiguous block that begins at a line (else at a word).

    Raises: InputError where either part would be empty.
    """
    cut = round(len(text) * (1 - fraction))
    for boundary in ("\n", " "):
        after = text.find(boundary, max(0, cut - 1)) + 1
        if 0 < after <= cut + (len(text) - cut) // 2:
            cut = after
            break
    train, valid = text[:cut], text[cut:]
    if not train.strip() or not valid.strip():
        raise InputError(
            f"{what} is too short to be split: {len(text)} characters, of which the last {fraction:g} is for validation; give more text"
        )
    return {"train": [train], "valid": [valid]}


def cap_text(text: str, max_bytes: int | None) -> str:
    """The longest prefix of at most ``max_bytes`` UTF-8 bytes."""
    if max_bytes is None or len(text) * 4 <= max_bytes:
        return text
    return text.encode()[:max_bytes].decode(errors="ignore")


def cap_documents(documents: Iterable[str], max_bytes: int | None) -> Iterator[str]:
    """Documents until ``max_bytes`` UTF-8 bytes are reached; the last one is cut."""
    left = max_bytes
    for text in documents:
        if left is None:
            yield text
            continue
        text = cap_text(text, left)
        left -= len(text.encode())
        if text:
            yield text
        if left <= 0:
            return


_LINE = re.compile(r"[^\n]*\n+|[^\n]+")


def lines(text: str) -> list[str]:
    """``text`` cut after every run of newlines: the pieces that are encoded one by one, so blocks of any size give the same tokens."""
    return _LINE.findall(text)
