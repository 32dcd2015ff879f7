"""What an edit really changed: its strength where it is applied, and what it amounts to on the diagonal of the attention weights."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from thalweg.capture import Located, Point, SitePlace, locate
from thalweg.capture.proof import dtype_name
from thalweg.editing.editor import Batch, batches_of, edit
from thalweg.editing.hooks import Heard, last_at
from thalweg.editing.options import EditOptions
from thalweg.editing.passes import Pass
from thalweg.editing.places import reference_of
from thalweg.errors import InputError
from thalweg.geometry.applied import applied_energy_ratio, applied_norm_ratio, retained_norm
from thalweg.geometry.diagonal import effective_diagonal
from thalweg.records import Measurements
from thalweg.statistics import spearman

STRENGTH = {
    "applied.norm_ratio": applied_norm_ratio,
    "applied.energy_ratio": applied_energy_ratio,
    "applied.retained": retained_norm,
}
Seen = Callable[[], Tensor | None]
LEAST_LAYERS = 4  # of a correlation, after the first and last are left out


@torch.no_grad()
def audit(
    model: nn.Module,
    batches: Batch | Sequence[Batch],
    options: EditOptions | None = None,
    *,
    map: Any = None,
    calibration: Any = None,
    **values: Any,
) -> Measurements:
    """How strong an edit is in every layer, in the pass that it is active in: means over real tokens, one row per measure and site.

    ``applied.norm_ratio``, ``applied.energy_ratio`` and ``applied.retained`` compare the output of the attention's output projection (of
    values) or the update that is added, before and after, at one and the same input: token by token, then averaged, so that the mean
    energy ratio is not the square of the mean norm ratio. ``effective_diagonal`` is the change of A_tt that the edit amounts to: by head for
    values (exact: what was added to o along v, over |v|^2), by layer for attention (only the product with the stream is matched). Its tail
    is long, so ``.median`` stands beside the mean.
    Raises: InputError for edits of blocks, which have no single output; what :func:`thalweg.editing.edit` raises.
    """
    options = EditOptions(**values) if options is None else options
    if options.site == "block":
        raise InputError("an audit looks at one sublayer's output; audit the sites attention and mlp in place of block")
    located = locate(model, map)
    found: dict[tuple[str, SitePlace, int | None], list[Tensor]] = defaultdict(list)
    with ExitStack() as stack:
        heard = stack.enter_context(_listening(located, options, found))
        facts = stack.enter_context(edit(model, options, map=map, calibration=calibration, heard=heard))
        for batch in batches_of(model, batches):
            model(**batch)
    rows = Measurements()
    for (name, place, head), parts in found.items():
        every = torch.cat(parts)
        where: dict[str, Any] = {
            "site": place.name,
            "layer": place.layer,
            "head": head,
            "n": len(every),
            "branch": options.site,
            "arm": options.describe(),
            "dtype": dtype_name(model),
            "null": 1.0 if name == "applied.retained" else 0.0,
            "null_kind": "no edit",
        }
        rows.add(name, float(every.mean()), **where)
        if name.startswith("effective_diagonal"):
            rows.add(f"{name}.median", float(every.median()), **where)
    if not len(rows):
        raise InputError(
            f"the edit ({facts.options.describe()}) changed nothing, so there is nothing to audit; choose other scales"
        )
    return rows


@contextmanager
def _listening(located: Located, options: EditOptions, found: dict):
    """Gives what listens to an edit and puts measures of the real tokens [n] into ``found``."""
    values: dict[int, Seen] = {}  # of a site, the output that holds its values
    states: dict[int, Seen] = {}  # what the update is added to
    with ExitStack() as stack:
        for place in located.attention:
            if place.heads is not None:
                values[place.index] = last_at(stack, located, Point(place.heads.value, "output"))
            if options.site == "attention":
                point = reference_of(located, place, options.reference)
                if point.side == "input":
                    states[place.index] = last_at(stack, located, point)
        yield _heard(located, options, found, values, states)


def _heard(located: Located, options: EditOptions, found: dict, values: dict, states: dict) -> Heard:
    def heard(place: SitePlace, before: Tensor, after: Tensor, now: Pass) -> None:
        def keep(name: str, value: Tensor, head: int | None = None) -> None:
            found[name, place, head].append(
                value[... if now.real is None else now.real.to(value.device)].flatten().cpu()
            )

        outputs = (before, after) if options.site != "value" else _projected(located, place, before, after)
        if outputs is not None:
            for name, measure in STRENGTH.items():
                keep(name, measure(*outputs))
        projected = values[place.index]() if place.index in values else None
        state = states[place.index]() if place.index in states else None
        if place.heads is None or projected is None:
            return
        v = place.heads.values(projected).repeat_interleave(place.heads.group, 2).to(before.device)
        if options.site == "value":
            change = effective_diagonal(after.double() - before.double(), v, v, 2.0)  # scale 2: just the ratio
            for head in range(change.shape[-1]):
                keep(
                    "effective_diagonal.value" if not options.excludes_self else "effective_diagonal.exclude_self",
                    change[..., head],
                    head,
                )
        elif state is not None and place.update in (place.sublayer, place.heads.output):  # no norm in between
            own = _unbiased(located.module(place.heads.output), place.heads.flat(v))
            z = state.to(before.device)
            keep("effective_diagonal.residual", effective_diagonal(after.double() - before.double(), z, own, 2.0))

    return heard


def _projected(located: Located, place: SitePlace, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both through the output projection; None where the heads do not go straight into it."""
    if place.heads is None:
        return None
    projection = located.module(place.heads.output)
    return projection.forward(place.heads.flat(before)), projection.forward(place.heads.flat(after))


def _unbiased(projection: nn.Module, flat: Tensor) -> Tensor:
    """The linear part of a projection."""
    return projection.forward(flat).double() - projection.forward(torch.zeros_like(flat)).double()


def correlation(geometry: Mapping[int, float], loss_change: Mapping[int, float], *, ends: bool = False) -> Measurements:
    """Does a layer's geometry say what its removal costs? Pearson and Spearman over layers.

    geometry, loss_change: one number per layer; the layers that both name count, but the first and the last unless ``ends``: they are
    outliers in every published table. Rows ``correlation.pearson`` (low, high: 95 % by Fisher's transformation) and
    ``correlation.spearman``; n: layers; null 0, that of permuted layers.
    Raises: InputError for fewer than four layers, numbers that are not finite, or that do not differ.
    """
    layers = sorted(geometry.keys() & loss_change.keys())
    layers = layers if ends else [layer for layer in layers if layer not in (min(layers), max(layers))]
    x = np.array([geometry[layer] for layer in layers], dtype=np.float64)
    y = np.array([loss_change[layer] for layer in layers], dtype=np.float64)
    if len(layers) < LEAST_LAYERS or not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise InputError(
            f"a correlation over layers needs at least {LEAST_LAYERS} layers with finite numbers, got {len(layers)}"
        )
    rows = Measurements()
    common = {"n": len(layers), "null": 0.0, "null_kind": "permuted layers"}
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        raise InputError("a correlation over layers needs numbers that differ between layers")
    pearson: Any = stats.pearsonr(x, y)
    between = pearson.confidence_interval(0.95)
    rows.add(
        "correlation.pearson",
        float(pearson.statistic),
        low=float(between.low),
        high=float(between.high),
        interval="95% Fisher",
        **common,
    )
    rows.add("correlation.spearman", spearman(x, y), **common)
    return rows
