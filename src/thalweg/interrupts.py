"""What ends a long work from outside: SIGTERM is heard as Ctrl-C."""

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that what is done is kept and workers are told; only the main thread may ask for that.

    One that comes inside a finaliser, where Python drops what is raised, comes again a moment later.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def again(lost: Any) -> None:
        if not isinstance(lost.exc_value, KeyboardInterrupt):
            unraisable(lost)
            return
        later = threading.Timer(0.1, _thread.interrupt_main, (signal.SIGTERM,))
        later.daemon = True
        later.start()

    before, unraisable = signal.signal(signal.SIGTERM, stop), sys.unraisablehook
    sys.unraisablehook = again
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        sys.unraisablehook = unraisable
