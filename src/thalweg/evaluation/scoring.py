"""Log likelihoods of tokens: the one place where an evaluated model is called on text."""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from thalweg.capture.evaluating import evaluating
from thalweg.errors import InputError
from thalweg.evaluation.windows import Window
from thalweg.ops.precision import wide

ROWS = 256  # places whose logits are widened at once
PADDING = ("right", "left")
T = TypeVar("T")


class Scored(NamedTuple):
    """log_likelihood: natural, summed over the targets; greedy: whether each target is the likeliest token."""

    log_likelihood: float
    greedy: bool


def score(
    model: nn.Module, windows: Iterable[Window], *, batch_size: int = 1, padding: str = "right"
) -> Iterator[Scored]:
    """The log likelihood of every window's targets, in order, as batches are done.

    Log probabilities are taken in float32 (float64 for a float64 model) and added up in float64. Where windows of a batch differ in length
    they are padded on the ``padding`` side and masked. Raises: InputError.
    """
    check_batch(batch_size, padding)
    with evaluating(model):
        for batch in batches(windows, batch_size):
            yield from _score(model, batch, padding)


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """``items`` in lists of ``size``; the last one may be shorter."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def check_batch(batch_size: int, padding: str = "right") -> None:
    """Raises: InputError."""
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    if padding not in PADDING:
        raise InputError(f"padding must be {' or '.join(PADDING)}, got {padding!r}")


def _score(model: nn.Module, batch: Sequence[Window], padding: str) -> Iterator[Scored]:
    ids, mask = padded([window.inputs for window in batch], padding, device_of(model))
    most = max(len(window.targets) for window in batch)
    at_end = mask is None or padding == "left"  # every row's targets end with the row
    logits = logits_of(model, ids, mask, keep=most if at_end else 0)
    for row, window in zip(logits, batch, strict=True):
        end = len(row) if at_end else len(window.inputs)
        yield likelihood(row[end - len(window.targets) : end], torch.tensor(window.targets, device=row.device))


def likelihood(logits: Tensor, targets: Tensor) -> Scored:
    """Logits [t v] and targets [t] -> their summed log probability."""
    found, greedy = by_token(logits, targets)
    return Scored(found.sum().item(), bool(greedy.all()))


def by_token(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [t v] and targets [t] -> the log probability of each [t] in float64, and whether it is the likeliest [t].

    The vocabulary is normalised a block of places at a time.
    """
    found, greedy = [], []
    for part, wanted in zip(logits.split(ROWS), targets.split(ROWS), strict=True):
        part = wide(part)
        found.append((part.gather(-1, wanted[:, None])[:, 0] - part.logsumexp(-1)).double())
        greedy.append(part.argmax(-1) == wanted)
    return torch.cat(found), torch.cat(greedy)


def padded(rows: Sequence[Sequence[int]], side: str, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Rows of ids as [b t] and the mask of real tokens; None where all rows are of one length. Token 0 fills the gaps."""
    length = max(map(len, rows))
    if all(len(row) == length for row in rows):
        return torch.tensor([list(row) for row in rows], device=device), None
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(length - len(row), length)
        ids[i, place], mask[i, place] = torch.tensor(list(row)), 1
    return ids.to(device), mask.to(device)


def rows_of(rows: Sequence[Sequence[int]], side: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """:func:`padded` with the mask always written out: a model may guess one from the padding token where there is none."""
    ids, mask = padded(rows, side, device)
    return ids, torch.ones_like(ids) if mask is None else mask


def logits_of(model: nn.Module, ids: Tensor, mask: Tensor | None = None, *, keep: int = 0) -> Tensor:
    """Logits [b t v], of the last ``keep`` places where that is not 0. No cache is made.

    Positions count real tokens, so that left padding moves nobody. Raises: InputError for a model that gives no logits over a vocabulary.
    """
    known = inspect.signature(model.forward).parameters
    takes = known.keys() | ({"use_cache"} if any(p.kind is p.VAR_KEYWORD for p in known.values()) else set())
    call: dict[str, Any] = {"input_ids": ids}
    if mask is not None:
        call["attention_mask"] = mask
        if "position_ids" in takes and not bool(mask[:, 0].all()):
            call["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    if "use_cache" in takes:
        call["use_cache"] = False
    if keep and "logits_to_keep" in takes:
        call["logits_to_keep"] = keep
    out = getattr(model(**call), "logits", None)
    if not isinstance(out, Tensor) or out.ndim != 3 or out.shape[0] != len(ids):
        raise InputError(
            f"{type(model).__name__} gives no logits over a vocabulary; give a model with a language-modelling head"
        )
    return out[:, -keep:] if keep else out


def device_of(model: nn.Module) -> torch.device:
    """Where the ids must be."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))
