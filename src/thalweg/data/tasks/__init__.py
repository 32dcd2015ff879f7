"""One file is one kind of data; each registers a function from the rest of its spec to a :class:`thalweg.data.task.Task`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thalweg.data.task import Task
from thalweg.errors import InputError
from thalweg.registry import Registry


@dataclass(frozen=True)
class Request:
    """What :func:`thalweg.data.load` was asked for beside the name."""

    spec: str
    tokenizer: str | Path | None = None
    vocab_size: int | None = None
    cache_dir: str | Path | None = None
    max_bytes: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_bytes", "max_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in ("tokenizer", "cache_dir"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str | Path):
                raise InputError(f"{name} must be a string or a path, got {type(value).__name__}")

    def refuse_text_options(self) -> None:
        """For tasks that make their own tokens. Raises: InputError."""
        given = [
            name for name in ("tokenizer", "vocab_size", "max_bytes", "max_tokens") if getattr(self, name) is not None
        ]
        if given:
            raise InputError(f"{self.spec} makes its own tokens and takes no {' or '.join(given)}; leave it out")


Opener = Callable[[str, Request], Task]
registry: Registry[Opener] = Registry("data", package="thalweg.data.tasks", group="thalweg.tasks")
register = registry.register
