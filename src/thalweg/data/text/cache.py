"""Tokens of a source in memory-mapped files, made once and checked at every opening."""

import atexit
import errno
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from thalweg.config import cache_folder
from thalweg.data.fingerprint import digest_of
from thalweg.data.text.source import SPLITS
from thalweg.data.text.tokenizer import Tokenizer, from_json
from thalweg.errors import InputError
from thalweg.records.folders import BrokenFolderError, digest_of_file, open_or_make

SCHEMA = 1  # raise when the same text would become other tokens
FILES = {"train.bin", "valid.bin", "tokenizer.json", "meta.json"}
UNFIT = (errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST)  # of the place itself; a full disk is another matter
log = logging.getLogger("thalweg.data")


@dataclass
class TokenCache:
    """Tokens of both splits, read-only and mapped, with the tokenizer that made them and the record of their making."""

    folder: Path
    tokens: dict[str, np.ndarray]
    tokenizer: Tokenizer
    meta: dict[str, Any]
    notes: list[str] = field(default_factory=list)


Build = Callable[[Path], dict[str, Any]]  # writes the files but meta.json into a folder and returns the meta of them


def open_cache(making: dict[str, Any], build: Build, cache_dir: str | Path | None, label: str) -> TokenCache:
    """The cache of what ``making`` describes, built when it is not there.

    The folder is named by the hash of ``making``. It appears whole or not at all (built beside, then renamed); processes that want the
    same one wait for the first. A cache that is cut short or edited is built anew, with a note; a folder that holds anything else is
    refused. Files above 256 MiB are checked by size and by samples.

    Raises: InputError where the folder cannot be written or is not ours.
    """
    making = {"schema": SCHEMA, **making}
    root = cache_folder(cache_dir)
    chosen = bool(cache_dir or os.environ.get("THALWEG_CACHE"))
    name = f"{label}-{digest_of(making)[:20]}"
    try:
        return _open_or_build(root / "text" / name, making, build)
    except OSError as error:
        if not isinstance(error, PermissionError) and error.errno not in UNFIT:
            raise InputError(
                f"the token cache in {root} cannot be written: {error.strerror or error}; make room or give another cache_dir"
            ) from error
        if chosen:
            raise InputError(
                f"the cache folder {root} cannot be written ({error.strerror or error}); give another by cache_dir or THALWEG_CACHE"
            ) from error
        why = error.strerror or str(error)
    aside = Path(tempfile.mkdtemp(prefix="thalweg-cache-"))
    atexit.register(shutil.rmtree, aside, ignore_errors=True)
    made = _open_or_build(aside / name, making, build)
    made.notes.append(_note(f"{root} cannot be written ({why}); tokens are kept in {aside} until this process ends"))
    return made


def _note(text: str) -> str:
    log.warning(text)
    return text


def _check(folder: Path, making: dict[str, Any]) -> TokenCache | None:
    """The cache in ``folder``, None where there is none. Raises: BrokenFolderError for a damaged one, InputError for another thing."""
    if not folder.exists():
        return None
    if not folder.is_dir() or {entry.name for entry in folder.iterdir()} - FILES:
        raise InputError(f"{folder} stands where the token cache goes but is none; move it away")
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        seal = meta.pop("seal")
        if seal != digest_of(meta) or meta["making"] != making:
            raise BrokenFolderError("not what its record says")
        for name, wanted in meta["files"].items():
            if (folder / name).stat().st_size != wanted["bytes"]:
                raise BrokenFolderError(f"cut short ({name})")
            if digest_of_file(folder / name) != wanted["digest"]:
                raise BrokenFolderError(f"changed ({name})")
        tokenizer = from_json((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BrokenFolderError(f"incomplete (no {Path(error.filename).name})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BrokenFolderError("unreadable") from None
    tokens: dict[str, np.ndarray] = {split: np.memmap(folder / f"{split}.bin", meta["dtype"], "r") for split in SPLITS}
    return TokenCache(folder, tokens, tokenizer, meta)


def _open_or_build(folder: Path, making: dict[str, Any], build: Build) -> TokenCache:
    def make(place: Path) -> None:
        meta = {"making": making, **build(place)}
        meta["files"] = {
            path.name: {"bytes": path.stat().st_size, "digest": digest_of_file(path)}
            for path in sorted(place.iterdir())
        }
        text = json.dumps({**meta, "seal": digest_of(meta)}, indent=1, ensure_ascii=False)
        with (place / "meta.json").open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    found, notes = open_or_make(folder, lambda: _check(folder, making), make, "token cache")
    found.notes += notes
    return found
