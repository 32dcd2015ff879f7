"""Prune: heads of any supported decoder taken away for good, with what that did to its predictions on text."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thalweg.capture.saving import save_folder
from thalweg.config import to_plain
from thalweg.errors import InputError, UnknownNameError
from thalweg.models import ThalwegForCausalLM
from thalweg.records import jsonl
from thalweg.surgery import text as texts
from thalweg.surgery.conversion import DTYPES, shell
from thalweg.surgery.heads import prune_heads
from thalweg.surgery.proof import gap, logits_of
from thalweg.surgery.proof import largest as worst
from thalweg.surgery.proof import scores as scores_of
from thalweg.surgery.scoring import HeadScore, head_scores, lowest
from thalweg.surgery.source import Source, as_additive, as_ours, open_source
from thalweg.surgery.wide import running

RECORD = "pruning.json"
ROWS = 8  # sequences that heads are scored and compared on


@dataclass(frozen=True)
class PruneRecord:
    """What pruning did. heads: layer -> the query heads of the source that are gone. by: the score that chose them, None where a person did;
    scores: of every head of the source. parameters, loss [nats per token], before and after; kl: mean over tokens of KL(before || after);
    difference: largest of a logit; all on ``tokens`` tokens of ``text``, which follow those that the scores are from.
    """

    source: str
    family: str
    heads: dict[str, list[int]]
    by: str | None
    scores: tuple[HeadScore, ...]
    parameters_before: int
    parameters_after: int
    loss_before: float
    loss_after: float
    kl: float
    difference: float
    tokens: int
    text: str
    text_sha256: str
    cut_by: str
    dtype: str
    thalweg: str = ""
    schema: int = 1

    def plain(self) -> dict[str, Any]:
        """As it stands in ``pruning.json``."""
        return to_plain(self)

    def lines(self) -> list[str]:
        """For people."""
        count = sum(len(heads) for heads in self.heads.values())
        gone = ", ".join(f"layer {layer}: {', '.join(map(str, heads))}" for layer, heads in self.heads.items())
        chosen = "" if self.by is None else f", the lowest by {self.by}"
        share = (self.parameters_after - self.parameters_before) / self.parameters_before
        return [
            f"{count} heads gone{chosen} ({gone})",
            f"parameters {self.parameters_before:,} -> {self.parameters_after:,} ({share:+.2%})",
            f"loss {self.loss_before:.6f} -> {self.loss_after:.6f} nats per token, KL {self.kl:.2e}",
            f"largest difference of a logit {self.difference:.2e}, in {self.dtype} on {self.tokens} tokens of {self.text}",
        ]


class Pruned(NamedTuple):
    """A smaller model of ours, and what pruning did."""

    model: ThalwegForCausalLM
    record: PruneRecord


def prune(
    model: Any,
    heads: Mapping[int, Iterable[int]] | None = None,
    *,
    by: str | None = None,
    count: int | None = None,
    dtype: str = "float32",
    tokenizer: Any = None,
    text: str | Path | None = None,
    tokens: Tensor | None = None,
    length: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Pruned:
    """A model of ours without some heads of ``model``, which is not changed.

    model: what :func:`thalweg.surgery.convert` takes; one of ours keeps its connection, others become additive ones of ours. heads: layer ->
    query heads that go; or by and count: the ``count`` heads of the lowest score (:func:`thalweg.surgery.head_scores`). dtype, tokenizer,
    text, tokens, length: as in ``convert``; the first half of the rows serves the scores, where there are some, and the rest the comparison.
    Raises: InputError, UnknownNameError for heads that cannot go; CheckpointError, OfflineError for a model that cannot be loaded.
    """
    if dtype not in DTYPES:
        raise UnknownNameError("value for dtype:", dtype, DTYPES)
    if heads is not None and by is not None:
        raise InputError("heads names the heads and by chooses them; give one of them")
    if (heads is None and by is None) or (by is None) != (count is None):
        raise InputError("say which heads go: heads by layer, or a score (by) and how many (count)")
    kind = DTYPES[dtype]
    source = model if isinstance(model, Source) else open_source(model, tokenizer=tokenizer, dtype=kind)
    theirs, ours = (as_additive if source.ours is None else as_ours)(source, kind)
    vocab, longest = ours.config.vocab_size, ours.config.max_length
    if tokens is not None and (text is not None or length is not None):
        raise InputError("tokens are the whole sample: leave text and length out")
    sample = (
        texts.given(tokens, vocab, longest)
        if tokens is not None
        else texts.sample(
            source.tokenizer, vocab, longest, text=text, length=length, rows=ROWS if by is None else 2 * ROWS
        )
    )
    scores: list[HeadScore] = []
    judged = sample.ids
    if by is not None and count is not None:
        half = len(judged) // 2
        if not half:
            raise InputError("scores and comparison need rows of their own: give at least 2 rows of tokens")
        scores, judged = head_scores(ours, judged[:half], by, progress=progress), judged[half:]
        heads = lowest(scores, count)
    gone = {int(layer): sorted(set(numbers)) for layer, numbers in sorted((heads or {}).items())}
    smaller = prune_heads(ours, gone).model
    found = effect(theirs, smaller, judged, kind)
    record = PruneRecord(
        source.name,
        source.family,
        {str(layer): numbers for layer, numbers in gone.items()},
        by,
        tuple(scores),
        numbers_of(ours),
        numbers_of(smaller),
        *found,
        judged.numel(),
        sample.text,
        sample.sha256,
        sample.cut_by,
        dtype,
        version(),
    )
    return Pruned(shell(source, smaller), record)


def effect(before: nn.Module, after: nn.Module, ids: Tensor, dtype: torch.dtype) -> tuple[float, float, float, float]:
    """Loss before and after, mean KL, largest difference of a logit, over the rows; both models in ``dtype``."""
    sums, largest = torch.zeros(3, dtype=torch.float64), []
    with running(before, dtype), running(after, dtype):
        for row in ids.to(next(after.parameters()).device):
            one, two = logits_of(before, row[None])[0], logits_of(after, row[None])[0]
            kl, *losses = scores_of(one, two, row)
            sums += torch.stack([*losses, kl]).cpu()
            largest.append(gap(one[None], two[None]))
    loss_before, loss_after, kl = (sums / len(ids)).tolist()
    return loss_before, loss_after, kl, worst(largest)


def save_pruned(pruned: Pruned, folder: str | Path, *, tokenizer: Any = None) -> Path:
    """Write config.json, the weights, ``pruning.json`` and the tokenizer into the new ``folder``: all of it or nothing. Raises: InputError."""
    text = jsonl.encode(pruned.record.plain(), indent=2) + "\n"
    return save_folder(pruned.model, folder, tokenizer=tokenizer, files={RECORD: text})


def numbers_of(model: nn.Module) -> int:
    """How many parameters a model has, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def version() -> str:
    from thalweg._version import __version__

    return __version__
