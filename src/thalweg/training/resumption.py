"""What must hold for a run to go on where a checkpoint left it, and what may differ and is noted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thalweg.errors import CheckpointError
from thalweg.records import provenance
from thalweg.training.config import TrainConfig, changes
from thalweg.training.parallel import Ranks

NUMBER = (int, float)
STATE: dict[str, tuple[type, ...]] = {
    "optimizers": (dict,),
    "sampler": (dict,),
    "random": (list,),
    "rule": (dict,),
    "meter": (dict,),
    "best": (list,),
    "train_loss": (*NUMBER, type(None)),
    "evaluation": (dict,),
}
RULE: dict[str, tuple[type, ...]] = {"first_loss": (*NUMBER, type(None)), "above": (int,)}
METER: dict[str, tuple[type, ...]] = {"seconds": NUMBER, "tokens": NUMBER, "peak_memory": NUMBER}
BEST: dict[str, tuple[type, ...]] = {"loss": (*NUMBER, type(None)), "step": (int, type(None))}


def check_state(state: Mapping[str, Any], file: Path) -> None:
    """The form of what a run saves beside its weights; the optimisers and the data check theirs. Raises: CheckpointError, in one line."""
    check_table(state, STATE, str(file))
    check_table(state["rule"], RULE, f"{file}: rule")
    check_table(state["meter"], METER, f"{file}: meter")
    best = dict(zip(BEST, state["best"], strict=False)) if len(state["best"]) == len(BEST) else {}
    check_table(best, BEST, f"{file}: best")
    check_table(state["evaluation"], dict.fromkeys(state["evaluation"], NUMBER), f"{file}: evaluation")
    if not state["random"] or not all(isinstance(kept, dict) for kept in state["random"]):
        raise CheckpointError(f"{file}: random must hold one table for each rank; {ADVICE}")


ADVICE = "use another checkpoint, or the version that wrote it"


def check_table(table: Any, kinds: Mapping[str, tuple[type, ...]], where: str) -> None:
    """Raises: CheckpointError for keys that are missing, unknown or of another type; a flag is no number."""
    if not isinstance(table, dict):
        raise CheckpointError(f"{where} must be a table, got {type(table).__name__}; {ADVICE}")
    missing = [name for name in kinds if name not in table]
    unknown = sorted(str(name) for name in table if name not in kinds)
    wrong = [
        f"{name} must be {' or '.join(_word(k) for k in kind)}, got {_word(type(table[name]))}"
        for name, kind in kinds.items()
        if name in table and (isinstance(table[name], bool) or not isinstance(table[name], kind))
    ]
    faults = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has unknown {', '.join(unknown)}"] * bool(unknown)
    if faults or wrong:
        raise CheckpointError(f"{where} {'; '.join([*faults, *wrong])}; {ADVICE}")


def _word(kind: type) -> str:
    return "None" if kind is type(None) else kind.__name__


def same_config(saved: Mapping[str, Any], now: TrainConfig, where: Path) -> None:
    """Raises: CheckpointError that names what differs and must not."""
    different = changes(saved, now)
    if different:
        raise CheckpointError(
            f"{where} was started with another configuration ({'; '.join(different)}); resume with the same one, or choose a new folder"
        )


def environment(config: TrainConfig, device: str, ranks: Ranks) -> dict[str, Any]:
    """Provenance, with what of the configuration may change at a resumption and change its bits."""
    mode = {"compile": config.compile, "parallel": config.parallel if ranks.world > 1 else "none"}
    return {**provenance.collect(device), "ranks": ranks.world, "mode": mode}


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What keeps a resumed run from being bitwise the uninterrupted one."""
    different = provenance.bitwise_differences(dict(saved), dict(now))
    before, after = saved.get("mode", {}), now["mode"]
    return different + [f"{key} {before.get(key)} -> {after[key]}" for key in after if before.get(key) != after[key]]


def same_data(saved: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    """Raises: CheckpointError."""
    if saved.get("fingerprint") != now["fingerprint"]:
        raise CheckpointError(
            f"{where} was trained on {saved.get('name')} ({str(saved.get('fingerprint'))[:12]}), the data is now {now['name']} "
            f"({now['fingerprint'][:12]}); resume with the data of its start"
        )
