"""A converted model on the disk: what Hugging Face loads, its tokenizer, and the proof beside it."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from thalweg.config import check_new
from thalweg.errors import InputError, first_line
from thalweg.records import jsonl
from thalweg.surgery.conversion import Conversion

PROOF = "proof.json"


def save(conversion: Conversion, folder: str | Path, *, tokenizer: Any = None) -> Path:
    """Write config.json, the weights, ``proof.json`` and the tokenizer into the new ``folder``: all of it or nothing.

    Raises: InputError for a folder that is in use, or a disk that is full.
    """
    path = check_new(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise InputError(f"{path} cannot be made: {error.strerror or error}") from None
    try:
        conversion.model.save_pretrained(unfinished)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(unfinished)
        elif hasattr(tokenizer, "library_json"):  # one of ours, trained on a text
            (unfinished / "tokenizer.json").write_text(tokenizer.library_json(), encoding="utf-8")
        (unfinished / PROOF).write_text(jsonl.encode(conversion.proof.plain(), indent=2) + "\n", encoding="utf-8")
        unfinished.chmod(0o755)  # temporary folders are private
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise InputError(f"{path} cannot be written: {first_line(error)}; nothing is left there") from None
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return path
