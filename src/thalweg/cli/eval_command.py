"""``thalweg eval``: what a model can do, and what an edit costs it, beside the matched no-op."""

import time
from pathlib import Path
from typing import Any

from thalweg.cli.console import emit, say
from thalweg.cli.edit_spec import edits_of
from thalweg.cli.eval_words import Steps, cost_line, show
from thalweg.errors import ExitCode, InputError

EXAMPLES = """examples:
  thalweg eval smollm2 --edit value:parallel=0.5 --edit attention:parallel=0.5
  thalweg eval MODEL --ruler single,multikey_2,vt --length 1024 --samples 20 --edit value:parallel=0,skip-first=1
  thalweg eval MODEL --preset paper
  thalweg eval MODEL --tasks mine --include-path tasks/
  thalweg eval runs/sentiment --split test

Without --text, --ruler, --choices, --tasks or --preset: the perplexity of the novel held out of the shipped corpus (of an encoder with a
head its masked loss, of one without what edits do to its embeddings). An edit is SITE:NAME=VALUE,...: site value, attention, mlp or block;
parallel, perpendicular (scales that are kept), exclude-self or full-aggregate, group, heads=0+2, skip-first, phase, control, coefficient,
reference, route, layers=1: or 0+3 or 5:11 (= 5-10, layers 5 to 10). Its baseline is the same edit at scales 1; a no-op that moves the
likelihood by more than 1e-3 of itself stops the run (exit code 5). Intervals are over documents, questions or samples.

Rows go to items.jsonl in the output folder as they come, so Ctrl-C loses nothing: the same call with -o FOLDER goes on where it was, and may
add edits. measurements.jsonl holds what reports read.

Exit codes: 0 done; 2 cannot be read or evaluated; 5 a no-op is none; 130 interrupted, the rows so far are kept"""


