"""The documents of an evaluation: intervals are over them, so how they were cut is part of the result."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from thalweg.config import checked_path
from thalweg.data.tasks.austen import HELD_OUT, novels
from thalweg.data.tasks.text_file import decode, read_bytes
from thalweg.errors import InputError

PIECE = 12_000  # characters of a piece of a long text, at least: some 3,000 tokens
BY_PARAGRAPHS = f"whole paragraphs joined to pieces of at least {PIECE:,} characters"
_PARAGRAPH = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class Document:
    """A name and a text."""

    name: str
    text: str


@dataclass(frozen=True)
class Documents(Sequence):
    """Documents, where they come from, the rule that cut them, and the SHA-256 of all text."""

    items: tuple[Document, ...]
    source: str
    rule: str

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]

    @property
    def sha256(self) -> str:
        return digest_of(document.text for document in self.items)

    @property
    def cut(self) -> bool:
        """Whether they are pieces of one text."""
        return len(self.items) > 1 and self.rule.startswith(BY_PARAGRAPHS)

    def first(self, count: int | None) -> "Documents":
        """The first ``count`` documents, said in the rule. Raises: InputError."""
        if count is None or count >= len(self.items):
            return self
        if count < 1:
            raise InputError(f"at least 1 document must be read, got {count}")
        return Documents(self.items[:count], self.source, f"{self.rule}; the first {count} of {len(self.items)}")


def digest_of(texts: Iterable[str]) -> str:
    """SHA-256 of texts in order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def documents_of(path: str | Path | None = None) -> Documents:
    """The documents in a file.

    None: the novel held out of the shipped corpus. ``.jsonl``: one document a line, in its field ``text``. Any other UTF-8 text
    (``.gz`` and ``.xz`` are unpacked): cut at form feeds if it has any, else at empty lines into pieces of whole paragraphs, each of at
    least 12,000 characters (the last one of at least half of that, else it joins the one before). Pieces of one text resemble each other
    more than documents do: an interval over them says nothing about other texts.
    Raises: InputError for a file that cannot be read, is not UTF-8, or holds no text.
    """
    if path is None:
        return Documents(_named(HELD_OUT, pieces(novels()[HELD_OUT])), f"{HELD_OUT} (shipped, held out)", BY_PARAGRAPHS)
    path = checked_path(path, expand=True)
    text = decode(read_bytes(path), path)
    if path.suffix.lower() == ".jsonl":
        return Documents(_named(path.name, _lines(text, path)), path.name, "one line, one document")
    if "\f" in text:
        parts, rule = text.split("\f"), "cut at form feeds"
    else:
        parts = pieces(text)
        rule = BY_PARAGRAPHS if len(parts) > 1 else "the whole file"
    return Documents(_named(path.name, parts), path.name, rule)


def as_documents(texts: Documents | Iterable[str | Document]) -> Documents:
    """Texts of a caller as documents. Raises: InputError."""
    if isinstance(texts, Documents):
        return texts
    if isinstance(texts, str | bytes):
        raise InputError("documents must be a list of texts, got one text; write [text] or documents_of(FILE)")
    items = []
    for i, text in enumerate(texts):
        if isinstance(text, Document):
            items.append(text)
        elif isinstance(text, str):
            items.append(Document(f"document {i}", text))
        else:
            raise InputError(f"document {i} must be a text, got {type(text).__name__}")
    if not items:
        raise InputError("there is no document to evaluate; give at least one text")
    return Documents(tuple(items), "given by the caller", "as given")


def pieces(text: str, least: int = PIECE) -> list[str]:
    """Whole paragraphs of a text joined until a piece has ``least`` characters; nothing but the white space between pieces is left out."""
    found: list[str] = []
    start = 0
    for gap in _PARAGRAPH.finditer(text):
        if gap.start() - start >= least:
            found.append(text[start : gap.start()])
            start = gap.end()
    rest = text[start:]
    if found and len(rest) < least // 2:
        begin = text.rindex(found[-1], 0, start)
        found[-1], rest = text[begin:], ""
    return [*found, rest] if rest else found


def _named(source: str, texts: Iterable[str]) -> tuple[Document, ...]:
    """Raises: InputError where no text is left."""
    kept = [text.strip() for text in texts if text.strip()]
    if not kept:
        raise InputError(f"{source} holds no text")
    return tuple(Document(f"{source} {i + 1}/{len(kept)}", text) for i, text in enumerate(kept))


def _lines(text: str, path: Path) -> list[str]:
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(f'{path}:{number} is not JSON; a line must be a table with a field "text"') from None
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise InputError(f'{path}:{number} has no field "text" that is a text')
        found.append(row["text"])
    return found
