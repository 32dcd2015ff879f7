"""Inside feed-forward sublayers, over a stream of tokens: which can be measured, the proof of what is seen, the statistics.

See :mod:`thalweg.geometry.inner` for what is measured and what it means.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from thalweg.capture.evaluating import evaluating
from thalweg.capture.heads import FEW_SHARE, FEW_SIGNED, entries_by_part
from thalweg.capture.layout import Located, SitePlace
from thalweg.capture.linear import linear_weight
from thalweg.capture.proof import TOLERANCE, dtype_of, gap, run
from thalweg.capture.states import Tokens
from thalweg.capture.tables import Table, Units, add_rows
from thalweg.capture.watching import Event, InnerEvent, item_of, watch
from thalweg.errors import InputError, ProofError
from thalweg.geometry.catalog import Null
from thalweg.geometry.lengths import lengths
from thalweg.geometry.updates import parallel_fraction_null
from thalweg.ops.precision import wide
from thalweg.records import Measurements

INNER_MEASURES = tuple(
    f"inner_{kind}.{site}" for site in ("hidden", "hidden_of_stream", "output") for kind in ("coefficient", "fraction")
)


def inner_places(located: Located) -> tuple[tuple[SitePlace, ...], tuple[str, ...]]:
    """The feed-forward sites whose hidden vector divides into blocks as wide as the stream, and a line on those that are left out.

    Raises: InputError with the reason of the first where there are none.
    """
    sites = [place for place in located.sites if place.kind == "feed_forward"]
    reasons = {place.name: why_not(place, located) for place in sites}
    found = tuple(place for place in sites if not reasons[place.name])
    left = [f"{name}: {why}" for name, why in reasons.items() if why]
    if not found:
        why = left[0] if left else "it has no feed-forward sublayers of their own"
        raise InputError(f"the inside of {located.family}'s feed-forward sublayers cannot be measured ({why})")
    many = f"{len(left)} of {len(sites)} feed-forward sublayers were not measured inside ({left[0]})" if left else ""
    return found, (many,) if many else ()


def why_not(place: SitePlace, located: Located) -> str:
    """Why the inside of a site is not measured, "" where it is."""
    if place.inner is None:
        return place.no_inner or "no last linear map is known"
    if place.inner.width % located.width:
        return f"the hidden width {place.inner.width} is not a multiple of the stream's {located.width}"
    if located.module(place.inner.last).weight.device.type == "meta":
        return f"the weight of {place.inner.last} is offloaded"
    return ""


def prove_inner(
    located: Located, batch: Mapping[str, Any] | Tensor, tolerance: float | None = None
) -> dict[str, float]:
    """That W h + bias is what the sublayer gives: the largest error at every site whose last map is known; empty where none is.

    Relative to the norm of a token's output, W h in float64; in evaluation mode, where dropout is off. Raises: ProofError that names the
    first site that fails.
    """
    allowed = TOLERANCE.get(dtype_of(located.model), 1e-2) if tolerance is None else tolerance
    gave: dict[str, Tensor] = {}
    errors: dict[str, float] = {}

    def check(event: Event) -> None:
        place = event.place
        if event.inner is None or place.inner is None:
            return
        output, module = gave.pop(place.name), located.module(place.inner.last)
        error = gap(mapped(module, event.inner.h.to(output.device)), output, event.real.to(output.device))
        errors[place.name] = error
        if not error <= allowed:
            raise ProofError(
                f"the inside of {located.family!r} fails at {place.name} ({place.block}): {place.inner.last} of its input is not what "
                f"{place.inner.output.module} gives, off by {error:.2g} of its norm (allowed: {allowed:g}); give a map with another inner"
            )

    def keep(name: str, item: int) -> Any:
        return lambda _, args, output: gave.__setitem__(name, item_of(output, item).detach())

    handles = [
        located.module(place.inner.output.module).register_forward_hook(keep(place.name, place.inner.output.item))
        for place in located.sites
        if place.inner is not None
    ]
    try:
        with evaluating(located.model), watch(located, check, inner=True):
            run(located.model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return errors


def mapped(module: nn.Module, h: Tensor) -> Tensor:
    """W h + bias in float64."""
    weight, bias = linear_weight(module), module.bias
    assert weight is not None
    return F.linear(h.double(), weight.double(), None if bias is None else bias.double())  # type: ignore[operator]


class InnerStatistics:
    """Every block of one feed-forward site, and their mean. Memory: 6 columns a block."""

    def __init__(self, place: SitePlace, located: Located, units: Units):
        assert place.inner is not None
        self.module, self.width = located.module(place.inner.last), located.width
        self.blocks = place.inner.width // located.width
        columns: dict[str, Any] = {
            f"{name} {block}": FEW_SHARE if "fraction" in name else FEW_SIGNED
            for name in INNER_MEASURES
            for block in range(self.blocks)
        }
        self.table = Table(columns | dict.fromkeys(INNER_MEASURES), units)

    @property
    def bytes(self) -> int:
        return self.table.bytes

    def add(self, seen: InnerEvent, stream: Float[Tensor, "n d"], tokens: Tokens) -> None:
        """Count n tokens. stream: their raw states. One block at a time: what it writes is as wide as the stream."""
        x, h = tokens.flat(seen.x), tokens.flat(seen.h)
        weight = linear_weight(self.module)
        assert weight is not None
        found: list[list[Tensor]] = []
        for block in range(self.blocks):
            part = slice(block * self.width, (block + 1) * self.width)
            hidden = h[:, part]
            wrote = hidden @ wide(weight[:, part]).to(h).T
            pairs = [lengths(x, hidden), lengths(stream, hidden), lengths(hidden, wrote)]
            found.append([y for pair in pairs for y in (pair.coefficient, pair.fraction)])
        by_measure = [torch.stack(each) for each in zip(*found, strict=True)]  # each [g n]
        self.table.add(torch.cat([*by_measure, torch.stack([y.mean(0) for y in by_measure])]), tokens.unit)

    def measurements(self, fields: Mapping[str, Any]) -> Measurements:
        """Rows by block, whose number stands in ``stream``, and the mean over them."""
        rows, random = Measurements(), "random direction"
        share, none = Null(parallel_fraction_null(self.width), 0.0, random), Null(0.0, 0.0, random)
        nulls = {name: share if "fraction" in name else none for name in INNER_MEASURES}
        entries = entries_by_part(INNER_MEASURES, nulls, "stream", self.blocks, whole="mean")
        add_rows(rows, self.table, entries, fields)
        return rows
