"""The tasks of lm-eval (an extra) on a model that is in memory, edited or not; presets with the shots that papers used."""

import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from thalweg.capture.evaluating import evaluating
from thalweg.config import checked_path
from thalweg.errors import InputError, MissingExtraError, OfflineError, ThalwegError, UnknownNameError, first_line
from thalweg.evaluation.scores import Metric, Scores, share
from thalweg.evaluation.subjects import check_causal, check_tokenizer

# The seven tasks of arXiv 2609.15975, called zero-shot there, with the shots of its appendix.
PAPER = {
    "openbookqa": 0,
    "piqa": 0,
    "winogrande": 5,
    "arc_challenge": 25,
    "hellaswag": 10,
    "boolq": 0,
    "rte": 0,
}
PRESETS: dict[str, dict[str, int]] = {"paper": PAPER, "zero-shot": dict.fromkeys(PAPER, 0)}
# Metrics of lm-eval that are sums over items, and how they come together.
_SHARES = ("acc", "acc_norm", "acc_bytes", "exact_match", "recall")
_ROLLING = {
    "word_perplexity": ("words", lambda ll, n: np.exp(-ll / n)),
    "byte_perplexity": ("bytes", lambda ll, n: np.exp(-ll / n)),
    "bits_per_byte": ("bytes", lambda ll, n: -ll / n / np.log(2)),
}


_BESIDE = ("item", "task", "arm", "role", "job")  # of a row, what is no column


def preset(name: str) -> dict[str, int]:
    """Task -> shots. ``paper``: as published (25, 10 and 5 shots among them); ``zero-shot``: none anywhere. Raises: UnknownNameError."""
    if name not in PRESETS:
        raise UnknownNameError("preset", name, PRESETS)
    return dict(PRESETS[name])


def check_installed() -> None:
    """Raises: MissingExtraError."""
    if find_spec("lm_eval") is None or find_spec("accelerate") is None:
        raise MissingExtraError("lm-eval", "eval")


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    tasks: Mapping[str, int | None] | Sequence[str],
    *,
    include_path: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    max_length: int | None = None,
    on_task: Callable[[str, int, int], None] | None = None,
) -> dict[str, Scores]:
    """Scores by task, one item each document, so that two runs can be paired.

    tasks: names, or names with their shots (None: those of the task's file). include_path: folder of task files of one's own, which need no
    network when their data are local. limit: the first documents of each task. max_length: tokens of a window (None: lm-eval asks the
    model). Metrics are those of lm-eval that add up over documents (accuracies, rolling perplexities and bits per byte); a task without one
    is refused.
    Raises: MissingExtraError without the extra; UnknownNameError for a task that is not known; OfflineError where its data are not here;
    InputError.
    """
    simple_evaluate, manager, shell = _library(include_path)
    check_tokenizer(tokenizer)
    check_causal(model)
    if not hasattr(tokenizer, "eos_token_id"):
        raise InputError(f"lm-eval needs a tokenizer of transformers, got {type(tokenizer).__name__}")
    if not hasattr(model, "config") or not hasattr(model, "device"):
        raise InputError(
            f"lm-eval needs a model of transformers, got {type(model).__name__}; wrap a decoder of ours in ThalwegForCausalLM"
        )
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1, got {limit}")
    wanted: dict[str, int | None] = dict(tasks) if isinstance(tasks, Mapping) else dict.fromkeys(tasks)
    for name in wanted:
        if not manager.match_tasks([name]):
            raise UnknownNameError("lm-eval task", name, manager.all_tasks, more="Your own come by --include-path.")
    options: dict[str, Any] = {} if max_length is None else {"max_length": max_length}
    found: dict[str, Scores] = {}
    with _quiet(), evaluating(model):
        wrapped = shell(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, **options)
        for i, (name, shots) in enumerate(wanted.items()):
            if on_task is not None:
                on_task(name, i, len(wanted))
            with _one_line(name):
                result = simple_evaluate(
                    model=wrapped,
                    tasks=[name],
                    num_fewshot=shots,
                    limit=limit,
                    task_manager=manager,
                    log_samples=True,
                    bootstrap_iters=0,
                )
            for task, samples in result["samples"].items():
                said = result["n-shot"].get(task, shots)
                found[task] = _scores(task, samples, said, wrapped.max_length)
    return found


