"""A converted model on the disk: what Hugging Face loads, its tokenizer, and the proof beside it."""

from pathlib import Path
from typing import Any

from thalweg.capture.saving import save_folder
from thalweg.config import check_new
from thalweg.records import jsonl
from thalweg.surgery.conversion import Conversion

__all__ = ["PROOF", "check_new", "save"]

PROOF = "proof.json"


def save(conversion: Conversion, folder: str | Path, *, tokenizer: Any = None) -> Path:
    """Write config.json, the weights, ``proof.json`` and the tokenizer into the new ``folder``: all of it or nothing.

    Raises: InputError for a folder that is in use, or a disk that is full.
    """
    proof = jsonl.encode(conversion.proof.plain(), indent=2) + "\n"
    return save_folder(conversion.model, folder, tokenizer=tokenizer, files={PROOF: proof})
