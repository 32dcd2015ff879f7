"""The start of a run: its folder taken, its parts built, and either begun or taken up where it stopped."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from thalweg import config as configs
from thalweg.data import Task
from thalweg.errors import InputError
from thalweg.geometry.summaries import LEAST_SEQUENCES
from thalweg.records import RunFolder
from thalweg.records.run import LOCK
from thalweg.training import initial
from thalweg.training.changing import Changer
from thalweg.training.config import TrainConfig
from thalweg.training.determinism import derive_seed, pick_device, reproducible
from thalweg.training.engine import Engine
from thalweg.training.events import Listener
from thalweg.training.geometry import geometry_of, held_out_sequences
from thalweg.training.loop import Loop, Measure
from thalweg.training.parallel import process_group
from thalweg.training.result import RunResult
from thalweg.training.resumption import same_config
from thalweg.training.signals import StopRequests
from thalweg.training.tasks import load_task

ENDED = ("done", "diverged")


def train(
    config: TrainConfig,
    run: str | Path,
    *,
    resume: bool = False,
    on_event: Listener | None = None,
    stop: Callable[[], bool] | None = None,
    measure: Measure | None = None,
    task: Task | None = None,
    cache_dir: str | Path | None = None,
    arm: str = "",
    plan_hash: str = "",
    changer: Changer | None = None,
) -> RunResult:
    """Train a model in the new folder ``run``, or go on with the run that is there.

    resume: continue after the last checkpoint (from the start if none was written yet); a run that has ended gives its recorded result.
    Bitwise the uninterrupted run on the same kind of machine, versions, threads and ranks; whatever differs is noted in the record.
    on_event: hears what happens (progress, trackers); on the first rank only. stop: asked after each update; True ends the run as
    ``interrupted``. measure: gives measurements of the model at a step; called at the start, every ``measure_every`` steps and at the end
    (default: the geometry of the stream; where that cannot be had the record says why). task: the data, loaded already (default: what the
    configuration names, with its cache in ``cache_dir``). arm, plan_hash: written into the record. changer: changes the structure of the
    model on the way, which a configuration with ``growth`` needs (:func:`thalweg.growth.grow` gives it).
    Divergence is a result, not an error.
    Raises: InputError for what cannot be trained; CheckpointError for a checkpoint that is damaged, foreign or of another configuration,
    or cannot be written; Interrupted after SIGINT or SIGTERM, once the step is finished and saved (a second signal acts at once).
    """
    if config.growth is not None and changer is None:
        raise InputError(
            "this configuration has a table growth: the model grows while it trains, by thalweg grow; or leave the table out"
        )
    device = pick_device(config.device)
    with (
        process_group(device) as ranks,
        reproducible(derive_seed(config.seed, 2) + ranks.rank, device, config.threads),
        StopRequests() as requests,
        ExitStack() as held,  # the folder, by the first rank, until this returns
    ):
        if resume:
            folder = ranks.first_does(lambda: RunFolder.open(run))
            same_config(folder.config, config, folder.path)
            if folder.status not in ENDED:
                folder = ranks.first_does(lambda: _take_up(run, held))
            if folder.status in ENDED:
                return RunResult.from_plain(folder.result, folder.path / "run.json")
        if task is None:
            ranks.first_does(
                lambda: load_task(config, cache_dir) and None
            )  # fills the cache before the other ranks read it
            task = load_task(config, cache_dir)
        engine = Engine(config, task, device, ranks)
        if changer is not None:
            changer.attach(engine)
        notes = list(task.notes_at(config.sequence_length))
        if measure is None and config.geometry:
            missing = _why_no_geometry(engine)
            measure = None if missing else geometry_of(config, task)
            notes += [f"the geometry of the stream is not measured: {missing}"] * bool(missing)
        if not resume:
            table = configs.to_plain(config)
            where = {"arm": arm, "plan_hash": plan_hash, "seed": config.seed, "device": str(device)}
            if config.init_from is not None:
                where["origin"] = {
                    "init_from": {"folder": config.init_from, "sha256": initial.hashes(config.init_from)}
                }
            folder = ranks.first_does(lambda: _start(run, held, table, where))
        loop = Loop(engine, folder, requests, stop, measure, on_event, changer)
        return loop.run(resume, notes)


def _take_up(run: str | Path, held: ExitStack) -> RunFolder:
    held.enter_context(RunFolder.hold(run))
    return RunFolder.open(run)  # as it is now: another process may have ended it meanwhile


def _start(run: str | Path, held: ExitStack, table: dict[str, Any], where: Mapping[str, Any]) -> RunFolder:
    if not (Path(run) / LOCK).exists():
        RunFolder.check_new(run)  # no lock is left in a folder that is somebody else's
    held.enter_context(RunFolder.hold(run))
    return RunFolder.create(run, table, **where)


def _why_no_geometry(engine: Engine) -> str:
    if engine.wrapped.kind == "fsdp":
        return "the model is sharded; measure its checkpoint"
    found = held_out_sequences(engine.config, engine.task)
    if len(found) < LEAST_SEQUENCES:
        return f"{engine.task.name} holds {len(found)} held-out sequences of {found.shape[1]} tokens, {LEAST_SEQUENCES} are needed"
    return ""
