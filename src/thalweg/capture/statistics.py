"""Statistics of a stream while it goes by, in memory that does not grow with the tokens.

Kept are sums in float64, histograms over fixed bins, sums by unit (document, or window of a long text), one width x width matrix of second
moments twice at some depths; during a batch, the states that entered the stream and the current layer. Products of vectors are taken in
float32 (wider if the model is). Padding is never counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from thalweg.capture.heads import HeadStatistics
from thalweg.capture.histogram import ANGLE, COSINE, POSITIVE, SHARE, SIGNED
from thalweg.capture.inner import InnerStatistics, inner_places
from thalweg.capture.layout import Located, SitePlace
from thalweg.capture.likeness import Likeness
from thalweg.capture.states import StateStatistics, Tokens
from thalweg.capture.tables import Entry, Table, Units, add_rows
from thalweg.capture.watching import Event
from thalweg.geometry.catalog import Null
from thalweg.geometry.lengths import Lengths, lengths, over_perpendicular_null
from thalweg.geometry.rows import dtype_of, end_of, place_of
from thalweg.geometry.updates import parallel_fraction_null
from thalweg.records import Measurements

DEPTHS = 9  # states whose second moments are kept, evenly spaced, unless all are asked for

UPDATE_MEASURES = (
    "parallel_coefficient",
    "parallel_over_perpendicular",
    "parallel_fraction",
    "parallel_energy",
    "update_angle",
    "token_relative_update",
    "relative_update",
    "update_rms",
)
LAYER_MEASURES = ("layer_drop_cosine", "layer_drop_cosine.small_angle")


@dataclass(frozen=True)
class StatisticsOptions:
    """What is measured beside the default set.

    spectra: effective rank of the states at nine depths; rank: at every site. cka: CKA and cosine between the layers. values: attention by
    head in value space; own_weights: with A_tt, what a token reads of itself, and with what it reads of others alone. inner: feed-forward
    sublayers by block of their hidden vector.
    """

    spectra: bool = True
    rank: bool = False
    cka: bool = False
    values: bool = False
    own_weights: bool = False
    inner: bool = False


class Statistics:
    """Call it with every event of a pass (``capture.watch(located, statistics)``), each pass announced by :meth:`begin`."""

    def __init__(self, located: Located, units: Units, options: StatisticsOptions | None = None):
        self.located, self.units, self.options = located, units, options or StatisticsOptions()
        width, places = located.width, located.sites
        spectra = depths(len(places)) if self.options.spectra else set()
        deep = set(range(len(places) + 1)) if self.options.rank else spectra
        self.states = [StateStatistics(width, units, moments=i in deep, entered=i > 0) for i in range(len(places) + 1)]
        self.updates = {place.index: UpdateStatistics(width, units, "raw") for place in places}
        self.steps = {
            place.index: UpdateStatistics(width, units, "step")
            for place in places
            if not place.parallel and not _adds(located, place)
        }
        self.layers = {place.layer: UpdateStatistics(width, units, "step", layer=True) for place in places}
        self.heads = {
            place.index: HeadStatistics(place.heads, units, self.options.own_weights)
            for place in places
            if place.heads is not None and (self.options.values or self.options.own_weights)
        }
        opened = inner_places(located)[0] if self.options.inner else ()
        self.inner = {place.index: InnerStatistics(place, located, units) for place in opened}
        starts = [place.index for place in places if place.index == 0 or places[place.index - 1].layer != place.layer]
        self.likeness = Likeness([*starts, len(places)], width) if self.options.cka else None
        self.last = {place.layer: place.index for place in places}
        self.dtype = ""
        self._forget()

    @property
    def bytes(self) -> int:
        """What is kept from batch to batch, whatever their number."""
        parts = [
            *self.states,
            *self.updates.values(),
            *self.steps.values(),
            *self.layers.values(),
            *self.heads.values(),
            *self.inner.values(),
        ]
        return sum(part.bytes for part in parts) + (self.likeness.bytes if self.likeness else 0)

    @property
    def tokens(self) -> int:
        """How many were counted."""
        return self.states[0].table.tokens

    def begin(self, unit_of_row: Int[Tensor, " b"]) -> None:
        """Announce a pass: the unit (document ...) that every row of the batch belongs to."""
        self._forget()
        self._unit = unit_of_row

    def _forget(self) -> None:
        self._unit: Tensor | None = None
        self._tokens: Tokens | None = None
        self._entered: tuple[Tensor, Tensor] | None = None
        self._layer: tuple[int, Tensor] | None = None
        self._next: Tensor | None = None

    def __call__(self, event: Event) -> None:
        """Count one site."""
        place, tokens = event.place, self._tokens_of(event)
        many = event.states is not None
        read = tokens.flat(event.state)
        state = tokens.flat(event.states.mean(2)) if event.states is not None else read
        following = event.following if event.next_states is None else event.next_states.mean(2)
        if self._layer is None or self._layer[0] != place.layer:
            self._layer = (place.layer, state.clone())
        branch = tokens.flat(event.branch)
        found = lengths(read, branch)
        size = torch.linalg.vector_norm(state, dim=-1) if many else found.reference
        self._state(place.index, state, size, tokens)
        self.updates[place.index].add(found, tokens.unit)
        if place.index in self.steps:
            self.steps[place.index].add(lengths(state, tokens.flat(following) - state), tokens.unit)
        if place.index in self.heads and event.values is not None:
            self.heads[place.index].add(event.values, tokens)
        if place.index in self.inner and event.inner is not None:
            self.inner[place.index].add(event.inner, read, tokens)
        if self.last[place.layer] == place.index:
            before = self._layer[1]
            after = tokens.flat(following)
            self.layers[place.layer].add(lengths(before, after - before), tokens.unit)
            if place.index == len(self.located.sites) - 1:
                self._state(place.index + 1, after, torch.linalg.vector_norm(after, dim=-1), tokens)
                if self.likeness is not None:
                    self.likeness.close()
                self._forget()

    def _tokens_of(self, event: Event) -> Tokens:
        device = event.state.device
        if self._tokens is None:
            self.dtype = dtype_of(event.state)
            rows = torch.zeros(len(event.real), dtype=torch.long) if self._unit is None else self._unit
            self._tokens = Tokens.of(event.real, rows.to(device))
        elif self._tokens.unit.device != device:
            self._tokens = self._tokens.to(device)
        return self._tokens

    def _state(self, index: int, x: Tensor, size: Tensor, tokens: Tokens) -> None:
        cosine = None
        if index == 0:
            self._entered = (x.clone(), size)
        elif self._entered is not None:
            if self._entered[0].device != x.device:
                self._entered = (self._entered[0].to(x.device), self._entered[1].to(x.device))
            entered, start = self._entered
            product = size * start
            cosine = (x * entered).sum(-1) / torch.where(product > 0, product, 1.0)
        self.states[index].add(x, size, cosine, tokens)
        if self.likeness is not None:
            self.likeness.add(index, x)

    def measurements(self, **fields: Any) -> Measurements:
        """Rows of everything that was counted; ``fields`` (model ...) on each. Raises: InputError where a state was not finite."""
        rows, places = Measurements(), self.located.sites
        fields = {**fields, "dtype": self.dtype}
        stream = {"stream": "mean"} if self.located.streams > 1 else {}
        read = {"stream": "read"} if self.located.streams > 1 else {}
        named = [place_of(place) for place in places] + [end_of(places[-1])]
        for where, state in zip(named, self.states, strict=True):
            rows.extend(state.measurements({**fields, **stream, **where}))
        for index, part in self.updates.items():
            rows.extend(
                part.measurements({**fields, **read, **named[index]}, turned=_adds(self.located, places[index]))
            )
        for index, part in self.steps.items():
            rows.extend(part.measurements({**fields, **stream, **named[index]}, turned=True))
        for layer, part in self.layers.items():
            where = {"site": f"layers.{layer}", "layer": layer, "branch": "layer"}
            rows.extend(part.measurements({**fields, **stream, **where}))
        for index, part in self.heads.items():
            rows.extend(part.measurements({**fields, **named[index]}))
        for index, part in self.inner.items():
            rows.extend(part.measurements({**fields, **named[index]}))
        if self.likeness is not None:
            rows.extend(self.likeness.measurements(named, {**fields, **stream}))
        return rows


class UpdateStatistics:
    """An update against its state: every ratio of the three lengths. layer: with what dropping the layer would leave."""

    def __init__(self, width: int, units: Units, kind: str, layer: bool = False):
        self.width, self.kind, self.layer = width, kind, layer
        columns = {
            "coefficient": SIGNED,
            "over": POSITIVE,
            "fraction": SHARE,
            "energy": SHARE,
            "angle": ANGLE,
            "relative": POSITIVE,
            "size": POSITIVE,
            "square": None,
            "state": None,
            "kept": COSINE,
        }
        self.table = Table(columns | ({"small": None} if layer else {}), units)

    @property
    def bytes(self) -> int:
        return self.table.bytes

    def add(self, found: Lengths, unit: Tensor) -> None:
        """Count n tokens."""
        update, fraction = found.update, found.fraction
        columns = [
            found.coefficient,
            found.over_perpendicular,
            fraction,
            fraction.square(),
            found.angle,
            found.relative,
        ]
        columns += [update / self.width**0.5, update.square(), found.reference.square(), found.kept_cosine]
        self.table.add(torch.stack(columns + ([found.kept_cosine_small] if self.layer else [])), unit)

    def measurements(self, fields: Mapping[str, Any], turned: bool = False) -> Measurements:
        """turned: with the cosine between the state and the next one, where the update alone makes the difference."""
        rows, kind, width = Measurements(), self.kind, self.width
        random = "random direction"
        share = parallel_fraction_null(width)
        over = Null(over_perpendicular_null(width), 0.0, random) if width > 2 else None
        alike = Null(0.0, 0.0, "independent directions")
        entries = [
            Entry(f"parallel_coefficient.{kind}", "coefficient", null=Null(0.0, 0.0, random)),
            Entry(f"parallel_over_perpendicular.{kind}", "over", null=over),
            Entry(f"parallel_fraction.{kind}", "fraction", null=Null(share, 0.0, random)),
            Entry(f"parallel_energy.{kind}", "energy", null=Null(1 / width, 0.0, f"1/width: {random}")),
            Entry(f"update_angle.{kind}", "angle", null=Null(90.0, 0.0, random), unit="degrees"),
            Entry(f"token_relative_update.{kind}", "relative"),
            Entry(f"relative_update.{kind}", "square", "state", root=True),
            Entry(f"update_rms.{kind}", "square", None, True, width, unit="stream units", spread="size"),
        ]
        if turned:
            entries.append(Entry("state_cosine", "kept", null=alike))
        if self.layer:
            entries += [Entry(LAYER_MEASURES[0], "kept", null=alike), Entry(LAYER_MEASURES[1], "small")]
        add_rows(rows, self.table, entries, fields)
        return rows


def depths(sites: int) -> set[int]:
    """Which of ``sites`` + 1 states have their second moments kept: the first, the last, and some between."""
    count = min(DEPTHS, sites + 1)
    return {round(i * sites / (count - 1)) for i in range(count)} if count > 1 else {0}


def _adds(located: Located, place: SitePlace) -> bool:
    """Whether the next state is known to be the state plus this update and no more; what connections of ours write is not looked into."""
    return located.tap is None and not place.parallel and place.norm_after is None and place.read is None
