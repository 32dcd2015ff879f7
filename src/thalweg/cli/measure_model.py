"""``thalweg measure MODEL``: the geometry of the updates of anybody's model on a text, proved first."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thalweg.cli.console import confirm_output, grid
from thalweg.cli.flags import Telling, check_counts, check_rows, command_line, first_token
from thalweg.errors import InputError

TOKENS = 8192
MEASURED = {
    "parallel_coefficient": "along",
    "parallel_fraction": "|cos|",
    "update_angle": "angle",
    "token_relative_update": "size",
}
HEADINGS = {
    "site": "site",
    "along": "along",
    "|cos|": "|cos|",
    "angle": "angle",
    "size": "size",
    "turn": "turn",
}
MEANINGS = {
    "along": "coefficient of the update along the stream before it, in units of the stream",
    "|cos|": "share of the update's norm that lies along the stream",
    "angle": "between update and stream, in degrees",
    "size": "norm of the update over the norm of the stream",
    "turn": "cosine of the stream before and after the layer, 1: not turned at all",
}
CITATION = """@misc{directional2026,
  title = {Disentangling Representation Evolution in Transformers through Directional Decomposition},
  author = {He, Shwai and Zhang, Haichao and Yan, Shen},
  year = {2026}, eprint = {2609.15975}, archivePrefix = {arXiv}
}"""


def configure(parser) -> None:
    """The flags that only a model takes."""
    group = parser.add_argument_group("of a model")
    group.add_argument(
        "--text", metavar="FILE", help="documents: .jsonl with a field text, or a text (the shipped novel)"
    )
    group.add_argument("--limit", type=int, metavar="N", help="only the first N documents")
    group.add_argument(
        "--length",
        "--window",
        dest="length",
        type=int,
        metavar="N",
        help="tokens of a window (512, or what the model takes)",
    )
    group.add_argument(
        "--bos", action="store_true", help="put BOS (else EOS) before every document, as thalweg eval does (none)"
    )
    group.add_argument("--batch-size", type=int, metavar="N", help="windows of a pass (as many as fit in 512 MiB)")
    group.add_argument("--values", action="store_true", help="every attention head too, along the token's own value")
    group.add_argument("--own-weights", action="store_true", help="and what each token attends to itself (slower)")
    group.add_argument(
        "--inner", action="store_true", help="feed-forward sublayers inside, by block of the stream's width"
    )
    group.add_argument("--rank", action="store_true", help="effective rank of every state, not of nine (slower)")
    group.add_argument("--cka", action="store_true", help="likeness of every two layers (slower)")
    group.add_argument("--map", metavar="FILE", help="TOML file that says where the layers are, for an unknown model")
    group.add_argument(
        "--allow-unverified", action="store_true", help="go on when the proof fails; the page is stamped"
    )
    group.add_argument("--dtype", help="of the weights: float32, bfloat16, float64, auto (float32)")
    group.add_argument("--backend", help="of attention: eager or sdpa")
    group.add_argument("--device-map", metavar="WHERE", help="as in transformers: auto, cuda:0 ... (needs accelerate)")
    group.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    group.add_argument("--rows", metavar="FILE", help="write the rows too: .jsonl, .parquet or .csv")


FLAGS = (
    "text",
    "limit",
    "length",
    "bos",
    "batch_size",
    "values",
    "own_weights",
    "inner",
    "rank",
    "cka",
    "map",
    "allow_unverified",
    "dtype",
    "backend",
    "device_map",
    "trust_remote_code",
    "rows",
)


def given(args) -> list[str]:
    """The flags of a model that were given."""
    return [f"--{name.replace('_', '-')}" for name in FLAGS if getattr(args, name) not in (None, False)]


def check(args) -> Path:
    """Before a model is loaded: whether the results may go where they shall; where the page goes. Raises: InputError."""
    page = Path(args.output or f"measure-{Path(args.model).name or 'model'}.html")
    confirm_output(str(page), args.overwrite)
    check_rows(args)
    check_counts(args, ("tokens", "length", "batch_size"))
    return page


def of_model(args, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure a model and write the page; what is printed of it."""
    from thalweg._words import counted
    from thalweg.capture.measure import measure
    from thalweg.cli.opening import open_any
    from thalweg.evaluation import documents_of
    from thalweg.records import provenance
    from thalweg.records.export import export
    from thalweg.reports.model import write_model_report
    from thalweg.reports.text import big, number

    page = check(args)
    documents = documents_of(args.text).first(args.limit)
    more = {"device_map": args.device_map, "trust_remote_code": args.trust_remote_code}
    opened = open_any(
        args.model,
        which=args.which,
        default="last",
        quiet=args.quiet,
        dtype=args.dtype or "float32",
        backend=args.backend,
        **more,
    )
    for line in (opened.name, *opened.notes):
        tell(line)
    tokenizer = opened.require_tokenizer()
    telling, began = Telling(tell, "passes"), time.perf_counter()
    rows = measure(
        opened.model,
        [document.text for document in documents],
        tokenizer=tokenizer,
        length=args.length,
        batch_size=args.batch_size,
        tokens=args.tokens or TOKENS,
        bos=first_token(tokenizer) if args.bos else None,
        values=args.values,
        own_weights=args.own_weights,
        inner=args.inner,
        rank=args.rank,
        cka=args.cka,
        map=args.map,
        allow_unverified=args.allow_unverified,
        progress=telling,
        name=opened.name,
    )
    seconds, plan = time.perf_counter() - began, telling.plan
    failed: InputError | None = None
    try:
        if args.rows is not None:
            export(rows, args.rows)
    except InputError as error:  # what was measured is printed all the same
        failed = error
    losses = {row.measure: row for row in rows if row.measure in ("loss", "token_perplexity")}
    windows = losses["loss"].split if losses else f"windows of {plan.length}"
    facts = {
        "model": opened.name,
        "opened as": "; ".join(opened.notes) or opened.kind,
        "text": f"{documents.source}: {documents.rule} (SHA-256 {documents.sha256[:16]})",
        "read": f"{plan.tokens:,} tokens of {counted(plan.documents, 'document')}, {windows}; {plan.begins}",
        **{name.replace("_", " "): _with_interval(row, number) for name, row in losses.items()},
        "cost": f"{seconds:.0f} s with the proof, {big(plan.kept, 'B')} for the statistics whatever the text",
    }
    try:
        write_model_report(
            rows,
            page,
            title=f"{Path(opened.name).name}: how its layers write to the stream",
            facts=facts,
            limits=_limits(plan, args),
            command=_command(args),
            provenance=provenance.collect(),
            citations=[CITATION],
        )
    except InputError as error:
        failed = failed or error
    proof = next(row for row in rows if row.measure == "capture_error")
    return {
        "model": opened.name,
        "notes": list(opened.notes),
        "text": {"source": documents.source, "rule": documents.rule, "sha256": documents.sha256},
        "tokens": plan.tokens,
        "documents": plan.documents,
        "length": plan.length,
        "begins": plan.begins,
        "seconds": round(seconds, 1),
        "proof": {"worst": proof.value, "at": proof.site, "tolerance": proof.null, "n": proof.n, "dtype": proof.dtype},
        **{name: {"value": row.value, "low": row.low, "high": row.high} for name, row in losses.items()},
        "measured": facts,
        "sites": sites(rows),
        "rows": args.rows,
        "report": str(page) if failed is None else None,
        "failed": failed,
    }


