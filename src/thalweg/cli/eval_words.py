"""What evaluations say on a terminal: plan, progress, tables, and what few items cannot say. Shared by ``eval``, ``edit`` and ``sweep``."""

import time
from typing import Any

from thalweg.cli.console import table

GIB = 2**30
ITEMS = {"text": "document", "masked": "document", "embeddings": "paragraph"}  # task -> what its numbers are of


class Steps:
    """Progress as lines: one when a part begins to take long, then one every ten seconds."""

    EVERY = 10.0

    def __init__(self, tell):
        self._tell, self._last = tell, time.monotonic()

    def of(self, what: str):
        def on_step(done: int, total: int) -> None:
            now = time.monotonic()
            if now - self._last >= self.EVERY or done == total:
                self._last = now
                self._tell(f"  {what}: {done:,} of {total:,}")

        return on_step


def cost_line(cost, noops: int, edits: int) -> str:
    """The plan of one unedited run, so many no-ops and so many edits; for people."""
    memory = f"about {cost.bytes / GIB:.1f} GiB of memory for weights and logits"
    seconds = cost.seconds
    took = "time not known before" if seconds != seconds else f"about {_time(seconds)}, from one timed pass"
    parts = ["unedited", "no-op" if noops == 1 else f"{noops} no-ops", f"{edits} edit{'s' * (edits > 1)}"]
    said = parts[: 1 + (noops > 0)] + parts[2:] * (edits > 0)
    runs = "1 run" if len(said) == 1 else f"{1 + noops + edits} runs ({', '.join(said)})"
    return f"plan: {runs}, {took}, {memory}"


def _time(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


def show(found: dict[str, Any]) -> None:
    from thalweg.reports.text import number

    def between(row: dict[str, Any]) -> str:
        return "" if row["low"] != row["low"] else f"{number(row['low'])} to {number(row['high'])}"

    rows = [
        {
            "task": name,
            "metric": f"{metric} [{row['unit']}]" if row["unit"] else metric,
            "value": number(row["value"]),
            "between": between(row),
            "null": "" if row["null"] is None else f"{number(row['null'])} ({row['null_kind']})",
            "n": task["n"],
        }
        for name, task in found["tasks"].items()
        for metric, row in task["metrics"].items()
    ]
    for name, task in found["tasks"].items():
        print(f"{name}: {task['rule']}")
    heads = {"task": "task", "metric": "metric", "value": "value", "between": "95 % interval", "null": "null", "n": "n"}
    table(rows, heads)
    if found["edits"]:
        _print_edits(found["edits"], number, between)
    for line in few_lines(found):
        print(line)
    print(found["folder"])


def few_lines(found: dict[str, Any]) -> list[str]:
    """By task, what so few items cannot say: of their p, where there are edits, and of their intervals."""
    from thalweg._words import counted
    from thalweg.cli.edit_flags import few_line
    from thalweg.evaluation.scores import few_words

    paired = dict.fromkeys((one["task"], row["n"]) for one in found["edits"] for row in one["differences"])
    lines = []
    for task, n in dict.fromkeys([*paired, *((name, one["n"]) for name, one in found["tasks"].items())]):
        noun, words = ITEMS.get(task, "item"), few_words(n)
        said = few_line(n, noun) if (task, n) in paired else words and f"{counted(n, noun)}: {words}"
        if said:
            lines.append(f"{task}: {said}")
    return lines


def _print_edits(edits, number, between) -> None:
    from thalweg.cli.edit_flags import order_line, p_value

    rows = [
        {
            "edit": one["edit"],
            "task": one["task"],
            "metric": f"{row['metric']} [{row['unit']}]" if row["unit"] else row["metric"],
            "no-op": number(row["baseline"]),
            "edited": number(row["edited"]),
            "difference": number(row["difference"]),
            "between": between(row),
            "p": p_value(row["sign_flip_p"], row["n"]),
            "n": row["n"],
        }
        for one in edits
        for row in one["differences"]
    ]
    heads = {name: name for name in ("edit", "task", "metric", "no-op", "edited", "difference")}
    table(rows, {**heads, "between": "95 % interval", "p": "sign-flip p", "n": "n"})
    for one in edits:
        if line := order_line(one["facts"]):
            print(f"{one['edit']}: {line}")
