"""Whether the weights of a file are those that a model needs."""

from collections.abc import Mapping
from typing import Any

from thalweg.errors import CheckpointError


def check_fit(info: Mapping[str, Any], where: object) -> None:
    """Of the loading info of transformers. Raises: CheckpointError that names what is missing, left over or of another shape, in one line."""
    shapes = [f"{name} {list(stored)} for {list(own)}" for name, stored, own in info.get("mismatched_keys", ())]
    for problem, found in (
        ("missing keys", info.get("missing_keys")),
        ("unexpected keys", info.get("unexpected_keys")),
        ("mismatched keys", shapes),
    ):
        if found:
            raise CheckpointError(
                f"{where}: {len(found)} {problem} ({few(found)}); the weights do not fit config.json: use the one they were saved with"
            )


def few(names: Any) -> str:
    """The first three names, in order."""
    return ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
