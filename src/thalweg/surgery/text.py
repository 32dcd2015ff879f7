"""The tokens on which two models are compared: from a text, cut by the model's own tokenizer."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from thalweg.config import checked_path
from thalweg.data.tasks.austen import HELD_OUT, novels
from thalweg.data.text.tokenizer import token_ids
from thalweg.errors import InputError

ROWS = 2  # sequences compared
LONGEST = 256  # tokens of one of them, where the model takes as many
BEYOND = 16  # more tokens than a window holds, so that what it leaves out is compared
WIDEST = 1024  # a wider window is not gone beyond unless somebody asks: the rows would take minutes


@dataclass(frozen=True)
class Sample:
    """Token ids [rows length], the name of the text, its SHA-256, and by what it was cut into tokens."""

    ids: Int[Tensor, "rows length"]
    text: str
    sha256: str
    cut_by: str


def sample(
    tokenizer: Any,
    vocab_size: int,
    max_length: int,
    *,
    text: str | Path | None = None,
    length: int | None = None,
    window: int = 0,
    rows: int = ROWS,
) -> Sample:
    """The first tokens of ``text`` (a file; None: the novel held out of the shipped corpus) in ``rows`` rows of ``length``.

    length: tokens of a row (None: 256, or 16 more than the widest ``window`` holds, up to 1040, or what the model takes). Without a
    tokenizer the bytes of the text, modulo the vocabulary, stand for tokens: any ids prove that two models are the same function, but no
    loss on them says anything.
    Raises: InputError for a text that cannot be read or is too short, or a length that the model does not take.
    """
    if length is None:
        length = min(max(LONGEST, window + BEYOND if window <= WIDEST else 0), max_length)
    if not 4 <= length <= max_length:
        raise InputError(f"rows must have 4 to {max_length} tokens (the most this model takes), got {length}")
    name, content = (f"{HELD_OUT} (shipped)", novels()[HELD_OUT]) if text is None else (Path(text).name, read(text))
    if tokenizer is None:
        cut_by = "bytes modulo the vocabulary; no tokenizer was given"
        ids = [byte % vocab_size for byte in content.encode()[: rows * length]]
    else:
        cut_by = type(tokenizer).__name__
        ids = encode(tokenizer, content, rows * length)
    if len(ids) < rows * length:
        raise InputError(f"{name} has {len(ids)} tokens, {rows * length} are compared; give more text or fewer tokens")
    if max(ids) >= vocab_size:
        raise InputError(
            f"the tokenizer gives id {max(ids)}, the model has {vocab_size} tokens; give the tokenizer that it was trained with"
        )
    found = torch.tensor(ids[: rows * length]).view(rows, length)
    return Sample(found, name, hashlib.sha256(content.encode()).hexdigest(), cut_by)


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
    """A text file. Raises: InputError."""
    path = checked_path(path, expand=True)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"no such file: {path}; give the path of a text") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None


def given(tokens: Tensor, vocab_size: int, max_length: int) -> Sample:
    """Tokens that somebody else has cut. Raises: InputError for what the model cannot read."""
    from thalweg.models.look import check_ids

    check_ids(tokens, vocab_size)
    if tokens.shape[1] < 4 or tokens.shape[1] > max_length:
        raise InputError(f"tokens must be [rows, 4 to {max_length}], got {list(tokens.shape)}")
    digest = hashlib.sha256(tokens.cpu().long().numpy().tobytes()).hexdigest()
    return Sample(tokens.cpu().long(), "tokens given by the caller", digest, "the caller")
