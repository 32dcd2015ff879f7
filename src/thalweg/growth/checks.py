"""What growth asks of its data, said once, one line each."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thalweg.errors import InputError
from thalweg.geometry.checks import one_point
from thalweg.models.look import IGNORED


def check_inputs(x: Tensor, layer: int, prototypes: int | None = None) -> None:
    """Refuse what no direction can be read from. Raises: InputError."""
    where = f"layer {layer}"
    if x.ndim != 2 or x.numel() == 0:
        raise InputError(
            f"{where}: the probe set gives {list(x.shape)} where [tokens width] is needed; give texts that are not empty"
        )
    if not torch.isfinite(x).all():
        raise InputError(f"{where}: the inputs on the probe set hold NaN or infinite values; the network has diverged")
    if one_point(x):
        raise InputError(
            f"{where}: the {len(x)} tokens of the probe set are one and the same vector (up to rounding), which has no directions; "
            "give embeddings that differ"
        )
    if prototypes is not None and len(x) < prototypes:
        raise InputError(
            f"{where}: {prototypes} prototypes need at least as many tokens, the probe set has {len(x)}; give more text or fewer prototypes"
        )


def check_labels(labels: Sequence[int] | Tensor) -> int:
    """The number of classes, those that are not scored (-100) left out. Raises: InputError unless there are two at least."""
    values = sorted(set(labels.flatten().tolist() if isinstance(labels, Tensor) else labels) - {IGNORED})
    if len(values) < 2:
        found = f"only class {values[0]!r}" if values else "no label"
        raise InputError(f"a classifier needs examples of at least two classes, got {found}; give more data, shuffled")
    return len(values)


def check_texts(texts: Sequence[str]) -> None:
    """Raises: InputError that counts the empty ones."""
    empty = sum(not text.strip() for text in texts)
    if not texts or empty:
        raise InputError(
            f"{empty} of {len(texts)} texts are empty; leave them out"
            if texts
            else "there are no texts; give at least one"
        )
