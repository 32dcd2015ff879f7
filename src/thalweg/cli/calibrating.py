"""The text on which a compressor is calibrated, of ``thalweg compress`` and ``thalweg compare --method``."""

from typing import Any

from torch import nn

from thalweg.capture.limits import longest_of, window_length
from thalweg.capture.measure import LENGTH
from thalweg.cli.console import say
from thalweg.compression.calibration import Calibration, calibration_of
from thalweg.data.tasks.austen import training_novels
from thalweg.data.text.tokenizer import token_ids
from thalweg.errors import InputError
from thalweg.evaluation import documents_of

SHIPPED = "the training novels (shipped)"
CHARACTERS = 200_000  # of every shipped novel: all are seen, and none is cut into tokens to its end for a few windows


def calibration_from(
    text: str | None, tokenizer: Any, model: nn.Module, *, samples: int, length: int | None = None, quiet: bool = False
) -> Calibration:
    """Windows of a file, or of the shipped novels that are not held out.

    Raises: InputError for no tokenizer, a file that cannot be read, and windows that the text or the model does not hold.
    """
    if tokenizer is None:
        raise InputError(
            "a calibration needs the tokenizer of the model, and there is none beside it; name a folder that has the right one"
        )
    size = window_length(longest_of(model), length, LENGTH)
    if text is None:
        source = SHIPPED
        texts = [content[:CHARACTERS] for content in training_novels().values()]
    else:
        documents = documents_of(text)
        source = f"{documents.source} (SHA-256 {documents.sha256[:16]})"
        texts = [document.text for document in documents]
    found = calibration_of(texts, lambda one: token_ids(tokenizer, one), samples=samples, length=size, source=source)
    held = f"calibrated on {source}: {len(found.samples)} windows of {size} tokens"
    if len(found.samples) < samples:
        held += f" ({samples} were asked for; the text holds no more)"
    say(held, quiet=quiet)
    return found
