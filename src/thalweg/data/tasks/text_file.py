"""A text file of one's own."""

import gzip
import hashlib
import lzma
import re
import zlib
from pathlib import Path

from thalweg.config import checked_path
from thalweg.data.tasks import Request, register
from thalweg.data.text.source import TextSource, cap_text, split_block
from thalweg.data.text.task import TextTask, text_task
from thalweg.errors import InputError

VALID_FRACTION = 0.05


@register(
    "text",
    summary="a UTF-8 text file (.xz and .gz are unpacked); its last 5 % is the validation split",
    source="text:FILE or text:FILE,valid=0.1",
)
def text_file(rest: str, request: Request) -> TextTask:
    """Next-token prediction on one file; the validation split is one block at its end, so no window overlaps both."""
    path, fraction = _parse(rest)
    raw = read_bytes(path)
    text = cap_text(decode(raw, path), request.max_bytes)
    if not text.strip():
        raise InputError(f"{path} holds no text")
    source = TextSource(
        name=str(path),
        identity=f"text {hashlib.sha256(raw).hexdigest()}",
        split_rule=f"the last {fraction:g} of the characters, from the next line on",
        splits=split_block(text, fraction, str(path)),
    )
    return text_task(source, request, "text")


def _parse(rest: str) -> tuple[Path, float]:
    named = re.fullmatch(r"(.*?)(?:,valid=([^,]*))?", rest, re.DOTALL)
    assert named is not None
    name, given = named.groups()
    if not name:
        raise InputError("text: needs a file; write text:FILE")
    try:
        fraction = VALID_FRACTION if given is None else float(given)
    except ValueError:
        raise InputError(f"valid must be a number such as 0.05, got {given!r}") from None
    if not 0 < fraction <= 0.5:
        raise InputError(f"valid must be above 0 and at most 0.5, got {fraction:g}")
    return checked_path(name, expand=True), fraction


def read_bytes(path: Path) -> bytes:
    """The bytes of a file, unpacked by its suffix. Raises: InputError that says what is wrong with it."""
    if path.is_char_device() or path.is_block_device():
        raise InputError(f"{path} is a device, which may never end; name a file")
    opener = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix.lower(), open)
    try:
        with opener(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except IsADirectoryError:
        raise InputError(
            f"{path} is a folder; name one file (training takes a folder of data files as --data hf:{path})"
        ) from None
    except PermissionError:
        raise InputError(f"{path} cannot be read: permission denied") from None
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InputError(f"{path} is no whole {path.suffix} file: {error}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None


def decode(raw: bytes, path: Path) -> str:
    """UTF-8 text, a byte-order mark left out. Raises: InputError with the place of the first other byte."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path} is not UTF-8 text (byte {error.start}, line {line}: {error.reason}); convert it, for example with iconv -t UTF-8"
        ) from None
