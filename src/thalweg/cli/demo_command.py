"""``thalweg demo``: the main job on real text, small: train, judge, report."""

import shutil
import time
from pathlib import Path

from thalweg.cli.console import emit, say
from thalweg.errors import ExitCode

EXAMPLES = """examples:
  thalweg demo
  thalweg demo -o /tmp/demo --jobs 1"""

SCALE = "smoke"


def configure(parser) -> None:
    parser.add_argument(
        "-o", "--output", default="runs/demo", help="folder of the plan, the records and the report (runs/demo)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each (2)")
    parser.add_argument("--fresh", action="store_true", help="throw away what an earlier demo left in the folder")


def run(args) -> ExitCode:
    from thalweg import studies
    from thalweg.cli.report_command import of_study
    from thalweg.cli.study_command import as_plain
    from thalweg.studies import library
    from thalweg.studies.runner import Study

    began = time.monotonic()
    folder = Path(args.output)
    if args.fresh:
        shutil.rmtree(folder / "records", ignore_errors=True)
        shutil.rmtree(folder / "runs", ignore_errors=True)
    plan = _own_copy(library.find("demo"), folder)
    study = Study(plan, SCALE, workspace=folder / "runs")
    studies.lock(study)
    arms, seeds = len(study.arms), len(study.scale.seeds)
    say(f"demo: {arms} connections x {seeds} seeds on Jane Austen's novels, plan locked in {plan}", quiet=args.quiet)
    studies.run(study, jobs=args.jobs, say=lambda line: say(f"  {line}", quiet=args.quiet))
    judged = studies.verdict(study)
    path = of_study(study, folder / "report.html")
    seconds = time.monotonic() - began
    if args.json:
        emit({"report": str(path), "seconds": round(seconds, 1), **as_plain(judged)})
        return ExitCode.OK
    print("demo: too small to judge")
    print(f"report: {path.resolve()} ({seconds:.0f} s)")
    return ExitCode.OK


def _own_copy(plan: Path, folder: Path) -> Path:
    """The demo's plan in its own folder, so that locks and records are never written into the package."""
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / "demo.toml"
    if not own.exists() or own.read_bytes() != plan.read_bytes():
        own.with_name(f"demo.{SCALE}.lock.json").unlink(missing_ok=True)  # the shipped plan is newer than the copy
        shutil.copyfile(plan, own)
    return own
