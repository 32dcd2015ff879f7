"""One edit on all documents: likelihoods by position, at masked tokens, or embeddings, and how far states and updates moved by layer."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from thalweg.capture import Located, locate, watch
from thalweg.capture.evaluating import evaluating
from thalweg.capture.limits import vocabulary_of
from thalweg.editing import audit, edit
from thalweg.errors import InputError, ProofError
from thalweg.evaluation.documents import as_documents
from thalweg.evaluation.embeddings import embed
from thalweg.evaluation.masked import MaskedPlan, covering, masked_rows, of_plan
from thalweg.evaluation.paired import DRIFT
from thalweg.evaluation.perplexity import prefix_of
from thalweg.evaluation.scoring import batches, by_token, device_of, logits_of, rows_of
from thalweg.evaluation.subjects import around, check_causal, check_tokenizer, ids_of, is_causal
from thalweg.evaluation.windows import Window
from thalweg.ops.precision import wide
from thalweg.records.provenance import now
from thalweg.statistics import spearman
from thalweg.studies.edits.plan import EditArm
from thalweg.studies.edits.store import EditRow
from thalweg.studies.edits.subjects import OpenSubject
from thalweg.studies.edits.texts import Reading

BATCH_TOKENS = 1024  # of a forward pass
AUDIT_TOKENS = 256  # of an audited document, from its beginning


@dataclass
class Bench:
    """A subject with the documents that every edit is measured on: windows of them, their masked rows, or their texts.

    embeddings: [documents width] of no-ops, by identity.
    """

    subject: OpenSubject
    reading: Reading
    evaluation: str
    buckets: int
    audit: int
    located: Located
    windows: list[Window] = field(default_factory=list)
    masked: MaskedPlan | None = None
    embeddings: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, subject: OpenSubject, reading: Reading, evaluation: str, buckets: int, audit: int) -> "Bench":
        """Cut the documents into tokens. Raises: InputError for a document that is too short, or a model of the wrong kind."""
        check_tokenizer(subject.tokenizer)
        bench = cls(subject, reading, evaluation, buckets, audit, locate(subject.model))
        if evaluation == "likelihood":
            if reading.tokens % buckets:
                raise InputError(f"tokens must be a multiple of buckets ({buckets}), got {reading.tokens}")
            check_causal(subject.model)
            prefix = prefix_of(subject.tokenizer, None)
            assert prefix is not None
            for ids in subject.token_rows(reading):
                bench.windows.append(Window([prefix, *ids[:-1]], ids))
        elif evaluation == "masked":
            if is_causal(subject.model):
                raise InputError(
                    "the loss at masked tokens is a measure of encoders; this subject is causal: say evaluation = 'likelihood'"
                )
            length, choose = sum(map(len, around(subject.tokenizer))) + reading.tokens, covering()
            rows = [
                row
                for i, ids in enumerate(subject.token_rows(reading))
                for row in masked_rows(ids, subject.tokenizer, length, choose, i)
            ]
            read, vocabulary = as_documents(reading.documents), vocabulary_of(subject.model)
            bench.masked = MaskedPlan(read, rows, "masked", "each token masked once", length, vocabulary)
        elif getattr(subject.model, "lm_head", None) is not None and is_causal(subject.model):
            raise InputError(
                "embeddings are a measure of encoders; this subject is causal: say evaluation = 'likelihood'"
            )
        return bench

    @property
    def tokens(self) -> list[list[int]]:
        """[documents][buckets] tokens (behind an embedding: words) behind each number."""
        if self.evaluation == "embedding":
            return [[len(d.text.split())] for d in self.reading.documents]
        buckets = self.buckets if self.windows else 1
        return [[self.reading.tokens // buckets] * buckets for _ in self.reading.documents]

    def unedited(self) -> EditRow:
        """The model alone; its states are kept for the audits of what follows."""
        start = time.monotonic()
        columns = self._embedded(self._own(), self._own()) if self.evaluation == "embedding" else {"nats": self._nats()}
        layers = {} if self.plain is None else {"self_share": self.plain.self_share}
        return EditRow("unedited", {}, "unedited", columns, layers, seconds=time.monotonic() - start, ended=now())

    def edited(self, arm: EditArm, noop: EditArm, rows: Mapping[str, EditRow]) -> EditRow:
        """One edit; ``noop``: the no-op of its family; ``rows``: what the record holds already, the unedited model first.

        Raises: ProofError where a no-op moves any document by more than 1e-3 of its loss; what editing raises.
        """
        start = time.monotonic()
        base = None
        if self.evaluation == "embedding":
            base = self._own() if arm.noop else self._base(noop)  # outside of the edit
        with entered(self.subject, arm) as facts:
            columns = {"nats": self._nats()} if base is None else self._embedded(self._embed(), base)
            notes = tuple(facts.notes)
        drift = _drift(columns, rows["unedited"].columns) if arm.noop else None
        if drift is not None and not drift <= DRIFT:
            raise ProofError(
                f"{arm.name} changes nothing and moves a document by {drift:.2g} of its loss, at most {DRIFT:g} is rounding; "
                "nothing measured beside it would mean anything"
            )
        layers = {} if arm.noop or self.plain is None else self._audit(arm)
        role, seconds = "no-op" if arm.noop else "edited", time.monotonic() - start
        return EditRow(arm.identity, arm.options.plain(), role, columns, layers, drift, seconds, now(), notes)

    @cached_property
    def plain(self) -> "Seen | None":
        """States of the unedited model on the audited documents; None where none is audited."""
        return self._seen(values=True) if self.audit else None

    def _embed(self) -> Tensor:
        return embed(self.subject.model, self.subject.tokenizer, self.reading.documents)

    def _own(self) -> Tensor:
        """Embeddings of the unedited model."""
        if "" not in self.embeddings:
            self.embeddings[""] = self._embed()
        return self.embeddings[""]

    def _base(self, noop: EditArm) -> Tensor:
        if noop.identity not in self.embeddings:
            with entered(self.subject, noop):
                self.embeddings[noop.identity] = self._embed()
        return self.embeddings[noop.identity]

    @staticmethod
    def _embedded(found: Tensor, base: Tensor) -> dict[str, list[list[float]]]:
        cosines = F.cosine_similarity(found.double(), base.double())
        return {"cosine": [[float(c)] for c in cosines], "order": [[r] for r in _orders(base, found)]}

    def _nats(self) -> list[list[float]]:
        rows: list[list[float]] = []
        size = max(1, BATCH_TOKENS // self.reading.tokens)
        if self.masked is not None:
            found = of_plan(self.subject.model, self.masked, batch_size=size).columns["log_likelihood"]
            return [[-value] for value in found.tolist()]
        with evaluating(self.subject.model):
            for batch in batches(self.windows, size):
                ids = torch.tensor([w.inputs for w in batch], device=device_of(self.subject.model))
                for logits, window in zip(logits_of(self.subject.model, ids), batch, strict=True):
                    found, _ = by_token(logits, torch.tensor(window.targets, device=logits.device))
                    rows.append((-found.view(self.buckets, -1).sum(1)).tolist())
        return rows

    def _audit(self, arm: EditArm) -> dict[str, list[float | None]]:
        """By layer: how strong the edit is where it is applied, and how far the state after the layer is from the unedited model's."""
        assert self.plain is not None
        with entered(self.subject, arm):
            seen = self._seen()
        states = {place.layer: i for i, place in enumerate(self.located.sites)}  # the last site of a layer
        drift = [_moved(seen.states[i], self.plain.states[i]) for i in states.values()]
        found: dict[str, list[float | None]] = {"drift": list(drift)}
        if arm.options.site != "block":
            rows = audit(self.subject.model, self._audited(), arm.options)
            applied = {row.layer: row.value for row in rows if row.measure == "applied.norm_ratio"}
            found["applied"] = [applied.get(layer) for layer in range(self.located.depth)]
        return found

    def _seen(self, values: bool = False) -> "Seen":
        """Over the audited documents. values: with the share of the own message, where every layer has heads."""
        model, seen = self.subject.model, Seen()
        shares: dict[int, float] = {}

        def note(event: Any) -> None:
            real = event.real
            seen.states.append(wide(event.following)[real].clone())
            if event.values is not None and event.values.own is not None:
                o, v = wide(event.values.o), wide(event.values.v)
                own = event.values.own.transpose(1, 2) * v.norm(dim=-1).repeat_interleave(o.shape[2] // v.shape[2], 2)
                shares[event.place.layer] = float((own / o.norm(dim=-1).clamp(min=1e-30))[real].mean())

        calls = self._audited()
        heads = values and all(p.heads is not None for p in self.located.sites if p.kind == "attention")
        with evaluating(model), watch(self.located, note, values=heads, own_weights=heads):
            model(**calls)
        seen.self_share = [shares.get(k) for k in range(self.located.depth)]
        return seen

    def _audited(self) -> dict[str, Tensor]:
        """The audited documents as one call of the model."""
        device = device_of(self.subject.model)
        if self.windows:
            rows = [w.inputs[:AUDIT_TOKENS] for w in self.windows[: self.audit]]
            return {"input_ids": torch.tensor(rows, device=device)}
        if self.masked is not None:  # of each document the first of its rows
            first = {row.document: row.inputs for row in reversed(self.masked.rows) if row.document < self.audit}
            ids, mask = rows_of([first[i][:AUDIT_TOKENS] for i in sorted(first)], "right", device)
            return {"input_ids": ids, "attention_mask": mask}
        before, after = around(self.subject.tokenizer)
        texts = [d.text for d in self.reading.documents[: self.audit]]
        rows = [[*before, *ids_of(self.subject.tokenizer, text, None), *after] for text in texts]
        ids, mask = rows_of(rows, "right", device)
        return {"input_ids": ids, "attention_mask": mask}


@dataclass
class Seen:
    """The state after each site [real tokens, width] of one pass; the share of the own message by layer."""

    states: list[Tensor] = field(default_factory=list)
    self_share: list[float | None] = field(default_factory=list)


@contextmanager
def entered(subject: OpenSubject, arm: EditArm) -> Iterator[Any]:
    """The model under an edit; a no-op is computed, not skipped."""
    with edit(subject.model, arm.options, forced=arm.noop) as facts:
        yield facts


def _moved(now: Tensor, before: Tensor) -> float:
    """Mean over tokens of the relative change."""
    return float(((now - before).norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-30)).mean())


def _orders(before: Tensor, after: Tensor) -> list[float]:
    """For each text, Spearman's correlation of its cosines to all others, before and after."""
    a, b = (F.normalize(x.double(), dim=-1) for x in (before, after))
    a, b = (a @ a.T).numpy(), (b @ b.T).numpy()
    found = []
    for i in range(len(a)):
        others = np.arange(len(a)) != i
        found.append(0.0 if len(others) < 3 else spearman(a[i, others], b[i, others], constant=0.0))
    return found


def _drift(noop: dict[str, list[list[float]]], unedited: dict[str, list[list[float]]]) -> float:
    """Of the worst document, relative to its loss; of embeddings, one minus the cosine."""
    if "nats" in noop:
        pairs = ((math.fsum(a), math.fsum(b)) for a, b in zip(noop["nats"], unedited["nats"], strict=True))
        return max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)
    return max(abs(1 - row[0]) for row in noop["cosine"])
