"""Tables over arms: quality and cost with their nulls, did it move, scalar measures, learning rates."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.records.measurements import Measurement
from thalweg.reports.curves import UNITS, Arms, sound, unit_of, units_of
from thalweg.reports.datasets import data_key, data_name
from thalweg.reports.measures import in_own_table, plain
from thalweg.reports.text import NONE, big, counted, listed, mean_sd, number, within, words
from thalweg.studies.observe import unlearned
from thalweg.studies.plan import Plan
from thalweg.studies.store import RunRecord


@dataclass(frozen=True)
class Table:
    """Columns and rows of text, the first cell of a row its heading; note: what a reader must know."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""


UNLIKE = 0.05  # difference in size or cost between the arms of a contrast that is pointed out
COST_NOTE = (
    "FLOPs are those of training. Tokens/s and peak memory (of the process on a CPU, of tensors on a GPU) are {those} on this machine with "
    "whatever ran beside: compare them within this table only. Not learned: runs whose loss is not below the unigram entropy, or "
    "whose bits/byte are not below what xz, a general compressor, reaches on the same text. Nulls are of the data, "
    "which are named where the runs had several."
)
INTERVAL = " In brackets behind an accuracy of one run: its 95 % Wilson interval."
SPREAD = "Mean ± standard deviation over seeds"
ALONE = "One run each: no spread over seeds is known"
STABILITY = {  # how the heading of a measure begins -> what it is
    "stability spikes": "spikes: share of steps whose training loss is above the 90 % quantile of the steps just before",
    "stability gradient variation": "gradient variation: standard deviation over mean of the gradient norm after the warm-up",
}


def spread_of(arms: Arms) -> str:
    """What a cell with several seeds shows, or that there is one run each."""
    return SPREAD if any(len(records) > 1 for records in arms.values()) else ALONE


COSTS = ("parameters", "of the connection", "FLOPs/token", "tokens/s", "peak memory", "tokens")


def cost_table(arms: Arms, roles: Mapping[str, str]) -> Table:
    """Quality beside cost, one row per arm, then the nulls of the data."""
    quality = quality_of(arms)
    rows = []
    for arm, records in arms.items():
        role = roles.get(arm, "")
        name = f"{arm} ({role})" if role and role != "treatment" else arm
        rows.append((name, _counts(records, sound(records)), *cost_cells(records, quality)))
    several = any(len(sound(records)) > 1 for records in arms.values())
    over = f"{SPREAD.removesuffix(' over seeds')} over the runs that did not diverge" if several else "One run each"
    note = f"{over}, at their last evaluation. "
    return Table(
        ("arm", "runs", *quality.values(), *COSTS),
        [*rows, *null_rows(arms, quality)],
        note + cost_note(arms, "medians") if any(arms.values()) else "",
    )


def cost_note(arms: Arms, those: str) -> str:
    """What a reader of quality beside cost must know. those: what the cells of speed and memory are."""
    bounded = any(r.series(f"task/accuracy{ENDS[0]}") for records in arms.values() for r in records)
    return COST_NOTE.format(those=those) + (INTERVAL if bounded else "")


Quality = Mapping[tuple[str, str], str]  # a logged series and its unit -> the heading of its column
ENDS = ("_low", "_high")  # of the interval of a share, which stands behind the share


def quality_of(arms: Arms, loss: str = "final loss") -> Quality:
    """The columns that tell how good a run is, those that some run fills: one of losses for each unit, since two cannot be compared."""
    names = {name for records in arms.values() for r in records for name, series in r.metrics.items() if series}
    bits = "val/bits_per_byte"
    quality = {("val/loss", unit): f"{loss} [{unit}]" for unit in units_of(arms, "val/loss") or [UNITS["val/loss"]]}
    quality |= {(bits, unit): "bits/byte" for unit in units_of(arms, bits)}
    tasks = sorted(n for n in names if n.startswith("task/") and not n.endswith(ENDS))
    return quality | {(n, u): n.removeprefix("task/").replace("_", " ") for n in tasks for u in units_of(arms, n)}


