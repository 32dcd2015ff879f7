"""From the states of a pass over several streams to tidy rows: mixing, use and memory of the streams, by depth."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from thalweg.errors import InputError
from thalweg.geometry.catalog import Null
from thalweg.geometry.constraint import constraint_error, logit_spread, mixing_distance, permutation_index
from thalweg.geometry.mixing import (
    Channels,
    Kind,
    channels,
    doubly_stochastic_null,
    gain,
    horizon,
    running_composites,
)
from thalweg.geometry.rows import add_row, dtype_of, end_of, place_of
from thalweg.geometry.spectrum import gaussian_null
from thalweg.geometry.streams import (
    difference_share,
    dynamics,
    effective_streams,
    stream_cosine,
    stream_rank,
    stream_shares,
    token_sd,
)
from thalweg.geometry.summaries import Observe, as_streams
from thalweg.records import Measurements

# From a record of a trace to its read [b t n], write [b t n] (None: it has none), mix [b t to from] and logits [b t k] (None: it
# has none), or None where the site mixes nothing.
Mixing = Callable[[Any], Any]

WINDOW = 10  # layers; the source's windows
UNIFORM = Null(0.0, 0.0, "the uniform matrix")
STOCHASTIC = Null(1.0, 0.0, "any doubly stochastic matrix")


@dataclass(frozen=True)
class MixingOptions:
    """How the mixing of streams is measured.

    tokens: of each sequence, evenly spaced; all where it has fewer. window: layers of one window of successive sites (default: ten,
    or a third of a network of fewer than twenty).
    """

    tokens: int = 64
    window: int | None = None

    def __post_init__(self) -> None:
        if self.tokens < 2 or (self.window is not None and self.window < 1):
            raise InputError(f"tokens must be at least 2 and window at least 1, got {self.tokens} and {self.window}")


@torch.no_grad()
def mixing_measurements(
    trace: Any, mixing: Mixing, *, observe: Observe | None = None, options: MixingOptions | None = None
) -> Measurements:
    """Every measure of the mixing of streams, by depth: mean and sd over sequences, null beside. Empty for one stream.

    trace, observe: as for :func:`thalweg.geometry.summaries.stream_measurements`. mixing: from a record to its coefficients.

    Rows: the matrix of each site at that site; ``.from_start`` and ``.to_end``, the products of all sites before and after a
    state, at the site that the state enters and at ``stream.end``; ``.window``, the products over windows of layers, without a
    layer. ``stream_share`` has one row for each stream. A site that mixes nothing counts as the identity.
    Raises: InputError for NaN or infinity; ShapeError.
    """
    options, observe = options or MixingOptions(), observe or as_streams
    records = list(trace.records)
    found = [(record, m) for record in records if (m := mixing(record)) is not None and m.mix.shape[-1] > 1]
    rows = Measurements()
    if not found:
        return rows
    length = found[0][1].mix.shape[1]
    chosen = _spread(length, options.tokens)
    which = length if len(chosen) == length else f"{len(chosen)} of {length}"
    maps = [m.mix[:, chosen].double() for _, m in found]
    for (record, m), mix in zip(found, maps, strict=True):
        where = {**place_of(record.site), "dtype": dtype_of(m.mix)}
        _site_rows(rows, mix, which, where)
        _coefficient_rows(rows, m, chosen, which, where)
    for record in [*(record for record, _ in found), None]:
        last = records[-1]
        state = observe(last.state_after if record is None else record.state_before)
        place = end_of(last.site) if record is None else place_of(record.site)
        _state_rows(rows, state[:, chosen], which, {**place, "dtype": dtype_of(state)})
    sites = [record.site for record, _ in found]
    _composite_rows(rows, sites, maps, which, {"dtype": "float64"}, end_of(records[-1].site))
    _window_rows(rows, sites, maps, which, options.window)
    return rows


def _site_rows(rows: Measurements, mix: Tensor, tokens: int | str, where: dict) -> None:
    n = mix.shape[-1]
    kept = _scoped_rows(rows, "", mix, tokens, where, null=lambda name: doubly_stochastic_null(n, name))
    memory = doubly_stochastic_null(n, "sigma_2")
    forgets = Null(horizon(torch.tensor(memory.value)).item(), 0.0, memory.kind)
    add_row(rows, "horizon", horizon(kept), tokens, forgets, unit="sites", **where)
    for name in ("mean_to_difference", "difference_to_mean"):
        null = Null(0.0, 0.0, f"{'rows' if name == 'mean_to_difference' else 'columns'} that sum to one")
        add_row(rows, f"channel.{name}", getattr(channels(mix), name).mean(-1), tokens, null, **where)
    uniform, random = Null((n - 1) ** 0.5, 0.0, "the uniform matrix"), doubly_stochastic_null(n, "distance.uniform")
    add_row(rows, "distance.identity", mixing_distance(mix, to="identity").mean(-1), tokens, uniform, **where)
    add_row(rows, "distance.permutation", mixing_distance(mix, to="permutation").mean(-1), tokens, uniform, **where)
    add_row(rows, "distance.uniform", mixing_distance(mix, to="uniform").mean(-1), tokens, random, **where)
    fulfilled = Null(0.0, 0.0, "any doubly stochastic matrix")
    for name, values in constraint_error(mix)._asdict().items():
        add_row(rows, f"constraint_error.{name}", values.amax(-1), tokens, fulfilled, **where)


def _scoped_rows(
    rows: Measurements, scope: str, mix: Tensor, tokens: int | str, where: dict, null: Callable[[str], Null]
) -> Tensor:
    """The measures that are taken of single matrices and of products alike; gives sigma_2 by sequence."""
    for kind in get_args(Kind):
        for side in ("forward", "backward"):
            add_row(rows, f"{kind}{scope}.{side}", gain(mix, kind=kind, side=side), tokens, STOCHASTIC, **where)
    values = torch.linalg.svdvals(mix).mean(1)  # both at once: they take most of the time
    add_row(rows, f"sigma_1{scope}", values[:, 0], tokens, STOCHASTIC, **where)
    add_row(rows, f"sigma_2{scope}", values[:, 1], tokens, null("sigma_2"), **where)
    blocks: Channels = channels(mix)
    add_row(rows, f"channel.mean{scope}", blocks.mean.mean(-1), tokens, STOCHASTIC, **where)
    difference = null("channel.difference")
    add_row(rows, f"channel.difference{scope}", blocks.difference.mean(-1), tokens, difference, **where)
    index = permutation_index(mix).mean(-1)
    add_row(rows, f"permutation_index{scope}", index, tokens, null("permutation_index"), **where)
    return values[:, 1]


def _composite_rows(
    rows: Measurements, sites: Sequence[Any], maps: Sequence[Tensor], tokens: int | str, where: dict, end: dict
) -> None:
    """Before a state the identity where it is the first, and after it where it is the last."""
    nothing = torch.eye(maps[0].shape[-1], dtype=torch.float64, device=maps[0].device).expand_as(maps[0])
    places = [*map(place_of, sites), end]
    for place, product in zip(places, _before(nothing, maps), strict=True):
        _scoped_rows(rows, ".from_start", product, tokens, {**place, **where}, lambda _: UNIFORM)
    for place, product in zip(reversed(places), _after(nothing, maps), strict=True):
        _scoped_rows(rows, ".to_end", product, tokens, {**place, **where}, lambda _: UNIFORM)


def _before(nothing: Tensor, maps: Sequence[Tensor]) -> Iterator[Tensor]:
    yield nothing
    yield from running_composites(maps)


def _after(nothing: Tensor, maps: Sequence[Tensor]) -> Iterator[Tensor]:
    yield nothing
    yield from running_composites(maps, backwards=True)


def _window_rows(
    rows: Measurements, sites: Sequence[Any], maps: Sequence[Tensor], tokens: int | str, window: int | None
) -> None:
    depth = sites[-1].layer + 1
    size = window or (WINDOW if depth >= 2 * WINDOW else max(1, -(-depth // 3)))
    for first in range(0, depth, size):
        inside = [mix for site, mix in zip(sites, maps, strict=True) if first <= site.layer < first + size]
        if not inside:
            continue
        *_, product = running_composites(inside)
        where = {"site": f"layers.{first}-{min(first + size, depth) - 1}", "dtype": "float64"}
        _scoped_rows(rows, ".window", product, tokens, where, lambda _: UNIFORM)


def _coefficient_rows(rows: Measurements, m: Any, chosen: Tensor, tokens: int | str, where: dict) -> None:
    for name in ("read", "write", "mix"):
        values = getattr(m, name)
        if values is None:
            continue
        values = values[:, chosen].double()
        if name != "mix":
            n = values.shape[-1]
            equal = Null(float(n), 0.0, "equal weights")
            used = effective_streams(values).mean(-1)
            add_row(rows, f"effective_streams.{name}", used, tokens, equal, unit="streams", **where)
            shares, share = stream_shares(values).mean(1), Null(1 / n, 0.0, "equal weights")
            for stream in range(n):
                add_row(rows, f"stream_share.{name}", shares[:, stream], tokens, share, stream=stream, **where)
        flat, constant = values.flatten(2), Null(0.0, 0.0, "constants")
        add_row(rows, f"{name}.token_sd", token_sd(flat), tokens, constant, **where)
        add_row(rows, f"{name}.dynamic", dynamics(flat), tokens, constant, **where)
    if m.logits is not None:
        spread = logit_spread(m.logits[:, chosen]).mean(-1)
        add_row(rows, "mix.logit_spread", spread, tokens, Null(0.0, 0.0, "equal logits"), **where)


def _state_rows(rows: Measurements, state: Tensor, tokens: int | str, where: dict) -> None:
    n, width = state.shape[-2:]
    independent = Null((1 - 1 / n) ** 0.5, 0.0, "sqrt(1 - 1/streams): independent streams")
    add_row(rows, "stream_rank", stream_rank(state).mean(-1), tokens, gaussian_null(n, width), **where)
    directions = Null(0.0, 0.0, "independent directions")
    add_row(rows, "stream_cosine", stream_cosine(state).mean(-1), tokens, directions, **where)
    add_row(rows, "difference_share", difference_share(state).mean(-1), tokens, independent, **where)


def _spread(length: int, wanted: int) -> Tensor:
    """Indices of at most ``wanted`` tokens, evenly spaced, the last one among them."""
    if length <= wanted:
        return torch.arange(length)
    return torch.linspace(0, length - 1, wanted).round().long()
