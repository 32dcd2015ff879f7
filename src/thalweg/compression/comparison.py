"""The passes of a comparison: the dense model over a batch, then the compressed one in every mode, and the rows of all."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thalweg.capture.evaluating import evaluating
from thalweg.capture.limits import vocabulary_of
from thalweg.capture.measure import check_ids, encoder_of, padding_of
from thalweg.capture.plan import MOST_LOGITS, MOST_ROWS
from thalweg.capture.proof import prove
from thalweg.capture.states import Tokens
from thalweg.capture.values import prove_values
from thalweg.capture.watching import Event, watch
from thalweg.capture.windows import Batch, Text, cut
from thalweg.compression.compare_plan import CompareOptions, ComparePlan, Diagnosis, Progress
from thalweg.compression.dense_pass import (
    HIDDEN,
    Kept,
    Record,
    Wanted,
    arguments,
    branch_key,
    feeding,
    recording,
    see,
    unembedded,
)
from thalweg.compression.dense_store import Store, store
from thalweg.compression.error_statistics import PairStatistics, valued
from thalweg.compression.layer_kl import LayerKL, outputs_of
from thalweg.compression.layer_numbers import layer_rows
from thalweg.compression.likeness import weight_errors
from thalweg.compression.logits import LogitStatistics, Unembedding
from thalweg.compression.pairing import Description, Side, Standing, describe, match, standing, window_of
from thalweg.compression.protecting import protected_bytes
from thalweg.errors import CaptureError, InputError, ProofError
from thalweg.records import Measurements

PROOF_ROWS, PROOF_TOKENS, HEAD_PROOF_TOKENS = 2, 128, 32
MOST_RECORD = 2**28  # bytes: 256 MiB of dense inputs and updates of a batch


class Comparison:
    """One call of :func:`thalweg.compression.diagnose`: :meth:`together`, or one model at a time, :meth:`apart`."""

    def __init__(self, one: Side, two: Side, options: CompareOptions, progress: Progress | None):
        self.one, self.two, self.options, self.progress = one, two, options, progress
        self.rows = Measurements()
        self.errors: dict[str, PairStatistics] = {}

    def together(self, read: Mapping[str, Any]) -> Diagnosis:
        """With both models open."""
        with standing(self.one) as base, standing(self.two) as compressed:
            about = describe(base), _within(compressed, describe)
            self._pair(*about)
            self._read(base, compressed.tokenizer, read)
            self._prove(compressed)
            self._statistics(base, compressed)
            plan = self._announced(
                sum(_weights(m) for m in {id(s.model): s.model for s in (base, compressed)}.values()), on_disk=False
            )
            for done, batch in enumerate(self.text.batches(self.batch_size, self.padding), 1):
                start = time.perf_counter()
                record = self._dense(base, batch.call)
                self._batch(compressed, batch, record, done, base)
                plan = self._timed(plan, done, time.perf_counter() - start)
            return self._found(*about, plan)

    def apart(self, read: Mapping[str, Any]) -> Diagnosis:
        """With one model open at a time: the compressed one is looked at, closed, and opened again for its passes."""
        with standing(self.two) as compressed:
            second, theirs, weights = _within(compressed, describe), compressed.tokenizer, _weights(compressed.model)
        del compressed
        with ExitStack() as stack:
            with standing(self.one) as base:
                first, weights = describe(base), max(weights, _weights(base.model))
                self._pair(first, second)
                self._read(base, theirs, read)
                plan = self._announced(weights, on_disk=True)
                kept = stack.enter_context(store(plan.record))
                self._keep(base, kept)
            del base
            with standing(self.two) as compressed:
                self._prove(compressed)
                self._statistics(first.located, compressed)
                for done, batch in enumerate(self.text.batches(self.batch_size, self.padding), 1):
                    start = time.perf_counter()
                    self._batch(compressed, batch, kept.get(done), done, None)
                    plan = self._timed(plan, done, time.perf_counter() - start)
        return self._found(first, second, plan)

    def _pair(self, first: Description, second: Description) -> None:
        self.first, self.second = first, second
        self.matching, notes = match(first, second)
        self.notes = list(notes)

    def _read(self, base: Standing, theirs: Any, read: Mapping[str, Any]) -> None:
        """Cut the text, prove the base, see what a batch of it leaves."""
        tokenizer = base.tokenizer if base.tokenizer is not None else theirs
        encode, length = encoder_of(tokenizer), window_of(self.first, self.second, read["length"])
        texts = read["texts"]
        if self.options.last_only:
            texts = _beginnings(texts, encode, length)
        self.text: Text = cut(texts, encode, length, read["tokens"])
        vocabulary = vocabulary_of(base.model) or 0
        check_ids(self.text, vocabulary)
        self.padding = padding_of(tokenizer)
        self.predicts = base.located.causal and base.located.head is not None and self.second.located.head is not None
        if self.options.layer_kl and not self.predicts:
            raise InputError("layer-wise KL needs decoders with an unembedding; leave it out")
        local = set(self.options.modes) & {"local", "isolated"}
        self.wanted = Wanted(
            blocks=bool(local),
            reads="isolated" in self.options.modes,
            values=self.options.values and bool(valued(self.second.located, self.first.located, self.matching)),
            hidden=self.predicts,
        )
        first = next(iter(self.text.batches(PROOF_ROWS, self.padding)))
        self.sample = {name: x[:PROOF_ROWS, :PROOF_TOKENS] for name, x in first.call.items()}
        self._prove(base)
        record = self._dense(base, self.sample)
        for mode in sorted(local):
            self._check_feeding(base, record, mode)
        self.each = math.ceil(record.bytes / self.sample["input_ids"].numel())
        self.batch_size = _rows(read["batch_size"], length, vocabulary, self.each)
        self.layers = base.located.depth
        if self.options.low_memory and self.predicts:
            self.unembedding = Unembedding.of(base.located)

    def _prove(self, stands: Standing) -> None:
        """Raises: ProofError, unless that is allowed; then it stands in the row."""
        located, name = stands.located, stands.side.name
        fields: dict[str, Any] = {"model": name}
        with stands.side.around():
            try:
                proof = prove(located, self.sample)
                kind = f"tolerance of the replay; {located.family}, found by {located.found_by}"
                more = {
                    "site": proof.at,
                    "null": proof.tolerance,
                    "null_kind": kind,
                    "n": proof.tokens,
                    "dtype": proof.dtype,
                }
                self.rows.add("capture_error", proof.worst, **more, **fields)
                if self.wanted.values and located.found_by != "own" and stands.side.name == self.one.name:
                    small = {name: x[:, :HEAD_PROOF_TOKENS] for name, x in self.sample.items()}
                    errors = prove_values(located, small)
                    at = max(errors, key=errors.__getitem__)
                    kind = "tolerance: attention weights times values against o"
                    self.rows.add(
                        "capture_error.values", errors[at], site=at, null=proof.tolerance, null_kind=kind, **fields
                    )
            except ProofError as error:
                if not self.options.allow_unverified:
                    raise
                self.rows.add("capture_error", math.nan, null_kind=f"not verified: {error}", n=1, **fields)

    def _check_feeding(self, base: Standing, record: Kept, mode: str) -> None:
        """The dense model, fed with its own inputs, must give its own updates to the last bit. Raises: CaptureError."""
        off: list[str] = []

        def look(event: Event) -> None:
            if not torch.equal(event.branch, record.tensor(branch_key(event.place.index))):
                off.append(event.place.name)

        same = {i: i for i in range(base.located.depth)}, {place.index: place.index for place in base.located.sites}
        fed = feeding(base.located, record, same[0], same[1] if mode == "isolated" else {})
        with evaluating(base.model), fed, watch(base.located, look):
            base.model(**arguments(base.located, self.sample))
        if off:
            raise CaptureError(
                f"{self.one.name}, whose blocks were fed with what they had been given, gives other updates than before at {off[0]}: "
                f"{mode} mode cannot be used with it; use --mode global"
            )

    def _dense(self, base: Standing, call: Mapping[str, Any]) -> Kept:
        with evaluating(base.model), base.side.around(), recording(base.located, self.wanted) as record:
            base.model(**arguments(base.located, call))
        return record

    def _keep(self, base: Standing, kept: Store) -> None:
        """Low memory: what every batch leaves goes to the disk."""
        for done, batch in enumerate(self.text.batches(self.batch_size, self.padding), 1):
            kept.put(done, self._dense(base, batch.call))

    def _statistics(self, base: Any, compressed: Standing) -> None:
        located = base.located if isinstance(base, Standing) else base
        units = self.text.units
        self.errors = {
            mode: PairStatistics(compressed.located, located, self.matching, units, mode, self.wanted.values)
            for mode in self.options.modes
        }
        self.logits = LogitStatistics(units) if self.predicts and "global" in self.options.modes else None
        self.layer_kl = LayerKL(located, units) if self.options.layer_kl else None

    def _announced(self, weights: int, *, on_disk: bool) -> ComparePlan:
        windows = len(self.text.windows)
        units, sites = self.text.units.count, len(self.first.located.sites)
        kept = (
            sum(s.bytes for s in self.errors.values())
            if self.errors
            else len(self.options.modes) * sites * (units * 400 + 2**16)
        )
        plan = ComparePlan(
            documents=self.text.documents,
            windows=windows,
            tokens=self.text.tokens,
            counted=windows if self.options.last_only else self.text.tokens,
            length=self.text.length,
            batch_size=self.batch_size,
            batches=-(-windows // self.batch_size),
            passes=1 + len(self.options.modes),
            modes=self.options.modes,
            kept=kept,
            record=self.each * (self.text.tokens if on_disk else self.batch_size * self.text.length),
            on_disk=on_disk,
            weights=weights,
            layer_passes=self.layers if self.options.layer_kl else 0,
            notes=(*self.notes, *self.text.notes),
        )
        if self.progress is not None:
            self.progress(0, plan)
        return plan

    def _timed(self, plan: ComparePlan, done: int, seconds: float) -> ComparePlan:
        if plan.seconds is None:
            plan = replace(plan, seconds=seconds * plan.batches)
        if self.progress is not None:
            self.progress(done, plan)
        return plan

    def _batch(self, compressed: Standing, batch: Batch, record: Record, number: int, base: Standing | None) -> None:
        """All passes of the compressed model over one batch."""
        tokens = self._tokens(batch)
        outputs: dict[int, Any] = {}
        for mode, errors in self.errors.items():
            errors.begin(record, tokens, self.options.seed * 1_000_003 + number)
            found = Kept()
            with evaluating(compressed.model), compressed.side.around(), ExitStack() as stack:
                if mode != "global":
                    sites = self.matching.site_of if mode == "isolated" else {}
                    stack.enter_context(feeding(compressed.located, record, self.matching.layer_of, sites))
                if mode == "local" and self.layer_kl is not None:
                    stack.enter_context(outputs_of(compressed.located, self.matching.layer_of, outputs))
                stack.enter_context(watch(compressed.located, errors, values=self.wanted.values))
                if mode == "global" and self.logits is not None:
                    handle = see(compressed.located, unembedded(compressed.located), found.put, HIDDEN)
                    stack.callback(handle.remove)
                compressed.model(**arguments(compressed.located, batch.call))
                if mode == "global" and self.logits is not None:
                    self._predictions(compressed, record, found, tokens, batch.targets, base)
            errors.end()
        if self.layer_kl is not None and base is not None and isinstance(record, Kept):
            with evaluating(base.model), base.side.around():
                call = arguments(base.located, batch.call)
                self.layer_kl.add(lambda: base.model(**call), record, outputs, tokens)

    def _predictions(
        self, compressed: Standing, record: Record, found: Kept, tokens: Tokens, targets: Tensor, base: Standing | None
    ) -> None:
        assert self.logits is not None
        head = self.unembedding if base is None else Unembedding.of(base.located)
        one, two = (head, record.tensor(HIDDEN)), (Unembedding.of(compressed.located), found.tensor(HIDDEN))
        self.logits.add(one, two, tokens, targets)

    def _tokens(self, batch: Batch) -> Tokens:
        """The tokens of a batch that are looked at."""
        mask = batch.attention_mask
        real = torch.ones_like(batch.input_ids, dtype=torch.bool) if mask is None else mask.bool()
        if self.options.last_only:
            last = torch.zeros_like(real)
            last[torch.arange(len(real)), real.sum(1) - 1] = True  # padding stands on the right
            real = last
        return Tokens.of(real, batch.unit_of_row)

    def _found(self, first: Description, second: Description, plan: ComparePlan) -> Diagnosis:
        dtype = next(iter(self.errors.values())).dtype
        rows, options = self.rows, self.options
        others = self._others()
        for errors in self.errors.values():
            rows.extend(errors.measurements())
        for layer, value in weight_errors(first.sketch, second.sketch, self.matching.layer_of).items():
            rows.add("error.weights", value, site=f"layers.{layer}", layer=layer, branch="layer", n=1)
        if self.layer_kl is not None:
            rows.extend(self.layer_kl.measurements(dtype))
        for errors in self.errors.values():
            rows.extend(layer_rows(errors, others, ends=options.ends, seed=options.seed))
        if self.logits is not None:
            rows.extend(self.logits.measurements(self.text.rule, dtype))
        protected, rule = protected_bytes(first, second)
        if protected:
            for layer, size in protected.items():
                rows.add(
                    "protect.bytes", size, unit="B", site=f"layers.{layer}", layer=layer, branch="layer", null_kind=rule
                )
        found = Measurements(row if row.model else replace(row, model=second.name) for row in rows)
        layer_kl = {} if self.layer_kl is None else self.layer_kl.values()
        return Diagnosis(found, plan, first, second, plan.notes, protected, rule, options, self.errors, layer_kl)

    def _others(self) -> dict[str, dict[int, Any]]:
        """Numbers by layer that are held against the total error, as sums above and below the line by unit."""
        units = self.text.units.count
        ones = np.ones(units)
        found = {
            layer: (value * ones, ones)
            for layer, value in weight_errors(self.first.sketch, self.second.sketch, self.matching.layer_of).items()
        }
        others: dict[str, dict[int, Any]] = {"weights": found} if found else {}
        if self.layer_kl is not None:
            table = self.layer_kl.table
            others["kl"] = {
                layer: (table.total(str(layer)), table.counts.cpu().numpy()) for layer in range(self.layers)
            }
        return others


def _within(stands: Standing, look: Callable[[Standing], Any]) -> Any:
    with stands.side.around():
        return look(stands)


def _weights(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _rows(given: Any, length: int, vocabulary: int, each: int) -> int:
    if given is None:
        return max(1, min(MOST_ROWS, MOST_LOGITS // max(1, length * vocabulary), MOST_RECORD // max(1, each * length)))
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise InputError(f"batch_size must be a whole number of at least 1, got {given!r}")
    return given


def _beginnings(texts: Iterable[Any], encode: Any, length: int) -> list[Any]:
    """The first window of every document, as token ids."""
    if isinstance(texts, str):
        return texts  # type: ignore[return-value]  # refused where texts are cut
    return [encode(text)[:length] if isinstance(text, str) and encode is not None else text[:length] for text in texts]
