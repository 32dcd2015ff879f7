"""Checkpoints on disk: complete or absent, verified when read, the last two and the best kept.

    checkpoints/step-00000200/
        model.safetensors   weights, tied ones once
        state.pt            optimisers, samplers, random state, the loop's own counters
        checkpoint.json     step, configuration, environment, the best step so far
        SHA256SUMS          of the three (``sha256sum -c`` reads it)

A checkpoint is written into a hidden folder beside its place, flushed to the disk, then renamed: a process killed at any moment leaves the
earlier ones and perhaps a hidden folder, which the next save removes.
"""

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from thalweg.errors import CheckpointError, ThalwegError
from thalweg.models.sharing import named_weights

SCHEMA = 1
KIND = "thalweg.checkpoint"
WEIGHTS, STATE, MANIFEST, SUMS = "model.safetensors", "state.pt", "checkpoint.json", "SHA256SUMS"
KEEP = 2
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files match their checksums; tensors are read when asked for."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return self.manifest["step"]

    def weights(self) -> dict[str, Tensor]:
        """Name -> tensor, on the CPU. Raises: CheckpointError if the file cannot be read or holds numbers that are not finite."""
        file = self.path / WEIGHTS
        with understood(file):
            weights = load_file(file)
            broken = [n for n, w in weights.items() if w.is_floating_point() and not bool(w.isfinite().all())]
        if broken:
            raise CheckpointError(f"{file} holds weights that are not finite: {_some(broken)}; use another checkpoint")
        return weights

    def state(self) -> dict[str, Any]:
        """What was saved beside the weights, on the CPU; nothing that the file may contain is executed. Raises: CheckpointError."""
        file = self.path / STATE
        with understood(file):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of torch, about the format of a foreign file
                    state = torch.load(file, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError:
                raise CheckpointError(f"{file} holds more than tensors and plain values; it is not loaded") from None
        if not isinstance(state, dict):
            raise CheckpointError(
                f"{file} holds no state of a run but a {type(state).__name__}; use another checkpoint"
            )
        return state


@contextmanager
def understood(file: Path) -> Iterator[None]:
    """Read from a file of a checkpoint: what is missing or of another form there becomes a CheckpointError that names the file."""
    try:
        yield
    except (ThalwegError, torch.OutOfMemoryError):
        raise
    except KeyError as error:
        raise CheckpointError(f"{file} lacks {error}; use another checkpoint or the version that wrote it") from error
    except _UNREADABLE as error:
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise CheckpointError(f"{file} cannot be used: {why}; use another checkpoint") from error


_UNREADABLE = (
    *(OSError, EOFError, RuntimeError, pickle.UnpicklingError, SafetensorError),
    *(TypeError, ValueError, AttributeError, IndexError),
)


def list_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in ``folder``, in order."""
    if not folder.is_dir():
        return []
    return sorted(
        int(found.group(1)) for path in folder.iterdir() if path.is_dir() and (found := _NAME.fullmatch(path.name))
    )


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def save(
    folder: Path, step: int, *, weights: Mapping[str, Tensor], state: Mapping[str, Any], manifest: Mapping[str, Any]
) -> Path:
    """Write one checkpoint and drop those no longer needed. ``manifest["best_step"]`` names the best so far (it may be this one).

    Raises: CheckpointError when the disk refuses (full, read-only); the earlier checkpoints are then untouched.
    """
    final = path_of(folder, step)
    temporary = folder / f".writing-{final.name}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(folder)
        temporary.mkdir()
        save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, temporary / WEIGHTS)
        torch.save(dict(state), temporary / STATE)
        text = json.dumps({"schema": SCHEMA, "kind": KIND, "step": step, **manifest}, indent=1, allow_nan=False)
        (temporary / MANIFEST).write_text(text + "\n", encoding="utf-8")
        sums = "".join(f"{_digest(temporary / name)}  {name}\n" for name in (WEIGHTS, STATE, MANIFEST))
        (temporary / SUMS).write_text(sums, encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            _flush(path)
        temporary.rename(final)
        _flush(folder)
    except (
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:  # torch and safetensors wrap what the disk says in their own
        shutil.rmtree(temporary, ignore_errors=True)
        kept = list_steps(folder)
        first = "make room" if _is_full(error) else "put that right"
        intact = (
            f"the checkpoint of step {kept[-1]} is intact; {first} and resume" if kept else f"{first} and start again"
        )
        why = os.strerror(errno.ENOSPC) if _is_full(error) else error
        raise CheckpointError(f"the checkpoint {final} cannot be written: {why}; {intact}") from error
    _drop_old(folder)
    return final


def find(folder: Path, which: str | int = "last") -> Path:
    """The folder of the ``last`` checkpoint, the ``best`` one, or that of a step. Raises: CheckpointError naming what is there."""
    steps = list_steps(folder)
    if not steps:
        raise CheckpointError(f"{folder} holds no checkpoint; train first, or give another run folder")
    wanted = steps[-1] if which == "last" else which
    if which == "best":
        wanted = _read_manifest(path_of(folder, steps[-1])).get("best_step")
    if wanted not in steps:
        raise CheckpointError(
            f"{folder} holds no checkpoint of {f'step {wanted}' if isinstance(wanted, int) else repr(wanted)}; "
            f"choose last, best or one of the steps {', '.join(map(str, steps))}"
        )
    return path_of(folder, wanted)


def read(path: Path) -> Checkpoint:
    """Open the checkpoint at ``path`` and verify every file. Raises: CheckpointError for a missing, truncated or foreign one."""
    manifest = _read_manifest(path)
    try:
        lines = (path / SUMS).read_text(encoding="utf-8").splitlines()
        sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError):
        raise _damaged(path, f"{SUMS} is missing or unreadable") from None
    for name in (WEIGHTS, STATE, MANIFEST):
        try:
            intact = _digest(path / name) == sums.get(name)
        except OSError:
            raise _damaged(path, f"{name} is missing") from None
        if not intact:
            raise _damaged(path, f"{name} ({(path / name).stat().st_size} bytes) does not match its checksum")
    return Checkpoint(path, manifest)


def check_fit(weights: Mapping[str, Tensor], model: nn.Module, source: Path) -> None:
    """Raises: CheckpointError that names what is missing, left over or of another shape, in one line."""
    own = named_weights(model)
    missing, extra = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [
        f"{name} {list(weights[name].shape)} for {list(value.shape)}"
        for name, value in own.items()
        if name in weights and weights[name].shape != value.shape
    ]
    types = [
        f"{name} {weights[name].dtype} for {value.dtype}"
        for name, value in own.items()
        if name in weights and weights[name].is_floating_point() != value.is_floating_point()
    ]
    faults = [
        f"{what} {_some(names)}"
        for what, names in (("lacks", missing), ("has unknown", extra), ("has shapes", shapes), ("has types", types))
        if names
    ]
    if faults:
        raise CheckpointError(
            f"{source} does not fit this model: it {'; '.join(faults)}; use the configuration that it was trained with"
        )


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], source: Path) -> None:
    """Copy ``weights`` into the model, name by name. Raises: CheckpointError as :func:`check_fit`."""
    check_fit(weights, model, source)
    with torch.no_grad():
        for name, value in named_weights(model).items():
            value.copy_(weights[name])


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a checkpoint of thalweg: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise _damaged(path, f"{MANIFEST} is unreadable ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise CheckpointError(f"{path} is not a checkpoint of thalweg: its {MANIFEST} does not say kind {KIND!r}")
    if manifest.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{path} has schema {manifest.get('schema')}, this version reads {SCHEMA}; use the version that wrote it"
        )
    step, best = manifest.get("step"), manifest.get("best_step")
    if type(step) is not int or not (best is None or type(best) is int):
        raise _damaged(path, f"{MANIFEST} does not say its step, or which is the best")
    return manifest


def _damaged(path: Path, what: str) -> CheckpointError:
    others = [step for step in list_steps(path.parent) if path_of(path.parent, step) != path]
    advice = f"delete it to go on from step {others[-1]}" if others else "no other checkpoint is left; start again"
    return CheckpointError(f"the checkpoint {path} is damaged: {what}; {advice}")


def _some(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_full(error: Exception) -> bool:
    """Whether the disk had no room; safetensors passes the system's words on, torch only that its file is shorter than it should be."""
    return getattr(error, "errno", None) == errno.ENOSPC or any(
        words in str(error) for words in (os.strerror(errno.ENOSPC), "PytorchStreamWriter failed", "unexpected pos")
    )


def _flush(path: Path) -> None:
    """Have the disk keep a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_unfinished(folder: Path) -> None:
    for path in folder.glob(".writing-*"):
        shutil.rmtree(path, ignore_errors=True)


def _drop_old(folder: Path) -> None:
    """Keep the newest checkpoints and the best step that each of them names.

    A folder is renamed out of sight before it is deleted, so that a process killed meanwhile leaves no half of a checkpoint.
    """
    steps = list_steps(folder)
    kept = set(steps[-KEEP:])
    kept |= {_read_manifest(path_of(folder, step)).get("best_step") for step in steps[-KEEP:]}
    for step in steps:
        if step not in kept:
            hidden = folder / f".writing-old-{step:08d}"
            path_of(folder, step).rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)
