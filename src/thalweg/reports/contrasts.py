"""The contrasts of a plan over training: whether a difference is there from the start, and whether it grows."""

import math
from collections.abc import Sequence

from thalweg.reports.curves import Arms, unit_of
from thalweg.reports.figures import Figure, Line, lines
from thalweg.reports.text import listed
from thalweg.studies.observe import IN_SERIES
from thalweg.studies.plan import Hypothesis
from thalweg.studies.statistics import paired
from thalweg.studies.store import RunRecord


def contrast_figures(hypotheses: Sequence[Hypothesis], arms: Arms) -> list[Figure]:
    """One figure for each logged series that is judged, a curve for each hypothesis on it: its contrast at every step."""
    measures = [*dict.fromkeys(h.measure for h in hypotheses if h.at in IN_SERIES)]
    return [*filter(None, (_figure(name, [h for h in hypotheses if h.measure == name], arms) for name in measures))]


def _figure(name: str, hypotheses: Sequence[Hypothesis], arms: Arms) -> Figure | None:
    curves: list[Line] = []
    left_out, unit = [], ""
    for look, h in enumerate(hypotheses):
        if not set(h.contrast) <= arms.keys():
            continue
        curve, gone = _over_steps(name, h, arms, look)
        left_out += [f"{h.id} seed {seed}" for seed in gone]
        if curve is not None:
            curves.append(curve)
            unit = unit or unit_of(next(iter(arms[next(iter(h.contrast))])), name)
    if not curves:
        return None
    span = (min(min(c.x) for c in curves), max(max(c.x) for c in curves))
    curves.append(Line("null: no difference", span, (0.0, 0.0), kind="null"))
    caption = (
        "Mean over the seeds that all arms of the contrast have, in the sign of the plan; band: its 95 % interval at each step, which no "
        "correction widens. Verdicts rest on the last step alone."
    )
    if left_out:
        caption += f" Diverged and left out: {listed(left_out)}."
    return lines(f"Contrasts over training ({name})", curves, x_label="step", y_label=unit or name, caption=caption)


def _over_steps(name: str, h: Hypothesis, arms: Arms, look: int) -> tuple[Line | None, list[int]]:
    """The curve of a hypothesis, None where fewer than two seeds or no step are common to its arms; seeds that a diverged run takes out."""
    found: dict[str, dict[int, RunRecord]] = {arm: {r.seed: r for r in arms[arm]} for arm in h.contrast}
    common = sorted(set.intersection(*(set(by_seed) for by_seed in found.values())))
    gone = [seed for seed in common if any(found[arm][seed].status == "diverged" for arm in h.contrast)]
    seeds = [seed for seed in common if seed not in gone]
    series = {(arm, seed): dict(found[arm][seed].series(name)) for arm in h.contrast for seed in seeds}
    steps = sorted(set.intersection(*(set(s) for s in series.values()))) if series else []
    if len(seeds) < 2 or len(steps) < 2:
        return None, gone
    values = {
        step: [sum(factor * series[arm, seed][step] for arm, factor in h.contrast.items()) for seed in seeds]
        for step in steps
    }
    steps = [step for step in steps if all(map(math.isfinite, values[step]))]
    judged = [paired(values[step]) for step in steps]
    if len(steps) < 2:
        return None, gone
    return (
        Line(
            h.id,
            steps,
            [p.estimate for p in judged],
            look=look,
            low=[p.low for p in judged],
            high=[p.high for p in judged],
        ),
        gone,
    )
