"""One compression of one subject: what it costs every document, and the error of every layer on other documents."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thalweg import compression
from thalweg.capture import locate
from thalweg.capture.evaluating import evaluating
from thalweg.compression import compressors
from thalweg.compression.comparing import Diagnosis, diagnose
from thalweg.compression.compressors.base import STORED
from thalweg.compression.error_statistics import LAYER, unit_sums
from thalweg.compression.logits import kl_of
from thalweg.compression.pairing import side_of
from thalweg.compression.record import CompressionRecord
from thalweg.errors import InputError, ProofError
from thalweg.evaluation.paired import DRIFT
from thalweg.evaluation.perplexity import prefix_of
from thalweg.evaluation.scoring import batches, by_token, device_of, logits_of, score
from thalweg.evaluation.subjects import check_causal, check_tokenizer
from thalweg.evaluation.windows import Window
from thalweg.ops.precision import wide
from thalweg.records.provenance import now
from thalweg.studies.compressed.observe import layerwise
from thalweg.studies.compressed.plan import BRANCHES, ERRORS, CompressionArm, CompressionPlan
from thalweg.studies.compressed.texts import Readings, readings
from thalweg.studies.edits.store import EditRow
from thalweg.studies.edits.subjects import OpenSubject

BATCH_TOKENS = 1024  # of a forward pass
MOST_KEPT = 2**30  # bytes of logits: 1 GiB
CACHE = "cache"  # the method whose options are those of compress_cache
COLUMNS = {"total": "total", "perpendicular": "across", "parallel": "along"}  # here -> what a comparison calls it


@dataclass
class Made:
    """A compressed copy, what is entered around its passes, and what is stored of it by layer."""

    model: nn.Module
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    layers: dict[str, list[float | None]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    record: CompressionRecord | None = None


@dataclass
class Bench:
    """A subject with the documents that every compression is judged on, and those that errors are read on."""

    subject: OpenSubject
    plan: CompressionPlan
    kl_documents: int
    texts: Readings
    windows: list[Window]
    errors: list[list[int]]
    calibration: list[list[int]]
    endings: list[list[Window]]
    depth: int
    dense: dict[int, Tensor] = field(default_factory=dict)  # by batch, logits of the subject that fit into MOST_KEPT

    @classmethod
    def of(cls, subject: OpenSubject, plan: CompressionPlan, scale: str) -> "Bench":
        """Cut the documents into tokens. Raises: InputError for a document that is too short, or a model of the wrong kind."""
        check_tokenizer(subject.tokenizer)
        check_causal(subject.model)
        prefix = prefix_of(subject.tokenizer, None)
        assert prefix is not None

        texts, chosen = readings(plan, scale), plan.at(scale)
        judged = subject.token_rows(texts.judged)
        begun = [[prefix, *ids[:-1]] for ids in subject.token_rows(texts.errors)]
        return cls(
            subject,
            plan,
            chosen.kl_documents,
            texts,
            [Window([prefix, *ids[:-1]], ids) for ids in judged],
            begun,
            [[prefix, *ids[:-1]] for ids in subject.token_rows(texts.calibration)],
            _endings(judged, prefix, chosen.choices),
            locate(subject.model).depth,
        )

    @property
    def tokens(self) -> list[list[int]]:
        """[documents][1] tokens behind each number."""
        return [[self.texts.judged.tokens] for _ in self.windows]

    def unedited(self) -> EditRow:
        """The subject itself."""
        start = time.monotonic()
        columns = {"nats": self._fidelity(Made(self.subject.model))["nats"], **self._cloze(Made(self.subject.model))}
        return EditRow("unedited", {}, "unedited", columns, seconds=time.monotonic() - start, ended=now())

    def edited(self, arm: CompressionArm, noop: CompressionArm, rows: Mapping[str, EditRow]) -> EditRow:
        """One compression. rows: of the record, where the arm that names protected layers is found.

        Raises: ProofError where a copy that nothing was done to has an error; what compressing raises.
        """
        start = time.monotonic()
        skip, chosen = self._protected(arm, rows)
        made = self._made(arm, skip)
        columns = {**self._fidelity(made), **self._cloze(made)}
        found = self._diagnosed(made, self.errors)
        columns |= _errors(found)
        if arm.noop:
            drift = self._checked(columns, rows["unedited"])
            role, seconds = "no-op", time.monotonic() - start
            return EditRow(arm.identity, arm.plain(), role, columns, {}, drift, seconds, now())
        layers = dict(made.layers)
        if self.kl_documents:
            read = self._diagnosed(made, self.errors[: self.kl_documents], layer_kl=True).layer_kl
            layers["kl"] = [read[layer] for layer in range(self.depth)]
        notes = (*made.notes, *chosen)
        return EditRow(
            arm.identity, arm.plain(), "edited", columns, layers, None, time.monotonic() - start, now(), notes
        )

    def _made(self, arm: CompressionArm, skip: list[int]) -> Made:
        """A compressed copy of the subject."""
        copy = deepcopy(self.subject.model)
        if arm.noop:
            return Made(copy)
        if arm.method == CACHE:
            return self._cached(arm, skip, copy)
        options = dict(arm.options)
        if arm.alone is not None:
            options["layers"] = [arm.alone]
        if skip:
            options["skip"] = skip
        needs = compressors.create(arm.method, **arm.options).needs_calibration
        found = compression.compress(copy, arm.method, calibration=self.calibration if needs else None, **options)
        record = found.record
        kept = record.kept_blocks
        errors: dict[str, list[float | None]] = {}
        if kept is None:
            by_layer = [[row for row in record.linears if row.layer == layer] for layer in range(self.depth)]
            errors["weights"] = [_mean([math.sqrt(row.relative_error) for row in rows]) for rows in by_layer]
            errors["bits"] = [_bits(rows) for rows in by_layer]
        else:
            errors["weights"] = [0.0 if layer in kept else 1.0 for layer in range(self.depth)]
            errors["bits"] = [float(STORED) if layer in kept else 0.0 for layer in range(self.depth)]
        return Made(found.model, nullcontext, errors, tuple(record.notes), record)

    def _cached(self, arm: CompressionArm, skip: list[int], copy: nn.Module) -> Made:
        layers = [k for k in range(self.depth) if k not in skip] if arm.alone is None else [arm.alone]
        options = {**arm.options, "layers": layers}
        weights: list[float | None] = [0.0] * self.depth  # no weight is touched
        return Made(copy, lambda: compression.compress_cache(copy, **options), {"weights": weights})

    def _fidelity(self, made: Made) -> dict[str, list[list[float]]]:
        """Negative log likelihood of every document, and the KL of its predictions from those of the subject, a token."""
        nats: list[list[float]] = []
        kl: list[list[float]] = []
        size, same = max(1, BATCH_TOKENS // self.texts.judged.tokens), made.model is self.subject.model
        with evaluating(self.subject.model), evaluating(made.model):
            for number, batch in enumerate(batches(self.windows, size)):
                ids = torch.tensor([w.inputs for w in batch], device=device_of(self.subject.model))
                with made.around():
                    after = logits_of(made.model, ids)
                before = after if same else self._dense(number, ids)
                for dense, logits, window in zip(before, after, batch, strict=True):
                    found, _ = by_token(logits, torch.tensor(window.targets, device=logits.device))
                    nats.append([-float(found.sum())])
                    kl.append([float(kl_of(wide(dense), wide(logits)).mean())])
        return {"nats": nats, "kl": kl}

    def _dense(self, number: int, ids: Tensor) -> Tensor:
        """Logits of the subject on a batch, kept for the next compression while there is room."""
        found = self.dense.get(number)
        if found is None:
            found = logits_of(self.subject.model, ids)
            if sum(x.nbytes for x in self.dense.values()) + found.nbytes <= MOST_KEPT:
                self.dense[number] = found
        return found

    def _cloze(self, made: Made) -> dict[str, list[list[float]]]:
        """Whether the true ending of every document is the likeliest of its choices; nothing where there are none."""
        if not self.endings:
            return {}
        choices = len(self.endings[0])
        flat = [window for windows in self.endings for window in windows]
        size = max(1, BATCH_TOKENS // len(flat[0].inputs))
        with made.around():
            found = [scored.log_likelihood for scored in score(made.model, flat, batch_size=size)]
        table = np.array(found).reshape(-1, choices)
        right = [bool(row[0] > row[1:].max()) if np.isfinite(row).all() else False for row in table]
        return {"correct": [[float(value)] for value in right]}

    def _diagnosed(self, made: Made, texts: list[list[int]], layer_kl: bool = False) -> Diagnosis:
        side = side_of(made.model, "compressed")
        read = side.open()._replace(record=made.record)  # it says which blocks were kept, where some were not
        side = replace(side, open=lambda: read, around=made.around)
        return diagnose(
            self.subject.model,
            side,
            texts,
            mode="local",
            length=self.texts.errors.tokens,
            values=False,
            layer_kl=layer_kl,
            names=("dense", "compressed"),
        )

    def _protected(self, arm: CompressionArm, rows: Mapping[str, EditRow]) -> tuple[list[int], tuple[str, ...]]:
        """Layers that stay dense, and what the record says of them."""
        if arm.protect is None:
            return [], ()
        named = rows.get(self.plan.edits[arm.protect.of].identity)
        if named is None:
            raise InputError(f"{arm.name} protects layers that {arm.protect.of} names, which has no record yet")
        values = chosen_by(arm, named, self.depth)
        worst = sorted(range(self.depth), key=lambda layer: (-values[layer], layer))[: arm.protect.count]
        return sorted(worst), (f"left dense: layers {', '.join(map(str, sorted(worst)))}",)

    def _checked(self, columns: Mapping[str, list[list[float]]], unedited: EditRow) -> float:
        """How far the copy is from the subject, relative to its loss."""
        pairs = zip(columns["nats"], unedited.columns["nats"], strict=True)
        drift = max(abs(a[0] - b[0]) / max(abs(b[0]), 1e-30) for a, b in pairs)
        worst = max(float(np.max(columns[f"{branch}.total"])) for branch in BRANCHES)
        if not drift <= DRIFT or worst:
            raise ProofError(
                f"a copy that nothing was done to has updates that are off by {worst:.2g} and moves a document by {drift:.2g} of its loss; "
                "nothing measured beside it would mean anything"
            )
        return drift


def chosen_by(arm: CompressionArm, named: EditRow, depth: int) -> list[float]:
    """What the predictor of a protected arm says of every layer, larger where more is lost. Raises: InputError where it was not measured."""
    assert arm.protect is not None
    if arm.protect.by == "chance":
        order = np.random.default_rng(arm.protect.seed).permutation(depth)
        return [float(v) for v in order]
    if arm.protect.by not in ERRORS and arm.protect.by not in named.layers:
        need = "set kl_documents in the scale" if arm.protect.by == "kl" else "name an arm that compresses something"
        raise InputError(
            f"{arm.name} protects layers by {arm.protect.by}, which the record of {arm.protect.of} does not hold; {need}"
        )
    return layerwise(arm.protect.by, arm.protect.branch, named)


def _errors(found: Diagnosis) -> dict[str, list[list[float]]]:
    """``BRANCH.PART`` -> [documents][layers] of a comparison."""
    statistics, columns = found.errors["local"], {}
    names = {LAYER: "block", "feed_forward": "mlp"}
    for branch, tables in statistics.by_branch().items():
        name = names.get(branch, branch)
        if name not in BRANCHES:
            continue
        each = [table for _, table in tables]
        for part, theirs in COLUMNS.items():
            columns[f"{name}.{part}"] = _ratio(*unit_sums(each, theirs))
        columns[f"{name}.cosine"] = (1 - np.array(_ratio(*unit_sums(each, "cosine")))).tolist()
        columns[f"{name}.noise"] = np.sqrt(_ratio(*unit_sums(each, "pooled"))).tolist()
        counts = unit_sums(each, "total")[1]
        columns[f"{name}.null"] = _ratio(np.stack([t.table.total("random across") for t in each], 1), counts)
    return columns


def _ratio(top: np.ndarray, bottom: np.ndarray) -> list[list[float]]:
    return (np.asarray(top, dtype=float) / np.asarray(bottom, dtype=float)).tolist()


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _bits(rows: list[Any]) -> float:
    numbers = [math.prod(row.shape) for row in rows]
    total = sum(n * row.bits_per_weight for n, row in zip(numbers, rows, strict=True))
    return total / sum(numbers) if rows else float(STORED)


def _endings(judged: list[list[int]], prefix: int, choices: int) -> list[list[Window]]:
    """Of each document: its first three quarters with its own ending, and with those of the documents after it."""
    if not choices:
        return []
    cut = [len(ids) - max(1, len(ids) // 4) for ids in judged]
    found = []
    for i, ids in enumerate(judged):
        others = [(i + j) % len(judged) for j in range(choices)]
        start = [prefix, *ids[: cut[i]]]
        ends = [judged[j][cut[j] :] for j in others]
        found.append([Window([*start, *end[:-1]], end) for end in ends])
    return found
