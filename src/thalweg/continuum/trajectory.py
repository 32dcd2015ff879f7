"""Trajectories of weights: what training leaves of a model at equal distances, block by block, as few random projections.

One safetensors file: ``steps`` [n]; ``sketch.BLOCK`` [n, k] float32, the projections; ``norm.BLOCK`` [n] float64, the true norm of the block.
Its metadata hold schema, kind, seed and size of the sketch, and what the run says of itself (lr, weight_decay, optimizer ...).
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from thalweg.errors import CheckpointError, InputError, first_line
from thalweg.records.files import atomic_write_bytes

SCHEMA, KIND = 1, "thalweg.trajectory"
DIRECTIONS = 16
_LAYER = re.compile(r"(?:^|\.)(blocks|layers|layer|h)\.(\d+)\.")
_STEP = re.compile(r"(\d+)(?!.*\d)")


def block_of(name: str) -> str:
    """The block of a parameter: its layer, or ``rest``."""
    found = _LAYER.search(name)
    return f"{found.group(1)}.{found.group(2)}" if found else "rest"


class Sketch:
    """A fixed random projection of every block to ``directions`` numbers; E <Sx, Sy> = <x, y>.

    Every weight goes to one random direction with a random sign, so that a sketch costs one pass and two bytes a weight.
    Source: Charikar, Chen and Farach-Colton 2002 (count sketch).
    """

    def __init__(self, directions: int = DIRECTIONS, seed: int = 0):
        if isinstance(directions, bool) or not isinstance(directions, int) or not 2 <= directions <= 16384:
            raise InputError(f"a sketch has 2 to 16384 directions, got {directions!r}")
        self.directions, self.seed = directions, seed
        self._places: dict[str, Tensor] = {}

    def __call__(self, named: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Named weights -> projections [k] in float32 and the norm, of every block."""
        sums: dict[str, Tensor] = {}
        squares: dict[str, float] = {}
        for name, weight in named:
            block, flat = block_of(name), weight.detach().double().flatten()
            place = self._place(name, flat.numel()).to(flat.device)
            total = sums.setdefault(block, torch.zeros(self.directions, dtype=torch.float64, device=flat.device))
            total.index_add_(0, (place.abs() - 1).long(), flat * place.sign())
            squares[block] = squares.get(block, 0.0) + float(flat.square().sum())
        return {b: x.float().cpu() for b, x in sums.items()}, {b: s**0.5 for b, s in squares.items()}

    def _place(self, name: str, size: int) -> Int[Tensor, " n"]:
        """Direction + 1 of every weight, negative where its sign is turned."""
        if name not in self._places:
            mixed = self.seed
            for byte in name.encode():
                mixed = (mixed * 1_000_003 + byte) % (
                    2**61 - 1
                )  # by name, not by order: hash() changes with the process
            g = torch.Generator().manual_seed(mixed)
            direction = torch.randint(1, self.directions + 1, (size,), generator=g, dtype=torch.int16)
            self._places[name] = direction * (2 * torch.randint(0, 2, (size,), generator=g, dtype=torch.int16) - 1)
        return self._places[name]