def _library(include_path: str | Path | None) -> tuple[Any, Any, Any]:
    check_installed()
    try:
        with _quiet():
            simple_evaluate = import_module("lm_eval").simple_evaluate
            shell = import_module("lm_eval.models.huggingface").HFLM
            manager = import_module("lm_eval.tasks").TaskManager
    except ImportError:
        raise MissingExtraError("lm-eval", "eval") from None
    if include_path is not None:
        folder = checked_path(include_path, expand=True)
        if not folder.is_dir():
            raise InputError(f"{folder} is no folder of task files; give the folder that holds the .yaml files")
        include_path = str(folder.resolve())
    return simple_evaluate, _manager(manager, include_path), shell


@cache
def _manager(kind: Any, include_path: str | None) -> Any:
    """Reads some ten thousand task files: once for each folder."""
    with _quiet():
        return kind(include_path=include_path)


@contextmanager
def _one_line(task: str) -> Iterator[None]:
    """What goes wrong inside a task, most of it about data that are not here, as one line."""
    try:
        yield
    except ThalwegError:
        raise
    except (ConnectionError, OSError) as error:
        raise OfflineError(
            f"{task}: its data are not here and no hub was reached ({first_line(error)}); fill the cache of datasets where there is a network, "
            "or give task files with local data by include_path"
        ) from None
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise InputError(f"{task}: lm-eval refuses it: {first_line(error)}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval tells of itself on stderr at every step; errors still come through."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "lm-eval", "evaluate", "datasets", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):  # its bars; what goes wrong is raised
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _scores(task: str, samples: Sequence[Mapping[str, Any]], shots: int | None, window: int) -> Scores:
    samples = sorted(samples, key=lambda sample: sample["doc_id"])
    columns: dict[str, np.ndarray] = {"items": np.ones(len(samples))}
    metrics: list[str] = []
    for name in _SHARES:
        if samples and all(isinstance(sample.get(name), int | float) for sample in samples):
            columns[name] = np.array([float(sample[name]) for sample in samples])
            metrics.append(name)
    for name, (unit, _) in _ROLLING.items():
        if samples and all(name in sample for sample in samples):
            columns["log_likelihood"] = np.array([float(sample[name][0]) for sample in samples])
            columns[unit] = np.array([float(sample[name][1]) for sample in samples])
            metrics.append(name)
    if not metrics:
        raise InputError(
            f"{task}: none of its metrics adds up over documents; known: {', '.join([*_SHARES, *_ROLLING])}"
        )
    names = tuple(f"{task} {sample['doc_id']}" for sample in samples)
    rule = f"lm-eval, {0 if shots is None else shots}-shot, windows of {window} tokens"
    return Scores(task, rule, names, columns, tuple(map(_metric, metrics)), {"shots": shots, "window": window})


def _metric(name: str) -> Metric:
    if name not in _ROLLING:
        return share((name, "items"), name)
    unit, of = _ROLLING[name]
    return Metric(name, "bits/byte" if name == "bits_per_byte" else "", ("log_likelihood", unit), of, "lower")


def kept_rows(name: str, found: Mapping[str, Scores]) -> list[dict[str, Any]]:
    """The results of one name as rows: one for each document, and a last one that says that they are all there."""
    rows = [{"task": task, **row} for task, scores in found.items() for row in scores.rows()]
    whole = {
        task: {"rule": one.rule, "facts": one.facts, "items": len(one.items), "metrics": [m.name for m in one.metrics]}
        for task, one in found.items()
    }
    return [*rows, {"item": _whole(name), "tasks": whole}]


def from_rows(name: str, known: Mapping[str, Mapping[str, Any]]) -> dict[str, Scores] | None:
    """What :func:`kept_rows` wrote, read by the names of items; None where it is not whole."""
    found: dict[str, Scores] = {}
    for task, about in known.get(_whole(name), {}).get("tasks", {}).items():
        rows = [row for row in known.values() if row.get("task") == task]
        if len(rows) != about["items"]:
            return None
        columns = {key: np.array([float(row[key]) for row in rows]) for key in rows[0] if key not in _BESIDE}
        items, metrics = tuple(str(row["item"]) for row in rows), tuple(map(_metric, about["metrics"]))
        found[task] = Scores(task, about["rule"], items, columns, metrics, dict(about["facts"]))
    return found or None


def _whole(name: str) -> str:
    return f"{name}: whole"
