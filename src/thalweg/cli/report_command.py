"""``thalweg report``: one offline HTML file from a plan, a run, or several runs."""

from collections.abc import Sequence
from pathlib import Path

from thalweg.cli.console import confirm_output, emit
from thalweg.cli.facts import citations, deviations, used
from thalweg.errors import ExitCode, InputError, ThalwegError, UnknownNameError

EXAMPLES = """examples:
  thalweg report plans/mgt-ablation.toml --scale small -o ablation.html
  thalweg report runs/mgt-d4-s0 -o run.html
  thalweg report runs/additive-d4-s0 runs/mgt-d4-s0 -o both.html

A path is an argument with a separator, one that ends in .toml, a file, or the folder of a run. Any other word is the name of a shipped
plan, also where a folder has that name: ./demo is the folder, demo the plan."""

MOST_RUNS = 21  # curves that colour and dashes tell apart


def configure(parser) -> None:
    parser.add_argument(
        "given",
        nargs="+",
        metavar="PLAN_OR_RUN",
        help="plan file, name of a shipped plan, or folder of a run; several runs are shown side by side",
    )
    parser.add_argument("-o", "--output", default="report.html", help="file to write (report.html)")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    parser.add_argument("--scale", help="scale of the plan")
    parser.add_argument("--records", help="folder of the records (default: records/ beside the plan)")


def run(args) -> ExitCode:
    confirm_output(args.output, args.overwrite)
    plans = [given for given in args.given if not names_run(given)]
    if plans and len(args.given) > 1:
        raise InputError(f"several arguments must all be folders of runs, got {plans[0]!r}; give a plan alone")
    if plans:
        _require_plan(plans[0])
        path = _of_plan(args, plans[0])
    else:
        for flag in ("scale", "records"):
            if getattr(args, flag) is not None:
                raise InputError(f"--{flag} belongs to a plan, but {args.given[0]} is a folder; leave it out")
        path = of_run(args.given[0], args.output) if len(args.given) == 1 else of_runs(args.given, args.output)
    if args.json:
        emit({"report": str(path), "bytes": path.stat().st_size})
    else:
        print(path)
    return ExitCode.OK


def names_run(given: str) -> bool:
    """Whether an argument is the folder of a run; if not, it is a plan. The rule stands in ``--help``."""
    from thalweg.records.run import RunFolder
    from thalweg.studies import library

    if RunFolder.is_run(given):
        return True
    return Path(given).is_dir() and (library.is_path(given) or given not in library.shipped())


def _require_plan(given: str) -> None:
    """Raises: InputError for what is neither the folder of a run nor a plan."""
    from thalweg.studies import library

    allowed = "give the folder of a run, the path of a .toml file, or the name of a shipped plan (thalweg list plans)"
    if library.is_path(given) and not given.endswith(".toml") and not Path(given).exists():
        raise InputError(f"{given} is neither the folder of a run nor a plan: nothing is there; {allowed}")
    if not library.is_path(given) and given not in library.shipped():
        raise UnknownNameError(
            "run folder or plan",
            given,
            library.shipped(),
            more="Or give the folder of a run, or the path of a .toml file.",
        )


def of_run(folder: str, output: str | Path) -> Path:
    """The report of a run folder."""
    from thalweg.records.run import RunFolder
    from thalweg.reports import write_run_report
    from thalweg.reports.grown import write_grown_report
    from thalweg.reports.growth import is_grown

    run = RunFolder.open(folder)
    connection, options = used(run)
    shown = deviations({"": (connection, options)})
    write = write_grown_report if is_grown(run) else write_run_report
    return write(run, output, citations([connection]), shown, nulls_of_data(run))


