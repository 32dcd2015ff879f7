"""Streams side by side in a report: who reads and writes which, what replacing the mixing costs, windows, and whether it moved."""

import math
from collections.abc import Callable, Iterable, Sequence

from thalweg.records.measurements import Measurement
from thalweg.reports.curves import Arms, sound
from thalweg.reports.figures import Figure, heat
from thalweg.reports.measures import plain
from thalweg.reports.tables import Table
from thalweg.reports.text import counted, mean, mean_sd, number
from thalweg.studies.store import RunRecord

USAGE = {
    "stream_share.read": "Streams that each sublayer reads",
    "stream_share.write": "Streams that each sublayer writes to",
}
REPLACED = {"mixer_replaced.identity": "by the identity", "mixer_replaced.token_mean": "by its token mean"}
WINDOWS = {
    "amax_gain.window.forward": "Amax gain forward",
    "amax_gain.window.backward": "Amax gain backward",
    "inf_norm_gain.window.forward": "norm gain forward",
    "inf_norm_gain.window.backward": "norm gain backward",
    "sigma_2.window": "sigma_2",
    "channel.difference.window": "difference kept",
    "permutation_index.window": "0 uniform, 1 permutation",
}  # fmt: skip
WINDOWS_NOTE = (
    "Products of the mixing matrices over windows of layers, token by token, then averaged. Null of the gains: 1, any doubly stochastic "
    "matrix; of the others: 0, the uniform matrix. The index is reconstructed from mHC, Table 6."
)
MOVED = {
    "coefficient_distance": "distance from start",
    "coefficient_distance.relative": "over its start",
    "coefficient_gradient_norm": "gradient norm into it",
}
MOVED_NOTE = (
    "Parameters behind the coefficients by which streams are read, written and mixed, over all layers, at the last step; over its start: "
    "mean over layers, a dash where the start is zero."
)


def usage_figures(arms: Arms) -> list[Figure]:
    """For each arm with several streams a picture of the share of each stream at each site, read and written, mean over seeds."""
    found = [
        usage for arm, records in arms.items() for name in USAGE if (usage := _usage(arm, records, name, len(arms) > 1))
    ]
    return [figure for figure in found if figure is not None]


def _usage(arm: str, records: Sequence[RunRecord], name: str, named: bool) -> Figure | None:
    tables = [t for r in sound(records) if (t := {(row.site, row.stream): row.value for row in _last(r, name)})]
    if not tables:
        return None
    sites = list(dict.fromkeys(site for site, _ in tables[0]))
    streams = sorted({stream for _, stream in tables[0] if isinstance(stream, int)})
    values = [[mean([t.get((site, stream), math.nan) for t in tables]) for site in sites] for stream in streams]
    caption = (
        f"Share of each stream in the absolute weights, mean over tokens; equal weights would give 1/{len(streams)}. "
        f"{counted(len(tables), 'seed')}."
    )
    return heat(
        f"{USAGE[name]}{f', {arm}' if named else ''}",
        [site.removeprefix("layers.").replace("_", " ") for site in sites],
        [f"stream {stream}" for stream in streams],
        values,
        x_label="sublayer, from the first to the last",
        caption=caption,
    )


def replaced_table(arms: Arms) -> Table | None:
    """The change in loss where the mixing of whole parts of the network is replaced."""
    note = (
        "Change in held-out loss [nats/token] when the mixing matrices of these layers are replaced and all else stays; in brackets two "
        "standard errors over sequences. Null: 0, nothing replaced."
    )
    return _by_site(arms, REPLACED, "mixing replaced in", note, _with_error)


def window_table(arms: Arms) -> Table | None:
    """Composites over windows of layers."""
    return _by_site(arms, WINDOWS, "layers", WINDOWS_NOTE, lambda rows: mean_sd([row.value for row in rows]))


def coefficient_table(arms: Arms) -> Table | None:
    """Did the coefficients move: distance from the start and gradient, by family and kind of parameter."""
    rows = []
    for arm, records in arms.items():
        found = [{name: _by_kind(r, name) for name in MOVED} for r in sound(records)]
        for kind in dict.fromkeys(kind for tables in found for kind in tables["coefficient_distance"]):
            cells = [
                mean_sd([v for t in found if (v := _whole(name, t[name].get(kind, ()))) is not None]) for name in MOVED
            ]
            rows.append((f"{arm}: {plain(kind)}", *cells))
    return Table(("coefficients", *MOVED.values()), rows, MOVED_NOTE) if rows else None


def _by_site(
    arms: Arms, columns: dict[str, str], head: str, note: str, cell: Callable[[list[Measurement]], str]
) -> Table | None:
    """One row for each arm and place, of rows without a layer."""
    rows = []
    for arm, records in arms.items():
        tables = [
            {(row.site, name): row for name in columns for row in _last(r, name) if row.layer is None}
            for r in sound(records)
        ]
        for site in dict.fromkeys(site for table in tables for site, _ in table):
            found = [[t[site, name] for t in tables if (site, name) in t] for name in columns]
            label = site.removeprefix("layers.")
            rows.append((f"{arm}: {label}" if len(arms) > 1 else label, *(cell(f) for f in found)))
    return Table((head, *columns.values()), rows, note) if rows else None


def _with_error(rows: list[Measurement]) -> str:
    if len(rows) == 1 and rows[0].high is not None:
        sign = "+" if rows[0].value > 0 else ""
        return f"{sign}{number(rows[0].value, 3)} ({number(rows[0].high - rows[0].value, 2)})"
    return mean_sd([row.value for row in rows])


def _by_kind(record: RunRecord, name: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in _last(record, name):
        found.setdefault(row.branch, []).append(row.value)
    return found


def _whole(name: str, values: Sequence[float]) -> float | None:
    """Of all layers: norms add up in squares, shares are averaged."""
    if not values:
        return None
    return mean(values) if name.endswith("relative") else math.sqrt(sum(v * v for v in values))


def _last(record: RunRecord, name: str) -> list[Measurement]:
    rows: Iterable[Measurement] = [row for row in record.measures if row.measure == name]
    last = max((row.step for row in rows if row.step is not None), default=None)
    return [row for row in rows if row.step == last]
