"""Prune: heads of any supported decoder, or of an encoder of ours, taken away for good, with what that did to its predictions on text."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thalweg.capture.saving import save_folder
from thalweg.capture.weights import check_finite
from thalweg.config import to_plain
from thalweg.errors import InputError, UnknownNameError
from thalweg.models.hf_base import ThalwegPreTrainedModel
from thalweg.models.transformer import Transformer
from thalweg.records import jsonl
from thalweg.surgery import text as texts
from thalweg.surgery.conversion import DTYPES, shell
from thalweg.surgery.heads import prune_heads
from thalweg.surgery.proof import examples, gap, line_of, logits_of
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
    scores: of every head of the source. parameters, loss [in ``unit``; None where an encoder has nothing to answer], before and after; kl: mean
    over tokens (of a classification: sequences) of KL(before || after); difference: largest of a logit; all on ``tokens`` tokens of ``text``,
    which follow those that the scores are from.
    """

    source: str
    family: str
    heads: dict[str, list[int]]
    by: str | None
    scores: tuple[HeadScore, ...]
    parameters_before: int
    parameters_after: int
    loss_before: float | None
    loss_after: float | None
    kl: float
    difference: float
    tokens: int
    text: str
    text_sha256: str
    cut_by: str
    dtype: str
    thalweg: str = ""
    unit: str = texts.UNITS["next_token"]
    notes: tuple[str, ...] = ()
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
            line_of(self.loss_before, self.loss_after, self.unit, self.kl),
            f"largest difference of a logit {self.difference:.2e}, in {self.dtype} on {self.tokens} tokens of {self.text}",
            *(f"note: {note}" for note in self.notes),
        ]


class Pruned(NamedTuple):
    """A smaller model of ours, and what pruning did."""

    model: ThalwegPreTrainedModel
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
    tokens: Tensor | texts.Sample | None = None,
    length: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Pruned:
    """A model of ours without some heads of ``model``, which is not changed.

    model: what :func:`thalweg.surgery.convert` takes; one of ours keeps its connection, others become additive ones of ours. heads: layer ->
    query heads that go; or by and count: the ``count`` heads of the lowest score (:func:`thalweg.surgery.head_scores`). dtype, tokenizer,
    text, tokens, length: as in ``convert``, and score ``loss`` of an encoder needs what it
    shall answer; the first half of the rows serves the scores, where there are some, and the rest the comparison.
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
    check_finite(source.model, source.name)
    theirs, ours = (as_additive if source.ours is None else as_ours)(source, kind)
    rows = ROWS if by is None else 2 * ROWS
    judged = texts.chosen(ours.config, source.tokenizer, text=text, tokens=tokens, length=length, rows=rows)
    scores: list[HeadScore] = []
    if by is not None and count is not None:
        half = len(judged.ids) // 2
        if not half:
            raise InputError("scores and comparison need rows of their own: give at least 2 rows of tokens")
        seen, judged = judged.rows(slice(half)), judged.rows(slice(half, None))
        scores = head_scores(ours, seen.ids, by, mask=seen.mask, labels=seen.labels, progress=progress)
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
        judged.tokens,
        judged.text,
        judged.sha256,
        judged.cut_by,
        dtype,
        version(),
        texts.UNITS[texts.objective_of(ours.config)],
        judged.notes,
    )
    return Pruned(shell(source, smaller), record)


def effect(
    before: nn.Module, after: Transformer, sample: texts.Sample, dtype: torch.dtype
) -> tuple[float | None, float | None, float, float]:
    """Loss before and after, mean KL, largest difference of a logit, over the rows; both models in ``dtype``."""
    sums, largest, causal = torch.zeros(3, dtype=torch.float64), [], after.config.causal
    with running(dtype, before, after):
        for row, more, answers in examples(sample, causal, next(after.parameters()).device):
            one, two = logits_of(before, row, **more), logits_of(after, row, **more)
            kl, *losses = scores_of(one, two, answers)
            sums += torch.stack([*losses, kl]).cpu()
            largest.append(gap(one, two))
    loss_before, loss_after, kl = (sums / len(sample.ids)).tolist()
    known = causal or sample.labels is not None
    return loss_before if known else None, loss_after if known else None, kl, worst(largest)


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
