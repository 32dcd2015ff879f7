"""Series over training: mean over the seeds that ended, diverged runs each on its own."""

from collections.abc import Mapping, Sequence

from thalweg.reports.figures import Figure, Line, lines
from thalweg.reports.text import deviation, listed, mean
from thalweg.studies.observe import unlearned
from thalweg.studies.store import RunRecord

Arms = Mapping[str, Sequence[RunRecord]]  # arm -> its records, one per seed
MOST_LOST = 12  # diverged runs that get a curve of their own

FIRST = ("val/loss", "train/loss")
TITLES = {"val/loss": "Validation loss", "train/loss": "Training loss", "val/bits_per_byte": "Bits per byte"}
# What the tables or the diagnostics show; a curve would repeat the loss.
LEFT_TO_TABLES = ("val/bits_per_byte", "val/perplexity", "task/accuracy_low", "task/accuracy_high")

# The unit of a series whose record names none.
UNITS = {
    "val/loss": "nats/token",
    "train/loss": "nats/token",
    "val/bits_per_byte": "bits/byte",
    "task/accuracy": "share",
    "task/token_accuracy": "share",
    "task/exact_match": "share",
}


def sound(records: Sequence[RunRecord]) -> list[RunRecord]:
    """The records that stand for an arm: those that did not diverge."""
    return [record for record in records if record.status != "diverged"]


def lost(arms: Arms) -> list[str]:
    """``arm seed k`` of every diverged run."""
    return [f"{arm} seed {r.seed}" for arm, records in arms.items() for r in records if r.status == "diverged"]


def dull(arms: Arms) -> dict[str, list[str]]:
    """Arm -> ``seed k: why`` of its runs that have not learned by the rule of the verdicts; arms without such runs left out."""
    found = {
        arm: [f"seed {r.seed}: {why}" for r in sound(records) if (why := unlearned(r))] for arm, records in arms.items()
    }
    return {arm: runs for arm, runs in found.items() if runs}


def training_figures(arms: Arms) -> list[Figure]:
    """Loss and task metrics over the steps."""
    names = {name for records in arms.values() for r in records for name in r.metrics}
    chosen = [
        *FIRST,
        *sorted(n for n in names if n.startswith(("val/", "task/")) and n not in (*FIRST, *LEFT_TO_TABLES)),
    ]
    return [figure for name in chosen if name in names for figure in _by_unit(name, arms)]


def unit_of(record: RunRecord, name: str) -> str:
    """Of a logged series of a run, or of what stands beside it; empty if nobody says."""
    return record.units.get(name) or UNITS.get(name, "")


def units_of(arms: Arms, name: str) -> list[str]:
    """The different units in which the runs logged a series."""
    return [*dict.fromkeys(unit_of(r, name) for records in arms.values() for r in records if r.series(name))]


def _by_unit(name: str, arms: Arms) -> list[Figure]:
    """A series over the steps, once for each of its units: losses per token and per sequence share no axis."""
    units, found = units_of(arms, name), []
    for unit in units:
        alike = {arm: [r for r in records if unit_of(r, name) == unit] for arm, records in arms.items()}
        found.append(_over_steps(name, alike, unit, f" [{unit}]" if len(units) > 1 else ""))
    return [*filter(None, found)]


def _over_steps(name: str, arms: Arms, unit: str, more: str) -> Figure | None:
    curves: list[Line] = []
    count, left_out = 0, []
    for look, (arm, records) in enumerate(arms.items()):
        series = [r.series(name) for r in sound(records) if r.series(name)]
        count = max(count, len(series))
        curve = averaged(arm, series, look)
        curves += [curve] if curve is not None else []
        for record in records:
            points = record.series(name) if record.status == "diverged" else []
            if points and sum(c.kind == "lost" for c in curves) < MOST_LOST:
                label = f"{arm} seed {record.seed} (diverged)"
                curves.append(Line(label, [s for s, _ in points], [v for _, v in points], look=look, kind="lost"))
            elif points:
                left_out.append(f"{arm} seed {record.seed}")
    if not curves:
        return None
    curves += _null(name, arms, curves)
    caption = f"Mean over {count} seeds" if count > 1 else "One seed" if count else "No run ended"
    caption += "; band: standard deviation over seeds." if count > 1 else "."
    if left_out:
        caption += f" Diverged and not drawn: {listed(left_out)}."
    title = TITLES.get(name, name.partition("/")[2].replace("_", " ").capitalize() + f" ({name.partition('/')[0]})")
    return lines(f"{title}{more}", curves, x_label="step", y_label=unit or title.lower(), caption=caption)


def averaged(label: str, series: Sequence[Sequence[tuple[int, float]]], look: int) -> Line | None:
    """Mean and standard deviation over seeds at the steps that all of them logged; None if there is none."""
    tables = [dict(s) for s in series if s]
    steps = sorted(set.intersection(*(set(t) for t in tables))) if tables else []
    if not steps:
        return None
    columns = [[t[step] for t in tables] for step in steps]
    return Line(label, steps, [mean(c) for c in columns], [deviation(c) for c in columns], look)


def _null(name: str, arms: Arms, curves: Sequence[Line]) -> list[Line]:
    """The unigram entropy beside a loss, once for each value that the arms' data have."""
    if not name.endswith("/loss"):
        return []
    span = (min(min(c.x) for c in curves), max(max(c.x) for c in curves))
    found: dict[float, list[str]] = {}
    for arm, records in arms.items():
        for value in {v for r in records if isinstance(v := r.nulls.get("unigram_entropy"), int | float)}:
            found.setdefault(value, []).append(arm)
    return [
        Line(f"null: unigram entropy{f' ({listed(who, 3)})' if len(found) > 1 else ''}", span, (v, v), kind="null")
        for v, who in sorted(found.items())
    ]