def cost_cells(records: Sequence[RunRecord], quality: Quality) -> tuple[str, ...]:
    """Quality and cost of one arm: the cells under ``quality`` and ``COSTS``."""
    ended = sound(records)
    return (
        *(_reached([r for r in ended if unit_of(r, name) == unit], name) for name, unit in quality),
        big(_middle(records, "parameters")),
        big(_middle(records, "connection_parameters")),
        big(_middle(records, "flops_per_token")),
        number(_middle(ended or records, "tokens_per_second"), 3),
        big(_middle(ended or records, "peak_memory"), "B"),
        big(_middle(ended or records, "tokens")),
    )


def _reached(records: Sequence[RunRecord], name: str) -> str:
    """The last value of a series, of one run with its interval if it logged one."""
    found = [(r, value) for r in records if (value := r.last(name)) is not None]
    ends = [found[0][0].last(f"{name}{end}") for end in ENDS] if len(found) == 1 else [None]
    return mean_sd([value for _, value in found]) if None in ends else within(found[0][1], *ends)


def null_rows(arms: Arms, quality: Quality) -> list[tuple[str, ...]]:
    """The nulls of the data under a name, one other column, ``quality`` and ``COSTS``; where runs had different data, of each of them."""
    empty = (NONE,) * len(COSTS)
    sets = _by_data(arms)
    return [
        (
            f"null: {label}{f' ({data})' if len(sets) > 1 else ''}",
            NONE,
            *(number(found.get(name) if unit_of(record, name) == unit else None) for name, unit in quality),
            *empty,
        )
        for data, record in sets.items()
        for label, found in nulls_of(record).items()
    ]


def _by_data(arms: Arms) -> dict[str, RunRecord]:
    """The name of each data set -> the first record with its nulls; where two have one name, also the arms that had it."""
    found: dict[str, list[tuple[str, RunRecord]]] = {}
    for arm, records in arms.items():
        for r in records:
            # A run that was killed says less of its data than one that ended: its nulls are theirs.
            twin = next((key for key, had in found.items() if had[0][1].nulls == r.nulls), data_key(r))
            if r.nulls:
                found.setdefault(twin, []).append((arm, r))
    names = [listed(dict.fromkeys(data_name(r) for _, r in had), 3) for had in found.values()]
    return {
        name if names.count(name) == 1 else f"{name} of {listed(dict.fromkeys(arm for arm, _ in had), 3)}": had[0][1]
        for name, had in zip(names, found.values(), strict=True)
    }


def _counts(records: Sequence[RunRecord], ended: Sequence[RunRecord]) -> str:
    """Runs that ended, with those that diverged and those that have not learned."""
    gone, dull = len(records) - len(ended), sum(bool(unlearned(r)) for r in ended)
    parts = [str(len(ended)), f"{gone} diverged" if gone else "", f"{dull} not learned" if dull else ""]
    return ", ".join(filter(None, parts))


def arm_table(plan: Plan, scale: str | None = None) -> Table:
    """What each arm (None: of any scale) is: connection, options, its own training values, what it is matched to."""
    rows = []
    for name in plan.arms if scale is None else plan.arms_at(scale):
        arm = plan.arms[name]
        match = arm.match
        matched = (
            NONE
            if match is None
            else f"{f'parameters of {match.parameters}' if match.parameters else f'FLOPs of {match.flops}'}, by {match.by}"
        )
        rows.append(
            (name, arm.role, arm.connection, words(arm.options) or "defaults", words(arm.train) or NONE, matched)
        )
    return Table(("arm", "role", "connection", "options", "training values of its own", "matched to"), rows)


