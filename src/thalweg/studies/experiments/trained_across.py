"""What training with an edit of updates changes beside the loss: use without the edit, geometry, later edits, compression."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from thalweg.errors import InputError
from thalweg.records import Measurements
from thalweg.studies.experiments.base import DivergedError, Progress, check_train, nothing, register
from thalweg.studies.experiments.subjects import (
    OWN,
    Subject,
    SubjectOptions,
    neighbouring_texts,
    note_learning,
    subject_of,
)

ARMS = ("base", "across")
SWITCHED = {"base": "base_with", "across": "across_without"}  # the same weights with the other's edit
COMPRESSIONS: dict[str, dict[str, Any]] = {
    "rtn_4": {"method": "round_to_nearest", "bits": 4, "group": "row"},
    "rtn_3": {"method": "round_to_nearest", "bits": 3, "group": "row"},
    "magnitude_50": {"method": "magnitude", "sparsity": 0.5, "within": "row"},
}
EDITS: dict[str, dict[str, Any]] = {
    "attention_parallel": {"site": "attention", "parallel": 0.0},
    "attention_perpendicular": {"site": "attention", "perpendicular": 0.5},
    "mlp_parallel": {"site": "mlp", "parallel": 0.0},
    "mlp_perpendicular": {"site": "mlp", "perpendicular": 0.5},
}
GEOMETRY = {  # column -> measure, over which sites it is taken
    "across.effective_rank": ("pooled_effective_rank.centred", "last"),
    "across.attention_fraction": ("parallel_fraction.raw", "attention"),
    "across.mlp_fraction": ("parallel_fraction.raw", "feed_forward"),
    "across.first_token_share": ("first_token.share", "last"),
}


def _paired(names: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{arm}.{name}" for name in names for arm in ARMS)


COLUMNS = {
    "across.loss": (*ARMS, *SWITCHED.values()),
    **dict.fromkeys(GEOMETRY, ARMS),
    "across.edited": _paired(EDITS),
    "across.compressed": _paired(COMPRESSIONS),
}


@dataclass(frozen=True)
class TrainedAcrossOptions:
    """train: fields of the training of both arms. attention_edit, mlp_edit: of the second arm (one of them may be empty).
    tokens: read for the geometry, in windows of ``length``."""

    train: dict[str, Any] = field(default_factory=dict)
    attention_edit: str = "value:full:0"
    mlp_edit: str = ""
    tokens: int = 4096
    length: int = 128

    @property
    def edits(self) -> dict[str, str]:
        """Those that are not empty. Raises: InputError where both are."""
        found = {name: getattr(self, name) for name in ("attention_edit", "mlp_edit") if getattr(self, name)}
        if not found:
            raise InputError(
                "trained_across needs attention_edit or mlp_edit, got neither; name one, such as value:full:0"
            )
        return found


@register(
    "trained_across",
    options=TrainedAcrossOptions,
    columns=COLUMNS,
    summary="training with an edit of updates: used without it and the reverse, geometry, and what later edits and compressions cost",
    source="own question; training across the stream: arXiv 2609.15975 (He, Zhang, Yan) and XSA (Zhai 2026, arXiv 2603.09078)",
)
def trained_across(options: TrainedAcrossOptions, seed: int, progress: Progress) -> Measurements:
    """Two decoders of one seed and order of data, without and with the edit, on held-out text that is the same for both.

    across.loss [nats/token]: ``base_with`` is the plain model used with the edit, ``across_without`` the other one used without. Geometry of
    both as they were trained: effective rank (pooled, centred) and share of the first token of the last state, and mean |cos| of what
    attention and the feed-forward sublayers return with the stream. across.edited and across.compressed [nats/token]: change of the loss by
    an edit or a compression of the model as it was trained (for its own edit that means on top of it).

    With more than about 1,300 tokens, seeds that are three apart read some of the same documents. An arm whose training diverged leaves NaN.
    """
    rows, edits = Measurements(), options.edits
    check_train("trained_across", options.train, ("seed", *edits), "the seeds and the options of the experiment say")
    # As its records were made, and its plan locked: with more than seven, seeds three apart share some.
    texts = neighbouring_texts(seed, options.tokens)
    for arm in ARMS:
        train = {**options.train, **(edits if arm == "across" else {})}
        own = (arm, SWITCHED[arm], *(a for a in (*_paired(EDITS), *_paired(COMPRESSIONS)) if a.startswith(f"{arm}.")))
        try:
            subject = subject_of(SubjectOptions(OWN, train), seed)
        except DivergedError:
            progress(f"{arm}: its training diverged")
            nothing(rows, {column: [a for a in arms if a in own] for column, arms in COLUMNS.items()})
            continue
        note_learning(rows, subject, own)
        before = _loss(subject, subject.model, texts, options)
        rows.add("across.loss", before, arm=arm, unit="nats/token")
        other = subject.model.with_edits(**(edits if arm == "base" else dict.fromkeys(edits)))  # type: ignore[operator]
        rows.add("across.loss", _loss(subject, other, texts, options), arm=SWITCHED[arm], unit="nats/token")
        _geometry(subject, texts, options, arm, rows)
        for table, measure in ((EDITS, "across.edited"), (COMPRESSIONS, "across.compressed")):
            for name, model, around in _changed(subject.model, table):
                with around:
                    cost = _loss(subject, model, texts, options) - before
                rows.add(measure, cost, arm=f"{arm}.{name}", unit="nats/token", null=0.0, null_kind="unchanged")
        progress(f"{arm}: loss {before:.3f}")
    return rows


def _loss(subject: Subject, model: nn.Module, texts: list[str], options: TrainedAcrossOptions) -> float:
    from thalweg.evaluation.perplexity import perplexity

    return perplexity(model, subject.tokenizer, texts, window=options.length, batch_size=8, bos=False).loss


def _geometry(subject: Subject, texts: list[str], options: TrainedAcrossOptions, arm: str, rows: Measurements) -> None:
    from thalweg.capture.measure import measure

    found = measure(
        subject.model, texts, tokenizer=subject.tokenizer, length=options.length, tokens=options.tokens, batch_size=8
    )
    for column, (name, where) in GEOMETRY.items():
        every = [row for row in found.where(measure=name) if where == "last" or where in (row.branch or row.site)]
        if not every:
            raise InputError(
                f"{name} was not measured at {where} of this model; leave geometry to a plan whose models have it"
            )
        chosen = every[-1:] if where == "last" else every
        nulls = [row.null for row in chosen if row.null is not None]
        null: dict[str, Any] = (
            {"null": sum(nulls) / len(nulls), "null_kind": chosen[-1].null_kind} if len(nulls) == len(chosen) else {}
        )
        rows.add(
            column,
            sum(row.value for row in chosen) / len(chosen),
            arm=arm,
            n=chosen[-1].n,
            unit=chosen[-1].unit,
            **null,
        )


def _changed(
    model: nn.Module, table: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, nn.Module, AbstractContextManager[Any]]]:
    """Each edit or compression by its name: the model, and what is entered around its passes."""
    from thalweg.compression.compressing import compress
    from thalweg.editing import edit

    for name, values in table.items():
        if "site" in values:
            yield name, model, edit(model, **values)
            continue
        made = dict(values)
        yield name, compress(copy.deepcopy(model), made.pop("method"), **made).model, nullcontext()
