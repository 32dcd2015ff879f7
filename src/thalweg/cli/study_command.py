"""``thalweg study``: plan files from the first line to the verdict."""

from pathlib import Path
from typing import Any

from thalweg import config
from thalweg.cli.console import emit, say, table
from thalweg.cli.flags import check_counts
from thalweg.errors import ExitCode, InputError

EXAMPLES = """examples:
  thalweg study new my-question.toml
  thalweg study run mgt-ablation --scale small --jobs 2

PLAN is the path of a plan file, or the name of one that `thalweg list plans` shows."""

TEMPLATES = {"training": "template.toml", "experiment": "template-experiment.toml"}
VERBS = ("new", "check", "lock", "run", "verdict", "status")
ONLY = {"kind": "new", "jobs": "run", "limit": "run"}  # flags of one verb


def configure(parser) -> None:
    parser.add_argument(
        "verb",
        choices=VERBS,
        help="new: write a template; check: power; lock: fix it; run: what is missing; verdict; status",
    )
    parser.add_argument("plan", metavar="PLAN", help="plan file, or name of a shipped plan")
    parser.add_argument("--kind", choices=tuple(TEMPLATES), help="new: of what the plan is a plan (training)")
    parser.add_argument("--scale", help="scale of the plan (the only one, or smoke, when not given)")
    parser.add_argument("--records", help="folder of the records (default: records/ beside the plan)")
    parser.add_argument("--workspace", default="runs/studies", help="folder of run folders (runs/studies)")
    parser.add_argument("--jobs", type=int, help="run: runs side by side (1)")
    parser.add_argument("--limit", type=int, help="run: stop after so many runs")


def run(args) -> ExitCode:
    for flag, verb in ONLY.items():
        if args.verb != verb and getattr(args, flag) is not None:
            raise InputError(f"--{flag} belongs to `study {verb}`; `study {args.verb}` takes none, leave it out")
    check_counts(args, ("jobs", "limit"))
    return globals()[f"_{args.verb}"](args)


def _new(args) -> ExitCode:
    path = Path(args.plan)
    if path.suffix != ".toml":
        raise InputError(f"a plan file ends in .toml, got {args.plan!r}")
    if path.exists():
        raise InputError(f"{path} exists; choose another name")
    from importlib import resources

    from thalweg.records.files import atomic_write_text

    text = (resources.files("thalweg.studies") / TEMPLATES[args.kind or "training"]).read_text(encoding="utf-8")
    atomic_write_text(path, text.replace("NAME", path.stem))
    say(f"wrote {path}; fill it in, then: thalweg study check {path}", quiet=args.quiet)
    if args.json:
        emit({"path": str(path)})
    return ExitCode.OK


def _check(args) -> ExitCode:
    from thalweg.reports.study import bound
    from thalweg.studies.check import check

    study = open_study(args)
    found = check(study.plan, study.scale_name)
    if args.json:
        emit(config.to_plain(found))
    else:
        rows = [
            {
                "id": p.hypothesis,
                "power": f"{p.result.power:.3f}",
                "expected": f"{p.result.effect:g}",
                "must be": bound(p.direction, p.result.margin),
                "sd": f"{p.result.sd:g}",
                "detectable": f"{p.result.detectable:.4g}",
                "sd_source": p.sd_source,
            }
            for p in found.powers
        ]
        columns = ("id", "power", "expected", "must be", "sd", "detectable", "sd_source")
        table(
            rows,
            dict(
                zip(
                    columns,
                    ("hypothesis", "power", "expected", "must be", "sd", "seen with 0.8", "sd from"),
                    strict=True,
                )
            ),
        )
        say(
            f"{found.kind} at {found.scale}: {found.runs} {study.counts} and {found.tuning_runs} for learning rates"
            if found.tuning_runs
            else f"{found.kind} at {found.scale}: {found.runs} {study.counts}",
            quiet=args.quiet,
        )
        for line in found.remarks:
            say(f"remark: {line}", quiet=args.quiet)
    found.require()
    study.require_runnable()
    return ExitCode.OK