def configure(parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder, GGUF file, name on a hub, model at hand, or a run")
    what = parser.add_argument_group("what is evaluated (several may be given)")
    what.add_argument("--text", metavar="FILE", help="documents: .jsonl with a field text, or a text that is cut up")
    what.add_argument(
        "--ruler", metavar="NAMES", help="long-context tasks made here: single,multikey_2,... | offline | all"
    )
    what.add_argument("--choices", metavar="FILE", action="append", default=[], help="questions: .jsonl; repeatable")
    what.add_argument("--tasks", metavar="NAMES", help="tasks of lm-eval (needs the extra eval)")
    what.add_argument("--preset", metavar="NAME", help="seven tasks of lm-eval: paper (its shots) | zero-shot")
    what.add_argument("--include-path", metavar="DIR", help="folder of task files for --tasks")
    what.add_argument(
        "--split", metavar="NAME", help="of a run: loss and shares on this split of its task, and nothing else"
    )
    what.add_argument("--edit", metavar="SITE:...", action="append", default=[], help="an edit to evaluate; repeatable")
    how = parser.add_argument_group("how")
    how.add_argument("--window", type=int, metavar="N", help="tokens of a window (what the model takes, at most 2048)")
    how.add_argument("--stride", type=int, metavar="N", help="let windows overlap, moved by N tokens (disjoint)")
    how.add_argument("--no-bos", action="store_true", help="score no first token, put none before a document")
    how.add_argument("--length", type=int, default=1024, metavar="N", help="tokens of a long-context sample (1024)")
    how.add_argument("--samples", type=int, default=20, metavar="N", help="samples of each long-context task (20)")
    how.add_argument("--haystack", metavar="FILE", help="text to hide needles in, for tasks that take one")
    how.add_argument(
        "--shots", type=int, metavar="N", help="solved examples before a question (0; of lm-eval the task's)"
    )
    how.add_argument("--limit", type=int, metavar="N", help="only the first documents, or questions of lm-eval")
    how.add_argument("--batch-size", type=int, default=1, metavar="N", help="rows of a pass (1)")
    how.add_argument("--dtype", default="float32", help="of the weights: float32, bfloat16, float64, auto (float32)")
    how.add_argument("--backend", help="of attention: eager or sdpa")
    how.add_argument("--which", choices=("best", "last"), help="checkpoint, of a run (best)")
    how.add_argument("--interval", choices=("BCa", "percentile"), default="BCa", help="of the bootstrap (BCa)")
    how.add_argument("--seed", type=int, default=0, help="of samples, masks, shots and resamples (0)")
    parser.add_argument(
        "-o", "--output", metavar="FOLDER", help="folder for the rows, new or to go on with (evals/NAME-TIME)"
    )


def run(args) -> ExitCode:
    from thalweg.cli.edit_flags import overflow_line
    from thalweg.config import check_writable
    from thalweg.evaluation.keeping import place

    if args.split is not None:
        return _of_split(args)
    options = edits_of(args.edit)  # a slip is told before a model is loaded
    documents = _check(args, options)
    if args.output is None:
        folder = _default(args.model)
        check_writable(folder)
    else:
        folder = place(args.output)
    kept, found = scored(args, options, documents, folder)
    if args.json:
        emit(found)
    else:
        show(found)
    if kept.failed is not None:  # what was scored is printed all the same
        raise kept.failed
    for one in found["edits"]:
        if overflow := overflow_line(one["differences"]):
            say(f"warning: {one['edit']}: {overflow}", quiet=args.quiet)
    return ExitCode.OK


def scored(args, options, documents, folder: Path) -> tuple[Any, dict[str, Any]]:
    """What is kept, and the result as plain values. Raises: ThalwegError; KeyboardInterrupt that says what is kept."""
    from thalweg.capture.proof import dtype_name
    from thalweg.cli.edit_flags import placed
    from thalweg.cli.opening import open_any
    from thalweg.evaluation.keeping import Kept, reserved
    from thalweg.evaluation.subjects import witness

    def tell(text: str) -> None:
        say(text, quiet=args.quiet)

    left = "nothing was scored in this call; call it again"
    try:
        opened = open_any(args.model, which=args.which, quiet=args.quiet, dtype=args.dtype, backend=args.backend)
        for line in (opened.name, *opened.notes):
            tell(line)
        for one in options.values():  # what this model cannot have is told before anything is scored
            placed(opened, one)
        jobs = jobs_of(args, opened, documents)
        about = {"model": opened.name, "dtype": dtype_name(opened.model), "subject": subject_of(args, opened, jobs)}
        number = witness(opened.model)
        kept = Kept(reserved(folder) if args.output is None else folder, **about, witness=number, tell=tell)
        try:
            with kept:
                return kept, evaluate(args, opened, jobs, options, kept, tell)
        finally:
            again = f" with -o {kept.folder}" if args.output is None else ""
            left = f"{kept.left}; the same command{again} goes on"
    except KeyboardInterrupt:
        raise KeyboardInterrupt(left) from None


def _of_split(args) -> ExitCode:
    """A run on a split of its own task, whole. Raises: InputError for anything that is asked for beside it."""
    from thalweg.records.run import RunFolder
    from thalweg.reports.text import number
    from thalweg.training import evaluate_run

    beside = ("text", "ruler", "choices", "tasks", "preset", "edit", "output")
    if given := next((name for name in beside if getattr(args, name)), None):
        raise InputError(f"--split evaluates a run on its own task and nothing else; leave --{given} out")
    if not RunFolder.is_run(args.model):
        raise InputError(f"--split is for the folder of a run, and {args.model} is none; leave it out")
    try:
        found = evaluate_run(args.model, args.split, which=args.which or "best")
    except KeyboardInterrupt:
        raise KeyboardInterrupt("nothing is kept") from None
    if args.json:
        emit(found)
        return ExitCode.OK
    print(f"{found['data']} ({found['split']}), {found['sequences']:,} sequences, step {found['step']:,}")
    for name, value in found["metrics"].items():
        print(f"{name}: {number(value, 5)}" + (f" {found['unit']}" if name == "loss" else ""))
    for name, value in found["nulls"].items():
        print(f"null: {name.replace('_', ' ')}: {number(value, 5)}")
    return ExitCode.OK


def subject_of(args, opened, jobs) -> dict[str, Any]:
    """What is evaluated, without the edits: a folder of rows is gone on with where this is the same."""
    backend = getattr(getattr(opened.model, "config", None), "_attn_implementation", None)
    found = {"attention": backend, "seed": args.seed}
    for job in jobs:
        found |= {job.name: job.plan, f"content of {job.name} (SHA-256)": job.digest}
    return found


def evaluate(args, opened, jobs, options, kept, tell) -> dict[str, Any]:
    """Run everything; the result as plain values."""
    from thalweg.evaluation.jobs import cost_of
    from thalweg.evaluation.paired import evaluate_edits

    noops = len({option.as_noop().describe() for option in options.values()})
    for job in jobs:
        tell(job.plan)
    tell(cost_line(cost_of(opened.model, jobs, 1 + noops + len(options)), noops, len(options)))
    tell(f"rows: {kept.items} (Ctrl-C keeps them; -o {kept.folder} goes on)")
    steps = Steps(tell)

    def scores(name: str, role: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for job in jobs:
            told = kept.listener(name, role, job.name), steps.of(f"{job.name}, {name}")
            found |= job.run(role, *told, kept.known(name, job.name))
        kept.finished(name, role, found, method=args.interval, seed=args.seed)
        return found

    unedited, outcomes = evaluate_edits(
        made_of(opened, options),
        scores,
        on_outcome=kept.outcome,
        method=args.interval,
        seed=args.seed,
    )
    return {
        "model": opened.name,
        "notes": list(opened.notes),
        "folder": str(kept.folder),
        "tasks": {name: _task(one, args) for name, one in unedited.items()},
        "edits": [
            {
                "edit": outcome.edit,
                "options": options[outcome.edit].plain(),
                "task": outcome.scores.task,
                "drift": outcome.drift,
                "facts": outcome.scores.facts,
                "differences": [one.plain() for one in outcome.differences],
            }
            for outcome in outcomes
        ],
    }


def made_of(opened, options) -> list[Any]:
    """Edits with their matched no-ops, computed and not skipped."""
    from functools import partial

    from thalweg.editing import edit
    from thalweg.evaluation.paired import Edit

    measured_on = calibration(opened) if any(one.coefficient for one in options.values()) else None
    return [
        Edit(
            name,
            partial(edit, opened.model, one, calibration=measured_on),
            partial(edit, opened.model, one.as_noop(), forced=True),
            f"no-op of {one.as_noop().describe()}",
        )
        for name, one in options.items()
    ]


def calibration(opened) -> list[dict[str, Any]]:
    """What a coefficient is measured on: the beginning of the shipped training text, which no default evaluation reads."""
    import torch

    from thalweg.cli.calibrating import calibration_from

    found = calibration_from(None, opened.require_tokenizer(), opened.model, samples=4, quiet=True)
    device = next(opened.model.parameters()).device
    return [{"input_ids": torch.tensor([row], device=device)} for row in found.samples]


def jobs_of(args, opened, documents) -> list[Any]:
    """What the arguments ask for, checked on this model. documents: None where no text is asked for. Raises: ThalwegError."""
    from thalweg.data.tasks.text_file import decode, read_bytes
    from thalweg.evaluation import jobs
    from thalweg.evaluation.lm_eval import preset

    model, tokenizer = opened.model, opened.require_tokenizer()
    found = []
    if documents is not None:
        if opened.kind == "encoder":
            if not args.edit:
                raise InputError(
                    f"{opened.name} is an encoder without a head: what edits do to its embeddings is evaluated; give --edit"
                )
            found.append(jobs.embedding_job(model, tokenizer, documents, batch_size=args.batch_size, seed=args.seed))
        elif opened.kind == "masked-lm":
            more = {"window": args.window, "seed": args.seed, "batch_size": args.batch_size}
            found.append(jobs.masked_job(model, tokenizer, documents, **more))
        else:
            more = {"window": args.window, "stride": args.stride, "bos": False if args.no_bos else None}
            found.append(jobs.text_job(model, tokenizer, documents, batch_size=args.batch_size, **more))
    elif opened.kind != "decoder":
        raise InputError(
            f"{opened.name} is an encoder: --ruler, --choices, --tasks and --preset are for decoders; give --text"
        )
    if args.ruler:
        text = None if args.haystack is None else decode(read_bytes(Path(args.haystack)), Path(args.haystack))
        more = {"length": args.length, "count": args.samples, "seed": args.seed, "text": text}
        haystack = None if text is None else "text"
        found.append(
            jobs.ruler_job(model, tokenizer, args.ruler, haystack=haystack, batch_size=args.batch_size, **more)
        )
    for path in args.choices:
        more = {"shots": args.shots or 0, "seed": args.seed, "batch_size": args.batch_size}
        found.append(jobs.choices_job(model, tokenizer, path, **more))
    tasks: dict[str, int | None] = dict(preset(args.preset)) if args.preset else {}
    tasks |= {name.strip(): args.shots for name in args.tasks.split(",")} if args.tasks else {}
    if tasks:
        more = {"include_path": args.include_path, "limit": args.limit, "window": args.window}
        found.append(jobs.lm_eval_job(model, tokenizer, tasks, batch_size=args.batch_size, **more))
    return found


def _check(args, options) -> Any:
    """The documents that are asked for, None without. Raises: ThalwegError for arguments that no model could answer."""
    from thalweg.cli.edit_flags import documents_for, never_acts
    from thalweg.evaluation.choices import check_shots, read_choices
    from thalweg.evaluation.lm_eval import check_installed, preset
    from thalweg.evaluation.ruler import names_of

    if not args.model:
        raise InputError("the model needs a name, got an empty one")
    if args.preset:
        preset(args.preset)
    if args.tasks or args.preset:
        check_installed()
    if args.ruler:
        names_of(args.ruler)
    if args.include_path and not args.tasks:
        raise InputError("--include-path is where tasks of --tasks are looked for; give --tasks too")
    if args.haystack is not None and not args.ruler:
        raise InputError("--haystack is a text for --ruler; give --ruler too")
    if args.shots is not None and not (args.choices or args.tasks):
        raise InputError("--shots is how many solved examples stand before a question; give --choices or --tasks too")
    if args.shots is not None and args.shots < 0:
        raise InputError(f"--shots must be at least 0, got {args.shots}")
    taken = {
        *(["ruler", *names_of(args.ruler)] if args.ruler else []),
        *(["text", "masked", "embeddings"] if args.text else []),
    }
    for path in args.choices:
        name = Path(path).stem
        check_shots(args.shots or 0, read_choices(path), name)
        if name in taken:
            raise InputError(f"the results of {path} would be called {name!r}, which is taken; call the file otherwise")
        taken.add(name)
    if not (args.ruler or args.tasks):
        for text, one in options.items():
            never_acts(one.phase, f"--edit {text}", "give --ruler, which generates")
    asked = args.ruler or args.choices or args.tasks or args.preset
    return documents_for(args) if args.text or not asked else None


def _default(model: str) -> Path:
    return Path("evals") / f"{Path(model).name or 'model'}-{time.strftime('%Y%m%d-%H%M%S')}"


def _task(scores, args) -> dict[str, Any]:
    from thalweg.evaluation.scores import interval_words

    metrics = {}
    for metric in scores.metrics:
        found = scores.interval(metric.name, method=args.interval, seed=args.seed)
        metrics[metric.name] = {
            "value": found.estimate,
            "unit": metric.unit,
            "low": found.low,
            "high": found.high,
            "interval": interval_words(found),
            "null": metric.null,
            "null_kind": metric.null_kind,
        }
    return {"rule": scores.rule, "n": len(scores.items), "facts": scores.facts, "metrics": metrics}
