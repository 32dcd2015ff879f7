"""From a plan to the exact training configuration of every arm; sizes are matched here, by the package."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from thalweg import config
from thalweg.errors import InputError, MissingExtraError, OfflineError
from thalweg.studies.plan import Arm, Plan, digest
from thalweg.training.config import TrainConfig, from_table

if TYPE_CHECKING:
    from thalweg.models import DecoderConfig

# Fields that change neither the numbers nor the data of a run.
FREE = ("device", "parallel", "save_every")


def resolve(plan: Plan, scale: str, vocab_size: Callable[[TrainConfig], int]) -> dict[str, TrainConfig]:
    """Arm -> configuration at ``scale``, before learning rate and seed are set.

    vocab_size: what the task of a configuration gives (it opens the data). The tables are merged in this order, later ones win: the
    plan's ``train``, the scale's, the arm's; then connection and options; then the size of matched arms.
    Raises: InputError naming the arm.
    """
    found: dict[str, TrainConfig] = {}
    for name in plan.arms_at(scale):
        arm = plan.arms[name]
        found[name] = _single(plan, scale, name, arm)
    for name in found:
        match = plan.arms[name].match
        if match is not None:
            target = match.parameters or match.flops
            base = found[target] if target in found else _single(plan, scale, str(target), plan.arms[str(target)])
            vocab = vocab_size(base)
            with _of_arm(name):
                mine = found[name].decoder(vocab)
            with _of_arm(str(target)):
                theirs = base.decoder(vocab)
            with _of_arm(name):
                found[name] = _matched(
                    found[name], mine, theirs, "parameters" if match.parameters else "flops", match.by
                )
    return found


def require_models(arms: Mapping[str, TrainConfig]) -> None:
    """That the model of every arm can be made, so that a study does not end at the arm that cannot. Raises: InputError naming the arm.

    An arm whose data come from a hub that cannot be reached here is left out: it may be run elsewhere.
    """
    import torch

    from thalweg.models.making import make
    from thalweg.training.tasks import load_task

    tasks: dict[tuple[Any, ...], Any] = {}
    for name, run in arms.items():
        key = (run.data, run.tokenizer, run.vocab_size, run.objective)
        try:
            if key not in tasks:
                with _of_arm(name):
                    tasks[key] = load_task(run)
        except (OfflineError, MissingExtraError):
            continue
        with _of_arm(name), torch.device("meta"):
            make(run.network(tasks[key]))


@contextmanager
def _of_arm(name: str) -> Iterator[None]:
    """Errors name the arm."""
    try:
        yield
    except InputError as error:
        raise InputError(f"arm {name}: {error}") from error


def _single(plan: Plan, scale: str, name: str, arm: Arm) -> TrainConfig:
    table = config.merge(config.merge(plan.train, plan.at(scale).train), arm.train)
    for key in ("connection", "connection_options", "seed"):
        if key in table:
            raise InputError(
                f"arm {name}: {key} does not belong into a training table of a plan; arms and seeds say it"
            )
    with _of_arm(name):
        return from_table({**table, "connection": arm.connection, "connection_options": arm.options})


def _matched(
    own: TrainConfig, mine: "DecoderConfig", theirs: "DecoderConfig", what: str, by: Literal["ffn_width", "width"]
) -> TrainConfig:
    from thalweg.models.matching import match_flops, match_parameters

    made = (
        match_parameters(mine, theirs, adjust=by)
        if what == "parameters"
        else match_flops(mine, theirs, length=own.sequence_length, adjust=by)
    )
    return dataclasses.replace(own, width=made.width, heads=made.heads, ffn_width=made.ffn_width)


def tables(arms: dict[str, TrainConfig]) -> dict[str, dict[str, Any]]:
    """The configurations as plain values, for the lock."""
    return {name: config.to_plain(arm) for name, arm in arms.items()}


def fingerprint(run: TrainConfig) -> str:
    """Identity of a run: the values that it states, those that decide its numbers and differ from the defaults.

    Defaults stay out, so that a field added by a later version leaves old records findable; :func:`conflicts` sees a changed default.
    """
    defaults = config.to_plain(TrainConfig())
    stated = {k: v for k, v in config.to_plain(run).items() if k not in FREE and v != defaults.get(k)}
    return digest(stated)


def conflicts(recorded: Mapping[str, Any], run: TrainConfig) -> list[str]:
    """Fields on which a record and ``run`` disagree, of those that both know."""
    now = config.to_plain(run)
    return [key for key in sorted(recorded.keys() & now.keys()) if key not in FREE and recorded[key] != now[key]]
