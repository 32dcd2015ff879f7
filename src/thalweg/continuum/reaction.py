"""The feed-forward sublayers as a reaction field: do they rotate the stream, and what would symmetric ones do to its growth with depth?"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.capture.evaluating import evaluating
from thalweg.capture.layout import Located, SitePlace
from thalweg.capture.proof import called, gap
from thalweg.capture.states import Tokens
from thalweg.capture.tables import Units
from thalweg.capture.watching import Event, watch
from thalweg.capture.windows import Text
from thalweg.continuum.base import Figure, Finding, Probe, ProbeOptions, Subject, UnitMeans, batches, register
from thalweg.continuum.feed_forward import RISING, Maps, Variant, find_maps, jacobian_of, variant_of
from thalweg.continuum.fields import widened
from thalweg.continuum.passes import states_only
from thalweg.geometry.eigenvalues import (
    GINIBRE_IMAGINARY,
    antisymmetric_null,
    antisymmetric_share,
    eigenvalues,
    growth_rate,
    imaginary_share,
    negative_share,
)
from thalweg.geometry.jacobian import jacobian_matrix
from thalweg.ops.precision import wide
from thalweg.records import Measurements

CONTROLS: tuple[Variant, ...] = ("norm_matched", "rotated", "random_symmetric")
GIVEN = 1e-3  # how near a norm of the state must come to what the sublayer is given


@dataclass(frozen=True)
class ReactionOptions(ProbeOptions):
    """points: tokens of each layer whose Jacobian is looked at. layers: of the ablated ones whose Jacobians are looked at, evenly spread.

    ablate: whether the model is run with other weights, on the windows of the first ``ablate_tokens``.
    """

    points: int = 2
    layers: int = 4
    ablate: bool = True
    ablate_tokens: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(points=1, layers=1, ablate_tokens=4)


class Point(NamedTuple):
    """A token at a feed-forward site. x: what the sublayer is given; state: of the stream. The norm between them, or
    None where it is not known.
    """

    place: SitePlace
    x: Tensor
    state: Tensor
    norm: str | None


@register(
    "reaction",
    summary="spectrum of the feed-forward Jacobian at real tokens, and growth with depth when its weights are tied",
    source="Liang 2026, arXiv 2607.17146 (93x to 142,955x on one model, in words; text not readable); "
    "definitions, gated case and controls by us",
)
class Reaction(Probe):
    """Jacobians of y = W act(U x) or W (act(G x) * U x) at a few tokens of every layer; then whole passes with W = U^T (and G = U).

    The weights of the model are not touched: a pass with others takes them as arguments (``torch.func.functional_call``).
    """

    Options = ReactionOptions
    title = "Feed-forward sublayers as a reaction"

    def applies(self, subject: Subject) -> str | None:
        places = [place for place in subject.place.sites if place.kind == "feed_forward"]
        if not places:
            return "it has no feed-forward sublayers of their own"
        why = [place.no_inner or "its last linear map is not known" for place in places if place.inner is None]
        if len(why) == len(places):
            return f"no feed-forward sublayer shows its maps ({why[0]})"
        return None

    def run(self, subject: Subject, text: Text | None, options: ReactionOptions) -> Finding:
        assert text is not None
        located, rows = subject.place, Measurements()
        model, more = located.model, states_only(located.model)
        first = next(text.batches(1))
        call = {name: x[:, : max(options.points + 1, 64)] for name, x in first.call.items()}
        with evaluating(model):
            maps, left = find_maps(located, call, more)
            if not maps:
                return Finding("reaction", not_applicable=left[0])
            points = _points(located, maps, call, more, options)
            _spectra(located, maps, points, options, rows)
            excess = _ablate(subject, maps, text, options, rows) if options.ablate else None
        kinds = sorted({one.activation for one in maps})
        gated = maps[0].gate is not None
        caveats = [
            (
                f"Jacobians are those of {options.points} tokens of one window in each layer; amplification is that of "
                f"{options.ablate_tokens} tokens at most, the first of every window left out."
            ),
            "Eigenvalues of one token's Jacobian are local: attention moves tokens between two of them.",
            "Tied weights are not trained: an ablation says what these weights do, not what a symmetric model would learn.",
        ]
        if gated:
            caveats.append("Gated: W = U^T alone (tied_down) is not symmetric; symmetric ties the gate too.")
        if not set(kinds) <= set(RISING):
            caveats.append(
                f"{', '.join(kinds)} falls in places, so a symmetric Jacobian may have negative eigenvalues."
            )
        if left:
            caveats.append(f"{len(left)} feed-forward sublayers were left as they are ({left[0]}).")
        share = _mean(rows, "reaction.imaginary_share", branch="model")
        words = [f"imaginary share {share:.2f} (random {GINIBRE_IMAGINARY:.2f})"]
        words += [] if excess is None else [excess]
        return Finding(
            "reaction", summary="; ".join(words), rows=rows, caveats=tuple(caveats), figures=FIGURES, sketch=bool(left)
        )


def _points(
    located: Located, maps: list[Maps], call: dict[str, Tensor], more: dict, options: ReactionOptions
) -> list[Point]:
    """The tokens of the first window, evenly spread behind its first, at every site."""
    sites, found = {one.place.index for one in maps}, []

    def see(event: Event) -> None:
        if event.place.index not in sites or event.inner is None:
            return
        length = int(event.real[0].sum())
        at = torch.linspace(1, length - 1, min(options.points, length - 1)).round().long()
        x, state = event.inner.x, event.state
        norm = event.place.state.module
        if norm == event.place.sublayer:
            known = None
        else:
            again = located.module(norm)(state)
            fits = isinstance(again, Tensor) and again.shape == x.shape and gap(again, x, event.real) <= GIVEN
            known = norm if fits else None
        found.extend(Point(event.place, x[0, i].clone(), state[0, i].clone(), known) for i in at.tolist())

    with watch(located, see, inner=True):
        located.model(**called(located.model, call), **more)
    return found


def _spectra(
    located: Located, maps: list[Maps], points: list[Point], options: ReactionOptions, rows: Measurements
) -> None:
    by_site = {one.place.index: one for one in maps}
    width = located.width
    chosen = {
        maps[round(i)].place.index for i in torch.linspace(0, len(maps) - 1, min(options.layers, len(maps))).tolist()
    }
    nulls: dict[str, tuple[Any, float, str]] = {
        "imaginary_share": (imaginary_share, GINIBRE_IMAGINARY, "2/pi: independent normal entries"),
        "antisymmetric_share": (antisymmetric_share, antisymmetric_null(width), "independent entries"),
        "negative_share": (negative_share, 0.5, "1/2: independent normal entries"),
        "growth_rate": (growth_rate, 0.0, "nothing grows"),
    }

    def add(branch: str, place: SitePlace, found: list[Tensor]) -> None:
        stack = torch.stack(found)
        spectrum = eigenvalues(stack)  # most of the time of this probe: once for the two shares that need it
        for name, (function, null, kind) in nulls.items():
            values = (
                function(stack, values=spectrum) if name in ("imaginary_share", "negative_share") else function(stack)
            )
            where = {"site": place.name, "layer": place.layer, "branch": branch, "n": len(values)}
            rows.add(f"reaction.{name}", values.mean().item(), null=null, null_kind=kind, **where)

    for index, one in by_site.items():
        here = [point for point in points if point.place.index == index]
        own = one.weights(located)
        jacobians = [jacobian_of(one, located, own, wide(point.x)) for point in here]
        add("model", one.place, jacobians)
        if index not in chosen:
            continue
        if all(point.norm is not None for point in here):
            with_norm = [j @ _norm_jacobian(located, point) for j, point in zip(jacobians, here, strict=True)]
            add("with its norm", one.place, with_norm)
        for variant in _variants(one):
            weights = variant_of(one, located, variant, _generator(options, index))
            add(variant, one.place, [jacobian_of(one, located, weights, wide(point.x)) for point in here[:1]])


def _norm_jacobian(located: Located, point: Point) -> Tensor:
    assert point.norm is not None
    run = widened(located.module(point.norm))  # columns of a 16-bit Jacobian would be rounding
    return jacobian_matrix(lambda v: run((v[None, None],), {})[0, 0], wide(point.state)).double()


def _variants(maps: Maps) -> tuple[Variant, ...]:
    return ("symmetric", *(("tied_down",) if maps.gate is not None else ()), *CONTROLS)


def _generator(options: ReactionOptions, site: int) -> torch.Generator:
    return torch.Generator().manual_seed(options.seed * 100_003 + site)


def _ablate(subject: Subject, maps: list[Maps], text: Text, options: ReactionOptions, rows: Measurements) -> str:
    """Growth of the states with depth, of the model and with other weights; what symmetric weights add to it, against each control."""
    located = subject.place
    growths: dict[str, Tensor] = {}
    variants: tuple[Variant, ...] = ("model", *_variants(maps[0]))
    unit = torch.zeros(0, dtype=torch.long)
    for variant in variants:
        weights: dict[str, Tensor] = {}
        if variant != "model":
            for one in maps:
                made = variant_of(one, located, variant, _generator(options, one.place.index))
                weights |= one.replaced(located, *made)
        grown, units, read = [], [], 0
        for batch in batches(text, options, subject):
            if read >= options.ablate_tokens:
                break
            growth, tokens = _growth(located, weights, batch.call, batch.unit_of_row)
            grown.append(growth.cpu())
            units.append(tokens.unit.cpu())
            read += batch.input_ids.numel()
        growths[variant], unit = torch.cat(grown), torch.cat(units)
    seen, unit = unit.unique(return_inverse=True)
    counted = Units(len(seen), text.units.name)  # units that were not read would leave resamples empty
    for variant, growth in growths.items():
        means = UnitMeans(counted, located.depth)
        means.add(unit, growth)
        fields = [
            {
                "site": f"layers.{i}",
                "layer": i + 1,
                "branch": variant,
                "unit": "nats",
                "null": 0.0,
                "null_kind": "no growth",
            }
            for i in range(located.depth)
        ]
        means.rows(rows, ["reaction.log_amplification"] * located.depth, fields)
    words = []
    symmetric = growths["symmetric"][:, -1]
    against: tuple[Variant, ...] = ("model", *CONTROLS)
    differences = UnitMeans(counted, len(against))
    differences.add(unit, torch.stack([symmetric - growths[one][:, -1] for one in against], 1))
    fields = [
        {"branch": f"symmetric - {one}", "unit": "nats", "null": 0.0, "null_kind": "no difference"} for one in against
    ]
    differences.rows(rows, ["reaction.excess"] * len(against), fields)
    for one in ("model", "symmetric", "norm_matched"):
        words.append(
            f"{one.replace('_', ' ')} x{math.exp(min(_mean(rows, 'reaction.log_amplification', branch=one, layer=located.depth), 700)):,.3g}"
        )
    return "growth over depth: " + ", ".join(words)


def _growth(
    located: Located, weights: dict[str, Tensor], call: dict[str, Tensor], unit_of_row: Tensor
) -> tuple[Tensor, Tokens]:
    """log |x_l| / |x_0| of every token but the first of its window, after every layer [n depth], and the tokens."""
    sizes: dict[int, Tensor] = {}
    ends = {place.layer: place.index for place in located.sites}  # last site of every layer
    real: list[Tensor] = []

    def see(event: Event) -> None:
        if not sizes:
            sizes[-1] = torch.linalg.vector_norm(wide(event.state), dim=-1)
            real.append(event.real.clone())
        if ends[event.place.layer] == event.place.index:
            sizes[event.place.layer] = torch.linalg.vector_norm(wide(event.following), dim=-1)

    full = {**called(located.model, call), **states_only(located.model)}
    with watch(located, see):
        torch.func.functional_call(located.model, weights, (), full)
    keep = real[0].clone()
    keep[:, 0] = False
    tokens = Tokens.of(keep, unit_of_row.to(keep.device))
    start = sizes.pop(-1)
    logs = torch.stack(
        [(size / start.clamp(min=1e-30)).clamp(min=1e-30).double().log() for _, size in sorted(sizes.items())], -1
    )
    return logs[keep].nan_to_num(nan=math.inf), tokens


def _mean(rows: Measurements, measure: str, **where: object) -> float:
    values = [row.value for row in rows.where(measure=measure, **where)]
    return sum(values) / len(values) if values else math.nan


FIGURES = (
    Figure(
        "Share of the spectrum that rotates",
        ("reaction.imaginary_share",),
        y_label="sum |Im| / sum |eigenvalue|",
        lines="branch",
        note="Symmetric weights have none; a gate that is not tied keeps some.",
    ),
    Figure(
        "Growth of the states with depth",
        ("reaction.log_amplification",),
        x_label="layers passed",
        y_label="log of norm over that at the start, nats",
        lines="branch",
        note="What symmetric weights add is what stands above the controls with the same norms, not above the model.",
    ),
)
