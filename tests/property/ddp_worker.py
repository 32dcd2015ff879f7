"""Helper of test_ddp: one of two processes that train together. Usage: ddp_worker.py FOLDER, with RANK etc. in the environment."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from thalweg import connections
from thalweg.data.task import Task, as_batch
from thalweg.errors import InputError
from thalweg.training import Interrupted, TrainConfig, train
from thalweg.training.engine import Engine
from thalweg.training.parallel import Ranks, process_group


class Ragged(Task):
    """Random tokens of which a sample-dependent number is scored, none at all in some samples: ranks never hold equal shares."""

    name, kind, vocab_size, fingerprint = "ragged", "synthetic", 11, "ragged"

    def nulls(self):
        return {}

    def _batch(self, samples, length, seed):
        rng = [np.random.default_rng((seed, int(i))) for i in samples]
        ids = np.array([(r.integers(11) + np.arange(length) * r.integers(1, 4)) % 11 for r in rng])
        labels = ids.copy()
        for row, sample in zip(labels, samples, strict=True):
            row[: length if sample % 8 < 3 else 1 + sample % 7] = -100
        return as_batch(ids, labels)

    def _order(self, split, length, seed):
        return lambda samples: self._batch(samples, length, seed)

    def _held_out(self, split, length):
        return 21, lambda chosen: self._batch(chosen + 3, length, 99)


BASE = {"connection": "mgt", "depth": 2, "width": 16, "heads": 2, "sequence_length": 10, "batch_size": 8, "steps": 6}
BASE |= {"lr": 1e-2, "eval_every": 3, "save_every": 2, "eval_batches": 5, "threads": 1, "geometry": False}
HEAD = {"contraction": "head", "mixer": "spectral_sphere"}  # parameters outside the sites, and one-element ones
EXPERTS = {"experts": 4, "dense_layers": 1}
CASES = {
    "ddp": {},
    "ddp_accumulated": {"accumulation": 2},
    "fsdp": {"parallel": "fsdp"},
    "fsdp_muon": {"parallel": "fsdp", "accumulation": 2, "optimizer": "muon"},
    "fsdp_bfloat16": {"parallel": "fsdp", "precision": "bfloat16"},
    "ddp_experts": {
        "layers": ("attention", "moe"),
        "model": EXPERTS,
        "accumulation": 2,
        "gradient_checkpointing": True,
    },
    "fsdp_experts": {"parallel": "fsdp", "layers": ("attention", "moe"), "model": EXPERTS, "connection": "additive"},
    "ddp_edits": {"attention_edit": "value:exclude-self:1..0@4", "mlp_edit": "residual:learned"},
    "fsdp_edits": {
        "parallel": "fsdp",
        "attention_edit": "value:full:learned,per=head",
        "mlp_edit": "residual:learned,control=random-direction",
    },
    "fsdp_additive": {"parallel": "fsdp", "connection": "additive", "gradient_checkpointing": True},
}


def config(**changes):
    return TrainConfig(**(BASE | changes))


def outcome(folder, stop=None, resume=False, **changes):
    try:
        result = train(config(**changes), folder, task=Ragged(), stop=stop, resume=resume)
    except (InputError, Interrupted) as error:
        return {"error": type(error).__name__, "text": str(error)}
    return result.to_plain()


def seen_dtypes(connection: str, **options) -> dict[str, list[str]]:
    """What a sharded model in bfloat16 computes with, and how it keeps its parameters between passes; of streams, their coefficients."""
    seen: dict[str, set[str]] = {"read": set(), "write": set(), "block": set(), "coefficients": set()}
    kind = connections.registry[connection].SiteModule
    for verb in ("read", "write"):
        original = getattr(kind, verb)

        def watched(self, *args, original=original, verb=verb, **kwargs):
            seen[verb] |= {f"{type(p).__name__} {p.dtype}" for p in self.parameters()}
            result = original(self, *args, **kwargs)
            if verb == "read" and hasattr(result[1], "mix"):
                seen["coefficients"] |= {str(part.dtype) for part in (result[1].read, result[1].write, result[1].mix)}
            return result

        setattr(kind, verb, watched)
    engine = Engine(
        config(parallel="fsdp", precision="bfloat16", connection=connection, connection_options=options),
        Ragged(),
        torch.device("cpu"),
        Ranks(torch.distributed.get_rank(), 2),
    )
    for block in engine.model.blocks:
        forward = block.forward

        def look(*args, forward=forward, block=block, **kwargs):
            seen["block"] |= {f"{type(p).__name__} {p.dtype}" for p in block.parameters()}
            return forward(*args, **kwargs)

        block.forward = look
    engine.gradients()
    engine.optimizers.zero_grad()
    engine.model.reshard()
    kept = {f"{type(p).__name__} {p.dtype}" for block in engine.model.blocks for p in block.parameters()}
    shards = [p for p in engine.model.parameters() if isinstance(p, DTensor) and p.to_local().numel() < p.numel()]
    return {**{k: sorted(v) for k, v in seen.items()}, "kept": sorted(kept), "sharded": [str(len(shards) > 30)]}


def router_dtypes() -> list[str]:
    """What the routers of a sharded model in bfloat16 compute with."""
    engine = Engine(
        config(parallel="fsdp", precision="bfloat16", layers=("attention", "moe"), model=EXPERTS),
        Ragged(),
        torch.device("cpu"),
        Ranks(torch.distributed.get_rank(), 2),
    )
    router, seen = engine.model.sublayers[3].router, []
    choose = router.choose
    router.choose = lambda scores, count: (
        seen.append((scores.dtype, router.linear.weight.dtype)) or choose(scores, count)
    )
    engine.gradients()
    return [str(dtype) for dtype in seen[0]]


def losses_of_every_connection(ranks: Ranks) -> dict[str, dict[str, list[float]]]:
    """Two losses of each connection: in one process, replicated, sharded."""
    found = {}
    subjects = {name: {"connection": name} for name in connections.names()}
    subjects["mhc with a head"] = {"connection": "mhc", "connection_options": HEAD}
    for name, chosen in subjects.items():
        for kind, who in (("alone", Ranks()), ("ddp", ranks), ("fsdp", ranks)):
            changes = {"parallel": kind} if kind != "alone" else {}
            engine = Engine(config(**chosen, **changes), Ragged(), torch.device("cpu"), who)
            for step in (1, 2):
                found.setdefault(name, {}).setdefault(kind, []).append(engine.gradients().loss)
                engine.update(step)
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    with process_group(torch.device("cpu")) as ranks:
        found = {name: outcome(folder / name, **changes) for name, changes in CASES.items()}
        found["twice"] = outcome(folder / "ddp")
        found["diverged"] = outcome(
            folder / "diverged", lr=1e5, warmup=0.0, clip=0.0, connection="none", steps=40, diverge_patience=2
        )
        for kind in ("ddp", "fsdp"):
            found[f"{kind}_stopped"] = outcome(folder / f"{kind}_resumed", stop=lambda: ranks.rank == 1, parallel=kind)
            found[f"{kind}_resumed"] = outcome(folder / f"{kind}_resumed", resume=True, parallel=kind)
        found["left"] = outcome(folder / "left", stop=lambda: ranks.rank == 1, parallel="fsdp")
        found["bad_batch"] = outcome(folder / "bad", batch_size=3)
        found["connections"] = losses_of_every_connection(ranks)
        found["dtypes"] = {"mgt": seen_dtypes("mgt"), "mhc": seen_dtypes("mhc", **HEAD)}
        found["router"] = router_dtypes()
        (folder / f"rank{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
