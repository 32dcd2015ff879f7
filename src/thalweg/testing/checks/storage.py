"""Does it survive being saved?"""

import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_model

from thalweg.connections.base import Stream
from thalweg.testing.compare import require, rows
from thalweg.testing.subjects import Subject, embedding_for, sublayers_for


def storage(subject: Subject) -> None:
    """``state_dict`` and safetensors restore a new stream bit for bit; shared parameters are stored once and stay shared."""
    stream = subject.random(dtype=torch.float32)
    sublayers, embedding = sublayers_for(stream), embedding_for(stream, dtype=torch.float32)
    with torch.no_grad():
        want = stream(embedding, sublayers)

    def require_restored(fresh: Stream, how: str) -> None:
        with torch.no_grad():
            require(
                torch.equal(fresh(embedding, sublayers), want), f"a new stream restored from {how} gives another output"
            )
        for (name, saved), (_, loaded) in zip(stream.named_parameters(), fresh.named_parameters(), strict=True):
            require(torch.equal(saved, loaded), f"{name} restored from {how} differs")

    fresh = subject.start(dtype=torch.float32, seed=8)
    missing, unexpected = fresh.load_state_dict(stream.state_dict(), strict=False)
    lost = rows([*missing, *unexpected])
    require(not lost, f"the state_dict of one stream does not fit another of the same options: {lost}")
    require_restored(fresh, "its state_dict")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream.safetensors"
        save_model(stream, str(path))
        with safe_open(path, "pt") as file:
            stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - not a mapping
        fresh = subject.start(dtype=torch.float32, seed=9)
        load_model(fresh, str(path))
    require_restored(fresh, "safetensors")
    held = sum(parameter.numel() for parameter in stream.parameters())
    kept = set(stream.state_dict())
    held += sum(buffer.numel() for name, buffer in stream.named_buffers() if name in kept)
    require(stored == held, f"safetensors holds {stored} numbers, the stream {held}; shared parameters are stored once")
    require(_sharing(fresh) == _sharing(stream), "parameters that were shared are shared no longer after loading")


def _sharing(stream: Stream) -> set[frozenset[str]]:
    groups: dict[int, set[str]] = {}
    for name, parameter in stream.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in groups.values() if len(group) > 1}
