"""Folders that appear whole or not at all, made once for all processes that want them."""

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
WHOLE = 256 * 2**20  # files up to here are hashed whole, larger ones by samples
SAMPLE = 2**20
log = logging.getLogger("thalweg.cache")


class BrokenFolderError(Exception):
    """What is wrong with a folder that was made earlier, in a few words."""


def open_or_make(
    folder: Path, check: Callable[[], T | None], make: Callable[[Path], None], what: str
) -> tuple[T, list[str]]:
    """What ``check`` finds in ``folder``, and notes; where it finds nothing, ``make`` fills a new folder first.

    check: None where nothing is there; raises BrokenFolderError for what is damaged (it is made anew, with a note that calls it
    ``what``) and any other error to refuse. make: gets the folder to fill. It is filled beside its place and then renamed, so that a full
    disk or an interrupt leaves nothing; processes that want the same one wait for the first. Raises: OSError.
    """
    notes: list[str] = []
    try:
        if (found := check()) is not None:
            return found, notes
    except BrokenFolderError as error:
        notes.append(f"the {what} {folder} is {error}; it is made anew")
        log.warning(notes[-1])
    with lock(folder):
        try:
            if (found := check()) is not None:  # another process made it meanwhile
                return found, notes
        except BrokenFolderError:
            shutil.rmtree(folder)
        for left_over in folder.parent.glob(
            f".{folder.name}.making-*"
        ):  # of a process that was killed: the lock is ours
            shutil.rmtree(left_over, ignore_errors=True)
        place = Path(tempfile.mkdtemp(prefix=f".{folder.name}.making-", dir=folder.parent))
        try:
            make(place)
            place.chmod(0o755)  # mkdtemp makes it private
            place.rename(folder)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
    made = check()
    assert made is not None
    return made, notes


def digest_of_file(path: Path) -> str:
    """sha256 of a file; above 256 MiB of its size and 256 evenly spaced samples of 1 MiB."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= WHOLE:
            while block := file.read(SAMPLE):
                digest.update(block)
        else:
            for i in range(256):
                file.seek((size - SAMPLE) * i // 255)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Be the only process that makes ``folder``; others wait. The system gives the lock up when the process ends, however it ends."""
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        held.acquire(timeout=0)
    except Timeout:
        log.info("waiting for another process that makes %s", folder)
        held.acquire()
    try:
        yield
    finally:
        held.release()
