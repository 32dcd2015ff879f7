"""The order of training samples: a function of the seed alone, cut into global batches and those into ranks."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from thalweg.errors import CheckpointError, InputError


class Sampler:
    """An endless stream of batches whose whole state is the number of samples served.

    Sample ``g`` is a pure function of (task, split, length, seed, g), so two arms with one seed see the same data in the same order, a
    resumed run goes on exactly, and neither torch's nor NumPy's global generator is touched. ``batch`` is the global batch: rank ``r`` of
    ``world`` gets its ``r``-th slice, so the ranks together see what one process sees, and a run may resume on another number of ranks.

    draw: sample numbers -> ``{"input_ids": [b t], "labels": [b t]}``; identity: what a saved state must agree with.
    """

    def __init__(
        self,
        draw: Callable[[range], dict[str, Tensor]],
        *,
        identity: Mapping[str, Any],
        batch: int,
        rank: int = 0,
        world: int = 1,
    ):
        for what, value, least in (("batch", batch, 1), ("world", world, 1), ("rank", rank, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{what} must be a whole number of at least {least}, got {value!r}")
        if rank >= world:
            raise InputError(f"rank must be below world={world}, got {rank}")
        if batch % world:
            raise InputError(
                f"a global batch of {batch} cannot be shared evenly by {world} processes; choose a multiple of {world}"
            )
        self.batch, self.rank, self.world = batch, rank, world
        self.samples = 0
        self._draw = draw
        self._identity = dict(identity)

    def next(self) -> dict[str, Tensor]:
        """This rank's part of the next global batch: int64 ``input_ids`` and ``labels`` [batch/world, length], -100 not scored."""
        rows = self.batch // self.world
        first = self.samples + self.rank * rows
        out = self._draw(range(first, first + rows))
        self.samples += self.batch
        return out

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    __next__ = next

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; the same on every rank."""
        return {"samples": self.samples, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken. Raises: CheckpointError for a state of other data, length or seed."""
        for key, mine in self._identity.items():
            if key not in state:
                raise CheckpointError(f"the sampler state lacks {key!r}; it was not written by this version")
            if state[key] != mine:
                raise CheckpointError(
                    f"the sampler state was saved with {key}={state[key]!r}, this run has {key}={mine!r}; resume with the same data"
                )
        samples = state.get("samples")
        if not isinstance(samples, int) or isinstance(samples, bool) or samples < 0:
            raise CheckpointError(f"the sampler state has samples={samples!r}, which is no count")
        self.samples = samples
