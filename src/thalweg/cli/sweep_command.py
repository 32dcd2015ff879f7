"""``thalweg sweep``: every site by every scale, each beside its matched no-op, as one page."""

import sys
import time
from pathlib import Path
from typing import Any

from thalweg.cli import edit_flags
from thalweg.cli.console import confirm_output, emit, say, table
from thalweg.cli.flags import command_line
from thalweg.errors import ExitCode, InputError

EXAMPLES = """examples:
  thalweg sweep smollm2 --site value,attn,mlp --limit 4 --window 512 -o sweep.html
  thalweg sweep smollm2 --site value --parallel=-1,0,0.5,1.5 --perpendicular none --full --skip-first 1

Without --parallel and --perpendicular: the published grid (11 and 9 scales). Every point is kept in NAME.jsonl beside the page as soon as
it is computed, so Ctrl-C loses nothing: the same command goes on where it was, and one with more scales or sites adds them to the page and
computes no point twice. NAME.rows.jsonl holds the rows that the page is made from.

Exit codes: 0 done; 2 cannot be opened, edited or scored; 5 a proof failed, or a no-op is none; 130 interrupted, what was finished is kept"""


def configure(parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder, GGUF file, name on a hub, model at hand, or a run")
    parser.add_argument("--site", default="value,attention,mlp", help="sites, joined by commas (value,attention,mlp)")
    parser.add_argument("--parallel", metavar="LIST", help="scales of the part along, or none (the 11 published ones)")
    parser.add_argument("--perpendicular", metavar="LIST", help="scales of the part across, or none (the 9 published)")
    edit_flags.add_edit(parser)
    edit_flags.add_subject(parser)
    parser.add_argument("-o", "--output", metavar="PAGE", help="page to write (sweep-MODEL.html)")
    parser.add_argument("--overwrite", action="store_true", help="begin anew where there is a page or a record")


def run(args) -> ExitCode:
    from thalweg.editing import grid

    points = grid(edit_flags.sites_of(args.site), scales_of(args), **edit_flags.common_options(args), seed=args.seed)
    page = Path(args.output or f"sweep-{edit_flags.name_of(args.model)}.html")
    if page.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"the page must be called .html, got {page.name!r}")
    record, kept = page.with_suffix(".jsonl"), page.with_suffix(".rows.jsonl")
    confirm_output(str(page), args.overwrite or record.is_file())  # a page with its record is gone on with
    if args.overwrite:
        record.unlink(missing_ok=True)
    documents = edit_flags.documents_for(args)
    again = f"the same command{' without --overwrite' if args.overwrite else ''} goes on"
    try:
        opened = edit_flags.opened_of(args)
        found = swept(args, opened, points, documents, record)
        rows = found.pop("rows")
        if not args.json:
            _print(found)  # before the page is written: a full disk does not lose it
        found |= {"report": None, "record": str(record), "rows": None}
        failed: InputError | None = None
        try:
            rows.save(kept)
            found["rows"] = str(kept)
            written(args, opened, documents, found, rows, page)
            found["report"] = str(page)
        except InputError as error:
            failed = InputError(f"{error}; the points are safe in {record}, {again}")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(left(points, record, again)) from None
    if args.json:
        emit(found)
    if failed is not None:
        raise failed
    if not args.json:
        print(page)
    return ExitCode.OK


def left(points, record: Path, again: str) -> str:
    """What a sweep that stops now leaves, for people."""
    from thalweg.editing.sweeping import recorded

    done = at_hand(points, recorded(record))
    return (
        f"{done} of {len(points)} points kept in {record}; {again}" if done else "no point was finished; call it again"
    )


def at_hand(points, there: set[str]) -> int:
    """Of how many points the evaluation is there; of a point at scales 1 it is that of its no-op."""
    return sum((_noop(p) if p.options.is_identity else p.name) in there for p in points)


def _noop(point) -> str:
    return f"no-op: {point.options.as_noop().describe()}"


def scales_of(args) -> dict[str, tuple[float, ...]]:
    """Component -> scales, with the no-op, which costs no pass of its own. Raises: InputError."""
    from thalweg.editing import PUBLISHED

    found = {}
    for component, published in PUBLISHED.items():
        text = getattr(args, component)
        if text is None:
            found[component] = published
        elif text.strip() != "none":
            try:
                found[component] = tuple(sorted({1.0, *(float(part) for part in text.split(","))}))
            except ValueError:
                raise InputError(f"--{component} takes numbers joined by commas, or none, got {text!r}") from None
    return found


