"""The tokens on which two models are compared: from a text, cut by the model's own tokenizer, or the texts of a classification."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Int
from torch import Tensor

from thalweg.config import checked_path
from thalweg.data import Task
from thalweg.data.synthetic import PAD, SyntheticTask
from thalweg.data.tasks.austen import HELD_OUT, novels
from thalweg.data.tasks.text_file import decode, read_bytes
from thalweg.data.text.tokenizer import token_ids
from thalweg.errors import InputError
from thalweg.evaluation.masked import drawing, masked_rows
from thalweg.evaluation.subjects import around, special
from thalweg.models.config import DecoderConfig
from thalweg.models.encoder_config import EncoderConfig
from thalweg.models.look import IGNORED

ROWS = 2  # sequences compared
NO_LOSS = {
    "masked": "no tokenizer with a mask token is there, so nothing was hidden and there is no loss",
    "classification": "the text has no classes, so there is no loss; data of a classification has",
}
LONGEST = 256  # tokens of one of them, where the model takes as many
BEYOND = 16  # more tokens than a window holds, so that what it leaves out is compared
WIDEST = 1024  # a wider window is not gone beyond unless somebody asks: the rows would take minutes


@dataclass(frozen=True)
class Sample:
    """Token ids [rows length], the name of the text, its SHA-256 (of a task: its fingerprint), and by what it was cut into tokens.

    mask: [rows length], nonzero where a token is real (None: everywhere). labels: what an encoder shall answer, [rows] classes or
    [rows length] the hidden tokens, -100 elsewhere; None where nobody knows, which has no loss then; of a decoder the tokens that are scored,
    -100 elsewhere (None: all). notes: what a reader should know.
    """

    ids: Int[Tensor, "rows length"]
    text: str
    sha256: str
    cut_by: str
    mask: Int[Tensor, "rows length"] | None = None
    labels: Tensor | None = None
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """How many real ones there are."""
        return self.ids.numel() if self.mask is None else int(self.mask.sum())

    def rows(self, which: slice) -> Self:
        """Some of the rows."""
        parts = {name: getattr(self, name) for name in ("ids", "mask", "labels")}
        return replace(self, **{name: None if part is None else part[which] for name, part in parts.items()})


UNITS = {"next_token": "nats/token", "masked": "nats/masked token", "classification": "nats/sequence"}


def objective_of(config: DecoderConfig) -> str:
    """What a model of this configuration learns: the next token, masked tokens or a classification."""
    return config.objective if isinstance(config, EncoderConfig) else "next_token"


def chosen(
    config: DecoderConfig,
    tokenizer: Any,
    *,
    text: str | Path | None,
    tokens: "Tensor | Sample | None",
    length: int | None,
    window: int = 0,
    rows: int,
) -> Sample:
    """What models of ``config`` are compared on: ``tokens``, or rows of a text. Raises: InputError."""
    if tokens is None:
        what = objective_of(config)
        return sample(
            tokenizer,
            config.vocab_size,
            config.max_length,
            text=text,
            length=length,
            window=window,
            rows=rows,
            what=what,
        )
    if text is not None or length is not None:
        raise InputError("tokens are the whole sample: leave text and length out")
    return tokens if isinstance(tokens, Sample) else given(tokens, config.vocab_size, config.max_length)


def labelled(config: DecoderConfig, task: Task, *, length: int | None = None, rows: int) -> Sample:
    """The first ``length`` tokens of up to ``rows`` validation texts of a classification, spread over the split, with their classes.

    length: None for 256, or what the model takes. Raises: InputError where the model classifies something else, or not at all.
    """
    if task.objective != "classification":
        raise InputError(f"{task.name} has no classes; give data of a classification, as sentiment, or a text as text")
    if not isinstance(config, EncoderConfig) or not config.classifies:
        raise InputError(f"{task.name} is for models that classify, and this one does not; leave the data out")
    if (task.classes, task.vocab_size) != (config.classes, config.vocab_size):
        raise InputError(
            f"{task.name} has {task.classes} classes and {task.vocab_size} tokens, the model {config.classes} and {config.vocab_size}; "
            "give the data that it was trained on, with its tokenizer"
        )
    length = min(LONGEST, config.max_length) if length is None else length
    if not 4 <= length <= config.max_length:
        raise InputError(f"rows must have 4 to {config.max_length} tokens (the most this model takes), got {length}")
    batch = task.eval_batches("valid", length, rows, 1)[0]
    longest = int(batch["attention_mask"].sum(1).max())
    ids, mask = batch["input_ids"][:, :longest], batch["attention_mask"][:, :longest]
    return Sample(
        ids, f"{task.name} (validation)", task.fingerprint, type(task.tokenizer).__name__, mask, batch["labels"]
    )


def recalled(task: SyntheticTask, *, rows: int) -> Sample:
    """Up to ``rows`` validation sequences of a synthetic task, whole, the answers alone scored."""
    batch = task.eval_batches("valid", task.natural_length("valid"), rows, 1)[0]
    ids, name = batch["input_ids"], f"{task.name} (validation)"
    real, notes = (ids != PAD).long(), ("the loss is that of the answers",)
    return Sample(
        ids, name, task.fingerprint, "the task", None if real.all() else real, labels=batch["labels"], notes=notes
    )


def sample(
    tokenizer: Any,
    vocab_size: int,
    max_length: int,
    *,
    text: str | Path | None = None,
    length: int | None = None,
    window: int = 0,
    rows: int = ROWS,
    what: str = "next_token",
) -> Sample:
    """The first tokens of ``text`` (a file; None: the novel held out of the shipped corpus) in ``rows`` rows of ``length``.

    length: tokens of a row (None: 256, or 16 more than the widest ``window`` holds, up to 1040, or what the model takes). Without a
    tokenizer the bytes of the text, modulo the vocabulary, stand for tokens: any ids prove that two models are the same function, but no
    loss on them says anything. what: the model learned; an encoder's rows have the special tokens that its tokenizer puts around a text, and
    of ``masked`` ones 15 % of each row is hidden, drawn once and for all.
    Raises: InputError for a text that cannot be read or is too short, or a length that the model does not take.
    """
    if length is None:
        length = min(max(LONGEST, window + BEYOND if window <= WIDEST else 0), max_length)
    if not 4 <= length <= max_length:
        raise InputError(f"rows must have 4 to {max_length} tokens (the most this model takes), got {length}")
    name, content = (f"{HELD_OUT} (shipped)", novels()[HELD_OUT]) if text is None else (Path(text).name, read(text))
    before, after = ([], []) if tokenizer is None or what == "next_token" else around(tokenizer)
    room = length - len(before) - len(after)
    if room < 1:
        raise InputError(f"rows of {length} tokens have no room beside the special tokens; give a larger length")
    if tokenizer is None:
        cut_by = "bytes modulo the vocabulary; no tokenizer was given"
        ids = [byte % vocab_size for byte in content.encode()[: rows * room]]
    else:
        cut_by = type(tokenizer).__name__
        ids = encode(tokenizer, content, rows * room)[: rows * room]
    if len(ids) < rows * room:
        raise InputError(f"{name} has {len(ids)} tokens, {rows * room} are compared; give more text or fewer tokens")
    found, labels, notes = torch.tensor(ids).view(rows, room), None, ()
    if what == "masked" and special(tokenizer, "mask") is not None:
        hidden = list(masked_rows(ids, tokenizer, length, drawing()))
        found, labels = torch.tensor([row.inputs for row in hidden]), torch.full((rows, length), IGNORED)
        for row, at in zip(labels, hidden, strict=True):
            row[at.places] = torch.tensor(at.targets)
    else:
        ends = [torch.tensor(part, dtype=torch.long).expand(rows, -1) for part in (before, after)]
        found = torch.cat([ends[0], found, ends[1]], 1)
        if what != "next_token":
            notes = (NO_LOSS[what],)
        elif tokenizer is None:
            notes = (
                "no tokenizer was there: bytes stood for tokens, which proves as much, but the loss on them says nothing",
            )
    if int(found.max()) >= vocab_size:
        raise InputError(
            f"the tokenizer gives id {int(found.max())}, the model has {vocab_size} tokens; give the tokenizer that it was trained with"
        )
    return Sample(found, name, hashlib.sha256(content.encode()).hexdigest(), cut_by, labels=labels, notes=notes)


def encode(tokenizer: Any, content: str, count: int) -> list[int]:
    """At least ``count`` ids from the beginning of a text, if it has so many; special tokens left out."""
    taken = 16 * count
    while True:
        piece = content[:taken]
        found = token_ids(tokenizer, piece)
        if len(found) >= count or taken >= len(content):
            return found
        taken *= 4


def read(path: str | Path) -> str:
    """A text file (``.gz`` and ``.xz`` are unpacked). Raises: InputError."""
    path = checked_path(path, expand=True)
    return decode(read_bytes(path), path)


def given(tokens: Tensor, vocab_size: int, max_length: int) -> Sample:
    """Tokens that somebody else has cut. Raises: InputError for what the model cannot read."""
    from thalweg.models.look import check_ids

    check_ids(tokens, vocab_size)
    if tokens.shape[1] < 4 or tokens.shape[1] > max_length:
        raise InputError(f"tokens must be [rows, 4 to {max_length}], got {list(tokens.shape)}")
    digest = hashlib.sha256(tokens.cpu().long().numpy().tobytes()).hexdigest()
    return Sample(tokens.cpu().long(), "tokens given by the caller", digest, "the caller")
