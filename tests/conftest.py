"""Set before anything imports torch: one thread a worker (two workers share two cores), a cache of its own, no hub, Ctrl-C heard."""

import errno
import gc
import logging
import os
import signal
import tempfile
from pathlib import Path

import pytest

gc.disable()  # until all tests are collected: a third of that was looking for garbage among a million objects
logging.getLogger(
    "torch.__trace"
).propagate = False  # the compiler's own trace, which pytest would write out for every test: a tenth of it
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault(
    "THALWEG_TEST_OUTER_CACHE", os.environ.get("THALWEG_CACHE", "")
)  # where `make models` put its models
os.environ["THALWEG_CACHE"] = str(Path(tempfile.gettempdir()) / f"thalweg-test-cache-{os.getuid()}")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("FORCE_COLOR", None)

# A shell starts background jobs with SIGINT ignored, and children inherit that; tests that interrupt would then wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def takes_no_files(monkeypatch):
    """A function that makes a folder take no files, as on a mount that is read only, whatever the rights say."""
    real = tempfile.TemporaryFile

    def refuse_in(folder: Path) -> None:
        def make(*args, dir=None, **kwargs):
            if dir is not None and Path(dir) == folder:
                raise OSError(errno.EROFS, "Read-only file system")
            return real(*args, dir=dir, **kwargs)

        monkeypatch.setattr(tempfile, "TemporaryFile", make)

    return refuse_in


def pytest_collection_finish() -> None:
    """What imports and collection made stays to the end: it is never looked through again."""
    gc.collect()
    gc.freeze()
    gc.enable()