def of_runs(folders: Sequence[str], output: str | Path) -> Path:
    """The report of several run folders side by side."""
    from thalweg.records.run import RunFolder
    from thalweg.reports.runs import labels, write_runs_report
    from thalweg.training.config import settled

    if len(folders) > MOST_RUNS:
        raise InputError(
            f"at most {MOST_RUNS} runs can be told apart in one report, got {len(folders)}; leave some out"
        )
    runs = [RunFolder.open(folder) for folder in folders]
    places = [run.path.resolve() for run in runs]
    if twice := next((run.path for i, run in enumerate(runs) if places[i] in places[:i]), None):
        raise InputError(f"{twice} is given twice; give each run once")
    by_run = dict(zip(labels(runs), map(used, runs), strict=True))
    names = [name for name, _ in by_run.values()]
    configs = [settled(run.config) for run in runs]
    return write_runs_report(runs, output, citations(names), deviations(by_run), [*map(nulls_of_data, runs)], configs)


def nulls_of_data(run) -> dict[str, float]:
    """The nulls for a run whose record holds none because it was killed, failed or goes on; empty if its data cannot be had any more.

    They are written when a run ends. The last checkpoint says which data it was.
    """
    from thalweg.training import checkpoint
    from thalweg.training.config import from_table
    from thalweg.training.tasks import load_task

    if run.result.get("nulls"):
        return {}
    try:
        saved = checkpoint.read(checkpoint.find(run.checkpoints, "last")).manifest.get("data", {})
        task = load_task(from_table(run.config))
        return task.nulls() if task.fingerprint == saved.get("fingerprint") else {}
    except (ThalwegError, OSError):  # a report needs no data; without it a line is missing
        return {}


def of_study(study, output: str | Path) -> Path:
    """The report of a study with its verdict."""
    from thalweg import studies
    from thalweg.reports import write_study_report
    from thalweg.reports.study import StudyRecords

    lock = lock_of(study)
    tunings = {arm: study.tuning(arm) for arm in study.arms}
    arms = {name: study.plan.arms[name] for name in study.arms}
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
        citations=citations(arm.connection for arm in arms.values()),
        deviations=deviations({name: (arm.connection, arm.options) for name, arm in arms.items()}),
    )
    return write_study_report(records, output)


def of_edits(study, output: str | Path) -> Path:
    """The report of a study of edits or compressions with its verdict."""
    from thalweg import studies
    from thalweg.reports.compressions import write_compression_report
    from thalweg.reports.edits import EditStudyRecords, write_edit_report
    from thalweg.studies.compressed.study import CompressionStudy

    compressed = isinstance(study, CompressionStudy)
    lock = lock_of(study)
    records = EditStudyRecords(
        plan=study.plan,
        scale=study.scale_name,
        verdict=studies.verdict(study),
        found=study.records(),
        locked=lock.locked if lock else "",
        version=lock.version if lock else "",
        plan_text=study.path.read_text(encoding="utf-8"),
        plan_path=str(study.path),
        done="compression" if compressed else "edit",
    )
    return (write_compression_report if compressed else write_edit_report)(records, output)


def of_experiments(study, output: str | Path) -> Path:
    """The report of a study of experiments with its verdict."""
    from thalweg import studies
    from thalweg.reports.experiments import ExperimentStudyRecords, write_experiment_report
    from thalweg.studies.experiments.base import registry

    lock = lock_of(study)
    entries = {name: registry.entry(use.experiment) for name, use in study.uses.items()}
    records = ExperimentStudyRecords(
        plan=study.plan,
        scale=study.scale_name,
        verdict=studies.verdict(study),
        runs=study.records(),
        summaries={name: f"{entry.summary}. Source: {entry.source}." for name, entry in entries.items()},
        locked=lock.locked if lock else "",
        version=lock.version if lock else "",
        plan_text=study.path.read_text(encoding="utf-8"),
        plan_path=str(study.path),
    )
    return write_experiment_report(records, output)


def lock_of(study):
    """The lock of a study, or None: then the verdict says void and why."""
    from thalweg.studies import locking

    try:
        return locking.read(study.path, study.scale_name)
    except InputError:
        return None


def _of_plan(args, plan: str) -> Path:
    from thalweg.cli.study_command import open_study
    from thalweg.studies.experiments.study import ExperimentStudy
    from thalweg.studies.runner import Study

    args.plan = plan
    study = open_study(args)
    if isinstance(study, ExperimentStudy):
        return of_experiments(study, args.output)
    return of_study(study, args.output) if isinstance(study, Study) else of_edits(study, args.output)
