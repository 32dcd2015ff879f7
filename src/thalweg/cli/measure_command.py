"""``thalweg measure``: the stream geometry of a trained run, with what replacing its mixing costs; or of anybody's model."""

from collections.abc import Callable
from typing import Any

from thalweg.cli import measure_model
from thalweg.cli.console import confirm_output, emit, grid, say
from thalweg.cli.flags import command_line
from thalweg.errors import ExitCode, InputError

EXAMPLES = """examples:
  thalweg measure smollm2 --text book.txt -o report.html
  thalweg measure runs/mhc-d12-s0 --tokens 65536 --which best -o mixing.html

MODEL is a folder of Hugging Face (safetensors), a GGUF file, a name on a hub, or a model at hand (thalweg models). The capture is proved by
replay before anything is measured (exit code 5 if it fails).

Of a RUN the rows go to measured.jsonl in its folder, the page to measured.html there or to -o; what an earlier call left there is replaced
with --overwrite only. Of a network with several streams every mixing matrix, those of the first and the last third of the layers, and all of
them are replaced by the identity and by their mean over tokens, and the change in held-out loss is given. With a flag of a model, a run is
measured as any other model is."""

# measure of a row at a site -> heading
STREAMS = {
    "amax_gain.from_start.forward": "gain in",
    "amax_gain.to_end.backward": "gain back",
    "sigma_2": "sigma_2",
    "permutation_index": "index",
    "difference_share": "differences",
    "effective_streams.read": "reads",
    "effective_streams.write": "writes",
    "constraint_error.columns": "column error",
    "mix.logit_spread": "logit spread",
    "gradient_norm": "gradient",
    "mixer_replaced.identity": "identity",
    "mixer_replaced.token_mean": "token mean",
}
STREAM = {
    "effective_rank": "rank",
    "token_cosine": "token cosine",
    "rms": "size",
    "relative_update.step": "step",
    "gradient_norm": "gradient",
}
REPLACED = {"mixer_replaced.identity": "by the identity", "mixer_replaced.token_mean": "by its token mean"}
PAGE = "measured.html"
WINDOWS = {
    "amax_gain.window.forward": "gain forward",
    "amax_gain.window.backward": "gain backward",
    "sigma_2.window": "sigma_2",
    "permutation_index.window": "index",
}


def configure(parser) -> None:
    parser.add_argument("model", metavar="MODEL_OR_RUN", help="a model, or the folder of a run")
    parser.add_argument(
        "-o", "--output", help="page to write (measure-MODEL.html; of a run measured.html in its folder)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier result, and the file of -o")
    parser.add_argument("--tokens", type=int, help="tokens to read (8192; of a run 4096, held out, in whole sequences)")
    parser.add_argument("--which", choices=("last", "best"), help="checkpoint, of a run (last)")
    measure_model.configure(parser)


def run(args) -> ExitCode:
    from thalweg.records.run import RunFolder

    if not RunFolder.is_run(args.model) or measure_model.given(args):
        return _model(args)
    _check_places(args.model, args.output, args.overwrite)
    found = of_run(args.model, args.output, args.tokens, args.which or "last", lambda text: say(text, quiet=args.quiet))
    if args.json:
        emit(found)
        return ExitCode.OK
    for name, text in found["measured"].items():
        print(f"{name}: {text}")
    for name, columns in headings(found["sites"]).items():
        if found[name]:
            print("", *_table(_written(found[name]), columns), sep="\n")
    print("", found["report"], sep="\n")
    return ExitCode.OK


def _model(args) -> ExitCode:
    found = measure_model.of_model(args, lambda text: say(text, quiet=args.quiet))
    failed = found.pop("failed")  # to write what was measured; it is printed before the error
    if args.json:
        emit(found)
        if failed is not None:
            raise failed
        return ExitCode.OK
    for name, text in found["measured"].items():
        print(f"{name}: {text}")
    print("", *measure_model.lines(found["sites"]), sep="\n")
    if failed is not None:
        raise failed
    print("", found["report"], sep="\n")
    return ExitCode.OK


def _check_places(run: str, output: str | None, overwrite: bool) -> None:
    """Before hours of passes: whether the result may go where it shall. Raises: InputError."""
    from pathlib import Path

    from thalweg.records.run import RunFolder
    from thalweg.reports.run import MEASURED

    if output is not None:
        confirm_output(output, overwrite)
    folder = RunFolder.open(run).path
    for path in (folder / MEASURED, *([folder / PAGE] if output is None else [])):
        if Path(path).exists() and not overwrite:
            raise InputError(f"{path} holds an earlier result; say --overwrite to replace it")
        confirm_output(str(path), True)


