"""The interface of a tracker: numbers go in, nothing comes back."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Protocol

from thalweg.errors import MissingExtraError


class Happening(Protocol):
    """What a tracker reads of an event of the training loop."""

    @property
    def kind(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def values(self) -> Mapping[str, float]: ...
    @property
    def text(self) -> str: ...


class Tracker:
    """One tool. A subclass opens it in ``__init__`` and overrides :meth:`log` and :meth:`close`.

    run: the run folder; config: plain values; project: the name under which the tool groups runs.
    """

    def __init__(self, run: Path, config: dict[str, Any], project: str):
        self.run, self.config, self.project = run, config, project

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Show named numbers of one step."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it logs")

    def close(self) -> None:
        """Hand over what is still buffered."""


class Trackers:
    """Several trackers as one listener of the training loop, closed with the ``with`` block or at the end of the run."""

    def __init__(self, members: Sequence[Tracker]):
        self.members = list(members)
        self._open = True

    def __call__(self, event: Happening) -> None:
        if event.values and self._open:
            for member in self.members:
                member.log(event.step, event.values)
        if event.kind == "end":
            self.close()

    def close(self) -> None:
        if self._open:
            self._open = False
            for member in self.members:
                member.close()

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package. Raises: MissingExtraError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtraError(module.split(".")[0], extra) from None
