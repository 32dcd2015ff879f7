"""Progress for people: a bar on a terminal, plain lines otherwise; always on stderr, so that stdout holds results only."""

import sys
import time
from types import TracebackType
from typing import TextIO

from thalweg.training.events import Event

EVERY_SECONDS = 10.0  # between plain lines of updates


class Progress:
    """A listener for ``train(..., on_event=...)``; use it in a ``with`` block."""

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream if stream is not None else sys.stderr
        self._bar = None
        self._task = None
        self._spoke = 0.0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __call__(self, event: Event) -> None:
        if event.kind == "start":
            self._say(event.text)
            if self.stream.isatty():
                self._open(event)
        elif event.kind == "step":
            self._step(event)
        elif event.kind == "evaluation":
            self._say(f"step {event.step}: " + "  ".join(f"{name} {value:.4f}" for name, value in event.values.items()))
        elif event.kind == "note":
            self._say(f"note: {event.text}")
        elif event.kind == "change":
            self._say(event.text)
        elif event.kind == "end":
            self._close()
            self._say(f"step {event.step}: {event.text}")

    def _step(self, event: Event) -> None:
        if "train/loss" not in event.values:
            return
        text = f"loss {event.values['train/loss']:.4f}  {event.values['train/tokens_per_second']:,.0f} tokens/s"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=event.step, description=text)
        elif time.monotonic() - self._spoke >= EVERY_SECONDS:
            self._spoke = time.monotonic()
            self._say(f"step {event.step}/{event.steps}: {text}")

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self.stream, flush=True)

    def _open(self, event: Event) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.description}"),
            console=Console(file=self.stream),
        )
        self._bar.start()
        self._task = self._bar.add_task("", total=event.steps, completed=event.step)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None