def _table(rows: list[dict[str, str]], columns: dict[str, str]) -> list[str]:
    """Aligned columns, and under them what each heading stands for."""
    from thalweg.geometry import catalog

    shown = {key: heading for key, heading in columns.items() if any(key in row for row in rows)}
    lines = grid([*shown.values()], [[row.get(key, "") for key in shown] for row in rows])
    meanings = {heading: catalog.entry(key) for key, heading in shown.items() if key != "site"}
    width = max(map(len, meanings))
    for heading, measure in meanings.items():
        unit = f" [{measure.unit}]" if measure.unit else ""
        lines += [f"  {line}" for line in grid([heading.ljust(width), f"{measure.summary}{unit}"], [])]
    return lines


def of_run(
    folder: str, output: str | None, tokens: int | None, which: str, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Measure a run, keep the rows in its folder, write the page; what is printed of it."""
    from thalweg.cli.facts import citations, deviations, used
    from thalweg.records.run import RunFolder
    from thalweg.reports.measured import write_measured_report
    from thalweg.reports.run import MEASURED
    from thalweg.reports.text import number
    from thalweg.training.measuring import TOKENS, measure_run

    wanted = TOKENS if tokens is None else tokens
    measured = measure_run(
        folder, which=which, tokens=wanted, on_plan=lambda plan: tell(_plan(plan)), on_pass=_progress(tell)
    )
    record, plan = RunFolder.open(folder), measured.plan
    notes = _notes(measured, record)
    kept = record.path / MEASURED
    measured.rows.save(kept)
    facts = {
        "loss": f"{number(measured.loss, 5)} {measured.unit}",
        "checkpoint": f"{which}, step {plan.step:,}",
        "data": f"{plan.data} ({plan.split}), {plan.sequences:,} sequences of {plan.length:,} tokens",
        "geometry": f"on {plan.traced:,} sequences, as in training, in float32",
        **({"note": "; ".join(notes)} if notes else {}),
    }
    connection, options = used(record)
    page = write_measured_report(
        record,
        measured.rows,
        output or record.path / PAGE,
        facts=facts,
        command=command_line("measure", [folder], [("tokens", wanted), ("which", which)]),
        citations=citations([connection]),
        deviations=deviations({"": (connection, options)}),
    )
    return {
        "run": str(folder),
        "step": plan.step,
        "split": plan.split,
        "sequences": plan.sequences,
        "tokens": plan.tokens,
        "asked": plan.asked,
        "held": plan.held * plan.length,
        "notes": notes,
        "loss": measured.loss,
        "rows": str(kept),
        "report": str(page),
        "measured": facts,
        "sites": _by_site(measured.rows, {**STREAMS, **STREAM}, deep=True),
        "replaced": _by_site(measured.rows, REPLACED, deep=False),
        "windows": _by_site(measured.rows, WINDOWS, deep=False),
    }


def _notes(measured, record) -> list[str]:
    """What a reader must know before the numbers."""
    from thalweg.reports.text import number

    notes = [measured.plan.short] if measured.plan.short else []
    if record.status == "diverged":
        notes.append(f"training diverged: {record.result.get('reason') or 'the run does not say why'}")
    if any(row.measure in REPLACED and abs(row.value) < measured.rounding for row in measured.rows):
        notes.append(
            f"changes in loss below {number(measured.rounding, 1)} {measured.unit} are rounding (float32, loss {number(measured.loss, 3)})"
        )
    return notes


def headings(sites: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """The tables that are printed, by the name of their rows in the result -> key of a row -> heading."""
    several = any("sigma_2" in row for row in sites)
    return {
        "sites": {"site": "site", **(STREAMS if several else STREAM)},
        "replaced": {"site": "replaced in", **REPLACED},
        "windows": {"site": "layers", **WINDOWS},
    }


def _by_site(rows, columns: dict[str, str], *, deep: bool) -> list[dict[str, Any]]:
    """The values of some measures, one row for each place with (``deep``) or without a layer."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.measure in columns and (row.layer is not None) == deep and row.site not in ("stream.left", "stream"):
            found.setdefault(row.site, {"site": row.site})[row.measure] = row.value
    return list(found.values())


def _written(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Numbers to four digits."""
    from thalweg.reports.text import number

    return [{name: number(value) for name, value in row.items()} for row in rows]


def _plan(plan) -> str:
    text = (
        f"step {plan.step:,}: geometry on {plan.traced:,} sequences, loss on {plan.sequences:,} sequences of {plan.length:,} tokens of "
        f"{plan.data} ({plan.split})"
    )
    text = f"{text}; {plan.passes} passes with the mixing replaced" if plan.passes else text
    return f"{text}\n{plan.short}" if plan.short else text


def _progress(tell: Callable[[str], None]) -> Callable[[int, int], None]:
    """A line at every quarter of the passes."""

    def on_pass(done: int, of: int) -> None:
        if of >= 8 and done % (of // 4) == 0:
            tell(f"  {done} of {of} passes")

    return on_pass
