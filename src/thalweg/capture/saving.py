"""A model written as a folder that transformers opens: all of it or nothing."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from thalweg.capture.quiet import hushed
from thalweg.config import check_new
from thalweg.errors import InputError, first_line


def save_folder(
    model: Any, folder: str | Path, *, tokenizer: Any = None, files: Mapping[str, str] | None = None
) -> Path:
    """Write config.json and the weights, the tokenizer, and ``files`` (name -> text) into the new ``folder``.

    tokenizer: of transformers, or one of ours that was trained on a text.
    Raises: InputError for a folder that is in use, or a disk that is full.
    """
    path = check_new(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise InputError(f"{path} cannot be made: {error.strerror or error}") from None
    try:
        with hushed():
            model.save_pretrained(unfinished)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(unfinished)
        elif hasattr(tokenizer, "library_json"):  # one of ours, trained on a text
            (unfinished / "tokenizer.json").write_text(tokenizer.library_json(), encoding="utf-8")
        for name, text in (files or {}).items():
            (unfinished / name).write_text(text, encoding="utf-8")
        unfinished.chmod(0o755)  # temporary folders are private
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise InputError(f"{path} cannot be written: {first_line(error)}; nothing is left there") from None
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return path
