"""``thalweg compare``: what compression did to the updates of a model, layer by layer, and what to protect."""

import time
from pathlib import Path
from typing import Any

from thalweg.cli.console import confirm_output, emit, grid, say
from thalweg.cli.flags import Telling, check_counts, check_rows, command_line, with_short
from thalweg.errors import ExitCode, InputError

EXAMPLES = """examples:
  thalweg compare smollm2 smollm2-w4 --text book.txt -o report.html
  thalweg compare smollm2 --method round_to_nearest --bits 4 --group 32 --text book.txt
  thalweg compare smollm2 --method cache --bits 4 --option window=128 --text book.txt
  thalweg compare runs/a@300 runs/a@best --mode global

BASE and COMPRESSED are folders of Hugging Face (safetensors; packed weights where their package is installed), GGUF files, names on a hub,
models at hand (thalweg models) or runs (RUN@best, RUN@last or RUN@STEP). With --method a copy of BASE is compressed on the fly instead;
--method cache compresses what attention remembers, by rounding (--bits), forgetting (--option window=N) or both.

local: every compressed layer on the dense input of that layer, so that no error is inherited. isolated: every sublayer on its dense input.
global: both models on the text. Errors are split along and across the dense update, each beside what a random error of that size gives.

Exit codes: 0 done; 2 no pair, or cannot be opened; 5 a proof of capture failed"""

TOKENS = 8192
SAMPLES = 16  # of a calibration
SHORT = ("sparsity", "bits", "group")
CACHE = "cache"  # no compressor: the weights stay as they are
CITATION = """@misc{directional2026,
  title = {Disentangling Representation Evolution in Transformers through Directional Decomposition},
  author = {He, Shwai and Zhang, Haichao and Yan, Shen},
  year = {2026}, eprint = {2609.15975}, archivePrefix = {arXiv}
}"""


def configure(parser) -> None:
    parser.add_argument("base", metavar="BASE", help="the dense model")
    parser.add_argument("compressed", metavar="COMPRESSED", nargs="?", help="the compressed model; or --method")
    parser.add_argument("-o", "--output", help="page to write (compare-BASE-COMPRESSED.html)")
    parser.add_argument("--overwrite", action="store_true", help="replace the file of -o")
    parser.add_argument("--rows", metavar="FILE", help="write the rows too: .jsonl, .parquet or .csv")
    what = parser.add_argument_group("what is compared")
    what.add_argument("--mode", help="local, isolated, global, or several with commas (local,global)")
    what.add_argument(
        "--preset", help="paper: local, last token of every document, first and last layer left out of means"
    )
    what.add_argument("--no-values", action="store_true", help="no attention heads before the output projection")
    what.add_argument(
        "--layer-kl", action="store_true", help="what each layer alone does to the predictions (a pass for each)"
    )
    what.add_argument(
        "--low-memory", action="store_true", help="one model open at a time; dense inputs on the disk meanwhile"
    )
    text = parser.add_argument_group("text and models")
    text.add_argument(
        "--text", metavar="FILE", help="documents: .jsonl with a field text, or a text (the shipped novel)"
    )
    text.add_argument("--tokens", type=int, metavar="N", help=f"tokens to read ({TOKENS})")
    text.add_argument("--length", type=int, metavar="N", help="tokens of a window (512, or what both models take)")
    text.add_argument("--batch-size", type=int, metavar="N", help="windows of a pass (as many as fit in 256 MiB)")
    text.add_argument("--map", metavar="FILE", help="TOML file that says where the layers are, for unknown models")
    text.add_argument("--allow-unverified", action="store_true", help="go on when the proof fails; the page is stamped")
    text.add_argument("--dtype", help="of the weights: float32, bfloat16, float64, auto (float32)")
    text.add_argument("--backend", help="of attention: eager or sdpa")
    text.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the models")
    text.add_argument("--seed", type=int, default=0, help="of random errors and resamples (0)")
    made = parser.add_argument_group("compressed on the fly")
    made.add_argument("--method", help="compress a copy of BASE by this compressor, or its cache")
    made.add_argument("--sparsity", metavar="S", help="short for --option sparsity=S: 0.5, 2:4, 4:8")
    made.add_argument("--bits", metavar="N", help="short for --option bits=N")
    made.add_argument("--group", metavar="N", help="short for --option group=N")
    made.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of the compressor; may be repeated"
    )
    made.add_argument(
        "--calibration", metavar="FILE", help="text that the compressor sees (the shipped training novels)"
    )