@dataclass(frozen=True)
class Trajectory:
    """steps [n]: updates completed, evenly spaced. blocks: name -> projections [n, k]. norms: name -> true norms [n]. facts: of the run."""

    steps: Int[Tensor, " n"]
    blocks: Mapping[str, Float[Tensor, "n k"]]
    norms: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.steps.ndim != 1:
            raise InputError(f"the steps of a trajectory must be one a record, [n], got shape {list(self.steps.shape)}")
        n = len(self.steps)
        if n < 3 or not self.blocks:
            raise InputError(
                f"a trajectory needs at least 3 records of one block or more, got {n} of {len(self.blocks)}"
            )
        gaps = self.steps.diff()
        if bool((gaps <= 0).any()) or bool((gaps != gaps[0]).any()):
            raise InputError(
                f"records of a trajectory must be evenly spaced in steps, got gaps of {sorted(set(gaps.tolist()))[:5]}"
            )
        for name, x in self.blocks.items():
            if x.ndim != 2 or len(x) != n:
                raise InputError(f"block {name} must be [{n}, directions], got shape {list(x.shape)}")
        for name, x in self.norms.items():
            if x.shape != (n,):
                raise InputError(
                    f"the norm of block {name} must be one number a record, [{n}], got shape {list(x.shape)}"
                )
        if not isinstance(self.facts, Mapping):
            raise InputError(f"the facts of a trajectory must be a table, got {type(self.facts).__name__}")
        for name in ("lr", "weight_decay"):
            value = self.facts.get(name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 <= value < math.inf):
                raise InputError(
                    f"{name} among the facts of a trajectory must be a number of at least 0, got {value!r}"
                )

    @property
    def stride(self) -> int:
        """Steps between two records."""
        return int(self.steps[1] - self.steps[0])

    def after(self, step: int) -> "Trajectory":
        """The part from ``step`` on. Raises: InputError where fewer than three records are left."""
        keep = self.steps >= step
        return Trajectory(
            self.steps[keep],
            {b: x[keep] for b, x in self.blocks.items()},
            {b: x[keep] for b, x in self.norms.items()},
            self.facts,
        )

    def write(self, path: str | Path) -> Path:
        """Write one file, whole or not at all. Raises: InputError where it cannot be written."""
        tensors = {"steps": self.steps.long().contiguous()}
        tensors |= {f"sketch.{b}": x.float().contiguous() for b, x in self.blocks.items()}
        tensors |= {f"norm.{b}": x.double().contiguous() for b, x in self.norms.items()}
        about = {"schema": str(SCHEMA), "kind": KIND, "facts": json.dumps(dict(self.facts))}
        path = Path(path)
        atomic_write_bytes(path, save(tensors, about))
        return path

    @classmethod
    def read(cls, path: str | Path) -> "Trajectory":
        """A file that :meth:`write` made, a run folder that holds one, or a folder of snapshots (safetensors, a number in every name).

        Raises: InputError for what is no trajectory, CheckpointError for a broken file.
        """
        path = Path(path)
        if path.is_dir():
            inside = path / NAME
            return cls.read(inside) if inside.is_file() else cls.of_snapshots(path)
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
            tensors = load_file(path)
        except FileNotFoundError:
            raise InputError(f"no such trajectory: {path} is missing; give a file or folder of snapshots") from None
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} cannot be read as safetensors: {str(error).splitlines()[0]}; give a trajectory"
            ) from None
        if about.get("kind") != KIND or "steps" not in tensors:
            raise InputError(
                f"{path} is no trajectory of thalweg but other tensors; give a folder of such snapshots, or a trajectory"
            )
        if about.get("schema") != str(SCHEMA):
            raise CheckpointError(
                f"{path} has schema {about.get('schema')}, this version reads {SCHEMA}; use the version that wrote it"
            )
        blocks, norms = (
            {n.removeprefix(p): x for n, x in tensors.items() if n.startswith(p)} for p in ("sketch.", "norm.")
        )
        try:
            return cls(tensors["steps"], blocks, norms, json.loads(about.get("facts", "{}")))
        except InputError as error:
            raise InputError(f"{path} holds no trajectory: {error}") from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is broken: its facts are no JSON ({first_line(error)}); record it again"
            ) from None

    @classmethod
    def of_snapshots(cls, folder: str | Path, sketch: Sketch | None = None, **facts: Any) -> "Trajectory":
        """From saved weights: every ``*.safetensors`` in the folder or one folder below, in the order of the last number of its path.

        Raises: InputError where there are fewer than three, or two do not hold the same weights; CheckpointError for a broken file.
        """
        folder = Path(folder)
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*/*.safetensors"))
        numbered = [
            (int(found.group(1)), file) for file in files if (found := _STEP.search(str(file.relative_to(folder))))
        ]
        if len(numbered) < 3:
            raise InputError(
                f"{folder} holds {len(numbered)} numbered snapshots (*.safetensors); a trajectory needs at least 3"
            )
        recorder, shapes = Recorder(sketch or Sketch(), facts), None
        for step, file in sorted(numbered):
            try:
                weights = {n: w for n, w in load_file(file).items() if w.is_floating_point()}
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file} cannot be read: {str(error).splitlines()[0]}; remove it") from None
            here = {n: tuple(w.shape) for n, w in weights.items()}
            if shapes is not None and here != shapes:
                raise InputError(
                    f"{file} holds other weights than the snapshots before it; keep those of one run in a folder"
                )
            shapes = here
            recorder.see(step, weights.items())
        return recorder.trajectory()


NAME = "trajectory.safetensors"


class Recorder:
    """Collects records while a model trains: ``see`` after an update, ``trajectory`` at the end."""

    def __init__(self, sketch: Sketch | None = None, facts: Mapping[str, Any] | None = None):
        self.sketch = sketch or Sketch()
        self.facts = {"directions": self.sketch.directions, "sketch_seed": self.sketch.seed, **(facts or {})}
        self.steps: list[int] = []
        self.blocks: dict[str, list[Tensor]] = {}
        self.norms: dict[str, list[float]] = {}

    def see(self, step: int, named: Iterable[tuple[str, Tensor]]) -> None:
        """Record the weights after ``step`` updates."""
        sketches, norms = self.sketch(named)
        self.steps.append(step)
        for block, x in sketches.items():
            self.blocks.setdefault(block, []).append(x)
            self.norms.setdefault(block, []).append(norms[block])

    def forget_after(self, step: int) -> None:
        """Drop later records: of a run that is taken up again at ``step``."""
        keep = sum(one <= step for one in self.steps)
        self.steps = self.steps[:keep]
        for block in self.blocks:
            self.blocks[block] = self.blocks[block][:keep]
            self.norms[block] = self.norms[block][:keep]

    def trajectory(self) -> Trajectory:
        """What was recorded. Raises: InputError for fewer than three records."""
        if len(self.steps) < 3:
            raise InputError(f"a trajectory needs at least 3 records, got {len(self.steps)}")
        return Trajectory(
            torch.tensor(self.steps),
            {b: torch.stack(x) for b, x in self.blocks.items()},
            {b: torch.tensor(x, dtype=torch.float64) for b, x in self.norms.items()},
            self.facts,
        )

    def take_up(self, past: Trajectory) -> None:
        """Go on after the records of an earlier part of the run."""
        self.steps = past.steps.tolist()
        self.blocks = {b: list(x.unbind(0)) for b, x in past.blocks.items()}
        self.norms = {b: x.tolist() for b, x in past.norms.items()}
