"""Sections that study and run reports share: loss curves, geometry by depth, diagnostics. Made from records of arms."""

import math
from collections.abc import Iterable, Mapping, Sequence

from thalweg.records.measurements import Measurement, Measurements
from thalweg.reports.figures import Figure, Line, lines
from thalweg.reports.text import mean_sd, number
from thalweg.studies.store import RunRecord

Arms = Mapping[str, Sequence[RunRecord]]  # arm -> its records, one per seed

# Measures by depth in reading order; others that were measured follow in alphabetical order. Title, what the reader should know.
DEPTH_MEASURES: dict[str, tuple[str, str]] = {
    "effective_rank": ("Normalised effective rank", "MGT Eq. 8: entropy of singular values, per sequence. Grey: a Gaussian of the same shape."),
    "effective_rank_centred": ("Normalised effective rank, centred", "The mean over tokens removed: what is left when the common direction is taken out."),
    "effective_rank_without_first": ("Normalised effective rank without the first token", "A sink at the first token lowers the plain one."),
    "token_cosine": ("Mean cosine between tokens", "1: all tokens point the same way. Null: 0 for random directions."),
    "rms": ("Root mean square of the stream", "Growth with depth; no null."),
    "residual_to_rank_one": ("Residual to rank one", "Dong et al. 2021: distance from the nearest matrix with equal rows, relative."),
    "gradient_norm": ("Gradient norm of each layer's sublayers", "Last training batch, before clipping."),
    "connection_distance": ("Distance of the connection's parameters from their start", "By layer; 0 means that it never moved."),
}
LOG_SCALE = ("rms", "stream_rms", "gradient_norm", "update_norm", "connection_distance", "state_norm")


def loss_figures(arms: Arms) -> list[Figure]:
    """Validation and training loss over tokens or steps."""
    found = []
    for name, title, y in (
        ("val/loss", "Validation loss", "nats/token"),
        ("train/loss", "Training loss", "nats/token"),
        ("task/exact_match", "Exact match", "share"),
    ):
        curves = [curve for arm, records in arms.items() if (curve := over_steps(arm, [r.series(name) for r in records])) is not None]
        if not curves:
            continue
        nulls = {key: value for record in _first(arms) for key, value in record.nulls.items() if key == "unigram_entropy" and "loss" in name}
        span = (min(c.x[0] for c in curves), max(c.x[-1] for c in curves))
        curves += [Line("unigram entropy", span, (value, value), null=True) for value in nulls.values()]
        count = max(len(records) for records in arms.values())
        found.append(lines(title, curves, x_label="step", y_label=y, caption=f"Mean over seeds (up to {count}); band: standard deviation."))
    return found


def over_steps(label: str, series: Sequence[Sequence[tuple[int, float]]]) -> Line | None:
    """Mean and standard deviation over seeds at the steps that all of them logged."""
    series = [s for s in series if s]
    if not series:
        return None
    tables = [dict(s) for s in series]
    steps = sorted(set.intersection(*(set(t) for t in tables)))
    return _line(label, steps, [[t[step] for t in tables] for step in steps]) if steps else None


def depth_figures(arms: Arms) -> list[Figure]:
    """One figure per measure that was taken by depth, at the last step measured."""
    measured = {row.measure for records in arms.values() for record in records for row in record.measures if row.layer is not None}
    order = [name for name in DEPTH_MEASURES if name in measured] + sorted(measured - set(DEPTH_MEASURES))
    return [figure for name in order if (figure := _depth_figure(name, arms)) is not None]


def _depth_figure(measure: str, arms: Arms) -> Figure | None:
    curves, example = [], None
    for arm, records in arms.items():
        profiles = [p for record in records if (p := record.depth_profile(measure))]
        if not profiles:
            continue
        layers = sorted(set.intersection(*(set(p) for p in profiles)))
        curves.append(_line(arm, layers, [[p[layer] for p in profiles] for layer in layers]))
        example = example or next(row for record in records for row in record.measures if row.measure == measure and row.layer is not None)
    if not curves or example is None or not any(math.isfinite(y) for curve in curves for y in curve.y):
        return None
    title, caption = DEPTH_MEASURES.get(measure, (measure.replace("_", " ").capitalize(), ""))
    curves += _null_curve(measure, arms)
    log = measure in LOG_SCALE and all(y > 0 for c in curves for y in c.y if math.isfinite(y))
    note = f"{caption} Last measurement; mean over seeds, band: standard deviation{f'; {example.n} sequences each' if example.n else ''}."
    return lines(title, curves, x_label="layer", y_label=example.unit or measure.replace("_", " "), caption=note.strip(), log_y=log)


def _null_curve(measure: str, arms: Arms) -> list[Line]:
    """The null of a measure by layer, if its rows carry one; the first arm that has it speaks for all, since shapes are shared."""
    for records in arms.values():
        rows = [row for record in records for row in record.measures if row.measure == measure and row.null is not None and row.layer is not None]
        last = max((row.step for row in rows if row.step is not None), default=None)
        by_layer = {row.layer: row for row in rows if row.step == last}
        if by_layer:
            layers = sorted(layer for layer in by_layer if layer is not None)
            kind = next(iter(by_layer.values())).null_kind
            return [Line(f"null: {kind}", layers, [_null(by_layer[layer]) for layer in layers], null=True)]
    return []


def _null(row: Measurement) -> float:
    return math.nan if row.null is None else row.null


def moved_table(arms: Arms) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Did the connection move: distance from the start, gradient into it, spikes."""
    wanted = {
        "moved/connection": "distance from start",
        "moved/connection_relative": "relative",
        "gradient/connection": "gradient norm into it",
        "gradient/norm": "gradient norm of all",
    }
    rows = [(arm, *(mean_sd([v for r in records if (v := r.last(name)) is not None]) for name in wanted)) for arm, records in arms.items()]
    return ("connection", *wanted.values()), rows


def final_scalars(measures: Measurements) -> dict[str, float]:
    """Measures without a layer, at the last step."""
    rows = [row for row in measures if row.layer is None]
    return {row.measure: row.value for row in rows}


def _line(label: str, x: Sequence[float], columns: Iterable[Sequence[float]]) -> Line:
    means, lows, highs = [], [], []
    for values in columns:
        mean = sum(values) / len(values)
        sd = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0
        means.append(mean)
        lows.append(mean - sd)
        highs.append(mean + sd)
    return Line(label, list(x), means, lows, highs)


def _first(arms: Arms) -> list[RunRecord]:
    return [record for records in arms.values() for record in records][:1]


__all__ = ["Arms", "depth_figures", "final_scalars", "loss_figures", "moved_table", "number", "over_steps"]