def unlike(plan: Plan, scale: str, arms: Arms) -> list[str]:
    """Contrasts whose arms differ by more than 5 % in parameters or training FLOPs per token, one line each."""
    found = []
    for h in plan.hypotheses_at(scale):
        for key, what in (("parameters", "parameters"), ("flops_per_token", "FLOPs/token")):
            sizes = {
                arm: size for arm in h.contrast if (size := _middle(arms.get(arm, ()), key)) and math.isfinite(size)
            }
            if len(sizes) < 2:
                continue
            small, large = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
            if (excess := sizes[large] / sizes[small] - 1) > UNLIKE:
                found.append(
                    f"{h.id} compares arms that differ in {what}: {large} has {excess:.0%} more than {small} "
                    f"({big(sizes[large])} and {big(sizes[small])})."
                )
    return found


# How the name of a null ends -> the logged series beside which it stands; all others are losses.
BESIDE = {
    "_bits_per_byte": "val/bits_per_byte",
    "majority_accuracy": "task/accuracy",
    "_accuracy": "task/token_accuracy",
    "_exact_match": "task/exact_match",
}


def nulls_of(record: RunRecord) -> dict[str, dict[str, Any]]:
    """Name of a null of the data of a run -> its values by the logged series that they are the null of."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in record.nulls.items():
        name = key.removesuffix("_bits_per_byte").removesuffix("_nats_per_token").replace("_", " ")
        series = next((series for ending, series in BESIDE.items() if key.endswith(ending)), "val/loss")
        found.setdefault(name, {})[series] = value
    return found


def _middle(records: Sequence[RunRecord], name: str) -> Any:
    values = sorted(v for r in records if isinstance(v := r.cost.get(name), int | float))
    return values[len(values) // 2] if values else None


MOVED = {
    "moved/connection": "distance from start",
    "moved/connection_relative": "over its start",
    "gradient/connection": "gradient norm into it",
    "gradient/norm": "gradient norm of all",
}
MOVED_NOTE = (
    "The connection's own parameters at the last step, norms apart: Euclidean distance from their start, and the norms of "
    "the gradient before clipping. A dash: the connection has none."
)


def moved_table(arms: Arms) -> Table:
    """Did the connection move: distance from the start and gradient into it, with other logged diagnostics."""
    names = {name for records in arms.values() for r in records for name in r.metrics}
    more = sorted(n for n in names if n.startswith(("moved/", "gradient/", "stability/")) and n not in MOVED)
    columns = {**MOVED, **{name: plain(name.replace("/", " ")) for name in more}}
    rows = [
        (arm, *(mean_sd([v for r in sound(records) if (v := r.last(name)) is not None]) for name in columns))
        for arm, records in arms.items()
    ]
    return Table(("arm", *columns.values()), rows, MOVED_NOTE)


def scalar_table(arms: Arms) -> Table | None:
    """Measures of the whole network (no layer), at the last step of each; a row of nulls where there are some."""
    by_arm = {arm: [_scalars(record) for record in sound(records)] for arm, records in arms.items()}
    every = {key: row for found in by_arm.values() for scalars in found for key, row in scalars.items()}
    keys = sorted(every)
    if not keys:
        return None
    columns = tuple(", ".join(filter(None, (plain(m), b.replace("_", " "), f"[{u}]" if u else ""))) for m, b, u in keys)
    rows = [
        (arm, *(mean_sd([scalars[key].value for scalars in found if key in scalars]) for key in keys))
        for arm, found in by_arm.items()
    ]
    nulls = {
        key: [row for a in by_arm.values() for s in a if (row := s.get(key)) and row.null is not None] for key in keys
    }
    if any(nulls.values()):
        rows.append(("null", *(_null(nulls[key]) for key in keys)))
    steps = sorted({row.step for row in every.values() if row.step is not None})
    counts = sorted({row.n for row in every.values() if row.n is not None})
    note = f"At step {listed((f'{s:,}' for s in steps), 3)}. " if steps else ""
    note += f"Each value over n = {listed(map(str, counts), 4)} items (steps, sites or sequences). " if counts else ""
    note += "".join(
        f"{words[0].upper()}{words[1:]}. "
        for name, words in STABILITY.items()
        if any(c.startswith(name) for c in columns)
    )
    return Table(("arm", *columns), rows, f"{note}{spread_of(arms)}; a dash: not defined for the arm.")


def _scalars(record: RunRecord) -> dict[tuple[str, str, str], Measurement]:
    found: dict[tuple[str, str, str], Measurement] = {}
    for row in record.measures:
        key = (row.measure, row.branch or row.site.removeprefix("stream"), row.unit)
        old = found.get(key)
        if row.layer is None and not in_own_table(row.measure) and (old is None or (row.step or 0) >= (old.step or 0)):
            found[key] = row
    return found


def _null(rows: Iterable[Measurement]) -> str:
    values = sorted({row.null for row in rows if row.null is not None})
    kinds = sorted({row.null_kind for row in rows if row.null_kind})
    if not values:
        return NONE
    text = number(values[0]) if len(values) == 1 else f"{number(values[0])} to {number(values[-1])}"
    return f"{text} ({listed(kinds, 2)})" if kinds else text


def tuning_table(
    tuning: Mapping[str, Mapping[float, float]], rates: Mapping[str, float | None], unit: str
) -> Table | None:
    """Final loss of each arm at each learning rate that was tried, the chosen one marked; the rates alone without a search."""
    grid = sorted({rate for losses in tuning.values() for rate in losses})
    if not grid:
        chosen = {rate for rate in rates.values() if rate is not None}
        if len(chosen) == 1:
            return Table((), [], f"One learning rate for all arms, not tuned: {number(chosen.pop())}.")
        rows = [(arm, number(rate)) for arm, rate in rates.items()]
        return (
            Table(("arm", "learning rate"), rows, "Learning rates as the plan gives them, not tuned.") if rows else None
        )
    rows = [
        (arm, number(rates.get(arm)), *(_tried(losses, rate, rates.get(arm)) for rate in grid))
        for arm, losses in tuning.items()
    ]
    note = f"Final validation loss [{unit}] on the tuning seed, or the mean over several; *: chosen; ∞: diverged; a dash: not tried."
    return Table(("arm", "chosen", *(f"{rate:g}" for rate in grid)), rows, note)


def _tried(losses: Mapping[float, float], rate: float, chosen: float | None) -> str:
    return NONE if rate not in losses else f"{number(losses[rate])}{' *' if rate == chosen else ''}"


def record_table(arms: Arms) -> Table:
    """Every run: how it ended and what identifies it."""
    rows = [
        (
            arm,
            str(r.seed),
            r.status,
            number(r.result.get("step")),
            number(r.config.get("lr")),
            number(r.last("val/loss"), 6),
            r.fingerprint[:16] or NONE,
        )
        for arm, records in arms.items()
        for r in records
    ]
    loss = f"last val/loss [{loss_units(arms)}]"
    return Table(("arm", "seed", "status", "steps", "learning rate", loss, "fingerprint"), rows)


def loss_units(arms: Arms) -> str:
    """The unit of the losses of a study; all units, where arms differ in it."""
    return " or ".join(units_of(arms, "val/loss")) or UNITS["val/loss"]


def scale_of(arms: Arms) -> str:
    """Depth, width, length and tokens of the runs, in words; each as a range where runs differ."""
    records = [r for found in arms.values() for r in found]
    if not records:
        return "no run yet"

    def every(key: str) -> str:
        values = {v for r in records if isinstance(v := r.config.get(key), int | float | str)}
        return " or ".join(map(str, sorted(values, key=lambda v: (isinstance(v, str), v)))) or "?"

    tokens = sorted({v for r in records if isinstance(v := r.cost.get("tokens"), int | float)})
    shown = [*dict.fromkeys(map(big, tokens))] or ["?"]
    trained = " or ".join(shown) if len(shown) < 4 else f"{shown[0]} to {shown[-1]}"
    return (
        f"{every('depth')} layers, width {every('width')}, sequences of {every('sequence_length')} tokens, "
        f"{trained} training tokens of {every('data')}, {counted(len(records), 'run')}"
    )
