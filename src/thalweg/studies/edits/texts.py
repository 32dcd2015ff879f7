"""The documents of a study of edits: cut from a text without any tokenizer, so that a lock can hold them."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from thalweg.config import checked_path
from thalweg.data.tasks.austen import HELD_OUT, novels
from thalweg.data.tasks.text_file import decode, read_bytes
from thalweg.errors import InputError
from thalweg.evaluation.documents import Document, documents_of, pieces
from thalweg.studies.edits.plan import EditPlan, Text

if TYPE_CHECKING:
    from thalweg.studies.compressed.plan import Source


@dataclass(frozen=True)
class Reading:
    """What one family reads: documents, and how many tokens (words) of each."""

    documents: tuple[Document, ...]
    tokens: int
    facts: dict[str, Any]


class Where(Protocol):
    """What a scale says of the pieces of a text."""

    @property
    def documents(self) -> int: ...
    @property
    def skip(self) -> int: ...
    @property
    def every(self) -> int: ...
    @property
    def file(self) -> str: ...
    @property
    def characters(self) -> int: ...


def reading(plan: EditPlan, scale_name: str, family: str = "") -> Reading:
    """The documents of ``plan`` at a scale, for one family. Raises: InputError for a text that is too short."""
    scale, own = plan.at(scale_name), plan.arms.get(family)
    return cut_reading(
        plan.text, scale, (own.tokens if own else 0) or scale.tokens, (own.documents if own else 0) or scale.documents
    )


def cut_reading(text: "Text | Source", scale: Where, tokens: int, count: int) -> Reading:
    """The first ``count`` documents of a scale, ``tokens`` of each to be read. Raises: InputError for a text that is too short."""
    characters = scale.characters or text.characters
    source, cut = _pieces(scale.file or text.file, characters)
    last = scale.skip + scale.every * (scale.documents - 1)
    if last >= len(cut):
        raise InputError(
            f"the text has {len(cut)} pieces of {characters:,} characters, document {scale.documents - 1} would be piece {last}; "
            "take fewer documents, a smaller skip or every, or a longer text"
        )
    chosen = [scale.skip + scale.every * i for i in range(min(count, scale.documents))]
    documents = tuple(Document(f"{source} piece {i}", _start(text, cut[i], tokens)) for i in chosen)
    sha = hashlib.sha256("\0".join(document.text for document in documents).encode()).hexdigest()
    unit = "words" if text.evaluation == "embedding" else "tokens"
    by_line = (scale.file or text.file).lower().endswith(".jsonl")
    cut_by = (
        "one line, one piece" if by_line else f"whole paragraphs joined to pieces of at least {characters:,} characters"
    )
    rule = f"{cut_by}; pieces {scale.skip}, {scale.skip + scale.every}, ...; the first {tokens} {unit} of each"
    facts = {"source": source, "rule": rule, "sha256": sha, "documents": len(documents), "tokens": tokens}
    return Reading(documents, tokens, facts)


def _start(text: "Text | Source", piece: str, words: int) -> str:
    return " ".join(piece.split()[:words]) if text.evaluation == "embedding" else piece


def _pieces(file: str, characters: int) -> tuple[str, list[str]]:
    if not file:
        return HELD_OUT, pieces(novels()[HELD_OUT], characters)
    path = checked_path(file, expand=True)
    if path.suffix.lower() == ".jsonl":
        return path.name, [document.text for document in documents_of(path)]
    return path.name, pieces(decode(read_bytes(path), path), characters)
