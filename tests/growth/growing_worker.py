"""Helper of test_growing_ranks: one of two processes that grow one model together. Usage: growing_worker.py FOLDER, RANK etc. set."""

import json
import sys
from pathlib import Path

import torch

from thalweg import surgery
from thalweg.errors import InputError
from thalweg.growth.run import grow
from thalweg.models import Decoder, DecoderConfig
from thalweg.training import TrainConfig
from thalweg.training.parallel import process_group, shard

BASE = {
    "depth": 2,
    "width": 16,
    "heads": 1,
    "model": {"head_size": 4},
    "data": "copy:vocab=8,half=4",
    "sequence_length": 9,
}
BASE |= {"batch_size": 16, "steps": 12, "lr": 1e-2, "eval_every": 6, "eval_batches": 1, "threads": 1, "geometry": False}
GROWTH = {"check_every": 2, "dwell": 4, "threshold": 0.3, "most_heads": 4}


def config(**changes):
    return TrainConfig(**{**BASE, "growth": GROWTH, **changes})


def sharded_surgery() -> dict[str, str]:
    """What surgery says to a sharded model, and to an optimiser of one that was grown before."""

    def decoder():
        return Decoder(
            DecoderConfig(vocab_size=17, width=16, depth=1, heads=2), generator=torch.Generator().manual_seed(0)
        )

    model, whole = decoder(), decoder()
    shard(model)
    ids = torch.arange(14).reshape(2, 7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    grown, change = surgery.grow_heads(whole, {0: 1})
    tried = {
        "heads": lambda: surgery.grow_heads(model, {0: 1}),
        "prune": lambda: surgery.prune_heads(model, {0: [1]}),
        "width": lambda: surgery.grow_width(model, width=24),
        "depth": lambda: surgery.grow_depth(model, at=[0]),
        "scores": lambda: surgery.head_scores(model, ids),
        "carry": lambda: surgery.carry_optimizer(optimizer, change),
        "carry to sharded": lambda: (
            shard(grown),
            surgery.carry_optimizer(torch.optim.AdamW(grown.parameters()), change),
        ),
    }
    said = {}
    for name, action in tried.items():
        try:
            action()
            said[name] = ""
        except InputError as error:
            said[name] = str(error)
    return said


def main() -> None:
    folder = Path(sys.argv[1])
    with process_group(torch.device("cpu")) as ranks:
        straight = grow(config(), folder / "straight").to_plain()
        asked = iter(range(100))
        grow(config(), folder / "resumed", stop=lambda: ranks.rank == 1 and next(asked) == 4)
        resumed = grow(config(), folder / "resumed", resume=True).to_plain()
        try:
            grow(config(parallel="fsdp"), folder / "sharded")
            refused = ""
        except InputError as error:
            refused = str(error)
        found = {
            "straight": straight["growth"],
            "resumed": resumed["growth"],
            "refused": refused,
            "surgery": sharded_surgery(),
        }
        (folder / f"rank{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
