"""``thalweg report``: one offline HTML file from a plan or a run."""

from pathlib import Path

from thalweg.cli.console import confirm_output, emit
from thalweg.errors import ExitCode, InputError

EXAMPLES = """examples:
  thalweg report plans/mgt-ablation.toml --scale small -o ablation.html
  thalweg report runs/mgt-d4-s0 -o run.html"""


def configure(parser) -> None:
    parser.add_argument("plan", metavar="PLAN_OR_RUN", help="plan file, name of a shipped plan, or folder of a run")
    parser.add_argument("-o", "--output", default="report.html", help="file to write (report.html)")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    parser.add_argument("--scale", help="scale of the plan")
    parser.add_argument("--records", help="folder of the records (default: records/ beside the plan)")


def run(args) -> ExitCode:
    confirm_output(args.output, args.overwrite)
    if Path(args.plan).is_dir():
        for flag in ("scale", "records"):
            if getattr(args, flag) is not None:
                raise InputError(f"--{flag} belongs to a plan, but {args.plan} is a folder; leave it out")
        path = of_run(args.plan, args.output)
    else:
        path = _of_plan(args)
    if args.json:
        emit({"report": str(path), "bytes": path.stat().st_size})
    else:
        print(path)
    return ExitCode.OK


def of_run(folder: str, output: str | Path) -> Path:
    """The report of a run folder."""
    from thalweg.records.run import RunFolder
    from thalweg.reports import write_run_report

    run = RunFolder.open(folder)
    names = [str(run.config.get("connection", ""))]
    return write_run_report(run, output, citations(names), deviations(names))


def of_study(study, output: str | Path) -> Path:
    """The report of a study with its verdict."""
    from thalweg import studies
    from thalweg.reports import write_study_report
    from thalweg.reports.study import StudyRecords
    from thalweg.studies import locking

    try:
        lock = locking.read(study.path, study.scale_name)
    except InputError:
        lock = None  # the verdict says void and why
    tunings = {arm: study.tuning(arm) for arm in study.arms}
    names = [study.plan.arms[arm].connection for arm in study.arms]
    records = StudyRecords(
        plan=study.plan,
        scale=study.scale_name,
        verdict=studies.verdict(study),
        runs=study.records(),
        tuning={arm: t.losses for arm, t in tunings.items()},
        rates={arm: t.best for arm, t in tunings.items()},
        locked=lock.locked if lock else "",
        version=lock.version if lock else "",
        plan_text=study.path.read_text(encoding="utf-8"),
        plan_path=str(study.path),
        citations=citations(names),
        deviations=deviations(names),
    )
    return write_study_report(records, output)


def citations(names: list[str]) -> list[str]:
    """BibTeX of the connections used, each once."""
    return [text for text in dict.fromkeys(facts.bibtex for _, facts in _facts(names)) if text]


def deviations(names: list[str]) -> list[str]:
    """Where the code of the connections used leaves their papers, and what the papers leave open."""
    found = []
    for name, facts in _facts(names):
        found += [f"{name} leaves its source: {text}" for text in facts.deviations]
        found += [f"{name}, our choice: {text}" for text in facts.chosen]
    return found


def _facts(names: list[str]):
    from thalweg import connections

    known = [name for name in dict.fromkeys(names) if name in connections.registry]
    return [(name, connections.registry[name].facts) for name in known]


def _of_plan(args) -> Path:
    from thalweg.cli.study_command import open_study

    return of_study(open_study(args), args.output)
