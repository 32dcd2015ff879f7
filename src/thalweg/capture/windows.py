"""Texts cut into windows of tokens, the windows into batches, each token knowing which unit of the statistics it belongs to."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from thalweg._words import counted
from thalweg.capture.tables import Units
from thalweg.errors import InputError

LEAST_DOCUMENTS = 8  # fewer give no interval over documents; then it is over windows
MOST_UNITS = 512  # more are pooled into as many groups of neighbours, so that memory does not grow with their number
LEAST_TOKENS = 2
NOT_SCORED = -100


class Window(NamedTuple):
    """Tokens that are read; the token behind each is what it is scored on (one fewer at the end of a document). unit: counted from 0."""

    ids: list[int]
    targets: list[int]
    unit: int


class Batch(NamedTuple):
    """input_ids [b t]; attention_mask [b t], None where nothing is padding (it stands on the right); targets [b t]; unit_of_row [b]."""

    input_ids: Int[Tensor, "b t"]
    attention_mask: Int[Tensor, "b t"] | None
    targets: Int[Tensor, "b t"]
    unit_of_row: Int[Tensor, " b"]

    @property
    def call(self) -> dict[str, Tensor]:
        """What a model is called with."""
        mask = {} if self.attention_mask is None else {"attention_mask": self.attention_mask}
        return {"input_ids": self.input_ids, **mask}


@dataclass(frozen=True)
class Text:
    """windows: the longest first. documents: that have a window; tokens: that are read; rule: how they were cut, in words."""

    windows: tuple[Window, ...]
    units: Units
    documents: int
    length: int
    tokens: int
    notes: tuple[str, ...]
    bos: int | None = None

    @property
    def rule(self) -> str:
        first = "not scored" if self.bos is None else f"scored after token {self.bos}"
        return f"disjoint windows of {self.length} tokens, first token of a document {first}"

    @property
    def begins(self) -> str:
        """How a document begins, for people."""
        if self.bos is None:
            return "no BOS put before a document"
        return f"BOS: token {self.bos} before every document"

    def batches(self, size: int, padding_id: int = 0) -> Iterator[Batch]:
        """Batches of ``size`` windows of about one length."""
        for start in range(0, len(self.windows), size):
            yield _batch(self.windows[start : start + size], padding_id)


def cut(
    texts: Iterable[Any],
    encode: Callable[[str], Sequence[int]] | None,
    length: int,
    tokens: int | None,
    bos: int | None = None,
) -> Text:
    """Disjoint windows of at most ``length`` tokens of every document.

    texts: strings, or token ids, one for each document. encode: from a string to its token ids. tokens: windows are taken in order
    until they hold as many. bos: id put before every document that does not begin with it. Documents of fewer than two tokens are left out,
    and said.
    Intervals are over documents, or over windows where fewer than eight documents are there, in at most 512 groups.
    Raises: InputError for no text, text without a tokenizer, or numbers out of range.
    """
    for name, value, least in (("length", length, LEAST_TOKENS), ("tokens", tokens, LEAST_TOKENS)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if bos is not None and (isinstance(bos, bool) or not isinstance(bos, int) or bos < 0):
        raise InputError(f"bos is the id of a token, a whole number from 0, or None, got {bos!r}")
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        got = "one text" if isinstance(texts, str) else type(texts).__name__
        raise InputError(
            f"texts are a list of documents, got {got}; write [text], or of a file: thalweg.evaluation.documents_of(FILE)"
        )
    found: list[tuple[int, list[int], list[int]]] = []
    read, given, short, longest = 0, 0, 0, 0
    for document, text in enumerate(texts):
        given += 1
        if tokens is not None and read >= tokens:
            continue
        ids = _ids(text, encode, document)
        if bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        longest = max(longest, len(ids))
        if len(ids) < LEAST_TOKENS:
            short += 1
            continue
        for start in range(0, len(ids), length):
            part = ids[start : start + length]
            if len(part) < LEAST_TOKENS or (tokens is not None and read >= tokens):
                break
            found.append((document, part, ids[start + 1 : start + length + 1]))
            read += len(part)
    if not found:
        raise InputError(
            f"there is nothing to measure in {counted(given, 'document')}: none has {LEAST_TOKENS} tokens; give more text"
        )
    documents = len({document for document, _, _ in found})
    units, unit_of = _units([document for document, _, _ in found], documents)
    notes = []
    if longest < length:
        notes.append(f"no document is as long as the window of {length} tokens; the longest has {longest}")
    if short:
        notes.append(f"{short} of {given} documents have fewer than {LEAST_TOKENS} tokens and were left out")
    if documents + short < given:
        notes.append(f"{documents} of {given} documents were read, {read:,} tokens")
    windows = [Window(ids, targets, unit) for (_, ids, targets), unit in zip(found, unit_of, strict=True)]
    windows.sort(key=lambda w: -len(w.ids))
    return Text(tuple(windows), units, documents, length, read, tuple(notes), bos)


def _ids(text: Any, encode: Callable[[str], Sequence[int]] | None, document: int) -> list[int]:
    if isinstance(text, str):
        if encode is None:
            raise InputError("text needs a tokenizer, and the model has none beside it; give tokenizer=, or token ids")
        return [int(i) for i in encode(text)]
    ids = text.tolist() if isinstance(text, Tensor) else text
    if not isinstance(ids, Sequence):
        raise InputError(f"document {document} must be a string or a list of token ids, got {type(text).__name__}")
    wrong = next((i for i in ids if isinstance(i, bool) or not isinstance(i, int) or i < 0), None)
    if wrong is not None:
        raise InputError(f"document {document}: a token id is a whole number from 0, got {wrong!r:.40}")
    return list(ids)


def _units(documents: list[int], count: int) -> tuple[Units, list[int]]:
    """The units of the intervals, and that of every window."""
    if count >= LEAST_DOCUMENTS:
        order = {document: i for i, document in enumerate(dict.fromkeys(documents))}
        of, name = [order[document] for document in documents], "documents"
    else:
        count, of, name = len(documents), list(range(len(documents))), "windows"
    if count <= MOST_UNITS:
        return Units(count, name), of
    return Units(MOST_UNITS, f"groups of {name}"), [i * MOST_UNITS // count for i in of]


def _batch(windows: Sequence[Window], padding_id: int) -> Batch:
    length = max(len(window.ids) for window in windows)
    ids = torch.full((len(windows), length), padding_id)
    targets, mask = torch.full_like(ids, NOT_SCORED), torch.zeros_like(ids)
    for row, window in enumerate(windows):
        ids[row, : len(window.ids)] = torch.tensor(window.ids)
        targets[row, : len(window.targets)] = torch.tensor(window.targets)
        mask[row, : len(window.ids)] = 1
    units = torch.tensor([window.unit for window in windows])
    return Batch(ids, None if bool(mask.all()) else mask, targets, units)
