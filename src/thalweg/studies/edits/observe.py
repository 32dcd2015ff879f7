"""What records of edits say about a hypothesis: one number for each document, or for each layer."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from thalweg.studies.edits.plan import EditHypothesis, EditPlan
from thalweg.studies.edits.store import EditRecord, EditRow
from thalweg.studies.judging import Trial
from thalweg.studies.observe import Observation, observed
from thalweg.studies.statistics import Paired, ranked


@dataclass(frozen=True)
class Found:
    """What the records hold for an arm: its row, that of its no-op, that of the unedited model, and the tokens behind the numbers."""

    row: EditRow
    noop: EditRow
    unedited: EditRow
    record: EditRecord


Records = Mapping[str, Found]


@dataclass(frozen=True)
class LayerTrial(Trial):
    """A hypothesis over layers: ``seen`` holds the measure and what it is ranked against, each by layer."""

    order: tuple[str, str] = field(default=("", ""))

    def values(self) -> dict[int, float]:
        """The measure of each layer."""
        return {k: o.value for k, o in self.seen[self.order[0]].items()}  # type: ignore[union-attr, misc]  # complete

    def test(self, level: float) -> Paired:
        y, x = ([o.value for o in self.seen[name].values()] for name in self.order)  # type: ignore[union-attr]  # complete
        sign = self.h.sign()
        return ranked(x, [sign * v for v in y], margin=sign * self.h.margin, level=level)  # type: ignore[arg-type, operator]


def trials(plan: EditPlan, scale: str, found: Records) -> list[Trial]:
    """Every hypothesis at a scale with its observations."""
    units = range(plan.at(scale).documents)
    made: list[Trial] = []
    for h in plan.hypotheses_at(scale):
        if h.against:
            made.append(_over_layers(plan, h, found))
        else:
            seen = {arm: observe(h, found.get(arm), units) for arm in h.contrast}
            made.append(Trial(h, seen, "document", "documents"))
    return made


def observe(h: EditHypothesis, found: Found | None, units: range) -> dict[int, Observation | None]:
    """Document -> the value of an arm."""
    if found is None:
        return dict.fromkeys(units)
    values = measured(h.measure, h.at, found)
    return {u: observed(h, values[u]) if u < len(values) else None for u in units}


def measured(measure: str, at: str, found: Found) -> list[float]:
    """One number for each document that the arm read."""
    if measure == "embedding_change":
        return [1 - row[0] for row in found.row.columns["cosine"]]
    if measure == "order_change":
        return [1 - row[0] for row in found.row.columns["order"]]
    loss = np.array(found.row.columns["nats"]) / np.array(found.record.tokens)
    with np.errstate(invalid="ignore"):  # what is not finite takes the value of its rule
        if measure == "loss_change":
            loss = loss - np.array(found.noop.columns["nats"]) / np.array(found.record.tokens)
        by = {"all": loss.mean(1), "first": loss[:, 0], "last": loss[:, -1], "growth": loss[:, -1] - loss[:, 0]}
    return by[at].tolist()


def _over_layers(plan: EditPlan, h: EditHypothesis, found: Records) -> Trial:
    """Of single layers, without the first and the last, which are outliers in every published table."""
    (family,) = h.contrast
    arms = [arm for arm in plan.members[family] if arm.alone is not None][1:-1]
    y: dict[int, Observation | None] = {}
    x: dict[int, Observation | None] = {}
    for arm in arms:
        layer, there = int(arm.alone or 0), found.get(arm.name)
        y[layer] = None if there is None else observed(h, float(np.mean(measured(h.measure, h.at, there))))
        x[layer] = None if there is None else _beside(h, layer, there)
    seen = {name: _spread(name, column) for name, column in ((h.measure, y), (h.against, x))}
    return LayerTrial(h, seen, "layer", "layers", (h.measure, h.against))


def _beside(h: EditHypothesis, layer: int, found: Found) -> Observation:
    name, row = h.against, found.unedited if h.against == "self_share" else found.row
    column, at = row.layers.get(name) or [], -1 if name == "drift" else layer
    value = column[at] if column and at < len(column) else None
    if value is not None:
        return observed(h, value)
    why = "its audit measures none" if row.layers else "no document was audited"
    return Observation(None, reason=f"no {name} of layer {layer}: {why}")


def _spread(name: str, column: dict[int, Observation | None]) -> dict[int, Observation | None]:
    """A column over layers; where all its values are one, nothing can be ranked by them and none is left."""
    values = {o.value for o in column.values() if o is not None}
    if len(values) != 1 or None in column.values() or None in values:
        return column
    reason = f"all layers have the same {name}, {values.pop():g}, so that it orders nothing"
    return dict.fromkeys(column, Observation(None, reason=reason))
