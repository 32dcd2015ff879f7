"""``thalweg.measure``: the geometry of the stream of anybody's model on a text, proved first, in one pass and bounded memory."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.capture.evaluating import evaluating
from thalweg.capture.heads import OWN
from thalweg.capture.inner import INNER_MEASURES, inner_places, prove_inner
from thalweg.capture.layout import Located
from thalweg.capture.limits import longest_of, vocabulary_of, window_length
from thalweg.capture.locating import locate
from thalweg.capture.plan import MeasurePlan, rows_of_a_batch, scratch_of
from thalweg.capture.proof import TOLERANCE, called, dtype_name, dtype_of, prove
from thalweg.capture.states import RANKS, STATE_MEASURES
from thalweg.capture.statistics import LAYER_MEASURES, UPDATE_MEASURES, Statistics, StatisticsOptions
from thalweg.capture.tables import LEVEL, Units
from thalweg.capture.values import prove_values
from thalweg.capture.watching import watch
from thalweg.capture.windows import NOT_SCORED, Batch, Text, cut
from thalweg.errors import InputError, ProofError, UnknownNameError
from thalweg.records import Measurements
from thalweg.statistics import ratio_intervals

LENGTH = 512
PROOF_ROWS, PROOF_TOKENS, HEAD_PROOF_TOKENS = 2, 128, 32

HEAD_MEASURES = ("value_coefficient.full", "value_fraction")
LIKENESS_MEASURES = ("linear_cka", "layer_cosine")
LOSS_MEASURES = ("loss", "token_perplexity")
DEFAULT = (
    *STATE_MEASURES,
    *RANKS,
    *(f"{name}.{kind}" for kind in ("raw", "step") for name in UPDATE_MEASURES),
    *LAYER_MEASURES,
    "state_cosine",
    *LOSS_MEASURES,
)
MEASURES = (*DEFAULT, *LIKENESS_MEASURES, *HEAD_MEASURES, *OWN, *INNER_MEASURES)

Progress = Callable[[int, MeasurePlan], Any]


@dataclass(frozen=True)
class _Asked:
    """What to open and how."""

    model: nn.Module
    tokenizer: Any
    name: str


def measure(
    model: nn.Module | str | Path,
    texts: Iterable[Any],
    *,
    tokenizer: Any = None,
    length: int | None = None,
    batch_size: int | None = None,
    tokens: int | None = None,
    bos: int | None = None,
    measures: Sequence[str] | None = None,
    values: bool = False,
    own_weights: bool = False,
    inner: bool = False,
    rank: bool = False,
    cka: bool = False,
    map: Any = None,
    allow_unverified: bool = False,
    progress: Progress | None = None,
    name: str = "",
) -> Measurements:
    """Measure how the layers of a model write to its residual stream.

    model: a decoder or encoder, or what :func:`thalweg.capture.opening.open_model` opens (a folder, a GGUF file, a name). texts: strings
    (documents) or lists of token ids; read in disjoint windows of ``length`` tokens (None: 512, or what the model takes), ``batch_size``
    windows at a time (None: as many as keep the logits under 512 MiB, at most 8), until ``tokens`` are read (None: all). bos: id of a token
    that is put before every document that does not begin with it. measures: names to keep, None: the default set.

    Opt-in: values (every attention head in value space), own_weights (with A_tt and the exclude-self coefficient; wraps the attention
    function), inner (feed-forward sublayers by block of their hidden vector, as wide as the stream; against what the sublayer is given and
    against the raw stream, as the source does not say which it means: :mod:`thalweg.geometry.inner`), rank (effective rank of every state
    instead of nine), cka (CKA and cosine of every two layers). map: of the layers, as for :func:`thalweg.capture.locate`.
    progress(done, plan): called before the first pass and after each. name: stands in every row.

    The capture is proved by replay before anything is measured, on the first 2 x 128 tokens; the proof is the row ``capture_error``, those of
    heads and of insides ``capture_error.values`` and ``.inner``. With ``allow_unverified`` a failed proof is recorded there instead of raised.

    Rows: ``value`` is the mean over tokens with a bootstrap interval over documents (over windows, of fewer than eight documents);
    ``NAME.sd`` and ``NAME.median`` (low, high: p10, p90) say how tokens differ. Of a causal model ``loss`` and ``token_perplexity`` come
    from the same pass, how the text was cut stands in their ``split``. The model is left as it was.
    Raises: InputError, CaptureError, ProofError; UnknownNameError for a measure that does not exist.
    """
    options = StatisticsOptions(rank=rank, cka=cka, values=values, own_weights=own_weights, inner=inner)
    options = _wanted(measures, options)
    asked = _open(model, tokenizer, name)
    located = locate(asked.model, map)
    vocabulary = vocabulary_of(located.model) or 0
    length = window_length(longest_of(located.model), length, LENGTH)
    text = cut(texts, encoder_of(asked.tokenizer), length, tokens, bos)
    rows_each = rows_of_a_batch(length, vocabulary) if batch_size is None else batch_size
    if isinstance(rows_each, bool) or not isinstance(rows_each, int) or rows_each < 1:
        raise InputError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
    _check_heads(located, options)
    left_out = inner_places(located)[1] if options.inner else ()
    batches = lambda: text.batches(rows_each, padding_of(asked.tokenizer))  # noqa: E731
    first = next(iter(batches()))
    check_ids(text, vocabulary)
    found = Measurements()
    words = prove_rows(located, first, allow_unverified, found)
    if options.values or options.own_weights:
        _prove_heads(located, first, allow_unverified, found)
    if options.inner:
        kind = "tolerance: last map of the hidden vector against what the sublayer gives"
        _prove_part(prove_inner, "inner", kind, located, first, allow_unverified, found)
    statistics = Statistics(located, text.units, options)
    plan = _plan(located, text, rows_each, statistics, vocabulary, words, left_out)
    loss = _Loss(text.units) if located.causal and located.head is not None else None
    _run(located, batches(), statistics, loss, options, plan, progress)
    found.extend(statistics.measurements())
    if loss is not None:
        found.extend(loss.measurements(text.rule, plan.dtype))
    found = found if measures is None else Measurements(row for row in found if _kept(row.measure, set(measures)))
    return found.stamped(model=asked.name) if asked.name else found


def _run(
    located: Located,
    batches: Iterable[Batch],
    statistics: Statistics,
    loss: "_Loss | None",
    options: StatisticsOptions,
    plan: MeasurePlan,
    progress: Progress | None,
) -> None:
    model = located.model
    if progress is not None:
        progress(0, plan)
    values = bool(statistics.heads)
    own, inner = values and options.own_weights, options.inner
    with evaluating(model), watch(located, statistics, values, own, inner):
        for done, batch in enumerate(batches, 1):
            start = time.perf_counter()
            statistics.begin(batch.unit_of_row)
            output = model(**called(model, batch.call))
            if loss is not None:
                loss.add(output.logits, batch)
            del output
            if plan.seconds is None:
                plan = replace(plan, seconds=(time.perf_counter() - start) * plan.passes)
            if progress is not None:
                progress(done, plan)


class _Loss:
    """Nats of the next token, by unit."""

    def __init__(self, units: Units):
        self.units = units
        self.nats, self.scored = (torch.zeros(units.count, dtype=torch.float64) for _ in range(2))

    def add(self, logits: Tensor, batch: Batch) -> None:
        """Row by row: a copy of all logits in float32 would take as much memory as they do."""
        for row, targets, unit in zip(logits, batch.targets, batch.unit_of_row.tolist(), strict=True):
            targets = targets.to(row.device)
            nats = F.cross_entropy(row.float(), targets, ignore_index=NOT_SCORED, reduction="none")
            self.nats[unit] += nats.double().sum().cpu()
            self.scored[unit] += float((targets != NOT_SCORED).sum())

    def measurements(self, rule: str, dtype: str) -> Measurements:
        """Loss and perplexity by token; how the windows were cut stands in ``split``."""
        rows, nats, scored = Measurements(), self.nats.numpy()[:, None], self.scored.numpy()[:, None]
        seen, tokens = int((scored > 0).sum()), int(scored.sum())
        if not tokens:
            return rows
        low, high = (float(x[0]) for x in ratio_intervals(nats, scored, level=LEVEL))
        value = float(nats.sum() / tokens)
        words = f"{LEVEL:.0%} percentile bootstrap over {seen} {self.units.name} of {tokens} scored tokens"
        for name, unit, of in (("loss", "nats/token", float), ("token_perplexity", "", _exp)):
            ends = {"low": of(low), "high": of(high), "interval": words} if np.isfinite(low) else {}
            rows.add(name, of(value), unit=unit, n=seen, split=rule, dtype=dtype, **ends)
        return rows


def prove_rows(located: Located, batch: Batch, allow_unverified: bool, rows: Measurements) -> str:
    """The proof as a row, and in words. Raises: ProofError."""
    call = {name: x[:PROOF_ROWS, :PROOF_TOKENS] for name, x in batch.call.items()}
    try:
        proof = prove(located, call)
    except ProofError as error:
        if not allow_unverified:
            raise
        rows.add("capture_error", math.nan, null_kind=f"not verified: {error}", n=1)
        return f"not verified: {error}"
    kind = f"tolerance of the replay; {located.family}, found by {located.found_by}"
    fields = {"site": proof.at, "null": proof.tolerance, "null_kind": kind, "n": proof.tokens, "dtype": proof.dtype}
    rows.add("capture_error", proof.worst, **fields)
    return f"capture proved on {proof.tokens} tokens: worst error {proof.worst:.1e} at {proof.at} (allowed {proof.tolerance:.0e})"


def _prove_heads(located: Located, batch: Batch, allow_unverified: bool, rows: Measurements) -> None:
    """That values and outputs by head are what they are called, as a row. Raises: ProofError, InputError."""
    kind = "tolerance: attention weights times values against o"
    _prove_part(prove_values, "values", kind, located, batch, allow_unverified, rows)


def _prove_part(
    prove_it: Callable[..., dict[str, float]],
    part: str,
    kind: str,
    located: Located,
    batch: Batch,
    allow_unverified: bool,
    rows: Measurements,
) -> None:
    """The proof of a part of the sublayers as the row ``capture_error.PART``. Raises: ProofError, InputError."""
    call = {name: x[:PROOF_ROWS, :HEAD_PROOF_TOKENS] for name, x in batch.call.items()}
    try:
        errors = prove_it(located, call)
    except (ProofError, InputError) as error:
        if not allow_unverified:
            raise
        rows.add(f"capture_error.{part}", math.nan, null_kind=f"not verified: {error}", n=1)
        return
    at = max(errors, key=errors.__getitem__)
    allowed = TOLERANCE.get(dtype_of(located.model))
    rows.add(f"capture_error.{part}", errors[at], site=at, null=allowed, null_kind=kind, n=call["input_ids"].numel())


def _plan(
    located: Located,
    text: Text,
    rows: int,
    statistics: Statistics,
    vocabulary: int,
    proof: str,
    left_out: tuple[str, ...],
) -> MeasurePlan:
    windows = len(text.windows)
    return MeasurePlan(
        documents=text.documents,
        windows=windows,
        tokens=text.tokens,
        length=text.length,
        batch_size=rows,
        passes=-(-windows // rows),
        kept=statistics.bytes,
        scratch=scratch_of(rows, text.length, located.width, vocabulary if located.causal else 0),
        dtype=dtype_name(located.model),
        begins=text.begins,
        proof=proof,
        notes=(*located.notes, *text.notes, *left_out),
    )


def _wanted(measures: Sequence[str] | None, options: StatisticsOptions) -> StatisticsOptions:
    """The options that the named measures need. Raises: UnknownNameError."""
    if isinstance(measures, str):
        raise InputError(f"measures must be a list of names, got the text {measures!r}")
    names = set(measures or ())
    for name in sorted(names):
        if name not in MEASURES:
            raise UnknownNameError("measure of a stream", name, MEASURES)
    return replace(
        options,
        spectra=not names or bool(names & set(RANKS)),
        cka=options.cka or bool(names & set(LIKENESS_MEASURES)),
        values=options.values or bool(names & set(HEAD_MEASURES)),
        own_weights=options.own_weights or bool(names & set(OWN)),
        inner=options.inner or bool(names & set(INNER_MEASURES)),
    )


def _kept(name: str, wanted: set[str]) -> bool:
    return name.startswith("capture_error") or name.removesuffix(".sd").removesuffix(".median") in wanted


def _open(model: Any, tokenizer: Any, name: str) -> _Asked:
    from thalweg.capture.opening import given_tokenizer, open_model

    if isinstance(model, str | Path):
        opened = open_model(model, tokenizer=tokenizer)
        return _Asked(opened.model, opened.tokenizer, name or opened.name)
    config = getattr(model, "config", None)
    return _Asked(
        model, given_tokenizer(tokenizer), name or getattr(config, "name_or_path", "") or type(model).__name__
    )


def encoder_of(tokenizer: Any) -> Callable[[str], Sequence[int]] | None:
    """From text to token ids, with the tokens that a tokenizer puts round a document by itself."""
    if tokenizer is None:
        return None
    if callable(tokenizer):
        return lambda text: tokenizer(text, verbose=False)["input_ids"]  # type: ignore[index]
    if hasattr(tokenizer, "encode"):
        return tokenizer.encode
    raise InputError(f"a tokenizer of transformers or of ours is needed, got {type(tokenizer).__name__}")


def padding_of(tokenizer: Any) -> int:
    return getattr(tokenizer, "pad_token_id", None) or 0  # hidden by the mask, so any token will do


def check_ids(text: Text, vocabulary: int) -> None:
    largest = max(max(window.ids) for window in text.windows)
    if vocabulary and largest >= vocabulary:
        raise InputError(
            f"token {largest} is in the text, the model has {vocabulary} tokens; give the tokenizer of this model, or ids below {vocabulary}"
        )


def _check_heads(located: Located, options: StatisticsOptions) -> None:
    if not (options.values or options.own_weights) or any(place.heads is not None for place in located.sites):
        return
    why = next((place.no_heads for place in located.sites if place.no_heads), "it has no attention sublayers")
    raise InputError(f"{located.family} has no heads to measure in value space: {why}")


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
