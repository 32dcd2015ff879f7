"""``thalweg.compression.compare``: what compression did to the updates of a model, layer by layer, in bounded memory."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thalweg.capture.evaluating import evaluating
from thalweg.capture.limits import vocabulary_of
from thalweg.capture.measure import check_ids, encoder_of, padding_of, window_length
from thalweg.capture.plan import MOST_LOGITS, MOST_ROWS
from thalweg.capture.proof import prove
from thalweg.capture.states import Tokens
from thalweg.capture.values import prove_values
from thalweg.capture.watching import Event, watch
from thalweg.capture.windows import Batch, Text, cut
from thalweg.compression.compare_plan import ComparePlan
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
from thalweg.compression.error_statistics import MEASURES, Matching, PairStatistics, valued
from thalweg.compression.layer_kl import LayerKL, outputs_of
from thalweg.compression.layer_numbers import layer_rows
from thalweg.compression.likeness import weight_errors
from thalweg.compression.logits import LogitStatistics, Unembedding
from thalweg.compression.pairing import Description, Side, Standing, describe, match, side_of, standing, twin_of
from thalweg.errors import CaptureError, InputError, ProofError, UnknownNameError
from thalweg.records import Measurements

MODES = ("local", "isolated", "global")
DEFAULT_MODES = ("local", "global")
PRESETS = ("paper",)
PROOF_ROWS, PROOF_TOKENS, HEAD_PROOF_TOKENS = 2, 128, 32
MOST_RECORD = 2**28  # bytes: 256 MiB of dense inputs and updates of a batch

Progress = Callable[[int, ComparePlan], Any]


@dataclass(frozen=True)
class CompareOptions:
    """modes: of :data:`MODES`. last_only: only the last token of every window. ends: the first and the last layer count in numbers over layers.
    values: attention heads before the output projection. layer_kl: KL of every layer alone. low_memory: one model at a time."""

    modes: tuple[str, ...] = DEFAULT_MODES
    last_only: bool = False
    ends: bool = True
    values: bool = True
    layer_kl: bool = False
    low_memory: bool = False
    allow_unverified: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Diagnosis:
    """rows: everything that was measured. base, compressed: what is known of both models. protected: bytes that it costs to leave a layer of the
    base as it was, where that is known; how that was counted stands in ``bytes_rule``. errors: the sums behind the
    rows, by mode, every unit of the text apart; layer_kl: by layer, where it was asked for."""

    rows: Measurements
    plan: ComparePlan
    base: Description
    compressed: Description
    notes: tuple[str, ...]
    protected: Mapping[int, int]
    bytes_rule: str
    options: CompareOptions
    errors: Mapping[str, PairStatistics] = field(default_factory=dict, repr=False, compare=False)
    layer_kl: Mapping[int, float] = field(default_factory=dict)


def compare(base: Any, compressed: Any, texts: Iterable[Any], **options: Any) -> Measurements:
    """How far, and in which direction, compression moved the updates of a model: the rows of :func:`diagnose`, which says all."""
    return diagnose(base, compressed, texts, **options).rows


def diagnose(
    base: nn.Module | str | Path | Side,
    compressed: Any,
    texts: Iterable[Any],
    *,
    tokenizer: Any = None,
    mode: str | Sequence[str] | None = None,
    preset: str | None = None,
    length: int | None = None,
    batch_size: int | None = None,
    tokens: int | None = None,
    values: bool = True,
    layer_kl: bool = False,
    low_memory: bool = False,
    map: Any = None,
    allow_unverified: bool = False,
    progress: Progress | None = None,
    names: tuple[str, str] = ("", ""),
    opening: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Diagnosis:
    """Pair two models of the same blocks and split the error of every update of the compressed one along and across the dense update.

    base: a model, or what :func:`thalweg.capture.opening.open_model` opens. compressed: the same; or a context manager that changes the base
    while it is entered (``editing.edit(model, ...)``); or a function that gets a copy of the base and gives the compressed model, a context
    manager, or None where it changed the copy. texts: strings or lists of token ids, one a document, read in windows of ``length`` tokens (None: 512, or what the
    model takes) until ``tokens`` are read. opening: of ``open_model``, for both.

    mode: ``local`` (every compressed layer on the dense input of that layer; inside a layer the feed-forward sublayer sees the compressed
    attention), ``isolated`` (every sublayer on its dense input), ``global`` (two passes of the whole models), or several; None: local and
    global. preset ``paper``: local, the last token of the first window of every document, means over layers without the first and the last.
    layer_kl: KL of the predictions with one layer compressed, which costs a pass through the layers behind it for each. low_memory: one
    model open at a time; what the dense one leaves lies in a temporary folder meanwhile.

    Rows: for attention, feed-forward, whole layers and, in value space (site ``layers.3.attention.value``, before the output projection), all
    heads together and each: ``error.total``, ``.along``, ``.signed``, ``.across``, ``.across_share``, ``.cosine``, ``.pooled``, ``.sqnr``, each with
    the mode behind it (:mod:`thalweg.geometry.errors`), an interval over documents (windows of fewer than eight), the null; means over
    layers and ``agreement.*`` (:mod:`thalweg.compression.layer_numbers`); ``kl``, ``loss.*``, ``top_token_agreement`` in global mode of decoders.
    Deviation from the source: all tokens by default; the error of a layer that adds its updates is that of their sum.
    Raises: InputError for models that are no pair; CaptureError, ProofError.
    """
    options = _options(mode, preset, values, layer_kl, low_memory, allow_unverified, seed)
    one = base if isinstance(base, Side) else side_of(base, names[0], tokenizer=tokenizer, map=map, options=opening)
    two = _second(one, compressed, names[1], tokenizer, map, opening)
    work = _Comparison(one, two, options, progress)
    read = {"texts": texts, "length": length, "tokens": tokens, "batch_size": batch_size, "tokenizer": tokenizer}
    return work.apart(read) if low_memory else work.together(read)


def _second(base: Side, compressed: Any, name: str, tokenizer: Any, map: Any, opening: Any) -> Side:
    if isinstance(compressed, Side):
        return compressed
    if isinstance(compressed, nn.Module | str | Path):
        return side_of(compressed, name, tokenizer=tokenizer, map=map, options=opening)
    return twin_of(base, compressed, name)


def _options(
    mode: Any, preset: str | None, values: bool, layer_kl: bool, low_memory: bool, allow_unverified: bool, seed: int
) -> CompareOptions:
    if preset is not None and preset not in PRESETS:
        raise UnknownNameError("preset of a comparison", preset, PRESETS)
    modes = (mode,) if isinstance(mode, str) else tuple(mode or (("local",) if preset else DEFAULT_MODES))
    for one in modes:
        if one not in MODES:
            raise UnknownNameError("mode of a comparison", one, MODES)
    if layer_kl and low_memory:
        raise InputError("layer-wise KL needs both models at once; leave it out, or low memory")
    if layer_kl and "local" not in modes:
        raise InputError("layer-wise KL puts the outputs of local mode through the dense network; add local to the modes")
    return CompareOptions(
        modes=tuple(m for m in MODES if m in modes),
        last_only=preset == "paper",
        ends=preset != "paper",
        values=values,
        layer_kl=layer_kl,
        low_memory=low_memory,
        allow_unverified=allow_unverified,
        seed=seed,
    )


class _Comparison:
    """One call of :func:`diagnose`."""

    def __init__(self, one: Side, two: Side, options: CompareOptions, progress: Progress | None):
        self.one, self.two, self.options, self.progress = one, two, options, progress
        self.rows = Measurements()

    def together(self, read: Mapping[str, Any]) -> Diagnosis:
        """With both models open."""
        with standing(self.one) as base, standing(self.two) as compressed:
            about = describe(base), _within(compressed, describe)
            self._pair(*about)
            self._read(base, compressed.tokenizer, read)
            self._prove(compressed)
            self._statistics(base, compressed)
            plan = self._announced(sum(_weights(m) for m in {id(s.model): s.model for s in (base, compressed)}.values()), on_disk=False)
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
                self._statistics(replace(first.located), compressed)
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
        encode, length = encoder_of(tokenizer), window_length(base.located, read["length"])
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
                more = {"site": proof.at, "null": proof.tolerance, "null_kind": kind, "n": proof.tokens, "dtype": proof.dtype}
                self.rows.add("capture_error", proof.worst, **more, **fields)
                if self.wanted.values and located.found_by != "own" and stands.side.name == self.one.name:
                    small = {name: x[:, :HEAD_PROOF_TOKENS] for name, x in self.sample.items()}
                    errors = prove_values(located, small)
                    at = max(errors, key=errors.__getitem__)
                    kind = "tolerance: attention weights times values against o"
                    self.rows.add("capture_error.values", errors[at], site=at, null=proof.tolerance, null_kind=kind, **fields)
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
        with evaluating(base.model), feeding(base.located, record, same[0], same[1] if mode == "isolated" else {}):
            with watch(base.located, look):
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
        kept = sum(s.bytes for s in self.errors.values()) if hasattr(self, "errors") else len(self.options.modes) * sites * (units * 400 + 2**16)
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
                rows.add("protect.bytes", size, unit="B", site=f"layers.{layer}", layer=layer, branch="layer", null_kind=rule)
        found = Measurements(row if row.model else replace(row, model=second.name) for row in rows)
        layer_kl = {} if self.layer_kl is None else self.layer_kl.values()
        return Diagnosis(found, plan, first, second, plan.notes, protected, rule, options, self.errors, layer_kl)

    def _others(self) -> dict[str, dict[int, Any]]:
        """Numbers by layer that are held against the total error, as sums above and below the line by unit."""
        import numpy as np

        units = self.text.units.count
        ones = np.ones(units)
        found = {
            layer: (value * ones, ones)
            for layer, value in weight_errors(self.first.sketch, self.second.sketch, self.matching.layer_of).items()
        }
        others: dict[str, dict[int, Any]] = {"weights": found} if found else {}
        if self.layer_kl is not None:
            table = self.layer_kl.table
            others["kl"] = {layer: (table.total(str(layer)), table.counts.cpu().numpy()) for layer in range(self.layers)}
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


def protected_bytes(base: Description, compressed: Description) -> tuple[dict[int, int], str]:
    """Bytes more that the compressed model takes with a layer of the base left as it was -> by layer, and how that was counted.

    By the record of the compression where there is one (matrices in 16 bits instead), else by what both models take as they are loaded. Empty
    where neither is known: a model that holds its values unpacked takes what it took.
    """
    record = compressed.record
    if record is not None and record.linears:
        found: dict[int, float] = {}
        for one in record.linears:
            found[one.layer] = found.get(one.layer, 0.0) + math.prod(one.shape) * (16 - one.bits_per_weight) / 8
        return {layer: round(size) for layer, size in sorted(found.items())}, "its matrices in 16 bits in place of their bits as recorded"
    kept = record.kept_blocks if record is not None else None
    if kept is not None:
        dense = {layer: size for layer, size in base.bytes.items() if layer not in kept}
        return dense, f"the whole layer, in {' and '.join(base.dtypes)}"
    saved = {layer: base.bytes[layer] - size for layer, size in compressed.bytes.items() if layer in base.bytes}
    if saved and all(size > 0 for size in saved.values()):
        return saved, "bytes of the layer as both models are loaded"
    return {}, "unknown: the compressed model holds its values unpacked, and no record says how many bits they take"


__all__ = ["DEFAULT_MODES", "MEASURES", "MODES", "CompareOptions", "Diagnosis", "Matching", "compare", "diagnose", "protected_bytes"]
