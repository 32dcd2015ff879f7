"""Files that survive a crash: atomic whole-file writes, appends of whole lines, old content kept on a full disk."""

import contextlib
import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path

from thalweg.errors import InputError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def atomic_write_bytes(path: str | Path, data: bytes) -> None:
    """Replace the file at ``path`` by ``data``, or leave it as it was. Missing parent folders are made.

    Written to a temporary file in the same folder, flushed to the disk, then renamed.
    Raises: InputError that names the path when the disk is full or the place cannot be written.
    """
    path = place_of(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            _write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except OSError as error:
        raise _readable(path, error) from error
    finally:  # also on KeyboardInterrupt; after the rename there is nothing left to remove
        with contextlib.suppress(OSError):
            temporary.unlink()


def place_of(path: str | Path) -> Path:
    """Where a file is written: behind a link, what it leads to. Raises: InputError for a device, a pipe or a folder."""
    found = Path(os.path.realpath(path))
    if found.exists() and not found.is_file():
        raise InputError(f"{path} is no file (a device, a pipe or a folder), and is not written over; name a file")
    return found


def atomic_write_text(path: str | Path, text: str) -> None:
    """:func:`atomic_write_bytes` for text, in UTF-8."""
    atomic_write_bytes(path, text.encode("utf-8"))


def append_line(path: str | Path, line: str) -> None:
    """Append one line (without its newline) to a file of JSON lines; see :func:`append_lines`."""
    append_lines(path, (line,))


def append_lines(path: str | Path, lines: Iterable[str], header: str | None = None) -> None:
    """Append whole lines to a file of JSON lines, all or none of them, handed to the system before this returns.

    A file that is new or empty gets the line ``header`` first. What a killed process left unfinished at the end of the
    file is cut off. On a full disk the file keeps its old length. The lines survive the end of the process, not
    necessarily a loss of power (no fsync for each line). One writer at a time.
    Raises: InputError that names the path.
    """
    path = Path(path)
    lines = tuple(lines)
    if any("\n" in line for line in lines):
        raise InputError(f"a record of {path.name} must be one line, got a line break inside it")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            end = _sound_end(descriptor)
            if end == 0 and header is not None:
                lines = (header, *lines)
            data = "".join(f"{line}\n" for line in lines).encode("utf-8")
            try:
                os.lseek(descriptor, end, os.SEEK_SET)
                _write_all(descriptor, data)
            except BaseException:
                with contextlib.suppress(OSError):  # report the first error, not this one
                    os.ftruncate(descriptor, end)
                raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _readable(path, error) from error


def read_bytes(path: str | Path, what: str = "file") -> bytes:
    """The content of a file. Raises: InputError in one line when it is missing, a folder or not readable."""
    path = Path(path)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"no such {what}: {path}") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder, not a {what}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def has_lines(path: str | Path) -> bool:
    """Whether the file exists and holds at least one whole line."""
    try:
        with Path(path).open("rb") as file:
            return file.readline().endswith(b"\n")
    except OSError:
        return False


def is_complete(tail: bytes) -> bool:
    """Whether a last line without newline is a whole JSON value (written by hand) and not a torn write."""
    try:
        json.loads(tail)
    except (ValueError, RecursionError):
        return False
    return True


def _sound_end(descriptor: int) -> int:
    """Length of the file up to the end of its last whole line; ends that line if only the newline is missing."""
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return size
    start, tail = size, b""
    while start > 0 and b"\n" not in tail:
        step = min(1 << 16, start)
        start -= step
        tail = os.pread(descriptor, step, start) + tail
    tail = tail[tail.rfind(b"\n") + 1 :]
    if is_complete(tail):
        os.lseek(descriptor, size, os.SEEK_SET)
        _write_all(descriptor, b"\n")
        return size + 1
    os.ftruncate(descriptor, size - len(tail))
    return size - len(tail)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:  # a nearly full disk may take a part and refuse the rest
        view = view[os.write(descriptor, view) :]


def _readable(path: Path, error: OSError) -> InputError:
    if error.errno in _FULL:
        return InputError(
            f"no space left to write {path}; what stood there before is unchanged; free some space and try again"
        )
    return InputError(
        f"{path} cannot be written: {error.strerror or error}; choose another place or change its permissions"
    )
