"""Who listens to a run at the command line: a bar or plain lines for the person, trackers for their tools."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from thalweg.training.events import Event, Listener


@contextmanager
def listening(
    *, quiet: bool, trackers: list[str] | None = None, run: str | Path = "", config: dict | None = None
) -> Iterator[Listener | None]:
    """A listener for ``train(..., on_event=...)``, closed at the end; None when nobody listens.

    Raises: UnknownNameError for an unknown tracker; MissingExtraError if its package is not installed.
    """
    with ExitStack() as stack:
        listeners: list[Listener] = []
        if not quiet:
            from thalweg.training.progress import Progress

            listeners.append(stack.enter_context(Progress()))
        if trackers:
            from thalweg import tracking

            listeners.append(stack.enter_context(tracking.create(trackers, run=run, config=config or {})))

        def tell(event: Event) -> None:
            for listener in listeners:
                listener(event)

        yield tell if listeners else None