def _lock(args) -> ExitCode:
    from thalweg import studies
    from thalweg.studies.locking import path_of

    study = open_study(args)
    lock = studies.lock(study)
    if args.json:
        emit({"path": str(path_of(study.path, study.scale_name)), **lock.__dict__})
    else:
        where = path_of(study.path, study.scale_name)
        say(f"locked {study.plan.name} at {study.scale_name}: {lock.plan_hash[:16]} ({where})", quiet=args.quiet)
        if note := lock.note(study.progress()[1], study.counts):
            say(f"note: {note}", quiet=args.quiet)
    return ExitCode.OK


def _run(args) -> ExitCode:
    from thalweg import studies
    from thalweg.cli.progress import listening

    study = open_study(args)
    with listening(quiet=args.quiet) as listener:
        done = studies.run(
            study,
            jobs=args.jobs or 1,
            limit=args.limit,
            say=lambda line: say(line, quiet=args.quiet),
            on_event=listener,
        )
    finished, wanted = study.progress()
    if args.json:
        emit({"finished_now": done, "runs": finished, "of": wanted})
    else:
        say(f"{done} runs finished now; {finished} of {wanted} {study.counts} are recorded", quiet=args.quiet)
    return ExitCode.OK


def _status(args) -> ExitCode:
    study = open_study(args)
    missing = study.missing()
    finished, wanted = study.progress()
    found = {
        "plan": study.plan.name,
        "scale": study.scale_name,
        "runs": finished,
        "of": wanted,
        "learning_rates": study.rates(),
        "next": [job.name for job in missing],
    }
    if args.json:
        emit(found)
    else:
        print(f"{finished} of {wanted} {study.counts} recorded; {len(missing)} can start now")
        for arm, rate in found["learning_rates"].items():
            print(
                f"  {arm}: {'learning rate ' + format(rate, 'g') if rate is not None else 'learning rate not chosen yet'}"
            )
    return ExitCode.OK


def _verdict(args) -> ExitCode:
    from thalweg import studies
    from thalweg.reports.study import bound

    judged = studies.verdict(open_study(args))
    if args.json:
        emit(as_plain(judged))
    else:
        rows = [
            {
                "id": v.hypothesis,
                "status": v.status,
                "estimate": "" if v.estimate is None else f"{v.estimate:+.4f}",
                "interval": "" if v.interval is None else f"[{v.interval[0]:+.4f}, {v.interval[1]:+.4f}]",
                "must be": bound(v.direction, v.margin),
                "n": "" if v.statistics is None else str(v.statistics.n),
                "reason": v.reason,
            }
            for v in judged.verdicts
        ]
        table(rows, {k: k for k in ("id", "status", "estimate", "interval", "must be", "n", "reason")})
        for note in judged.notes:
            print(note)
        print(f"verdict: {judged.status}")
    return judged.exit_code


def as_plain(judged) -> dict[str, Any]:
    """A study verdict as plain values."""
    return {
        "plan": judged.plan,
        "scale": judged.scale,
        "kind": judged.kind,
        "plan_hash": judged.plan_hash,
        "status": judged.status,
        "notes": list(judged.notes),
        "verdicts": [config.to_plain(v) | {"estimate": v.estimate, "interval": v.interval} for v in judged.verdicts],
    }


def open_study(args):
    """The study that PLAN, --scale, --records and --workspace name."""
    from thalweg import studies
    from thalweg.studies import library

    path = library.find(args.plan)
    plan = studies.load(path)
    scale = args.scale or (next(iter(plan.scale)) if len(plan.scale) == 1 else "smoke")
    plan.at(scale)
    return studies.study(path, scale, records=args.records, workspace=getattr(args, "workspace", "runs/studies"))
