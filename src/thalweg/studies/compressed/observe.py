"""What records of compressions say about a hypothesis: one number for each document."""

import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from thalweg.statistics import spearman
from thalweg.studies.compressed.plan import ERRORS, CompressionArm, CompressionHypothesis, CompressionPlan, alone
from thalweg.studies.edits.observe import Found
from thalweg.studies.edits.store import EditRow
from thalweg.studies.judging import Trial
from thalweg.studies.observe import Observation, observed

Records = Mapping[str, Found]
LEAST = 5  # arms or layers that a rank correlation needs


def trials(plan: CompressionPlan, scale: str, found: Records) -> list[Trial]:
    """Every hypothesis at a scale with its observations."""
    units = range(plan.at(scale).documents)
    return [
        Trial(h, _observed(plan, scale, h, found, units), "document", "documents") for h in plan.hypotheses_at(scale)
    ]


def _observed(
    plan: CompressionPlan, scale: str, h: CompressionHypothesis, found: Records, units: range
) -> dict[str, dict[int, Observation | None]]:
    if any(name not in found for name in plan.named_by(h, scale)):
        return {column: dict.fromkeys(units) for column in h.contrast}
    if h.measure in ("rank", "layer_rank"):
        arms = plan.ranked(h.subject, scale) if h.measure == "rank" else alone(plan.members[h.family])[1:-1]
        values = {name: ranks(name, h.branch, h.fidelity, arms, found) for name in h.contrast}
    elif h.measure == "correlation":
        values = {part: correlations(found[h.arm].row, h.branch, part) for part in h.contrast}
    elif h.measure == "error":
        values = {name: error_of(found[name].row, h.branch, h.part) for name in h.contrast}
    else:
        values = {name: fidelity(h.measure, found[name]) for name in h.contrast}
    return {
        column: {u: observed(h, by_document[u]) if u < len(by_document) else None for u in units}
        for column, by_document in values.items()
    }


def fidelity(measure: str, found: Found) -> list[float]:
    """What the compression costs each document: nats/token, or the drop of the cloze accuracy; infinity where it is not finite."""
    if measure == "kl":
        return [row[0] for row in found.row.columns["kl"]]
    if measure == "accuracy_drop":
        pairs = zip(found.noop.columns["correct"], found.row.columns["correct"], strict=True)
        return [before[0] - after[0] for before, after in pairs]
    tokens = found.record.tokens
    pairs = zip(found.row.columns["nats"], found.noop.columns["nats"], tokens, strict=True)
    return [(after[0] - before[0]) / n[0] for after, before, n in pairs]


def error_of(row: EditRow, branch: str, part: str) -> list[float]:
    """Mean over layers of a part of the error, on each document that errors were read on."""
    return [float(np.mean(layers)) for layers in row.columns[f"{branch}.{part}"]]


def predicted(name: str, branch: str, arm: CompressionArm, found: Found) -> float:
    """What a predictor says of a whole arm, or of the one layer that an arm compresses."""
    if name == "chance":
        return zlib.crc32(arm.name.encode()) / 2**32  # a fixed order that knows nothing
    by_layer = layerwise(name, branch, found.row)
    return float(np.mean(by_layer)) if arm.alone is None else by_layer[arm.alone]


def layerwise(name: str, branch: str, row: EditRow) -> list[float]:
    """A predictor by layer, the mean over the documents that it was read on."""
    if name in ERRORS:
        return np.mean(np.array(row.columns[f"{branch}.{name}"], dtype=float), axis=0).tolist()
    return [math.nan if v is None else v for v in row.layers[name]]


def ranks(name: str, branch: str, measure: str, arms: Sequence[CompressionArm], found: Records) -> list[float]:
    """For each document, Spearman's correlation over arms of a predictor with the fidelity that the document saw. Ties: mean ranks."""
    x = [predicted(name, branch, arm, found[arm.name]) for arm in arms]
    columns = np.array([fidelity(measure, found[arm.name]) for arm in arms], dtype=float)
    return [_rank(x, column) for column in columns.T]


def correlations(row: EditRow, branch: str, part: str) -> list[float]:
    """For each document, Spearman's correlation over layers but the first and the last of the total error with a part of it."""
    pairs = zip(row.columns[f"{branch}.total"], row.columns[f"{branch}.{part}"], strict=True)
    return [_rank(total[1:-1], other[1:-1]) for total, other in pairs]


def _rank(x: Sequence[float], y: Sequence[float] | np.ndarray) -> float:
    return math.nan if len(x) < LEAST else spearman(x, y, constant=0.0)  # a constant orders nothing