def swept(args, opened, points, documents, record: Path) -> dict[str, Any]:
    """Evaluate every point; plain values, and the rows."""
    from thalweg._words import counted
    from thalweg.cli.eval_words import cost_line
    from thalweg.editing import sweep
    from thalweg.editing.sweeping import recorded
    from thalweg.evaluation.jobs import cost_of

    def tell(text: str) -> None:
        say(text, quiet=args.quiet)

    for options in {p.options.site: p.options for p in points}.values():  # refused before hours of passes
        backend = edit_flags.placed(opened, options).backend
    job = edit_flags.job_of(args, opened, documents)
    proof = edit_flags.proved(opened, documents[0].text)
    tell(edit_flags.proof_line(proof))
    tell(job.plan)
    there = recorded(record)
    noops = {_noop(p) for p in points} - there
    edits = {p.name for p in points if not p.options.is_identity} - there
    tell(cost_line(cost_of(opened.model, [job], 1 + len(noops) + len(edits)), len(noops), len(edits)))
    if record.exists():
        tell(f"going on with {record}: {counted(at_hand(points, there), 'point')} are there")
    start = time.perf_counter()

    def evaluate(role):
        return next(iter(job.run(role, lambda row: None, lambda done, of: None).values()))

    def on_point(done: int, of: int, point, result) -> None:
        if result is not None:
            first = result.differences[0]
            tell(f"  {done} of {of} points: {point.name}: {first.metric} {first.value:+.4g}")

    subject = {
        "model": opened.name,
        "job": job.plan,
        "sha256": documents.sha256,
        "dtype": args.dtype,
        "backend": backend,
    }
    done = sweep(opened.model, evaluate, points, record=record, subject=subject, on_point=on_point, seed=args.seed)
    if done.unasked:
        tell(
            f"the record holds {counted(len(done.unasked), 'point')} beside these, which the page does not show; name their scales too"
        )
    return {
        "model": opened.name,
        "notes": list(opened.notes),
        "proof": proof,
        "text": job.plan,
        "backend": backend,
        "seconds": time.perf_counter() - start,
        "unedited": done.unedited.values(),
        "units": {metric.name: metric.unit for metric in done.unedited.metrics},
        "n": len(done.unedited.items),
        "items": job.name,
        "points": done.table(),
        "rows": done.measurements(model=opened.name),
    }


def written(args, opened, documents, found: dict[str, Any], rows, page: Path) -> None:
    """The page."""
    from thalweg.records import provenance
    from thalweg.reports.sweep import write_sweep_report
    from thalweg.reports.text import number

    passes = sum(point["seconds"] > 0 for point in found["points"])
    facts = {
        "model": "; ".join((opened.name, *opened.notes)),
        "text": found["text"],
        "unedited": ", ".join(
            " ".join(filter(None, (name, number(value), found["units"].get(name))))
            for name, value in found["unedited"].items()
        ),
        "edits": "; ".join(dict.fromkeys(f"{p['site']}: {_where(p['edit'])}" for p in found["points"])),
        "proof": edit_flags.proof_line(found["proof"]).removeprefix("proof: "),
        "cost": f"{found['seconds']:.0f} s in this call, {passes} edited passes over the text (a record may hold earlier ones)",
    }
    write_sweep_report(
        rows,
        page,
        title=f"{edit_flags.name_of(args.model)}: scales of its updates",
        facts=facts,
        limits=notes_of({p["site"] for p in found["points"]}, documents.cut or opened.kind == "encoder"),
        command=_command(args),
        provenance=provenance.collect(),
        citations=BIBTEX,
    )


def notes_of(sites: set[str], cut: bool) -> list[str]:
    """What a reader should know of what was swept. cut: the items are pieces of one text."""
    notes = []
    if "value" in sites:
        notes.append(
            "Values: per query head, along the token's own value, what it reads of itself left alone, unless said otherwise above."
        )
    if sites & {"attention", "mlp"}:
        notes.append(
            "Attention, mlp: along the raw stream before the addition, branch by branch, unless said otherwise above."
        )
    if "block" in sites:
        notes.append("Whole layers: the sum of what a layer adds, along its input.")
    if cut:
        notes.append(
            "Pieces of one text resemble each other more than documents do: an interval over them says nothing about other texts."
        )
    return notes


BIBTEX = """@misc{he2026disentangling,
  title = {Disentangling Representation Evolution in Transformers through Directional Decomposition},
  author = {He, Shwai and Zhang, Haichao and Yan, Shen},
  year = {2026},
  eprint = {2609.15975},
  archivePrefix = {arXiv}
}"""


def _where(edit: dict[str, Any]) -> str:
    kept = {k: v for k, v in edit.items() if k not in ("site", "parallel", "perpendicular", "exclude_self")}
    parts = [f"{k.replace('_', ' ')} {v}" for k, v in kept.items()] + (
        ["all layers"] if kept.keys().isdisjoint({"layers", "skip_first"}) else []
    )
    if "exclude_self" in edit:
        parts.append("exclude-self" if edit["exclude_self"] else "full aggregate")
    return ", ".join(parts)


def _command(args) -> str:
    names = (
        "site",
        "parallel",
        "perpendicular",
        "layers",
        "heads",
        "limit",
        "window",
        "backend",
        "which",
        "full",
        "text",
    )
    flags = [(name, getattr(args, name)) for name in names]
    defaults = {"skip_first": 0, "group": "head", "reference": "stream", "dtype": "float32", "seed": 0}
    flags += [(name, getattr(args, name)) for name, default in defaults.items() if getattr(args, name) != default]
    return command_line("sweep", [args.model], flags)


def _print(found: dict[str, Any]) -> None:
    from thalweg._words import counted
    from thalweg.cli.eval_words import ITEMS
    from thalweg.evaluation.scores import few_words
    from thalweg.reports.sweep import DRAWN
    from thalweg.reports.symlog import between
    from thalweg.reports.text import number

    metrics = found["points"][0]["metrics"]
    metric = next((name for name in DRAWN if name in metrics), next(iter(metrics)))
    rows = []
    for point in found["points"]:
        one = point["metrics"][metric]
        rows.append(
            {
                "site": point["site"],
                "part": point["component"],
                "scale": f"{point['scale']:g}",
                "value": number(one["edited"]),
                "change": number(one["difference"]),
                "between": between(one["low"], one["high"]),
            }
        )
    heads = {"site": "site", "part": "part", "scale": "scale", "value": metric.replace("_", " ")}
    table(rows, {**heads, "change": "change", "between": "95 % interval"})
    noun = ITEMS.get(found["items"], "item")
    if found["n"] == 1:
        print(edit_flags.few_line(1, noun))
    elif few := few_words(found["n"]):
        print(f"{counted(found['n'], noun)}: {few}")
    sys.stdout.flush()
