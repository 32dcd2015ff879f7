"""``thalweg probe``: read-only probes of the continuous picture, over a model and a text, or over a trajectory of weights."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thalweg.cli.console import confirm_output, emit, say, table
from thalweg.cli.flags import check_counts, check_rows, command_line, first_token
from thalweg.errors import ExitCode, InputError, ThalwegError

EXAMPLES = """examples:
  thalweg probe smollm2 --only rmsnorm,rotary -o smollm2-probes.html
  thalweg probe runs/mgt-d4-s0 --only vortex
  thalweg probe smollm2 --only rotary --option rotary.target=131072

Each probe stands alone: one that does not apply says why, one that fails says how, and the others run (thalweg list probes). A model is
located and its capture proved before the first number. Weights are not changed, hooks are gone afterwards. Numbers from fewer than 8,192
tokens are stamped sketch. Nothing here is a verdict; a locked study gives one.

Exit codes: 0 done; 2 cannot be opened, or no probe gave a number; 5 the proof of the capture failed"""

TOKENS = 8192
OF_A_MODEL = ("text", "length", "bos", "map", "allow_unverified", "dtype", "backend", "which", "trust_remote_code")


def configure(parser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL|TRAJECTORY",
        help="folder, GGUF file, name on a hub, model at hand, or a run; or saved weights of a training",
    )
    parser.add_argument("--only", metavar="LIST", help="names of probes with commas (all that look at such a subject)")
    parser.add_argument("-o", "--output", metavar="FILE", help="page to write (probe-MODEL.html)")
    parser.add_argument("--rows", metavar="FILE", help="write the rows too: .jsonl, .parquet or .csv")
    parser.add_argument("--overwrite", action="store_true", help="write over files that exist")
    parser.add_argument(
        "--option", action="append", default=[], metavar="PROBE.NAME=VALUE", help="an option of a probe; repeatable"
    )
    group = parser.add_argument_group("of a model")
    group.add_argument(
        "--text", metavar="FILE", help="documents: .jsonl with a field text, or a text (the shipped novel)"
    )
    group.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help=f"tokens to read ({TOKENS})")
    group.add_argument("--length", type=int, metavar="N", help="tokens of a window (512, or what the model takes)")
    group.add_argument("--bos", action="store_true", help="put BOS (else EOS) before every document (none)")
    group.add_argument("--map", metavar="FILE", help="TOML file that says where the layers are, for an unknown model")
    group.add_argument(
        "--allow-unverified", action="store_true", help="go on when the proof fails; the page is stamped"
    )
    group.add_argument("--dtype", help="of the weights: float32, bfloat16, float64, auto (float32)")
    group.add_argument("--backend", help="of attention: eager or sdpa")
    group.add_argument("--which", choices=("best", "last"), help="checkpoint of a run (best)")
    group.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def run(args) -> ExitCode:
    from thalweg.continuum import registry

    page = Path(args.output or f"probe-{Path(args.model).name or 'model'}.html")
    confirm_output(str(page), args.overwrite)
    check_rows(args)
    check_counts(args, ("tokens", "length"), least=2)
    only = None if args.only is None else [one.strip() for one in args.only.split(",") if one.strip()]
    if only is not None:
        only = [registry.entry(one).name for one in only]
        if not only:
            raise InputError(f"--only names no probe; known: {', '.join(registry.names())}")
    from thalweg.interrupts import terminated_as_interrupt

    with terminated_as_interrupt():
        return _run(args, page, only, options_of(args.option))


def _run(args, page: Path, only: list[str] | None, options: dict[str, dict[str, Any]]) -> ExitCode:
    from thalweg._words import counted
    from thalweg.continuum import registry

    def tell(text: str) -> None:
        say(text, quiet=args.quiet)

    began = time.perf_counter()
    done: list[Any] = []
    facts: dict[str, str] = {}
    stopped, left = "", []
    try:
        probed(args, only, options, tell, done, facts)
    except KeyboardInterrupt:
        if not any(len(one.rows) for one in done if one.probe != "capture"):
            raise  # nothing to keep
        stopped = f"interrupted after {counted(sum(one.probe != 'capture' for one in done), 'probe')}"
        facts["interrupted"] = f"{stopped}; the others were not run"
        kind = "trajectory" if "trajectory" in facts else "model"
        asked = only or [one for one in registry.names() if registry[one].kind == kind]
        left = [one for one in asked if one not in {finding.probe for finding in done}]
    facts["cost"] = f"{time.perf_counter() - began:.0f} s in all, on the threads that stand under provenance"
    code = finish(args, page, tuple(done), facts, left)
    if stopped:
        raise KeyboardInterrupt(f"what was finished is in {page}" + (f" and {args.rows}" if args.rows else ""))
    return code


def options_of(pairs: list[str]) -> dict[str, dict[str, Any]]:
    """``rotary.target=4096`` as options by probe. Raises: InputError."""
    from thalweg import config

    found: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        probe, dot, rest = pair.partition(".")
        if not dot or "=" in probe or "=" not in rest:
            raise InputError(f"--option is PROBE.NAME=VALUE, as rotary.target=131072, got {pair!r}")
        found.setdefault(probe, {}).update(config.parse_assignments([rest], "--option"))
    return found


def probed(
    args,
    only: list[str] | None,
    options: dict[str, Any],
    tell: Callable[[str], None],
    done: list[Any],
    facts: dict[str, str],
) -> None:
    """Run the probes: every finding goes to ``done`` as it comes, what they are made on to ``facts``."""
    from thalweg.continuum.running import chosen_options, findings

    chosen_options(only, options)  # a slip is told before a model is loaded

    def listen(name: str, one: Any) -> None:
        tell(f"{name} ..." if one is None else f"  {one.words}")
        if one is not None:
            done.append(one)

    trajectory = trajectory_of(args.model, only)
    if trajectory is not None:
        given = [name for name in OF_A_MODEL if getattr(args, name) not in (None, False)]
        given += ["tokens"] * (args.tokens != TOKENS)
        if given:
            raise InputError(
                f"{args.model} is a trajectory of weights, which is probed without a model or a text; "
                f"leave out {', '.join(_flag(name) for name in given)}"
            )
        facts["trajectory"] = args.model
        findings(trajectory, None, only, options=options, name=Path(args.model).name, listen=listen)
        return
    from thalweg.cli.opening import open_any
    from thalweg.evaluation import documents_of

    documents = documents_of(args.text)
    more = {"trust_remote_code": args.trust_remote_code}
    opened = open_any(
        args.model, which=args.which, quiet=args.quiet, dtype=args.dtype or "float32", backend=args.backend, **more
    )
    for line in (opened.name, *opened.notes):
        tell(line)
    tokenizer = opened.require_tokenizer()
    facts |= {
        "model": opened.name,
        "opened as": "; ".join(opened.notes) or opened.kind,
        "text": f"{documents.source}: {documents.rule} (SHA-256 {documents.sha256[:16]}); up to {args.tokens:,} tokens",
    }
    findings(
        opened.model,
        [document.text for document in documents],
        only,
        options=options,
        tokenizer=tokenizer,
        length=args.length,
        tokens=args.tokens,
        bos=first_token(tokenizer) if args.bos else None,
        map=args.map,
        allow_unverified=args.allow_unverified,
        name=opened.name,
        listen=listen,
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def trajectory_of(where: str, only: list[str] | None) -> Any:
    """The trajectory of weights that is meant, or None: then it is a model.

    Meant where ``only`` names none but probes of trajectories; else of a place that can be nothing but a trajectory, so that the folder
    of a run is its model. Raises: InputError, CheckpointError for a place that cannot be read as one.
    """
    from thalweg.continuum import registry
    from thalweg.continuum.trajectory import NAME, Trajectory
    from thalweg.records import RunFolder

    path = Path(where)
    asked = only is not None and all(registry[one].kind == "trajectory" for one in only)
    saved = path.is_file() and path.suffix == ".safetensors"
    beside = (path / NAME).is_file() and not (path / "config.json").exists() and not RunFolder.is_run(path)
    return Trajectory.read(path) if asked or saved or beside else None


def finish(args, page: Path, found: Any, facts: dict[str, str], left: Sequence[str] = ()) -> ExitCode:
    """Print and write what was found; a place that cannot be written takes nothing else with it. left: probes that were not run.

    Raises: InputError where no probe gave a number; the first error of a place, once all else is written.
    """
    from thalweg.records import Measurements, provenance
    from thalweg.records.export import export
    from thalweg.reports.probe import told, write_probe_report

    rows = Measurements(row for one in found for row in one.rows)
    probes = [one for one in found if one.probe != "capture"]

    def show() -> None:
        table([{"probe": one.probe, "found": told(one)} for one in probes], {"probe": "probe", "found": "found"})
        sys.stdout.flush()

    def report() -> None:
        write_probe_report(
            found,
            page,
            title=f"{Path(args.model).name}: probes of the continuous picture",
            facts=facts,
            command=_command(args),
            provenance=provenance.collect(),
            not_run=left,
        )
        say(f"report: {page}", quiet=args.quiet or args.json)

    steps: list[Callable[[], Any]] = [] if args.json else [show]
    steps += [report, *([] if args.rows is None else [lambda: export(rows, args.rows)])]
    errors = {step: error for step in steps if (error := _error_of(step)) is not None}
    if args.json:
        plain = {"model": args.model, "facts": facts, "findings": [one.to_plain() for one in found]}
        emit({**plain, "report": None if report in errors else str(page)})
    if errors:
        raise next(iter(errors.values()))
    if not any(len(one.rows) for one in probes):
        raise InputError(f"no probe gave a number; why stands above and in {page}")
    return ExitCode.OK


def _error_of(step: Callable[[], Any]) -> Exception | None:
    try:
        step()
    except (ThalwegError, OSError) as error:
        return error
    return None


def _command(args) -> str:
    names = ("only", *OF_A_MODEL, "option")
    flags = [(name, getattr(args, name)) for name in names]
    return command_line("probe", [args.model], [*flags, ("tokens", None if args.tokens == TOKENS else args.tokens)])
