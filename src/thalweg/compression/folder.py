"""A compressed model on the disk: a folder of transformers, its tokenizer, and the record."""

from pathlib import Path
from typing import Any

from torch import nn

from thalweg.capture.saving import save_folder
from thalweg.compression.record import RECORD, CompressionRecord
from thalweg.errors import InputError


def save(model: nn.Module, record: CompressionRecord, folder: str | Path, *, tokenizer: Any = None) -> Path:
    """Write the model, its tokenizer and ``thalweg_compression.json`` into the new ``folder``: all of it or nothing.

    A decoder of ours goes into the shell of Hugging Face. Raises: InputError for a folder in use, a full disk, or a model that cannot be saved.
    """
    return save_folder(_shell(model), folder, tokenizer=tokenizer, files={RECORD: record.text()})


def _shell(model: nn.Module) -> Any:
    from thalweg.models import Decoder
    from thalweg.models.hf import in_shell

    if isinstance(model, Decoder):
        return in_shell(model)
    if not hasattr(model, "save_pretrained"):
        raise InputError(
            f"{type(model).__name__} is no model of transformers or thalweg, and is not written to a folder"
        )
    return model