def sites(rows) -> list[dict[str, Any]]:
    """What is printed of every site, and of every layer."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        name, _, kind = row.measure.rpartition(".")
        if row.head is None and name in MEASURED and kind == ("step" if row.branch == "layer" else "raw"):
            found.setdefault(row.site, {"site": row.site})[MEASURED[name]] = row.value
        elif row.measure == "layer_drop_cosine":
            found.setdefault(row.site, {"site": row.site})["turn"] = row.value
    order = lambda entry: [int(part) if part.isdecimal() else -1 for part in entry["site"].split(".")]  # noqa: E731
    return sorted(found.values(), key=lambda entry: (max(order(entry)), len(order(entry)) == 2))


def lines(found: list[dict[str, Any]]) -> list[str]:
    """The sites as an aligned table, and what its headings mean."""
    from thalweg.reports.text import number

    shown = {key: heading for key, heading in HEADINGS.items() if any(key in entry for entry in found)}
    body = [[str(number(entry.get(key))) if key in entry else "" for key in shown] for entry in found]
    width = max(map(len, shown.values()))
    meanings = [line for h in shown.values() if h in MEANINGS for line in grid([h.ljust(width), MEANINGS[h]], [])]
    return [*grid([*shown.values()], body), *(f"  {line}" for line in meanings)]


def _with_interval(row, number) -> str:
    unit = f" {row.unit}" if row.unit else ""
    if row.low is None:
        return f"{number(row.value, 5)}{unit}"
    return f"{number(row.value, 5)}{unit} ({number(row.low, 5)} to {number(row.high, 5)}, {row.interval})"


def _limits(plan, args) -> list[str]:
    found = [*plan.notes]
    if plan.documents == 1:
        found.append("One document: intervals are over its windows and say nothing about other texts.")
    if not args.values:
        found.append("Heads were not measured; --values adds them, --own-weights what a token attends to itself.")
    return found


def _command(args) -> str:
    return command_line("measure", [args.model], [(name, getattr(args, name)) for name in (*FLAGS, "tokens", "which")])
