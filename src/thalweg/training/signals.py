"""Ctrl-C and SIGTERM: the first asks the run to stop after its step, the second stops at once."""

import signal
import threading
from types import FrameType

from thalweg.errors import ExitCode, ThalwegError


class Interrupted(ThalwegError):
    """The run was asked to stop; its last step is saved and it can be resumed."""

    exit_code = ExitCode.INTERRUPTED


class StopRequests:
    """A context in which SIGINT and SIGTERM set :attr:`asked` instead of ending the process.

    The handlers of before come back at the first signal (so that a second one acts at once) and at the end. Outside the main thread no
    handler can be set; there only ``stop`` functions end a run.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exc: object) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # pyright: ignore[reportArgumentType]  # None: set outside Python
        self._before.clear()