def run(args) -> ExitCode:
    found = compared(args, lambda line: say(line, quiet=args.quiet))
    failed = found.pop("failed")
    table = found.pop("table")
    if args.json:
        emit(found)
    else:
        print(*found["verdict"], "", *grid(list(table.columns), table.rows), sep="\n")
        if failed is None:
            print("", found["report"], sep="\n")
    if failed is not None:
        raise failed
    return ExitCode.OK


def compared(args, tell) -> dict[str, Any]:
    """Compare, write the page; what is printed of it."""
    from thalweg.compression import diagnose
    from thalweg.evaluation import documents_of
    from thalweg.records import provenance
    from thalweg.records.export import export
    from thalweg.reports.pair import protect_table, verdict, write_pair_report
    from thalweg.reports.text import big

    options = checked(args)
    page = _page(args)
    documents = documents_of(args.text)
    base = side(args, args.base)
    compressed = side(args, args.compressed) if args.compressed else on_the_fly(args, options, base)
    began = time.perf_counter()
    found = diagnose(
        base,
        compressed,
        [document.text for document in documents],
        mode=None if args.mode is None else [part.strip() for part in args.mode.split(",")],
        preset=args.preset,
        length=args.length,
        batch_size=args.batch_size,
        tokens=args.tokens or TOKENS,
        values=not args.no_values,
        layer_kl=args.layer_kl,
        low_memory=args.low_memory,
        allow_unverified=args.allow_unverified,
        progress=Telling(tell, "batches"),
        seed=args.seed,
    )
    seconds = time.perf_counter() - began
    failed: InputError | None = None
    try:
        if args.rows is not None:
            export(found.rows, args.rows)
    except InputError as error:
        failed = error
    names = (Path(found.base.name).name, Path(found.compressed.name).name)
    plan = found.plan
    kept = "on the disk" if plan.on_disk else "of dense inputs and updates"
    models = {
        f"{kind}: {about.name}": {**about.provenance, "dtype": " and ".join(about.dtypes)}
        for kind, about in (("dense", found.base), ("compressed", found.compressed))
    }
    facts = {
        "dense": found.base.name,
        "compressed": found.compressed.name,
        "text": f"{documents.source}: {documents.rule} (SHA-256 {documents.sha256[:16]})",
        "read": f"{plan.tokens:,} tokens of {plan.documents:,} documents in windows of up to {plan.length}"
        + (", the last token of each looked at" if found.options.last_only else ""),
        "modes": ", ".join(found.options.modes),
        "cost": f"{seconds:.0f} s with opening and proofs; {big(plan.record, 'B')} {kept} and {big(plan.weights, 'B')} of weights at once",
    }
    mode = found.options.modes[0]
    try:
        write_pair_report(
            found.rows,
            page,
            title=f"{names[1]} against {names[0]}: what became of the updates",
            names=names,
            facts=facts,
            models=models,
            bytes_rule=found.bytes_rule,
            limits=_limits(found, args),
            command=_command(args),
            provenance=provenance.collect(),
            citations=[CITATION],
        )
    except InputError as error:
        failed = failed or error
    table = protect_table(found.rows, mode, found.bytes_rule)
    return {
        "base": found.base.name,
        "compressed": found.compressed.name,
        "notes": list(found.notes),
        "verdict": verdict(found.rows, names, list(found.options.modes)),
        "modes": list(found.options.modes),
        "text": {"source": documents.source, "rule": documents.rule, "sha256": documents.sha256},
        "tokens": plan.tokens,
        "seconds": round(seconds, 1),
        "protect": [dict(zip(table.columns, row, strict=True)) for row in table.rows],
        "bytes_rule": found.bytes_rule,
        "rows": args.rows,
        "report": str(page) if failed is None else None,
        "failed": failed,
        "table": table,
    }


