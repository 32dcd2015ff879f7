"""From the states of a pass to tidy rows: every measure by depth, per sequence, with its null beside it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from thalweg.errors import InputError, ShapeError
from thalweg.geometry.catalog import Null
from thalweg.geometry.gates import gate_statistics, sign_transition
from thalweg.geometry.gradients import common_gradient_norms, depth_slope, gradient_norms, history_gradient_norms
from thalweg.geometry.rows import add_row, dtype_of, end_of, place_of
from thalweg.geometry.similarity import residual_null, residual_to_rank_one, rms, state_cosine, token_cosine
from thalweg.geometry.spectrum import effective_rank, gaussian_null, spectral_measures
from thalweg.geometry.tangent import local_tangent
from thalweg.geometry.updates import (
    off_tangent,
    off_tangent_null,
    parallel_coefficient,
    parallel_energy,
    relative_update,
    update_rms,
)
from thalweg.records import Measurements

Streams = Literal["mean", "each", "both"]
Observe = Callable[[Any], Tensor]
Gates = Callable[[Any], Mapping[str, Tensor]]

GRADIENT = "nats per stream unit"
LEAST_SEQUENCES = 16  # fewer give no spread worth printing


@dataclass(frozen=True)
class StreamOptions:
    """How a stream is measured.

    streams: of a state of several streams their ``mean``, ``each`` or ``both``. spectra: whether effective rank and its
    kin are measured (most of the time goes there). window, rank: of the tangent space, estimated from the states of the
    ``window`` tokens before; every ``stride``-th token is looked at. least_sequences: fewer are refused.
    """

    streams: Streams = "mean"
    spectra: bool = True
    tangent: bool = True
    window: int = 16
    rank: int = 4
    stride: int = 4
    least_sequences: int = LEAST_SEQUENCES

    def __post_init__(self) -> None:
        if self.streams not in ("mean", "each", "both"):
            raise InputError(f"streams must be mean, each or both, got {self.streams!r}")
        if not 1 <= self.rank < self.window or self.stride < 1 or self.least_sequences < 1:
            raise InputError(
                f"rank must be below window and stride and least_sequences positive, got rank {self.rank}, window "
                f"{self.window}, stride {self.stride}, least_sequences {self.least_sequences}"
            )


@torch.no_grad()
def stream_measurements(
    trace: Any, *, observe: Observe | None = None, gates: Gates | None = None, options: StreamOptions | None = None
) -> Measurements:
    """Every measure of the geometry of a stream, by depth: mean and sd over sequences, null beside.

    trace: anything with ``records``, one for each site in order, each with ``site`` (layer, kind), ``state_before``,
    ``update`` [b t d] (what the sublayer returned), ``state_after``, and maybe ``branches`` (its named parts); and
    maybe ``entered`` (the first state) and ``left`` [b t d] (what the unembedding sees). States are [b t d] or [b t n
    d], or whatever ``observe`` turns into [b t n d]. gates: from a record to its named gate values [b t ...]
    (default: its attribute ``gates``, if any). Sequences are whole ones of one length: no padding.

    Rows: states by site (``layers.3.attention`` is the state that enters that sublayer, ``stream.end`` the last one,
    ``stream.left`` after the final norm); updates as ``.raw`` (what the sublayer returned), ``.gated`` (times
    ``gate``) and ``.step`` (change of the state), along the mean of the streams when there are several
    (``stream="mean"``).
    Raises: InputError for fewer sequences than ``options.least_sequences``, NaN or infinity; ShapeError.
    """
    options = options or StreamOptions()
    observe = observe or as_streams
    records = list(trace.records)
    if not records:
        raise InputError("the trace holds no sites; run a forward pass with it first")
    first = observe(records[0].state_before)
    if first.ndim != 4:
        raise ShapeError(f"an observed state must be [batch tokens streams width], got shape {list(first.shape)}")
    if first.shape[0] < options.least_sequences:
        raise InputError(
            f"measures per sequence need at least {options.least_sequences} sequences for a spread, "
            f"got {first.shape[0]}; give more"
        )
    rows = Measurements()
    entered = first if getattr(trace, "entered", None) is None else observe(trace.entered)
    ranks = {s: effective_rank(x) for s, x in _streams(entered, options.streams)} if options.spectra else {}
    for record in records:
        place = place_of(record.site)
        before, after = observe(record.state_before), observe(record.state_after)
        _state_rows(rows, before, entered, place, options, ranks)
        named = gates(record) if gates else getattr(record, "gates", None) or {}
        _update_rows(rows, record, before.mean(2), after.mean(2), named, place, before.shape[2], options)
        _gate_rows(rows, named, place, before.shape[1])
    end = end_of(records[-1].site)
    _state_rows(rows, observe(records[-1].state_after), entered, end, options, ranks)
    if getattr(trace, "left", None) is not None:
        left = {"site": "stream.left", "layer": records[-1].site.layer + 1}
        _state_rows(rows, as_streams(trace.left), entered, left, options, ranks)
    _transition_rows(rows, records, before=observe(records[0].state_before))
    return rows


def gradient_measurements(
    sites: Iterable[Any], gradients: Sequence[Tensor | None], history: Sequence[Sequence[Tensor | None]] = ()
) -> Measurements:
    """Rows of the gradient norm by site, of the one common to several streams [b t n d], of kept states, and of its slope along depth.

    sites: with ``layer`` and ``kind``, one for each gradient (of the loss in the state that enters that sublayer). history: for each site
    the gradients in what its state holds of earlier places, the oldest first; ``stream`` of a row counts them.
    Raises: InputError when their numbers differ.
    """
    sites = list(sites)
    if len(sites) != len(gradients):
        raise InputError(f"one gradient for each site is needed, got {len(gradients)} for {len(sites)} sites")
    norms = gradient_norms(gradients)
    dtype = dtype_of(next((g for g in gradients if g is not None), norms))
    rows = Measurements()
    for site, norm in zip(sites, norms, strict=True):
        rows.add("gradient_norm", norm.item(), unit=GRADIENT, n=1, dtype=dtype, **place_of(site))
    several = [
        (site, g) for site, g in zip(sites, gradients, strict=True) if g is not None and g.ndim == 4 and g.shape[2] > 1
    ]
    for (site, _), norm in zip(several, common_gradient_norms([g for _, g in several]) if several else (), strict=True):
        rows.add("gradient_norm.common", norm.item(), unit=GRADIENT, n=1, dtype=dtype, **place_of(site))
    for site, kept in zip(sites, history, strict=False):
        for entry, norm in enumerate(history_gradient_norms(kept) if kept else ()):
            rows.add(
                "gradient_norm.history", norm.item(), unit=GRADIENT, n=1, dtype=dtype, stream=entry, **place_of(site)
            )
    if int((torch.isfinite(norms) & (norms > 0)).sum()) > 1:
        null = {"null": 0.0, "null_kind": "the same norm at every depth"}
        slope = depth_slope(norms)
        rows.add("gradient_norm.slope", slope, unit="nats per site", site="stream", n=len(sites), dtype=dtype, **null)
    return rows


def _state_rows(
    rows: Measurements, state: Tensor, entered: Tensor, place: dict, options: StreamOptions, first: dict
) -> None:
    for stream, x in _streams(state, options.streams):
        tokens, width = x.shape[1:]
        where = {**place, "stream": stream, "dtype": dtype_of(state)}
        if options.spectra:
            spectral = spectral_measures(x)
            ranks = spectral["effective_rank"]
            add_row(rows, "effective_rank", ranks, tokens, gaussian_null(tokens, width), **where)
            start = first[stream] if stream in first else first.get("mean")
            if start is not None:
                relative = torch.where(start > 0, ranks / start, 0.0)
                add_row(rows, "effective_rank.relative", relative, tokens, Null(1.0, 0.0, "the first state"), **where)
            centred = gaussian_null(tokens, width, center=True)
            add_row(rows, "effective_rank.centred", effective_rank(x, center=True), tokens, centred, **where)
            rest = gaussian_null(tokens - 1, width)
            add_row(rows, "effective_rank.without_first", effective_rank(x, drop_first=True), tokens, rest, **where)
            for name in ("stable_rank", "participation_ratio"):
                null = gaussian_null(tokens, width, name)
                add_row(rows, name, spectral[name], tokens, null, unit="directions", **where)
        add_row(rows, "rms", rms(x), tokens, unit="stream units", **where)
        add_row(rows, "token_cosine", token_cosine(x), tokens, _independent("directions"), **where)
        null = Null(residual_null(tokens), 0.0, "sqrt(1 - 1/tokens): independent tokens")
        add_row(rows, "residual_to_rank_one", residual_to_rank_one(x), tokens, null, **where)
        begun = dict(_streams(entered, options.streams))
        if (reference := begun.get(stream, begun.get("mean"))) is not None:
            cosine = state_cosine(reference, x).mean(-1)
            add_row(rows, "entered_cosine", cosine, tokens, _independent("directions"), **where)


def _update_rows(
    rows: Measurements,
    record: Any,
    before: Tensor,
    after: Tensor,
    gates: Mapping[str, Tensor],
    place: dict,
    streams: int,
    options: StreamOptions,
) -> None:
    tokens, width = before.shape[1:]
    where = {**place, "stream": "mean" if streams > 1 else None, "dtype": dtype_of(before)}
    random = Null(1 / width, 0.0, "1/width: random direction")
    step = after.double() - before.double()
    add_row(rows, "state_cosine", state_cosine(before, after).mean(-1), tokens, _independent("directions"), **where)
    for kind, branch, update in _updates(record, step):
        here = {**where, "branch": branch}
        add_row(rows, f"update_rms.{kind}", update_rms(update), tokens, unit="stream units", **here)
        add_row(rows, f"relative_update.{kind}", relative_update(before, update), tokens, **here)
        along = parallel_coefficient(before, update).mean(-1)
        add_row(rows, f"parallel_coefficient.{kind}", along, tokens, Null(0.0, 0.0, "random direction"), **here)
        add_row(rows, f"parallel_energy.{kind}", parallel_energy(before, update).mean(-1), tokens, random, **here)
    if options.tangent and tokens > options.window:
        updates = {"raw": record.update, "step": step}
        if "gate" in gates:
            updates["gated"] = _gated(record.update, gates["gate"])
        for kind, share, expected in _off_tangent(before, updates, options):
            null = Null(expected, 0.0, "1 - rank/width: random direction")
            add_row(rows, f"off_tangent.{kind}", share, tokens, null, **where)


def _gate_rows(rows: Measurements, gates: Mapping[str, Tensor], place: dict, tokens: int) -> None:
    for name, values in gate_statistics(gates, keep=1).items():
        add_row(rows, name, values, tokens, dtype=dtype_of(gates[name.rsplit(".", 1)[0]]), **place)


def _transition_rows(rows: Measurements, records: Sequence[Any], before: Tensor) -> None:
    """Where the write strength turns its sign, for each kind of sublayer."""
    for kind in dict.fromkeys(record.site.kind for record in records):
        means = [row.value for row in rows.where(measure="beta.mean", branch=kind)]
        below = [row.value for row in rows.where(measure="beta.below_zero", branch=kind)]
        if len(means) < 2:
            continue
        found = sign_transition(means, below, count=before.shape[0] * before.shape[1])
        fields = {"site": "stream", "branch": kind, "n": len(means), "dtype": "float64"}
        if found.depth is not None:
            rows.add("beta.transition", found.depth, unit="sites", **fields)
        flat = {"null": 0.0, "null_kind": "the same share at every depth"}
        rows.add("beta.sharpness", found.sharpness, **fields, **flat)


def _updates(record: Any, step: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    yield "raw", record.site.kind, record.update
    parts = getattr(record, "branches", None) or {}
    if len(parts) > 1:
        for name, part in parts.items():
            yield "raw", name, part
    yield "step", record.site.kind, step


def _off_tangent(
    before: Tensor, updates: Mapping[str, Tensor], options: StreamOptions
) -> Iterator[tuple[str, Tensor, float]]:
    """Kind of update, its share outside the tangent space for each sequence that has one, and the null.

    A tangent space is estimated at every ``stride``-th token with a full window of states before it.
    """
    chosen = torch.arange(options.window, before.shape[1], options.stride, device=before.device)
    windows = chosen[:, None] + torch.arange(-options.window, 0, device=before.device)
    shares: dict[str, list[Tensor]] = {kind: [] for kind in updates}
    nulls = []
    for sequence, states in enumerate(before):  # one at a time: the windows hold each state ``window / stride`` times
        basis, valid = local_tangent(states[windows], min(options.rank, states.shape[-1]))
        if not valid.any():
            continue
        nulls.append(off_tangent_null(basis[valid]).mean())
        for kind, update in updates.items():
            shares[kind].append(off_tangent(update[sequence, chosen][valid], basis[valid]).mean())
    if nulls:
        expected = torch.stack(nulls).mean().item()
        yield from ((kind, torch.stack(share), expected) for kind, share in shares.items())


def _gated(update: Tensor, gate: Tensor) -> Tensor:
    gate = gate.unsqueeze(-1) if gate.ndim == update.ndim - 1 else gate
    return update.double() * gate.double()


def _streams(state: Tensor, which: Streams) -> Iterator[tuple[int | str | None, Tensor]]:
    if state.shape[2] == 1:
        yield None, state[:, :, 0]
        return
    if which != "each":
        yield "mean", state.mean(2)
    if which != "mean":
        yield from ((stream, state[:, :, stream]) for stream in range(state.shape[2]))


def _independent(what: str) -> Null:
    return Null(0.0, 0.0, f"independent {what}")


def as_streams(state: Any) -> Tensor:
    if not isinstance(state, Tensor) or state.ndim not in (3, 4):
        raise ShapeError(
            f"a state must be a tensor [b t d] or [b t n d], got {getattr(state, 'shape', type(state).__name__)}; "
            "pass observe=stream.observe for another kind"
        )
    return state.unsqueeze(2) if state.ndim == 3 else state
