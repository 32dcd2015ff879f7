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
        x[layer] = None if there is None else _beside(h.against, layer, there)
    return LayerTrial(h, {h.measure: y, h.against: x}, "layer", "layers", (h.measure, h.against))


def _beside(name: str, layer: int, found: Found) -> Observation:
    column = (found.unedited if name == "self_share" else found.row).layers.get(name) or []
    at = -1 if name == "drift" else layer
    value = column[at] if column and at < len(column) else None
    return Observation(value, reason=f"no {name} of layer {layer}: no document was audited")