def checked(args) -> dict[str, Any]:
    """What can be refused before a model is loaded; the options of a compressor. Raises: InputError."""
    if (args.compressed is None) == (args.method is None):
        raise InputError(
            "give the compressed model, or --method to compress a copy of BASE, and not both; see thalweg compare --help"
        )
    given = with_short(args, SHORT)
    if args.method is None and (given or args.calibration):
        raise InputError(
            "--sparsity, --bits, --group, --option and --calibration belong to --method; leave them out, or give one"
        )
    if args.method == CACHE:
        from thalweg.compression.cache import CacheOptions
        from thalweg.config import build

        if args.calibration is not None:
            raise InputError("a compressed cache sees no text before; leave --calibration out")
        build(CacheOptions, given, where=CACHE)
    elif args.method is not None:
        from thalweg.compression import compressors

        compressors.create(args.method, **given)
    check_rows(args)
    check_counts(args, ("tokens", "length", "batch_size"))
    return given


def side(args, where: str):
    """A model of the command line, opened when it is needed. Raises: InputError."""
    from thalweg.compression.pairing import Read, Side
    from thalweg.compression.record import read_record
    from thalweg.records.run import RunFolder

    if not where:
        raise InputError("the model needs a name, got an empty one")
    place, _, which = where.rpartition("@")
    at = place if place and RunFolder.is_run(place) else ""
    options = {
        "dtype": args.dtype or "float32",
        "backend": args.backend,
        "trust_remote_code": args.trust_remote_code,
        "quantised": True,
    }

    def opens() -> Read:
        from thalweg.cli.opening import hush_bars, open_any, open_run

        if at:
            hush_bars(args.quiet)
            opened = open_run(at, int(which) if which.isdecimal() else which)  # type: ignore[arg-type]  # a step
        else:
            opened = open_any(where, quiet=args.quiet, **options)
        return Read(opened.model, opened.tokenizer, opened.notes, read_record(where))

    return Side(where, opens, map=args.map)


def on_the_fly(args, options: dict[str, Any], base):
    """A copy of BASE, compressed."""
    from dataclasses import replace

    from thalweg.cli.calibrating import calibration_from
    from thalweg.compression import compress, compress_cache, compressors
    from thalweg.compression.pairing import twin_of

    words = " ".join([args.method, *(f"{name} {value}" for name, value in options.items())])
    if args.method == CACHE:
        return twin_of(base, lambda model: compress_cache(model, **options), f"{Path(base.name).name}, {words}")
    tokenizers: list[Any] = []

    def keeping():
        read = base.open()
        tokenizers[:] = [read.tokenizer]
        return read

    def compressing(model):
        calibration = None
        if args.calibration is not None or compressors.create(args.method, **options).needs_calibration:
            calibration = calibration_from(args.calibration, tokenizers[0], model, samples=SAMPLES, quiet=args.quiet)
        return compress(model, args.method, calibration=calibration, source=base.name, **options)

    return twin_of(replace(base, open=keeping), compressing, f"{Path(base.name).name}, {words}")


def _page(args) -> Path:
    second = args.compressed or args.method
    page = Path(args.output or f"compare-{Path(args.base).name or 'model'}-{Path(second).name or 'model'}.html")
    confirm_output(str(page), args.overwrite)
    return page


def _limits(found, args) -> list[str]:
    limits = [*found.notes]
    if found.plan.documents < 8:
        limits.append(
            f"{found.plan.documents} documents: intervals are over windows of them and say nothing about other texts."
        )
    if not args.layer_kl:
        limits.append("What a layer alone does to the predictions was not measured; --layer-kl adds it.")
    limits.append(
        "The order of the layers is that of their errors, a measure of the updates; it is no measured gain in loss."
    )
    return limits


def _command(args) -> str:
    names = ["method", *SHORT, "mode", "preset", "tokens", "length", "batch_size", "dtype", "backend", "option"]
    names += [
        "text",
        "map",
        "calibration",
        "no_values",
        "layer_kl",
        "low_memory",
        "allow_unverified",
        "trust_remote_code",
    ]
    flags = [(name, getattr(args, name)) for name in names]
    return command_line("compare", filter(None, (args.base, args.compressed)), [*flags, ("seed", args.seed or None)])
